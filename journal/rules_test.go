package journal_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

// noon has nanoseconds, which no entry may keep.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.UTC)

var rules = journal.Rules{Owner: "me", Lease: time.Minute, Secret: journal.Secret{1, 2, 3}}

// pendingEntry is what a claim at noon left behind, edited.
func pendingEntry(t *testing.T, edit ...func(e *journal.Entry)) journal.Entry {
	t.Helper()
	e, _, write, err := rules.Begin(nil, payment("1"), noon)
	require.NoError(t, err)
	require.True(t, write)
	for _, f := range edit {
		f(&e)
	}
	return e
}

func free(e *journal.Entry) { e.Owner, e.Lease = "", time.Time{} }

func done(e *journal.Entry) {
	free(e)
	e.State, e.Finished = journal.Done, noon.Truncate(time.Microsecond)
}

func refused(e *journal.Entry) {
	done(e)
	e.State = journal.Refused
}

// delivery that expires an hour after noon.
func delivery(e *journal.Entry) { e.Expires = noon.Add(time.Hour).Truncate(time.Microsecond) }

// held until two hours after noon, which is an hour after a delivery expires.
func held(e *journal.Entry) { e.Lease = noon.Add(2 * time.Hour).Truncate(time.Microsecond) }

// ahead: held by a clock that is a minute before all others, for as long as may be.
func ahead(e *journal.Entry) {
	e.Lease = noon.Add(journal.LongestLease + time.Minute).Truncate(time.Microsecond)
}

// noEffect: the last call told its caller so.
func noEffect(e *journal.Entry) {
	free(e)
	e.Clear = true
}

// enlisted in a transaction of the caller's own.
func enlisted(e *journal.Entry) { e.Enlisted = true }

func resumed(n int) func(e *journal.Entry) { return func(e *journal.Entry) { e.Resumes = n } }

