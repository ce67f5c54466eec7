package fakeserver

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// EventState says what has become of an event.
type EventState string

const (
	EventPending   EventState = "pending"   // the server goes on, or was closed first
	EventDelivered EventState = "delivered" // an attempt was answered with 2xx, and the server heard it
	EventGivenUp   EventState = "given-up"  // the last attempt failed, or the endpoint said 410
)

// Event is one effect that one endpoint is told of, at least once.
type Event struct {
	ID        string // the same in every delivery, and at every endpoint with the same IDPrefix
	Type      string // "payment.succeeded" for example; the package comment lists them
	Endpoint  string // Endpoint.Name
	Effect    int    // Effect.N
	Reference string // of the effect
	Key       string // of the effect

	State    EventState
	Attempts int       // begun
	At       time.Time // of the effect
	Next     time.Time // when the next attempt is due, by the server's clock; zero = none is waiting
	Ended    time.Time // when it was delivered or given up; zero = it is pending
}

// Delivery is one arrival of an event at an endpoint, or what a fault makes of it.
type Delivery struct {
	N         int    // 1 = the first delivery of this server, in the order in which they left
	Endpoint  string // Endpoint.Name
	ID        string // of the event, as it was sent
	Type      string // of the event, as it was sent
	Effect    int    // Effect.N that it tells of; 0 = none, the content is made up
	Reference string // of that effect; "" = none

	Attempt int    // 1 = the first attempt for this event
	Copy    bool   // one more than the attempt, by a fault; its answer changes nothing for the event
	Fault   string // DeliveryFault.String of the fault that made it or was chosen for it; "" = none

	Timestamp  time.Time // that was signed, in whole seconds
	Signature  string    // the header; "" = unsigned, or Settings.ForgetHeaders
	BodyLen    int64
	BodySHA256 string // hexadecimal; "" = Settings.ForgetHeaders

	Status   int   // that the endpoint answered; 0 = no answer came
	Err      error // why the server heard no answer; nil = it heard one, or it still waits
	Accepted bool  // the server heard a 2xx, and this is not a copy: the event is delivered

	At    time.Time // when it left, by the server's clock, as is Ended
	Ended time.Time // when it was answered or had failed; zero = it is under way
}

// events is what a server knows of endpoints and of what they are told. Server.mu guards it.
type events struct {
	endpoints []*endpoint
	hosts     []*host
	made      int // ever, also before a Reset: an id never comes twice
	era       chan struct{}

	all             []*event
	byKey           map[string][]int
	deliveries      []*delivery
	deliveriesByKey map[string][]int
	faults          []*armedDelivery
	scripts         map[string]*deliveryScript

	busy int           // goroutines that deliver or wait to
	idle chan struct{} // closed when none is left; nil = none is
}

func newEvents() events {
	return events{
		era: make(chan struct{}), byKey: map[string][]int{}, deliveriesByKey: map[string][]int{},
		scripts: map[string]*deliveryScript{},
	}
}

// forget ends what is pending and begins the lists anew. Endpoints stay.
func (v *events) forget() {
	close(v.era)
	fresh := newEvents()
	fresh.endpoints, fresh.hosts, fresh.made, fresh.busy, fresh.idle = v.endpoints, v.hosts, v.made, v.busy, v.idle
	*v = fresh
	for _, e := range v.endpoints {
		e.turns, e.held, e.gone = newTurns(e.Parallel), nil, false
	}
}

// event is one that is listed.
type event struct {
	Event
	n      int
	to     *endpoint
	effect Effect
	data   eventData
	era    chan struct{} // closed by Reset
}

// delivery is one that is listed.
type delivery struct {
	Delivery
	of *event
}

// attempt is a delivery as the server means it, on its way.
type attempt struct {
	ev    *event
	n     int
	fault *DeliveryFault // nil = none
	text  string         // of the fault
	turns *turns
	turn  chan struct{} // nil = not asked for yet
	over  chan struct{} // of Reordered
}

