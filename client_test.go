package idem_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// The bank charged, and the answer was lost on the way back.
func TestLostResponseChargesOnce(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		resp, err := idem.NewClient(over(s)).Do(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		body := readAll(t, resp)

		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Len(t, s.Sends(), 2)
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		require.Contains(t, body, `"order-1"`)
		report := idem.ReportOf(resp)
		require.Equal(t, idem.Executed, report.Outcome)
		require.True(t, report.Replayed, "the second answer is the stored one")
		require.True(t, report.EarlierUnknown)
		require.Equal(t, 2, report.Sends)
	})
}

func TestReusedKeyIsRefused(t *testing.T) {
	t.Run("here, before anything is sent", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			c := idem.NewClient(over(s))
			ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-2/1"})
			resp, err := c.Do(newPayment(t, ctx, s, "order-2"))
			require.NoError(t, err)
			readAll(t, resp)

			_, err = c.Do(newPost(t, ctx, s.URL()+"/v1/payments", paymentJSON("order-2", 9999999)))
			require.Len(t, s.Effects(), 1)
			require.Len(t, s.Sends(), 1)
			e := requireError(t, err, idem.ErrKeyReused)
			require.Zero(t, e.Sends)
			require.Equal(t, 2, strings.Count(err.Error(), "/v1/payments"), "both requests are named: %v", err)
		})
	})
	t.Run("by the server", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			c := idem.NewClient(over(s))
			resp, err := c.Do(newPayment(t, idem.WithKey(t.Context(), "taken"), s, "order-3"))
			require.NoError(t, err)
			readAll(t, resp)

			_, err = c.Do(newPost(t, idem.WithKey(t.Context(), "taken"), s.URL()+"/v1/payments", paymentJSON("order-4", 5)))
			require.Len(t, s.Effects(), 1)
			require.Equal(t, []string{"taken"}, keysSent(s.Sends()), "never a new key")
			require.Len(t, s.Sends(), 2)
			e := requireError(t, err, idem.ErrKeyReused)
			require.Equal(t, idem.Unknown, e.Outcome)
			require.Equal(t, http.StatusUnprocessableEntity, e.StatusCode)
			require.Contains(t, string(e.Body), "idempotency-key-reused")
		})
	})
}

func TestInProgressIsWaitedOut(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Slow, Delay: 2500 * time.Millisecond}))
		c := idem.NewClient(over(s, func(tr *idem.Transport) {
			tr.Policy.AttemptTimeout = time.Second
			tr.Policy.MaxAttempts = 2
		}))
		start := time.Now()
		resp, err := c.Do(newPayment(t, t.Context(), s, "order-5"))
		require.NoError(t, err)
		readAll(t, resp)

		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
		report := idem.ReportOf(resp)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Greater(t, len(report.Attempts), 2, "the waits do not count as attempts")
		require.Equal(t, 2, report.Attempts[len(report.Attempts)-1].N)
		for _, a := range report.Attempts {
			if a.Status == http.StatusConflict {
				require.Equal(t, idem.Unknown, a.Outcome)
				require.Equal(t, "retry-after", a.WaitFrom)
				require.GreaterOrEqual(t, a.Wait, time.Second)
			}
		}
		require.GreaterOrEqual(t, time.Since(start), 2500*time.Millisecond)
		require.Less(t, time.Since(start), 5*time.Second)
	})
}

// Four answers in a row are lost. The error carries the key, and the same
// operation called with it settles what happened.
func TestUnknownOutcomeKeepsTheKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		lost := fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}
		require.NoError(t, s.Script("", lost, lost, lost, lost))
		c := idem.NewClient(over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = time.Second }))

		_, err := c.Do(newPayment(t, t.Context(), s, "order-6"))
		require.Len(t, s.Effects(), 1)
		e := requireError(t, err, idem.ErrAttemptsExhausted)
		require.Equal(t, idem.Unknown, e.Outcome)
		require.Equal(t, keysSent(s.Sends()), []string{e.Key})
		require.Contains(t, err.Error(), e.Key, "somebody has to paste it into a dashboard")
		require.True(t, e.Timeout())

		resp, err := c.Do(newPayment(t, idem.WithKey(t.Context(), e.Key), s, "order-6"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, []string{e.Key}, keysSent(s.Sends()))
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
	})
}