// The transitions of Begin: from what is there, and how it is asked, to
// whether the caller has it now, with which generation and key.
func TestBeginIsATable(t *testing.T) {
	same := payment("1")
	resume, another, unknown, used := same, same, same, same
	resume.MaxResumes = 2
	another.Content = digest("1999.00 eur")
	unknown.Shape, unknown.Content = [32]byte{}, nil
	anotherResume := another
	anotherResume.MaxResumes = 2
	used.NextKey = used.Key
	usedResume, usedDelivery := used, used
	usedResume.MaxResumes, usedDelivery.Expires = 2, noon.Add(time.Hour)
	const first, second = "first-1", "second-1"
	soon, ended, hours := noon.Add(time.Second), noon.Add(time.Minute), noon.Add(2*time.Hour)

	for _, c := range []struct {
		name       string
		old        []func(e *journal.Entry) // nil: no entry
		in         journal.Intent
		now        time.Time
		claimed    bool
		generation int
		key        string
		err        error
	}{
		{"nothing", nil, same, noon, true, 1, first, nil},
		{"nothing, resume", nil, resume, noon, false, 0, "", journal.ErrNotFound},
		{"nothing, shape not known", nil, unknown, noon, true, 1, first, nil},

		{"claimed", some(), same, soon, false, 1, first, journal.ErrClaimed},
		{"claimed, one microsecond before the lease ends", some(), same, ended.Add(-time.Microsecond), false, 1, first, journal.ErrClaimed},
		{"claimed, the lease ends", some(), same, ended, true, 1, first, nil},
		{"claimed, resume", some(), resume, soon, false, 1, first, journal.ErrClaimed},
		{"claimed, another request", some(), another, soon, false, 1, first, journal.ErrMismatch},
		{"claimed, resume too many", some(resumed(2)), resume, soon, false, 1, first, journal.ErrClaimed},
		{"claimed, by a clock that is ahead", some(ahead), same, noon, false, 1, first, journal.ErrClaimed},
		{"claimed, by a clock that was ahead", some(ahead), same, noon.Add(-time.Microsecond), true, 1, first, nil},
		{"lease ended, another request", some(), another, ended, false, 1, first, journal.ErrMismatch},

		{"free", some(free), same, noon, true, 1, first, nil},
		{"free, shape not known", some(free), unknown, noon, true, 1, first, nil},
		{"free, another request", some(free), another, noon, false, 1, first, journal.ErrMismatch},
		{"free, resume", some(free, resumed(1)), resume, noon, true, 1, first, nil},
		{"free, resume too many", some(free, resumed(2)), resume, noon, false, 1, first, journal.ErrAttention},
		{"free, resume far too many", some(free, resumed(9)), resume, noon, false, 1, first, journal.ErrAttention},
		{"free, resume of another request", some(free, resumed(2)), anotherResume, noon, false, 1, first, journal.ErrMismatch},
		{"free, resumed too often, a caller", some(free, resumed(9)), same, noon, true, 1, first, nil},

		{"free, had no effect", some(noEffect), same, hours, true, 1, first, nil},
		{"free, had no effect, resume", some(noEffect), resume, hours, false, 1, first, nil},
		{"free, had no effect, resume too many", some(noEffect, resumed(2)), resume, hours, false, 1, first, nil},
		{"free, had no effect, resume of another request", some(noEffect), anotherResume, hours, false, 1, first, nil},
		{"free, had no effect, another request", some(noEffect), another, hours, false, 1, first, journal.ErrMismatch},

		{"enlisted, claimed", some(enlisted), same, soon, false, 1, first, journal.ErrClaimed},
		{"enlisted, the lease ends", some(enlisted), same, ended, true, 1, first, nil},
		{"enlisted, free", some(enlisted, free), same, hours, true, 1, first, nil},
		{"enlisted, free, resume", some(enlisted, free), resume, hours, true, 1, first, nil},
		{"enlisted, free, resume too many", some(enlisted, free, resumed(2)), resume, hours, false, 1, first, journal.ErrAttention},
		{"enlisted, free, another request", some(enlisted, free), another, hours, false, 1, first, journal.ErrMismatch},
		{"enlisted, done", some(enlisted, done), same, hours, false, 1, first, nil},
		{"enlisted, refused", some(enlisted, refused), same, hours, true, 2, second, nil},
		{"enlisted, refused, resume", some(enlisted, refused), resume, hours, false, 1, first, nil},

		{"done", some(done), same, hours, false, 1, first, nil},
		{"done, resume", some(done), resume, hours, false, 1, first, nil},
		{"done, resume too many", some(done, resumed(2)), resume, hours, false, 1, first, nil},
		{"done, another request", some(done), another, hours, false, 1, first, journal.ErrMismatch},
		{"done, shape not known", some(done), unknown, hours, false, 1, first, nil},

		{"refused", some(refused), same, soon, true, 2, second, nil},
		{"refused, another request", some(refused), another, soon, true, 2, second, nil},
		{"refused, resume", some(refused), resume, soon, false, 1, first, nil},
		{"refused, resume of another request", some(refused), anotherResume, soon, false, 1, first, nil},
		{"refused, with the key that was refused", some(refused), used, soon, false, 1, first, journal.ErrInvalid},
		{"refused, with the key that was refused, resume", some(refused), usedResume, soon, false, 1, first, nil},
		{"free, with a next key that it has", some(free), used, soon, true, 1, first, nil},
		{"done, with a next key that it has", some(done), used, soon, false, 1, first, nil},

		{"delivery, claimed", some(delivery), same, soon, false, 1, first, journal.ErrClaimed},
		{"delivery, claimed, another digest", some(delivery), another, soon, false, 1, first, journal.ErrClaimed},
		{"delivery, free, another digest", some(delivery, free), another, soon, true, 1, first, nil},
		{"delivery, done", some(delivery, done), same, soon, false, 1, first, nil},
		{"delivery, done, another digest", some(delivery, done), another, soon, false, 1, first, nil},
		{"delivery, refused", some(delivery, refused), same, soon, true, 2, second, nil},
		{"delivery, refused, with the key that was refused", some(delivery, refused), usedDelivery, soon, true, 2, first, nil},
		{"delivery, a microsecond before it expires", some(delivery, done), same, noon.Add(time.Hour - time.Microsecond), false, 1, first, nil},
		{"delivery, expired, done", some(delivery, done), same, noon.Add(time.Hour), true, 1, first, nil},
		{"delivery, expired, refused", some(delivery, refused), same, noon.Add(time.Hour), true, 1, first, nil},
		{"delivery, expired, free", some(delivery, free), same, noon.Add(time.Hour), true, 1, first, nil},
		{"delivery, expired, free, another digest", some(delivery, free), another, noon.Add(time.Hour), true, 1, first, nil},
		{"delivery, expired, had no effect", some(delivery, noEffect), same, noon.Add(time.Hour), true, 1, first, nil},
		{"delivery, expired, claimed", some(delivery, held), same, noon.Add(time.Hour), false, 1, first, journal.ErrClaimed},
		{"delivery, expired, claimed, another digest", some(delivery, held), another, noon.Add(time.Hour), false, 1, first, journal.ErrClaimed},
		{"delivery, expired, a microsecond before the lease ends", some(delivery, held), same, hours.Add(-time.Microsecond), false, 1, first, journal.ErrClaimed},
		{"delivery, expired, the lease ends", some(delivery, held), same, hours, true, 1, first, nil},
		{"delivery, expired, the lease ends, another digest", some(delivery, held), another, hours, true, 1, first, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var old *journal.Entry
			var before journal.Entry
			if c.old != nil {
				before = pendingEntry(t, c.old...)
				kept := before
				old = &kept
			}
			stored, returned, write, err := rules.Begin(old, c.in, c.now)
			require.ErrorIs(t, err, c.err)
			require.Equal(t, c.claimed, write)
			require.Equal(t, c.generation, returned.Generation)
			require.Equal(t, c.key, returned.Key)
			if old != nil {
				require.Equal(t, before, *old, "old is not changed")
				known := c.now.Before(before.Expires) || before.Claimed(c.now)
				differs := !before.Expires.IsZero() && known && c.in.Content != nil && string(c.in.Content) != string(same.Content)
				require.Equal(t, differs, returned.Differs)
			}
			if !c.claimed {
				returned.Differs = false
				require.Equal(t, before, returned)
				return
			}
			require.Equal(t, before.Enlisted && c.generation == 1, returned.Enlisted, "the next generation was not enlisted")
			now := c.now.Truncate(time.Microsecond)
			require.Equal(t, "me", returned.Owner)
			require.Equal(t, now.Add(time.Minute), returned.Lease)
			require.Equal(t, before.Fence+1, returned.Fence)
			require.Equal(t, journal.Pending, returned.State)
			require.False(t, stored.Differs)
			require.False(t, stored.Clear)
			firstSend := returned.FirstSend
			if firstSend.IsZero() || returned.Clear {
				firstSend = now
			}
			require.Equal(t, firstSend, stored.FirstSend)
			stored.FirstSend, stored.Clear, stored.Differs = returned.FirstSend, returned.Clear, returned.Differs
			require.Equal(t, stored, returned, "nothing else is told apart")
		})
	}
}

