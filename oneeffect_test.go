package idem_test

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/internal/witness"
)

var (
	opsFlag  = flag.Int("ops", 20_000/slowness, "operations of TestOneEffectPerOperation")
	seedFlag = flag.Int64("seed", 1, "seed of the faults; keys that the client mints differ from run to run, and so do their faults")
)

// load is many operations against one fake server in virtual time.
type load struct {
	ops      int
	seed     int64
	faults   []fakeserver.Fault
	settings fakeserver.Settings
	start    func() *fakeserver.Server // nil: HTTP/1
	// through makes the caller under test over a base.
	through func(base http.RoundTripper) caller
}

// caller makes one call and says what it tells its user.
type caller func(req *http.Request) (*idem.Report, *http.Response, error)

// viaTransport is a caller over t, as any http.Client would use it.
func viaTransport(t *idem.Transport) caller {
	client := &http.Client{Transport: t}
	return func(req *http.Request) (*idem.Report, *http.Response, error) {
		var report idem.Report
		resp, err := client.Do(req.WithContext(idem.WithReport(req.Context(), &report)))
		return &report, resp, err
	}
}

// loadPolicy is the default policy, 8 attempts included, without a budget: at
// such a rate of faults it would rightly stop.
func loadPolicy() idem.Policy {
	return idem.Policy{Budget: &idem.Budget{Capacity: -1}}
}

const (
	loadBatch   = 4_000 // operations of one server; bounds the memory of a long run
	loadWorkers = 16
	loadAgain   = 5 // calls that an operation which ended unknown gets to settle
)

// tally is what a load came to.
type tally struct {
	witness.Figures
	unknownAtFirst int      // operations whose first call ended unknown
	withoutKey     int      // of them, those whose error did not carry the key
	unsettled      int      // of them, those still unknown after further calls
	notExecuted    []string // operations that ended neither executed nor unknown
	violations     []witness.Violation
}

// run makes the operations in batches, one bubble and one server each.
func (l load) run(t *testing.T) tally {
	t.Helper()
	var sum tally
	for first := 0; first < l.ops; first += loadBatch {
		n := min(loadBatch, l.ops-first)
		synctest.Test(t, func(t *testing.T) {
			one := l.batch(t, first, n)
			sum.Figures.Add(one.Figures)
			sum.unknownAtFirst += one.unknownAtFirst
			sum.withoutKey += one.withoutKey
			sum.unsettled += one.unsettled
			sum.notExecuted = append(sum.notExecuted, one.notExecuted...)
			sum.violations = append(sum.violations, one.violations...)
		})
	}
	return sum
}

func (l load) batch(t *testing.T, first, n int) tally {
	start := l.start
	if start == nil {
		start = fakeserver.NewInMemory
	}
	s := start()
	defer s.Close()
	settings := l.settings
	settings.ForgetHeaders = true
	s.Apply(settings)
	require.NoError(t, s.Inject(l.faults...))
	call := l.through(s.Transport())
	claims := make([]*witness.Claim, n)
	next := make(chan int, n)
	for i := range n {
		claims[i] = &witness.Claim{Reference: fmt.Sprintf("order-%d", first+i)}
		next <- i
	}
	close(next)
	var workers sync.WaitGroup
	for range loadWorkers {
		workers.Go(func() {
			for i := range next {
				l.call(t, s, call, claims[i], first+i)
			}
		})
	}
	workers.Wait()

	var sum tally
	for i, c := range claims {
		if c.Outcome != idem.Unknown {
			continue
		}
		sum.unknownAtFirst++
		if c.Key == "" {
			sum.withoutKey++
		}
		for c.Outcome == idem.Unknown && c.Key != "" && c.Calls <= loadAgain {
			time.Sleep(time.Minute) // until somebody notices
			l.again(t, s, call, c, first+i)
		}
		if c.Outcome == idem.Unknown {
			sum.unsettled++
		}
	}
	sum.Figures, sum.violations = witness.Judge(s, claims)
	for _, c := range claims {
		if c.Outcome != idem.Executed && c.Outcome != idem.Unknown {
			sends := s.Sends(fakeserver.Filter{Key: c.Key})
			sum.notExecuted = append(sum.notExecuted, fmt.Sprintf("%v: %+v", c, sends))
		}
	}
	return sum
}

// call makes the first call of operation i, its key named in each of the four
// ways in turn.
func (l load) call(t *testing.T, s *fakeserver.Server, call caller, c *witness.Claim, i int) {
	ctx, header := t.Context(), ""
	switch i % 4 {
	case 1:
		ctx = idem.WithOperation(ctx, idem.Operation{Name: "payment", ID: fmt.Sprintf("%d/%d", l.seed, i)})
	case 2:
		ctx = idem.WithKey(ctx, fmt.Sprintf("own-%d-%d", l.seed, i))
	case 3:
		header = fmt.Sprintf("header-%d-%d", l.seed, i)
	}
	c.Hear(call(l.request(t, ctx, s, c, i, header)))
}

// again calls the operation with the key that its first call reported.
func (l load) again(t *testing.T, s *fakeserver.Server, call caller, c *witness.Claim, i int) {
	c.Hear(call(l.request(t, idem.WithKey(t.Context(), c.Key), s, c, i, c.Key)))
}

