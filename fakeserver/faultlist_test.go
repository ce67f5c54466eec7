package fakeserver

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// row is one way in which a call to a payment or booking API goes wrong. It has a test of this package, or a reason why a
// server and its network cannot play it.
type row struct {
	id, what string
	by       string // what plays it here
	tests    string // names, separated by spaces
	reason   string
}

var faultList = []row{
	{id: "A1", what: "connection refused", by: "Refuse, ScriptConns(Refused)", tests: "TestRefusedConnections TestConnectionsThatFailBeforeAnyRequest"},
	{id: "A2", what: "dial without any answer", by: "ScriptConns(BlackHole)", tests: "TestConnectionsThatFailBeforeAnyRequest"},
	{id: "A3", what: "name not found, name server failing", by: "ScriptConns(NoHost, NoNameServer)", tests: "TestConnectionsThatFailBeforeAnyRequest"},
	{id: "A4", what: "TLS handshake stalls or ends in an alert; certificate unknown, expired or of another name", by: "ScriptConns(AcceptSilence, HandshakeAlert, UnknownAuthority, ExpiredCertificate, WrongName)", tests: "TestConnectionsThatFailBeforeAnyRequest"},
	{id: "A5", what: "accepted, then reset or closed unread", by: "ScriptConns(AcceptReset, AcceptClose)", tests: "TestConnectionFaultsWithoutTLS"},
	{id: "A6", what: "proxy refuses the tunnel or hangs", by: "Proxy", tests: "TestProxyRefusesTunnels"},

	{id: "B1", what: "reset between headers and body", by: "reset, Bytes -1", tests: "TestResetInTheRequestBody"},
	{id: "B2", what: "reset within the body; body that breaks off", by: "reset and close, Bytes", tests: "TestResetInTheRequestBody TestResetOfALargeUploadIsSeenByTheWriter TestUploadThatBreaksOffHasNoEffect"},
	{id: "B3", what: "no 100 Continue, or 417", by: "slow-read; early-answer 417", tests: "TestSlowReadHoldsThe100Continue TestExpectationIsAnsweredBeforeTheBody"},
	{id: "B4", what: "final answer before the body was read, then the end", by: "early-answer", tests: "TestEarlyAnswerLeavesTheBodyUnread"},
	{id: "B5", what: "408, 411, 413, 414, 415, 431", by: "status", tests: "TestEveryStatusBeforeTheEffect"},
	{id: "B6", what: "421, 425", by: "status", tests: "TestEveryStatusBeforeTheEffect"},
	{id: "B7", what: "body read slowly or not at all", by: "slow-read; ScriptConns(NoWindow)", tests: "TestSlowReadHoldsThe100Continue TestWindowOfZeroTakesNoBody"},

	{id: "C1", what: "429 with every form of Retry-After", by: "status 429", tests: "TestEveryFormOfRetryAfterReachesTheClient"},
	{id: "C2", what: "500, 502, 503, 504", by: "status, html", tests: "TestStatusBeforeEffectFreesTheKey TestHTMLPageOfAGateway TestEveryStatusBeforeTheEffect"},
	{id: "C3", what: "401 or 403 in the midst of retries", by: "status in a Script", tests: "TestTokenExpiresBetweenTwoAttempts"},
	{id: "C4", what: "409 while the first request runs", by: "slow", tests: "TestRunningKeyIsInProgress"},
	{id: "C5", what: "key reused, missing or malformed", by: "the server itself", tests: "TestReusedKeyIsRefused TestKeyIsRequiredAndChecked"},
	{id: "C6", what: "worker dies with the key reserved", by: "stuck; Broken(ClaimsThenDies)", tests: "TestStuckKeyIsInProgressUntilItsLeaseEnds TestClaimedKeyOfADeadWorkerIsInProgressForEver"},

	{id: "D1", what: "process dies, the effect is undone", by: "slow and Restart", tests: "TestRestartKeepsKeysAndLosesWhatRan"},
	{id: "D2", what: "effect without its key", by: "Broken(EffectThenKey)", tests: "TestEffectThenKeyChargesTwice"},
	{id: "D3", what: "effect later than the client waits", by: "slow", tests: "TestSlowEffectHappensAtTheEndOfTheDelay TestClientThatLeavesDoesNotStopTheEffect"},
	{id: "D4", what: "half of an effect of several steps", reason: "the ledger counts whole effects; a stub of Handle can have steps of its own"},

	{id: "E1", what: "closed without an answer", by: "close", tests: "TestCloseBeforeAndAfterTheEffect"},
	{id: "E2", what: "reset without an answer", by: "reset", tests: "TestResetAfterEffectLeavesOneEffect"},
	{id: "E3", what: "answer held back", by: "late, hang", tests: "TestLateAnswerIsTooLateForTheClient TestHangEndsWhenTheClientLeaves"},
	{id: "E4", what: "5xx in the place of the answer", by: "status, html", tests: "TestStatusAfterEffectKeepsTheTrueAnswer"},
	{id: "E5", what: "5xx stored and replayed", by: "stored-failure; Failures", tests: "TestStoredFailureWithAndWithoutEffect TestStoredFailuresAreReplayed"},
	{id: "E6", what: "409 although it is done", by: "status 409", tests: "TestConflictAlthoughItIsDone"},
	{id: "E7", what: "key forgotten early", by: "Retention, Advance", tests: "TestRetentionEndsAndTheKeyExecutesAgain"},
	{id: "E8", what: "replay that differs or is not marked", by: "Broken(OtherReplay)", tests: "TestOtherReplayIsNotTheFirstAnswer"},

	{id: "F1", what: "cut in the status line or a header", by: "cut-headers", tests: "TestCutHeadersLeaveOneEffect"},
	{id: "F2", what: "headers without measure", by: "big-headers", tests: "TestHeadersTooBigForTheClient"},
	{id: "F3", what: "1xx without end", by: "flood", tests: "TestFloodOfEarlyHintsNeverAnswers"},
	{id: "F4", what: "not HTTP", by: "garbage", tests: "TestGarbageIsNotHTTP"},

	{id: "G1", what: "shorter than its Content-Length", by: "cut-body", tests: "TestCutBodyIsAnUnexpectedEnd"},
	{id: "G2", what: "chunks that are wrong or missing", by: "cut-body chunked, bad-chunk", tests: "TestCutBodyIsAnUnexpectedEnd TestChunkSizeThatIsNoNumber"},
	{id: "G3", what: "drop by drop, or no more", by: "trickle, late, endless", tests: "TestTrickleSendsByteByByte TestLateBodyComesAfterItsHeaders TestEndlessBodyEndsWhenTheClientLeaves"},
	{id: "G4", what: "gzip that inflates or is damaged", by: "bomb; cut-body gzip", tests: "TestGzipBombInflates TestCutBodyIsAnUnexpectedEnd"},
	{id: "G5", what: "not the document that was promised", by: "mangled; html 200", tests: "TestMangledAnswerIsWholeButNotJSON TestHTMLPageOfAGateway"},

	{id: "H1", what: "kept connection that is dead", by: "stale", tests: "TestStaleConnectionDiesUnderTheNextRequest"},
	{id: "H2", what: "second answer that nobody asked for", by: "extra", tests: "TestExtraAnswerIsNotTheNextRequests"},
	{id: "H3", what: "redirects, to the same and to another origin", by: "redirect", tests: "TestRedirectToTheOtherOrigin TestSeeOtherAfterTheEffectPointsToTheResource"},

	{id: "I1", what: "stream refused", by: "stream-reset REFUSED_STREAM", tests: "TestStreamResetBeforeAndAfterTheEffect TestRefusedStreamIsSentAgainByNetHTTP"},
	{id: "I2", what: "GOAWAY below, at and above the stream", by: "go-away", tests: "TestGoAwayBelowAtAndAboveTheStream TestGoAwayBelowTheStreamIsSentAgainByNetHTTP"},
	{id: "I3", what: "stream reset after the effect", by: "stream-reset", tests: "TestStreamResetBeforeAndAfterTheEffect"},
	{id: "I4", what: "peer that is silent, or grants one stream or no window", by: "freeze; ScriptConns(NoSettings, NoWindow, OneStream)", tests: "TestFrozenConnectionSwallowsWhatIsSent TestConnectionsThatFailBeforeAnyRequest TestWindowOfZeroTakesNoBody TestOneStreamAtATime"},
	{id: "I5", what: "stream that does not end; CONTINUATION without measure", by: "late and endless over HTTP/2; big-headers", tests: "TestOlderFaultsOverHTTP2 TestContinuationFramesTooManyForTheClient"},

	{id: "J1", what: "request delivered twice: at once, later, after the key's end", by: "duplicate", tests: "TestConcurrentCopyHasNoSecondEffect TestCopyAfterSuccessIsReplayed TestCopyAfterTheKeysEndExecutesAgain"},
	{id: "J2", what: "first attempt arrives after the second", by: "slow-read", tests: "TestFirstAttemptArrivesAfterTheSecond"},
	{id: "J3", what: "requests pass, answers do not", by: "hang after the effect", tests: "TestAnswersAreLostForAWhile"},
	{id: "J4", what: "gateway answers while the origin goes on", by: "html and status during the effect; duplicate during the effect", tests: "TestGatewayAnswersWhileTheEffectIsStillToCome TestImpatientGatewayPassesOnTheCopysAnswer"},
	{id: "J5", what: "many connections end at once", by: "Restart", tests: "TestRestartKeepsKeysAndLosesWhatRan TestRestartOverHTTP2 TestRestartInTheMidstOfManyPayments"},

	{id: "K1", what: "clocks that disagree or jump", reason: "the client's clock is not the server's to set; Retry-After dates of any kind are in C1"},
	{id: "L1", what: "client killed or stopped between two steps", reason: "belongs to the journal: the server sees only that a client leaves"},
	{id: "L2", what: "disk of the client full or failing", reason: "belongs to the journal: the server does not touch the client's disk"},
	{id: "M1", what: "overload that feeds itself", reason: "answers do not depend on load here; it takes a model with a queue"},
	{id: "W1", what: "webhook deliveries twice, late, out of order or forged", by: "InjectDeliveries, every kind", tests: "TestTheTableOfDeliveryFaultsIsTrue TestCopiesArriveTogetherAndSignedAtOtherTimes TestReorderedEventsArriveBehindLaterOnes TestStrangersComeBeforeTheGenuineDelivery TestAnIDIsNotEnoughToKnowAnEventBy TestAHugeDeliveryIsTenMiBAndRightlySigned TestMixedDeliveriesAreEachActedOnOnce"},
}

