package journal_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

// Random walks over one entry: any caller does anything at any time, late
// owners included. What must hold is said in the walk's own words, not in
// those of the rules.
func TestRandomWalksKeepTheInvariants(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	walks := 1000
	if testing.Short() {
		walks = 200
	}
	var seen tally
	for n := range walks {
		w := &walk{t: t, n: n, rnd: rand.New(rand.NewPCG(seed, uint64(n))), now: noon, seen: &seen, keys: map[int]string{}}
		w.delivery = n%4 == 3
		for range 80 {
			w.step()
		}
	}
	t.Logf("%+v", seen)
	if testing.Short() {
		return
	}
	for what, n := range map[string]int{
		"claims": seen.claims, "take-overs": seen.takeOvers, "late calls": seen.late, "refusals to claim": seen.claimed,
		"mismatches": seen.mismatches, "attention": seen.attention, "next generations": seen.generations,
		"decisions": seen.decisions, "emptied": seen.emptied, "deleted": seen.deleted, "enlisted": seen.enlisted,
		"done met": seen.done, "expired deliveries": seen.expired, "finished twice": seen.twice,
		"expired deliveries under a live claim": seen.handled, "such that were not swept": seen.spared,
		"key windows that began anew": seen.windows, "resumes of nothing": seen.nothing, "resumes of what waits for its caller": seen.left,
		"pending ones that were enlisted": seen.promised, "such that waited for their caller": seen.freed, "releases that left an enlisted one unclear": seen.unclear,
		"next keys that were refused already": seen.used,
	} {
		require.Greater(t, n, 30, "the walks hardly met %s", what)
	}
}

// tally says how often the walks met what; a walk that goes nowhere proves
// nothing.
type tally struct {
	claims, takeOvers, late, claimed, mismatches, attention, generations, decisions int
	emptied, deleted, enlisted, done, expired, twice, handled, spared, windows      int
	nothing, left, promised, freed, unclear, used                                   int
}

type walk struct {
	t        *testing.T
	n        int
	rnd      *rand.Rand
	now      time.Time
	delivery bool
	seen     *tally
	minted   int

	stored *journal.Entry // what a store would hold

	// What the walk knows by itself.
	given    []journal.Entry // each claim, as it was returned, oldest first
	holds    bool            // the last one did not end
	until    time.Time       // when its lease ends
	ended    journal.State   // what the last one was finished as; Pending: it was not
	final    journal.State   // what the generation was finished or decided as; Pending: it was not
	fence    int64           // the highest given
	keys     map[int]string  // of each generation
	shape    [32]byte        // known of the request; zero: nothing
	content  []byte          // known of the request; nil: nothing
	resumes  int
	attempts int       // that were reported
	sent     time.Time // first, since the last that had no effect; zero: not yet
	clear    bool
	enlisted bool
}

func (w *walk) step() {
	if w.rnd.IntN(3) == 0 {
		steps := [...]time.Duration{time.Microsecond, time.Second, 20 * time.Second, time.Minute, time.Minute, 2 * time.Hour, 100 * 24 * time.Hour}
		w.now = w.now.Add(steps[w.rnd.IntN(len(steps))])
	}
	switch w.rnd.IntN(12) {
	case 0, 1, 2, 3:
		w.begin()
	case 4:
		w.renew()
	case 5, 6:
		w.finish()
	case 7, 8, 9:
		w.release()
	case 10:
		w.decide()
	case 11:
		if w.delivery || w.rnd.IntN(2) > 0 { // deliveries are never enlisted
			w.sweep()
		} else {
			w.enlist()
		}
	}
	if w.stored != nil {
		w.invariants()
	}
}

func (w *walk) require(ok bool, format string, args ...any) {
	w.t.Helper()
	if !ok {
		w.t.Fatalf("walk %d at %v: %s\nstored %+v", w.n, w.now, fmt.Sprintf(format, args...), w.stored)
	}
}

// live: somebody works on it.
func (w *walk) live() bool { return w.holds && w.now.Before(w.until) }

