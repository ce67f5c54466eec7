package idem_test

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

// outbox is a journal in which operations can be enlisted, as in a database;
// Memory has no transactions.
type outbox struct {
	journal.Journal // nil: nobody decides or sweeps here
	rules           journal.Rules

	mu      sync.Mutex // guards entries
	entries map[journal.Operation]journal.Entry
}

func newOutbox() *outbox {
	return &outbox{rules: journal.Rules{Owner: "outbox", Secret: journal.Secret{1}}, entries: map[journal.Operation]journal.Entry{}}
}

// change lets f replace an entry, which is nil where there is none.
func (o *outbox) change(op journal.Operation, f func(old *journal.Entry, now time.Time) (stored, returned journal.Entry, write bool, err error)) (journal.Entry, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var old *journal.Entry
	if e, ok := o.entries[op]; ok {
		old = &e
	}
	stored, returned, write, err := f(old, time.Now())
	if write {
		o.entries[op] = stored
	}
	return returned, err
}

func (o *outbox) Enlist(in journal.Intent) (journal.Entry, error) {
	return o.change(in.Operation, func(old *journal.Entry, now time.Time) (journal.Entry, journal.Entry, bool, error) {
		e, write, err := o.rules.Enlist(old, in, now)
		return e, e, write, err
	})
}

func (o *outbox) Begin(_ context.Context, in journal.Intent) (journal.Entry, error) {
	return o.change(in.Operation, func(old *journal.Entry, now time.Time) (journal.Entry, journal.Entry, bool, error) {
		return o.rules.Begin(old, in, now)
	})
}

func (o *outbox) Renew(_ context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return o.change(e.Operation, func(old *journal.Entry, now time.Time) (journal.Entry, journal.Entry, bool, error) {
		out, err := o.rules.Renew(old, e, n, now)
		return out, out, err == nil, err
	})
}

func (o *outbox) Finish(_ context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	return o.change(e.Operation, func(old *journal.Entry, now time.Time) (journal.Entry, journal.Entry, bool, error) {
		out, write, err := o.rules.Finish(old, e, s, n, now)
		return out, out, write, err
	})
}

func (o *outbox) Release(_ context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return o.change(e.Operation, func(old *journal.Entry, _ time.Time) (journal.Entry, journal.Entry, bool, error) {
		out, err := o.rules.Release(old, e, n)
		return out, out, err == nil, err
	})
}

func (o *outbox) Get(_ context.Context, op journal.Operation) (journal.Entry, error) {
	return o.change(op, func(old *journal.Entry, _ time.Time) (journal.Entry, journal.Entry, bool, error) {
		if old == nil {
			return journal.Entry{}, journal.Entry{}, false, journal.ErrNotFound
		}
		return *old, *old, false, nil
	})
}

func (o *outbox) Pending(context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		o.mu.Lock()
		var all []journal.Entry
		for _, e := range o.entries {
			if e.State == journal.Pending {
				all = append(all, e)
			}
		}
		o.mu.Unlock()
		slices.SortFunc(all, func(a, b journal.Entry) int { return a.Created.Compare(b.Created) })
		for _, e := range all {
			if !yield(e, nil) {
				return
			}
		}
	}
}

// enlistPayment writes charge/id down, as a transaction of the caller's own does
// together with the order.
func enlistPayment(t *testing.T, c *idem.Client, o *outbox, s *fakeserver.Server, id string) journal.Entry {
	t.Helper()
	in, err := c.Intent(newPayment(t, charging(t.Context(), id), s, id))
	require.NoError(t, err)
	e, err := o.Enlist(in)
	require.NoError(t, err)
	require.True(t, e.Enlisted)
	require.True(t, e.FirstSend.IsZero())
	return e
}

// --- what was written down for the resume

