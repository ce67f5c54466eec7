package idem_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// Without keys the outcome is at least that of the calls under one context.
func TestUnkeyedOperationRemembersItsEarlierCall(t *testing.T) {
	s := onLoopback(t)
	s.Apply(fakeserver.Settings{Optional: true})
	require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
	tr := over(s, func(tr *idem.Transport) { tr.Dialect = idem.NoKeys })
	ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "payment", ID: "order-1/1"})
	_, err := tr.RoundTrip(newPayment(t, ctx, s, "order-1"))
	require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
	s.Refuse(100)
	_, err = tr.RoundTrip(newPayment(t, ctx, s, "order-1"))
	require.Len(t, s.Effects(), 1)
	require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err), "the first call charged")
	var e *idem.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, "payment/order-1/1", e.Operation.String())
	_, err = tr.RoundTrip(newPayment(t, context.Background(), s, "order-2"))
	require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err), "another request knows of no other call")
}

// TestRefusalAfterASendThatNetHTTPRepeatedIsUnknown has the first send executed and its connection closed; net/http repeats it within the attempt and meets a 403.
func TestRefusalAfterASendThatNetHTTPRepeatedIsUnknown(t *testing.T) {
	virtual(t, func(t *testing.T) {
		var effects atomic.Int32
		url, base := rawInMemory(t, func(n int, c net.Conn, r *bufio.Reader) {
			for {
				req, err := http.ReadRequest(r)
				if err != nil {
					return
				}
				_, _ = io.Copy(io.Discard, req.Body)
				switch {
				case req.Method == "GET":
					_, _ = io.WriteString(c, "HTTP/1.1 204 No Content\r\n\r\n")
				case n == 1:
					effects.Add(1)
					return
				default:
					_, _ = io.WriteString(c, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
				}
			}
		})
		client := &http.Client{Transport: &idem.Transport{Base: base, Policy: casePolicy()}}
		warm, err := client.Get(url)
		require.NoError(t, err)
		readAll(t, warm)
		resp, err := client.Post(url+"/v1/payments/p1/cancel", "", nil)
		require.NoError(t, err)
		readAll(t, resp)
		rep := idem.ReportOf(resp)
		require.Equal(t, int32(1), effects.Load())
		require.Equal(t, 2, rep.Sends)
		require.Equal(t, idem.Unknown, rep.Outcome, "%+v", rep)
	})
}

// TestDoEndsThoughTheBodyOfTheLastAnswerDoesNot has a last 503 whose body trickles for ever.
func TestDoEndsThoughTheBodyOfTheLastAnswerDoesNot(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Endless, Status: 503, Delay: time.Second}))
		c := idem.NewClient(over(s))
		start := time.Now()
		_, err := c.Do(newPayment(t, context.Background(), s, "r"))
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		require.Less(t, time.Since(start), 5*time.Minute)
	})
}

// TestRequestBufferWithoutALimitSendsTheBody has the largest MaxRequestBuffer that there is.
func TestRequestBufferWithoutALimitSendsTheBody(t *testing.T) {
	var got string
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			b, _ := io.ReadAll(r.Body)
			_ = r.Body.Close()
			got = string(b)
		}
		return answer(r, 200, nil, "ok"), nil
	})}
	tr.Policy.MaxRequestBuffer = math.MaxInt64
	req, _ := http.NewRequest("POST", "http://h/", io.NopCloser(io.MultiReader(strings.NewReader("pay"))))
	resp, err := tr.RoundTrip(req)
	require.NoError(t, err)
	readAll(t, resp)
	require.Equal(t, "pay", got)
}

// TestRequestBufferWithoutALimitComparesTheBody is the same for a named key, whose body is hashed.
func TestRequestBufferWithoutALimitComparesTheBody(t *testing.T) {
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		return answer(r, 200, nil, "ok"), nil
	})}
	tr.Policy.MaxRequestBuffer = math.MaxInt64
	resp, err := tr.RoundTrip(newPost(t, idem.WithKey(context.Background(), "k"), "http://h/", "{}"))
	require.NoError(t, err)
	readAll(t, resp)
}

// TestNoKeysRequestWithAKeyHeaderIsNotRepeatedByNetHTTP has an SDK that sets the header at a provider that ignores it.
func TestNoKeysRequestWithAKeyHeaderIsNotRepeatedByNetHTTP(t *testing.T) {
	virtual(t, func(t *testing.T) {
		var effects atomic.Int32
		url, base := rawInMemory(t, func(n int, c net.Conn, r *bufio.Reader) {
			for {
				req, err := http.ReadRequest(r)
				if err != nil {
					return
				}
				_, _ = io.Copy(io.Discard, req.Body)
				switch {
				case req.Method == "GET":
					_, _ = io.WriteString(c, "HTTP/1.1 204 No Content\r\n\r\n")
				case n == 1:
					effects.Add(1)
					return
				default:
					effects.Add(1)
					_, _ = io.WriteString(c, "HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")
				}
			}
		})
		client := &http.Client{Transport: &idem.Transport{Base: base, Policy: casePolicy(), Dialect: idem.NoKeys}}
		warm, err := client.Get(url)
		require.NoError(t, err)
		readAll(t, warm)
		req, _ := http.NewRequest("POST", url+"/v1/payments/p1/capture", nil)
		req.Header.Set("Idempotency-Key", "sdk-key")
		resp, err := client.Do(req)
		if err == nil {
			readAll(t, resp)
		}
		require.Equal(t, int32(1), effects.Load())
	})
}

