package webhook

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// problem is a refusal: an RFC 9457 document, and what Done hears of it. The
// document says nothing of what was delivered, and nothing of what failed inside.
type problem struct {
	status int
	reason string // for programs
	detail string // for people
	header [2]string
	cause  error
}

// unknownWait is what Retry-After says where nobody knows: a claim's usual lease.
const unknownWait = 30 * time.Second

func (p *problem) write(w http.ResponseWriter) {
	body, err := json.Marshal(struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail"`
		Reason string `json:"reason"`
	}{"about:blank", http.StatusText(p.status), p.status, p.detail, p.reason})
	if err != nil {
		panic("webhook: a problem does not marshal: " + err.Error()) // strings and a number always do
	}
	if p.header[0] != "" {
		w.Header().Set(p.header[0], p.header[1])
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.status)
	_, _ = w.Write(append(body, '\n')) // the sender may have left; it comes again
}

func notSetUp(err error) *problem {
	return &problem{status: http.StatusInternalServerError, reason: "not-set-up", detail: "The receiver is not set up.", cause: err}
}

func wrongMethod() *problem {
	return &problem{
		status: http.StatusMethodNotAllowed, reason: "method-not-allowed", detail: "Events are delivered with POST.",
		header: [2]string{"Allow", http.MethodPost}, cause: errMethod,
	}
}

var errMethod = errors.New("webhook: the method is not POST")

func tooLarge(err *http.MaxBytesError) *problem {
	return &problem{
		status: http.StatusRequestEntityTooLarge, reason: "body-too-large",
		detail: fmt.Sprintf("The body has more than %d bytes.", err.Limit), cause: &bodyError{err},
	}
}

// bodyError names the field that sets the limit.
type bodyError struct{ limit *http.MaxBytesError }

func (e *bodyError) Error() string {
	return fmt.Sprintf("webhook: the body has more than %d bytes (Handler.MaxBody)", e.limit.Limit)
}

func (e *bodyError) Unwrap() error { return e.limit }

// readBefore is no fault of the sender, who may come again when it is mended.
func readBefore(err error) *problem {
	return &problem{
		status: http.StatusInternalServerError, reason: "body-read-before",
		detail: "The receiver has read the body before it was verified.", cause: err,
	}
}

func cutOff(err error) *problem {
	return &problem{status: http.StatusBadRequest, reason: "body-cut-off", detail: "The body did not arrive whole.", cause: err}
}

// notVerified tells apart what the sender could mend.
func notVerified(err error) *problem {
	switch {
	case errors.Is(err, ErrTimestamp):
		return &problem{
			status: http.StatusBadRequest, reason: "timestamp",
			detail: "The delivery was signed too long ago or for a time to come, or its time cannot be read.", cause: err,
		}
	case errors.Is(err, ErrID):
		return &problem{status: http.StatusBadRequest, reason: "event-id", detail: "The delivery has no usable event id.", cause: err}
	}
	return &problem{
		status: http.StatusUnauthorized, reason: "signature", detail: "The delivery has no signature, or none that is right.",
		header: [2]string{"WWW-Authenticate", "Webhook-Signature"}, // RFC 9110 demands a challenge of every 401
		cause:  err,
	}
}

// comeAgain is for an event that is not known to be done.
func comeAgain(r Result, err error) *problem {
	p := &problem{status: http.StatusServiceUnavailable, cause: err}
	wait := unknownWait
	var e *Error
	if errors.As(err, &e) && !e.Again.IsZero() {
		wait = time.Until(e.Again)
	}
	seconds := max(1, int64((wait+time.Second-1)/time.Second))
	p.header = [2]string{"Retry-After", strconv.FormatInt(seconds, 10)}
	switch r {
	case InProgress:
		p.reason, p.detail = "in-progress", "The event is being handled. Deliver it again later."
	case Unmarked:
		p.reason, p.detail = "not-marked", "It is not known for certain that the event is done. Deliver it again later."
	default:
		p.reason, p.detail = "unavailable", "The event cannot be handled now. Deliver it again later."
	}
	return p
}
