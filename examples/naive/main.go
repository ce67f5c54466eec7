// Naive does the work of ./examples/charge the way it is often written: a
// plain retry loop around an http.Client, and no idempotency key.
//
//	go run ./examples/naive
//	go run ./examples/naive -n 1000 -seed 7 -faults storm
//
// Workers, payments and faults are the same. You see how many customers were
// charged twice or more, and how often the loop said "failed" although the
// customer had paid. The last line has the form of the one of charge; the exit
// status is 0, because all this is to be expected.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/examples/internal/payrun"
	"github.com/idem-go/idem/fakeserver"
)

func main() {
	var o payrun.Options
	o.Flags(flag.CommandLine)
	flag.Parse()
	if err := run(os.Stdout, o, payrun.Stdio()); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "naive:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, o payrun.Options, progress payrun.Progress) error {
	server, err := o.Serve(fakeserver.Settings{Optional: true}) // it takes payments without a key
	if err != nil {
		return err
	}
	timeout := 300 * time.Millisecond // as in charge: some answers never come
	if o.Faults == "none" {
		timeout = 30 * time.Second // every answer comes, and what is too slow for a timeout is charged again
	}
	client := &http.Client{Transport: server.Transport(), Timeout: timeout}
	url := server.URL() + "/v1/payments"

	r := payrun.Do(context.Background(), o, server, progress, func(ctx context.Context, p payrun.Payment) payrun.Call {
		call := payrun.Call{Began: time.Now(), Claim: idem.Executed}
		var err error
		if call.Attempts, err = chargeWithRetries(ctx, client, url, p); err != nil {
			// Such a loop has two answers only, and the shop reads an error
			// as "not paid".
			call.Claim, call.Why = idem.NotExecuted, err.Error()
		}
		call.Ended = time.Now()
		return call
	})

	show(w, r)
	_, _ = fmt.Fprintln(w, r.Count())
	return nil
}

// chargeWithRetries is the loop that most of us have written.
func chargeWithRetries(ctx context.Context, client *http.Client, url string, p payrun.Payment) (attempts int, err error) {
	wait := 20 * time.Millisecond
	for attempts = 1; ; attempts++ {
		again, err := charge(ctx, client, url, p)
		if err == nil || !again || attempts == 8 {
			return attempts, err
		}
		time.Sleep(rand.N(wait))
		wait = min(2*wait, time.Second)
	}
}

func charge(ctx context.Context, client *http.Client, url string, p payrun.Payment) (again bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(p.Body()))
	if err != nil {
		return false, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return true, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusCreated {
		return resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests, errors.New(resp.Status)
	}
	var made struct{ Reference string }
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil {
		return true, err
	}
	return false, nil
}

func show(w io.Writer, r *payrun.Run) {
	owed, taken, customers, extra, most := int64(0), int64(0), 0, 0, 0
	effects := r.EffectsOf()
	for _, p := range r.Payments {
		owed += p.Amount
		for _, e := range effects[p.ID] {
			taken += e.Amount
		}
		if n := len(effects[p.ID]); n > 1 {
			customers++
			extra += n - 1
			most = max(most, n)
		}
	}
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	say("%v: %.1fs, a plain retry loop, no key", r.Options, r.Took.Seconds())
	say("")
	r.ShowFaults(w)
	say("")
	if customers == 0 {
		say("What one sees: nothing was lost on the way, so nobody was charged twice.")
	} else {
		say("What one sees: %d customers were charged more than once (%d charges too many, %d for the unluckiest one, %d.%02d eur in all), because a retry without a key is a new payment to the server.",
			customers, extra, most, (taken-owed)/100, (taken-owed)%100)
	}
	say("The same work with keys: go run ./examples/charge -n %d -seed %d -faults %s", r.N, r.Seed, r.Faults)
	say("")
}