// TestRedirectHopWithOtherContentIsNotSent has a GetBody that gives the hop another amount.
func TestRedirectHopWithOtherContentIsNotSent(t *testing.T) {
	for _, key := range []string{"", "k"} {
		s := onLoopback(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: 307, Location: "/v1/payments"}))
		ctx := context.Background()
		if key != "" {
			ctx = idem.WithKey(ctx, key)
		}
		req := newPost(t, ctx, s.URL()+"/v1/payments", paymentJSON("r", 1999))
		req.Body = io.NopCloser(io.MultiReader(strings.NewReader(paymentJSON("r", 1999))))
		n := 0
		req.GetBody = func() (io.ReadCloser, error) {
			n++
			amount := 1999
			if key == "" || n > 1 {
				amount = 2999
			}
			return io.NopCloser(strings.NewReader(paymentJSON("r", amount))), nil
		}
		resp, err := idem.NewClient(over(s)).Do(req)
		if err == nil {
			t.Errorf("%q: %s", key, readAll(t, resp))
		}
	}
}

// TestDeadlineEndsTheReadingOfARequestBody has a pipe into which nobody writes.
func TestDeadlineEndsTheReadingOfARequestBody(t *testing.T) {
	virtual(t, func(t *testing.T) {
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			return answer(r, 200, nil, "ok"), nil
		})}
		pr, pw := io.Pipe()
		defer pw.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		req, _ := http.NewRequestWithContext(ctx, "POST", "http://h/", pr)
		done := make(chan error, 1)
		go func() { _, err := tr.RoundTrip(req); done <- err }()
		select {
		case err := <-done:
			require.ErrorIs(t, err, context.DeadlineExceeded)
		case <-time.After(2 * time.Second):
			pw.Close()
			t.Fatal("hangs past the deadline")
		}
	})
}

// TestHeaderThatNetHTTPDoesNotSendCannotCarryTheKey has headers that net/http leaves out of the map.
func TestHeaderThatNetHTTPDoesNotSendCannotCarryTheKey(t *testing.T) {
	for _, h := range []string{"Host", "Content-Length", "Transfer-Encoding", "Trailer"} {
		s := onLoopback(t)
		s.Apply(fakeserver.Settings{Optional: true})
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		d := idem.Dialect{Name: "x", Header: h}
		resp, err := over(s, func(t *idem.Transport) { t.Dialect = d }).RoundTrip(newPayment(t, context.Background(), s, "r"))
		if err == nil {
			readAll(t, resp)
		}
		if len(s.Effects()) > 1 || !errors.Is(err, idem.ErrInvalid) {
			t.Errorf("%s: %d effects, %v", h, len(s.Effects()), err)
		}
	}
}

// TestMarkThatCannotWorkIsInvalid has marks without the place that they compare.
func TestMarkThatCannotWorkIsInvalid(t *testing.T) {
	for _, m := range []idem.Mark{{Status: 422, Contains: "sold-out"}, {Status: 422, Equals: "sold-out"}, {Status: 422, Value: "true"}, {Status: 422, Pointer: "type"}, {}} {
		d := idem.Generic
		d.Refusal = []idem.Mark{m}
		n := 0
		tr := &idem.Transport{Policy: casePolicy(), Dialect: d, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			if n++; n == 1 {
				return nil, io.ErrUnexpectedEOF
			}
			return answer(r, 422, http.Header{"Content-Type": {"application/json"}}, `{"type":"validation"}`), nil
		})}
		resp, err := tr.RoundTrip(newPost(t, context.Background(), "http://h/", "{}"))
		if err == nil {
			readAll(t, resp)
			t.Errorf("%+v: %v", m, idem.OutcomeOf(resp, nil))
		}
	}
}

// TestCredentialThatPrepareSetIsNotInTheText has a base that quotes it.
func TestCredentialThatPrepareSetIsNotInTheText(t *testing.T) {
	var logs bytes.Buffer
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		return nil, fmt.Errorf("gateway refused %s", r.Header.Get("Authorization"))
	})}
	tr.Policy.MaxAttempts = 1
	tr.Prepare = func(r *http.Request) error { r.Header.Set("Authorization", "Bearer sk_live_secret"); return nil }
	_, err := tr.RoundTrip(newPost(t, context.Background(), "http://h/", "{}"))
	slog.New(slog.NewTextHandler(&logs, nil)).Error("x", "err", err)
	require.NotContains(t, err.Error(), "sk_live_secret")
	require.NotContains(t, logs.String(), "sk_live_secret")
}

