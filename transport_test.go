package idem_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

const wireURL = "http://api.test/v1/payments"

// always answers every send with one status.
func always(status int) func(int, *http.Request) (*http.Response, error) {
	return func(_ int, req *http.Request) (*http.Response, error) {
		return answer(req, status, jsonType(), `{"title":"scripted"}`), nil
	}
}

// oneKey requires that every send carried one and the same key, and returns it.
func oneKey(t testing.TB, sends []wireSend) string {
	t.Helper()
	require.NotEmpty(t, sends)
	for _, s := range sends {
		require.Len(t, s.keys, 1)
		require.Equal(t, sends[0].keys[0], s.keys[0])
	}
	return sends[0].keys[0]
}

// heapInUse is what is still reachable.
func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestC46_CancelledWaitsLeaveNothingBehind(t *testing.T) {
	const operations, workers = 10_000, 200
	base := roundTripFunc(func(req *http.Request) (*http.Response, error) {
		_ = req.Body.Close()
		return answer(req, 503, http.Header{"Retry-After": {"300"}}, ""), nil
	})
	tr := onWire(base, func(tr *idem.Transport) {
		tr.Policy.MaxRetryAfter, tr.Policy.MaxElapsed = 10*time.Minute, time.Hour
	})
	goroutines, heap := runtime.NumGoroutine(), heapInUse()
	var wrong atomic.Int32
	var wg sync.WaitGroup
	for range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range operations / workers {
				ctx, cancel := context.WithCancel(t.Context())
				timer := time.AfterFunc(time.Millisecond, cancel)
				_, err := tr.RoundTrip(newPost(t, ctx, wireURL, `{}`))
				if !errors.Is(err, context.Canceled) {
					wrong.Add(1)
				}
				timer.Stop()
				cancel()
			}
		}()
	}
	wg.Wait()
	require.Zero(t, wrong.Load(), "each call ends with its context")
	goroutinesBackTo(t, goroutines)
	require.Less(t, heapInUse()-heap, int64(4<<20))
}

func TestC46_UnsetMaxElapsedIsTheDefaultAndStillRetries(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: always(500)}
		tr := onWire(w, func(tr *idem.Transport) {
			tr.Policy.MaxAttempts = 1000
			tr.Policy.BackoffBase, tr.Policy.BackoffCap = time.Second, time.Second
		})
		start := time.Now()
		resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrTimeExhausted)
		require.Greater(t, len(w.seen()), 100)
		oneKey(t, w.seen())
		require.LessOrEqual(t, time.Since(start), 2*time.Minute)
		require.Greater(t, time.Since(start), 2*time.Minute-2*time.Second)
	})
}

func TestC46_NoAttemptStartsAfterMaxElapsed(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: always(503)}
		tr := onWire(w, func(tr *idem.Transport) {
			tr.Policy.MaxAttempts, tr.Policy.MaxElapsed = 100, 50*time.Millisecond
		})
		start := time.Now()
		resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.Equal(t, 503, resp.StatusCode)
		report := idem.ReportOf(resp)
		require.ErrorIs(t, report.Reason, idem.ErrTimeExhausted)
		require.LessOrEqual(t, time.Since(start), 50*time.Millisecond)
		for _, a := range report.Attempts {
			require.LessOrEqual(t, a.Start.Sub(start), 50*time.Millisecond)
		}
	})
}

func TestC47_FinishedKeysLeaveNothingBehind(t *testing.T) {
	const workers = 50
	operations := 200_000
	if raceDetector {
		operations = 40_000 // it makes each ten times as long, and its shadow memory is not the heap's
	}
	base := roundTripFunc(func(req *http.Request) (*http.Response, error) {
		_ = req.Body.Close()
		return &http.Response{StatusCode: 201, Header: http.Header{}, Body: http.NoBody, Request: req}, nil
	})
	tr := onWire(base)
	u, err := url.Parse(wireURL)
	require.NoError(t, err)
	run := func(from, to int) {
		var wg sync.WaitGroup
		for w := range workers {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := from + w; i < to; i += workers {
					ctx := idem.WithKey(context.Background(), "order-"+strconv.Itoa(i))
					req := (&http.Request{Method: http.MethodPost, URL: u, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{}")), ContentLength: 2}).WithContext(ctx)
					if resp, err := tr.RoundTrip(req); err != nil || idem.OutcomeOf(resp, nil) != idem.Executed {
						t.Errorf("operation %d: %v", i, err)
					}
				}
			}()
		}
		wg.Wait()
	}
	run(0, 1000)
	heap := heapInUse()
	run(1000, operations)
	require.Less(t, heapInUse()-heap, int64(10<<20))
	runtime.KeepAlive(tr)
}

func TestC59_CallersHeaderMayBeReadAndSharedDuringACall(t *testing.T) {
	w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
		req.Header.Set("X-Base", "was here") // a base may do that to what it is given
		req.Header.Add("X-Caller", "base")
		if n%2 == 1 {
			return answer(req, 500, nil, ""), nil
		}
		return answer(req, 201, nil, ""), nil
	}}
	tr := onWire(w, func(tr *idem.Transport) {
		tr.Policy.BackoffBase = time.Millisecond
		tr.Prepare = func(req *http.Request) error {
			req.Header.Set("Authorization", "Bearer fresh")
			req.Header.Add("X-Caller", "prepared")
			return nil
		}
	})
	shared := http.Header{"X-Caller": make([]string, 1, 8), "Content-Type": {"application/json"}}
	shared["X-Caller"][0] = "mine"
	before := shared.Clone()
	stop := make(chan struct{})
	var reading, calling sync.WaitGroup
	reading.Add(1)
	go func() {
		defer reading.Done()
		for {
			select {
			case <-stop:
				return
			default:
				_ = shared.Clone()
			}
		}
	}()
	for range 2 {
		calling.Add(1)
		go func() {
			defer calling.Done()
			for range 50 {
				req := newPost(t, t.Context(), wireURL, `{}`)
				req.Header = shared
				body, u := req.Body, req.URL
				resp, err := tr.RoundTrip(req)
				if err != nil || resp.Body.Close() != nil {
					t.Errorf("RoundTrip: %v", err)
				}
				if req.Body != body || req.URL != u {
					t.Error("the caller's request was changed")
				}
			}
		}()
	}
	calling.Wait()
	close(stop)
	reading.Wait()
	require.Equal(t, before, shared)
	require.Equal(t, []string{"mine"}, shared["X-Caller"][:1:1])
	require.Equal(t, []string{"mine", ""}, shared["X-Caller"][:2], "nothing was written behind the caller's value")
}

