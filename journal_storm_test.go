package idem_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

var (
	stormsFlag    = flag.Int("storms", 30, "how many storms over a journal that fails")
	stormFromFlag = flag.Uint64("storm-from", 0, "the seed before the first storm's")
)

// stormJournal is what one process sees of the journal: writes that fail, that
// fail although they were made, that are made late, that take long, and a store
// that is busy for a while or latched for good.
type stormJournal struct {
	journal.Journal
	mu    sync.Mutex
	r     *rand.Rand
	rate  float64
	late  bool
	dead  bool
	burst int
	wg    *sync.WaitGroup
}

var errBusyStorm = errors.New("storm: busy")

func (f *stormJournal) roll() (before, after time.Duration, mode int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.r.Float64() < f.rate {
		before = time.Duration(f.r.Int64N(int64(2 * time.Second)))
	}
	if f.r.Float64() < f.rate {
		after = time.Duration(f.r.Int64N(int64(2 * time.Second)))
	}
	if f.dead {
		return 0, 0, 1
	}
	if f.burst > 0 {
		f.burst--
		return before, after, 1
	}
	if f.r.Float64() < f.rate {
		mode = 1 + f.r.IntN(5)
		if mode == 3 && !f.late {
			mode = 2
		}
		switch mode {
		case 4: // latched from now on; this one was written
			if f.r.IntN(10) == 0 {
				f.dead = true
			}
			mode = 2
		case 5:
			f.burst = f.r.IntN(12)
			mode = 1
		}
	}
	return
}

func stormStep[T any](f *stormJournal, ctx context.Context, do func(ctx context.Context) (T, error)) (T, error) {
	var zero T
	before, after, mode := f.roll()
	sleep := func(d time.Duration) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if err := sleep(before); err != nil {
		return zero, err
	}
	switch mode {
	case 1:
		return zero, errBusyStorm
	case 2:
		_, _ = do(context.WithoutCancel(ctx))
		_ = sleep(after)
		return zero, errBusyStorm
	case 3:
		f.wg.Add(1)
		go func() {
			defer f.wg.Done()
			time.Sleep(10 * after)
			_, _ = do(context.WithoutCancel(ctx))
		}()
		return zero, errBusyStorm
	}
	v, err := do(ctx)
	if err == nil {
		if e := sleep(after); e != nil { // the caller left; it was written
			return zero, e
		}
	}
	return v, err
}

func (f *stormJournal) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	if _, after, mode := f.roll(); mode == 0 {
		e, err := f.Journal.Begin(ctx, in)
		select {
		case <-time.After(after):
		case <-ctx.Done():
			return journal.Entry{}, context.Cause(ctx)
		}
		return e, err
	}
	return stormStep(f, ctx, func(ctx context.Context) (journal.Entry, error) { return f.Journal.Begin(ctx, in) })
}
func (f *stormJournal) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return stormStep(f, ctx, func(ctx context.Context) (journal.Entry, error) { return f.Journal.Renew(ctx, e, n) })
}
func (f *stormJournal) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	return stormStep(f, ctx, func(ctx context.Context) (journal.Entry, error) { return f.Journal.Finish(ctx, e, s, n) })
}
func (f *stormJournal) Release(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return stormStep(f, ctx, func(ctx context.Context) (journal.Entry, error) { return f.Journal.Release(ctx, e, n) })
}
func (f *stormJournal) Decide(ctx context.Context, op journal.Operation, d journal.Decision) (journal.Entry, error) {
	return stormStep(f, ctx, func(ctx context.Context) (journal.Entry, error) { return f.Journal.Decide(ctx, op, d) })
}
func (f *stormJournal) Get(ctx context.Context, op journal.Operation) (journal.Entry, error) {
	return stormStep(f, ctx, func(ctx context.Context) (journal.Entry, error) { return f.Journal.Get(ctx, op) })
}
func (f *stormJournal) Pending(ctx context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		for e, err := range f.Journal.Pending(ctx) {
			if _, _, mode := f.roll(); mode == 1 {
				yield(journal.Entry{}, errBusyStorm)
				return
			}
			if !yield(e, err) {
				return
			}
		}
	}
}

