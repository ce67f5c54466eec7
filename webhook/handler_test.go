package webhook_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

// The table of package fakeserver: what a receiver answers that looks at size,
// signature and time and remembers ids, and how often it acts.
func TestEveryFaultOfADeliveryIsAnsweredAndHandledAsItShould(t *testing.T) {
	for kind, want := range map[fakeserver.DeliveryKind]struct {
		answers []int
		acts    int
	}{
		fakeserver.Twice: {[]int{503, 200, 200}, 1}, fakeserver.Replayed: {[]int{200, 400}, 1},
		fakeserver.OtherBody: {[]int{200, 200}, 1}, fakeserver.OtherID: {[]int{200, 200}, 2},
		fakeserver.Reordered: {[]int{200}, 1}, fakeserver.Delayed: {[]int{400, 200}, 1},
		fakeserver.OldTimestamp: {[]int{400, 200}, 1}, fakeserver.FutureTimestamp: {[]int{400, 200}, 1},
		fakeserver.Forged: {[]int{401, 200}, 1}, fakeserver.Unsigned: {[]int{401, 200}, 1},
		fakeserver.Reencoded: {[]int{401, 200}, 1}, fakeserver.LostAnswer: {[]int{200, 200}, 1},
		fakeserver.Huge: {[]int{413, 200}, 1},
	} {
		t.Run(string(kind), func(t *testing.T) {
			virtual(t, func(t *testing.T, s *fakeserver.Server) {
				r := newReceiver(func(r *receiver) { r.shop.work = time.Millisecond })
				register(t, s, r)
				f := fakeserver.DeliveryFault{Kind: kind}
				if kind == fakeserver.OtherBody || kind == fakeserver.OtherID {
					f.Delay = time.Second
				}
				fail(t, s, "order-1", f)
				pay(t, s, "order-1")
				settled(t, s)
				got := statuses(s)
				if kind == fakeserver.Twice { // which of the two is first is the scheduler's choice
					require.Contains(t, [][]int{{503, 200}, {200, 503}, {503, 200, 200}, {200, 503, 200}}, got)
				} else {
					require.Equal(t, want.answers, got)
				}
				_, effects := r.shop.count()
				require.Equal(t, map[string]int{"payment.succeeded order-1": want.acts}, effects)
				require.Equal(t, fakeserver.EventDelivered, s.Events()[0].State)
			})
		})
	}
}

func TestAMixOfAllFaultsHandlesEveryEventOnce(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		r := newReceiver(func(r *receiver) {
			r.shop.work = 50 * time.Millisecond
			r.shop.before = func(_ *http.Request, run int) int {
				if run%7 == 0 {
					return http.StatusInternalServerError
				}
				return 0
			}
		})
		register(t, s, r, func(e *fakeserver.Endpoint) { e.TimeInBody = true })
		require.NoError(t, s.InjectDeliveries(fakeserver.MixedDeliveries(0.6, 1)...))
		want := map[string]int{}
		for i := range 200 {
			reference := fmt.Sprintf("order-%d", i)
			pay(t, s, reference)
			want["payment.succeeded "+reference] = 1
		}
		settled(t, s)
		_, effects := r.shop.count()
		require.Equal(t, want, effects)
		for _, e := range s.Events() {
			require.Equal(t, fakeserver.EventDelivered, e.State)
		}
	})
}

