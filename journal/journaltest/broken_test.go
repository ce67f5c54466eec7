package journaltest_test

import (
	"context"
	"errors"
	"iter"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/internal/leak"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/journaltest"
)

// TestMain fails the run if goroutines are left behind.
func TestMain(m *testing.M) { os.Exit(leak.Run(m)) }

// broken is a journal that goes wrong in one way, and the subtest that must
// notice.
type broken struct {
	name    string
	open    func(good *journal.Memory) journal.Journal
	subtest string
}

var brokenJournals = []broken{
	{"a late owner overwrites", func(m *journal.Memory) journal.Journal { return &noFence{m} },
		"a late owner can neither renew, finish nor release what was taken over"},
	{"another request is let through", func(m *journal.Memory) journal.Journal { return &noFingerprint{m} },
		"another request is ErrMismatch when done, with the entry"},
	{"done starts again", func(m *journal.Memory) journal.Journal { return &doneAgain{m} },
		"done is never begun again"},
	{"who takes over has a new key", func(m *journal.Memory) journal.Journal { return &newKey{m} },
		"who takes over has the same key and the next fence, and sees what may have been sent"},
	{"a claim does not hold", func(m *journal.Memory) journal.Journal { m.Lease = time.Microsecond; return m },
		"a live claim is ErrClaimed, with the entry"},
	{"a lease does not end", func(m *journal.Memory) journal.Journal { m.Lease = time.Hour; return m },
		"a claim holds until its lease ends, then anybody takes it over"},
	{"all who begin at once have the claim", func(m *journal.Memory) journal.Journal { return &everybody{m} },
		"of 50 who begin one operation at once exactly one has the claim"},
	{"a resume is not counted", func(m *journal.Memory) journal.Journal { return &noResume{m} },
		"one resume too many is ErrAttention, with the entry"},
	{"a resume creates what was swept", func(m *journal.Memory) journal.Journal { return &resumeCreates{m} },
		"a resume of an operation without an entry is ErrNotFound and creates nothing"},
	{"a resume claims what waits for its caller", func(m *journal.Memory) journal.Journal { return &resumeClaims{m} },
		"a resume of an entry that waits for its caller returns it and claims nothing"},
	{"a refused key is begun again", func(m *journal.Memory) journal.Journal { return &refusedKey{m} },
		"a next key that was refused already is ErrInvalid, with the entry, and begins nothing"},
	{"a resume looks first and claims later", func(m *journal.Memory) journal.Journal { return &looksFirst{m} },
		"no resume claims what waits for its caller, however they meet"},
	{"Begin returns FirstSend of now", func(m *journal.Memory) journal.Journal { return &asStored{m} },
		"Begin returns FirstSend and Clear of before and stores that the key may be sent now"},
	{"a second Finish is refused", func(m *journal.Memory) journal.Journal { return &finishOnce{Memory: m} },
		"a second Finish of the same claim with the same state changes nothing"},
	{"the newest comes first", func(m *journal.Memory) journal.Journal { return &newestFirst{m} },
		"Pending yields the pending entries, oldest first, claimed or not"},
	{"ids are folded", func(m *journal.Memory) journal.Journal { return &folded{m} },
		"any string is stored as it is and told apart by its bytes"},
	{"a cancelled context is ignored", func(m *journal.Memory) journal.Journal { return &deaf{m} },
		"a cancelled context changes nothing"},
	{"entries are shared", func(m *journal.Memory) journal.Journal {
		return &shared{Memory: m, seen: map[journal.Operation]journal.Entry{}}
	},
		"entries share no memory with the store"},
	{"tombstones are swept early", func(m *journal.Memory) journal.Journal { return &hasty{m} },
		"after the window request and answer go and the tombstone stays"},
	{"an event that is handled is begun again when it expires", func(m *journal.Memory) journal.Journal { return &expiredTwice{m} },
		"an expired delivery is not begun anew while its claim is live"},
	{"an event whose owner died is never handled", func(m *journal.Memory) journal.Journal { return &claimedForEver{m} },
		"an expired delivery is begun anew when the lease of its claim ends, and not before"},
	{"an event that is handled is swept when it expires", func(m *journal.Memory) journal.Journal { return &sweptWhileHandled{Memory: m} },
		"Sweep leaves an expired delivery alone while its claim is live"},
	{"what had no effect ages the key", func(m *journal.Memory) journal.Journal {
		return &ageing{Memory: m, first: map[journal.Operation]time.Time{}}
	},
		"the key window begins anew with the claim after what had no effect, and only then"},
	{"times have nanoseconds", func(m *journal.Memory) journal.Journal { return &nanoseconds{m} },
		"times are kept to the microsecond, those returned too"},
}

