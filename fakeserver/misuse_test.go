package fakeserver

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The late copy of a Duplicate fault belongs to the life before the Reset.
func TestCopyFromBeforeAResetDoesNotArrive(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.Inject(Fault{Kind: Duplicate, Point: AfterEffect, Delay: time.Second, Times: 1}))
		require.Equal(t, 201, pay("order-1").send(s).status)
		s.Reset()
		time.Sleep(2 * time.Second)
		require.Empty(t, s.Effects())
		require.Empty(t, s.Sends())
	})
}

// A client that has shut down its writing side still reads. It must get the true answer or none, never an empty 200.
func TestHalfClosedClientGetsNoAnswerThatNobodyGave(t *testing.T) {
	s := New()
	defer s.Close()
	for i, f := range []Fault{
		{Kind: Slow, Delay: 50 * time.Millisecond},
		{Kind: StoredFailure, Point: BeforeEffect, Delay: 0},
		{Kind: Status, Status: 503, Point: DuringEffect, Delay: 50 * time.Millisecond},
	} {
		require.NoError(t, s.Script("", f))
		c, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
		require.NoError(t, err)
		fmt.Fprintf(c, "POST /v1/payments HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k%d\r\nContent-Length: %d\r\n\r\n%s", i, len(payments1999), payments1999)
		require.NoError(t, c.(*net.TCPConn).CloseWrite())
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			require.NotEqual(t, 200, resp.StatusCode, f.String())
		}
		_ = c.Close()
	}
}

// Restart: "what was running is lost without an effect, its key free again".
func TestRestartLosesARequestThatWaitsToBeRead(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		longEnough(t, 200*time.Millisecond, func(delay time.Duration) bool {
			key := "order " + delay.String()
			require.NoError(t, s.Script(key, Fault{Kind: SlowRead, Delay: delay}))
			c := pay(key)
			c.client = &http.Client{Transport: s.Transport()}
			done := make(chan reply, 1)
			go func() { done <- c.send(s) }()
			sends := func() []Send { return s.Sends(Filter{Key: key}) }
			soon(t, func() bool { return len(sends()) == 1 })
			s.Restart()
			if time.Since(sends()[0].At) >= delay { // it may have been read before
				<-done
				return false
			}
			require.Error(t, (<-done).err)
			soon(t, func() bool { return !sends()[0].Ended.IsZero() })
			require.Empty(t, s.Effects(Filter{Key: key}))
			return true
		})
	})
}

func TestRestartLosesAStubThatRuns(t *testing.T) {
	s := New()
	defer s.Close()
	entered, goOn := make(chan struct{}, 2), make(chan struct{})
	s.Handle("POST /stub", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		<-goOn // does not look at its context
		w.WriteHeader(201)
	}))
	c := call{method: "POST", path: "/stub", key: "order-1"}
	done := make(chan reply, 2)
	go func() { done <- c.send(s) }()
	<-entered
	s.Restart()
	require.Error(t, (<-done).err)
	go func() { done <- c.send(s) }()
	select {
	case <-entered: // the key is free
	case r := <-done:
		t.Errorf("the key is not free after Restart: %d", r.status)
	}
	close(goOn)
	soon(t, func() bool {
		return !s.Sends()[0].Ended.IsZero() && len(s.Sends()) == 2 && !s.Sends()[1].Ended.IsZero()
	})
	require.Len(t, s.Effects(), 1)
	require.Equal(t, 2, s.Effects()[0].Send)
}

// Order numbers of 19 digits (snowflakes) are JSON numbers beyond 2^53.
func TestLargeNumericReferencesStayApart(t *testing.T) {
	s := New()
	defer s.Close()
	s.Handle("POST /stub", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(201)
		_, _ = io.WriteString(w, `{"id":1234567890123456789}`)
	}))
	for i, reference := range []string{"1234567890123456789", "1234567890123456790"} {
		c := call{method: "POST", path: "/stub", key: fmt.Sprint("order-", i), body: `{"reference":` + reference + `}`}
		require.Equal(t, 201, c.send(s).status)
		require.Equal(t, reference, s.Effects()[i].Reference)
		require.Equal(t, "1234567890123456789", s.Effects()[i].ID)
	}
	s.AssertOneEffectPerOperation(t)
}

