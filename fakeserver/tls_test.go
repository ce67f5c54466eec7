package fakeserver

import (
	"context"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// overTLS runs a test over real sockets and, in virtual time, in memory.
func overTLS(t *testing.T, test func(t *testing.T, s *Server)) {
	t.Helper()
	t.Run("sockets", func(t *testing.T) {
		s := NewTLS()
		defer s.Close()
		test(t, s)
	})
	t.Run("memory", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := NewInMemoryTLS()
			defer s.Close()
			test(t, s)
		})
	})
}

func TestHTTP2OverTLS(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		require.True(t, strings.HasPrefix(s.URL(), "https://"))
		require.True(t, strings.HasPrefix(s.OtherURL(), "https://"))
		resp, err := s.Client().Do(keyedRequest(t, s, "order-1"))
		require.NoError(t, err)
		require.Equal(t, 2, resp.ProtoMajor)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 201, resp.StatusCode)
		requireReplay(t, s, pay("order-1"))
		large := call{method: "POST", path: "/v1/uploads", key: "file", body: strings.Repeat("x", 3<<20)}
		require.Equal(t, 201, large.send(s).status)
		require.Len(t, s.Effects(), 2)
		for _, n := range s.Sends() {
			require.Equal(t, 1, n.Conn, "all on one connection")
			require.NotContains(t, n.Header, streamHeader)
		}
		elsewhere := pay("order-2")
		elsewhere.path = s.OtherURL() + "/v1/payments"
		require.Equal(t, 201, elsewhere.send(s).status)
	})
}

func TestHTTP1OverTLS(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		transport := s.Transport()
		transport.ForceAttemptHTTP2 = false
		client := &http.Client{Transport: transport}
		resp, err := client.Do(keyedRequest(t, s, "order-1"))
		require.NoError(t, err)
		require.Equal(t, 1, resp.ProtoMajor)
		require.NoError(t, resp.Body.Close())
		for _, f := range []Fault{{Kind: Reset, Point: AfterEffect}, {Kind: Close, Point: AfterEffect}, {Kind: CutBody}, {Kind: Garbage}, {Kind: EarlyAnswer}} {
			require.NoError(t, s.Script(string(f.Kind), f))
			c := pay(string(f.Kind))
			c.client = client
			r := c.send(s)
			require.True(t, r.err != nil || r.bodyErr != nil || r.status == 503, f.Kind)
			require.Equal(t, 201, c.send(s).status)
			require.Len(t, s.Effects(Filter{Key: c.key}), 1)
		}
	})
}

func TestManyStreamsOfOneConnection(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.Inject(Fault{Kind: StreamReset, Point: AfterEffect, Code: "CANCEL", Send: 1}))
		require.Error(t, call{method: "GET", path: "/warm-up"}.send(s).err)
		var group sync.WaitGroup
		for i := range 50 {
			key := strings.Repeat("k", i+1)
			group.Go(func() {
				require.Error(t, pay(key).send(s).err)
				require.Equal(t, 201, pay(key).send(s).status)
			})
		}
		group.Wait()
		require.Len(t, s.Effects(), 50)
		conns := map[int]bool{}
		for _, n := range s.Sends() {
			conns[n.Conn] = true
		}
		require.Len(t, conns, 1, "a stream that is reset leaves its connection alone")
	})
}