// entry is a copy that the rules may not change behind our back.
func (w *walk) entry() *journal.Entry {
	if w.stored == nil {
		return nil
	}
	e := *w.stored
	return &e
}

func (w *walk) intent() journal.Intent {
	w.minted++
	in := payment("1")
	in.Key, in.NextKey = fmt.Sprint("key ", w.minted), fmt.Sprint("next ", w.minted)
	in.Content, in.Window = nil, time.Duration(w.rnd.IntN(3))*24*time.Hour
	switch n := w.rnd.IntN(20); {
	case n == 0:
		in.Shape = [32]byte{}
	case n == 1:
		in.Shape = sha256.Sum256([]byte("another"))
	}
	switch w.rnd.IntN(6) {
	case 0:
	case 1:
		in.Content = digest("another")
	default:
		in.Content = digest("19.99 eur")
	}
	if w.stored != nil && w.stored.State == journal.Refused && w.rnd.IntN(5) == 0 {
		in.NextKey = w.stored.Key
	}
	if w.rnd.IntN(2) == 0 {
		in.Request = []byte("sealed request")
	}
	if w.rnd.IntN(3) == 0 {
		in.MaxResumes = 1 + w.rnd.IntN(3)
	}
	if w.delivery {
		in.Expires = w.now.Add(time.Duration(1+w.rnd.IntN(5)) * time.Hour)
		if w.rnd.IntN(3) > 0 {
			in.Expires = w.now.Add(time.Microsecond) // well before the lease ends
		}
	}
	return in
}

// same: what is known of both requests agrees.
func (w *walk) same(in journal.Intent) bool {
	none := [32]byte{}
	if w.shape == none || in.Shape == none {
		return true
	}
	return w.shape == in.Shape && (w.content == nil || in.Content == nil || bytes.Equal(w.content, in.Content))
}

// learn fixes what is known of the request.
func (w *walk) learn(in journal.Intent) {
	if in.Shape == ([32]byte{}) {
		return
	}
	if w.shape == ([32]byte{}) || w.content == nil && in.Content != nil {
		w.shape, w.content = in.Shape, in.Content
	}
}

// anew forgets what belonged to the generation before.
func (w *walk) anew(generation int, key string) {
	if generation == 1 {
		clear(w.keys)
	}
	w.keys[generation] = key
	w.shape, w.content, w.resumes, w.attempts, w.sent, w.clear, w.ended, w.final = [32]byte{}, nil, 0, 0, time.Time{}, false, journal.Pending, journal.Pending
	w.enlisted = false
}

