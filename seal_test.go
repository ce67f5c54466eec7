package idem_test

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

// sealing seals what the journal stores, with one of 256 keys.
func sealing(t testing.TB, key byte) func(*idem.Transport) {
	t.Helper()
	whole := make([]byte, 32)
	whole[0] = key
	block, err := aes.NewCipher(whole)
	require.NoError(t, err)
	aead, err := cipher.NewGCM(block)
	require.NoError(t, err)
	return func(tr *idem.Transport) { tr.Seal = aead }
}

// --- the answer

func TestStoredAnswerComesBackWithoutASend(t *testing.T) {
	for name, c := range map[string]struct {
		later time.Duration
		again bool // by another process
	}{
		"at once":          {0, false},
		"after a restart":  {0, true},
		"after the window": {1000 * time.Hour, true},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				m := new(journal.Memory)
				w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
					h := http.Header{"Content-Type": {"application/json"}, "X-Two": {"a", "b"}, "Set-Cookie": {"session=1"}, "Request-Id": {"req_1"}}
					return answer(req, 201, h, `{"id":"pay_1","note":"ä \u0000"}`), nil
				}}
				tr := onWire(w, remembering(m), sealing(t, 1))
				call := func() (*http.Response, error) {
					return idem.NewClient(tr).Do(newPost(t, charging(t.Context(), "1"), wireURL, `{"amount":1}`))
				}
				first, err := call()
				require.NoError(t, err)
				body := readAll(t, first)
				require.Equal(t, []string{"session=1"}, first.Header["Set-Cookie"], "the caller of the first call gets all")
				time.Sleep(c.later) // the age of the answer
				if c.again {
					tr = onWire(w, remembering(m), sealing(t, 1))
				}
				for range 2 {
					resp, err := call()
					require.NoError(t, err)
					require.Equal(t, 201, resp.StatusCode)
					require.Equal(t, "201 Created", resp.Status)
					require.Equal(t, "HTTP/1.1", resp.Proto)
					require.EqualValues(t, len(body), resp.ContentLength)
					want := maps.Clone(first.Header)
					delete(want, "Set-Cookie")
					want["Idempotent-Replayed"] = []string{"true"}
					require.Equal(t, want, resp.Header)
					require.Equal(t, body, readAll(t, resp))
					require.NotNil(t, resp.Request)
					require.Equal(t, wireURL, resp.Request.URL.String())
					r := idem.ReportOf(resp)
					require.Equal(t, idem.Executed, r.Outcome)
					require.True(t, r.Replayed)
					require.Equal(t, "pay_1", r.Reference)
					require.NoError(t, r.Reason)
					require.Empty(t, r.Attempts)
					require.Zero(t, r.Sends)
					require.Equal(t, "journal", r.KeyFrom)
				}
				require.Len(t, w.seen(), 1)
			})
		})
	}
}

func TestStoredAnswerBearsTheReplayMarkOfItsDialect(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{}
		tr := onWire(w, remembering(new(journal.Memory)), sealing(t, 1), func(tr *idem.Transport) {
			tr.Dialect.Replay = []idem.Mark{{Header: "x-cached"}, {Header: "x-replay", Value: "yes"}}
		})
		for n := range 2 {
			resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
			require.NoError(t, err)
			readAll(t, resp)
			require.Equal(t, n == 1, resp.Header.Get("X-Replay") == "yes")
		}
		require.Len(t, w.seen(), 1)
	})
}

// Whoever asks with another request is not answered with this one's.
func TestStoredAnswerIsOnlyForItsRequest(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{}
		tr := onWire(w, remembering(new(journal.Memory)), sealing(t, 1))
		resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{"a":1}`))
		require.NoError(t, err)
		readAll(t, resp)
		_, err = tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{"a":2}`))
		require.ErrorIs(t, err, idem.ErrKeyReused)
		require.Len(t, w.seen(), 1)
	})
}