// The key window is counted from the first send that may have had an effect.
func TestFirstSendIsOfTheClaimAfterTheLastThatHadNoEffect(t *testing.T) {
	early, now := noon.Add(-time.Hour).Truncate(time.Microsecond), noon.Truncate(time.Microsecond)
	for _, c := range []struct {
		name      string
		firstSend time.Time
		clear     bool
		want      time.Time
	}{
		{"sent, and perhaps with an effect", early, false, early},
		{"sent without an effect", early, true, now},
		{"not sent", time.Time{}, false, now},
		{"not sent, and the caller was told", time.Time{}, true, now},
	} {
		for _, resumes := range []int{0, 3} {
			in := payment("1")
			in.MaxResumes = resumes
			old := pendingEntry(t, free, func(e *journal.Entry) { e.FirstSend, e.Clear = c.firstSend, c.clear })
			stored, returned, write, err := rules.Begin(&old, in, noon)
			require.NoError(t, err, c.name)
			require.Equal(t, c.firstSend, returned.FirstSend, c.name)
			require.Equal(t, c.clear, returned.Clear, c.name)
			if resumes > 0 && c.clear {
				require.False(t, write, "%s: it waits for its caller", c.name)
				continue
			}
			require.Equal(t, c.want, stored.FirstSend, c.name)
			require.False(t, stored.Clear, c.name)
			again, _, _, err := rules.Begin(&stored, in, noon.Add(time.Minute))
			require.NoError(t, err, c.name)
			require.Equal(t, c.want, again.FirstSend, "%s: a claim that is taken over is not clear", c.name)
		}
	}
}

