// Package journal is the memory of operations that outlives a process: which
// operation has which key, and what is known of it. An idem.Transport with a
// Journal makes the key durable before the first byte is sent and finishes
// the entry after the end of the answer, so that after a crash the same
// operation goes on with the same key.
//
//	             Begin                       Finish(Done), Decide
//	(nothing) ----------> pending, claimed ------------------------> done
//	                       |    ^    |
//	               Release |    |    | Finish(Refused), Decide
//	      or the lease ends|    |    |
//	                       v    |    +---------> refused ---+
//	                      pending                    ^      | Begin: next
//	                         Begin: same key,        |      | generation,
//	                         fence + 1               +------+ next key
//
// An unknown outcome stays pending; nothing becomes refused by itself.
//
// [Memory] is for tests and for one process; sqljournal, a module of its own,
// keeps entries in SQLite. Those who write another journal build it on
// [Rules], which has the transitions as pure functions, and prove it with
// journaltest.Run.
package journal

import (
	"context"
	"errors"
	"iter"
	"strconv"
	"time"
)

// Journal remembers operations. Each method is atomic and, when it returns nil,
// durable as far as the store promises durability. It is safe for concurrent
// use, by several processes where the store can be shared.
//
// Errors that are none of this package's mean that the store failed; the
// caller must then take for granted neither that the change was made nor that
// it was not.
type Journal interface {
	// Begin creates the entry of an operation, or claims it, and returns it as
	// it is now, except that FirstSend and Clear are as they were before:
	// they say what earlier calls did.
	//
	//	no entry                  created, claimed; on a resume ErrNotFound
	//	refused                   the next generation, with Intent.NextKey; on a
	//	                          resume the entry, not claimed
	//	pending and Clear, on a
	//	  resume                  the entry, not claimed
	//	pending or done, another
	//	  fingerprint             ErrMismatch, with the entry
	//	done                      the entry, not claimed
	//	pending, a live claim     ErrClaimed, with the entry
	//	pending, resumed
	//	  MaxResumes times        ErrAttention, with the entry
	//	pending                   claimed: same key, Fence + 1
	//
	// The first that applies. A claim holds until Lease; then anybody may take
	// it over. An intent that cannot be begun is ErrInvalid (Intent.Check).
	Begin(ctx context.Context, in Intent) (Entry, error)
	// Renew extends the claim of e by the store's lease and notes Status and
	// Reference, where n has them. ErrClaimLost: it is no longer held.
	Renew(ctx context.Context, e Entry, n Note) (Entry, error)
	// Finish makes the entry Done or Refused and ends its claim. A second
	// Finish of the same claim with the same state changes nothing.
	// ErrClaimLost: another owner took over, so that nothing was written.
	Finish(ctx context.Context, e Entry, s State, n Note) (Entry, error)
	// Release ends the claim of e and leaves it pending. ErrClaimLost: as in
	// Finish.
	Release(ctx context.Context, e Entry, n Note) (Entry, error)
	// Decide records what a person found out about a pending entry.
	// ErrClaimed: somebody works on it. ErrFinished: it is not pending.
	// ErrNotFound: there is no such entry.
	Decide(ctx context.Context, op Operation, d Decision) (Entry, error)
	// Get returns an entry; ErrNotFound: there is none.
	Get(ctx context.Context, op Operation) (Entry, error)
	// Pending yields the pending entries but deliveries, oldest first. A damaged
	// entry is yielded with an error that matches ErrDamaged, and those behind
	// it follow; any other error is the last. The loop may call the journal.
	Pending(ctx context.Context) iter.Seq2[Entry, error]
	// Sweep takes what is no longer needed out of finished entries whose key
	// window has passed: the stored request and answer. What is left, a
	// tombstone, is deleted keep after it was finished; 0: 400 days, and
	// never within the key window. Expired deliveries are deleted, unless a
	// claim on them holds. Pending entries are not touched.
	Sweep(ctx context.Context, keep time.Duration) (Swept, error)
}

// Operation is the identity of an entry.
type Operation struct {
	// Scope is the account or tenant whose keys these are; "": one scope.
	Scope string
	// Name of the kind of operation and ID of this one.
	Name, ID string
}

// String is "name/id", followed by the scope where there is one.
func (op Operation) String() string {
	if op == (Operation{}) {
		return ""
	}
	s := op.Name + "/" + op.ID
	if op.Scope != "" {
		s += " of " + strconv.Quote(op.Scope)
	}
	return s
}

// State of an entry.
type State int

const (
	// Pending: what became of it is not known, or not yet.
	Pending State = iota
	// Done: the operation was carried out.
	Done
	// Refused: the operation was declined, or abandoned; nothing was done as
	// far as is known. Begin starts it anew, with a new key.
	Refused
)

// String gives the state in one word.
func (s State) String() string {
	switch s {
	case Pending:
		return "pending"
	case Done:
		return "done"
	case Refused:
		return "refused"
	}
	return "state " + strconv.Itoa(int(s))
}

