package idem_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
)

// enlist writes charge/id down as a transaction of the caller's own does, and
// leaves it for Resume: Memory has no transactions, but what Begin and a Release
// of what was not sent leave behind is the same.
func enlist(t testing.TB, c *idem.Client, j journal.Journal, s interface{ URL() string }, id string) journal.Entry {
	t.Helper()
	return enlistRequest(t, c, j, newPost(t, charging(context.Background(), id), s.URL()+"/v1/payments", paymentJSON(id, 1999)))
}

func enlistRequest(t testing.TB, c *idem.Client, j journal.Journal, req *http.Request) journal.Entry {
	t.Helper()
	in, err := c.Intent(req)
	require.NoError(t, err)
	e, err := j.Begin(context.Background(), in)
	require.NoError(t, err)
	e, err = j.Release(context.Background(), e, journal.Note{NotSent: true})
	require.NoError(t, err)
	require.True(t, e.FirstSend.IsZero())
	require.False(t, e.Clear)
	return e
}

// at is where a wire is.
type at string

func (u at) URL() string { return string(u) }

const onTheWire = at("http://api.test")

// rebuild makes the payment of an entry again, as newPayment made it.
func rebuild(t testing.TB, s interface{ URL() string }) func(context.Context, journal.Entry) (*http.Request, error) {
	return func(ctx context.Context, e journal.Entry) (*http.Request, error) {
		return newPost(t, ctx, s.URL()+"/v1/payments", paymentJSON(e.ID, 1999)), nil
	}
}

// leaveUnknown has charge/id end unknown, with its effect at the server.
func leaveUnknown(t testing.TB, s *fakeserver.Server, j journal.Journal, id string) (key string) {
	t.Helper()
	require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
	r, err := pay(t, journalled(s, j, withAttempts(1)), s, id)
	require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
	require.Equal(t, idem.Unknown, r.Outcome)
	return r.Key
}

func withPace(d time.Duration) func(*idem.Transport) {
	return func(tr *idem.Transport) { tr.Policy.ResumePace = d }
}

func withResumeWait(d time.Duration) func(*idem.Transport) {
	return func(tr *idem.Transport) { tr.Policy.ResumeWait = d }
}

// --- what is sent

func TestResumeGoesOnWithEachKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		keys := []string{leaveUnknown(t, s, m, "lost")}
		time.Sleep(time.Second) // in order of age
		keys = append(keys, enlist(t, c, m, s, "enlisted").Key)
		time.Sleep(time.Second) // in order of age
		keys = append(keys, crashAfterTheEffect(t, s, m, "crashed"))
		sends := len(s.Sends())

		var told []journal.Entry
		sum, err := c.Resume(t.Context(), rebuild(t, s), func(e journal.Entry, resp *http.Response) error {
			told = append(told, e)
			require.Equal(t, 201, resp.StatusCode)
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.Contains(t, string(body), e.Reference)
			require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
			now := entryOf(t, m, e.ID)
			require.Equal(t, journal.Pending, now.State, "only the nil of done finishes it")
			require.True(t, now.Claimed(time.Now()))
			return nil
		})

		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 3, Done: 3}, sum)
		require.Len(t, s.Effects(), 3)
		var order, sent []string
		for i, e := range told {
			order = append(order, e.ID)
			require.Equal(t, journal.Done, e.State)
			require.Equal(t, 201, e.Status)
			require.Equal(t, s.Effects(fakeserver.Filter{Reference: e.ID})[0].ID, e.Reference)
			require.Equal(t, keys[i], e.Key)
			now := entryOf(t, m, e.ID)
			require.Equal(t, journal.Done, now.State)
			require.Equal(t, e.Reference, now.Reference)
			require.Equal(t, 201, now.Status)
			require.Empty(t, now.Owner)
		}
		require.Equal(t, []string{"lost", "enlisted", "crashed"}, order, "oldest first, then the claimed ones")
		for _, send := range s.Sends()[sends:] {
			sent = append(sent, send.Key)
		}
		require.Equal(t, keys, sent)
		require.Equal(t, 2, entryOf(t, m, "lost").Attempts)

		sum, err = c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Zero(t, sum, "nothing is pending any more")
	})
}

func TestResumeNeedsAJournal(t *testing.T) {
	for name, c := range map[string]*idem.Client{"no journal": idem.NewClient(&idem.Transport{}), "the zero Client": {}} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Resume(t.Context(), nil, nil)
			require.ErrorIs(t, err, idem.ErrInvalid)
			require.ErrorContains(t, err, "Transport.Journal")
			for _, err := range c.Pending(t.Context()) {
				require.ErrorIs(t, err, idem.ErrInvalid)
			}
			require.ErrorIs(t, c.Settle(t.Context(), chargeOf("1"), idem.Executed, "", "seen"), idem.ErrInvalid)
			require.ErrorIs(t, c.Abandon(t.Context(), chargeOf("1"), "given up"), idem.ErrInvalid)
		})
	}
}

// What build must not do, may not do, or cannot do concerns one entry only.
func TestTroublesOfBuildConcernOneEntry(t *testing.T) {
	errRow := errors.New("the row is gone")
	for name, c := range map[string]struct {
		build func(t *testing.T, s *fakeserver.Server, ctx context.Context) (*http.Request, error)
		want  idem.Resumed
		err   error
	}{
		"another amount": {func(t *testing.T, s *fakeserver.Server, ctx context.Context) (*http.Request, error) {
			return newPost(t, ctx, s.URL()+"/v1/payments", paymentJSON("odd", 2000)), nil
		}, idem.Resumed{Seen: 2, Done: 1, Failed: 1}, idem.ErrKeyReused},
		"another endpoint": {func(t *testing.T, s *fakeserver.Server, ctx context.Context) (*http.Request, error) {
			return newPost(t, ctx, s.URL()+"/v1/payments?x", paymentJSON("odd", 1999)), nil
		}, idem.Resumed{Seen: 2, Done: 1, Failed: 1}, idem.ErrKeyReused},
		"no request and no error": {func(*testing.T, *fakeserver.Server, context.Context) (*http.Request, error) {
			return nil, nil
		}, idem.Resumed{Seen: 2, Done: 1, Skipped: 1}, nil},
		"an error": {func(*testing.T, *fakeserver.Server, context.Context) (*http.Request, error) {
			return nil, errRow
		}, idem.Resumed{Seen: 2, Done: 1, Failed: 1}, errRow},
		"a request without a URL": {func(_ *testing.T, _ *fakeserver.Server, ctx context.Context) (*http.Request, error) {
			return (&http.Request{Method: "POST"}).WithContext(ctx), nil
		}, idem.Resumed{Seen: 2, Done: 1, Failed: 1}, nil},
		"a request without a key": {func(t *testing.T, s *fakeserver.Server, ctx context.Context) (*http.Request, error) {
			req := newPost(t, ctx, s.URL()+"/v1/payments", paymentJSON("odd", 1999))
			req.Method = http.MethodPut
			return req, nil
		}, idem.Resumed{Seen: 2, Done: 1, Failed: 1}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				cl := idem.NewClient(journalled(s, m))
				before := enlist(t, cl, m, s, "odd")
				time.Sleep(time.Second) // the good one comes behind it
				enlist(t, cl, m, s, "good")
				sum, err := cl.Resume(t.Context(), func(ctx context.Context, e journal.Entry) (*http.Request, error) {
					if e.ID == "odd" {
						return c.build(t, s, ctx)
					}
					return rebuild(t, s)(ctx, e)
				}, nil)
				require.Equal(t, c.want, sum)
				require.Equal(t, c.want.Failed > 0, err != nil)
				if c.err != nil {
					require.ErrorIs(t, err, c.err)
					require.ErrorContains(t, err, "charge/odd")
				}
				require.Len(t, s.Sends(), 1)
				require.Len(t, s.Effects(), 1)
				now := entryOf(t, m, "odd")
				require.Equal(t, journal.Pending, now.State)
				require.Empty(t, now.Owner)
				require.Equal(t, before.Key, now.Key)
				require.True(t, now.FirstSend.IsZero())

				sum, err = cl.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
			})
		})
	}
}

