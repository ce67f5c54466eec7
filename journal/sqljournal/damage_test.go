package sqljournal_test

import (
	"bytes"
	"database/sql"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

var (
	exhaustive = flag.Bool("exhaustive", false, "flip every bit of a journal instead of some: 860,000, about half an hour; needs -timeout")
	someFlips  = flag.Int("flips", 1400, "how many bits of a journal are flipped, one at a time")
)

// image is a journal as a crash left it: some entries are in the file, some
// only in the log.
type image struct {
	file, log, secret []byte
	// entries as they must be, and as they were before the last transaction.
	entries, before map[string]journal.Entry
	// last is where the frames of the last transaction begin in log.
	last int
}

// crashImage makes one. Each call is a transaction of its own.
func crashImage(t *testing.T) image {
	t.Helper()
	path := fresh(t)
	o := sqljournal.Options{NoGroupCommit: true}
	j := open(t, path, o)
	begin := func(id string) journal.Entry {
		e, err := j.Begin(t.Context(), payment(id))
		require.NoError(t, err)
		return e
	}
	finish := func(e journal.Entry) {
		_, err := j.Finish(t.Context(), e, journal.Done, journal.Note{Status: 200, Reference: "pi_" + e.ID})
		require.NoError(t, err)
	}
	finish(begin("done in the file"))
	begin("pending in the file")
	released := begin("free in the file")
	_, err := j.Release(t.Context(), released, journal.Note{})
	require.NoError(t, err)
	ids := []string{"done in the file", "pending in the file", "free in the file"}
	for n := range 30 { // so that there are pages of the file that the log has not
		id := fmt.Sprint("filler ", n)
		if e := begin(id); n%2 == 0 {
			finish(e)
		}
		ids = append(ids, id)
	}
	changed := begin("finished in the log")
	require.NoError(t, j.Close())

	j = open(t, path, o)
	finish(begin("done in the log"))
	finish(changed)
	begin("pending in the log")
	ids = append(ids, "finished in the log", "done in the log", "pending in the log", "last")
	state := func() map[string]journal.Entry {
		all := map[string]journal.Entry{}
		for _, id := range ids {
			e, err := j.Get(t.Context(), payment(id).Operation)
			if errors.Is(err, journal.ErrNotFound) {
				continue
			}
			require.NoError(t, err)
			all[id] = e
		}
		return all
	}
	i := image{before: state()}
	i.last = committed(readFile(t, path+"-wal"))
	begin("last")
	i.entries = state()
	require.Len(t, i.entries, len(ids))
	i.file, i.log, i.secret = readFile(t, path), readFile(t, path+"-wal"), readFile(t, path+".secret")
	i.log = i.log[:committed(i.log)]
	require.Greater(t, len(i.log), i.last)
	return i
}

// committed is where the last commit of a log ends that is right: the frames
// behind it are of an earlier start.
func committed(log []byte) int {
	end := 32
	page := int(binary.BigEndian.Uint32(log[8:]))
	for at := 32; at+24+page <= len(log) && bytes.Equal(log[at+8:at+16], log[16:24]); at += 24 + page {
		if binary.BigEndian.Uint32(log[at+4:]) != 0 {
			end = at + 24 + page
		}
	}
	return end
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return b
}

// write puts the files of an image into a folder of their own.
func (i image) write(dir string) (path string, err error) {
	path = filepath.Join(dir, "idem.db")
	return path, errors.Join(
		os.MkdirAll(dir, 0o700), os.WriteFile(path, i.file, 0o600), os.WriteFile(path+"-wal", i.log, 0o600), os.WriteFile(path+".secret", i.secret, 0o600))
}

// verdict is what became of a damaged image.
type verdict int

const (
	refused   verdict = iota // it was not opened
	reported                 // an entry was named
	harmless                 // everything is as it was
	shortened                // everything is as it was before the last transaction
	silent                   // none of these: a defect
)

// judge opens the journal in dir, and closes it.
func (i image) judge(t *testing.T, dir string) (verdict, string) {
	path, err := i.write(dir)
	if err != nil {
		return silent, err.Error()
	}
	defer func() { _ = os.RemoveAll(dir) }() // the next one has another
	j, err := sqljournal.OpenSQLite(path, sqljournal.Options{})
	if err != nil {
		for _, of := range []error{journal.ErrDamaged, journal.ErrForeign, journal.ErrSecret, sqljournal.ErrReadOnly} {
			if errors.Is(err, of) {
				return refused, ""
			}
		}
		return silent, "an error without a type: " + err.Error()
	}
	defer func() { _ = j.Close() }() // only read, or given up
	found := reported
	compare := func(want map[string]journal.Entry) (string, bool) {
		named, listed := 0, map[string]journal.Entry{}
		for e, err := range j.Pending(t.Context()) {
			switch {
			case errors.Is(err, journal.ErrDamaged):
				named++
			case err != nil:
				return err.Error(), false
			default:
				listed[e.ID] = e
			}
		}
		missing := -named
		for id, w := range want {
			if _, ok := listed[id]; w.State == journal.Pending && !ok {
				missing++
			}
		}
		if missing > 0 {
			return fmt.Sprintf("Pending keeps silent about %d entries", missing), false
		}
		for id, w := range want {
			e, err := j.Get(t.Context(), w.Operation)
			switch {
			case errors.Is(err, journal.ErrDamaged):
				// Pending takes from its index what the index has, so that it may
				// still yield the entry, as it was written.
				if p, ok := listed[id]; ok && !bytes.Equal(secret.MAC(&p), secret.MAC(&w)) {
					return fmt.Sprintf("%q is yielded as %v", id, p), false
				}
				delete(listed, id)
				named++
				continue
			case err != nil:
				return fmt.Sprintf("Get of %q: %v", id, err), false
			case !bytes.Equal(secret.MAC(&e), secret.MAC(&w)): // all that is stored
				return fmt.Sprintf("Get of %q: %v instead of %v", id, e, w), false
			}
			if p, ok := listed[id]; ok != (e.State == journal.Pending) || ok && !bytes.Equal(secret.MAC(&p), secret.MAC(&w)) {
				return fmt.Sprintf("%q is yielded: %v, %v", id, ok, p), false
			}
			delete(listed, id)
			if strings.HasPrefix(id, "filler") {
				continue // each Begin flushes the disk
			}
			in := payment(id)
			in.Key, in.NextKey = "wrong", "wrong"
			if e, err := j.Begin(t.Context(), in); err == nil && e.Key != w.Key || errors.Is(err, journal.ErrMismatch) {
				return fmt.Sprintf("Begin of %q: %v, %v", id, e, err), false
			}
		}
		if len(listed) > 0 {
			return fmt.Sprintf("there is more than was begun: %v", listed), false
		}
		if named == 0 {
			found = harmless
		}
		return "", true
	}
	want := i.entries
	_, err = j.Get(t.Context(), payment("last").Operation)
	if errors.Is(err, journal.ErrNotFound) {
		want = i.before
	}
	switch wrong, ok := compare(want); {
	case !ok:
		return silent, wrong
	case len(want) == len(i.entries):
		return found, ""
	case found != harmless:
		return silent, "the last transaction is gone, and an entry is damaged"
	}
	return shortened, ""
}

// keyStart is how the keys of the entries begin.
const keyStart = "first-"

// key is a place of the file where the key of an entry stands that the log has not.
func (i image) key(t *testing.T) int {
	for at := 0; ; at++ {
		n := bytes.Index(i.file[at:], []byte(keyStart))
		require.GreaterOrEqual(t, n, 0, "there is none")
		at += n
		spoilt := i
		spoilt.file = bytes.Clone(i.file)
		spoilt.file[at] ^= 1
		if v, _ := spoilt.judge(t, filepath.Join(t.TempDir(), "spoilt")); v == reported {
			return at
		}
	}
}

// A single bit, anywhere in the file or in its log: the journal is not opened,
// or the entry is named, or it makes no difference. The exception is a bit in the
// last transaction of the log, which then looks like one that the crash cut
// off: that transaction, and nothing else, is gone.
func TestAFlippedBitIsAnErrorOrMakesNoDifference(t *testing.T) {
	t.Parallel()
	i := crashImage(t)
	v, why := i.judge(t, filepath.Join(t.TempDir(), "whole"))
	require.Equal(t, harmless, v, why)

	key := i.key(t)
	type flip struct{ file, log int } // the bit, or -1
	var flips []flip
	if *exhaustive {
		for bit := range 8 * len(i.file) {
			flips = append(flips, flip{bit, -1})
		}
		for bit := range 8 * len(i.log) {
			flips = append(flips, flip{-1, bit})
		}
	} else {
		some := *someFlips
		if raceEnabled {
			some /= 10
		}
		for n := range some {
			f := flip{-1, -1}
			switch n % 14 {
			default:
				f.file = rand.IntN(8 * len(i.file))
			case 4: // the key of an entry that the log has not
				f.file = 8*key + rand.IntN(8*len(keyStart))
			case 5, 6, 7, 8, 9:
				f.log = rand.IntN(8 * len(i.log))
			case 10: // the header
				f.file = rand.IntN(8 * 100)
			case 11: // the schema
				f.file = rand.IntN(8 * 4096)
			case 12: // the header of the log
				f.log = rand.IntN(8 * 32)
			case 13: // the header of a frame
				f.log = 8*(32+rand.IntN(len(i.log)/(24+4096))*(24+4096)) + rand.IntN(8*24)
			}
			flips = append(flips, f)
		}
	}
	dir := t.TempDir()
	var counts [silent + 1]atomic.Int64
	var next atomic.Int64
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for {
				n := int(next.Add(1)) - 1
				if n >= len(flips) {
					return
				}
				f, spoilt, where := flips[n], i, ""
				if f.file >= 0 {
					spoilt.file = bytes.Clone(i.file)
					spoilt.file[f.file/8] ^= 1 << (f.file % 8)
					where = fmt.Sprintf("bit %d of byte %d of the file", f.file%8, f.file/8)
				} else {
					spoilt.log = bytes.Clone(i.log)
					spoilt.log[f.log/8] ^= 1 << (f.log % 8)
					where = fmt.Sprintf("bit %d of byte %d of the log", f.log%8, f.log/8)
				}
				v, why := spoilt.judge(t, filepath.Join(dir, fmt.Sprint(n)))
				counts[v].Add(1)
				if v == silent || v == shortened && f.log < 8*i.last {
					t.Errorf("%s (the last transaction begins at byte %d): verdict %d: %s", where, i.last, v, why)
				}
				if f.log >= 8*i.last && v != shortened && v != refused {
					t.Errorf("%s, in the last transaction: verdict %d: %s", where, v, why)
				}
			}
		})
	}
	all.Wait()
	t.Logf("%d flips: %d refused, %d reported, %d harmless, %d shortened by the last transaction",
		len(flips), counts[refused].Load(), counts[reported].Load(), counts[harmless].Load(), counts[shortened].Load())
	require.NotZero(t, counts[refused].Load())
	require.NotZero(t, counts[reported].Load())
}

