package idem_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

// shop is what the fake server says of itself: what it declines, where its ids
// are, and how long it remembers a key.
func shop() idem.Dialect {
	d := idem.Generic
	d.Refusal = []idem.Mark{{Status: 402}, {Status: 422, Pointer: "/type", Contains: "sold-out"}}
	d.Reference, d.KeyWindow = []string{"/id"}, 24*time.Hour
	return d
}

// remembering gives a Transport the journal j. Another Transport over the same
// journal is the process after a restart, or its neighbour.
func remembering(j journal.Journal) func(*idem.Transport) {
	return func(tr *idem.Transport) { tr.Dialect, tr.Journal = shop(), j }
}

// journalled is a Transport for s over j with the policy of the cases.
func journalled(s *fakeserver.Server, j journal.Journal, edit ...func(*idem.Transport)) *idem.Transport {
	return over(s, append([]func(*idem.Transport){remembering(j)}, edit...)...)
}

// charging is a context for one call of the operation charge/id.
func charging(ctx context.Context, id string) context.Context {
	return idem.WithOperation(ctx, idem.Operation{Name: "charge", ID: id})
}

func chargeOf(id string) journal.Operation { return journal.Operation{Name: "charge", ID: id} }

// entryOf is what j has of charge/id.
func entryOf(t testing.TB, j journal.Journal, id string) journal.Entry {
	t.Helper()
	e, err := j.Get(context.Background(), chargeOf(id))
	require.NoError(t, err)
	return e
}

// pay calls charge/id once, with a payment whose reference is id, in a context of
// its own.
func pay(t testing.TB, tr *idem.Transport, s *fakeserver.Server, id string) (idem.Report, error) {
	t.Helper()
	var r idem.Report
	resp, err := idem.NewClient(tr).Do(newPayment(t, idem.WithReport(charging(context.Background(), id), &r), s, id))
	if err == nil {
		readAll(t, resp)
	}
	return r, err
}

// step is one call of a journal.
type step struct {
	name     string // Begin, Renew, Finish, Release, Decide, Get, Pending
	op       journal.Operation
	intent   journal.Intent
	entry    journal.Entry // that was given
	state    journal.State
	note     journal.Note
	returned journal.Entry
	err      error
	at       time.Time
}

// watched is a journal that is watched and gets into trouble.
type watched struct {
	journal.Journal
	// trouble fails a step before anything is written; nil: none does.
	trouble func(name string, op journal.Operation) error
	// lost fails a step after it was written; nil: none does.
	lost func(name string, op journal.Operation) error

	mu    sync.Mutex // guards what follows
	steps []step
	dead  bool
}

var (
	errDisk  = errors.New("the disk is full")
	errCrash = errors.New("the process has ended")
)

// watch puts a watched journal over j.
func watch(j journal.Journal) *watched { return &watched{Journal: j} }

// crash is the end of the process: from now on nothing that it does is written.
// Its claims hold until their leases end.
func (w *watched) crash() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead = true
}

func (w *watched) do(s step, f func() (journal.Entry, error)) (journal.Entry, error) {
	s.at = time.Now()
	w.mu.Lock()
	dead := w.dead
	w.mu.Unlock()
	switch {
	case dead:
		s.err = errCrash
	case w.trouble != nil:
		s.err = w.trouble(s.name, s.op)
	}
	if s.err == nil {
		s.returned, s.err = f()
		if w.lost != nil && s.err == nil {
			s.err = w.lost(s.name, s.op)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.steps = append(w.steps, s)
	return s.returned, s.err
}

func (w *watched) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	return w.do(step{name: "Begin", op: in.Operation, intent: in}, func() (journal.Entry, error) { return w.Journal.Begin(ctx, in) })
}

func (w *watched) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return w.do(step{name: "Renew", op: e.Operation, entry: e, note: n}, func() (journal.Entry, error) { return w.Journal.Renew(ctx, e, n) })
}

func (w *watched) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	return w.do(step{name: "Finish", op: e.Operation, entry: e, state: s, note: n}, func() (journal.Entry, error) { return w.Journal.Finish(ctx, e, s, n) })
}

func (w *watched) Release(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return w.do(step{name: "Release", op: e.Operation, entry: e, note: n}, func() (journal.Entry, error) { return w.Journal.Release(ctx, e, n) })
}

func (w *watched) Decide(ctx context.Context, op journal.Operation, d journal.Decision) (journal.Entry, error) {
	return w.do(step{name: "Decide", op: op}, func() (journal.Entry, error) { return w.Journal.Decide(ctx, op, d) })
}

func (w *watched) Get(ctx context.Context, op journal.Operation) (journal.Entry, error) {
	return w.do(step{name: "Get", op: op}, func() (journal.Entry, error) { return w.Journal.Get(ctx, op) })
}

// heard is the steps so far, those with one of the names or all.
func (w *watched) heard(names ...string) []step {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []step
	for _, s := range w.steps {
		if len(names) == 0 || slices.Contains(names, s.name) {
			all = append(all, s)
		}
	}
	return all
}

// failing fails the steps with one of the names, or all.
func failing(err error, names ...string) func(string, journal.Operation) error {
	return func(name string, _ journal.Operation) error {
		if len(names) == 0 || slices.Contains(names, name) {
			return err
		}
		return nil
	}
}

// --- before the first byte

func TestKeyIsInTheJournalBeforeTheFirstByteIsSent(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		var atTheServer []journal.Entry
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			e := entryOf(t, m, "1")
			atTheServer = append(atTheServer, e)
			require.Equal(t, e.Key, req.Header.Get("Idempotency-Key"))
			if n < 3 {
				return answer(req, 500, nil, ""), nil
			}
			return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
		}}
		resp, err := onWire(w, remembering(m)).RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, atTheServer, 3)
		for _, e := range atTheServer {
			require.Equal(t, journal.Pending, e.State)
			require.True(t, e.Claimed(time.Now()))
			require.False(t, e.FirstSend.IsZero())
		}
		e := entryOf(t, m, "1")
		require.Equal(t, journal.Done, e.State)
		require.Equal(t, 3, e.Attempts)
		require.Equal(t, 201, e.Status)
		require.Equal(t, "pay_1", e.Reference)
		require.Empty(t, e.Owner)
		require.Equal(t, "journal", idem.ReportOf(resp).KeyFrom)
		require.Equal(t, "pay_1", idem.ReportOf(resp).Reference)
	})
}

