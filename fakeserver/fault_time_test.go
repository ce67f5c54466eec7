package fakeserver

import (
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
		ended := make(chan reply)
		go func() { ended <- pay("order-1").send(s) }()
		for len(s.Sends()) == 0 {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(20 * time.Millisecond)
		s.Close()
		require.Error(t, (<-ended).err)
		require.Empty(t, s.Effects())
	})
}

func TestLateAnswerIsTooLateForTheClient(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Late, Delay: 200 * time.Millisecond})
		c := pay("order-1")
		c.within = 50 * time.Millisecond
		require.Error(t, c.send(s).err)
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
		inject(t, s, Fault{Kind: Late, Point: InBody, Delay: 200 * time.Millisecond})
		resp, err := s.Client().Get(s.URL() + "/v1/payments/pay_1")
		require.NoError(t, err)
		start := time.Now()
		require.Equal(t, 200, resp.StatusCode)
		buffer := make([]byte, 1)
		_, err = resp.Body.Read(buffer)
		require.NoError(t, err)
		require.Greater(t, time.Since(start), 50*time.Millisecond, "the headers came first")
		require.NoError(t, resp.Body.Close())
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
		inject(t, s, Fault{Kind: Trickle, Delay: 5 * time.Millisecond, Send: 1})
		c := pay("order-1")
		c.within = 100 * time.Millisecond
		r := c.send(s)
		require.NoError(t, r.err)
		require.Equal(t, 201, r.status)
		require.Error(t, r.bodyErr)
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
