// Package signature verifies deliveries for package webhook, with the
// libraries that the senders publish.
//
//	verify, err := signature.StandardWebhooks(os.Getenv("WEBHOOK_SECRET"))
//	if err != nil {
//		return err
//	}
//	http.Handle("POST /hooks/shop", &webhook.Handler{Source: "shop", Verify: verify, Journal: j, Next: next})
//
// Several secrets are for the time in which one is being replaced: a delivery
// is genuine if it is signed with any of them. Both schemes compare in constant time
// and allow 5 minutes between the clocks, backward and forward. Keep the clock of
// the receiver right.
package signature

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	stripewebhook "github.com/stripe/stripe-go/v85/webhook"

	"github.com/idem-go/idem/webhook"
)

const (
	secretPrefix = "whsec_"
	// The specification: "between 24 bytes (192 bits) and 64 bytes (512 bits)".
	leastSecret, mostSecret = 24, 64
)

// apiKeys are how the keys of Stripe's API begin: secret, restricted, publishable.
var apiKeys = []string{"sk_", "rk_", "pk_"}

// StandardWebhooks verifies the symmetric scheme (v1) of Standard Webhooks 1.0.0,
// https://www.standardwebhooks.com, with its reference library; the id is the header
// webhook-id. Senders that use Svix say svix-id, svix-timestamp and
// svix-signature for the same; where the first of them is there and webhook-id is not,
// these are read. Asymmetric signatures (v1a) are not verified.
//
// A secret is the base64 of 24 to 64 bytes, with or without whsec_ before it. Errors: one that
// matches webhook.ErrInvalid and does not repeat the secret.
func StandardWebhooks(secrets ...string) (webhook.Verifier, error) {
	if len(secrets) == 0 {
		return nil, fmt.Errorf("%w: there is no secret; at least one is needed", webhook.ErrInvalid)
	}
	keys := make([]*standardwebhooks.Webhook, len(secrets))
	for i, s := range secrets {
		raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(s, secretPrefix))
		if err != nil {
			return nil, fmt.Errorf("%w: secret %d is not base64 (with or without whsec_ before it)", webhook.ErrInvalid, i+1) // the error would quote it
		}
		if len(raw) < leastSecret || len(raw) > mostSecret {
			return nil, fmt.Errorf("%w: secret %d has %d bytes; it must have %d to %d", webhook.ErrInvalid, i+1, len(raw), leastSecret, mostSecret)
		}
		if keys[i], err = standardwebhooks.NewWebhookRaw(raw); err != nil {
			return nil, fmt.Errorf("%w: secret %d cannot be used", webhook.ErrInvalid, i+1)
		}
	}
	return func(header http.Header, body []byte) (string, error) {
		h := standardHeader(header)
		id := h.Get(standardwebhooks.HeaderWebhookID)
		// What is signed is "id.timestamp.body": a full stop in the id would let
		// its end be taken for a timestamp.
		if strings.Contains(id, ".") {
			return "", fmt.Errorf("%w: it has a full stop", webhook.ErrID)
		}
		err := webhook.ErrSignature
		for _, k := range keys {
			if err = standardError(k.Verify(body, h)); err == nil {
				return id, nil
			}
		}
		return "", err
	}, nil
}

// standardHeader has the three headers under their standard names.
func standardHeader(h http.Header) http.Header {
	if h.Get(standardwebhooks.HeaderWebhookID) != "" || h.Get("svix-id") == "" {
		return h
	}
	out := http.Header{}
	out.Set(standardwebhooks.HeaderWebhookID, h.Get("svix-id"))
	out.Set(standardwebhooks.HeaderWebhookTimestamp, h.Get("svix-timestamp"))
	out.Set(standardwebhooks.HeaderWebhookSignature, h.Get("svix-signature"))
	return out
}

