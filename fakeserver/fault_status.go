package fakeserver

import (
	"net/http"
	"strings"
	"time"
)

// Faults that put another answer in the place of the true one.

// failure is the problem that a fault answers with.
func (f *Fault) failure(otherwise int) answer {
	status := f.Status
	if status == 0 {
		status = otherwise
	}
	a := problem(status, "injected-fault", "A fault made this answer.", nil)
	if f.RetryAfter != "" {
		for line := range strings.SplitSeq(f.RetryAfter, "\n") {
			a = a.with("Retry-After", line)
		}
	}
	if !bodyAllowed(status) {
		a.body = nil
	}
	return a
}

func (x *exchange) status(*answer) bool {
	x.reply(x.fault.failure(0))
	return true
}

// storedFailure is nil for every other fault.
func (f *Fault) storedFailure() *answer {
	if !f.is(StoredFailure) {
		return nil
	}
	a := f.failure(http.StatusInternalServerError)
	return &a
}

func (x *exchange) html(*answer) bool {
	a := answer{status: x.fault.Status, header: []field{{"Content-Type", "text/html; charset=utf-8"}, {"Server", "gateway"}}}
	if a.status == 0 {
		a.status = http.StatusBadGateway
	}
	title := titleOf(a.status)
	a.body = []byte("<html>\n<head><title>" + title + "</title></head>\n<body><h1>" + title + "</h1></body>\n</html>\n")
	x.reply(a)
	return true
}

func (x *exchange) redirect(a *answer) bool {
	status, to := x.fault.Status, x.fault.Location
	switch {
	case to == "other":
		to = x.s.otherURL + x.r.URL.RequestURI()
	case to == "" && a != nil:
		if to = a.get("Location"); to == "" {
			x.reply(*a) // there is no new resource to point to
			return true
		}
	}
	switch {
	case status == 0 && a != nil:
		status = http.StatusSeeOther
	case status == 0:
		status = http.StatusTemporaryRedirect
	}
	x.reply(answer{status: status, header: []field{{"Location", to}}})
	return true
}

// earlyHold is how long the connection of an early answer stays open, so that the client can read it before the unread
// body turns the close into a reset. net/http's own server waits as long.
const earlyHold = 500 * time.Millisecond

func (x *exchange) earlyAnswer(*answer) bool {
	a := x.fault.failure(http.StatusServiceUnavailable)
	x.note(a.status)
	conn := x.seize()
	defer x.release(conn)
	if _, err := conn.Write(append(head(a, contentLength(len(a.body)), lastAnswer), a.body...)); err != nil {
		return true
	}
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
	hold := x.fault.Delay
	if hold == 0 {
		hold = earlyHold
	}
	x.s.wait(hold, nil)
	return true
}
