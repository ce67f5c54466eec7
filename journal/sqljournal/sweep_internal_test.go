package sqljournal

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

// A step of a sweep reads few stored bodies at once, however large they are,
// and the sweep gets to all of them.
func TestAStepOfASweepReadsFewBodies(t *testing.T) {
	j := opened(t, t.TempDir()+"/idem.db", Options{})
	const entries, size = 20, sweepBytes / 3
	for i := range entries {
		in := intent(fmt.Sprint(i))
		in.Window = 0
		in.Request = make([]byte, size)
		e, err := j.Begin(t.Context(), in)
		require.NoError(t, err)
		_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{Answer: make([]byte, size)})
		require.NoError(t, err)
	}
	time.Sleep(time.Millisecond) // the windows have to pass
	var p swept
	_, err := j.do(t.Context(), &call{run: func(w *writer) (_ journal.Entry, err error) {
		p, err = w.sweep(w.sweepStored, time.Now(), time.Hour, time.Now(), 0)
		return journal.Entry{}, err
	}})
	require.NoError(t, err)
	require.Equal(t, swept{more: true, emptied: 2}, p, "the second entry passes the limit")
	s, err := j.Sweep(t.Context(), time.Hour)
	require.NoError(t, err)
	require.Equal(t, journal.Swept{Emptied: entries - 2}, s)
}
