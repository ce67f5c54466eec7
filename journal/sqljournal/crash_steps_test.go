//go:build unix

package sqljournal_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

// crashStep is a point between "decided" and "done", and what is known when a
// process has died there.
type crashStep struct {
	name, step string
	state      journal.State // of the entry
	known      bool          // there is one
	sent       bool          // the server has the request, or will have it
}

var crashSteps = []crashStep{
	{"P1 before the key is written", "before begin", journal.Pending, false, false},
	{"P2 after the key is committed", "begun", journal.Pending, true, false},
	{"P2 before the attempt", "attempt", journal.Pending, true, false},
	{"P2 with a connection and before the first byte", "connected", journal.Pending, true, false},
	{"P3 after the request was written", "written", journal.Pending, true, true},
	{"P4 after the headers of the answer", "answered", journal.Pending, true, true},
	{"P5 after the end of the answer", "before finish", journal.Pending, true, true},
	{"after the end", "finished", journal.Done, true, true},
}

func TestC71_AfterACrashAtEachStepTheOperationGoesOnWithItsKey(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for _, at := range crashSteps {
		g.run(t, at.name, func(t *testing.T) {
			crashAtStep(t, "order-1", at)
		})
	}
	g.run(t, "P6 during a sweep", func(t *testing.T) {
		crashInSweep(t, "row", 3)
	})
	g.run(t, "P6 while it is made", func(t *testing.T) {
		crashInCreation(t, "commit", 1)
	})
	g.run(t, "P6 while it is opened", func(t *testing.T) {
		crashInOpening(t, "connection", 1)
	})
}

func TestCrashAtEachNamedStep(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for _, order := range []string{"order-1", "declined-1"} {
		for _, at := range crashSteps {
			g.run(t, "C71 "+order+" "+at.name, func(t *testing.T) {
				crashAtStep(t, order, at)
			})
		}
	}
}

// crashAtStep lets a process die at a step of an order, and the next one resume.
func crashAtStep(t *testing.T, order string, at crashStep) {
	w := newCrashWorld(t)
	nth := 1
	if twoCards(order) {
		nth = 2 // in the second generation: nobody could derive its key from the name
	}
	w.dies(t, crashTask{Do: []string{"pay"}, Orders: []string{order}, Die: at.step, Nth: nth})

	crashed, known := w.entry(t, order)
	if nth == 1 {
		require.Equal(t, at.known, known)
	} else if !at.known {
		require.Equal(t, journal.Refused, crashed.State, "the first card was declined, and the second not yet begun")
	}
	if at.known {
		require.Equal(t, at.state, crashed.State)
		require.Equal(t, nth, crashed.Generation)
	}
	if at.sent {
		w.ended(t, crashed.Key, 1)
	}

	r := w.resumes(t, crashTask{})
	switch {
	case at.known && at.state == journal.Pending:
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, r)
	default:
		require.Zero(t, r, "nothing is pending")
	}
	if !at.known {
		require.Empty(t, w.server.Effects())
		w.lives(t, crashTask{Do: []string{"pay"}, Orders: []string{"second card: " + order}}, "end")
	}
	require.Empty(t, w.judge(t, []string{order}, crashKeyWindow, true))
	done, _ := w.entry(t, order)
	require.Equal(t, nth, done.Generation)
	if at.known {
		require.Equal(t, crashed.Key, done.Key)
	}

	var sends []fakeserver.Send // of the generation in which it crashed
	for _, s := range w.server.Sends(fakeserver.Filter{Key: done.Key}) {
		require.NotEmpty(t, s.BodySHA256)
		require.Equal(t, w.server.Effects()[0].Key, s.Key)
		sends = append(sends, s)
	}
	want := 1
	if at.sent && at.state == journal.Pending {
		want = 2
	}
	require.Len(t, sends, want)
	require.Equal(t, sends[0].BodySHA256, sends[len(sends)-1].BodySHA256)

	require.Zero(t, w.resumes(t, crashTask{}), "and it is not sent again")
	require.Len(t, w.server.Sends(fakeserver.Filter{Key: done.Key}), want)
}