// A request that build made without the context of the resume, as
// http.NewRequest does, ends with it all the same.
func TestResumeEndsWithItsContextWhateverBuildMadeOfIt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		enlist(t, c, m, s, "1")
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Hang}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err := c.Resume(ctx, func(_ context.Context, e journal.Entry) (*http.Request, error) {
			return rebuild(t, s)(context.Background(), e)
		}, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(start))
		require.Empty(t, entryOf(t, m, "1").Owner)
	})
}

func TestRequestsWithoutBuildFailEachEntry(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		for i := range 12 {
			enlist(t, c, m, s, fmt.Sprint(i))
		}
		sum, err := c.Resume(t.Context(), nil, nil)
		require.ErrorIs(t, err, idem.ErrInvalid)
		require.ErrorContains(t, err, "build")
		require.Equal(t, idem.Resumed{Seen: 12, Failed: 12}, sum)
		require.Len(t, err.(interface{ Unwrap() []error }).Unwrap(), 10, "the errors of ten entries are kept")
		require.Empty(t, s.Sends())
	})
}

// --- done

func TestErrorOfDoneKeepsTheEntryForTheReplay(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		key := enlist(t, c, m, s, "1").Key
		sum, err := c.Resume(t.Context(), rebuild(t, s), func(journal.Entry, *http.Response) error { return errDisk })
		require.ErrorIs(t, err, errDisk)
		require.Equal(t, idem.Resumed{Seen: 1, Failed: 1}, sum)
		e := entryOf(t, m, "1")
		require.Equal(t, journal.Pending, e.State)
		require.Empty(t, e.Owner)
		require.False(t, e.Clear)
		require.Equal(t, "pay_1", e.Reference, "for the person who looks at it")
		require.Equal(t, 1, e.Attempts)

		var replayed bool
		sum, err = c.Resume(t.Context(), rebuild(t, s), func(_ journal.Entry, resp *http.Response) error {
			replayed = idem.ReportOf(resp).Replayed
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.True(t, replayed)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, []string{key}, keysSent(s.Sends()))
	})
}

// An answer that done could not keep is an orderly end: the process lives.
func TestAnswersThatDoneCannotKeepAreNoCrashLoop(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		enlist(t, c, m, s, "1")
		for range 10 {
			sum, err := c.Resume(t.Context(), rebuild(t, s), func(journal.Entry, *http.Response) error { return errDisk })
			require.ErrorIs(t, err, errDisk)
			require.Equal(t, idem.Resumed{Seen: 1, Failed: 1}, sum)
		}
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Len(t, s.Effects(), 1)
	})
}

func TestDoneThatDoesNotReturnLeavesTheEntryPending(t *testing.T) {
	for name, end := range map[string]func(){
		"panic":  func() { panic("out of order") },
		"Goexit": runtime.Goexit, // as require does in a test
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				j := watch(new(journal.Memory))
				c := idem.NewClient(journalled(s, j))
				enlist(t, c, j, s, "1")
				var group sync.WaitGroup
				group.Go(func() {
					defer func() {
						if v := recover(); v != nil && v != "out of order" {
							t.Error(v)
						}
					}()
					_, _ = c.Resume(t.Context(), rebuild(t, s), func(journal.Entry, *http.Response) error { end(); return nil })
					t.Error("it returned")
				})
				group.Wait()
				e := entryOf(t, j, "1")
				require.Equal(t, journal.Pending, e.State)
				require.Empty(t, e.Owner)
				require.Equal(t, 1, e.Resumes, "that is how a crash loop begins")
				renewals := len(j.heard("Renew"))
				time.Sleep(time.Hour) // no renewal is left behind
				require.Equal(t, renewals, len(j.heard("Renew")))

				sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, 1, sum.Done)
				require.Len(t, s.Effects(), 1)
			})
		})
	}
}

func TestClaimIsRenewedWhileDoneWorks(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		enlist(t, c, m, s, "1")
		calls := 0
		var other idem.Resumed
		var group sync.WaitGroup
		sum, err := c.Resume(t.Context(), rebuild(t, s), func(journal.Entry, *http.Response) error {
			calls++
			group.Go(func() {
				var err error
				if other, err = idem.NewClient(journalled(s, m)).Resume(context.Background(), rebuild(t, s), func(journal.Entry, *http.Response) error {
					calls++
					return nil
				}); err != nil {
					t.Error(err)
				}
			})
			time.Sleep(3 * time.Minute) // longer than any lease
			return nil
		})
		group.Wait()
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, other)
		require.Equal(t, 1, calls)
		require.Len(t, s.Sends(), 1)
	})
}

// In a transaction of its own, together with what it writes down.
func TestDoneMayFinishTheEntryItself(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		enlist(t, c, m, s, "1")
		sum, err := c.Resume(t.Context(), rebuild(t, s), func(e journal.Entry, _ *http.Response) error {
			_, err := m.Finish(t.Context(), e, e.State, journal.Note{Status: e.Status, Reference: e.Reference})
			return err
		})
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Equal(t, journal.Done, entryOf(t, m, "1").State)
		require.Equal(t, "pay_1", entryOf(t, m, "1").Reference)
	})
}

func TestDoneMayDoWithTheBodyWhatItLikes(t *testing.T) {
	for name, done := range map[string]func(journal.Entry, *http.Response) error{
		"read it": func(_ journal.Entry, resp *http.Response) error { _, err := io.ReadAll(resp.Body); return err },
		"read a part": func(_ journal.Entry, resp *http.Response) error {
			_, err := resp.Body.Read(make([]byte, 2))
			return err
		},
		"close it":     func(_ journal.Entry, resp *http.Response) error { return resp.Body.Close() },
		"read no byte": func(journal.Entry, *http.Response) error { return nil },
		"not be there": nil,
		"read, close": func(_ journal.Entry, resp *http.Response) error {
			_, _ = io.ReadAll(resp.Body)
			return resp.Body.Close()
		},
		"replace it":    func(_ journal.Entry, resp *http.Response) error { resp.Body = http.NoBody; return nil },
		"throw it away": func(_ journal.Entry, resp *http.Response) error { resp.Body = nil; return nil },
	} {
		for how, body := range map[string]func(*http.Request) *http.Response{
			"buffered": func(req *http.Request) *http.Response { return answer(req, 201, jsonType(), `{"id":"pay_1"}`) },
			"streamed": func(req *http.Request) *http.Response {
				return chunkedAnswer(req, "text/plain", io.NopCloser(strings.NewReader("a long answer")))
			},
		} {
			t.Run(name+", "+how, func(t *testing.T) {
				virtual(t, func(t *testing.T) {
					closes := &closeCounter{}
					w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
						resp := body(req)
						closes.Reader = resp.Body
						resp.Body = closes
						return resp, nil
					}}
					m := new(journal.Memory)
					c := idem.NewClient(onWire(w, remembering(m)))
					enlist(t, c, m, onTheWire, "1")
					sum, err := c.Resume(t.Context(), rebuild(t, onTheWire), done)
					require.NoError(t, err)
					require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
					require.EqualValues(t, 1, closes.closes.Load())
				})
			})
		}
	}
}

