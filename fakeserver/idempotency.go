package fakeserver

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// scopedKey is what must be unique: the same key of another caller, or at another endpoint, is another key.
type scopedKey struct {
	caller, endpoint, key string // endpoint = method and concrete path; "" in lenient mode
	replica               int    // that remembers it
}

// record is the server's memory of one key.
type record struct {
	fingerprint string
	running     bool
	freeAt      time.Time // a stuck key is forgotten then; zero = not stuck
	expires     time.Time
	answer      answer
	id          string // of the resource that was made; "" = none
}

// request is one delivery: what the effect needs to know, whichever connection brought it.
type request struct {
	http      *http.Request
	route     *route
	life      chan struct{} // of the server, that it arrived in
	caller    string
	key       string
	keyFault  *answer // why the key is not accepted; nil = it is, or none is needed
	body      []byte
	bodyLen   int64
	bodySum   string
	reference string
	act       action
	peek      func(*Server)                               // what a server that reads first and writes later reads first; nil = nothing
	stub      func(life <-chan struct{}) (answer, Effect) // runs in the place of act, without the lock; nil = none
	at        scopedKey                                   // where rec is, or will be
	rec       *record                                     // reserved for this request; nil = none
	wrong     *answer                                     // the request cannot be understood
	tooLarge  bool
	send      *Send // guarded by Server.mu
}

// action makes an effect (one without a Kind is none) and the answer that is stored. It runs under Server.mu, so it must not wait.
type action func(*Server) (answer, Effect)

// fingerprint says what was asked. It is compared, never shown.
func (q *request) fingerprint() string {
	return q.http.Method + " " + q.http.URL.RequestURI() + " " + q.bodySum
}

func (q *request) scoped(t Settings) scopedKey {
	k := scopedKey{key: q.key}
	if t.Replicas > 1 {
		turn := q.send.KeySend - 1
		if q.send.Duplicate {
			turn++
		}
		k.replica = turn % t.Replicas
	}
	if t.KeyPer == PerNobody {
		return k
	}
	k.caller = q.caller
	if !t.Lenient {
		k.endpoint = q.http.Method + " " + q.http.URL.Path
	}
	return k
}

// claim looks the key up. Either there is an answer already (proceed is false), or the request may act; then rec is the
// reserved key, nil if no key protects it. s.mu is held, and must stay held until the effect happened or rec is marked running.
func (s *Server) claim(q *request) (rec *record, a answer, proceed bool) {
	if !s.listed(q.send) || q.life != s.life {
		return nil, answer{none: true}, false // it came before a Reset or a Restart
	}
	if q.keyFault != nil {
		return nil, *q.keyFault, false
	}
	protected := q.route.keyed && q.key != "" && !s.settings.IgnoreKeys
	if protected {
		q.at = q.scoped(s.settings)
		if rec := s.lookup(q.at); rec != nil {
			return nil, s.recall(q, rec), false
		}
	}
	if q.wrong != nil {
		return nil, *q.wrong, false
	}
	if protected {
		rec = &record{fingerprint: q.fingerprint(), expires: s.now().Add(s.settings.Retention)}
		q.rec = rec
		if !s.settings.KeyLast {
			s.keys[q.at] = rec
		}
	}
	return rec, answer{}, true
}

// remember stores the key where that comes last. s.mu is held.
func (s *Server) remember(q *request) {
	if s.settings.KeyLast && q.rec != nil && s.lookup(q.at) == nil {
		s.keys[q.at] = q.rec
	}
}

// die leaves a reserved key in progress, as a worker does that dies. s.mu is held.
func (s *Server) die(rec *record, lease time.Duration) {
	if rec == nil {
		return
	}
	rec.running, rec.freeAt = true, rec.expires
	if lease > 0 {
		rec.freeAt = s.now().Add(lease)
	}
}

// lookup finds what is still remembered of a key. s.mu is held.
func (s *Server) lookup(at scopedKey) *record {
	rec := s.keys[at]
	if rec != nil && rec.over(s.now()) {
		delete(s.keys, at)
		return nil
	}
	return rec
}

func (r *record) over(now time.Time) bool {
	if r.running {
		return !r.freeAt.IsZero() && !now.Before(r.freeAt)
	}
	return !now.Before(r.expires)
}

