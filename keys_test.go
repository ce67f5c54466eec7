package idem_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

func withDialect(d idem.Dialect) func(*idem.Transport) {
	return func(tr *idem.Transport) { tr.Dialect = d }
}

func withMaxKey(n int) func(*idem.Transport) {
	d := idem.Generic
	d.MaxKey = n
	return withDialect(d)
}

func withAttempts(n int) func(*idem.Transport) {
	return func(tr *idem.Transport) { tr.Policy.MaxAttempts = n }
}

// keyOf is the key in what a call returned.
func keyOf(t *testing.T, resp *http.Response, err error) string {
	t.Helper()
	if resp != nil {
		return idem.ReportOf(resp).Key
	}
	var e *idem.Error
	require.ErrorAs(t, err, &e)
	return e.Key
}

func TestC09_KeyOfTheCallerIsKept(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, fakeserver.Fault{}))
		req := newPayment(t, t.Context(), s, "order-77")
		req.Header.Set("Idempotency-Key", "order-77")
		resp, err := over(s).RoundTrip(req)
		require.NoError(t, err)
		readAll(t, resp)

		require.Len(t, s.Effects(), 1)
		sends := s.Sends()
		require.Len(t, sends, 2)
		for _, send := range sends {
			require.Equal(t, []string{"order-77"}, send.Keys)
		}
		require.Equal(t, "order-77", idem.ReportOf(resp).Key)
		require.Equal(t, "header", idem.ReportOf(resp).KeyFrom)
		require.Equal(t, []string{"order-77"}, req.Header.Values("Idempotency-Key"))
	})
}

func TestC10_OneValueOfTheKeyWhateverTheSpelling(t *testing.T) {
	for _, name := range []string{"idempotency-key", "IDEMPOTENCY-KEY", "Idempotency-key"} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, fakeserver.Fault{}))
				req := newPayment(t, t.Context(), s, "order-10")
				req.Header[name] = []string{"mine"}
				resp, err := over(s).RoundTrip(req)
				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 2)
				for _, send := range s.Sends() {
					require.Equal(t, []string{"mine"}, send.Keys)
				}
				require.Equal(t, []string{"mine"}, req.Header[name], "the caller's header")
				require.Empty(t, req.Header.Values("Idempotency-Key"), "the caller's header")
			})
		})
	}
}

func TestC10_TwoValuesOfTheKeyAreRefused(t *testing.T) {
	for name, header := range map[string]http.Header{
		"two values":        {"Idempotency-Key": {"a", "b"}},
		"equal values":      {"Idempotency-Key": {"a", "a"}},
		"two spellings":     {"Idempotency-Key": {"a"}, "idempotency-key": {"b"}},
		"one of them empty": {"Idempotency-Key": {"a", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				l := new(closeLedger)
				req := newCountedPost(t, t.Context(), s.URL()+"/v1/payments", paymentJSON("order-10", 1999), true, l)
				req.Header = header
				start := time.Now()
				_, err := over(s).RoundTrip(req)
				require.Empty(t, s.Sends())
				require.ErrorIs(t, err, idem.ErrKeyInvalid)
				require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
				require.Zero(t, time.Since(start))
				l.requireOnce(t)
			})
		})
	}
}

func TestC10_PrepareCannotChangeOrAddTheKey(t *testing.T) {
	changes := map[string]func(*http.Request){
		"sets another":           func(r *http.Request) { r.Header.Set("Idempotency-Key", "hook") },
		"adds a second":          func(r *http.Request) { r.Header.Add("Idempotency-Key", "hook") },
		"adds another spelling":  func(r *http.Request) { r.Header["idempotency-key"] = []string{"hook"} },
		"takes it off":           func(r *http.Request) { r.Header.Del("Idempotency-Key") },
		"writes into its value":  func(r *http.Request) { r.Header["Idempotency-Key"][0] = "hook" },
		"replaces the header":    func(r *http.Request) { r.Header = http.Header{} },
		"adds the same twice":    func(r *http.Request) { r.Header.Add("Idempotency-Key", r.Header.Get("Idempotency-Key")) },
		"empties its value list": func(r *http.Request) { r.Header["Idempotency-Key"] = []string{} },
	}
	for change, f := range changes {
		for _, given := range []string{"", "mine"} {
			for _, attempt := range []int{1, 2} {
				t.Run(fmt.Sprintf("%s, key %q, attempt %d", change, given, attempt), func(t *testing.T) {
					virtual(t, func(t *testing.T) {
						s := inMemory(t)
						require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
						calls := 0
						tr := over(s, func(tr *idem.Transport) {
							tr.Prepare = func(r *http.Request) error {
								if calls++; calls == attempt {
									f(r)
								}
								return nil
							}
						})
						req := newPayment(t, t.Context(), s, "order-10")
						if given != "" {
							req.Header.Set("Idempotency-Key", given)
						}
						_, err := tr.RoundTrip(req)
						require.Empty(t, s.Effects())
						require.Len(t, s.Sends(), attempt-1)
						require.ErrorIs(t, err, idem.ErrInvalid)
						require.ErrorContains(t, err, "Prepare")
						require.Equal(t, given, req.Header.Get("Idempotency-Key"))
					})
				})
			}
		}
	}
}

func TestC10_PrepareCannotAddAKeyToARequestWithoutOne(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{Optional: true})
		tr := over(s, func(tr *idem.Transport) {
			tr.Prepare = func(r *http.Request) error { r.Header["idempotency-key"] = []string{"hook"}; return nil }
		})
		_, err := tr.RoundTrip(newPayment(t, idem.WithoutKey(t.Context()), s, "order-10"))
		require.Empty(t, s.Sends())
		require.ErrorIs(t, err, idem.ErrInvalid)
	})
}

