package sqljournal_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal/internal/faultvfs"
)

var (
	crashStates = flag.Int("crash-states", 0, "how many different states after a power loss are opened; 0: 2,000, or 100 with -race or -short")
	crashSeed   = flag.Uint64("crash-seed", 1, "chooses the workload and the states")
)

// version is what one call made of an operation: it may be on the disk from
// start on, and must be from done on, counted in changes of the files.
type version struct {
	start, done int
	digest      string // "": no entry
	call        string
}

// diary is what callers were told.
type diary struct {
	opened int // from here on the journal itself was there

	mu       sync.Mutex // guards versions
	versions map[journal.Operation][]version
}

func (d *diary) note(op journal.Operation, v version) {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := d.versions[op]
	if all == nil {
		all = []version{{call: "nothing"}}
	}
	if all[len(all)-1].digest != v.digest {
		all = append(all, v)
	}
	d.versions[op] = all
}

// acknowledged is how many versions must be on the disk after n changes: with
// the files it says whether two states are the same.
func (d *diary) acknowledged(n int) (count int) {
	for _, all := range d.versions {
		for _, v := range all {
			if v.done <= n {
				count++
			}
		}
	}
	return count
}

// wrong says what a store that was opened after n changes has lost or
// invented; nil: nothing.
func (d *diary) wrong(n int, found map[journal.Operation]journal.Entry) error {
	for op, all := range d.versions {
		first, last := 0, 0
		for i, v := range all {
			if v.done <= n {
				first = i
			}
			if v.start < n {
				last = i
			}
		}
		have := ""
		if e, ok := found[op]; ok {
			have = digest(e)
		}
		allowed := all[first : max(first, last)+1]
		if !slices.ContainsFunc(allowed, func(v version) bool { return v.digest == have }) {
			return fmt.Errorf("%v: %q was acknowledged, but %+v is there", op, all[first].call, found[op])
		}
	}
	return nil
}

// caller does random things to operations of its own.
type caller struct {
	rnd    *rand.Rand
	ids    []string
	claims map[string]journal.Entry
}

// bench is a journal, its disk, and the diary of those who call it.
type bench struct {
	store
	v *faultvfs.VFS
	*diary
}

func (c *caller) step(ctx context.Context, b bench) error {
	id := c.ids[c.rnd.IntN(len(c.ids))]
	in := order(id)
	claim, held := c.claims[id]
	n := journal.Note{Attempts: 1, Status: 200 + c.rnd.IntN(300), Reference: fmt.Sprint("ch_", c.rnd.IntN(1000))}
	call := func(name string, f func() (journal.Entry, error)) error {
		start := b.v.Position()
		e, err := f()
		if err != nil {
			return fmt.Errorf("%s of %s: %w", name, id, err)
		}
		if delete(c.claims, id); e.Owner != "" {
			c.claims[id] = e
		}
		return b.look(ctx, in.Operation, start, name)
	}
	release := func() (journal.Entry, error) { return b.Release(ctx, claim, n) }
	switch chance := c.rnd.IntN(10); {
	case !held:
		return call("begin", func() (journal.Entry, error) { return b.Begin(ctx, in) })
	case chance < 4:
		n.Answer = slices.Repeat([]byte{byte(c.rnd.Uint32())}, []int{10, 700, 9000}[c.rnd.IntN(3)])
		return call("done", func() (journal.Entry, error) { return b.Finish(ctx, claim, journal.Done, n) })
	case chance < 5:
		return call("refused", func() (journal.Entry, error) { return b.Finish(ctx, claim, journal.Refused, n) })
	case chance < 7:
		return call("renew", func() (journal.Entry, error) { return b.Renew(ctx, claim, n) })
	case chance < 9:
		return call("release", release)
	}
	if err := call("release", release); err != nil {
		return err
	}
	return call("decide", func() (journal.Entry, error) {
		return b.Decide(ctx, in.Operation, journal.Decision{State: journal.Refused, Abandon: true, Reason: "nobody knows"})
	})
}

// look notes what the journal says of op after a call that began at start.
func (b bench) look(ctx context.Context, op journal.Operation, start int, call string) error {
	v := version{start: start, done: b.v.Position(), call: call}
	switch e, err := b.Get(ctx, op); {
	case err == nil:
		v.digest = digest(e)
	case !errors.Is(err, journal.ErrNotFound):
		return fmt.Errorf("get: %w", err)
	}
	b.note(op, v)
	return nil
}

func (b bench) sweep(ctx context.Context, ids []string, keep time.Duration) error {
	start := b.v.Position()
	if _, err := b.Sweep(ctx, keep); err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	for _, id := range ids {
		if err := b.look(ctx, order(id).Operation, start, "sweep"); err != nil {
			return err
		}
	}
	return nil
}

