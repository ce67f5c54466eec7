package idem_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/journal"
)

// declined answers every send with a 402.
func declined(body func() (contentType string, r io.ReadCloser)) *wire {
	return &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
		resp := chunkedAnswer(req, "", nil)
		resp.StatusCode, resp.Status = http.StatusPaymentRequired, "402 Payment Required"
		contentType, r := body()
		resp.Header.Set("Content-Type", contentType)
		resp.Body = r
		return resp, nil
	}}
}

// Nobody reads the page of a refusal to its end, and nothing of it is stored.
func TestStreamedRefusalIsWrittenDownBeforeItsBodyIsRead(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := new(journal.Memory)
		w := declined(func() (string, io.ReadCloser) { return "text/html", io.NopCloser(strings.NewReader("<p>no</p>")) })
		resp, err := onWire(w, remembering(m)).RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, idem.Refused, idem.ReportOf(resp).Outcome)
		require.Equal(t, journal.Refused, entryOf(t, m, "1").State)
	})
}

func TestRefusalThatTheJournalCouldNotNoteIsUnknown(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := watch(new(journal.Memory))
		w.trouble = failing(errDisk, "Finish")
		wr := declined(func() (string, io.ReadCloser) { return "application/json", io.NopCloser(strings.NewReader(`{}`)) })
		resp, err := onWire(wr, remembering(w)).RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		r := idem.ReportOf(resp)
		require.Equal(t, idem.Unknown, r.Outcome, "a resume will send it")
		require.ErrorIs(t, r.Reason, idem.ErrJournal)
	})
}

func TestLogTellsThatTheJournalCouldNotNoteAnExecutedOperation(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := watch(new(journal.Memory))
		w.trouble = failing(errDisk, "Finish")
		var out bytes.Buffer
		tr := onWire(&wire{}, remembering(w), func(tr *idem.Transport) {
			tr.Hooks = idem.SlogHooks(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn})))
		})
		resp, err := tr.RoundTrip(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		readAll(t, resp)
		require.Equal(t, idem.Executed, idem.ReportOf(resp).Outcome)
		require.Contains(t, out.String(), "idem: operation ended")
		require.Contains(t, out.String(), idem.ReportOf(resp).Key, "somebody has to look")
	})
}

func TestDoneIsNotCalledForAnEntryThatWasTakenOver(t *testing.T) {
	virtual(t, func(t *testing.T) {
		w := watch(new(journal.Memory))
		wr := &wire{serve: func(_ int, req *http.Request) (*http.Response, error) {
			return answer(req, http.StatusCreated, jsonType(), `{"id":"pay_1"}`), nil
		}}
		c := idem.NewClient(onWire(wr, remembering(w)))
		enlistRequest(t, c, w, newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		w.trouble = failing(journal.ErrClaimLost, "Renew")
		sum, err := c.Resume(t.Context(), func(ctx context.Context, _ journal.Entry) (*http.Request, error) {
			return newPost(t, ctx, wireURL, `{}`), nil
		}, func(journal.Entry, *http.Response) error {
			t.Error("who took it over tells of it")
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, idem.Resumed{Seen: 1, Skipped: 1}, sum)
	})
}

// While the redirect is followed a person gives the operation up and somebody
// begins it anew: the hop must not go on under the other key.
func TestHopDoesNotGoOnUnderTheKeyOfAnotherGeneration(t *testing.T) {
	virtual(t, func(t *testing.T) {
		m := &journal.Memory{Lease: time.Second}
		w := &wire{serve: func(n int, req *http.Request) (*http.Response, error) {
			h := jsonType()
			h.Set("Location", "/moved")
			return answer(req, http.StatusTemporaryRedirect, h, `{}`), nil
		}}
		tr := onWire(w, remembering(m))
		in, err := idem.NewClient(tr).Intent(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.NoError(t, err)
		c := &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error {
			_, err := m.Decide(context.Background(), chargeOf("1"), journal.Decision{State: journal.Refused, Abandon: true, Reason: "given up"})
			require.NoError(t, err)
			_, err = m.Begin(context.Background(), in) // and dies; the hop waits for the lease
			require.NoError(t, err)
			return nil
		}}
		_, err = c.Do(newPost(t, charging(t.Context(), "1"), wireURL, `{}`))
		require.ErrorIs(t, err, idem.ErrInProgress)
		require.Len(t, w.seen(), 1)
	})
}