// TestReportByValueLogsNoSecrets logs what WithReport filled.
func TestReportByValueLogsNoSecrets(t *testing.T) {
	var logs bytes.Buffer
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		return nil, fmt.Errorf("refused %s", r.Header.Get("Authorization"))
	})}
	tr.Policy.MaxAttempts = 1
	var rep idem.Report
	req := newPost(t, idem.WithReport(context.Background(), &rep), "http://h/", "{}")
	req.Header.Set("Authorization", "Bearer sk_live_secret")
	_, err := tr.RoundTrip(req)
	require.Error(t, err)
	slog.New(slog.NewTextHandler(&logs, nil)).Error("x", "report", rep)
	require.NotContains(t, logs.String(), "sk_live_secret")
}

// TestSecretThatBeginsLikeAnotherIsRedactedWhole has one query value that is the beginning of another.
func TestSecretThatBeginsLikeAnotherIsRedactedWhole(t *testing.T) {
	leaks := 0
	for range 50 {
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			return nil, fmt.Errorf("bad token %s", r.URL.Query().Get("token"))
		})}
		tr.Policy.MaxAttempts = 1
		_, err := tr.RoundTrip(newPost(t, context.Background(), "http://h/?a=sk_live&token=sk_live_wxyz", "{}"))
		if strings.Contains(err.Error(), "wxyz") {
			leaks++
		}
	}
	require.Zero(t, leaks)
}

// TestStreamThatPrepareReadIsNotSentEmpty has a signer that reads a body that can be read only once.
func TestStreamThatPrepareReadIsNotSentEmpty(t *testing.T) {
	sent := -1
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		b, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil {
			return nil, err
		}
		sent = len(b)
		return answer(r, 200, nil, "ok"), nil
	})}
	tr.Policy.MaxRequestBuffer = 10
	tr.Prepare = func(r *http.Request) error { _, err := io.Copy(io.Discard, r.Body); return err }
	req, _ := http.NewRequest("POST", "http://h/", io.NopCloser(io.MultiReader(strings.NewReader(strings.Repeat("x", 100)))))
	resp, err := tr.RoundTrip(req)
	if err == nil {
		readAll(t, resp)
	}
	require.ErrorIs(t, err, idem.ErrInvalid, "sent %d", sent)
}

// TestAnswerWithoutABodyDoesNotHoldTheKey has a caller who does not close what is empty.
func TestAnswerWithoutABodyDoesNotHoldTheKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		url, base := rawInMemory(t, func(n int, c net.Conn, r *bufio.Reader) {
			for {
				req, err := http.ReadRequest(r)
				if err != nil {
					return
				}
				_, _ = io.Copy(io.Discard, req.Body)
				_, _ = io.WriteString(c, "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
			}
		})
		tr := &idem.Transport{Base: base, Policy: casePolicy()}
		tr.Policy.MaxAttempts = 1
		resp, err := tr.RoundTrip(newPost(t, idem.WithKey(context.Background(), "k"), url, "{}"))
		require.NoError(t, err)
		_ = resp // not closed: a bare client has nothing to close
		ctx, cancel := context.WithTimeout(idem.WithKey(context.Background(), "k"), time.Second)
		defer cancel()
		resp, err = tr.RoundTrip(newPost(t, ctx, url, "{}"))
		require.NoError(t, err)
		readAll(t, resp)
	})
}

// TestPanicInTheDoneHookFreesTheKey has a streamed answer, which holds the key.
func TestPanicInTheDoneHookFreesTheKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		var boom atomic.Bool
		boom.Store(true)
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			resp := answer(r, 200, nil, "x")
			resp.ContentLength = -1
			return resp, nil
		})}
		tr.Hooks.Done = func(context.Context, *idem.Report) {
			if boom.Swap(false) {
				panic("hook")
			}
		}
		require.Panics(t, func() { _, _ = tr.RoundTrip(newPost(t, idem.WithKey(context.Background(), "k"), "http://h/", "{}")) })
		ctx, cancel := context.WithTimeout(idem.WithKey(context.Background(), "k"), time.Second)
		defer cancel()
		resp, err := tr.RoundTrip(newPost(t, ctx, "http://h/", "{}"))
		require.NoError(t, err)
		readAll(t, resp)
	})
}

// TestPanicLetsGoOfEverything has a Classify that panics: caller's body, answer and connection must not stay open.
func TestPanicLetsGoOfEverything(t *testing.T) {
	body := &closeCounter{Reader: strings.NewReader("{}")}
	answered := &closeCounter{Reader: strings.NewReader("x")}
	var attempt context.Context
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		attempt = r.Context()
		_ = r.Body.Close()
		resp := answer(r, 503, http.Header{"Content-Type": {"text/event-stream"}}, "")
		resp.Body, resp.ContentLength = answered, -1
		return resp, nil
	})}
	tr.Policy.Classify = func(*http.Response, error) idem.Verdict { panic("classify") }
	req := newPost(t, context.Background(), "http://h/", "")
	req.Body, req.GetBody, req.ContentLength = body, nil, -1
	require.Panics(t, func() { _, _ = tr.RoundTrip(req) })
	require.Equal(t, int32(1), body.closes.Load(), "the caller's body")
	require.Equal(t, int32(1), answered.closes.Load(), "the answer")
	require.Error(t, attempt.Err(), "the attempt's context")
}