func TestJournalThatCannotWriteMeansThatNothingIsSent(t *testing.T) {
	inTrouble := func(err error, names ...string) func() journal.Journal {
		return func() journal.Journal {
			w := watch(new(journal.Memory))
			w.trouble = failing(err, names...)
			return w
		}
	}
	for name, c := range map[string]struct {
		journal func() journal.Journal
		cause   error
	}{
		"the disk is full":        {inTrouble(errDisk, "Begin"), errDisk},
		"latched":                 {inTrouble(journal.ErrLatched), journal.ErrLatched},
		"a time limit of its own": {inTrouble(context.DeadlineExceeded, "Begin"), context.DeadlineExceeded},
		"written, but that is not known": {func() journal.Journal {
			w := watch(new(journal.Memory))
			w.lost = failing(errDisk, "Begin")
			return w
		}, errDisk},
		"no room": {func() journal.Journal {
			m := &journal.Memory{Max: 1}
			if _, err := m.Begin(context.Background(), journal.Intent{Operation: chargeOf("other"), Key: "a", NextKey: "b"}); err != nil {
				panic(err)
			}
			return m
		}, journal.ErrFull},
	} {
		for _, door := range []string{"RoundTrip", "Do"} {
			t.Run(name+", "+door, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					tr := journalled(s, c.journal())
					body := &closeCounter{Reader: strings.NewReader(paymentJSON("1", 1))}
					req, err := http.NewRequestWithContext(charging(t.Context(), "1"), "POST", s.URL()+"/v1/payments", body)
					require.NoError(t, err)
					start := time.Now()
					if door == "Do" {
						_, err = idem.NewClient(tr).Do(req)
					} else {
						_, err = tr.RoundTrip(req)
					}
					require.Empty(t, s.Sends())
					require.ErrorIs(t, err, idem.ErrJournal)
					require.ErrorIs(t, err, c.cause)
					require.ErrorContains(t, err, "this call sent nothing")
					require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err), "only the journal knows what earlier calls did")
					require.EqualValues(t, 1, body.closes.Load())
					require.Zero(t, time.Since(start))
				})
			})
		}
	}
}

func TestJournalNeedsKeysAndAKeyWindow(t *testing.T) {
	for name, c := range map[string]struct {
		dialect idem.Dialect
		names   []string
	}{
		"a dialect that states no window": {idem.Generic, []string{"Policy.KeyWindow", "generic", "documentation"}},
		"a dialect without keys":          {idem.NoKeys, []string{"Transport.Journal", "no-keys"}},
	} {
		t.Run(name, func(t *testing.T) {
			j := watch(new(journal.Memory))
			w := &wire{}
			tr := onWire(w, func(tr *idem.Transport) { tr.Dialect, tr.Journal = c.dialect, j })
			body := &closeCounter{Reader: strings.NewReader("{}")}
			req, err := http.NewRequestWithContext(charging(t.Context(), "1"), "POST", wireURL, body)
			require.NoError(t, err)
			_, err = idem.NewClient(tr).Do(req)
			require.ErrorIs(t, err, idem.ErrInvalid)
			for _, name := range c.names {
				require.ErrorContains(t, err, name)
			}
			require.Empty(t, w.seen())
			require.Empty(t, j.heard())
			require.EqualValues(t, 1, body.closes.Load())
		})
	}
}

func TestWindowOfThePolicyIsEnoughForAJournal(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		r, err := pay(t, over(s, func(tr *idem.Transport) { tr.Journal, tr.Policy.KeyWindow = m, time.Hour }), s, "1")
		require.NoError(t, err)
		require.Equal(t, idem.Executed, r.Outcome)
		require.Equal(t, time.Hour, entryOf(t, m, "1").Window)
	})
}

func TestOnlyNamedOperationsTouchTheJournal(t *testing.T) {
	for name, c := range map[string]struct {
		method string
		with   func(*http.Request) *http.Request
	}{
		"a fresh key":          {"POST", func(r *http.Request) *http.Request { return r }},
		"a key of the context": {"POST", func(r *http.Request) *http.Request { return r.WithContext(idem.WithKey(r.Context(), "k")) }},
		"a key header":         {"POST", func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", "k"); return r }},
		"a read of a name":     {"GET", func(r *http.Request) *http.Request { return r.WithContext(charging(r.Context(), "1")) }},
		"a DELETE of a name":   {"DELETE", func(r *http.Request) *http.Request { return r.WithContext(charging(r.Context(), "1")) }},
		"a name with keys off": {"POST", func(r *http.Request) *http.Request { return r.WithContext(idem.WithoutKey(charging(r.Context(), "1"))) }},
		"a name that is too long": {"POST", func(r *http.Request) *http.Request {
			return r.WithContext(charging(r.Context(), strings.Repeat("1", 256)))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				j := watch(new(journal.Memory))
				w := &wire{}
				req := c.with(newPost(t, t.Context(), wireURL, `{}`))
				req.Method = c.method
				resp, err := onWire(w, remembering(j)).RoundTrip(req)
				if err == nil {
					readAll(t, resp)
				} else {
					require.ErrorIs(t, err, idem.ErrInvalid)
				}
				require.Empty(t, j.heard())
			})
		})
	}
}

// --- after the answer

// The answer stands, and the entry stays pending: the next resume asks for the
// replay.
func TestJournalThatFailsAtTheEndTakesNoAnswerAway(t *testing.T) {
	for name, trouble := range map[string]func(*watched, func(string, journal.Operation) error){
		"not written":                    func(w *watched, f func(string, journal.Operation) error) { w.trouble = f },
		"written, but that is not known": func(w *watched, f func(string, journal.Operation) error) { w.lost = f },
	} {
		for _, door := range []string{"RoundTrip", "Do"} {
			t.Run(name+", "+door, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					m := new(journal.Memory)
					j := watch(m)
					trouble(j, failing(errDisk, "Finish"))
					tr := journalled(s, j)
					req := newPayment(t, charging(t.Context(), "1"), s, "1")
					var resp *http.Response
					var err error
					if door == "Do" {
						resp, err = idem.NewClient(tr).Do(req)
					} else {
						resp, err = tr.RoundTrip(req)
					}
					require.NoError(t, err)
					require.Equal(t, 201, resp.StatusCode)
					require.Contains(t, readAll(t, resp), "pay_1")
					r := idem.ReportOf(resp)
					require.Equal(t, idem.Executed, r.Outcome)
					require.ErrorIs(t, r.Reason, idem.ErrJournal)
					require.ErrorIs(t, r.Reason, errDisk)

					sum, err := idem.NewClient(journalled(s, m)).Resume(t.Context(), rebuild(t, s), nil)
					require.NoError(t, err)
					require.Equal(t, sum.Seen, sum.Done)
					require.Len(t, s.Effects(), 1)
					require.Equal(t, []string{r.Key}, keysSent(s.Sends()))
					require.Equal(t, journal.Done, entryOf(t, m, "1").State)
				})
			})
		}
	}
}

func TestJournalThatFailsAtReleaseIsTold(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		j := watch(new(journal.Memory))
		j.trouble = failing(errDisk, "Release")
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 403}))
		r, err := pay(t, journalled(s, j), s, "1")
		require.NoError(t, err)
		require.ErrorIs(t, r.Reason, errDisk)
		require.ErrorIs(t, r.Reason, idem.ErrJournal)
	})
}

// --- what the journal remembers

func TestDoneOperationIsReplayedWithinTheKeyWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		first, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		time.Sleep(23 * time.Hour) // within the window
		for _, tr := range []*idem.Transport{journalled(s, m), journalled(s, m)} {
			resp, err := tr.RoundTrip(newPayment(t, charging(t.Context(), "1"), s, "1"))
			require.NoError(t, err)
			require.Equal(t, 201, resp.StatusCode)
			require.Contains(t, readAll(t, resp), "pay_1")
			r := idem.ReportOf(resp)
			require.True(t, r.Replayed)
			require.Equal(t, idem.Executed, r.Outcome)
			require.Equal(t, "pay_1", r.Reference)
			require.Equal(t, first.Key, r.Key)
		}
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 3)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Equal(t, 1, entryOf(t, m, "1").Attempts, "a replay is no part of it")
	})
}

