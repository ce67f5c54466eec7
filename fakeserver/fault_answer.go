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
	if len(x.bodyOf(*a)) == 0 {
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
	case "bad-chunk":
		framing = []field{{"Transfer-Encoding", "chunked"}, lastAnswer}
		body = append([]byte("1z\r\n"), body...)
	case "gzip":
		body = zipped(body, 0)
		body = body[:cut(x.fault.Bytes, len(body))]
		// The framing is whole here, so a client would keep the connection that is about to close.
		framing = []field{{"Content-Encoding", "gzip"}, contentLength(len(body)), lastAnswer}
	default:
		framing = []field{contentLength(len(body))}
		body = body[:cut(x.fault.Bytes, len(body))]
	}
	x.note(a.status)
	if x.frames != nil {
		h := *a
		if x.fault.Encoding == "gzip" {
			h = h.with("Content-Encoding", "gzip")
		}
		x.begin(h)
		_, _ = x.w.Write(a.body[:cut(x.fault.Bytes, len(a.body))])
		_ = http.NewResponseController(x.w).Flush()
		x.drop()
	}
	conn := x.seize()
	defer x.release(conn)
	_, _ = conn.Write(append(head(*a, framing...), body...))
	return true
}

// begin sends the headers of an answer alone.
func (x *exchange) begin(a answer) {
	x.headers(a)
	_ = http.NewResponseController(x.w).Flush()
}

// cut is how much of n bytes is sent: at least one byte is always missing.
func cut(want, n int) int {
	if want == 0 {
		want = n / 2
	}
	return max(0, min(want, n-1))
}

// zipped is the body, and spaces behind it up to so many bytes, under gzip.
func zipped(body []byte, upTo int) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write(body) // nothing fails on a bytes.Buffer
	spaces := bytes.Repeat([]byte(" "), min(1<<20, max(0, upTo-len(body))))
	for left := upTo - len(body); left > 0; left -= len(spaces) {
		_, _ = z.Write(spaces[:min(left, len(spaces))])
	}
	_ = z.Close()
	return b.Bytes()
}

const (
	bigHeaders = 11 << 20 // net/http's client takes 10 MiB
	bombSize   = 64 << 20
)

func (x *exchange) bigHeaders(*answer) bool {
	size := x.fault.Bytes
	if size == 0 {
		size = bigHeaders
	}
	if x.frames != nil {
		x.frames.inject(bigHeaderBlock(x.stream, size))
		x.drop()
	}
	x.note(http.StatusOK)
	conn := x.seize()
	defer x.release(conn)
	filler := bytes.Repeat([]byte("a"), 64<<10)
	_, err := conn.Write([]byte("HTTP/1.1 200 OK\r\nX-Filler: "))
	for left := size; left > 0 && err == nil; left -= len(filler) {
		_, err = conn.Write(filler[:min(left, len(filler))])
	}
	_, _ = conn.Write([]byte("\r\nContent-Length: 0\r\n\r\n"))
	return true
}

func (x *exchange) bomb(a *answer) bool {
	size := x.fault.Bytes
	if size == 0 {
		size = bombSize
	}
	b := a.with("Content-Encoding", "gzip")
	b.body = zipped(a.body, size)
	x.reply(b)
	return true
}

func (x *exchange) mangled(a *answer) bool {
	b := *a
	b.body = a.body[:cut(x.fault.Bytes, len(a.body))]
	x.reply(b)
	return true
}

func (x *exchange) garbage(*answer) bool {
	if x.frames != nil {
		x.frames.inject([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) // read as a frame it is far too long
		x.drop()
	}
	conn := x.seize()
	defer x.release(conn)
	_, _ = conn.Write([]byte("\x15\x03\x01 this is not HTTP\r\n\r\n"))
	return true
}

func (x *exchange) flood(*answer) bool {
	every := x.fault.Delay
	if every == 0 {
		every = 10 * time.Millisecond
	}
	if x.frames != nil {
		for x.s.wait(every, x.gone()) {
			x.w.WriteHeader(http.StatusEarlyHints)
		}
		x.drop()
	}
	conn := x.seize()
	defer x.release(conn)
	for {
		if _, err := conn.Write([]byte("HTTP/1.1 103 Early Hints\r\n\r\n")); err != nil || !x.s.wait(every, nil) {
			return true
		}
	}
}

func (x *exchange) endless(*answer) bool {
	a := x.fault.failure(http.StatusServiceUnavailable)
	x.note(a.status)
	if x.frames != nil {
		x.w.WriteHeader(a.status)
		drops := []byte(".")
		if x.fault.Delay == 0 {
			drops = bytes.Repeat(drops, 16<<10)
		}
		for err := error(nil); err == nil && x.s.wait(x.fault.Delay, x.gone()); {
			_, err = x.w.Write(drops)
			_ = http.NewResponseController(x.w).Flush()
		}
		x.drop()
	}
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
