package fakeserver

import (
	"context"
	"encoding/json"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCutHeadersLeaveOneEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: CutHeaders, Key: "half", Send: 1}, Fault{Kind: CutHeaders, Bytes: 5, Key: "five", Send: 1},
			Fault{Kind: CutHeaders, Bytes: 1 << 20, Key: "most", Send: 1})
		for _, key := range []string{"half", "five", "most"} {
			require.Error(t, pay(key).send(s).err)
			require.Len(t, s.Effects(Filter{Key: key}), 1)
			require.Zero(t, s.Sends(Filter{Key: key})[0].Status)
			requireReplay(t, s, pay(key))
		}
	})
}

func TestCutBodyIsAnUnexpectedEnd(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		for _, encoding := range []string{"length", "chunked", "gzip"} {
			for name, bytes := range map[string]int{"half": 0, "one": 1, "all but one": 1 << 20} {
				s.ClearFaults()
				inject(t, s, Fault{Kind: CutBody, Encoding: encoding, Bytes: bytes, Send: 1})
				key := encoding + " " + name
				r := pay(key).send(s)
				require.Len(t, s.Effects(Filter{Key: key}), 1)
				require.NoError(t, r.err, key)
				require.Equal(t, 201, r.status)
				require.ErrorIs(t, r.bodyErr, io.ErrUnexpectedEOF, key)
				require.Equal(t, 201, s.Sends(Filter{Key: key})[0].Status)
				requireReplay(t, s, pay(key))
			}
		}
	})
}

func TestAnswerWithoutABodyIsCutInItsHeaders(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		at := book("trip-1").send(s).header.Get("Location")
		inject(t, s, Fault{Kind: CutBody, Send: 1})
		require.Error(t, call{method: "DELETE", path: at}.send(s).err)
		require.Len(t, s.Effects(Filter{Kind: "cancellation"}), 1)
		require.Equal(t, 404, call{method: "DELETE", path: at}.send(s).status, "DELETE has no key to replay by")
	})
}

func TestGarbageIsNotHTTP(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Garbage, Key: "after", Send: 1}, Fault{Kind: Garbage, Point: BeforeEffect, Key: "before", Send: 1})
		require.ErrorContains(t, pay("after").send(s).err, "malformed")
		require.Error(t, pay("before").send(s).err)
		require.Len(t, s.Effects(Filter{Key: "after"}), 1)
		require.Empty(t, s.Effects(Filter{Key: "before"}))
	})
}

func TestFloodOfEarlyHintsNeverAnswers(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Flood, Send: 1})
		c := pay("order-1")
		c.from, c.within = effected(s, "order-1"), 100*time.Millisecond
		require.Error(t, c.send(s).err)
		require.Len(t, s.Effects(), 1)
		requireReplay(t, s, pay("order-1"))
	})
}

func TestEndlessBodyEndsWhenTheClientLeaves(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Endless, Key: "drip", Delay: 5 * time.Millisecond}, Fault{Kind: Endless, Key: "pour", Status: 200})
		c := pay("drip")
		c.take = 5
		r := c.send(s)
		require.Equal(t, 503, r.status)
		require.ErrorIs(t, r.bodyErr, context.Canceled)
		require.GreaterOrEqual(t, len(r.body), 5)

		resp, err := s.Client().Do(keyedRequest(t, s, "pour"))
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		n, err := io.CopyN(io.Discard, resp.Body, 1<<20)
		require.NoError(t, err)
		require.EqualValues(t, 1<<20, n)
		require.NoError(t, resp.Body.Close())
		require.Empty(t, s.Effects())
	})
}

func TestHeadersTooBigForTheClient(t *testing.T) {
	inBothWorlds(t, testBigHeaders)
}

func TestContinuationFramesTooManyForTheClient(t *testing.T) {
	overTLS(t, testBigHeaders)
}

func testBigHeaders(t *testing.T, s *Server) {
	inject(t, s, Fault{Kind: BigHeaders, Key: "after", Send: 1}, Fault{Kind: BigHeaders, Point: BeforeEffect, Key: "before", Send: 1})
	for key, effects := range map[string]int{"after": 1, "before": 0} {
		require.Error(t, pay(key).send(s).err)
		require.Len(t, s.Effects(Filter{Key: key}), effects)
		require.Equal(t, 201, pay(key).send(s).status)
		require.Len(t, s.Effects(Filter{Key: key}), 1)
	}
}

func TestGzipBombInflates(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Bomb, Bytes: 3 << 20, Send: 1})
		r := pay("order-1").send(s)
		require.Equal(t, 201, r.status)
		require.NoError(t, r.bodyErr)
		require.Len(t, r.body, 3<<20)
		require.Equal(t, "pay_1", r.field(t, "id"))
		raw := pay("order-1").with("Accept-Encoding", "identity")
		require.NotEqual(t, r.body, requireReplay(t, s, raw).body)
	})
}

func TestMangledAnswerIsWholeButNotJSON(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Mangled, Send: 1})
		r := pay("order-1").send(s)
		require.Equal(t, 201, r.status)
		require.NoError(t, r.bodyErr)
		require.False(t, json.Valid([]byte(r.body)), r.body)
		require.Len(t, s.Effects(), 1)
		require.True(t, json.Valid([]byte(requireReplay(t, s, pay("order-1")).body)))
	})
}

func TestChunkSizeThatIsNoNumber(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: CutBody, Encoding: "bad-chunk", Send: 1})
		r := pay("order-1").send(s)
		require.Equal(t, 201, r.status)
		require.ErrorContains(t, r.bodyErr, "chunk")
		require.Len(t, s.Effects(), 1)
		requireReplay(t, s, pay("order-1"))
	})
}
