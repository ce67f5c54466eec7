package journal

import (
	"bytes"
	"slices"
	"testing"
)

// FuzzParts: no two lists of parts have the same digest, however their bytes
// are shared out; nor two labels.
func FuzzParts(f *testing.F) {
	f.Add([]byte("abc"), uint8(1), uint8(2), []byte("abc"), uint8(2), uint8(2), "entry", "entry")
	f.Add([]byte(""), uint8(0), uint8(0), []byte(""), uint8(0), uint8(1), "entry", "entry")
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x01a"), uint8(8), uint8(1), []byte("a"), uint8(0), uint8(1), "shape", "content")
	f.Add([]byte("a"), uint8(1), uint8(1), []byte("a"), uint8(1), uint8(1), "entry", "entr")
	f.Fuzz(func(t *testing.T, a []byte, cutA, moreA uint8, b []byte, cutB, moreB uint8, labelA, labelB string) {
		s := Secret{1, 2, 3}
		// The bytes in two parts, then up to three empty ones.
		parts := func(p []byte, cut, more uint8) [][]byte {
			at := int(cut) % (len(p) + 1)
			all := [][]byte{p[:at], p[at:]}
			for range more % 4 {
				all = append(all, nil)
			}
			return all
		}
		x, y := parts(a, cutA, moreA), parts(b, cutB, moreB)
		equal := labelA == labelB && slices.EqualFunc(x, y, bytes.Equal)
		if bytes.Equal(s.mac(labelA, x...), s.mac(labelB, y...)) != equal {
			t.Fatalf("%q %q and %q %q: equal is %v", labelA, x, labelB, y, equal)
		}
	})
}
