//go:build unix

package sqljournal_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

func TestC72_EachRestartSendsOnceWithTheSameKey(t *testing.T) {
	t.Parallel()
	w := newCrashWorld(t)
	pay := crashTask{Do: []string{"pay"}, Orders: []string{"order-1"}, Die: "before finish"}
	w.dies(t, pay)
	for crash := 2; crash <= 5; crash++ {
		w.dies(t, crashTask{Do: []string{"resume"}, Die: "before finish", Resumes: 5})
		require.Len(t, w.server.Sends(), crash, "one for each life")
	}
	e, _ := w.entry(t, "order-1")
	require.Equal(t, 4, e.Resumes)

	require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, w.resumes(t, crashTask{Resumes: 5}))
	require.Len(t, w.server.Sends(), 6)
	require.Equal(t, []string{e.Key}, w.keysOf("order-1"))
	for range 3 {
		require.Zero(t, w.resumes(t, crashTask{Resumes: 5}))
	}
	require.Len(t, w.server.Sends(), 6, "after the first life that came to its end nothing is sent again")
	require.Empty(t, w.judge(t, []string{"order-1"}, crashKeyWindow, true))
}

func TestC72_AfterFiveCrashedResumesAnEntryNeedsAttention(t *testing.T) {
	t.Parallel()
	w := newCrashWorld(t)
	w.dies(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-1"}, Die: "before finish"})
	for range 5 {
		w.dies(t, crashTask{Do: []string{"resume"}, Die: "before finish", Resumes: 5})
	}
	require.Len(t, w.server.Sends(), 6)
	for range 2 {
		require.Equal(t, idem.Resumed{Seen: 1, Attention: 1}, w.resumes(t, crashTask{Resumes: 5}))
	}
	require.Len(t, w.server.Sends(), 6, "it is not sent any more")
	listed := w.lives(t, crashTask{Do: []string{"pending"}, Resumes: 5}, "pending")[0]
	require.Equal(t, crashReport{What: "pending", Pending: 1, Stuck: 1, At: listed.At}, listed, "a person sees it")
	e, _ := w.entry(t, "order-1")
	require.Equal(t, journal.Pending, e.State)
	require.Equal(t, 5, e.Resumes)
	require.Len(t, w.server.Effects(), 1)

	// A call of the operation is no resume: somebody looks at what comes of it.
	w.lives(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-1"}, Resumes: 5}, "end")
	require.Empty(t, w.judge(t, []string{"order-1"}, crashKeyWindow, true))
	require.Equal(t, []string{e.Key}, w.keysOf("order-1"))
}

func TestC72_ACrashAnywhereInAResumeCounts(t *testing.T) {
	g := newCrashGroup(t)
	defer g.wait()
	for step, sends := range map[string]int{"begun": 0, "connected": 0, "written": 2, "answered": 2, "before finish": 2} {
		g.run(t, fmt.Sprintf("crash at %q", step), func(t *testing.T) {
			w := newCrashWorld(t)
			arrived := func() []fakeserver.Send { return w.server.Sends(fakeserver.Filter{Reference: "order-1"}) }
			w.dies(t, crashTask{Do: []string{"pay"}, Orders: []string{"order-1"}, Die: "begun"})
			for range 2 {
				w.dies(t, crashTask{Do: []string{"resume"}, Die: step, Resumes: 2})
			}
			// What a process wrote may arrive after its death.
			eventually(t, "each resume sends once", func() bool { return len(arrived()) >= sends })
			require.Equal(t, idem.Resumed{Seen: 1, Attention: 1}, w.resumes(t, crashTask{Resumes: 2}))
			require.Len(t, arrived(), sends)
		})
	}
}