// TestAnswerBesideAnErrorMayLackItsBody has a base that breaks the contract.
func TestAnswerBesideAnErrorMayLackItsBody(t *testing.T) {
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 500}, errors.New("both")
	})}
	require.NotPanics(t, func() {
		_, err := tr.RoundTrip(newPost(t, context.Background(), "http://h/", "{}"))
		require.Error(t, err)
	})
}

// TestWriteWithoutAKeyWhoseOutcomeIsUnknownIsWarnedOf is what SlogHooks promises for each write.
func TestWriteWithoutAKeyWhoseOutcomeIsUnknownIsWarnedOf(t *testing.T) {
	var logs bytes.Buffer
	tr := &idem.Transport{Policy: casePolicy(), Dialect: idem.NoKeys, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF })}
	tr.Hooks = idem.SlogHooks(slog.New(slog.NewTextHandler(&logs, nil)))
	_, err := tr.RoundTrip(newPost(t, context.Background(), "http://h/", "{}"))
	require.Error(t, err)
	require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
	require.Contains(t, logs.String(), "level=WARN")
}

// TestContentLengthOfAnAnswerIsNotBelievedForMemory has a server that announces more than there is memory.
func TestContentLengthOfAnAnswerIsNotBelievedForMemory(t *testing.T) {
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		resp := answer(r, 200, nil, "ok")
		resp.ContentLength = math.MaxInt64 - 1
		return resp, nil
	})}
	tr.Policy.MaxResponseBuffer = math.MaxInt64
	require.NotPanics(t, func() {
		resp, err := tr.RoundTrip(newPost(t, context.Background(), "http://h/", "{}"))
		if err == nil {
			readAll(t, resp)
		}
	})
}

// TestFileThatDoesNotKnowItsSizeIsSent reads a file of procfs, whose size is 0.
func TestFileThatDoesNotKnowItsSizeIsSent(t *testing.T) {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		t.Skip("no procfs on this system")
	}
	n := 0
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			b, _ := io.ReadAll(r.Body)
			_ = r.Body.Close()
			n = len(b)
		}
		return answer(r, 200, nil, "ok"), nil
	})}
	req, _ := http.NewRequest("POST", "http://h/", f)
	resp, err := tr.RoundTrip(req)
	require.NoError(t, err)
	readAll(t, resp)
	require.Positive(t, n)
}

// TestKeyHeaderOnAMethodWithoutKeysClaimsNoRefusal has a PUT that may have been sent before with its key.
func TestKeyHeaderOnAMethodWithoutKeysClaimsNoRefusal(t *testing.T) {
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) { return answer(r, 404, nil, ""), nil })}
	req, _ := http.NewRequest("PUT", "http://h/", strings.NewReader("x"))
	req.Header.Set("Idempotency-Key", "used-before")
	resp, err := tr.RoundTrip(req)
	require.NoError(t, err)
	require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
}

// TestDiscardedAnswerIsClosedWhereTheContextDoesNotEndIt has a body that only Close ends.
func TestDiscardedAnswerIsClosedWhereTheContextDoesNotEndIt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		n := 0
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			if n++; n > 1 {
				return answer(r, 200, nil, "ok"), nil
			}
			resp := answer(r, 503, nil, "")
			pr, _ := io.Pipe()
			resp.Body, resp.ContentLength = pr, -1
			return resp, nil
		})}
		start := time.Now()
		resp, err := tr.RoundTrip(newPost(t, context.Background(), "http://h/", "{}"))
		require.NoError(t, err)
		readAll(t, resp)
		require.LessOrEqual(t, time.Since(start), 250*time.Millisecond+80*time.Millisecond, "the drain and a backoff")
	})
}

// TestReportsOfNestedContextsAreBothWritten has a middleware with a report of its own.
func TestReportsOfNestedContextsAreBothWritten(t *testing.T) {
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) { return answer(r, 200, nil, ""), nil })}
	var a, b idem.Report
	ctx := idem.WithReport(idem.WithReport(context.Background(), &a), &b)
	resp, err := tr.RoundTrip(newPost(t, ctx, "http://h/", "{}"))
	require.NoError(t, err)
	readAll(t, resp)
	require.Equal(t, idem.Executed, b.Outcome)
	require.Equal(t, idem.Executed, a.Outcome)
}

type readsNothing struct{}

func (readsNothing) Read([]byte) (int, error) { return 0, nil }

// TestAnswerThatReadsNothingEndsWithTheCallersContext has a body that breaks the advice of io.Reader.
func TestAnswerThatReadsNothingEndsWithTheCallersContext(t *testing.T) {
	virtual(t, func(t *testing.T) {
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			resp := answer(r, 200, http.Header{"Content-Type": {"application/json"}}, "")
			resp.Body, resp.ContentLength = io.NopCloser(readsNothing{}), -1
			return resp, nil
		})}
		tr.Policy.MaxElapsed = 5 * time.Second
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := tr.RoundTrip(newPost(t, ctx, "http://h/", "{}"))
		require.Error(t, err)
		require.LessOrEqual(t, time.Since(start), 100*time.Millisecond)
	})
}

