package fakeserver

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The id, time, secret, body and signature are those that the reference libraries of the specification 1.0.0 test with.
func TestStandardSignatureIsThePublishedOne(t *testing.T) {
	e := Endpoint{Secrets: []string{"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}}
	h, err := e.Sign("msg_p5jXN8AQM9LWM0D4loKWxJek", time.Unix(1614265330, 0), []byte(`{"test": 2432232314}`))
	require.NoError(t, err)
	require.Equal(t, http.Header{
		"Webhook-Id":        {"msg_p5jXN8AQM9LWM0D4loKWxJek"},
		"Webhook-Timestamp": {"1614265330"},
		"Webhook-Signature": {"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="},
	}, h)
}

// Both sums were made with: printf '1614265330.{"id":"evt_1"}' | openssl dgst -sha256 -hmac <secret>
func TestStripeSignatureIsTheSumOfTimeAndBody(t *testing.T) {
	e := Endpoint{Scheme: StripeSignature, Secrets: []string{"whsec_test_secret", "whsec_test_secret_rolled_key"}}
	h, err := e.Sign("evt_1", time.Unix(1614265330, 0), []byte(`{"id":"evt_1"}`))
	require.NoError(t, err)
	require.Equal(t, http.Header{"Stripe-Signature": {"t=1614265330" +
		",v1=e135cdbed3dda004bf8a2fb350f2541d299393c770e0b9e6e319dc595e9072aa" +
		",v1=3b96d0e742698b8c04b5714dc896f5fa9ba83504f79fd76ba41c4228b008c62e"}}, h)
}

func TestTwoSecretsMakeTwoStandardSignatures(t *testing.T) {
	at, body := time.Unix(1614265330, 0), []byte(`{}`)
	sign := func(secrets ...string) string {
		h, err := Endpoint{Secrets: secrets}.Sign("msg_1", at, body)
		require.NoError(t, err)
		return h.Get("Webhook-Signature")
	}
	require.Equal(t, sign(secretOne)+" "+sign(secretTwo), sign(secretOne, secretTwo))
	require.NotEqual(t, sign(secretOne), sign(secretTwo))
}

func TestTheStandardScheduleEndsAfterSeventyFiveHours(t *testing.T) {
	var sum time.Duration
	for _, wait := range StandardSchedule() {
		sum += wait
	}
	require.Equal(t, "75h35m5s", sum.String())
}

func TestWrongEndpointsNameTheField(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		h, secrets := http.NotFoundHandler(), []string{secretOne}
		for field, wrong := range map[string][]Endpoint{
			"scheme": {{Scheme: "paypal", Handler: h, Secrets: secrets}},
			"url": {
				{Secrets: secrets}, {URL: "ftp://x/", Transport: s.Transport(), Secrets: secrets},
				{URL: "http://ada:pw1@x/", Transport: s.Transport(), Secrets: secrets},
				{URL: "http:///x", Transport: s.Transport(), Secrets: secrets},
				{URL: "http://pw1\x7f/", Transport: s.Transport(), Secrets: secrets},
				{URL: "http://x/", Handler: h, Secrets: secrets},
			},
			"transport": {{Handler: h, Transport: s.Transport(), Secrets: secrets}},
			"secrets": {
				{Handler: h}, {Handler: h, Secrets: []string{""}}, {Handler: h, Secrets: []string{"whsec_pw1"}},
				{Handler: h, Secrets: []string{"whsec_cHcx"}}, {Handler: h, Secrets: []string{secretOne, secretOne[6:]}},
				{Handler: h, Scheme: StripeSignature, Secrets: []string{""}},
			},
			"timeout":   {{Handler: h, Secrets: secrets, Timeout: -1}},
			"parallel":  {{Handler: h, Secrets: secrets, Parallel: -1}},
			"schedule":  {{Handler: h, Secrets: secrets, Schedule: []time.Duration{0, -1}}},
			"id_prefix": {{Handler: h, Secrets: secrets, IDPrefix: "a.b"}, {Handler: h, Secrets: secrets, IDPrefix: strings.Repeat("x", 65)}},
		} {
			for _, e := range wrong {
				err := s.Register(e)
				require.ErrorContains(t, err, "fakeserver: endpoint: "+field+":", "%+v", e)
				require.NotContains(t, err.Error(), "pw1", "no secret is repeated")
				require.NotContains(t, err.Error(), "cHcx")
			}
		}
		payFor(t, s, "order-1")
		require.Empty(t, s.Events(), "none of them is registered")
		s.Close()
		require.ErrorIs(t, s.Register(Endpoint{Handler: h, Secrets: secrets}), http.ErrServerClosed)
	})
}

func TestAServerInMemoryReachesNoURLWithoutATransport(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		e := Endpoint{URL: s.URL() + "/hooks/", Secrets: []string{secretOne}}
		require.ErrorContains(t, s.Register(e), "fakeserver: endpoint: url:")
		e.Transport = s.Transport()
		require.NoError(t, s.Register(e))
		r := &receiver{secrets: e.Secrets}
		s.Mount("/hooks/", r)
		payFor(t, s, "order-1")
		settled(t, s)
		require.Equal(t, map[string]int{"order-1": 1}, r.times())
		require.Equal(t, e.URL, s.Events()[0].Endpoint, "the URL is its name")
	})
}
