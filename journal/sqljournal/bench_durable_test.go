package sqljournal_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// BenchmarkDurable is for profiles; internal/durable compares the cases with
// each other and with the disk.
//
//	go test -run '^$' -bench Durable/begin/64/group -cpuprofile cpu.out
func BenchmarkDurable(b *testing.B) {
	for _, kind := range []string{"begin", "cycle"} {
		for _, writers := range []int{1, 8, 64} {
			for _, commit := range []string{"group", "alone"} {
				b.Run(fmt.Sprintf("%s/%d/%s", kind, writers, commit), func(b *testing.B) {
					j, err := sqljournal.OpenSQLite(filepath.Join(b.TempDir(), "journal.db"), sqljournal.Options{NoGroupCommit: commit == "alone"})
					if err != nil {
						b.Fatal(err)
					}
					b.Cleanup(func() {
						if err := j.Close(); err != nil {
							b.Error(err)
						}
					})
					b.ReportAllocs()
					var left atomic.Int64
					left.Store(int64(b.N))
					b.ResetTimer()
					var all sync.WaitGroup
					for range writers {
						all.Go(func() {
							for left.Add(-1) >= 0 {
								if err := durable(j, kind == "cycle"); err != nil {
									b.Error(err)
									return
								}
							}
						})
					}
					all.Wait()
				})
			}
		}
	}
}

func durable(j *sqljournal.Journal, finish bool) error {
	e, err := j.Begin(context.Background(), journal.Intent{
		Operation: journal.Operation{Name: "payment", ID: rand.Text()},
		Key:       rand.Text(),
		NextKey:   rand.Text(),
		Shape:     [32]byte{1},
		Content:   make([]byte, 32),
		Window:    24 * time.Hour,
	})
	if err != nil || !finish {
		return err
	}
	_, err = j.Finish(context.Background(), e, journal.Done, journal.Note{Attempts: 1, Status: 201, Reference: "pay_8f14e45f"})
	return err
}
