package idem_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/internal/witness"
)

// The frames, flags and error codes of RFC 9113 that these tests speak.
const (
	frameData, frameHeaders, frameRST, frameSettings, framePing, frameGoAway = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7

	flagEndStream, flagAck, flagEndHeaders = 0x1, 0x1, 0x4

	codeNone, codeInternal, codeRefused, codeCancel = 0x0, 0x2, 0x7, 0x8
)

// h2Request is one request that arrived whole, or that was looked at when its
// headers had arrived.
type h2Request struct {
	conn   int // number of its connection, from 1
	stream uint32
	block  []byte // header block, as it was on the wire
	body   []byte
}

// h2Conn is the server's end of an HTTP/2 connection, frame by frame.
type h2Conn struct {
	n      int
	c      net.Conn
	r      *bufio.Reader
	open   map[uint32]*h2Request
	silent bool // nothing is written any more, not even an acknowledgement
}

// h2Server speaks HTTP/2 by hand in virtual time, without TLS. serve gets each
// connection after the preface; it is closed when serve returns.
type h2Server struct {
	url  string
	base *http.Transport

	mu   sync.Mutex // guards seen
	seen []h2Request
}

func newH2Server(t *testing.T, serve func(s *h2Server, c *h2Conn)) *h2Server {
	t.Helper()
	s := &h2Server{}
	s.url, s.base = rawInMemory(t, func(n int, c net.Conn, r *bufio.Reader) {
		preface := make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
		if _, err := io.ReadFull(r, preface); err != nil {
			return
		}
		conn := &h2Conn{n: n, c: c, r: r, open: map[uint32]*h2Request{}}
		// No table of headers at the client (SETTINGS_HEADER_TABLE_SIZE 0):
		// each header is spelled out in each request.
		conn.frame(frameSettings, 0, 0, []byte{0, 1, 0, 0, 0, 0})
		serve(s, conn)
	})
	s.base.Protocols = new(http.Protocols)
	s.base.Protocols.SetUnencryptedHTTP2(true)
	return s
}

// frame writes one frame; its errors show at the next read.
func (c *h2Conn) frame(kind, flags byte, stream uint32, payload []byte) {
	if c.silent {
		return
	}
	f := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	f = binary.BigEndian.AppendUint32(f, stream)
	_, _ = c.c.Write(append(f, payload...))
}

func (c *h2Conn) reset(stream uint32, code uint32) {
	c.frame(frameRST, 0, stream, binary.BigEndian.AppendUint32(nil, code))
}

// goAway says that the streams above last were not and will not be looked at.
func (c *h2Conn) goAway(last uint32) {
	c.frame(frameGoAway, 0, 0, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, last), codeNone))
}

// answer writes a complete answer of JSON.
func (c *h2Conn) answer(stream uint32, status int, body string, header ...string) {
	block := []byte{0x88} // :status 200, of the static table
	if status != http.StatusOK {
		block = append([]byte{0x48, 3}, fmt.Sprint(status)...) // the name of the same, and a value
	}
	for i, text := range append([]string{"content-type", "application/json"}, header...) {
		if i%2 == 0 {
			block = append(block, 0) // literal, new name
		}
		block = append(append(block, byte(len(text))), text...)
	}
	c.frame(frameHeaders, flagEndHeaders, stream, block)
	c.frame(frameData, flagEndStream, stream, []byte(body))
}

// next reads frames until a request has come: its headers (whole false), or
// all of it.
func (s *h2Server) next(c *h2Conn, whole bool) (*h2Request, error) {
	for {
		var head [9]byte
		if _, err := io.ReadFull(c.r, head[:]); err != nil {
			return nil, err
		}
		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(c.r, payload); err != nil {
			return nil, err
		}
		kind, flags, stream := head[3], head[4], binary.BigEndian.Uint32(head[5:])
		switch kind {
		case frameSettings:
			if flags&flagAck == 0 {
				c.frame(frameSettings, flagAck, 0, nil)
			}
		case framePing:
			if flags&flagAck == 0 {
				c.frame(framePing, flagAck, 0, payload)
			}
		case frameHeaders:
			c.open[stream] = &h2Request{conn: c.n, stream: stream, block: payload}
		case frameData:
			if r := c.open[stream]; r != nil {
				r.body = append(r.body, payload...)
			}
		}
		r := c.open[stream]
		if r != nil && (kind == frameHeaders && !whole || (kind == frameHeaders || kind == frameData) && flags&flagEndStream != 0) {
			delete(c.open, stream)
			s.mu.Lock()
			s.seen = append(s.seen, *r)
			s.mu.Unlock()
			return r, nil
		}
	}
}

