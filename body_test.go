package idem_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// paddedPayment is the body of a payment of 1999, n bytes long.
func paddedPayment(reference string, n int) string {
	head := `{"amount":1999,"currency":"usd","reference":"` + reference + `","note":"`
	return head + strings.Repeat("x", n-len(head)-2) + `"}`
}

// readOnce hides everything about a reader but Read, so that it has no
// length and cannot be rewound.
type readOnce struct{ io.Reader }

// newPostOnce is newPost with a body that can be read only once.
func newPostOnce(t testing.TB, ctx context.Context, url, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, readOnce{strings.NewReader(body)})
	require.NoError(t, err)
	require.Nil(t, req.GetBody)
	return req
}

// requireWhole requires that every send brought exactly content, under its
// length.
func requireWhole(t *testing.T, sends []fakeserver.Send, content string) {
	t.Helper()
	sum := sha256.Sum256([]byte(content))
	for _, s := range sends {
		require.EqualValues(t, len(content), s.ContentLength, "Content-Length of send %d", s.N)
		require.Empty(t, s.TransferEncoding, "send %d", s.N)
		require.EqualValues(t, len(content), s.BodyLen, "bytes of send %d", s.N)
		require.Equal(t, hex.EncodeToString(sum[:]), s.BodySHA256, "content of send %d", s.N)
	}
}

// closeLedger counts the Closes of every reader that it opened.
type closeLedger struct {
	mu      sync.Mutex // guards readers
	readers []*closeCounter
}

func (l *closeLedger) open(content string) *closeCounter {
	c := &closeCounter{Reader: strings.NewReader(content)}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.readers = append(l.readers, c)
	return c
}

// requireOnce requires that each reader was closed exactly once; the first
// is the Body of the request.
func (l *closeLedger) requireOnce(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, r := range l.readers {
		require.EqualValues(t, 1, r.closes.Load(), "Closes of reader %d of %d (the first is Request.Body)", i+1, len(l.readers))
	}
}

// requireOnceButForHTTPClient is requireOnce behind a redirect: http.Client
// itself closes the body of the request that was redirected once more.
func (l *closeLedger) requireOnceButForHTTPClient(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	if l.readers[0].closes.Load() == 2 {
		l.readers = l.readers[1:]
	}
	l.mu.Unlock()
	l.requireOnce(t)
}

// countedBodies are the ways in which a request can bring a body whose
// Closes are counted.
var countedBodies = []struct {
	name       string
	rewindable bool
	most       int64 // Policy.MaxRequestBuffer
}{
	{"read into memory", false, 0},
	{"rewindable", true, 0},
	{"streamed", false, -1},
}

// newCountedPost is a POST of content whose readers l counts.
func newCountedPost(t testing.TB, ctx context.Context, url, content string, rewindable bool, l *closeLedger) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, l.open(content))
	require.NoError(t, err)
	req.ContentLength = int64(len(content))
	if rewindable {
		req.GetBody = func() (io.ReadCloser, error) { return l.open(content), nil }
	}
	return req
}

func TestC01_EveryRetryBringsTheWholeBody(t *testing.T) {
	for name, post := range map[string]func(testing.TB, context.Context, string, string) *http.Request{
		"rewindable": newPost, "read once": newPostOnce,
	} {
		for _, reset := range []fakeserver.Point{fakeserver.BeforeEffect, fakeserver.AfterEffect} {
			t.Run(name+", reset "+string(reset), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Script("",
						fakeserver.Fault{Kind: fakeserver.Status, Status: 503},
						fakeserver.Fault{Kind: fakeserver.Reset, Point: reset},
						fakeserver.Fault{}))
					content := paddedPayment("order-1", 4096)
					resp, err := over(s).RoundTrip(post(t, t.Context(), s.URL()+"/v1/payments", content))
					require.NoError(t, err)
					readAll(t, resp)

					require.Len(t, s.Effects(), 1)
					sends := s.Sends()
					require.Len(t, sends, 3)
					requireWhole(t, sends, content)
					require.Len(t, keysSent(sends), 1)
					require.Equal(t, http.StatusCreated, resp.StatusCode)
					require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
				})
			})
		}
	}
}

func TestC02_LimitPerAttemptLosesNoBody(t *testing.T) {
	failures := map[string]fakeserver.Fault{
		"503":     {Kind: fakeserver.Status, Status: 503},
		"timeout": {Kind: fakeserver.Hang},
		"reset":   {Kind: fakeserver.Reset},
	}
	posts := map[string]func(testing.TB, context.Context, string, string) *http.Request{
		"GetBody": newPost, "no GetBody": newPostOnce,
	}
	for _, limited := range []bool{true, false} {
		for bodyName, post := range posts {
			for failure, fault := range failures {
				t.Run(fmt.Sprintf("AttemptTimeout %v, %s, %s", limited, bodyName, failure), func(t *testing.T) {
					virtual(t, func(t *testing.T) {
						s := inMemory(t)
						require.NoError(t, s.Script("", fault, fakeserver.Fault{}))
						tr := over(s, func(tr *idem.Transport) {
							if limited {
								tr.Policy.AttemptTimeout = 50 * time.Millisecond
								return
							}
							tr.Policy.AttemptTimeout = -1
							tr.Base.(*http.Transport).ResponseHeaderTimeout = 50 * time.Millisecond
						})
						content := paddedPayment("order-1", 4096)
						resp, err := tr.RoundTrip(post(t, t.Context(), s.URL()+"/v1/payments", content))
						require.NoError(t, err)
						readAll(t, resp)

						require.Len(t, s.Effects(), 1)
						sends := s.Sends()
						require.Len(t, sends, 2)
						requireWhole(t, sends, content)
						require.Len(t, keysSent(sends), 1)
						require.Equal(t, http.StatusCreated, resp.StatusCode)
					})
				})
			}
		}
	}
}

