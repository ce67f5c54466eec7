package fakeserver

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestEveryEffectIsAnEvent(t *testing.T) {
	for _, scheme := range []Scheme{StandardWebhooks, StripeSignature} {
		t.Run(string(scheme), func(t *testing.T) {
			inBothWorlds(t, func(t *testing.T, s *Server) {
				r := careful(t, s, Endpoint{Scheme: scheme, Parallel: 1, URL: "/hooks/pay"})
				s.Handle("POST /stub", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(201) }))
				payFor(t, s, "order-1")
				for _, c := range []call{
					{method: "PUT", path: "/v1/payments/pay_1/status", body: `{"status":"disputed"}`},
					{method: "POST", path: "/v1/payments/pay_1/refunds", key: "r-1", body: `{"amount":500,"reference":"r-1"}`},
					book("trip-1"),
					{method: "DELETE", path: "/v1/hotels/ritz/reservations/res_1"},
					{method: "POST", path: "/v1/uploads", key: "u-1", body: "abc"},
					{method: "POST", path: "/stub", key: "s-1", body: `{"reference":"s-1"}`},
				} {
					require.Equal(t, 2, c.send(s).status/100, "%v", c)
				}
				declined := call{method: "POST", path: "/v1/payments", key: "no", body: `{"amount":40200,"currency":"usd"}`}
				require.Equal(t, 402, declined.send(s).status)
				requireReplay(t, s, pay("order-1"))
				settled(t, s)

				var kinds []string
				for _, m := range r.all() {
					kinds = append(kinds, m.kind)
				}
				require.Equal(t, []string{
					"payment.succeeded", "payment.disputed", "refund.succeeded", "reservation.confirmed", "reservation.cancelled",
					"upload.stored", "request.handled",
				}, kinds, "no effect, no event: neither for the decline nor for the replay")
				effects := s.Effects()
				for i, d := range s.Deliveries() {
					e, m := effects[i], r.all()[i]
					require.Equal(t, []any{i + 1, e.N, e.Reference, 1, 200, true, ""},
						[]any{d.N, d.Effect, d.Reference, d.Attempt, d.Status, d.Accepted, d.Fault})
					require.NoError(t, d.Err)
					require.Equal(t, m.id, d.ID)
					require.Equal(t, m.kind, d.Type)
					require.Equal(t, e.Reference, m.reference)
					require.Equal(t, m.signed.Unix(), d.Timestamp.Unix())
					require.Equal(t, sha256Of(m.body), d.BodySHA256)
					require.EqualValues(t, len(m.body), d.BodyLen)
					require.Equal(t, d.Signature, m.header.Get(map[Scheme]string{
						StandardWebhooks: "Webhook-Signature", StripeSignature: "Stripe-Signature"}[scheme]))
					require.Equal(t, "application/json", m.header.Get("Content-Type"))
					ev := s.Events()[i]
					require.Equal(t, []any{d.ID, e.N, e.Key, e.Reference, EventDelivered, 1, "endpoint-1"},
						[]any{ev.ID, ev.Effect, ev.Key, ev.Reference, ev.State, ev.Attempts, ev.Endpoint})
				}
				require.Len(t, s.Deliveries(Filter{Kind: "refund"}), 1)
				require.Len(t, s.Deliveries(Filter{Key: "order-1"}), 1)
				require.Len(t, s.Events(Filter{Reference: "trip-1"}), 2)
				require.Empty(t, s.Events(Filter{Reference: "trip-2"}))
			})
		})
	}
}

func TestAnEventLooksLikeThoseOfItsScheme(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		plain := careful(t, s, Endpoint{TimeInBody: true})
		stripe := careful(t, s, Endpoint{Scheme: StripeSignature, Name: "stripe"})
		time.Sleep(time.Minute)
		at := time.Now().UTC()
		payFor(t, s, "order-1")
		settled(t, s)
		require.JSONEq(t, `{"type":"payment.succeeded","timestamp":"`+at.Format(time.RFC3339Nano)+`","attempted_at":"`+at.Format(time.RFC3339Nano)+`",
			"data":{"id":"pay_1","object":"payment","reference":"order-1","amount":1999,"status":"succeeded"}}`, plain.all()[0].body)
		require.JSONEq(t, `{"id":"evt_1","object":"event","type":"payment.succeeded","livemode":false,"created":`+strconv.FormatInt(at.Unix(), 10)+`,
			"data":{"object":{"id":"pay_1","object":"payment","reference":"order-1","amount":1999,"status":"succeeded"}}}`, stripe.all()[0].body)
		require.Equal(t, "msg_1", plain.all()[0].id)
	})
}

