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
	neutral  tone = "neutral"
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

// timeline groups sends into operations, the newest first.
func timeline(sends []fakeserver.Send, effects []fakeserver.Effect, now time.Time) []operation {
	caused := map[int]fakeserver.Effect{}
	for _, e := range effects {
		caused[e.N] = e
	}
	type name struct{ by, what, caller, path string }
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
		operations[i] = draw(groups[at], caused, now)
		operations[i].By, operations[i].Name = at.by, at.what
	}
	return operations
}

// draw lays out the sends of one operation to scale.
func draw(sends []fakeserver.Send, caused map[int]fakeserver.Effect, now time.Time) operation {
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
	o.Verdict, o.Tone = verdict(sends, caused)
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

// verdict says in a sentence what became of an operation.
func verdict(sends []fakeserver.Send, caused map[int]fakeserver.Effect) (string, tone) {
	made := map[string]int{} // by kind of effect: a payment and its refund may share a reference
	var total, most int
	var missed string // what became of the answer that came with an effect; "" = it arrived
	var replayed int  // the send that got it later; 0 = none
	var arrived, running bool
	losses := 0
	for _, n := range sends {
		_, t := saw(n)
		running = running || t == underWay
		if t == lost {
			losses++
		}
		e, ok := caused[n.Effect]
		if ok {
			made[e.Kind+" "+e.Endpoint]++
			total, most = total+1, max(most, made[e.Kind+" "+e.Endpoint])
		}
		switch {
		case t == replay && missed != "":
			replayed = n.N
		case ok && t == lost:
			missed = ": an answer was lost, send %d got it as a replay"
		case ok && t != good && t != underWay:
			missed = ": send %d got the answer as a replay"
		}
		arrived = arrived || t == replay || ok && t == good
	}
	text := count(total, "effect") + ", " + count(len(sends), "send")
	switch {
	case most > 1:
		return strings.ToUpper(count(total, "effect")) + " for one operation, " + count(len(sends), "send"), lost
	case running:
		return text + ", still under way", underWay
	case total > 0 && !arrived:
		return text + ": done, but no client has the answer", lost
	case replayed > 0:
		return text + fmt.Sprintf(missed, replayed), good
	case total > 0:
		return text, good
	case losses == len(sends):
		return text + ": nothing was done, and no client was told", neutral
	}
	return text, neutral
}

// holding are the faults whose exchange ends without an answer only because the client leaves.
var holding = []fakeserver.Kind{fakeserver.Hang, fakeserver.Slow, fakeserver.Late, fakeserver.SlowRead}

// speaking are the faults that answer in the place of the server.
var speaking = []fakeserver.Kind{fakeserver.Status, fakeserver.HTML, fakeserver.Redirect}

// saw says what the client had of the answer, as far as a server can know.
func saw(n fakeserver.Send) (string, tone) {
	kind, _, _ := strings.Cut(n.Fault, " ")
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
	case n.Ended.IsZero() && fakeserver.Kind(kind) != fakeserver.Stale:
		return status + ", still coming", underWay
	}
	switch fakeserver.Kind(kind) {
	case fakeserver.CutBody:
		return status + ", body cut off", lost
	case fakeserver.Endless:
		return status + ", a body without end", lost
	case fakeserver.Garbage:
		return "bytes that are not HTTP", lost
	case fakeserver.CutHeaders:
		return "a part of the headers", lost
	case fakeserver.Flood:
		return "early hints, no answer", lost
	}
	switch {
	case n.Status == 0 && fakeserver.Kind(kind) == fakeserver.Reset:
		return "no answer: connection reset", lost
	case n.Status == 0 && (fakeserver.Kind(kind) == fakeserver.Close || fakeserver.Kind(kind) == fakeserver.Stuck):
		return "no answer: connection closed", lost
	case n.Status == 0 && slices.Contains(holding, fakeserver.Kind(kind)):
		return "no answer: it gave up", lost
	case n.Status == 0:
		return "no answer", lost
	case n.Replayed && !slices.Contains(speaking, fakeserver.Kind(kind)):
		return status + ", replay", replay
	case n.Status >= 400:
		return status, refused
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
	return printable(b.String())
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
