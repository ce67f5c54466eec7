package idem_test

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// Dialects of providers that this package does not bring, as a user writes
// them from the provider's documentation: state what it says, and nothing
// else. What is left out is never claimed.

// payPalOrders is the orders API v2. It marks no replay: a 200 where the first
// answer was a 201, showing the order as it is now.
var payPalOrders = idem.Dialect{
	Name:       "paypal-orders-v2",
	Header:     "PayPal-Request-Id",
	MaxKey:     108,
	InProgress: []idem.Mark{{Status: 409, Pointer: "/details/0/issue", Equals: "PREVIOUS_REQUEST_IN_PROGRESS"}},
	Mismatch:   []idem.Mark{{Status: 422, Pointer: "/details/0/issue", Equals: "PAYPAL_REQUEST_ID_PREVIOUSLY_USED"}},
	Refusal:    []idem.Mark{{Status: 422, Pointer: "/details/0/issue", Equals: "INSTRUMENT_DECLINED"}},
	Reference:  []string{"/id"},
	RequestID:  "PayPal-Debug-Id",
	KeyWindow:  6 * time.Hour,
}

// adyenCheckout says 704 while the first request runs. How it answers to a
// reused key it does not say, so there is no mark for that. A declined card
// is a 200 whose resultCode says "Refused": Executed, and the no is in the body.
var adyenCheckout = idem.Dialect{
	Name:       "adyen-checkout",
	Header:     "Idempotency-Key",
	MaxKey:     64,
	InProgress: []idem.Mark{{Pointer: "/errorCode", Equals: "704"}, {Header: "Transient-Error", Value: "true"}},
	Reference:  []string{"/pspReference", "/id"},
	KeyWindow:  7 * 24 * time.Hour,
}

// goCardless does not replay: a second request with the key is a conflict that
// names what the first one made. The rest is as in Generic.
var goCardless = func() idem.Dialect {
	d := idem.Generic
	d.Name = "gocardless"
	d.AlreadyDone = []idem.Mark{{Status: 409, Pointer: "/error/errors/0/reason", Equals: "idempotent_creation_conflict"}}
	d.Reference = []string{"/error/errors/0/links/conflicting_resource_id", "/id"}
	return d
}()

// increase answers to a reused key with a 409, and marks its replays as Generic
// expects.
var increase = func() idem.Dialect {
	d := idem.Generic
	d.Name = "increase"
	d.MaxKey = 200
	d.Mismatch = []idem.Mark{{Status: 409, Pointer: "/type", Equals: "idempotency_key_already_used_error"}}
	d.Reference = []string{"/id"}
	return d
}()

// providers are what the fake server plays, and the dialect for each.
var providers = []struct {
	like    fakeserver.Provider
	dialect idem.Dialect
	// again is the status of a second request with a key; replayed: the
	// dialect recognises it.
	again    int
	replayed bool
	// reused is the status of the answer to a reused key; silent: the dialect
	// has no mark for it.
	reused int
	silent bool
}{
	{like: fakeserver.Stripe, dialect: idem.Stripe, again: 201, replayed: true, reused: 400},
	{like: fakeserver.PayPal, dialect: payPalOrders, again: 200, reused: 422},
	{like: fakeserver.Adyen, dialect: adyenCheckout, again: 201, reused: 422, silent: true},
	{like: fakeserver.GoCardless, dialect: goCardless, again: 409, reused: 422},
	{like: fakeserver.Increase, dialect: increase, again: 201, replayed: true, reused: 409},
}

// likeProvider starts a fake server in memory that treats keys as a provider.
func likeProvider(t *testing.T, p fakeserver.Provider) *fakeserver.Server {
	t.Helper()
	s := inMemory(t)
	s.Apply(fakeserver.Like(p))
	return s
}

// madeID is the provider's id of the one thing that was made.
func madeID(t *testing.T, s *fakeserver.Server) string {
	t.Helper()
	require.Len(t, s.Effects(), 1)
	return s.Effects()[0].ID
}

func TestLostAnswerIsAskedForAgainAtEachProvider(t *testing.T) {
	for _, p := range providers {
		t.Run(string(p.like), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := likeProvider(t, p.like)
				scriptAll(t, s, answerLost)
				r, status, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999), speaking(p.dialect))
				id := madeID(t, s)
				require.Len(t, keysSent(s.Sends()), 1)
				require.Equal(t, r.Key, s.Sends()[0].Key)
				require.Equal(t, p.again, status)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Equal(t, id, r.Reference)
				require.Equal(t, p.replayed, r.Replayed)
				require.True(t, r.EarlierUnknown)
				if p.again == 409 {
					require.ErrorIs(t, r.Reason, idem.ErrAlreadyDone)
				} else {
					require.NoError(t, r.Reason)
				}
				if p.dialect.RequestID != "" && fakeserver.Like(p.like).RequestIDHeader != "" {
					require.Equal(t, "req_2", r.Attempts[1].RequestID)
				}
			})
		})
	}
}

