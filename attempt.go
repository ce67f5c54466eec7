package idem

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"hash/maphash"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-retryablehttp"
)

// attempt is one call of the base: its own copy of the request, its own
// limit, and what httptrace saw. It is the parent of its request's context.
type attempt struct {
	context.Context // the caller's, with the attempt's own end
	o               *operation

	start  time.Time
	cancel context.CancelCauseFunc // nil: no limit of its own
	timer  *time.Timer

	req    http.Request
	values [2]string // of the header, where they fit
	key    [1]string
	body   *attemptBody // nil: net/http reads the body as it is

	trace  httptrace.ClientTrace
	asked  atomic.Int32 // for a connection
	got    atomic.Int32 // a connection: one for each send
	reused atomic.Bool
	http2  atomic.Bool
	struck atomic.Bool // by its limit

	doc   document // what was read of the answer's body
	whole bool     // that is all of it
	noted bool     // it stands in the report
}

// Value lets an inner Transport know whose attempt it is in, and httptrace
// find the trace.
func (a *attempt) Value(key any) any {
	switch key {
	case layer{}:
		return a.o
	case traceKey:
		return &a.trace
	}
	return a.Context.Value(key)
}

// traceKey is the key under which httptrace looks for a trace. An attempt
// answers to it by itself, which costs nothing; httptrace.WithClientTrace
// would make one more context for every attempt.
var traceKey = func() any {
	p := keyProbe{Context: context.Background()}
	httptrace.ContextClientTrace(&p)
	return p.key
}()

type keyProbe struct {
	context.Context
	key any
}

func (p *keyProbe) Value(key any) any {
	p.key = key
	return nil
}

