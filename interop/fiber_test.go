package interop_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gofiber/fiber/v3"
	"github.com/gofiber/fiber/v3/middleware/idempotency"
	"github.com/hashicorp/go-retryablehttp"
	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/retryable"
)

// fiberServer is an application with gofiber's idempotency middleware as it
// comes, behind a relay.
type fiberServer struct {
	*relay
	effects
	handle atomic.Pointer[func(c fiber.Ctx, made func()) error] // nil: charge and say 201
	calls  atomic.Int32
	came   atomic.Int32 // requests, before the middleware
}

func fiberBehindRelay(t *testing.T) *fiberServer {
	t.Helper()
	s := &fiberServer{}
	app := fiber.New()
	app.Use(func(c fiber.Ctx) error {
		s.came.Add(1)
		return c.Next()
	})
	app.Use(idempotency.New())
	charge := func(c fiber.Ctx) error {
		var in struct {
			Reference string `json:"reference"`
		}
		if err := json.Unmarshal(c.Body(), &in); err != nil {
			return fiber.ErrBadRequest
		}
		s.calls.Add(1)
		made := func() { s.add(in.Reference) }
		if h := s.handle.Load(); h != nil {
			return (*h)(c, made)
		}
		made()
		return c.Status(fiber.StatusCreated).JSON(fiber.Map{"id": "ch_" + in.Reference})
	}
	app.Post("/charges", charge)
	app.Post("/refunds", charge)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = app.Listener(l, fiber.ListenConfig{DisableStartupMessage: true})
	}()
	t.Cleanup(func() {
		_ = app.ShutdownWithTimeout(30 * time.Second)
		<-ended
	})
	s.relay = inFront(t, l.Addr().String())
	return s
}

// answers replaces what the handler does.
func (s *fiberServer) answers(h func(c fiber.Ctx, made func()) error) { s.handle.Store(&h) }

// fiberDialect is what its documentation says: another header, keys of 36
// bytes, remembered for half an hour. It marks nothing.
var fiberDialect = idem.Dialect{Name: "gofiber", Header: "X-Idempotency-Key", MaxKey: 36, KeyWindow: 30 * time.Minute}

func overFiber(t *testing.T) *idem.Transport {
	t.Helper()
	return &idem.Transport{Base: loopback(t), Policy: policy(), Dialect: fiberDialect}
}

func TestFiberChargesOnceWhenAnswersAreLost(t *testing.T) {
	s := fiberBehindRelay(t)
	s.loseNext(3)
	c := post(t, t.Context(), overFiber(t), s.url()+"/charges", charge("order-1"))
	require.Equal(t, 1, s.of("order-1"))
	require.Equal(t, 3, s.lostSoFar())
	require.NoError(t, c.err)
	require.Equal(t, 201, c.status)
	require.JSONEq(t, `{"id":"ch_order-1"}`, c.body)
	require.Equal(t, idem.Executed, c.report.Outcome)
	require.False(t, c.report.Replayed, "it was, but nothing in the answer says so")
}

func TestFiberCalledTwiceForOneOperationChargesOnce(t *testing.T) {
	s := fiberBehindRelay(t)
	rt := overFiber(t)
	for range 2 { // as two processes would
		ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-1/1"})
		c := post(t, ctx, rt, s.url()+"/charges", charge("order-1"))
		require.NoError(t, c.err)
		require.Equal(t, idem.Executed, c.report.Outcome)
	}
	require.Equal(t, 1, s.of("order-1"))
	require.EqualValues(t, 1, s.calls.Load())
}

