package fakeserver

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"
	"time"
)

// Scheme says how the deliveries of an [Endpoint] are signed, and what an event looks like.
type Scheme string

const (
	// StandardWebhooks is the symmetric scheme of the specification 1.0.0, standardwebhooks.com: the headers webhook-id,
	// webhook-timestamp and webhook-signature, with "v1," and the base64 HMAC-SHA256 of "id.timestamp.body" for each secret.
	// An event is {"type","timestamp","data"}; the timestamp in it is that of the effect. The zero Scheme is this.
	StandardWebhooks Scheme = "standard-webhooks"

	// StripeSignature is Stripe's scheme v1, docs.stripe.com/webhooks/signature: the header Stripe-Signature, "t=" and the
	// time, and ",v1=" and the hexadecimal HMAC-SHA256 of "t.body" for each secret. An event is
	// {"id","object":"event","type","created","livemode","data":{"object"}}, without an api_version.
	StripeSignature Scheme = "stripe-signature"
)

func (c Scheme) idPrefix() string {
	if c == StripeSignature {
		return "evt_"
	}
	return "msg_"
}

// sign gives the headers of a delivery, the signature last.
func (c Scheme) sign(keys [][]byte, id string, at time.Time, body []byte) []field {
	seconds := strconv.FormatInt(at.Unix(), 10)
	if c == StripeSignature {
		value := "t=" + seconds
		for _, key := range keys {
			value += ",v1=" + hex.EncodeToString(authentic(key, seconds+".", body))
		}
		return []field{{"Stripe-Signature", value}}
	}
	signatures := make([]string, len(keys))
	for i, key := range keys {
		signatures[i] = "v1," + base64.StdEncoding.EncodeToString(authentic(key, id+"."+seconds+".", body))
	}
	return []field{
		{"webhook-id", id},
		{"webhook-timestamp", seconds},
		{"webhook-signature", strings.Join(signatures, " ")},
	}
}

func authentic(key []byte, before string, body []byte) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(before))
	mac.Write(body)
	return mac.Sum(nil)
}

// eventData is what an event says of its effect.
type eventData struct {
	ID        string `json:"id"` // of the resource
	Object    string `json:"object"`
	Reference string `json:"reference"`
	Amount    int64  `json:"amount,omitempty"`
	Status    string `json:"status,omitempty"`
	Note      string `json:"note,omitempty"`    // the fault that changed the content
	Padding   string `json:"padding,omitempty"` // of the fault Huge
}

// body is an event as it is sent. Attempted is the time of the delivery; zero = it is not in there.
func (c Scheme) body(id, kind string, at, attempted time.Time, data eventData) []byte {
	tried := ""
	if !attempted.IsZero() {
		tried = attempted.UTC().Format(time.RFC3339Nano)
	}
	if c == StripeSignature {
		type object struct {
			Object eventData `json:"object"`
		}
		return marshal(struct {
			ID        string `json:"id"`
			Object    string `json:"object"`
			Type      string `json:"type"`
			Created   int64  `json:"created"`
			Live      bool   `json:"livemode"`
			Attempted string `json:"attempted_at,omitempty"`
			Data      object `json:"data"`
		}{id, "event", kind, at.Unix(), false, tried, object{data}})
	}
	return marshal(struct {
		Type      string    `json:"type"`
		Timestamp string    `json:"timestamp"`
		Attempted string    `json:"attempted_at,omitempty"`
		Data      eventData `json:"data"`
	}{kind, at.UTC().Format(time.RFC3339Nano), tried, data})
}

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("fakeserver: event does not marshal: " + err.Error()) // plain structs of strings and numbers always do
	}
	return b
}

// eventOf says what an effect is called as an event. s.mu is held.
func (s *Server) eventOf(e Effect) (kind string, data eventData) {
	data = eventData{ID: e.ID, Object: e.Kind, Reference: e.Reference, Amount: e.Amount}
	switch e.Kind {
	case "payment":
		data.Status = "succeeded"
		return "payment.succeeded", data
	case "status":
		data.Object = "payment"
		if p := s.payments.byID[e.ID]; p != nil {
			data.Status = p.Status
		}
		return "payment." + data.Status, data
	case "refund":
		data.Status = "succeeded"
		return "refund.succeeded", data
	case "reservation":
		data.Status = "confirmed"
		return "reservation.confirmed", data
	case "cancellation":
		data.Object, data.Status = "reservation", "cancelled"
		return "reservation.cancelled", data
	case "upload":
		return "upload.stored", data
	default:
		return "request.handled", data
	}
}
