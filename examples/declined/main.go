// Declined pays for one order with a card that the bank declines, and then with
// another card.
//
//	go run ./examples/declined
//
// A key stands for one payment, not for one order: the decline is the answer
// of the first payment and stays its answer, however often it is asked for. The
// second card is a second payment, with its own row and so its own key. You see
// the decline, the decline again after a lost answer, and the one charge. The
// last line is from the server's ledger; the exit status is 1 if it is wrong.
package main

import (
	"context"
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
		_, _ = fmt.Fprintln(os.Stderr, "declined:", err)
		os.Exit(1)
	}
}

func run(w io.Writer) error {
	bank, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer bank.Close()

	dialect := idem.Generic
	dialect.Name = "bank"
	dialect.Refusal = []idem.Mark{{Status: http.StatusPaymentRequired}} // only the payment itself is answered so
	client := &http.Client{Transport: &idem.Transport{
		Base:    bank.Transport(),
		Dialect: dialect,
	}}
	url := bank.URL() + "/v1/payments"
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }

	say("Order 77 costs 25.00 eur. The customer pays with the first card: payment order-77/1.")
	first, err := pay(client, url, "order-77/1", "tok_declined")
	if err != nil {
		return err
	}
	tell(say, first)

	say("")
	say("The shop crashes before it has noted that, and calls order-77/1 again.")
	say("This time the first answer is lost.")
	if err := bank.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}); err != nil {
		return err
	}
	again, err := pay(client, url, "order-77/1", "tok_declined")
	if err != nil {
		return err
	}
	tell(say, again)

	say("")
	say("The customer takes another card. That is another payment: order-77/2.")
	second, err := pay(client, url, "order-77/2", "tok_visa")
	if err != nil {
		return err
	}
	tell(say, second)

	say("")
	charges := bank.Effects(fakeserver.Filter{Kind: "payment"})
	sum := int64(0)
	for _, e := range charges {
		sum += e.Amount
	}
	say("ledger: operations=2 charges=%d charged=%d.%02d", len(charges), sum/100, sum%100)
	right := first.Outcome == idem.Refused && again.Outcome == idem.Refused && again.Key == first.Key &&
		second.Outcome == idem.Executed && second.Key != first.Key
	if len(charges) != 1 || charges[0].Reference != "order-77/2" || !right {
		return errors.New("want one charge, by the second card")
	}
	return nil
}

// pay is one payment of an order; id was written down before the call.
func pay(client *http.Client, url, id, card string) (*idem.Report, error) {
	ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "payment", ID: id})
	body := fmt.Sprintf(`{"amount":2500,"currency":"eur","reference":%q,"source":%q}`, id, card)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	return idem.ReportOf(resp), nil
}

func tell(say func(string, ...any), r *idem.Report) {
	last := r.Attempts[len(r.Attempts)-1]
	replay := ""
	if r.Replayed {
		replay = ", as a replay"
	}
	say("  key %.8s..., attempts: %d, answer: %d %s%s", r.Key, last.N, last.Status, http.StatusText(last.Status), replay)
	say("  The client says: %v.", r.Outcome)
}
