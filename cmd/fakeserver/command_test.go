package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
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
)

var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "fakeserver-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "fakeserver")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		_, _ = os.Stderr.Write(out)
		return path, err
	}
	return path, nil
})

func TestMain(m *testing.M) {
	status := m.Run()
	if path, err := binary(); err == nil {
		_ = os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(status)
}

// command is the built binary while it runs.
type command struct {
	url    string
	cmd    *exec.Cmd
	stderr bytes.Buffer
	ended  sync.WaitGroup // of the reader of stdout

	mu    sync.Mutex // guards lines
	lines []string
}

func build(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	path, err := binary()
	require.NoError(t, err, "the command does not build")
	return exec.Command(path, args...)
}

// start runs the command on a free port until the test ends.
func start(t *testing.T, args ...string) *command {
	t.Helper()
	c := &command{cmd: build(t, append([]string{"-addr", ":0"}, args...)...)}
	c.cmd.Stderr = &c.stderr
	stdout, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	first := make(chan string, 1)
	c.ended.Go(func() {
		defer close(first)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			if c.add(s.Text()) == 1 {
				first <- s.Text()
			}
		}
	})
	c.url = <-first
	t.Cleanup(func() {
		if c.cmd.ProcessState == nil {
			c.stop(t, syscall.SIGTERM)
		}
	})
	require.Regexp(t, `^http://127\.0\.0\.1:\d+$`, c.url, "%s", &c.stderr)
	return c
}

func (c *command) add(line string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lines = append(c.lines, line)
	return len(c.lines)
}

func (c *command) printed() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.lines...)
}

func (c *command) stop(t *testing.T, s os.Signal) {
	t.Helper()
	require.NoError(t, c.cmd.Process.Signal(s))
	c.ended.Wait()
	require.NoError(t, c.cmd.Wait(), "it must end with status 0")
}

type reply struct {
	status int
	header http.Header
	body   string
	err    error
}

// ask is one request on a connection of its own; headers are name, value pairs.
func (c *command) ask(t *testing.T, method, path, body string, headers ...string) reply {
	t.Helper()
	req, err := http.NewRequest(method, c.url+path, strings.NewReader(body))
	require.NoError(t, err)
	req.GetBody = nil // or net/http would send it again by itself
	for i := 0; i < len(headers); i += 2 {
		if headers[i] == "Host" {
			req.Host = headers[i+1]
		}
		req.Header.Set(headers[i], headers[i+1])
	}
	transport := &http.Transport{DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport, Timeout: 20 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(data), err}
}

const body1999 = `{"amount":1999,"currency":"usd","reference":"order-1","source":"tok_visa"}`

func (c *command) pay(t *testing.T, key string, headers ...string) reply {
	t.Helper()
	return c.ask(t, "POST", "/v1/payments", body1999, append(headers, "Idempotency-Key", key)...)
}

// soon waits for what the command, or the reader of its lines, is about to do.
func soon(t *testing.T, happened func() bool) {
	t.Helper()
	for range 3000 {
		if happened() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("it did not happen within 30 seconds")
}

func list(t *testing.T, r reply) []map[string]any {
	t.Helper()
	require.Equal(t, 200, r.status, r.body)
	require.Equal(t, "application/json", r.header.Get("Content-Type"))
	var items []map[string]any
	require.NoError(t, json.Unmarshal([]byte(r.body), &items), r.body)
	return items
}

// settled waits until the server is done with every send: an answer may be quicker than the end of its send.
func (c *command) settled(t *testing.T) {
	t.Helper()
	soon(t, func() bool {
		return !slices.ContainsFunc(list(t, c.ask(t, "GET", "/_fake/sends", "")), func(n map[string]any) bool { return n["ended"] == nil })
	})
}

func (c *command) effects(t *testing.T, query string) []map[string]any {
	t.Helper()
	return list(t, c.ask(t, "GET", "/_fake/effects"+query, ""))
}

func requireProblem(t *testing.T, r reply, status int, kind string) map[string]any {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, status, r.status, r.body)
	require.Equal(t, "application/problem+json", r.header.Get("Content-Type"))
	var doc map[string]any
	require.NoError(t, json.Unmarshal([]byte(r.body), &doc), r.body)
	require.Equal(t, "https://fakeserver.test/problems/"+kind, doc["type"])
	require.Equal(t, float64(status), doc["status"])
	require.NotEmpty(t, doc["title"])
	require.NotEmpty(t, doc["detail"])
	return doc
}

