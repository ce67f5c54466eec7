package idem_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/internal/witness"
)

// handLoop is the loop that people write by hand: up to 8 sends until
// something that does not look temporary. What it may get wrong is a field.
type handLoop struct {
	base http.RoundTripper
	key  func(first string) string // of an attempt; "": none
}

func (l handLoop) call(req *http.Request) (*idem.Report, *http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, nil, err
	}
	first := req.Header.Get("Idempotency-Key")
	if first == "" {
		if first, err = idem.NewKey(); err != nil {
			return nil, nil, err
		}
	}
	report := &idem.Report{}
	for n := 1; ; n++ {
		attempt := req.Clone(req.Context())
		attempt.Body, attempt.GetBody = io.NopCloser(bytes.NewReader(body)), nil
		attempt.Header.Del("Idempotency-Key")
		if report.Key = l.key(first); report.Key != "" {
			attempt.Header.Set("Idempotency-Key", report.Key)
		}
		resp, err := l.send(attempt, report)
		if n == 8 || resp != nil && resp.StatusCode < 500 && resp.StatusCode != http.StatusTooManyRequests {
			report.Outcome = looksLike(resp)
			return report, resp, err
		}
		wait := 100 * time.Millisecond
		if resp != nil {
			if asked, err := time.ParseDuration(resp.Header.Get("Retry-After") + "s"); err == nil {
				wait += asked
			}
			_ = resp.Body.Close()
		}
		time.Sleep(wait)
	}
}

// send has a limit of its own and reads the whole answer within it.
func (l handLoop) send(req *http.Request, report *idem.Report) (*http.Response, error) {
	ctx, cancel := context.WithTimeout(req.Context(), 5*time.Second)
	defer cancel()
	report.Sends++
	resp, err := l.base.RoundTrip(req.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil {
		return nil, err
	}
	resp.Body = io.NopCloser(bytes.NewReader(text))
	return resp, nil
}

// looksLike takes the last answer at its word.
func looksLike(resp *http.Response) idem.Outcome {
	switch {
	case resp == nil:
		return idem.Unknown
	case resp.StatusCode/100 == 2:
		return idem.Executed
	case resp.StatusCode/100 == 4 && resp.StatusCode != http.StatusConflict && resp.StatusCode != http.StatusTooManyRequests:
		return idem.Refused
	}
	return idem.Unknown
}

// deafToRetryAfter hides what the server asked for.
type deafToRetryAfter struct{ base http.RoundTripper }

func (d deafToRetryAfter) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := d.base.RoundTrip(req)
	if err == nil {
		resp.Header.Del("Retry-After")
	}
	return resp, err
}

// traceless takes the trace away from the base, as a base does that is not
// built on net/http.
type traceless struct{ base http.RoundTripper }

func (b traceless) RoundTrip(req *http.Request) (*http.Response, error) {
	return b.base.RoundTrip(req.WithContext(untraced{req.Context()}))
}

type untraced struct{ context.Context }

func (c untraced) Value(key any) any {
	v := c.Context.Value(key)
	if _, ok := v.(*httptrace.ClientTrace); ok {
		return nil
	}
	return v
}

// hardship has every kind of trouble that one of the broken builds trips over.
func hardship(seed int64) []fakeserver.Fault {
	return append(fakeserver.Mixed(0.35, seed),
		fakeserver.Fault{Kind: fakeserver.Status, Status: 503, RetryAfter: "3", Rate: 0.05, Seed: seed},
		fakeserver.Fault{Kind: fakeserver.Status, Status: 401, Point: fakeserver.BeforeEffect, Rate: 0.05, Seed: seed},
	)
}

func overPolicy(edit func(*idem.Policy)) func(base http.RoundTripper) caller {
	return func(base http.RoundTripper) caller {
		p := loadPolicy()
		if edit != nil {
			edit(&p)
		}
		return viaTransport(&idem.Transport{Base: base, Policy: p})
	}
}

// Every proof is worth what it can catch: each broken build here violates the
// rule that it breaks in the eyes of the same witness that finds nothing
// against the Transport.
func TestNegativeControls(t *testing.T) {
	const ops = 600
	honest := overPolicy(nil)
	sameKey := func(first string) string { return first }
	for _, c := range []struct {
		name     string
		broken   func(base http.RoundTripper) caller
		settings fakeserver.Settings // for both builds
		server   fakeserver.Settings // for the broken one, where the server is what is broken
		catches  []witness.Rule
	}{
		{
			name: "a key for each attempt",
			broken: func(base http.RoundTripper) caller {
				fresh := func(string) string { k, _ := idem.NewKey(); return k }
				return handLoop{base, fresh}.call
			},
			catches: []witness.Rule{witness.OneEffect, witness.OneKey},
		},
		{
			name: "retries without a key",
			broken: func(base http.RoundTripper) caller {
				return handLoop{base, func(string) string { return "" }}.call
			},
			settings: fakeserver.Settings{Optional: true},
			catches:  []witness.Rule{witness.OneEffect},
		},
		{
			name: "undercuts Retry-After",
			broken: func(base http.RoundTripper) caller {
				return overPolicy(nil)(deafToRetryAfter{base})
			},
			catches: []witness.Rule{witness.PatientWaits},
		},
		{
			name: "calls a 401 after a lost answer a refusal",
			broken: func(base http.RoundTripper) caller {
				return handLoop{base, sameKey}.call
			},
			catches: []witness.Rule{witness.TrueDenial},
		},
		{
			name: "claims NotExecuted without a trace",
			broken: func(base http.RoundTripper) caller {
				call := overPolicy(func(p *idem.Policy) { p.MaxAttempts = 1 })(traceless{base})
				return func(req *http.Request) (*idem.Report, *http.Response, error) {
					report, resp, err := call(req)
					if err != nil && errors.Is(err, idem.ErrAttemptsExhausted) {
						report.Outcome = idem.NotExecuted // there was no answer, was there?
					}
					return report, resp, err
				}
			},
			catches: []witness.Rule{witness.TrueDenial},
		},
		{
			name:    "hands cut answers on as success",
			broken:  overPolicy(func(p *idem.Policy) { p.MaxResponseBuffer = -1 }),
			catches: []witness.Rule{witness.WholeAnswer},
		},
		{
			name: "reports one send, however many there were",
			broken: func(base http.RoundTripper) caller {
				call := overPolicy(nil)(base)
				return func(req *http.Request) (*idem.Report, *http.Response, error) {
					report, resp, err := call(req)
					report.Sends = 1
					return report, resp, err
				}
			},
			catches: []witness.Rule{witness.HonestSends},
		},
		{
			name: "claims success for any answer",
			broken: func(base http.RoundTripper) caller {
				call := overPolicy(nil)(base)
				return func(req *http.Request) (*idem.Report, *http.Response, error) {
					report, resp, err := call(req)
					if resp != nil {
						report.Outcome = idem.Executed
					}
					return report, resp, err
				}
			},
			catches: []witness.Rule{witness.TrueSuccess},
		},
		{
			name:    "a server that does not de-duplicate",
			broken:  honest,
			server:  fakeserver.Settings{IgnoreKeys: true},
			catches: []witness.Rule{witness.OneEffect},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := load{ops: ops, seed: 3, faults: hardship(3), settings: c.settings, through: honest}
			requireHonest(t, l.run(t).violations)

			l.through = c.broken
			l.settings.IgnoreKeys = c.server.IgnoreKeys
			caught := map[witness.Rule]int{}
			for _, v := range l.run(t).violations {
				caught[v.Rule]++
			}
			t.Logf("caught: %v", caught)
			for _, rule := range c.catches {
				require.NotZero(t, caught[rule], "the broken build went unnoticed: %s", rule)
			}
		})
	}
}

// The same build that lies without a trace is the Transport as it is: over a
// base that does not trace it claims nothing that it cannot know.
func TestBaseWithoutTraceIsNeverNotExecuted(t *testing.T) {
	l := load{ops: 600, seed: 4, faults: hardship(4), through: func(base http.RoundTripper) caller {
		return overPolicy(func(p *idem.Policy) { p.MaxAttempts = 1 })(traceless{base})
	}}
	requireHonest(t, l.run(t).violations)
}
