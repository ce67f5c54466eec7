package sqljournal_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// hold keeps the database locked by a transaction of another connection until
// release is called.
func hold(t testing.TB, j *sqljournal.Journal) (release func()) {
	t.Helper()
	tx, err := j.DB().BeginTx(context.Background(), nil) // t.Context ends before the cleanup, which would find it rolled back
	require.NoError(t, err)
	release = sync.OnceFunc(func() { require.NoError(t, tx.Rollback()) })
	t.Cleanup(release)
	return release
}

func TestCallersWhoseStepsFailDoNotDisturbTheOthers(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{})
	done, err := j.Begin(t.Context(), payment("done"))
	require.NoError(t, err)
	_, err = j.Finish(t.Context(), done, journal.Done, journal.Note{})
	require.NoError(t, err)
	_, err = j.Begin(t.Context(), payment("damaged"))
	require.NoError(t, err)
	_, err = j.DB().Exec("UPDATE idem_entries SET attempts = 9 WHERE id = 'damaged'")
	require.NoError(t, err)

	release := hold(t, j) // so that all of these wait for one transaction
	var queued, all sync.WaitGroup
	other := payment("done")
	other.Content = make([]byte, 32)
	for n := range 20 {
		queued.Add(1)
		all.Go(func() {
			waits := sync.OnceFunc(queued.Done)
			defer waits()
			ctx := watched{t.Context(), waits}
			switch n % 4 {
			case 0:
				_, err := j.Begin(ctx, other)
				if !errors.Is(err, journal.ErrMismatch) {
					t.Errorf("another request: %v", err)
				}
			case 1:
				_, err := j.Begin(ctx, payment("damaged"))
				if !errors.Is(err, journal.ErrDamaged) {
					t.Errorf("a damaged entry: %v", err)
				}
			case 2:
				_, err := j.Decide(ctx, payment("none").Operation, journal.Decision{State: journal.Done, Reason: "r"})
				if !errors.Is(err, journal.ErrNotFound) {
					t.Errorf("no entry: %v", err)
				}
			case 3:
				_, err := j.Begin(ctx, payment(fmt.Sprint(n)))
				if err != nil {
					t.Errorf("the others: %v", err)
				}
			}
		})
	}
	queued.Wait()
	release()
	all.Wait()
	for n := 3; n < 20; n += 4 {
		_, err := j.Get(t.Context(), payment(fmt.Sprint(n)).Operation)
		require.NoError(t, err)
	}
}

func TestACallerWhoseContextEndsIsAnsweredAtOnceAndSkipped(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{})
	release := hold(t, j)
	var all sync.WaitGroup
	for n := range 10 {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
			defer cancel()
			_, err := j.Begin(ctx, payment(fmt.Sprint(n)))
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Begin: %v", err)
			}
		})
	}
	all.Wait() // while the database is locked; it would be ErrBusy to wait for that
	release()
	_, err := j.Begin(t.Context(), payment("after"))
	require.NoError(t, err)
	for n := range 10 {
		_, err := j.Get(t.Context(), payment(fmt.Sprint(n)).Operation)
		require.ErrorIs(t, err, journal.ErrNotFound)
	}
}

func TestTheCauseOfAContextIsTheError(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{})
	hold(t, j)
	cause := errors.New("the shop closes")
	ctx, cancel := context.WithCancelCause(t.Context())
	_, err := j.Begin(watched{ctx, func() { cancel(cause) }}, payment("1"))
	require.ErrorIs(t, err, cause)
}