func TestC11_SameOperationCalledAgainHasTheSameEffect(t *testing.T) {
	op := idem.Operation{Name: "charge", ID: "order-11/1"}
	handle := func(ctx context.Context) context.Context { return idem.WithOperation(ctx, op) }
	for name, contexts := range map[string]func(context.Context) (first, second context.Context){
		"operation in a new context": func(ctx context.Context) (context.Context, context.Context) { return handle(ctx), handle(ctx) },
		"operation in the same context": func(ctx context.Context) (context.Context, context.Context) {
			ctx = handle(ctx)
			return ctx, ctx
		},
		"key in a new context": func(ctx context.Context) (context.Context, context.Context) {
			return idem.WithKey(ctx, "order-11/1"), idem.WithKey(ctx, "order-11/1")
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				hang := fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}
				require.NoError(t, s.Script("", repeat(4, hang)...))
				tr := over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 30 * time.Millisecond })
				first, second := contexts(t.Context())
				_, err := tr.RoundTrip(newPayment(t, first, s, "order-11"))
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 4)
				require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
				require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
				key := keyOf(t, nil, err)

				resp, err := tr.RoundTrip(newPayment(t, second, s, "order-11"))
				require.NoError(t, err)
				readAll(t, resp)
				require.Len(t, s.Effects(), 1)
				require.Equal(t, []string{key}, keysSent(s.Sends()))
				require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
				require.True(t, idem.ReportOf(resp).Replayed)

				independent, err := tr.RoundTrip(newPayment(t, t.Context(), s, "order-11"))
				require.NoError(t, err)
				readAll(t, independent)
				require.Len(t, s.Effects(), 2)
				require.NotEqual(t, key, idem.ReportOf(independent).Key)
			})
		})
	}
}

// The row for a GOAWAY waits for the server that speaks HTTP/2 frames.
func TestC12_SameKeyAfterEveryKindOfFirstFailure(t *testing.T) {
	status := func(code int, retryAfter string) func(*fakeserver.Server) error {
		return func(s *fakeserver.Server) error {
			return s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: code, RetryAfter: retryAfter}, fakeserver.Fault{})
		}
	}
	fault := func(f fakeserver.Fault) func(*fakeserver.Server) error {
		return func(s *fakeserver.Server) error { return s.Script("", f, fakeserver.Fault{}) }
	}
	keys := map[string]func(*http.Request) *http.Request{
		"minted":  func(r *http.Request) *http.Request { return r },
		"header":  func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", "order-12"); return r },
		"context": func(r *http.Request) *http.Request { return r.WithContext(idem.WithKey(r.Context(), "order-12")) },
		"operation": func(r *http.Request) *http.Request {
			return r.WithContext(idem.WithOperation(r.Context(), idem.Operation{Name: "charge", ID: "order-12/1"}))
		},
	}
	for _, c := range []struct {
		name  string
		lay   func(*fakeserver.Server) error
		sends int
	}{
		{"dial error", func(s *fakeserver.Server) error { s.Refuse(1); return nil }, 1},
		{"reset before the effect", fault(fakeserver.Fault{Kind: fakeserver.Reset}), 2},
		{"reset after the effect", fault(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}), 2},
		{"close without an answer", fault(fakeserver.Fault{Kind: fakeserver.Close, Point: fakeserver.AfterEffect}), 2},
		{"answer cut in its headers", fault(fakeserver.Fault{Kind: fakeserver.CutHeaders}), 2},
		{"answer cut in its body", fault(fakeserver.Fault{Kind: fakeserver.CutBody}), 2},
		{"chunked answer cut", fault(fakeserver.Fault{Kind: fakeserver.CutBody, Encoding: "chunked"}), 2},
		{"not HTTP", fault(fakeserver.Fault{Kind: fakeserver.Garbage}), 2},
		{"header timeout", fault(fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect}), 2},
		{"408", status(408, ""), 2},
		{"409 with Retry-After", status(409, "1"), 2},
		{"421", status(421, ""), 2},
		{"425", status(425, ""), 2},
		{"429", status(429, ""), 2},
		{"429 with Retry-After", status(429, "1"), 2},
		{"500", status(500, ""), 2},
		{"502", status(502, ""), 2},
		{"503", status(503, ""), 2},
		{"504", status(504, ""), 2},
		{"stale connection", func(s *fakeserver.Server) error {
			return s.Script("warm-up", fakeserver.Fault{Kind: fakeserver.Stale})
		}, 1}, // what a dead connection swallows is no send
	} {
		for from, key := range keys {
			t.Run(c.name+", "+from, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, c.lay(s))
					tr := over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 50 * time.Millisecond })
					warmUp := 0
					if c.name == "stale connection" {
						warmUp = 1
						resp, err := tr.RoundTrip(newPayment(t, idem.WithKey(t.Context(), "warm-up"), s, "warm-up"))
						require.NoError(t, err)
						readAll(t, resp)
					}
					resp, err := tr.RoundTrip(key(newPayment(t, t.Context(), s, "order-12")))
					require.NoError(t, err)
					readAll(t, resp)

					require.Len(t, s.Effects(), 1+warmUp)
					sends := s.Sends()[warmUp:]
					require.Len(t, sends, c.sends)
					r := idem.ReportOf(resp)
					for _, send := range sends {
						require.Equal(t, []string{r.Key}, send.Keys)
					}
					require.Len(t, r.Attempts, 2)
					require.Equal(t, from, r.KeyFrom)
					require.Equal(t, http.StatusCreated, resp.StatusCode)
					require.Equal(t, idem.Executed, r.Outcome)
				})
			})
		}
	}
}

func TestC14_RebuiltBodyThatDiffersIsRefused(t *testing.T) {
	const written = `{"amount":1999,"currency":"usd","reference":"order-14"}`
	const rebuilt = `{"currency":"usd","amount":1999,"reference":"order-14"}`
	require.Len(t, rebuilt, len(written))
	for name, handle := range map[string]func(context.Context) context.Context{
		"operation": func(ctx context.Context) context.Context {
			return idem.WithOperation(ctx, idem.Operation{Name: "charge", ID: "order-14/1"})
		},
		"key": func(ctx context.Context) context.Context { return idem.WithKey(ctx, "order-14/1") },
	} {
		for how, post := range map[string]func(testing.TB, context.Context, string, string) *http.Request{
			"rewindable": newPost, "read once": newPostOnce,
		} {
			t.Run(name+", "+how, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
					tr := over(s, withAttempts(1))
					ctx := handle(t.Context())
					url := s.URL() + "/v1/payments"
					_, err := tr.RoundTrip(post(t, ctx, url, written))
					require.Len(t, s.Effects(), 1)
					require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))

					_, err = tr.RoundTrip(post(t, ctx, url, rebuilt))
					require.Len(t, s.Sends(), 1)
					require.ErrorIs(t, err, idem.ErrKeyReused)
					require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))

					resp, err := tr.RoundTrip(post(t, ctx, url, written))
					require.NoError(t, err)
					readAll(t, resp)
					require.Len(t, s.Effects(), 1)
					require.Len(t, keysSent(s.Sends()), 1)
					require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
				})
			})
		}
	}
}