func TestFaultList(t *testing.T) {
	tests := map[string]bool{}
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	for _, name := range files {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		file, err := parser.ParseFile(token.NewFileSet(), name, source, 0)
		require.NoError(t, err)
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
				tests[f.Name.Name] = true
			}
		}
	}
	ids := map[string]bool{}
	covered := 0
	for _, r := range faultList {
		require.False(t, ids[r.id], "%s occurs twice", r.id)
		ids[r.id] = true
		if r.reason != "" {
			require.Empty(t, r.tests, r.id)
			t.Logf("%s  %s: not here, %s", r.id, r.what, r.reason)
			continue
		}
		covered++
		require.NotEmpty(t, r.by, r.id)
		require.NotEmpty(t, strings.Fields(r.tests), "%s has neither a test nor a reason", r.id)
		for _, name := range strings.Fields(r.tests) {
			require.True(t, tests[name], "%s: there is no test %s", r.id, name)
		}
		t.Logf("%s  %s: %s [%s]", r.id, r.what, r.by, r.tests)
	}
	require.Len(t, faultList, 58)
	for kind := range kinds {
		require.True(t, slices.ContainsFunc(faultList, func(r row) bool { return strings.Contains(r.by, string(kind)) }),
			"no row is played by %s", kind)
	}
	t.Logf("%d of %d have a test here", covered, len(faultList))
}

