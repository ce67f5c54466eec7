package interop_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-retryablehttp"
	"github.com/stretchr/testify/require"
	"github.com/stripe/stripe-go/v85"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/retryable"
)

// stripeServer is the fake server with Stripe's settings and stubs of two of
// its routes, which take and give what stripe-go sends and reads.
type stripeServer struct {
	*fakeserver.Server
	forms chan url.Values // what the stubs got
}

var (
	intents = fakeserver.Filter{Endpoint: "POST /v1/payment_intents"}
	refunds = fakeserver.Filter{Endpoint: "POST /v1/refunds"}
)

const declined = 402_00 // the amount that the bank refuses

func likeStripe(t *testing.T, faults ...fakeserver.Fault) *stripeServer {
	t.Helper()
	s := &stripeServer{fake(t, fakeserver.Like(fakeserver.Stripe), faults...), make(chan url.Values, 100)}
	var made atomic.Int32
	stub := func(answer func(form url.Values, n int32) (status int, body map[string]any)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if err := r.ParseForm(); err != nil || r.PostForm.Get("amount") == "" {
				http.Error(w, `{"error":{"type":"invalid_request_error"}}`, http.StatusBadRequest)
				return
			}
			s.forms <- r.PostForm
			status, body := answer(r.PostForm, made.Add(1))
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			_ = json.NewEncoder(w).Encode(body)
		}
	}
	s.Handle(intents.Endpoint, stub(func(form url.Values, n int32) (int, map[string]any) {
		if form.Get("amount") == fmt.Sprint(declined) {
			return http.StatusPaymentRequired, map[string]any{"error": map[string]any{
				"type": "card_error", "code": "card_declined", "message": "Your card was declined."}}
		}
		return http.StatusOK, map[string]any{
			"id": fmt.Sprint("pi_", n), "object": "payment_intent", "amount": 1999, "currency": form.Get("currency"), "status": "succeeded"}
	}))
	s.Handle(refunds.Endpoint, stub(func(form url.Values, n int32) (int, map[string]any) {
		return http.StatusOK, map[string]any{
			"id": fmt.Sprint("re_", n), "object": "refund", "amount": 500, "payment_intent": form.Get("payment_intent"), "status": "succeeded"}
	}))
	return s
}

// stripeClient is the official client over rt, with so many retries of its own.
func stripeClient(s *stripeServer, rt http.RoundTripper, retries int64) *stripe.Client {
	return stripe.NewClient("sk_test_123", stripe.WithBackends(stripe.NewBackendsWithConfig(&stripe.BackendConfig{
		HTTPClient:        &http.Client{Transport: rt},
		MaxNetworkRetries: stripe.Int64(retries),
		URL:               stripe.String(s.URL()),
		LeveledLogger:     &stripe.LeveledLogger{Level: stripe.LevelNull},
	})))
}

func overStripe(t *testing.T) *idem.Transport {
	t.Helper()
	return &idem.Transport{Base: loopback(t), Policy: policy(), Dialect: idem.Stripe}
}

func intent(amount int64) *stripe.PaymentIntentCreateParams {
	return &stripe.PaymentIntentCreateParams{
		Amount: stripe.Int64(amount), Currency: stripe.String("usd"), Confirm: stripe.Bool(true),
		Metadata: map[string]string{"order": "order-1"},
	}
}

func TestStripeClientChargesOnceWhenAnswersAreLost(t *testing.T) {
	for _, f := range []fakeserver.Fault{
		lostAnswers(2),
		{Kind: fakeserver.Close, Point: fakeserver.AfterEffect, Times: 2},
		{Kind: fakeserver.CutBody, Times: 2},
		{Kind: fakeserver.Status, Point: fakeserver.AfterEffect, Status: 503, Times: 2},
	} {
		t.Run(f.String(), func(t *testing.T) {
			s := likeStripe(t, f)
			var report idem.Report
			made, err := stripeClient(s, overStripe(t), 0).V1PaymentIntents.Create(idem.WithReport(t.Context(), &report), intent(1999))
			require.Len(t, s.Effects(intents), 1)
			require.NoError(t, err)
			require.Equal(t, s.Effects(intents)[0].ID, made.ID)
			require.Len(t, s.Sends(intents), 3)
			requireOneKey(t, s.Sends(intents))
			require.Equal(t, idem.Executed, report.Outcome)
			require.Equal(t, "header", report.KeyFrom, "stripe-go mints one for each call")
			require.True(t, report.Replayed)
			require.Equal(t, made.ID, report.Reference)
			require.Len(t, s.forms, 1, "the stub was asked once")
			require.Equal(t, "order-1", (<-s.forms).Get("metadata[order]"))
		})
	}
}

