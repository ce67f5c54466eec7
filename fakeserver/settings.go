package fakeserver

import "time"

// Settings say how the server keeps its promises. The zero value is the strict default.
type Settings struct {
	// KeyHeader is the header that carries the idempotency key. Empty: "Idempotency-Key".
	KeyHeader string

	// Retention is how long a key and its stored answer are remembered, from the moment the key was reserved, by the
	// server's clock. Zero: 24 hours. After it the same key executes again.
	Retention time.Duration

	// Lenient replays by caller and key alone: path and body are ignored and a reused key gets the first answer
	// instead of a refusal. Real providers do this.
	Lenient bool

	// Optional lets a POST without a key execute, unprotected. False: it is refused with 400.
	Optional bool

	// KeyPer says whose keys are kept apart.
	KeyPer Scope

	// Failures says what a 5xx before the effect does to the key.
	Failures FailurePolicy

	// ReplayHeader is set to "true" on a replayed answer. Empty: "Idempotent-Replay".
	ReplayHeader string

	// ReplayStatus replaces the status of a replayed 2xx answer. Zero: the same status.
	ReplayStatus int

	// MismatchStatus answers a key that was used for another payload. Zero: 422.
	MismatchStatus int

	// InProgressStatus answers a key whose first request still runs. Zero: 409.
	InProgressStatus int

	// InProgressRetryAfter is the Retry-After of that answer. Empty: "1" (seconds); "-": the header is not sent.
	InProgressRetryAfter string

	// IgnoreKeys never de-duplicates: a broken server, for negative controls.
	IgnoreKeys bool

	// Quoted wants keys as RFC 9651 strings in double quotes and refuses others. False: the header's raw value is the key.
	Quoted bool

	// ForgetHeaders leaves Send.Header nil, which saves most of the memory of a run with a million sends.
	ForgetHeaders bool
}

// Scope says whose keys are kept apart: two callers of different scope may use the same key.
type Scope int

const (
	// PerCredential keeps the keys of each Authorization value apart, so a rotated credential forgets its keys. The zero value.
	PerCredential Scope = iota
	// PerAccount keeps the keys of each account apart. The account is the part before the first dot of
	// "Bearer <account>.<secret>"; any other Authorization value counts as an account of its own.
	PerAccount
)

// FailurePolicy says what an infrastructure failure (a [Status] fault with a 5xx) before the effect does to the key.
// It never touches a key whose effect happened: that result is always stored and replayed.
type FailurePolicy int

const (
	// FreeKey forgets the key: the next request with it executes. The zero value.
	FreeKey FailurePolicy = iota
	// StoreFailures stores the 5xx and replays it for as long as the key is remembered, as Stripe does.
	StoreFailures
)

// Apply replaces the settings. Keys already stored keep the scope and retention they were stored under.
func (s *Server) Apply(settings Settings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settings = settings.filled()
}

func (t Settings) filled() Settings {
	fill(&t.KeyHeader, "Idempotency-Key")
	fill(&t.Retention, 24*time.Hour)
	fill(&t.ReplayHeader, "Idempotent-Replay")
	fill(&t.MismatchStatus, 422)
	fill(&t.InProgressStatus, 409)
	fill(&t.InProgressRetryAfter, "1")
	return t
}

func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
