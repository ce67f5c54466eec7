package journaltest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

var deliveries = []check{
	{"a delivery needs no key and is claimed like an operation", long, func(t *testing.T, j kit) {
		in := event("1", time.Now().Add(time.Hour))
		e := j.claim(t, in)
		require.Empty(t, e.Key)
		require.True(t, e.Expires.Equal(in.Expires.Truncate(time.Microsecond)), "%v", e.Expires)
		require.False(t, e.Differs)
		stored := j.get(t, in.Operation)
		got, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrClaimed)
		requireSame(t, stored, got)
		done := j.finish(t, e, journal.Done, journal.Note{})
		got, err = j.Begin(t.Context(), in)
		require.NoError(t, err)
		requireSame(t, done, got)
	}},
	{"another digest of a delivery is no error, Differs says so and is not stored", short, func(t *testing.T, j kit) {
		in := event("1", time.Now().Add(time.Hour))
		other := in
		other.Content = digest("payment succeeded, said later")
		e := j.claim(t, in)
		got, err := j.Begin(t.Context(), other)
		if time.Now().Before(e.Lease) {
			require.ErrorIs(t, err, journal.ErrClaimed)
			require.True(t, got.Differs)
		}
		e = j.takeOver(t, other, j.get(t, in.Operation))
		require.True(t, e.Differs)
		stored := j.get(t, in.Operation)
		require.False(t, stored.Differs)
		done := j.finish(t, e, journal.Done, journal.Note{})
		require.False(t, done.Differs)
		got, err = j.Begin(t.Context(), other)
		require.NoError(t, err)
		require.True(t, got.Differs)
		got.Differs = false
		requireSame(t, done, got)
		got, err = j.Begin(t.Context(), in)
		require.NoError(t, err)
		require.False(t, got.Differs, "the digest of the first one is kept")
		j.requireStored(t, done)
	}},
	{"an expired delivery is begun as if it had never been there", long, func(t *testing.T, j kit) {
		soon := time.Now().Add(short)
		var expired []journal.Entry
		for _, s := range []journal.State{journal.Pending, journal.Done, journal.Refused} {
			in := event(s.String(), soon)
			in.Request = []byte("sealed request")
			old, n := j.claim(t, in), journal.Note{Attempts: 1, Status: 200, Reference: "evt_1", Answer: []byte("sealed answer"), Clear: true}
			if s == journal.Pending {
				j.release(t, old, n)
			} else {
				j.finish(t, old, s, n)
			}
			expired = append(expired, old)
		}
		waitUntil(soon)
		for _, old := range expired {
			in := event(old.ID, time.Now().Add(time.Hour))
			in.Content = digest("another")
			e := j.claim(t, in)
			require.Equal(t, 1, e.Generation)
			require.Greater(t, e.Fence, old.Fence)
			require.True(t, e.Created.After(old.Created))
			require.True(t, e.Expires.Equal(in.Expires.Truncate(time.Microsecond)))
			require.NotEqual(t, old.Fingerprint, e.Fingerprint)
			require.False(t, e.Differs, "there is nothing that it differs from")
			require.True(t, e.FirstSend.IsZero())
			require.False(t, e.Clear)
			require.Zero(t, e.Attempts)
			require.Zero(t, e.Status)
			require.Empty(t, e.Reference)
			require.Empty(t, e.Request)
			require.Empty(t, e.Answer)
			require.True(t, e.Finished.IsZero())
		}
	}},
	{"an expired delivery is not begun anew while its claim is live", long, func(t *testing.T, j kit) {
		in := event("1", time.Now().Add(short))
		e := j.claim(t, in)
		stored := j.get(t, in.Operation)
		waitUntil(in.Expires)
		again := event("1", time.Now().Add(time.Hour))
		other := again
		other.Content = digest("another")
		for _, in := range []journal.Intent{again, other} {
			got, err := j.Begin(t.Context(), in)
			require.ErrorIs(t, err, journal.ErrClaimed, "it would be handled twice")
			got.Differs = false
			requireSame(t, stored, got)
			j.requireStored(t, stored)
		}
		_, err := j.Renew(t.Context(), e, journal.Note{})
		require.NoError(t, err)
		_, err = j.Begin(t.Context(), again)
		require.ErrorIs(t, err, journal.ErrClaimed)
		j.finish(t, e, journal.Done, journal.Note{})
		got := j.claim(t, again)
		require.Equal(t, 1, got.Generation, "nobody handles it any more, and it is forgotten")
		require.Greater(t, got.Fence, e.Fence)
		require.True(t, got.Expires.Equal(again.Expires.Truncate(time.Microsecond)), "%v", got.Expires)
	}},
	{"an expired delivery is begun anew when the lease of its claim ends, and not before", short, func(t *testing.T, j kit) {
		in := event("1", time.Now().Add(short/2))
		e := j.claim(t, in)
		waitUntil(in.Expires)
		renewed, err := j.Renew(t.Context(), e, journal.Note{Status: 202})
		require.NoError(t, err)
		in.Expires = time.Now().Add(time.Hour)
		for {
			asked := time.Now()
			got, err := j.Begin(t.Context(), in)
			if err == nil {
				require.False(t, time.Now().Before(renewed.Lease), "begun anew %v early", time.Until(renewed.Lease))
				require.Equal(t, 1, got.Generation)
				require.Greater(t, got.Fence, e.Fence)
				require.True(t, got.Created.After(e.Created))
				require.True(t, got.FirstSend.IsZero())
				require.Zero(t, got.Status)
				require.True(t, got.Expires.Equal(in.Expires.Truncate(time.Microsecond)), "%v", got.Expires)
				return
			}
			require.ErrorIs(t, err, journal.ErrClaimed)
			require.True(t, asked.Sub(renewed.Lease) < 10*time.Second, "still claimed long after its lease")
			time.Sleep(5 * time.Millisecond) // the lease has to end in real time
		}
	}},
	{"a late owner of an expired delivery does not touch the new one", short, func(t *testing.T, j kit) {
		in := event("1", time.Now().Add(short/2))
		late := j.claim(t, in)
		waitUntil(late.Lease)
		in.Expires = time.Now().Add(time.Hour)
		e := j.claim(t, in)
		j.requireLate(t, late)
		j.finish(t, e, journal.Done, journal.Note{})
		j.requireLate(t, late)
	}},
	{"a refused delivery is begun anew", long, func(t *testing.T, j kit) {
		in := event("1", time.Now().Add(time.Hour))
		j.finish(t, j.claim(t, in), journal.Refused, journal.Note{})
		e := j.claim(t, in)
		require.Equal(t, 2, e.Generation)
		require.True(t, e.Expires.Equal(in.Expires.Truncate(time.Microsecond)))
	}},
	{"deliveries are not in Pending", long, func(t *testing.T, j kit) {
		j.claim(t, event("claimed", time.Now().Add(time.Hour)))
		j.release(t, j.claim(t, event("released", time.Now().Add(time.Hour))), journal.Note{})
		j.claim(t, payment("1"))
		got := j.pending(t)
		require.Len(t, got, 1)
		require.Equal(t, "1", got[0].ID)
	}},
	{"Sweep leaves an expired delivery alone while its claim is live", long, func(t *testing.T, j kit) {
		in := event("1", time.Now().Add(short))
		e := j.claim(t, in)
		free := j.claim(t, event("2", in.Expires))
		j.release(t, free, journal.Note{})
		stored := j.get(t, in.Operation)
		waitUntil(in.Expires)
		require.Equal(t, journal.Swept{Deleted: 1}, j.sweep(t, 0), "only what nobody works on")
		j.requireNone(t, free.Operation)
		require.Equal(t, journal.Swept{}, j.sweep(t, time.Nanosecond), "whatever keep is")
		j.requireStored(t, stored)
		j.finish(t, e, journal.Done, journal.Note{})
		require.Equal(t, journal.Swept{Deleted: 1}, j.sweep(t, 0))
		j.requireNone(t, e.Operation)
	}},
	{"Sweep deletes expired deliveries and leaves no tombstone", short, func(t *testing.T, j kit) {
		soon := time.Now().Add(short / 2)
		var gone []journal.Entry
		for _, s := range []journal.State{journal.Pending, journal.Done, journal.Refused} {
			e := j.claim(t, event(s.String(), soon))
			if s == journal.Pending {
				j.release(t, e, journal.Note{})
			} else {
				j.finish(t, e, s, journal.Note{})
			}
			gone = append(gone, e)
		}
		claimed := j.claim(t, event("claimed", soon)) // by one that dies
		gone = append(gone, claimed)
		stay := event("stays", time.Now().Add(time.Hour))
		stay.Request = []byte("sealed request")
		stored := j.finish(t, j.claim(t, stay), journal.Done, journal.Note{Answer: []byte("sealed answer")})
		waitUntil(claimed.Lease)
		require.Equal(t, journal.Swept{Deleted: 4}, j.sweep(t, time.Hour))
		for _, e := range gone {
			j.requireNone(t, e.Operation)
		}
		j.requireStored(t, stored)
		require.Equal(t, journal.Swept{}, j.sweep(t, time.Nanosecond), "not before it expires, whatever keep is")
		j.requireStored(t, stored)
		j.claim(t, event("done", time.Now().Add(time.Hour)))
	}},
}

