package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/internal/leak"
)

// TestMain lets the test binary be a replica too, which run starts, and fails
// if goroutines are left behind.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "replica" {
		main()
		return
	}
	os.Exit(leak.Run(m))
}

func TestAClickThatReachesTwoReplicasIsOneCharge(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out, 10), out.String())
	// One send charges, and each of the other two clicks asks for the stored answer.
	require.True(t, strings.HasSuffix(out.String(), "\norders=10 clicks=30 charges=10 doubled=0 answered=30 sends=30\n"), out.String())
}

func TestWrongOptionsAreNamed(t *testing.T) {
	var out strings.Builder
	require.ErrorContains(t, run(&out, 0), "-n")
	require.Empty(t, out.String())
}