func TestC59_AttemptWhoseWriteLoopIsAliveKeepsItsOwnHeader(t *testing.T) {
	virtual(t, func(t *testing.T) {
		heads := make(chan http.Header, 2)
		url, base := rawInMemory(t, func(n int, c net.Conn, r *bufio.Reader) {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			heads <- req.Header
			if n == 1 {
				time.Sleep(300 * time.Millisecond) // the client's write of the body is stuck meanwhile
				return
			}
			got, _ := io.Copy(io.Discard, req.Body)
			text := strconv.FormatInt(got, 10)
			_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
			_, _ = r.ReadByte()
		})
		var prepared atomic.Int32
		tr := onWire(base, func(tr *idem.Transport) {
			tr.Policy.AttemptTimeout = 100 * time.Millisecond
			tr.Prepare = func(req *http.Request) error {
				n := prepared.Add(1)
				for i := range 100 {
					req.Header.Set("X-Signed-"+strconv.Itoa(i), strconv.Itoa(int(n)))
				}
				req.Header.Add("X-Caller", "prepared "+strconv.Itoa(int(n)))
				return nil
			}
		})
		req := newPost(t, t.Context(), url, strings.Repeat("x", 8<<20))
		req.Header.Set("X-Caller", "mine")
		before := req.Header.Clone()
		resp, err := tr.RoundTrip(req)
		require.NoError(t, err)
		require.Equal(t, strconv.Itoa(8<<20), readAll(t, resp))
		require.Equal(t, before, req.Header)
		first, second := <-heads, <-heads
		require.NotEmpty(t, first.Get("Idempotency-Key"))
		require.Equal(t, first.Get("Idempotency-Key"), second.Get("Idempotency-Key"))
		require.Equal(t, []string{"mine", "prepared 1"}, first.Values("X-Caller"))
		require.Equal(t, []string{"mine", "prepared 2"}, second.Values("X-Caller"))
	})
}

// stairs is a generator with state: 1 ms, 2 ms, 3 ms ...
type stairs struct{ n int }

func (s *stairs) NextBackOff() time.Duration { s.n++; return time.Duration(s.n) * time.Millisecond }
func (s *stairs) Reset()                     { s.n = 0 }

// flaky is a base with a memory for keys: it executes a key once, and loses or
// refuses up to three sends of each at random, before or after the effect.
type flaky struct {
	mu      sync.Mutex // guards what follows
	sends   map[string]int
	effects map[string]int
}

func (f *flaky) RoundTrip(req *http.Request) (*http.Response, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if trace := httptrace.ContextClientTrace(req.Context()); trace != nil {
		trace.GetConn(req.URL.Host)
		trace.GotConn(httptrace.GotConnInfo{})
	}
	_, _ = io.Copy(io.Discard, req.Body)
	_ = req.Body.Close()
	key := req.Header.Get("Idempotency-Key")
	f.sends[key]++
	fate := rand.IntN(4)
	if f.sends[key] > 3 {
		fate = 3
	}
	if fate > 0 && f.effects[key] == 0 {
		f.effects[key]++
	}
	switch fate {
	case 0, 1:
		return answer(req, 500, nil, ""), nil
	case 2:
		return nil, io.ErrUnexpectedEOF
	}
	return answer(req, 201, jsonType(), `{}`), nil
}

func TestC60_ManyOperationsShareOneTransport(t *testing.T) {
	const goroutines, each = 200, 50
	virtual(t, func(t *testing.T) {
		f := &flaky{sends: map[string]int{}, effects: map[string]int{}}
		tr := onWire(f, func(tr *idem.Transport) {
			tr.Policy.Backoff = func() backoff.BackOff { return &stairs{} }
		})
		var wg sync.WaitGroup
		for g := range goroutines {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := range each {
					resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
					if err != nil {
						t.Errorf("operation %d of %d: %v", i, g, err)
						return
					}
					_ = resp.Body.Close()
					report := idem.ReportOf(resp)
					if report.Outcome != idem.Executed || resp.StatusCode != 201 {
						t.Errorf("operation %d of %d: %v, status %d", i, g, report.Outcome, resp.StatusCode)
					}
					for n, a := range report.Attempts[:len(report.Attempts)-1] {
						if a.Wait != time.Duration(n+1)*time.Millisecond {
							t.Errorf("operation %d of %d: wait %d is %v", i, g, n+1, a.Wait)
						}
					}
				}
			}()
		}
		wg.Wait()
		require.Len(t, f.effects, goroutines*each, "distinct keys")
		sum := 0
		for key, n := range f.effects {
			require.Equal(t, 1, n)
			sum += f.sends[key]
		}
		require.Greater(t, sum, goroutines*each*2, "faults did strike")
	})
}

// slowToLeave is a base whose hanging attempt takes its time to return after
// it was cancelled.
type slowToLeave struct {
	mu       sync.Mutex // guards what follows
	running  int
	together int // the most that ran at once
	left     []time.Time
	entered  []time.Time
	ctxs     []context.Context
}

func (b *slowToLeave) RoundTrip(req *http.Request) (*http.Response, error) {
	b.mu.Lock()
	n := len(b.entered) + 1
	b.entered = append(b.entered, time.Now())
	b.ctxs = append(b.ctxs, req.Context())
	b.running++
	b.together = max(b.together, b.running)
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.running--
		b.left = append(b.left, time.Now())
		b.mu.Unlock()
	}()
	_ = req.Body.Close()
	if n < 3 {
		<-req.Context().Done()
		time.Sleep(time.Second)
		return nil, req.Context().Err()
	}
	return answer(req, 200, jsonType(), "{}"), nil
}

func TestC62_AttemptsOfAnOperationNeverOverlap(t *testing.T) {
	virtual(t, func(t *testing.T) {
		base := &slowToLeave{}
		tr := onWire(base, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
		resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.Equal(t, "{}", readAll(t, resp))
		require.Equal(t, 1, base.together)
		require.Len(t, base.entered, 3)
		for i := 1; i < 3; i++ {
			require.Error(t, base.ctxs[i-1].Err(), "attempt %d is cancelled", i)
			require.False(t, base.entered[i].Before(base.left[i-1]), "attempt %d has returned before the next starts", i)
		}
	})
}

func TestC67_TransportInsideATransportDoesNotMultiply(t *testing.T) {
	three := func(tr *idem.Transport) { tr.Policy.MaxAttempts = 3 }
	for _, c := range []struct {
		name string
		req  func(*testing.T) *http.Request
	}{
		{"minted key", func(t *testing.T) *http.Request { return newPost(t, t.Context(), wireURL, `{}`) }},
		{"key of an operation", func(t *testing.T) *http.Request {
			return newPost(t, idem.WithOperation(t.Context(), idem.Operation{Name: "refund", ID: "77"}), wireURL, `{}`)
		}},
		{"key in the header", func(t *testing.T) *http.Request {
			req := newPost(t, t.Context(), wireURL, `{}`)
			req.Header.Set("Idempotency-Key", "order-77")
			return req
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				w := &wire{serve: always(503)}
				outer := &idem.Transport{Base: onWire(w, three), Policy: casePolicy()}
				three(outer)
				resp, err := outer.RoundTrip(c.req(t))
				require.NoError(t, err)
				require.Len(t, w.seen(), 3)
				oneKey(t, w.seen())
				report := idem.ReportOf(resp)
				require.Len(t, report.Attempts, 3)
				require.Equal(t, 3, report.Sends)
				require.ErrorIs(t, report.Reason, idem.ErrAttemptsExhausted)
				require.NoError(t, resp.Body.Close())
			})
		})
	}
	t.Run("no key", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			w := &wire{serve: always(503)}
			outer := &idem.Transport{Base: onWire(w, three), Policy: casePolicy()}
			three(outer)
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, wireURL+"?page=2", nil)
			require.NoError(t, err)
			resp, err := outer.RoundTrip(req)
			require.NoError(t, err)
			require.Len(t, w.seen(), 3)
			require.Len(t, idem.ReportOf(resp).Attempts, 3)
			require.NoError(t, resp.Body.Close())
		})
	})
	t.Run("a loop written by hand keeps the key of its operation", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			w := &wire{serve: always(503)}
			tr := onWire(w, three)
			ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-77/1"})
			for range 3 {
				resp, err := tr.RoundTrip(newPost(t, ctx, wireURL, `{}`))
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
			}
			require.Len(t, w.seen(), 9)
			oneKey(t, w.seen())
		})
	})
}

