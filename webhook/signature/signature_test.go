package signature_test

import (
	"encoding/base64"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"
	stripewebhook "github.com/stripe/stripe-go/v85/webhook"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/webhook"
	"github.com/idem-go/idem/webhook/signature"
)

const (
	secretOne = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	secretTwo = "whsec_ZmFrZXNlcnZlciB0ZXN0IHNlY3JldCwgMjQr"
)

func standard(t testing.TB, secrets ...string) webhook.Verifier {
	t.Helper()
	v, err := signature.StandardWebhooks(secrets...)
	require.NoError(t, err)
	return v
}

func stripe(t testing.TB, secrets ...string) webhook.Verifier {
	t.Helper()
	v, err := signature.Stripe(secrets...)
	require.NoError(t, err)
	return v
}

// signed are the headers of the fake server, which shares no code with the
// libraries.
func signed(t testing.TB, scheme fakeserver.Scheme, id string, at time.Time, body string, secrets ...string) http.Header {
	t.Helper()
	h, err := fakeserver.Endpoint{Scheme: scheme, Secrets: secrets}.Sign(id, at, []byte(body))
	require.NoError(t, err)
	return h
}

// schemes are both, with an event each of the id msg_1.
var schemes = map[fakeserver.Scheme]struct {
	verify func(testing.TB, ...string) webhook.Verifier
	body   string
}{
	fakeserver.StandardWebhooks: {standard, `{"type":"payment.succeeded"}`},
	fakeserver.StripeSignature:  {stripe, `{"id":"msg_1","object":"event","type":"payment.succeeded"}`},
}

func TestSecretsMayBeReplacedOnEitherSide(t *testing.T) {
	for scheme, s := range schemes {
		for name, c := range map[string]struct {
			signs, verifies []string
			genuine         bool
		}{
			"one":                           {[]string{secretOne}, []string{secretOne}, true},
			"the sender has a new one too":  {[]string{secretTwo, secretOne}, []string{secretOne}, true},
			"the receiver has it too":       {[]string{secretTwo}, []string{secretOne, secretTwo}, true},
			"both have both":                {[]string{secretOne, secretTwo}, []string{secretTwo, secretOne}, true},
			"the old one was taken away":    {[]string{secretOne}, []string{secretTwo}, false},
			"both of the sender are others": {[]string{secretOne, secretOne}, []string{secretTwo}, false},
		} {
			id, err := s.verify(t, c.verifies...)(signed(t, scheme, "msg_1", time.Now(), s.body, c.signs...), []byte(s.body))
			if c.genuine {
				require.NoError(t, err, "%s %s", scheme, name)
				require.Equal(t, "msg_1", id)
			} else {
				require.ErrorIs(t, err, webhook.ErrSignature, "%s %s", scheme, name)
			}
		}
	}
}

func TestFiveMinutesAreAllowedBetweenTheClocks(t *testing.T) {
	for scheme, s := range schemes {
		synctest.Test(t, func(t *testing.T) { // so that the clock stands still
			for seconds, genuine := range map[int]bool{0: true, -299: true, 299: true, -301: false, 301: false, -86400: false, 86400: false} {
				h := signed(t, scheme, "msg_1", time.Now().Add(time.Duration(seconds)*time.Second), s.body, secretOne)
				_, err := s.verify(t, secretOne)(h, []byte(s.body))
				if genuine {
					require.NoError(t, err, "%s %d", scheme, seconds)
				} else {
					require.ErrorIs(t, err, webhook.ErrTimestamp, "%s %d", scheme, seconds)
				}
			}
		})
	}
}

