package idem

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBucketTakesUntilEmptyAndThenProbes(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	var k bucket
	var took int
	var ok bool
	for i := 1; i <= 3; i++ {
		k, took, ok = k.take(14, 4, now)
		require.True(t, ok)
		require.Equal(t, 4, took)
		require.Equal(t, 4*i, k.missing)
	}
	k, took, ok = k.take(14, 4, now)
	require.True(t, ok, "the first probe is free")
	require.Zero(t, took)
	require.Equal(t, 12, k.missing)
	for _, later := range []time.Duration{0, time.Second, probeEvery - 1} {
		next, took, ok := k.take(14, 4, now.Add(later))
		require.False(t, ok, later)
		require.Zero(t, took)
		require.Equal(t, k, next, "a refusal changes nothing")
	}
	_, _, ok = k.take(14, 4, now.Add(probeEvery))
	require.True(t, ok)
	_, _, ok = k.take(14, 4, now.Add(-time.Hour))
	require.False(t, ok, "a clock that was put back gives no probes")
}

func TestBucketIsNeverFullerThanFull(t *testing.T) {
	require.Equal(t, 0, bucket{missing: 3}.give(4).missing)
	require.Equal(t, 0, bucket{missing: 4}.give(4).missing)
	require.Equal(t, 1, bucket{missing: 5}.give(4).missing)
	require.Equal(t, 0, bucket{}.give(1).missing)
}

func TestBudgetKeepsNoFullBuckets(t *testing.T) {
	var b Budget
	now := time.Unix(1_000_000, 0)
	for i := range 1000 {
		o := origin{"https", string(rune('a'+i%26)) + string(rune('a'+i/26))}
		took, ok := b.take(o, now)
		require.True(t, ok)
		require.Equal(t, defaultCost, took)
		b.give(o, took, now)
		b.give(o, 1, now) // a success at a full bucket
	}
	require.Empty(t, b.buckets)
	took, _ := b.take(origin{"https", "a"}, now)
	b.give(origin{"https", "a"}, took-1, now)
	require.Len(t, b.buckets, 1)
	b.give(origin{"https", "a"}, 1, now)
	require.Empty(t, b.buckets)
}

func TestBudgetThatIsOffKeepsNothing(t *testing.T) {
	b := Budget{Capacity: -1}
	for range 100 {
		took, ok := b.take(origin{"https", "a"}, time.Time{})
		require.True(t, ok)
		require.Zero(t, took)
		b.give(origin{"https", "a"}, 1, time.Now())
	}
	require.Empty(t, b.buckets)
}

func TestProbesAreTenSecondsApartThoughTheBucketWasFullBetween(t *testing.T) {
	b := Budget{Capacity: 4}
	o := origin{"https", "a"}
	now := time.Unix(1_000_000, 0)
	empty := func(at time.Time) (probe bool) {
		_, ok := b.take(o, at)
		require.True(t, ok)
		_, probe = b.take(o, at)
		return probe
	}
	require.True(t, empty(now))
	b.give(o, 4, now)
	require.False(t, empty(now.Add(time.Second)))
	b.give(o, 4, now.Add(time.Second))
	require.True(t, empty(now.Add(probeEvery)))
	require.Len(t, b.buckets, 1)
	b.give(o, 4, now.Add(2*probeEvery))
	require.Empty(t, b.buckets, "full, and its probe is old")
}
