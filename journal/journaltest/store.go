package journaltest

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

var contention = []check{
	{"of 50 who begin one operation at once exactly one has the claim", long, func(t *testing.T, j kit) {
		const callers = 50
		entries, errs := make([]journal.Entry, callers), make([]error, callers)
		var barrier, all sync.WaitGroup
		barrier.Add(1)
		for n := range callers {
			all.Go(func() {
				in := payment("1")
				in.Key = fmt.Sprint("key ", n)
				barrier.Wait()
				entries[n], errs[n] = j.Begin(t.Context(), in)
			})
		}
		barrier.Done()
		all.Wait()

		claimed := 0
		for n, err := range errs {
			if err == nil {
				claimed++
				require.Equal(t, fmt.Sprint("key ", n), entries[n].Key, "whose claim it is, theirs is the key")
			} else {
				require.ErrorIs(t, err, journal.ErrClaimed)
			}
			require.Equal(t, entries[0].Key, entries[n].Key, "all see one key")
		}
		require.Equal(t, 1, claimed)
		require.EqualValues(t, 1, j.get(t, payment("1").Operation).Fence)
	}},
	{"of 50 who take over at once exactly one has the claim", short, func(t *testing.T, j kit) {
		const callers = 50
		in := payment("1")
		first := j.claim(t, in)
		waitUntil(first.Lease)
		errs, fences := make([]error, callers), make([]int64, callers)
		var barrier, all sync.WaitGroup
		barrier.Add(1)
		for n := range callers {
			all.Go(func() {
				barrier.Wait()
				e, err := j.Begin(t.Context(), in)
				errs[n], fences[n] = err, e.Fence
			})
		}
		barrier.Done()
		all.Wait()

		claimed := map[int64]bool{} // by fence: a slow store may outlast the lease
		for n, err := range errs {
			if err == nil {
				require.Greater(t, fences[n], first.Fence)
				require.False(t, claimed[fences[n]], "two hold claim %d", fences[n])
				claimed[fences[n]] = true
				continue
			}
			require.ErrorIs(t, err, journal.ErrClaimed)
		}
		require.NotEmpty(t, claimed)
		require.EqualValues(t, int(first.Fence)+len(claimed), j.get(t, in.Operation).Fence)
	}},
	{"no resume claims what waits for its caller, however they meet", long, func(t *testing.T, j kit) {
		const resumes, calls = 8, 100
		in := payment("1")
		e := j.claim(t, in)
		var all sync.WaitGroup
		ended := make(chan struct{})
		for range resumes {
			all.Go(func() {
				in := in
				in.MaxResumes = 5
				for {
					switch e, err := j.Begin(t.Context(), in); {
					case err != nil && !errors.Is(err, journal.ErrClaimed):
						t.Errorf("a resume: %v", err)
						return
					case err == nil && (e.Owner != "" || !e.Clear):
						t.Errorf("a resume has claim %d; Clear: %v", e.Fence, e.Clear)
						return
					}
					select {
					case <-ended:
						return
					default:
					}
				}
			})
		}
		for range calls {
			time.Sleep(50 * time.Microsecond) // the resumes have to meet it
			if _, err := j.Release(t.Context(), e, journal.Note{Clear: true}); err != nil {
				t.Errorf("the caller: %v", err)
				break
			}
			time.Sleep(50 * time.Microsecond) // as above
			next, err := j.Begin(t.Context(), in)
			if err != nil || !next.Clear || next.Fence != e.Fence+1 {
				t.Errorf("the caller: claim %d after %d, Clear: %v, %v", next.Fence, e.Fence, next.Clear, err)
				break
			}
			e = next
		}
		close(ended)
		all.Wait()
	}},
	{"64 callers of many operations never hold one together and lose nothing", long, func(t *testing.T, j kit) {
		const callers, operations, passes, last = 64, 16, 4, 6
		var holders, claimed, done [operations]atomic.Int64
		var all sync.WaitGroup
		for n := range callers {
			all.Go(func() {
				for i := range passes * operations {
					k := (n + i) % operations
					e, err := j.Begin(t.Context(), payment(fmt.Sprint(k)))
					switch {
					case errors.Is(err, journal.ErrClaimed):
						continue
					case err != nil:
						t.Errorf("Begin: %v", err)
						return
					case e.State == journal.Done:
						continue
					}
					if h := holders[k].Add(1); h != 1 {
						t.Errorf("%d hold operation %d", h, k)
					}
					if c := claimed[k].Add(1); c != e.Fence {
						t.Errorf("claim %d of operation %d has fence %d", c, k, e.Fence)
					}
					if _, err = j.Renew(t.Context(), e, journal.Note{Status: 202}); err != nil {
						t.Errorf("Renew: %v", err)
					}
					holders[k].Add(-1)
					if e.Fence < last {
						_, err = j.Release(t.Context(), e, journal.Note{Attempts: 1})
					} else {
						done[k].Add(1)
						_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Attempts: 1})
					}
					if err != nil {
						t.Errorf("the end of claim %d: %v", e.Fence, err)
					}
				}
			})
		}
		all.Wait()
		for k := range operations {
			e := j.get(t, payment(fmt.Sprint(k)).Operation)
			require.Equal(t, claimed[k].Load(), e.Fence, "claims of operation %d", k)
			require.EqualValues(t, claimed[k].Load(), e.Attempts, "attempts of operation %d", k)
			require.LessOrEqual(t, done[k].Load(), int64(1))
			require.Equal(t, done[k].Load() == 1, e.State == journal.Done)
			require.Empty(t, e.Owner)
		}
	}},
	{"readers and sweeps beside writers see whole entries", long, func(t *testing.T, j kit) {
		const writers, each = 4, 8
		var writing, all sync.WaitGroup
		ended := make(chan struct{})
		for n := range writers {
			writing.Go(func() {
				for i := range each {
					in := payment(fmt.Sprint(n, " ", i))
					in.Window, in.Request = time.Hour, []byte("sealed request of "+in.ID)
					e, err := j.Begin(t.Context(), in)
					if err == nil && i%2 == 0 {
						_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Attempts: 1})
					}
					if err != nil {
						t.Errorf("write: %v", err)
					}
				}
			})
		}
		for range 2 {
			all.Go(func() {
				for {
					for e, err := range j.Pending(t.Context()) {
						if err != nil || e.State != journal.Pending || e.Owner == "" || string(e.Request) != "sealed request of "+e.ID {
							t.Errorf("Pending: %v, %v", e.Operation, err)
							return
						}
					}
					if s, err := j.Sweep(t.Context(), time.Hour); err != nil || s != (journal.Swept{}) {
						t.Errorf("Sweep: %+v, %v", s, err)
						return
					}
					select {
					case <-ended:
						return
					default:
					}
				}
			})
		}
		writing.Wait()
		close(ended)
		all.Wait()
		require.Len(t, j.pending(t), writers*each/2)
	}},
}

