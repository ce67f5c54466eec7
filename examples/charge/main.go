// Charge pays a thousand orders through a server and a network that fail all
// the time, and then compares what the client claimed with the server's ledger.
//
//	go run ./examples/charge
//	go run ./examples/charge -n 1000 -seed 7 -faults storm
//	go run ./examples/charge -n 20 -v
//
// The server runs in this process, on a real socket. Its faults come before
// and after the charge: connections that are reset, answers that are lost, cut
// or never come, 5xx, 429 and 409, and requests that the network delivers
// twice. The client is a plain http.Client with an idem.Transport, and each
// payment is named with idem.WithOperation. You see a table of the faults, of
// what the client did about them and what it claimed, the story of the three
// payments that had the most to go through, and as the last line
//
//	operations=1000 effects=1000 doubled=0 lost=0 false_success=0 false_failure=0 unknown=0
//
// The exit status is 1 if one of the last five numbers is not 0. The same
// work without keys is in ./examples/naive.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
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
	verbose := flag.Bool("v", false, "log every attempt and every wait to stderr")
	flag.Parse()
	var hooks idem.Hooks
	if *verbose {
		hooks = idem.SlogHooks(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})))
	}
	if err := run(os.Stdout, o, payrun.Stdio(), hooks); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "charge:", err)
		os.Exit(1)
	}
}

// policy suits a server that answers within milliseconds or not at all: a
// hang costs 300 ms, not the default 30 s. The budget grows with the workers,
// because they share one origin and all of them have retries under way; it
// stays on, so that a server that is really down would not be flooded.
func policy(o payrun.Options) (p idem.Policy, budget string) {
	tokens, often, limit := 40, "", 300*time.Millisecond
	switch o.Faults {
	case "none":
		limit = 30 * time.Second // nothing hangs
	case "mixed":
		tokens, often = max(tokens, 5*o.Workers), "now and then"
	case "storm":
		tokens, often = max(tokens, 25*o.Workers), "often"
	}
	p = idem.Policy{
		AttemptTimeout: limit,
		MaxElapsed:     20 * time.Second,
		BackoffBase:    20 * time.Millisecond,
		BackoffCap:     time.Second,
		ThrottleBase:   50 * time.Millisecond,
		Budget:         &idem.Budget{Capacity: tokens},
	}
	budget = fmt.Sprintf("%d tokens; a retry takes 4 and gives them back when its operation is answered", tokens)
	if tokens > 40 {
		budget += fmt.Sprintf("\n        (enlarged: with the default of 40, %d workers under these faults would %s be refused a retry)", o.Workers, often)
	}
	return p, budget
}

func run(w io.Writer, o payrun.Options, progress payrun.Progress, hooks idem.Hooks) error {
	server, err := o.Serve(fakeserver.Settings{})
	if err != nil {
		return err
	}
	p, budget := policy(o)
	client := &http.Client{Transport: &idem.Transport{Base: server.Transport(), Policy: p, Hooks: hooks}}
	url := server.URL() + "/v1/payments"

	r := payrun.Do(context.Background(), o, server, progress, func(ctx context.Context, pay payrun.Payment) payrun.Call {
		call := payrun.Call{Began: time.Now()}
		ctx = idem.WithOperation(ctx, idem.Operation{Name: "payment", ID: pay.ID})
		ctx = idem.WithReport(ctx, &call.Report)
		err := charge(ctx, client, url, pay)
		call.Ended, call.Claim, call.Attempts = time.Now(), call.Report.Outcome, len(call.Report.Attempts)
		if err != nil || call.Claim != idem.Executed {
			call.Why = why(&call.Report, err)
		}
		return call
	})

	show(w, r, p, budget)
	count := r.Count()
	_, _ = fmt.Fprintln(w, count)
	switch bad := badAnswers(r); {
	case !count.Right():
		return errors.New("the claims and the ledger differ")
	case bad > 0:
		return fmt.Errorf("%d answers of executed payments could not be used", bad)
	}
	return nil
}

// charge is the code of a shop: it knows nothing of retries.
func charge(ctx context.Context, client *http.Client, url string, p payrun.Payment) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(p.Body()))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusCreated {
		return errors.New(resp.Status)
	}
	var made struct{ Reference, Status string }
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil {
		return fmt.Errorf("the answer cannot be read: %w", err)
	}
	if made.Reference != p.ID || made.Status != "succeeded" {
		return fmt.Errorf("the answer is for %q, which %s", made.Reference, made.Status)
	}
	return nil
}

// why says for what reason a call did not end well.
func why(r *idem.Report, err error) string {
	for _, reason := range []error{
		idem.ErrAttemptsExhausted, idem.ErrBudgetExhausted, idem.ErrTimeExhausted,
		idem.ErrInProgress, idem.ErrRetryAfterTooLong, idem.ErrKeyReused,
	} {
		if errors.Is(r.Reason, reason) {
			return strings.TrimPrefix(reason.Error(), "idem: ")
		}
	}
	return fmt.Sprint("another: ", err)
}

func badAnswers(r *payrun.Run) (n int) {
	for _, calls := range r.Calls {
		for _, c := range calls {
			if c.Claim == idem.Executed && c.Why != "" {
				n++
			}
		}
	}
	return n
}