func TestOtherRequestsUnderAnAttemptsContextAreProtected(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{}
		failed := map[string]bool{}
		w.serve = func(_ int, req *http.Request) (*http.Response, error) {
			if !failed[req.URL.Path] {
				failed[req.URL.Path] = true
				return answer(req, 503, nil, ""), nil
			}
			return answer(req, 201, nil, ""), nil
		}
		tr := onWire(w)
		var asked *http.Response
		tr.Prepare = func(req *http.Request) error {
			if asked != nil {
				return nil
			}
			r, err := http.NewRequestWithContext(req.Context(), http.MethodPost, "http://login.test/token", strings.NewReader("a=b"))
			if err != nil {
				return err
			}
			asked, err = (&idem.Transport{Base: w, Policy: casePolicy()}).RoundTrip(r)
			return err
		}
		resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.Equal(t, 201, resp.StatusCode)
		require.Equal(t, 201, asked.StatusCode, "the other request was retried by its own layer")
		keys := map[string][]string{}
		for _, s := range w.seen() {
			require.Len(t, s.keys, 1)
			keys[s.url] = append(keys[s.url], s.keys[0])
		}
		require.Len(t, keys[wireURL], 2)
		require.Len(t, keys["http://login.test/token"], 2)
		require.NotEqual(t, keys[wireURL][0], keys["http://login.test/token"][0])
		require.Equal(t, keys["http://login.test/token"][0], keys["http://login.test/token"][1])
		require.Equal(t, "http://login.test/token", asked.Request.URL.String())
		require.NotEqual(t, idem.ReportOf(resp).Key, idem.ReportOf(asked).Key)
	})
}

// tokenGate stands before the server and lets through what bears a token that
// is valid by the clock, unless it has fallen out with everybody.
type tokenGate struct {
	base   http.RoundTripper
	closed func(n int) bool
	seen   []wireSend
}

func (g *tokenGate) RoundTrip(req *http.Request) (*http.Response, error) {
	g.seen = append(g.seen, wireSend{keys: req.Header.Values("Idempotency-Key"), header: req.Header.Clone()})
	_, text, _ := strings.Cut(req.Header.Get("Authorization"), ".")
	until, err := strconv.ParseInt(text, 10, 64)
	if err != nil || time.Now().Unix() >= until || g.closed != nil && g.closed(len(g.seen)) {
		if trace := httptrace.ContextClientTrace(req.Context()); trace != nil {
			trace.GetConn(req.URL.Host)
			trace.GotConn(httptrace.GotConnInfo{})
		}
		_, _ = io.Copy(io.Discard, req.Body)
		_ = req.Body.Close()
		return answer(req, 401, nil, "token expired"), nil
	}
	return g.base.RoundTrip(req)
}

// signer keeps a token of a minute and takes another when it has run out.
type signer struct {
	until  int64
	tokens int
}

func (s *signer) prepare(req *http.Request) error {
	if now := time.Now().Unix(); now >= s.until {
		s.until = now + 60
		s.tokens++
	}
	req.Header.Set("Authorization", "Bearer acct."+strconv.FormatInt(s.until, 10))
	return nil
}

func TestC68_CredentialsAreRenewedForEachAttempt(t *testing.T) {
	start := func(t *testing.T, closed func(int) bool) (*fakeserver.Server, *tokenGate, *signer, *idem.Transport) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{KeyPer: fakeserver.PerAccount})
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "120", Point: fakeserver.AfterEffect}))
		gate, sign := &tokenGate{base: s.Transport(), closed: closed}, &signer{}
		tr := over(s, func(tr *idem.Transport) {
			tr.Base, tr.Prepare = gate, sign.prepare
			tr.Policy.MaxRetryAfter, tr.Policy.MaxElapsed = 5*time.Minute, 10*time.Minute
		})
		return s, gate, sign, tr
	}
	t.Run("a long wait", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s, gate, sign, tr := start(t, nil)
			resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.Len(t, s.Effects(), 1)
			require.Len(t, s.Sends(), 2)
			require.Len(t, keysSent(s.Sends()), 1)
			require.Equal(t, s.Sends()[0].BodySHA256, s.Sends()[1].BodySHA256)
			require.Equal(t, 2, sign.tokens)
			require.NotEqual(t, gate.seen[0].header.Get("Authorization"), gate.seen[1].header.Get("Authorization"))
			require.Contains(t, readAll(t, resp), "order-1")
			require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		})
	})
	t.Run("refused although fresh", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s, gate, sign, tr := start(t, func(n int) bool { return n > 1 })
			resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.Len(t, s.Effects(), 1)
			require.Len(t, gate.seen, 3, "one attempt after the wait, one more after Prepare")
			oneKey(t, gate.seen)
			require.Equal(t, 2, sign.tokens)
			require.Equal(t, 401, resp.StatusCode)
			require.Equal(t, "token expired", readAll(t, resp))
			report := idem.ReportOf(resp)
			require.True(t, report.EarlierUnknown)
			require.Equal(t, idem.Unknown, report.Outcome)
		})
	})
}

