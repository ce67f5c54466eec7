package main

import (
	"encoding/json"
	"strings"
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