// zeros is a body that costs no memory. While it is read it looks at the
// heap every 8 MiB.
type zeros struct {
	left    int64
	looked  int64
	largest *atomic.Uint64
}

func (z *zeros) Read(p []byte) (int, error) {
	if z.left == 0 {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), z.left))
	clear(p[:n])
	z.left -= int64(n)
	if z.looked -= int64(n); z.looked <= 0 {
		z.looked = 8 << 20
		if now := heap(); now > z.largest.Load() {
			z.largest.Store(now)
		}
	}
	return n, nil
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestC04_LargeUploadIsNotHeldInMemory(t *testing.T) {
	size := int64(256 << 20)
	if raceDetector { // under which the copying alone takes seconds
		size = 64 << 20
	}
	const limit = 8 << 20 // of the growth of the heap
	upload := func(t *testing.T, s *fakeserver.Server, edit func(*http.Request, *atomic.Uint64)) (resp *http.Response, grown uint64, err error) {
		t.Helper()
		runtime.GC()
		before := heap()
		largest := new(atomic.Uint64)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/uploads", &zeros{left: size, largest: largest})
		require.NoError(t, err)
		req.ContentLength = size
		if edit != nil {
			edit(req, largest)
		}
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.MaxRequestBuffer = 1 << 20
			tr.Policy.AttemptTimeout, tr.Policy.MaxElapsed = 10*time.Minute, 10*time.Minute // it may be a slow machine
		})
		resp, err = tr.RoundTrip(req)
		return resp, max(largest.Load(), before) - before, err
	}

	t.Run("that succeeds", func(t *testing.T) {
		s := onLoopback(t)
		resp, grown, err := upload(t, s, nil)
		require.NoError(t, err)
		readAll(t, resp)
		effects := s.Effects()
		require.Len(t, effects, 1)
		require.EqualValues(t, size, effects[0].Amount)
		require.Len(t, s.Sends(), 1)
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		require.Less(t, grown, uint64(limit))
	})

	t.Run("that fails after its last byte", func(t *testing.T) {
		s := onLoopback(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
		resp, grown, err := upload(t, s, nil)
		require.NoError(t, err)
		require.Contains(t, readAll(t, resp), "injected-fault")
		require.Empty(t, s.Effects())
		sends := s.Sends()
		require.Len(t, sends, 1)
		require.EqualValues(t, size, sends[0].BodyLen)
		require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrBodyNotReplayable)
		require.Equal(t, idem.Unknown, idem.ReportOf(resp).Outcome)
		require.Less(t, grown, uint64(limit))
	})

	t.Run("and is retried whole where it can be opened again", func(t *testing.T) {
		const size = 32 << 20
		sources := map[string]func(*testing.T, *http.Request, *atomic.Uint64){
			"file": func(t *testing.T, req *http.Request, _ *atomic.Uint64) {
				f, err := os.Create(filepath.Join(t.TempDir(), "upload"))
				require.NoError(t, err)
				require.NoError(t, f.Truncate(size))
				req.Body, req.ContentLength = f, size
			},
			"GetBody": func(_ *testing.T, req *http.Request, largest *atomic.Uint64) {
				req.GetBody = func() (io.ReadCloser, error) {
					return io.NopCloser(&zeros{left: size, largest: largest}), nil
				}
				req.Body, _ = req.GetBody()
				req.ContentLength = size
			},
		}
		for name, source := range sources {
			t.Run(name, func(t *testing.T) {
				s := onLoopback(t)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 500}, fakeserver.Fault{}))
				resp, grown, err := upload(t, s, func(req *http.Request, largest *atomic.Uint64) { source(t, req, largest) })
				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, s.Effects(), 1)
				sends := s.Sends()
				require.Len(t, sends, 2)
				require.EqualValues(t, size, sends[0].BodyLen)
				require.EqualValues(t, size, sends[1].BodyLen)
				require.Equal(t, sends[0].BodySHA256, sends[1].BodySHA256)
				require.Len(t, keysSent(sends), 1)
				require.Equal(t, http.StatusCreated, resp.StatusCode)
				require.Less(t, grown, uint64(limit))
			})
		}
	})
}