// standardError says the same in the words of package webhook. The texts of the library
// quote the header.
func standardError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, standardwebhooks.ErrMessageTooOld):
		return fmt.Errorf("%w: it is too old", webhook.ErrTimestamp)
	case errors.Is(err, standardwebhooks.ErrMessageTooNew):
		return fmt.Errorf("%w: it is of a time to come", webhook.ErrTimestamp)
	case errors.Is(err, standardwebhooks.ErrInvalidHeaders):
		return fmt.Errorf("%w: it is not a number", webhook.ErrTimestamp)
	case errors.Is(err, standardwebhooks.ErrRequiredHeaders):
		return fmt.Errorf("%w: webhook-id, webhook-timestamp or webhook-signature is missing", webhook.ErrSignature)
	}
	return webhook.ErrSignature
}

// Stripe verifies the scheme v1 of Stripe, https://docs.stripe.com/webhooks/signature,
// with stripe-go; the id is that of the event, and thin events (v2) have one too. The
// version of the API that an event is of is not looked at: that is for the one who
// reads it. Beyond stripe-go, which takes every time to come, a time more than 5 minutes
// ahead is refused.
//
// A secret is the one of the endpoint, whsec_ included. An API key (sk_, rk_, pk_) is
// none, and white space around a secret would be part of it: both are refused. Errors:
// one that matches webhook.ErrInvalid and does not repeat the secret.
func Stripe(secrets ...string) (webhook.Verifier, error) {
	if len(secrets) == 0 {
		return nil, fmt.Errorf("%w: there is no secret; at least one is needed", webhook.ErrInvalid)
	}
	for i, s := range secrets {
		if len(s) < leastSecret { // an empty one would make everything genuine
			return nil, fmt.Errorf("%w: secret %d has %d bytes; the least is %d", webhook.ErrInvalid, i+1, len(s), leastSecret)
		}
		if strings.TrimSpace(s) != s {
			return nil, fmt.Errorf("%w: secret %d has white space at an end", webhook.ErrInvalid, i+1)
		}
		for _, p := range apiKeys {
			if strings.HasPrefix(s, p) {
				return nil, fmt.Errorf("%w: secret %d is an API key (%s); the secret of an endpoint begins with %s", webhook.ErrInvalid, i+1, p, secretPrefix)
			}
		}
	}
	secrets = append([]string(nil), secrets...)
	return func(header http.Header, body []byte) (string, error) {
		line := header.Get("Stripe-Signature")
		err := webhook.ErrSignature
		for _, s := range secrets {
			if err = stripeError(stripewebhook.ValidatePayload(body, line, s)); err == nil {
				break
			}
		}
		if err != nil {
			return "", err
		}
		if time.Until(stripeTime(line)) > stripewebhook.DefaultTolerance {
			return "", fmt.Errorf("%w: it is of a time to come", webhook.ErrTimestamp)
		}
		var event struct {
			ID string `json:"id"`
		}
		if err := json.Unmarshal(body, &event); err != nil {
			return "", fmt.Errorf("%w: the body is not the JSON of an event", webhook.ErrID)
		}
		return event.ID, nil
	}, nil
}

// stripeTime is the time of a header that stripe-go has taken: the last t, as
// there.
func stripeTime(line string) (t time.Time) {
	for part := range strings.SplitSeq(line, ",") {
		if value, ok := strings.CutPrefix(part, "t="); ok {
			if n, err := strconv.ParseInt(value, 10, 64); err == nil {
				t = time.Unix(n, 0)
			}
		}
	}
	return t
}

// stripeError says the same in the words of package webhook.
func stripeError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, stripewebhook.ErrTooOld):
		return fmt.Errorf("%w: it is too old", webhook.ErrTimestamp)
	case errors.Is(err, stripewebhook.ErrNotSigned):
		return fmt.Errorf("%w: Stripe-Signature is missing", webhook.ErrSignature)
	case errors.Is(err, stripewebhook.ErrInvalidHeader):
		return fmt.Errorf("%w: Stripe-Signature cannot be read", webhook.ErrSignature)
	}
	return webhook.ErrSignature
}
