package journal_test

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/idem-go/idem/journal"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random walks; 0: a fresh one, which a failure prints")

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
			// os/signal's loop never ends once started (by go test itself).
			if i > 0 && !strings.Contains(g, "os/signal.loop") && !strings.Contains(g, "testing.(*F)") {
				left = append(left, g)
			}
		}
		if len(left) == 0 {
			return ""
		}
		time.Sleep(50 * time.Millisecond) // goroutines that are about to end need a moment
	}
	return strings.Join(left, "\n\n")
}

// payment is an operation that a caller may begin.
func payment(id string) journal.Intent {
	return journal.Intent{
		Operation: journal.Operation{Scope: "acct_1", Name: "pay", ID: id},
		Key:       "first-" + id, NextKey: "second-" + id,
		Shape: sha256.Sum256([]byte("POST /v1/payments 40")), Content: digest("19.99 eur"),
		Window: 24 * time.Hour,
	}
}

// event is a delivery, which has no keys.
func event(id string, expires time.Time) journal.Intent {
	return journal.Intent{
		Operation: journal.Operation{Scope: "sender", Name: "delivery", ID: id},
		Shape:     sha256.Sum256([]byte("POST /hooks")), Content: digest("payment succeeded"),
		Expires: expires,
	}
}

func digest(body string) []byte {
	d := sha256.Sum256([]byte(body))
	return d[:]
}
