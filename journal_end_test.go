package idem_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/journal"
)

func TestAnswerStandsWhateverTheJournalSaysAtItsEnd(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		w := watch(new(journal.Memory))
		w.trouble = failing(fmt.Errorf("%w: Answer has 300 MB; the most is 256", journal.ErrInvalid), "Finish")
		resp, err := idem.NewClient(journalled(s, w)).Do(newPayment(t, charging(t.Context(), "1"), s, "1"))
		require.NoError(t, err)
		require.Len(t, s.Effects(), 1)
		require.Equal(t, http.StatusCreated, resp.StatusCode)
		readAll(t, resp)
		require.ErrorIs(t, idem.ReportOf(resp).Reason, idem.ErrJournal)
	})
}

func TestDoIsAnErrorForAReasonThoughTheJournalFailedToo(t *testing.T) {
	virtual(t, func(t *testing.T) {
		wr := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			h := jsonType()
			h.Set("Stripe-Should-Retry", "true")
			return answer(req, 404, h, `{}`), nil
		}}
		w := watch(new(journal.Memory))
		w.trouble = failing(errDisk, "Release")
		c := idem.NewClient(onWire(wr, func(tr *idem.Transport) { tr.Dialect, tr.Journal = idem.Stripe, w }))
		var rep idem.Report
		_, err := c.Do(newPost(t, idem.WithReport(charging(t.Context(), "1"), &rep), wireURL, `{}`))
		require.ErrorIs(t, rep.Reason, idem.ErrAttemptsExhausted)
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
	})
}

// A caller may leave without closing the body; then its context is all that ends.
func TestClaimOfAStreamedAnswerEndsWithTheContext(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := watch(m)
		var pw *io.PipeWriter
		wr := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			pr, p := io.Pipe()
			pw = p
			context.AfterFunc(req.Context(), func() { p.CloseWithError(context.Canceled) })
			return chunkedAnswer(req, "text/event-stream", pr), nil
		}}
		ctx, cancel := context.WithCancel(context.Background())
		resp, err := idem.NewClient(onWire(wr, remembering(w))).Do(newPost(t, charging(ctx, "1"), wireURL, `{}`))
		require.NoError(t, err)
		cancel()
		time.Sleep(24 * time.Hour)
		e := entryOf(t, m, "1")
		require.False(t, e.Claimed(time.Now()), "%d renewals in a day", len(w.heard("Renew")))
		require.Equal(t, journal.Pending, e.State)
		require.NoError(t, resp.Body.Close())
		require.NoError(t, pw.Close())
	})
}

func TestSlowBeginDoesNotHastenTheRenewals(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := &journal.Memory{Lease: 5 * time.Second}
		w := watch(m)
		w.lost = func(name string, _ journal.Operation) error {
			if name == "Begin" {
				time.Sleep(6 * time.Second)
			}
			return nil
		}
		wr := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			time.Sleep(25 * time.Second)
			return answer(req, http.StatusCreated, jsonType(), `{"id":"pay_1"}`), nil
		}}
		resp, err := idem.NewClient(onWire(wr, remembering(w))).Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Less(t, len(w.heard("Renew")), 50)
	})
}

func enlistByRules(t *testing.T, e journal.Entry, in journal.Intent) journal.Entry {
	r := journal.Rules{Owner: "o"}
	out, _, err := r.Enlist(&e, in, time.Now())
	require.NoError(t, err)
	return out
}

// one is a journal of one entry, by the rules, so that it can be enlisted.
type one struct {
	r journal.Rules
	e *journal.Entry
}

func (o *one) Begin(_ context.Context, in journal.Intent) (journal.Entry, error) {
	s, ret, w, err := o.r.Begin(o.e, in, time.Now())
	if w {
		o.e = &s
	}
	return ret, err
}
func (o *one) set(e journal.Entry, err error) (journal.Entry, error) {
	if err == nil {
		o.e = &e
	}
	return e, err
}
func (o *one) Renew(_ context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return o.set(o.r.Renew(o.e, e, n, time.Now()))
}
func (o *one) Finish(_ context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	out, _, err := o.r.Finish(o.e, e, s, n, time.Now())
	return o.set(out, err)
}
func (o *one) Release(_ context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return o.set(o.r.Release(o.e, e, n))
}
func (o *one) Get(context.Context, journal.Operation) (journal.Entry, error) { return *o.e, nil }

type enlisting struct {
	journal.Memory
	*one
}

func (o *enlisting) Begin(c context.Context, in journal.Intent) (journal.Entry, error) {
	return o.one.Begin(c, in)
}
func (o *enlisting) Renew(c context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return o.one.Renew(c, e, n)
}
func (o *enlisting) Finish(c context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	return o.one.Finish(c, e, s, n)
}
func (o *enlisting) Release(c context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	return o.one.Release(c, e, n)
}
func (o *enlisting) Get(c context.Context, op journal.Operation) (journal.Entry, error) {
	return o.one.Get(c, op)
}

func TestNothingIsProvedOfAnOperationThatWasEnlistedMeanwhile(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemory(t)
		j := &enlisting{one: &one{r: journal.Rules{Owner: "o"}}}
		tr := journalled(s, j, withAttempts(1), func(tr *idem.Transport) {
			tr.Hooks.AttemptStart = func(ctx context.Context, r *idem.Report, n int) context.Context {
				in, err := idem.NewClient(journalled(s, j)).Intent(newPayment(t, charging(context.Background(), "1"), s, "1"))
				require.NoError(t, err)
				e := enlistByRules(t, *j.one.e, in)
				j.one.e = &e
				return ctx
			}
		})
		s.Refuse(1)
		r, err := pay(t, tr, s, "1")
		require.Error(t, err)
		require.False(t, j.one.e.Clear, "a resume will send it")
		require.True(t, j.one.e.Enlisted)
		require.Equal(t, idem.Unknown, r.Outcome, "a resume will send it")
	})
}

