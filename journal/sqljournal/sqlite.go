package sqljournal

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/idem-go/idem/journal"
)

// dialect is what one database does differently.
type dialect struct {
	// sql writes a statement as the database likes it.
	sql func(string) string
	// begin starts a transaction that writes.
	begin string
	// lock makes a transaction of the caller's own one that writes, before
	// it reads what it will write.
	lock string
	// kind is the error that err is also; nil: none.
	kind func(err error) error
	// free tells how many pages are free, and how many there are; shrink
	// gives some of them back.
	free, shrink string
	// leave gives up the connection that writes.
	leave func(j *Journal, latched bool) error
}

var sqliteDialect = dialect{
	// The driver asks for the name of each parameter that has one.
	sql:    func(s string) string { return parameter.ReplaceAllLiteralString(s, "?") },
	begin:  "BEGIN IMMEDIATE",
	lock:   "UPDATE idem_meta SET one = one WHERE one = 0",
	kind:   sqliteKind,
	free:   "SELECT freelist_count, page_count FROM pragma_freelist_count, pragma_page_count",
	shrink: "PRAGMA incremental_vacuum(200)",
	leave:  sqliteLeave,
}

var parameter = regexp.MustCompile(`\$[0-9]+`)

const (
	// applicationID marks a file as a journal: "idem".
	applicationID = 0x6964656d
	// oldestSQLite is the first without the bug in the reset of the log that
	// could damage a database with two connections: https://sqlite.org/wal.html#walresetbug
	oldestSQLite = "3.51.3"
	// smallestDatabase is one page of the least size.
	smallestDatabase = 512
	// logPages is how long the log grows before it is written back. A page that
	// changes often is written back once, so that fewer of them cost less.
	logPages = 4000
	// logLimit is the size in bytes to which the log is cut when it starts anew.
	logLimit = 16 << 20
)

// OpenSQLite opens the journal in the file path, or creates it if nothing is
// there (Options.MustExist forbids that). Its folder must exist. The package comment says which files there are
// and what is checked.
//
// Errors: journal.ErrInvalid (o), ErrNothingThere, *FileError (what is wrong with
// the file), ErrBusy, ErrOldSQLite, or those of the file system.
func OpenSQLite(path string, o Options) (*Journal, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	path, err := realPath(path)
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		if o.MustExist {
			return nil, fmt.Errorf("%w: %s", ErrNothingThere, path)
		}
		if err := create(ctx, path, &o); err != nil {
			return nil, err
		}
	}
	info, err := os.Stat(path) // another process may have been first
	if err != nil {
		return nil, fmt.Errorf("sqljournal: %w", err)
	}
	if err := inspect(ctx, path, info); err != nil {
		return nil, err
	}
	if o.Secret == (journal.Secret{}) {
		if o.Secret, err = readSecret(path + ".secret"); err != nil {
			return nil, err
		}
	}
	if err := checkLog(path); err != nil {
		return nil, err
	}
	return openFile(ctx, path, o)
}

// New makes a journal on the caller's own SQLite database, in tables whose
// names begin with idem_; it creates them if they are not there. db must be of
// the driver modernc.org/sqlite, in WAL mode, and allow at least 2 connections: the
// journal keeps one for itself, and reads with others (3 if Get or Pending are
// called within a transaction). Options.Secret must be given. Close leaves db
// open; it must be called before db is closed.
//
// What is said of files in the package comment does not apply: the file is the
// caller's. The tables are checked as OpenSQLite does.
//
// Errors: journal.ErrInvalid (o), ErrPool, ErrNotWAL, ErrNoSecret, ErrOldSQLite,
// *FileError, ErrBusy, or those of db.
func New(ctx context.Context, db *sql.DB, o Options) (*Journal, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if o.Secret == (journal.Secret{}) {
		return nil, fmt.Errorf("sqljournal: Options.Secret: %w: New needs one that is kept outside of the database", ErrNoSecret)
	}
	if n := db.Stats().MaxOpenConnections; n == 1 {
		return nil, fmt.Errorf("%w: SetMaxOpenConns is %d; the least is 2: the journal keeps one for itself, and its reads would wait for ever", ErrPool, n)
	}
	j := &Journal{db: db, dialect: sqliteDialect}
	if err := begin(ctx, j, o, "the database", migrations("sqlite"), false); err != nil {
		return nil, err
	}
	return j, nil
}

