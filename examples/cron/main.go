// Cron charges five subscriptions once a day, however often it is started.
//
//	go run ./examples/cron
//
// The operation's ID names the day and the subscription, and a journal on disk
// remembers each of them. So a run that is started again after a crash, by
// hand, or for yesterday, charges nothing twice. You see a run that is
// killed right after the provider charged a card; the same day again, which
// gets the answers again and charges the rest; that day once more when the provider
// has forgotten its keys, so that a request with the same key would be a
// second charge, and nothing is sent; the next day; and the first day again
// after a sweep of the journal. The last line is from the provider's ledger;
// the exit status is 1 if it is not one charge for each subscription and day.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal/sqljournal"
)

// day is what this example takes for 24 hours, so that you need not wait for
// one: the provider remembers a key for so long, and the next run comes after
// it. The timeouts below are short because of it.
const day = 8 * time.Second

var subscriptions = []string{"sub-1", "sub-2", "sub-3", "sub-4", "sub-5"}

// As with cron, each run is a process of its own: this program starts itself.
func main() {
	var err error
	if len(os.Args) == 5 && os.Args[1] == "charge" {
		err = charge(os.Stdout, os.Args[2], os.Args[3], os.Args[4])
	} else {
		err = run(os.Stdout)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "cron:", err)
		os.Exit(1)
	}
}

// provider says what this provider's documentation does: how long it remembers
// a key, and where its answers have the id of the payment, which the journal
// keeps. Nothing is sent in the last AttemptTimeout of the window: it might
// arrive too late.
func provider() idem.Dialect {
	d := idem.Generic
	d.Name, d.KeyWindow, d.Reference = "cards", day, []string{"/id"}
	return d
}

// charge charges every subscription for one date.
func charge(w io.Writer, url, file, date string) error {
	// A killed process leaves a claim on what it was doing. The next one waits
	// until it ends, here for 200 ms; the default is 30 s.
	journal, err := sqljournal.OpenSQLite(file, sqljournal.Options{Lease: 200 * time.Millisecond})
	if err != nil {
		return err
	}
	defer func() { _ = journal.Close() }()
	transport := &idem.Transport{
		Journal: journal,
		Dialect: provider(),
		Policy:  idem.Policy{AttemptTimeout: 2 * time.Second},
	}
	defer transport.CloseIdleConnections()
	client := idem.NewClient(transport)

	var failed error
	for _, subscription := range subscriptions {
		said, err := chargeOne(client, url, date+"/"+subscription)
		if err != nil {
			// What is not known stays pending: the next run asks again, with
			// the same key. The others need not wait for it.
			failed = errors.Join(failed, fmt.Errorf("%s: %w", subscription, err))
			continue
		}
		_, _ = fmt.Fprintf(w, "  %s: %s\n", subscription, said)
	}
	return failed
}

// chargeOne makes one charge. id is the same in each run of the same date, and
// another on the next.
func chargeOne(client *idem.Client, url, id string) (said string, err error) {
	ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "charge", ID: id})
	// The body must be the same each time, too: no time stamp, nothing random.
	body := fmt.Sprintf(`{"amount":990,"currency":"eur","reference":%q}`, id)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/payments", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")

	resp, err := client.Do(req)
	var known *idem.Error
	switch {
	case errors.Is(err, idem.ErrAlreadyDone) && errors.As(err, &known):
		return "already done, see " + known.Reference, nil // as good as an answer
	case err != nil:
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusCreated {
		return "", errors.New(resp.Status)
	}
	var payment struct{ ID string }
	if err := json.NewDecoder(resp.Body).Decode(&payment); err != nil {
		return "", err
	}
	if idem.ReportOf(resp).Replayed {
		return "was charged, the answer again: " + payment.ID, nil
	}
	return "charged: " + payment.ID, nil
}

// run plays cron, the days, and the provider.
func run(w io.Writer) error {
	server, err := fakeserver.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer server.Close()
	server.Apply(fakeserver.Settings{Retention: day})
	folder, err := os.MkdirTemp("", "cron-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	file := filepath.Join(folder, "journal.db")
	process := func(date string) (*exec.Cmd, error) {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		c := exec.Command(self, "charge", server.URL(), file, date)
		c.Stdout, c.Stderr = w, os.Stderr
		return c, nil
	}
	// again runs it to its end and says how many requests it sent.
	again := func(date string) (sends int, err error) {
		c, err := process(date)
		if err != nil {
			return 0, err
		}
		before := len(server.Sends())
		err = c.Run()
		return len(server.Sends()) - before, err
	}
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }

	say("Monday. The third answer never comes, and the process is killed while it waits.")
	if err := server.Script("", fakeserver.Fault{}, fakeserver.Fault{}, fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}); err != nil {
		return err
	}
	c, err := process("monday")
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	for start := time.Now(); len(server.Effects()) < 3 && time.Since(start) < 10*time.Second; {
		time.Sleep(5 * time.Millisecond) // the ledger has to be asked
	}
	if err := c.Process.Kill(); err != nil {
		return err
	}
	_ = c.Wait() // it was killed, so this is an error
	say("  charged so far: %d", len(server.Effects()))

	say("")
	say("Monday, started again. What was charged is not charged again.")
	if _, err := again("monday"); err != nil {
		return err
	}

	sends := server.Sends()
	time.Sleep(time.Until(sends[len(sends)-1].At.Add(day + day/10))) // the night is over when the last key is forgotten
	say("")
	say("Tuesday. The provider has forgotten Monday's keys (%d of them).", server.Sweep())
	say("Somebody starts Monday once more. The journal knows better than to ask:")
	asked, err := again("monday")
	if err != nil {
		return err
	}
	say("  sent to the provider: %d", asked)
	say("And Tuesday's own run:")
	if _, err := again("tuesday"); err != nil {
		return err
	}

	say("")
	say("A sweep takes out of the journal what is no longer needed. That an operation")
	say("is done stays in it for 400 days. Monday, for the last time:")
	if err := sweep(file); err != nil {
		return err
	}
	askedAfterSweep, err := again("monday")
	if err != nil {
		return err
	}
	say("  sent to the provider: %d", askedAfterSweep)

	say("")
	charges, doubled := len(server.Effects()), 0
	for _, date := range []string{"monday", "tuesday"} {
		for _, s := range subscriptions {
			switch n := len(server.Effects(fakeserver.Filter{Reference: date + "/" + s})); {
			case n > 1:
				doubled++
			case n == 0:
				say("%s was not charged for %s", s, date)
			}
		}
	}
	say("ledger: days=2 subscriptions=%d charges=%d doubled=%d", len(subscriptions), charges, doubled)
	if charges != 2*len(subscriptions) || doubled != 0 || asked+askedAfterSweep != 0 {
		return errors.New("want one charge for each subscription and day, and no question about Monday on Tuesday")
	}
	return nil
}

// sweep would be a cron line of its own, once a week perhaps.
func sweep(file string) error {
	journal, err := sqljournal.OpenSQLite(file, sqljournal.Options{})
	if err != nil {
		return err
	}
	defer func() { _ = journal.Close() }()
	_, err = journal.Sweep(context.Background(), 0) // 0: 400 days
	return err
}
