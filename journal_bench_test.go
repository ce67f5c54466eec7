package idem_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/internal/successpath"
	"github.com/idem-go/idem/journal"
)

// unnamed are calls of no named operation, with and without a journal; both
// have a key window, so that the journal is all that differs.
func unnamed() []successpath.Variant {
	over := func(j journal.Journal) *http.Client {
		bare := successpath.Variants()[0]
		return &http.Client{Transport: &idem.Transport{
			Base:    bare.Client.Transport,
			Policy:  idem.Policy{Budget: new(idem.Budget), KeyWindow: 24 * time.Hour},
			Journal: j,
		}}
	}
	return []successpath.Variant{
		{Name: "without-journal", Client: over(nil)},
		{Name: "with-journal", Client: over(new(journal.Memory))},
	}
}

func BenchmarkUnnamedOperation(b *testing.B) {
	for _, v := range unnamed() {
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
func TestOperationsWithoutANamePayNothingForAJournal(t *testing.T) {
	if raceDetector {
		t.Log("not counted: the race detector allocates by itself")
		return
	}
	var got []float64
	for _, v := range unnamed() {
		require.NoError(t, v.Send())
		n := testing.AllocsPerRun(1000, func() {
			if err := v.Send(); err != nil {
				t.Error(err)
			}
		})
		t.Logf("%-16s %v allocations", v.Name, n)
		got = append(got, n)
	}
	require.Equal(t, got[0], got[1], "with a journal that is not asked")
	require.LessOrEqual(t, got[1], 30.0, "with everything on")
}
