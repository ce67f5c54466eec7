package modeltest

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// TestMain makes 1000 examples the default, a second or two; -rapid.checks
// still rules.
func TestMain(m *testing.M) {
	_ = flag.Set("rapid.checks", "1000")
	flag.Parse()
	os.Exit(m.Run())
}

const attemptLimit = time.Second

// honestFaults are the kinds that do not lie: a 4xx to a fresh key after the
// effect, or a 303 before it, says what no client can see through.
var honestFaults = func() []fakeserver.Fault {
	const (
		before = fakeserver.BeforeEffect
		during = fakeserver.DuringEffect
		after  = fakeserver.AfterEffect
	)
	list := []fakeserver.Fault{
		{}, // none
		{Kind: fakeserver.Reset, Point: before}, {Kind: fakeserver.Reset, Point: after},
		{Kind: fakeserver.Reset, Point: before, Bytes: -1}, {Kind: fakeserver.Reset, Point: before, Bytes: 5},
		{Kind: fakeserver.Close, Point: before}, {Kind: fakeserver.Close, Point: after},
		{Kind: fakeserver.Hang, Point: before}, {Kind: fakeserver.Hang, Point: after},
		{Kind: fakeserver.HTML, Point: before}, {Kind: fakeserver.HTML, Point: after},
		{Kind: fakeserver.Garbage, Point: before}, {Kind: fakeserver.Garbage, Point: after},
		{Kind: fakeserver.Flood, Point: before, Delay: 100 * time.Millisecond}, {Kind: fakeserver.Flood, Point: after, Delay: 100 * time.Millisecond},
		{Kind: fakeserver.EarlyAnswer},
		{Kind: fakeserver.SlowRead, Delay: 300 * time.Millisecond}, {Kind: fakeserver.SlowRead, Delay: 3 * time.Second},
		{Kind: fakeserver.StoredFailure, Point: before}, {Kind: fakeserver.StoredFailure, Point: after},
		{Kind: fakeserver.Slow, Delay: 300 * time.Millisecond}, {Kind: fakeserver.Slow, Delay: 2700 * time.Millisecond},
		{Kind: fakeserver.Stuck, Delay: 2 * time.Second},
		{Kind: fakeserver.Late, Point: after, Delay: 300 * time.Millisecond}, {Kind: fakeserver.Late, Point: after, Delay: 3 * time.Second},
		{Kind: fakeserver.Late, Point: fakeserver.InBody, Delay: 300 * time.Millisecond}, {Kind: fakeserver.Late, Point: fakeserver.InBody, Delay: 3 * time.Second},
		{Kind: fakeserver.Stale}, {Kind: fakeserver.Stale},
		{Kind: fakeserver.Trickle, Delay: 5 * time.Millisecond},
		{Kind: fakeserver.CutHeaders}, {Kind: fakeserver.CutBody}, {Kind: fakeserver.CutBody, Encoding: "chunked"}, {Kind: fakeserver.CutBody, Encoding: "gzip"},
		{Kind: fakeserver.Duplicate, Point: before}, {Kind: fakeserver.Duplicate, Point: after}, {Kind: fakeserver.Duplicate, Point: after, Delay: time.Second},
		{Kind: fakeserver.Duplicate, Point: during, Delay: 300 * time.Millisecond},
		{Kind: fakeserver.Redirect, Status: 307, Location: "/v1/payments"}, {Kind: fakeserver.Redirect, Status: 308, Location: "/v1/payments"},
		{Kind: fakeserver.Redirect, Status: 302, Location: "/v1/payments"}, {Kind: fakeserver.Redirect, Status: 307, Location: "other"},
		{Kind: fakeserver.Redirect, Status: 303, Point: after},
	}
	for _, status := range []int{408, 409, 425, 429, 499, 500, 502, 503, 504} {
		list = append(list, fakeserver.Fault{Kind: fakeserver.Status, Status: status, Point: before},
			fakeserver.Fault{Kind: fakeserver.Status, Status: status, Point: after})
	}
	for _, status := range []int{400, 401, 403, 404, 421, 501} {
		list = append(list, fakeserver.Fault{Kind: fakeserver.Status, Status: status, Point: before})
	}
	for _, asks := range []string{"0", "2", "600"} {
		list = append(list, fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: asks, Point: before},
			fakeserver.Fault{Kind: fakeserver.Status, Status: 429, RetryAfter: asks, Point: after})
	}
	return list
}()

// onceBody can be read once and counts its Closes.
type onceBody struct {
	io.Reader
	closes atomic.Int32
}

func (b *onceBody) Close() error {
	b.closes.Add(1)
	return nil
}

// world is one example: a server, a client, and what was drawn of both.
type world struct {
	t           *rapid.T
	s           *fakeserver.Server
	client      *idem.Client
	maxAttempts int
	buffered    bool // answers are
	reported    int  // sends, over all calls
}

