package fakeserver

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math/rand"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

func sha256Of(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

func TestPaymentIsMadeReadAndListed(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		made := pay("order-1").send(s)
		require.Equal(t, 201, made.status)
		require.Equal(t, "/v1/payments/pay_1", made.header.Get("Location"))
		require.Equal(t, "payment", made.field(t, "object"))
		require.Equal(t, "succeeded", made.field(t, "status"))
		require.Equal(t, 1999.0, made.field(t, "amount"))
		require.Equal(t, made.body, call{method: "GET", path: "/v1/payments/pay_1"}.send(s).body)
		list := call{method: "GET", path: "/v1/payments?reference=order-1"}.send(s)
		require.Len(t, list.field(t, "data"), 1)
		none := call{method: "GET", path: "/v1/payments?reference=order-9"}.send(s)
		require.Equal(t, []any{}, none.field(t, "data"))
		requireProblem(t, call{method: "GET", path: "/v1/payments"}.send(s), 400, "invalid-request")
		requireProblem(t, call{method: "GET", path: "/v1/payments/pay_2"}.send(s), 404, "not-found")

		e := s.Effects()
		require.Len(t, e, 1)
		require.Equal(t, "payment", e[0].Kind)
		require.Equal(t, "order-1", e[0].Reference)
		require.EqualValues(t, 1999, e[0].Amount)
		require.Equal(t, 1, e[0].Send)
	})
}

func TestDeclinedSourceHasNoEffect(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		c := call{method: "POST", path: "/v1/payments", key: "k", body: `{"amount":5,"currency":"eur","source":"tok_declined"}`}
		requireProblem(t, c.send(s), 402, "card-declined")
		require.Empty(t, s.Effects())
	})
}

func TestRefundsNeverExceedThePayment(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		var group sync.WaitGroup
		for i := range 8 {
			group.Go(func() {
				call{method: "POST", path: "/v1/payments/pay_1/refunds", key: "r-" + strconv.Itoa(i), body: `{"amount":500,"reference":"r"}`}.send(s)
			})
		}
		group.Wait()
		require.Len(t, s.Effects(Filter{Kind: "refund"}), 3)
		over := call{method: "POST", path: "/v1/payments/pay_1/refunds", key: "r-9", body: `{"amount":500}`}.send(s)
		requireProblem(t, over, 422, "refund-too-large")
		require.Equal(t, 499.0, over.field(t, "refundable"))
	})
}

func TestWrongBodiesNameTheField(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		for body, field := range map[string]string{
			`{"currency":"usd"}`:                              "amount",
			`{"amount":-1,"currency":"usd"}`:                  "amount",
			`{"amount":1.5,"currency":"usd"}`:                 "amount",
			`{"amount":"1","currency":"usd"}`:                 "amount",
			`{"amount":1}`:                                    "currency",
			`{"amount":1,"currency":"dollars"}`:               "currency",
			`{"amount":1,"currency":"u1d"}`:                   "currency",
			`{"amount":1,"currency":"usd","reference":["x"]}`: "reference",
			`{"amount":1`:                                     "",
			`[]`:                                              "",
			``:                                                "",
		} {
			r := call{method: "POST", path: "/v1/payments", key: "k", body: body}.send(s)
			requireProblem(t, r, 400, "invalid-request")
			errs := r.field(t, "errors").([]any)
			require.Equal(t, field, errs[0].(map[string]any)["field"], body)
			require.NotContains(t, r.body, "struct", "no Go types in answers")
		}
		r := call{method: "POST", path: "/v1/hotels/ritz/reservations", key: "k", body: `{"nights":366}`}.send(s)
		require.Len(t, r.field(t, "errors"), 3)
		require.Empty(t, s.Effects())
	})
}

func TestBodyOverOneMiBIsRefused(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		big := pay("k")
		big.body = `{"amount":1,"currency":"usd","reference":"` + strings.Repeat("x", maxBody) + `"}`
		requireProblem(t, big.send(s), 413, "body-too-large")
		require.Empty(t, s.Effects())
		require.Equal(t, 201, pay("k").send(s).status)
	})
}

func TestSixtyFourGuestsRaceForOneRoom(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		s.SetRooms("ritz", "double", 1)
		var group sync.WaitGroup
		var mu sync.Mutex
		statuses := map[int]int{}
		for i := range 64 {
			group.Go(func() {
				r := book("guest-" + strconv.Itoa(i)).send(s)
				mu.Lock()
				defer mu.Unlock()
				statuses[r.status]++
			})
		}
		group.Wait()
		require.Len(t, s.Effects(Filter{Kind: "reservation"}), 1)
		require.Zero(t, s.Rooms("ritz", "double"))
		require.Equal(t, map[int]int{201: 1, 422: 63}, statuses)
	})
}

func TestSoldOutIsStoredEvenWhenARoomComesFree(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.SetRooms("ritz", "double", 0)
		requireProblem(t, book("trip-1").send(s), 422, "sold-out")
		s.SetRooms("ritz", "double", 1)
		requireReplay(t, s, book("trip-1"))
		require.Equal(t, 1, s.Rooms("ritz", "double"))
	})
}

