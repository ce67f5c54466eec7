package idem_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
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
	// goesOn: one more send follows that counts as no attempt, even if it was
	// the last one: the attempt is told "in progress" or is redirected, or
	// net/http repeats it by itself.
	goesOn bool
	// ends: the status of an operation that is executed; 0: 201.
	ends int
	// swallows: the connection stays open and dead, so that the next call
	// loses a send to it.
	swallows bool
	// least and most that the attempt and the wait after it take.
	least, most time.Duration
}

const (
	matrixAttempts = 3
	matrixLimit    = time.Second            // of an attempt
	matrixWait     = 100 * time.Millisecond // at most, of a backoff
	matrixHeaders  = 64 << 10               // bytes of an answer's headers that the base takes
)

// failure is an attempt that fails at once.
func failure(f fakeserver.Fault) trouble {
	return trouble{fault: f, effect: f.Point != fakeserver.BeforeEffect, most: matrixWait}
}

// hanging is an attempt that its limit ends.
func hanging(f fakeserver.Fault) trouble {
	return trouble{fault: f, effect: f.Point != fakeserver.BeforeEffect, least: matrixLimit, most: matrixLimit + matrixWait}
}

// fine is an attempt that succeeds after a time.
func fine(f fakeserver.Fault, least time.Duration) trouble {
	return trouble{fault: f, effect: true, answered: true, least: least, most: least + 50*time.Millisecond}
}

