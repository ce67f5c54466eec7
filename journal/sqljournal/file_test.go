package sqljournal_test

import (
	"bytes"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// made is the path of a closed journal with three pending operations and a
// finished one.
func made(t testing.TB) string {
	t.Helper()
	path := fresh(t)
	j, err := sqljournal.OpenSQLite(path, sqljournal.Options{})
	require.NoError(t, err)
	for _, id := range []string{"1", "2", "3", "done"} {
		e, err := j.Begin(t.Context(), payment(id))
		require.NoError(t, err)
		if id == "done" {
			_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{})
			require.NoError(t, err)
		}
	}
	require.NoError(t, j.Close())
	return path
}

// snapshot is the folder of path as a crash would leave it now, copied to a
// folder of its own.
func snapshot(t testing.TB, path string) string {
	t.Helper()
	to := fresh(t)
	for _, suffix := range []string{"", "-wal", ".secret"} {
		b, err := os.ReadFile(path + suffix)
		if err != nil && suffix == ".secret" {
			continue
		}
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(to+suffix, b, 0o600))
	}
	return to
}

// files are the contents of all files in the folder of path, by name.
func files(t testing.TB, path string) map[string]string {
	t.Helper()
	all := map[string]string{}
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(path), e.Name()))
		require.NoError(t, err)
		all[e.Name()] = string(b)
	}
	return all
}

