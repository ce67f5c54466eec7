//go:build unix

package sqljournal_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

var (
	crashRounds = flag.Int("rounds", 40, "how often the crash tests kill a process at a random moment")
	crashDraw   = flag.Uint64("seed", 0, "of the crash tests; 0: another each time")
)

// crashWorld is a server, a journal, and what was claimed.
type crashWorld struct {
	server *fakeserver.Server
	path   string // of the journal
	claims []crashReport
	late   []crashReport // what was written late
}

func newCrashWorld(t *testing.T, faults ...fakeserver.Fault) *crashWorld {
	t.Helper()
	w := &crashWorld{server: fakeserver.New(), path: filepath.Join(t.TempDir(), "idem.db")}
	t.Cleanup(w.server.Close)
	// Without a Retry-After the client asks again within milliseconds.
	w.server.Apply(fakeserver.Settings{ForgetHeaders: true, InProgressRetryAfter: "-"})
	require.NoError(t, w.server.Inject(faults...))
	return w
}

// crashProcess is a child process. It ends with the test at the latest.
type crashProcess struct {
	t      *testing.T
	w      *crashWorld
	cmd    *exec.Cmd
	stderr bytes.Buffer
	lines  chan crashReport // closed when it has ended
	ended  sync.Once
}

// start starts a child with a task.
func (w *crashWorld) start(t *testing.T, task crashTask) *crashProcess {
	t.Helper()
	task.Path, task.URL = w.path, w.server.URL()
	text, err := json.Marshal(task)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	p := &crashProcess{t: t, w: w, cmd: exec.Command(self), lines: make(chan crashReport, 1000+task.Many)}
	p.cmd.Env = append(os.Environ(), crashVar+"="+string(text))
	p.cmd.ExtraFiles = []*os.File{writer}
	p.cmd.Stderr = &p.stderr
	_, err = p.cmd.StdinPipe() // the child ends when this process does
	require.NoError(t, err)
	err = p.cmd.Start()
	require.NoError(t, errors.Join(err, writer.Close()))
	go func() {
		defer close(p.lines)
		defer func() { _ = reader.Close() }()
		for lines := bufio.NewScanner(reader); lines.Scan(); {
			var r crashReport
			if json.Unmarshal(lines.Bytes(), &r) == nil { // the last line of a killed process may be cut
				p.lines <- r
			}
		}
	}()
	t.Cleanup(p.kill)
	return p
}

// signal sends one to the child.
func (p *crashProcess) signal(s syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(s))
}

// kill ends the child with SIGKILL, wherever it is.
func (p *crashProcess) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	p.end()
}

// end waits until the child has ended.
func (p *crashProcess) end() {
	p.ended.Do(func() {
		for r := range p.lines {
			p.heard(r)
		}
		_ = p.cmd.Wait() // killed is how most of them end
		if s := p.stderr.String(); s != "" {
			p.t.Errorf("the child says: %s", s)
		}
	})
}

func (p *crashProcess) heard(r crashReport) {
	switch r.What {
	case "claim":
		p.w.claims = append(p.w.claims, r)
	case "written late":
		p.w.late = append(p.w.late, r)
	case "error":
		p.t.Errorf("the child failed: %s", r.Text)
	}
}

// says waits for a report of one kind.
func (p *crashProcess) says(what string) crashReport {
	p.t.Helper()
	patience := time.NewTimer(30 * time.Second)
	defer patience.Stop()
	for {
		select {
		case r, ok := <-p.lines:
			require.True(p.t, ok, "the child ended before it said %q", what)
			if p.heard(r); r.What == what {
				return r
			}
		case <-patience.C:
			require.Fail(p.t, "the child does not say "+what)
		}
	}
}

// lives runs a child to its orderly end and gives its reports of one kind.
func (w *crashWorld) lives(t *testing.T, task crashTask, what string) (all []crashReport) {
	t.Helper()
	p := w.start(t, task)
	defer p.kill()
	ended := false
	for r := range p.lines {
		p.heard(r)
		ended = ended || r.What == "end"
		if r.What == what {
			all = append(all, r)
		}
	}
	require.True(t, ended, "the child did not come to its end")
	return all
}

