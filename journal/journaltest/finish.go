package journaltest

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

var finishing = []check{
	{"Finish stores what the call knows and ends the claim", long, func(t *testing.T, j kit) {
		for _, s := range []journal.State{journal.Done, journal.Refused} {
			in := payment(s.String())
			in.Request = []byte("sealed request")
			e := j.claim(t, in)
			want, before := j.get(t, in.Operation), time.Now()
			got := j.finish(t, e, s, journal.Note{Attempts: 3, Status: 201, Reference: "pi_1", Answer: []byte("sealed answer")})
			require.WithinRange(t, got.Finished, before.Add(-skew), time.Now().Add(skew))
			want.State, want.Finished, want.Owner, want.Lease = s, got.Finished, "", time.Time{}
			want.Attempts, want.Status, want.Reference, want.Answer = 3, 201, "pi_1", []byte("sealed answer")
			requireSame(t, want, got)
		}
	}},
	{"Finish keeps what its note does not have", long, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		j.release(t, e, journal.Note{Attempts: 2, Status: 503, Reference: "pi_1"})
		got := j.finish(t, j.claim(t, in), journal.Done, journal.Note{Attempts: 1})
		require.Equal(t, 3, got.Attempts, "attempts add up")
		require.Equal(t, 503, got.Status)
		require.Equal(t, "pi_1", got.Reference)
		require.Empty(t, got.Answer)
	}},
	{"a second Finish of the same claim with the same state changes nothing", long, func(t *testing.T, j kit) {
		for _, s := range []journal.State{journal.Done, journal.Refused} {
			e := j.claim(t, payment(s.String()))
			first := j.finish(t, e, s, journal.Note{Attempts: 1, Status: 201, Reference: "pi_1", Answer: []byte("sealed answer")})
			got, err := j.Finish(t.Context(), e, s, journal.Note{Attempts: 1, Status: 500, Reference: "pi_2", Answer: []byte("another")})
			require.NoError(t, err)
			requireSame(t, first, got)
			j.requireStored(t, first)
		}
	}},
	{"a second Finish with another state is ErrClaimLost", long, func(t *testing.T, j kit) {
		for s, other := range map[journal.State]journal.State{journal.Done: journal.Refused, journal.Refused: journal.Done} {
			e := j.claim(t, payment(s.String()))
			first := j.finish(t, e, s, journal.Note{})
			_, err := j.Finish(t.Context(), e, other, journal.Note{})
			require.ErrorIs(t, err, journal.ErrClaimLost)
			j.requireStored(t, first)
		}
	}},
	{"Finish makes nothing but done and refused", long, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		stored := j.get(t, e.Operation)
		for _, s := range []journal.State{journal.Pending, -1, 3} {
			_, err := j.Finish(t.Context(), e, s, journal.Note{})
			require.ErrorIs(t, err, journal.ErrInvalid)
			require.ErrorContains(t, err, "State")
			require.ErrorContains(t, err, s.String())
		}
		j.requireStored(t, stored)
	}},
}