func TestC73_AFileThatIsNotWhatItWasIsAnErrorThatSaysWhich(t *testing.T) {
	t.Parallel()
	exec := func(t *testing.T, path, query string) {
		t.Helper()
		db, err := sql.Open("sqlite", path)
		require.NoError(t, err)
		_, err = db.Exec(query)
		require.NoError(t, err)
		require.NoError(t, db.Close())
	}
	for _, c := range []struct {
		name     string
		spoil    func(t *testing.T, path string)
		err, and error
	}{
		{"an empty file", func(t *testing.T, path string) {
			require.NoError(t, os.Truncate(path, 0))
		}, sqljournal.ErrEmptyFile, journal.ErrDamaged},
		{"a file full of zeros", func(t *testing.T, path string) {
			info, err := os.Stat(path)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path, make([]byte, info.Size()), 0o600))
		}, sqljournal.ErrZeroFile, journal.ErrDamaged},
		{"a file cut within its header", func(t *testing.T, path string) {
			require.NoError(t, os.Truncate(path, 60))
		}, sqljournal.ErrTruncatedFile, journal.ErrDamaged},
		{"a file cut by a page", func(t *testing.T, path string) {
			info, err := os.Stat(path)
			require.NoError(t, err)
			require.NoError(t, os.Truncate(path, info.Size()-4096))
		}, sqljournal.ErrDamagedFile, journal.ErrDamaged},
		{"a file cut to its first page", func(t *testing.T, path string) {
			require.NoError(t, os.Truncate(path, 4096))
		}, sqljournal.ErrDamagedFile, journal.ErrDamaged},
		{"the database of another program", func(t *testing.T, path string) {
			for _, suffix := range []string{"", "-wal"} {
				require.NoError(t, os.Remove(path+suffix))
			}
			exec(t, path, "CREATE TABLE orders (id TEXT)")
		}, sqljournal.ErrOtherFile, journal.ErrForeign},
		{"the database of another program, in WAL mode", func(t *testing.T, path string) {
			for _, suffix := range []string{"", "-wal"} {
				require.NoError(t, os.Remove(path+suffix))
			}
			exec(t, path, "PRAGMA journal_mode = WAL; CREATE TABLE orders (id TEXT)")
		}, sqljournal.ErrOtherFile, journal.ErrForeign},
		{"a file that is no database", func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("not a database\n", 100)), 0o600))
		}, sqljournal.ErrOtherFile, journal.ErrForeign},
		{"a short file that is no database", func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
		}, sqljournal.ErrOtherFile, journal.ErrForeign},
		{"a folder", func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.Mkdir(path, 0o700))
		}, sqljournal.ErrOtherFile, journal.ErrForeign},
		{"a journal of a newer version", func(t *testing.T, path string) {
			exec(t, path, "UPDATE idem_meta SET version = 99")
			require.NoError(t, os.WriteFile(path+"-wal", nil, 0o600))
		}, sqljournal.ErrNewerSchema, journal.ErrForeign},
		{"a journal without one of its tables", func(t *testing.T, path string) {
			exec(t, path, "DROP TABLE idem_entries")
			require.NoError(t, os.WriteFile(path+"-wal", nil, 0o600))
		}, sqljournal.ErrDamagedFile, journal.ErrDamaged},
		{"a journal without any of its tables", func(t *testing.T, path string) {
			exec(t, path, "DROP TABLE idem_entries; DROP TABLE idem_meta")
			require.NoError(t, os.WriteFile(path+"-wal", nil, 0o600))
		}, sqljournal.ErrDamagedFile, journal.ErrDamaged},
		{"a journal without one of its indexes", func(t *testing.T, path string) {
			exec(t, path, "DROP INDEX idem_entries_pending")
			require.NoError(t, os.WriteFile(path+"-wal", nil, 0o600))
		}, sqljournal.ErrDamagedFile, journal.ErrDamaged},
		{"a journal that left WAL mode", func(t *testing.T, path string) {
			exec(t, path, "PRAGMA journal_mode = DELETE")
			require.NoError(t, os.WriteFile(path+"-wal", nil, 0o600))
		}, sqljournal.ErrDamagedFile, journal.ErrDamaged},
		{"a file without its log", func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path+"-wal"))
		}, sqljournal.ErrNoLog, journal.ErrDamaged},
		{"a log without its file", func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.WriteFile(path+"-wal", []byte("frames"), 0o600))
		}, sqljournal.ErrNoFile, journal.ErrDamaged},
		{"a journal without its secret", func(t *testing.T, path string) {
			require.NoError(t, os.Remove(path+".secret"))
		}, sqljournal.ErrNoSecret, journal.ErrSecret},
		{"a restored backup with another secret", func(t *testing.T, path string) {
			other, err := os.ReadFile(made(t) + ".secret")
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path+".secret", other, 0o600))
		}, sqljournal.ErrOtherSecret, journal.ErrSecret},
		{"a secret that was cut off", func(t *testing.T, path string) {
			require.NoError(t, os.Truncate(path+".secret", 40))
		}, sqljournal.ErrOtherSecret, journal.ErrSecret},
		{"an empty secret", func(t *testing.T, path string) {
			require.NoError(t, os.Truncate(path+".secret", 0))
		}, sqljournal.ErrOtherSecret, journal.ErrSecret},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := made(t)
			c.spoil(t, path)
			info, err := os.Stat(path)
			var before map[string]string
			if err == nil && info.Mode().IsRegular() {
				before = files(t, path)
			}
			for range 2 { // the first must not make the second find a journal
				j, err := sqljournal.OpenSQLite(path, sqljournal.Options{})
				require.True(t, j == nil)
				require.ErrorIs(t, err, c.err)
				require.ErrorIs(t, err, c.and)
				var f *sqljournal.FileError
				require.ErrorAs(t, err, &f)
				require.Contains(t, f.Path, path)
			}
			if before != nil {
				require.Equal(t, before[filepath.Base(path)], files(t, path)[filepath.Base(path)], "the file is left as it is")
			}
		})
	}
}

func TestC73_AJournalThatLostItsLogInACrashIsAnError(t *testing.T) {
	path := fresh(t)
	j := open(t, path, sqljournal.Options{})
	_, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	crashed := snapshot(t, path)
	require.NoError(t, os.Remove(crashed+"-wal"))
	_, err = sqljournal.OpenSQLite(crashed, sqljournal.Options{})
	require.ErrorIs(t, err, sqljournal.ErrNoLog)
	require.ErrorIs(t, err, journal.ErrDamaged)
}

func TestAJournalThatWasClosedNeedsOnlyAnEmptyLog(t *testing.T) {
	path := made(t)
	require.NoError(t, os.Remove(path+"-wal"))
	require.NoError(t, os.WriteFile(path+"-wal", nil, 0o600))
	require.Len(t, pending(t, open(t, path, sqljournal.Options{})), 3)
}

// pending is what Pending yields.
func pending(t testing.TB, j journal.Journal) []journal.Entry {
	t.Helper()
	var all []journal.Entry
	for e, err := range j.Pending(t.Context()) {
		require.NoError(t, err)
		all = append(all, e)
	}
	return all
}

