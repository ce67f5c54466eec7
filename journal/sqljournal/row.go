package sqljournal

import (
	"bytes"
	"database/sql/driver"
	"fmt"
	"math"
	"time"

	"github.com/idem-go/idem/journal"
)

// row is an entry as it is stored.
type row struct {
	seq   int64
	entry journal.Entry
	mac   []byte
	torn  bool // a column has not the type that was written
}

// The statements are neutral: parameters are numbered in the order in which
// they appear, and the dialect adds nothing to them. mac is new with every
// change, so that it serves as the version in a compare-and-set.
const (
	columns = "scope, name, id, generation, key, fingerprint, state, created, key_window, first_send, clear, enlisted, attempts, resumes, " +
		"owner, lease, fence, finished, status, reference, decision, reason, expires, request, answer, mac"
	selectRow = "SELECT seq, " + columns + " FROM idem_entries WHERE "

	selectEntry = selectRow + "scope = $1 AND name = $2 AND id = $3"
	insertEntry = "INSERT INTO idem_entries (" + columns + ") VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, " +
		"$14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26) ON CONFLICT (scope, name, id) DO NOTHING"
	updateEntry = "UPDATE idem_entries SET generation = $1, key = $2, fingerprint = $3, state = $4, created = $5, key_window = $6, " +
		"first_send = $7, clear = $8, enlisted = $9, attempts = $10, resumes = $11, owner = $12, lease = $13, fence = $14, finished = $15, " +
		"status = $16, reference = $17, decision = $18, reason = $19, expires = $20, request = $21, answer = $22, mac = $23 " +
		"WHERE seq = $24 AND mac = $25"
	// updateClaim leaves alone what an index is about: three times cheaper.
	updateClaim = "UPDATE idem_entries SET fingerprint = $1, first_send = $2, clear = $3, attempts = $4, resumes = $5, " +
		"owner = $6, lease = $7, fence = $8, status = $9, reference = $10, mac = $11 WHERE seq = $12 AND mac = $13"
	// updateFinish is for the usual end, with the same aim.
	updateFinish = "UPDATE idem_entries SET state = $1, attempts = $2, owner = $3, lease = $4, finished = $5, status = $6, " +
		"reference = $7, answer = $8, mac = $9 WHERE seq = $10 AND mac = $11"
	deleteEntry = "DELETE FROM idem_entries WHERE seq = $1 AND mac = $2"
	// The mac of a damaged row may be the damage.
	deleteDamaged = "DELETE FROM idem_entries WHERE seq = $1"

	selectNewest  = selectRow + "state = 0 AND expires = 0 ORDER BY created DESC, seq DESC LIMIT 1"
	selectPending = selectRow + "state = 0 AND expires = 0 AND (created, seq) > ($1, $2) AND (created, seq) <= ($3, $4) " +
		"ORDER BY created, seq LIMIT $5"

	// What a sweep handles leaves these sets; the offset steps over what it
	// cannot handle or must leave: damaged rows, expired deliveries with a claim.
	selectExpired = selectRow + "expires > 0 AND expires <= $1 ORDER BY expires, seq LIMIT $2 OFFSET $3"
	selectOld     = selectRow + "finished > 0 AND expires = 0 AND finished <= $1 ORDER BY finished, seq LIMIT $2 OFFSET $3"
	selectStored  = selectRow + "finished > 0 AND expires = 0 AND (request IS NOT NULL OR answer IS NOT NULL) " +
		"AND finished + key_window / 1000 <= $1 ORDER BY finished + key_window / 1000 LIMIT $2 OFFSET $3"
)

// selectCheck is the mark of the secret that belongs to the tables.
const selectCheck = "SELECT secret_check FROM idem_meta"

func insertArgs(e *journal.Entry, mac []byte) []any {
	return []any{
		e.Scope, e.Name, e.ID, int64(e.Generation), e.Key, blob(e.Fingerprint), int64(e.State), journal.Micro(e.Created),
		int64(e.Window), journal.Micro(e.FirstSend), flag(e.Clear), flag(e.Enlisted), int64(e.Attempts), int64(e.Resumes),
		e.Owner, journal.Micro(e.Lease), e.Fence, journal.Micro(e.Finished), int64(e.Status), e.Reference, e.Decision, e.Reason,
		journal.Micro(e.Expires), blob(e.Request), blob(e.Answer), mac,
	}
}

func updateArgs(e *journal.Entry, mac []byte, old *row) []any {
	return append(insertArgs(e, mac)[3:], old.seq, old.mac)
}

func claimArgs(e *journal.Entry, mac []byte, old *row) []any {
	return []any{
		blob(e.Fingerprint), journal.Micro(e.FirstSend), flag(e.Clear), int64(e.Attempts), int64(e.Resumes),
		e.Owner, journal.Micro(e.Lease), e.Fence, int64(e.Status), e.Reference, mac, old.seq, old.mac,
	}
}

func finishArgs(e *journal.Entry, mac []byte, old *row) []any {
	return []any{
		int64(e.State), int64(e.Attempts), e.Owner, journal.Micro(e.Lease), journal.Micro(e.Finished), int64(e.Status),
		e.Reference, blob(e.Answer), mac, old.seq, old.mac,
	}
}

