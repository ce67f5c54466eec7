package fakeserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// DeliveryFault is one thing that goes wrong with an attempt to deliver an event, as data: it prints, travels as JSON and is
// chosen by its filters. The package comment has a table of all kinds.
//
//	s.InjectDeliveries(fakeserver.DeliveryFault{Kind: fakeserver.Forged, Attempt: 1}) // the second attempt is genuine
type DeliveryFault struct {
	Kind DeliveryKind

	Delay  time.Duration // what the kind says; 0 = the kind's default
	Copies int           // of Twice: how many copies there are, at most 100; 0 = 1
	Bytes  int           // of Huge: how long the body is; 0 = 10 MiB
	To     string        // of OtherSource: the name of another endpoint that is registered

	// Rate is the share of attempts that it hits, 0 < Rate <= 1. Zero: every one.
	// The draw depends on Seed, the endpoint's name, the event's type, the key of its effect (without one its reference,
	// or else its id) and the number of the attempt only, so a run repeats whatever the scheduling. Faults with the same
	// Seed and the same filters share one draw and split it, as those of Fault do.
	Rate float64
	Seed int64

	Endpoint  string // only attempts at this endpoint, by name; "" = any
	Event     string // only events of this type, for example "payment.succeeded"; "" = any
	Reference string // only events of effects with this reference; "" = any

	// Attempt is the only attempt of an event that it hits: 1 = the first, 0 = any. With 0 every attempt is hit, and after one
	// that a receiver rightly refuses (delayed, old-timestamp, future-timestamp, forged, unsigned, reencoded, huge) or that is
	// not heard (lost-answer) comes another of the same: the event is never delivered. Give 1, or a Rate below 1, or Times.
	Attempt int

	Times int // at most so many hits; 0 = no limit
}

// DeliveryKind says what goes wrong. The zero kind is no fault; only a script may hold it.
type DeliveryKind string

// The kinds of delivery faults. The first five add copies to an attempt that is itself as it should be; a copy is listed
// with Delivery.Copy and its answer changes nothing. The others change the attempt.
const (
	// Twice delivers again, Copies times, each signed at another second: all at the same time as the attempt, or Delay after it.
	Twice DeliveryKind = "twice"
	// Replayed delivers the same bytes and headers again, Delay (0 = 10 minutes) after the attempt, as whoever
	// recorded them can.
	Replayed DeliveryKind = "replayed"
	// OtherBody delivers again under the same id, rightly signed, with a body that has a note in it, Delay after the attempt.
	OtherBody DeliveryKind = "other-body"
	// OtherID delivers again under another id, as a sender does that made its event twice, Delay after the attempt.
	OtherID DeliveryKind = "other-id"
	// OtherSource delivers another event under the same id to the endpoint To, with the secrets of that, Delay after the attempt.
	// It tells of no effect; its type is "test.other".
	OtherSource DeliveryKind = "other-source"

	// Reordered holds the attempt until one of a later event at the endpoint has ended, or for Delay (0 = 5 s) if there is none.
	// It is signed when it leaves.
	Reordered DeliveryKind = "reordered"
	// Delayed signs the attempt now and delivers it Delay (0 = 10 minutes) later.
	Delayed DeliveryKind = "delayed"
	// OldTimestamp signs a time that is Delay (0 = 10 minutes) ago.
	OldTimestamp DeliveryKind = "old-timestamp"
	// FutureTimestamp signs a time that is Delay (0 = 10 minutes) ahead.
	FutureTimestamp DeliveryKind = "future-timestamp"
	// Forged delivers a body with a note in it, signed with a secret that the endpoint does not have. It comes from a
	// stranger, in the place of the attempt: whatever the answer is, the attempt has failed.
	Forged DeliveryKind = "forged"
	// Unsigned is Forged without a signature.
	Unsigned DeliveryKind = "unsigned"
	// Reencoded delivers a body that a proxy has read and written again after it was signed: the same JSON, other bytes.
	Reencoded DeliveryKind = "reencoded"
	// LostAnswer delivers, waits for the answer and resets the connection: Delivery.Status is what the endpoint said, and the
	// server has not heard it.
	LostAnswer DeliveryKind = "lost-answer"
	// Huge delivers a body of Bytes (0 = 10 MiB), rightly signed.
	Huge DeliveryKind = "huge"
)

// deliveryKind is how a kind behaves and what it may be given.
type deliveryKind struct {
	takes string // names of the parameters it reads
	delay time.Duration
	copy  bool // it adds to the attempt
}

