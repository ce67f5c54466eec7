package idem_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// with sets the budget.
func with(b *idem.Budget) func(*idem.Transport) {
	return func(tr *idem.Transport) { tr.Policy.Budget = b }
}

// attempts sets MaxAttempts.
func attempts(n int) func(*idem.Transport) {
	return func(tr *idem.Transport) { tr.Policy.MaxAttempts = n }
}

func TestC65_OutageIsNotMadeWorseByRetries(t *testing.T) {
	const callers = 200
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
		tr := over(s, with(&idem.Budget{}))
		var wg sync.WaitGroup
		var refused atomic.Int32
		for i := range callers {
			wg.Add(1)
			go func() {
				defer wg.Done()
				time.Sleep(time.Duration(i) * 2 * time.Second / callers)
				resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order"))
				if err != nil {
					t.Errorf("call %d: %v", i, err)
					return
				}
				text, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != 503 || !strings.Contains(string(text), "injected-fault") {
					t.Errorf("call %d: status %d, %q, %v", i, resp.StatusCode, text, err)
				}
				switch report := idem.ReportOf(resp); {
				case errors.Is(report.Reason, idem.ErrBudgetExhausted):
					refused.Add(1)
				case !errors.Is(report.Reason, idem.ErrAttemptsExhausted):
					t.Errorf("call %d: %v", i, report.Reason)
				}
			}()
		}
		wg.Wait()
		require.Empty(t, s.Effects())
		require.LessOrEqual(t, len(s.Sends()), callers+10+1)
		require.Greater(t, len(s.Sends()), callers, "some retries went out")
		require.Greater(t, int(refused.Load()), callers/2)

		s.ClearFaults()
		before := len(s.Sends())
		start := time.Now()
		for range callers {
			resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order"))
			require.NoError(t, err)
			require.Contains(t, readAll(t, resp), "order")
		}
		require.Len(t, s.Effects(), callers)
		require.Len(t, s.Sends(), before+callers)
		require.Zero(t, time.Since(start), "all new operations succeed at once")
	})
}

func TestC65_LongOutageGetsOneProbeInTenSeconds(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: always(500)}
		tr := onWire(w, with(&idem.Budget{}), attempts(2))
		calls := 0
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(100 * time.Millisecond) {
			resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			calls++
		}
		require.LessOrEqual(t, len(w.seen()), calls+10+7)
		require.GreaterOrEqual(t, len(w.seen()), calls+10+5)
	})
}

func TestC65_LostConnectionsAreChargedToo(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Refuse(1 << 20)
		tr := over(s, with(&idem.Budget{}))
		sum := 0
		for range 50 {
			_, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order"))
			var e *idem.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, idem.NotExecuted, e.Outcome)
			sum += len(e.Attempts)
		}
		require.LessOrEqual(t, sum, 50+10+1)
	})
}

// spent is how many retries an operation that always fails may still make
// from b, the probe included. It uses them up.
func spent(t *testing.T, b *idem.Budget, url string) int {
	t.Helper()
	w := &wire{serve: always(500)}
	resp, err := onWire(w, with(b), attempts(1000)).RoundTrip(newPost(t, t.Context(), url, `{}`))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrBudgetExhausted)
	return len(w.seen()) - 1
}

func TestBudgetAllowsCapacityByCostAndOneProbe(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, c := range []struct {
			budget  *idem.Budget
			retries int
		}{
			{&idem.Budget{}, 10},
			{&idem.Budget{Capacity: 12}, 3},
			{&idem.Budget{Capacity: 13}, 3},
			{&idem.Budget{Cost: 20}, 2},
			{&idem.Budget{Capacity: 5, Cost: 1}, 5},
			{&idem.Budget{Capacity: 4, Cost: 4}, 1},
		} {
			require.Equal(t, c.retries+1, spent(t, c.budget, wireURL))
			require.Equal(t, 0, spent(t, c.budget, wireURL), "the probe has gone")
			time.Sleep(10 * time.Second)
			require.Equal(t, 1, spent(t, c.budget, wireURL), "and comes back after ten seconds")
		}
	})
}

