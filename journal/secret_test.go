package journal_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

func TestSecretsAreFreshAndTellNothing(t *testing.T) {
	a, err := journal.NewSecret()
	require.NoError(t, err)
	b, err := journal.NewSecret()
	require.NoError(t, err)
	require.NotEqual(t, a, b)
	require.NotEqual(t, journal.Secret{}, a)
	require.Equal(t, a.Check(), a.Check())
	require.NotEqual(t, a.Check(), b.Check())
	require.NotContains(t, string(a.Check()), string(a[:8]))
}

// printed is an operation that is logged with all that it has.
type printed struct {
	Name   string
	Secret journal.Secret
}

func TestASecretDoesNotPrintItself(t *testing.T) {
	var s journal.Secret
	for i := range s {
		s[i] = 0xa7
	}
	shows := func(text string) bool {
		for _, b := range []string{"\xa7", "\u00a7", "a7", "167", "247", "10100111"} { // as bytes, characters and numbers
			if strings.Contains(strings.ToLower(text), b) {
				return true
			}
		}
		return false
	}
	hidden := func(text, how string) {
		t.Helper()
		require.Contains(t, text, "(secret)", how)
		require.False(t, shows(text), "%s: %s", how, text)
	}
	values := map[string]any{
		"value": s, "pointer": &s, "struct": printed{"pay", s}, "slice": []journal.Secret{s}, "array": [1]journal.Secret{s},
		"map": map[string]journal.Secret{"of": s}, "key": map[journal.Secret]int{s: 1}, "any": []any{s}, "rules": journal.Rules{Secret: s},
	}
	require.True(t, shows(fmt.Sprintf("%v", [32]byte(s))) && shows(fmt.Sprintf("%x", s[:])) && shows(fmt.Sprintf("%q", s[:])), "the test sees a secret")

	for name, v := range values {
		for verb := 'A'; verb <= 'z'; verb++ {
			if strings.ContainsRune("[\\]^_`pTw", verb) {
				continue // no verbs, and those for which fmt asks nobody: go vet refuses %p and %w of a Secret, %T is its type
			}
			for _, flags := range []string{"", "+", "#", "-", " ", "0", "20", ".3", "+#- 020.3"} {
				format := "%" + flags + string(verb)
				hidden(fmt.Sprintf(format, v), name+" "+format)
			}
		}
		hidden(fmt.Sprint(v), name)
		hidden(fmt.Sprintln(v), name)
		hidden(fmt.Errorf("begin: %v", v).Error(), name)

		inJSON, err := json.Marshal(map[string]any{"v": v})
		require.NoError(t, err)
		hidden(string(inJSON), name+" in JSON")
		for how, handler := range map[string]func(w io.Writer) slog.Handler{
			"text": func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, nil) },
			"JSON": func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, nil) },
		} {
			var line bytes.Buffer
			slog.New(handler(&line)).Info("opened", "v", v, slog.Group("store", "v", v))
			text := line.String()
			_, text, _ = strings.Cut(text, "opened") // the time may hold any number
			hidden(text, name+" in slog's "+how)
		}
	}
}

func TestDigestsNeedTheSecret(t *testing.T) {
	in := payment("1")
	a, b := journal.Secret{1}, journal.Secret{2}
	require.Len(t, a.Fingerprint(in.Shape, nil), 32)
	require.Len(t, a.Fingerprint(in.Shape, in.Content), 64)
	fa, fb := a.Fingerprint(in.Shape, in.Content), b.Fingerprint(in.Shape, in.Content)
	require.NotEqual(t, fa[:32], fb[:32])
	require.NotEqual(t, fa[32:], fb[32:])
	require.NotEqual(t, fa[:32], fa[32:])

	e := pendingEntry(t)
	require.True(t, a.Genuine(&e, a.MAC(&e)))
	require.False(t, b.Genuine(&e, a.MAC(&e)))
	require.False(t, a.Genuine(&e, nil))
	require.False(t, a.Genuine(&e, a.MAC(&e)[:31]))
	require.False(t, a.Genuine(&e, a.Check()))
	require.False(t, a.Genuine(&e, fa[:32]))
}

