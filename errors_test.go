package idem_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

func TestErrorSaysWhatHappenedWhatIsKnownAndWhatToDo(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		_, err := over(s).RoundTrip(newPayment(t, idem.WithKey(t.Context(), "order-1/1"), s, "order-1"))
		require.Len(t, s.Effects(), 1)
		for _, part := range []string{
			"idem: attempts exhausted", "last error: ", "attempts: 4", "effect: unknown", `key "order-1/1"`, "call again with the same operation or key",
		} {
			require.ErrorContains(t, err, part)
		}
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		require.ErrorIs(t, err, syscall.ECONNRESET, "the last error is reachable")
		require.False(t, err.(*idem.Error).Timeout())
	})
}

func TestErrorReachesReasonLastErrorAndContext(t *testing.T) {
	cause := errors.New("the shop closes")
	ctx, cancel := context.WithCancelCause(t.Context())
	tr := &idem.Transport{Policy: casePolicy(), Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
		cancel(cause)
		return nil, &net.OpError{Op: "read", Err: syscall.ECONNRESET}
	})}
	_, err := tr.RoundTrip(newPost(t, ctx, "http://api.test/", "{}"))
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	for _, target := range []error{cause, context.Canceled, syscall.ECONNRESET} {
		require.ErrorIs(t, err, target)
	}
}

func TestTimeoutIsReportedForEveryKindOfLimit(t *testing.T) {
	for _, c := range []struct {
		name   string
		policy func(*idem.Policy)
		within time.Duration
	}{
		{"attempt limit", func(p *idem.Policy) { p.MaxAttempts, p.AttemptTimeout = 1, time.Second }, time.Hour},
		{"time exhausted", func(p *idem.Policy) { p.AttemptTimeout, p.MaxElapsed = time.Second, 1500*time.Millisecond }, time.Hour},
		{"caller's deadline", func(*idem.Policy) {}, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang}))
				ctx, cancel := context.WithTimeout(t.Context(), c.within)
				defer cancel()
				_, err := over(s, func(tr *idem.Transport) { c.policy(&tr.Policy) }).RoundTrip(newPayment(t, ctx, s, "order-1"))
				require.Empty(t, s.Effects())
				var timeout interface{ Timeout() bool }
				require.ErrorAs(t, err, &timeout)
				require.True(t, timeout.Timeout())
				require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
			})
		})
	}
}
