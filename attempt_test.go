package idem_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// wire is a base that behaves like a fresh connection: it fires the events of
// httptrace, reads the body to its end, closes it, and keeps what it saw.
type wire struct {
	// serve answers send n, from 1; nil: 201 and a small JSON body.
	serve func(n int, req *http.Request) (*http.Response, error)

	mu    sync.Mutex // guards sends
	sends []wireSend
}

type wireSend struct {
	method, url string
	header      http.Header
	keys        []string
	body        string
	getBody     bool // the request still had one
	ctx         context.Context
}

func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	if trace := httptrace.ContextClientTrace(req.Context()); trace != nil {
		trace.GetConn(req.URL.Host)
		trace.GotConn(httptrace.GotConnInfo{})
	}
	s := wireSend{
		method: req.Method, url: req.URL.String(), header: req.Header.Clone(),
		keys: req.Header.Values("Idempotency-Key"), getBody: req.GetBody != nil, ctx: req.Context(),
	}
	if req.Body != nil {
		body, err := io.ReadAll(req.Body)
		_ = req.Body.Close()
		if err != nil {
			return nil, err
		}
		s.body = string(body)
	}
	w.mu.Lock()
	w.sends = append(w.sends, s)
	n := len(w.sends)
	w.mu.Unlock()
	if w.serve == nil {
		return answer(req, http.StatusCreated, jsonType(), `{"id":"pay_1"}`), nil
	}
	return w.serve(n, req)
}

func (w *wire) seen() []wireSend {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]wireSend(nil), w.sends...)
}

// onWire is a Transport over w with the policy of the cases, changed by edit.
func onWire(w http.RoundTripper, edit ...func(*idem.Transport)) *idem.Transport {
	tr := &idem.Transport{Base: w, Policy: casePolicy()}
	for _, e := range edit {
		e(tr)
	}
	return tr
}

func jsonType() http.Header { return http.Header{"Content-Type": {"application/json"}} }

// chunkedAnswer has a body whose length nobody knows.
func chunkedAnswer(req *http.Request, contentType string, body io.ReadCloser) *http.Response {
	resp := answer(req, http.StatusOK, http.Header{"Content-Type": {contentType}}, "")
	resp.Body, resp.ContentLength = body, -1
	return resp
}

// watchedBody counts what is read of an answer and how often it is closed.
type watchedBody struct {
	io.ReadCloser
	read   atomic.Int64
	closes atomic.Int32
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.read.Add(int64(n))
	return n, err
}

func (b *watchedBody) Close() error {
	b.closes.Add(1)
	return b.ReadCloser.Close()
}

// watchingBase watches the answers and the contexts of the attempts that go
// through it.
type watchingBase struct {
	base http.RoundTripper

	mu     sync.Mutex // guards what follows
	bodies []*watchedBody
	ctxs   []context.Context
}

func (b *watchingBase) RoundTrip(req *http.Request) (*http.Response, error) {
	b.mu.Lock()
	b.ctxs = append(b.ctxs, req.Context())
	b.mu.Unlock()
	resp, err := b.base.RoundTrip(req)
	if resp != nil {
		body := &watchedBody{ReadCloser: resp.Body}
		resp.Body = body
		b.mu.Lock()
		b.bodies = append(b.bodies, body)
		b.mu.Unlock()
	}
	return resp, err
}

// goroutinesBackTo waits up to 30 s until no more than n goroutines are left.
func goroutinesBackTo(t *testing.T, n int) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); runtime.NumGoroutine() > n; time.Sleep(5 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "%d goroutines are left, %d were there before", runtime.NumGoroutine(), n)
	}
}

