package main

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/idem-go/idem/fakeserver"
	"github.com/stretchr/testify/require"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// sent is a payment under a key that began and ended so many milliseconds after noon; a negative end: it still runs.
func sent(n int, key, reference string, from, to int, more func(*fakeserver.Send)) fakeserver.Send {
	s := fakeserver.Send{
		N: n, Key: key, KeySend: n, Method: "POST", Path: "/v1/payments", Endpoint: "POST /v1/payments",
		Reference: reference, At: noon.Add(time.Duration(from) * time.Millisecond),
	}
	if to >= 0 {
		s.Ended = noon.Add(time.Duration(to) * time.Millisecond)
	}
	if more != nil {
		more(&s)
	}
	return s
}

func payment(n, at int) fakeserver.Effect {
	return fakeserver.Effect{
		N: n, Kind: "payment", ID: "pay_1", Endpoint: "POST /v1/payments", Amount: 1999,
		At: noon.Add(time.Duration(at) * time.Millisecond),
	}
}

func TestALostAnswerAndItsReplayAreOneOperationDrawnToScale(t *testing.T) {
	got := timeline([]fakeserver.Send{
		sent(1, "k", "order-1", 0, 100, func(s *fakeserver.Send) { s.Fault, s.Effect = "reset after the effect (send 1)", 1 }),
		sent(2, "other", "order-2", 50, 60, func(s *fakeserver.Send) { s.Status = 400 }),
		sent(3, "k", "order-1", 300, 400, func(s *fakeserver.Send) { s.Status, s.Replayed = 201, true }),
	}, []fakeserver.Effect{payment(1, 50)}, nil, noon.Add(time.Hour))
	require.Len(t, got, 2)
	require.Equal(t, "order-2", got[0].Name, "the newest comes first")
	o := got[1]
	require.Equal(t, []string{"reference", "order-1"}, []string{o.By, o.Name})
	require.Equal(t, "1 effect, 2 sends: an answer was lost, send 3 got it as a replay", o.Verdict)
	require.Equal(t, good, o.Tone)
	require.Equal(t, "400 ms", o.Span)
	first, second := o.Rows[0], o.Rows[1]
	require.Equal(t, []float64{0, 25, 12.5}, []float64{first.Begin, first.Length, first.EffectAt})
	require.Equal(t, []float64{75, 25, 25, 50}, []float64{second.Begin, second.Length, second.WaitAt, second.WaitLong})
	require.Equal(t, []string{"+300 ms", "200 ms"}, []string{second.After, second.Wait})
	require.Equal(t, []string{"no answer: connection reset", "payment pay_1, 1999"}, []string{first.Saw, first.Effect})
	require.Equal(t, "201 Created, replay of #1", second.Saw)
	require.Negative(t, second.EffectAt)
}

func TestASendWhoseBodyWasNeverReadBelongsToTheReferenceOfItsKey(t *testing.T) {
	lostBody := sent(1, "k", "", 0, 1, nil)
	stranger := sent(3, "k", "", 4, 5, func(s *fakeserver.Send) { s.Caller = "caller-2" })
	bare := sent(4, "", "", 6, 7, func(s *fakeserver.Send) { s.Method = "GET" })
	got := timeline([]fakeserver.Send{lostBody, sent(2, "k", "order-1", 2, 3, nil), stranger, bare}, nil, nil, noon)
	var names []string
	for _, o := range got {
		names = append(names, o.By+" "+o.Name)
	}
	require.Equal(t, []string{"request GET /v1/payments", "key k", "reference order-1"}, names)
	require.Len(t, got[2].Rows, 2)
	require.Empty(t, timeline(nil, nil, nil, noon))
}

func TestAnAnswerThatNobodyCanUseIsNotGreen(t *testing.T) {
	for _, c := range []struct {
		fault  string
		status int
		says   string
		tone   tone
	}{
		{"bomb in the body", 201, "1 effect, 1 send: done, but no client has the answer", lost},
		{"mangled in the body", 201, "1 effect, 1 send: done, but no client has the answer", lost},
		{"big-headers after the effect", 200, "1 effect, 1 send: done, but no client has the answer", lost},
		{"html 200 after the effect", 200, "1 effect, 1 send: done, but no client has the answer", lost},
		{"redirect to /x after the effect", 303, "1 effect, 1 send: done, but no client has the answer", lost},
		{"trickle 1s in the body", 201, "1 effect, 1 send: done, and whether the client has the whole answer is not known", neutral},
		{"late 1s in the body", 201, "1 effect, 1 send: done, but no client has the answer", lost},
		{"late 1ms in the body", 201, "1 effect, 1 send", good},
		{"extra after the answer", 201, "1 effect, 1 send", good},
	} {
		got := timeline([]fakeserver.Send{sent(1, "k", "a", 0, 2, func(s *fakeserver.Send) {
			s.Status, s.Effect, s.Fault = c.status, 1, c.fault
		})}, []fakeserver.Effect{payment(1, 0)}, nil, noon.Add(time.Second))
		require.Equal(t, []any{c.says, c.tone}, []any{got[0].Verdict, got[0].Tone}, c.fault)
	}
}