func TestOnly2xxMarksTheEventAndEveryAnswerIsPassedThrough(t *testing.T) {
	for status, done := range map[int]bool{
		200: true, 201: true, 202: true, 204: true, 302: false, 400: false, 404: false, 409: false, 410: false, 429: false, 500: false, 503: false,
	} {
		r := newReceiver(func(r *receiver) {
			r.Next = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				body, err := io.ReadAll(req.Body)
				require.NoError(t, err)
				require.Equal(t, event("order-1"), string(body), "the body is given back")
				require.Equal(t, int64(len(body)), req.ContentLength)
				w.Header().Set("X-Shop", "7")
				w.WriteHeader(http.StatusEarlyHints)
				w.WriteHeader(status)
				w.WriteHeader(http.StatusNonAuthoritativeInfo) // too late
				_, _ = w.Write([]byte("said"))
				_, _ = w.Write([]byte(" it"))
			})
		})
		a := post(t, r, "msg_1", event("order-1"))
		require.Equal(t, status, a.status)
		require.Equal(t, "said it", a.body)
		require.Equal(t, "7", a.header.Get("X-Shop"))
		state, known := r.known(t, "msg_1")
		require.True(t, known)
		require.Equal(t, done, state == journal.Done, "%d", status)
		d := r.ears.all()[0]
		require.Equal(t, map[bool]webhook.Result{true: webhook.Ran, false: webhook.Failed}[done], d.Result)
		require.Equal(t, status, d.Status)
		require.Equal(t, "msg_1", d.ID)
		require.NoError(t, d.Err)

		again := post(t, r, "msg_1", event("order-1"))
		if done {
			require.Equal(t, http.StatusOK, again.status)
			require.Empty(t, again.body)
			require.Equal(t, webhook.AlreadyDone, r.ears.all()[1].Result)
		} else {
			require.Equal(t, status, again.status, "the claim was not released")
		}
	}
}

func TestAFailureThatIsSaidAfterASuccessIsBelieved(t *testing.T) {
	for name, c := range map[string]struct {
		next   http.HandlerFunc
		status int
		body   string
	}{
		"after a Write": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "4")
			_, _ = w.Write([]byte("done"))
			http.Error(w, "it failed", http.StatusInternalServerError)
		}, 500, "it failed\n"},
		"after a 202, with a length": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "4")
			w.WriteHeader(http.StatusAccepted)
			_, _ = w.Write([]byte("done"))
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = w.Write([]byte("later"))
		}, 503, "later"},
		"a redirect": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("done"))
			w.WriteHeader(http.StatusFound)
		}, 302, ""},
		"after too long an answer": {func(w http.ResponseWriter, _ *http.Request) {
			_, err := w.Write(make([]byte, 70_000))
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}, 500, "webhook: invalid: the answer to a delivery has more than 65536 bytes; the rest is dropped\n"},
		"a success after it changes nothing": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("done"))
			w.WriteHeader(http.StatusTooManyRequests)
			w.WriteHeader(http.StatusOK)
			w.WriteHeader(http.StatusBadGateway)
			_, _ = w.Write([]byte("slowly"))
		}, 429, "slowly"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReceiver(func(r *receiver) { r.Next = c.next })
			a := onLoopback(t, r).deliver(t, "msg_1", "{}")
			require.Equal(t, c.status, a.status)
			require.Equal(t, c.body, a.body)
			d := r.ears.all()[0]
			require.Equal(t, webhook.Failed, d.Result)
			require.Equal(t, c.status, d.Status)
			require.NoError(t, d.Err)
			state, _ := r.known(t, "msg_1")
			require.Equal(t, journal.Pending, state)

			r.Next = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
			require.Equal(t, http.StatusOK, post(t, r, "msg_1", "{}").status)
			require.Equal(t, webhook.Ran, r.ears.all()[1].Result, "the claim was not released")
		})
	}
}

func TestAHandlerThatSaysNothingHasDoneIt(t *testing.T) {
	r := newReceiver(func(r *receiver) { r.Next = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}) })
	require.Equal(t, http.StatusOK, post(t, r, "msg_1", "{}").status)
	require.Equal(t, webhook.Ran, r.ears.all()[0].Result)
}