// tell makes an event of an effect for every endpoint, and begins to deliver it. s.mu is held.
func (s *Server) tell(e Effect) {
	v := &s.events
	if len(v.endpoints) == 0 {
		return
	}
	v.made++
	kind, data := s.eventOf(e)
	for _, to := range v.endpoints {
		if to.gone {
			continue
		}
		ev := &event{n: len(v.all) + 1, to: to, effect: e, data: data, era: v.era, Event: Event{
			ID: to.IDPrefix + strconv.Itoa(v.made), Type: kind, Endpoint: to.Name,
			Effect: e.N, Reference: e.Reference, Key: e.Key, State: EventPending, At: e.At,
		}}
		v.all = append(v.all, ev)
		if e.Key != "" {
			v.byKey[e.Key] = append(v.byKey[e.Key], ev.n-1)
		}
		if a := s.nextAttempt(ev); a != nil {
			s.spawn(func() { s.pursue(a) })
		}
	}
}

// spawn runs f beside everything else. s.mu is held, and so is a claim on s.running: by the exchange or delivery that calls.
func (s *Server) spawn(f func()) {
	if s.closed {
		return
	}
	if s.events.busy++; s.events.idle == nil {
		s.events.idle = make(chan struct{})
	}
	s.running.Add(1)
	go func() {
		defer s.leave()
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.events.busy--; s.events.busy == 0 {
				close(s.events.idle)
				s.events.idle = nil
			}
		}()
		f()
	}()
}