func TestC15_KeyOfOneOperationIsNotSpentOnAnother(t *testing.T) {
	type call func(t *testing.T, ctx context.Context, s *fakeserver.Server) *http.Request
	post := func(path, body string) call {
		return func(t *testing.T, ctx context.Context, s *fakeserver.Server) *http.Request {
			return newPost(t, ctx, s.URL()+path, body)
		}
	}
	pay := post("/v1/payments", paymentJSON("order-15", 10))
	for _, c := range []struct {
		name   string
		second call
		names  []string // what the error must name beside the first request
	}{
		{"another amount", post("/v1/payments", paymentJSON("order-15", 20)), []string{"content"}},
		{"another length", post("/v1/payments", paymentJSON("order-15", 1000)), []string{"55 bytes"}},
		{"another endpoint", post("/v1/payments/pay_1/refunds", paymentJSON("order-15", 10)), []string{"/v1/payments/pay_1/refunds"}},
		{"another query", post("/v1/payments?account=2", paymentJSON("order-15", 10)), []string{"query"}},
		{"another method", func(t *testing.T, ctx context.Context, s *fakeserver.Server) *http.Request {
			req := pay(t, ctx, s)
			req.Method = http.MethodPatch
			return req
		}, []string{"PATCH"}},
		{"no body", post("/v1/payments", ""), []string{"0 bytes"}},
		{"another scope", func(t *testing.T, ctx context.Context, s *fakeserver.Server) *http.Request {
			req := pay(t, ctx, s)
			req.Header.Set("Account", "other")
			return req
		}, []string{"scope"}},
	} {
		for from, handle := range map[string]func(context.Context) context.Context{
			"key": func(ctx context.Context) context.Context { return idem.WithKey(ctx, "order-15") },
			"operation": func(ctx context.Context) context.Context {
				return idem.WithOperation(ctx, idem.Operation{Name: "charge", ID: "order-15/1"})
			},
		} {
			t.Run(c.name+", "+from, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					s.Apply(fakeserver.Settings{Lenient: true})
					tr := over(s, func(tr *idem.Transport) {
						tr.Scope = func(r *http.Request) string { return r.Header.Get("Account") }
					})
					ctx := handle(t.Context())
					resp, err := tr.RoundTrip(pay(t, ctx, s))
					require.NoError(t, err)
					readAll(t, resp)

					start := time.Now()
					_, err = tr.RoundTrip(c.second(t, ctx, s))
					require.Len(t, s.Effects(), 1)
					require.Len(t, s.Sends(), 1)
					require.ErrorIs(t, err, idem.ErrKeyReused)
					require.ErrorContains(t, err, "POST "+s.URL()+"/v1/payments (53 bytes)")
					for _, name := range c.names {
						require.ErrorContains(t, err, name)
					}
					require.Zero(t, time.Since(start))
				})
			})
		}
	}
}

func TestC15_KeyInFlightForAnotherRequestIsRefused(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{Lenient: true})
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: time.Second}))
		tr := over(s)
		var first sync.WaitGroup
		first.Go(func() {
			resp, err := tr.RoundTrip(newPost(t, idem.WithKey(t.Context(), "order-15"), s.URL()+"/v1/payments", paymentJSON("order-15", 10)))
			if err == nil {
				_ = resp.Body.Close()
			}
		})
		synctest.Wait()
		start := time.Now()
		_, err := tr.RoundTrip(newPost(t, idem.WithKey(t.Context(), "order-15"), s.URL()+"/v1/payments", paymentJSON("order-15", 20)))
		require.ErrorIs(t, err, idem.ErrKeyReused)
		require.Zero(t, time.Since(start))
		first.Wait()
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
	})
}

func TestC16_MillionKeysWithTheClockStandingStill(t *testing.T) {
	const goroutines = 64
	each := 15625
	if raceDetector { // under which a million would take many seconds
		each /= 10
	}
	all := make([][16]byte, goroutines*each)
	virtual(t, func(t *testing.T) {
		start := time.Now()
		var group sync.WaitGroup
		for g := range goroutines {
			group.Go(func() {
				for i := range each {
					key, err := idem.NewKey()
					if err != nil {
						t.Error(err)
						return
					}
					all[g*each+i] = uuid.MustParse(key)
				}
			})
		}
		group.Wait()
		require.Zero(t, time.Since(start))
	})
	var counts [16][256]int
	for i := range all {
		for place, value := range all[i] {
			counts[place][value]++
		}
	}
	// Each of the 122 free bits is set in half of the keys, within six
	// standard deviations.
	half, far := len(all)/2, int(6*math.Sqrt(float64(len(all)))/2)
	random := 0
	for bit := range 128 {
		set := 0
		for value, n := range counts[bit/8] {
			set += n * (value >> (7 - bit%8) & 1)
		}
		if set > half-far && set < half+far {
			random++
		}
	}
	require.GreaterOrEqual(t, random, 122)
	slices.SortFunc(all, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })
	require.Len(t, slices.Compact(all), goroutines*each, "duplicates")
}

const keyPrinter = "IDEM_TEST_PRINT_KEYS"

func TestC16_TwoProcessesStartedTogetherShareNoKey(t *testing.T) {
	const each = 10000
	if os.Getenv(keyPrinter) != "" { // in the child
		for range each {
			key, err := idem.NewKey()
			if err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			fmt.Println("key", key)
		}
		os.Exit(0)
	}
	children := make([]*exec.Cmd, 2)
	printed := make([]strings.Builder, len(children))
	for i := range children {
		children[i] = exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		children[i].Env = append(os.Environ(), keyPrinter+"=1")
		children[i].Stdout = &printed[i]
		require.NoError(t, children[i].Start())
	}
	seen := map[string]bool{}
	for i, child := range children {
		require.NoError(t, child.Wait(), printed[i].String())
		for line := range strings.Lines(printed[i].String()) {
			if key, ok := strings.CutPrefix(line, "key "); ok {
				seen[key] = true
			}
		}
	}
	require.Len(t, seen, len(children)*each)
}

