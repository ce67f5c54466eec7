package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/internal/leak"
)

// TestMain lets the test binary be the job too, which run starts, and fails if
// goroutines are left behind.
func TestMain(m *testing.M) {
	if len(os.Args) == 5 && os.Args[1] == "charge" {
		main()
		return
	}
	os.Exit(leak.Run(m))
}

func TestEachSubscriptionIsChargedOnceADayHoweverOftenTheRunIsStarted(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out), out.String())
	require.True(t, strings.HasSuffix(out.String(), "\nledger: days=2 subscriptions=5 charges=10 doubled=0\n"), out.String())

	parts := strings.Split(out.String(), "\n\n")
	require.Len(t, parts, 5, out.String())
	killed, again, tuesday, swept := parts[0], parts[1], parts[2], parts[3]
	require.Contains(t, killed, "  sub-1: charged: pay_1\n  sub-2: charged: pay_2\n  charged so far: 3")
	for i, said := range []string{"was charged, the answer again", "was charged, the answer again", "was charged, the answer again", "charged", "charged"} {
		require.Contains(t, again, fmt.Sprintf("  sub-%d: %s: pay_%d", i+1, said, i+1))
	}
	require.Contains(t, tuesday, "forgotten Monday's keys (5 of them)")
	for _, late := range []string{tuesday, swept} {
		for i := 1; i <= 5; i++ {
			require.Contains(t, late, fmt.Sprintf("  sub-%d: already done, see pay_%d\n", i, i))
		}
		require.Contains(t, late, "  sent to the provider: 0")
	}
	require.Contains(t, tuesday, "  sub-1: charged: pay_6\n")
}