// An answer that breaks off was not received, whatever done says of its
// beginning.
func TestAnswerThatBreaksOffBehindDoneKeepsTheEntry(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			body := io.MultiReader(strings.NewReader("a long"), errorReader{io.ErrUnexpectedEOF})
			if n > 1 {
				body = strings.NewReader("a long answer")
			}
			return chunkedAnswer(req, "text/plain", io.NopCloser(body)), nil
		}}
		m := new(journal.Memory)
		c := idem.NewClient(onWire(w, remembering(m)))
		enlist(t, c, m, onTheWire, "1")
		sum, err := c.Resume(t.Context(), rebuild(t, onTheWire), nil)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		require.Equal(t, idem.Resumed{Seen: 1, Failed: 1}, sum)
		require.Equal(t, journal.Pending, entryOf(t, m, "1").State)
		sum, err = c.Resume(t.Context(), rebuild(t, onTheWire), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		oneKey(t, w.seen())
	})
}

type errorReader struct{ err error }

func (r errorReader) Read([]byte) (int, error) { return 0, r.err }

func TestRefusedAnswersAreToldAndFinished(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		build := func(ctx context.Context, _ journal.Entry) (*http.Request, error) {
			return newPost(t, ctx, s.URL()+"/v1/payments", declinedJSON), nil
		}
		req, err := build(charging(t.Context(), "1"), journal.Entry{})
		require.NoError(t, err)
		enlistRequest(t, c, m, req)
		sum, err := c.Resume(t.Context(), build, func(journal.Entry, *http.Response) error { return errDisk })
		require.ErrorIs(t, err, errDisk)
		require.Equal(t, journal.Pending, entryOf(t, m, "1").State)
		require.Equal(t, 1, sum.Failed)

		var told journal.Entry
		sum, err = c.Resume(t.Context(), build, func(e journal.Entry, resp *http.Response) error {
			told = e
			require.Equal(t, 402, resp.StatusCode)
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Refused: 1}, sum)
		require.Equal(t, journal.Refused, told.State)
		require.Equal(t, 402, told.Status)
		require.Equal(t, journal.Refused, entryOf(t, m, "1").State)
		require.Empty(t, s.Effects())
	})
}

// The provider does not replay, but says what it made.
func TestResumeTakesAlreadyDoneForDone(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		s.Apply(fakeserver.Settings{DoneStatus: 409, DoneBody: `{"reason":"idempotent_creation_conflict","existing":"{id}"}`})
		m := new(journal.Memory)
		edit := func(tr *idem.Transport) {
			tr.Dialect.AlreadyDone = []idem.Mark{{Status: 409, Pointer: "/reason", Contains: "conflict"}}
			tr.Dialect.Reference = []string{"/existing", "/id"}
		}
		leaveUnknown(t, s, m, "1")
		var told journal.Entry
		sum, err := idem.NewClient(journalled(s, m, edit)).Resume(t.Context(), rebuild(t, s), func(e journal.Entry, _ *http.Response) error {
			told = e
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Equal(t, journal.Done, told.State)
		require.Equal(t, "pay_1", told.Reference)
		require.Equal(t, 409, told.Status)
		require.Equal(t, journal.Done, entryOf(t, m, "1").State)
	})
}

// A 401 or 404 is no answer of the operation: nobody is told, and it stays.
func TestUnknownOnesStay(t *testing.T) {
	for _, fault := range []fakeserver.Fault{
		{Kind: fakeserver.Status, Status: 401},
		{Kind: fakeserver.Status, Status: 404},
		{Kind: fakeserver.Status, Status: 422},
		{Kind: fakeserver.Status, Status: 503},
		{Kind: fakeserver.Status, Status: 301},
		{Kind: fakeserver.Reset},
		{Kind: fakeserver.Redirect, Status: 307, Location: "other"},
		{Kind: fakeserver.Redirect, Status: 307, Location: "http://[::1/"},
		{Kind: fakeserver.Stuck, Delay: time.Hour},
	} {
		t.Run(fault.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				c := idem.NewClient(journalled(s, m, func(tr *idem.Transport) { tr.Policy.MaxInProgress = 2 }))
				key := enlist(t, c, m, s, "1").Key
				require.NoError(t, s.Inject(fault))
				for range 7 { // more than MaxResumes: each ends in an orderly way
					sum, err := c.Resume(t.Context(), rebuild(t, s), func(journal.Entry, *http.Response) error {
						t.Error("there is nothing to tell")
						return nil
					})
					require.NoError(t, err)
					require.Equal(t, idem.Resumed{Seen: 1, Unknown: 1}, sum)
				}
				e := entryOf(t, m, "1")
				require.Equal(t, journal.Pending, e.State)
				require.Empty(t, e.Owner)
				require.Zero(t, e.Resumes)
				require.False(t, e.Clear, "there is no caller who was told")
				require.False(t, e.FirstSend.IsZero())
				s.ClearFaults()
				s.Advance(2 * time.Hour) // the stuck key is free again
				sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
				require.Len(t, s.Effects(), 1)
				require.Equal(t, []string{key}, keysSent(s.Sends()))
			})
		})
	}
}

// A server that cannot be reached is no reason to leave it to a caller: there is
// none.
func TestResumeThatSendsNothingIsTakenUpByTheNext(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		enlist(t, c, m, s, "1")
		for range 3 {
			s.Refuse(4)
			sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
			require.NoError(t, err)
			require.Equal(t, idem.Resumed{Seen: 1, Unknown: 1}, sum)
			e := entryOf(t, m, "1")
			require.True(t, e.FirstSend.IsZero())
			require.False(t, e.Clear)
			time.Sleep(100 * time.Hour) // no window runs
		}
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
	})
}

// --- crash loops

func TestCrashLoopStopsAfterMaxResumes(t *testing.T) {
	for _, most := range []int{0, 1, 3} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				edit := func(tr *idem.Transport) { tr.Policy.MaxResumes = most }
				want := most
				if most == 0 {
					want = 5
				}
				enlist(t, idem.NewClient(journalled(s, m)), m, s, "1")
				for n := range want {
					w := watch(m)
					_, err := idem.NewClient(journalled(s, w, edit)).Resume(t.Context(), rebuild(t, s), func(journal.Entry, *http.Response) error {
						w.crash() // done never returns
						return nil
					})
					require.ErrorIs(t, err, errCrash)
					require.Equal(t, n+1, entryOf(t, m, "1").Resumes)
					require.True(t, ptr(entryOf(t, m, "1")).Claimed(time.Now()))
				}
				require.Len(t, s.Sends(), want)

				c := idem.NewClient(journalled(s, m, edit))
				start := time.Now()
				sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Attention: 1}, sum)
				require.LessOrEqual(t, time.Since(start), 30*time.Second)
				require.Len(t, s.Sends(), want)
				require.Len(t, s.Effects(), 1)
				require.Len(t, keysSent(s.Sends()), 1)
				require.Equal(t, journal.Pending, entryOf(t, m, "1").State)
				p := pendingOf(t, c)
				require.True(t, p[0].Attention)
				require.Positive(t, p[0].Left)

				// Its caller may still call it, and a person may settle it.
				r, err := pay(t, journalled(s, m, edit), s, "1")
				require.NoError(t, err)
				require.Equal(t, idem.Executed, r.Outcome)
			})
		})
	}
}

