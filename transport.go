package idem

import (
	"context"
	"crypto/cipher"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/idem-go/idem/journal"
)

// Transport is an http.RoundTripper that makes calls safe to repeat. It gives
// each operation one key, retries lost and failed attempts with it, and
// reports what is known about the effect. The zero value is ready; use one
// Transport for one provider, as one keeps one http.Client for one provider.
//
// A Transport is safe for concurrent use. Its fields must not change after
// first use, and it must not be copied. It keeps the contract of
// http.RoundTripper: the request is not changed, its Body is closed once on
// every path, and a response comes without an error. Most code reads the
// outcome from [ReportOf] or [OutcomeOf]; [Client] turns each Reason into an
// [*Error].
type Transport struct {
	// Base sends one attempt. nil: a clone of http.DefaultTransport, made at
	// first use and shared by all Transports without a Base.
	Base http.RoundTripper
	// Policy has the limits. Zero: the defaults.
	Policy Policy
	// Dialect of the provider. Zero: Generic.
	Dialect Dialect
	// Scope names the account or tenant whose keys these are. It is asked
	// before the key is chosen, with the caller's request, and again after
	// each Prepare, with the attempt's: an operation that would leave its
	// scope ends with ErrScopeChanged. nil: one scope.
	Scope func(*http.Request) string
	// Prepare signs an attempt or refreshes its credentials. It gets the
	// attempt's own copy of the request, with a GetBody where there is a body
	// that can be read again. It must not change key, URL, method or body
	// (ErrInvalid), never runs for another origin than the operation's, and
	// its error ends the operation. With Prepare, a 401 is repeated once.
	// nil: nothing to prepare.
	Prepare func(*http.Request) error
	// AllowRedirect says whether a redirected request with a key or a body
	// may go to another origin. nil: never, ErrRedirectRefused.
	AllowRedirect func(from, to *url.URL) bool
	// Hooks observe. Zero: nobody does.
	Hooks Hooks
	// Journal remembers the operations that [WithOperation] names, so that
	// their keys survive the process: the key is durable before the first
	// byte is sent, and a journal that cannot write means that nothing is sent
	// (ErrJournal). It needs a Policy.KeyWindow or a Dialect that states one;
	// with a Dialect that has Reference pointers it keeps the provider's ids.
	// Other requests are not journalled. A journal that is taken into use for
	// operations that were sent before wants their Operation.Started. An answer
	// that is streamed keeps its claim until its body is read or closed; only its
	// end finishes the entry, and a journal that fails then is not heard of: the
	// entry stays pending. Scopes have at most 255 bytes. Transports that share a
	// Journal need a Scope each, or operations with other names. nil: nothing is
	// remembered.
	Journal journal.Journal
	// Seal encrypts what the Journal stores beyond keys and digests: the
	// request, so that [Client.Resume] needs nobody to build it, and the answer
	// of an operation that is done, so that a repeated call gets it back. Stored
	// are bodies within the buffer limits, the URL with its query, and of the
	// request's header what says what the request means (Content-*, Accept,
	// Prefer, If-Match, *-Version); no credential of the header, no Set-Cookie.
	// What else the header had, Prepare must bring again before a stored request
	// is resumed (ErrInvalid). Nonces are random: with AES-GCM change the AEAD's
	// key before 2^32 operations, to one that still opens what the old one sealed.
	// nil: no body is stored.
	Seal cipher.AEAD

	setup   sync.Once // fills the rest
	base    http.RoundTripper
	policy  Policy
	dialect Dialect
	invalid error

	gates gates

	sideOnce sync.Once
	side     http.RoundTripper // without keep-alives; nil: base is no *http.Transport
}

// defaultBase is shared by all Transports without a Base.
var defaultBase = sync.OnceValue(func() http.RoundTripper {
	base := &http.Transport{Proxy: http.ProxyFromEnvironment}
	if t, ok := http.DefaultTransport.(*http.Transport); ok {
		base = t.Clone()
	}
	if base.OnProxyConnectResponse == nil {
		base.OnProxyConnectResponse = ProxyHook
	}
	return base
})