func TestC41_DiscardedAnswersFreeTheirConnection(t *testing.T) {
	for _, length := range []string{"known", "chunked"} {
		t.Run("length "+length, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				busy := func(w http.ResponseWriter, _ *http.Request) {
					if length == "known" {
						w.Header().Set("Content-Length", strconv.Itoa(64<<10))
					}
					w.WriteHeader(http.StatusServiceUnavailable)
					_, _ = w.Write(bytes.Repeat([]byte("x"), 64<<10))
				}
				s := newScriptedProvider(t, busy, busy, says(http.StatusOK, `{"id":"pay_1"}`))
				s.base.MaxConnsPerHost = 1
				var conns atomic.Int32
				dial := s.base.DialContext
				s.base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conns.Add(1)
					return dial(ctx, network, addr)
				}
				watching := &watchingBase{base: s.base}
				tr := onWire(watching)

				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				resp, err := tr.RoundTrip(newPost(t, ctx, s.url, `{}`))
				require.NoError(t, err)
				require.Equal(t, `{"id":"pay_1"}`, readAll(t, resp))

				require.Len(t, s.sends(), 3)
				require.Len(t, watching.bodies, 3)
				for i, b := range watching.bodies {
					require.NotZero(t, b.closes.Load(), "answer %d is not closed", i+1)
				}
				require.EqualValues(t, 1, conns.Load(), "answers within 64 KiB are drained, so the connection is used again")
				// The bubble fails if a goroutine stays.
			})
		})
	}
}

func TestC42_DrainIsBoundedInBytesAndTime(t *testing.T) {
	type body struct {
		chunk []byte
		every time.Duration
	}
	for name, b := range map[string]body{
		"a trickle without end": {[]byte("1\r\n.\r\n"), 50 * time.Millisecond},
		"a gibibyte":            {append(append([]byte("8000\r\n"), bytes.Repeat([]byte("."), 0x8000)...), "\r\n"...), 0},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				var firstSent, secondSent atomic.Int64
				firstClosed := make(chan struct{})
				var keys [3]string
				url, base := rawInMemory(t, func(n int, c net.Conn, r *bufio.Reader) {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					keys[min(n, 2)] = req.Header.Get("Idempotency-Key")
					if n > 1 {
						secondSent.Store(time.Now().UnixNano())
						_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
						_, _ = r.ReadByte() // until the client leaves
						return
					}
					defer close(firstClosed)
					_, _ = io.WriteString(c, "HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: chunked\r\n\r\n")
					firstSent.Store(time.Now().UnixNano())
					for sent := 0; sent < 1<<30; sent += len(b.chunk) {
						if _, err := c.Write(b.chunk); err != nil {
							return
						}
						time.Sleep(b.every)
					}
				})
				watching := &watchingBase{base: base}
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				resp, err := onWire(watching).RoundTrip(newPost(t, ctx, url, `{}`))
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, resp.StatusCode)
				require.Equal(t, "{}", readAll(t, resp))
				require.Equal(t, keys[1], keys[2])

				require.LessOrEqual(t, watching.bodies[0].read.Load(), int64(64<<10+1), "one byte more tells that there is more")
				took := time.Duration(secondSent.Load() - firstSent.Load())
				require.LessOrEqual(t, took, 80*time.Millisecond+250*time.Millisecond, "the cap of the backoff and the drain")
				select {
				case <-firstClosed:
				case <-time.After(2 * time.Second):
					require.Fail(t, "the connection with the endless answer is still open")
				}
			})
		})
	}
}

func TestC44_AnswerThatNeverGetsBetterEndsAtMaxAttempts(t *testing.T) {
	for _, encoding := range []string{"gzip", "length", "chunked"} {
		t.Run(encoding, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: encoding}))
				resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
				require.Nil(t, resp)

				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 4)
				require.Len(t, keysSent(s.Sends()), 1)
				require.ErrorIs(t, err, io.ErrUnexpectedEOF)
				require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
				require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, http.StatusCreated, e.StatusCode)
			})
		})
	}
}

func TestC44_FlippedBitInGzipIsBoundedToo(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = io.WriteString(w, `{"id":"pay_1","status":"succeeded"}`)
	require.NoError(t, w.Close())
	damaged := z.Bytes()
	damaged[len(damaged)-6] ^= 1 // in the checksum
	var sends atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sends.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Length", strconv.Itoa(len(damaged)))
		_, _ = w.Write(damaged)
	}))
	t.Cleanup(s.Close)
	_, err := onWire(newBase(t)).RoundTrip(newPost(t, t.Context(), s.URL, `{}`))
	require.EqualValues(t, 4, sends.Load())
	require.ErrorIs(t, err, gzip.ErrChecksum)
	require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
}

