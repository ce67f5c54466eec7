package idem

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
)

// Operation names what the user wants done once. ID is the name of the thing
// about to be done, written down before the call (the refund row, the
// payment attempt "order-77/2"), never of what it is about (the order): the
// key that is derived from it never changes.
type Operation struct {
	// Name of the kind of operation, such as "refund". Required; at most 255
	// bytes, no control characters.
	Name string
	// ID of this one. Required; at most 255 bytes, no control characters.
	ID string
	// Started is when the operation was written down (the row's created_at).
	// It enforces the key window across calls and processes. Zero: not
	// known; a Journal then knows best. More than a minute in the future is ErrInvalid.
	Started time.Time
}

// String is "name/id"; "" for an operation without a name.
func (op Operation) String() string {
	if op.Name == "" && op.ID == "" {
		return ""
	}
	return op.Name + "/" + op.ID
}

const (
	maxOperation = 255
	clockSkew    = time.Minute
)

func (op Operation) check(now time.Time) error {
	for _, f := range [...]struct{ name, value string }{{"Operation.Name", op.Name}, {"Operation.ID", op.ID}} {
		switch {
		case f.value == "":
			return invalid(f.name, "is empty; the least is 1 byte")
		case len(f.value) > maxOperation:
			return invalid(f.name, "has %d bytes; the most is %d", len(f.value), maxOperation)
		case strings.ContainsFunc(f.value, func(r rune) bool { return r < ' ' || r == 0x7f }):
			return invalid(f.name, "has a control character; none is allowed")
		}
	}
	if op.Started.After(now.Add(clockSkew)) {
		return invalid("Operation.Started", "is %v in the future; the most is %v", op.Started.Sub(now).Round(time.Second), clockSkew)
	}
	return nil
}

// WithOperation returns a context under which a request carries the key of
// op: a UUIDv5 derived from scope, name and id, the same in every call and
// every process. (With [Transport.Journal] it is the key that the journal has:
// the derived one at first, a fresh one after a refusal.) It wins over a key header on the request, because vendor
// SDKs mint one per call.
//
// The first keyed request binds the context to its method, URL and body;
// another request under it, redirect hops excepted, is ErrKeyReused before
// anything is sent. An operation that lacks a name or an id, or has a Started
// in the future, is ErrInvalid at the request.
func WithOperation(ctx context.Context, op Operation) context.Context {
	return context.WithValue(withKeys(ctx), operationCell{}, &cell{op: op})
}

// WithKey returns a context under which a request carries key, as made by
// [NewKey] or [DeriveKey] or kept from an earlier [Error]. Like
// [WithOperation] it binds the context to the first keyed request. A key
// that the dialect cannot carry is ErrKeyInvalid at the request.
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(withKeys(ctx), keyCell{}, &cell{key: key})
}

// WithoutKey returns a context under which requests carry no key, whatever
// the header says, so that a POST is repeated only when it is proved that
// nothing reached the server. A WithOperation or WithKey further in switches
// keys on again.
func WithoutKey(ctx context.Context) context.Context {
	return context.WithValue(ctx, noKey{}, true)
}

// withKeys is ctx with keys on.
func withKeys(ctx context.Context) context.Context {
	if keyless(ctx) {
		return context.WithValue(ctx, noKey{}, false)
	}
	return ctx
}

// keyless reports whether WithoutKey switched keys off.
func keyless(ctx context.Context) bool {
	off, _ := ctx.Value(noKey{}).(bool)
	return off
}

type (
	operationCell struct{}
	keyCell       struct{}
	noKey         struct{}
)

// cell binds a context that names a key to the first request under it.
type cell struct {
	op  Operation
	key string

	mu        sync.Mutex // guards what follows
	bound     *fingerprint
	firstSend time.Time
	reached   int // attempts that may have reached the server
	running   int // attempts on their way
}

// bind binds the cell to f, or says which request it is bound to.
func (c *cell) bind(f *fingerprint) (other *fingerprint) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bound == nil {
		c.bound = f
	}
	if !c.bound.same(f) {
		return c.bound
	}
	return nil
}

// sent notes the first send under the cell and returns it.
func (c *cell) sent(now time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.firstSend.IsZero() {
		c.firstSend = now
	}
	return c.firstSend
}