func TestAnswersThatAreNotStored(t *testing.T) {
	for name, c := range map[string]struct {
		serve  func(req *http.Request) *http.Response
		edit   func(*idem.Transport)
		state  journal.State
		sends  int // of two calls
		status int
	}{
		"a refusal": {serve: func(req *http.Request) *http.Response { return answer(req, 402, jsonType(), `{}`) },
			state: journal.Refused, sends: 2, status: 402},
		"already done": {serve: func(req *http.Request) *http.Response { return answer(req, 412, jsonType(), `{"id":"pay_1"}`) },
			edit:  func(tr *idem.Transport) { tr.Dialect.AlreadyDone = []idem.Mark{{Status: 412}} },
			state: journal.Done, sends: 3, status: 412},
		"a stream": {serve: func(req *http.Request) *http.Response {
			return chunkedAnswer(req, "text/plain", io.NopCloser(strings.NewReader("a long answer")))
		}, state: journal.Done, sends: 2, status: 200},
		"one beyond the limit": {serve: func(req *http.Request) *http.Response {
			return answer(req, 201, jsonType(), `{"id":"pay_1","more":"`+strings.Repeat("m", 100)+`"}`)
		}, edit: func(tr *idem.Transport) { tr.Policy.MaxResponseBuffer = 100 }, state: journal.Done, sends: 2, status: 201},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				m := new(journal.Memory)
				w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
					if name == "already done" && n == 1 {
						return answer(req, 500, nil, ""), nil // so that the key was sent before
					}
					return c.serve(req), nil
				}}
				edit := c.edit
				if edit == nil {
					edit = func(*idem.Transport) {}
				}
				for range 2 {
					resp, err := onWire(w, remembering(m), sealing(t, 1), edit).RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
					require.NoError(t, err)
					readAll(t, resp)
					require.Equal(t, c.status, resp.StatusCode)
					e := entryOf(t, m, "1")
					require.Equal(t, c.state, e.State)
					require.Nil(t, e.Answer)
				}
				require.Len(t, w.seen(), c.sends)
			})
		})
	}
}

func TestSweptAnswerLeavesItsReference(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		_, err := pay(t, journalled(s, m, sealing(t, 1)), s, "1")
		require.NoError(t, err)
		time.Sleep(25 * time.Hour) // its window
		r, err := pay(t, journalled(s, m, sealing(t, 1)), s, "1")
		require.NoError(t, err)
		require.True(t, r.Replayed)
		swept, err := m.Sweep(t.Context(), 0)
		require.NoError(t, err)
		require.Equal(t, journal.Swept{Emptied: 1}, swept)
		e := entryOf(t, m, "1")
		require.Nil(t, e.Request)
		require.Nil(t, e.Answer)

		r, err = pay(t, journalled(s, m, sealing(t, 1)), s, "1")
		require.ErrorIs(t, err, idem.ErrAlreadyDone)
		require.Equal(t, idem.Executed, r.Outcome)
		require.Equal(t, "pay_1", r.Reference)
		require.Len(t, s.Sends(), 1)
		require.Len(t, s.Effects(), 1)
	})
}

// --- keys and damage

// tampering lets what is read pass through a change.
type tampering struct {
	journal.Journal
	change func(*journal.Entry)
}

func (j tampering) Begin(ctx context.Context, in journal.Intent) (journal.Entry, error) {
	e, err := j.Journal.Begin(ctx, in)
	j.change(&e)
	return e, err
}

func (j tampering) Pending(ctx context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		for e, err := range j.Journal.Pending(ctx) {
			j.change(&e)
			if !yield(e, err) {
				return
			}
		}
	}
}