func TestAJournalOutlastsItsProcess(t *testing.T) {
	path := fresh(t)
	o := sqljournal.Options{Owner: "first"}
	j := open(t, path, o)
	first, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	require.Equal(t, "first", first.Owner)
	for name, path := range map[string]string{"crashed": snapshot(t, path), "closed": path} {
		if name == "closed" {
			require.NoError(t, j.Close())
		}
		t.Run(name, func(t *testing.T) {
			j := open(t, path, sqljournal.Options{Owner: "second"})
			_, err := j.Begin(t.Context(), payment("1"))
			require.ErrorIs(t, err, journal.ErrClaimed)
			e, err := j.Finish(t.Context(), first, journal.Done, journal.Note{Reference: "pi_1"})
			require.NoError(t, err, "a claim is known by its fence")
			require.Equal(t, first.Key, e.Key)
		})
	}
}

func TestNoBodyDigestOrSecretIsInTheDatabase(t *testing.T) {
	path := fresh(t)
	j := open(t, path, sqljournal.Options{})
	body := []byte(`{"card":"4242424242424242"}`)
	in := payment("1")
	digest := sha256.Sum256(body)
	in.Content = digest[:]
	e, err := j.Begin(t.Context(), in)
	require.NoError(t, err)
	_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Reference: "the-reference"})
	require.NoError(t, err)
	key, err := os.ReadFile(path + ".secret")
	require.NoError(t, err)
	raw, err := hex.DecodeString(strings.TrimSpace(string(key)))
	require.NoError(t, err)

	all := ""
	for name, content := range files(t, path) {
		if !strings.HasSuffix(name, ".secret") {
			all += content
		}
	}
	require.Contains(t, all, "the-reference", "the search finds what is there")
	for what, b := range map[string][]byte{
		"the body": body, "its digest": digest[:], "the digest of the shape": in.Shape[:],
		"the secret": raw, "the secret in hexadecimal": bytes.TrimSpace(key),
	} {
		require.NotContains(t, all, string(b), what)
		require.NotContains(t, all, hex.EncodeToString(b), what)
	}
}

func TestASecretThatIsGivenIsNotWrittenDown(t *testing.T) {
	path := fresh(t)
	require.NoError(t, open(t, path, sqljournal.Options{Secret: secret}).Close())
	require.NoFileExists(t, path+".secret")
	_, err := sqljournal.OpenSQLite(path, sqljournal.Options{})
	require.ErrorIs(t, err, sqljournal.ErrNoSecret)
	_, err = sqljournal.OpenSQLite(path, sqljournal.Options{Secret: journal.Secret{9}})
	require.ErrorIs(t, err, sqljournal.ErrOtherSecret)
	require.NoFileExists(t, path+".secret", "an existing journal has the secret it was made with")
	open(t, path, sqljournal.Options{Secret: secret})
}

func TestASecretIsNeverOverwritten(t *testing.T) {
	path := fresh(t)
	other, err := os.ReadFile(made(t) + ".secret")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path+".secret", other, 0o600))
	open(t, path, sqljournal.Options{})
	b, err := os.ReadFile(path + ".secret")
	require.NoError(t, err)
	require.Equal(t, other, b)
}

// What a process leaves that dies while it creates: any of the steps before
// the file appears.
func TestACreationThatWasCutOffHindersNobody(t *testing.T) {
	whole := made(t)
	read := func(suffix string) []byte {
		b, err := os.ReadFile(whole + suffix)
		require.NoError(t, err)
		return b
	}
	for name, left := range map[string]map[string][]byte{
		"the secret's first name":   {".secret.new-1": read(".secret")[:10]},
		"the secret":                {".secret": read(".secret"), ".secret.new-1": read(".secret")},
		"an empty file":             {".secret": read(".secret"), ".new-1": nil},
		"half a file and its log":   {".secret": read(".secret"), ".new-1": read("")[:5000], ".new-1-wal": []byte("frames"), ".new-1-shm": nil},
		"the log but not the file":  {".secret": read(".secret"), ".new-1": read(""), ".new-1-wal": nil, "-wal": nil},
		"the log, without a secret": {"-wal": nil},
	} {
		t.Run(name, func(t *testing.T) {
			path := fresh(t)
			for suffix, b := range left {
				require.NoError(t, os.WriteFile(path+suffix, b, 0o600))
				old := time.Now().Add(-2 * time.Hour)
				require.NoError(t, os.Chtimes(path+suffix, old, old))
			}
			j := open(t, path, sqljournal.Options{})
			_, err := j.Begin(t.Context(), payment("1"))
			require.NoError(t, err)
			require.NoError(t, j.Close())
			require.Len(t, pending(t, open(t, path, sqljournal.Options{})), 1)
			for name := range files(t, path) {
				require.False(t, strings.HasSuffix(name, ".new-1"), "%s was left hours ago", name)
			}
		})
	}
}

