package retryable_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/hashicorp/go-retryablehttp"
	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/retryable"
)

// inMemory starts a fake server for virtual time; it ends with the test.
func inMemory(t *testing.T) *fakeserver.Server {
	t.Helper()
	s := fakeserver.NewInMemory()
	t.Cleanup(s.Close)
	return s
}

// moved is a Transport with what a go-retryablehttp client had.
func moved(base http.RoundTripper, check retryablehttp.CheckRetry) *idem.Transport {
	return &idem.Transport{Base: base, Policy: idem.Policy{
		MaxAttempts: 5,
		Classify:    retryable.Classify(check),
		Backoff:     retryable.Backoff(nil, 10*time.Millisecond, 80*time.Millisecond),
		Budget:      &idem.Budget{Capacity: -1},
	}}
}

// pay posts a payment and returns the answer with its report.
func pay(t *testing.T, ctx context.Context, rt http.RoundTripper, server string) (*http.Response, idem.Report, error) {
	t.Helper()
	var report idem.Report
	req, err := http.NewRequestWithContext(idem.WithReport(ctx, &report), http.MethodPost, server+"/v1/payments",
		strings.NewReader(`{"amount":1999,"currency":"usd","reference":"order-1"}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: rt}).Do(req)
	if resp != nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}
	return resp, report, err
}

func requireOneKey(t *testing.T, sends []fakeserver.Send) {
	t.Helper()
	for _, s := range sends {
		require.NotEmpty(t, s.Key)
		require.Equal(t, sends[0].Key, s.Key)
	}
}

// never is a CheckRetry without hope.
func never(context.Context, *http.Response, error) (bool, error) { return false, nil }

func TestDefaultPolicyChargesOnceWhenAnswersAreLost(t *testing.T) {
	for _, f := range []fakeserver.Fault{
		{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect},
		{Kind: fakeserver.Close, Point: fakeserver.AfterEffect},
		{Kind: fakeserver.CutBody},
		{Kind: fakeserver.Garbage, Point: fakeserver.AfterEffect},
		{Kind: fakeserver.Status, Point: fakeserver.AfterEffect, Status: 500},
		{Kind: fakeserver.Status, Point: fakeserver.AfterEffect, Status: 429, RetryAfter: "3"},
		{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect},
	} {
		t.Run(f.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := inMemory(t)
				f.Times = 2
				require.NoError(t, s.Inject(f))
				resp, report, err := pay(t, t.Context(), moved(s.Transport(), retryablehttp.DefaultRetryPolicy), s.URL())
				require.Len(t, s.Effects(fakeserver.Filter{}), 1)
				require.NoError(t, err)
				require.Equal(t, http.StatusCreated, resp.StatusCode)
				require.Equal(t, idem.Executed, report.Outcome)
				require.True(t, report.EarlierUnknown)
				sends := s.Sends(fakeserver.Filter{})
				require.Len(t, sends, 3)
				requireOneKey(t, sends)
			})
		})
	}
}

func TestYesIsNoReasonToRepeatAWriteWithoutKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{Optional: true})
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Times: 1}))
		_, report, err := pay(t, idem.WithoutKey(t.Context()), moved(s.Transport(), retryablehttp.DefaultRetryPolicy), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.Len(t, s.Sends(fakeserver.Filter{}), 1)
		require.Error(t, err)
		require.Equal(t, idem.Unknown, report.Outcome)
	})
}

func TestDefaultPolicyWaitsForAnOperationInProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Duplicate, Point: fakeserver.DuringEffect, Delay: 3 * time.Second, Times: 1}))
		resp, report, err := pay(t, t.Context(), moved(s.Transport(), retryablehttp.DefaultRetryPolicy), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.NoError(t, err)
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Equal(t, http.StatusConflict, report.Attempts[0].Status)
	})
}

func TestDefaultPolicyKeepsTheReasonOfAReusedKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		other, err := http.NewRequestWithContext(idem.WithKey(t.Context(), "order-1"), http.MethodPost, s.URL()+"/v1/payments",
			strings.NewReader(`{"amount":5,"currency":"usd"}`))
		require.NoError(t, err)
		resp, err := moved(s.Transport(), nil).RoundTrip(other)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		_, report, err := pay(t, idem.WithKey(t.Context(), "order-1"), moved(s.Transport(), retryablehttp.DefaultRetryPolicy), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.NoError(t, err)
		require.ErrorIs(t, report.Reason, idem.ErrKeyReused)
		require.Equal(t, idem.Unknown, report.Outcome)
		require.Len(t, report.Attempts, 1)
	})
}

func TestDefaultPolicyDoesNotRepeatAStoredFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.StoredFailure, Point: fakeserver.AfterEffect, Times: 1}))
		resp, report, err := pay(t, t.Context(), moved(s.Transport(), retryablehttp.DefaultRetryPolicy), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.NoError(t, err)
		require.Equal(t, http.StatusInternalServerError, resp.StatusCode)
		require.Equal(t, idem.Unknown, report.Outcome, "the charge is there, and nobody here can know")
		require.Len(t, s.Sends(fakeserver.Filter{}), 2, "once, and once more to learn that it is stored")
	})
}

func TestErrorPropagatedRetryPolicyRepeatsInSpiteOfItsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503, Times: 2}))
		_, report, err := pay(t, t.Context(), moved(s.Transport(), retryablehttp.ErrorPropagatedRetryPolicy), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.NoError(t, err)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Len(t, report.Attempts, 3)
	})
}

func TestErrorOfACheckRetryStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Point: fakeserver.AfterEffect, Status: 500}))
		enough := func(context.Context, *http.Response, error) (bool, error) { return false, errors.New("enough") }
		resp, report, err := pay(t, t.Context(), moved(s.Transport(), enough), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.Len(t, s.Sends(fakeserver.Filter{}), 1)
		require.NoError(t, err)
		require.Equal(t, http.StatusInternalServerError, resp.StatusCode)
		require.Equal(t, idem.Unknown, report.Outcome)
	})
}

func TestNoStopsAfterALostAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		_, report, err := pay(t, t.Context(), moved(s.Transport(), never), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.Len(t, s.Sends(fakeserver.Filter{}), 1)
		require.Error(t, err)
		require.Equal(t, idem.Unknown, report.Outcome)
	})
}

// quoting answers its first request with words that are not HTTP, and all
// others with 201. It is on a real socket: the error text is net/http's own.
type quoting struct {
	words string
	net.Listener
	mu   sync.Mutex // guards keys
	keys []string
}

func (q *quoting) serve() {
	for {
		c, err := q.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = c.Close() }()
			req, err := http.ReadRequest(bufio.NewReader(c))
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			q.mu.Lock()
			q.keys = append(q.keys, req.Header.Get("Idempotency-Key"))
			first := len(q.keys) == 1
			q.mu.Unlock()
			answer := "HTTP/1.1 201 Created\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
			if first {
				answer = q.words + "\r\n\r\n"
			}
			_, _ = io.WriteString(c, answer)
		}()
	}
}

// The policy reads error texts, and an answer can put words into them.
func TestServerCannotTalkThePolicyIntoStopping(t *testing.T) {
	for _, words := range []string{
		"unsupported protocol scheme", "invalid header", "certificate is not trusted", "stopped after 10 redirects",
		"HTTP/1.1 200 OK\r\nunsupported protocol scheme",
	} {
		t.Run(words, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			q := &quoting{words: words, Listener: l}
			go q.serve()
			defer func() { _ = l.Close() }()
			base := &http.Transport{}
			defer base.CloseIdleConnections()
			resp, report, err := pay(t, t.Context(), moved(base, retryablehttp.DefaultRetryPolicy), "http://"+l.Addr().String())
			q.mu.Lock()
			defer q.mu.Unlock()
			require.Len(t, q.keys, 2)
			require.Equal(t, q.keys[0], q.keys[1])
			require.NoError(t, err)
			require.Equal(t, http.StatusCreated, resp.StatusCode)
			require.Equal(t, idem.Executed, report.Outcome)
		})
	}
}

func TestErrorsBeforeAnySendStopAtOnce(t *testing.T) {
	plain := func(req *http.Request) *http.Request { return req }
	for name, c := range map[string]struct {
		url    string
		change func(*http.Request) *http.Request
	}{
		"scheme": {"gopher://127.0.0.1/", plain},
		"header": {"http://127.0.0.1:1/", func(req *http.Request) *http.Request {
			req.Header["X-Note"] = []string{"two\nlines"}
			return req
		}},
	} {
		t.Run(name, func(t *testing.T) {
			base := &http.Transport{}
			defer base.CloseIdleConnections()
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url, strings.NewReader("{}"))
			require.NoError(t, err)
			_, err = moved(base, retryablehttp.DefaultRetryPolicy).RoundTrip(c.change(req))
			var e *idem.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, idem.NotExecuted, e.Outcome)
			require.Len(t, e.Attempts, 1)
			require.Zero(t, e.Sends)
		})
	}
}

func TestClassifyTable(t *testing.T) {
	yes := func(context.Context, *http.Response, error) (bool, error) { return true, errors.New("beside a yes") }
	failed := func(context.Context, *http.Response, error) (bool, error) { return false, errors.New("beside a no") }
	byText := func(_ context.Context, _ *http.Response, err error) (bool, error) {
		return !strings.Contains(err.Error(), "EOF"), nil
	}
	byType := func(_ context.Context, _ *http.Response, err error) (bool, error) {
		return !errors.Is(err, io.EOF), nil
	}
	bad := &tls.CertificateVerificationError{Err: errors.New("unknown authority")}
	for _, c := range []struct {
		name   string
		check  retryablehttp.CheckRetry
		status int
		err    error
		want   idem.Verdict
	}{
		{"yes to an error", yes, 0, io.EOF, idem.Retry},
		{"yes to a 503", yes, 503, nil, idem.Undecided},
		{"yes to a 501", yes, 501, nil, idem.Retry},
		{"yes to a 404", yes, 404, nil, idem.Retry},
		{"yes to a 200", yes, 200, nil, idem.Retry},
		{"no to an error", never, 0, io.EOF, idem.Stop},
		{"no to a 408", never, 408, nil, idem.Stop},
		{"no to a 500", never, 500, nil, idem.Stop},
		{"no to a 599", never, 599, nil, idem.Stop},
		{"no to a 409", never, 409, nil, idem.Undecided},
		{"no to a 422", never, 422, nil, idem.Undecided},
		{"no to a 200", never, 200, nil, idem.Undecided},
		{"no with an error to a 409", failed, 409, nil, idem.Stop},
		{"no with an error to an error", failed, 0, io.EOF, idem.Stop},
		{"no by the text", byText, 0, io.EOF, idem.Undecided},
		{"no by the type", byType, 0, fmt.Errorf("reading: %w", io.EOF), idem.Stop},
		{"default policy, a bad certificate", nil, 0, bad, idem.Undecided},
		{"default policy, a name that does not exist", nil, 0, &net.DNSError{IsNotFound: true}, idem.Retry},
		{"default policy, a 429", nil, 429, nil, idem.Undecided},
		{"default policy, a 501", nil, 501, nil, idem.Stop},
		{"default policy, a 400", nil, 400, nil, idem.Undecided},
	} {
		t.Run(c.name, func(t *testing.T) {
			var resp *http.Response
			if c.err == nil {
				resp = &http.Response{StatusCode: c.status, Header: http.Header{}, Body: http.NoBody}
			}
			require.Equal(t, c.want, retryable.Classify(c.check)(resp, c.err))
		})
	}
}

func TestCheckRetryGetsAURLErrorWithoutURLAndALiveContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type requestID struct{}
		s := inMemory(t)
		require.NoError(t, s.Inject(
			fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect, Times: 1},
			fakeserver.Fault{Kind: fakeserver.Status, Status: 503, Times: 1},
		))
		var fromErrors []*url.Error
		var values []any
		check := func(ctx context.Context, resp *http.Response, err error) (bool, error) {
			require.NoError(t, ctx.Err())
			if err != nil {
				failure, ok := err.(*url.Error) // as policies written for http.Client do
				require.True(t, ok)
				fromErrors = append(fromErrors, failure)
			} else {
				values = append(values, ctx.Value(requestID{}))
			}
			return retryablehttp.DefaultRetryPolicy(ctx, resp, err)
		}
		_, report, err := pay(t, context.WithValue(t.Context(), requestID{}, "r-1"), moved(s.Transport(), check), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.NoError(t, err)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Len(t, fromErrors, 1, "a yes needs one question")
		require.Empty(t, fromErrors[0].URL)
		require.True(t, fromErrors[0].Timeout())
		require.Equal(t, []any{"r-1", "r-1"}, values)
	})
}

func TestCallersContextEndsTheOperationWhateverThePolicySays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}))
		always := func(context.Context, *http.Response, error) (bool, error) { return true, nil }
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, report, err := pay(t, ctx, moved(s.Transport(), always), s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.Len(t, s.Sends(fakeserver.Filter{}), 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, idem.Unknown, report.Outcome)
	})
}

func TestBackoffCountsFromZeroForEachOperation(t *testing.T) {
	seconds := func(b backoff.BackOff, n int) (all []int) {
		for range n {
			all = append(all, int(b.NextBackOff()/time.Second))
		}
		return all
	}
	generators := retryable.Backoff(retryablehttp.DefaultBackoff, time.Second, 5*time.Second)
	first := generators()
	require.Equal(t, []int{1, 2, 4, 5, 5}, seconds(first, 5))
	require.Equal(t, []int{1, 2}, seconds(generators(), 2))
	first.Reset()
	require.Equal(t, []int{1, 2}, seconds(first, 2))
	require.Equal(t, []int{1, 2, 4, 8, 16, 30, 30}, seconds(retryable.Backoff(nil, 0, 0)(), 7), "the defaults of go-retryablehttp")
}

func TestNegativeWaitIsNoWaitAndNoEnd(t *testing.T) {
	hasty := func(time.Duration, time.Duration, int, *http.Response) time.Duration { return -1 }
	require.Zero(t, retryable.Backoff(hasty, time.Second, time.Second)().NextBackOff())
}

func TestWaitsAreThoseOfTheBackoffAndRetryAfterIsTheirFloor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(
			fakeserver.Fault{Kind: fakeserver.Status, Status: 500, Times: 2},
			fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "7", Times: 1},
		))
		rt := moved(s.Transport(), retryablehttp.DefaultRetryPolicy)
		rt.Policy.Backoff = retryable.Backoff(retryablehttp.DefaultBackoff, time.Second, time.Minute)
		_, report, err := pay(t, t.Context(), rt, s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.NoError(t, err)
		var got []time.Duration
		for _, a := range report.Attempts {
			got = append(got, a.Wait)
		}
		require.Equal(t, []time.Duration{time.Second, 2 * time.Second, 7*time.Second + 4*time.Second, 0}, got)
	})
}

func TestPrepareRunsBeforeEveryAttemptOnFreshHeaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Times: 2}))
		n := 0
		rt := moved(s.Transport(), nil)
		rt.Prepare = retryable.Prepare(func(req *http.Request) error {
			n++
			req.Header.Add("X-Signature", fmt.Sprint(n))
			return nil
		})
		_, _, err := pay(t, t.Context(), rt, s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.NoError(t, err)
		var signatures [][]string
		for _, send := range s.Sends(fakeserver.Filter{}) {
			signatures = append(signatures, send.Header["X-Signature"])
		}
		require.Equal(t, [][]string{{"1"}, {"2"}, {"3"}}, signatures)
	})
}

func TestPrepareCannotMakeANewKeyForARetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		n := 0
		rt := moved(s.Transport(), nil)
		rt.Prepare = retryable.Prepare(func(req *http.Request) error {
			if n++; n > 1 {
				req.Header.Set("Idempotency-Key", fmt.Sprint("key-", n))
			}
			return nil
		})
		_, report, err := pay(t, t.Context(), rt, s.URL())
		require.Len(t, s.Effects(fakeserver.Filter{}), 1)
		require.Len(t, s.Sends(fakeserver.Filter{}), 1)
		require.ErrorIs(t, err, idem.ErrInvalid)
		require.Equal(t, idem.Unknown, report.Outcome)
	})
}

func TestErrorOfPrepareEndsTheOperation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t)
		vault := errors.New("the vault is sealed")
		rt := moved(s.Transport(), nil)
		rt.Prepare = retryable.Prepare(func(*http.Request) error { return vault })
		_, report, err := pay(t, t.Context(), rt, s.URL())
		require.Empty(t, s.Effects(fakeserver.Filter{}))
		require.ErrorIs(t, err, vault)
		require.Equal(t, idem.NotExecuted, report.Outcome)
	})
}

func TestNoPrepareRetryIsNoPrepare(t *testing.T) {
	require.Nil(t, retryable.Prepare(nil), "or a 401 would be repeated for nothing")
}
