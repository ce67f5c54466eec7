package idem

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"
)

// --- C33

func TestC33_BackoffNeitherOverflowsNorPanics(t *testing.T) {
	for _, base := range []time.Duration{time.Millisecond, time.Millisecond + 1, time.Second} {
		for _, limit := range []time.Duration{time.Millisecond, time.Second, math.MaxInt64} {
			if limit < base {
				continue
			}
			t.Run(fmt.Sprintf("base %v cap %v", base, limit), func(t *testing.T) {
				b := fullJitter(base, limit)
				var sum float64
				interval := base
				for n := range 10_001 {
					d := b.NextBackOff()
					if d < 0 || d > limit || d > max(interval, limit) || n < 8 && d > interval {
						t.Fatalf("wait %d is %v; interval %v, cap %v", n, d, interval, limit)
					}
					if interval <= limit/2 {
						interval *= 2
					} else {
						interval = limit
					}
					if n >= 40 {
						sum += float64(d)
					}
				}
				require.InDelta(t, 0.5, sum/9961/float64(limit), 0.02, "full jitter: the mean is half the cap")
			})
		}
	}
}

func TestC33_DefaultForZeroAndInvalidForTheRest(t *testing.T) {
	p, err := Policy{}.resolved(&Generic)
	require.NoError(t, err)
	require.Equal(t, 50*time.Millisecond, p.BackoffBase)
	require.Equal(t, 20*time.Second, p.BackoffCap)
	for _, p := range []Policy{
		{BackoffBase: 1},
		{BackoffBase: time.Millisecond - 1},
		{BackoffBase: time.Second, BackoffCap: time.Millisecond},
		{BackoffBase: math.MinInt64},
		{BackoffCap: 1},
	} {
		_, err := p.resolved(&Generic)
		require.ErrorIs(t, err, ErrInvalid)
	}
	_, err = Policy{BackoffBase: time.Second, BackoffCap: time.Second}.resolved(&Generic)
	require.NoError(t, err)
	_, err = Policy{BackoffCap: math.MaxInt64}.resolved(&Generic)
	require.NoError(t, err)
}

// --- defaults

func TestPolicyDefaults(t *testing.T) {
	p, err := Policy{}.resolved(&Generic)
	require.NoError(t, err)
	for _, row := range []struct {
		field     string
		got, want any
	}{
		{"MaxAttempts", p.MaxAttempts, 8},
		{"AttemptTimeout", p.AttemptTimeout, 30 * time.Second},
		{"MaxElapsed", p.MaxElapsed, 2 * time.Minute},
		{"MaxRetryAfter", p.MaxRetryAfter, 60 * time.Second},
		{"MaxInProgress", p.MaxInProgress, 10},
		{"BackoffBase", p.BackoffBase, 50 * time.Millisecond},
		{"BackoffCap", p.BackoffCap, 20 * time.Second},
		{"ThrottleBase", p.ThrottleBase, time.Second},
		{"KeyWindow", p.KeyWindow, time.Duration(0)},
		{"MaxRequestBuffer", p.MaxRequestBuffer, int64(1 << 20)},
		{"MaxResponseBuffer", p.MaxResponseBuffer, int64(1 << 20)},
	} {
		require.Equal(t, row.want, row.got, row.field)
	}
	require.Same(t, &sharedBudget, p.Budget)
	capacity, cost := p.Budget.numbers()
	require.Equal(t, 40, capacity)
	require.Equal(t, 4, cost)
	require.NotNil(t, p.Backoff)
	require.Nil(t, p.Classify)

	for name, want := range map[*Dialect]time.Duration{&Stripe: 24 * time.Hour, &IETF: 0, &NoKeys: 0} {
		p, err := Policy{}.resolved(name)
		require.NoError(t, err)
		require.Equal(t, want, p.KeyWindow, name.Name)
	}
	p, err = Policy{KeyWindow: time.Hour}.resolved(&Stripe)
	require.NoError(t, err)
	require.Equal(t, time.Hour, p.KeyWindow, "the policy wins over the dialect")
}

