// Webhook pays orders and ships what is paid, while both ways fail all the
// time: the client's calls to the provider, and the provider's deliveries to
// the shop.
//
//	go run ./examples/webhook
//	go run ./examples/webhook -n 1000 -seed 7 -rate 0.6
//
// The provider runs in this process, on a real socket. The calls are repeated by
// an idem.Transport; the deliveries are repeated by the provider, on its
// schedule: twice at the same time, late, replayed, forged, unsigned, with
// other bytes, or again because the answer was lost. The shop has two replicas on one SQLite
// file. It fails, too: it cannot ship now and then, and it dies between its
// commit and its answer. A webhook.Handler lets each event be handled once; the
// row of the shipment and the mark of the event are one transaction (FinishTx).
// You see what happened on both ways, and as the last line
//
//	orders=200 shipments=200 doubled=0 lost=0
//
// which is counted from the provider's ledger and the shop's tables; the exit status
// is 1 if a charge or a shipment is doubled or lost.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	_ "modernc.org/sqlite"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
	"github.com/idem-go/idem/webhook"
	"github.com/idem-go/idem/webhook/signature"
)

type options struct {
	n, workers int
	seed       int64
	rate       float64
}

func main() {
	var o options
	flag.IntVar(&o.n, "n", 200, "orders")
	flag.IntVar(&o.workers, "workers", 16, "orders that are paid at the same time")
	flag.Int64Var(&o.seed, "seed", 1, "seed of the faults")
	flag.Float64Var(&o.rate, "rate", 0.4, "share of sends, and of deliveries, that meet a fault")
	flag.Parse()
	if err := run(os.Stdout, o); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "webhook:", err)
		os.Exit(1)
	}
}

// The provider's secret for this endpoint; a real one comes from where the
// shop's other secrets are.
const endpointSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

// replica is one process of the shop: a journal of its own on the shared file.
type replica struct {
	db      *sql.DB
	journal *sqljournal.Journal
	client  *http.Client
	hooks   *webhook.Handler
}

// happened counts what both replicas do.
type happened struct {
	mu     sync.Mutex // guards the following
	random *rand.Rand
	counts map[string]int
}

func (h *happened) count(what string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counts[what]++
}

func (h *happened) chance(percent int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.random.IntN(100) < percent
}

