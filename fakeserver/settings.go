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

	// ReplayHeader is set to "true" on a replayed answer. Empty: "Idempotent-Replay"; "-": the header is not sent.
	ReplayHeader string

	// ReplayStatus replaces the status of a replayed 2xx answer. Zero: the same status.
	ReplayStatus int

	// ReplayBody replaces the body of a replayed 2xx answer; see MismatchBody. Empty: the same body.
	ReplayBody string

	// ReplayCurrent replays a 2xx answer with the payment or reservation as it is now. False: as it was.
	ReplayCurrent bool

	// DoneStatus answers a key whose request has ended, with DoneBody and without the stored answer. Zero: replay.
	// A DoneBody with "{id}" is for requests that made a resource; other answers are replayed even so.
	DoneStatus int
	DoneBody   string

	// MismatchStatus answers a key that was used for another payload. Zero: 422.
	MismatchStatus int

	// MismatchBody is the JSON text of that answer; "{key}" and "{id}" in it stand for the key and for the id of the
	// resource that was made with it. Empty: an RFC 9457 problem.
	MismatchBody string

	// InProgressStatus answers a key whose first request still runs. Zero: 409.
	InProgressStatus int

	// InProgressBody is the JSON text of that answer; see MismatchBody.
	InProgressBody string

	// InProgressHeader is one more header line of that answer, for example "Transient-Error: true". Empty: none.
	InProgressHeader string

	// InProgressRetryAfter is the Retry-After of that answer. Empty: "1" (seconds); "-": the header is not sent.
	InProgressRetryAfter string

	// MaxKey is the longest key in bytes. Zero: 255.
	MaxKey int

	// RequestIDHeader is the header that numbers the answers: "req_" and Send.N. Empty: none.
	RequestIDHeader string

	// EchoKey repeats the key in the KeyHeader of every answer.
	EchoKey bool

	// DuplicateReference refuses a reservation whose reference the hotel has already, under whatever key: 409 with the id
	// and the Location of the one that exists, checked when the reservation would be made: a replay of the same key is no
	// duplicate, and a cancelled one no longer counts. Payments and refunds are never refused for it.
	// False: a reference may occur twice.
	DuplicateReference bool

	// IgnoreKeys never de-duplicates: a broken server, for negative controls, as are all that follow. See [Broken].
	IgnoreKeys bool

	// Replicas is how many replicas there are, each with its own memory of keys; the sends of a key go to them in turn.
	// Zero or 1: one memory.
	Replicas int

	// ForgetAtRestart loses the memory of keys in a Restart.
	ForgetAtRestart bool

	// ClaimFirst reserves the key before anything can fail, and does not free it after a failure: a fault before the
	// effect, and a Restart, leave the key in progress for Lease by the server's clock. Zero Lease: for the retention.
	ClaimFirst bool
	Lease      time.Duration

	// KeyLast remembers the key only when the answer is on its way: a fault right after the effect loses it, and two
	// requests at the same time both execute.
	KeyLast bool

	// ReadThenWrite is the time between reading how many rooms are free and writing one less. Zero: one step.
	ReadThenWrite time.Duration

	// Quoted wants keys as RFC 9651 strings in double quotes and refuses others. False: the header's raw value is the key.
	Quoted bool

	// ForgetHeaders leaves Send.Header nil, and a Delivery without Signature and BodySHA256, which saves most of the memory
	// of a run with a million sends.
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
	// PerNobody keeps nothing apart: one key is one key for all callers and endpoints. A broken server.
	PerNobody
)

// FailurePolicy says what an infrastructure failure (a [Status] fault with a 5xx) before the effect does to the key.
// It never touches a key whose effect happened: that result is always stored and replayed.
type FailurePolicy int

const (
	// FreeKey forgets the key: the next request with it executes. The zero value.
	FreeKey FailurePolicy = iota
	// StoreFailures stores the 5xx and replays it for as long as the key is remembered, as Stripe does: the operation has no
	// effect then, whatever the client does with that key. [Server.AssertAtMostOneEffectPerOperation] allows for it.
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
	fill(&t.MaxKey, 255)
	return t
}

func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