// AwaitEvents returns when every event of the effects so far has been delivered or given up, and every copy has arrived. It waits
// through the whole schedule if it must: hours, that pass at once in virtual time. The error is the cause of the
// context's end, or http.ErrServerClosed.
func (s *Server) AwaitEvents(ctx context.Context) error {
	s.mu.Lock()
	idle, closed := s.events.idle, s.closed
	s.mu.Unlock()
	switch {
	case closed:
		return http.ErrServerClosed
	case idle == nil:
		return nil
	}
	select {
	case <-idle:
		return nil
	case <-s.done:
		return http.ErrServerClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// nextAttempt begins one and chooses its fault; nil = there will be none. s.mu is held.
func (s *Server) nextAttempt(ev *event) *attempt {
	if s.closed || !s.knows(ev) {
		return nil
	}
	ev.Next = time.Time{}
	if ev.to.gone {
		s.end(ev, EventGivenUp)
		return nil
	}
	ev.Attempts++
	a := &attempt{ev: ev, n: ev.Attempts, turns: ev.to.turns}
	if chosen := s.chooseDelivery(ev); chosen != nil {
		f := chosen.DeliveryFault
		a.fault, a.text = &f, chosen.text
	}
	switch {
	case a.fault.is(Reordered):
		a.over = make(chan struct{})
		ev.to.held = append(ev.to.held, held{ev.n, a.over})
	case !a.fault.is(Delayed):
		a.turn = a.turns.take()
	}
	return a
}

// knows is false for an event from before a Reset. s.mu is held.
func (s *Server) knows(ev *event) bool { return ev.era == s.events.era }

// end writes down what has become of an event. s.mu is held.
func (s *Server) end(ev *event, state EventState) {
	ev.State, ev.Ended, ev.Next = state, s.now(), time.Time{}
}

// pursue goes from attempt to attempt until the event ends.
func (s *Server) pursue(a *attempt) {
	for a != nil {
		d, after, ok := s.carry(a)
		if !ok {
			return
		}
		wait, again := s.conclude(a, d, after)
		if !again || !s.wait(wait, a.ev.era) {
			return
		}
		s.mu.Lock()
		a = s.nextAttempt(a.ev)
		s.mu.Unlock()
	}
}

// carry makes one attempt, with what its fault adds. After is what a Retry-After asks for. Not ok: it never left, because the
// server was closed or reset.
func (s *Server) carry(a *attempt) (d *delivery, after time.Duration, ok bool) {
	var p parcel
	switch {
	case a.fault.is(Reordered):
		if !s.overtaken(a) {
			return nil, 0, false
		}
	case a.fault.is(Delayed):
		p = s.pack(a)
		if !s.wait(a.fault.Delay, a.ev.era) {
			return nil, 0, false
		}
	}
	if a.turn == nil {
		s.mu.Lock()
		a.turn = a.turns.take()
		s.mu.Unlock()
	}
	select {
	case <-a.turn:
	case <-a.ev.era:
		return nil, 0, false
	case <-s.done:
		return nil, 0, false
	}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		a.turns.done()
	}()
	if p.body == nil {
		p = s.pack(a)
	}
	s.copies(a, p, true)
	if d, after = s.post(p); d == nil {
		return nil, 0, false
	}
	s.copies(a, p, false)
	return d, after, true
}

// conclude says what follows an attempt: the event has ended, or another one after the wait.
func (s *Server) conclude(a *attempt, d *delivery, after time.Duration) (wait time.Duration, again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ev := a.ev
	if !s.knows(ev) {
		return 0, false
	}
	ev.to.release(ev.n)
	switch {
	case d.Accepted:
		s.end(ev, EventDelivered)
		return 0, false
	case d.Status == http.StatusGone && d.Err == nil && ev.to.Scheme == StandardWebhooks && !a.fault.strange():
		ev.to.gone = true
		s.end(ev, EventGivenUp)
		return 0, false
	case a.n > len(ev.to.Schedule):
		s.end(ev, EventGivenUp)
		return 0, false
	}
	wait = max(ev.to.Schedule[a.n-1], after)
	ev.Next = s.now().Add(wait)
	return wait, true
}

// parcel is a delivery that is packed and signed.
type parcel struct {
	Delivery
	of     *event
	to     *endpoint
	fault  *DeliveryFault // nil = none
	header []field
	body   []byte
}

// post delivers a parcel and lists it. Nil: it was not sent, because the server was closed or reset.
func (s *Server) post(p parcel) (d *delivery, after time.Duration) {
	p.BodyLen = int64(len(p.body))
	sum := sha256.Sum256(p.body)
	p.BodySHA256 = hex.EncodeToString(sum[:])
	s.mu.Lock()
	if s.closed || !s.knows(p.of) {
		s.mu.Unlock()
		return nil, 0
	}
	v := &s.events
	d = &delivery{p.Delivery, p.of}
	d.N, d.At = len(v.deliveries)+1, s.now()
	if s.settings.ForgetHeaders {
		d.BodySHA256, d.Signature = "", ""
	}
	v.deliveries = append(v.deliveries, d)
	if key := p.of.Key; key != "" {
		v.deliveriesByKey[key] = append(v.deliveriesByKey[key], d.N-1)
	}
	address, timeout, life := p.to.address(), p.to.Timeout, s.life
	carrier, dial := p.to.carrier()
	s.mu.Unlock()
	if carrier == nil {
		// A connection of its own, but not by DisableKeepAlives: to a request that says Connection: close, net/http answers
		// 413 and resets, and the answer is lost.
		own := &http.Transport{DialContext: dial}
		defer own.CloseIdleConnections()
		carrier = own
	}

	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	ctx, end := s.alive(ctx, life)
	defer end()
	status, after, err := send(ctx, carrier, address, p, p.fault.is(LostAnswer) && !p.Copy)

	s.mu.Lock()
	defer s.mu.Unlock()
	d.Status, d.Err, d.Ended = status, err, s.now()
	d.Accepted = err == nil && status/100 == 2 && !d.Copy && !p.fault.strange()
	return d, after
}

// send posts a parcel. Lose: the answer comes, and the sender does not hear it.
func send(ctx context.Context, carrier http.RoundTripper, address string, p parcel, lose bool) (status int, after time.Duration, err error) {
	var conn net.Conn
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) {
		if conn = c.Conn; lose {
			resetWhenClosed(conn) // net/http may close it before the answer is looked at
		}
	}})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, address, bytes.NewReader(p.body))
	if err != nil {
		return 0, 0, err
	}
	req.GetBody = nil // so that net/http never sends it again by itself
	req.Header["Content-Type"] = []string{"application/json"}
	req.Header["User-Agent"] = []string{"fakeserver"}
	for _, f := range p.header {
		req.Header[f.name] = []string{f.value} // spelled as published
	}
	resp, err := carrier.RoundTrip(req) // no redirects
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	if lose {
		if conn != nil {
			reset(conn)
		}
		return resp.StatusCode, 0, &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // the status decides; this only lets the endpoint finish
	return resp.StatusCode, retryAfter(resp.Header.Get("Retry-After"), time.Now()), nil
}

