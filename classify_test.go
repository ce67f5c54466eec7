package idem_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// dialing is a real base whose every dial fails with err.
func dialing(err error) (*http.Transport, *atomic.Int32) {
	dials := new(atomic.Int32)
	return &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		dials.Add(1)
		return nil, err
	}}, dials
}

// noSuchName is what a resolver says of a name that does not exist.
func noSuchName() *net.DNSError {
	return &net.DNSError{Err: "no such host", Name: "api.test", IsNotFound: true}
}

func quietTLSServer(t *testing.T) (*httptest.Server, *atomic.Int32) {
	t.Helper()
	served := new(atomic.Int32)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s, served
}

func TestC63_PermanentErrorsAreNotRetried(t *testing.T) {
	type permanent struct {
		name  string
		start func(*testing.T) (base http.RoundTripper, url string)
		edit  func(*http.Request)
		cause func(*testing.T, error)
	}
	for _, c := range []permanent{
		{
			name: "certificate of an unknown authority",
			start: func(t *testing.T) (http.RoundTripper, string) {
				s, _ := quietTLSServer(t)
				return newBase(t), s.URL
			},
			cause: func(t *testing.T, err error) {
				var unknown x509.UnknownAuthorityError
				require.ErrorAs(t, err, &unknown)
				var failed *tls.CertificateVerificationError
				require.ErrorAs(t, err, &failed)
			},
		},
		{
			name: "certificate of another host",
			start: func(t *testing.T) (http.RoundTripper, string) {
				s, _ := quietTLSServer(t)
				base := newBase(t)
				base.TLSClientConfig = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
				base.TLSClientConfig.ServerName = "elsewhere.test"
				return base, s.URL
			},
			cause: func(t *testing.T, err error) {
				var host x509.HostnameError
				require.ErrorAs(t, err, &host)
			},
		},
		{
			name:  "scheme",
			start: func(t *testing.T) (http.RoundTripper, string) { return newBase(t), "foo://api.test/" },
			cause: func(t *testing.T, err error) { require.ErrorContains(t, err, "foo") },
		},
		{
			name:  "header value with a newline",
			start: func(t *testing.T) (http.RoundTripper, string) { return newBase(t), wireURL },
			edit:  func(req *http.Request) { req.Header.Set("X-Note", "a\nb") },
			cause: func(t *testing.T, err error) { require.ErrorContains(t, err, "X-Note") },
		},
		{
			name:  "header name with a space",
			start: func(t *testing.T) (http.RoundTripper, string) { return newBase(t), wireURL },
			edit:  func(req *http.Request) { req.Header["X Note"] = []string{"a"} },
			cause: func(t *testing.T, err error) { require.ErrorContains(t, err, "X Note") },
		},
		{
			name: "name that does not exist",
			start: func(*testing.T) (http.RoundTripper, string) {
				base, _ := dialing(noSuchName())
				return base, wireURL
			},
			cause: func(t *testing.T, err error) {
				var dns *net.DNSError
				require.ErrorAs(t, err, &dns)
				require.True(t, dns.IsNotFound)
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			base, url := c.start(t)
			tr := onWire(base, func(tr *idem.Transport) {
				tr.Policy.BackoffBase, tr.Policy.BackoffCap = time.Minute, time.Minute // a wait would be noticed
			})
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			req := newPost(t, ctx, url, `{}`)
			if c.edit != nil {
				c.edit(req)
			}
			resp, err := tr.RoundTrip(req)
			require.Nil(t, resp)
			c.cause(t, err)
			var e *idem.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, idem.NotExecuted, e.Outcome)
			require.Len(t, e.Attempts, 1)
			require.Zero(t, e.Attempts[0].Wait)
			require.Zero(t, e.Sends)
			require.NoError(t, e.Reason, "the error is final by itself")
		})
	}
}

func TestC63_RedirectLoopIsNotRetried(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
				return answer(req, 307, http.Header{"Location": {"/v1/payments"}}, ""), nil
			}}
			start := time.Now()
			req, err := http.NewRequestWithContext(t.Context(), method, wireURL, strings.NewReader("{}"))
			require.NoError(t, err)
			resp, err := (&http.Client{Transport: onWire(w)}).Do(req)
			require.Error(t, err)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), 10, "the hops of http.Client")
			require.Zero(t, time.Since(start))
			if method == http.MethodPost {
				oneKey(t, w.seen())
			}
		}
	})
}