var releasing = []check{
	{"Release ends the claim and leaves the entry pending", long, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		want := j.get(t, in.Operation)
		got := j.release(t, e, journal.Note{Attempts: 2, Status: 503, Reference: "pi_1", Answer: []byte("not stored")})
		want.Owner, want.Lease = "", time.Time{}
		want.Attempts, want.Status, want.Reference = 2, 503, "pi_1"
		requireSame(t, want, got)

		e = j.claim(t, in)
		require.True(t, e.FirstSend.Equal(want.FirstSend))
		require.False(t, e.Clear, "it may have had an effect")
		got = j.release(t, e, journal.Note{Attempts: 3})
		require.Equal(t, 5, got.Attempts, "attempts add up")
		require.Equal(t, 503, got.Status)
		require.Equal(t, "pi_1", got.Reference)
	}},
	{"what was proved not to be sent has no first send", long, func(t *testing.T, j kit) {
		in := payment("1")
		for _, told := range []bool{false, true} { // the caller
			e := j.claim(t, in)
			require.True(t, e.FirstSend.IsZero())
			require.False(t, j.get(t, in.Operation).FirstSend.IsZero(), "it may be sent now")
			got := j.release(t, e, journal.Note{NotSent: true, Clear: told})
			require.True(t, got.FirstSend.IsZero())
			require.Equal(t, told, got.Clear)
		}
		e := j.claim(t, in)
		require.True(t, e.FirstSend.IsZero())
		require.True(t, e.Clear, "of before")
	}},
	{"what had no effect is clear, but was sent", long, func(t *testing.T, j kit) {
		in := payment("1")
		e := j.claim(t, in)
		first := j.get(t, in.Operation).FirstSend
		got := j.release(t, e, journal.Note{Clear: true})
		require.True(t, got.Clear)
		require.True(t, got.FirstSend.Equal(first))
		e = j.claim(t, in)
		require.True(t, e.Clear, "of before")
		require.True(t, e.FirstSend.Equal(first))
		require.False(t, j.get(t, in.Operation).Clear, "it may be sent now")
		require.False(t, j.release(t, e, journal.Note{}).Clear)
		require.False(t, j.claim(t, in).Clear)
	}},
	{"the key window begins anew with the claim after what had no effect, and only then", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.Started = time.Now().Add(-time.Hour)
		started := in.Started.Truncate(time.Microsecond)
		j.release(t, j.claim(t, in), journal.Note{})
		e := j.claim(t, in)
		require.True(t, j.get(t, in.Operation).FirstSend.Equal(started), "it may have had an effect then")
		require.True(t, j.release(t, e, journal.Note{Clear: true}).FirstSend.Equal(started), "nobody has sent it since")

		before := time.Now()
		e = j.claim(t, in)
		require.True(t, e.FirstSend.Equal(started), "of before")
		anew := j.get(t, in.Operation).FirstSend
		require.WithinRange(t, anew, before.Add(-skew), time.Now().Add(skew))
		j.release(t, e, journal.Note{})
		require.True(t, j.claim(t, in).FirstSend.Equal(anew))
		require.True(t, j.get(t, in.Operation).FirstSend.Equal(anew), "this one may have had an effect")
	}},
	{"a claim that ends with its process is not clear", short, func(t *testing.T, j kit) {
		in := payment("1")
		j.release(t, j.claim(t, in), journal.Note{NotSent: true})
		e := j.takeOver(t, in, j.claim(t, in))
		require.False(t, e.Clear)
		require.False(t, e.FirstSend.IsZero())
	}},
	{"a released entry can be claimed at once, with the same key", long, func(t *testing.T, j kit) {
		in := payment("1")
		first := j.claim(t, in)
		j.release(t, first, journal.Note{NotSent: true})
		in.Key, in.NextKey = "another", "another still"
		e := j.claim(t, in)
		require.Equal(t, first.Key, e.Key)
		require.Equal(t, 1, e.Generation)
		require.Equal(t, first.Fence+1, e.Fence)
	}},
}

