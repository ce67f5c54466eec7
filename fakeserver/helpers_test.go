package fakeserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// inBothWorlds runs a test over real sockets and, in virtual time, in memory.
func inBothWorlds(t *testing.T, test func(t *testing.T, s *Server)) {
	t.Helper()
	t.Run("sockets", func(t *testing.T) {
		s := New()
		defer s.Close()
		test(t, s)
	})
	t.Run("memory", func(t *testing.T) { inMemory(t, test) })
}

func inMemory(t *testing.T, test func(t *testing.T, s *Server)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := NewInMemory()
		defer s.Close()
		test(t, s)
	})
}

const (
	payments1999 = `{"amount":1999,"currency":"usd","reference":"order-1","source":"tok_visa"}`
	doubleRoom   = `{"room_type":"double","guest":"Ada","reference":"trip-1","nights":2}`
)

// call is one request. Without GetBody, so that net/http never sends it again by itself.
type call struct {
	method, path, key, body string
	header                  http.Header
	within                  time.Duration // the client leaves then; 0 = no limit
	from                    func() bool   // within counts from when this is true; nil = from the start
	take                    int           // the client leaves when it has so many bytes of the body; 0 = it takes all
	client                  *http.Client  // nil = the server's own
}

// So many ticks are how long a test waits for what must come: 30 s at least, more where the machine is slow.
const (
	ticks = 6000
	tick  = 5 * time.Millisecond
)

type reply struct {
	status  int
	header  http.Header
	body    string
	err     error // of the exchange
	bodyErr error // of reading the body
}

func (c call) send(s *Server) reply {
	ctx, leave := context.WithCancelCause(context.Background())
	var watch sync.WaitGroup
	defer watch.Wait()
	defer leave(nil)
	switch {
	case c.from != nil:
		watch.Go(func() {
			for i := 0; ctx.Err() == nil && !c.from(); i++ {
				if i == ticks {
					leave(errors.New("what the client waits for before it leaves did not happen"))
				}
				time.Sleep(tick)
			}
			select {
			case <-time.After(c.within):
			case <-ctx.Done():
			}
			leave(nil)
		})
	case c.within > 0:
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.within)
		defer cancel()
	}
	url := c.path
	if strings.HasPrefix(url, "/") {
		url = s.URL() + url
	}
	var body io.Reader
	if c.body != "" {
		body = strings.NewReader(c.body)
	}
	req, err := http.NewRequestWithContext(ctx, c.method, url, body)
	if err != nil {
		return reply{err: err}
	}
	req.GetBody = nil
	for name, values := range c.header {
		req.Header[name] = values
	}
	if c.key != "" {
		req.Header.Set("Idempotency-Key", c.key)
	}
	client := c.client
	if client == nil {
		client = s.Client()
	}
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	var data bytes.Buffer
	if c.take > 0 {
		_, _ = io.CopyN(&data, resp.Body, int64(c.take)) // the next read says why it failed
		leave(nil)
	}
	_, err = data.ReadFrom(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: data.String(), bodyErr: err}
}

func (r reply) field(t *testing.T, name string) any {
	t.Helper()
	require.NoError(t, r.err)
	var doc map[string]any
	require.NoError(t, json.Unmarshal([]byte(r.body), &doc), r.body)
	return doc[name]
}

func pay(key string) call {
	return call{method: "POST", path: "/v1/payments", key: key, body: payments1999}
}

func book(key string) call {
	return call{method: "POST", path: "/v1/hotels/ritz/reservations", key: key, body: doubleRoom}
}

func (c call) with(name, value string) call {
	h := c.header.Clone()
	if h == nil {
		h = http.Header{}
	}
	h[name] = append(h[name], value)
	c.header = h
	return c
}

