package payrun

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/idem-go/idem/fakeserver"
)

// Progress shows how far a run is. The zero value shows nothing.
type Progress struct {
	Out  io.Writer
	Live bool // Out is a terminal: one line is written over and over
}

// Stdio shows progress where a person looks and the output is not disturbed:
// on stdout if that is a terminal, else on stderr.
func Stdio() Progress {
	if terminal(os.Stdout) {
		return Progress{os.Stdout, true}
	}
	return Progress{os.Stderr, terminal(os.Stderr)}
}

func terminal(f *os.File) bool {
	info, err := f.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return false
	}
	null, err := os.Stat(os.DevNull) // a character device, too
	return err != nil || !os.SameFile(info, null)
}

// follow shows line from time to time, until stop.
func (p Progress) follow(line func() string) (stop func()) {
	if p.Out == nil {
		return func() {}
	}
	every, begin, end := 2*time.Second, "", "\n"
	if p.Live {
		every, begin, end = 100*time.Millisecond, "\r\x1b[K", ""
	}
	show := func() { _, _ = fmt.Fprint(p.Out, begin, line(), end) }
	finished, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				show()
			case <-finished:
				show()
				if p.Live {
					_, _ = fmt.Fprintln(p.Out)
				}
				return
			}
		}
	}()
	return func() {
		close(finished)
		<-ended
	}
}

// ShowFaults writes a table of the faults that the sends met.
func (r *Run) ShowFaults(w io.Writer) {
	met, sum := map[string]int{}, 0
	for _, s := range r.Sends {
		if s.Fault != "" {
			met[FaultOf(s)]++
			sum++
		}
	}
	_, _ = fmt.Fprintf(w, "faults met: %d, in %d sends\n", sum, len(r.Sends))
	for _, f := range Ranked(met) {
		_, _ = fmt.Fprintf(w, "  %5d  %s\n", met[f], f)
	}
}

// FaultOf is the fault of a send in words, without its rate.
func FaultOf(s fakeserver.Send) string {
	words, _, _ := strings.Cut(s.Fault, " (rate ")
	return words
}

// Ranked is the names in counts, the most frequent first.
func Ranked(counts map[string]int) []string {
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
}
