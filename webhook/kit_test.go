package webhook_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/internal/leak"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

var (
	deliveriesFlag = flag.Int("deliveries", 5_000, "how many deliveries the storm makes")
	idsFlag        = flag.Int("ids", 5_000, "how many live ids fill the journal in memory")
	seedFlag       = flag.Int64("seed", 0, "seed of the storm; 0: a fresh one, which a failure prints")
)

// TestMain fails the run if goroutines are left behind.
func TestMain(m *testing.M) {
	os.Exit(leak.Run(m))
}

const (
	secretOne = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	secretTwo = "whsec_ZmFrZXNlcnZlciB0ZXN0IHNlY3JldCwgMjQr"
)

// verifier is of Standard Webhooks: it signs the delivery again and compares. The module
// signature has real ones.
func verifier(secret string) webhook.Verifier {
	e := fakeserver.Endpoint{Secrets: []string{secret}}
	return func(h http.Header, body []byte) (string, error) {
		id := h.Get("Webhook-Id")
		n, err := strconv.ParseInt(h.Get("Webhook-Timestamp"), 10, 64)
		if err != nil {
			return "", webhook.ErrTimestamp
		}
		at := time.Unix(n, 0)
		if off := time.Since(at); off > 5*time.Minute || off < -5*time.Minute {
			return "", webhook.ErrTimestamp
		}
		want, err := e.Sign(id, at, body)
		if err != nil {
			return "", err
		}
		for _, one := range strings.Fields(h.Get("Webhook-Signature")) {
			if one == want.Get("Webhook-Signature") {
				return id, nil
			}
		}
		return "", webhook.ErrSignature
	}
}

// shop is the Next of the tests: its effects are what is judged.
type shop struct {
	work   time.Duration                               // that handling takes
	before func(r *http.Request, run int) (status int) // 0: goes on; run counts from 1

	mu      sync.Mutex // guards what follows
	runs    int
	effects map[string]int       // of a resource and type
	done    map[string]time.Time // when the first of them was there
}

func (s *shop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var event struct {
		Type string
		Data struct{ ID, Reference string }
	}
	if err := json.NewDecoder(r.Body).Decode(&event); err != nil {
		w.WriteHeader(http.StatusUnprocessableEntity)
		return
	}
	s.mu.Lock()
	s.runs++
	run := s.runs
	s.mu.Unlock()
	if s.before != nil {
		if status := s.before(r, run); status != 0 {
			w.WriteHeader(status)
			return
		}
	}
	select {
	case <-time.After(s.work):
	case <-r.Context().Done():
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	what := event.Type + " " + event.Data.Reference
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.effects == nil {
		s.effects, s.done = map[string]int{}, map[string]time.Time{}
	}
	if s.effects[what]++; s.effects[what] == 1 {
		s.done[what] = time.Now()
	}
}

func (s *shop) count() (runs int, effects map[string]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	effects = map[string]int{}
	for what, n := range s.effects {
		effects[what] = n
	}
	return s.runs, effects
}

// ears hear what Done says.
type ears struct {
	mu    sync.Mutex // guards heard
	heard []webhook.Delivery
}

func (e *ears) hear(_ context.Context, d webhook.Delivery) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.heard = append(e.heard, d)
}

func (e *ears) all() []webhook.Delivery {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]webhook.Delivery(nil), e.heard...)
}

// receiver is a Handler with a shop behind it, as most tests want it.
type receiver struct {
	*webhook.Handler
	shop   *shop
	ears   *ears
	memory *journal.Memory
}

func newReceiver(edit ...func(*receiver)) *receiver {
	r := &receiver{shop: &shop{}, ears: &ears{}, memory: &journal.Memory{}}
	r.Handler = &webhook.Handler{Journal: r.memory, Next: r.shop, Source: "shop", Verify: verifier(secretOne), Done: r.ears.hear}
	for _, f := range edit {
		f(r)
	}
	return r
}

// known says what the journal has of an event.
func (r *receiver) known(t *testing.T, id string) (journal.State, bool) {
	t.Helper()
	e, err := r.memory.Get(context.Background(), journal.Operation{Scope: r.Source, Name: "webhook", ID: id})
	if errors.Is(err, journal.ErrNotFound) {
		return 0, false
	}
	require.NoError(t, err)
	return e.State, true
}

// virtual runs f in a bubble with virtual time, with a sender in memory.
func virtual(t *testing.T, f func(t *testing.T, s *fakeserver.Server)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := fakeserver.NewInMemory()
		defer s.Close()
		f(t, s)
	})
}

