package sqljournal_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

var finishedRows = flag.Int("finished", 20_000, "how many operations TestC47 finishes; the case has 200000, which take a minute")

var pendingRows = flag.Int("pending", 20_000, "how many pending entries TestPendingYieldsItsFirstEntrySoon has; 1000000 takes some minutes")

// doMany runs do for n numbers with many callers at once.
func doMany(t *testing.T, n, callers int, do func(i int) error) {
	t.Helper()
	var all sync.WaitGroup
	for c := range callers {
		all.Go(func() {
			for i := c; i < n; i += callers {
				if err := do(i); err != nil {
					t.Errorf("%d: %v", i, err)
					return
				}
			}
		})
	}
	all.Wait()
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Many finished operations, each of which had a kilobyte of a sealed answer. Of
// each a tombstone is left, with its names, key, fingerprint, reference and MAC, and it
// is in two indexes.
func TestC47_WhatIsKeptOfFinishedOperationsIsBounded(t *testing.T) {
	operations := *finishedRows
	if raceEnabled {
		operations /= 10
	}
	path := fresh(t)
	j := open(t, path, sqljournal.Options{})
	before := heap()
	answer := make([]byte, 1024)
	doMany(t, operations, 50, func(i int) error {
		in := payment(fmt.Sprintf("order-%08d", i*7919%operations))
		in.Window = time.Millisecond
		e, err := j.Begin(t.Context(), in)
		if err != nil {
			return err
		}
		_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Attempts: 1, Status: 200, Reference: "pi_1234567890123456", Answer: answer})
		return err
	})
	grown := int64(heap()) - int64(before)
	size := func() int64 {
		info, err := os.Stat(path)
		require.NoError(t, err)
		log, err := os.Stat(path + "-wal")
		require.NoError(t, err)
		t.Logf("file %d bytes for each operation, log %d MiB in all", info.Size()/int64(operations), log.Size()>>20)
		return info.Size()
	}
	size()
	time.Sleep(2 * time.Millisecond) // the windows have to pass
	s, err := j.Sweep(t.Context(), time.Hour)
	require.NoError(t, err)
	require.Equal(t, journal.Swept{Emptied: operations}, s)
	require.NoError(t, j.Close())
	after := size()
	require.Less(t, grown, int64(10<<20), "heap in bytes")
	require.LessOrEqual(t, after, int64(operations)*500+1<<20, "500 bytes for each tombstone, and what may be free")

	j = open(t, path, sqljournal.Options{})
	e, err := j.Begin(t.Context(), payment("order-00000000"))
	require.NoError(t, err)
	require.Equal(t, journal.Done, e.State, "a swept operation never becomes a new one")
	require.Equal(t, "pi_1234567890123456", e.Reference)
	require.Nil(t, e.Answer)
	s, err = j.Sweep(t.Context(), time.Nanosecond)
	require.NoError(t, err)
	require.Equal(t, journal.Swept{Deleted: operations}, s)
	require.NoError(t, j.Close())
	require.LessOrEqual(t, size(), int64(2<<20), "an empty journal is small again")
}

func TestASweepLetsOthersInAndStopsWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	j := open(t, fresh(t), sqljournal.Options{})
	const operations = 1500 // fifteen steps
	doMany(t, operations, 50, func(i int) error {
		in := payment(fmt.Sprint(i))
		in.Window = 0
		e, err := j.Begin(t.Context(), in)
		if err != nil {
			return err
		}
		_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Answer: []byte("sealed")})
		return err
	})
	time.Sleep(time.Millisecond) // the windows have to pass
	ctx, cancel := context.WithCancel(t.Context())
	var others atomic.Int64
	var all sync.WaitGroup
	work := func() {
		for ctx.Err() == nil {
			if _, err := j.Begin(t.Context(), payment(fmt.Sprint("other", others.Load()))); err != nil {
				t.Errorf("the others: %v", err)
			}
			if others.Add(1) == 10 {
				cancel()
			}
		}
	}
	steps := 0
	between := func() { // the others go on before the next step comes, however they are scheduled
		if steps++; steps == 1 {
			all.Go(work)
		}
		seen, until := others.Load(), time.Now().Add(30*time.Second)
		for ctx.Err() == nil && others.Load() == seen {
			if time.Now().After(until) {
				t.Errorf("nobody gets in after step %d", steps)
				cancel()
			}
			time.Sleep(50 * time.Microsecond) // others has no event
		}
	}
	first, err := j.Sweep(watched{ctx, between}, time.Hour)
	cancel()
	all.Wait()
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, first.Emptied, operations)
	require.GreaterOrEqual(t, others.Load(), int64(10))
	require.LessOrEqual(t, steps, 10, "after each step at least one of the others")
	rest, err := j.Sweep(t.Context(), time.Hour)
	require.NoError(t, err)
	// The step that the cancel met may have been committed, uncounted.
	require.InDelta(t, operations, first.Emptied+rest.Emptied, 100)
}