// answers is an endpoint that gives these answers in turn, the last one for ever.
type answers struct {
	mu     sync.Mutex
	list   []http.HandlerFunc
	bodies []string
	ids    []string
	at     []time.Time
}

func (a *answers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	a.bodies, a.ids, a.at = append(a.bodies, string(body)), append(a.ids, r.Header.Get("Webhook-Id")), append(a.at, time.Now())
	now := a.list[min(len(a.at), len(a.list))-1]
	a.mu.Unlock()
	now(w, r)
}

func (a *answers) times() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.at)
}

func says(status int, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
	}
}

func aborts(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

func TestAnEventComesAgainForSeventyFiveHoursAndIsThenGivenUp(t *testing.T) {
	for _, inBody := range []bool{false, true} {
		inMemory(t, func(t *testing.T, s *Server) {
			a := &answers{list: []http.HandlerFunc{says(500), says(301, "Location", "/else"), aborts, says(404)}}
			require.NoError(t, s.Register(Endpoint{Handler: a, Secrets: []string{secretOne}, TimeInBody: inBody}))
			start := time.Now()
			payFor(t, s, "order-1")
			time.Sleep(time.Second)
			require.Equal(t, start.Add(5*time.Second), s.Events()[0].Next)
			require.Equal(t, []EventState{EventPending}, states(s))
			settled(t, s)
			require.Equal(t, 75*time.Hour+35*time.Minute+5*time.Second, time.Since(start))
			var since []string
			bodies, stamps := map[string]bool{}, map[int64]bool{}
			for i, d := range s.Deliveries() {
				require.Equal(t, i+1, d.Attempt)
				require.Equal(t, []int{500, 301, 0, 404}[min(i, 3)], d.Status)
				require.Equal(t, i == 2, d.Err != nil)
				require.Equal(t, a.ids[i], d.ID)
				require.Equal(t, "msg_1", d.ID, "the same id for ever")
				require.Equal(t, d.At.Unix(), d.Timestamp.Unix(), "signed anew")
				since = append(since, d.At.Sub(start).String())
				bodies[a.bodies[i]], stamps[d.Timestamp.Unix()] = true, true
			}
			require.Equal(t, []string{"0s", "5s", "5m5s", "35m5s", "2h35m5s", "7h35m5s", "17h35m5s", "31h35m5s", "51h35m5s", "75h35m5s"}, since)
			require.Len(t, stamps, 10)
			require.Len(t, bodies, map[bool]int{false: 1, true: 10}[inBody])
			e := s.Events()[0]
			require.Equal(t, EventGivenUp, e.State)
			require.Equal(t, 10, e.Attempts)
			require.Equal(t, start.Add(75*time.Hour+35*time.Minute+5*time.Second), e.Ended)
			require.Zero(t, e.Next)
		})
	}
}

func TestAnEventIsDeliveredOnceTheEndpointIsThere(t *testing.T) {
	s := New()
	defer s.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close()) // the port is free, and refuses
	require.NoError(t, s.Register(Endpoint{URL: "http://" + l.Addr().String() + "/hooks", Secrets: []string{secretOne},
		Schedule: append([]time.Duration{10 * time.Millisecond}, slices.Repeat([]time.Duration{200 * time.Millisecond}, 300)...)}))
	payFor(t, s, "order-1")
	soon(t, func() bool { d := s.Deliveries(); return len(d) >= 2 && d[1].Err != nil })
	for _, d := range s.Deliveries()[:2] {
		require.ErrorIs(t, d.Err, syscall.ECONNREFUSED)
		require.Zero(t, d.Status)
	}
	l, err = net.Listen("tcp", l.Addr().String())
	require.NoError(t, err)
	r := &receiver{secrets: []string{secretOne}}
	web := &http.Server{Handler: r}
	defer web.Close()
	go func() { _ = web.Serve(l) }()
	settled(t, s)
	require.Equal(t, map[string]int{"order-1": 1}, r.times())
	require.Equal(t, []EventState{EventDelivered}, states(s))
}

