package idem_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

// The halves of the cases that need a memory which outlives a process: here a
// journal, and another Transport over it for the process after a restart.

// --- C14

// The program that comes back after the crash is a newer one: its struct has
// the same fields in another order.
func TestC14_ResumeSendsTheSameBytesAndAnotherBodyIsRefused(t *testing.T) {
	type written struct {
		Amount    int    `json:"amount"`
		Currency  string `json:"currency"`
		Reference string `json:"reference"`
	}
	type reordered struct {
		Currency  string `json:"currency"`
		Amount    int    `json:"amount"`
		Reference string `json:"reference"`
	}
	text := func(v any) string {
		b, err := json.Marshal(v)
		require.NoError(t, err)
		return string(b)
	}
	same, other := text(written{1999, "usd", "order-14"}), text(reordered{"usd", 1999, "order-14"})
	require.JSONEq(t, same, other)
	require.NotEqual(t, same, other)
	for name, edit := range map[string]func(testing.TB) func(*idem.Transport){
		"from the builder": func(testing.TB) func(*idem.Transport) { return func(*idem.Transport) {} },
		"sealed":           func(t testing.TB) func(*idem.Transport) { return sealing(t, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				key := crashAfterTheEffectOf(t, s, m, newPost(t, charging(t.Context(), "order-14"), s.URL()+"/v1/payments", same), edit(t))
				build := func(body string) func(context.Context, journal.Entry) (*http.Request, error) {
					return func(ctx context.Context, _ journal.Entry) (*http.Request, error) {
						return newPost(t, ctx, s.URL()+"/v1/payments", body), nil
					}
				}
				c := idem.NewClient(journalled(s, m, edit(t)))

				_, err := c.Do(newPost(t, charging(t.Context(), "order-14"), s.URL()+"/v1/payments", other))
				require.ErrorIs(t, err, idem.ErrKeyReused)
				require.Len(t, s.Sends(), 1)
				if name != "sealed" {
					sum, err := c.Resume(t.Context(), build(other), nil)
					require.ErrorIs(t, err, idem.ErrKeyReused)
					require.Equal(t, idem.Resumed{Seen: 1, Failed: 1}, sum)
					require.Len(t, s.Sends(), 1)
				}

				sum, err := c.Resume(t.Context(), build(same), nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 2)
				require.Equal(t, []string{key}, keysSent(s.Sends()))
				oneBodyHash(t, s.Sends())
			})
		})
	}
}

// --- C15

// The server is lenient: it replays by key alone, whatever was asked.
func TestC15_OperationBegunAgainWithAnotherRequestIsRefused(t *testing.T) {
	for _, done := range []bool{true, false} {
		for what, second := range map[string]struct{ path, body string }{
			"another amount":   {"/v1/payments", paymentJSON("order-15", 20)},
			"another endpoint": {"/v1/payments/pay_1/refunds", paymentJSON("order-15", 10)},
			"another query":    {"/v1/payments?account=2", paymentJSON("order-15", 10)},
		} {
			t.Run(fmt.Sprintf("%s, done %v", what, done), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					s.Apply(fakeserver.Settings{Lenient: true})
					m := new(journal.Memory)
					tr := journalled(s, m, withAttempts(1))
					if !done {
						require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
					}
					resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), "order-15"), s.URL()+"/v1/payments", paymentJSON("order-15", 10)))
					if done {
						require.NoError(t, err)
						readAll(t, resp)
					} else {
						require.Error(t, err)
					}
					for where, tr := range map[string]*idem.Transport{"a new context": tr, "after a restart": journalled(s, m)} {
						for _, later := range []time.Duration{0, 48 * time.Hour} {
							time.Sleep(later) // the window passes
							_, err := tr.RoundTrip(newPost(t, charging(t.Context(), "order-15"), s.URL()+second.path, second.body))
							require.ErrorIs(t, err, idem.ErrKeyReused, where)
							require.ErrorContains(t, err, "charge/order-15")
							require.ErrorContains(t, err, strings.SplitN(second.path, "?", 2)[0]+" (")
							require.Len(t, s.Sends(), 1)
							require.Len(t, s.Effects(), 1)
							e := entryOf(t, m, "order-15")
							require.Equal(t, done, e.State == journal.Done)
							require.Empty(t, e.Owner)
						}
					}
				})
			})
		}
	}
}