func TestWhatWasSetBeforeNextStaysAndAnAnswerOfNextThatIsNotSentLeavesNothing(t *testing.T) {
	r := newReceiver()
	r.Journal = &failing{Journal: r.memory, finish: func() error { return journal.ErrLatched }}
	r.Next = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Set-Cookie", "a=b")
		w.Header().Set("Content-Length", "4")
		w.Header().Del("X-Outer")
		_, _ = w.Write([]byte("done"))
	})
	outer := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("X-Outer", "1")
		r.ServeHTTP(w, req)
	})
	a := post(t, outer, "msg_1", "{}")
	require.Equal(t, http.StatusServiceUnavailable, a.status)
	require.Equal(t, "1", a.header.Get("X-Outer"))
	require.Empty(t, a.header.Get("Set-Cookie"))
	require.Empty(t, a.header.Get("Content-Length"))

	r.Journal = &journal.Memory{}
	a = post(t, outer, "msg_1", "{}")
	require.Equal(t, http.StatusOK, a.status)
	require.Empty(t, a.header.Get("X-Outer"), "Next took it away")
	require.Equal(t, "a=b", a.header.Get("Set-Cookie"))
}

func TestALargeAnswerIsCutAndTheEventIsDone(t *testing.T) {
	var short error
	r := newReceiver(func(r *receiver) {
		r.Next = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100000")
			_, err := w.Write(make([]byte, 60_000))
			require.NoError(t, err)
			_, short = w.Write(make([]byte, 40_000))
		})
	})
	a := post(t, r, "msg_1", "{}")
	require.Equal(t, http.StatusOK, a.status)
	require.Len(t, a.body, 64<<10)
	require.Empty(t, a.header.Get("Content-Length"))
	require.ErrorIs(t, short, webhook.ErrInvalid)
	require.ErrorContains(t, short, "65536")
	require.ErrorIs(t, r.ears.all()[0].Err, short)
	require.Equal(t, webhook.Ran, r.ears.all()[0].Result)
	state, _ := r.known(t, "msg_1")
	require.Equal(t, journal.Done, state)
}

func TestAPanicReleasesTheClaimAndGoesOn(t *testing.T) {
	r := newReceiver(func(r *receiver) {
		r.shop.before = func(_ *http.Request, run int) int {
			if run == 1 {
				panic(http.ErrAbortHandler)
			}
			return 0
		}
	})
	l := onLoopback(t, r)
	require.Zero(t, l.deliver(t, "msg_1", event("order-1")).status, "the sender hears no answer")
	state, known := r.known(t, "msg_1")
	require.True(t, known)
	require.Equal(t, journal.Pending, state)
	require.Equal(t, http.StatusOK, l.deliver(t, "msg_1", event("order-1")).status)
	_, effects := r.shop.count()
	require.Equal(t, map[string]int{"payment.succeeded order-1": 1}, effects)
	d := r.ears.all()[0]
	require.Equal(t, webhook.Failed, d.Result)
	require.Zero(t, d.Status)
}

func TestTheClaimIsRenewedWhileTheHandlerRuns(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		r := newReceiver(func(r *receiver) { r.shop.work, r.Timeout = 20*time.Minute, time.Hour })
		first := make(chan answer, 1)
		go func() { first <- post(t, r, "msg_1", event("order-1")) }()
		for range 19 {
			time.Sleep(time.Minute)
			a := post(t, r, "msg_1", event("order-1"))
			require.Equal(t, http.StatusServiceUnavailable, a.status)
			require.Equal(t, "in-progress", a.Reason)
			wait := retryAfter(t, a.header)
			require.True(t, 1 <= wait && wait <= 30, "%d", wait)
		}
		require.Equal(t, http.StatusOK, (<-first).status)
		require.Equal(t, http.StatusOK, post(t, r, "msg_1", event("order-1")).status)
		runs, _ := r.shop.count()
		require.Equal(t, 1, runs)
		d := r.ears.all()[0]
		require.Equal(t, webhook.InProgress, d.Result)
		var e *webhook.Error
		require.ErrorAs(t, d.Err, &e)
		require.Equal(t, webhook.ErrInProgress, e.Reason)
		require.True(t, e.Again.After(d.Start))
	})
}

