package idem_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
)

// expectedSend is one request with its headers, and what came of its body.
type expectedSend struct {
	conn   int
	header http.Header
	body   int   // bytes
	err    error // of reading them
}

// expectServer answers requests as step says, which gets the request before
// its body; takeBody reads that.
type expectServer struct {
	url  string
	base *http.Transport

	mu    sync.Mutex // guards sends
	sends []*expectedSend

	steps sync.WaitGroup // under way
}

func newExpectServer(t *testing.T, continueAfter time.Duration, step func(n int, s *expectedSend, c net.Conn, takeBody func()) bool) *expectServer {
	t.Helper()
	s := &expectServer{}
	s.url, s.base = rawInMemory(t, func(conn int, c net.Conn, r *bufio.Reader) {
		for {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			send := &expectedSend{conn: conn, header: req.Header}
			s.mu.Lock()
			s.sends = append(s.sends, send)
			n := len(s.sends)
			s.steps.Add(1)
			s.mu.Unlock()
			takeBody := func() {
				k, err := io.Copy(io.Discard, req.Body)
				s.mu.Lock()
				send.body, send.err = int(k), err
				s.mu.Unlock()
			}
			goesOn := step(n, send, c, takeBody)
			s.steps.Done()
			if !goesOn {
				return
			}
		}
	})
	s.base.ExpectContinueTimeout = continueAfter
	return s
}

func (s *expectServer) seen() []expectedSend {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []expectedSend
	for _, send := range s.sends {
		all = append(all, *send)
	}
	return all
}

// settled is what was seen when every step has ended.
func (s *expectServer) settled(t *testing.T) []expectedSend {
	t.Helper()
	s.base.CloseIdleConnections()
	s.steps.Wait()
	return s.seen()
}

// expecting is a POST of 1 MiB that waits for permission to send it.
func expecting(t *testing.T, url string) *http.Request {
	t.Helper()
	req := newPost(t, t.Context(), url, strings.Repeat("x", expectedBody))
	req.Header.Set("Expect", "100-continue")
	return req
}

const (
	expectedBody = 1 << 20
	continueLine = "HTTP/1.1 100 Continue\r\n\r\n"
)

// early is an answer that does not wait for the body. Where it ends the
// connection, net/http keeps the body to itself; where the connection goes on,
// net/http owes it the body first, so that the next request is not taken for
// it.
func early(status int, closes bool) string {
	text := fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Length: 0\r\n", status, http.StatusText(status))
	if closes {
		text += "Connection: close\r\n"
	}
	return text + "\r\n"
}

func TestC55_417IsRepeatedOnceWithoutTheExpectation(t *testing.T) {
	for _, c := range []struct {
		name     string
		closes   bool // the connection, with the 417
		always   bool
		attempts int // MaxAttempts
	}{
		{"connection closed", true, false, 4},
		{"connection kept", false, false, 4},
		{"417 again, connection closed", true, true, 4},
		{"417 again, connection kept", false, true, 4},
		{"no attempt left", true, false, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newExpectServer(t, 5*time.Second, func(n int, _ *expectedSend, conn net.Conn, takeBody func()) bool {
					if n == 1 || c.always {
						_, _ = io.WriteString(conn, early(http.StatusExpectationFailed, c.closes))
						if !c.closes || n > 1 {
							takeBody()
						}
						return !c.closes
					}
					takeBody()
					return saysOK(conn)
				})
				start := time.Now()
				resp, err := onWire(s.base, withAttempts(c.attempts)).RoundTrip(expecting(t, s.url))
				require.NoError(t, err)
				readAll(t, resp)
				require.Zero(t, time.Since(start), "nothing is waited for")
				sends := s.settled(t)
				want := min(2, c.attempts)
				require.Len(t, sends, want, "one repeat, and no more")
				require.Equal(t, "100-continue", sends[0].header.Get("Expect"))
				if c.closes {
					require.Zero(t, sends[0].body)
				}
				r := idem.ReportOf(resp)
				for _, send := range sends {
					require.Equal(t, []string{r.Key}, send.header.Values("Idempotency-Key"))
				}
				require.Len(t, r.Attempts, want, "the repeat counts as an attempt")
				require.Equal(t, want, r.Sends)
				if want == 2 {
					require.Empty(t, sends[1].header.Values("Expect"))
					if !c.always { // a refusal may come before the body has gone out
						require.NoError(t, sends[1].err)
						require.Equal(t, expectedBody, sends[1].body)
					}
					require.Equal(t, "at-once", r.Attempts[0].WaitFrom)
				}
				if c.always || want == 1 {
					require.Equal(t, http.StatusExpectationFailed, resp.StatusCode)
					require.Equal(t, idem.Refused, r.Outcome)
				} else {
					require.Equal(t, http.StatusOK, resp.StatusCode)
					require.Equal(t, idem.Executed, r.Outcome)
				}
			})
		})
	}
}

// After an answer that came before the body, the connection either ends or
// gets that body to its end: the next request is never read as the body of
// the first.
func TestC55_EarlyAnswerLeavesNoConnectionThatWaitsForABody(t *testing.T) {
	for _, closes := range []bool{true, false} {
		t.Run(fmt.Sprintf("connection closed %t", closes), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newExpectServer(t, 5*time.Second, func(n int, _ *expectedSend, c net.Conn, takeBody func()) bool {
					if n == 1 {
						_, _ = io.WriteString(c, early(http.StatusServiceUnavailable, closes))
						if closes {
							_ = c.(*memConn).CloseWrite()
						}
						takeBody()
						return !closes
					}
					_, _ = io.WriteString(c, continueLine)
					takeBody()
					return saysOK(c)
				})
				tr := onWire(s.base)
				resp, err := tr.RoundTrip(expecting(t, s.url))
				require.NoError(t, err)
				readAll(t, resp)
				again, err := tr.RoundTrip(expecting(t, s.url))
				require.NoError(t, err)
				readAll(t, again)

				sends := s.settled(t)
				require.Len(t, sends, 3)
				if closes {
					require.Zero(t, sends[0].body, "the body was not wanted")
				}
				for i, send := range sends[1:] {
					require.NoError(t, send.err)
					require.Equal(t, expectedBody, send.body)
					require.Equal(t, "100-continue", send.header.Get("Expect"), "a 503 says nothing about the expectation")
					if send.conn == sends[0].conn {
						require.Equal(t, expectedBody, sends[0].body, "send %d came on a connection that had its body", i+2)
					}
				}
				r := idem.ReportOf(resp)
				require.Equal(t, []string{r.Key}, sends[0].header.Values("Idempotency-Key"))
				require.Equal(t, []string{r.Key}, sends[1].header.Values("Idempotency-Key"))
				require.Len(t, r.Attempts, 2)
				require.Equal(t, 2, r.Sends)
				require.Equal(t, idem.Executed, r.Outcome)
			})
		})
	}
}

func TestC55_ServerThatNeverSays100GetsTheBodyAfterTheTimeout(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := newExpectServer(t, 50*time.Millisecond, func(_ int, _ *expectedSend, c net.Conn, takeBody func()) bool {
			takeBody()
			return saysOK(c)
		})
		start := time.Now()
		resp, err := onWire(s.base).RoundTrip(expecting(t, s.url))
		took := time.Since(start)
		require.NoError(t, err)
		readAll(t, resp)
		sends := s.seen()
		require.Len(t, sends, 1)
		require.Equal(t, expectedBody, sends[0].body)
		require.Len(t, idem.ReportOf(resp).Attempts, 1)
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		require.Equal(t, 50*time.Millisecond, took)
	})
}