// awkward strings are told apart by their bytes: none is folded, trimmed, cut
// or normalised. Intent.Check lets all of them pass.
var awkward = []string{
	"a", "A", "a ", " a", "a\n", "a\x00", "a\x00b", "\x00", "'", `"`, "''", `\`, `\'`, "`", "%", "_", "a%", "?", "$1", ":id", "--", ";", "/", "a/b",
	"\xff", "\xff\xfe", "\xc3\x28", "\xed\xa0\x80", "é", "e\u0301", "ß", "ss", "İ", "i̇", "\u200b", "\ufeff", "\U0001f4b8", "NULL", "0", "00", "1e3",
	strings.Repeat("x", 255), strings.Repeat("\xff", 255),
}

var fidelity = []check{
	{"any string is stored as it is and told apart by its bytes", long, func(t *testing.T, j kit) {
		position := map[string]func(in *journal.Intent) *string{
			"scope": func(in *journal.Intent) *string { return &in.Scope },
			"name":  func(in *journal.Intent) *string { return &in.Name },
			"id":    func(in *journal.Intent) *string { return &in.ID },
		}
		begun := map[journal.Operation]string{}
		for _, field := range position {
			for i, s := range awkward {
				in := payment("1")
				in.Key, in.NextKey = s, s
				*field(&in) = s
				if _, again := begun[in.Operation]; again {
					continue
				}
				e, err := j.Begin(t.Context(), in)
				require.NoError(t, err, "%q", in.Operation)
				require.Equal(t, in.Operation, e.Operation)
				require.Equal(t, s, e.Key)
				require.Equal(t, 1, e.Generation)
				n := journal.Note{Reference: awkward[len(awkward)-1-i]}
				j.release(t, e, n)
				begun[in.Operation] = s
			}
		}
		pending := j.pending(t)
		require.Len(t, pending, len(begun))
		for _, e := range pending {
			require.Equal(t, begun[e.Operation], e.Key, "%q", e.Operation)
			j.requireStored(t, e)
		}
		for i, e := range pending[:len(awkward)] {
			d := j.decide(t, e.Operation, journal.Decision{State: journal.Refused, Reference: awkward[i], Reason: awkward[i]})
			require.Equal(t, awkward[i], d.Reference)
		}
	}},
	{"sealed bytes come back as they went in", long, func(t *testing.T, j kit) {
		every := make([]byte, 256)
		for i := range every {
			every[i] = byte(i)
		}
		large := bytes.Repeat(every, 4096)
		in := payment("1")
		in.Request = large
		require.Equal(t, large, j.claim(t, in).Request)
		e := j.get(t, in.Operation)
		require.True(t, bytes.Equal(large, e.Request))
		got := j.finish(t, e, journal.Done, journal.Note{Answer: every})
		require.True(t, bytes.Equal(large, got.Request))
		require.Equal(t, every, got.Answer)
		again, err := j.Begin(t.Context(), in)
		require.NoError(t, err)
		requireSame(t, got, again)
	}},
	{"numbers come back as they went in", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.Window = 400*24*time.Hour + time.Nanosecond
		e := j.claim(t, in)
		require.Equal(t, in.Window, e.Window)
		got := j.finish(t, e, journal.Done, journal.Note{Attempts: 1 << 30, Status: 999})
		require.Equal(t, in.Window, got.Window)
		require.Equal(t, 1<<30, got.Attempts)
		require.Equal(t, 999, got.Status)
	}},
	{"times are kept to the microsecond, those returned too", short, func(t *testing.T, j kit) {
		whole := func(e journal.Entry) {
			t.Helper()
			for _, at := range []time.Time{e.Created, e.FirstSend, e.Lease, e.Finished, e.Expires} {
				require.True(t, at.IsZero() || at.Equal(at.Truncate(time.Microsecond)), "%v", at)
			}
		}
		at := time.Date(2023, 3, 4, 5, 6, 7, 123456789, time.UTC)
		in := payment("1")
		in.Started = at.In(time.FixedZone("east", 5*3600+1800))
		e := j.claim(t, in)
		whole(e)
		require.True(t, e.FirstSend.Equal(at.Truncate(time.Microsecond)), "%v", e.FirstSend)
		e = j.takeOver(t, in, e)
		whole(e)
		require.True(t, e.FirstSend.Equal(at.Truncate(time.Microsecond)), "%v", e.FirstSend)
		renewed, err := j.Renew(t.Context(), e, journal.Note{})
		require.NoError(t, err)
		whole(renewed)
		whole(j.finish(t, e, journal.Refused, journal.Note{}))
		e = j.claim(t, in)
		whole(e)
		whole(j.release(t, e, journal.Note{}))
		whole(j.decide(t, in.Operation, journal.Decision{State: journal.Done, Reason: "r"}))

		far := time.Date(2199, 12, 31, 23, 59, 59, 999999999, time.FixedZone("west", -8*3600))
		d := j.claim(t, event("1", far))
		whole(d)
		require.True(t, d.Expires.Equal(far.Truncate(time.Microsecond)), "%v", d.Expires)
		require.True(t, j.get(t, d.Operation).Expires.Equal(d.Expires))
	}},
	{"entries share no memory with the store", long, func(t *testing.T, j kit) {
		in := payment("1")
		in.Request, in.Content = []byte("sealed request"), digest("body")
		e := j.claim(t, in)
		want := j.get(t, in.Operation)
		scribble := func(of ...[]byte) {
			for _, b := range of {
				for i := range b {
					b[i] ^= 0xff
				}
			}
		}
		copied := plain(want)
		scribble(in.Request, in.Content, e.Fingerprint, e.Request)
		j.requireStored(t, copied)
		scribble(want.Fingerprint, want.Request)
		j.requireStored(t, copied)
		for p, err := range j.Pending(t.Context()) {
			require.NoError(t, err)
			scribble(p.Fingerprint, p.Request)
		}
		j.requireStored(t, copied)
		claimed, err := j.Begin(t.Context(), payment("1")) // another request now: the digest of it is another
		require.ErrorIs(t, err, journal.ErrMismatch)
		scribble(claimed.Fingerprint, claimed.Request)
		j.requireStored(t, copied)

		n := journal.Note{Answer: []byte("sealed answer")}
		done, err := j.Finish(t.Context(), e, journal.Done, n)
		require.NoError(t, err)
		copied = plain(done)
		scribble(n.Answer, done.Fingerprint, done.Request, done.Answer)
		j.requireStored(t, copied)
		again, err := j.Finish(t.Context(), e, journal.Done, n)
		require.NoError(t, err)
		scribble(again.Fingerprint, again.Request, again.Answer)
		j.requireStored(t, copied)
	}},
}