// A constructor of our own that takes an io.Reader does not exist, so the
// typed nil of the case cannot arise.
func TestC05_NoBodyIsNoBodyInEveryAttempt(t *testing.T) {
	for _, c := range []struct {
		name   string
		method string
		edit   func(*http.Request)
		length string // Content-Length on the wire
	}{
		{"POST with nil", http.MethodPost, func(r *http.Request) {}, "0"},
		{"POST with NoBody", http.MethodPost, func(r *http.Request) { r.Body = http.NoBody }, "0"},
		{"POST with NoBody of unknown length", http.MethodPost, func(r *http.Request) { r.Body, r.ContentLength = http.NoBody, -1 }, "0"},
		{"POST with an empty reader", http.MethodPost, func(r *http.Request) { r.Body = io.NopCloser(readOnce{strings.NewReader("")}) }, "0"},
		{"POST with an empty reader in memory", http.MethodPost, func(r *http.Request) { r.Body = io.NopCloser(bytes.NewReader(nil)) }, "0"},
		{"GET with nil", http.MethodGet, func(r *http.Request) {}, ""},
		{"GET with NoBody", http.MethodGet, func(r *http.Request) { r.Body = http.NoBody }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, fakeserver.Fault{}))
				path := "/v1/uploads"
				if c.method == http.MethodGet {
					path = "/v1/payments?reference=none"
				}
				req, err := http.NewRequestWithContext(t.Context(), c.method, s.URL()+path, nil)
				require.NoError(t, err)
				c.edit(req)
				resp, err := over(s).RoundTrip(req)
				require.NoError(t, err)
				readAll(t, resp)

				sends := s.Sends()
				require.Len(t, sends, 2)
				for _, send := range sends {
					require.Empty(t, send.TransferEncoding)
					require.Equal(t, c.length, send.Header.Get("Content-Length"))
					require.Zero(t, send.ContentLength)
					require.Zero(t, send.BodyLen)
				}
				require.Len(t, keysSent(sends), 1)
				require.Equal(t, 2, resp.StatusCode/100)
			})
		})
	}
}

func TestC06_ErrorOfTheBodyIsNoNetworkFault(t *testing.T) {
	gone := errors.New("the disk is gone")
	const size = 100
	healthy := strings.Repeat("h", size)
	for _, c := range []struct {
		name       string
		rewindable bool
		most       int64
		key        string // "" = made by the Transport
		attempts   int
		outcome    idem.Outcome
	}{
		{"read into memory first", false, 0, "", 0, idem.NotExecuted},
		{"read into memory first, key given", false, 0, "order-6", 0, idem.Unknown}, // the key may have a past
		{"streamed", false, -1, "", 1, idem.Unknown},
		{"streamed, key given", false, -1, "order-6", 1, idem.Unknown},
		{"rewindable", true, 0, "", 1, idem.Unknown},
		{"rewindable, key given", true, 0, "order-6", 0, idem.Unknown}, // it is read for the fingerprint first
	} {
		t.Run(c.name, func(t *testing.T) {
			var mu sync.Mutex // guards keys
			var keys []string
			url := rawServer(t, func(_ int, conn net.Conn, r *bufio.Reader) {
				for {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					mu.Lock()
					keys = append(keys, req.Header.Get("Idempotency-Key"))
					mu.Unlock()
					if n, err := io.Copy(io.Discard, req.Body); err != nil || n != size {
						return
					}
					_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				}
			})
			var closes []*closeCounter
			open := func() io.ReadCloser {
				r := &closeCounter{Reader: io.MultiReader(strings.NewReader(healthy[:10]), iotest.ErrReader(gone))}
				closes = append(closes, r)
				return r
			}
			ctx := t.Context()
			if c.key != "" {
				ctx = idem.WithKey(ctx, c.key)
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, open())
			require.NoError(t, err)
			req.ContentLength = size
			if c.rewindable {
				req.GetBody = func() (io.ReadCloser, error) { return open(), nil }
			}
			policy := casePolicy()
			policy.MaxRequestBuffer = c.most
			tr := &idem.Transport{Base: newBase(t), Policy: policy}
			start := time.Now()
			resp, err := tr.RoundTrip(req)
			require.Less(t, time.Since(start), 20*time.Second)
			require.Nil(t, resp)
			require.ErrorIs(t, err, gone)
			var e *idem.Error
			require.ErrorAs(t, err, &e)
			require.Len(t, e.Attempts, c.attempts)
			for _, a := range e.Attempts {
				require.Zero(t, a.Wait)
			}
			require.Equal(t, c.outcome, e.Outcome)
			for i, r := range closes {
				require.Eventually(t, func() bool { return r.closes.Load() > 0 }, 30*time.Second, time.Millisecond)
				require.EqualValues(t, 1, r.closes.Load(), "reader %d", i+1)
			}
			if c.key == "" {
				return
			}
			again, err := http.NewRequestWithContext(ctx, http.MethodPost, url, io.NopCloser(readOnce{strings.NewReader(healthy)}))
			require.NoError(t, err)
			again.ContentLength = size
			resp, err = tr.RoundTrip(again)
			require.NoError(t, err)
			readAll(t, resp)
			mu.Lock()
			defer mu.Unlock()
			for _, key := range keys {
				require.Equal(t, c.key, key)
			}
			require.Contains(t, keys, c.key)
		})
	}
}

func TestC07_BodyClosedByADialErrorIsOpenedAgain(t *testing.T) {
	for _, c := range countedBodies {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				content := strings.Repeat("b", 4096)
				refusals, arrived := 0, []string(nil)
				// It does not trace, so nothing is proved and the key must do.
				base := roundTripFunc(func(req *http.Request) (*http.Response, error) {
					defer func() { _ = req.Body.Close() }()
					if refusals == 0 {
						refusals++
						return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
					}
					text, err := io.ReadAll(req.Body)
					if err != nil {
						return nil, err
					}
					arrived = append(arrived, string(text))
					return answer(req, http.StatusOK, nil, "{}"), nil
				})
				policy := casePolicy()
				policy.MaxRequestBuffer = c.most
				l := new(closeLedger)
				req := newCountedPost(t, t.Context(), "http://pay.test/charge", content, c.rewindable, l)
				resp, err := (&idem.Transport{Base: base, Policy: policy}).RoundTrip(req)
				l.requireOnce(t)
				if c.most < 0 { // a stream has one attempt
					require.ErrorIs(t, err, idem.ErrBodyNotReplayable)
					require.ErrorIs(t, err, syscall.ECONNREFUSED)
					require.Empty(t, arrived)
					return
				}
				require.NoError(t, err)
				readAll(t, resp)
				require.Equal(t, []string{content}, arrived)
				require.Len(t, idem.ReportOf(resp).Attempts, 2)
			})
		})
	}
}