// openFile opens a file that has passed the checks from outside.
func openFile(ctx context.Context, path string, o Options) (*Journal, error) {
	c, err := connect(path, o.BusyTimeout)
	if err != nil {
		return nil, err
	}
	j := &Journal{db: sql.OpenDB(c), ownDB: true, dialect: sqliteDialect}
	j.db.SetMaxIdleConns(mostReads)
	if err := begin(ctx, j, o, path, migrations("sqlite"), true); err != nil {
		return nil, errors.Join(err, j.db.Close())
	}
	return j, nil
}

// begin takes the connection that writes, checks the database and starts j. A
// file of the journal's own must bear its mark.
func begin(ctx context.Context, j *Journal, o Options, name string, all []string, own bool) (err error) {
	if j.conn, err = j.db.Conn(ctx); err != nil {
		if own { // the setup reads the file
			err = unreadable(name, err)
		}
		return j.opening(name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(j.opening(name, err), discard(j))
		}
	}()
	if err := checkVersion(ctx, j.conn); err != nil {
		return err
	}
	if own {
		if err := checkMark(ctx, j.conn, name); err != nil {
			return err
		}
	}
	var mode string
	if err := j.conn.QueryRowContext(ctx, "PRAGMA journal_mode").Scan(&mode); err != nil {
		return unreadable(name, err)
	}
	if mode != "wal" {
		if own {
			return &FileError{name, ErrDamagedFile, fmt.Sprintf("its journal mode is %q instead of wal", mode)}
		}
		return fmt.Errorf("%w: its journal mode is %q; open it with _pragma=journal_mode(WAL)", ErrNotWAL, mode)
	}
	if _, err := j.conn.ExecContext(ctx, setup(o.BusyTimeout)); err != nil {
		return err
	}
	if err := check(ctx, j.conn, o.Secret, all, name, own); err != nil {
		return err
	}
	if err := writeBack(ctx, j.conn, o.BusyTimeout); err != nil {
		return err
	}
	return start(ctx, j, o)
}

// writeBack empties the log before anything is acknowledged. After a failed
// flush, Linux has in its cache, but not on the disk, what SQLite then recovers from
// the log; a commit behind that would be lost with it. And damage to the log
// can hide nothing then. If others have the database open, nothing was recovered, and
// it is no harm that the log stays.
func writeBack(ctx context.Context, c *sql.Conn, busy time.Duration) error {
	_, err := c.ExecContext(ctx, "PRAGMA busy_timeout = 0; PRAGMA wal_checkpoint(TRUNCATE)")
	if errors.Is(sqliteKind(err), ErrBusy) {
		err = nil
	}
	_, e := c.ExecContext(ctx, setup(busy))
	return errors.Join(err, e)
}

// check looks at what is in the database and brings it to the newest version. Whatever
// the database cannot read then is damage.
func check(ctx context.Context, c *sql.Conn, secret journal.Secret, all []string, name string, own bool) error {
	tables := 0
	err := c.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name IN ('idem_meta', 'idem_entries')").Scan(&tables)
	switch {
	case err != nil:
		return unreadable(name, err)
	case tables == 0 && own, tables == 1:
		return &FileError{name, ErrDamagedFile, "idem_meta or idem_entries is missing"}
	case own: // all of the file
		err = checkIntegrity(ctx, c, name, "10")
	case tables == 2: // beside them may be any amount of the caller's data
		err = errors.Join(checkIntegrity(ctx, c, name, "idem_meta"), checkIntegrity(ctx, c, name, "idem_entries"))
	}
	if err != nil {
		return unreadable(name, err)
	}
	err = inTransaction(ctx, c, func() error {
		if tables > 0 { // whether it can be written
			if _, err := c.ExecContext(ctx, sqliteDialect.lock); err != nil {
				return err
			}
		}
		return migrate(ctx, c, all, secret, name)
	})
	if err == nil {
		err = checkSchema(ctx, c, all, name)
	}
	return unreadable(name, err)
}

