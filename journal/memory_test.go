package journal_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/journaltest"
)

func TestMemoryIsAJournal(t *testing.T) {
	journaltest.Run(t, func(t *testing.T, lease time.Duration) journal.Journal {
		return &journal.Memory{Lease: lease}
	})
}

// begin requires that m gives a claim.
func begin(t *testing.T, m *journal.Memory, in journal.Intent) journal.Entry {
	t.Helper()
	e, err := m.Begin(t.Context(), in)
	require.NoError(t, err)
	require.NotEmpty(t, e.Owner)
	return e
}

func finish(t *testing.T, m *journal.Memory, e journal.Entry, s journal.State) journal.Entry {
	t.Helper()
	e, err := m.Finish(t.Context(), e, s, journal.Note{Attempts: 1, Status: 201, Answer: []byte("sealed answer")})
	require.NoError(t, err)
	return e
}

// has requires that m still knows op, or no longer does.
func has(t *testing.T, m *journal.Memory, op journal.Operation, want bool) {
	t.Helper()
	_, err := m.Get(t.Context(), op)
	if want {
		require.NoError(t, err, "%v", op)
	} else {
		require.ErrorIs(t, err, journal.ErrNotFound, "%v", op)
	}
}

func TestTheZeroMemoryHasALeaseOf30Seconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, in := new(journal.Memory), payment("1")
		e := begin(t, m, in)
		time.Sleep(30*time.Second - time.Microsecond) // virtual
		_, err := m.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrClaimed)
		time.Sleep(time.Microsecond) // virtual
		again := begin(t, m, in)
		require.Equal(t, e.Key, again.Key)
		require.Equal(t, e.Fence+1, again.Fence)
		require.Equal(t, e.Lease.Add(30*time.Second), again.Lease)
	})
}

func TestAnOwnerThatRenewsKeepsItsClaimForDays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, in := &journal.Memory{Lease: time.Minute}, payment("1")
		e := begin(t, m, in)
		for range 3 * 24 * 60 {
			time.Sleep(time.Minute - time.Microsecond) // virtual
			_, err := m.Begin(t.Context(), in)
			require.ErrorIs(t, err, journal.ErrClaimed)
			_, err = m.Renew(t.Context(), e, journal.Note{})
			require.NoError(t, err)
		}
		require.Equal(t, int64(1), finish(t, m, e, journal.Done).Fence)
	})
}

func TestMemoryKeepsAnswersForTheWindowAndTombstonesFor400Days(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const day = 24 * time.Hour
		m, in := new(journal.Memory), payment("1")
		in.Request = []byte("sealed request")
		finish(t, m, begin(t, m, in), journal.Done)
		finished := time.Now()
		left := begin(t, m, payment("pending"))
		sweepAt := func(since time.Duration) journal.Swept {
			t.Helper()
			time.Sleep(time.Until(finished.Add(since))) // virtual
			s, err := m.Sweep(t.Context(), 0)
			require.NoError(t, err)
			return s
		}
		require.Equal(t, journal.Swept{}, sweepAt(day-time.Microsecond))
		got, err := m.Begin(t.Context(), in)
		require.NoError(t, err)
		require.Equal(t, []byte("sealed answer"), got.Answer)

		require.Equal(t, journal.Swept{Emptied: 1}, sweepAt(day))
		require.Equal(t, journal.Swept{}, sweepAt(400*day-time.Microsecond))
		got, err = m.Begin(t.Context(), in)
		require.NoError(t, err)
		require.Equal(t, journal.Done, got.State, "done for 400 days")
		require.Nil(t, got.Answer)
		other := in
		other.Content = digest("1999.00 eur")
		_, err = m.Begin(t.Context(), other)
		require.ErrorIs(t, err, journal.ErrMismatch)

		require.Equal(t, journal.Swept{Deleted: 1}, sweepAt(400*day))
		has(t, m, in.Operation, false)
		require.Equal(t, journal.Swept{}, sweepAt(4000*day))
		has(t, m, left.Operation, true)
		again := begin(t, m, payment("pending"))
		require.Equal(t, left.Key, again.Key, "pending keeps its key for ever")
	})
}

func TestC77_ADeliveryIsRecognisedForAsLongAsItsWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(journal.Memory)
		start := time.Now()
		first := event("evt_1", start.Add(72*time.Hour))
		e := finish(t, m, begin(t, m, first), journal.Done)

		time.Sleep(71 * time.Hour) // virtual
		again := event("evt_1", time.Now().Add(72*time.Hour))
		got, err := m.Begin(t.Context(), again)
		require.NoError(t, err)
		require.Equal(t, journal.Done, got.State)
		require.Empty(t, got.Owner, "it is not handled again")
		require.Equal(t, e.Expires, got.Expires, "a redelivery does not extend the window")

		time.Sleep(2 * time.Hour) // virtual
		again.Expires = time.Now().Add(72 * time.Hour)
		require.Equal(t, 1, begin(t, m, again).Generation, "at 73 h it is new")
	})
}

