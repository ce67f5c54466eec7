package fakeserver

import (
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// charges is a stub of a provider that counts what it does.
type charges struct {
	made   atomic.Int64
	status int
	takes  time.Duration
}

func (c *charges) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	time.Sleep(c.takes)
	n := c.made.Add(1)
	if err := r.ParseForm(); err != nil {
		http.Error(w, err.Error(), 400)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header()["X-Two"] = []string{"a", "b"}
	w.WriteHeader(c.status)
	fmt.Fprintf(w, `{"id":"ch_%d","amount":%q}`, n, r.PostForm.Get("amount"))
}

func charge(key string) call {
	return call{method: "POST", path: "/v1/charges", key: key, body: "amount=1999&reference=order-7"}.
		with("Content-Type", "application/x-www-form-urlencoded")
}

func TestStubIsCalledOncePerKeyAndItsAnswerReplayedVerbatim(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		stub := &charges{status: 201}
		s.Handle("POST /v1/charges", stub)
		first := charge("k1").send(s)
		require.Equal(t, 201, first.status, first.body)
		require.JSONEq(t, `{"id":"ch_1","amount":"1999"}`, first.body)
		again := requireReplay(t, s, charge("k1"))
		require.Equal(t, first.body, again.body)
		require.Equal(t, 201, again.status)
		require.Equal(t, []string{"a", "b"}, again.header["X-Two"])
		require.EqualValues(t, 1, stub.made.Load())
		e := s.Effects()
		require.Len(t, e, 1)
		require.Equal(t, []string{"handled", "ch_1", "order-7", "k1", "POST /v1/charges"},
			[]string{e[0].Kind, e[0].ID, e[0].Reference, e[0].Key, e[0].Endpoint})

		require.Equal(t, 201, charge("k2").send(s).status)
		require.Len(t, s.Effects(Filter{Reference: "order-7"}), 2)
		other := charge("k1")
		other.body = "amount=1"
		requireProblem(t, other.send(s), 422, "idempotency-key-reused")
		requireProblem(t, charge("").send(s), 400, "idempotency-key-missing")
		big := charge("big")
		big.body = strings.Repeat("x", maxBody+1)
		requireProblem(t, big.send(s), 413, "body-too-large")
		require.EqualValues(t, 2, stub.made.Load())
	})
}

func TestStubMeetsEveryFaultLikeABuiltInRoute(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		stub := &charges{status: 200}
		s.Handle("POST /v1/charges", stub)
		inject(t, s,
			Fault{Kind: Reset, Point: AfterEffect, Key: "reset", Send: 1},
			Fault{Kind: CutBody, Key: "cut", Send: 1},
			Fault{Kind: Duplicate, Point: AfterEffect, Key: "twice", Send: 1},
			Fault{Kind: Status, Status: 503, Key: "before", Send: 1},
			Fault{Kind: StoredFailure, Key: "stored", Send: 1},
			Fault{Kind: StoredFailure, Point: BeforeEffect, Key: "stored before", Send: 1},
			Fault{Kind: Slow, Delay: time.Hour, Key: "slow", Send: 1})
		for key, effects := range map[string]int{"reset": 1, "cut": 1, "twice": 1, "before": 0, "stored": 1, "stored before": 0, "slow": 1} {
			charge(key).send(s)
			require.Len(t, s.Effects(Filter{Key: key}), effects, key)
		}
		require.EqualValues(t, 5, stub.made.Load())
		require.Equal(t, 500, charge("stored before").send(s).status)
		require.Equal(t, 500, charge("stored").send(s).status)
		require.Equal(t, 200, charge("before").send(s).status)
		require.EqualValues(t, 6, stub.made.Load())
	})
}

func TestKeyIsInProgressWhileTheStubRunsAndTheServerStaysFree(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		stub := &charges{status: 200, takes: time.Minute}
		s.Handle("POST /v1/charges", stub)
		ended := make(chan reply)
		go func() { ended <- charge("k1").send(s) }()
		time.Sleep(time.Second)
		requireProblem(t, charge("k1").send(s), 409, "idempotency-key-in-use")
		require.Equal(t, 201, pay("order-1").send(s).status, "the stub does not hold the server")
		require.Empty(t, s.Effects(Filter{Kind: "handled"}))
		require.Equal(t, 200, (<-ended).status)
		require.Len(t, s.Effects(Filter{Kind: "handled"}), 1)
		requireReplay(t, s, charge("k1"))
	})
}

