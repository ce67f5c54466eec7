package fakeserver

import (
	"math"
	"time"
)

// Mixed is a mix of faults for load tests: together they hit the given share of all sends, at most one each, half of them
// before the effect and half after its beginning. Hangs are among them (about one fault in thirteen), so the client needs
// a limit per attempt; slices.DeleteFunc takes a kind out. With [StoreFailures] its 5xx before the effect are final: such
// operations end without an effect. A rate of 0 or less gives none, above 1 counts as 1.
func Mixed(rate float64, seed int64) []Fault {
	return split(rate, seed,
		[]weighted{
			{3, Fault{Kind: Reset, Point: BeforeEffect}},
			{2, Fault{Kind: Close, Point: BeforeEffect}},
			{2, Fault{Kind: Status, Point: BeforeEffect, Status: 503}},
			{1, Fault{Kind: Status, Point: BeforeEffect, Status: 500}},
			{2, Fault{Kind: Status, Point: BeforeEffect, Status: 429, RetryAfter: "0"}},
			{1, Fault{Kind: HTML, Point: BeforeEffect, Status: 502}},
			{1, Fault{Kind: Hang, Point: BeforeEffect}},
		},
		[]weighted{
			{3, Fault{Kind: Reset, Point: AfterEffect}},
			{2, Fault{Kind: Close, Point: AfterEffect}},
			{2, Fault{Kind: Status, Point: AfterEffect, Status: 503}},
			{1, Fault{Kind: CutHeaders}},
			{1, Fault{Kind: CutBody, Encoding: "length"}},
			{1, Fault{Kind: CutBody, Encoding: "chunked"}},
			{1, Fault{Kind: Hang, Point: AfterEffect}},
			{1, Fault{Kind: Slow, Delay: 20 * time.Millisecond}},
			{1, Fault{Kind: Duplicate, Point: DuringEffect, Delay: 20 * time.Millisecond}}, // the client gets 409
			{1, Fault{Kind: Duplicate, Point: BeforeEffect}},
		},
	)
}

// Storm is a heavier mix: six of ten sends meet a fault, of every kind that a later send of the same key can get over
// (but for [StoreFailures], as with Mixed).
func Storm(seed int64) []Fault {
	return split(0.6, seed,
		[]weighted{
			{3, Fault{Kind: Reset, Point: BeforeEffect}},
			{1, Fault{Kind: Reset, Point: BeforeEffect, Bytes: -1}},
			{2, Fault{Kind: Close, Point: BeforeEffect}},
			{3, Fault{Kind: Status, Point: BeforeEffect, Status: 503}},
			{1, Fault{Kind: Status, Point: BeforeEffect, Status: 503, RetryAfter: "1"}},
			{1, Fault{Kind: Status, Point: BeforeEffect, Status: 504}},
			{2, Fault{Kind: Status, Point: BeforeEffect, Status: 429, RetryAfter: "0"}},
			{1, Fault{Kind: EarlyAnswer, Status: 503}},
			{1, Fault{Kind: HTML, Point: BeforeEffect, Status: 502}},
			{1, Fault{Kind: Garbage, Point: BeforeEffect}},
			{2, Fault{Kind: Hang, Point: BeforeEffect}},
			{1, Fault{Kind: Stuck, Delay: 500 * time.Millisecond}},
		},
		[]weighted{
			{3, Fault{Kind: Reset, Point: AfterEffect}},
			{2, Fault{Kind: Close, Point: AfterEffect}},
			{2, Fault{Kind: Status, Point: AfterEffect, Status: 500}},
			{1, Fault{Kind: Status, Point: AfterEffect, Status: 429}},
			{1, Fault{Kind: HTML, Point: AfterEffect, Status: 502}},
			{1, Fault{Kind: Garbage, Point: AfterEffect}},
			{1, Fault{Kind: CutHeaders}},
			{1, Fault{Kind: CutBody, Encoding: "length"}},
			{1, Fault{Kind: CutBody, Encoding: "chunked"}},
			{1, Fault{Kind: CutBody, Encoding: "gzip"}},
			{2, Fault{Kind: Hang, Point: AfterEffect}},
			{1, Fault{Kind: Slow, Delay: 200 * time.Millisecond}},
			{1, Fault{Kind: Late, Delay: 200 * time.Millisecond}},
			{1, Fault{Kind: Stale}},
			{1, Fault{Kind: Duplicate, Point: BeforeEffect}},
			{1, Fault{Kind: Duplicate, Point: DuringEffect, Delay: 200 * time.Millisecond}},
			{1, Fault{Kind: Duplicate, Point: AfterEffect, Delay: 200 * time.Millisecond}},
		},
	)
}

type weighted struct {
	weight float64
	Fault
}

// split gives each half of the mix half of the rate, by weight. The common seed makes them one draw.
func split(rate float64, seed int64, halves ...[]weighted) []Fault {
	if rate = min(rate, 1); !(rate > 0) || math.IsNaN(rate) {
		return nil
	}
	var mix []Fault
	for _, half := range halves {
		total := 0.0
		for _, w := range half {
			total += w.weight
		}
		for _, w := range half {
			f := w.Fault
			f.Rate, f.Seed = rate/2*w.weight/total, seed
			mix = append(mix, f)
		}
	}
	return mix
}
