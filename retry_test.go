package idem_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// --- C35

func TestC35_CancelEndsTheWaitAtOnce(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "30"}))
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(50*time.Millisecond, cancel)
		start := time.Now()

		_, err := idem.NewClient(over(s)).Do(newPayment(t, ctx, s, "c35"))

		require.Equal(t, 50*time.Millisecond, time.Since(start))
		require.Empty(t, s.Effects())
		require.Len(t, s.Sends(), 1)
		require.ErrorIs(t, err, context.Canceled)
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, 503, e.StatusCode)
		require.Equal(t, idem.Unknown, e.Outcome)
		require.NotEmpty(t, e.Key)
		require.False(t, e.Timeout())
		// The bubble fails if a goroutine stays.
	})
}

func TestC35_CauseOfTheCancelIsReachable(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "30"}))
		shutdown := errors.New("shutting down")
		ctx, cancel := context.WithCancelCause(context.Background())
		time.AfterFunc(time.Second, func() { cancel(shutdown) })
		start := time.Now()

		_, err := idem.NewClient(over(s)).Do(newPayment(t, ctx, s, "c35"))

		require.Len(t, s.Sends(), 1)
		require.ErrorIs(t, err, shutdown)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestC35_NothingIsSentUnderAContextThatHasEnded(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, err := over(s).RoundTrip(newPayment(t, ctx, s, "c35"))
		require.Empty(t, s.Sends())
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
	})
}

// --- C36

func TestC36_WaitThatDoesNotFitTheDeadlineIsNotSlept(t *testing.T) {
	for _, asked := range []string{"1", "60", "600", "99999999999999999999"} { // below and above MaxRetryAfter
		t.Run(asked, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: asked}))
				ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
				defer cancel()
				start := time.Now()

				// The RoundTripper hands back the answer.
				resp, err := over(s).RoundTrip(newPayment(t, ctx, s, "c36"))
				require.NoError(t, err)
				require.Len(t, s.Sends(), 1)
				require.Equal(t, 503, resp.StatusCode)
				readAll(t, resp)
				r := idem.ReportOf(resp)
				require.ErrorIs(t, r.Reason, idem.ErrRetryAfterTooLong)
				require.Equal(t, idem.Unknown, r.Outcome)
				require.Zero(t, time.Since(start))

				// The Client gives the error.
				_, err = idem.NewClient(over(s)).Do(newPayment(t, ctx, s, "c36"))
				require.Len(t, s.Sends(), 2)
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, 503, e.StatusCode)
				require.Equal(t, asked, e.Header.Get("Retry-After"))
				require.ErrorIs(t, err, idem.ErrRetryAfterTooLong)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.True(t, e.Timeout())
				require.Zero(t, time.Since(start))
			})
		})
	}
}

func TestC36_TimeoutOfTheHTTPClientIsADeadlineToo(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "60"}))
		c := &http.Client{Transport: over(s), Timeout: 500 * time.Millisecond}
		start := time.Now()

		resp, err := c.Do(newPayment(t, context.Background(), s, "c36"))

		require.NoError(t, err)
		require.Len(t, s.Sends(), 1)
		require.Equal(t, 503, resp.StatusCode)
		readAll(t, resp)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrRetryAfterTooLong)
		require.Zero(t, time.Since(start))
	})
}

func TestC36_BackoffThatDoesNotFitTheDeadlineIsNotSlept(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 500}))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		c := idem.NewClient(over(s, func(tr *idem.Transport) {
			tr.Policy.Backoff = func() backoff.BackOff { return backoff.NewConstantBackOff(time.Minute) }
		}))
		start := time.Now()

		_, err := c.Do(newPayment(t, ctx, s, "c36"))

		require.Len(t, s.Sends(), 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Zero(t, time.Since(start), "a wait that ends with the deadline leaves no time for an attempt")
	})
}

// --- C38

// inPieces sends headers at once, and then n pieces of the body, each after a
// gap. With a length the answer is one that is buffered.
func inPieces(n int, piece string, gap time.Duration, contentType string) providerStep {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", contentType)
		flush := http.NewResponseController(w).Flush
		_ = flush()
		for range n {
			select {
			case <-time.After(gap):
			case <-r.Context().Done():
				return
			}
			if _, err := io.WriteString(w, piece); err != nil {
				return
			}
			_ = flush()
		}
	}
}