func TestPolicyOff(t *testing.T) {
	p, err := Policy{
		AttemptTimeout: -5, MaxElapsed: math.MinInt64, MaxRequestBuffer: -7, MaxResponseBuffer: -7, Budget: &Budget{Capacity: -1},
	}.resolved(&Stripe)
	require.NoError(t, err)
	require.Zero(t, p.AttemptTimeout)
	require.Zero(t, p.MaxElapsed)
	require.EqualValues(t, -1, p.MaxRequestBuffer)
	require.EqualValues(t, -1, p.MaxResponseBuffer)
}

// --- Retry-After

func TestRetryAfterForms(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 500e6, time.UTC)
	const (
		date   = "Sun, 01 Mar 2026 10:00:00 GMT" // the server's clock is two hours slow
		dateIn = "Sun, 01 Mar 2026 10:00:30 GMT" // 30 s after that
	)
	for _, tc := range []struct {
		name   string
		header http.Header
		want   time.Duration
		ok     bool
	}{
		{"no header", http.Header{}, 0, false},
		{"seconds", http.Header{"Retry-After": {"120"}}, 2 * time.Minute, true},
		{"leading zeros", http.Header{"Retry-After": {"0007"}}, 7 * time.Second, true},
		{"zero", http.Header{"Retry-After": {"0"}}, 0, true},
		{"padded", http.Header{"Retry-After": {" \t2\t "}}, 2 * time.Second, true},
		{"292 years", http.Header{"Retry-After": {"9223372029"}}, 9223372029 * time.Second, true},
		{"as long as a Duration", http.Header{"Retry-After": {"9223372036"}}, math.MaxInt64, true},
		{"overflow in nanoseconds", http.Header{"Retry-After": {"9223372037"}}, math.MaxInt64, true},
		{"overflow in seconds", http.Header{"Retry-After": {"99999999999999999999"}}, math.MaxInt64, true},
		{"negative", http.Header{"Retry-After": {"-5"}}, 0, false},
		{"signed", http.Header{"Retry-After": {"+5"}}, 0, false},
		{"fraction", http.Header{"Retry-After": {"1.5"}}, 0, false},
		{"unit", http.Header{"Retry-After": {"2s"}}, 0, false},
		{"word", http.Header{"Retry-After": {"abc"}}, 0, false},
		{"empty", http.Header{"Retry-After": {""}}, 0, false},
		{"blank", http.Header{"Retry-After": {"  "}}, 0, false},
		{"list", http.Header{"Retry-After": {"2, 5"}}, 0, false},
		{"other digits", http.Header{"Retry-After": {"\u0665"}}, 0, false},
		{"two lines", http.Header{"Retry-After": {"2", "5"}}, 5 * time.Second, true},
		{"two lines, falling", http.Header{"Retry-After": {"5", "2"}}, 5 * time.Second, true},
		{"a bad line among good ones", http.Header{"Retry-After": {"x", "0", "-1"}}, 0, true},

		{"date against Date", http.Header{"Retry-After": {dateIn}, "Date": {date}}, 30 * time.Second, true},
		{"date, RFC 850", http.Header{"Retry-After": {"Sunday, 01-Mar-26 10:00:30 GMT"}, "Date": {date}}, 30 * time.Second, true},
		{"date, asctime", http.Header{"Retry-After": {"Sun Mar  1 10:00:30 2026"}, "Date": {date}}, 30 * time.Second, true},
		{"date against an aged answer", http.Header{"Retry-After": {dateIn}, "Date": {date}, "Age": {"10"}}, 20 * time.Second, true},
		{"date that has passed in the cache", http.Header{"Retry-After": {dateIn}, "Date": {date}, "Age": {"31"}}, 0, true},
		{"date with a bad Age", http.Header{"Retry-After": {dateIn}, "Date": {date}, "Age": {"-10"}}, 30 * time.Second, true},
		{"date with a huge Age", http.Header{"Retry-After": {dateIn}, "Date": {date}, "Age": {"99999999999999999999"}}, 0, true},
		{"seconds ignore Date and Age", http.Header{"Retry-After": {"30"}, "Date": {date}, "Age": {"10"}}, 30 * time.Second, true},
		{"date without Date", http.Header{"Retry-After": {"Sun, 01 Mar 2026 12:00:30 GMT"}}, 29500 * time.Millisecond, true},
		{"date with a bad Date", http.Header{"Retry-After": {"Sun, 01 Mar 2026 12:00:30 GMT"}, "Date": {"today"}}, 29500 * time.Millisecond, true},
		{"date in the past", http.Header{"Retry-After": {"Sun, 01 Mar 2020 10:00:00 GMT"}, "Date": {date}}, 0, true},
		{"date at the end of time", http.Header{"Retry-After": {"Fri, 31 Dec 9999 23:59:59 GMT"}, "Date": {date}}, math.MaxInt64, true},
		{"date and seconds", http.Header{"Retry-After": {dateIn, "40"}, "Date": {date}}, 40 * time.Second, true},
		{"not quite a date", http.Header{"Retry-After": {"2026-03-01T10:00:30Z"}, "Date": {date}}, 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, ok := retryAfter(tc.header, now)
			require.Equal(t, tc.ok, ok)
			require.Equal(t, tc.want, got)
		})
	}
}