func ptr[T any](v T) *T { return &v }

// The journal says so too, for the entry that another process resumed meanwhile.
func TestJournalStopsACrashLoopThatTheSnapshotDidNotShow(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, stale{m}))
		e := enlist(t, c, m, s, "1")
		in, err := c.Intent(newPayment(t, charging(t.Context(), "1"), s, "1"))
		require.NoError(t, err)
		in.MaxResumes = 100
		for range 5 {
			got, err := m.Begin(t.Context(), in)
			require.NoError(t, err)
			_, err = m.Release(t.Context(), got, journal.Note{})
			require.NoError(t, err)
		}
		require.Equal(t, 5, entryOf(t, m, "1").Resumes)
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Attention: 1}, sum)
		require.Empty(t, s.Sends())
		require.Equal(t, e.Key, entryOf(t, m, "1").Key)
	})
}

// stale yields pending entries as they were when they were written down.
type stale struct{ journal.Journal }

func (j stale) Pending(ctx context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		for e, err := range j.Journal.Pending(ctx) {
			e.Resumes, e.Owner, e.Lease = 0, "", time.Time{}
			if !yield(e, err) {
				return
			}
		}
	}
}

// --- pace and claims

func TestResumeKeepsItsPace(t *testing.T) {
	for pace, want := range map[time.Duration]time.Duration{0: 50 * time.Millisecond, 2 * time.Second: 2 * time.Second, -1: 0} {
		t.Run(pace.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				c := idem.NewClient(journalled(s, m, withPace(pace)))
				for i := range 5 {
					enlist(t, c, m, s, fmt.Sprint(i))
				}
				start := time.Now()
				sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, 5, sum.Done)
				for i, send := range s.Sends() {
					require.Equal(t, time.Duration(i)*want, send.At.Sub(start))
				}
				require.Equal(t, 4*want, time.Since(start), "nobody waits behind the last")
			})
		})
	}
}

// The pace is from start to start: a slow server is no reason to wait longer.
func TestPaceIsFromStartToStart(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m, withPace(time.Second)))
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Late, Delay: 300 * time.Millisecond}, fakeserver.Fault{Kind: fakeserver.Late, Delay: 5 * time.Second}))
		for i := range 3 {
			enlist(t, c, m, s, fmt.Sprint(i))
		}
		start := time.Now()
		_, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		var at []time.Duration
		for _, send := range s.Sends() {
			at = append(at, send.At.Sub(start))
		}
		require.Equal(t, []time.Duration{0, time.Second, 6 * time.Second}, at)
	})
}

// What is not sent takes no time: the entries of another Transport may be many.
func TestEntriesThatAreNotSentTakeNoTime(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m, withPace(time.Second)))
		for i := range 100 {
			enlist(t, c, m, s, fmt.Sprint(i))
		}
		start := time.Now()
		sum, err := c.Resume(t.Context(), func(ctx context.Context, e journal.Entry) (*http.Request, error) {
			if e.ID == "10" || e.ID == "20" {
				return rebuild(t, s)(ctx, e)
			}
			return nil, nil
		}, nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 100, Done: 2, Skipped: 98}, sum)
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestClaimsOfACrashedProcessAreWaitedFor(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		var keys []string
		for _, id := range []string{"1", "2", "3"} {
			keys = append(keys, crashAfterTheEffect(t, s, m, id))
		}
		c := idem.NewClient(journalled(s, m))
		enlist(t, c, m, s, "free")
		start := time.Now()
		var order []string
		sum, err := c.Resume(t.Context(), rebuild(t, s), func(e journal.Entry, _ *http.Response) error {
			if e.ID == "free" {
				require.Less(t, time.Since(start), time.Second, "what is free does not wait for what is not")
			}
			order = append(order, e.ID)
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 4, Done: 4}, sum)
		require.Equal(t, []string{"free", "1", "2", "3"}, order)
		require.InDelta(t, 30*time.Second, time.Since(start), float64(time.Second), "one lease, not three")
		require.Len(t, s.Effects(), 4)
		require.Len(t, keysSent(s.Sends()), 4)
		for _, key := range keys {
			require.Contains(t, keysSent(s.Sends()), key)
		}
	})
}

func TestClaimsThatAreAliveAreSkipped(t *testing.T) {
	for name, c := range map[string]struct {
		edit func(*idem.Transport)
		most time.Duration
	}{
		"as soon as one is renewed":      {func(*idem.Transport) {}, 11 * time.Second},
		"at once where nobody waits":     {withResumeWait(-1), 0},
		"at the end of a short patience": {withResumeWait(3 * time.Second), 4 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				release := claimed(t, s, m, "1")
				start := time.Now()
				sum, err := idem.NewClient(journalled(s, m, c.edit)).Resume(t.Context(), rebuild(t, s), nil)
				took := time.Since(start)
				release()
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum)
				require.LessOrEqual(t, took, c.most)
				require.Len(t, s.Sends(), 1)
			})
		})
	}
}

// While the resume waits, the owner may come to an end by itself.
func TestClaimThatIsFinishedMeanwhileIsSkippedAndOneThatIsReleasedIsSent(t *testing.T) {
	for name, want := range map[string]idem.Resumed{"finished": {Seen: 1, Skipped: 1}, "released": {Seen: 1, Done: 1}} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				c := idem.NewClient(journalled(s, m))
				enlist(t, c, m, s, "1")
				in, err := c.Intent(newPayment(t, charging(t.Context(), "1"), s, "1"))
				require.NoError(t, err)
				e, err := m.Begin(t.Context(), in)
				require.NoError(t, err)
				time.AfterFunc(5*time.Second, func() {
					var err error
					if name == "finished" {
						_, err = m.Finish(context.Background(), e, journal.Done, journal.Note{})
					} else {
						_, err = m.Release(context.Background(), e, journal.Note{})
					}
					if err != nil {
						t.Error(err)
					}
				})
				start := time.Now()
				sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, want, sum)
				require.InDelta(t, 5500*time.Millisecond, time.Since(start), float64(time.Second))
			})
		})
	}
}

