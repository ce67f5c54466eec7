package idem

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/idem-go/idem/journal"
)

// record is what the journal has of an operation that runs: its entry is
// claimed before the first byte is sent, and finished or released after the
// end of the answer.
type record struct {
	gate    gateKey // of the operation, whatever its key turns out to be
	before  int     // attempts in the report that another RoundTrip noted
	fence   int64   // of the RoundTrip that was redirected here
	done    bool    // carried out before this call
	unknown bool    // an earlier call may have reached the server
	closed  error   // the stored answer does not open
	resume  *resumption
	stream  *ending     // of a streamed answer: its end decides
	left    func() bool // ends the watch on the context of its reader; nil: there is none

	mu    sync.Mutex // guards what follows
	entry journal.Entry
	held  bool // claimed by this call
	lost  bool // somebody took it over
	timer *time.Timer
}

// ending is what becomes of an entry at the end of its answer.
type ending struct {
	state journal.State
	note  journal.Note
}

const (
	// writeTime bounds the journal's last write for an operation: the caller
	// who left must not make it fail.
	writeTime = 10 * time.Second
	// Polling for a claim that another owner holds: it may be released early.
	claimPoll    = 20 * time.Millisecond
	claimPollMax = time.Second
)

// record of the operation; nil: it is not journalled.
func (o *operation) record() *record {
	if o.late == nil {
		return nil
	}
	return o.late.record
}

// errEnlisted: a resume will send the entry, whatever came of the call.
var errEnlisted = errors.New("idem: the operation is enlisted")

