package idem_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
)

// hopsTo answers the path of each key with its status and Location, and every
// other path with 201.
type hopsTo map[string]struct {
	status   int
	location string
}

func (h hopsTo) serve(_ int, req *http.Request) (*http.Response, error) {
	if to, ok := h[req.URL.Path]; ok {
		return answer(req, to.status, http.Header{"Location": {to.location}}, ""), nil
	}
	return answer(req, http.StatusCreated, jsonType(), `{"id":"pay_1"}`), nil
}

// A POST that became a GET stays one, without body, key, and the headers that
// describe a body, however its chain goes on.
func TestC58_GETAfterAWriteHasNothingOfTheBody(t *testing.T) {
	for _, status := range []int{301, 302, 303} {
		for _, then := range []int{301, 302, 303, 307, 308} {
			t.Run(fmt.Sprintf("%d then %d", status, then), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					effects := 0
					p := newScriptedProvider(t, func(w http.ResponseWriter, r *http.Request) {
						switch r.URL.Path {
						case "/pay":
							effects++
							w.Header().Set("Location", "/s")
							w.WriteHeader(status)
						case "/s":
							w.Header().Set("Location", "/t")
							w.WriteHeader(then)
						default:
							says(200, `{"id":"pay_1"}`)(w, r)
						}
					})
					var report idem.Report
					client := &http.Client{Transport: p.through()}
					resp, err := client.Do(newPost(t, idem.WithReport(t.Context(), &report), p.url+"/pay", `{"amount":58}`))
					require.NoError(t, err)
					require.Equal(t, 1, effects)
					sends := p.sends()
					require.Len(t, sends, 3)
					require.Equal(t, []string{report.Key}, sends[0].keys)
					require.Equal(t, `{"amount":58}`, sends[0].body)
					for _, hop := range sends[1:] {
						require.Equal(t, http.MethodGet, hop.method)
						require.Empty(t, hop.body)
						require.Empty(t, hop.keys)
						for _, name := range []string{"Content-Length", "Content-Type", "Transfer-Encoding"} {
							require.Empty(t, hop.header.Values(name), name)
						}
					}
					require.Equal(t, []string{"/pay", "/s", "/t"}, []string{sends[0].path, sends[1].path, sends[2].path})
					require.JSONEq(t, `{"id":"pay_1"}`, readAll(t, resp), "the result is the final answer")
					require.Len(t, report.Attempts, 3)
					require.Equal(t, 3, report.Sends)
					if status == http.StatusSeeOther {
						require.Equal(t, idem.Executed, report.Outcome)
					} else {
						require.Equal(t, idem.Unknown, report.Outcome, "a %d says nothing of the effect", status)
					}
				})
			})
		}
	}
}

// Only a 307 or 308 straight from the write keeps it a write; then a 303 makes
// it a GET for good.
func TestC58_WriteStaysAWriteOnlyThrough307And308(t *testing.T) {
	for _, keep := range []int{307, 308} {
		t.Run(strconv.Itoa(keep), func(t *testing.T) {
			w := &wire{serve: hopsTo{
				"/v1/payments": {keep, "/a"},
				"/a":           {keep, "/b"},
				"/b":           {303, "/c"},
				"/c":           {keep, "/d"},
			}.serve}
			resp, err := (&http.Client{Transport: onWire(w)}).Do(newPost(t, t.Context(), wireURL, `{"amount":58}`))
			require.NoError(t, err)
			readAll(t, resp)
			sends := w.seen()
			require.Len(t, sends, 5)
			key := oneKey(t, sends[:3])
			for _, send := range sends[:3] {
				require.Equal(t, http.MethodPost, send.method)
				require.Equal(t, `{"amount":58}`, send.body)
			}
			for _, send := range sends[3:] {
				require.Equal(t, http.MethodGet, send.method)
				require.Empty(t, send.keys)
				require.Empty(t, send.body)
			}
			r := idem.ReportOf(resp)
			require.Equal(t, key, r.Key)
			require.Equal(t, idem.Executed, r.Outcome)
		})
	}
}

// leave is a Location and whether it is at another origin than from.
type leave struct {
	name, from, to string
	elsewhere      bool
}

