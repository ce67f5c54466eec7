package sqljournal

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/idem-go/idem/journal"
)

// Group commit: a flush of the disk costs far more than a statement, so
// callers that come while one transaction is being committed share the next.
// The first caller starts a goroutine, the leader, that takes transactions
// from the queue until it is empty, and then ends. The callers only wait, so
// that each can leave when its context ends.

// most steps of one transaction; it bounds how long the first one waits.
const most = 256

// call is one step of a caller, to be run in a transaction.
type call struct {
	run func(w *writer) (journal.Entry, error)
	// unwanted says what has to be done if the step was committed and its
	// caller had left; nil: nothing.
	unwanted func(journal.Entry) *call

	state atomic.Int32 // waiting, left or answered
	done  chan struct{}
	entry journal.Entry // these two are the leader's until done is closed
	err   error
}

const (
	waiting int32 = iota
	left
	answered
)

// storeError is a failure of the database within a step, as opposed to a verdict of the
// rules: it ends the transaction for all.
type storeError struct{ error }

func (e storeError) Unwrap() error { return e.error }

// do runs c in a transaction and returns when it is durable, or when ctx
// ends, whichever is first.
func (j *Journal) do(ctx context.Context, c *call) (journal.Entry, error) {
	if err := context.Cause(ctx); err != nil {
		return journal.Entry{}, err
	}
	c.done = make(chan struct{})
	j.mu.Lock()
	if err := j.unusable(); err != nil {
		j.mu.Unlock()
		return journal.Entry{}, err
	}
	j.enqueue(c)
	j.mu.Unlock()
	select {
	case <-c.done:
		return c.entry, c.err
	case <-ctx.Done():
	}
	if c.state.CompareAndSwap(waiting, left) {
		return journal.Entry{}, context.Cause(ctx)
	}
	<-c.done
	return c.entry, c.err
}

// enqueue needs j.mu.
func (j *Journal) enqueue(c *call) {
	j.queue = append(j.queue, c)
	if !j.leading {
		j.leading = true
		go j.lead()
	}
}

// lead commits transactions until nobody waits.
func (j *Journal) lead() {
	for {
		j.mu.Lock()
		if len(j.queue) == 0 {
			j.leading = false
			j.idle.Broadcast()
			j.mu.Unlock()
			return
		}
		j.mu.Unlock()
		j.transaction()
		// Those that were just answered often come again at once; let them
		// queue before the next flush.
		runtime.Gosched()
	}
}

// take moves calls that somebody waits for from the queue to the end of calls,
// up to the most that one transaction may have.
func (j *Journal) take(calls []*call) []*call {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for n < len(j.queue) && len(calls) < j.most {
		if c := j.queue[n]; c.state.Load() != left {
			calls = append(calls, c)
		}
		n++
	}
	rest := copy(j.queue, j.queue[n:])
	clear(j.queue[rest:])
	j.queue = j.queue[:rest]
	return calls
}

// transaction runs one, for those that wait now and those that come while it
// runs.
func (j *Journal) transaction() {
	calls := j.take(j.calls[:0])
	j.calls = calls
	if len(calls) == 0 {
		return
	}
	err := j.latched()
	if err == nil {
		if err = j.conn.Raw(func(any) error {
			var err error
			calls, err = j.writer.transaction(j, calls)
			return err
		}); err != nil {
			err = j.failed(err)
		}
	}
	j.calls = calls
	for _, c := range calls {
		if err != nil {
			c.entry, c.err = journal.Entry{}, err
		}
		if c.state.CompareAndSwap(waiting, answered) {
			close(c.done)
		} else if c.unwanted != nil && c.err == nil {
			if u := c.unwanted(c.entry); u != nil {
				u.done = make(chan struct{})
				j.mu.Lock()
				j.queue = append(j.queue, u)
				j.mu.Unlock()
			}
		}
	}
	clear(calls)
}

// transaction runs calls, and what is queued meanwhile, and commits. The error
// is that of the database, and nothing was then committed as far as it is known.
func (w *writer) transaction(j *Journal, calls []*call) (_ []*call, err error) {
	if _, err := w.exec(w.begin); err != nil {
		return calls, err
	}
	for n := 0; n < len(calls); n++ {
		if c := calls[n]; c.state.Load() != left {
			c.entry, c.err = c.run(w)
			if s := (storeError{}); errors.As(c.err, &s) {
				_, _ = w.exec(w.rollback) // SQLite may have done it already
				return calls, s.error
			}
		} else {
			c.err = errLeft
		}
		if n == len(calls)-1 {
			calls = j.take(calls)
		}
	}
	if _, err := w.exec(w.commit); err != nil {
		_, _ = w.exec(w.rollback) // as above
		return calls, fmt.Errorf("commit: %w", err)
	}
	return calls, nil
}

// errLeft marks a step that was not run.
var errLeft = errors.New("sqljournal: the caller left")