// attempt sends the request once and reads as much of the answer as the
// verdict needs. An error means that nothing was sent and nothing will be.
func (o *operation) attempt(now time.Time) (result, error) {
	a := &o.first
	if o.now != nil {
		a = new(attempt)
	}
	a.o, a.start = o, now
	if err := a.build(); err != nil {
		a.release()
		err = quiet(err, o.secrets(a))
		if h := o.t.Hooks.AttemptDone; h != nil { // AttemptStart may have begun a span
			h(context.WithoutCancel(a.Context), &o.report, Attempt{N: o.number(), Start: now, Took: time.Since(now), Err: err, Outcome: NotExecuted})
		}
		return result{}, err
	}
	o.now, o.resp = a, nil // until here, what the last attempt showed stands
	o.discarded(0, nil, nil)
	if !o.wasSent {
		first := a.start
		if o.cell != nil && o.record() == nil {
			first = o.cell.sent(first)
		}
		o.noteSend(first)
	}
	if o.cell != nil {
		o.cell.start()
	}
	base := o.t.base
	if o.offPool || !o.repeatable && o.body.kind == noBody && (a.req.Header["Idempotency-Key"] != nil || a.req.Header["X-Idempotency-Key"] != nil) {
		base = o.t.sideBase() // with such a header net/http would repeat it by itself on a connection that it reuses
	}
	resp, err := base.RoundTrip(&a.req)
	switch {
	case err != nil && resp != nil: // against the contract of RoundTripper
		closeBody(resp.Body)
	case err == nil && resp == nil:
		err = errors.New("idem: Base returned neither an answer nor an error")
	}
	if err != nil {
		r := a.failed(err)
		a.release()
		return r, nil
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
	return a.read(resp), nil
}

// build makes the request of the attempt.
func (a *attempt) build() error {
	o := a.o
	p := &o.t.policy
	ctx := o.Context
	if h := o.t.Hooks.AttemptStart; h != nil {
		if c := h(ctx, &o.report, o.number()); c != nil {
			ctx = c
		}
	}
	a.Context = ctx
	if p.AttemptTimeout > 0 || o.buffers() && p.MaxElapsed > 0 {
		ctx, a.cancel = context.WithCancelCause(ctx)
	}
	if p.AttemptTimeout > 0 {
		a.timer = time.AfterFunc(p.AttemptTimeout, a.expire)
	}
	a.Context = ctx
	a.trace.GetConn = a.getConn
	a.trace.GotConn = a.gotConn
	a.req = *o.req.WithContext(a.traced())
	a.req.Header = o.copyHeader(a)
	a.req.GetBody = nil // or net/http would send again by itself
	a.req.ContentLength = o.body.length
	rc, err := a.openBody()
	if err != nil {
		return err
	}
	a.req.Body = rc
	if o.t.Prepare != nil && !o.abroad() {
		if err := a.prepare(); err != nil {
			return err
		}
	}
	if err := a.lacks(); err != nil {
		closeBody(a.req.Body)
		return err
	}
	return a.guard()
}

// guard looks at the age of a named operation's key once more, as hooks and
// Prepare may have taken long, and stops the body if the key expires between
// here and the write: a machine may sleep there, and another process may have
// sent the key meanwhile.
func (a *attempt) guard() error {
	o := a.o
	if o.cell == nil || !o.keyed || o.t.policy.KeyWindow == 0 {
		return nil
	}
	if o.expired(time.Now()) {
		closeBody(a.req.Body)
		return ErrKeyExpired
	}
	if o.body.kind == noBody {
		return nil
	}
	if a.body == nil {
		a.body = reading(a.req.Body, a.req.Body, o.body.length)
		a.req.Body = a.body
	}
	a.body.expired = func() bool { return o.expired(time.Now()) }
	return nil
}

// number of the attempt that is about to start.
func (o *operation) number() int {
	if o.uncounted {
		return max(int(o.counted), 1)
	}
	return int(o.counted) + 1
}

func (a *attempt) openBody() (io.ReadCloser, error) {
	o := a.o
	if o.body.opened > 0 {
		o.body.remember(o.now.body)
		if err := o.body.unchanged(a.Context); err != nil {
			return nil, err
		}
	}
	rc, err := o.body.open()
	a.body, _ = rc.(*attemptBody)
	if rc == nil && err == nil && o.req.Body != nil {
		rc = http.NoBody
	}
	return rc, err
}

// prepare runs Transport.Prepare on a request that it cannot share with
// anything, and holds it to its promise.
func (a *attempt) prepare() error {
	o := a.o
	b := &o.body
	given, length := a.req.Body, a.req.ContentLength
	u := *o.req.URL
	a.req.URL, a.req.Trailer = &u, o.req.Trailer.Clone()
	var handed []io.ReadCloser
	if b.kind != noBody && b.kind != stream {
		a.req.GetBody = func() (io.ReadCloser, error) {
			rc, err := b.again()
			if err == nil {
				rc = &readCloser{rc, &ownBody{rc: rc}} // Prepare may close it, or not
				handed = append(handed, rc)
			}
			return rc, err
		}
	}
	err := o.t.Prepare(&a.req)
	a.req.GetBody = nil
	a.asked.Store(0) // what Prepare sent under this context is no send of ours
	a.got.Store(0)
	defer func() {
		for _, rc := range handed {
			_ = rc.Close()
		}
	}()
	fail := func(err error) error {
		closeBody(given)
		return err
	}
	if err != nil {
		return fail(err)
	}
	d := &o.t.dialect
	switch key, has, _ := headerKey(a.req.Header, d); {
	case d.Header == "":
	case o.keyed && (!has || key != o.report.Key), !o.keyed && has && !o.bringsKey():
		return fail(invalid("Transport.Prepare", "changed the header %s; the key is fixed for the operation", d.Header))
	}
	switch {
	case a.req.URL == nil || urlOf(a.req.URL) != urlOf(o.req.URL):
		return fail(invalid("Transport.Prepare", "changed the URL; it is fixed for the operation"))
	case method(&a.req) != o.method():
		return fail(invalid("Transport.Prepare", "changed the method; it is fixed for the operation"))
	case a.req.ContentLength != length:
		return fail(invalid("Transport.Prepare", "changed ContentLength from %d to %d; the body is fixed for the operation", length, a.req.ContentLength))
	}
	if o.t.Scope != nil {
		if now := o.t.Scope(&a.req); now != o.scope {
			return fail(scopeChanged(o.scope, now))
		}
	}
	if b.kind != noBody && b.kind != stream {
		if a.req.Body != given && !oneOf(a.req.Body, handed) {
			same, err := b.equals(a.req.Body)
			if err != nil || !same {
				return fail(invalid("Transport.Prepare", "changed the body; it is fixed for the operation"))
			}
		}
		closeBody(given) // Prepare may have read it: the attempt gets a fresh one
		fresh, err := b.again()
		if err != nil {
			return &bodyError{err}
		}
		seen := a.body != nil && a.body.seen != nil
		a.body = reading(fresh, fresh, b.length)
		a.req.Body = a.body
		if seen {
			a.body.seen = new(maphash.Hash)
		}
	} else if a.req.Body != given {
		return fail(invalid("Transport.Prepare", "changed the body; it is fixed for the operation"))
	} else if a.body.touched() {
		return fail(invalid("Transport.Prepare", "read a body that can be read only once"))
	}
	return nil
}

func oneOf(rc io.ReadCloser, all []io.ReadCloser) bool {
	for _, x := range all {
		if x == rc {
			return true
		}
	}
	return false
}

func closeBody(rc io.ReadCloser) {
	if rc != nil {
		_ = rc.Close()
	}
}

// bringsKey reports whether the caller's request has a key header that is
// left alone.
func (o *operation) bringsKey() bool {
	_, has, _ := headerKey(o.req.Header, &o.t.dialect)
	return has && !o.ownsKeyHeader()
}

// traced is the context of the attempt's request. Where the caller traces too,
// httptrace makes one trace of both.
func (a *attempt) traced() context.Context {
	if httptrace.ContextClientTrace(a.Context) == nil {
		return a
	}
	both := httptrace.WithClientTrace(a.Context, &httptrace.ClientTrace{GetConn: a.getConn, GotConn: a.gotConn})
	a.trace = *httptrace.ContextClientTrace(both)
	a.Context = both
	return a
}

func (a *attempt) getConn(string) { a.asked.Add(1) }

func (a *attempt) gotConn(info httptrace.GotConnInfo) {
	a.got.Add(1)
	a.reused.Store(info.Reused)
	a.http2.Store(speaksHTTP2(info.Conn, a.o.t.base))
}

// speaksHTTP2 reports whether a connection of base carries many requests at
// once, so that the next one would get it again though it is dead.
func speaksHTTP2(c net.Conn, base http.RoundTripper) bool {
	if c, ok := c.(interface{ ConnectionState() tls.ConnectionState }); ok {
		return c.ConnectionState().NegotiatedProtocol == "h2"
	}
	t, ok := base.(*http.Transport)
	return ok && t.Protocols != nil && t.Protocols.UnencryptedHTTP2() && !t.Protocols.HTTP1()
}

// expire ends the attempt.
func (a *attempt) expire() {
	a.struck.Store(true)
	a.cancel(errAttemptLimit)
}

// pause stops the limit; false: it has struck.
func (a *attempt) pause() bool { return a.timer == nil || a.timer.Stop() }

// release frees what the attempt holds. Its body must be closed or read.
func (a *attempt) release() {
	if a.timer != nil {
		a.timer.Stop()
	}
	if a.cancel != nil {
		a.cancel(context.Canceled)
	}
}

// sends is how many requests the attempt put on the wire.
func (a *attempt) sends(r *result) int {
	if n := int(a.got.Load()); n > 0 || r.notSent {
		return n
	}
	return 1 // a base that does not trace
}

// failed is the result of an attempt without an answer.
func (a *attempt) failed(err error) result {
	o := a.o
	r := result{err: err}
	asked, got := a.asked.Load(), a.got.Load()
	limit := a.struck.Load()
	if limit {
		r.err = &attemptLimitError{last: err}
	}
	own := a.body.failure()
	if own != nil {
		r.permanent = true
		if !errors.Is(r.err, own) {
			r.err = own
		}
	}
	if got == 0 && !limit {
		_, direct := o.t.base.(*http.Transport)
		permanent := own == nil && permanentError(err)
		r.permanent = r.permanent || permanent
		r.notSent = asked > 0 || direct && permanent
	} else if got == 0 {
		r.notSent = asked > 0
	}
	// A reset stream of HTTP/2 had a connection that lives, and a dead one has no
	// idle neighbours.
	r.staleReused = got > 0 && a.reused.Load() && !a.http2.Load() && !limit && own == nil && o.Err() == nil && !timeout(err)
	r.leaveThePool = r.staleReused || a.http2.Load() && (limit || timeout(err))
	if p := (*proxyError)(nil); errors.As(err, &p) {
		r.refusedByProxy(p, got == 0)
	}
	r.err = quiet(r.err, o.secrets(a))
	if o.t.policy.Classify != nil && o.Err() == nil {
		r.overruled = o.t.policy.Classify(nil, r.err)
	}
	return r
}

// refusedByProxy: the tunnel was not made, so nothing reached the server,
// unless an earlier send of the attempt did. What the proxy says of itself (4xx)
// will not change; a 5xx may.
func (r *result) refusedByProxy(p *proxyError, notSent bool) {
	r.notSent = notSent
	r.permanent = p.status/100 != 5
	r.throttled = p.status == http.StatusServiceUnavailable
	r.retryAfter, r.asked = retryAfter(p.header, time.Now())
}

func timeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

// permanentError reports whether an error before any connection will not get
// better: a name that does not exist, a bad certificate, scheme or header. For
// the untyped errors of net/http the policy of go-retryablehttp is asked,
// which keeps up with their texts; it looks only inside a *url.Error, whose
// empty URL here keeps text of the server out of it.
func permanentError(err error) bool {
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return dns.IsNotFound && !dns.IsTemporary
	}
	retry, _ := retryablehttp.ErrorPropagatedRetryPolicy(context.Background(), nil, &url.Error{Op: "send", Err: err})
	return !retry
}