// closePaths are the ways through a RoundTrip, and out of it.
var closePaths = []struct {
	name   string
	faults []fakeserver.Fault
	edit   func(*idem.Transport)
	change func(*http.Request)
	ctx    func(*testing.T, context.Context) context.Context
	fails  error // that RoundTrip must give; nil: an answer
	sends  int   // -1: not looked at
}{
	{name: "answered at once", sends: 1},
	{name: "answered in the second attempt", faults: []fakeserver.Fault{{Kind: fakeserver.Status, Status: 503}}, sends: -1},
	{name: "refused in the first attempt", faults: []fakeserver.Fault{{Kind: fakeserver.Status, Status: 400}}, sends: 1},
	{name: "never answered well", faults: repeat(4, fakeserver.Fault{Kind: fakeserver.Status, Status: 503}), sends: -1},
	{name: "answered before the body is read", faults: repeat(4, fakeserver.Fault{Kind: fakeserver.EarlyAnswer, Status: 503}), sends: -1},
	{name: "finally answered before the body is read", faults: []fakeserver.Fault{{Kind: fakeserver.EarlyAnswer, Status: 413}}, sends: 1},
	{name: "reset every time", faults: repeat(4, fakeserver.Fault{Kind: fakeserver.Reset}), fails: syscall.ECONNRESET, sends: -1},
	{name: "reset within the body", faults: repeat(4, fakeserver.Fault{Kind: fakeserver.Reset, Bytes: 100}), fails: syscall.ECONNRESET, sends: -1},
	{name: "attempt limit within the body", faults: repeat(4, fakeserver.Fault{Kind: fakeserver.SlowRead, Delay: time.Minute}),
		edit: func(tr *idem.Transport) { tr.Policy.AttemptTimeout = time.Second }, fails: context.DeadlineExceeded, sends: -1},
	{name: "attempt limit after the body", faults: repeat(4, fakeserver.Fault{Kind: fakeserver.Hang}),
		edit: func(tr *idem.Transport) { tr.Policy.AttemptTimeout = time.Second }, fails: context.DeadlineExceeded, sends: -1},
	{name: "caller leaves during the attempt", faults: []fakeserver.Fault{{Kind: fakeserver.SlowRead, Delay: time.Minute}},
		ctx: leaving(time.Second), fails: errLeft, sends: 1},
	{name: "caller leaves during the wait", faults: []fakeserver.Fault{{Kind: fakeserver.Status, Status: 500, RetryAfter: "30"}},
		ctx: leaving(time.Second), fails: nil, sends: 1},
	{name: "single attempt fails", faults: []fakeserver.Fault{{Kind: fakeserver.Status, Status: 503}},
		edit: func(tr *idem.Transport) { tr.Policy.MaxAttempts = 1 }, sends: 1},
	{name: "context already done", ctx: leaving(0), fails: errLeft},
	{name: "blank key", change: func(r *http.Request) { r.Header.Set("Idempotency-Key", " ") }, fails: idem.ErrKeyInvalid},
	{name: "two keys", change: func(r *http.Request) { r.Header["Idempotency-Key"] = []string{"a", "b"} }, fails: idem.ErrKeyInvalid},
	{name: "key too long", ctx: func(_ *testing.T, ctx context.Context) context.Context {
		return idem.WithKey(ctx, strings.Repeat("k", 300))
	}, fails: idem.ErrKeyInvalid},
	{name: "operation without a name", ctx: func(_ *testing.T, ctx context.Context) context.Context {
		return idem.WithOperation(ctx, idem.Operation{ID: "1"})
	}, fails: idem.ErrInvalid},
	{name: "invalid policy", edit: func(tr *idem.Transport) { tr.Policy.MaxAttempts = -1 }, fails: idem.ErrInvalid},
	{name: "invalid dialect", edit: func(tr *idem.Transport) { tr.Dialect.MaxKey = 3 }, fails: idem.ErrInvalid},
	{name: "no URL", change: func(r *http.Request) { r.URL = nil }, fails: idem.ErrInvalid},
	{name: "no host", change: func(r *http.Request) { r.URL.Host = "" }, fails: idem.ErrInvalid},
	{name: "invalid method", change: func(r *http.Request) { r.Method = "PO ST" }, fails: idem.ErrInvalid},
	{name: "Prepare fails", edit: func(tr *idem.Transport) { tr.Prepare = func(*http.Request) error { return errLeft } }, fails: errLeft},
	{name: "Prepare reads", edit: func(tr *idem.Transport) { tr.Prepare = readingSigner }, sends: 1},
	{name: "Prepare changes the key", edit: func(tr *idem.Transport) {
		tr.Prepare = func(r *http.Request) error { r.Header.Set("Idempotency-Key", "mine"); return nil }
	}, fails: idem.ErrInvalid},
	{name: "Prepare changes the body", edit: func(tr *idem.Transport) {
		tr.Prepare = func(r *http.Request) error { r.Body = io.NopCloser(strings.NewReader("other")); return nil }
	}, fails: idem.ErrInvalid},
	{name: "scope changes", edit: func(tr *idem.Transport) {
		tr.Scope = func(r *http.Request) string { return r.Header.Get("Account") }
		tr.Prepare = func(r *http.Request) error { r.Header.Set("Account", "b"); return nil }
	}, fails: idem.ErrScopeChanged},
	{name: "key in use for another request", ctx: func(t *testing.T, ctx context.Context) context.Context {
		ctx = idem.WithKey(ctx, "order-1")
		other := &idem.Transport{Base: roundTripFunc(func(r *http.Request) (*http.Response, error) { return answer(r, 200, nil, ""), nil })}
		resp, err := other.RoundTrip(newPost(t, ctx, "http://pay.test/other", "other"))
		require.NoError(t, err)
		readAll(t, resp)
		return ctx
	}, fails: idem.ErrKeyReused},
}