func TestAnEndpointOverTLSTakesATransport(t *testing.T) {
	s := New()
	defer s.Close()
	r := &receiver{secrets: []string{secretOne}}
	web := httptest.NewTLSServer(r)
	defer web.Close()
	require.NoError(t, s.Register(Endpoint{Name: "strict", URL: web.URL, Secrets: r.secrets, Schedule: []time.Duration{}}))
	require.NoError(t, s.Register(Endpoint{Name: "trusts", URL: web.URL, Secrets: r.secrets, Transport: web.Client().Transport}))
	web.Config.ErrorLog = s.http.ErrorLog // the failed handshake is meant
	require.NoError(t, s.InjectDeliveries(DeliveryFault{Kind: LostAnswer, Endpoint: "trusts", Attempt: 2}))
	payFor(t, s, "order-1")
	settled(t, s)
	require.Equal(t, []EventState{EventGivenUp, EventDelivered}, states(s))
	require.Equal(t, map[string]int{"order-1": 1}, r.times())
}

func TestRetryAfterOfTheEndpointIsHeeded(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		date := func(w http.ResponseWriter, _ *http.Request) {
			says(503, "Retry-After", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))(w, nil)
		}
		a := &answers{list: []http.HandlerFunc{says(429, "Retry-After", "60"), date, says(503, "Retry-After", "1"), says(204)}}
		require.NoError(t, s.Register(Endpoint{Handler: a, Secrets: []string{secretOne}}))
		payFor(t, s, "order-1")
		settled(t, s)
		var waits []time.Duration
		for i := range 3 {
			waits = append(waits, a.at[i+1].Sub(a.at[i]))
		}
		require.Equal(t, []time.Duration{time.Minute, time.Hour, 30 * time.Minute}, waits, "the longer of the two")
	})
	for value, want := range map[string]time.Duration{
		"": 0, "soon": 0, "-1": 0, "0": 0, "7": 7 * time.Second, "99999999": 24 * time.Hour, "Fri, 31 Dec 1999 23:59:59 GMT": 0,
	} {
		require.Equal(t, want, retryAfter(value, time.Now()), value)
	}
}

func TestGoneEndsAnEndpointUntilItIsRegisteredAgain(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		a := &answers{list: []http.HandlerFunc{says(500), says(410), says(200)}}
		e := Endpoint{Name: "shop", Handler: a, Secrets: []string{secretOne}}
		require.NoError(t, s.Register(e))
		payFor(t, s, "order-1") // 500
		time.Sleep(time.Second)
		payFor(t, s, "order-2") // 410
		time.Sleep(time.Second)
		payFor(t, s, "order-3") // nobody is told
		settled(t, s)
		require.Equal(t, []EventState{EventGivenUp, EventGivenUp}, states(s))
		require.Len(t, s.Deliveries(), 2)
		require.NoError(t, s.Register(e))
		payFor(t, s, "order-4")
		settled(t, s)
		require.Equal(t, []EventState{EventGivenUp, EventGivenUp, EventDelivered}, states(s))
	})
	inMemory(t, func(t *testing.T, s *Server) {
		a := &answers{list: []http.HandlerFunc{says(410), says(200)}}
		require.NoError(t, s.Register(Endpoint{Scheme: StripeSignature, Handler: a, Secrets: []string{"x"}}))
		payFor(t, s, "order-1")
		settled(t, s)
		require.Equal(t, []EventState{EventDelivered}, states(s), "410 is a word of Standard Webhooks only")
	})
}

func TestASlowEndpointIsStillAtItWhenTheEventComesAgain(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		var running, most atomic.Int32
		slow := func(w http.ResponseWriter, _ *http.Request) {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			time.Sleep(40 * time.Second) // does not look at its context
		}
		a := &answers{list: []http.HandlerFunc{slow, says(200)}}
		require.NoError(t, s.Register(Endpoint{Handler: a, Secrets: []string{secretOne}}))
		start := time.Now()
		payFor(t, s, "order-1")
		settled(t, s)
		require.Equal(t, 35*time.Second, time.Since(start))
		require.EqualValues(t, 1, running.Load(), "the first has not returned")
		d := s.Deliveries()
		require.ErrorIs(t, d[0].Err, context.DeadlineExceeded)
		require.Equal(t, 30*time.Second, d[0].Ended.Sub(d[0].At))
		require.True(t, d[1].Accepted)
		s.Close()
		require.Zero(t, running.Load(), "Close waits for the handler")
	})
}

