package fakeserver

import (
	"net/http"
	"net/url"
	"strings"
)

// mount is a handler beside the server's own.
type mount struct {
	prefix string
	http.Handler
}

// Mount puts h at every path that begins with prefix, which must begin and end with a slash: a page that shows what
// happens, an interface for switching faults. Requests there meet no fault, need no key and are not listed as sends. The
// path is not cut. A path that is the prefix without its last slash is redirected there, if nothing else is at it. Of two prefixes that match, the one mounted first takes the request. Mount panics at a bad prefix.
func (s *Server) Mount(prefix string, h http.Handler) {
	if !strings.HasPrefix(prefix, "/") || !strings.HasSuffix(prefix, "/") {
		panic("fakeserver: mount: " + prefix + " does not begin and end with a slash")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mounts = append(s.mounts, mount{prefix, h})
}

// besides serves a request under a mounted prefix. False: there is none.
func (s *Server) besides(w http.ResponseWriter, r *http.Request) bool {
	s.mu.Lock()
	mounts := s.mounts
	s.mu.Unlock()
	for _, m := range mounts {
		if !strings.HasPrefix(r.URL.Path, m.prefix) {
			continue
		}
		if !s.begin() {
			panic(http.ErrAbortHandler)
		}
		defer s.leave()
		if r.ProtoMajor == 2 {
			_ = streamOf(r.Header) // takes our own header out
		}
		m.ServeHTTP(w, r)
		return true
	}
	return false
}

// toMount redirects a path that lacks only the slash of a mounted prefix. False: it does not.
func (s *Server) toMount(w http.ResponseWriter, r *http.Request) bool {
	s.mu.Lock()
	mounts := s.mounts
	s.mu.Unlock()
	for _, m := range mounts {
		if r.URL.Path+"/" == m.prefix {
			to := url.URL{Path: m.prefix, RawQuery: r.URL.RawQuery}
			http.Redirect(w, r, to.String(), http.StatusPermanentRedirect)
			return true
		}
	}
	return false
}

// nothingHere is the detail of a 404. At the root, where people look first, it names what is mounted.
func (s *Server) nothingHere(path string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := "There is nothing at this path."
	if path == "/" && len(s.mounts) > 0 {
		text += " Look at"
		for i, m := range s.mounts {
			text += []string{" ", ", "}[min(i, 1)] + m.prefix
		}
		text += "."
	}
	return text
}

// Reset forgets keys, ledger, sends, resources, events, deliveries, faults and scripts: numbers begin at 1 again, but for the
// ids of events. What is running then ends without an effect and without an answer, and nothing more is delivered.
// Settings, stubs, mounts, watchers, endpoints, clock and connections stay.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.life)
	s.life = make(chan struct{})
	s.refusals, s.connFaults = 0, nil
	clear(s.keys)
	s.sends = nil
	clear(s.sendsByKey)
	clear(s.keySends)
	s.effects = nil
	clear(s.effectsByKey)
	s.faults = nil
	clear(s.scripts)
	s.payments, s.hotels, s.uploads = newPayments(), newHotels(), 0
	s.events.forget()
}

// listed is false for a send from before a Reset. s.mu is held.
func (s *Server) listed(n *Send) bool {
	return n.N > 0 && n.N <= len(s.sends) && s.sends[n.N-1] == n
}

// Watch calls f with a copy of every send when the server is done with it, from the goroutine that served it: f may be
// called several times at once, and what it does holds up that exchange. Several watchers are called in turn.
// A request that a [Duplicate] fault left running has its effect later.
func (s *Server) Watch(f func(Send)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers = append(s.watchers, f)
}

// ended notes that the server is done with a send.
func (s *Server) ended(n *Send) {
	s.mu.Lock()
	n.Ended = s.now()
	c, watchers, listed := n.copy(), s.watchers, s.listed(n)
	s.mu.Unlock()
	if !listed {
		return
	}
	for _, f := range watchers {
		f(c)
	}
}

// SendsAfter gives copies of the sends whose numbers are above n, oldest first: what is new since a look at the list,
// without a copy of all the rest. A negative n gives the last -n sends.
func (s *Server) SendsAfter(n int) []Send {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n < 0 {
		n += len(s.sends)
	}
	var found []Send
	for _, next := range s.sends[min(max(n, 0), len(s.sends)):] {
		found = append(found, next.copy())
	}
	return found
}

// EffectsAfter gives copies of the effects whose numbers are above n, oldest first.
func (s *Server) EffectsAfter(n int) []Effect {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Effect(nil), s.effects[min(max(n, 0), len(s.effects)):]...)
}

// copy shares nothing with n. s.mu is held.
func (n *Send) copy() Send {
	c := *n
	c.Header = n.Header.Clone()
	c.Keys = append([]string(nil), n.Keys...)
	c.TransferEncoding = append([]string(nil), n.TransferEncoding...)
	return c
}
