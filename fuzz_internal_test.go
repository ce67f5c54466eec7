package idem

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// FuzzRetryAfter: no wait is negative, nothing but digits and dates is
// understood, and a second line never makes the wait shorter.
func FuzzRetryAfter(f *testing.F) {
	for _, s := range []string{
		"0", "2", " 2 ", "-5", "1.5", "2s", "abc", "", "2, 5", "9223372036", "9223372037", "99999999999999999999", "\u0665",
		"Sun, 01 Mar 2026 10:00:30 GMT", "Sunday, 01-Mar-26 10:00:30 GMT", "Sun Mar  1 10:00:30 2026", "Fri, 31 Dec 9999 23:59:59 GMT",
	} {
		f.Add(s, "", "", "")
		f.Add(s, "7", "Sun, 01 Mar 2026 10:00:00 GMT", "10")
		f.Add(s, s, s, s)
	}
	now := time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, line, second, date, age string) {
		h := http.Header{"Date": {date}, "Age": {age}}
		wait, ok := retryAfter(h, now)
		if ok || wait != 0 {
			t.Fatalf("no header: %v, %v", wait, ok)
		}
		h["Retry-After"] = []string{line}
		wait, ok = retryAfter(h, now)
		if wait < 0 || !ok && wait != 0 {
			t.Fatalf("%q: %v, %v", line, wait, ok)
		}
		trimmed := strings.Trim(line, " \t")
		if onlyDigits(trimmed) {
			if !ok || trimmed != strings.Repeat("0", len(trimmed)) && wait < time.Second {
				t.Fatalf("%q: %v, %v", line, wait, ok)
			}
		} else if _, err := http.ParseTime(trimmed); (err == nil) != ok {
			t.Fatalf("%q: %v, and as a date: %v", line, ok, err)
		}
		h["Retry-After"] = []string{line, second}
		both, okBoth := retryAfter(h, now)
		if ok && !okBoth || both < wait {
			t.Fatalf("%q and %q: %v is shorter than %v", line, second, both, wait)
		}
		h["Retry-After"] = []string{second, line}
		if other, okOther := retryAfter(h, now); other != both || okOther != okBoth {
			t.Fatalf("%q and %q: the order matters: %v, %v", line, second, other, both)
		}

		// Whatever was asked, the wait is that or more, up to all of time.
		for _, sample := range []time.Duration{0, time.Second, math.MaxInt64} {
			r := &result{asked: ok, retryAfter: wait}
			d, _ := waitAfter(r, ruling{}, &Policy{BackoffBase: time.Millisecond, ThrottleBase: time.Second}, sample, 0.5)
			if d < 0 || ok && (d < wait || d < time.Millisecond) {
				t.Fatalf("asked for %v, waits %v", wait, d)
			}
		}
	})
}

func onlyDigits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}

