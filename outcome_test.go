package idem_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

func TestOutcomeSpeaks(t *testing.T) {
	require.Equal(t, "unknown", idem.Outcome(0).String())
	require.Equal(t, "not executed", idem.NotExecuted.String())
	require.Equal(t, "executed", idem.Executed.String())
	require.Equal(t, "refused", idem.Refused.String())
	require.Equal(t, "outcome 9", idem.Outcome(9).String())
}

func TestOutcomeOfIsUnknownWhereNothingIsKnown(t *testing.T) {
	foreign := answer(nil, http.StatusCreated, nil, "{}")
	typed := &idem.Error{Report: idem.Report{Outcome: idem.NotExecuted}}
	for _, c := range []struct {
		name string
		resp *http.Response
		err  error
		want idem.Outcome
	}{
		{"nothing at all", nil, nil, idem.Unknown},
		{"an answer that no Transport gave", foreign, nil, idem.Unknown},
		{"an error of somebody else", nil, io.ErrUnexpectedEOF, idem.Unknown},
		{"an error flattened to text", nil, errors.New(typed.Error()), idem.Unknown},
		{"an Error", nil, typed, idem.NotExecuted},
		{"an Error behind another", nil, fmt.Errorf("charge: %w", &url.Error{Op: "Post", URL: "http://x/", Err: typed}), idem.NotExecuted},
		{"an Error among others", nil, errors.Join(io.EOF, typed), idem.NotExecuted},
	} {
		require.Equal(t, c.want, idem.OutcomeOf(c.resp, c.err), c.name)
	}
	require.Nil(t, idem.ReportOf(nil))
	require.Nil(t, idem.ReportOf(foreign))
}

// An answer that comes with an error is not an answer.
func TestOutcomeOfDoesNotBelieveAnAnswerBesideAnError(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, errors.New("a decoder's own")))
	})
}

// What one holder does to a report reaches no other.
func TestReportsAreCopies(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
		var mine idem.Report
		resp, err := over(s).RoundTrip(newPayment(t, idem.WithReport(t.Context(), &mine), s, "order-2"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, *idem.ReportOf(resp), mine)
		require.Len(t, mine.Attempts, 2)

		mine.Attempts[0].Status = 999
		mine.Attempts = append(mine.Attempts, idem.Attempt{Status: 998})
		require.Equal(t, 503, idem.ReportOf(resp).Attempts[0].Status)
		require.Len(t, idem.ReportOf(resp).Attempts, 2)
	})
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		hang := fakeserver.Fault{Kind: fakeserver.Close}
		require.NoError(t, s.Script("", hang, hang, hang, hang))
		var mine idem.Report
		_, err := over(s).RoundTrip(newPayment(t, idem.WithReport(t.Context(), &mine), s, "order-3"))
		e := requireError(t, err, idem.ErrAttemptsExhausted)
		require.Equal(t, e.Report, mine)
		mine.Attempts[0].Status = 999
		require.Zero(t, e.Attempts[0].Status)
	})
}

// The GET after a 303 extends the report of the write, and does not reach
// back into the one that the caller may already hold.
func TestReportOfTheWriteGrowsByTheHop(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Point: fakeserver.AfterEffect}))
		var last idem.Report
		client := &http.Client{Transport: over(s)}
		var before *idem.Report
		client.CheckRedirect = func(req *http.Request, _ []*http.Request) error {
			before = idem.ReportOf(req.Response)
			require.Equal(t, idem.Executed, last.Outcome)
			require.Len(t, last.Attempts, 1)
			return nil
		}
		resp, err := client.Do(newPayment(t, idem.WithReport(t.Context(), &last), s, "order-4"))
		require.NoError(t, err)
		require.Contains(t, readAll(t, resp), `"order-4"`)

		require.Len(t, s.Effects(), 1)
		sends := s.Sends()
		require.Len(t, sends, 2)
		require.Equal(t, http.MethodGet, sends[1].Method)
		require.Empty(t, sends[1].Keys, "the GET carries no key")
		require.Len(t, before.Attempts, 1)
		require.Len(t, last.Attempts, 2)
		require.Equal(t, idem.Executed, last.Outcome)
		require.Equal(t, sends[0].Key, last.Key)
		require.Equal(t, 2, last.Sends)
		require.Equal(t, last, *idem.ReportOf(resp))
	})
}

// Nothing writes a report after the RoundTrip that it belongs to.
func TestEachRoundTripRewritesTheReport(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		var r idem.Report
		ctx := idem.WithReport(t.Context(), &r)
		tr := over(s)
		first, err := tr.RoundTrip(newPayment(t, ctx, s, "order-5"))
		require.NoError(t, err)
		kept := r
		readAll(t, first)
		require.Equal(t, kept, r)
		second, err := tr.RoundTrip(newPayment(t, ctx, s, "order-6"))
		require.NoError(t, err)
		readAll(t, second)
		require.NotEqual(t, kept.Key, r.Key)
		require.Equal(t, kept, *idem.ReportOf(first))
	})
}