func TestStripeClientRefundsOnceWhenAnswersAreLost(t *testing.T) {
	s := likeStripe(t, lostAnswers(2))
	var report idem.Report
	made, err := stripeClient(s, overStripe(t), 0).V1Refunds.Create(idem.WithReport(t.Context(), &report),
		&stripe.RefundCreateParams{PaymentIntent: stripe.String("pi_1"), Amount: stripe.Int64(500)})
	require.Len(t, s.Effects(refunds), 1)
	require.NoError(t, err)
	require.Equal(t, s.Effects(refunds)[0].ID, made.ID)
	requireOneKey(t, s.Sends(refunds))
	require.Equal(t, idem.Executed, report.Outcome)
	require.Equal(t, "pi_1", (<-s.forms).Get("payment_intent"))
}

// The context wins over the key that stripe-go puts into the header.
func TestStripeClientCalledTwiceForOneOperationChargesOnce(t *testing.T) {
	s := likeStripe(t)
	client := stripeClient(s, overStripe(t), 0)
	var report idem.Report
	ctx := idem.WithReport(idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-1/1"}), &report)
	first, err := client.V1PaymentIntents.Create(ctx, intent(1999))
	require.NoError(t, err)
	second, err := client.V1PaymentIntents.Create(ctx, intent(1999))
	require.NoError(t, err)
	require.Len(t, s.Effects(intents), 1)
	require.Equal(t, first.ID, second.ID)
	require.Len(t, s.Sends(intents), 2)
	requireOneKey(t, s.Sends(intents))
	require.Equal(t, "operation", report.KeyFrom)
	require.True(t, report.Replayed)

	_, err = client.V1PaymentIntents.Create(ctx, intent(5))
	require.ErrorIs(t, err, idem.ErrKeyReused, "another payment is another operation")
	require.Len(t, s.Sends(intents), 2)
}

func TestStripeClientWithoutAnOperationChargesForEachCall(t *testing.T) {
	s := likeStripe(t)
	client := stripeClient(s, overStripe(t), 0)
	for range 2 {
		_, err := client.V1PaymentIntents.Create(t.Context(), intent(1999))
		require.NoError(t, err)
	}
	require.Len(t, s.Effects(intents), 2, "a negative control: nothing says that they are one")
}

func TestStripeClientRefundsOnceForTwoCallsAtOnce(t *testing.T) {
	s := likeStripe(t, fakeserver.Fault{Kind: fakeserver.Slow, Delay: 200 * time.Millisecond, Times: 1})
	ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "refund", ID: "refund-7"})
	ids, errs := make([]string, 2), make([]error, 2)
	var wg sync.WaitGroup
	for i := range ids {
		rt := overStripe(t) // two Transports, as two processes have
		rt.Policy.ThrottleBase = 100 * time.Millisecond
		client := stripeClient(s, rt, 0)
		wg.Go(func() {
			made, err := client.V1Refunds.Create(ctx, &stripe.RefundCreateParams{PaymentIntent: stripe.String("pi_1"), Amount: stripe.Int64(500)})
			ids[i], errs[i] = made.ID, err
		})
	}
	wg.Wait()
	require.Len(t, s.Effects(refunds), 1)
	require.NoError(t, errs[0])
	require.NoError(t, errs[1])
	require.Equal(t, ids[0], ids[1])
	requireOneKey(t, s.Sends(refunds))
}

func TestStripeClientGetsItsOwnErrorForADeclinedCardAndTheOutcomeIsRefused(t *testing.T) {
	s := likeStripe(t, fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Times: 1})
	var report idem.Report
	_, err := stripeClient(s, overStripe(t), 0).V1PaymentIntents.Create(idem.WithReport(t.Context(), &report), intent(declined))
	require.Empty(t, s.Effects(intents))
	var own *stripe.Error
	require.ErrorAs(t, err, &own)
	require.Equal(t, stripe.ErrorCodeCardDeclined, own.Code)
	require.Equal(t, idem.Refused, report.Outcome)
}

// A 500 is stored and replayed: whatever it was, it will not change.
func TestStripeClientStopsAtAStoredServerError(t *testing.T) {
	s := likeStripe(t, fakeserver.Fault{Kind: fakeserver.StoredFailure, Point: fakeserver.AfterEffect, Times: 1})
	var report idem.Report
	_, err := stripeClient(s, overStripe(t), 0).V1PaymentIntents.Create(idem.WithReport(t.Context(), &report), intent(1999))
	require.Len(t, s.Effects(intents), 1)
	require.Error(t, err)
	require.Len(t, s.Sends(intents), 2)
	require.Equal(t, idem.Unknown, report.Outcome)
}

