package fakeserver

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestProxyRefusesTunnels(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		client := countConns(s)
		client.transport.Proxy = http.ProxyURL(s.Proxy(407, 502, -1, 403, 0, 503))
		send := func(key string) reply {
			c := pay(key)
			c.client = client.Client
			if key == "hang" {
				c.from, c.within = func() bool { return answersLeft(s) == 3 }, 100*time.Millisecond
			}
			return c.send(s)
		}
		require.ErrorContains(t, send("order-1").err, "Proxy Authentication Required")
		require.ErrorContains(t, send("order-1").err, "Bad Gateway")
		require.ErrorIs(t, send("hang").err, context.Canceled)
		require.ErrorContains(t, send("order-1").err, "Forbidden")
		require.Empty(t, s.Sends())
		require.Equal(t, 201, send("order-1").status)
		require.Equal(t, 201, send("order-2").status, "through the tunnel that exists")
		soon(t, func() bool {
			client.CloseIdleConnections() // over HTTP/2 one is not idle at once
			return client.none()
		})
		require.ErrorContains(t, send("order-3").err, "Service Unavailable")
		require.Equal(t, 201, send("order-3").status)
		require.Len(t, s.Effects(), 3)
		inject(t, s, Fault{Kind: Reset, Point: AfterEffect, Key: "order-4", Send: 1})
		require.Error(t, send("order-4").err)
		require.Equal(t, 201, send("order-4").status)
		require.Len(t, s.Effects(), 4)
	})
}

// answersLeft is how many answers the only proxy still has.
func answersLeft(s *Server) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.proxies {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.answers)
	}
	return 0
}

func TestProxyWithoutTLSPassesRequestsOn(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		transport := s.Transport()
		transport.Proxy = http.ProxyURL(s.Proxy(502))
		c := pay("order-1")
		c.client = &http.Client{Transport: transport}
		require.Equal(t, 502, c.send(s).status)
		require.Empty(t, s.Sends())
		require.Equal(t, 201, c.send(s).status)
		requireReplay(t, s, pay("order-1"))
	})
}