var deliveryKinds = map[DeliveryKind]deliveryKind{
	Twice:           {takes: "delay copies", copy: true},
	Replayed:        {takes: "delay", delay: 10 * time.Minute, copy: true},
	OtherBody:       {takes: "delay", copy: true},
	OtherID:         {takes: "delay", copy: true},
	OtherSource:     {takes: "delay to", copy: true},
	Reordered:       {takes: "delay", delay: 5 * time.Second},
	Delayed:         {takes: "delay", delay: 10 * time.Minute},
	OldTimestamp:    {takes: "delay", delay: 10 * time.Minute},
	FutureTimestamp: {takes: "delay", delay: 10 * time.Minute},
	Forged:          {},
	Unsigned:        {},
	Reencoded:       {},
	LostAnswer:      {},
	Huge:            {takes: "bytes"},
}

const (
	maxCopies            = 100
	defaultHuge          = 10 << 20
	minHuge, maxHuge     = 1 << 10, 1 << 30
	otherEvent, invented = "test.other", "a secret that no endpoint has"
)

func (f *DeliveryFault) is(k DeliveryKind) bool { return f != nil && f.Kind == k }

// strange says that it is not the server that delivers, so that it hears no answer.
func (f *DeliveryFault) strange() bool { return f.is(Forged) || f.is(Unsigned) }

// placed is f with the defaults of its kind.
func (f DeliveryFault) placed() DeliveryFault {
	fill(&f.Delay, deliveryKinds[f.Kind].delay)
	switch f.Kind {
	case Twice:
		fill(&f.Copies, 1)
	case Huge:
		fill(&f.Bytes, defaultHuge)
	}
	return f
}

func (f DeliveryFault) always() bool { return f.Rate == 0 || f.Rate == 1 }

// Validate says what is wrong with a fault; the error names the field. A parameter that the kind does not read is wrong too.
func (f DeliveryFault) Validate() error {
	k, ok := deliveryKinds[f.Kind]
	if !ok {
		return deliveryFaultError("kind", "unknown kind "+strconv.Quote(string(f.Kind))+"; there are "+
			strings.Join(texts(slices.Sorted(maps.Keys(deliveryKinds))), ", "))
	}
	for name, set := range map[string]bool{"delay": f.Delay != 0, "copies": f.Copies != 0, "bytes": f.Bytes != 0, "to": f.To != ""} {
		if set && !slices.Contains(strings.Fields(k.takes), name) {
			return deliveryFaultError(name, "a "+string(f.Kind)+" fault does not use it")
		}
	}
	f = f.placed()
	switch {
	case f.Delay < 0:
		return deliveryFaultError("delay", "is negative")
	case f.Copies < 0 || f.Copies > maxCopies:
		return deliveryFaultError("copies", "must lie between 1 and "+strconv.Itoa(maxCopies))
	case f.Kind == Huge && (f.Bytes < minHuge || f.Bytes > maxHuge):
		return deliveryFaultError("bytes", "must lie between 1 KiB and 1 GiB")
	case f.Kind == OtherSource && f.To == "":
		return deliveryFaultError("to", "is needed by an other-source fault")
	case math.IsNaN(f.Rate) || f.Rate < 0 || f.Rate > 1:
		return deliveryFaultError("rate", "must lie between 0 and 1")
	case f.Attempt < 0:
		return deliveryFaultError("attempt", "is negative")
	case f.Times < 0:
		return deliveryFaultError("times", "is negative")
	}
	return nil
}

func deliveryFaultError(name, what string) error {
	return errors.New("fakeserver: delivery fault: " + name + ": " + what)
}

// String says it in words, for example "delayed 10m0s (payment.succeeded, attempt 1)".
func (f DeliveryFault) String() string {
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
	part(f.Copies > 1, ", "+strconv.Itoa(f.Copies)+" copies")
	part(f.Delay != 0, " "+f.Delay.String())
	part(f.Bytes != 0, " of "+strconv.Itoa(f.Bytes)+" bytes")
	part(f.To != "", " to "+f.To)
	var when []string
	for _, filter := range []struct {
		set  bool
		text string
	}{
		{f.Endpoint != "", "endpoint " + f.Endpoint},
		{f.Event != "", f.Event},
		{f.Reference != "", "reference " + f.Reference},
		{f.Attempt != 0, "attempt " + strconv.Itoa(f.Attempt)},
		{!f.always(), "rate " + strconv.FormatFloat(f.Rate, 'g', -1, 64) + " of seed " + strconv.FormatInt(f.Seed, 10)},
		{f.Times != 0, "at most " + strconv.Itoa(f.Times) + " times"},
	} {
		if filter.set {
			when = append(when, filter.text)
		}
	}
	part(when != nil, " ("+strings.Join(when, ", ")+")")
	return b.String()
}

