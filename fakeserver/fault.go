package fakeserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Fault is one thing that goes wrong, as data: it prints, travels as JSON and is chosen for a send by its filters.
// The package comment has a table of all kinds.
type Fault struct {
	Kind  Kind
	Point Point // empty: the kind's own default, the first that the table lists

	Status     int           // of the answer that a fault makes; 0 = the kind's default, if it has one
	RetryAfter string        // Retry-After of that answer, any text; "\n" separates several header lines; "" = none
	Delay      time.Duration // what the kind says; for a kind that says nothing, the fault is held so long before it acts
	Location   string        // of a Redirect; "other" = the same path at OtherURL
	Bytes      int           // how much of something: see Reset, Close, CutHeaders, CutBody, Mangled (0 = half), BigHeaders, Bomb
	Encoding   string        // of CutBody: "length" (also ""), "chunked", "bad-chunk" or "gzip"
	Code       string        // of StreamReset and GoAway: an HTTP/2 error code such as "REFUSED_STREAM"; "" = the kind's default
	Last       string        // of GoAway: the last stream that it names is "below", "at" or "above" the request's own

	// Rate is the share of sends that it hits, 0 < Rate <= 1. Zero: every one.
	// The draw depends on Seed, key and KeySend only, so a run repeats whatever the scheduling. Faults with the same
	// Seed and the same filters share one draw and split it: at most one of them hits a send, and their rates add up
	// (to at most 1).
	Rate float64
	Seed int64

	Key      string // only sends with this key; "" = any
	Send     int    // only this send of its key (Send.KeySend); 0 = any
	Endpoint string // only this route pattern, for example "POST /v1/payments"; "" = any
	Times    int    // at most so many hits; 0 = no limit
}

// Point says where in the life of a request a fault acts.
type Point string

const (
	BeforeEffect Point = "before-effect" // nothing was executed, and no key reserved
	DuringEffect Point = "during-effect" // the key is reserved and in progress
	AfterEffect  Point = "after-effect"  // the effect is in the ledger and its answer stored under the key
	InHeaders    Point = "in-headers"    // of the answer; after the effect
	InBody       Point = "in-body"       // of the answer; after the effect
	AfterAnswer  Point = "after-answer"  // the client has a complete answer
)

func (p Point) phrase() string {
	switch p {
	case BeforeEffect:
		return "before the effect"
	case DuringEffect:
		return "during the effect"
	case AfterEffect:
		return "after the effect"
	case InHeaders:
		return "in the headers"
	case InBody:
		return "in the body"
	case AfterAnswer:
		return "after the answer"
	}
	return string(p)
}

// Kind says what goes wrong. The zero Kind is no fault; only a script may hold it.
type Kind string