// A server that gives no replay does not change what is known.
func TestDoneOperationIsExecutedWhateverItsReplaySays(t *testing.T) {
	for _, c := range []struct {
		fault  fakeserver.Fault
		reason error
	}{
		{fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, idem.ErrAttemptsExhausted},
		{fakeserver.Fault{Kind: fakeserver.Status, Status: 401}, idem.ErrAlreadyDone},
		{fakeserver.Fault{Kind: fakeserver.Reset}, idem.ErrAttemptsExhausted},
	} {
		t.Run(c.fault.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				_, err := pay(t, journalled(s, m), s, "1")
				require.NoError(t, err)
				require.NoError(t, s.Inject(c.fault))
				r, err := pay(t, journalled(s, m), s, "1")
				require.ErrorIs(t, err, c.reason)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Equal(t, "pay_1", r.Reference)
				require.Equal(t, journal.Done, entryOf(t, m, "1").State)
				require.Len(t, s.Effects(), 1)
			})
		})
	}
}

func TestDoneOperationIsNotSentAfterTheKeyWindow(t *testing.T) {
	for _, age := range []time.Duration{24*time.Hour - 30*time.Second + time.Millisecond, 25 * time.Hour, 300 * 24 * time.Hour} {
		t.Run(age.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				_, err := pay(t, journalled(s, m), s, "1")
				require.NoError(t, err)
				time.Sleep(age) // the server forgets its keys
				_, err = m.Sweep(t.Context(), 0)
				require.NoError(t, err)

				r, err := pay(t, journalled(s, m), s, "1")

				require.ErrorIs(t, err, idem.ErrAlreadyDone)
				require.NotErrorIs(t, err, idem.ErrKeyExpired)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Equal(t, "pay_1", r.Reference)
				require.ErrorContains(t, err, "pay_1")
				require.Empty(t, r.Attempts)
				require.Len(t, s.Sends(), 1)
				require.Len(t, s.Effects(), 1)
			})
		})
	}
}

// The replay is waited for, and its waits end at the window too.
func TestReplayOfADoneOperationIsNotAskedForBeyondTheKeyWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		_, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "50"}))
		time.Sleep(24*time.Hour - 2*time.Minute) // near the end of the window
		r, err := pay(t, journalled(s, m), s, "1")
		require.ErrorIs(t, err, idem.ErrAlreadyDone)
		require.Equal(t, idem.Executed, r.Outcome)
		for _, send := range s.Sends() {
			require.LessOrEqual(t, send.At.Sub(s.Sends()[0].At), 24*time.Hour-30*time.Second)
		}
		require.Greater(t, len(s.Sends()), 1)
	})
}

func TestOperationThatAPersonSettledIsNeverSent(t *testing.T) {
	for _, sent := range []bool{false, true} {
		t.Run(fmt.Sprintf("sent %v", sent), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				c := idem.NewClient(journalled(s, m, withAttempts(1)))
				if sent {
					require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset}))
					_, err := pay(t, journalled(s, m, withAttempts(1)), s, "1")
					require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
				} else {
					enlist(t, c, m, s, "1")
				}
				sends := len(s.Sends())
				require.NoError(t, c.Settle(t.Context(), chargeOf("1"), idem.Executed, "pay_77", "seen in the dashboard"))

				r, err := pay(t, journalled(s, m), s, "1")

				require.ErrorIs(t, err, idem.ErrAlreadyDone)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Equal(t, "pay_77", r.Reference)
				require.Len(t, s.Sends(), sends)
				require.Empty(t, s.Effects())
			})
		})
	}
}

func TestRefusedOperationStartsAnewWithAnotherKeyAndAnotherBody(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		call := func(body string) (*http.Response, *idem.Report) {
			resp, err := journalled(s, m).RoundTrip(newPost(t, charging(t.Context(), "order-1"), s.URL()+"/v1/payments", body))
			require.NoError(t, err)
			readAll(t, resp)
			return resp, idem.ReportOf(resp)
		}
		declined, first := call(declinedJSON)
		require.Equal(t, 402, declined.StatusCode)
		require.Equal(t, idem.Refused, first.Outcome)
		require.Equal(t, journal.Refused, entryOf(t, m, "order-1").State)
		require.Equal(t, 402, entryOf(t, m, "order-1").Status)

		_, second := call(paymentJSON("order-1", 1999)) // another card
		require.Equal(t, idem.Executed, second.Outcome)
		require.NotEqual(t, first.Key, second.Key)
		e := entryOf(t, m, "order-1")
		require.Equal(t, journal.Done, e.State)
		require.Equal(t, 2, e.Generation)
		require.Equal(t, second.Key, e.Key)
		require.Equal(t, []string{first.Key, second.Key}, keysSent(s.Sends()))

		_, third := call(paymentJSON("order-1", 1999)) // it is done now
		require.True(t, third.Replayed)
		require.Equal(t, second.Key, third.Key)
		require.Len(t, s.Effects(), 1)
	})
}

// A plain 4xx comes from a layer before the operation, perhaps: the caller may
// hear that nothing was done, and the key stays.
func TestPlainRefusalOfAFreshKeyLeavesItPendingForItsCaller(t *testing.T) {
	for _, status := range []int{400, 401, 403, 404, 422} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: status}))
				first, err := pay(t, journalled(s, m), s, "1")
				require.NoError(t, err)
				require.Equal(t, idem.Refused, first.Outcome)
				e := entryOf(t, m, "1")
				require.Equal(t, journal.Pending, e.State)
				require.True(t, e.Clear)
				require.Empty(t, e.Owner)
				require.Equal(t, status, e.Status)

				second, err := pay(t, journalled(s, m), s, "1")
				require.NoError(t, err)
				require.Equal(t, idem.Executed, second.Outcome)
				require.Equal(t, first.Key, second.Key)
				require.False(t, second.EarlierUnknown, "the earlier call is known")
				require.Len(t, s.Effects(), 1)
			})
		})
	}
}

// After a lost answer the same 4xx says nothing, in this call and in later ones.
func TestPlainRefusalAfterALostAnswerIsUnknownInEveryCall(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect},
			fakeserver.Fault{Kind: fakeserver.Status, Status: 404}, fakeserver.Fault{Kind: fakeserver.Status, Status: 404}))
		_, err := pay(t, journalled(s, m, withAttempts(1)), s, "1")
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		for range 2 {
			r, err := pay(t, journalled(s, m), s, "1")
			require.NoError(t, err)
			require.Equal(t, idem.Unknown, r.Outcome)
			require.True(t, r.EarlierUnknown)
			require.Equal(t, journal.Pending, entryOf(t, m, "1").State)
			require.False(t, entryOf(t, m, "1").Clear)
		}
		r, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.Equal(t, idem.Executed, r.Outcome)
		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
	})
}

func TestNothingSentIsProvedAcrossCalls(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		s.Refuse(8)
		for range 2 {
			r, err := pay(t, journalled(s, m), s, "1")
			require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
			require.Equal(t, idem.NotExecuted, r.Outcome)
			e := entryOf(t, m, "1")
			require.True(t, e.Clear)
			require.True(t, e.FirstSend.IsZero())
			require.Equal(t, journal.Pending, e.State)
			time.Sleep(30 * 24 * time.Hour) // no window runs
		}
		r, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.Equal(t, idem.Executed, r.Outcome)
		require.Equal(t, 9, entryOf(t, m, "1").Attempts)
		require.Len(t, keysSent(s.Sends()), 1)
	})
}

