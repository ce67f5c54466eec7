package interop_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-retryablehttp"
	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/retryable"
)

// nodeServer is node/server.mjs in a process of its own, behind a relay.
type nodeServer struct {
	*relay
	direct string
}

func nodeBehindRelay(t *testing.T) *nodeServer {
	t.Helper()
	if _, err := os.Stat(filepath.Join("node", "node_modules", "@node-idempotency", "core")); err != nil {
		require.FailNow(t, "the npm packages are not installed; run scripts/services at the root of the repository first", err.Error())
	}
	cmd := exec.Command("node", "server.mjs")
	cmd.Dir = "node"
	var complaints strings.Builder
	cmd.Stderr = &complaints
	in, err := cmd.StdinPipe() // it ends with its input, also if this process is killed
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start(), "scripts/services says which Node.js is needed")
	stop := sync.OnceFunc(func() {
		_ = in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	t.Cleanup(stop)
	port, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		stop() // and what it complains of is complete
		require.NoError(t, err, complaints.String())
	}
	addr := "127.0.0.1:" + strings.TrimSpace(port)
	return &nodeServer{relay: inFront(t, addr), direct: "http://" + addr}
}

// handler changes what the handler does, by the words of server.mjs.
func (s *nodeServer) handler(t *testing.T, does string) {
	t.Helper()
	c := post(t, idem.WithoutKey(t.Context()), loopback(t), s.direct+"/handler", does)
	require.NoError(t, c.err)
	require.Equal(t, 200, c.status)
}

// made is how many effects there are, by reference, and how often the handler
// ran.
func (s *nodeServer) made(t *testing.T) (effects map[string]int, calls int) {
	t.Helper()
	resp, err := (&http.Client{Transport: loopback(t)}).Get(s.direct + "/effects")
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	var out struct {
		Effects map[string]int
		Calls   int
	}
	require.NoError(t, json.Unmarshal(b, &out))
	return out.Effects, out.Calls
}

func overNode(t *testing.T) *idem.Transport {
	t.Helper()
	return &idem.Transport{Base: loopback(t), Policy: policy()}
}

func (s *nodeServer) charge(t *testing.T, ctx context.Context, rt http.RoundTripper, reference string) call {
	t.Helper()
	return post(t, ctx, rt, s.url()+"/charges", charge(reference))
}

func TestNodeChargesOnceWhenAnswersAreLost(t *testing.T) {
	s := nodeBehindRelay(t)
	s.loseNext(3)
	c := s.charge(t, t.Context(), overNode(t), "order-1")
	made, calls := s.made(t)
	require.Equal(t, map[string]int{"order-1": 1}, made)
	require.Equal(t, 1, calls)
	require.Equal(t, 3, s.lostSoFar())
	require.NoError(t, c.err)
	require.Equal(t, 201, c.status)
	require.JSONEq(t, `{"id":"ch_order-1"}`, c.body)
	require.Equal(t, idem.Executed, c.report.Outcome)
	require.True(t, c.report.Replayed)
	require.True(t, c.report.EarlierUnknown)
}