// --- C19

func TestC19_RefusalClosesTheEntryAndTheSameOperationGetsANewKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		resp, err := journalled(s, m).RoundTrip(newPost(t, charging(t.Context(), "order-19"), s.URL()+"/v1/payments", declinedJSON))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Sends(), 1)
		e := entryOf(t, m, "order-19")
		require.Equal(t, journal.Refused, e.State)
		require.False(t, e.Finished.IsZero())
		require.Empty(t, pendingOf(t, idem.NewClient(journalled(s, m))))

		r, err := pay(t, journalled(s, m), s, "order-19") // another card
		require.NoError(t, err)
		require.NotEqual(t, e.Key, r.Key)
		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 2)
	})
}

// No path gives an operation of unknown outcome another key but that of a person
// who abandons it.
func TestC19_UnknownOutcomeKeepsItsKeyUntilItIsAbandoned(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}))
		edit := func(tr *idem.Transport) { tr.Policy.AttemptTimeout = time.Second }
		_, err := pay(t, journalled(s, m, edit), s, "order-19")
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		key := entryOf(t, m, "order-19").Key
		c := idem.NewClient(journalled(s, m, edit))
		for _, path := range []func() error{
			func() error { _, err := pay(t, journalled(s, m, edit), s, "order-19"); return err },
			func() error {
				_, err := c.Do(newPost(t, charging(t.Context(), "order-19"), s.URL()+"/v1/payments", declinedJSON))
				return err
			},
			func() error {
				req := newPayment(t, idem.WithKey(charging(t.Context(), "order-19"), "another"), s, "order-19")
				req.Header.Set("Idempotency-Key", "a third")
				_, err := c.Do(req)
				return err
			},
			func() error { _, err := c.Resume(t.Context(), rebuild(t, s), nil); return err },
			func() error {
				time.Sleep(25 * time.Hour)
				_, err := pay(t, journalled(s, m, edit), s, "order-19")
				return err
			}, // its window
			func() error { _, err := m.Sweep(t.Context(), time.Nanosecond); return err },
		} {
			_ = path()
			e := entryOf(t, m, "order-19")
			require.Equal(t, key, e.Key)
			require.Equal(t, journal.Pending, e.State)
			require.Equal(t, []string{key}, keysSent(s.Sends()))
			require.Len(t, s.Effects(), 1)
		}

		require.NoError(t, c.Abandon(t.Context(), chargeOf("order-19"), "I have reconciled it"))
		s.ClearFaults()
		r, err := pay(t, journalled(s, m, edit), s, "order-19")
		require.NoError(t, err)
		require.NotEqual(t, key, r.Key)
	})
}

// --- C20

