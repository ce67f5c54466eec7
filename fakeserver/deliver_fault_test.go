package fakeserver

import (
	"encoding/json"
	"math"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// The table of the package comment is run, row by row, at a careful receiver.
func TestTheTableOfDeliveryFaultsIsTrue(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	row := regexp.MustCompile(`(?m)^//\t([a-z-]+) +(\d)  ([0-9]{3}(?: [0-9]{3})*) +(\d) `)
	rows := map[DeliveryKind]bool{}
	for _, m := range row.FindAllStringSubmatch(string(doc), -1) {
		f := DeliveryFault{Kind: DeliveryKind(m[1]), Attempt: 1, Endpoint: "shop"}
		rows[f.Kind] = true
		t.Run(m[1], func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *Server) {
				r := careful(t, s, Endpoint{Name: "shop"})
				other := careful(t, s, Endpoint{Name: "other", Secrets: []string{secretTwo}, IDPrefix: "oth_"})
				switch f.Kind {
				case OtherSource:
					f.To = "other"
				case Twice:
					f.Delay = time.Second // at the same time, one of the two is told 503
				}
				require.NoError(t, s.InjectDeliveries(f))
				payFor(t, s, "order-1")
				settled(t, s)
				var all []Delivery
				for _, d := range s.Deliveries() {
					if d.Endpoint == "shop" || d.Copy {
						all = append(all, d)
					}
				}
				slices.SortStableFunc(all, func(a, b Delivery) int { return a.At.Compare(b.At) })
				var statuses []string
				for _, d := range all {
					statuses = append(statuses, strconv.Itoa(d.Status))
				}
				require.Equal(t, m[2], strconv.Itoa(len(all)))
				require.Equal(t, strings.Fields(m[3]), statuses, "%v", all[0].Err)
				acted := len(r.acted)
				if f.Kind == OtherSource {
					acted += len(other.acted) - 1
				}
				require.Equal(t, m[4], strconv.Itoa(acted))
				require.Equal(t, []EventState{EventDelivered, EventDelivered}, states(s))
				require.Equal(t, f.String(), all[0].Fault)
			})
		})
	}
	for kind := range deliveryKinds {
		require.True(t, rows[kind], "no row for %s", kind)
	}
	require.Len(t, rows, len(deliveryKinds))
}

func injectDeliveries(t *testing.T, s *Server, faults ...DeliveryFault) {
	t.Helper()
	require.NoError(t, s.InjectDeliveries(faults...))
}

func TestCopiesArriveTogetherAndSignedAtOtherTimes(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		var group sync.WaitGroup
		group.Add(50)
		together := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			group.Done()
			group.Wait() // for all of them
		})
		require.NoError(t, s.Register(Endpoint{Handler: together, Secrets: []string{secretOne}, Parallel: 1}))
		injectDeliveries(t, s, DeliveryFault{Kind: Twice, Copies: 49})
		payFor(t, s, "order-1")
		settled(t, s)
		stamps, copies := map[time.Time]bool{}, 0
		for _, d := range s.Deliveries() {
			stamps[d.Timestamp] = true
			require.Equal(t, []any{200, "msg_1", 1, !d.Copy}, []any{d.Status, d.ID, d.Attempt, d.Accepted})
			if d.Copy {
				copies++
			}
		}
		require.Equal(t, 49, copies)
		// Where the clock went on meanwhile, a later copy may sign at the second of an earlier one: one for each second.
		all := s.Deliveries()
		seconds := slices.MaxFunc(all, func(a, b Delivery) int { return a.At.Compare(b.At) }).At.Unix() - s.Effects()[0].At.Unix()
		require.GreaterOrEqual(t, len(stamps), 50/int(1+seconds))
		if s.mem != nil {
			require.Len(t, stamps, 50)
		}
	})
}

func TestALateCopyIsTheSameEventDaysLater(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{TimeInBody: true})
		injectDeliveries(t, s, DeliveryFault{Kind: Twice, Delay: 71 * time.Hour})
		payFor(t, s, "order-1")
		settled(t, s)
		d := s.Deliveries()
		require.Equal(t, 71*time.Hour, d[1].At.Sub(d[0].At))
		require.Equal(t, d[1].At.Unix(), d[1].Timestamp.Unix(), "signed when it leaves")
		require.NotEqual(t, d[0].BodySHA256, d[1].BodySHA256)
		require.Equal(t, []any{200, true}, []any{d[1].Status, d[1].Copy})
		require.Equal(t, map[string]int{"order-1": 1}, r.times())
	})
}

