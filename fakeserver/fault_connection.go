package fakeserver

import (
	"io"
	"net"
	"time"
)

// Faults of the connection: it dies, or nobody speaks on it.

func (x *exchange) reset(*answer) bool {
	x.readPart()
	conn := x.seize()
	switch c := conn.(type) {
	case *net.TCPConn:
		_ = c.SetLinger(0) // closing then sends RST instead of FIN
	case *memConn:
		c.Reset()
	}
	x.release(conn)
	return true
}

func (x *exchange) close(*answer) bool {
	x.readPart()
	x.drop()
	return true
}

// readPart reads as much of the body as the fault says. It fails only with a body that is shorter or broken off.
func (x *exchange) readPart() {
	if x.fault.Bytes > 0 {
		n, _ := io.CopyN(io.Discard, x.r.Body, int64(x.fault.Bytes))
		x.s.mu.Lock()
		x.q.send.BodyLen = n
		x.s.mu.Unlock()
	}
}

func (x *exchange) hang(*answer) bool {
	select {
	case <-x.gone():
	case <-x.s.done:
	}
	x.drop()
	return true
}

func (x *exchange) stale(a *answer) bool {
	x.note(a.status)
	conn := x.seize()
	defer x.release(conn)
	var framing []field
	if bodyAllowed(a.status) {
		framing = []field{contentLength(len(a.body))}
	}
	if _, err := conn.Write(append(head(*a, framing...), a.body...)); err != nil {
		return true
	}
	if x.fault.Delay > 0 {
		_ = conn.SetReadDeadline(time.Now().Add(x.fault.Delay))
	} else {
		_ = conn.SetReadDeadline(time.Time{})
	}
	_, _ = conn.Read(make([]byte, 4096)) // whatever ends it: the next request, the client, the delay, or Close
	return true
}
