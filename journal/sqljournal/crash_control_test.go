//go:build unix

package sqljournal_test

import (
	"context"
	"errors"
	"iter"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

// wrongBuild is a journal as somebody might have built it. "" is the right one.
func wrongBuild(kind string, j journal.Journal) journal.Journal {
	switch kind {
	case "":
		return j
	case "stores the key after the send":
		return &storesLate{Journal: j, begun: map[journal.Operation]journal.Intent{}}
	case "has no fence":
		return hasNoFence{j}
	case "makes a new key on a resume":
		return makesNewKey{j}
	case "forgets the first send":
		return forgetsFirstSend{j}
	}
	panic("no such build: " + kind)
}

// storesLate says that it has begun and writes at the end: one write less for
// each operation.
type storesLate struct {
	journal.Journal
	mu    sync.Mutex // guards begun
	begun map[journal.Operation]journal.Intent
}

func (j *storesLate) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	old, err := j.Get(ctx, in.Operation)
	e := journal.Entry{Operation: in.Operation, Generation: 1, Key: in.Key, Window: in.Window, Fence: 1, Lease: time.Now().Add(time.Hour)}
	switch {
	case errors.Is(err, journal.ErrNotFound):
	case err == nil && old.State == journal.Refused && in.MaxResumes == 0:
		e.Generation, e.Key, e.Fence = old.Generation+1, in.NextKey, old.Fence+1
	default:
		return j.Journal.Begin(ctx, in)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.begun[in.Operation] = in
	return e, nil
}

// write begins now what it said to have begun.
func (j *storesLate) write(ctx context.Context, e journal.Entry) (journal.Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	in, ok := j.begun[e.Operation]
	if !ok {
		return e, nil
	}
	delete(j.begun, e.Operation)
	in.Key, in.NextKey = e.Key, e.Key
	return j.Journal.Begin(ctx, in)
}

func (j *storesLate) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return e, nil
}

func (j *storesLate) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	e, err := j.write(ctx, e)
	if err != nil {
		return e, err
	}
	return j.Journal.Finish(ctx, e, s, n)
}

func (j *storesLate) Release(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	e, err := j.write(ctx, e)
	if err != nil {
		return e, err
	}
	return j.Journal.Release(ctx, e, n)
}

// hasNoFence lets whoever comes last write.
type hasNoFence struct{ journal.Journal }

func (j hasNoFence) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	now, err := j.Journal.Finish(ctx, e, s, n)
	if errors.Is(err, journal.ErrClaimLost) {
		if now, err = j.Get(ctx, e.Operation); err == nil {
			return j.Journal.Finish(ctx, now, s, n)
		}
	}
	return now, err
}

// makesNewKey takes an entry over with a key that nobody has used.
type makesNewKey struct{ journal.Journal }

func (j makesNewKey) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Journal.Begin(ctx, in)
	if err == nil && in.MaxResumes > 0 {
		e.Key = in.NextKey
	}
	return e, err
}

// forgetsFirstSend takes every key for a young one.
type forgetsFirstSend struct{ journal.Journal }

func (j forgetsFirstSend) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Journal.Begin(ctx, in)
	e.FirstSend = time.Time{}
	return e, err
}

func (j forgetsFirstSend) Pending(ctx context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		for e, err := range j.Journal.Pending(ctx) {
			e.FirstSend = time.Time{}
			if !yield(e, err) {
				return
			}
		}
	}
}

// TestCrashNegativeControlsAreCaught runs one history with the right build, in
// which nothing must be wrong, and with a wrong one, which must be caught by the
// same judge.
func TestCrashNegativeControlsAreCaught(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for _, c := range []struct {
		wrong   string
		history func(t *testing.T, wrong string) (w *crashWorld, orders []string)
		window  time.Duration // of the keys in that history
		caught  string
	}{
		{"stores the key after the send", historyOfACrashedCall, crashKeyWindow, "doubled"},
		{"has no fence", historyOfALateFinish, crashKeyWindow, "doubled"},
		{"makes a new key on a resume", historyOfACrashedCall, crashKeyWindow, "doubled"},
		{"forgets the first send", historyOfALongOutage, keyMemory, "doubled"},
	} {
		for _, wrong := range []string{"", c.wrong} {
			name := "right"
			if wrong != "" {
				name = wrong
			}
			g.run(t, c.wrong+": "+name, func(t *testing.T) {
				w, orders := c.history(t, wrong)
				found := w.judge(t, orders, c.window, false)
				if wrong == "" {
					require.Empty(t, found, w.story())
					return
				}
				require.Contains(t, strings.Join(found, "\n"), c.caught, w.story())
				t.Log(strings.Join(found, "\n"))
			})
		}
	}
}

// historyOfACrashedCall: the first card is declined, the second is charged, and
// the process dies before it knows. The next process resumes what is pending,
// and then the shop, which has no answer, calls again.
func historyOfACrashedCall(t *testing.T, wrong string) (w *crashWorld, orders []string) {
	w = newCrashWorld(t)
	w.dies(t, crashTask{Do: []string{"pay"}, Orders: []string{"declined-1"}, Die: "answered", Nth: 2, Wrong: wrong})
	w.lives(t, crashTask{Do: []string{"resume", "pay"}, Orders: []string{"second card: declined-1"}, Wrong: wrong}, "end")
	return w, []string{"declined-1"}
}

// historyOfALateFinish: P learns that the card was declined, and is stopped before it
// writes that down. R takes the operation over and learns the same. The second
// card is charged, and that process dies before it knows. P wakes.
func historyOfALateFinish(t *testing.T, wrong string) (w *crashWorld, orders []string) {
	w = newCrashWorld(t)
	p := w.start(t, crashTask{Do: []string{"pay"}, Orders: []string{"declined-1"}, Stop: "before finish", Lease: stoppedLease, Wrong: wrong})
	p.says("step")
	w.leaseEnds(t, "declined-1") // P's
	w.resumes(t, crashTask{Wrong: wrong})
	w.dies(t, crashTask{Do: []string{"pay"}, Orders: []string{"second card: declined-1"}, Die: "answered", Wrong: wrong})
	p.signal(syscall.SIGCONT)
	p.says("claim")
	p.kill()
	w.lives(t, crashTask{Do: []string{"resume", "pay"}, Orders: []string{"second card: declined-1"}, Wrong: wrong}, "end")
	return w, []string{"declined-1"}
}

// historyOfALongOutage: the process dies before it knows, and the next one comes
// when the server has forgotten the key.
func historyOfALongOutage(t *testing.T, wrong string) (w *crashWorld, orders []string) {
	w = newCrashWorld(t)
	w.server.Apply(fakeserver.Settings{Retention: keyMemory})
	task := crashTask{Do: []string{"pay"}, Orders: []string{"order-1"}, Die: "answered", Window: keyMemory, Limit: windowMargin, Wrong: wrong}
	w.dies(t, task)
	time.Sleep(keyMemory) // the server's memory fades
	task.Do, task.Die = []string{"resume"}, ""
	w.lives(t, task, "end")
	return w, []string{"order-1"}
}
