package fakeserver

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
)

// AssertOneEffectPerOperation fails the test unless every operation had exactly one effect, and unless there is at least
// one. With filters it looks at the operations with a send that matches any of them. The message is a timeline of sends:
// keys, faults, answers, effects. t is a *testing.T or alike; the result says whether all is well.
//
// An operation is what was sent to one path for one reference, whatever key and credential it came with; without a
// reference, what was sent with one key. Sends with neither are left out, and so are PUT and DELETE without a key.
//
// An operation that rightly ended without an effect is wrong here: one that was refused, and, with [StoreFailures], one
// whose first send met a 5xx before the effect, which is replayed for the whole retention. Filter such out, or take
// [Server.AssertAtMostOneEffectPerOperation].
func (s *Server) AssertOneEffectPerOperation(t interface {
	Helper()
	Errorf(format string, args ...any)
}, filters ...Filter) bool {
	t.Helper()
	return s.assertEffects(t, 1, "had not exactly one effect", filters)
}

// AssertAtMostOneEffectPerOperation is [Server.AssertOneEffectPerOperation] for a run in which operations may rightly end
// without an effect. It does not see a client that gives up too early.
func (s *Server) AssertAtMostOneEffectPerOperation(t interface {
	Helper()
	Errorf(format string, args ...any)
}, filters ...Filter) bool {
	t.Helper()
	return s.assertEffects(t, 0, "had more than one effect", filters)
}

// assertEffects wants least to 1 effects of every operation.
func (s *Server) assertEffects(t interface {
	Helper()
	Errorf(format string, args ...any)
}, least int, complaint string, filters []Filter) bool {
	t.Helper()
	asked := map[int]bool{}
	for _, n := range s.Sends(filters...) {
		asked[n.N] = true
	}
	operations := slices.DeleteFunc(operationsOf(s.Sends()), func(o *operation) bool {
		return !slices.ContainsFunc(o.sends, func(n Send) bool { return asked[n.N] })
	})
	if len(operations) == 0 {
		t.Errorf("fakeserver: no operation was sent")
		return false
	}
	var wrong []*operation
	effects := map[int]Effect{}
	for _, o := range operations {
		if o.effects < least || o.effects > 1 {
			wrong = append(wrong, o)
		}
	}
	if len(wrong) == 0 {
		return true
	}
	for _, e := range s.Effects() {
		effects[e.N] = e
	}
	var b strings.Builder
	fmt.Fprintf(&b, "fakeserver: %d of %d operations %s", len(wrong), len(operations), complaint)
	for i, o := range wrong {
		if i == maxTimelines {
			fmt.Fprintf(&b, "\n... and %d more", len(wrong)-i)
			break
		}
		o.timeline(&b, effects)
	}
	t.Errorf("%s", b.String())
	return false
}

const maxTimelines = 5

type operation struct {
	path, reference, key string // path: with the method
	sends                []Send
	effects              int
}

// operationsOf groups sends, in the order of their first ones.
func operationsOf(sends []Send) []*operation {
	type name struct{ path, reference, key string }
	of := func(n Send) name { return name{n.Method + " " + n.Path, n.Reference, n.Key} }
	known := map[name]string{} // the reference that came with a key, for sends whose body was never read
	for _, n := range sends {
		if n.Key != "" && n.Reference != "" {
			known[name{path: of(n).path, key: n.Key}] = n.Reference
		}
	}
	found := map[name]*operation{}
	var all []*operation
	for _, n := range sends {
		unkeyed := n.Key == "" && n.Method != http.MethodPost && n.Method != http.MethodPatch
		if n.Endpoint == "" || safe(n.Method) || unkeyed {
			continue
		}
		at := of(n)
		if at.reference == "" && at.key != "" {
			at.reference = known[name{path: at.path, key: at.key}]
		}
		if at.reference != "" {
			at.key = ""
		}
		if at.reference == "" && at.key == "" {
			continue
		}
		o := found[at]
		if o == nil {
			o = &operation{path: at.path, reference: at.reference, key: at.key}
			found[at] = o
			all = append(all, o)
		}
		o.sends = append(o.sends, n)
		if n.Effect > 0 {
			o.effects++
		}
	}
	return all
}

// timeline writes what happened to the operation.
func (o *operation) timeline(b *strings.Builder, effects map[int]Effect) {
	name := "reference " + o.reference
	if o.reference == "" {
		name = "key " + o.key
	}
	fmt.Fprintf(b, "\n\n%s, %s: %d effects, %d sends", o.path, name, o.effects, len(o.sends))
	var keys []string
	for _, n := range o.sends {
		if !slices.Contains(keys, n.Key) {
			keys = append(keys, n.Key)
		}
	}
	if len(keys) > 1 {
		fmt.Fprintf(b, ", %d keys", len(keys))
	}
	for _, n := range o.sends {
		fmt.Fprintf(b, "\n  %9s  send %d", "+"+n.At.Sub(o.sends[0].At).Round(time.Millisecond).String(), n.N)
		for _, part := range []struct {
			set  bool
			text string
		}{
			{n.Key != "", fmt.Sprintf("key %s (%d)", n.Key, n.KeySend)},
			{n.Key == "", "no key"},
			{n.Caller != "", n.Caller},
			{true, fmt.Sprintf("connection %d", n.Conn)},
			{n.Duplicate, "delivered again by the network"},
			{n.Fault != "", n.Fault},
			{n.Status != 0, fmt.Sprintf("answer %d", n.Status)},
			{n.Status == 0, "no answer"},
			{n.Replayed, "replayed"},
		} {
			if part.set {
				b.WriteString(", " + part.text)
			}
		}
		if e, ok := effects[n.Effect]; ok {
			fmt.Fprintf(b, ", EFFECT %d: %s %s", e.N, e.Kind, e.ID)
		}
	}
}
