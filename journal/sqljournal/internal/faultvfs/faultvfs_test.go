package faultvfs_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/idem-go/idem/journal/sqljournal/internal/faultvfs"
)

// newVFS is over a folder of its own; it ends with the test, which must have
// closed its databases by then.
func newVFS(t *testing.T, o faultvfs.Options) (v *faultvfs.VFS, path string) {
	t.Helper()
	o.Dir = t.TempDir()
	v, err := faultvfs.New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, v.Close()) })
	return v, filepath.Join(o.Dir, "test.db")
}

// openDB opens one connection; vfs "": the default one.
func openDB(t *testing.T, path, vfs string, pragmas ...string) *sql.DB {
	t.Helper()
	dsn := "file:" + path + "?_pragma=busy_timeout(1000)"
	if vfs != "" {
		dsn += "&vfs=" + vfs
	}
	for _, p := range pragmas {
		dsn += "&_pragma=" + p
	}
	db, err := sql.Open("sqlite", dsn)
	require.NoError(t, err)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

const (
	walMode = "journal_mode(wal)"
	full    = "synchronous(full)"
)

func mustExec(t *testing.T, db *sql.DB, q string) {
	t.Helper()
	_, err := db.ExecContext(context.Background(), q)
	require.NoError(t, err)
}

// code is SQLite's extended result code; 0: no error.
func code(t *testing.T, err error) int {
	t.Helper()
	if err == nil {
		return 0
	}
	var e *sqlite.Error
	require.True(t, errors.As(err, &e), "%v", err)
	return e.Code()
}

func count(t *testing.T, db *sql.DB) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRowContext(context.Background(), "select count(*) from t").Scan(&n))
	return n
}

func TestEachFaultArrivesAsItsCode(t *testing.T) {
	for _, c := range []struct {
		fault faultvfs.Fault
		want  int
		do    string
	}{
		{faultvfs.Fault{Op: faultvfs.Write, File: faultvfs.WAL}, sqlite3.SQLITE_IOERR_WRITE, "insert into t values (1)"},
		{faultvfs.Fault{Op: faultvfs.Write, File: faultvfs.WAL, Torn: true}, sqlite3.SQLITE_IOERR_WRITE, "insert into t values (1)"},
		{faultvfs.Fault{Op: faultvfs.Write, File: faultvfs.WAL, Code: faultvfs.Full}, sqlite3.SQLITE_FULL, "insert into t values (1)"},
		{faultvfs.Fault{Op: faultvfs.Sync, File: faultvfs.WAL}, sqlite3.SQLITE_IOERR_FSYNC, "insert into t values (1)"},
		{faultvfs.Fault{Op: faultvfs.Sync, File: faultvfs.Main}, sqlite3.SQLITE_IOERR_FSYNC, "pragma wal_checkpoint(truncate)"},
		{faultvfs.Fault{Op: faultvfs.Truncate, File: faultvfs.WAL}, sqlite3.SQLITE_IOERR_TRUNCATE, "pragma wal_checkpoint(truncate)"},
		{faultvfs.Fault{Op: faultvfs.Read, File: faultvfs.WAL}, sqlite3.SQLITE_IOERR_READ, "pragma wal_checkpoint(truncate)"},
	} {
		t.Run(fmt.Sprint(c.fault.Op, " ", c.fault.File, " ", c.want, " torn ", c.fault.Torn), func(t *testing.T) {
			v, path := newVFS(t, faultvfs.Options{})
			db := openDB(t, path, v.Name(), walMode, full)
			mustExec(t, db, "create table t(a)")
			mustExec(t, db, "insert into t values (0)")
			v.Fail(c.fault)
			_, err := db.ExecContext(context.Background(), c.do)
			require.Equal(t, 1, v.Fired())
			require.Equal(t, c.want, code(t, err))
			mustExec(t, db, "insert into t values (2)")
			require.Equal(t, 2, count(t, db))
			require.NoError(t, db.Close())
		})
	}
}

