package journaltest

import (
	"crypto/sha256"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

var creation = []check{
	{"a new operation is created and claimed", long, func(t *testing.T, j kit) {
		in, before := payment("1"), time.Now()
		in.Request = []byte("sealed request")
		e := j.claim(t, in)
		require.Equal(t, in.Key, e.Key)
		require.Equal(t, 1, e.Generation)
		require.WithinRange(t, e.Created, before.Add(-skew), time.Now().Add(skew))
		require.Equal(t, in.Window, e.Window)
		require.Equal(t, in.Request, e.Request)
		require.Zero(t, e.Attempts)
		require.Zero(t, e.Resumes)
		require.Zero(t, e.Status)
		require.Empty(t, e.Reference)
		require.Empty(t, e.Decision)
		require.Empty(t, e.Answer)
		require.True(t, e.Finished.IsZero())
		require.True(t, e.Expires.IsZero())
		require.False(t, e.Differs)
		require.False(t, e.Enlisted, "nobody relies on a resume")
	}},
	{"the fingerprint has a part for the shape and one for the content, and shows neither", long, func(t *testing.T, j kit) {
		with, without := payment("1"), payment("2")
		without.Content = nil
		a, b := j.claim(t, with).Fingerprint, j.claim(t, without).Fingerprint
		require.Len(t, a, 2*sha256.Size)
		require.Equal(t, a[:sha256.Size], b)
		require.NotContains(t, string(a), string(with.Shape[:]))
		require.NotContains(t, string(a), string(with.Content))
	}},
	{"Begin returns FirstSend and Clear of before and stores that the key may be sent now", long, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		require.True(t, e.FirstSend.IsZero(), "nothing was sent before")
		require.False(t, e.Clear, "there was no call before to say so")
		stored := j.get(t, in.Operation)
		require.False(t, stored.FirstSend.IsZero())
		require.WithinRange(t, stored.FirstSend, stored.Created, time.Now().Add(skew))
		e.FirstSend = stored.FirstSend
		requireSame(t, e, stored)
	}},
	{"an operation that may have been sent before the journal knew it has its start as first send", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.Started = time.Now().Add(-time.Hour)
		e := j.claim(t, in)
		require.True(t, e.FirstSend.Equal(in.Started.Truncate(time.Microsecond)), "%v", e.FirstSend)
		require.False(t, e.Clear)
		stored := j.get(t, in.Operation)
		requireSame(t, e, stored)
	}},
	{"a resume of an operation without an entry is ErrNotFound and creates nothing", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.MaxResumes = 5
		_, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrNotFound)
		j.requireNone(t, in.Operation)
		in.MaxResumes = 0
		e := j.claim(t, in)
		require.EqualValues(t, 1, e.Fence)
		require.Zero(t, e.Resumes)
	}},
}

