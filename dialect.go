package idem

import (
	"bytes"
	"encoding/json"
	"mime"
	"net/http"
	"net/textproto"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Dialect describes how one provider speaks of keys: where the key goes,
// and how its answers say "in progress", "reused", "already done" and
// "replayed". The entirely zero Dialect is [Generic]. For a provider that is
// not listed, copy the nearest one and change it:
//
//	d := idem.Generic
//	d.Header = "X-Request-Key"
//	d.Refusal = append(d.Refusal, idem.Mark{Status: 422, Pointer: "/type", Contains: "sold-out"})
type Dialect struct {
	// Name of the dialect, for logs.
	Name string
	// Header that carries the key. "": requests get no key, as in NoKeys.
	Header string
	// Quoted sends the key as a structured-field string, in double quotes
	// (RFC 9651, section 3.3.3); otherwise it goes out raw.
	Quoted bool
	// MaxKey is the longest key in bytes, quotes not counted. 0: 255. Made
	// keys are written in a shorter alphabet where it is below 36; below 22
	// they would lose entropy, and that is ErrInvalid.
	MaxKey int
	// Methods that get a key beside POST and PATCH, in capitals.
	Methods []string
	// InProgress marks the answers that say that the first request with the
	// key still runs. A 409 with Retry-After is one in every dialect.
	InProgress []Mark
	// Mismatch marks the answers that say that the key belongs to another
	// request.
	Mismatch []Mark
	// AlreadyDone marks the answers that say that the work was done under
	// this key earlier, where the provider does not replay its answer.
	AlreadyDone []Mark
	// Replay marks a stored answer.
	Replay []Mark
	// Refusal marks answers that only the operation itself gives, such as a
	// declined card: the operation was looked at, and nothing was done.
	Refusal []Mark
	// Reference has JSON Pointers (RFC 6901) to the provider's resource id in
	// a 2xx or already-done answer; the first that fits counts.
	Reference []string
	// RequestID is the response header with the provider's id of a request.
	RequestID string
	// RetryHint is the response header that says "true" (retrying may help)
	// or "false" (it will not). It is obeyed below the marks above, within
	// attempts and budget.
	RetryHint string
	// KeyWindow is how long the provider remembers a key. 0: it states none.
	KeyWindow time.Duration

	// All marks, once resolved.
	anyStatus []meaning
	byStatus  map[int][]meaning
}

// meaning is a mark and what it means.
type meaning struct {
	Mark
	is mark
}

// Mark recognises an answer. All that is set must fit.
type Mark struct {
	// Status of the answer; 0: any.
	Status int
	// Header that must be present; "": not looked at. With Value, one of its
	// values must equal it, letter case aside.
	Header, Value string
	// Pointer into the JSON body (RFC 6901); "": not looked at. The place must
	// hold a string or a number that equals Equals, where that is not empty,
	// and contains Contains, letter case and the difference between "-", "_",
	// space and nothing aside.
	Pointer, Equals, Contains string
}

var (
	// Generic is a provider that takes a raw Idempotency-Key, says 409 while
	// the first request runs, 422 with a problem type or error code that
	// names the key when it was used for another payload, and marks replays
	// with one of the common headers. Codes are looked for at /type, /code,
	// /error, /error/code, /error/type, /errorType, /error_code,
	// /errors/0/code and /errors/0/type: for a 409 "in progress", "in use" or
	// "concurrent", for a 422 "idempoten".
	Generic = Dialect{
		Name:      "generic",
		Header:    "Idempotency-Key",
		RequestID: "X-Request-Id",
		RetryHint: "X-Should-Retry",
		InProgress: slices.Clip(slices.Concat(
			anyCode(http.StatusConflict, "inprogress"),
			anyCode(http.StatusConflict, "inuse"),
			anyCode(http.StatusConflict, "concurrent"))),
		Mismatch: anyCode(http.StatusUnprocessableEntity, "idempoten"),
		Replay: []Mark{
			{Header: "Idempotent-Replayed", Value: "true"},
			{Header: "Idempotency-Replayed", Value: "true"},
			{Header: "Idempotent-Replay", Value: "true"},
		},
	}

	// IETF is draft-ietf-httpapi-idempotency-key-header-07 (October 2025,
	// expired, not a standard): the key is a quoted string; 409 while the
	// first request runs and 422 for another payload, both as problem
	// details (RFC 9457) whose type names the key.
	IETF = Dialect{
		Name:       "ietf-draft-07",
		Header:     "Idempotency-Key",
		Quoted:     true,
		RequestID:  "X-Request-Id",
		InProgress: []Mark{{Status: http.StatusConflict, Pointer: "/type", Contains: "idempoten"}},
		Mismatch:   []Mark{{Status: http.StatusUnprocessableEntity, Pointer: "/type", Contains: "idempoten"}},
		Replay:     Generic.Replay,
	}

	// Stripe is the Stripe API v1: docs.stripe.com/api/idempotent_requests
	// and docs.stripe.com/error-low-level. A replayed 500 stays a 500, a 402
	// is the bank's answer, and keys may be pruned after 24 hours.
	Stripe = Dialect{
		Name:      "stripe",
		Header:    "Idempotency-Key",
		MaxKey:    255,
		RequestID: "Request-Id",
		RetryHint: "Stripe-Should-Retry",
		InProgress: []Mark{
			{Status: http.StatusConflict},
			{Status: http.StatusTooManyRequests, Pointer: "/error/code", Equals: "lock_timeout"},
		},
		Mismatch: []Mark{
			{Status: http.StatusBadRequest, Pointer: "/error/type", Equals: "idempotency_error"},
		},
		Replay:    []Mark{{Header: "Idempotent-Replayed", Value: "true"}},
		Refusal:   []Mark{{Status: http.StatusPaymentRequired}},
		Reference: []string{"/id"},
		KeyWindow: 24 * time.Hour,
	}

	// NoKeys is a provider that ignores keys. Requests get none, and a POST
	// is repeated only when it is proved that nothing reached the server.
	NoKeys = Dialect{Name: "no-keys", RequestID: "X-Request-Id"}
)

// anyCode marks the places where problem details and the usual error objects
// keep their code.
func anyCode(status int, contains string) []Mark {
	var marks []Mark
	for _, p := range [...]string{"/type", "/code", "/error", "/error/code", "/error/type", "/errorType", "/error_code", "/errors/0/code", "/errors/0/type"} {
		marks = append(marks, Mark{Status: status, Pointer: p, Contains: contains})
	}
	return slices.Clip(marks) // so that append copies
}

const (
	defaultMaxKey = 255
	leastMaxKey   = 22 // 128 bits in the base64url alphabet
)

// resolved is d ready for use: canonical header names, defaults filled in.
func (d Dialect) resolved() (Dialect, error) {
	if reflect.ValueOf(d).IsZero() {
		d = Generic
	}
	if d.MaxKey == 0 {
		d.MaxKey = defaultMaxKey
	}
	switch {
	case d.MaxKey < leastMaxKey:
		return d, invalid("Dialect.MaxKey", "is %d; the least is %d", d.MaxKey, leastMaxKey)
	case d.KeyWindow < 0:
		return d, invalid("Dialect.KeyWindow", "is %v; the least is 0 (none stated)", d.KeyWindow)
	}
	if d.Header != "" && (!isToken(d.Header) || protocolHeader(d.Header)) {
		return d, invalid("Dialect.Header", "is %q, which is not the name of a header that can carry a key", d.Header)
	}
	for _, m := range d.Methods {
		if !isToken(m) || strings.ToUpper(m) != m {
			return d, invalid("Dialect.Methods", "has %q, which is not a method in capitals", m)
		}
	}
	d.anyStatus, d.byStatus = nil, make(map[int][]meaning)
	for _, set := range [...]struct {
		marks []Mark
		is    mark
	}{
		{d.Replay, markReplay}, {d.InProgress, markInProgress}, {d.Mismatch, markMismatch},
		{d.AlreadyDone, markAlreadyDone}, {d.Refusal, markRefusal},
	} {
		for _, m := range set.marks {
			if err := m.check(); err != nil {
				return d, err
			}
			m.Header = textproto.CanonicalMIMEHeaderKey(m.Header)
			if m.Status == 0 {
				d.anyStatus = append(d.anyStatus, meaning{m, set.is})
			} else {
				d.byStatus[m.Status] = append(d.byStatus[m.Status], meaning{m, set.is})
			}
		}
	}
	d.Header = textproto.CanonicalMIMEHeaderKey(d.Header)
	d.RequestID = textproto.CanonicalMIMEHeaderKey(d.RequestID)
	d.RetryHint = textproto.CanonicalMIMEHeaderKey(d.RetryHint)
	return d, nil
}

// check refuses a mark that fits every answer or none.
func (m *Mark) check() error {
	switch {
	case m.Status < 0 || m.Status > 999:
		return invalid("Mark.Status", "is %d; it must be 0 (any) or from 100 to 999", m.Status)
	case m.Status == 0 && m.Header == "" && m.Pointer == "":
		return invalid("Mark", "names neither Status nor Header nor Pointer; the least is one")
	case m.Value != "" && m.Header == "":
		return invalid("Mark.Value", "is %q, but there is no Header", m.Value)
	case (m.Equals != "" || m.Contains != "") && m.Pointer == "":
		return invalid("Mark.Pointer", "is empty, but Equals is %q and Contains is %q", m.Equals, m.Contains)
	case m.Pointer != "" && m.Pointer[0] != '/':
		return invalid("Mark.Pointer", "is %q; it must begin with /", m.Pointer)
	}
	return nil
}

// protocolHeader lists names that the protocol or net/http uses for itself: a
// key there would not arrive.
func protocolHeader(name string) bool {
	switch textproto.CanonicalMIMEHeaderKey(name) {
	case "Host", "Content-Length", "Transfer-Encoding", "Trailer", "Connection", "Keep-Alive",
		"Proxy-Connection", "Upgrade", "Te", "Expect":
		return true
	}
	return false
}

// isToken follows RFC 9110, section 5.6.2.
func isToken(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		letter := 'a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9'
		if !letter && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}

// keys reports whether a method gets a key.
func (d *Dialect) keys(method string) bool {
	if d.Header == "" {
		return false
	}
	switch method {
	case http.MethodPost, http.MethodPatch:
		return true
	}
	for _, m := range d.Methods {
		if m == method {
			return true
		}
	}
	return false
}

// needsBody reports whether the marks of an answer with this status look
// into its body.
func (d *Dialect) needsBody(status int) bool {
	for _, set := range [...][]meaning{d.anyStatus, d.byStatus[status]} {
		for i := range set {
			if set[i].Pointer != "" {
				return true
			}
		}
	}
	return false
}

// recognise reads the marks of an answer; body may be a prefix. The dialect
// must be resolved.
func (d *Dialect) recognise(resp *http.Response, body *document) mark {
	var m mark
	for _, set := range [...][]meaning{d.anyStatus, d.byStatus[resp.StatusCode]} {
		for i := range set {
			if m&set[i].is == 0 && set[i].fits(resp, body) {
				m |= set[i].is
			}
		}
	}
	if resp.StatusCode == http.StatusConflict && m&(markMismatch|markAlreadyDone|markReplay) == 0 {
		if _, asked := retryAfter(resp.Header, time.Now()); asked {
			m |= markInProgress
		}
	}
	return m
}

func (m *Mark) fits(resp *http.Response, body *document) bool {
	if m.Status != 0 && m.Status != resp.StatusCode {
		return false
	}
	if m.Header != "" && !headerHas(resp.Header, m.Header, m.Value) {
		return false
	}
	if m.Pointer != "" {
		value, ok := body.at(m.Pointer)
		return ok && (m.Equals == "" || value == m.Equals) &&
			(m.Contains == "" || strings.Contains(squeeze(value), squeeze(m.Contains)))
	}
	return m.Status != 0 || m.Header != ""
}

func headerHas(h http.Header, name, value string) bool {
	for _, v := range h[name] {
		if value == "" || strings.EqualFold(strings.TrimSpace(v), value) {
			return true
		}
	}
	return false
}

// squeeze makes "key-in-use", "key_in_use" and "KeyInUse" one word.
func squeeze(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '-' || r == '_' || r == ' ' {
			return -1
		}
		return r
	}, strings.ToLower(s))
}