// Contexts end at every moment, many of them between the commit and the
// answer. Whatever a caller was not told, nobody may hold.
func TestAClaimThatNobodyWasToldOfIsReleasedAsNotSent(t *testing.T) {
	t.Parallel()
	j := open(t, fresh(t), sqljournal.Options{Lease: journal.LongestLease})
	const callers, each = 16, 150
	claimed, released, gone := 0, 0, 0
	for round := 0; released == 0; round++ {
		require.Less(t, round, 20, "no context ended at the moment that this test is about")
		told := make([]map[string]journal.Entry, callers)
		left := make([]int, callers)
		name := func(n, i int) string { return fmt.Sprintf("%d-%d-%d", round, n, i) }
		var all sync.WaitGroup
		for n := range callers {
			all.Go(func() {
				told[n] = map[string]journal.Entry{}
				longest := time.Millisecond // it finds its way to where half of the contexts end too early, on any machine
				for i := range each {
					ctx, cancel := context.WithTimeout(t.Context(), rand.N(longest))
					id := name(n, i)
					e, err := j.Begin(ctx, payment(id))
					switch {
					case err == nil:
						told[n][id] = e
						longest = max(longest*8/9, time.Microsecond)
					case errors.Is(err, context.DeadlineExceeded):
						left[n]++
						longest = longest*9/8 + 1
					default:
						t.Errorf("Begin: %v", err)
					}
					cancel()
				}
			})
		}
		all.Wait()
		_, err := j.Begin(t.Context(), payment(fmt.Sprint("the last of ", round))) // what was to be released is now
		require.NoError(t, err)
		for n := range callers {
			require.NotZero(t, left[n])
			for i := range each {
				id := name(n, i)
				e, err := j.Get(t.Context(), payment(id).Operation)
				if errors.Is(err, journal.ErrNotFound) {
					require.NotContains(t, told[n], id)
					gone++
					continue
				}
				require.NoError(t, err)
				if _, ok := told[n][id]; ok {
					require.True(t, e.Claimed(time.Now()), "%s is held by its caller", id)
					claimed++
					continue
				}
				require.Empty(t, e.Owner, "%s is held by nobody", id)
				require.Zero(t, e.FirstSend, "%s was not sent", id)
				released++
			}
		}
	}
	t.Logf("%d claimed, %d released, %d never begun", claimed, released, gone)
	require.NotZero(t, claimed)
}

func TestABusyDatabaseIsATypedErrorAndTheJournalGoesOn(t *testing.T) {
	for name, of := range map[string]func(t *testing.T, o sqljournal.Options) *sqljournal.Journal{
		"in a file":                func(t *testing.T, o sqljournal.Options) *sqljournal.Journal { return open(t, fresh(t), o) },
		"in the caller's database": func(t *testing.T, o sqljournal.Options) *sqljournal.Journal { return over(t, database(t, fresh(t)), o) },
	} {
		t.Run(name, func(t *testing.T) {
			j := of(t, sqljournal.Options{BusyTimeout: 50 * time.Millisecond})
			tx, err := j.DB().BeginTx(t.Context(), nil)
			require.NoError(t, err)
			_, err = j.BeginTx(t.Context(), tx, payment("enlisted"))
			require.NoError(t, err)

			began := time.Now()
			_, err = j.Begin(t.Context(), payment("1"))
			require.ErrorIs(t, err, sqljournal.ErrBusy)
			require.ErrorContains(t, err, "BeginTx")
			require.Greater(t, time.Since(began), 40*time.Millisecond)
			_, err = j.Get(t.Context(), payment("1").Operation)
			require.ErrorIs(t, err, journal.ErrNotFound, "reads do not wait")

			require.NoError(t, tx.Commit())
			_, err = j.Begin(t.Context(), payment("1"))
			require.NoError(t, err, "busy does not latch")
		})
	}
}

func TestADatabaseWithOneConnectionIsRefused(t *testing.T) {
	db := database(t, fresh(t))
	db.SetMaxOpenConns(1)
	_, err := sqljournal.New(t.Context(), db, sqljournal.Options{Secret: secret})
	require.ErrorIs(t, err, sqljournal.ErrPool)
	require.ErrorIs(t, err, journal.ErrInvalid)
	db.SetMaxOpenConns(2)
	j := over(t, db, sqljournal.Options{})
	_, err = j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	require.Len(t, pending(t, j), 1)
}

func TestADatabaseThatIsNotInWALModeIsRefused(t *testing.T) {
	for _, dsn := range []string{fresh(t), ":memory:"} {
		db, err := sql.Open("sqlite", dsn)
		require.NoError(t, err)
		_, err = sqljournal.New(t.Context(), db, sqljournal.Options{Secret: secret})
		require.ErrorIs(t, err, sqljournal.ErrNotWAL)
		require.ErrorIs(t, err, journal.ErrInvalid)
		require.NoError(t, db.Close())
	}
}

func TestANewJournalNeedsASecretOfItsOwn(t *testing.T) {
	db := database(t, fresh(t))
	_, err := sqljournal.New(t.Context(), db, sqljournal.Options{})
	require.ErrorIs(t, err, sqljournal.ErrNoSecret)
	require.ErrorIs(t, err, journal.ErrSecret)
	over(t, db, sqljournal.Options{})
	_, err = sqljournal.New(t.Context(), db, sqljournal.Options{Secret: journal.Secret{9}})
	require.ErrorIs(t, err, sqljournal.ErrOtherSecret)
}

