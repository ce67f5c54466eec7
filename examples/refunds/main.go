// Refunds gives the same part of a payment back twice, on purpose.
//
//	go run ./examples/refunds
//
// Two refunds of 10.00 look the same on the wire. What tells them apart from
// one refund that was sent twice is their operation: each has a row of its own,
// written down before the call, and the row's id gives the key. So a retry
// after a lost answer refunds once, and a second row refunds again. You also
// see that another amount under the first row's context is caught before it is
// sent. The last line is from the server's ledger; the exit status is 1 if it is
// wrong.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

func main() {
	if err := run(os.Stdout); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "refunds:", err)
		os.Exit(1)
	}
}

func run(w io.Writer) error {
	server, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer server.Close()
	client := idem.NewClient(&idem.Transport{Base: server.Transport()})
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }

	paid := idem.WithOperation(context.Background(), idem.Operation{Name: "payment", ID: "order-77/1"})
	payment, _, err := post(paid, client, server.URL()+"/v1/payments", `{"amount":5000,"currency":"eur","reference":"order-77/1"}`)
	if err != nil {
		return err
	}
	say("Order 77 was paid: 50.00 eur, %s.", payment)
	url := server.URL() + "/v1/payments/" + payment + "/refunds"

	say("")
	say("A glass arrived broken: refund row 1, 10.00. The answer is lost after the refund.")
	if err := server.Script("", fakeserver.Fault{Kind: fakeserver.Close, Point: fakeserver.AfterEffect}); err != nil {
		return err
	}
	row1 := idem.WithOperation(context.Background(), idem.Operation{Name: "refund", ID: "refund-row-1"})
	id, report, err := post(row1, client, url, `{"amount":1000,"reference":"refund-row-1"}`)
	if err != nil {
		return err
	}
	say("  %d attempts, one key (%.8s...): %s, %v", len(report.Attempts), report.Key, id, report.Outcome)

	say("")
	say("Another glass arrived broken: refund row 2, 10.00 again, and this is meant.")
	row2 := idem.WithOperation(context.Background(), idem.Operation{Name: "refund", ID: "refund-row-2"})
	id, report, err = post(row2, client, url, `{"amount":1000,"reference":"refund-row-2"}`)
	if err != nil {
		return err
	}
	say("  %d attempt, another key (%.8s...): %s, %v", len(report.Attempts), report.Key, id, report.Outcome)

	say("")
	say("A bug: somebody refunds 20.00 under the context of row 1.")
	before := len(server.Sends())
	_, _, err = post(row1, client, url, `{"amount":2000,"reference":"refund-row-1"}`)
	caught := errors.Is(err, idem.ErrKeyReused)
	sent := len(server.Sends()) - before
	say("  caught: %t, sent to the server: %d", caught, sent)

	say("")
	refunds := server.Effects(fakeserver.Filter{Kind: "refund"})
	sum := int64(0)
	for _, e := range refunds {
		sum += e.Amount
	}
	say("ledger: refunds=%d refunded=%d.%02d", len(refunds), sum/100, sum%100)
	if len(refunds) != 2 || sum != 2000 || !caught || sent != 0 {
		return errors.New("want two refunds of 10.00 and nothing else")
	}
	return nil
}

// post sends body once, in effect, and returns the id of what was made.
func post(ctx context.Context, client *idem.Client, url, body string) (id string, r *idem.Report, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return "", nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return "", nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusCreated {
		return "", nil, errors.New(resp.Status)
	}
	var made struct{ ID string }
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil {
		return "", nil, err
	}
	return made.ID, idem.ReportOf(resp), nil
}
