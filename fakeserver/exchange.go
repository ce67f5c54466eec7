package fakeserver

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// exchange is one request on its way to an answer, and the fault that was chosen for it.
type exchange struct {
	s     *Server
	w     http.ResponseWriter
	r     *http.Request
	q     *request
	fault *Fault // nil = none

	frames *frames // of its connection; nil = it is not HTTP/2
	stream uint32  // that it came on, over HTTP/2
}

// exchange takes a request from its headers to its answer. The fault may end it at any of three places.
func (s *Server) exchange(rt *route, w http.ResponseWriter, r *http.Request) {
	if !s.begin() {
		panic(http.ErrAbortHandler)
	}
	defer s.leave()
	x := s.arrive(rt, w, r)
	defer s.ended(x.q.send)
	stage := x.fault.stage()
	if stage == atHeaders && x.strike(nil) {
		return
	}
	if !x.read() {
		x.drop() // the request never arrived whole, so nothing is executed
		return
	}
	if stage == beforeRun {
		x.claimFirst()
		if x.strike(nil) {
			return
		}
	}
	a := x.run()
	if a.none {
		x.drop()
		return
	}
	a = x.stamp(a)
	if stage == afterRun {
		if x.fault.Point != AfterEffect {
			x.remember()
		}
		if x.strike(&a) {
			return
		}
	}
	x.remember()
	x.reply(a)
}

// claimFirst reserves the key of a request that is about to fail, at a server that frees no key.
func (x *exchange) claimFirst() {
	s, q := x.s, x.q
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.settings.ClaimFirst || s.lookup(q.scoped(s.settings)) != nil {
		return
	}
	if rec, _, proceed := s.claim(q); proceed {
		s.die(rec, s.settings.Lease)
	}
}

// storeFailure keeps the 5xx that is about to be said, at a server that stores those.
func (x *exchange) storeFailure() {
	s, f := x.s, x.fault
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settings.Failures != StoreFailures || f.Kind != Status || f.Point != BeforeEffect || f.Status < 500 ||
		s.lookup(x.q.scoped(s.settings)) != nil {
		return
	}
	if rec, _, proceed := s.claim(x.q); proceed && rec != nil {
		rec.answer = f.failure(0)
	}
}

func (x *exchange) remember() {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	x.s.remember(x.q)
}

// stamp adds what every answer of a provider carries.
func (x *exchange) stamp(a answer) answer {
	x.s.mu.Lock()
	t := x.s.settings
	x.s.mu.Unlock()
	if t.RequestIDHeader != "" && a.get(t.RequestIDHeader) == "" {
		a = a.with(t.RequestIDHeader, "req_"+strconv.Itoa(x.q.send.N))
	}
	if t.EchoKey && x.q.key != "" && a.get(t.KeyHeader) == "" {
		a = a.with(t.KeyHeader, x.q.key)
	}
	return a
}

