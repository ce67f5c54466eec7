package idem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/idem-go/idem/journal"
)

// Resumed says what a [Client.Resume] did with the pending entries.
type Resumed struct {
	// Seen entries; the rest of the numbers add up to it.
	Seen int
	// Done and Refused entries are finished: the server answered, and done
	// returned nil.
	Done, Refused int
	// Unknown ones were sent again, and it is still not known what became of
	// them, or the server could not be reached. The next resume goes on with
	// them.
	Unknown int
	// Skipped ones are another owner's, another Transport's (build returned no
	// request, or the scope is another), or wait for their caller, who was told
	// that nothing was done.
	Skipped int
	// Expired ones were not sent: their key window has passed. A person must
	// look them up at the provider and use [Client.Settle].
	Expired int
	// Attention ones were resumed Policy.MaxResumes times, and the process
	// ended each time. A person should look at them.
	Attention int
	// Failed ones have an error: build or done failed, build gave another
	// request, the entry is damaged.
	Failed int
}

// String is one line for people.
func (r Resumed) String() string {
	return fmt.Sprintf("seen %d: done %d, refused %d, unknown %d, skipped %d, expired %d, need attention %d, failed %d",
		r.Seen, r.Done, r.Refused, r.Unknown, r.Skipped, r.Expired, r.Attention, r.Failed)
}

// PendingOperation is an entry whose outcome is not known, or not yet.
type PendingOperation struct {
	journal.Entry
	// Left is how long the key may still be sent: the key window, from the
	// first send, less one Policy.AttemptTimeout; all of it if nothing was sent
	// yet that can have had an effect. 0 or less: it has passed, and
	// a person must look the operation up at the provider.
	Left time.Duration
	// Attention: it was resumed too often; see Resumed.Attention.
	Attention bool
}

// resuming finds the resumption under which a request is sent.
type resuming struct{}

// resumption is one entry on its way through Resume.
type resumption struct {
	scope  string         // of the entry
	sealed bool           // the request is the stored one
	left   []string       // names of headers that it had and that are not stored
	taken  atomic.Bool    // by its own request: what Prepare, a hook or done send under its context is not of it
	o      *operation     // whose claim is left to Resume; nil: there is none
	resp   *http.Response // its answer, before any redirect
	ending ending
}

// errNotPending: the entry was finished meanwhile.
var errNotPending = errors.New("idem: entry is no longer pending")

// journal of the Transport, or why there is none.
func (c *Client) journal() (*Transport, journal.Journal, error) {
	t := c.transport()
	t.resolve()
	switch {
	case t.invalid != nil:
		return t, nil, t.invalid
	case t.Journal == nil:
		return t, nil, invalid("Transport.Journal", "is nil; it is needed here")
	}
	return t, t.Journal, nil
}

// Resume sends the pending entries of the Journal again, each with its own
// key, oldest first: what a crash, a lost answer or an outbox left behind. Call
// it when the process starts, and from time to time.
//
// build makes the request of an entry again: the same method, URL and body as
// before (ErrKeyReused otherwise, and nothing is sent), with fresh
// credentials. No request and no error: the entry is not this Transport's. It
// is not asked where Transport.Seal stored the request, and may be nil if that
// is always so; Transport.Prepare then brings the credentials. (Where there is no
// Prepare and the request had some, and where the stored request is of another
// dialect or does not open, build is asked, if there is one.)
//
// done receives each answer that ends an operation: State of the entry is Done
// or Refused, Reference is the provider's id. Only its nil finishes the entry;
// after an error the entry stays pending and the next resume gets the server's
// replay. So done may see an answer again, also after a crash, or a journal
// that fails behind it: let it be harmless the second time, or let it finish the
// entry in the transaction of what it writes (FinishTx of sqljournal). The body
// is closed after it. nil: every answer is good.
//
// Expired keys are not sent. Policy has the pace and limits, Hooks.Resumed the
// progress. The error joins those of single entries, at most 10; it is the
// cause of ctx if that ended the resume, or ErrJournal.
func (c *Client) Resume(ctx context.Context, build func(context.Context, journal.Entry) (*http.Request, error), done func(journal.Entry, *http.Response) error) (Resumed, error) {
	t, j, err := c.journal()
	if err != nil {
		return Resumed{}, err
	}
	r := &resumer{c: c, t: t, ctx: ctx, build: build, done: done}
	for e, err := range j.Pending(ctx) {
		switch {
		case err != nil && errors.Is(err, journal.ErrDamaged):
			r.fail(e.Operation, journalErr(err))
		case err != nil && ctx.Err() != nil:
			return r.sum, context.Cause(ctx)
		case err != nil:
			return r.sum, errors.Join(append(r.errs, journalErr(err))...)
		default:
			r.entry(e, false)
		}
		if ctx.Err() != nil {
			return r.sum, context.Cause(ctx)
		}
	}
	if err := r.claimed(); err != nil {
		return r.sum, err
	}
	return r.sum, errors.Join(r.errs...)
}