// The kinds of faults. Behind each are its points; the first is the default.
const (
	// Reset ends the connection with a TCP RST: before or after the effect. Before it, Bytes > 0 resets after so many
	// bytes of the request's body were read, -1 after the headers alone, 0 after the whole request.
	Reset Kind = "reset"
	// Close ends the connection with a FIN and no byte of an answer: before or after the effect, Bytes as for Reset.
	// Where part of the request is unread, TCP makes a reset of it.
	Close Kind = "close"
	// Hang never answers: before or after the effect. It ends when the client leaves or the server closes.
	Hang Kind = "hang"
	// Status answers with any status and Retry-After: before or after the effect. After it the true answer stays stored.
	// During the effect: it answers at once, and the effect happens Delay later.
	Status Kind = "status"
	// HTML answers with a gateway's HTML page of Status (0 = 502): before, after or, as for Status, during the effect.
	HTML Kind = "html"
	// Redirect answers with Status 301, 302, 303, 307 (0 = this) or 308 to Location: before the effect; a 303 also after
	// it, where an empty Location is the new resource.
	Redirect Kind = "redirect"
	// EarlyAnswer answers with Status (0 = 503) before the body is read, leaves the body unread, and closes the
	// connection Delay later (0 = 500 ms): before the effect.
	EarlyAnswer Kind = "early-answer"
	// StoredFailure answers with a 5xx Status (0 = 500) that is stored under the key and replayed: after or before the effect.
	StoredFailure Kind = "stored-failure"
	// SlowRead waits Delay before it reads the request's body, and so before a 100 Continue: before the effect.
	SlowRead Kind = "slow-read"
	// Slow makes the effect take Delay; the key is in progress meanwhile, and the effect happens even if the client
	// leaves: during the effect. A request that has no effect to make, a replay for one, is not slowed.
	Slow Kind = "slow"
	// Stuck is a worker that dies after it reserved the key: the connection closes, nothing is executed, and the key is in
	// progress for Delay by the server's clock (0 = for the whole retention): during the effect.
	Stuck Kind = "stuck"
	// Late holds the answer for Delay: after the effect the whole answer, in the body only that.
	Late Kind = "late"
	// Trickle sends one byte every Delay: in the body, or from the headers on.
	Trickle Kind = "trickle"
	// CutHeaders ends the connection within the status line or the headers of the answer, after Bytes (0 = half): in the headers.
	CutHeaders Kind = "cut-headers"
	// CutBody ends the answer within its body, after Bytes (0 = half), in one of four Encodings: a Content-Length that is
	// not kept, a missing last chunk, a chunk whose size is no number, or a damaged gzip stream under a correct
	// Content-Length: in the body.
	// An answer without a body is cut in its headers.
	CutBody Kind = "cut-body"
	// Garbage answers with bytes that are not HTTP: after or before the effect.
	Garbage Kind = "garbage"
	// Flood sends 103 Early Hints every Delay (0 = 10 ms) and never an answer: after or before the effect.
	Flood Kind = "flood"
	// Endless answers with Status (0 = 503) and a chunked body without end, one byte every Delay (0 = as fast as it is
	// read, and then virtual time stands still): before or after the effect.
	Endless Kind = "endless"
	// Stale answers and closes the idle connection silently: at the first bytes of the next request on it, or Delay after
	// the answer if that is set: after the answer. What is lost this way is not listed as a send.
	Stale Kind = "stale"
	// Duplicate delivers the request a second time, listed with Send.Duplicate. Before the effect: both copies at once,
	// the second answer is dropped. After the effect: the copy comes when the first has succeeded, or Delay later.
	// During the effect: a gateway loses patience with the first, which takes Delay, and hands the client the answer
	// that the copy gets meanwhile (in progress).
	Duplicate Kind = "duplicate"
	// StreamReset ends the HTTP/2 stream with RST_STREAM and Code (empty = INTERNAL_ERROR), and not the connection: before or
	// after the effect. REFUSED_STREAM says that nothing was executed, which is a lie after the effect.
	StreamReset Kind = "stream-reset"
	// GoAway sends GOAWAY with Code (empty = NO_ERROR) over HTTP/2, and no answer: before or after the effect. A Last of
	// "below" (empty = this, before the effect) says that the stream was not executed; "at" (empty = this, after it) and
	// "above" say that it may have been, and the connection closes.
	GoAway Kind = "go-away"
	// Freeze leaves an HTTP/2 connection open and dead: no frame is answered any more, not even a PING, and what is sent on
	// it is lost and not listed: before or after the effect.
	Freeze Kind = "freeze"
	// BigHeaders answers with headers of Bytes (0 = 11 MiB), over HTTP/2 in CONTINUATION frames, and then no body: after or
	// before the effect.
	BigHeaders Kind = "big-headers"
	// Bomb is the answer under gzip, with so much white space behind it that Bytes (0 = 64 MiB) come out: in the body.
	Bomb Kind = "bomb"
	// Mangled is an answer that is whole as HTTP, but what it says ends after Bytes (0 = half), so it is not JSON: in the body.
	Mangled Kind = "mangled"
	// Extra sends a second answer, "200" and another payment, that nobody asked for, behind the first: after the answer.
	// Over HTTP/2 there is no such thing.
	Extra Kind = "extra"
)

// kind is how a kind of fault behaves and what it may be given.
type kind struct {
	points   []Point                       // the first is the default
	takes    string                        // names of the parameters it reads besides Delay
	ownDelay bool                          // Delay has the kind's own meaning
	act      func(*exchange, *answer) bool // nil: acts within execution; the answer is nil before the effect
}