func TestC70_DamageInTheMiddleIsNotTakenForATornTail(t *testing.T) {
	t.Parallel()
	i := crashImage(t)
	page := 4096
	t.Run("a zeroed page of the file", func(t *testing.T) {
		for n := range len(i.file) / page {
			spoilt := i
			spoilt.file = bytes.Clone(i.file)
			clear(spoilt.file[n*page : (n+1)*page])
			v, why := spoilt.judge(t, filepath.Join(t.TempDir(), "spoilt"))
			require.NotContains(t, []verdict{silent, shortened}, v, "page %d: %s", n+1, why)
		}
	})
	t.Run("a zeroed frame of the log", func(t *testing.T) {
		frame := page + 24
		for at := 32; at < len(i.log); at += frame {
			spoilt := i
			spoilt.log = bytes.Clone(i.log)
			clear(spoilt.log[at : at+frame])
			v, why := spoilt.judge(t, filepath.Join(t.TempDir(), "spoilt"))
			if at+frame <= i.last-frame { // see the exception in the package comment
				require.Equal(t, refused, v, "frame at %d: %s", at, why)
			}
		}
	})
	t.Run("a file that is cut anywhere", func(t *testing.T) {
		for size := 0; size < len(i.file); size += 1000 {
			spoilt := i
			spoilt.file = i.file[:size]
			v, why := spoilt.judge(t, filepath.Join(t.TempDir(), "spoilt"))
			require.NotContains(t, []verdict{silent, shortened}, v, "cut at %d: %s", size, why)
		}
	})
	t.Run("a log whose tail is torn anywhere", func(t *testing.T) {
		for size := i.last; size < len(i.log); size += 500 {
			spoilt := i
			spoilt.log = i.log[:size]
			v, why := spoilt.judge(t, filepath.Join(t.TempDir(), "spoilt"))
			require.Equal(t, shortened, v, "what a crash leaves is no damage: cut at %d: %s", size, why)
		}
	})
}

