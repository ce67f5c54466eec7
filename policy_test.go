package idem_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// alwaysSays is a base without a network that gives one answer for ever.
func alwaysSays(status int, header func() http.Header) roundTripFunc {
	return func(req *http.Request) (*http.Response, error) {
		if req.Body != nil {
			_, _ = io.Copy(io.Discard, req.Body)
			_ = req.Body.Close()
		}
		var h http.Header
		if header != nil {
			h = header()
		}
		return answer(req, status, h, ""), nil
	}
}

// waitsOf runs one operation and returns its attempts.
func waitsOf(t *testing.T, tr *idem.Transport) []idem.Attempt {
	t.Helper()
	resp, err := tr.RoundTrip(newPost(t, context.Background(), "http://provider.test/charges", `{}`))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return idem.ReportOf(resp).Attempts
}

// --- C29

func TestC29_HugeRetryAfterEndsTheOperationInsteadOfFiringAtOnce(t *testing.T) {
	for _, asked := range []string{
		"61", "9223372036", "9223372037", "9223372036854775807", "99999999999999999999", strings.Repeat("9", 400),
		"Fri, 31 Dec 9999 23:59:59 GMT",
	} {
		for _, status := range []int{503, 429, 500} {
			t.Run(fmt.Sprintf("%d %.20s", status, asked), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: status, RetryAfter: asked}))
					tr := over(s, func(tr *idem.Transport) {
						tr.Policy.MaxRetryAfter = 60 * time.Second
						tr.Policy.MaxElapsed = -1
					})
					start := time.Now()

					resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "c29"))

					require.NoError(t, err)
					require.Len(t, s.Sends(), 1)
					require.Equal(t, status, resp.StatusCode)
					_ = readAll(t, resp)
					require.Equal(t, asked, resp.Header.Get("Retry-After"))
					require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrRetryAfterTooLong)
					require.Zero(t, time.Since(start))
				})
			})
		}
	}
}

func TestC29_LongestPermittedRetryAfterIsWaited(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "60"}))
		resp, err := over(s).RoundTrip(newPayment(t, context.Background(), s, "c29"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		sends := s.Sends()
		require.Len(t, sends, 2)
		require.GreaterOrEqual(t, sends[1].At.Sub(sends[0].At), 60*time.Second)
	})
}

// --- C31

func TestC31_OddRetryAfterNeverMakesAHotLoop(t *testing.T) {
	const least, most = 10 * time.Millisecond, 80 * time.Millisecond // base and cap of the cases
	for _, tc := range []struct {
		asked    string
		from     string
		min, max time.Duration // of the first wait
	}{
		{"0", "retry-after", least, most},
		{"000", "retry-after", least, most},
		{"Thu, 01 Jan 1970 00:00:00 GMT", "retry-after", least, most},
		{"-5", "throttle", 0, most},
		{"+5", "throttle", 0, most},
		{"1.5", "throttle", 0, most},
		{"1e3", "throttle", 0, most},
		{"0x10", "throttle", 0, most},
		{"\u0665", "throttle", 0, most},
		{" 2 ", "retry-after", 2 * time.Second, 2*time.Second + most},
		{"\t2", "retry-after", 2 * time.Second, 2*time.Second + most},
		{"2s", "throttle", 0, most},
		{"abc", "throttle", 0, most},
		{"", "throttle", 0, most},
		{"2\n5", "retry-after", 5 * time.Second, 5*time.Second + most},
		{"5\n2", "retry-after", 5 * time.Second, 5*time.Second + most},
		{"abc\n3", "retry-after", 3 * time.Second, 3*time.Second + most},
		{"2, 5", "throttle", 0, most},
	} {
		t.Run(fmt.Sprintf("%q", tc.asked), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("",
					fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: tc.asked},
					fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: tc.asked}))

				resp, err := over(s).RoundTrip(newPayment(t, context.Background(), s, "c31"))

				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 3)
				for _, a := range idem.ReportOf(resp).Attempts[:2] {
					require.Equal(t, tc.from, a.WaitFrom)
					require.GreaterOrEqual(t, a.Wait, tc.min)
					require.LessOrEqual(t, a.Wait, tc.max)
				}
			})
		})
	}
}

func TestC31_EmptyRetryAfterLinesAreIgnored(t *testing.T) {
	virtual(t, func(t *testing.T) {
		// The fake server leaves an empty header out; this base does not.
		attempts := waitsOf(t, &idem.Transport{Policy: casePolicy(), Base: alwaysSays(503, func() http.Header {
			return http.Header{"Retry-After": {"", " "}}
		})})
		require.Len(t, attempts, 4)
		require.Equal(t, "throttle", attempts[0].WaitFrom)
	})
}