func TestTwoResumesAtOnceAreOneEffectEach(t *testing.T) {
	for _, same := range []bool{true, false} {
		t.Run(fmt.Sprintf("one Transport: %v", same), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: 130 * time.Millisecond}))
				trs := []*idem.Transport{journalled(s, m), journalled(s, m)}
				if same {
					trs[1] = trs[0]
				}
				const n = 40
				for i := range n {
					enlist(t, idem.NewClient(trs[0]), m, s, fmt.Sprint(i))
				}
				var mu sync.Mutex // guards told
				told := map[string]int{}
				sums := make([]idem.Resumed, 2)
				var group sync.WaitGroup
				for i, tr := range trs {
					group.Go(func() {
						var err error
						sums[i], err = idem.NewClient(tr).Resume(t.Context(), rebuild(t, s), func(e journal.Entry, _ *http.Response) error {
							mu.Lock()
							defer mu.Unlock()
							told[e.ID]++
							return nil
						})
						if err != nil {
							t.Error(err)
						}
					})
				}
				group.Wait()
				require.Len(t, s.Effects(), n)
				require.Len(t, keysSent(s.Sends()), n)
				require.Len(t, s.Sends(), n, "nobody is sent twice")
				require.Len(t, told, n)
				for id, calls := range told {
					require.Equal(t, 1, calls, id)
				}
				require.Equal(t, n, sums[0].Done+sums[1].Done)
				for _, sum := range sums {
					requireSum(t, sum)
				}
			})
		})
	}
}

func requireSum(t *testing.T, r idem.Resumed) {
	t.Helper()
	require.Equal(t, r.Seen, r.Done+r.Refused+r.Unknown+r.Skipped+r.Expired+r.Attention+r.Failed, "%v", r)
}

// --- what is left alone

func TestEntriesWhoseCallerWasToldAreLeftToTheCaller(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		s.Refuse(4)
		r, err := pay(t, journalled(s, m), s, "not executed")
		require.Error(t, err)
		require.Equal(t, idem.NotExecuted, r.Outcome)
		require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 403}))
		r, err = pay(t, journalled(s, m), s, "refused")
		require.NoError(t, err)
		require.Equal(t, idem.Refused, r.Outcome)
		sends := len(s.Sends())
		c := idem.NewClient(journalled(s, m))
		sum, err := c.Resume(t.Context(), func(_ context.Context, e journal.Entry) (*http.Request, error) {
			return nil, fmt.Errorf("nobody should build %v", e.Operation)
		}, nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 2, Skipped: 2}, sum)
		require.Len(t, s.Sends(), sends)
		require.Len(t, pendingOf(t, c), 2)
		// A caller who calls again, and then hears nothing, leaves it to the resume.
		leaveUnknown(t, s, m, "refused")
		sum, err = c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 2, Skipped: 1, Done: 1}, sum)
	})
}

// What Pending yielded is older than what a caller was told meanwhile.
func TestResumeLeavesAnEntryToTheCallerWhoWasToldMeanwhile(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m, withPace(time.Minute)))
		enlist(t, c, m, s, "a")
		time.Sleep(time.Second) // a is older
		enlist(t, c, m, s, "b")
		time.AfterFunc(30*time.Second, func() {
			s.Refuse(100)
			r, err := pay(t, journalled(s, m, withAttempts(1)), s, "b")
			if err == nil || r.Outcome != idem.NotExecuted {
				t.Errorf("it should be told that nothing was done: %v, %v", r.Outcome, err)
			}
			s.Refuse(0)
		})

		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)

		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, idem.Resumed{Seen: 2, Done: 1, Skipped: 1}, sum)
		require.True(t, entryOf(t, m, "b").Clear)
		require.Empty(t, entryOf(t, m, "b").Owner)
	})
}

// Those that a person decided, or a caller finished, since Pending was read.
func TestEntryThatIsFinishedMeanwhileIsSkipped(t *testing.T) {
	for name, meanwhile := range map[string]func(t *testing.T, s *fakeserver.Server, c *idem.Client, j journal.Journal) error{
		"done by its caller": func(t *testing.T, s *fakeserver.Server, _ *idem.Client, j journal.Journal) error {
			_, err := pay(t, journalled(s, j), s, "b")
			return err
		},
		"settled as executed": func(_ *testing.T, _ *fakeserver.Server, c *idem.Client, _ journal.Journal) error {
			return c.Settle(context.Background(), chargeOf("b"), idem.Executed, "", "seen")
		},
		"settled as refused": func(_ *testing.T, _ *fakeserver.Server, c *idem.Client, _ journal.Journal) error {
			return c.Settle(context.Background(), chargeOf("b"), idem.Refused, "", "seen")
		},
		"abandoned": func(_ *testing.T, _ *fakeserver.Server, c *idem.Client, _ journal.Journal) error {
			return c.Abandon(context.Background(), chargeOf("b"), "no longer wanted")
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				c := idem.NewClient(journalled(s, m, withPace(time.Minute)))
				enlist(t, c, m, s, "a")
				time.Sleep(time.Second) // a is older
				enlist(t, c, m, s, "b")
				time.AfterFunc(30*time.Second, func() {
					if err := meanwhile(t, s, c, m); err != nil {
						t.Error(err)
					}
				})
				want := 1
				if name == "done by its caller" {
					want = 2
				}
				sum, err := c.Resume(t.Context(), rebuild(t, s), func(e journal.Entry, _ *http.Response) error {
					require.Equal(t, "a", e.ID)
					return nil
				})
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 2, Done: 1, Skipped: 1}, sum)
				require.Len(t, s.Sends(), want)
				require.NotEqual(t, journal.Pending, entryOf(t, m, "b").State, "a resume starts nothing anew")
			})
		})
	}
}

func TestEntriesOfAnotherScopeAreSkipped(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		scoped := func(account string) *idem.Transport {
			return journalled(s, m, func(tr *idem.Transport) {
				tr.Scope = func(r *http.Request) string { return r.Header.Get("Account") }
				tr.Prepare = func(r *http.Request) error { r.Header.Set("Account", account); return nil }
			})
		}
		build := func(account string) func(context.Context, journal.Entry) (*http.Request, error) {
			return func(ctx context.Context, e journal.Entry) (*http.Request, error) {
				req := newPost(t, ctx, s.URL()+"/v1/payments", paymentJSON(e.ID+" of "+e.Scope, 1999))
				req.Header.Set("Account", account)
				return req, nil
			}
		}
		for _, account := range []string{"one", "two"} {
			req, err := build(account)(charging(t.Context(), "1"), journal.Entry{Operation: journal.Operation{Scope: account, ID: "1"}})
			require.NoError(t, err)
			enlistRequest(t, idem.NewClient(scoped(account)), m, req)
		}
		sum, err := idem.NewClient(scoped("two")).Resume(t.Context(), build("two"), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 2, Done: 1, Skipped: 1}, sum)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, "1 of two", s.Effects()[0].Reference)
		e, err := m.Get(t.Context(), journal.Operation{Scope: "one", Name: "charge", ID: "1"})
		require.NoError(t, err)
		require.Equal(t, journal.Pending, e.State)
		require.Empty(t, e.Owner)
		require.True(t, e.FirstSend.IsZero())
		require.EqualValues(t, 1, e.Fence, "it was not even claimed")
		sum, err = idem.NewClient(scoped("one")).Resume(t.Context(), build("one"), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Len(t, keysSent(s.Sends()), 2)
	})
}