// requireProblem checks an RFC 9457 body.
func requireProblem(t *testing.T, r reply, status int, kind string) {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, status, r.status, r.body)
	require.Equal(t, "application/problem+json", r.header.Get("Content-Type"))
	require.Equal(t, problemBase+kind, r.field(t, "type"))
	require.Equal(t, float64(status), r.field(t, "status"))
	require.NotEmpty(t, r.field(t, "title"))
	require.NotEmpty(t, r.field(t, "detail"))
}

// requireReplay sends the operation again and checks that nothing new happened.
func requireReplay(t *testing.T, s *Server, c call) reply {
	t.Helper()
	before := len(s.Effects(Filter{Key: c.key}))
	r := c.send(s)
	require.NoError(t, r.err)
	require.NoError(t, r.bodyErr)
	require.Equal(t, "true", r.header.Get("Idempotent-Replay"), "%d %s", r.status, r.body)
	require.Len(t, s.Effects(Filter{Key: c.key}), before)
	return r
}

func keyedRequest(t *testing.T, s *Server, key string) *http.Request {
	t.Helper()
	req, err := http.NewRequest("POST", s.URL()+"/v1/payments", strings.NewReader(payments1999))
	require.NoError(t, err)
	req.GetBody = nil
	req.Header.Set("Idempotency-Key", key)
	return req
}

// soon waits for what a goroutine of the server is about to do.
func soon(t *testing.T, happened func() bool) {
	t.Helper()
	for range ticks {
		if happened() {
			return
		}
		time.Sleep(tick)
	}
	t.Fatal("it did not happen within 30 seconds")
}

// longEnough is for steps that must end before a real delay has passed. It gives the test twice the delay each time, until
// the test says that the machine was quick enough.
func longEnough(t *testing.T, delay time.Duration, test func(delay time.Duration) bool) {
	t.Helper()
	for range 8 {
		if test(delay) {
			return
		}
		t.Logf("%v were too short for this machine", delay)
		delay *= 2
	}
	t.Fatal("no delay was long enough")
}

// arrived says that the server has read a whole request with the key.
func arrived(s *Server, key string) func() bool {
	return func() bool {
		n := s.Sends(Filter{Key: key})
		return len(n) > 0 && n[len(n)-1].BodySHA256 != ""
	}
}

func effected(s *Server, key string) func() bool {
	return func() bool { return len(s.Effects(Filter{Key: key})) > 0 }
}

// inProgress says that the server has reserved the key and works on its effect.
func inProgress(s *Server, key string) func() bool {
	return func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for at, rec := range s.keys {
			if at.key == key && rec.running {
				return true
			}
		}
		return false
	}
}

// scriptLeft says that so many steps of ScriptConns are left.
func scriptLeft(s *Server, steps int) func() bool {
	return func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.connFaults) == steps
	}
}

// inTime is an operation whose effect is still to come until goOn, or until a fault of time has passed if that is later.
// In virtual time the fault alone will do, as no machine is too slow for it.
func inTime(s *Server, key string) (c call, goOn func()) {
	if s.mem != nil {
		return pay(key), func() {}
	}
	open := make(chan struct{})
	s.Handle("POST /v1/charges", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-open:
			w.WriteHeader(201)
		case <-r.Context().Done():
			w.WriteHeader(500)
		}
	}))
	c = charge(key)
	c.within = 30 * time.Second // if it must not wait for goOn, and does
	return c, sync.OnceFunc(func() { close(open) })
}

// counted is a client of its own, which knows how many connections it holds.
type counted struct {
	*http.Client
	transport *http.Transport
	open      atomic.Int64
}

func countConns(s *Server) *counted {
	c := &counted{transport: s.Transport()}
	c.Client = &http.Client{Transport: c.transport}
	dial := c.transport.DialContext
	c.transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		c.open.Add(1)
		return &countedConn{Conn: conn, closed: sync.OnceFunc(func() { c.open.Add(-1) })}, nil
	}
	return c
}

// none says that the client has seen the end of all its connections: net/http takes one out of use before it closes it.
func (c *counted) none() bool { return c.open.Load() == 0 }

type countedConn struct {
	net.Conn
	closed func()
}

func (c *countedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}