func TestOlderFaultsOverHTTP2(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		for name, c := range map[string]struct {
			fault  Fault
			effect int
			err    string // of the exchange; "" = none
			body   bool   // the body breaks off
			status int
		}{
			"reset before":    {fault: Fault{Kind: Reset}, err: "."},
			"reset after":     {fault: Fault{Kind: Reset, Point: AfterEffect}, effect: 1, err: "."},
			"close before":    {fault: Fault{Kind: Close}, err: "."},
			"close after":     {fault: Fault{Kind: Close, Point: AfterEffect}, effect: 1, err: "."},
			"hang":            {fault: Fault{Kind: Hang, Point: AfterEffect}, effect: 1, err: "canceled"},
			"status":          {fault: Fault{Kind: Status, Status: 503}, status: 503},
			"early":           {fault: Fault{Kind: EarlyAnswer}, status: 503},
			"slow":            {fault: Fault{Kind: Slow, Delay: 10 * time.Millisecond}, effect: 1, status: 201},
			"stuck":           {fault: Fault{Kind: Stuck, Delay: time.Millisecond}, err: "INTERNAL_ERROR"},
			"late":            {fault: Fault{Kind: Late, Delay: 10 * time.Millisecond, Point: InBody}, effect: 1, status: 201},
			"trickle":         {fault: Fault{Kind: Trickle, Delay: time.Millisecond / 10}, effect: 1, status: 201},
			"trickle headers": {fault: Fault{Kind: Trickle, Delay: time.Millisecond / 10, Point: InHeaders}, effect: 1, status: 201},
			"cut headers":     {fault: Fault{Kind: CutHeaders}, effect: 1, err: "INTERNAL_ERROR"},
			"cut body":        {fault: Fault{Kind: CutBody}, effect: 1, status: 201, body: true},
			"cut chunks":      {fault: Fault{Kind: CutBody, Encoding: "chunked"}, effect: 1, status: 201, body: true},
			"cut gzip":        {fault: Fault{Kind: CutBody, Encoding: "gzip"}, effect: 1, status: 201, body: true},
			"garbage":         {fault: Fault{Kind: Garbage}, effect: 1, err: "."},
			"flood":           {fault: Fault{Kind: Flood}, effect: 1, err: "."},
			"endless":         {fault: Fault{Kind: Endless, Delay: time.Millisecond}, status: 503, body: true},
			"duplicate":       {fault: Fault{Kind: Duplicate}, effect: 1, status: 201},
			"extra":           {fault: Fault{Kind: Extra}, effect: 1, status: 201},
			"bomb":            {fault: Fault{Kind: Bomb, Bytes: 1000}, effect: 1, status: 201},
			"stale":           {fault: Fault{Kind: Stale}, effect: 1, status: 201},
		} {
			require.NoError(t, s.Script(name, c.fault), name)
			p := pay(name)
			switch c.fault.Kind {
			case Hang, Flood:
				p.from, p.within = effected(s, name), 50*time.Millisecond
			case Endless:
				p.take = 1
			}
			r := p.send(s)
			require.Len(t, s.Effects(Filter{Key: name}), c.effect, name)
			if c.err != "" {
				require.Error(t, r.err, name)
				require.Regexp(t, c.err, r.err.Error(), name)
			} else {
				require.NoError(t, r.err, name)
				require.Equal(t, c.status, r.status, name)
				require.Equal(t, c.body, r.bodyErr != nil, "%s: %v", name, r.bodyErr)
			}
			if c.fault.Kind == Stale {
				require.Error(t, pay("lost").send(s).err)
				require.Empty(t, s.Sends(Filter{Key: "lost"}))
			}
			time.Sleep(5 * time.Millisecond)
			require.Equal(t, 201, pay(name).send(s).status, name)
			require.Len(t, s.Effects(Filter{Key: name}), 1, name)
		}
	})
}

func TestStreamResetBeforeAndAfterTheEffect(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		for _, code := range []string{"", "PROTOCOL_ERROR", "CANCEL", "ENHANCE_YOUR_CALM", "REFUSED_STREAM"} {
			for point, effects := range map[Point]int{BeforeEffect: 0, AfterEffect: 1} {
				key := code + string(point)
				require.NoError(t, s.Script(key, Fault{Kind: StreamReset, Point: point, Code: code}))
				err := pay(key).send(s).err
				require.Error(t, err)
				want := code
				if code == "" {
					want = "INTERNAL_ERROR"
				}
				if code == "REFUSED_STREAM" {
					want = "(REFUSED_STREAM|cannot retry err)" // without GetBody net/http wants to, and cannot
				}
				require.Regexp(t, want, err.Error())
				require.Len(t, s.Effects(Filter{Key: key}), effects)
				require.Equal(t, 201, pay(key).send(s).status)
				require.Len(t, s.Effects(Filter{Key: key}), 1)
				if n := s.Sends(Filter{Key: key}); code != "PROTOCOL_ERROR" { // net/http leaves the connection after this one
					require.Equal(t, n[0].Conn, n[1].Conn, "the connection lives on")
				}
			}
		}
	})
}

func TestRefusedStreamIsSentAgainByNetHTTP(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.Script("order-1", Fault{Kind: StreamReset, Code: "REFUSED_STREAM"}))
		sendWithGetBody(t, s)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2)
	})
}

func sendWithGetBody(t *testing.T, s *Server) {
	t.Helper()
	req, err := http.NewRequest("POST", s.URL()+"/v1/payments", strings.NewReader(payments1999))
	require.NoError(t, err)
	req.Header.Set("Idempotency-Key", "order-1")
	resp, err := s.Client().Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
}

func TestGoAwayBelowAtAndAboveTheStream(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		for _, last := range []string{"", "below", "at", "above"} {
			for _, code := range []string{"", "ENHANCE_YOUR_CALM"} {
				for point, effects := range map[Point]int{BeforeEffect: 0, AfterEffect: 1} {
					key := last + code + string(point)
					require.NoError(t, s.Script(key, Fault{Kind: GoAway, Last: last, Code: code, Point: point}))
					err := pay(key).send(s).err
					require.Error(t, err, key)
					require.NotContains(t, err.Error(), "stream error", key)
					require.Len(t, s.Effects(Filter{Key: key}), effects)
					before := s.Sends(Filter{Key: key})[0].Conn
					require.Equal(t, 201, pay(key).send(s).status)
					require.Len(t, s.Effects(Filter{Key: key}), 1)
					require.NotEqual(t, before, s.Sends(Filter{Key: key})[1].Conn)
				}
			}
		}
	})
}

func TestGoAwayBelowTheStreamIsSentAgainByNetHTTP(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		require.Equal(t, 404, call{method: "GET", path: "/warm-up"}.send(s).status)
		require.NoError(t, s.Script("order-1", Fault{Kind: GoAway}))
		sendWithGetBody(t, s)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(Filter{Key: "order-1"}), 2)
	})
}

func TestFrozenConnectionSwallowsWhatIsSent(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Freeze, Point: AfterEffect, Key: "first", Send: 1})
		require.Equal(t, 404, call{method: "GET", path: "/warm-up"}.send(s).status)
		for _, key := range []string{"first", "second", "third"} {
			c := pay(key)
			c.within = 300 * time.Millisecond
			want := context.DeadlineExceeded
			if key == "first" { // it leaves when the connection is frozen
				want = context.Canceled
				c.from = func() bool { n := s.Sends(Filter{Key: key}); return len(n) == 1 && !n[0].Ended.IsZero() }
			}
			require.ErrorIs(t, c.send(s).err, want)
		}
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2, "what is sent on the dead connection is heard by nobody")
		other := pay("second")
		other.client = &http.Client{Transport: s.Transport()}
		require.Equal(t, 201, other.send(s).status, "another connection is fine")
	})
}

func TestConnectionsThatFailBeforeAnyRequest(t *testing.T) {
	silence := func(err error) bool { return errors.Is(err, context.Canceled) } // until the client leaves
	overTLS(t, func(t *testing.T, s *Server) {
		for f, check := range map[ConnFault]func(error) bool{
			NoHost:           func(err error) bool { var e *net.DNSError; return errors.As(err, &e) && e.IsNotFound },
			NoNameServer:     func(err error) bool { var e *net.DNSError; return errors.As(err, &e) && e.IsTemporary },
			Refused:          func(err error) bool { return strings.Contains(err.Error(), "refused") },
			BlackHole:        silence,
			AcceptReset:      func(err error) bool { return err != nil },
			AcceptClose:      func(err error) bool { return err != nil },
			AcceptSilence:    silence,
			HandshakeAlert:   func(err error) bool { return strings.Contains(err.Error(), "remote error: tls:") },
			UnknownAuthority: func(err error) bool { var e x509.UnknownAuthorityError; return errors.As(err, &e) },
			ExpiredCertificate: func(err error) bool {
				var e x509.CertificateInvalidError
				return errors.As(err, &e) && e.Reason == x509.Expired
			},
			WrongName:  func(err error) bool { var e x509.HostnameError; return errors.As(err, &e) },
			NoSettings: silence,
		} {
			c := pay(string(f))
			c.client = &http.Client{Transport: s.Transport()}
			if f == BlackHole || f == AcceptSilence || f == NoSettings {
				c.from, c.within = scriptLeft(s, 0), 100*time.Millisecond
			}
			require.NoError(t, s.ScriptConns(f), f)
			err := c.send(s).err
			require.Error(t, err, f)
			require.True(t, check(err), "%s: %v", f, err)
			require.Empty(t, s.Effects(Filter{Key: c.key}), f)
			c.client = &http.Client{Transport: s.Transport()}
			c.from, c.within = nil, 0
			require.Equal(t, 201, c.send(s).status, f)
		}
	})
}

func TestWindowOfZeroTakesNoBody(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.ScriptConns(NoWindow))
		require.Equal(t, 404, call{method: "GET", path: "/warm-up"}.send(s).status, "by now the client knows the window")
		c := pay("order-1")
		c.from, c.within = func() bool { return len(s.Sends(Filter{Key: c.key})) == 1 }, 300*time.Millisecond
		require.ErrorIs(t, c.send(s).err, context.Canceled)
		require.Empty(t, s.Effects())
		require.Zero(t, s.Sends(Filter{Key: "order-1"})[0].BodyLen)
		c.client, c.from, c.within = &http.Client{Transport: s.Transport()}, nil, 0
		require.Equal(t, 201, c.send(s).status)
	})
}

