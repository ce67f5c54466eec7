package webhook

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/idem-go/idem/journal"
)

const (
	// writeTime bounds the last write for an event. It does not end with the
	// caller's context: the effect is there, and must be known.
	writeTime = 10 * time.Second
	// markPause is the first wait before the mark is written again; each is
	// twice the one before.
	markPause = 50 * time.Millisecond
	// leastPause keeps renewals apart, whatever the lease is.
	leastPause = 10 * time.Millisecond
	// lateTime is for a renewal whose lease has ended already.
	lateTime = time.Second
)

// claim is a lease on an event, renewed while it is handled.
type claim struct {
	work    context.Context // of who handles it; ends when the claim is lost
	journal journal.Journal
	lose    context.CancelCauseFunc // ends work
	renewal context.Context         // of the renewals: outlives the caller's
	stop    context.CancelFunc      // ends renewal

	running sync.WaitGroup // a renewal

	mu    sync.Mutex // guards what follows
	entry journal.Entry
	timer *time.Timer
	ended bool
}

// hold keeps the claim of e until end, or for a lease after ctx has ended.
func hold(ctx context.Context, j journal.Journal, e journal.Entry) *claim {
	c := &claim{journal: j, entry: e}
	c.work, c.lose = context.WithCancelCause(ctx)
	c.renewal, c.stop = context.WithCancel(context.WithoutCancel(ctx))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.timer = time.AfterFunc(pause(e.Lease), c.renew)
	return c
}

// pause before the next renewal: a third of what is left, so that one that
// fails is made again, the more often the less is left.
func pause(lease time.Time) time.Duration { return max(time.Until(lease)/3, leastPause) }

// renew extends the lease. When it has ended without, nobody may go on.
func (c *claim) renew() {
	c.mu.Lock()
	if c.ended || c.work.Err() != nil {
		c.mu.Unlock()
		return
	}
	c.running.Add(1)
	defer c.running.Done()
	e := c.entry
	c.mu.Unlock()

	// A process that was stopped for longer than its lease asks once more.
	ctx, cancel := context.WithTimeout(c.renewal, max(time.Until(e.Lease), lateTime))
	defer cancel()
	now, err := c.journal.Renew(ctx, e, journal.Note{})
	switch {
	case err == nil:
		e.Lease = now.Lease
	case errors.Is(err, journal.ErrClaimLost):
		if !c.marked() {
			c.lose(err)
		}
		return
	case !time.Now().Before(e.Lease):
		c.lose(fmt.Errorf("%w: its lease has ended and could not be renewed: %w", journal.ErrClaimLost, err))
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.entry.Lease = e.Lease
	if !c.ended {
		c.timer.Reset(pause(e.Lease))
	}
}

// marked reports whether who handles the event has finished it already, in a
// transaction: then there is nothing to renew, and nothing is lost.
func (c *claim) marked() bool {
	ctx, cancel := context.WithTimeout(c.renewal, writeTime)
	defer cancel()
	mine := c.held()
	e, err := c.journal.Get(ctx, mine.Operation)
	return err == nil && e.State == journal.Done && e.Generation == mine.Generation && e.Fence == mine.Fence
}

func (c *claim) held() journal.Entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entry
}

// end stops the renewals and returns when none runs any more.
func (c *claim) end() {
	c.mu.Lock()
	c.ended = true
	c.timer.Stop()
	c.mu.Unlock()
	c.stop()
	c.running.Wait()
	c.lose(nil)
}

// mark finishes the entry. A store that fails is asked again for a while: what was
// done and is not marked would be done again. The claim is renewed meanwhile.
func (c *claim) mark(n journal.Note) error {
	ctx, cancel := context.WithTimeout(c.renewal, writeTime)
	defer cancel()
	for pause := markPause; ; pause *= 2 {
		_, err := c.journal.Finish(ctx, c.held(), journal.Done, n)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, journal.ErrClaimLost), errors.Is(err, journal.ErrLatched), errors.Is(err, journal.ErrDamaged), errors.Is(err, journal.ErrClosed):
			return err // it will not get better
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// release frees the event for the next delivery.
func (c *claim) release(n journal.Note) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.work), writeTime)
	defer cancel()
	_, err := c.journal.Release(ctx, c.held(), n)
	if errors.Is(err, journal.ErrClaimLost) {
		return nil // somebody else goes on with it, or it was finished in a transaction
	}
	return err
}