// operation is one thing that is to happen once.
type operation struct {
	method    string
	path      string
	body      string
	reference string
	effect    string // kind of it; "": none
	keyFrom   string // "minted", "context", "operation", "header", "none"
	key       string // once known
	replay    bool   // body can be opened again
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { rapid.SyncTest(t, example) })
}

func example(t *rapid.T) {
	w := &world{
		t: t, s: fakeserver.NewInMemory(),
		maxAttempts: rapid.IntRange(1, 5).Draw(t, "MaxAttempts"),
		buffered:    rapid.Bool().Draw(t, "buffered"),
	}
	defer w.s.Close()
	w.s.Apply(fakeserver.Settings{
		Optional: true,
		Failures: rapid.SampledFrom([]fakeserver.FailurePolicy{fakeserver.FreeKey, fakeserver.StoreFailures}).Draw(t, "5xx"),
	})
	tr := &idem.Transport{Base: w.s.Transport(), Policy: idem.Policy{
		MaxAttempts: w.maxAttempts, AttemptTimeout: attemptLimit, MaxInProgress: rapid.IntRange(1, 4).Draw(t, "MaxInProgress"),
		Budget: &idem.Budget{Capacity: -1},
	}}
	if !w.buffered {
		tr.Policy.MaxResponseBuffer = -1
	}
	if rapid.Bool().Draw(t, "Prepare") {
		tr.Prepare = func(*http.Request) error { return nil }
	}
	w.client = idem.NewClient(tr)
	for i := range rapid.IntRange(1, 2).Draw(t, "operations") {
		w.operation(i)
	}
	arrived, stale := 0, 0
	for _, n := range w.s.Sends() {
		if !n.Duplicate {
			arrived++
		}
		if strings.HasPrefix(n.Fault, string(fakeserver.Stale)) {
			stale++ // the next send on this connection, if there is one, is lost before the server sees it
		}
	}
	require.GreaterOrEqual(t, w.reported, arrived, "sends in the reports and at the server")
	require.LessOrEqual(t, w.reported, arrived+stale, "sends in the reports and at the server")
}

// operation draws an operation and calls it one to three times. Each call
// meets a script of its own.
func (w *world) operation(i int) {
	t := w.t
	o := &operation{reference: fmt.Sprintf("order-%d", i)}
	o.method = rapid.SampledFrom([]string{"POST", "POST", "POST", "POST", "DELETE", "GET", "PATCH"}).Draw(t, "method")
	o.keyFrom = "none"
	switch o.method {
	case http.MethodDelete:
		o.path, o.effect = w.reserve(o.reference), "cancellation"
	case http.MethodGet:
		o.path = "/v1/payments?reference=" + o.reference
	default:
		o.keyFrom = rapid.SampledFrom([]string{"minted", "context", "operation", "header", "none"}).Draw(t, "key")
		o.path, o.effect = "/v1/payments", "payment"
		amount := rapid.SampledFrom([]int{1999, 1999, 1999, fakeserver.DeclinedAmount}).Draw(t, "amount")
		o.body = fmt.Sprintf(`{"amount":%d,"currency":"usd","reference":%q}`, amount, o.reference)
		o.replay = rapid.Bool().Draw(t, "GetBody")
	}
	calls := rapid.IntRange(1, 3).Draw(t, "calls")
	if o.keyFrom == "none" && o.effect != "" {
		calls = 1 // without a key, another call is another operation
	}
	for range calls {
		faults := rapid.SliceOfN(rapid.SampledFrom(honestFaults), 0, 6).Draw(t, "faults")
		if o.keyFrom == "none" { // nobody can help against a network that delivers twice
			faults = slices.DeleteFunc(faults, func(f fakeserver.Fault) bool { return f.Kind == fakeserver.Duplicate })
		}
		require.NoError(t, w.s.Script("", faults...))
		w.s.Refuse(rapid.SampledFrom([]int{0, 0, 0, 1, 5}).Draw(t, "refused connections"))
		w.call(o)
	}
	w.s.ClearFaults()
	w.s.Refuse(0)
}

