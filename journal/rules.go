package journal

import (
	"fmt"
	"time"
)

// DefaultLease is how long a claim holds unless it is renewed, and LongestLease
// the most that a store may be told.
const (
	DefaultLease = 30 * time.Second
	LongestLease = time.Hour
)

// DefaultKeep is how long tombstones are kept.
const DefaultKeep = 400 * 24 * time.Hour

// Rules are the transitions of an entry as pure functions, for those who write
// a journal: read the entry, ask the rules, write what they return, all in one
// atomic step. now is the wall clock; no clock, lock or I/O is in here.
type Rules struct {
	// Owner is written into claims; it names this process to people.
	Owner string
	// Lease is how long a claim holds. 0: 30 s.
	Lease time.Duration
	// Secret of the store.
	Secret Secret
}

// Begin is the transition of Journal.Begin; old is nil where there is no entry.
// stored must be written if write is true; returned is for the caller, also
// beside an error.
func (r *Rules) Begin(old *Entry, in Intent, now time.Time) (stored, returned Entry, write bool, err error) {
	now = now.Round(0).Truncate(time.Microsecond)
	print := r.fingerprint(in)
	if old == nil && in.MaxResumes > 0 {
		return Entry{}, Entry{}, false, ErrNotFound // swept meanwhile: it was finished
	}
	if old == nil || !old.Expires.IsZero() && !now.Before(old.Expires) && !old.Claimed(now) {
		e := r.fresh(in, in.Key, print, now)
		e.Generation = 1
		if !in.Started.IsZero() && in.Started.Before(now) {
			e.FirstSend = in.Started.Round(0).Truncate(time.Microsecond)
		}
		if old != nil {
			e.Fence = old.Fence // a late owner of the expired one must not fit
		}
		stored, returned = r.claim(e, now)
		return stored, returned, true, nil
	}
	e := *old
	delivery := !e.Expires.IsZero()
	same := sameRequest(e.Fingerprint, print)
	e.Differs = delivery && !same
	switch {
	case (e.State == Refused || e.State == Pending && e.Clear) && in.MaxResumes > 0:
		return e, e, false, nil
	case e.State == Refused && in.NextKey == e.Key && in.Expires.IsZero():
		return e, e, false, usedNextKey()
	case e.State == Refused:
		n := r.fresh(in, in.NextKey, print, now)
		n.Generation, n.Fence = e.Generation+1, e.Fence
		stored, returned = r.claim(n, now)
		return stored, returned, true, nil
	case !delivery && !same:
		return e, e, false, ErrMismatch
	case e.State == Done:
		return e, e, false, nil
	case e.Claimed(now):
		return e, e, false, ErrClaimed
	case in.MaxResumes > 0 && e.Resumes >= in.MaxResumes:
		return e, e, false, ErrAttention
	}
	if same && len(e.Fingerprint) < len(print) {
		e.Fingerprint = print
	}
	if e.Request == nil {
		e.Request = in.Request
	}
	if in.MaxResumes > 0 {
		e.Resumes++
	}
	stored, returned = r.claim(e, now)
	return stored, returned, true, nil
}

// Enlist is the transition of writing an operation down without claiming it,
// in a transaction of the caller's own: pending, and proved not to have been
// sent, whatever Intent.Started says. From then on a resume carries it out. An
// entry of the same request that is there already keeps its key; one of another
// request is ErrMismatch.
func (r *Rules) Enlist(old *Entry, in Intent, now time.Time) (e Entry, write bool, err error) {
	now = now.Round(0).Truncate(time.Microsecond)
	print := r.fingerprint(in)
	switch {
	case old == nil:
		e = r.fresh(in, in.Key, print, now)
		e.Generation, e.Enlisted = 1, true
		return e, true, nil
	case old.State == Refused && in.NextKey == old.Key:
		return *old, false, usedNextKey()
	case old.State == Refused:
		e = r.fresh(in, in.NextKey, print, now)
		e.Generation, e.Fence, e.Enlisted = old.Generation+1, old.Fence, true
		return e, true, nil
	case !sameRequest(old.Fingerprint, print):
		return *old, false, ErrMismatch
	case old.State == Pending && !old.Enlisted:
		e = *old
		e.Enlisted = true
		if e.Clear { // a resume would leave it to its caller, who now relies on the resume
			e.Clear, e.FirstSend = false, time.Time{}
		}
		return e, true, nil
	}
	return *old, false, nil
}

