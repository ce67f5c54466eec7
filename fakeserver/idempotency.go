package fakeserver

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strings"
	"time"
)

// scopedKey is what must be unique: the same key of another caller, or at another endpoint, is another key.
type scopedKey struct {
	caller, endpoint, key string // endpoint = method and concrete path; "" in lenient mode
}

// record is the server's memory of one key.
type record struct {
	fingerprint string
	running     bool
	freeAt      time.Time // a stuck key is forgotten then; zero = not stuck
	expires     time.Time
	answer      answer
}

// request is one delivery: what the effect needs to know, whichever connection brought it.
type request struct {
	http      *http.Request
	route     *route
	caller    string
	key       string
	keyFault  *answer // why the key is not accepted; nil = it is, or none is needed
	body      []byte
	bodyLen   int64
	bodySum   string
	reference string
	act       action
	wrong     *answer // the request cannot be understood
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
	k := scopedKey{caller: q.caller, key: q.key}
	if !t.Lenient {
		k.endpoint = q.http.Method + " " + q.http.URL.Path
	}
	return k
}

// claim looks the key up. Either there is an answer already (proceed is false), or the request may act; then rec is the
// reserved key, nil if no key protects it. s.mu is held, and must stay held until the effect happened or rec is marked running.
func (s *Server) claim(q *request) (rec *record, a answer, proceed bool) {
	if q.keyFault != nil {
		return nil, *q.keyFault, false
	}
	protected := q.route.keyed && q.key != "" && !s.settings.IgnoreKeys
	at := q.scoped(s.settings)
	if protected {
		if rec := s.lookup(at); rec != nil {
			return nil, s.recall(q, rec), false
		}
	}
	if q.wrong != nil {
		return nil, *q.wrong, false
	}
	if protected {
		rec = &record{fingerprint: q.fingerprint(), expires: s.now().Add(s.settings.Retention)}
		s.keys[at] = rec
	}
	return rec, answer{}, true
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
		return problem(t.MismatchStatus, "idempotency-key-reused",
			"This idempotency key was used for another request.", map[string]any{"idempotency_key": q.key})
	case rec.running:
		a := problem(t.InProgressStatus, "idempotency-key-in-use",
			"A request with this idempotency key is still running.", map[string]any{"idempotency_key": q.key})
		if t.InProgressRetryAfter != "-" {
			a = a.with("Retry-After", t.InProgressRetryAfter)
		}
		return a
	}
	q.send.Replayed = true
	a := rec.answer.with(t.ReplayHeader, "true")
	if t.ReplayStatus != 0 && a.status/100 == 2 {
		a.status = t.ReplayStatus
	}
	return a
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
		}
		if failure != nil {
			a = *failure
		}
	}
	if rec != nil {
		rec.running, rec.answer = false, a
	}
	return a
}

// forget frees a key, if it still belongs to rec. s.mu is held.
func (s *Server) forget(q *request, rec *record) {
	if at := q.scoped(s.settings); rec != nil && s.keys[at] == rec {
		delete(s.keys, at)
	}
}

// execute runs one delivery. Key, effect and stored answer change in one locked step; only a Slow fault lets go of the
// lock between them, and then the key is in progress meanwhile. The client's connection plays no part in it.
func (s *Server) execute(q *request, f *Fault) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, a, proceed := s.claim(q)
	if !proceed {
		return a
	}
	if f.is(Slow) {
		if rec != nil {
			rec.running = true
		}
		s.mu.Unlock()
		open := s.wait(f.Delay, nil)
		s.mu.Lock()
		if !open {
			s.forget(q, rec)
			return answer{none: true}
		}
	}
	return s.finish(q, rec, f)
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

const maxKey = 255

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
	case len(key) > maxKey:
		return refuse("idempotency-key-invalid", "The "+t.KeyHeader+" header is longer than 255 bytes.")
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
		if credential, ok := strings.CutPrefix(authorization, "Bearer "); ok {
			if account, _, ok := strings.Cut(credential, "."); ok && account != "" {
				return account
			}
		}
	}
	sum := sha256.Sum256([]byte(authorization))
	return "caller-" + hex.EncodeToString(sum[:6])
}