func TestExpiredEntriesAreListedAndNotSent(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		leaveUnknown(t, s, m, "old")
		time.Sleep(10 * time.Hour) // the others are younger
		leaveUnknown(t, s, m, "young")
		enlist(t, idem.NewClient(journalled(s, m)), m, s, "never sent")
		time.Sleep(14*time.Hour - 30*time.Second) // the instant at which the first has passed
		c := idem.NewClient(journalled(s, m))
		left := map[string]time.Duration{}
		for _, p := range pendingOf(t, c) {
			left[p.ID] = p.Left
		}
		require.Equal(t, map[string]time.Duration{"old": 0, "young": 10 * time.Hour, "never sent": 24*time.Hour - 30*time.Second}, left)
		sends := len(s.Sends())
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 3, Done: 2, Expired: 1}, sum)
		require.Len(t, s.Sends(), sends+2)
		require.Equal(t, journal.Pending, entryOf(t, m, "old").State)
		time.Sleep(time.Hour) // it does not come back
		sum, err = c.Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Expired: 1}, sum)
		require.Equal(t, -time.Hour-50*time.Millisecond, pendingOf(t, c)[0].Left)
	})
}

// --- context, damage, progress

func TestResumeEndsWithItsContext(t *testing.T) {
	for name, c := range map[string]struct {
		fault fakeserver.Fault
		pace  time.Duration
		at    time.Duration // when the context ends
		want  idem.Resumed
		sends int
	}{
		"between two":       {fakeserver.Fault{}, 10 * time.Second, 15 * time.Second, idem.Resumed{Seen: 2, Done: 2}, 2},
		"during an attempt": {fakeserver.Fault{Kind: fakeserver.Late, Delay: 4 * time.Second}, 10 * time.Second, 12 * time.Second, idem.Resumed{Seen: 2, Done: 1, Unknown: 1}, 2},
		"before the first":  {fakeserver.Fault{}, 10 * time.Second, 0, idem.Resumed{}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				cl := idem.NewClient(journalled(s, m, withPace(c.pace)))
				for i := range 4 {
					enlist(t, cl, m, s, fmt.Sprint(i))
				}
				if c.fault.Kind != "" {
					require.NoError(t, s.Inject(c.fault))
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				if c.at == 0 {
					cancel(errOwnCause)
				}
				timer := time.AfterFunc(c.at, func() { cancel(errOwnCause) })
				defer timer.Stop()
				start := time.Now()
				sum, err := cl.Resume(ctx, rebuild(t, s), nil)
				require.ErrorIs(t, err, errOwnCause)
				require.Equal(t, c.at, time.Since(start))
				require.Equal(t, c.want, sum)
				require.Len(t, s.Sends(), c.sends)
				for i := range 4 {
					require.Empty(t, entryOf(t, m, fmt.Sprint(i)).Owner)
				}
				s.ClearFaults()
				sum, err = cl.Resume(t.Context(), rebuild(t, s), nil)
				require.NoError(t, err)
				require.Equal(t, 4-c.want.Done, sum.Done)
				require.Len(t, s.Effects(), 4)
			})
		})
	}
}

func TestResumeEndsWithItsContextWhileItWaitsForAClaim(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		crashAfterTheEffect(t, s, m, "1")
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		start := time.Now()
		sum, err := idem.NewClient(journalled(s, m)).Resume(ctx, rebuild(t, s), nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 5*time.Second, time.Since(start))
		require.Zero(t, sum)
	})
}

// damaging yields damaged entries before what j has.
type damaging struct {
	journal.Journal
	damaged []journal.Entry
	err     error
}

func (d damaging) Pending(ctx context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		for _, e := range d.damaged {
			if !yield(e, fmt.Errorf("row 7: %w", journal.ErrDamaged)) {
				return
			}
		}
		for e, err := range d.Journal.Pending(ctx) {
			if !yield(e, err) {
				return
			}
		}
		if d.err != nil {
			yield(journal.Entry{}, d.err)
		}
	}
}

func TestDamagedEntriesAreReportedAndTheOthersGoOn(t *testing.T) {
	for name, damaged := range map[string]journal.Entry{
		"of a known operation":                  {Operation: chargeOf("damaged")},
		"of which not even the name is legible": {},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				c := idem.NewClient(journalled(s, damaging{Journal: m, damaged: []journal.Entry{damaged}}))
				enlist(t, c, m, s, "1")
				errs, entries := 0, 0
				for p, err := range c.Pending(t.Context()) {
					if err != nil {
						require.ErrorIs(t, err, idem.ErrJournal)
						require.ErrorIs(t, err, journal.ErrDamaged)
						errs++
						continue
					}
					require.Equal(t, "1", p.ID)
					entries++
				}
				require.Equal(t, []int{1, 1}, []int{errs, entries})

				sum, err := c.Resume(t.Context(), rebuild(t, s), nil)

				require.Len(t, s.Effects(), 1)
				require.Equal(t, idem.Resumed{Seen: 2, Done: 1, Failed: 1}, sum)
				require.ErrorIs(t, err, idem.ErrJournal)
				require.ErrorIs(t, err, journal.ErrDamaged)
			})
		})
	}
}

func TestJournalThatFailsInTheMiddleEndsTheResume(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, damaging{Journal: m, err: errDisk}))
		enlist(t, c, m, s, "1")
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.ErrorIs(t, err, idem.ErrJournal)
		require.ErrorIs(t, err, errDisk)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum, "what was done is told")
	})
}

// A journal that cannot note the end of one entry is told; the entry stays.
func TestJournalThatCannotFinishAResumedEntryKeepsIt(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		j := watch(m)
		j.trouble = failing(errDisk, "Finish")
		c := idem.NewClient(journalled(s, j))
		enlist(t, c, m, s, "1")
		sum, err := c.Resume(t.Context(), rebuild(t, s), nil)
		require.ErrorIs(t, err, idem.ErrJournal)
		require.ErrorIs(t, err, errDisk)
		require.Equal(t, idem.Resumed{Seen: 1, Failed: 1}, sum)
		sum, err = idem.NewClient(journalled(s, m)).Resume(t.Context(), rebuild(t, s), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
		require.Len(t, s.Effects(), 1)
		require.Len(t, keysSent(s.Sends()), 1)
	})
}

func TestProgressOfAResumeAddsUp(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		var progress []idem.Resumed
		var ops []string
		type mark struct{}
		c := idem.NewClient(journalled(s, m, func(tr *idem.Transport) {
			tr.Hooks.Resumed = func(ctx context.Context, op journal.Operation, r idem.Resumed) {
				require.Equal(t, "the caller's", ctx.Value(mark{}))
				ops, progress = append(ops, op.ID), append(progress, r)
			}
		}))
		leaveUnknown(t, s, m, "expired")
		time.Sleep(25 * time.Hour) // its window
		s.Refuse(4)
		_, err := pay(t, journalled(s, m), s, "clear")
		require.Error(t, err)
		for _, id := range []string{"done", "unknown", "mine not", "broken"} {
			time.Sleep(time.Second) // in this order
			enlist(t, c, m, s, id)
		}
		req := newPost(t, charging(t.Context(), "refused"), s.URL()+"/v1/payments", declinedJSON)
		enlistRequest(t, c, m, req)
		crashAfterTheEffect(t, s, m, "crashed")
		sends := len(s.Sends())
		require.NoError(t, s.Script("", fakeserver.Fault{}, fakeserver.Fault{Kind: fakeserver.Status, Status: 404}))

		sum, err := c.Resume(context.WithValue(t.Context(), mark{}, "the caller's"), func(ctx context.Context, e journal.Entry) (*http.Request, error) {
			switch e.ID {
			case "mine not":
				return nil, nil
			case "broken":
				return nil, errDisk
			case "refused":
				return newPost(t, ctx, s.URL()+"/v1/payments", declinedJSON), nil
			}
			return rebuild(t, s)(ctx, e)
		}, nil)

		require.ErrorIs(t, err, errDisk)
		require.Equal(t, idem.Resumed{Seen: 8, Done: 2, Refused: 1, Unknown: 1, Skipped: 2, Expired: 1, Failed: 1}, sum)
		require.Equal(t, []string{"expired", "clear", "done", "unknown", "mine not", "broken", "refused", "crashed"}, ops)
		require.Equal(t, sum, progress[len(progress)-1])
		for i, r := range progress {
			require.Equal(t, i+1, r.Seen)
			requireSum(t, r)
		}
		require.Len(t, s.Sends(), sends+4)
		require.Equal(t, "seen 8: done 2, refused 1, unknown 1, skipped 2, expired 1, need attention 0, failed 1", sum.String())
	})
}