// A digest that changed would make every stored entry another request, and
// every row damaged. The values were computed without this package, from what
// its comments say.
func TestDigestsStayAsTheyAreStored(t *testing.T) {
	s := journal.Secret(sha256.Sum256([]byte("a secret of a store")))
	e := pendingEntry(t, done)
	e.Fingerprint, e.Attempts, e.Resumes, e.Status, e.Reference = []byte{1, 2}, 2, 1, 201, "pi_1"
	e.Decision, e.Reason, e.Request, e.Answer = "executed", "seen", []byte("request"), []byte("answer")
	enlisted := e
	enlisted.Enlisted = true
	in := payment("1")
	for name, c := range map[string]struct {
		want string
		got  []byte
	}{
		"check": {"3dfec5656d926ea01265aefa0ed61ffa25384c19d7351d69baaad93871f48d4d", s.Check()},
		"fingerprint": {"c09c8900610ec0f86ce22e8d7f8bc7e8d377ad8e2a218a5a9ff4d023855a7af1" +
			"1b5bda1340dd3ca48e2b06883d1ec4a40307a8ae4289e4e7c5b710d66d5637dd", s.Fingerprint(in.Shape, in.Content)},
		"mac":          {"85c09d4f117d443c1129f5ff079d181fb43aeb81827b624033c10c7d856e6aff", s.MAC(&e)},
		"mac enlisted": {"2ac1196f36067850ab72921acc47c342071795e9e2b26b9bf6470475eef35070", s.MAC(&enlisted)},
	} {
		require.Equal(t, c.want, hex.EncodeToString(c.got), name)
	}
}

// FuzzFingerprint: two requests have the same digest exactly if they are the
// same, and Begin tells them apart by what is known of both.
func FuzzFingerprint(f *testing.F) {
	f.Add([]byte("POST /v1/payments"), []byte("a"), true, []byte("POST /v1/payments"), []byte("b"), true)
	f.Add([]byte("POST /v1/payments"), []byte("a"), true, []byte("POST /v1/payments"), []byte{}, false)
	f.Add([]byte("a"), []byte(""), true, []byte("a"), []byte(""), false)
	f.Add([]byte("a"), []byte("bc"), true, []byte("ab"), []byte("c"), true)
	f.Fuzz(func(t *testing.T, shape1, content1 []byte, known1 bool, shape2, content2 []byte, known2 bool) {
		intent := func(shape, content []byte, known bool) journal.Intent {
			in := payment("1")
			in.Shape, in.Content = sha256.Sum256(shape), nil
			if known {
				in.Content = append([]byte{}, content...)
			}
			return in
		}
		a, b := intent(shape1, content1, known1), intent(shape2, content2, known2)
		fa, fb := rules.Secret.Fingerprint(a.Shape, a.Content), rules.Secret.Fingerprint(b.Shape, b.Content)
		equal := a.Shape == b.Shape && known1 == known2 && bytes.Equal(a.Content, b.Content)
		if bytes.Equal(fa, fb) != equal {
			t.Fatalf("digests equal: %v, requests equal: %v", !equal, equal)
		}
		if bytes.Equal(fa[:32], fb[:32]) != (a.Shape == b.Shape) {
			t.Fatal("the part for the shape is not that of the shape alone")
		}
		old, _, _, err := rules.Begin(nil, a, noon)
		if err != nil || !bytes.Equal(old.Fingerprint, fa) {
			t.Fatalf("stored %x, want %x: %v", old.Fingerprint, fa, err)
		}
		same := a.Shape == b.Shape && (!known1 || !known2 || bytes.Equal(a.Content, b.Content))
		stored, _, _, err := rules.Begin(&old, b, noon.Add(time.Hour))
		if same != (err == nil) || !same && err != journal.ErrMismatch {
			t.Fatalf("the same: %v, but %v", same, err)
		}
		if same && len(stored.Fingerprint) != max(len(fa), len(fb)) {
			t.Fatalf("%d bytes are kept of %d and %d", len(stored.Fingerprint), len(fa), len(fb))
		}
	})
}

// FuzzMAC: whatever field of an entry changes, the MAC does too. A field that
// is added to Entry and forgotten in MAC fails here.
func FuzzMAC(f *testing.F) {
	f.Add("acct_1", "pay", "1", "key-1", "pi_1", "executed", "seen", []byte{1, 2}, []byte("request"), []byte("answer"), int64(1), int64(1772366400123456), uint8(0), true)
	f.Add("", "", "", "", "", "", "", []byte{}, []byte{}, []byte{}, int64(0), int64(0), uint8(255), false)
	f.Add("a", "b", "", "ab", "", "c", "", []byte("c"), []byte("ab"), []byte("c"), int64(-1), int64(-1), uint8(7), false)
	f.Fuzz(func(t *testing.T, scope, name, id, key, reference, decision, reason string, print, request, answer []byte, number, micro int64, at uint8, clear bool) {
		e := journal.Entry{
			Operation:  journal.Operation{Scope: scope, Name: name, ID: id},
			Generation: int(number), Key: key, Fingerprint: print, State: journal.State(at % 3),
			Created: journal.FromMicro(micro), Window: time.Duration(number), FirstSend: journal.FromMicro(number), Clear: clear, Enlisted: at%2 == 1,
			Attempts: int(at), Resumes: int(number), Owner: reason, Lease: journal.FromMicro(micro), Fence: number,
			Finished: journal.FromMicro(number), Status: int(at), Reference: reference, Decision: decision, Reason: reason,
			Expires: journal.FromMicro(micro), Request: request, Answer: answer,
		}
		mac := rules.Secret.MAC(&e)
		if !rules.Secret.Genuine(&e, mac) {
			t.Fatal("not genuine as it is")
		}
		var names []string
		var texts []reflect.Value
		changed := e
		eachField(reflect.ValueOf(&changed).Elem(), "", func(name string, v reflect.Value) {
			if v.Kind() == reflect.String || v.Kind() == reflect.Slice {
				names, texts = append(names, name), append(texts, v)
			}
			before := reflect.ValueOf(v.Interface())
			for _, to := range others(t, name, v, at) {
				v.Set(to)
				if stored := name != "Differs"; rules.Secret.Genuine(&changed, mac) == stored {
					t.Errorf("%s: %#v changed to %#v; stored: %v", name, before, to, stored)
				}
			}
			v.Set(before)
		})
		if !rules.Secret.Genuine(&changed, mac) {
			t.Fatal("not put back")
		}
		// A byte that moves from one field to the next.
		for i := 1; i < len(texts); i++ {
			a, b := texts[i-1], texts[i]
			was, is := text(a), text(b)
			if was == "" {
				continue
			}
			setText(a, was[:len(was)-1])
			setText(b, was[len(was)-1:]+is)
			if rules.Secret.Genuine(&changed, mac) {
				t.Errorf("a byte moved from %s to %s", names[i-1], names[i])
			}
			setText(a, was)
			setText(b, is)
		}
	})
}

