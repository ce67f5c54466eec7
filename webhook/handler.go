package webhook

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/idem-go/idem/journal"
)

// Verifier says whether a delivery is genuine, and which event it is of. It gets
// the header and the body as they came, and must change neither. An error that
// matches ErrTimestamp or ErrID is answered with 400, any other with 401. It
// must compare in constant time, refuse old timestamps, and be safe for
// concurrent use; its errors must not repeat secret, signature or body.
//
// There is no Handler without one. What comes from one's own network, where nobody
// signs, has a Verifier that only reads the id.
type Verifier func(header http.Header, body []byte) (id string, err error)

// Handler runs Next once for each event that a sender of webhooks delivers. It
// is an http.Handler for POST, safe for concurrent use; its fields must not change
// after first use. Several Handlers, in several processes, may share a Journal.
//
// A Handler that lacks what it needs answers 500; Check says why.
type Handler struct {
	// Journal remembers the events. It must be given.
	Journal journal.Journal
	// Next handles an event: 2xx says that it is done, anything else that it
	// must come again, a redirect too. It must be given. The request has the
	// whole body; its context is described in the package comment. The answer is
	// held back until the event is marked; flushing and hijacking are not possible. So
	// a failure that Next says later than a 2xx, or later than a Write, which means 200,
	// is believed: the event has failed, and that status is answered, with what is
	// written after it. A 2xx after a failure changes nothing.
	//
	// The answer is cut at 64 KiB: the Write that does not fit returns an error that
	// matches ErrInvalid, which Done hears too. It is no reason to answer 500: the
	// event would come again, as long as the sender likes.
	//
	// Where Next finishes the entry in a transaction of its own, its 2xx must come after
	// the commit.
	Next http.Handler
	// Source names the sender, in 1 to 255 bytes: events are told apart by source and
	// id. Endpoints of one sender with one series of ids share it; different
	// senders must not. It must be given.
	Source string
	// Verify says whether a delivery is genuine. It must be given.
	Verify Verifier
	// ID finds another id in a delivery that is verified, for senders that
	// produce an event twice under two ids: a business id, such as the kind of event and
	// the order, in one text. An error is answered with 400. Nil: the id of Verify.
	ID func(header http.Header, body []byte) (string, error)
	// Window is how long an event is remembered from its first delivery: longer
	// than the sender delivers it again, and 10 minutes at least: with a tolerance of 5
	// minutes before and after, a recorded delivery is genuine for so long, and would be
	// handled again. 0: DefaultWindow, 4 days.
	Window time.Duration
	// Timeout is how long Next may run. Then its context ends and the claim is
	// renewed no more, so that after a lease the next delivery is handled beside a Next
	// that hangs. 0: 5 minutes.
	Timeout time.Duration
	// MaxBody is how many bytes of body are read, before anything is computed over
	// them. 0: 1 MiB. Of more, Done hears an error in which errors.As finds an
	// [*http.MaxBytesError]. The time that it may take is the http.Server's ReadTimeout.
	MaxBody int64
	// Done runs once for each delivery, when its answer is written, on the
	// goroutine of the delivery. Nil: nobody is told.
	Done func(ctx context.Context, d Delivery)
}

// Delivery is one arrival of an event, as Handler.Done hears of it.
type Delivery struct {
	// Source is that of the Handler.
	Source string
	// ID of the event; "": it was not verified.
	ID string
	// Result is what became of it.
	Result Result
	// Status that was answered; 0: Next panicked.
	Status int
	// Differs: the first delivery of the event had another body. Of a sender that
	// writes the time of the attempt into the body it means nothing. Of one whose bodies
	// do not change it means that two senders share a Source, or that one used an id
	// twice, and if the Result is AlreadyDone, that an event was lost: raise an alarm.
	Differs bool
	// Err says why, where the answer does not come from Next, what the
	// journal said of a release, or that the answer of Next was cut; nil: nothing of
	// this.
	Err error
	// Start is when the delivery came, Took how long the answer took.
	Start time.Time
	Took  time.Duration
}

const (
	defaultTimeout = 5 * time.Minute
	defaultMaxBody = 1 << 20
	// leastWindow is the tolerance of a signature's time, in both directions.
	leastWindow = 10 * time.Minute
)