func TestOpenAndSharedMemoryFail(t *testing.T) {
	for _, c := range []struct {
		fault faultvfs.Fault
		want  int
	}{
		{faultvfs.Fault{Op: faultvfs.Open, File: faultvfs.Main}, sqlite3.SQLITE_CANTOPEN},
		{faultvfs.Fault{Op: faultvfs.Open, File: faultvfs.WAL}, sqlite3.SQLITE_CANTOPEN},
		{faultvfs.Fault{Op: faultvfs.Map}, sqlite3.SQLITE_IOERR_SHMMAP},
	} {
		v, path := newVFS(t, faultvfs.Options{})
		v.Fail(c.fault)
		db := openDB(t, path, v.Name(), walMode)
		_, err := db.ExecContext(context.Background(), "create table t(a)")
		require.Equal(t, c.want, code(t, err), c.fault)
		v.Fail()
		mustExec(t, db, "create table if not exists t(a)")
		require.NoError(t, db.Close())
	}
}

func TestRollbackJournalFails(t *testing.T) {
	for _, op := range []faultvfs.Op{faultvfs.Open, faultvfs.Write, faultvfs.Sync, faultvfs.Delete} {
		v, path := newVFS(t, faultvfs.Options{})
		db := openDB(t, path, v.Name())
		mustExec(t, db, "create table t(a)")
		v.Fail(faultvfs.Fault{Op: op, File: faultvfs.RollbackJournal})
		_, err := db.ExecContext(context.Background(), "insert into t values (1)")
		require.NotZero(t, code(t, err), op)
		require.Equal(t, 1, v.Fired(), op)
		require.NoError(t, db.Close())
	}
}

func TestFaultsCountFromAtAndForTimes(t *testing.T) {
	v, path := newVFS(t, faultvfs.Options{NoSync: true})
	db := openDB(t, path, v.Name(), walMode, full)
	mustExec(t, db, "create table t(a)")
	insert := func() bool {
		_, err := db.ExecContext(context.Background(), "insert into t values (1)")
		return err == nil
	}
	results := func(f faultvfs.Fault) (all []bool) {
		v.Fail(f)
		for range 5 {
			all = append(all, insert())
		}
		return all
	}
	sync := faultvfs.Fault{Op: faultvfs.Sync, File: faultvfs.WAL}
	require.Equal(t, []bool{false, true, true, true, true}, results(sync))
	sync.At, sync.Times = 2, 2
	require.Equal(t, []bool{true, false, false, true, true}, results(sync))
	sync.At, sync.Times = 3, -1
	require.Equal(t, []bool{true, true, false, false, false}, results(sync))
	before := v.Calls(faultvfs.Sync, faultvfs.WAL)
	v.Fail()
	require.True(t, insert())
	require.Equal(t, before+1, v.Calls(faultvfs.Sync, faultvfs.WAL))
	require.NoError(t, db.Close())
}

func TestFilesElsewhereAreLeftAlone(t *testing.T) {
	v, path := newVFS(t, faultvfs.Options{Default: true, Record: true})
	elsewhere := openDB(t, filepath.Join(t.TempDir(), "other.db"), "", walMode, full)
	here := openDB(t, path, "", walMode, full)
	mustExec(t, here, "create table t(a)")
	v.Fail(faultvfs.Fault{Op: faultvfs.Write, Times: -1})
	position := v.Position()
	mustExec(t, elsewhere, "create table t(a)")
	require.Equal(t, position, v.Position())
	_, err := here.ExecContext(context.Background(), "insert into t values (1)")
	require.Equal(t, sqlite3.SQLITE_IOERR_WRITE, code(t, err))
	require.ErrorIs(t, v.Close(), faultvfs.ErrInUse)
	v.Fail()
	require.NoError(t, here.Close())
	require.NoError(t, elsewhere.Close())
}

