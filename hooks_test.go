package idem_test

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

type spanKey struct{}

func TestHooksFollowAnOperationFromStartToEnd(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "2"}))
		var told []string
		tell := func(ctx context.Context, what string) {
			span, _ := ctx.Value(spanKey{}).(string)
			told = append(told, what+span)
		}
		tr := over(s, func(tr *idem.Transport) {
			tr.Hooks = idem.Hooks{
				AttemptStart: func(ctx context.Context, _ *idem.Report, n int) context.Context {
					return context.WithValue(ctx, spanKey{}, " in span "+string(rune('0'+n)))
				},
				AttemptDone: func(ctx context.Context, _ *idem.Report, a idem.Attempt) {
					require.NoError(t, ctx.Err(), "the attempt's own end is not the span's")
					tell(ctx, "done "+string(rune('0'+a.N)))
				},
				Waiting: func(ctx context.Context, _ *idem.Report, a idem.Attempt) {
					require.GreaterOrEqual(t, a.Wait, 2*time.Second)
					tell(ctx, "wait from "+a.WaitFrom)
				},
				Done: func(ctx context.Context, r *idem.Report) { tell(ctx, "end "+r.Outcome.String()) },
			}
		})
		resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, []string{"done 1 in span 1", "wait from retry-after", "done 2 in span 2", "end executed"}, told)
	})
}

func TestSpanOfAnAttemptThatCannotBeBuiltEnds(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		begun, ended := 0, 0
		tr := over(s, func(tr *idem.Transport) {
			tr.Prepare = func(*http.Request) error { return context.Canceled }
			tr.Hooks = idem.Hooks{
				AttemptStart: func(ctx context.Context, _ *idem.Report, _ int) context.Context { begun++; return nil },
				AttemptDone:  func(context.Context, *idem.Report, idem.Attempt) { ended++ },
			}
		})
		_, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		require.Error(t, err)
		require.Empty(t, s.Sends())
		require.Equal(t, [2]int{1, 1}, [2]int{begun, ended})
	})
}

func TestSlogHooksWarnOnlyOfWritesThatDidNotEndExecuted(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("lost", fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}))
		var log bytes.Buffer
		tr := over(s, func(tr *idem.Transport) {
			tr.Policy.MaxAttempts, tr.Policy.AttemptTimeout = 1, time.Second
			tr.Hooks = idem.SlogHooks(slog.New(slog.NewTextHandler(&log, nil)))
		})
		resp, err := tr.RoundTrip(newPayment(t, idem.WithKey(t.Context(), "answered"), s, "order-1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Empty(t, log.String())
		_, err = tr.RoundTrip(newPayment(t, idem.WithKey(t.Context(), "lost"), s, "order-2"))
		require.Error(t, err)
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
		for _, part := range []string{`msg="idem: operation ended"`, "key=lost", "outcome=unknown", `reason="attempts exhausted"`, "attempts=1", "last_status=0"} {
			require.Contains(t, log.String(), part)
		}
	})
}
