package idem_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// Wrap the client that you have. Here the answer to the first attempt is lost
// after the charge; the second attempt carries the same key, so there is one
// charge.
func ExampleTransport() {
	server := fakeserver.NewInMemory() // stands for your provider
	defer server.Close()
	_ = server.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect})

	client := &http.Client{Transport: &idem.Transport{
		Base: server.Transport(), // leave it out to use the network
	}}

	resp, err := client.Post(server.URL()+"/v1/payments", "application/json",
		strings.NewReader(`{"amount":1999,"currency":"eur"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()

	fmt.Println(resp.Status)
	fmt.Println("sends:", len(server.Sends()), "charges:", len(server.Effects()))
	// Output:
	// 201 Created
	// sends: 2 charges: 1
}

// Name the operation after something that was written down before the call,
// and the key is the same in every call and every process: after a crash the
// payment is simply made again.
func ExampleWithOperation() {
	server := fakeserver.NewInMemory()
	defer server.Close()
	client := &http.Client{Transport: &idem.Transport{Base: server.Transport()}}

	pay := func() (*idem.Report, error) {
		// The second payment for order 77: not "order-77", which could be
		// paid for more than once.
		op := idem.Operation{Name: "payment", ID: "order-77/2"}
		ctx := idem.WithOperation(context.Background(), op)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL()+"/v1/payments",
			strings.NewReader(`{"amount":1999,"currency":"eur"}`))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		return idem.ReportOf(resp), nil
	}

	for range 2 { // the second time as after a crash
		report, err := pay()
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(report.Operation, report.Outcome, "replayed:", report.Replayed)
	}
	fmt.Println("charges:", len(server.Effects()))
	// Output:
	// payment/order-77/2 executed replayed: false
	// payment/order-77/2 executed replayed: true
	// charges: 1
}

// The report of an answer tells what it took to get it.
func ExampleReportOf() {
	server := fakeserver.NewInMemory()
	defer server.Close()
	_ = server.Script("",
		fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect},
		fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "0"})
	client := &http.Client{Transport: &idem.Transport{Base: server.Transport()}}

	resp, err := client.Post(server.URL()+"/v1/payments", "application/json",
		strings.NewReader(`{"amount":1999,"currency":"eur"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()

	report := idem.ReportOf(resp)
	for _, a := range report.Attempts {
		fmt.Printf("attempt %d: status %d, effect %v, waited for: %q\n", a.N, a.Status, a.Outcome, a.WaitFrom)
	}
	fmt.Println("operation:", report.Outcome, "replayed:", report.Replayed, "sends:", report.Sends)
	// Output:
	// attempt 1: status 0, effect unknown, waited for: "backoff"
	// attempt 2: status 503, effect unknown, waited for: "retry-after"
	// attempt 3: status 201, effect executed, waited for: ""
	// operation: executed replayed: true sends: 3
}

// A vendor's SDK takes an http.Client and hides the response. Its context
// still brings the report back, also when the SDK returns an error.
func ExampleWithReport() {
	server := fakeserver.NewInMemory()
	defer server.Close()
	client := &http.Client{Transport: &idem.Transport{Base: server.Transport()}}

	vendorPay := func(ctx context.Context, c *http.Client, amount int) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL()+"/v1/payments",
			strings.NewReader(fmt.Sprintf(`{"amount":%d,"currency":"eur"}`, amount)))
		if err != nil {
			return err
		}
		resp, err := c.Do(req)
		if err != nil {
			return err
		}
		return resp.Body.Close()
	}

	var report idem.Report
	ctx := idem.WithReport(context.Background(), &report)
	if err := vendorPay(ctx, client, 1999); err != nil {
		fmt.Println(err)
	}
	fmt.Println(report.Outcome, "attempts:", len(report.Attempts), "key:", report.KeyFrom)
	// Output: executed attempts: 1 key: minted
}

// When the answer is lost and the attempts are over, nobody can know whether the customer has
// paid. Do not say "failed", and do not take a new key: call the same operation
// again later.
func ExampleError_unknown() {
	server := fakeserver.NewInMemory()
	defer server.Close()
	_ = server.Script("", fakeserver.Fault{Kind: fakeserver.Close, Point: fakeserver.AfterEffect})

	client := idem.NewClient(&idem.Transport{
		Base:   server.Transport(),
		Policy: idem.Policy{MaxAttempts: 1}, // a long outage in short
	})
	pay := func() (*http.Response, error) {
		ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "payment", ID: "order-77/1"})
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL()+"/v1/payments",
			strings.NewReader(`{"amount":1999,"currency":"eur"}`))
		if err != nil {
			return nil, err
		}
		return client.Do(req)
	}

	_, err := pay()
	var e *idem.Error
	if !errors.As(err, &e) {
		fmt.Println("expected an *idem.Error, got", err)
		return
	}
	switch e.Outcome {
	case idem.NotExecuted, idem.Refused:
		fmt.Println("not paid: ask for another card")
	case idem.Unknown:
		fmt.Println("do not know yet:", errors.Is(err, idem.ErrAttemptsExhausted), e.Operation)
	}

	resp, err := pay() // later, perhaps in another process
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(idem.OutcomeOf(resp, err), "charges:", len(server.Effects()))
	// Output:
	// do not know yet: true payment/order-77/1
	// executed charges: 1
}