func TestCallersRequestIsNotChanged(t *testing.T) {
	type view struct {
		method, url, host string
		header, trailer   http.Header
		length            int64
		encoding          []string
		close             bool
	}
	look := func(r *http.Request) view {
		return view{r.Method, r.URL.String(), r.Host, r.Header.Clone(), r.Trailer.Clone(), r.ContentLength, append([]string(nil), r.TransferEncoding...), r.Close}
	}
	for _, status := range []int{201, 404, 500} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				w := &wire{serve: always(status)}
				tr := onWire(w, func(tr *idem.Transport) {
					tr.Prepare = func(req *http.Request) error {
						req.Header.Set("Authorization", "Bearer x")
						req.Header["X-Caller"][0] = "theirs"
						req.Host = "elsewhere.test"
						return nil
					}
				})
				req := newPost(t, t.Context(), "http://user:word@api.test/v1/payments?a=b#c", `{}`)
				req.Header.Set("X-Caller", "mine")
				before := look(req)
				ctx, body, u, header := req.Context(), req.Body, req.URL, req.Header
				resp, err := tr.RoundTrip(req)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				require.Equal(t, before, look(req))
				require.Same(t, u, req.URL)
				require.Equal(t, body, req.Body)
				require.Equal(t, ctx, req.Context())
				require.NotNil(t, req.GetBody)
				header.Set("X-Same-Map", "yes")
				require.Equal(t, "yes", req.Header.Get("X-Same-Map"))
			})
		})
	}
	t.Run("a request without a header map", func(t *testing.T) {
		u, err := url.Parse(wireURL)
		require.NoError(t, err)
		req := &http.Request{Method: http.MethodPost, URL: u}
		w := &wire{}
		resp, err := onWire(w).RoundTrip(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		oneKey(t, w.seen())
		require.Nil(t, req.Header)
	})
}

func TestBodyIsClosedExactlyOnceOnEveryPath(t *testing.T) {
	lost := errors.New("connection lost")
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	under := func(change func(context.Context) context.Context) func(*testing.T, *idem.Transport, *http.Request) *http.Request {
		return func(_ *testing.T, _ *idem.Transport, req *http.Request) *http.Request {
			return req.WithContext(change(req.Context()))
		}
	}
	header := func(values ...string) func(*testing.T, *idem.Transport, *http.Request) *http.Request {
		return func(_ *testing.T, _ *idem.Transport, req *http.Request) *http.Request {
			req.Header["Idempotency-Key"] = values
			return req
		}
	}
	prepare := func(f func(*http.Request) error) func(*testing.T, *idem.Transport, *http.Request) *http.Request {
		return func(_ *testing.T, tr *idem.Transport, req *http.Request) *http.Request {
			tr.Prepare = f
			return req
		}
	}
	paths := []struct {
		name   string
		serve  func(int, *http.Request) (*http.Response, error)
		set    func(*testing.T, *idem.Transport, *http.Request) *http.Request
		unsent bool
		reason error
	}{
		{name: "answered"},
		{name: "refused by the server", serve: always(404)},
		{name: "retried", serve: func(n int, req *http.Request) (*http.Response, error) {
			if n == 1 {
				return answer(req, 503, nil, ""), nil
			}
			return answer(req, 201, nil, ""), nil
		}},
		{name: "retries exhausted", serve: always(503)},
		{name: "connection lost", serve: func(int, *http.Request) (*http.Response, error) { return nil, lost }, reason: lost},
		{name: "policy invalid", unsent: true, reason: idem.ErrInvalid, set: func(_ *testing.T, tr *idem.Transport, req *http.Request) *http.Request {
			tr.Policy.MaxAttempts = -1
			return req
		}},
		{name: "dialect invalid", unsent: true, reason: idem.ErrInvalid, set: func(_ *testing.T, tr *idem.Transport, req *http.Request) *http.Request {
			tr.Dialect = idem.Dialect{Header: "not a header"}
			return req
		}},
		{name: "budget invalid", unsent: true, reason: idem.ErrInvalid, set: func(_ *testing.T, tr *idem.Transport, req *http.Request) *http.Request {
			tr.Policy.Budget = &idem.Budget{Capacity: 1}
			return req
		}},
		{name: "no URL", unsent: true, reason: idem.ErrInvalid, set: func(_ *testing.T, _ *idem.Transport, req *http.Request) *http.Request {
			req.URL = nil
			return req
		}},
		{name: "no host", unsent: true, reason: idem.ErrInvalid, set: func(_ *testing.T, _ *idem.Transport, req *http.Request) *http.Request {
			req.URL = &url.URL{Scheme: "http", Path: "/"}
			return req
		}},
		{name: "no method", unsent: true, reason: idem.ErrInvalid, set: func(_ *testing.T, _ *idem.Transport, req *http.Request) *http.Request {
			req.Method = "NO METHOD"
			return req
		}},
		{name: "two keys", unsent: true, reason: idem.ErrKeyInvalid, set: header("a", "b")},
		{name: "empty key", unsent: true, reason: idem.ErrKeyInvalid, set: header("")},
		{name: "bad key", unsent: true, reason: idem.ErrKeyInvalid, set: under(func(ctx context.Context) context.Context { return idem.WithKey(ctx, "a\nb") })},
		{name: "operation without an id", unsent: true, reason: idem.ErrInvalid, set: under(func(ctx context.Context) context.Context {
			return idem.WithOperation(ctx, idem.Operation{Name: "refund"})
		})},
		{name: "key window passed", unsent: true, reason: idem.ErrKeyExpired, set: func(_ *testing.T, tr *idem.Transport, req *http.Request) *http.Request {
			tr.Policy.KeyWindow = time.Hour
			return req.WithContext(idem.WithOperation(req.Context(), idem.Operation{Name: "refund", ID: "77", Started: time.Now().Add(-2 * time.Hour)}))
		}},
		{name: "context ended", unsent: true, reason: context.Canceled, set: under(func(context.Context) context.Context { return cancelled })},
		{name: "context ended, key given", unsent: true, reason: context.Canceled, set: under(func(context.Context) context.Context { return idem.WithKey(cancelled, "k") })},
		{name: "key reused", unsent: true, reason: idem.ErrKeyReused, set: func(t *testing.T, _ *idem.Transport, req *http.Request) *http.Request {
			ctx := idem.WithKey(req.Context(), "order-77")
			resp, err := onWire(&wire{}).RoundTrip(newPost(t, ctx, wireURL, `{"other":1}`))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			return req.WithContext(ctx)
		}},
		{name: "Prepare fails", unsent: true, reason: lost, set: prepare(func(*http.Request) error { return lost })},
		{name: "Prepare reads the body and fails", unsent: true, reason: lost, set: prepare(func(req *http.Request) error {
			_, _ = io.Copy(io.Discard, req.Body)
			_ = req.Body.Close()
			return lost
		})},
		{name: "Prepare changes the key", unsent: true, reason: idem.ErrInvalid, set: prepare(func(req *http.Request) error {
			req.Header.Set("Idempotency-Key", "another")
			return nil
		})},
		{name: "Prepare changes the body", unsent: true, reason: idem.ErrInvalid, set: prepare(func(req *http.Request) error {
			req.Body = io.NopCloser(strings.NewReader("another body"))
			return nil
		})},
		{name: "scope changes", unsent: true, reason: idem.ErrScopeChanged, set: func(_ *testing.T, tr *idem.Transport, req *http.Request) *http.Request {
			tr.Prepare = func(req *http.Request) error { req.Header.Set("X-Account", "b"); return nil }
			tr.Scope = func(req *http.Request) string { return req.Header.Get("X-Account") }
			return req
		}},
	}
	const text = `{"amount":1999}`
	for _, kind := range []string{"read once", "with GetBody", "too long to buffer"} {
		for _, p := range paths {
			t.Run(kind+", "+p.name, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					w := &wire{serve: p.serve}
					tr := onWire(w)
					own := &closeCounter{Reader: strings.NewReader(text)}
					var opened []*closeCounter
					req := newPost(t, t.Context(), wireURL, "")
					req.Body, req.GetBody, req.ContentLength = own, nil, int64(len(text))
					switch kind {
					case "with GetBody":
						req.GetBody = func() (io.ReadCloser, error) {
							c := &closeCounter{Reader: strings.NewReader(text)}
							opened = append(opened, c)
							return c, nil
						}
					case "too long to buffer":
						tr.Policy.MaxRequestBuffer = 4
					}
					if p.set != nil {
						req = p.set(t, tr, req)
					}
					resp, err := tr.RoundTrip(req)
					require.NotEqual(t, resp == nil, err == nil, "a response or an error, never both")
					if p.reason != nil {
						require.ErrorIs(t, err, p.reason)
					}
					if p.unsent {
						require.Empty(t, w.seen())
						require.NotEqual(t, idem.Executed, idem.OutcomeOf(nil, err))
					} else {
						require.Equal(t, text, w.seen()[0].body)
					}
					require.EqualValues(t, 1, own.closes.Load(), "the caller's body")
					for i, c := range opened {
						require.NotZero(t, c.closes.Load(), "body %d from GetBody is not closed", i+1)
					}
					if resp != nil {
						require.NoError(t, resp.Body.Close())
					}
					require.EqualValues(t, 1, own.closes.Load())
				})
			})
		}
	}
}