var decisions = []check{
	{"a person decides what became of a pending entry", long, func(t *testing.T, j kit) {
		for word, d := range map[string]journal.Decision{
			"executed":  {State: journal.Done, Reference: "pi_2", Reason: "seen in the dashboard"},
			"refused":   {State: journal.Refused, Reference: "pi_2", Reason: "declined in the dashboard"},
			"abandoned": {State: journal.Refused, Abandon: true, Reference: "pi_2", Reason: "nobody knows"},
		} {
			in := payment(word)
			want := j.release(t, j.claim(t, in), journal.Note{Attempts: 3, Status: 503, Reference: "pi_1"})
			before := time.Now()
			got := j.decide(t, in.Operation, d)
			require.WithinRange(t, got.Finished, before.Add(-skew), time.Now().Add(skew))
			require.GreaterOrEqual(t, got.Fence, want.Fence)
			want.State, want.Decision, want.Reason, want.Reference = d.State, word, d.Reason, "pi_2"
			want.Finished, want.Fence = got.Finished, got.Fence
			requireSame(t, want, got)
		}
	}},
	{"a decision without a reference keeps the one that is known", long, func(t *testing.T, j kit) {
		in := payment("1")
		j.release(t, j.claim(t, in), journal.Note{Reference: "pi_1"})
		require.Equal(t, "pi_1", j.decide(t, in.Operation, journal.Decision{State: journal.Done, Reason: "r"}).Reference)
	}},
	{"what a person found done stays done, what was given up is free for a new key", long, func(t *testing.T, j kit) {
		in := payment("1")
		j.release(t, j.claim(t, in), journal.Note{})
		stored := j.decide(t, in.Operation, journal.Decision{State: journal.Done, Reason: "r"})
		got, err := j.Begin(t.Context(), in)
		require.NoError(t, err)
		requireSame(t, stored, got)

		in = payment("2")
		j.release(t, j.claim(t, in), journal.Note{})
		j.decide(t, in.Operation, journal.Decision{State: journal.Refused, Abandon: true, Reason: "r"})
		e := j.claim(t, in)
		require.Equal(t, in.NextKey, e.Key)
		require.Equal(t, 2, e.Generation)
	}},
	{"nobody decides while somebody works on it", long, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		stored := j.get(t, e.Operation)
		_, err := j.Decide(t.Context(), e.Operation, journal.Decision{State: journal.Done, Reason: "r"})
		require.ErrorIs(t, err, journal.ErrClaimed)
		j.requireStored(t, stored)
		j.finish(t, e, journal.Done, journal.Note{})
	}},
	{"a claim that has ended does not keep a person from deciding", short, func(t *testing.T, j kit) {
		e := j.claim(t, payment("1"))
		waitUntil(e.Lease)
		got := j.decide(t, e.Operation, journal.Decision{State: journal.Refused, Reason: "r"})
		require.Empty(t, got.Owner)
		require.True(t, got.Lease.IsZero())
	}},
	{"what is finished is not decided again", long, func(t *testing.T, j kit) {
		for _, s := range []journal.State{journal.Done, journal.Refused} {
			stored := j.finish(t, j.claim(t, payment(s.String())), s, journal.Note{})
			for _, d := range []journal.Decision{
				{State: journal.Done, Reason: "r"}, {State: journal.Refused, Reason: "r"}, {State: journal.Refused, Abandon: true, Reason: "r"},
			} {
				_, err := j.Decide(t.Context(), stored.Operation, d)
				require.ErrorIs(t, err, journal.ErrFinished)
			}
			j.requireStored(t, stored)
		}
	}},
	{"there is nothing to decide about an entry that is not there", long, func(t *testing.T, j kit) {
		op := payment("1").Operation
		_, err := j.Decide(t.Context(), op, journal.Decision{State: journal.Done, Reason: "r"})
		require.ErrorIs(t, err, journal.ErrNotFound)
		j.requireNone(t, op)
	}},
	{"a decision that makes no sense is ErrInvalid and names field and limit", long, func(t *testing.T, j kit) {
		stored := j.release(t, j.claim(t, payment("1")), journal.Note{})
		for _, c := range []struct {
			d     journal.Decision
			names []string
		}{
			{journal.Decision{Reason: "r"}, []string{"Decision.State", "pending", "done or refused"}},
			{journal.Decision{State: 3, Reason: "r"}, []string{"Decision.State", "state 3", "done or refused"}},
			{journal.Decision{State: journal.Done, Abandon: true, Reason: "r"}, []string{"Decision.State", "done", "refused"}},
			{journal.Decision{State: journal.Done}, []string{"Decision.Reason", "0 bytes", "1 to 1000"}},
			{journal.Decision{State: journal.Done, Reason: strings.Repeat("r", 1001)}, []string{"Decision.Reason", "1001 bytes", "1 to 1000"}},
		} {
			_, err := j.Decide(t.Context(), stored.Operation, c.d)
			require.ErrorIs(t, err, journal.ErrInvalid)
			for _, name := range c.names {
				require.ErrorContains(t, err, name)
			}
		}
		j.requireStored(t, stored)
		j.decide(t, stored.Operation, journal.Decision{State: journal.Done, Reason: strings.Repeat("r", 1000)})
	}},
}
