// Package retryable is for those who come from
// github.com/hashicorp/go-retryablehttp with a CheckRetry, a Backoff or a
// PrepareRetry of their own: it fits them into the fields of an
// [idem.Transport]. The functions go on saying whether, when and how to send
// again; the key, the proof of what was sent, attempts, time and budget stay
// with the Transport, so a POST without a key is not repeated on a yes.
//
//	old                          new
//	RetryMax: n                  Policy.MaxAttempts: n + 1
//	CheckRetry: f                Policy.Classify: retryable.Classify(f)
//	Backoff: f, RetryWaitMin,    Policy.Backoff: retryable.Backoff(f, min, max)
//	RetryWaitMax
//	PrepareRetry: f              Transport.Prepare: retryable.Prepare(f)
//	ErrorHandler                 none: the last answer comes back as it is
//	HTTPClient.Transport         Transport.Base
//	HTTPClient.Timeout           Policy.AttemptTimeout
//	Logger, the log hooks        Transport.Hooks: idem.SlogHooks(logger)
//	NewRequest                   http.NewRequest
//	StandardClient()             &http.Client{Transport: transport}
//
// Where CheckRetry and Backoff are go-retryablehttp's defaults, leave the
// fields nil: then this package is not needed.
//
// What else changes: the waits of a Retry-After are the Transport's (a floor,
// in every form of the header, bounded by Policy.MaxRetryAfter), and the caller
// gets the last answer where go-retryablehttp closes it and returns an error.
package retryable

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/hashicorp/go-retryablehttp"

	"github.com/idem-go/idem"
)

// Classify makes a Policy.Classify of check; nil means
// [retryablehttp.DefaultRetryPolicy]. What check says becomes
//
//	yes  an error                                  Retry
//	yes  408, 409, 421, 425, 429, 500, 502, 503,   Undecided
//	     504
//	yes  any other answer, a 2xx too               Retry
//	no   an error, a status of that list, any 5xx  Stop
//	no   any other answer                          Undecided
//	no, with an error of its own                   Stop
//
// Undecided leaves it to idem's table, which repeats the listed statuses too,
// but not where they are a stored answer, and waits for a 409 that is in
// progress; and which alone understands what
// an answer says about the key: in progress is waited out, a reused key is
// [idem.ErrKeyReused]. An error beside a yes does not count, as in
// go-retryablehttp; one beside a no stops, and is lost: a Verdict has no place
// for it.
//
// Errors reach check in a *[url.Error], as from http.Client, with an empty URL.
// A no that hangs on an error's text alone, or on url.Error.Err compared with
// ==, is Undecided: the text may be the server's, and a lost answer that quotes
// "unsupported protocol scheme" is not a bad scheme. To find out, check is
// asked a second time. idem's table stops for bad schemes, headers and
// certificates by itself, where it is proved that nothing was sent.
//
// The context that check gets has not ended, and will not: when the caller's
// does, the Transport ends the operation itself. For an answer it has the
// values of the caller's context, for an error it has none. The body of an
// answer is buffered and may be read, as for every Policy.Classify.
func Classify(check retryablehttp.CheckRetry) func(*http.Response, error) idem.Verdict {
	if check == nil {
		check = retryablehttp.DefaultRetryPolicy
	}
	return func(resp *http.Response, err error) idem.Verdict {
		if err != nil {
			return onError(check, err)
		}
		ctx := context.Background()
		if resp.Request != nil {
			ctx = context.WithoutCancel(resp.Request.Context()) // the attempt's own limit is none of check's business
		}
		again, why := check(ctx, resp, nil)
		listed := repeatedByTable(resp.StatusCode)
		switch {
		case again && !listed && resp.StatusCode != http.StatusConflict:
			return idem.Retry
		case again:
			return idem.Undecided
		case why != nil, listed, resp.StatusCode >= 500:
			return idem.Stop
		}
		return idem.Undecided
	}
}

func onError(check retryablehttp.CheckRetry, err error) idem.Verdict {
	ask := func(err error) bool {
		again, _ := check(context.Background(), nil, &url.Error{Op: "send", Err: err})
		return again
	}
	switch {
	case ask(err):
		return idem.Retry
	case ask(unspoken{err}):
		return idem.Undecided
	}
	return idem.Stop
}

// unspoken is an error without its text.
type unspoken struct{ err error }

func (unspoken) Error() string   { return "" }
func (u unspoken) Unwrap() error { return u.err }

// repeatedByTable lists the statuses that idem repeats by itself.
func repeatedByTable(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusMisdirectedRequest, http.StatusTooEarly,
		http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

const (
	defaultWaitMin = time.Second // as in go-retryablehttp's NewClient
	defaultWaitMax = 30 * time.Second
)

// Backoff makes a Policy.Backoff of b; nil means
// [retryablehttp.DefaultBackoff]. shortest and longest are RetryWaitMin and
// RetryWaitMax; 0: 1 s and 30 s. b is asked with the number of the wait, from 0
// for each operation, waits for an operation in progress included. A negative
// wait is none; attempts end with Policy.MaxAttempts.
//
// b never sees the response, which a backoff.BackOff does not get: it is nil,
// as after an error. Nothing is lost by that for Retry-After: the Transport
// reads it, and adds b's wait on top. Beware that
// [retryablehttp.DefaultBackoff] has no jitter, so clients that failed
// together come back together; a nil Policy.Backoff has.
func Backoff(b retryablehttp.Backoff, shortest, longest time.Duration) func() backoff.BackOff {
	if b == nil {
		b = retryablehttp.DefaultBackoff
	}
	if shortest == 0 {
		shortest = defaultWaitMin
	}
	if longest == 0 {
		longest = defaultWaitMax
	}
	return func() backoff.BackOff { return &waits{next: b, shortest: shortest, longest: longest} }
}

// waits are those of one operation.
type waits struct {
	next              retryablehttp.Backoff
	shortest, longest time.Duration
	n                 int
}

func (w *waits) NextBackOff() time.Duration {
	d := w.next(w.shortest, w.longest, w.n, nil)
	w.n++
	return max(d, 0) // -1 would be backoff.Stop
}

func (w *waits) Reset() { w.n = 0 }

// Prepare makes a Transport.Prepare of p; nil stays nil. Three things differ
// from go-retryablehttp. It runs before every attempt, the first included,
// because each attempt starts from the caller's own headers: what the last one
// added is gone. It finds the body unread, with a GetBody where it can be read
// again. And it must not change key, URL, method or body, which is
// [idem.ErrInvalid]: a PrepareRetry that makes a new key for each retry is how
// cards are charged twice. Its error ends the operation.
//
// With a Prepare, the Transport repeats a 401 once.
func Prepare(p retryablehttp.PrepareRetry) func(*http.Request) error { return p }