func TestLostRequestIsExecutedOnceAtEachProvider(t *testing.T) {
	for _, p := range providers {
		t.Run(string(p.like), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := likeProvider(t, p.like)
				scriptAll(t, s, requestLost)
				r, status, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999), speaking(p.dialect))
				require.Equal(t, madeID(t, s), r.Reference)
				require.Equal(t, 201, status)
				require.Equal(t, idem.Executed, r.Outcome)
				require.False(t, r.Replayed)
			})
		})
	}
}

func TestRequestInProgressIsWaitedForAtEachProvider(t *testing.T) {
	for _, p := range providers {
		t.Run(string(p.like), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := likeProvider(t, p.like)
				scriptAll(t, s, fakeserver.Fault{Kind: fakeserver.Slow, Delay: 3 * time.Second})
				start := time.Now()
				r, status, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999), speaking(p.dialect), func(tr *idem.Transport) {
					tr.Policy.AttemptTimeout = time.Second
					tr.Policy.ThrottleBase = 500 * time.Millisecond
				})
				id := madeID(t, s)
				require.Equal(t, p.again, status)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Equal(t, id, r.Reference)
				require.Equal(t, 2, r.Attempts[len(r.Attempts)-1].N, "waits are no attempts")
				waits := 0
				for _, a := range r.Attempts {
					if a.WaitFrom == "in-progress" {
						waits++
						require.GreaterOrEqual(t, a.Wait, 500*time.Millisecond)
						require.Equal(t, idem.Unknown, a.Outcome)
					}
				}
				require.GreaterOrEqual(t, waits, 3)
				require.GreaterOrEqual(t, time.Since(start), 3*time.Second)
				require.Less(t, time.Since(start), 4*time.Second)
			})
		})
	}
}

func TestReusedKeyIsRefusedAtEachProvider(t *testing.T) {
	for _, p := range providers {
		t.Run(string(p.like), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := likeProvider(t, p.like)
				charge(t, idem.WithKey(t.Context(), "order-1"), s, paymentJSON("order-1", 1999), speaking(p.dialect))
				id := madeID(t, s)
				req := newPost(t, idem.WithKey(t.Context(), "order-1"), s.URL()+"/v1/payments", paymentJSON("order-1", 2999))
				resp, err := idem.NewClient(over(s, speaking(p.dialect))).Do(req)
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 2, "it is not sent again, least of all with another key")
				require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, err), "what became of the first is not known here")
				if p.silent {
					require.NoError(t, err, "an answer without a mark is handed on as it is")
					require.Equal(t, p.reused, resp.StatusCode)
					readAll(t, resp)
					return
				}
				e := requireError(t, err, idem.ErrKeyReused)
				require.Equal(t, p.reused, e.StatusCode)
				if p.like == fakeserver.Increase {
					var told struct {
						ID string `json:"resource_id"`
					}
					require.NoError(t, json.Unmarshal(e.Body, &told))
					require.Equal(t, id, told.ID, "the error has what the provider says of the first")
				}
			})
		})
	}
}

func TestSecondCallWithTheKeyIsOneEffectAtEachProvider(t *testing.T) {
	for _, p := range providers {
		t.Run(string(p.like), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := likeProvider(t, p.like)
				var last idem.Report
				for range 2 { // two processes
					ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-1/1"})
					last, _, _ = charge(t, ctx, s, paymentJSON("order-1", 1999), speaking(p.dialect))
					require.Equal(t, idem.Executed, last.Outcome)
					require.Equal(t, madeID(t, s), last.Reference)
				}
				require.Len(t, keysSent(s.Sends()), 1)
				require.False(t, last.EarlierUnknown)
				require.Equal(t, p.replayed, last.Replayed)
				require.Equal(t, p.again == 409, last.Reason != nil)
			})
		})
	}
}

// What a declined card and its lost answer come to depends on what the dialect
// can recognise.
func TestDeclineAtEachProvider(t *testing.T) {
	const captures = "/v2/checkout/orders/O1/capture"
	answers := map[fakeserver.Provider]struct {
		path, body string
		stub       http.HandlerFunc // nil: the payments of the fake server, a 402
		outcome    idem.Outcome     // of the first answer
		lost       idem.Outcome     // where that is lost and asked for again
	}{
		fakeserver.Stripe: {path: "/v1/payments", body: declinedJSON, outcome: idem.Refused, lost: idem.Refused},
		fakeserver.PayPal: {
			path: captures, body: `{"reference":"order-1"}`, outcome: idem.Refused, lost: idem.Refused,
			stub: jsonStub(422, `{"name":"UNPROCESSABLE_ENTITY","details":[{"issue":"INSTRUMENT_DECLINED"}]}`),
		},
		fakeserver.Adyen: {
			path: "/v71/payments", body: `{"reference":"order-1"}`, outcome: idem.Executed, lost: idem.Executed,
			stub: jsonStub(200, `{"pspReference":"NC6HT9CRT65ZGN82","resultCode":"Refused"}`),
		},
		// No mark tells a stored 4xx from one of a layer before the operation.
		fakeserver.GoCardless: {
			path: "/payments", body: `{"reference":"order-1"}`, outcome: idem.Refused, lost: idem.Unknown,
			stub: jsonStub(422, `{"error":{"type":"validation_failed","code":422}}`),
		},
		// The replay mark does.
		fakeserver.Increase: {
			path: "/ach_transfers", body: `{"reference":"order-1"}`, outcome: idem.Refused, lost: idem.Refused,
			stub: jsonStub(400, `{"type":"invalid_operation_error","status":400}`),
		},
	}
	for _, p := range providers {
		t.Run(string(p.like), func(t *testing.T) {
			c := answers[p.like]
			for _, lost := range []bool{false, true} {
				virtual(t, func(t *testing.T) {
					s := likeProvider(t, p.like)
					if c.stub != nil {
						s.Handle("POST "+c.path, c.stub)
					}
					want := c.outcome
					if lost {
						scriptAll(t, s, answerLost)
						want = c.lost
					}
					var r idem.Report
					resp, err := over(s, speaking(p.dialect)).RoundTrip(newPost(t, idem.WithReport(t.Context(), &r), s.URL()+c.path, c.body))
					require.NoError(t, err)
					readAll(t, resp)
					require.Empty(t, s.Effects(fakeserver.Filter{Kind: "payment"}))
					require.Equal(t, want, r.Outcome)
					require.NoError(t, r.Reason)
					require.Equal(t, lost, r.EarlierUnknown)
				})
			}
		})
	}
}

