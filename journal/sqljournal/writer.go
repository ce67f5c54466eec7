package sqljournal

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/idem-go/idem/journal"
)

// writer is the connection that writes, with its statements. Only the leader
// uses it, and only within sql.Conn.Raw: the way through database/sql would
// double what a step costs.
type writer struct {
	rules *journal.Rules

	begin, commit, rollback                driver.Stmt
	selectEntry, insertEntry               driver.Stmt
	updateEntry, updateClaim, updateFinish driver.Stmt
	deleteEntry, deleteDamaged             driver.Stmt
	sweepExpired, sweepOld, sweepStored    driver.Stmt
	free, shrink                           driver.Stmt

	args []driver.NamedValue
	row  [width]driver.Value
}

// prepare needs the driver's connection.
func (w *writer) prepare(c any, d dialect) error {
	p, ok := c.(driver.ConnPrepareContext)
	if !ok {
		return fmt.Errorf("%w: the driver's connection %T has no PrepareContext", journal.ErrInvalid, c)
	}
	for _, s := range w.all(d) {
		stmt, err := p.PrepareContext(context.Background(), d.sql(s.sql))
		if err != nil {
			return err
		}
		*s.stmt = stmt
		_, exec := stmt.(driver.StmtExecContext)
		_, query := stmt.(driver.StmtQueryContext)
		if !exec || !query {
			return fmt.Errorf("%w: the driver's statement %T has no ExecContext or QueryContext", journal.ErrInvalid, stmt)
		}
	}
	return nil
}

type prepared struct {
	stmt *driver.Stmt
	sql  string
}

func (w *writer) all(d dialect) []prepared {
	return []prepared{
		{&w.begin, d.begin}, {&w.commit, "COMMIT"}, {&w.rollback, "ROLLBACK"},
		{&w.selectEntry, selectEntry}, {&w.insertEntry, insertEntry}, {&w.updateEntry, updateEntry},
		{&w.updateClaim, updateClaim}, {&w.updateFinish, updateFinish}, {&w.deleteEntry, deleteEntry}, {&w.deleteDamaged, deleteDamaged},
		{&w.sweepExpired, selectExpired}, {&w.sweepOld, selectOld}, {&w.sweepStored, selectStored},
		{&w.free, d.free}, {&w.shrink, d.shrink},
	}
}

func (w *writer) close(d dialect) {
	for _, s := range w.all(d) {
		if *s.stmt != nil {
			_ = (*s.stmt).Close() // the connection is closed next
		}
	}
}

func (w *writer) named(args []any) []driver.NamedValue {
	w.args = w.args[:0]
	for i, a := range args {
		w.args = append(w.args, driver.NamedValue{Ordinal: i + 1, Value: a})
	}
	return w.args
}

// exec tells how many rows it changed. The context of a caller must not reach
// the database: the transaction belongs to others too.
func (w *writer) exec(s driver.Stmt, args ...any) (int64, error) {
	r, err := s.(driver.StmtExecContext).ExecContext(context.Background(), w.named(args))
	if err != nil {
		return 0, storeError{err}
	}
	n, err := r.RowsAffected()
	if err != nil {
		return 0, storeError{err}
	}
	return n, nil
}

// query reads the rows of one of the selects of entries; all is false if the
// bodies that they store came to more than most bytes, and the rest was not read.
func (w *writer) query(s driver.Stmt, most int, args ...any) (rows []row, all bool, err error) {
	bytes := 0
	err = w.values(s, args, w.row[:], func(values []driver.Value) bool {
		r := decode(values)
		rows = append(rows, r)
		bytes += len(r.entry.Request) + len(r.entry.Answer)
		return bytes <= most
	})
	return rows, bytes <= most, err
}

// values hands each row of a query to f, in the same slice, until f returns false.
func (w *writer) values(s driver.Stmt, args []any, into []driver.Value, f func([]driver.Value) bool) (err error) {
	r, err := s.(driver.StmtQueryContext).QueryContext(context.Background(), w.named(args))
	if err != nil {
		return storeError{err}
	}
	defer func() {
		if e := r.Close(); e != nil && err == nil {
			err = storeError{e}
		}
	}()
	for {
		switch err := r.Next(into); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return storeError{err}
		}
		if !f(into) {
			return nil
		}
	}
}

