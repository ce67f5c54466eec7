// Crash kills a shop again and again while it takes payments, and then compares
// what it claimed in all its lives with the server's ledger.
//
//	go run ./examples/crash
//	go run ./examples/crash -rounds 50 -seed 7
//	go run ./examples/crash -dir .        # keep the journal, to look at it
//
// The shop (shop.go, which is the part to read) is a process of its own with a
// journal in SQLite. Its parent, this file, runs the payment server and kills
// the shop with SIGKILL while payments are under way. The next life resumes what
// the last one left behind, with the same keys. What the shop claims comes through
// a pipe, so the parent knows what was acknowledged before each kill. You see the
// faults of the server, the story of the payment that went through most lives,
// and as the last line
//
//	operations=200 effects=200 doubled=0 lost=0 false_success=0 false_failure=0 unknown=0 kills=20 resumed=63
//
// The exit status is 1 if one of doubled to unknown is not 0, if not every round
// has killed, or if nothing had to be resumed.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/examples/internal/payrun"
	"github.com/idem-go/idem/fakeserver"
)

// Where the parent tells its child that it is one.
const (
	shopJournal = "IDEM_EXAMPLE_JOURNAL"
	shopServer  = "IDEM_EXAMPLE_SERVER"
)

func main() {
	if path := os.Getenv(shopJournal); path != "" {
		exit(shop(path, os.Getenv(shopServer), os.Stdin, os.Stdout))
	}
	var o options
	flag.IntVar(&o.rounds, "rounds", 20, "how often the shop is killed; each round brings 10 payments")
	flag.Int64Var(&o.seed, "seed", 1, "of the faults and of the moments of the kills")
	flag.StringVar(&o.dir, "dir", "", "folder that keeps the journal; empty: a temporary one")
	flag.Parse()
	exit(run(os.Stdout, o, payrun.Stdio()))
}

