package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/examples/internal/payrun"
)

func TestARetryWithoutAKeyChargesTwice(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out, payrun.Options{N: 60, Seed: 7, Faults: "storm", Workers: 20}, payrun.Progress{}))
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	last := lines[len(lines)-1]
	require.Regexp(t, `^operations=60 effects=\d+ doubled=[1-9]\d* lost=\d+ false_success=\d+ false_failure=\d+ unknown=\d+$`, last)
	require.Contains(t, out.String(), "customers were charged more than once")
}

func TestWithoutFaultsNobodyIsChargedTwice(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out, payrun.Options{N: 20, Seed: 1, Faults: "none", Workers: 4}, payrun.Progress{}))
	require.True(t, strings.HasSuffix(out.String(),
		"\noperations=20 effects=20 doubled=0 lost=0 false_success=0 false_failure=0 unknown=0\n"), out.String())
}