// The test binary runs itself with this set to the name of a broken journal,
// because a suite that fails fails its whole process.
const childJournal = "IDEM_BROKEN_JOURNAL"

func TestRunNoticesEachBrokenJournal(t *testing.T) {
	for _, b := range brokenJournals {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRunPassesUnlessTheJournalIsBroken$/^"+regexp.QuoteMeta(b.subtest)+"$", "-test.timeout=10m")
			child.Env = append(os.Environ(), childJournal+"="+b.name)
			out, err := child.CombinedOutput()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "it was not noticed: %s", out)
			require.Contains(t, string(out), "--- FAIL: TestRunPassesUnlessTheJournalIsBroken/"+strings.ReplaceAll(b.subtest, " ", "_"))
			require.NotContains(t, string(out), "panic:")
		})
	}
}

// The same subtests pass on a journal that is not broken.
func TestRunPassesUnlessTheJournalIsBroken(t *testing.T) {
	open := func(good *journal.Memory) journal.Journal { return good }
	for _, b := range brokenJournals {
		if b.name == os.Getenv(childJournal) {
			open = b.open
		}
	}
	names := map[string]bool{}
	journaltest.Run(t, func(t *testing.T, lease time.Duration) journal.Journal {
		_, name, _ := strings.Cut(t.Name(), "/")
		require.False(t, names[name], "two subtests have one name")
		names[name] = true
		return open(&journal.Memory{Lease: lease})
	})
	if os.Getenv(childJournal) == "" && !t.Failed() && len(names) > 1 {
		for _, b := range brokenJournals {
			require.True(t, names[strings.ReplaceAll(b.subtest, " ", "_")], "no subtest %q", b.subtest)
		}
	}
}

type noFence struct{ *journal.Memory }

// current is e with the fence and generation of whoever has it now.
func (j *noFence) current(ctx context.Context, e journal.Entry) journal.Entry {
	if now, err := j.Get(ctx, e.Operation); err == nil {
		e.Fence, e.Generation = now.Fence, now.Generation
	}
	return e
}

func (j *noFence) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return j.Memory.Renew(ctx, j.current(ctx, e), n)
}

func (j *noFence) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	return j.Memory.Finish(ctx, j.current(ctx, e), s, n)
}

func (j *noFence) Release(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return j.Memory.Release(ctx, j.current(ctx, e), n)
}

type noFingerprint struct{ *journal.Memory }

func (j *noFingerprint) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	in.Shape = [32]byte{}
	return j.Memory.Begin(ctx, in)
}

type doneAgain struct{ *journal.Memory }

func (j *doneAgain) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Memory.Begin(ctx, in)
	if err == nil && e.State == journal.Done {
		in.ID += " again"
		e, err = j.Memory.Begin(ctx, in)
	}
	return e, err
}

type newKey struct{ *journal.Memory }

func (j *newKey) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Memory.Begin(ctx, in)
	if err == nil {
		e.Key = in.Key
	}
	return e, err
}

type everybody struct{ *journal.Memory }

func (j *everybody) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Memory.Begin(ctx, in)
	if errors.Is(err, journal.ErrClaimed) {
		err = nil
	}
	return e, err
}

type noResume struct{ *journal.Memory }

func (j *noResume) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	in.MaxResumes = 0
	return j.Memory.Begin(ctx, in)
}

type resumeCreates struct{ *journal.Memory }

func (j *resumeCreates) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Memory.Begin(ctx, in)
	if errors.Is(err, journal.ErrNotFound) {
		in.MaxResumes = 0
		e, err = j.Memory.Begin(ctx, in)
	}
	return e, err
}

type resumeClaims struct{ *journal.Memory }

func (j *resumeClaims) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Memory.Begin(ctx, in)
	if err == nil && in.MaxResumes > 0 && e.State == journal.Pending && e.Clear {
		in.MaxResumes = 0
		e, err = j.Memory.Begin(ctx, in)
	}
	return e, err
}

type refusedKey struct{ *journal.Memory }

func (j *refusedKey) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	key := in.NextKey
	if e, err := j.Get(ctx, in.Operation); err == nil && e.State == journal.Refused && e.Key == key && key != "" {
		in.NextKey += " again"
	}
	e, err := j.Memory.Begin(ctx, in)
	if e.Key == in.NextKey {
		e.Key = key
	}
	return e, err
}

// looksFirst is right as long as nobody comes between.
type looksFirst struct{ *journal.Memory }

