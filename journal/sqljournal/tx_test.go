package sqljournal_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// stores are a journal in a file, with the caller's table in it, and one in
// the caller's database.
func stores(t *testing.T, test func(t *testing.T, j *sqljournal.Journal)) {
	t.Run("in a file", func(t *testing.T) {
		j := open(t, fresh(t), sqljournal.Options{Lease: journal.LongestLease})
		_, err := j.DB().Exec("CREATE TABLE orders (id TEXT PRIMARY KEY)")
		require.NoError(t, err)
		test(t, j)
	})
	t.Run("in the caller's database", func(t *testing.T) {
		test(t, over(t, database(t, fresh(t)), sqljournal.Options{Lease: journal.LongestLease}))
	})
}

func orders(t *testing.T, j *sqljournal.Journal) (n int) {
	t.Helper()
	require.NoError(t, j.DB().QueryRow("SELECT count(*) FROM orders").Scan(&n))
	return n
}

func TestAnOperationIsWrittenDownWithTheCallersRows(t *testing.T) {
	stores(t, func(t *testing.T, j *sqljournal.Journal) {
		for _, commit := range []bool{false, true} {
			tx, err := j.DB().BeginTx(t.Context(), nil)
			require.NoError(t, err)
			_, err = tx.Exec("INSERT INTO orders VALUES ('1')")
			require.NoError(t, err)
			e, err := j.BeginTx(t.Context(), tx, payment("1"))
			require.NoError(t, err)
			require.Equal(t, journal.Pending, e.State)
			require.Equal(t, "first-1", e.Key)
			require.Empty(t, e.Owner)
			require.Zero(t, e.FirstSend)
			_, err = j.Get(t.Context(), e.Operation)
			require.ErrorIs(t, err, journal.ErrNotFound, "nobody else sees it yet")
			if !commit {
				require.NoError(t, tx.Rollback())
				require.Zero(t, orders(t, j))
				require.Empty(t, pending(t, j))
				continue
			}
			require.NoError(t, tx.Commit())
			require.Equal(t, 1, orders(t, j))
			require.Len(t, pending(t, j), 1)
			claimed, err := j.Begin(t.Context(), payment("1"))
			require.NoError(t, err)
			require.Equal(t, e.Key, claimed.Key)
			require.Zero(t, claimed.FirstSend)
			require.EqualValues(t, 1, claimed.Fence)
		}
	})
}

func TestWhatIsThereAlreadyDecidesInATransactionToo(t *testing.T) {
	stores(t, func(t *testing.T, j *sqljournal.Journal) {
		within := func(in journal.Intent) (e journal.Entry, err error) {
			tx, err := j.DB().BeginTx(t.Context(), nil)
			require.NoError(t, err)
			defer func() { require.NoError(t, tx.Commit()) }()
			return j.BeginTx(t.Context(), tx, in)
		}
		in, other := payment("1"), payment("1")
		other.Content = make([]byte, 32)
		first, err := within(in)
		require.NoError(t, err)
		again := in
		again.Key = "another"
		e, err := within(again)
		require.NoError(t, err)
		require.Equal(t, first.Key, e.Key)
		_, err = within(other)
		require.ErrorIs(t, err, journal.ErrMismatch)

		claimed, err := j.Begin(t.Context(), in)
		require.NoError(t, err)
		_, err = j.Finish(t.Context(), claimed, journal.Refused, journal.Note{})
		require.NoError(t, err)
		e, err = within(other)
		require.NoError(t, err)
		require.Equal(t, 2, e.Generation)
		require.Equal(t, "second-1", e.Key)
		require.Len(t, pending(t, j), 1)
		_, err = within(journal.Intent{})
		require.ErrorIs(t, err, journal.ErrInvalid)
	})
}

func TestAnOperationIsFinishedWithTheCallersRows(t *testing.T) {
	stores(t, func(t *testing.T, j *sqljournal.Journal) {
		claimed, err := j.Begin(t.Context(), payment("1"))
		require.NoError(t, err)
		for _, commit := range []bool{false, true} {
			tx, err := j.DB().BeginTx(t.Context(), nil)
			require.NoError(t, err)
			e, err := j.FinishTx(t.Context(), tx, claimed, journal.Done, journal.Note{Attempts: 1, Status: 200, Reference: "pi_1"})
			require.NoError(t, err)
			require.Equal(t, journal.Done, e.State)
			_, err = tx.Exec("INSERT INTO orders VALUES ('1')")
			require.NoError(t, err)
			if !commit {
				require.NoError(t, tx.Rollback())
				require.Zero(t, orders(t, j))
				e, err := j.Get(t.Context(), claimed.Operation)
				require.NoError(t, err)
				require.Equal(t, journal.Pending, e.State)
				require.NotEmpty(t, e.Owner, "the claim is held on")
				continue
			}
			require.NoError(t, tx.Commit())
			require.Equal(t, 1, orders(t, j))
			e, err = j.Get(t.Context(), claimed.Operation)
			require.NoError(t, err)
			require.Equal(t, journal.Done, e.State)
			require.Equal(t, "pi_1", e.Reference)
			require.Equal(t, 1, e.Attempts)
		}
	})
}

