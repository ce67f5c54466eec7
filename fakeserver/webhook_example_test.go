package fakeserver_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/idem-go/idem/fakeserver"
)

// A shop that ships what is paid, and the test that compares its shipments with the ledger. This shop takes every delivery
// for a new payment.
func ExampleServer_Register() {
	s := fakeserver.New()
	defer s.Close()
	var mu sync.Mutex
	shipments := 0
	shop := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		shipments++
	})
	err := s.Register(fakeserver.Endpoint{
		Handler: shop,
		Secrets: []string{"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"},
	})
	if err != nil {
		panic(err)
	}
	if err := s.InjectDeliveries(fakeserver.DeliveryFault{Kind: fakeserver.Twice, Reference: "order-1"}); err != nil {
		panic(err)
	}
	req, err := http.NewRequest("POST", s.URL()+"/v1/payments", strings.NewReader(`{"amount":1999,"currency":"usd","reference":"order-1"}`))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Idempotency-Key", "order-1")
	resp, err := s.Client().Do(req)
	if err != nil {
		panic(err)
	}
	resp.Body.Close()
	if err := s.AwaitEvents(context.Background()); err != nil {
		panic(err)
	}
	fmt.Println(len(s.Effects()), "payment,", shipments, "shipments")
	for _, d := range s.Deliveries(fakeserver.Filter{Reference: "order-1"}) {
		fmt.Println(d.ID, d.Type, "of effect", d.Effect, "answered", d.Status)
	}
	// Output:
	// 1 payment, 2 shipments
	// msg_1 payment.succeeded of effect 1 answered 200
	// msg_1 payment.succeeded of effect 1 answered 200
}
