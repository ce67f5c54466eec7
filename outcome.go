package idem

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// Outcome is what the client knows about the effect of an operation. It is
// the outcome of the operation, not of one call: an answer lost in the first
// attempt and a replay in the third are together Executed.
//
// It depends on whose key it is. Where an earlier call or another process may
// have used the key ([WithOperation], [WithKey], a key header), a plain 4xx and
// a refused connection of this call say nothing about that call: the outcome is
// Unknown, and the last [Attempt] has what this call alone shows. A replayed
// 4xx, or one that the dialect lists under Refusal, is Refused all the same.
// Where there is no key ([NoKeys], [WithoutKey]), it is the outcome of the calls
// under one context.
type Outcome int

const (
	// Unknown: the work may have been done. Keep the key; the same operation
	// called again, or a look at the provider, tells. It is the zero value,
	// so that a forgotten assignment never claims success.
	Unknown Outcome = iota
	// NotExecuted: it is proved that no attempt reached the server.
	NotExecuted
	// Executed: the server carried the request out and this is its answer.
	// Whether the bank said yes is in the body.
	Executed
	// Refused: the server declined the operation, and nothing was done.
	Refused
)

// String gives the outcome in words.
func (o Outcome) String() string {
	switch o {
	case Unknown:
		return "unknown"
	case NotExecuted:
		return "not executed"
	case Executed:
		return "executed"
	case Refused:
		return "refused"
	}
	return "outcome " + strconv.Itoa(int(o))
}

// Report tells what an operation did and what is known of its effect. Three
// ways lead to it: [ReportOf] an answer, [WithReport] through code that hides
// the answer, and [*Error], which embeds it.
type Report struct {
	// Operation as named by [WithOperation]; zero: not named.
	Operation Operation
	// Key on the wire (unquoted); "": the request carried none. Keys hold no
	// personal data, so it may be logged and pasted into a dashboard.
	Key string
	// KeyFrom says whose key it is: "journal" (the stored key of the Operation; with
	// an empty Key the Journal did not say which one that is),
	// "operation" (derived from the Operation),
	// "context" ([WithKey]), "header" (the request brought it; vendor SDKs do
	// that), "minted" (made for this call), or "" (no key).
	KeyFrom string
	// Attempts in order, redirect hops and in-progress sends included, so
	// there may be more of them than the N of the last one says.
	Attempts []Attempt
	// Sends is the number of requests put on the wire, those that net/http
	// repeated by itself included.
	Sends int
	// Outcome of the operation.
	Outcome Outcome
	// Reason why the operation ended, one of the Err variables or the cause
	// of the caller's context; nil: it ended with an answer or an error that
	// is final by itself.
	Reason error
	// Replayed: the last answer was the stored result of an earlier attempt.
	Replayed bool
	// EarlierUnknown: an attempt before the last one may have reached the
	// server, so a refusal or a "not found" at the end may be its echo.
	EarlierUnknown bool
	// Reference is the provider's id of the resource, where the dialect
	// says in which place of the answer it stands; "": not known.
	Reference string

	write       bool // it may have an effect
	onlyJournal bool // Reason is that of a journal that failed behind the answer
}

// copy shares nothing with r.
func (r *Report) copy() Report {
	c := *r
	c.Attempts = slices.Clone(r.Attempts)
	return c
}

// Attempt is one pass at an operation: one call of the base RoundTripper.
type Attempt struct {
	// N counts attempts from 1. In-progress sends and redirect hops stand in
	// the report with the number of the attempt that they belong to.
	N int
	// Start of the attempt, and how long it took until its answer was
	// handed on, buffered or lost.
	Start time.Time
	Took  time.Duration
	// Status of the answer; 0: none.
	Status int
	// Err of the attempt; nil: it had an answer.
	Err error
	// Outcome that this attempt alone shows.
	Outcome Outcome
	// Wait before the next attempt; 0: there was none, or it followed at
	// once.
	Wait time.Duration
	// WaitFrom says where Wait comes from: "backoff", "retry-after",
	// "throttle" (429 or 503 without the header), "in-progress" (without the
	// header), "at-once" (a dead reused connection); "": no next attempt.
	WaitFrom string
	// Reused: the last send of the attempt used an idle connection.
	Reused bool
	// RequestID is the provider's id of the request, for its support desk.
	RequestID string

	evidence evidence
}

