package fakeserver

import (
	"errors"
	"fmt"
	"strconv"
)

// armed is a fault in a server's list.
type armed struct {
	Fault
	text string
	from float64 // its slice of the draw is [from, from+Rate)
	hits int
}

func arm(f Fault) *armed {
	f = f.placed()
	return &armed{Fault: f, text: f.String()}
}

// script is what happens to the next sends, one step each.
type script struct {
	steps []*armed // nil = no fault
	next  int
}

// Inject adds faults behind those already there. For a send the first that matches wins. Nothing is added if one is
// invalid; the error names its field.
func (s *Server) Inject(faults ...Fault) error {
	added := make([]*armed, 0, len(faults))
	for i, f := range faults {
		if err := f.Validate(); err != nil {
			return numbered(i, err)
		}
		added = append(added, arm(f))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := append(s.faults[:len(s.faults):len(s.faults)], added...)
	if err := share(all); err != nil {
		return err
	}
	s.faults = all
	return nil
}

// share gives every rated fault its slice of the draw that it has in common with the faults of equal seed and filters.
func share(faults []*armed) error {
	type draw struct {
		seed     int64
		key      string
		send     int
		endpoint string
	}
	taken := map[draw]float64{}
	for _, f := range faults {
		if f.always() {
			continue
		}
		d := draw{f.Seed, f.Key, f.Send, f.Endpoint}
		f.from = taken[d]
		taken[d] += f.Rate
		if taken[d] > 1+1e-9 {
			return errors.New("fakeserver: fault: rate: the faults of seed " + strconv.FormatInt(f.Seed, 10) +
				" with these filters add up to more than 1")
		}
	}
	return nil
}

// Script lays down what happens to the next sends of a key, counted from this call: the first fault hits the first of
// them, and so on; the zero Fault lets its send pass untouched, by injected faults too. The empty key means any send,
// counted over all; a key's own script goes first. When a script is used up, injected faults apply again. A second
// script for a key replaces the first. Filters (Key, Send, Endpoint, Times, Rate) have no place in a script and are refused.
func (s *Server) Script(key string, faults ...Fault) error {
	steps := make([]*armed, len(faults))
	for i, f := range faults {
		if f == (Fault{}) {
			continue
		}
		err := f.Validate()
		for name, set := range map[string]bool{
			"key": f.Key != "", "send": f.Send != 0, "endpoint": f.Endpoint != "", "times": f.Times != 0, "rate": !f.always(),
		} {
			if set && err == nil {
				err = faultError(name, "has no place in a script")
			}
		}
		if err != nil {
			return numbered(i, err)
		}
		steps[i] = arm(f)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scripts[key] = &script{steps: steps}
	return nil
}

func numbered(i int, err error) error { return fmt.Errorf("%w (number %d)", err, i+1) }

// ClearFaults removes every injected fault and every script, also those of deliveries. What already happens to a send or a
// delivery goes on.
func (s *Server) ClearFaults() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = nil
	clear(s.scripts)
	s.events.faults = nil
	clear(s.events.scripts)
}

// choose finds the one fault of a send; nil = none. s.mu is held.
func (s *Server) choose(n *Send) *armed {
	common, scripted := s.step("")
	if n.Key != "" {
		if own, ok := s.step(n.Key); ok {
			return own
		}
	}
	if scripted {
		return common
	}
	for _, f := range s.faults {
		if f.hitsSend(n) {
			f.hits++
			return f
		}
	}
	return nil
}

func (s *Server) step(key string) (f *armed, scripted bool) {
	sc := s.scripts[key]
	if sc == nil || sc.next == len(sc.steps) {
		return nil, false
	}
	sc.next++
	return sc.steps[sc.next-1], true
}

func (f *armed) hitsSend(n *Send) bool {
	if f.Key != "" && f.Key != n.Key || f.Send != 0 && f.Send != n.KeySend ||
		f.Endpoint != "" && f.Endpoint != n.Endpoint || f.Times != 0 && f.hits >= f.Times {
		return false
	}
	if f.always() {
		return true
	}
	what := n.Key
	if what == "" {
		what = n.Method + " " + n.Path
	}
	u := drawn(f.Seed, what, n.KeySend)
	return f.from <= u && u < f.from+f.Rate
}

func (f Fault) always() bool { return f.Rate == 0 || f.Rate == 1 }

// drawn is a number in [0, 1) that depends on its arguments only: FNV-1a, and the finish of splitmix64 to spread it.
func drawn(seed int64, what string, send int) float64 {
	h := uint64(14695981039346656037)
	mix := func(b byte) { h = (h ^ uint64(b)) * 1099511628211 }
	for i := 0; i < 64; i += 8 {
		mix(byte(seed >> i))
		mix(byte(send >> i))
	}
	for i := range len(what) {
		mix(what[i])
	}
	h ^= h >> 30
	h *= 0xbf58476d1ce4e5b9
	h ^= h >> 27
	h *= 0x94d049bb133111eb
	h ^= h >> 31
	return float64(h>>11) / (1 << 53)
}