func TestC38_LimitOfAnAttemptDoesNotCutAGoodAnswer(t *testing.T) {
	const limit = 200 * time.Millisecond
	mega := strings.Repeat("x", 1<<20)
	for _, tc := range []struct {
		name  string
		first providerStep
		want  int // bytes
		sends int
	}{
		{"buffered, in time", inPieces(1, mega[:1<<19], limit/2, "application/json"), 1 << 19, 1},
		{"larger than the buffer, in time", inPieces(1, mega+"x", limit/2, "application/json"), 1<<20 + 1, 1},
		{"streamed, in time", inPieces(1, mega, limit/2, "application/octet-stream"), 1 << 20, 1},
		{"buffered, bytes that keep arriving", inPieces(20, "x", limit/2, "application/json"), 20, 1},
		{"streamed, a gap longer than the limit", inPieces(1, mega, 2*limit, "application/octet-stream"), 1 << 20, 1},
		{"event stream, gaps longer than the limit", inPieces(5, "data: x\n\n", 2*limit, "text/event-stream"), 45, 1},
		{"buffered, a gap longer than the limit", inPieces(1, mega[:1<<19], 2*limit, "application/json"), 2, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, tc.first, says(201, `{}`))
				tr := p.through(func(tr *idem.Transport) { tr.Policy.AttemptTimeout = limit })

				resp, err := (&http.Client{Transport: tr}).Do(newPost(t, context.Background(), p.url+"/charges", `{"amount":1}`))

				require.NoError(t, err)
				require.Len(t, readAll(t, resp), tc.want)
				sends := p.sends()
				require.Len(t, sends, tc.sends)
				for _, s := range sends {
					require.Equal(t, sends[0].keys, s.keys)
					require.Equal(t, sends[0].body, s.body)
				}
				require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
			})
		})
	}
}

func TestC38_GapAfterThePrefixOfAStreamIsTheCallersAffair(t *testing.T) {
	virtual(t, func(t *testing.T) {
		big := strings.Repeat("x", 1<<20+1)
		p := newScriptedProvider(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, big)
			_ = http.NewResponseController(w).Flush()
			time.Sleep(time.Minute)
			_, _ = io.WriteString(w, "end")
		})
		tr := p.through(func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 200 * time.Millisecond })
		resp, err := tr.RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
		require.NoError(t, err)
		require.Equal(t, big+"end", readAll(t, resp))
		require.Len(t, p.sends(), 1)
	})
}

func TestC38_AttemptIsReleasedAtTheEndOfItsBodyOrItsClose(t *testing.T) {
	for _, tc := range []struct {
		name, contentType string
		length            int64
		consume           func(t *testing.T, body io.ReadCloser)
		before            error
	}{
		{"buffered", "application/json", -1, func(*testing.T, io.ReadCloser) {}, context.Canceled},
		{"small", "text/plain", 5, func(*testing.T, io.ReadCloser) {}, context.Canceled},
		{"streamed to its end", "text/plain", -1, func(t *testing.T, b io.ReadCloser) {
			_, err := io.ReadAll(b)
			require.NoError(t, err)
		}, nil},
		{"streamed and closed early", "text/plain", -1, func(t *testing.T, b io.ReadCloser) {
			require.NoError(t, b.Close())
		}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var attempt context.Context
			body := &closeCounter{Reader: strings.NewReader("hello")}
			tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(req *http.Request) (*http.Response, error) {
				attempt = req.Context()
				resp := answer(req, 201, http.Header{"Content-Type": {tc.contentType}}, "")
				resp.Body, resp.ContentLength = body, tc.length
				return resp, nil
			})}
			resp, err := tr.RoundTrip(newPost(t, context.Background(), "http://provider.test/", `{}`))
			require.NoError(t, err)
			require.ErrorIs(t, attempt.Err(), tc.before)
			tc.consume(t, resp.Body)
			require.ErrorIs(t, attempt.Err(), context.Canceled)
			require.NoError(t, resp.Body.Close())
			require.EqualValues(t, 1, body.closes.Load())
		})
	}
}

func TestC38_NothingIsLeftBehindWhenTheCallerClosesEarly(t *testing.T) {
	virtual(t, func(t *testing.T) { // the bubble fails if a goroutine stays
		p := newScriptedProvider(t, inPieces(1<<30, "tick\n", time.Second, "text/event-stream"))
		tr := p.through(func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 200 * time.Millisecond })
		resp, err := tr.RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
		require.NoError(t, err)
		_, err = io.ReadFull(resp.Body, make([]byte, 10))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.NoError(t, resp.Body.Close(), "twice is allowed")
		_, err = resp.Body.Read(make([]byte, 1))
		require.Error(t, err)
	})
}