func TestWhatIsNotAsItWasSignedIsRefused(t *testing.T) {
	for scheme, s := range schemes {
		verify := s.verify(t, secretOne)
		good := func() http.Header { return signed(t, scheme, "msg_1", time.Now(), s.body, secretOne) }
		_, err := verify(good(), []byte(s.body))
		require.NoError(t, err)
		for name, body := range map[string]string{"longer": s.body + " ", "shorter": s.body[:len(s.body)-1], "empty": "", "another": strings.Replace(s.body, "p", "q", 1)} {
			_, err := verify(good(), []byte(body))
			require.ErrorIs(t, err, webhook.ErrSignature, "%s: the body is %s", scheme, name)
		}
		for name := range good() {
			h := good()
			h.Del(name)
			_, err := verify(h, []byte(s.body))
			require.ErrorIs(t, err, webhook.ErrSignature, "%s without %s", scheme, name)
		}
		_, err = verify(http.Header{}, []byte(s.body))
		require.ErrorIs(t, err, webhook.ErrSignature)
	}

	verify, body := standard(t, secretOne), `{"type":"payment.succeeded"}`
	for name, c := range map[string]struct {
		header, value string
		want          error
	}{
		"another id":              {"webhook-id", "msg_2", webhook.ErrSignature},
		"another time":            {"webhook-timestamp", strconv.FormatInt(time.Now().Unix()-7, 10), webhook.ErrSignature},
		"no number":               {"webhook-timestamp", "soon", webhook.ErrTimestamp},
		"a number with a point":   {"webhook-timestamp", "1.5", webhook.ErrTimestamp},
		"too large a number":      {"webhook-timestamp", "99999999999999999999", webhook.ErrTimestamp},
		"the largest number":      {"webhook-timestamp", "9223372036854775807", webhook.ErrTimestamp},
		"the smallest number":     {"webhook-timestamp", "-9223372036854775808", webhook.ErrTimestamp},
		"an empty signature":      {"webhook-signature", "v1,", webhook.ErrSignature},
		"only a version":          {"webhook-signature", "v1", webhook.ErrSignature},
		"only commas":             {"webhook-signature", ",,, ,", webhook.ErrSignature},
		"an id with a full stop":  {"webhook-id", "msg.1", webhook.ErrID},
		"an asymmetric signature": {"webhook-signature", "v1a," + strings.Repeat("A", 88), webhook.ErrSignature},
	} {
		h := signed(t, fakeserver.StandardWebhooks, "msg_1", time.Now(), body, secretOne)
		h.Set(c.header, c.value)
		_, err := verify(h, []byte(body))
		require.ErrorIs(t, err, c.want, name)
		require.NotContains(t, err.Error(), c.value)
	}
	h := signed(t, fakeserver.StandardWebhooks, "msg_1", time.Now(), body, secretOne)
	h.Set("webhook-signature", strings.Replace(h.Get("webhook-signature"), "v1,", "v2,", 1))
	_, err := verify(h, []byte(body))
	require.ErrorIs(t, err, webhook.ErrSignature, "the right signature under another version")

	for name, c := range map[string]struct {
		line string
		want error
	}{
		"empty":                {"", webhook.ErrSignature},
		"no time":              {"v1=00", webhook.ErrTimestamp},
		"no number":            {"t=soon,v1=00", webhook.ErrSignature},
		"no signature":         {"t=" + strconv.FormatInt(time.Now().Unix(), 10), webhook.ErrSignature},
		"not hexadecimal":      {"t=" + strconv.FormatInt(time.Now().Unix(), 10) + ",v1=xyz", webhook.ErrSignature},
		"the largest number":   {"t=9223372036854775807,v1=00", webhook.ErrTimestamp},
		"the scheme for tests": {"t=" + strconv.FormatInt(time.Now().Unix(), 10) + ",v0=" + strings.Repeat("0", 64), webhook.ErrSignature},
	} {
		_, err := stripe(t, secretOne)(http.Header{"Stripe-Signature": {c.line}}, []byte(`{"id":"evt_1"}`))
		require.ErrorIs(t, err, c.want, name)
	}
}

// The published example of the specification's library.
func TestTheVectorOfStandardWebhooksIsGenuine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Unix(1614265330, 0)))
		body := []byte(`{"test": 2432232314}`)
		id, err := standard(t, "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")(http.Header{
			"Webhook-Id":        {"msg_p5jXN8AQM9LWM0D4loKWxJek"},
			"Webhook-Timestamp": {"1614265330"},
			"Webhook-Signature": {"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE= v1,AAAA"},
		}, body)
		require.NoError(t, err)
		require.Equal(t, "msg_p5jXN8AQM9LWM0D4loKWxJek", id)
	})
}