func TestC45_LastAnswerSurvivesWhenRetriesRunOut(t *testing.T) {
	fails := fakeserver.Fault{Kind: fakeserver.Status, Status: 503}
	t.Run("RoundTrip returns it readable and without an error", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Inject(fails))
			resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.NotNil(t, resp)

			require.Empty(t, s.Effects())
			require.Len(t, s.Sends(), 4)
			require.Len(t, keysSent(s.Sends()), 1)
			require.Equal(t, 503, resp.StatusCode)
			require.Contains(t, readAll(t, resp), "injected-fault")
			report := idem.ReportOf(resp)
			require.ErrorIs(t, report.Reason, idem.ErrAttemptsExhausted)
			require.Equal(t, idem.Unknown, report.Outcome)
			require.Len(t, report.Attempts, 4)
		})
	})
	t.Run("http.Client hands it on", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Inject(fails))
			resp, err := (&http.Client{Transport: over(s)}).Do(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.Len(t, s.Sends(), 4)
			require.Equal(t, 503, resp.StatusCode)
			require.Contains(t, readAll(t, resp), "injected-fault")
		})
	})
	t.Run("Client has status, headers and body in the error", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Inject(fails))
			resp, err := idem.NewClient(over(s)).Do(newPayment(t, t.Context(), s, "order-1"))
			require.Nil(t, resp)
			require.Len(t, s.Sends(), 4)
			var e *idem.Error
			require.ErrorAs(t, err, &e)
			require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
			require.Equal(t, 503, e.StatusCode)
			require.Equal(t, "application/problem+json", e.Header.Get("Content-Type"))
			require.Contains(t, string(e.Body), "injected-fault")
			require.Len(t, e.Attempts, 4)
		})
	})
}

func TestC48_ErrorPageInsteadOfTheExpectedFormat(t *testing.T) {
	wantsJSON := func(tr *idem.Transport) {
		tr.Policy.Classify = func(resp *http.Response, _ error) idem.Verdict {
			if resp != nil && resp.StatusCode/100 == 2 && !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") {
				return idem.Retry
			}
			return idem.Undecided
		}
	}
	page := func(status int, point fakeserver.Point) fakeserver.Fault {
		return fakeserver.Fault{Kind: fakeserver.HTML, Status: status, Point: point}
	}
	t.Run("with a predicate the page is retried with the same key", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Script("", page(200, fakeserver.AfterEffect)))
			resp, err := over(s, wantsJSON).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.Len(t, s.Effects(), 1)
			require.Len(t, s.Sends(), 2)
			require.Len(t, keysSent(s.Sends()), 1)
			require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
			require.Contains(t, readAll(t, resp), "order-1")
			report := idem.ReportOf(resp)
			require.Equal(t, idem.Unknown, report.Attempts[0].Outcome)
			require.Equal(t, idem.Executed, report.Outcome)
			require.True(t, report.Replayed)
		})
	})
	t.Run("with a predicate a page for ever is no success", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Inject(page(200, fakeserver.AfterEffect)))
			resp, err := over(s, wantsJSON).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.Len(t, s.Effects(), 1)
			require.Len(t, s.Sends(), 4)
			require.Contains(t, readAll(t, resp), "<html>")
			require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
		})
	})
	t.Run("without one a 502 page is retried as any 502", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Script("", page(502, fakeserver.AfterEffect)))
			resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.Len(t, s.Effects(), 1)
			require.Len(t, s.Sends(), 2)
			require.Contains(t, readAll(t, resp), "order-1")
			require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		})
	})
	t.Run("without one a 200 page is returned as it is", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Script("", page(200, fakeserver.AfterEffect)))
			resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.Len(t, s.Sends(), 1)
			require.Contains(t, readAll(t, resp), "<html>")
		})
	})
}

