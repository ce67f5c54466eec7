package fakeserver

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSameKeyChargesOnceAndReplaysVerbatim(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		first := pay("order-1").send(s)
		require.Equal(t, 201, first.status, first.body)
		require.Empty(t, first.header.Get("Idempotent-Replay"))

		again := requireReplay(t, s, pay("order-1"))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, first.status, again.status)
		require.Equal(t, first.body, again.body)
		again.header.Del("Idempotent-Replay")
		first.header.Del("Date")
		again.header.Del("Date")
		require.Equal(t, first.header, again.header)

		sends := s.Sends(Filter{Key: "order-1"})
		require.Len(t, sends, 2)
		require.Equal(t, []int{1, 2}, []int{sends[0].KeySend, sends[1].KeySend})
		require.Equal(t, []bool{false, true}, []bool{sends[0].Replayed, sends[1].Replayed})
		require.Equal(t, []int{1, 0}, []int{sends[0].Effect, sends[1].Effect})
	})
}

func TestSixtyFourCallersOfOneKeyChargeOnce(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		var group sync.WaitGroup
		replies := make([]reply, 64)
		for i := range replies {
			group.Go(func() { replies[i] = pay("order-1").send(s) })
		}
		group.Wait()
		require.Len(t, s.Effects(), 1)
		for _, r := range replies {
			require.NoError(t, r.err)
			require.Equal(t, 201, r.status)
			require.Equal(t, replies[0].body, r.body)
		}
	})
}

func TestReusedKeyIsRefused(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		other := pay("order-1")
		other.body = strings.Replace(other.body, "1999", "2000", 1)
		requireProblem(t, other.send(s), 422, "idempotency-key-reused")
		query := pay("order-1")
		query.path += "?x=1"
		requireProblem(t, query.send(s), 422, "idempotency-key-reused")
		require.Len(t, s.Effects(), 1)
		requireReplay(t, s, pay("order-1"))
	})
}

func TestLenientServerReplaysForAnotherPayload(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{Lenient: true})
		first := pay("order-1").send(s)
		other := pay("order-1")
		other.body = strings.Replace(other.body, "1999", "2000", 1)
		require.Equal(t, first.body, requireReplay(t, s, other).body)
		require.Equal(t, first.body, requireReplay(t, s, book("order-1")).body)
		require.Len(t, s.Effects(), 1)
	})
}

func TestSameKeyAtAnotherEndpointIsAnotherKey(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Equal(t, 201, book("order-1").send(s).status)
		other := book("order-1")
		other.path = "/v1/hotels/plaza/reservations"
		require.Equal(t, 201, other.send(s).status)
		require.Len(t, s.Effects(), 3)
	})
}

func TestKeysOfTwoCallersAreApart(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		ada := pay("order-1").with("Authorization", "Bearer ada.one")
		bob := pay("order-1").with("Authorization", "Bearer bob.one")
		rotated := pay("order-1").with("Authorization", "Bearer ada.two")
		require.Equal(t, 201, ada.send(s).status)
		require.Equal(t, 201, bob.send(s).status)
		require.Equal(t, 201, rotated.send(s).status)
		require.Len(t, s.Effects(), 3, "per credential, a rotated one forgets")

		s.Apply(Settings{KeyPer: PerAccount})
		require.Equal(t, 201, ada.send(s).status)
		requireReplay(t, s, rotated)
		require.Equal(t, 201, bob.send(s).status)
		require.Len(t, s.Effects(Filter{Caller: "ada"}), 1)
		require.Len(t, s.Effects(Filter{Caller: "bob"}), 1)
	})
}

func TestKeyIsRequiredAndChecked(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		requireProblem(t, pay("").send(s), 400, "idempotency-key-missing")
		for name, c := range map[string]call{
			"empty":      pay("").with("Idempotency-Key", ""),
			"blank":      pay("").with("Idempotency-Key", "   "),
			"long":       pay(strings.Repeat("k", 256)),
			"tab inside": pay("a\tb"),
			"two values": pay("").with("Idempotency-Key", "a").with("Idempotency-Key", "b"),
			"spelling":   pay("").with("Idempotency-Key", "a").with("idempotency-key", "b"),
		} {
			t.Log(name)
			requireProblem(t, c.send(s), 400, "idempotency-key-invalid")
		}
		require.Empty(t, s.Effects())
		require.Equal(t, 201, pay(strings.Repeat("k", 255)).send(s).status)
		two := s.Sends()
		require.Len(t, two, 8)
		require.Empty(t, two[1].Key)
	})
}

