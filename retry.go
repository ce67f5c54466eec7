package idem

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// run is the loop: attempt, rule, wait, again with the same key.
func (o *operation) run() (*http.Response, error) {
	for {
		now, err := o.mayStart()
		if err != nil {
			return o.end(nil, err)
		}
		r, err := o.attempt(now)
		if err != nil { // nothing was sent
			return o.end(nil, err)
		}
		v := rule(&r, o.circumstances(&r))
		o.note(&r, v)
		if r.err != nil && o.overdue() {
			return o.end(nil, o.cancelled())
		}
		if v.verdict == Stop {
			return o.end(o.resp, v.reason)
		}
		wait, from, reason := o.plan(&r, v)
		if from == "" {
			return o.end(o.resp, reason)
		}
		o.discard()
		o.noteWait(wait, from)
		if err := o.sleep(wait); err != nil {
			return o.end(nil, err)
		}
	}
}

// mayStart checks the limits of time before a send, and tells the time.
func (o *operation) mayStart() (time.Time, error) {
	p := &o.t.policy
	now := o.started
	if o.now != nil || o.isHop {
		now = time.Now()
	}
	if o.record() != nil {
		if err := o.stillHeld(now); err != nil {
			return now, err
		}
		now = time.Now() // the store may have taken long
	}
	switch {
	case o.Err() != nil:
		return now, o.cancelled()
	case o.expired(now):
		return now, ErrKeyExpired
	case p.MaxElapsed > 0 && now.Sub(o.started) > p.MaxElapsed:
		return now, ErrTimeExhausted
	}
	return now, nil
}

// expired reports whether a send at t would be too late for the server's
// memory of the key.
func (o *operation) expired(t time.Time) bool {
	p := &o.t.policy
	return o.keyed && p.KeyWindow > 0 && o.wasSent &&
		elapsed(o.started, t)-o.sentFirst > p.KeyWindow-p.AttemptTimeout
}

// elapsed is the longer of what the two clocks say: the steady one stands still
// while a machine sleeps, and a server's memory does not.
func elapsed(from, to time.Time) time.Duration {
	return max(to.Sub(from), to.Round(0).Sub(from.Round(0)))
}

// plan decides whether there is another attempt, and when: the wait and where
// it comes from, or "" and the reason why not.
func (o *operation) plan(r *result, v ruling) (wait time.Duration, from string, reason error) {
	p := &o.t.policy
	why := func(err error) error {
		if v.inProgress {
			return ErrInProgress
		}
		return err
	}
	switch {
	case !o.body.replayable():
		return 0, "", why(ErrBodyNotReplayable)
	case v.inProgress && int(o.waits) >= p.MaxInProgress:
		return 0, "", ErrInProgress
	case v.again == afterPrepare || v.again == withoutExpect:
		if int(o.counted) >= p.MaxAttempts {
			return 0, "", nil // the answer is final as it is
		}
		o.change(v.again)
		wait, from = 0, waitAtOnce
	case !v.inProgress && int(o.counted) >= p.MaxAttempts:
		return 0, "", ErrAttemptsExhausted
	case v.again == onNewConnection && !o.chance.reconnected:
		o.change(v.again)
		wait, from = 0, waitAtOnce
	default:
		sample := o.aftermath().waits.next(p)
		if sample == backoff.Stop {
			return 0, "", why(ErrAttemptsExhausted)
		}
		wait, from = waitAfter(r, v, p, sample, spread())
	}
	now := time.Now()
	if deadline, ok := o.Deadline(); ok && wait > 0 && wait >= deadline.Sub(now) {
		o.endedBy(context.DeadlineExceeded)
		return 0, "", why(ErrRetryAfterTooLong)
	}
	if r.asked && from != waitAtOnce && r.retryAfter > p.MaxRetryAfter {
		return 0, "", why(ErrRetryAfterTooLong)
	}
	if p.MaxElapsed > 0 && saturatingAdd(now.Sub(o.started), wait) > p.MaxElapsed {
		return 0, "", why(ErrTimeExhausted)
	}
	if o.expired(now.Add(min(wait, p.KeyWindow))) {
		return 0, "", ErrKeyExpired
	}
	switch {
	case v.inProgress:
		o.waits++
	case from != waitAtOnce:
		took, ok := p.Budget.take(o.target(), now)
		if !ok {
			return 0, "", ErrBudgetExhausted
		}
		o.took += int32(took)
		o.lastTook = int32(took)
	}
	o.uncounted = v.inProgress
	o.offPool = o.offPool || r.leaveThePool
	return wait, from, nil
}

// change notes what the next attempt does differently; each chance comes once.
func (o *operation) change(a again) {
	switch a {
	case afterPrepare:
		o.chance.prepared = true
	case withoutExpect:
		o.chance.expectDropped = true
	case onNewConnection:
		o.chance.reconnected = true
	}
}

// circumstances of the attempt that has just ended.
func (o *operation) circumstances(r *result) circumstances {
	return circumstances{
		keyed:      o.keyed,
		repeatable: o.repeatable,
		sentBefore: o.keyed && (!o.minted || r.resent || mayHaveSent(o.report.Attempts)),
		canPrepare: o.t.Prepare != nil && !o.chance.prepared && !o.abroad(),
		canExpect:  !o.chance.expectDropped && o.req.Header.Get("Expect") != "",
	}
}

// sleep waits for d, or until the caller's context ends; then the retry did
// not happen and gives back what it took.
func (o *operation) sleep(d time.Duration) error {
	if d <= 0 {
		o.lastTook = 0
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		o.lastTook = 0
		return nil
	case <-o.Done():
		return o.cancelled()
	}
}