// sends is what arrived so far.
func (s *h2Server) sends() []h2Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// through is a Transport for s with the policy of the cases.
func (s *h2Server) through(edit ...func(*idem.Transport)) *idem.Transport {
	return onWire(s.base, edit...)
}

// requireKeyInBlocks requires that key is in each of the sends, once.
func requireKeyInBlocks(t *testing.T, key string, sends []h2Request) {
	t.Helper()
	require.NotEmpty(t, key)
	for i, s := range sends {
		require.Equal(t, 1, bytes.Count(s.block, huffman(t, key)), "key of send %d", i+1)
	}
}

// huffman writes text as header values are written (RFC 7541, appendix B), as
// far as keys need it.
func huffman(t *testing.T, text string) []byte {
	t.Helper()
	codes := map[rune]string{
		'-': "010110", '/': "011000",
		'0': "00000", '1': "00001", '2': "00010", '3': "011001", '4': "011010", '5': "011011",
		'6': "011100", '7': "011101", '8': "011110", '9': "011111",
		'a': "00011", 'b': "100011", 'c': "00100", 'd': "100100", 'e': "00101", 'f': "100101", 'o': "00111", 'r': "101100",
	}
	var bits strings.Builder
	for _, c := range text {
		require.Contains(t, codes, c)
		bits.WriteString(codes[c])
	}
	for bits.Len()%8 != 0 {
		bits.WriteByte('1')
	}
	var out []byte
	for b := bits.String(); b != ""; b = b[8:] {
		var x byte
		for _, bit := range b[:8] {
			x = x<<1 | byte(bit-'0')
		}
		out = append(out, x)
	}
	return out
}

// answersAll answers every request of a connection.
func (s *h2Server) answersAll(c *h2Conn) {
	for {
		r, err := s.next(c, true)
		if err != nil {
			return
		}
		c.answer(r.stream, http.StatusOK, `{}`)
	}
}

// keepsOpen reads until the client hangs up.
func (s *h2Server) keepsOpen(c *h2Conn) { _, _ = io.Copy(io.Discard, c.r) }

// warmUp makes the connection that the next request will find.
func (s *h2Server) warmUp(t *testing.T, tr http.RoundTripper) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url, nil)
	require.NoError(t, err)
	resp, err := tr.RoundTrip(req)
	require.NoError(t, err)
	readAll(t, resp)
}

func TestC51_GoawayIsRetriedWithTheWholeBody(t *testing.T) {
	const body = `{"amount":1999,"reference":"order-51"}`
	for _, reused := range []bool{false, true} {
		t.Run(fmt.Sprintf("reused connection %t", reused), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newH2Server(t, func(s *h2Server, c *h2Conn) {
					if c.n > 1 {
						s.answersAll(c)
						return
					}
					if reused {
						r, err := s.next(c, true)
						if err != nil {
							return
						}
						c.answer(r.stream, http.StatusOK, `{}`)
					}
					if _, err := s.next(c, false); err == nil {
						c.goAway(0)
					}
				})
				tr := s.through()
				warm := 0
				if reused {
					warm = 1
					s.warmUp(t, tr)
				}
				resp, err := tr.RoundTrip(newPostOnce(t, t.Context(), s.url, body))
				require.NoError(t, err)
				readAll(t, resp)
				sends := s.sends()[warm:]
				require.Len(t, sends, 2)
				require.Equal(t, body, string(sends[1].body))
				require.NotEqual(t, sends[0].conn, sends[1].conn)
				r := idem.ReportOf(resp)
				requireKeyInBlocks(t, r.Key, sends)
				require.Len(t, r.Attempts, 2)
				require.Equal(t, 2, r.Sends)
				require.Equal(t, reused, r.Attempts[0].Reused)
				require.Equal(t, idem.Executed, r.Outcome)
			})
		})
	}
}

