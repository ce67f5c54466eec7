package interop_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-resty/resty/v2"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/oauth2"
	"golang.org/x/oauth2/clientcredentials"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

type payment struct {
	ID string `json:"id"`
}

func restyPay(t *testing.T, c *resty.Client, ctx context.Context) (made payment, resp *resty.Response, err error) {
	t.Helper()
	resp, err = c.R().SetContext(ctx).
		SetBody(map[string]any{"amount": 1999, "currency": "usd", "reference": "order-1"}).
		SetResult(&made).Post("/v1/payments")
	return made, resp, err
}

func restyOver(s *fakeserver.Server, rt http.RoundTripper) *resty.Client {
	return resty.NewWithClient(&http.Client{Transport: rt}).SetBaseURL(s.URL()).SetLogger(silent{})
}

// silent is a resty logger.
type silent struct{}

func (silent) Errorf(string, ...any) {}
func (silent) Warnf(string, ...any)  {}
func (silent) Debugf(string, ...any) {}

func TestRestyChargesOnceWhenAnswersAreLost(t *testing.T) {
	s := fake(t, fakeserver.Settings{}, lostAnswers(2))
	made, resp, err := restyPay(t, restyOver(s, &idem.Transport{Base: loopback(t), Policy: policy()}), t.Context())
	require.Len(t, s.Effects(fakeserver.Filter{}), 1)
	require.NoError(t, err)
	require.Equal(t, s.Effects(fakeserver.Filter{})[0].ID, made.ID)
	requireOneKey(t, s.Sends(fakeserver.Filter{}))
	require.Equal(t, idem.Executed, idem.OutcomeOf(resp.RawResponse, err))
	require.True(t, idem.ReportOf(resp.RawResponse).EarlierUnknown)
}

func TestRestyCalledTwiceForOneOperationChargesOnce(t *testing.T) {
	s := fake(t, fakeserver.Settings{})
	c := restyOver(s, &idem.Transport{Base: loopback(t), Policy: policy()})
	ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-1/1"})
	first, _, err := restyPay(t, c, ctx)
	require.NoError(t, err)
	second, resp, err := restyPay(t, c, ctx)
	require.NoError(t, err)
	require.Len(t, s.Effects(fakeserver.Filter{}), 1)
	require.Equal(t, first.ID, second.ID)
	requireOneKey(t, s.Sends(fakeserver.Filter{}))
	require.True(t, idem.ReportOf(resp.RawResponse).Replayed)
}

// Every call that resty repeats is a RoundTrip of its own: it must bring the key.
func TestRestysOwnRetriesShareTheKeyOfTheContext(t *testing.T) {
	s := fake(t, fakeserver.Settings{}, lostAnswers(2))
	p := policy()
	p.MaxAttempts = 1
	c := restyOver(s, &idem.Transport{Base: loopback(t), Policy: p}).
		SetRetryCount(3).SetRetryWaitTime(time.Millisecond)
	key, err := idem.NewKey()
	require.NoError(t, err)
	_, resp, err := restyPay(t, c, idem.WithKey(t.Context(), key))
	require.Len(t, s.Effects(fakeserver.Filter{}), 1)
	require.NoError(t, err)
	requireOneKey(t, s.Sends(fakeserver.Filter{}))
	require.Equal(t, idem.Executed, idem.OutcomeOf(resp.RawResponse, err))
}

func TestRestyHandsOnTheTypedError(t *testing.T) {
	s := fake(t, fakeserver.Settings{}, fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect})
	_, _, err := restyPay(t, restyOver(s, &idem.Transport{Base: loopback(t), Policy: policy()}), t.Context())
	require.Len(t, s.Effects(fakeserver.Filter{}), 1)
	e := errorOf(t, err)
	require.ErrorIs(t, e, idem.ErrAttemptsExhausted)
	require.Equal(t, idem.Unknown, e.Outcome)
}

// tokens is a token endpoint: each token is another credential of account acct.
type tokens struct {
	*httptest.Server
	issued  atomic.Int32
	expires int // seconds
	broken  atomic.Bool
}

func tokenEndpoint(t *testing.T, expires int) *tokens {
	k := &tokens{expires: expires}
	k.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if k.broken.Load() {
			http.Error(w, "the token endpoint is down", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{
			"access_token": fmt.Sprint("acct.secret-", k.issued.Add(1)), "token_type": "Bearer", "expires_in": k.expires,
		})
	}))
	t.Cleanup(k.Close)
	return k
}

// below is an oauth2.Transport as people make it.
func (k *tokens) below(base http.RoundTripper) *oauth2.Transport {
	config := clientcredentials.Config{ClientID: "c", ClientSecret: "s", TokenURL: k.URL, AuthStyle: oauth2.AuthStyleInParams}
	return &oauth2.Transport{Source: config.TokenSource(context.Background()), Base: base}
}

