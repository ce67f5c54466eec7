package sqljournal

import (
	"context"
	"crypto/hmac"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/idem-go/idem/journal"
)

// Options of a journal. The zero value is right for OpenSQLite.
type Options struct {
	// Lease is how long a claim holds unless it is renewed; an operation whose
	// process died can be taken over after it. 0: 30 s; the least is 100 ms, the
	// most 1 h.
	// Journals that share a store need not agree on it.
	Lease time.Duration
	// Secret keys the fingerprints and the MACs. Zero: OpenSQLite keeps one in
	// a file of its own, the journal's path with ".secret" added, and makes it
	// when it creates the journal. New demands one.
	Secret journal.Secret
	// Owner is written into claims and names this process to people; at most
	// 255 bytes. "": host name, process id and a random number.
	Owner string
	// BusyTimeout is how long a call waits for the transactions of others
	// before ErrBusy. 0: 5 s; the least is 1 ms.
	BusyTimeout time.Duration
	// MustExist makes it ErrNothingThere to open a path where no journal is,
	// instead of making a new one: for a service that had one before.
	MustExist bool
	// NoGroupCommit commits each call by itself. Calls then wait for each
	// other's flush of the disk.
	NoGroupCommit bool
}

const (
	leastLease         = 100 * time.Millisecond
	leastBusyTimeout   = time.Millisecond
	defaultBusyTimeout = 5 * time.Second
	longestOwner       = 255
)

// complete fills what is zero.
func (o *Options) complete() error {
	if o.Lease == 0 {
		o.Lease = journal.DefaultLease
	}
	if o.BusyTimeout == 0 {
		o.BusyTimeout = defaultBusyTimeout
	}
	switch {
	case o.Lease < leastLease:
		return fmt.Errorf("%w: Options.Lease is %v; the least is %v, or 0 (%v)", journal.ErrInvalid, o.Lease, leastLease, journal.DefaultLease)
	case o.Lease > journal.LongestLease:
		return fmt.Errorf("%w: Options.Lease is %v; the most is %v", journal.ErrInvalid, o.Lease, journal.LongestLease)
	case o.BusyTimeout < leastBusyTimeout:
		return fmt.Errorf("%w: Options.BusyTimeout is %v; the least is %v, or 0 (%v)", journal.ErrInvalid, o.BusyTimeout, leastBusyTimeout, defaultBusyTimeout)
	case len(o.Owner) > longestOwner:
		return fmt.Errorf("%w: Options.Owner has %d bytes; the most is %d", journal.ErrInvalid, len(o.Owner), longestOwner)
	}
	if o.Owner == "" {
		owner, err := newOwner()
		if err != nil {
			return err
		}
		o.Owner = owner
	}
	return nil
}

// Journal is a [journal.Journal] in an SQL database. It is safe for concurrent
// use. Make it with OpenSQLite or New, and Close it.
//
// After a failed write or commit every call fails with journal.ErrLatched, which
// wraps the first cause: what is on disk is then known to nobody, and a second
// flush may report success for what the first one lost. Close the journal and open it
// anew. ErrBusy and the end of a caller's context are no such failures.
type Journal struct {
	db      *sql.DB
	ownDB   bool
	dialect dialect
	rules   *journal.Rules // behind a pointer, so that %+v does not print the secret
	most    int            // steps of one transaction

	conn   *sql.Conn // writes; the leader's
	writer writer
	calls  []*call // the leader's

	reads   chan struct{} // a place for each read that may run at once
	get     *sql.Stmt
	newest  *sql.Stmt
	pending *sql.Stmt

	mu      sync.Mutex // guards the following
	idle    sync.Cond  // of mu: leading or reading may have ended
	queue   []*call
	leading bool
	reading int
	closed  bool
	latch   error // ErrLatched with the first cause

	closing  sync.Once
	closeErr error
}

var _ journal.Journal = (*Journal)(nil)

// mostReads keeps a burst of reads from opening a connection each.
const mostReads = 4

// pageRows is how many pending entries are read at once.
const pageRows = 200

// pageBytes of stored requests end a page early: they are held while the loop
// works on it.
const pageBytes = 4 << 20