func TestBeginKeepsTheFirstRequestThatIsStored(t *testing.T) {
	in := payment("1")
	in.Request = []byte("second")
	without := pendingEntry(t, free)
	e, _, _, err := rules.Begin(&without, in, noon)
	require.NoError(t, err)
	require.Equal(t, in.Request, e.Request)
	with := pendingEntry(t, free, func(e *journal.Entry) { e.Request = []byte("first") })
	e, _, _, err = rules.Begin(&with, in, noon)
	require.NoError(t, err)
	require.Equal(t, []byte("first"), e.Request)
}

func TestANoteKeepsWhatItDoesNotHave(t *testing.T) {
	old := pendingEntry(t, func(e *journal.Entry) {
		e.Status, e.Reference, e.Answer, e.Attempts = 503, "pi_1", []byte("kept"), 4
	})
	e, err := rules.Renew(&old, old, journal.Note{}, noon)
	require.NoError(t, err)
	require.Equal(t, []any{503, "pi_1", 4}, []any{e.Status, e.Reference, e.Attempts})
	e, err = rules.Release(&old, old, journal.Note{})
	require.NoError(t, err)
	require.Equal(t, []any{503, "pi_1", 4}, []any{e.Status, e.Reference, e.Attempts})
	e, _, err = rules.Finish(&old, old, journal.Done, journal.Note{Attempts: 2}, noon)
	require.NoError(t, err)
	require.Equal(t, []any{503, "pi_1", 6, []byte("kept")}, []any{e.Status, e.Reference, e.Attempts, e.Answer})
}

// some entry, edited; it tells no edits from no entry.
func some(edit ...func(e *journal.Entry)) []func(e *journal.Entry) {
	return append([]func(e *journal.Entry){}, edit...)
}

// Who may still end a claim: the last one of its generation, while the entry
// is pending and nobody ended it.
func TestClaimsEndOnce(t *testing.T) {
	note := journal.Note{Attempts: 2, Status: 201, Reference: "pi_1", Answer: []byte("sealed"), NotSent: true, Clear: true, Orderly: true}
	for _, c := range []struct {
		name string
		old  []func(e *journal.Entry) // nil: no entry
		by   func(e *journal.Entry)   // edits the claim
		held bool
	}{
		{"the claim holds", some(), func(*journal.Entry) {}, true},
		{"the lease ended and nobody took over", some(), func(*journal.Entry) {}, true},
		{"there is no entry", nil, func(*journal.Entry) {}, false},
		{"another took over", some(func(e *journal.Entry) { e.Fence++ }), func(*journal.Entry) {}, false},
		{"an older fence", some(), func(e *journal.Entry) { e.Fence-- }, false},
		{"another generation", some(func(e *journal.Entry) { e.Generation++ }), func(*journal.Entry) {}, false},
		{"released", some(free), func(*journal.Entry) {}, false},
		{"enlisted before the claim", some(enlisted), enlisted, true},
		{"enlisted meanwhile", some(enlisted), func(*journal.Entry) {}, true},
		{"enlisted, never claimed", some(free, func(e *journal.Entry) { e.Fence = 0 }), func(e *journal.Entry) { e.Fence = 0 }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			claim := pendingEntry(t)
			c.by(&claim)
			var old *journal.Entry
			var before journal.Entry
			if c.old != nil {
				before = pendingEntry(t, c.old...)
				kept := before
				old = &kept
			}
			now := noon.Add(time.Hour)
			renewed, renewErr := rules.Renew(old, claim, note, now)
			finished, write, finishErr := rules.Finish(old, claim, journal.Done, note, now)
			released, releaseErr := rules.Release(old, claim, note)
			if old != nil {
				require.Equal(t, before, *old, "old is not changed")
			}
			if !c.held {
				require.ErrorIs(t, renewErr, journal.ErrClaimLost)
				require.ErrorIs(t, finishErr, journal.ErrClaimLost)
				require.ErrorIs(t, releaseErr, journal.ErrClaimLost)
				require.False(t, write)
				return
			}
			require.NoError(t, renewErr)
			require.NoError(t, finishErr)
			require.NoError(t, releaseErr)
			require.True(t, write)

			whole := now.Truncate(time.Microsecond)
			want := before
			want.Status, want.Reference, want.Lease = 201, "pi_1", whole.Add(time.Minute)
			require.Equal(t, want, renewed)
			want.Owner, want.Lease, want.Attempts = "", time.Time{}, 2
			want.Clear, want.FirstSend = !before.Enlisted, time.Time{}
			require.Equal(t, want, released)
			want.Clear, want.FirstSend = before.Clear, before.FirstSend
			want.State, want.Finished, want.Answer = journal.Done, whole, []byte("sealed")
			require.Equal(t, want, finished)
		})
	}
}

