package idem_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/internal/leak"
)

// TestMain fails the run if goroutines are left behind.
func TestMain(m *testing.M) {
	os.Exit(leak.Run(m, (&idem.Transport{}).CloseIdleConnections, http.DefaultTransport.(*http.Transport).CloseIdleConnections))
}

// casePolicy is the policy of the cases: 4 attempts, 10 ms base, 80 ms cap, a
// budget of its own that is off.
func casePolicy() idem.Policy {
	return idem.Policy{
		MaxAttempts:  4,
		BackoffBase:  10 * time.Millisecond,
		BackoffCap:   80 * time.Millisecond,
		ThrottleBase: 10 * time.Millisecond,
		Budget:       &idem.Budget{Capacity: -1},
	}
}

// virtual runs f in a bubble with virtual time.
func virtual(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// inMemory starts a fake server for virtual time; it ends with the test.
func inMemory(t *testing.T) *fakeserver.Server {
	t.Helper()
	s := fakeserver.NewInMemory()
	t.Cleanup(s.Close)
	return s
}

// onLoopback starts a fake server on a real socket; it ends with the test.
func onLoopback(t *testing.T) *fakeserver.Server {
	t.Helper()
	s := fakeserver.New()
	t.Cleanup(s.Close)
	return s
}

// over is a Transport for s with the policy of the cases, changed by edit.
func over(s *fakeserver.Server, edit ...func(*idem.Transport)) *idem.Transport {
	t := &idem.Transport{Base: s.Transport(), Policy: casePolicy()}
	for _, e := range edit {
		e(t)
	}
	return t
}

// paymentJSON is the body of a payment.
func paymentJSON(reference string, amount int) string {
	return fmt.Sprintf(`{"amount":%d,"currency":"usd","reference":%q}`, amount, reference)
}

// newPost is a POST of JSON with a rewindable body.
func newPost(t testing.TB, ctx context.Context, url, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	return req
}

// newPayment is a POST of a payment of 1999 to s.
func newPayment(t testing.TB, ctx context.Context, s *fakeserver.Server, reference string) *http.Request {
	t.Helper()
	return newPost(t, ctx, s.URL()+"/v1/payments", paymentJSON(reference, 1999))
}

// readAll reads and closes the body of an answer.
func readAll(t testing.TB, resp *http.Response) string {
	t.Helper()
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(b)
}

// keysSent is the distinct keys among the sends, in order of appearance.
func keysSent(sends []fakeserver.Send) []string {
	var keys []string
	seen := map[string]bool{}
	for _, s := range sends {
		if !seen[s.Key] {
			seen[s.Key] = true
			keys = append(keys, s.Key)
		}
	}
	return keys
}

// roundTripFunc is a base in one function.
type roundTripFunc func(*http.Request) (*http.Response, error)

func (f roundTripFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// answer is what a stub base returns.
func answer(req *http.Request, status int, header http.Header, body string) *http.Response {
	if header == nil {
		header = http.Header{}
	}
	return &http.Response{
		StatusCode: status, Status: fmt.Sprintf("%d %s", status, http.StatusText(status)),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: header, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)), Request: req,
	}
}

// closeCounter is a body that counts its Closes and fails a Read after one.
type closeCounter struct {
	io.Reader
	closes atomic.Int32
}

func (c *closeCounter) Read(p []byte) (int, error) {
	if c.closes.Load() > 0 {
		return 0, fmt.Errorf("read after close")
	}
	return c.Reader.Read(p)
}

func (c *closeCounter) Close() error {
	c.closes.Add(1)
	return nil
}

// rawServer listens on loopback and hands each connection, counted from 1, to
// serve, which may read and write what it likes; the connection is closed when
// serve returns. It ends with the test.
func rawServer(t *testing.T, serve func(n int, c net.Conn, r *bufio.Reader)) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	serveRaw(t, l, serve)
	return "http://" + l.Addr().String()
}

// rawInMemory is rawServer for virtual time; base reaches it, under any name.
func rawInMemory(t *testing.T, serve func(n int, c net.Conn, r *bufio.Reader)) (url string, base *http.Transport) {
	t.Helper()
	l := newMemListener()
	serveRaw(t, l, serve)
	base = newBase(t)
	base.DialContext = l.dial
	return "http://" + l.Addr().String(), base
}

func serveRaw(t *testing.T, l net.Listener, serve func(n int, c net.Conn, r *bufio.Reader)) {
	var wg sync.WaitGroup
	var mu sync.Mutex // guards conns
	var conns []net.Conn
	wg.Add(1)
	go func() {
		defer wg.Done()
		for n := 1; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Add(1)
			go func() {
				defer wg.Done()
				defer func() { _ = c.Close() }()
				serve(n, c, bufio.NewReader(c))
			}()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
}

// memListener accepts connections in memory.
type memListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
	n     atomic.Int32
}