// same reports whether a and b agree in what neither updateClaim nor
// updateFinish writes.
func same(a, b *journal.Entry) bool {
	return a.Generation == b.Generation && a.Key == b.Key && a.Created.Equal(b.Created) && a.Window == b.Window && a.Enlisted == b.Enlisted &&
		a.Decision == b.Decision && a.Reason == b.Reason && a.Expires.Equal(b.Expires) && bytes.Equal(a.Request, b.Request)
}

// onlyClaim reports whether updateClaim writes all that differs.
func onlyClaim(a, b *journal.Entry) bool {
	return same(a, b) && a.State == b.State && a.Finished.Equal(b.Finished) && bytes.Equal(a.Answer, b.Answer)
}

// onlyFinish reports whether updateFinish writes all that differs.
func onlyFinish(a, b *journal.Entry) bool {
	return same(a, b) && bytes.Equal(a.Fingerprint, b.Fingerprint) && a.FirstSend.Equal(b.FirstSend) && a.Clear == b.Clear &&
		a.Resumes == b.Resumes && a.Fence == b.Fence
}

// blob makes the empty slice NULL.
func blob(b []byte) any {
	if len(b) == 0 {
		return nil
	}
	return b
}

func flag(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// width is the number of columns of selectRow.
const width = 27

// read turns the columns of selectRow into a row. A value of another type than
// was written is damage; what can be read of the operation is then in r.
func (r *row) read(values []driver.Value) (whole bool) {
	d := decoder{values: values, whole: true}
	e := &r.entry
	r.seq = d.number()
	e.Scope, e.Name, e.ID, e.Generation, e.Key, e.Fingerprint = d.text(), d.text(), d.text(), int(d.number()), d.text(), d.bytes()
	e.State, e.Created, e.Window = journal.State(d.number()), d.moment(), time.Duration(d.number())
	e.FirstSend, e.Clear, e.Enlisted, e.Attempts, e.Resumes = d.moment(), d.truth(), d.truth(), int(d.number()), int(d.number())
	e.Owner, e.Lease, e.Fence, e.Finished = d.text(), d.moment(), d.number(), d.moment()
	e.Status, e.Reference, e.Decision, e.Reason = int(d.number()), d.text(), d.text(), d.text()
	e.Expires, e.Request, e.Answer, r.mac = d.moment(), d.bytes(), d.bytes(), d.bytes()
	return d.whole
}

// decode never fails; check tells.
func decode(values []driver.Value) row {
	var r row
	r.torn = !r.read(values)
	return r
}

// check is a *RowError if r is not what was written.
func (r *row) check(s *journal.Secret) error {
	if r.torn || !s.Genuine(&r.entry, r.mac) {
		return &RowError{Operation: r.entry.Operation}
	}
	return nil
}

// salvaged is the pending entry about which a person decides where the row of op
// is damaged. What it keeps is for that person to read; what a later step acts on
// is made anew: the claim, the expiry, stored bodies, the fingerprint (one that is
// not known fits every request), the key window (no tombstone may go within it), a
// generation that cannot be, and the fence, which is far above any that an owner can have.
func (r *row) salvaged(op journal.Operation, now time.Time) *journal.Entry {
	e := r.entry
	return &journal.Entry{
		Operation: op, State: journal.Pending, Generation: min(max(e.Generation, 1), math.MaxInt32), Key: e.Key,
		Created: now.Round(0).Truncate(time.Microsecond), Window: journal.DefaultKeep, Fence: now.UnixMicro(), Reference: e.Reference,
	}
}

type decoder struct {
	values []driver.Value
	whole  bool
}

func (d *decoder) next() driver.Value {
	if len(d.values) == 0 {
		d.whole = false
		return nil
	}
	v := d.values[0]
	d.values = d.values[1:]
	return v
}

func (d *decoder) number() int64 {
	n, ok := d.next().(int64)
	d.whole = d.whole && ok
	return n
}

func (d *decoder) truth() bool {
	n := d.number()
	d.whole = d.whole && (n == 0 || n == 1)
	return n == 1
}

func (d *decoder) moment() time.Time { return journal.FromMicro(d.number()) }

func (d *decoder) text() string {
	switch v := d.next().(type) {
	case string:
		return v
	case []byte: // some drivers do not tell them apart
		return string(v)
	}
	d.whole = false
	return ""
}

func (d *decoder) bytes() []byte {
	switch v := d.next().(type) {
	case nil:
		return nil
	case []byte:
		if len(v) == 0 {
			return nil
		}
		return v
	}
	d.whole = false
	return nil
}

// longestRow keeps a row below what SQLite can hold, 1,000,000,000 bytes: an
// entry that does not fit must not look like a store that failed.
const longestRow = 256 << 20

func checkSize(e *journal.Entry) error {
	n := len(e.Request) + len(e.Answer) + len(e.Reference) + len(e.Reason)
	if n > longestRow {
		return fmt.Errorf("%w: Request, Answer, Reference and Reason have %d bytes together; the most is %d", journal.ErrInvalid, n, longestRow)
	}
	return nil
}