// resetWhenClosed makes every end of a TCP connection an RST.
func resetWhenClosed(conn net.Conn) {
	switch c := conn.(type) {
	case *net.TCPConn:
		_ = c.SetLinger(0)
	case interface{ NetConn() net.Conn }:
		resetWhenClosed(c.NetConn()) // below TLS
	}
}

// retryAfter reads seconds or a date, RFC 9110, section 10.2.3; at most a day, 0 = none.
func retryAfter(value string, now time.Time) time.Duration {
	if n, err := strconv.ParseUint(value, 10, 31); err == nil {
		return min(time.Duration(n)*time.Second, maxRetryAfter)
	}
	if at, err := http.ParseTime(value); err == nil {
		return min(max(at.Sub(now), 0), maxRetryAfter)
	}
	return 0
}

// Events gives copies of the events whose effects match any of the filters, in the order of the ledger. No filter: all.
func (s *Server) Events(filters ...Filter) []Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []Event
	each(filters, s.events.byKey, len(s.events.all), func(i int, f Filter) bool {
		ev := s.events.all[i]
		ok := f.tells(ev.effect)
		if ok {
			found = append(found, ev.Event)
		}
		return ok
	})
	return found
}

// Deliveries gives copies of the deliveries whose effects match any of the filters, in the order in which they left. No filter:
// all. A delivery is listed before it leaves; what comes later (status, error, end) is filled in as it happens. What a
// fault made up ([OtherSource]) is found with the effect of the event whose id it bears.
func (s *Server) Deliveries(filters ...Filter) []Delivery {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []Delivery
	each(filters, s.events.deliveriesByKey, len(s.events.deliveries), func(i int, f Filter) bool {
		d := s.events.deliveries[i]
		ok := f.tells(d.of.effect)
		if ok {
			found = append(found, d.Delivery)
		}
		return ok
	})
	return found
}

func (f Filter) tells(e Effect) bool {
	return f.matches(e.Key, e.Caller, e.Endpoint, e.Reference, e.Kind)
}

// held is an attempt that waits to be overtaken.
type held struct {
	n    int // of its event
	over chan struct{}
}

// overtaken holds an attempt until one of a later event has ended, or until its delay has passed. False: the server was
// closed or reset meanwhile.
func (s *Server) overtaken(a *attempt) bool {
	timer := time.NewTimer(a.fault.Delay)
	defer timer.Stop()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		to := a.ev.to
		to.held = slices.DeleteFunc(to.held, func(h held) bool { return h.over == a.over })
	}()
	select {
	case <-a.over:
		return true
	case <-timer.C:
		return true
	case <-a.ev.era:
		return false
	case <-s.done:
		return false
	}
}

// release lets go of the attempts that event n has overtaken. Server.mu is held.
func (e *endpoint) release(n int) {
	e.held = slices.DeleteFunc(e.held, func(h held) bool {
		if h.n < n {
			close(h.over)
		}
		return h.n < n
	})
}
