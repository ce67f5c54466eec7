package fakeserver

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
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
	within                  time.Duration // 0 = no limit
	client                  *http.Client  // nil = the server's own
}

type reply struct {
	status  int
	header  http.Header
	body    string
	err     error // of the exchange
	bodyErr error // of reading the body
}

func (c call) send(s *Server) reply {
	ctx := context.Background()
	if c.within > 0 {
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
	data, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(data), bodyErr: err}
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
	for range 2000 {
		if happened() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal("it did not happen within ten seconds")
}