// hint is what the provider's header asks for.
func (d *Dialect) hint(h http.Header) Verdict {
	if d.RetryHint == "" {
		return Undecided
	}
	if v := h[d.RetryHint]; len(v) > 0 {
		switch strings.ToLower(strings.TrimSpace(v[0])) {
		case "true":
			return Retry
		case "false":
			return Stop
		}
	}
	return Undecided
}

// reference finds the provider's resource id.
func (d *Dialect) reference(body *document) string {
	for _, p := range d.Reference {
		if id, ok := body.at(p); ok && id != "" {
			return id
		}
	}
	return ""
}

// document is a JSON body, parsed when first asked.
type document struct {
	text  []byte
	value *any // nil: not parsed yet
}

// at resolves a JSON Pointer (RFC 6901) to a string or a number.
func (d *document) at(pointer string) (string, bool) {
	if d == nil || len(d.text) == 0 {
		return "", false
	}
	if d.value == nil {
		d.value = new(any)
		dec := json.NewDecoder(bytes.NewReader(d.text))
		dec.UseNumber() // an id must keep all its digits
		if dec.Decode(d.value) != nil {
			*d.value = nil
		}
	}
	v := *d.value
	if pointer != "" && pointer[0] != '/' {
		return "", false
	}
	for _, step := range strings.Split(pointer, "/")[1:] {
		step = strings.NewReplacer("~1", "/", "~0", "~").Replace(step)
		switch parent := v.(type) {
		case map[string]any:
			v = parent[step]
		case []any:
			i, err := strconv.Atoi(step)
			if err != nil || i < 0 || i >= len(parent) {
				return "", false
			}
			v = parent[i]
		default:
			return "", false
		}
	}
	switch x := v.(type) {
	case string:
		return x, true
	case json.Number:
		return x.String(), true
	}
	return "", false
}

func mediaType(h http.Header) string {
	v := h["Content-Type"]
	if len(v) == 0 {
		return ""
	}
	if v[0] == "application/json" { // the common case, without an allocation
		return v[0]
	}
	t, _, err := mime.ParseMediaType(v[0])
	if err != nil {
		return ""
	}
	return t
}
