package idem_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
)

const secretProxy = "SEC6-proxy"

// telling writes down everything that a Transport tells: log lines at debug
// level in both formats, and each value that a hook gets, printed in three ways.
type telling struct {
	mu  sync.Mutex // guards out
	out bytes.Buffer
}

func (w *telling) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Write(p)
}

func (w *telling) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.String()
}

// print writes v in the ways in which values end up in logs.
func (w *telling) print(what string, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		text = []byte(err.Error())
	}
	fmt.Fprintf(w, "%s: %v\n%s: %+v\n%s: %s\n", what, v, what, v, what, text)
}

func (w *telling) logger(json bool) *slog.Logger {
	options := &slog.HandlerOptions{Level: slog.LevelDebug}
	if json {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

func (w *telling) hooks() idem.Hooks {
	a, b := idem.SlogHooks(w.logger(true)), idem.SlogHooks(w.logger(false))
	return idem.Hooks{
		AttemptStart: func(ctx context.Context, r *idem.Report, n int) context.Context {
			w.print("AttemptStart", r)
			return ctx
		},
		AttemptDone: func(ctx context.Context, r *idem.Report, at idem.Attempt) {
			a.AttemptDone(ctx, r, at)
			b.AttemptDone(ctx, r, at)
			w.print("AttemptDone report", *r)
			w.print("AttemptDone attempt", at)
		},
		Waiting: func(ctx context.Context, r *idem.Report, at idem.Attempt) {
			a.Waiting(ctx, r, at)
			b.Waiting(ctx, r, at)
			w.print("Waiting report", *r)
			w.print("Waiting attempt", at)
		},
		Done: func(ctx context.Context, r *idem.Report) {
			a.Done(ctx, r)
			b.Done(ctx, r)
			w.print("Done", *r)
		},
	}
}

// failure writes down an error as callers do.
func (w *telling) failure(what string, err error) {
	w.print(what, err)
	fmt.Fprintf(w, "%s: %s %q\n", what, err.Error(), err)
	w.print(what+" wrapped", fmt.Errorf("pay: %w", err))
	for _, log := range []*slog.Logger{w.logger(true), w.logger(false)} {
		log.Error(what, "err", err, "wrapped", fmt.Errorf("pay: %w", err))
	}
}

// troubledProxy is an http proxy with a password; it fails in a new way each
// time. As the errors of net/http quote what is not HTTP, one way is to answer
// with the request itself.
func troubledProxy(t *testing.T) (address *url.URL, asked func() int) {
	t.Helper()
	var mu sync.Mutex // guards n
	n := 0
	at := rawServer(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			body, _ := io.ReadAll(req.Body)
			mu.Lock()
			n++
			way := n % 4
			mu.Unlock()
			echo := fmt.Sprintf("%s %s %v %s", req.Method, req.RequestURI, req.Header, body)
			switch way {
			case 1:
				_, _ = fmt.Fprintf(c, "HTTP/1.1 503 %s\r\nContent-Length: %d\r\n\r\n%s", "Busy", len(echo), echo)
			case 2:
				return // hangs up
			case 3:
				_, _ = fmt.Fprintf(c, "%s\r\n\r\n", echo)
				return
			default:
				_, _ = fmt.Fprintf(c, "HTTP/1.1 502 %s\r\nContent-Length: 0\r\n\r\n", strings.ReplaceAll(echo, "\n", " "))
			}
		}
	})
	u, err := url.Parse(at)
	require.NoError(t, err)
	u.User = url.UserPassword("proxy-user", secretProxy)
	return u, func() int { mu.Lock(); defer mu.Unlock(); return n }
}

// requireToldNothing requires that no line of text has a secret, that of the
// proxy included, neither as it is nor as headers carry it.
func requireToldNothing(t *testing.T, where, text string) {
	t.Helper()
	require.NotEmpty(t, text)
	encoded := func(user, password string) string {
		return base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	}
	for line := range strings.Lines(text) {
		for _, secret := range append([]string{
			secretProxy, encoded("proxy-user", secretProxy), encoded("merchant-user", secretPassword),
		}, secrets...) {
			require.NotContains(t, line, secret, where)
		}
	}
}