// start makes j ready on db, which has the tables.
func start(ctx context.Context, j *Journal, o Options) (err error) {
	defer func() {
		for _, s := range []*sql.Stmt{j.get, j.newest, j.pending} {
			if err != nil && s != nil {
				_ = s.Close() // the database may be the caller's and stay open
			}
		}
	}()
	j.idle.L = &j.mu
	j.rules = &journal.Rules{Owner: o.Owner, Lease: o.Lease, Secret: o.Secret}
	j.writer.rules = j.rules
	j.reads = make(chan struct{}, mostReads)
	j.most = most
	if o.NoGroupCommit {
		j.most = 1
	}
	for _, s := range []struct {
		stmt **sql.Stmt
		sql  string
	}{{&j.get, selectEntry}, {&j.newest, selectNewest}, {&j.pending, selectPending}} {
		if *s.stmt, err = j.db.PrepareContext(ctx, j.dialect.sql(s.sql)); err != nil {
			return err
		}
	}
	return j.conn.Raw(func(c any) error { return j.writer.prepare(c, j.dialect) })
}

// DB is the database: the one given to New, or one on the journal's file,
// whose connections are set up as the journal needs it (a transaction that may
// write begins as one that does). Use it to begin the transactions for BeginTx.
// Close closes it if OpenSQLite made it.
func (j *Journal) DB() *sql.DB { return j.db }

// Begin implements [journal.Journal]. When ctx ends while the claim is being
// committed, the claim is released again, as not sent.
func (j *Journal) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	if err := in.Check(); err != nil {
		return journal.Entry{}, err
	}
	in.Content, in.Request = slices.Clone(in.Content), slices.Clone(in.Request) // the step may outlive this call
	e := newEntry{}
	var err error
	if in.MaxResumes == 0 {
		e, err = prepareEntry(j.rules, in, time.Now())
	}
	if err != nil {
		return journal.Entry{}, err
	}
	return j.do(ctx, &call{
		run: func(w *writer) (journal.Entry, error) { return w.beginEntry(in, e) },
		unwanted: func(e journal.Entry) *call {
			if e.State != journal.Pending {
				return nil
			}
			n := journal.Note{NotSent: e.FirstSend.IsZero(), Clear: e.Clear, Orderly: in.MaxResumes > 0}
			return &call{run: func(w *writer) (journal.Entry, error) { return w.releaseEntry(e, n) }}
		},
	})
}

// Renew implements [journal.Journal].
func (j *Journal) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return j.do(ctx, &call{run: func(w *writer) (journal.Entry, error) { return w.renewEntry(e, n) }})
}

// Finish implements [journal.Journal].
func (j *Journal) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	n.Answer = slices.Clone(n.Answer) // the step may outlive this call
	return j.do(ctx, &call{run: func(w *writer) (journal.Entry, error) { return w.finishEntry(e, s, n) }})
}

// Release implements [journal.Journal].
func (j *Journal) Release(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return j.do(ctx, &call{run: func(w *writer) (journal.Entry, error) { return w.releaseEntry(e, n) }})
}

// Decide implements [journal.Journal].
func (j *Journal) Decide(ctx context.Context, op journal.Operation, d journal.Decision) (journal.Entry, error) {
	return j.do(ctx, &call{run: func(w *writer) (journal.Entry, error) { return w.decideEntry(op, d) }})
}

// DecideDamaged records what a person found out at the provider about an
// operation whose entry is damaged (a *RowError names it), and puts a new entry
// in the place of the damaged one: State journal.Done is what [Decide] makes of an
// executed operation, and Refused frees it for a new key. Of the old entry the key and, unless d has
// one, the reference are kept, for people to read: they may be what is damaged.
// ErrInvalid: the entry is not damaged, as after an earlier DecideDamaged, or d is
// wrong. ErrNotFound: there is none.
// ErrClaimed: as far as the row can be believed somebody works on it, until Lease, an
// hour from now at most. But owner and lease may be what is damaged: see to it that no
// call of the operation is under way before you say Refused. A file in which an index
// disagrees with the row is damaged as a whole: the call latches the journal, and no
// opening accepts it.
//
// Look the operation up by a reference of your own that the request had. A key
// says little: the stored one may be damaged, and behind a refusal the one that
// is derived from the name is not the last one.
//
//	var damaged *sqljournal.RowError
//	if errors.As(err, &damaged) {
//		_, err = j.DecideDamaged(ctx, damaged.Operation, journal.Decision{
//			State: journal.Done, Reference: "pay_4", Reason: "found at the provider by order number"})
//	}
//
// Of an event of package webhook (Scope is its source, Name "webhook") look in your
// own tables: Done, it was handled, and is never forgotten by Window but by Sweep, as an
// operation is; Refused, its next delivery is handled. Until then each delivery is
// answered with 503.
//
// [Decide]: Journal.Decide
func (j *Journal) DecideDamaged(ctx context.Context, op journal.Operation, d journal.Decision) (journal.Entry, error) {
	return j.do(ctx, &call{run: func(w *writer) (journal.Entry, error) { return w.decideDamaged(op, d) }})
}

