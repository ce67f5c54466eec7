// Doubleclick lets one click reach two replicas of a shop at the same time.
//
//	go run ./examples/doubleclick
//	go run ./examples/doubleclick -n 100
//
// A customer clicks twice, a browser sends again, a load balancer repeats a
// request: the same order is paid by two processes at once. Both name the operation
// after the payment attempt that was written down before ("order-1/1"), and share a
// journal in one SQLite file. So one of them claims the operation and charges; the other one
// waits for it, and then asks the provider for the stored answer with the same
// key. Both customers see the same payment. The provider takes 300 ms for a charge,
// so that the clicks always meet. Then each button is clicked a third time. You
// see how the clicks on three orders went, and the last line is from the
// provider's ledger and the answers of the replicas; the exit status is 1 unless each order was
// charged once and every click was answered with that payment.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal/sqljournal"
)

// Each replica is a process of its own: this program starts itself.
func main() {
	var err error
	if len(os.Args) == 4 && os.Args[1] == "replica" {
		err = replica(os.Stdin, os.Stdout, os.Args[2], os.Args[3])
	} else {
		n := flag.Int("n", 20, "orders, each clicked three times")
		flag.Parse()
		err = run(os.Stdout, *n)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "doubleclick:", err)
		os.Exit(1)
	}
}

// click is what a replica says of one.
type click struct {
	Order    string
	Payment  string // as the customer sees it
	Outcome  string
	Replayed bool
	Sends    int
	Err      string
}

// replica pays an order for each line that it reads, all at the same time.
func replica(in io.Reader, out io.Writer, provider, file string) error {
	j, err := sqljournal.OpenSQLite(file, sqljournal.Options{})
	if err != nil {
		return err
	}
	defer func() { _ = j.Close() }()
	dialect := idem.Generic
	dialect.Name, dialect.KeyWindow, dialect.Reference = "cards", 24*time.Hour, []string{"/id"}
	transport := &idem.Transport{Dialect: dialect, Journal: j}
	defer transport.CloseIdleConnections()
	client := idem.NewClient(transport)

	var clicks sync.WaitGroup
	var mu sync.Mutex // guards answers
	answers := json.NewEncoder(out)
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		order := lines.Text()
		clicks.Go(func() {
			c := pay(client, provider, order)
			mu.Lock()
			defer mu.Unlock()
			_ = answers.Encode(c) // who started this replica notices a missing answer
		})
	}
	clicks.Wait()
	return lines.Err()
}

func pay(client *idem.Client, provider, order string) (c click) {
	c.Order = order
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	// The click's own identity would be wrong here: two clicks are two ids. The
	// payment attempt is a row of the order, made when the page was shown.
	ctx = idem.WithOperation(ctx, idem.Operation{Name: "charge", ID: order + "/1"})
	body := fmt.Sprintf(`{"amount":1999,"currency":"eur","reference":%q}`, order)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, provider+"/v1/payments", strings.NewReader(body))
	if err != nil {
		c.Err = err.Error()
		return c
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	c.Outcome = idem.OutcomeOf(resp, err).String()
	if err != nil {
		c.Err = err.Error()
		return c
	}
	defer func() { _ = resp.Body.Close() }()
	report := idem.ReportOf(resp)
	c.Replayed, c.Sends = report.Replayed, report.Sends
	var made struct{ ID string }
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil {
		c.Err = err.Error()
		return c
	}
	c.Payment = made.ID
	return c
}

// running is a replica that was started.
type running struct {
	command *exec.Cmd
	in      io.WriteCloser
	out     *json.Decoder
}

func start(provider, file string) (*running, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	r := &running{command: exec.Command(self, "replica", provider, file)}
	r.command.Stderr = os.Stderr
	if r.in, err = r.command.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := r.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	r.out = json.NewDecoder(out)
	return r, r.command.Start()
}

// stop lets a replica finish what it does, and end.
func (r *running) stop() error {
	return errors.Join(r.in.Close(), r.command.Wait())
}

func run(w io.Writer, n int) (err error) {
	if n < 1 {
		return errors.New("-n must be at least 1")
	}
	server, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer server.Close()
	// The charge has happened, and its answer is still to come: the time in
	// which a second one would hurt.
	if err := server.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Point: fakeserver.DuringEffect, Delay: 300 * time.Millisecond, Send: 1}); err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "doubleclick-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()

	var shop [2]*running
	for i := range shop {
		if shop[i], err = start(server.URL(), filepath.Join(folder, "idem.db")); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, shop[i].stop()) }()
	}
	answers := map[string][]click{}
	collect := func(r *running, n int) error {
		for range n {
			var c click
			if err := r.out.Decode(&c); err != nil {
				return fmt.Errorf("a replica ended early: %w", err)
			}
			answers[c.Order] = append(answers[c.Order], c)
		}
		return nil
	}
	var orders strings.Builder
	for i := range n {
		_, _ = fmt.Fprintf(&orders, "order-%d\n", i+1)
	}
	for _, r := range shop {
		if _, err := io.WriteString(r.in, orders.String()); err != nil {
			return err
		}
	}
	for _, r := range shop {
		if err := collect(r, n); err != nil {
			return err
		}
	}
	// Much later, to somebody who found the page still open.
	if _, err := io.WriteString(shop[1].in, orders.String()); err != nil {
		return err
	}
	if err := collect(shop[1], n); err != nil {
		return err
	}

	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	clicks, right, charges, doubled := 0, 0, 0, 0
	for i := range n {
		order := fmt.Sprintf("order-%d", i+1)
		made := server.Effects(fakeserver.Filter{Reference: order})
		charges += len(made)
		doubled += max(0, len(made)-1)
		for k, c := range answers[order] {
			if clicks++; len(made) == 1 && c.Payment == made[0].ID && c.Err == "" {
				right++
			}
			if i < 3 || c.Err != "" {
				say("%s, replica %d: %s %s, sends %d, replayed %t %s", order, min(k, 1)+1, c.Outcome, c.Payment, c.Sends, c.Replayed, c.Err)
			}
		}
	}
	say("orders=%d clicks=%d charges=%d doubled=%d answered=%d sends=%d", n, clicks, charges, doubled, right, len(server.Sends()))
	if clicks != 3*n || charges != n || doubled != 0 || right != clicks {
		return errors.New("want one charge for each order, and every click answered with it")
	}
	return nil
}
