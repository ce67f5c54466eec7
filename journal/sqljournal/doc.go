// Package sqljournal keeps a [journal.Journal] in an SQL database: SQLite, in
// a file of its own ([OpenSQLite]) or beside the tables of the application
// ([New]). It is durable: when a call returns nil, what it wrote outlasts the
// process and a loss of power, as far as the disk keeps its word on fsync.
//
//	j, err := sqljournal.OpenSQLite("/var/lib/shop/idem.db", sqljournal.Options{})
//	if err != nil {
//		return err
//	}
//	defer j.Close()
//	client := &http.Client{Transport: &idem.Transport{Dialect: idem.Stripe, Journal: j}}
//
// Several processes on one machine may share the file. It must be on a local
// disk, with hard links: SQLite's log needs shared memory, which network file
// systems do not have. Opening takes about a second for each 200,000 entries: the
// whole file is checked.
//
// # Files
//
// For the journal idem.db there are four files, all with mode 0600:
//
//	idem.db         the database
//	idem.db-wal     its write-ahead log; what was committed last is only here
//	idem.db-shm     shared memory of those that have it open; may be deleted when nobody has
//	idem.db.secret  the secret that keys the fingerprints; none if Options.Secret is given
//
// The log is kept when the journal is closed, empty, so that its absence always
// means that something was lost: copy, move and restore idem.db and idem.db-wal
// together. Where they were closed properly, an empty file of that name serves.
// A program that opens the file with SQLite by itself (the sqlite3 shell)
// deletes the log when it is the last to close it; open it read-only instead
// (sqlite3 -readonly).
//
// Bodies of requests and answers are not stored unless the caller seals them.
// Fingerprints are keyed with the secret, so keep backups of the secret apart
// from those of the database. Without it the journal cannot be opened.
//
// # What is noticed
//
// Opening a journal runs a full integrity check, compares the schema with the
// one it must have, and reads the log as SQLite will. Every entry has a MAC
// over all of its columns. So a file that is empty, cut, full of zeros, of
// another program, of a newer version, without its log, or damaged in the
// middle is an error that says which, and an entry that was changed is an
// error that names it; see the errors of this package. Only a path where
// nothing is gets a new journal, and with Options.MustExist not even that.
//
// What cannot be noticed: a log that was emptied, or cut behind a whole
// transaction, after a crash looks like one that had no more, so that what was
// committed behind the cut is gone; damage to its last transaction looks like
// one that the crash cut off, which is no damage; and a file and its log may
// both have been put back to an earlier state. What such a loss costs is the list of
// what to resume: an operation that is called again still gets the key that it had,
// unless it was refused before.
//
// After an error of a file, restore the file and its log together, and the secret
// if that is missing. Where there is no copy, move them away, look up at the
// provider what was open, and go on with a new journal. An entry that was
// changed hinders no other; nothing is sent for it until a copy brings it back or
// a person, who looked it up at the provider, decides (Journal.DecideDamaged).
//
// A process that is stopped (a debugger, a frozen container) in the middle of a
// write holds the lock of the file: the others get ErrBusy until it goes on
// or dies. Nothing is sent meanwhile.
//
// # Speed
//
// Calls that come at the same time are committed together, so that 64 callers
// share one flush of the disk. A commit calls fsync; a program that wants the
// cheaper fdatasync can switch it on with Fdatasync of modernc.org/sqlite, for
// all its databases.
package sqljournal
