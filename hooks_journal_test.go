package idem_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/journal"
)

// journalFailures hears of a journal that fails.
type journalFailures struct {
	mu  sync.Mutex // guards all
	all []error
}

func (f *journalFailures) hook(t *testing.T) func(*idem.Transport) {
	return func(tr *idem.Transport) {
		tr.Hooks.JournalFailed = func(_ context.Context, op journal.Operation, err error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			if op.ID != "1" || op.Name != "charge" {
				t.Errorf("told of %v", op)
			}
			f.all = append(f.all, err)
		}
	}
}

func (f *journalFailures) heard() []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.all
}

func TestJournalThatFailsBehindAStreamedAnswerIsHeardOf(t *testing.T) {
	for _, c := range []struct {
		name, step string
		cut        bool // the answer, by the caller
		err        error
		heard      bool
	}{
		{"at its end", "Finish", false, errDisk, true},
		{"when it is given up", "Release", true, errDisk, true},
		{"taken over", "Finish", false, journal.ErrClaimLost, false},
		{"not at all", "Decide", false, errDisk, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual(t, func(t *testing.T) {
				m := new(journal.Memory)
				w := watch(m)
				w.trouble = failing(c.err, c.step)
				wr := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
					return chunkedAnswer(req, "text/plain", io.NopCloser(strings.NewReader("a long answer"))), nil
				}}
				var f journalFailures
				resp, err := idem.NewClient(onWire(wr, remembering(w), f.hook(t))).Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
				require.NoError(t, err)
				require.Empty(t, f.heard())
				if c.cut {
					require.NoError(t, resp.Body.Close())
				} else {
					require.Equal(t, "a long answer", readAll(t, resp))
				}
				if !c.heard {
					require.Empty(t, f.heard())
					return
				}
				require.Len(t, f.heard(), 1)
				require.ErrorIs(t, f.heard()[0], idem.ErrJournal)
				require.ErrorIs(t, f.heard()[0], c.err)
				require.Equal(t, journal.Pending, entryOf(t, m, "1").State, "a resume goes on with it")
			})
		})
	}
}

func TestRenewalThatFailsIsHeardOf(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := &journal.Memory{Lease: 3 * time.Second}
		w := watch(m)
		var once sync.Once
		w.trouble = func(name string, _ journal.Operation) (err error) {
			if name == "Renew" {
				once.Do(func() { err = errDisk })
			}
			return err
		}
		wr := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			time.Sleep(10 * time.Second)
			return answer(req, http.StatusCreated, jsonType(), `{"id":"pay_1"}`), nil
		}}
		var f journalFailures
		resp, err := idem.NewClient(onWire(wr, remembering(w), f.hook(t))).Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.NoError(t, idem.ReportOf(resp).Reason, "the next one helped")
		require.Len(t, f.heard(), 1)
		require.ErrorIs(t, f.heard()[0], errDisk)
		require.Equal(t, journal.Done, entryOf(t, m, "1").State)
	})
}

func TestSlogHooksWarnOfAJournalThatFails(t *testing.T) {
	var out bytes.Buffer
	h := idem.SlogHooks(slog.New(slog.NewTextHandler(&out, nil)))
	h.JournalFailed(t.Context(), journal.Operation{Scope: "acct_1", Name: "charge", ID: "1"}, errDisk)
	require.Contains(t, out.String(), `level=WARN msg="idem: journal failed" operation=charge/1 error="the disk is full"`)
}

// streaming is a server whose answers are handed over streaming.
func streaming() *wire {
	return &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
		return chunkedAnswer(req, "text/plain", io.NopCloser(strings.NewReader("a long answer"))), nil
	}}
}

func TestPanicInJournalFailedHandsOnTheTurnOfTheKey(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := &journal.Memory{Lease: time.Second}
		w := watch(m)
		w.trouble = failing(errDisk, "Finish")
		tr := onWire(streaming(), remembering(w), func(tr *idem.Transport) {
			tr.Hooks.JournalFailed = func(context.Context, journal.Operation, error) { panic("hook") }
		})
		c := idem.NewClient(tr)
		resp, err := c.Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		require.Panics(t, func() { _, _ = io.ReadAll(resp.Body) })
		_ = resp.Body.Close()
		w.trouble = nil
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		resp, err = c.Do(newPost(t, charging(ctx, "1"), wireURL, `{}`))
		if err == nil {
			readAll(t, resp)
		}
		require.NoError(t, err, "the turn of the key is handed on")
	})
}

func TestJournalFailedMayCallTheSameOperation(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := &journal.Memory{Lease: time.Second}
		w := watch(m)
		w.trouble = failing(errDisk, "Finish")
		var c *idem.Client
		var second error
		tr := onWire(streaming(), remembering(w), func(tr *idem.Transport) {
			tr.Hooks.JournalFailed = func(context.Context, journal.Operation, error) {
				w.trouble = nil
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				var resp *http.Response
				resp, second = c.Do(newPost(t, charging(ctx, "1"), wireURL, `{}`))
				if second == nil {
					readAll(t, resp)
				}
			}
		})
		c = idem.NewClient(tr)
		resp, err := c.Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.NoError(t, second)
	})
}

func TestSlowJournalFailedDoesNotStopTheRenewals(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := &journal.Memory{Lease: 3 * time.Second}
		w := watch(m)
		n := 0
		w.trouble = func(name string, _ journal.Operation) error {
			if name == "Renew" {
				if n++; n == 1 {
					return errDisk
				}
			}
			return nil
		}
		wr := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			time.Sleep(10 * time.Second)
			return answer(req, 201, jsonType(), `{"id":"pay_1"}`), nil
		}}
		tr := onWire(wr, remembering(w), func(tr *idem.Transport) {
			tr.Hooks.JournalFailed = func(context.Context, journal.Operation, error) {
				time.Sleep(5 * time.Second)
			}
		})
		go func() {
			time.Sleep(6 * time.Second)
			e := entryOf(t, m, "1")
			if !e.Claimed(time.Now()) {
				t.Errorf("the claim has ended %v ago although the store works again", time.Since(e.Lease))
			}
		}()
		resp, err := idem.NewClient(tr).Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		readAll(t, resp)
	})
}