func TestOneStreamAtATime(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.ScriptConns(OneStream))
		require.Equal(t, 201, pay("warm-up").send(s).status)
		inject(t, s, Fault{Kind: Slow, Delay: 50 * time.Millisecond, Key: "slow", Send: 1})
		slow, goOn := inTime(s, "slow")
		ended := make(chan reply, 1)
		go func() { ended <- slow.send(s) }()
		soon(t, inProgress(s, "slow"))
		next := pay("next")
		next.within = 30 * time.Second // behind the slow one it would wait for ever
		require.Equal(t, 201, next.send(s).status)
		goOn()
		require.Equal(t, 201, (<-ended).status)
		require.NotEqual(t, s.Sends()[1].Conn, s.Sends()[2].Conn, "the second stream needs a second connection")
	})
}

func TestConnectionFaultsWithoutTLS(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		require.ErrorContains(t, s.ScriptConns("", WrongName), "needs NewTLS or NewInMemoryTLS (number 2)")
		require.ErrorContains(t, s.ScriptConns("gone"), `unknown connection fault "gone"`)
		for _, f := range []ConnFault{NoHost, NoNameServer, Refused, BlackHole, AcceptReset, AcceptClose, AcceptSilence} {
			require.NoError(t, s.ScriptConns("", f))
			for _, status := range []int{201, 0} {
				c := pay(string(f))
				c.client = &http.Client{Transport: s.Transport()}
				if status == 0 {
					c.from, c.within = scriptLeft(s, 0), 100*time.Millisecond
				}
				require.Equal(t, status, c.send(s).status, f)
			}
		}
		require.Len(t, s.Effects(), 7)
		require.Len(t, s.Sends(), 7)
	})
}

func TestRestartOverHTTP2(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		client := countConns(s)
		c := pay("order-1")
		c.client = client.Client
		require.Equal(t, 201, c.send(s).status)
		s.Restart()
		soon(t, client.none)
		requireReplay(t, s, c)
		require.NotEqual(t, s.Sends()[0].Conn, s.Sends()[1].Conn)
	})
}

func TestStubOverHTTP2(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		s.Handle("POST /v1/charges", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get(streamHeader) != "" {
				w.WriteHeader(400)
			}
			_, _ = io.Copy(w, r.Body)
		}))
		require.Equal(t, charge("k1").body, charge("k1").send(s).body)
		require.Equal(t, 200, requireReplay(t, s, charge("k1")).status)
	})
}

func TestTheTransportTracesItsHandshake(t *testing.T) {
	s := NewTLS()
	defer s.Close()
	shook := false
	req := keyedRequest(t, s, "order-1")
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{TLSHandshakeStart: func() { shook = true }}))
	resp, err := s.Client().Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.True(t, shook)
}

func TestCloseOverTLSLeavesNoGoroutine(t *testing.T) {
	before := runtime.NumGoroutine()
	s := NewTLS()
	s.Handle("POST /v1/charges", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	inject(t, s, Fault{Kind: Freeze, Key: "freeze"}, Fault{Kind: Hang, Key: "hang"}, Fault{Kind: Endless, Delay: time.Millisecond, Key: "endless"},
		Fault{Kind: Flood, Key: "flood"}, Fault{Kind: Stale, Delay: time.Hour, Key: "stale"}, Fault{Kind: BigHeaders, Key: "big"},
		Fault{Kind: HTML, Point: DuringEffect, Delay: time.Hour, Key: "behind"}, Fault{Kind: GoAway, Key: "away"})
	var group sync.WaitGroup
	for _, c := range []call{pay("freeze"), pay("hang"), pay("endless"), pay("flood"), pay("stale"), pay("big"), pay("behind"), pay("away"), charge("k1")} {
		group.Go(func() {
			c.client = &http.Client{Transport: s.Transport()}
			c.send(s)
		})
	}
	soon(t, func() bool { return len(s.Sends()) == 9 })
	require.NoError(t, s.ScriptConns(AcceptSilence, NoSettings, BlackHole))
	tunnel := s.Transport()
	tunnel.Proxy = http.ProxyURL(s.Proxy(0, -1))
	for i, transport := range []*http.Transport{s.Transport(), s.Transport(), s.Transport(), tunnel, tunnel} {
		group.Go(func() {
			c := pay("lost")
			c.client, c.within = &http.Client{Transport: transport}, time.Minute
			c.send(s)
		})
		if i < 3 {
			soon(t, scriptLeft(s, 2-i)) // each meets the fault that is meant for it
		} else {
			time.Sleep(20 * time.Millisecond)
		}
	}
	s.Close()
	group.Wait()
	soon(t, func() bool { return runtime.NumGoroutine() <= before })
}
