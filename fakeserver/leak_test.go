package fakeserver

import (
	"github.com/idem-go/idem/internal/leak"
	"os"
	"testing"
)

// TestMain fails the run if goroutines are left behind.
func TestMain(m *testing.M) {
	os.Exit(leak.Run(m))
}