// deliveryFaultJSON is a delivery fault on paper, as faultJSON is a fault.
type deliveryFaultJSON struct {
	Kind      DeliveryKind `json:"kind"`
	Delay     string       `json:"delay,omitempty"`
	Copies    int          `json:"copies,omitempty"`
	Bytes     int          `json:"bytes,omitempty"`
	To        string       `json:"to,omitempty"`
	Rate      float64      `json:"rate,omitempty"`
	Seed      int64        `json:"seed,omitempty"`
	Endpoint  string       `json:"endpoint,omitempty"`
	Event     string       `json:"event,omitempty"`
	Reference string       `json:"reference,omitempty"`
	Attempt   int          `json:"attempt,omitempty"`
	Times     int          `json:"times,omitempty"`
}

// MarshalJSON writes the fields in lower case, without those that are zero. Delay is text: "150ms".
func (f DeliveryFault) MarshalJSON() ([]byte, error) {
	j := deliveryFaultJSON{f.Kind, "", f.Copies, f.Bytes, f.To, f.Rate, f.Seed, f.Endpoint, f.Event, f.Reference, f.Attempt, f.Times}
	if f.Delay != 0 {
		j.Delay = f.Delay.String()
	}
	return json.Marshal(j)
}

// UnmarshalJSON reads what MarshalJSON writes. It refuses unknown fields, and a rate, attempt or times that is written down
// as 0: that would mean all, where whoever wrote it means none. It does not validate.
func (f *DeliveryFault) UnmarshalJSON(data []byte) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	var j deliveryFaultJSON
	if err := d.Decode(&j); err != nil {
		return deliveryFaultPaper.unreadable(data, err)
	}
	var given struct {
		Rate           *float64
		Attempt, Times *int
	}
	if err := json.Unmarshal(data, &given); err != nil {
		return deliveryFaultPaper.unreadable(data, err)
	}
	switch {
	case given.Rate != nil && *given.Rate == 0:
		return deliveryFaultError("rate", "0 would hit nothing; leave it out for always")
	case given.Attempt != nil && *given.Attempt == 0:
		return deliveryFaultError("attempt", "counts from 1; leave it out for any")
	case given.Times != nil && *given.Times == 0:
		return deliveryFaultError("times", "0 would hit nothing; leave it out for no limit")
	}
	var delay time.Duration
	if j.Delay != "" {
		var err error
		if delay, err = time.ParseDuration(j.Delay); err != nil {
			return deliveryFaultError("delay", strconv.Quote(j.Delay)+" is not a duration such as 150ms")
		}
	}
	*f = DeliveryFault{j.Kind, delay, j.Copies, j.Bytes, j.To, j.Rate, j.Seed, j.Endpoint, j.Event, j.Reference, j.Attempt, j.Times}
	return nil
}

var deliveryFaultPaper = paper{"delivery fault", reflect.TypeFor[deliveryFaultJSON](), map[string]string{
	"": `{"kind":"twice"}`, "kind": `"twice"`, "delay": `"150ms"`, "copies": "4", "bytes": "1048576", "to": `"endpoint-2"`,
	"rate": "0.5", "seed": "1", "endpoint": `"endpoint-1"`, "event": `"payment.succeeded"`, "reference": `"order-1"`,
	"attempt": "1", "times": "3",
}}

// ParseDeliveryFaults reads a JSON array of delivery faults and validates each, as [ParseFaults] does.
func ParseDeliveryFaults(data []byte) ([]DeliveryFault, error) {
	return parseFaults[DeliveryFault](data, "delivery faults")
}

// armedDelivery is a delivery fault in a server's list.
type armedDelivery struct {
	DeliveryFault
	text string
	from float64 // its slice of the draw is [from, from+Rate)
	hits int
}

// deliveryScript is what happens to the next attempts, one step each.
type deliveryScript struct {
	steps []*armedDelivery // nil = no fault
	next  int
}

// armDelivery checks a fault against this server. s.mu is held.
func (s *Server) armDelivery(f DeliveryFault) (*armedDelivery, error) {
	if err := f.Validate(); err != nil {
		return nil, err
	}
	if f.To != "" && s.endpoint(f.To) == nil {
		return nil, deliveryFaultError("to", "no endpoint "+strconv.Quote(f.To)+" is registered")
	}
	f = f.placed()
	return &armedDelivery{DeliveryFault: f, text: f.String()}, nil
}