func TestResponseXorErrorWhateverTheBaseDoes(t *testing.T) {
	lost := errors.New("lost")
	t.Run("both", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			var bodies []*closeCounter
			tr := onWire(&wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
				resp := answer(req, 200, nil, "")
				body := &closeCounter{Reader: strings.NewReader("x")}
				resp.Body = body
				bodies = append(bodies, body)
				return resp, lost
			}})
			resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.Nil(t, resp)
			require.ErrorIs(t, err, lost)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
			require.Len(t, bodies, 4)
			for _, b := range bodies {
				require.EqualValues(t, 1, b.closes.Load())
			}
		})
	})
	t.Run("neither", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			tr := onWire(&wire{serve: func(int, *http.Request) (*http.Response, error) { return nil, nil }})
			resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.Nil(t, resp)
			require.Error(t, err)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		})
	})
	t.Run("no body", func(t *testing.T) {
		tr := onWire(&wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			resp := answer(req, 204, nil, "")
			resp.Body = nil
			return resp, nil
		}})
		resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
		require.NoError(t, err)
		require.Empty(t, readAll(t, resp))
	})
}

type contextName struct{}

func TestResponseHasTheCallersRequestAndTheReport(t *testing.T) {
	w := &wire{}
	ctx := context.WithValue(t.Context(), contextName{}, "mine")
	req := newPost(t, ctx, wireURL, `{}`)
	resp, err := onWire(w).RoundTrip(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Same(t, req.URL, resp.Request.URL)
	require.Equal(t, http.MethodPost, resp.Request.Method)
	require.Equal(t, req.Header, resp.Request.Header)
	require.Empty(t, resp.Request.Header.Get("Idempotency-Key"))
	require.NotNil(t, resp.Request.GetBody, "http.Client needs it for a 307")
	require.Equal(t, "mine", resp.Request.Context().Value(contextName{}))
	require.NoError(t, resp.Request.Context().Err(), "not the context of the attempt, which is over")
	report := idem.ReportOf(resp)
	require.NotNil(t, report)
	require.Equal(t, oneKey(t, w.seen()), report.Key)
	require.Equal(t, 1, report.Sends)
	require.Nil(t, idem.ReportOf(nil))
	require.Nil(t, idem.ReportOf(&http.Response{}))
}

func TestBaseSeesNoGetBody(t *testing.T) {
	virtual(t, func(t *testing.T) {
		for _, prepare := range []func(*http.Request) error{nil, func(*http.Request) error { return nil }} {
			w := &wire{serve: always(500)}
			resp, err := onWire(w, func(tr *idem.Transport) { tr.Prepare = prepare }).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), 4)
			for _, s := range w.seen() {
				require.False(t, s.getBody, "net/http would send again by itself")
				require.Equal(t, `{}`, s.body)
			}
		}
	})
}

// idleCounter is a base that counts calls of CloseIdleConnections.
type idleCounter struct {
	wire
	calls int
}

func (c *idleCounter) CloseIdleConnections() { c.calls++ }

func TestCloseIdleConnectionsReachesTheBase(t *testing.T) {
	base := &idleCounter{}
	tr := &idem.Transport{Base: base}
	tr.CloseIdleConnections()
	require.Equal(t, 1, base.calls)
	(&http.Client{Transport: tr}).CloseIdleConnections()
	require.Equal(t, 2, base.calls)
	(&idem.Transport{Base: tr}).CloseIdleConnections()
	require.Equal(t, 3, base.calls, "through two layers")
	(&idem.Transport{Base: &wire{}}).CloseIdleConnections() // a base without the method is left alone
	(&idem.Transport{}).CloseIdleConnections()
}

func TestNilBaseIsOneCloneForAll(t *testing.T) {
	var conns atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			conns.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	// call leaves its connection in the pool. net/http gives up one whose write it does not see end
	// within 50 ms of the answer; then there is another call. made is the connections of the first.
	call := func(tr *idem.Transport) (made int32) {
		for n, pooled := 0, false; !pooled; n++ {
			before := conns.Load()
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{PutIdleConn: func(err error) { pooled = err == nil }})
			resp, err := tr.RoundTrip(newPost(t, ctx, s.URL, `{}`))
			require.NoError(t, err)
			_ = readAll(t, resp)
			if n == 0 {
				made = conns.Load() - before
			}
		}
		return made
	}
	first, second := &idem.Transport{Policy: casePolicy()}, &idem.Transport{Policy: casePolicy()}
	require.EqualValues(t, 1, call(first))
	require.Zero(t, call(second), "they share a pool")
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	require.Zero(t, call(first), "it is not the pool of http.DefaultTransport")
	first.CloseIdleConnections()
	require.EqualValues(t, 1, call(second))
	first.CloseIdleConnections()
}

func TestPrepareRunsOnEachAttemptsOwnCopy(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			if n < 3 {
				return answer(req, 500, nil, ""), nil
			}
			return answer(req, 201, nil, ""), nil
		}}
		n := 0
		var seen []*http.Request
		tr := onWire(w, func(tr *idem.Transport) {
			tr.Prepare = func(req *http.Request) error {
				n++
				seen = append(seen, req)
				require.Empty(t, req.Header.Get("X-Signature"), "nothing of the attempt before")
				require.NotEmpty(t, req.Header.Get("Idempotency-Key"), "so that it can be signed")
				body, err := io.ReadAll(req.Body) // a signer that drains the body
				require.NoError(t, err)
				again, err := req.GetBody()
				require.NoError(t, err)
				second, err := io.ReadAll(again)
				require.NoError(t, err)
				require.Equal(t, body, second)
				req.Header.Set("X-Signature", fmt.Sprintf("%s/%d", body, n))
				return nil
			}
		})
		req := newPost(t, t.Context(), wireURL, `{"a":1}`)
		resp, err := tr.RoundTrip(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		oneKey(t, w.seen())
		for i, s := range w.seen() {
			require.Equal(t, `{"a":1}`, s.body)
			require.Equal(t, fmt.Sprintf(`{"a":1}/%d`, i+1), s.header.Get("X-Signature"))
			require.NotSame(t, req, seen[i])
			require.NotSame(t, req.URL, seen[i].URL)
		}
		require.Empty(t, req.Header.Get("X-Signature"))
	})
}

