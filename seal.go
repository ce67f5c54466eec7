package idem

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/gob"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/idem-go/idem/journal"
)

// What Transport.Seal stores: a version byte, a random nonce, and the
// ciphertext of one of these, bound to the operation.
type (
	sealedRequest struct {
		Dialect string // its name: another Transport may share the journal and the AEAD
		Method  string
		URL     string // without user info
		Host    string
		Header  http.Header
		Left    []string // names of what else was in the header
		Body    []byte
	}
	sealedAnswer struct {
		Status int
		Header http.Header
		Body   []byte
	}
)

const sealVersion = 1

func (t *Transport) seal(kind string, op journal.Operation, v any) ([]byte, error) {
	var text bytes.Buffer
	if err := gob.NewEncoder(&text).Encode(v); err != nil { // not JSON: header values are bytes
		return nil, journalErr(err)
	}
	plain := text.Bytes()
	sealed := make([]byte, 1+t.Seal.NonceSize(), 1+t.Seal.NonceSize()+len(plain)+t.Seal.Overhead())
	sealed[0] = sealVersion
	if _, err := rand.Read(sealed[1:]); err != nil {
		return nil, journalErr(fmt.Errorf("the random source failed: %w", err))
	}
	return t.Seal.Seal(sealed, sealed[1:], plain, boundTo(kind, op)), nil
}

func (t *Transport) unseal(kind string, op journal.Operation, sealed []byte, v any) error {
	n := 1
	if t.Seal != nil {
		n += t.Seal.NonceSize()
	}
	if t.Seal == nil || len(sealed) < n || sealed[0] != sealVersion {
		return journalErr(fmt.Errorf("the stored %s of %v cannot be read: it needs the Seal that it was made with", kind, op))
	}
	plain, err := t.Seal.Open(nil, sealed[1:n], sealed[n:], boundTo(kind, op))
	if err != nil {
		return journalErr(fmt.Errorf("the stored %s of %v does not open: another Seal, or damage: %w", kind, op, err))
	}
	if err := gob.NewDecoder(bytes.NewReader(plain)).Decode(v); err != nil {
		return journalErr(fmt.Errorf("the stored %s of %v cannot be read", kind, op))
	}
	return nil
}

// boundTo keeps what was sealed for one operation from being opened for another.
func boundTo(kind string, op journal.Operation) []byte {
	var b []byte
	for _, part := range [...]string{"idem " + kind, op.Scope, op.Name, op.ID} {
		b = binary.BigEndian.AppendUint64(b, uint64(len(part)))
		b = append(b, part...)
	}
	return b
}

// sealRequest stores the request so that a resume needs nobody to build it.
func (o *operation) sealRequest() ([]byte, error) {
	s := sealedRequest{Dialect: o.t.dialect.Name, Method: o.method(), URL: urlOf(o.req.URL), Host: o.req.Host, Header: make(http.Header)}
	for name, values := range o.req.Header {
		switch canonical := http.CanonicalHeaderKey(name); {
		case storable(canonical):
			s.Header[name] = values
		case canonical != o.t.dialect.Header && !ofTheCall(canonical):
			s.Left = append(s.Left, canonical)
		}
	}
	if o.body.kind != noBody {
		rc, err := o.body.again()
		if err != nil {
			return nil, err
		}
		defer func() { _ = rc.Close() }()
		if s.Body, err = io.ReadAll(rc); err != nil {
			return nil, &bodyError{err}
		}
	}
	return o.t.seal("request", o.record().operation(o), s)
}

// operation is the identity of the entry.
func (rec *record) operation(o *operation) journal.Operation {
	return journal.Operation{Scope: o.scope, Name: o.report.Operation.Name, ID: o.report.Operation.ID}
}

// storable headers say what a request means. Nothing that may be a credential is
// among them: Prepare brings those again.
func storable(name string) bool {
	switch name {
	case "Accept", "Accept-Language", "If-Match", "Prefer", "User-Agent":
		return true
	}
	return strings.HasPrefix(name, "Content-") && name != "Content-Length" ||
		strings.HasSuffix(name, "-Version") // the provider's API version
}

// ofTheCall headers belong to one call and not to the operation.
func ofTheCall(name string) bool {
	switch name {
	case "Baggage", "Content-Length", "Traceparent", "Tracestate", "X-Request-Id":
		return true
	}
	return false
}

// lacks names a header that a stored request had and the attempt has not: it
// may say whose money it is, so without it the request is another one.
func (a *attempt) lacks() error {
	re := a.o.resumption()
	if re == nil || a.o.isHop {
		return nil
	}
	for _, name := range re.left {
		if len(a.req.Header[name]) == 0 {
			return invalid("Transport.Prepare", "must bring the header %s: the request had it, and it is not stored", name)
		}
	}
	return nil
}

// unsealRequest makes the stored request of an entry again.
func (t *Transport) unsealRequest(ctx context.Context, e *journal.Entry, re *resumption) (*http.Request, error) {
	var s sealedRequest
	if err := t.unseal("request", e.Operation, e.Request, &s); err != nil {
		return nil, err
	}
	if s.Dialect != t.dialect.Name {
		return nil, nil // another provider's, as far as is known: its key may have another header, and Prepare brings other credentials
	}
	if _, err := url.Parse(s.URL); err != nil {
		return nil, journalErr(fmt.Errorf("the stored request of %v has no valid URL", e.Operation))
	}
	req, err := http.NewRequestWithContext(ctx, s.Method, s.URL, bytes.NewReader(s.Body))
	if err != nil {
		return nil, journalErr(fmt.Errorf("the stored request of %v cannot be made", e.Operation))
	}
	for name, values := range s.Header {
		req.Header[name] = values
	}
	req.Host = s.Host
	re.left, re.sealed = s.Left, true
	return req, nil
}

// sealAnswer stores the answer of an operation that is done, where it was read
// to its end.
func (o *operation) sealAnswer(resp *http.Response, state journal.State) ([]byte, error) {
	if o.t.Seal == nil || resp == nil || state != journal.Done || !o.now.whole || resp.StatusCode/100 == 4 {
		return nil, nil
	}
	h := resp.Header.Clone()
	h.Del("Set-Cookie")
	h.Del("Set-Cookie2")
	return o.t.seal("answer", o.record().operation(o), sealedAnswer{resp.StatusCode, h, o.now.doc.text})
}

// unsealAnswer makes the stored answer the one of this call.
func (o *operation) unsealAnswer(e journal.Entry) error {
	var s sealedAnswer
	if err := o.t.unseal("answer", e.Operation, e.Answer, &s); err != nil {
		return err
	}
	if s.Header == nil {
		s.Header = make(http.Header)
	}
	name, value := o.t.dialect.replayHeader()
	s.Header.Set(name, value)
	o.report.Replayed = true
	a := &o.first
	a.o, a.Context, a.whole = o, o.Context, true
	a.doc.text = s.Body
	o.now = a
	o.resp = &http.Response{
		Status: fmt.Sprintf("%d %s", s.Status, http.StatusText(s.Status)), StatusCode: s.Status,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: s.Header, ContentLength: int64(len(s.Body)),
	}
	return nil
}

// replayHeader is the header with which the provider marks a stored answer.
func (d *Dialect) replayHeader() (name, value string) {
	for _, m := range d.Replay {
		if m.Header != "" && m.Value != "" {
			return m.Header, m.Value
		}
	}
	return "Idempotent-Replayed", "true"
}
