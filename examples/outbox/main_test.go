package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/internal/leak"
)

// TestMain lets the test binary be the shop too, which run starts, and fails
// if goroutines are left behind.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "order" || os.Args[1] == "resume") {
		main()
		return
	}
	os.Exit(leak.Run(m))
}

func TestAnOrderAndItsChargeAreCommittedTogetherThroughThreeCrashes(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out), out.String())
	require.True(t, strings.HasSuffix(out.String(), "\nledger: orders=3 paid=3 charges=3 doubled=0 rolled_back=1\n"), out.String())

	parts := strings.Split(out.String(), "\n\n")
	require.Len(t, parts, 5, out.String())
	taken, first, second, third := parts[0], parts[1], parts[2], parts[3]
	require.Contains(t, taken, "  order-3: out of stock, rolled back, and its charge with it\n")
	require.Contains(t, taken, "  the provider has heard of 0")
	require.Contains(t, first, "  order-1: charged, paid with pay_1\n  order-2: charged, and nobody has written it down")
	require.NotContains(t, first, "order-4")
	require.Contains(t, second, "  order-2: was charged, the answer again, paid with pay_2")
	// A claim that is still held is waited for behind all others. If it ended before the start, its
	// entry is the oldest, and comes, with the crash behind it, before order-4.
	if last := "  order-4: charged, paid with pay_3\n"; strings.Contains(second, last) {
		require.Contains(t, third, "  seen 0: ", "the rolled back order left a charge behind, or a paid one was not finished")
	} else {
		require.Contains(t, third, last+"  seen 1: done 1, ", "the rolled back order left a charge behind, or a paid one was not finished")
	}
}
