package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/examples/internal/payrun"
)

func TestEveryPaymentIsChargedOnceAndEveryClaimIsTrue(t *testing.T) {
	for _, faults := range []string{"none", "mixed", "storm"} {
		t.Run(faults, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			err := run(&out, payrun.Options{N: 60, Seed: 7, Faults: faults, Workers: 20}, payrun.Progress{}, idem.Hooks{})
			require.True(t, strings.HasSuffix(out.String(),
				"\noperations=60 effects=60 doubled=0 lost=0 false_success=0 false_failure=0 unknown=0\n"), out.String())
			require.NoError(t, err)
			if faults == "none" {
				require.Contains(t, out.String(), "faults met: 0, in 60 sends\n")
			} else {
				require.Contains(t, out.String(), "reset after the effect\n")
			}
		})
	}
}

func TestProgressIsShownWhileItRuns(t *testing.T) {
	var out, progress strings.Builder
	require.NoError(t, run(&out, payrun.Options{N: 5, Seed: 1, Faults: "none", Workers: 2}, payrun.Progress{Out: &progress}, idem.Hooks{}))
	require.Contains(t, progress.String(), "5 of 5 payments done, 5 attempts, 0 called again")
	require.NotContains(t, out.String(), "payments done")
}

func TestWrongOptionsAreNamed(t *testing.T) {
	var out strings.Builder
	o := payrun.Options{N: 1, Workers: 1, Faults: "none"}
	for flag, edit := range map[string]func(*payrun.Options){
		"-n":       func(o *payrun.Options) { o.N = 0 },
		"-workers": func(o *payrun.Options) { o.Workers = 0 },
		"-faults":  func(o *payrun.Options) { o.Faults = "many" },
	} {
		wrong := o
		edit(&wrong)
		require.ErrorContains(t, run(&out, wrong, payrun.Progress{}, idem.Hooks{}), flag)
	}
	require.Empty(t, out.String())
}