func leaves() []leave {
	const home = "http://api.test/v1/payments"
	return []leave{
		{"same origin", home, "http://api.test/moved", false},
		{"same host, other port", home, "http://api.test:8443/moved", true},
		{"https to http", "https://api.test/v1/payments", "http://api.test/moved", true},
		{"http to https", home, "https://api.test/moved", true},
		{"sub-domain", home, "http://eu.api.test/moved", true},
		{"parent domain", home, "http://test/moved", true},
		{"user info in Location", home, "http://intruder:secret@api.test/moved", false},
		{"user info that looks like the host", home, "http://api.test@evil.test/moved", true},
		{"no scheme", home, "//evil.test/moved", true},
		{"backslash", home, `http://evil.test\@api.test/moved`, true},
	}
}

// ours is what must not be seen at another origin: key, body, and what Prepare
// signs with.
const (
	ourKey    = "order-58/1"
	ourBody   = `{"card":"4242","amount":58}`
	ourSecret = "signed-by-prepare"
)

func signing(tr *idem.Transport) {
	tr.Prepare = func(req *http.Request) error {
		req.Header.Set("X-Signature", ourSecret)
		req.AddCookie(&http.Cookie{Name: "signed", Value: ourSecret})
		return nil
	}
}

// requireNothingOfOurs requires that no send to another origin than home has
// the key, the body or the prepared credential.
func requireNothingOfOurs(t *testing.T, home string, sends []wireSend) {
	t.Helper()
	for _, send := range sends {
		u, err := url.Parse(send.url)
		require.NoError(t, err)
		if u.Scheme+"://"+u.Host == home {
			continue
		}
		text := fmt.Sprint(send.url, send.header, send.body)
		for _, ours := range []string{ourKey, ourBody, ourSecret} {
			require.NotContains(t, text, ours, "at %s", send.url)
		}
	}
}

func TestC58_NothingOfOursReachesAnotherOrigin(t *testing.T) {
	keys := map[string]func(*http.Request) *http.Request{
		"header":  func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", ourKey); return r },
		"context": func(r *http.Request) *http.Request { return r.WithContext(idem.WithKey(r.Context(), ourKey)) },
	}
	for _, status := range []int{301, 302, 303, 307, 308} {
		for _, l := range leaves() {
			for from, key := range keys {
				t.Run(fmt.Sprintf("%d, %s, key from %s", status, l.name, from), func(t *testing.T) {
					w := &wire{serve: hopsTo{"/v1/payments": {status, l.to}}.serve}
					client := &http.Client{Transport: onWire(w, signing)}
					req := key(newPost(t, t.Context(), l.from, ourBody))
					home := req.URL.Scheme + "://" + req.URL.Host
					resp, err := client.Do(req)
					if resp != nil {
						readAll(t, resp)
					}
					sends := w.seen()
					requireNothingOfOurs(t, home, sends)
					require.Equal(t, ourBody, sends[0].body)
					require.Equal(t, []string{ourKey}, sends[0].keys)
					writeGoesOn := status == 307 || status == 308
					switch {
					case writeGoesOn && l.elsewhere:
						require.Error(t, err)
						require.Len(t, sends, 1)
						if _, parses := url.Parse(l.to); parses == nil {
							require.ErrorIs(t, err, idem.ErrRedirectRefused)
							require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
						}
					case writeGoesOn:
						require.NoError(t, err)
						require.Len(t, sends, 2)
						oneKey(t, sends)
						require.Equal(t, ourBody, sends[1].body)
						require.Equal(t, ourSecret, sends[1].header.Get("X-Signature"))
					case err == nil:
						require.Len(t, sends, 2)
						require.Equal(t, http.MethodGet, sends[1].method)
						require.Empty(t, sends[1].keys)
						require.Empty(t, sends[1].body)
						if !l.elsewhere {
							require.Equal(t, ourSecret, sends[1].header.Get("X-Signature"))
						}
					}
				})
			}
		}
	}
}

// There and back again: what may be seen is decided hop by hop.
func TestC58_WayBackHomeIsSignedAgain(t *testing.T) {
	w := &wire{serve: hopsTo{
		"/v1/payments": {303, "http://other.test/a"},
		"/a":           {307, "http://api.test/b"},
		"/b":           {302, "http://third.test/c"},
	}.serve}
	req := newPost(t, idem.WithKey(t.Context(), ourKey), wireURL, ourBody)
	resp, err := (&http.Client{Transport: onWire(w, signing)}).Do(req)
	require.NoError(t, err)
	readAll(t, resp)
	sends := w.seen()
	require.Len(t, sends, 4)
	requireNothingOfOurs(t, "http://api.test", sends)
	require.Equal(t, ourSecret, sends[0].header.Get("X-Signature"))
	require.Equal(t, ourSecret, sends[2].header.Get("X-Signature"))
	for _, send := range sends[1:] {
		require.Empty(t, send.keys)
	}
	require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
}