// --- claims

func TestClaimOfAnotherProcessIsWaitedFor(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Delay: 20 * time.Second}))
		reports := make([]idem.Report, 2)
		var group sync.WaitGroup
		for i := range reports {
			time.Sleep(time.Duration(i) * time.Second) // the second finds the claim of the first
			group.Go(func() {
				r, err := pay(t, journalled(s, m), s, "1")
				if err != nil {
					t.Error(err)
				}
				reports[i] = r
			})
		}
		group.Wait()
		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Len(t, s.Sends(), 2, "the second asks for the replay when the first has its answer, and not before")
		require.GreaterOrEqual(t, s.Sends()[1].At.Sub(s.Sends()[0].At), 20*time.Second)
		require.LessOrEqual(t, s.Sends()[1].At.Sub(s.Sends()[0].At), 22*time.Second)
		for _, r := range reports {
			require.Equal(t, idem.Executed, r.Outcome)
			require.Equal(t, "pay_1", r.Reference)
		}
		require.True(t, reports[1].Replayed)
		require.NotEqual(t, reports[0].Replayed, reports[1].Replayed)
	})
}

func TestClaimOfAnotherProcessIsWaitedForUntilTheCallersDeadline(t *testing.T) {
	for name, c := range map[string]struct {
		edit  func(*idem.Transport)
		limit time.Duration // of the caller
		least time.Duration
		most  time.Duration
	}{
		"the caller's deadline": {nil, 3 * time.Second, 3 * time.Second, 3 * time.Second},
		"MaxElapsed":            {func(tr *idem.Transport) { tr.Policy.MaxElapsed = 5 * time.Second }, time.Hour, 5 * time.Second, 7 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				release := claimed(t, s, m, "1")
				edits := []func(*idem.Transport){}
				if c.edit != nil {
					edits = append(edits, c.edit)
				}
				ctx, cancel := context.WithTimeout(charging(t.Context(), "1"), c.limit)
				defer cancel()
				start := time.Now()
				_, err := idem.NewClient(journalled(s, m, edits...)).Do(newPayment(t, ctx, s, "1"))
				took := time.Since(start)
				release()
				require.GreaterOrEqual(t, took, c.least)
				require.LessOrEqual(t, took, c.most)
				require.ErrorIs(t, err, idem.ErrInProgress)
				require.Equal(t, name == "the caller's deadline", errors.Is(err, context.DeadlineExceeded))
				require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
				require.Len(t, s.Sends(), 1)
			})
		})
	}
}

// claimed has another process work on charge/id, without an answer, until the
// result is called.
func claimed(t *testing.T, s *fakeserver.Server, j journal.Journal, id string) (release func()) {
	t.Helper()
	require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Hang}))
	ctx, cancel := context.WithCancel(charging(context.Background(), id))
	var group sync.WaitGroup
	tr := journalled(s, j, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = -1 })
	req := newPayment(t, ctx, s, id)
	group.Go(func() {
		if resp, err := tr.RoundTrip(req); err == nil {
			_ = resp.Body.Close()
		}
	})
	synctest.Wait()
	e := entryOf(t, j, id)
	require.True(t, e.Claimed(time.Now()))
	return func() { cancel(); group.Wait() }
}

func TestWaitForAClaimEndsWithACancelledCaller(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		release := claimed(t, s, m, "1")
		ctx, cancel := context.WithCancelCause(charging(t.Context(), "1"))
		time.AfterFunc(1500*time.Millisecond, func() { cancel(errOwnCause) })
		start := time.Now()
		_, err := journalled(s, m).RoundTrip(newPayment(t, ctx, s, "1"))
		require.Equal(t, 1500*time.Millisecond, time.Since(start))
		release()
		require.ErrorIs(t, err, errOwnCause)
		require.ErrorIs(t, err, context.Canceled)
		require.Len(t, s.Sends(), 1)
	})
}

func TestClaimIsRenewedDuringALongAttempt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		j := watch(new(journal.Memory))
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Delay: 95 * time.Second}))
		for at := range 95 {
			time.AfterFunc(time.Duration(at)*time.Second+time.Millisecond, func() {
				if e, err := j.Get(context.Background(), chargeOf("1")); err != nil || !e.Claimed(time.Now().Add(15*time.Second)) {
					t.Errorf("after %d s the claim holds until %v: %v", at, e.Lease, err)
				}
			})
		}
		_, err := pay(t, journalled(s, j, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 3 * time.Minute }), s, "1")
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		renewals := len(j.heard("Renew"))
		require.GreaterOrEqual(t, renewals, 4)
		require.LessOrEqual(t, renewals, 12)
		time.Sleep(time.Hour) // and not any more
		require.Equal(t, renewals, len(j.heard("Renew")))
	})
}

func TestEndedLeaseIsTakenOverWithTheSameKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		crashed := crashAfterTheEffect(t, s, m, "1")
		start := time.Now()

		r, err := pay(t, journalled(s, m), s, "1")

		require.NoError(t, err)
		require.Equal(t, 30*time.Second, time.Since(start), "the lease of the process that crashed")
		require.Equal(t, idem.Executed, r.Outcome)
		require.True(t, r.Replayed)
		require.True(t, r.EarlierUnknown)
		require.Equal(t, crashed, r.Key)
		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
		require.EqualValues(t, 2, entryOf(t, m, "1").Fence)
	})
}

// crashAfterTheEffect ends a process between the effect of charge/id and its
// answer; it returns the key.
func crashAfterTheEffect(t testing.TB, s *fakeserver.Server, j journal.Journal, id string) (key string) {
	t.Helper()
	return crashAfterTheEffectOf(t, s, j, newPayment(t, charging(context.Background(), id), s, id))
}

func crashAfterTheEffectOf(t testing.TB, s *fakeserver.Server, j journal.Journal, req *http.Request, edit ...func(*idem.Transport)) (key string) {
	t.Helper()
	w := watch(j)
	effects := len(s.Effects())
	_, err := journalled(s, w, append(slices.Clone(edit), func(tr *idem.Transport) {
		base := tr.Base
		tr.Policy.MaxAttempts = 1
		tr.Base = roundTripFunc(func(req *http.Request) (*http.Response, error) {
			resp, err := base.RoundTrip(req)
			w.crash()
			if err == nil {
				_ = resp.Body.Close()
			}
			return nil, io.ErrUnexpectedEOF
		})
	})...).RoundTrip(req)
	require.Error(t, err)
	require.Len(t, s.Effects(), effects+1)
	e := w.heard("Begin")[0].returned
	now, err := j.Get(context.Background(), e.Operation)
	require.NoError(t, err)
	require.Equal(t, journal.Pending, now.State)
	require.True(t, now.Claimed(time.Now()))
	return e.Key
}

