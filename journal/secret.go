package journal

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

// Secret keys the fingerprints and the MACs of a store: without it a digest
// of a body that holds a card number could be found by trying. It must not
// live in the database that it protects.
type Secret [32]byte

// NewSecret returns a fresh one. The error is that of the system's random
// source.
func NewSecret() (Secret, error) {
	var s Secret
	if _, err := rand.Read(s[:]); err != nil {
		return Secret{}, fmt.Errorf("journal: the random source failed: %w", err)
	}
	return s, nil
}

// Format implements [fmt.Formatter]: a Secret does not print itself.
func (Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, "(secret)") }

// MarshalText implements [encoding.TextMarshaler] in the same way, for JSON and
// logs.
func (Secret) MarshalText() ([]byte, error) { return []byte("(secret)"), nil }

// Check is what a store keeps to recognise its secret; it tells nothing about it.
func (s Secret) Check() []byte { return s.mac("check") }

// Fingerprint is the keyed digest of what was asked: 32 bytes, or 64 with a
// content.
func (s Secret) Fingerprint(shape [32]byte, content []byte) []byte {
	f := s.mac("shape", shape[:])
	if content != nil {
		f = append(f, s.mac("content", shape[:], content)...)
	}
	return f
}

// MAC is over all that is stored of an entry.
func (s Secret) MAC(e *Entry) []byte {
	return s.mac("entry",
		[]byte(e.Scope), []byte(e.Name), []byte(e.ID), number(int64(e.Generation)), []byte(e.Key), e.Fingerprint,
		number(int64(e.State)), moment(e.Created), number(int64(e.Window)), moment(e.FirstSend), truth(e.Clear), truth(e.Enlisted),
		number(int64(e.Attempts)), number(int64(e.Resumes)), []byte(e.Owner), moment(e.Lease), number(e.Fence),
		moment(e.Finished), number(int64(e.Status)), []byte(e.Reference), []byte(e.Decision), []byte(e.Reason),
		moment(e.Expires), e.Request, e.Answer)
}

// Genuine reports whether mac belongs to e; the comparison takes constant time.
func (s Secret) Genuine(e *Entry, mac []byte) bool { return hmac.Equal(mac, s.MAC(e)) }

// mac is HMAC-SHA-256 over the parts, each with its length.
func (s Secret) mac(label string, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, s[:])
	var length [8]byte
	write := func(p []byte) {
		binary.BigEndian.PutUint64(length[:], uint64(len(p)))
		_, _ = h.Write(length[:])
		_, _ = h.Write(p)
	}
	write([]byte("idem journal " + label))
	for _, p := range parts {
		write(p)
	}
	return h.Sum(nil)
}

func number(n int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n)) }

// moment has microseconds, as the stores do; the zero time is 0.
func moment(t time.Time) []byte { return number(Micro(t)) }

// Micro is t in microseconds since 1970, as stores keep it; 0 is the zero time.
func Micro(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// FromMicro is the reverse of Micro.
func FromMicro(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.UnixMicro(n)
}

func truth(b bool) []byte {
	if b {
		return []byte{1}
	}
	return []byte{0}
}

// sameRequest compares two fingerprints; one that is not known fits every other.
func sameRequest(a, b []byte) bool {
	n := min(len(a), len(b))
	return hmac.Equal(a[:n], b[:n])
}