// The server's replay, and after the window the reference, take the place of an
// answer that does not open; the report says why.
func TestStoredAnswerThatDoesNotOpenIsAskedForAgain(t *testing.T) {
	stored := func(t *testing.T, s *fakeserver.Server, m *journal.Memory) {
		for _, id := range []string{"1", "2"} {
			_, err := pay(t, journalled(s, m, sealing(t, 1)), s, id)
			require.NoError(t, err)
		}
	}
	for name, c := range map[string]struct {
		key    byte
		change func(t *testing.T, m *journal.Memory, e *journal.Entry)
	}{
		"another Seal":                  {2, nil},
		"the answer of another":         {1, func(t *testing.T, m *journal.Memory, e *journal.Entry) { e.Answer = entryOf(t, m, "2").Answer }},
		"the request for the answer":    {1, func(t *testing.T, m *journal.Memory, e *journal.Entry) { e.Answer = e.Request }},
		"a flipped bit":                 {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Answer[len(e.Answer)/2] ^= 4 }},
		"a flipped bit of the nonce":    {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Answer[3] ^= 4 }},
		"a cut end":                     {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Answer = e.Answer[:len(e.Answer)-1] }},
		"almost nothing":                {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Answer = e.Answer[:1] }},
		"a version that is not known":   {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Answer[0]++ }},
		"the same under another scope":  {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Scope = "other" }},
		"the same under a shifted name": {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Name, e.ID = "charg", "e1" }},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				stored(t, s, m)
				j := tampering{m, func(e *journal.Entry) {
					if c.change != nil {
						c.change(t, m, e)
					}
				}}
				r, err := pay(t, journalled(s, j, sealing(t, c.key)), s, "1")
				require.NoError(t, err)
				require.True(t, r.Replayed)
				require.ErrorIs(t, r.Reason, idem.ErrJournal)
				require.NotErrorIs(t, r.Reason, idem.ErrAlreadyDone)
				require.Equal(t, idem.Executed, r.Outcome)
				require.Equal(t, "pay_1", r.Reference)
				require.Len(t, s.Sends(), 3)
				require.Len(t, s.Effects(), 2)

				time.Sleep(25 * time.Hour) // its window
				r, err = pay(t, journalled(s, j, sealing(t, c.key)), s, "1")
				require.ErrorIs(t, err, idem.ErrAlreadyDone)
				require.ErrorIs(t, err, idem.ErrJournal)
				require.Equal(t, idem.Executed, r.Outcome, "that is in the row")
				require.Equal(t, "pay_1", r.Reference)
				require.Len(t, s.Sends(), 3)
				require.Equal(t, journal.Done, entryOf(t, m, "1").State)
			})
		})
	}
}

// Without the Seal the stored answer is as good as none.
func TestStoredAnswerIsNotNeededWithinTheWindow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		_, err := pay(t, journalled(s, m, sealing(t, 1)), s, "1")
		require.NoError(t, err)
		r, err := pay(t, journalled(s, m), s, "1")
		require.NoError(t, err)
		require.True(t, r.Replayed)
		require.Len(t, s.Sends(), 2)
		time.Sleep(25 * time.Hour) // its window
		_, err = pay(t, journalled(s, m), s, "1")
		require.ErrorIs(t, err, idem.ErrAlreadyDone)
		require.Len(t, s.Sends(), 2)
	})
}

func TestSealWithoutAJournalIsInvalid(t *testing.T) {
	w := &wire{}
	_, err := onWire(w, sealing(t, 1)).RoundTrip(newPost(t, t.Context(), wireURL, `{}`))
	require.ErrorIs(t, err, idem.ErrInvalid)
	require.ErrorContains(t, err, "Transport.Seal")
	require.Empty(t, w.seen())
}

// --- the request