// Try it now, the resume is the safety net: who wrote the operation down need
// not call again, so that nobody may be told that nothing will happen.
func TestEnlistedOperationThatIsTriedInVainIsCarriedOutByTheNextResume(t *testing.T) {
	errSign := errors.New("no signature")
	for name, c := range map[string]struct {
		trouble func(t *testing.T, s *fakeserver.Server)
		edit    func(*idem.Transport)
		err     error // nil: the call has an answer
	}{
		"the server is down": {func(_ *testing.T, s *fakeserver.Server) { s.Refuse(1) }, withAttempts(1), idem.ErrAttemptsExhausted},
		"the credential is refused": {func(t *testing.T, s *fakeserver.Server) {
			require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 403}))
		}, withAttempts(1), nil},
		"nothing is sent": {func(*testing.T, *fakeserver.Server) {}, func(tr *idem.Transport) {
			tr.Prepare = func(*http.Request) error { return errSign }
		}, errSign},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s, j := inMemory(t), newOutbox()
				resumer := idem.NewClient(journalled(s, j))
				key := enlistPayment(t, resumer, j, s, "1").Key
				c.trouble(t, s)
				r, err := pay(t, journalled(s, j, c.edit), s, "1")
				require.ErrorIs(t, err, c.err)
				require.Equal(t, idem.Unknown, r.Outcome, "it will be carried out")
				require.Empty(t, s.Effects())
				require.False(t, entryOf(t, j, "1").Clear)

				sum, err := resumer.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
				require.Len(t, s.Effects(), 1)
				require.Equal(t, key, s.Effects()[0].Key)
				require.Equal(t, journal.Done, entryOf(t, j, "1").State)
			})
		})
	}
}

// The provider's own no ends it for the resume too, and what begins then was
// written down by nobody.
func TestEnlistedOperationThatIsDeclinedIsNotResumed(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s, j := inMemory(t), newOutbox()
		c := idem.NewClient(journalled(s, j, withAttempts(1)))
		post := func() *http.Request {
			return newPost(t, charging(t.Context(), "1"), s.URL()+"/v1/payments", declinedJSON)
		}
		in, err := c.Intent(post())
		require.NoError(t, err)
		_, err = j.Enlist(in)
		require.NoError(t, err)
		resp, err := c.Do(post())
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, idem.Refused, idem.OutcomeOf(resp, nil))
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Zero(t, sum)

		s.Refuse(1)
		r, err := pay(t, journalled(s, j, withAttempts(1)), s, "1")
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		require.Equal(t, idem.NotExecuted, r.Outcome)
		require.Equal(t, 2, entryOf(t, j, "1").Generation)
		sum, err = c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum)
		require.Empty(t, s.Effects())
	})
}

// Whoever was told that nothing was done, and then writes it down for the
// resume, relies on the resume; the key window begins with that.
func TestOperationThatIsEnlistedAfterItsCallerWasToldIsResumed(t *testing.T) {
	for outcome, trouble := range map[idem.Outcome]func(t *testing.T, s *fakeserver.Server){
		idem.NotExecuted: func(_ *testing.T, s *fakeserver.Server) { s.Refuse(1) },
		idem.Refused: func(t *testing.T, s *fakeserver.Server) {
			require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 403}))
		},
	} {
		t.Run(outcome.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s, j := inMemory(t), newOutbox()
				c := idem.NewClient(journalled(s, j))
				trouble(t, s)
				r, _ := pay(t, journalled(s, j, withAttempts(1)), s, "1")
				require.Equal(t, outcome, r.Outcome)
				sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum, "it is left to its caller")
				time.Sleep(30 * time.Hour) // longer than the window

				require.Equal(t, r.Key, enlistPayment(t, c, j, s, "1").Key)
				sum, err = c.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
				require.Len(t, s.Effects(), 1)
				require.Equal(t, r.Key, s.Effects()[0].Key)
			})
		})
	}
}