func TestAHandlerThatHangsLosesItsClaimAndItsLateAnswerIsNotBelieved(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		hang, hold := make(chan struct{}), make(chan struct{})
		r := newReceiver(func(r *receiver) {
			r.Timeout = time.Minute
			r.shop.before = func(_ *http.Request, run int) int {
				if run == 1 {
					<-hang // and takes no notice of its context
				} else {
					<-hold
				}
				return 0
			}
		})
		first, second := make(chan answer, 1), make(chan answer, 1)
		go func() { first <- post(t, r, "msg_1", event("order-1")) }()
		time.Sleep(59 * time.Second)
		require.Equal(t, http.StatusServiceUnavailable, post(t, r, "msg_1", event("order-1")).status)
		time.Sleep(32 * time.Second) // the rest of the timeout, and of the lease
		go func() { second <- post(t, r, "msg_1", event("order-1")) }()
		synctest.Wait()
		close(hang)
		require.Equal(t, http.StatusServiceUnavailable, (<-first).status, "the second one may still fail")
		close(hold)
		require.Equal(t, http.StatusOK, (<-second).status)
	})
}

// late is a shop that does its work whatever its context says.
func late(work time.Duration, cause *error) http.Handler {
	return http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		time.Sleep(work)
		*cause = context.Cause(r.Context())
	})
}

func TestAClaimThatWasTakenOverCannotMark(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		var cause error
		r := newReceiver()
		// A process that is stopped for longer than its lease renews nothing.
		asleep := &failing{Journal: r.memory, renew: func() error { time.Sleep(time.Minute); return nil }}
		first := *r.Handler
		first.Journal, first.Next = asleep, late(time.Minute, &cause)
		got := make(chan answer, 1)
		go func() { got <- post(t, &first, "msg_1", "{}") }()
		time.Sleep(31 * time.Second)

		release := make(chan struct{})
		second := *r.Handler
		second.Next = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { <-release; w.WriteHeader(http.StatusInternalServerError) })
		other := make(chan answer, 1)
		go func() { other <- post(t, &second, "msg_1", "{}") }()
		a := <-got
		require.Equal(t, http.StatusServiceUnavailable, a.status, "the second one is going to fail")
		require.Equal(t, "not-marked", a.Reason)
		require.Equal(t, 30, retryAfter(t, a.header))
		d := r.ears.all()[0]
		require.Equal(t, webhook.Unmarked, d.Result)
		require.ErrorIs(t, d.Err, webhook.ErrUnmarked)
		require.ErrorIs(t, d.Err, journal.ErrClaimLost)
		close(release)
		require.Equal(t, http.StatusInternalServerError, (<-other).status)
		state, _ := r.known(t, "msg_1")
		require.Equal(t, journal.Pending, state)
	})
}

func TestTheContextEndsWhenTheClaimIsLost(t *testing.T) {
	for name, renew := range map[string]func() error{
		"taken over":              func() error { return journal.ErrClaimLost },
		"lease cannot be renewed": func() error { return errDisk },
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, s *fakeserver.Server) {
				r := newReceiver()
				r.Journal = &failing{Journal: r.memory, renew: renew}
				var cause error
				var after time.Duration
				r.Next = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					start := time.Now()
					<-req.Context().Done()
					cause, after = context.Cause(req.Context()), time.Since(start)
					w.WriteHeader(http.StatusServiceUnavailable)
				})
				post(t, r, "msg_1", "{}")
				require.ErrorIs(t, cause, journal.ErrClaimLost)
				require.LessOrEqual(t, after, 31*time.Second)
				if name != "taken over" {
					require.ErrorIs(t, cause, errDisk)
					require.GreaterOrEqual(t, after, 30*time.Second, "there was time to try again")
				}
			})
		})
	}
}

func TestARenewalThatFailsForAWhileLosesNothing(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		r := newReceiver(func(r *receiver) { r.shop.work = 2 * time.Minute })
		start := time.Now()
		r.Journal = &failing{Journal: r.memory, renew: func() error {
			if off := time.Since(start); off > 15*time.Second && off < 36*time.Second {
				return errDisk
			}
			return nil
		}}
		require.Equal(t, http.StatusOK, post(t, r, "msg_1", event("order-1")).status)
		runs, _ := r.shop.count()
		require.Equal(t, 1, runs)
	})
}