func TestPrepareMayHandOnABodyOfTheSameContent(t *testing.T) {
	for name, change := range map[string]func(*http.Request){
		"from GetBody": func(req *http.Request) { req.Body, _ = req.GetBody() },
		"a copy": func(req *http.Request) {
			text, _ := io.ReadAll(req.Body)
			_ = req.Body.Close()
			req.Body = io.NopCloser(bytes.NewReader(text))
		},
		"another GetBody": func(req *http.Request) {
			req.GetBody = func() (io.ReadCloser, error) { return nil, errors.New("not to be called") }
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := &wire{}
			resp, err := onWire(w, func(tr *idem.Transport) {
				tr.Prepare = func(req *http.Request) error { change(req); return nil }
			}).RoundTrip(newPost(t, t.Context(), wireURL, `{"a":1}`))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, `{"a":1}`, w.seen()[0].body)
			require.False(t, w.seen()[0].getBody)
		})
	}
}

func TestPrepareMustNotChangeKeyURLMethodOrBody(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*http.Request)
	}{
		{"another key", func(req *http.Request) { req.Header.Set("Idempotency-Key", "another") }},
		{"no key", func(req *http.Request) { req.Header.Del("Idempotency-Key") }},
		{"a second key", func(req *http.Request) { req.Header.Add("Idempotency-Key", "another") }},
		{"a second key, other spelling", func(req *http.Request) { req.Header["idempotency-key"] = []string{"another"} }},
		{"another path", func(req *http.Request) { req.URL.Path = "/v2/payments" }},
		{"another query", func(req *http.Request) { req.URL.RawQuery = "signature=1" }},
		{"another host", func(req *http.Request) { req.URL.Host = "elsewhere.test" }},
		{"another URL", func(req *http.Request) { req.URL = &url.URL{Scheme: "http", Host: "elsewhere.test"} }},
		{"no URL", func(req *http.Request) { req.URL = nil }},
		{"another method", func(req *http.Request) { req.Method = http.MethodPut }},
		{"another body", func(req *http.Request) { req.Body = io.NopCloser(strings.NewReader(`{"a":2}`)) }},
		{"a shorter body", func(req *http.Request) { req.Body = io.NopCloser(strings.NewReader(`{}`)) }},
		{"no body", func(req *http.Request) { req.Body = nil }},
		{"another length", func(req *http.Request) { req.ContentLength = 3 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				// The second attempt, so that a send before it is not taken back.
				w := &wire{serve: always(500)}
				n := 0
				tr := onWire(w, func(tr *idem.Transport) {
					tr.Prepare = func(req *http.Request) error {
						if n++; n == 2 {
							c.change(req)
						}
						return nil
					}
				})
				req := newPost(t, t.Context(), wireURL, `{"a":1}`)
				before := req.URL.String()
				resp, err := tr.RoundTrip(req)
				require.Nil(t, resp)
				require.Len(t, w.seen(), 1)
				require.ErrorIs(t, err, idem.ErrInvalid)
				require.ErrorContains(t, err, "Transport.Prepare")
				require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
				require.Equal(t, before, req.URL.String())
			})
		})
	}
	t.Run("a key on a request without one", func(t *testing.T) {
		w := &wire{}
		tr := onWire(w, func(tr *idem.Transport) {
			tr.Prepare = func(req *http.Request) error { req.Header.Set("Idempotency-Key", "k"); return nil }
		})
		_, err := tr.RoundTrip(newPost(t, idem.WithoutKey(t.Context()), wireURL, `{}`))
		require.Empty(t, w.seen())
		require.ErrorIs(t, err, idem.ErrInvalid)
	})
}

func TestErrorOfPrepareEndsTheOperation(t *testing.T) {
	noToken := errors.New("no token to be had")
	virtual(t, func(t *testing.T) {
		for _, failAt := range []int{1, 2} {
			w := &wire{serve: always(500)}
			n := 0
			tr := onWire(w, func(tr *idem.Transport) {
				tr.Prepare = func(*http.Request) error {
					if n++; n == failAt {
						return noToken
					}
					return nil
				}
			})
			_, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.Len(t, w.seen(), failAt-1)
			require.ErrorIs(t, err, noToken)
			if failAt == 1 {
				require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
			} else {
				require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
			}
		}
	})
}

func TestScopeIsAskedBeforeTheKeyAndAfterEachPrepare(t *testing.T) {
	account := func(req *http.Request) string { return req.Header.Get("X-Account") }
	t.Run("scopes have keys of their own", func(t *testing.T) {
		w := &wire{}
		tr := onWire(w, func(tr *idem.Transport) { tr.Scope = account })
		for _, name := range []string{"a", "b", "a"} {
			ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "refund", ID: "77"})
			req := newPost(t, ctx, wireURL, `{}`)
			req.Header.Set("X-Account", name)
			resp, err := tr.RoundTrip(req)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
		}
		sends := w.seen()
		require.NotEqual(t, sends[0].keys, sends[1].keys)
		require.Equal(t, sends[0].keys, sends[2].keys)
	})
	t.Run("a change within the operation stops it", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			w := &wire{serve: always(500)}
			n := 0
			tr := onWire(w, func(tr *idem.Transport) {
				tr.Scope = account
				tr.Prepare = func(req *http.Request) error {
					if n++; n == 2 {
						req.Header.Set("X-Account", "b")
					}
					return nil
				}
			})
			req := newPost(t, t.Context(), wireURL, `{}`)
			req.Header.Set("X-Account", "a")
			_, err := tr.RoundTrip(req)
			require.Len(t, w.seen(), 1)
			require.ErrorIs(t, err, idem.ErrScopeChanged)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		})
	})
	t.Run("one context does not serve two scopes", func(t *testing.T) {
		w := &wire{}
		tr := onWire(w, func(tr *idem.Transport) { tr.Scope = account })
		ctx := idem.WithKey(t.Context(), "order-77")
		for _, name := range []string{"a", "b"} {
			req := newPost(t, ctx, wireURL, `{}`)
			req.Header.Set("X-Account", name)
			resp, err := tr.RoundTrip(req)
			if name == "b" {
				require.ErrorIs(t, err, idem.ErrKeyReused)
				continue
			}
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
		}
		require.Len(t, w.seen(), 1)
	})
}

