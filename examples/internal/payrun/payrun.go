// Package payrun is what the examples charge and naive have in common: the
// payments, the faults, the workers, and the count at the end. The count is
// made from the server's ledger of effects and from every claim of the
// client; nothing in it takes the client's word.
package payrun

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// MaxCalls is how often a worker calls one payment before it gives up. A few are
// enough, unless the machine is so slow that most answers come too late.
const MaxCalls = 20

// Options of a run.
type Options struct {
	N       int    // payments
	Seed    int64  // of payments and faults
	Faults  string // "mixed", "storm" or "none"
	Workers int
}

// Flags declares the options on f, with their defaults.
func (o *Options) Flags(f *flag.FlagSet) {
	f.IntVar(&o.N, "n", 1000, "number of payments")
	f.Int64Var(&o.Seed, "seed", 1, "seed of the payments and of the faults")
	f.StringVar(&o.Faults, "faults", "mixed", "mixed (35 of 100 sends meet one), storm (60 of 100) or none")
	f.IntVar(&o.Workers, "workers", 16, "number of workers that pay at the same time")
}

// String says what is run.
func (o Options) String() string {
	return fmt.Sprintf("%d payments, %d workers, faults %s, seed %d, over loopback", o.N, o.Workers, o.Faults, o.Seed)
}

func (o Options) faults() ([]fakeserver.Fault, error) {
	switch o.Faults {
	case "none":
		return nil, nil
	case "mixed":
		return fakeserver.Mixed(0.35, o.Seed), nil
	case "storm":
		return fakeserver.Storm(o.Seed), nil
	}
	return nil, fmt.Errorf("-faults %q: must be mixed, storm or none", o.Faults)
}

// Serve checks the options and starts a server with their faults.
func (o Options) Serve(settings fakeserver.Settings) (*fakeserver.Server, error) {
	if o.N < 1 || o.Workers < 1 {
		return nil, fmt.Errorf("-n and -workers: must be at least 1")
	}
	faults, err := o.faults()
	if err != nil {
		return nil, err
	}
	s, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	settings.ForgetHeaders = true // nobody looks at them here
	s.Apply(settings)
	if err := s.Inject(faults...); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Payment is what a customer owes. ID names the payment itself, not the
// order: another payment for the order would be "order-0001/2".
type Payment struct {
	ID     string
	Amount int64
}

// Body is the request.
func (p Payment) Body() string {
	return fmt.Sprintf(`{"amount":%d,"currency":"eur","reference":%q}`, p.Amount, p.ID)
}

func (o Options) payments() []Payment {
	random := rand.New(rand.NewPCG(uint64(o.Seed), 0))
	all := make([]Payment, o.N)
	for i := range all {
		all[i] = Payment{ID: fmt.Sprintf("order-%04d/1", i+1), Amount: 100 + random.Int64N(9900)}
	}
	return all
}

// Call is one call of a payment, and what the client claims after it.
type Call struct {
	Began, Ended time.Time
	Claim        idem.Outcome
	Why          string      // what it says if it does not claim "executed"
	Attempts     int         // that it made
	Report       idem.Report // zero: the client does not make one
}

// Run is what happened.
type Run struct {
	Options
	Payments []Payment
	Calls    [][]Call // of each payment
	Effects  []fakeserver.Effect
	Sends    []fakeserver.Send
	Took     time.Duration
}

// Do has the workers make every payment through pay. A payment whose call
// does not end with "executed" is called again after a pause, the same
// payment, as a worker would that takes it from its queue once more. Do closes
// the server.
func Do(ctx context.Context, o Options, s *fakeserver.Server, p Progress, pay func(context.Context, Payment) Call) *Run {
	defer s.Close()
	r := &Run{Options: o, Payments: o.payments(), Calls: make([][]Call, o.N)}
	began := time.Now()
	var next, done, attempts, again atomic.Int64
	stop := p.follow(func() string {
		return fmt.Sprintf("%d of %d payments done, %d attempts, %d called again, %.1fs",
			done.Load(), o.N, attempts.Load(), again.Load(), time.Since(began).Seconds())
	})
	var workers sync.WaitGroup
	for range o.Workers {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < o.N; i = int(next.Add(1)) - 1 {
				for {
					c := pay(ctx, r.Payments[i])
					r.Calls[i] = append(r.Calls[i], c)
					attempts.Add(int64(c.Attempts))
					if c.Claim == idem.Executed || len(r.Calls[i]) == MaxCalls {
						break
					}
					again.Add(1)
					time.Sleep(min(time.Duration(len(r.Calls[i]))*200*time.Millisecond, 2*time.Second))
				}
				done.Add(1)
			}
		})
	}
	workers.Wait()
	stop()
	r.Took = time.Since(began)
	time.Sleep(o.stragglers()) // before anything is counted
	s.Close()
	r.Effects, r.Sends = s.Effects(), s.Sends()
	return r
}

// stragglers is how long the server may still work on requests whose client
// has left, and the network may hold back copies.
func (o Options) stragglers() time.Duration {
	faults, _ := o.faults()
	longest := time.Duration(0)
	for _, f := range faults {
		longest = max(longest, f.Delay)
	}
	return longest + 100*time.Millisecond
}