func TestC16_FailingRandomSourceSendsNothing(t *testing.T) {
	dry := errors.New("no entropy")
	source := rand.Reader
	rand.Reader = iotest.ErrReader(dry)
	t.Cleanup(func() { rand.Reader = source })

	_, err := idem.NewKey()
	require.ErrorIs(t, err, idem.ErrKeyInvalid)
	require.ErrorIs(t, err, dry)

	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		l := new(closeLedger)
		_, err := over(s).RoundTrip(newCountedPost(t, t.Context(), s.URL()+"/v1/payments", paymentJSON("order-16", 10), true, l))
		require.Empty(t, s.Sends())
		require.ErrorIs(t, err, idem.ErrKeyInvalid)
		require.ErrorIs(t, err, dry)
		require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
		l.requireOnce(t)
	})
}

func TestC17_KeyThatCannotBeSentIsRefused(t *testing.T) {
	places := map[string]func(*http.Request, string) *http.Request{
		"header":  func(r *http.Request, key string) *http.Request { r.Header["Idempotency-Key"] = []string{key}; return r },
		"context": func(r *http.Request, key string) *http.Request { return r.WithContext(idem.WithKey(r.Context(), key)) },
	}
	for name, key := range map[string]string{
		"empty": "", "blank": "   ", "tabs": "\t\t", "newline": "a\nb", "carriage return": "a\rb", "null": "a\x00b",
		"delete": "a\x7fb", "tab within": "a\tb", "not ASCII": "bestéllung", "not UTF-8": "a\xffb",
		"leading space": " a", "trailing space": "a ", "300 characters": strings.Repeat("k", 300), "46 characters": strings.Repeat("k", 46),
	} {
		for place, put := range places {
			t.Run(name+" in the "+place, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					s.Apply(fakeserver.Settings{Optional: true})
					l := new(closeLedger)
					req := newCountedPost(t, t.Context(), s.URL()+"/v1/payments", paymentJSON("order-17", 10), true, l)
					start := time.Now()
					_, err := over(s, withMaxKey(45)).RoundTrip(put(req, key))
					require.Empty(t, s.Sends())
					require.ErrorIs(t, err, idem.ErrKeyInvalid)
					require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
					require.Zero(t, time.Since(start))
					l.requireOnce(t)
				})
			})
		}
	}
}

func TestC17_LongestKeyIsSent(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		key := strings.Repeat("k", 43) + " ~"
		resp, err := over(s, withMaxKey(45)).RoundTrip(newPayment(t, idem.WithKey(t.Context(), key), s, "order-17"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, []string{key}, keysSent(s.Sends()))
	})
}

func TestC17_EmptyListOfValuesIsNoKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		req := newPayment(t, t.Context(), s, "order-17")
		req.Header["Idempotency-Key"] = []string{}
		resp, err := over(s).RoundTrip(req)
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, "minted", idem.ReportOf(resp).KeyFrom)
	})
}

// keyForms are how 128 bits are written under a limit.
var keyForms = []struct {
	most, length int
	read         func(string) ([]byte, error)
}{
	{0, 36, readUUID}, {255, 36, readUUID}, {36, 36, readUUID},
	{35, 32, hex.DecodeString}, {32, 32, hex.DecodeString},
	{31, 22, base64.RawURLEncoding.DecodeString}, {22, 22, base64.RawURLEncoding.DecodeString},
}

func readUUID(s string) ([]byte, error) {
	u, err := uuid.Parse(s)
	return u[:], err
}

func TestC17_MadeKeysFitTheLimitUncut(t *testing.T) {
	op := idem.Operation{Name: "charge", ID: "order-17/1"}
	derived, err := idem.DeriveKey("", op.Name, op.ID)
	require.NoError(t, err)
	want, err := readUUID(derived)
	require.NoError(t, err)
	for _, form := range keyForms {
		t.Run(fmt.Sprintf("limit %d", form.most), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				tr := over(s, withMaxKey(form.most))
				for _, ctx := range []context.Context{t.Context(), idem.WithOperation(t.Context(), op)} {
					resp, err := tr.RoundTrip(newPayment(t, ctx, s, "order-17"))
					require.NoError(t, err)
					readAll(t, resp)
					r := idem.ReportOf(resp)
					require.Len(t, r.Key, form.length)
					got, err := form.read(r.Key)
					require.NoError(t, err)
					require.Len(t, got, 16)
					if r.KeyFrom == "operation" {
						require.Equal(t, want, got)
					} else {
						require.Equal(t, byte(4), got[6]>>4, "version of a UUIDv4")
					}
				}
				require.Len(t, keysSent(s.Sends()), 2)
			})
		})
	}
}

func TestC17_LimitThatWouldCutMadeKeysIsInvalid(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		for _, most := range []int{21, 1, -1} {
			_, err := over(s, withMaxKey(most)).RoundTrip(newPayment(t, t.Context(), s, "order-17"))
			require.ErrorIs(t, err, idem.ErrInvalid)
			require.ErrorContains(t, err, "MaxKey")
			require.ErrorContains(t, err, "22")
		}
		require.Empty(t, s.Sends())
	})
}

func TestC19_RefusedOperationIsOverAndANewOneHasANewKey(t *testing.T) {
	declined := fmt.Sprintf(`{"amount":%d,"currency":"usd","reference":"order-19"}`, fakeserver.DeclinedAmount)
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{ReplayHeader: "Idempotent-Replayed"})
		tr := over(s, withDialect(idem.Stripe))
		attempt := func(id, body string) *http.Response {
			ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "charge", ID: id})
			resp, err := tr.RoundTrip(newPost(t, ctx, s.URL()+"/v1/payments", body))
			require.NoError(t, err)
			readAll(t, resp)
			return resp
		}
		first := attempt("order-19/1", declined)
		require.Empty(t, s.Effects())
		require.Len(t, s.Sends(), 1)
		require.Equal(t, http.StatusPaymentRequired, first.StatusCode)
		require.Equal(t, idem.Refused, idem.ReportOf(first).Outcome)
		require.NoError(t, idem.ReportOf(first).Reason)

		second := attempt("order-19/2", paymentJSON("order-19", 1999))
		require.Len(t, s.Effects(), 1)
		require.Equal(t, idem.Executed, idem.ReportOf(second).Outcome)
		require.NotEqual(t, idem.ReportOf(first).Key, idem.ReportOf(second).Key)
	})
}

func TestC19_UnknownOutcomeKeepsItsKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Script("", repeat(12, fakeserver.Fault{Kind: fakeserver.Hang, Point: fakeserver.AfterEffect})...))
		tr := over(s, func(tr *idem.Transport) { tr.Policy.AttemptTimeout = 30 * time.Millisecond })
		op := idem.Operation{Name: "charge", ID: "order-19/1"}
		for range 3 {
			_, err := tr.RoundTrip(newPayment(t, idem.WithOperation(t.Context(), op), s, "order-19"))
			require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
			require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
		}
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 12)
		require.Len(t, keysSent(s.Sends()), 1)

		resp, err := tr.RoundTrip(newPayment(t, idem.WithOperation(t.Context(), op), s, "order-19"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
		require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
	})
}

func TestC20_RotatedCredentialStaysInItsScope(t *testing.T) {
	account := func(r *http.Request) string {
		name, _, _ := strings.Cut(strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), ".")
		return name
	}
	credential := func(r *http.Request) string { return r.Header.Get("Authorization") }
	for _, c := range []struct {
		name   string
		keyPer fakeserver.Scope
		scope  func(*http.Request) string
		second string // credential of the second attempt
		sends  int
	}{
		{"same account, key per account", fakeserver.PerAccount, account, "Bearer one.second", 2},
		{"same account, key per credential", fakeserver.PerCredential, credential, "Bearer one.second", 1},
		{"other account, key per account", fakeserver.PerAccount, account, "Bearer two.first", 1},
		{"other account, key per credential", fakeserver.PerCredential, credential, "Bearer two.first", 1},
		{"same credential, key per credential", fakeserver.PerCredential, credential, "Bearer one.first", 2},
	} {
		for _, key := range []string{"", "order-20"} {
			t.Run(fmt.Sprintf("%s, key %q", c.name, key), func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					s := inMemory(t)
					s.Apply(fakeserver.Settings{KeyPer: c.keyPer})
					require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
					credentials := []string{"Bearer one.first", c.second}
					tr := over(s, func(tr *idem.Transport) {
						tr.Scope = c.scope
						tr.Prepare = func(r *http.Request) error {
							r.Header.Set("Authorization", credentials[0])
							credentials = credentials[1:]
							return nil
						}
					})
					ctx := t.Context()
					if key != "" {
						ctx = idem.WithKey(ctx, key)
					}
					req := newPayment(t, ctx, s, "order-20")
					req.Header.Set("Authorization", "Bearer one.first")
					resp, err := tr.RoundTrip(req)
					require.Len(t, s.Effects(), 1)
					require.Len(t, s.Sends(), c.sends)
					require.Len(t, keysSent(s.Sends()), 1)
					if c.sends == 1 {
						require.ErrorIs(t, err, idem.ErrScopeChanged)
						require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, err))
						return
					}
					require.NoError(t, err)
					readAll(t, resp)
					require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
				})
			})
		}
	}
}

func TestC21_SameKeyInTwoScopesIsTwoOperations(t *testing.T) {
	for from, name := range map[string]func(*http.Request) *http.Request{
		"context": func(r *http.Request) *http.Request { return r.WithContext(idem.WithKey(r.Context(), "order-1")) },
		"header":  func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", "order-1"); return r },
		"operation": func(r *http.Request) *http.Request {
			return r.WithContext(idem.WithOperation(r.Context(), idem.Operation{Name: "charge", ID: "order-1"}))
		},
	} {
		t.Run(from, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				s.Apply(fakeserver.Settings{KeyPer: fakeserver.PerAccount})
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: time.Second}))
				tr := over(s, func(tr *idem.Transport) {
					tr.Scope = func(r *http.Request) string { return r.Header.Get("Authorization") }
				})
				start := time.Now()
				answers := make([]string, 2)
				keys := make([]string, 2)
				var group sync.WaitGroup
				for i, tenant := range []string{"one", "two"} {
					req := newPost(t, t.Context(), s.URL()+"/v1/payments", paymentJSON("of "+tenant, 100+i))
					req.Header.Set("Authorization", "Bearer "+tenant+".secret")
					req = name(req)
					group.Go(func() {
						resp, err := tr.RoundTrip(req)
						if err != nil {
							t.Error(err)
							return
						}
						defer func() { _ = resp.Body.Close() }()
						text, err := io.ReadAll(resp.Body)
						if err != nil {
							t.Error(err)
						}
						answers[i], keys[i] = string(text), idem.ReportOf(resp).Key
					})
				}
				group.Wait()
				require.Len(t, s.Effects(), 2)
				require.Len(t, s.Sends(), 2)
				require.Contains(t, answers[0], "of one")
				require.Contains(t, answers[1], "of two")
				require.Equal(t, time.Second, time.Since(start), "both at once")
				// A derived key has the scope in it; the caller's own has not.
				require.Equal(t, from != "operation", keys[0] == keys[1])
			})
		})
	}
}

func TestNewKeyIsAUUIDv4(t *testing.T) {
	form := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	for range 100 {
		key, err := idem.NewKey()
		require.NoError(t, err)
		require.Regexp(t, form, key)
	}
}

// These values must never change: operations in the world would get other
// keys. They can be recomputed as SHA-1 over the namespace and the parts, each
// after its length in eight bytes.
func TestDerivedKeysNeverChange(t *testing.T) {
	for _, c := range []struct {
		parts []string
		want  string
	}{
		{[]string{"refund", "42"}, "ad1494a2-5b30-5b6f-8ed2-5a2b28aa62b3"},
		{[]string{"", "charge", "order-77/2"}, "ff67e95c-ca5c-54af-b7f5-4df45f235ec8"},
		{[]string{"acct_1", "charge", "order-77/2"}, "3a2bc5d9-cc1f-5149-80b3-465ea89b14a7"},
		{[]string{"Bestellung", "größer", "日本"}, "a50a12f4-f564-5ad4-9c03-7d6a8542a19e"},
	} {
		got, err := idem.DeriveKey(c.parts...)
		require.NoError(t, err)
		require.Equal(t, c.want, got, "%q", c.parts)
		require.Equal(t, byte('5'), got[14], "version")
	}
}

