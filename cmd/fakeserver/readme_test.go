package main

import (
	"flag"
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
	c := start(t)
	dir := t.TempDir()
	blocks := regexp.MustCompile("(?s)```(console|text)\n(.*?)```")
	ran := 0
	really := blocks.ReplaceAllStringFunc(shown, func(block string) string {
		m := blocks.FindStringSubmatch(block)
		if m[1] == "text" {
			lines := c.printed()
			return "```text\n" + strings.ReplaceAll(strings.Join(lines, "\n"), c.url, shownURL) + "\n```"
		}
		var b strings.Builder
		for _, command := range commands(m[2]) {
			ran++
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
			text := strings.ReplaceAll(strings.ReplaceAll(string(out), "\r", ""), c.url, shownURL)
			b.WriteString("$ " + command + "\n" + text)
			if text != "" && !strings.HasSuffix(text, "\n") {
				b.WriteString("\n")
			}
		}
		return "```console\n" + b.String() + "```"
	})
	require.GreaterOrEqual(t, ran, 12)
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

	c.ask(t, "PUT", "/_fake/faults", `[{"kind":"slow","delay":"1s","send":1}]`)
	slow := make(chan reply, 1)
	go func() { slow <- c.pay(t, "order-2") }()
	require.Eventually(t, func() bool {
		return len(list(t, c.ask(t, "GET", "/_fake/sends?key=order-2", ""))) == 1
	}, 10*time.Second, 10*time.Millisecond)
	busy := c.pay(t, "order-2")
	requireProblem(t, busy, 409, "idempotency-key-in-use")
	require.Equal(t, "1", busy.header.Get("Retry-After"))
	require.Equal(t, 201, (<-slow).status)

	c.ask(t, "PUT", "/_fake/faults", `[{"kind":"reset","point":"after-effect","send":1}]`)
	require.Error(t, c.pay(t, "order-3").err)
	require.Equal(t, "true", c.pay(t, "order-3").header.Get("Idempotent-Replay"))
	var keys []any
	for _, e := range c.effects(t, "") {
		keys = append(keys, e["key"])
	}
	require.Equal(t, []any{"order-1", "order-2", "order-3"}, keys)
	require.True(t, slices.ContainsFunc(c.printed(), func(l string) bool { return strings.Contains(l, "effect 3: payment") }))
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
