package fakeserver

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// at reads a place in a JSON answer.
func (r reply) at(t *testing.T, path ...string) any {
	t.Helper()
	require.NoError(t, r.err)
	var doc any
	require.NoError(t, json.Unmarshal([]byte(r.body), &doc), r.body)
	for _, name := range path {
		if list, ok := doc.([]any); ok {
			doc = list[0]
		}
		doc = doc.(map[string]any)[name]
	}
	return doc
}

// inLike gives a test three answers of a provider: the replay of a payment, a reused key, a key in progress.
func inLike(t *testing.T, p Provider, test func(t *testing.T, s *Server, first, replay, reused, running reply)) {
	t.Helper()
	inMemory(t, func(t *testing.T, s *Server) {
		settings := Like(p)
		s.Apply(settings)
		header := "Idempotency-Key"
		if settings.KeyHeader != "" {
			header = settings.KeyHeader
		}
		keyed := func(key string) call { return pay("").with(header, key) }
		first := keyed("k1").send(s)
		require.Equal(t, 201, first.status, first.body)
		other := keyed("k1")
		other.body = strings.Replace(other.body, "1999", "1", 1)
		reused := other.send(s)
		replay := keyed("k1").send(s)
		require.Len(t, s.Effects(), 1)
		inject(t, s, Fault{Kind: Slow, Delay: time.Minute, Key: "k2", Send: 1})
		ended := make(chan reply)
		go func() { ended <- keyed("k2").send(s) }()
		time.Sleep(time.Second)
		running := keyed("k2").send(s)
		require.Equal(t, 201, (<-ended).status)
		require.Equal(t, 201, pay("").send(s).status, "keys are optional")
		require.Equal(t, 400, keyed(strings.Repeat("x", 256)).send(s).status)
		test(t, s, first, replay, reused, running)
	})
}

func TestLikeStripe(t *testing.T) {
	inLike(t, Stripe, func(t *testing.T, s *Server, first, replay, reused, running reply) {
		require.Equal(t, "req_1", first.header.Get("Request-Id"))
		require.Equal(t, 201, replay.status)
		require.Equal(t, "true", replay.header.Get("Idempotent-Replayed"))
		require.Equal(t, "req_3", replay.header.Get("Request-Id"))
		require.Equal(t, 400, reused.status)
		require.Equal(t, "idempotency_error", reused.at(t, "error", "type"))
		require.Equal(t, 409, running.status)
		require.Equal(t, "idempotency_key_in_use", running.at(t, "error", "code"))
		require.Empty(t, running.header.Get("Retry-After"))
		inject(t, s, Fault{Kind: Status, Status: 500, Key: "k3", Send: 1})
		require.Equal(t, 500, pay("k3").send(s).status)
		again := pay("k3").send(s)
		require.Equal(t, 500, again.status, "a 500 is stored")
		require.Equal(t, "true", again.header.Get("Idempotent-Replayed"))
	})
}

func TestLikePayPal(t *testing.T) {
	inLike(t, PayPal, func(t *testing.T, s *Server, first, replay, reused, running reply) {
		require.Equal(t, 200, replay.status)
		require.Equal(t, first.body, replay.body)
		require.Empty(t, replay.header.Get("Idempotent-Replay"))
		require.Equal(t, "PAYPAL_REQUEST_ID_PREVIOUSLY_USED", reused.at(t, "details", "issue"))
		require.Equal(t, 422, reused.status)
		require.Equal(t, "PREVIOUS_REQUEST_IN_PROGRESS", running.at(t, "details", "issue"))
		require.Equal(t, 409, running.status)
		refund := call{method: "POST", path: first.header.Get("Location") + "/refunds", body: `{"amount":99}`}
		require.Equal(t, 201, refund.send(s).status)
		now := pay("").with("PayPal-Request-Id", "k1").send(s)
		require.Equal(t, 99.0, now.at(t, "refunded"), "a replay shows the payment as it is now")
		require.Equal(t, 400, pay("").with("PayPal-Request-Id", strings.Repeat("x", 109)).send(s).status)
	})
}

func TestLikeAdyen(t *testing.T) {
	inLike(t, Adyen, func(t *testing.T, s *Server, first, replay, reused, running reply) {
		require.Equal(t, "k1", first.header.Get("Idempotency-Key"))
		require.Equal(t, first.body, replay.body)
		require.Equal(t, 422, reused.status)
		require.Equal(t, 422, running.status)
		require.Equal(t, "704", running.at(t, "errorCode"))
		require.Equal(t, "true", running.header.Get("Transient-Error"))
		require.Equal(t, "k2", running.header.Get("Idempotency-Key"))
	})
}

func TestLikeGoCardless(t *testing.T) {
	inLike(t, GoCardless, func(t *testing.T, s *Server, first, replay, reused, running reply) {
		require.Equal(t, 409, replay.status)
		require.Equal(t, "invalid_state", replay.at(t, "error", "type"))
		require.Equal(t, "idempotent_creation_conflict", replay.at(t, "error", "errors", "reason"))
		require.Equal(t, first.at(t, "id"), replay.at(t, "error", "errors", "links", "conflicting_resource_id"))
		require.Equal(t, first.at(t, "id"), replay.at(t, "error", "links", "conflicting_resource_id"))
		require.Equal(t, 409, running.status)
		declined := pay("k3")
		declined.body = strings.Replace(declined.body, "tok_visa", "tok_declined", 1)
		require.Equal(t, 402, declined.send(s).status)
		require.Equal(t, 402, declined.send(s).status, "nothing was created, so nothing conflicts")
	})
}

func TestLikeIncrease(t *testing.T) {
	inLike(t, Increase, func(t *testing.T, s *Server, first, replay, reused, running reply) {
		require.Equal(t, 201, replay.status)
		require.Equal(t, "true", replay.header.Get("Idempotent-Replayed"))
		require.Equal(t, 409, reused.status)
		require.Equal(t, "idempotency_key_already_used_error", reused.at(t, "type"))
		require.Equal(t, first.at(t, "id"), reused.at(t, "resource_id"))
	})
}