// InjectDeliveries adds delivery faults behind those already there. For an attempt the first that matches wins. Nothing is
// added if one is invalid; the error names its field. [Server.ClearFaults] and [Server.Reset] remove them.
func (s *Server) InjectDeliveries(faults ...DeliveryFault) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.Clone(s.events.faults)
	for i, f := range faults {
		a, err := s.armDelivery(f)
		if err != nil {
			return numbered(i, err)
		}
		all = append(all, a)
	}
	taken := map[DeliveryFault]float64{} // by seed and filters, the draw that a fault has part in
	for _, f := range all {
		if f.always() {
			continue
		}
		draw := DeliveryFault{Seed: f.Seed, Endpoint: f.Endpoint, Event: f.Event, Reference: f.Reference, Attempt: f.Attempt}
		if f.from = taken[draw]; f.from+f.Rate > 1+1e-9 {
			return deliveryFaultError("rate", "the faults of seed "+strconv.FormatInt(f.Seed, 10)+
				" with these filters add up to more than 1")
		}
		taken[draw] += f.Rate
	}
	s.events.faults = all
	return nil
}

// ScriptDeliveries lays down what happens to the next attempts for the effects of a reference, counted from this call, as
// [Server.Script] does for the sends of a key: the zero DeliveryFault lets its attempt pass untouched, the empty reference
// means any attempt, counted over all, and a reference's own script goes first. Copies are no attempts. Filters
// (Endpoint, Event, Reference, Attempt, Times, Rate) have no place in a script and are refused.
func (s *Server) ScriptDeliveries(reference string, faults ...DeliveryFault) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	steps := make([]*armedDelivery, len(faults))
	for i, f := range faults {
		if f == (DeliveryFault{}) {
			continue
		}
		a, err := s.armDelivery(f)
		for name, set := range map[string]bool{
			"endpoint": f.Endpoint != "", "event": f.Event != "", "reference": f.Reference != "",
			"attempt": f.Attempt != 0, "times": f.Times != 0, "rate": !f.always(),
		} {
			if set && err == nil {
				err = deliveryFaultError(name, "has no place in a script")
			}
		}
		if err != nil {
			return numbered(i, err)
		}
		steps[i] = a
	}
	s.events.scripts[reference] = &deliveryScript{steps: steps}
	return nil
}

// chooseDelivery finds the one fault of an attempt; nil = none. s.mu is held.
func (s *Server) chooseDelivery(ev *event) *armedDelivery {
	common, scripted := s.events.step("")
	if ev.Reference != "" {
		if own, ok := s.events.step(ev.Reference); ok {
			return own
		}
	}
	if scripted {
		return common
	}
	for _, f := range s.events.faults {
		if f.hitsAttempt(ev) {
			f.hits++
			return f
		}
	}
	return nil
}

func (v *events) step(reference string) (f *armedDelivery, scripted bool) {
	sc := v.scripts[reference]
	if sc == nil || sc.next == len(sc.steps) {
		return nil, false
	}
	sc.next++
	return sc.steps[sc.next-1], true
}

func (f *armedDelivery) hitsAttempt(ev *event) bool {
	if f.Endpoint != "" && f.Endpoint != ev.Endpoint || f.Event != "" && f.Event != ev.Type ||
		f.Reference != "" && f.Reference != ev.Reference || f.Attempt != 0 && f.Attempt != ev.Attempts ||
		f.Times != 0 && f.hits >= f.Times {
		return false
	}
	if f.always() {
		return true
	}
	what := ev.Key
	if what == "" {
		what = ev.Reference
	}
	if what == "" {
		what = ev.ID
	}
	u := drawn(f.Seed, ev.Endpoint+" "+ev.Type+" "+what, ev.Attempts)
	return f.from <= u && u < f.from+f.Rate
}

// content is what a delivery says, and when it claims to have been sent.
type content struct {
	id, kind string
	data     eventData
	shift    time.Duration // of the time that is signed, from now
	size     int           // of the body; 0 = as it comes
	strange  bool          // signed with another secret
}

// pack signs an attempt as its fault wants it.
func (s *Server) pack(a *attempt) parcel {
	f, c := a.fault, a.content()
	switch {
	case f.is(OldTimestamp):
		c.shift = -f.Delay
	case f.is(FutureTimestamp):
		c.shift = f.Delay
	case f.is(Huge):
		c.size = f.Bytes
	case f.strange():
		c.data.Note, c.strange = string(f.Kind), true
	}
	p := s.wrap(a, a.ev.to, c)
	switch {
	case f.is(Unsigned):
		p.header, p.Signature = p.header[:len(p.header)-1], ""
	case f.is(Reencoded):
		var again bytes.Buffer
		_ = json.Indent(&again, p.body, "", "  ") // it is JSON
		p.body = again.Bytes()
	}
	return p
}