// --- C39

func TestC39_LastAttemptGetsTheRestOfTheClientsTimeout(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang, Times: 2}))
		tr := over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
		var report idem.Report
		ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "charge", ID: "c39"})
		start := time.Now()

		_, err := (&http.Client{Transport: tr, Timeout: 150 * time.Millisecond}).Do(
			newPayment(t, idem.WithReport(ctx, &report), s, "c39"))

		require.Empty(t, s.Effects())
		require.Len(t, s.Sends(), 2)
		var timeout net.Error
		require.ErrorAs(t, err, &timeout)
		require.True(t, timeout.Timeout())
		require.Less(t, time.Since(start), 180*time.Millisecond)
		require.Equal(t, idem.Unknown, report.Outcome)
		require.Len(t, report.Attempts, 2)
		require.Equal(t, 100*time.Millisecond, report.Attempts[0].Took)
		require.InDelta(t, 50*time.Millisecond, report.Attempts[1].Took, float64(10*time.Millisecond))
		require.ErrorIs(t, report.Reason, context.DeadlineExceeded)

		resp, err := idem.NewClient(tr).Do(newPayment(t, ctx, s, "c39"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, []string{report.Key}, keysSent(s.Sends()))
	})
}

// --- C40

func TestC40_CancelAfterTheCommitLeavesTheOperationOpen(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Delay: 200 * time.Millisecond}))
		operation := idem.WithOperation(context.Background(), idem.Operation{Name: "charge", ID: "c40"})
		ctx, cancel := context.WithCancel(operation)
		time.AfterFunc(50*time.Millisecond, cancel)
		c := idem.NewClient(over(s))

		_, err := c.Do(newPayment(t, ctx, s, "c40"))

		require.Len(t, s.Effects(), 1)
		require.ErrorIs(t, err, context.Canceled)
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, idem.Unknown, e.Outcome)
		key := e.Key

		resp, err := c.Do(newPayment(t, operation, s, "c40"))
		require.NoError(t, err)
		require.Contains(t, readAll(t, resp), s.Effects()[0].ID)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2)
		require.Equal(t, []string{key}, keysSent(s.Sends()))
		oneBodyHash(t, s.Sends())
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		require.True(t, idem.ReportOf(resp).Replayed)
	})
}

// --- deadline and MaxElapsed

func TestAttemptEndsWithTheCallersDeadline(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang}))
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		start := time.Now()

		_, err := over(s).RoundTrip(newPayment(t, ctx, s, "deadline"))

		require.Len(t, s.Sends(), 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.True(t, e.Timeout())
		require.Equal(t, idem.Unknown, e.Outcome)
		require.Equal(t, 100*time.Millisecond, time.Since(start))
	})
}

func TestAttemptTimeoutIsNoCancelOfTheCaller(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang}))
		tr := over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = time.Second })

		_, err := tr.RoundTrip(newPayment(t, context.Background(), s, "limit"))

		require.Len(t, s.Sends(), 4)
		require.Len(t, keysSent(s.Sends()), 1)
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err.(*idem.Error).Reason, context.DeadlineExceeded)
		require.True(t, err.(*idem.Error).Timeout())
	})
}

func TestMaxElapsedEndsBeforeAWaitThatWouldPassIt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 500}))
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.MaxAttempts = 1000
			tr.Policy.MaxElapsed = time.Second
		})
		start := time.Now()

		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "elapsed"))

		require.NoError(t, err)
		readAll(t, resp)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrTimeExhausted)
		require.Greater(t, len(s.Sends()), 10)
		require.LessOrEqual(t, time.Since(start), time.Second)
		require.Greater(t, time.Since(start), 900*time.Millisecond)
	})
}

func TestMaxElapsedDoesNotCutARunningAttempt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Delay: 20 * time.Second}))
		tr := over(s, func(tr *idem.Transport) { tr.Policy.MaxElapsed = time.Second })
		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "elapsed"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.NoError(t, idem.ReportOf(resp).Reason)
	})
}

func TestMaxElapsedCountsTheTimeOfAttempts(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang}))
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.AttemptTimeout = 10 * time.Second
			tr.Policy.MaxElapsed = 15 * time.Second
		})
		start := time.Now()
		_, err := tr.RoundTrip(newPayment(t, context.Background(), s, "elapsed"))
		require.Len(t, s.Sends(), 2)
		require.ErrorIs(t, err, idem.ErrTimeExhausted)
		require.True(t, err.(*idem.Error).Timeout())
		require.InDelta(t, 20*time.Second, time.Since(start), float64(10*time.Millisecond))
	})
}