func TestC77_AFullMemoryRefusesAndForgetsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 5
		m := &journal.Memory{Max: most}
		in := payment("done")
		finish(t, m, begin(t, m, in), journal.Done)
		finish(t, m, begin(t, m, payment("refused")), journal.Refused)
		claimed := begin(t, m, payment("claimed"))
		released := begin(t, m, payment("released"))
		_, err := m.Release(t.Context(), released, journal.Note{})
		require.NoError(t, err)
		finish(t, m, begin(t, m, event("evt_1", time.Now().Add(500*24*time.Hour))), journal.Done)

		full := func(id string) {
			t.Helper()
			e, err := m.Begin(t.Context(), payment(id))
			require.ErrorIs(t, err, journal.ErrFull)
			require.ErrorContains(t, err, strconv.Itoa(most))
			require.Equal(t, journal.Entry{}, e)
			has(t, m, payment(id).Operation, false)
			for _, id := range []string{"done", "refused", "claimed", "released"} {
				has(t, m, payment(id).Operation, true)
			}
			has(t, m, event("evt_1", time.Time{}).Operation, true)
		}
		for range 3 {
			full("one more")
			time.Sleep(time.Hour) // virtual
		}
		_, err = m.Begin(t.Context(), event("evt_2", time.Now().Add(time.Hour)))
		require.ErrorIs(t, err, journal.ErrFull)

		// What is there works on.
		got, err := m.Begin(t.Context(), in)
		require.NoError(t, err)
		require.Equal(t, journal.Done, got.State)
		require.Equal(t, 2, begin(t, m, payment("refused")).Generation)
		finish(t, m, claimed, journal.Done)
		begin(t, m, payment("released"))
		full("still")

		// Tombstones make room when they are old, and not before.
		time.Sleep(400*24*time.Hour - 4*time.Hour) // virtual
		full("still")
		time.Sleep(5 * time.Hour) // virtual
		begin(t, m, payment("one more"))
		has(t, m, in.Operation, false)
		has(t, m, claimed.Operation, false)
		has(t, m, payment("refused").Operation, true)
		has(t, m, payment("released").Operation, true)
		has(t, m, event("evt_1", time.Time{}).Operation, true)
	})
}

func TestC77_ExpiredDeliveriesMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 100
		m := &journal.Memory{Max: most}
		for n := range most {
			begin(t, m, event(strconv.Itoa(n), time.Now().Add(time.Duration(1+n%2)*time.Hour)))
		}
		next := event("next", time.Now().Add(4*time.Hour))
		_, err := m.Begin(t.Context(), next)
		require.ErrorIs(t, err, journal.ErrFull)
		time.Sleep(time.Hour) // virtual
		begin(t, m, next)
		for n := range most {
			has(t, m, event(strconv.Itoa(n), time.Time{}).Operation, n%2 == 1)
		}
		// One that is there and expired needs no room.
		for n := range most/2 - 1 {
			begin(t, m, event(fmt.Sprint("more ", n), time.Now().Add(4*time.Hour)))
		}
		time.Sleep(time.Hour) // virtual
		begin(t, m, event("1", time.Now().Add(time.Hour)))
	})
}

func TestC77_AnEventThatIsHandledOutlastsItsWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &journal.Memory{Max: 1, Lease: 30 * time.Second}
		e := begin(t, m, event("1", time.Now().Add(time.Minute)))
		again, next := event("1", time.Now().Add(4*time.Hour)), event("2", time.Now().Add(4*time.Hour))
		for range 180 {
			time.Sleep(20 * time.Second) // virtual
			_, err := m.Renew(t.Context(), e, journal.Note{})
			require.NoError(t, err)
			_, err = m.Begin(t.Context(), again)
			require.ErrorIs(t, err, journal.ErrClaimed)
			_, err = m.Begin(t.Context(), next)
			require.ErrorIs(t, err, journal.ErrFull, "it makes no room")
			s, err := m.Sweep(t.Context(), 0)
			require.NoError(t, err)
			require.Zero(t, s)
		}
		time.Sleep(30 * time.Second) // virtual; its process died
		begin(t, m, next)
		has(t, m, e.Operation, false)
	})
}