func TestOAuth2BelowChargesOnceWhenAnswersAreLost(t *testing.T) {
	s := fake(t, fakeserver.Settings{}, lostAnswers(2))
	k := tokenEndpoint(t, 3600)
	c := post(t, t.Context(), &idem.Transport{Base: k.below(loopback(t)), Policy: policy()}, s.URL()+"/v1/payments", charge("order-1"))
	require.Len(t, s.Effects(fakeserver.Filter{}), 1)
	require.NoError(t, c.err)
	requireOneKey(t, s.Sends(fakeserver.Filter{}))
	require.Equal(t, idem.Executed, c.report.Outcome)
	require.Equal(t, 3, c.report.Sends)
	require.EqualValues(t, 1, k.issued.Load())
}

// A token that expires between two attempts is another credential and the same
// account.
func TestOAuth2TokenThatChangesBetweenAttemptsKeepsTheKey(t *testing.T) {
	s := fake(t, fakeserver.Settings{KeyPer: fakeserver.PerAccount}, lostAnswers(2))
	k := tokenEndpoint(t, 1) // oauth2 renews tokens 10 s early: each is used once
	c := post(t, t.Context(), &idem.Transport{Base: k.below(loopback(t)), Policy: policy()}, s.URL()+"/v1/payments", charge("order-1"))
	require.Len(t, s.Effects(fakeserver.Filter{}), 1)
	require.NoError(t, c.err)
	requireOneKey(t, s.Sends(fakeserver.Filter{}))
	require.Equal(t, idem.Executed, c.report.Outcome)
	require.EqualValues(t, 3, k.issued.Load())
}

// oauth2 fails before its base is asked, so nothing is traced, and idem does
// not claim what it cannot prove.
func TestOAuth2WithoutATokenIsUnknownAndNotCharged(t *testing.T) {
	s := fake(t, fakeserver.Settings{})
	k := tokenEndpoint(t, 3600)
	k.broken.Store(true)
	c := post(t, t.Context(), &idem.Transport{Base: k.below(loopback(t)), Policy: policy()}, s.URL()+"/v1/payments", charge("order-1"))
	require.Empty(t, s.Effects(fakeserver.Filter{}))
	require.Equal(t, idem.Unknown, c.report.Outcome)
	var refused *oauth2.RetrieveError
	require.ErrorAs(t, c.err, &refused)
}

func TestOAuth2BelowKeepsTheProofThatNothingWasSent(t *testing.T) {
	k := tokenEndpoint(t, 3600)
	c := post(t, t.Context(), &idem.Transport{Base: k.below(loopback(t)), Policy: policy()}, "http://"+refused(t)+"/v1/payments", charge("order-1"))
	require.Equal(t, idem.NotExecuted, c.report.Outcome)
	require.Zero(t, c.report.Sends)
	require.ErrorIs(t, c.err, idem.ErrAttemptsExhausted)
}

// spans is an otelhttp.Transport below, with what it exports.
func spans(t *testing.T, base http.RoundTripper) (*otelhttp.Transport, *tracetest.InMemoryExporter, trace.Tracer) {
	exporter := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))
	t.Cleanup(func() { _ = provider.Shutdown(context.Background()) })
	return otelhttp.NewTransport(base, otelhttp.WithTracerProvider(provider), otelhttp.WithPropagators(propagation.TraceContext{})),
		exporter, provider.Tracer("interop")
}

func TestOtelhttpBelowGivesEachAttemptItsSpan(t *testing.T) {
	s := fake(t, fakeserver.Settings{}, lostAnswers(2))
	base, exporter, tracer := spans(t, loopback(t))
	ctx, parent := tracer.Start(t.Context(), "pay")
	c := post(t, ctx, &idem.Transport{Base: base, Policy: policy()}, s.URL()+"/v1/payments", charge("order-1"))
	parent.End()
	require.Len(t, s.Effects(fakeserver.Filter{}), 1)
	require.NoError(t, c.err)
	sends := s.Sends(fakeserver.Filter{})
	requireOneKey(t, sends)
	require.Equal(t, idem.Executed, c.report.Outcome)
	require.Equal(t, 3, c.report.Sends)

	ended := exporter.GetSpans()
	require.Len(t, ended, 4, "three attempts and their parent")
	parents := map[string]bool{}
	for _, send := range sends {
		parents[send.Header.Get("Traceparent")] = true
	}
	require.Len(t, parents, 3, "each attempt names its own span to the server")
	for _, span := range ended[:3] {
		require.Equal(t, parent.SpanContext().SpanID(), span.Parent.SpanID())
		require.True(t, parents[fmt.Sprintf("00-%s-%s-01", span.SpanContext.TraceID(), span.SpanContext.SpanID())])
	}
	require.Contains(t, ended[2].Attributes, attribute.Int("http.response.status_code", http.StatusCreated))
}

func TestOtelhttpBelowKeepsTheProofThatNothingWasSent(t *testing.T) {
	base, exporter, _ := spans(t, loopback(t))
	c := post(t, t.Context(), &idem.Transport{Base: base, Policy: policy()}, "http://"+refused(t)+"/v1/payments", charge("order-1"))
	require.Equal(t, idem.NotExecuted, c.report.Outcome)
	require.Zero(t, c.report.Sends)
	require.ErrorIs(t, c.err, idem.ErrAttemptsExhausted)
	require.Len(t, exporter.GetSpans(), policy().MaxAttempts)
}