func TestAReplayedDeliveryHasTheSameBytes(t *testing.T) {
	for delay, status := range map[time.Duration]int{4 * time.Minute: 200, 10 * time.Minute: 400} {
		inMemory(t, func(t *testing.T, s *Server) {
			r := careful(t, s, Endpoint{TimeInBody: true})
			injectDeliveries(t, s, DeliveryFault{Kind: Replayed, Delay: delay})
			payFor(t, s, "order-1")
			settled(t, s)
			d, m := s.Deliveries(), r.all()
			require.Equal(t, m[0].body, m[1].body)
			require.Equal(t, m[0].header, m[1].header)
			require.Equal(t, []any{d[0].Timestamp, d[0].Signature, d[0].BodySHA256}, []any{d[1].Timestamp, d[1].Signature, d[1].BodySHA256})
			require.Equal(t, status, d[1].Status)
			require.Equal(t, map[string]int{"order-1": 1}, r.times())
		})
	}
}

func TestReorderedEventsArriveBehindLaterOnes(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{Parallel: 1})
		injectDeliveries(t, s, DeliveryFault{Kind: Reordered, Reference: "order-1", Delay: time.Minute})
		payFor(t, s, "order-1")
		payFor(t, s, "order-2")
		payFor(t, s, "order-3")
		settled(t, s)
		m := r.all()
		require.Equal(t, "order-2", m[0].reference)
		require.ElementsMatch(t, []string{"order-1", "order-3"}, []string{m[1].reference, m[2].reference})
		require.Len(t, m, 3)
	})
	inMemory(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{})
		injectDeliveries(t, s, DeliveryFault{Kind: Reordered})
		for i := range 10 {
			payFor(t, s, "order-"+strconv.Itoa(i))
		}
		start := time.Now()
		settled(t, s)
		require.Equal(t, 5*time.Second, time.Since(start), "nobody overtakes the last")
		require.Len(t, r.times(), 10)
	})
}

func TestTimestampsLieOutsideTheTolerance(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		careful(t, s, Endpoint{})
		for i, f := range []DeliveryFault{{Kind: OldTimestamp}, {Kind: FutureTimestamp}, {Kind: OldTimestamp, Delay: 301 * time.Second},
			{Kind: FutureTimestamp, Delay: 301 * time.Second}, {Kind: OldTimestamp, Delay: 299 * time.Second}, {Kind: FutureTimestamp, Delay: 299 * time.Second}} {
			require.NoError(t, s.ScriptDeliveries("", f))
			before := len(s.Deliveries())
			payFor(t, s, "order-"+strconv.Itoa(i))
			settled(t, s)
			d := s.Deliveries()[before]
			off := d.Timestamp.Sub(time.Unix(d.At.Unix(), 0))
			want := shiftOf(f)
			require.Equal(t, want, off, f.String())
			require.Equal(t, want.Abs() < tolerance, d.Status == 200, f.String())
		}
	})
}

func shiftOf(f DeliveryFault) time.Duration {
	if f = f.placed(); f.Kind == OldTimestamp {
		return -f.Delay
	}
	return f.Delay
}

func TestADelayedDeliveryWasSignedWhenItWasDue(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{Parallel: 1})
		injectDeliveries(t, s, DeliveryFault{Kind: Delayed, Attempt: 1, Reference: "order-1"})
		payFor(t, s, "order-1")
		payFor(t, s, "order-2") // is not held up
		settled(t, s)
		require.Equal(t, []string{"order-2", "order-1", "order-1"}, []string{r.all()[0].reference, r.all()[1].reference, r.all()[2].reference})
		d := s.Deliveries(Filter{Reference: "order-1"})
		require.Equal(t, 10*time.Minute, d[0].At.Sub(d[0].Timestamp).Truncate(time.Second))
		require.Equal(t, 400, d[0].Status)
		require.Equal(t, 10*time.Minute+5*time.Second, d[1].At.Sub(s.Effects()[0].At))
		require.True(t, d[1].Accepted)
	})
}

