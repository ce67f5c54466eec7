package fakeserver

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// verdictOf keeps what an assertion says.
type verdictOf struct{ said []string }

func (*verdictOf) Helper()                        {}
func (v *verdictOf) Errorf(f string, args ...any) { v.said = append(v.said, fmt.Sprintf(f, args...)) }

func TestOneEffectPerOperationIsAsserted(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		var v verdictOf
		require.False(t, s.AssertOneEffectPerOperation(&v), "nothing was tested")
		require.Equal(t, []string{"fakeserver: no operation was sent"}, v.said)

		inject(t, s, Fault{Kind: Reset, Point: AfterEffect, Key: "k1", Send: 1}, Fault{Kind: Reset, Bytes: -1, Key: "k4", Send: 1})
		pay("k1").send(s)
		pay("k1").send(s)
		require.True(t, s.AssertOneEffectPerOperation(t))
		pay("k2").send(s)
		v = verdictOf{}
		require.False(t, s.AssertOneEffectPerOperation(&v))
		require.Equal(t, []string{`fakeserver: 1 of 1 operations had not exactly one effect

POST /v1/payments, reference order-1: 2 effects, 3 sends, 2 keys
        +0s  send 1, key k1 (1), connection 1, reset after the effect (key k1, send 1), no answer, EFFECT 1: payment pay_1
        +0s  send 2, key k1 (2), connection 2, answer 201, replayed
        +0s  send 3, key k2 (1), connection 2, answer 201, EFFECT 2: payment pay_2`}, v.said)

		require.Equal(t, 201, book("k3").send(s).status)
		require.True(t, s.AssertOneEffectPerOperation(t, Filter{Endpoint: "POST /v1/hotels/{hotel_id}/reservations"}))

		c := call{method: "POST", path: "/v1/payments", key: "k4", body: `{"amount":5,"currency":"eur","reference":"order-4"}`}
		require.Error(t, c.send(s).err)
		require.True(t, !s.AssertOneEffectPerOperation(&verdictOf{}, Filter{Key: "k4"}), "no effect is wrong too")
		c.send(s)
		require.True(t, s.AssertOneEffectPerOperation(t, Filter{Key: "k4"}), "the body of the first send was never read")
		none := call{method: "POST", path: "/v1/payments", key: "k5", body: `{"amount":5,"currency":"eur"}`}
		none.send(s)
		require.True(t, s.AssertOneEffectPerOperation(t, Filter{Key: "k5"}), "without a reference the key names the operation")

		for _, id := range []string{"pay_1", "pay_2"} {
			refund := call{method: "POST", path: "/v1/payments/" + id + "/refunds", key: "refund " + id, body: `{"amount":5,"reference":"r-1"}`}
			require.Equal(t, 201, refund.send(s).status)
		}
		require.True(t, s.AssertOneEffectPerOperation(t, Filter{Reference: "r-1"}), "refunds of two payments are two operations")
		require.False(t, s.AssertOneEffectPerOperation(&verdictOf{}, Filter{Key: "k1"}), "the other key of the operation counts")
	})
}

func TestAtMostOneEffectPerOperationAllowsForNone(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.False(t, s.AssertAtMostOneEffectPerOperation(&verdictOf{}), "nothing was tested")
		s.Apply(Like(Stripe))
		inject(t, s, Fault{Kind: Status, Status: 503, Key: "k1", Send: 1})
		for range 2 {
			require.Equal(t, 503, pay("k1").send(s).status)
		}
		require.Empty(t, s.Effects(), "the 503 is stored")
		require.False(t, s.AssertOneEffectPerOperation(&verdictOf{}))
		require.True(t, s.AssertAtMostOneEffectPerOperation(t))
		pay("k2").send(s)
		pay("k3").send(s)
		require.Len(t, s.Effects(), 2)
		var v verdictOf
		require.False(t, s.AssertAtMostOneEffectPerOperation(&v))
		require.Contains(t, v.said[0], "1 of 1 operations had more than one effect")
	})
}