func TestAlreadyDoneOnAFreshEnlistedKeyIsNotExecuted(t *testing.T) {
	virtual(t, func(t *testing.T) {
		j := &enlisting{one: &one{r: journal.Rules{Owner: "o"}}}
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			return answer(req, http.StatusConflict, jsonType(), `{"type":"exists"}`), nil
		}}
		d := shop()
		d.AlreadyDone = []idem.Mark{{Status: http.StatusConflict, Pointer: "/type", Contains: "exists"}}
		for name, enlisted := range map[string]bool{"begun": false, "enlisted": true} {
			j.one.e = nil
			c := idem.NewClient(onWire(w, remembering(j), withAttempts(1), func(tr *idem.Transport) { tr.Dialect = d }))
			req := newPost(t, charging(t.Context(), "1"), wireURL, `{}`)
			if enlisted {
				in, err := c.Intent(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
				require.NoError(t, err)
				e, _, err := j.r.Enlist(nil, in, time.Now())
				require.NoError(t, err)
				j.one.e = &e
			}
			var rep idem.Report
			resp, err := c.Do(req.WithContext(idem.WithReport(req.Context(), &rep)))
			require.NoError(t, err, name)
			readAll(t, resp)
			require.NotEqual(t, idem.Executed, rep.Outcome, name)
			require.Equal(t, journal.Pending, j.one.e.State, name)
		}
	})
}

func TestSealedRequestAfterTheDialectWasRenamedIsBuiltAgain(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := &wire{}
		c := idem.NewClient(onWire(w, remembering(m), sealing(t, 1)))
		enlistRequest(t, c, m, newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		d := shop()
		d.Name = "shop, v2"
		c = idem.NewClient(onWire(w, remembering(m), sealing(t, 1), func(tr *idem.Transport) { tr.Dialect = d }))
		asked := 0
		sum, err := c.Resume(t.Context(), func(ctx context.Context, e journal.Entry) (*http.Request, error) {
			asked++
			return newPost(t, ctx, wireURL, `{}`), nil
		}, nil)
		require.NoError(t, err)
		require.Equal(t, 1, asked)
		require.Equal(t, 1, sum.Done)
	})
}

// A hop behind a journal that failed is judged by its own answer.
func TestHopBehindAStoredAnswerThatDoesNotOpen(t *testing.T) {
	for name, c := range map[string]struct {
		status   int
		followed int
	}{"307 then 500": {307, 500}, "307 then 404": {307, 404}, "303 then 500": {303, 500}, "307 then 201": {307, 201}, "303 then 200": {303, 200}} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				m := new(journal.Memory)
				moved := false
				w := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
					switch {
					case !moved:
						return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
					case req.URL.Path != "/there":
						return answer(req, c.status, http.Header{"Location": {"/there"}}, ""), nil
					}
					return answer(req, c.followed, jsonType(), `{"id":"pay_1"}`), nil
				}}
				call := func(key byte, j journal.Journal) (idem.Report, *http.Response, error) {
					var r idem.Report
					resp, err := idem.NewClient(onWire(w, remembering(j), sealing(t, key))).Do(newPost(t, idem.WithReport(charging(t.Context(), "1"), &r), wireURL, `{}`))
					if err == nil {
						readAll(t, resp)
					}
					return r, resp, err
				}
				_, _, err := call(1, m)
				require.NoError(t, err)
				moved = true
				r, _, err := call(2, m)
				if c.followed >= 400 {
					require.Error(t, err, "Do gives an error for a Reason")
				}
				if c.followed != 500 {
					require.ErrorIs(t, r.Reason, idem.ErrJournal)
				}
			})
		})
	}
}

func TestHopBehindAReleaseThatFailedIsAnErrorForItsOwnReason(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := &journal.Memory{Lease: time.Second}
		w := watch(m)
		n := 0
		w.trouble = func(name string, _ journal.Operation) error {
			if name == "Release" {
				if n++; n == 1 {
					return errDisk
				}
			}
			return nil
		}
		wr := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			if req.URL.Path != "/there" {
				return answer(req, 307, http.Header{"Location": {"/there"}}, ""), nil
			}
			return answer(req, 500, jsonType(), `{}`), nil
		}}
		var r idem.Report
		resp, err := idem.NewClient(onWire(wr, remembering(w))).Do(newPost(t, idem.WithReport(charging(t.Context(), "1"), &r), wireURL, `{}`))
		if err == nil {
			readAll(t, resp)
		}
		require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
		require.Equal(t, idem.Unknown, r.Outcome)
	})
}

// Behind a refusal the key is not the derived one, so no report may name that.
func TestBeginThatDoesNotEndNamesNoKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := watch(new(journal.Memory))
		w.trouble = func(name string, _ journal.Operation) error {
			time.Sleep(time.Hour)
			return errDisk
		}
		ctx, cancel := context.WithTimeout(charging(t.Context(), "1"), time.Minute)
		defer cancel()
		var r idem.Report
		_, err := idem.NewClient(onWire(new(wire), remembering(w))).Do(newPost(t, idem.WithReport(ctx, &r), wireURL, `{}`))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Empty(t, r.Key)
		require.Equal(t, "journal", r.KeyFrom)
		require.Equal(t, idem.Unknown, r.Outcome)
		require.ErrorContains(t, err, "call again with the same operation")
	})
}