// TestReportIsNotThatOfARequestOfTheDoneHook has a hook that sends an audit event under the context that it gets.
func TestReportIsNotThatOfARequestOfTheDoneHook(t *testing.T) {
	audit := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		return answer(r, 200, nil, ""), nil
	})}
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
		return nil, io.ErrUnexpectedEOF
	})}
	tr.Hooks.Done = func(ctx context.Context, _ *idem.Report) {
		resp, err := audit.RoundTrip(newPost(t, ctx, "http://audit/", "done"))
		require.NoError(t, err)
		readAll(t, resp)
	}
	var report idem.Report
	_, err := tr.RoundTrip(newPost(t, idem.WithReport(context.Background(), &report), "http://pay/", "{}"))
	require.Error(t, err)
	require.Equal(t, idem.Unknown, report.Outcome)
}

// TestLocationThatCannotBeReadIsNotInTheText has a 303 with user info, a query, and a bad port.
func TestLocationThatCannotBeReadIsNotInTheText(t *testing.T) {
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		return answer(r, 303, http.Header{"Location": {"http://bob:hunter2@h:bad/?token=hunter3"}}, ""), nil
	})}
	_, err := idem.NewClient(tr).Do(newPost(t, context.Background(), "http://h/", "{}"))
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter")
}

// TestDumpedErrorHoldsNoCredential prints the Error as debuggers and test libraries do.
func TestDumpedErrorHoldsNoCredential(t *testing.T) {
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
		return nil, http.ErrHandlerTimeout
	})}
	tr.Policy.MaxAttempts = 1
	req := newPost(t, context.Background(), "http://h/", "{}")
	req.Header.Set("Authorization", "Bearer hunter4")
	_, err := idem.NewClient(tr).Do(req)
	require.Error(t, err)
	require.NotContains(t, fmt.Sprintf("%#v", err), "hunter")
}

// TestRedirectToNowhereKeepsTheReport has a Location without a host, after the effect and before it.
func TestRedirectToNowhereKeepsTheReport(t *testing.T) {
	for _, location := range []string{"mailto:ops@example.com", "http:///v1/payments"} {
		for _, fault := range []fakeserver.Fault{
			{Kind: fakeserver.Redirect, Point: fakeserver.AfterEffect, Status: http.StatusSeeOther, Location: location},
			{Kind: fakeserver.Redirect, Status: http.StatusTemporaryRedirect, Location: location},
		} {
			t.Run(fault.String(), func(t *testing.T) {
				s := onLoopback(t)
				require.NoError(t, s.Script("", fault))
				var report idem.Report
				_, err := idem.NewClient(over(s)).Do(newPayment(t, idem.WithReport(context.Background(), &report), s, "r"))
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, keysSent(s.Sends())[0], e.Key, "%v", err)
				require.Equal(t, e.Key, report.Key)
				require.Len(t, e.Attempts, 1)
				want := idem.Unknown
				if len(s.Effects()) == 1 {
					want = idem.Executed
				}
				require.Equal(t, want, e.Outcome)
			})
		}
	}
}

// TestTunnelRefusedToAHiddenSendProvesNothing has a first send executed on an idle tunnel that then dies; net/http
// repeats it within the attempt, and the proxy refuses the new tunnel.
func TestTunnelRefusedToAHiddenSendProvesNothing(t *testing.T) {
	virtual(t, func(t *testing.T) {
		var effects atomic.Int32
		origin := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				return
			}
			effects.Add(1)
			panic(http.ErrAbortHandler)
		}))
		l := newMemListener()
		require.NoError(t, origin.Listener.Close())
		origin.Listener = l
		origin.StartTLS()
		t.Cleanup(origin.Close)
		proxy, toProxy := rawInMemory(t, func(n int, c net.Conn, r *bufio.Reader) {
			_, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			if n > 1 {
				_, _ = io.WriteString(c, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
				return
			}
			to, err := l.dial(t.Context(), "", "")
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
			go func() { _, _ = io.Copy(to, r); _ = to.Close() }()
			_, _ = io.Copy(c, to)
		})
		proxyURL, err := url.Parse(proxy)
		require.NoError(t, err)
		base := origin.Client().Transport.(*http.Transport).Clone()
		t.Cleanup(base.CloseIdleConnections)
		base.DialContext = toProxy.DialContext
		base.ForceAttemptHTTP2, base.TLSClientConfig.NextProtos = false, nil
		base.Proxy = http.ProxyURL(proxyURL)
		base.OnProxyConnectResponse = idem.ProxyHook
		tr := &idem.Transport{Base: base, Policy: casePolicy()}
		client := &http.Client{Transport: tr}
		warm, err := client.Get(origin.URL)
		require.NoError(t, err)
		readAll(t, warm)
		var report idem.Report
		req, err := http.NewRequestWithContext(idem.WithReport(context.Background(), &report), http.MethodPost, origin.URL+"/capture", nil)
		require.NoError(t, err)
		_, err = tr.RoundTrip(req)
		require.Error(t, err)
		require.Equal(t, int32(1), effects.Load())
		require.Equal(t, idem.Unknown, report.Outcome, "%v", err)
	})
}