// C79: an unsigned delivery, one with a wrong signature, a stale one, and then the genuine one, all of the same id.
func TestStrangersComeBeforeTheGenuineDelivery(t *testing.T) {
	for _, scheme := range []Scheme{StandardWebhooks, StripeSignature} {
		inBothWorlds(t, func(t *testing.T, s *Server) {
			schedule := []time.Duration{time.Millisecond, time.Millisecond, time.Millisecond}
			r := careful(t, s, Endpoint{Scheme: scheme, Schedule: schedule})
			require.NoError(t, s.ScriptDeliveries("order-1", DeliveryFault{Kind: Unsigned}, DeliveryFault{Kind: Forged}, DeliveryFault{Kind: OldTimestamp}))
			payFor(t, s, "order-1")
			settled(t, s)
			var statuses []int
			for _, d := range s.Deliveries() {
				require.Equal(t, s.Events()[0].ID, d.ID)
				statuses = append(statuses, d.Status)
			}
			require.Equal(t, []int{401, 401, 400, 200}, statuses)
			m := r.all()
			require.Equal(t, []string{"unsigned", "forged", "", ""}, []string{m[0].note, m[1].note, m[2].note, m[3].note})
			require.Empty(t, m[0].header.Get("Webhook-Signature")+m[0].header.Get("Stripe-Signature"))
			require.Empty(t, s.Deliveries()[0].Signature)
			require.NotEmpty(t, m[1].header.Get("Webhook-Signature")+m[1].header.Get("Stripe-Signature"))
			require.Equal(t, map[string]int{"order-1": 1}, r.times())
			require.Empty(t, r.acted[0].note)
		})
	}
}

func TestWhatAStrangerIsToldEndsNothing(t *testing.T) {
	for _, status := range []int{200, 410} {
		inMemory(t, func(t *testing.T, s *Server) {
			a := &answers{list: []http.HandlerFunc{says(status), says(200)}}
			require.NoError(t, s.Register(Endpoint{Handler: a, Secrets: []string{secretOne}}))
			require.NoError(t, s.ScriptDeliveries("", DeliveryFault{Kind: Forged}))
			payFor(t, s, "order-1")
			settled(t, s)
			d := s.Deliveries()
			require.Len(t, d, 2)
			require.Equal(t, []any{status, false}, []any{d[0].Status, d[0].Accepted})
			require.Equal(t, []EventState{EventDelivered}, states(s))
		})
	}
}

func TestAReencodedBodyIsTheSameJSONUnderAWrongSignature(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{Schedule: []time.Duration{time.Millisecond}})
		injectDeliveries(t, s, DeliveryFault{Kind: Reencoded, Attempt: 1})
		payFor(t, s, "order-1")
		settled(t, s)
		m := r.all()
		require.NotEqual(t, m[0].body, m[1].body)
		require.JSONEq(t, m[0].body, m[1].body)
		require.Equal(t, []int{401, 200}, r.answer)
	})
}

func TestAHugeDeliveryIsTenMiBAndRightlySigned(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		var length int
		var right, valid bool
		r := &receiver{secrets: []string{secretOne}}
		h := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			body := make([]byte, 0, req.ContentLength)
			for buffer := make([]byte, 1<<20); ; {
				n, err := req.Body.Read(buffer)
				if body = append(body, buffer[:n]...); err != nil {
					break
				}
			}
			seconds, _ := strconv.ParseInt(req.Header.Get("Webhook-Timestamp"), 10, 64)
			m := notice{id: req.Header.Get("Webhook-Id"), signed: time.Unix(seconds, 0), header: req.Header}
			length, right, valid = len(body), r.verified(m, body), json.Valid(body)
		})
		require.NoError(t, s.Register(Endpoint{Name: "reads", Handler: h, Secrets: r.secrets}))
		limits := careful(t, s, Endpoint{Name: "limits", Schedule: []time.Duration{time.Millisecond}})
		injectDeliveries(t, s, DeliveryFault{Kind: Huge, Attempt: 1})
		payFor(t, s, "order-1")
		settled(t, s)
		require.Equal(t, 10<<20, length)
		require.True(t, right)
		require.True(t, valid)
		require.EqualValues(t, 10<<20, s.Deliveries()[0].BodyLen)
		require.Equal(t, []int{413, 200}, limits.answer)
		require.Equal(t, map[string]int{"order-1": 1}, limits.times())
	})
}

