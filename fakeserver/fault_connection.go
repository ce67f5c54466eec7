package fakeserver

import (
	"io"
	"net"
	"net/http"
	"time"
)

// Faults of the connection: it dies, or nobody speaks on it.

func (x *exchange) reset(*answer) bool {
	x.readPart()
	if x.frames != nil {
		reset(x.frames.conn)
		x.drop()
	}
	conn := x.seize()
	reset(conn)
	x.release(conn)
	return true
}

// reset makes the end of the connection an RST.
func reset(conn net.Conn) {
	switch c := conn.(type) {
	case *net.TCPConn:
		_ = c.SetLinger(0) // closing then sends RST instead of FIN
		_ = c.Close()
	case *memConn:
		c.Reset()
	case interface{ NetConn() net.Conn }:
		reset(c.NetConn()) // below TLS, which would say goodbye
	}
}

func (x *exchange) close(*answer) bool {
	x.readPart()
	if x.frames != nil {
		_ = x.frames.conn.NetConn().Close()
	}
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
	if x.frames != nil {
		x.frames.endAtNextStream()
		if x.fault.Delay > 0 && x.s.begin() {
			go func() {
				defer x.s.leave()
				x.s.wait(x.fault.Delay, nil)
				_ = x.frames.conn.Close()
			}()
		}
		return false
	}
	return x.answerAndDie(a, nil)
}

func (x *exchange) extra(a *answer) bool {
	if x.frames != nil {
		return false
	}
	second := jsonAnswer(http.StatusOK, &payment{ID: "pay_extra", Object: "payment", Status: "succeeded"})
	return x.answerAndDie(a, append(head(second, contentLength(len(second.body))), second.body...))
}

// answerAndDie keeps the connection open after the answer and what follows it, but serves it no more.
func (x *exchange) answerAndDie(a *answer, more []byte) bool {
	x.note(a.status)
	conn := x.seize()
	defer x.release(conn)
	var framing []field
	if bodyAllowed(a.status) {
		framing = []field{contentLength(len(a.body))}
	}
	whole := append(head(*a, framing...), x.bodyOf(*a)...)
	if _, err := conn.Write(append(whole, more...)); err != nil {
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