type stormCall struct {
	start, end time.Time // end zero: runs
	outcome    idem.Outcome
	err        string
	key        string
}

type stormOp struct {
	id     string
	mu     sync.Mutex
	amount int
	calls  []*stormCall
}

type storm struct {
	window time.Duration
	t      *testing.T
	s      *fakeserver.Server
	mem    *journal.Memory
	ops    []*stormOp
	late   bool
	seal   func(*idem.Transport)
	wg     sync.WaitGroup
	mu     sync.Mutex
	procs  []*stormProc
	rate   float64
	bad    []string
	counts map[string]int
}

type stormProc struct {
	f *stormJournal
	c *idem.Client
}

func (st *storm) fail(format string, a ...any) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.bad = append(st.bad, fmt.Sprintf(format, a...))
}
func (st *storm) note(s string) { st.mu.Lock(); st.counts[s]++; st.mu.Unlock() }

func (st *storm) process(r *rand.Rand) *stormProc {
	f := &stormJournal{Journal: st.mem, r: rand.New(rand.NewPCG(r.Uint64(), 1)), rate: st.rate, late: st.late, wg: &st.wg}
	streams := r.IntN(3) == 0
	tr := journalled(st.s, f, func(tr *idem.Transport) {
		tr.Policy.KeyWindow = st.window
		tr.Policy.AttemptTimeout = 2 * time.Second
		tr.Policy.MaxElapsed = 20 * time.Second
		tr.Policy.MaxAttempts = 1 + r.IntN(4)
		tr.Policy.ResumeWait = time.Duration(r.IntN(10)) * time.Second
		tr.Policy.MaxResumes = 1000
		if streams {
			tr.Policy.MaxResponseBuffer = -1
		}
		if st.seal != nil {
			st.seal(tr)
		}
	})
	return &stormProc{f, idem.NewClient(tr)}
}

func (st *storm) effects(op *stormOp) []fakeserver.Effect {
	return st.s.Effects(fakeserver.Filter{Reference: op.id})
}

func (st *storm) call(p *stormProc, op *stormOp, r *rand.Rand, last bool) idem.Report {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if !last && r.IntN(3) == 0 {
		time.AfterFunc(time.Duration(r.Int64N(int64(15*time.Second))), cancel)
	}
	var rep idem.Report
	ctx = idem.WithReport(charging(ctx, op.id), &rep)
	op.mu.Lock()
	c := &stormCall{start: time.Now()}
	op.calls = append(op.calls, c)
	amount := op.amount
	op.mu.Unlock()
	req := newPost(st.t, ctx, st.s.URL()+"/v1/payments", paymentJSON(op.id, amount))
	resp, err := p.c.Do(req)
	told := time.Now()
	eff := st.effects(op)
	switch rep.Outcome {
	case idem.Executed:
		if len(eff) == 0 {
			st.fail("%s: Executed, no effect (%v)", op.id, err)
		}
	case idem.NotExecuted, idem.Refused:
		// effects by others who overlap are looked at in the end; those before the start are false now
		for _, e := range eff {
			if e.At.Before(c.start) {
				st.fail("%s: %v, but effect at %v before the call began %v: %v", op.id, rep.Outcome, e.At, c.start, err)
			}
		}
	}
	if resp != nil {
		switch r.IntN(4) {
		case 0:
			time.Sleep(time.Duration(r.Int64N(int64(12 * time.Second)))) // a slow reader
			_, _ = io.Copy(io.Discard, resp.Body)
		case 1: // leaves
		default:
			_, _ = io.Copy(io.Discard, resp.Body)
		}
		_ = resp.Body.Close()
	}
	op.mu.Lock()
	c.end, c.outcome, c.key = told, rep.Outcome, rep.Key
	if rep.Reason != nil {
		c.err = rep.Reason.Error()
	}
	if rep.Outcome == idem.Refused {
		op.amount = 1999
	} else if errors.Is(rep.Reason, idem.ErrKeyReused) {
		if op.amount == 1999 {
			op.amount = fakeserver.DeclinedAmount
		} else {
			op.amount = 1999
		}
	}
	op.mu.Unlock()
	st.note("do " + rep.Outcome.String())
	return rep
}