func TestEveryStatusBeforeTheEffect(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		for _, status := range []int{408, 411, 413, 414, 415, 421, 425, 431, 500, 502, 503, 504} {
			require.NoError(t, s.Script("order-1", Fault{Kind: Status, Status: status}))
			require.Equal(t, status, pay("order-1").send(s).status)
			require.Empty(t, s.Effects())
		}
		require.Equal(t, 201, pay("order-1").send(s).status)
	})
}

func TestTokenExpiresBetweenTwoAttempts(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		require.NoError(t, s.Script("order-1", Fault{Kind: Reset, Point: AfterEffect}, Fault{Kind: Status, Status: 401}, Fault{Kind: Status, Status: 403}))
		require.Error(t, pay("order-1").send(s).err)
		require.Equal(t, 401, pay("order-1").send(s).status)
		require.Equal(t, 403, pay("order-1").send(s).status)
		require.Equal(t, 201, requireReplay(t, s, pay("order-1")).status)
	})
}

func TestConflictAlthoughItIsDone(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Status, Status: 409, RetryAfter: "1", Point: AfterEffect, Send: 1})
		require.Equal(t, 409, pay("order-1").send(s).status)
		require.Len(t, s.Effects(), 1)
		requireReplay(t, s, pay("order-1"))
	})
}

