package idem_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// At a server that gets keys wrong the promise of one effect cannot be kept:
// every retry may execute again, and the server's word is all that a client
// has. What stays true at each of them: one key for an operation, nothing is
// said to be refused or not executed that has an effect, and where a retry may
// have doubled it the report says so: EarlierUnknown.

var (
	answerLost  = fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}
	requestLost = fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.BeforeEffect}
)

// atBroken runs a test in virtual time at a server that gets it wrong.
func atBroken(t *testing.T, b fakeserver.Breakage, test func(t *testing.T, s *fakeserver.Server)) {
	t.Helper()
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Broken(b))
		test(t, s)
	})
}

// charge makes one call through a Transport of its own, as another process
// would, and returns what it was told.
func charge(t *testing.T, ctx context.Context, s *fakeserver.Server, body string, edit ...func(*idem.Transport)) (report idem.Report, status int, answer string) {
	t.Helper()
	req := newPost(t, idem.WithReport(ctx, &report), s.URL()+"/v1/payments", body)
	resp, err := over(s, edit...).RoundTrip(req)
	if err != nil {
		return report, 0, ""
	}
	return report, resp.StatusCode, readAll(t, resp)
}

const declinedJSON = `{"amount":1999,"currency":"usd","reference":"order-1","source":"tok_declined"}`

func scriptAll(t *testing.T, s *fakeserver.Server, faults ...fakeserver.Fault) {
	t.Helper()
	require.NoError(t, s.Script("", faults...))
}

// requirePossibleDouble requires that the report warns: an earlier send may
// have been executed, and the answer is not the stored one.
func requirePossibleDouble(t *testing.T, r idem.Report) {
	t.Helper()
	require.Equal(t, idem.Executed, r.Outcome)
	require.True(t, r.EarlierUnknown)
	require.False(t, r.Replayed)
}

func TestIgnoredKeysDoubleALostAnswerAndTheReportShowsIt(t *testing.T) {
	atBroken(t, fakeserver.IgnoresKeys, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, answerLost)
		report, status, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
		// Unavoidable: the retry is right at any server that knows keys.
		require.Len(t, s.Effects(), 2)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Equal(t, http.StatusCreated, status)
		requirePossibleDouble(t, report)
		require.Equal(t, []idem.Outcome{idem.Unknown, idem.Executed}, []idem.Outcome{report.Attempts[0].Outcome, report.Attempts[1].Outcome})
	})
}

func TestNoKeysIsTheDialectForAServerThatIgnoresThem(t *testing.T) {
	atBroken(t, fakeserver.IgnoresKeys, func(t *testing.T, s *fakeserver.Server) {
		settings := fakeserver.Broken(fakeserver.IgnoresKeys)
		settings.Optional = true
		s.Apply(settings)
		scriptAll(t, s, answerLost)
		report, _, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999), speaking(idem.NoKeys))
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.Equal(t, idem.Unknown, report.Outcome)

		s.Refuse(2)
		report, _, _ = charge(t, t.Context(), s, paymentJSON("order-2", 1999), speaking(idem.NoKeys))
		require.Len(t, s.Effects(fakeserver.Filter{Reference: "order-2"}), 1)
		require.Equal(t, idem.Executed, report.Outcome)
		require.False(t, report.EarlierUnknown)
	})
}

// The last room is booked, the answer lost, and the retry executed anew: it
// finds no room.
func TestRefusalAtAServerThatIgnoresKeysIsNotTakenForTheFirstSends(t *testing.T) {
	for _, b := range []fakeserver.Breakage{fakeserver.IgnoresKeys, fakeserver.KeysPerReplica, fakeserver.EffectThenKey} {
		atBroken(t, b, func(t *testing.T, s *fakeserver.Server) {
			s.SetRooms("ritz", "double", 1)
			scriptAll(t, s, answerLost)
			resp, err := over(s).RoundTrip(newPost(t, t.Context(), s.URL()+"/v1/hotels/ritz/reservations",
				`{"room_type":"double","guest":"Ada","reference":"trip-1"}`))
			require.NoError(t, err)
			readAll(t, resp)
			require.Len(t, s.Effects(), 1)
			require.Equal(t, http.StatusUnprocessableEntity, resp.StatusCode)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil), "sold out, to ourselves")
			require.True(t, idem.ReportOf(resp).EarlierUnknown)
		})
	}
}