// A process that was cut off from the journal for longer than its lease has its
// answer, and must not write over what others wrote meanwhile.
func TestLateOwnerCannotOverwrite(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		j := watch(m)
		j.trouble = failing(errDisk, "Renew")
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Delay: 50 * time.Second}))
		var late idem.Report
		var group sync.WaitGroup
		group.Go(func() {
			var err error
			if late, err = pay(t, journalled(s, j, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = time.Minute }), s, "1"); err != nil {
				t.Error(err)
			}
		})
		time.Sleep(time.Second) // the other one comes later
		other, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.Equal(t, idem.Executed, other.Outcome)
		written := entryOf(t, m, "1")
		require.Equal(t, journal.Done, written.State)
		group.Wait()
		require.Equal(t, idem.Executed, late.Outcome, "its answer stands")
		require.ErrorIs(t, late.Reason, idem.ErrJournal)
		require.ErrorIs(t, late.Reason, journal.ErrClaimLost)
		require.Equal(t, written, entryOf(t, m, "1"))
		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
	})
}

// An owner whose claim was taken over while it waited goes no further.
func TestOwnerThatLostItsClaimSendsNothingMore(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		j := watch(m)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "60"}))
		start := time.Now()
		j.trouble = func(name string, _ journal.Operation) error {
			if name == "Renew" && time.Since(start) < 36*time.Second { // so that its lease ends
				return errDisk
			}
			return nil
		}
		time.AfterFunc(35*time.Second, func() {
			if e, err := m.Begin(context.Background(), j.heard("Begin")[0].intent); err != nil || e.Fence != 2 {
				t.Error(err)
			}
		})
		r, err := pay(t, journalled(s, j), s, "1")
		require.ErrorIs(t, err, idem.ErrInProgress)
		require.Equal(t, idem.Unknown, r.Outcome)
		require.Len(t, s.Sends(), 1)
		require.EqualValues(t, 2, entryOf(t, m, "1").Fence)
		require.NotEmpty(t, entryOf(t, m, "1").Owner)
	})
}

// A person gave the operation up while its owner was cut off from the journal.
// The owner must not send the old key beside the new one.
func TestOwnerThatCannotRenewAnEndedLeaseSendsNothingMore(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		j := watch(m)
		j.trouble = failing(errDisk, "Renew")
		first := true
		tr := journalled(s, j, func(tr *idem.Transport) {
			base := tr.Base
			tr.Policy.AttemptTimeout = time.Minute
			tr.Base = roundTripFunc(func(req *http.Request) (*http.Response, error) {
				if !first {
					return base.RoundTrip(req)
				}
				first = false
				_ = req.Body.Close()
				time.Sleep(31 * time.Second) // longer than the lease
				require.NoError(t, idem.NewClient(journalled(s, m)).Abandon(context.Background(), chargeOf("1"), "nobody answers"))
				r, err := pay(t, journalled(s, m), s, "1")
				require.NoError(t, err)
				require.Equal(t, idem.Executed, r.Outcome)
				return nil, io.ErrUnexpectedEOF
			})
		})

		_, err := pay(t, tr, s, "1")

		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.Error(t, err)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
	})
}

func TestFiftyCallersOfOneOperationAreOneEffect(t *testing.T) {
	for _, processes := range []int{1, 5} {
		t.Run(fmt.Sprintf("%d processes", processes), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: time.Second}))
				trs := make([]*idem.Transport, processes)
				for i := range trs {
					trs[i] = journalled(s, m)
				}
				var group sync.WaitGroup
				for i := range 50 {
					group.Go(func() {
						r, err := pay(t, trs[i%processes], s, "1")
						if err != nil || r.Outcome != idem.Executed || r.Reference != "pay_1" {
							t.Errorf("%v, %v", r.Outcome, err)
						}
					})
				}
				group.Wait()
				require.Len(t, s.Effects(), 1)
				require.Len(t, keysSent(s.Sends()), 1)
				for _, send := range s.Sends() {
					require.NotEqual(t, 409, send.Status, "nobody meets its own twin at the server")
				}
			})
		})
	}
}

// --- streamed answers

// streams answers each POST with a body of text whose length nobody knows.
func streams(body func(n int) io.Reader) *wire {
	return &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
		return chunkedAnswer(req, "text/plain", io.NopCloser(body(n))), nil
	}}
}

func TestEntryOfAStreamedAnswerIsFinishedAtItsEnd(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := streams(func(int) io.Reader { return iotest.OneByteReader(strings.NewReader("a long answer")) })
		resp, err := onWire(w, remembering(m)).RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		require.Equal(t, idem.Executed, idem.ReportOf(resp).Outcome)
		_, err = io.ReadFull(resp.Body, make([]byte, 13))
		require.NoError(t, err)
		e := entryOf(t, m, "1")
		require.Equal(t, journal.Pending, e.State, "its end was not seen yet")
		require.True(t, e.Claimed(time.Now()))
		_, err = resp.Body.Read(make([]byte, 1))
		require.Equal(t, io.EOF, err)
		e = entryOf(t, m, "1")
		require.Equal(t, journal.Done, e.State)
		require.Equal(t, 200, e.Status)
		require.Equal(t, 1, e.Attempts)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, e, entryOf(t, m, "1"))
	})
}

func TestEntryOfAStreamedAnswerStaysPendingWhereItsEndWasNotSeen(t *testing.T) {
	for name, c := range map[string]struct {
		body io.Reader
		read func(*http.Response)
	}{
		"cut": {io.MultiReader(strings.NewReader("a long"), iotest.ErrReader(io.ErrUnexpectedEOF)), func(resp *http.Response) {
			_, err := io.ReadAll(resp.Body)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		}},
		"closed early":  {strings.NewReader("a long answer"), func(resp *http.Response) { _, _ = resp.Body.Read(make([]byte, 3)) }},
		"closed unread": {strings.NewReader("a long answer"), func(*http.Response) {}},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				j := watch(new(journal.Memory))
				w := streams(func(n int) io.Reader {
					if n == 1 {
						return c.body
					}
					return strings.NewReader("a long answer")
				})
				tr := onWire(w, remembering(j))
				resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
				require.NoError(t, err)
				c.read(resp)
				require.NoError(t, resp.Body.Close())
				e := entryOf(t, j, "1")
				require.Equal(t, journal.Pending, e.State)
				require.Empty(t, e.Owner)
				require.False(t, e.Clear)
				require.Equal(t, 1, e.Attempts)
				require.Equal(t, idem.Executed, idem.ReportOf(resp).Outcome, "that does not change")

				resp, err = tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
				require.NoError(t, err)
				require.Equal(t, "a long answer", readAll(t, resp))
				require.Equal(t, journal.Done, entryOf(t, j, "1").State)
				oneKey(t, w.seen())
				renewals := len(j.heard("Renew"))
				time.Sleep(time.Hour) // nothing is renewed any more
				require.Equal(t, renewals, len(j.heard("Renew")))
			})
		})
	}
}

func TestClaimIsRenewedWhileAStreamedAnswerIsRead(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			return chunkedAnswer(req, "text/event-stream", events(req.Context(), 20*time.Second, 10)), nil
		}}
		tr := onWire(w, remembering(m))
		resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		var group sync.WaitGroup
		group.Go(func() {
			r, err := journalledTwin(t, w, m)
			if err != nil || r.Outcome != idem.Executed {
				t.Errorf("%v, %v", r.Outcome, err)
			}
		})
		start := time.Now()
		readAll(t, resp)
		require.GreaterOrEqual(t, time.Since(start), 3*time.Minute)
		require.Len(t, w.seen(), 1, "the claim was held all the time")
		require.Equal(t, journal.Done, entryOf(t, m, "1").State)
		group.Wait()
		oneKey(t, w.seen())
	})
}

