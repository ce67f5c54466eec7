package main

import (
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/idem-go/idem/fakeserver"
)

// tone is how a thing is drawn. Its meaning is always in the text too.
type tone string

const (
	good     tone = "good"    // an answer that arrived, one effect
	replay   tone = "replay"  // a stored answer that arrived
	lost     tone = "lost"    // no usable answer, more than one effect
	refused  tone = "refused" // a 4xx or 5xx
	underWay tone = "running"
	neutral  tone = "neutral" // nothing to say, or not known
)

// operation is what the page shows as one: the sends for one reference; without a reference, those with one key.
type operation struct {
	By, Name string // "reference", "key" or "request", and which
	Caller   string
	Verdict  string
	Tone     tone
	Span     string // length of the track
	Rows     []row
}

// row is one send. Positions on the track are in percent of the operation's span.
type row struct {
	N                int
	At               string // time of day
	After            string // since the operation's first send; "" = it is the first
	Wait             string // since the end of the send before; "" = there was none, or it still ran
	Asked            string
	Key              string
	Fault            string
	Saw              string
	Tone             tone
	Effect           string
	Duplicate        bool
	Begin, Length    float64
	End              float64
	WaitAt, WaitLong float64
	EffectAt         float64
}

// name is what the sends of an operation have in common; caller and path (with the method) only without a reference.
type name struct{ by, what, caller, path string }

// timeline groups sends into operations, the newest first. before gives the effects that an operation had by sends before
// those given; nil = there were none.
func timeline(sends []fakeserver.Send, effects []fakeserver.Effect, before func(name) []earlier, now time.Time) []operation {
	caused := map[int]fakeserver.Effect{}
	for _, e := range effects {
		caused[e.N] = e
	}
	known := map[name]string{} // the reference that came with a key, for sends whose body was never understood
	keyed := func(n fakeserver.Send) name { return name{"key", n.Key, n.Caller, n.Method + " " + n.Path} }
	for _, n := range sends {
		if n.Key != "" && n.Reference != "" && known[keyed(n)] == "" {
			known[keyed(n)] = n.Reference
		}
	}
	groups := map[name][]fakeserver.Send{}
	var order []name
	for _, n := range sends {
		reference := n.Reference
		if reference == "" && n.Key != "" {
			reference = known[keyed(n)]
		}
		at := name{by: "reference", what: reference}
		switch {
		case reference == "" && n.Key != "":
			at = keyed(n)
		case reference == "":
			at = name{by: "request", what: n.Method + " " + n.Path, caller: n.Caller}
		}
		if groups[at] == nil {
			order = append(order, at)
		}
		groups[at] = append(groups[at], n)
	}
	slices.Reverse(order)
	operations := make([]operation, len(order))
	for i, at := range order {
		h := history{sends: groups[at], caused: caused}
		if before != nil && at.by != "request" {
			h.earlier = before(at)
		}
		h.cut, h.loose = before != nil, at.by == "request"
		operations[i] = h.draw(now)
		operations[i].By, operations[i].Name = at.by, at.what
	}
	return operations
}

// history is what is known of an operation.
type history struct {
	sends   []fakeserver.Send
	caused  map[int]fakeserver.Effect // by number
	earlier []earlier                 // effects by sends that are not shown
	cut     bool                      // there are sends that are not shown, perhaps some of this operation
	loose   bool                      // neither reference nor key: nothing says that it is one operation
}

// draw lays out the sends to scale.
func (h history) draw(now time.Time) operation {
	sends, caused := h.sends, h.caused
	var o operation
	start, end := sends[0].At, sends[0].At
	for _, n := range sends {
		end = latest(end, ending(n, now))
		if e, ok := caused[n.Effect]; ok {
			end = latest(end, e.At)
		}
	}
	span := max(end.Sub(start), time.Millisecond)
	percent := func(d time.Duration) float64 { return min(max(100*float64(d)/float64(span), 0), 100) }

	var callers []string
	for i, n := range sends {
		text, t := saw(n)
		r := row{
			N: n.N, At: n.At.Format("15:04:05.000"), Asked: n.Method + " " + n.Path, Fault: rounded(n.Fault),
			Saw: text, Tone: t, Duplicate: n.Duplicate, Begin: percent(n.At.Sub(start)), EffectAt: -1,
		}
		if n.Key != "" {
			r.Key = n.Key + ", send " + strconv.Itoa(n.KeySend)
		}
		if i > 0 {
			r.After = "+" + short(n.At.Sub(start))
			before := ending(sends[i-1], now)
			if wait := n.At.Sub(before); wait > 0 {
				r.Wait = short(wait)
				r.WaitAt, r.WaitLong = percent(before.Sub(start)), percent(wait)
			}
		}
		const least = 0.6 // or a short send could not be seen beside a long wait
		r.Length = max(percent(ending(n, now).Sub(n.At)), least)
		r.Begin = min(r.Begin, 100-r.Length)
		r.End = r.Begin + r.Length
		if t == replay {
			r.Saw += original(sends, n)
		}
		if e, ok := caused[n.Effect]; ok {
			r.Effect = describe(e)
			r.EffectAt = percent(e.At.Sub(start))
		}
		if n.Caller != "" && !slices.Contains(callers, n.Caller) {
			callers = append(callers, n.Caller)
		}
		o.Rows = append(o.Rows, r)
	}
	o.Span = short(span)
	o.Caller = strings.Join(callers, ", ")
	o.Verdict, o.Tone = h.verdict()
	return o
}