// requireError is the *idem.Error of a call that ended for reason.
func requireError(t *testing.T, err, reason error) *idem.Error {
	t.Helper()
	require.ErrorIs(t, err, reason)
	var e *idem.Error
	require.ErrorAs(t, err, &e)
	return e
}

// ending is a way for an operation to end for a Reason.
type ending struct {
	reason  error
	outcome idem.Outcome
	status  int // of the last answer; 0: none
	sends   int
	effects int
	arrange func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request
}

var errOwnCause = errors.New("the user closed the tab")

func endings() []ending {
	payment := func(t *testing.T, s *fakeserver.Server) *http.Request {
		return newPayment(t, t.Context(), s, "order-9")
	}
	script := func(t *testing.T, s *fakeserver.Server, faults ...fakeserver.Fault) {
		require.NoError(t, s.Script("", faults...))
	}
	unavailable := fakeserver.Fault{Kind: fakeserver.Status, Status: 503}
	return []ending{
		{idem.ErrInvalid, idem.NotExecuted, 0, 0, 0, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			tr.Policy.MaxAttempts = -1
			return payment(t, s)
		}},
		{idem.ErrKeyInvalid, idem.NotExecuted, 0, 0, 0, func(t *testing.T, s *fakeserver.Server, _ *idem.Transport) *http.Request {
			req := payment(t, s)
			req.Header["Idempotency-Key"] = []string{""}
			return req
		}},
		{idem.ErrScopeChanged, idem.Unknown, 503, 1, 0, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			script(t, s, unavailable)
			token := "a"
			tr.Scope = func(r *http.Request) string { return r.Header.Get("Account") }
			tr.Prepare = func(r *http.Request) error {
				r.Header.Set("Account", token)
				token = "b"
				return nil
			}
			req := payment(t, s)
			req.Header.Set("Account", "a")
			return req
		}},
		{idem.ErrRedirectRefused, idem.Unknown, 0, 1, 0, func(t *testing.T, s *fakeserver.Server, _ *idem.Transport) *http.Request {
			script(t, s, fakeserver.Fault{Kind: fakeserver.Redirect, Location: "other"})
			return payment(t, s)
		}},
		{idem.ErrKeyExpired, idem.Unknown, 0, 0, 0, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			tr.Policy.KeyWindow = 24 * time.Hour
			op := idem.Operation{Name: "payment", ID: "order-9/1", Started: time.Now().Add(-24*time.Hour + time.Second)}
			return newPayment(t, idem.WithOperation(t.Context(), op), s, "order-9")
		}},
		{idem.ErrKeyReused, idem.Unknown, 422, 2, 1, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			resp, err := (&http.Client{Transport: tr}).Do(newPayment(t, idem.WithKey(t.Context(), "taken"), s, "order-8"))
			require.NoError(t, err)
			readAll(t, resp)
			return newPayment(t, idem.WithKey(t.Context(), "taken"), s, "order-9")
		}},
		{idem.ErrInProgress, idem.Unknown, 409, 4, 0, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			script(t, s, fakeserver.Fault{Kind: fakeserver.Stuck})
			tr.Policy.MaxInProgress = 2
			return payment(t, s)
		}},
		{idem.ErrAlreadyDone, idem.Executed, 410, 2, 1, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			script(t, s, fakeserver.Fault{Kind: fakeserver.Close, Point: fakeserver.AfterEffect},
				fakeserver.Fault{Kind: fakeserver.Status, Status: 410})
			tr.Dialect = idem.Generic
			tr.Dialect.AlreadyDone = []idem.Mark{{Status: 410}}
			return payment(t, s)
		}},
		{idem.ErrAttemptsExhausted, idem.Unknown, 503, 4, 0, func(t *testing.T, s *fakeserver.Server, _ *idem.Transport) *http.Request {
			script(t, s, unavailable, unavailable, unavailable, unavailable)
			return payment(t, s)
		}},
		{idem.ErrTimeExhausted, idem.Unknown, 503, 2, 0, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			f := unavailable
			f.RetryAfter = "2"
			script(t, s, f, f, f, f)
			tr.Policy.MaxElapsed = 3 * time.Second
			return payment(t, s)
		}},
		{idem.ErrBudgetExhausted, idem.Unknown, 503, 3, 0, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			script(t, s, unavailable, unavailable, unavailable, unavailable)
			tr.Policy.Budget = &idem.Budget{Capacity: 4, Cost: 4} // one retry, and one probe in ten seconds
			return payment(t, s)
		}},
		{idem.ErrRetryAfterTooLong, idem.Unknown, 503, 1, 0, func(t *testing.T, s *fakeserver.Server, _ *idem.Transport) *http.Request {
			f := unavailable
			f.RetryAfter = "3600"
			script(t, s, f)
			return payment(t, s)
		}},
		{idem.ErrBodyNotReplayable, idem.Unknown, 503, 1, 0, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			script(t, s, unavailable)
			tr.Policy.MaxRequestBuffer = 16
			req := payment(t, s)
			req.Body, req.GetBody = io.NopCloser(onlyReader{req.Body}), nil
			return req
		}},
		{idem.ErrBodyChanged, idem.Unknown, 503, 1, 0, func(t *testing.T, s *fakeserver.Server, tr *idem.Transport) *http.Request {
			script(t, s, unavailable)
			f := fileOf(t, paymentJSON("order-9", 1))
			tr.Hooks.Waiting = func(context.Context, *idem.Report, idem.Attempt) {
				require.NoError(t, os.WriteFile(f.Name(), []byte("another payment altogether"), 0o600))
			}
			return postFile(t, s, f)
		}},
		{errOwnCause, idem.Unknown, 0, 1, 1, func(t *testing.T, s *fakeserver.Server, _ *idem.Transport) *http.Request {
			script(t, s, fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect})
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(errOwnCause) })
			return newPayment(t, ctx, s, "order-9")
		}},
	}
}