func TestBothSignalsEndItCleanlyEvenWhileSendsAreHeld(t *testing.T) {
	for _, s := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		t.Run(s.String(), func(t *testing.T) {
			c := start(t)
			require.Equal(t, 200, c.ask(t, "PUT", "/_fake/faults", `[{"kind":"hang"}]`).status)
			held := make(chan reply, 1)
			go func() { held <- c.pay(t, "order-1") }()
			soon(t, func() bool { return len(list(t, c.ask(t, "GET", "/_fake/sends", ""))) == 1 })
			c.stop(t, s)
			err := (<-held).err
			require.Error(t, err)
			var timeout net.Error
			require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "it did not wait until the client left: %v", err)
			require.Empty(t, c.stderr.String())
		})
	}
}

func TestThereIsOneReadableLinePerSendAndNoneWhenQuiet(t *testing.T) {
	c := start(t, "-faults", "lost-answer")
	require.Error(t, c.pay(t, "order-1").err)
	require.Equal(t, 201, c.pay(t, "order-1").status)
	require.Error(t, c.ask(t, "GET", "/v1/payments/x%1b%5b31m%0a", "").err)
	c.stop(t, syscall.SIGTERM)
	lines := c.printed()
	require.Len(t, lines, 4)
	slices.SortFunc(lines[1:], func(a, b string) int { // a line is printed when its send has ended, and the client may be quicker
		return strings.Compare(a[strings.Index(a, "#"):], b[strings.Index(b, "#"):])
	})
	require.Regexp(t, `^\d\d:\d\d:\d\d\.\d{3}  #1 POST /v1/payments  key order-1, send 1  -> no answer: connection reset  \([0-9.]+ ms\)`+
		`  fault: reset after the effect \(send 1\)  effect 1: payment pay_1, 1999$`, lines[1])
	require.Regexp(t, `  #2 POST /v1/payments  key order-1, send 2  -> 201 Created, replay  \([0-9.]+ ms\)$`, lines[2])
	require.Contains(t, lines[3], "GET /v1/payments/x?[31m?  ->", "a terminal must not be told what to do")

	quiet := start(t, "-quiet")
	require.Equal(t, 201, quiet.pay(t, "order-1").status)
	quiet.stop(t, syscall.SIGTERM)
	require.Equal(t, []string{quiet.url}, quiet.printed())
}

func TestItListensOnTheLoopbackAddressOnlyUnlessTold(t *testing.T) {
	for _, addr := range []string{"0.0.0.0:0", "[::]:0", "192.0.2.1:0"} {
		out, err := build(t, "-addr", addr).CombinedOutput()
		require.Error(t, err, addr)
		require.Contains(t, string(out), "-allow-remote", addr)
	}
	c := start(t, "-addr", "0.0.0.0:0", "-allow-remote")
	require.Equal(t, 201, c.pay(t, "order-1").status)
}