// A Refusal mark is the user's word that the provider de-duplicates: then an
// answer that only the operation gives speaks for all sends of the key. At a
// server that executes twice that word is false, and so is the claim; no
// client can see it. The report has the warning even so.
func TestRefusalMarkIsBelievedAndTheReportStillWarns(t *testing.T) {
	atBroken(t, fakeserver.IgnoresKeys, func(t *testing.T, s *fakeserver.Server) {
		d := idem.Generic
		d.Refusal = []idem.Mark{{Status: http.StatusUnprocessableEntity, Pointer: "/type", Contains: "sold-out"}}
		s.SetRooms("ritz", "double", 1)
		scriptAll(t, s, answerLost)
		resp, err := over(s, speaking(d)).RoundTrip(newPost(t, t.Context(), s.URL()+"/v1/hotels/ritz/reservations",
			`{"room_type":"double","guest":"Ada","reference":"trip-1"}`))
		require.NoError(t, err)
		readAll(t, resp)
		report := idem.ReportOf(resp)
		require.Equal(t, idem.Refused, report.Outcome)
		require.True(t, report.EarlierUnknown)
		require.False(t, report.Replayed)
	})
}

func TestSeenFlagAfterALostAnswerIsExecutedWithoutTheAnswer(t *testing.T) {
	atBroken(t, fakeserver.SeenFlag, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, answerLost)
		d := idem.Generic
		d.Reference = []string{"/id"}
		report, status, answer := charge(t, t.Context(), s, paymentJSON("order-1", 1999), speaking(d))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, http.StatusOK, status)
		require.Empty(t, answer)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Empty(t, report.Reference, "no id is made up")
		require.True(t, report.EarlierUnknown)
		require.False(t, report.Replayed)
	})
}

func TestSeenFlagTurnsALostDeclineIntoASuccess(t *testing.T) {
	atBroken(t, fakeserver.SeenFlag, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, answerLost)
		report, status, answer := charge(t, t.Context(), s, declinedJSON)
		// Unavoidable: the server says 200. That it is empty, and that the
		// answer to the first send was lost, is all there is to see.
		require.Empty(t, s.Effects())
		require.Equal(t, http.StatusOK, status)
		require.Empty(t, answer)
		requirePossibleDouble(t, report)
	})
	atBroken(t, fakeserver.SeenFlag, func(t *testing.T, s *fakeserver.Server) {
		report, status, _ := charge(t, t.Context(), s, declinedJSON)
		require.Equal(t, http.StatusPaymentRequired, status, "an answer that arrives is not asked for again")
		require.Equal(t, idem.Refused, report.Outcome)
		require.Len(t, s.Sends(), 1)
	})
}

func TestFlatConflictIsNeitherSuccessNorRefusal(t *testing.T) {
	for body, effects := range map[string]int{paymentJSON("order-1", 1999): 1, declinedJSON: 0} {
		atBroken(t, fakeserver.FlatConflict, func(t *testing.T, s *fakeserver.Server) {
			scriptAll(t, s, answerLost)
			report, status, _ := charge(t, t.Context(), s, body)
			require.Len(t, s.Effects(), effects)
			require.Len(t, s.Sends(), 2, "without Retry-After and mark it is final")
			require.Equal(t, http.StatusConflict, status)
			require.Equal(t, idem.Unknown, report.Outcome)
			require.NoError(t, report.Reason)

			report, _, _ = charge(t, idem.WithKey(t.Context(), report.Key), s, body)
			require.Len(t, s.Effects(), effects)
			require.Equal(t, idem.Unknown, report.Outcome, "nor does the next process make more of it")
		})
	}
}