// unreadable calls it damage if the tables are not what they were, or what is
// in them is not.
func unreadable(name string, err error) error {
	var f *FileError
	var e *sqlite.Error
	switch {
	case err == nil, errors.As(err, &f):
		return err
	case errors.As(err, &e) && e.Code()&0xff != sqlite3.SQLITE_ERROR:
		return err
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, driver.ErrBadConn), errors.Is(err, sql.ErrConnDone):
		return err
	}
	return &FileError{name, ErrDamagedFile, err.Error()}
}

// opening explains what the database said when it was opened.
func (j *Journal) opening(name string, err error) error {
	var f *FileError
	if errors.As(err, &f) {
		return err
	}
	switch of := j.dialect.kind(err); of {
	case nil:
		return fmt.Errorf("sqljournal: %s: %w", name, err)
	case journal.ErrDamaged:
		return &FileError{name, ErrDamagedFile, err.Error()}
	default:
		return fmt.Errorf("%w: %s: %w", of, name, err)
	}
}

// sqliteKind tells by the result code, see https://sqlite.org/rescode.html.
func sqliteKind(err error) error {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return nil
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL:
		return ErrBusy
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return journal.ErrDamaged
	case sqlite3.SQLITE_FULL:
		return journal.ErrFull
	case sqlite3.SQLITE_READONLY:
		return ErrReadOnly
	}
	return nil
}

// sqliteLeave writes the log back and empties it, unless others use it.
func sqliteLeave(j *Journal, latched bool) error {
	var err error
	if j.ownDB && !latched {
		_, err = j.conn.ExecContext(context.Background(), "PRAGMA busy_timeout = 0; PRAGMA wal_checkpoint(TRUNCATE)")
		if errors.Is(sqliteKind(err), ErrBusy) {
			err = nil
		}
	}
	return errors.Join(err, discard(j))
}

// discard closes the connection that writes; it was set up otherwise than the
// others and must not go back to them.
func discard(j *Journal) error {
	err := j.conn.Raw(func(any) error {
		j.writer.close(j.dialect)
		return driver.ErrBadConn
	})
	if errors.Is(err, driver.ErrBadConn) {
		err = nil
	}
	if e := j.conn.Close(); e != nil && !errors.Is(e, sql.ErrConnDone) {
		err = errors.Join(err, e)
	}
	return err
}

// connector sets up each connection to a file of the journal's own.
type connector struct {
	driver.Connector
	busy time.Duration
}

func connect(path string, busy time.Duration) (driver.Connector, error) {
	c, err := sqlite.NewConnector(fileURI(path, "_txlock=immediate"))
	if err != nil {
		return nil, fmt.Errorf("sqljournal: %w", err)
	}
	return connector{c, busy}, nil
}

// Connect keeps the log first of all: the last connection that is closed would
// delete it, also when the setup fails.
func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	f, ok := conn.(sqlite.FileControl)
	if !ok {
		return nil, errors.Join(fmt.Errorf("sqljournal: the driver's connection %T has no file control", conn), conn.Close())
	}
	if _, err := f.FileControlPersistWAL("main", 1); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if _, err := conn.(driver.ExecerContext).ExecContext(ctx, setup(c.busy), nil); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// setup is for every connection of the journal's own. With synchronous FULL
// a commit is on the disk when it returns.
func setup(busy time.Duration) string {
	return fmt.Sprintf("PRAGMA busy_timeout = %d; PRAGMA synchronous = FULL; PRAGMA journal_size_limit = %d; PRAGMA wal_autocheckpoint = %d",
		busy.Milliseconds(), logLimit, logPages)
}

func fileURI(path, query string) string {
	u := url.URL{Scheme: "file", Path: filepath.ToSlash(path), RawQuery: query}
	return u.String()
}

// realPath is where SQLite will look for the log: beside the file that a
// symbolic link means.
func realPath(path string) (string, error) {
	switch path {
	case "":
		return "", fmt.Errorf("%w: the path is empty", journal.ErrInvalid)
	case ":memory:":
		return "", fmt.Errorf("%w: the path is %q, which is no file; journal.Memory keeps a journal in memory", journal.ErrInvalid, path)
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("sqljournal: %w", err)
	}
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		dir, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return "", fmt.Errorf("sqljournal: %w", err)
		}
		return filepath.Join(dir, filepath.Base(path)), nil
	}
	path, err = filepath.EvalSymlinks(path)
	if err != nil {
		return "", fmt.Errorf("sqljournal: %w", err)
	}
	return path, nil
}