// The row that the other failures of C12 leave to a server of frames.
func TestC12_SameKeyAfterGoaway(t *testing.T) {
	for from, key := range map[string]func(*http.Request) *http.Request{
		"minted":  func(r *http.Request) *http.Request { return r },
		"header":  func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", "order-12"); return r },
		"context": func(r *http.Request) *http.Request { return r.WithContext(idem.WithKey(r.Context(), "order-12")) },
		"operation": func(r *http.Request) *http.Request {
			return r.WithContext(idem.WithOperation(r.Context(), idem.Operation{Name: "charge", ID: "order-12/1"}))
		},
	} {
		t.Run(from, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newH2Server(t, func(s *h2Server, c *h2Conn) {
					if c.n > 1 {
						s.answersAll(c)
					} else if _, err := s.next(c, true); err == nil {
						c.goAway(0)
					}
				})
				resp, err := s.through().RoundTrip(key(newPost(t, t.Context(), s.url, `{"amount":12}`)))
				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, s.sends(), 2)
				require.Equal(t, s.sends()[0].body, s.sends()[1].body)
				r := idem.ReportOf(resp)
				requireKeyInBlocks(t, r.Key, s.sends())
				require.Len(t, r.Attempts, 2)
				require.Equal(t, from, r.KeyFrom)
				require.Equal(t, idem.Executed, r.Outcome)
			})
		})
	}
}

// What a GOAWAY says of a stream: those above its number were not looked at,
// the others may still be answered, or not.
func TestGoawayBelowAtAndAboveTheStream(t *testing.T) {
	for _, c := range []struct {
		name     string
		last     uint32 // of the GOAWAY; the stream is 1
		answered bool
		attempts int
	}{
		{"below", 0, false, 2},
		{"at, then no answer", 1, false, 2},
		{"at, then the answer", 1, true, 1},
		{"above, then no answer", 1<<31 - 1, false, 2},
		{"above, then the answer", 1<<31 - 1, true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newH2Server(t, func(s *h2Server, conn *h2Conn) {
					if conn.n > 1 {
						s.answersAll(conn)
						return
					}
					r, err := s.next(conn, true)
					if err != nil {
						return
					}
					conn.goAway(c.last)
					if c.answered {
						conn.answer(r.stream, http.StatusOK, `{}`)
						s.keepsOpen(conn)
					}
				})
				tr := s.through()
				resp, err := tr.RoundTrip(newPost(t, t.Context(), s.url, `{"amount":1}`))
				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, s.sends(), c.attempts)
				r := idem.ReportOf(resp)
				requireKeyInBlocks(t, r.Key, s.sends())
				require.Len(t, r.Attempts, c.attempts)
				require.Equal(t, c.attempts, r.Sends)
				if c.attempts == 2 {
					require.Equal(t, idem.Unknown, r.Attempts[0].Outcome, "a connection was there: no proof is read out of the text of an error")
				}
				require.Equal(t, idem.Executed, r.Outcome)

				resp, err = tr.RoundTrip(newPost(t, t.Context(), s.url, `{"amount":2}`))
				require.NoError(t, err)
				readAll(t, resp)
				require.NotEqual(t, 1, s.sends()[c.attempts].conn, "a connection that goes away takes no further operation")
				require.Len(t, idem.ReportOf(resp).Attempts, 1)
			})
		})
	}
}

