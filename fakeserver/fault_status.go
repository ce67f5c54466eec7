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
	x.storeFailure()
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
	x.reply(x.fault.page())
	return true
}

// page is what a gateway says.
func (f *Fault) page() answer {
	a := answer{status: f.Status, header: []field{{"Content-Type", "text/html; charset=utf-8"}, {"Server", "gateway"}}}
	if a.status == 0 {
		a.status = http.StatusBadGateway
	}
	title := titleOf(a.status)
	a.body = []byte("<html>\n<head><title>" + title + "</title></head>\n<body><h1>" + title + "</h1></body>\n</html>\n")
	return a
}

// runBehind leaves the request running behind a gateway that has lost patience with it and answers for it.
func (x *exchange) runBehind() answer {
	if a, running := x.leaveRunning(); !running {
		return a // it has been answered before, or must not run
	}
	if x.fault.Kind == HTML {
		return x.fault.page()
	}
	return x.fault.failure(0)
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
	if x.frames != nil {
		x.reply(a) // net/http then ends the stream, its body unread
		return true
	}
	x.note(a.status)
	conn := x.seize()
	defer x.release(conn)
	if _, err := conn.Write(append(head(a, contentLength(len(a.body)), lastAnswer), x.bodyOf(a)...)); err != nil {
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