func TestAMarkThatFailsIsNotAnsweredWith200(t *testing.T) {
	for name, broken := range map[string]error{"for ever": errDisk, "until it is opened anew": journal.ErrLatched} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, s *fakeserver.Server) {
				r := newReceiver()
				r.Journal = &failing{Journal: r.memory, finish: func() error { return broken }}
				start := time.Now()
				a := post(t, r, "msg_1", event("order-1"))
				took := time.Since(start)
				require.Equal(t, broken == errDisk, took > 5*time.Second, "it was tried for %v", took)
				require.LessOrEqual(t, took, 11*time.Second)
				require.Equal(t, http.StatusServiceUnavailable, a.status)
				require.Equal(t, "not-marked", a.Reason)
				wait := retryAfter(t, a.header)
				require.True(t, 1 <= wait && wait <= 30, "%d", wait)
				require.NotContains(t, a.body, broken.Error())
				d := r.ears.all()[0]
				require.Equal(t, webhook.Unmarked, d.Result)
				require.ErrorIs(t, d.Err, broken)

				// The claim stands until its lease ends: it is not free for others at once.
				require.Equal(t, http.StatusServiceUnavailable, post(t, r, "msg_1", event("order-1")).status)
				r.Journal = r.memory
				time.Sleep(31 * time.Second)
				require.Equal(t, http.StatusOK, post(t, r, "msg_1", event("order-1")).status)
			})
		})
	}
	t.Run("for a few seconds", func(t *testing.T) {
		virtual(t, func(t *testing.T, s *fakeserver.Server) {
			r := newReceiver()
			start := time.Now()
			r.Journal = &failing{Journal: r.memory, finish: func() error {
				if time.Since(start) < 5*time.Second {
					return errDisk
				}
				return nil
			}}
			require.Equal(t, http.StatusOK, post(t, r, "msg_1", event("order-1")).status)
			require.Less(t, time.Since(start), 10*time.Second)
			require.Equal(t, http.StatusOK, post(t, r, "msg_1", event("order-1")).status)
			runs, _ := r.shop.count()
			require.Equal(t, 1, runs)
		})
	})
}

func TestAJournalThatFailsLetsNothingRun(t *testing.T) {
	r := newReceiver()
	r.Journal = &failing{Journal: r.memory, begin: func() error { return errDisk }}
	a := post(t, r, "msg_1", event("order-1"))
	require.Equal(t, http.StatusServiceUnavailable, a.status)
	require.Equal(t, "unavailable", a.Reason)
	require.Equal(t, 30, retryAfter(t, a.header))
	runs, _ := r.shop.count()
	require.Zero(t, runs)
	d := r.ears.all()[0]
	require.Equal(t, webhook.Unavailable, d.Result)
	require.ErrorIs(t, d.Err, webhook.ErrJournal)
	require.ErrorIs(t, d.Err, errDisk)
}

func TestAReleaseThatFailsIsTold(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		r := newReceiver(func(r *receiver) { r.shop.before = func(*http.Request, int) int { return 500 } })
		r.Journal = &failing{Journal: r.memory, release: func() error { return errDisk }}
		require.Equal(t, 500, post(t, r, "msg_1", event("order-1")).status)
		require.ErrorIs(t, r.ears.all()[0].Err, errDisk)
		require.Equal(t, 503, post(t, r, "msg_1", event("order-1")).status, "the claim is still there")
		time.Sleep(30 * time.Second)
		require.Equal(t, 500, post(t, r, "msg_1", event("order-1")).status, "and ends by itself")
	})
}

func TestAHandlerGoesOnWhenTheSenderHangsUp(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		r := newReceiver(func(r *receiver) { r.shop.work = 20 * time.Second })
		register(t, s, r, func(e *fakeserver.Endpoint) { e.Timeout = 5 * time.Second })
		pay(t, s, "order-1")
		settled(t, s)
		runs, _ := r.shop.count()
		require.Equal(t, 1, runs)
		require.Equal(t, fakeserver.EventDelivered, s.Events()[0].State)
		// No answer, then perhaps busy, then done.
		got := statuses(s)
		require.Zero(t, got[0])
		require.Equal(t, http.StatusOK, got[len(got)-1])
	})
}