// journalledTwin calls the same operation in another process.
func journalledTwin(t *testing.T, w *wire, j journal.Journal) (idem.Report, error) {
	var r idem.Report
	tr := onWire(w, remembering(j), func(tr *idem.Transport) { tr.Policy.MaxElapsed = time.Hour })
	resp, err := tr.RoundTrip(newPost(t, idem.WithReport(charging(context.Background(), "1"), &r), wireURL, `{}`))
	if err == nil {
		readAll(t, resp)
	}
	return r, err
}

// --- redirects

func TestClaimGoesOnToTheHopOfA307(t *testing.T) {
	for _, id := range []string{"fresh", "known"} {
		t.Run(id, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				j := watch(new(journal.Memory))
				tr := journalled(s, j)
				if id == "known" { // an earlier call may have reached the server
					require.NoError(t, s.Script("", repeat(4, fakeserver.Fault{Kind: fakeserver.Reset})...))
					_, err := pay(t, tr, s, id)
					require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
				}
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: 307, Location: "/v1/payments?again"}))

				r, err := pay(t, tr, s, id)

				require.NoError(t, err)
				require.Len(t, s.Effects(), 1)
				require.Len(t, keysSent(s.Sends()), 1)
				require.Equal(t, idem.Executed, r.Outcome)
				e := entryOf(t, j, id)
				require.Equal(t, journal.Done, e.State)
				require.Equal(t, len(s.Sends()), e.Attempts)
				require.Equal(t, s.Effects()[0].ID, e.Reference)
			})
		})
	}
}

func TestRefusalOnAHopIsWrittenAsOne(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: 308, Location: "/v1/payments?again"}))
		resp, err := idem.NewClient(journalled(s, m)).Do(newPost(t, charging(t.Context(), "1"), s.URL()+"/v1/payments", declinedJSON))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, 402, resp.StatusCode)
		require.Equal(t, journal.Refused, entryOf(t, m, "1").State)
		require.Equal(t, 2, entryOf(t, m, "1").Attempts)
	})
}

func TestRedirectThatIsRefusedLeavesTheEntryPending(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: 307, Location: "other"}))
		r, err := pay(t, journalled(s, m), s, "1")
		require.ErrorIs(t, err, idem.ErrRedirectRefused)
		require.Equal(t, idem.Unknown, r.Outcome)
		e := entryOf(t, m, "1")
		require.Equal(t, journal.Pending, e.State)
		require.Empty(t, e.Owner)
		require.False(t, e.Clear, "who redirects may have done it")
		r, err = pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.Equal(t, idem.Executed, r.Outcome)
		require.Len(t, keysSent(s.Sends()), 1)
	})
}

// Between the answer of a redirect and its hop nobody holds the claim.
func TestHopWaitsForWhoeverCameInBetween(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: 307, Location: "/v1/payments?again"}))
		c := &http.Client{Transport: journalled(s, m), CheckRedirect: func(*http.Request, []*http.Request) error {
			r, err := pay(t, journalled(s, m), s, "1")
			require.NoError(t, err)
			require.Equal(t, idem.Executed, r.Outcome)
			return nil
		}}
		resp, err := c.Do(newPayment(t, charging(t.Context(), "1"), s, "1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, idem.Executed, idem.ReportOf(resp).Outcome)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Equal(t, journal.Done, entryOf(t, m, "1").State)
	})
}

func TestMaxElapsedOfAJournalledOperationHoldsOverItsHops(t *testing.T) {
	for name, j := range map[string]journal.Journal{"no journal": nil, "journal": new(journal.Memory)} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
					if req.URL.Path == "/v1/payments" {
						time.Sleep(8 * time.Second) // a slow host
						return answer(req, 307, http.Header{"Location": {"/b"}}, ""), nil
					}
					return answer(req, 500, nil, ""), nil
				}}
				tr := onWire(w, func(tr *idem.Transport) {
					tr.Dialect, tr.Journal = shop(), j
					tr.Policy.MaxAttempts, tr.Policy.MaxElapsed = 1000, 10*time.Second
					tr.Policy.BackoffBase, tr.Policy.BackoffCap = time.Second, time.Second
				})
				start := time.Now()
				_, err := idem.NewClient(tr).Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
				require.ErrorIs(t, err, idem.ErrTimeExhausted)
				require.LessOrEqual(t, time.Since(start), 10*time.Second)
			})
		})
	}
}

func TestRedirectToAGETIsTheEndOfTheWrite(t *testing.T) {
	for _, get := range []int{200, 404, 500} {
		t.Run(fmt.Sprint(get), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				j := watch(new(journal.Memory))
				w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
					if req.Method == http.MethodGet {
						require.Equal(t, journal.Done, entryOf(t, j.Journal, "1").State, "before the GET is sent")
						return answer(req, get, nil, "a receipt"), nil
					}
					return answer(req, 303, http.Header{"Location": {"/receipt"}}, ""), nil
				}}
				resp, err := onWireClient(w, j).Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
				require.NoError(t, err)
				readAll(t, resp)
				require.Equal(t, get, resp.StatusCode)
				require.Equal(t, idem.Executed, idem.ReportOf(resp).Outcome)
				e := entryOf(t, j, "1")
				require.Equal(t, 303, e.Status)
				require.Equal(t, 1, e.Attempts)
				require.Len(t, j.heard("Begin", "Finish", "Release"), 2)
			})
		})
	}
}

func onWireClient(w *wire, j journal.Journal) *http.Client {
	return &http.Client{Transport: onWire(w, remembering(j))}
}

// --- ends without an answer

func TestErrorOfPrepareReleasesTheClaim(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		errSign := errors.New("no signature")
		r, err := pay(t, journalled(s, m, func(tr *idem.Transport) { tr.Prepare = func(*http.Request) error { return errSign } }), s, "1")
		require.ErrorIs(t, err, errSign)
		require.Equal(t, idem.NotExecuted, r.Outcome, "the journal knows its past")
		e := entryOf(t, m, "1")
		require.Empty(t, e.Owner)
		require.True(t, e.Clear)
		require.True(t, e.FirstSend.IsZero())
		start := time.Now()
		_, err = pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.Less(t, time.Since(start), time.Second, "nobody waits for a lease")
	})
}

