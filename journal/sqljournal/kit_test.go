package sqljournal_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/idem-go/idem/internal/leak"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// children are what this binary does, by name, when a test starts it again as
// a process of its own; init functions add theirs.
var children = map[string]func(args []string){}

// childEnv has the name of the child to be.
const childEnv = "SQLJOURNAL_CHILD"

// child prepares the process that runs children[name] with args. Whoever starts
// it ends it.
func child(name string, args ...string) *exec.Cmd {
	c := exec.Command(os.Args[0], args...)
	c.Env = append(os.Environ(), childEnv+"="+name)
	c.Stderr = os.Stderr
	return c
}

// TestMain fails the run if goroutines are left behind. Most tests wait for
// leases and other processes, so more of them go on at once than there are
// processors, unless -parallel says otherwise.
func TestMain(m *testing.M) {
	if run := children[os.Getenv(childEnv)]; run != nil {
		run(os.Args[1:])
		os.Exit(0)
	}
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		exitOn(flag.Set("test.parallel", "8"))
	}
	os.Exit(leak.Run(m))
}

// secret of the tests that give one.
var secret = journal.Secret{1, 2, 3}

// open opens or creates the journal at path; it ends with the test.
func open(t testing.TB, path string, o sqljournal.Options) *sqljournal.Journal {
	t.Helper()
	o.BusyTimeout = cmp.Or(o.BusyTimeout, patience)
	j, err := sqljournal.OpenSQLite(path, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, j.Close()) })
	return j
}

// fresh is the path of a journal in a folder of its own.
func fresh(t testing.TB) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "idem.db")
}

// database is a caller's own, with a table of orders; it ends with the test.
func database(t testing.TB, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", path+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(60000)")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	_, err = db.Exec("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY)")
	require.NoError(t, err)
	return db
}

// over makes a journal on the caller's database; it ends with the test.
func over(t testing.TB, db *sql.DB, o sqljournal.Options) *sqljournal.Journal {
	t.Helper()
	if o.Secret == (journal.Secret{}) {
		o.Secret = secret
	}
	o.BusyTimeout = cmp.Or(o.BusyTimeout, patience)
	j, err := sqljournal.New(t.Context(), db, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, j.Close()) })
	return j
}

// payment is what a caller may begin.
func payment(id string) journal.Intent {
	content := sha256.Sum256([]byte("19.99 eur for " + id))
	return journal.Intent{
		Operation: journal.Operation{Scope: "acct_1", Name: "pay", ID: id},
		Key:       "first-" + id, NextKey: "second-" + id,
		Shape: sha256.Sum256([]byte("POST /v1/payments 40")), Content: content[:],
		Window: 24 * time.Hour,
	}
}

// testContext is for children, which have no test.
var testContext = context.Background()

// exitOn ends a child that cannot go on.
func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// patience is how long a test waits for the transactions of others: a disk may be
// slow, and SQLite's locks have no queue.
const patience = time.Minute

// watched tells when somebody waits for an answer: only then is its end asked for.
type watched struct {
	context.Context
	waits func()
}

func (c watched) Done() <-chan struct{} {
	c.waits()
	return c.Context.Done()
}