func TestFirstAttemptsOneAtATimeFollowTheLedger(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		r := &receiver{work: time.Millisecond}
		r.at(t, s, Endpoint{Parallel: 1})
		var group sync.WaitGroup
		for i := range 30 {
			group.Go(func() { payFor(t, s, "order-"+strconv.Itoa(i)) })
		}
		group.Wait()
		settled(t, s)
		var ledger, told []string
		for _, e := range s.Effects() {
			ledger = append(ledger, e.Reference)
		}
		for _, m := range r.all() {
			told = append(told, m.reference)
		}
		require.Equal(t, ledger, told)
	})
}

func TestParallelIsTheMostAttemptsAtATime(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		var running, most atomic.Int32
		var mu sync.Mutex
		h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			mu.Lock()
			most.Store(max(most.Load(), running.Add(1)))
			mu.Unlock()
			time.Sleep(time.Second) // so that they meet
			running.Add(-1)
		})
		require.NoError(t, s.Register(Endpoint{Name: "a", Handler: h, Secrets: []string{secretOne}, Parallel: 3}))
		start := time.Now()
		for i := range 9 {
			payFor(t, s, "order-"+strconv.Itoa(i))
		}
		settled(t, s)
		require.EqualValues(t, 3, most.Load())
		require.Equal(t, 3*time.Second, time.Since(start))
		require.NoError(t, s.Register(Endpoint{Name: "a", Handler: h, Secrets: []string{secretOne}, Parallel: 9}))
		start = time.Now()
		for i := range 9 {
			payFor(t, s, "trip-"+strconv.Itoa(i))
		}
		settled(t, s)
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestASecretIsReplacedWhileEventsArePending(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{Name: "shop", Secrets: []string{secretTwo}})
		r.mu.Lock()
		r.secrets = []string{secretOne} // it knows the new one only
		r.mu.Unlock()
		payFor(t, s, "order-1")
		time.Sleep(time.Second)
		require.Equal(t, 401, s.Deliveries()[0].Status, "the old secret")
		require.NoError(t, s.Register(Endpoint{Name: "shop", Handler: r, Secrets: []string{secretTwo, secretOne}}))
		settled(t, s)
		require.Equal(t, []EventState{EventDelivered}, states(s), "one of two signatures")
		require.Len(t, s.Deliveries(), 2)
	})
}

func TestTwoEndpointsAreToldUnderOneID(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		first := careful(t, s, Endpoint{})
		payFor(t, s, "order-0")
		second := careful(t, s, Endpoint{Secrets: []string{secretTwo}, IDPrefix: "msg_"})
		payFor(t, s, "order-1")
		settled(t, s)
		require.Equal(t, map[string]int{"order-0": 1, "order-1": 1}, first.times())
		require.Equal(t, map[string]int{"order-1": 1}, second.times(), "what happened before it came is not told")
		events := s.Events(Filter{Reference: "order-1"})
		require.Len(t, events, 2)
		require.Equal(t, events[0].ID, events[1].ID)
		require.Equal(t, []string{"endpoint-1", "endpoint-2"}, []string{events[0].Endpoint, events[1].Endpoint})
	})
}

func TestTheSendersClockIsTheServers(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{})
		s.Advance(time.Hour)
		payFor(t, s, "order-1")
		time.Sleep(time.Second)
		require.Equal(t, 400, s.Deliveries()[0].Status, "an hour ahead")
		s.Advance(-time.Hour)
		settled(t, s)
		require.Equal(t, map[string]int{"order-1": 1}, r.times())
	})
}

