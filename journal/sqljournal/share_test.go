//go:build unix

package sqljournal_test

import (
	"bufio"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// Two journals on one file in one process, each with many callers: no
// operation is held by two, and nothing is lost. If one of them dropped the
// locks of the other, the file would be damaged or a fence given twice.
func TestC74_TwoJournalsOfOneProcessShareAFile(t *testing.T) {
	t.Parallel()
	const callers, operations, passes = 16, 40, 6
	path := fresh(t)
	both := []*sqljournal.Journal{open(t, path, sqljournal.Options{Owner: "P", Lease: journal.LongestLease}), open(t, path, sqljournal.Options{Owner: "Q", Lease: journal.LongestLease, NoGroupCommit: true})}
	var holders, claims, done [operations]atomic.Int64
	var all sync.WaitGroup
	for n := range callers {
		all.Go(func() {
			j := both[n%2]
			for i := range passes * operations {
				k := (n*7 + i) % operations
				if i%50 == 0 { // opening and closing one more must drop no locks either
					third, err := sqljournal.OpenSQLite(path, sqljournal.Options{BusyTimeout: patience})
					if err == nil {
						err = third.Close()
					}
					if err != nil {
						t.Errorf("a third journal: %v", err)
						return
					}
				}
				e, err := j.Begin(t.Context(), payment(fmt.Sprint(k)))
				switch {
				case errors.Is(err, journal.ErrClaimed), err == nil && e.State == journal.Done:
					continue
				case err != nil:
					t.Errorf("Begin: %v", err)
					return
				}
				if h := holders[k].Add(1); h != 1 {
					t.Errorf("%d hold operation %d", h, k)
				}
				claims[k].Add(1)
				holders[k].Add(-1)
				if claims[k].Load() < 5 {
					_, err = j.Release(t.Context(), e, journal.Note{Attempts: 1})
				} else {
					done[k].Add(1)
					_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Attempts: 1})
				}
				if err != nil {
					t.Errorf("the end of a claim: %v", err)
					return
				}
			}
		})
	}
	all.Wait()
	for _, j := range both {
		require.NoError(t, j.Close())
	}
	j := open(t, path, sqljournal.Options{}) // with its checks
	for k := range operations {
		e, err := j.Get(t.Context(), payment(fmt.Sprint(k)).Operation)
		require.NoError(t, err)
		require.Equal(t, "first-"+fmt.Sprint(k), e.Key)
		require.EqualValues(t, claims[k].Load(), e.Fence, "each claim has a fence of its own")
		require.EqualValues(t, claims[k].Load(), e.Attempts, "no note is lost")
		require.LessOrEqual(t, done[k].Load(), int64(1))
	}
}

func init() {
	// work claims the operations given by number, tells each claim, and works until it is
	// killed or all are done.
	children["work"] = func(args []string) {
		lease, err := time.ParseDuration(args[1])
		exitOn(err)
		operations, err := strconv.Atoi(args[2])
		exitOn(err)
		j, err := sqljournal.OpenSQLite(args[0], sqljournal.Options{Lease: lease, BusyTimeout: patience})
		exitOn(err)
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for left := true; left; {
					left = false
					for k := range operations {
						e, err := j.Begin(testContext, payment(fmt.Sprint(k)))
						if errors.Is(err, journal.ErrClaimed) {
							left = true
							continue
						}
						exitOn(err)
						if e.State == journal.Done {
							continue
						}
						fmt.Printf("claim %d %d %s\n", k, e.Fence, e.Key)
						_, err = j.Finish(testContext, e, journal.Done, journal.Note{Attempts: 1})
						if !errors.Is(err, journal.ErrClaimLost) {
							exitOn(err)
						}
					}
				}
			})
		}
		all.Wait()
		exitOn(j.Close())
	}
	// shell is a program that knows nothing of journals.
	children["shell"] = func(args []string) {
		db, err := sql.Open("sqlite", args[0])
		exitOn(err)
		var n int
		exitOn(db.QueryRow("SELECT count(*) FROM idem_entries").Scan(&n))
		exitOn(db.Close())
	}
	// hold claims one operation, tells it, waits for a line and finishes.
	children["hold"] = func(args []string) {
		lease, err := time.ParseDuration(args[1])
		exitOn(err)
		j, err := sqljournal.OpenSQLite(args[0], sqljournal.Options{Lease: lease, Owner: args[2], BusyTimeout: patience})
		exitOn(err)
		e, err := j.Begin(testContext, payment("1"))
		exitOn(err)
		fmt.Println("claim", e.Fence, e.Key)
		_, err = bufio.NewReader(os.Stdin).ReadString('\n')
		exitOn(err)
		_, err = j.Finish(testContext, e, journal.Done, journal.Note{Reference: args[2]})
		fmt.Println("finished", errors.Is(err, journal.ErrClaimLost), err == nil)
		exitOn(j.Close())
	}
}

