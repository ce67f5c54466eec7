package idem_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// scriptedProvider answers its nth request with the nth step, and with the
// last one from then on: a real http.Server over pipes, for answers that the
// fake server does not give.
type scriptedProvider struct {
	url  string
	base *http.Transport

	mu   sync.Mutex // guards seen
	seen []providerRequest
}

type providerRequest struct {
	method, path, body string
	keys               []string // of Idempotency-Key
	header             http.Header
	at                 time.Time
}

type providerStep func(w http.ResponseWriter, r *http.Request)

func newScriptedProvider(t *testing.T, steps ...providerStep) *scriptedProvider {
	t.Helper()
	p := &scriptedProvider{url: "http://provider.test"}
	l := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
	p.base = &http.Transport{DialContext: l.dial}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		p.mu.Lock()
		p.seen = append(p.seen, providerRequest{
			r.Method, r.URL.Path, string(body), r.Header.Values("Idempotency-Key"), r.Header.Clone(), time.Now(),
		})
		step := steps[min(len(p.seen), len(steps))-1]
		p.mu.Unlock()
		step(w, r)
	})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() {
		p.base.CloseIdleConnections()
		_ = server.Close()
		wg.Wait()
	})
	return p
}

// sends is what arrived so far.
func (p *scriptedProvider) sends() []providerRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]providerRequest(nil), p.seen...)
}

// through is a Transport for p with the policy of the cases.
func (p *scriptedProvider) through(edit ...func(*idem.Transport)) *idem.Transport {
	t := &idem.Transport{Base: p.base, Policy: casePolicy()}
	for _, e := range edit {
		e(t)
	}
	return t
}

// says answers with a JSON body, and with header lines given as pairs.
func says(status int, body string, header ...string) providerStep {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i < len(header); i += 2 {
			w.Header().Add(header[i], header[i+1])
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// hangsUp closes the connection without an answer.
func hangsUp(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (l *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case l.conns <- server:
		return client, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.IPAddr{} }

// speaking sets the dialect.
func speaking(d idem.Dialect) func(*idem.Transport) {
	return func(t *idem.Transport) { t.Dialect = d }
}

// oneBodyHash asserts that all sends had the same whole body.
func oneBodyHash(t *testing.T, sends []fakeserver.Send) {
	t.Helper()
	for _, s := range sends {
		require.NotEmpty(t, s.BodySHA256, "send %d", s.N)
		require.Equal(t, sends[0].BodySHA256, s.BodySHA256, "send %d", s.N)
	}
}

// --- C22

func TestC22_InProgressAfterATimeoutIsWaitedOutAndEndsInTheReplay(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Slow, Delay: 800 * time.Millisecond}))
		c := idem.NewClient(over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 250 * time.Millisecond }))

		resp, err := c.Do(newPayment(t, context.Background(), s, "c22"))
		require.NoError(t, err)
		body := readAll(t, resp)

		require.Len(t, s.Effects(), 1)
		sends := s.Sends()
		require.Len(t, sends, 3)
		require.Len(t, keysSent(sends), 1)
		oneBodyHash(t, sends)
		require.Equal(t, http.StatusConflict, sends[1].Status)
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		require.Contains(t, body, s.Effects()[0].ID)
		r := idem.ReportOf(resp)
		require.Equal(t, idem.Executed, r.Outcome)
		require.True(t, r.Replayed)
		require.True(t, r.EarlierUnknown)
		require.Equal(t, 3, r.Sends)
		require.Equal(t, "retry-after", r.Attempts[1].WaitFrom)
		require.GreaterOrEqual(t, sends[2].At.Sub(sends[1].At), time.Second)
	})
}

func TestC22_InProgressWithoutRetryAfterWaitsTheThrottleBase(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{InProgressRetryAfter: "-"})
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Slow, Delay: 500 * time.Millisecond}))
		c := idem.NewClient(over(s, func(tr *idem.Transport) {
			tr.Policy.AttemptTimeout = 50 * time.Millisecond
			tr.Policy.ThrottleBase = time.Second
		}))

		resp, err := c.Do(newPayment(t, context.Background(), s, "c22"))
		require.NoError(t, err)
		readAll(t, resp)

		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 3)
		require.Len(t, keysSent(s.Sends()), 1)
		r := idem.ReportOf(resp)
		require.Equal(t, idem.Executed, r.Outcome)
		require.Equal(t, "in-progress", r.Attempts[1].WaitFrom)
		require.GreaterOrEqual(t, r.Attempts[1].Wait, time.Second)
	})
}

// --- C24