const (
	secretPassword = "PW1-hunter2"
	secretQuery    = "SEC2-token"
	secretBearer   = "SEC3-bearer"
	secretCookie   = "SEC4-session"
	secretBody     = "SEC5-card-4242"
)

var secrets = []string{secretPassword, secretQuery, secretBearer, secretCookie, secretBody, "merchant-user"}

// secretive is a request that is full of what must not be told.
func secretive(t *testing.T, ctx context.Context, base string) *http.Request {
	t.Helper()
	u, err := url.Parse(base + "/v1/payments?access=" + secretQuery)
	require.NoError(t, err)
	u.User = url.UserPassword("merchant-user", secretPassword)
	req := newPost(t, ctx, u.String(), paymentJSON(secretBody, 1))
	req.Header.Set("Authorization", "Bearer "+secretBearer)
	req.AddCookie(&http.Cookie{Name: "session", Value: secretCookie})
	return req
}

func requireNoSecrets(t *testing.T, where, text string) {
	t.Helper()
	for _, secret := range secrets {
		require.NotContains(t, text, secret, where)
	}
}

// quotingBase fails with everything that it knows of the request.
type quotingBase struct{}

func (quotingBase) RoundTrip(req *http.Request) (*http.Response, error) {
	_ = req.Body.Close()
	return nil, fmt.Errorf("cannot send to %s with %v", req.URL, req.Header)
}

// echoBase answers with everything that it knows of the request.
func echoBase(status int) http.RoundTripper {
	return roundTripFunc(func(req *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(req.Body)
		_ = req.Body.Close()
		if err != nil {
			return nil, err
		}
		h := http.Header{
			"Content-Type": {"application/problem+json"},
			"X-Request-Id": {"req-7"},
			"Location":     {req.URL.String()},
		}
		return answer(req, status, h, fmt.Sprintf(`{"type":%q,"detail":%q}`, req.URL, fmt.Sprint(req.Header, string(body)))), nil
	})
}

func TestNoSecretsInWhatIsSaid(t *testing.T) {
	for _, c := range []struct {
		name string
		base func(s *fakeserver.Server) http.RoundTripper
		edit func(*idem.Transport)
		// request changes the request
		request func(req *http.Request) *http.Request
	}{
		{name: "connections that die", base: func(s *fakeserver.Server) http.RoundTripper {
			f := fakeserver.Fault{Kind: fakeserver.Reset}
			_ = s.Inject(f)
			return s.Transport()
		}},
		{name: "a server that cannot be reached", base: func(s *fakeserver.Server) http.RoundTripper {
			s.Refuse(100)
			return s.Transport()
		}},
		{name: "a limit", base: func(s *fakeserver.Server) http.RoundTripper {
			_ = s.Inject(fakeserver.Fault{Kind: fakeserver.Hang})
			return s.Transport()
		}},
		{name: "a redirect of the write", base: func(s *fakeserver.Server) http.RoundTripper {
			_ = s.Inject(fakeserver.Fault{Kind: fakeserver.Redirect, Location: s.OtherURL() + "/x?access=" + secretQuery})
			return s.Transport()
		}},
		{name: "a base that quotes", base: func(*fakeserver.Server) http.RoundTripper { return quotingBase{} }},
		{name: "a server that echoes a 500", base: func(*fakeserver.Server) http.RoundTripper { return echoBase(500) }},
		{name: "a server that echoes a 422", base: func(*fakeserver.Server) http.RoundTripper { return echoBase(422) }},
		{name: "Prepare that fails", base: func(s *fakeserver.Server) http.RoundTripper { return s.Transport() }, edit: func(tr *idem.Transport) {
			tr.Prepare = func(r *http.Request) error {
				return fmt.Errorf("no token for %s: %s", r.URL, r.Header.Get("Authorization"))
			}
		}},
		{name: "a body that fails", base: func(s *fakeserver.Server) http.RoundTripper { return s.Transport() }, request: func(req *http.Request) *http.Request {
			req.Body, req.GetBody = io.NopCloser(io.MultiReader(req.Body, failingReader{})), nil
			req.ContentLength = -1
			return req
		}},
		{name: "another request under the same key", base: func(s *fakeserver.Server) http.RoundTripper { return s.Transport() }, request: func(req *http.Request) *http.Request {
			ctx := idem.WithKey(req.Context(), "order-7/1")
			first := req.Clone(ctx)
			first.Body, _ = req.GetBody()
			tr := &idem.Transport{Base: echoBase(201), Policy: casePolicy()}
			if resp, err := tr.RoundTrip(first); err == nil {
				_ = resp.Body.Close()
			}
			second := req.Clone(ctx)
			second.URL.Path = "/v1/refunds"
			return second
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				var log bytes.Buffer
				var seen strings.Builder // by hooks
				tr := over(s, func(tr *idem.Transport) {
					tr.Base = c.base(s)
					tr.Policy.AttemptTimeout = time.Second
					logging := idem.SlogHooks(slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
					tr.Hooks = idem.Hooks{
						AttemptDone: func(ctx context.Context, r *idem.Report, a idem.Attempt) {
							logging.AttemptDone(ctx, r, a)
							a.Err = nil // its text is that of the base
							fmt.Fprintf(&seen, "%+v\n", a)
						},
						Waiting: logging.Waiting,
						Done: func(ctx context.Context, r *idem.Report) {
							logging.Done(ctx, r)
							fmt.Fprintln(&seen, r.Operation, r.Key, r.KeyFrom, r.Outcome, r.Reference)
						},
					}
					if c.edit != nil {
						c.edit(tr)
					}
				})
				request := func() *http.Request {
					req := secretive(t, t.Context(), s.URL())
					if c.request != nil {
						req = c.request(req)
					}
					return req
				}
				logger := slog.New(slog.NewTextHandler(&log, nil))
				said := func(where string, err error) {
					if err == nil {
						return
					}
					var e *idem.Error
					require.ErrorAs(t, err, &e)
					requireNoSecrets(t, where, e.Error())
					requireNoSecrets(t, where+" as a value", fmt.Sprint(e))
					logger.Info("failed", "err", e, "report", &e.Report)
				}
				var report idem.Report
				req := request()
				resp, err := tr.RoundTrip(req.WithContext(idem.WithReport(req.Context(), &report)))
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
					logger.Info("answered", "report", idem.ReportOf(resp))
				}
				said("RoundTrip", err)
				logger.Info("again", "report", &report)

				resp, err = idem.NewClient(tr).Do(request())
				if err == nil {
					_ = resp.Body.Close()
				}
				said("Do", err)

				require.Contains(t, log.String(), "idem: operation ended")
				requireNoSecrets(t, "log", log.String())
				requireNoSecrets(t, "hooks", seen.String())
			})
		})
	}
}