// A row can change under an open journal, too.
func TestC70_AnEntryThatWasChangedIsNamedAndTheOthersGoOn(t *testing.T) {
	path := fresh(t)
	j := open(t, path, sqljournal.Options{})
	for _, id := range []string{"1", "2", "3"} {
		_, err := j.Begin(t.Context(), payment(id))
		require.NoError(t, err)
	}
	for column, value := range map[string]any{
		"key": "another key", "fence": 7, "generation": 2, "attempts": 5, "first_send": 0, "clear": 1, "owner": "me", "lease": 1,
		"status": 200, "reference": "r", "mac": []byte("mac"), "fingerprint": nil, "request": []byte("body"), "key_window": 1, "finished": 1,
	} {
		t.Run(column, func(t *testing.T) {
			var old any
			require.NoError(t, j.DB().QueryRow("SELECT "+column+" FROM idem_entries WHERE id = '1'").Scan(&old))
			set := func(v any) {
				_, err := j.DB().Exec("UPDATE idem_entries SET "+column+" = $1 WHERE id = '1'", v)
				require.NoError(t, err)
			}
			set(value)
			defer set(old)
			requireNamed := func(err error) {
				t.Helper()
				require.ErrorIs(t, err, journal.ErrDamaged)
				var r *sqljournal.RowError
				require.ErrorAs(t, err, &r)
				require.Equal(t, payment("1").Operation, r.Operation)
			}
			_, err := j.Get(t.Context(), payment("1").Operation)
			requireNamed(err)
			e, err := j.Begin(t.Context(), payment("1"))
			requireNamed(err)
			require.Zero(t, e, "there is nothing to send")
			_, err = j.Decide(t.Context(), payment("1").Operation, journal.Decision{State: journal.Done, Reason: "r"})
			requireNamed(err)
			var seen []string
			for e, err := range j.Pending(t.Context()) {
				if e.ID == "1" {
					requireNamed(err)
					require.Empty(t, e.Key)
				} else {
					require.NoError(t, err)
				}
				seen = append(seen, e.ID)
			}
			require.Equal(t, []string{"1", "2", "3"}, seen)
			_, err = j.Begin(t.Context(), payment("2"))
			require.ErrorIs(t, err, journal.ErrClaimed, "the journal goes on")
		})
	}
}

