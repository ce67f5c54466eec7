package fakeserver

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSlowEffectHappensAtTheEndOfTheDelay(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Slow, Delay: time.Hour, Send: 1})
		start := time.Now()
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Equal(t, time.Hour, time.Since(start))
		require.Equal(t, time.Hour, s.Effects()[0].At.Sub(s.Sends()[0].At))
		s.ClearFaults()
		inject(t, s, Fault{Kind: Slow, Delay: time.Hour})
		start = time.Now()
		requireReplay(t, s, pay("order-1"))
		require.Zero(t, time.Since(start), "a replay has no effect to make")
	})
}

func TestCloseAbandonsASlowEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Slow, Delay: time.Hour})
		ended := make(chan reply, 1)
		go func() { ended <- pay("order-1").send(s) }()
		soon(t, inProgress(s, "order-1"))
		requireProblem(t, pay("order-1").send(s), 409, "idempotency-key-in-use")
		s.Close()
		require.Error(t, (<-ended).err)
		require.Empty(t, s.Effects())
	})
}

func TestLateAnswerIsTooLateForTheClient(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Late, Delay: time.Hour, Send: 1}, Fault{Kind: Late, Delay: 200 * time.Millisecond, Send: 2})
		c := pay("order-1")
		c.from, c.within = effected(s, "order-1"), 50*time.Millisecond
		require.ErrorIs(t, c.send(s).err, context.Canceled)
		require.Len(t, s.Effects(), 1)
		start := time.Now()
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.GreaterOrEqual(t, time.Since(start), 200*time.Millisecond)
		require.Equal(t, []int{0, 201}, []int{s.Sends()[0].Status, s.Sends()[1].Status})
		require.Len(t, s.Effects(), 1)
	})
}

func TestLateBodyComesAfterItsHeaders(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		const endpoint = "GET /v1/payments/{id}"
		inject(t, s, Fault{Kind: Late, Point: InBody, Delay: time.Hour, Endpoint: endpoint, Send: 1},
			Fault{Kind: Late, Point: InBody, Delay: 200 * time.Millisecond, Endpoint: endpoint, Send: 2})
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, "GET", s.URL()+"/v1/payments/pay_1", nil)
		require.NoError(t, err)
		resp, err := s.Client().Do(req)
		require.NoError(t, err, "the headers do not wait for the body")
		require.Equal(t, 200, resp.StatusCode)
		require.NoError(t, resp.Body.Close())

		start := time.Now()
		r := call{method: "GET", path: "/v1/payments/pay_1"}.send(s)
		require.NoError(t, r.bodyErr)
		require.Equal(t, "pay_1", r.field(t, "id"))
		require.GreaterOrEqual(t, time.Since(start), 200*time.Millisecond)
	})
}

func TestTrickleSendsByteByByte(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Trickle, Delay: time.Second, Key: "body", Send: 1},
			Fault{Kind: Trickle, Point: InHeaders, Delay: time.Second, Key: "headers", Send: 1})
		start := time.Now()
		r := pay("body").send(s)
		require.NoError(t, r.bodyErr)
		require.Equal(t, time.Duration(len(r.body))*time.Second, time.Since(start))
		start = time.Now()
		r = pay("headers").send(s)
		require.NoError(t, r.bodyErr)
		require.Greater(t, time.Since(start), time.Duration(len(r.body)+100)*time.Second)
	})
}

func TestTrickleEndsWhenTheClientLeaves(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Trickle, Delay: 100 * time.Millisecond, Send: 1}) // 14 s for the whole body
		c := pay("order-1")
		c.take = 1
		r := c.send(s)
		require.NoError(t, r.err)
		require.Equal(t, 201, r.status)
		require.ErrorIs(t, r.bodyErr, context.Canceled)
		require.NotEmpty(t, r.body)
		requireReplay(t, s, pay("order-1"))
	})
}

func TestSlowReadHoldsThe100Continue(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: SlowRead, Delay: 150 * time.Millisecond})
		client := &http.Client{Transport: s.Transport()}
		client.Transport.(*http.Transport).ExpectContinueTimeout = 20 * time.Millisecond
		c := pay("order-1").with("Expect", "100-continue")
		c.client = client
		start := time.Now()
		require.Equal(t, 201, c.send(s).status)
		require.GreaterOrEqual(t, time.Since(start), 150*time.Millisecond)
		require.Len(t, s.Effects(), 1)
	})
}

func TestStuckKeyIsInProgressUntilItsLeaseEnds(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Stuck, Delay: time.Minute, Key: "minute", Send: 1}, Fault{Kind: Stuck, Key: "day", Send: 1})
		require.Error(t, pay("minute").send(s).err)
		require.Error(t, pay("day").send(s).err)
		requireProblem(t, pay("minute").send(s), 409, "idempotency-key-in-use")
		s.Advance(time.Minute)
		require.Equal(t, 201, pay("minute").send(s).status)
		requireProblem(t, pay("day").send(s), 409, "idempotency-key-in-use")
		s.Advance(24 * time.Hour)
		require.Equal(t, 201, pay("day").send(s).status)
		require.Len(t, s.Effects(), 2)
	})
}