func TestC63_FinalAnswersAreNotRetried(t *testing.T) {
	for _, status := range []int{400, 401, 402, 403, 404, 405, 406, 409, 410, 411, 413, 414, 415, 422, 428, 431, 451, 501, 505, 507, 511} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: status}))
				start := time.Now()
				resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
				require.NoError(t, err)
				require.Empty(t, s.Effects())
				require.Len(t, s.Sends(), 1)
				require.Zero(t, time.Since(start))
				require.Equal(t, status, resp.StatusCode)
				require.Contains(t, readAll(t, resp), "injected-fault")
				report := idem.ReportOf(resp)
				require.NoError(t, report.Reason)
				if status/100 == 4 && status != 409 {
					require.Equal(t, idem.Refused, report.Outcome)
				} else {
					require.Equal(t, idem.Unknown, report.Outcome)
				}
			})
		})
	}
}

func TestC63_TemporaryNameErrorIsRetried(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, dns := range []*net.DNSError{
			{Err: "server misbehaving", Name: "api.test", IsTemporary: true},
			{Err: "no such host", Name: "api.test", IsNotFound: true, IsTemporary: true},
			{Err: "i/o timeout", Name: "api.test", IsTimeout: true},
		} {
			base, dials := dialing(dns)
			_, err := onWire(base).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.EqualValues(t, 4, dials.Load())
			require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
			require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
			var got *net.DNSError
			require.ErrorAs(t, err, &got)
		}
	})
}

func TestC64_WriteWithoutAKeyIsSentOnce(t *testing.T) {
	off := map[string]func(*idem.Transport, *http.Request) *http.Request{
		"by the dialect": func(tr *idem.Transport, req *http.Request) *http.Request { tr.Dialect = idem.NoKeys; return req },
		"by the context": func(_ *idem.Transport, req *http.Request) *http.Request {
			return req.WithContext(idem.WithoutKey(req.Context()))
		},
	}
	for name, set := range off {
		for _, fault := range []fakeserver.Fault{
			{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect},
			{Kind: fakeserver.Reset, Point: fakeserver.BeforeEffect},
			{Kind: fakeserver.Close, Point: fakeserver.AfterEffect},
			{Kind: fakeserver.CutBody},
			{Kind: fakeserver.Status, Status: 503},
			{Kind: fakeserver.Status, Status: 408},
			{Kind: fakeserver.Status, Status: 429, RetryAfter: "1"},
		} {
			t.Run(name+", "+fault.String(), func(t *testing.T) {
				s := onLoopback(t)
				s.Apply(fakeserver.Settings{Optional: true})
				require.NoError(t, s.Inject(fault))
				tr := over(s)
				req := set(tr, newPayment(t, t.Context(), s, "order-1"))
				resp, err := tr.RoundTrip(req)
				require.Len(t, s.Sends(), 1)
				require.LessOrEqual(t, len(s.Effects()), 1)
				require.Empty(t, s.Sends()[0].Keys)
				switch fault.Kind {
				case fakeserver.CutBody: // handed over as it comes
					require.NoError(t, err)
					_, err = io.ReadAll(resp.Body)
					require.ErrorIs(t, err, io.ErrUnexpectedEOF)
					require.NoError(t, resp.Body.Close())
					require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
				case fakeserver.Status:
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
					require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
				default:
					require.Error(t, err)
					require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
				}
			})
		}
	}
}

func TestC64_WriteWithoutAKeyIsRetriedAfterADialError(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{Optional: true})
		s.Refuse(2)
		tr := over(s, func(tr *idem.Transport) { tr.Dialect = idem.NoKeys })
		resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.NoError(t, resp.Body.Close())
		report := idem.ReportOf(resp)
		require.Len(t, report.Attempts, 3)
		require.Equal(t, idem.NotExecuted, report.Attempts[0].Outcome)
		require.Equal(t, idem.Executed, report.Outcome)
	})
}