// troubles has each kind of fault that acts on HTTP/1, at each of its points.
func troubles() []trouble {
	atOnce, limit := matrixWait, matrixLimit+matrixWait
	const (
		before = fakeserver.BeforeEffect
		after  = fakeserver.AfterEffect
	)
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
		// A gateway answers for a request that goes on behind it.
		{
			fault:  fakeserver.Fault{Kind: fakeserver.Status, Status: 503, Point: fakeserver.DuringEffect, Delay: 1500 * time.Millisecond},
			effect: true, most: atOnce, waits: 2,
		},
		{
			fault:  fakeserver.Fault{Kind: fakeserver.HTML, Status: 504, Point: fakeserver.DuringEffect, Delay: 1500 * time.Millisecond},
			effect: true, most: atOnce, waits: 2,
		},
		{
			fault:  fakeserver.Fault{Kind: fakeserver.Redirect, Location: "/v1/payments", Point: before},
			effect: true, answered: true, goesOn: true,
		},
		{
			fault:  fakeserver.Fault{Kind: fakeserver.Redirect, Point: after},
			effect: true, answered: true, goesOn: true, ends: http.StatusOK,
		},
		failure(fakeserver.Fault{Kind: fakeserver.BigHeaders, Point: before, Bytes: 2 * matrixHeaders}),
		failure(fakeserver.Fault{Kind: fakeserver.BigHeaders, Point: after, Bytes: 2 * matrixHeaders}),
		fine(fakeserver.Fault{Kind: fakeserver.Bomb, Bytes: 4 << 10}, 0),
		// Whole as HTTP: what it says is the caller's affair.
		fine(fakeserver.Fault{Kind: fakeserver.Mangled}, 0),
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

// troublesOfHTTP2 has each kind of fault that acts on HTTP/2. A body says
// whether the request has one.
func troublesOfHTTP2(body bool) []trouble {
	const (
		before = fakeserver.BeforeEffect
		after  = fakeserver.AfterEffect
	)
	var all []trouble
	if body {
		for _, tr := range troubles() {
			if tr.fault.Kind == fakeserver.Trickle && tr.fault.Point == fakeserver.InHeaders {
				// Headers come in one piece, and then the bytes of a 2xx.
				tr = trouble{fault: tr.fault, effect: true, answered: true, least: 3 * time.Second, most: 30 * time.Second}
			}
			all = append(all, tr)
		}
		all = append(all, fine(fakeserver.Fault{Kind: fakeserver.Extra}, 0))
	}
	// Where nothing was looked at, as the server says, net/http repeats a
	// request without a body by itself. It is believed even where it lies: the
	// key takes care of that.
	repeated := func(f fakeserver.Fault) trouble {
		if body {
			return failure(f)
		}
		return trouble{fault: f, effect: true, answered: true, goesOn: true}
	}
	for _, point := range []fakeserver.Point{before, after} {
		for _, code := range []string{"NO_ERROR", "INTERNAL_ERROR", "CANCEL", "ENHANCE_YOUR_CALM"} {
			all = append(all, failure(fakeserver.Fault{Kind: fakeserver.StreamReset, Point: point, Code: code}))
		}
		for _, code := range []string{"REFUSED_STREAM", "PROTOCOL_ERROR"} {
			all = append(all, repeated(fakeserver.Fault{Kind: fakeserver.StreamReset, Point: point, Code: code}))
		}
		for _, code := range []string{"NO_ERROR", "ENHANCE_YOUR_CALM"} {
			if body || code == "NO_ERROR" { // with another code it depends on how new the connection is
				all = append(all, repeated(fakeserver.Fault{Kind: fakeserver.GoAway, Point: point, Code: code, Last: "below"}))
			}
			all = append(all,
				failure(fakeserver.Fault{Kind: fakeserver.GoAway, Point: point, Code: code, Last: "at"}),
				failure(fakeserver.Fault{Kind: fakeserver.GoAway, Point: point, Code: code, Last: "above"}))
		}
		frozen := hanging(fakeserver.Fault{Kind: fakeserver.Freeze, Point: point})
		frozen.swallows = true
		all = append(all, frozen)
	}
	return all
}

// matrix is where the troubles are met.
type matrix struct {
	start   func(*testing.T) *fakeserver.Server
	request func(*testing.T, context.Context, *fakeserver.Server) *http.Request
}

// newMatrixPayment is a request with a body.
func newMatrixPayment(t *testing.T, ctx context.Context, s *fakeserver.Server) *http.Request {
	return newPayment(t, ctx, s, "matrix")
}

// inMemoryTLS starts a fake server that speaks HTTP/2 in virtual time; it ends
// with the test.
func inMemoryTLS(t *testing.T) *fakeserver.Server {
	t.Helper()
	s := fakeserver.NewInMemoryTLS()
	t.Cleanup(s.Close)
	return s
}

// Each kind of fault hits the first, the middle and the last of three attempts
// (those before it meet a plain 503 before the effect). Then the same operation
// is called again if it ended unknown.
func TestFaultMatrix(t *testing.T) {
	matrix{inMemory, newMatrixPayment}.run(t, troubles())
}

func TestFaultMatrixOverHTTP2(t *testing.T) {
	matrix{inMemoryTLS, newMatrixPayment}.run(t, troublesOfHTTP2(true))
}

// Without a body net/http may send more than once in an attempt; the report
// counts it.
func TestFaultMatrixOverHTTP2WithoutABody(t *testing.T) {
	capture := func(t *testing.T) *fakeserver.Server {
		s := inMemoryTLS(t)
		s.Handle("POST /v1/captures", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte(`{"id":"cap_1","reference":"matrix"}`))
		}))
		return s
	}
	matrix{capture, func(t *testing.T, ctx context.Context, s *fakeserver.Server) *http.Request {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/captures?reference=matrix", nil)
		require.NoError(t, err)
		return req
	}}.run(t, troublesOfHTTP2(false))
}

