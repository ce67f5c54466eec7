package main

import (
	"encoding/json"
	"html"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTheLedgerIsFilteredByReferenceCallerAndKey(t *testing.T) {
	c := start(t)
	c.pay(t, "a", "Authorization", "Bearer one")
	c.pay(t, "b", "Authorization", "Bearer two")
	c.ask(t, "POST", "/v1/payments", strings.ReplaceAll(body1999, "order-1", "order-2"), "Idempotency-Key", "a")
	all := c.effects(t, "")
	require.Len(t, all, 3)
	require.NotContains(t, all[0]["caller"], "one", "a credential is not repeated")
	require.Equal(t, all[:2], c.effects(t, "?reference=order-1"))
	require.Equal(t, all[1:2], c.effects(t, "?caller="+all[1]["caller"].(string)))
	require.Equal(t, []map[string]any{all[0], all[2]}, c.effects(t, "?key=a"))
	require.Equal(t, all[2:], c.effects(t, "?key=a&reference=order-2"))
	require.Empty(t, c.effects(t, "?key=c"))
	for _, name := range []string{"n", "kind", "id", "reference", "key", "caller", "endpoint", "amount", "at", "send"} {
		require.Contains(t, all[0], name)
	}
	requireProblem(t, c.ask(t, "GET", "/_fake/effects?ref=order-1", ""), 400, "invalid-request")

	c.settled(t)
	sends := list(t, c.ask(t, "GET", "/_fake/sends", "", "Authorization", "Bearer spy"))
	require.Len(t, sends, 3, "the admin interface is no send")
	require.Equal(t, sends[2:], list(t, c.ask(t, "GET", "/_fake/sends?after=2", "")))
	require.Equal(t, sends[2:], list(t, c.ask(t, "GET", "/_fake/sends?after=1&key=a", "")))
	require.Empty(t, list(t, c.ask(t, "GET", "/_fake/sends?after=99", "")))
	require.NotContains(t, c.ask(t, "GET", "/_fake/sends", "").body, "Bearer", "nor in a header")
	requireProblem(t, c.ask(t, "GET", "/_fake/sends?after=x", ""), 400, "invalid-request")
}

func TestFaultsAreReadReplacedAddedAndRemoved(t *testing.T) {
	c := start(t)
	require.Empty(t, list(t, c.ask(t, "GET", "/_fake/faults", "")))
	one := `[{"kind":"status","status":503,"send":1}]`
	require.Len(t, list(t, c.ask(t, "PUT", "/_fake/faults", one)), 1)
	require.Len(t, list(t, c.ask(t, "POST", "/_fake/faults", `[{"kind":"reset","delay":"5ms"}]`)), 2)
	back := c.ask(t, "GET", "/_fake/faults", "")
	require.JSONEq(t, `[{"kind":"status","status":503,"send":1},{"kind":"reset","delay":"5ms"}]`, back.body)
	require.Equal(t, back.body, c.ask(t, "PUT", "/_fake/faults", back.body).body, "what GET gives PUT takes")
	require.Equal(t, 503, c.pay(t, "order-1").status)
	require.Error(t, c.pay(t, "order-1").err)
	require.Empty(t, list(t, c.ask(t, "DELETE", "/_fake/faults", "")))
	require.Equal(t, 201, c.pay(t, "order-1").status)
	require.Len(t, c.effects(t, ""), 1)
}

func TestAWrongFaultIsRefusedWithItsPlaceAndChangesNothing(t *testing.T) {
	c := start(t)
	c.ask(t, "PUT", "/_fake/faults", `[{"kind":"status","status":503}]`)
	for _, wrong := range []struct {
		body         string
		kind         string
		line, column float64
	}{
		{"", "invalid-json", 1, 1},
		{"null", "invalid-faults", 1, 1},
		{`{"kind":"reset"}`, "invalid-faults", 1, 1},
		{"[\n  {\"kind\": \"reset\",}\n]", "invalid-json", 2, 20},
		{"[{\"kind\":\"reset\"},\n\n   {\"kind\":\"reset\", \"dealy\":\"1s\"}]", "invalid-faults", 3, 4},
		{"[{\"kind\":\"reset\"},\n{\"kind\":\"status\"}]", "invalid-faults", 2, 1},
		{"[{\"kind\":\"reset\"}, 1, 1]", "invalid-faults", 1, 20},
		{"[{\"kind\":\"reset\"}] []", "invalid-json", 1, 20},
	} {
		for _, method := range []string{"PUT", "POST"} {
			doc := requireProblem(t, c.ask(t, method, "/_fake/faults", wrong.body), 400, wrong.kind)
			require.Equal(t, wrong.line, doc["line"], "%s: %s", wrong.body, doc["detail"])
			require.Equal(t, wrong.column, doc["column"], "%s: %s", wrong.body, doc["detail"])
		}
	}
	tooMuch := `[{"kind":"reset","rate":0.7},{"kind":"close","rate":0.7}]`
	requireProblem(t, c.ask(t, "PUT", "/_fake/faults", tooMuch), 400, "invalid-faults")
	requireProblem(t, c.ask(t, "POST", "/_fake/faults", tooMuch), 400, "invalid-faults")
	requireProblem(t, c.ask(t, "PUT", "/_fake/faults", strings.Repeat(" ", 1<<20+1)), 413, "body-too-large")
	require.Len(t, list(t, c.ask(t, "GET", "/_fake/faults", "")), 1)
	require.Equal(t, 503, c.pay(t, "order-1").status)
}

func TestTheClockAdvancesAndAResetForgets(t *testing.T) {
	c := start(t, "-faults", "lost-answer")
	require.Error(t, c.pay(t, "order-1").err)
	var clock struct {
		Now   time.Time
		Ahead string
	}
	require.NoError(t, json.Unmarshal([]byte(c.ask(t, "POST", "/_fake/clock", `{"advance":"25h"}`).body), &clock))
	require.Equal(t, "25h0m0s", clock.Ahead)
	require.WithinDuration(t, time.Now().Add(25*time.Hour), clock.Now, time.Minute)
	require.Equal(t, 201, c.pay(t, "order-1").status)
	require.Len(t, c.effects(t, ""), 2, "the key was forgotten")
	doc := requireProblem(t, c.ask(t, "POST", "/_fake/clock", "{\n\"advance\"}"), 400, "invalid-json")
	require.Equal(t, []any{2., 10.}, []any{doc["line"], doc["column"]})
	requireProblem(t, c.ask(t, "POST", "/_fake/clock", `{"advance":"soon"}`), 400, "invalid-request")
	requireProblem(t, c.ask(t, "POST", "/_fake/clock", `{"advance":3600}`), 400, "invalid-request")

	require.Equal(t, 204, c.ask(t, "POST", "/_fake/reset", "").status)
	require.Empty(t, c.effects(t, ""))
	require.Empty(t, list(t, c.ask(t, "GET", "/_fake/sends", "")))
	require.Empty(t, list(t, c.ask(t, "GET", "/_fake/faults", "")))
	r := c.pay(t, "order-1")
	require.Equal(t, 201, r.status)
	require.Empty(t, r.header.Get("Idempotent-Replay"))
}

func TestUnknownPathsAndMethodsAreProblems(t *testing.T) {
	c := start(t)
	requireProblem(t, c.ask(t, "GET", "/_fake/nothing", ""), 404, "not-found")
	r := c.ask(t, "PATCH", "/_fake/faults", "")
	requireProblem(t, r, 405, "method-not-allowed")
	require.Equal(t, "DELETE, GET, POST, PUT", r.header.Get("Allow"))
	require.Equal(t, 405, c.ask(t, "GET", "/_fake/reset", "").status)
}

func TestOnlyTheUserOfThisMachineChangesAnything(t *testing.T) {
	c := start(t, "-host", "fake.example")
	own := strings.TrimPrefix(c.url, "http://")
	for _, foreign := range [][]string{
		{"Origin", "http://evil.example"},
		{"Origin", "null"},
		{"Sec-Fetch-Site", "cross-site"},
		{"Sec-Fetch-Site", "same-site"}, // another port of this machine
		{"Origin", "http://127.0.0.1:1", "Sec-Fetch-Site", ""},
	} {
		for _, change := range [][2]string{
			{"POST", "/_fake/reset"}, {"PUT", "/_fake/faults"}, {"POST", "/_fake/faults"}, {"DELETE", "/_fake/faults"},
			{"POST", "/_fake/clock"}, {"POST", "/_fake/"},
		} {
			requireProblem(t, c.ask(t, change[0], change[1], "[]", foreign...), 403, "cross-origin")
		}
	}
	require.Equal(t, 204, c.ask(t, "POST", "/_fake/reset", "", "Origin", c.url).status)
	require.Equal(t, 204, c.ask(t, "POST", "/_fake/reset", "", "Sec-Fetch-Site", "same-origin").status)
	require.Equal(t, 204, c.ask(t, "POST", "/_fake/reset", "").status, "curl sends neither")

	for _, host := range []string{"evil.example", "evil.example:80", "localhost.evil.example", "192.0.2.1", "", "127.0.0.1.evil.example"} {
		if host != "" {
			requireProblem(t, c.ask(t, "GET", "/_fake/effects", "", "Host", host), 403, "host-not-allowed")
			requireProblem(t, c.ask(t, "GET", "/_fake/", "", "Host", host), 403, "host-not-allowed")
		}
	}
	for _, host := range []string{own, "localhost", "LOCALHOST:80", "[::1]:8080", "127.0.0.2", "fake.example:8080"} {
		require.Equal(t, 200, c.ask(t, "GET", "/_fake/effects", "", "Host", host).status, host)
	}
}

func TestThePageEscapesWhatClientsSendAndFetchesNothingFromElsewhere(t *testing.T) {
	c := start(t)
	evil := `"><script>alert(1)</script>`
	require.Equal(t, 201, c.ask(t, "POST", "/v1/payments",
		`{"amount":1,"currency":"usd","reference":"<img src=x>","source":"tok_visa"}`, "Idempotency-Key", evil).status)
	c.ask(t, "GET", "/v1/payments/%3Cb%3E", "")
	page := c.ask(t, "GET", "/_fake/", "")
	require.Equal(t, 200, page.status)
	for _, raw := range []string{"<script>alert", "<img", "<b>"} {
		require.NotContains(t, page.body, raw)
	}
	require.Contains(t, page.body, "&lt;img src=x&gt;")
	policy := page.header.Get("Content-Security-Policy")
	require.Contains(t, policy, "default-src 'none'")
	require.NotContains(t, policy, "unsafe")
	for _, file := range []string{"/_fake/", "/_fake/page.css", "/_fake/page.js"} {
		r := c.ask(t, "GET", file, "")
		require.Equal(t, 200, r.status, file)
		body := strings.ReplaceAll(r.body, c.url, "")
		require.NotContains(t, body, "http://", file)
		require.NotContains(t, body, "https://", file)
	}
}

func TestTheFormsOfThePageWorkWithoutScript(t *testing.T) {
	c := start(t)
	form := []string{"Content-Type", "application/x-www-form-urlencoded", "Origin", c.url}
	for _, name := range []string{"lost-answer", "slow-effect", "unavailable", "mixed", "storm", "none"} {
		r := c.ask(t, "POST", "/_fake/", "faults="+name, form...)
		require.Equal(t, 303, r.status, r.body)
		require.Equal(t, "/_fake/", r.header.Get("Location"))
		require.Contains(t, c.ask(t, "GET", "/_fake/", "").body, `value="`+name+`"`)
		require.Regexp(t, `value="`+name+`"[^>]*aria-pressed="true"`, c.ask(t, "GET", "/_fake/", "").body)
	}
	require.Equal(t, 303, c.ask(t, "POST", "/_fake/", "advance=1h", form...).status)
	require.Contains(t, c.ask(t, "GET", "/_fake/", "").body, "1h0m0s ahead")
	require.Equal(t, 303, c.ask(t, "POST", "/_fake/", "reset=yes", form...).status)
	for _, wrong := range []string{"", "faults=all", "advance=soon"} {
		requireProblem(t, c.ask(t, "POST", "/_fake/", wrong, form...), 400, "invalid-request")
	}
}

func TestTheLiveFragmentHasAnETagUntilSomethingHappens(t *testing.T) {
	c := start(t)
	etag := c.ask(t, "GET", "/_fake/live", "").header.Get("ETag")
	require.Equal(t, 304, c.ask(t, "GET", "/_fake/live", "", "If-None-Match", etag).status)
	c.pay(t, "order-1")
	require.Equal(t, 200, c.ask(t, "GET", "/_fake/live", "", "If-None-Match", etag).status)
}

// pass makes so many sends that those before are no longer on the page.
func (c *command) pass(t *testing.T) {
	t.Helper()
	for range shownSends + 10 {
		resp, err := http.Get(c.url + "/v1/payments/pay_1")
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
	}
}

func (c *command) verdict(t *testing.T, operation string) string {
	t.Helper()
	c.settled(t)
	page := c.ask(t, "GET", "/_fake/live", "").body
	m := regexp.MustCompile(`(?s)</span> ` + regexp.QuoteMeta(operation) + `.*?class="verdict (\w+)">([^<]*)<`).FindStringSubmatch(page)
	require.NotNil(t, m, "%s is not on the page", operation)
	return m[1] + ": " + html.UnescapeString(m[2])
}

func TestTheVerdictCountsEffectsOfSendsThatAreNoLongerShown(t *testing.T) {
	c := start(t, "-quiet", "-settings", "optional")
	c.pay(t, "k1")                                                                                                  // paid twice
	c.ask(t, "POST", "/v1/payments", strings.ReplaceAll(body1999, "order-1", "order-2"), "Idempotency-Key", "once") // replayed later
	nameless := `{"amount":1,"currency":"usd"}`
	c.ask(t, "POST", "/v1/payments", nameless, "Idempotency-Key", "keyed")
	c.ask(t, "POST", "/v1/payments/pay_1/refunds", `{"amount":1,"reference":"r-1"}`, "Idempotency-Key", "f1")
	c.ask(t, "POST", "/v1/payments/pay_1/refunds", `{"amount":1,"reference":"r-2"}`, "Idempotency-Key", "f3")
	c.ask(t, "PUT", "/v1/payments/pay_2/status", `{"status":"captured"}`)
	c.ask(t, "PUT", "/v1/payments/pay_2/status", `{"status":"disputed"}`)
	c.pass(t)
	c.pay(t, "k2")
	c.ask(t, "POST", "/v1/payments", strings.ReplaceAll(body1999, "order-1", "order-2"), "Idempotency-Key", "once")
	c.ask(t, "POST", "/v1/payments", nameless, "Idempotency-Key", "keyed", "Authorization", "Bearer other")
	c.ask(t, "POST", "/v1/payments/pay_2/refunds", `{"amount":1,"reference":"r-1"}`, "Idempotency-Key", "f2")
	c.ask(t, "POST", "/v1/payments/pay_1/refunds", `{"amount":1,"reference":"r-2"}`, "Idempotency-Key", "f4")
	c.ask(t, "GET", "/v1/payments?reference=order-2", "")

	require.Len(t, c.effects(t, "?reference=order-1"), 2)
	require.Equal(t, "lost: 2 EFFECTS for one operation, 1 send shown", c.verdict(t, "order-1"))
	require.Equal(t, "good: 1 effect, 2 sends shown", c.verdict(t, "order-2"))
	require.Equal(t, "good: 1 effect, 1 send shown", c.verdict(t, "keyed"), "another caller's key is another operation")
	require.Equal(t, "good: 2 effects, 1 send shown", c.verdict(t, "r-1"), "refunds of two payments")
	require.Equal(t, "lost: 2 EFFECTS for one operation, 1 send shown", c.verdict(t, "r-2"))
	require.Contains(t, c.ask(t, "GET", "/_fake/live", "").body, "older sends are at")

	c.ask(t, "POST", "/_fake/reset", "")
	c.pay(t, "k1")
	require.Equal(t, "good: 1 effect, 1 send", c.verdict(t, "order-1"), "a reset forgets the effects before it")
}

func TestAnEarlierEffectIsNoClaimAboutItsAnswer(t *testing.T) {
	c := start(t, "-quiet", "-faults", "lost-answer")
	require.Error(t, c.pay(t, "k1").err)
	c.ask(t, "DELETE", "/_fake/faults", "")
	c.pass(t)
	c.ask(t, "GET", "/v1/payments?reference=order-1", "")
	require.Equal(t, "neutral: 1 effect, 1 send shown: done, by a send that is not shown", c.verdict(t, "order-1"))
	require.Equal(t, 201, c.pay(t, "k1").status)
	require.Equal(t, "good: 1 effect, 2 sends shown", c.verdict(t, "order-1"))
}

func TestALongListOfSendsSaysWhereItGoesOn(t *testing.T) {
	c := start(t)
	for range 5 {
		c.pay(t, "k")
	}
	r := c.ask(t, "GET", "/_fake/sends?key=k&limit=2&after=1", "")
	require.Len(t, list(t, r), 2)
	require.Equal(t, `</_fake/sends?after=3&key=k&limit=2>; rel="next"`, r.header.Get("Link"))
	r = c.ask(t, "GET", "/_fake/sends?after=3&key=k&limit=2", "")
	require.Len(t, list(t, r), 2)
	require.Empty(t, r.header.Get("Link"), "that was all")
	for _, query := range []string{"limit=0", "limit=1001", "limit=x", "limit=", "after=", "after=1&after=2", "key=a&key=b"} {
		requireProblem(t, c.ask(t, "GET", "/_fake/sends?"+query, ""), 400, "invalid-request")
	}
	requireProblem(t, c.ask(t, "GET", "/_fake/effects?key=a&key=b", ""), 400, "invalid-request")
}

func TestAFaultForARouteThatIsNotThereIsRefused(t *testing.T) {
	c := start(t)
	doc := requireProblem(t, c.ask(t, "PUT", "/_fake/faults", `[{"kind":"reset","endpoint":"/v1/payments"}]`), 400, "invalid-faults")
	require.Contains(t, doc["detail"], "POST /v1/hotels/{hotel_id}/reservations", "it names the routes")
	doc = requireProblem(t, c.ask(t, "POST", "/_fake/faults", `[{"kind":"reset","rate":0}]`), 400, "invalid-faults")
	require.Contains(t, doc["detail"], "leave it out for always")
	doc = requireProblem(t, c.ask(t, "PUT", "/_fake/faults", `[{"kind":"status","status":503,"retry_after":1}]`), 400, "invalid-faults")
	require.Equal(t, `fault 1: retry_after: want a string such as "1"`, doc["detail"])
	require.Empty(t, list(t, c.ask(t, "GET", "/_fake/faults", "")))
	require.Len(t, list(t, c.ask(t, "PUT", "/_fake/faults", `[{"kind":"reset","endpoint":"POST /v1/payments"}]`)), 1)
	require.Error(t, c.pay(t, "k").err)
}

// The endpoint filter knows the routes of the server, all of them.
func TestTheRoutesAreThoseOfTheServer(t *testing.T) {
	c := start(t)
	for _, pattern := range routes {
		method, path, _ := strings.Cut(pattern, " ")
		c.ask(t, method, strings.NewReplacer("{id}", "x", "{hotel_id}", "h").Replace(path), "")
	}
	var reached []string
	for _, n := range list(t, c.ask(t, "GET", "/_fake/sends", "")) {
		reached = append(reached, n["endpoint"].(string))
	}
	require.Equal(t, routes, reached)
	var documented []string
	for _, m := range regexp.MustCompile(`(?m)^//\t([A-Z]+) +(/v1/[^\s?]+)`).FindAllStringSubmatch(packageComment(t), -1) {
		documented = append(documented, m[1]+" "+m[2])
	}
	require.ElementsMatch(t, routes, documented)
}

func packageComment(t *testing.T) string {
	t.Helper()
	doc, err := os.ReadFile("../../fakeserver/doc.go")
	require.NoError(t, err)
	return string(doc)
}

func TestThePathWithoutItsSlashAndTheRootLeadToThePage(t *testing.T) {
	c := start(t)
	c.ask(t, "PUT", "/_fake/faults", `[{"kind":"reset"}]`)
	r := c.ask(t, "GET", "/_fake", "")
	require.NoError(t, r.err, "it meets no fault")
	require.Equal(t, []any{308, "/_fake/"}, []any{r.status, r.header.Get("Location")})
	c.ask(t, "DELETE", "/_fake/faults", "")
	require.Contains(t, requireProblem(t, c.ask(t, "GET", "/", ""), 404, "not-found")["detail"], "/_fake/")
}

func TestThePresetHasItsNameOnThePageAndInTheSettings(t *testing.T) {
	for given, name := range map[string]any{"stripe,retention=1h": "stripe", "seen-flag": "seen-flag", "lenient": nil} {
		c := start(t, "-settings", given)
		require.Contains(t, c.ask(t, "GET", "/_fake/", "").body, `<code id="settings">`+given+`</code>`)
		var got map[string]any
		require.NoError(t, json.Unmarshal([]byte(c.ask(t, "GET", "/_fake/settings", "").body), &got))
		require.Equal(t, name, got["preset"])
	}
	require.NotContains(t, start(t).ask(t, "GET", "/_fake/", "").body, `id="settings"`)
}

func TestChangesLeaveALineInTheLog(t *testing.T) {
	c := start(t)
	c.ask(t, "PUT", "/_fake/faults", `[{"kind":"status","status":503,"send":1}]`)
	c.ask(t, "POST", "/_fake/faults", `[{"kind":"reset","key":"a\u001b"},{"kind":"hang","times":1},{"kind":"close","times":1},{"kind":"flood","times":1}]`)
	c.ask(t, "POST", "/_fake/faults", `[{"kind":"nap"}]`)
	c.ask(t, "DELETE", "/_fake/faults", "")
	c.ask(t, "POST", "/_fake/clock", `{"advance":"1h"}`)
	c.ask(t, "POST", "/_fake/", "reset=yes", "Content-Type", "application/x-www-form-urlencoded")
	c.stop(t, syscall.SIGTERM)
	var changes []string
	for _, l := range c.printed()[1:] {
		_, change, _ := strings.Cut(l, "  ")
		changes = append(changes, change)
	}
	require.Equal(t, []string{
		"faults: status 503 before the effect (send 1)",
		"faults, added: reset before the effect (key a?); hang before the effect (at most 1 times); close before the effect (at most 1 times); and 1 more",
		"faults: none",
		"clock: 1h0m0s ahead",
		"reset: keys, ledger, sends, resources and faults are forgotten",
	}, changes)
}
