package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOneRoomIsBookedOnceAndTheOtherGuestIsRefused(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out), out.String())
	require.Contains(t, out.String(), "ledger: bookings=1 ada=1 grace=0 rooms_left=0\n")
	ada, grace, ok := strings.Cut(out.String(), "Grace asks next.")
	require.True(t, ok, out.String())
	require.Contains(t, ada, "attempt 1: no answer\n  attempt 2: 201 Created\n")
	require.Contains(t, ada, "The client says: executed.")
	require.Contains(t, grace, "attempt 1: 422 Unprocessable Entity\n")
	require.Contains(t, grace, "The client says: refused.")
}