func TestFinishAgainIsTheSameClaimAndState(t *testing.T) {
	claim := pendingEntry(t)
	for _, s := range []journal.State{journal.Done, journal.Refused} {
		first, write, err := rules.Finish(&claim, claim, s, journal.Note{Attempts: 1}, noon)
		require.NoError(t, err)
		require.True(t, write)
		again, write, err := rules.Finish(&first, claim, s, journal.Note{Attempts: 1, Status: 500}, noon.Add(time.Hour))
		require.NoError(t, err)
		require.False(t, write)
		require.Equal(t, first, again)

		_, write, err = rules.Finish(&first, claim, journal.Done+journal.Refused-s, journal.Note{}, noon)
		require.ErrorIs(t, err, journal.ErrClaimLost)
		require.False(t, write)
		late := claim
		late.Fence--
		_, write, err = rules.Finish(&first, late, s, journal.Note{}, noon)
		require.ErrorIs(t, err, journal.ErrClaimLost)
		require.False(t, write)
		older := claim
		older.Generation--
		_, write, err = rules.Finish(&first, older, s, journal.Note{}, noon)
		require.ErrorIs(t, err, journal.ErrClaimLost)
		require.False(t, write)
	}
	for _, s := range []journal.State{journal.Pending, 3, -1} {
		_, write, err := rules.Finish(&claim, claim, s, journal.Note{}, noon)
		require.ErrorIs(t, err, journal.ErrInvalid)
		require.ErrorContains(t, err, s.String())
		require.False(t, write)
	}
}

// The transitions of Enlist: from what is there to whether something is written.
func TestEnlistIsATable(t *testing.T) {
	in := payment("1")
	in.Request, in.Started = []byte("sealed"), noon.Add(-time.Hour)
	another, used := in, in
	another.Content = digest("1999.00 eur")
	used.NextKey = used.Key
	later := noon.Add(time.Hour)
	// created is what Enlist writes where there was nothing to keep.
	created := func(in journal.Intent, key string, generation int, fence int64) func(*journal.Entry) {
		return func(e *journal.Entry) {
			*e = journal.Entry{
				Operation: in.Operation, Generation: generation, Key: key, Fingerprint: rules.Secret.Fingerprint(in.Shape, in.Content),
				Created: later.Truncate(time.Microsecond), Window: in.Window, Request: in.Request, Fence: fence, Enlisted: true,
			}
		}
	}
	waitsNoMore := func(e *journal.Entry) { e.Enlisted, e.Clear, e.FirstSend = true, false, time.Time{} }
	notSent := func(e *journal.Entry) { e.FirstSend = time.Time{} }
	for _, c := range []struct {
		name string
		old  []func(e *journal.Entry) // nil: no entry
		in   journal.Intent
		to   func(e *journal.Entry) // what becomes of it; nil: nothing is written
		err  error
	}{
		{"nothing", nil, in, created(in, "first-1", 1, 0), nil},
		{"claimed", some(), in, enlisted, nil},
		{"free", some(free), in, enlisted, nil},
		{"free, not sent", some(free, notSent), in, enlisted, nil},
		{"free, had no effect", some(noEffect), in, waitsNoMore, nil},
		{"free, had no effect, not sent", some(noEffect, notSent), in, waitsNoMore, nil},
		{"enlisted, claimed", some(enlisted), in, nil, nil},
		{"enlisted, free", some(enlisted, free), in, nil, nil},
		{"done", some(done), in, nil, nil},
		{"done, had no effect", some(noEffect, done), in, nil, nil},
		{"enlisted, done", some(enlisted, done), in, nil, nil},
		{"refused", some(refused), in, created(in, "second-1", 2, 1), nil},
		{"enlisted, refused", some(enlisted, refused), in, created(in, "second-1", 2, 1), nil},
		{"refused, another request", some(refused), another, created(another, "second-1", 2, 1), nil},
		{"refused, with the key that was refused", some(refused), used, nil, journal.ErrInvalid},
		{"free, with a next key that it has", some(free), used, enlisted, nil},
		{"claimed, another request", some(), another, nil, journal.ErrMismatch},
		{"free, another request", some(free), another, nil, journal.ErrMismatch},
		{"free, had no effect, another request", some(noEffect), another, nil, journal.ErrMismatch},
		{"enlisted, another request", some(enlisted, free), another, nil, journal.ErrMismatch},
		{"done, another request", some(done), another, nil, journal.ErrMismatch},
	} {
		t.Run(c.name, func(t *testing.T) {
			var old *journal.Entry
			var before journal.Entry
			if c.old != nil {
				before = pendingEntry(t, c.old...)
				kept := before
				old = &kept
			}
			e, write, err := rules.Enlist(old, c.in, later)
			require.ErrorIs(t, err, c.err)
			require.Equal(t, c.to != nil, write)
			if old != nil {
				require.Equal(t, before, *old, "old is not changed")
			}
			want := before
			if c.to != nil {
				c.to(&want)
			}
			require.Equal(t, want, e)
			if err != nil || e.State != journal.Pending {
				return
			}
			c.in.MaxResumes, c.in.Started = 1, time.Time{}
			stored, returned, write, err := rules.Begin(&e, c.in, e.Lease.Add(2*time.Hour))
			require.NoError(t, err)
			require.True(t, write, "a resume carries it out")
			require.Equal(t, e.Key, returned.Key)
			require.Equal(t, e.FirstSend, returned.FirstSend)
			e, err = rules.Release(&stored, returned, journal.Note{Clear: true})
			require.NoError(t, err)
			require.False(t, e.Clear, "and the next one does")
			require.True(t, e.Enlisted)
		})
	}
}