func TestC64_MethodsThatMayBeRepeatedAreRetriedWithoutAKey(t *testing.T) {
	for _, c := range []struct {
		method  string
		retried bool
	}{
		{http.MethodGet, true}, {http.MethodHead, true}, {http.MethodOptions, true}, {http.MethodTrace, true},
		{http.MethodPut, true}, {http.MethodDelete, true},
		{http.MethodPost, false}, {http.MethodPatch, false}, {"LOCK", false},
	} {
		for _, after := range []string{"lost answer", "503"} {
			t.Run(c.method+" after "+after, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
						switch {
						case n > 1:
							return answer(req, 200, nil, ""), nil
						case after == "503":
							return answer(req, 503, nil, ""), nil
						}
						return nil, io.ErrUnexpectedEOF
					}}
					req, err := http.NewRequestWithContext(idem.WithoutKey(t.Context()), c.method, wireURL, nil)
					require.NoError(t, err)
					resp, err := onWire(w).RoundTrip(req)
					if c.retried {
						require.Len(t, w.seen(), 2)
						require.Equal(t, 200, resp.StatusCode)
					} else {
						require.Len(t, w.seen(), 1)
						require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, err))
					}
					for _, s := range w.seen() {
						require.Empty(t, s.keys)
					}
				})
			})
		}
	}
}

func TestClassificationOfLostAnswers(t *testing.T) {
	for _, c := range []struct {
		name    string
		fault   fakeserver.Fault
		effects int // after the first send
	}{
		{"reset before the effect", fakeserver.Fault{Kind: fakeserver.Reset}, 0},
		{"reset after the effect", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}, 1},
		{"EOF", fakeserver.Fault{Kind: fakeserver.Close, Point: fakeserver.AfterEffect}, 1},
		{"timeout before the effect", fakeserver.Fault{Kind: fakeserver.Hang}, 0},
		{"timeout after the effect", fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}, 1},
		{"protocol error", fakeserver.Fault{Kind: fakeserver.Garbage}, 1},
		{"headers cut", fakeserver.Fault{Kind: fakeserver.CutHeaders}, 1},
		{"body cut", fakeserver.Fault{Kind: fakeserver.CutBody}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", c.fault))
				tr := over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 250 * time.Millisecond })
				resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
				require.NoError(t, err)
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 2)
				require.Len(t, keysSent(s.Sends()), 1)
				require.Equal(t, c.effects == 1, s.Sends()[1].Replayed)
				require.Contains(t, readAll(t, resp), "order-1")
				report := idem.ReportOf(resp)
				require.Equal(t, idem.Unknown, report.Attempts[0].Outcome)
				require.Error(t, report.Attempts[0].Err)
				require.Equal(t, idem.Executed, report.Outcome)
			})
		})
	}
}

func TestClassificationOfConnectionsThatWereNeverMade(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Refuse(3)
		resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.NoError(t, resp.Body.Close())
		report := idem.ReportOf(resp)
		require.Len(t, report.Attempts, 4)
		require.Equal(t, 1, report.Sends)
		for _, a := range report.Attempts[:3] {
			require.Equal(t, idem.NotExecuted, a.Outcome)
		}
	})
	t.Run("all refused", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			s.Refuse(100)
			_, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.Empty(t, s.Sends())
			require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
			require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
		})
	})
	t.Run("TLS stalls", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemoryTLS(t)
			require.NoError(t, s.ScriptConns(fakeserver.AcceptSilence))
			tr := over(s)
			tr.Base.(*http.Transport).TLSHandshakeTimeout = 300 * time.Millisecond
			start := time.Now()
			resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.GreaterOrEqual(t, time.Since(start), 300*time.Millisecond)
			require.Len(t, s.Effects(), 1)
			require.Len(t, s.Sends(), 1)
			report := idem.ReportOf(resp)
			require.Len(t, report.Attempts, 2)
			require.Equal(t, idem.NotExecuted, report.Attempts[0].Outcome)
		})
	})
	t.Run("CONNECT 503", func(t *testing.T) {
		s, served := quietTLSServer(t)
		var connects atomic.Int32
		proxy := rawServer(t, func(_ int, c net.Conn, r *bufio.Reader) {
			req, err := http.ReadRequest(r)
			if err != nil || req.Method != http.MethodConnect {
				return
			}
			if connects.Add(1) < 3 {
				_, _ = io.WriteString(c, "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
				return
			}
			target, err := net.Dial("tcp", req.Host)
			if err != nil {
				return
			}
			defer func() { _ = target.Close() }()
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
			go func() {
				_, _ = io.Copy(target, r)
				_ = target.Close()
			}()
			_, _ = io.Copy(c, target)
		})
		base := newBase(t)
		base.TLSClientConfig = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
		through, err := url.Parse(proxy)
		require.NoError(t, err)
		base.Proxy = http.ProxyURL(through)
		resp, err := onWire(base).RoundTrip(newPost(t, t.Context(), s.URL, `{}`))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.EqualValues(t, 1, served.Load())
		require.EqualValues(t, 3, connects.Load())
		require.Equal(t, idem.NotExecuted, idem.ReportOf(resp).Attempts[0].Outcome)
		base.CloseIdleConnections()
	})
	// CONNECT 407 and 403 stand with the tests of the CONNECT hook.
}