// usedNextKey: an Intent that was begun twice.
func usedNextKey() error {
	return fmt.Errorf("%w: Intent.NextKey is the key that was refused; each Intent is for one Begin", ErrInvalid)
}

// fresh is an entry that nobody has claimed yet.
func (r *Rules) fresh(in Intent, key string, print []byte, now time.Time) Entry {
	return Entry{
		Operation: in.Operation, Key: key, Fingerprint: print, Created: now, Window: in.Window,
		Expires: in.Expires.Round(0).Truncate(time.Microsecond), Request: in.Request,
	}
}

// claim gives e to this owner. From now on the key may be sent.
func (r *Rules) claim(e Entry, now time.Time) (stored, returned Entry) {
	e.Owner, e.Lease, e.Fence = r.Owner, now.Add(r.lease()), e.Fence+1
	returned = e
	if e.FirstSend.IsZero() || e.Clear { // what had no effect does not age the key
		e.FirstSend = now
	}
	e.Clear, e.Differs = false, false
	return e, returned
}

func (r *Rules) lease() time.Duration {
	if r.Lease == 0 {
		return DefaultLease
	}
	return r.Lease
}

func (r *Rules) fingerprint(in Intent) []byte {
	if in.Shape == ([32]byte{}) {
		return nil
	}
	return r.Secret.Fingerprint(in.Shape, in.Content)
}

// sameClaim: fences begin anew where an entry was deleted, with another Created.
func sameClaim(old *Entry, e Entry) bool {
	return old.Generation == e.Generation && old.Fence == e.Fence && old.Created.Equal(e.Created)
}

// held checks that the claim of e still holds; an ended lease that nobody took
// over does no harm.
func held(old *Entry, e Entry) error {
	if old == nil || old.State != Pending || old.Owner == "" || !sameClaim(old, e) {
		return ErrClaimLost
	}
	return nil
}

// Renew is the transition of Journal.Renew.
func (r *Rules) Renew(old *Entry, e Entry, n Note, now time.Time) (Entry, error) {
	if err := held(old, e); err != nil {
		return Entry{}, err
	}
	out := n.onto(*old)
	out.Lease = now.Round(0).Truncate(time.Microsecond).Add(r.lease())
	return out, nil
}

// Finish is the transition of Journal.Finish.
func (r *Rules) Finish(old *Entry, e Entry, s State, n Note, now time.Time) (out Entry, write bool, err error) {
	if s != Done && s != Refused {
		return Entry{}, false, fmt.Errorf("%w: State is %v; it must be done or refused", ErrInvalid, s)
	}
	if old != nil && old.State == s && sameClaim(old, e) {
		return *old, false, nil
	}
	if err := held(old, e); err != nil {
		return Entry{}, false, err
	}
	out = n.onto(*old)
	out.Attempts += n.Attempts
	if n.Answer != nil {
		out.Answer = n.Answer
	}
	return out.finished(s, now), true, nil
}

// Release is the transition of Journal.Release.
func (r *Rules) Release(old *Entry, e Entry, n Note) (Entry, error) {
	if err := held(old, e); err != nil {
		return Entry{}, err
	}
	out := n.onto(*old)
	out.Attempts += n.Attempts
	out.Owner, out.Lease = "", time.Time{}
	out.Clear = n.Clear && !old.Enlisted
	if n.NotSent {
		out.FirstSend = time.Time{}
	}
	if n.Orderly && out.Resumes > 0 {
		out.Resumes--
	}
	return out, nil
}