// resumer is one Resume.
type resumer struct {
	c     *Client
	t     *Transport
	ctx   context.Context
	build func(context.Context, journal.Entry) (*http.Request, error)
	done  func(journal.Entry, *http.Response) error

	sum   Resumed
	errs  []error
	last  time.Time       // start of the last operation
	later []journal.Entry // others had claimed them
}

// count notes the end of an entry.
func (r *resumer) count(n *int, op journal.Operation) {
	r.sum.Seen++
	*n++
	if h := r.t.Hooks.Resumed; h != nil {
		h(r.ctx, op, r.sum)
	}
}

func (r *resumer) fail(op journal.Operation, err error) {
	const most = 10
	if len(r.errs) < most {
		r.errs = append(r.errs, fmt.Errorf("idem: resume of %v: %w", op, err))
	}
	r.count(&r.sum.Failed, op)
}

// entry deals with one; again: its claim has been waited for.
func (r *resumer) entry(e journal.Entry, again bool) {
	p := r.t.pending(e, time.Now())
	switch {
	case e.Clear:
		r.count(&r.sum.Skipped, e.Operation)
	case p.Left <= 0:
		r.count(&r.sum.Expired, e.Operation)
	case e.Claimed(time.Now()) && !again && r.t.policy.ResumeWait > 0:
		e.Request, e.Answer = nil, nil // there may be many; outwait asks for it again
		r.later = append(r.later, e)
	case e.Claimed(time.Now()):
		r.count(&r.sum.Skipped, e.Operation)
	case p.Attention:
		r.count(&r.sum.Attention, e.Operation)
	default:
		r.send(e)
	}
}

// claimed deals with the entries that others had claimed: whoever renewed is
// alive, whoever did not has crashed.
func (r *resumer) claimed() error {
	until := time.Now().Add(r.t.policy.ResumeWait)
	for _, e := range r.later {
		now, err := r.outwait(e, until)
		switch {
		case r.ctx.Err() != nil:
			return context.Cause(r.ctx)
		case errors.Is(err, journal.ErrNotFound), err == nil && now.State != journal.Pending:
			r.count(&r.sum.Skipped, e.Operation) // its owner has finished it
		case err != nil:
			r.fail(e.Operation, journalErr(err))
		default:
			r.entry(now, true)
		}
	}
	return nil
}

// outwait waits until a claim ends, is renewed, or the time is over.
func (r *resumer) outwait(e journal.Entry, until time.Time) (journal.Entry, error) {
	for {
		now, err := r.t.Journal.Get(r.ctx, e.Operation)
		if err != nil || now.State != journal.Pending || now.Fence != e.Fence || now.Lease.After(e.Lease) ||
			!now.Claimed(time.Now()) || !time.Now().Before(until) {
			return now, err
		}
		if !wait(r.ctx, min(max(time.Until(now.Lease), time.Millisecond), claimPollMax)) {
			return now, context.Cause(r.ctx)
		}
	}
}