// failsAfter gives some bytes and then the reader's own error.
type failsAfter struct {
	io.Reader
	err error
}

func (f failsAfter) Read(p []byte) (int, error) {
	n, err := f.Reader.Read(p)
	if err == io.EOF {
		err = f.err
	}
	return n, err
}

func TestClassificationOfTheBodyReadersOwnError(t *testing.T) {
	broken := errors.New("the disk is gone")
	request := func(t *testing.T, s *fakeserver.Server) *http.Request {
		req := newPayment(t, t.Context(), s, "order-1")
		req.Body, req.GetBody = io.NopCloser(failsAfter{strings.NewReader("0123456789"), broken}), nil
		req.ContentLength = 100
		return req
	}
	t.Run("while it is buffered", func(t *testing.T) {
		s := onLoopback(t)
		_, err := over(s).RoundTrip(request(t, s))
		require.Empty(t, s.Sends())
		require.ErrorIs(t, err, broken)
		require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
	})
	t.Run("while it is streamed", func(t *testing.T) {
		s := onLoopback(t)
		_, err := over(s, func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer = -1 }).RoundTrip(request(t, s))
		require.Empty(t, s.Effects())
		require.LessOrEqual(t, len(s.Sends()), 1)
		require.ErrorIs(t, err, broken)
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.Len(t, e.Attempts, 1)
		require.Equal(t, idem.Unknown, e.Outcome)
	})
	t.Run("where it could be read again", func(t *testing.T) {
		s := onLoopback(t)
		req := request(t, s)
		req.GetBody = func() (io.ReadCloser, error) {
			return io.NopCloser(failsAfter{strings.NewReader("0123456789"), broken}), nil
		}
		_, err := over(s).RoundTrip(req)
		require.Empty(t, s.Effects())
		require.LessOrEqual(t, len(s.Sends()), 1)
		require.ErrorIs(t, err, broken)
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.Len(t, e.Attempts, 1)
	})
}

func TestTextOfTheServerNeverMakesAnErrorPermanent(t *testing.T) {
	for _, text := range []string{
		"stopped after 10 redirects", `unsupported protocol scheme "x"`, "net/http: invalid header field value", "x509: certificate is not trusted",
	} {
		t.Run(text, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
					if n == 1 {
						return nil, errors.New("malformed HTTP response: " + text)
					}
					return answer(req, 201, nil, ""), nil
				}}
				resp, err := onWire(w).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				require.Len(t, w.seen(), 2)
			})
		})
	}
	t.Run("nor does the URL", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			base, dials := dialing(errors.New("network is unreachable"))
			_, err := onWire(base).RoundTrip(newPost(t, t.Context(), wireURL+"/unsupported%20protocol%20scheme?invalid%20header", `{}`))
			require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
			require.EqualValues(t, 4, dials.Load())
		})
	})
}

func TestEvidenceOfABaseThatDoesNotTraceIsUnknown(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for name, lost := range map[string]error{"refused": noSuchName(), "scheme": errors.New(`unsupported protocol scheme "x"`)} {
			base := roundTripFunc(func(req *http.Request) (*http.Response, error) {
				_ = req.Body.Close()
				return nil, lost
			})
			_, err := onWire(base).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.ErrorIs(t, err, lost, name)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err), name)
		}
	})
}