// The call that runs meanwhile learns of it at its end: neither may its caller be
// told that nothing will happen, nor the entry be left to that caller.
func TestOperationThatIsEnlistedWhileACallRunsIsResumed(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s, j := inMemory(t), newOutbox()
		c := idem.NewClient(journalled(s, j))
		var key string
		r, err := pay(t, journalled(s, j, withAttempts(1), func(tr *idem.Transport) {
			tr.Prepare = func(*http.Request) error {
				in, err := c.Intent(newPayment(t, charging(t.Context(), "1"), s, "1"))
				require.NoError(t, err)
				e, err := j.Enlist(in)
				require.NoError(t, err)
				require.True(t, e.Enlisted && e.Claimed(time.Now()))
				key = e.Key
				s.Refuse(1)
				return nil
			}
		}), s, "1")
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		require.NotErrorIs(t, err, idem.ErrJournal)
		require.Equal(t, idem.Unknown, r.Outcome)
		require.Empty(t, s.Effects())
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, key, s.Effects()[0].Key)
	})
}

// --- what changed since the resume read it

// The process that resumes ends between its claim and its last word, and has
// not unsaid what a caller was told meanwhile.
func TestResumeThatDiesLeavesAnEntryToTheCallerWhoWasToldMeanwhile(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		caller := journalled(s, m, withAttempts(1))
		enlist(t, idem.NewClient(caller), m, s, "1")
		dying := watch(m)
		dying.trouble = failing(errCrash, "Release")
		sum, err := idem.NewClient(journalled(s, dying)).Resume(t.Context(), func(ctx context.Context, e journal.Entry) (*http.Request, error) {
			s.Refuse(1)
			r, err := pay(t, caller, s, "1")
			require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
			require.Equal(t, idem.NotExecuted, r.Outcome)
			require.True(t, entryOf(t, m, "1").Clear)
			return rebuild(t, s)(ctx, e)
		}, nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum)
		require.True(t, entryOf(t, m, "1").Clear)
		require.Empty(t, entryOf(t, m, "1").Owner)

		time.Sleep(time.Minute) // longer than a lease
		sum, err = idem.NewClient(journalled(s, m)).Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Empty(t, s.Effects(), "its caller was told that nothing was done, and has not called again")
		require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum)
	})
}

// A long resume, short windows, and tombstones that are kept no longer: what the
// resume comes to has been done, and nobody remembers it.
func TestResumeDoesNotBeginWhatWasSweptMeanwhile(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{Retention: time.Hour})
		m := new(journal.Memory)
		tr := journalled(s, m, func(tr *idem.Transport) { tr.Policy.KeyWindow = time.Hour })
		c := idem.NewClient(tr)
		enlist(t, c, m, s, "1")
		sum, err := c.Resume(t.Context(), func(ctx context.Context, e journal.Entry) (*http.Request, error) {
			r, err := pay(t, tr, s, "1")
			require.NoError(t, err)
			require.Equal(t, idem.Executed, r.Outcome)
			time.Sleep(2 * time.Hour) // those before it
			swept, err := m.Sweep(ctx, time.Hour)
			require.NoError(t, err)
			require.Equal(t, 1, swept.Deleted)
			return rebuild(t, s)(ctx, e)
		}, nil)
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum)
		_, err = m.Get(t.Context(), chargeOf("1"))
		require.ErrorIs(t, err, journal.ErrNotFound)
	})
}

// --- whose request it is