// wait sleeps for d; false: the context ended first.
func wait(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// send sends one entry again and counts what came of it.
func (r *resumer) send(e journal.Entry) {
	re := &resumption{scope: e.Scope}
	defer func() { // a panic behind a redirect, in a hook or in done
		if re.o != nil && re.o.record().claimed() {
			_ = re.o.record().release(re.o, journal.Note{Attempts: re.ending.note.Attempts})
		}
	}()
	req, err := r.request(e, re)
	switch {
	case err != nil:
		r.fail(e.Operation, err)
		return
	case req == nil:
		r.count(&r.sum.Skipped, e.Operation)
		return
	}
	if !r.last.IsZero() && !wait(r.ctx, r.t.policy.ResumePace-time.Since(r.last)) {
		if req.Body != nil {
			_ = req.Body.Close()
		}
		return
	}
	r.last = time.Now()
	ctx, cancel := context.WithCancelCause(req.Context()) // build may have made it without the context of the resume
	defer cancel(nil)
	defer context.AfterFunc(r.ctx, func() { cancel(context.Cause(r.ctx)) })()
	ctx = WithOperation(ctx, Operation{Name: e.Name, ID: e.ID})
	ctx = context.WithValue(ctx, resuming{}, re)
	resp, err := r.c.exchange(req.WithContext(ctx))
	r.conclude(e, re, resp, err)
}

// request of an entry: the stored one, or what build makes.
func (r *resumer) request(e journal.Entry, re *resumption) (*http.Request, error) {
	if len(e.Request) > 0 && r.t.Seal != nil {
		req, err := r.t.unsealRequest(r.ctx, &e, re)
		if r.build == nil || err == nil && req != nil && (len(re.left) == 0 || r.t.Prepare != nil) {
			return req, err
		}
		re.left, re.sealed = nil, false // build brings what is not stored
	}
	if r.build == nil {
		return nil, invalid("build", "is nil, and the entry has no stored request")
	}
	return r.build(r.ctx, e)
}

// conclude lets done see the answer and finishes the entry.
func (r *resumer) conclude(e journal.Entry, re *resumption, resp *http.Response, err error) {
	if resp != nil {
		body := resp.Body // done may put another in its place
		defer func() { _ = body.Close() }()
	}
	if re.o == nil {
		switch {
		case err != nil && r.ctx.Err() != nil && !attempted(resp, err): // untouched, as those behind it
		case errors.Is(err, errNotPending), errors.Is(err, journal.ErrNotFound), errors.Is(err, ErrInProgress) && !attempted(resp, err), errors.Is(err, ErrScopeChanged) && !attempted(resp, err):
			r.count(&r.sum.Skipped, e.Operation)
		case errors.Is(err, ErrKeyExpired) && !attempted(resp, err):
			r.count(&r.sum.Expired, e.Operation)
		case errors.Is(err, journal.ErrAttention):
			r.count(&r.sum.Attention, e.Operation)
		case err != nil && !attempted(resp, err):
			r.fail(e.Operation, err)
		default:
			r.count(&r.sum.Unknown, e.Operation)
		}
		return
	}
	rec, n := re.o.record(), re.ending.note
	rec.mu.Lock()
	now, lost := rec.entry, rec.lost
	rec.mu.Unlock()
	if lost { // whoever took it over goes on with it
		rec.letGo()
		r.count(&r.sum.Skipped, e.Operation)
		return
	}
	now.State, now.Status = re.ending.state, n.Status
	if n.Reference != "" {
		now.Reference = n.Reference
	}
	if err == nil {
		err = r.tell(now, resp)
	}
	if err != nil {
		_ = rec.release(re.o, journal.Note{Attempts: n.Attempts, Status: n.Status, Orderly: true})
		r.fail(e.Operation, err)
		return
	}
	var sealErr error
	n.Answer, sealErr = re.o.sealAnswer(re.resp, re.ending.state)
	if err := errors.Join(sealErr, rec.finish(re.o, re.ending.state, n)); err != nil {
		r.fail(e.Operation, journalErr(err))
		return
	}
	if re.ending.state == journal.Done {
		r.count(&r.sum.Done, e.Operation)
	} else {
		r.count(&r.sum.Refused, e.Operation)
	}
}

// tell calls done and reads the rest of the answer.
func (r *resumer) tell(e journal.Entry, resp *http.Response) error {
	body := resp.Body
	if r.done != nil {
		if err := r.done(e, resp); err != nil {
			return err
		}
	}
	// Its end belongs to the answer, but it may have none.
	var late atomic.Bool
	timer := time.AfterFunc(r.t.policy.drainLimit(), func() { late.Store(true); _ = body.Close() })
	_, err := io.Copy(io.Discard, io.LimitReader(body, drainBytes))
	timer.Stop()
	if late.Load() || errors.Is(err, http.ErrBodyReadAfterClose) {
		return nil
	}
	return err
}

// drainLimit is how long the rest of an answer that done did not read is waited for.
func (p *Policy) drainLimit() time.Duration {
	if p.AttemptTimeout > 0 {
		return p.AttemptTimeout
	}
	return drainTime
}

// attempted reports whether the call came to an attempt.
func attempted(resp *http.Response, err error) bool {
	var e *Error
	if errors.As(err, &e) {
		return len(e.Attempts) > 0
	}
	return resp != nil
}

// pending says what may still be done about an entry.
func (t *Transport) pending(e journal.Entry, now time.Time) PendingOperation {
	p := PendingOperation{Entry: e, Attention: e.Resumes >= t.policy.MaxResumes}
	p.Left = t.policy.KeyWindow - t.policy.AttemptTimeout
	switch {
	case e.FirstSend.IsZero(), e.Clear: // the window begins with the next call
	case e.FirstSend.After(now.Add(clockSkew)):
		p.Left = 0 // of unknown age
	default:
		p.Left -= max(now.Sub(e.FirstSend), 0)
	}
	return p
}

// Pending yields the pending entries of the Journal, oldest first: operations
// whose outcome is not known, or not yet. A damaged entry is yielded with an
// error (journal.ErrDamaged), of it only the Operation is there, and those behind
// it follow; another error (ErrJournal, ErrInvalid) is
// the last.
func (c *Client) Pending(ctx context.Context) iter.Seq2[PendingOperation, error] {
	return func(yield func(PendingOperation, error) bool) {
		t, j, err := c.journal()
		if err != nil {
			yield(PendingOperation{}, err)
			return
		}
		for e, err := range j.Pending(ctx) {
			p := PendingOperation{Entry: e} // damaged: nothing may be sent, so nothing is left
			if err != nil {
				err = journalErr(err)
			} else {
				p = t.pending(e, time.Now())
			}
			if !yield(p, err) {
				return
			}
		}
	}
}

// Settle records what a person found out about a pending operation at the
// provider: Executed, with the provider's id as reference ("" if there is
// none), or Refused, which frees the operation for a new key. Any other
// outcome is ErrInvalid, and so is an operation that the Journal does not know
// or that is not pending, unless the same was decided before: that is nil.
// reason is kept; 1 to 1,000 bytes. ErrInProgress: somebody works on the entry.
func (c *Client) Settle(ctx context.Context, op journal.Operation, outcome Outcome, reference, reason string) error {
	d := journal.Decision{State: journal.Done, Reference: reference, Reason: reason}
	switch outcome {
	case Executed:
	case Refused:
		d.State = journal.Refused
	default:
		return invalid("outcome", "is %v; it must be executed or refused", outcome)
	}
	return c.decide(ctx, op, d)
}

// Abandon gives a pending operation up although nobody knows what became of
// it, and frees it for a new key: if the first request was executed after all,
// the next one is a second effect. reason is kept; 1 to 1,000 bytes. Errors
// are those of [Client.Settle].
func (c *Client) Abandon(ctx context.Context, op journal.Operation, reason string) error {
	return c.decide(ctx, op, journal.Decision{State: journal.Refused, Abandon: true, Reason: reason})
}

func (c *Client) decide(ctx context.Context, op journal.Operation, d journal.Decision) error {
	_, j, err := c.journal()
	if err != nil {
		return err
	}
	e, err := j.Decide(ctx, op, d)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, journal.ErrClaimed):
		return fmt.Errorf("%w: %s holds %v, alive or not, until %s", ErrInProgress, e.Owner, op, e.Lease.UTC().Format(time.RFC3339))
	case errors.Is(err, journal.ErrFinished) && e.State == d.State && e.Decision != "" && (e.Decision == "abandoned") == d.Abandon &&
		(d.Reference == "" || d.Reference == e.Reference):
		return nil // decided before
	case errors.Is(err, journal.ErrFinished), errors.Is(err, journal.ErrNotFound):
		return fmt.Errorf("%w: operation %v: %w", ErrInvalid, op, err)
	}
	return journalErr(fmt.Errorf("%v: %w", op, err))
}

