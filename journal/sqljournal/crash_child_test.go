//go:build unix

package sqljournal_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"modernc.org/sqlite"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// crashVar has the task of a child process: the test binary, started again. A
// crash is only real if the whole process dies.
const crashVar = "IDEM_CRASH_TASK"

// crashTask is what a child process is told to do.
type crashTask struct {
	Path, URL string        // of the journal, of the server
	Do        []string      // one after the other: see crashLife.do
	Orders    []string      // that "pay" and "work" pay
	Many      int           // so many orders more
	Workers   int           // 0: 1
	Lease     time.Duration // 0: 200 ms
	Window    time.Duration // 0: crashKeyWindow
	Limit     time.Duration // of an attempt; 0: 30 s, so that a slow machine makes no second one
	Attempts  int           // 0: 1000
	Resumes   int           // 0: 1000, because most crashes here are made on purpose
	Busy      time.Duration // how long it waits for others; 0: patience
	Bodiless  bool          // the requests have no body
	Die, Stop string        // the step at which it kills itself, or stops itself
	Nth       int           // of the step; 0: 1
	Wrong     string        // a broken build; see crash_control_test.go
}

// crashReport is what a child tells its parent, a line of JSON each.
type crashReport struct {
	What    string // "open", "claim", "resumed", "pending", "step", "written late", "end", "error"
	Text    string
	Order   string
	Key     string       // of a claim, or of what was written late
	Outcome idem.Outcome // of a claim
	Again   bool         // made by a resume
	At      time.Time
	Resumed idem.Resumed
	Busy    bool
	Pending int // entries, of which
	Expired int // must not be sent any more, and
	Stuck   int // need attention
}

// init makes the process a child if it was started as one. It must come before
// the flags of the tests are read, and before TestMain.
func init() {
	task := os.Getenv(crashVar)
	if task == "" {
		return
	}
	l := &crashLife{out: os.NewFile(3, "reports"), stdin: make(chan struct{})}
	if err := json.Unmarshal([]byte(task), &l.crashTask); err != nil {
		panic(err)
	}
	go func() { // an orphan ends
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(l.stdin)
		time.Sleep(5 * time.Second) // enough for an orderly end
		os.Exit(3)
	}()
	if err := l.live(); err != nil {
		l.report(crashReport{What: "error", Text: err.Error()})
		os.Exit(1)
	}
	l.report(crashReport{What: "end"})
	os.Exit(0)
}

// crashLife is the life of a child.
type crashLife struct {
	crashTask
	stdin  chan struct{} // closed when the parent lets go
	client *idem.Client

	mu  sync.Mutex // guards out
	out *os.File

	steps    sync.Map   // of step to *atomic.Int64, how often it came
	renewing sync.Mutex // held by a renewal, and by a step that stops the process
	sweeping atomic.Bool
}

func (l *crashLife) report(r crashReport) {
	r.At = time.Now()
	line, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = l.out.Write(append(line, '\n')) // a parent that is gone hears nothing
}

// at is a step of the work: where the task says so, it is the last.
func (l *crashLife) at(step string) {
	if step != l.Die && step != l.Stop {
		return
	}
	n, _ := l.steps.LoadOrStore(step, new(atomic.Int64))
	if n.(*atomic.Int64).Add(1) != int64(max(l.Nth, 1)) {
		return
	}
	if step == l.Die {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // not one more instruction of the work
	}
	if step != "row" && step != "commit" {
		// A renewal that happens to be under way is not to be stopped within its
		// transaction, which would keep all others from writing.
		l.renewing.Lock()
		defer l.renewing.Unlock()
	}
	woken := make(chan os.Signal, 1)
	signal.Notify(woken, syscall.SIGCONT)
	l.report(crashReport{What: "step", Text: step})
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	<-woken // this thread may go on for a while before the signal stops it
}