// What is left of a finished entry, by the time since it was finished.
func TestSweepIsATable(t *testing.T) {
	const (
		us     = time.Microsecond
		window = 24 * time.Hour
		days   = 24 * time.Hour
	)
	full := func(e *journal.Entry) { e.Request, e.Answer = []byte("request"), []byte("answer") }
	for _, c := range []struct {
		name          string
		e             []func(e *journal.Entry)
		keep, since   time.Duration
		write, remove bool
	}{
		{"within the window", some(done, full), 0, window - us, false, false},
		{"the window ends", some(done, full), 0, window, true, false},
		{"nothing to take out", some(done), 0, window, false, false},
		{"refused", some(refused, full), 0, window, true, false},
		{"only a request", some(done, func(e *journal.Entry) { e.Request = []byte("request") }), 0, window, true, false},
		{"only an answer", some(done, func(e *journal.Entry) { e.Answer = []byte("answer") }), 0, window, true, false},
		{"400 days, less a microsecond", some(done), 0, 400*days - us, false, false},
		{"400 days", some(done), 0, 400 * days, false, true},
		{"400 days, never swept before", some(refused, full), 0, 400 * days, false, true},
		{"less than nothing is 400 days", some(done), -1, 400*days - us, false, false},
		{"keep, less a microsecond", some(done), 30 * days, 30*days - us, false, false},
		{"keep", some(done), 30 * days, 30 * days, false, true},
		{"keep is shorter than the window, within", some(done, full), us, window - us, false, false},
		{"keep is shorter than the window, after", some(done, full), us, window, false, true},
		{"no window", some(done, full, func(e *journal.Entry) { e.Window = 0 }), 0, 0, true, false},
		{"pending", some(full), us, 1000 * days, false, false},
		{"pending, free", some(free, full), us, 1000 * days, false, false},
		{"delivery, before it expires", some(delivery, done, full), us, time.Hour - us, false, false},
		{"delivery expires", some(delivery, done, full), 0, time.Hour, false, true},
		{"delivery expires, pending", some(delivery), 0, time.Hour, false, true},
		{"delivery expires, free", some(delivery, free), 0, time.Hour, false, true},
		{"delivery expires, claimed", some(delivery, held, full), us, time.Hour, false, false},
		{"delivery expired, a microsecond before the lease ends", some(delivery, held, full), us, 2*time.Hour - us, false, false},
		{"delivery expired, the lease ends", some(delivery, held, full), 0, 2 * time.Hour, false, true},
		{"delivery expires, refused", some(delivery, refused), 0, time.Hour, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := pendingEntry(t, c.e...)
			left, write, remove := rules.Sweep(e, c.keep, noon.Truncate(us).Add(c.since))
			require.Equal(t, c.write, write)
			require.Equal(t, c.remove, remove)
			if write {
				e.Request, e.Answer = nil, nil
			}
			require.Equal(t, e, left, "the tombstone has all the rest")
		})
	}
}