func TestAlwaysGoawayEndsWithTheAttempts(t *testing.T) {
	for _, body := range []string{`{"amount":1}`, ""} {
		t.Run(fmt.Sprintf("body %q", body), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newH2Server(t, func(s *h2Server, c *h2Conn) {
					if _, err := s.next(c, true); err == nil {
						time.Sleep(10 * time.Millisecond) // so that the attempt comes to its end
						c.goAway(0)
					}
				})
				tr := s.through(withAttempts(2), func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
				start := time.Now()
				req := newPost(t, t.Context(), s.url, body)
				if body == "" {
					req.Body, req.GetBody = nil, nil
				}
				_, err := tr.RoundTrip(req)
				e := requireError(t, err, idem.ErrAttemptsExhausted)
				require.Less(t, time.Since(start), 3*time.Second)
				require.Len(t, e.Attempts, 2)
				require.Equal(t, idem.Unknown, e.Outcome)
				if body != "" {
					require.Equal(t, 2, e.Sends)
					require.Len(t, s.sends(), 2)
				} else {
					// net/http goes on by itself until the attempt ends; what was
					// under way then may not have arrived.
					require.GreaterOrEqual(t, e.Sends, len(s.sends()))
					require.LessOrEqual(t, e.Sends, len(s.sends())+len(e.Attempts))
				}
				requireKeyInBlocks(t, e.Key, s.sends())
			})
		})
	}
}

func TestRefusedStreamStaysWithinTheAttempts(t *testing.T) {
	for _, c := range []struct {
		name     string
		body     string
		refusals int // 0: all
		attempts int
	}{
		{"with a body, once", `{"amount":1}`, 1, 2},
		{"with a body, always", `{"amount":1}`, 0, 3},
		{"without a body, once", "", 1, 1},
		{"without a body, always", "", 0, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := newH2Server(t, func(s *h2Server, conn *h2Conn) {
					for {
						r, err := s.next(conn, true)
						switch {
						case err != nil:
							return
						case c.refusals == 0 || len(s.sends()) <= c.refusals:
							time.Sleep(10 * time.Millisecond) // so that the attempt comes to its end
							conn.reset(r.stream, codeRefused)
						default:
							conn.answer(r.stream, http.StatusOK, `{}`)
						}
					}
				})
				tr := s.through(withAttempts(3), func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 200 * time.Millisecond })
				var report idem.Report
				req := newPost(t, idem.WithReport(t.Context(), &report), s.url, c.body)
				if c.body == "" {
					req.Body, req.GetBody = nil, nil
				}
				start := time.Now()
				resp, err := tr.RoundTrip(req)
				require.Less(t, time.Since(start), 3*time.Second)
				if c.refusals == 0 {
					requireError(t, err, idem.ErrAttemptsExhausted)
					require.Equal(t, idem.Unknown, report.Outcome)
				} else {
					require.NoError(t, err)
					readAll(t, resp)
					require.Equal(t, idem.Executed, report.Outcome)
				}
				require.Len(t, report.Attempts, c.attempts)
				if c.body != "" {
					require.Len(t, s.sends(), c.attempts, "a send for each attempt")
					require.Equal(t, c.attempts, report.Sends)
				} else {
					// net/http repeats it by itself; the last one of an attempt may
					// have been given up on its way.
					require.GreaterOrEqual(t, report.Sends, len(s.sends()))
					require.LessOrEqual(t, report.Sends, len(s.sends())+c.attempts-1)
				}
				requireKeyInBlocks(t, report.Key, s.sends())
				for _, send := range s.sends() {
					require.Equal(t, c.body, string(send.body))
				}
			})
		})
	}
}

func TestStreamResetAfterTheEffectIsAskedAgain(t *testing.T) {
	for _, code := range []uint32{codeNone, codeInternal, codeCancel} {
		for _, headers := range []bool{false, true} {
			t.Run(fmt.Sprintf("code %d, headers sent %t", code, headers), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := newH2Server(t, func(s *h2Server, c *h2Conn) {
						for {
							r, err := s.next(c, true)
							switch {
							case err != nil:
								return
							case len(s.sends()) > 1:
								c.answer(r.stream, http.StatusOK, `{"id":"pay_1"}`, "idempotent-replay", "true")
							default:
								if headers {
									c.frame(frameHeaders, flagEndHeaders, r.stream,
										append([]byte{0x88, 0, 12}, "content-type\x10application/json"...))
									c.frame(frameData, 0, r.stream, []byte(`{"id":`))
								}
								c.reset(r.stream, code)
							}
						}
					})
					resp, err := s.through().RoundTrip(newPost(t, t.Context(), s.url, `{"amount":1}`))
					require.NoError(t, err)
					require.JSONEq(t, `{"id":"pay_1"}`, readAll(t, resp))
					require.Len(t, s.sends(), 2)
					r := idem.ReportOf(resp)
					requireKeyInBlocks(t, r.Key, s.sends())
					require.Len(t, r.Attempts, 2)
					require.Equal(t, idem.Unknown, r.Attempts[0].Outcome)
					require.Equal(t, idem.Executed, r.Outcome)
					require.True(t, r.Replayed)
				})
			})
		}
	}
}

