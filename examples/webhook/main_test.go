package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/internal/leak"
)

// TestMain fails if goroutines are left behind.
func TestMain(m *testing.M) {
	os.Exit(leak.Run(m))
}

func TestEveryOrderIsChargedAndShippedOnceThoughBothWaysFail(t *testing.T) {
	for rate, seen := range map[float64][]string{0: nil, 0.5: {"  lost-answer", "  forged", "  twice", "shop: died after the commit", "deliveries already done"}} {
		var out strings.Builder
		err := run(&out, options{n: 100, workers: 12, seed: 7, rate: rate})
		require.NoError(t, err, out.String())
		require.True(t, strings.HasSuffix(out.String(), "\norders=100 shipments=100 doubled=0 lost=0\n"), out.String())
		for _, what := range seen {
			require.Contains(t, strings.Join(strings.Fields(out.String()), " "), strings.TrimSpace(what))
		}
	}
}

func TestWrongOptionsAreNamed(t *testing.T) {
	var out strings.Builder
	require.ErrorContains(t, run(&out, options{workers: 1}), "-n")
	require.Empty(t, out.String())
}