// buffers reports whether answers are buffered at all.
func (o *operation) buffers() bool {
	return o.keyed && o.t.policy.MaxResponseBuffer > 0 || o.t.policy.Classify != nil
}

// read takes from the answer what the verdict needs: all of a small one of a
// keyed operation, so that a cut is noticed while it can be mended.
func (a *attempt) read(resp *http.Response) result {
	o := a.o
	p, d := &o.t.policy, &o.t.dialect
	o.resp = resp
	r := result{status: resp.StatusCode, resent: a.got.Load() > 1}
	looks := o.keyed && d.needsBody(resp.StatusCode)
	var cut error
	switch limit := p.MaxResponseBuffer; {
	case resp.StatusCode == http.StatusSwitchingProtocols:
	case p.Classify != nil && !endless(resp):
		cut = a.buffer(max(limit, defaultBuffer))
	case o.keyed && bufferable(resp, limit) && (looks || !retriedStatus(resp.StatusCode)):
		cut = a.buffer(limit)
	case looks:
		cut = a.buffer(drainBytes)
	case redirects(resp):
		// http.Client reads of it before it follows, and has no limit there.
		a.doc.text, a.whole = a.prefix(resp.Body, drainBytes), true
	}
	if resp.Body == http.NoBody && resp.StatusCode != http.StatusSwitchingProtocols {
		a.whole = true
		a.release()
	}
	if cut == nil && !a.whole && !a.pause() {
		cut = errAttemptLimit
	}
	if cut != nil {
		return a.cut(cut)
	}
	if o.keyed {
		r.marks = d.recognise(resp, &a.doc)
		r.hint = d.hint(resp.Header)
	}
	if resp.StatusCode/100 != 2 {
		r.retryAfter, r.asked = retryAfter(resp.Header, time.Now())
		r.throttled = resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusServiceUnavailable
		r.leaveThePool = resp.StatusCode == http.StatusRequestTimeout || resp.StatusCode == http.StatusMisdirectedRequest
	}
	if p.Classify != nil {
		shown := *resp
		shown.Body = io.NopCloser(bytes.NewReader(a.doc.text))
		r.overruled = p.Classify(&shown, nil)
	}
	return r
}