func TestAnswerIsHandedBackWhereTimeForbidsItsRepeat(t *testing.T) {
	virtual(t, func(t *testing.T) {
		late := func(status int) providerStep {
			return func(w http.ResponseWriter, _ *http.Request) {
				time.Sleep(5 * time.Second)
				w.WriteHeader(status)
				_, _ = io.WriteString(w, "sorry")
			}
		}
		for _, status := range []int{401, 500, 503} {
			p := newScriptedProvider(t, late(status))
			tr := p.through(func(tr *idem.Transport) {
				tr.Policy.MaxElapsed = time.Second
				tr.Prepare = func(*http.Request) error { return nil } // a 401 is repeated at once
			})
			resp, err := tr.RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
			require.NoError(t, err, status)
			require.Len(t, p.sends(), 1)
			require.Equal(t, status, resp.StatusCode)
			require.Equal(t, "sorry", readAll(t, resp))
		}
	})
}

// --- MaxInProgress

func TestWaitsForAnOperationInProgressAreCountedApart(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Stuck, Delay: time.Hour}))
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.MaxAttempts = 2
			tr.Policy.MaxInProgress = 3
			tr.Policy.Budget = &idem.Budget{Capacity: 4, Cost: 4} // for one retry
		})

		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "in-progress"))

		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Sends(), 1+1+3, "the lost one, its retry, three waits")
		r := idem.ReportOf(resp)
		require.ErrorIs(t, r.Reason, idem.ErrInProgress)
		require.Len(t, r.Attempts, 5)
		require.Equal(t, 5, r.Sends)
		require.Equal(t, 2, r.Attempts[4].N, "in-progress sends bear the number of their attempt")
	})
}

func TestFailureAfterAWaitCountsAgain(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t,
			says(409, `{}`, "Retry-After", "1"), says(503, `{}`), says(409, `{}`, "Retry-After", "1"), says(503, `{}`), says(503, `{}`))
		tr := p.through(func(tr *idem.Transport) { tr.Policy.MaxAttempts = 3 })
		resp, err := tr.RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, p.sends(), 5)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrAttemptsExhausted)
	})
}

// --- KeyWindow and Started

func TestNothingIsSentAfterTheKeyWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "20"}))
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.KeyWindow = time.Minute
			tr.Policy.AttemptTimeout = 10 * time.Second
			tr.Policy.MaxAttempts = 100
			tr.Policy.MaxElapsed = -1
		})
		start := time.Now()

		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "window"))

		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, 503, resp.StatusCode)
		require.Len(t, s.Sends(), 3, "at 0, 20 and 40 s; 60 s is beyond window less one attempt")
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrKeyExpired)
		require.Equal(t, idem.Unknown, idem.ReportOf(resp).Outcome)
		require.Less(t, time.Since(start), 50*time.Second)
	})
}

func TestKeyWindowReachesAcrossTheCallsOfOneContext(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s, speaking(idem.Stripe)) // 24 h
		for name, ctx := range map[string]context.Context{
			"operation": idem.WithOperation(context.Background(), idem.Operation{Name: "charge", ID: "window"}),
			"key":       idem.WithKey(context.Background(), "window-77"),
		} {
			before := len(s.Effects())
			resp, err := tr.RoundTrip(newPayment(t, ctx, s, name))
			require.NoError(t, err)
			readAll(t, resp)

			time.Sleep(24*time.Hour - time.Minute)
			resp, err = tr.RoundTrip(newPayment(t, ctx, s, name))
			require.NoError(t, err)
			readAll(t, resp)
			require.Len(t, s.Effects(), before+1, "still in the window: a replay")

			sends := len(s.Sends())
			time.Sleep(time.Minute)
			body := &closeCounter{Reader: strings.NewReader(paymentJSON(name, 1999))}
			req := newPayment(t, ctx, s, name)
			req.Body, req.GetBody = body, nil
			_, err = tr.RoundTrip(req)
			require.Len(t, s.Sends(), sends)
			require.Len(t, s.Effects(), before+1)
			require.ErrorIs(t, err, idem.ErrKeyExpired)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
			require.EqualValues(t, 1, body.closes.Load())
		}
	})
}

