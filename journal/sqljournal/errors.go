package sqljournal

import (
	"errors"
	"fmt"

	"github.com/idem-go/idem/journal"
)

// kind is an error of this package that is also one of package journal.
type kind struct {
	text string
	of   error
}

func (k *kind) Error() string { return k.text }
func (k *kind) Unwrap() error { return k.of }

// What can be wrong with a file; a [*FileError] has one of them. Each matches
// the error of package journal that is named behind it.
var (
	// ErrEmptyFile: the file exists and has no byte. journal.ErrDamaged.
	ErrEmptyFile error = &kind{"the file is empty", journal.ErrDamaged}
	// ErrZeroFile: the file begins with zeros, as after a loss of power.
	// journal.ErrDamaged.
	ErrZeroFile error = &kind{"the file is full of zeros", journal.ErrDamaged}
	// ErrTruncatedFile: the file is shorter than its content.
	// journal.ErrDamaged.
	ErrTruncatedFile error = &kind{"the file is cut off", journal.ErrDamaged}
	// ErrNoLog: the write-ahead log is not beside the file, so that what was
	// committed last may be lost. journal.ErrDamaged.
	ErrNoLog error = &kind{"the write-ahead log is missing", journal.ErrDamaged}
	// ErrNoFile: there is a write-ahead log, and the file that it belongs to
	// is missing. journal.ErrDamaged.
	ErrNoFile error = &kind{"the file is missing, its write-ahead log is there", journal.ErrDamaged}
	// ErrDamagedLog: the write-ahead log is damaged before its end, and
	// committed entries are behind the damage. journal.ErrDamaged.
	ErrDamagedLog error = &kind{"the write-ahead log is damaged", journal.ErrDamaged}
	// ErrDamagedFile: the integrity check found damage. journal.ErrDamaged.
	ErrDamagedFile error = &kind{"the database is damaged", journal.ErrDamaged}
	// ErrOtherFile: the file belongs to another program. journal.ErrForeign.
	ErrOtherFile error = &kind{"the file is not a journal", journal.ErrForeign}
	// ErrNewerSchema: a newer version of this package made the journal.
	// journal.ErrForeign.
	ErrNewerSchema error = &kind{"the journal is of a newer version", journal.ErrForeign}
	// ErrNoSecret: the secret's file is missing, or Options.Secret is zero
	// where it must be given. journal.ErrSecret.
	ErrNoSecret error = &kind{"the secret is missing", journal.ErrSecret}
	// ErrOtherSecret: the journal was made with another secret, as when a
	// backup was restored without its own. journal.ErrSecret.
	ErrOtherSecret error = &kind{"the journal was made with another secret", journal.ErrSecret}
)

var (
	// ErrBusy: another transaction held the database for longer than
	// Options.BusyTimeout. Nothing was written; calling again is safe. If it
	// was the caller's own transaction, a Begin inside it waits for itself:
	// use BeginTx.
	ErrBusy = errors.New("sqljournal: the database is busy: another transaction holds it (a call inside a write transaction of one's own waits for itself: use BeginTx and FinishTx there, or commit first)")
	// ErrReadOnly: the database cannot be written: the file or its folder is
	// read-only, or the header of the file says so.
	ErrReadOnly = errors.New("sqljournal: the database is read-only")
	// ErrOtherDatabase: the transaction that BeginTx or FinishTx was given is not
	// of this journal's database; begin it with Journal.DB. It matches
	// journal.ErrInvalid.
	ErrOtherDatabase error = &kind{"sqljournal: the transaction is not of this journal's database; begin it with Journal.DB", journal.ErrInvalid}
	// ErrNothingThere: Options.MustExist is set, and nothing is at the path.
	// It matches journal.ErrNotFound.
	ErrNothingThere error = &kind{"sqljournal: there is no journal", journal.ErrNotFound}
	// ErrClosed: Close was called. It matches journal.ErrClosed.
	ErrClosed error = &kind{"sqljournal: closed", journal.ErrClosed}
	// ErrOldSQLite: the SQLite library is older than 3.51.3, the first whose
	// write-ahead log cannot lose entries when two connections reset it.
	ErrOldSQLite = errors.New("sqljournal: this version of SQLite can damage its write-ahead log")
	// ErrPool: the *sql.DB that New was given allows one connection only; the
	// journal keeps one for itself. It matches journal.ErrInvalid.
	ErrPool error = &kind{"sqljournal: the database allows too few connections", journal.ErrInvalid}
	// ErrNotWAL: the database that New was given has no write-ahead log. It
	// matches journal.ErrInvalid.
	ErrNotWAL error = &kind{"sqljournal: the database is not in WAL mode", journal.ErrInvalid}
)

// FileError says what is wrong with the file of a journal.
type FileError struct {
	// Path of the file.
	Path string
	// Err is the kind, one of the errors of this package.
	Err error
	// Detail is what was found, for people; "": nothing to add.
	Detail string
}

// Error names the file and what is wrong with it.
func (e *FileError) Error() string {
	s := fmt.Sprintf("sqljournal: %s: %v", e.Path, e.Err)
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

// Unwrap is the kind.
func (e *FileError) Unwrap() error { return e.Err }

// RowError: the MAC of an entry is wrong, or what is stored cannot be read. It
// matches journal.ErrDamaged. Nothing is sent for such an entry, and nothing
// else is hindered by it. Journal.DecideDamaged ends it.
type RowError struct {
	// Operation as far as it can be read.
	Operation journal.Operation
}

// Error names the entry.
func (e *RowError) Error() string {
	return fmt.Sprintf("sqljournal: entry %q is not what was written: look the operation up at the provider, then use DecideDamaged", e.Operation.String())
}

// Unwrap is journal.ErrDamaged.
func (e *RowError) Unwrap() error { return journal.ErrDamaged }