var (
	beforeAfterOrDuring = []Point{BeforeEffect, AfterEffect, DuringEffect}

	beforeOrAfter = []Point{BeforeEffect, AfterEffect}
	afterOrBefore = []Point{AfterEffect, BeforeEffect}
	onlyBefore    = []Point{BeforeEffect}
	onlyDuring    = []Point{DuringEffect}
)

var kinds = map[Kind]kind{
	Reset:         {points: beforeOrAfter, takes: "bytes", act: (*exchange).reset},
	Close:         {points: beforeOrAfter, takes: "bytes", act: (*exchange).close},
	Hang:          {points: beforeOrAfter, act: (*exchange).hang},
	Status:        {points: beforeAfterOrDuring, takes: "status retry_after", act: (*exchange).status},
	HTML:          {points: beforeAfterOrDuring, takes: "status", act: (*exchange).html},
	Redirect:      {points: beforeOrAfter, takes: "status location", act: (*exchange).redirect},
	EarlyAnswer:   {points: onlyBefore, takes: "status retry_after", ownDelay: true, act: (*exchange).earlyAnswer},
	StoredFailure: {points: afterOrBefore, takes: "status retry_after"},
	SlowRead:      {points: onlyBefore, ownDelay: true, act: (*exchange).slowRead},
	Slow:          {points: onlyDuring, ownDelay: true},
	Stuck:         {points: onlyDuring, ownDelay: true},
	Late:          {points: []Point{AfterEffect, InBody}, ownDelay: true, act: (*exchange).late},
	Trickle:       {points: []Point{InBody, InHeaders}, ownDelay: true, act: (*exchange).trickle},
	CutHeaders:    {points: []Point{InHeaders}, takes: "bytes", act: (*exchange).cutHeaders},
	CutBody:       {points: []Point{InBody}, takes: "bytes encoding", act: (*exchange).cutBody},
	Garbage:       {points: afterOrBefore, act: (*exchange).garbage},
	Flood:         {points: afterOrBefore, ownDelay: true, act: (*exchange).flood},
	Endless:       {points: beforeOrAfter, takes: "status", ownDelay: true, act: (*exchange).endless},
	Stale:         {points: []Point{AfterAnswer}, ownDelay: true, act: (*exchange).stale},
	Duplicate:     {points: []Point{BeforeEffect, AfterEffect, DuringEffect}, ownDelay: true},
	StreamReset:   {points: beforeOrAfter, takes: "code", act: (*exchange).streamReset},
	GoAway:        {points: beforeOrAfter, takes: "code last", act: (*exchange).goAway},
	Freeze:        {points: beforeOrAfter, act: (*exchange).freeze},
	BigHeaders:    {points: afterOrBefore, takes: "bytes", act: (*exchange).bigHeaders},
	Bomb:          {points: []Point{InBody}, takes: "bytes", act: (*exchange).bomb},
	Mangled:       {points: []Point{InBody}, takes: "bytes", act: (*exchange).mangled},
	Extra:         {points: []Point{AfterAnswer}, ownDelay: true, act: (*exchange).extra},
}

type stage int

const (
	never stage = iota // not at all, or within execution
	atHeaders
	beforeRun
	afterRun
)

func (f *Fault) stage() stage {
	switch {
	case f == nil || kinds[f.Kind].act == nil || f.Point == DuringEffect:
		return never
	case f.Kind == EarlyAnswer, f.Kind == SlowRead, f.Bytes != 0 && f.Point == BeforeEffect && f.Kind != BigHeaders:
		return atHeaders
	case f.Point == BeforeEffect:
		return beforeRun
	default:
		return afterRun
	}
}

func (f *Fault) is(k Kind) bool { return f != nil && f.Kind == k }

// placed is f with its default point.
func (f Fault) placed() Fault {
	if k, ok := kinds[f.Kind]; ok && f.Point == "" {
		f.Point = k.points[0]
	}
	return f
}