// Whoever lists the bare 409 as already done says that only successes are
// remembered. This server remembers a decline in the same way.
func TestFlatConflictAsAlreadyDoneIsTheUsersWord(t *testing.T) {
	for body, effects := range map[string]int{paymentJSON("order-1", 1999): 1, declinedJSON: 0} {
		atBroken(t, fakeserver.FlatConflict, func(t *testing.T, s *fakeserver.Server) {
			d := idem.Generic
			d.AlreadyDone = []idem.Mark{{Status: http.StatusConflict}}
			scriptAll(t, s, answerLost)
			report, _, _ := charge(t, t.Context(), s, body, speaking(d))
			require.Len(t, s.Effects(), effects)
			require.Len(t, keysSent(s.Sends()), 1)
			require.Equal(t, idem.Executed, report.Outcome)
			require.ErrorIs(t, report.Reason, idem.ErrAlreadyDone, "read the resource at the provider")
			require.Empty(t, report.Reference)
			require.True(t, report.EarlierUnknown)
		})
	}
}

func TestOtherReplayIsExecutedOnce(t *testing.T) {
	atBroken(t, fakeserver.OtherReplay, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, answerLost)
		d := idem.Generic
		d.Reference = []string{"/id"}
		report, status, answer := charge(t, t.Context(), s, paymentJSON("order-1", 1999), speaking(d))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, http.StatusOK, status)
		require.JSONEq(t, `{"status":"already processed"}`, answer)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Empty(t, report.Reference)
		require.False(t, report.Replayed, "nothing marks it")
	})
}

func TestScopeKeepsTwoCallersApartWhereTheServerDoesNot(t *testing.T) {
	atBroken(t, fakeserver.UnscopedKeys, func(t *testing.T, s *fakeserver.Server) {
		for _, caller := range []string{"ada", "bob"} {
			as := func(tr *idem.Transport) {
				tr.Scope = func(*http.Request) string { return caller }
				tr.Prepare = func(r *http.Request) error {
					r.Header.Set("Authorization", "Bearer "+caller+".1")
					return nil
				}
			}
			ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "1"})
			report, _, _ := charge(t, ctx, s, paymentJSON("order-"+caller, 1999), as)
			require.Equal(t, idem.Executed, report.Outcome)
			require.False(t, report.Replayed)
			report, _, _ = charge(t, ctx, s, paymentJSON("order-"+caller, 1999), as)
			require.True(t, report.Replayed)
		}
		require.Len(t, s.Effects(), 2)
		require.Len(t, keysSent(s.Sends()), 2, "the scope is in the key")
	})
}

// Without a scope the two processes send one key. The second caller is told of
// the first one's payment, and its own was never made: the server's fault, and
// unavoidable. A replay in the first attempt of a key that nobody should
// have used is what the report shows.
func TestUnscopedKeysGiveTheSecondCallerTheFirstOnesAnswer(t *testing.T) {
	atBroken(t, fakeserver.UnscopedKeys, func(t *testing.T, s *fakeserver.Server) {
		var told []idem.Report
		for _, caller := range []string{"ada", "bob"} {
			report, status, _ := charge(t, idem.WithKey(t.Context(), "1"), s, paymentJSON("order-1", 1999), func(tr *idem.Transport) {
				tr.Prepare = func(r *http.Request) error {
					r.Header.Set("Authorization", "Bearer "+caller+".1")
					return nil
				}
			})
			require.Equal(t, http.StatusCreated, status)
			told = append(told, report)
		}
		require.Len(t, s.Effects(), 1)
		require.False(t, told[0].Replayed)
		require.True(t, told[1].Replayed)
		require.Len(t, told[1].Attempts, 1)
		require.False(t, told[1].EarlierUnknown)

		report, _, _ := charge(t, idem.WithKey(t.Context(), "1"), s, paymentJSON("order-2", 2999))
		require.Len(t, s.Effects(), 1)
		require.ErrorIs(t, report.Reason, idem.ErrKeyReused)
		require.Equal(t, idem.Unknown, report.Outcome)
	})
}

