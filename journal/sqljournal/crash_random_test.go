//go:build unix

package sqljournal_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
)

// crashFaults make the moments long in which a crash hurts: answers are lost
// and effects are slow.
func crashFaults(seed int64) []fakeserver.Fault {
	const ms = time.Millisecond
	return []fakeserver.Fault{
		{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Rate: 0.15, Seed: seed},
		{Kind: fakeserver.Close, Point: fakeserver.BeforeEffect, Rate: 0.05, Seed: seed},
		{Kind: fakeserver.Status, Point: fakeserver.AfterEffect, Status: 503, Rate: 0.1, Seed: seed},
		{Kind: fakeserver.CutBody, Rate: 0.05, Seed: seed},
		{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect, Rate: 0.03, Seed: seed},
		{Kind: fakeserver.Slow, Delay: 30 * ms, Rate: 0.2, Seed: seed},
		{Kind: fakeserver.Late, Delay: 20 * ms, Rate: 0.1, Seed: seed},
		{Kind: fakeserver.Trickle, Delay: 2 * ms, Rate: 0.05, Seed: seed},
		{Kind: fakeserver.Duplicate, Point: fakeserver.BeforeEffect, Rate: 0.05, Seed: seed},
	}
}

func TestCrashAtRandomMomentsLosesNoKeyAndMakesNoSecondEffect(t *testing.T) {
	t.Parallel()
	seed := cmp.Or(*crashDraw, rand.Uint64N(1e6)+1)
	t.Logf("-rounds %d -seed %d", *crashRounds, seed)
	// Most of a round is waiting for leases, so several worlds go on at the same
	// time. A world ends after some rounds, so that reading it stays quick.
	const worlds, rounds = 4, 25
	var left, kills, resumed, operations, claims, sends atomic.Int64
	left.Store(int64(*crashRounds))
	var running sync.WaitGroup
	for lane := range worlds {
		running.Go(func() {
			for n := 0; left.Load() > 0 && !t.Failed(); n++ {
				draw := rand.New(rand.NewPCG(seed, uint64(n*worlds+lane)))
				t.Run(fmt.Sprintf("world %d.%d", lane, n), func(t *testing.T) {
					c := crashChapter{t: t, w: newCrashWorld(t, crashFaults(draw.Int64())...), draw: draw}
					for r := 0; r < rounds && left.Add(-1) >= 0; r++ {
						c.round()
						c.judge(false)
					}
					c.end()
					kills.Add(int64(c.kills))
					operations.Add(int64(len(c.orders)))
					for _, claim := range c.w.claims {
						claims.Add(1)
						if claim.Again {
							resumed.Add(1)
						}
					}
					sends.Add(int64(len(c.w.server.Sends())))
				})
			}
		})
	}
	running.Wait()
	t.Logf("%d kills, %d operations, %d sends, %d claims, %d of them by a resume", kills.Load(), operations.Load(), sends.Load(), claims.Load(), resumed.Load())
	require.EqualValues(t, *crashRounds, kills.Load())
	require.NotZero(t, resumed.Load(), "no crash left anything behind: it hit no interesting moment")
}

// crashChapter is some rounds with one server and one journal.
type crashChapter struct {
	t      *testing.T
	w      *crashWorld
	wrong  string // a broken build
	draw   *rand.Rand
	orders []string
	kills  int
}

// crashKeyWindow is longer than any of these tests takes, however slow the machine is.
const crashKeyWindow = time.Hour

// round kills one process at a random moment of its life.
func (c *crashChapter) round() {
	var fresh []string
	for range 6 {
		name := "order"
		if c.draw.IntN(3) == 0 {
			name = "declined"
		}
		fresh = append(fresh, fmt.Sprintf("%s-%d", name, len(c.orders)+len(fresh)+1))
	}
	c.orders = append(c.orders, fresh...)
	sent := len(c.w.server.Sends())
	p := c.w.start(c.t, crashTask{Do: []string{"work", "resume", "wait"}, Orders: fresh, Workers: 4, Window: crashKeyWindow, Limit: 250 * time.Millisecond, Wrong: c.wrong})
	switch c.draw.IntN(5) {
	case 0: // it may not even have opened its journal
		time.Sleep(time.Duration(c.draw.Int64N(int64(80 * time.Millisecond)))) // the moment is random
	case 1, 2:
		p.says("open")
		time.Sleep(time.Duration(c.draw.Int64N(int64(120 * time.Millisecond)))) // as above
	default: // a slow machine, too, has something under way
		eventually(c.t, "it sends", func() bool { return len(c.w.server.SendsAfter(sent)) > 0 })
		time.Sleep(time.Duration(c.draw.Int64N(int64(60 * time.Millisecond)))) // as above
	}
	p.kill()
	c.kills++
}

// end lets a last process finish what all the others left.
func (c *crashChapter) end() {
	var again []string
	for _, order := range c.orders {
		again = append(again, "second card: "+order)
	}
	for _, r := range c.w.lives(c.t, crashTask{Do: []string{"resume", "pay"}, Orders: again, Workers: 8, Window: crashKeyWindow, Limit: 600 * time.Millisecond}, "resumed") {
		require.Equal(c.t, r.Resumed.Seen, r.Resumed.Done+r.Resumed.Refused, r.Resumed)
	}
	c.judge(true)
}

func (c *crashChapter) judge(end bool) {
	c.t.Helper()
	if wrong := c.w.judge(c.t, c.orders, crashKeyWindow, end); len(wrong) > 0 {
		c.t.Fatalf("%s\n\n%s", strings.Join(wrong, "\n"), c.w.story())
	}
}

func TestCrashNegativeControlsAreCaughtAtRandomMoments(t *testing.T) {
	for wrong, caught := range map[string]string{
		"stores the key after the send": "at the server, and not in the journal",
		"makes a new key on a resume":   "doubled",
	} {
		t.Run(wrong, func(t *testing.T) {
			t.Parallel()
			draw := rand.New(rand.NewPCG(cmp.Or(*crashDraw, rand.Uint64N(1e6)+1), 0))
			c := crashChapter{t: t, w: newCrashWorld(t, crashFaults(draw.Int64())...), draw: draw, wrong: wrong}
			var found string
			for !strings.Contains(found, caught) {
				require.Less(t, c.kills, 100, "not caught; what was found: %s", found)
				c.round()
				found = strings.Join(c.w.judge(t, c.orders, crashKeyWindow, false), "\n")
			}
			t.Logf("after %d kills: %s", c.kills, found)
		})
	}
}