// Methods that get no key may bring one of the caller's own: it is as secret.
func TestC58_CallersKeyOnAMethodWithoutKeysStaysAtHome(t *testing.T) {
	for _, method := range []string{http.MethodGet, http.MethodDelete, http.MethodPut} {
		for _, status := range []int{302, 307} {
			t.Run(fmt.Sprintf("%s, %d", method, status), func(t *testing.T) {
				w := &wire{serve: hopsTo{"/v1/payments": {status, "http://other.test/moved"}}.serve}
				req, err := http.NewRequestWithContext(t.Context(), method, wireURL, nil)
				require.NoError(t, err)
				req.Header.Set("Idempotency-Key", ourKey)
				resp, err := (&http.Client{Transport: onWire(w, signing)}).Do(req)
				if err == nil {
					readAll(t, resp)
				}
				require.Equal(t, []string{ourKey}, w.seen()[0].keys)
				requireNothingOfOurs(t, "http://api.test", w.seen())
			})
		}
	}
}

func TestC58_RedirectLoopOfAWriteEndsWithOneKeyAndOneOrigin(t *testing.T) {
	for _, c := range []struct {
		status int
		sends  int
	}{{301, 10}, {302, 10}, {303, 10}, {307, 10}, {308, 10}} {
		t.Run(strconv.Itoa(c.status), func(t *testing.T) {
			w := &wire{serve: hopsTo{"/v1/payments": {c.status, "/v1/payments"}}.serve}
			var report idem.Report
			req := newPost(t, idem.WithReport(idem.WithKey(t.Context(), ourKey), &report), wireURL, ourBody)
			resp, err := (&http.Client{Transport: onWire(w, signing)}).Do(req)
			if resp != nil {
				_ = resp.Body.Close() // http.Client hands on the last redirect, closed
			}
			require.ErrorContains(t, err, "stopped after 10 redirects")
			sends := w.seen()
			require.Len(t, sends, c.sends)
			writes := slices.DeleteFunc(slices.Clone(sends), func(s wireSend) bool { return s.method != http.MethodPost })
			require.Equal(t, ourKey, oneKey(t, writes))
			if c.status >= 307 {
				require.Len(t, writes, c.sends)
				require.Equal(t, idem.Unknown, report.Outcome)
			} else {
				require.Len(t, writes, 1)
			}
			require.Equal(t, c.sends, report.Sends)
			require.Len(t, report.Attempts, c.sends)
		})
	}
	t.Run("of two origins", func(t *testing.T) {
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			to := "http://other.test/v1/payments"
			if req.URL.Host == "other.test" {
				to = wireURL
			}
			return answer(req, 307, http.Header{"Location": {to}}, ""), nil
		}}
		_, err := (&http.Client{Transport: onWire(w, signing)}).Do(newPost(t, idem.WithKey(t.Context(), ourKey), wireURL, ourBody))
		require.ErrorIs(t, err, idem.ErrRedirectRefused)
		require.Len(t, w.seen(), 1)
	})
}

// A body that is streamed once cannot follow a 307: the redirect itself is the
// answer, and nothing is sent short or empty.
func TestC58_BodyThatCannotFollowIsNotSentEmpty(t *testing.T) {
	for _, status := range []int{307, 308} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			w := &wire{serve: hopsTo{"/v1/payments": {status, "/moved"}}.serve}
			tr := onWire(w, func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer = 16 })
			body := strings.Repeat("x", 1000)
			resp, err := (&http.Client{Transport: tr}).Do(newPostOnce(t, context.Background(), wireURL, body))
			require.NoError(t, err)
			_, _ = io.Copy(io.Discard, resp.Body)
			require.NoError(t, resp.Body.Close())
			require.Len(t, w.seen(), 1)
			require.Equal(t, body, w.seen()[0].body)
			require.Equal(t, status, resp.StatusCode)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
		})
	}
}
