package idem_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/internal/witness"
)

// trouble is one fault and what an attempt that meets it comes to.
type trouble struct {
	fault fakeserver.Fault
	// effect: the send that meets it has its effect, now or later.
	effect bool
	// answered: the attempt is executed all the same.
	answered bool
	// final: the attempt's answer, or the replay of it, ends the operation.
	final bool
	// waits: the operation is in progress afterwards, for so many sends that
	// count as no attempt.
	waits int
	// goesOn: the attempt itself is told "in progress", so that one more send
	// follows even if it was the last attempt.
	goesOn bool
	// least and most that the attempt and the wait after it take.
	least, most time.Duration
}

const (
	matrixAttempts = 3
	matrixLimit    = time.Second            // of an attempt
	matrixWait     = 100 * time.Millisecond // at most, of a backoff
)

// troubles has each kind of fault that acts on HTTP/1, at each of its points.
func troubles() []trouble {
	atOnce, limit := matrixWait, matrixLimit+matrixWait
	const (
		before = fakeserver.BeforeEffect
		after  = fakeserver.AfterEffect
	)
	failure := func(f fakeserver.Fault) trouble {
		return trouble{fault: f, effect: f.Point != before, most: atOnce}
	}
	hanging := func(f fakeserver.Fault) trouble {
		return trouble{fault: f, effect: f.Point != before, least: matrixLimit, most: limit}
	}
	fine := func(f fakeserver.Fault, least time.Duration) trouble {
		return trouble{fault: f, effect: true, answered: true, least: least, most: least + 50*time.Millisecond}
	}
	all := []trouble{
		failure(fakeserver.Fault{Kind: fakeserver.Reset, Point: before}),
		failure(fakeserver.Fault{Kind: fakeserver.Reset, Point: before, Bytes: -1}),
		failure(fakeserver.Fault{Kind: fakeserver.Reset, Point: before, Bytes: 7}),
		failure(fakeserver.Fault{Kind: fakeserver.Reset, Point: after}),
		failure(fakeserver.Fault{Kind: fakeserver.Close, Point: before}),
		failure(fakeserver.Fault{Kind: fakeserver.Close, Point: before, Bytes: -1}),
		failure(fakeserver.Fault{Kind: fakeserver.Close, Point: after}),
		hanging(fakeserver.Fault{Kind: fakeserver.Hang, Point: before}),
		hanging(fakeserver.Fault{Kind: fakeserver.Hang, Point: after}),
		failure(fakeserver.Fault{Kind: fakeserver.HTML, Point: before}),
		failure(fakeserver.Fault{Kind: fakeserver.HTML, Point: after}),
		failure(fakeserver.Fault{Kind: fakeserver.EarlyAnswer, Point: before}),
		failure(fakeserver.Fault{Kind: fakeserver.Garbage, Point: before}),
		failure(fakeserver.Fault{Kind: fakeserver.Garbage, Point: after}),
		failure(fakeserver.Fault{Kind: fakeserver.CutHeaders}),
		failure(fakeserver.Fault{Kind: fakeserver.CutHeaders, Bytes: 1}),
		failure(fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "length"}),
		failure(fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "chunked"}),
		failure(fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "gzip"}),
		hanging(fakeserver.Fault{Kind: fakeserver.Flood, Point: before, Delay: 50 * time.Millisecond}),
		hanging(fakeserver.Fault{Kind: fakeserver.Flood, Point: after, Delay: 50 * time.Millisecond}),
		// The discarded answer is read for 250 ms at most.
		{fault: fakeserver.Fault{Kind: fakeserver.Endless, Point: before, Delay: 10 * time.Millisecond}, most: atOnce + 300*time.Millisecond},
		{fault: fakeserver.Fault{Kind: fakeserver.Endless, Point: after, Delay: 10 * time.Millisecond}, effect: true, most: atOnce + 300*time.Millisecond},
		{fault: fakeserver.Fault{Kind: fakeserver.Endless, Point: before}, most: atOnce + 300*time.Millisecond},
		hanging(fakeserver.Fault{Kind: fakeserver.SlowRead, Delay: 3 * time.Second}),
		hanging(fakeserver.Fault{Kind: fakeserver.Late, Point: after, Delay: 3 * time.Second}),
		hanging(fakeserver.Fault{Kind: fakeserver.Late, Point: fakeserver.InBody, Delay: 3 * time.Second}),
		hanging(fakeserver.Fault{Kind: fakeserver.Trickle, Point: fakeserver.InHeaders, Delay: 100 * time.Millisecond}),
		hanging(fakeserver.Fault{Kind: fakeserver.Trickle, Point: fakeserver.InBody, Delay: 3 * time.Second}),
		fine(fakeserver.Fault{Kind: fakeserver.SlowRead, Delay: 500 * time.Millisecond}, 500*time.Millisecond),
		fine(fakeserver.Fault{Kind: fakeserver.Slow, Delay: 500 * time.Millisecond}, 500*time.Millisecond),
		fine(fakeserver.Fault{Kind: fakeserver.Late, Point: after, Delay: 500 * time.Millisecond}, 500*time.Millisecond),
		fine(fakeserver.Fault{Kind: fakeserver.Late, Point: fakeserver.InBody, Delay: 500 * time.Millisecond}, 500*time.Millisecond),
		fine(fakeserver.Fault{Kind: fakeserver.Stale}, 0),
		fine(fakeserver.Fault{Kind: fakeserver.Duplicate, Point: before}, 0),
		fine(fakeserver.Fault{Kind: fakeserver.Duplicate, Point: after}, 0),
		fine(fakeserver.Fault{Kind: fakeserver.Duplicate, Point: after, Delay: 300 * time.Millisecond}, 0),
		// A 2xx whose bytes are arriving is not retried, however slowly.
		{
			fault: fakeserver.Fault{Kind: fakeserver.Trickle, Point: fakeserver.InBody, Delay: 50 * time.Millisecond}, effect: true, answered: true,
			least: 3 * time.Second, most: 30 * time.Second,
		},
		// The effect outlasts the attempt: a 409 each second meanwhile.
		{
			fault: fakeserver.Fault{Kind: fakeserver.Slow, Delay: 2500 * time.Millisecond}, effect: true,
			least: matrixLimit, most: limit, waits: 2,
		},
		{
			fault: fakeserver.Fault{Kind: fakeserver.Stuck, Delay: 1500 * time.Millisecond},
			most:  atOnce, waits: 2,
		},
		// The client gets the 409 of a copy: it waits also if it has no
		// attempt left.
		{
			fault: fakeserver.Fault{Kind: fakeserver.Duplicate, Point: fakeserver.DuringEffect, Delay: 500 * time.Millisecond}, effect: true,
			least: time.Second, most: time.Second + matrixWait, goesOn: true,
		},
		{
			fault: fakeserver.Fault{Kind: fakeserver.StoredFailure, Point: after}, effect: true,
			most: atOnce, final: true,
		},
		{
			fault: fakeserver.Fault{Kind: fakeserver.StoredFailure, Point: before},
			most:  atOnce, final: true,
		},
	}
	for _, status := range []int{408, 421, 425, 429, 500, 502, 503, 504} {
		for _, point := range []fakeserver.Point{before, after} {
			all = append(all, failure(fakeserver.Fault{Kind: fakeserver.Status, Status: status, Point: point}))
		}
	}
	for _, status := range []int{429, 503} {
		for _, point := range []fakeserver.Point{before, after} {
			all = append(all, trouble{
				fault:  fakeserver.Fault{Kind: fakeserver.Status, Status: status, RetryAfter: "2", Point: point},
				effect: point == after, least: 2 * time.Second, most: 2*time.Second + matrixWait,
			})
		}
	}
	for _, status := range []int{400, 401, 403, 404, 410, 422} {
		// Before the effect only: after it, such an answer to a fresh key is a
		// lie that no client can see through.
		all = append(all, trouble{
			fault: fakeserver.Fault{Kind: fakeserver.Status, Status: status, Point: before}, final: true,
		})
	}
	return all
}

