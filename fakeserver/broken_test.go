package fakeserver

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// inBroken runs a test at a server that gets it wrong.
func inBroken(t *testing.T, b Breakage, test func(t *testing.T, s *Server)) {
	t.Helper()
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Broken(b))
		test(t, s)
	})
}

func TestSeenFlagTakesADeclineForASuccess(t *testing.T) {
	inBroken(t, SeenFlag, func(t *testing.T, s *Server) {
		declined := pay("order-1")
		declined.body = strings.Replace(declined.body, "tok_visa", "tok_declined", 1)
		require.Equal(t, 402, declined.send(s).status)
		again := declined.send(s)
		require.Equal(t, 200, again.status)
		require.Empty(t, again.body)
		require.Empty(t, s.Effects(), "the client was told 200 and nothing was charged")
		require.Equal(t, 201, pay("order-2").send(s).status)
		require.Empty(t, pay("order-2").send(s).body, "the id of the payment is lost with the first answer")
	})
}

func TestFlatConflictLooksLikeAFailureAfterTheEffect(t *testing.T) {
	inBroken(t, FlatConflict, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Reset, Point: AfterEffect, Send: 1})
		require.Error(t, pay("order-1").send(s).err)
		again := pay("order-1").send(s)
		require.Equal(t, 409, again.status)
		require.Empty(t, again.body)
		require.Empty(t, again.header.Get("Retry-After"))
		require.Len(t, s.Effects(), 1, "whoever takes the 409 for a failure and pays anew pays twice")
	})
}

func TestOtherReplayIsNotTheFirstAnswer(t *testing.T) {
	inBroken(t, OtherReplay, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		again := pay("order-1").send(s)
		require.Equal(t, 200, again.status)
		require.JSONEq(t, `{"status":"already processed"}`, again.body)
		require.Empty(t, again.header.Get("Idempotent-Replay"))
		require.Len(t, s.Effects(), 1)
	})
}

func TestUnscopedKeysLoseTheSecondCallersPayment(t *testing.T) {
	inBroken(t, UnscopedKeys, func(t *testing.T, s *Server) {
		ada := pay("1").with("Authorization", "Bearer ada.1").send(s)
		bob := pay("1").with("Authorization", "Bearer bob.1").send(s)
		require.Equal(t, 201, bob.status)
		require.Equal(t, ada.body, bob.body, "and learns of the first caller's payment")
		require.Len(t, s.Effects(), 1)
		require.Equal(t, 422, book("1").send(s).status, "one key for all endpoints")
	})
}

func TestKeysPerReplicaChargeTwice(t *testing.T) {
	inBroken(t, KeysPerReplica, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Reset, Point: AfterEffect, Key: "order-1", Send: 1}, Fault{Kind: Duplicate, Key: "order-2", Send: 1})
		require.Error(t, pay("order-1").send(s).err)
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Len(t, s.Effects(Filter{Key: "order-1"}), 2)
		requireReplay(t, s, pay("order-1"))
		pay("order-2").send(s)
		require.Len(t, s.Effects(Filter{Key: "order-2"}), 2)
	})
}

func TestForgottenKeysChargeTwiceAfterARestart(t *testing.T) {
	inBroken(t, ForgetsAtRestart, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		requireReplay(t, s, pay("order-1"))
		s.Restart()
		time.Sleep(50 * time.Millisecond) // the client sees the end of its idle connection
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Len(t, s.Effects(), 2)
	})
}

func TestClaimedKeyOfADeadWorkerIsInProgressForEver(t *testing.T) {
	inBroken(t, ClaimsThenDies, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Status, Status: 503, Send: 1})
		require.Equal(t, 503, pay("order-1").send(s).status)
		for range 5 {
			requireProblem(t, pay("order-1").send(s), 409, "idempotency-key-in-use")
			time.Sleep(4 * time.Hour)
		}
		require.Empty(t, s.Effects())
		time.Sleep(5 * time.Hour)
		require.Equal(t, 201, pay("order-1").send(s).status, "the retention has ended")

		leased := Broken(ClaimsThenDies)
		leased.Lease = time.Minute
		s.Apply(leased)
		require.Equal(t, 503, pay("order-2").send(s).status)
		require.Equal(t, 409, pay("order-2").send(s).status)
		time.Sleep(time.Minute)
		require.Equal(t, 201, pay("order-2").send(s).status)
		requireReplay(t, s, pay("order-2"))
	})
}

