package idem_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
)

// heardRequest is one request that arrived complete at a hiddenServer.
type heardRequest struct {
	conn, n int // number of the connection, and of the request on it, from 1
	header  http.Header
	body    string
}

// hiddenServer tells what was really sent: it hands each complete request to
// reply, which writes to the connection what it likes; false closes it. It is
// for virtual time: by the clock of a busy machine, net/http may give up a
// connection that a test wants to meet again.
type hiddenServer struct {
	url  string
	base *http.Transport

	mu    sync.Mutex // guards heard
	heard []heardRequest
}

func newHiddenServer(t *testing.T, reply func(r heardRequest, c net.Conn) bool) *hiddenServer {
	t.Helper()
	s := &hiddenServer{}
	s.url, s.base = rawInMemory(t, func(conn int, c net.Conn, r *bufio.Reader) {
		for n := 1; ; n++ {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			body, err := io.ReadAll(req.Body)
			if err != nil {
				return
			}
			h := heardRequest{conn, n, req.Header, string(body)}
			if req.Method != http.MethodGet { // the warm-up
				s.mu.Lock()
				s.heard = append(s.heard, h)
				s.mu.Unlock()
			}
			if !reply(h, c) {
				return
			}
		}
	})
	return s
}

func (s *hiddenServer) sends() []heardRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]heardRequest(nil), s.heard...)
}

// warmUp leaves n idle connections.
func (s *hiddenServer) warmUp(t *testing.T, n int) {
	t.Helper()
	s.base.MaxIdleConnsPerHost = n
	var all []*http.Response // open together, so that each has a connection
	for range n {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url, nil)
		require.NoError(t, err)
		resp, err := s.base.RoundTrip(req)
		require.NoError(t, err)
		all = append(all, resp)
	}
	for _, resp := range all {
		readAll(t, resp)
	}
}

// saysOK answers with a small JSON body.
func saysOK(c net.Conn) bool {
	_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
	return err == nil
}

// hangsUpOnReuse answers the first request of its first idle connections and
// closes them when the next one has arrived complete; others work.
func hangsUpOnReuse(idle int) func(heardRequest, net.Conn) bool {
	return func(r heardRequest, c net.Conn) bool {
		return (r.conn > idle || r.n == 1) && saysOK(c)
	}
}

// net/http repeats a request by itself where it has one of the two headers
// that it takes for a promise; it must not do so unseen.
func TestC49_HiddenRepeatsOfNetHTTPAreSwitchedOffOrCounted(t *testing.T) {
	const idle = 5
	for _, header := range []string{"Idempotency-Key", "X-Idempotency-Key", "X-Request-Key"} {
		for _, attempts := range []int{1, 2} {
			for _, c := range []struct {
				name, body string
				once       bool // the body can be read only once
			}{
				{"rewindable body", `{"amount":49}`, false},
				{"body to be read once", `{"amount":49}`, true},
				{"no body", "", false},
			} {
				t.Run(header+", "+c.name+", MaxAttempts "+strconv.Itoa(attempts), func(t *testing.T) {
					virtual(t, func(t *testing.T) {
						s := newHiddenServer(t, hangsUpOnReuse(idle))
						s.warmUp(t, idle)
						tr := onWire(s.base, withAttempts(attempts), withDialect(idem.Dialect{Name: "its own", Header: header}))
						var report idem.Report
						ctx := idem.WithReport(t.Context(), &report)
						req := newPost(t, ctx, s.url, c.body)
						switch {
						case c.once:
							req = newPostOnce(t, ctx, s.url, c.body)
						case c.body == "":
							req.Body, req.GetBody = nil, nil
						}
						resp, err := tr.RoundTrip(req)
						if err == nil {
							readAll(t, resp)
						}
						sends := s.sends()
						for _, send := range sends {
							require.Equal(t, []string{report.Key}, send.header.Values(header))
							require.Equal(t, c.body, send.body)
						}
						require.Equal(t, len(sends), report.Sends)
						require.LessOrEqual(t, len(report.Attempts), attempts)
						if c.body != "" {
							require.Len(t, sends, attempts)
							require.Len(t, report.Attempts, attempts)
						}
						if last := sends[len(sends)-1]; last.conn > idle {
							require.NoError(t, err)
							require.Equal(t, idem.Executed, report.Outcome)
						} else {
							require.Error(t, err)
							require.Equal(t, idem.Unknown, report.Outcome)
						}
					})
				})
			}
		}
	}
}

// A key header without a value lets net/http repeat, though no key is sent.
func TestC49_KeyHeaderWithoutValuesDoesNotLetNetHTTPRepeatAWrite(t *testing.T) {
	for _, header := range []string{"Idempotency-Key", "X-Idempotency-Key"} {
		for _, c := range []struct {
			name string
			edit func(*idem.Transport)
			ctx  func(context.Context) context.Context
		}{
			{"WithoutKey", func(*idem.Transport) {}, idem.WithoutKey},
			{"NoKeys", withDialect(idem.NoKeys), func(ctx context.Context) context.Context { return ctx }},
		} {
			t.Run(header+", "+c.name, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := newHiddenServer(t, hangsUpOnReuse(1))
					s.warmUp(t, 1)
					var report idem.Report
					req := newPost(t, c.ctx(idem.WithReport(t.Context(), &report)), s.url, `{"amount":49}`)
					req.Header[header] = nil
					_, err := onWire(s.base, c.edit).RoundTrip(req)
					require.Len(t, s.sends(), 1)
					require.Empty(t, s.sends()[0].header.Values(header))
					require.Error(t, err)
					require.Equal(t, 1, report.Sends)
					require.Len(t, report.Attempts, 1)
					require.Equal(t, idem.Unknown, report.Outcome)
				})
			})
		}
	}
}