// Each kind of fault hits the first, the middle and the last of three attempts
// (those before it meet a plain 503 before the effect). Then the same operation
// is called again if it ended unknown.
func TestFaultMatrix(t *testing.T) {
	for _, tr := range troubles() {
		for at := 1; at <= matrixAttempts; at++ {
			t.Run(fmt.Sprintf("%s, attempt %d of %d", tr.fault, at, matrixAttempts), func(t *testing.T) {
				for _, minted := range []bool{true, false} {
					virtual(t, func(t *testing.T) { tr.meet(t, at, minted) })
				}
			})
		}
	}
}

// expected is what an operation comes to when attempt number at meets tr.
type expected struct {
	outcome     idem.Outcome
	status      int // of the answer; 0: not looked at
	attempts    int
	sends       int
	effects     int
	least, most time.Duration
}

func (tr trouble) expect(at int, minted bool) expected {
	last := at == matrixAttempts
	e := expected{outcome: idem.Executed, status: http.StatusCreated, attempts: at, sends: at, least: tr.least}
	e.most = tr.most + time.Duration(at-1)*matrixWait + 50*time.Millisecond
	switch {
	case tr.answered:
	case tr.final && tr.fault.Kind == fakeserver.StoredFailure:
		e.outcome, e.status = idem.Unknown, http.StatusInternalServerError
		if !last {
			e.attempts, e.sends = at+1, at+1
		}
	case tr.final:
		e.outcome, e.status = idem.Unknown, tr.fault.Status
		if minted && at == 1 {
			e.outcome = idem.Refused // nobody can have used the key, and nothing came before
		}
	case tr.goesOn:
		e.sends++
	case last:
		e.outcome, e.status = idem.Unknown, 0
		if tr.fault.RetryAfter != "" {
			e.least, e.most = 0, e.most-tr.most // there is no wait after it
		}
	default:
		e.attempts, e.sends = at+1, at+1+tr.waits
		e.least += time.Duration(tr.waits) * time.Second
		e.most += time.Duration(tr.waits) * (time.Second + matrixWait)
	}
	if tr.effect || e.outcome == idem.Executed {
		e.effects = 1
	}
	return e
}