var errLeft = errors.New("the caller has left")

func repeat(n int, f fakeserver.Fault) []fakeserver.Fault {
	all := make([]fakeserver.Fault, n)
	for i := range all {
		all[i] = f
	}
	return all
}

// leaving ends the context with errLeft after d.
func leaving(d time.Duration) func(*testing.T, context.Context) context.Context {
	return func(t *testing.T, ctx context.Context) context.Context {
		ctx, cancel := context.WithCancelCause(ctx)
		if d == 0 {
			cancel(errLeft)
			return ctx
		}
		timer := time.AfterFunc(d, func() { cancel(errLeft) })
		t.Cleanup(func() { timer.Stop(); cancel(nil) })
		return ctx
	}
}

// readingSigner reads the body through GetBody and closes its reader, as a
// signer should.
func readingSigner(r *http.Request) error {
	if r.GetBody == nil {
		return nil
	}
	rc, err := r.GetBody()
	if err != nil {
		return err
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, rc); err != nil {
		return err
	}
	r.Header.Set("Signature", hex.EncodeToString(sum.Sum(nil)))
	return rc.Close()
}

func TestC07_CallersBodyIsClosedOnceOnEveryPath(t *testing.T) {
	for _, path := range closePaths {
		for _, c := range countedBodies {
			t.Run(path.name+", "+c.name, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Script("", path.faults...))
					tr := over(s, func(tr *idem.Transport) {
						tr.Policy.MaxRequestBuffer = c.most
						if path.edit != nil {
							path.edit(tr)
						}
					})
					ctx := t.Context()
					if path.ctx != nil {
						ctx = path.ctx(t, ctx)
					}
					l := new(closeLedger)
					// Longer than the window of a connection, so that it is
					// still being written when an early answer comes.
					req := newCountedPost(t, ctx, s.URL()+"/v1/uploads", strings.Repeat("b", 200<<10), c.rewindable, l)
					if path.change != nil {
						path.change(req)
					}
					resp, err := tr.RoundTrip(req)
					if resp != nil {
						readAll(t, resp)
					}
					tr.CloseIdleConnections()
					time.Sleep(time.Minute) // the base may close it after RoundTrip has returned
					synctest.Wait()
					l.requireOnce(t)
					if path.sends >= 0 {
						require.Len(t, s.Sends(), path.sends)
					}
					if path.fails != nil {
						require.ErrorIs(t, err, path.fails)
					}
				})
			})
		}
	}
}

func TestC07_CallersFileIsClosedOnEveryPath(t *testing.T) {
	content := strings.Repeat("f", 200<<10)
	for _, path := range closePaths {
		t.Run(path.name, func(t *testing.T) {
			name := writeFile(t, content)
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", path.faults...))
				tr := over(s, func(tr *idem.Transport) {
					if path.edit != nil {
						path.edit(tr)
					}
				})
				ctx := t.Context()
				if path.ctx != nil {
					ctx = path.ctx(t, ctx)
				}
				f, err := os.Open(name)
				require.NoError(t, err)
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/uploads", f)
				require.NoError(t, err)
				if path.change != nil {
					path.change(req)
				}
				resp, err := tr.RoundTrip(req)
				if resp != nil {
					readAll(t, resp)
				}
				tr.CloseIdleConnections()
				time.Sleep(time.Minute) // the base may close it after RoundTrip has returned
				synctest.Wait()
				require.ErrorIs(t, f.Close(), os.ErrClosed)
				if path.sends >= 0 {
					require.Len(t, s.Sends(), path.sends)
				}
				if path.fails != nil {
					require.ErrorIs(t, err, path.fails)
				}
			})
		})
	}
}

// writeFile makes a file that is removed with the test.
func writeFile(t *testing.T, content string) (name string) {
	t.Helper()
	name = filepath.Join(t.TempDir(), "body")
	require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
	return name
}

// withoutGetBodyOnHops is a layer that loses GetBody when http.Client follows
// a redirect, as net/http itself once did.
type withoutGetBodyOnHops struct{ next http.RoundTripper }

func (w withoutGetBodyOnHops) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Response != nil {
		c := *req
		c.GetBody = nil
		req = &c
	}
	return w.next.RoundTrip(req)
}

