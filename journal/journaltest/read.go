package journaltest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

var reading = []check{
	{"Get of an entry that is not there is ErrNotFound", long, func(t *testing.T, j kit) {
		j.requireNone(t, payment("1").Operation)
		j.claim(t, payment("2"))
		j.requireNone(t, payment("1").Operation)
	}},
	{"an empty journal has nothing pending", long, func(t *testing.T, j kit) {
		require.Empty(t, j.pending(t))
	}},
	{"Pending yields the pending entries, oldest first, claimed or not", long, func(t *testing.T, j kit) {
		var want []journal.Entry
		for n := range 12 {
			in := payment(fmt.Sprint(100 - n)) // no other order fits
			in.Scope = fmt.Sprint("acct_", n%3)
			e := j.claim(t, in)
			switch n % 4 {
			case 0:
				want = append(want, j.get(t, in.Operation))
			case 1:
				want = append(want, j.release(t, e, journal.Note{}))
			case 2:
				j.finish(t, e, journal.Done, journal.Note{})
			case 3:
				j.finish(t, e, journal.Refused, journal.Note{})
			}
			time.Sleep(time.Millisecond) // entries of one microsecond have no order
		}
		got := j.pending(t)
		require.Len(t, got, len(want))
		for i := range want {
			requireSame(t, want[i], got[i])
		}
	}},
	{"the age of an entry is that of its generation", long, func(t *testing.T, j kit) {
		j.finish(t, j.claim(t, payment("1")), journal.Refused, journal.Note{})
		time.Sleep(time.Millisecond) // entries of one microsecond have no order
		j.claim(t, payment("2"))
		time.Sleep(time.Millisecond) // as above
		j.claim(t, payment("1"))
		got := j.pending(t)
		require.Len(t, got, 2)
		require.Equal(t, "2", got[0].ID)
		require.Equal(t, "1", got[1].ID)
	}},
	{"the loop over Pending may call the journal", long, func(t *testing.T, j kit) {
		for n := range 6 {
			in := payment(fmt.Sprint(n))
			j.release(t, j.claim(t, in), journal.Note{})
		}
		seen := map[string]bool{}
		for e, err := range j.Pending(t.Context()) {
			require.NoError(t, err)
			require.False(t, seen[e.ID], "%s comes twice", e.ID)
			seen[e.ID] = true
			claimed := j.claim(t, payment(e.ID))
			_, err = j.Renew(t.Context(), claimed, journal.Note{})
			require.NoError(t, err)
			switch len(seen) % 3 {
			case 0:
				j.release(t, claimed, journal.Note{})
				j.decide(t, e.Operation, journal.Decision{State: journal.Done, Reason: "r"})
			case 1:
				j.finish(t, claimed, journal.Done, journal.Note{})
			case 2:
				j.release(t, claimed, journal.Note{})
			}
			j.sweep(t, time.Hour)
			for range j.Pending(t.Context()) {
			}
		}
		require.Len(t, seen, 6)
		require.Len(t, j.pending(t), 2)
	}},
	{"the loop over Pending may be left and run again", long, func(t *testing.T, j kit) {
		for n := range 3 {
			j.claim(t, payment(fmt.Sprint(n)))
		}
		all := j.Pending(t.Context())
		for range 2 {
			n := 0
			for _, err := range all {
				require.NoError(t, err)
				n++
				if n == 2 {
					break
				}
			}
			require.Equal(t, 2, n)
		}
		j.claim(t, payment("after")) // the loop holds nothing back
		require.Len(t, j.pending(t), 4)
	}},
	{"scopes, names and ids are apart", long, func(t *testing.T, j kit) {
		ops := []journal.Operation{
			{Name: "pay", ID: "1"}, {Scope: "a", Name: "pay", ID: "1"}, {Scope: "b", Name: "pay", ID: "1"},
			{Scope: "a", Name: "refund", ID: "1"}, {Scope: "a", Name: "pay", ID: "2"},
			{Scope: "a", Name: "pay/1", ID: "1"}, {Scope: "a", Name: "pay", ID: "1/1"}, {Scope: "a/pay", Name: "1", ID: "1"},
			{Scope: "pay", Name: "1", ID: "1"}, {Scope: "pay", Name: "a", ID: "1"},
		}
		for i, op := range ops {
			in := payment("")
			in.Operation, in.Key = op, fmt.Sprint("key ", i)
			require.Equal(t, in.Key, j.claim(t, in).Key)
		}
		j.finish(t, j.get(t, ops[1]), journal.Done, journal.Note{Reference: "only this"})
		for i, op := range ops {
			e := j.get(t, op)
			require.Equal(t, op, e.Operation)
			require.Equal(t, fmt.Sprint("key ", i), e.Key)
			require.Equal(t, i == 1, e.State == journal.Done)
		}
		require.Len(t, j.pending(t), len(ops)-1)
	}},
	{"a cancelled context changes nothing", long, func(t *testing.T, j kit) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		claimed := j.claim(t, payment("claimed"))
		free := j.release(t, j.claim(t, payment("free")), journal.Note{})
		swept := payment("swept")
		swept.Window, swept.Request = 0, []byte("sealed request")
		j.finish(t, j.claim(t, swept), journal.Done, journal.Note{})
		before := []journal.Entry{j.get(t, claimed.Operation), free, j.get(t, swept.Operation)}
		time.Sleep(time.Millisecond) // so that there is something to sweep

		_, err := j.Begin(ctx, payment("new"))
		require.ErrorIs(t, err, context.Canceled)
		_, err = j.Begin(ctx, payment("free"))
		require.ErrorIs(t, err, context.Canceled)
		_, err = j.Renew(ctx, claimed, journal.Note{Status: 202})
		require.ErrorIs(t, err, context.Canceled)
		_, err = j.Finish(ctx, claimed, journal.Done, journal.Note{})
		require.ErrorIs(t, err, context.Canceled)
		_, err = j.Release(ctx, claimed, journal.Note{})
		require.ErrorIs(t, err, context.Canceled)
		_, err = j.Decide(ctx, free.Operation, journal.Decision{State: journal.Done, Reason: "r"})
		require.ErrorIs(t, err, context.Canceled)
		_, err = j.Get(ctx, free.Operation)
		require.ErrorIs(t, err, context.Canceled)
		_, err = j.Sweep(ctx, time.Nanosecond)
		require.ErrorIs(t, err, context.Canceled)
		n := 0
		for _, err = range j.Pending(ctx) {
			require.ErrorIs(t, err, context.Canceled)
			n++
		}
		require.Equal(t, 1, n, "the error is the last")

		j.requireNone(t, payment("new").Operation)
		for _, e := range before {
			j.requireStored(t, e)
		}
		j.finish(t, claimed, journal.Done, journal.Note{})
	}},
}