// cut is the result of an answer that broke off in its body.
func (a *attempt) cut(err error) result {
	o := a.o
	resp := o.resp
	_ = resp.Body.Close()
	limit := a.struck.Load()
	a.release()
	if limit {
		err = &attemptLimitError{last: err}
	}
	o.discarded(resp.StatusCode, resp.Header, a.doc.text)
	o.resp = nil
	err = quiet(err, o.secrets(a))
	r := result{err: err, status: resp.StatusCode}
	if o.t.policy.Classify != nil && o.Err() == nil {
		r.overruled = o.t.policy.Classify(nil, err)
	}
	return r
}

// bufferable answers have an end that can be waited for.
func bufferable(resp *http.Response, limit int64) bool {
	switch {
	case limit < 0, endless(resp):
		return false
	case resp.ContentLength >= 0:
		return resp.ContentLength <= limit
	}
	t := mediaType(resp.Header)
	switch t {
	case "application/json", "application/xml", "text/xml", "application/x-www-form-urlencoded", "multipart/form-data":
		return true
	}
	return strings.HasSuffix(t, "+json") || strings.HasSuffix(t, "+xml")
}

// redirects reports whether http.Client would follow the answer.
func redirects(resp *http.Response) bool {
	switch resp.StatusCode {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return resp.Header.Get("Location") != ""
	}
	return false
}

