package idem

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"

	"github.com/idem-go/idem/journal"
)

// The reasons for which an operation ends without the answer it wanted. Test
// for them with [errors.Is], on an [*Error] or on [Report].Reason.
var (
	// Before anything is sent.

	// ErrInvalid: a field of the Transport, the Policy, the Dialect, the
	// Operation or the request cannot work. The text names the field and the
	// limit.
	ErrInvalid = errors.New("idem: invalid")
	// ErrKeyInvalid: the key cannot be sent to this provider: empty, blank,
	// doubled, too long, or with characters that a header cannot carry.
	ErrKeyInvalid = errors.New("idem: invalid key")
	// ErrScopeChanged: Transport.Scope named another account than at the
	// start of the operation, so the key would not be recognised there.
	ErrScopeChanged = errors.New("idem: scope changed within the operation")
	// ErrRedirectRefused: the server redirected a write to another origin.
	// Transport.AllowRedirect may permit it.
	ErrRedirectRefused = errors.New("idem: redirect of a write to another origin refused")
	// ErrKeyExpired: the key window has passed, so the server may have
	// forgotten the key and would do the work again.
	ErrKeyExpired = errors.New("idem: key window has passed")

	// ErrJournal: Transport.Journal failed. Where it could not write before
	// the first send, nothing was sent; where a lease that ended could not be
	// renewed, nothing more. Where it failed after the answer, the answer stands
	// (Report.Reason beside a response), and the entry stays pending, to be
	// resumed with the same key. Where a stored answer does not open (another
	// Transport.Seal), the server's replay is the answer. The cause is wrapped:
	// journal.ErrDamaged means that this entry must be decided by a person, and
	// calling again does not help before. Where nothing was sent, the report has no
	// key: the journal alone knows which one is the operation's.
	ErrJournal = errors.New("idem: journal failed")

	// From the answer of the server, or known before asking it.

	// ErrKeyReused: the key belongs to another request. Either the same key
	// was met here with another method, URL, scope or body (nothing was
	// sent), or the server said so.
	ErrKeyReused = errors.New("idem: key reused for another request")
	// ErrInProgress: the server still works on the first request with this
	// key, and the waits that the policy allows are over; or another process
	// that shares the Journal works on the operation.
	ErrInProgress = errors.New("idem: operation still in progress")
	// ErrAlreadyDone: the server did the work under this key earlier and
	// does not replay the answer; or the Journal knows that it is done, and the
	// key window in which the server would replay the answer has passed or a
	// person decided it.
	// Report.Reference has the resource's id where the dialect knows its
	// place.
	ErrAlreadyDone = errors.New("idem: operation already done")

	// The retries ended.

	// ErrAttemptsExhausted: Policy.MaxAttempts attempts were made, or
	// Policy.Backoff said stop.
	ErrAttemptsExhausted = errors.New("idem: attempts exhausted")
	// ErrTimeExhausted: the next wait would pass Policy.MaxElapsed.
	ErrTimeExhausted = errors.New("idem: time exhausted")
	// ErrBudgetExhausted: the origin fails so often that Policy.Budget
	// allows no further retry.
	ErrBudgetExhausted = errors.New("idem: retry budget exhausted")
	// ErrRetryAfterTooLong: the server asked for a wait above
	// Policy.MaxRetryAfter, or a wait does not fit the caller's deadline
	// (then the error also matches [context.DeadlineExceeded]).
	ErrRetryAfterTooLong = errors.New("idem: wait before the next attempt too long")
	// ErrBodyNotReplayable: the body can be read only once and is longer
	// than Policy.MaxRequestBuffer, so there is no second attempt.
	ErrBodyNotReplayable = errors.New("idem: body cannot be sent again")
	// ErrBodyChanged: the body of a later attempt differs from the first
	// one, for example because the file was written to meanwhile.
	ErrBodyChanged = errors.New("idem: body changed between attempts")
)

// maxErrorBody is how much of the last answer an Error keeps.
const maxErrorBody = 64 << 10

