//go:build unix

package sqljournal_test

import (
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

const (
	shortLease = 200 * time.Millisecond // that of a crashTask which says nothing
	// liveLease is that of a process which has to stay alive for the others: a busy
	// machine may delay a renewal by two thirds of it.
	liveLease = 6 * time.Second
)

// holdP makes the server keep the first send of order-p, which must be without a
// body, until release is called.
func (w *crashWorld) holdP(t *testing.T) (release func()) {
	held := make(chan struct{})
	release = sync.OnceFunc(func() { close(held) })
	t.Cleanup(release)
	w.server.Handle("POST /v1/empty", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("reference") == "order-p" {
			<-held
		}
		rw.WriteHeader(http.StatusCreated)
	}))
	return release
}

func TestC74_AnotherProcessLeavesAloneWhatALiveOneHasClaimed(t *testing.T) {
	t.Parallel()
	w := newCrashWorld(t)
	release := w.holdP(t)
	p := w.start(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-p"}, Bodiless: true, Lease: liveLease, Limit: time.Minute})
	eventually(t, "P sends", func() bool { return len(w.server.Sends()) == 1 })

	resumed := w.lives(t, crashTask{Do: []string{"resume", "pay", "resume"}, Orders: []string{"order-q"}, Bodiless: true}, "resumed")
	require.Len(t, resumed, 2)
	require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, resumed[0].Resumed, "Q waited for the lease, and P renewed it")
	require.Len(t, w.server.Effects(fakeserver.Filter{Reference: "order-q"}), 1, "Q works")
	require.Len(t, w.server.Sends(fakeserver.Filter{Reference: "order-p"}), 1, "P's alone")

	release()
	p.says("end")
	require.Empty(t, w.judge(t, []string{"order-p", "order-q"}, crashKeyWindow, true))
	require.Len(t, w.server.Sends(fakeserver.Filter{Reference: "order-p"}), 1)
}

func TestC74_WhatAKilledProcessHasClaimedIsTakenOverAfterItsLease(t *testing.T) {
	t.Parallel()
	w := newCrashWorld(t)
	release := w.holdP(t)
	p := w.start(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-p"}, Bodiless: true, Lease: time.Second, Limit: time.Minute})
	eventually(t, "P sends", func() bool { return len(w.server.Sends()) == 1 })
	begun, _ := w.entry(t, "order-p")
	eventually(t, "P renews its claim", func() bool {
		now, _ := w.entry(t, "order-p")
		return now.Lease.After(begun.Lease)
	})
	p.kill()
	claimed, _ := w.entry(t, "order-p")
	require.NotEmpty(t, claimed.Owner)
	release()

	require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, w.resumes(t, crashTask{Bodiless: true})) // R, at once
	require.Empty(t, w.judge(t, []string{"order-p"}, crashKeyWindow, true))
	sends := w.server.Sends()
	require.GreaterOrEqual(t, len(sends), 2)
	require.False(t, sends[1].At.Before(claimed.Lease), "R sent %v before P's lease ended", claimed.Lease.Sub(sends[1].At))
	require.Equal(t, []string{claimed.Key}, w.keysOf("order-p"))
	done, _ := w.entry(t, "order-p")
	require.Equal(t, claimed.Fence+1, done.Fence)
}

// stoppedLease is that of a process that will be stopped.
const stoppedLease = 600 * time.Millisecond

// TestC74_AProcessThatWasStoppedCannotOverwrite: P is stopped for longer than
// its lease, R carries its operation to the end, and P wakes.
func TestC74_AProcessThatWasStoppedCannotOverwrite(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for _, c := range []struct {
		name, step string
		lost       bool // the answer to P's send
		claim      idem.Outcome
		sends      int // by both
	}{
		{"with its answer", "answered", false, idem.Executed, 2},
		{"before its finish", "before finish", false, idem.Executed, 2},
		{"before its release", "waiting", true, idem.Unknown, 2},
		{"before its first send", "attempt", false, idem.Executed, 2},
		{"before it knows that it has the claim", "begun", false, idem.Unknown, 1},
	} {
		g.run(t, c.name, func(t *testing.T) {
			w := newCrashWorld(t)
			if c.lost {
				require.NoError(t, w.server.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
			}
			p := w.start(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-p"}, Stop: c.step, Lease: stoppedLease})
			p.says("step")
			w.leaseEnds(t, "order-p")
			require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, w.resumes(t, crashTask{}))
			taken, _ := w.entry(t, "order-p")
			require.Equal(t, journal.Done, taken.State)

			p.signal(syscall.SIGCONT)
			claim := p.says("claim")
			p.says("end")
			require.Equal(t, c.claim, claim.Outcome, claim.Text)
			after, _ := w.entry(t, "order-p")
			require.Equal(t, taken, after, "what R wrote stands")
			require.Len(t, w.server.Sends(), c.sends)
			require.Empty(t, w.judge(t, []string{"order-p"}, crashKeyWindow, true))
			require.Equal(t, []string{taken.Key}, w.keysOf("order-p"))
		})
	}
}

func TestC74_ASignalFromOutsideStopsAProcessBeyondItsLease(t *testing.T) {
	t.Parallel()
	w := newCrashWorld(t)
	release := w.holdP(t)
	p := w.start(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-p"}, Bodiless: true, Lease: stoppedLease, Limit: time.Minute})
	eventually(t, "P sends", func() bool { return len(w.server.Sends()) == 1 })
	for stops := 1; ; stops++ {
		require.LessOrEqual(t, stops, 50, "it was always within a transaction")
		p.signal(syscall.SIGSTOP)
		if len(w.lives(t, crashTask{Busy: 200 * time.Millisecond}, "open")) > 0 {
			break
		}
		p.signal(syscall.SIGCONT) // it was within a transaction, a renewal, and that is the next test
	}
	release()
	w.ended(t, "", 1)
	w.leaseEnds(t, "order-p")
	require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, w.resumes(t, crashTask{Bodiless: true}))
	taken, _ := w.entry(t, "order-p")
	require.Equal(t, journal.Done, taken.State)
	p.signal(syscall.SIGCONT)
	p.says("end")
	after, _ := w.entry(t, "order-p")
	require.Equal(t, taken, after)
	require.Empty(t, w.judge(t, []string{"order-p"}, crashKeyWindow, true))
}

func TestC74_AProcessStoppedWithinATransactionMakesTheOthersWait(t *testing.T) {
	t.Parallel()
	w := newCrashWorld(t)
	w.lives(t, crashTask{}, "end") // the journal exists
	p := w.start(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-p"}, Stop: "row"})
	p.says("step")
	q := crashTask{Do: []string{"resume", "pay"}, Orders: []string{"order-q"}, Busy: 100 * time.Millisecond}
	busy := w.start(t, q)
	require.True(t, busy.says("cannot open").Busy)
	busy.end()
	require.Empty(t, w.server.Sends(), "no key, no send")

	p.kill() // its locks end with it
	q.Busy = 0
	w.lives(t, q, "end")
	w.lives(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-p"}}, "end")
	require.Empty(t, w.judge(t, []string{"order-p", "order-q"}, crashKeyWindow, true))
}