// resumes runs a child that resumes, and gives what it did.
func (w *crashWorld) resumes(t *testing.T, task crashTask) idem.Resumed {
	t.Helper()
	task.Do = []string{"resume"}
	all := w.lives(t, task, "resumed")
	require.Len(t, all, 1)
	require.Equal(t, "<nil>", all[0].Text)
	return all[0].Resumed
}

// dies runs a child that kills itself at the step of its task.
func (w *crashWorld) dies(t *testing.T, task crashTask) {
	t.Helper()
	require.True(t, w.mayDie(t, task), "step %q was not reached", task.Die)
}

// mayDie is dies where the step may not be reached; then the child ends.
func (w *crashWorld) mayDie(t *testing.T, task crashTask) bool {
	t.Helper()
	p := w.start(t, task)
	p.end()
	if p.cmd.ProcessState.Success() {
		return false
	}
	status := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	require.True(t, status.Signaled() && status.Signal() == syscall.SIGKILL, "%v", p.cmd.ProcessState)
	return true
}

// inspect opens a copy of the journal as it is on the disk now. The next
// process finds the original untouched, and no file of a database that this
// process has open is opened and closed, which would end its locks.
func (w *crashWorld) inspect(t *testing.T, look func(*sqljournal.Journal)) {
	t.Helper()
	dir, err := os.MkdirTemp("", "idem-crash-")
	require.NoError(t, err)
	defer func() { require.NoError(t, os.RemoveAll(dir)) }()
	for _, suffix := range []string{"", "-wal", ".secret"} {
		b, err := os.ReadFile(w.path + suffix)
		if errors.Is(err, fs.ErrNotExist) {
			return // it was killed before there was a journal
		}
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "idem.db"+suffix), b, 0o600))
	}
	j, err := sqljournal.OpenSQLite(filepath.Join(dir, "idem.db"), sqljournal.Options{})
	require.NoError(t, err, "the journal cannot be read after a crash")
	defer func() { require.NoError(t, j.Close()) }()
	look(j)
}

func crashOperation(order string) journal.Operation {
	return journal.Operation{Name: "payment", ID: order}
}

// entry is what is on the disk of an order; ok is false if that is nothing.
func (w *crashWorld) entry(t *testing.T, order string) (e journal.Entry, ok bool) {
	t.Helper()
	w.inspect(t, func(j *sqljournal.Journal) {
		var err error
		if e, err = j.Get(t.Context(), crashOperation(order)); !errors.Is(err, journal.ErrNotFound) {
			require.NoError(t, err)
			ok = true
		}
	})
	return e, ok
}

// leaseEnds waits for the end of the lease that is on the disk now: that of a process
// which is dead or stopped, and renews it no more.
func (w *crashWorld) leaseEnds(t *testing.T, order string) {
	t.Helper()
	e, ok := w.entry(t, order)
	require.True(t, ok, "%s is not in the journal", order)
	require.NotEmpty(t, e.Owner)
	time.Sleep(time.Until(e.Lease) + time.Millisecond) // a lease ends in real time
}

// ended waits until the server is done with n sends of a key. What a process wrote may
// arrive after its death, and run while the next process sends.
func (w *crashWorld) ended(t *testing.T, key string, n int) {
	t.Helper()
	eventually(t, "the server is done with what was sent", func() bool {
		sends := w.server.Sends(fakeserver.Filter{Key: key})
		return len(sends) >= n && !slices.ContainsFunc(sends, func(s fakeserver.Send) bool { return s.Ended.IsZero() })
	})
}