func (j *looksFirst) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	if in.MaxResumes > 0 {
		if e, err := j.Get(ctx, in.Operation); err != nil || e.State == journal.Pending && e.Clear {
			return e, err
		}
		time.Sleep(10 * time.Microsecond) // a store that reads first takes longer
		in.MaxResumes = 0
	}
	return j.Memory.Begin(ctx, in)
}

type asStored struct{ *journal.Memory }

func (j *asStored) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	if e, err := j.Memory.Begin(ctx, in); err != nil {
		return e, err
	}
	return j.Get(ctx, in.Operation)
}

type finishOnce struct {
	*journal.Memory
	mu   sync.Mutex // guards done
	done []int64    // fences
}

func (j *finishOnce) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if slices.Contains(j.done, e.Fence) {
		return journal.Entry{}, journal.ErrClaimLost
	}
	j.done = append(j.done, e.Fence)
	return j.Memory.Finish(ctx, e, s, n)
}

type newestFirst struct{ *journal.Memory }

func (j *newestFirst) Pending(ctx context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		var all []journal.Entry
		for e, err := range j.Memory.Pending(ctx) {
			if err != nil {
				yield(e, err)
				return
			}
			all = append(all, e)
		}
		for _, e := range slices.Backward(all) {
			if !yield(e, nil) {
				return
			}
		}
	}
}

type folded struct{ *journal.Memory }

func (j *folded) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	in.ID = strings.ToLower(in.ID)
	return j.Memory.Begin(ctx, in)
}

type deaf struct{ *journal.Memory }

func (j *deaf) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	return j.Memory.Begin(context.WithoutCancel(ctx), in)
}

type shared struct {
	*journal.Memory
	mu   sync.Mutex // guards seen
	seen map[journal.Operation]journal.Entry
}

func (j *shared) Get(ctx context.Context, op journal.Operation) (journal.Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if e, ok := j.seen[op]; ok {
		return e, nil
	}
	e, err := j.Memory.Get(ctx, op)
	if err == nil {
		j.seen[op] = e
	}
	return e, err
}

type hasty struct{ *journal.Memory }

func (j *hasty) Sweep(ctx context.Context, _ time.Duration) (journal.Swept, error) {
	return j.Memory.Sweep(ctx, time.Nanosecond)
}

type nanoseconds struct{ *journal.Memory }

func (j *nanoseconds) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Memory.Begin(ctx, in)
	e.Lease = e.Lease.Add(time.Nanosecond)
	return e, err
}

// expired: e is a delivery and no longer remembered.
func expired(e journal.Entry) bool { return !e.Expires.IsZero() && !time.Now().Before(e.Expires) }

type expiredTwice struct{ *journal.Memory }

func (j *expiredTwice) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	if e, err := j.Get(ctx, in.Operation); err == nil && e.Owner != "" && expired(e) {
		if _, err = j.Release(ctx, e, journal.Note{}); err != nil {
			return e, err
		}
	}
	return j.Memory.Begin(ctx, in)
}

type claimedForEver struct{ *journal.Memory }

func (j *claimedForEver) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	if e, err := j.Get(ctx, in.Operation); err == nil && e.Owner != "" && expired(e) {
		return e, journal.ErrClaimed
	}
	return j.Memory.Begin(ctx, in)
}

type sweptWhileHandled struct {
	*journal.Memory
	mu    sync.Mutex // guards begun
	begun []journal.Operation
}

func (j *sweptWhileHandled) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.begun = append(j.begun, in.Operation)
	return j.Memory.Begin(ctx, in)
}

func (j *sweptWhileHandled) Sweep(ctx context.Context, keep time.Duration) (journal.Swept, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, op := range j.begun {
		if e, err := j.Get(ctx, op); err == nil && e.Owner != "" && expired(e) {
			if _, err = j.Release(ctx, e, journal.Note{}); err != nil {
				return journal.Swept{}, err
			}
		}
	}
	return j.Memory.Sweep(ctx, keep)
}

type ageing struct {
	*journal.Memory
	mu    sync.Mutex // guards first
	first map[journal.Operation]time.Time
}

func (j *ageing) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, err := j.Memory.Begin(ctx, in)
	if err == nil && e.Clear {
		j.first[in.Operation] = e.FirstSend
	}
	return e, err
}

func (j *ageing) Get(ctx context.Context, op journal.Operation) (journal.Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, err := j.Memory.Get(ctx, op)
	if first, ok := j.first[op]; ok {
		e.FirstSend = first
	}
	return e, err
}