// Validate says what is wrong with a fault; the error names the field. A parameter that the kind does not read is wrong too.
func (f Fault) Validate() error {
	k, ok := kinds[f.Kind]
	if !ok {
		return faultError("kind", "unknown kind "+strconv.Quote(string(f.Kind))+"; there are "+
			strings.Join(texts(slices.Sorted(maps.Keys(kinds))), ", "))
	}
	f = f.placed()
	if !slices.Contains(k.points, f.Point) {
		return faultError("point", "a "+string(f.Kind)+" fault has no point "+strconv.Quote(string(f.Point))+
			", only "+strings.Join(texts(k.points), ", "))
	}
	for name, set := range map[string]bool{
		"status": f.Status != 0, "retry_after": f.RetryAfter != "", "location": f.Location != "",
		"bytes": f.Bytes != 0, "encoding": f.Encoding != "", "code": f.Code != "", "last": f.Last != "",
	} {
		if set && !slices.Contains(strings.Fields(k.takes), name) {
			return faultError(name, "a "+string(f.Kind)+" fault does not use it")
		}
	}
	if err := f.validateStatus(); err != nil {
		return err
	}
	switch {
	case strings.ContainsFunc(f.RetryAfter, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' || r == 0x7f }):
		return faultError("retry_after", "has a control character")
	case strings.ContainsFunc(f.Location, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return faultError("location", "has a control character")
	case f.Kind == Redirect && f.Point == BeforeEffect && f.Location == "":
		return faultError("location", "is needed before the effect")
	case f.Bytes < -1, f.Bytes < 0 && f.Kind != Reset && f.Kind != Close:
		return faultError("bytes", "is negative")
	case f.Bytes != 0 && f.Point == AfterEffect && f.Kind != BigHeaders:
		return faultError("bytes", "means the request's body, which has been read after the effect")
	case !slices.Contains([]string{"", "length", "chunked", "bad-chunk", "gzip"}, f.Encoding):
		return faultError("encoding", "must be length, chunked, bad-chunk or gzip")
	case f.Code != "" && !slices.Contains(errorCodes, f.Code):
		return faultError("code", "is not an HTTP/2 error code such as CANCEL")
	case !slices.Contains([]string{"", "below", "at", "above"}, f.Last):
		return faultError("last", "must be below, at or above")
	case f.Delay < 0:
		return faultError("delay", "is negative")
	case f.Delay != 0 && f.Kind == Extra:
		return faultError("delay", "an extra fault does not use it")
	case f.Delay == 0 && (f.Kind == Slow || f.Kind == Late || f.Kind == SlowRead || f.Kind == Trickle):
		return faultError("delay", "is needed by a "+string(f.Kind)+" fault")
	case f.Delay == 0 && f.Point == DuringEffect && f.Kind != Stuck:
		return faultError("delay", "is needed by a "+string(f.Kind)+" fault during the effect")
	case f.Delay != 0 && f.Kind == Duplicate && f.Point == BeforeEffect:
		return faultError("delay", "does not go with a duplicate before the effect: both copies come at once")
	case math.IsNaN(f.Rate) || f.Rate < 0 || f.Rate > 1:
		return faultError("rate", "must lie between 0 and 1")
	case f.Send < 0:
		return faultError("send", "is negative")
	case f.Times < 0:
		return faultError("times", "is negative")
	}
	return nil
}

func (f Fault) validateStatus() error {
	switch {
	case f.Kind == Status && f.Status == 0:
		return faultError("status", "is needed by a status fault")
	case f.Status == 0:
		return nil
	case f.Status < 200 || f.Status > 599:
		return faultError("status", "must lie between 200 and 599")
	case f.Kind == StoredFailure && f.Status < 500:
		return faultError("status", "of a stored failure must be a 5xx")
	case f.Kind == Redirect && !slices.Contains([]int{301, 302, 303, 307, 308}, f.Status):
		return faultError("status", "must be 301, 302, 303, 307 or 308")
	case f.Kind == Redirect && f.Point == AfterEffect && f.Status != 303:
		return faultError("status", "of a redirect after the effect must be 303")
	}
	return nil
}

func texts[T ~string](names []T) []string {
	list := make([]string, len(names))
	for i, name := range names {
		list[i] = string(name)
	}
	return list
}

func faultError(name, what string) error {
	return errors.New("fakeserver: fault: " + name + ": " + what)
}

// String says it in words, for example "reset after the effect (key order-1, send 1)".
func (f Fault) String() string {
	if f.Kind == "" {
		return "no fault"
	}
	f = f.placed()
	var b strings.Builder
	b.WriteString(string(f.Kind))
	part := func(set bool, text string) {
		if set {
			b.WriteString(text)
		}
	}
	part(f.Status != 0, " "+strconv.Itoa(f.Status))
	part(f.Code != "", " "+f.Code)
	part(f.Last != "", " "+f.Last+" the stream")
	part(f.Encoding != "", " ("+f.Encoding+")")
	part(f.Delay != 0, " "+f.Delay.String())
	part(f.Location != "", " to "+f.Location)
	part(f.Bytes > 0, " after "+strconv.Itoa(f.Bytes)+" bytes")
	part(f.Bytes < 0, " before the body")
	part(f.RetryAfter != "", " with Retry-After "+strconv.Quote(f.RetryAfter))
	b.WriteString(" " + f.Point.phrase())
	var when []string
	if f.Key != "" {
		when = append(when, "key "+f.Key)
	}
	if f.Send != 0 {
		when = append(when, "send "+strconv.Itoa(f.Send))
	}
	if f.Endpoint != "" {
		when = append(when, f.Endpoint)
	}
	if f.Rate != 0 && f.Rate != 1 {
		when = append(when, "rate "+strconv.FormatFloat(f.Rate, 'g', -1, 64)+" of seed "+strconv.FormatInt(f.Seed, 10))
	}
	if f.Times != 0 {
		when = append(when, "at most "+strconv.Itoa(f.Times)+" times")
	}
	if len(when) > 0 {
		b.WriteString(" (" + strings.Join(when, ", ") + ")")
	}
	return b.String()
}

// faultJSON is a fault on paper. It differs in the delay alone: "150ms", not nanoseconds.
type faultJSON struct {
	Kind       Kind    `json:"kind"`
	Point      Point   `json:"point,omitempty"`
	Status     int     `json:"status,omitempty"`
	RetryAfter string  `json:"retry_after,omitempty"`
	Delay      string  `json:"delay,omitempty"`
	Location   string  `json:"location,omitempty"`
	Bytes      int     `json:"bytes,omitempty"`
	Encoding   string  `json:"encoding,omitempty"`
	Code       string  `json:"code,omitempty"`
	Last       string  `json:"last,omitempty"`
	Rate       float64 `json:"rate,omitempty"`
	Seed       int64   `json:"seed,omitempty"`
	Key        string  `json:"key,omitempty"`
	Send       int     `json:"send,omitempty"`
	Endpoint   string  `json:"endpoint,omitempty"`
	Times      int     `json:"times,omitempty"`
}

// MarshalJSON writes the fields in lower case with underscores, without those that are zero. Delay is text: "150ms".
func (f Fault) MarshalJSON() ([]byte, error) {
	j := faultJSON{
		f.Kind, f.Point, f.Status, f.RetryAfter, "", f.Location, f.Bytes, f.Encoding, f.Code, f.Last,
		f.Rate, f.Seed, f.Key, f.Send, f.Endpoint, f.Times,
	}
	if f.Delay != 0 {
		j.Delay = f.Delay.String()
	}
	return json.Marshal(j)
}

// UnmarshalJSON reads what MarshalJSON writes. It refuses unknown fields, and a rate, send or times that is written down
// as 0: that would mean all, where whoever wrote it means none. It does not validate.
func (f *Fault) UnmarshalJSON(data []byte) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	var j faultJSON
	if err := d.Decode(&j); err != nil {
		return faultPaper.unreadable(data, err)
	}
	var given struct {
		Rate        *float64
		Send, Times *int
	}
	if err := json.Unmarshal(data, &given); err != nil {
		return faultPaper.unreadable(data, err)
	}
	switch {
	case given.Rate != nil && *given.Rate == 0:
		return faultError("rate", "0 would hit nothing; leave it out for always")
	case given.Send != nil && *given.Send == 0:
		return faultError("send", "counts from 1; leave it out for any")
	case given.Times != nil && *given.Times == 0:
		return faultError("times", "0 would hit nothing; leave it out for no limit")
	}
	var delay time.Duration
	if j.Delay != "" {
		var err error
		if delay, err = time.ParseDuration(j.Delay); err != nil {
			return faultError("delay", strconv.Quote(j.Delay)+" is not a duration such as 150ms")
		}
	}
	*f = Fault{
		j.Kind, j.Point, j.Status, j.RetryAfter, delay, j.Location, j.Bytes, j.Encoding, j.Code, j.Last,
		j.Rate, j.Seed, j.Key, j.Send, j.Endpoint, j.Times,
	}
	return nil
}

// paper is how a type of fault is written down.
type paper struct {
	what     string
	fields   reflect.Type
	examples map[string]string // of values, by field; "" = of the whole
}

// unreadable says in words of the JSON text, not of Go, why it is no fault.
func (p paper) unreadable(data []byte, err error) error {
	faultError := func(name, why string) error { return errors.New("fakeserver: " + p.what + ": " + name + ": " + why) }
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		if wrong.Field == "" {
			return errors.New("fakeserver: " + p.what + ": want an object such as " + p.examples[""])
		}
		want := "a whole number"
		switch wrong.Type.Kind() {
		case reflect.String:
			want = "a string"
		case reflect.Float64:
			want = "a number"
		}
		if example := p.examples[wrong.Field]; example != "" {
			want += " such as " + example
		}
		return faultError(wrong.Field, "want "+want)
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(data, &fields) != nil {
		return err
	}
	var names []string
	for i := range p.fields.NumField() {
		name, _, _ := strings.Cut(p.fields.Field(i).Tag.Get("json"), ",")
		names = append(names, name)
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(names, name) {
			return faultError(name, "is no field of a "+p.what+"; there are "+strings.Join(names, ", "))
		}
	}
	return err
}

var faultPaper = paper{"fault", reflect.TypeFor[faultJSON](), map[string]string{
	"": `{"kind":"reset"}`, "kind": `"reset"`, "point": `"after-effect"`, "status": "503", "retry_after": `"1"`, "delay": `"150ms"`,
	"location": `"/elsewhere"`, "bytes": "100", "encoding": `"gzip"`, "code": `"CANCEL"`, "last": `"at"`, "rate": "0.5", "seed": "1",
	"key": `"order-1"`, "send": "1", "endpoint": `"POST /v1/payments"`, "times": "3",
}}

// ParseFaults reads a JSON array of faults and validates each. Unknown fields are refused. Errors name the fault (from 1)
// and where it is in the text.
func ParseFaults(data []byte) ([]Fault, error) { return parseFaults[Fault](data, "faults") }

func parseFaults[T interface{ Validate() error }](data []byte, what string) ([]T, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	if open, err := d.Token(); err != nil || open != json.Delim('[') {
		return nil, errors.New("fakeserver: " + what + ": want a JSON array")
	}
	faults := []T{}
	for d.More() {
		start := int(d.InputOffset())
		start += bytes.IndexFunc(data[start:], func(r rune) bool { return !strings.ContainsRune(", \t\r\n", r) })
		var f T
		err := d.Decode(&f)
		if err == nil {
			err = f.Validate()
		}
		if err != nil {
			return nil, fmt.Errorf("fakeserver: %s: number %d, %s: %w", what, len(faults)+1, position(data, start), err)
		}
		faults = append(faults, f)
	}
	if _, err := d.Token(); err != nil {
		return nil, fmt.Errorf("fakeserver: %s: %s: %w", what, position(data, int(d.InputOffset())), err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("fakeserver: %s: %s: there is more after the array", what, position(data, int(d.InputOffset())))
	}
	return faults, nil
}

func position(data []byte, at int) string {
	before := data[:min(max(at, 0), len(data))]
	line := 1 + bytes.Count(before, []byte("\n"))
	return fmt.Sprintf("line %d, column %d", line, len(before)-bytes.LastIndexByte(before, '\n'))
}