func TestARestartCutsDeliveriesAndLosesNone(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		entered, cut := make(chan struct{}, 1), make(chan struct{})
		first := &answers{list: []http.HandlerFunc{says(500), says(200)}}
		second := &answers{list: []http.HandlerFunc{func(_ http.ResponseWriter, r *http.Request) {
			entered <- struct{}{}
			<-r.Context().Done()
			close(cut)
		}, says(200)}}
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Webhook-Id") == "msg_1" {
				first.ServeHTTP(w, r)
			} else {
				second.ServeHTTP(w, r)
			}
		})
		require.NoError(t, s.Register(Endpoint{Handler: h, Secrets: []string{secretOne}, Parallel: 1,
			Schedule: []time.Duration{300 * time.Millisecond, 300 * time.Millisecond}}))
		payFor(t, s, "order-1") // 500, and waits
		soon(t, func() bool { e := s.Events()[0]; return !e.Next.IsZero() || e.Attempts > 1 })
		payFor(t, s, "order-2")
		<-entered
		s.Restart()
		<-cut
		settled(t, s)
		require.Equal(t, []EventState{EventDelivered, EventDelivered}, states(s))
		d := s.Deliveries(Filter{Reference: "order-2"})
		require.Len(t, d, 2)
		require.Error(t, d[0].Err)
		require.Equal(t, []int{1, 2}, []int{d[0].Attempt, d[1].Attempt})
		require.Len(t, s.Deliveries(Filter{Reference: "order-1"}), 2)
	})
}

func TestAResetForgetsEventsAndKeepsEndpoints(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		release := make(chan struct{})
		a := &answers{list: []http.HandlerFunc{says(500), func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			<-release
		}, says(200)}}
		require.NoError(t, s.Register(Endpoint{Handler: a, Secrets: []string{secretOne}, Parallel: 1, Schedule: []time.Duration{50 * time.Millisecond}}))
		payFor(t, s, "order-1")
		soon(t, func() bool { return a.times() == 2 }) // the second attempt is under way
		payFor(t, s, "order-2")                        // and this waits for its turn
		require.NoError(t, s.InjectDeliveries(DeliveryFault{Kind: LostAnswer}))
		require.NoError(t, s.ScriptDeliveries("", DeliveryFault{Kind: Huge}))
		s.Reset()
		close(release)
		settled(t, s)
		require.Empty(t, s.Events())
		require.Empty(t, s.Deliveries())
		time.Sleep(100 * time.Millisecond) // more than the schedule
		require.Equal(t, 2, a.times(), "nothing more is delivered")

		payFor(t, s, "order-3")
		settled(t, s)
		require.Equal(t, []EventState{EventDelivered}, states(s), "the endpoint stays, the faults do not")
		d := s.Deliveries()[0]
		require.Equal(t, 1, d.N)
		require.Equal(t, "msg_3", d.ID, "an id never comes twice")
	})
}

func TestAResetEndsTheWaitForPendingEvents(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		r := &answers{list: []http.HandlerFunc{says(500)}}
		require.NoError(t, s.Register(Endpoint{Handler: r, Secrets: []string{secretOne}}))
		injectDeliveries(t, s, DeliveryFault{Kind: Delayed, Reference: "order-2"}, DeliveryFault{Kind: Reordered, Reference: "order-3", Delay: time.Hour},
			DeliveryFault{Kind: Twice, Delay: time.Hour})
		for _, reference := range []string{"order-1", "order-2", "order-3"} {
			payFor(t, s, reference)
		}
		time.Sleep(time.Second)
		start := time.Now()
		s.Reset()
		settled(t, s)
		require.Zero(t, time.Since(start))
		require.Equal(t, 1, r.times())
	})
}

func TestAwaitEventsSaysWhyItEnds(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.AwaitEvents(t.Context()), "nothing to wait for")
		a := &answers{list: []http.HandlerFunc{says(500)}}
		require.NoError(t, s.Register(Endpoint{Handler: a, Secrets: []string{secretOne}}))
		payFor(t, s, "order-1")
		cause := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, cause)
		defer cancel()
		require.Equal(t, cause, s.AwaitEvents(ctx))
		go func() {
			time.Sleep(time.Minute)
			s.Close()
		}()
		require.ErrorIs(t, s.AwaitEvents(t.Context()), http.ErrServerClosed)
		require.ErrorIs(t, s.AwaitEvents(t.Context()), http.ErrServerClosed)
		require.Equal(t, []EventState{EventPending}, states(s))
	})
}

