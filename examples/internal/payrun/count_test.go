package payrun

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// at is n seconds into a run.
func at(n int) time.Time { return time.Unix(1_700_000_000, 0).Add(time.Duration(n) * time.Second) }

// call began at second from and ended at second to.
func call(from, to int, claim idem.Outcome) Call {
	return Call{Began: at(from), Ended: at(to), Claim: claim}
}

// effect happened at second when, by a send that arrived at second sent.
type effect struct{ sent, when int }

func TestCountSeesEveryDifferenceBetweenLedgerAndClaims(t *testing.T) {
	for name, c := range map[string]struct {
		calls   []Call
		effects []effect
		want    Count
	}{
		"one effect, claimed":                        {[]Call{call(0, 2, idem.Executed)}, []effect{{1, 1}}, Count{Effects: 1}},
		"two effects":                                {[]Call{call(0, 3, idem.Executed)}, []effect{{1, 1}, {2, 2}}, Count{Effects: 2, Doubled: 1}},
		"no effect, unknown":                         {[]Call{call(0, 2, idem.Unknown)}, nil, Count{Lost: 1, Unknown: 1}},
		"no effect, claimed":                         {[]Call{call(0, 2, idem.Executed)}, nil, Count{Lost: 1, FalseSuccess: 1}},
		"the effect comes after the claim":           {[]Call{call(0, 2, idem.Executed)}, []effect{{1, 3}}, Count{Effects: 1, FalseSuccess: 1}},
		"one effect, claimed to be refused":          {[]Call{call(0, 2, idem.Refused)}, []effect{{1, 1}}, Count{Effects: 1, FalseFailure: 1, Unknown: 1}},
		"the effect comes after the refusal":         {[]Call{call(0, 2, idem.NotExecuted)}, []effect{{1, 3}}, Count{Effects: 1, FalseFailure: 1, Unknown: 1}},
		"unknown, then executed":                     {[]Call{call(0, 2, idem.Unknown), call(4, 6, idem.Executed)}, []effect{{1, 1}}, Count{Effects: 1}},
		"not executed, then executed by the second":  {[]Call{call(0, 2, idem.NotExecuted), call(4, 6, idem.Executed)}, []effect{{5, 5}}, Count{Effects: 1}},
		"not executed, but executed by the first":    {[]Call{call(0, 2, idem.NotExecuted), call(4, 6, idem.Executed)}, []effect{{1, 5}}, Count{Effects: 1, FalseFailure: 1}},
		"an effect of nobody's counts as an effect":  {[]Call{call(0, 2, idem.Executed)}, []effect{{1, 1}, {-1, 1}}, Count{Effects: 2}},
		"executed, and the effect at the same time":  {[]Call{call(0, 2, idem.Executed)}, []effect{{1, 2}}, Count{Effects: 1}},
		"refused, and no effect, is not yet settled": {[]Call{call(0, 2, idem.Refused)}, nil, Count{Lost: 1, Unknown: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			r := Run{Payments: []Payment{{ID: "order-1/1"}}, Calls: [][]Call{c.calls}}
			for i, e := range c.effects {
				reference := "order-1/1"
				if e.sent < 0 {
					reference = "somebody else's"
				}
				r.Sends = append(r.Sends, fakeserver.Send{N: i + 1, At: at(e.sent)})
				r.Effects = append(r.Effects, fakeserver.Effect{N: i + 1, Reference: reference, At: at(e.when), Send: i + 1})
			}
			c.want.Operations = 1
			got := r.Count()
			require.Equal(t, c.want, got)
			require.Equal(t, c.want == Count{Operations: 1, Effects: 1}, got.Right())
		})
	}
}

func TestTheLastLineHasItsForm(t *testing.T) {
	require.Equal(t, "operations=1 effects=2 doubled=3 lost=4 false_success=5 false_failure=6 unknown=7",
		Count{1, 2, 3, 4, 5, 6, 7}.String())
}
