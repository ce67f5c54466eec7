package sqljournal

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"path"
	"slices"

	"github.com/idem-go/idem/journal"
)

//go:embed migrations
var files embed.FS

// migrations of a dialect, in order: the n-th leads to version n+1. A file that has
// been released must not change.
func migrations(dialect string) []string {
	dir := path.Join("migrations", dialect)
	entries, err := files.ReadDir(dir) // sorted by name
	if err != nil {
		panic(err) // the folder is in the binary
	}
	var all []string
	for _, e := range entries {
		sql, err := fs.ReadFile(files, path.Join(dir, e.Name()))
		if err != nil {
			panic(err) // as above
		}
		all = append(all, string(sql))
	}
	return all
}

// migrate brings the tables to the newest version, within the caller's
// transaction, and checks the secret. name is for errors.
func migrate(ctx context.Context, c *sql.Conn, all []string, secret journal.Secret, name string) error {
	tables := 0
	if err := c.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'idem_meta'").Scan(&tables); err != nil {
		return err
	}
	version := 0
	if tables > 0 {
		var check []byte
		err := c.QueryRowContext(ctx, "SELECT version, secret_check FROM idem_meta WHERE one = 1").Scan(&version, &check)
		switch {
		case err != nil:
			return err
		case version > len(all):
			return &FileError{name, ErrNewerSchema, fmt.Sprintf("its schema is %d; this program knows up to %d", version, len(all))}
		case version < 1:
			return &FileError{name, ErrDamagedFile, fmt.Sprintf("its schema is %d; the least is 1", version)}
		case !slices.Equal(check, secret.Check()):
			return &FileError{name, ErrOtherSecret, ""}
		}
		if version == len(all) {
			return nil
		}
		if err := checkSchema(ctx, c, all[:version], name); err != nil {
			return err
		}
	}
	for _, sql := range all[version:] {
		version++
		if _, err := c.ExecContext(ctx, sql); err != nil {
			return fmt.Errorf("migration to version %d: %w", version, err)
		}
	}
	if tables == 0 {
		_, err := c.ExecContext(ctx, "INSERT INTO idem_meta (one, version, secret_check) VALUES (1, $1, $2)", version, secret.Check())
		return err
	}
	_, err := c.ExecContext(ctx, "UPDATE idem_meta SET version = $1", version)
	return err
}
