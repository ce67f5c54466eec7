package fakeserver

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	defaultDeliveryTimeout = 30 * time.Second
	defaultParallel        = 16
	maxRetryAfter          = 24 * time.Hour

	secretPrefix                   = "whsec_"
	minSecretBytes, maxSecretBytes = 24, 64
)

// Endpoint is where the server tells of its effects; see [Server.Register].
type Endpoint struct {
	// Name is what faults and lists call it. Empty: the URL, or for a Handler "endpoint-1" and so on.
	Name string

	// URL is where deliveries are posted: http or https, without user information. With a Handler: its path. Empty: "/".
	URL string

	// Handler receives the deliveries in this process, from a real http.Server: over loopback, or in memory where the
	// server itself is in memory. Nil: URL is somewhere else. [Server.Close] waits until it has returned.
	Handler http.Handler

	// Transport carries deliveries to URL. It must be safe for concurrent use, and is never closed here. Nil: plain
	// connections, a new one for each delivery. A server in memory reaches a URL only by a Transport, its own
	// [Server.Transport] for example, for what [Server.Mount] put there.
	Transport http.RoundTripper

	// Scheme says how deliveries are signed. Empty: StandardWebhooks.
	Scheme Scheme

	// Secrets sign every delivery, one signature each: two while a secret is being replaced. At least one.
	// StandardWebhooks wants "whsec_" and the base64 of 24 to 64 bytes, StripeSignature any text.
	Secrets []string

	// TimeInBody puts the time of each delivery in its body, as "attempted_at", so that every delivery of an event has other
	// bytes. False: all have the same.
	TimeInBody bool

	// Schedule is how long the server waits after the first attempt that failed, after the second, and so on: one attempt
	// more than there are waits, then it gives the event up. It follows time.Now, not [Server.Advance].
	// Nil: [StandardSchedule]. Empty but not nil: one attempt and no more.
	Schedule []time.Duration

	// Timeout is how long the server waits for the answer to a delivery. Zero: 30 seconds.
	Timeout time.Duration

	// Parallel is how many attempts are under way at the same time; copies that a fault adds do not count. Zero: 16. With 1
	// the first attempts come in the order of the ledger, unless a fault holds one; otherwise there is no order.
	Parallel int

	// IDPrefix begins the ids of events, up to 64 of a-z, A-Z, 0-9, _ and -; a number follows. Empty: "msg_", with
	// StripeSignature "evt_". Where a receiver remembers more than one server, give each server its own.
	IDPrefix string
}

// StandardSchedule is the example of the Standard Webhooks specification: an attempt at once, and then after 5 s, 5 min,
// 30 min, 2 h, 5 h, 10 h, 14 h, 20 h and 24 h, the tenth and last 75 h 35 min 5 s after the first.
func StandardSchedule() []time.Duration {
	return []time.Duration{
		5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour,
		10 * time.Hour, 14 * time.Hour, 20 * time.Hour, 24 * time.Hour,
	}
}

// endpoint is one that was registered. Server.mu guards it.
type endpoint struct {
	Endpoint // to register a name again replaces it
	key      [][]byte
	host     *host // of the Handler; nil = none yet
	gone     bool  // it said 410
	turns    *turns
	held     []held
}