func TestStubGoesOnWhenTheClientLeaves(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Handle("POST /v1/charges", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-time.After(time.Minute):
				w.WriteHeader(204)
			case <-r.Context().Done():
				w.WriteHeader(500)
			}
		}))
		c := charge("k1")
		c.within = time.Second
		require.Error(t, c.send(s).err)
		time.Sleep(2 * time.Minute)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, 204, requireReplay(t, s, charge("k1")).status)

		c = charge("k2")
		c.within = time.Second
		c.send(s)
		start := time.Now()
		s.Close()
		require.Less(t, time.Since(start), time.Second, "Close ends the stub's context")
	})
}

func TestStubThatFailsFreesTheKey(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		stub := &charges{status: 503}
		s.Handle("POST /v1/charges", stub)
		require.Equal(t, 503, charge("k1").send(s).status)
		require.Equal(t, 503, charge("k1").send(s).status)
		require.EqualValues(t, 2, stub.made.Load())
		s.Apply(Settings{Failures: StoreFailures})
		require.Equal(t, 503, charge("k2").send(s).status)
		require.Equal(t, 503, requireReplay(t, s, charge("k2")).status)
		stub.status = 402
		require.Equal(t, 402, charge("k3").send(s).status)
		require.Equal(t, 402, requireReplay(t, s, charge("k3")).status)
		require.Empty(t, s.Effects())
	})
}

func TestStubThatPanicsOrEndsItsGoroutineFreesTheKey(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		ends := []func(){func() { panic("boom") }, func() { panic(http.ErrAbortHandler) }, runtime.Goexit}
		calls := 0
		s.Handle("POST /v1/charges", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if calls++; calls <= len(ends) {
				ends[calls-1]()
			}
		}))
		for range ends {
			require.Error(t, charge("k1").send(s).err)
		}
		require.Equal(t, "the stub panicked: boom", s.Sends()[0].Fault)
		require.Empty(t, s.Effects())
		require.Equal(t, 200, charge("k1").send(s).status)
		require.Len(t, s.Effects(), 1)
	})
}

func TestStubOfAnyMethod(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Handle("/v2/things/{id}", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, r.Method+" "+r.PathValue("id"))
		}))
		read := call{method: "GET", path: "/v2/things/a"}.send(s)
		require.Equal(t, "GET a", read.body)
		require.Equal(t, "text/plain; charset=utf-8", read.header.Get("Content-Type"))
		require.Empty(t, s.Effects(), "reading is no effect")
		call{method: "DELETE", path: "/v2/things/a"}.send(s)
		call{method: "DELETE", path: "/v2/things/a", key: "k1"}.send(s)
		requireReplay(t, s, call{method: "DELETE", path: "/v2/things/a", key: "k1"})
		require.Len(t, s.Effects(), 2)
		requireProblem(t, call{method: "PATCH", path: "/v2/things/a"}.send(s), 400, "idempotency-key-missing")
	})
}

func TestStubGoesBeforeTheBuiltInRoute(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Handle("POST /v1/payments", &charges{status: 200})
		require.Equal(t, 200, pay("order-1").send(s).status)
		require.Equal(t, "order-1", s.Effects()[0].Reference)
		require.Equal(t, "handled", s.Effects()[0].Kind)
		requireProblem(t, call{method: "GET", path: "/v1/payments/pay_1"}.send(s), 404, "not-found")
		r := call{method: "PUT", path: "/v1/payments"}.send(s)
		requireProblem(t, r, 405, "method-not-allowed")
	})
}

func TestNilStubPanicsWhenItIsRegistered(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.PanicsWithValue(t, `fakeserver: handle: nil handler for "POST /v1/charges"`, func() { s.Handle("POST /v1/charges", nil) })
		require.PanicsWithValue(t, `fakeserver: handle: nil handler for "/x"`, func() { s.Handle("/x", http.HandlerFunc(nil)) })
	})
}
