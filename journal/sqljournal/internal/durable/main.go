// Command durable measures what it costs to have an operation on disk before
// its first byte is sent: journal.Begin of new operations, and the whole cycle
// of Begin and Finish, with group commit and without, beside the least that
// any store can do on the same disk: append 256 bytes and flush them.
//
//	go run ./internal/durable
//	go run ./internal/durable -dir /var/lib/shop -rounds 9
//	go run ./internal/durable -gate
//
// The cases run in short slices, in a new order each round, each on a new
// journal, and the probe runs before each of them, so that a noisy neighbour
// slows all of them alike. Figures are medians of the rounds, with the least
// and the largest of the operations per second; ratios are those of the
// medians. A writer begins its next operation when the last one is durable. The
// ids are random, which is the harder case for the index.
//
// With -gate the exit status is 1 where 64 writers with group commit begin
// fewer than 6 times the operations of 64 writers without, or where the median
// of their latencies is more than 12 times the probe's.
package main

import (
	"context"
	crand "crypto/rand"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"modernc.org/sqlite"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// What the gate demands of 64 writers.
const (
	leastGain    = 6.0
	mostToProbe  = 12.0
	gatedWriters = 64
)

// leastSlice leaves a slow disk the time for a few operations.
const leastSlice = 50 * time.Millisecond

func main() {
	dir := flag.String("dir", os.TempDir(), "where the files are made, and removed again; it must be on the disk in question")
	rounds := flag.Int("rounds", 5, "rounds; each takes about 22 times -slice")
	slice := flag.Duration("slice", 400*time.Millisecond, "how long each case is measured in a round")
	cheap := flag.Bool("fdatasync", false, "let SQLite commit with fdatasync too, instead of fsync; see Fdatasync of modernc.org/sqlite")
	gate := flag.Bool("gate", false, "fail if group commit brings too little")
	flag.Parse()
	if *rounds < 1 || *slice < leastSlice {
		fmt.Fprintln(os.Stderr, "durable: -rounds must be at least 1, and -slice at least", leastSlice)
		os.Exit(2)
	}
	if *cheap {
		if _, err := sqlite.Fdatasync(true); err != nil {
			fmt.Fprintln(os.Stderr, "durable:", err)
			os.Exit(1)
		}
	}
	b, err := measure(*dir, *rounds, *slice)
	if err == nil {
		b.show(os.Stdout)
		switch {
		case *gate && inMemory(*dir):
			err = fmt.Errorf("%s is a file system in memory", *dir)
		case *gate:
			err = b.check()
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "durable:", err)
		os.Exit(1)
	}
}

// kind is one row of the table.
type kind struct {
	finish  bool // the cycle of Begin and Finish; false: Begin alone
	writers int
	alone   bool // without group commit
}

// figures of one slice.
type figures struct {
	perSecond, p50, p99 float64 // p50 and p99 in microseconds
}

// board is what was measured: for each kind one of each round, and the probes.
type board struct {
	dir    string
	rounds int
	slice  time.Duration
	kinds  []kind
	got    map[kind][]figures
	probes []figures
}

func measure(dir string, rounds int, slice time.Duration) (*board, error) {
	b := &board{dir: dir, rounds: rounds, slice: slice, got: map[kind][]figures{}}
	for _, finish := range []bool{false, true} {
		for _, writers := range []int{1, 8, gatedWriters} {
			b.kinds = append(b.kinds, kind{finish, writers, false}, kind{finish, writers, true})
		}
	}
	for range rounds {
		for _, i := range rand.Perm(len(b.kinds)) {
			k := b.kinds[i]
			raw, err := probe(dir, slice/4)
			if err != nil {
				return nil, err
			}
			f, err := k.run(dir, slice)
			if err != nil {
				return nil, err
			}
			b.probes, b.got[k] = append(b.probes, raw), append(b.got[k], f)
		}
	}
	return b, nil
}

// probe appends to a file that grows: the flush writes its new length too, as
// that of a log does that is not preallocated.
func probe(dir string, slice time.Duration) (_ figures, err error) {
	f, err := os.CreateTemp(dir, "durable-probe-")
	if err != nil {
		return figures{}, err
	}
	defer func() {
		_ = f.Close()
		_ = os.Remove(f.Name())
	}()
	var record [256]byte
	return timed(1, slice, func() error {
		if _, err := f.Write(record[:]); err != nil {
			return err
		}
		return flush(f)
	})
}

// run measures k on a journal of its own.
func (k kind) run(dir string, slice time.Duration) (_ figures, err error) {
	home, err := os.MkdirTemp(dir, "durable-journal-")
	if err != nil {
		return figures{}, err
	}
	defer func() { _ = os.RemoveAll(home) }()
	j, err := sqljournal.OpenSQLite(filepath.Join(home, "journal.db"), sqljournal.Options{NoGroupCommit: k.alone})
	if err != nil {
		return figures{}, err
	}
	defer func() {
		if e := j.Close(); err == nil {
			err = e
		}
	}()
	one := func() error { return k.operation(j) }
	// The first operations of a journal make its log grow to its full length.
	if _, err := timed(k.writers, slice/2, one); err != nil {
		return figures{}, err
	}
	return timed(k.writers, slice, one)
}

func (k kind) operation(j *sqljournal.Journal) error {
	ctx := context.Background()
	e, err := j.Begin(ctx, journal.Intent{
		Operation: journal.Operation{Name: "payment", ID: crand.Text()},
		Key:       crand.Text(),
		NextKey:   crand.Text(),
		Shape:     [32]byte{1},
		Content:   make([]byte, 32),
		Window:    24 * time.Hour,
	})
	if err != nil || !k.finish {
		return err
	}
	_, err = j.Finish(ctx, e, journal.Done, journal.Note{Attempts: 1, Status: 201, Reference: "pay_8f14e45f"})
	return err
}

// timed lets writers call f, one call after the other, for a slice.
func timed(writers int, slice time.Duration, f func() error) (figures, error) {
	runtime.GC() // the garbage of the case before this one is not this one's
	took := make([][]time.Duration, writers)
	errs := make([]error, writers)
	begin := time.Now()
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for at := time.Now(); len(took[w]) == 0 || at.Sub(begin) < slice; {
				if errs[w] = f(); errs[w] != nil {
					return
				}
				now := time.Now()
				took[w] = append(took[w], now.Sub(at))
				at = now
			}
		})
	}
	all.Wait()
	total := time.Since(begin)
	for _, err := range errs {
		if err != nil {
			return figures{}, err
		}
	}
	sorted := slices.Concat(took...)
	slices.Sort(sorted)
	n := len(sorted)
	return figures{
		perSecond: float64(n) / total.Seconds(),
		p50:       float64(sorted[n/2]) / 1e3,
		p99:       float64(sorted[n*99/100]) / 1e3,
	}, nil
}