// onlyReader hides what else a reader can do.
type onlyReader struct{ io.Reader }

func fileOf(t *testing.T, content string) *os.File {
	t.Helper()
	name := filepath.Join(t.TempDir(), "body.json")
	require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
	f, err := os.Open(name)
	require.NoError(t, err)
	return f
}

func postFile(t *testing.T, s *fakeserver.Server, f *os.File) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/payments", f)
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	return req
}

// requireClosed fails unless f is closed.
func requireClosed(t *testing.T, f *os.File) {
	t.Helper()
	require.ErrorIs(t, f.Close(), os.ErrClosed, "the caller's file was left open")
}

func TestEveryReasonIsATypedError(t *testing.T) {
	for _, end := range endings() {
		t.Run(strings.TrimPrefix(end.reason.Error(), "idem: "), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				tr := over(s)
				req := end.arrange(t, s, tr)
				resp, err := idem.NewClient(tr).Do(req)

				require.Nil(t, resp)
				require.Len(t, s.Effects(), end.effects)
				require.Len(t, s.Sends(), end.sends)
				e := requireError(t, err, end.reason)
				require.Equal(t, end.outcome, e.Outcome)
				require.Equal(t, end.outcome, idem.OutcomeOf(nil, err))
				require.ErrorIs(t, e.Reason, end.reason)
				require.Equal(t, end.status, e.StatusCode)
				require.Equal(t, end.status != 0, e.Header != nil)
				if keys := keysSent(s.Sends()); len(keys) > 0 {
					require.Equal(t, keys, []string{e.Key})
				}
				require.True(t, strings.HasPrefix(err.Error(), "idem: "))
				require.Contains(t, err.Error(), "effect: "+end.outcome.String())
				require.Equal(t, 1, strings.Count(err.Error(), "idem: "), err.Error())
			})
		})
	}
}