func TestC24_LockThatIsNeverReleasedEndsWithinMaxElapsed(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{InProgressRetryAfter: "2"})
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Stuck, Delay: time.Hour}))
		c := idem.NewClient(over(s, func(tr *idem.Transport) {
			tr.Policy.MaxAttempts = 1000
			tr.Policy.MaxInProgress = 1000
			tr.Policy.MaxElapsed = 10 * time.Second
		}))
		ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "charge", ID: "c24"})
		start := time.Now()

		_, err := c.Do(newPayment(t, ctx, s, "c24"))

		require.Empty(t, s.Effects())
		require.Len(t, keysSent(s.Sends()), 1)
		var e *idem.Error
		require.ErrorAs(t, err, &e)
		require.ErrorIs(t, err, idem.ErrInProgress)
		require.Equal(t, http.StatusConflict, e.StatusCode)
		require.Contains(t, string(e.Body), "idempotency-key-in-use")
		require.Equal(t, idem.Unknown, e.Outcome)
		require.LessOrEqual(t, time.Since(start), 10*time.Second)
		require.Greater(t, time.Since(start), 5*time.Second)

		s.Advance(2 * time.Hour)
		resp, err := c.Do(newPayment(t, ctx, s, "c24"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
	})
}

func TestC24_RoundTripHandsBackTheLastAnswerOfALockThatIsNeverReleased(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Stuck, Delay: time.Hour}))

		resp, err := over(s).RoundTrip(newPayment(t, context.Background(), s, "c24"))

		require.NoError(t, err)
		require.Empty(t, s.Effects())
		require.Equal(t, http.StatusConflict, resp.StatusCode)
		require.Contains(t, readAll(t, resp), "idempotency-key-in-use")
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrInProgress)
	})
}

func TestC24_DefaultsEndALockThatIsNeverReleased(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{InProgressRetryAfter: "2"})
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Stuck}))
		c := idem.NewClient(&idem.Transport{Base: s.Transport(), Policy: idem.Policy{Budget: new(idem.Budget)}})
		start := time.Now()

		_, err := c.Do(newPayment(t, context.Background(), s, "c24"))

		require.Empty(t, s.Effects())
		require.ErrorIs(t, err, idem.ErrInProgress)
		require.LessOrEqual(t, len(s.Sends()), 1+1+10, "the lost one, the first 409, ten waits")
		require.LessOrEqual(t, time.Since(start), 2*time.Minute)
	})
}

// --- C25

const reusedKeyProblem = `{"type":"https://provider.test/problems/idempotency-key-reused","title":"Unprocessable Content","status":422}`

func TestC25_ReusedKeyIsATypedErrorAndNeverGetsANewKey(t *testing.T) {
	for _, tc := range []struct {
		name   string
		first  []providerStep
		policy func(*idem.Transport)
		minted bool // the key, so that a refusal could be claimed
		sends  int
	}{
		{"at the first attempt", nil, speaking(idem.Generic), false, 1},
		{"after a lost answer", []providerStep{hangsUp}, speaking(idem.Generic), false, 2},
		{"in the words of the draft", nil, speaking(idem.IETF), false, 1},
		{"under a fresh key", nil, speaking(idem.Generic), true, 1},
		{"under a fresh key after a lost answer", []providerStep{hangsUp}, speaking(idem.Generic), true, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, append(tc.first, says(422, reusedKeyProblem))...)
				ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "charge", ID: "c25"})
				if tc.minted {
					ctx = context.Background()
				}

				_, err := idem.NewClient(p.through(tc.policy)).Do(newPost(t, ctx, p.url+"/charges", `{"amount":1}`))

				sends := p.sends()
				require.Len(t, sends, tc.sends)
				for _, s := range sends {
					require.Equal(t, sends[0].keys, s.keys)
				}
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				require.ErrorIs(t, err, idem.ErrKeyReused)
				require.Equal(t, 422, e.StatusCode)
				require.JSONEq(t, reusedKeyProblem, string(e.Body))
				require.Equal(t, idem.Unknown, e.Outcome)
				require.NotEmpty(t, e.Key)
			})
		})
	}
}

func TestC25_KeyThatTheServerKnowsFromAnotherBodyIsNotSentAgain(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		key, err := idem.NewKey()
		require.NoError(t, err)
		other := newPost(t, context.Background(), s.URL()+"/v1/payments", paymentJSON("other", 5))
		other.Header.Set("Idempotency-Key", key)
		resp, err := s.Client().Do(other)
		require.NoError(t, err)
		readAll(t, resp)

		_, err = idem.NewClient(over(s)).Do(newPayment(t, idem.WithKey(context.Background(), key), s, "c25"))

		require.Len(t, s.Effects(), 1)
		require.Empty(t, s.Effects(fakeserver.Filter{Reference: "c25"}))
		require.Len(t, s.Sends(), 2)
		require.Equal(t, []string{key}, keysSent(s.Sends()))
		require.ErrorIs(t, err, idem.ErrKeyReused)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
	})
}