func TestWaitAfter(t *testing.T) {
	const ms = time.Millisecond
	p := &Policy{BackoffBase: 50 * ms, ThrottleBase: 1000 * ms}
	for _, tc := range []struct {
		name   string
		r      result
		v      ruling
		sample time.Duration
		spread float64
		want   time.Duration
		from   string
	}{
		{"a failure waits the backoff", result{status: 500}, ruling{}, 30 * ms, 0.9, 30 * ms, waitBackoff},
		{"an error waits the backoff", result{err: errors.New("reset")}, ruling{}, 30 * ms, 0.9, 30 * ms, waitBackoff},
		{"a negative sample is none", result{status: 500}, ruling{}, -30 * ms, 0, 0, waitBackoff},
		{"Retry-After is a floor", result{asked: true, retryAfter: 3000 * ms}, ruling{}, 30 * ms, 0.9, 3030 * ms, waitRetryAfter},
		{"no jitter, no less", result{asked: true, retryAfter: 3000 * ms}, ruling{}, 0, 0, 3000 * ms, waitRetryAfter},
		{"saturating", result{asked: true, retryAfter: math.MaxInt64}, ruling{}, 30 * ms, 0, math.MaxInt64, waitRetryAfter},
		{"zero waits at least the base", result{asked: true}, ruling{}, 1 * ms, 0.9, 50 * ms, waitRetryAfter},
		{"zero waits the backoff", result{asked: true}, ruling{}, 70 * ms, 0.9, 70 * ms, waitRetryAfter},
		{"zero in progress waits at least the base", result{asked: true}, ruling{inProgress: true}, 0, 0, 50 * ms, waitRetryAfter},
		{"in progress with Retry-After", result{asked: true, retryAfter: 2000 * ms}, ruling{inProgress: true}, 30 * ms, 0, 2030 * ms, waitRetryAfter},
		{"in progress without", result{}, ruling{inProgress: true}, 30 * ms, 0, 1030 * ms, waitInProgress},
		{"throttled, spread larger", result{throttled: true}, ruling{}, 30 * ms, 0.5, 500 * ms, waitThrottle},
		{"throttled, backoff larger", result{throttled: true}, ruling{}, 700 * ms, 0.5, 700 * ms, waitThrottle},
		{"throttled with Retry-After", result{throttled: true, asked: true, retryAfter: 100 * ms}, ruling{}, 30 * ms, 0.9, 130 * ms, waitRetryAfter},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, from := waitAfter(&tc.r, tc.v, p, tc.sample, tc.spread)
			require.Equal(t, tc.want, got)
			require.Equal(t, tc.from, from)
		})
	}
}

func TestGeneratorFallsBackWhereTheUsersIsNil(t *testing.T) {
	var g generator
	p := &Policy{BackoffBase: time.Millisecond, BackoffCap: time.Millisecond, Backoff: func() backoff.BackOff { return nil }}
	for range 100 {
		d := g.next(p)
		require.GreaterOrEqual(t, d, time.Duration(0))
		require.LessOrEqual(t, d, time.Millisecond)
	}
}
