package sqljournal_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
	"github.com/idem-go/idem/journal/sqljournal/internal/faultvfs"
)

// writeFaults are the ways in which a disk refuses to write. Each comes at
// every call, once and for good.
var writeFaults = map[string]faultvfs.Fault{
	"disk full":   {Op: faultvfs.Write, Code: faultvfs.Full},
	"write error": {Op: faultvfs.Write},
	"torn write":  {Op: faultvfs.Write, Torn: true},
	"sync error":  {Op: faultvfs.Sync},
}

// otherFaults come while a journal is opened or first read, not while it
// writes.
var otherFaults = map[string]faultvfs.Fault{
	"truncate error":      {Op: faultvfs.Truncate},
	"read error":          {Op: faultvfs.Read},
	"open error":          {Op: faultvfs.Open},
	"delete error":        {Op: faultvfs.Delete},
	"shared memory error": {Op: faultvfs.Map},
}

// change is a call on a journal that has pending claims "a" and "b", "c"
// released and "d" done, and what it makes of an entry.
type change struct {
	name string
	call func(ctx context.Context, j journal.Journal, claims map[string]journal.Entry) error
	// made reports whether now is the whole change of before; before has no
	// key where there was no entry.
	id   string
	made func(before, now journal.Entry) bool
}

var finalNote = journal.Note{Attempts: 1, Status: 201, Reference: "ch_1", Answer: slices.Repeat([]byte("answer"), 2000)}

var changes = []change{
	{"begin", func(ctx context.Context, j journal.Journal, _ map[string]journal.Entry) error {
		_, err := j.Begin(ctx, order("new"))
		return err
	}, "new", func(_, now journal.Entry) bool {
		return now.Key == "key-new" && now.Fence == 1 && len(now.Request) == len(order("new").Request)
	}},
	{"claim again", func(ctx context.Context, j journal.Journal, _ map[string]journal.Entry) error {
		_, err := j.Begin(ctx, order("c"))
		return err
	}, "c", func(before, now journal.Entry) bool {
		return now.Key == before.Key && now.Fence == before.Fence+1 && now.Owner != ""
	}},
	{"renew", func(ctx context.Context, j journal.Journal, claims map[string]journal.Entry) error {
		_, err := j.Renew(ctx, claims["a"], journal.Note{Status: 409})
		return err
	}, "a", func(before, now journal.Entry) bool { return now.Status == 409 && now.Fence == before.Fence }},
	{"finish", func(ctx context.Context, j journal.Journal, claims map[string]journal.Entry) error {
		_, err := j.Finish(ctx, claims["a"], journal.Done, finalNote)
		return err
	}, "a", func(before, now journal.Entry) bool {
		return now.State == journal.Done && now.Key == before.Key && slices.Equal(now.Answer, finalNote.Answer)
	}},
	{"release", func(ctx context.Context, j journal.Journal, claims map[string]journal.Entry) error {
		_, err := j.Release(ctx, claims["b"], journal.Note{Attempts: 3})
		return err
	}, "b", func(before, now journal.Entry) bool {
		return now.State == journal.Pending && now.Owner == "" && now.Attempts == 3 && now.Key == before.Key
	}},
	{"decide", func(ctx context.Context, j journal.Journal, _ map[string]journal.Entry) error {
		_, err := j.Decide(ctx, order("c").Operation, journal.Decision{State: journal.Done, Reason: "seen in the dashboard"})
		return err
	}, "c", func(before, now journal.Entry) bool { return now.State == journal.Done && now.Decision == "executed" }},
	{"sweep that empties", func(ctx context.Context, j journal.Journal, _ map[string]journal.Entry) error {
		_, err := j.Sweep(ctx, 0)
		return err
	}, "d", func(before, now journal.Entry) bool {
		return now.Key == before.Key && now.State == journal.Done && now.Answer == nil && now.Request == nil
	}},
	{"sweep that deletes", func(ctx context.Context, j journal.Journal, _ map[string]journal.Entry) error {
		_, err := j.Sweep(ctx, time.Nanosecond)
		return err
	}, "d", func(_, now journal.Entry) bool { return now.Key == "" }},
}

var allIDs = []string{"a", "b", "c", "d", "new", "later"}

func allOperations() (ops []journal.Operation) {
	for _, id := range allIDs {
		ops = append(ops, order(id).Operation)
	}
	return ops
}