// Register adds an endpoint: every effect from now on is an event for it. A name that is registered already is replaced:
// secrets, address, schedule; an endpoint that said 410 is told again. Events that are still pending go where the
// name leads at each attempt. The error names the field, and never repeats a secret.
func (s *Server) Register(e Endpoint) error {
	key, err := e.check(s.mem != nil)
	if err != nil {
		return err
	}
	fill(&e.Scheme, StandardWebhooks)
	fill(&e.Timeout, defaultDeliveryTimeout)
	fill(&e.Parallel, defaultParallel)
	fill(&e.IDPrefix, e.Scheme.idPrefix())
	if e.Schedule == nil {
		e.Schedule = StandardSchedule()
	}
	e.Secrets, e.Schedule = slices.Clone(e.Secrets), slices.Clone(e.Schedule)
	if e.Handler == nil {
		fill(&e.Name, e.URL)
	} else {
		fill(&e.URL, "/")
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("fakeserver: endpoint: %w", http.ErrServerClosed)
	}
	for n := len(s.events.endpoints) + 1; e.Name == ""; n++ {
		if name := "endpoint-" + strconv.Itoa(n); s.endpoint(name) == nil {
			e.Name = name
		}
	}
	to := s.endpoint(e.Name)
	var at *host
	if to != nil {
		at = to.host
	}
	if e.Handler != nil && at == nil {
		if at, err = s.newHost(); err != nil {
			return err
		}
	}
	if to == nil {
		to = &endpoint{turns: newTurns(e.Parallel)}
		s.events.endpoints = append(s.events.endpoints, to)
	} else {
		to.turns.resize(e.Parallel)
	}
	to.Endpoint, to.key, to.host, to.gone = e, key, at, false
	if e.Handler != nil {
		at.handler = e.Handler
	}
	return nil
}

// check says what is wrong, and gives the secrets as the bytes that sign.
func (e Endpoint) check(inMemory bool) (key [][]byte, err error) {
	wrong := func(field, what string) ([][]byte, error) {
		return nil, errors.New("fakeserver: endpoint: " + field + ": " + what)
	}
	switch {
	case e.Scheme != "" && e.Scheme != StandardWebhooks && e.Scheme != StripeSignature:
		return wrong("scheme", "unknown scheme "+strconv.Quote(string(e.Scheme))+"; there are "+
			string(StandardWebhooks)+", "+string(StripeSignature))
	case e.Handler == nil && e.URL == "":
		return wrong("url", "is needed without a handler")
	case e.Handler != nil && e.Transport != nil:
		return wrong("transport", "does not go with a handler")
	case e.Handler != nil && e.URL != "" && !strings.HasPrefix(e.URL, "/"):
		return wrong("url", "must be a path that begins with a slash, or empty, with a handler")
	case e.Handler == nil && e.Transport == nil && inMemory:
		return wrong("url", "is not reached from a server in memory without a transport; give a handler")
	case len(e.Secrets) == 0:
		return wrong("secrets", "at least one is needed")
	case e.Timeout < 0:
		return wrong("timeout", "is negative")
	case e.Parallel < 0:
		return wrong("parallel", "is negative")
	case len(e.IDPrefix) > 64 || strings.ContainsFunc(e.IDPrefix, notInID):
		return wrong("id_prefix", "must be at most 64 of a-z, A-Z, 0-9, _ and -")
	}
	if u, err := url.Parse(e.URL); err != nil {
		return wrong("url", "is not a URL") // the text of err would repeat it
	} else if u.User != nil {
		return wrong("url", "has user information")
	} else if e.Handler == nil && (u.Scheme != "http" && u.Scheme != "https" || u.Host == "") {
		return wrong("url", "must begin with http:// or https:// and a host")
	}
	for i, d := range e.Schedule {
		if d < 0 {
			return wrong("schedule", "number "+strconv.Itoa(i+1)+" is negative")
		}
	}
	for i, secret := range e.Secrets {
		if e.Scheme == StripeSignature {
			if secret == "" {
				return wrong("secrets", "number "+strconv.Itoa(i+1)+" is empty")
			}
			key = append(key, []byte(secret))
			continue
		}
		text, ok := strings.CutPrefix(secret, secretPrefix)
		b, err := base64.StdEncoding.DecodeString(text)
		if !ok || err != nil || len(b) < minSecretBytes || len(b) > maxSecretBytes {
			return wrong("secrets", "number "+strconv.Itoa(i+1)+" is not whsec_ and the base64 of 24 to 64 bytes")
		}
		key = append(key, b)
	}
	return key, nil
}

func notInID(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' && r != '-'
}

