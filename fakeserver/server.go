package fakeserver

import (
	"context"
	"crypto/tls"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"
)

const (
	memHost      = "fakeserver.test"
	memOtherHost = "fakeserver-other.test" // not a subdomain: net/http would carry credentials over to one
)

// Server is the fake payment and booking server. Make one with [New], [Listen] or [NewInMemory], and Close it.
// All its methods may be called from several goroutines.
type Server struct {
	http      http.Server
	routes    *http.ServeMux
	stubs     *http.ServeMux // of Handle; these go first
	url       string
	otherURL  string
	listeners []net.Listener
	mem       *memListener // nil = real sockets
	client    *http.Client
	secure    *certificates  // nil = no TLS
	done      chan struct{}  // closed by Close
	running   sync.WaitGroup // accept loops, handlers, late copies

	mu           sync.Mutex // guards everything below; never held while waiting, so virtual time can pass
	closed       bool
	life         chan struct{}         // closed by Restart
	open         map[net.Conn]struct{} // those that net/http serves
	settings     Settings
	ahead        time.Duration // of time.Now
	refusals     int
	connFaults   []ConnFault
	proxies      map[string]*proxy // by host and port
	conns        int
	hijacked     map[net.Conn]struct{}
	transports   []*http.Transport
	keys         map[scopedKey]*record
	sends        []*Send
	sendsByKey   map[string][]int
	keySends     map[string]int
	effects      []Effect
	effectsByKey map[string][]int
	faults       []*armed
	scripts      map[string]*script
	payments     payments
	hotels       hotels
	uploads      int
	mounts       []mount
	watchers     []func(Send)
	events       events
}

// New starts a server on a free port of 127.0.0.1. It panics only if it cannot listen there.
func New() *Server {
	s, err := Listen("127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	return s
}

// Listen starts a server on addr (host:port); its second origin takes a free port of the same host.
func Listen(addr string) (*Server, error) {
	return listen(addr, nil)
}

// NewTLS is New over TLS, with HTTP/2 and HTTP/1.1. The transports of the server trust its certificate, and speak HTTP/2
// unless their ForceAttemptHTTP2 is set to false before they are used.
func NewTLS() *Server {
	s, err := listen("127.0.0.1:0", newCertificates())
	if err != nil {
		panic(err)
	}
	return s
}

func listen(addr string, secure *certificates) (*Server, error) {
	first, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, listenError{err}
	}
	host, _, _ := net.SplitHostPort(first.Addr().String())
	second, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		_ = first.Close()
		return nil, listenError{err}
	}
	s := newServer(secure)
	s.url, s.otherURL = s.scheme()+first.Addr().String(), s.scheme()+second.Addr().String()
	s.start(first, second)
	return s, nil
}

type listenError struct{ err error }

func (e listenError) Error() string { return "fakeserver: cannot listen: " + e.err.Error() }
func (e listenError) Unwrap() error { return e.err }

// NewInMemory starts the same http.Server over in-memory connections. Made, used and closed inside a testing/synctest
// bubble it runs in virtual time. Only the transports of [Server.Transport] and [Server.Client] reach it.
func NewInMemory() *Server {
	return newInMemory(nil)
}

// NewInMemoryTLS is NewInMemory over TLS, as NewTLS is.
func NewInMemoryTLS() *Server { return newInMemory(newCertificates()) }

func newInMemory(secure *certificates) *Server {
	s := newServer(secure)
	s.mem = newMemListener()
	s.url, s.otherURL = s.scheme()+memHost, s.scheme()+memOtherHost
	s.start(s.mem)
	return s
}

func (s *Server) scheme() string {
	if s.secure != nil {
		return "https://"
	}
	return "http://"
}

func newServer(secure *certificates) *Server {
	s := &Server{
		secure:       secure,
		stubs:        http.NewServeMux(),
		done:         make(chan struct{}),
		life:         make(chan struct{}),
		open:         map[net.Conn]struct{}{},
		proxies:      map[string]*proxy{},
		settings:     Settings{}.filled(),
		hijacked:     map[net.Conn]struct{}{},
		keys:         map[scopedKey]*record{},
		sendsByKey:   map[string][]int{},
		keySends:     map[string]int{},
		effectsByKey: map[string][]int{},
		scripts:      map[string]*script{},
		payments:     newPayments(),
		hotels:       newHotels(),
		events:       newEvents(),
	}
	s.routes = newRoutes(s)
	s.http.Handler = http.HandlerFunc(s.serve)
	s.http.ConnState = s.track
	s.http.ErrorLog = log.New(io.Discard, "", 0) // aborted exchanges are this server's trade, not news
	if secure != nil {
		s.http.Protocols = new(http.Protocols)
		s.http.Protocols.SetHTTP1(true)
		s.http.Protocols.SetUnencryptedHTTP2(true) // within the TLS of secureConn
	}
	s.http.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.conns++
		if c, ok := c.(*secureConn); ok {
			ctx = context.WithValue(ctx, connOf{}, c)
		}
		return context.WithValue(ctx, connNumber{}, s.conns)
	}
	return s
}

type (
	connNumber struct{}
	connOf     struct{} // the secureConn
)

func (s *Server) start(listeners ...net.Listener) {
	s.listeners = listeners
	for _, l := range listeners {
		s.running.Add(1)
		go func() {
			defer s.running.Done()
			_ = s.http.Serve(&acceptor{l, s}) // ends with ErrServerClosed, by Close
		}()
	}
	s.client = &http.Client{Transport: s.Transport()}
}

