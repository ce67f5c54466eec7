package main

import (
	"fmt"
	"sync"
	"time"

	"github.com/idem-go/idem/examples/internal/payrun"
)

// follow shows line from time to time until stop: over and over on a terminal,
// as plain lines elsewhere.
func follow(p payrun.Progress, line func() string) (stop func()) {
	if p.Out == nil {
		return func() {}
	}
	every, begin, end := 2*time.Second, "", "\n"
	if p.Live {
		every, begin, end = 100*time.Millisecond, "\r\x1b[K", ""
	}
	show := func() { _, _ = fmt.Fprint(p.Out, begin, line(), end) }
	tick, finished := time.NewTicker(every), make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			select {
			case <-tick.C:
				show()
			case <-finished:
				return
			}
		}
	})
	return func() {
		tick.Stop()
		close(finished)
		ended.Wait()
		show()
		if p.Live {
			_, _ = fmt.Fprintln(p.Out)
		}
	}
}