// Two providers behind one journal and one seal: the key of the one would be in
// a header that the other does not know, and the credential of the other at the
// one.
func TestSealedRequestOfAnotherProviderIsSkipped(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			if n == 1 {
				return nil, io.ErrUnexpectedEOF // the answer is lost
			}
			return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
		}}
		other := func(tr *idem.Transport) { tr.Dialect.Name, tr.Dialect.Header = "other", "PayPal-Request-Id" }
		_, err := onWire(w, remembering(m), sealing(t, 1), other, withAttempts(1)).RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		mine := onWire(w, remembering(m), sealing(t, 1), func(tr *idem.Transport) {
			tr.Prepare = func(req *http.Request) error { req.Header.Set("Authorization", "Bearer mine"); return nil }
		})
		before := entryOf(t, m, "1")
		sum, err := idem.NewClient(mine).Resume(t.Context(), func(context.Context, journal.Entry) (*http.Request, error) {
			return nil, nil // not mine
		}, nil)
		require.Len(t, w.seen(), 1)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum)
		require.Equal(t, before, entryOf(t, m, "1"), "it was not claimed")

		sum, err = idem.NewClient(onWire(w, remembering(m), sealing(t, 1), other)).Resume(t.Context(), nil, nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Equal(t, w.seen()[0].header["Paypal-Request-Id"], w.seen()[1].header["Paypal-Request-Id"])
		require.Equal(t, []string{before.Key}, w.seen()[1].header["Paypal-Request-Id"])
	})
}

// The context of the answer is the one at hand in done: what is sent under it is
// an operation like any other, and not the one that is resumed.
func TestDoneMayCallAnotherOperationUnderTheContextOfTheAnswer(t *testing.T) {
	virtual(t, func(t *testing.T) {
		j := watch(new(journal.Memory))
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			if strings.HasSuffix(req.URL.Path, "/capture") {
				return answer(req, 402, jsonType(), `{"type":"card"}`), nil
			}
			return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
		}}
		c := idem.NewClient(onWire(w, remembering(j)))
		key := enlist(t, c, j, onTheWire, "1").Key
		capture := journal.Operation{Name: "capture", ID: "1"}
		sum, err := c.Resume(t.Context(), rebuild(t, onTheWire), func(_ journal.Entry, resp *http.Response) error {
			ctx := idem.WithOperation(resp.Request.Context(), idem.Operation{Name: capture.Name, ID: capture.ID})
			second, err := c.Do(newPost(t, ctx, wireURL+"/capture", `{}`))
			require.NoError(t, err)
			readAll(t, second)
			require.Equal(t, idem.Refused, idem.OutcomeOf(second, nil))
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		e := entryOf(t, j, "1")
		require.Equal(t, journal.Done, e.State, "the charge was made")
		require.Equal(t, "pay_1", e.Reference)
		require.Equal(t, 201, e.Status)
		e, err = j.Get(t.Context(), capture)
		require.NoError(t, err)
		require.Equal(t, journal.Refused, e.State)
		require.Empty(t, e.Owner)
		renewals := len(j.heard("Renew"))
		time.Sleep(time.Hour) // no renewal is left behind
		require.Equal(t, renewals, len(j.heard("Renew")))

		resp, err := c.Do(newPost(t, charging(t.Context(), "1"), wireURL, paymentJSON("1", 1999)))
		require.NoError(t, err)
		readAll(t, resp)
		for _, send := range w.seen() {
			if !strings.HasSuffix(send.url, "/capture") {
				require.Equal(t, []string{key}, send.keys, "one charge")
			}
		}
	})
}

func TestPrepareMayFetchACredentialUnderTheContextOfAResume(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			if req.Method == http.MethodGet {
				return answer(req, 200, nil, "fresh"), nil
			}
			return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
		}}
		tr := onWire(w, remembering(m))
		c := idem.NewClient(tr)
		tr.Prepare = func(req *http.Request) error {
			if req.Method == http.MethodGet {
				return nil
			}
			get, err := http.NewRequestWithContext(req.Context(), http.MethodGet, onTheWire.URL()+"/credential", nil)
			if err != nil {
				return err
			}
			resp, err := c.Do(get)
			if err != nil {
				return err
			}
			req.Header.Set("Authorization", "Bearer "+readAll(t, resp))
			return nil
		}
		enlist(t, c, m, onTheWire, "1")
		sum, err := c.Resume(t.Context(), rebuild(t, onTheWire), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		sends := w.seen()
		require.Len(t, sends, 2)
		require.Empty(t, sends[0].keys)
		require.Equal(t, "Bearer fresh", sends[1].header.Get("Authorization"))
		require.Equal(t, []string{entryOf(t, m, "1").Key}, sends[1].keys)
	})
}

