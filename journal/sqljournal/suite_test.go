package sqljournal_test

import (
	"testing"
	"time"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/journaltest"
	"github.com/idem-go/idem/journal/sqljournal"
)

func TestAJournalInAFileKeepsTheContract(t *testing.T) {
	t.Parallel() // it waits for leases most of the time
	journaltest.Run(t, func(t *testing.T, lease time.Duration) journal.Journal {
		return open(t, fresh(t), sqljournal.Options{Lease: lease})
	})
}

func TestAJournalInAFileWithoutGroupCommitKeepsTheContract(t *testing.T) {
	t.Parallel() // it waits for leases most of the time
	journaltest.Run(t, func(t *testing.T, lease time.Duration) journal.Journal {
		return open(t, fresh(t), sqljournal.Options{Lease: lease, NoGroupCommit: true})
	})
}

func TestAJournalInTheCallersDatabaseKeepsTheContract(t *testing.T) {
	t.Parallel() // it waits for leases most of the time
	journaltest.Run(t, func(t *testing.T, lease time.Duration) journal.Journal {
		return over(t, database(t, fresh(t)), sqljournal.Options{Lease: lease})
	})
}

func TestAJournalInTheCallersDatabaseWithoutGroupCommitKeepsTheContract(t *testing.T) {
	t.Parallel() // it waits for leases most of the time
	if hurried() {
		t.Skip("its two halves have tests of their own")
	}
	journaltest.Run(t, func(t *testing.T, lease time.Duration) journal.Journal {
		return over(t, database(t, fresh(t)), sqljournal.Options{Lease: lease, NoGroupCommit: true})
	})
}