func TestTheCallersDatabaseStaysTheCallers(t *testing.T) {
	path := fresh(t)
	db := database(t, path)
	j := over(t, db, sqljournal.Options{BusyTimeout: time.Second})
	_, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	require.Same(t, db, j.DB())
	require.NoError(t, j.Close())
	require.Zero(t, db.Stats().InUse, "the connection is given back")
	_, err = db.Exec("INSERT INTO orders VALUES ('1')")
	require.NoError(t, err)
	var id, version, timeout int
	require.NoError(t, db.QueryRow("PRAGMA application_id").Scan(&id))
	require.NoError(t, db.QueryRow("PRAGMA user_version").Scan(&version))
	require.NoError(t, db.QueryRow("PRAGMA busy_timeout").Scan(&timeout))
	require.Equal(t, []int{0, 0, 60000}, []int{id, version, timeout}, "its marks and its connections are as they were")
	require.NoFileExists(t, path+".secret")
	require.Len(t, pending(t, over(t, db, sqljournal.Options{})), 1)
}

func TestTheCallersDatabaseMayLoseTheJournalsTablesOnlyTogether(t *testing.T) {
	db := database(t, fresh(t))
	require.NoError(t, over(t, db, sqljournal.Options{}).Close())
	_, err := db.Exec("DROP TABLE idem_entries")
	require.NoError(t, err)
	_, err = sqljournal.New(t.Context(), db, sqljournal.Options{Secret: secret})
	require.ErrorIs(t, err, sqljournal.ErrDamagedFile)
}

func TestCloseWaitsAndThenEveryCallIsRefused(t *testing.T) {
	path := fresh(t)
	j := open(t, path, sqljournal.Options{})
	release := hold(t, j)
	begun, queued := make(chan error, 1), make(chan struct{})
	go func() {
		_, err := j.Begin(watched{t.Context(), sync.OnceFunc(func() { close(queued) })}, payment("1"))
		begun <- err
	}()
	<-queued
	closed := make(chan error, 1)
	go func() { closed <- j.Close() }()
	select {
	case <-closed:
		t.Fatal("Close did not wait for the call")
	case <-time.After(30 * time.Millisecond): // long enough for a Close that does not wait
	}
	release()
	require.NoError(t, <-begun)
	require.NoError(t, <-closed)
	require.NoError(t, j.Close(), "a second Close does nothing")

	_, err := j.Begin(t.Context(), payment("2"))
	require.ErrorIs(t, err, sqljournal.ErrClosed)
	_, err = j.Get(t.Context(), payment("1").Operation)
	require.ErrorIs(t, err, sqljournal.ErrClosed)
	_, err = j.Sweep(t.Context(), 0)
	require.ErrorIs(t, err, sqljournal.ErrClosed)
	for _, err := range j.Pending(t.Context()) {
		require.ErrorIs(t, err, sqljournal.ErrClosed)
	}
	require.Empty(t, readFile(t, path+"-wal"), "the log was written back")
	require.Len(t, pending(t, open(t, path, sqljournal.Options{})), 1)
}

func TestManyCallsAndACloseAtOnceLeaveNothingHalfDone(t *testing.T) {
	for range 10 {
		path := fresh(t)
		j := open(t, path, sqljournal.Options{})
		var mu sync.Mutex // guards done
		done := map[string]bool{}
		var all sync.WaitGroup
		for n := range 16 {
			all.Go(func() {
				for i := 0; ; i++ {
					id := fmt.Sprintf("%d-%d", n, i)
					_, err := j.Begin(t.Context(), payment(id))
					if errors.Is(err, sqljournal.ErrClosed) {
						return
					}
					if err != nil {
						t.Errorf("Begin: %v", err)
						return
					}
					mu.Lock()
					done[id] = true
					mu.Unlock()
				}
			})
		}
		time.Sleep(10 * time.Millisecond) // some calls have to be at work
		require.NoError(t, j.Close())
		all.Wait()
		found := map[string]bool{}
		for _, e := range pending(t, open(t, path, sqljournal.Options{})) {
			found[e.ID] = true
		}
		require.Equal(t, done, found)
	}
}