func TestC52_DeadConnectionIsLeft(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := newH2Server(t, func(s *h2Server, c *h2Conn) {
			if c.n > 1 {
				s.answersAll(c)
				return
			}
			r, err := s.next(c, true)
			if err != nil {
				return
			}
			c.answer(r.stream, http.StatusOK, `{}`)
			c.silent = true
			s.answersAll(c)
		})
		tr := s.through(func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
		s.warmUp(t, tr)
		for range 2 { // the dead connection is still in the pool
			before := len(s.sends())
			start := time.Now()
			resp, err := tr.RoundTrip(newPost(t, t.Context(), s.url, `{"amount":52}`))
			require.NoError(t, err)
			readAll(t, resp)
			require.Less(t, time.Since(start), time.Second)
			sends := s.sends()[before:]
			require.Len(t, sends, 2)
			require.Equal(t, 1, sends[0].conn)
			require.Greater(t, sends[1].conn, 1)
			r := idem.ReportOf(resp)
			requireKeyInBlocks(t, r.Key, sends)
			require.Len(t, r.Attempts, 2)
			require.True(t, r.Attempts[0].Reused)
			require.ErrorIs(t, r.Attempts[0].Err, context.DeadlineExceeded)
			require.Equal(t, idem.Executed, r.Outcome)
		}
	})
}

// The pool still has the dead connection after an attempt beside it: a 503
// there is no reason to go back.
func TestDeadConnectionIsNotMetAgainWithinTheOperation(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := newH2Server(t, func(s *h2Server, c *h2Conn) {
			for {
				r, err := s.next(c, true)
				switch {
				case err != nil:
					return
				case c.n == 2:
					c.answer(r.stream, http.StatusServiceUnavailable, `{}`)
				default:
					c.answer(r.stream, http.StatusOK, `{}`)
					c.silent = c.n == 1
				}
			}
		})
		tr := s.through(func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
		s.warmUp(t, tr)
		resp, err := tr.RoundTrip(newPost(t, t.Context(), s.url, `{"amount":52}`))
		require.NoError(t, err)
		readAll(t, resp)
		var conns []int
		for _, send := range s.sends()[1:] {
			conns = append(conns, send.conn)
		}
		require.Equal(t, []int{1, 2, 3}, conns)
		require.Len(t, idem.ReportOf(resp).Attempts, 3)
	})
}

func TestMisdirectedOverHTTP2GoesToAnotherConnection(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := newH2Server(t, func(s *h2Server, c *h2Conn) {
			for {
				r, err := s.next(c, true)
				switch {
				case err != nil:
					return
				case c.n == 1:
					c.answer(r.stream, http.StatusMisdirectedRequest, `{}`)
				default:
					c.answer(r.stream, http.StatusOK, `{}`)
				}
			}
		})
		for _, body := range []string{`{"amount":1}`, ""} {
			before := len(s.sends())
			req := newPost(t, t.Context(), s.url, body)
			resp, err := s.through().RoundTrip(req)
			require.NoError(t, err)
			readAll(t, resp)
			sends := s.sends()[before:]
			require.Len(t, sends, 2)
			require.Equal(t, 1, sends[0].conn)
			require.Greater(t, sends[1].conn, 1)
			r := idem.ReportOf(resp)
			requireKeyInBlocks(t, r.Key, sends)
			require.Equal(t, []int{421, 200}, []int{r.Attempts[0].Status, r.Attempts[1].Status})
			require.Equal(t, idem.Executed, r.Outcome)
		}
	})
}

// http2Front is a TLS front of s that speaks HTTP/2, in virtual time. A
// connection that dies behind it resets the stream in front of it.
type http2Front struct {
	url  string
	base *http.Transport

	mu     sync.Mutex // guards conns, protos
	conns  []string   // of each request: where it came from
	protos map[string]int
}