func newReplica(file string, secret journal.Secret, provider *fakeserver.Server, h *happened) (*replica, error) {
	db, err := sql.Open("sqlite", "file:"+filepath.ToSlash(file)+"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	// Nothing in these tables forbids a second shipment: what keeps it from
	// happening is what this example shows.
	_, err = db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, paid INTEGER NOT NULL) STRICT;
		CREATE TABLE IF NOT EXISTS shipments (order_id TEXT NOT NULL, event TEXT NOT NULL) STRICT`)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	// The lease is what a delivery waits that finds its event in the hands of
	// somebody who died, here a second; the default is 30 s.
	j, err := sqljournal.New(ctx, db, sqljournal.Options{Secret: secret, Lease: time.Second})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	verify, err := signature.StandardWebhooks(endpointSecret)
	if err != nil {
		return nil, errors.Join(err, j.Close(), db.Close())
	}
	r := &replica{db: db, journal: j}
	r.hooks = &webhook.Handler{
		Journal: j, Source: "provider", Verify: verify,
		Next: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { r.ship(w, req, h) }),
		Done: func(_ context.Context, d webhook.Delivery) { h.count("deliveries " + d.Result.String()) },
	}
	r.client = &http.Client{Transport: &idem.Transport{
		Base: provider.Transport(),
		Policy: idem.Policy{
			AttemptTimeout: 500 * time.Millisecond, MaxElapsed: 20 * time.Second,
			BackoffBase: 20 * time.Millisecond, BackoffCap: time.Second, ThrottleBase: 50 * time.Millisecond,
			Budget: &idem.Budget{Capacity: 400}, // all workers fail often, at one origin
		},
	}}
	return r, nil
}

// pay charges an order. The shop does not ship here: the answer may come late,
// or to a process that is gone, and the event comes in any case.
func (r *replica) pay(ctx context.Context, provider *fakeserver.Server, order string) error {
	ctx = idem.WithOperation(ctx, idem.Operation{Name: "charge", ID: order})
	body := fmt.Sprintf(`{"amount":1999,"currency":"eur","reference":%q}`, order)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, provider.URL()+"/v1/payments", strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusCreated {
		return errors.New(resp.Status)
	}
	_, err = r.db.ExecContext(ctx, "INSERT INTO orders (id, paid) VALUES (?, 1)", order)
	return err
}

// ship handles an event. 2xx says that it is done; anything else, a panic
// included, lets it come again.
func (r *replica) ship(w http.ResponseWriter, req *http.Request, h *happened) {
	var event struct {
		Type string
		Data struct{ Reference string }
	}
	if err := json.NewDecoder(req.Body).Decode(&event); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	if event.Type != "payment.succeeded" {
		return // 200: nothing is to be done for it
	}
	if err := r.shipOnce(req.Context(), event.Data.Reference, h); err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	if h.chance(10) {
		h.count("shop: died after the commit")
		panic(http.ErrAbortHandler) // the provider hears nothing and delivers again
	}
}

var errNoCarrier = errors.New("no carrier answers")

func (r *replica) shipOnce(ctx context.Context, order string, h *happened) error {
	tx, err := r.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	entry, ok := webhook.EntryOf(ctx)
	if !ok {
		return errors.New("not called by a webhook.Handler")
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO shipments (order_id, event) VALUES (?, ?)", order, entry.ID); err != nil {
		return err
	}
	if h.chance(10) {
		h.count("shop: could not ship")
		return errNoCarrier
	}
	// If somebody took this event over meanwhile, this fails and the
	// shipment is rolled back.
	if _, err := r.journal.FinishTx(ctx, tx, entry, journal.Done, journal.Note{}); err != nil {
		return err
	}
	return tx.Commit()
}

func (r *replica) close() error {
	r.client.CloseIdleConnections()
	return errors.Join(r.journal.Close(), r.db.Close())
}

func run(w io.Writer, o options) (err error) {
	if o.n < 1 || o.workers < 1 {
		return errors.New("-n and -workers must be at least 1")
	}
	provider, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer provider.Close()
	folder, err := os.MkdirTemp("", "webhook-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	secret, err := journal.NewSecret()
	if err != nil {
		return err
	}
	h := &happened{random: rand.New(rand.NewPCG(uint64(o.seed), 0)), counts: map[string]int{}}
	var shop [2]*replica
	for i := range shop {
		if shop[i], err = newReplica(filepath.Join(folder, "shop.db"), secret, provider, h); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, shop[i].close()) }()
	}

	// A load balancer before the replicas, and a provider that is more impatient than
	// real ones.
	balancer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := 0
		if h.chance(50) {
			i = 1
		}
		shop[i].hooks.ServeHTTP(w, r)
	})
	schedule := slices.Repeat([]time.Duration{100 * time.Millisecond}, 300)
	if err := provider.Register(fakeserver.Endpoint{Name: "shop", Handler: balancer, Secrets: []string{endpointSecret}, Schedule: schedule, TimeInBody: true}); err != nil {
		return err
	}
	if err := provider.Inject(fakeserver.Mixed(o.rate, o.seed)...); err != nil {
		return err
	}
	if err := provider.InjectDeliveries(fakeserver.MixedDeliveries(o.rate, o.seed)...); err != nil {
		return err
	}

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	var workers sync.WaitGroup
	orders := make(chan string)
	for i := range o.workers {
		workers.Go(func() {
			for order := range orders {
				for shop[i%2].pay(ctx, provider, order) != nil && ctx.Err() == nil {
					h.count("calls made again by the shop") // the same operation, so the same key
				}
			}
		})
	}
	for i := range o.n {
		orders <- fmt.Sprintf("order-%d", i+1)
	}
	close(orders)
	workers.Wait()
	if err := provider.AwaitEvents(ctx); err != nil {
		return err
	}
	return report(ctx, w, o, provider, shop[0].db, h)
}

func report(ctx context.Context, w io.Writer, o options, provider *fakeserver.Server, db *sql.DB, h *happened) error {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	say("%d orders: %d sends to the provider, %d deliveries to the shop", o.n, len(provider.Sends()), len(provider.Deliveries()))
	faults := map[string]int{}
	for _, d := range provider.Deliveries() {
		if kind, _, _ := strings.Cut(d.Fault, " ("); kind != "" {
			faults[kind]++
		}
	}
	say("deliveries with a fault:")
	for _, kind := range slices.Sorted(maps.Keys(faults)) {
		say("  %4d %s", faults[kind], kind)
	}
	say("what the shop did:")
	for _, what := range slices.Sorted(maps.Keys(h.counts)) {
		say("  %4d %s", h.counts[what], what)
	}

	charges, shipped := map[string]int{}, map[string]int{}
	for _, e := range provider.Effects() {
		charges[e.Reference]++
	}
	rows, err := db.QueryContext(ctx, "SELECT order_id, count(*) FROM shipments GROUP BY order_id")
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	shipments := 0
	for rows.Next() {
		var order string
		var n int
		if err := rows.Scan(&order, &n); err != nil {
			return err
		}
		shipped[order] = n
		shipments += n
	}
	if err := rows.Err(); err != nil {
		return err
	}
	var orders int
	if err := db.QueryRowContext(ctx, "SELECT count(*) FROM orders").Scan(&orders); err != nil {
		return err
	}
	doubled, lost := 0, 0
	for i := range o.n {
		for _, n := range []int{charges[fmt.Sprintf("order-%d", i+1)], shipped[fmt.Sprintf("order-%d", i+1)]} {
			if n > 1 {
				doubled++
			}
			if n == 0 {
				lost++
			}
		}
	}
	say("orders=%d shipments=%d doubled=%d lost=%d", orders, shipments, doubled, lost)
	if orders != o.n || shipments != o.n || doubled != 0 || lost != 0 {
		return errors.New("want one charge and one shipment for each order")
	}
	return nil
}