// --- C32

func TestC32_NeitherJitterNorCapUndercutsTheServer(t *testing.T) {
	const operations = 1000
	forms := map[string]func() http.Header{
		"seconds": func() http.Header { return http.Header{"Retry-After": {"3"}} },
		"date": func() http.Header {
			now := time.Now().UTC()
			return http.Header{
				"Date":        {now.Format(http.TimeFormat)},
				"Retry-After": {now.Add(3 * time.Second).Format(http.TimeFormat)},
			}
		},
	}
	for _, status := range []int{409, 429, 503} {
		for form, header := range forms {
			t.Run(fmt.Sprintf("%d %s", status, form), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					policy := casePolicy()
					policy.BackoffCap = time.Second
					policy.MaxRetryAfter = 10 * time.Second
					policy.MaxInProgress = 3
					tr := &idem.Transport{Policy: policy, Base: alwaysSays(status, header)}
					above := 0
					for range operations {
						attempts := waitsOf(t, tr)
						require.Len(t, attempts, 4)
						for i, a := range attempts[:3] {
							jitter := 10 * time.Millisecond << i
							require.Equal(t, "retry-after", a.WaitFrom)
							require.GreaterOrEqual(t, a.Wait, 3*time.Second)
							require.LessOrEqual(t, a.Wait, 3*time.Second+jitter)
							if a.Wait > 3*time.Second+jitter/2 {
								above++
							}
						}
					}
					// The jitter is there, and it is spread.
					require.InDelta(t, 0.5, float64(above)/(3*operations), 0.1)
				})
			})
		}
	}
}

// --- C34

const waitsChild = "IDEM_TEST_PRINT_WAITS" // set in a child process

func TestC34_TwoProcessesWaitDifferently(t *testing.T) {
	if os.Getenv(waitsChild) != "" {
		virtual(t, func(t *testing.T) {
			policy := casePolicy()
			policy.MaxAttempts = 6
			for _, a := range waitsOf(t, &idem.Transport{Policy: policy, Base: alwaysSays(500, nil)})[:5] {
				fmt.Println("wait", a.Wait)
			}
		})
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	child := func() *exec.Cmd {
		c := exec.Command(self, "-test.run=^TestC34_TwoProcessesWaitDifferently$", "-test.count=1")
		c.Env = append(os.Environ(), waitsChild+"=1")
		return c
	}
	sequences := make([]string, 2)
	for i := range sequences {
		out, err := child().CombinedOutput()
		require.NoError(t, err, "%s", out)
		for line := range strings.Lines(string(out)) {
			if strings.HasPrefix(line, "wait ") {
				sequences[i] += line
			}
		}
		require.Equal(t, 5, strings.Count(sequences[i], "\n"), "%s", out)
	}
	require.NotEqual(t, sequences[0], sequences[1])
}

func TestC34_WaitsAtTheCapCoverIt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		const limit = 80 * time.Millisecond
		policy := casePolicy()
		policy.MaxAttempts = 9
		tr := &idem.Transport{Policy: policy, Base: alwaysSays(500, nil)}
		var bins [8]int
		for range 1000 {
			a := waitsOf(t, tr)[7]
			require.GreaterOrEqual(t, a.Wait, time.Duration(0))
			require.LessOrEqual(t, a.Wait, limit)
			bins[min(int(a.Wait*8/limit), 7)]++
		}
		for i, n := range bins {
			require.InDelta(t, 125, n, 75, "bin %d of %v", i, bins)
		}
	})
}

// --- validation