// Error says why an operation ended, what the last attempt showed, and, in
// the embedded Report, what is known of the effect. [errors.Is] and
// [errors.As] reach Reason and Last. It is found behind the *url.Error of
// http.Client, unless http.Client.Timeout is set: that flattens errors to
// text, so leave it zero.
type Error struct {
	Report
	// Last is the error of the last attempt; nil if it had an answer.
	Last error
	// StatusCode of the last attempt's answer; 0: there was none.
	StatusCode int
	// Header of the last attempt's answer; nil: there was none.
	Header http.Header
	// Body is what was read of the last attempt's answer, at most 64 KiB.
	Body []byte

	ended error // the caller's ctx.Err(), or DeadlineExceeded for a wait that did not fit
}

// Error says what happened, what is known of the effect, and what to do
// next. It holds no body, credential, user info or query value.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("idem: ")
	b.WriteString(e.happened())
	if e.StatusCode != 0 {
		fmt.Fprintf(&b, "; last answer %d %s", e.StatusCode, http.StatusText(e.StatusCode))
	}
	if e.Last != nil && e.Reason != nil && !errors.Is(e.Last, e.Reason) {
		b.WriteString("; last error: " + e.Last.Error())
	}
	if n := len(e.Attempts); n > 0 {
		fmt.Fprintf(&b, "; attempts: %d", e.Attempts[n-1].N)
	}
	b.WriteString("; effect: " + e.Outcome.String())
	if e.Key != "" {
		b.WriteString("; key " + strconv.Quote(e.Key))
	}
	if next := e.next(); next != "" {
		b.WriteString("; " + next)
	}
	return b.String()
}

func (e *Error) happened() string {
	switch {
	case e.Reason != nil:
		return strings.TrimPrefix(e.Reason.Error(), "idem: ")
	case e.Last != nil:
		return e.Last.Error()
	default:
		return "operation ended"
	}
}

// next is the advice that ends the text.
func (e *Error) next() string {
	switch {
	case errors.Is(e.Reason, ErrInvalid), errors.Is(e.Reason, ErrKeyInvalid):
		if len(e.Attempts) == 0 {
			return "correct it and call again; this call sent nothing"
		}
	case errors.Is(e.Reason, ErrKeyReused):
		return "do not choose a new key before you know what the first request did"
	case errors.Is(e.Reason, ErrKeyExpired):
		if e.KeyFrom == "journal" {
			return "do not send it again: look it up at the provider, then use Client.Settle"
		}
		return "do not send it again: look it up at the provider"
	case errors.Is(e.Reason, ErrAlreadyDone):
		if e.Reference != "" {
			return "read resource " + strconv.Quote(e.Reference) + " at the provider"
		}
		return "read the resource at the provider"
	case errors.Is(e.Reason, ErrJournal) && len(e.Attempts) == 0:
		if errors.Is(e.Reason, journal.ErrDamaged) {
			return "this call sent nothing; when the damage is dealt with, call again with the same operation"
		}
		return "this call sent nothing; when the journal works, call again with the same operation"
	}
	switch e.Outcome {
	case Unknown:
		switch {
		case e.Key == "" && e.KeyFrom == "journal":
			return "call again with the same operation, or look it up at the provider"
		case e.Key == "":
			return "look it up at the provider before repeating it"
		case e.KeyFrom == "minted" || e.KeyFrom == "header":
			return "repeat it under WithKey with this key, as a new call may get another, or look it up at the provider"
		}
		return "call again with the same operation or key, or look it up at the provider"
	case NotExecuted:
		return "it is safe to call again"
	}
	return ""
}

// Unwrap gives Reason, Last, and for a caller's context that ended its Err.
func (e *Error) Unwrap() []error {
	var all []error
	for _, err := range [...]error{e.Reason, e.Last, e.ended} {
		if err != nil {
			all = append(all, err)
		}
	}
	return all
}

// Timeout reports whether a time limit ended the operation: the caller's
// deadline, Policy.MaxElapsed, or the limit of the last attempt.
func (e *Error) Timeout() bool {
	if errors.Is(e.ended, context.DeadlineExceeded) || errors.Is(e.Reason, ErrTimeExhausted) {
		return true
	}
	var t interface{ Timeout() bool }
	return errors.As(e.Last, &t) && t.Timeout()
}

