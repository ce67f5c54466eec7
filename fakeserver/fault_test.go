package fakeserver

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFaultsSayWhatTheyAre(t *testing.T) {
	for want, f := range map[string]Fault{
		"no fault": {},
		"reset after the effect (key order-1, send 1)": {Kind: Reset, Point: AfterEffect, Key: "order-1", Send: 1},
		"reset after 10 bytes before the effect":       {Kind: Reset, Bytes: 10},
		"close before the body before the effect":      {Kind: Close, Bytes: -1},
		`status 503 with Retry-After "2" before the effect (POST /v1/payments, at most 3 times)`: {
			Kind: Status, Status: 503, RetryAfter: "2", Endpoint: "POST /v1/payments", Times: 3},
		"slow 150ms during the effect (rate 0.25 of seed 7)": {Kind: Slow, Delay: 150 * time.Millisecond, Rate: 0.25, Seed: 7},
		"cut-body (gzip) after 3 bytes in the body":          {Kind: CutBody, Encoding: "gzip", Bytes: 3},
		"redirect 307 to other before the effect":            {Kind: Redirect, Status: 307, Location: "other"},
		"stale after the answer":                             {Kind: Stale},
		"cut-headers in the headers":                         {Kind: CutHeaders},
	} {
		require.Equal(t, want, f.String())
	}
}

func TestInvalidFaultsNameTheField(t *testing.T) {
	for field, faults := range map[string][]Fault{
		"kind":        {{}, {Kind: "explode"}},
		"point":       {{Kind: Reset, Point: InBody}, {Kind: Slow, Point: AfterEffect}, {Kind: Hang, Point: "later"}},
		"status":      {{Kind: Status}, {Kind: Status, Status: 99}, {Kind: Status, Status: 600}, {Kind: Hang, Status: 500}, {Kind: StoredFailure, Status: 404}, {Kind: Redirect, Status: 304, Location: "/"}, {Kind: Redirect, Status: 307, Point: AfterEffect, Location: "/"}},
		"retry_after": {{Kind: Reset, RetryAfter: "1"}, {Kind: Status, Status: 503, RetryAfter: "1\r\nX: y"}},
		"location":    {{Kind: Redirect}, {Kind: Close, Location: "/"}, {Kind: Redirect, Location: "/\n"}},
		"bytes":       {{Kind: Hang, Bytes: 1}, {Kind: Reset, Bytes: -2}, {Kind: CutBody, Bytes: -1}, {Kind: Close, Point: AfterEffect, Bytes: 5}},
		"encoding":    {{Kind: CutBody, Encoding: "br"}, {Kind: CutHeaders, Encoding: "gzip"}},
		"delay":       {{Kind: Slow}, {Kind: Late}, {Kind: Trickle}, {Kind: SlowRead}, {Kind: Reset, Delay: -1}, {Kind: Duplicate, Point: DuringEffect}, {Kind: Duplicate, Delay: 1}},
		"rate":        {{Kind: Reset, Rate: -0.1}, {Kind: Reset, Rate: 1.1}, {Kind: Reset, Rate: math.NaN()}},
		"send":        {{Kind: Reset, Send: -1}},
		"times":       {{Kind: Reset, Times: -1}},
	} {
		for _, f := range faults {
			require.ErrorContains(t, f.Validate(), "fakeserver: fault: "+field+":", "%+v", f)
		}
	}
}

func TestEveryKindIsValidAtEachOfItsPoints(t *testing.T) {
	for name, k := range kinds {
		require.NotEmpty(t, k.points)
		for _, p := range k.points {
			f := Fault{Kind: name, Point: p}
			switch {
			case name == Status:
				f.Status = 503
			case name == Redirect:
				f.Location = "other"
			case name == Late, name == Trickle, name == SlowRead:
				f.Delay = time.Second
			}
			if p == DuringEffect && name != Stuck {
				f.Delay = time.Second
			}
			require.NoError(t, f.Validate(), "%s", f)
			require.Contains(t, f.String(), p.phrase())
		}
	}
}