func TestRedirectWithinTheOriginKeepsTheOperation(t *testing.T) {
	for _, status := range []int{307, 308} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("",
					fakeserver.Fault{Kind: fakeserver.Status, Status: 503},
					fakeserver.Fault{Kind: fakeserver.Redirect, Status: status, Location: "/v1/payments"},
					fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
				var report idem.Report
				prepared := 0
				tr := over(s, func(tr *idem.Transport) {
					tr.Prepare = func(req *http.Request) error {
						prepared++
						req.Header.Set("Authorization", "Bearer acct.1")
						return nil
					}
				})
				req := newPayment(t, idem.WithReport(t.Context(), &report), s, "order-1")
				resp, err := (&http.Client{Transport: tr}).Do(req)
				require.NoError(t, err)
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 4)
				require.Len(t, keysSent(s.Sends()), 1)
				for _, send := range s.Sends() {
					require.Equal(t, s.Sends()[0].BodySHA256, send.BodySHA256)
					require.Equal(t, http.MethodPost, send.Method)
				}
				require.Contains(t, readAll(t, resp), "order-1")
				require.Equal(t, idem.Executed, report.Outcome)
				require.Len(t, report.Attempts, 4)
				require.Equal(t, []int{1, 2, 2, 3}, []int{report.Attempts[0].N, report.Attempts[1].N, report.Attempts[2].N, report.Attempts[3].N},
					"a hop is no attempt of its own")
				require.Equal(t, 4, report.Sends)
				require.Equal(t, report.Key, s.Sends()[0].Key)
				require.Equal(t, 4, prepared)
			})
		})
	}
}

func TestRedirectChainSharesTheAttemptsOfItsOperation(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("",
			fakeserver.Fault{Kind: fakeserver.Status, Status: 503},
			fakeserver.Fault{Kind: fakeserver.Redirect, Location: "/v1/payments"},
			fakeserver.Fault{Kind: fakeserver.Status, Status: 503},
			fakeserver.Fault{Kind: fakeserver.Redirect, Location: "/v1/payments"},
			fakeserver.Fault{Kind: fakeserver.Status, Status: 503},
			fakeserver.Fault{Kind: fakeserver.Status, Status: 503},
			fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
		resp, err := (&http.Client{Transport: over(s)}).Do(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		require.Len(t, s.Sends(), 6, "four attempts and two hops")
		require.Len(t, keysSent(s.Sends()), 1)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrAttemptsExhausted)
		require.NoError(t, resp.Body.Close())
	})
}

func TestRedirectOfAWriteToAnotherOriginIsRefused(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*idem.Transport)
	}{
		{"by default", func(*idem.Transport) {}},
		{"where AllowRedirect says no", func(tr *idem.Transport) { tr.AllowRedirect = func(_, _ *url.URL) bool { return false } }},
		{"without a key too, for the body's sake", func(tr *idem.Transport) { tr.Dialect = idem.NoKeys }},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				s.Apply(fakeserver.Settings{Optional: true})
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Location: "other"}))
				tr := over(s, c.edit)
				resp, err := (&http.Client{Transport: tr}).Do(newPayment(t, t.Context(), s, "order-1"))
				if resp != nil {
					_ = resp.Body.Close()
				}
				require.Empty(t, s.Effects())
				require.Len(t, s.Sends(), 1)
				require.ErrorIs(t, err, idem.ErrRedirectRefused)
				require.ErrorContains(t, err, "AllowRedirect")
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				require.Len(t, e.Attempts, 1)
				require.Equal(t, e.Key, s.Sends()[0].Key)
			})
		})
	}
}

func TestRefusedRedirectClosesTheBodyOfTheHop(t *testing.T) {
	w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
		return answer(req, 307, http.Header{"Location": {"http://other.test/"}}, ""), nil
	}}
	tr := onWire(w)
	resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	body := &closeCounter{Reader: strings.NewReader(`{}`)}
	hop := newPost(t, t.Context(), "http://other.test/", "")
	hop.Body, hop.GetBody, hop.ContentLength, hop.Response = body, nil, 2, resp
	_, err = tr.RoundTrip(hop)
	require.ErrorIs(t, err, idem.ErrRedirectRefused)
	require.EqualValues(t, 1, body.closes.Load())
	require.Len(t, w.seen(), 1)
}

func TestAllowRedirectLetsAWriteLeaveItsOrigin(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Location: "other"}))
		var asked []string
		prepared := 0
		tr := over(s, func(tr *idem.Transport) {
			tr.AllowRedirect = func(from, to *url.URL) bool {
				asked = append(asked, from.String(), to.String())
				return true
			}
			tr.Prepare = func(req *http.Request) error {
				prepared++
				req.Header.Set("Authorization", "Bearer acct.1")
				return nil
			}
		})
		resp, err := (&http.Client{Transport: tr}).Do(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Equal(t, []string{s.URL() + "/v1/payments", s.OtherURL() + "/v1/payments"}, asked)
		require.Equal(t, 1, prepared, "Prepare never runs for another origin")
		require.Contains(t, s.Sends()[0].Header, "Authorization")
		require.NotContains(t, s.Sends()[1].Header, "Authorization")
		require.Contains(t, readAll(t, resp), "order-1")
	})
}

func TestOriginIsSchemeHostAndPortInAnySpelling(t *testing.T) {
	for _, c := range []struct {
		to      string
		refused bool
	}{
		{to: "/elsewhere"},
		{to: "http://API.test/v1/payments"},
		{to: "http://api.test:80/v1/payments"},
		{to: "HTTP://api.test/v1/payments"},
		{to: "http://user@api.test/v1/payments"},
		{to: "http://api.test:8080/v1/payments", refused: true},
		{to: "https://api.test/v1/payments", refused: true},
		{to: "http://www.api.test/v1/payments", refused: true},
		{to: "http://api.test.evil.test/v1/payments", refused: true},
	} {
		t.Run(c.to, func(t *testing.T) {
			w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
				if n == 1 {
					return answer(req, 307, http.Header{"Location": {c.to}}, ""), nil
				}
				return answer(req, 201, nil, ""), nil
			}}
			resp, err := (&http.Client{Transport: onWire(w)}).Do(newPost(t, t.Context(), wireURL, `{}`))
			if c.refused {
				require.ErrorIs(t, err, idem.ErrRedirectRefused)
				require.Len(t, w.seen(), 1)
				return
			}
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), 2)
			oneKey(t, w.seen())
		})
	}
}