// Through an http.Client of their own people get the same knowledge: as a
// response with a report where the server answered, else behind *url.Error.
func TestStandardClientTellsTheSame(t *testing.T) {
	for _, end := range endings() {
		t.Run(strings.TrimPrefix(end.reason.Error(), "idem: "), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				tr := over(s)
				req := end.arrange(t, s, tr)
				var report idem.Report
				req = req.WithContext(idem.WithReport(req.Context(), &report))
				resp, err := idem.NewClient(tr).StandardClient().Do(req)

				require.Len(t, s.Effects(), end.effects)
				require.Len(t, s.Sends(), end.sends)
				require.Equal(t, end.outcome, idem.OutcomeOf(resp, err))
				require.Equal(t, end.outcome, report.Outcome)
				require.ErrorIs(t, report.Reason, end.reason)
				if err == nil {
					readAll(t, resp)
					require.Equal(t, end.status, resp.StatusCode)
					require.Equal(t, report, *idem.ReportOf(resp))
					return
				}
				var behind *url.Error
				require.ErrorAs(t, err, &behind)
				e := requireError(t, err, end.reason)
				require.Equal(t, report, e.Report)
			})
		})
	}
}

func TestStandardClientHasNoTimeout(t *testing.T) {
	c := idem.NewClient(nil)
	require.Zero(t, c.StandardClient().Timeout)
	require.IsType(t, &idem.Transport{}, c.StandardClient().Transport)
	require.NotSame(t, c.StandardClient(), c.StandardClient(), "what one user sets must not reach another")
}

// http.Client.Timeout makes text of typed errors; the report gets through.
func TestReportSurvivesTheTimeoutOfHTTPClient(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}))
		client := idem.NewClient(over(s)).StandardClient()
		client.Timeout = time.Second
		var report idem.Report
		_, err := client.Do(newPayment(t, idem.WithReport(t.Context(), &report), s, "order-10"))
		require.Error(t, err)

		require.Len(t, s.Effects(), 1)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		require.Equal(t, idem.Unknown, report.Outcome)
		require.Equal(t, keysSent(s.Sends()), []string{report.Key})
		require.Equal(t, 1, report.Sends)
	})
}

func TestAnswersWithoutAReasonAreResponses(t *testing.T) {
	for _, c := range []struct {
		name    string
		body    string
		fault   fakeserver.Fault
		status  int
		outcome idem.Outcome
	}{
		{"declined", paymentJSON("order-11", fakeserver.DeclinedAmount), fakeserver.Fault{}, 402, idem.Refused},
		{"malformed", `{"amount":"many"}`, fakeserver.Fault{}, 0, idem.Refused},
		{"not found", paymentJSON("order-11", 1), fakeserver.Fault{Kind: fakeserver.Status, Status: 404}, 404, idem.Refused},
		{"a conflict that is final", paymentJSON("order-11", 1), fakeserver.Fault{Kind: fakeserver.Status, Status: 409}, 409, idem.Unknown},
		{"not implemented", paymentJSON("order-11", 1), fakeserver.Fault{Kind: fakeserver.Status, Status: 501}, 501, idem.Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", c.fault))
				resp, err := idem.NewClient(over(s)).Do(newPost(t, t.Context(), s.URL()+"/v1/payments", c.body))
				require.NoError(t, err)
				require.NotEmpty(t, readAll(t, resp))

				require.Empty(t, s.Effects())
				require.Len(t, s.Sends(), 1)
				if c.status != 0 {
					require.Equal(t, c.status, resp.StatusCode)
				}
				require.Equal(t, c.outcome, idem.OutcomeOf(resp, nil))
				require.NoError(t, idem.ReportOf(resp).Reason)
			})
		})
	}
}

