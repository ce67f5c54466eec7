package fakeserver

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// memBuffer is how much one direction of an in-memory connection holds before its writer waits, like a socket's window.
const memBuffer = 64 << 10

// memListener hands in-memory connections to an http.Server.
// Everything in it blocks on channels and sync.Cond only, which testing/synctest counts as durably blocked.
type memListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newMemListener() *memListener {
	return &memListener{conns: make(chan net.Conn), done: make(chan struct{})}
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

func (l *memListener) Addr() net.Addr { return memAddr("fakeserver.test") }

func (l *memListener) dial(ctx context.Context) (net.Conn, error) {
	client, server := memPair()
	select {
	case l.conns <- server:
		return client, nil
	case <-l.done:
		return nil, refused(l.Addr())
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func refused(to net.Addr) error {
	return &net.OpError{Op: "dial", Net: to.Network(), Addr: to, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
}

type memAddr string

func (memAddr) Network() string  { return "mem" }
func (a memAddr) String() string { return string(a) }

// memConn is one end of a buffered two-way connection. net.Pipe would not do: it has no buffer, so an answer sent
// before the request was read could deadlock both ends, and it cannot reset.
type memConn struct {
	in, out       *memPipe
	local, remote memAddr
}

func memPair() (client, server *memConn) {
	up, down := newMemPipe(), newMemPipe()
	const c, s = memAddr("client"), memAddr("fakeserver.test")
	return &memConn{in: down, out: up, local: c, remote: s}, &memConn{in: up, out: down, local: s, remote: c}
}

func (c *memConn) Read(p []byte) (int, error)  { return c.in.read(p) }
func (c *memConn) Write(p []byte) (int, error) { return c.out.write(p) }
func (c *memConn) LocalAddr() net.Addr         { return c.local }
func (c *memConn) RemoteAddr() net.Addr        { return c.remote }

// Close ends both directions: the peer reads what was written and then io.EOF, and its writes fail with EPIPE.
func (c *memConn) Close() error {
	c.in.change(func(p *memPipe) { p.deaf = true; p.data, p.at = nil, 0 })
	return c.CloseWrite()
}

// CloseWrite ends the outgoing direction only.
func (c *memConn) CloseWrite() error {
	c.out.change(func(p *memPipe) { p.ended = true })
	return nil
}

// Reset ends the connection like a TCP RST: whatever the peer does next fails with ECONNRESET, unread bytes are lost.
func (c *memConn) Reset() {
	reset := func(p *memPipe) { p.reset = true; p.data, p.at = nil, 0 }
	c.in.change(reset)
	c.out.change(reset)
	_ = c.Close()
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

// memPipe is one direction.
type memPipe struct {
	mu              sync.Mutex // guards everything below
	changed         sync.Cond
	data            []byte
	at              int  // data[at:] is unread
	ended           bool // the writer closed
	deaf            bool // the reader closed
	reset           bool
	readBy, writeBy memDeadline
}

func newMemPipe() *memPipe {
	p := new(memPipe)
	p.changed.L = &p.mu
	return p
}

func (p *memPipe) change(f func(*memPipe)) {
	p.mu.Lock()
	f(p)
	if p.ended && p.deaf {
		p.readBy.set(p, time.Time{}) // a timer that outlives the connection would keep a synctest bubble busy
		p.writeBy.set(p, time.Time{})
	}
	p.changed.Broadcast()
	p.mu.Unlock()
}

func (p *memPipe) read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case p.deaf:
			return 0, net.ErrClosed
		case p.reset:
			return 0, memError("read", syscall.ECONNRESET)
		case p.readBy.passed():
			return 0, os.ErrDeadlineExceeded
		case len(b) == 0:
			return 0, nil
		case p.at < len(p.data):
			n := copy(b, p.data[p.at:])
			p.at += n
			if p.at == len(p.data) {
				p.data, p.at = p.data[:0], 0
			}
			p.changed.Broadcast()
			return n, nil
		case p.ended:
			return 0, io.EOF
		}
		p.changed.Wait()
	}
}

func (p *memPipe) write(b []byte) (written int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch room := memBuffer - (len(p.data) - p.at); {
		case p.reset:
			return written, memError("write", syscall.ECONNRESET)
		case p.ended:
			return written, net.ErrClosed
		case p.deaf:
			return written, memError("write", syscall.EPIPE)
		case p.writeBy.passed():
			return written, os.ErrDeadlineExceeded
		case written == len(b):
			return written, nil
		case room > 0:
			if p.at > 0 {
				p.data, p.at = p.data[:copy(p.data, p.data[p.at:])], 0
			}
			n := min(room, len(b)-written)
			p.data = append(p.data, b[written:written+n]...)
			written += n
			p.changed.Broadcast()
			continue
		}
		p.changed.Wait()
	}
}

func memError(op string, errno syscall.Errno) error {
	return &net.OpError{Op: op, Net: "mem", Addr: memAddr("fakeserver.test"), Err: os.NewSyscallError(op, errno)}
}

type memDeadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *memDeadline) set(p *memPipe, t time.Time) {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.at = t
	if t.IsZero() {
		return
	}
	if left := time.Until(t); left > 0 {
		d.timer = time.AfterFunc(left, func() { p.change(func(*memPipe) {}) })
	}
}

func (d *memDeadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }
