package idem_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// proxyStep is a proxy's answer to a CONNECT; the zero step makes the tunnel.
type proxyStep struct {
	status     int
	retryAfter string
}

// connectProxy is a proxy that makes tunnels to one server, whatever the name
// asked for, and answers the nth CONNECT with the nth step, the later ones
// with the last.
type connectProxy struct {
	url string

	mu       sync.Mutex // guards connects
	connects int
}

func newConnectProxy(t *testing.T, target string, steps ...proxyStep) *connectProxy {
	t.Helper()
	p := &connectProxy{}
	var tunnels sync.WaitGroup
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		p.mu.Lock()
		p.connects++
		step := steps[min(p.connects, len(steps))-1]
		p.mu.Unlock()
		if step.status != 0 {
			w.Header().Set("Proxy-Authenticate", `Basic realm="way out"`)
			w.Header()["Retry-After"] = nil
			if step.retryAfter != "" {
				w.Header().Set("Retry-After", step.retryAfter)
			}
			w.WriteHeader(step.status)
			return
		}
		there, err := net.Dial("tcp", target)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		here, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			_ = there.Close()
			return
		}
		_, _ = io.WriteString(here, "HTTP/1.1 200 Connection established\r\n\r\n")
		tunnels.Add(2)
		go func() { defer tunnels.Done(); defer there.Close(); _, _ = io.Copy(there, rw) }()
		go func() { defer tunnels.Done(); defer here.Close(); _, _ = io.Copy(here, there) }()
	}))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		tunnels.Wait()
	})
	p.url = server.URL
	return p
}

func (p *connectProxy) asked() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.connects
}

// newOriginBehindProxy is a TLS server that counts what reaches it.
func newOriginBehindProxy(t *testing.T) (*httptest.Server, *fakeserver.Server) {
	t.Helper()
	s := onLoopback(t)
	target, err := url.Parse(s.URL())
	require.NoError(t, err)
	origin := httptest.NewTLSServer(&httputil.ReverseProxy{
		Transport: s.Transport(),
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
	})
	t.Cleanup(func() {
		origin.CloseClientConnections()
		origin.Close()
	})
	return origin, s
}

// behindProxy is the name under which the proxy is asked for the origin: the
// certificate of httptest has it, and no look-up ever happens.
const behindProxy = "https://example.com/v1/payments"

// tunnelRefusal is how a proxy refuses a tunnel, and what an operation of
// four attempts comes to.
type tunnelRefusal struct {
	name     string
	steps    []proxyStep
	attempts int
	reason   error // of an operation that ended in the refusal
	effects  int
	least    time.Duration
}

func tunnelRefusals() []tunnelRefusal {
	return []tunnelRefusal{
		{name: "407", steps: []proxyStep{{status: 407}}, attempts: 1},
		{name: "403", steps: []proxyStep{{status: 403}}, attempts: 1},
		{name: "503 with Retry-After, then a tunnel", steps: []proxyStep{{503, "1"}, {}}, attempts: 2, effects: 1, least: time.Second},
		{name: "502, then a tunnel", steps: []proxyStep{{status: 502}, {}}, attempts: 2, effects: 1},
		{name: "502 always", steps: []proxyStep{{status: 502}}, attempts: 4, reason: idem.ErrAttemptsExhausted},
		{name: "503, wait too long", steps: []proxyStep{{503, "3600"}}, attempts: 1, reason: idem.ErrRetryAfterTooLong},
	}
}

// meet makes one payment of tr through p and requires what r says of it.
func (r tunnelRefusal) meet(t *testing.T, tr *idem.Transport, p *connectProxy, effects func() int) {
	t.Helper()
	var report idem.Report
	start := time.Now()
	resp, err := tr.RoundTrip(newPost(t, idem.WithReport(t.Context(), &report), behindProxy, paymentJSON("proxied", 1999)))
	took := time.Since(start)
	if err == nil {
		readAll(t, resp)
	}
	require.Equal(t, r.effects, effects())
	require.Equal(t, r.attempts, p.asked())
	require.Len(t, report.Attempts, r.attempts)
	require.Equal(t, r.effects, report.Sends)
	for _, a := range report.Attempts[:r.attempts-r.effects] {
		require.Equal(t, idem.NotExecuted, a.Outcome, "no byte reached the origin")
	}
	require.GreaterOrEqual(t, took, r.least)
	if r.effects > 0 {
		require.NoError(t, err)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		if r.least > 0 {
			require.Equal(t, "retry-after", report.Attempts[0].WaitFrom)
		}
		return
	}
	var e *idem.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, idem.NotExecuted, e.Outcome)
	require.Equal(t, r.reason, e.Reason)
	require.Equal(t, r.steps[0].status, e.StatusCode)
	require.Equal(t, `Basic realm="way out"`, e.Header.Get("Proxy-Authenticate"))
	require.ErrorContains(t, err, fmt.Sprint(r.steps[0].status))
	require.ErrorContains(t, err, "safe to call again")
}

func TestC54_ProxyThatRefusesTheTunnelOfABaseWithTheHook(t *testing.T) {
	for _, r := range tunnelRefusals() {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			origin, s := newOriginBehindProxy(t)
			p := newConnectProxy(t, origin.Listener.Addr().String(), r.steps...)
			via, err := url.Parse(p.url)
			require.NoError(t, err)
			base := newBase(t)
			base.Proxy = http.ProxyURL(via)
			base.OnProxyConnectResponse = idem.ProxyHook
			base.TLSClientConfig = origin.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
			r.meet(t, onWire(base), p, func() int { return len(s.Effects()) })
		})
	}
}

// A tunnel that was not made is proof: a write without a key is repeated too.
func TestC54_WriteWithoutAKeyIsRepeatedAfterARefusedTunnel(t *testing.T) {
	origin, s := newOriginBehindProxy(t)
	s.Apply(fakeserver.Settings{Optional: true})
	p := newConnectProxy(t, origin.Listener.Addr().String(), proxyStep{status: 502}, proxyStep{})
	via, err := url.Parse(p.url)
	require.NoError(t, err)
	base := newBase(t)
	base.Proxy = http.ProxyURL(via)
	base.OnProxyConnectResponse = idem.ProxyHook
	base.TLSClientConfig = origin.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	resp, err := onWire(base, withDialect(idem.NoKeys)).RoundTrip(newPost(t, t.Context(), behindProxy, paymentJSON("proxied", 1999)))
	require.NoError(t, err)
	readAll(t, resp)
	require.Len(t, s.Effects(), 1)
	require.Empty(t, s.Sends()[0].Keys)
	require.Len(t, idem.ReportOf(resp).Attempts, 2)
	require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
}

// A base without the hook has only a text, and no text is looked at: it is
// retried like a dial error, and just as surely not executed.
func TestC54_RefusedTunnelWithoutTheHookIsNotExecuted(t *testing.T) {
	origin, s := newOriginBehindProxy(t)
	p := newConnectProxy(t, origin.Listener.Addr().String(), proxyStep{status: 407})
	via, err := url.Parse(p.url)
	require.NoError(t, err)
	base := newBase(t)
	base.Proxy = http.ProxyURL(via)
	_, err = onWire(base).RoundTrip(newPost(t, t.Context(), behindProxy, paymentJSON("proxied", 1999)))
	e := requireError(t, err, idem.ErrAttemptsExhausted)
	require.Empty(t, s.Sends())
	require.Equal(t, 4, p.asked())
	require.Equal(t, idem.NotExecuted, e.Outcome)
	require.Zero(t, e.StatusCode)
}

// proxiedChild tells a child process which of the refusals it meets; it reads
// the proxy from its environment, as net/http does once for each process.
const (
	proxiedChild = "IDEM_TEST_PROXIED"
	childRoots   = "IDEM_TEST_ROOTS"
)

func TestC54_ProxyThatRefusesTheTunnelOfTheDefaultBase(t *testing.T) {
	if name := os.Getenv(proxiedChild); name != "" {
		for _, r := range tunnelRefusals() {
			if r.name == name {
				r.meetFromTheEnvironment(t)
				return
			}
		}
		t.Fatalf("no refusal %q", name)
	}
	for _, r := range tunnelRefusals() {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			origin, s := newOriginBehindProxy(t)
			p := newConnectProxy(t, origin.Listener.Addr().String(), r.steps...)
			roots := filepath.Join(t.TempDir(), "roots.pem")
			cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: origin.Certificate().Raw})
			require.NoError(t, os.WriteFile(roots, cert, 0o600))
			runProxied(t, "TestC54_ProxyThatRefusesTheTunnelOfTheDefaultBase", p.url,
				proxiedChild+"="+r.name, childRoots+"="+roots)
			require.Len(t, s.Effects(), r.effects)
			require.Equal(t, r.attempts, p.asked())
			require.Len(t, s.Sends(), r.effects)
		})
	}
}

// runProxied runs a test again, in a process whose environment has a proxy.
func runProxied(t *testing.T, name, proxy string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	child := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+name+"$", "-test.count=1")
	child.Env = append(os.Environ(), append(env,
		"HTTPS_PROXY="+proxy, "https_proxy="+proxy, "HTTP_PROXY="+proxy, "http_proxy="+proxy, "NO_PROXY=", "no_proxy=")...)
	out, err := child.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func (r tunnelRefusal) meetFromTheEnvironment(t *testing.T) {
	cert, err := os.ReadFile(os.Getenv(childRoots))
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(cert))
	// Before the first use of a Transport without a Base, which clones it.
	http.DefaultTransport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: roots}
	tr := &idem.Transport{Policy: casePolicy()}
	// What the proxy and the origin saw, the parent looks at.
	var report idem.Report
	start := time.Now()
	resp, err := tr.RoundTrip(newPost(t, idem.WithReport(t.Context(), &report), behindProxy, paymentJSON("proxied", 1999)))
	require.GreaterOrEqual(t, time.Since(start), r.least)
	require.Len(t, report.Attempts, r.attempts)
	require.Equal(t, r.effects, report.Sends)
	require.Equal(t, r.reason, report.Reason)
	if r.effects > 0 {
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, idem.NotExecuted, report.Attempts[0].Outcome)
		require.Equal(t, idem.Executed, report.Outcome)
		return
	}
	var e *idem.Error
	require.True(t, errors.As(err, &e), "%v", err)
	require.Equal(t, idem.NotExecuted, e.Outcome)
	require.Equal(t, r.steps[0].status, e.StatusCode)
	require.Equal(t, `Basic realm="way out"`, e.Header.Get("Proxy-Authenticate"))
}

// passOn sends the same bytes to another server and answers with its answer.
func passOn(ctx context.Context, behind http.RoundTripper, to string, r providerRequest) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, r.method, to+r.path, strings.NewReader(r.body))
	if err != nil {
		return nil, err
	}
	req.Header = r.header.Clone()
	req.GetBody = nil
	return behind.RoundTrip(req)
}

// The gateway loses patience with the server behind it and sends the request
// there once more; the client gets the answer to a copy that it never sent.
func TestC57_CopyOfAGatewayIsNotTheResult(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Slow, Delay: 500 * time.Millisecond}))
		behind := s.Transport()
		var gateway *scriptedProvider
		gateway = newScriptedProvider(t, func(w http.ResponseWriter, r *http.Request) {
			sends := gateway.sends()
			last := sends[len(sends)-1]
			impatient, cut := context.WithTimeout(r.Context(), 20*time.Millisecond)
			resp, err := passOn(impatient, behind, s.URL(), last)
			cut()
			if err != nil {
				resp, err = passOn(r.Context(), behind, s.URL(), last)
			}
			if err != nil {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			body, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			for name, values := range resp.Header {
				w.Header()[name] = values
			}
			w.WriteHeader(resp.StatusCode)
			_, _ = w.Write(body)
		})
		start := time.Now()
		resp, err := gateway.through().RoundTrip(newPost(t, t.Context(), gateway.url+"/v1/payments", paymentJSON("order-57", 1999)))
		took := time.Since(start)
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Len(t, gateway.sends(), 2)
		require.Len(t, s.Sends(), 3)
		require.Len(t, keysSent(s.Sends()), 1)
		requireWhole(t, s.Sends(), paymentJSON("order-57", 1999))
		require.Contains(t, readAll(t, resp), "order-57")
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		r := idem.ReportOf(resp)
		require.Equal(t, idem.Executed, r.Outcome)
		require.True(t, r.Replayed)
		require.Equal(t, 2, r.Sends, "the client counts what it sent")
		require.Equal(t, []int{409, 201}, []int{r.Attempts[0].Status, r.Attempts[1].Status})
		require.GreaterOrEqual(t, took, time.Second)
		require.Less(t, took, 1200*time.Millisecond)
	})
}

// The same where the copy comes when it likes.
func TestC57_CopiesInTransitHaveOneEffect(t *testing.T) {
	for _, f := range []fakeserver.Fault{
		{Kind: fakeserver.Duplicate, Point: fakeserver.BeforeEffect},
		{Kind: fakeserver.Duplicate, Point: fakeserver.DuringEffect, Delay: 500 * time.Millisecond},
		{Kind: fakeserver.Duplicate, Point: fakeserver.AfterEffect},
		{Kind: fakeserver.Duplicate, Point: fakeserver.AfterEffect, Delay: time.Minute},
	} {
		t.Run(f.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", f))
				resp, err := over(s).RoundTrip(newPayment(t, t.Context(), s, "order-57"))
				require.NoError(t, err)
				readAll(t, resp)
				time.Sleep(2 * time.Minute)
				require.Len(t, s.Effects(), 1)
				require.Len(t, keysSent(s.Sends()), 1)
				require.Equal(t, http.StatusCreated, resp.StatusCode)
				r := idem.ReportOf(resp)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Equal(t, len(s.Sends())-1, r.Sends)
			})
		})
	}
}
