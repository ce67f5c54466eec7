package fakeserver

import (
	"net/http"
	"time"
)

// Effect is one thing that really happened. The ledger of effects is kept apart from the idempotency table and knows
// nothing of keys being unique, so a server that executes twice is seen.
type Effect struct {
	N         int    // 1 = the first effect of this server
	Kind      string // "payment", "status", "refund", "reservation", "cancellation", "upload", or "handled" by a stub
	ID        string // of the resource that was made or changed
	Reference string // the caller's own name for it, from the request body
	Key       string // the idempotency key; "" = none
	Caller    string // see Send.Caller
	Endpoint  string // route pattern, for example "POST /v1/payments"
	Amount    int64  // minor units of the currency; bytes for an upload; 0 for bookings
	At        time.Time
	Send      int // Send.N that caused it
}

// Send is one request that arrived with complete headers, from a client or from a network that delivers twice.
type Send struct {
	N       int      // 1 = the first send of this server, in order of arrival
	Key     string   // the idempotency key; "" = none, or one that the server refuses
	Keys    []string // all raw values of the key header
	KeySend int      // 1 = the first send with this key; without a key: with this method and path

	Method    string
	Path      string // without the query
	Endpoint  string // route pattern; "" = no such route
	Caller    string // who sent it: a hash of the credential, or the account (see Settings.KeyPer); "" = no Authorization
	Reference string // from the body or query, or of what was cancelled; "" = none, or the body was not understood

	Header           http.Header // Authorization, Proxy-Authorization and Cookie values read "[redacted]"
	ContentLength    int64       // as announced; -1 = unknown
	TransferEncoding []string
	BodyLen          int64  // bytes that were read
	BodySHA256       string // hexadecimal; "" = the body was not read to its end

	Conn      int    // number of the connection it came on
	Status    int    // that was answered (begun at least); 0 = none
	Fault     string // Fault.String of the fault chosen for it; "" = none
	Replayed  bool   // the stored answer was used
	Duplicate bool   // delivered by a Duplicate fault, not by a client; KeySend is that of the original
	Effect    int    // Effect.N that it caused; 0 = none
	At        time.Time
	Ended     time.Time // when the server was done with it, with or without an answer; zero = it still runs
}

// Filter selects effects, sends, events and deliveries. Zero fields match everything, the others must be equal. Events and
// deliveries are selected by their effects.
type Filter struct {
	Key, Caller, Endpoint, Reference string
	Kind                             string // of the effect; a send matches if it caused such an effect
}

func (f Filter) matches(key, caller, endpoint, reference, kind string) bool {
	return (f.Key == "" || f.Key == key) &&
		(f.Caller == "" || f.Caller == caller) &&
		(f.Endpoint == "" || f.Endpoint == endpoint) &&
		(f.Reference == "" || f.Reference == reference) &&
		(f.Kind == "" || f.Kind == kind)
}

// Effects gives copies of the effects that match any of the filters, oldest first. No filter: all.
func (s *Server) Effects(filters ...Filter) []Effect {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []Effect
	each(filters, s.effectsByKey, len(s.effects), func(i int, f Filter) bool {
		e := s.effects[i]
		ok := f.matches(e.Key, e.Caller, e.Endpoint, e.Reference, e.Kind)
		if ok {
			found = append(found, e)
		}
		return ok
	})
	return found
}

// Sends gives copies of the sends that match any of the filters, oldest first. No filter: all.
// A send is listed as soon as its headers have arrived; what comes later (body, status, effect) is filled in as it happens,
// and always before the first byte of the answer.
func (s *Server) Sends(filters ...Filter) []Send {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []Send
	each(filters, s.sendsByKey, len(s.sends), func(i int, f Filter) bool {
		n := s.sends[i]
		kind := ""
		if n.Effect > 0 {
			kind = s.effects[n.Effect-1].Kind
		}
		ok := f.matches(n.Key, n.Caller, n.Endpoint, n.Reference, kind)
		if ok {
			found = append(found, n.copy())
		}
		return ok
	})
	return found
}

// each calls take for every entry and filter until it says yes. One filter with a key goes by the index: checking
// every key of a long run would be quadratic otherwise.
func each(filters []Filter, byKey map[string][]int, n int, take func(int, Filter) bool) {
	if len(filters) == 1 && filters[0].Key != "" {
		for _, i := range byKey[filters[0].Key] {
			take(i, filters[0])
		}
		return
	}
	if len(filters) == 0 {
		filters = []Filter{{}}
	}
	for i := range n {
		for _, f := range filters {
			if take(i, f) {
				break
			}
		}
	}
}

// enter writes an effect into the ledger. s.mu is held.
func (s *Server) enter(q *request, e Effect) {
	e.N = len(s.effects) + 1
	e.Key, e.Caller, e.Endpoint = q.key, q.caller, q.route.pattern
	if e.Reference == "" {
		e.Reference = q.reference
	}
	e.At, e.Send = s.now(), q.send.N
	s.effects = append(s.effects, e)
	if e.Key != "" {
		s.effectsByKey[e.Key] = append(s.effectsByKey[e.Key], e.N-1)
	}
	q.send.Effect = e.N
	s.tell(e)
	if e.Kind == "cancellation" {
		q.send.Reference = e.Reference
	}
}

// list records a send. s.mu is held.
func (s *Server) list(n *Send) {
	n.N = len(s.sends) + 1
	n.At = s.now()
	s.sends = append(s.sends, n)
	if n.Key != "" {
		s.sendsByKey[n.Key] = append(s.sendsByKey[n.Key], n.N-1)
	}
}

// redacted is a copy of h that is safe to print.
func redacted(h http.Header) http.Header {
	c := h.Clone()
	for _, name := range [...]string{"Authorization", "Proxy-Authorization", "Cookie"} {
		for i := range c[name] {
			c[name][i] = "[redacted]"
		}
	}
	return c
}