func (tr trouble) meet(t *testing.T, at int, minted bool) {
	s := inMemory(t)
	steps := make([]fakeserver.Fault, at)
	for i := range steps {
		steps[i] = fakeserver.Fault{Kind: fakeserver.Status, Status: 503}
	}
	steps[at-1] = tr.fault
	require.NoError(t, s.Script("", steps...))
	call := viaTransport(over(s, func(transport *idem.Transport) {
		transport.Policy.MaxAttempts = matrixAttempts
		transport.Policy.AttemptTimeout = matrixLimit
	}))
	ctx := t.Context()
	if !minted {
		ctx = idem.WithOperation(ctx, idem.Operation{Name: "payment", ID: "matrix/1"})
	}
	claim := &witness.Claim{Reference: "matrix"}
	want := tr.expect(at, minted)

	start := time.Now()
	report, resp, err := call(newPayment(t, ctx, s, "matrix"))
	took := time.Since(start)
	claim.Hear(report, resp, err)
	time.Sleep(10 * time.Second) // what still runs at the server comes to its end
	require.Len(t, s.Effects(), want.effects)
	require.Equal(t, want.outcome, claim.Outcome, "%v", claim)
	if want.status != 0 {
		require.Equal(t, want.status, claim.Status)
	}
	require.Len(t, keysSent(s.Sends()), 1)
	require.Equal(t, want.sends, claim.Sends)
	require.Equal(t, want.attempts, claim.Attempts)
	require.GreaterOrEqual(t, took, want.least)
	require.LessOrEqual(t, took, want.most)

	if claim.Outcome == idem.Unknown && !tr.final {
		if minted {
			ctx = idem.WithKey(ctx, claim.Key)
		}
		claim.Hear(call(newPayment(t, ctx, s, "matrix")))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, idem.Executed, claim.Outcome, "the same operation called again settles it: %v", claim)
		require.Len(t, keysSent(s.Sends()), 1)
	}
	_, found := witness.Judge(s, []*witness.Claim{claim}) // counts the sends at the server, too
	requireHonest(t, found)
}