func TestBudgetHasABucketForEachOrigin(t *testing.T) {
	virtual(t, func(t *testing.T) {
		b := &idem.Budget{Capacity: 4}
		require.Equal(t, 2, spent(t, b, "http://one.test/a"))
		require.Equal(t, 0, spent(t, b, "http://one.test/b"))
		require.Equal(t, 0, spent(t, b, "http://ONE.test:80/"))
		require.Equal(t, 2, spent(t, b, "http://two.test/"))
		require.Equal(t, 2, spent(t, b, "http://one.test:8080/"))
		require.Equal(t, 2, spent(t, b, "https://one.test/"))
	})
}

func TestBudgetIsGivenBackWhereAnOperationEndsWell(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for name, final := range map[string]int{"success": 201, "a refusal": 422} {
			b := &idem.Budget{Capacity: 12}
			for range 20 { // independent faults cost nothing
				w := &wire{serve: answers(nil, 500, 503, final)}
				resp, err := onWire(w, with(b)).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
				require.NoError(t, err)
				require.Equal(t, final, resp.StatusCode, name)
				require.NoError(t, resp.Body.Close())
			}
			require.Equal(t, 4, spent(t, b, wireURL), name)
		}
	})
}

func TestBudgetGetsOneTokenForASuccessAtTheFirstAttempt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		b := &idem.Budget{Capacity: 8}
		require.Equal(t, 3, spent(t, b, wireURL))
		succeed := func(n int) {
			for range n {
				resp, err := onWire(&wire{}, with(b)).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
			}
		}
		succeed(3)
		require.Equal(t, 0, spent(t, b, wireURL))
		succeed(1)
		require.Equal(t, 1, spent(t, b, wireURL))
		succeed(100)
		time.Sleep(10 * time.Second) // for the probe
		require.Equal(t, 3, spent(t, b, wireURL), "never above its capacity: two retries and the probe of a fresh bucket")
	})
}

func TestBudgetGetsBackWhatACancelledWaitTook(t *testing.T) {
	virtual(t, func(t *testing.T) {
		b := &idem.Budget{Capacity: 8}
		for range 10 {
			ctx, cancel := context.WithCancel(t.Context())
			w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
				return answer(req, 503, http.Header{"Retry-After": {"30"}}, ""), nil
			}}
			leave := time.AfterFunc(500*time.Millisecond, cancel)
			_, err := onWire(w, with(b)).RoundTrip(newPost(t, ctx, wireURL, `{}`))
			require.ErrorIs(t, err, context.Canceled)
			require.Len(t, w.seen(), 1)
			leave.Stop()
			cancel()
		}
		require.Equal(t, 3, spent(t, b, wireURL))
	})
}

func TestBudgetIsNotGivenBackTwiceAcrossARedirect(t *testing.T) {
	virtual(t, func(t *testing.T) {
		b := &idem.Budget{Capacity: 12}
		// One operation has taken 8 and keeps them.
		resp, err := onWire(&wire{serve: always(500)}, with(b), attempts(3)).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		// Another takes 4 and gives back 4, however often it is redirected.
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			switch n {
			case 1:
				return answer(req, 500, nil, ""), nil
			case 2, 3:
				return answer(req, 307, http.Header{"Location": {"/v1/payments"}}, ""), nil
			}
			return answer(req, 201, nil, ""), nil
		}}
		resp, err = (&http.Client{Transport: onWire(w, with(b))}).Do(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Len(t, w.seen(), 4)
		require.Equal(t, 2, spent(t, b, wireURL), "the one retry that was left, and the probe")
	})
}