func TestDecideChecksItsArgumentsFirstAndNotesTheWord(t *testing.T) {
	const longest = 1000
	ok := journal.Decision{State: journal.Done, Reason: "r"}
	for name, c := range map[string]struct {
		d     journal.Decision
		names []string
	}{
		"state":   {journal.Decision{State: journal.Pending, Reason: "r"}, []string{"Decision.State", "pending", "done or refused"}},
		"states":  {journal.Decision{State: 7, Reason: "r"}, []string{"Decision.State", "state 7", "done or refused"}},
		"abandon": {journal.Decision{State: journal.Done, Abandon: true, Reason: "r"}, []string{"Decision.State", "done", "Abandon", "refused"}},
		"none":    {journal.Decision{State: journal.Done}, []string{"Decision.Reason", "0 bytes", "1 to 1000"}},
		"long":    {journal.Decision{State: journal.Done, Reason: strings.Repeat("r", longest+1)}, []string{"Decision.Reason", "1001 bytes", "1 to 1000"}},
	} {
		_, err := rules.Decide(nil, c.d, noon)
		require.ErrorIs(t, err, journal.ErrInvalid, name)
		for _, s := range c.names {
			require.ErrorContains(t, err, s, name)
		}
	}
	_, err := rules.Decide(nil, ok, noon)
	require.ErrorIs(t, err, journal.ErrNotFound)

	e := pendingEntry(t)
	_, err = rules.Decide(&e, ok, noon.Add(time.Minute-time.Microsecond))
	require.ErrorIs(t, err, journal.ErrClaimed)
	ok.Reason = strings.Repeat("r", longest)
	got, err := rules.Decide(&e, ok, noon.Add(time.Minute))
	require.NoError(t, err)
	require.Equal(t, "executed", got.Decision)
	require.Greater(t, got.Fence, e.Fence)

	known := pendingEntry(t, free, func(e *journal.Entry) { e.Reference = "pi_1" })
	for word, c := range map[string]struct {
		d         journal.Decision
		reference string
	}{
		"executed":  {journal.Decision{State: journal.Done, Reference: "pi_2", Reason: "r"}, "pi_2"},
		"refused":   {journal.Decision{State: journal.Refused, Reason: "r"}, "pi_1"},
		"abandoned": {journal.Decision{State: journal.Refused, Abandon: true, Reason: "r"}, "pi_1"},
	} {
		old := known
		got, err := rules.Decide(&old, c.d, noon.Add(time.Hour))
		require.NoError(t, err)
		require.Equal(t, known, old, "old is not changed")
		want := known
		want.State, want.Decision, want.Reason, want.Reference = c.d.State, word, "r", c.reference
		want.Finished, want.Fence = noon.Add(time.Hour).Truncate(time.Microsecond), known.Fence+1
		require.Equal(t, want, got)
	}
	for _, edit := range []func(e *journal.Entry){done, refused} {
		e := pendingEntry(t, edit)
		_, err = rules.Decide(&e, ok, noon)
		require.ErrorIs(t, err, journal.ErrFinished)
	}
}

func TestFirstSendIsTheStartOnlyOfANewEntryThatWasStartedBefore(t *testing.T) {
	in := payment("1")
	for _, c := range []struct {
		started, want time.Time
	}{
		{time.Time{}, time.Time{}},
		{noon.Add(-time.Hour), noon.Add(-time.Hour).Truncate(time.Microsecond)},
		{noon.Add(time.Hour), time.Time{}}, // a clock that is ahead would widen the window
	} {
		in.Started = c.started
		stored, returned, _, err := rules.Begin(nil, in, noon)
		require.NoError(t, err)
		require.Equal(t, c.want, returned.FirstSend)
		if c.want.IsZero() {
			c.want = noon.Truncate(time.Microsecond)
		}
		require.Equal(t, c.want, stored.FirstSend)
	}
	old := pendingEntry(t, refused)
	in.Started = noon.Add(-time.Hour)
	_, returned, _, err := rules.Begin(&old, in, noon)
	require.NoError(t, err)
	require.True(t, returned.FirstSend.IsZero(), "the next key was not sent before")
}