// C78: one id and another body, one body and another id, one id from two sources.
func TestAnIDIsNotEnoughToKnowAnEventBy(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{Name: "shop"})
		other := careful(t, s, Endpoint{Name: "other", Secrets: []string{secretTwo}, IDPrefix: "oth_"})
		injectDeliveries(t, s,
			DeliveryFault{Kind: OtherBody, Reference: "order-1", Endpoint: "shop"},
			DeliveryFault{Kind: OtherID, Reference: "order-2", Endpoint: "shop"},
			DeliveryFault{Kind: OtherSource, Reference: "order-3", Endpoint: "shop", To: "other"},
		)
		for i := range 3 {
			payFor(t, s, "order-"+strconv.Itoa(i+1))
			settled(t, s)
		}
		copies := map[string]Delivery{}
		first := map[string]Delivery{}
		for _, d := range s.Deliveries() {
			if d.Copy {
				copies[d.Fault] = d
			} else if d.Endpoint == "shop" {
				first[d.Fault] = d
			}
		}
		find := func(prefix string) (original, copied Delivery) {
			for text, d := range copies {
				if strings.HasPrefix(text, prefix) {
					return first[text], d
				}
			}
			t.Fatal("no copy by " + prefix)
			return
		}
		one, again := find("other-body")
		require.Equal(t, one.ID, again.ID)
		require.NotEqual(t, one.BodySHA256, again.BodySHA256)
		require.Equal(t, 200, again.Status)
		require.Equal(t, one.Effect, again.Effect)

		one, again = find("other-id")
		require.NotEqual(t, one.ID, again.ID)
		require.Equal(t, one.BodySHA256, again.BodySHA256)

		one, again = find("other-source")
		require.Equal(t, one.ID, again.ID)
		require.Equal(t, []any{"other", "test.other", 0, "", 200}, []any{again.Endpoint, again.Type, again.Effect, again.Reference, again.Status})
		require.Len(t, s.Deliveries(Filter{Reference: "order-3"}), 3, "it is found with the event whose id it bears")

		require.Equal(t, map[string]int{"order-1": 1, "order-2": 2, "order-3": 1}, r.times())
		require.Equal(t, map[string]int{"order-1": 1, "order-2": 1, "order-3": 1, "": 1}, other.times())
	})
}

func TestAReceiverThatTakesTheIDAloneLosesAnEventOfAnotherSource(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{Name: "shop"})
		other := careful(t, s, Endpoint{Name: "other", Secrets: []string{secretTwo}, IDPrefix: "oth_"})
		r.known = map[string]string{}
		other.known, other.memory = r.known, &r.mu // one memory for both
		injectDeliveries(t, s, DeliveryFault{Kind: OtherSource, Endpoint: "shop", To: "other"})
		payFor(t, s, "order-1")
		settled(t, s)
		require.Equal(t, map[string]int{"order-1": 1}, other.times(), "test.other is lost")
	})
}

// What each careless receiver does, and that the lists show it: otherwise the faults would prove nothing.
func TestCarelessReceiversAreFoundOut(t *testing.T) {
	for name, c := range map[string]struct {
		receiver *receiver
		faults   []DeliveryFault
		want     int // actions for the one order
		noted    bool
	}{
		"careful":                    {&receiver{work: time.Second}, []DeliveryFault{{Kind: Twice, Copies: 9}}, 1, false},
		"check, then act":            {&receiver{work: time.Second, checkThenAct: true}, []DeliveryFault{{Kind: Twice, Copies: 9}}, 10, false},
		"careful, fails":             {&receiver{work: time.Second, fails: 1}, []DeliveryFault{{Kind: Twice, Attempt: 1}}, 1, false},
		"careful, strangers":         {&receiver{}, []DeliveryFault{{Kind: Forged, Attempt: 1}}, 1, false},
		"does not verify":            {&receiver{blind: true}, []DeliveryFault{{Kind: Forged, Attempt: 1}}, 1, true},
		"claims before it verifies":  {&receiver{claimUnproved: true}, []DeliveryFault{{Kind: Unsigned, Attempt: 1}}, 0, false},
		"loses the answer, careful":  {&receiver{}, []DeliveryFault{{Kind: LostAnswer, Times: 3}}, 1, false},
		"does not look at the time":  {&receiver{anyTime: true}, []DeliveryFault{{Kind: OldTimestamp, Times: 1}}, 1, false},
		"careful, days later, again": {&receiver{}, []DeliveryFault{{Kind: Twice, Delay: 71 * time.Hour}}, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *Server) {
				r := c.receiver
				r.at(t, s, Endpoint{})
				injectDeliveries(t, s, c.faults...)
				payFor(t, s, "order-1")
				settled(t, s)
				require.Equal(t, c.want, r.times()["order-1"])
				noted := slices.ContainsFunc(r.acted, func(m notice) bool { return m.note != "" })
				require.Equal(t, c.noted, noted)
			})
		})
	}
}