// Intent is what the Journal would be asked to begin for req, whose context
// names its operation ([WithOperation]): for a journal that can write it down in
// a transaction of the caller's own, such as the BeginTx of sqljournal. [Resume]
// sends it later. Nothing is sent or written; the body is read and closed. Each
// Intent is for one call. Errors: ErrInvalid, ErrKeyInvalid, that of the body.
//
// [Resume]: Client.Resume
func (c *Client) Intent(req *http.Request) (journal.Intent, error) {
	if req == nil {
		return journal.Intent{}, invalid("Request", "is nil")
	}
	o := &operation{Context: req.Context(), req: req}
	o.body.own.rc = req.Body
	defer func() { _ = o.body.own.Close() }()
	t, _, err := c.journal()
	if err != nil {
		return journal.Intent{}, err
	}
	o.t = t
	if err := checkRequest(req); err != nil {
		return journal.Intent{}, err
	}
	o.started = time.Now()
	if t.Scope != nil {
		o.scope = t.Scope(req)
	}
	if err := o.chooseKey(); err != nil {
		return journal.Intent{}, err
	}
	if o.record() == nil {
		return journal.Intent{}, invalid("Request.Context", "names no operation, or the request gets no key; see WithOperation")
	}
	if err := o.body.take(o.Context, req, t.policy.MaxRequestBuffer); err != nil {
		return journal.Intent{}, err
	}
	if o.request, err = fingerprintOf(o.Context, req, o.scope, &o.body); err != nil {
		return journal.Intent{}, err
	}
	in, err := o.intent()
	if err != nil {
		return journal.Intent{}, err
	}
	if err := in.Check(); err != nil {
		return journal.Intent{}, journalErr(err)
	}
	return in, nil
}