func TestCancellationGivesTheRoomBackOnce(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.Equal(t, 10, s.Rooms("ritz", "double"))
		require.Zero(t, s.Rooms("ritz", "suite"))
		made := book("trip-1").send(s)
		require.Equal(t, 201, made.status)
		require.Equal(t, 9, s.Rooms("ritz", "double"))
		at := made.header.Get("Location")
		require.Equal(t, made.body, call{method: "GET", path: at}.send(s).body)
		requireProblem(t, call{method: "DELETE", path: "/v1/hotels/plaza/reservations/res_1"}.send(s), 404, "not-found")
		require.Equal(t, 204, call{method: "DELETE", path: at}.send(s).status)
		requireProblem(t, call{method: "DELETE", path: at}.send(s), 404, "not-found")
		require.Equal(t, 10, s.Rooms("ritz", "double"))
		require.Len(t, s.Effects(Filter{Kind: "cancellation", Reference: "trip-1"}), 1)
		requireReplay(t, s, book("trip-1")) // the stored answer, although the reservation is gone
	})
}

func TestLargeUploadStreamsAndReplays(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		const size = 8 << 20
		send := func(seed int64) *http.Response {
			req, err := http.NewRequest("POST", s.URL()+"/v1/uploads", io.LimitReader(rand.New(rand.NewSource(seed)), size))
			require.NoError(t, err)
			req.Header.Set("Idempotency-Key", "file-1")
			resp, err := s.Client().Do(req)
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			return resp
		}
		require.Equal(t, 201, send(1).StatusCode)
		require.Equal(t, "true", send(1).Header.Get("Idempotent-Replay"))
		require.Equal(t, 422, send(2).StatusCode)
		effects := s.Effects()
		require.Len(t, effects, 1)
		require.Equal(t, "upload", effects[0].Kind)
		require.EqualValues(t, size, effects[0].Amount)
		n := s.Sends()[0]
		require.EqualValues(t, size, n.BodyLen)
		require.EqualValues(t, -1, n.ContentLength)
		require.Equal(t, []string{"chunked"}, n.TransferEncoding)
	})
}

func TestUploadThatBreaksOffHasNoEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		for _, length := range []int64{-1, 1 << 20} {
			body := io.MultiReader(strings.NewReader(strings.Repeat("x", 1000)), iotest.ErrReader(errors.New("disk gone")))
			req, err := http.NewRequest("POST", s.URL()+"/v1/uploads", body)
			require.NoError(t, err)
			req.ContentLength = length
			req.Header.Set("Idempotency-Key", "file-1")
			_, err = s.Client().Do(req)
			require.ErrorContains(t, err, "disk gone")
		}
		time.Sleep(20 * time.Millisecond)
		soon(t, func() bool { // the server may still be reading
			return !slices.ContainsFunc(s.Sends(), func(n Send) bool { return n.Ended.IsZero() })
		})
		for _, n := range s.Sends() {
			require.Zero(t, n.Status)
			require.Empty(t, n.BodySHA256)
		}
		require.Empty(t, s.Effects())
	})
}

func TestStatusIsSetAbsolutely(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.Equal(t, 201, pay("order-1").send(s).status)
		put := call{method: "PUT", path: "/v1/payments/pay_1/status", body: `{"status":"captured"}`}
		first := put.send(s)
		require.Equal(t, 200, first.status)
		require.Equal(t, "captured", first.field(t, "status"))
		require.Equal(t, first.body, put.send(s).body, "the second time changes nothing")
		e := s.Effects(Filter{Kind: "status"})
		require.Len(t, e, 1)
		require.Equal(t, "order-1", e[0].Reference)
		back := put
		back.body = `{"status":"succeeded"}`
		require.Equal(t, 200, back.send(s).status)
		require.Len(t, s.Effects(Filter{Kind: "status"}), 2)
		back.body = `{"status":"gone"}`
		requireProblem(t, back.send(s), 400, "invalid-request")
		put.path = "/v1/payments/pay_9/status"
		requireProblem(t, put.send(s), 404, "not-found")
	})
}

func TestDuplicateReferenceSaysWhereTheReservationIs(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{DuplicateReference: true})
		first := book("k1").send(s)
		require.Equal(t, 201, first.status)
		requireReplay(t, s, book("k1"))
		second := book("k2").send(s)
		requireProblem(t, second, 409, "duplicate-reference")
		require.Equal(t, first.field(t, "id"), second.field(t, "id"))
		at := second.header.Get("Location")
		require.Equal(t, first.body, call{method: "GET", path: at}.send(s).body)
		list := call{method: "GET", path: "/v1/hotels/ritz/reservations?reference=trip-1"}.send(s)
		require.Len(t, list.field(t, "data"), 1)
		require.Equal(t, []any{}, call{method: "GET", path: "/v1/hotels/savoy/reservations?reference=trip-1"}.send(s).field(t, "data"))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, 9, s.Rooms("ritz", "double"))

		require.Equal(t, 204, call{method: "DELETE", path: at}.send(s).status)
		require.Equal(t, []any{}, call{method: "GET", path: "/v1/hotels/ritz/reservations?reference=trip-1"}.send(s).field(t, "data"))
		require.Equal(t, 201, book("k3").send(s).status, "the reference is free again")
		other := book("k4")
		other.body = `{"room_type":"double","guest":"Bob"}`
		require.Equal(t, 201, other.send(s).status, "no reference is no duplicate")
		other.key = "k5"
		require.Equal(t, 201, other.send(s).status)
	})
}