func (m matrix) run(t *testing.T, all []trouble) {
	for _, tr := range all {
		for at := 1; at <= matrixAttempts; at++ {
			t.Run(fmt.Sprintf("%s, attempt %d of %d", tr.fault, at, matrixAttempts), func(t *testing.T) {
				for _, minted := range []bool{true, false} {
					virtual(t, func(t *testing.T) { m.meet(t, tr, at, minted) })
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
	if tr.ends != 0 {
		e.status = tr.ends
	}
	if tr.goesOn {
		e.sends++
	}
	switch {
	case tr.answered, tr.goesOn:
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

// beginning is as much as one reads of an answer without end.
type beginning struct {
	io.Reader
	io.Closer
}

// keysOfWrites is the distinct keys at s; the GET after a redirect has none.
func keysOfWrites(s *fakeserver.Server) []string {
	return keysSent(slices.DeleteFunc(s.Sends(), func(n fakeserver.Send) bool { return n.Method == http.MethodGet }))
}

func (m matrix) meet(t *testing.T, tr trouble, at int, minted bool) {
	s := m.start(t)
	steps := make([]fakeserver.Fault, at)
	for i := range steps {
		steps[i] = fakeserver.Fault{Kind: fakeserver.Status, Status: 503}
	}
	steps[at-1] = tr.fault
	require.NoError(t, s.Script("", steps...))
	call := viaTransport(over(s, func(transport *idem.Transport) {
		transport.Policy.MaxAttempts = matrixAttempts
		transport.Policy.AttemptTimeout = matrixLimit
		transport.Base.(*http.Transport).MaxResponseHeaderBytes = matrixHeaders
	}))
	ctx := t.Context()
	if !minted {
		ctx = idem.WithOperation(ctx, idem.Operation{Name: "payment", ID: "matrix/1"})
	}
	claim := &witness.Claim{Reference: "matrix"}
	want := tr.expect(at, minted)

	start := time.Now()
	report, resp, err := call(m.request(t, ctx, s))
	took := time.Since(start)
	if resp != nil && resp.ContentLength < 0 {
		resp.Body = beginning{io.LimitReader(resp.Body, 1000), resp.Body}
	}
	claim.Hear(report, resp, err)
	time.Sleep(10 * time.Second) // what still runs at the server comes to its end
	require.Len(t, s.Effects(), want.effects)
	require.Equal(t, want.outcome, claim.Outcome, "%v", claim)
	if want.status != 0 {
		require.Equal(t, want.status, claim.Status)
	}
	require.Len(t, keysOfWrites(s), 1)
	require.Equal(t, want.sends, claim.Sends)
	require.Equal(t, want.attempts, claim.Attempts)
	require.GreaterOrEqual(t, took, want.least)
	require.LessOrEqual(t, took, want.most)

	if claim.Outcome == idem.Unknown && !tr.final {
		if minted {
			ctx = idem.WithKey(ctx, claim.Key)
		}
		claim.Hear(call(m.request(t, ctx, s)))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, idem.Executed, claim.Outcome, "the same operation called again settles it: %v", claim)
		require.Len(t, keysOfWrites(s), 1)
		if tr.swallows {
			require.Equal(t, want.sends+2, claim.Sends, "one on the dead connection, one beside it")
			claim.Sends-- // nobody heard that one
		}
	}
	_, found := witness.Judge(s, []*witness.Claim{claim}) // counts the sends at the server, too
	if tr.fault.Kind == fakeserver.Mangled {
		found = slices.DeleteFunc(found, func(v witness.Violation) bool { return v.Rule == witness.WholeAnswer })
	}
	requireHonest(t, found)
}

// A stream that is reset leaves its connection alive: that is no dead
// connection, whose retry follows at once, beside the pool and the budget.
// Almost every request over HTTP/2 finds a used connection, so an overloaded
// server that resets streams would else get each of them twice.
func TestStreamResetIsNoDeadConnection(t *testing.T) {
	for _, code := range []string{"NO_ERROR", "INTERNAL_ERROR", "REFUSED_STREAM", "CANCEL", "ENHANCE_YOUR_CALM"} {
		t.Run(code, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				const ops = 50
				s := inMemoryTLS(t)
				tr := over(s, withAttempts(2), func(tr *idem.Transport) { tr.Policy.Budget = &idem.Budget{} })
				resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, "warm-up"))
				require.NoError(t, err)
				readAll(t, resp)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.StreamReset, Code: code}))
				for i := range ops {
					_, err := tr.RoundTrip(newPayment(t, t.Context(), s, fmt.Sprintf("order-%d", i)))
					var e *idem.Error
					require.ErrorAs(t, err, &e)
					require.Equal(t, idem.Unknown, e.Outcome)
					if len(e.Attempts) > 1 {
						require.Equal(t, "backoff", e.Attempts[0].WaitFrom)
					}
				}
				require.LessOrEqual(t, len(s.Sends()), 1+ops+10+2, "the budget has 10 retries, and a probe now and then")
				for _, n := range s.Sends() {
					require.Equal(t, 1, n.Conn)
				}
			})
		})
	}
}
