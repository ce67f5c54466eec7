package signature_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/webhook"
)

// hash is HMAC-SHA256 as the specifications say it, for the oracles.
func hash(key []byte, text string) []byte {
	m := hmac.New(sha256.New, key)
	_, _ = m.Write([]byte(text)) // a hash takes everything
	return m.Sum(nil)
}

// within reports whether n seconds are within the tolerance at every moment since from, or
// at none, with a second to spare. Where the border lies in between, nobody knows when
// the verifier looked at the clock, and either answer is right.
func within(n int64, from time.Time) (yes, no bool) {
	if n > 1<<40 || n < -1<<40 {
		return false, true
	}
	least, most := from.Unix()-n, time.Now().Unix()-n
	return -299 < least && most < 299, most < -301 || least > 301
}

// FuzzStandardWebhooks: what is taken is signed by somebody who has the secret,
// in time; and what was signed is taken.
func FuzzStandardWebhooks(f *testing.F) {
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secretOne, "whsec_"))
	require.NoError(f, err)
	verify := standard(f, secretOne)
	h := signed(f, fakeserver.StandardWebhooks, "msg_1", time.Now(), "{}", secretOne)
	f.Add("msg_1", h.Get("Webhook-Timestamp"), h.Get("Webhook-Signature"), "{}")
	f.Add("msg_1", h.Get("Webhook-Timestamp"), "v1,x  "+h.Get("Webhook-Signature")+" v2,y", "{}")
	f.Add("msg_1", "+"+h.Get("Webhook-Timestamp"), h.Get("Webhook-Signature"), "{}")
	f.Add("msg.1", "1", "v1", "")
	f.Add("", "-9223372036854775808", ",", "\xff")
	f.Fuzz(func(t *testing.T, id, stamp, line, body string) {
		header := http.Header{"Webhook-Id": {id}, "Webhook-Timestamp": {stamp}, "Webhook-Signature": {line}}
		from := time.Now()
		got, err := verify(header, []byte(body))
		if err == nil {
			require.Equal(t, id, got)
			n, bad := strconv.ParseInt(stamp, 10, 64)
			require.NoError(t, bad)
			_, late := within(n, from)
			require.False(t, late)
			right := "v1," + base64.StdEncoding.EncodeToString(hash(key, fmt.Sprintf("%s.%d.%s", id, n, body)))
			require.Contains(t, " "+line+" ", right)
		} else {
			require.Empty(t, got)
		}
		if id == "" || strings.Contains(id, ".") {
			return
		}
		now := time.Now().Unix()
		header.Set("Webhook-Timestamp", strconv.FormatInt(now, 10))
		header.Set("Webhook-Signature", strings.TrimSpace("v1,"+base64.StdEncoding.EncodeToString(hash(key, fmt.Sprintf("%s.%d.%s", id, now, body)))+" "+line))
		got, err = verify(header, []byte(body))
		require.NoError(t, err)
		require.Equal(t, id, got)
	})
}

// FuzzStripe: as FuzzStandardWebhooks.
func FuzzStripe(f *testing.F) {
	verify := stripe(f, secretOne)
	body := `{"id":"evt_1"}`
	line := signed(f, fakeserver.StripeSignature, "", time.Now(), body, secretOne).Get("Stripe-Signature")
	f.Add(line, body)
	f.Add(line+",v0=00,t=1", body)
	f.Add("t=1,"+line, body)
	f.Add("t=9223372036854775807,v1=00,v1", "")
	f.Fuzz(func(t *testing.T, line, body string) {
		from := time.Now()
		id, err := verify(http.Header{"Stripe-Signature": {line}}, []byte(body))
		if err != nil {
			require.Empty(t, id)
			return
		}
		proved := false
		for one := range strings.SplitSeq(line, ",") { // some t of the line must be in time and signed
			stamp, ok := strings.CutPrefix(one, "t=")
			if !ok {
				continue
			}
			n, bad := strconv.ParseInt(stamp, 10, 64)
			require.NoError(t, bad)
			if _, late := within(n, from); late {
				continue
			}
			sum := hex.EncodeToString(hash([]byte(secretOne), fmt.Sprintf("%d.%s", n, body)))
			proved = proved || strings.Contains(strings.ToLower(line), "v1="+sum)
		}
		require.True(t, proved, "%q", line)
	})
}

// FuzzTimestamp: a time that is rightly signed is taken within 5 minutes and
// never outside, whatever the number is.
func FuzzTimestamp(f *testing.F) {
	for _, n := range []int64{0, -1, 299, -299, 301, -301, 1 << 62, -1 << 63, 1<<63 - 1 - 1796000000} {
		f.Add(n)
	}
	verifyStandard, verifyStripe := standard(f, secretOne), stripe(f, secretOne)
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secretOne, "whsec_"))
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, off int64) {
		from := time.Now()
		n := from.Unix() + off // may wrap around, which is one more odd number
		stamp, body := strconv.FormatInt(n, 10), `{"id":"evt_1"}`
		_, one := verifyStandard(http.Header{
			"Webhook-Id": {"evt_1"}, "Webhook-Timestamp": {stamp},
			"Webhook-Signature": {"v1," + base64.StdEncoding.EncodeToString(hash(key, "evt_1."+stamp+"."+body))},
		}, []byte(body))
		_, two := verifyStripe(http.Header{
			"Stripe-Signature": {"t=" + stamp + ",v1=" + hex.EncodeToString(hash([]byte(secretOne), stamp+"."+body))},
		}, []byte(body))
		yes, no := within(n, from)
		for _, err := range []error{one, two} {
			if yes {
				require.NoError(t, err)
			}
			if no {
				require.ErrorIs(t, err, webhook.ErrTimestamp)
			}
		}
	})
}
