package idem

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

var allEvidence = []evidence{mayBeDone, neverSent, done, refusedByOp, refusedBefore, elsewhere}

// sequences calls f with every sequence of up to length attempts.
func sequences(length int, f func([]evidence)) {
	var extend func([]evidence)
	extend = func(seq []evidence) {
		f(seq)
		if len(seq) == length {
			return
		}
		for _, e := range allEvidence {
			extend(append(slices.Clone(seq), e))
		}
	}
	extend(nil)
}

func foldOf(seq []evidence, claimable bool) Outcome {
	attempts := make([]Attempt, len(seq))
	for i, e := range seq {
		attempts[i].evidence = e
	}
	return fold(attempts, claimable)
}

// The rules of the outcome, each said by itself, over every sequence of up to
// six attempts.
func TestOutcomeFollowsFromWhatTheAttemptsShowed(t *testing.T) {
	n := 0
	sequences(6, func(seq []evidence) {
		n++
		carries := slices.DeleteFunc(slices.Clone(seq), func(e evidence) bool { return e == elsewhere })
		has := func(e evidence) bool { return slices.Contains(carries, e) }
		for _, claimable := range []bool{true, false} {
			got := foldOf(seq, claimable)
			fail := func(rule string) {
				t.Fatalf("%v, claimable %v: %v: %s", seq, claimable, got, rule)
			}
			if (got == Executed) != has(done) {
				fail("executed exactly if an attempt was")
			}
			if got == NotExecuted && (!claimable || slices.ContainsFunc(carries, func(e evidence) bool { return e != neverSent })) {
				fail("not executed only if no attempt reached the server, and nobody can have used the key before")
			}
			if got == Refused {
				last := -1
				for i, e := range carries {
					if e == refusedByOp {
						last = i
					}
				}
				own := last >= 0 && !slices.Contains(carries[last:], mayBeDone)
				other := has(refusedBefore) && !has(mayBeDone) && claimable
				if !own && !other {
					fail("refused only by the operation itself, or by another 4xx with no unknown beside it")
				}
			}
			if len(carries) > 0 && carries[len(carries)-1] == refusedByOp && !has(done) && got != Refused {
				fail("the operation's own answer is believed")
			}
			if got == Unknown && claimable && !has(mayBeDone) {
				fail("unknown without a reason")
			}
			if foldOf(carries, claimable) != got {
				fail("a hop that carries no effect says nothing")
			}
		}
	})
	require.Equal(t, 1+6+36+216+1296+7776+46656, n)
}

func TestMoreUncertaintyNeverMakesAClaim(t *testing.T) {
	sequences(4, func(seq []evidence) {
		for _, claimable := range []bool{true, false} {
			for _, longer := range [][]evidence{
				append([]evidence{mayBeDone}, seq...),
				append(slices.Clone(seq), mayBeDone),
			} {
				before, after := foldOf(seq, claimable), foldOf(longer, claimable)
				if after != before && after != Unknown {
					t.Fatalf("%v was %v, and %v is %v", seq, before, longer, after)
				}
			}
		}
	})
}

func TestZeroEvidenceAndOutcomeClaimNothing(t *testing.T) {
	var e evidence
	var o Outcome
	require.Equal(t, mayBeDone, e)
	require.Equal(t, Unknown, o)
	require.Equal(t, Unknown, e.outcome())
	require.Equal(t, Unknown, foldOf([]evidence{e}, true))
}

func TestEarlierUnknownLooksAtAllButTheLast(t *testing.T) {
	sequences(4, func(seq []evidence) {
		attempts := make([]Attempt, len(seq))
		for i, e := range seq {
			attempts[i].evidence = e
		}
		want := len(seq) > 1 && slices.Contains(seq[:len(seq)-1], mayBeDone)
		require.Equal(t, want, earlierUnknown(attempts), fmt.Sprint(seq))
	})
}

// What each answer of a keyed write shows by itself.
func TestEvidenceOfAnAnswer(t *testing.T) {
	fresh, known := circumstances{keyed: true, repeatable: true}, circumstances{keyed: true, repeatable: true, sentBefore: true}
	for status := 100; status < 600; status++ {
		want := mayBeDone
		switch {
		case status/100 == 2 || status == 303:
			want = done
		case slices.Contains([]int{408, 409, 425, 429, 499}, status):
		case status/100 == 4:
			want = refusedBefore
		}
		require.Equal(t, want, (&result{status: status}).evidenceOf(fresh), status)
		require.Equal(t, want, (&result{status: status}).evidenceOf(known), status)
	}
	for _, c := range []struct {
		name string
		r    result
		in   circumstances
		want evidence
	}{
		{"a lost answer", result{err: errAttemptLimit}, fresh, mayBeDone},
		{"a cut answer, whatever its status said", result{err: errAttemptLimit, status: 201}, fresh, mayBeDone},
		{"a connection that was never made", result{err: errAttemptLimit, notSent: true}, fresh, neverSent},
		{"a replayed refusal", result{status: 400, marks: markReplay}, known, refusedByOp},
		{"a declined card", result{status: 402, marks: markRefusal}, fresh, refusedByOp},
		{"a replayed 5xx", result{status: 500, marks: markReplay}, known, mayBeDone},
		{"a replayed success", result{status: 201, marks: markReplay}, known, done},
		{"in progress", result{status: 409, marks: markInProgress}, known, mayBeDone},
		{"in progress, with a status of its own", result{status: 422, marks: markInProgress}, known, mayBeDone},
		{"a reused key", result{status: 422, marks: markMismatch}, known, mayBeDone},
		{"already done", result{status: 409, marks: markAlreadyDone}, known, done},
		{"already done, says a server that never saw the key", result{status: 409, marks: markAlreadyDone}, fresh, mayBeDone},
		{"a replayed 409", result{status: 409, marks: markReplay}, known, mayBeDone},
	} {
		require.Equal(t, c.want, c.r.evidenceOf(c.in), c.name)
	}
}