// LogValue implements [slog.LogValuer] without secrets.
func (e *Error) LogValue() slog.Value {
	attrs := e.Report.attrs()
	if e.Last != nil {
		attrs = append(attrs, slog.String("last", e.Last.Error()))
	}
	return slog.GroupValue(attrs...)
}

// errorOf makes an Error of an answer that ended an operation for a Reason;
// it reads a prefix of the body and closes it.
func errorOf(resp *http.Response, report *Report) *Error {
	e := &Error{Report: report.copy(), StatusCode: resp.StatusCode, Header: resp.Header}
	o := operationOf(resp)
	e.Body = o.now.prefix(resp.Body, maxErrorBody)
	if o.late != nil {
		e.ended = o.late.ended
	}
	return e
}

// attemptLimitError is the error of an attempt that Policy.AttemptTimeout
// ended. It matches context.DeadlineExceeded, as net/http's own timeouts do.
type attemptLimitError struct{ last error }

var errAttemptLimit = &attemptLimitError{}

func (e *attemptLimitError) Error() string {
	return "idem: no answer within Policy.AttemptTimeout"
}
func (e *attemptLimitError) Timeout() bool { return true }
func (e *attemptLimitError) Unwrap() error { return e.last }
func (e *attemptLimitError) Is(target error) bool {
	return target == context.DeadlineExceeded || target == error(errAttemptLimit)
}

// proxyError is a proxy's answer to CONNECT that made no tunnel.
type proxyError struct {
	status int
	header http.Header
}

func (e *proxyError) Error() string {
	return fmt.Sprintf("idem: the proxy refused the tunnel: %d %s", e.status, http.StatusText(e.status))
}

// invalid names the field and the limit.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%w: %s %s", ErrInvalid, field, fmt.Sprintf(format, args...))
}

// keyInvalid names where the key came from and the limit.
func keyInvalid(from, format string, args ...any) error {
	return fmt.Errorf("%w: %s %s", ErrKeyInvalid, from, fmt.Sprintf(format, args...))
}

func redirectRefused(from, to *url.URL) error {
	return fmt.Errorf("%w: from %s to %s; Transport.AllowRedirect may permit it", ErrRedirectRefused, shownURL(from), shownURL(to))
}

func scopeChanged(from, to string) error {
	return fmt.Errorf("%w: from %q to %q", ErrScopeChanged, from, to)
}

// shownReason is the text of a Reason for logs. What did not come from this
// package (an error of Prepare, the cause of a context) is only named.
func shownReason(err error) string {
	for _, own := range [...]error{
		ErrInvalid, ErrKeyInvalid, ErrScopeChanged, ErrRedirectRefused, ErrKeyExpired, ErrKeyReused, ErrInProgress, ErrAlreadyDone,
		ErrAttemptsExhausted, ErrTimeExhausted, ErrBudgetExhausted, ErrRetryAfterTooLong, ErrBodyNotReplayable, ErrBodyChanged, ErrJournal, errNotPending,
	} {
		if errors.Is(err, own) {
			return strings.TrimPrefix(err.Error(), "idem: ")
		}
	}
	return kindOf(err)
}

// kindOf names an error without its text, which is free to quote anything.
func kindOf(err error) string {
	var (
		dns  *net.DNSError
		cert *tls.CertificateVerificationError
		op   *net.OpError
		bad  *bodyError
	)
	switch {
	case errors.Is(err, errAttemptLimit):
		return "attempt timeout"
	case errors.As(err, &bad):
		return "request body"
	case errors.Is(err, context.Canceled):
		return "canceled"
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "answer cut"
	case errors.Is(err, io.EOF):
		return "connection closed"
	case errors.Is(err, syscall.ECONNRESET):
		return "connection reset"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.As(err, &dns):
		return "name lookup"
	case errors.As(err, &cert):
		return "certificate"
	case timeout(err):
		return "timeout"
	case errors.As(err, &op):
		return "network: " + op.Op
	}
	return "transport"
}
