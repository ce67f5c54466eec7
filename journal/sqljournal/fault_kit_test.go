package sqljournal_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
	"github.com/idem-go/idem/journal/sqljournal/internal/faultvfs"
)

// faultSecret is given, so that a copy of the database opens without the
// secret's own file.
var faultSecret = journal.Secret{1, 2, 3}

// store is what the fault tests know of a journal.
type store interface {
	journal.Journal
	Close() error
}

// opener opens the store in a folder; it must not leave anything open beside
// an error.
type opener func(dir string) (store, error)

func openSQLite(dir string) (store, error) {
	j, err := sqljournal.OpenSQLite(filepath.Join(dir, "journal.db"), sqljournal.Options{Secret: faultSecret})
	if err != nil {
		return nil, err
	}
	return j, nil
}

// inCallersDatabase is a journal beside the caller's own tables, and their
// database.
type inCallersDatabase struct {
	*sqljournal.Journal
	db *sql.DB
}

func (j inCallersDatabase) Close() error { return errors.Join(j.Journal.Close(), j.db.Close()) }

func openOver(dir string) (store, error) {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "journal.db")+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)")
	if err != nil {
		return nil, err
	}
	j, err := sqljournal.New(context.Background(), db, sqljournal.Options{Secret: faultSecret})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return inCallersDatabase{j, db}, nil
}

// newDisk is the default disk of a folder of its own, until the end of the
// test, which must have closed all journals by then.
func newDisk(t *testing.T, o faultvfs.Options) (v *faultvfs.VFS, dir string) {
	t.Helper()
	dir = t.TempDir()
	o.Dir, o.Default, o.NoSync = dir, true, true
	v, err := faultvfs.New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, v.Close(), "something was left open") })
	return v, dir
}

// nextKeys tells the keys of later generations apart.
var nextKeys atomic.Int64

// order is what the fault tests begin: the first key says whose it is.
func order(id string) journal.Intent {
	return journal.Intent{
		Operation: journal.Operation{Scope: "shop", Name: "charge", ID: id},
		Key:       "key-" + id, NextKey: fmt.Sprint("next-", id, "-", nextKeys.Add(1)),
		Shape: sha256.Sum256([]byte("POST /v1/charges " + id)), Content: []byte("content of " + id),
		Window: time.Microsecond, Request: slices.Repeat([]byte("request "+id), 100),
	}
}

// digest is over all that is stored of an entry, so that two are the same
// only if all of it is. "" is no entry.
func digest(e journal.Entry) string { return string(faultSecret.MAC(&e)) }

// read is the entries of ops that there are, and what is pending besides.
func read(ctx context.Context, j journal.Journal, ops []journal.Operation) (map[journal.Operation]journal.Entry, error) {
	all := map[journal.Operation]journal.Entry{}
	for _, op := range ops {
		e, err := j.Get(ctx, op)
		switch {
		case errors.Is(err, journal.ErrNotFound):
		case err != nil:
			return nil, fmt.Errorf("get %v: %w", op, err)
		default:
			all[op] = e
		}
	}
	for e, err := range j.Pending(ctx) {
		if err != nil {
			return nil, fmt.Errorf("pending: %w", err)
		}
		if seen, ok := all[e.Operation]; !ok || digest(seen) != digest(e) {
			return nil, fmt.Errorf("pending has an entry %v that nobody wrote", e.Operation)
		}
	}
	return all, nil
}

// typed reports whether err is one of those that a caller can tell apart.
func typed(err error) bool {
	var file *sqljournal.FileError
	return errors.Is(err, journal.ErrDamaged) || errors.Is(err, journal.ErrForeign) ||
		errors.Is(err, journal.ErrLatched) || errors.As(err, &file)
}

// hurried: a few of the faults and states must do.
func hurried() bool { return raceEnabled || testing.Short() }

// stride is from one call that fails to the next: 1 unless the test is hurried.
func stride() int {
	if hurried() {
		return 11
	}
	return 1
}

// states is n, or fewer if the test is hurried.
func states(n int) int {
	if hurried() {
		return n / 20
	}
	return n
}