// FuzzKeyHeader: a key that is accepted can be sent, fits, and is what the
// caller wrote; one that is not is ErrKeyInvalid.
func FuzzKeyHeader(f *testing.F) {
	for _, s := range []string{
		"", " ", "order-77", `"order-77"`, ` "order-77" `, `"a\"b\\c"`, `"a\nb"`, `"open`, `"a"b`, `"`, `""`, `"\`, `"a\`, "a\nb", "a\x00", "\u00fc",
		`"` + strings.Repeat("a", 255) + `"`, strings.Repeat("a", 256), `"a";p=1`, "a b", " a", "a ", "a\t", `"a" `,
	} {
		for _, quoted := range []bool{false, true} {
			f.Add(s, quoted, "Idempotency-Key", uint8(255))
			f.Add(s, quoted, "idempotency-KEY", uint8(22))
		}
	}
	f.Fuzz(func(t *testing.T, value string, quoted bool, name string, most uint8) {
		d := &Dialect{Header: "Idempotency-Key", Quoted: quoted, MaxKey: max(int(most), leastMaxKey)}
		key, ok, err := headerKey(http.Header{name: {value}}, d)
		if ok != strings.EqualFold(name, d.Header) || !ok && (err != nil || key != "") {
			t.Fatalf("header %q: %q, %v, %v", name, key, ok, err)
		}
		if !ok {
			return
		}
		if err != nil {
			if !errors.Is(err, ErrKeyInvalid) {
				t.Fatalf("%q: %v", value, err)
			}
			return
		}
		if key == "" || len(key) > d.MaxKey || strings.Trim(key, " ") != key {
			t.Fatalf("%q: accepted as %q", value, key)
		}
		for _, c := range []byte(key) {
			if c < ' ' || c > '~' {
				t.Fatalf("%q: accepted with byte %#x", value, c)
			}
		}
		if !quoted && key != value {
			t.Fatalf("%q: became %q", value, key)
		}
		if given := strings.TrimSpace(value); quoted && given != key && given != quote(key) {
			t.Fatalf("%q: became %q, though a string has one spelling", value, key)
		}
		if back, err := unquote(quote(key)); err != nil || back != key {
			t.Fatalf("%q: quoted and back: %q, %v", key, back, err)
		}
		// What goes out on the wire is read as the same key.
		wire := key
		if quoted {
			wire = quote(key)
		}
		if again, ok, err := headerKey(http.Header{d.Header: {wire}}, d); again != key || !ok || err != nil {
			t.Fatalf("%q: on the wire %q: read as %q, %v, %v", key, wire, again, ok, err)
		}
		if _, _, err := headerKey(http.Header{d.Header: {value, value}}, d); !errors.Is(err, ErrKeyInvalid) {
			t.Fatalf("two values: %v", err)
		}
	})
}

