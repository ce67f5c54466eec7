package fakeserver

import (
	"fmt"
	"time"
)

// Provider names a real provider; see [Like].
type Provider string

const (
	// Stripe is the API v1: docs.stripe.com/api/idempotent_requests and docs.stripe.com/error-low-level.
	Stripe Provider = "stripe"
	// PayPal is the orders API v2: a replay is a 200 without a mark, and shows the resource as it is now.
	PayPal Provider = "paypal"
	// Adyen says 422 and errorCode 704 while the first request runs, and echoes the key.
	Adyen Provider = "adyen"
	// GoCardless does not replay: it says 409 and where the resource is, errors[0].links.conflicting_resource_id.
	GoCardless Provider = "gocardless"
	// Increase says 409 and a resource_id when the key was used for another payload.
	Increase Provider = "increase"
)

// Like gives the settings of a server that treats keys as a real provider does, as far as that is public: name and length
// of the key, retention, replays, and its answers to a reused key and to one in progress. A request without a key is
// executed. Where a provider says nothing the default stays. Routes, resources and all other errors stay those of this package; [Server.Handle] adds yours.
// Stripe's store a 5xx ([StoreFailures]): an operation that meets one before the effect, in a [Mixed] for example, rightly
// ends without an effect; see [Server.AssertAtMostOneEffectPerOperation].
// The settings can be changed further before [Server.Apply]. An unknown name panics.
func Like(p Provider) Settings {
	t := Settings{Optional: true, InProgressRetryAfter: "-"}
	switch p {
	case Stripe:
		t.KeyPer = PerAccount
		t.Failures = StoreFailures
		t.ReplayHeader = "Idempotent-Replayed"
		t.RequestIDHeader = "Request-Id"
		t.MismatchStatus = 400
		t.MismatchBody = `{"error":{"type":"idempotency_error","message":"Keys for idempotent requests can only be used with the same parameters they were first used with."}}`
		t.InProgressStatus = 409
		t.InProgressBody = `{"error":{"type":"idempotency_error","code":"idempotency_key_in_use","message":"There is currently another in-progress request using this Idempotent Key."}}`
	case PayPal:
		t.KeyHeader = "PayPal-Request-Id"
		t.MaxKey = 108
		t.Retention = 6 * time.Hour
		t.ReplayHeader = "-"
		t.ReplayStatus = 200
		t.ReplayCurrent = true
		t.RequestIDHeader = "Paypal-Debug-Id"
		t.MismatchStatus = 422
		t.MismatchBody = `{"name":"UNPROCESSABLE_ENTITY","details":[{"issue":"PAYPAL_REQUEST_ID_PREVIOUSLY_USED"}]}`
		t.InProgressStatus = 409
		t.InProgressBody = `{"name":"RESOURCE_CONFLICT","details":[{"issue":"PREVIOUS_REQUEST_IN_PROGRESS"}]}`
	case Adyen:
		t.KeyPer = PerAccount
		t.MaxKey = 64
		t.Retention = 7 * 24 * time.Hour
		t.ReplayHeader = "-"
		t.EchoKey = true
		t.InProgressStatus = 422
		t.InProgressBody = `{"status":422,"errorCode":"704","message":"request already processed or in progress","errorType":"validation"}`
		t.InProgressHeader = "Transient-Error: true"
	case GoCardless:
		t.ReplayHeader = "-"
		t.DoneStatus = 409
		t.DoneBody = `{"error":{"type":"invalid_state","code":409,"errors":[{"reason":"idempotent_creation_conflict",` +
			`"message":"A resource has already been created with this idempotency key",` +
			`"links":{"conflicting_resource_id":"{id}"}}],"links":{"conflicting_resource_id":"{id}"}}}`
	case Increase:
		t.MaxKey = 200
		t.ReplayHeader = "Idempotent-Replayed"
		t.MismatchStatus = 409
		t.MismatchBody = `{"type":"idempotency_key_already_used_error","title":"An object has already been created using that idempotency key.","status":409,"resource_id":"{id}"}`
	default:
		panic(fmt.Sprintf("fakeserver: unknown provider %q", string(p)))
	}
	return t
}
