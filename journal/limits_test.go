package journal_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

// A clock that was ahead when the claim was written must not bar everybody.
func TestAClaimOfAClockThatWasAheadHoldsNoMore(t *testing.T) {
	in := payment("1")
	stored, _, _, err := rules.Begin(nil, in, noon.Add(12*365*24*time.Hour))
	require.NoError(t, err)
	_, err = rules.Decide(&stored, journal.Decision{State: journal.Refused, Abandon: true, Reason: "given up"}, noon)
	require.NoError(t, err)
	_, _, write, err := rules.Begin(&stored, in, noon)
	require.NoError(t, err)
	require.True(t, write)
}

func TestALeaseHasABound(t *testing.T) {
	for _, lease := range []time.Duration{-1, journal.LongestLease + 1} {
		_, err := (&journal.Memory{Lease: lease}).Begin(t.Context(), payment("1"))
		require.ErrorIs(t, err, journal.ErrInvalid)
		require.ErrorContains(t, err, "Lease")
	}
}

// An Intent that is used twice would give a refused key to a later generation, as
// one that was never sent.
func TestARefusedKeyIsNotTheNextOne(t *testing.T) {
	in := payment("1")
	e, _, err := rules.Enlist(nil, in, noon)
	require.NoError(t, err)
	refuse := func() {
		e, err = rules.Decide(&e, journal.Decision{State: journal.Refused, Reason: "not in the dashboard"}, noon)
		require.NoError(t, err)
	}
	refuse()
	e, _, err = rules.Enlist(&e, in, noon)
	require.NoError(t, err)
	require.Equal(t, in.NextKey, e.Key)
	refuse()
	_, write, err := rules.Enlist(&e, in, noon)
	require.ErrorIs(t, err, journal.ErrInvalid)
	require.False(t, write)
	_, _, write, err = rules.Begin(&e, in, noon)
	require.ErrorIs(t, err, journal.ErrInvalid)
	require.False(t, write)
}