func perSecond(f figures) float64 { return f.perSecond }
func p50(f figures) float64       { return f.p50 }
func p99(f figures) float64       { return f.p99 }

// spread is a median with the least and the largest.
type spread struct{ least, median, most float64 }

// over the rounds.
func over(of []figures, value func(figures) float64) spread {
	values := make([]float64, len(of))
	for i, f := range of {
		values[i] = value(f)
	}
	slices.Sort(values)
	return spread{values[0], values[len(values)/2], values[len(values)-1]}
}

// gain is how many times the operations group commit brings.
func (b *board) gain(finish bool, writers int) float64 {
	return over(b.got[kind{finish, writers, false}], perSecond).median / over(b.got[kind{finish, writers, true}], perSecond).median
}

// toProbe is the median latency in those of the probe.
func (b *board) toProbe(k kind) float64 {
	return over(b.got[k], p50).median / over(b.probes, p50).median
}

func (b *board) show(w io.Writer) {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	commit := "fsync"
	if sqlite.FdatasyncEnabled() {
		commit = "fdatasync"
	}
	say("%d rounds of %v, medians; GOMAXPROCS %d; SQLite commits with %s; files in %s", b.rounds, b.slice, runtime.GOMAXPROCS(0), commit, b.dir)
	if inMemory(b.dir) {
		say("WARNING: that is a file system in memory, so nothing here is durable, and the ratios mean nothing; give -dir")
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(columns ...any) {
		for _, c := range columns {
			_, _ = fmt.Fprintf(t, "%v\t", c)
		}
		_, _ = fmt.Fprintln(t)
	}
	line := func(name string, writers int, commit string, of []figures, toProbe float64, gain string) {
		n := over(of, perSecond)
		row(name, writers, commit, fmt.Sprintf("%.0f (%.0f-%.0f)", n.median, n.least, n.most),
			fmt.Sprintf("%.0f", over(of, p50).median), fmt.Sprintf("%.0f", over(of, p99).median), fmt.Sprintf("%.1f", toProbe), gain)
	}
	row("", "writers", "commit", "op/s", "p50 us", "p99 us", "p50 / probe", "group / alone")
	line("append 256 B, "+flushName, 1, "", b.probes, 1, "")
	for _, k := range b.kinds {
		name, commit, gain := "begin", "group", fmt.Sprintf("%.1f", b.gain(k.finish, k.writers))
		if k.finish {
			name = "begin, finish"
		}
		if k.alone {
			commit, gain = "alone", ""
		}
		line(name, k.writers, commit, b.got[k], b.toProbe(k), gain)
	}
	_ = t.Flush()
}

// check is an error where 64 writers gain too little or wait too long.
func (b *board) check() error {
	if gain := b.gain(false, gatedWriters); gain < leastGain {
		return fmt.Errorf("group commit begins %.1f times the operations of %d writers, less than %.0f", gain, gatedWriters, leastGain)
	}
	if r := b.toProbe(kind{false, gatedWriters, false}); r > mostToProbe {
		return fmt.Errorf("the median latency of %d writers is %.1f times the probe's, more than %.0f", gatedWriters, r, mostToProbe)
	}
	return nil
}
