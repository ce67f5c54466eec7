package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheSameRefundTwiceOnPurposeIsTwoRefunds(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out), out.String())
	require.True(t, strings.HasSuffix(out.String(), "ledger: refunds=2 refunded=20.00\n"), out.String())
	require.Contains(t, out.String(), "2 attempts, one key")
	require.Contains(t, out.String(), "1 attempt, another key")
	require.Contains(t, out.String(), "caught: true, sent to the server: 0\n")
}