// A write without a key and without a body is sent once, too, whatever its
// headers make net/http believe.
func TestC49_BodylessWriteWithoutAKeyIsSentOnce(t *testing.T) {
	for name, edit := range map[string]func(http.Header){
		"no header":        func(http.Header) {},
		"without a value":  func(h http.Header) { h["Idempotency-Key"] = nil },
		"the other header": func(h http.Header) { h["X-Idempotency-Key"] = []string{} },
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newHiddenServer(t, hangsUpOnReuse(1))
				s.warmUp(t, 1)
				var report idem.Report
				req := newPost(t, idem.WithoutKey(idem.WithReport(t.Context(), &report)), s.url, "")
				req.Body, req.GetBody = nil, nil
				edit(req.Header)
				_, err := onWire(s.base).RoundTrip(req)
				require.Len(t, s.sends(), 1)
				require.Error(t, err)
				require.Equal(t, 1, report.Sends)
				require.Equal(t, idem.Unknown, report.Outcome)
			})
		})
	}
}

func TestC56_408OnAWarmConnectionIsRepeatedOnANewOne(t *testing.T) {
	const timeout = "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
	for _, always := range []bool{false, true} {
		t.Run("always "+strconv.FormatBool(always), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newHiddenServer(t, func(r heardRequest, c net.Conn) bool {
					if always && r.body != "" || r.conn == 1 && r.n > 1 {
						_, _ = io.WriteString(c, timeout)
						return false
					}
					return saysOK(c)
				})
				s.warmUp(t, 1)
				tr := onWire(s.base)
				resp, err := tr.RoundTrip(newPost(t, t.Context(), s.url, `{"amount":56}`))
				require.NoError(t, err)
				readAll(t, resp)
				sends := s.sends()
				r := idem.ReportOf(resp)
				require.Equal(t, len(sends), len(r.Attempts))
				require.Equal(t, len(sends), r.Sends)
				conns := map[int]bool{}
				for _, send := range sends {
					conns[send.conn] = true
					require.Equal(t, []string{r.Key}, send.header.Values("Idempotency-Key"))
					require.Equal(t, `{"amount":56}`, send.body)
				}
				require.Len(t, conns, len(sends))
				if always {
					require.Len(t, sends, 4)
					require.Equal(t, http.StatusRequestTimeout, resp.StatusCode)
					require.ErrorIs(t, r.Reason, idem.ErrAttemptsExhausted)
					require.Equal(t, idem.Unknown, r.Outcome)
				} else {
					require.Len(t, sends, 2)
					require.Equal(t, http.StatusOK, resp.StatusCode)
					require.Equal(t, idem.Executed, r.Outcome)
				}
			})
		})
	}
}

// The 408 that a server sends to an idle connection before it closes it is no
// answer to the request that crosses it.
func TestC56_408SentToAnIdleConnectionIsNoAnswer(t *testing.T) {
	virtual(t, func(t *testing.T) {
		closed := make(chan struct{})
		s := newHiddenServer(t, func(r heardRequest, c net.Conn) bool {
			if r.conn > 1 {
				return saysOK(c)
			}
			saysOK(c)
			time.Sleep(20 * time.Millisecond)
			_, _ = io.WriteString(c, "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
			close(closed)
			return false
		})
		s.warmUp(t, 1)
		<-closed // the client may or may not have noticed
		resp, err := onWire(s.base).RoundTrip(newPost(t, t.Context(), s.url, `{"amount":56}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.sends(), 1)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		require.LessOrEqual(t, len(idem.ReportOf(resp).Attempts), 2)
	})
}

func TestC56_ConnectionClosedAtTheMomentOfTheWriteIsRetried(t *testing.T) {
	for name, half := range map[string]bool{"after the request": false, "within the request": true} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				var whole atomic.Int32
				var keys sync.Map
				url, base := rawInMemory(t, func(conn int, c net.Conn, r *bufio.Reader) {
					for n := 1; ; n++ {
						req, err := http.ReadRequest(r)
						if err != nil {
							return
						}
						if req.Method != http.MethodGet {
							keys.Store(req.Header.Get("Idempotency-Key"), true)
						}
						if conn == 1 && n > 1 && half {
							return
						}
						if _, err := io.Copy(io.Discard, req.Body); err != nil {
							return
						}
						if conn == 1 && n > 1 {
							return
						}
						if req.Method != http.MethodGet {
							whole.Add(1)
						}
						if !saysOK(c) {
							return
						}
					}
				})
				(&hiddenServer{url: url, base: base}).warmUp(t, 1)
				body := `{"amount":56,"memo":"` + strings.Repeat("x", 1<<20) + `"}`
				start := time.Now()
				resp, err := onWire(base).RoundTrip(newPost(t, t.Context(), url, body))
				require.NoError(t, err)
				readAll(t, resp)
				require.EqualValues(t, 1, whole.Load())
				r := idem.ReportOf(resp)
				n := 0
				keys.Range(func(key, _ any) bool { n++; require.Equal(t, r.Key, key); return true })
				require.Equal(t, 1, n)
				require.Len(t, r.Attempts, 2)
				require.Equal(t, "at-once", r.Attempts[0].WaitFrom)
				require.True(t, r.Attempts[0].Reused)
				require.Equal(t, 2, r.Sends)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Less(t, time.Since(start), 2*time.Second)
			})
		})
	}
}
