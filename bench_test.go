package idem_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/internal/successpath"
)

func BenchmarkSuccessPath(b *testing.B) {
	for _, v := range successpath.Variants() {
		b.Run(v.Name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := v.Send(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Not parallel: testing.AllocsPerRun counts the whole process.
func TestSuccessPathAllocations(t *testing.T) {
	if raceDetector {
		t.Log("not counted: the race detector allocates by itself")
		return
	}
	got := map[string]float64{}
	for _, v := range successpath.Variants() {
		require.NoError(t, v.Send())
		n := testing.AllocsPerRun(1000, func() {
			if err := v.Send(); err != nil {
				t.Error(err)
			}
		})
		t.Logf("%-12s %v allocations", v.Name, n)
		got[v.Name] = n
	}
	require.Equal(t, 17.0, got["bare"], "the yardstick itself has changed")
	require.LessOrEqual(t, got["idem"], 30.0, "with everything on")
	require.LessOrEqual(t, got["idem-plain"], 23.0, "without limit and buffering")
}
