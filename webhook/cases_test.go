package webhook_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

func TestC75_FiftyDeliveriesAtTheSameTimeRunTheHandlerOnce(t *testing.T) {
	copies := fakeserver.DeliveryFault{Kind: fakeserver.Twice, Copies: 49}
	for _, timeInBody := range []bool{false, true} {
		t.Run(fmt.Sprintf("time in the body %t", timeInBody), func(t *testing.T) {
			virtual(t, func(t *testing.T, s *fakeserver.Server) {
				r := newReceiver(func(r *receiver) { r.shop.work = 100 * time.Millisecond })
				register(t, s, r, func(e *fakeserver.Endpoint) { e.TimeInBody = timeInBody })
				fail(t, s, "order-1", copies)
				pay(t, s, "order-1")
				settled(t, s)

				runs, effects := r.shop.count()
				require.Equal(t, 1, runs)
				require.Equal(t, map[string]int{"payment.succeeded order-1": 1}, effects)
				ok, busy := 0, 0
				for _, d := range s.Deliveries() {
					switch d.Status {
					case http.StatusOK:
						ok++
						require.False(t, d.Ended.Before(r.shop.done["payment.succeeded order-1"]), "200 before the first had finished")
					case http.StatusServiceUnavailable:
						busy++
					default:
						require.Fail(t, "answered", "%d", d.Status)
					}
				}
				require.GreaterOrEqual(t, ok, 1)
				require.Equal(t, 49, busy, "all of them came while the first was being handled")
				require.Equal(t, fakeserver.EventDelivered, s.Events()[0].State)
			})
		})
	}
	t.Run("the first one fails", func(t *testing.T) {
		virtual(t, func(t *testing.T, s *fakeserver.Server) {
			r := newReceiver(func(r *receiver) {
				r.shop.work = 100 * time.Millisecond
				r.shop.before = func(_ *http.Request, run int) int {
					time.Sleep(100 * time.Millisecond) // while the others come
					if run == 1 {
						return http.StatusInternalServerError
					}
					return 0
				}
			})
			register(t, s, r)
			fail(t, s, "order-1", copies)
			pay(t, s, "order-1")
			settled(t, s)
			runs, effects := r.shop.count()
			require.Equal(t, 2, runs)
			require.Equal(t, map[string]int{"payment.succeeded order-1": 1}, effects)
			for _, d := range s.Deliveries() {
				if d.Status == http.StatusOK {
					require.False(t, d.Ended.Before(r.shop.done["payment.succeeded order-1"]), "200 for an event that failed then")
				}
			}
			require.Equal(t, fakeserver.EventDelivered, s.Events()[0].State)
		})
	})
	t.Run("over loopback, behind a barrier", func(t *testing.T) {
		r := newReceiver(func(r *receiver) { r.shop.work = 100 * time.Millisecond })
		l := onLoopback(t, r)
		var barrier, end sync.WaitGroup
		barrier.Add(1)
		got := make([]int, 50)
		for i := range got {
			end.Go(func() {
				barrier.Wait()
				got[i] = l.deliver(t, "msg_1", event("order-1")).status
			})
		}
		barrier.Done()
		end.Wait()
		runs, _ := r.shop.count()
		require.Equal(t, 1, runs)
		for _, status := range got {
			require.Contains(t, []int{http.StatusOK, http.StatusServiceUnavailable}, status)
		}
		require.Contains(t, got, http.StatusOK)
		require.Equal(t, http.StatusOK, l.deliver(t, "msg_1", event("order-1")).status)
	})
}