// scene is a journal with what a change needs, closed.
type scene struct {
	files  map[string][]byte
	claims map[string]journal.Entry
	before map[journal.Operation]journal.Entry
}

func newScene(t *testing.T) (s scene) {
	t.Helper()
	ctx := t.Context()
	dir := t.TempDir()
	j, err := openSQLite(dir)
	require.NoError(t, err)
	s.claims = map[string]journal.Entry{}
	for _, id := range []string{"a", "b", "c", "d"} {
		s.claims[id], err = j.Begin(ctx, order(id))
		require.NoError(t, err)
	}
	_, err = j.Release(ctx, s.claims["c"], journal.Note{})
	require.NoError(t, err)
	_, err = j.Finish(ctx, s.claims["d"], journal.Done, finalNote)
	require.NoError(t, err)
	s.before, err = read(ctx, j, allOperations())
	require.NoError(t, err)
	require.NoError(t, j.Close())
	s.files = map[string][]byte{}
	for _, name := range []string{"journal.db", "journal.db-wal"} {
		s.files[name], err = os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
	}
	return s
}

// play puts the scene on a disk of its own.
func (s scene) play(t *testing.T) (v *faultvfs.VFS, dir string) {
	t.Helper()
	v, dir = newDisk(t, faultvfs.Options{Record: true})
	require.NoError(t, faultvfs.State{Files: s.files}.Write(dir))
	return v, dir
}

// unlatched says which call a journal took after a failed write.
func unlatched(ctx context.Context, j journal.Journal, claims map[string]journal.Entry) error {
	begin := func(id string) error { _, err := j.Begin(ctx, order(id)); return err }
	var pending error
	for _, err := range j.Pending(ctx) {
		pending = err
		break
	}
	_, renew := j.Renew(ctx, claims["a"], journal.Note{})
	_, finish := j.Finish(ctx, claims["a"], journal.Refused, journal.Note{})
	_, release := j.Release(ctx, claims["a"], journal.Note{})
	_, decide := j.Decide(ctx, order("c").Operation, journal.Decision{State: journal.Done, Reason: "x"})
	_, get := j.Get(ctx, order("a").Operation)
	_, sweep := j.Sweep(ctx, 0)
	for name, err := range map[string]error{
		"Begin": begin("later"), "Begin of a pending one": begin("c"), "Renew": renew, "Finish": finish,
		"Release": release, "Decide": decide, "Get": get, "Pending": pending, "Sweep": sweep,
	} {
		if !errors.Is(err, journal.ErrLatched) {
			return fmt.Errorf("%s after a failed write: %v", name, err)
		}
	}
	return nil
}