// As FinishTx of sqljournal does, in the transaction of the effect.
func TestAHandlerThatFinishesTheEntryItselfMayGoOnAfterwards(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		r := newReceiver()
		var ended error
		r.Next = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			e, ok := webhook.EntryOf(req.Context())
			require.True(t, ok)
			require.Equal(t, journal.Operation{Scope: "shop", Name: "webhook", ID: "msg_1"}, e.Operation)
			_, err := r.memory.Finish(req.Context(), e, journal.Done, journal.Note{})
			require.NoError(t, err)
			time.Sleep(2 * time.Minute)
			ended = req.Context().Err()
			w.WriteHeader(http.StatusAccepted)
		})
		got := make(chan answer, 1)
		go func() { got <- post(t, r, "msg_1", "{}") }()
		time.Sleep(time.Minute)
		require.Equal(t, http.StatusOK, post(t, r, "msg_1", "{}").status, "it is done for everybody")
		require.Equal(t, http.StatusAccepted, (<-got).status)
		require.NoError(t, ended, "the renewal took a finished entry for a lost one")
		require.Equal(t, webhook.Ran, r.ears.all()[1].Result)

		r.Next = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			e, _ := webhook.EntryOf(req.Context())
			_, err := r.memory.Finish(req.Context(), e, journal.Done, journal.Note{})
			require.NoError(t, err)
			w.WriteHeader(http.StatusInternalServerError) // after the commit
		})
		require.Equal(t, http.StatusInternalServerError, post(t, r, "msg_2", "{}").status)
		require.NoError(t, r.ears.all()[2].Err)
		require.Equal(t, http.StatusOK, post(t, r, "msg_2", "{}").status, "the commit counts")
	})
	_, ok := webhook.EntryOf(t.Context())
	require.False(t, ok)
}

func TestAnEventThatIsFinishedAsRefusedIsNotDone(t *testing.T) {
	virtual(t, func(t *testing.T, _ *fakeserver.Server) {
		r := newReceiver()
		runs := 0
		r.Next = http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			if runs++; runs == 1 {
				e, _ := webhook.EntryOf(req.Context())
				_, err := r.memory.Finish(req.Context(), e, journal.Refused, journal.Note{})
				require.NoError(t, err)
			}
		})
		require.Equal(t, http.StatusServiceUnavailable, post(t, r, "msg_1", "{}").status)
		require.Equal(t, webhook.Unmarked, r.ears.all()[0].Result)
		require.ErrorIs(t, r.ears.all()[0].Err, journal.ErrClaimLost)
		require.Equal(t, http.StatusOK, post(t, r, "msg_1", "{}").status)
		require.Equal(t, webhook.Ran, r.ears.all()[1].Result)
		require.Equal(t, 2, runs)
	})
}

func TestOnlyPostIsADelivery(t *testing.T) {
	r := newReceiver()
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPut, http.MethodDelete, http.MethodOptions, "post"} {
		a := post(t, r, "msg_1", event("order-1"), func(req *http.Request) { req.Method = method })
		require.Equal(t, http.StatusMethodNotAllowed, a.status)
		require.Equal(t, http.MethodPost, a.header.Get("Allow"))
		require.Equal(t, "method-not-allowed", a.Reason)
	}
	runs, _ := r.shop.count()
	require.Zero(t, runs)
}

func TestABodyThatDoesNotArriveWholeIsRefused(t *testing.T) {
	r := newReceiver()
	a := post(t, r, "msg_1", "{}", func(req *http.Request) {
		req.Body = io.NopCloser(io.MultiReader(strings.NewReader("{"), brokenReader{}))
		req.ContentLength = -1
	})
	require.Equal(t, http.StatusBadRequest, a.status)
	require.Equal(t, "body-cut-off", a.Reason)
	require.NotContains(t, a.body, errDisk.Error())
	_, known := r.known(t, "msg_1")
	require.False(t, known)
}