// It has no 409: who comes second waits behind a lock for the first.
func TestFiberHoldsTheRetryUntilTheFirstHasEnded(t *testing.T) {
	s := fiberBehindRelay(t)
	first := make(chan struct{})
	end := sync.OnceFunc(func() { close(first) })
	defer end()
	s.answers(func(c fiber.Ctx, made func()) error {
		<-first
		made()
		return c.SendStatus(fiber.StatusCreated)
	})
	rt := overFiber(t)
	over := make(chan call, 1)
	go func() { over <- post(t, t.Context(), rt, s.url()+"/charges", charge("order-1")) }()
	soon(t, func() bool { return s.calls.Load() == 1 })
	s.cut()
	soon(t, func() bool { return s.came.Load() == 2 })
	time.Sleep(100 * time.Millisecond) // in which it would run, if nothing held it
	require.EqualValues(t, 1, s.calls.Load())
	end()
	c := <-over
	require.Equal(t, 1, s.of("order-1"))
	require.NoError(t, c.err)
	require.Equal(t, idem.Executed, c.report.Outcome)
	require.True(t, c.report.EarlierUnknown)
	require.EqualValues(t, 1, s.calls.Load())
}

// It compares neither body nor path. idem notices before it sends, where both
// requests are its own; where they are not, the server's 201 is all there is.
func TestFiberReplaysTheFirstAnswerToAnotherRequestWithTheKey(t *testing.T) {
	s := fiberBehindRelay(t)
	rt := overFiber(t)
	key, err := idem.NewKey()
	require.NoError(t, err)

	ctx := idem.WithKey(t.Context(), key)
	require.NoError(t, post(t, ctx, rt, s.url()+"/charges", charge("order-1")).err)
	c := post(t, ctx, rt, s.url()+"/refunds", charge("order-2"))
	require.ErrorIs(t, c.err, idem.ErrKeyReused)
	require.Zero(t, c.report.Sends)

	c = post(t, idem.WithKey(t.Context(), key), rt, s.url()+"/refunds", charge("order-2"))
	require.Zero(t, s.of("order-2"), "no refund was made")
	require.Equal(t, 1, s.of("order-1"))
	require.NoError(t, c.err)
	require.JSONEq(t, `{"id":"ch_order-1"}`, c.body, "the answer is that of the charge")
	require.Equal(t, idem.Executed, c.report.Outcome, "the key was, and the server cannot tell")
}

// Its keys must have 36 bytes, and it says 500 where they have not.
func TestFiberRefusesAShortKeyWithAServerError(t *testing.T) {
	s := fiberBehindRelay(t)
	c := post(t, idem.WithKey(t.Context(), "order-1"), overFiber(t), s.url()+"/charges", charge("order-1"))
	require.Zero(t, s.of("order-1"))
	require.NoError(t, c.err)
	require.Equal(t, 500, c.status)
	require.ErrorIs(t, c.report.Reason, idem.ErrAttemptsExhausted)
	require.Equal(t, idem.Unknown, c.report.Outcome)
}

// Without a dialect the key goes out in a header that the middleware does not
// read, and nothing is de-duplicated: the precondition of the promise.
func TestFiberDoesNotKnowTheUsualHeader(t *testing.T) {
	s := fiberBehindRelay(t)
	s.loseNext(1)
	c := post(t, t.Context(), &idem.Transport{Base: loopback(t), Policy: policy()}, s.url()+"/charges", charge("order-1"))
	require.Equal(t, 2, s.of("order-1"), "a negative control: the server was never told")
	require.Equal(t, idem.Executed, c.report.Outcome)
}