func TestAnswerIsBufferedWhereItsEndCanBeWaitedFor(t *testing.T) {
	const text = `{"id":"pay_1"}`
	for _, c := range []struct {
		name     string
		typ      string
		length   int64 // -1: not known
		buffered bool
		edit     func(*idem.Transport)
		unkeyed  bool
	}{
		{name: "known length, JSON", typ: "application/json", length: int64(len(text)), buffered: true},
		{name: "known length, bytes", typ: "application/octet-stream", length: int64(len(text)), buffered: true},
		{name: "known length, no type", length: int64(len(text)), buffered: true},
		{name: "JSON", typ: "application/json", length: -1, buffered: true},
		{name: "JSON with charset", typ: "application/json; charset=utf-8", length: -1, buffered: true},
		{name: "problem", typ: "application/problem+json", length: -1, buffered: true},
		{name: "vendor JSON", typ: "application/vnd.api+json", length: -1, buffered: true},
		{name: "XML", typ: "application/xml", length: -1, buffered: true},
		{name: "text XML", typ: "text/xml", length: -1, buffered: true},
		{name: "SOAP", typ: "application/soap+xml", length: -1, buffered: true},
		{name: "form", typ: "application/x-www-form-urlencoded", length: -1, buffered: true},
		{name: "event stream", typ: "text/event-stream", length: -1},
		{name: "NDJSON", typ: "application/x-ndjson", length: -1},
		{name: "JSON sequence", typ: "application/json-seq", length: -1},
		{name: "bytes", typ: "application/octet-stream", length: -1},
		{name: "no type", length: -1},
		{name: "broken type", typ: "application/json; ;;=", length: -1},
		{name: "known length beyond the limit", typ: "application/json", length: int64(len(text)),
			edit: func(tr *idem.Transport) { tr.Policy.MaxResponseBuffer = int64(len(text)) - 1 }},
		{name: "known length at the limit", typ: "application/json", length: int64(len(text)), buffered: true,
			edit: func(tr *idem.Transport) { tr.Policy.MaxResponseBuffer = int64(len(text)) }},
		{name: "buffering off", typ: "application/json", length: int64(len(text)),
			edit: func(tr *idem.Transport) { tr.Policy.MaxResponseBuffer = -1 }},
		{name: "no key", typ: "application/json", length: int64(len(text)), unkeyed: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			watching := &watchingBase{base: &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
				resp := answer(req, http.StatusOK, http.Header{}, text)
				resp.ContentLength = c.length
				if c.typ != "" {
					resp.Header.Set("Content-Type", c.typ)
				}
				return resp, nil
			}}}
			tr := onWire(watching)
			if c.edit != nil {
				c.edit(tr)
			}
			ctx := t.Context()
			if c.unkeyed {
				ctx = idem.WithoutKey(ctx)
			}
			resp, err := tr.RoundTrip(newPost(t, ctx, "http://api.test/v1/payments", `{}`))
			require.NoError(t, err)
			body := watching.bodies[0]
			require.Equal(t, c.buffered, body.closes.Load() == 1, "read to its end and closed within the attempt")
			if !c.buffered {
				require.Zero(t, body.read.Load())
			}
			require.Equal(t, text, readAll(t, resp))
			require.EqualValues(t, 1, body.closes.Load())
			require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		})
	}
}

func TestAnswerPastTheLimitIsPrefixPlusStream(t *testing.T) {
	const limit = 1 << 10
	text := strings.Repeat("0123456789abcdef", 256<<10/16)
	var sends atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sends.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_ = http.NewResponseController(w).Flush() // so that the length is not known
		_, _ = io.WriteString(w, text)
	}))
	t.Cleanup(s.Close)
	watching := &watchingBase{base: newBase(t)}
	tr := onWire(watching, func(tr *idem.Transport) { tr.Policy.MaxResponseBuffer = limit })
	resp, err := tr.RoundTrip(newPost(t, t.Context(), s.URL, `{}`))
	require.NoError(t, err)
	require.EqualValues(t, -1, resp.ContentLength)
	require.Greater(t, watching.bodies[0].read.Load(), int64(limit), "it was read up to the limit before it was handed over")
	require.Less(t, watching.bodies[0].read.Load(), int64(4*limit))
	require.NoError(t, watching.ctxs[0].Err(), "the rest still comes through the attempt")
	require.Equal(t, text, readAll(t, resp))
	require.Error(t, watching.ctxs[0].Err())
	require.EqualValues(t, 1, sends.Load())
}