func TestCopyAfterTheKeysEndExecutesAgain(t *testing.T) {
	inMemory(t, func(t *testing.T, s *Server) {
		s.Apply(Settings{Retention: time.Hour})
		inject(t, s, Fault{Kind: Duplicate, Point: AfterEffect, Delay: 2 * time.Hour, Send: 1})
		require.Equal(t, 201, pay("order-1").send(s).status)
		time.Sleep(3 * time.Hour)
		require.Len(t, s.Effects(), 2, "nothing but the window protects from this")
	})
}

func TestFirstAttemptArrivesAfterTheSecond(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		longEnough(t, time.Second, func(delay time.Duration) bool {
			key := "order " + delay.String()
			sends := func() []Send { return s.Sends(Filter{Key: key}) }
			inject(t, s, Fault{Kind: SlowRead, Delay: delay, Key: key, Send: 1})
			first := pay(key)
			first.from, first.within = func() bool { return len(sends()) == 1 }, 100*time.Millisecond
			require.ErrorIs(t, first.send(s).err, context.Canceled)
			require.Equal(t, 201, pay(key).send(s).status)
			soon(t, func() bool { n := sends(); return !n[0].Ended.IsZero() && !n[1].Ended.IsZero() })
			n := sends()
			if n[1].Ended.Sub(n[0].At) >= delay {
				return false
			}
			require.Len(t, s.Effects(Filter{Key: key}), 1)
			require.Zero(t, n[0].Effect)
			require.EqualValues(t, len(payments1999), n[0].BodyLen, "it did arrive")
			require.True(t, n[0].Replayed)
			require.NotZero(t, n[1].Effect)
			return true
		})
	})
}

func TestAnswersAreLostForAWhile(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Hang, Point: AfterEffect, Times: 3})
		for i := range 3 {
			c := pay("order-1")
			c.within = 50 * time.Millisecond
			c.from = func() bool { n := s.Sends(); return len(n) == i+1 && (n[i].Effect != 0 || n[i].Replayed) }
			require.ErrorIs(t, c.send(s).err, context.Canceled)
		}
		require.Len(t, s.Effects(), 1)
		requireReplay(t, s, pay("order-1"))
	})
}

func TestRestartInTheMidstOfManyPayments(t *testing.T) {
	inBothWorlds(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: Slow, Delay: 50 * time.Millisecond})
		client := &http.Client{Transport: s.Transport()}
		var group sync.WaitGroup
		for i := range 20 {
			c := pay(strings.Repeat("k", i+1))
			c.client = client
			group.Go(func() {
				for range ticks {
					if c.send(s).status == 201 {
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
			time.Sleep(5 * time.Millisecond)
		}
		s.Restart()
		group.Wait()
		require.Len(t, s.Effects(), 20)
		for i := range 20 {
			require.Len(t, s.Effects(Filter{Key: strings.Repeat("k", i+1)}), 1)
		}
	})
}