func newHTTP2Front(t *testing.T, s *fakeserver.Server) *http2Front {
	t.Helper()
	f := &http2Front{protos: map[string]int{}}
	target, err := url.Parse(s.URL())
	require.NoError(t, err)
	behind := &httputil.ReverseProxy{
		Transport:    s.Transport(),
		Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(target) },
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.conns = append(f.conns, r.RemoteAddr)
		f.protos[r.Proto]++
		f.mu.Unlock()
		behind.ServeHTTP(w, r)
	}))
	l := newMemListener()
	require.NoError(t, server.Listener.Close())
	server.Listener = l
	server.EnableHTTP2 = true
	server.StartTLS()
	f.url = server.URL
	f.base = server.Client().Transport.(*http.Transport)
	f.base.DialContext = l.dial
	t.Cleanup(func() {
		f.base.CloseIdleConnections()
		s.Close() // what hangs behind
		server.CloseClientConnections()
		server.Close()
	})
	return f
}

// The faults that matter, over the HTTP/2 and TLS of net/http: one hits the first attempt.
func TestFaultsOverHTTP2(t *testing.T) {
	const (
		before = fakeserver.BeforeEffect
		after  = fakeserver.AfterEffect
	)
	for _, c := range []struct {
		fault    fakeserver.Fault
		sends    int
		conns    int // that the sends came on
		attempts int
		least    time.Duration
		final    int // a status that ends the operation; 0: it is executed
	}{
		{fault: fakeserver.Fault{Kind: fakeserver.Status, Status: 503, Point: before}, sends: 2, conns: 1, attempts: 2},
		{fault: fakeserver.Fault{Kind: fakeserver.Status, Status: 503, Point: after}, sends: 2, conns: 1, attempts: 2},
		{fault: fakeserver.Fault{Kind: fakeserver.Status, Status: 408, Point: before}, sends: 2, conns: 2, attempts: 2},
		{fault: fakeserver.Fault{Kind: fakeserver.Status, Status: 421, Point: before}, sends: 2, conns: 2, attempts: 2},
		{fault: fakeserver.Fault{Kind: fakeserver.Status, Status: 409, RetryAfter: "1", Point: before}, sends: 2, conns: 1, attempts: 2, least: time.Second},
		{fault: fakeserver.Fault{Kind: fakeserver.Status, Status: 422, Point: before}, sends: 1, conns: 1, attempts: 1, final: 422},
		{fault: fakeserver.Fault{Kind: fakeserver.Reset, Point: before}, sends: 2, conns: 1, attempts: 2},
		{fault: fakeserver.Fault{Kind: fakeserver.Reset, Point: after}, sends: 2, conns: 1, attempts: 2},
		{fault: fakeserver.Fault{Kind: fakeserver.Hang, Point: before}, sends: 2, conns: 2, attempts: 2, least: 300 * time.Millisecond},
		{fault: fakeserver.Fault{Kind: fakeserver.Hang, Point: after}, sends: 2, conns: 2, attempts: 2, least: 300 * time.Millisecond},
		{fault: fakeserver.Fault{Kind: fakeserver.Late, Point: after, Delay: 2 * time.Second}, sends: 2, conns: 2, attempts: 2, least: 300 * time.Millisecond},
		{fault: fakeserver.Fault{Kind: fakeserver.Late, Point: fakeserver.InBody, Delay: 2 * time.Second}, sends: 2, attempts: 2, least: 300 * time.Millisecond},
		{fault: fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "length"}, sends: 2, conns: 1, attempts: 2},
		{fault: fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "chunked"}, sends: 2, conns: 1, attempts: 2},
		// The effect outlasts the attempt: a 409 meanwhile.
		{fault: fakeserver.Fault{Kind: fakeserver.Slow, Delay: 700 * time.Millisecond}, sends: 3, attempts: 3, least: time.Second},
	} {
		t.Run(c.fault.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				f := newHTTP2Front(t, s)
				require.NoError(t, s.Script("", c.fault, fakeserver.Fault{}))
				call := viaTransport(onWire(f.base, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 300 * time.Millisecond }))
				start := time.Now()
				req := newPost(t, t.Context(), f.url+"/v1/payments", paymentJSON("h2", 1999))
				claim := &witness.Claim{Reference: "h2"}
				report, resp, err := call(req)
				took := time.Since(start)
				claim.Hear(report, resp, err)

				effects := 1
				if c.final != 0 {
					effects = 0
				}
				require.Len(t, s.Effects(), effects)
				require.Len(t, s.Sends(), c.sends)
				require.Len(t, keysSent(s.Sends()), 1)
				requireWhole(t, s.Sends(), paymentJSON("h2", 1999))
				if c.final != 0 {
					require.Equal(t, idem.Refused, report.Outcome)
					require.Equal(t, c.final, claim.Status)
				} else {
					require.Equal(t, idem.Executed, report.Outcome)
					require.Equal(t, http.StatusCreated, claim.Status)
				}
				require.Len(t, report.Attempts, c.attempts)
				require.Equal(t, c.sends, report.Sends)
				require.GreaterOrEqual(t, took, c.least)
				require.LessOrEqual(t, took, c.least+2*time.Second)
				_, found := witness.Judge(s, []*witness.Claim{claim})
				requireHonest(t, found)

				f.mu.Lock()
				defer f.mu.Unlock()
				require.Equal(t, map[string]int{"HTTP/2.0": c.sends}, f.protos)
				if c.conns > 0 {
					slices.Sort(f.conns)
					require.Len(t, slices.Compact(f.conns), c.conns)
				}
			})
		})
	}
}