func (l *crashLife) live() error {
	l.watchSQLite()
	l.watchFiles()
	l.at("open")
	store, err := sqljournal.OpenSQLite(l.Path, sqljournal.Options{Lease: cmp.Or(l.Lease, shortLease), BusyTimeout: cmp.Or(l.Busy, patience)})
	if errors.Is(err, sqljournal.ErrBusy) && l.Busy > 0 {
		l.report(crashReport{What: "cannot open", Busy: true})
		return nil
	}
	if err != nil {
		return err
	}
	l.report(crashReport{What: "open"})
	l.client = idem.NewClient(&idem.Transport{
		Base:    answeredBase{http.DefaultTransport, l},
		Journal: steppedJournal{wrongBuild(l.Wrong, store), l},
		Dialect: crashDialect(),
		Policy: idem.Policy{
			MaxAttempts:    cmp.Or(l.Attempts, 1000),
			AttemptTimeout: cmp.Or(l.Limit, 30*time.Second),
			MaxInProgress:  1000,
			BackoffBase:    2 * time.Millisecond,
			BackoffCap:     100 * time.Millisecond,
			ThrottleBase:   5 * time.Millisecond,
			KeyWindow:      cmp.Or(l.Window, crashKeyWindow),
			MaxResumes:     cmp.Or(l.Resumes, 1000),
			ResumePace:     -1,
			ResumeWait:     30 * time.Second,
			Budget:         &idem.Budget{Capacity: -1}, // most answers may be lost
		},
		Prepare: func(*http.Request) error { l.at("prepare"); return nil },
		Hooks: idem.Hooks{
			AttemptStart: func(context.Context, *idem.Report, int) context.Context { l.at("attempt"); return nil },
			Waiting:      func(context.Context, *idem.Report, idem.Attempt) { l.at("waiting") },
		},
	})
	for _, verb := range l.Do {
		if err := l.do(verb, store); err != nil {
			return fmt.Errorf("%s: %w", verb, err)
		}
	}
	return store.Close()
}

// do does one thing.
func (l *crashLife) do(verb string, store *sqljournal.Journal) error {
	ctx := l.traced(context.Background())
	switch verb {
	case "resume":
		return l.resume(ctx)
	case "pay":
		l.pay(ctx)
	case "work": // both at once
		resumed := make(chan error)
		go func() { resumed <- l.resume(ctx) }()
		l.pay(ctx)
		return <-resumed
	case "fill":
		return fill(ctx, store)
	case "sweep":
		l.sweeping.Store(true)
		_, err := store.Sweep(ctx, time.Millisecond)
		return err
	case "pending":
		r := crashReport{What: "pending"}
		for p, err := range l.client.Pending(ctx) {
			if err != nil {
				return err
			}
			r.Pending++
			if p.Left <= 0 {
				r.Expired++
			}
			if p.Attention {
				r.Stuck++
			}
		}
		l.report(r)
	case "wait":
		<-l.stdin
	default:
		return errors.New("no such verb")
	}
	return nil
}

// crashDialect knows what the server says of declined cards.
func crashDialect() idem.Dialect {
	d := idem.Generic
	d.Refusal = []idem.Mark{{Status: http.StatusPaymentRequired}}
	d.Reference = []string{"/id"}
	return d
}

// twoCards reports whether an order is paid with a card that is declined, and
// then, under the same name, with another: the second key is a random one, which
// nobody could derive from the name again.
func twoCards(order string) bool { return strings.HasPrefix(order, "declined-") }

// newPayment is the request of an order; generation 1 may be the declined card.
func (l *crashLife) newPayment(ctx context.Context, order string, generation int) (*http.Request, error) {
	if l.Bodiless {
		return http.NewRequestWithContext(ctx, http.MethodPost, l.URL+"/v1/empty?reference="+order, nil)
	}
	source := "tok_visa"
	if twoCards(order) && generation == 1 {
		source = "tok_declined"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, l.URL+"/v1/payments", strings.NewReader(crashBody(order, source)))
	if err == nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return req, err
}

func crashBody(order, source string) string {
	return fmt.Sprintf(`{"amount":1999,"currency":"eur","reference":%q,"source":%q}`, order, source)
}

// resume goes on with what is pending and reports each end.
func (l *crashLife) resume(ctx context.Context) error {
	sum, err := l.client.Resume(ctx, func(ctx context.Context, e journal.Entry) (*http.Request, error) {
		return l.newPayment(ctx, e.ID, e.Generation)
	}, func(e journal.Entry, _ *http.Response) error {
		outcome := idem.Executed
		if e.State == journal.Refused {
			outcome = idem.Refused
		}
		l.report(crashReport{What: "claim", Order: e.ID, Key: e.Key, Outcome: outcome, Again: true})
		return nil
	})
	l.report(crashReport{What: "resumed", Resumed: sum, Text: fmt.Sprint(err)})
	return nil
}

// pay pays the orders and reports each claim.
func (l *crashLife) pay(ctx context.Context) {
	orders := make(chan string)
	var workers sync.WaitGroup
	for range max(l.Workers, 1) {
		workers.Go(func() {
			for order := range orders {
				if twoCards(order) && l.call(ctx, order, 1) != idem.Refused {
					continue // not known yet: the resume sees to it
				}
				l.call(ctx, order, 2)
			}
		})
	}
	for _, order := range l.Orders {
		order, second := strings.CutPrefix(order, "second card: ")
		if second {
			l.call(ctx, order, 2)
			continue
		}
		orders <- order
	}
	for n := range l.Many {
		orders <- fmt.Sprintf("order-%d", n+1)
	}
	close(orders)
	workers.Wait()
}