// events is an event stream: one event at once, one after each pause, and an
// end after the last. It breaks off with the attempt's context, as the body of
// a real connection does.
func events(ctx context.Context, pause time.Duration, n int) io.ReadCloser {
	r, w := io.Pipe()
	stop := context.AfterFunc(ctx, func() { _ = w.CloseWithError(ctx.Err()) })
	go func() {
		defer stop()
		for i := range n {
			if _, err := fmt.Fprintf(w, "data: %d\n\n", i); err != nil {
				return
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
		_ = w.Close()
	}()
	return r
}

func TestEventStreamIsHandedOnAtOnceAndOutlivesTheLimits(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			return chunkedAnswer(req, "text/event-stream", events(req.Context(), time.Hour, 5)), nil
		}}
		start := time.Now()
		resp, err := onWire(w).RoundTrip(newPost(t, t.Context(), "http://api.test/v1/runs", `{}`))
		require.NoError(t, err)
		require.Zero(t, time.Since(start), "no waiting for the second event")
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		require.Equal(t, "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4\n\n", readAll(t, resp))
		require.Equal(t, 5*time.Hour, time.Since(start), "neither AttemptTimeout nor MaxElapsed cuts a stream")
		require.Len(t, w.seen(), 1)
	})
}

func TestAttemptIsReleasedAtTheEndOfItsAnswer(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*testing.T, *http.Response)
	}{
		{"at EOF", func(t *testing.T, resp *http.Response) {
			_, err := io.Copy(io.Discard, resp.Body)
			require.NoError(t, err)
		}},
		{"at Close", func(t *testing.T, resp *http.Response) { require.NoError(t, resp.Body.Close()) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
					return chunkedAnswer(req, "text/event-stream", events(req.Context(), time.Second, 3)), nil
				}}
				resp, err := onWire(w).RoundTrip(newPost(t, t.Context(), "http://api.test/v1/runs", `{}`))
				require.NoError(t, err)
				attempt := w.seen()[0].ctx
				_, err = io.ReadFull(resp.Body, make([]byte, 5))
				require.NoError(t, err)
				require.NoError(t, attempt.Err())
				c.end(t, resp)
				require.ErrorIs(t, attempt.Err(), context.Canceled)
				require.NoError(t, resp.Request.Context().Err(), "the caller's context goes on")
				require.NoError(t, resp.Body.Close())
			})
		})
	}
}

func TestStreamedAnswerHoldsTheTurnOfItsKeyUntilItEnds(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			return chunkedAnswer(req, "text/event-stream", events(req.Context(), time.Second, 3)), nil
		}}
		tr := onWire(w)
		ctx := idem.WithKey(t.Context(), "order-77")
		first, err := tr.RoundTrip(newPost(t, ctx, "http://api.test/v1/runs", `{}`))
		require.NoError(t, err)
		second := make(chan *http.Response)
		go func() {
			resp, err := tr.RoundTrip(newPost(t, ctx, "http://api.test/v1/runs", `{}`))
			if err != nil {
				resp = nil
			}
			second <- resp
		}()
		synctest.Wait()
		require.Len(t, w.seen(), 1)
		require.NoError(t, first.Body.Close())
		resp := <-second
		require.NotNil(t, resp)
		require.Len(t, w.seen(), 2)
		require.NoError(t, resp.Body.Close())
	})
}

func TestCutAnswerIsAskedForAgainWithTheSameKey(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault fakeserver.Fault
	}{
		{"Content-Length not kept", fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "length"}},
		{"last chunk missing", fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "chunked"}},
		{"gzip broken off", fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "gzip"}},
		{"in the headers", fakeserver.Fault{Kind: fakeserver.CutHeaders}},
	} {
		for _, network := range []string{"in memory", "on loopback"} {
			t.Run(c.name+" "+network, func(t *testing.T) {
				check := func(t *testing.T, s *fakeserver.Server) {
					require.NoError(t, s.Script("", c.fault))
					resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
					require.NoError(t, err)
					require.Len(t, s.Effects(), 1)
					require.Len(t, s.Sends(), 2)
					require.Len(t, keysSent(s.Sends()), 1)
					require.Equal(t, s.Sends()[0].BodySHA256, s.Sends()[1].BodySHA256)
					require.Contains(t, readAll(t, resp), "order-1")
					report := idem.ReportOf(resp)
					require.Equal(t, idem.Executed, report.Outcome)
					require.Equal(t, idem.Unknown, report.Attempts[0].Outcome)
					require.True(t, report.Replayed)
				}
				if network == "in memory" {
					virtual(t, func(t *testing.T) { check(t, inMemory(t)) })
				} else {
					check(t, onLoopback(t))
				}
			})
		}
	}
}