// A panic passes through Resume; the body that build opened is closed all the same.
func TestPanicInAResumedAttemptClosesTheBodyOfTheRequest(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		body := &closeCounter{Reader: strings.NewReader(paymentJSON("1", 1999))}
		c := idem.NewClient(journalled(s, m, func(tr *idem.Transport) {
			tr.Hooks.AttemptDone = func(context.Context, *idem.Report, idem.Attempt) { panic("a hook fails") }
		}))
		enlist(t, c, m, s, "1")
		build := func(ctx context.Context, e journal.Entry) (*http.Request, error) {
			return http.NewRequestWithContext(ctx, "POST", s.URL()+"/v1/payments", body)
		}
		require.PanicsWithValue(t, "a hook fails", func() { _, _ = c.Resume(t.Context(), build, nil) })
		require.EqualValues(t, 1, body.closes.Load())
		require.Empty(t, entryOf(t, m, "1").Owner)
	})
}

// --- size

func TestResumeOfTenThousandEntriesNeedsLittleMemory(t *testing.T) {
	virtual(t, func(t *testing.T) {
		const n = 10_000
		m := new(journal.Memory)
		base := roundTripFunc(func(req *http.Request) (*http.Response, error) {
			_ = req.Body.Close()
			return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
		})
		var most int64
		seen := 0
		before := int64(0)
		c := idem.NewClient(onWire(base, remembering(m), withPace(-1), func(tr *idem.Transport) {
			tr.Hooks.Resumed = func(_ context.Context, _ journal.Operation, r idem.Resumed) {
				if seen = r.Seen; seen%2500 == 0 {
					most = max(most, heapInUse()-before)
				}
			}
		}))
		for i := range n {
			enlist(t, c, m, onTheWire, fmt.Sprint(i))
		}
		before = heapInUse()
		sum, err := c.Resume(t.Context(), rebuild(t, onTheWire), nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: n, Done: n}, sum)
		require.Less(t, most, int64(15<<20), "Memory itself copies about 5 MB of them")
	})
}

// large has n claimed entries with a sealed request each, made when they are
// asked for, as a database does.
type large struct {
	journal.Journal
	n, size int
}

func (l large) Pending(context.Context) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		for i := range l.n {
			if !yield(l.entry(chargeOf(fmt.Sprint(i)), journal.Pending), nil) {
				return
			}
		}
	}
}

func (l large) entry(op journal.Operation, s journal.State) journal.Entry {
	return journal.Entry{Operation: op, State: s, Key: "k", Owner: "other", Fence: 1, Lease: time.Now().Add(time.Hour), Request: make([]byte, l.size)}
}

func (l large) Get(_ context.Context, op journal.Operation) (journal.Entry, error) {
	return l.entry(op, journal.Done), nil // its owner has finished it
}

func TestClaimedEntriesAreNotKeptInMemoryWithTheirRequests(t *testing.T) {
	virtual(t, func(t *testing.T) {
		const n = 2000
		var most, before int64
		c := idem.NewClient(onWire(&wire{}, remembering(large{new(journal.Memory), n, 64 << 10}), sealing(t, 1), func(tr *idem.Transport) {
			tr.Hooks.Resumed = func(_ context.Context, _ journal.Operation, r idem.Resumed) {
				if r.Seen == 1 {
					most = heapInUse() - before
				}
			}
		}))
		before = heapInUse()
		sum, err := c.Resume(t.Context(), nil, nil)
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: n, Skipped: n}, sum)
		require.Less(t, most, int64(10<<20), "128 MB of requests wait in the store")
	})
}

// --- for people

func TestSettledAndAbandonedOperations(t *testing.T) {
	for name, c := range map[string]struct {
		decide   func(*idem.Client) error
		state    journal.State
		decision string
		keys     int // that are sent in the end
	}{
		"executed": {func(c *idem.Client) error {
			return c.Settle(context.Background(), chargeOf("1"), idem.Executed, "pay_1", "seen in the dashboard")
		}, journal.Done, "executed", 1},
		"refused": {func(c *idem.Client) error {
			return c.Settle(context.Background(), chargeOf("1"), idem.Refused, "", "not in the dashboard")
		}, journal.Refused, "refused", 2},
		"abandoned": {func(c *idem.Client) error {
			return c.Abandon(context.Background(), chargeOf("1"), "nobody knows")
		}, journal.Refused, "abandoned", 2},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				old := leaveUnknown(t, s, m, "1")
				cl := idem.NewClient(journalled(s, m))
				require.NoError(t, c.decide(cl))
				e := entryOf(t, m, "1")
				require.Equal(t, c.state, e.State)
				require.Equal(t, c.decision, e.Decision)
				require.NotEmpty(t, e.Reason)
				require.Empty(t, pendingOf(t, cl))
				require.NoError(t, c.decide(cl), "the same again")
				other := idem.Executed
				if c.state == journal.Done {
					other = idem.Refused
				}
				for _, err := range []error{
					cl.Settle(t.Context(), chargeOf("1"), other, "", "seen"),
					cl.Settle(t.Context(), chargeOf("1"), idem.Executed, "pay_2", "seen"),
				} {
					require.ErrorIs(t, err, idem.ErrInvalid)
					require.ErrorIs(t, err, journal.ErrFinished)
				}
				require.Equal(t, e, entryOf(t, m, "1"))

				r, err := pay(t, journalled(s, m), s, "1")
				require.Len(t, keysSent(s.Sends()), c.keys)
				if c.keys == 1 {
					require.ErrorIs(t, err, idem.ErrAlreadyDone)
					return
				}
				require.NoError(t, err)
				require.NotEqual(t, old, r.Key)
				require.Equal(t, 2, entryOf(t, m, "1").Generation)
				require.Len(t, s.Effects(), 2, "whoever says that nothing was done had better be right")
			})
		})
	}
}