func (a *attempt) content() content { return content{id: a.ev.ID, kind: a.ev.Type, data: a.ev.data} }

// wrap makes and signs the bytes for an endpoint.
func (s *Server) wrap(a *attempt, to *endpoint, c content) parcel {
	s.mu.Lock()
	e, keys, at := to.Endpoint, to.key, s.now().Add(c.shift)
	s.mu.Unlock()
	var attempted time.Time
	if e.TimeInBody {
		attempted = at
	}
	const padding = `"padding":"x"`
	if c.size > 0 {
		c.data.Padding = "x"
	}
	body := e.Scheme.body(c.id, c.kind, a.ev.At, attempted, c.data)
	if more := c.size - len(body); more > 0 {
		at := bytes.LastIndex(body, []byte(padding)) + len(padding) - 1
		body = slices.Insert(body, at, bytes.Repeat([]byte("x"), more)...)
	}
	if c.strange {
		keys = [][]byte{[]byte(invented)}
	}
	header := e.Scheme.sign(keys, c.id, at, body)
	return parcel{
		Delivery: Delivery{
			Endpoint: e.Name, ID: c.id, Type: c.kind, Effect: a.ev.Effect, Reference: a.ev.Reference,
			Attempt: a.n, Fault: a.text,
			Timestamp: time.Unix(at.Unix(), 0), Signature: header[len(header)-1].value,
		},
		of: a.ev, to: to, fault: a.fault, header: header, body: body,
	}
}

// copies sends what the fault adds: together with the attempt, or after it.
func (s *Server) copies(a *attempt, p parcel, together bool) {
	f := a.fault
	if f == nil || !deliveryKinds[f.Kind].copy || together != (f.Kind == Twice && f.Delay == 0) {
		return
	}
	var copies []func() parcel
	same := func(c content, to *endpoint) func() parcel { return func() parcel { return s.wrap(a, to, c) } }
	c := a.content()
	switch f.Kind {
	case Twice:
		for i := range f.Copies {
			if c.shift = -time.Duration(i) * time.Second; f.Delay == 0 {
				c.shift -= time.Second // the attempt itself is signed at this one
			}
			copies = append(copies, same(c, a.ev.to))
		}
	case Replayed:
		copies = append(copies, func() parcel { return p })
	case OtherBody:
		c.data.Note = string(OtherBody)
		copies = append(copies, same(c, a.ev.to))
	case OtherID:
		s.mu.Lock()
		s.events.made++
		c.id = a.ev.to.IDPrefix + strconv.Itoa(s.events.made)
		s.mu.Unlock()
		copies = append(copies, same(c, a.ev.to))
	case OtherSource:
		s.mu.Lock()
		to := s.endpoint(f.To)
		s.mu.Unlock()
		c.kind, c.data = otherEvent, eventData{ID: c.id, Object: "other", Note: string(OtherSource)}
		copies = append(copies, func() parcel {
			p := s.wrap(a, to, c)
			p.Effect, p.Reference = 0, ""
			return p
		})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, packed := range copies {
		s.spawn(func() {
			if s.wait(f.Delay, a.ev.era) {
				p := packed()
				p.Copy = true
				s.post(p)
			}
		})
	}
}

// MixedDeliveries is a mix of delivery faults for load tests: together they hit the given share of all attempts, at most
// one each, and every event can still be delivered. None waits for longer than a second. A rate of 0 or less gives none, above
// 1 counts as 1.
func MixedDeliveries(rate float64, seed int64) []DeliveryFault {
	if rate = min(rate, 1); !(rate > 0) {
		return nil
	}
	mix := []DeliveryFault{
		{Kind: Twice}, {Kind: Twice, Copies: 4}, {Kind: Twice, Delay: time.Second},
		{Kind: Replayed, Delay: time.Second}, {Kind: OtherBody}, {Kind: OtherBody, Delay: time.Second},
		{Kind: Reordered, Delay: time.Second}, {Kind: OldTimestamp}, {Kind: FutureTimestamp},
		{Kind: Forged}, {Kind: Unsigned}, {Kind: Reencoded}, {Kind: LostAnswer}, {Kind: LostAnswer},
	}
	for i := range mix {
		mix[i].Rate, mix[i].Seed = rate/float64(len(mix)), seed
	}
	return mix
}