func (w *walk) begin() {
	in, old := w.intent(), w.entry()
	stored, returned, write, err := rules.Begin(w.entry(), in, w.now)
	expired := old != nil && w.delivery && !w.now.Before(old.Expires)
	if expired && w.live() {
		w.require(!write && err == journal.ErrClaimed, "an event that is handled is begun anew: %v, %v", write, err)
		w.seen.handled++
		expired = false
	}
	if old == nil && in.MaxResumes > 0 {
		w.require(!write && err == journal.ErrNotFound, "a resume of nothing: %v, %v", write, err)
		require.Zero(w.t, returned)
		w.seen.nothing++
		return
	}
	if !write {
		w.require(old != nil, "nothing was written of a new operation")
		w.require(!expired, "an expired delivery stopped Begin")
		returned.Differs = false
		require.Equal(w.t, *old, returned)
		if errors.Is(err, journal.ErrInvalid) {
			w.require(w.usedKey(in) && in.MaxResumes == 0 && !w.delivery, "what is invalid? %v", err)
			w.seen.used++
			return
		}
		switch err {
		case nil:
			w.require(old.State == journal.Done || (old.State == journal.Refused || w.clear) && in.MaxResumes > 0, "not claimed, and no error")
			if old.State == journal.Pending {
				w.seen.left++
			} else {
				w.seen.done++
			}
		case journal.ErrClaimed:
			w.require(w.live(), "claimed by nobody")
			w.seen.claimed++
		case journal.ErrMismatch:
			w.require(!w.same(in) && !w.delivery && old.State != journal.Refused, "another request?")
			w.seen.mismatches++
		case journal.ErrAttention:
			w.require(in.MaxResumes > 0 && w.resumes >= in.MaxResumes, "%d resumes are not too many", w.resumes)
			w.seen.attention++
		default:
			w.require(false, "%v", err)
		}
		return
	}
	w.require(err == nil, "written in spite of %v", err)
	w.require(!w.live(), "two hold a live claim")
	w.require(returned.Fence > w.fence, "fence %d after %d", returned.Fence, w.fence)
	w.require(returned.Owner != "" && returned.Lease.After(w.now) && returned.State == journal.Pending, "begun and not claimed: %+v", returned)
	switch {
	case old == nil || expired:
		w.require(returned.Generation == 1 && returned.Key == in.Key, "generation %d of a new entry, key %q", returned.Generation, returned.Key)
		w.anew(1, in.Key)
		if expired {
			w.seen.expired++
		}
	case old.State == journal.Refused:
		w.require(returned.Generation == old.Generation+1 && returned.Key == in.NextKey, "generation %d after %d, key %q", returned.Generation, old.Generation, returned.Key)
		w.require(in.MaxResumes == 0, "a resume began a refused operation")
		w.require(w.delivery || !w.usedKey(in), "the key that was refused is begun again")
		w.anew(returned.Generation, in.NextKey)
		w.seen.generations++
	default:
		w.require(old.State == journal.Pending, "%v is begun again", old.State)
		w.require(w.same(in) || w.delivery, "claimed with another request")
		w.require(!w.delivery || returned.Differs == !w.same(in), "Differs is %v", returned.Differs)
		w.require(in.MaxResumes == 0 || w.resumes < in.MaxResumes, "resumed too often")
		w.require(in.MaxResumes == 0 || !w.clear, "a resume claimed what waits for its caller")
		if in.MaxResumes > 0 {
			w.resumes++
		}
		if w.holds {
			w.seen.takeOvers++
		}
	}
	w.require(returned.FirstSend.Equal(w.sent) && returned.Clear == w.clear, "FirstSend %v and Clear %v are not those of before", returned.FirstSend, returned.Clear)
	now := w.now.Truncate(time.Microsecond)
	if w.clear && !w.sent.IsZero() && w.sent.Before(now) {
		w.seen.windows++
	}
	if w.clear || w.sent.IsZero() {
		w.sent = now
	}
	switch {
	case w.same(in):
		w.learn(in)
	case w.content == nil:
		w.learnFrom(stored, in) // whether the longer digest is kept is not said
	}
	w.stored = &stored
	w.given = append(w.given, returned)
	w.holds, w.until, w.fence, w.clear = true, returned.Lease, returned.Fence, false
	w.seen.claims++
}

// usedKey: the next key is the one that was refused.
func (w *walk) usedKey(in journal.Intent) bool {
	return w.stored != nil && w.stored.State == journal.Refused && in.NextKey == w.stored.Key
}

// learnFrom finds out which digest a delivery has kept: that of in, or that of
// before.
func (w *walk) learnFrom(stored journal.Entry, in journal.Intent) {
	for _, shape := range [...][32]byte{in.Shape, payment("1").Shape, sha256.Sum256([]byte("another"))} {
		for _, content := range [...][]byte{nil, digest("another"), digest("19.99 eur")} {
			if bytes.Equal(stored.Fingerprint, rules.Secret.Fingerprint(shape, content)) {
				w.shape, w.content = shape, content
			}
		}
	}
}

// owner is the claim of anybody who ever had one, and whether it is held.
func (w *walk) owner() (e journal.Entry, held, ok bool) {
	if len(w.given) == 0 {
		return e, false, false
	}
	i := len(w.given) - 1
	if w.rnd.IntN(3) == 0 {
		i = w.rnd.IntN(len(w.given))
	}
	return w.given[i], w.holds && i == len(w.given)-1, true
}