func TestKeysPerReplicaDoubleALostAnswerAndTheReportShowsIt(t *testing.T) {
	atBroken(t, fakeserver.KeysPerReplica, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, answerLost)
		report, _, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
		require.Len(t, s.Effects(), 2) // unavoidable: the other replica knows nothing of the key
		require.Len(t, keysSent(s.Sends()), 1)
		requirePossibleDouble(t, report)

		report, _, _ = charge(t, idem.WithKey(t.Context(), report.Key), s, paymentJSON("order-1", 1999))
		require.Len(t, s.Effects(), 2)
		require.True(t, report.Replayed)
	})
	atBroken(t, fakeserver.KeysPerReplica, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, requestLost, fakeserver.Fault{Kind: fakeserver.Status, Status: 503})
		report, _, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
		require.Len(t, s.Effects(), 1, "what was not executed does no harm")
		requirePossibleDouble(t, report) // which the client cannot know
	})
}

func TestKeysForgottenAtARestartWithinAnOperation(t *testing.T) {
	for _, c := range []struct {
		name    string
		fault   fakeserver.Fault // it holds the answer or the effect until the server restarts
		effects int
	}{
		// Unavoidable: the new process knows neither the key nor that the
		// charge was made.
		{"after the effect", fakeserver.Fault{Kind: fakeserver.Late, Delay: time.Minute}, 2},
		{"before the effect", fakeserver.Fault{Kind: fakeserver.Slow, Delay: time.Minute}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			atBroken(t, fakeserver.ForgetsAtRestart, func(t *testing.T, s *fakeserver.Server) {
				scriptAll(t, s, c.fault)
				time.AfterFunc(time.Second, s.Restart)
				report, _, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
				require.Len(t, s.Effects(), c.effects)
				require.Len(t, keysSent(s.Sends()), 1)
				requirePossibleDouble(t, report)
				require.Len(t, report.Attempts, 2)
			})
		})
	}
	t.Run("no restart", func(t *testing.T) {
		atBroken(t, fakeserver.ForgetsAtRestart, func(t *testing.T, s *fakeserver.Server) {
			scriptAll(t, s, answerLost)
			report, _, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
			require.Len(t, s.Effects(), 1)
			require.Equal(t, idem.Executed, report.Outcome)
			require.True(t, report.Replayed)
		})
	})
}

func TestKeyOfADeadWorkerEndsInProgressAndUnknown(t *testing.T) {
	atBroken(t, fakeserver.ClaimsThenDies, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, fakeserver.Fault{Kind: fakeserver.Status, Status: 503})
		start := time.Now()
		report, status, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
		require.Empty(t, s.Effects())
		require.Equal(t, idem.Unknown, report.Outcome, "nothing was executed, but who can know")
		require.ErrorIs(t, report.Reason, idem.ErrInProgress)
		require.Equal(t, http.StatusConflict, status)
		require.Len(t, s.Sends(), 1+1+10, "the default has 10 waits")
		require.Len(t, keysSent(s.Sends()), 1)
		require.GreaterOrEqual(t, time.Since(start), 10*time.Second)

		time.Sleep(25 * time.Hour) // the server has forgotten
		report, _, _ = charge(t, idem.WithKey(t.Context(), report.Key), s, paymentJSON("order-1", 1999))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, idem.Executed, report.Outcome)
	})
}

func TestLeaseOfADeadWorkerIsWaitedOut(t *testing.T) {
	atBroken(t, fakeserver.ClaimsThenDies, func(t *testing.T, s *fakeserver.Server) {
		settings := fakeserver.Broken(fakeserver.ClaimsThenDies)
		settings.Lease = 3 * time.Second
		s.Apply(settings)
		scriptAll(t, s, requestLost)
		start := time.Now()
		report, _, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Equal(t, 2, report.Attempts[len(report.Attempts)-1].N, "waits are no attempts")
		require.GreaterOrEqual(t, time.Since(start), 3*time.Second)
		require.Less(t, time.Since(start), 5*time.Second)
	})
}