// ReportOf returns the report of the operation that resp answered; nil if
// resp is nil or did not come through a Transport. It is complete and no
// longer changes.
func ReportOf(resp *http.Response) *Report {
	if o := operationOf(resp); o != nil {
		return &o.report
	}
	return nil
}

// WithReport returns a context under which each RoundTrip of a Transport
// writes its report into r before it returns, also when it fails. A
// redirect to a GET extends the report of the write. Sharing one between
// concurrent calls is misuse.
//
// Where contexts with different reports are nested, all are written.
func WithReport(ctx context.Context, r *Report) context.Context {
	if r == nil {
		return ctx
	}
	outer, _ := ctx.Value(reportTarget{}).(*target)
	return context.WithValue(ctx, reportTarget{}, &target{r, outer})
}

type reportTarget struct{}

// target is where a report is to be written, and the next one outwards.
type target struct {
	report *Report
	outer  *target
}

// OutcomeOf tells the outcome from what a call returned, behind whatever
// wraps err. It is Unknown where nothing is known: no Transport of this
// package was involved, or an error was flattened to text on the way.
func OutcomeOf(resp *http.Response, err error) Outcome {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Outcome
	}
	if r := ReportOf(resp); r != nil && err == nil {
		return r.Outcome
	}
	return Unknown
}

// LogValue implements [slog.LogValuer]. The key is whole unless the
// operation ended Executed and nothing more is to be done about it.
func (r Report) LogValue() slog.Value { return slog.GroupValue(r.attrs()...) }

// attrs is the fixed form of the final line.
func (r *Report) attrs() []slog.Attr {
	key := r.Key
	if r.Outcome == Executed && !errors.Is(r.Reason, ErrJournal) {
		key = shortKey(key)
	}
	reason, status, id, attempts := "", 0, "", 0
	if r.Reason != nil {
		reason = shownReason(r.Reason)
	}
	if n := len(r.Attempts); n > 0 {
		last := r.Attempts[n-1]
		status, id, attempts = last.Status, last.RequestID, last.N
	}
	return []slog.Attr{
		slog.String("operation", r.Operation.String()),
		slog.String("key", key),
		slog.String("outcome", r.Outcome.String()),
		slog.String("reason", reason),
		slog.Int("attempts", attempts),
		slog.Int("last_status", status),
		slog.String("request_id", id),
	}
}

// evidence is what one attempt says about the effect.
type evidence int

const (
	mayBeDone     evidence = iota // something may have reached the server
	neverSent                     // proved: nothing did
	done                          // carried out
	refusedByOp                   // the operation's own answer is no
	refusedBefore                 // a 4xx that may come from a layer before the operation
	elsewhere                     // a hop that carries no effect: the GET after a 303
)

func (e evidence) outcome() Outcome {
	switch e {
	case neverSent:
		return NotExecuted
	case done:
		return Executed
	case refusedByOp, refusedBefore:
		return Refused
	}
	return Unknown
}

// fold is the outcome of an operation: a pure function of what its attempts
// showed. claimable says that nobody can have used the key before this call
// (there is none, or it was minted here): without that, only answers of the
// operation itself say anything.
func fold(attempts []Attempt, claimable bool) Outcome {
	refused, refusedOwn, unknown := false, false, false
	for i := range attempts {
		switch attempts[i].evidence {
		case done:
			return Executed
		case refusedByOp:
			refusedOwn, unknown = true, false
		case refusedBefore:
			refused = true
		case mayBeDone:
			unknown, refusedOwn = true, false
		}
	}
	switch {
	case refusedOwn:
		return Refused
	case unknown || !claimable:
		return Unknown
	case refused:
		return Refused
	}
	return NotExecuted
}

// earlierUnknown reports whether an attempt before the last may have reached
// the server.
func earlierUnknown(attempts []Attempt) bool {
	for i := 0; i < len(attempts)-1; i++ {
		if attempts[i].evidence == mayBeDone {
			return true
		}
	}
	return false
}

// mayHaveSent reports whether an attempt may have reached the server.
func mayHaveSent(attempts []Attempt) bool {
	for i := range attempts {
		if attempts[i].evidence != neverSent {
			return true
		}
	}
	return false
}