func TestABodyThatWasReadBeforeIsNoWrongSignature(t *testing.T) {
	for name, c := range map[string]struct {
		before func(*testing.T, *http.Request)
		text   string
	}{
		"all of it": {func(t *testing.T, req *http.Request) {
			_, err := io.Copy(io.Discard, req.Body)
			require.NoError(t, err)
		}, "webhook: invalid: 0 of 7 bytes of the body were left: something before the Handler has read it"},
		"a part": {func(t *testing.T, req *http.Request) {
			_, err := io.ReadFull(req.Body, make([]byte, 3))
			require.NoError(t, err)
		}, "webhook: invalid: 4 of 7 bytes of the body were left: something before the Handler has read it"},
		"and closed": {func(t *testing.T, req *http.Request) {
			require.NoError(t, req.Body.Close())
		}, "webhook: invalid: the body was read and closed before the Handler got it"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReceiver()
			r.Next = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
			before := true
			l := onLoopback(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if before {
					c.before(t, req)
				}
				r.ServeHTTP(w, req)
			}))
			a := l.deliver(t, "msg_1", `{"a":1}`)
			require.Equal(t, http.StatusInternalServerError, a.status)
			require.Equal(t, "body-read-before", a.Reason)
			d := r.ears.all()[0]
			require.Equal(t, webhook.Rejected, d.Result)
			require.ErrorIs(t, d.Err, webhook.ErrInvalid)
			require.EqualError(t, d.Err, c.text)
			_, known := r.known(t, "msg_1")
			require.False(t, known)

			before = false
			require.Equal(t, http.StatusOK, l.deliver(t, "msg_1", `{"a":1}`).status)
		})
	}
}