// register makes h the endpoint of s.
func register(t *testing.T, s *fakeserver.Server, h http.Handler, edit ...func(*fakeserver.Endpoint)) {
	t.Helper()
	e := fakeserver.Endpoint{Name: "shop", Handler: h, Secrets: []string{secretOne}}
	for _, f := range edit {
		f(&e)
	}
	require.NoError(t, s.Register(e))
}

// pay makes a payment, which s then tells of.
func pay(t *testing.T, s *fakeserver.Server, reference string) {
	t.Helper()
	body := fmt.Sprintf(`{"amount":1999,"currency":"usd","reference":%q}`, reference)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/payments", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Idempotency-Key", reference)
	resp, err := s.Client().Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	require.Equal(t, http.StatusCreated, resp.StatusCode)
}

// settled waits until every event was delivered or given up.
func settled(t *testing.T, s *fakeserver.Server) {
	t.Helper()
	require.NoError(t, s.AwaitEvents(t.Context()))
}

// fail makes the next attempts for a reference fail as f says.
func fail(t *testing.T, s *fakeserver.Server, reference string, f ...fakeserver.DeliveryFault) {
	t.Helper()
	require.NoError(t, s.ScriptDeliveries(reference, f...))
}

// statuses of the deliveries, in the order in which they left.
func statuses(s *fakeserver.Server) (list []int) {
	for _, d := range s.Deliveries() {
		list = append(list, d.Status)
	}
	return list
}

// post delivers by hand, without a sender: body under id, signed now. The answer
// is whole.
func post(t testing.TB, h http.Handler, id, body string, edit ...func(*http.Request)) answer {
	t.Helper()
	header, err := fakeserver.Endpoint{Secrets: []string{secretOne}}.Sign(id, time.Now(), []byte(body))
	require.NoError(t, err)
	r, err := http.NewRequestWithContext(context.Background(), http.MethodPost, "http://shop.test/hooks", strings.NewReader(body))
	require.NoError(t, err)
	r.Header, r.RequestURI, r.RemoteAddr = header, "/hooks", "192.0.2.1:1234"
	for _, f := range edit {
		f(r)
	}
	w := &recorder{header: http.Header{}}
	h.ServeHTTP(w, r)
	return w.answer(t)
}

// recorder is a ResponseWriter that keeps what is written.
type recorder struct {
	header http.Header
	status int
	body   strings.Builder
}

func (w *recorder) Header() http.Header { return w.header }
func (w *recorder) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
}
func (w *recorder) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}

// answer is what was answered; the last four are of a problem document.
type answer struct {
	status int
	header http.Header
	body   string

	Title, Detail, Reason string
	Status                int
}

func (w *recorder) answer(t testing.TB) answer {
	t.Helper()
	w.WriteHeader(http.StatusOK)
	return read(t, w.status, w.header, w.body.String())
}

func read(t testing.TB, status int, header http.Header, body string) answer {
	t.Helper()
	a := answer{status: status, header: header, body: body}
	if header.Get("Content-Type") == "application/problem+json" {
		require.NoError(t, json.Unmarshal([]byte(body), &a))
		require.Equal(t, status, a.Status)
		require.Equal(t, http.StatusText(status), a.Title)
		require.NotEmpty(t, a.Detail)
		require.NotEmpty(t, a.Reason)
	}
	return a
}

// event is a body as the sender makes it.
func event(reference string) string {
	return fmt.Sprintf(`{"type":"payment.succeeded","data":{"id":"pay_%s","reference":%q}}`, reference, reference)
}

// retryAfter is the header in seconds.
func retryAfter(t testing.TB, h http.Header) int {
	t.Helper()
	n, err := strconv.Atoi(h.Get("Retry-After"))
	require.NoError(t, err)
	return n
}

// failing is a journal of which one method may fail.
type failing struct {
	journal.Journal
	begin, renew, finish, release func() error
}

func (f *failing) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	if f.begin != nil {
		if err := f.begin(); err != nil {
			return journal.Entry{}, err
		}
	}
	return f.Journal.Begin(ctx, in)
}

func (f *failing) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	if f.renew != nil {
		if err := f.renew(); err != nil {
			return journal.Entry{}, err
		}
	}
	return f.Journal.Renew(ctx, e, n)
}

func (f *failing) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	if f.finish != nil {
		if err := f.finish(); err != nil {
			return journal.Entry{}, err
		}
	}
	return f.Journal.Finish(ctx, e, s, n)
}

func (f *failing) Release(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	if f.release != nil {
		if err := f.release(); err != nil {
			return journal.Entry{}, err
		}
	}
	return f.Journal.Release(ctx, e, n)
}

var errDisk = errors.New("the disk is on fire")

// endless is a body without an end that counts what is read of it.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	e.read += len(p)
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

func (e *endless) Close() error { return nil }

var _ io.ReadCloser = (*endless)(nil)