func TestARowOfOneOperationDoesNotPassForAnother(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{})
	_, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	_, err = j.DB().Exec("UPDATE idem_entries SET id = '2'")
	require.NoError(t, err)
	_, err = j.Begin(t.Context(), payment("2"))
	require.ErrorIs(t, err, journal.ErrDamaged)
}

// An index that lacks an entry hides it: from Pending, or from the Begin that
// would then start it anew.
func TestC70_AnIndexThatHidesAnEntryIsFound(t *testing.T) {
	for index, of := range map[string]string{
		"idem_entries_operation": "(scope, name, id)", "idem_entries_pending": "(created, seq)", "idem_entries_finished": "(finished, seq)",
	} {
		t.Run(index, func(t *testing.T) {
			path := made(t)
			db, err := sql.Open("sqlite", path)
			require.NoError(t, err)
			db.SetMaxOpenConns(1)
			var text string
			require.NoError(t, db.QueryRow("SELECT sql FROM sqlite_schema WHERE name = $1", index).Scan(&text))
			for _, s := range []string{
				"DROP INDEX " + index, "CREATE INDEX " + index + " ON idem_entries " + of + " WHERE id NOT IN ('1', 'done')",
				"PRAGMA writable_schema = ON", "UPDATE sqlite_schema SET sql = '" + text + "' WHERE name = '" + index + "'",
			} {
				_, err := db.Exec(s)
				require.NoError(t, err, s)
			}
			require.NoError(t, db.Close())
			require.NoError(t, os.WriteFile(path+"-wal", nil, 0o600))
			_, err = sqljournal.OpenSQLite(path, sqljournal.Options{})
			require.ErrorIs(t, err, sqljournal.ErrDamagedFile)
			require.ErrorContains(t, err, index, "what the check found is told")
		})
	}
}