// endless answers are streams by their type: nobody knows when their next byte
// comes.
func endless(resp *http.Response) bool {
	if resp.ContentLength >= 0 {
		return false
	}
	switch mediaType(resp.Header) {
	case "text/event-stream", "application/x-ndjson", "application/ndjson", "application/jsonl",
		"application/json-seq", "application/stream+json", "multipart/x-mixed-replace":
		return true
	}
	return false
}

// buffer reads up to limit bytes of the answer. The attempt's limit holds for
// each gap between bytes, and Policy.MaxElapsed for the whole.
func (a *attempt) buffer(limit int64) error {
	p := &a.o.t.policy
	body := a.o.resp.Body
	size := a.o.resp.ContentLength
	if size < 0 || size > limit {
		size = 512
	}
	text := make([]byte, 0, min(size, limit, defaultBuffer)+1) // the rest grows as it comes
	var start time.Time
	for empty := 0; empty < 100; {
		// What Content-Length promised is there: the end needs no waiting.
		if int64(len(text)) != a.o.resp.ContentLength && !a.rearm(p, &start) {
			a.doc.text = text
			return errAttemptLimit
		}
		n, err := body.Read(text[len(text):cap(text)])
		text = text[:len(text)+n]
		a.doc.text = text
		switch {
		case err == io.EOF:
			a.whole = true
			_ = body.Close()
			a.release()
			return nil
		case err != nil:
			return err
		case int64(len(text)) > limit:
			return nil
		case len(text) == cap(text):
			text = append(text, 0)[:len(text)]
		}
		if empty++; n > 0 {
			empty = 0
		}
	}
	return io.ErrNoProgress
}