var claims = []check{
	{"a live claim is ErrClaimed, with the entry", long, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		stored := j.get(t, in.Operation)
		in.Key, in.NextKey = "another", "another still"
		got, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrClaimed)
		requireSame(t, stored, got)
		require.Equal(t, e.Key, got.Key)
		j.requireStored(t, stored)
	}},
	{"a claim holds until its lease ends, then anybody takes it over", short, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		for {
			asked := time.Now()
			got, err := j.Begin(t.Context(), in)
			if err == nil {
				require.False(t, time.Now().Before(e.Lease), "taken over %v early", time.Until(e.Lease))
				require.Greater(t, got.Fence, e.Fence)
				return
			}
			require.ErrorIs(t, err, journal.ErrClaimed)
			require.True(t, asked.Sub(e.Lease) < 10*time.Second, "still claimed long after its lease")
			time.Sleep(5 * time.Millisecond) // the lease has to end in real time
		}
	}},
	{"who takes over has the same key and the next fence, and sees what may have been sent", short, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		stored := j.get(t, in.Operation)
		in.Key, in.NextKey = "another", "another still"
		got := j.takeOver(t, in, e)
		require.Equal(t, e.Key, got.Key)
		require.Equal(t, 1, got.Generation)
		require.Equal(t, e.Fence+1, got.Fence)
		require.True(t, got.FirstSend.Equal(stored.FirstSend), "of the first claim")
		require.False(t, got.Clear, "the first owner may have sent it")
		require.True(t, got.Created.Equal(e.Created))
		j.requireStored(t, got)
	}},
	{"what was begun without a request stores that of who takes over", short, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		in.Request = []byte("sealed request")
		got := j.takeOver(t, in, e)
		require.Equal(t, in.Request, got.Request)
		in.Request = []byte("another")
		got = j.takeOver(t, in, got)
		require.Equal(t, []byte("sealed request"), got.Request, "the first one stays")
		j.requireStored(t, got)
	}},
	{"Renew extends the claim and notes status and reference", long, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		before := j.get(t, e.Operation)
		time.Sleep(2 * time.Millisecond) // so that the new lease is later
		start := time.Now()
		got, err := j.Renew(t.Context(), e, journal.Note{
			Attempts: 3, Status: 202, Reference: "pi_1", Answer: []byte("not yet"), NotSent: true, Clear: true, Orderly: true,
		})
		require.NoError(t, err)
		require.True(t, got.Lease.After(e.Lease), "%v is not after %v", got.Lease, e.Lease)
		j.requireLease(t, got, start)
		j.requireStored(t, got)
		want := before
		want.Lease, want.Status, want.Reference = got.Lease, 202, "pi_1"
		requireSame(t, want, got) // attempts, answer, sends and resumes are not Renew's
		require.Equal(t, e.Fence, got.Fence)
	}},
	{"Renew keeps the status and reference that its note does not have", long, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		_, err := j.Renew(t.Context(), e, journal.Note{Status: 202, Reference: "pi_1"})
		require.NoError(t, err)
		got, err := j.Renew(t.Context(), e, journal.Note{})
		require.NoError(t, err)
		require.Equal(t, 202, got.Status)
		require.Equal(t, "pi_1", got.Reference)
		j.requireStored(t, got)
	}},
	{"a renewed claim outlasts its first lease", 2 * short, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		waitUntil(e.Lease.Add(-short))
		renewed, err := j.Renew(t.Context(), e, journal.Note{})
		require.NoError(t, err)
		waitUntil(e.Lease)
		if _, err = j.Begin(t.Context(), in); err == nil {
			require.False(t, time.Now().Before(renewed.Lease), "taken over %v early", time.Until(renewed.Lease))
			return // the machine was too slow
		}
		require.ErrorIs(t, err, journal.ErrClaimed)
		j.takeOver(t, in, renewed)
	}},
	{"an ended lease that nobody took over can be renewed", short, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		waitUntil(e.Lease)
		start := time.Now()
		got, err := j.Renew(t.Context(), e, journal.Note{})
		require.NoError(t, err)
		j.requireLease(t, got, start)
		require.True(t, got.Lease.After(e.Lease))
		j.requireStored(t, got)
	}},
	{"an ended lease that nobody took over can be finished", short, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		waitUntil(e.Lease)
		j.finish(t, e, journal.Done, journal.Note{})
	}},
	{"an ended lease that nobody took over can be released", short, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		waitUntil(e.Lease)
		j.release(t, e, journal.Note{})
	}},
	{"an entry that is not there has no claim", long, func(t *testing.T, j kit) {
		e := journal.Entry{Operation: payment("1").Operation, Generation: 1, Owner: "somebody", Fence: 1, Lease: time.Now().Add(long)}
		_, err := j.Renew(t.Context(), e, journal.Note{})
		require.ErrorIs(t, err, journal.ErrClaimLost)
		_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{})
		require.ErrorIs(t, err, journal.ErrClaimLost)
		_, err = j.Release(t.Context(), e, journal.Note{})
		require.ErrorIs(t, err, journal.ErrClaimLost)
		j.requireNone(t, e.Operation)
	}},
}