func exit(err error) {
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "crash:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

type options struct {
	rounds int
	seed   int64
	dir    string
}

const perRound = 10 // payments

func run(w io.Writer, o options, progress payrun.Progress) error {
	if o.rounds < 1 {
		return errors.New("-rounds: must be at least 1")
	}
	dir, err := os.MkdirTemp(o.dir, "idem-crash-")
	if err != nil {
		return fmt.Errorf("-dir: %w", err)
	}
	if o.dir == "" {
		defer func() { _ = os.RemoveAll(dir) }()
	}
	server, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer server.Close()
	server.Apply(fakeserver.Settings{ForgetHeaders: true, InProgressRetryAfter: "-"})
	if err := server.Inject(faults(o.seed)...); err != nil {
		return err
	}
	s := &street{
		server: server, journal: filepath.Join(dir, "idem.db"),
		random: rand.New(rand.NewPCG(uint64(o.seed), 0)), claims: map[string][]Claim{},
	}
	server.Watch(s.hold)
	began := time.Now()
	stop := follow(progress, func() string {
		return fmt.Sprintf("%d of %d kills, %d of %d payments acknowledged, %d resumed, %.1fs",
			s.kills.Load(), o.rounds, s.acknowledged.Load(), o.rounds*perRound, s.resumed.Load(), time.Since(began).Seconds())
	})
	err = s.lives(o.rounds)
	stop()
	if err != nil {
		return err
	}
	took := time.Since(began)
	time.Sleep(100 * time.Millisecond) // for what the server still works on though its client is dead
	server.Close()

	r := s.result()
	_, _ = fmt.Fprintf(w, "%d payments, %d kills, seed %d, over loopback: %.1fs\n\n", len(s.orders), s.kills.Load(), o.seed, took.Seconds())
	r.ShowFaults(w)
	s.showEventful(w)
	if o.dir != "" {
		_, _ = fmt.Fprintf(w, "the journal is in %s\n\n", dir)
	}
	count := r.Count()
	_, _ = fmt.Fprintf(w, "%v kills=%d resumed=%d\n", count, s.kills.Load(), s.resumed.Load())
	switch {
	case !count.Right():
		return errors.New("the claims and the ledger differ")
	case s.kills.Load() != int64(o.rounds):
		return errors.New("not every round has killed")
	case s.resumed.Load() == 0:
		return errors.New("nothing had to be resumed")
	}
	return nil
}

// faults are those of the server: half of the sends get their answer at once, and
// the others make the moments longer in which a crash hurts.
func faults(seed int64) []fakeserver.Fault {
	return []fakeserver.Fault{
		{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Rate: 0.1, Seed: seed},
		{Kind: fakeserver.Status, Point: fakeserver.AfterEffect, Status: 503, Rate: 0.05, Seed: seed},
		{Kind: fakeserver.CutBody, Rate: 0.05, Seed: seed},
		{Kind: fakeserver.Close, Point: fakeserver.BeforeEffect, Rate: 0.05, Seed: seed},
		{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect, Rate: 0.02, Seed: seed},
		{Kind: fakeserver.Slow, Delay: 40 * time.Millisecond, Rate: 0.15, Seed: seed},
		{Kind: fakeserver.Late, Delay: 40 * time.Millisecond, Rate: 0.1, Seed: seed},
	}
}

// street is where the shop stands: the server, and what is known of the shop.
type street struct {
	server  *fakeserver.Server
	journal string
	random  *rand.Rand

	orders []string           // all payments so far
	claims map[string][]Claim // of each
	deaths []time.Time

	held atomic.Pointer[held] // nil: nothing

	kills, acknowledged, resumed atomic.Int64 // for the progress
}

// held is what the server keeps to itself in a life that ends with a kill.
type held struct {
	from int           // the number of a send: the answers from there on
	dead chan struct{} // closed when the shop is
}

// hold sees to it that something has to be resumed, however late the kill comes.
func (s *street) hold(send fakeserver.Send) {
	if h := s.held.Load(); h != nil && send.N >= h.from {
		<-h.dead
	}
}

// lives lets the shop live and die, and at last come to its end.
func (s *street) lives(rounds int) error {
	for range rounds {
		for range perRound {
			s.orders = append(s.orders, fmt.Sprintf("order-%04d/1", len(s.orders)+1))
		}
		if err := s.life(true); err != nil {
			return err
		}
	}
	for range payrun.MaxCalls { // what was not acknowledged is called again
		if err := s.life(false); err != nil || len(s.open()) == 0 {
			return err
		}
	}
	return nil
}

// open is the payments that were not acknowledged: a shop that was killed may
// have begun them, or not.
func (s *street) open() []string {
	return slices.DeleteFunc(slices.Clone(s.orders), s.paid)
}

func (s *street) paid(id string) bool {
	return slices.ContainsFunc(s.claims[id], func(c Claim) bool { return c.Outcome == idem.Executed })
}

// life starts the shop, gives it what is open, and kills it, or lets it end.
func (s *street) life(kill bool) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.Command(self)
	child.Env = append(os.Environ(), shopJournal+"="+s.journal, shopServer+"="+s.server.URL())
	child.Stderr = os.Stderr
	orders, err := child.StdinPipe()
	if err != nil {
		return err
	}
	claims, err := child.StdoutPipe()
	if err != nil {
		return err
	}
	target := len(s.server.Sends()) + 1 + s.random.IntN(perRound)
	if kill {
		h := &held{target, make(chan struct{})}
		s.held.Store(h)
		defer func() { s.held.Store(nil); close(h.dead) }()
	}
	if err := child.Start(); err != nil {
		return err
	}
	killed, ended := make(chan bool), make(chan struct{})
	go func() { killed <- kill && s.strike(child, target, ended) }()

	lines := bufio.NewScanner(claims)
	for lines.Scan() {
		var c Claim
		switch {
		case json.Unmarshal(lines.Bytes(), &c) != nil:
			// The last line of a process that was killed may be cut.
		case c.ID != "":
			s.heard(c)
		default: // it has resumed
			open := strings.Join(append(s.open(), ""), "\n")
			go func() {
				_, _ = io.WriteString(orders, open) // it may die meanwhile
				if !kill {
					_ = orders.Close()
				}
			}()
		}
	}
	close(ended)
	hit := <-killed
	err = child.Wait()
	if hit {
		s.kills.Add(1)
		s.deaths = append(s.deaths, time.Now())
		return nil
	}
	if err != nil {
		return fmt.Errorf("the shop failed: %w", err)
	}
	return nil
}

