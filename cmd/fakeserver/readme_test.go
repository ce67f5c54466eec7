package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/idem-go/idem/fakeserver"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write what really happens into README.md")

const (
	readme   = "README.md"
	shownURL = "http://127.0.0.1:8080"
)

// varying is what differs between two runs.
var varying = []struct {
	find *regexp.Regexp
	put  string
}{
	{regexp.MustCompile(`(?m)^Date: .*$`), "Date: *"},
	{regexp.MustCompile(`"created":\d+`), `"created":*`},
	{regexp.MustCompile(`"at":"[^"]*"`), `"at":"*"`},
	{regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d\.\d{3}`), "*"},
	{regexp.MustCompile(`\([0-9.]+ m?s\)`), "(*)"},
	{regexp.MustCompile(`(?m)^curl: .*$`), "curl: *"}, // the wording is that of curl's version
}

func lasting(s string) string {
	for _, v := range varying {
		s = v.find.ReplaceAllString(s, v.put)
	}
	return s
}

// The commands of the README are run by a shell, and what they print is compared with what the README shows.
func TestTheCurlSessionOfTheREADMEIsTrue(t *testing.T) {
	for _, tool := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is missing; scripts/services installs it, and the next test asks the same without it", tool)
		}
	}
	data, err := os.ReadFile(readme)
	require.NoError(t, err)
	shown := string(data)
	var really string
	for n := 1; ; n++ {
		var late bool
		if really, late = session(t, shown); !late || n == 5 {
			break
		}
		t.Log("the machine was slower than the session allows for")
	}
	var statuses []string
	for _, m := range regexp.MustCompile(`(?m)^HTTP/1.1 (\d+)`).FindAllStringSubmatch(really, -1) {
		statuses = append(statuses, m[1])
	}
	require.Equal(t, []string{"201", "201", "422", "400", "409", "201"}, statuses)
	if *update {
		require.NoError(t, os.WriteFile(readme, []byte(really), 0o644))
		return
	}
	require.Equal(t, lasting(shown), lasting(really), "if this is right: go test -run README -update ./cmd/fakeserver")
}

// session runs the commands and gives the README with what they print. Late: the call that must meet a slow effect did
// not, or its line came behind that of the effect.
func session(t *testing.T, shown string) (really string, late bool) {
	t.Helper()
	c := start(t)
	dir := t.TempDir()
	blocks := regexp.MustCompile("(?s)```(console|text)\n(.*?)```")
	ran, changes, held := 0, 0, false
	slow := func(n map[string]any) bool { return strings.HasPrefix(fmt.Sprint(n["fault"]), "slow ") }
	really = blocks.ReplaceAllStringFunc(shown, func(block string) string {
		m := blocks.FindStringSubmatch(block)
		if m[1] == "text" {
			lines := c.printed()
			return "```text\n" + strings.ReplaceAll(strings.Join(lines, "\n"), c.url, shownURL) + "\n```"
		}
		var b strings.Builder
		for _, command := range commands(m[2]) {
			ran++
			if file := regexp.MustCompile(`cat (\S+)`).FindStringSubmatch(command); file != nil {
				soon(t, func() bool { // what a command in the background writes
					written, err := os.ReadFile(filepath.Join(dir, file[1]))
					return err == nil && json.Valid(written)
				})
				held = false
			}
			sh := exec.Command("bash", "-c", strings.ReplaceAll(command, shownURL, c.url))
			sh.Dir = dir
			// A file, not a pipe: a command in the background would keep that open.
			printed, err := os.Create(filepath.Join(t.TempDir(), "out"))
			require.NoError(t, err)
			sh.Stdout, sh.Stderr = printed, printed
			err = sh.Run()
			require.NoError(t, printed.Close())
			out, unread := os.ReadFile(printed.Name())
			require.NoError(t, unread)
			if err != nil {
				require.Contains(t, string(out), "curl: ", "%s: %v", command, err) // curl says itself why it failed
			}
			if strings.Contains(command, "-X PUT") && !strings.Contains(string(out), "/problems/") {
				changes++
			}
			if strings.Contains(command, " & ") {
				held = true
				soon(t, func() bool {
					return slices.ContainsFunc(list(t, c.ask(t, "GET", "/_fake/sends", "")), func(n map[string]any) bool {
						return slow(n) && n["body_sha256"] != ""
					})
				})
			}
			soon(t, func() bool { // the lines come in the order of the commands, though a curl may end before its line is there
				lines := strings.Join(c.printed(), "\n")
				for _, n := range list(t, c.ask(t, "GET", "/_fake/sends", "")) {
					if !strings.Contains(lines, fmt.Sprintf("  #%v ", n["n"])) && (!held || !slow(n)) {
						return false
					}
				}
				return strings.Count(lines, "  faults: ") == changes
			})
			text := strings.ReplaceAll(strings.ReplaceAll(string(out), "\r", ""), c.url, shownURL)
			b.WriteString("$ " + command + "\n" + text)
			if text != "" && !strings.HasSuffix(text, "\n") {
				b.WriteString("\n")
			}
		}
		return "```console\n" + b.String() + "```"
	})
	require.GreaterOrEqual(t, ran, 12)
	n := list(t, c.ask(t, "GET", "/_fake/sends?key=order-2", ""))
	require.Len(t, n, 2)
	lines := strings.Join(c.printed(), "\n")
	place := func(i int) int { return strings.Index(lines, fmt.Sprintf("  #%v ", n[i]["n"])) }
	return really, missed(t, n, 2*time.Second) || place(0) < place(1)
}

// missed says that the second send did not meet the first one's slow effect, and only because the machine was slow: the
// delay was over before it was answered, or it was quicker to the key.
func missed(t *testing.T, n []map[string]any, delay time.Duration) bool {
	t.Helper()
	if n[1]["status"] == 409. {
		return false
	}
	at := func(text any) time.Time {
		when, err := time.Parse(time.RFC3339Nano, text.(string))
		require.NoError(t, err)
		return when
	}
	return at(n[1]["ended"]).Sub(at(n[0]["at"])) >= delay || n[0]["replayed"] == true
}

// commands are the lines after "$ ", with those they are continued in.
func commands(block string) []string {
	var found []string
	open := false
	for line := range strings.Lines(block) {
		line = strings.TrimSuffix(line, "\n")
		command, first := strings.CutPrefix(line, "$ ")
		switch {
		case first:
			found = append(found, command)
		case open:
			found[len(found)-1] += "\n" + line
		}
		open = (first || open) && (strings.HasSuffix(line, `\`) || strings.Count(found[len(found)-1], "'")%2 == 1)
	}
	return found
}

// The same session without curl, and with its effects.
func TestTheSessionHasOneEffectForEachOrder(t *testing.T) {
	c := start(t)
	first := c.pay(t, "order-1")
	require.Equal(t, 201, first.status)
	again := c.pay(t, "order-1")
	require.Equal(t, []string{first.body, "true"}, []string{again.body, again.header.Get("Idempotent-Replay")})
	require.Equal(t, 201, again.status)
	requireProblem(t, c.ask(t, "POST", "/v1/payments", strings.Replace(body1999, "1999", "2999", 1), "Idempotency-Key", "order-1"),
		422, "idempotency-key-reused")
	requireProblem(t, c.ask(t, "POST", "/v1/payments", body1999), 400, "idempotency-key-missing")

	wanted := []any{"order-1"}
	for delay := time.Second; ; delay *= 2 {
		key := "order-2, " + delay.String()
		wanted = append(wanted, key)
		c.ask(t, "PUT", "/_fake/faults", `[{"kind":"slow","delay":"`+delay.String()+`","send":1}]`)
		slow := make(chan reply, 1)
		go func() { slow <- c.pay(t, key) }()
		sends := func() []map[string]any {
			return list(t, c.ask(t, "GET", "/_fake/sends?key="+url.QueryEscape(key), ""))
		}
		soon(t, func() bool { n := sends(); return len(n) == 1 && n[0]["body_sha256"] != "" })
		busy := c.pay(t, key)
		require.Equal(t, 201, (<-slow).status)
		c.settled(t)
		if delay < 15*time.Second && missed(t, sends(), delay) {
			continue // with twice the delay
		}
		requireProblem(t, busy, 409, "idempotency-key-in-use")
		require.Equal(t, "1", busy.header.Get("Retry-After"))
		break
	}

	c.ask(t, "PUT", "/_fake/faults", `[{"kind":"reset","point":"after-effect","send":1}]`)
	require.Error(t, c.pay(t, "order-3").err)
	require.Equal(t, "true", c.pay(t, "order-3").header.Get("Idempotent-Replay"))
	var keys []any
	for _, e := range c.effects(t, "") {
		keys = append(keys, e["key"])
	}
	wanted = append(wanted, "order-3")
	require.Equal(t, wanted, keys)
	last := fmt.Sprintf("effect %d: payment", len(wanted))
	soon(t, func() bool {
		return slices.ContainsFunc(c.printed(), func(l string) bool { return strings.Contains(l, last) })
	})
}

// The table and the routes are those of the package comment, whose table the package's own tests run.
func TestTheREADMEHasTheTableAndTheRoutesOfThePackage(t *testing.T) {
	data, err := os.ReadFile(readme)
	require.NoError(t, err)
	for block, begins := range map[string]string{"faults": "kind ", "routes": "POST "} {
		m := regexp.MustCompile("(?s)```" + block + "\n(.*?)```").FindStringSubmatch(string(data))
		require.NotNil(t, m, block)
		require.Equal(t, documented(t, begins), m[1], block)
	}
	require.Contains(t, string(data), strconv.Itoa(fakeserver.DeclinedAmount))
}

// documented is the preformatted block of the package comment that begins so.
func documented(t *testing.T, begins string) string {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(packageComment(t)) {
		text, ok := strings.CutPrefix(line, "//\t")
		switch {
		case ok && (b.Len() > 0 || strings.HasPrefix(text, begins)):
			b.WriteString(text)
		case !ok && b.Len() > 0:
			return b.String()
		}
	}
	require.Fail(t, "the package comment has no block that begins with "+begins)
	return ""
}