func TestOptionalKeyExecutesEachTime(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{Optional: true})
		require.Equal(t, 201, pay("").send(s).status)
		require.Equal(t, 201, pay("").send(s).status)
		require.Len(t, s.Effects(), 2)
	})
}

func TestQuotedKeys(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{Quoted: true})
		require.Equal(t, 201, pay(`"order-1"`).send(s).status)
		require.Len(t, s.Effects(Filter{Key: "order-1"}), 1)
		require.Equal(t, 201, pay(`"a\"b\\c"`).send(s).status)
		require.Len(t, s.Effects(Filter{Key: `a"b\c`}), 1)
		for _, bad := range []string{`order-1`, `"`, `"a`, `"a"b"`, `"a\x"`, `"a\"`, `""`} {
			requireProblem(t, pay(bad).send(s), 400, "idempotency-key-invalid")
		}
	})
}

func TestRunningKeyIsInProgress(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.Inject(Fault{Kind: Slow, Delay: 500 * time.Millisecond, Send: 1}))
		c, goOn := inTime(s, "order-1")
		first := make(chan reply, 1)
		go func() { first <- c.send(s) }()
		soon(t, inProgress(s, "order-1"))
		busy := c.send(s)
		requireProblem(t, busy, 409, "idempotency-key-in-use")
		require.Equal(t, "1", busy.header.Get("Retry-After"))
		require.Empty(t, s.Effects())
		goOn()
		require.Equal(t, 201, (<-first).status)
		requireReplay(t, s, c)
		require.Len(t, s.Effects(), 1)
		require.GreaterOrEqual(t, s.Effects()[0].At.Sub(s.Sends()[0].At), 500*time.Millisecond)
	})
}

func TestMarksOfOtherProviders(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{
			KeyHeader: "X-Request-Id", ReplayHeader: "Idempotency-Replayed", ReplayStatus: 200,
			MismatchStatus: 400, InProgressStatus: 423, InProgressRetryAfter: "-",
		})
		require.NoError(t, s.Inject(Fault{Kind: Slow, Delay: time.Second, Send: 1}))
		keyed := pay("").with("X-Request-Id", "order-1")
		first := make(chan reply)
		go func() { first <- keyed.send(s) }()
		time.Sleep(time.Millisecond)
		busy := keyed.send(s)
		requireProblem(t, busy, 423, "idempotency-key-in-use")
		require.Empty(t, busy.header.Values("Retry-After"))
		require.Equal(t, 201, (<-first).status)

		again := keyed.send(s)
		require.Equal(t, 200, again.status)
		require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
		keyed.body = `{"amount":1,"currency":"usd"}`
		requireProblem(t, keyed.send(s), 400, "idempotency-key-reused")
	})
}

func TestDeclineIsStoredAndValidationIsNot(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		declined := call{method: "POST", path: "/v1/payments", key: "order-1", body: `{"amount":40200,"currency":"usd"}`}
		first := declined.send(s)
		requireProblem(t, first, 402, "card-declined")
		require.Equal(t, first.body, requireReplay(t, s, declined).body)

		wrong := call{method: "POST", path: "/v1/payments", key: "order-2", body: `{"amount":0,"currency":"usd"}`}
		requireProblem(t, wrong.send(s), 400, "invalid-request")
		require.Equal(t, 201, pay("order-2").send(s).status, "the corrected request may use the key")

		refund := call{method: "POST", path: "/v1/payments/pay_77/refunds", key: "refund-1", body: `{"amount":1}`}
		requireProblem(t, refund.send(s), 404, "not-found")
		requireReplay(t, s, refund)
		require.Len(t, s.Effects(), 1)
	})
}

func TestRetentionEndsAndTheKeyExecutesAgain(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		s.Advance(24*time.Hour - time.Second)
		requireReplay(t, s, pay("order-1"))
		require.Zero(t, s.Sweep())
		time.Sleep(time.Second) // virtual time counts as well
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Len(t, s.Effects(), 2, "a key that is forgotten is a new key")

		s.Advance(24 * time.Hour)
		require.Equal(t, 1, s.Sweep())
		require.Zero(t, s.Sweep())
	})
}