// faulty makes c on a disk with the fault, and says what went wrong that must
// not; through: the fault was not met.
func (s scene) faulty(t *testing.T, open opener, c change, fault faultvfs.Fault) (through bool, err error) {
	t.Helper()
	ctx := t.Context()
	v, dir := s.play(t)
	j, err := open(dir)
	require.NoError(t, err)
	defer func() { // the one that was opened last
		if j != nil {
			err = errors.Join(err, j.Close())
		}
	}()
	if fault.Times < 0 { // a log that is in use; the faults that come once meet an empty one
		_, err := j.Renew(ctx, s.claims["b"], journal.Note{})
		require.NoError(t, err)
	}
	before, err := read(ctx, j, allOperations())
	require.NoError(t, err)

	v.Fail(fault)
	defer v.Fail() // Close is not under test here
	failed := c.call(ctx, j, s.claims)
	fired := v.Fired() > 0
	op := order(c.id).Operation
	after := func(found map[journal.Operation]journal.Entry, acknowledged bool) error {
		now, had := found[op], before[op]
		made := c.made(had, now)
		if !made && (acknowledged || digest(now) != digest(had)) {
			return fmt.Errorf("%s returned %v; before %+v, now %+v", c.name, failed, had, now)
		}
		rest, want := maps.Clone(found), maps.Clone(before)
		delete(rest, op)
		delete(want, op)
		for op, e := range want {
			if digest(rest[op]) != digest(e) {
				return fmt.Errorf("%s changed %v: before %+v, now %+v", c.name, op, e, rest[op])
			}
			delete(rest, op)
		}
		if len(rest) > 0 {
			return fmt.Errorf("%s invented %+v", c.name, rest)
		}
		return nil
	}
	afterCrash := func(when string, check func(found map[journal.Operation]journal.Entry) error) error {
		for seed := range uint64(2) {
			if err := crashed(t, open, v, seed, check); err != nil {
				return fmt.Errorf("%s, after a power loss (%d): %w", when, seed, err)
			}
		}
		return nil
	}
	if failed == nil && !fired {
		return true, nil
	}
	if failed == nil { // the fault did no harm, or there is a lie
		return false, afterCrash("acknowledged", func(found map[journal.Operation]journal.Entry) error { return after(found, true) })
	}
	if !fired {
		return false, fmt.Errorf("%s without a fault: %w", c.name, failed)
	}
	if full := errors.Is(failed, journal.ErrFull); full != (fault.Code == faultvfs.Full) {
		return false, fmt.Errorf("%s: code %d became %w", c.name, fault.Code, failed)
	}
	if err := unlatched(ctx, j, s.claims); err != nil {
		return false, err
	}
	_ = j.Close() // the disk may be bad still
	v.Fail()

	if j, err = open(dir); err != nil {
		return false, fmt.Errorf("open again: %w", err)
	}
	found, err := read(ctx, j, allOperations())
	if err != nil {
		return false, fmt.Errorf("opened again: %w", err)
	}
	if err := after(found, false); err != nil {
		return false, fmt.Errorf("opened again: %w", err)
	}
	later, err := j.Begin(ctx, order("later"))
	if err != nil {
		return false, fmt.Errorf("opened again: %w", err)
	}
	// Pages of a failed sync are clean, but not on the disk; what is written
	// behind them must not need them.
	return false, afterCrash("opened again", func(survived map[journal.Operation]journal.Entry) error {
		if e := survived[later.Operation]; e.Key != later.Key || e.Fence != later.Fence {
			return fmt.Errorf("acknowledged %+v, there is %+v", later, e)
		}
		delete(survived, later.Operation)
		for op, e := range found {
			if digest(survived[op]) != digest(e) {
				return fmt.Errorf("what a caller saw is lost: %+v, now %+v", e, survived[op])
			}
		}
		return after(survived, false)
	})
}

// crashed opens a copy as a power loss now would leave it.
func crashed(t *testing.T, open opener, v *faultvfs.VFS, seed uint64, check func(map[journal.Operation]journal.Entry) error) (err error) {
	t.Helper()
	_, dir := newDisk(t, faultvfs.Options{})
	require.NoError(t, v.Crash(dir, seed))
	copied, err := open(dir)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	defer func() { err = errors.Join(err, copied.Close()) }()
	found, err := read(t.Context(), copied, allOperations())
	if err != nil {
		return err
	}
	return check(found)
}

// everyCall makes c with fault at the first call, the second, and so on until
// it is not met any more.
func (s scene) everyCall(t *testing.T, open opener, c change, fault faultvfs.Fault) (times int, wrong []error) {
	t.Helper()
	const most = 200 // far more than a change has calls
	for at := 1; at <= most; at += stride() {
		fault.At = at
		through := false
		t.Run(fmt.Sprint("call ", at), func(t *testing.T) {
			var err error
			if through, err = s.faulty(t, open, c, fault); err != nil {
				wrong = append(wrong, fmt.Errorf("%v %d, times %d: %w", fault.Op, at, fault.Times, err))
			}
		})
		if through || t.Failed() {
			return times, wrong
		}
		times++
	}
	require.Fail(t, "the fault is met for ever", "%s: %+v", c.name, fault)
	return times, wrong
}

func TestC71_FailingDiskMeansNothingIsAcknowledged(t *testing.T) {
	s := newScene(t)
	often := []int{-1, 1} // for good and once
	if hurried() {
		often = often[:1]
	}
	for _, c := range changes {
		for _, name := range slices.Sorted(maps.Keys(writeFaults)) {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				fault := writeFaults[name]
				for _, fault.Times = range often {
					times, wrong := s.everyCall(t, openSQLite, c, fault)
					require.Empty(t, first(wrong, 3))
					require.Positive(t, times, "the fault was never met")
				}
			})
		}
	}
}