// judge compares the ledger with the claims and with the journal, and says what is
// wrong. orders were given to children; at the end all of them must be done.
func (w *crashWorld) judge(t *testing.T, orders []string, window time.Duration, end bool) (wrong []string) {
	t.Helper()
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	sends, effects := map[string][]fakeserver.Send{}, map[string][]fakeserver.Effect{}
	arrived, firsts, bodies := map[int]time.Time{}, map[string]time.Time{}, map[string]string{}
	// The effects first: the sends that they belong to are then listed.
	for _, e := range w.server.Effects() {
		effects[e.Reference] = append(effects[e.Reference], e)
	}
	for _, s := range w.server.Sends() {
		arrived[s.N] = s.At
		if s.Duplicate {
			continue
		}
		sends[s.Key] = append(sends[s.Key], s)
		if first, ok := firsts[s.Key]; !ok {
			firsts[s.Key] = s.At
		} else if s.At.Sub(first) > window {
			say("key %s: sent %v after its first send", s.Key, s.At.Sub(first))
		}
		if s.BodySHA256 != "" {
			if before, ok := bodies[s.Key]; ok && before != s.BodySHA256 {
				say("key %s: sent with another body", s.Key)
			}
			bodies[s.Key] = s.BodySHA256
		}
	}
	for _, order := range orders {
		switch n := len(effects[order]); {
		case n > 1:
			say("%s: doubled: %d effects", order, n)
		case n == 0 && end:
			say("%s: lost: no effect", order)
		}
	}
	for _, c := range w.claims {
		happened, coming := false, false
		for _, e := range effects[c.Order] {
			happened = happened || !e.At.After(c.At)
			// What is sent later makes no earlier claim false, and another card is
			// another key.
			coming = coming || e.Key == c.Key && !arrived[e.Send].After(c.At)
		}
		switch {
		case c.Outcome == idem.Executed && !happened:
			say("%s: false success", c.Order)
		case (c.Outcome == idem.Refused || c.Outcome == idem.NotExecuted) && coming:
			say("%s: false failure: %v", c.Order, c.Outcome)
		}
	}
	w.inspect(t, func(j *sqljournal.Journal) {
		known := map[string]string{} // key to order
		for _, order := range orders {
			e, err := j.Get(t.Context(), crashOperation(order))
			switch {
			case errors.Is(err, journal.ErrNotFound):
				if end {
					say("%s: not in the journal", order)
				}
				continue
			case err != nil:
				say("%s: %v", order, err)
				continue
			case end && e.State != journal.Done:
				say("%s: %v at the end", order, e.State)
			}
			known[e.Key] = order
			if e.Generation > 1 { // whose first key is the one that follows from the name
				first, err := idem.DeriveKey("", "payment", order)
				require.NoError(t, err)
				known[first] = order
			}
		}
		for key, of := range sends {
			order, ok := known[key]
			if !ok {
				say("key %s of %q: at the server, and not in the journal", key, of[0].Reference)
			}
			for _, s := range of {
				if ok && s.Reference != "" && s.Reference != order {
					say("key %s of %s: the journal says that it is of %s", key, s.Reference, order)
				}
			}
		}
		for e, err := range j.Pending(t.Context()) {
			if err != nil {
				say("pending: %v", err)
			} else if end {
				say("%s: still pending", e.ID)
			}
		}
	})
	return wrong
}

// keysOf is the keys under which an order arrived, in order.
func (w *crashWorld) keysOf(order string) (keys []string) {
	for _, s := range w.server.Sends(fakeserver.Filter{Reference: order}) {
		if !slices.Contains(keys, s.Key) {
			keys = append(keys, s.Key)
		}
	}
	return keys
}

// story is what a failed test shows.
func (w *crashWorld) story() string {
	var b strings.Builder
	for _, s := range w.server.Sends() {
		fmt.Fprintf(&b, "%s  send %d of %s, key %.8s, status %d, effect %d, %s\n", s.At.Format("05.000"), s.N, s.Reference, s.Key, s.Status, s.Effect, s.Fault)
	}
	for _, c := range w.claims {
		fmt.Fprintf(&b, "%s  claim: %s %v %s\n", c.At.Format("05.000"), c.Order, c.Outcome, c.Text)
	}
	lines := strings.Split(b.String(), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// crashGroup runs subtests at the same time, more of them than -parallel allows:
// they wait for leases and for other processes most of the time.
type crashGroup struct {
	running sync.WaitGroup
	places  chan struct{}
}

func newCrashGroup(t *testing.T) *crashGroup {
	g := &crashGroup{places: make(chan struct{}, 8)}
	t.Parallel()
	return g
}

// run needs a wait at the end of the test.
func (g *crashGroup) run(t *testing.T, name string, f func(t *testing.T)) {
	g.running.Go(func() {
		g.places <- struct{}{}
		defer func() { <-g.places }()
		t.Run(name, f)
	})
}

func (g *crashGroup) wait() { g.running.Wait() }

// eventually waits for what another process does.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for until := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) { // there is no event to wait for
		require.True(t, time.Now().Before(until), what)
	}
}
