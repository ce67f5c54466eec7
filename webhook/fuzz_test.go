package webhook_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

// Whatever is delivered: an answer that is not Next's is a problem document
// that says what the status says and repeats nothing, and what is not genuine
// is neither handled nor stored.
func FuzzProblemBodies(f *testing.F) {
	now := time.Now()
	e := fakeserver.Endpoint{Secrets: []string{secretOne}}
	genuine, err := e.Sign("msg_1", now, []byte(`{"a":1}`))
	require.NoError(f, err)
	stamp, signature := genuine.Get("Webhook-Timestamp"), genuine.Get("Webhook-Signature")
	f.Add("POST", "msg_1", stamp, signature, []byte(`{"a":1}`), 0)
	f.Add("POST", "msg_1", stamp, "v1,AAAA "+signature, []byte(`{"a":1}`), 500)
	f.Add("POST", "msg_2", stamp, signature, []byte(`{"a":1}`), 0)
	f.Add("POST", "msg_1", "1", signature, []byte(`{"a":1}`), 0)
	f.Add("POST", "msg_1", "99999999999999999999", "v1", []byte(strings.Repeat("x", 300)), 0)
	f.Add("GET", "", "", "", []byte(nil), 0)
	f.Add("P\"OST", "msg\x00\xff", "-1", "v1,\xff", []byte("\xff\xfe"), 0)
	f.Add("POST", strings.Repeat("x", 300), stamp, signature, []byte("{}"), 302)
	f.Fuzz(func(t *testing.T, method, id, stamp, signature string, body []byte, status int) {
		memory := &journal.Memory{}
		ran, result := false, webhook.Result(-1)
		verify := verifier(secretOne)
		proved := false
		h := &webhook.Handler{
			Journal: memory, Source: "shop", MaxBody: 256,
			Verify: func(h http.Header, body []byte) (string, error) {
				id, err := verify(h, body)
				proved = err == nil
				return id, err
			},
			Next: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				ran = true
				if status >= 200 && status <= 999 {
					w.WriteHeader(status)
				}
			}),
			Done: func(_ context.Context, d webhook.Delivery) { result = d.Result },
		}
		r, err := http.NewRequestWithContext(context.Background(), http.MethodPost, "http://shop.test/", nil)
		require.NoError(t, err)
		r.Method, r.Body, r.ContentLength = method, io.NopCloser(bytes.NewReader(body)), -1
		r.Header = http.Header{"Webhook-Id": {id}, "Webhook-Timestamp": {stamp}, "Webhook-Signature": {signature}}
		w := &recorder{header: http.Header{}}
		h.ServeHTTP(w, r)

		require.Equal(t, proved && result != webhook.Rejected, ran)
		if !proved {
			require.Equal(t, webhook.Rejected, result)
			swept, err := memory.Get(context.Background(), journal.Operation{Scope: "shop", Name: "webhook", ID: id})
			require.ErrorIs(t, err, journal.ErrNotFound, "%v", swept)
		}
		if ran {
			require.Empty(t, w.header.Get("Content-Type"))
			return
		}
		var doc map[string]any
		require.NoError(t, json.Unmarshal([]byte(w.body.String()), &doc))
		require.Equal(t, "application/problem+json", w.header.Get("Content-Type"))
		require.Equal(t, float64(w.status), doc["status"])
		require.Equal(t, http.StatusText(w.status), doc["title"])
		require.Equal(t, "about:blank", doc["type"])
		require.Contains(t, []int{400, 401, 405, 413}, w.status)
		// The documents are few and fixed, so that they can hold nothing of a delivery.
		require.True(t, slices.Contains([]string{
			"Events are delivered with POST.", "The body has more than 256 bytes.", "The delivery has no usable event id.",
			"The delivery has no signature, or none that is right.",
			"The delivery was signed too long ago or for a time to come, or its time cannot be read.",
		}, doc["detail"].(string)), "%v", doc["detail"])
		require.Len(t, doc, 5)
	})
}
