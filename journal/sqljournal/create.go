package sqljournal

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/idem-go/idem/journal"
)

// create makes the file of a journal where nothing is. It appears at once and
// whole: it is built under another name and linked, the log before the file,
// so that a file without its log has always lost it. A process that dies
// meanwhile leaves files that the next creation does not mind; if two create at the
// same time, both go on with the first.
func create(ctx context.Context, path string, o *Options) error {
	if info, err := os.Stat(path + "-wal"); err == nil && info.Size() > 0 {
		return &FileError{path, ErrNoFile, "put the file back; if its content does not matter, delete " + filepath.Base(path) + "-wal"}
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("sqljournal: %w", err)
	}
	secret := o.Secret
	if secret == (journal.Secret{}) {
		var err error
		if secret, err = makeSecret(path + ".secret"); err != nil {
			return err
		}
	}
	temp, err := newFile(path, nil)
	if err != nil {
		return err
	}
	defer func() {
		for _, suffix := range []string{"", "-wal", "-shm"} {
			_ = os.Remove(temp + suffix) // what is left does no harm
		}
	}()
	if err := build(ctx, temp, secret, o.BusyTimeout); err != nil {
		return fmt.Errorf("sqljournal: %s: %w", path, err)
	}
	if err := os.Link(temp+"-wal", path+"-wal"); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("sqljournal: %w", err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return err
	}
	if err := os.Link(temp, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("sqljournal: %w", err)
	}
	tidy(path)
	return syncDir(filepath.Dir(path))
}

// build makes the database under its first name, all of it in the file and
// on the disk, and the log empty.
func build(ctx context.Context, temp string, secret journal.Secret, busy time.Duration) (err error) {
	c, err := connect(temp, busy)
	if err != nil {
		return err
	}
	db := sql.OpenDB(c)
	defer func() { err = errors.Join(err, db.Close()) }()
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := checkVersion(ctx, conn); err != nil {
		return err
	}
	for _, sql := range []string{
		"PRAGMA auto_vacuum = INCREMENTAL", // first of all; so that a sweep can make the file smaller
		fmt.Sprintf("PRAGMA application_id = %d", applicationID),
		"PRAGMA journal_mode = WAL",
	} {
		if _, err := conn.ExecContext(ctx, sql); err != nil {
			return err
		}
	}
	if err := inTransaction(ctx, conn, func() error { return migrate(ctx, conn, migrations("sqlite"), secret, temp) }); err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)")
	return err
}

// tidy removes what a creation left that was interrupted long ago.
func tidy(path string) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return // they do no harm
	}
	for _, e := range entries {
		name := filepath.Base(path)
		if !strings.HasPrefix(e.Name(), name+tempMark) && !strings.HasPrefix(e.Name(), name+".secret"+tempMark) {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > time.Hour {
			_ = os.Remove(filepath.Join(filepath.Dir(path), e.Name())) // as above
		}
	}
}