func TestServerThatIgnoresKeysChargesTwice(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{IgnoreKeys: true})
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Len(t, s.Effects(Filter{Key: "order-1"}), 2, "the ledger must show what the key table would hide")
	})
}

func TestClientThatLeavesDoesNotStopTheEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.Inject(Fault{Kind: Slow, Delay: 400 * time.Millisecond, Send: 1}))
		left := leavingOfTheFirst(s)
		c, goOn := inTime(s, "order-1")
		impatient := c
		impatient.from, impatient.within = inProgress(s, "order-1"), 50*time.Millisecond
		require.ErrorIs(t, impatient.send(s).err, context.Canceled)
		require.Empty(t, s.Effects())
		requireProblem(t, c.send(s), 409, "idempotency-key-in-use")
		<-left
		goOn()
		soon(t, func() bool { return len(s.Effects()) == 1 })
		soon(t, func() bool { return !s.Sends()[0].Ended.IsZero() })
		require.Zero(t, s.Sends()[0].Status)
		require.Equal(t, 201, requireReplay(t, s, c).status)
	})
}

// leavingOfTheFirst is closed when the server has heard that the client of the first request is gone.
func leavingOfTheFirst(s *Server) <-chan struct{} {
	left := make(chan struct{})
	var first sync.Once
	serve := s.http.Handler
	s.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		first.Do(func() { context.AfterFunc(r.Context(), func() { close(left) }) })
		serve.ServeHTTP(w, r)
	})
	return left
}

func TestSecretsAreNotInTheSends(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		c := pay("order-1").with("Authorization", "Bearer SECRET1").with("Cookie", "session=SECRET2").with("X-Trace", "abc")
		require.Equal(t, 201, c.send(s).status)
		sends := s.Sends()
		require.Equal(t, "[redacted]", sends[0].Header.Get("Authorization"))
		require.Equal(t, "[redacted]", sends[0].Header.Get("Cookie"))
		require.Equal(t, "abc", sends[0].Header.Get("X-Trace"))
		require.NotContains(t, sends[0].Caller, "SECRET1")
		require.NotEmpty(t, sends[0].Caller)

		sends[0].Header.Set("X-Trace", "changed")
		require.Equal(t, "abc", s.Sends()[0].Header.Get("X-Trace"), "a copy is handed out")
		s.Apply(Settings{ForgetHeaders: true})
		pay("order-2").send(s)
		require.Nil(t, s.Sends(Filter{Key: "order-2"})[0].Header)
	})
}

func TestSendsSayWhatArrived(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Equal(t, 404, call{method: "GET", path: "/nothing"}.send(s).status)
		sends := s.Sends()
		require.Len(t, sends, 2)
		n := sends[0]
		require.Equal(t, "POST", n.Method)
		require.Equal(t, "/v1/payments", n.Path)
		require.Equal(t, "POST /v1/payments", n.Endpoint)
		require.Equal(t, "order-1", n.Reference)
		require.Equal(t, []string{"order-1"}, n.Keys)
		require.EqualValues(t, len(payments1999), n.ContentLength)
		require.EqualValues(t, len(payments1999), n.BodyLen)
		require.Equal(t, sha256Of(payments1999), n.BodySHA256)
		require.Equal(t, 201, n.Status)
		require.Equal(t, sends[1].Conn, n.Conn, "the connection is reused")
		require.Empty(t, sends[1].Endpoint)
		require.Len(t, s.Sends(Filter{Endpoint: "POST /v1/payments"}, Filter{Key: "order-1"}), 1)
		require.Len(t, s.Sends(Filter{Kind: "payment"}), 1)
		require.Empty(t, s.Sends(Filter{Kind: "refund"}))
	})
}

func TestUnknownPathAndMethodAreProblems(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		requireProblem(t, call{method: "POST", path: "/v1/nothing", body: "{}"}.send(s), 404, "not-found")
		r := call{method: "PATCH", path: "/v1/payments", body: "{}"}.send(s)
		requireProblem(t, r, 405, "method-not-allowed")
		require.Contains(t, r.header.Get("Allow"), http.MethodPost)
	})
}