// A commit that makes the log long writes it back to the database. If that
// fails, the commit stands all the same.
func TestC71_FailingDiskUnderTheDatabaseTakesNothingBack(t *testing.T) {
	s := newScene(t)
	const large = 17 << 20
	finish := change{"finish", func(ctx context.Context, j journal.Journal, claims map[string]journal.Entry) error {
		n := finalNote
		n.Answer = make([]byte, large) // longer than the log may grow before it is written back
		_, err := j.Finish(ctx, claims["a"], journal.Done, n)
		return err
	}, "a", func(_, now journal.Entry) bool { return now.State == journal.Done && len(now.Answer) == large }}
	names := []string{"disk full", "sync error"}
	if hurried() { // 17 MB are slow under the race detector
		names = names[:1]
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			fault := writeFaults[name]
			fault.File = faultvfs.Main
			fault.Times = -1
			through, err := s.faulty(t, openSQLite, finish, fault)
			require.NoError(t, err)
			require.False(t, through, "nothing was written back")
		})
	}
}

func TestC71_FailingDiskWhileReading(t *testing.T) {
	s := newScene(t)
	for at := 1; ; at++ {
		through := false
		t.Run(fmt.Sprint("call ", at), func(t *testing.T) {
			ctx := t.Context()
			v, dir := s.play(t)
			j, err := openSQLite(dir)
			require.NoError(t, err)
			defer func() { require.NoError(t, j.Close()) }()
			v.Fail(faultvfs.Fault{Op: faultvfs.Read, At: at})
			found, err := read(ctx, j, allOperations())
			through = v.Fired() == 0
			v.Fail()
			require.Equal(t, through, err == nil, "%v", err)
			if through {
				require.Len(t, found, 4)
			}
			found, err = read(ctx, j, allOperations())
			require.NoError(t, err, "a read that failed changed nothing; the journal goes on")
			require.Len(t, found, 4)
		})
		if through || t.Failed() {
			require.Greater(t, at, 1, "the fault was never met")
			return
		}
	}
}

func TestC71_FailingDiskWhileOpening(t *testing.T) {
	s := newScene(t)
	faults := maps.Clone(writeFaults)
	maps.Copy(faults, otherFaults)
	for _, state := range []string{"new", "closed", "crashed"} {
		for _, name := range slices.Sorted(maps.Keys(faults)) {
			t.Run(state+"/"+name, func(t *testing.T) {
				fault := faults[name]
				for at := 1; ; at += stride() {
					require.Less(t, at, 200)
					fault.At = at
					through := false
					t.Run(fmt.Sprint("call ", at), func(t *testing.T) { through = s.opening(t, state, fault) })
					if through || t.Failed() {
						return
					}
				}
			})
		}
	}
}

// opening opens a journal on a disk with the fault.
func (s scene) opening(t *testing.T, state string, fault faultvfs.Fault) (through bool) {
	t.Helper()
	ctx := t.Context()
	v, dir := newDisk(t, faultvfs.Options{Record: true})
	var before map[journal.Operation]journal.Entry
	if state != "new" {
		before = s.before
		require.NoError(t, faultvfs.State{Files: s.files}.Write(dir))
	}
	if state == "crashed" { // all is in the log, nothing in the database yet
		j, err := openSQLite(dir)
		require.NoError(t, err)
		e, err := j.Begin(ctx, order("new"))
		require.NoError(t, err)
		before = maps.Clone(before)
		before[e.Operation], err = j.Get(ctx, e.Operation)
		require.NoError(t, err)
		copied := t.TempDir()
		require.NoError(t, v.Crash(copied, 1))
		require.NoError(t, j.Close())
		v, err = faultvfs.New(faultvfs.Options{Dir: copied, Default: true, NoSync: true, Record: true})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, v.Close()) })
		dir = copied
	}
	v.Fail(fault)
	j, err := openSQLite(dir)
	through = v.Fired() == 0
	v.Fail()
	if through {
		require.NoError(t, err)
	}
	if err != nil {
		var file *sqljournal.FileError
		if fault.Op != faultvfs.Read { // SQLite's integrity check takes a page that it cannot read for damage
			require.False(t, errors.As(err, &file), "a bad disk is not a bad file: %v", err)
		}
		j, err = openSQLite(dir)
	}
	require.NoError(t, err, "without the fault")
	defer func() { require.NoError(t, j.Close()) }()
	found, err := read(ctx, j, allOperations())
	require.NoError(t, err)
	require.Len(t, found, len(before))
	for op, e := range before {
		require.Equal(t, digest(e), digest(found[op]), "%v", op)
	}
	_, err = j.Begin(ctx, order("later"))
	require.NoError(t, err)
	require.NoError(t, crashed(t, openSQLite, v, 1, func(found map[journal.Operation]journal.Entry) error {
		if len(found) != len(before)+1 {
			return fmt.Errorf("%d entries were acknowledged, there are %d", len(before)+1, len(found))
		}
		return nil
	}))
	return through
}