func TestAWrongCommandLineIsRefusedWithItsReason(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "faults.json")
	require.NoError(t, os.WriteFile(broken, []byte("[\n  {\"kind\": \"reset\"},\n  {\"kind\": \"nap\"}\n]"), 0o600))
	elsewhere := filepath.Join(t.TempDir(), "elsewhere.json")
	require.NoError(t, os.WriteFile(elsewhere, []byte(`[{"kind":"reset","endpoint":"POST /v1/payment"}]`), 0o600))
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"-faults", broken}, "line 3, column 3"},
		{[]string{"-faults", "nosuch.json"}, "nosuch.json"},
		{[]string{"-faults", "mix"}, "none, lost-answer, slow-effect, unavailable, mixed, storm"},
		{[]string{"-faults", broken}, `unknown kind "nap"; there are big-headers, bomb,`},
		{[]string{"-faults", elsewhere}, "POST /v1/payments/{id}/refunds"},
		{[]string{"-rate", "0.5"}, "-faults mixed"},
		{[]string{"-faults", "storm", "-rate", "0.5"}, "-faults mixed"},
		{[]string{"-seed", "2"}, "-faults storm"},
		{[]string{"-settings", "lenient,stripe"}, "stripe: a provider or broken server must come first"},
		{[]string{"-settings", "stripe,seen-flag"}, "seen-flag: a provider or broken server must come first"},
		{[]string{"-settings", "nosuch"}, "gocardless, increase, seen-flag"},
		{[]string{"-settings", "nosuch"}, "request_id_header"},
		{[]string{"-faults", "mixed", "-rate", "2"}, "-rate: must lie between 0 and 1"},
		{[]string{"-settings", "lenient=perhaps"}, "lenient"},
		{[]string{"-settings", "retention=long"}, "such as 90m"},
		{[]string{"-settings", "key_per=shoe"}, "credential, account, nobody"},
		{[]string{"-nosuch"}, "-nosuch"},
		{[]string{"serve"}, "serve"},
		{[]string{"-addr", "here"}, "-addr"},
	} {
		out, err := build(t, c.args...).CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit, c.args)
		require.Equal(t, 2, exit.ExitCode(), c.args)
		require.Contains(t, string(out), c.says)
	}
	help, err := build(t, "-h").CombinedOutput()
	require.NoError(t, err)
	for _, name := range []string{"lost-answer, slow-effect, unavailable", "sells-twice", "in_progress_retry_after"} {
		require.Contains(t, string(help), name)
	}
	taken := start(t)
	out, err := build(t, "-addr", strings.TrimPrefix(taken.url, "http://")).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "cannot listen")
}

func TestFaultsComeFromAFileAndFromAMix(t *testing.T) {
	file := filepath.Join(t.TempDir(), "faults.json")
	require.NoError(t, os.WriteFile(file, []byte(`[{"kind":"status","status":503,"send":1}]`), 0o600))
	c := start(t, "-faults", file)
	require.Equal(t, 503, c.pay(t, "order-1").status)
	require.Equal(t, 201, c.pay(t, "order-1").status)
	require.Len(t, c.effects(t, ""), 1)

	mixed := start(t, "-faults", "mixed", "-rate", "0.5", "-seed", "9")
	faults := list(t, mixed.ask(t, "GET", "/_fake/faults", ""))
	sum := 0.0
	for _, f := range faults {
		require.Equal(t, 9., f["seed"])
		sum += f["rate"].(float64)
	}
	require.InDelta(t, .5, sum, 1e-9)
	require.Greater(t, len(list(t, start(t, "-faults", "storm").ask(t, "GET", "/_fake/faults", ""))), len(faults))
}

func TestSettingsReachTheServer(t *testing.T) {
	c := start(t, "-settings", "stripe,retention=1h,key_per=credential")
	require.Equal(t, 201, c.pay(t, "order-1").status)
	require.Equal(t, "true", c.pay(t, "order-1").header.Get("Idempotent-Replayed"))
	var got map[string]any
	require.NoError(t, json.Unmarshal([]byte(c.ask(t, "GET", "/_fake/settings", "").body), &got))
	require.Equal(t, "1h0m0s", got["retention"])
	require.Equal(t, "store", got["failures"])
	require.Equal(t, true, got["optional"])
	require.NotContains(t, got, "key_per", "the default is not listed")

	require.Equal(t, 200, c.ask(t, "POST", "/_fake/clock", `{"advance":"61m"}`).status)
	require.Equal(t, 201, c.pay(t, "order-1").status)
	require.Len(t, c.effects(t, ""), 2, "after the retention the key is a new one")

	twice := start(t, "-settings", "ignores-keys")
	twice.pay(t, "order-1")
	twice.pay(t, "order-1")
	require.Len(t, twice.effects(t, ""), 2)
}
