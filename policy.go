package idem

import (
	"errors"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Policy holds every number that a user may change. The zero value is the
// default; "off" is any negative value where the field says so, and any
// other value that cannot work is ErrInvalid at the first request.
type Policy struct {
	// MaxAttempts counts attempts, not retries: 1 means one send, always.
	// Waiting for an operation in progress and redirect hops do not count.
	// 0: 8.
	MaxAttempts int
	// AttemptTimeout bounds one attempt until the headers of its answer, and
	// then each gap between bytes of an answer that is buffered. It never
	// reaches beyond the caller's deadline. 0: 30 s; negative: off.
	AttemptTimeout time.Duration
	// MaxElapsed bounds the operation. It is checked before each wait and
	// each start and does not cut a running attempt, except that an answer
	// is buffered for at most this long. 0: 2 min; negative: off.
	MaxElapsed time.Duration
	// MaxRetryAfter is the longest wait that a server may ask for; above it
	// the operation ends at once with ErrRetryAfterTooLong. 0: 60 s.
	MaxRetryAfter time.Duration
	// MaxInProgress bounds the waits for an operation in progress at the
	// server; then ErrInProgress. 0: 10 waits.
	MaxInProgress int
	// BackoffBase and BackoffCap shape the default backoff: a wait before
	// retry n (from 0) is uniform in [0, min(BackoffCap, BackoffBase*2^n)]:
	//
	//	retry     1      2      3      4      5 ...  10 and later
	//	at most   50 ms  100 ms 200 ms 400 ms 800 ms  20 s
	//
	// 0: 50 ms and 20 s. A base below 1 ms or a cap below the base is
	// ErrInvalid. BackoffBase is also the least wait after "Retry-After: 0".
	BackoffBase time.Duration
	BackoffCap  time.Duration
	// ThrottleBase is the wait after a 429 or 503 without Retry-After
	// (jittered down, but never below the backoff), and the least wait for
	// an operation in progress without the header. 0: 1 s; below 1 ms is
	// ErrInvalid.
	ThrottleBase time.Duration
	// KeyWindow is how long the server remembers a key, from the first send.
	// Nothing is sent later than KeyWindow less one AttemptTimeout after it:
	// ErrKeyExpired. 0: the dialect's; where that states none, an
	// Operation with Started, or a Journal, demands one.
	KeyWindow time.Duration
	// MaxResumes is how often [Client.Resume] sends one entry again without
	// coming to an orderly end with it; then the entry needs a person's
	// attention. It ends crash loops. 0: 5.
	MaxResumes int
	// ResumePace is the least time from the start of one resumed operation to
	// that of the next. 0: 50 ms; negative: off.
	ResumePace time.Duration
	// ResumeWait is how long a resume waits in all for claims of others to end:
	// a process that crashed leaves claims behind that hold for a lease. Whoever
	// renews its claim is alive, and its entry is skipped. 0: 1 min;
	// negative: claimed entries are skipped at once.
	ResumeWait time.Duration
	// MaxRequestBuffer is the longest body, in bytes, that is read into
	// memory so that it can be sent again; bodies with GetBody, files and
	// in-memory readers need none. A longer one is streamed and gets one
	// attempt. 0: 1 MiB; negative: nothing is buffered.
	MaxRequestBuffer int64
	// MaxResponseBuffer is the longest answer of a keyed operation, in bytes,
	// that is read within the attempt, so that an answer cut on the way is
	// asked for again. 0: 1 MiB; negative: nothing is buffered.
	MaxResponseBuffer int64
	// Budget is the allowance for retries. nil: one bucket set for the whole
	// process, shared by all Transports without a Budget of their own.
	Budget *Budget
	// Backoff makes the generator of waits, once per operation at its first
	// wait, so it may keep state. A generator's backoff.Stop ends the
	// retries with ErrAttemptsExhausted. nil: full jitter as above.
	Backoff func() backoff.BackOff
	// Classify may overrule the verdict on an attempt; see Verdict. It sees
	// the answer (its body buffered up to MaxResponseBuffer, or 1 MiB where
	// that is off, and rewound afterwards; that of an event stream is not read
	// and empty there) or the error, never both. nil, and
	// Undecided, mean the table in the package's documentation. A retry still
	// needs a key or proof that nothing was sent, an attempt and budget. It is
	// asked before the dialect's marks: a Stop on a reused key has no Reason.
	Classify func(*http.Response, error) Verdict
}

// Verdict is what to do after an attempt.
type Verdict int

const (
	// Undecided leaves it to the table.
	Undecided Verdict = iota
	// Stop hands on what there is.
	Stop
	// Retry asks for another attempt with the same key. A 2xx that is to be
	// retried is no proof of execution: its outcome is Unknown.
	Retry
)

// String gives the verdict in one word.
func (v Verdict) String() string {
	switch v {
	case Undecided:
		return "undecided"
	case Stop:
		return "stop"
	case Retry:
		return "retry"
	}
	return "invalid verdict"
}

const (
	defaultMaxAttempts    = 8
	defaultAttemptTimeout = 30 * time.Second
	defaultMaxElapsed     = 2 * time.Minute
	defaultMaxRetryAfter  = 60 * time.Second
	defaultMaxInProgress  = 10
	defaultBackoffBase    = 50 * time.Millisecond
	defaultBackoffCap     = 20 * time.Second
	defaultThrottleBase   = time.Second
	defaultMaxResumes     = 5
	defaultResumePace     = 50 * time.Millisecond
	defaultResumeWait     = time.Minute
	defaultBuffer         = 1 << 20

	drainBytes = 64 << 10               // how much of a discarded answer is read so that its connection can be used again
	drainTime  = 250 * time.Millisecond // and for how long
)

// resolved is p with every default filled in; "off" becomes zero for times
// and -1 for buffers. It fails with ErrInvalid, naming the field.
func (p Policy) resolved(d *Dialect) (Policy, error) {
	type duration struct {
		name  string
		field *time.Duration
		value time.Duration
		off   bool
	}
	window := "Policy.KeyWindow"
	if p.KeyWindow == 0 {
		window = "Dialect.KeyWindow"
	}
	for _, f := range []duration{
		{"Policy.AttemptTimeout", &p.AttemptTimeout, defaultAttemptTimeout, true},
		{"Policy.MaxElapsed", &p.MaxElapsed, defaultMaxElapsed, true},
		{"Policy.MaxRetryAfter", &p.MaxRetryAfter, defaultMaxRetryAfter, false},
		{"Policy.BackoffBase", &p.BackoffBase, defaultBackoffBase, false},
		{"Policy.BackoffCap", &p.BackoffCap, defaultBackoffCap, false},
		{"Policy.ThrottleBase", &p.ThrottleBase, defaultThrottleBase, false},
		{window, &p.KeyWindow, d.KeyWindow, false},
		{"Policy.ResumePace", &p.ResumePace, defaultResumePace, true},
		{"Policy.ResumeWait", &p.ResumeWait, defaultResumeWait, true},
	} {
		switch {
		case *f.field == 0:
			*f.field = f.value
		case *f.field < 0 && f.off:
			*f.field = 0
		case *f.field < 0:
			return p, invalid(f.name, "is %v; the least is 0 (the default)", *f.field)
		}
	}
	switch {
	case p.MaxAttempts < 0:
		return p, invalid("Policy.MaxAttempts", "is %d; the least is 1 (0: %d)", p.MaxAttempts, defaultMaxAttempts)
	case p.MaxInProgress < 0:
		return p, invalid("Policy.MaxInProgress", "is %d; the least is 1 (0: %d)", p.MaxInProgress, defaultMaxInProgress)
	case p.MaxResumes < 0:
		return p, invalid("Policy.MaxResumes", "is %d; the least is 1 (0: %d)", p.MaxResumes, defaultMaxResumes)
	case p.BackoffBase < time.Millisecond:
		return p, invalid("Policy.BackoffBase", "is %v; the least is 1ms", p.BackoffBase)
	case p.ThrottleBase < time.Millisecond:
		return p, invalid("Policy.ThrottleBase", "is %v; the least is 1ms", p.ThrottleBase)
	case p.BackoffCap < p.BackoffBase:
		return p, invalid("Policy.BackoffCap", "is %v; the least is BackoffBase, %v", p.BackoffCap, p.BackoffBase)
	case p.KeyWindow > 0 && p.KeyWindow <= p.AttemptTimeout:
		return p, invalid(window, "is %v; it must be longer than AttemptTimeout, %v", p.KeyWindow, p.AttemptTimeout)
	}
	if p.MaxAttempts == 0 {
		p.MaxAttempts = defaultMaxAttempts
	}
	if p.MaxInProgress == 0 {
		p.MaxInProgress = defaultMaxInProgress
	}
	if p.MaxResumes == 0 {
		p.MaxResumes = defaultMaxResumes
	}
	for _, n := range []*int64{&p.MaxRequestBuffer, &p.MaxResponseBuffer} {
		switch {
		case *n == 0:
			*n = defaultBuffer
		case *n < 0:
			*n = -1
		case *n == math.MaxInt64: // one more byte is read to see whether there is more
			*n--
		}
	}
	if p.Budget == nil {
		p.Budget = &sharedBudget
	}
	if err := p.Budget.check(); err != nil {
		return p, err
	}
	if p.Backoff == nil {
		base, limit := p.BackoffBase, p.BackoffCap
		p.Backoff = func() backoff.BackOff { return fullJitter(base, limit) }
	}
	return p, nil
}

// fullJitter waits a uniform time in [0, min(limit, base*2^n)]. Half the
// numbers and a randomization factor of 1 make the library's symmetric
// interval [0, twice the half].
func fullJitter(base, limit time.Duration) backoff.BackOff {
	b := &backoff.ExponentialBackOff{
		InitialInterval:     base / 2,
		RandomizationFactor: 1,
		Multiplier:          2,
		MaxInterval:         limit / 2,
		MaxElapsedTime:      0,
		Stop:                backoff.Stop,
		Clock:               backoff.SystemClock,
	}
	b.Reset()
	return b
}

// result is one attempt, reduced to what the verdict depends on.
type result struct {
	err       error // no answer, or an answer that was cut
	permanent bool  // err will not get better
	notSent   bool  // proved: nothing reached the server

	status       int
	resent       bool // sent more than once within the attempt: what the sends before did is not known
	marks        mark
	hint         Verdict // what the provider's header asks for
	throttled    bool    // 429, 503
	retryAfter   time.Duration
	asked        bool    // the answer had a valid Retry-After
	overruled    Verdict // what Policy.Classify said
	staleReused  bool    // a reused connection was dead
	leaveThePool bool    // the next attempt needs another connection
}

// mark is a set of what an answer was recognised as.
type mark uint8

const (
	markReplay mark = 1 << iota
	markInProgress
	markMismatch
	markAlreadyDone
	markRefusal
)

// circumstances are what the verdict depends on beside the attempt itself.
type circumstances struct {
	keyed      bool // the request carries a key
	repeatable bool // keyed, or a method that may be repeated by definition
	sentBefore bool // the key may have been sent before this attempt
	canPrepare bool // Transport.Prepare has not had its second chance yet
	canExpect  bool // the request has an Expect header that was not dropped yet
}

// ruling is a verdict with its consequences.
type ruling struct {
	verdict    Verdict // Stop or Retry
	reason     error   // why stop; nil: the answer or error is final by itself
	inProgress bool    // counted as a wait for the first request, not as a failure
	failure    bool    // the origin failed, as the budget sees it
	again      again   // repeat at once, changed
	evidence   evidence
}

type again int

const (
	asBefore        again = iota
	afterPrepare          // a 401: credentials may have expired
	withoutExpect         // a 417
	onNewConnection       // a dead reused connection
)

// rule is the classification table: a pure function. See design.md, section
// "Classification".
func rule(r *result, c circumstances) ruling {
	out := ruling{verdict: Stop, evidence: r.evidenceOf(c)}
	retry := func() ruling {
		if c.repeatable || r.notSent {
			out.verdict = Retry
		}
		return out
	}
	out.failure = r.err != nil || retriedStatus(r.status)
	switch r.overruled {
	case Stop:
		return out
	case Retry:
		out.failure = true
		if out.evidence == done {
			out.evidence = mayBeDone
		}
		return retry()
	}
	switch {
	case r.err != nil && r.permanent:
		if errors.Is(r.err, ErrKeyExpired) { // of the body, as it was about to be sent
			out.reason = ErrKeyExpired
		}
		return out
	case r.err != nil:
		if r.staleReused && c.repeatable {
			out.again = onNewConnection
		}
		return retry()
	case r.marks&markMismatch != 0:
		out.reason, out.failure = ErrKeyReused, false
		return out
	case r.marks&markAlreadyDone != 0 && c.sentBefore:
		out.reason, out.failure = ErrAlreadyDone, false
		return out
	case r.marks&markInProgress != 0:
		out.inProgress, out.failure = true, false
		return retry()
	case r.marks&markReplay != 0 && r.status >= 500:
		return out
	case r.hint == Retry && r.status/100 != 2:
		out.failure = true
		return retry()
	case r.hint == Stop:
		return out
	case r.status == http.StatusExpectationFailed && c.canExpect:
		out.again = withoutExpect
		return retry()
	case r.status == http.StatusUnauthorized && c.canPrepare:
		out.again = afterPrepare
		return retry()
	case retriedStatus(r.status):
		return retry()
	}
	return out
}

// retriedStatus lists the answers that say "not now".
func retriedStatus(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusMisdirectedRequest, http.StatusTooEarly,
		http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// evidenceOf is what the attempt shows by itself.
func (r *result) evidenceOf(c circumstances) evidence {
	switch {
	case r.err != nil && r.notSent:
		return neverSent
	case r.err != nil:
		return mayBeDone
	case r.marks&markMismatch != 0:
		return mayBeDone
	case r.marks&markAlreadyDone != 0 && c.sentBefore:
		return done
	case r.marks&markInProgress != 0:
		return mayBeDone
	case r.status/100 == 2, r.status == http.StatusSeeOther:
		return done
	case r.status/100 != 4:
		return mayBeDone
	}
	switch r.status {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooEarly,
		http.StatusTooManyRequests, 499: // 499: a proxy's note that the client left
		return mayBeDone
	}
	if r.marks&(markReplay|markRefusal) != 0 {
		return refusedByOp
	}
	if r.resent {
		return mayBeDone
	}
	return refusedBefore
}

// Where a wait came from, as Attempt.WaitFrom has it.
const (
	waitBackoff    = "backoff"
	waitRetryAfter = "retry-after"
	waitThrottle   = "throttle"
	waitInProgress = "in-progress"
	waitAtOnce     = "at-once"
)

// waitAfter is the wait before the next attempt: a pure function. sample is
// the next value of the backoff generator, which is also the jitter on top
// of a floor; spread is uniform in [0, 1).
func waitAfter(r *result, v ruling, p *Policy, sample time.Duration, spread float64) (time.Duration, string) {
	sample = max(sample, 0)
	switch {
	case r.asked && r.retryAfter == 0:
		return max(sample, p.BackoffBase), waitRetryAfter
	case r.asked:
		return saturatingAdd(r.retryAfter, sample), waitRetryAfter
	case v.inProgress:
		return saturatingAdd(p.ThrottleBase, sample), waitInProgress
	case r.throttled:
		if t := time.Duration(spread * float64(p.ThrottleBase)); t > sample {
			return t, waitThrottle
		}
		return sample, waitThrottle
	}
	return sample, waitBackoff
}

// spread is the random part of a throttle wait.
func spread() float64 { return rand.Float64() }

func saturatingAdd(a, b time.Duration) time.Duration {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// retryAfter reads the Retry-After header (RFC 9110, section 10.2.3):
// seconds, or one of the three forms of an HTTP-date, which is read against
// the answer's own Date, aged by Age, so that a wrong clock on either side
// does no harm. Of several lines the largest counts; malformed ones do not.
func retryAfter(h http.Header, now time.Time) (wait time.Duration, ok bool) {
	for _, line := range h["Retry-After"] {
		d, valid := retryAfterLine(strings.Trim(line, " \t"), h, now)
		if valid && (!ok || d > wait) {
			wait, ok = d, true
		}
	}
	return wait, ok
}

func retryAfterLine(line string, h http.Header, now time.Time) (time.Duration, bool) {
	if seconds, ok := digits(line); ok {
		return seconds, true
	}
	at, err := http.ParseTime(line)
	if err != nil {
		return 0, false
	}
	if date, err := http.ParseTime(h.Get("Date")); err == nil {
		now = date
		if age, ok := digits(h.Get("Age")); ok {
			now = now.Add(min(age, 24*time.Hour))
		}
	}
	return max(at.Sub(now), 0), true
}

// digits reads a number of seconds; one that a Duration cannot hold is the
// longest Duration.
func digits(s string) (time.Duration, bool) {
	if s == "" {
		return 0, false
	}
	n := int64(0)
	for i := 0; i < len(s); i++ {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		if n > (math.MaxInt64/int64(time.Second)-9)/10 {
			n = math.MaxInt64 / int64(time.Second)
			continue
		}
		n = n*10 + int64(s[i]-'0')
	}
	if n >= math.MaxInt64/int64(time.Second) {
		return math.MaxInt64, true
	}
	return time.Duration(n) * time.Second, true
}
