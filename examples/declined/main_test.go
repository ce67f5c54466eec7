package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAnotherCardAfterADeclineIsOneCharge(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out), out.String())
	require.True(t, strings.HasSuffix(out.String(), "ledger: operations=2 charges=1 charged=25.00\n"), out.String())
	require.Contains(t, out.String(), "attempts: 1, answer: 402 Payment Required\n")
	require.Contains(t, out.String(), "attempts: 2, answer: 402 Payment Required, as a replay\n")
	require.Equal(t, 2, strings.Count(out.String(), "The client says: refused."))
	require.Equal(t, 1, strings.Count(out.String(), "The client says: executed."))
}
