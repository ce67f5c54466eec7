package main

import (
	"cmp"
	"slices"
	"strings"

	"github.com/idem-go/idem/fakeserver"
)

// ledger finds the effects of an operation in all that happened, also those of sends that the page does not go back to.
// It takes in only what is new at each look.
type ledger struct {
	seen        int
	byReference map[string][]fakeserver.Effect
	byKey       map[string][]fakeserver.Effect
}

func (l *ledger) add(effects []fakeserver.Effect) {
	if l.byReference == nil {
		l.byReference, l.byKey = map[string][]fakeserver.Effect{}, map[string][]fakeserver.Effect{}
	}
	for _, e := range effects {
		// A change of status has the payment's reference, but is an operation of its own.
		if e.Reference != "" && e.Kind != "status" {
			l.byReference[e.Reference] = append(l.byReference[e.Reference], e)
		}
		if e.Key != "" {
			l.byKey[e.Key] = append(l.byKey[e.Key], e)
		}
		l.seen = max(l.seen, e.N)
	}
}

// earlier is an effect of a send before those that are shown.
type earlier struct {
	fakeserver.Effect
	path string // that was asked for, with the method
}

// before gives the effects that an operation had by sends before number first.
func (c *console) before(first int, of name) []earlier {
	c.mu.Lock()
	c.ledger.add(c.server.EffectsAfter(c.ledger.seen))
	all := c.ledger.byReference[of.what]
	if of.by != "reference" {
		all = c.ledger.byKey[of.what]
	}
	all = slices.Clone(all)
	c.mu.Unlock()
	var found []earlier
	for _, e := range all {
		if e.Send >= first || of.by != "reference" && e.Caller != of.caller {
			continue
		}
		path := c.pathOf(e)
		if of.by != "reference" && path != of.path {
			continue
		}
		found = append(found, earlier{e, path})
	}
	return found
}

// pathOf looks up what the send of an effect asked for: refunds of two payments differ in nothing else.
func (c *console) pathOf(e fakeserver.Effect) string {
	if e.Key != "" && strings.Contains(e.Endpoint, "{") {
		sends := c.server.Sends(fakeserver.Filter{Key: e.Key, Kind: e.Kind})
		at, ok := slices.BinarySearchFunc(sends, e.Send, func(n fakeserver.Send, want int) int { return cmp.Compare(n.N, want) })
		if ok {
			return sends[at].Method + " " + sends[at].Path
		}
	}
	return e.Endpoint
}