// A handler that goes and reads, as thin events want it.
func TestAnEndpointMayAskTheServerForTheResource(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		statuses := make(chan any, 1)
		h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			var doc struct{ Data struct{ ID string } }
			if json.NewDecoder(r.Body).Decode(&doc) == nil {
				statuses <- call{method: "GET", path: "/v1/payments/" + doc.Data.ID}.send(s).status
			}
		})
		require.NoError(t, s.Register(Endpoint{Handler: h, Secrets: []string{secretOne}}))
		payFor(t, s, "order-1")
		settled(t, s)
		require.Equal(t, 200, <-statuses)
	})
}

func TestCloseEndsEveryKindOfDelivery(t *testing.T) {
	for name, start := range map[string]func() *Server{"sockets": New, "memory": NewInMemory} {
		t.Run(name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			for range 5 {
				s := start()
				entered := make(chan struct{}, 10)
				h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					switch _, _ = io.Copy(io.Discard, r.Body); r.URL.Path {
					case "/hangs":
						entered <- struct{}{}
						<-r.Context().Done()
					case "/fails":
						w.WriteHeader(500)
					}
				})
				for _, path := range []string{"/hangs", "/fails", "/works"} {
					require.NoError(t, s.Register(Endpoint{Name: path, URL: path, Handler: h, Secrets: []string{secretOne}, Parallel: 2}))
				}
				faults := []DeliveryFault{
					{Kind: Twice, Copies: 3}, {Kind: Twice, Delay: time.Hour}, {Kind: Replayed}, {Kind: OtherBody, Delay: time.Hour}, {Kind: OtherID, Delay: time.Hour},
					{Kind: OtherSource, To: "/hangs", Delay: time.Hour}, {Kind: Reordered, Delay: time.Hour}, {Kind: Delayed},
				}
				for i, f := range faults {
					f.Reference, f.Endpoint = "order-"+strconv.Itoa(i), "/works"
					require.NoError(t, s.InjectDeliveries(f))
				}
				for i := range faults {
					payFor(t, s, "order-"+strconv.Itoa(i))
				}
				<-entered
				<-entered
				soon(t, func() bool { return len(s.Deliveries()) >= 8 })
				s.Close()
				s.Close()
				require.Contains(t, states(s), EventPending)
				for _, d := range s.Deliveries() {
					require.NotZero(t, d.Ended, "%+v", d)
				}
			}
			for range 1000 { // the last steps of net/http's own goroutines are not ours to wait for
				if runtime.NumGoroutine() <= before {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines before, then:\n%s", before, stacks[:runtime.Stack(stacks, true)])
		})
	}
}

// The endpoint sees a connection that is reset after its answer, not one that is closed.
func TestALostAnswerIsAReset(t *testing.T) {
	lost := func(t *testing.T, s *Server, answer string) {
		ends := make(chan error, 2)
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, err := io.Copy(io.Discard, r.Body)
			if err == nil {
				var c net.Conn
				var rw *bufio.ReadWriter
				if c, rw, err = http.NewResponseController(w).Hijack(); err == nil {
					defer c.Close()
					_, _ = io.WriteString(c, answer)
					_, err = rw.ReadByte()
				}
			}
			ends <- err
		})
		require.NoError(t, s.Register(Endpoint{Handler: h, Secrets: []string{secretOne}, Schedule: []time.Duration{time.Millisecond}}))
		require.NoError(t, s.ScriptDeliveries("order-1", DeliveryFault{Kind: LostAnswer}))
		payFor(t, s, "order-1")
		first, second := <-ends, <-ends
		if errors.Is(second, syscall.ECONNRESET) { // who hears of the reset may be slower than the next attempt
			first, second = second, first
		}
		require.ErrorIs(t, first, syscall.ECONNRESET)
		require.ErrorIs(t, second, io.EOF, "the second answer is heard")
		settled(t, s)
		d := s.Deliveries()
		require.Len(t, d, 2)
		require.Equal(t, []any{200, false, "lost-answer"}, []any{d[0].Status, d[0].Accepted, d[0].Fault})
		require.ErrorIs(t, d[0].Err, syscall.ECONNRESET)
		require.Equal(t, []any{200, true, ""}, []any{d[1].Status, d[1].Accepted, d[1].Fault})
	}
	inBothWorlds(t, func(t *testing.T, s *Server) { lost(t, s, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") })
	t.Run("sockets, the last answer", func(t *testing.T) {
		s := New()
		defer s.Close()
		lost(t, s, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
	})
}