// An answer of 200 while the first may still fail: the event counts as delivered, and nobody has acted.
func TestAYesTooEarlyLosesTheEvent(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		r := &receiver{work: 40 * time.Second, fails: 1, earlyYes: true} // longer than the server waits
		r.at(t, s, Endpoint{})
		payFor(t, s, "order-1")
		settled(t, s)
		time.Sleep(time.Minute)
		require.Equal(t, []EventState{EventDelivered}, states(s))
		require.Empty(t, r.times(), "the ledger has an effect that nobody acted on")
		require.Len(t, s.Effects(), 1)
	})
}

func TestMixedDeliveriesAreEachActedOnOnce(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		r := careful(t, s, Endpoint{TimeInBody: true})
		injectDeliveries(t, s, MixedDeliveries(0.6, 7)...)
		require.NoError(t, s.Inject(Mixed(0.3, 7)...))
		var group sync.WaitGroup
		const orders = 400
		for worker := range 8 {
			group.Go(func() {
				for i := worker; i < orders; i += 8 {
					c := pay("order-" + strconv.Itoa(i))
					c.body = strings.Replace(c.body, "order-1", c.key, 1)
					settle(s, c)
				}
			})
		}
		group.Wait()
		settled(t, s)
		require.Len(t, s.Effects(), orders)
		times := r.times()
		require.Len(t, times, orders)
		for reference, n := range times {
			require.Equal(t, 1, n, reference)
		}
		hit := map[DeliveryKind]bool{}
		for _, d := range s.Deliveries() {
			kind, _, _ := strings.Cut(strings.ReplaceAll(d.Fault, ",", " "), " ")
			hit[DeliveryKind(kind)] = true
		}
		for _, f := range MixedDeliveries(1, 7) {
			require.True(t, hit[f.Kind], "%s", f)
		}
	})
	require.Nil(t, MixedDeliveries(0, 1))
	require.Nil(t, MixedDeliveries(math.NaN(), 1))
	s := newServer(nil)
	injectDeliveries(t, s, MixedDeliveries(2, 1)...)
	require.NotNil(t, s.chooseDelivery(&event{Event: Event{ID: "x", Attempts: 1}}), "above 1 counts as 1")
}

func TestDeliveryFaultsOfOneSeedShareOneDraw(t *testing.T) {
	s := newServer(nil)
	injectDeliveries(t, s, DeliveryFault{Kind: Twice, Rate: 0.1, Seed: 5}, DeliveryFault{Kind: Forged, Rate: 0.2, Seed: 5}, DeliveryFault{Kind: LostAnswer, Rate: 0.3, Seed: 5})
	require.ErrorContains(t, s.InjectDeliveries(DeliveryFault{Kind: Huge, Rate: 0.5, Seed: 5}), "delivery fault: rate")
	injectDeliveries(t, s, DeliveryFault{Kind: Huge, Rate: 0.5, Seed: 5, Attempt: 2000})
	counts := map[DeliveryKind]int{}
	const attempts = 100_000
	for i := range attempts {
		ev := &event{Event: Event{Key: "order-" + strconv.Itoa(i/4), Attempts: 1 + i%4}}
		if f := s.chooseDelivery(ev); f != nil {
			counts[f.Kind]++
		}
	}
	for kind, rate := range map[DeliveryKind]float64{Twice: 0.1, Forged: 0.2, LostAnswer: 0.3} {
		require.InDelta(t, rate, float64(counts[kind])/attempts, 0.005, "%s", kind)
	}
}