// "Reference: "" = none, or the body was not understood". Half a form is not understood.
func TestFormThatBreaksOffHasNoReference(t *testing.T) {
	s := New()
	defer s.Close()
	s.Handle("POST /stub", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(201) }))
	const form = "application/x-www-form-urlencoded"
	c, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
	require.NoError(t, err)
	fmt.Fprintf(c, "POST /stub HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nIdempotency-Key: k\r\nContent-Length: 20\r\n\r\nreference=order-12", form)
	_ = c.Close()
	soon(t, func() bool { return len(s.Sends()) == 1 && !s.Sends()[0].Ended.IsZero() })
	require.Empty(t, s.Sends()[0].Reference)
	r := call{method: "POST", path: "/stub", key: "k", body: "reference=order-1234"}.with("Content-Type", form).send(s)
	require.Equal(t, 201, r.status)
	s.AssertOneEffectPerOperation(t)
}

// The table: stored-failure, after-effect: effect "yes", whether or not the client waits for its Delay.
func TestHeldStoredFailureHasItsEffectThoughTheClientLeaves(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.Inject(Fault{Kind: StoredFailure, Point: AfterEffect, Delay: time.Second, Times: 1}))
		c := pay("order-1")
		c.within = 500 * time.Millisecond
		require.Error(t, c.send(s).err)
		time.Sleep(2 * time.Second)
		require.Len(t, s.Effects(), 1)
		r := requireReplay(t, s, pay("order-1"))
		require.Equal(t, 500, r.status)
	})
}

// Two changes of a payment's status, each sent once under a key of its own, are two operations.
func TestTwoStatusChangesAreTwoOperations(t *testing.T) {
	s := New()
	defer s.Close()
	require.Equal(t, 201, pay("order-1").send(s).status)
	for _, to := range []string{"captured", "disputed"} {
		c := call{method: "PUT", path: "/v1/payments/pay_1/status", key: "to-" + to, body: `{"status":"` + to + `"}`}
		require.Equal(t, 200, c.send(s).status)
	}
	s.AssertOneEffectPerOperation(t)
}

// A Status fault before the effect answers "any status", whatever the key. Under StoreFailures it must not be swallowed.
func TestStatusFaultStrikesAReplayUnderStoreFailures(t *testing.T) {
	s := New()
	defer s.Close()
	s.Apply(Like(Stripe))
	require.Equal(t, 201, pay("order-1").send(s).status)
	require.NoError(t, s.Inject(Fault{Kind: Status, Status: 503, RetryAfter: "7"}))
	r := pay("order-1").send(s) // done already
	require.Equal(t, 503, r.status, "%s listed for the send", s.Sends()[1].Fault)
	require.Equal(t, 503, call{method: "GET", path: "/v1/unknown"}.send(s).status)
	s.ClearFaults()
	require.Equal(t, 201, requireReplay2(t, s).status)
}

func requireReplay2(t *testing.T, s *Server) reply {
	t.Helper()
	r := pay("order-1").send(s)
	require.NoError(t, r.err)
	return r
}

// Restart: "every connection dies", also those that came through a proxy without a tunnel.
func TestRestartEndsWhatCameThroughAProxy(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		through := s.Transport()
		through.Proxy = http.ProxyURL(s.Proxy())
		require.NoError(t, s.Inject(Fault{Kind: Hang, Times: 1}))
		c := pay("order-1")
		c.client, c.within = &http.Client{Transport: through}, time.Minute
		done := make(chan reply, 1)
		go func() { done <- c.send(s) }()
		soon(t, arrived(s, "order-1"))
		s.Restart()
		err := (<-done).err
		require.Error(t, err)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "the Restart ends it, not the client")
	})
}