// start notes an attempt that may reach the server; arrive, whether it may
// have. One that panics stays on its way.
func (c *cell) start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running++
}

func (c *cell) arrive(reached bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running--
	if reached {
		c.reached++
	}
}

// mayBeSent reports whether other attempts than own may reach the server or
// have reached it.
func (c *cell) mayBeSent(own []Attempt) bool {
	mine := 0
	for i := range own {
		if own[i].evidence != neverSent {
			mine++
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reached > mine || c.running > 0
}

func (c *cell) first() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.firstSend
}

// NewKey returns a fresh key: a UUIDv4 (RFC 9562, section 5.4), 122 random
// bits. The error is that of the system's random source.
func NewKey() (string, error) {
	var u uuid.UUID
	if err := randomUUID(&u); err != nil {
		return "", err
	}
	return u.String(), nil
}

// randomUUID is uuid.NewRandom into memory that is there already, which saves
// the success path an allocation.
func randomUUID(u *uuid.UUID) error {
	if _, err := io.ReadFull(rand.Reader, u[:]); err != nil {
		return fmt.Errorf("%w: the random source failed: %w", ErrKeyInvalid, err)
	}
	u[6] = u[6]&0x0f | 0x40 // version 4
	u[8] = u[8]&0x3f | 0x80 // variant of RFC 9562
	return nil
}

// keySpace is the namespace of derived keys. It must never change: stored
// operations would get other keys. A golden test pins it.
var keySpace = uuid.MustParse("7c0e4f8a-1d52-4c3b-9a86-5b1f0d6e2a47")

// DeriveKey returns the key that follows from parts: a UUIDv5 (RFC 9562,
// section 5.5) over the parts, each with its length, so that ("ab", "c") and
// ("a", "bc") differ. Equal parts give equal keys in every process and
// version. Parts must not hold what changes between attempts. No part, or
// only empty ones, is ErrKeyInvalid.
func DeriveKey(parts ...string) (string, error) {
	u, err := derive(parts...)
	if err != nil {
		return "", err
	}
	return u.String(), nil
}

func derive(parts ...string) (uuid.UUID, error) {
	if strings.Join(parts, "") == "" {
		return uuid.UUID{}, keyInvalid("DeriveKey", "got %d parts and no text; the least is one part that is not empty", len(parts))
	}
	var data []byte
	for _, p := range parts {
		data = binary.BigEndian.AppendUint64(data, uint64(len(p)))
		data = append(data, p...)
	}
	return uuid.NewSHA1(keySpace, data), nil
}

// written is u in the longest customary form that fits, always with all of
// its bits.
func written(u uuid.UUID, most int) string {
	switch {
	case most >= 36:
		return u.String()
	case most >= 32:
		return hex.EncodeToString(u[:])
	}
	return base64.RawURLEncoding.EncodeToString(u[:])
}

// checkKey says why a key cannot be sent; from names its place.
func checkKey(key, from string, d *Dialect) error {
	switch {
	case strings.Trim(key, " \t") == "":
		return keyInvalid(from, "is empty or blank; the least is 1 visible character")
	case len(key) > d.MaxKey:
		return keyInvalid(from, "has %d bytes; the most is %d", len(key), d.MaxKey)
	case key[0] == ' ' || key[len(key)-1] == ' ':
		return keyInvalid(from, "begins or ends with a space, which servers cut off")
	}
	for i := 0; i < len(key); i++ {
		if key[i] < ' ' || key[i] > '~' {
			return keyInvalid(from, "has byte 0x%02x at %d; only visible ASCII and spaces are allowed", key[i], i)
		}
	}
	return nil
}

// headerKey finds the key that a request brought, in any spelling of the
// header's name. An empty list of values is no key.
func headerKey(h http.Header, d *Dialect) (key string, ok bool, err error) {
	n := 0
	for name, values := range h {
		if len(name) == len(d.Header) && strings.EqualFold(name, d.Header) {
			for _, v := range values {
				key = v
				n++
			}
		}
	}
	switch {
	case n == 0:
		return "", false, nil
	case n > 1:
		return "", true, keyInvalid("header "+d.Header, "has %d values; the most is 1", n)
	}
	if d.Quoted && strings.HasPrefix(strings.TrimSpace(key), `"`) {
		key, err = unquote(strings.TrimSpace(key))
		if err != nil {
			return "", true, err
		}
	}
	return key, true, checkKey(key, "header "+d.Header, d)
}

// quote writes a checked key as a structured-field string (RFC 9651, section
// 4.1.6).
func quote(key string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
}

// unquote reads a structured-field string (RFC 9651, section 4.2.5).
func unquote(s string) (string, error) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' && i == len(s)-1:
			return b.String(), nil
		case c == '"':
			return "", keyInvalid("header value", "goes on after the closing quote at %d", i)
		case c == '\\' && i+1 < len(s) && (s[i+1] == '"' || s[i+1] == '\\'):
			i++
			b.WriteByte(s[i])
		case c == '\\':
			return "", keyInvalid("header value", `has \ at %d before something else than " or \`, i)
		default:
			b.WriteByte(c)
		}
	}
	return "", keyInvalid("header value", "has no closing quote")
}

// fingerprint is what was asked: two requests with one key must have the
// same.
type fingerprint struct {
	method string
	url    string
	scope  string
	length int64
	digest [sha256.Size]byte
	whole  bool // digest is set; otherwise only length speaks for the body
	shown  string
}

func fingerprintOf(ctx context.Context, req *http.Request, scope string, b *body) (*fingerprint, error) {
	f := &fingerprint{method: method(req), url: urlOf(req.URL), scope: scope}
	var err error
	f.digest, f.length, f.whole, err = b.digest(ctx)
	if err != nil {
		return nil, err
	}
	f.shown = fmt.Sprintf("%s %s (%d bytes)", f.method, shownURL(req.URL), f.length)
	return f, nil
}

func (f *fingerprint) same(g *fingerprint) bool {
	if f.method != g.method || f.url != g.url || f.scope != g.scope || f.length != g.length {
		return false
	}
	return f.digest == g.digest || !f.whole || !g.whole
}

// reused says which two requests met under one key.
func reused(first, second *fingerprint) error {
	difference := ""
	switch {
	case first.shown != second.shown:
	case first.scope != second.scope:
		difference = ", in another scope"
	case first.url != second.url:
		difference = ", with another query"
	default:
		difference = ", with other content"
	}
	return fmt.Errorf("%w: it belongs to %s and was met again with %s%s", ErrKeyReused, first.shown, second.shown, difference)
}

// urlOf is the whole URL but for user info and fragment.
func urlOf(u *url.URL) string {
	c := *u
	c.User, c.Fragment, c.RawFragment = nil, "", ""
	return c.String()
}

// shownURL may be shown to people: no user info, no query.
func shownURL(u *url.URL) string {
	c := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}
	return c.String()
}

func method(req *http.Request) string {
	if req.Method == "" {
		return http.MethodGet
	}
	return req.Method
}

// gates let one request at a time through for a key, in this Transport.
type gates struct {
	mu   sync.Mutex // guards open
	open map[gateKey]*gate
}

type gateKey struct{ scope, key string }

type gate struct {
	request *fingerprint
	users   int           // holder and those who wait
	turn    chan struct{} // holds one value while nobody is inside
}

// enter waits for the turn of key, under ctx. Another request with the key
// while one is in flight is ErrKeyReused at once.
func (g *gates) enter(ctx context.Context, k gateKey, f *fingerprint) error {
	g.mu.Lock()
	held := g.open[k]
	if held == nil {
		held = &gate{request: f, turn: make(chan struct{}, 1)}
		held.turn <- struct{}{}
		if g.open == nil {
			g.open = make(map[gateKey]*gate)
		}
		g.open[k] = held
	} else if !held.request.same(f) {
		first := held.request
		g.mu.Unlock()
		return reused(first, f)
	}
	held.users++
	g.mu.Unlock()
	select {
	case <-held.turn:
		return nil
	case <-ctx.Done():
		g.forget(k, held)
		return context.Cause(ctx)
	}
}

// leave hands the turn on.
func (g *gates) leave(k gateKey) {
	g.mu.Lock()
	held := g.open[k]
	g.mu.Unlock()
	held.turn <- struct{}{}
	g.forget(k, held)
}

func (g *gates) forget(k gateKey, held *gate) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if held.users--; held.users == 0 {
		delete(g.open, k)
	}
}
