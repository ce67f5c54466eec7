package idem

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// The allocator adds 8 bytes to an object of this size, and its next class
// after 1536 packs fewer of them: see docs/design.md.
func TestOperationFitsItsSizeClass(t *testing.T) {
	if unsafe.Sizeof(uintptr(0)) == 8 {
		require.LessOrEqual(t, unsafe.Sizeof(operation{}), uintptr(1536-8))
	}
}