// load returns the entry of op; nil: there is none.
func (w *writer) load(op journal.Operation) (*row, error) {
	rows, _, err := w.query(w.selectEntry, math.MaxInt, op.Scope, op.Name, op.ID)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	r := &rows[0]
	return r, r.check(&w.rules.Secret)
}

// insert reports whether there was no entry yet.
func (w *writer) insert(e *journal.Entry) (bool, error) {
	if err := checkSize(e); err != nil {
		return false, err
	}
	n, err := w.exec(w.insertEntry, insertArgs(e, w.rules.Secret.MAC(e))...)
	return n == 1, err
}

// update replaces old by e.
func (w *writer) update(old *row, e *journal.Entry) error {
	if err := checkSize(e); err != nil {
		return err
	}
	var n int64
	var err error
	switch mac := w.rules.Secret.MAC(e); {
	case onlyClaim(&old.entry, e):
		n, err = w.exec(w.updateClaim, claimArgs(e, mac, old)...)
	case onlyFinish(&old.entry, e):
		n, err = w.exec(w.updateFinish, finishArgs(e, mac, old)...)
	default:
		n, err = w.exec(w.updateEntry, updateArgs(e, mac, old)...)
	}
	return changedOne(n, err)
}

func (w *writer) remove(old *row) error {
	return changedOne(w.exec(w.deleteEntry, old.seq, old.mac))
}

// move replaces old by e, which is much smaller, at the end of the table:
// SQLite never joins the pages of rows that became smaller where they are.
func (w *writer) move(old *row, e *journal.Entry) error {
	if err := w.remove(old); err != nil {
		return err
	}
	ok, err := w.insert(e)
	if err == nil && !ok {
		err = changedOne(0, nil)
	}
	return err
}

// changedOne: a row that was read in the same transaction is still there.
func changedOne(n int64, err error) error {
	if err == nil && n != 1 {
		err = storeError{fmt.Errorf("a statement changed %d rows instead of 1: %w", n, journal.ErrDamaged)}
	}
	return err
}

// The steps. Each is read, ask the rules, write; a new entry needs no reading.

// newEntry is what Begin writes if there is no entry.
type newEntry struct {
	now      time.Time
	returned journal.Entry
	args     []any // of insertEntry
}

// prepareEntry makes a newEntry. It does the work that needs no database, in the
// goroutine of the caller: the others wait for what the leader does.
func prepareEntry(r *journal.Rules, in journal.Intent, now time.Time) (newEntry, error) {
	stored, returned, _, err := r.Begin(nil, in, now)
	if err != nil {
		return newEntry{}, err
	}
	if err := checkSize(&stored); err != nil {
		return newEntry{}, err
	}
	return newEntry{now, returned, insertArgs(&stored, r.Secret.MAC(&stored))}, nil
}

func (w *writer) beginEntry(in journal.Intent, e newEntry) (journal.Entry, error) {
	now := time.Now()
	if in.MaxResumes == 0 && now.Sub(e.now) > w.rules.Lease/16 { // it waited, and the lease begins now
		var err error
		if e, err = prepareEntry(w.rules, in, now); err != nil {
			return journal.Entry{}, err
		}
	}
	if in.MaxResumes == 0 {
		if n, err := w.exec(w.insertEntry, e.args...); err != nil || n == 1 {
			return e.returned, err
		}
	}
	old, err := w.load(in.Operation)
	if err != nil {
		return journal.Entry{}, err
	}
	if old == nil && in.MaxResumes > 0 {
		return journal.Entry{}, journal.ErrNotFound
	}
	if old == nil {
		n, err := w.exec(w.insertEntry, e.args...)
		return e.returned, changedOne(n, err)
	}
	stored, returned, write, err := w.rules.Begin(&old.entry, in, now)
	if write {
		if err := w.update(old, &stored); err != nil {
			return journal.Entry{}, err
		}
	}
	return returned, err
}

func (w *writer) renewEntry(e journal.Entry, n journal.Note) (journal.Entry, error) {
	return w.change(e.Operation, func(old *journal.Entry) (journal.Entry, bool, error) {
		out, err := w.rules.Renew(old, e, n, time.Now())
		return out, err == nil, err
	})
}

func (w *writer) finishEntry(e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	return w.change(e.Operation, func(old *journal.Entry) (journal.Entry, bool, error) {
		return w.rules.Finish(old, e, s, n, time.Now())
	})
}

