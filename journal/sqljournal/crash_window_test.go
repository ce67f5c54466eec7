//go:build unix

package sqljournal_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// The server forgets a key after keyMemory, and a send later than that is a
// second effect. The client must not send later than windowMargin before it.
const (
	keyMemory    = 5 * time.Second
	windowMargin = 2 * time.Second // one attempt, and longer than a busy machine delays one
)

func forgetfulWorld(t *testing.T, faults ...fakeserver.Fault) *crashWorld {
	w := newCrashWorld(t, faults...)
	w.server.Apply(fakeserver.Settings{ForgetHeaders: true, InProgressRetryAfter: "-", Retention: keyMemory})
	w.server.Handle("POST /v1/empty", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }))
	return w
}

// lateSends is how much later than the first send of its key each send came
// that could have had an effect: one whose body did not arrive cannot. The keys of
// except do not count.
func (w *crashWorld) lateSends(after time.Duration, except map[string]bool) (late []time.Duration) {
	first := map[string]time.Time{}
	for _, s := range w.server.Sends() {
		if at, ok := first[s.Key]; !ok {
			first[s.Key] = s.At
		} else if d := s.At.Sub(at); d > after && !except[s.Key] && s.BodyLen == max(s.ContentLength, 0) {
			late = append(late, d)
		}
	}
	return late
}

// TestCrashAStopBetweenTheLastCheckAndTheWriteSendsNothingLate: the process is
// stopped at a step of its second attempt, and wakes when the server has
// forgotten the key.
func TestCrashAStopBetweenTheLastCheckAndTheWriteSendsNothingLate(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for _, bodiless := range []bool{false, true} {
		steps := []string{"waiting", "attempt", "prepare", "connected", "headers in the buffer"}
		if bodiless {
			steps = steps[:2] // later there is nothing in net/http that would stop a request without a body
		}
		for _, step := range steps {
			g.run(t, fmt.Sprintf("at %q, without a body: %v", step, bodiless), func(t *testing.T) {
				w := forgetfulWorld(t, fakeserver.Fault{Kind: fakeserver.Close, Point: fakeserver.AfterEffect})
				nth := 2
				if step == "waiting" {
					nth = 1
				}
				p := w.start(t, crashTask{
					Do: []string{"pay", "pending"}, Orders: []string{"order-1"}, Bodiless: bodiless, Stop: step, Nth: nth,
					Window: keyMemory, Limit: windowMargin, Lease: time.Hour,
				})
				p.says("step")
				time.Sleep(keyMemory) // the server forgets the key
				p.signal(syscall.SIGCONT)
				claim := p.says("claim")
				listed := p.says("pending")
				p.says("end")
				require.Empty(t, w.lateSends(keyMemory-windowMargin, nil))
				require.Len(t, w.server.Effects(), 1)
				require.Equal(t, idem.Unknown, claim.Outcome)
				require.Equal(t, 1, listed.Expired, "a person sees it")
			})
		}
	}
}

func TestCrashRandomPausesNeverSendAfterTheKeyWindow(t *testing.T) {
	t.Parallel()
	seed := cmp.Or(*crashDraw, rand.Uint64N(1e6)+1)
	t.Logf("-rounds %d -seed %d", *crashRounds, seed)
	draw := rand.New(rand.NewPCG(seed, 0))
	w := forgetfulWorld(t,
		fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Rate: 0.45, Seed: 1},
		fakeserver.Fault{Kind: fakeserver.Close, Point: fakeserver.BeforeEffect, Rate: 0.2, Seed: 1},
		fakeserver.Fault{Kind: fakeserver.Status, Point: fakeserver.AfterEffect, Status: 503, Rate: 0.2, Seed: 1},
		fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect, Rate: 0.1, Seed: 1})
	pauses := 20 + *crashRounds/10
	p := w.start(t, crashTask{
		Do: []string{"pay"}, Many: 50 * pauses, Workers: 72, Window: keyMemory, Limit: windowMargin, Lease: time.Hour,
	})
	p.says("open")
	for n := range pauses {
		time.Sleep(time.Duration(draw.Int64N(int64(120 * time.Millisecond)))) // it works for a while
		p.signal(syscall.SIGSTOP)
		pause := time.Duration(draw.Int64N(int64(60 * time.Millisecond)))
		if n%8 == 3 {
			pause = time.Duration(draw.Int64N(int64(5 * keyMemory / 4))) // now and then beyond the margin, or the window
		}
		time.Sleep(pause) // while the server's memory fades
		p.signal(syscall.SIGCONT)
	}
	for ended := 0; ended < 24; { // operations that came to the end of their key's window
		if p.says("claim").Outcome == idem.Unknown {
			ended++
		}
	}
	p.kill()
	keys, unknown := map[string]bool{}, 0
	for _, s := range w.server.Sends() {
		keys[s.Key] = true
	}
	for _, c := range w.claims {
		if c.Outcome == idem.Unknown {
			unknown++
		}
	}
	t.Logf("%d pauses, %d sends of %d keys, %d claims, %d of them unknown", pauses, len(w.server.Sends()), len(keys), len(w.claims), unknown)
	// A process that is stopped between the last look at the window and the write sends
	// late, and nobody can prevent it. It says so when it wakes.
	stopped := map[string]bool{}
	for _, r := range w.late {
		t.Logf("key %s: written %s after the last look at its window", r.Key, r.Text)
		stopped[r.Key] = true
	}
	require.LessOrEqual(t, len(stopped), len(keys)/2, "or this proves too little")
	// What was on its way at the end of the window may arrive a little later.
	require.Empty(t, w.lateSends(keyMemory-windowMargin/4, stopped))
	per := map[string]int{}
	for _, e := range w.server.Effects() {
		if stopped[e.Key] {
			continue
		}
		per[e.Reference]++
		require.Equal(t, 1, per[e.Reference], e.Reference)
	}
}
