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
	cut    bool
}

// newAnswer begins with what was set before Next.
func newAnswer(outer http.Header) *answer { return &answer{header: outer.Clone()} }

func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

// WriteHeader takes no notice of 1xx and of a second status, as net/http does
// of the second.
func (a *answer) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("webhook: invalid status %d", status)) // as net/http does
	}
	if a.status == 0 && status >= 200 {
		a.status = status
	}
}

// Write keeps what fits. The error is for Next alone: the status stands, because
// the event was handled.
func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	n := min(len(p), maxAnswer-len(a.body))
	a.body = append(a.body, p[:n]...)
	if n < len(p) {
		a.cut = true
		return n, fmt.Errorf("%w: the answer to a delivery has more than %d bytes; the rest is dropped", ErrInvalid, maxAnswer)
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
	if a.cut {
		h.Del("Content-Length")
	}
	w.WriteHeader(a.code())
	if len(a.body) > 0 {
		_, _ = w.Write(a.body) // the sender may have left; the event is settled either way
	}
}