// brokenOff fails after its text.
type brokenOff struct{ io.Reader }

func (b brokenOff) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func TestStreamCutInTheCallersHandsLeavesTheOutcome(t *testing.T) {
	for _, c := range []struct {
		name, typ string
		limit     int64
	}{
		{"event stream", "text/event-stream", 0},
		{"JSON past the limit", "application/json", 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
				body := io.NopCloser(brokenOff{strings.NewReader(strings.Repeat("data: 1\n\n", 1000))})
				return chunkedAnswer(req, c.typ, body), nil
			}}
			tr := onWire(w, func(tr *idem.Transport) { tr.Policy.MaxResponseBuffer = c.limit })
			resp, err := tr.RoundTrip(newPost(t, t.Context(), "http://api.test/v1/runs", `{}`))
			require.NoError(t, err)
			text, err := io.ReadAll(resp.Body)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.Len(t, text, 9000)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), 1)
			require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		})
	}
}

func TestAnswerWhoseBytesArriveIsNotRetried(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Trickle, Delay: 90 * time.Millisecond}))
		start := time.Now()
		tr := over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
		resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.Contains(t, readAll(t, resp), "order-1")
		require.Greater(t, time.Since(start), 5*time.Second)
	})
}

func TestGapWithinABufferedAnswerIsBounded(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Point: fakeserver.InBody, Delay: time.Hour}))
		start := time.Now()
		tr := over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
		resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Contains(t, readAll(t, resp), "order-1")
		require.LessOrEqual(t, time.Since(start), 110*time.Millisecond, "the limit of the attempt and one backoff")
	})
}

func TestBufferedAnswerIsBoundedByMaxElapsed(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Trickle, Delay: 90 * time.Millisecond}))
		start := time.Now()
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.AttemptTimeout, tr.Policy.MaxElapsed = 100*time.Millisecond, time.Second
		})
		_, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.Len(t, s.Effects(), 1)
		require.ErrorIs(t, err, idem.ErrTimeExhausted)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestReadAfterCloseFails(t *testing.T) {
	for _, typ := range []string{"application/json", "text/event-stream"} {
		t.Run(typ, func(t *testing.T) {
			watching := &watchingBase{base: &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
				return chunkedAnswer(req, typ, io.NopCloser(strings.NewReader("0123456789"))), nil
			}}}
			resp, err := onWire(watching).RoundTrip(newPost(t, t.Context(), "http://api.test/", `{}`))
			require.NoError(t, err)
			_, err = io.ReadFull(resp.Body, make([]byte, 5))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.NoError(t, resp.Body.Close())
			n, err := resp.Body.Read(make([]byte, 5))
			require.Zero(t, n)
			require.ErrorIs(t, err, http.ErrBodyReadAfterClose)
			require.EqualValues(t, 1, watching.bodies[0].closes.Load())
		})
	}
}

// The limit before the headers is not what is left for the body: each gap has
// the whole of it.
func TestGapAfterLateHeadersHasTheWholeLimit(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t, func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(800 * time.Millisecond)
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			require.NoError(t, http.NewResponseController(w).Flush())
			time.Sleep(800 * time.Millisecond)
			_, _ = io.WriteString(w, `{"id":"pay_1"}`)
		})
		start := time.Now()
		resp, err := p.through(func(tr *idem.Transport) { tr.Policy.AttemptTimeout = time.Second }).
			RoundTrip(newPost(t, t.Context(), p.url+"/payments", `{}`))
		require.NoError(t, err)
		require.Equal(t, `{"id":"pay_1"}`, readAll(t, resp))
		require.Len(t, p.sends(), 1)
		require.Equal(t, 1600*time.Millisecond, time.Since(start))
	})
}
