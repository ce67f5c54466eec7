package fakeserver

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
)

// proxy is one that Server.Proxy made.
type proxy struct {
	s        *Server
	http     http.Server
	listener net.Listener
	mem      *memListener // nil = real sockets

	mu      sync.Mutex // guards answers
	answers []int
}

// Proxy starts a proxy in front of the server, for http.Transport.Proxy with http.ProxyURL; in memory only the transports
// of the server reach it. The answers are for its next requests, a CONNECT or, at a server without TLS, the request
// itself: a status refuses it, 0 lets it through, -1 never answers. After the last one everything passes. Close ends it.
func (s *Server) Proxy(answers ...int) *url.URL {
	p := &proxy{s: s, answers: answers}
	p.http.Handler = p
	p.http.ErrorLog = s.http.ErrorLog
	p.http.ConnContext = s.http.ConnContext
	p.http.ConnState = s.track // for Restart
	addr := ""
	if s.mem != nil {
		p.mem = newMemListener()
		p.listener = p.mem
	} else {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(listenError{err})
		}
		p.listener, addr = l, l.Addr().String()
	}
	s.mu.Lock()
	if p.mem != nil {
		addr = "proxy" + strconv.Itoa(len(s.proxies)+1) + ".test:3128"
	}
	s.proxies[addr] = p
	s.mu.Unlock()
	if !s.begin() {
		_ = p.listener.Close()
	} else {
		go func() {
			defer s.leave()
			_ = p.http.Serve(p.listener) // ends by Close of the server
		}()
	}
	return &url.URL{Scheme: "http", Host: addr}
}

// proxyAt finds a proxy in memory.
func (s *Server) proxyAt(addr string) *proxy {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.proxies[addr]; p != nil && p.mem != nil {
		return p
	}
	return nil
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !p.s.begin() {
		panic(http.ErrAbortHandler)
	}
	defer p.s.leave()
	switch answer := p.next(); {
	case answer < 0:
		select {
		case <-r.Context().Done():
		case <-p.s.done:
		}
		panic(http.ErrAbortHandler)
	case answer > 0:
		if answer == http.StatusProxyAuthRequired {
			w.Header().Set("Proxy-Authenticate", `Basic realm="proxy"`)
		}
		http.Error(w, titleOf(answer), answer)
	case !p.s.owns(withPort(r.Host)):
		http.Error(w, "This proxy leads to one server only.", http.StatusForbidden)
	case r.Method != http.MethodConnect:
		p.s.http.Handler.ServeHTTP(w, r)
	default:
		p.tunnel(w, r)
	}
}

// withPort is the address that a plain request means.
func withPort(host string) string {
	if _, _, err := net.SplitHostPort(host); err != nil {
		return net.JoinHostPort(host, "80")
	}
	return host
}

func (p *proxy) next() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.answers) == 0 {
		return 0
	}
	a := p.answers[0]
	p.answers = p.answers[1:]
	return a
}

// tunnel joins the client to the server until one of them closes.
func (p *proxy) tunnel(w http.ResponseWriter, r *http.Request) {
	server, err := p.s.connect(r.Context(), r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	p.s.hold(server)
	defer p.s.release(server)
	client, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return // the client has left
	}
	p.s.hold(client)
	defer p.s.release(client)
	if _, err := io.WriteString(client, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	ended := make(chan struct{}, 2)
	for _, way := range [...][2]net.Conn{{server, client}, {client, server}} {
		go func() {
			_, _ = io.Copy(way[0], way[1])
			ended <- struct{}{}
		}()
	}
	<-ended
	_, _ = server.Close(), client.Close()
	<-ended
}

// connect reaches the server itself.
func (s *Server) connect(ctx context.Context, addr string) (net.Conn, error) {
	if s.mem != nil {
		return s.mem.dial(ctx)
	}
	return new(net.Dialer).DialContext(ctx, "tcp", addr)
}
