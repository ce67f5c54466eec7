package sqljournal_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

func TestPendingOfStoredRequestsNeedsLittleMemory(t *testing.T) {
	j := open(t, fresh(t), sqljournal.Options{})
	for i := range 50 {
		in := payment(fmt.Sprint(i))
		in.Request = make([]byte, 1<<20)
		e, err := j.Begin(context.Background(), in)
		require.NoError(t, err)
		_, err = j.Release(context.Background(), e, journal.Note{})
		require.NoError(t, err)
	}
	runtime.GC()
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, err := range j.Pending(context.Background()) {
		require.NoError(t, err)
		runtime.GC()
		runtime.ReadMemStats(&now)
		break
	}
	mib := (int64(now.HeapAlloc) - int64(before.HeapAlloc)) >> 20
	require.Less(t, mib, int64(16), "of the 50 MiB that wait")
}