func TestStripeClientHandsOnTheTypedError(t *testing.T) {
	s := likeStripe(t, fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect})
	_, err := stripeClient(s, overStripe(t), 0).V1PaymentIntents.Create(t.Context(), intent(1999))
	require.Len(t, s.Effects(intents), 1)
	e := errorOf(t, err)
	require.ErrorIs(t, e, idem.ErrAttemptsExhausted)
	require.Equal(t, idem.Unknown, e.Outcome)
	require.Equal(t, s.Sends(intents)[0].Key, e.Key)

	// The key is in the error, so the next call can bring it.
	s.ClearFaults()
	made, err := stripeClient(s, overStripe(t), 0).V1PaymentIntents.Create(idem.WithKey(t.Context(), e.Key), intent(1999))
	require.NoError(t, err)
	require.Len(t, s.Effects(intents), 1)
	require.Equal(t, s.Effects(intents)[0].ID, made.ID)
}

// A key in the header was not minted here, so even a refused connection proves
// nothing about the operation.
func TestStripeClientsOwnKeyClaimsLess(t *testing.T) {
	s := likeStripe(t)
	client := stripe.NewClient("sk_test_123", stripe.WithBackends(stripe.NewBackendsWithConfig(&stripe.BackendConfig{
		HTTPClient:        &http.Client{Transport: overStripe(t)},
		MaxNetworkRetries: stripe.Int64(0),
		URL:               stripe.String("http://" + refused(t)),
		LeveledLogger:     &stripe.LeveledLogger{Level: stripe.LevelNull},
	})))
	_, err := client.V1PaymentIntents.Create(t.Context(), intent(1999))
	require.Empty(t, s.Effects(intents))
	e := errorOf(t, err)
	require.Equal(t, idem.Unknown, e.Outcome)
	require.Zero(t, e.Sends)
	for _, a := range e.Attempts {
		require.Equal(t, idem.NotExecuted, a.Outcome, "each attempt for itself is proved")
	}
}

func TestStripeClientUnderTheDefaultPolicyOfGoRetryablehttp(t *testing.T) {
	s := likeStripe(t, lostAnswers(2))
	rt := overStripe(t)
	rt.Policy.Classify = retryable.Classify(retryablehttp.DefaultRetryPolicy)
	rt.Policy.Backoff = retryable.Backoff(retryablehttp.DefaultBackoff, time.Millisecond, 5*time.Millisecond)
	var report idem.Report
	_, err := stripeClient(s, rt, 0).V1PaymentIntents.Create(idem.WithReport(t.Context(), &report), intent(1999))
	require.Len(t, s.Effects(intents), 1)
	require.NoError(t, err)
	requireOneKey(t, s.Sends(intents))
	require.Equal(t, idem.Executed, report.Outcome)
}

// What stripe-go does with its own retries on, over idem and alone: reported,
// because it is its own business; the effects are asserted. README.md has the
// figures.
func TestStripeClientWithItsOwnRetriesIsReported(t *testing.T) {
	for _, c := range []struct {
		name string
		idem bool
		f    fakeserver.Fault
	}{
		{"over idem, two answers lost", true, lostAnswers(2)},
		{"over idem, every answer lost", true, lostAnswers(0)},
		{"alone, two answers lost", false, lostAnswers(2)},
		{"alone, every answer lost", false, lostAnswers(0)},
		{"over idem, 409 while the first runs", true, fakeserver.Fault{Kind: fakeserver.Duplicate, Point: fakeserver.DuringEffect, Delay: 2500 * time.Millisecond, Times: 1}},
		{"alone, 409 while the first runs", false, fakeserver.Fault{Kind: fakeserver.Duplicate, Point: fakeserver.DuringEffect, Delay: 2500 * time.Millisecond, Times: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := likeStripe(t, c.f)
			var rt http.RoundTripper = loopback(t)
			if c.idem {
				o := overStripe(t)
				o.Policy.ThrottleBase = 400 * time.Millisecond // Stripe's 409 has no Retry-After
				rt = o
			}
			var report idem.Report
			began := time.Now()
			_, err := stripeClient(s, rt, stripe.DefaultMaxNetworkRetries).V1PaymentIntents.
				Create(idem.WithReport(context.Background(), &report), intent(1999))
			// A client that gave up too early is ahead of the effect.
			require.Eventually(t, func() bool { return len(s.Effects(intents)) > 0 }, 30*time.Second, 10*time.Millisecond)
			sends := s.Sends(intents)
			require.Len(t, s.Effects(intents), 1)
			requireOneKey(t, sends)
			outcome := "no claim"
			if c.idem {
				outcome = report.Outcome.String()
			}
			t.Logf("sends %d, keys 1, effects 1, error %v, claim: %s, %v",
				len(sends), err != nil, outcome, time.Since(began).Round(100*time.Millisecond))
		})
	}
}