func TestGETAfterAWriteCarriesNoKeyAndExtendsTheReport(t *testing.T) {
	for _, keyFrom := range []string{"minted", "header", "context"} {
		t.Run("key "+keyFrom, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: 303, Point: fakeserver.AfterEffect},
					fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
				ctx := t.Context()
				if keyFrom == "context" {
					ctx = idem.WithKey(ctx, "order-77")
				}
				var report idem.Report
				req := newPayment(t, idem.WithReport(ctx, &report), s, "order-1")
				if keyFrom == "header" {
					req.Header.Set("Idempotency-Key", "order-77")
				}
				resp, err := (&http.Client{Transport: over(s)}).Do(req)
				require.NoError(t, err)
				require.Len(t, s.Effects(), 1)
				sends := s.Sends()
				require.Len(t, sends, 3)
				require.Equal(t, http.MethodGet, sends[1].Method)
				require.Empty(t, sends[1].Keys)
				require.Empty(t, sends[2].Keys)
				require.Zero(t, sends[1].BodyLen)
				require.Contains(t, readAll(t, resp), "order-1")
				require.Equal(t, idem.Executed, report.Outcome)
				require.Equal(t, sends[0].Key, report.Key)
				require.Equal(t, keyFrom, report.KeyFrom)
				require.Len(t, report.Attempts, 3)
				require.Equal(t, idem.Executed, report.Attempts[0].Outcome)
				require.Equal(t, idem.Unknown, report.Attempts[2].Outcome, "the GET says nothing about the effect")
				require.Equal(t, 3, report.Sends)
				require.Equal(t, report, *idem.ReportOf(resp))
			})
		})
	}
	t.Run("a GET that fails takes nothing back", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: 303, Point: fakeserver.AfterEffect}))
			require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Endpoint: "GET /v1/payments/{id}"}))
			_, err := (&http.Client{Transport: over(s)}).Do(newPayment(t, t.Context(), s, "order-1"))
			require.Len(t, s.Effects(), 1)
			require.Equal(t, idem.Executed, idem.OutcomeOf(nil, err))
		})
	})
	t.Run("a 302 is no proof of execution", func(t *testing.T) {
		virtual(t, func(t *testing.T) {
			s := inMemory(t)
			require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: 302, Location: "/v1/payments?reference=order-1"}))
			resp, err := (&http.Client{Transport: over(s)}).Do(newPayment(t, t.Context(), s, "order-1"))
			require.NoError(t, err)
			require.Empty(t, s.Effects())
			require.Equal(t, 200, resp.StatusCode)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
			require.Empty(t, s.Sends()[1].Keys)
			require.NoError(t, resp.Body.Close())
		})
	})
}

func TestRedirectOfAReadMayLeaveItsOrigin(t *testing.T) {
	w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
		if n == 1 {
			return answer(req, 302, http.Header{"Location": {"http://other.test/"}}, ""), nil
		}
		return answer(req, 200, nil, ""), nil
	}}
	prepared := 0
	tr := onWire(w, func(tr *idem.Transport) {
		tr.Prepare = func(req *http.Request) error {
			prepared++
			req.Header.Set("Authorization", "Bearer x")
			return nil
		}
	})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, wireURL, nil)
	require.NoError(t, err)
	resp, err := (&http.Client{Transport: tr}).Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Len(t, w.seen(), 2)
	require.Equal(t, 1, prepared)
	require.Empty(t, w.seen()[1].header.Get("Authorization"))
}

// staleServer answers the first request of its first n connections when all n
// have arrived, and hangs up at the next bytes on them; connections after
// those work. posts counts the requests that arrived complete on those.
func staleServer(t *testing.T, n int) (url string, base *http.Transport, posts *atomic.Int32) {
	t.Helper()
	var arrived sync.WaitGroup
	arrived.Add(n)
	posts = new(atomic.Int32)
	url, base = rawInMemory(t, func(conn int, c net.Conn, r *bufio.Reader) {
		for served := 0; ; served++ {
			if served == 1 && conn <= n {
				_, _ = r.ReadByte()
				return
			}
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			if conn <= n {
				arrived.Done()
				arrived.Wait()
			} else {
				posts.Add(1)
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
		}
	})
	return url, base, posts
}

func TestThirtyTwoStaleConnectionsCostOneExtraAttempt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		const idle = 32
		url, base, posts := staleServer(t, idle)
		base.MaxIdleConnsPerHost = idle
		var warming sync.WaitGroup
		for range idle {
			warming.Add(1)
			go func() {
				defer warming.Done()
				resp, err := (&http.Client{Transport: base}).Get(url)
				if err != nil {
					t.Errorf("warming: %v", err)
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}()
		}
		warming.Wait()
		resp, err := onWire(base).RoundTrip(newPost(t, t.Context(), url, `{}`))
		require.NoError(t, err)
		require.Equal(t, "{}", readAll(t, resp))
		require.EqualValues(t, 1, posts.Load())
		report := idem.ReportOf(resp)
		require.Len(t, report.Attempts, 2)
		require.Equal(t, 2, report.Sends)
		require.True(t, report.Attempts[0].Reused)
		require.False(t, report.Attempts[1].Reused)
		require.Zero(t, report.Attempts[0].Wait)
		require.Equal(t, "at-once", report.Attempts[0].WaitFrom)
		require.Equal(t, idem.Executed, report.Outcome)
	})
}

func TestDeadReusedConnectionStillCountsAsAnAttempt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		url, base, posts := staleServer(t, 1)
		resp, err := (&http.Client{Transport: base}).Get(url)
		require.NoError(t, err)
		_ = readAll(t, resp)
		tr := onWire(base, func(tr *idem.Transport) { tr.Policy.MaxAttempts = 1 })
		_, err = tr.RoundTrip(newPost(t, t.Context(), url, `{}`))
		require.Error(t, err)
		require.Zero(t, posts.Load(), "MaxAttempts 1 means one send, always")
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
	})
}

// The other connection to leave, after a timeout over HTTP/2, stands with the tests of HTTP/2.
func TestAfterA408ANewConnectionIsUsed(t *testing.T) {
	for _, status := range []int{408, 421} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				tr := over(s)
				send := func(reference string) *idem.Report {
					resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, reference))
					require.NoError(t, err)
					require.Contains(t, readAll(t, resp), reference)
					return idem.ReportOf(resp)
				}
				send("warm")
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: status}))
				report := send("order-1")
				send("after")
				sends := s.Sends()
				require.Len(t, s.Effects(), 3)
				require.Len(t, sends, 4)
				require.Equal(t, sends[0].Conn, sends[1].Conn, "the 408 came on the idle connection")
				require.NotEqual(t, sends[1].Conn, sends[2].Conn)
				require.Equal(t, sends[1].Key, sends[2].Key)
				require.Equal(t, sends[0].Conn, sends[3].Conn, "the pool was not flushed")
				require.Equal(t, idem.Executed, report.Outcome)
			})
		})
	}
}

func TestReportIsWholeUnderConcurrentCalls(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
			return answer(req, 201, nil, ""), nil
		}}
		tr := onWire(w)
		for range 50 {
			go func() {
				var report idem.Report
				resp, err := tr.RoundTrip(newPost(t, idem.WithReport(t.Context(), &report), wireURL, `{}`))
				if err != nil || resp.Body.Close() != nil || report.Outcome != idem.Executed || report.Sends != 1 {
					t.Errorf("report %+v, %v", report, err)
				}
			}()
		}
		synctest.Wait()
		time.Sleep(time.Second)
		require.Len(t, w.seen(), 50)
	})
}