// A million live ids by default, each with its key, and what they weigh.
func TestC77_AMillionLiveIdsFit(t *testing.T) {
	most, enough := 1<<20, 1_000_000
	m := &journal.Memory{Lease: time.Hour} // the claims outlast the filling, however slow the machine is
	if testing.Short() || raceDetector {   // a million take seconds and a gigabyte, and much more under the race detector
		most, enough = 1<<14, 10_000
		m.Max = most
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	require.GreaterOrEqual(t, most, enough)
	same := payment("")
	intent := func(n int) journal.Intent {
		in := same
		in.ID = fmt.Sprintf("order-%08d/1", n)
		in.Key = fmt.Sprintf("%08d-0000-4000-8000-000000000000", n) // of a UUID's length
		return in
	}
	empty := heap()
	var keys uint64
	for n := range most {
		in := intent(n)
		keys += uint64(len(in.ID) + len(in.Key))
		_, err := m.Begin(t.Context(), in)
		require.NoError(t, err)
	}
	each := (heap() - empty) / uint64(most)
	t.Logf("%7d entries: %d bytes each, %d of them its id and key", most, each, keys/uint64(most))
	_, err := m.Begin(t.Context(), intent(most))
	require.ErrorIs(t, err, journal.ErrFull)
	for _, n := range []int{0, 1, enough - 1, most - 1} {
		e, err := m.Begin(t.Context(), intent(n))
		require.ErrorIs(t, err, journal.ErrClaimed)
		require.Equal(t, intent(n).Key, e.Key)
	}
	require.Less(t, each, uint64(1000))
	runtime.KeepAlive(m)
}

func BenchmarkMemoryBeginAndFinish(b *testing.B) {
	m := new(journal.Memory)
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		n++
		if n == 1<<20 {
			m, n = new(journal.Memory), 0
		}
		e, err := m.Begin(b.Context(), payment(strconv.Itoa(n)))
		if err == nil {
			_, err = m.Finish(b.Context(), e, journal.Done, journal.Note{})
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

func TestMemoryThatCannotWorkSaysWhichFieldAndLimit(t *testing.T) {
	for _, c := range []struct {
		m     *journal.Memory
		names []string
	}{
		{&journal.Memory{Lease: -time.Second}, []string{"Memory.Lease", "-1s", "0"}},
		{&journal.Memory{Lease: time.Hour + 1}, []string{"Memory.Lease", "1h0m0.000000001s", "0 (30 s) to 1h0m0s"}},
		{&journal.Memory{Max: -3}, []string{"Memory.Max", "-3", "0"}},
	} {
		check := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, journal.ErrInvalid)
			for _, name := range c.names {
				require.ErrorContains(t, err, name)
			}
		}
		ctx, in := t.Context(), payment("1")
		for range 2 {
			_, err := c.m.Begin(ctx, in)
			check(err)
		}
		_, err := c.m.Renew(ctx, journal.Entry{}, journal.Note{})
		check(err)
		_, err = c.m.Finish(ctx, journal.Entry{}, journal.Done, journal.Note{})
		check(err)
		_, err = c.m.Release(ctx, journal.Entry{}, journal.Note{})
		check(err)
		_, err = c.m.Decide(ctx, in.Operation, journal.Decision{State: journal.Done, Reason: "r"})
		check(err)
		_, err = c.m.Get(ctx, in.Operation)
		check(err)
		_, err = c.m.Sweep(ctx, 0)
		check(err)
		n := 0
		for _, err := range c.m.Pending(ctx) {
			check(err)
			n++
		}
		require.Equal(t, 1, n)
	}
}

func TestMemoryHandsBackTheCauseOfTheCallersContext(t *testing.T) {
	cause := errors.New("the shop closes")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	m := new(journal.Memory)
	_, err := m.Begin(ctx, payment("1"))
	require.ErrorIs(t, err, cause)
	_, err = m.Sweep(ctx, 0)
	require.ErrorIs(t, err, cause)
	has(t, m, payment("1").Operation, false)

	begin(t, m, payment("1"))
	begin(t, m, payment("2"))
	ctx, cancel = context.WithCancelCause(t.Context())
	n := 0
	for e, err := range m.Pending(ctx) { // cancelled on the way
		n++
		if n == 1 {
			require.NoError(t, err)
			require.Equal(t, "1", e.ID)
			cancel(cause)
			continue
		}
		require.ErrorIs(t, err, cause)
	}
	require.Equal(t, 2, n)
	cancel(nil)
}

func TestTwoMemoriesHaveTwoSecrets(t *testing.T) {
	a, b := begin(t, new(journal.Memory), payment("1")), begin(t, new(journal.Memory), payment("1"))
	require.NotEqual(t, a.Fingerprint, b.Fingerprint)
}

// The first use fills what the zero value does not have.
func TestManyMayUseAMemoryFirst(t *testing.T) {
	for range 20 {
		m := new(journal.Memory)
		var all sync.WaitGroup
		for n := range 8 {
			all.Go(func() {
				var err error
				switch n % 4 {
				case 0:
					_, err = m.Begin(t.Context(), payment(strconv.Itoa(n)))
				case 1:
					_, err = m.Sweep(t.Context(), 0)
				case 2:
					for _, e := range m.Pending(t.Context()) {
						err = errors.Join(err, e)
					}
				case 3:
					if _, err = m.Get(t.Context(), payment("none").Operation); errors.Is(err, journal.ErrNotFound) {
						err = nil
					}
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		has(t, m, payment("0").Operation, true)
		has(t, m, payment("4").Operation, true)
	}
}
