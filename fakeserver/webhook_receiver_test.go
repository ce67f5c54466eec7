package fakeserver

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	secretOne = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	secretTwo = "whsec_ZmFrZXNlcnZlciB0ZXN0IHNlY3JldCwgMjQr"
	tolerance = 5 * time.Minute
)

// receiver is what a careful user of webhooks builds: it verifies first, then claims the id, then acts, and answers 2xx only for what is
// done. Its faults are switches. It shares no code with the sender.
type receiver struct {
	scheme  Scheme
	secrets []string
	work    time.Duration // that acting takes
	fails   int           // so many times acting fails first

	blind         bool // does not verify
	anyTime       bool // does not look at the time
	checkThenAct  bool // claims the id only when it has acted
	claimUnproved bool // claims the id before it verifies
	earlyYes      bool // says 200 to a copy while the first may still fail

	memory *sync.Mutex // of known, where another receiver shares it; nil: mu
	mu     sync.Mutex
	known  map[string]string // id: "busy" or "done"
	acted  []notice
	heard  []notice // everything that came, in order of arrival
	answer []int
}

type notice struct {
	id, kind, reference, note, object string
	attempted                         string
	signed                            time.Time
	header                            http.Header
	body                              string
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	status, m := r.receive(req)
	r.mu.Lock()
	r.heard, r.answer = append(r.heard, m), append(r.answer, status)
	r.mu.Unlock()
	w.WriteHeader(status)
}

func (r *receiver) receive(req *http.Request) (status int, m notice) {
	body, err := io.ReadAll(io.LimitReader(req.Body, 1<<20+1))
	switch {
	case err != nil:
		return 400, m
	case len(body) > 1<<20:
		return 413, m
	}
	m = r.read(req.Header, body)
	if r.claimUnproved {
		if !r.claim(m.id) {
			return 200, m
		}
		if !r.verified(m, body) {
			return 401, m
		}
		r.act(m)
		r.settle(m.id, "done")
		return 200, m
	}
	if !r.blind && !r.verified(m, body) {
		return 401, m
	}
	if off := time.Since(m.signed); !r.anyTime && !r.blind && (off > tolerance || off < -tolerance) {
		return 400, m
	}
	if r.checkThenAct {
		if r.state(m.id) == "done" {
			return 200, m
		}
		r.act(m)
		r.settle(m.id, "done")
		return 200, m
	}
	if !r.claim(m.id) {
		if r.state(m.id) == "busy" && !r.earlyYes {
			return 503, m
		}
		return 200, m
	}
	if !r.act(m) {
		r.settle(m.id, "")
		return 500, m
	}
	r.settle(m.id, "done")
	return 200, m
}

// remember locks what is known; the result unlocks it.
func (r *receiver) remember() func() {
	mu := r.memory
	if mu == nil {
		mu = &r.mu
	}
	mu.Lock()
	return mu.Unlock
}

func (r *receiver) state(id string) string {
	defer r.remember()()
	return r.known[id]
}

func (r *receiver) claim(id string) bool {
	defer r.remember()()
	if r.known == nil {
		r.known = map[string]string{}
	}
	if r.known[id] != "" {
		return false
	}
	r.known[id] = "busy"
	return true
}

func (r *receiver) settle(id, state string) {
	defer r.remember()()
	if r.known == nil {
		r.known = map[string]string{}
	}
	if r.known[id] = state; state == "" {
		delete(r.known, id)
	}
}

func (r *receiver) act(m notice) bool {
	time.Sleep(r.work) // the work of a handler
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fails > 0 {
		r.fails--
		return false
	}
	r.acted = append(r.acted, m)
	return true
}

func (r *receiver) read(h http.Header, body []byte) notice {
	var doc struct {
		ID, Type  string
		Attempted string `json:"attempted_at"`
		Data      json.RawMessage
	}
	_ = json.Unmarshal(body, &doc) // what is not JSON tells nothing
	data := doc.Data
	m := notice{id: h.Get("Webhook-Id"), kind: doc.Type, attempted: doc.Attempted, header: h, body: string(body)}
	seconds := h.Get("Webhook-Timestamp")
	if r.scheme == StripeSignature {
		m.id = doc.ID
		var inner struct{ Object json.RawMessage }
		_ = json.Unmarshal(data, &inner)
		data = inner.Object
		for part := range strings.SplitSeq(h.Get("Stripe-Signature"), ",") {
			if t, ok := strings.CutPrefix(part, "t="); ok {
				seconds = t
			}
		}
	}
	var object struct{ Reference, Note, Object string }
	_ = json.Unmarshal(data, &object)
	m.reference, m.note, m.object = object.Reference, object.Note, object.Object
	n, _ := strconv.ParseInt(seconds, 10, 64)
	m.signed = time.Unix(n, 0)
	return m
}

func (r *receiver) verified(m notice, body []byte) bool {
	sum := func(key []byte, text string) []byte {
		mac := hmac.New(sha256.New, key)
		_, _ = io.WriteString(mac, text)
		return mac.Sum(nil)
	}
	seconds := strconv.FormatInt(m.signed.Unix(), 10)
	for _, secret := range r.secrets {
		if r.scheme == StripeSignature {
			want := sum([]byte(secret), seconds+"."+string(body))
			for part := range strings.SplitSeq(m.header.Get("Stripe-Signature"), ",") {
				got, _ := hex.DecodeString(strings.TrimPrefix(part, "v1="))
				if hmac.Equal(got, want) {
					return true
				}
			}
			continue
		}
		key, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
		want := sum(key, m.id+"."+seconds+"."+string(body))
		for part := range strings.FieldsSeq(m.header.Get("Webhook-Signature")) {
			got, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(part, "v1,"))
			if hmac.Equal(got, want) {
				return true
			}
		}
	}
	return false
}

// times says how often it acted for each reference.
func (r *receiver) times() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := map[string]int{}
	for _, m := range r.acted {
		n[m.reference]++
	}
	return n
}

func (r *receiver) all() []notice {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]notice(nil), r.heard...)
}

// careful makes a receiver without faults, and registers it.
func careful(t *testing.T, s *Server, e Endpoint) *receiver {
	t.Helper()
	r := &receiver{}
	r.at(t, s, e)
	return r
}

// at registers the receiver.
func (r *receiver) at(t *testing.T, s *Server, e Endpoint) {
	t.Helper()
	if e.Secrets == nil {
		e.Secrets = []string{secretOne}
	}
	r.scheme, r.secrets = e.Scheme, e.Secrets
	e.Handler = r
	require.NoError(t, s.Register(e))
}

// payFor makes a payment for a reference.
func payFor(t *testing.T, s *Server, reference string) {
	t.Helper()
	c := pay(reference)
	c.body = strings.Replace(c.body, "order-1", reference, 1)
	require.Equal(t, 201, c.send(s).status)
}

func settled(t *testing.T, s *Server) {
	t.Helper()
	require.NoError(t, s.AwaitEvents(t.Context()))
}

func states(s *Server) (list []EventState) {
	for _, e := range s.Events() {
		list = append(list, e.State)
	}
	return list
}