func (st *storm) resume(p *stormProc, r *rand.Rand, ctx context.Context) idem.Resumed {
	sum, _ := p.c.Resume(ctx, func(ctx context.Context, e journal.Entry) (*http.Request, error) {
		op := st.op(e.ID)
		op.mu.Lock()
		amount := op.amount
		op.mu.Unlock()
		return newPost(st.t, ctx, st.s.URL()+"/v1/payments", paymentJSON(op.id, amount)), nil
	}, func(e journal.Entry, resp *http.Response) error {
		eff := st.effects(st.op(e.ID))
		if e.State == journal.Done && len(eff) != 1 {
			st.fail("%s: resume says done, effects %d", e.ID, len(eff))
		}
		switch r.IntN(8) {
		case 0:
			return errors.New("done: no")
		case 1:
			time.Sleep(time.Duration(r.Int64N(int64(15 * time.Second))))
		}
		return nil
	})
	if n := sum.Done + sum.Refused + sum.Unknown + sum.Skipped + sum.Expired + sum.Attention + sum.Failed; n != sum.Seen {
		st.fail("resume does not add up: %v", sum)
	}
	st.mu.Lock()
	st.counts["resumed done"] += sum.Done
	st.counts["resumed refused"] += sum.Refused
	st.counts["resumed unknown"] += sum.Unknown
	st.counts["resumed failed"] += sum.Failed
	st.counts["resumed expired"] += sum.Expired
	st.counts["resumed skipped"] += sum.Skipped
	st.mu.Unlock()
	return sum
}

func (st *storm) op(id string) *stormOp {
	n, _ := strconv.Atoi(id[2:])
	return st.ops[n]
}