func TestC08_RedirectKeepsTheWholeBody(t *testing.T) {
	content := paddedPayment("order-8", 4096)
	ways := map[string]func(t *testing.T, tr *idem.Transport, url string, l *closeLedger) (*http.Response, error){
		"http.Client": func(t *testing.T, tr *idem.Transport, url string, l *closeLedger) (*http.Response, error) {
			return (&http.Client{Transport: tr}).Do(newCountedPost(t, t.Context(), url, content, true, l))
		},
		"http.Client, key given": func(t *testing.T, tr *idem.Transport, url string, l *closeLedger) (*http.Response, error) {
			ctx := idem.WithKey(t.Context(), "order-8")
			return (&http.Client{Transport: tr}).Do(newCountedPost(t, ctx, url, content, true, l))
		},
		"http.Client, hop without GetBody": func(t *testing.T, tr *idem.Transport, url string, l *closeLedger) (*http.Response, error) {
			return (&http.Client{Transport: withoutGetBodyOnHops{tr}}).Do(newCountedPost(t, t.Context(), url, content, true, l))
		},
		"Client": func(t *testing.T, tr *idem.Transport, url string, l *closeLedger) (*http.Response, error) {
			return idem.NewClient(tr).Do(newCountedPost(t, t.Context(), url, content, true, l))
		},
		"Client, body read once": func(t *testing.T, tr *idem.Transport, url string, l *closeLedger) (*http.Response, error) {
			return idem.NewClient(tr).Do(newCountedPost(t, t.Context(), url, content, false, l))
		},
		"Client, body read once, key given": func(t *testing.T, tr *idem.Transport, url string, l *closeLedger) (*http.Response, error) {
			ctx := idem.WithKey(t.Context(), "order-8")
			return idem.NewClient(tr).Do(newCountedPost(t, ctx, url, content, false, l))
		},
	}
	for name, call := range ways {
		for _, status := range []int{http.StatusTemporaryRedirect, http.StatusPermanentRedirect} {
			t.Run(fmt.Sprintf("%s, %d", name, status), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Script("",
						fakeserver.Fault{Kind: fakeserver.Redirect, Status: status, Location: "/v1/uploads"},
						fakeserver.Fault{Kind: fakeserver.Status, Status: 503},
						fakeserver.Fault{}))
					tr := over(s)
					l := new(closeLedger)
					resp, err := call(t, tr, s.URL()+"/v1/payments", l)
					require.NoError(t, err)
					readAll(t, resp)
					tr.CloseIdleConnections()
					synctest.Wait()

					require.Len(t, s.Effects(), 1)
					sends := s.Sends()
					require.Len(t, sends, 3)
					require.Equal(t, []string{"/v1/payments", "/v1/uploads", "/v1/uploads"},
						[]string{sends[0].Path, sends[1].Path, sends[2].Path})
					requireWhole(t, sends, content)
					require.Len(t, keysSent(sends), 1)
					require.Equal(t, http.StatusCreated, resp.StatusCode)
					require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
					l.requireOnceButForHTTPClient(t)
				})
			})
		}
	}
}

func TestRefusedRedirectClosesTheBody(t *testing.T) {
	for _, c := range countedBodies {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Redirect, Location: "other"}))
				tr := over(s, func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer = c.most })
				l := new(closeLedger)
				resp, err := idem.NewClient(tr).Do(newCountedPost(t, t.Context(), s.URL()+"/v1/uploads", "content", c.rewindable, l))
				if resp != nil { // a stream cannot follow
					require.Equal(t, http.StatusTemporaryRedirect, resp.StatusCode)
					readAll(t, resp)
				} else {
					require.ErrorIs(t, err, idem.ErrRedirectRefused)
				}
				tr.CloseIdleConnections()
				synctest.Wait()
				require.Len(t, s.Sends(), 1)
				l.requireOnceButForHTTPClient(t)
			})
		})
	}
}

// scrambler is a reader that embeds a file, as an encrypting one may: its
// own Read is what counts, not the file's ReadAt.
type scrambler struct{ *os.File }

func (s scrambler) Read(p []byte) (int, error) {
	n, err := s.File.Read(p)
	for i := range p[:n] {
		p[i] ^= 0x20
	}
	return n, err
}

