package fakeserver

import (
	"context"
	"errors"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCloseLeavesNoGoroutine(t *testing.T) {
	for name, start := range map[string]func() *Server{"sockets": New, "memory": NewInMemory} {
		t.Run(name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			for range 5 {
				s := start()
				inject(t, s,
					Fault{Kind: Hang, Key: "hang"}, Fault{Kind: Slow, Delay: time.Hour, Key: "slow"},
					Fault{Kind: Late, Delay: time.Hour, Key: "late"}, Fault{Kind: Stale, Key: "stale"},
					Fault{Kind: Trickle, Delay: time.Hour, Key: "trickle"}, Fault{Kind: Flood, Key: "flood"},
					Fault{Kind: SlowRead, Delay: time.Hour, Key: "slow-read"}, Fault{Kind: EarlyAnswer, Delay: time.Hour, Key: "early"},
					Fault{Kind: Duplicate, Point: DuringEffect, Delay: time.Hour, Key: "during"},
					Fault{Kind: Duplicate, Point: AfterEffect, Delay: time.Hour, Key: "after"},
					Fault{Kind: Endless, Key: "endless"}, Fault{Kind: Status, Status: 503, Delay: time.Hour, Key: "status"},
				)
				keys := []string{"hang", "slow", "late", "stale", "trickle", "flood", "slow-read", "early", "during", "after", "endless", "status", "plain"}
				var group sync.WaitGroup
				for _, key := range keys {
					group.Go(func() {
						c := pay(key)
						c.client = &http.Client{Transport: s.Transport()}
						c.send(s)
					})
				}
				soon(t, func() bool { return len(s.Sends()) >= len(keys) })
				s.Close()
				s.Close()
				group.Wait()
			}
			for range 1000 { // the last steps of net/http's own goroutines are not ours to wait for
				if runtime.NumGoroutine() <= before {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines before, then:\n%s", before, stacks[:runtime.Stack(stacks, true)])
		})
	}
}

func TestClosedServerIsReadButNotReached(t *testing.T) {
	for _, start := range []func() *Server{New, NewInMemory} {
		s := start()
		require.Equal(t, 201, pay("order-1").send(s).status)
		s.Close()
		require.Error(t, pay("order-1").send(s).err)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
	}
}

func TestConcurrentCloseIsSafe(t *testing.T) {
	for _, start := range []func() *Server{New, NewInMemory} {
		s := start()
		var group sync.WaitGroup
		for i := range 8 {
			group.Go(func() {
				pay("order-" + strconv.Itoa(i)).send(s)
				s.Close()
			})
		}
		group.Wait()
	}
}

func TestServerThatNobodyUsesCloses(t *testing.T) {
	for range 50 {
		New().Close()
		NewInMemory().Close()
	}
}

func TestListenSaysWhyItCannot(t *testing.T) {
	s := New()
	defer s.Close()
	_, err := Listen(strings.TrimPrefix(s.URL(), "http://"))
	require.ErrorContains(t, err, "fakeserver: cannot listen")
	var op *net.OpError
	require.True(t, errors.As(err, &op))
	other, err := Listen("127.0.0.1:0")
	require.NoError(t, err)
	other.Close()
}

func TestInMemoryOnlyItsOwnHostsExist(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		var unknown *net.DNSError
		require.ErrorAs(t, call{method: "GET", path: "http://elsewhere.test/"}.send(s).err, &unknown)
		require.True(t, unknown.IsNotFound)
		require.Equal(t, 404, call{method: "GET", path: s.OtherURL() + "/"}.send(s).status)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := s.Transport().DialContext(ctx, "tcp", "fakeserver.test:80")
		if err != nil { // the accept loop may be there at the same moment
			require.ErrorIs(t, err, context.Canceled)
		}
	})
}

func TestTwentyThousandPaymentsAreTwentyThousandEffects(t *testing.T) {
	if testing.Short() {
		t.Skip("a load test")
	}
	s := NewInMemory()
	defer s.Close()
	start := time.Now()
	var group sync.WaitGroup
	for worker := range 8 {
		group.Go(func() {
			for i := worker; i < 20_000; i += 8 {
				pay("order-" + strconv.Itoa(i)).send(s)
			}
		})
	}
	group.Wait()
	require.Len(t, s.Effects(), 20_000)
	t.Logf("%v", time.Since(start)) // a limit here would measure the neighbours of the machine
}

func BenchmarkPaymentInMemory(b *testing.B) {
	s := NewInMemory()
	defer s.Close()
	b.ReportAllocs()
	for i := range b.N {
		if r := pay("order-" + strconv.Itoa(i)).send(s); r.status != 201 {
			b.Fatal(r)
		}
	}
}

func TestVirtualTimePassesWhileRequestsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewInMemory()
		defer s.Close()
		inject(t, s, Fault{Kind: Slow, Delay: 10 * time.Hour})
		start := time.Now()
		var group sync.WaitGroup
		for i := range 20 {
			group.Go(func() { pay("order-" + strconv.Itoa(i)).send(s) })
		}
		group.Wait()
		require.Equal(t, 10*time.Hour, time.Since(start))
		require.Len(t, s.Effects(), 20)
	})
}
