package journal

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"
)

// Memory is a Journal in the memory of one process: for tests, and for
// de-duplication where a restart may forget. The zero value is ready and safe
// for concurrent use; it must not be copied, and its fields must not change
// after first use. Of each operation it keeps about 700 bytes, finished ones
// too until a Sweep deletes them.
type Memory struct {
	// Lease is how long a claim holds unless renewed. 0: 30 s; the most is 1 h.
	Lease time.Duration
	// Max is the most entries that are kept; one more is ErrFull, unless
	// expired deliveries and old tombstones make room. Nothing else is ever
	// evicted. 0: 1,048,576.
	Max int

	once  sync.Once // fills rules
	rules *Rules    // behind a pointer, so that %+v of a Memory does not print the secret
	err   error     // of the random source

	mu      sync.Mutex // guards what follows
	entries map[Operation]*Entry
	tidy    time.Time // when a full store may be swept again
}

const defaultMax = 1 << 20

func (m *Memory) ready() error {
	m.once.Do(func() {
		m.rules = &Rules{Owner: "memory", Lease: m.Lease}
		m.rules.Secret, m.err = NewSecret()
		if m.Lease < 0 || m.Lease > LongestLease {
			m.err = fmt.Errorf("%w: Memory.Lease is %v; it must be 0 (30 s) to %v", ErrInvalid, m.Lease, LongestLease)
		}
		if m.Max < 0 {
			m.err = fmt.Errorf("%w: Memory.Max is %d; the least is 0 (%d)", ErrInvalid, m.Max, defaultMax)
		}
		m.entries = make(map[Operation]*Entry)
	})
	return m.err
}

// change lets f replace an entry, which is nil where there is none.
func (m *Memory) change(ctx context.Context, op Operation, f func(old *Entry, now time.Time) (stored, returned Entry, write bool, err error)) (Entry, error) {
	if err := m.ready(); err != nil {
		return Entry{}, err
	}
	if err := context.Cause(ctx); err != nil {
		return Entry{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	old := m.entries[op]
	var given *Entry
	if old != nil {
		c := old.clone()
		given = &c
	}
	stored, returned, write, err := f(given, now)
	if write && old == nil && !m.room(now) {
		return Entry{}, fmt.Errorf("%w: %d entries are the most", ErrFull, m.max())
	}
	if write {
		c := stored.clone()
		m.entries[op] = &c
	}
	return returned.clone(), err
}

func (m *Memory) max() int {
	if m.Max == 0 {
		return defaultMax
	}
	return m.Max
}

// room reports whether one more entry fits. A store that is full is searched
// for what may go, for a twentieth of the time at most.
func (m *Memory) room(now time.Time) bool {
	if len(m.entries) < m.max() {
		return true
	}
	if !now.Before(m.tidy) {
		m.sweep(0, now)
		m.tidy = time.Now().Add(max(time.Second, 20*time.Since(now)))
	}
	return len(m.entries) < m.max()
}

// Begin implements [Journal].
func (m *Memory) Begin(ctx context.Context, in Intent) (Entry, error) {
	if err := in.Check(); err != nil {
		return Entry{}, err
	}
	return m.change(ctx, in.Operation, func(old *Entry, now time.Time) (Entry, Entry, bool, error) {
		return m.rules.Begin(old, in, now)
	})
}

// Renew implements [Journal].
func (m *Memory) Renew(ctx context.Context, e Entry, n Note) (Entry, error) {
	return m.change(ctx, e.Operation, func(old *Entry, now time.Time) (Entry, Entry, bool, error) {
		out, err := m.rules.Renew(old, e, n, now)
		return out, out, err == nil, err
	})
}

// Finish implements [Journal].
func (m *Memory) Finish(ctx context.Context, e Entry, s State, n Note) (Entry, error) {
	return m.change(ctx, e.Operation, func(old *Entry, now time.Time) (Entry, Entry, bool, error) {
		out, write, err := m.rules.Finish(old, e, s, n, now)
		return out, out, write, err
	})
}

// Release implements [Journal].
func (m *Memory) Release(ctx context.Context, e Entry, n Note) (Entry, error) {
	return m.change(ctx, e.Operation, func(old *Entry, _ time.Time) (Entry, Entry, bool, error) {
		out, err := m.rules.Release(old, e, n)
		return out, out, err == nil, err
	})
}

// Decide implements [Journal].
func (m *Memory) Decide(ctx context.Context, op Operation, d Decision) (Entry, error) {
	return m.change(ctx, op, func(old *Entry, now time.Time) (Entry, Entry, bool, error) {
		out, err := m.rules.Decide(old, d, now)
		return out, out, err == nil, err
	})
}

// Get implements [Journal].
func (m *Memory) Get(ctx context.Context, op Operation) (Entry, error) {
	return m.change(ctx, op, func(old *Entry, _ time.Time) (Entry, Entry, bool, error) {
		if old == nil {
			return Entry{}, Entry{}, false, ErrNotFound
		}
		return *old, *old, false, nil
	})
}

// Pending implements [Journal]. It yields what was pending when it began.
func (m *Memory) Pending(ctx context.Context) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		if err := m.ready(); err != nil {
			yield(Entry{}, err)
			return
		}
		m.mu.Lock()
		// Entries are replaced, never changed: these stay as they are.
		var all []*Entry
		for _, e := range m.entries {
			if e.State == Pending && e.Expires.IsZero() {
				all = append(all, e)
			}
		}
		m.mu.Unlock()
		slices.SortFunc(all, func(a, b *Entry) int {
			return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Scope, b.Scope), strings.Compare(a.Name, b.Name), strings.Compare(a.ID, b.ID))
		})
		for _, e := range all {
			if err := context.Cause(ctx); err != nil {
				yield(Entry{}, err)
				return
			}
			if !yield(e.clone(), nil) {
				return
			}
		}
	}
}

// Sweep implements [Journal].
func (m *Memory) Sweep(ctx context.Context, keep time.Duration) (Swept, error) {
	if err := m.ready(); err != nil {
		return Swept{}, err
	}
	if err := context.Cause(ctx); err != nil {
		return Swept{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sweep(keep, time.Now()), nil
}

func (m *Memory) sweep(keep time.Duration, now time.Time) Swept {
	var s Swept
	for op, e := range m.entries {
		switch left, write, remove := m.rules.Sweep(*e, keep, now); {
		case remove:
			delete(m.entries, op)
			s.Deleted++
		case write:
			kept := left // so that only what is written moves to the heap
			m.entries[op] = &kept
			s.Emptied++
		}
	}
	return s
}

// clone shares nothing with e.
func (e Entry) clone() Entry {
	e.Fingerprint, e.Request, e.Answer = slices.Clone(e.Fingerprint), slices.Clone(e.Request), slices.Clone(e.Answer)
	return e
}
