package sqljournal_test

import (
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// An entry in the tables of another journal would have a MAC that nobody knows
// there, and could be neither sent nor given up.
func TestATransactionOfAnotherDatabaseIsRefusedBeforeAnythingIsWritten(t *testing.T) {
	dir := t.TempDir()
	open := func(name string) *sqljournal.Journal {
		j, err := sqljournal.OpenSQLite(filepath.Join(dir, name), sqljournal.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, j.Close()) })
		return j
	}
	mine, other := open("mine.db"), open("other.db")
	plain, err := sql.Open("sqlite", filepath.Join(dir, "plain.db"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, plain.Close()) })
	in := journal.Intent{
		Operation: journal.Operation{Name: "charge", ID: "order-1/1"},
		Key:       "key-1", NextKey: "key-2", Shape: [32]byte{1}, Window: time.Hour,
	}
	for name, db := range map[string]*sql.DB{"another journal": other.DB(), "no journal": plain} {
		t.Run(name, func(t *testing.T) {
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			_, err = mine.BeginTx(t.Context(), tx, in)
			require.ErrorIs(t, err, sqljournal.ErrOtherDatabase)
			require.ErrorIs(t, err, journal.ErrInvalid)
			_, err = mine.FinishTx(t.Context(), tx, journal.Entry{Operation: in.Operation}, journal.Done, journal.Note{})
			require.ErrorIs(t, err, sqljournal.ErrOtherDatabase)
			require.NoError(t, tx.Commit())
		})
	}
	_, err = other.Get(t.Context(), in.Operation)
	require.ErrorIs(t, err, journal.ErrNotFound)
	_, err = mine.BeginTx(t.Context(), nil, in)
	require.ErrorIs(t, err, journal.ErrInvalid)
}

func TestAPathWhereNothingIsCanBeAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "idem.db")
	_, err := sqljournal.OpenSQLite(path, sqljournal.Options{MustExist: true})
	require.ErrorIs(t, err, sqljournal.ErrNothingThere)
	require.NoFileExists(t, path+".secret")
	j, err := sqljournal.OpenSQLite(path, sqljournal.Options{})
	require.NoError(t, err)
	require.NoError(t, j.Close())
	j, err = sqljournal.OpenSQLite(path, sqljournal.Options{MustExist: true})
	require.NoError(t, err)
	require.NoError(t, j.Close())
	_, err = sqljournal.OpenSQLite(":memory:", sqljournal.Options{})
	require.ErrorIs(t, err, journal.ErrInvalid)
}