func TestEffectThenKeyDoublesACrashAndTheReportShowsIt(t *testing.T) {
	atBroken(t, fakeserver.EffectThenKey, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, answerLost)
		report, _, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
		require.Len(t, s.Effects(), 2) // unavoidable: the key was lost with the answer
		require.Len(t, keysSent(s.Sends()), 1)
		requirePossibleDouble(t, report)
	})
}

// The network delivers twice what was sent once: nothing of it is to be seen.
func TestEffectThenKeyDoublesWhatTheNetworkDoubles(t *testing.T) {
	atBroken(t, fakeserver.EffectThenKey, func(t *testing.T, s *fakeserver.Server) {
		scriptAll(t, s, fakeserver.Fault{Kind: fakeserver.Duplicate})
		report, _, _ := charge(t, t.Context(), s, paymentJSON("order-1", 1999))
		require.Len(t, s.Effects(), 2) // unavoidable
		require.Equal(t, idem.Executed, report.Outcome)
		require.Equal(t, 1, report.Sends)
		require.False(t, report.EarlierUnknown)
	})
}

func TestTwinsOfOneProcessDoNotRaceAtEffectThenKey(t *testing.T) {
	twins := func(t *testing.T, s *fakeserver.Server, of func(i int) *idem.Transport) (replayed int) {
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: 100 * time.Millisecond}))
		ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-1/1"})
		var reports [4]idem.Report
		var callers sync.WaitGroup
		for i := range reports {
			req := newPayment(t, idem.WithReport(ctx, &reports[i]), s, "order-1")
			callers.Go(func() {
				if resp, err := of(i).RoundTrip(req); err == nil {
					_ = resp.Body.Close()
				}
			})
		}
		callers.Wait()
		require.Len(t, keysSent(s.Sends()), 1)
		for _, r := range reports {
			require.Equal(t, idem.Executed, r.Outcome)
			if r.Replayed {
				replayed++
			}
		}
		return replayed
	}
	atBroken(t, fakeserver.EffectThenKey, func(t *testing.T, s *fakeserver.Server) {
		shared := over(s)
		require.Equal(t, 3, twins(t, s, func(int) *idem.Transport { return shared }))
		require.Len(t, s.Effects(), 1, "they run one at a time")
	})
	atBroken(t, fakeserver.EffectThenKey, func(t *testing.T, s *fakeserver.Server) {
		twins(t, s, func(int) *idem.Transport { return over(s) })
		require.Greater(t, len(s.Effects()), 1) // unavoidable: four processes meet at the server only
	})
}

// One effect for each operation: that they share a room is the affair of the hotel.
func TestRoomThatIsSoldTwiceIsTwoOperationsWithOneEffectEach(t *testing.T) {
	atBroken(t, fakeserver.SellsTwice, func(t *testing.T, s *fakeserver.Server) {
		s.SetRooms("ritz", "double", 1)
		tr := over(s)
		var guests sync.WaitGroup
		var reports [2]idem.Report
		for i := range reports {
			req := newPost(t, idem.WithReport(t.Context(), &reports[i]), s.URL()+"/v1/hotels/ritz/reservations",
				fmt.Sprintf(`{"room_type":"double","guest":"Ada","reference":"trip-%d"}`, i))
			guests.Go(func() {
				if resp, err := tr.RoundTrip(req); err == nil {
					_ = resp.Body.Close()
				}
			})
		}
		guests.Wait()
		s.AssertOneEffectPerOperation(t)
		for _, r := range reports {
			require.Equal(t, idem.Executed, r.Outcome)
			require.False(t, r.EarlierUnknown)
		}
	})
}