// URL is where the server is, without a trailing slash: "http://127.0.0.1:port", in memory "http://fakeserver.test".
func (s *Server) URL() string { return s.url }

// OtherURL is a second origin of the same server, for redirects that leave the first: another port, in memory another host.
func (s *Server) OtherURL() string { return s.otherURL }

// Client is a plain client that reaches the server: one transport of its own, no time limits, no retries.
func (s *Server) Client() *http.Client { return s.client }

// Transport makes a new transport that reaches the server at both of its origins. Close closes its idle connections.
func (s *Server) Transport() *http.Transport {
	t := &http.Transport{
		DialContext:         s.dial,
		MaxIdleConnsPerHost: 128, // the default of 2 would make a load test measure the dialling
	}
	if s.secure != nil {
		t.TLSClientConfig = &tls.Config{RootCAs: s.secure.pool()}
		t.ForceAttemptHTTP2 = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.transports = append(s.transports, t)
	return t
}

func (s *Server) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if p := s.proxyAt(addr); p != nil {
		return p.mem.dial(ctx)
	}
	if !s.owns(addr) {
		if s.mem != nil {
			return nil, &net.DNSError{Err: "no such host", Name: addr, IsNotFound: true}
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	if s.refuses() {
		return nil, refused(dialAddr{network, addr})
	}
	if done, err := s.dialFault(ctx, dialAddr{network, addr}); done {
		return nil, err
	}
	if s.mem != nil {
		return s.mem.dial(ctx)
	}
	return new(net.Dialer).DialContext(ctx, network, addr)
}

type dialAddr struct{ network, addr string }

func (a dialAddr) Network() string { return a.network }
func (a dialAddr) String() string  { return a.addr }

func (s *Server) owns(addr string) bool {
	if s.mem != nil {
		host, _, err := net.SplitHostPort(addr)
		return err == nil && (host == memHost || host == memOtherHost)
	}
	for _, own := range [...]string{s.url, s.otherURL} {
		if u, err := url.Parse(own); err == nil && u.Host == addr {
			return true
		}
	}
	return false
}

// Refuse makes the next n connection attempts fail with ECONNREFUSED, in the transports handed out by this server.
// Connections that already exist are not touched. It replaces an earlier number. See [Server.ScriptConns] for more.
func (s *Server) Refuse(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusals = n
}

func (s *Server) refuses() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refusals > 0 {
		s.refusals--
		return true
	}
	return false
}

// Advance moves the server's clock forward by d (backward if negative): retention and time stamps follow it, the
// delays of faults do not. The clock otherwise runs with time.Now, so it follows virtual time too.
func (s *Server) Advance(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead += d
}

// now is the server's clock. s.mu is held.
func (s *Server) now() time.Time { return time.Now().Add(s.ahead) }

// Close ends the server: listeners, connections (also those that faults hold), running effects, deliveries, and the idle
// connections of every transport handed out. It returns when all its handlers have ended, those of endpoints too. Later
// calls do nothing. The ledger, the sends and the deliveries can still be read; events that are pending stay so.
func (s *Server) Close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.running.Wait()
		return
	}
	s.closed = true
	close(s.done)
	transports, proxies, hosts := s.transports, slices.Collect(maps.Values(s.proxies)), s.events.hosts
	s.mu.Unlock()
	for _, p := range proxies {
		_ = p.listener.Close()
		_ = p.http.Close()
	}
	for _, h := range hosts {
		_ = h.listener.Close()
		_ = h.http.Close()
	}

	for _, l := range s.listeners {
		_ = l.Close() // an accept loop that has not begun is not known to http.Server yet
	}
	_ = s.http.Close()
	s.mu.Lock()
	held := s.hijacked
	s.hijacked = nil
	s.mu.Unlock()
	for c := range held {
		_ = c.Close()
	}
	for _, t := range transports {
		t.CloseIdleConnections()
	}
	s.running.Wait()
}

// Restart is a crash and a new start at the same address: every connection dies, and what was running is lost without an
// effect, its key free again. Ledger, resources and remembered keys live on; Settings can change that. So do events: a
// delivery that is under way is cut, and its attempt has failed.
func (s *Server) Restart() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	close(s.life)
	s.life = make(chan struct{})
	if s.settings.ForgetAtRestart {
		clear(s.keys)
	}
	for at, rec := range s.keys {
		switch {
		case !rec.running || !rec.freeAt.IsZero():
		case s.settings.ClaimFirst:
			s.die(rec, s.settings.Lease)
		default:
			delete(s.keys, at)
		}
	}
	var dying []net.Conn
	for _, conns := range [...]map[net.Conn]struct{}{s.open, s.hijacked} {
		for c := range conns {
			dying = append(dying, c)
		}
	}
	s.mu.Unlock()
	for _, c := range dying {
		_ = c.Close()
	}
}

// track keeps the connections that a Restart ends.
func (s *Server) track(c net.Conn, state http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch state {
	case http.StateNew:
		s.open[c] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		delete(s.open, c)
	}
}

// begin says whether work may start; leave must follow. WaitGroup.Add and Wait meet under the lock.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.running.Add(1)
	return true
}

func (s *Server) leave() { s.running.Done() }

// wait sleeps for d. It is false if the server closed first, or if gone did (nil: nobody is asked).
func (s *Server) wait(d time.Duration, gone <-chan struct{}) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-gone:
		return false
	case <-s.done:
		return false
	}
}