// ProxyHook is for the OnProxyConnectResponse of a Base of one's own that
// goes through a proxy. net/http turns a proxy's refusal of a tunnel into bare
// text; with the hook its status and Retry-After count: a 4xx ends the
// operation, a 5xx is retried, and in both nothing reached the server. The Base
// that a nil Transport.Base means has it already. The error is nil for a 200.
func ProxyHook(_ context.Context, _ *url.URL, _ *http.Request, answer *http.Response) error {
	if answer.StatusCode == http.StatusOK {
		return nil
	}
	return &proxyError{status: answer.StatusCode, header: answer.Header.Clone()}
}

// resolve fills in the defaults once.
func (t *Transport) resolve() {
	t.setup.Do(func() {
		if t.base = t.Base; t.base == nil {
			t.base = defaultBase()
		}
		if t.dialect, t.invalid = t.Dialect.resolved(); t.invalid == nil {
			t.policy, t.invalid = t.Policy.resolved(&t.dialect)
		}
		if t.invalid == nil {
			t.invalid = t.checkJournal()
		}
	})
}

// checkJournal refuses a journal that could not keep its promise.
func (t *Transport) checkJournal() error {
	switch {
	case t.Journal == nil && t.Seal != nil:
		return invalid("Transport.Seal", "is set, but there is no Journal that would store anything")
	case t.Journal == nil:
	case t.dialect.Header == "":
		return invalid("Transport.Journal", "is set, but dialect %q has no header for keys, so that nothing could be repeated", t.dialect.Name)
	case t.policy.KeyWindow == 0:
		return invalid("Policy.KeyWindow", "is not set and dialect %q states none; a Journal needs it: set how long the provider's documentation says that it remembers a key", t.dialect.Name)
	}
	return nil
}

// RoundTrip sends req, as often as the policy allows, and returns the last
// answer, or an [*Error] where the last attempt had none, where the request
// was refused before it was sent, or where the caller's context ended. Answers
// of a Reason (a reused key, attempts exhausted) come back as responses:
// [ReportOf] has the Reason.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	t.resolve()
	if t.isInner(req) {
		return t.base.RoundTrip(req)
	}
	o := &operation{Context: req.Context(), t: t, req: req}
	defer o.leave()
	defer o.abandon()
	if err := o.begin(); err != nil {
		return o.end(nil, err)
	}
	if o.resp != nil { // the journal has the answer
		return o.end(o.resp, nil)
	}
	return o.run()
}