func TestNodeCalledTwiceForOneOperationChargesOnce(t *testing.T) {
	s := nodeBehindRelay(t)
	rt := overNode(t)
	var last call
	for range 2 { // as two processes would
		last = s.charge(t, idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-1/1"}), rt, "order-1")
		require.NoError(t, last.err)
		require.Equal(t, idem.Executed, last.report.Outcome)
	}
	made, calls := s.made(t)
	require.Equal(t, map[string]int{"order-1": 1}, made)
	require.Equal(t, 1, calls)
	require.True(t, last.report.Replayed)
}

// meetItsOwn409 charges order-1, and the connection breaks when the handler has
// begun, so that the next send meets an operation in progress. Only on a machine that takes
// longer for that send than the handler does it come too late; then the handler gets more time.
func meetItsOwn409(t *testing.T, edit func(*nodeServer, *idem.Transport)) (s *nodeServer, c call) {
	t.Helper()
	for delay := 600; delay < 60_000; delay *= 5 {
		s = nodeBehindRelay(t)
		s.handler(t, fmt.Sprintf(`{"delay":%d}`, delay))
		rt := overNode(t)
		edit(s, rt)
		over := make(chan call, 1)
		go func() { over <- s.charge(t, t.Context(), rt, "order-1") }()
		soon(t, func() bool { _, calls := s.made(t); return calls == 1 })
		s.cut()
		c = <-over
		if slices.ContainsFunc(c.report.Attempts, func(a idem.Attempt) bool { return a.Status == 409 }) {
			return s, c
		}
	}
	require.Fail(t, "no send met the operation in progress")
	return s, c
}

// 409 with "Retry-After: 1" is waited out; the attempt whose connection broke is the
// only one that counts.
func TestNodeSaysInProgressAndIsWaitedFor(t *testing.T) {
	s, c := meetItsOwn409(t, func(*nodeServer, *idem.Transport) {})
	made, calls := s.made(t)
	require.Equal(t, map[string]int{"order-1": 1}, made)
	require.Equal(t, 1, calls)
	require.NoError(t, c.err)
	require.Equal(t, idem.Executed, c.report.Outcome)
	require.True(t, c.report.Replayed)
	var statuses []int
	for _, a := range c.report.Attempts {
		statuses = append(statuses, a.Status)
	}
	// There is one 409, unless the handler takes even longer than the wait.
	require.Equal(t, []int{0, 409, 201}, slices.Compact(statuses))
	require.Equal(t, "retry-after", c.report.Attempts[1].WaitFrom)
	require.GreaterOrEqual(t, c.report.Attempts[1].Wait, time.Second)
}

// Two Transports are two processes: the second meets the first's 409.
func TestNodeLetsTwoProcessesMeet(t *testing.T) {
	s := nodeBehindRelay(t)
	s.handler(t, `{"delay":300}`)
	key, err := idem.NewKey()
	require.NoError(t, err)
	calls := make([]call, 2)
	var wg sync.WaitGroup
	for i := range calls {
		rt := overNode(t)
		wg.Go(func() { calls[i] = s.charge(t, idem.WithKey(t.Context(), key), rt, "order-1") })
	}
	wg.Wait()
	made, ran := s.made(t)
	require.Equal(t, map[string]int{"order-1": 1}, made)
	require.Equal(t, 1, ran)
	for _, c := range calls {
		require.NoError(t, c.err)
		require.Equal(t, 201, c.status)
		require.Equal(t, idem.Executed, c.report.Outcome)
	}
	require.NotEqual(t, calls[0].report.Replayed, calls[1].report.Replayed)
}

// Its 422 has words and no code: Generic sees a plain 422 and claims nothing,
// because the key's past is not known; a dialect with its words sees the reason.
func TestNodeSaysReusedInWordsOnly(t *testing.T) {
	s := nodeBehindRelay(t)
	key, err := idem.NewKey()
	require.NoError(t, err)
	require.NoError(t, s.charge(t, idem.WithKey(t.Context(), key), overNode(t), "order-1").err)

	c := s.charge(t, idem.WithKey(t.Context(), key), overNode(t), "order-2")
	require.Equal(t, 422, c.status)
	require.NoError(t, c.report.Reason)
	require.Equal(t, idem.Unknown, c.report.Outcome)

	rt := overNode(t)
	rt.Dialect = idem.Generic
	rt.Dialect.Mismatch = append(rt.Dialect.Mismatch, idem.Mark{Status: 422, Pointer: "/message", Contains: "idempotency-key is already used"})
	c = s.charge(t, idem.WithKey(t.Context(), key), rt, "order-3")
	require.Equal(t, 422, c.status)
	require.ErrorIs(t, c.report.Reason, idem.ErrKeyReused)
	require.Equal(t, idem.Unknown, c.report.Outcome)
	made, _ := s.made(t)
	require.Equal(t, map[string]int{"order-1": 1}, made)
}

// The key belongs to method and path: elsewhere it is another one.
func TestNodeKeepsTheKeysOfEndpointsApart(t *testing.T) {
	s := nodeBehindRelay(t)
	rt := overNode(t)
	key, err := idem.NewKey()
	require.NoError(t, err)
	require.Equal(t, 201, s.charge(t, idem.WithKey(t.Context(), key), rt, "order-1").status)
	c := post(t, idem.WithKey(t.Context(), key), rt, s.url()+"/refunds", charge("order-1"))
	require.Equal(t, 201, c.status)
	require.False(t, c.report.Replayed)
	made, _ := s.made(t)
	require.Equal(t, map[string]int{"order-1": 2}, made, "a charge and a refund")
}

// Errors are stored too, and replayed with a mark: one question more is
// enough, and whether the effect was made nobody can know from here.
func TestNodeStoresServerErrorsAndIdemStopsAtTheReplay(t *testing.T) {
	for when, want := range map[string]map[string]int{"before": {}, "after": {"order-1": 1}} {
		t.Run(when, func(t *testing.T) {
			s := nodeBehindRelay(t)
			s.handler(t, `{"fail":"`+when+`"}`)
			c := s.charge(t, t.Context(), overNode(t), "order-1")
			made, calls := s.made(t)
			require.Equal(t, want, made)
			require.Equal(t, 1, calls)
			require.Equal(t, 500, c.status)
			require.Equal(t, idem.Unknown, c.report.Outcome)
			require.True(t, c.report.Replayed)
			require.Len(t, c.report.Attempts, 2)
		})
	}
}

// A handler that is never heard of again leaves its key in progress, for 24
// hours by default: the waits end, and nothing is claimed.
func TestNodeKeepsTheKeyOfACrashedHandlerInProgress(t *testing.T) {
	s := nodeBehindRelay(t)
	s.handler(t, `{"fail":"crash"}`)
	rt := overNode(t)
	rt.Policy.MaxInProgress = 1
	c := s.charge(t, t.Context(), rt, "order-1")
	made, calls := s.made(t)
	require.Empty(t, made)
	require.Equal(t, 1, calls)
	require.Equal(t, 409, c.status)
	require.ErrorIs(t, c.report.Reason, idem.ErrInProgress)
	require.Equal(t, idem.Unknown, c.report.Outcome)
}

func TestNodeRefusesAWriteWithoutKey(t *testing.T) {
	s := nodeBehindRelay(t)
	c := s.charge(t, idem.WithoutKey(t.Context()), overNode(t), "order-1")
	made, _ := s.made(t)
	require.Empty(t, made)
	require.Equal(t, 400, c.status)
	require.Equal(t, idem.Refused, c.report.Outcome)
}

func TestNodeUnderTheDefaultPolicyOfGoRetryablehttp(t *testing.T) {
	s, c := meetItsOwn409(t, func(s *nodeServer, rt *idem.Transport) {
		s.loseNext(1)
		rt.Policy.Classify = retryable.Classify(retryablehttp.DefaultRetryPolicy)
		rt.Policy.Backoff = retryable.Backoff(retryablehttp.DefaultBackoff, time.Millisecond, 5*time.Millisecond)
	})
	made, calls := s.made(t)
	require.Equal(t, map[string]int{"order-1": 1}, made)
	require.Equal(t, 1, calls)
	require.NoError(t, c.err)
	require.Equal(t, idem.Executed, c.report.Outcome, "the policy says no to a 409, and idem waits all the same")
}

func TestNodeBehindANetworkThatLosesEveryThirdAnswer(t *testing.T) {
	s := nodeBehindRelay(t)
	manyThrough(t, s.relay, overNode(t), func(reference string) int {
		made, _ := s.made(t)
		return made[reference]
	})
}