func TestTheLibrariesAndTheFakeServerSignTheSame(t *testing.T) {
	now, body := time.Now(), `{"id":"evt_1","object":"event"}`
	w, err := standardwebhooks.NewWebhook(secretOne)
	require.NoError(t, err)
	s, err := w.Sign("msg_1", now, []byte(body))
	require.NoError(t, err)
	require.Equal(t, s, signed(t, fakeserver.StandardWebhooks, "msg_1", now, body, secretOne).Get("webhook-signature"))
	p := stripewebhook.GenerateTestSignedPayload(&stripewebhook.UnsignedPayload{Payload: []byte(body), Secret: secretOne, Timestamp: now})
	require.Equal(t, p.Header, signed(t, fakeserver.StripeSignature, "", now, body, secretOne).Get("Stripe-Signature"))
	id, err := stripe(t, secretOne)(http.Header{"Stripe-Signature": {p.Header}}, []byte(body))
	require.NoError(t, err)
	require.Equal(t, "evt_1", id)
}

func TestTheNamesOfSvixAreReadWhereTheStandardOnesAreNotThere(t *testing.T) {
	body := `{"type":"user.created"}`
	h := signed(t, fakeserver.StandardWebhooks, "msg_1", time.Now(), body, secretOne)
	svix := http.Header{}
	for _, part := range []string{"Id", "Timestamp", "Signature"} {
		svix.Set("Svix-"+part, h.Get("Webhook-"+part))
	}
	id, err := standard(t, secretOne)(svix, []byte(body))
	require.NoError(t, err)
	require.Equal(t, "msg_1", id)
	svix.Set("Webhook-Id", "msg_2")
	_, err = standard(t, secretOne)(svix, []byte(body))
	require.ErrorIs(t, err, webhook.ErrSignature, "names are not mixed")
}

func TestAStripeEventWithoutAnIdIsRefused(t *testing.T) {
	for _, body := range []string{`{"object":"event"}`, `[]`, `not JSON`, `{"id":7}`, ``} {
		h := signed(t, fakeserver.StripeSignature, "", time.Now(), body, secretOne)
		id, err := stripe(t, secretOne)(h, []byte(body))
		if err == nil {
			require.Empty(t, id, "which Handler refuses")
		} else {
			require.ErrorIs(t, err, webhook.ErrID)
		}
	}
}

func TestSecretsThatCannotBeRightAreNamedAndNotRepeated(t *testing.T) {
	short := base64.StdEncoding.EncodeToString(make([]byte, 23))
	long := base64.StdEncoding.EncodeToString(make([]byte, 65))
	for _, secrets := range [][]string{
		{}, {""}, {"whsec_"}, {"SECRET not base64!"}, {"whsec_" + short}, {long}, {secretOne, "SECRET"},
	} {
		_, err := signature.StandardWebhooks(secrets...)
		require.ErrorIs(t, err, webhook.ErrInvalid, "%q", secrets)
		require.NotContains(t, err.Error(), "SECRET")
		require.NotContains(t, err.Error(), short)
	}
	for _, secrets := range [][]string{{}, {""}, {secretOne, ""}, {"SECRET"},
		{"whsec_a SECRET with an end \n"}, {" whsec_another SECRET of it"}, {"whsec_one more SECRET of it\t"},
		{"sk_live_SECRETSECRETSECRET"}, {"rk_live_SECRETSECRETSECRET"}, {secretOne, "pk_test_SECRETSECRETSECRET"},
	} {
		_, err := signature.Stripe(secrets...)
		require.ErrorIs(t, err, webhook.ErrInvalid, "%q", secrets)
		require.NotContains(t, err.Error(), "SECRET")
	}
	for secret, text := range map[string]string{
		secretTwo + "\n":             "webhook: invalid: secret 2 has white space at an end",
		"sk_live_xxxxxxxxxxxxxxxxxx": "webhook: invalid: secret 2 is an API key (sk_); the secret of an endpoint begins with whsec_",
	} {
		_, err := signature.Stripe(secretOne, secret)
		require.EqualError(t, err, text)
	}
	_, err := signature.StandardWebhooks(secretOne, "whsec_???")
	require.EqualError(t, err, "webhook: invalid: secret 2 is not base64 (with or without whsec_ before it)")
}