func TestARunOfDeliveriesRepeatsWhateverTheScheduling(t *testing.T) {
	run := func(workers int) map[string]string {
		faults := map[string]string{}
		synctest.Test(t, func(t *testing.T) {
			s := NewInMemory()
			defer s.Close()
			require.NoError(t, s.Register(Endpoint{Handler: http.NotFoundHandler(), Secrets: []string{secretOne}, Parallel: workers}))
			injectDeliveries(t, s, MixedDeliveries(0.5, 42)...)
			work := make(chan string)
			var group sync.WaitGroup
			for range workers {
				group.Go(func() {
					for key := range work {
						pay(key).send(s)
					}
				})
			}
			for i := range 40 {
				work <- "order-" + strconv.Itoa(i)
			}
			close(work)
			group.Wait()
			settled(t, s)
			keys := map[int]string{}
			for _, e := range s.Effects() {
				keys[e.N] = e.Key
			}
			for _, d := range s.Deliveries() {
				if !d.Copy {
					faults[keys[d.Effect]+"/"+strconv.Itoa(d.Attempt)] = d.Fault
				}
			}
		})
		return faults
	}
	one, many := run(1), run(16)
	require.Len(t, one, 400)
	require.Equal(t, one, many)
}

func TestAScriptOfDeliveriesGoesStepByStep(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		a := &answers{list: []http.HandlerFunc{says(500)}}
		require.NoError(t, s.Register(Endpoint{Handler: a, Secrets: []string{secretOne}, Schedule: []time.Duration{1, 1, 1, 1}}))
		require.NoError(t, s.ScriptDeliveries("order-1", DeliveryFault{Kind: Forged}, DeliveryFault{}, DeliveryFault{Kind: Twice}))
		require.NoError(t, s.ScriptDeliveries("", DeliveryFault{Kind: Unsigned}, DeliveryFault{Kind: Unsigned}))
		injectDeliveries(t, s, DeliveryFault{Kind: Reencoded, Reference: "order-1", Times: 1}, DeliveryFault{Kind: LostAnswer, Event: "refund.succeeded"})
		payFor(t, s, "order-1")
		settled(t, s)
		var faults []string
		for _, d := range s.Deliveries() {
			if !d.Copy {
				faults = append(faults, d.Fault)
			}
		}
		require.Equal(t, []string{"forged", "", "twice", "reencoded (reference order-1, at most 1 times)", ""}, faults)
		injectDeliveries(t, s, DeliveryFault{Kind: Twice})
		require.NoError(t, s.ScriptDeliveries("order-2", DeliveryFault{Kind: Forged}))
		s.ClearFaults()
		payFor(t, s, "order-2")
		settled(t, s)
		after := s.Deliveries(Filter{Reference: "order-2"})
		require.Len(t, after, 5)
		for _, d := range after {
			require.Empty(t, d.Fault)
		}
	})
}

func TestAScriptOfDeliveriesRefusesFilters(t *testing.T) {
	s := NewInMemory()
	defer s.Close()
	for field, f := range map[string]DeliveryFault{
		"endpoint": {Kind: Forged, Endpoint: "x"}, "event": {Kind: Forged, Event: "x"}, "reference": {Kind: Forged, Reference: "x"},
		"attempt": {Kind: Forged, Attempt: 1}, "times": {Kind: Forged, Times: 1}, "rate": {Kind: Forged, Rate: 0.5}, "copies": {Kind: Forged, Copies: 2},
	} {
		err := s.ScriptDeliveries("", DeliveryFault{}, f)
		require.ErrorContains(t, err, "fakeserver: delivery fault: "+field+":")
		require.ErrorContains(t, err, "number 2")
	}
}

func TestInvalidDeliveryFaultsNameTheField(t *testing.T) {
	s := NewInMemory()
	defer s.Close()
	for field, faults := range map[string][]DeliveryFault{
		"kind":    {{}, {Kind: "explode"}},
		"delay":   {{Kind: Forged, Delay: 1}, {Kind: Twice, Delay: -1}, {Kind: Huge, Delay: 1}},
		"copies":  {{Kind: Replayed, Copies: 1}, {Kind: Twice, Copies: -1}, {Kind: Twice, Copies: 101}},
		"bytes":   {{Kind: Forged, Bytes: 1}, {Kind: Huge, Bytes: 1023}, {Kind: Huge, Bytes: 1<<30 + 1}},
		"to":      {{Kind: OtherSource}, {Kind: Twice, To: "x"}, {Kind: OtherSource, To: "nobody"}},
		"rate":    {{Kind: Forged, Rate: -0.1}, {Kind: Forged, Rate: 1.1}, {Kind: Forged, Rate: math.NaN()}},
		"attempt": {{Kind: Forged, Attempt: -1}},
		"times":   {{Kind: Forged, Times: -1}},
	} {
		for _, f := range faults {
			require.ErrorContains(t, s.InjectDeliveries(DeliveryFault{Kind: Twice}, f), "fakeserver: delivery fault: "+field+":", "%+v", f)
		}
	}
	require.Empty(t, s.events.faults, "nothing was added")
}