// survivors inserts 30 rows, crashes after each change in some ways, and
// reports how many states there were, and how many lost a row or were damaged.
func survivors(t *testing.T, pragmas ...string) (states, lost, damaged int) {
	t.Helper()
	v, path := newVFS(t, faultvfs.Options{Record: true, NoSync: true})
	db := openDB(t, path, v.Name(), pragmas...)
	mustExec(t, db, "create table t(a)")
	done := []int{v.Position()}
	for i := range 30 {
		mustExec(t, db, fmt.Sprintf("insert into t values (%d)", i))
		done = append(done, v.Position())
	}
	require.NoError(t, db.Close())
	rnd := rand.New(rand.NewPCG(1, 2))
	dir := t.TempDir()
	after, err := faultvfs.New(faultvfs.Options{Dir: dir, NoSync: true})
	require.NoError(t, err)
	for n, d := range v.Trace().Disks() {
		rows := -1 // -1: there need not even be the table
		for rows+1 < len(done) && done[rows+1] <= n {
			rows++
		}
		for range 1 + rnd.IntN(2) {
			states++
			require.NoError(t, d.Crash(rnd).Write(dir))
			db := openDB(t, filepath.Join(dir, "test.db"), after.Name())
			var found int
			err := db.QueryRowContext(context.Background(), "select count(*) from t").Scan(&found)
			var integrity string
			if e := db.QueryRowContext(context.Background(), "pragma integrity_check").Scan(&integrity); e != nil || integrity != "ok" {
				damaged++
			}
			switch {
			case err != nil && rows >= 0:
				lost++
			case found < rows:
				lost++
			}
			require.LessOrEqual(t, found, rows+1) // the one that was under way
			require.NoError(t, db.Close())
		}
	}
	require.NoError(t, after.Close())
	return states, lost, damaged
}

func TestPowerLossLosesNothingThatWasSynced(t *testing.T) {
	for _, mode := range [][]string{
		{walMode, full}, {"journal_mode(delete)", "synchronous(extra)"},
		{"journal_mode(truncate)", full}, {"journal_mode(persist)", full},
	} {
		t.Run(mode[0], func(t *testing.T) {
			states, lost, damaged := survivors(t, mode...)
			t.Logf("%d states", states)
			require.Zero(t, lost)
			require.Zero(t, damaged)
		})
	}
}

// The recording must be able to show a loss where SQLite promises none or
// less: without syncs, with few, and where the end of a transaction is a
// deletion that only "extra" makes durable.
func TestPowerLossIsSeenWhereSyncsAreMissing(t *testing.T) {
	_, lost, _ := survivors(t, walMode, "synchronous(off)")
	require.NotZero(t, lost)
	_, lost, _ = survivors(t, walMode, "synchronous(normal)")
	require.NotZero(t, lost)
	_, lost, damaged := survivors(t, "journal_mode(delete)", full)
	require.NotZero(t, lost)
	require.Zero(t, damaged)
	_, lost, damaged = survivors(t, "journal_mode(delete)", "synchronous(off)")
	require.NotZero(t, lost)
	require.NotZero(t, damaged)
}

// A sync that failed is not made good by a later one: the log that a reopened
// database reads from the system's cache may not be on the disk. Writing it
// again, here by a checkpoint, makes it good.
func TestFailedSyncIsNotMadeGoodByALaterOne(t *testing.T) {
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprint("written again ", again), func(t *testing.T) {
			v, path := newVFS(t, faultvfs.Options{Record: true, NoSync: true})
			db := openDB(t, path, v.Name(), walMode, full)
			mustExec(t, db, "create table t(a)")
			v.Fail(faultvfs.Fault{Op: faultvfs.Sync, Times: -1})
			_, err := db.ExecContext(context.Background(), "insert into t values (1)")
			require.Equal(t, sqlite3.SQLITE_IOERR_FSYNC, code(t, err))
			_ = db.Close() // its checkpoint fails, so that the log stays
			v.Fail()

			db = openDB(t, path, v.Name(), walMode, full)
			require.Equal(t, 1, count(t, db), "the row that failed is in the log")
			if again {
				mustExec(t, db, "pragma wal_checkpoint(truncate)")
			}
			mustExec(t, db, "insert into t values (2)")

			lost := 0
			dir := t.TempDir()
			after, err := faultvfs.New(faultvfs.Options{Dir: dir, NoSync: true})
			require.NoError(t, err)
			for seed := range uint64(100) {
				require.NoError(t, v.Crash(dir, seed))
				survivor := openDB(t, filepath.Join(dir, "test.db"), after.Name())
				var n int
				if err := survivor.QueryRowContext(context.Background(), "select count(*) from t where a = 2").Scan(&n); err != nil || n == 0 {
					lost++
				}
				require.NoError(t, survivor.Close())
			}
			require.NoError(t, db.Close())
			require.NoError(t, after.Close())
			require.Equal(t, !again, lost > 0, "%d of 100 lost the row", lost)
		})
	}
}