// Whatever the server gets wrong: what is said to be refused or not executed
// has no effect, the key is one, and no success is claimed without an answer
// of the server that says so.
func TestNoDenialIsFalseAtAnyBrokenServer(t *testing.T) {
	faults := []fakeserver.Fault{
		{},
		answerLost, requestLost,
		{Kind: fakeserver.Status, Status: 503}, {Kind: fakeserver.Status, Status: 503, Point: fakeserver.AfterEffect},
		{Kind: fakeserver.Status, Status: 401}, {Kind: fakeserver.Status, Status: 404},
		{Kind: fakeserver.Status, Status: 503, Point: fakeserver.DuringEffect, Delay: 1500 * time.Millisecond},
		{Kind: fakeserver.CutBody}, {Kind: fakeserver.Hang}, {Kind: fakeserver.Slow, Delay: 1500 * time.Millisecond},
		{Kind: fakeserver.Stuck, Delay: 1500 * time.Millisecond},
		// Of two copies at once the client may hear the one that came second: no client can see through that.
		{Kind: fakeserver.Duplicate, Point: fakeserver.AfterEffect},
	}
	const payments, rooms = "/v1/payments", "/v1/hotels/ritz/reservations"
	asked := []struct{ path, body string }{
		{payments, paymentJSON("order-1", 1999)},
		{payments, declinedJSON},
		{rooms, `{"room_type":"double","guest":"Ada","reference":"order-1"}`}, // the last one
		{rooms, `{"room_type":"single","guest":"Ada","reference":"order-1"}`}, // there is none
	}
	for _, b := range []fakeserver.Breakage{
		fakeserver.SeenFlag, fakeserver.FlatConflict, fakeserver.OtherReplay, fakeserver.UnscopedKeys, fakeserver.KeysPerReplica,
		fakeserver.ForgetsAtRestart, fakeserver.ClaimsThenDies, fakeserver.EffectThenKey, fakeserver.SellsTwice, fakeserver.IgnoresKeys,
	} {
		t.Run(string(b), func(t *testing.T) {
			for i, first := range faults {
				for j, second := range append(faults[:3:3], fakeserver.Fault{Kind: fakeserver.Status, Status: 404}) {
					for _, what := range asked {
						named := (i+j)%2 == 1
						atBroken(t, b, func(t *testing.T, s *fakeserver.Server) {
							s.SetRooms("ritz", "double", 1)
							scriptAll(t, s, first, second)
							ctx := t.Context()
							if named {
								ctx = idem.WithOperation(ctx, idem.Operation{Name: "thing", ID: "order-1/1"})
							}
							var r idem.Report
							tr := over(s, func(tr *idem.Transport) {
								tr.Policy.AttemptTimeout = time.Second
								tr.Policy.MaxInProgress = 3
							})
							resp, err := tr.RoundTrip(newPost(t, idem.WithReport(ctx, &r), s.URL()+what.path, what.body))
							if err == nil {
								readAll(t, resp)
							}
							time.Sleep(5 * time.Second) // what still runs there
							effects := len(s.Effects())
							at := fmt.Sprintf("%v, then %v, %s: %+v", first, second, what.body, r)
							require.Len(t, keysSent(s.Sends()), 1, at)
							require.Len(t, s.Sends(), r.Sends+copies(s), at)
							switch {
							case r.Outcome == idem.Refused, r.Outcome == idem.NotExecuted:
								require.Zero(t, effects, at)
							case r.Outcome == idem.Executed:
								require.NoError(t, err, at)
								require.Equal(t, 2, resp.StatusCode/100, at)
							}
							if effects > 1 && first.Kind != fakeserver.Duplicate && second.Kind != fakeserver.Duplicate {
								require.True(t, r.EarlierUnknown, at)
							}
						})
					}
				}
			}
		})
	}
}

// copies counts what the network delivered again.
func copies(s *fakeserver.Server) (n int) {
	for _, send := range s.Sends() {
		if send.Duplicate {
			n++
		}
	}
	return n
}