// Get implements [journal.Journal]. A damaged entry is a *RowError.
func (j *Journal) Get(ctx context.Context, op journal.Operation) (journal.Entry, error) {
	rows, err := j.read(ctx, j.get, op.Scope, op.Name, op.ID)
	switch {
	case err != nil:
		return journal.Entry{}, err
	case len(rows) == 0:
		return journal.Entry{}, journal.ErrNotFound
	}
	if err := rows[0].check(&j.rules.Secret); err != nil {
		return journal.Entry{}, err
	}
	return rows[0].entry, nil
}

// Pending implements [journal.Journal]. It reads a few hundred entries at a
// time, and none of the finished ones. Entries that begin while the loop runs
// are not yielded. A damaged entry comes with a *RowError; of it only the
// Operation is there.
func (j *Journal) Pending(ctx context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		newest, err := j.read(ctx, j.newest)
		if err != nil {
			yield(journal.Entry{}, err)
			return
		}
		if len(newest) == 0 {
			return
		}
		end := newest[0].place()
		at := place{math.MinInt64, math.MinInt64}
		for {
			rows, err := j.read(ctx, j.pending, at.created, at.seq, end.created, end.seq, int64(pageRows))
			if err != nil {
				yield(journal.Entry{}, err)
				return
			}
			for i := range rows {
				if err := context.Cause(ctx); err != nil {
					yield(journal.Entry{}, err)
					return
				}
				r := &rows[i]
				e, err := r.entry, r.check(&j.rules.Secret)
				if err != nil {
					e = journal.Entry{Operation: e.Operation}
				}
				if !yield(e, err) {
					return
				}
				next := r.place()
				if !at.before(next) {
					// An index that lies about the order would make this endless.
					yield(journal.Entry{}, fmt.Errorf("sqljournal: the index of pending entries: %w", journal.ErrDamaged))
					return
				}
				at = next
			}
			if len(rows) == 0 || at == end {
				return
			}
		}
	}
}

// place of an entry in the order of Pending.
type place struct{ created, seq int64 }

func (r *row) place() place { return place{journal.Micro(r.entry.Created), r.seq} }

func (a place) before(b place) bool {
	return a.created < b.created || a.created == b.created && a.seq < b.seq
}

// Sweep implements [journal.Journal]. It works in steps of a few milliseconds,
// between which others write, and stops when ctx ends; what it did by then is done
// and counted. It looks only at what is due: a damaged entry among that is left
// alone, the error has the *RowError of each, and the others are swept. A file of
// the journal's own becomes smaller if more than a quarter of it is free then.
func (j *Journal) Sweep(ctx context.Context, keep time.Duration) (journal.Swept, error) {
	if keep <= 0 {
		keep = journal.DefaultKeep
	}
	now := time.Now()
	var total journal.Swept
	var damaged error
	for _, part := range []struct {
		stmt  func(*writer) driver.Stmt
		until time.Time
	}{
		{func(w *writer) driver.Stmt { return w.sweepExpired }, now},
		{func(w *writer) driver.Stmt { return w.sweepOld }, now.Add(-keep)},
		{func(w *writer) driver.Stmt { return w.sweepStored }, now},
	} {
		for skip := 0; ; {
			var p swept
			_, err := j.do(ctx, &call{run: func(w *writer) (_ journal.Entry, err error) {
				s, err := w.sweep(part.stmt(w), part.until, keep, now, skip)
				p = s
				return journal.Entry{}, err
			}})
			if err != nil {
				return total, errors.Join(err, damaged)
			}
			total.Emptied += p.emptied
			total.Deleted += p.deleted
			damaged = errors.Join(damaged, p.damaged)
			skip += p.left
			if !p.more {
				break
			}
		}
	}
	for more := j.ownDB; more; {
		_, err := j.do(ctx, &call{run: func(w *writer) (_ journal.Entry, err error) {
			more, err = w.giveBack()
			return journal.Entry{}, err
		}})
		if err != nil {
			return total, errors.Join(err, damaged)
		}
	}
	return total, damaged
}