func (w *writer) releaseEntry(e journal.Entry, n journal.Note) (journal.Entry, error) {
	return w.change(e.Operation, func(old *journal.Entry) (journal.Entry, bool, error) {
		out, err := w.rules.Release(old, e, n)
		return out, err == nil, err
	})
}

func (w *writer) decideEntry(op journal.Operation, d journal.Decision) (journal.Entry, error) {
	return w.change(op, func(old *journal.Entry) (journal.Entry, bool, error) {
		out, err := w.rules.Decide(old, d, time.Now())
		return out, err == nil, err
	})
}

// decideDamaged puts a new row in the place of a damaged one.
func (w *writer) decideDamaged(op journal.Operation, d journal.Decision) (journal.Entry, error) {
	rows, _, err := w.query(w.selectEntry, math.MaxInt, op.Scope, op.Name, op.ID)
	switch {
	case err != nil:
		return journal.Entry{}, err
	case len(rows) == 0:
		return journal.Entry{}, journal.ErrNotFound
	case rows[0].check(&w.rules.Secret) == nil:
		return rows[0].entry, fmt.Errorf("%w: the entry of %v is not damaged; use Decide", journal.ErrInvalid, op)
	}
	now := time.Now()
	if e := rows[0].entry; e.Claimed(now) { // its owner may be sending; a wrong lease holds for LongestLease at most
		return journal.Entry{Operation: op, Owner: e.Owner, Lease: e.Lease}, journal.ErrClaimed
	}
	out, err := w.rules.Decide(rows[0].salvaged(op, now), d, now)
	if err == nil {
		err = checkSize(&out) // before anything is deleted: it is no error of the store, and the others commit
	}
	if err != nil {
		return journal.Entry{}, err
	}
	if err := changedOne(w.exec(w.deleteDamaged, rows[0].seq)); err != nil {
		return journal.Entry{}, err
	}
	ok, err := w.insert(&out)
	if err == nil && !ok {
		err = changedOne(0, nil)
	}
	return out, err
}

// change lets f replace an entry, which is nil where there is none.
func (w *writer) change(op journal.Operation, f func(old *journal.Entry) (e journal.Entry, write bool, err error)) (journal.Entry, error) {
	old, err := w.load(op)
	if err != nil {
		return journal.Entry{}, err
	}
	var given *journal.Entry
	if old != nil {
		given = &old.entry
	}
	e, write, err := f(given)
	if write {
		if err := w.update(old, &e); err != nil {
			return journal.Entry{}, err
		}
	}
	return e, err
}

// sweep does a part of a sweep with one of its selects, from the given row on: it
// tells whether there may be more, which rows it left, and what it did.
func (w *writer) sweep(s driver.Stmt, until time.Time, keep time.Duration, now time.Time, skip int) (p swept, err error) {
	rows, all, err := w.query(s, sweepBytes, journal.Micro(until), int64(sweepRows), int64(skip))
	if err != nil {
		return swept{}, err
	}
	p.more = !all || len(rows) == sweepRows
	for i := range rows {
		r := &rows[i]
		if err := r.check(&w.rules.Secret); err != nil {
			p.damaged = errors.Join(p.damaged, err)
			p.left++
			continue
		}
		e, write, remove := w.rules.Sweep(r.entry, keep, now)
		switch {
		case remove:
			err = w.remove(r)
			p.deleted++
		case write:
			err = w.move(r, &e)
			p.emptied++
		default:
			p.left++
		}
		if err != nil {
			return swept{}, err
		}
	}
	return p, nil
}

// One step of a sweep handles so many entries, or as many as hold so many bytes
// of bodies; the others wait for it about a millisecond.
const (
	sweepRows  = 100
	sweepBytes = 1 << 20
)

// swept is what one step of a sweep did.
type swept struct {
	more                   bool
	left, emptied, deleted int
	damaged                error
}

// giveBack makes the file smaller by some pages if many are free, and reports
// whether that was so. A quarter may stay free, for what comes next.
func (w *writer) giveBack() (bool, error) {
	const fewPages = 256
	var free, pages int64
	var two [2]driver.Value
	err := w.values(w.free, nil, two[:], func(v []driver.Value) bool {
		free, _ = v[0].(int64)
		pages, _ = v[1].(int64)
		return true
	})
	if err != nil || free <= max(fewPages, pages/4) {
		return false, err
	}
	_, err = w.exec(w.shrink)
	return err == nil, err
}
