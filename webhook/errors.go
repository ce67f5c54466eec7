package webhook

import (
	"errors"
	"fmt"
	"time"
	"unicode"
	"unicode/utf8"
)

var (
	// ErrInvalid: a field of the Handler or the Event cannot work, or what is
	// around or behind the Handler does what it must not: a middleware has read the
	// body, an answer is too long. The text names it and the limit.
	ErrInvalid = errors.New("webhook: invalid")

	// For a Verifier to return, wrapped or as they are.

	// ErrSignature: the delivery has no signature, or none that is right.
	ErrSignature = errors.New("webhook: wrong signature")
	// ErrTimestamp: the delivery was signed too long ago or for a time to
	// come, so it may be a replay; or its time cannot be read.
	ErrTimestamp = errors.New("webhook: timestamp outside of the tolerance")
	// ErrID: the delivery has no id, or one that cannot be kept: 1 to 255
	// bytes of UTF-8 without control characters can.
	ErrID = errors.New("webhook: no usable event id")

	// Reasons of an [*Error].

	// ErrInProgress: another delivery of the event is being handled. It may
	// still fail, so this one must come again.
	ErrInProgress = errors.New("webhook: event is being handled elsewhere")
	// ErrUnmarked: the event was handled, and that could not be written down:
	// the claim was taken over, or the journal failed. It may be handled
	// again.
	ErrUnmarked = errors.New("webhook: event was handled but not marked")
	// ErrJournal: the journal failed before the event was handled.
	ErrJournal = errors.New("webhook: journal failed")
)

// Error says why an event is not known to be done. errors.Is and errors.As
// reach Reason and Cause.
type Error struct {
	// Reason is ErrInProgress, ErrUnmarked or ErrJournal.
	Reason error
	// Source and ID of the event.
	Source, ID string
	// Again is when to come again: the end of the claim, which may be renewed
	// or released before. Zero: not known.
	Again time.Time
	// Cause is what the journal said; nil: nothing.
	Cause error
}

// Error has nothing of what was delivered but the id.
func (e *Error) Error() string {
	s := fmt.Sprintf("%v: %q of %q", e.Reason, e.ID, e.Source)
	if !e.Again.IsZero() {
		s += ", come again at " + e.Again.UTC().Format(time.RFC3339)
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap gives Reason and Cause.
func (e *Error) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Reason}
	}
	return []error{e.Reason, e.Cause}
}

// longest is what journals keep of an id and of a source.
const longest = 255

// checkID says why an id cannot be kept, without repeating it.
func checkID(id string) error {
	switch {
	case id == "" || len(id) > longest:
		return fmt.Errorf("%w: it has %d bytes; it must have 1 to %d", ErrID, len(id), longest)
	case !utf8.ValidString(id):
		return fmt.Errorf("%w: it is not UTF-8", ErrID)
	}
	for _, r := range id {
		if unicode.IsControl(r) {
			return fmt.Errorf("%w: it has a control character", ErrID)
		}
	}
	return nil
}

func checkSource(field, source string) error {
	if source == "" || len(source) > longest {
		return fmt.Errorf("%w: %s has %d bytes; it must have 1 to %d", ErrInvalid, field, len(source), longest)
	}
	return nil
}

func negative(field string, is, zero any) error {
	return fmt.Errorf("%w: %s is %v; it must not be negative; 0 means %v", ErrInvalid, field, is, zero)
}
