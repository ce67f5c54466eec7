package sqljournal

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

func intent(id string) journal.Intent {
	return journal.Intent{
		Operation: journal.Operation{Scope: "acct_1", Name: "pay", ID: id}, Key: "first-" + id, NextKey: "second-" + id,
		Shape: sha256.Sum256([]byte("POST")), Window: time.Hour,
	}
}

func opened(t *testing.T, path string, o Options) *Journal {
	t.Helper()
	o.BusyTimeout = cmp.Or(o.BusyTimeout, time.Minute) // a disk may be slow
	j, err := OpenSQLite(path, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, j.Close()) })
	return j
}

// watched tells when somebody waits for an answer: only then is its end asked for.
type watched struct {
	context.Context
	waits func()
}

func (c watched) Done() <-chan struct{} {
	c.waits()
	return c.Context.Done()
}

func TestVersionsOfSQLiteAreComparedByTheirNumbers(t *testing.T) {
	for _, v := range []string{"3.51.3", "3.51.10", "3.52.0", "3.100.0", "4.0.0"} {
		require.NoError(t, atLeast(v), v)
	}
	for _, v := range []string{"3.51.2", "3.51", "3.9.99", "3.7.0", "2.99.99", "", "x", "3.x.9"} {
		err := atLeast(v)
		require.ErrorIs(t, err, ErrOldSQLite, v)
		require.ErrorContains(t, err, oldestSQLite)
	}
}

// upgraded opens path with the given migrations.
func upgraded(t *testing.T, path string, all []string) error {
	t.Helper()
	s, err := readSecret(path + ".secret")
	require.NoError(t, err)
	o := Options{Secret: s}
	require.NoError(t, o.complete())
	c, err := connect(path, o.BusyTimeout)
	require.NoError(t, err)
	j := &Journal{db: sql.OpenDB(c), ownDB: true, dialect: sqliteDialect}
	if err := begin(t.Context(), j, o, path, all, true); err != nil {
		return errors.Join(err, j.db.Close())
	}
	var n int
	require.NoError(t, j.db.QueryRow("SELECT count(*) FROM idem_entries").Scan(&n))
	require.Equal(t, 1, n, "the entries stay")
	_, err = j.Begin(t.Context(), intent("1"))
	require.ErrorIs(t, err, journal.ErrClaimed)
	return j.Close()
}

func TestAnOlderSchemaIsMigratedInOneTransactionAndANewerOneRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "idem.db")
	j := opened(t, path, Options{})
	_, err := j.Begin(t.Context(), intent("1"))
	require.NoError(t, err)
	require.NoError(t, j.Close())

	first := migrations("sqlite")
	second := append(first[:len(first):len(first)], "CREATE TABLE idem_more (a INTEGER) STRICT; ALTER TABLE idem_entries ADD COLUMN more INTEGER NOT NULL DEFAULT 0;")
	broken := append(second[:len(second):len(second)], "CREATE TABLE idem_third (a INTEGER) STRICT; INSERT INTO no_such_table VALUES (1);")

	err = upgraded(t, path, broken)
	require.ErrorContains(t, err, "version 3")
	require.NoError(t, upgraded(t, path, first), "a migration that failed changed nothing")
	require.NoError(t, upgraded(t, path, second))
	require.NoError(t, upgraded(t, path, second))
	err = upgraded(t, path, first)
	require.ErrorIs(t, err, ErrNewerSchema)
	require.ErrorIs(t, err, journal.ErrForeign)
	_, err = OpenSQLite(path, Options{})
	require.ErrorIs(t, err, ErrNewerSchema)
}

func TestAnOlderSchemaThatWasChangedIsNotMigrated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "idem.db")
	j := opened(t, path, Options{})
	_, err := j.db.Exec("DROP INDEX idem_entries_pending; CREATE INDEX idem_entries_pending ON idem_entries (created, seq) WHERE state = 1 AND expires = 0")
	require.NoError(t, err)
	require.NoError(t, j.Close())
	err = upgraded(t, path, append(migrations("sqlite"), "CREATE TABLE idem_more (a INTEGER) STRICT"))
	require.ErrorIs(t, err, ErrDamagedFile)
	require.ErrorContains(t, err, "idem_entries_pending")
}