var arguments = []check{
	{"an intent that cannot work is ErrInvalid, names field and limit, and changes nothing", long, func(t *testing.T, j kit) {
		const many = 256
		for _, c := range []struct {
			edit  func(in *journal.Intent)
			names []string
		}{
			{func(in *journal.Intent) { in.Scope = strings.Repeat("s", many) }, []string{"Intent.Scope", "256", "0 to 255"}},
			{func(in *journal.Intent) { in.Name = strings.Repeat("n", many) }, []string{"Intent.Name", "256", "1 to 255"}},
			{func(in *journal.Intent) { in.Name = "" }, []string{"Intent.Name", "1 to 255"}},
			{func(in *journal.Intent) { in.ID = strings.Repeat("i", many) }, []string{"Intent.ID", "256", "1 to 255"}},
			{func(in *journal.Intent) { in.ID = "" }, []string{"Intent.ID", "1 to 255"}},
			{func(in *journal.Intent) { in.Key = strings.Repeat("k", many) }, []string{"Intent.Key", "256", "255"}},
			{func(in *journal.Intent) { in.Key = "" }, []string{"Intent.Key"}},
			{func(in *journal.Intent) { in.NextKey = strings.Repeat("k", many) }, []string{"Intent.NextKey", "256", "255"}},
			{func(in *journal.Intent) { in.NextKey = "" }, []string{"NextKey"}},
			{func(in *journal.Intent) { in.Window = -1 }, []string{"Intent.Window", "-1ns", "0"}},
			{func(in *journal.Intent) { in.MaxResumes = -1 }, []string{"Intent.MaxResumes", "-1", "0"}},
		} {
			in := payment("1")
			c.edit(&in)
			require.ErrorIs(t, in.Check(), journal.ErrInvalid)
			_, err := j.Begin(t.Context(), in)
			require.ErrorIs(t, err, journal.ErrInvalid)
			for _, name := range c.names {
				require.ErrorContains(t, err, name)
			}
			j.requireNone(t, in.Operation)
		}
		require.Empty(t, j.pending(t))
	}},
	{"an invalid intent does not claim what is there", long, func(t *testing.T, j kit) {
		in := payment("1")
		stored := j.release(t, j.claim(t, in), journal.Note{})
		in.Window = -1
		_, err := j.Begin(t.Context(), in)
		require.ErrorIs(t, err, journal.ErrInvalid)
		j.requireStored(t, stored)
	}},
	{"names and keys of 255 bytes and no scope work", long, func(t *testing.T, j kit) {
		in := payment(strings.Repeat("i", 255))
		in.Scope, in.Name = "", strings.Repeat("n", 255)
		in.Key, in.NextKey = strings.Repeat("k", 255), strings.Repeat("K", 255)
		e := j.claim(t, in)
		require.Equal(t, in.Key, e.Key)
		j.finish(t, e, journal.Refused, journal.Note{})
		require.Equal(t, in.NextKey, j.claim(t, in).Key)
	}},
}