func TestABodyThatIsTooLargeNamesTheField(t *testing.T) {
	for most, want := range map[int64]string{
		0: "webhook: the body has more than 1048576 bytes (Handler.MaxBody)",
		7: "webhook: the body has more than 7 bytes (Handler.MaxBody)",
	} {
		for _, length := range []int64{2 << 20, -1} { // said before, and found
			r := newReceiver(func(r *receiver) { r.MaxBody = most })
			a := post(t, r, "msg_1", "", func(req *http.Request) { req.Body, req.ContentLength = &endless{}, length })
			require.Equal(t, http.StatusRequestEntityTooLarge, a.status)
			err := r.ears.all()[0].Err
			require.EqualError(t, err, want)
			var large *http.MaxBytesError
			require.ErrorAs(t, err, &large)
		}
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errDisk }

func TestIdsThatCannotBeKeptAreRefused(t *testing.T) {
	for id, kept := range map[string]bool{
		"": false, strings.Repeat("x", 256): false, "a\x00b": false, "a\nb": false, "\xff": false, "a\u0085b": false,
		strings.Repeat("x", 255): true, "ü 世界": true, " ": true, "'; DROP TABLE": true,
	} {
		r := newReceiver(func(r *receiver) { r.Verify = func(http.Header, []byte) (string, error) { return id, nil } })
		a := post(t, r, "msg_1", event("order-1"))
		if kept {
			require.Equal(t, http.StatusOK, a.status, "%q", id)
			continue
		}
		require.Equal(t, http.StatusBadRequest, a.status, "%q", id)
		require.Equal(t, "event-id", a.Reason)
		require.ErrorIs(t, r.ears.all()[0].Err, webhook.ErrID)
	}
}

func TestErrorsOfAVerifierChooseTheStatus(t *testing.T) {
	for status, err := range map[int]error{
		401: webhook.ErrSignature, 400: fmt.Errorf("too old: %w", webhook.ErrTimestamp),
	} {
		r := newReceiver(func(r *receiver) { r.Verify = func(http.Header, []byte) (string, error) { return "msg_1", err } })
		require.Equal(t, status, post(t, r, "msg_1", "{}").status)
	}
	r := newReceiver(func(r *receiver) { r.Verify = func(http.Header, []byte) (string, error) { return "msg_1", errDisk } })
	a := post(t, r, "msg_1", "{}")
	require.Equal(t, 401, a.status, "what is not known to be genuine is not")
	require.NotEmpty(t, a.header.Get("WWW-Authenticate"))
	require.NotContains(t, a.body, errDisk.Error())
	_, known := r.known(t, "msg_1")
	require.False(t, known)
}

func TestAHandlerThatLacksWhatItNeedsSaysSo(t *testing.T) {
	good := newReceiver().Handler
	require.NoError(t, good.Check())
	for field, edit := range map[string]func(*webhook.Handler){
		"Handler.Journal":              func(h *webhook.Handler) { h.Journal = nil },
		"Handler.Next":                 func(h *webhook.Handler) { h.Next = nil },
		"Handler.Verify":               func(h *webhook.Handler) { h.Verify = nil },
		"Handler.Source has 0 bytes":   func(h *webhook.Handler) { h.Source = "" },
		"Handler.Source has 256 bytes": func(h *webhook.Handler) { h.Source = strings.Repeat("x", 256) },

		"Handler.Window is -1ns; it must not be negative; 0 means 96h0m0s": func(h *webhook.Handler) { h.Window = -1 },
		"Handler.Window is 9m59s; it must be at least 10m0s":               func(h *webhook.Handler) { h.Window = 10*time.Minute - time.Second },
		"Handler.Timeout is -1ns; it must not be negative; 0 means 5m0s":   func(h *webhook.Handler) { h.Timeout = -1 },
		"Handler.MaxBody is -1; it must not be negative; 0 means 1048576":  func(h *webhook.Handler) { h.MaxBody = -1 },
	} {
		h := *good
		edit(&h)
		require.ErrorIs(t, h.Check(), webhook.ErrInvalid)
		require.ErrorContains(t, h.Check(), field)
		a := post(t, &h, "msg_1", event("order-1"))
		require.Equal(t, http.StatusInternalServerError, a.status)
		require.Equal(t, "not-set-up", a.Reason)
	}
	require.Equal(t, http.StatusInternalServerError, post(t, &webhook.Handler{}, "msg_1", "{}").status)
	least := *good
	least.Window = 10 * time.Minute
	require.NoError(t, least.Check())
}

func TestNoAnswerRepeatsWhatWasDelivered(t *testing.T) {
	r := newReceiver()
	var seen []answer
	deliver := func(edit ...func(*http.Request)) {
		seen = append(seen, post(t, r, "msg_SECRET1", `{"card":"SECRET2"}`, append([]func(*http.Request){func(req *http.Request) {
			req.URL.RawQuery = "t=SECRET3"
			req.Header.Set("Authorization", "SECRET4")
		}}, edit...)...))
	}
	signature := func(v string) func(*http.Request) {
		return func(req *http.Request) { req.Header.Set("Webhook-Signature", v) }
	}
	deliver(signature("v1,SECRET5"))
	deliver(func(req *http.Request) { req.Header.Set("Webhook-Timestamp", "SECRET6") })
	deliver(func(req *http.Request) { req.Method = "SECRET7" })
	deliver(func(req *http.Request) { req.Body, req.ContentLength = &endless{}, -1 })
	r.Journal = &failing{Journal: r.memory, begin: func() error { return errors.New("SECRET8") }}
	deliver()
	r.Journal = &failing{Journal: r.memory, finish: func() error { return journal.ErrLatched }}
	r.Next = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	deliver()
	require.Len(t, seen, 6)
	for _, a := range seen {
		require.GreaterOrEqual(t, a.status, 400)
		require.NotContains(t, a.body+fmt.Sprint(a.header), "SECRET")
		require.NotContains(t, a.body, strings.TrimPrefix(secretOne, "whsec_"))
		require.True(t, json.Valid([]byte(a.body)))
	}
	for _, d := range r.ears.all() {
		text := ""
		if d.Err != nil {
			text = d.Err.Error()
		}
		for _, n := range []string{"2", "3", "4", "5", "7"} {
			require.NotContains(t, text, "SECRET"+n)
		}
	}
}
