package fakeserver

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"strconv"
	"time"
)

// Faults in the bytes of the answer: cut, not HTTP, or without end.

func (x *exchange) cutHeaders(a *answer) bool {
	conn := x.seize()
	defer x.release(conn)
	start := head(*a, contentLength(len(a.body)))
	_, _ = conn.Write(start[:cut(x.fault.Bytes, len(start))])
	return true
}

func (x *exchange) cutBody(a *answer) bool {
	if len(a.body) == 0 {
		return x.cutHeaders(a)
	}
	body := a.body
	var framing []field
	switch x.fault.Encoding {
	case "chunked":
		framing = []field{{"Transfer-Encoding", "chunked"}}
		size := cut(x.fault.Bytes, len(body))
		body = append([]byte(strconv.FormatInt(int64(size), 16)+"\r\n"), body[:size]...)
		body = append(body, "\r\n"...) // and no last chunk
	case "gzip":
		body = zipped(body)
		body = body[:cut(x.fault.Bytes, len(body))]
		// The framing is whole here, so a client would keep the connection that is about to close.
		framing = []field{{"Content-Encoding", "gzip"}, contentLength(len(body)), lastAnswer}
	default:
		framing = []field{contentLength(len(body))}
		body = body[:cut(x.fault.Bytes, len(body))]
	}
	x.note(a.status)
	conn := x.seize()
	defer x.release(conn)
	_, _ = conn.Write(append(head(*a, framing...), body...))
	return true
}

// cut is how much of n bytes is sent: at least one byte is always missing.
func cut(want, n int) int {
	if want == 0 {
		want = n / 2
	}
	return max(0, min(want, n-1))
}

func zipped(body []byte) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write(body) // neither fails on a bytes.Buffer
	_ = z.Close()
	return b.Bytes()
}

func (x *exchange) garbage(*answer) bool {
	conn := x.seize()
	defer x.release(conn)
	_, _ = conn.Write([]byte("\x15\x03\x01 this is not HTTP\r\n\r\n"))
	return true
}

func (x *exchange) flood(*answer) bool {
	conn := x.seize()
	defer x.release(conn)
	every := x.fault.Delay
	if every == 0 {
		every = 10 * time.Millisecond
	}
	for {
		if _, err := conn.Write([]byte("HTTP/1.1 103 Early Hints\r\n\r\n")); err != nil || !x.s.wait(every, nil) {
			return true
		}
	}
}

func (x *exchange) endless(*answer) bool {
	a := x.fault.failure(http.StatusServiceUnavailable)
	x.note(a.status)
	conn := x.seize()
	defer x.release(conn)
	if _, err := conn.Write(head(a, field{"Transfer-Encoding", "chunked"})); err != nil {
		return true
	}
	chunk := []byte("1\r\n.\r\n")
	if x.fault.Delay == 0 {
		const size = 16 << 10
		chunk = append([]byte("4000\r\n"), bytes.Repeat([]byte("."), size)...)
		chunk = append(chunk, "\r\n"...)
	}
	for {
		if _, err := conn.Write(chunk); err != nil || !x.s.wait(x.fault.Delay, nil) {
			return true
		}
	}
}