// recall answers a request whose key is known. s.mu is held.
func (s *Server) recall(q *request, rec *record) answer {
	t := s.settings
	switch {
	case !t.Lenient && rec.fingerprint != q.fingerprint():
		if t.MismatchBody != "" {
			return told(t.MismatchStatus, t.MismatchBody, q.key, rec.id)
		}
		return problem(t.MismatchStatus, "idempotency-key-reused",
			"This idempotency key was used for another request.", map[string]any{"idempotency_key": q.key})
	case rec.running:
		a := problem(t.InProgressStatus, "idempotency-key-in-use",
			"A request with this idempotency key is still running.", map[string]any{"idempotency_key": q.key})
		if t.InProgressBody != "" {
			a = told(t.InProgressStatus, t.InProgressBody, q.key, rec.id)
		}
		if t.InProgressRetryAfter != "-" {
			a = a.with("Retry-After", t.InProgressRetryAfter)
		}
		if name, value, ok := strings.Cut(t.InProgressHeader, ":"); ok {
			a = a.with(name, strings.TrimSpace(value))
		}
		return a
	case t.DoneStatus != 0 && (rec.id != "" || !strings.Contains(t.DoneBody, "{id}")):
		return told(t.DoneStatus, t.DoneBody, q.key, rec.id)
	}
	q.send.Replayed = true
	a := rec.answer
	if a.status/100 == 2 {
		if now := s.resource(rec.id); t.ReplayCurrent && now != nil {
			a.body = jsonAnswer(a.status, now).body
		}
		if t.ReplayBody != "" {
			a.body = told(a.status, t.ReplayBody, q.key, rec.id).body
		}
		if t.ReplayStatus != 0 {
			a.status = t.ReplayStatus
		}
	}
	if t.ReplayHeader != "-" {
		a = a.with(t.ReplayHeader, "true")
	}
	return a
}

// told is an answer in the words of the settings.
func told(status int, body, key, id string) answer {
	a := answer{status: status}
	if body != "" {
		quoted := func(s string) string { // within the double quotes of the text
			b, _ := json.Marshal(s) // a string always marshals
			return string(b[1 : len(b)-1])
		}
		a.header = []field{{"Content-Type", "application/json"}}
		a.body = []byte(strings.NewReplacer("{key}", quoted(key), "{id}", quoted(id)).Replace(body) + "\n")
	}
	return a
}

// resource is the payment or reservation of an id as it is now; nil = there is none. s.mu is held.
func (s *Server) resource(id string) any {
	if p := s.payments.byID[id]; p != nil {
		return p
	}
	if r := s.hotels.reservations[id]; r != nil {
		return r
	}
	return nil
}

// finish makes the effect and stores its answer. s.mu is held.
func (s *Server) finish(q *request, rec *record, f *Fault) answer {
	var a answer
	if failure := f.storedFailure(); failure != nil && f.Point == BeforeEffect {
		a = *failure
	} else {
		var e Effect
		if a, e = q.act(s); e.Kind != "" {
			s.enter(q, e)
			if rec != nil {
				rec.id = e.ID
			}
		}
		if failure != nil {
			a = *failure
		}
	}
	if rec != nil {
		rec.running, rec.answer = false, a
	}
	if q.stub != nil && a.status >= 500 && s.settings.Failures == FreeKey && !f.is(StoredFailure) {
		s.forget(q, rec)
	}
	return a
}

// forget frees a key, if it still belongs to rec. s.mu is held.
func (s *Server) forget(q *request, rec *record) {
	if rec != nil && s.keys[q.at] == rec {
		delete(s.keys, q.at)
	}
	q.rec = nil
}

// execute runs one delivery. Key, effect and stored answer change in one locked step, unless [Server.perform] lets go of
// the lock between them. The client's connection plays no part in it.
func (s *Server) execute(q *request, f *Fault) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, a, proceed := s.claim(q)
	if !proceed {
		return a
	}
	var delay time.Duration
	if f.is(Slow) {
		delay = f.Delay
	}
	return s.perform(q, rec, f, delay)
}