func (w *walk) note() journal.Note {
	n := journal.Note{Attempts: w.rnd.IntN(3), Status: w.rnd.IntN(2) * 503, Clear: w.rnd.IntN(3) == 0, NotSent: w.rnd.IntN(3) == 0, Orderly: w.rnd.IntN(3) == 0}
	if w.rnd.IntN(2) == 0 {
		n.Answer, n.Reference = []byte("sealed answer"), "pi_1"
	}
	return n
}

func (w *walk) renew() {
	e, held, ok := w.owner()
	if !ok {
		return
	}
	out, err := rules.Renew(w.entry(), e, w.note(), w.now)
	if w.late(held, err) {
		return
	}
	w.require(!out.Lease.Before(w.now.Truncate(time.Microsecond).Add(time.Minute)), "renewed until %v", out.Lease)
	w.stored, w.until = &out, out.Lease
}

// late: a claim that is not held changes nothing, and one that is held works.
func (w *walk) late(held bool, err error) bool {
	w.t.Helper()
	if !held {
		w.require(err == journal.ErrClaimLost, "a late owner gets %v", err)
		w.seen.late++
		return true
	}
	w.require(err == nil, "the owner gets %v", err)
	return false
}

func (w *walk) finish() {
	e, held, ok := w.owner()
	if !ok {
		return
	}
	n, s := w.note(), journal.Done+journal.State(w.rnd.IntN(2))
	old := w.entry()
	out, write, err := rules.Finish(old, e, s, n, w.now)
	if !held && w.ended == s && e.Fence == w.fence {
		w.require(err == nil && !write, "a second Finish: %v, written %v", err, write)
		require.Equal(w.t, *w.stored, out)
		w.seen.twice++
		return
	}
	w.require(write == (err == nil), "written %v, %v", write, err)
	if w.late(held, err) {
		return
	}
	w.require(out.State == s && !out.Finished.IsZero(), "finished as %v", out.State)
	w.attempts += n.Attempts
	w.stored, w.holds, w.ended, w.final = &out, false, s, s
}

func (w *walk) release() {
	e, held, ok := w.owner()
	if !ok {
		return
	}
	n := w.note()
	out, err := rules.Release(w.entry(), e, n)
	if w.late(held, err) {
		return
	}
	w.require(out.State == journal.Pending, "released as %v", out.State)
	w.attempts += n.Attempts
	if n.Orderly && w.resumes > 0 {
		w.resumes--
	}
	if n.NotSent {
		w.sent = time.Time{}
	}
	if n.Clear && w.enlisted {
		w.seen.unclear++
	}
	w.stored, w.holds, w.clear = &out, false, n.Clear && !w.enlisted
}

func (w *walk) decide() {
	if w.rnd.IntN(3) > 0 {
		return // people are rare
	}
	d := journal.Decision{State: journal.Done + journal.State(w.rnd.IntN(2)), Reason: "r"}
	d.Abandon = d.State == journal.Refused && w.rnd.IntN(2) == 0
	out, err := rules.Decide(w.entry(), d, w.now)
	if err != nil {
		w.require(w.stored == nil || w.stored.State != journal.Pending || w.live(), "a person could not decide: %v", err)
		return
	}
	w.require(w.stored.State == journal.Pending, "decided what is %v", w.stored.State)
	w.require(!w.live(), "decided under a live claim")
	w.stored, w.holds, w.ended, w.final = &out, false, journal.Pending, d.State
	w.seen.decisions++
}

func (w *walk) sweep() {
	if w.stored == nil {
		return
	}
	keep := [...]time.Duration{0, time.Hour, 30 * 24 * time.Hour}[w.rnd.IntN(3)]
	e := *w.entry()
	left, write, remove := rules.Sweep(e, keep, w.now)
	w.require(!write || !remove, "both written and deleted")
	if w.delivery {
		expired := !w.now.Before(e.Expires)
		w.require(!write && remove == (expired && !w.live()), "a delivery is deleted when it expires and nobody handles it: %v, %v", write, remove)
		if expired && w.live() {
			w.seen.spared++
		}
	} else if write || remove {
		w.require(e.State != journal.Pending, "pending was touched")
		w.require(!w.now.Before(e.Finished.Add(e.Window)), "swept within the window")
		if keep == 0 {
			keep = 400 * 24 * time.Hour
		}
		w.require(remove == !w.now.Before(e.Finished.Add(keep)), "kept %v, deleted: %v", w.now.Sub(e.Finished), remove)
	}
	switch {
	case remove:
		// Those who held it are not asked again: what a claim of something
		// forgotten may do is not said.
		w.stored, w.given, w.holds, w.fence = nil, nil, false, 0
		w.seen.deleted++
	case write:
		w.require(left.Request == nil && left.Answer == nil, "not emptied")
		left.Request, left.Answer = e.Request, e.Answer
		require.Equal(w.t, e, left)
		left.Request, left.Answer = nil, nil
		w.stored = &left
		w.seen.emptied++
	default:
		require.Equal(w.t, e, left)
	}
}