// cancelled is the cause with which the caller's context ended.
func (o *operation) cancelled() error {
	err := o.Err()
	if err == nil { // its deadline has come, its timer has not
		o.endedBy(context.DeadlineExceeded)
		return context.DeadlineExceeded
	}
	o.endedBy(err)
	return context.Cause(o.Context)
}

// overdue reports whether the caller's context has ended or is about to:
// http.Client arms a timer of its own for the instant of the deadline.
func (o *operation) overdue() bool {
	deadline, ok := o.Deadline()
	return o.Err() != nil || ok && !time.Now().Before(deadline)
}

// generator makes the waits of one operation; it is made at the first wait.
type generator struct{ b backoff.BackOff }

func (g *generator) next(p *Policy) time.Duration {
	if g.b == nil {
		if g.b = p.Backoff(); g.b == nil {
			g.b = fullJitter(p.BackoffBase, p.BackoffCap)
		}
	}
	return g.b.NextBackOff()
}

// note writes the attempt into the report.
func (o *operation) note(r *result, v ruling) {
	a := o.now
	a.noted = true
	if !o.uncounted {
		o.counted++
	}
	o.uncounted = false
	e := v.evidence
	if o.afterWrite {
		e = elsewhere
	}
	if o.report.Attempts == nil {
		o.report.Attempts = o.firstEntry[:0]
	}
	o.report.Attempts = append(o.report.Attempts, Attempt{
		N:        max(int(o.counted), 1),
		Start:    a.start,
		Took:     time.Since(a.start),
		Status:   r.status,
		Err:      r.err,
		Outcome:  e.outcome(),
		Reused:   a.reused.Load(),
		evidence: e,
	})
	entry := &o.report.Attempts[len(o.report.Attempts)-1]
	if o.t.dialect.RequestID != "" {
		entry.RequestID = o.lastHeader().Get(o.t.dialect.RequestID)
	}
	o.report.Sends += a.sends(r)
	o.report.Replayed = r.marks&markReplay != 0
	if e == done && len(o.t.dialect.Reference) > 0 {
		if id := o.t.dialect.reference(&a.doc); id != "" {
			o.report.Reference = id
		}
	}
	o.failed = v.failure
	if o.cell != nil {
		o.cell.arrive(e != neverSent)
	}
	if h := o.t.Hooks.AttemptDone; h != nil {
		h(context.WithoutCancel(a.Context), &o.report, *entry)
	}
}

func (o *operation) noteWait(wait time.Duration, from string) {
	last := &o.report.Attempts[len(o.report.Attempts)-1]
	last.Wait, last.WaitFrom = wait, from
	if h := o.t.Hooks.Waiting; h != nil {
		h(o.Context, &o.report, *last)
	}
}

// end completes the report and hands the answer on, or an Error where there
// is none.
func (o *operation) end(resp *http.Response, reason error) (*http.Response, error) {
	r := &o.report
	if reason != nil || !o.afterWrite || !r.onlyJournal {
		r.Reason, r.onlyJournal = reason, false // of a hop: that was said of the RoundTrip before
	}
	if reason != nil && o.Err() != nil && errors.Is(reason, context.Cause(o.Context)) {
		o.endedBy(o.Err())
	}
	r.EarlierUnknown = earlierUnknown(r.Attempts)
	if !o.afterWrite {
		if c := o.cell; c != nil && !o.keyed && c.mayBeSent(r.Attempts) {
			o.minted = false // another call under this context may do it
		}
		r.Outcome = fold(r.Attempts, o.minted)
		if o.record() != nil {
			o.conclude(resp)
		}
	}
	o.settle(resp != nil)
	o.body.finish(resp != nil)
	if resp != nil {
		o.handOver(resp)
	}
	r.write = o.afterWrite || o.writes()
	if h := o.t.Hooks.Done; h != nil {
		h(o.Context, r)
	}
	for t, _ := o.Context.Value(reportTarget{}).(*target); t != nil; t = t.outer {
		*t.report = r.copy()
	}
	if last, _ := o.Context.Value(lastOperation{}).(**operation); last != nil && resp != nil {
		*last = o
	}
	o.ended = true
	if resp != nil {
		return resp, nil
	}
	return nil, o.failure()
}

// failure is the Error of an operation that ends without an answer.
func (o *operation) failure() *Error {
	e := &Error{Report: o.report.copy()}
	if o.now != nil && o.now.noted {
		e.Last = e.Attempts[len(e.Attempts)-1].Err
	}
	if p := (*proxyError)(nil); errors.As(e.Last, &p) {
		e.StatusCode, e.Header = p.status, p.header
	}
	if late := o.late; late != nil {
		e.ended = late.ended
		if late.status != 0 {
			e.StatusCode, e.Header, e.Body = late.status, late.header, late.body
		}
	}
	return e
}

// settle gives tokens back to the budget.
func (o *operation) settle(answered bool) {
	budget, now := o.t.policy.Budget, o.started
	if o.took > 0 {
		now = time.Now()
	}
	switch {
	case budget == nil || len(o.report.Attempts) == 0 || budget.untouched(): // nothing is owed
	case answered && !o.failed && o.took > 0:
		budget.give(o.target(), int(o.took), now)
	case answered && !o.failed && o.counted == 1 && len(o.report.Attempts) == 1:
		budget.give(o.target(), 1, now)
	default:
		budget.give(o.target(), int(o.lastTook), now)
	}
}
