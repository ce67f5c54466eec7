package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/examples/internal/payrun"
	"github.com/idem-go/idem/internal/leak"
)

// TestMain is the shop where the parent under test has started it.
func TestMain(m *testing.M) {
	if path := os.Getenv(shopJournal); path != "" {
		exit(shop(path, os.Getenv(shopServer), os.Stdin, os.Stdout))
	}
	os.Exit(leak.Run(m))
}

func TestAShopThatIsKilledChargesOnceAndEveryClaimIsTrue(t *testing.T) {
	var out, progress strings.Builder
	err := run(&out, options{rounds: 4, seed: 3, dir: t.TempDir()}, payrun.Progress{Out: &progress})
	require.NoError(t, err, out.String())
	require.Regexp(t, regexp.MustCompile(`\noperations=40 effects=40 doubled=0 lost=0 false_success=0 false_failure=0 unknown=0 kills=4 resumed=[1-9][0-9]*\n$`), out.String())
	require.Contains(t, out.String(), "the shop is killed\n")
	require.Contains(t, out.String(), "the journal is in ")
	require.Contains(t, progress.String(), "4 of 4 kills, 40 of 40 payments acknowledged")
}

func TestWrongOptionsAreNamed(t *testing.T) {
	var out strings.Builder
	require.ErrorContains(t, run(&out, options{}, payrun.Progress{}), "-rounds")
	require.ErrorContains(t, run(&out, options{rounds: 1, dir: "/no/such/folder"}, payrun.Progress{}), "-dir")
	require.Empty(t, out.String())
}