func TestManyWhoCreateAtOnceShareOneJournal(t *testing.T) {
	t.Parallel()
	const openers, rounds = 8, 10
	for range rounds {
		path := fresh(t)
		over := make(chan struct{})
		var watch, all sync.WaitGroup
		watch.Go(func() {
			for {
				if _, err := os.Stat(path); err == nil {
					if _, err := os.Stat(path + "-wal"); err != nil {
						t.Errorf("the file is there and its log is not: %v", err)
					}
				}
				select {
				case <-over:
					return
				default:
				}
			}
		})
		errs := make([]error, openers)
		for n := range openers {
			all.Go(func() {
				j, err := sqljournal.OpenSQLite(path, sqljournal.Options{BusyTimeout: patience})
				if err != nil {
					errs[n] = err
					return
				}
				_, err = j.Begin(t.Context(), payment(fmt.Sprint(n)))
				errs[n] = err
				if err := j.Close(); err != nil {
					errs[n] = err
				}
			})
		}
		all.Wait()
		close(over)
		watch.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
		j := open(t, path, sqljournal.Options{})
		require.Len(t, pending(t, j), openers)
		require.NoError(t, j.Close())
		for name := range files(t, path) {
			require.NotContains(t, name, ".new-")
		}
	}
}

func init() {
	children["create"] = func(args []string) {
		j, err := sqljournal.OpenSQLite(args[0], sqljournal.Options{BusyTimeout: patience})
		exitOn(err)
		_, err = j.Begin(testContext, payment(args[1]))
		exitOn(err)
		exitOn(j.Close())
	}
}

func TestManyProcessesThatCreateAtOnceShareOneJournal(t *testing.T) {
	path := fresh(t)
	var all []*exec.Cmd
	for n := range 6 {
		c := child("create", path, fmt.Sprint(n))
		require.NoError(t, c.Start())
		all = append(all, c)
	}
	for _, c := range all {
		require.NoError(t, c.Wait())
	}
	require.Len(t, pending(t, open(t, path, sqljournal.Options{})), len(all))
}

func TestAJournalBehindASymbolicLinkIsTheOneItMeans(t *testing.T) {
	path := made(t)
	link := filepath.Join(t.TempDir(), "link.db")
	require.NoError(t, os.Symlink(path, link))
	require.Len(t, pending(t, open(t, link, sqljournal.Options{})), 3)
	require.Len(t, files(t, link), 1, "nothing is made beside the link")
}

func TestAPathMayHaveAnyCharacter(t *testing.T) {
	for _, name := range []string{"a b", "100%", "a?b=c", "a#b", "a%20b", "ä;&", "file:x", ":memory:", "'"} {
		path := filepath.Join(t.TempDir(), name)
		j := open(t, path, sqljournal.Options{})
		_, err := j.Begin(t.Context(), payment("1"))
		require.NoError(t, err)
		require.NoError(t, j.Close())
		require.FileExists(t, path)
		require.Len(t, pending(t, open(t, path, sqljournal.Options{})), 1)
	}
}

func TestOptionsThatCannotWorkAreNamed(t *testing.T) {
	for field, o := range map[string]sqljournal.Options{
		"Options.Lease":       {Lease: 99 * time.Millisecond},
		"Options.BusyTimeout": {BusyTimeout: -1},
		"Options.Owner":       {Owner: strings.Repeat("x", 256)},
	} {
		_, err := sqljournal.OpenSQLite(fresh(t), o)
		require.ErrorIs(t, err, journal.ErrInvalid)
		require.ErrorContains(t, err, field)
	}
	_, err := sqljournal.OpenSQLite("", sqljournal.Options{})
	require.ErrorIs(t, err, journal.ErrInvalid)
	_, err = sqljournal.OpenSQLite(filepath.Join(t.TempDir(), "no", "folder"), sqljournal.Options{})
	require.ErrorIs(t, err, fs.ErrNotExist)
}