func TestALateOwnerCannotFinishInATransactionEither(t *testing.T) {
	stores(t, func(t *testing.T, j *sqljournal.Journal) {
		late, err := j.Begin(t.Context(), payment("1"))
		require.NoError(t, err)
		_, err = j.Release(t.Context(), late, journal.Note{})
		require.NoError(t, err)
		_, err = j.Begin(t.Context(), payment("1"))
		require.NoError(t, err)
		tx, err := j.DB().BeginTx(t.Context(), nil)
		require.NoError(t, err)
		_, err = j.FinishTx(t.Context(), tx, late, journal.Done, journal.Note{})
		require.ErrorIs(t, err, journal.ErrClaimLost)
		none := late
		none.ID = "none"
		_, err = j.FinishTx(t.Context(), tx, none, journal.Done, journal.Note{})
		require.ErrorIs(t, err, journal.ErrClaimLost)
		require.NoError(t, tx.Commit())
	})
}

func TestTransactionsThatReadFirstAreToldThatTheDatabaseIsBusy(t *testing.T) {
	db := database(t, fresh(t))
	j := over(t, db, sqljournal.Options{})
	tx, err := db.BeginTx(t.Context(), nil) // deferred, as it is the caller's
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback()) }()
	var n int
	require.NoError(t, tx.QueryRow("SELECT count(*) FROM orders").Scan(&n))
	_, err = db.Exec("INSERT INTO orders VALUES ('1')")
	require.NoError(t, err)
	_, err = j.BeginTx(t.Context(), tx, payment("1"))
	require.ErrorIs(t, err, sqljournal.ErrBusy)
	_, err = j.Begin(t.Context(), payment("1"))
	require.NoError(t, err, "nothing latches")
}

func TestATransactionThatEndedIsTheCallersError(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{})
	tx, err := j.DB().BeginTx(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback())
	_, err = j.BeginTx(t.Context(), tx, payment("1"))
	require.ErrorIs(t, err, sql.ErrTxDone)
	ctx, cancel := context.WithCancel(t.Context())
	tx, err = j.DB().BeginTx(t.Context(), nil)
	require.NoError(t, err)
	cancel()
	_, err = j.BeginTx(ctx, tx, payment("1"))
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, tx.Rollback())
	_, err = j.Begin(t.Context(), payment("1"))
	require.NoError(t, err, "nothing latches")
}

func TestTransactionsOfManyCallersAndTheJournalsOwnGoTogether(t *testing.T) {
	t.Parallel()
	stores(t, func(t *testing.T, j *sqljournal.Journal) {
		const callers, each = 6, 15
		var all sync.WaitGroup
		for n := range callers {
			all.Go(func() {
				for i := range each {
					id := fmt.Sprintf("%d-%d", n, i)
					tx, err := j.DB().BeginTx(t.Context(), nil)
					if err != nil {
						t.Errorf("begin: %v", err)
						return
					}
					if _, err = j.BeginTx(t.Context(), tx, payment(id)); err == nil {
						_, err = tx.Exec("INSERT INTO orders VALUES ($1)", id)
					}
					if err != nil {
						_ = tx.Rollback()
						t.Errorf("within: %v", err)
						return
					}
					if err := tx.Commit(); err != nil {
						t.Errorf("commit: %v", err)
						return
					}
					e, err := j.Begin(t.Context(), payment(id))
					if err == nil {
						_, err = j.Renew(t.Context(), e, journal.Note{})
					}
					if err != nil {
						t.Errorf("the journal's own: %v", err)
						return
					}
				}
			})
		}
		all.Wait()
		require.Equal(t, callers*each, orders(t, j))
		for _, e := range pending(t, j) {
			require.EqualValues(t, 1, e.Fence)
			require.True(t, e.Claimed(time.Now()))
		}
	})
}