var sweeps = []check{
	{"nothing is swept within the key window", long, func(t *testing.T, j kit) {
		var want []journal.Entry
		for _, s := range []journal.State{journal.Done, journal.Refused} {
			in := payment(s.String())
			in.Request = []byte("sealed request")
			want = append(want, j.finish(t, j.claim(t, in), s, journal.Note{Answer: []byte("sealed answer")}))
		}
		for _, keep := range []time.Duration{0, time.Nanosecond, time.Hour} {
			require.Equal(t, journal.Swept{}, j.sweep(t, keep))
		}
		for _, e := range want {
			j.requireStored(t, e)
		}
	}},
	{"after the window request and answer go and the tombstone stays", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.Window, in.Request = short, []byte("sealed request")
		want := j.finish(t, j.claim(t, in), journal.Done, journal.Note{Attempts: 1, Status: 201, Reference: "pi_1", Answer: []byte("sealed answer")})
		bare := payment("2")
		bare.Window = short
		empty := j.finish(t, j.claim(t, bare), journal.Refused, journal.Note{Status: 402})
		waitUntil(empty.Finished.Add(short))

		require.Equal(t, journal.Swept{Emptied: 1}, j.sweep(t, 0))
		want.Request, want.Answer = nil, nil
		j.requireStored(t, want)
		j.requireStored(t, empty)
		require.Equal(t, journal.Swept{}, j.sweep(t, 0), "there is no more")

		got, err := j.Begin(t.Context(), in)
		require.NoError(t, err)
		requireSame(t, want, got)
		for name, other := range others(in) {
			_, err = j.Begin(t.Context(), other)
			require.ErrorIs(t, err, journal.ErrMismatch, name)
		}
		e := j.claim(t, bare)
		require.Equal(t, bare.NextKey, e.Key, "refused is known still")
	}},
	{"one that stored only a request, or only an answer, is emptied too", long, func(t *testing.T, j kit) {
		request, answer := payment("1"), payment("2")
		request.Window, answer.Window = 0, 0
		request.Request = []byte("sealed request")
		j.finish(t, j.claim(t, request), journal.Done, journal.Note{})
		e := j.finish(t, j.claim(t, answer), journal.Done, journal.Note{Answer: []byte("sealed answer")})
		waitUntil(e.Finished)
		require.Equal(t, journal.Swept{Emptied: 2}, j.sweep(t, 0))
		require.Empty(t, j.get(t, request.Operation).Request)
		require.Empty(t, j.get(t, answer.Operation).Answer)
	}},
	{"tombstones are deleted when they were kept long enough", long, func(t *testing.T, j kit) {
		var last journal.Entry
		ops := []journal.Operation{}
		for _, s := range []journal.State{journal.Done, journal.Refused} {
			in := payment(s.String())
			in.Window = short
			ops = append(ops, in.Operation)
			last = j.finish(t, j.claim(t, in), s, journal.Note{Answer: []byte("sealed answer")})
		}
		waitUntil(last.Finished.Add(short))
		require.Equal(t, journal.Swept{Emptied: 2}, j.sweep(t, time.Hour))
		require.Equal(t, journal.Swept{}, j.sweep(t, time.Hour))
		require.Equal(t, journal.Swept{Deleted: 2}, j.sweep(t, short))
		for _, op := range ops {
			j.requireNone(t, op)
		}
		e := j.claim(t, payment("done"))
		require.Equal(t, 1, e.Generation)
		require.Equal(t, payment("done").Key, e.Key)
	}},
	{"pending entries are not touched", long, func(t *testing.T, j kit) {
		claimed, released := payment("1"), payment("2")
		claimed.Window, released.Window = 0, 0
		claimed.Request, released.Request = []byte("sealed request"), []byte("sealed request")
		j.claim(t, claimed)
		e := j.release(t, j.claim(t, released), journal.Note{Status: 503})
		stored := j.get(t, claimed.Operation)
		waitUntil(stored.FirstSend.Add(5 * time.Millisecond))
		for _, keep := range []time.Duration{0, time.Nanosecond} {
			require.Equal(t, journal.Swept{}, j.sweep(t, keep))
		}
		j.requireStored(t, stored)
		j.requireStored(t, e)
	}},
}
