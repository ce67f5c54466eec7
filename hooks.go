package idem

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/idem-go/idem/journal"
)

// Hooks are called at the points of an operation, in the manner of
// httptrace.ClientTrace. Any may be nil. They run on the goroutine of the
// call, so a slow one delays it, and must be safe for concurrent use. The
// report that they get is the live one: to be read during the call only.
type Hooks struct {
	// AttemptStart runs before each attempt; n is its number. The context
	// that it returns, derived from ctx, goes into the attempt's request, so
	// that a span can travel; nil means ctx.
	AttemptStart func(ctx context.Context, r *Report, n int) context.Context
	// AttemptDone runs after each attempt, with the context that
	// AttemptStart returned.
	AttemptDone func(ctx context.Context, r *Report, a Attempt)
	// Waiting runs before the wait that follows an attempt; a.Wait and
	// a.WaitFrom are set.
	Waiting func(ctx context.Context, r *Report, a Attempt)
	// Done runs once for each RoundTrip, when its report is complete.
	Done func(ctx context.Context, r *Report)
	// Resumed runs after each entry that [Client.Resume] has dealt with; r is
	// what it has done so far.
	Resumed func(ctx context.Context, op journal.Operation, r Resumed)
	// JournalFailed runs where Transport.Journal fails and no result of the call
	// can say so: when a claim is renewed, on a goroutine of its own (the call
	// goes on, and ends with ErrJournal if that does not help), and behind the
	// end of an answer that was handed over streaming (the entry stays pending, and
	// a resume gets the server's replay). While it runs for a renewal, it does not
	// hear of the next one; a panic there ends the process.
	JournalFailed func(ctx context.Context, op journal.Operation, err error)
}

// SlogHooks logs to l: attempts and waits at debug level, with the key
// shortened, and one final line for each RoundTrip of a write: at debug level if
// the outcome is Executed (and the Journal could note it), else at warn level with
// the whole key, which somebody may have to paste into a dashboard. The final line is
// "idem: operation ended" with operation, key, outcome, reason, attempts,
// last_status and request_id. A journal that fails behind the call's back is logged
// at warn level. No body, credential, URL or query is logged.
// A nil l is slog.Default() at the time of the call.
func SlogHooks(l *slog.Logger) Hooks {
	logger := func() *slog.Logger {
		if l == nil {
			return slog.Default()
		}
		return l
	}
	return Hooks{
		AttemptDone: func(ctx context.Context, r *Report, a Attempt) {
			log := logger()
			if !log.Enabled(ctx, slog.LevelDebug) {
				return
			}
			attrs := []slog.Attr{
				slog.String("operation", r.Operation.String()),
				slog.String("key", shortKey(r.Key)),
				slog.Int("attempt", a.N),
				slog.Int("status", a.Status),
				slog.String("outcome", a.Outcome.String()),
				slog.Duration("took", a.Took.Round(time.Microsecond)),
			}
			if a.Err != nil {
				attrs = append(attrs, slog.String("error", kindOf(a.Err)))
			}
			log.LogAttrs(ctx, slog.LevelDebug, "idem: attempt ended", attrs...)
		},
		Waiting: func(ctx context.Context, r *Report, a Attempt) {
			logger().LogAttrs(ctx, slog.LevelDebug, "idem: waiting",
				slog.String("operation", r.Operation.String()),
				slog.String("key", shortKey(r.Key)),
				slog.Duration("wait", a.Wait),
				slog.String("from", a.WaitFrom))
		},
		Done: func(ctx context.Context, r *Report) {
			level := slog.LevelWarn
			if r.Outcome == Executed && !errors.Is(r.Reason, ErrJournal) || !r.write {
				level = slog.LevelDebug
			}
			logger().LogAttrs(ctx, level, "idem: operation ended", r.attrs()...)
		},
		Resumed: func(ctx context.Context, op journal.Operation, r Resumed) {
			logger().LogAttrs(ctx, slog.LevelDebug, "idem: entry resumed",
				slog.String("operation", op.Name+"/"+op.ID), slog.String("so_far", r.String()))
		},
		JournalFailed: func(ctx context.Context, op journal.Operation, err error) {
			logger().LogAttrs(ctx, slog.LevelWarn, "idem: journal failed",
				slog.String("operation", op.Name+"/"+op.ID), slog.String("error", err.Error()))
		},
	}
}

// shortKey is enough of a key to tell two apart.
func shortKey(key string) string {
	if len(key) <= 8 {
		return key
	}
	return key[:8] + "..."
}