// An error that the handler returns is not stored: the key is free again.
func TestFiberFreesTheKeyWhenTheHandlerFails(t *testing.T) {
	t.Run("before the effect", func(t *testing.T) {
		s := fiberBehindRelay(t)
		s.answers(func(c fiber.Ctx, made func()) error {
			if s.calls.Load() == 1 {
				return errors.New("no connection to the bank")
			}
			made()
			return c.SendStatus(fiber.StatusCreated)
		})
		c := post(t, t.Context(), overFiber(t), s.url()+"/charges", charge("order-1"))
		require.Equal(t, 1, s.of("order-1"))
		require.Equal(t, idem.Executed, c.report.Outcome)
	})
	t.Run("after the effect, which is then made again", func(t *testing.T) {
		s := fiberBehindRelay(t)
		s.answers(func(c fiber.Ctx, made func()) error {
			made()
			if s.calls.Load() == 1 {
				return errors.New("no receipt printer")
			}
			return c.SendStatus(fiber.StatusCreated)
		})
		c := post(t, t.Context(), overFiber(t), s.url()+"/charges", charge("order-1"))
		require.Equal(t, 2, s.of("order-1"), "the server broke the promise that idem's rests on")
		require.Equal(t, idem.Executed, c.report.Outcome)

		s = fiberBehindRelay(t)
		s.answers(func(_ fiber.Ctx, made func()) error {
			made()
			return errors.New("no receipt printer")
		})
		rt := overFiber(t)
		rt.Policy.Classify = retryable.Classify(func(_ context.Context, _ *http.Response, err error) (bool, error) { return err != nil, nil })
		c = post(t, t.Context(), rt, s.url()+"/charges", charge("order-1"))
		require.Equal(t, 1, s.of("order-1"), "a policy that does not repeat a 500 is the remedy")
		require.Equal(t, 500, c.status)
		require.Equal(t, idem.Unknown, c.report.Outcome)
	})
}

// A 5xx that the handler writes is stored like any answer, and replayed
// without a mark, so idem asks in vain and claims nothing.
func TestFiberReplaysAWrittenServerErrorWithoutSayingSo(t *testing.T) {
	s := fiberBehindRelay(t)
	s.answers(func(c fiber.Ctx, made func()) error {
		made()
		return c.Status(fiber.StatusInternalServerError).SendString("the receipt is missing")
	})
	c := post(t, t.Context(), overFiber(t), s.url()+"/charges", charge("order-1"))
	require.Equal(t, 1, s.of("order-1"))
	require.EqualValues(t, 1, s.calls.Load())
	require.Equal(t, 500, c.status)
	require.ErrorIs(t, c.report.Reason, idem.ErrAttemptsExhausted)
	require.Equal(t, idem.Unknown, c.report.Outcome)
}

func TestFiberUnderTheDefaultPolicyOfGoRetryablehttp(t *testing.T) {
	s := fiberBehindRelay(t)
	s.loseNext(3)
	rt := overFiber(t)
	rt.Policy.Classify = retryable.Classify(retryablehttp.DefaultRetryPolicy)
	rt.Policy.Backoff = retryable.Backoff(retryablehttp.DefaultBackoff, time.Millisecond, 5*time.Millisecond)
	c := post(t, t.Context(), rt, s.url()+"/charges", charge("order-1"))
	require.Equal(t, 1, s.of("order-1"))
	require.NoError(t, c.err)
	require.Equal(t, idem.Executed, c.report.Outcome)
}

func TestFiberBehindANetworkThatLosesEveryThirdAnswer(t *testing.T) {
	s := fiberBehindRelay(t)
	manyThrough(t, s.relay, overFiber(t), s.of)
}

// manyThrough makes many operations while the network loses answers at random,
// and compares each claim with the server's effects.
func manyThrough(t *testing.T, r *relay, rt *idem.Transport, effects func(reference string) int) {
	t.Helper()
	const operations, workers, seed = 200, 8, 1
	random := rand.New(rand.NewSource(seed))
	r.loseWhere(func() bool { return random.Intn(3) == 0 })
	calls := make([]call, operations)
	var next atomic.Int32
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < operations; i = int(next.Add(1)) - 1 {
				calls[i] = post(t, t.Context(), rt, r.url()+"/charges", charge(fmt.Sprint("order-", i)))
			}
		})
	}
	wg.Wait()
	executed := 0
	for i, c := range calls {
		n := effects(fmt.Sprint("order-", i))
		require.LessOrEqual(t, n, 1, "operation %d", i)
		switch c.report.Outcome {
		case idem.Executed:
			require.Equal(t, 1, n, "operation %d was claimed to be executed", i)
			executed++
		case idem.NotExecuted, idem.Refused:
			require.Zero(t, n, "operation %d was claimed to be %s", i, c.report.Outcome)
		}
	}
	require.Greater(t, r.lostSoFar(), operations/4)
	require.Greater(t, executed, operations*9/10)
}