// Entry is what a journal knows of one operation. Times have microseconds.
type Entry struct {
	Operation
	// Generation counts the starts of the operation from 1: each start after
	// a refusal is the next, with another key.
	Generation int
	// Key of this generation.
	Key string
	// Fingerprint is the keyed digest of what was asked, as Secret makes it;
	// empty: not known before the first Begin with one.
	Fingerprint []byte
	State       State
	// Created is when this generation began.
	Created time.Time
	// Window is how long the server remembers the key from its first send.
	Window time.Duration
	// FirstSend is when the key may have been sent first, counted anew with the
	// first claim after Clear; zero: it is proved that it was not.
	FirstSend time.Time
	// Clear: the last call told its caller that nothing that was sent with the
	// key had an effect. The entry waits for the caller to call again, and the
	// key window begins with that call; a resume leaves it alone.
	Clear bool
	// Enlisted: the entry was written down in a transaction of the caller's
	// own, which relies on a resume: it is never Clear.
	Enlisted bool
	// Attempts that were made, as far as their calls ended.
	Attempts int
	// Resumes that were begun after the call that created the entry and did
	// not end in an orderly way.
	Resumes int

	// Owner holds the claim; "": nobody does. It holds until Lease.
	Owner string
	Lease time.Time
	// Fence is the number of the claim: one more with each.
	Fence int64

	// Finished is when the entry became Done or Refused; zero: it is not.
	Finished time.Time
	// Status of the last answer; 0: there was none.
	Status int
	// Reference is the provider's id of the resource; "": not known.
	Reference string
	// Decision is "executed", "refused" or "abandoned" where a person decided,
	// and Reason is theirs; "": nobody did.
	Decision, Reason string

	// Expires is when a delivery is forgotten, unless a claim on it holds
	// longer; zero: no delivery.
	Expires time.Time

	// Request and Answer are sealed by the caller (AEAD); nil: not stored.
	Request, Answer []byte

	// Differs: Begin met a delivery with another digest. It is not stored.
	Differs bool
}

// Claimed reports whether a claim holds at t. One that would hold for longer
// than LongestLease was written while a clock was ahead, and holds no more.
func (e *Entry) Claimed(t time.Time) bool {
	return e.Owner != "" && t.Before(e.Lease) && e.Lease.Sub(t) <= LongestLease+time.Minute
}

// Intent is what Begin is asked to begin.
type Intent struct {
	Operation
	// Key for a new entry, and NextKey for one whose last generation was
	// refused. Each Intent is for one Begin: the NextKey that was refused
	// already is ErrInvalid.
	Key, NextKey string
	// Shape is the digest of what is always known of a request (method, URL,
	// length of the body). Zero: it is not known yet; the first Begin that
	// has one fixes it.
	Shape [32]byte
	// Content is the digest of the body; nil: not known. Two requests with
	// the same Shape are the same unless both have a Content and they differ.
	Content []byte
	// Window is how long the server remembers the key from its first send.
	Window time.Duration
	// Started is when the operation was written down, if it may have been
	// sent before the journal knew it: FirstSend of a new entry. Zero: the
	// journal knows best.
	Started time.Time
	// Request is the sealed request of a new entry or generation; nil: not
	// stored.
	Request []byte
	// MaxResumes says that this is a resume, and how many there may be
	// before ErrAttention; 0: it is none.
	MaxResumes int
	// Expires is set for deliveries: the entry is forgotten then, without a
	// tombstone, and another digest is no error but sets Entry.Differs.
	Expires time.Time
}

// Note is what a call has to say of an entry. What it does not know it leaves
// zero; that keeps what the entry has.
type Note struct {
	// Attempts of this call; Renew ignores them.
	Attempts int
	// Status of the last answer.
	Status int
	// Reference is the provider's id of the resource.
	Reference string
	// Answer is sealed; Finish stores it.
	Answer []byte
	// NotSent: it is proved that the key was never sent, by this call or an
	// earlier one. Release then forgets FirstSend.
	NotSent bool
	// Clear: nothing that was sent with the key can have had an effect, and the
	// caller is told so. Release notes it; a resume has no caller to tell.
	Clear bool
	// Orderly: a resume ended without having brought its process down.
	// Release takes it back from Resumes.
	Orderly bool
}

// Decision is what a person found out, or decided.
type Decision struct {
	// State is Done or Refused.
	State State
	// Abandon: nobody knows; the operation is given up and free for a new
	// key. State must be Refused.
	Abandon bool
	// Reference is the provider's id of the resource; "": not known.
	Reference string
	// Reason is kept with the entry; at least 1 byte, at most 1,000.
	Reason string
}

// Swept says what a Sweep did.
type Swept struct {
	// Emptied entries lost their stored request or answer; Deleted ones are
	// gone.
	Emptied, Deleted int
}

var (
	// ErrClaimed: another owner holds a claim that has not ended.
	ErrClaimed = errors.New("journal: claimed by another owner")
	// ErrClaimLost: the claim ended and another owner took it over, or the
	// entry is no longer pending. Nothing was written.
	ErrClaimLost = errors.New("journal: claim lost")
	// ErrMismatch: the operation was begun with another request.
	ErrMismatch = errors.New("journal: operation was begun with another request")
	// ErrAttention: the entry was resumed as often as allowed and no resume
	// ended in an orderly way. A person should look at it.
	ErrAttention = errors.New("journal: resumed too often")
	// ErrNotFound: there is no such entry.
	ErrNotFound = errors.New("journal: no such entry")
	// ErrFinished: the entry is not pending.
	ErrFinished = errors.New("journal: entry is finished")
	// ErrInvalid: an argument cannot work. The text names it and the limit.
	ErrInvalid = errors.New("journal: invalid")

	// ErrFull: the store is at its limit. What it holds is not evicted.
	ErrFull = errors.New("journal: full")
	// ErrDamaged: stored data is not what was written.
	ErrDamaged = errors.New("journal: damaged")
	// ErrForeign: the store belongs to something else.
	ErrForeign = errors.New("journal: not a journal")
	// ErrSecret: the secret is missing, or is not the one that the store was
	// made with.
	ErrSecret = errors.New("journal: wrong secret")
	// ErrLatched: an earlier write failed. The store takes no more until it
	// is opened anew.
	ErrLatched = errors.New("journal: closed after a failed write")
	// ErrClosed: the store was closed.
	ErrClosed = errors.New("journal: closed")
)
