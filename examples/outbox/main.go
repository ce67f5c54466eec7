// Outbox writes an order and its pending charge in one transaction.
//
//	go run ./examples/outbox
//
// A shop that commits the order and then calls the provider loses the charge if
// it crashes in between; one that calls first charges for an order that may
// never be committed. Here the charge is written into the shop's own database,
// beside the order, by the same transaction (BeginTx), and Client.Resume sends
// what is there. The answer goes back the same way: the order is marked as
// paid in the transaction that finishes the charge (FinishTx). You see three
// orders and one that is rolled back, and a process that is killed three times:
// between commit and send, between a charge and the commit that says so, and
// right after that commit. Each start finds what is left, and nothing else. The
// last line is from the provider's ledger and the table of orders; the exit
// status is 1 if they differ.
package main

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	_ "modernc.org/sqlite"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// secretVariable has the secret of the journal, in hexadecimal. It must not be
// kept in the database: it keys the digests of requests that stand there.
const secretVariable = "OUTBOX_SECRET"

// The shop is a process of its own, so that it can be killed: this program
// starts itself.
func main() {
	var err error
	switch a := os.Args[1:]; {
	case len(a) == 3 && a[0] == "order":
		err = withShop(a[1], a[2], func(s *shop) error { return s.takeOrders(os.Stdout) })
	case len(a) == 4 && a[0] == "resume":
		err = withShop(a[1], a[2], func(s *shop) error { return s.resume(os.Stdout, a[3]) })
	default:
		err = run(os.Stdout)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "outbox:", err)
		os.Exit(1)
	}
}

// shop is an application with a database of its own and a provider.
type shop struct {
	db       *sql.DB
	journal  *sqljournal.Journal
	client   *idem.Client
	payments string // URL
}