func TestClassificationOfRetriedStatuses(t *testing.T) {
	for _, status := range []int{408, 421, 425, 429, 500, 502, 503, 504} {
		for _, point := range []fakeserver.Point{fakeserver.BeforeEffect, fakeserver.AfterEffect} {
			first := idem.Unknown
			if status == http.StatusMisdirectedRequest {
				if point == fakeserver.AfterEffect {
					continue // a server that has done the work does not send it elsewhere
				}
				first = idem.Refused
			}
			t.Run(strconv.Itoa(status)+" "+string(point), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: status, Point: point}))
					resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
					require.NoError(t, err)
					require.Len(t, s.Effects(), 1)
					require.Len(t, s.Sends(), 2)
					require.Len(t, keysSent(s.Sends()), 1)
					require.Contains(t, readAll(t, resp), "order-1")
					report := idem.ReportOf(resp)
					require.Equal(t, first, report.Attempts[0].Outcome)
					require.Equal(t, status, report.Attempts[0].Status)
					require.Equal(t, idem.Executed, report.Outcome)
				})
			})
		}
	}
}

// answers is a script of statuses; the last one goes on.
func answers(header http.Header, statuses ...int) func(int, *http.Request) (*http.Response, error) {
	return func(n int, req *http.Request) (*http.Response, error) {
		status := statuses[min(n, len(statuses))-1]
		h := http.Header{}
		if status/100 != 2 {
			h = header.Clone()
		}
		if h == nil {
			h = http.Header{}
		}
		return answer(req, status, h, `{}`), nil
	}
}

func TestClassificationOf417(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, c := range []struct {
			name     string
			expect   bool
			statuses []int
			attempts int // MaxAttempts
			sends    int
			final    int
		}{
			{"with Expect, once more without it", true, []int{417, 201}, 4, 2, 201},
			{"with Expect, refused again", true, []int{417}, 4, 2, 417},
			{"with Expect, no attempt left", true, []int{417, 201}, 1, 1, 417},
			{"without Expect", false, []int{417, 201}, 4, 1, 417},
			{"with Expect, then a failure", true, []int{417, 503, 201}, 4, 3, 201},
		} {
			w := &wire{serve: answers(nil, c.statuses...)}
			req := newPost(t, t.Context(), wireURL, `{"a":1}`)
			if c.expect {
				req.Header.Set("Expect", "100-continue")
			}
			resp, err := onWire(w, func(tr *idem.Transport) { tr.Policy.MaxAttempts = c.attempts }).RoundTrip(req)
			require.NoError(t, err, c.name)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), c.sends, c.name)
			oneKey(t, w.seen())
			require.Equal(t, c.final, resp.StatusCode, c.name)
			for i, s := range w.seen() {
				require.Equal(t, `{"a":1}`, s.body, c.name)
				require.Equal(t, i == 0 && c.expect, s.header.Get("Expect") != "", c.name)
			}
			if c.sends > 1 {
				require.Zero(t, idem.ReportOf(resp).Attempts[0].Wait, c.name)
				require.Equal(t, c.sends, idem.ReportOf(resp).Attempts[c.sends-1].N, "it counts as an attempt")
			}
		}
	})
}

func TestClassificationOf401(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, c := range []struct {
			name     string
			prepare  bool
			statuses []int
			attempts int
			sends    int
			final    int
			outcome  idem.Outcome
		}{
			{"with Prepare, once more", true, []int{401, 201}, 4, 2, 201, idem.Executed},
			{"with Prepare, refused again", true, []int{401}, 4, 2, 401, idem.Refused},
			{"with Prepare, no attempt left", true, []int{401, 201}, 1, 1, 401, idem.Refused},
			{"without Prepare", false, []int{401, 201}, 4, 1, 401, idem.Refused},
			{"after a lost answer", true, []int{503, 401}, 4, 3, 401, idem.Unknown},
			{"one chance for the whole operation", true, []int{401, 503, 401, 201}, 4, 3, 401, idem.Unknown},
		} {
			w := &wire{serve: answers(nil, c.statuses...)}
			prepared := 0
			resp, err := onWire(w, func(tr *idem.Transport) {
				tr.Policy.MaxAttempts = c.attempts
				if c.prepare {
					tr.Prepare = func(*http.Request) error { prepared++; return nil }
				}
			}).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.NoError(t, err, c.name)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), c.sends, c.name)
			oneKey(t, w.seen())
			require.Equal(t, c.final, resp.StatusCode, c.name)
			require.Equal(t, c.outcome, idem.OutcomeOf(resp, nil), c.name)
			if c.prepare {
				require.Equal(t, c.sends, prepared, c.name)
			}
		}
	})
}

