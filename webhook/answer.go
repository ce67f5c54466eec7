package webhook

import (
	"fmt"
	"maps"
	"net/http"
)

// maxAnswer is how much of an answer is held back. Senders look at its status.
const maxAnswer = 64 << 10

// answer holds back what Next answers, until it is known whether the event is
// marked.
type answer struct {
	header http.Header
	status int // 0: not said yet
	body   []byte
	turned bool  // a failure took the place of a success
	cut    error // of the Write that did not fit; nil: all did
}

// newAnswer begins with what was set before Next.
func newAnswer(outer http.Header) *answer { return &answer{header: outer.Clone()} }

func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

// WriteHeader takes no notice of 1xx, and of a second status, as net/http does, but
// for one: nothing has left yet, so a failure after a success is believed, and what was
// said of success is dropped. An event would be lost otherwise.
func (a *answer) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("webhook: invalid status %d", status)) // as net/http does
	}
	switch {
	case status < 200:
	case a.status == 0:
		a.status = status
	case a.success() && status/100 != 2:
		a.status, a.body, a.turned, a.cut = status, nil, true, nil
	}
}

// Write keeps what fits. The status stands, because the event was handled.
func (a *answer) Write(p []byte) (int, error) {
	if a.status == 0 {
		a.status = http.StatusOK
	}
	n := min(len(p), maxAnswer-len(a.body))
	a.body = append(a.body, p[:n]...)
	if n < len(p) {
		a.cut = fmt.Errorf("%w: the answer to a delivery has more than %d bytes; the rest is dropped", ErrInvalid, maxAnswer)
		return n, a.cut
	}
	return n, nil
}

func (a *answer) code() int {
	if a.status == 0 {
		return http.StatusOK
	}
	return a.status
}

func (a *answer) success() bool { return a.code()/100 == 2 }

func (a *answer) copyTo(w http.ResponseWriter) {
	h := w.Header()
	clear(h)
	maps.Copy(h, a.header)
	if a.cut != nil || a.turned {
		h.Del("Content-Length") // of another body
	}
	w.WriteHeader(a.code())
	if len(a.body) > 0 {
		_, _ = w.Write(a.body) // the sender may have left; the event is settled either way
	}
}
