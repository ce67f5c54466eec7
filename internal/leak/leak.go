// Package leak fails a test run that leaves goroutines behind.
package leak

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Run runs the tests and then, if they passed, looks for goroutines that are
// left after 30 s; before it looks, it calls closers, which close what is idle. The
// result is for os.Exit, in a TestMain.
func Run(m *testing.M, closers ...func()) int {
	code := m.Run()
	if code != 0 {
		return code
	}
	for _, f := range closers {
		f()
	}
	if left := goroutines(); left != "" {
		fmt.Fprintf(os.Stderr, "goroutines left behind:\n%s\n", left)
		return 1
	}
	return 0
}

// patience is that of a machine with too much to do; only a leak takes all of it.
const patience = 30 * time.Second

// goroutines waits for all goroutines but the caller's to end, as long as patience lasts.
func goroutines() string {
	var left []string
	for start := time.Now(); ; {
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		left = left[:0]
		for i, g := range strings.Split(string(buf), "\n\n") {
			// os/signal's loop never ends once started (by go test itself); a worker of a fuzz target runs this too.
			if i > 0 && !strings.Contains(g, "os/signal.loop") && !strings.Contains(g, "testing.(*F)") {
				left = append(left, g)
			}
		}
		if len(left) == 0 {
			return ""
		}
		if time.Since(start) > patience {
			return strings.Join(left, "\n\n")
		}
		time.Sleep(50 * time.Millisecond) // between two looks
	}
}