func TestStartedEnforcesTheKeyWindowAcrossProcesses(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s, speaking(idem.Stripe))
		call := func(started time.Time) error {
			op := idem.Operation{Name: "charge", ID: "started", Started: started}
			resp, err := tr.RoundTrip(newPayment(t, idem.WithOperation(context.Background(), op), s, "started"))
			if err == nil {
				readAll(t, resp)
			}
			return err
		}

		err := call(time.Now().Add(-24 * time.Hour))
		require.Empty(t, s.Sends())
		require.ErrorIs(t, err, idem.ErrKeyExpired)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))

		require.ErrorIs(t, call(time.Now().Add(-24*time.Hour+29*time.Second)), idem.ErrKeyExpired, "less one AttemptTimeout")
		require.Empty(t, s.Sends())

		require.NoError(t, call(time.Now().Add(-23*time.Hour)))
		require.Len(t, s.Effects(), 1)

		require.NoError(t, call(time.Now().Add(30*time.Second)), "clocks differ a little")
		err = call(time.Now().Add(2 * time.Minute))
		require.ErrorIs(t, err, idem.ErrInvalid)
		require.ErrorContains(t, err, "Operation.Started")
		require.Len(t, s.Effects(), 1)
	})
}

func TestStartedDemandsAKeyWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		op := idem.Operation{Name: "charge", ID: "demand", Started: time.Now()}
		_, err := over(s).RoundTrip(newPayment(t, idem.WithOperation(context.Background(), op), s, "demand"))
		require.Empty(t, s.Sends())
		require.ErrorIs(t, err, idem.ErrInvalid)
		require.ErrorContains(t, err, "Policy.KeyWindow")

		tr := over(s, func(tr *idem.Transport) { tr.Policy.KeyWindow = time.Hour })
		resp, err := tr.RoundTrip(newPayment(t, idem.WithOperation(context.Background(), op), s, "demand"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
	})
}

// --- a user's backoff

// countingBackoff gives each of its waits and then stops.
type countingBackoff struct {
	waits []time.Duration
	asked int
}

func (b *countingBackoff) Reset() { b.asked = 0 }

func (b *countingBackoff) NextBackOff() time.Duration {
	b.asked++
	if b.asked > len(b.waits) {
		return backoff.Stop
	}
	return b.waits[b.asked-1]
}

func TestStopOfTheUsersBackoffEndsTheRetries(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 500}))
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.MaxAttempts = 100
			tr.Policy.Backoff = func() backoff.BackOff {
				return &countingBackoff{waits: []time.Duration{time.Second, 3 * time.Second}}
			}
		})
		start := time.Now()

		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "stop"))

		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Sends(), 3)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrAttemptsExhausted)
		require.Equal(t, 4*time.Second, time.Since(start))
	})
}

func TestBackoffIsMadeOncePerOperationAtItsFirstWait(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		var made atomic.Int32
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.Backoff = func() backoff.BackOff {
				made.Add(1)
				return &countingBackoff{waits: []time.Duration{1, 2, 3, 4}}
			}
		})
		call := func() {
			resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "made"))
			require.NoError(t, err)
			readAll(t, resp)
		}
		call()
		require.Zero(t, made.Load(), "no wait, no generator")
		require.NoError(t, s.Script("",
			fakeserver.Fault{Kind: fakeserver.Status, Status: 500}, fakeserver.Fault{Kind: fakeserver.Status, Status: 500}))
		call()
		require.EqualValues(t, 1, made.Load())
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 500}))
		call()
		require.EqualValues(t, 2, made.Load())
	})
}

// --- several reasons at once

func TestInProgressIsTheReasonWhateverEndedTheWaiting(t *testing.T) {
	for _, tc := range []struct {
		name     string
		asked    string
		edit     func(*idem.Transport)
		deadline time.Duration
		stream   bool
		also     error // that the Client's error matches
	}{
		{name: "MaxElapsed", asked: "2", edit: func(tr *idem.Transport) { tr.Policy.MaxElapsed = time.Second }},
		{name: "MaxRetryAfter", asked: "120"},
		{name: "overflow", asked: "99999999999999999999"},
		{name: "deadline", asked: "2", deadline: time.Second, also: context.DeadlineExceeded},
		{name: "backoff.Stop", asked: "2", edit: func(tr *idem.Transport) {
			tr.Policy.Backoff = func() backoff.BackOff { return &backoff.StopBackOff{} }
		}},
		{name: "body that can be read once", asked: "2", stream: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, says(409, `{"code":"key_in_use"}`, "Retry-After", tc.asked))
				tr := p.through()
				if tc.edit != nil {
					tc.edit(tr)
				}
				ctx := context.Background()
				if tc.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tc.deadline)
					defer cancel()
				}
				req := newPost(t, ctx, p.url+"/charges", `{"amount":1}`)
				if tc.stream {
					tr.Policy.MaxRequestBuffer = -1
					req.Body, req.GetBody = io.NopCloser(io.MultiReader(req.Body)), nil
				}
				start := time.Now()

				_, err := idem.NewClient(tr).Do(req)

				require.Len(t, p.sends(), 1)
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				require.ErrorIs(t, e.Reason, idem.ErrInProgress)
				require.Equal(t, 409, e.StatusCode)
				require.Contains(t, string(e.Body), "key_in_use")
				require.Equal(t, idem.Unknown, e.Outcome)
				if tc.also != nil {
					require.ErrorIs(t, err, tc.also)
				}
				require.Zero(t, time.Since(start))
			})
		})
	}
}