// rearm gives the next bytes their time; false: it is over. start is when
// the first were waited for.
func (a *attempt) rearm(p *Policy, start *time.Time) bool {
	gap, now := p.AttemptTimeout, time.Now()
	first := start.IsZero()
	if first {
		*start = now
	}
	if p.MaxElapsed > 0 {
		if rest := p.MaxElapsed - now.Sub(*start); gap == 0 || rest < gap {
			gap = rest
		}
		if gap <= 0 {
			return false
		}
	}
	switch {
	case gap == 0 || a.cancel == nil:
	case first && gap == p.AttemptTimeout && now.Sub(a.start) < gap/64:
		// The answer came at once: the limit that is running has nearly all of its time.
	case a.timer == nil:
		a.timer = time.AfterFunc(gap, a.expire)
	default:
		a.timer.Reset(gap)
	}
	return !a.struck.Load()
}

// discard reads the answer to its end, within limits, so that its connection
// can be used again, and keeps a prefix for the Error.
func (o *operation) discard() {
	a, resp := o.now, o.resp
	o.resp = nil
	if resp == nil {
		return
	}
	if !a.whole {
		a.doc.text = append(a.doc.text, a.prefix(resp.Body, drainBytes+1)...)
	}
	o.discarded(resp.StatusCode, resp.Header, a.doc.text)
}

// prefix reads up to most bytes of an answer that nobody will read further,
// for a short time, and closes it. What does not come soon is not worth waiting
// for: a body may trickle for ever.
func (a *attempt) prefix(body io.ReadCloser, most int64) []byte {
	timer := time.AfterFunc(drainTime, func() {
		if a.cancel != nil {
			a.cancel(context.Canceled)
		}
		_ = body.Close()
	})
	text, _ := io.ReadAll(io.LimitReader(body, most))
	timer.Stop()
	_ = body.Close()
	a.release()
	return text
}

// handOver makes the answer the caller's.
func (o *operation) handOver(resp *http.Response) {
	o.answerReq = *o.req.WithContext(o)
	resp.Request = &o.answerReq
	a := o.now
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return // the connection belongs to the caller, with the attempt's context
	}
	b := &o.answer
	b.a = a
	if !a.whole {
		b.rest, b.holdsGate = resp.Body, o.inGate
	}
	resp.Body = b
	if rec := o.record(); rec != nil && rec.stream != nil {
		// Whoever leaves without a Close must not hold the claim for ever.
		rec.left = context.AfterFunc(o.Context, func() { b.end(false) })
	}
}

// answerBody is the body of an answer: what was buffered, then the rest from
// the connection. At its end it frees the attempt and hands the turn of the
// key on.
type answerBody struct {
	a         *attempt
	read      int           // of what was buffered
	rest      io.ReadCloser // nil: that is all
	holdsGate bool
	closed    atomic.Bool
	freed     atomic.Bool
}

func (b *answerBody) Read(p []byte) (int, error) {
	if b.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	if text := b.a.doc.text[b.read:]; len(text) > 0 {
		n := copy(p, text)
		b.read += n
		return n, nil
	}
	if b.rest == nil {
		return 0, io.EOF
	}
	n, err := b.rest.Read(p)
	if err != nil {
		b.free(err == io.EOF)
	}
	return n, err
}

func (b *answerBody) Close() error {
	if b.closed.Swap(true) || b.rest == nil {
		return nil
	}
	err := b.rest.Close()
	b.free(false)
	return err
}

func (b *answerBody) free(whole bool) {
	if rec := b.a.o.record(); rec != nil && rec.left != nil {
		rec.left()
	}
	b.end(whole)
}

func (b *answerBody) end(whole bool) {
	if b.freed.Swap(true) {
		return
	}
	b.a.release()
	err := b.a.o.answerEnded(whole)
	if b.holdsGate {
		b.a.o.t.gates.leave(b.a.o.gate())
	}
	if err != nil { // last: the hook may panic, or call the operation again
		b.a.o.journalFailed(err)
	}
}