// arrive lists the send and chooses its fault.
func (s *Server) arrive(rt *route, w http.ResponseWriter, r *http.Request) *exchange {
	x := &exchange{s: s, w: w, r: r}
	if c, ok := r.Context().Value(connOf{}).(*secureConn); ok && r.ProtoMajor == 2 {
		x.frames, x.stream = c.frames, streamOf(r.Header)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.settings
	q := &request{http: r, route: rt, life: s.life, caller: callerOf(r.Header.Get("Authorization"), t.KeyPer)}
	keys := r.Header.Values(t.KeyHeader)
	q.key, q.keyFault = keyOf(keys, t, rt.wants)
	if !rt.keyed {
		q.keyFault = nil // nobody looks at the key
	}
	conn, _ := r.Context().Value(connNumber{}).(int)
	q.send = &Send{
		Key: q.key, Keys: keys,
		Method: r.Method, Path: r.URL.Path, Endpoint: rt.pattern, Caller: q.caller,
		ContentLength: r.ContentLength, TransferEncoding: r.TransferEncoding, Conn: conn,
	}
	if !t.ForgetHeaders {
		q.send.Header = redacted(r.Header)
	}
	count := "key " + q.key
	if q.key == "" {
		count = r.Method + " " + r.URL.Path
	}
	s.keySends[count]++
	q.send.KeySend = s.keySends[count]
	s.list(q.send)
	x.q = q
	if chosen := s.choose(q.send); chosen != nil {
		q.send.Fault = chosen.text
		f := chosen.Fault
		x.fault = &f
	}
	return x
}

// read takes in the whole body and parses it. It is false if the body broke off.
func (x *exchange) read() bool {
	q := x.q
	sum := sha256.New()
	var err error
	if q.route.stream {
		q.bodyLen, err = io.Copy(sum, x.r.Body)
	} else {
		var kept bytes.Buffer
		if n := x.r.ContentLength; n > 0 {
			kept.Grow(int(min(n, maxBody)) + bytes.MinRead)
		}
		_, err = kept.ReadFrom(io.LimitReader(x.r.Body, maxBody+1))
		q.body = kept.Bytes()
		q.bodyLen = int64(len(q.body))
		q.tooLarge = q.bodyLen > maxBody
		sum.Write(q.body)
	}
	if err == nil && !q.tooLarge {
		q.bodySum = hex.EncodeToString(sum.Sum(nil))
	}
	if err == nil {
		q.understand()
	}
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	q.send.BodyLen, q.send.BodySHA256, q.send.Reference = q.bodyLen, q.bodySum, q.reference
	return err == nil
}

func (q *request) understand() {
	if q.tooLarge {
		a := problem(http.StatusRequestEntityTooLarge, "body-too-large", "The body is larger than 1 MiB.", nil)
		q.wrong = &a
		return
	}
	q.route.parse(q)
}

// run executes the request, through the faults that act in the middle of that.
func (x *exchange) run() answer {
	switch f := x.fault; {
	case f.is(Duplicate):
		return x.runTwice()
	case f.is(Stuck):
		return x.runStuck()
	case f != nil && f.Point == DuringEffect && (f.Kind == Status || f.Kind == HTML):
		return x.runBehind()
	case f.is(StoredFailure) && f.Point == BeforeEffect && !x.s.wait(f.Delay, x.gone()):
		return answer{none: true}
	default:
		a := x.s.execute(x.q, f)
		if f.is(StoredFailure) && f.Point == AfterEffect && !a.none && !x.s.wait(f.Delay, x.gone()) {
			return answer{none: true}
		}
		return a
	}
}

// strike lets the fault act. True: the exchange is over.
func (x *exchange) strike(a *answer) bool {
	k := kinds[x.fault.Kind]
	if !k.ownDelay && !x.s.wait(x.fault.Delay, x.gone()) {
		x.drop()
		return true
	}
	return k.act(x, a)
}

// note records the status before its first byte leaves, so that whoever has the answer finds it in the list.
func (x *exchange) note(status int) {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	x.q.send.Status = status
}

// reply sends the answer the way an honest server does.
func (x *exchange) reply(a answer) {
	if x.r.Context().Err() != nil {
		x.drop() // the client has left; to return would make net/http say 200
		return
	}
	x.note(a.status)
	x.headers(x.stamp(a))
	if bodyAllowed(a.status) {
		_, _ = x.w.Write(a.body) // a client that leaves now is its own business
	}
}

func (x *exchange) headers(a answer) {
	h := x.w.Header()
	for _, f := range a.header {
		h.Add(f.name, f.value)
	}
	if bodyAllowed(a.status) {
		h.Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	x.w.WriteHeader(a.status)
}

func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified
}

// head is the status line and the headers of an answer as bytes, for faults that write to the connection themselves.
// The framing headers are the caller's.
func head(a answer, framing ...field) []byte {
	var b bytes.Buffer
	b.WriteString("HTTP/1.1 " + strconv.Itoa(a.status) + " " + titleOf(a.status) + "\r\n")
	b.WriteString("Date: " + time.Now().UTC().Format(http.TimeFormat) + "\r\n")
	for _, list := range [...][]field{a.header, framing} {
		for _, f := range list {
			b.WriteString(f.name + ": " + f.value + "\r\n")
		}
	}
	b.WriteString("\r\n")
	return b.Bytes()
}

// bodyOf is what follows the headers of an answer: nothing after a HEAD.
func (x *exchange) bodyOf(a answer) []byte {
	if x.r.Method == http.MethodHead {
		return nil
	}
	return a.body
}

func contentLength(n int) field { return field{"Content-Length", strconv.Itoa(n)} }

var lastAnswer = field{"Connection", "close"}

// seize takes the connection away from net/http. Close of the server closes it too; release must follow.
func (x *exchange) seize() net.Conn {
	conn, _, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler) // the connection is already gone, or HTTP/2
	}
	x.s.hold(conn)
	return conn
}

func (x *exchange) release(conn net.Conn) { x.s.release(conn) }

// hold keeps a connection that net/http does not know, for Close and Restart to end.
func (s *Server) hold(conn net.Conn) {
	s.mu.Lock()
	closed := s.closed
	if s.hijacked != nil {
		s.hijacked[conn] = struct{}{}
	}
	s.mu.Unlock()
	if closed {
		_ = conn.Close()
	}
}

func (s *Server) release(conn net.Conn) {
	_ = conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.hijacked, conn)
}

// drop closes the connection without an answer. Over HTTP/2 it ends the stream, and does not return.
func (x *exchange) drop() { x.release(x.seize()) }

// gone is closed when the client has left. It is reliable only after the body was read.
func (x *exchange) gone() <-chan struct{} { return x.r.Context().Done() }