func TestCrashDuringASweep(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for _, step := range []string{"row", "commit"} {
		for _, nth := range []int{1, 2, 30, 300} {
			if step == "commit" && nth > 2 {
				continue // a sweep of this size has no more transactions
			}
			g.run(t, fmt.Sprintf("C71 P6 at %s %d", step, nth), func(t *testing.T) {
				crashInSweep(t, step, nth)
			})
		}
	}
}

// crashInSweep lets a process die in a sweep of many finished entries, while one
// that must not be touched is pending.
func crashInSweep(t *testing.T, step string, nth int) {
	w := newCrashWorld(t)
	w.dies(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-1"}, Die: "before finish"})
	w.dies(t, crashTask{Do: []string{"fill", "sweep"}, Die: step + " of a sweep", Nth: nth})
	before, known := w.entry(t, "order-1")
	require.True(t, known)
	require.Equal(t, journal.Pending, before.State)

	require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, w.resumes(t, crashTask{}))
	require.Empty(t, w.judge(t, []string{"order-1"}, crashKeyWindow, true))
	require.Equal(t, []string{before.Key}, w.keysOf("order-1"))
	require.Len(t, w.server.Sends(), 2)
	w.lives(t, crashTask{Do: []string{"sweep"}}, "end")
	_, known = w.entry(t, "filled-1")
	require.False(t, known, "the next sweep does what is left")
}

func TestCrashWhileAJournalIsMade(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for _, at := range []struct {
		step string
		nth  int
	}{
		{"file .secret.new-*", 1}, {"file .secret", 1}, {"file .new-*", 1}, {"file .new-*-wal", 1}, {"file -wal", 1}, {"file ", 1},
		{"connection", 1}, {"connection", 2}, {"connection", 3}, {"commit", 1},
	} {
		g.run(t, fmt.Sprintf("C71 P6 at %s %d", at.step, at.nth), func(t *testing.T) {
			crashInCreation(t, at.step, at.nth)
		})
	}
}

// crashInCreation lets a process die while it makes a journal. The next one
// makes it or goes on with it, and so does the one after.
func crashInCreation(t *testing.T, step string, nth int) {
	w := newCrashWorld(t)
	for n := 1; !w.mayDie(t, crashTask{Die: step, Nth: nth}); n++ {
		// A file that is there for a moment only may be overlooked.
		require.True(t, strings.HasPrefix(step, "file ") && n < 500, "step %q was not reached", step)
		w = newCrashWorld(t)
	}
	require.Zero(t, w.resumes(t, crashTask{}))
	w.dies(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-1"}, Die: "before finish"})
	require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, w.resumes(t, crashTask{}))
	require.Empty(t, w.judge(t, []string{"order-1"}, crashKeyWindow, true))
	require.Len(t, w.server.Sends(), 2)
}

func TestCrashWhileAJournalIsOpened(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for _, nth := range []int{1, 2} {
		g.run(t, fmt.Sprintf("C71 P6 at connection %d", nth), func(t *testing.T) {
			crashInOpening(t, "connection", nth)
		})
	}
}

// crashInOpening lets a process die while it opens a journal whose log is that
// of a crash.
func crashInOpening(t *testing.T, step string, nth int) {
	w := newCrashWorld(t)
	w.dies(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-1"}, Die: "before finish"})
	before, _ := w.entry(t, "order-1")
	w.dies(t, crashTask{Die: step, Nth: nth})
	after, _ := w.entry(t, "order-1")
	require.Equal(t, before, after)
	require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, w.resumes(t, crashTask{}))
	require.Empty(t, w.judge(t, []string{"order-1"}, crashKeyWindow, true))
	require.Equal(t, []string{before.Key}, w.keysOf("order-1"))
	require.Len(t, w.server.Sends(), 2)
}