// perform makes the effect of a claimed request, delay from now. s.mu is held, but not while it waits or a stub runs:
// then the key is in progress.
func (s *Server) perform(q *request, rec *record, f *Fault, delay time.Duration) answer {
	ended := false
	defer func() {
		if !ended { // a stub that ended its goroutine, a server that closed
			s.forget(q, rec)
		}
	}()
	if q.peek != nil && s.settings.ReadThenWrite > 0 {
		q.peek(s)
		delay += s.settings.ReadThenWrite
	}
	stub := q.stub
	if f.is(StoredFailure) && f.Point == BeforeEffect {
		stub = nil
	}
	if delay > 0 || stub != nil {
		if rec != nil {
			rec.running = true
		}
		open := true
		var a answer
		var e Effect
		s.unlocked(func() {
			if open = s.wait(delay, q.life); open && stub != nil {
				a, e = stub(q.life)
			}
		})
		open = open && s.listed(q.send) && q.life == s.life
		switch {
		case !open && s.settings.ClaimFirst:
			if rec != nil && rec.freeAt.IsZero() { // a Restart has done it already
				s.die(rec, s.settings.Lease)
			}
			ended = true
			return answer{none: true}
		case !open, a.none:
			if a.cause != "" {
				q.send.Fault = a.cause
			}
			return answer{none: true}
		}
		if stub != nil {
			q.act = func(*Server) (answer, Effect) { return a, e }
		}
	}
	a := s.finish(q, rec, f)
	ended = true
	return a
}

// unlocked runs f without the lock that its caller holds, and takes it again however f ends.
func (s *Server) unlocked(f func()) {
	s.mu.Unlock()
	defer s.mu.Lock()
	f()
}

// Sweep forgets every key whose retention has ended, by the server's clock, and says how many there were.
// Each is also forgotten when it is next met.
func (s *Server) Sweep() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for at, rec := range s.keys {
		if rec.over(s.now()) {
			delete(s.keys, at)
			n++
		}
	}
	return n
}

// keyOf reads the key header. A refusal is an answer; needed says whether the endpoint wants a key.
func keyOf(values []string, t Settings, needed bool) (key string, refusal *answer) {
	refuse := func(kind, detail string) (string, *answer) {
		a := problem(http.StatusBadRequest, kind, detail, nil)
		return "", &a
	}
	switch {
	case len(values) == 0 && (t.Optional || !needed):
		return "", nil
	case len(values) == 0:
		return refuse("idempotency-key-missing", "The "+t.KeyHeader+" header is missing.")
	case len(values) > 1:
		return refuse("idempotency-key-invalid", "The "+t.KeyHeader+" header has more than one value.")
	}
	key, ok := values[0], true
	if t.Quoted {
		key, ok = unquote(key)
	}
	switch {
	case !ok:
		return refuse("idempotency-key-invalid", "The "+t.KeyHeader+" header is not a string in double quotes.")
	case key == "":
		return refuse("idempotency-key-invalid", "The "+t.KeyHeader+" header is empty.")
	case len(key) > t.MaxKey:
		return refuse("idempotency-key-invalid", "The "+t.KeyHeader+" header is longer than "+strconv.Itoa(t.MaxKey)+" bytes.")
	}
	for i := range len(key) {
		if key[i] < ' ' || key[i] == 0x7f {
			return refuse("idempotency-key-invalid", "The "+t.KeyHeader+" header has a control character.")
		}
	}
	return key, nil
}

// unquote reads an RFC 9651 string, section 4.2.5.
func unquote(s string) (string, bool) {
	if len(s) < 2 || s[0] != '"' || s[len(s)-1] != '"' {
		return "", false
	}
	s = s[1 : len(s)-1]
	if !strings.ContainsAny(s, `\"`) {
		return s, true
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '"':
			return "", false
		case s[i] == '\\':
			i++
			if i == len(s) || s[i] != '"' && s[i] != '\\' {
				return "", false
			}
		}
		b.WriteByte(s[i])
	}
	return b.String(), true
}

// callerOf names who calls without repeating the credential.
func callerOf(authorization string, per Scope) string {
	if authorization == "" {
		return ""
	}
	if per == PerAccount {
		if scheme, credential, ok := strings.Cut(authorization, " "); ok && strings.EqualFold(scheme, "Bearer") {
			if account, _, ok := strings.Cut(credential, "."); ok && account != "" {
				return account
			}
		}
	}
	sum := sha256.Sum256([]byte(authorization))
	return "caller-" + hex.EncodeToString(sum[:6])
}