func TestC25_PlainValidationErrorComesBackAsAResponse(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		c := idem.NewClient(over(s))
		resp, err := c.Do(newPayment(t, context.Background(), s, "c25"))
		require.NoError(t, err)
		readAll(t, resp)

		resp, err = c.Do(newPost(t, context.Background(), s.URL()+"/v1/payments/pay_1/refunds", `{"amount":5000,"reference":"c25"}`))

		require.NoError(t, err)
		require.Empty(t, s.Effects(fakeserver.Filter{Kind: "refund"}))
		require.Len(t, s.Sends(), 2)
		require.Equal(t, 422, resp.StatusCode)
		require.Contains(t, readAll(t, resp), "refund-too-large")
		r := idem.ReportOf(resp)
		require.NoError(t, r.Reason)
		require.Equal(t, idem.Refused, r.Outcome)
	})
}

// --- C26

func TestC26_StoredFailureIsNotAskedForTwice(t *testing.T) {
	for _, point := range []fakeserver.Point{fakeserver.BeforeEffect, fakeserver.AfterEffect} {
		t.Run(string(point), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				s.Apply(fakeserver.Settings{ReplayHeader: "Idempotent-Replayed"})
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.StoredFailure, Point: point}))
				ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "charge", ID: "c26"})
				c := idem.NewClient(over(s))

				resp, err := c.Do(newPayment(t, ctx, s, "c26"))

				require.NoError(t, err)
				effects := len(s.Effects())
				require.LessOrEqual(t, effects, 1)
				require.Len(t, s.Sends(), 2)
				require.Len(t, keysSent(s.Sends()), 1)
				require.Equal(t, 500, resp.StatusCode)
				require.NotEmpty(t, readAll(t, resp))
				r := idem.ReportOf(resp)
				require.NoError(t, r.Reason)
				require.True(t, r.Replayed)
				require.Equal(t, idem.Unknown, r.Outcome)

				// Nor does another call choose a new key.
				resp, err = c.Do(newPayment(t, ctx, s, "c26"))
				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, s.Effects(), effects)
				require.Len(t, s.Sends(), 3)
				require.Len(t, keysSent(s.Sends()), 1)
				require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
			})
		})
	}
}

// --- C27

func TestC27_FailureAfterTheCommitEndsInTheReplayOfSuccess(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503, Point: fakeserver.AfterEffect}))

		resp, err := idem.NewClient(over(s)).Do(newPayment(t, context.Background(), s, "c27"))

		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 2)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		require.Contains(t, readAll(t, resp), `"id":"`+s.Effects()[0].ID+`"`)
		r := idem.ReportOf(resp)
		require.Equal(t, idem.Executed, r.Outcome)
		require.True(t, r.Replayed)
		require.NoError(t, r.Reason)
	})
}

// --- C28

// reserved makes a reservation and returns its URL.
func reserved(t *testing.T, s *fakeserver.Server) string {
	t.Helper()
	req := newPost(t, context.Background(), s.URL()+"/v1/hotels/h1/reservations", `{"room_type":"double","guest":"Ada","reference":"c28"}`)
	resp, err := idem.NewClient(over(s)).Do(req)
	require.NoError(t, err)
	readAll(t, resp)
	require.Equal(t, http.StatusCreated, resp.StatusCode)
	return s.URL() + resp.Header.Get("Location")
}

func TestC28_NotFoundAfterALostDeleteIsNotTakenForAnAnswer(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		url := reserved(t, s)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		req, err := http.NewRequest(http.MethodDelete, url, nil)
		require.NoError(t, err)

		resp, err := idem.NewClient(over(s)).Do(req)

		require.NoError(t, err)
		require.Len(t, s.Effects(fakeserver.Filter{Kind: "cancellation"}), 1)
		require.Len(t, s.Sends(), 1+2)
		require.Equal(t, http.StatusNotFound, resp.StatusCode)
		require.Contains(t, readAll(t, resp), "not-found")
		r := idem.ReportOf(resp)
		require.True(t, r.EarlierUnknown)
		require.Equal(t, idem.Unknown, r.Outcome)
	})
}

func TestC28_NotFoundAtTheFirstDeleteIsAnAnswer(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		req, err := http.NewRequest(http.MethodDelete, s.URL()+"/v1/hotels/h1/reservations/none", nil)
		require.NoError(t, err)

		resp, err := idem.NewClient(over(s)).Do(req)

		require.NoError(t, err)
		require.Empty(t, s.Effects())
		require.Len(t, s.Sends(), 1)
		require.Equal(t, http.StatusNotFound, resp.StatusCode)
		readAll(t, resp)
		r := idem.ReportOf(resp)
		require.False(t, r.EarlierUnknown)
		require.Equal(t, idem.Refused, r.Outcome)
	})
}