// BeginTx writes an operation down in the caller's own transaction, so that
// both are committed or neither is: the order and its payment. The entry is
// pending, not claimed, and proved not to have been sent; after the commit,
// Begin or Resume carries the operation out. An entry of the same request that
// is there already is returned as it is; of another request it is
// journal.ErrMismatch. A refused one begins its next generation. Look at its
// State: no Resume brings one that is done to its done again.
//
// Whoever enlists an operation relies on Resume: a call of it in between is told
// Unknown where it could else say that nothing was done. Intent.Started is
// ignored: what is written down here was not sent before.
//
// tx must be one of the database of this journal (ErrOtherDatabase). ErrBusy:
// another transaction writes; roll back and begin anew. Errors do not latch the
// journal.
func (j *Journal) BeginTx(ctx context.Context, tx *sql.Tx, in journal.Intent) (journal.Entry, error) {
	if err := in.Check(); err != nil {
		return journal.Entry{}, err
	}
	if err := j.usableNow(); err != nil {
		return journal.Entry{}, err
	}
	now := time.Now()
	e, _, err := j.rules.Enlist(nil, in, now)
	if err != nil {
		return journal.Entry{}, err
	}
	if err := checkSize(&e); err != nil {
		return journal.Entry{}, err
	}
	if err := j.enter(ctx, tx); err != nil {
		return journal.Entry{}, err
	}
	n, err := j.execTx(ctx, tx, insertEntry, insertArgs(&e, j.rules.Secret.MAC(&e))...)
	if err != nil || n == 1 {
		return e, err
	}
	old, err := j.loadTx(ctx, tx, in.Operation)
	if err != nil {
		return journal.Entry{}, err
	}
	if old == nil {
		return journal.Entry{}, fmt.Errorf("sqljournal: the index of operations: %w", journal.ErrDamaged)
	}
	e, write, err := j.rules.Enlist(&old.entry, in, now)
	if !write {
		return e, err
	}
	return e, j.updateTx(ctx, tx, old, &e)
}

// FinishTx is Finish in the caller's own transaction, so that what the
// application keeps of the result is committed together with it. Until then
// the claim is held. tx and errors are as for BeginTx.
//
// From BeginTx of the database (at the latest from the first write in tx) until
// tx ends nobody else can write: other operations cannot be begun (ErrBusy after Options.BusyTimeout), and the claim
// of e cannot be renewed, so that it is lost after the lease, and whoever works
// under it is ended. So keep tx short, and call a carrier or a bank before it
// begins. In package webhook s can only be journal.Done.
//
// journal.ErrClaimLost: e is not a claim of this journal now. Somebody else took
// it over, or the entry is finished otherwise, or it never was one: a zero Entry, as
// webhook.EntryOf gives outside of a handler, or one of another journal. Roll back.
func (j *Journal) FinishTx(ctx context.Context, tx *sql.Tx, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	if err := j.usableNow(); err != nil {
		return journal.Entry{}, err
	}
	if err := j.enter(ctx, tx); err != nil {
		return journal.Entry{}, err
	}
	old, err := j.loadTx(ctx, tx, e.Operation)
	if err != nil {
		return journal.Entry{}, err
	}
	var given *journal.Entry
	if old != nil {
		given = &old.entry
	}
	out, write, err := j.rules.Finish(given, e, s, n, time.Now())
	if !write {
		return out, err
	}
	if err := checkSize(&out); err != nil {
		return journal.Entry{}, err
	}
	return out, j.updateTx(ctx, tx, old, &out)
}

// enter makes tx one that writes, before it reads what it will write: one that
// read first could not write any more once somebody else has. An entry in
// another journal's tables would have a MAC that nobody knows there.
func (j *Journal) enter(ctx context.Context, tx *sql.Tx) error {
	if tx == nil {
		return fmt.Errorf("%w: the transaction is nil", journal.ErrInvalid)
	}
	var check []byte
	_, err := tx.ExecContext(ctx, j.dialect.lock)
	if err == nil {
		err = tx.QueryRowContext(ctx, selectCheck).Scan(&check)
	}
	switch {
	case err == nil && hmac.Equal(check, j.rules.Secret.Check()):
		return nil
	case err == nil, errors.Is(err, sql.ErrNoRows):
		return ErrOtherDatabase
	case j.dialect.kind(err) != nil || context.Cause(ctx) != nil || errors.Is(err, sql.ErrTxDone):
		return j.explain(err)
	}
	return fmt.Errorf("%w: %w", ErrOtherDatabase, err) // it has not the tables
}