func TestPanicReleasesTheClaimAndFreesTheKey(t *testing.T) {
	blow := func() { panic("out of order") }
	for name, c := range map[string]struct {
		edit func(*idem.Transport)
		sent bool // as far as is known
	}{
		"AttemptStart": {edit: func(tr *idem.Transport) {
			tr.Hooks.AttemptStart = func(context.Context, *idem.Report, int) context.Context { blow(); return nil }
		}},
		"Prepare": {edit: func(tr *idem.Transport) { tr.Prepare = func(*http.Request) error { blow(); return nil } }},
		"the base": {edit: func(tr *idem.Transport) {
			tr.Base = roundTripFunc(func(*http.Request) (*http.Response, error) { blow(); return nil, nil })
		}},
		"AttemptDone": {edit: func(tr *idem.Transport) {
			tr.Hooks.AttemptDone = func(context.Context, *idem.Report, idem.Attempt) { blow() }
		}, sent: true},
		"Classify": {edit: func(tr *idem.Transport) {
			tr.Policy.Classify = func(*http.Response, error) idem.Verdict { blow(); return 0 }
		}, sent: true},
		"Done": {edit: func(tr *idem.Transport) { tr.Hooks.Done = func(context.Context, *idem.Report) { blow() } }, sent: true},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				j := watch(new(journal.Memory))
				broken := true
				var tr *idem.Transport
				tr = journalled(s, j, func(tr *idem.Transport) {
					base := tr.Base
					c.edit(tr)
					// The same Transport must work afterwards: its gate must be free.
					if blown := tr.Base; name == "the base" {
						tr.Base = roundTripFunc(func(req *http.Request) (*http.Response, error) {
							if broken {
								return blown.RoundTrip(req)
							}
							return base.RoundTrip(req)
						})
					}
				})
				require.PanicsWithValue(t, "out of order", func() { _, _ = pay(t, tr, s, "1") })
				e := entryOf(t, j, "1")
				require.Empty(t, e.Owner)
				if name == "Done" {
					require.Equal(t, journal.Done, e.State)
				} else {
					require.Equal(t, journal.Pending, e.State)
					require.False(t, e.Clear, "nobody was told anything")
				}
				broken = false
				if name != "the base" {
					require.PanicsWithValue(t, "out of order", func() { _, _ = pay(t, tr, s, "1") })
					tr = journalled(s, j)
				}
				start := time.Now()
				r, err := pay(t, tr, s, "1")
				require.NoError(t, err)
				require.Less(t, time.Since(start), time.Second)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Len(t, s.Effects(), 1)
				require.Len(t, keysSent(s.Sends()), 1)
				time.Sleep(time.Hour) // no renewal is left behind
				require.Empty(t, j.heard("Renew"))
			})
		})
	}
}

func TestPanicWhileAStreamedAnswerIsHandedOverReleasesTheClaim(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := streams(func(int) io.Reader { return strings.NewReader("a long answer") })
		broken := true
		tr := onWire(w, remembering(m), func(tr *idem.Transport) {
			tr.Hooks.Done = func(context.Context, *idem.Report) {
				if broken {
					panic("out of order")
				}
			}
		})
		call := func() (*http.Response, error) {
			return tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		}
		require.Panics(t, func() { _, _ = call() })
		require.Empty(t, entryOf(t, m, "1").Owner)
		require.Equal(t, journal.Pending, entryOf(t, m, "1").State)
		broken = false
		resp, err := call()
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, journal.Done, entryOf(t, m, "1").State)
	})
}

func TestCancelledContextBeforeTheSendIsProofThatNothingWasSent(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		ctx, cancel := context.WithCancelCause(charging(t.Context(), "1"))
		j := watch(m)
		j.lost = func(name string, _ journal.Operation) error {
			if name == "Begin" {
				cancel(errOwnCause) // the user leaves while the entry is written
			}
			return nil
		}
		_, err := journalled(s, j).RoundTrip(newPayment(t, ctx, s, "1"))
		require.ErrorIs(t, err, errOwnCause)
		require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
		e := entryOf(t, m, "1")
		require.Empty(t, e.Owner)
		require.True(t, e.Clear)
		require.True(t, e.FirstSend.IsZero())
		require.Empty(t, s.Sends())
	})
}

func TestLastWriteIsMadeThoughTheCallerHasLeft(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Hang}))
		ctx, cancel := context.WithTimeout(charging(t.Context(), "1"), time.Second)
		defer cancel()
		_, err := journalled(s, m).RoundTrip(newPayment(t, ctx, s, "1"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		e := entryOf(t, m, "1")
		require.Empty(t, e.Owner)
		require.Equal(t, 1, e.Attempts)
		require.False(t, e.Clear)
	})
}

// --- the key window

func TestNothingJournalledIsSentAfterTheKeyWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		for range 30 {
			_, err := pay(t, journalled(s, m), s, "1")
			require.Error(t, err)
			time.Sleep(time.Hour) // until the next run of a worker
		}
		last := s.Sends()[len(s.Sends())-1]
		require.LessOrEqual(t, last.At.Sub(s.Sends()[0].At), 24*time.Hour-30*time.Second)
		require.Greater(t, last.At.Sub(s.Sends()[0].At), 22*time.Hour)
		require.Len(t, s.Effects(), 1)
		sends := len(s.Sends())

		r, err := pay(t, journalled(s, m), s, "1")
		require.ErrorIs(t, err, idem.ErrKeyExpired)
		require.Equal(t, idem.Unknown, r.Outcome)
		require.Len(t, s.Sends(), sends)
		c := idem.NewClient(journalled(s, m))
		p := pendingOf(t, c)
		require.Len(t, p, 1)
		require.LessOrEqual(t, p[0].Left, time.Duration(0))
		require.Equal(t, journal.Pending, p[0].State)
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Expired: 1}, sum)
		require.Len(t, s.Sends(), sends)
	})
}

func pendingOf(t testing.TB, c *idem.Client) []idem.PendingOperation {
	t.Helper()
	var all []idem.PendingOperation
	for p, err := range c.Pending(context.Background()) {
		require.NoError(t, err)
		all = append(all, p)
	}
	return all
}

// skewed is a journal whose first sends were noted by a clock that was ahead.
type skewed struct {
	journal.Journal
	ahead time.Duration
}

func (j skewed) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Journal.Begin(ctx, in)
	if !e.FirstSend.IsZero() {
		e.FirstSend = e.FirstSend.Add(j.ahead)
	}
	return e, err
}

func (j skewed) Pending(ctx context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		for e, err := range j.Journal.Pending(ctx) {
			e.FirstSend = e.FirstSend.Add(j.ahead)
			if !yield(e, err) {
				return
			}
		}
	}
}

// The clock was set back since the first send, so the key's age is not known.
func TestKeyOfAFirstSendInTheFutureIsNotSent(t *testing.T) {
	for ahead, sent := range map[time.Duration]bool{30 * time.Second: true, 61 * time.Second: false, 48 * time.Hour: false} {
		t.Run(ahead.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset}))
				_, err := pay(t, journalled(s, m, withAttempts(1)), s, "1")
				require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
				j := skewed{m, ahead}
				c := idem.NewClient(journalled(s, j))
				require.Equal(t, sent, pendingOf(t, c)[0].Left > 0)
				if !sent {
					sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
					require.NoError(t, err)
					require.Equal(t, idem.Resumed{Seen: 1, Expired: 1}, sum)
				}
				_, err = pay(t, journalled(s, j), s, "1")
				if sent {
					require.NoError(t, err)
					return
				}
				require.ErrorIs(t, err, idem.ErrKeyExpired)
				require.Len(t, s.Sends(), 1)
				require.Empty(t, entryOf(t, m, "1").Owner)
			})
		})
	}
}

func TestStartedCountsWhereTheJournalKnowsNothingYet(t *testing.T) {
	for _, c := range []struct {
		ago  time.Duration
		sent bool
	}{{0, true}, {23 * time.Hour, true}, {24 * time.Hour, false}, {100 * time.Hour, false}} {
		t.Run(c.ago.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				started := time.Now().Add(-c.ago)
				ctx := func() context.Context {
					return idem.WithOperation(t.Context(), idem.Operation{Name: "charge", ID: "1", Started: started})
				}
				resp, err := idem.NewClient(journalled(s, m)).Do(newPayment(t, ctx(), s, "1"))
				if c.sent {
					require.NoError(t, err)
					readAll(t, resp)
					require.Equal(t, journal.Done, entryOf(t, m, "1").State)
					return
				}
				require.ErrorIs(t, err, idem.ErrKeyExpired)
				require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err), "it may have been sent before the journal knew it")
				require.Empty(t, s.Sends())
				require.False(t, entryOf(t, m, "1").Clear)
			})
		})
	}
}