func TestC81_NoSecretInLogsHooksAndErrors(t *testing.T) {
	certain := func(status int) http.RoundTripper {
		return roundTripFunc(func(req *http.Request) (*http.Response, error) {
			_, _ = io.Copy(io.Discard, req.Body)
			_ = req.Body.Close()
			return answer(req, status, jsonType(), `{"title":"scripted"}`), nil
		})
	}
	for _, c := range []struct {
		name string
		url  string
		base func(t *testing.T) http.RoundTripper
		edit func(*idem.Transport)
	}{
		{name: "through a proxy that fails in four ways", url: "http://api.test", base: func(t *testing.T) http.RoundTripper {
			base := newBase(t)
			via, _ := troubledProxy(t)
			base.Proxy = http.ProxyURL(via)
			return base
		}},
		{name: "through a proxy that makes no tunnel", url: "https://api.test", base: func(t *testing.T) http.RoundTripper {
			base := newBase(t)
			via, _ := troubledProxy(t)
			base.Proxy = http.ProxyURL(via)
			base.OnProxyConnectResponse = idem.ProxyHook
			return base
		}},
		{name: "through a proxy that makes no tunnel, without the hook", url: "https://api.test", base: func(t *testing.T) http.RoundTripper {
			base := newBase(t)
			via, _ := troubledProxy(t)
			base.Proxy = http.ProxyURL(via)
			return base
		}},
		{name: "through a proxy that is not there", url: "https://api.test", base: func(t *testing.T) http.RoundTripper {
			base := newBase(t)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			require.NoError(t, l.Close())
			base.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: l.Addr().String(), User: url.UserPassword("proxy-user", secretProxy)})
			return base
		}},
		{name: "through a proxy whose address cannot be read", url: "https://api.test", base: func(t *testing.T) http.RoundTripper {
			base := newBase(t)
			base.Proxy = func(*http.Request) (*url.URL, error) {
				//lint:ignore SA1007 it must not parse
				return url.Parse("http://proxy-user:" + secretProxy + "%zz@127.0.0.1:1")
			}
			return base
		}},
		{name: "a server of 503", url: "http://api.test", base: func(*testing.T) http.RoundTripper { return certain(503) }},
		{name: "a base that quotes the request", url: "http://api.test", base: func(*testing.T) http.RoundTripper { return quotingBase{} }},
		{name: "a base that quotes what Prepare signed with", url: "http://api.test", base: func(*testing.T) http.RoundTripper { return quotingBase{} }, edit: func(tr *idem.Transport) {
			tr.Prepare = func(req *http.Request) error {
				req.Header.Set("Authorization", "Bearer "+secretBearer+"-fresh")
				req.AddCookie(&http.Cookie{Name: "second", Value: secretCookie + "-fresh"})
				return nil
			}
		}},
		{name: "a base that quotes single credentials", url: "http://api.test", base: func(*testing.T) http.RoundTripper {
			return roundTripFunc(func(req *http.Request) (*http.Response, error) {
				_ = req.Body.Close()
				cookie, err := req.Cookie("session")
				if err != nil {
					return nil, err
				}
				return nil, fmt.Errorf("session %s has ended, as has %s", cookie.Value, strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer "))
			})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			told := &telling{}
			tr := &idem.Transport{Base: c.base(t), Policy: casePolicy(), Hooks: told.hooks()}
			if c.edit != nil {
				c.edit(tr)
			}
			req := secretive(t, t.Context(), c.url)
			resp, err := tr.RoundTrip(req)
			var key string
			if err != nil {
				told.failure("RoundTrip", err)
				var e *idem.Error
				require.ErrorAs(t, err, &e)
				key = e.Key
				require.Contains(t, err.Error(), key, "a person needs the whole key")
			} else {
				_, _ = io.Copy(io.Discard, resp.Body)
				require.NoError(t, resp.Body.Close())
				told.print("report", idem.ReportOf(resp))
				key = idem.ReportOf(resp).Key
			}
			require.NotEmpty(t, key)
			for line := range strings.Lines(told.String()) {
				if strings.Contains(line, "idem: attempt ended") || strings.Contains(line, "idem: waiting") {
					require.NotContains(t, line, key, "the key is shortened in debug lines")
				}
			}
			requireToldNothing(t, c.name, told.String())
			_, err = idem.NewClient(tr).Do(secretive(t, t.Context(), c.url))
			require.Error(t, err)
			told = &telling{}
			told.failure("Do", err)
			var e *idem.Error
			require.ErrorAs(t, err, &e)
			told.logger(true).Error("failed", "report", &e.Report)
			told.print("report", e.Report)
			requireToldNothing(t, c.name+", Client.Do", told.String())
		})
	}
}