func (w *walk) enlist() {
	in, old := w.intent(), w.entry()
	out, write, err := rules.Enlist(w.entry(), in, w.now)
	switch {
	case old == nil:
		w.require(write && err == nil && out.Key == in.Key && out.Generation == 1, "enlist: %v", err)
		w.anew(1, in.Key)
	case w.usedKey(in):
		w.require(!write && errors.Is(err, journal.ErrInvalid), "enlist: %v", err)
		require.Equal(w.t, *old, out)
		return
	case old.State == journal.Refused:
		w.require(write && err == nil && out.Key == in.NextKey && out.Generation == old.Generation+1, "enlist: %v", err)
		w.anew(out.Generation, in.NextKey)
	case old.State == journal.Pending && !w.enlisted && w.same(in):
		w.require(write && err == nil && out.Key == old.Key && out.Fence == old.Fence, "enlist: %v", err)
		w.seen.promised++
		if w.clear {
			w.sent, w.clear = time.Time{}, false
			w.seen.freed++
		}
		w.stored, w.enlisted = &out, true
		return
	default:
		w.require(!write, "an entry was enlisted again")
		w.require((err == nil) == w.same(in) && (err == nil || err == journal.ErrMismatch), "enlist: %v", err)
		require.Equal(w.t, *old, out)
		return
	}
	w.require(out.Owner == "" && out.FirstSend.IsZero() && out.State == journal.Pending, "enlisted and claimed: %+v", out)
	w.learn(in)
	w.stored, w.holds, w.enlisted = &out, false, true
	w.seen.enlisted++
}

func (w *walk) invariants() {
	w.t.Helper()
	e := w.stored
	w.require(e.Key == w.keys[e.Generation], "generation %d had key %q", e.Generation, w.keys[e.Generation])
	w.require(e.Claimed(w.now) == w.live(), "claimed: %v", e.Claimed(w.now))
	w.require(e.State == journal.Pending || e.Owner == "", "%v and claimed", e.State)
	w.require((e.State == journal.Pending) == e.Finished.IsZero(), "%v, finished at %v", e.State, e.Finished)
	w.require(e.State == w.final, "%v became %v", w.final, e.State)
	w.require(e.Attempts == w.attempts, "%d attempts, want %d", e.Attempts, w.attempts)
	w.require(e.Resumes == w.resumes, "%d resumes, want %d", e.Resumes, w.resumes)
	w.require(e.FirstSend.Equal(w.sent), "first send %v, want %v", e.FirstSend, w.sent)
	w.require(e.Clear == w.clear, "clear: %v", e.Clear)
	w.require(e.Enlisted == w.enlisted && !(e.Enlisted && e.Clear), "enlisted: %v, clear: %v", e.Enlisted, e.Clear)
	w.require(!e.Differs, "Differs is stored")
	w.require(w.shape != ([32]byte{}) || len(e.Fingerprint) == 0, "a fingerprint of nothing")
	if w.shape != ([32]byte{}) {
		w.require(bytes.Equal(e.Fingerprint, rules.Secret.Fingerprint(w.shape, w.content)), "the fingerprint changed")
	}
	for _, at := range [...]time.Time{e.Created, e.FirstSend, e.Lease, e.Finished, e.Expires} {
		w.require(at.Equal(at.Truncate(time.Microsecond)), "%v is not whole", at)
	}
}
