package webhook_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

// A sender with a scheme of its own: X-Time has the seconds, X-Mac the hexadecimal
// HMAC-SHA256 of "seconds.body", and the id is in the body. While the secret is being
// replaced there are two.
func ownScheme(secrets ...string) webhook.Verifier {
	const tolerance = 5 * time.Minute
	return func(h http.Header, body []byte) (string, error) {
		seconds, err := strconv.ParseInt(h.Get("X-Time"), 10, 64)
		if err != nil {
			return "", webhook.ErrTimestamp
		}
		if off := time.Since(time.Unix(seconds, 0)); off > tolerance || off < -tolerance {
			return "", webhook.ErrTimestamp
		}
		got, err := hex.DecodeString(h.Get("X-Mac"))
		if err != nil {
			return "", webhook.ErrSignature
		}
		for _, secret := range secrets {
			mac := hmac.New(sha256.New, []byte(secret))
			_, _ = fmt.Fprintf(mac, "%d.%s", seconds, body) // a hash takes everything
			if hmac.Equal(got, mac.Sum(nil)) {              // in constant time
				var event struct{ ID string }
				if json.Unmarshal(body, &event) != nil {
					return "", webhook.ErrID
				}
				return event.ID, nil
			}
		}
		return "", webhook.ErrSignature
	}
}

func Example() {
	server := fakeserver.New()
	defer server.Close()
	shipments := 0
	secret := "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	err := server.Register(fakeserver.Endpoint{
		Secrets: []string{secret},
		Handler: &webhook.Handler{
			Journal: &journal.Memory{}, // sqljournal outlives a restart
			Source:  "shop",
			Verify:  verifier(secret), // signature.StandardWebhooks(secret), of the module webhook/signature
			Next:    http.HandlerFunc(func(http.ResponseWriter, *http.Request) { shipments++ }),
			Done:    func(_ context.Context, d webhook.Delivery) { fmt.Println(d.ID, d.Result, d.Status) },
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := server.ScriptDeliveries("order-1", fakeserver.DeliveryFault{Kind: fakeserver.Twice, Delay: time.Millisecond}); err != nil {
		fmt.Println(err)
		return
	}
	req, err := http.NewRequest(http.MethodPost, server.URL()+"/v1/payments", strings.NewReader(`{"amount":1999,"currency":"usd","reference":"order-1"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	req.Header.Set("Idempotency-Key", "order-1")
	resp, err := server.Client().Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	_ = resp.Body.Close()
	if err := server.AwaitEvents(context.Background()); err != nil {
		fmt.Println(err)
	}
	fmt.Println("shipments:", shipments)
	// Output:
	// msg_1 ran 200
	// msg_1 already done 200
	// shipments: 1
}

// A Verifier for a scheme of one's own.
func ExampleVerifier() {
	verify := ownScheme("old secret", "new secret")
	body := []byte(`{"id":"evt_7","type":"paid"}`)
	now := time.Now().Unix()
	mac := hmac.New(sha256.New, []byte("new secret"))
	_, _ = fmt.Fprintf(mac, "%d.%s", now, body)
	h := http.Header{"X-Time": {strconv.FormatInt(now, 10)}, "X-Mac": {hex.EncodeToString(mac.Sum(nil))}}
	fmt.Println(verify(h, body))
	fmt.Println(verify(h, append(body, ' ')))
	// Output:
	// evt_7 <nil>
	//  webhook: wrong signature
}

// A consumer of a queue: its messages come at least once, too.
func ExampleOnce() {
	j := &journal.Memory{}
	consume := func(id string) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		result, err := webhook.Once(ctx, j, webhook.Event{Source: "orders", ID: id, Window: 14 * 24 * time.Hour}, func(context.Context) error {
			fmt.Println("ship", id)
			return nil
		})
		var wait *webhook.Error
		switch {
		case err == nil:
			fmt.Println(id, result, "- acknowledge")
		case errors.As(err, &wait):
			fmt.Fprintln(os.Stderr, id, "- again at", wait.Again)
		default:
			fmt.Fprintln(os.Stderr, id, "- again later:", err)
		}
	}
	consume("order-1")
	consume("order-1")
	// Output:
	// ship order-1
	// order-1 ran - acknowledge
	// order-1 already done - acknowledge
}