func TestFaultsTravelAsJSON(t *testing.T) {
	faults := append(Mixed(0.35, 3), Storm(4)...)
	faults = append(faults, Fault{
		Kind: Status, Point: AfterEffect, Status: 503, RetryAfter: "1\n2", Delay: 90 * time.Second,
		Rate: 0.1, Seed: -1, Key: "k", Send: 2, Endpoint: "POST /v1/payments", Times: 3,
	}, Fault{Kind: Redirect, Location: "other"}, Fault{Kind: CutBody, Encoding: "gzip", Bytes: 7})
	text, err := json.Marshal(faults)
	require.NoError(t, err)
	require.Contains(t, string(text), `"delay":"1m30s"`)
	back, err := ParseFaults(text)
	require.NoError(t, err)
	require.Equal(t, faults, back)
}

func TestParseErrorsSayWhere(t *testing.T) {
	for text, want := range map[string]string{
		``:                                       "want a JSON array",
		`{}`:                                     "want a JSON array",
		`[{"kind":"reset"}`:                      "line 1, column 18",
		`[{"kind":"reset"},`:                     "number 2",
		`[{"kind":"reset"}] x`:                   "there is more after the array",
		"[{\"kind\":\"reset\"},\n  {\"kin\":1}]": "number 2, line 2, column 3: fakeserver: fault: kin: is no field",
		`[{"kind":"reset","send":"1"}]`:          "number 1, line 1, column 2",
		`[{"kind":"slow","delay":"5"}]`:          `delay: "5" is not a duration`,
		`[{"kind":"slow"}]`:                      "delay: is needed",
		`[null]`:                                 "kind: unknown kind",
		`[{"kind":"reset"} {"kind":"x"}]`:        "number 2",
	} {
		_, err := ParseFaults([]byte(text))
		require.ErrorContains(t, err, want, text)
		require.ErrorContains(t, err, "fakeserver: faults: ", text)
	}
	none, err := ParseFaults([]byte(" [ ] "))
	require.NoError(t, err)
	require.Empty(t, none)
}

func FuzzParseFaults(f *testing.F) {
	f.Add([]byte(`[{"kind":"reset","point":"after-effect","key":"order-1","send":1}]`))
	f.Add([]byte(`[{"kind":"slow","delay":"150ms","rate":0.5,"seed":7},{"kind":"status","status":503,"retry_after":"2\n5"}]`))
	f.Add([]byte(`[null, {"kind":"cut-body","encoding":"gzip","bytes":3}]`))
	f.Add([]byte("[\n,"))
	f.Fuzz(func(t *testing.T, text []byte) {
		faults, err := ParseFaults(text)
		if err != nil {
			require.Nil(t, faults)
			return
		}
		for _, fault := range faults {
			require.NoError(t, fault.Validate())
			require.NotEmpty(t, fault.String())
		}
		again, err := json.Marshal(faults)
		require.NoError(t, err)
		back, err := ParseFaults(again)
		require.NoError(t, err, "%s", again)
		require.Equal(t, faults, back)
	})
}

func TestUnreadableFaultIsExplainedInWordsOfTheJSON(t *testing.T) {
	for text, want := range map[string]string{
		`{"kind":"status","retry_after":1}`:  `retry_after: want a string such as "1"`,
		`{"kind":"reset","delay":5}`:         `delay: want a string such as "150ms"`,
		`{"kind":"reset","send":"1"}`:        `send: want a whole number such as 1`,
		`{"kind":"reset","send":1.5}`:        `send: want a whole number such as 1`,
		`{"kind":"reset","rate":"0.5"}`:      `rate: want a number such as 0.5`,
		`{"kind":["reset"]}`:                 `kind: want a string such as "reset"`,
		`"reset"`:                            `want an object such as {"kind":"reset"}`,
		`{"kind":"reset","rate":0}`:          `rate: 0 would hit nothing; leave it out for always`,
		`{"kind":"reset","send":0}`:          `send: counts from 1; leave it out for any`,
		`{"kind":"reset","times":0}`:         `times: 0 would hit nothing; leave it out for no limit`,
		`{"kind":"reset","dealy":"1s"}`:      `dealy: is no field of a fault; there are kind, point, status,`,
		`{"kind":"nap"}`:                     `kind: unknown kind "nap"; there are big-headers, bomb, close,`,
		`{"kind":"reset","point":"in-body"}`: `point: a reset fault has no point "in-body", only before-effect, after-effect`,
	} {
		_, err := ParseFaults([]byte("[" + text + "]"))
		require.ErrorContains(t, err, "fakeserver: fault: "+want, text)
		require.NotContains(t, err.Error(), "Go ", text)
	}
}