func TestPolicyThatCannotWorkNamesTheFieldBeforeAnythingIsSent(t *testing.T) {
	for _, tc := range []struct {
		field  string
		policy idem.Policy
	}{
		{"Policy.MaxAttempts", idem.Policy{MaxAttempts: -1}},
		{"Policy.MaxRetryAfter", idem.Policy{MaxRetryAfter: -1}},
		{"Policy.MaxInProgress", idem.Policy{MaxInProgress: -1}},
		{"Policy.BackoffBase", idem.Policy{BackoffBase: -1}},
		{"Policy.BackoffBase", idem.Policy{BackoffBase: 1}},
		{"Policy.BackoffBase", idem.Policy{BackoffBase: time.Millisecond - 1}},
		{"Policy.BackoffCap", idem.Policy{BackoffCap: -1}},
		{"Policy.BackoffCap", idem.Policy{BackoffCap: 49 * time.Millisecond}},
		{"Policy.BackoffCap", idem.Policy{BackoffBase: 21 * time.Second}},
		{"Policy.ThrottleBase", idem.Policy{ThrottleBase: -1}},
		{"Policy.ThrottleBase", idem.Policy{ThrottleBase: 1}},
		{"Policy.KeyWindow", idem.Policy{KeyWindow: -1}},
		{"Policy.KeyWindow", idem.Policy{KeyWindow: 30 * time.Second}},
		{"Policy.KeyWindow", idem.Policy{KeyWindow: time.Hour, AttemptTimeout: 2 * time.Hour}},
		{"Budget.Cost", idem.Policy{Budget: &idem.Budget{Cost: -1}}},
		{"Budget.Cost", idem.Policy{Budget: &idem.Budget{Cost: 41}}},
		{"Budget.Cost", idem.Policy{Budget: &idem.Budget{Capacity: 3}}},
	} {
		t.Run(tc.field, func(t *testing.T) {
			body := &closeCounter{Reader: strings.NewReader(`{}`)}
			tr := &idem.Transport{Policy: tc.policy, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
				t.Error("sent")
				return nil, io.EOF
			})}
			req := newPost(t, context.Background(), "http://provider.test/", "")
			req.Body, req.GetBody, req.ContentLength = body, nil, 2

			_, err := tr.RoundTrip(req)

			require.ErrorIs(t, err, idem.ErrInvalid)
			require.ErrorContains(t, err, tc.field+" ")
			require.Regexp(t, `the (least|most) is |must be longer than `, err.Error(), "the text names the limit")
			require.EqualValues(t, 1, body.closes.Load())
			require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
		})
	}
}

func TestNegativeMeansOffWhereTheFieldSaysSo(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Delay: time.Hour}))
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.AttemptTimeout = -1
			tr.Policy.MaxElapsed = -1
			tr.Policy.MaxRequestBuffer = -1
			tr.Policy.MaxResponseBuffer = -1
			tr.Policy.Budget = &idem.Budget{Capacity: -1}
		})
		req := newPayment(t, context.Background(), s, "off")
		req.Body, req.GetBody = io.NopCloser(io.MultiReader(req.Body)), nil // readable once
		start := time.Now()

		resp, err := tr.RoundTrip(req)

		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.GreaterOrEqual(t, time.Since(start), time.Hour)
	})
}

func TestOneAttemptMeansOneSend(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
		tr := over(s, func(tr *idem.Transport) { tr.Policy.MaxAttempts = 1 })
		resp, err := tr.RoundTrip(newPayment(t, context.Background(), s, "one"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Sends(), 1)
		require.Equal(t, 503, resp.StatusCode)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrAttemptsExhausted)
	})
}

func TestThrottledAnswersWaitLongerThanOtherFailures(t *testing.T) {
	const operations = 400
	mean := func(t *testing.T, status int) (from string, mean time.Duration) {
		virtual(t, func(t *testing.T) {
			policy := casePolicy()
			policy.ThrottleBase = time.Second
			policy.MaxAttempts = 2
			tr := &idem.Transport{Policy: policy, Base: alwaysSays(status, nil)}
			for range operations {
				a := waitsOf(t, tr)[0]
				require.LessOrEqual(t, a.Wait, time.Second)
				from = a.WaitFrom
				mean += a.Wait / operations
			}
		})
		return from, mean
	}
	for status, want := range map[int]struct {
		from string
		mean time.Duration
	}{
		429: {"throttle", 500 * time.Millisecond},
		503: {"throttle", 500 * time.Millisecond},
		500: {"backoff", 5 * time.Millisecond},
		502: {"backoff", 5 * time.Millisecond},
		408: {"backoff", 5 * time.Millisecond},
	} {
		from, got := mean(t, status)
		require.Equal(t, want.from, from, status)
		require.InDelta(t, want.mean, got, float64(want.mean)/5, status)
	}
}

func TestVerdictPrintsItself(t *testing.T) {
	for v, want := range map[idem.Verdict]string{
		idem.Undecided: "undecided", idem.Stop: "stop", idem.Retry: "retry", 7: "invalid verdict",
	} {
		require.Equal(t, want, v.String())
	}
	require.Zero(t, idem.Undecided, "the zero verdict overrules nothing")
}
