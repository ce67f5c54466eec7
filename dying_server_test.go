package idem_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
)

// TestClaimsOverAServerThatDiesOnIdleConnections has requests with and without a body, keys and a key header, at a
// server that executes most and then answers, closes, resets or stalls, behind a gateway that refuses some unseen.
func TestClaimsOverAServerThatDiesOnIdleConnections(t *testing.T) {
	var mu sync.Mutex // guards effects
	effects := map[string]int{}
	url := rawServer(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			if rand.IntN(4) > 0 {
				mu.Lock()
				effects[req.URL.Path]++
				mu.Unlock()
				switch rand.IntN(6) {
				case 0:
					return
				case 1:
					_ = c.(*net.TCPConn).SetLinger(0)
					return
				case 2:
					time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
				case 3:
					_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
					return
				}
				_, _ = io.WriteString(c, "HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}")
				continue
			}
			if rand.IntN(6) == 0 {
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n", []int{400, 401, 403, 404, 410, 422, 429, 421, 409, 503}[rand.IntN(10)])
		}
	})
	base := newBase(t)
	base.MaxIdleConnsPerHost = 32
	var over []*idem.Transport
	for _, d := range []idem.Dialect{idem.Generic, idem.NoKeys} {
		tr := &idem.Transport{Base: base, Policy: casePolicy(), Dialect: d}
		tr.Policy.AttemptTimeout = 30 * time.Millisecond
		tr.Policy.BackoffBase, tr.Policy.BackoffCap, tr.Policy.ThrottleBase = time.Millisecond, 3*time.Millisecond, time.Millisecond
		over = append(over, tr)
	}
	reports := map[string]*idem.Report{}
	var wg sync.WaitGroup
	stop := time.Now().Add(3 * time.Second)
	for w := range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := 0; time.Now().Before(stop); i++ {
				path, report := fmt.Sprintf("/%d/%d", w, i), new(idem.Report)
				ctx, cancel := context.WithTimeout(idem.WithReport(context.Background(), report), time.Duration(rand.IntN(200))*time.Millisecond)
				var body io.Reader
				if rand.IntN(2) == 0 {
					body = strings.NewReader("{}")
				}
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+path, body)
				kind := rand.IntN(2)
				if kind == 1 && rand.IntN(2) == 0 {
					req.Header.Set("Idempotency-Key", "of the SDK")
				}
				if resp, err := over[kind].RoundTrip(req); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
				cancel()
				mu.Lock()
				reports[path] = report
				mu.Unlock()
			}
		}()
	}
	wg.Wait()
	time.Sleep(200 * time.Millisecond) // what still runs there
	mu.Lock()
	defer mu.Unlock()
	for path, r := range reports {
		n := effects[path]
		switch {
		case r.Outcome == idem.Executed:
			require.Positive(t, n, "%+v", r)
		case r.Outcome != idem.Unknown:
			require.Zero(t, n, "%+v", r)
		case r.Key == "":
			require.LessOrEqual(t, n, 1, "%+v", r)
		}
		if r.Key == "" {
			require.LessOrEqual(t, n, 1, "%+v", r)
		}
	}
}
