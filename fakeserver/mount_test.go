package fakeserver

import (
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWhatIsMountedMeetsNoFaultAndIsNoSend(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Status, Status: 503}, Fault{Kind: Reset})
		s.Mount("/_side/", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			_, _ = w.Write([]byte(r.Method + " " + r.URL.Path + " " + string(body)))
		}))
		for _, c := range []call{{method: "GET", path: "/_side/"}, {method: "POST", path: "/_side/v1/payments", body: "x"}} {
			r := c.send(s)
			require.NoError(t, r.err)
			require.Equal(t, c.method+" "+c.path+" "+c.body, r.body)
		}
		require.Empty(t, s.Sends())
		require.Equal(t, 503, pay("order-1").send(s).status, "everything else is as before")
		require.Equal(t, 503, call{method: "GET", path: "/_sides"}.send(s).status, "the prefix ends in its slash")
		require.Len(t, s.Sends(), 2)
	})
}

func TestAMountNeedsItsSlashes(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		for _, prefix := range []string{"", "x/", "/x"} {
			require.Panics(t, func() { s.Mount(prefix, http.NotFoundHandler()) }, prefix)
		}
	})
}

func TestAResetServerIsLikeNew(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{ReplayHeader: "X-Replay"})
		inject(t, s, Fault{Kind: Status, Status: 503, Point: AfterEffect})
		require.NoError(t, s.Script("order-2", Fault{Kind: Reset}))
		require.Equal(t, 503, pay("order-1").send(s).status)
		s.SetRooms("ritz", "double", 0)
		s.Reset()
		require.Empty(t, s.Effects())
		require.Empty(t, s.Effects(Filter{Key: "order-1"}))
		require.Empty(t, s.Sends())
		require.Equal(t, 10, s.Rooms("ritz", "double"))

		first := pay("order-1").send(s)
		require.Equal(t, 201, first.status, "neither fault nor key is left")
		require.Empty(t, first.header.Get("X-Replay"))
		require.Equal(t, 201, pay("order-2").send(s).status, "nor the script")
		require.Equal(t, "true", pay("order-1").send(s).header.Get("X-Replay"), "the settings stay")
		require.Len(t, s.Effects(), 2)
		sends := s.Sends()
		require.Equal(t, []int{1, 1, 1}, []int{sends[0].N, sends[0].KeySend, sends[0].Effect})
		require.Equal(t, 2, sends[2].KeySend)
		listed := call{method: "GET", path: "/v1/payments?reference=order-1"}.send(s)
		require.Len(t, listed.field(t, "data"), 2, "and none of the payments before")
	})
}

func TestAResetEndsWhatIsRunningWithoutAnEffect(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Slow, Delay: time.Minute, Send: 1})
		heard := make(chan Send, 10)
		s.Watch(func(n Send) { heard <- n })
		answered := make(chan reply)
		go func() { answered <- pay("order-1").send(s) }()
		time.Sleep(time.Second)
		require.Len(t, s.Sends(), 1)
		s.Reset()
		at := time.Now()
		require.Error(t, (<-answered).err)
		require.Zero(t, time.Since(at), "it ends at once")
		time.Sleep(time.Hour)
		require.Empty(t, heard, "what was forgotten is no news")
		require.Empty(t, s.Effects())
		require.Empty(t, s.Sends())
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Len(t, s.Effects(), 1)
	})
}

func TestARequestStillOnItsWayAtAResetIsNotExecuted(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: SlowRead, Delay: time.Minute})
		answered := make(chan reply)
		go func() { answered <- pay("order-1").send(s) }()
		time.Sleep(time.Second)
		s.Reset()
		require.Error(t, (<-answered).err)
		require.Empty(t, s.Effects())
	})
}

func TestAStubThatRunsThroughAResetIsNotInTheNewLedger(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Handle("POST /charges", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { time.Sleep(time.Minute) }))
		answered := make(chan reply)
		go func() { answered <- call{method: "POST", path: "/charges", key: "order-1"}.send(s) }()
		time.Sleep(time.Second)
		s.Reset()
		require.Error(t, (<-answered).err)
		require.Empty(t, s.Effects())
	})
}

func TestAWatcherHearsOfEverySendOnceWhenItEnds(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		heard := make(chan Send, 10)
		s.Watch(func(n Send) { heard <- n })
		inject(t, s,
			Fault{Kind: Reset, Point: AfterEffect, Key: "lost", Send: 1},
			Fault{Kind: Slow, Delay: time.Minute, Key: "slow"},
			Fault{Kind: Duplicate, Point: AfterEffect, Key: "twice", Send: 1},
		)
		pay("lost").send(s)
		n := <-heard
		require.Equal(t, 1, n.Effect)
		require.Zero(t, n.Status)
		require.Equal(t, s.Sends()[0], n)

		go pay("slow").send(s)
		time.Sleep(time.Second)
		require.Empty(t, heard)
		require.Zero(t, s.Sends()[1].Ended, "it still runs")
		n = <-heard
		require.Equal(t, 201, n.Status)
		require.Equal(t, time.Minute, n.Ended.Sub(n.At))

		pay("twice").send(s)
		copied, original := <-heard, <-heard
		require.True(t, copied.Duplicate)
		require.False(t, original.Duplicate)
		require.Empty(t, heard)

		require.Len(t, s.SendsAfter(0), 4)
		require.Equal(t, s.Sends()[2:], s.SendsAfter(2))
		require.Empty(t, s.SendsAfter(4))
		require.Empty(t, s.SendsAfter(99))
		require.Equal(t, s.Sends()[3:], s.SendsAfter(-1))
		require.Len(t, s.SendsAfter(-99), 4)
		require.Equal(t, s.Effects(), s.EffectsAfter(0))
		require.Equal(t, s.Effects()[2:], s.EffectsAfter(2))
		require.Empty(t, s.EffectsAfter(99))
	})
}

func TestAMountIsFoundWithoutItsSlashAndFromTheRoot(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		nothing := call{method: "GET", path: "/"}
		require.NotContains(t, nothing.send(s).body, "/_look/")
		s.Mount("/_look/", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {}))
		require.Contains(t, nothing.send(s).body, "Look at /_look/.")
		require.NotContains(t, call{method: "GET", path: "/v1/nothing"}.send(s).body, "/_look/")
		before := len(s.Sends())
		inject(t, s, Fault{Kind: Reset})
		client := &http.Client{Transport: s.Transport(), CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		resp, err := client.Get(s.URL() + "/_look?a=b")
		require.NoError(t, err, "it meets no fault")
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 308, resp.StatusCode)
		require.Equal(t, "/_look/?a=b", resp.Header.Get("Location"))
		require.Len(t, s.Sends(), before, "it is no send")
	})
}
