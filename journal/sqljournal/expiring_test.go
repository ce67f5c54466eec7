package sqljournal_test

import (
	"crypto/sha256"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// event is a delivery.
func event(i int, expires time.Time) journal.Intent {
	return journal.Intent{
		Operation: journal.Operation{Scope: "sender", Name: "delivery", ID: fmt.Sprint(i)},
		Shape:     sha256.Sum256([]byte("POST /hooks")), Expires: expires,
	}
}

// More expired deliveries are claimed than a step of the sweep reads at once.
func TestASweepStepsOverWhatIsClaimedAndTakesTheRest(t *testing.T) {
	t.Parallel()
	lease := 2 * time.Second
	for sweepsOverClaimed(t, lease) { // this machine is too slow for such leases
		lease *= 2
		require.LessOrEqual(t, lease, 10*time.Minute)
	}
}

// sweepsOverClaimed is the test with one lease, and tells that it proves nothing because
// some leases ended too early.
func sweepsOverClaimed(t *testing.T, lease time.Duration) (again bool) {
	t.Helper()
	const n = 300 // half of n is more than a step
	j := open(t, fresh(t), sqljournal.Options{Lease: lease})
	soon := time.Now().Add(100 * time.Millisecond)
	var mu sync.Mutex // guards what follows
	var first, last time.Time
	doMany(t, n, 50, func(i int) error {
		e, err := j.Begin(t.Context(), event(i, soon))
		if err != nil {
			return err
		}
		if i%2 == 0 {
			_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{})
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if first.IsZero() || e.Lease.Before(first) {
			first = e.Lease
		}
		if e.Lease.After(last) {
			last = e.Lease
		}
		return nil
	})
	time.Sleep(time.Until(soon) + time.Millisecond) // they have to expire in real time
	s, err := j.Sweep(t.Context(), 0)
	require.NoError(t, err)
	second, err := j.Sweep(t.Context(), 0)
	require.NoError(t, err)
	if !time.Now().Before(first) {
		return true
	}
	require.Equal(t, journal.Swept{Deleted: n / 2}, s)
	require.Zero(t, second)
	for i := range n {
		e, err := j.Get(t.Context(), event(i, soon).Operation)
		if i%2 == 0 {
			require.ErrorIs(t, err, journal.ErrNotFound)
			continue
		}
		require.NoError(t, err)
		require.NotEmpty(t, e.Owner)
	}
	time.Sleep(time.Until(last) + time.Millisecond) // the leases have to end in real time
	s, err = j.Sweep(t.Context(), 0)
	require.NoError(t, err)
	require.Equal(t, journal.Swept{Deleted: n / 2}, s)
	return false
}

// The owners of expired deliveries come to their end while sweeps pass, and some
// deliveries come again.
func TestSweepsBesideTheOwnersOfExpiredDeliveriesTakeNothingThatIsAlive(t *testing.T) {
	t.Parallel()
	const n = 1000
	j := open(t, fresh(t), sqljournal.Options{Lease: journal.LongestLease})
	soon := time.Now().Add(time.Millisecond)
	held := make([]journal.Entry, n)
	doMany(t, n, 50, func(i int) (err error) {
		held[i], err = j.Begin(t.Context(), event(i, soon))
		return err
	})
	var deleted, sweeps int
	ended := make(chan struct{})
	var sweeping sync.WaitGroup
	sweeping.Go(func() {
		for {
			s, err := j.Sweep(t.Context(), 0)
			if err != nil {
				t.Errorf("sweep: %v", err)
				return
			}
			deleted += s.Deleted
			sweeps++
			select {
			case <-ended:
				return
			default:
			}
		}
	})
	doMany(t, n, 20, func(i int) error {
		if _, err := j.Get(t.Context(), held[i].Operation); err != nil {
			return fmt.Errorf("one that is alive: %w", err)
		}
		if _, err := j.Finish(t.Context(), held[i], journal.Done, journal.Note{}); err != nil {
			return err
		}
		if i%3 > 0 {
			return nil
		}
		_, err := j.Begin(t.Context(), event(i, time.Now().Add(time.Hour))) // it comes again
		return err
	})
	close(ended)
	sweeping.Wait()
	s, err := j.Sweep(t.Context(), 0)
	require.NoError(t, err)
	t.Logf("%d deleted in %d sweeps, then %d", deleted, sweeps, s.Deleted)
	for i := range n {
		_, err := j.Get(t.Context(), held[i].Operation)
		if i%3 > 0 {
			require.ErrorIs(t, err, journal.ErrNotFound)
		} else {
			require.NoError(t, err, "it came again")
		}
	}
}
