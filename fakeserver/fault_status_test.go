package fakeserver

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestStatusBeforeEffectFreesTheKey(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Status, Status: 503, RetryAfter: "2", Send: 1})
		r := pay("order-1").send(s)
		requireProblem(t, r, 503, "injected-fault")
		require.Equal(t, "2", r.header.Get("Retry-After"))
		require.Empty(t, s.Effects())
		require.Equal(t, 503, s.Sends()[0].Status)
		require.Equal(t, 201, pay("order-1").send(s).status)
		require.Len(t, s.Effects(), 1)
	})
}

func TestStatusAfterEffectKeepsTheTrueAnswer(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Status, Point: AfterEffect, Status: 500, Send: 1})
		for _, policy := range []FailurePolicy{FreeKey, StoreFailures} {
			s.Apply(Settings{Failures: policy})
			key := "order-" + string(rune('a'+int(policy)))
			requireProblem(t, pay(key).send(s), 500, "injected-fault")
			require.Len(t, s.Effects(Filter{Key: key}), 1)
			require.Equal(t, 201, requireReplay(t, s, pay(key)).status)
		}
	})
}

func TestStoredFailuresAreReplayed(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{Failures: StoreFailures})
		inject(t, s, Fault{Kind: Status, Status: 500, Send: 1, Key: "a"}, Fault{Kind: Status, Status: 429, Send: 1, Key: "b"})
		first := pay("a").send(s)
		requireProblem(t, first, 500, "injected-fault")
		require.Empty(t, first.header.Get("Idempotent-Replay"))
		for range 3 {
			requireProblem(t, requireReplay(t, s, pay("a")), 500, "injected-fault")
		}
		require.Empty(t, s.Effects())
		requireProblem(t, pay("b").send(s), 429, "injected-fault")
		require.Equal(t, 201, pay("b").send(s).status, "only a 5xx is stored")
	})
}

func TestStoredFailureWithAndWithoutEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: StoredFailure, Key: "after"}, Fault{Kind: StoredFailure, Point: BeforeEffect, Key: "before", Status: 503})
		requireProblem(t, pay("after").send(s), 500, "injected-fault")
		require.Len(t, s.Effects(Filter{Key: "after"}), 1)
		requireProblem(t, requireReplay(t, s, pay("after")), 500, "injected-fault")
		requireProblem(t, pay("before").send(s), 503, "injected-fault")
		requireProblem(t, requireReplay(t, s, pay("before")), 503, "injected-fault")
		require.Empty(t, s.Effects(Filter{Key: "before"}))
	})
}

func TestEveryFormOfRetryAfterReachesTheClient(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		at := time.Now().Add(time.Minute).UTC()
		for _, value := range []string{
			"0", "120", "-5", "1.5", "2s", "soon", "2, 5", "9223372036", "99999999999999999999",
			at.Format(http.TimeFormat), at.Format("Monday, 02-Jan-06 15:04:05 GMT"), at.Format(time.ANSIC),
			"Thu, 01 Jan 1970 00:00:00 GMT", "2\n5",
		} {
			s.ClearFaults()
			inject(t, s, Fault{Kind: Status, Status: 429, RetryAfter: value})
			r := pay("order-1").send(s)
			require.Equal(t, strings.Split(value, "\n"), r.header.Values("Retry-After"))
		}
	})
}

func TestHTMLPageOfAGateway(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: HTML, Key: "before", Send: 1}, Fault{Kind: HTML, Point: AfterEffect, Status: 200, Key: "after", Send: 1})
		r := pay("before").send(s)
		require.Equal(t, 502, r.status)
		require.Contains(t, r.header.Get("Content-Type"), "text/html")
		require.Empty(t, s.Effects())
		r = pay("after").send(s)
		require.Equal(t, 200, r.status)
		require.Contains(t, r.body, "<html>")
		require.Len(t, s.Effects(), 1)
		requireReplay(t, s, pay("after"))
	})
}

func TestRedirectToTheOtherOrigin(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		require.NotEqual(t, s.URL(), s.OtherURL())
		for _, status := range []int{301, 302, 303, 307, 308} {
			s.ClearFaults()
			inject(t, s, Fault{Kind: Redirect, Status: status, Location: "other", Times: 1})
			client := &http.Client{Transport: s.Client().Transport, CheckRedirect: func(*http.Request, []*http.Request) error {
				return http.ErrUseLastResponse
			}}
			c := pay("order-1")
			c.client = client
			r := c.send(s)
			require.Equal(t, status, r.status)
			require.Equal(t, s.OtherURL()+"/v1/payments", r.header.Get("Location"))
			require.Empty(t, s.Effects())
		}
		there := pay("order-1")
		there.path = s.OtherURL() + "/v1/payments"
		require.Equal(t, 201, there.send(s).status)
		require.Equal(t, "true", pay("order-1").send(s).header.Get("Idempotent-Replay"), "both origins are one server")
	})
}

func TestSeeOtherAfterTheEffectPointsToTheResource(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Redirect, Point: AfterEffect, Send: 1, Endpoint: "POST /v1/payments"})
		r := pay("order-1").send(s)
		require.Equal(t, 200, r.status)
		require.Equal(t, "pay_1", r.field(t, "id"))
		sends := s.Sends()
		require.Equal(t, []int{303, 200}, []int{sends[0].Status, sends[1].Status})
		require.Len(t, s.Effects(), 1)
	})
}

func TestEarlyAnswerLeavesTheBodyUnread(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		// Held until the client has read the answer, however long it takes: the end would reset what is unread.
		inject(t, s, Fault{Kind: EarlyAnswer, Status: 413, Delay: time.Hour, Send: 1})
		upload := call{method: "POST", path: "/v1/uploads", key: "file", body: strings.Repeat("x", 8<<20)}
		r := upload.send(s)
		require.NoError(t, r.err)
		require.Equal(t, 413, r.status)
		require.Empty(t, s.Effects())
		n := s.Sends()[0]
		require.Zero(t, n.BodyLen)
		require.Equal(t, 413, n.Status)
		require.Equal(t, 201, upload.send(s).status)
	})
}

func TestExpectationIsAnsweredBeforeTheBody(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: EarlyAnswer, Status: 417, Delay: time.Millisecond, Send: 1})
		client := &http.Client{Transport: s.Transport()}
		client.Transport.(*http.Transport).ExpectContinueTimeout = time.Minute
		c := pay("order-1").with("Expect", "100-continue")
		c.client = client
		require.Equal(t, 417, c.send(s).status)
		require.Equal(t, 201, c.send(s).status)
		require.Len(t, s.Effects(), 1)
	})
}

func TestGatewayAnswersWhileTheEffectIsStillToCome(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: HTML, Status: 504, Point: DuringEffect, Delay: time.Minute, Key: "page", Send: 1},
			Fault{Kind: Status, Status: 502, Point: DuringEffect, Delay: time.Minute, Key: "problem", Send: 1})
		for key, status := range map[string]int{"page": 504, "problem": 502} {
			require.Equal(t, status, pay(key).send(s).status)
			require.Empty(t, s.Effects(Filter{Key: key}))
			requireProblem(t, pay(key).send(s), 409, "idempotency-key-in-use")
			time.Sleep(2 * time.Minute)
			require.Len(t, s.Effects(Filter{Key: key}), 1)
			requireReplay(t, s, pay(key))
		}
	})
}