func TestC20_EntryGoesOnUnderARotatedCredentialAndNotInAnotherAccount(t *testing.T) {
	account := func(r *http.Request) string {
		name, _, _ := strings.Cut(strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), ".")
		return name
	}
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{KeyPer: fakeserver.PerAccount})
		m := new(journal.Memory)
		with := func(credential string) *idem.Transport {
			return journalled(s, m, func(tr *idem.Transport) {
				tr.Scope = account
				tr.Policy.MaxAttempts = 2
				tr.Prepare = func(r *http.Request) error { r.Header.Set("Authorization", "Bearer "+credential); return nil }
			})
		}
		call := func(tr *idem.Transport, claims string) (*http.Response, error) {
			req := newPayment(t, charging(t.Context(), "order-20"), s, "order-20")
			req.Header.Set("Authorization", "Bearer "+claims)
			return tr.RoundTrip(req)
		}
		require.NoError(t, s.Script("", repeat(2, fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect})...))
		_, err := call(with("one.first"), "one.first")
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		op := journal.Operation{Scope: "one", Name: "charge", ID: "order-20"}
		before, err := m.Get(t.Context(), op)
		require.NoError(t, err)

		// The credential turns out to be another account's.
		_, err = call(with("two.first"), "one.first")
		require.ErrorIs(t, err, idem.ErrScopeChanged)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		now, err := m.Get(t.Context(), op)
		require.NoError(t, err)
		require.Equal(t, journal.Pending, now.State)
		require.Empty(t, now.Owner)
		require.False(t, now.Clear)
		require.Equal(t, before.FirstSend, now.FirstSend)
		require.Len(t, s.Sends(), 2)
		build := func(credential string) func(context.Context, journal.Entry) (*http.Request, error) {
			return func(ctx context.Context, _ journal.Entry) (*http.Request, error) {
				req := newPayment(t, ctx, s, "order-20")
				req.Header.Set("Authorization", "Bearer "+credential)
				return req, nil
			}
		}
		sum, err := idem.NewClient(with("two.first")).Resume(t.Context(), build("two.first"), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum)
		require.Len(t, s.Sends(), 2)

		sum, err = idem.NewClient(with("one.second")).Resume(t.Context(), build("one.second"), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 3)
		require.Equal(t, []string{before.Key}, keysSent(s.Sends()))
	})
}

// --- C21

func TestC21_SameOperationOfTwoTenantsIsTwoEntries(t *testing.T) {
	for _, sealed := range []bool{false, true} {
		t.Run(fmt.Sprintf("sealed %v", sealed), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				s.Apply(fakeserver.Settings{KeyPer: fakeserver.PerAccount})
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: time.Second}))
				m := new(journal.Memory)
				start := func() *idem.Transport {
					return journalled(s, m, func(tr *idem.Transport) {
						tr.Scope = func(r *http.Request) string { return r.Header.Get("Authorization") }
						if sealed {
							sealing(t, 1)(tr)
						}
					})
				}
				call := func(tr *idem.Transport, tenant string) (string, error) {
					req := newPost(t, charging(context.Background(), "order-1"), s.URL()+"/v1/payments", paymentJSON("of "+tenant, len(tenant)))
					req.Header.Set("Authorization", "Bearer "+tenant+".secret")
					resp, err := tr.RoundTrip(req)
					if err != nil {
						return "", err
					}
					defer func() { _ = resp.Body.Close() }()
					text, err := io.ReadAll(resp.Body)
					return string(text), err
				}
				tenants := []string{"one", "three"}
				tr := start()
				for range 2 { // at once, and again after a restart
					began := time.Now()
					answers := make([]string, 2)
					var group sync.WaitGroup
					for i, tenant := range tenants {
						group.Go(func() {
							var err error
							if answers[i], err = call(tr, tenant); err != nil {
								t.Error(err)
							}
						})
					}
					group.Wait()
					require.LessOrEqual(t, time.Since(began), time.Second, "they do not wait for each other")
					for i, tenant := range tenants {
						require.Contains(t, answers[i], "of "+tenant)
					}
					require.Len(t, s.Effects(), 2)
					require.Len(t, keysSent(s.Sends()), 2)
					tr = start()
				}
				keys := map[string]bool{}
				for _, tenant := range tenants {
					e, err := m.Get(t.Context(), journal.Operation{Scope: "Bearer " + tenant + ".secret", Name: "charge", ID: "order-1"})
					require.NoError(t, err)
					require.Equal(t, journal.Done, e.State)
					keys[e.Key] = true
				}
				require.Len(t, keys, 2)
			})
		})
	}
}

// --- C24

func TestC24_EntryOfALockThatIsNeverReleasedStaysPending(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{InProgressRetryAfter: "2"})
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Stuck, Delay: time.Hour}))
		m := new(journal.Memory)
		edit := func(tr *idem.Transport) {
			tr.Policy.MaxAttempts, tr.Policy.MaxInProgress, tr.Policy.MaxElapsed = 1000, 1000, 10*time.Second
		}
		start := time.Now()
		_, err := pay(t, journalled(s, m, edit), s, "c24")
		require.ErrorIs(t, err, idem.ErrInProgress)
		require.LessOrEqual(t, time.Since(start), 10*time.Second)
		e := entryOf(t, m, "c24")
		require.Equal(t, journal.Pending, e.State)
		require.Equal(t, 409, e.Status)
		require.False(t, e.Clear)
		require.Empty(t, e.Owner)
		c := idem.NewClient(journalled(s, m, edit))
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Unknown: 1}, sum)

		s.Advance(2 * time.Hour)
		sum, err = c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, []string{e.Key}, keysSent(s.Sends()))
	})
}