// --- ends

// The rest of an answer that done has seen enough of is waited for, but not for
// ever: its status says what became of the operation.
func TestAnswerWithoutAnEndDoesNotHoldAResume(t *testing.T) {
	for name, every := range map[string]time.Duration{"a stream that falls silent": 1000 * time.Hour, "a body that trickles": time.Second} {
		for _, c := range []struct {
			limit, want time.Duration // of an attempt, and what the resume takes
		}{{0, 30 * time.Second}, {5 * time.Second, 5 * time.Second}, {-1, 250 * time.Millisecond}} {
			t.Run(name+", "+c.limit.String(), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					var writers sync.WaitGroup
					defer writers.Wait()
					w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
						r, p := io.Pipe()
						closed := context.AfterFunc(req.Context(), func() { _ = p.CloseWithError(io.ErrUnexpectedEOF) })
						writers.Go(func() {
							defer closed()
							for {
								if _, err := io.WriteString(p, "data: 1\n\n"); err != nil {
									return
								}
								select {
								case <-time.After(every):
								case <-req.Context().Done():
								}
							}
						})
						return chunkedAnswer(req, "text/event-stream", r), nil
					}}
					m := new(journal.Memory)
					cl := idem.NewClient(onWire(w, remembering(m), func(tr *idem.Transport) { tr.Policy.AttemptTimeout = c.limit }))
					enlist(t, cl, m, onTheWire, "1")
					ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
					defer cancel()
					start := time.Now()
					sum, err := cl.Resume(ctx, rebuild(t, onTheWire), nil)
					require.NoError(t, err)
					require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
					require.Equal(t, c.want, time.Since(start))
					require.Equal(t, journal.Done, entryOf(t, m, "1").State)
				})
			})
		}
	}
}

// The claim is held for done while the redirect is followed, and nobody comes to
// done.
func TestResumeThatEndsBehindARedirectLeavesNoClaim(t *testing.T) {
	for name, c := range map[string]struct {
		onGET func() // in the base
		edit  func(*idem.Transport)
	}{
		"a panic of the base":  {func() { panic("out of order") }, func(*idem.Transport) {}},
		"a Goexit in the base": {runtime.Goexit, func(*idem.Transport) {}},
		"a panic of Prepare": {func() {}, func(tr *idem.Transport) {
			tr.Prepare = func(req *http.Request) error {
				if req.Method == http.MethodGet {
					panic("out of order")
				}
				return nil
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				j := watch(new(journal.Memory))
				w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
					if req.Method == http.MethodGet {
						if n == 2 {
							c.onGET()
						}
						return answer(req, 200, jsonType(), `{"id":"pay_1"}`), nil
					}
					return answer(req, 303, http.Header{"Location": {wireURL + "/1"}}, ""), nil
				}}
				cl := idem.NewClient(onWire(w, remembering(j), c.edit))
				enlist(t, cl, j, onTheWire, "1")
				var group sync.WaitGroup
				group.Go(func() {
					defer func() {
						if v := recover(); v != nil && v != "out of order" {
							t.Error(v)
						}
					}()
					_, _ = cl.Resume(t.Context(), rebuild(t, onTheWire), nil)
					t.Error("it returned")
				})
				group.Wait()
				e := entryOf(t, j, "1")
				require.Equal(t, journal.Pending, e.State)
				require.Empty(t, e.Owner)
				require.Equal(t, 1, e.Attempts)
				require.Equal(t, 1, e.Resumes, "that is how a crash loop begins")
				renewals := len(j.heard("Renew"))
				time.Sleep(24 * time.Hour) // no renewal is left behind
				require.Equal(t, renewals, len(j.heard("Renew")))
			})
		})
	}
}