var fences = []check{
	{"a late owner can neither renew, finish nor release what was taken over", short, func(t *testing.T, j kit) {
		in := payment("1")
		late := j.claim(t, in)
		now := j.takeOver(t, in, late)
		j.requireLate(t, late)
		j.finish(t, now, journal.Done, journal.Note{})
	}},
	{"a late owner is late also when the claim was released", long, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		j.release(t, e, journal.Note{})
		j.requireLate(t, e)
	}},
	{"a late owner is late also when the entry is claimed anew", long, func(t *testing.T, j kit) {
		in := payment("1")
		late := j.claim(t, in)
		j.release(t, late, journal.Note{})
		now := j.claim(t, in)
		require.Greater(t, now.Fence, late.Fence)
		j.requireLate(t, late)
	}},
	{"a late owner does not change what another finished, the same state included", short, func(t *testing.T, j kit) {
		in := payment("1")
		late := j.claim(t, in)
		now := j.takeOver(t, in, late)
		j.finish(t, now, journal.Done, journal.Note{Reference: "pi_1"})
		j.requireLate(t, late)
		_, err := j.Renew(t.Context(), now, journal.Note{})
		require.ErrorIs(t, err, journal.ErrClaimLost)
		_, err = j.Release(t.Context(), now, journal.Note{})
		require.ErrorIs(t, err, journal.ErrClaimLost)
	}},
	{"a late owner of one generation does not touch the next", long, func(t *testing.T, j kit) {
		in := payment("1")
		late := j.claim(t, in)
		j.finish(t, late, journal.Refused, journal.Note{})
		j.claim(t, in)
		j.requireLate(t, late)
		late.Generation++
		j.requireLate(t, late) // the fence alone tells
	}},
	{"a late owner does not change what a person decided, the same state included", short, func(t *testing.T, j kit) {
		late := j.claim(t, payment("1"))
		waitUntil(late.Lease)
		j.decide(t, late.Operation, journal.Decision{State: journal.Done, Reason: "seen in the dashboard"})
		j.requireLate(t, late)
	}},
	{"each claim has a higher fence than the last", short, func(t *testing.T, j kit) {
		in := payment("1")
		var fence int64
		next := func(e journal.Entry) journal.Entry {
			t.Helper()
			require.Greater(t, e.Fence, fence)
			fence = e.Fence
			return e
		}
		e := next(j.claim(t, in))
		e = next(j.takeOver(t, in, e))
		j.release(t, e, journal.Note{NotSent: true})
		e = next(j.claim(t, in))
		j.finish(t, e, journal.Refused, journal.Note{})
		e = next(j.claim(t, in))
		j.release(t, e, journal.Note{})
		j.decide(t, in.Operation, journal.Decision{State: journal.Refused, Abandon: true, Reason: "given up"})
		_, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrInvalid, "its next key was used and refused")
		in.NextKey += " again"
		next(j.claim(t, in))
	}},
}

var mismatches = []check{
	{"another request is ErrMismatch while pending, with the entry", long, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		for range 2 { // a live claim, then none
			stored := j.get(t, in.Operation)
			for name, other := range others(in) {
				got, err := j.Begin(t.Context(), other)
				require.ErrorIs(t, err, journal.ErrMismatch, name)
				requireSame(t, stored, got)
				j.requireStored(t, stored)
			}
			if stored.Owner != "" {
				j.release(t, e, journal.Note{})
			}
		}
	}},
	{"another request is ErrMismatch when done, with the entry", long, func(t *testing.T, j kit) {
		in := payment("1")
		stored := j.finish(t, j.claim(t, in), journal.Done, journal.Note{Reference: "pi_1"})
		for name, other := range others(in) {
			got, err := j.Begin(t.Context(), other)
			require.ErrorIs(t, err, journal.ErrMismatch, name)
			requireSame(t, stored, got)
		}
		j.requireStored(t, stored)
	}},
	{"another request is ErrMismatch on a resume", long, func(t *testing.T, j kit) {
		in := payment("1")
		stored := j.release(t, j.claim(t, in), journal.Note{})
		for name, other := range others(in) {
			other.MaxResumes = 5
			_, err := j.Begin(t.Context(), other)
			require.ErrorIs(t, err, journal.ErrMismatch, name)
		}
		j.requireStored(t, stored)
	}},
	{"a request whose content is not known fits every content", long, func(t *testing.T, j kit) {
		in := payment("1")
		print := j.claim(t, in).Fingerprint
		in.Content = nil
		_, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrClaimed)
		j.release(t, j.get(t, in.Operation), journal.Note{})
		require.Equal(t, print, j.claim(t, in).Fingerprint, "what is known stays")
	}},
	{"the first content that is known is fixed", long, func(t *testing.T, j kit) {
		in := payment("1")
		known := in.Content
		in.Content = nil
		e := j.claim(t, in)
		j.release(t, e, journal.Note{})
		in.Content = known
		got := j.claim(t, in)
		require.Len(t, got.Fingerprint, 2*sha256.Size)
		require.Equal(t, e.Fingerprint, got.Fingerprint[:sha256.Size])
		j.release(t, got, journal.Note{})
		for name, other := range others(in) {
			_, err := j.Begin(t.Context(), other)
			require.ErrorIs(t, err, journal.ErrMismatch, name)
		}
	}},
	{"the first shape that is known is fixed", long, func(t *testing.T, j kit) {
		in := payment("1")
		unknown := in
		unknown.Shape, unknown.Content = [32]byte{}, nil
		e := j.claim(t, unknown)
		require.Empty(t, e.Fingerprint)
		j.release(t, e, journal.Note{})
		e = j.claim(t, in)
		require.Len(t, e.Fingerprint, 2*sha256.Size)
		j.release(t, e, journal.Note{})
		for name, other := range others(in) {
			_, err := j.Begin(t.Context(), other)
			require.ErrorIs(t, err, journal.ErrMismatch, name)
		}
		require.Equal(t, e.Fingerprint, j.claim(t, unknown).Fingerprint, "what is known stays")
	}},
}