// TestRedirectThatDropsTheBodyOfAGetIsFollowed has a GET with a body, which http.Client does not send again.
func TestRedirectThatDropsTheBodyOfAGetIsFollowed(t *testing.T) {
	for _, status := range []int{301, 302, 303} {
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			if r.URL.Path == "/from" {
				return answer(r, status, http.Header{"Location": {"/to"}}, ""), nil
			}
			return answer(r, 200, nil, "ok"), nil
		})}
		req, err := http.NewRequest(http.MethodGet, "http://h/from", strings.NewReader("{}"))
		require.NoError(t, err)
		resp, err := (&http.Client{Transport: tr}).Do(req)
		require.NoError(t, err, "%d", status)
		require.Equal(t, "ok", readAll(t, resp))
	}
}

// TestOperationStartedInAnotherAgeIsExpired has what databases make of an empty date in a local zone.
func TestOperationStartedInAnotherAgeIsExpired(t *testing.T) {
	for _, started := range []time.Time{
		time.Date(1, 1, 1, 0, 0, 0, 0, time.FixedZone("", -3600)),
		time.Date(1600, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Unix(0, 0),
	} {
		sends := 0
		tr := &idem.Transport{Policy: casePolicy(), Dialect: idem.Stripe, Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			sends++
			return answer(r, 200, nil, "{}"), nil
		})}
		ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "refund", ID: "1", Started: started})
		_, err := tr.RoundTrip(newPost(t, ctx, "http://h/", "{}"))
		require.ErrorIs(t, err, idem.ErrKeyExpired, "%v", started)
		require.Zero(t, sends)
	}
}

func TestInnermostWordOnKeysCounts(t *testing.T) {
	s := onLoopback(t)
	s.Apply(fakeserver.Settings{Optional: true})
	op := idem.Operation{Name: "payment", ID: "order-1/1"}
	for _, c := range []struct {
		ctx  context.Context
		from string
	}{
		{idem.WithOperation(idem.WithoutKey(context.Background()), op), "operation"},
		{idem.WithKey(idem.WithoutKey(context.Background()), "test-key-1"), "context"},
		{idem.WithoutKey(idem.WithOperation(context.Background(), op)), ""},
	} {
		resp, err := over(s).RoundTrip(newPayment(t, c.ctx, s, "order-1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, c.from, idem.ReportOf(resp).KeyFrom)
	}
}

// TestBodyIsComparedWithWhatWasReadNotWithARefusedAttempt has a refused connection, which reads nothing of the body,
// then a lost attempt, then a GetBody that gives another amount.
func TestBodyIsComparedWithWhatWasReadNotWithARefusedAttempt(t *testing.T) {
	for _, key := range []string{"", "k"} {
		var sent []string
		calls := 0
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			defer func() { _ = r.Body.Close() }()
			if calls++; calls == 1 {
				return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
			}
			b, err := io.ReadAll(r.Body)
			if err != nil {
				return nil, err
			}
			sent = append(sent, string(b))
			if calls == 2 {
				return nil, io.ErrUnexpectedEOF
			}
			return answer(r, 201, nil, "{}"), nil
		})}
		ctx := context.Background()
		if key != "" {
			ctx = idem.WithKey(ctx, key)
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://h/", io.NopCloser(io.MultiReader(strings.NewReader("amount=1999"))))
		require.NoError(t, err)
		req.GetBody = func() (io.ReadCloser, error) {
			amount := 1999
			if len(sent) > 0 {
				amount = 2999
			}
			return io.NopCloser(strings.NewReader(fmt.Sprintf("amount=%d", amount))), nil
		}
		resp, err := tr.RoundTrip(req)
		if err == nil {
			readAll(t, resp)
		}
		require.Equal(t, []string{"amount=1999"}, sent)
		require.ErrorIs(t, err, idem.ErrBodyChanged)
	}
}

// TestTextSaysNothingSentOnlyWhereNothingWas has an operation that ends with ErrInvalid after its first send: a 303 to
// nowhere after the effect, and a Prepare that changes the key of the second attempt.
func TestTextSaysNothingSentOnlyWhereNothingWas(t *testing.T) {
	s := onLoopback(t)
	require.NoError(t, s.Script("", fakeserver.Fault{
		Kind: fakeserver.Redirect, Point: fakeserver.AfterEffect, Status: http.StatusSeeOther, Location: "http:///v1/payments",
	}))
	_, err := idem.NewClient(over(s)).Do(newPayment(t, context.Background(), s, "r"))
	require.ErrorIs(t, err, idem.ErrInvalid)
	require.Len(t, s.Effects(), 1)
	require.Equal(t, idem.Executed, idem.OutcomeOf(nil, err))
	require.NotContains(t, err.Error(), "sent nothing")
	require.NotContains(t, err.Error(), "call again")

	s = onLoopback(t)
	require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
	prepared := 0
	tr := over(s, func(tr *idem.Transport) {
		tr.Prepare = func(r *http.Request) error {
			if prepared++; prepared == 2 {
				r.Header.Set("Idempotency-Key", "another")
			}
			return nil
		}
	})
	_, err = tr.RoundTrip(newPayment(t, context.Background(), s, "r"))
	require.ErrorIs(t, err, idem.ErrInvalid)
	require.Len(t, s.Effects(), 1)
	require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
	require.NotContains(t, err.Error(), "sent nothing")
}