func TestALeaseOfNothingIs30Seconds(t *testing.T) {
	r := journal.Rules{Owner: "me"}
	e, _, _, err := r.Begin(nil, payment("1"), noon)
	require.NoError(t, err)
	require.Equal(t, noon.Truncate(time.Microsecond).Add(30*time.Second), e.Lease)
	require.True(t, e.Claimed(e.Lease.Add(-1)))
	require.False(t, e.Claimed(e.Lease))
	e.Owner = ""
	require.False(t, e.Claimed(noon), "nobody has it")
	e.Owner = "me"
	require.True(t, e.Claimed(e.Lease.Add(-time.Hour-time.Minute)))
	require.False(t, e.Claimed(e.Lease.Add(-time.Hour-time.Minute-1)), "no store claims for so long: a clock was ahead")
	require.Equal(t, time.Hour, journal.LongestLease)
	require.Equal(t, 30*time.Second, journal.DefaultLease)
	require.Equal(t, 400*24*time.Hour, journal.DefaultKeep)
}

func TestIntentsAreChecked(t *testing.T) {
	text := func(n int) string { return strings.Repeat("x", n) }
	for _, c := range []struct {
		name  string
		edit  func(in *journal.Intent)
		names []string // nil: it is fine
	}{
		{"as it is", func(*journal.Intent) {}, nil},
		{"no scope", func(in *journal.Intent) { in.Scope = "" }, nil},
		{"longest", func(in *journal.Intent) {
			in.Scope, in.Name, in.ID, in.Key, in.NextKey = text(255), text(255), text(255), text(255), text(255)
		}, nil},
		{"long scope", func(in *journal.Intent) { in.Scope = text(256) }, []string{"Intent.Scope", "256", "0 to 255"}},
		{"no name", func(in *journal.Intent) { in.Name = "" }, []string{"Intent.Name", "0 bytes", "1 to 255"}},
		{"long name", func(in *journal.Intent) { in.Name = text(256) }, []string{"Intent.Name", "256", "1 to 255"}},
		{"no id", func(in *journal.Intent) { in.ID = "" }, []string{"Intent.ID", "0 bytes", "1 to 255"}},
		{"long id", func(in *journal.Intent) { in.ID = text(256) }, []string{"Intent.ID", "256", "1 to 255"}},
		{"no key", func(in *journal.Intent) { in.Key = "" }, []string{"Intent.Key"}},
		{"long key", func(in *journal.Intent) { in.Key = text(256) }, []string{"Intent.Key", "256", "255"}},
		{"no next key", func(in *journal.Intent) { in.NextKey = "" }, []string{"NextKey"}},
		{"long next key", func(in *journal.Intent) { in.NextKey = text(256) }, []string{"Intent.NextKey", "256", "255"}},
		{"no window", func(in *journal.Intent) { in.Window = 0 }, nil},
		{"negative window", func(in *journal.Intent) { in.Window = -time.Second }, []string{"Intent.Window", "-1s", "0"}},
		{"negative resumes", func(in *journal.Intent) { in.MaxResumes = -2 }, []string{"Intent.MaxResumes", "-2", "0"}},
		{"delivery without keys", func(in *journal.Intent) { in.Key, in.NextKey, in.Expires = "", "", noon }, nil},
		{"delivery with keys", func(in *journal.Intent) { in.Expires = noon }, nil},
		{"delivery with a long key", func(in *journal.Intent) { in.Key, in.Expires = text(256), noon }, []string{"Intent.Key", "256", "255"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := payment("1")
			c.edit(&in)
			err := in.Check()
			if c.names == nil {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, journal.ErrInvalid)
			for _, s := range c.names {
				require.ErrorContains(t, err, s)
			}
		})
	}
}

func TestStatesAndOperationsPrintThemselves(t *testing.T) {
	require.Equal(t, "pending done refused state 3 state -1", fmt.Sprint(journal.Pending, " ", journal.Done, " ", journal.Refused, " ", journal.State(3), " ", journal.State(-1)))
	require.Empty(t, journal.Operation{}.String())
	require.Equal(t, "pay/order-7", journal.Operation{Name: "pay", ID: "order-7"}.String())
	require.Equal(t, `pay/order-7 of "acct\n1"`, journal.Operation{Scope: "acct\n1", Name: "pay", ID: "order-7"}.String())
}