// reserve makes the reservation that a DELETE takes away.
func (w *world) reserve(reference string) string {
	req, err := http.NewRequest(http.MethodPost, w.s.URL()+"/v1/hotels/h1/reservations",
		strings.NewReader(fmt.Sprintf(`{"room_type":"double","guest":"g","nights":1,"reference":%q}`, reference)))
	require.NoError(w.t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := w.s.Client().Do(req) // with connections of its own
	require.NoError(w.t, err)
	w.reported++
	var made struct {
		ID string `json:"id"`
	}
	require.NoError(w.t, json.NewDecoder(resp.Body).Decode(&made))
	require.NoError(w.t, resp.Body.Close())
	return "/v1/hotels/h1/reservations/" + made.ID
}

// call makes one call and checks what it claims.
func (w *world) call(o *operation) {
	t := w.t
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	errLeft := errors.New("the caller left")
	left := -1 * time.Millisecond
	if rapid.IntRange(0, 3).Draw(t, "cancels") == 0 {
		// An odd number of nanoseconds meets no timer of anybody else.
		left = time.Duration(rapid.IntRange(0, 4000).Draw(t, "after ms"))*time.Millisecond + 1
		timer := time.AfterFunc(left, func() { cancel(errLeft) })
		defer timer.Stop()
	}
	var report idem.Report
	ctx = idem.WithReport(ctx, &report)
	req, body := w.request(o, ctx)
	header := req.Header.Clone()
	resp, err := w.client.Do(req)

	var text []byte
	var cut error
	if err == nil {
		text, cut = io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		require.NoError(t, resp.Body.Close())
		require.Equal(t, report.Outcome, idem.OutcomeOf(resp, nil))
	} else {
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, report.Outcome, e.Outcome)
		require.Equal(t, report.Key, e.Key)
		require.NotEmpty(t, err.Error())
	}
	time.Sleep(time.Minute) // what still runs at the server comes to its end
	w.reported += report.Sends

	require.Equal(t, header, req.Header, "the caller's request was changed")
	if body != nil {
		most := int32(1)
		for _, a := range report.Attempts {
			if a.Status/100 == 3 {
				most = 2 // http.Client itself closes the body of a request that was redirected
			}
		}
		require.LessOrEqual(t, body.closes.Load(), most, "Closes of the caller's body")
		require.Positive(t, body.closes.Load(), "the caller's body was left open")
	}
	require.LessOrEqual(t, counted(report.Attempts), w.maxAttempts)
	w.checkKey(o, &report)

	effects := w.s.Effects(fakeserver.Filter{Reference: o.reference, Kind: o.effect})
	if o.effect == "" {
		return
	}
	require.LessOrEqual(t, len(effects), 1, "effects")
	switch report.Outcome {
	case idem.Executed:
		require.Len(t, effects, 1, "claimed executed")
	case idem.Refused, idem.NotExecuted:
		require.Empty(t, effects, "claimed %v", report.Outcome)
	}
	if err == nil && w.buffered && o.keyFrom != "none" && resp.StatusCode/100 == 2 && resp.Request.Method == o.method {
		require.NoError(t, cut)
		var a struct {
			ID        string `json:"id"`
			Reference string `json:"reference"`
		}
		require.NoError(t, json.Unmarshal(text, &a), "a success must be whole: %q", text)
		require.Equal(t, effects[0].ID, a.ID)
		require.Equal(t, o.reference, a.Reference)
	}
}

func counted(attempts []idem.Attempt) int {
	n := 0
	for _, a := range attempts {
		n = max(n, a.N)
	}
	return n
}

// checkKey: one key for an operation, in the report and on the wire.
func (w *world) checkKey(o *operation, report *idem.Report) {
	t := w.t
	if o.keyFrom == "none" {
		require.Empty(t, report.Key)
	} else {
		require.NotEmpty(t, report.Key)
		if o.key == "" {
			o.key = report.Key
		}
		require.Equal(t, o.key, report.Key)
	}
	for _, n := range w.s.Sends(fakeserver.Filter{Reference: o.reference}) {
		if n.Method == o.method && n.Path == "/v1/payments" {
			require.Equal(t, o.key, n.Key)
		}
	}
}

// request makes the request of one call; body is nil where net/http made it.
func (w *world) request(o *operation, ctx context.Context) (*http.Request, *onceBody) {
	switch {
	case o.keyFrom == "none" && o.effect == "payment":
		ctx = idem.WithoutKey(ctx)
	case o.keyFrom == "operation":
		ctx = idem.WithOperation(ctx, idem.Operation{Name: "payment", ID: o.reference})
	case o.keyFrom == "context":
		ctx = idem.WithKey(ctx, "own-"+o.reference)
	case o.keyFrom == "minted" && o.key != "":
		ctx = idem.WithKey(ctx, o.key) // the same operation again
	}
	req, err := http.NewRequestWithContext(ctx, o.method, w.s.URL()+o.path, nil)
	require.NoError(w.t, err)
	if o.keyFrom == "header" {
		req.Header["idempotency-key"] = []string{"header-" + o.reference}
	}
	if o.body == "" {
		return req, nil
	}
	req.Header.Set("Content-Type", "application/json")
	body := &onceBody{Reader: strings.NewReader(o.body)}
	req.Body = body
	if o.replay {
		req.ContentLength = int64(len(o.body))
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(o.body)), nil }
	}
	return req, body
}
