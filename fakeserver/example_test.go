package fakeserver_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/idem-go/idem/fakeserver"
)

// The route of a provider of your own, behind keys, faults and a ledger.
func ExampleServer_Handle() {
	s := fakeserver.New()
	defer s.Close()
	s.Apply(fakeserver.Like(fakeserver.Stripe))
	s.Handle("POST /v1/charges", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"id":"ch_1","amount":%s}`, r.FormValue("amount"))
	}))
	if err := s.Inject(fakeserver.Fault{Kind: fakeserver.CutBody, Send: 1}); err != nil {
		panic(err)
	}
	for range 2 {
		req, err := http.NewRequest("POST", s.URL()+"/v1/charges", strings.NewReader("amount=1999&reference=order-7"))
		if err != nil {
			panic(err)
		}
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		req.Header.Set("Idempotency-Key", "order-7/1")
		resp, err := s.Client().Do(req)
		if err != nil {
			panic(err)
		}
		body, err := io.ReadAll(resp.Body)
		fmt.Printf("%s %v replayed=%q\n", body, err, resp.Header.Get("Idempotent-Replayed"))
		resp.Body.Close()
	}
	for _, e := range s.Effects() {
		fmt.Println(e.Kind, e.ID, e.Reference)
	}
	// Output:
	// {"id":"ch_1", unexpected EOF replayed=""
	// {"id":"ch_1","amount":1999} <nil> replayed="true"
	// handled ch_1 order-7
}

// A server that keeps keys in the memory of its process, and the test that it must not pass.
func ExampleBroken() {
	s := fakeserver.New()
	defer s.Close()
	s.Apply(fakeserver.Broken(fakeserver.ForgetsAtRestart))
	for range 2 {
		req, err := http.NewRequest("POST", s.URL()+"/v1/payments",
			strings.NewReader(`{"amount":1999,"currency":"usd","reference":"order-1"}`))
		if err != nil {
			panic(err)
		}
		req.Header.Set("Idempotency-Key", "order-1")
		resp, err := (&http.Client{Transport: s.Transport()}).Do(req)
		if err != nil {
			panic(err)
		}
		resp.Body.Close()
		s.Restart()
	}
	fmt.Println(s.AssertOneEffectPerOperation(quiet{}), len(s.Effects()))
	// Output: false 2
}

// quiet stands for the *testing.T of a test.
type quiet struct{}

func (quiet) Helper()               {}
func (quiet) Errorf(string, ...any) {}