func TestBodyIsSentFromItsCurrentOffset(t *testing.T) {
	content := strings.Repeat("0123456789", 1000)
	const off = 3333
	rest := content[off:]
	skip := func(t *testing.T, r io.Reader) {
		_, err := io.CopyN(io.Discard, r, off)
		require.NoError(t, err)
	}
	for _, c := range []struct {
		name string
		open func(t *testing.T, name string) io.Reader
		want string
	}{
		{"file", func(t *testing.T, name string) io.Reader {
			f, err := os.Open(name)
			require.NoError(t, err)
			skip(t, f)
			return f
		}, rest},
		{"bytes.Reader in a NopCloser", func(t *testing.T, _ string) io.Reader {
			r := bytes.NewReader([]byte(content))
			skip(t, r)
			return io.NopCloser(r)
		}, rest},
		{"strings.Reader in a NopCloser", func(t *testing.T, _ string) io.Reader {
			r := strings.NewReader(content)
			skip(t, r)
			return io.NopCloser(r)
		}, rest},
		{"io.SectionReader", func(t *testing.T, _ string) io.Reader {
			r := io.NewSectionReader(strings.NewReader("before"+content+"after"), int64(len("before")), int64(len(content)))
			skip(t, r)
			return r
		}, rest},
		{"bytes.Buffer in a NopCloser", func(t *testing.T, _ string) io.Reader {
			r := bytes.NewBufferString(content)
			skip(t, r)
			return io.NopCloser(r)
		}, rest},
		{"reader that embeds a file", func(t *testing.T, name string) io.Reader {
			f, err := os.Open(name)
			require.NoError(t, err)
			return scrambler{f}
		}, strings.Map(func(r rune) rune { return r ^ 0x20 }, content)},
	} {
		for _, known := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, length known %v", c.name, known), func(t *testing.T) {
				name := writeFile(t, content)
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Script("",
						fakeserver.Fault{Kind: fakeserver.Status, Status: 503},
						fakeserver.Fault{Kind: fakeserver.Reset},
						fakeserver.Fault{}))
					body := c.open(t, name)
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/uploads", body)
					require.NoError(t, err)
					require.Nil(t, req.GetBody)
					if known {
						req.ContentLength = int64(len(c.want))
					}
					resp, err := over(s).RoundTrip(req)
					require.NoError(t, err)
					readAll(t, resp)
					sends := s.Sends()
					require.Len(t, sends, 3)
					requireWhole(t, sends, c.want)
					require.Len(t, keysSent(sends), 1)
					if f, ok := body.(*os.File); ok {
						synctest.Wait() // net/http may close it behind the answer
						require.ErrorIs(t, f.Close(), os.ErrClosed)
					}
				})
			})
		}
	}
}

func TestOnlyPartOfALongerBodyIsSentWhereContentLengthSaysSo(t *testing.T) {
	name := writeFile(t, "0123456789")
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, fakeserver.Fault{}))
		f, err := os.Open(name)
		require.NoError(t, err)
		_, err = f.Seek(2, io.SeekStart)
		require.NoError(t, err)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/uploads", f)
		require.NoError(t, err)
		req.ContentLength = 5
		resp, err := over(s).RoundTrip(req)
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Sends(), 2)
		requireWhole(t, s.Sends(), "23456")
	})
}

func TestContentLengthThatTheBodyDoesNotKeepIsRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		body   io.Reader
		length int64
	}{
		{"reader too short", readOnce{strings.NewReader("abc")}, 4},
		{"reader too long", readOnce{strings.NewReader("abc")}, 2},
		{"section too short", io.NopCloser(bytes.NewReader([]byte("abc"))), 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/uploads", c.body)
				require.NoError(t, err)
				req.ContentLength = c.length
				_, err = over(s).RoundTrip(req)
				require.ErrorIs(t, err, idem.ErrInvalid)
				require.ErrorContains(t, err, "ContentLength")
				require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
				require.Empty(t, s.Sends())
			})
		})
	}
}

func TestReaderUpToTheBufferLimitIsRetriedAndALongerOneIsNot(t *testing.T) {
	const limit = 1000
	for _, c := range []struct {
		size, sends int
		known       bool
	}{
		{limit - 1, 2, true}, {limit, 2, true}, {limit + 1, 1, true},
		{limit - 1, 2, false}, {limit, 2, false}, {limit + 1, 1, false}, {10 * limit, 1, false},
	} {
		t.Run(fmt.Sprintf("%d bytes, length known %v", c.size, c.known), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, fakeserver.Fault{}))
				content := strings.Repeat("c", c.size)
				req := newPostOnce(t, t.Context(), s.URL()+"/v1/uploads", content)
				if c.known {
					req.ContentLength = int64(c.size)
				}
				resp, err := over(s, func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer = limit }).RoundTrip(req)
				require.NoError(t, err)
				readAll(t, resp)
				sends := s.Sends()
				require.Len(t, sends, c.sends)
				sum := sha256.Sum256([]byte(content))
				for _, send := range sends {
					require.Equal(t, hex.EncodeToString(sum[:]), send.BodySHA256)
				}
				if c.sends == 1 {
					require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrBodyNotReplayable)
					require.Equal(t, c.known, sends[0].ContentLength == int64(c.size))
				} else {
					require.NoError(t, idem.ReportOf(resp).Reason)
					require.EqualValues(t, c.size, sends[1].ContentLength)
				}
			})
		})
	}
}

func TestBodyReadOnceEndsInATypedErrorThatSaysWhy(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
		tr := over(s, func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer = -1 })
		_, err := idem.NewClient(tr).Do(newPostOnce(t, t.Context(), s.URL()+"/v1/uploads", "content"))
		require.Len(t, s.Sends(), 1)
		require.ErrorIs(t, err, idem.ErrBodyNotReplayable)
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, http.StatusServiceUnavailable, e.StatusCode)
		require.Contains(t, string(e.Body), "injected-fault")
		require.Equal(t, idem.Unknown, e.Outcome)
	})
}

func TestFileThatChangesBetweenAttemptsIsNotSentAgain(t *testing.T) {
	for change, f := range map[string]func(*testing.T, string){
		"grown":  func(t *testing.T, name string) { appendTo(t, name, "more") },
		"shrunk": func(t *testing.T, name string) { require.NoError(t, os.Truncate(name, 3)) },
		"rewritten": func(t *testing.T, name string) {
			require.NoError(t, os.WriteFile(name, []byte("CONTENT"), 0o600))
			later := time.Date(2040, 1, 1, 0, 0, 0, 0, time.UTC)
			require.NoError(t, os.Chtimes(name, later, later))
		},
	} {
		t.Run(change, func(t *testing.T) {
			name := writeFile(t, "content")
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
				file, err := os.Open(name)
				require.NoError(t, err)
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/uploads", file)
				require.NoError(t, err)
				tr := over(s, func(tr *idem.Transport) {
					tr.Hooks.Waiting = func(context.Context, *idem.Report, idem.Attempt) { f(t, name) }
				})
				_, err = tr.RoundTrip(req)
				require.Empty(t, s.Effects())
				require.Len(t, s.Sends(), 1)
				require.ErrorIs(t, err, idem.ErrBodyChanged)
				require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err)) // the 503 says nothing
				require.ErrorIs(t, file.Close(), os.ErrClosed)
			})
		})
	}
}