func (l load) request(t *testing.T, ctx context.Context, s *fakeserver.Server, c *witness.Claim, i int, header string) *http.Request {
	req := newPost(t, ctx, s.URL()+"/v1/payments", paymentJSON(c.Reference, 1+i%30_000))
	if header != "" {
		req.Header.Set("Idempotency-Key", header)
	}
	return req
}

// requireHonest fails with the first violations, if there are any.
func requireHonest(t *testing.T, found []witness.Violation) {
	t.Helper()
	for i, v := range found {
		if i == 10 {
			t.Errorf("and %d more", len(found)-i)
			break
		}
		t.Error(v)
	}
}

// requireAllSettled asks of a load what the README promises.
func requireAllSettled(t *testing.T, ops int, sum tally) {
	t.Helper()
	requireHonest(t, sum.violations)
	require.Empty(t, sum.notExecuted, "nothing here is refused or unreachable")
	require.Equal(t, ops, sum.Effects, "effects")
	require.Zero(t, sum.Doubled)
	require.Zero(t, sum.Lost)
	require.Zero(t, sum.FalseClaim)
	require.Zero(t, sum.BadAnswers)
	require.Equal(t, ops, sum.Keys, "keys at the server")
	require.Equal(t, sum.Arrived, sum.Reported, "sends")
	require.Zero(t, sum.withoutKey, "unknown without a key")
	require.Zero(t, sum.unsettled, "unknown after the same operation was called again")
	require.Zero(t, sum.Unknown)
}

// At 35 of 100 sends with a fault, an operation that gives up after 8 attempts
// has met 8 faults in a row: 0.35^8 is 2 of 10,000.
func TestOneEffectPerOperation(t *testing.T) {
	ops, seed := *opsFlag, *seedFlag
	sum := load{
		ops: ops, seed: seed, faults: fakeserver.Mixed(0.35, seed),
		through: func(base http.RoundTripper) caller {
			return viaTransport(&idem.Transport{Base: base, Policy: loadPolicy()})
		},
	}.run(t)
	t.Logf("seed %d: %v; after the first call %d unknown, after further ones %d", seed, sum.Figures, sum.unknownAtFirst, sum.unsettled)
	requireAllSettled(t, ops, sum)
	require.LessOrEqual(t, sum.unknownAtFirst, ops/1000+3, "operations that ended unknown; about 0.02 % must")
	require.Greater(t, sum.Arrived, ops*13/10, "the faults hit nobody")
}

// 3 of 100 effects outlast the limit of an attempt; meanwhile the server says
// 409 with Retry-After.
func TestOneEffectWithSlowEffects(t *testing.T) {
	const ops = 4_000
	seed := *seedFlag
	policy := loadPolicy()
	policy.AttemptTimeout = time.Second
	sum := load{
		ops: ops, seed: seed,
		faults: []fakeserver.Fault{{Kind: fakeserver.Slow, Delay: 1800 * time.Millisecond, Rate: 0.03, Seed: seed}},
		through: func(base http.RoundTripper) caller {
			return viaTransport(&idem.Transport{Base: base, Policy: policy})
		},
	}.run(t)
	t.Logf("seed %d: %v; after the first call %d unknown", seed, sum.Figures, sum.unknownAtFirst)
	requireAllSettled(t, ops, sum)
	require.Zero(t, sum.unknownAtFirst, "reported failed though done")
	require.Greater(t, sum.Arrived, ops+2*ops/50, "no effect was slow")
}

// mixedOverHTTP2 is the mix in the words of HTTP/2: what ends a connection of
// HTTP/1 resets a stream or goes away. Every fifth connection that would be
// reset is reset even so, with all the streams on it.
func mixedOverHTTP2(rate float64, seed int64) []fakeserver.Fault {
	var mix []fakeserver.Fault
	for _, f := range fakeserver.Mixed(rate, seed) {
		switch f.Kind {
		case fakeserver.Reset:
			whole := f
			whole.Rate /= 5
			f.Rate -= whole.Rate
			f.Kind, f.Code = fakeserver.StreamReset, "REFUSED_STREAM"
			mix = append(mix, whole)
		case fakeserver.Close:
			f.Kind = fakeserver.GoAway
		}
		mix = append(mix, f)
	}
	return mix
}

// The operations share one connection, until a fault ends it.
func TestOneEffectPerOperationOverHTTP2(t *testing.T) {
	const ops = 4_000
	seed := *seedFlag
	sum := load{
		ops: ops, seed: seed, faults: mixedOverHTTP2(0.35, seed), start: fakeserver.NewInMemoryTLS,
		through: func(base http.RoundTripper) caller {
			return viaTransport(&idem.Transport{Base: base, Policy: loadPolicy()})
		},
	}.run(t)
	t.Logf("seed %d: %v; after the first call %d unknown, after further ones %d", seed, sum.Figures, sum.unknownAtFirst, sum.unsettled)
	// A connection takes the streams of others with it: what was on its way
	// then was sent and has not arrived.
	lost := sum.Reported - sum.Arrived
	require.GreaterOrEqual(t, lost, 0)
	require.LessOrEqual(t, lost, ops/100)
	if sum.Reported -= lost; lost > 0 {
		sum.violations = slices.DeleteFunc(sum.violations, func(v witness.Violation) bool { return v.Rule == witness.HonestSends })
	}
	requireAllSettled(t, ops, sum)
	require.LessOrEqual(t, sum.unknownAtFirst, ops/1000+3)
	require.Greater(t, sum.Arrived, ops*13/10, "the faults hit nobody")
}