// The restart is in module signature, over SQLite: a journal in memory
// forgets.
func TestC77_AnEventIsKnownForTheWholeWindowAndNewAfterIt(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		r := newReceiver(func(r *receiver) { r.Window = 72 * time.Hour })
		require.Equal(t, http.StatusOK, post(t, r, "msg_1", event("order-1")).status)
		time.Sleep(71 * time.Hour)
		require.Equal(t, http.StatusOK, post(t, r, "msg_1", event("order-1")).status)
		runs, _ := r.shop.count()
		require.Equal(t, 1, runs)
		time.Sleep(2 * time.Hour)
		require.Equal(t, http.StatusOK, post(t, r, "msg_1", event("order-1")).status)
		runs, _ = r.shop.count()
		require.Equal(t, 2, runs, "after the window it is a new event")
		swept, err := r.memory.Sweep(t.Context(), 0)
		require.NoError(t, err)
		require.Zero(t, swept)
		time.Sleep(72 * time.Hour)
		swept, err = r.memory.Sweep(t.Context(), 0)
		require.NoError(t, err)
		require.Equal(t, journal.Swept{Deleted: 1}, swept, "no tombstone stays")
	})
	t.Run("the default window outlasts the schedule of Standard Webhooks", func(t *testing.T) {
		virtual(t, func(t *testing.T, s *fakeserver.Server) {
			r := newReceiver()
			register(t, s, r)
			lost := make([]fakeserver.DeliveryFault, len(fakeserver.StandardSchedule()))
			for i := range lost {
				lost[i].Kind = fakeserver.LostAnswer
			}
			fail(t, s, "order-1", lost...)
			start := time.Now()
			pay(t, s, "order-1")
			settled(t, s)
			require.Greater(t, time.Since(start), 75*time.Hour+35*time.Minute)
			require.Len(t, s.Deliveries(), 10)
			runs, _ := r.shop.count()
			require.Equal(t, 1, runs)
		})
	})
	t.Run("a full journal refuses and evicts nothing", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := *idsFlag
			r := newReceiver(func(r *receiver) {
				r.Journal = &journal.Memory{Max: n}
				r.Next = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
				r.Verify = func(h http.Header, _ []byte) (string, error) { return h.Get("Id"), nil }
				r.Done = nil
			})
			deliver := func(i int) answer {
				return post(t, r, "msg_1", "{}", func(req *http.Request) { req.Header = http.Header{"Id": {fmt.Sprintf("msg_%d", i)}} })
			}
			for i := range n {
				if a := deliver(i); a.status != http.StatusOK {
					require.Equal(t, http.StatusOK, a.status, "%d: %s", i, a.body)
				}
			}
			ear := &ears{}
			r.Handler.Done = ear.hear
			a := deliver(n)
			require.Equal(t, http.StatusServiceUnavailable, a.status)
			require.Equal(t, "unavailable", a.Reason)
			retryAfter(t, a.header)
			require.ErrorIs(t, ear.all()[0].Err, webhook.ErrJournal)
			require.ErrorIs(t, ear.all()[0].Err, journal.ErrFull)
			ran := false
			r.Next = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { ran = true })
			for i := 0; i < n; i += 1 + n/1000 {
				require.Equal(t, http.StatusOK, deliver(i).status)
			}
			require.False(t, ran, "a live id was forgotten")
			time.Sleep(webhook.DefaultWindow)
			require.Equal(t, http.StatusOK, deliver(n).status, "what has expired makes room")
			require.True(t, ran)
		})
	})
}

func TestC78_SourceAndIdTogetherNameAnEvent(t *testing.T) {
	t.Run("one id from two sources is two events", func(t *testing.T) {
		virtual(t, func(t *testing.T, s *fakeserver.Server) {
			one := newReceiver()
			two := newReceiver(func(r *receiver) { r.Source, r.Journal, r.Verify = "travel", one.memory, verifier(secretTwo) })
			register(t, s, one)
			register(t, s, two, func(e *fakeserver.Endpoint) { e.Name, e.Secrets = "travel", []string{secretTwo} })
			require.NoError(t, s.InjectDeliveries(fakeserver.DeliveryFault{Kind: fakeserver.OtherSource, To: "travel", Endpoint: "shop"}))
			pay(t, s, "order-1")
			settled(t, s)
			_, effects := one.shop.count()
			require.Equal(t, map[string]int{"payment.succeeded order-1": 1}, effects)
			// The travel endpoint has an event of its own under the id, and the other one too.
			ids := map[string]bool{}
			for _, d := range s.Deliveries() {
				ids[d.ID] = true
			}
			require.Equal(t, map[string]bool{"msg_1": true}, ids)
			runs, _ := two.shop.count()
			require.Equal(t, 1, runs, "a sender's id is not lost to that of another one")
		})
	})
	t.Run("one id with another body is one event, and the difference is told", func(t *testing.T) {
		virtual(t, func(t *testing.T, s *fakeserver.Server) {
			r := newReceiver()
			register(t, s, r)
			fail(t, s, "order-1", fakeserver.DeliveryFault{Kind: fakeserver.OtherBody, Delay: time.Second})
			pay(t, s, "order-1")
			settled(t, s)
			require.Equal(t, []int{http.StatusOK, http.StatusOK}, statuses(s))
			runs, _ := r.shop.count()
			require.Equal(t, 1, runs)
			heard := r.ears.all()
			require.Equal(t, []webhook.Result{webhook.Ran, webhook.AlreadyDone}, []webhook.Result{heard[0].Result, heard[1].Result})
			require.False(t, heard[0].Differs)
			require.True(t, heard[1].Differs)
		})
	})
	t.Run("two ids are two events unless a business id is found", func(t *testing.T) {
		for extract, want := range map[bool]int{false: 2, true: 1} {
			virtual(t, func(t *testing.T, s *fakeserver.Server) {
				r := newReceiver()
				if extract {
					r.ID = func(_ http.Header, body []byte) (string, error) {
						_, reference, ok := strings.Cut(string(body), `"reference":"`)
						if !ok {
							return "", errors.New("no reference")
						}
						return "payment " + strings.SplitN(reference, `"`, 2)[0], nil
					}
				}
				register(t, s, r)
				fail(t, s, "order-1", fakeserver.DeliveryFault{Kind: fakeserver.OtherID, Delay: time.Second})
				pay(t, s, "order-1")
				settled(t, s)
				require.Equal(t, []int{http.StatusOK, http.StatusOK}, statuses(s))
				_, effects := r.shop.count()
				require.Equal(t, map[string]int{"payment.succeeded order-1": want}, effects)
				if extract {
					a := post(t, r, "msg_9", "{}")
					require.Equal(t, http.StatusBadRequest, a.status)
					require.Equal(t, "event-id", a.Reason)
				}
			})
		}
	})
}