// journalErr is a failure of the journal itself.
func journalErr(err error) error {
	if errors.Is(err, journal.ErrInvalid) {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return fmt.Errorf("%w: %w", ErrJournal, err)
}

// open makes the key durable and claims the entry: nothing is sent before.
// Where the journal has the answer, o.resp is that.
func (o *operation) open() error {
	rec := o.record()
	rec.before = len(o.report.Attempts)
	in, err := o.intent()
	if err != nil {
		return err
	}
	if rec.resume = o.resumption(); rec.resume != nil {
		in.MaxResumes = o.t.policy.MaxResumes
		if rec.resume.scope != o.scope {
			return scopeChanged(rec.resume.scope, o.scope)
		}
	}
	hopKey := o.report.Key
	for poll := claimPoll; ; poll = min(2*poll, claimPollMax) {
		e, err := o.t.Journal.Begin(o.Context, in)
		switch {
		case err == nil:
			return o.opened(e, hopKey)
		case o.Err() != nil: // the entry may be another's by now, or a later generation's
			o.keyNotKnown()
			return o.cancelled()
		case errors.Is(err, journal.ErrMismatch):
			o.known(e)
			return otherRequest(e, o.request)
		case !errors.Is(err, journal.ErrClaimed):
			o.keyNotKnown()
			return journalErr(err)
		}
		o.known(e)
		p := &o.t.policy
		if rec.resume != nil || p.MaxElapsed > 0 && time.Since(o.started) > p.MaxElapsed {
			return inProgressElsewhere(e)
		}
		if err := o.sleep(max(min(poll, time.Until(e.Lease)), time.Millisecond)); err != nil {
			if errors.Is(o.Err(), context.DeadlineExceeded) {
				return inProgressElsewhere(e)
			}
			return err
		}
	}
}

// keyNotKnown takes the key out of the report where the journal did not say which
// one it is: behind a refusal it is not the derived one, and whoever looks that up
// at the provider would find the refusal.
func (o *operation) keyNotKnown() {
	if !o.isHop && o.report.KeyFrom != "journal" {
		o.report.Key, o.report.KeyFrom = "", "journal"
	}
}

func otherRequest(e journal.Entry, f *fingerprint) error {
	reference := ""
	if e.Reference != "" {
		reference = fmt.Sprintf(" (resource %q)", e.Reference)
	}
	return fmt.Errorf("%w: operation %v is %v%s with another request than %s; nothing was sent", ErrKeyReused, e.Operation, e.State, reference, f.shown)
}

func inProgressElsewhere(e journal.Entry) error {
	return fmt.Errorf("%w: %s holds its entry, alive or not, until %s", ErrInProgress, e.Owner, e.Lease.UTC().Format(time.RFC3339))
}

// intent is what the journal is asked to begin.
func (o *operation) intent() (journal.Intent, error) {
	in := journal.Intent{
		Operation: journal.Operation{Scope: o.scope, Name: o.report.Operation.Name, ID: o.report.Operation.ID},
		Key:       o.record().gate.key,
		Shape:     o.request.shape(),
		Window:    o.t.policy.KeyWindow,
		Started:   o.report.Operation.Started,
	}
	if o.request.whole {
		in.Content = o.request.digest[:]
	}
	if err := randomUUID(&o.fresh); err != nil {
		return in, err
	}
	in.NextKey = written(o.fresh, o.t.dialect.MaxKey)
	if o.t.Seal == nil || o.isHop || !o.request.whole {
		return in, nil
	}
	var err error
	in.Request, err = o.sealRequest()
	return in, err
}

// shape is the digest of what is always known of a request.
func (f *fingerprint) shape() [sha256.Size]byte {
	h := sha256.New()
	var n [8]byte
	for _, part := range [...]string{f.method, f.url} {
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		_, _ = h.Write(n[:])
		_, _ = h.Write([]byte(part))
	}
	binary.BigEndian.PutUint64(n[:], uint64(f.length))
	_, _ = h.Write(n[:])
	return [sha256.Size]byte(h.Sum(nil))
}

// known puts what the journal knows into the report.
func (o *operation) known(e journal.Entry) {
	o.report.Key, o.report.KeyFrom = e.Key, "journal"
	if e.Reference != "" {
		o.report.Reference = e.Reference
	}
}

// opened takes over what the journal remembers.
func (o *operation) opened(e journal.Entry, hopKey string) error {
	rec := o.record()
	rec.mu.Lock()
	rec.entry, rec.held = e, e.State == journal.Pending && !(rec.resume != nil && e.Clear)
	rec.mu.Unlock()
	if o.isHop && e.Key != hopKey { // decided by a person since the redirect
		if fresh := e.FirstSend.IsZero(); rec.claimed() { // and begun anew by this Begin: nobody asked for that
			_ = rec.release(o, journal.Note{NotSent: fresh, Clear: fresh || e.Clear})
		}
		return fmt.Errorf("%w: the entry was decided meanwhile", ErrInProgress)
	}
	o.known(e)
	switch {
	case e.State == journal.Refused: // meanwhile, and a resume starts nothing anew
		return errNotPending
	case e.State == journal.Done:
		return o.recall(e)
	case rec.resume != nil && e.Clear: // since Pending was read, a caller was told that nothing was done
		return errNotPending
	}
	if !o.isHop { // MaxElapsed holds over the hops
		o.started = time.Now()
	}
	// Nothing that was sent before can have had an effect; on a hop, what this
	// operation sent stands in its report.
	o.minted = e.Clear || e.FirstSend.IsZero() || o.isHop && o.minted && e.Fence == rec.fence+1
	rec.unknown = !o.minted && !o.isHop
	o.renewAfter(time.Until(e.Lease))
	if err := checkKey(e.Key, "journal", &o.t.dialect); err != nil {
		return err
	}
	if e.Clear { // the key window begins with this call
		o.wasSent = false
		return nil
	}
	return o.since(e.FirstSend)
}

// since notes the first send of the key that the journal knows.
func (o *operation) since(first time.Time) error {
	if first.IsZero() {
		o.wasSent = false
		return nil
	}
	if first.After(o.started.Add(clockSkew)) {
		return fmt.Errorf("%w: its first send is %v in the future by this clock, so its age is not known", ErrKeyExpired, first.Sub(o.started).Round(time.Second))
	}
	o.noteSend(first)
	return nil
}

// recall is for an operation that is done: the stored answer, or, where there is
// none that opens, the server's replay inside the key window, which run asks for.
func (o *operation) recall(e journal.Entry) error {
	rec := o.record()
	rec.done, o.minted = true, false
	if rec.resume != nil {
		return errNotPending
	}
	if len(e.Answer) > 0 && o.t.Seal != nil {
		if rec.closed = o.unsealAnswer(e); rec.closed == nil {
			return nil
		}
	}
	// What a person settled the server may never have seen: a send would do it.
	if e.Decision != "" || e.FirstSend.IsZero() || o.since(e.FirstSend) != nil || o.expired(o.started) {
		return rec.alreadyDone(fmt.Errorf("%w: on %s", ErrAlreadyDone, e.Finished.UTC().Format(time.DateTime+" MST")))
	}
	return nil
}

// alreadyDone adds why the stored answer is not there.
func (rec *record) alreadyDone(err error) error {
	if rec.closed == nil {
		return err
	}
	return fmt.Errorf("%w; %w", err, rec.closed)
}

// renewAfter keeps the claim while the operation runs; rest is what is left of
// the lease.
func (o *operation) renewAfter(rest time.Duration) {
	rec := o.record()
	every := max(rest/3, 10*time.Millisecond)
	var telling atomic.Bool
	rec.mu.Lock()
	defer rec.mu.Unlock()
	rec.timer = time.AfterFunc(every, func() {
		if !rec.claimed() {
			return
		}
		err := rec.renew(context.Background(), o.t.Journal, journal.Note{})
		rec.mu.Lock()
		goesOn := rec.held && !rec.lost
		if goesOn {
			if err == nil { // a store that is down keeps the pace
				every = max(time.Until(rec.entry.Lease)/3, 10*time.Millisecond)
			}
			rec.timer.Reset(every)
		}
		rec.mu.Unlock()
		if err != nil && goesOn && telling.CompareAndSwap(false, true) { // a slow hook hears of one at a time
			defer telling.Store(false)
			o.journalFailed(err)
		}
	})
}

// renew extends the claim and notes n. The mutex is not held meanwhile: a store
// that hangs must hold up nobody who only looks.
func (rec *record) renew(ctx context.Context, j journal.Journal, n journal.Note) error {
	ctx, cancel := context.WithTimeout(ctx, writeTime)
	defer cancel()
	rec.mu.Lock()
	e := rec.entry
	rec.mu.Unlock()
	now, err := j.Renew(ctx, e, n)
	rec.mu.Lock()
	defer rec.mu.Unlock()
	switch {
	case !rec.held: // finished meanwhile
	case err == nil:
		rec.entry.Lease, rec.entry.Reference, rec.entry.Status = now.Lease, now.Reference, now.Status
	case errors.Is(err, journal.ErrClaimLost):
		rec.lost = true
	}
	return err
}

// stillHeld says why nothing more may be sent: a process that was stopped for
// longer than its lease renews it before it sends again, and one that cannot
// does not know whether the operation has another key by now.
func (o *operation) stillHeld(now time.Time) error {
	rec := o.record()
	rec.mu.Lock()
	late := rec.held && !rec.lost && !now.Round(0).Before(rec.entry.Lease)
	rec.mu.Unlock()
	var err error
	if late {
		err = rec.renew(o.Context, o.t.Journal, journal.Note{})
	}
	rec.mu.Lock()
	defer rec.mu.Unlock()
	switch {
	case rec.lost:
		return fmt.Errorf("%w: the claim on its entry was taken over", ErrInProgress)
	case err != nil && o.Err() != nil:
		return o.cancelled()
	case err != nil:
		return journalErr(fmt.Errorf("the lease of the claim has ended and cannot be renewed: %w", err))
	}
	return nil
}

// conclude tells the journal what is known at the end of the call.
func (o *operation) conclude(resp *http.Response) {
	rec, r := o.record(), &o.report
	if rec.done {
		r.Outcome = Executed
		switch n := len(r.Attempts); {
		case errors.Is(r.Reason, ErrKeyExpired):
			r.Reason = rec.alreadyDone(ErrAlreadyDone)
		case r.Reason == nil && n > rec.before && resp != nil && resp.StatusCode/100 != 3 && r.Attempts[n-1].evidence != done:
			r.Reason = rec.alreadyDone(fmt.Errorf("%w: the answer %d is not the one that it had", ErrAlreadyDone, resp.StatusCode))
		case r.Reason == nil && rec.closed != nil:
			r.Reason, r.onlyJournal = rec.closed, true
		}
		return
	}
	r.EarlierUnknown = r.EarlierUnknown || rec.unknown
	if !rec.claimed() {
		return
	}
	n := journal.Note{Attempts: len(r.Attempts) - rec.before, Reference: r.Reference}
	if k := len(r.Attempts); k > rec.before {
		n.Status = r.Attempts[k-1].Status
	}
	var err error
	switch state, final := o.closes(); {
	case final && rec.resume != nil:
		err = rec.hold(o, resp, state, n)
	case final && state == journal.Done && resp != nil && !o.now.whole:
		rec.stream = &ending{state, n}
		err = rec.note(o, n)
	case final:
		n.Answer, err = o.sealAnswer(resp, state)
		e := rec.finish(o, state, n)
		if e != nil && state == journal.Refused { // a resume will send it, to a server that may have forgotten its no
			r.Outcome = Unknown
		}
		err = errors.Join(err, e)
	default:
		err = rec.release(o, o.unfinished(n))
		if err != nil && !errors.Is(err, errEnlisted) && !rec.stillOurs(err) { // whoever took it over may have sent the key
			r.EarlierUnknown = true
		}
		if err != nil { // or a resume will, that does not know what the caller was told
			claimed := r.Outcome
			r.Outcome = fold(r.Attempts, false)
			if r.Reason != nil && r.Outcome != claimed && !errors.Is(err, journal.ErrClaimLost) && !errors.Is(err, errEnlisted) {
				r.Reason = fmt.Errorf("%w; %w", r.Reason, journalErr(err))
			}
		}
		if errors.Is(err, journal.ErrClaimLost) || errors.Is(err, errEnlisted) {
			err = nil // they go on with it
		}
	}
	if err != nil && r.Reason == nil {
		// Also what the journal calls invalid: it is its entry, and not the request.
		r.Reason, r.onlyJournal = fmt.Errorf("%w: %w", ErrJournal, err), true
	}
}

// closes reports the state that the outcome makes of the entry. Only an answer
// of the operation itself makes it refused.
func (o *operation) closes() (s journal.State, final bool) {
	switch {
	case o.report.Outcome == Executed:
		return journal.Done, true
	case fold(o.report.Attempts, false) == Refused:
		return journal.Refused, true
	}
	return journal.Pending, false
}

// unfinished says what is known of an entry that stays pending.
func (o *operation) unfinished(n journal.Note) journal.Note {
	rec := o.record()
	n.NotSent = rec.entry.FirstSend.IsZero() && !mayHaveSent(o.report.Attempts)
	if rec.resume != nil {
		n.Orderly, n.Clear = true, rec.entry.Clear
		return n
	}
	n.Clear = o.report.Outcome == NotExecuted || o.report.Outcome == Refused
	return n
}

func (rec *record) claimed() bool {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.held
}

// letGo ends the renewals and returns the entry for the last write.
func (rec *record) letGo() journal.Entry {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	rec.held = false
	if rec.timer != nil {
		rec.timer.Stop()
	}
	return rec.entry
}

func (rec *record) finish(o *operation, s journal.State, n journal.Note) error {
	e := rec.letGo()
	ctx, cancel := lastWrite(o)
	defer cancel()
	_, err := o.t.Journal.Finish(ctx, e, s, n)
	return err
}

func (rec *record) release(o *operation, n journal.Note) error {
	e := rec.letGo()
	ctx, cancel := lastWrite(o)
	defer cancel()
	now, err := o.t.Journal.Release(ctx, e, n)
	if err == nil && n.Clear && !now.Clear {
		return errEnlisted
	}
	return err
}

// stillOurs reports whether nobody else can have claimed the entry yet, although
// its release failed.
func (rec *record) stillOurs(err error) bool {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return !errors.Is(err, journal.ErrClaimLost) && time.Now().Round(0).Before(rec.entry.Lease)
}

// note keeps the reference before the answer is handed on.
func (rec *record) note(o *operation, n journal.Note) error {
	if n.Reference == "" {
		return nil
	}
	return rec.renew(context.WithoutCancel(o.Context), o.t.Journal, n)
}

// hold leaves the end to Client.Resume, whose done comes first.
func (rec *record) hold(o *operation, resp *http.Response, s journal.State, n journal.Note) error {
	rec.resume.o, rec.resume.resp, rec.resume.ending = o, resp, ending{s, n}
	return rec.note(o, n)
}

// answerEnded finishes the entry of a streamed answer, or leaves it pending where
// the answer was not read to its end.
func (o *operation) answerEnded(whole bool) error {
	rec := o.record()
	switch {
	case rec == nil || rec.stream == nil:
		return nil
	case whole:
		return rec.finish(o, rec.stream.state, rec.stream.note)
	}
	return rec.release(o, journal.Note{Attempts: rec.stream.note.Attempts})
}

// journalFailed tells of a failure that no result of the call can tell of. A
// claim that was taken over is none: whoever has it goes on with the entry.
func (o *operation) journalFailed(err error) {
	if failed := o.t.Hooks.JournalFailed; failed != nil && !errors.Is(err, journal.ErrClaimLost) {
		failed(o.Context, o.record().operation(o), journalErr(err))
	}
}

// lastWrite is a context for what must be written though the caller may have
// left.
func lastWrite(o *operation) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(o.Context), writeTime)
}