func TestASweepLeavesDamagedEntriesAloneAndNamesThem(t *testing.T) {
	t.Parallel()
	j := open(t, fresh(t), sqljournal.Options{})
	const operations, damaged = 500, 230 // more than a step handles
	doMany(t, operations, 50, func(i int) error {
		in := payment(fmt.Sprint(i))
		in.Window = 0
		e, err := j.Begin(t.Context(), in)
		if err != nil {
			return err
		}
		_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Answer: []byte("sealed")})
		return err
	})
	_, err := j.DB().Exec("UPDATE idem_entries SET attempts = 7 WHERE CAST(id AS INTEGER) < $1", damaged)
	require.NoError(t, err)
	time.Sleep(time.Millisecond) // the windows have to pass
	s, err := j.Sweep(t.Context(), time.Hour)
	require.ErrorIs(t, err, journal.ErrDamaged)
	var r *sqljournal.RowError
	require.ErrorAs(t, err, &r)
	require.Equal(t, journal.Swept{Emptied: operations - damaged}, s)
	s, err = j.Sweep(t.Context(), time.Nanosecond)
	require.ErrorIs(t, err, journal.ErrDamaged)
	require.Equal(t, journal.Swept{Deleted: operations - damaged}, s)
	for i := range damaged {
		_, err := j.Get(t.Context(), payment(fmt.Sprint(i)).Operation)
		require.ErrorIs(t, err, journal.ErrDamaged, "it is still there to be looked at")
	}
	_, err = j.Begin(t.Context(), payment("3"))
	require.ErrorIs(t, err, journal.ErrDamaged, "nothing is sent for it")
}

func TestPendingYieldsEachEntryOnceWhileTheLoopChangesThem(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{})
	const operations = 1000 // more than are read at once
	doMany(t, operations, 50, func(i int) error {
		_, err := j.Begin(t.Context(), payment(fmt.Sprint(i)))
		return err
	})
	_, err := j.DB().Exec("UPDATE idem_entries SET attempts = 7 WHERE id IN ('3', '77', '205')")
	require.NoError(t, err)
	seen := map[string]bool{}
	damaged := 0
	last := time.Time{}
	for e, err := range j.Pending(t.Context()) {
		require.False(t, seen[e.ID], "%s comes twice", e.ID)
		seen[e.ID] = true
		if errors.Is(err, journal.ErrDamaged) {
			damaged++
			continue
		}
		require.NoError(t, err)
		require.False(t, e.Created.Before(last), "oldest first")
		last = e.Created
		if len(seen)%10 == 0 {
			_, err := j.Finish(t.Context(), e, journal.Done, journal.Note{})
			require.NoError(t, err)
			_, err = j.Begin(t.Context(), payment("new "+e.ID))
			require.NoError(t, err)
		}
	}
	require.Len(t, seen, operations)
	require.Equal(t, 3, damaged)
}

func TestFinishedEntriesCostPendingNothing(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{})
	var plan string
	for what, query := range map[string]string{
		"pending":  "SELECT * FROM idem_entries WHERE state = 0 AND expires = 0 AND (created, seq) > (0, 0) AND (created, seq) <= (9, 9) ORDER BY created, seq LIMIT 9",
		"finished": "SELECT * FROM idem_entries WHERE finished > 0 AND expires = 0 AND finished <= 9 ORDER BY finished, seq LIMIT 9 OFFSET 0",
		"stored":   "SELECT * FROM idem_entries WHERE finished > 0 AND expires = 0 AND (request IS NOT NULL OR answer IS NOT NULL) AND finished + key_window / 1000 <= 9 ORDER BY finished + key_window / 1000 LIMIT 9 OFFSET 0",
		"expires":  "SELECT * FROM idem_entries WHERE expires > 0 AND expires <= 9 ORDER BY expires, seq LIMIT 9 OFFSET 0",
	} {
		var id, parent, unused int
		require.NoError(t, j.DB().QueryRow("EXPLAIN QUERY PLAN "+query).Scan(&id, &parent, &unused, &plan))
		require.Contains(t, plan, "SEARCH idem_entries USING INDEX idem_entries_"+what)
	}
}

// What was finished behind the first entry is not yielded: it was not read before that.
func TestPendingReadsNoMoreThanItYields(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{Lease: journal.LongestLease})
	const rows = 500 // more than are read at once
	for i := range rows {
		_, err := j.Begin(t.Context(), payment(fmt.Sprint(i)))
		require.NoError(t, err)
	}
	last, err := j.Begin(t.Context(), payment("the last"))
	require.NoError(t, err)
	n := 0
	for e, err := range j.Pending(t.Context()) {
		require.NoError(t, err)
		require.NotEqual(t, "the last", e.ID)
		if n++; n == 1 {
			_, err := j.Finish(t.Context(), last, journal.Done, journal.Note{})
			require.NoError(t, err)
		}
	}
	require.Equal(t, rows, n)
}

// From the opening, its checks included, to the first entry.
func TestPendingYieldsItsFirstEntrySoon(t *testing.T) {
	rows := *pendingRows
	if raceEnabled {
		rows /= 10
	}
	path := fresh(t)
	j := open(t, path, sqljournal.Options{})
	doMany(t, rows, 200, func(i int) error {
		_, err := j.Begin(t.Context(), payment(fmt.Sprintf("order-%08d", i*7919%rows)))
		return err
	})
	require.NoError(t, j.Close())
	// What is soon depends on the machine: it is compared with the time in which all
	// are read, and more than once, as either may be held up.
	const most, rounds = 5, 10
	for round := 1; ; round++ {
		began := time.Now()
		j = open(t, path, sqljournal.Options{})
		opened := time.Since(began)
		for _, err := range j.Pending(t.Context()) {
			require.NoError(t, err)
			break
		}
		first := time.Since(began)
		n := 0
		for _, err := range j.Pending(t.Context()) {
			require.NoError(t, err)
			n++
		}
		all := time.Since(began) - first
		t.Logf("%d pending: opened after %v, the first entry after %v, all after %v more", n, opened, first, all)
		require.Equal(t, rows, n)
		require.NoError(t, j.Close())
		if first < most*all {
			return
		}
		require.Less(t, round, rounds, "the first entry takes more than %d times what all of them take", most)
	}
}