func TestDeliveryFaultsSayWhatTheyAre(t *testing.T) {
	for want, f := range map[string]DeliveryFault{
		"no fault":        {},
		"twice":           {Kind: Twice},
		"delayed 10m0s":   {Kind: Delayed},
		"reordered 5s":    {Kind: Reordered},
		"replayed 10m0s":  {Kind: Replayed},
		"other-body":      {Kind: OtherBody},
		"lost-answer":     {Kind: LostAnswer},
		"unsigned":        {Kind: Unsigned},
		"reencoded":       {Kind: Reencoded},
		"other-id 1s":     {Kind: OtherID, Delay: time.Second},
		"twice, 4 copies": {Kind: Twice, Copies: 4},
		"huge of 10485760 bytes (at most 3 times)":                                      {Kind: Huge, Times: 3},
		"other-source 1h0m0s to b (endpoint a)":                                         {Kind: OtherSource, Delay: time.Hour, To: "b", Endpoint: "a"},
		"forged (payment.succeeded, reference order-1, attempt 2, rate 0.25 of seed 7)": {Kind: Forged, Event: "payment.succeeded", Reference: "order-1", Attempt: 2, Rate: 0.25, Seed: 7},
		"old-timestamp 10m0s":                                                           {Kind: OldTimestamp},
		"future-timestamp 1s":                                                           {Kind: FutureTimestamp, Delay: time.Second},
	} {
		require.Equal(t, want, f.String())
	}
}

func TestDeliveryFaultsTravelAsJSON(t *testing.T) {
	faults := append(MixedDeliveries(0.35, 3), DeliveryFault{
		Kind: OtherSource, Delay: 90 * time.Second, To: "b", Rate: 0.1, Seed: -1, Endpoint: "a", Event: "e", Reference: "r", Attempt: 2, Times: 3,
	}, DeliveryFault{Kind: Huge, Bytes: 4096})
	text, err := json.Marshal(faults)
	require.NoError(t, err)
	require.Contains(t, string(text), `"delay":"1m30s"`)
	back, err := ParseDeliveryFaults(text)
	require.NoError(t, err)
	require.Equal(t, faults, back)
	for text, want := range map[string]string{
		`{"kind":"twice","delay":5}`:    `delay: want a string such as "150ms"`,
		`{"kind":"twice","delay":"5"}`:  `delay: "5" is not a duration`,
		`{"kind":"twice","copies":"4"}`: `copies: want a whole number such as 4`,
		`"twice"`:                       `want an object such as {"kind":"twice"}`,
		`{"kind":"twice","rate":0}`:     `rate: 0 would hit nothing`,
		`{"kind":"twice","attempt":0}`:  `attempt: counts from 1`,
		`{"kind":"twice","times":0}`:    `times: 0 would hit nothing`,
		`{"kind":"twice","send":1}`:     `send: is no field of a delivery fault; there are kind, delay, copies,`,
		`{"kind":"reset"}`:              `kind: unknown kind "reset"; there are delayed, forged,`,
	} {
		_, err := ParseDeliveryFaults([]byte("[" + text + "]"))
		require.ErrorContains(t, err, "fakeserver: delivery faults: number 1, line 1, column 2: fakeserver: delivery fault: "+want, text)
	}
}

func FuzzParseDeliveryFaults(f *testing.F) {
	f.Add([]byte(`[{"kind":"twice","copies":4,"delay":"150ms","reference":"order-1","attempt":1}]`))
	f.Add([]byte(`[{"kind":"huge","bytes":4096,"rate":0.5,"seed":7},{"kind":"other-source","to":"b"}]`))
	f.Add([]byte("[null,"))
	f.Fuzz(func(t *testing.T, text []byte) {
		faults, err := ParseDeliveryFaults(text)
		if err != nil {
			require.Nil(t, faults)
			return
		}
		for _, fault := range faults {
			require.NoError(t, fault.Validate())
			require.NotEmpty(t, fault.String())
		}
		again, err := json.Marshal(faults)
		require.NoError(t, err)
		back, err := ParseDeliveryFaults(again)
		require.NoError(t, err, "%s", again)
		require.Equal(t, faults, back)
	})
}
