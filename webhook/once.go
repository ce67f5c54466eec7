package webhook

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/idem-go/idem/journal"
)

// DefaultWindow is how long an event is remembered: 4 days.
const DefaultWindow = 4 * 24 * time.Hour

// name of the entries in the journal.
const name = "webhook"

// Event is one that must be handled once.
type Event struct {
	// Source names the sender, the topic or the queue, in 1 to 255 bytes.
	// Ids are unique for each source only.
	Source string
	// ID is the same whenever the event comes, in 1 to 255 bytes of UTF-8 without
	// control characters.
	ID string
	// Window is how long the event is remembered from its first coming: at least
	// as long as it may come again. 0: DefaultWindow, 4 days.
	Window time.Duration
}

// Result is what became of a delivery.
type Result int

const (
	// Rejected: it was not accepted (not verified, too large, invalid). Nothing
	// was stored and nothing ran.
	Rejected Result = iota
	// Ran: the event was handled now, and is marked as done.
	Ran
	// AlreadyDone: the event was handled before. Nothing ran.
	AlreadyDone
	// InProgress: another delivery of the event is being handled. Nothing ran.
	InProgress
	// Failed: the event was handled now, without success. The claim is
	// released, so that the next delivery may be handled.
	Failed
	// Unmarked: the event was handled now with success, which is not
	// written down, see ErrUnmarked. It may be handled again.
	Unmarked
	// Unavailable: the journal failed, or the context ended, before anything
	// ran.
	Unavailable
)

// String gives the result in words.
func (r Result) String() string {
	switch r {
	case Rejected:
		return "rejected"
	case Ran:
		return "ran"
	case AlreadyDone:
		return "already done"
	case InProgress:
		return "in progress"
	case Failed:
		return "failed"
	case Unmarked:
		return "unmarked"
	case Unavailable:
		return "unavailable"
	}
	return "result " + strconv.Itoa(int(r))
}

// Once runs do once for an event, for consumers of queues and topics, as Handler
// does for webhooks. The error is nil if the event is done, now (Ran) or before
// (AlreadyDone): acknowledge it. Otherwise let it come again:
//
//	Rejected      matches ErrInvalid or ErrID: e cannot be kept
//	InProgress   an *Error; its Again is when to come again
//	Failed       what do returned
//	Unmarked     an *Error that matches ErrUnmarked
//	Unavailable  an *Error that matches ErrJournal, or the cause of ctx
//
// The claim is renewed until do returns or ctx ends, so give ctx a deadline: a do
// that hangs would hold the event for ever. The context that do gets ends with ctx, or
// when the claim is lost, with a cause that matches journal.ErrClaimLost;
// [EntryOf] finds the entry in it. A panic of do releases the claim and
// goes on.
func Once(ctx context.Context, j journal.Journal, e Event, do func(ctx context.Context) error) (Result, error) {
	in, err := e.intent()
	if err != nil {
		return Rejected, err
	}
	if j == nil || do == nil {
		return Rejected, fmt.Errorf("%w: the journal or the function is nil", ErrInvalid)
	}
	o := once(ctx, j, in, func(ctx context.Context) (journal.Note, error) { return journal.Note{}, do(ctx) })
	if o.unreleased != nil {
		return o.result, errors.Join(o.err, o.unreleased)
	}
	return o.result, o.err
}

// EntryOf finds the entry of the event that is being handled, for
// sqljournal's FinishTx: the mark is then committed together with the effect; the package
// comment has an example. ok is false outside of Handler.Next and the function of Once: a
// zero entry finishes nothing.
//
// An event can only be finished as journal.Done. One that is finished as
// journal.Refused is not done: its result is Unmarked, and its next delivery is
// handled anew. For an event that one does not want, finish it as Done and do nothing.
func EntryOf(ctx context.Context) (e journal.Entry, ok bool) {
	e, ok = ctx.Value(entryKey{}).(journal.Entry)
	return e, ok
}

type entryKey struct{}

func (e Event) intent() (journal.Intent, error) {
	if err := checkSource("Event.Source", e.Source); err != nil {
		return journal.Intent{}, err
	}
	if err := checkID(e.ID); err != nil {
		return journal.Intent{}, err
	}
	switch {
	case e.Window < 0:
		return journal.Intent{}, negative("Event.Window", e.Window, DefaultWindow)
	case e.Window == 0:
		e.Window = DefaultWindow
	}
	return journal.Intent{
		Operation: journal.Operation{Scope: e.Source, Name: name, ID: e.ID},
		Expires:   time.Now().Add(e.Window),
	}, nil
}

// outcome is what became of an event.
type outcome struct {
	result     Result
	entry      journal.Entry // as the journal had it; Differs is of this delivery
	err        error         // why the event is not known to be done
	unreleased error         // why the claim of a failed one could not be released
}

// once claims an event, lets do handle it, and marks it as done if do returns
// no error.
func once(ctx context.Context, j journal.Journal, in journal.Intent, do func(context.Context) (journal.Note, error)) (o outcome) {
	wrong := func(reason error, again time.Time, cause error) error {
		return &Error{Reason: reason, Source: in.Scope, ID: in.ID, Again: again, Cause: cause}
	}
	e, err := j.Begin(ctx, in)
	o.entry = e
	switch {
	case errors.Is(err, journal.ErrClaimed):
		o.result, o.err = InProgress, wrong(ErrInProgress, e.Lease, nil)
		return o
	case err != nil && ctx.Err() != nil:
		o.result, o.err = Unavailable, context.Cause(ctx)
		return o
	case err != nil:
		o.result, o.err = Unavailable, wrong(ErrJournal, time.Time{}, err)
		return o
	case e.State == journal.Done:
		o.result = AlreadyDone
		return o
	}

	c := hold(ctx, j, e)
	returned := false
	defer func() {
		if !returned { // do panicked, or ended its goroutine
			c.end()
			_ = c.release(journal.Note{Attempts: 1}) // if this fails, the lease ends by itself
		}
	}()
	note, err := do(context.WithValue(c.work, entryKey{}, e))
	returned = true
	note.Attempts = 1
	if err != nil {
		c.end()
		o.result, o.err, o.unreleased = Failed, err, c.release(note)
		return o
	}
	err = c.mark(note)
	c.end()
	if err == nil {
		o.result = Ran
		return o
	}
	again := c.held().Lease
	if errors.Is(err, journal.ErrClaimLost) {
		again = time.Time{} // another one's lease counts now
	}
	o.result, o.err = Unmarked, wrong(ErrUnmarked, again, err)
	return o
}