func TestC28_StatusNeverSeenBeforeIsNoSuccess(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t, says(402, `{"code":"declined"}`), says(460, `{"code":"new"}`))
		ctx := idem.WithOperation(context.Background(), idem.Operation{Name: "order", ID: "c28"})
		c := idem.NewClient(p.through())

		resp, err := c.Do(newPost(t, ctx, p.url+"/orders", `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, 402, resp.StatusCode)
		require.NotEqual(t, idem.Executed, idem.OutcomeOf(resp, nil))

		resp, err = c.Do(newPost(t, ctx, p.url+"/orders", `{}`))
		require.NoError(t, err)
		require.Len(t, p.sends(), 2, "both are final")
		require.Equal(t, 460, resp.StatusCode)
		require.Contains(t, readAll(t, resp), "new")
		require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil))
		require.NoError(t, idem.ReportOf(resp).Reason)
	})
}

func TestC28_OnlySuccessAndSeeOtherCountAsExecuted(t *testing.T) {
	for status := 200; status < 600; status++ {
		executed := status/100 == 2 || status == http.StatusSeeOther
		tr := &idem.Transport{Policy: idem.Policy{MaxAttempts: 1, Budget: &idem.Budget{Capacity: -1}}}
		tr.Base = roundTripFunc(func(req *http.Request) (*http.Response, error) {
			return answer(req, status, nil, ""), nil
		})
		resp, err := tr.RoundTrip(newPost(t, context.Background(), "http://provider.test/", `{}`))
		require.NoError(t, err)
		require.Equal(t, status, resp.StatusCode)
		require.Equal(t, executed, idem.OutcomeOf(resp, nil) == idem.Executed, "status %d: %v", status, idem.OutcomeOf(resp, nil))
		require.NoError(t, resp.Body.Close())
	}
}

// --- the marks

// told is what an answer is understood as.
type told int

const (
	plain      told = iota // final, and no proof of anything under a key that was brought
	inProgress             // waited out
	reusedKey              // ErrKeyReused
	refusal                // the operation's own no
	storedFail             // a stored 5xx: final, unknown
	storedDone             // a stored 2xx
	throttled              // retried after a wait, as a failure
)

type understanding struct {
	name   string
	status int
	body   string
	header []string
	want   told
}

// understands puts each answer before a 201 and looks at what became of it.
// The key is the caller's own, so that nothing but the operation's own
// answers proves anything.
func understands(t *testing.T, d idem.Dialect, rows []understanding) {
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, says(row.status, row.body, row.header...), says(201, `{"id":"done_1"}`))
				ctx := idem.WithKey(context.Background(), "order-77")
				resp, err := p.through(speaking(d)).RoundTrip(newPost(t, ctx, p.url+"/charges", `{}`))
				require.NoError(t, err)
				readAll(t, resp)
				r := idem.ReportOf(resp)
				first := r.Attempts[0]

				switch row.want {
				case inProgress, throttled:
					require.Len(t, p.sends(), 2)
					require.Equal(t, idem.Executed, r.Outcome)
					require.Equal(t, row.want == inProgress, r.Attempts[1].N == first.N, "an in-progress send is not counted")
					return
				}
				require.Len(t, p.sends(), 1)
				require.Empty(t, first.WaitFrom)
				require.Equal(t, row.want == reusedKey, errors.Is(r.Reason, idem.ErrKeyReused), "%v", r.Reason)
				require.Equal(t, row.want == storedDone || row.want == storedFail, r.Replayed && row.status/100 != 4)
				switch row.want {
				case refusal:
					require.Equal(t, idem.Refused, r.Outcome)
				case storedDone:
					require.Equal(t, idem.Executed, r.Outcome)
				default:
					require.Equal(t, idem.Unknown, r.Outcome)
				}
			})
		})
	}
}

// codePlaces are the places where providers keep the code of an error.
var codePlaces = []string{
	`{"type":%q}`, `{"code":%q}`, `{"error":%q}`, `{"error":{"code":%q}}`, `{"error":{"type":%q}}`,
	`{"errorType":%q}`, `{"error_code":%q}`, `{"errors":[{"code":%q}]}`, `{"errors":[{"type":%q}]}`,
}

func TestGenericUnderstandsEachOfItsMarks(t *testing.T) {
	var rows []understanding
	for _, place := range codePlaces {
		for _, code := range []string{"idempotency_key_in_use", "request-in-progress", "ConcurrentRequest", "https://x.test/problems/key-in-use"} {
			rows = append(rows, understanding{"409 " + fmt.Sprintf(place, code), 409, fmt.Sprintf(place, code), nil, inProgress})
		}
		for _, code := range []string{"idempotency_error", "IDEMPOTENCY_KEY_REUSED", "https://x.test/problems/idempotency-key-reused", "IdempotentParameterMismatch"} {
			rows = append(rows, understanding{"422 " + fmt.Sprintf(place, code), 422, fmt.Sprintf(place, code), nil, reusedKey})
		}
	}
	for _, h := range []string{"Idempotent-Replayed", "Idempotency-Replayed", "Idempotent-Replay"} {
		rows = append(rows,
			understanding{"201 " + h, 201, `{}`, []string{h, "true"}, storedDone},
			understanding{"500 " + h, 500, `{}`, []string{h, "true"}, storedFail},
			understanding{"503 " + h + " with Retry-After", 503, `{}`, []string{h, "TRUE", "Retry-After", "1"}, storedFail},
			understanding{"402 " + h, 402, `{}`, []string{h, "true"}, refusal},
			understanding{"500 " + h + " false", 500, `{}`, []string{h, "false"}, throttled},
		)
	}
	rows = append(rows,
		understanding{"409 with Retry-After alone", 409, ``, []string{"Retry-After", "1"}, inProgress},
		understanding{"409 with a malformed Retry-After", 409, `{}`, []string{"Retry-After", "soon"}, plain},
		understanding{"409 of another kind", 409, `{"code":"version_conflict"}`, nil, plain},
		understanding{"422 validation", 422, `{"code":"amount_too_small"}`, nil, plain},
		understanding{"422 names the key in its text only", 422, `{"code":"invalid","detail":"not the idempotency key"}`, nil, plain},
		understanding{"422 that is not JSON", 422, `idempotency_error`, nil, plain},
		understanding{"422 with a broken body", 422, `{"code":"idempotency_error"`, nil, plain},
		understanding{"422 with a code that is an object", 422, `{"code":{"x":"idempotency"}}`, nil, plain},
		understanding{"400 with the mark of a 422", 400, `{"code":"idempotency_error"}`, nil, plain},
		understanding{"402", 402, `{}`, nil, plain},
		understanding{"404", 404, `{}`, nil, plain},
		understanding{"429", 429, `{}`, nil, throttled},
	)
	understands(t, idem.Generic, rows)
}

func TestZeroDialectIsGeneric(t *testing.T) {
	understands(t, idem.Dialect{}, []understanding{
		{"in progress", 409, `{"code":"key_in_use"}`, nil, inProgress},
		{"reused", 422, `{"code":"idempotency_error"}`, nil, reusedKey},
		{"replay", 500, `{}`, []string{"Idempotent-Replayed", "true"}, storedFail},
	})
}

func TestIETFUnderstandsEachOfItsMarks(t *testing.T) {
	const problem = `{"type":"https://developer.example.com/idempotency"}`
	understands(t, idem.IETF, []understanding{
		{"in progress", 409, problem, nil, inProgress},
		{"in progress by Retry-After", 409, `{}`, []string{"Retry-After", "1"}, inProgress},
		{"other conflict", 409, `{"type":"about:blank"}`, nil, plain},
		{"reused", 422, problem, nil, reusedKey},
		{"code instead of a type", 422, `{"code":"idempotency"}`, nil, plain},
		{"validation", 422, `{"type":"about:blank"}`, nil, plain},
		{"replayed failure", 500, `{}`, []string{"Idempotent-Replayed", "true"}, storedFail},
		{"replayed success", 200, `{}`, []string{"Idempotency-Replayed", "true"}, storedDone},
	})
}

func TestIETFSendsTheKeyAsAString(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{Quoted: true})
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		ctx := idem.WithKey(context.Background(), `order "77" \ 2`)
		c := idem.NewClient(over(s, speaking(idem.IETF)))

		resp, err := c.Do(newPayment(t, ctx, s, "ietf"))

		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, []string{`order "77" \ 2`}, keysSent(s.Sends()))
		require.Equal(t, []string{`"order \"77\" \\ 2"`}, s.Sends()[0].Keys)
		require.Equal(t, `order "77" \ 2`, idem.ReportOf(resp).Key, "the report has the key itself")
		require.True(t, idem.ReportOf(resp).Replayed)
	})
}

func TestStripeUnderstandsEachOfItsMarks(t *testing.T) {
	understands(t, idem.Stripe, []understanding{
		{"key in use", 409, `{"error":{"type":"invalid_request_error","code":"idempotency_key_in_use"}}`, nil, inProgress},
		{"conflict without a body", 409, ``, nil, inProgress},
		{"lock timeout", 429, `{"error":{"code":"lock_timeout"}}`, nil, inProgress},
		{"rate limit", 429, `{"error":{"code":"rate_limit"}}`, nil, throttled},
		{"reused", 400, `{"error":{"type":"idempotency_error"}}`, nil, reusedKey},
		{"bad request", 400, `{"error":{"type":"invalid_request_error"}}`, nil, plain},
		{"the mark of another dialect", 422, `{"code":"idempotency_error"}`, nil, plain},
		{"declined", 402, `{"error":{"type":"card_error","code":"card_declined"}}`, nil, refusal},
		{"stored failure", 500, `{"error":{"type":"api_error"}}`, []string{"Idempotent-Replayed", "true"}, storedFail},
		{"stored success", 200, `{"id":"ch_1"}`, []string{"Idempotent-Replayed", "true"}, storedDone},
		{"another replay header", 500, `{}`, []string{"Idempotent-Replay", "true"}, throttled},
	})
}

func TestStripeKnowsReferenceAndRequestID(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t, says(200, `{"id":"ch_3Lr","object":"charge"}`, "Request-Id", "req_9"))
		resp, err := p.through(speaking(idem.Stripe)).RoundTrip(newPost(t, context.Background(), p.url+"/v1/charges", `amount=1`))
		require.NoError(t, err)
		readAll(t, resp)
		r := idem.ReportOf(resp)
		require.Equal(t, "ch_3Lr", r.Reference)
		require.Equal(t, "req_9", r.Attempts[0].RequestID)
	})
}

// --- retry hints

func TestRetryHintIsObeyedBelowTheMarks(t *testing.T) {
	for _, tc := range []struct {
		name   string
		status int
		body   string
		header []string
		sends  int
		reason error
	}{
		{"true repeats a 400", 400, `{}`, []string{"X-Should-Retry", "true"}, 2, nil},
		{"true repeats a 501", 501, `{}`, []string{"X-Should-Retry", " True "}, 2, nil},
		{"true repeats a plain 409", 409, `{}`, []string{"X-Should-Retry", "true"}, 2, nil},
		{"true does not repeat a success", 200, `{}`, []string{"X-Should-Retry", "true"}, 1, nil},
		{"false stops a 503", 503, `{}`, []string{"X-Should-Retry", "false"}, 1, nil},
		{"false stops a 429 with Retry-After", 429, `{}`, []string{"X-Should-Retry", "false", "Retry-After", "1"}, 1, nil},
		{"anything else says nothing", 503, `{}`, []string{"X-Should-Retry", "maybe"}, 2, nil},
		{"in progress outranks false", 409, `{"code":"key_in_use"}`, []string{"X-Should-Retry", "false"}, 2, nil},
		{"a reused key outranks true", 422, `{"code":"idempotency_error"}`, []string{"X-Should-Retry", "true"}, 1, idem.ErrKeyReused},
		{"a stored failure outranks true", 500, `{}`, []string{"X-Should-Retry", "true", "Idempotent-Replayed", "true"}, 1, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, says(tc.status, tc.body, tc.header...), says(201, `{}`))
				resp, err := p.through().RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, p.sends(), tc.sends)
				require.ErrorIs(t, idem.ReportOf(resp).Reason, tc.reason)
			})
		})
	}
}

func TestStripeHasARetryHintOfItsOwn(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t, says(500, `{}`, "Stripe-Should-Retry", "false"), says(201, `{}`))
		resp, err := p.through(speaking(idem.Stripe)).RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, p.sends(), 1)
		require.Equal(t, 500, resp.StatusCode)
	})
}

func TestRetryHintStaysWithinTheAttempts(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t, says(400, `{}`, "X-Should-Retry", "true"))
		resp, err := p.through().RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, p.sends(), 4)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrAttemptsExhausted)
	})
}

func TestRetryHintStaysWithinTheBudget(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t, says(400, `{}`, "X-Should-Retry", "true"))
		tr := p.through(func(tr *idem.Transport) { tr.Policy.Budget = &idem.Budget{Capacity: 4, Cost: 4} })
		resp, err := tr.RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, p.sends(), 3, "the first, one for the tokens, one probe")
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrBudgetExhausted)
	})
}

// --- NoKeys

func TestNoKeysRepeatsAWriteOnlyWhenNothingWasSent(t *testing.T) {
	for _, tc := range []struct {
		name    string
		method  string
		fault   fakeserver.Fault
		refuse  int
		sends   int
		effects int
		outcome idem.Outcome
	}{
		{"POST refused at the door", http.MethodPost, fakeserver.Fault{}, 2, 1, 1, idem.Executed},
		{"POST reset after the effect", http.MethodPost, fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}, 0, 1, 1, idem.Unknown},
		{"POST reset before the effect", http.MethodPost, fakeserver.Fault{Kind: fakeserver.Reset}, 0, 1, 0, idem.Unknown},
		{"POST 503", http.MethodPost, fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, 0, 1, 0, idem.Unknown},
		{"POST 503 with Retry-After", http.MethodPost, fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "1"}, 0, 1, 0, idem.Unknown},
		{"POST 409 with Retry-After", http.MethodPost, fakeserver.Fault{Kind: fakeserver.Status, Status: 409, RetryAfter: "1"}, 0, 1, 0, idem.Unknown},
		{"DELETE reset", http.MethodDelete, fakeserver.Fault{Kind: fakeserver.Reset}, 0, 2, 0, idem.Unknown},
		{"GET 503", http.MethodGet, fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, 0, 2, 0, idem.Unknown},
	} {
		t.Run(tc.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				s.Apply(fakeserver.Settings{Optional: true})
				require.NoError(t, s.Script("", tc.fault))
				s.Refuse(tc.refuse)
				req := newPayment(t, context.Background(), s, "no-keys")
				if tc.method != http.MethodPost {
					var err error
					req, err = http.NewRequest(tc.method, s.URL()+"/v1/hotels/h1/reservations/none", nil)
					require.NoError(t, err)
				}

				resp, err := over(s, speaking(idem.NoKeys)).RoundTrip(req)
				if err == nil {
					readAll(t, resp)
				}

				require.Len(t, s.Effects(), tc.effects)
				require.Len(t, s.Sends(), tc.sends)
				for _, send := range s.Sends() {
					require.Empty(t, send.Keys)
				}
				require.Equal(t, tc.outcome, idem.OutcomeOf(resp, err))
			})
		})
	}
}

// --- a dialect of one's own

// houseDialect is a provider with a header, words and ids of its own.
func houseDialect() idem.Dialect {
	return idem.Dialect{
		Name:       "house",
		Header:     "x-request-key",
		MaxKey:     32,
		Methods:    []string{http.MethodPut},
		InProgress: []idem.Mark{{Status: 425, Header: "X-State", Value: "working"}},
		Mismatch:   []idem.Mark{{Pointer: "/fault/no", Equals: "704"}},
		AlreadyDone: []idem.Mark{
			{Status: 409, Pointer: "/reason", Contains: "idempotent creation conflict"},
			{Status: 412},
		},
		Replay:    []idem.Mark{{Header: "X-Cached"}},
		Refusal:   []idem.Mark{{Status: 422, Pointer: "/type", Contains: "sold-out"}},
		Reference: []string{"/links/existing", "/id"},
		RequestID: "x-trace",
		RetryHint: "x-again",
	}
}

func TestDialectOfOnesOwn(t *testing.T) {
	understands(t, houseDialect(), []understanding{
		{"in progress", 425, `{}`, []string{"X-State", "Working"}, inProgress},
		{"too early", 425, `{}`, []string{"X-State", "idle"}, throttled},
		{"reused, by a number", 400, `{"fault":{"no":704}}`, nil, reusedKey},
		{"reused, by a string", 418, `{"fault":{"no":"704"}}`, nil, reusedKey},
		{"another number", 400, `{"fault":{"no":7040}}`, nil, plain},
		{"refusal", 422, `{"type":"https://x.test/sold_out"}`, nil, refusal},
		{"replay", 500, `{}`, []string{"X-Cached", "whatever"}, storedFail},
		{"hint", 500, `{}`, []string{"X-Again", "false"}, plain},
	})
}

func TestInProgressIsNeverARefusalWhateverItsStatus(t *testing.T) {
	for _, status := range []int{400, 404, 409, 418, 422, 425, 202, 500} {
		virtual(t, func(t *testing.T) {
			d := idem.Generic
			d.InProgress = []idem.Mark{{Status: status, Header: "X-State", Value: "working"}}
			p := newScriptedProvider(t, says(status, `{}`, "X-State", "working"))
			tr := p.through(speaking(d), func(tr *idem.Transport) { tr.Policy.MaxInProgress = 2 })
			resp, err := tr.RoundTrip(newPost(t, context.Background(), p.url+"/charges", `{}`))
			require.NoError(t, err)
			readAll(t, resp)
			require.Len(t, p.sends(), 3, status)
			require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrInProgress, status)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, nil), status)
		})
	}
}

func TestDialectOfOnesOwnNamesHeaderMethodsAndLength(t *testing.T) {
	virtual(t, func(t *testing.T) {
		p := newScriptedProvider(t, says(200, `{}`, "X-Trace", "t-1"))
		req := newPost(t, context.Background(), p.url+"/things/1", `{}`)
		req.Method = http.MethodPut
		resp, err := p.through(speaking(houseDialect())).RoundTrip(req)
		require.NoError(t, err)
		readAll(t, resp)
		r := idem.ReportOf(resp)
		require.Equal(t, []string{r.Key}, p.sends()[0].header.Values("X-Request-Key"))
		require.Len(t, r.Key, 32, "shortened to fit, with all its bits")
		require.Equal(t, "t-1", r.Attempts[0].RequestID)
	})
}

func TestAlreadyDoneIsExecutedWithItsReference(t *testing.T) {
	const conflict = `{"reason":"idempotent_creation_conflict","links":{"existing":"PM123"}}`
	for _, tc := range []struct {
		name  string
		ctx   context.Context
		steps []providerStep
	}{
		{"after a lost answer", context.Background(), []providerStep{hangsUp, says(409, conflict)}},
		{"under a key that was brought", idem.WithKey(context.Background(), "order-77"), []providerStep{says(409, conflict)}},
		{"in another dress", idem.WithKey(context.Background(), "order-77"), []providerStep{says(412, `{"id":"PM123"}`)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, tc.steps...)
				_, err := idem.NewClient(p.through(speaking(houseDialect()))).Do(newPost(t, tc.ctx, p.url+"/payments", `{}`))
				require.Len(t, p.sends(), len(tc.steps))
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				require.ErrorIs(t, err, idem.ErrAlreadyDone)
				require.Equal(t, "PM123", e.Reference)
				require.Equal(t, idem.Executed, e.Outcome)
			})
		})
	}
}

func TestAlreadyDoneSaysNothingWhereTheKeyWasNeverSent(t *testing.T) {
	const conflict = `{"reason":"idempotent_creation_conflict","links":{"existing":"PM123"}}`
	for _, refused := range []int{0, 1} {
		t.Run(fmt.Sprintf("after %d refused connections", refused), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, says(409, conflict))
				dial := p.base.DialContext
				p.base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
					if refused > 0 {
						refused--
						return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
					}
					return dial(ctx, network, addr)
				}
				resp, err := p.through(speaking(houseDialect())).RoundTrip(newPost(t, context.Background(), p.url+"/payments", `{}`))
				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, p.sends(), 1)
				r := idem.ReportOf(resp)
				require.NotErrorIs(t, r.Reason, idem.ErrAlreadyDone)
				require.NotEqual(t, idem.Executed, r.Outcome, "the work of another operation is not ours")
				require.Empty(t, r.Reference)
			})
		})
	}
}

func TestReferenceKeepsEveryDigitOfANumericID(t *testing.T) {
	for _, id := range []string{"7", "1234567", "4012345678", "9007199254740993", "12345678901234567890"} {
		t.Run(id, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				p := newScriptedProvider(t, says(201, `{"id":`+id+`}`))
				resp, err := p.through(speaking(houseDialect())).RoundTrip(newPost(t, context.Background(), p.url+"/payments", `{}`))
				require.NoError(t, err)
				readAll(t, resp)
				require.Equal(t, id, idem.ReportOf(resp).Reference)
			})
		})
	}
}

func TestDialectsMadeFromGenericDoNotDisturbEachOther(t *testing.T) {
	house, other := idem.Generic, idem.Generic
	for _, d := range []struct {
		dialect *idem.Dialect
		code    string
	}{{&house, "house"}, {&other, "other"}} {
		mark := idem.Mark{Status: 418, Pointer: "/code", Equals: d.code}
		d.dialect.InProgress = append(d.dialect.InProgress, mark)
		d.dialect.Mismatch = append(d.dialect.Mismatch, mark)
		d.dialect.Replay = append(d.dialect.Replay, mark)
		d.dialect.Refusal = append(d.dialect.Refusal, mark)
	}
	for name, marks := range map[string][]idem.Mark{
		"InProgress": house.InProgress, "Mismatch": house.Mismatch, "Replay": house.Replay, "Refusal": house.Refusal,
	} {
		require.Equal(t, "house", marks[len(marks)-1].Equals, name)
	}
}

func TestDialectThatCannotWorkIsInvalidBeforeAnythingIsSent(t *testing.T) {
	for _, tc := range []struct {
		field string
		edit  func(*idem.Dialect)
	}{
		{"Dialect.MaxKey", func(d *idem.Dialect) { d.MaxKey = -1 }},
		{"Dialect.MaxKey", func(d *idem.Dialect) { d.MaxKey = 21 }},
		{"Dialect.Header", func(d *idem.Dialect) { d.Header = "Key Header" }},
		{"Dialect.Header", func(d *idem.Dialect) { d.Header = "Key\r\n" }},
		{"Dialect.Methods", func(d *idem.Dialect) { d.Methods = []string{"put"} }},
		{"Dialect.Methods", func(d *idem.Dialect) { d.Methods = []string{""} }},
		{"Dialect.KeyWindow", func(d *idem.Dialect) { d.KeyWindow = -time.Second }},
	} {
		t.Run(tc.field, func(t *testing.T) {
			d := idem.Generic
			tc.edit(&d)
			body := &closeCounter{Reader: strings.NewReader(`{}`)}
			tr := &idem.Transport{Dialect: d, Base: roundTripFunc(func(*http.Request) (*http.Response, error) {
				t.Error("sent")
				return nil, io.EOF
			})}
			req := newPost(t, context.Background(), "http://provider.test/", "")
			req.Body, req.GetBody, req.ContentLength = body, nil, 2
			_, err := tr.RoundTrip(req)
			require.ErrorIs(t, err, idem.ErrInvalid)
			require.ErrorContains(t, err, tc.field)
			require.EqualValues(t, 1, body.closes.Load())
		})
	}
}