func newMemListener() *memListener {
	return &memListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *memListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	up, down := newMemPipe(), newMemPipe()
	here, there := memAddr(fmt.Sprintf("client-%d:80", l.n.Add(1))), memAddr(l.Addr().String())
	select {
	case l.conns <- &memConn{in: up, out: down, local: there, remote: here}:
		return &memConn{in: down, out: up, local: here, remote: there}, nil
	case <-l.done:
		return nil, &net.OpError{Op: "dial", Net: "mem", Err: syscall.ECONNREFUSED}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

// Addr has a name that the certificate of httptest is valid for.
func (l *memListener) Addr() net.Addr { return memAddr("example.com:80") }

type memAddr string

func (memAddr) Network() string  { return "mem" }
func (a memAddr) String() string { return string(a) }

// memConn is one end of a connection in memory. net.Pipe would not do: it has
// no buffer, so that an answer which comes before the request was read could
// stop both ends.
type memConn struct {
	in, out       *memPipe
	local, remote memAddr
}

func (c *memConn) Read(p []byte) (int, error)  { return c.in.read(p) }
func (c *memConn) Write(p []byte) (int, error) { return c.out.write(p) }
func (c *memConn) LocalAddr() net.Addr         { return c.local }
func (c *memConn) RemoteAddr() net.Addr        { return c.remote }

func (c *memConn) Close() error {
	c.in.change(func(p *memPipe) { p.deaf = true })
	return c.CloseWrite()
}

func (c *memConn) CloseWrite() error {
	c.out.change(func(p *memPipe) { p.ended = true })
	return nil
}

func (c *memConn) SetDeadline(t time.Time) error {
	_ = c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

func (c *memConn) SetReadDeadline(t time.Time) error {
	c.in.change(func(p *memPipe) { p.readBy.set(p, t) })
	return nil
}

func (c *memConn) SetWriteDeadline(t time.Time) error {
	c.out.change(func(p *memPipe) { p.writeBy.set(p, t) })
	return nil
}

// memPipe is one direction of a connection in memory.
type memPipe struct {
	mu              sync.Mutex // guards what follows
	changed         *sync.Cond
	data            []byte
	ended           bool // nothing more is written
	deaf            bool // nothing more is read
	readBy, writeBy memDeadline
}

const memWindow = 64 << 10 // what a memPipe holds before its writer waits

func newMemPipe() *memPipe {
	p := &memPipe{}
	p.changed = sync.NewCond(&p.mu)
	return p
}

func (p *memPipe) change(f func(*memPipe)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(p)
	p.changed.Broadcast()
}

func (p *memPipe) read(b []byte) (n int, err error) {
	p.change(func(p *memPipe) {
		for len(p.data) == 0 && !p.ended && !p.deaf && !p.readBy.over {
			p.changed.Wait()
		}
		switch {
		case p.deaf:
			err = net.ErrClosed
		case p.readBy.over:
			err = os.ErrDeadlineExceeded
		case len(p.data) == 0:
			err = io.EOF
		default:
			n = copy(b, p.data)
			p.data = p.data[n:]
		}
	})
	return n, err
}

func (p *memPipe) write(b []byte) (n int, err error) {
	for err == nil && n < len(b) {
		p.change(func(p *memPipe) {
			for len(p.data) == memWindow && !p.ended && !p.deaf && !p.writeBy.over {
				p.changed.Wait()
			}
			switch {
			case p.ended:
				err = net.ErrClosed
			case p.deaf:
				err = syscall.EPIPE
			case p.writeBy.over:
				err = os.ErrDeadlineExceeded
			default:
				k := min(len(b)-n, memWindow-len(p.data))
				p.data = append(p.data, b[n:n+k]...)
				n += k
			}
		})
	}
	return n, err
}

// memDeadline is a deadline of one direction.
type memDeadline struct {
	over  bool
	timer *time.Timer
}

func (d *memDeadline) set(p *memPipe, at time.Time) {
	if d.timer != nil {
		d.timer.Stop()
	}
	d.over, d.timer = false, nil
	switch left := time.Until(at); {
	case at.IsZero():
	case left <= 0:
		d.over = true
	default:
		var timer *time.Timer
		timer = time.AfterFunc(left, func() {
			p.change(func(*memPipe) { d.over = d.over || d.timer == timer })
		})
		d.timer = timer
	}
}

// newBase is a real transport whose connections end with the test.
func newBase(t *testing.T) *http.Transport {
	t.Helper()
	b := &http.Transport{}
	t.Cleanup(b.CloseIdleConnections)
	return b
}