// jsonStub always answers the same.
func jsonStub(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}
}

// Stripe keeps a 500 under its key: the replay says that asking again is no use.
func TestStoredFailureOfStripeIsAskedForOnceMore(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := likeProvider(t, fakeserver.Stripe)
		scriptAll(t, s, fakeserver.Fault{Kind: fakeserver.Status, Status: 500})
		r, status, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999), speaking(idem.Stripe))
		require.Empty(t, s.Effects())
		require.Len(t, s.Sends(), 2)
		require.Equal(t, 500, status)
		require.True(t, r.Replayed)
		require.Equal(t, idem.Unknown, r.Outcome, "a 500 says nothing of the charge")
		require.Equal(t, []string{"req_1", "req_2"}, []string{r.Attempts[0].RequestID, r.Attempts[1].RequestID})
	})
}

// A replay of PayPal shows the order as it is now, which is no other order.
func TestReplayOfPayPalMayHaveMovedOn(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := likeProvider(t, fakeserver.PayPal)
		ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "order", ID: "order-1/1"})
		first, _, before := charge(t, ctx, s, paymentJSON("order-1", 1999), speaking(payPalOrders))
		resp, err := over(s, speaking(payPalOrders)).RoundTrip(newPost(t, t.Context(),
			s.URL()+"/v1/payments/"+first.Reference+"/refunds", `{"amount":99,"reference":"refund-1"}`))
		require.NoError(t, err)
		readAll(t, resp)
		second, status, now := charge(t, ctx, s, paymentJSON("order-1", 1999), speaking(payPalOrders))
		require.Len(t, s.Effects(), 2)
		require.Equal(t, 200, status)
		require.Equal(t, first.Key, second.Key)
		require.Equal(t, first.Reference, second.Reference)
		require.NotEqual(t, before, now)
		require.Equal(t, idem.Executed, second.Outcome)
	})
}

// A key that was not made here is checked against the provider's limit before
// anything is sent; one that was made here always fits.
func TestKeyFitsEachProvider(t *testing.T) {
	for _, p := range providers {
		virtual(t, func(t *testing.T) {
			s := likeProvider(t, p.like)
			longest := p.dialect.MaxKey
			if longest == 0 {
				longest = 255
			}
			key := make([]byte, longest+1)
			for i := range key {
				key[i] = 'k'
			}
			r, _, _ := charge(t, idem.WithKey(t.Context(), string(key)), s, paymentJSON("order-1", 1999), speaking(p.dialect))
			require.Empty(t, s.Sends())
			require.ErrorIs(t, r.Reason, idem.ErrKeyInvalid)
			r, _, _ = charge(t, idem.WithKey(t.Context(), string(key[1:])), s, paymentJSON("order-1", 1999), speaking(p.dialect))
			require.Equal(t, idem.Executed, r.Outcome, "%s: %v", p.like, r.Reason)
		})
	}
}

// The same over real sockets, and over HTTP/2: what a dialect reads does not
// depend on what carries it.
func TestProvidersOverSocketsAndHTTP2(t *testing.T) {
	for name, start := range map[string]func() *fakeserver.Server{"sockets": fakeserver.New, "HTTP/2": fakeserver.NewTLS} {
		for _, p := range providers {
			t.Run(name+", "+string(p.like), func(t *testing.T) {
				s := start()
				t.Cleanup(s.Close)
				s.Apply(fakeserver.Like(p.like))
				scriptAll(t, s, answerLost)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				r, status, _ := charge(t, ctx, s, paymentJSON("order-1", 1999), speaking(p.dialect))
				require.Equal(t, madeID(t, s), r.Reference)
				require.Equal(t, p.again, status)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Len(t, keysSent(s.Sends()), 1)
			})
		}
	}
}