// eachField calls f with each field of v, those of embedded structs too.
func eachField(v reflect.Value, prefix string, f func(name string, v reflect.Value)) {
	for i := range v.NumField() {
		field := v.Type().Field(i)
		if field.Anonymous {
			eachField(v.Field(i), prefix+field.Name+".", f)
			continue
		}
		f(prefix+field.Name, v.Field(i))
	}
}

// others are values that v does not have, as near to its own as may be.
func others(t *testing.T, name string, v reflect.Value, at uint8) []reflect.Value {
	t.Helper()
	var all []reflect.Value
	add := func(x any) { all = append(all, reflect.ValueOf(x).Convert(v.Type())) }
	if moment, ok := v.Interface().(time.Time); ok {
		for _, d := range [...]time.Duration{time.Microsecond, -time.Microsecond, time.Duration(1+int64(at)) * time.Hour} {
			if journal.Micro(moment.Add(d)) != journal.Micro(moment) { // 1970 itself is no time
				add(moment.Add(d))
			}
		}
		return all
	}
	switch v.Kind() {
	case reflect.Bool:
		add(!v.Bool())
	case reflect.Int, reflect.Int64:
		add(v.Int() + 1)
		add(v.Int() ^ 1<<(at%63))
	case reflect.String, reflect.Slice:
		s := text(v)
		add(s + "\x00")
		add("\x00" + s)
		if s != "" {
			flipped := []byte(s)
			flipped[int(at)%len(s)] ^= 1 << (at % 8)
			add(string(flipped))
			add(s[:len(s)-1])
			add("")
		}
	default:
		t.Fatalf("%s is of a kind that this test does not change yet: %v", name, v.Type())
	}
	return all
}

func text(v reflect.Value) string {
	if v.Kind() == reflect.String {
		return v.String()
	}
	return string(v.Bytes())
}

func setText(v reflect.Value, s string) { v.Set(reflect.ValueOf(s).Convert(v.Type())) }

// FuzzMicro: what a store keeps of a time comes back, and is that time without
// what is below a microsecond.
func FuzzMicro(f *testing.F) {
	for _, n := range []int64{0, 1, -1, 999, 1772366400123456, -62135596800000000, -62135596800000001, 1<<63 - 1, -1 << 63} {
		f.Add(n, n, int64(123456789))
	}
	f.Fuzz(func(t *testing.T, micro, seconds, nanos int64) {
		at := journal.FromMicro(micro)
		if at.IsZero() != (micro == 0 || micro == -62135596800000000) {
			t.Fatalf("%d is %v", micro, at)
		}
		if got := journal.Micro(at); got != micro && !at.IsZero() {
			t.Fatalf("%d came back as %d", micro, got)
		}
		const most = 9_000_000_000_000 // seconds whose microseconds fit
		at = time.Unix(seconds%most, nanos%1_000_000_000)
		want := at.Truncate(time.Microsecond)
		if want.Unix() == 0 && want.Nanosecond() == 0 {
			want = time.Time{} // 1970 itself is no time
		}
		if got := journal.FromMicro(journal.Micro(at)); !got.Equal(want) {
			t.Fatalf("%v came back as %v", at, got)
		}
		if got := journal.Micro(at.UTC()); got != journal.Micro(at) {
			t.Fatalf("%v depends on the zone", at)
		}
	})
}

func TestTheZeroTimeIsKeptAsZero(t *testing.T) {
	require.Zero(t, journal.Micro(time.Time{}))
	require.True(t, journal.FromMicro(0).IsZero())
	require.EqualValues(t, 1, journal.Micro(time.UnixMicro(1)))
}