func TestDeriveKeyTellsListsOfPartsApart(t *testing.T) {
	seen := map[string][]string{}
	for _, parts := range [][]string{
		{"abc"}, {"ab", "c"}, {"a", "bc"}, {"a", "b", "c"}, {"", "abc"}, {"abc", ""}, {"", "", "abc"}, {"a", "", "bc"}, {"ABC"}, {"abc "},
		{"abc\x00"}, {"\x00\x00\x00\x00\x00\x00\x00\x03abc"},
	} {
		key, err := idem.DeriveKey(parts...)
		require.NoError(t, err)
		require.Nil(t, seen[key], "%q and %q", seen[key], parts)
		seen[key] = parts
		again, err := idem.DeriveKey(parts...)
		require.NoError(t, err)
		require.Equal(t, key, again)
	}
}

func TestDeriveKeyOfNothingIsRefused(t *testing.T) {
	for _, parts := range [][]string{nil, {""}, {"", ""}} {
		_, err := idem.DeriveKey(parts...)
		require.ErrorIs(t, err, idem.ErrKeyInvalid)
	}
}

func TestKeyOfAnOperationIsTheOneThatDeriveKeyGives(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s, func(tr *idem.Transport) { tr.Scope = func(*http.Request) string { return "acct_1" } })
		ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "charge", ID: "order-77/2"})
		resp, err := tr.RoundTrip(newPayment(t, ctx, s, "order-77"))
		require.NoError(t, err)
		readAll(t, resp)
		want, err := idem.DeriveKey("acct_1", "charge", "order-77/2")
		require.NoError(t, err)
		require.Equal(t, []string{want}, keysSent(s.Sends()))
	})
}

