package journal_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

func TestALeaseHasABound(t *testing.T) {
	for _, lease := range []time.Duration{-1, journal.LongestLease + 1} {
		_, err := (&journal.Memory{Lease: lease}).Begin(t.Context(), payment("1"))
		require.ErrorIs(t, err, journal.ErrInvalid)
		require.ErrorContains(t, err, "Lease")
	}
}