// pinned is an HTTP/2 of somebody else (golang.org/x/net/http2 configures a
// transport in this way) whose only connection is dead: whoever comes with a
// new one is put on that one.
type pinned struct{ conn *tls.Conn }

func (p *pinned) RoundTrip(req *http.Request) (*http.Response, error) {
	httptrace.ContextClientTrace(req.Context()).GotConn(httptrace.GotConnInfo{Conn: p.conn, Reused: true})
	_ = req.Body.Close()
	<-req.Context().Done()
	return nil, req.Context().Err()
}

func TestDeadConnectionOfAnotherHTTP2IsLeft(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		f := newHTTP2Front(t, s)
		f.base.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{
			"h2": func(_ string, c *tls.Conn) http.RoundTripper {
				t.Cleanup(func() { _ = c.Close() })
				return &pinned{c}
			},
		}
		f.base.TLSClientConfig.NextProtos = []string{"h2", "http/1.1"}
		tr := onWire(f.base, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 100 * time.Millisecond })
		resp, err := tr.RoundTrip(newPost(t, t.Context(), f.url+"/v1/payments", paymentJSON("h2", 1999)))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Len(t, idem.ReportOf(resp).Attempts, 2)
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
		f.mu.Lock()
		defer f.mu.Unlock()
		require.Equal(t, map[string]int{"HTTP/2.0": 1}, f.protos, "beside that pool, and still over HTTP/2")
	})
}

// A base whose owner has switched HTTP/2 off has none beside its pool either.
func TestBaseWithoutHTTP2StaysWithoutIt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		f := newHTTP2Front(t, s)
		f.base.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
		f.base.ForceAttemptHTTP2 = false
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 408}, fakeserver.Fault{}))
		resp, err := onWire(f.base).RoundTrip(newPost(t, t.Context(), f.url+"/v1/payments", paymentJSON("h1", 1999)))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2)
		f.mu.Lock()
		defer f.mu.Unlock()
		require.Equal(t, map[string]int{"HTTP/1.1": 2}, f.protos)
	})
}

func TestReusedKeyOverHTTP2IsRefused(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		f := newHTTP2Front(t, s)
		for i, amount := range []int{1999, 2999} {
			tr := onWire(f.base) // each with its own memory, as two processes have
			req := newPost(t, idem.WithKey(t.Context(), "order-1"), f.url+"/v1/payments", paymentJSON("h2", amount))
			resp, err := tr.RoundTrip(req)
			require.NoError(t, err)
			readAll(t, resp)
			require.Len(t, s.Effects(), 1)
			require.Len(t, s.Sends(), i+1)
			if i == 1 {
				require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrKeyReused)
				require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
			}
		}
	})
}