func TestQuotedKeysOnTheWire(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{Quoted: true})
		tr := over(s, withDialect(idem.IETF))
		n := 0
		for _, c := range []struct {
			name      string
			ctx       context.Context
			header    string
			key, wire string
		}{
			{"context", idem.WithKey(t.Context(), "order 1"), "", "order 1", `"order 1"`},
			{"context, to be escaped", idem.WithKey(t.Context(), `say "a\b"`), "", `say "a\b"`, `"say \"a\\b\""`},
			{"context, that looks quoted", idem.WithKey(t.Context(), `"a"`), "", `"a"`, `"\"a\""`},
			{"raw header", t.Context(), "order-3", "order-3", `"order-3"`},
			{"quoted header", t.Context(), `"order-4"`, "order-4", `"order-4"`},
			{"quoted header in spaces", t.Context(), ` "order-5" `, "order-5", `"order-5"`},
			{"quoted header with escapes", t.Context(), `"\"\\"`, `"\`, `"\"\\"`},
		} {
			req := newPayment(t, c.ctx, s, c.name)
			if c.header != "" {
				req.Header.Set("Idempotency-Key", c.header)
			}
			require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}, fakeserver.Fault{}))
			resp, err := tr.RoundTrip(req)
			require.NoError(t, err, c.name)
			readAll(t, resp)
			require.Equal(t, http.StatusCreated, resp.StatusCode, c.name)
			require.Equal(t, c.key, idem.ReportOf(resp).Key, c.name)
			sends := s.Sends(fakeserver.Filter{Reference: c.name})
			require.Len(t, sends, 2, c.name)
			for _, send := range sends {
				require.Equal(t, c.key, send.Key, c.name)
				require.Equal(t, []string{c.wire}, send.Keys, c.name)
			}
			n++
			require.Len(t, s.Effects(), n)
		}
	})
}

func TestHeaderThatIsNoQuotedStringIsRefused(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s, withDialect(idem.IETF))
		for _, header := range []string{`"open`, `"`, `""`, `"  "`, `"a"b`, `"a" ;x=1`, `"a\x"`, `"a\`, `"a\"`, `"a"b"`, `"é"`} {
			req := newPayment(t, t.Context(), s, "order")
			req.Header.Set("Idempotency-Key", header)
			_, err := tr.RoundTrip(req)
			require.ErrorIs(t, err, idem.ErrKeyInvalid, header)
			require.Equal(t, idem.NotExecuted, idem.OutcomeOf(nil, err))
		}
		require.Empty(t, s.Sends())
	})
}

// Whatever a caller puts into the header: either nothing is sent, or one
// value that a server can read back as the key of the report.
func FuzzKeyOnTheWire(f *testing.F) {
	for _, header := range []string{"order-1", `"order-1"`, `"a\"b"`, `"a\\"`, `a"b`, "", " ", `"`, "a\x00", "\xff", strings.Repeat("k", 256)} {
		f.Add(header, true)
		f.Add(header, false)
	}
	f.Fuzz(func(t *testing.T, header string, quoted bool) {
		var sent []string
		base := roundTripFunc(func(r *http.Request) (*http.Response, error) {
			_ = r.Body.Close()
			sent = append(sent, r.Header["Idempotency-Key"]...)
			return answer(r, http.StatusOK, nil, ""), nil
		})
		d := idem.Generic
		d.Quoted = quoted
		req := newPost(t, t.Context(), "http://pay.test/", "body")
		req.Header["Idempotency-Key"] = []string{header}
		resp, err := (&idem.Transport{Base: base, Dialect: d, Policy: casePolicy()}).RoundTrip(req)
		if err != nil {
			require.ErrorIs(t, err, idem.ErrKeyInvalid)
			require.Empty(t, sent)
			return
		}
		readAll(t, resp)
		require.Len(t, sent, 1)
		key := idem.ReportOf(resp).Key
		require.NotEmpty(t, strings.TrimSpace(key))
		require.LessOrEqual(t, len(key), 255)
		for _, b := range []byte(sent[0]) {
			require.True(t, b >= ' ' && b <= '~', "%q", sent[0])
		}
		if !quoted {
			require.Equal(t, key, sent[0])
			require.Equal(t, header, key)
			return
		}
		require.Regexp(t, `^"([^"\\]|\\["\\])*"$`, sent[0])
		require.Equal(t, key, regexp.MustCompile(`\\(.)`).ReplaceAllString(sent[0][1:len(sent[0])-1], "$1"))
	})
}

func TestContextWinsOverTheHeader(t *testing.T) {
	op := idem.Operation{Name: "charge", ID: "order-1/1"}
	derived, err := idem.DeriveKey("", op.Name, op.ID)
	require.NoError(t, err)
	for _, c := range []struct {
		name      string
		ctx       func(context.Context) context.Context
		key, from string
	}{
		{"operation over key and header", func(ctx context.Context) context.Context {
			return idem.WithKey(idem.WithOperation(ctx, op), "from-context")
		}, derived, "operation"},
		{"key over header", func(ctx context.Context) context.Context { return idem.WithKey(ctx, "from-context") }, "from-context", "context"},
		{"header", func(ctx context.Context) context.Context { return ctx }, "from-header", "header"},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				req := newPayment(t, c.ctx(t.Context()), s, "order-1")
				req.Header.Set("Idempotency-Key", "from-header")
				resp, err := over(s).RoundTrip(req)
				require.NoError(t, err)
				readAll(t, resp)
				require.Equal(t, []string{c.key}, s.Sends()[0].Keys)
				require.Equal(t, c.key, idem.ReportOf(resp).Key)
				require.Equal(t, c.from, idem.ReportOf(resp).KeyFrom)
			})
		})
	}
}

func TestOperationThatCannotBeNamedIsInvalid(t *testing.T) {
	for _, c := range []struct {
		name  string
		op    idem.Operation
		field string
	}{
		{"no name", idem.Operation{ID: "1"}, "Operation.Name"},
		{"no id", idem.Operation{Name: "charge"}, "Operation.ID"},
		{"nothing", idem.Operation{}, "Operation.Name"},
		{"long name", idem.Operation{Name: strings.Repeat("n", 256), ID: "1"}, "Operation.Name"},
		{"long id", idem.Operation{Name: "charge", ID: strings.Repeat("i", 256)}, "Operation.ID"},
		{"newline in the name", idem.Operation{Name: "char\nge", ID: "1"}, "Operation.Name"},
		{"delete in the id", idem.Operation{Name: "charge", ID: "1\x7f"}, "Operation.ID"},
		{"from the future", idem.Operation{Name: "charge", ID: "1", Started: time.Date(2000, 1, 1, 0, 1, 1, 0, time.UTC)}, "Operation.Started"},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) { // it begins at midnight of 2000-01-01
				s := inMemory(t)
				tr := over(s, func(tr *idem.Transport) { tr.Policy.KeyWindow = time.Hour })
				_, err := tr.RoundTrip(newPayment(t, idem.WithOperation(t.Context(), c.op), s, "order-1"))
				require.Empty(t, s.Sends())
				require.ErrorIs(t, err, idem.ErrInvalid)
				require.ErrorContains(t, err, c.field)
			})
		})
	}
}

func TestOperationAtItsLimitsIsSent(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s, func(tr *idem.Transport) { tr.Policy.KeyWindow = time.Hour })
		op := idem.Operation{Name: strings.Repeat("n", 255), ID: strings.Repeat("ü", 127), Started: time.Now().Add(time.Minute)}
		resp, err := tr.RoundTrip(newPayment(t, idem.WithOperation(t.Context(), op), s, "order-1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, op, idem.ReportOf(resp).Operation)
	})
}

func TestStartedNeedsAKeyWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		op := idem.Operation{Name: "charge", ID: "1", Started: time.Now()}
		_, err := over(s).RoundTrip(newPayment(t, idem.WithOperation(t.Context(), op), s, "order-1"))
		require.Empty(t, s.Sends())
		require.ErrorIs(t, err, idem.ErrInvalid)
		require.ErrorContains(t, err, "KeyWindow")
	})
}

func TestOldOperationIsNotSentAfterItsKeyWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s, withDialect(idem.Stripe)) // 24 hours
		started := time.Now()
		call := func() (*http.Response, error) {
			op := idem.Operation{Name: "charge", ID: "1", Started: started}
			return tr.RoundTrip(newPayment(t, idem.WithOperation(t.Context(), op), s, "order-1"))
		}
		time.Sleep(24*time.Hour - 31*time.Second)
		resp, err := call()
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)

		time.Sleep(2 * time.Second) // less than one AttemptTimeout is left
		_, err = call()
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.ErrorIs(t, err, idem.ErrKeyExpired)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
	})
}

func TestWithoutKeyARequestCarriesNoneAndIsNotRepeatedOnceSent(t *testing.T) {
	for _, c := range []struct {
		name     string
		lay      func(*fakeserver.Server) error
		effects  int
		sends    int
		attempts int
	}{
		{"answered", func(*fakeserver.Server) error { return nil }, 1, 1, 1},
		{"503", func(s *fakeserver.Server) error {
			return s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503})
		}, 0, 1, 1},
		{"reset after the effect", func(s *fakeserver.Server) error {
			return s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect})
		}, 1, 1, 1},
		{"never connected", func(s *fakeserver.Server) error { s.Refuse(2); return nil }, 1, 1, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				s.Apply(fakeserver.Settings{Optional: true})
				require.NoError(t, c.lay(s))
				var r idem.Report
				ctx := idem.WithReport(idem.WithoutKey(idem.WithKey(t.Context(), "order-1")), &r)
				req := newPayment(t, ctx, s, "order-1")
				req.Header["idempotency-key"] = []string{"order-1"}
				resp, err := over(s).RoundTrip(req)
				if err == nil {
					readAll(t, resp)
				}
				require.Len(t, s.Effects(), c.effects)
				require.Len(t, s.Sends(), c.sends)
				require.Empty(t, s.Sends()[0].Keys)
				require.Len(t, r.Attempts, c.attempts)
				require.Empty(t, r.Key)
				require.Empty(t, r.KeyFrom)
			})
		})
	}
}

func TestMethodsWithoutKeyLeaveTheContextUnbound(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s)
		ctx := idem.WithKey(t.Context(), "order-1")
		for range 2 {
			get, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL()+"/v1/payments?reference=order-1", nil)
			require.NoError(t, err)
			resp, err := tr.RoundTrip(get)
			require.NoError(t, err)
			readAll(t, resp)
			require.Empty(t, idem.ReportOf(resp).Key)
			resp, err = tr.RoundTrip(newPayment(t, ctx, s, "order-1"))
			require.NoError(t, err)
			readAll(t, resp)
			require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
		}
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(fakeserver.Filter{Key: "order-1"}), 2)
	})
}

func TestContextIsNotBoundByARequestThatCouldNotBeSent(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s)
		ctx := idem.WithKey(t.Context(), "order-1")
		over, cancel := context.WithCancel(ctx)
		cancel()
		_, err := tr.RoundTrip(newPost(t, over, s.URL()+"/v1/payments", paymentJSON("order-1", 1)))
		require.ErrorIs(t, err, context.Canceled)
		resp, err := tr.RoundTrip(newPayment(t, ctx, s, "order-1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
	})
}

func TestStreamBindsTheContextToItsLength(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		tr := over(s, func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer = 10 })
		ctx := idem.WithKey(t.Context(), "upload-1")
		post := func(body string) *http.Request {
			req := newPostOnce(t, ctx, s.URL()+"/v1/uploads", body)
			req.ContentLength = int64(len(body))
			return req
		}
		resp, err := tr.RoundTrip(post(strings.Repeat("a", 100)))
		require.NoError(t, err)
		readAll(t, resp)
		_, err = tr.RoundTrip(post(strings.Repeat("a", 101)))
		require.ErrorIs(t, err, idem.ErrKeyReused)
		require.Len(t, s.Sends(), 1)
		resp, err = tr.RoundTrip(post(strings.Repeat("a", 100)))
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.True(t, idem.ReportOf(resp).Replayed)
	})
}

func TestTwinsRunOneAtATimeAndSeeTheReplay(t *testing.T) {
	const twins = 5
	for from, name := range map[string]func(*http.Request) *http.Request{
		"context": func(r *http.Request) *http.Request { return r.WithContext(idem.WithKey(r.Context(), "order-1")) },
		"header":  func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", "order-1"); return r },
		"operation": func(r *http.Request) *http.Request {
			return r.WithContext(idem.WithOperation(r.Context(), idem.Operation{Name: "charge", ID: "order-1"}))
		},
	} {
		t.Run(from, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: time.Second}))
				tr := over(s)
				reports := make([]idem.Report, twins)
				var group sync.WaitGroup
				for i := range twins {
					req := name(newPayment(t, idem.WithReport(t.Context(), &reports[i]), s, "order-1"))
					group.Go(func() {
						resp, err := tr.RoundTrip(req)
						if err != nil {
							t.Error(err)
							return
						}
						_ = resp.Body.Close()
					})
				}
				group.Wait()
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), twins)
				require.Len(t, keysSent(s.Sends()), 1)
				replayed := 0
				for i, send := range s.Sends() {
					require.Equal(t, http.StatusCreated, send.Status)
					require.Equal(t, idem.Executed, reports[i].Outcome)
					require.Len(t, reports[i].Attempts, 1)
					if reports[i].Replayed {
						replayed++
					}
				}
				require.Equal(t, twins-1, replayed)
			})
		})
	}
}

func TestTwinThatWaitsEndsWithItsOwnContext(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: 10 * time.Second}))
		tr := over(s)
		var first sync.WaitGroup
		first.Go(func() {
			resp, err := tr.RoundTrip(newPayment(t, idem.WithKey(t.Context(), "order-1"), s, "order-1"))
			if err != nil {
				t.Error(err)
				return
			}
			_ = resp.Body.Close()
		})
		synctest.Wait()
		start := time.Now()
		l := new(closeLedger)
		ctx := leaving(time.Second)(t, idem.WithKey(t.Context(), "order-1"))
		_, err := tr.RoundTrip(newCountedPost(t, ctx, s.URL()+"/v1/payments", paymentJSON("order-1", 1999), true, l))
		require.Equal(t, time.Second, time.Since(start))
		require.ErrorIs(t, err, errLeft)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err)) // the twin may have done it
		l.requireOnce(t)
		first.Wait()
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)

		resp, err := tr.RoundTrip(newPayment(t, idem.WithKey(t.Context(), "order-1"), s, "order-1"))
		require.NoError(t, err)
		readAll(t, resp)
		require.True(t, idem.ReportOf(resp).Replayed)
	})
}

func TestTwinWaitsForAStreamedAnswerToBeClosed(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *http.Response){
		"closed": func(t *testing.T, resp *http.Response) { require.NoError(t, resp.Body.Close()) },
		"closed twice": func(t *testing.T, resp *http.Response) {
			require.NoError(t, resp.Body.Close())
			require.NoError(t, resp.Body.Close())
		},
		"read to its end": func(t *testing.T, resp *http.Response) { _, _ = io.ReadAll(resp.Body) },
		"read, then closed": func(t *testing.T, resp *http.Response) {
			readAll(t, resp)
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				tr := over(s, func(tr *idem.Transport) { tr.Policy.MaxResponseBuffer = -1 })
				call := func() (*http.Response, error) {
					return tr.RoundTrip(newPayment(t, idem.WithKey(t.Context(), "order-1"), s, "order-1"))
				}
				first, err := call()
				require.NoError(t, err)
				var second *http.Response
				var secondErr error
				var twin sync.WaitGroup
				twin.Go(func() { second, secondErr = call() })
				time.Sleep(time.Minute)
				synctest.Wait()
				require.Len(t, s.Sends(), 1)
				end(t, first)
				twin.Wait()
				require.NoError(t, secondErr)
				readAll(t, second)
				require.Len(t, s.Effects(), 1)
				require.Len(t, s.Sends(), 2)
				require.True(t, idem.ReportOf(second).Replayed)
			})
		})
	}
}

func TestTwinsOfTwoTransportsMeetAtTheServer(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: 1500 * time.Millisecond}))
		var group sync.WaitGroup
		reports := make([]idem.Report, 2)
		for i := range reports {
			tr := over(s)
			req := newPayment(t, idem.WithReport(idem.WithKey(t.Context(), "order-1"), &reports[i]), s, "order-1")
			group.Go(func() {
				resp, err := tr.RoundTrip(req)
				if err != nil {
					t.Error(err)
					return
				}
				_ = resp.Body.Close()
			})
		}
		group.Wait()
		require.Len(t, s.Effects(), 1)
		for _, r := range reports {
			require.Equal(t, idem.Executed, r.Outcome)
			require.Equal(t, http.StatusCreated, r.Attempts[len(r.Attempts)-1].Status)
		}
		require.Equal(t, 4, len(reports[0].Attempts)+len(reports[1].Attempts)) // one waited twice
		require.True(t, reports[0].Replayed != reports[1].Replayed)
	})
}