// FuzzDeriveKey: equal parts give equal keys, others give others, wherever
// the text is cut.
func FuzzDeriveKey(f *testing.F) {
	f.Add("", "charge", "order-77", 3)
	f.Add("ab", "c", "", 0)
	f.Add("a", "bc", "", 1)
	f.Add("", "", "", 0)
	f.Add("\x00\x00\x00\x00\x00\x00\x00\x01a", "a", "\xff", 5)
	f.Fuzz(func(t *testing.T, a, b, c string, cut int) {
		key, err := DeriveKey(a, b, c)
		if a+b+c == "" {
			if !errors.Is(err, ErrKeyInvalid) || key != "" {
				t.Fatalf("no text: %q, %v", key, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if u, err := uuid.Parse(key); err != nil || u.Version() != 5 || u.Variant() != uuid.RFC4122 || u.String() != key {
			t.Fatalf("%q is no UUIDv5: %v", key, err)
		}
		if err := checkKey(key, "DeriveKey", &Dialect{MaxKey: defaultMaxKey}); err != nil {
			t.Fatal(err)
		}
		if again, _ := DeriveKey(strings.Clone(a), strings.Clone(b), strings.Clone(c)); again != key {
			t.Fatalf("not repeatable: %q, %q", key, again)
		}
		all := a + b + c
		cut = min(max(cut, 0), len(all))
		for _, parts := range [][]string{
			{all}, {a, b + c}, {a + b, c}, {a, b, c, ""}, {"", a, b, c}, {all[:cut], all[cut:], ""}, {all[:cut], "", all[cut:]}, {c, b, a},
			{a + "\x00\x00\x00\x00\x00\x00\x00\x00" + b, c}, {a + "\x00" + b, c},
		} {
			other, err := DeriveKey(parts...)
			if err != nil {
				t.Fatal(err)
			}
			same := len(parts) == 3 && parts[0] == a && parts[1] == b && parts[2] == c
			if (other == key) != same {
				t.Fatalf("%q gives %q; %q gives %q", [3]string{a, b, c}, key, parts, other)
			}
		}
		for _, most := range []int{22, 31, 32, 35, 36, 255} {
			if s := written(uuid.MustParse(key), most); len(s) > most || len(s) < leastMaxKey {
				t.Fatalf("written in %d: %q", most, s)
			}
		}
	})
}

// FuzzProblemBody: whatever a body holds, it is read without a panic, says
// the same each time, and nothing is recognised in what is not JSON.
func FuzzProblemBody(f *testing.F) {
	for _, body := range []string{
		``, `{}`, `null`, `[]`, `"x"`, `7`, `{"type":"https://x.test/idempotency-key-reused"}`, `{"error":{"code":"key_in_use"}}`,
		`{"errors":[{"code":"idempotency"}]}`, `{"errors":[]}`, `{"id":4012345678}`, `{"id":1e400}`, `{"id":-0}`, `{"code":"idempotency_error"`,
		`{"a/b":{"~":"x"}}`, strings.Repeat(`[`, 20000), "\xff\xfe", "\ufeff{}", `{"code":"` + strings.Repeat("-_ ", 99) + `"}`, `{} {}`,
	} {
		for _, pointer := range []string{"", "/", "/type", "/error/code", "/errors/0/code", "/errors/-1", "/errors/99999999999999999999", "/a~1b/~0", "code", "/id"} {
			f.Add([]byte(body), pointer, "idempoten", 422)
		}
	}
	f.Fuzz(func(t *testing.T, body []byte, pointer, word string, status int) {
		original := bytes.Clone(body)
		d := &document{text: body}
		value, ok := d.at(pointer)
		if again, okAgain := d.at(pointer); again != value || okAgain != ok {
			t.Fatalf("%q: %q, then %q", pointer, value, again)
		}
		if ok && !beginsWithJSON(body) {
			t.Fatalf("%q found %q in what is not JSON: %q", pointer, value, body)
		}
		if ok && pointer != "" && pointer[0] != '/' {
			t.Fatalf("%q is no pointer", pointer)
		}
		resp := &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/problem+json"}}}
		own, err := Dialect{
			Header: "Key", Mismatch: []Mark{{Pointer: pointer, Contains: word}, {Pointer: pointer, Equals: word}},
			Refusal: []Mark{{Status: status, Pointer: pointer}}, Reference: []string{pointer},
		}.resolved()
		if err != nil {
			return
		}
		for _, listed := range []*Dialect{&Generic, &IETF, &Stripe, &NoKeys, &own} {
			dialect, err := listed.resolved()
			if err != nil {
				t.Fatal(err)
			}
			m := dialect.recognise(resp, &document{text: body})
			if again := dialect.recognise(resp, d); again != m {
				t.Fatalf("%s: %b, then %b", dialect.Name, m, again)
			}
			if m&markMismatch != 0 && !beginsWithJSON(body) {
				t.Fatalf("%s: a reused key in what is not JSON: %q", dialect.Name, body)
			}
			if !dialect.needsBody(status) && m != dialect.recognise(resp, nil) {
				t.Fatalf("%s: the body of a %d was said not to matter", dialect.Name, status)
			}
		}
		if pointer != "" && (own.recognise(resp, d)&markRefusal != 0) != ok {
			t.Fatalf("%q: mark and pointer disagree", pointer)
		}
		if ref := own.reference(d); ok && ref != value || !ok && ref != "" {
			t.Fatalf("%q: reference %q, value %q", pointer, ref, value)
		}
		if !bytes.Equal(body, original) {
			t.Fatal("the body was changed")
		}
	})
}

func beginsWithJSON(body []byte) bool {
	return json.NewDecoder(bytes.NewReader(body)).Decode(new(json.RawMessage)) == nil
}

// FuzzFullJitter: every wait lies in [0, cap], at any attempt.
func FuzzFullJitter(f *testing.F) {
	f.Add(int64(time.Millisecond), int64(time.Millisecond), uint8(0))
	f.Add(int64(50*time.Millisecond), int64(20*time.Second), uint8(40))
	f.Add(int64(time.Second), int64(math.MaxInt64), uint8(255))
	f.Add(int64(math.MaxInt64), int64(math.MaxInt64), uint8(3))
	f.Fuzz(func(t *testing.T, base, limit int64, n uint8) {
		p, err := Policy{BackoffBase: time.Duration(base), BackoffCap: time.Duration(limit)}.resolved(&Generic)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		b := p.Backoff()
		for i := range int(n) + 1 {
			if d := b.NextBackOff(); d < 0 || d > p.BackoffCap || i == 0 && d > p.BackoffBase {
				t.Fatalf("base %v, cap %v: wait %d is %v", p.BackoffBase, p.BackoffCap, i, d)
			}
		}
	})
}