// failingReader fails with text that tells too much of nothing.
type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, errors.New("disk on fire") }

// A person has to paste the key of an operation that did not end executed.
func TestKeyIsWholeOnlyWhereSomebodyNeedsIt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		var log bytes.Buffer
		logged := func(tr *idem.Transport) {
			tr.Hooks = idem.SlogHooks(slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
		}
		resp, err := over(s, logged).RoundTrip(newPayment(t, t.Context(), s, "order-8"))
		require.NoError(t, err)
		readAll(t, resp)
		key := idem.ReportOf(resp).Key
		require.NotContains(t, log.String(), key)
		require.Contains(t, log.String(), key[:8])
		require.NotContains(t, log.String(), "WARN")
		require.NotContains(t, idem.ReportOf(resp).LogValue().String(), key)

		log.Reset()
		lost := fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}
		require.NoError(t, s.Script("", lost, lost, lost, lost))
		_, err = over(s, logged).RoundTrip(newPayment(t, t.Context(), s, "order-9"))
		e := requireError(t, err, idem.ErrAttemptsExhausted)
		for _, line := range strings.Split(strings.TrimSpace(log.String()), "\n") {
			whole := strings.Contains(line, e.Key)
			require.Equal(t, strings.Contains(line, "operation ended"), whole, line)
			require.Equal(t, whole, strings.Contains(line, "WARN"), line)
		}
		require.Contains(t, e.LogValue().String(), e.Key)
		require.Contains(t, e.Error(), e.Key)
	})
}

func TestFinalLineHasAFixedForm(t *testing.T) {
	virtual(t, func(t *testing.T) {
		var log bytes.Buffer
		tr := &idem.Transport{Base: echoBase(422), Policy: casePolicy()}
		tr.Hooks = idem.SlogHooks(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})))
		op := idem.Operation{Name: "refund", ID: "order-77/2"}
		req := newPost(t, idem.WithOperation(t.Context(), op), "http://api.example.test/v1/x", "{}")
		resp, err := tr.RoundTrip(req)
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, fmt.Sprintf("level=WARN msg=\"idem: operation ended\" operation=refund/order-77/2 key=%s "+
			"outcome=unknown reason=\"\" attempts=1 last_status=422 request_id=req-7\n", idem.ReportOf(resp).Key), log.String())
	})
}