func TestClassificationOfInProgress(t *testing.T) {
	inProgress := func(body string, header http.Header) func(int, *http.Request) (*http.Response, error) {
		return func(n int, req *http.Request) (*http.Response, error) {
			if n > 6 {
				return answer(req, 201, jsonType(), `{}`), nil
			}
			h := jsonType()
			for name, values := range header {
				h[name] = values
			}
			return answer(req, 409, h, body), nil
		}
	}
	for _, c := range []struct {
		name  string
		body  string
		head  http.Header
		waits bool
		least time.Duration
	}{
		{name: "409 with Retry-After", body: "{}", head: http.Header{"Retry-After": {"3"}}, waits: true, least: 3 * time.Second},
		{name: "409 with the mark", body: `{"type":"https://api.test/problems/request-in-progress"}`, waits: true, least: 10 * time.Millisecond},
		{name: "another 409", body: `{"type":"https://api.test/problems/version-conflict"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				w := &wire{serve: inProgress(c.body, c.head)}
				tr := onWire(w, func(tr *idem.Transport) {
					tr.Policy.MaxAttempts = 1 // waits are no attempts
					tr.Policy.Budget = &idem.Budget{Capacity: 1, Cost: 1}
				})
				resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				oneKey(t, w.seen())
				if !c.waits {
					require.Len(t, w.seen(), 1)
					require.Equal(t, 409, resp.StatusCode)
					require.NoError(t, idem.ReportOf(resp).Reason)
					require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
					return
				}
				require.Len(t, w.seen(), 7)
				report := idem.ReportOf(resp)
				require.Equal(t, idem.Executed, report.Outcome)
				for _, a := range report.Attempts {
					require.Equal(t, 1, a.N)
					if a.Status == 409 {
						require.GreaterOrEqual(t, a.Wait, c.least)
						require.Equal(t, idem.Unknown, a.Outcome)
					}
				}
			})
		})
	}
	t.Run("bounded by MaxInProgress", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			w := &wire{serve: inProgress("{}", http.Header{"Retry-After": {"1"}})}
			resp, err := onWire(w, func(tr *idem.Transport) { tr.Policy.MaxInProgress = 2 }).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.NoError(t, err)
			require.Len(t, w.seen(), 3)
			require.Equal(t, 409, resp.StatusCode)
			require.Equal(t, "{}", readAll(t, resp))
			require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrInProgress)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
		})
	})
}

func TestClassificationOfAlreadyDone(t *testing.T) {
	d := idem.Generic
	d.AlreadyDone = []idem.Mark{{Status: 409, Pointer: "/code", Equals: "already_processed"}}
	d.Reference = []string{"/payment/id"}
	serve := func(n int, req *http.Request) (*http.Response, error) {
		if n == 1 && req.Header.Get("X-First") == "" {
			return nil, io.ErrUnexpectedEOF
		}
		return answer(req, 409, jsonType(), `{"code":"already_processed","payment":{"id":"pay_7"}}`), nil
	}
	t.Run("after the key was sent", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			w := &wire{serve: serve}
			resp, err := onWire(w, func(tr *idem.Transport) { tr.Dialect = d }).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.NoError(t, err)
			require.Len(t, w.seen(), 2)
			require.Contains(t, readAll(t, resp), "pay_7")
			report := idem.ReportOf(resp)
			require.Equal(t, idem.Executed, report.Outcome)
			require.ErrorIs(t, report.Reason, idem.ErrAlreadyDone)
			require.Equal(t, "pay_7", report.Reference)
		})
	})
	t.Run("for a key that was never sent before it is no proof", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			w := &wire{serve: serve}
			req := newPost(t, t.Context(), wireURL, `{}`)
			req.Header.Set("X-First", "yes")
			resp, err := onWire(w, func(tr *idem.Transport) { tr.Dialect = d }).RoundTrip(req)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), 1)
			require.NotEqual(t, idem.Executed, idem.OutcomeOf(resp, nil))
			require.NoError(t, idem.ReportOf(resp).Reason)
		})
	})
}

func TestClassificationOfMismatch(t *testing.T) {
	for _, c := range []struct {
		name    string
		dialect idem.Dialect
		status  int
		body    string
		reused  bool
	}{
		{"problem type", idem.Generic, 422, `{"type":"https://api.test/problems/idempotency-key-reused"}`, true},
		{"error code", idem.Generic, 422, `{"error":{"code":"IdempotencyKeyReused"}}`, true},
		{"quoted dialect", idem.IETF, 422, `{"type":"https://api.test/idempotency-key"}`, true},
		{"Stripe", idem.Stripe, 400, `{"error":{"type":"idempotency_error"}}`, true},
		{"validation", idem.Generic, 422, `{"type":"https://api.test/problems/validation"}`, false},
		{"Stripe, another 400", idem.Stripe, 400, `{"error":{"type":"invalid_request_error"}}`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
					h := jsonType()
					h.Set("X-Should-Retry", "true") // below the marks
					if !c.reused {
						h.Del("X-Should-Retry")
					}
					return answer(req, c.status, h, c.body), nil
				}}
				resp, err := onWire(w, func(tr *idem.Transport) { tr.Dialect = c.dialect }).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
				require.NoError(t, err)
				require.Len(t, w.seen(), 1, "never again, and never with a new key")
				require.Equal(t, c.body, readAll(t, resp))
				report := idem.ReportOf(resp)
				if c.reused {
					require.ErrorIs(t, report.Reason, idem.ErrKeyReused)
					require.Equal(t, idem.Unknown, report.Outcome)
				} else {
					require.NoError(t, report.Reason)
					require.Equal(t, idem.Refused, report.Outcome)
				}
			})
		})
	}
}

func TestClassificationOfReplayedFailures(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.StoredFailure, Status: 500}))
		resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		require.Len(t, s.Sends(), 2, "the replay says that nothing will change")
		require.True(t, s.Sends()[1].Replayed)
		require.Equal(t, 500, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
		report := idem.ReportOf(resp)
		require.True(t, report.Replayed)
		require.Equal(t, idem.Unknown, report.Outcome)
	})
}

func TestClassificationByTheProvidersHint(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, c := range []struct {
			name         string
			dialect      idem.Dialect
			header       http.Header
			statuses     []int
			sends, final int
		}{
			{"true on a 400", idem.Generic, http.Header{"X-Should-Retry": {"true"}}, []int{400, 201}, 2, 201},
			{"true, within MaxAttempts", idem.Generic, http.Header{"X-Should-Retry": {"true"}}, []int{400}, 4, 400},
			{"false on a 503", idem.Generic, http.Header{"X-Should-Retry": {"false"}}, []int{503, 201}, 1, 503},
			{"Stripe, false on a 500", idem.Stripe, http.Header{"Stripe-Should-Retry": {"false"}}, []int{500, 201}, 1, 500},
			{"Stripe, true on a 400", idem.Stripe, http.Header{"Stripe-Should-Retry": {"true"}}, []int{400, 201}, 2, 201},
			{"nonsense", idem.Generic, http.Header{"X-Should-Retry": {"maybe"}}, []int{503, 201}, 2, 201},
			{"true on a replayed 500", idem.Generic, http.Header{"X-Should-Retry": {"true"}, "Idempotent-Replayed": {"true"}}, []int{500, 201}, 1, 500},
		} {
			w := &wire{serve: answers(c.header, c.statuses...)}
			resp, err := onWire(w, func(tr *idem.Transport) { tr.Dialect = c.dialect }).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.NoError(t, err, c.name)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), c.sends, c.name)
			require.Equal(t, c.final, resp.StatusCode, c.name)
			oneKey(t, w.seen())
		}
	})
	t.Run("true does not outvote the budget", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			w := &wire{serve: answers(http.Header{"X-Should-Retry": {"true"}}, 400)}
			resp, err := onWire(w, func(tr *idem.Transport) {
				tr.Policy.MaxAttempts = 100
				tr.Policy.Budget = &idem.Budget{Capacity: 8}
			}).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), 4, "two retries and a probe")
			require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrBudgetExhausted)
		})
	})
}

func TestClassifyOverrulesTheTable(t *testing.T) {
	type seen struct {
		status int
		body   string
		err    error
	}
	run := func(t *testing.T, serve func(int, *http.Request) (*http.Response, error), ctx context.Context, verdict func(*http.Response, error) idem.Verdict) (*wire, []seen, *http.Response, error) {
		var got []seen
		w := &wire{serve: serve}
		resp, err := onWire(w, func(tr *idem.Transport) {
			tr.Policy.Classify = func(resp *http.Response, err error) idem.Verdict {
				s := seen{err: err}
				require.NotEqual(t, resp == nil, err == nil, "an answer or an error")
				if resp != nil {
					text, readErr := io.ReadAll(resp.Body)
					require.NoError(t, readErr)
					_ = resp.Body.Close()
					s.status, s.body = resp.StatusCode, string(text)
				}
				got = append(got, s)
				return verdict(resp, err)
			}
		}).RoundTrip(newPost(t, ctx, wireURL, `{}`))
		return w, got, resp, err
	}
	say := func(v idem.Verdict) func(*http.Response, error) idem.Verdict {
		return func(*http.Response, error) idem.Verdict { return v }
	}
	virtual(t, func(t *testing.T) {
		ctx := t.Context()

		w, got, resp, err := run(t, always(503), ctx, say(idem.Stop))
		require.NoError(t, err)
		require.Len(t, w.seen(), 1)
		require.Equal(t, []seen{{status: 503, body: `{"title":"scripted"}`}}, got)
		require.Equal(t, `{"title":"scripted"}`, readAll(t, resp), "rewound")
		require.NoError(t, idem.ReportOf(resp).Reason)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))

		w, got, resp, err = run(t, always(404), ctx, say(idem.Retry))
		require.NoError(t, err)
		require.Len(t, w.seen(), 4)
		require.Len(t, got, 4)
		oneKey(t, w.seen())
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrAttemptsExhausted)
		require.Equal(t, `{"title":"scripted"}`, readAll(t, resp))

		w, got, resp, err = run(t, answers(nil, 503, 404), ctx, say(idem.Undecided))
		require.NoError(t, err)
		require.Len(t, w.seen(), 2, "the table decides")
		require.Len(t, got, 2)
		require.NoError(t, resp.Body.Close())

		// A 2xx that is to be retried is no proof of execution.
		w, _, resp, err = run(t, always(200), ctx, say(idem.Retry))
		require.NoError(t, err)
		require.Len(t, w.seen(), 4)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
		require.NoError(t, resp.Body.Close())

		// An error may be given up, or retried although the table would not.
		lost := errors.New("lost")
		fails := func(int, *http.Request) (*http.Response, error) { return nil, lost }
		w, got, _, err = run(t, fails, ctx, say(idem.Stop))
		require.ErrorIs(t, err, lost)
		require.Len(t, w.seen(), 1)
		require.ErrorIs(t, got[0].err, lost)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))

		// A retry needs a key, or proof that nothing was sent.
		w, _, resp, err = run(t, always(503), idem.WithoutKey(ctx), say(idem.Retry))
		require.NoError(t, err)
		require.Len(t, w.seen(), 1)
		require.NoError(t, resp.Body.Close())

		// A long answer is seen up to the limit, and handed on whole.
		long := strings.Repeat("x", 3<<20)
		_, got, resp, err = run(t, func(_ int, req *http.Request) (*http.Response, error) {
			return answer(req, 200, nil, long), nil
		}, ctx, say(idem.Undecided))
		require.NoError(t, err)
		require.GreaterOrEqual(t, len(got[0].body), 1<<20)
		require.Equal(t, long, readAll(t, resp))

		// A permanent error may be retried too.
		base, dials := dialing(noSuchName())
		tr := onWire(base, func(tr *idem.Transport) { tr.Policy.Classify = say(idem.Retry) })
		_, err = tr.RoundTrip(newPost(t, ctx, wireURL, `{}`))
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		require.EqualValues(t, 4, dials.Load())
	})
}

func TestClassifySeesAnEventStreamWithoutWaitingForItsEnd(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			return chunkedAnswer(req, "text/event-stream", events(req.Context(), time.Minute, 5)), nil
		}}
		start := time.Now()
		resp, err := onWire(w, func(tr *idem.Transport) {
			tr.Policy.Classify = func(*http.Response, error) idem.Verdict { return idem.Undecided }
		}).RoundTrip(newPost(t, t.Context(), "http://api.test/v1/runs", `{}`))
		require.NoError(t, err)
		require.Zero(t, time.Since(start))
		require.Equal(t, "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4\n\n", readAll(t, resp))
		require.Len(t, w.seen(), 1)
	})
}