// inspect looks at an existing file from outside. It is never opened but by
// SQLite: to close any descriptor of it would drop the locks that another connection of
// this process holds (https://sqlite.org/howtocorrupt.html#_posix_advisory_locks_canceled_by_a_separate_thread_doing_close_).
func inspect(ctx context.Context, path string, info fs.FileInfo) error {
	switch {
	case !info.Mode().IsRegular():
		return &FileError{path, ErrOtherFile, "it is no regular file"}
	case info.Size() == 0:
		return &FileError{path, ErrEmptyFile, ""}
	case info.Size() < smallestDatabase:
		return notDatabase(path) // SQLite would take it for a new one
	}
	if err := peek(ctx, path); err != nil {
		return err
	}
	if _, err := os.Stat(path + "-wal"); errors.Is(err, fs.ErrNotExist) {
		return &FileError{path, ErrNoLog, "what was committed last may be lost. Put " + filepath.Base(path) + "-wal back. Only if the journal was closed " +
			"properly before it was copied, or if another program with SQLite closed it last, is everything in the file; then make an empty one"}
	} else if err != nil {
		return fmt.Errorf("sqljournal: %w", err)
	}
	return nil
}

// aside connects to a file without taking locks, reading its log or leaving a
// trace: it may be anybody's.
func aside(ctx context.Context, path string) (*sql.Conn, func(), error) {
	c, err := sqlite.NewConnector(fileURI(path, "mode=ro&immutable=1"))
	if err != nil {
		return nil, nil, fmt.Errorf("sqljournal: %w", err)
	}
	db := sql.OpenDB(c)
	conn, err := db.Conn(ctx)
	if err != nil {
		_ = db.Close() // nothing was opened
		return nil, nil, fmt.Errorf("sqljournal: %s: %w", path, err)
	}
	return conn, func() {
		_ = conn.Close() // nothing was written
		_ = db.Close()
	}, nil
}

// filePages are the pages of a file as they are in it, whatever its log has.
type filePages struct {
	conn  *sql.Conn
	close func()
	size  int // of a page in bytes
}

func pagesOf(path string) (p filePages, err error) {
	ctx := context.Background()
	if p.conn, p.close, err = aside(ctx, path); err != nil {
		return p, err
	}
	if err = p.conn.QueryRowContext(ctx, "PRAGMA page_size").Scan(&p.size); err != nil {
		p.close()
	}
	return p, err
}

// page is nil where the file has none of that number.
func (p filePages) page(number uint32) (page []byte, err error) {
	err = p.conn.QueryRowContext(context.Background(), "SELECT data FROM sqlite_dbpage WHERE pgno = $1", number).Scan(&page)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return page, err
}

// peek reads the mark of a file.
func peek(ctx context.Context, path string) error {
	conn, done, err := aside(ctx, path)
	if err != nil {
		return err
	}
	defer done()
	err = checkMark(ctx, conn, path)
	var f *FileError
	if errors.As(err, &f) {
		return err
	}
	var e *sqlite.Error
	if errors.As(err, &e) && e.Code()&0xff == sqlite3.SQLITE_NOTADB {
		return notDatabase(path)
	}
	// A page that is being written just now looks damaged from here. The
	// checks under a lock decide.
	return nil
}

// notDatabase tells what a file is that SQLite does not take for one of its
// own, so that no connection can hold locks on it.
func notDatabase(path string) error {
	const magic = "SQLite format 3\x00"
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sqljournal: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	head := make([]byte, smallestDatabase)
	n, err := f.Read(head)
	if err != nil {
		return fmt.Errorf("sqljournal: %w", err)
	}
	switch {
	case strings.Trim(string(head[:n]), "\x00") == "":
		return &FileError{path, ErrZeroFile, ""}
	case n < len(head) && strings.HasPrefix(string(head[:n]), magic):
		return &FileError{path, ErrTruncatedFile, fmt.Sprintf("it has %d bytes", n)}
	case strings.HasPrefix(string(head[:n]), magic):
		return &FileError{path, ErrDamagedFile, "SQLite does not take its first page for one of a database"}
	}
	return &FileError{path, ErrOtherFile, "it is no SQLite database"}
}