func TestResumeOfASealedRequestNeedsNobodyToBuildIt(t *testing.T) {
	for name, c := range map[string]struct {
		method, body string
		once         bool // the body can be read only once
	}{
		"JSON":      {"POST", `{"amount":1,"note":"ä"}`, false},
		"read once": {"POST", `{"amount":1}`, true},
		"binary":    {"POST", "\x00\xff\xfe\x80", false},
		"no body":   {"POST", "", false},
		"PATCH":     {"PATCH", `{"amount":1}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				m := new(journal.Memory)
				w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
					if n == 1 {
						return nil, io.ErrUnexpectedEOF // the answer is lost
					}
					return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
				}}
				prepare := func(tr *idem.Transport) {
					tr.Prepare = func(req *http.Request) error {
						req.Header.Set("Authorization", "Bearer fresh")
						req.Header.Set("Cookie", "session=2")
						req.Header.Set("X-Api-Key", "fresh")
						return nil
					}
				}
				tr := onWire(w, remembering(m), sealing(t, 1), withAttempts(1), prepare)
				post := newPost
				if c.once {
					post = newPostOnce
				}
				u, err := url.Parse(wireURL + "?account=7&x=%20y")
				require.NoError(t, err)
				u.User = url.UserPassword("merchant", "password")
				req := post(t, charging(t.Context(), "1"), u.String(), c.body)
				req.Method = c.method
				req.Header = http.Header{
					"Content-Type": {"application/x-odd"}, "Accept": {"application/json", "text/plain"}, "Stripe-Version": {"2025-01-01"},
					"Accept-Language": {"de"}, "Authorization": {"Bearer old"}, "Cookie": {"session=1"}, "X-Api-Key": {"secret"},
					"Idempotency-Key": {"of the SDK"}, "Traceparent": {"00-1-2-00"},
				}
				_, err = tr.RoundTrip(req)
				require.ErrorIs(t, err, idem.ErrAttemptsExhausted)

				tr = onWire(w, remembering(m), sealing(t, 1), prepare)
				asked := false
				sum, err := idem.NewClient(tr).Resume(t.Context(), func(context.Context, journal.Entry) (*http.Request, error) {
					asked = true
					return nil, nil
				}, nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
				require.False(t, asked)
				first, second := w.seen()[0], w.seen()[1]
				oneKey(t, w.seen())
				require.Equal(t, first.method, second.method)
				require.Equal(t, wireURL+"?account=7&x=%20y", second.url)
				require.Equal(t, c.body, second.body)
				key := second.header["Idempotency-Key"]
				require.Equal(t, http.Header{
					"Content-Type": {"application/x-odd"}, "Accept": {"application/json", "text/plain"}, "Stripe-Version": {"2025-01-01"},
					"Accept-Language": {"de"}, "Authorization": {"Bearer fresh"}, "Cookie": {"session=2"}, "X-Api-Key": {"fresh"}, "Idempotency-Key": key,
				}, second.header)

				resp, err := tr.RoundTrip(post(t, charging(t.Context(), "2"), wireURL, c.body)) // the Transport still works
				require.NoError(t, err)
				readAll(t, resp)
			})
		})
	}
}

// What a resume brought home, a later call gets.
func TestResumeStoresTheAnswerForALaterCall(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
		_, err := pay(t, journalled(s, m, sealing(t, 1), withAttempts(1)), s, "1")
		require.Error(t, err)
		var told string
		sum, err := idem.NewClient(journalled(s, m, sealing(t, 1))).Resume(t.Context(), nil, func(_ journal.Entry, resp *http.Response) error {
			told = readAll(t, resp)
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, 1, sum.Done)
		sends := len(s.Sends())
		resp, err := journalled(s, m, sealing(t, 1)).RoundTrip(newPayment(t, charging(t.Context(), "1"), s, "1"))
		require.NoError(t, err)
		require.Equal(t, told, readAll(t, resp))
		require.Equal(t, 201, resp.StatusCode)
		require.Len(t, s.Sends(), sends)
		require.Len(t, s.Effects(), 1)
	})
}

// What a resume stores is the answer to the write, not that of the page behind it.
func TestResumeStoresTheAnswerOfTheWriteNotOfTheGETBehindIt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			if req.Method == http.MethodGet {
				return answer(req, 200, http.Header{"Content-Type": {"text/html"}}, `<p>a receipt</p>`), nil
			}
			return answer(req, 303, http.Header{"Location": {"/receipts/1"}}, "see there"), nil
		}}
		m := new(journal.Memory)
		tr := onWire(w, remembering(m), sealing(t, 1))
		c := idem.NewClient(tr)
		enlist(t, c, m, onTheWire, "1")
		sum, err := c.Resume(t.Context(), nil, func(e journal.Entry, resp *http.Response) error {
			require.Equal(t, 303, e.Status)
			require.Equal(t, `<p>a receipt</p>`, readAll(t, resp))
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, 1, sum.Done)

		resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), "1"), onTheWire.URL()+"/v1/payments", paymentJSON("1", 1999)))
		require.NoError(t, err)
		require.Equal(t, "see there", readAll(t, resp))
		require.Equal(t, 303, resp.StatusCode)
		require.Equal(t, http.Header{"Location": {"/receipts/1"}, "Idempotent-Replayed": {"true"}}, resp.Header)
		require.Len(t, w.seen(), 2)
	})
}

// A stored 303 is an answer like another: http.Client follows it, or cannot.
func TestStoredRedirectIsFollowed(t *testing.T) {
	for location, followed := range map[string]bool{"/receipts/1": true, "http://[::1/": false} {
		t.Run(location, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
					if req.Method == http.MethodGet {
						return answer(req, 200, nil, "a receipt"), nil
					}
					return answer(req, 303, http.Header{"Location": {location}}, ""), nil
				}}
				c := idem.NewClient(onWire(w, remembering(new(journal.Memory)), sealing(t, 1)))
				for range 2 {
					resp, err := c.Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
					require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
					if followed {
						require.NoError(t, err)
						require.Equal(t, "a receipt", readAll(t, resp))
						continue
					}
					var e *idem.Error
					require.ErrorAs(t, err, &e)
					require.Equal(t, 303, e.StatusCode)
				}
				posts := 0
				for _, send := range w.seen() {
					if send.method == http.MethodPost {
						posts++
					}
				}
				require.Equal(t, 1, posts)
			})
		})
	}
}

// A body beyond the limit cannot be stored: then build is asked.
func TestRequestBeyondTheLimitIsBuiltAgain(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			if n == 1 {
				return nil, io.ErrUnexpectedEOF
			}
			return answer(req, 201, jsonType(), `{}`), nil
		}}
		edit := func(tr *idem.Transport) { tr.Policy.MaxRequestBuffer, tr.Policy.MaxAttempts = 10, 1 }
		body := strings.Repeat("b", 11)
		c := idem.NewClient(onWire(w, remembering(m), sealing(t, 1), edit))
		_, err := c.Do(newPost(t, charging(t.Context(), "1"), wireURL, body))
		require.Error(t, err)
		require.Nil(t, entryOf(t, m, "1").Request)
		sum, err := c.Resume(t.Context(), nil, nil)
		require.ErrorIs(t, err, idem.ErrInvalid)
		require.Equal(t, 1, sum.Failed)
		sum, err = c.Resume(t.Context(), func(ctx context.Context, _ journal.Entry) (*http.Request, error) {
			return newPost(t, ctx, wireURL, body), nil
		}, nil)
		require.NoError(t, err)
		require.Equal(t, 1, sum.Done)
	})
}

// A new generation is another request: the old one is not sent for it.
func TestSealedRequestIsThatOfItsGeneration(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		resp, err := journalled(s, m, sealing(t, 1)).RoundTrip(newPost(t, charging(t.Context(), "order-1"), s.URL()+"/v1/payments", declinedJSON))
		require.NoError(t, err)
		readAll(t, resp)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset}))
		_, err = journalled(s, m, sealing(t, 1), withAttempts(1)).RoundTrip(newPayment(t, charging(t.Context(), "order-1"), s, "order-1"))
		require.Error(t, err)
		sum, err := idem.NewClient(journalled(s, m, sealing(t, 1))).Resume(t.Context(), nil, nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Len(t, s.Effects(), 1)
		require.EqualValues(t, 1999, s.Effects()[0].Amount)
	})
}

func TestSealedRequestThatDoesNotOpenIsNotSent(t *testing.T) {
	for name, c := range map[string]struct {
		key    byte
		change func(t *testing.T, m *journal.Memory, e *journal.Entry)
	}{
		"another Seal":           {2, func(*testing.T, *journal.Memory, *journal.Entry) {}},
		"the request of another": {1, func(t *testing.T, m *journal.Memory, e *journal.Entry) { e.Request = entryOf(t, m, "2").Request }},
		"a flipped bit":          {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Request[20] ^= 1 }},
		"a cut end":              {1, func(_ *testing.T, _ *journal.Memory, e *journal.Entry) { e.Request = e.Request[:12] }},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				sealed := idem.NewClient(journalled(s, m, sealing(t, 1)))
				enlist(t, sealed, m, s, "1")
				enlist(t, sealed, m, s, "2")
				j := tampering{m, func(e *journal.Entry) {
					if e.ID == "1" {
						c.change(t, m, e)
					}
				}}
				sum, err := idem.NewClient(journalled(s, j, sealing(t, c.key))).Resume(t.Context(), nil, nil)
				require.ErrorIs(t, err, idem.ErrJournal)
				require.ErrorContains(t, err, "charge/1")
				require.Empty(t, s.Effects(fakeserver.Filter{Reference: "1"}))
				require.Equal(t, journal.Pending, entryOf(t, m, "1").State)
				if c.key == 1 {
					require.Equal(t, idem.Resumed{Seen: 2, Done: 1, Failed: 1}, sum)
				} else {
					require.Equal(t, idem.Resumed{Seen: 2, Failed: 2}, sum)
				}
			})
		})
	}
}

func TestWhatIsSealedTwiceIsNotTheSame(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		c := idem.NewClient(onWire(&wire{}, remembering(m), sealing(t, 1)))
		seen := map[string]bool{}
		for range 100 {
			in, err := c.Intent(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
			require.NoError(t, err)
			seen[fmt.Sprintf("%x", in.Request[:13])] = true // version and nonce
		}
		require.Len(t, seen, 100)
	})
}

// Header values are bytes, not text.
func TestStoredAnswerKeepsItsHeadersToTheByte(t *testing.T) {
	virtual(t, func(t *testing.T) {
		h := http.Header{"X-Name": {"caf\xe9", "a\tb", "<&>"}, "Content-Type": {"application/json"}}
		w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			return answer(req, 201, h.Clone(), "\xff\x00"), nil
		}}
		tr := onWire(w, remembering(new(journal.Memory)), sealing(t, 1))
		for range 2 {
			resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
			require.NoError(t, err)
			require.Equal(t, "\xff\x00", readAll(t, resp))
			require.Equal(t, h["X-Name"], resp.Header["X-Name"])
		}
		require.Len(t, w.seen(), 1)
	})
}

// What is not stored of a request may say whose money it is. Without it the
// request is another one, and must not go out.
func TestResumeSendsNoRequestThatLacksAHeaderItHad(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(*http.Request) error
		done    bool
	}{
		"nobody brings it":  {nil, false},
		"Prepare forgot it": {func(r *http.Request) error { r.Header.Set("Authorization", "Bearer fresh"); return nil }, false},
		"Prepare brings it": {func(r *http.Request) error {
			r.Header.Set("Authorization", "Bearer fresh")
			r.Header.Set("Stripe-Account", "acct_1")
			return nil
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				m := new(journal.Memory)
				w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
					if n == 1 {
						return nil, io.ErrUnexpectedEOF
					}
					return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
				}}
				req := newPost(t, charging(t.Context(), "1"), wireURL, `{}`)
				req.Header.Set("Stripe-Account", "acct_1")
				req.Header.Set("Authorization", "Bearer old")
				_, err := onWire(w, remembering(m), sealing(t, 1), withAttempts(1)).RoundTrip(req)
				require.Error(t, err)
				sum, err := idem.NewClient(onWire(w, remembering(m), sealing(t, 1), func(tr *idem.Transport) { tr.Prepare = c.prepare })).Resume(t.Context(), nil, nil)
				for _, send := range w.seen() {
					require.Equal(t, "acct_1", send.header.Get("Stripe-Account"))
				}
				if c.done {
					require.NoError(t, err)
					require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
					return
				}
				require.ErrorIs(t, err, idem.ErrInvalid)
				if name == "Prepare forgot it" { // else any of them may be named
					require.ErrorContains(t, err, "Stripe-Account")
				}
				require.NotContains(t, err.Error(), "acct_1")
				require.Equal(t, idem.Resumed{Seen: 1, Failed: 1}, sum)
				require.Equal(t, journal.Pending, entryOf(t, m, "1").State)
				require.Empty(t, entryOf(t, m, "1").Owner)
				require.Zero(t, entryOf(t, m, "1").Resumes)
			})
		})
	}
}

// The scope of a sealed request is that of its entry: what Transport.Scope looks
// at comes with Prepare.
func TestSealedRequestIsResumedInItsScope(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			if n <= 2 {
				return nil, io.ErrUnexpectedEOF
			}
			return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
		}}
		of := func(account string) *idem.Transport {
			return onWire(w, remembering(m), sealing(t, 1), withAttempts(1), func(tr *idem.Transport) {
				tr.Scope = func(r *http.Request) string { return r.Header.Get("Authorization") }
				tr.Prepare = func(r *http.Request) error { r.Header.Set("Authorization", account); return nil }
			})
		}
		for _, account := range []string{"one", "two"} {
			req := newPost(t, charging(t.Context(), "1"), wireURL, `{"of":"`+account+`"}`)
			req.Header.Set("Authorization", account)
			_, err := of(account).RoundTrip(req)
			require.Error(t, err)
		}
		sum, err := idem.NewClient(of("two")).Resume(t.Context(), nil, nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 2, Done: 1, Skipped: 1}, sum)
		require.Len(t, w.seen(), 3)
		require.Equal(t, `{"of":"two"}`, w.seen()[2].body)
		require.Equal(t, w.seen()[1].keys, w.seen()[2].keys)
		sum, err = idem.NewClient(of("one")).Resume(t.Context(), nil, nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Equal(t, w.seen()[0].keys, w.seen()[3].keys)
	})
}

// A request may go to another host than its URL says, as behind a gateway.
func TestSealedRequestKeepsItsHostAndWhatDescribesItsContent(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		var hosts []string
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			hosts = append(hosts, req.Host)
			if n == 1 {
				return nil, io.ErrUnexpectedEOF
			}
			return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
		}}
		tr := onWire(w, remembering(m), sealing(t, 1), withAttempts(1))
		req := newPost(t, charging(t.Context(), "1"), wireURL, `{}`)
		req.Host = "tenant.api.test"
		req.Header.Set("Content-Digest", "sha-256=:RBNvo1WzZ4oRRq0W9+hknpT7T8If536DEMBg9hyq/4o=:")
		_, err := tr.RoundTrip(req)
		require.Error(t, err)
		sum, err := idem.NewClient(tr).Resume(t.Context(), nil, nil)
		require.NoError(t, err)
		require.Equal(t, 1, sum.Done)
		require.Equal(t, []string{"tenant.api.test", "tenant.api.test"}, hosts)
		require.Equal(t, w.seen()[0].header, w.seen()[1].header)
	})
}