// --- C25

func TestC25_EntryOfAReusedKeyStaysPendingWithItsKey(t *testing.T) {
	for name, first := range map[string][]providerStep{"at the first attempt": nil, "after a lost answer": {hangsUp}} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, append(first, says(422, reusedKeyProblem))...)
				m := new(journal.Memory)
				for n := range 3 {
					_, err := idem.NewClient(p.through(remembering(m))).Do(newPost(t, charging(t.Context(), "c25"), p.url+"/charges", `{"amount":1}`))
					require.ErrorIs(t, err, idem.ErrKeyReused)
					require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
					e := entryOf(t, m, "c25")
					require.Equal(t, journal.Pending, e.State)
					require.False(t, e.Clear)
					require.Equal(t, 422, e.Status)
					require.Empty(t, e.Owner)
					sends := p.sends()
					require.Len(t, sends, len(first)+1+n)
					for _, send := range sends {
						require.Equal(t, []string{e.Key}, send.keys)
					}
				}
			})
		})
	}
}

func TestC25_PlainValidationErrorDoesNotCloseTheEntry(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t, says(422, `{"type":"https://provider.test/problems/validation"}`))
		m := new(journal.Memory)
		resp, err := idem.NewClient(p.through(remembering(m))).Do(newPost(t, charging(t.Context(), "c25"), p.url+"/charges", `{"amount":1}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, idem.Refused, idem.OutcomeOf(resp, nil))
		e := entryOf(t, m, "c25")
		require.Equal(t, journal.Pending, e.State, "only an answer of the operation itself makes it refused")
		require.True(t, e.Clear)
	})
}

// --- C27

func TestC27_EntryIsDoneAfterTheReplayOfSuccess(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503, Point: fakeserver.AfterEffect}))
		r, err := pay(t, journalled(s, m), s, "c27")
		require.NoError(t, err)
		require.Equal(t, idem.Executed, r.Outcome)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2)
		e := entryOf(t, m, "c27")
		require.Equal(t, journal.Done, e.State)
		require.Equal(t, 201, e.Status)
		require.Equal(t, s.Effects()[0].ID, e.Reference)
		require.Equal(t, 2, e.Attempts)
	})
}

// --- C28

func TestC28_OnlySuccessClosesAnEntryAsDone(t *testing.T) {
	for status := 200; status < 600; status++ {
		if status == http.StatusSwitchingProtocols || status >= 512 && status < 590 {
			continue
		}
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				m := new(journal.Memory)
				w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
					if n == 1 {
						return nil, io.ErrUnexpectedEOF // the answer to the first is lost
					}
					return answer(req, status, nil, ""), nil
				}}
				resp, err := onWire(w, remembering(m)).RoundTrip(newPost(t, charging(t.Context(), "c28"), wireURL, `{}`))
				require.NoError(t, err)
				readAll(t, resp)
				want := journal.Pending
				switch {
				case status/100 == 2, status == http.StatusSeeOther:
					want = journal.Done
				case status == http.StatusPaymentRequired: // the dialect lists it
					want = journal.Refused
				}
				e := entryOf(t, m, "c28")
				require.Equal(t, want, e.State)
				require.False(t, e.Clear)
				require.Equal(t, want == journal.Done, idem.OutcomeOf(resp, nil) == idem.Executed)
			})
		})
	}
}

// A code that nobody has seen before is no success, and no refusal either.
func TestC28_CodeNeverSeenBeforeIsNoSuccess(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		statuses := []int{402, 460, 460}
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			return answer(req, statuses[n-1], nil, ""), nil
		}}
		states := []journal.State{journal.Refused, journal.Pending, journal.Pending}
		for n, want := range states {
			resp, err := onWire(w, remembering(m)).RoundTrip(newPost(t, charging(t.Context(), "c28"), wireURL, `{}`))
			require.NoError(t, err)
			readAll(t, resp)
			require.Equal(t, statuses[n], resp.StatusCode)
			require.NotEqual(t, idem.Executed, idem.OutcomeOf(resp, nil))
			require.Equal(t, want, entryOf(t, m, "c28").State)
		}
	})
}

// --- C39

func TestC39_EntryIsPendingAfterTheClientsTimeout(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang, Times: 2}))
		tr := journalled(s, m, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
		start := time.Now()
		_, err := (&http.Client{Transport: tr, Timeout: 150 * time.Millisecond}).Do(newPayment(t, charging(t.Context(), "c39"), s, "c39"))
		require.Error(t, err)
		require.Less(t, time.Since(start), 180*time.Millisecond)
		e := entryOf(t, m, "c39")
		require.Equal(t, journal.Pending, e.State)
		require.Empty(t, e.Owner)
		require.Equal(t, 2, e.Attempts)
		sum, err := idem.NewClient(journalled(s, m)).Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, []string{e.Key}, keysSent(s.Sends()))
	})
}

// --- C40

func TestC40_ResumeBringsTheAnswerOfAnOperationThatWasCancelled(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Delay: 200 * time.Millisecond}))
		ctx, cancel := context.WithCancel(charging(t.Context(), "c40"))
		time.AfterFunc(50*time.Millisecond, cancel)
		_, err := idem.NewClient(journalled(s, m)).Do(newPayment(t, ctx, s, "c40"))
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		e := entryOf(t, m, "c40")
		require.Equal(t, journal.Pending, e.State)
		require.False(t, e.Clear)
		require.Empty(t, e.Owner)

		var body string
		sum, err := idem.NewClient(journalled(s, m)).Resume(t.Context(), rebuild(t, s), func(_ journal.Entry, resp *http.Response) error {
			require.Equal(t, 201, resp.StatusCode)
			body = readAll(t, resp)
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Contains(t, body, s.Effects()[0].ID)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2)
		require.Equal(t, []string{e.Key}, keysSent(s.Sends()))
		oneBodyHash(t, s.Sends())
		require.Equal(t, journal.Done, entryOf(t, m, "c40").State)
	})
}

// --- C47

// Memory keeps a compact record of each finished operation until its time is
// over, and nothing else is kept anywhere.
func TestC47_FinishedOperationsLeaveOnlyCompactEntries(t *testing.T) {
	const workers = 50
	operations := 50_000
	if raceDetector {
		operations = 10_000 // it makes each ten times as long
	}
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		base := roundTripFunc(func(req *http.Request) (*http.Response, error) {
			_ = req.Body.Close()
			return answer(req, 201, jsonType(), `{"id":"pay_1234567890"}`), nil
		})
		tr := onWire(base, remembering(m))
		u, err := url.Parse(wireURL)
		require.NoError(t, err)
		run := func(from, to int) {
			var group sync.WaitGroup
			for w := range workers {
				group.Go(func() {
					for i := from + w; i < to; i += workers {
						req := (&http.Request{Method: http.MethodPost, URL: u, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{}")), ContentLength: 2}).
							WithContext(charging(context.Background(), "order-"+strconv.Itoa(i)))
						resp, err := tr.RoundTrip(req)
						if err != nil || idem.OutcomeOf(resp, nil) != idem.Executed {
							t.Errorf("operation %d: %v", i, err)
						}
					}
				})
			}
			group.Wait()
		}
		run(0, 1000)
		time.Sleep(25 * time.Hour) // their window
		_, err = m.Sweep(t.Context(), 25*time.Hour)
		require.NoError(t, err)
		before := heapInUse()
		run(1000, operations)
		each := (heapInUse() - before) / int64(operations-1000)
		require.Less(t, each, int64(900), "bytes for each finished operation")
		time.Sleep(25 * time.Hour) // their window
		swept, err := m.Sweep(t.Context(), 25*time.Hour)
		require.NoError(t, err)
		require.Equal(t, journal.Swept{Deleted: operations - 1000}, swept)
		left := (heapInUse() - before) / int64(operations-1000)
		require.Less(t, left, int64(200), "bytes for each deleted operation: the room of the map")
		runtime.KeepAlive(tr)
		runtime.KeepAlive(m)
	})
}

// What is stored under the Seal goes after the window.
func TestC47_SweepTakesTheStoredBodies(t *testing.T) {
	virtual(t, func(t *testing.T) {
		const operations = 200
		m := new(journal.Memory)
		w := roundTripFunc(func(req *http.Request) (*http.Response, error) {
			_ = req.Body.Close()
			return answer(req, 201, jsonType(), `{"more":"`+strings.Repeat("m", 100<<10)+`"}`), nil
		})
		tr := onWire(w, remembering(m), sealing(t, 1))
		before := heapInUse()
		for i := range operations {
			resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), strconv.Itoa(i)), wireURL, strings.Repeat("r", 100<<10)))
			require.NoError(t, err)
			readAll(t, resp)
		}
		require.Greater(t, heapInUse()-before, int64(operations*200<<10))
		time.Sleep(25 * time.Hour) // their window
		swept, err := m.Sweep(t.Context(), 0)
		require.NoError(t, err)
		require.Equal(t, journal.Swept{Emptied: operations}, swept)
		require.Less(t, heapInUse()-before, int64(2<<20))
		runtime.KeepAlive(m)
	})
}

// --- C81

// everything is all that a journal hears, as text: what it could write into a
// file.
func (w *watched) everything() string {
	var b strings.Builder
	for _, s := range w.heard() {
		fmt.Fprintf(&b, "%s %+v\n%+v\n%+v\n%+v\n%v\n", s.name, s.intent, s.entry, s.returned, s.note, s.err)
		for _, bytes := range [][]byte{s.intent.Request, s.intent.Content, s.note.Answer, s.entry.Request, s.entry.Answer, s.returned.Request, s.returned.Answer} {
			b.Write(bytes) // as they are; %+v has printed numbers
			b.WriteByte('\n')
		}
	}
	return b.String()
}

func TestC81_NothingOfTheSecretsReachesTheJournal(t *testing.T) {
	for name, edit := range map[string]func(testing.TB) func(*idem.Transport){
		"bare":   func(testing.TB) func(*idem.Transport) { return func(*idem.Transport) {} },
		"sealed": func(t testing.TB) func(*idem.Transport) { return sealing(t, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				told := &telling{}
				j := watch(new(journal.Memory))
				statuses := []int{503, 503, 500, 502, 401, 201}
				w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
					if n == 7 {
						return nil, fmt.Errorf("cannot send to %s with %v", req.URL, req.Header)
					}
					body := `{"id":"pay_1","echo":"` + secretBody + secretQuery + `"}`
					h := jsonType()
					h.Set("Set-Cookie", "session="+secretCookie)
					return answer(req, statuses[min(n-1, len(statuses)-1)], h, body), nil
				}}
				hooks := told.hooks()
				logged := idem.SlogHooks(told.logger(true))
				hooks.Resumed = func(ctx context.Context, op journal.Operation, r idem.Resumed) {
					logged.Resumed(ctx, op, r)
					told.print("Resumed", op)
					told.print("Resumed", r)
				}
				tr := onWire(w, remembering(j), edit(t), func(tr *idem.Transport) { tr.Hooks = hooks })
				for range 3 { // four failures; a 401 and then nothing; the replay, or the stored answer
					resp, err := tr.RoundTrip(secretive(t, charging(t.Context(), "c81"), "http://api.test"))
					if err != nil {
						told.failure("RoundTrip", err)
						continue
					}
					_, err = io.ReadAll(resp.Body)
					require.NoError(t, err)
					told.print("report", idem.ReportOf(resp))
				}
				require.NotEmpty(t, j.heard("Finish"))
				text := j.everything()
				require.Contains(t, text, "charge", "it does print")
				require.Equal(t, name == "sealed", len(j.heard("Begin")[0].intent.Request) > 0)
				require.Equal(t, name == "sealed", len(j.heard("Finish")[0].note.Answer) > 0)
				requireNoSecrets(t, "the journal", text)
				requireToldNothing(t, "logs and hooks", told.String())
			})
		})
	}
}

// Credentials are not even in what is sealed: they are got again.
func TestC81_NothingIsSealedThatMayBeACredential(t *testing.T) {
	virtual(t, func(t *testing.T) {
		clear := &clearText{}
		m := new(journal.Memory)
		tr := onWire(&wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			h := jsonType()
			h.Set("Set-Cookie", "session="+secretCookie)
			return answer(req, 201, h, `{"id":"pay_1"}`), nil
		}}, remembering(m), func(tr *idem.Transport) { tr.Seal = clear })
		resp, err := tr.RoundTrip(secretive(t, charging(t.Context(), "c81"), "http://api.test"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, clear.sealed, 2)
		text := strings.Join(clear.sealed, "\n")
		require.Contains(t, text, "application/json", "it is not empty")
		for _, secret := range []string{secretPassword, "merchant-user", secretBearer, secretCookie} {
			require.NotContains(t, text, secret)
		}
	})
}

// clearText is an AEAD that hides nothing.
type clearText struct{ sealed []string }

func (c *clearText) NonceSize() int { return 12 }
func (c *clearText) Overhead() int  { return 0 }
func (c *clearText) Seal(dst, _, plain, _ []byte) []byte {
	c.sealed = append(c.sealed, string(plain))
	return append(dst, plain...)
}
func (c *clearText) Open(dst, _, sealed, _ []byte) ([]byte, error) {
	return append(dst, sealed...), nil
}

func TestC81_NothingOfTheSecretsIsInTheErrorsOfAResume(t *testing.T) {
	for name, c := range map[string]struct {
		serve func(req *http.Request) (*http.Response, error)
		body  string // that build makes
		err   bool
	}{
		"another body": {nil, "{}", true},
		"a redirect that cannot be followed": {func(req *http.Request) (*http.Response, error) {
			return answer(req, 307, http.Header{"Location": {"http://[::1/?access=" + secretQuery}}, ""), nil
		}, "", false},
		"a 303 that cannot be followed": {func(req *http.Request) (*http.Response, error) {
			return answer(req, 303, http.Header{"Location": {"http://[::1/?access=" + secretQuery}}, ""), nil
		}, "", true},
		"a base that quotes": {quotingBase{}.RoundTrip, "", false},
		"an answer that breaks off": {func(req *http.Request) (*http.Response, error) {
			return chunkedAnswer(req, "text/plain", io.NopCloser(errorReader{errors.New("it broke off")})), nil
		}, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				told := &telling{}
				m := new(journal.Memory)
				w := &wire{}
				if c.serve != nil {
					w.serve = func(_ int, req *http.Request) (*http.Response, error) { return c.serve(req) }
				}
				cl := idem.NewClient(onWire(w, remembering(m), func(tr *idem.Transport) { tr.Hooks = told.hooks() }))
				enlistRequest(t, cl, m, secretive(t, charging(t.Context(), "c81"), "http://api.test"))
				sum, err := cl.Resume(t.Context(), func(ctx context.Context, _ journal.Entry) (*http.Request, error) {
					req := secretive(t, ctx, "http://api.test")
					if c.body != "" {
						req.Body, req.ContentLength = io.NopCloser(strings.NewReader(c.body)), int64(len(c.body))
						req.GetBody = nil
					}
					return req, nil
				}, nil)
				require.Equal(t, c.err, err != nil, "%v", err)
				if err != nil {
					told.failure("Resume", err)
				}
				told.print("sum", sum)
				slog.New(slog.NewTextHandler(told, nil)).Info("resumed", "sum", sum)
				requireToldNothing(t, name, told.String())
				require.Equal(t, 1, sum.Seen)
				require.Equal(t, journal.Pending, entryOf(t, m, "c81").State)
			})
		})
	}
}