func TestClaimedKeyOfARestartedServerIsInProgress(t *testing.T) {
	inBroken(t, ClaimsThenDies, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Slow, Delay: time.Minute, Send: 1})
		ended := make(chan reply)
		go func() { ended <- pay("order-1").send(s) }()
		time.Sleep(time.Second)
		s.Restart()
		time.Sleep(50 * time.Millisecond) // the client sees the end of its idle connection
		require.Error(t, (<-ended).err)
		require.Equal(t, 409, pay("order-1").send(s).status)
		require.Empty(t, s.Effects())
	})
}

func TestEffectThenKeyChargesTwice(t *testing.T) {
	inBroken(t, EffectThenKey, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Reset, Point: AfterEffect, Key: "crash", Send: 1}, Fault{Kind: Duplicate, Point: DuringEffect, Delay: 20 * time.Millisecond, Key: "race", Send: 1},
			Fault{Kind: CutBody, Key: "cut", Send: 1})
		for key, effects := range map[string]int{"crash": 2, "race": 2, "cut": 1, "calm": 1} {
			pay(key).send(s)
			if key == "race" { // the client has the copy's answer; the first delivery still runs
				soon(t, func() bool { return len(s.Effects(Filter{Key: key})) == effects })
			}
			requireReplayOrPayment(t, pay(key).send(s))
			require.Len(t, s.Effects(Filter{Key: key}), effects, key)
			requireReplay(t, s, pay(key))
		}
	})
}

func requireReplayOrPayment(t *testing.T, r reply) {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, 201, r.status)
}

func TestLastRoomIsSoldTwice(t *testing.T) {
	inBroken(t, SellsTwice, func(t *testing.T, s *Server) {
		s.SetRooms("ritz", "double", 1)
		var guests sync.WaitGroup
		for _, key := range []string{"ada", "bob"} {
			guests.Go(func() { require.Equal(t, 201, book(key).send(s).status) })
		}
		guests.Wait()
		require.Len(t, s.Effects(Filter{Kind: "reservation"}), 2, "of one room")
		require.Zero(t, s.Rooms("ritz", "double"))
		require.Equal(t, 422, book("cyd").send(s).status)
		requireReplay(t, s, book("ada"))
	})
}

func TestIgnoredKeysChargeTwice(t *testing.T) {
	inBroken(t, IgnoresKeys, func(t *testing.T, s *Server) {
		pay("order-1").send(s)
		pay("order-1").send(s)
		require.Len(t, s.Effects(), 2)
	})
}

func TestRestartKeepsKeysAndLosesWhatRan(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		client := countConns(s)
		c := func(key string) call {
			c := pay(key)
			c.client = client.Client
			return c
		}
		require.Equal(t, 201, c("order-1").send(s).status)
		inject(t, s, Fault{Kind: Slow, Delay: time.Hour, Key: "slow", Send: 1}, Fault{Kind: Hang, Key: "hang", Send: 1})
		ended := make(chan reply, 2)
		for _, key := range []string{"slow", "hang"} {
			go func() { ended <- c(key).send(s) }()
		}
		soon(t, inProgress(s, "slow"))
		soon(t, arrived(s, "hang"))
		s.Restart()
		require.Error(t, (<-ended).err)
		require.Error(t, (<-ended).err)
		soon(t, client.none)
		soon(t, func() bool { n := s.Sends(); return !n[1].Ended.IsZero() && !n[2].Ended.IsZero() })
		if s.mem != nil {
			time.Sleep(2 * time.Hour)
		}
		require.Len(t, s.Effects(), 1)
		requireReplay(t, s, c("order-1"))
		require.Equal(t, 201, c("slow").send(s).status, "rolled back, the key is free")
	})
}

func TestUnknownNamesPanic(t *testing.T) {
	require.PanicsWithValue(t, `fakeserver: unknown breakage "none"`, func() { Broken("none") })
	require.PanicsWithValue(t, `fakeserver: unknown provider "none"`, func() { Like("none") })
}
