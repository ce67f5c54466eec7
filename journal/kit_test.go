package journal_test

import (
	"crypto/sha256"
	"flag"
	"os"
	"testing"
	"time"

	"github.com/idem-go/idem/internal/leak"
	"github.com/idem-go/idem/journal"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random walks; 0: a fresh one, which a failure prints")

// TestMain fails the run if goroutines are left behind.
func TestMain(m *testing.M) {
	os.Exit(leak.Run(m))
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
