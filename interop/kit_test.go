package interop_test

import (
	"context"
	"errors"
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
	"github.com/idem-go/idem/fakeserver"
)

// policy waits for short times, because all servers here are on real sockets, and has no
// budget: losing every other answer is what the tests are for. What ends an
// attempt is an event and never its limit: that and the number of waits for an operation in
// progress are large, so that a slow server is waited for.
func policy() idem.Policy {
	return idem.Policy{
		MaxAttempts:    6,
		AttemptTimeout: time.Minute,
		MaxInProgress:  1000,
		BackoffBase:    2 * time.Millisecond,
		BackoffCap:     20 * time.Millisecond,
		ThrottleBase:   10 * time.Millisecond,
		Budget:         &idem.Budget{Capacity: -1},
	}
}

// loopback is a base of the test's own; its connections end with the test.
func loopback(t *testing.T) *http.Transport {
	t.Helper()
	base := &http.Transport{MaxIdleConnsPerHost: 8}
	t.Cleanup(base.CloseIdleConnections)
	return base
}

// fake starts the fake server on a real socket; it ends with the test.
func fake(t *testing.T, settings fakeserver.Settings, faults ...fakeserver.Fault) *fakeserver.Server {
	t.Helper()
	s := fakeserver.New()
	t.Cleanup(s.Close)
	s.Apply(settings)
	require.NoError(t, s.Inject(faults...))
	return s
}

// lostAnswers are n resets after the effect.
func lostAnswers(n int) fakeserver.Fault {
	return fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Times: n}
}

// requireOneKey fails if the sends have no key or more than one.
func requireOneKey(t *testing.T, sends []fakeserver.Send) {
	t.Helper()
	require.NotEmpty(t, sends)
	for _, s := range sends {
		require.NotEmpty(t, s.Key)
		require.Equal(t, sends[0].Key, s.Key)
	}
}

// call is one POST of JSON with its report.
type call struct {
	status int
	header http.Header
	body   string
	report idem.Report
	err    error
}

// post sends body once through rt.
func post(t *testing.T, ctx context.Context, rt http.RoundTripper, url, body string) (c call) {
	t.Helper()
	req, err := http.NewRequestWithContext(idem.WithReport(ctx, &c.report), http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: rt}).Do(req)
	if err != nil {
		c.err = err
		return c
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	c.status, c.header, c.body, c.err = resp.StatusCode, resp.Header, string(b), err
	return c
}

// soon waits until it is so. On a machine with too much to do that may take a while.
func soon(t *testing.T, is func() bool) {
	t.Helper()
	for start := time.Now(); !is(); time.Sleep(5 * time.Millisecond) {
		require.Less(t, time.Since(start), 30*time.Second, "it does not happen")
	}
}

// charge is the body of a charge at the foreign servers.
func charge(reference string) string {
	return fmt.Sprintf(`{"amount":1999,"currency":"usd","reference":%q}`, reference)
}

// relay is a network in front of a server: it carries bytes, and loses some
// answers when their first bytes arrive, so after the effect, with a reset.
type relay struct {
	net.Listener
	upstream string

	mu   sync.Mutex // guards what follows
	lose func() bool
	lost int
	open map[net.Conn]bool // true: a client's
	busy sync.WaitGroup
}

// inFront starts a relay before addr; it ends with the test.
func inFront(t *testing.T, addr string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{Listener: l, upstream: addr, lose: func() bool { return false }, open: map[net.Conn]bool{}}
	r.busy.Go(r.serve)
	t.Cleanup(func() {
		_ = l.Close()
		r.mu.Lock()
		for c := range r.open {
			_ = c.Close()
		}
		r.mu.Unlock()
		r.busy.Wait()
	})
	return r
}

func (r *relay) url() string { return "http://" + r.Addr().String() }

// loseNext loses the next n answers.
func (r *relay) loseNext(n int) {
	r.loseWhere(func() bool { n--; return n >= 0 })
}

// loseWhere asks lose, one call at a time, whether an answer is lost.
func (r *relay) loseWhere(lose func() bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lose = lose
}

func (r *relay) lostSoFar() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost
}

// losesThis decides about an answer.
func (r *relay) losesThis() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.lose() {
		return false
	}
	r.lost++
	return true
}

func (r *relay) hold(client, server net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open[client], r.open[server] = true, false
}

// cut resets the connections of all clients. What the server does for them goes on.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c, clients := range r.open {
		if clients {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}
}

func (r *relay) drop(conns ...net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
		delete(r.open, c)
	}
}

func (r *relay) serve() {
	for {
		client, err := r.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", r.upstream)
		if err != nil {
			_ = client.Close()
			continue
		}
		r.hold(client, server)
		r.busy.Go(func() {
			_, _ = io.Copy(server, client)
			_ = server.(*net.TCPConn).CloseWrite() // what is on its way back still arrives
		})
		r.busy.Go(func() {
			defer r.drop(client, server)
			r.answers(client, server)
		})
	}
}

// answers carries them back. The small answers of these tests come in one
// piece each, so one read is one answer.
func (r *relay) answers(client, server net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := server.Read(buf)
		if n > 0 && r.losesThis() {
			_ = client.(*net.TCPConn).SetLinger(0) // a reset, not an end
			return
		}
		if _, werr := client.Write(buf[:n]); err != nil || werr != nil {
			return
		}
	}
}

// errorOf finds the typed error behind what a client made of it.
func errorOf(t *testing.T, err error) *idem.Error {
	t.Helper()
	var e *idem.Error
	require.True(t, errors.As(err, &e), "%T: %v", err, err)
	return e
}

// refused is an address where nobody listens.
func refused(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	return addr
}

// effects counts the effects of a foreign server by reference.
type effects struct {
	mu sync.Mutex // guards n
	n  map[string]int
}

func (e *effects) add(reference string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.n == nil {
		e.n = map[string]int{}
	}
	e.n[reference]++
}

func (e *effects) of(reference string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.n[reference]
}
