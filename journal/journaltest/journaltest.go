// Package journaltest is the suite that every journal passes. Whoever writes a
// journal of their own runs it in a test; see [Run].
package journaltest

import (
	"crypto/sha256"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

// Run checks a journal against the contract of [journal.Journal]: each
// transition, what is returned and what is stored, claims under contention,
// and that names, keys and times come back as they went in.
//
// open is called once for each subtest. It returns a new, empty journal whose
// claims hold for lease, and registers what must be closed with t.Cleanup:
//
//	func TestMyJournal(t *testing.T) {
//		journaltest.Run(t, func(t *testing.T, lease time.Duration) journal.Journal {
//			j, err := myjournal.Open(filepath.Join(t.TempDir(), "journal"), lease)
//			require.NoError(t, err)
//			t.Cleanup(func() { require.NoError(t, j.Close()) })
//			return j
//		})
//	}
//
// The leases are a minute, where a claim must hold, and 100 ms, where it must
// end; the waits are real ones, so that the suite takes about three seconds and
// cannot run in a bubble of testing/synctest. Neither the damage of a store nor
// what it promises after a crash is checked: that is the store's own to prove.
func Run(t *testing.T, open func(t *testing.T, lease time.Duration) journal.Journal) {
	for _, group := range [][]check{
		creation, claims, fences, finishing, releasing, mismatches, generations, resumes, decisions,
		reading, deliveries, sweeps, contention, fidelity, arguments,
	} {
		for _, c := range group {
			t.Run(c.name, func(t *testing.T) { c.run(t, kit{open(t, c.lease), c.lease}) })
		}
	}
}

const (
	// long outlasts every subtest, short is waited for.
	long  = time.Minute
	short = 100 * time.Millisecond
	// skew is what a store's own clock may be off.
	skew = time.Second
)

// check is one subtest; its name is a sentence of the contract.
type check struct {
	name  string
	lease time.Duration
	run   func(t *testing.T, j kit)
}

// kit is the journal under test and what is often done with it.
type kit struct {
	journal.Journal
	lease time.Duration
}

// payment is an operation that a caller may begin.
func payment(id string) journal.Intent {
	return journal.Intent{
		Operation: journal.Operation{Scope: "acct_1", Name: "pay", ID: id},
		Key:       "first-" + id, NextKey: "second-" + id,
		Shape: sha256.Sum256([]byte("POST /v1/payments 40")), Content: digest("19.99 eur"),
		Window: 24 * time.Hour,
	}
}

// event is a delivery, which has no keys.
func event(id string, expires time.Time) journal.Intent {
	return journal.Intent{
		Operation: journal.Operation{Scope: "sender", Name: "delivery", ID: id},
		Shape:     sha256.Sum256([]byte("POST /hooks")), Content: digest("payment succeeded"),
		Expires: expires,
	}
}

func digest(body string) []byte {
	d := sha256.Sum256([]byte(body))
	return d[:]
}

// claim begins in and requires that the caller holds it now.
func (j kit) claim(t *testing.T, in journal.Intent) journal.Entry {
	t.Helper()
	before := time.Now()
	e, err := j.Begin(t.Context(), in)
	require.NoError(t, err)
	require.Equal(t, in.Operation, e.Operation)
	require.Equal(t, journal.Pending, e.State)
	require.NotEmpty(t, e.Owner, "a claim has an owner")
	require.Positive(t, e.Fence)
	j.requireLease(t, e, before)
	return e
}

// requireLease: the claim of e was made or renewed after before, for a lease.
func (j kit) requireLease(t *testing.T, e journal.Entry, before time.Time) {
	t.Helper()
	require.False(t, e.Lease.Before(before.Add(j.lease-skew)), "the lease ends too early: %v", e.Lease)
	require.False(t, e.Lease.After(time.Now().Add(j.lease+skew)), "the lease ends too late: %v", e.Lease)
}

// takeOver waits for the end of the lease of e and claims it.
func (j kit) takeOver(t *testing.T, in journal.Intent, e journal.Entry) journal.Entry {
	t.Helper()
	waitUntil(e.Lease)
	return j.claim(t, in)
}

func (j kit) get(t *testing.T, op journal.Operation) journal.Entry {
	t.Helper()
	e, err := j.Get(t.Context(), op)
	require.NoError(t, err)
	return e
}

// finish requires that what is returned is what is stored; so do release and
// decide.
func (j kit) finish(t *testing.T, e journal.Entry, s journal.State, n journal.Note) journal.Entry {
	t.Helper()
	out, err := j.Finish(t.Context(), e, s, n)
	require.NoError(t, err)
	require.Equal(t, s, out.State)
	require.Empty(t, out.Owner, "a finished entry is not claimed")
	require.True(t, out.Lease.IsZero())
	require.False(t, out.Finished.IsZero())
	j.requireStored(t, out)
	return out
}

func (j kit) release(t *testing.T, e journal.Entry, n journal.Note) journal.Entry {
	t.Helper()
	out, err := j.Release(t.Context(), e, n)
	require.NoError(t, err)
	require.Equal(t, journal.Pending, out.State)
	require.Empty(t, out.Owner, "a released entry is not claimed")
	require.True(t, out.Lease.IsZero())
	j.requireStored(t, out)
	return out
}

func (j kit) decide(t *testing.T, op journal.Operation, d journal.Decision) journal.Entry {
	t.Helper()
	out, err := j.Decide(t.Context(), op, d)
	require.NoError(t, err)
	require.Equal(t, d.State, out.State)
	require.Equal(t, d.Reason, out.Reason)
	j.requireStored(t, out)
	return out
}

// pending is what Pending yields, in its order.
func (j kit) pending(t *testing.T) []journal.Entry {
	t.Helper()
	var all []journal.Entry
	for e, err := range j.Pending(t.Context()) {
		require.NoError(t, err)
		all = append(all, e)
	}
	return all
}

func (j kit) sweep(t *testing.T, keep time.Duration) journal.Swept {
	t.Helper()
	s, err := j.Sweep(t.Context(), keep)
	require.NoError(t, err)
	return s
}

// requireStored: Get gives want.
func (j kit) requireStored(t *testing.T, want journal.Entry) {
	t.Helper()
	requireSame(t, want, j.get(t, want.Operation))
}

// requireNone: there is no entry of op.
func (j kit) requireNone(t *testing.T, op journal.Operation) {
	t.Helper()
	_, err := j.Get(t.Context(), op)
	require.ErrorIs(t, err, journal.ErrNotFound)
}

// requireLate: the claim of e is no longer held, and whatever its owner does
// changes nothing.
func (j kit) requireLate(t *testing.T, e journal.Entry) {
	t.Helper()
	stored, n := j.get(t, e.Operation), journal.Note{
		Attempts: 7, Status: 599, Reference: "late", Answer: []byte("late"), NotSent: true, Clear: true, Orderly: true,
	}
	_, err := j.Renew(t.Context(), e, n)
	require.ErrorIs(t, err, journal.ErrClaimLost)
	for _, s := range []journal.State{journal.Done, journal.Refused} {
		_, err = j.Finish(t.Context(), e, s, n)
		require.ErrorIs(t, err, journal.ErrClaimLost)
	}
	_, err = j.Release(t.Context(), e, n)
	require.ErrorIs(t, err, journal.ErrClaimLost)
	j.requireStored(t, stored)
}

// requireSame compares entries; a time may be in any zone, and a store need
// not tell nil from empty.
func requireSame(t *testing.T, want, got journal.Entry) {
	t.Helper()
	require.Equal(t, plain(want), plain(got))
}

func plain(e journal.Entry) journal.Entry {
	for _, at := range []*time.Time{&e.Created, &e.FirstSend, &e.Lease, &e.Finished, &e.Expires} {
		if !at.IsZero() {
			*at = at.Round(0).UTC()
		}
	}
	for _, b := range []*[]byte{&e.Fingerprint, &e.Request, &e.Answer} {
		*b = slices.Clone(*b)
		if len(*b) == 0 {
			*b = nil
		}
	}
	return e
}

// waitUntil returns after t.
func waitUntil(t time.Time) {
	time.Sleep(time.Until(t) + 2*time.Millisecond) // a lease, a window or an expiry has to end in real time
}