// http.Client follows a 307 only with a GetBody; Do supplies one.
func TestDoFollowsARedirectWithAnyBody(t *testing.T) {
	content := paymentJSON("order-12", 1999)
	for _, c := range []struct {
		name string
		body func(t *testing.T) (rc io.ReadCloser, length int64, closed func(t *testing.T))
	}{
		{"a reader that can be read once", func(*testing.T) (io.ReadCloser, int64, func(*testing.T)) {
			b := &closeCounter{Reader: strings.NewReader(content)}
			return b, -1, func(t *testing.T) { require.EqualValues(t, 1, b.closes.Load()) }
		}},
		{"the same with a length", func(*testing.T) (io.ReadCloser, int64, func(*testing.T)) {
			b := &closeCounter{Reader: strings.NewReader(content)}
			return b, int64(len(content)), func(t *testing.T) { require.EqualValues(t, 1, b.closes.Load()) }
		}},
		{"a file", func(t *testing.T) (io.ReadCloser, int64, func(*testing.T)) {
			f := fileOf(t, content)
			return f, -1, func(t *testing.T) { requireClosed(t, f) }
		}},
		{"a file from its offset", func(t *testing.T) (io.ReadCloser, int64, func(*testing.T)) {
			f := fileOf(t, "already sent"+content)
			_, err := f.Seek(int64(len("already sent")), io.SeekStart)
			require.NoError(t, err)
			return f, int64(len(content)), func(t *testing.T) { requireClosed(t, f) }
		}},
	} {
		for _, status := range []int{http.StatusTemporaryRedirect, http.StatusPermanentRedirect} {
			t.Run(fmt.Sprintf("%s, %d", c.name, status), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Script("",
						fakeserver.Fault{Kind: fakeserver.Redirect, Status: status, Location: "/v1/payments?again"},
						fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
					body, length, closed := c.body(t)
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/payments", body)
					require.NoError(t, err)
					req.ContentLength = length
					req.Header.Set("Content-Type", "application/json")
					resp, err := idem.NewClient(over(s)).Do(req)
					require.NoError(t, err)
					readAll(t, resp)

					require.Len(t, s.Effects(), 1)
					sends := s.Sends()
					require.Len(t, sends, 3, "redirect, a 503 there, success")
					require.Len(t, keysSent(sends), 1)
					for _, n := range sends {
						require.EqualValues(t, len(content), n.BodyLen)
						require.Equal(t, sends[0].BodySHA256, n.BodySHA256)
					}
					report := idem.ReportOf(resp)
					require.Equal(t, idem.Executed, report.Outcome)
					require.Len(t, report.Attempts, 3)
					closed(t)
				})
			})
		}
	}
}

// A stream that is longer than the buffer goes out once: the redirect comes
// back as it is.
func TestDoHandsARedirectOfAStreamBack(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Location: "/v1/payments"}))
		b := &closeCounter{Reader: strings.NewReader(paymentJSON("order-13", 1))}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/payments", b)
		require.NoError(t, err)
		resp, err := idem.NewClient(over(s, func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer = 16 })).Do(req)
		require.NoError(t, err)
		readAll(t, resp)

		require.Empty(t, s.Effects())
		require.Len(t, s.Sends(), 1)
		require.Equal(t, http.StatusTemporaryRedirect, resp.StatusCode)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
		require.EqualValues(t, 1, b.closes.Load())
	})
}

func TestDoClosesTheCallersFileOnEveryPath(t *testing.T) {
	unavailable := fakeserver.Fault{Kind: fakeserver.Status, Status: 503}
	for _, c := range []struct {
		name   string
		faults []fakeserver.Fault
		edit   func(t *testing.T, req **http.Request, tr *idem.Transport)
		ok     bool
	}{
		{name: "success", ok: true},
		{name: "success of the second attempt", faults: []fakeserver.Fault{unavailable}, ok: true},
		{name: "an early answer", faults: []fakeserver.Fault{{Kind: fakeserver.EarlyAnswer}}, ok: true},
		{name: "exhausted", faults: []fakeserver.Fault{unavailable, unavailable, unavailable, unavailable}},
		{name: "every answer lost", faults: []fakeserver.Fault{{Kind: fakeserver.Reset}, {Kind: fakeserver.Reset}, {Kind: fakeserver.Reset}, {Kind: fakeserver.Reset}}},
		{name: "redirect refused", faults: []fakeserver.Fault{{Kind: fakeserver.Redirect, Location: "other"}}},
		{name: "a bad key", edit: func(_ *testing.T, req **http.Request, _ *idem.Transport) {
			(*req).Header["Idempotency-Key"] = []string{"a", "b"}
		}},
		{name: "a bad policy", edit: func(_ *testing.T, _ **http.Request, tr *idem.Transport) { tr.Policy.MaxAttempts = -1 }},
		{name: "a relative URL", edit: func(_ *testing.T, req **http.Request, _ *idem.Transport) { (*req).URL = &url.URL{Path: "/v1/payments"} }},
		{name: "no URL", edit: func(_ *testing.T, req **http.Request, _ *idem.Transport) { (*req).URL = nil }},
		{name: "a length that is not that of the file", edit: func(_ *testing.T, req **http.Request, _ *idem.Transport) { (*req).ContentLength = 1 << 20 }},
		{name: "a context that has ended", edit: func(t *testing.T, req **http.Request, _ *idem.Transport) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			*req = (*req).WithContext(ctx)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", c.faults...))
				f := fileOf(t, paymentJSON("order-14", 1))
				req, tr := postFile(t, s, f), over(s)
				if c.edit != nil {
					c.edit(t, &req, tr)
				}
				resp, err := idem.NewClient(tr).Do(req)
				if c.ok {
					require.NoError(t, err)
					readAll(t, resp)
					require.Len(t, s.Effects(), 1)
				} else {
					var e *idem.Error
					require.ErrorAs(t, err, &e)
				}
				time.Sleep(time.Second) // the transport may end its copy of the body a little later
				requireClosed(t, f)
			})
		})
	}
}