// CloseIdleConnections closes the idle connections of Base, and those of the
// shared base where Base is nil.
func (t *Transport) CloseIdleConnections() {
	t.resolve()
	if c, ok := t.base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// sideBase reaches the server without the pool: after a dead reused
// connection its idle neighbours are probably dead too.
func (t *Transport) sideBase() http.RoundTripper {
	t.sideOnce.Do(func() {
		t.side = t.base
		if base, ok := t.base.(*http.Transport); ok {
			side := base.Clone()
			side.DisableKeepAlives = true
			if side.TLSNextProto["h2"] != nil { // of golang.org/x/net/http2: a clone would share its pool
				side.TLSNextProto, side.ForceAttemptHTTP2 = nil, true
			}
			t.side = side
		}
	})
	return t.side
}

// isInner reports whether req is what an attempt of another Transport sends
// through this one: that layer retries, this one passes through.
func (t *Transport) isInner(req *http.Request) bool {
	outer, _ := req.Context().Value(layer{}).(*operation)
	if outer == nil || req.URL == nil {
		return false
	}
	if outer.keyed {
		key, _, _ := headerKey(req.Header, &outer.t.dialect)
		return key == outer.report.Key
	}
	return method(req) == outer.method() && urlOf(req.URL) == urlOf(outer.req.URL)
}

// layer finds the operation whose attempt a context belongs to; origin hops
// are found through hop.
type (
	layer struct{}
	hop   struct{}
)

// operationOf finds the operation that resp answered.
func operationOf(resp *http.Response) *operation {
	if resp == nil || resp.Request == nil {
		return nil
	}
	o, _ := resp.Request.Context().Value(hop{}).(*operation)
	return o
}

// operation is one RoundTrip, from the choice of the key to the report. It is
// the caller's context with the report in it: the context of resp.Request. It
// is one piece of memory for the common case, a first attempt that succeeds;
// what only others need is behind a pointer.
type operation struct {
	context.Context
	t   *Transport
	req *http.Request

	home       *origin // of the operation's first request; nil: of this one
	scope      string
	keyed      bool // the request carries a key
	minted     bool // made for this call: nobody can have used it before
	repeatable bool // keyed, or a method that may be repeated by definition
	afterWrite bool // the GET that follows a write
	isHop      bool // it goes on after a redirect
	inGate     bool // it has the turn of its key
	ended      bool // no panic passed
	uncounted  bool // the next attempt does not count
	failed     bool // the last attempt was a failure of the origin
	wasSent    bool // sentFirst is known
	offPool    bool // the next attempt needs a connection of its own
	chance     chances
	fresh      uuid.UUID

	body    body
	request *fingerprint // nil for minted keys, which meet nobody
	cell    *cell

	started   time.Time
	sentFirst time.Duration // after started, negative before it: the first send of the key
	counted   int32         // attempts that count
	waits     int32         // waits for an operation in progress
	took      int32         // tokens taken from the budget
	lastTook  int32         // by the retry that is being waited for

	now   *attempt // the running or last attempt
	first attempt
	resp  *http.Response // its answer, if it is still open
	late  *aftermath

	report     Report
	firstEntry [1]Attempt

	answerReq http.Request
	answer    answerBody
}

// Value finds the operation that a response answered.
func (o *operation) Value(key any) any {
	if key == (hop{}) {
		return o
	}
	return o.Context.Value(key)
}

// chances that came and went; each comes once.
type chances struct{ prepared, expectDropped, reconnected bool }

// aftermath is what is kept of an operation that goes wrong, or is journalled.
type aftermath struct {
	status int // of the last attempt's answer, if it was read and discarded
	header http.Header
	body   []byte
	ended  error // the caller's ctx.Err(), or DeadlineExceeded
	waits  generator
	record *record     // what the journal has of it; nil: it is not journalled
	resume *resumption // that it is of; nil: it is an ordinary call
}

func (o *operation) aftermath() *aftermath {
	if o.late == nil {
		o.late = new(aftermath)
	}
	return o.late
}

// endedBy notes that the caller's context, or its deadline, ended the
// operation.
func (o *operation) endedBy(err error) {
	o.aftermath().ended = err
}

// discarded notes what the last attempt's answer was; 0: there was none.
func (o *operation) discarded(status int, header http.Header, body []byte) {
	if o.late != nil || status != 0 {
		late := o.aftermath()
		late.status, late.header, late.body = status, header, body[:min(len(body), maxErrorBody)]
	}
}

// lastHeader is the header of the last attempt's answer; nil: there was none.
func (o *operation) lastHeader() http.Header {
	switch {
	case o.resp != nil:
		return o.resp.Header
	case o.late != nil:
		return o.late.header
	}
	return nil
}

// noteSend remembers the first send of the key.
func (o *operation) noteSend(at time.Time) {
	o.sentFirst, o.wasSent = max(-elapsed(at, o.started), -math.MaxInt64/2), true // so that its age can be reckoned
}

// begin checks the request, chooses its key, and opens its entry in the
// journal, which end closes.
func (o *operation) begin() error {
	t, req := o.t, o.req
	o.body.own.rc = req.Body
	err := t.invalid
	if err == nil {
		err = checkRequest(req)
	}
	previous := operationOf(req.Response)
	switch {
	case err != nil && previous != nil:
		o.inherit(previous) // its key and its attempts stand
		o.afterWrite = !o.continues(previous)
		return err
	case err != nil:
		o.minted = !o.named()
		return err
	}
	o.started = time.Now()
	if re := o.resumptionAfter(previous); re != nil {
		o.aftermath().resume = re
	}
	switch {
	case previous == nil:
		o.scope = o.scopeOf(req)
		if err = o.chooseKey(); err == nil && o.record() == nil && o.resumption() != nil {
			err = fmt.Errorf("%w: the request of the resume is a %s, which gets no key", ErrKeyReused, o.method())
		}
	case o.continues(previous):
		err = o.follow(previous)
	default:
		o.extend(previous)
	}
	if err != nil {
		return err
	}
	o.repeatable = o.keyed || repeatable(o.method())
	if err := context.Cause(o.Context); err != nil {
		o.endedBy(o.Err())
		return err
	}
	if err := o.body.take(o.Context, req, t.policy.MaxRequestBuffer); err != nil {
		if o.Err() != nil {
			o.endedBy(o.Err())
		}
		return err
	}
	if previous != nil && keepsBody(req.Response.StatusCode) {
		previous.body.remember(previous.now.body)
		if err := o.body.follows(o.Context, &previous.body); err != nil {
			return err
		}
	}
	if !o.keyed || o.minted && o.record() == nil {
		return nil // a minted key meets nobody
	}
	return o.claimKey()
}

// resumptionAfter finds the resumption that o sends the request of.
func (o *operation) resumptionAfter(previous *operation) *resumption {
	if previous != nil {
		return previous.resumption()
	}
	re, _ := o.Context.Value(resuming{}).(*resumption)
	if re == nil || re.taken.Swap(true) {
		return nil
	}
	return re
}

// resumption that o is of; nil: it is an ordinary call.
func (o *operation) resumption() *resumption {
	if o.late == nil {
		return nil
	}
	return o.late.resume
}

// scopeOf asks for the scope. What it looks at comes with Prepare where the
// request was stored; that of the entry is held to it then.
func (o *operation) scopeOf(req *http.Request) string {
	switch re := o.resumption(); {
	case o.t.Scope == nil:
		return ""
	case re != nil && re.sealed && o.t.Prepare != nil:
		return re.scope
	}
	return o.t.Scope(req)
}

// named reports whether the caller, or the code between, brought a key.
func (o *operation) named() bool {
	if keyless(o.Context) || o.t.dialect.Header == "" {
		return false
	}
	if operationOf(o.req.Response) != nil || o.Context.Value(operationCell{}) != nil || o.Context.Value(keyCell{}) != nil {
		return true
	}
	_, ok, _ := headerKey(o.req.Header, &o.t.dialect)
	return ok
}

func checkRequest(req *http.Request) error {
	switch u := req.URL; {
	case u == nil:
		return invalid("Request.URL", "is nil")
	case u.Scheme == "":
		return invalid("Request.URL", "has no scheme; it must be absolute")
	case u.Host == "":
		return invalid("Request.URL", "has no host; it must be absolute")
	case req.RequestURI != "":
		return invalid("Request.RequestURI", "is set; it belongs to requests that a server received")
	case !isToken(method(req)):
		return invalid("Request.Method", "is %q, which is not a method", req.Method)
	}
	return nil
}

// chooseKey takes the first key that applies.
func (o *operation) chooseKey() error {
	d := &o.t.dialect
	if !d.keys(o.method()) || keyless(o.Context) {
		o.minted = keyless(o.Context) || !o.bringsKey()
		if c, _ := o.Context.Value(operationCell{}).(*cell); c != nil && o.writes() {
			o.report.Operation, o.cell = c.op, c
			if err := c.op.check(o.started); err != nil {
				return err
			}
			o.minted = o.minted && !c.mayBeSent(nil) // an earlier call under this context may have done it
		}
		return nil
	}
	if c, _ := o.Context.Value(operationCell{}).(*cell); c != nil {
		o.report.Operation = c.op
		if err := c.op.check(o.started); err != nil {
			return err
		}
		if !c.op.Started.IsZero() && o.t.policy.KeyWindow == 0 {
			return invalid("Policy.KeyWindow", "is not set and dialect %q states none; Operation.Started needs one", d.Name)
		}
		u, err := derive(o.scope, c.op.Name, c.op.ID)
		if err != nil {
			return err
		}
		o.cell = c
		if o.t.Journal != nil {
			o.aftermath().record = &record{gate: gateKey{o.scope, written(u, d.MaxKey)}}
		}
		return o.setKey(written(u, d.MaxKey), "operation")
	}
	if c, _ := o.Context.Value(keyCell{}).(*cell); c != nil {
		if err := checkKey(c.key, "WithKey", d); err != nil {
			o.minted = true // such a key was never sent
			return err
		}
		o.cell = c
		return o.setKey(c.key, "context")
	}
	key, ok, err := headerKey(o.req.Header, d)
	if err != nil {
		o.minted = true
		return err
	}
	if ok {
		return o.setKey(key, "header")
	}
	o.minted = true
	if err := randomUUID(&o.fresh); err != nil {
		return err
	}
	return o.setKey(written(o.fresh, d.MaxKey), "minted")
}

func (o *operation) setKey(key, from string) error {
	o.keyed = true
	o.report.Key, o.report.KeyFrom = key, from
	return nil
}

// claimKey refuses a key that is in use for another request and waits for
// the turn of one that is in use for this request.
func (o *operation) claimKey() error {
	if o.request == nil { // not a hop, which speaks for its first request
		f, err := fingerprintOf(o.Context, o.req, o.scope, &o.body)
		if err != nil {
			return err
		}
		o.request = f
		if o.cell != nil {
			if other := o.cell.bind(f); other != nil {
				return reused(other, f)
			}
		}
	}
	if err := o.t.gates.enter(o.Context, o.gate(), o.request); err != nil {
		o.endedBy(o.Err())
		return err
	}
	o.inGate = true
	if o.record() != nil {
		return o.open()
	}
	if o.isHop {
		return nil
	}
	o.started = time.Now()
	if o.cell != nil {
		first := o.cell.first()
		if s := o.cell.op.Started; !s.IsZero() && (first.IsZero() || s.Before(first)) {
			first = s
		}
		if !first.IsZero() && first.Before(o.started) { // a Started that is yet to come says less than the send itself
			o.noteSend(first)
		}
	}
	return nil
}

// continues reports whether the redirect asks for the same request again.
func (o *operation) continues(previous *operation) bool {
	if previous.afterWrite {
		return false
	}
	return o.method() == previous.method() && (keepsBody(o.req.Response.StatusCode) || !previous.writes())
}

// keepsBody reports whether a redirect asks for the same method and body.
func keepsBody(status int) bool {
	return status == http.StatusTemporaryRedirect || status == http.StatusPermanentRedirect
}

func (o *operation) writes() bool { return o.keyed || !safe(o.method()) }

// follow goes on with the operation that was redirected.
func (o *operation) follow(previous *operation) error {
	o.inherit(previous)
	o.keyed = previous.keyed
	o.request, o.cell = previous.request, previous.cell
	if rec := previous.record(); rec != nil {
		o.aftermath().record = &record{gate: rec.gate, fence: rec.entry.Fence}
	}
	carries := o.keyed || o.req.Body != nil && o.req.Body != http.NoBody
	from, to := previous.req.URL, o.req.URL
	if carries && o.target() != originOf(from) && (o.t.AllowRedirect == nil || !o.t.AllowRedirect(from, to)) {
		return redirectRefused(from, to)
	}
	return nil
}

// extend is the GET after a 301, 302 or 303: it carries no key and says
// nothing about the effect.
func (o *operation) extend(previous *operation) {
	o.inherit(previous)
	o.afterWrite = true
	if o.report.onlyJournal { // what the write could not note is still so
		o.report.Reason = previous.report.Reason
	}
}

func (o *operation) inherit(previous *operation) {
	o.isHop, o.uncounted = true, true
	o.minted, o.scope = previous.minted, previous.scope
	if o.home = previous.home; o.home == nil {
		home := previous.target()
		o.home = &home
	}
	o.started, o.sentFirst, o.wasSent = previous.started, previous.sentFirst, previous.wasSent
	// Not took: the RoundTrip that was redirected has settled with the budget.
	o.counted, o.waits, o.chance = previous.counted, previous.waits, previous.chance
	if previous.late != nil {
		o.aftermath().waits = previous.late.waits
	}
	o.report = previous.report
	o.report.Attempts = append([]Attempt(nil), previous.report.Attempts...)
	o.report.Reason = nil
}

// abandon lets go of everything when a hook, Classify, Prepare or the base
// panics; the panic goes on.
func (o *operation) abandon() {
	if o.ended {
		return
	}
	o.answer.holdsGate = false
	if o.resp != nil {
		closeBody(o.resp.Body)
	}
	if o.now != nil {
		o.now.release()
	}
	_ = o.body.own.Close()
	if rec := o.record(); rec != nil && rec.claimed() {
		_ = rec.release(o, journal.Note{})
	}
}

// leave hands the turn of the key on, unless a streamed answer still has it.
func (o *operation) leave() {
	if o.inGate && !o.answer.holdsGate {
		o.inGate = false
		o.t.gates.leave(o.gate())
	}
}

func (o *operation) method() string { return method(o.req) }

func (o *operation) target() origin { return originOf(o.req.URL) }

func (o *operation) gate() gateKey {
	if rec := o.record(); rec != nil {
		return rec.gate
	}
	return gateKey{o.scope, o.report.Key}
}

// abroad reports whether the request goes to another origin than the
// operation's first one.
func (o *operation) abroad() bool { return o.home != nil && *o.home != o.target() }

// copyHeader is the attempt's own copy of the caller's header, with one value
// of the key. The values are copied into the attempt, so that nothing that a
// base does to them is seen elsewhere.
func (o *operation) copyHeader(a *attempt) http.Header {
	from := o.req.Header
	d := &o.t.dialect
	h := make(http.Header, len(from)+1)
	spare := a.values[:0]
	for name, values := range from {
		if len(name) == len(d.Header) && strings.EqualFold(name, d.Header) && o.ownsKeyHeader() {
			continue
		}
		if o.chance.expectDropped && strings.EqualFold(name, "Expect") {
			continue
		}
		if len(values) == 0 && replayed(name) {
			continue // nothing would be on the wire, but net/http would repeat the request by itself
		}
		if len(spare)+len(values) > cap(spare) {
			spare = make([]string, 0, len(values)+len(from))
		}
		n := len(spare)
		spare = append(spare, values...)
		h[name] = spare[n:len(spare):len(spare)]
	}
	if o.keyed {
		a.key[0] = o.report.Key
		if d.Quoted {
			a.key[0] = quote(o.report.Key)
		}
		h[d.Header] = a.key[:]
	}
	return h
}

// replayed names the headers for which net/http takes any request for one that
// it may send again by itself.
func replayed(name string) bool { return name == "Idempotency-Key" || name == "X-Idempotency-Key" }

// ownsKeyHeader reports whether the caller's key header is replaced or taken
// off. On a method that gets no key it is left alone, but at another origin.
func (o *operation) ownsKeyHeader() bool {
	return o.keyed || o.afterWrite || o.abroad() || keyless(o.Context)
}

func repeatable(method string) bool {
	return safe(method) || method == http.MethodPut || method == http.MethodDelete
}

// safe methods (RFC 9110, section 9.2.1) have no effect.
func safe(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}

// originOf is scheme, host and port, in one spelling.
func originOf(u *url.URL) origin {
	o := origin{scheme: strings.ToLower(u.Scheme), host: strings.ToLower(u.Host)}
	switch {
	case o.scheme == "http":
		o.host = strings.TrimSuffix(o.host, ":80")
	case o.scheme == "https":
		o.host = strings.TrimSuffix(o.host, ":443")
	}
	return o
}