func (j *Journal) execTx(ctx context.Context, tx *sql.Tx, query string, args ...any) (int64, error) {
	r, err := tx.ExecContext(ctx, j.dialect.sql(query), args...)
	if err != nil {
		return 0, j.explain(err)
	}
	return r.RowsAffected()
}

func (j *Journal) loadTx(ctx context.Context, tx *sql.Tx, op journal.Operation) (*row, error) {
	r, err := tx.QueryContext(ctx, j.dialect.sql(selectEntry), op.Scope, op.Name, op.ID)
	if err != nil {
		return nil, j.explain(err)
	}
	rows, err := collect(r)
	if err != nil || len(rows) == 0 {
		return nil, j.explain(err)
	}
	return &rows[0], rows[0].check(&j.rules.Secret)
}

func (j *Journal) updateTx(ctx context.Context, tx *sql.Tx, old *row, e *journal.Entry) error {
	n, err := j.execTx(ctx, tx, updateEntry, updateArgs(e, j.rules.Secret.MAC(e), old)...)
	var s storeError
	if err = changedOne(n, err); errors.As(err, &s) {
		return s.error
	}
	return err
}

// read runs one of the selects outside of the transactions that write.
func (j *Journal) read(ctx context.Context, s *sql.Stmt, args ...any) ([]row, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	j.mu.Lock()
	if err := j.unusable(); err != nil {
		j.mu.Unlock()
		return nil, err
	}
	j.reading++
	j.mu.Unlock()
	defer func() {
		j.mu.Lock()
		j.reading--
		j.idle.Broadcast()
		j.mu.Unlock()
	}()
	select {
	case j.reads <- struct{}{}:
		defer func() { <-j.reads }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	r, err := s.QueryContext(ctx, args...)
	if err == nil {
		var rows []row
		if rows, err = collect(r); err == nil {
			return rows, nil
		}
	}
	if c := context.Cause(ctx); c != nil {
		return nil, c
	}
	return nil, j.explain(err)
}

// collect reads rows until those that it has hold pageBytes.
func collect(r *sql.Rows) (rows []row, err error) {
	size := 0
	defer func() { err = errors.Join(err, r.Close()) }()
	var scanned, into [width]any
	for i := range scanned {
		into[i] = &scanned[i]
	}
	var values [width]driver.Value
	for r.Next() {
		if err := r.Scan(into[:]...); err != nil {
			return nil, err
		}
		for i, v := range scanned {
			values[i] = v
		}
		rows = append(rows, decode(values[:]))
		e := &rows[len(rows)-1].entry
		if size += len(e.Request) + len(e.Answer); size > pageBytes {
			break
		}
	}
	return rows, r.Err()
}

// Close waits for the calls that run, writes the log back to the database and
// closes what OpenSQLite or New opened. A second Close returns what the first did.
func (j *Journal) Close() error {
	j.closing.Do(func() {
		j.mu.Lock()
		j.closed = true
		for j.leading || j.reading > 0 {
			j.idle.Wait()
		}
		latched := j.latch != nil
		j.mu.Unlock()
		for _, s := range []*sql.Stmt{j.get, j.newest, j.pending} {
			j.closeErr = errors.Join(j.closeErr, s.Close())
		}
		j.closeErr = errors.Join(j.closeErr, j.dialect.leave(j, latched))
		if j.ownDB {
			j.closeErr = errors.Join(j.closeErr, j.db.Close())
		}
	})
	return j.closeErr
}

// unusable needs j.mu.
func (j *Journal) unusable() error {
	if j.latch != nil {
		return j.latch
	}
	if j.closed {
		return ErrClosed
	}
	return nil
}

func (j *Journal) usableNow() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.unusable()
}

func (j *Journal) latched() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.latch
}

// failed explains the error of a transaction, and latches j where it must.
func (j *Journal) failed(err error) error {
	err = j.explain(err)
	if errors.Is(err, ErrBusy) {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.latch == nil {
		j.latch = fmt.Errorf("%w: %w", journal.ErrLatched, err)
	}
	return err
}

// explain adds what is known of a database's error.
func (j *Journal) explain(err error) error {
	if err == nil {
		return nil
	}
	if of := j.dialect.kind(err); of != nil {
		return fmt.Errorf("%w: %w", of, err)
	}
	return fmt.Errorf("sqljournal: %w", err)
}
