package webhook_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

// storm is many events that are delivered by an impatient sender to 4 processes
// which fail, panic, die and fall asleep. An effect is committed with the mark of
// its event, as a database would.
type storm struct {
	memory journal.Memory
	copies sync.WaitGroup

	mu        sync.Mutex // guards what follows
	random    *rand.Rand
	processes [4]*webhook.Handler
	effects   map[string]int
	at        map[string]time.Time
	awake     map[string]int // handlings of an event by processes that are neither dead nor asleep
	findings  []string
	counts    map[string]int
}

func (s *storm) chance(percent int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.random.IntN(100) < percent
}

func (s *storm) wait(most time.Duration) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Duration(s.random.Int64N(int64(most)))
}

func (s *storm) count(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[what]++
}

// begin counts a handling that is awake, and finds it if it is not alone.
func (s *storm) begin(id string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awake[id] += n
	if s.awake[id] > 1 {
		s.findings = append(s.findings, id+" was handled twice at the same time")
	}
}

// boot starts a process in a place where none is, or none any more.
func (s *storm) boot(place int) {
	p := &process{Journal: &s.memory}
	h := &webhook.Handler{
		Journal: p, Source: "shop", Timeout: time.Minute,
		Verify: func(h http.Header, _ []byte) (string, error) { return h.Get("Id"), nil },
		Next:   http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.handle(w, r, place, p) }),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes[place] = h
}

func (s *storm) handle(w http.ResponseWriter, r *http.Request, place int, p *process) {
	e, _ := webhook.EntryOf(r.Context())
	s.begin(e.ID, 1)
	awake := true
	rest := func() {
		if awake {
			s.begin(e.ID, -1)
			awake = false
		}
	}
	defer rest()
	time.Sleep(s.wait(2 * time.Second)) // the work
	switch {
	case p.gone(false):
		panic(http.ErrAbortHandler)
	case s.chance(3):
		s.count("failed")
		w.WriteHeader(http.StatusInternalServerError)
		return
	case s.chance(3):
		s.count("panicked")
		panic(http.ErrAbortHandler)
	case s.chance(1):
		s.count("died")
		p.die()
		s.boot(place)
		panic(http.ErrAbortHandler)
	case s.chance(4):
		s.count("slept")
		rest()
		s.copies.Go(func() { // so that somebody takes it over meanwhile
			time.Sleep(45 * time.Second)
			s.deliver(e.ID)
		})
		p.sleep(2 * time.Minute) // beyond the lease of everything that it handles
	}
	p.mu.Lock() // a transaction: nobody dies in the middle of it
	defer p.mu.Unlock()
	if p.dead {
		panic(http.ErrAbortHandler)
	}
	if _, err := s.memory.Finish(context.Background(), e, journal.Done, journal.Note{}); err != nil {
		s.count("fenced off")
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.effects[e.ID]++; s.effects[e.ID] == 1 {
		s.at[e.ID] = time.Now()
	}
}

// deliver delivers once, to any of the processes.
func (s *storm) deliver(id string) (status int, after time.Duration) {
	s.mu.Lock()
	h := s.processes[s.random.IntN(len(s.processes))]
	s.counts["deliveries"]++
	s.mu.Unlock()
	defer func() {
		if p := recover(); p != nil {
			status, after = 0, time.Second // the connection broke
		}
	}()
	r, err := http.NewRequestWithContext(context.Background(), http.MethodPost, "http://shop.test/hooks", http.NoBody)
	if err != nil {
		panic(err)
	}
	r.Header.Set("Id", id)
	w := &recorder{header: http.Header{}}
	h.ServeHTTP(w, r)
	if w.status == http.StatusOK {
		s.mu.Lock()
		if s.effects[id] == 0 {
			s.findings = append(s.findings, id+" was answered with 200 before it was done")
		}
		s.mu.Unlock()
		return w.status, 0
	}
	seconds, _ := strconv.Atoi(w.header.Get("Retry-After"))
	return w.status, max(time.Duration(seconds)*time.Second, time.Second)
}

// tell delivers until the sender hears 200; 3 of 10 deliveries are one too many.
func (s *storm) tell(id string) {
	for {
		for s.chance(30) {
			s.count("duplicates")
			early := s.chance(50)
			s.copies.Go(func() {
				if !early {
					time.Sleep(s.wait(time.Minute))
				}
				s.deliver(id)
			})
		}
		status, after := s.deliver(id)
		if status == http.StatusOK && !s.chance(5) { // 1 of 20 answers is lost
			return
		}
		time.Sleep(after)
	}
}

func TestAStormOfDeliveriesWithCrashesHandlesEachEventOnce(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = time.Now().UnixNano()
	}
	t.Log("seed", seed)
	s := &storm{
		random: rand.New(rand.NewPCG(uint64(seed), 0)), effects: map[string]int{}, at: map[string]time.Time{},
		awake: map[string]int{}, counts: map[string]int{},
	}
	events := 0
	start := time.Now()
	synctest.Test(t, func(t *testing.T) {
		for place := range s.processes {
			s.boot(place)
		}
		var workers sync.WaitGroup
		for range 50 {
			workers.Go(func() {
				for {
					s.mu.Lock()
					if s.counts["deliveries"] >= *deliveriesFlag {
						s.mu.Unlock()
						return
					}
					events++
					id := fmt.Sprintf("msg_%d", events)
					s.mu.Unlock()
					s.tell(id)
				}
			})
		}
		workers.Wait()
		s.copies.Wait()
	})
	require.Empty(t, s.findings)
	require.Len(t, s.effects, events)
	for id, n := range s.effects {
		if n != 1 {
			require.Equal(t, 1, n, id)
		}
	}
	for _, what := range []string{"failed", "panicked", "died", "slept", "fenced off", "duplicates"} {
		require.NotZero(t, s.counts[what], "%s never happened, so it is not tested", what)
	}
	t.Logf("%d events, one effect each, %v in %v", events, s.counts, time.Since(start).Round(time.Millisecond))
}