func TestC79_NothingIsStoredBeforeADeliveryIsVerified(t *testing.T) {
	virtual(t, func(t *testing.T, s *fakeserver.Server) {
		asked := 0
		r := newReceiver(func(r *receiver) {
			r.ID = func(h http.Header, _ []byte) (string, error) { asked++; return h.Get("Webhook-Id"), nil }
		})
		stored := false
		look := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			id := req.Header.Get("Webhook-Id")
			_, before := r.known(t, id)
			stored = stored || before
			r.ServeHTTP(w, req)
		})
		register(t, s, look)
		fail(t, s, "order-1",
			fakeserver.DeliveryFault{Kind: fakeserver.Unsigned}, fakeserver.DeliveryFault{Kind: fakeserver.Forged},
			fakeserver.DeliveryFault{Kind: fakeserver.OldTimestamp}, fakeserver.DeliveryFault{Kind: fakeserver.FutureTimestamp},
			fakeserver.DeliveryFault{Kind: fakeserver.Reencoded})
		pay(t, s, "order-1")
		settled(t, s)
		require.Equal(t, []int{401, 401, 400, 400, 401, 200}, statuses(s))
		require.False(t, stored)
		require.Equal(t, 1, asked, "what is not verified is not looked into")
		_, effects := r.shop.count()
		require.Equal(t, map[string]int{"payment.succeeded order-1": 1}, effects)
		for _, d := range r.ears.all()[:5] {
			require.Equal(t, webhook.Rejected, d.Result)
			require.Empty(t, d.ID)
		}
	})
	t.Run("the limit of the body comes before the signature", func(t *testing.T) {
		verified := false
		r := newReceiver(func(r *receiver) {
			r.MaxBody = 1000
			r.Verify = func(http.Header, []byte) (string, error) { verified = true; return "msg_1", nil }
		})
		for name, length := range map[string]int64{"of a length that is said": 10 << 20, "of a length that is not said": -1, "of a length that is a lie": 10} {
			body := &endless{}
			a := post(t, r, "msg_1", "", func(req *http.Request) { req.Body, req.ContentLength = body, length })
			require.Equal(t, http.StatusRequestEntityTooLarge, a.status, name)
			require.Equal(t, "The body has more than 1000 bytes.", a.Detail)
			require.LessOrEqual(t, body.read, 4096, name)
			if length > 0 && length > r.MaxBody {
				require.Zero(t, body.read, "what is known to be too long is not read")
			}
		}
		require.False(t, verified)
		r.Next = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
		require.Equal(t, http.StatusOK, post(t, r, "msg_1", strings.Repeat("x", 1000)).status, "the limit itself is allowed")
		require.True(t, verified)
	})
	t.Run("a huge delivery", func(t *testing.T) {
		virtual(t, func(t *testing.T, s *fakeserver.Server) {
			r := newReceiver()
			register(t, s, r)
			fail(t, s, "order-1", fakeserver.DeliveryFault{Kind: fakeserver.Huge})
			pay(t, s, "order-1")
			settled(t, s)
			require.Equal(t, []int{413, 200}, statuses(s))
			runs, _ := r.shop.count()
			require.Equal(t, 1, runs)
		})
	})
}