func TestTwoRequestsThatNothingConnectsAreNotCalledADouble(t *testing.T) {
	did := func(effect int) func(*fakeserver.Send) {
		return func(s *fakeserver.Send) { s.Status, s.Effect = 200, effect }
	}
	got := timeline([]fakeserver.Send{sent(1, "", "", 0, 1, did(1)), sent(2, "", "", 2, 3, did(2))},
		[]fakeserver.Effect{payment(1, 0), payment(2, 2)}, nil, noon.Add(time.Second))
	require.Equal(t, "2 effects, 2 sends: nothing says that they are one operation", got[0].Verdict)
	require.Equal(t, neutral, got[0].Tone)

	refund := func(n int, path string) fakeserver.Send {
		return sent(n, "k"+path, "r-1", n, n+1, func(s *fakeserver.Send) { s.Path, s.Status, s.Effect = path, 201, n })
	}
	got = timeline([]fakeserver.Send{refund(1, "/v1/payments/pay_1/refunds"), refund(2, "/v1/payments/pay_2/refunds")},
		[]fakeserver.Effect{payment(1, 0), payment(2, 2)}, nil, noon.Add(time.Second))
	require.Equal(t, "2 effects, 2 sends", got[0].Verdict, "refunds of two payments are no double")
}

func TestTheVerdictSaysWhatBecameOfAnOperation(t *testing.T) {
	status := func(n int) func(*fakeserver.Send) { return func(s *fakeserver.Send) { s.Status = n } }
	did := func(status, effect int) func(*fakeserver.Send) {
		return func(s *fakeserver.Send) { s.Status, s.Effect = status, effect }
	}
	again := func(status int) func(*fakeserver.Send) {
		return func(s *fakeserver.Send) { s.Status, s.Replayed = status, true }
	}
	for _, c := range []struct {
		sends []fakeserver.Send
		says  string
		tone  tone
	}{
		{[]fakeserver.Send{sent(1, "k", "", 0, 1, did(201, 1))}, "1 effect, 1 send", good},
		{[]fakeserver.Send{sent(1, "k", "", 0, 1, status(402))}, "no effect, 1 send", neutral},
		{[]fakeserver.Send{sent(1, "k", "", 0, -1, nil)}, "no effect, 1 send, still under way", underWay},
		{[]fakeserver.Send{sent(1, "k", "", 0, 1, did(0, 1))}, "1 effect, 1 send: done, but no client has the answer", lost},
		{[]fakeserver.Send{sent(1, "k", "", 0, 1, nil)}, "no effect, 1 send: nothing was done, and no client was told", neutral},
		{[]fakeserver.Send{sent(1, "k", "", 0, 1, did(201, 1)), sent(2, "k", "", 2, 3, again(0)), sent(3, "k", "", 4, 5, again(201))}, "1 effect, 3 sends", good},
		{[]fakeserver.Send{sent(1, "k", "", 0, 1, did(409, 1)), sent(2, "k", "", 2, 3, again(201))}, "1 effect, 2 sends: send 2 got the answer as a replay", good},
		{[]fakeserver.Send{sent(1, "k", "", 0, 1, did(201, 1)), sent(2, "k", "", 2, 3, did(201, 2))}, "2 EFFECTS for one operation, 2 sends", lost},
	} {
		got := timeline(c.sends, []fakeserver.Effect{payment(1, 0), payment(2, 2)}, nil, noon.Add(time.Second))
		require.Equal(t, c.says, got[0].Verdict)
		require.Equal(t, c.tone, got[0].Tone, c.says)
	}
}