// Sign gives the headers of a delivery of this endpoint, for a test that delivers by itself. Only Scheme and Secrets are read; the
// id has no place in the headers of StripeSignature, it is in the body.
func (e Endpoint) Sign(id string, at time.Time, body []byte) (http.Header, error) {
	fill(&e.URL, "http://fakeserver.test/") // neither matters here
	key, err := e.check(false)
	if err != nil {
		return nil, err
	}
	h := http.Header{}
	for _, f := range e.Scheme.sign(key, id, at, body) {
		h.Set(f.name, f.value)
	}
	return h, nil
}

// endpoint finds a registered one; nil = there is none. s.mu is held.
func (s *Server) endpoint(name string) *endpoint {
	for _, e := range s.events.endpoints {
		if e.Name == name {
			return e
		}
	}
	return nil
}

// address is the URL that is posted to. Server.mu is held.
func (e *endpoint) address() string {
	if e.Handler != nil {
		return "http://" + e.host.addr + e.URL
	}
	return e.URL
}

// carrier is what takes a delivery there; nil = plain connections. Server.mu is held.
func (e *endpoint) carrier() (given http.RoundTripper, dial dialer) {
	if e.Handler != nil {
		return nil, e.host.dial
	}
	return e.Transport, nil
}

type dialer func(ctx context.Context, network, addr string) (net.Conn, error)

// host serves the Handler of an endpoint.
type host struct {
	http     http.Server
	listener net.Listener
	addr     string
	dial     dialer                // nil = a real one
	handler  http.Handler          // guarded by Server.mu
	conns    map[net.Conn]struct{} // that Close waits for; guarded by Server.mu
}

// newHost starts one. s.mu is held, and the server is open.
func (s *Server) newHost() (*host, error) {
	h := &host{conns: map[net.Conn]struct{}{}}
	if s.mem != nil {
		l := newMemListener()
		h.listener, h.addr = l, "endpoint"+strconv.Itoa(len(s.events.hosts)+1)+".test"
		h.dial = func(ctx context.Context, _, _ string) (net.Conn, error) { return l.dial(ctx) }
	} else {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, listenError{err}
		}
		h.listener, h.addr = l, l.Addr().String()
	}
	h.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.begin() {
			panic(http.ErrAbortHandler)
		}
		defer s.leave()
		s.mu.Lock()
		receive := h.handler
		s.mu.Unlock()
		receive.ServeHTTP(w, r)
	})
	h.http.ConnState = func(c net.Conn, state http.ConnState) { s.trackHost(h, c, state) }
	s.events.hosts = append(s.events.hosts, h)
	s.running.Add(1)
	go func() {
		defer s.running.Done()
		_ = h.http.Serve(h.listener) // ends by Close of the server
	}()
	return h, nil
}

// trackHost lets Close wait for the connections of a host: net/http lingers for half a second on one whose request it has not
// read to its end, and that would outlive a synctest bubble.
func (s *Server) trackHost(h *host, c net.Conn, state http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch _, known := h.conns[c]; {
	case state == http.StateNew && !s.closed:
		h.conns[c] = struct{}{}
		s.running.Add(1) // the accept loop, of newHost, has a claim on it
	case known && (state == http.StateClosed || state == http.StateHijacked):
		delete(h.conns, c)
		s.running.Done()
	}
}

// turns lets so many attempts at an endpoint run at the same time, the others in the order in which they came.
type turns struct {
	size, free int
	waiting    []chan struct{}
}

func newTurns(n int) *turns { return &turns{size: n, free: n} }

func (t *turns) resize(n int) {
	t.size, t.free = n, t.free+n-t.size
	t.pass()
}

// take gives a channel that is closed when the turn has come; done must follow. Server.mu is held.
func (t *turns) take() chan struct{} {
	c := make(chan struct{})
	t.waiting = append(t.waiting, c)
	t.pass()
	return c
}

func (t *turns) done() {
	t.free++
	t.pass()
}

func (t *turns) pass() {
	for t.free > 0 && len(t.waiting) > 0 {
		t.free--
		close(t.waiting[0])
		t.waiting = t.waiting[1:]
	}
}