// original names the send whose answer a replay repeats, if it is among those shown.
func original(sends []fakeserver.Send, replay fakeserver.Send) string {
	for i := len(sends) - 1; i >= 0; i-- {
		if n := sends[i]; n.N < replay.N && n.Key == replay.Key && n.Caller == replay.Caller && n.Effect > 0 {
			return " of #" + strconv.Itoa(n.N)
		}
	}
	return ""
}

func ending(n fakeserver.Send, now time.Time) time.Time {
	if n.Ended.IsZero() {
		return latest(now, n.At)
	}
	return n.Ended
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// verdict says in a sentence what became of an operation: its effects are counted from the whole ledger, and of its sends
// nothing is claimed that those shown do not tell.
func (h history) verdict() (string, tone) {
	made := map[string]int{} // by kind of effect and path: a payment and its refund may share a reference
	total, most := len(h.earlier), 0
	for _, e := range h.earlier {
		made[e.Kind+" "+e.path]++
		most = max(most, made[e.Kind+" "+e.path])
	}
	var missed string // what became of the answer that came with an effect; "" = it arrived
	var replayed int  // the send that got it later; 0 = none
	var arrived, perhaps, running bool
	losses := 0
	for _, n := range h.sends {
		_, t := saw(n)
		running = running || t == underWay
		if t == lost {
			losses++
		}
		e, ok := h.caused[n.Effect]
		if ok {
			of := e.Kind + " " + n.Method + " " + n.Path
			made[of]++
			total, most = total+1, max(most, made[of])
		}
		told := t == replay && n.Status < 500 // a stored 5xx tells nobody of the effect
		switch {
		case told && missed != "":
			replayed = n.N
		case ok && t == lost:
			missed = ": an answer was lost, send %d got it as a replay"
		case ok && t != good && t != underWay:
			missed = ": send %d got the answer as a replay"
		}
		arrived = arrived || told || ok && t == good
		perhaps = perhaps || unsure(n) && (ok || n.Replayed)
	}
	sends := count(len(h.sends), "send")
	if h.cut {
		sends += " shown"
	}
	text := count(total, "effect") + ", " + sends
	switch {
	case h.loose && total > 1:
		return text + ": nothing says that they are one operation", neutral
	case most > 1:
		return strings.ToUpper(count(total, "effect")) + " for one operation, " + sends, lost
	case running:
		return text + ", still under way", underWay
	case total > 0 && !arrived && perhaps:
		return text + ": done, and whether the client has the whole answer is not known", neutral
	case total > 0 && !arrived && len(h.earlier) > 0:
		return text + ": done, by a send that is not shown", neutral
	case total > 0 && !arrived:
		return text + ": done, but no client has the answer", lost
	case replayed > 0:
		return text + fmt.Sprintf(missed, replayed), good
	case total > 0:
		return text, good
	case losses == len(h.sends) && !h.cut:
		return text + ": nothing was done, and no client was told", neutral
	}
	return text, neutral
}

// holding are the faults whose exchange ends without an answer only because the client leaves.
var holding = []fakeserver.Kind{fakeserver.Hang, fakeserver.Freeze, fakeserver.Slow, fakeserver.Late, fakeserver.SlowRead}

// closing are the faults that end the connection without an answer.
var closing = []fakeserver.Kind{fakeserver.Close, fakeserver.Stuck, fakeserver.StreamReset, fakeserver.GoAway}

// speaking are the faults that answer in the place of the server.
var speaking = []fakeserver.Kind{fakeserver.Status, fakeserver.HTML, fakeserver.Redirect, fakeserver.EarlyAnswer}

// spoilt says what is wrong with an answer that was sent, but not as a client can use it.
var spoilt = map[fakeserver.Kind]string{
	fakeserver.CutBody:    "body cut off",
	fakeserver.Endless:    "a body without end",
	fakeserver.Mangled:    "mangled: half a document",
	fakeserver.Bomb:       "a bomb: far more than it seems, in gzip",
	fakeserver.BigHeaders: "headers beyond measure",
}

// unsure says whether an answer was sent so slowly that the client may have left before its end, unnoticed.
func unsure(n fakeserver.Send) bool { return kindOf(n) == fakeserver.Trickle && n.Status != 0 }

func kindOf(n fakeserver.Send) fakeserver.Kind {
	kind, _, _ := strings.Cut(n.Fault, " ")
	return fakeserver.Kind(kind)
}

// leftBefore says whether a fault that holds the body of an answer ended sooner than it would by itself.
func leftBefore(n fakeserver.Send) bool {
	words := strings.Fields(n.Fault)
	if kindOf(n) != fakeserver.Late || len(words) < 2 {
		return false
	}
	delay, err := time.ParseDuration(words[1])
	return err == nil && n.Ended.Sub(n.At) < delay
}

// saw says what the client was sent of the answer. Whether it got there a server cannot know.
func saw(n fakeserver.Send) (string, tone) {
	kind := kindOf(n)
	status := strconv.Itoa(n.Status)
	if name := http.StatusText(n.Status); name != "" {
		status += " " + name
	}
	switch {
	case n.Duplicate && n.Status == 0 && !n.Ended.IsZero():
		return "copy of the network: no answer", neutral
	case n.Duplicate && !n.Ended.IsZero():
		return "copy of the network: " + status, neutral
	case n.Ended.IsZero() && n.Status == 0:
		return "waiting", underWay
	case n.Ended.IsZero() && kind != fakeserver.Stale:
		return status + ", still coming", underWay
	case spoilt[kind] != "" && n.Status != 0:
		return status + ", " + spoilt[kind], lost
	case kind == fakeserver.Garbage:
		return "bytes that are not HTTP", lost
	case kind == fakeserver.CutHeaders:
		return "a part of the headers", lost
	case kind == fakeserver.Flood:
		return "early hints, no answer", lost
	case n.Status == 0 && kind == fakeserver.Reset:
		return "no answer: connection reset", lost
	case n.Status == 0 && slices.Contains(closing, kind):
		return "no answer: connection closed", lost
	case n.Status == 0 && slices.Contains(holding, kind):
		return "no answer: the client left within " + short(n.Ended.Sub(n.At)), lost
	case n.Status == 0:
		return "no answer", lost
	case leftBefore(n):
		return status + ", no body: the client left within " + short(n.Ended.Sub(n.At)), lost
	case unsure(n):
		return status + ", byte by byte", neutral
	case n.Replayed && !slices.Contains(speaking, kind):
		return status + ", replay", replay
	case n.Status >= 400:
		return status, refused
	case slices.Contains(speaking, kind):
		return status + ", by the fault", neutral
	case kind == fakeserver.Extra:
		return status + ", and a second answer", good
	}
	return status, good
}

func describe(e fakeserver.Effect) string {
	text := e.Kind
	if e.ID != "" {
		text += " " + e.ID
	}
	if e.Amount != 0 {
		text += ", " + strconv.FormatInt(e.Amount, 10)
	}
	return text
}

// line is one send as a line of text.
func line(n fakeserver.Send, e *fakeserver.Effect) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  #%d %s %s", n.At.Format("15:04:05.000"), n.N, n.Method, n.Path)
	if n.Key != "" {
		fmt.Fprintf(&b, "  key %s, send %d", n.Key, n.KeySend)
	}
	text, _ := saw(n)
	fmt.Fprintf(&b, "  -> %s  (%s)", text, short(n.Ended.Sub(n.At)))
	if n.Fault != "" {
		b.WriteString("  fault: " + rounded(n.Fault))
	}
	if e != nil {
		fmt.Fprintf(&b, "  effect %d: %s", e.N, describe(*e))
	}
	return b.String()
}

var longRate = regexp.MustCompile(`(\brate 0\.\d{3})\d+`)

// rounded is a fault in words without the many digits that the rates of a mix have.
func rounded(fault string) string { return longRate.ReplaceAllString(fault, "$1") }

// printable keeps a client from writing to the terminal what is not text.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

func count(n int, what string) string {
	switch n {
	case 0:
		return "no " + what
	case 1:
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

func short(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return strconv.FormatFloat(d.Seconds()*1000, 'f', 1, 64) + " ms"
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
	case d < time.Minute:
		return strconv.FormatFloat(d.Seconds(), 'f', 2, 64) + " s"
	}
	return d.Round(time.Second).String()
}