// others are requests that in is not.
func others(in journal.Intent) map[string]journal.Intent {
	shape, content, length := in, in, in
	shape.Shape = sha256.Sum256([]byte("POST /v1/refunds 40"))
	content.Content = digest("1999.00 eur")
	length.Shape, length.Content = shape.Shape, nil
	return map[string]journal.Intent{"shape": shape, "content": content, "shape without a content": length}
}

var generations = []check{
	{"a refused operation starts anew with the next key and the request of now", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.Request, in.Started = []byte("first"), time.Now().Add(-time.Hour)
		e := j.claim(t, in)
		refused := j.finish(t, e, journal.Refused, journal.Note{Attempts: 2, Status: 402, Reference: "pi_1", Answer: []byte("declined")})
		time.Sleep(time.Millisecond) // so that the next generation is later

		next := others(in)["shape"]
		next.Request, next.Window = []byte("second"), time.Hour
		got := j.claim(t, next)
		require.Equal(t, 2, got.Generation)
		require.Equal(t, in.NextKey, got.Key)
		require.NotEqual(t, e.Fingerprint, got.Fingerprint)
		require.Greater(t, got.Fence, refused.Fence)
		require.True(t, got.Created.After(refused.Created))
		require.Equal(t, next.Request, got.Request)
		require.Equal(t, next.Window, got.Window)
		require.True(t, got.FirstSend.IsZero(), "the new key was not sent")
		require.False(t, got.Clear)
		require.Zero(t, got.Attempts)
		require.Zero(t, got.Resumes)
		require.Zero(t, got.Status)
		require.Empty(t, got.Reference)
		require.Empty(t, got.Answer)
		require.True(t, got.Finished.IsZero())

		_, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrMismatch, "the request of the first generation is forgotten")
	}},
	{"the key of a generation stays for takers-over, the next generation has another", short, func(t *testing.T, j kit) {
		in := payment("1")
		in.Key, in.NextKey = "k1", "k2"
		require.Equal(t, "k1", j.finish(t, j.claim(t, in), journal.Refused, journal.Note{}).Key)
		e := j.claim(t, in)
		require.Equal(t, "k2", e.Key)
		in.Key, in.NextKey = "k3", "k4"
		require.Equal(t, "k2", j.takeOver(t, in, e).Key)
		e = j.get(t, in.Operation)
		j.finish(t, e, journal.Refused, journal.Note{})
		e = j.claim(t, in)
		require.Equal(t, "k4", e.Key)
		require.Equal(t, 3, e.Generation)
	}},
	{"a next key that was refused already is ErrInvalid, with the entry, and begins nothing", long, func(t *testing.T, j kit) {
		in := payment("1")
		j.finish(t, j.claim(t, in), journal.Refused, journal.Note{})
		stored := j.finish(t, j.claim(t, in), journal.Refused, journal.Note{})
		require.Equal(t, in.NextKey, stored.Key)
		got, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrInvalid)
		require.ErrorContains(t, err, "Intent.NextKey")
		requireSame(t, stored, got)
		j.requireStored(t, stored)
		in.NextKey = "third-1"
		require.Equal(t, in.NextKey, j.claim(t, in).Key)

		d := event("1", time.Now().Add(time.Hour)) // which has no keys
		j.finish(t, j.claim(t, d), journal.Refused, journal.Note{})
		require.Equal(t, 2, j.claim(t, d).Generation)
	}},
	{"what a person decided is not in the next generation", long, func(t *testing.T, j kit) {
		in := payment("1")
		j.release(t, j.claim(t, in), journal.Note{})
		j.decide(t, in.Operation, journal.Decision{State: journal.Refused, Reference: "pi_1", Reason: "declined"})
		e := j.claim(t, in)
		require.Equal(t, 2, e.Generation)
		require.Empty(t, e.Decision)
		require.Empty(t, e.Reason)
		require.Empty(t, e.Reference)
	}},
	{"done is never begun again", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.Request = []byte("sealed request")
		stored := j.finish(t, j.claim(t, in), journal.Done, journal.Note{Attempts: 1, Status: 201, Reference: "pi_1", Answer: []byte("sealed answer")})
		for _, resumes := range []int{0, 5} {
			in.MaxResumes = resumes
			got, err := j.Begin(t.Context(), in)
			require.NoError(t, err)
			requireSame(t, stored, got)
			require.Empty(t, got.Owner, "not claimed")
		}
		j.requireStored(t, stored)
	}},
}