// A full disk is played by a limit on the database; that of a real one and
// failing flushes need a file system of their own.
func TestAFailedWriteLatchesTheJournalUntilItIsOpenedAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "idem.db")
	j := opened(t, path, Options{})
	_, err := j.Begin(t.Context(), intent("before"))
	require.NoError(t, err)
	var pages int
	require.NoError(t, j.conn.QueryRowContext(t.Context(), "PRAGMA page_count").Scan(&pages))
	_, err = j.conn.ExecContext(t.Context(), fmt.Sprintf("PRAGMA max_page_count = %d", pages+2))
	require.NoError(t, err)

	tx, err := j.db.BeginTx(t.Context(), nil) // so that some calls share a transaction
	require.NoError(t, err)
	const callers = 100
	errs := make([]error, callers)
	var queued, all sync.WaitGroup
	for n := range callers {
		queued.Add(1)
		all.Go(func() {
			waits := sync.OnceFunc(queued.Done)
			defer waits()
			in := intent(fmt.Sprint(n))
			in.Request = make([]byte, 1000)
			_, errs[n] = j.Begin(watched{t.Context(), waits}, in)
		})
	}
	queued.Wait()
	require.NoError(t, tx.Rollback())
	all.Wait()
	full, latched := 0, 0
	for _, err := range errs {
		require.ErrorIs(t, err, journal.ErrFull, "the cause is known to all")
		if full++; errors.Is(err, journal.ErrLatched) {
			latched++
		}
	}
	require.Less(t, latched, full, "the first is the failure itself")

	_, err = j.Begin(t.Context(), intent("after"))
	require.ErrorIs(t, err, journal.ErrLatched)
	require.ErrorIs(t, err, journal.ErrFull)
	_, err = j.Get(t.Context(), intent("before").Operation)
	require.ErrorIs(t, err, journal.ErrLatched)
	for _, err := range j.Pending(t.Context()) {
		require.ErrorIs(t, err, journal.ErrLatched)
	}
	_, err = j.Sweep(t.Context(), 0)
	require.ErrorIs(t, err, journal.ErrLatched)
	tx, err = j.db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	_, err = j.BeginTx(t.Context(), tx, intent("after"))
	require.ErrorIs(t, err, journal.ErrLatched)
	require.NoError(t, tx.Rollback())
	require.NoError(t, j.Close())

	j = opened(t, path, Options{})
	n := 0
	for e, err := range j.Pending(t.Context()) {
		require.NoError(t, err)
		require.Equal(t, "before", e.ID, "a transaction is there whole or not at all")
		n++
	}
	require.Equal(t, 1, n)
	_, err = j.Begin(t.Context(), intent("after"))
	require.NoError(t, err)
}

func TestAStepThatDoesNotFitIsItsCallersErrorOnly(t *testing.T) {
	j := opened(t, filepath.Join(t.TempDir(), "idem.db"), Options{})
	in := intent("1")
	in.Request = make([]byte, longestRow+1)
	_, err := j.Begin(t.Context(), in)
	require.ErrorIs(t, err, journal.ErrInvalid)
	_, err = j.Begin(t.Context(), intent("2"))
	require.NoError(t, err)
}

// The log is read while others write it, start it anew and leave parts of
// transactions in it that they gave up: none of that is damage.
func TestALogThatIsBeingWrittenIsNotCalledDamaged(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "idem.db")
	j := opened(t, path, Options{NoGroupCommit: true})
	_, err := j.conn.ExecContext(t.Context(), "PRAGMA wal_autocheckpoint = 20; PRAGMA cache_size = 10")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			in := intent(fmt.Sprint(n))
			in.Request = make([]byte, 5000)
			if _, err := j.Begin(ctx, in); err != nil && ctx.Err() == nil {
				t.Errorf("Begin: %v", err)
			}
		}
	})
	all.Go(func() { // spills a transaction into the log and gives it up
		for ctx.Err() == nil {
			tx, err := j.db.BeginTx(t.Context(), nil)
			if err != nil {
				continue // busy
			}
			_, _ = tx.Exec("PRAGMA cache_size = 5")
			_, _ = tx.Exec("UPDATE idem_entries SET answer = randomblob(4000)")
			_ = tx.Rollback()
		}
	})
	looks := 0
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); looks++ { // as long as it takes to meet most moments
		if err := checkLog(path); err != nil {
			t.Errorf("after %d looks: %v", looks, err)
			break
		}
	}
	cancel()
	all.Wait()
	t.Logf("%d looks", looks)
}

func TestALogThatIsNotThereIsNotRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	require.NoError(t, checkLog(path))
	_, err := os.Stat(path)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestTheHeaderOfALogThatWasCutOffWhileItWasStartedAnewIsNoDamage(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "idem.db")
	j := opened(t, path, Options{})
	log := path + "-wal"
	begin := func(id string) []byte {
		_, err := j.Begin(t.Context(), intent(id))
		require.NoError(t, err)
		b, err := os.ReadFile(log)
		require.NoError(t, err)
		return b
	}
	empty, err := os.ReadFile(path)
	require.NoError(t, err)
	before := begin("1")
	_, err = j.conn.ExecContext(t.Context(), "PRAGMA wal_checkpoint(RESTART)")
	require.NoError(t, err)
	after := begin("2")
	require.NotEqual(t, before[:logHeader], after[:logHeader])
	whole, err := os.ReadFile(path) // as it is after the log was started anew
	require.NoError(t, err)
	torn := filepath.Join(t.TempDir(), "torn")
	check := func(file, log []byte) error {
		require.NoError(t, os.WriteFile(torn, file, 0o600))
		require.NoError(t, os.WriteFile(torn+"-wal", log, 0o600))
		return checkLog(torn)
	}
	for cut := range logHeader + 1 {
		b := append(append([]byte(nil), after[:cut]...), before[cut:]...)
		require.NoError(t, check(whole, b), "cut after %d bytes", cut)
	}
	for bit := range 8 * logHeader {
		b := append([]byte(nil), before...)
		b[bit/8] ^= 1 << (bit % 8)
		require.NoError(t, check(whole, b), "bit %d: the database has all that was in the log", bit)
		require.ErrorIs(t, check(empty, b), ErrDamagedLog, "bit %d", bit)
	}
}

// All bits of the headers, and of the content some. The size of the database, which
// marks a commit, is a power of two, so that one bit can make the mark vanish.
func TestAFlippedBitBeforeTheLastTransactionOfALogIsDamage(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "idem.db")
	j := opened(t, path, Options{NoGroupCommit: true})
	_, err := j.db.Exec("CREATE TABLE filler (a BLOB)")
	require.NoError(t, err)
	for pages := 0; pages != 16; {
		_, err := j.db.Exec("INSERT INTO filler VALUES (zeroblob(3000))")
		require.NoError(t, err)
		require.NoError(t, j.db.QueryRow("PRAGMA page_count").Scan(&pages))
		require.LessOrEqual(t, pages, 16)
	}
	_, err = j.conn.ExecContext(t.Context(), "PRAGMA wal_checkpoint(RESTART)")
	require.NoError(t, err)
	file, err := os.ReadFile(path)
	require.NoError(t, err)
	e, err := j.Begin(t.Context(), intent("1"))
	require.NoError(t, err)
	for range 3 { // single frames
		e, err = j.Renew(t.Context(), e, journal.Note{})
		require.NoError(t, err)
	}
	_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{})
	require.NoError(t, err)
	log, err := os.ReadFile(path + "-wal")
	require.NoError(t, err)
	const frame = frameHeader + 4096
	var commits []int // where they end
	for at := logHeader; at+frame <= len(log) && string(log[at+8:at+16]) == string(log[16:24]); at += frame {
		if size := binary.BigEndian.Uint32(log[at+4:]); size != 0 {
			require.EqualValues(t, 16, size)
			commits = append(commits, at+frame)
		}
	}
	require.Len(t, commits, 5)
	last := commits[3]

	spoilt := filepath.Join(t.TempDir(), "spoilt")
	require.NoError(t, os.WriteFile(spoilt, file, 0o600))
	look := func(log []byte) string {
		require.NoError(t, os.WriteFile(spoilt+"-wal", log, 0o600))
		d, err := scanLog(spoilt)
		require.NoError(t, err)
		return d.text
	}
	require.Empty(t, look(log))
	for at := range last {
		in := (at - logHeader) % frame
		for bit := range 8 {
			if at >= logHeader && in >= frameHeader && (at*8+bit)%499 != 0 {
				continue
			}
			log[at] ^= 1 << bit
			require.NotEmpty(t, look(log), "bit %d of byte %d, byte %d of a frame", bit, at, in)
			log[at] ^= 1 << bit
		}
	}
	for _, at := range commits {
		require.Empty(t, look(log[:at-100]), "a tail that was cut off is no damage")
	}
}
