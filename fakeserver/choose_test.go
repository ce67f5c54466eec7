package fakeserver

import (
	"net/http"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func statuses(s *Server, filters ...Filter) (list []int) {
	for _, n := range s.Sends(filters...) {
		list = append(list, n.Status)
	}
	return list
}

func TestScriptGoesStepByStep(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.Script("order-1", Fault{Kind: Status, Status: 503}, Fault{}, Fault{Kind: Reset, Point: AfterEffect}))
		inject(t, s, Fault{Kind: Status, Status: 429, Key: "order-1"})
		for range 5 {
			pay("order-1").send(s)
			pay("order-2").send(s)
		}
		require.Equal(t, []int{503, 201, 0, 429, 429}, statuses(s, Filter{Key: "order-1"}), "the zero fault lets its send pass")
		require.Equal(t, []int{201, 201, 201, 201, 201}, statuses(s, Filter{Key: "order-2"}))
		require.Len(t, s.Effects(Filter{Key: "order-1"}), 1)
	})
}

func TestScriptForAnySendCountsOverAll(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		pay("order-0").send(s)
		require.NoError(t, s.Script("", Fault{Kind: Status, Status: 501}, Fault{Kind: Status, Status: 502}, Fault{Kind: Status, Status: 503}))
		require.NoError(t, s.Script("order-2", Fault{Kind: Status, Status: 599}))
		for _, key := range []string{"order-1", "order-2", "order-3", "order-4"} {
			pay(key).send(s)
		}
		require.Equal(t, []int{201, 501, 599, 503, 201}, statuses(s), "a key's own script goes first")
	})
}

func TestScriptRefusesFilters(t *testing.T) {
	s := NewInMemory()
	defer s.Close()
	for field, f := range map[string]Fault{
		"key": {Kind: Reset, Key: "k"}, "send": {Kind: Reset, Send: 1}, "endpoint": {Kind: Reset, Endpoint: "x"},
		"times": {Kind: Reset, Times: 1}, "rate": {Kind: Reset, Rate: 0.5}, "delay": {Kind: Slow},
	} {
		require.ErrorContains(t, s.Script("k", Fault{}, f), "fault: "+field)
	}
}

func TestFiltersNarrowAFault(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		inject(t, s,
			Fault{Kind: Status, Status: 501, Send: 2, Endpoint: "POST /v1/payments"},
			Fault{Kind: Status, Status: 502, Key: "order-3"},
			Fault{Kind: Status, Status: 503, Times: 1, Endpoint: "POST /v1/hotels/{hotel_id}/reservations"},
		)
		for _, c := range []call{pay("order-1"), pay("order-1"), pay("order-1"), pay("order-3"), pay("order-3"), book("trip-1"), book("trip-2")} {
			c.send(s)
		}
		require.Equal(t, []int{201, 501, 201, 502, 501, 503, 201}, statuses(s), "the first that matches wins")
		s.ClearFaults()
		require.Equal(t, 201, pay("order-3").send(s).status)
	})
}

func TestSendsWithoutAKeyAreCountedByPath(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		first, second := book("trip-1").send(s).header.Get("Location"), book("trip-2").send(s).header.Get("Location")
		inject(t, s, Fault{Kind: Reset, Point: AfterEffect, Send: 1, Endpoint: "DELETE /v1/hotels/{hotel_id}/reservations/{id}"})
		for _, at := range []string{first, second} {
			require.Error(t, call{method: "DELETE", path: at}.send(s).err)
			require.Equal(t, 404, call{method: "DELETE", path: at}.send(s).status)
		}
		require.Len(t, s.Effects(Filter{Kind: "cancellation"}), 2)
	})
}

func TestInvalidFaultAddsNothing(t *testing.T) {
	s := NewInMemory()
	defer s.Close()
	err := s.Inject(Fault{Kind: Reset}, Fault{Kind: Slow})
	require.ErrorContains(t, err, "delay")
	require.ErrorContains(t, err, "number 2")
	require.Equal(t, 201, pay("order-1").send(s).status)
	require.NoError(t, s.Inject(Fault{Kind: Reset, Rate: 0.6}))
	require.ErrorContains(t, s.Inject(Fault{Kind: Hang, Rate: 0.6}), "rate")
	require.NoError(t, s.Inject(Fault{Kind: Hang, Rate: 0.6, Seed: 1}), "another seed is another draw")
}

