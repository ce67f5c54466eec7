// Booking has two guests who want the last room of a hotel.
//
//	go run ./examples/booking
//
// The hotel books Ada in, but its answer is lost. The retry carries the same
// key, so Ada gets the answer of her own booking, and neither a second room nor
// "sold out", which is what a retry without a key would bring. Grace is
// refused, and the client can say so for certain, because the dialect below
// knows what this hotel's refusals look like. You see both stories and what
// the hotel's ledger says. The exit status is 1 if it is not one booking.
package main

import (
	"context"
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
		_, _ = fmt.Fprintln(os.Stderr, "booking:", err)
		os.Exit(1)
	}
}

// hotelDialect is idem.Generic, and two answers that only the booking itself
// gives. A 4xx without such a mark may come from a layer before it (a gateway,
// an expired credential) and would say nothing about a booking that an earlier
// call may have made; its outcome would be unknown.
func hotelDialect() idem.Dialect {
	d := idem.Generic
	d.Name = "hotel"
	d.Refusal = []idem.Mark{
		{Status: http.StatusUnprocessableEntity, Pointer: "/type", Contains: "sold-out"},
		{Status: http.StatusPaymentRequired},
	}
	return d
}

func run(w io.Writer) error {
	hotel, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer hotel.Close()
	hotel.SetRooms("ritz", "suite", 1)

	client := &http.Client{Transport: &idem.Transport{
		Base:    hotel.Transport(),
		Dialect: hotelDialect(),
	}}
	url := hotel.URL() + "/v1/hotels/ritz/reservations"
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }

	say("The Ritz has %d suite left. Ada and Grace both want it.", hotel.Rooms("ritz", "suite"))
	say("")
	say("Ada asks first. The hotel books the suite, then the connection breaks.")
	if err := hotel.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}); err != nil {
		return err
	}
	ada, err := book(client, url, "Ada", "trip-1")
	if err != nil {
		return err
	}
	tell(say, ada)

	say("")
	say("Grace asks next.")
	grace, err := book(client, url, "Grace", "trip-2")
	if err != nil {
		return err
	}
	tell(say, grace)
	if grace.Outcome == idem.Refused {
		say("  So Grace may ask another hotel at once, without fear of two bookings.")
	}

	say("")
	booked := hotel.Effects(fakeserver.Filter{Kind: "reservation"})
	of := func(reference string) int {
		return len(hotel.Effects(fakeserver.Filter{Kind: "reservation", Reference: reference}))
	}
	say("ledger: bookings=%d ada=%d grace=%d rooms_left=%d", len(booked), of("trip-1"), of("trip-2"), hotel.Rooms("ritz", "suite"))
	if len(booked) != 1 || of("trip-1") != 1 || ada.Outcome != idem.Executed || grace.Outcome != idem.Refused {
		return fmt.Errorf("want one booking, Ada's, and a refusal for Grace")
	}
	return nil
}

// book makes one reservation. The trip's row was written down before, and its
// id names the operation.
func book(client *http.Client, url, guest, trip string) (*idem.Report, error) {
	ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "reservation", ID: trip})
	body := fmt.Sprintf(`{"room_type":"suite","guest":%q,"reference":%q}`, guest, trip)
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
	for _, a := range r.Attempts {
		heard := "no answer"
		if a.Status != 0 {
			heard = fmt.Sprint(a.Status, " ", http.StatusText(a.Status))
		}
		say("  attempt %d: %s", a.N, heard)
	}
	if r.Replayed {
		say("  The last answer is a replay: the hotel knew the key.")
	}
	say("  The client says: %v.", r.Outcome)
}