// TestKeyWindowCountsFromTheSendThatCameBeforeStarted has a row whose database clock is 59 s ahead: the server reckons
// from the send, and has forgotten the key ten seconds after its 24 h.
func TestKeyWindowCountsFromTheSendThatCameBeforeStarted(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		tr := over(s, func(tr *idem.Transport) { tr.Dialect, tr.Policy.MaxAttempts = idem.Stripe, 1 })
		op := idem.Operation{Name: "payment", ID: "order-1/1", Started: time.Now().Add(59 * time.Second)}
		ctx := idem.WithOperation(context.Background(), op)
		_, err := tr.RoundTrip(newPayment(t, ctx, s, "r"))
		require.Error(t, err)
		time.Sleep(24*time.Hour + 10*time.Second)
		resp, err := tr.RoundTrip(newPayment(t, ctx, s, "r"))
		if err == nil {
			readAll(t, resp)
		}
		require.Len(t, s.Effects(), 1)
		require.ErrorIs(t, err, idem.ErrKeyExpired)
	})
}

// TestRedirectWhoseBodyNeverEndsDoesNotHoldTheCall has a 307 that freezes in a chunked page, of which http.Client reads
// 2 KiB before it follows.
func TestRedirectWhoseBodyNeverEndsDoesNotHoldTheCall(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, method := range []string{http.MethodPost, http.MethodGet} {
			freed := make(chan struct{})
			url, base := rawInMemory(t, func(_ int, c net.Conn, r *bufio.Reader) {
				req, err := http.ReadRequest(r)
				if err != nil {
					return
				}
				_, _ = io.Copy(io.Discard, req.Body)
				_, _ = io.WriteString(c, "HTTP/1.1 307 Temporary Redirect\r\nLocation: /to\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n<html\r\n")
				<-freed
			})
			tr := &idem.Transport{Base: base, Policy: casePolicy()}
			tr.Policy.AttemptTimeout, tr.Policy.MaxElapsed = 100*time.Millisecond, 500*time.Millisecond
			req, err := http.NewRequest(method, url+"/from", strings.NewReader("{}"))
			require.NoError(t, err)
			done := make(chan error, 1)
			go func() {
				resp, err := idem.NewClient(tr).Do(req)
				if err == nil {
					_ = resp.Body.Close()
				}
				done <- err
			}()
			select {
			case err := <-done:
				require.Error(t, err)
			case <-time.After(4 * time.Second):
				t.Errorf("%s hangs past AttemptTimeout and MaxElapsed", method)
			}
			close(freed)
		}
	})
}

// TestDeadlineEndsTheComparisonOfABody has a GetBody whose reader comes from elsewhere and stalls: it is read for the
// fingerprint of a named key, and to compare the second attempt's body.
func TestDeadlineEndsTheComparisonOfABody(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, key := range []string{"", "k"} {
			pr, pw := io.Pipe()
			tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
				_, err := io.ReadAll(r.Body)
				_ = r.Body.Close()
				if err != nil {
					return nil, err
				}
				return nil, io.ErrUnexpectedEOF
			})}
			ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
			if key != "" {
				ctx = idem.WithKey(ctx, key)
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://h/", io.NopCloser(io.MultiReader(strings.NewReader("amount=1999"))))
			require.NoError(t, err)
			req.GetBody = func() (io.ReadCloser, error) { return pr, nil }
			done := make(chan error, 1)
			go func() {
				_, err := tr.RoundTrip(req)
				done <- err
			}()
			select {
			case err := <-done:
				require.ErrorIs(t, err, context.DeadlineExceeded)
			case <-time.After(2 * time.Second):
				t.Errorf("%q: hangs past the caller's deadline", key)
				_ = pw.Close()
				<-done
			}
			cancel()
		}
	})
}

// TestGetBodyThatGivesNothingEndsTheOperation has a GetBody that returns neither a reader nor an error.
func TestGetBodyThatGivesNothingEndsTheOperation(t *testing.T) {
	for _, key := range []string{"", "k"} {
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			_ = r.Body.Close()
			return nil, io.ErrUnexpectedEOF
		})}
		ctx := context.Background()
		if key != "" {
			ctx = idem.WithKey(ctx, key)
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://h/", io.NopCloser(io.MultiReader(strings.NewReader("{}"))))
		require.NoError(t, err)
		req.GetBody = func() (io.ReadCloser, error) { return nil, nil }
		require.NotPanics(t, func() { _, err = tr.RoundTrip(req) })
		require.Error(t, err)
	}
}