func appendTo(t *testing.T, name, text string) {
	f, err := os.OpenFile(name, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(text)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

func TestGetBodyThatReturnsOtherContentIsNotSent(t *testing.T) {
	const first = "the first content"
	for _, c := range []struct{ name, second string }{
		{"longer", "not " + first},
		{"shorter", "short"},
		{"empty", ""},
		{"same length", "the OTHER content"},
	} {
		for _, key := range []string{"", "order-1"} {
			t.Run(fmt.Sprintf("%s, key %q", c.name, key), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
					ctx := t.Context()
					if key != "" {
						ctx = idem.WithKey(ctx, key)
					}
					l := new(closeLedger)
					var changed atomic.Bool
					req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/uploads", l.open(first))
					require.NoError(t, err)
					req.ContentLength = int64(len(first))
					req.GetBody = func() (io.ReadCloser, error) {
						if changed.Load() {
							return l.open(c.second), nil
						}
						return l.open(first), nil
					}
					tr := over(s, func(tr *idem.Transport) {
						tr.Hooks.Waiting = func(context.Context, *idem.Report, idem.Attempt) { changed.Store(true) }
					})
					_, err = tr.RoundTrip(req)
					tr.CloseIdleConnections()
					synctest.Wait()
					require.Empty(t, s.Effects())
					require.ErrorIs(t, err, idem.ErrBodyChanged)
					require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
					l.requireOnce(t)
				})
			})
		}
	}
}

func TestGetBodyThatFailsEndsTheOperationWithItsError(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
		gone := errors.New("the source is gone")
		l := new(closeLedger)
		req := newCountedPost(t, t.Context(), s.URL()+"/v1/uploads", "content", true, l)
		req.GetBody = func() (io.ReadCloser, error) { return nil, gone }
		tr := over(s)
		_, err := tr.RoundTrip(req)
		tr.CloseIdleConnections()
		synctest.Wait()
		require.Len(t, s.Sends(), 1)
		require.ErrorIs(t, err, gone)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, http.StatusServiceUnavailable, e.StatusCode)
		l.requireOnce(t)
	})
}

func TestRequestAndItsBodyAreNotChanged(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, fakeserver.Fault{}))
		req := newPayment(t, t.Context(), s, "order-1")
		body, header, u, length := req.Body, req.Header.Clone(), *req.URL, req.ContentLength
		resp, err := over(s, func(tr *idem.Transport) { tr.Prepare = readingSigner }).RoundTrip(req)
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Sends(), 2)
		require.True(t, body == req.Body)
		require.NotNil(t, req.GetBody)
		require.Equal(t, header, req.Header)
		require.Equal(t, &u, req.URL)
		require.Equal(t, length, req.ContentLength)
	})
}

func TestPrepareMayDrainTheBody(t *testing.T) {
	for _, c := range countedBodies[:2] {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, fakeserver.Fault{}))
				tr := over(s, func(tr *idem.Transport) {
					tr.Prepare = func(r *http.Request) error {
						_, err := io.Copy(io.Discard, r.Body) // and leaves it at its end
						return err
					}
				})
				content := paddedPayment("order-1", 4096)
				l := new(closeLedger)
				resp, err := tr.RoundTrip(newCountedPost(t, t.Context(), s.URL()+"/v1/payments", content, c.rewindable, l))
				require.NoError(t, err)
				readAll(t, resp)
				tr.CloseIdleConnections()
				synctest.Wait()
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 2)
				requireWhole(t, s.Sends(), content)
				l.requireOnce(t)
			})
		})
	}
}

// The answer is handed over while the base still reads the file, which must
// stay open until that is over.
func TestFileStaysOpenForABaseThatStillReadsIt(t *testing.T) {
	name := writeFile(t, "0123456789")
	virtual(t, func(t *testing.T) {
		var read string
		var readErr error
		base := roundTripFunc(func(req *http.Request) (*http.Response, error) {
			go func() {
				time.Sleep(time.Second)
				b, err := io.ReadAll(req.Body)
				read, readErr = string(b), err
				_ = req.Body.Close()
			}()
			return answer(req, http.StatusRequestEntityTooLarge, nil, ""), nil
		})
		f, err := os.Open(name)
		require.NoError(t, err)
		u, err := url.Parse("http://pay.test/upload")
		require.NoError(t, err)
		req := (&http.Request{Method: http.MethodPost, URL: u, Header: http.Header{}, Body: f}).WithContext(t.Context())
		resp, err := (&idem.Transport{Base: base, Policy: casePolicy()}).RoundTrip(req)
		require.NoError(t, err)
		readAll(t, resp)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.NoError(t, readErr)
		require.Equal(t, "0123456789", read)
		require.ErrorIs(t, f.Close(), os.ErrClosed)
	})
}