// An operation that was written down before the journal was there may have been
// sent: nothing is claimed of it.
func TestStartedOperationThatWasNotSentNowIsUnknown(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		s.Refuse(4)
		ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "charge", ID: "1", Started: time.Now().Add(-time.Hour)})
		_, err := journalled(s, m).RoundTrip(newPayment(t, ctx, s, "1"))
		require.Error(t, err)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		require.False(t, entryOf(t, m, "1").Clear)
		require.False(t, entryOf(t, m, "1").FirstSend.IsZero())
	})
}

// --- whose key

// stripe-go and its like make a key for each call and put it into the header;
// only the context says that two calls are one operation.
func TestKeyOfTheJournalWinsOverThatOfAVendorsSDK(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		sdk := func(tr *idem.Transport, ctx context.Context) (*http.Response, error) {
			key, err := idem.NewKey()
			require.NoError(t, err)
			req := newPayment(t, ctx, s, "1")
			req.Header.Set("Idempotency-Key", key)
			return (&http.Client{Transport: tr}).Do(req)
		}
		require.NoError(t, s.Script("", repeat(4, fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect})...))
		_, err := sdk(journalled(s, m), charging(t.Context(), "1"))
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		resp, err := sdk(journalled(s, m), charging(t.Context(), "1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, []string{entryOf(t, m, "1").Key}, keysSent(s.Sends()))
		require.Equal(t, "journal", idem.ReportOf(resp).KeyFrom)
	})
}

// The journal's entry may be older than the rule by which keys are derived.
func TestStoredKeyIsSentWhateverWouldBeDerivedToday(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		in, err := c.Intent(newPayment(t, charging(t.Context(), "1"), s, "1"))
		require.NoError(t, err)
		in.Key = "an-older-key"
		e, err := m.Begin(t.Context(), in)
		require.NoError(t, err)
		_, err = m.Release(t.Context(), e, journal.Note{})
		require.NoError(t, err)
		r, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.Equal(t, "an-older-key", r.Key)
		require.Equal(t, []string{"an-older-key"}, keysSent(s.Sends()))
	})
}

// A dialect may have changed since; then the key can no longer be sent.
func TestStoredKeyThatTheDialectCannotCarryIsNotSent(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset}))
		_, err := pay(t, journalled(s, m, withAttempts(1)), s, "1")
		require.Error(t, err)
		_, err = pay(t, journalled(s, m, func(tr *idem.Transport) { tr.Dialect.MaxKey = 32 }), s, "1")
		require.ErrorIs(t, err, idem.ErrKeyInvalid)
		require.Len(t, s.Sends(), 1)
		require.Empty(t, entryOf(t, m, "1").Owner)
		require.False(t, entryOf(t, m, "1").Clear)
	})
}

func TestContextOfAnOperationMayBeUsedAgainForItsRequestOnly(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		tr := journalled(s, m)
		ctx := charging(t.Context(), "1")
		post := func(body string) (*http.Response, error) {
			return tr.RoundTrip(newPost(t, ctx, s.URL()+"/v1/payments", body))
		}
		for range 2 {
			resp, err := post(paymentJSON("1", 10))
			require.NoError(t, err)
			readAll(t, resp)
			require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
		}
		_, err := post(paymentJSON("1", 20))
		require.ErrorIs(t, err, idem.ErrKeyReused)
		require.Len(t, s.Sends(), 2)
		require.Len(t, s.Effects(), 1)
	})
}

func TestRequestOfAnotherOperationNamesTheReference(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		_, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		_, err = idem.NewClient(journalled(s, m)).Do(newPost(t, charging(t.Context(), "1"), s.URL()+"/v1/payments", paymentJSON("1", 2000)))
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.ErrorIs(t, err, idem.ErrKeyReused)
		require.Equal(t, "pay_1", e.Reference)
		require.Equal(t, entryOf(t, m, "1").Key, e.Key)
		require.ErrorContains(t, err, "charge/1")
		require.ErrorContains(t, err, "done")
		require.Len(t, s.Sends(), 1)
	})
}

// A body that is too long to be compared is known by its length.
func TestStreamedBodyIsComparedByItsLength(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := &wire{}
		call := func(body []byte) error {
			req, err := http.NewRequestWithContext(charging(t.Context(), "1"), "POST", wireURL, readOnce{bytes.NewReader(body)})
			require.NoError(t, err)
			req.ContentLength = int64(len(body))
			resp, err := onWire(w, remembering(m), func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer = 100 }).RoundTrip(req)
			if err == nil {
				readAll(t, resp)
			}
			return err
		}
		require.NoError(t, call(bytes.Repeat([]byte("a"), 200)))
		require.ErrorIs(t, call(bytes.Repeat([]byte("a"), 201)), idem.ErrKeyReused)
		require.NoError(t, call(bytes.Repeat([]byte("a"), 200)))
		require.Len(t, w.seen(), 2)
	})
}

// Whoever was told that nothing was done relies on nobody doing it: if the
// journal could not note it, a resume may still send it.
func TestNothingIsProvedThatTheJournalCouldNotNote(t *testing.T) {
	for name, fault := range map[string]*fakeserver.Fault{"not executed": nil, "refused": {Kind: fakeserver.Status, Status: 403}} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				j := watch(m)
				j.trouble = failing(errDisk, "Release")
				if fault == nil {
					s.Refuse(4)
				} else {
					require.NoError(t, s.Script("", *fault))
				}
				r, _ := pay(t, journalled(s, j), s, "1")
				require.Equal(t, idem.Unknown, r.Outcome)
				require.ErrorIs(t, r.Reason, idem.ErrJournal)
				require.ErrorIs(t, r.Reason, errDisk)
				if fault == nil {
					require.ErrorIs(t, r.Reason, idem.ErrAttemptsExhausted)
				}
				sum, err := idem.NewClient(journalled(s, m)).Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
			})
		})
	}
}

// The claim was taken over while this call could not even reach the server; the
// other owner did.
func TestNothingIsProvedAfterTheClaimWasTakenOver(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		j := watch(m)
		j.trouble = failing(errDisk, "Renew")
		require.NoError(t, s.ScriptConns(fakeserver.BlackHole))
		var late idem.Report
		var group sync.WaitGroup
		group.Go(func() {
			late, _ = pay(t, journalled(s, j, withAttempts(1), func(tr *idem.Transport) { tr.Policy.AttemptTimeout = time.Minute }), s, "1")
		})
		time.Sleep(time.Second) // the other one comes later
		other, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.Equal(t, idem.Executed, other.Outcome)
		group.Wait()
		require.Len(t, late.Attempts, 1)
		require.Equal(t, idem.NotExecuted, late.Attempts[0].Outcome)
		require.Equal(t, idem.Unknown, late.Outcome, "the operation was executed")
		require.Len(t, s.Effects(), 1)
	})
}