func withShop(file, provider string, do func(*shop) error) error {
	var secret journal.Secret
	if n, err := hex.Decode(secret[:], []byte(os.Getenv(secretVariable))); err != nil || n != len(secret) {
		return fmt.Errorf("%s must be %d hexadecimal digits", secretVariable, 2*len(secret))
	}
	db, err := open(file)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	ctx := context.Background()
	if _, err := db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, amount INTEGER NOT NULL, payment TEXT) STRICT`); err != nil {
		return err
	}
	// The journal's tables go into the same database. A killed process leaves a
	// claim on what it was doing; Resume waits until it ends, here for 200 ms
	// (the default is 30 s).
	j, err := sqljournal.New(ctx, db, sqljournal.Options{Secret: secret, Lease: 200 * time.Millisecond})
	if err != nil {
		return err
	}
	defer func() { _ = j.Close() }()

	dialect := idem.Generic
	dialect.Name, dialect.KeyWindow, dialect.Reference = "cards", 24*time.Hour, []string{"/id"}
	transport := &idem.Transport{Dialect: dialect, Journal: j}
	defer transport.CloseIdleConnections()
	return do(&shop{db, j, idem.NewClient(transport), provider + "/v1/payments"})
}

// open opens the shop's database. The journal needs the log (WAL); FULL makes a
// commit outlast a loss of power; _txlock lets a transaction wait for another
// one when it begins, and not fail when it first writes.
func open(file string) (*sql.DB, error) {
	return sql.Open("sqlite", "file:"+filepath.ToSlash(file)+"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(5000)&_txlock=immediate")
}

// charge is the request that pays an order. It is made twice, for the journal
// and for the send, and must be the same both times.
func (s *shop) charge(ctx context.Context, order string, amount int) (*http.Request, error) {
	ctx = idem.WithOperation(ctx, idem.Operation{Name: "charge", ID: order})
	body := fmt.Sprintf(`{"amount":%d,"currency":"eur","reference":%q}`, amount, order)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.payments, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	return req, nil
}

var errOutOfStock = errors.New("out of stock")

// takeOrders is the front of the shop. It never talks to the provider.
func (s *shop) takeOrders(w io.Writer) error {
	for i, amount := range []int{1000, 2000, 3000, 4000} {
		order := fmt.Sprintf("order-%d", i+1)
		switch err := s.take(order, amount); {
		case errors.Is(err, errOutOfStock):
			_, _ = fmt.Fprintf(w, "  %s: out of stock, rolled back, and its charge with it\n", order)
		case err != nil:
			return err
		default:
			_, _ = fmt.Fprintf(w, "  %s: committed, with its charge\n", order)
		}
	}
	// Here s.client.Resume would send the charges.
	crash()
	return nil
}

func (s *shop) take(order string, amount int) error {
	ctx := context.Background()
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	if _, err := tx.ExecContext(ctx, "INSERT INTO orders (id, amount) VALUES (?, ?)", order, amount); err != nil {
		return err
	}
	req, err := s.charge(ctx, order, amount)
	if err != nil {
		return err
	}
	intent, err := s.client.Intent(req)
	if err != nil {
		return err
	}
	if _, err := s.journal.BeginTx(ctx, tx, intent); err != nil {
		return err
	}
	if order == "order-3" { // the shop finds out late
		return errOutOfStock
	}
	return tx.Commit()
}

// resume is the back of the shop: it runs at every start, and then from time to
// time. crashAt is where it is killed: "before" or "after" the commit, and an
// order.
func (s *shop) resume(w io.Writer, crashAt string) error {
	build := func(ctx context.Context, e journal.Entry) (*http.Request, error) {
		if e.Name != "charge" {
			return nil, nil // somebody else's
		}
		var amount int
		if err := s.db.QueryRowContext(ctx, "SELECT amount FROM orders WHERE id = ?", e.ID).Scan(&amount); err != nil {
			return nil, err
		}
		return s.charge(ctx, e.ID, amount)
	}
	done := func(e journal.Entry, resp *http.Response) error {
		if e.State != journal.Done {
			_, _ = fmt.Fprintf(w, "  %s: declined\n", e.ID)
			return nil // a real shop would mark its row in the same manner
		}
		ctx := context.Background()
		tx, err := s.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if _, err := tx.ExecContext(ctx, "UPDATE orders SET payment = ? WHERE id = ?", e.Reference, e.ID); err != nil {
			return err
		}
		if _, err := s.journal.FinishTx(ctx, tx, e, journal.Done, journal.Note{Attempts: 1, Status: resp.StatusCode, Reference: e.Reference}); err != nil {
			return err
		}
		if crashAt == "before "+e.ID {
			_, _ = fmt.Fprintf(w, "  %s: charged, and nobody has written it down\n", e.ID)
			crash()
		}
		if err := tx.Commit(); err != nil {
			return err
		}
		heard := "charged"
		if idem.ReportOf(resp).Replayed {
			heard = "was charged, the answer again"
		}
		_, _ = fmt.Fprintf(w, "  %s: %s, paid with %s\n", e.ID, heard, e.Reference)
		if crashAt == "after "+e.ID {
			crash()
		}
		return nil
	}
	resumed, err := s.client.Resume(context.Background(), build, done)
	_, _ = fmt.Fprintf(w, "  %v\n", resumed)
	return err
}

// crash is kill -9: no deferred call runs, nothing is flushed.
func crash() {
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Kill()
	}
	select {} // until it arrives
}

// run plays the customers, the provider, and the person who starts the shop.
func run(w io.Writer) error {
	server, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer server.Close()
	folder, err := os.MkdirTemp("", "outbox-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	file := filepath.Join(folder, "shop.db")
	secret, err := journal.NewSecret() // once; then it is kept where the shop's other secrets are
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	start := func(mode string, more ...string) error {
		c := exec.Command(self, append([]string{mode, file, server.URL()}, more...)...)
		c.Env = append(os.Environ(), secretVariable+"="+hex.EncodeToString(secret[:]))
		c.Stdout, c.Stderr = w, os.Stderr
		return c.Run()
	}
	// killed wants the shop to end by its own crash, and by nothing else.
	killed := func(err error) error {
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Exited() {
			return fmt.Errorf("the shop was to be killed, and ended with: %v", err)
		}
		return nil
	}
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }

	say("Four orders come in. The shop is killed before it sends a charge.")
	if err := killed(start("order")); err != nil {
		return err
	}
	say("  the provider has heard of %d", len(server.Sends()))

	say("")
	say("The shop starts again. It is killed when order-2 is charged, before that is committed.")
	if err := killed(start("resume", "before order-2")); err != nil {
		return err
	}

	say("")
	say("Again. It is killed right after the commit.")
	if err := killed(start("resume", "after order-2")); err != nil {
		return err
	}

	say("")
	say("Again. Then nothing is left to do.")
	if err := start("resume", ""); err != nil {
		return err
	}

	say("")
	db, err := open(file)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	var orders, paid, doubled int
	if err := db.QueryRow("SELECT count(*), count(payment) FROM orders").Scan(&orders, &paid); err != nil {
		return err
	}
	charges := server.Effects()
	of := map[string]int{}
	for _, c := range charges {
		of[c.Reference]++
		var payment string
		if err := db.QueryRow("SELECT payment FROM orders WHERE id = ?", c.Reference).Scan(&payment); err != nil || payment != c.ID {
			return fmt.Errorf("%s is for %s, whose row does not say so (%q, %v)", c.ID, c.Reference, payment, err)
		}
	}
	for _, n := range of {
		doubled += n - 1
	}
	rolledBack := 1
	if of["order-3"] > 0 {
		rolledBack = 0
	}
	say("ledger: orders=%d paid=%d charges=%d doubled=%d rolled_back=%d", orders, paid, len(charges), doubled, rolledBack)
	if orders != 3 || paid != 3 || len(charges) != 3 || doubled != 0 || rolledBack != 1 {
		return errors.New("want three orders, each paid with one charge, and none for the fourth")
	}
	return nil
}