// A stub beside a built-in route of the same path must not hide the other methods from Allow.
func TestAllowNamesStubsAndBuiltInRoutes(t *testing.T) {
	s := New()
	defer s.Close()
	s.Handle("PATCH /v1/payments", http.NotFoundHandler())
	r := call{method: "DELETE", path: "/v1/payments"}.send(s)
	requireProblem(t, r, 405, "method-not-allowed")
	for _, method := range []string{"GET", "HEAD", "POST", "PATCH"} {
		require.Contains(t, r.header.Get("Allow"), method)
	}
	require.Equal(t, 404, call{method: "GET", path: "/v1/payments/pay_1"}.send(s).status)
}

// The answer to a HEAD has no body, whichever way it is written.
func TestFaultsGiveAHeadNoBody(t *testing.T) {
	s := New()
	defer s.Close()
	require.Equal(t, 201, pay("order-1").send(s).status)
	for _, f := range []Fault{{Kind: Stale}, {Kind: EarlyAnswer, Delay: time.Millisecond}, {Kind: Trickle, Delay: time.Microsecond}} {
		require.NoError(t, s.Script("", f))
		c, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "http://"))
		require.NoError(t, err)
		_, err = io.WriteString(c, "HEAD /v1/payments/pay_1 HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
		r := bufio.NewReader(c)
		_, err = http.ReadResponse(r, &http.Request{Method: http.MethodHead})
		require.NoError(t, err, f.String())
		require.NoError(t, c.(*net.TCPConn).CloseWrite()) // ends what a Stale holds open
		body, err := io.ReadAll(r)
		_ = c.Close()
		require.NoError(t, err, f.String())
		require.Empty(t, body, f.String())
	}
}

// "taken out again before anybody looks"
func TestMountDoesNotSeeTheStreamHeader(t *testing.T) {
	s := NewTLS()
	defer s.Close()
	seen := http.Header{}
	s.Mount("/page/", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen = r.Header.Clone() }))
	require.Equal(t, 200, call{method: "GET", path: "/page/"}.send(s).status)
	require.NotContains(t, seen, streamHeader)
}

// The scheme of an Authorization is case-insensitive (RFC 9110, section 11.1).
func TestAccountWhateverTheCaseOfBearer(t *testing.T) {
	require.Equal(t, "acct_1", callerOf("bearer acct_1.secret", PerAccount))
	require.Equal(t, "acct_1", callerOf("BEARER acct_1.other", PerAccount))
}

// Send.Replayed: "the stored answer was used". A Status fault that strikes a done key uses none.
func TestStatusFaultOnADoneKeyIsNotListedAsReplayed(t *testing.T) {
	s := New()
	defer s.Close()
	s.Apply(Settings{Failures: StoreFailures})
	require.Equal(t, 201, pay("order-1").send(s).status)
	require.NoError(t, s.Inject(Fault{Kind: Status, Status: 503, Times: 1}))
	r := pay("order-1").send(s)
	require.Equal(t, 503, r.status)
	require.Empty(t, r.header.Get("Idempotent-Replay"))
	require.False(t, s.Sends()[1].Replayed)
}

// A held 503 is stored when it is said, not before: the client that leaves meanwhile has not been refused for ever.
func TestHeldStatusFaultStoresWhenItStrikes(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{Failures: StoreFailures})
		require.NoError(t, s.Inject(Fault{Kind: Status, Status: 503, Delay: time.Second, Times: 1}))
		c := pay("order-1")
		c.within = 100 * time.Millisecond
		require.Error(t, c.send(s).err)
		require.Equal(t, 201, pay("order-1").send(s).status)
	})
}

// The copy of a Duplicate that comes after a Restart runs in the new life, and so does the context of its stub.
func TestLateCopyAfterARestartHasALivingContext(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Broken(ForgetsAtRestart))
		ended := make(chan error, 2)
		s.Handle("POST /stub", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(time.Millisecond)
			ended <- r.Context().Err()
			w.WriteHeader(201)
		}))
		require.NoError(t, s.Inject(Fault{Kind: Duplicate, Point: AfterEffect, Delay: time.Second, Times: 1}))
		require.Equal(t, 201, call{method: "POST", path: "/stub", key: "k"}.send(s).status)
		s.Restart()
		time.Sleep(2 * time.Second)
		require.Len(t, ended, 2)
		require.NoError(t, <-ended)
		require.NoError(t, <-ended)
	})
}
