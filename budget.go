package idem

import (
	"sync"
	"time"
)

// Budget is the allowance for retries: one bucket of tokens per origin
// (scheme, host, port). A retry takes Cost. An operation that ends with an
// answer that is not a failure gives back all that its retries took, and a
// success at the first attempt adds one token, so that independent faults
// cost nothing; an origin that answers nothing empties the bucket, and
// then at most one retry in ten seconds goes out as a probe. Waiting for an
// operation in progress takes nothing.
//
// The zero value is ready, and safe for concurrent use by many Transports.
// Do not copy it or change its fields after first use.
type Budget struct {
	// Capacity of a bucket, which starts full, in tokens. 0: 40; negative:
	// the budget is off and never refuses.
	Capacity int
	// Cost of a retry, in tokens. 0: 4. More than Capacity is ErrInvalid.
	Cost int

	mu      sync.Mutex // guards buckets
	buckets map[origin]bucket
}

// sharedBudget serves all Transports without a Budget of their own.
var sharedBudget Budget

const (
	defaultCapacity = 40
	defaultCost     = 4
	probeEvery      = 10 * time.Second
)

// origin is scheme, host and port.
type origin struct{ scheme, host string }

// bucket is the state of one origin.
type bucket struct {
	missing int       // tokens taken and not given back
	probed  time.Time // when the last free probe went out
}

func (b *Budget) check() error {
	switch capacity, cost := b.numbers(); {
	case b.Cost < 0:
		return invalid("Budget.Cost", "is %d; the least is 1 (0: %d)", b.Cost, defaultCost)
	case capacity >= 0 && cost > capacity:
		return invalid("Budget.Cost", "is %d; the most is Capacity, %d", cost, capacity)
	}
	return nil
}

func (b *Budget) numbers() (capacity, cost int) {
	capacity, cost = b.Capacity, b.Cost
	if capacity == 0 {
		capacity = defaultCapacity
	}
	if cost == 0 {
		cost = defaultCost
	}
	return capacity, cost
}

// take asks for one retry and says how many tokens it took: 0 for a probe.
func (b *Budget) take(o origin, now time.Time) (took int, ok bool) {
	capacity, cost := b.numbers()
	if capacity < 0 {
		return 0, true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	next, took, ok := b.buckets[o].take(capacity, cost, now)
	b.put(o, next, now)
	return took, ok
}

// give returns tokens to the origin's bucket, never above its capacity.
func (b *Budget) give(o origin, tokens int, now time.Time) {
	if tokens == 0 || b.Capacity < 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if have, ok := b.buckets[o]; ok { // a full bucket stays full
		b.put(o, have.give(tokens), now)
	}
}

// untouched reports whether all buckets are full, as they mostly are.
func (b *Budget) untouched() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.buckets) == 0
}

// put stores a bucket; mu must be held. A full one is dropped, but for a probe
// that still has to be remembered.
func (b *Budget) put(o origin, next bucket, now time.Time) {
	if next.missing == 0 && now.Sub(next.probed) >= probeEvery {
		delete(b.buckets, o)
		return
	}
	if b.buckets == nil {
		b.buckets = make(map[origin]bucket)
	}
	b.buckets[o] = next
}

func (k bucket) take(capacity, cost int, now time.Time) (next bucket, took int, ok bool) {
	switch {
	case capacity-k.missing >= cost:
		k.missing += cost
		return k, cost, true
	case now.Sub(k.probed) >= probeEvery:
		k.probed = now
		return k, 0, true
	}
	return k, 0, false
}

func (k bucket) give(tokens int) bucket {
	k.missing = max(k.missing-tokens, 0)
	return k
}
