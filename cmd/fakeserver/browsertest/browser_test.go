package browsertest

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/idem-go/idem"
	"github.com/stretchr/testify/require"
)

// shots is where the screenshots go: with page.png of the README among them.
var shots = flag.String("shots", "", "`folder` for screenshots; empty: none are kept")

const body1999 = `{"amount":1999,"currency":"usd","reference":"order-1","source":"tok_visa"}`

var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "fakeserver-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "fakeserver")
	out, err := exec.Command("go", "build", "-o", path, "github.com/idem-go/idem/cmd/fakeserver").CombinedOutput()
	if err != nil {
		_, _ = os.Stderr.Write(out)
	}
	return path, err
})

func TestMain(m *testing.M) {
	status := m.Run()
	if path, err := binary(); err == nil {
		_ = os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(status)
}

// serve starts the built command and gives its URL. At the end it must stop cleanly.
func serve(t *testing.T, args ...string) (url string, lines func() string) {
	t.Helper()
	path, err := binary()
	require.NoError(t, err, "the command does not build")
	cmd := exec.Command(path, append([]string{"-addr", ":0"}, args...)...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var mu sync.Mutex
	var text strings.Builder
	first := make(chan string, 1)
	var reading sync.WaitGroup
	reading.Go(func() {
		for s := bufio.NewScanner(stdout); s.Scan(); {
			select {
			case first <- s.Text():
			default:
			}
			mu.Lock()
			text.WriteString(s.Text() + "\n")
			mu.Unlock()
		}
	})
	t.Cleanup(func() {
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		reading.Wait()
		require.NoError(t, cmd.Wait(), "SIGTERM must end it with status 0")
	})
	return <-first, func() string {
		mu.Lock()
		defer mu.Unlock()
		return text.String()
	}
}

// browser opens a page in a Chromium that talks to nobody but the server.
func browser(t *testing.T, options ...chromedp.ExecAllocatorOption) context.Context {
	t.Helper()
	path := os.Getenv("CHROMIUM")
	if path == "" {
		path = "/usr/bin/chromium"
	}
	_, err := os.Stat(path)
	require.NoError(t, err, "there is no Chromium at %s: run scripts/browser, which installs it, or set CHROMIUM", path)
	options = append([]chromedp.ExecAllocatorOption{
		chromedp.ExecPath(path),
		chromedp.Flag("headless", true),
		chromedp.Flag("no-sandbox", true),
		chromedp.Flag("disable-gpu", true),
		chromedp.Flag("disable-quic", true),
		chromedp.Flag("no-first-run", true),
		chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-sync", true),
		chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.UserDataDir(t.TempDir()),
		chromedp.WindowSize(1320, 900),
	}, options...)
	ctx, end := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(end)
	ctx, end = chromedp.NewContext(ctx)
	t.Cleanup(func() {
		defer end()
		limited, stop := context.WithTimeout(ctx, time.Minute)
		defer stop()
		_ = chromedp.Cancel(limited) // waits for the process, so that its folder can be removed
	})
	require.NoError(t, chromedp.Do(ctx), "Chromium does not start")
	return ctx
}

// ask runs one action, and fails if it takes a minute.
func ask[T any](t *testing.T, page context.Context, a chromedp.Action[T]) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(page, time.Minute)
	defer cancel()
	v, err := chromedp.Run(ctx, a)
	require.NoError(t, err)
	return v
}

func open(t *testing.T, page context.Context, url string) {
	t.Helper()
	ask(t, page, chromedp.Navigate(url))
}

func press(t *testing.T, page context.Context, button string) {
	t.Helper()
	ask(t, page, chromedp.Click(chromedp.CSS(button)))
}

// seen waits until there is such an element.
func seen(t *testing.T, page context.Context, selector string) {
	t.Helper()
	ask(t, page, chromedp.WaitVisible(chromedp.CSS(selector)))
}

func shown(t *testing.T, page context.Context) string {
	t.Helper()
	return ask(t, page, chromedp.Evaluate[string](`(document.querySelector("main") || document.body).innerText`))
}

// shows waits until a text is on the page. It asks from outside: the page's policy forbids eval, and so the driver's Poll.
func shows(t *testing.T, page context.Context, text string) {
	t.Helper()
	for range 600 {
		if strings.Contains(shown(t, page), text) {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("%q is not on the page, which shows:\n%s", text, shown(t, page))
}

func chosen(name string) string { return "button[value=" + name + "][aria-pressed=true]" }

// keep saves a screenshot, if they are wanted.
func keep(t *testing.T, page context.Context, name string) {
	t.Helper()
	if *shots == "" {
		return
	}
	png := ask(t, page, chromedp.Screenshot(chromedp.CSS("body")))
	require.NoError(t, os.WriteFile(filepath.Join(*shots, name), png, 0o644))
}

func pay(t *testing.T, client *http.Client, url, key, body string) int {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, url+"/v1/payments", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Idempotency-Key", key)
	resp, err := client.Do(req)
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

// idemClient gives up on an attempt after the timeout; 0 = as it does by itself, which no slow machine meets.
func idemClient(timeout time.Duration) *http.Client {
	return &http.Client{Transport: &idem.Transport{Policy: idem.Policy{
		MaxAttempts:    30,
		AttemptTimeout: timeout,
		BackoffBase:    200 * time.Millisecond,
		Budget:         &idem.Budget{Capacity: -1},
	}}}
}

func order(reference string) string { return strings.ReplaceAll(body1999, "order-1", reference) }

func effects(t *testing.T, url string) string {
	t.Helper()
	return get(t, url+"/_fake/effects")
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(data)
}

func inject(t *testing.T, url, faults string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPut, url+"/_fake/faults", strings.NewReader(faults))
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode)
}

func TestADeveloperSeesTheLostAnswerAndTheReplay(t *testing.T) {
	url, lines := serve(t)
	page := browser(t)
	open(t, page, url+"/_fake/")
	shows(t, page, "Nothing was sent yet")
	seen(t, page, "#state.live")
	keep(t, page, "empty.png")
	press(t, page, "button[value=lost-answer]")
	seen(t, page, chosen("lost-answer"))
	shows(t, page, "the connection dies before the answer")

	require.Equal(t, 201, pay(t, idemClient(0), url, "order-1", body1999))
	require.Equal(t, 1, strings.Count(effects(t, url), `"kind":"payment"`))
	shows(t, page, "1 effect, 2 sends: an answer was lost, send 2 got it as a replay")
	rows := ask(t, page, chromedp.Evaluate[[][]string](`[...document.querySelectorAll("tr.send")].map(tr => [...tr.cells].map(td => td.innerText.trim()))`))
	require.Len(t, rows, 2)
	require.Contains(t, rows[0][4], "reset after the effect")
	require.Equal(t, "no answer: connection reset", rows[0][5])
	require.Contains(t, rows[0][6], "payment pay_1")
	require.Contains(t, rows[1][2], "order-1, send 2")
	require.Equal(t, []string{"none", "201 Created, replay of #1", "none"}, rows[1][4:])

	var sends []struct{ At, Ended time.Time }
	require.NoError(t, json.Unmarshal([]byte(get(t, url+"/_fake/sends")), &sends))
	if wait := sends[1].At.Sub(sends[0].Ended); wait > 0 { // the client may be quicker than the end of the send before
		share := ask(t, page, chromedp.Evaluate[float64](`document.querySelector("line.wait").getBoundingClientRect().width / document.querySelector("line.rail").getBoundingClientRect().width`))
		_, waited, _ := strings.Cut(rows[1][1], "waited ")
		require.InDelta(t, wait.Seconds(), length(t, waited).Seconds(), .01+wait.Seconds()/100)
		span := length(t, ask(t, page, chromedp.Evaluate[string](`document.querySelector("th.track span:last-child").innerText`)))
		rounding := float64(2*time.Millisecond) / float64(span)
		require.InDelta(t, wait.Seconds()/span.Seconds(), share, .02+rounding, "the wait is drawn, to scale")
	}

	inject(t, url, `[{"kind":"slow","delay":"5s","send":1}]`) // the second attempt must find it at work
	require.Equal(t, 201, pay(t, idemClient(500*time.Millisecond), url, "order-2", order("order-2")))
	require.Equal(t, 2, strings.Count(effects(t, url), `"kind":"payment"`))
	shows(t, page, "no answer: the client left within")
	shows(t, page, "409 Conflict")
	shows(t, page, "replay of #3")
	keep(t, page, "page.png")

	require.Eventually(t, func() bool { // a line is printed when its send has ended
		return strings.Contains(lines(), "#1 POST /v1/payments  key order-1, send 1  -> no answer: connection reset") &&
			strings.Contains(lines(), "effect 1: payment pay_1")
	}, 30*time.Second, 10*time.Millisecond)
}

// length reads "312 ms" and "1.24 s".
func length(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(strings.ReplaceAll(text, " ", ""))
	require.NoError(t, err)
	return d
}

func TestTheFaultsAreSwitchedFromThePage(t *testing.T) {
	url, _ := serve(t, "-faults", "mixed", "-rate", "1")
	page := browser(t)
	plain := &http.Client{Timeout: time.Minute}
	open(t, page, url+"/_fake/")
	seen(t, page, chosen("mixed"))
	press(t, page, "button[value=none]")
	seen(t, page, chosen("none"))
	seen(t, page, "#state.live")

	press(t, page, "button[value=unavailable]")
	seen(t, page, chosen("unavailable"))
	require.Equal(t, 503, pay(t, plain, url, "a", order("a")))
	shows(t, page, "503 Service Unavailable")

	press(t, page, "button[value=slow-effect]")
	seen(t, page, chosen("slow-effect"))
	key, busy := "", 0
	for n := 1; busy != 409; n++ { // once, unless the machine is slower than the slow effect
		require.LessOrEqual(t, n, 5, "it was never seen while it was under way")
		key = strings.Repeat("b", n)
		first := make(chan int, 1)
		began := time.Now()
		go func() { first <- pay(t, plain, url, key, order(key)) }()
		met := false
		for !met && len(first) == 0 {
			met = strings.Contains(shown(t, page), "still under way")
			time.Sleep(50 * time.Millisecond)
		}
		busy = pay(t, plain, url, key, order(key))
		took := time.Since(began)
		if busy == 409 && met {
			shows(t, page, "409 Conflict")
			keep(t, page, "running.png")
		} else if busy == 409 {
			busy = 0 // the page was slower
		}
		require.Equal(t, 201, <-first)
		if busy == 201 && took < 3*time.Second { // then it was quicker to the key than the first, which got its answer
			require.Contains(t, get(t, url+"/_fake/sends?limit=1&key="+key), `"replayed":true`)
		}
		shows(t, page, fmt.Sprintf("payment pay_%d", n))
	}

	press(t, page, "button[value=mixed]")
	shows(t, page, "100 % of the sends")
	press(t, page, `button[name=advance][value="24h"]`)
	shows(t, page, "clock is 24h0m0s ahead")
	press(t, page, "button[value=none]")
	seen(t, page, chosen("none"))
	require.Equal(t, 201, pay(t, plain, url, key, order(key)), "its key is forgotten")
	shows(t, page, "2 EFFECTS for one operation")
	keep(t, page, "doubled.png")
	press(t, page, "button[name=reset]")
	shows(t, page, "Nothing was sent yet")
	require.Equal(t, "[]\n", effects(t, url))
}

func TestWithoutScriptThePageIsTheSameAfterAReload(t *testing.T) {
	url, _ := serve(t)
	page := browser(t, chromedp.Flag("blink-settings", "scriptEnabled=false"))
	open(t, page, url+"/_fake/")
	press(t, page, "button[value=lost-answer]")
	seen(t, page, chosen("lost-answer"))
	require.Equal(t, 201, pay(t, idemClient(0), url, "order-1", body1999))
	ask(t, page, chromedp.Reload())
	seen(t, page, "span.chip.replay")
	html := ask(t, page, chromedp.OuterHTML(chromedp.CSS("body")))
	require.Contains(t, html, "not live: reload to see what is new", "the script did not run")
	require.Contains(t, html, "send 2 got it as a replay")
	keep(t, page, "noscript.png")
}

func TestOnANarrowScreenNothingIsBeyondTheEdge(t *testing.T) {
	url, _ := serve(t, "-faults", "lost-answer", "-settings", "stripe,retention=1h")
	require.Equal(t, 201, pay(t, idemClient(0), url, "order-1", body1999))
	page := browser(t)
	ask(t, page, chromedp.EmulateViewport(420, 900))
	open(t, page, url+"/_fake/")
	seen(t, page, "#state.live")
	seen(t, page, "#settings")
	shows(t, page, "reset after the effect")
	require.LessOrEqual(t, ask(t, page, chromedp.Evaluate[float64](`document.documentElement.scrollWidth`)), 420., "nothing scrolls sideways")
	beyond := `[...document.querySelectorAll("tr.send td, tr.send .chip, .verdict")].filter(e => {
		const at = e.getBoundingClientRect();
		return at.width === 0 || at.left < 0 || at.right > document.documentElement.clientWidth;
	}).map(e => e.innerText)`
	require.Empty(t, ask(t, page, chromedp.Evaluate[[]string](beyond)))
	keep(t, page, "narrow.png")
}

func TestWhatAClientSendsIsTextOnThePage(t *testing.T) {
	url, _ := serve(t)
	page := browser(t)
	evil := `<img src=x onerror=document.title=1>`
	require.Equal(t, 201, pay(t, http.DefaultClient, url, evil, order(`<script>document.title=1</script>`)))
	open(t, page, url+"/_fake/")
	seen(t, page, "#state.live")
	shows(t, page, "key "+evil)
	shows(t, page, "<script>document.title=1</script>")
	require.Zero(t, ask(t, page, chromedp.Evaluate[int](`document.querySelectorAll("main img, main script").length`)))
	require.Contains(t, ask(t, page, chromedp.Title()), "fakeserver")
}

func TestAnotherWebsiteCannotSwitchFaults(t *testing.T) {
	url, _ := serve(t)
	attacker := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte(`<form method=post action="` + url + `/_fake/"><button name=faults value=storm>go</button></form>`))
	})}
	at := listen(t, &attacker)
	page := browser(t)
	open(t, page, "http://"+at)
	press(t, page, "button")
	shows(t, page, "Another website may not change anything here")
	open(t, page, url+"/_fake/")
	seen(t, page, chosen("none"))
}

func listen(t *testing.T, s *http.Server) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return l.Addr().String()
}
