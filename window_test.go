package idem_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

// stalledRenew is a journal whose disk stalls in one renewal.
type stalledRenew struct {
	journal.Journal
	stall func()
}

func (j *stalledRenew) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	j.stall()
	return j.Journal.Renew(ctx, e, n)
}

// Whatever takes long between the last look at the key's age and the send, the
// server never gets a key that it has forgotten.
func TestNothingIsSentAfterTheKeyWindowWhateverTakesLong(t *testing.T) {
	const window, limit = 2 * time.Second, 200 * time.Millisecond
	late := func(after time.Duration) func() { // once, from then on
		start := time.Now()
		var done atomic.Bool
		return func() {
			if time.Since(start) > after && !done.Swap(true) {
				time.Sleep(5 * time.Second) // the machine sleeps
			}
		}
	}
	for place, put := range map[string]func(tr *idem.Transport, sleep func()){
		"a hook": func(tr *idem.Transport, sleep func()) {
			tr.Hooks.AttemptStart = func(context.Context, *idem.Report, int) context.Context { sleep(); return nil }
		},
		"Prepare": func(tr *idem.Transport, sleep func()) {
			tr.Prepare = func(*http.Request) error { sleep(); return nil }
		},
		"the journal": func(tr *idem.Transport, sleep func()) {
			tr.Journal = &stalledRenew{tr.Journal, sleep}
		},
		"the wait": func(tr *idem.Transport, sleep func()) {
			tr.Hooks.Waiting = func(context.Context, *idem.Report, idem.Attempt) { sleep() }
		},
	} {
		for name, body := range map[string]string{"a body": paymentJSON("order-1", 1999), "no body": ""} {
			t.Run(place+" with "+name, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					s.Apply(fakeserver.Settings{Retention: window})
					s.Handle("POST /v1/empty", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						w.WriteHeader(http.StatusCreated)
					}))
					require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
					tr := over(s, func(tr *idem.Transport) {
						tr.Policy.KeyWindow, tr.Policy.AttemptTimeout, tr.Policy.MaxAttempts = window, limit, 100
						tr.Policy.BackoffBase, tr.Policy.BackoffCap = 100*time.Millisecond, 300*time.Millisecond
						tr.Journal = &journal.Memory{Lease: 300 * time.Millisecond}
						put(tr, late(900*time.Millisecond))
					})
					path, rd := "/v1/empty", io.Reader(nil)
					if body != "" {
						path, rd = "/v1/payments", strings.NewReader(body)
					}
					ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "charge", ID: "order-1/1"})
					req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+path, rd)
					require.NoError(t, err)
					_, err = tr.RoundTrip(req)
					require.Len(t, s.Effects(), 1)
					sends := s.Sends()
					require.Less(t, sends[len(sends)-1].At.Sub(sends[0].At), window-limit)
					require.ErrorIs(t, err, idem.ErrKeyExpired)
					require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
					time.Sleep(10 * time.Second) // a renewal may still be stalled
				})
			})
		}
	}
}

// The attempt has no limit that would end it: the last look at each read of the
// body is all that stands between a machine that slept and the send.
func TestBodyIsNotHandedOutAfterTheKeyWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		const window = 2 * time.Second
		s := inMemory(t)
		s.Apply(fakeserver.Settings{Retention: window})
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Send: 1}))
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.KeyWindow, tr.Policy.AttemptTimeout = window, -1
			tr.Journal = &journal.Memory{Lease: time.Hour}
			base, calls := tr.Base, 0
			tr.Base = roundTripFunc(func(req *http.Request) (*http.Response, error) {
				if calls++; calls == 2 {
					time.Sleep(5 * time.Second) // the machine sleeps, behind all checks but that of the body
				}
				return base.RoundTrip(req)
			})
		})
		ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "charge", ID: "order-1/1"})
		_, err := tr.RoundTrip(newPayment(t, ctx, s, "order-1"))
		require.ErrorIs(t, err, idem.ErrKeyExpired)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		require.Len(t, s.Effects(), 1)
		for _, send := range s.Sends()[1:] {
			require.Less(t, send.BodyLen, send.ContentLength, "without its body it can have no effect")
		}
	})
}