func runStorm(t *testing.T, seed uint64, late, sealed, hops bool) {
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(seed, 7))
		s := fakeserver.NewInMemory()
		if seed%2 == 0 {
			s.Close()
			s = fakeserver.NewInMemoryTLS()
		}
		defer s.Close()
		window := 10 * time.Minute
		if seed%5 != 0 {
			window = 12 * time.Second
		}
		s.Apply(fakeserver.Settings{Retention: window})
		st := &storm{window: window, t: t, s: s, mem: &journal.Memory{Lease: 5 * time.Second}, late: late, rate: 0.02 + 0.2*r.Float64(), counts: map[string]int{}}
		if sealed {
			st.seal = sealing(t, 1)
		}
		require.NoError(t, s.Inject(fakeserver.Mixed(0.3+0.3*r.Float64(), int64(seed))...))
		if hops {
			require.NoError(t, s.Inject(
				fakeserver.Fault{Kind: fakeserver.Redirect, Point: fakeserver.BeforeEffect, Status: 307, Location: "/v1/payments", Rate: 0.2, Seed: int64(seed) + 1},
				fakeserver.Fault{Kind: fakeserver.Redirect, Point: fakeserver.AfterEffect, Status: 303, Rate: 0.1, Seed: int64(seed) + 1}))
		}
		for i := range 15 {
			op := &stormOp{id: fmt.Sprintf("op%d", i), amount: 1999}
			if r.IntN(4) == 0 {
				op.amount = fakeserver.DeclinedAmount
			}
			st.ops = append(st.ops, op)
		}
		for range 3 {
			st.procs = append(st.procs, st.process(r))
		}
		pick := func(r *rand.Rand) *stormProc {
			st.mu.Lock()
			defer st.mu.Unlock()
			i := r.IntN(len(st.procs))
			p := st.procs[i]
			p.f.mu.Lock()
			dead := p.f.dead
			p.f.mu.Unlock()
			if dead && r.IntN(3) == 0 || r.IntN(60) == 0 { // restarted, or killed with what it did
				p.f.mu.Lock()
				p.f.dead = true
				p.f.mu.Unlock()
				st.procs[i] = st.process(r)
			}
			return st.procs[i]
		}
		var workers sync.WaitGroup
		for range 8 {
			wr := rand.New(rand.NewPCG(r.Uint64(), 3))
			workers.Go(func() {
				for range 25 {
					p := pick(wr)
					switch n := wr.IntN(20); {
					case n < 14:
						op := st.ops[wr.IntN(len(st.ops))]
						if wr.IntN(4) == 0 {
							s.Refuse(1)
						}
						st.call(p, op, wr, false)
					case n < 17:
						ctx, cancel := context.WithTimeout(context.Background(), time.Duration(wr.Int64N(int64(time.Minute))))
						st.resume(p, wr, ctx)
						cancel()
					case n < 18:
						_, _ = st.mem.Sweep(context.Background(), 0)
					case n < 19: // a person who has looked
						op := st.ops[wr.IntN(len(st.ops))]
						if len(st.effects(op)) > 0 {
							_ = p.c.Settle(context.Background(), chargeOf(op.id), idem.Executed, "", "seen")
						}
					default:
						time.Sleep(time.Duration(wr.Int64N(int64(40 * time.Second))))
					}
				}
			})
		}
		workers.Wait()
		st.wg.Wait()
		// calm
		s.ClearFaults()
		st.rate, st.late = 0, false
		calm := st.process(r)
		time.Sleep(time.Minute) // slow deliveries and leases end
		for range 4 {
			st.resume(calm, rand.New(rand.NewPCG(1, 1)), context.Background())
		}
		for e, err := range st.mem.Pending(context.Background()) {
			require.NoError(t, err)
			op := st.op(e.ID)
			if e.Claimed(time.Now()) {
				st.fail("%s claimed for ever: %+v", e.ID, e)
				continue
			}
			left := st.window - 2*time.Second - time.Since(e.FirstSend)
			switch {
			case e.Clear:
				st.note("end clear")
				if n := len(st.effects(op)); n != 0 {
					st.fail("%s is clear but has %d effects", e.ID, n)
				}
			case left <= 0 && !e.FirstSend.IsZero():
				st.note("end expired")
			default:
				st.note("end pending")
			}
		}
		for _, op := range st.ops {
			eff := st.effects(op)
			if len(eff) > 1 {
				st.fail("%s: %d EFFECTS: %+v", op.id, len(eff), eff)
			}
			e, err := st.mem.Get(context.Background(), chargeOf(op.id))
			if err == nil {
				switch {
				case e.State == journal.Done && len(eff) != 1:
					st.fail("%s done, effects %d", op.id, len(eff))
				case e.State == journal.Refused && len(eff) != 0:
					st.fail("%s refused, effects %d: %+v", op.id, len(eff), e)
				}
			}
			// a claim that nothing was done holds until somebody calls
			for i, c := range op.calls {
				if c.outcome != idem.NotExecuted && c.outcome != idem.Refused {
					continue
				}
				for _, ef := range eff {
					if ef.At.Before(c.start) {
						continue // judged then
					}
					excused := false
					for k, d := range op.calls {
						if k != i && !d.end.Before(c.start) && !d.start.After(ef.At) {
							excused = true
						}
					}
					if !excused {
						st.fail("%s: told %v (%s) at %v, effect at %v by nobody's call; calls %d", op.id, c.outcome, c.err, c.end, ef.At, len(op.calls))
					}
				}
			}
		}
		for _, b := range st.bad {
			t.Errorf("seed %d, late %v, sealed %v, hops %v: %s", seed, late, sealed, hops, b)
		}
		t.Log(st.counts, "effects", len(s.Effects()), "sends", len(s.Sends()))
	})
}

// Many callers, resumes, sweeps and decisions at once, over a server with faults
// and a journal that fails at any step, by processes that are killed and started
// again: at most one effect for each operation, and no claim that the ledger does
// not bear out, at the time or in the end.
func TestStormsOverAFailingJournalMakeOneEffectAndNoFalseClaim(t *testing.T) {
	for i := range *stormsFlag {
		seed := *stormFromFlag + uint64(i) + 1
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { runStorm(t, seed, seed%3 == 0, seed%4 == 0, seed%7 == 0) })
	}
}
