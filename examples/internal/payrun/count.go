package payrun

import (
	"fmt"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// Count compares the ledger with the claims.
type Count struct {
	Operations int
	Effects    int
	// Doubled is the operations with more than one effect.
	Doubled int
	// Lost is the operations without an effect at the end.
	Lost int
	// FalseSuccess is the calls that claimed "executed" while there was no
	// effect yet.
	FalseSuccess int
	// FalseFailure is the calls that claimed "refused" or "not executed"
	// although what had been sent until then had an effect, then or later.
	FalseFailure int
	// Unknown is the operations that were not executed, as far as the client
	// knows, after MaxCalls calls.
	Unknown int
}

// String is the last line of the examples.
func (c Count) String() string {
	return fmt.Sprintf("operations=%d effects=%d doubled=%d lost=%d false_success=%d false_failure=%d unknown=%d",
		c.Operations, c.Effects, c.Doubled, c.Lost, c.FalseSuccess, c.FalseFailure, c.Unknown)
}

// Right reports whether every operation had exactly one effect, nothing else
// had one, and every claim was true.
func (c Count) Right() bool {
	return c.Effects == c.Operations && c.Doubled == 0 && c.Lost == 0 && c.FalseSuccess == 0 && c.FalseFailure == 0 && c.Unknown == 0
}

// Count counts.
func (r *Run) Count() Count {
	c := Count{Operations: len(r.Payments), Effects: len(r.Effects)}
	effects := r.EffectsOf()
	arrived := make(map[int]time.Time, len(r.Sends))
	for _, s := range r.Sends {
		arrived[s.N] = s.At
	}
	for i, p := range r.Payments {
		mine, calls := effects[p.ID], r.Calls[i]
		switch {
		case len(mine) == 0:
			c.Lost++
		case len(mine) > 1:
			c.Doubled++
		}
		if calls[len(calls)-1].Claim != idem.Executed {
			c.Unknown++
		}
		for k, call := range calls {
			happened, coming := false, false
			for _, e := range mine {
				happened = happened || !e.At.After(call.Ended)
				// What a later call sends does not make an earlier claim false.
				coming = coming || k == len(calls)-1 || arrived[e.Send].Before(calls[k+1].Began)
			}
			switch call.Claim {
			case idem.Executed:
				if !happened {
					c.FalseSuccess++
				}
			case idem.Refused, idem.NotExecuted:
				if coming {
					c.FalseFailure++
				}
			}
		}
	}
	return c
}

// EffectsOf is the ledger by payment.
func (r *Run) EffectsOf() map[string][]fakeserver.Effect {
	by := make(map[string][]fakeserver.Effect, len(r.Payments))
	for _, e := range r.Effects {
		by[e.Reference] = append(by[e.Reference], e)
	}
	return by
}