func TestAttemptsAreTheReasonBeforeTimeAndBudget(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "600"}))
		tr := over(s, func(tr *idem.Transport) { tr.Policy.MaxAttempts = 1 })
		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "reasons"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Sends(), 1)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrAttemptsExhausted)
	})
}

// --- a cancelled wait

func TestCancelledWaitGivesItsTokensBack(t *testing.T) {
	// An origin that fails for ever shows how many tokens there are: each
	// send after the first takes one helping, and the last is the free probe.
	sendsUntilRefused := func(t *testing.T, s *fakeserver.Server, b *idem.Budget) int {
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 500}))
		before := len(s.Sends())
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.MaxAttempts = 100
			tr.Policy.Budget = b
		})
		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "drain"))
		require.NoError(t, err)
		readAll(t, resp)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrBudgetExhausted)
		return len(s.Sends()) - before
	}
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		untouched := sendsUntilRefused(t, s, &idem.Budget{Capacity: 8, Cost: 4})
		require.Equal(t, 1+2+1, untouched)
		s.ClearFaults()

		b := &idem.Budget{Capacity: 8, Cost: 4}
		for range 5 {
			require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "30"}))
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(time.Second, cancel)
			_, err := over(s, func(tr *idem.Transport) { tr.Policy.Budget = b }).RoundTrip(newPayment(t, ctx, s, "cancelled"))
			require.ErrorIs(t, err, context.Canceled)
		}
		require.Equal(t, untouched, sendsUntilRefused(t, s, b))
	})
}

func TestRetryThatWasSentKeepsItsTokens(t *testing.T) {
	retryAfter := func(seconds string) fakeserver.Fault {
		return fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: seconds}
	}
	for name, second := range map[string]fakeserver.Fault{
		"cancelled in the next wait":      retryAfter("30"),
		"cancelled in the attempt itself": {Kind: fakeserver.Hang},
		// A reused connection dies: repeated at once, free, and met by a 409.
		"cancelled in a wait that is free":  {Kind: fakeserver.Stuck, Delay: time.Hour},
		"cancelled while answers come late": {Kind: fakeserver.Late, Delay: 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				s.Apply(fakeserver.Settings{InProgressRetryAfter: "30"})
				b := &idem.Budget{Capacity: 12, Cost: 4}
				require.NoError(t, s.Script("", retryAfter("1"), second))
				ctx, cancel := context.WithCancel(context.Background())
				time.AfterFunc(5*time.Second, cancel)
				_, err := over(s, func(tr *idem.Transport) { tr.Policy.Budget = b }).RoundTrip(newPayment(t, ctx, s, "slept"))
				require.ErrorIs(t, err, context.Canceled)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 500}))
				before := len(s.Sends())
				tr := over(s, func(tr *idem.Transport) {
					tr.Policy.MaxAttempts = 100
					tr.Policy.Budget = b
				})
				resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "drain"))
				require.NoError(t, err)
				readAll(t, resp)
				require.Equal(t, 1+2+1, len(s.Sends())-before, "the first, two helpings left, the probe")
			})
		})
	}
}

// --- the loop

func TestNextAttemptStartsOnlyWhenTheLastHasReturned(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang, Times: 3}))
		var running, most atomic.Int32
		base := s.Transport()
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.AttemptTimeout = 20 * time.Millisecond
			tr.Base = roundTripFunc(func(req *http.Request) (*http.Response, error) {
				most.Store(max(most.Load(), running.Add(1)))
				defer running.Add(-1)
				return base.RoundTrip(req)
			})
		})
		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "one at a time"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.EqualValues(t, 1, most.Load())
	})
}