// Every kind of fault is really met here, so that a new one cannot be forgotten.
func TestWhatTheClientSawIsTrueForEveryFault(t *testing.T) {
	for fault, want := range map[string]string{
		`{"kind":"reset"}`:                                          "no answer: connection reset",
		`{"kind":"close"}`:                                          "no answer: connection closed",
		`{"kind":"stuck"}`:                                          "no answer: connection closed",
		`{"kind":"hang"}`:                                           "no answer: the client left within",
		`{"kind":"late","delay":"1h"}`:                              "no answer: the client left within",
		`{"kind":"late","point":"in-body","delay":"1h"}`:            "201 Created, no body: the client left within",
		`{"kind":"freeze"}`:                                         "no answer: the client left within",
		`{"kind":"stream-reset"}`:                                   "no answer: connection closed",
		`{"kind":"trickle","delay":"1ms"}`:                          "201 Created, byte by byte",
		`{"kind":"bomb","bytes":65536}`:                             "201 Created, a bomb: far more than it seems, in gzip",
		`{"kind":"mangled"}`:                                        "201 Created, mangled: half a document",
		`{"kind":"big-headers","bytes":65536}`:                      "200 OK, headers beyond measure",
		`{"kind":"extra"}`:                                          "201 Created, and a second answer",
		`{"kind":"html","status":200,"point":"after-effect"}`:       "200 OK, by the fault",
		`{"kind":"slow","delay":"5s"}`:                              "no answer: the client left within",
		`{"kind":"status","status":503}`:                            "503 Service Unavailable",
		`{"kind":"stored-failure"}`:                                 "500 Internal Server Error",
		`{"kind":"html","point":"after-effect"}`:                    "502 Bad Gateway",
		`{"kind":"redirect","location":"/x"}`:                       "307 Temporary Redirect, by the fault",
		`{"kind":"cut-headers"}`:                                    "a part of the headers",
		`{"kind":"cut-body"}`:                                       "201 Created, body cut off",
		`{"kind":"garbage"}`:                                        "bytes that are not HTTP",
		`{"kind":"flood"}`:                                          "early hints, no answer",
		`{"kind":"endless","delay":"10ms"}`:                         "503 Service Unavailable, a body without end",
		`{"kind":"duplicate"}`:                                      "201 Created",
		`{"kind":"duplicate","point":"during-effect","delay":"1s"}`: "409 Conflict",
	} {
		t.Run(fault, func(t *testing.T) {
			faults, wrong := parseFaults([]byte("[" + fault + "]"))
			require.Nil(t, wrong)
			s := fakeserver.New()
			defer s.Close()
			require.NoError(t, s.Inject(faults...))
			ended := make(chan fakeserver.Send, 10)
			s.Watch(func(n fakeserver.Send) { ended <- n })
			ctx, leave := context.WithTimeout(t.Context(), time.Minute)
			defer leave()
			var client sync.WaitGroup
			client.Go(func() {
				if resp, err := s.Client().Do(request(t, s.URL()).WithContext(ctx)); err == nil {
					_ = resp.Body.Close() // where more is to come, the client leaves with this
				}
			})
			if strings.Contains(want, "the client left") || want == "early hints, no answer" {
				soon(t, func() bool { n := s.Sends(); return len(n) == 1 && n[0].BodySHA256 != "" })
				time.Sleep(50 * time.Millisecond) // or the server would end by itself
				leave()
			}
			client.Wait()
			n := <-ended
			for n.Duplicate {
				n = <-ended
			}
			text, _ := saw(n)
			require.Equal(t, want, regexp.MustCompile(` within .*`).ReplaceAllString(text, " within"))
			require.True(t, strings.HasPrefix(line(n, nil), n.At.Format("15:04:05.000")+"  #1 POST /v1/payments"))
		})
	}
}

func TestAFaultThatSpeaksForTheServerIsNoReplay(t *testing.T) {
	text, tone := saw(sent(2, "k", "", 0, 1, func(s *fakeserver.Send) {
		s.Status, s.Replayed, s.Fault = 500, true, "status 500 after the effect (rate 0.02727272727272727 of seed 1)"
	}))
	require.Equal(t, "500 Internal Server Error", text)
	require.Equal(t, refused, tone)
	require.Equal(t, "reset before the effect (rate 0.047 of seed 1)", rounded("reset before the effect (rate 0.0473684 of seed 1)"))
}

func TestDurationsAreShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0.0 ms", 412 * time.Microsecond: "0.4 ms", 65*time.Millisecond + 999: "65 ms", 1234 * time.Millisecond: "1.23 s",
		24*time.Hour + 3*time.Second: "24h0m3s",
	} {
		require.Equal(t, want, short(d))
	}
}

func TestSettingsAreSpelledInLowerCase(t *testing.T) {
	for name, want := range map[string]string{"KeyHeader": "key_header", "RequestIDHeader": "request_id_header", "Lenient": "lenient", "MaxKey": "max_key"} {
		require.Equal(t, want, snake(name))
	}
	for _, p := range providers {
		got, err := parseSettings(string(p) + ",max_key=9")
		require.NoError(t, err)
		want := fakeserver.Like(p)
		want.MaxKey = 9
		require.Equal(t, want, got)
	}
	for _, b := range breakages {
		got, err := parseSettings(string(b))
		require.NoError(t, err)
		require.Equal(t, fakeserver.Broken(b), got)
	}
}

func request(t *testing.T, url string) *http.Request {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, url+"/v1/payments", strings.NewReader(body1999))
	require.NoError(t, err)
	req.GetBody = nil
	req.Header.Set("Idempotency-Key", "order-1")
	return req
}