// What the server echoes in an error's text is redacted where errors keep it:
// in the attempts that hooks see, as in the text of the Error.
func TestC81_EchoOfTheRequestInAnErrorIsRedacted(t *testing.T) {
	server := rawServer(t, func(_ int, c net.Conn, r *bufio.Reader) {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		_, _ = fmt.Fprintf(c, "%s %v\r\n\r\n", req.RequestURI, req.Header)
	})
	told := &telling{}
	tr := &idem.Transport{Base: newBase(t), Policy: casePolicy(), Hooks: told.hooks()}
	_, err := tr.RoundTrip(secretive(t, t.Context(), server))
	require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
	told.failure("RoundTrip", err)
	require.Contains(t, told.String(), "malformed HTTP", "the error does quote the server")
	requireToldNothing(t, "an echo", told.String())
}

// The final line has the whole key of an operation that did not end executed,
// and a shortened one otherwise.
func TestC81_KeyIsWholeOnlyWhereAPersonNeedsIt(t *testing.T) {
	for _, status := range []int{http.StatusCreated, http.StatusInternalServerError} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			var log bytes.Buffer
			logger := slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			w := &wire{serve: always(status)}
			tr := onWire(w, func(tr *idem.Transport) { tr.Hooks = idem.SlogHooks(logger) })
			resp, err := tr.RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
			require.NoError(t, err)
			readAll(t, resp)
			key := oneKey(t, w.seen())
			lines := strings.Split(strings.TrimSpace(log.String()), "\n")
			last := lines[len(lines)-1]
			require.Contains(t, last, "idem: operation ended")
			for _, line := range lines[:len(lines)-1] {
				require.NotContains(t, line, key)
			}
			require.Equal(t, status != http.StatusCreated, strings.Contains(last, key))
		})
	}
}

// A redirect that http.Client cannot follow ends in an error of http.Client,
// which has the whole URL.
func TestC81_ErrorOfHTTPClientItselfTellsNoQuery(t *testing.T) {
	for name, location := range map[string]string{
		"loop":       "/v1/payments?access=" + secretQuery,
		"unreadable": "http://[::1/?access=" + secretQuery,
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Location", location)
				w.WriteHeader(http.StatusTemporaryRedirect)
			}))
			defer server.Close()
			told := &telling{}
			tr := &idem.Transport{Base: newBase(t), Policy: casePolicy(), Hooks: told.hooks()}
			start := time.Now()
			_, err := idem.NewClient(tr).Do(secretive(t, t.Context(), server.URL))
			require.Error(t, err)
			require.Less(t, time.Since(start), 20*time.Second)
			fmt.Fprintf(told, "%v\n%+v\n%q\n", err, err, err)
			for _, log := range []*slog.Logger{told.logger(true), told.logger(false)} {
				log.Error("failed", "err", err, "wrapped", fmt.Errorf("pay: %w", err))
			}
			requireToldNothing(t, name, told.String())
		})
	}
}