// TestFileThatIsRewrittenIsNotSentAgainThroughDo has a file beyond the buffer limit, rewritten in place at the same
// length between two attempts.
func TestFileThatIsRewrittenIsNotSentAgainThroughDo(t *testing.T) {
	const size = 2 << 20
	name := filepath.Join(t.TempDir(), "upload")
	require.NoError(t, os.WriteFile(name, []byte(strings.Repeat("a", size)), 0o600))
	f, err := os.Open(name)
	require.NoError(t, err)
	var sent []byte
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		b, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil {
			return nil, err
		}
		if sent = append(sent, b[0]); len(sent) > 1 {
			return answer(r, 201, nil, "{}"), nil
		}
		time.Sleep(20 * time.Millisecond) // so that the times of the file differ
		w, err := os.OpenFile(name, os.O_WRONLY, 0)
		require.NoError(t, err)
		_, err = w.WriteString(strings.Repeat("b", size))
		require.NoError(t, err)
		require.NoError(t, w.Close())
		return nil, io.ErrUnexpectedEOF
	})}
	req, err := http.NewRequest(http.MethodPost, "http://h/", f)
	require.NoError(t, err)
	resp, err := idem.NewClient(tr).Do(req)
	if err == nil {
		readAll(t, resp)
	}
	require.Equal(t, "a", string(sent))
	require.ErrorIs(t, err, idem.ErrBodyChanged)
}

// TestSecretThatTheTextEscapesIsRedacted has secrets that %q, with which net/http and many a base quote, does not leave as they
// are: a Location that http.Client cannot read, and an Authorization with parameters.
func TestSecretThatTheTextEscapesIsRedacted(t *testing.T) {
	for _, location := range []string{`http://bob:hunter2@h:bad/?token="hunter3"`, `http://bob:hunter2@h:bad/\?token=hunter3`} {
		tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
			return answer(r, http.StatusSeeOther, http.Header{"Location": {location}}, ""), nil
		})}
		_, err := idem.NewClient(tr).Do(newPost(t, context.Background(), "http://h/", "{}"))
		require.Error(t, err)
		require.NotContains(t, err.Error(), "hunter")
	}
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
		return nil, fmt.Errorf("gateway refused %q", r.Header["Authorization"])
	})}
	tr.Policy.MaxAttempts = 1
	req := newPost(t, context.Background(), "http://h/", "{}")
	req.Header.Set("Authorization", `Token token="hunter4"`)
	_, err := tr.RoundTrip(req)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter")
}

// TestPanicThroughDoClosesTheFile has a base that panics under a caller that recovers, as http.Server does.
func TestPanicThroughDoClosesTheFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "upload")
	require.NoError(t, os.WriteFile(name, []byte("{}"), 0o600))
	f, err := os.Open(name)
	require.NoError(t, err)
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(*http.Request) (*http.Response, error) { panic("base") })}
	req, err := http.NewRequest(http.MethodPost, "http://h/", f)
	require.NoError(t, err)
	require.Panics(t, func() { _, _ = idem.NewClient(tr).Do(req) })
	_, err = f.Stat()
	require.ErrorIs(t, err, os.ErrClosed)
}

// TestUnkeyedCallKnowsOfTheOneThatStillRuns has two calls under one context without keys: the first has charged and waits for
// its answer when the second meets a refused connection.
func TestUnkeyedCallKnowsOfTheOneThatStillRuns(t *testing.T) {
	s := onLoopback(t)
	s.Apply(fakeserver.Settings{Optional: true})
	charged, answered := make(chan struct{}), make(chan struct{})
	tr := over(s, func(tr *idem.Transport) { tr.Dialect = idem.NoKeys })
	base := tr.Base
	first := true // the calls' sends do not overlap
	tr.Base = roundTripFunc(func(r *http.Request) (*http.Response, error) {
		if !first {
			return base.RoundTrip(r)
		}
		first = false
		resp, err := base.RoundTrip(r)
		close(charged)
		<-answered
		return resp, err
	})
	ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "payment", ID: "order-1/1"})
	done := make(chan error, 1)
	go func() {
		resp, err := tr.RoundTrip(newPayment(t, ctx, s, "order-1"))
		if err == nil {
			_ = resp.Body.Close()
		}
		done <- err
	}()
	<-charged
	s.Refuse(100)
	_, err := tr.RoundTrip(newPayment(t, ctx, s, "order-1"))
	close(answered)
	require.NoError(t, <-done)
	require.Len(t, s.Effects(), 1)
	require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err), "%v", err)
}

func TestZeroClientIsReady(t *testing.T) {
	s := onLoopback(t)
	var c idem.Client
	resp, err := c.Do(newPayment(t, context.Background(), s, "order-1"))
	require.NoError(t, err)
	readAll(t, resp)
	require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
	resp, err = c.StandardClient().Do(newPayment(t, context.Background(), s, "order-2"))
	require.NoError(t, err)
	readAll(t, resp)
	require.NotEmpty(t, idem.ReportOf(resp).Key)
}
