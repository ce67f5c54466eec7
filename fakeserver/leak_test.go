package fakeserver

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// TestMain fails the run if goroutines are left behind.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if left := leftovers(); left != "" {
			fmt.Fprintf(os.Stderr, "goroutines left behind:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

// leftovers waits up to 5 s for all goroutines but the caller's to end.
func leftovers() string {
	var left []string
	for range 100 {
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
		time.Sleep(50 * time.Millisecond) // between two looks
	}
	return strings.Join(left, "\n\n")
}