// Check says what is wrong with the fields, as ErrInvalid; nil: nothing.
func (h *Handler) Check() error {
	switch {
	case h.Journal == nil:
		return fmt.Errorf("%w: Handler.Journal is nil", ErrInvalid)
	case h.Next == nil:
		return fmt.Errorf("%w: Handler.Next is nil", ErrInvalid)
	case h.Verify == nil:
		return fmt.Errorf("%w: Handler.Verify is nil", ErrInvalid)
	case h.Window < 0:
		return negative("Handler.Window", h.Window, DefaultWindow)
	case h.Window > 0 && h.Window < leastWindow:
		return fmt.Errorf("%w: Handler.Window is %v; it must be at least %v, for which a recorded delivery is genuine; 0 means %v",
			ErrInvalid, h.Window, leastWindow, DefaultWindow)
	case h.Timeout < 0:
		return negative("Handler.Timeout", h.Timeout, defaultTimeout)
	case h.MaxBody < 0:
		return negative("Handler.MaxBody", h.MaxBody, defaultMaxBody)
	}
	return checkSource("Handler.Source", h.Source)
}

// ServeHTTP implements [http.Handler].
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d := Delivery{Source: h.Source, Start: time.Now()}
	if h.Done != nil {
		defer func() { // also when Next panics
			d.Took = time.Since(d.Start)
			h.Done(r.Context(), d)
		}()
	}
	body, no := h.accept(w, r, &d)
	if no == nil {
		no = h.handle(w, r, body, &d)
	}
	if no != nil {
		d.Status, d.Err = no.status, no.cause
		no.write(w)
	}
}

// accept reads and verifies a delivery. Nothing is stored before its end.
func (h *Handler) accept(w http.ResponseWriter, r *http.Request, d *Delivery) (body []byte, no *problem) {
	if err := h.Check(); err != nil {
		return nil, notSetUp(err)
	}
	if r.Method != http.MethodPost {
		return nil, wrongMethod()
	}
	body, no = h.read(w, r)
	if no != nil {
		return nil, no
	}
	id, err := h.Verify(r.Header, body)
	if err == nil && h.ID != nil {
		if id, err = h.ID(r.Header, body); err != nil && !errors.Is(err, ErrID) {
			err = fmt.Errorf("%w: %w", ErrID, err)
		}
	}
	if err == nil {
		err = checkID(id)
	}
	if err != nil {
		return nil, notVerified(err)
	}
	d.ID = id
	return body, nil
}

func (h *Handler) read(w http.ResponseWriter, r *http.Request) ([]byte, *problem) {
	most := h.MaxBody
	if most == 0 {
		most = defaultMaxBody
	}
	if r.ContentLength > most {
		return nil, tooLarge(&http.MaxBytesError{Limit: most})
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, tooLarge(large)
	case errors.Is(err, http.ErrBodyReadAfterClose):
		return nil, readBefore(fmt.Errorf("%w: the body was read and closed before the Handler got it", ErrInvalid))
	case err != nil:
		return nil, cutOff(err)
	case int64(len(body)) < r.ContentLength: // net/http gives an error where the sender is to blame
		return nil, readBefore(fmt.Errorf("%w: %d of %d bytes of the body were left: something before the Handler has read it",
			ErrInvalid, len(body), r.ContentLength))
	}
	return body, nil
}

// handle lets Next handle the event, if nobody else does or did.
func (h *Handler) handle(w http.ResponseWriter, r *http.Request, body []byte, d *Delivery) (no *problem) {
	in, err := Event{h.Source, d.ID, h.Window}.intent()
	if err != nil { // Check and accept have looked already
		return notSetUp(err)
	}
	in.Shape = sha256.Sum256(body)
	timeout := h.Timeout
	if timeout == 0 {
		timeout = defaultTimeout
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), timeout)
	defer cancel()

	a := newAnswer(w.Header())
	d.Result = Failed // what a panic leaves behind
	o := once(ctx, h.Journal, in, func(ctx context.Context) (journal.Note, error) {
		e, _ := EntryOf(ctx)
		d.Differs = e.Differs // also if Next panics
		again := r.WithContext(ctx)
		again.Body, again.ContentLength, again.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
		h.Next.ServeHTTP(a, again)
		n := journal.Note{Status: a.code()}
		if !a.success() {
			return n, errNotDone
		}
		return n, nil
	})
	d.Result, d.Differs = o.result, o.entry.Differs
	switch o.result {
	case Ran, Failed:
		d.Status, d.Err = a.code(), o.unreleased
		if a.cut != nil {
			d.Err = errors.Join(d.Err, a.cut)
		}
		a.copyTo(w)
	case AlreadyDone:
		d.Status = http.StatusOK
		w.WriteHeader(d.Status)
	default:
		return comeAgain(o.result, o.err)
	}
	return nil
}

// errNotDone: Next answered with something else than 2xx.
var errNotDone = errors.New("webhook: the handler did not answer 2xx")