func checkMark(ctx context.Context, c *sql.Conn, path string) error {
	var id int64
	if err := c.QueryRowContext(ctx, "PRAGMA application_id").Scan(&id); err != nil {
		return unreadable(path, err)
	}
	if id != applicationID {
		return &FileError{path, ErrOtherFile, fmt.Sprintf("its application id is %#x instead of %#x", id, applicationID)}
	}
	return nil
}

func checkVersion(ctx context.Context, c *sql.Conn) error {
	var version string
	if err := c.QueryRowContext(ctx, "SELECT sqlite_version()").Scan(&version); err != nil {
		return err
	}
	return atLeast(version)
}

// atLeast compares versions like 3.51.3 by their numbers.
func atLeast(version string) error {
	if number(version) < number(oldestSQLite) {
		return fmt.Errorf("%w: it is %q; the oldest without this bug is %s", ErrOldSQLite, version, oldestSQLite)
	}
	return nil
}

func number(version string) int {
	n := 0
	parts := strings.Split(version, ".")
	for i := range 3 {
		part := 0
		if i < len(parts) {
			part, _ = strconv.Atoi(parts[i]) // what is no number counts as 0: too old
		}
		n = n*1000 + part
	}
	return n
}

func inTransaction(ctx context.Context, c *sql.Conn, f func() error) error {
	if _, err := c.ExecContext(ctx, sqliteDialect.begin); err != nil {
		return err
	}
	if err := f(); err != nil {
		_, _ = c.ExecContext(context.WithoutCancel(ctx), "ROLLBACK") // SQLite may have done it already
		return err
	}
	_, err := c.ExecContext(ctx, "COMMIT")
	return err
}

// checkSchema compares the tables and indexes with those that the migrations
// make: an index with another condition would hide entries.
func checkSchema(ctx context.Context, c *sql.Conn, all []string, name string) error {
	want, err := schemaOf(all)
	if err != nil {
		return err
	}
	have, err := schema(ctx, c)
	if err != nil {
		return err
	}
	for object, sql := range want {
		if have[object] != sql {
			return &FileError{name, ErrDamagedFile, fmt.Sprintf("%s is missing or was changed", object)}
		}
	}
	return nil
}

var schemas sync.Map // of strings.Join(migrations) to map[string]string

func schemaOf(all []string) (map[string]string, error) {
	key := strings.Join(all, "\x00")
	if s, ok := schemas.Load(key); ok {
		return s.(map[string]string), nil
	}
	c, err := sqlite.NewConnector(":memory:")
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(c)
	defer func() { _ = db.Close() }() // in memory
	ctx := context.Background()
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }() // as above
	for _, m := range all {
		if _, err := conn.ExecContext(ctx, m); err != nil {
			return nil, err
		}
	}
	s, err := schema(ctx, conn)
	if err == nil {
		schemas.Store(key, s)
	}
	return s, err
}

func schema(ctx context.Context, c *sql.Conn) (map[string]string, error) {
	rows, err := c.QueryContext(ctx, "SELECT type || ' ' || name, sql FROM sqlite_schema WHERE tbl_name IN ('idem_meta', 'idem_entries')")
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }() // Err says what there is to say
	all := make(map[string]string)
	for rows.Next() {
		var object string
		var sql sql.NullString
		if err := rows.Scan(&object, &sql); err != nil {
			return nil, err
		}
		all[object] = sql.String
	}
	return all, rows.Err()
}

// checkIntegrity is the full check, of one table or with at most so many findings: the
// quick one does not compare an index with its table.
func checkIntegrity(ctx context.Context, c *sql.Conn, name, what string) error {
	rows, err := c.QueryContext(ctx, "PRAGMA integrity_check("+what+")")
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }() // Err says what there is to say
	var found []string
	for rows.Next() {
		var text string
		if err := rows.Scan(&text); err != nil {
			return err
		}
		found = append(found, strings.TrimSpace(text))
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if len(found) != 1 || found[0] != "ok" {
		return &FileError{name, ErrDamagedFile, "the integrity check found: " + strings.Join(found, "; ")}
	}
	return nil
}