// Decide is the transition of Journal.Decide.
func (r *Rules) Decide(old *Entry, d Decision, now time.Time) (Entry, error) {
	const longest = 1000
	switch {
	case d.State != Done && d.State != Refused:
		return Entry{}, fmt.Errorf("%w: Decision.State is %v; it must be done or refused", ErrInvalid, d.State)
	case d.Abandon && d.State != Refused:
		return Entry{}, fmt.Errorf("%w: Decision.State is %v; with Abandon it must be refused", ErrInvalid, d.State)
	case d.Reason == "" || len(d.Reason) > longest:
		return Entry{}, fmt.Errorf("%w: Decision.Reason has %d bytes; it must have 1 to %d", ErrInvalid, len(d.Reason), longest)
	case old == nil:
		return Entry{}, ErrNotFound
	case old.State != Pending:
		return *old, fmt.Errorf("%w: it is %v", ErrFinished, old.State)
	case old.Claimed(now):
		return *old, ErrClaimed
	}
	e := *old
	e.Decision, e.Reason = "executed", d.Reason
	switch {
	case d.Abandon:
		e.Decision = "abandoned"
	case d.State == Refused:
		e.Decision = "refused"
	}
	if d.Reference != "" {
		e.Reference = d.Reference
	}
	e.Fence++ // a late owner must not fit
	return e.finished(d.State, now), nil
}

// Sweep says what is left of an entry at now: the entry as it is to be stored,
// or that it is to be deleted.
func (r *Rules) Sweep(e Entry, keep time.Duration, now time.Time) (left Entry, write, remove bool) {
	if keep <= 0 {
		keep = DefaultKeep
	}
	switch {
	case !e.Expires.IsZero():
		return e, false, !now.Before(e.Expires) && !e.Claimed(now) // somebody still works on it
	case e.State == Pending:
		return e, false, false
	}
	end := e.Finished.Add(e.Window)
	switch {
	case now.Before(end):
		return e, false, false
	case !now.Before(e.Finished.Add(keep)):
		return e, false, true
	case e.Request == nil && e.Answer == nil:
		return e, false, false
	}
	e.Request, e.Answer = nil, nil
	return e, true, false
}

// onto is e with what n knows.
func (n Note) onto(e Entry) Entry {
	if n.Status != 0 {
		e.Status = n.Status
	}
	if n.Reference != "" {
		e.Reference = n.Reference
	}
	return e
}

func (e Entry) finished(s State, now time.Time) Entry {
	e.State, e.Finished = s, now.Round(0).Truncate(time.Microsecond)
	e.Owner, e.Lease = "", time.Time{}
	return e
}

// Check says why an intent cannot be begun.
func (in Intent) Check() error {
	const longest = 255
	for _, f := range [...]struct {
		name, value string
		least       int
	}{{"Scope", in.Scope, 0}, {"Name", in.Name, 1}, {"ID", in.ID, 1}, {"Key", in.Key, 0}, {"NextKey", in.NextKey, 0}} {
		if n := len(f.value); n < f.least || n > longest {
			return fmt.Errorf("%w: Intent.%s has %d bytes; it must have %d to %d", ErrInvalid, f.name, n, f.least, longest)
		}
	}
	switch {
	case in.Window < 0:
		return fmt.Errorf("%w: Intent.Window is %v; the least is 0", ErrInvalid, in.Window)
	case in.MaxResumes < 0:
		return fmt.Errorf("%w: Intent.MaxResumes is %d; the least is 0", ErrInvalid, in.MaxResumes)
	case in.Expires.IsZero() && (in.Key == "" || in.NextKey == ""):
		return fmt.Errorf("%w: Intent.Key or NextKey is empty; only a delivery has none", ErrInvalid)
	}
	return nil
}
