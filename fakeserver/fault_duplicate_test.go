package fakeserver

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestConcurrentCopyHasNoSecondEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Duplicate})
		for i := range 50 {
			key := "order-" + strconv.Itoa(i)
			require.Equal(t, 201, pay(key).send(s).status)
			require.Len(t, s.Effects(Filter{Key: key}), 1)
			sends := s.Sends(Filter{Key: key})
			require.Len(t, sends, 2)
			require.True(t, sends[1].Duplicate)
			require.Equal(t, sends[0].BodySHA256, sends[1].BodySHA256)
			require.Equal(t, 201, sends[1].Status)
			require.NotEqual(t, sends[0].Replayed, sends[1].Replayed, "one of the two was first")
		}
	})
}

func TestCopyAfterSuccessIsReplayed(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Duplicate, Point: AfterEffect, Key: "now"},
			Fault{Kind: Duplicate, Point: AfterEffect, Delay: 50 * time.Millisecond, Key: "later"})
		for _, key := range []string{"now", "later"} {
			r := pay(key).send(s)
			require.Equal(t, 201, r.status)
			require.Empty(t, r.header.Get("Idempotent-Replay"), "the client has the first answer")
			soon(t, func() bool { n := s.Sends(Filter{Key: key}); return len(n) == 2 && n[1].Status != 0 })
			sends := s.Sends(Filter{Key: key})
			require.True(t, sends[1].Replayed)
			require.Len(t, s.Effects(Filter{Key: key}), 1)
		}
	})
}

func TestCopiesAreNotCountedAsSendsOfTheKey(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Duplicate, Send: 1})
		pay("order-1").send(s)
		pay("order-1").send(s)
		sends := s.Sends()
		require.Equal(t, []int{1, 1, 2}, []int{sends[0].KeySend, sends[1].KeySend, sends[2].KeySend})
	})
}

func TestImpatientGatewayPassesOnTheCopysAnswer(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		const delay = 300 * time.Millisecond
		inject(t, s, Fault{Kind: Duplicate, Point: DuringEffect, Delay: delay, Send: 1})
		c, goOn := inTime(s, "order-1")
		busy := c.send(s)
		requireProblem(t, busy, 409, "idempotency-key-in-use")
		require.Empty(t, s.Effects())
		goOn()
		soon(t, func() bool { return len(s.Effects()) == 1 })
		require.GreaterOrEqual(t, s.Effects()[0].At.Sub(s.Sends()[0].At), delay)
		require.Equal(t, 201, requireReplay(t, s, c).status)
		require.Equal(t, 1, s.Effects()[0].Send, "the first copy made the effect")
		require.Len(t, s.Sends(), 3)
	})
}

func TestCopiesAtAServerThatIgnoresKeysExecuteTwice(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{IgnoreKeys: true})
		inject(t, s, Fault{Kind: Duplicate})
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Len(t, s.Effects(), 2)
	})
}

func TestCopyOfACancellationFindsNothing(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		at := book("trip-1").send(s).header.Get("Location")
		inject(t, s, Fault{Kind: Duplicate, Point: AfterEffect})
		require.Equal(t, 204, call{method: "DELETE", path: at}.send(s).status)
		require.Len(t, s.Effects(Filter{Kind: "cancellation", Reference: "trip-1"}), 1)
		sends := s.Sends()
		require.Equal(t, "trip-1", sends[1].Reference)
		require.Equal(t, 404, sends[2].Status)
		require.Equal(t, 10, s.Rooms("ritz", "double"))
	})
}