func TestDoRefusesWhatCannotBeSent(t *testing.T) {
	absolute, err := url.Parse("http://fakeserver.test/v1/payments")
	require.NoError(t, err)
	for _, c := range []struct {
		name string
		req  *http.Request
	}{
		{"no request", nil},
		{"no URL", &http.Request{Method: http.MethodPost}},
		{"a relative URL", &http.Request{Method: http.MethodPost, URL: &url.URL{Path: "/v1/payments"}}},
		{"no host", &http.Request{Method: http.MethodPost, URL: &url.URL{Scheme: "http", Path: "/v1/payments"}}},
		{"the request of a server", &http.Request{Method: http.MethodPost, URL: absolute, RequestURI: "/v1/payments"}},
		{"a method that is none", &http.Request{Method: "PO ST", URL: absolute}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
				t.Error("the base was asked")
				return nil, io.ErrUnexpectedEOF
			})}
			b := &closeCounter{Reader: strings.NewReader("{}")}
			if c.req != nil {
				c.req.Body = b
			}
			_, err := idem.NewClient(tr).Do(c.req)
			e := requireError(t, err, idem.ErrInvalid)
			require.Equal(t, idem.NotExecuted, e.Outcome)
			require.Contains(t, err.Error(), "Request")
			if c.req != nil {
				require.EqualValues(t, 1, b.closes.Load())
			}
		})
	}
}

// http.Client gives up after ten hops. That is no retry, and the error still
// has the report.
func TestRedirectLoopEndsWithTheReport(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Redirect, Location: "/v1/payments"}))
		_, err := idem.NewClient(over(s)).Do(newPayment(t, t.Context(), s, "order-15"))

		require.Empty(t, s.Effects())
		require.Len(t, s.Sends(), 10)
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, keysSent(s.Sends()), []string{e.Key})
		require.Equal(t, 10, e.Sends)
		require.Len(t, e.Attempts, 10)
		require.Equal(t, http.StatusTemporaryRedirect, e.StatusCode)
		require.Equal(t, idem.Unknown, e.Outcome)
		require.Contains(t, err.Error(), "10 redirects")
	})
}

// A redirect that http.Client cannot follow leaves an operation behind that
// may have been executed; its key must not be lost.
func TestUnreadableRedirectKeepsTheKey(t *testing.T) {
	for _, location := range []string{"http://[::1", "ht tp://x/"} {
		t.Run(location, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", fakeserver.Fault{
					Kind: fakeserver.Redirect, Point: fakeserver.AfterEffect, Status: 303, Location: location,
				}))
				_, err := idem.NewClient(over(s)).Do(newPayment(t, t.Context(), s, "order-16"))
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 1)
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, keysSent(s.Sends()), []string{e.Key})
				require.Equal(t, 1, e.Sends)
				require.Equal(t, idem.Executed, e.Outcome, "a 303 says that it was done")
			})
		})
	}
}

func TestClientWithoutATransportIsReady(t *testing.T) {
	s := onLoopback(t)
	for _, c := range []*idem.Client{idem.NewClient(nil), idem.NewClient(&idem.Transport{})} {
		resp, err := c.Do(newPayment(t, t.Context(), s, "order-17"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
	}
	require.Len(t, s.Effects(), 2)
	require.Len(t, keysSent(s.Sends()), 2, "two independent calls are two operations")
}
