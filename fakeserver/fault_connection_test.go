package fakeserver

import (
	"context"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func inject(t *testing.T, s *Server, faults ...Fault) {
	t.Helper()
	require.NoError(t, s.Inject(faults...))
}

func TestResetAfterEffectLeavesOneEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Reset, Point: AfterEffect, Send: 1})
		r := pay("order-1").send(s)
		require.Len(t, s.Effects(), 1)
		require.ErrorIs(t, r.err, syscall.ECONNRESET)
		n := s.Sends()[0]
		require.Zero(t, n.Status)
		require.Equal(t, 1, n.Effect)
		require.Equal(t, "reset after the effect (send 1)", n.Fault)
		require.Equal(t, 201, requireReplay(t, s, pay("order-1")).status)
	})
}

func TestResetBeforeEffectFreesTheKey(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Reset, Send: 1})
		r := pay("order-1").send(s)
		require.Empty(t, s.Effects())
		require.ErrorIs(t, r.err, syscall.ECONNRESET)
		require.EqualValues(t, len(payments1999), s.Sends()[0].BodyLen, "the whole request was read")
		again := pay("order-1").send(s)
		require.Equal(t, 201, again.status)
		require.Empty(t, again.header.Get("Idempotent-Replay"))
	})
}

func TestResetInTheRequestBody(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Reset, Bytes: 10, Key: "ten"}, Fault{Kind: Reset, Bytes: -1, Key: "none"})
		for key, read := range map[string]int64{"ten": 10, "none": 0} {
			require.Error(t, pay(key).send(s).err)
			n := s.Sends(Filter{Key: key})[0]
			require.Equal(t, read, n.BodyLen)
			require.Empty(t, n.BodySHA256)
		}
		require.Empty(t, s.Effects())
	})
}

func TestResetOfALargeUploadIsSeenByTheWriter(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Reset, Bytes: 100_000})
		r := call{method: "POST", path: "/v1/uploads", key: "file", body: strings.Repeat("x", 4<<20)}.send(s)
		require.Error(t, r.err)
		require.Empty(t, s.Effects())
	})
}

func TestCloseBeforeAndAfterTheEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Close, Point: AfterEffect, Key: "after", Send: 1}, Fault{Kind: Close, Key: "before", Send: 1})
		require.ErrorIs(t, pay("after").send(s).err, io.EOF)
		require.Len(t, s.Effects(Filter{Key: "after"}), 1)
		requireReplay(t, s, pay("after"))

		require.ErrorIs(t, pay("before").send(s).err, io.EOF)
		require.Empty(t, s.Effects(Filter{Key: "before"}))
		require.Equal(t, 201, pay("before").send(s).status)
	})
}

func TestHangEndsWhenTheClientLeaves(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Hang, Point: AfterEffect, Key: "after", Send: 1}, Fault{Kind: Hang, Key: "before", Send: 1})
		for key, effects := range map[string]int{"after": 1, "before": 0} {
			c := pay(key)
			c.from, c.within = arrived(s, key), 50*time.Millisecond
			if effects == 1 {
				c.from = effected(s, key)
			}
			require.ErrorIs(t, c.send(s).err, context.Canceled, "until then there is nothing, not even an end")
			require.Len(t, s.Effects(Filter{Key: key}), effects)
			require.Equal(t, 201, pay(key).send(s).status)
			require.Len(t, s.Effects(Filter{Key: key}), 1)
		}
	})
}

func TestCloseOfTheServerEndsHangs(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Hang})
		ended := make(chan reply, 1)
		go func() { ended <- pay("order-1").send(s) }()
		soon(t, arrived(s, "order-1"))
		s.Close()
		require.Error(t, (<-ended).err)
	})
}

func TestStaleConnectionDiesUnderTheNextRequest(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Stale, Key: "first"})
		first := pay("first").send(s)
		require.Equal(t, 201, first.status, first.err)
		require.NoError(t, first.bodyErr)
		require.Empty(t, first.header.Get("Connection"), "the client must not be warned")
		time.Sleep(20 * time.Millisecond)

		require.Error(t, pay("second").send(s).err, "the connection was taken from the pool and is dead")
		require.Empty(t, s.Effects(Filter{Key: "second"}))
		require.Empty(t, s.Sends(Filter{Key: "second"}))
		require.Equal(t, 201, pay("second").send(s).status)
	})
}

func TestStaleWithDelayClosesWhileIdle(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Stale, Delay: 20 * time.Millisecond, Key: "first"})
		client := countConns(s)
		first, second := pay("first"), pay("second")
		first.client, second.client = client.Client, client.Client
		require.Equal(t, 201, first.send(s).status)
		soon(t, client.none)
		require.Equal(t, 201, second.send(s).status, "the client has seen the end and dials anew")
		require.Equal(t, 2, s.Sends(Filter{Key: "second"})[0].Conn)
	})
}

func TestNetHTTPRepeatsAKeyedRequestOnADeadConnection(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		require.Equal(t, 404, call{method: "GET", path: "/warm-up"}.send(s).status)
		inject(t, s, Fault{Kind: Close, Point: AfterEffect, Key: "order-1", Send: 1})
		req, err := http.NewRequest("POST", s.URL()+"/v1/payments", strings.NewReader(payments1999))
		require.NoError(t, err)
		req.Header.Set("Idempotency-Key", "order-1")
		resp, err := s.Client().Do(req) // with GetBody
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(Filter{Key: "order-1"}), 2, "one call, two sends: the server sees what the client does not")
	})
}

func TestRefusedConnections(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		s.Refuse(2)
		for range 2 {
			require.ErrorIs(t, pay("order-1").send(s).err, syscall.ECONNREFUSED)
		}
		require.Empty(t, s.Sends())
		require.Equal(t, 201, pay("order-1").send(s).status)
		other := &http.Client{Transport: s.Transport()}
		s.Refuse(1)
		require.Equal(t, 201, pay("order-2").send(s).status, "a connection that exists is not touched")
		c := pay("order-3")
		c.client = other
		require.ErrorIs(t, c.send(s).err, syscall.ECONNREFUSED)
	})
}

func TestExtraAnswerIsNotTheNextRequests(t *testing.T) {
	log.SetOutput(io.Discard) // net/http's client complains there
	defer log.SetOutput(os.Stderr)
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Extra, Key: "first"})
		client := countConns(s)
		c := pay("first")
		c.client = client.Client
		first := c.send(s)
		require.Equal(t, 201, first.status)
		require.Equal(t, "pay_1", first.field(t, "id"))
		soon(t, client.none) // the client has heard what nobody asked for
		c.key = "second"
		second := c.send(s)
		require.Equal(t, "pay_2", second.field(t, "id"), "net/http drops a connection that speaks out of turn")
		require.Equal(t, 2, s.Sends()[1].Conn)
	})
}