// Linux marks the pages of a failed sync as clean, so that no later sync writes
// them. A journal that is opened again may find them in the system's cache, and
// must not put what it acknowledges behind them.
func TestC71_AfterAFailedSyncTheNextJournalStandsOnWhatIsOnTheDisk(t *testing.T) {
	s := newScene(t)
	for name, open := range map[string]opener{"a file of its own": openSQLite, "the caller's database": openOver} {
		t.Run(name, func(t *testing.T) {
			v, dir := s.play(t)
			j, err := open(dir)
			require.NoError(t, err)
			_, err = j.Renew(t.Context(), s.claims["b"], journal.Note{})
			require.NoError(t, err)
			v.Fail(faultvfs.Fault{Op: faultvfs.Sync, Times: -1})
			_, err = j.Begin(t.Context(), order("new"))
			require.Error(t, err)
			_ = j.Close() // the disk is bad still
			v.Fail()

			j, err = open(dir)
			require.NoError(t, err)
			_, err = j.Get(t.Context(), order("new").Operation)
			require.NoError(t, err, "it is in the log, and in the cache")
			_, err = j.Begin(t.Context(), order("later"))
			require.NoError(t, err)
			lost := 0
			losses := uint64(40)
			if hurried() {
				losses = 10
			}
			for seed := range losses {
				if err := crashed(t, open, v, seed, func(found map[journal.Operation]journal.Entry) error {
					if found[order("later").Operation].Key == "" {
						return errors.New("it is not there")
					}
					return nil
				}); err != nil {
					lost++
				}
			}
			require.NoError(t, j.Close())
			require.Zero(t, lost, "of %d power losses took what was acknowledged", losses)
		})
	}
}

// Calls that are committed together fail together: those that were told so,
// and no others, may be missing.
func TestC71_FailingDiskFailsAllThatAreCommittedTogether(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(writeFaults)) {
		t.Run(name, func(t *testing.T) {
			for at := 1; at < 30; at += 3 {
				v, dir := newDisk(t, faultvfs.Options{Record: true})
				j, err := openSQLite(dir)
				require.NoError(t, err)
				fault := writeFaults[name]
				fault.At = at
				v.Fail(fault)
				const callers = 24
				errs := make([]error, callers)
				var all sync.WaitGroup
				for i := range callers {
					all.Go(func() { _, errs[i] = j.Begin(t.Context(), order(fmt.Sprint(i))) })
				}
				all.Wait()
				v.Fail()
				_ = j.Close() // it may say that it was latched
				j, err = openSQLite(dir)
				require.NoError(t, err)
				for i, failed := range errs {
					e, err := j.Get(t.Context(), order(fmt.Sprint(i)).Operation)
					if failed == nil || err == nil {
						require.NoError(t, err, "acknowledged")
						require.Equal(t, fmt.Sprint("key-", i), e.Key)
					} else {
						require.ErrorIs(t, err, journal.ErrNotFound)
					}
				}
				require.NoError(t, j.Close())
			}
		})
	}
}

// trusting acknowledges what failed, and goes on.
type trusting struct{ store }

func (s trusting) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := s.store.Begin(ctx, in)
	if err != nil && !errors.Is(err, journal.ErrClaimed) {
		return journal.Entry{Operation: in.Operation, Key: in.Key}, nil
	}
	return e, err
}

// The checks must notice a journal that acknowledges what it could not write.
func TestC71_AcknowledgedAfterAFailedWriteIsSeen(t *testing.T) {
	open := func(dir string) (store, error) {
		j, err := openSQLite(dir)
		if err != nil {
			return nil, err
		}
		return trusting{j}, nil
	}
	s := newScene(t)
	for name, fault := range writeFaults {
		times, wrong := s.everyCall(t, open, changes[0], fault)
		require.Len(t, wrong, times, name)
		require.Positive(t, times, name)
	}
}