func (l *crashLife) call(ctx context.Context, order string, generation int) idem.Outcome {
	var report idem.Report
	ctx = idem.WithReport(idem.WithOperation(ctx, idem.Operation{Name: "payment", ID: order}), &report)
	req, err := l.newPayment(ctx, order, generation)
	if err != nil {
		panic(err)
	}
	resp, err := l.client.Do(req)
	if err == nil {
		_ = resp.Body.Close()
	}
	outcome := idem.OutcomeOf(resp, err)
	l.report(crashReport{What: "claim", Order: order, Key: report.Key, Outcome: outcome, Text: fmt.Sprint(err)})
	return outcome
}

// traced tells of the steps that net/http takes.
func (l *crashLife) traced(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn:      func(httptrace.GotConnInfo) { l.at("connected") },
		WroteHeaders: func() { l.at("headers in the buffer") },
		WroteRequest: func(httptrace.WroteRequestInfo) { l.at("written") },
	})
}

// answeredBase tells of the answer's headers, before its body is read, and of a
// request that was written long after its body was read.
type answeredBase struct {
	http.RoundTripper
	l *crashLife
}

func (b answeredBase) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.ContentLength > 0 {
		read := &timedBody{ReadCloser: req.Body}
		req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{WroteRequest: func(w httptrace.WroteRequestInfo) {
			if since := time.Since(time.Unix(0, read.last.Load())); w.Err == nil && since > windowMargin/4 {
				b.l.report(crashReport{What: "written late", Key: strings.Trim(req.Header.Get(idem.Generic.Header), `"`), Text: since.String()})
			}
		}}))
		req.Body = read
	}
	resp, err := b.RoundTripper.RoundTrip(req)
	if err == nil {
		b.l.at("answered")
	}
	return resp, err
}

// timedBody knows when it was last read: the last moment at which anything can stop a
// request.
type timedBody struct {
	io.ReadCloser
	last atomic.Int64
}

func (b *timedBody) Read(p []byte) (int, error) {
	b.last.Store(time.Now().UnixNano())
	return b.ReadCloser.Read(p)
}

// steppedJournal tells of the steps around a journal.
type steppedJournal struct {
	journal.Journal
	l *crashLife
}

func (j steppedJournal) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	j.l.at("before begin")
	e, err := j.Journal.Begin(ctx, in)
	if err == nil {
		j.l.at("begun")
	}
	return e, err
}

func (j steppedJournal) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	j.l.renewing.Lock()
	defer j.l.renewing.Unlock()
	return j.Journal.Renew(ctx, e, n)
}

func (j steppedJournal) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	j.l.at("before finish")
	e, err := j.Journal.Finish(ctx, e, s, n)
	if err == nil {
		j.l.at("finished")
	}
	return e, err
}

// watchSQLite tells of what SQLite does in the tables: the rows that it writes
// and the transactions that it is about to commit.
func (l *crashLife) watchSQLite() {
	sqlite.RegisterConnectionHook(func(c sqlite.ExecQuerierContext, _ string) error {
		hooks := c.(sqlite.HookRegisterer)
		hooks.RegisterPreUpdateHook(func(sqlite.SQLitePreUpdateData) { l.atSQLite("row") })
		hooks.RegisterCommitHook(func() int32 { l.atSQLite("commit"); return 0 })
		l.at("connection")
		return nil
	})
}

func (l *crashLife) atSQLite(step string) {
	if l.sweeping.Load() {
		step += " of a sweep"
	}
	l.at(step)
}

// fill puts finished entries into the journal that are old enough to be swept.
func fill(ctx context.Context, j journal.Journal) error {
	var callers sync.WaitGroup // they share the flushes of the disk
	failed := make(chan error, 400)
	for i := range cap(failed) {
		callers.Go(func() {
			e, err := j.Begin(ctx, journal.Intent{
				Operation: crashOperation(fmt.Sprintf("filled-%d", i)), Key: fmt.Sprintf("key-%d", i), NextKey: "next",
				Shape: [32]byte{1}, Request: make([]byte, 100),
			})
			if err == nil {
				_, err = j.Finish(ctx, e, journal.Done, journal.Note{Attempts: 1})
			}
			failed <- err
		})
	}
	callers.Wait()
	close(failed)
	for err := range failed {
		if err != nil {
			return err
		}
	}
	time.Sleep(2 * time.Millisecond) // so that they are older than the sweep keeps them
	return nil
}

// watchFiles looks for the file that the step names, "file .secret" for
// example, and is as fast as a process can be that does nothing else.
func (l *crashLife) watchFiles() {
	suffix, ok := strings.CutPrefix(l.Die, "file ")
	if !ok {
		return
	}
	go func() {
		for {
			if found, _ := filepath.Glob(l.Path + suffix); len(found) > 0 {
				l.at(l.Die)
			}
		}
	}()
}