func TestBudgetIsNotChargedForADeadReusedConnection(t *testing.T) {
	virtual(t, func(t *testing.T) {
		dead := &deadReused{}
		resp, err := onWire(dead, with(&idem.Budget{Capacity: 4}), attempts(100)).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Len(t, dead.seen(), 4, "dead connection, retry, probe, refused")
		report := idem.ReportOf(resp)
		require.ErrorIs(t, report.Reason, idem.ErrBudgetExhausted)
		require.Equal(t, "at-once", report.Attempts[0].WaitFrom)
		require.Equal(t, "backoff", report.Attempts[1].WaitFrom)
	})
}

// deadReused is a wire whose first connection was idle and is dead.
type deadReused struct{ wire }

func (d *deadReused) RoundTrip(req *http.Request) (*http.Response, error) {
	d.serve = func(n int, req *http.Request) (*http.Response, error) {
		if n == 1 {
			httptrace.ContextClientTrace(req.Context()).GotConn(httptrace.GotConnInfo{Reused: true, WasIdle: true})
			return nil, io.EOF
		}
		return answer(req, 500, nil, ""), nil
	}
	return d.wire.RoundTrip(req)
}

func TestBudgetIsNotChargedForWaitsForAnOperationInProgress(t *testing.T) {
	virtual(t, func(t *testing.T) {
		b := &idem.Budget{Capacity: 4}
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Duplicate, Point: fakeserver.DuringEffect, Delay: 3 * time.Second}))
		resp, err := over(s, with(b)).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Contains(t, readAll(t, resp), "order-1")
		require.Greater(t, len(idem.ReportOf(resp).Attempts), 2)
		require.Equal(t, 2, spent(t, b, wireURL))
		require.Equal(t, 2, spent(t, b, s.URL()))
	})
}

func TestRefusedRetryHandsBackTheAnswerOrTheError(t *testing.T) {
	virtual(t, func(t *testing.T) {
		b := &idem.Budget{Capacity: 4}
		spent(t, b, wireURL)
		resp, err := onWire(&wire{serve: always(503)}, with(b)).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.Equal(t, `{"title":"scripted"}`, readAll(t, resp))
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrBudgetExhausted)

		lost := errors.New("lost")
		_, err = onWire(&wire{serve: func(int, *http.Request) (*http.Response, error) { return nil, lost }}, with(b)).
			RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.ErrorIs(t, err, idem.ErrBudgetExhausted)
		require.ErrorIs(t, err, lost)

		_, err = idem.NewClient(onWire(&wire{serve: always(503)}, with(b))).Do(newPost(t, t.Context(), wireURL, `{}`))
		require.ErrorIs(t, err, idem.ErrBudgetExhausted)
	})
}

func TestNegativeCapacityNeverRefuses(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: always(500)}
		resp, err := onWire(w, with(&idem.Budget{Capacity: -1}), attempts(200)).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Len(t, w.seen(), 200)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrAttemptsExhausted)
	})
}

func TestBudgetThatCannotWorkIsInvalid(t *testing.T) {
	for name, b := range map[string]*idem.Budget{
		"cost above capacity":         {Capacity: 3, Cost: 4},
		"default cost above capacity": {Capacity: 3},
		"cost above default capacity": {Cost: 41},
		"negative cost":               {Cost: -1},
	} {
		t.Run(name, func(t *testing.T) {
			w := &wire{}
			_, err := onWire(w, with(b)).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.Empty(t, w.seen())
			require.ErrorIs(t, err, idem.ErrInvalid)
			require.ErrorContains(t, err, "Budget.Cost")
		})
	}
}

// The only test of the budget that all Transports share: it uses an origin
// that no other test has.
func TestNilBudgetIsOneForTheWholeProcess(t *testing.T) {
	virtual(t, func(t *testing.T) {
		host, err := idem.NewKey()
		require.NoError(t, err)
		url := "http://" + host + ".test/"
		require.Equal(t, 11, spent(t, nil, url))
		require.Equal(t, 0, spent(t, nil, url), "another Transport finds the bucket empty")
	})
}