// The draws are checked on the pure choice, without any network.
func TestRatesOfOneSeedShareOneDraw(t *testing.T) {
	s := newServer(nil)
	require.NoError(t, s.Inject(
		Fault{Kind: Reset, Rate: 0.1, Seed: 5}, Fault{Kind: Close, Rate: 0.2, Seed: 5}, Fault{Kind: Hang, Rate: 0.3, Seed: 5}))
	counts := map[Kind]int{}
	const sends = 100_000
	for i := range sends {
		if f := s.choose(&Send{Key: "order-" + strconv.Itoa(i/4), KeySend: 1 + i%4}); f != nil {
			counts[f.Kind]++
		}
	}
	for kind, rate := range map[Kind]float64{Reset: 0.1, Close: 0.2, Hang: 0.3} {
		require.InDelta(t, rate, float64(counts[kind])/sends, 0.005, "%s", kind)
	}
}

func TestRateIsExactForLaterSendsOfAFaultedKey(t *testing.T) {
	const rate, keys = 0.175, 200_000
	bad := 0
	for i := range keys {
		if key := strconv.Itoa(i); drawn(1, key, 1) < rate && drawn(1, key, 2) < rate {
			bad++
		}
	}
	require.InDelta(t, rate*rate, float64(bad)/keys, 0.002, "the draws of one key are independent")
	require.NotEqual(t, drawn(1, "k", 1), drawn(2, "k", 1))
	require.NotEqual(t, drawn(1, "k", 1), drawn(1, "j", 1))
	require.Equal(t, drawn(1, "k", 1), drawn(1, "k", 1))
}

func TestARunRepeatsWhateverTheScheduling(t *testing.T) {
	run := func(workers int) map[string]string {
		faults := map[string]string{}
		synctest.Test(t, func(t *testing.T) {
			s := NewInMemory()
			defer s.Close()
			inject(t, s, Mixed(0.5, 42)...)
			work := make(chan string)
			var group sync.WaitGroup
			for range workers {
				group.Go(func() {
					for key := range work {
						settle(s, pay(key))
					}
				})
			}
			for i := range 200 {
				work <- "order-" + strconv.Itoa(i)
			}
			close(work)
			group.Wait()
			for _, n := range s.Sends() {
				if !n.Duplicate {
					faults[n.Key+"/"+strconv.Itoa(n.KeySend)] = n.Fault
				}
			}
		})
		return faults
	}
	one, many := run(1), run(32)
	require.Greater(t, len(one), 300)
	require.Equal(t, one, many)
}

// settle sends until there is an answer of the operation itself.
func settle(s *Server, c call) {
	c.within = time.Second
	for {
		r := c.send(s)
		if r.err == nil && r.bodyErr == nil && r.status == 201 {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func TestMixedFaultsNeverChargeTwice(t *testing.T) {
	for name, faults := range map[string][]Fault{"mixed": Mixed(0.35, 1), "storm": Storm(1)} {
		t.Run(name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *Server) {
				inject(t, s, faults...)
				const operations = 2000
				var group sync.WaitGroup
				for worker := range 16 {
					group.Go(func() {
						for i := worker; i < operations; i += 16 {
							settle(s, pay("order-"+strconv.Itoa(i)))
						}
					})
				}
				group.Wait()
				require.Len(t, s.Effects(), operations)
				for i := range operations {
					require.Len(t, s.Effects(Filter{Key: "order-" + strconv.Itoa(i)}), 1)
				}
			})
		})
	}
}

func TestMixedIsHalfBeforeAndHalfAfter(t *testing.T) {
	var total, before float64
	for _, f := range Mixed(0.35, 9) {
		require.NoError(t, f.Validate())
		total += f.Rate
		if f.Point == BeforeEffect && f.Kind != Duplicate {
			before += f.Rate
		}
		require.EqualValues(t, 9, f.Seed)
	}
	require.InDelta(t, 0.35, total, 1e-9)
	require.InDelta(t, 0.175, before, 1e-9)
	require.Nil(t, Mixed(0, 1))
	require.Nil(t, Mixed(-1, 1))
	s := newServer(nil)
	require.NoError(t, s.Inject(Mixed(2, 1)...), "above 1 counts as 1")
	require.NoError(t, s.Inject(Storm(2)...))
	require.NotNil(t, s.choose(&Send{Key: "k", KeySend: 1, Method: http.MethodPost}))
}