// strike kills the shop within an operation: a moment after some send, of a
// resume or of a call, has arrived at the server.
func (s *street) strike(child *exec.Cmd, target int, ended <-chan struct{}) bool {
	moment := time.Duration(s.random.Int64N(int64(20 * time.Millisecond)))
	for len(s.server.SendsAfter(target-1)) == 0 {
		select {
		case <-ended:
			return false
		case <-time.After(time.Millisecond):
		}
	}
	time.Sleep(moment) // the point of the exercise
	return child.Process.Kill() == nil
}

func (s *street) heard(c Claim) {
	if c.Outcome == idem.Executed && !s.paid(c.ID) {
		s.acknowledged.Add(1)
	}
	s.claims[c.ID] = append(s.claims[c.ID], c)
	if c.Resumed {
		s.resumed.Add(1) // twice, if the shop was killed between this claim and the journal's last write
	}
}

// result is what is counted.
func (s *street) result() *payrun.Run {
	r := &payrun.Run{Effects: s.server.Effects(), Sends: s.server.Sends()}
	for _, id := range s.orders {
		p, _ := find(id)
		r.Payments = append(r.Payments, p)
		var calls []payrun.Call
		for _, c := range s.claims[id] {
			calls = append(calls, payrun.Call{Began: c.Began, Ended: c.Ended, Claim: c.Outcome, Why: c.Why})
		}
		if calls == nil {
			calls = []payrun.Call{{}} // nothing was ever claimed: unknown
		}
		r.Calls = append(r.Calls, calls)
	}
	return r
}

// showEventful tells the story of the payment that was under way at most deaths.
func (s *street) showEventful(w io.Writer) {
	type event struct {
		at   time.Time
		what string
	}
	var story []event
	var id, key string
	most := -1
	for _, order := range s.orders {
		sends := s.server.Sends(fakeserver.Filter{Reference: order})
		if len(sends) == 0 {
			continue
		}
		var events []event
		for _, send := range sends {
			events = append(events, event{send.At, "a send arrives: " + heardOf(send)})
		}
		for _, c := range s.claims[order] {
			how := "called"
			if c.Resumed {
				how = "resumed"
			}
			events = append(events, event{c.Ended, fmt.Sprintf("the shop, which had %s it, claims: %v", how, c.Outcome)})
		}
		first, last := events[0].at, slices.MaxFunc(events, func(a, b event) int { return a.at.Compare(b.at) }).at
		deaths := 0
		for _, at := range s.deaths {
			if at.After(first) && at.Before(last) {
				events = append(events, event{at, "the shop is killed"})
				deaths++
			}
		}
		if deaths > most {
			most, id, key, story = deaths, order, sends[0].Key, events
		}
	}
	slices.SortStableFunc(story, func(a, b event) int { return a.at.Compare(b.at) })
	_, _ = fmt.Fprintf(w, "\nthe payment that went through most deaths: %s, key %s, effects: %d\n", id, key, len(s.server.Effects(fakeserver.Filter{Reference: id})))
	for _, e := range story {
		_, _ = fmt.Fprintf(w, "  %6v  %s\n", e.at.Sub(story[0].at).Round(time.Millisecond), e.what)
	}
	_, _ = fmt.Fprintln(w)
}

func heardOf(s fakeserver.Send) string {
	what := "a replay"
	if s.Effect > 0 {
		what = "the effect"
	} else if !s.Replayed {
		what = "no effect"
	}
	return what + ", fault: " + cmp.Or(payrun.FaultOf(s), "none")
}