var resumes = []check{
	{"each resume is counted, other claims are not", short, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		again := in
		again.MaxResumes = 5
		e = j.takeOver(t, again, e)
		require.Equal(t, 1, e.Resumes)
		e = j.takeOver(t, in, e)
		require.Equal(t, 1, e.Resumes)
		j.release(t, e, journal.Note{})
		e = j.claim(t, again)
		require.Equal(t, 2, e.Resumes)
		j.requireStored(t, e)
	}},
	{"a resume of a live claim is ErrClaimed and not counted", long, func(t *testing.T, j kit) {
		in := payment("1")
		j.claim(t, in)
		stored := j.get(t, in.Operation)
		in.MaxResumes = 5
		_, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrClaimed)
		j.requireStored(t, stored)
	}},
	{"one resume too many is ErrAttention, with the entry", long, func(t *testing.T, j kit) {
		in := payment("1")
		j.release(t, j.claim(t, in), journal.Note{})
		in.MaxResumes = 2
		for n := 1; n <= in.MaxResumes; n++ {
			e := j.claim(t, in)
			require.Equal(t, n, e.Resumes)
			j.release(t, e, journal.Note{})
		}
		stored := j.get(t, in.Operation)
		got, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrAttention)
		requireSame(t, stored, got)
		require.Empty(t, got.Owner, "not claimed")
		j.requireStored(t, stored)

		more := in
		more.MaxResumes++
		e := j.claim(t, more)
		require.Equal(t, 3, e.Resumes)
		j.release(t, e, journal.Note{})
		in.MaxResumes = 0
		j.claim(t, in) // a caller who is there is no resume
	}},
	{"a resume that ends in an orderly way is taken back", long, func(t *testing.T, j kit) {
		in := payment("1")
		j.release(t, j.claim(t, in), journal.Note{})
		in.MaxResumes = 1
		for range 3 {
			require.Zero(t, j.release(t, j.claim(t, in), journal.Note{Orderly: true}).Resumes)
		}
		require.Equal(t, 1, j.release(t, j.claim(t, in), journal.Note{}).Resumes)
		_, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrAttention)
	}},
	{"an orderly end without a resume takes nothing back", long, func(t *testing.T, j kit) {
		require.Zero(t, j.release(t, j.claim(t, payment("1")), journal.Note{Orderly: true}).Resumes)
	}},
	{"a resume of a refused operation returns it and begins nothing", long, func(t *testing.T, j kit) {
		in := payment("1")
		stored := j.finish(t, j.claim(t, in), journal.Refused, journal.Note{Status: 402})
		in.MaxResumes = 5
		got, err := j.Begin(t.Context(), in)
		require.NoError(t, err)
		requireSame(t, stored, got)
		require.Empty(t, got.Owner, "not claimed")
		j.requireStored(t, stored)
	}},
	{"a resume of an entry that waits for its caller returns it and claims nothing", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.Started = time.Now().Add(-time.Hour) // so that a window that began anew would be seen
		stored := j.release(t, j.claim(t, in), journal.Note{Clear: true})
		asked := others(in)
		asked["the same request"] = in
		for name, in := range asked {
			for _, in.MaxResumes = range []int{1, 5} {
				got, err := j.Begin(t.Context(), in)
				require.NoError(t, err, name)
				requireSame(t, stored, got)
				require.Empty(t, got.Owner, "not claimed")
				j.requireStored(t, stored)
			}
		}
		e := j.claim(t, in) // its caller
		require.True(t, e.Clear)
		j.release(t, e, journal.Note{})
		in.MaxResumes = 5
		require.Equal(t, 1, j.claim(t, in).Resumes, "nobody waits for it any more")
	}},
}
