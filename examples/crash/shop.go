package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/examples/internal/payrun"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// Claim is what the shop says of a payment, a line of JSON each. A line
// without an ID says that the shop has resumed and is open.
type Claim struct {
	ID           string
	Outcome      idem.Outcome
	Why          string // of an outcome that is not "executed"
	Resumed      bool   // an earlier life of the shop began it
	Began, Ended time.Time
}

// shop is what you would write: it opens the journal, goes on with what the last
// life of the process left behind, and then does its work. Payments come
// from in, claims go to out. It does not know that it will be killed.
func shop(journalPath, server string, in io.Reader, out io.Writer) error {
	j, err := sqljournal.OpenSQLite(journalPath, sqljournal.Options{
		// A claim of a process that is dead holds for one lease. The default, 30 s,
		// is for processes that may hang for a while; this one dies all the time.
		Lease: 300 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	defer func() { _ = j.Close() }()

	dialect := idem.Generic
	dialect.KeyWindow = 24 * time.Hour // from the provider's documentation: the journal needs to know
	client := idem.NewClient(&idem.Transport{
		Journal: j,
		Dialect: dialect,
		Policy: idem.Policy{
			AttemptTimeout: 2 * time.Second, // the server is near: it answers soon or not at all
			BackoffBase:    20 * time.Millisecond,
			BackoffCap:     time.Second,
			ThrottleBase:   50 * time.Millisecond,
			ResumePace:     5 * time.Millisecond,        // the default spares a provider that has just been down
			Budget:         &idem.Budget{Capacity: 200}, // a third of the sends fail here, which is not usual
			MaxResumes:     1000,                        // nor are crashes made on purpose: by default 5 of them stop an entry
		},
	})

	w := &worker{client: client, url: server + "/v1/payments", out: json.NewEncoder(out)}
	if err := w.resume(context.Background()); err != nil {
		return err
	}
	w.claim(Claim{})
	return w.work(context.Background(), in)
}

type worker struct {
	client *idem.Client
	url    string

	mu  sync.Mutex // guards out
	out *json.Encoder
}

func (w *worker) claim(c Claim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(c) // nobody listens any more: there is nothing to be done about it
}

// resume comes first. The journal has no bodies unless Transport.Seal is set,
// so the request is built again from the operation's name: from the row of the
// shop's own database.
func (w *worker) resume(ctx context.Context) error {
	build := func(ctx context.Context, e journal.Entry) (*http.Request, error) {
		p, ok := find(e.ID)
		if !ok {
			return nil, fmt.Errorf("payment %s is not one of ours", e.ID)
		}
		return w.request(ctx, p)
	}
	began := time.Now()
	done := func(e journal.Entry, _ *http.Response) error {
		// Here the shop would mark its row as paid. Only when this returns nil is
		// the entry finished: a crash in between repeats done, and not the payment.
		c := Claim{ID: e.ID, Outcome: idem.Executed, Resumed: true, Began: began, Ended: time.Now()}
		if e.State == journal.Refused {
			c.Outcome = idem.Refused
		}
		w.claim(c)
		return nil
	}
	_, err := w.client.Resume(ctx, build, done)
	return err
}

// work pays what comes in.
func (w *worker) work(ctx context.Context, in io.Reader) error {
	payments := make(chan payrun.Payment)
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for p := range payments {
				w.claim(w.pay(ctx, p))
			}
		})
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		p, ok := find(lines.Text())
		if !ok {
			return errors.New("no such payment: " + lines.Text())
		}
		payments <- p
	}
	close(payments)
	workers.Wait()
	return lines.Err()
}

// pay names the operation; the rest is as without a journal. The key is on the
// disk before the first byte is sent.
func (w *worker) pay(ctx context.Context, p payrun.Payment) Claim {
	c := Claim{ID: p.ID, Began: time.Now()}
	req, err := w.request(idem.WithOperation(ctx, idem.Operation{Name: "payment", ID: p.ID}), p)
	if err != nil {
		c.Why = err.Error()
		return c
	}
	resp, err := w.client.Do(req)
	if err == nil {
		_ = resp.Body.Close()
	}
	c.Outcome, c.Ended = idem.OutcomeOf(resp, err), time.Now()
	if err != nil {
		c.Why = err.Error()
	}
	return c
}

func (w *worker) request(ctx context.Context, p payrun.Payment) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, strings.NewReader(p.Body()))
	if err == nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return req, err
}

// find stands for the shop's table of payments.
func find(id string) (payrun.Payment, bool) {
	var n int64
	if _, err := fmt.Sscanf(id, "order-%d/1", &n); err != nil {
		return payrun.Payment{}, false
	}
	return payrun.Payment{ID: id, Amount: 100 + n*37%9900}, true
}