func TestDecisionsThatCannotBeMade(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		leaveUnknown(t, s, m, "1")
		ctx := t.Context()
		for _, o := range []idem.Outcome{idem.Unknown, idem.NotExecuted, 17} {
			err := c.Settle(ctx, chargeOf("1"), o, "", "seen")
			require.ErrorIs(t, err, idem.ErrInvalid)
			require.ErrorContains(t, err, o.String())
		}
		for _, reason := range []string{"", strings.Repeat("r", 1001)} {
			for _, err := range []error{c.Settle(ctx, chargeOf("1"), idem.Executed, "", reason), c.Abandon(ctx, chargeOf("1"), reason)} {
				require.ErrorIs(t, err, idem.ErrInvalid)
				require.ErrorIs(t, err, journal.ErrInvalid)
				require.ErrorContains(t, err, "Reason")
				require.ErrorContains(t, err, "1000")
			}
		}
		err := c.Settle(ctx, chargeOf("2"), idem.Executed, "", "seen")
		require.ErrorIs(t, err, idem.ErrInvalid)
		require.ErrorIs(t, err, journal.ErrNotFound)
		require.ErrorContains(t, err, "charge/2")
		require.Equal(t, journal.Pending, entryOf(t, m, "1").State)

		release := claimed(t, s, m, "3")
		for _, err := range []error{c.Settle(ctx, chargeOf("3"), idem.Executed, "", "seen"), c.Abandon(ctx, chargeOf("3"), "given up")} {
			require.ErrorIs(t, err, idem.ErrInProgress)
			require.ErrorContains(t, err, "charge/3")
		}
		release()
		require.NoError(t, c.Abandon(ctx, chargeOf("3"), strings.Repeat("r", 1000)))

		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		require.ErrorIs(t, c.Abandon(cancelled, chargeOf("1"), "given up"), context.Canceled)
	})
}

func TestPendingMayBeLeftEarlyAndTheLoopMayDecide(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		m := new(journal.Memory)
		c := idem.NewClient(journalled(s, m))
		for i := range 5 {
			enlist(t, c, m, s, fmt.Sprint(i))
		}
		n := 0
		for p, err := range c.Pending(t.Context()) {
			require.NoError(t, err)
			if n++; n == 3 {
				break
			}
			require.NoError(t, c.Abandon(t.Context(), p.Operation, "no longer wanted"))
		}
		require.Len(t, pendingOf(t, c), 3)
	})
}

func TestIntentIsWhatACallWouldBegin(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		j := watch(new(journal.Memory))
		tr := journalled(s, j, func(tr *idem.Transport) {
			tr.Scope = func(*http.Request) string { return "acct_1" }
		})
		ctx := charging(t.Context(), "1")
		in, err := idem.NewClient(tr).Intent(newPayment(t, ctx, s, "1"))
		require.NoError(t, err)
		require.Empty(t, j.heard())
		require.Empty(t, s.Sends())
		resp, err := tr.RoundTrip(newPayment(t, ctx, s, "1")) // the same context: nothing was bound to the wrong thing
		require.NoError(t, err)
		readAll(t, resp)
		begun := j.heard("Begin")[0].intent
		require.NotEqual(t, begun.NextKey, in.NextKey, "both are fresh")
		in.NextKey = begun.NextKey
		require.Equal(t, begun, in)
		require.Equal(t, "acct_1", in.Scope)
		require.Equal(t, 24*time.Hour, in.Window)
		require.NotEmpty(t, in.Content)
	})
}

func TestIntentThatCannotBe(t *testing.T) {
	c := idem.NewClient(onWire(&wire{}, remembering(new(journal.Memory))))
	for name, tc := range map[string]struct {
		req   func(*testing.T) *http.Request
		names string
	}{
		"no request": {func(*testing.T) *http.Request { return nil }, "Request"},
		"no name":    {func(t *testing.T) *http.Request { return newPost(t, t.Context(), wireURL, "{}") }, "WithOperation"},
		"a read": {func(t *testing.T) *http.Request {
			r := newPost(t, charging(t.Context(), "1"), wireURL, "")
			r.Method = "GET"
			return r
		}, "key"},
		"an empty id": {func(t *testing.T) *http.Request { return newPost(t, charging(t.Context(), ""), wireURL, "{}") }, "Operation.ID"},
		"no host":     {func(t *testing.T) *http.Request { return newPost(t, charging(t.Context(), "1"), "/v1", "{}") }, "Request.URL"},
		"keys off": {func(t *testing.T) *http.Request {
			return newPost(t, idem.WithoutKey(charging(t.Context(), "1")), wireURL, "{}")
		}, "key"},
		"a wrong length": {func(t *testing.T) *http.Request {
			r := newPostOnce(t, charging(t.Context(), "1"), wireURL, "{}")
			r.ContentLength = 7
			return r
		}, "ContentLength"},
		"a start to come": {func(t *testing.T) *http.Request {
			return newPost(t, idem.WithOperation(t.Context(), idem.Operation{Name: "charge", ID: "1", Started: time.Now().Add(time.Hour)}), wireURL, "{}")
		}, "Operation.Started"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Intent(tc.req(t))
			require.ErrorIs(t, err, idem.ErrInvalid)
			require.ErrorContains(t, err, tc.names)
		})
	}
}

func TestIntentClosesTheBody(t *testing.T) {
	for name, tr := range map[string]*idem.Transport{
		"of a good Transport":   onWire(&wire{}, remembering(new(journal.Memory))),
		"without a journal":     {},
		"without a key window":  {Journal: new(journal.Memory)},
		"of a broken transport": {Journal: new(journal.Memory), Policy: idem.Policy{MaxAttempts: -1}},
	} {
		t.Run(name, func(t *testing.T) {
			body := &closeCounter{Reader: strings.NewReader("{}")}
			req, err := http.NewRequestWithContext(charging(t.Context(), "1"), "POST", wireURL, body)
			require.NoError(t, err)
			_, err = idem.NewClient(tr).Intent(req)
			if name == "of a good Transport" {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, idem.ErrInvalid)
			}
			require.EqualValues(t, 1, body.closes.Load())
		})
	}
}

func TestLimitsOfAResumeAreChecked(t *testing.T) {
	p := idem.Policy{KeyWindow: time.Hour, MaxResumes: -1}
	_, err := idem.NewClient(&idem.Transport{Journal: new(journal.Memory), Policy: p}).Resume(t.Context(), nil, nil)
	require.ErrorIs(t, err, idem.ErrInvalid)
	require.ErrorContains(t, err, "Policy.MaxResumes")
}

func TestResumeFollowsARedirectOfTheWrite(t *testing.T) {
	for _, status := range []int{307, 308} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				s := inMemory(t)
				m := new(journal.Memory)
				c := idem.NewClient(journalled(s, m, func(tr *idem.Transport) { tr.Policy.MaxResumes = 1 }))
				enlist(t, c, m, s, "1")
				require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Redirect, Status: status, Location: "/v1/payments?again"}))
				var told journal.Entry
				sum, err := c.Resume(t.Context(), rebuild(t, s), func(e journal.Entry, _ *http.Response) error {
					told = e
					return nil
				})
				require.NoError(t, err)
				require.Equal(t, idem.Resumed{Seen: 1, Done: 1}, sum)
				require.Equal(t, "pay_1", told.Reference)
				require.Equal(t, 2, entryOf(t, m, "1").Attempts)
				require.Len(t, s.Effects(), 1)
				require.Len(t, keysSent(s.Sends()), 1)
			})
		})
	}
}