func TestC74_ProcessesThatAreKilledAtWorkShareAFile(t *testing.T) {
	t.Parallel()
	const operations, lives = 2000, 12
	path := fresh(t)
	open(t, path, sqljournal.Options{})
	var mu sync.Mutex // guards claims
	claims := map[string]string{}
	var killed atomic.Int64
	run := func(kill time.Duration) {
		c := child("work", path, "100ms", fmt.Sprint(operations))
		out, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		var timer *time.Timer
		if kill > 0 {
			timer = time.AfterFunc(kill, func() { _ = c.Process.Kill() })
			defer timer.Stop()
		}
		for lines := bufio.NewScanner(out); lines.Scan(); {
			f := strings.Fields(lines.Text())
			if len(f) != 4 {
				continue // cut off by the kill
			}
			mu.Lock()
			if other, ok := claims[f[1]+" "+f[2]]; ok {
				t.Errorf("operation %s: fence %s was given twice, with %s and %s", f[1], f[2], other, f[3])
			}
			claims[f[1]+" "+f[2]] = f[3]
			mu.Unlock()
			if f[3] != "first-"+f[1] {
				t.Errorf("operation %s has key %s", f[1], f[3])
			}
		}
		err = c.Wait()
		if err != nil {
			killed.Add(1)
		}
		if kill == 0 && err != nil {
			t.Errorf("a child: %v", err)
		}
	}
	var all sync.WaitGroup
	for n := range 2 {
		all.Go(func() {
			for i := range lives / 2 {
				run(time.Duration(30+15*((n+i)%4)) * time.Millisecond)
			}
		})
	}
	all.Wait()
	run(0)
	require.Greater(t, killed.Load(), int64(lives/2))
	j := open(t, path, sqljournal.Options{})
	require.Empty(t, pending(t, j))
	for k := range operations {
		e, err := j.Get(t.Context(), payment(fmt.Sprint(k)).Operation)
		require.NoError(t, err)
		require.Equal(t, journal.Done, e.State)
	}
}

func TestC74_AProcessThatOutlastedItsLeaseCannotOverwrite(t *testing.T) {
	t.Parallel() // it waits for a lease, which has to hold on a busy machine
	path := fresh(t)
	in := payment("1")
	const lease = 5 * time.Second
	j := open(t, path, sqljournal.Options{Lease: lease, Owner: "Q"})

	p := child("hold", path, lease.String(), "P")
	stdin, err := p.StdinPipe()
	require.NoError(t, err)
	stdout, err := p.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.Start())
	ended := false
	t.Cleanup(func() {
		if !ended {
			_ = p.Process.Kill()
			_ = p.Wait()
		}
	})
	lines := bufio.NewScanner(stdout)
	require.True(t, lines.Scan())
	require.Equal(t, "claim 1 first-1", lines.Text())

	// P is alive and sends: Q works, but not on that.
	other, err := j.Begin(t.Context(), payment("2"))
	require.NoError(t, err)
	_, err = j.Finish(t.Context(), other, journal.Done, journal.Note{})
	require.NoError(t, err)
	held, err := j.Begin(t.Context(), in)
	require.ErrorIs(t, err, journal.ErrClaimed)
	require.Equal(t, "P", held.Owner)

	require.NoError(t, p.Process.Signal(syscall.SIGSTOP))
	time.Sleep(time.Until(held.Lease) + 5*time.Millisecond) // the lease has to end in real time
	e, err := j.Begin(t.Context(), in)
	require.NoError(t, err)
	require.Equal(t, "first-1", e.Key)
	require.EqualValues(t, 2, e.Fence)
	e, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Reference: "Q"})
	require.NoError(t, err)

	require.NoError(t, p.Process.Signal(syscall.SIGCONT))
	_, err = fmt.Fprintln(stdin)
	require.NoError(t, err)
	require.True(t, lines.Scan())
	require.Equal(t, "finished true false", lines.Text(), "P lost its claim")
	require.NoError(t, p.Wait())
	ended = true
	now, err := j.Get(t.Context(), in.Operation)
	require.NoError(t, err)
	require.Equal(t, e.Reference, now.Reference)
	require.Equal(t, e.Fence, now.Fence)
}

func TestC74_AnOperationOfAKilledProcessIsTakenOverWithItsKey(t *testing.T) {
	t.Parallel() // it waits for a lease, which has to hold on a busy machine
	path := fresh(t)
	const lease = 5 * time.Second
	r := open(t, path, sqljournal.Options{Lease: lease, Owner: "R"})
	p := child("hold", path, lease.String(), "P")
	stdout, err := p.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.Start())
	lines := bufio.NewScanner(stdout)
	require.True(t, lines.Scan())
	require.NoError(t, p.Process.Kill())
	require.Error(t, p.Wait())

	in := payment("1")
	in.Key = "another"
	held, err := r.Begin(t.Context(), in)
	require.ErrorIs(t, err, journal.ErrClaimed, "whether P is alive is not known before its lease ends")
	time.Sleep(time.Until(held.Lease) + 5*time.Millisecond) // the lease has to end in real time
	e, err := r.Begin(t.Context(), in)
	require.NoError(t, err)
	require.Equal(t, "first-1", e.Key)
	require.False(t, e.FirstSend.IsZero(), "P may have sent it")
}

// locks is how many locks the system lists for a file; 0 too where it has no list.
func locks(t *testing.T, path string) int {
	t.Helper()
	info, err := os.Stat(path)
	require.NoError(t, err)
	list, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0
	}
	return strings.Count(string(list), fmt.Sprintf(":%d ", info.Sys().(*syscall.Stat_t).Ino))
}

// To close any descriptor of the file would drop the locks of all its
// journals in this process; another program would then take itself for the
// last one.
func TestC74_AJournalThatIsOpenedBesideAnotherDropsNoLocks(t *testing.T) {
	path := fresh(t)
	j := open(t, path, sqljournal.Options{})
	_, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	if locks(t, path) == 0 {
		t.Skip("this system does not list its locks")
	}
	require.NoError(t, open(t, path, sqljournal.Options{}).Close())
	_, err = sqljournal.OpenSQLite(path, sqljournal.Options{Secret: secret})
	require.ErrorIs(t, err, sqljournal.ErrOtherSecret)
	require.NotZero(t, locks(t, path))
	require.NoError(t, child("shell", path).Run())
	require.FileExists(t, path+"-wal")
	require.FileExists(t, path+"-shm")
	_, err = j.Begin(t.Context(), payment("2"))
	require.NoError(t, err)
	require.Len(t, pending(t, j), 2)
}