// One key is for one request. Another amount under the same context is a bug
// in the caller, and it is caught before anything is sent.
func ExampleWithKey_reused() {
	server := fakeserver.NewInMemory()
	defer server.Close()
	client := &http.Client{Transport: &idem.Transport{Base: server.Transport()}}

	key, err := idem.NewKey()
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := idem.WithKey(context.Background(), key)
	for _, amount := range []int{1000, 2000} {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL()+"/v1/payments",
			strings.NewReader(fmt.Sprintf(`{"amount":%d,"currency":"eur"}`, amount)))
		if err != nil {
			fmt.Println(err)
			return
		}
		resp, err := client.Do(req)
		if errors.Is(err, idem.ErrKeyReused) {
			// Do not help yourself with a new key: find out which of the two
			// was meant.
			fmt.Println(amount, "was not sent: the key belongs to another request")
			continue
		}
		if err != nil {
			fmt.Println(err)
			return
		}
		resp.Body.Close()
		fmt.Println(amount, resp.Status)
	}
	fmt.Println("sends:", len(server.Sends()))
	// Output:
	// 1000 201 Created
	// 2000 was not sent: the key belongs to another request
	// sends: 1
}

// Test a client of your own, whatever it is built with: let the fake server
// lose an answer, and look into its ledger. The client here makes a new key for
// each attempt; its caller sees no error, and the ledger shows two bookings.
func Example_testYourOwnClient() {
	// The code under test.
	book := func(client *http.Client, url string) error {
		var err error
		for range 3 {
			var req *http.Request
			req, err = http.NewRequest(http.MethodPost, url, strings.NewReader(`{"room_type":"double","guest":"Ada"}`))
			if err != nil {
				return err
			}
			key, keyErr := idem.NewKey()
			if keyErr != nil {
				return keyErr
			}
			req.Header.Set("Idempotency-Key", key)
			var resp *http.Response
			if resp, err = client.Do(req); err == nil {
				return resp.Body.Close()
			}
		}
		return err
	}

	hotel := fakeserver.NewInMemory()
	defer hotel.Close()
	_ = hotel.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect})

	err := book(hotel.Client(), hotel.URL()+"/v1/hotels/ritz/reservations")
	fmt.Println("error:", err)
	for _, e := range hotel.Effects(fakeserver.Filter{Kind: "reservation"}) {
		fmt.Println("booked:", e.ID)
	}
	// Output:
	// error: <nil>
	// booked: res_1
	// booked: res_2
}

// A provider that is not listed: copy the nearest dialect and change what
// differs. This one takes the key in another header, and a sold-out room is the
// booking's own answer, so that it counts as a refusal.
func ExampleDialect() {
	hotel := fakeserver.NewInMemory()
	defer hotel.Close()
	hotel.Apply(fakeserver.Settings{KeyHeader: "X-Request-Key"})
	hotel.SetRooms("ritz", "suite", 0)

	dialect := idem.Generic
	dialect.Name = "hotel"
	dialect.Header = "X-Request-Key"
	dialect.Reference = []string{"/id"}
	dialect.Refusal = []idem.Mark{{Status: http.StatusUnprocessableEntity, Pointer: "/type", Contains: "sold-out"}}
	client := &http.Client{Transport: &idem.Transport{Base: hotel.Transport(), Dialect: dialect}}

	for _, room := range []string{"suite", "double"} {
		ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "reservation", ID: "trip-1/" + room})
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, hotel.URL()+"/v1/hotels/ritz/reservations",
			strings.NewReader(fmt.Sprintf(`{"room_type":%q,"guest":"Ada"}`, room)))
		if err != nil {
			fmt.Println(err)
			return
		}
		resp, err := client.Do(req)
		if err != nil {
			fmt.Println(err)
			return
		}
		resp.Body.Close()
		report := idem.ReportOf(resp)
		fmt.Printf("%s: %d, %v, reference %q\n", room, resp.StatusCode, report.Outcome, report.Reference)
	}
	// Output:
	// suite: 422, refused, reference ""
	// double: 201, executed, reference "res_1"
}

// SlogHooks writes one line for an operation whose effect is not certain, with
// the whole key, and keeps the rest at debug level.
func ExampleSlogHooks() {
	server := fakeserver.NewInMemory()
	defer server.Close()
	_ = server.Script("", fakeserver.Fault{Kind: fakeserver.Status, Point: fakeserver.AfterEffect, Status: 504})

	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{} // so that the output of this example is always the same
			}
			return a
		},
	}))
	client := &http.Client{Transport: &idem.Transport{
		Base:   server.Transport(),
		Policy: idem.Policy{MaxAttempts: 1},
		Hooks:  idem.SlogHooks(logger),
	}}

	ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "payment", ID: "order-77/1"})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL()+"/v1/payments",
		strings.NewReader(`{"amount":1999,"currency":"eur"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	// Output:
	// level=WARN msg="idem: operation ended" operation=payment/order-77/1 key=bef22e3d-ba37-5b5c-926f-fc186e5928a5 outcome=unknown reason="attempts exhausted" attempts=1 last_status=504 request_id=""
}