// workload is a journal's life: callers one after the other and at the same
// time, sweeps, checkpoints of its log while it is in use, and all of that
// again after it was closed and opened.
func workload(t *testing.T, open opener, seed uint64, o faultvfs.Options) (*faultvfs.Trace, *diary) {
	t.Helper()
	ctx := t.Context()
	o.Record = true
	v, dir := newDisk(t, o)
	d := &diary{versions: map[journal.Operation][]version{}}
	rnd := rand.New(rand.NewPCG(seed, 0))
	var callers []*caller
	var ids []string
	for n := range uint64(4) {
		c := &caller{rnd: rand.New(rand.NewPCG(seed, n+1)), claims: map[string]journal.Entry{}}
		for i := range 3 {
			c.ids = append(c.ids, fmt.Sprint(n, "-", i))
		}
		callers, ids = append(callers, c), append(ids, c.ids...)
	}
	for life := range 3 {
		j, err := open(dir)
		require.NoError(t, err)
		b := bench{j, v, d}
		if life == 0 {
			d.opened = v.Position()
		}
		for i := range 30 {
			require.NoError(t, callers[rnd.IntN(len(callers))].step(ctx, b))
			if i%10 == 9 {
				checkpoint(t, dir, []string{"passive", "restart", "truncate"}[(i/10+life)%3])
				require.NoError(t, b.sweep(ctx, ids, []time.Duration{0, time.Nanosecond}[i/10%2]))
			}
		}
		var all sync.WaitGroup
		errs := make([]error, len(callers))
		for n, c := range callers {
			all.Go(func() {
				for i := 0; i < 6 && errs[n] == nil; i++ {
					errs[n] = c.step(ctx, b)
				}
			})
		}
		all.Wait()
		require.NoError(t, errors.Join(errs...))
		require.NoError(t, j.Close())
	}
	return v.Trace(), d
}

// checkpoint is what SQLite does by itself when the log is long.
func checkpoint(t *testing.T, dir, mode string) {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "journal.db")+"?_pragma=busy_timeout(1000)&_pragma=synchronous(full)")
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	var busy, log, done int
	require.NoError(t, db.QueryRowContext(t.Context(), "pragma wal_checkpoint("+mode+")").Scan(&busy, &log, &done))
}

// crashes opens states after a power loss until it has seen as many different
// ones as states says, and returns what was wrong with them.
func crashes(t *testing.T, open opener, trace *faultvfs.Trace, d *diary, states int, seed uint64) (opened int, wrong []error) {
	t.Helper()
	_, dir := newDisk(t, faultvfs.Options{})
	rnd := rand.New(rand.NewPCG(seed, 99))
	type state struct {
		files        [sha256.Size]byte
		acknowledged int
		open         bool
	}
	seen := map[state]bool{}
	skip := max(1, trace.Len()/states)
	for round := 0; len(seen) < states && round < 10*(1+states/trace.Len()); round++ {
		from := rnd.IntN(skip)
		for n, disk := range trace.Disks() {
			if n%skip != from || len(seen) == states {
				continue
			}
			files := disk.Crash(rnd)
			s := state{files.Sum(), d.acknowledged(n), n >= d.opened}
			if seen[s] {
				continue
			}
			seen[s] = true
			require.NoError(t, files.Write(dir))
			if err := survived(t.Context(), open, dir, d, n); err != nil {
				wrong = append(wrong, fmt.Errorf("seed %d, after change %d of %d, %s: %w", seed, n, trace.Len(), files.How, err))
			}
		}
	}
	return len(seen), wrong
}

// survived opens what a power loss after n changes left, and uses it.
func survived(ctx context.Context, open opener, dir string, d *diary, n int) (err error) {
	j, err := open(dir)
	if err != nil {
		if n < d.opened && typed(err) {
			return nil // it was never there
		}
		return fmt.Errorf("open: %w", err)
	}
	defer func() { err = errors.Join(err, j.Close()) }()
	var ops []journal.Operation
	for op := range d.versions {
		ops = append(ops, op)
	}
	found, err := read(ctx, j, ops)
	if err != nil {
		return err
	}
	if err := d.wrong(n, found); err != nil {
		return err
	}
	_, err = j.Begin(ctx, order("afterwards"))
	return err
}

func TestC73_PowerLossLosesNothingThatWasAcknowledged(t *testing.T) {
	start := time.Now()
	trace, d := workload(t, openSQLite, *crashSeed, faultvfs.Options{})
	want := *crashStates
	if want == 0 {
		want = states(2000)
	}
	opened, wrong := crashes(t, openSQLite, trace, d, want, *crashSeed)
	t.Logf("%d different states of %d changes in %v", opened, trace.Len(), time.Since(start))
	require.Empty(t, first(wrong, 3), "%d of %d states", len(wrong), opened)
	require.Equal(t, want, opened)
}

func first(errs []error, n int) []error { return errs[:min(n, len(errs))] }

func TestC73_PowerLossLosesNothingOfAJournalInTheCallersDatabase(t *testing.T) {
	trace, d := workload(t, openOver, *crashSeed, faultvfs.Options{})
	opened, wrong := crashes(t, openOver, trace, d, states(600), *crashSeed)
	require.Empty(t, first(wrong, 3), "%d of %d states", len(wrong), opened)
}

// The states must be able to show a loss. A disk that does not do what a sync
// promises loses what was acknowledged, and this must be seen.
func TestC73_PowerLossIsSeenOnADiskThatLies(t *testing.T) {
	trace, d := workload(t, openSQLite, *crashSeed, faultvfs.Options{Lies: true})
	opened, wrong := crashes(t, openSQLite, trace, d, states(400), *crashSeed)
	require.Greater(t, len(wrong), opened/4, "of %d states", opened)
}
