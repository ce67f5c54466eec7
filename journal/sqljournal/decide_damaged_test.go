package sqljournal_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
	"github.com/idem-go/idem/webhook"
)

// flips are damages of a row, a column each.
var flips = map[string]any{
	"key": "another key", "fence": int64(1) << 62, "generation": int64(-1) << 62, "attempts": 5, "first_send": 0, "clear": 1, "enlisted": 9,
	"owner": "me", "lease": int64(1) << 60, "status": 200, "reference": "r", "mac": []byte("mac"), "fingerprint": make([]byte, 64), "request": []byte("body"),
	"answer": []byte("body"), "key_window": -1, "finished": 1, "state": 77, "created": 1, "decision": "executed", "expires": 1,
}

func spoil(t *testing.T, j *sqljournal.Journal, id, column string, value any) {
	t.Helper()
	_, err := j.DB().Exec("UPDATE idem_entries SET "+column+" = $1 WHERE id = $2", value, id)
	require.NoError(t, err)
	_, err = j.Get(t.Context(), payment(id).Operation)
	require.ErrorIs(t, err, journal.ErrDamaged)
}

func TestADamagedEntryEndsWithWhatAPersonFoundOut(t *testing.T) {
	t.Parallel()
	for column, value := range flips {
		t.Run(column, func(t *testing.T) {
			file := fresh(t)
			j := open(t, file, sqljournal.Options{Lease: shortestLease})
			owned := map[string]journal.Entry{}
			for _, id := range []string{"executed", "refused", "abandoned", "finished"} {
				e, err := j.Begin(t.Context(), payment(id))
				require.NoError(t, err)
				owned[id] = e
			}
			_, err := j.Finish(t.Context(), owned["finished"], journal.Done, journal.Note{Reference: "pay_1"})
			require.NoError(t, err)
			for id := range owned {
				spoil(t, j, id, column, value)
			}

			for id, d := range map[string]journal.Decision{
				"executed":  {State: journal.Done, Reference: "pay_2", Reason: "seen in the dashboard"},
				"refused":   {State: journal.Refused, Reason: "not in the dashboard"},
				"abandoned": {State: journal.Refused, Abandon: true, Reason: "it was only a test"},
				"finished":  {State: journal.Done, Reason: "seen in the dashboard"},
			} {
				e, err := decideDamaged(t, j, id, d)
				require.NoError(t, err)
				stored, err := j.Get(t.Context(), payment(id).Operation)
				require.NoError(t, err, "it is whole again")
				require.Equal(t, e, stored)
				require.Equal(t, d.State, e.State)
				require.Equal(t, d.Reason, e.Reason)
				require.Nil(t, e.Request)
				require.Nil(t, e.Answer)
				require.True(t, e.Expires.IsZero(), "or it would be forgotten before its time")
				_, err = j.Finish(t.Context(), owned[id], journal.Done, journal.Note{Reference: "late"})
				require.ErrorIs(t, err, journal.ErrClaimLost, "a late owner does not fit")
				_, err = j.DecideDamaged(t.Context(), payment(id).Operation, d)
				require.ErrorIs(t, err, journal.ErrInvalid, "once")
			}
			e, err := j.Begin(t.Context(), payment("executed"))
			require.NoError(t, err)
			require.Equal(t, journal.Done, e.State)
			require.Equal(t, "pay_2", e.Reference)
			for _, id := range []string{"refused", "abandoned"} {
				e, err := j.Begin(t.Context(), payment(id))
				require.NoError(t, err)
				require.Equal(t, journal.Pending, e.State)
				require.Equal(t, "second-"+id, e.Key, "never the first one again")
				require.GreaterOrEqual(t, e.Generation, 2)
				_, err = j.Finish(t.Context(), e, journal.Done, journal.Note{})
				require.NoError(t, err)
			}
			for _, err := range j.Pending(t.Context()) {
				t.Errorf("still pending: %v", err)
			}
			require.NoError(t, j.Close())
			open(t, file, sqljournal.Options{}) // its checks find nothing
		})
	}
}

func TestDecideDamagedIsForDamagedEntriesAndWholeDecisions(t *testing.T) {
	t.Parallel()
	j := open(t, fresh(t), sqljournal.Options{Lease: shortestLease})
	d := journal.Decision{State: journal.Done, Reason: "seen"}
	_, err := j.DecideDamaged(t.Context(), payment("1").Operation, d)
	require.ErrorIs(t, err, journal.ErrNotFound)
	_, err = j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	_, err = j.DecideDamaged(t.Context(), payment("1").Operation, d)
	require.ErrorIs(t, err, journal.ErrInvalid)
	_, err = j.Get(t.Context(), payment("1").Operation)
	require.NoError(t, err, "it is untouched")

	spoil(t, j, "1", "attempts", 7)
	for _, d := range []journal.Decision{
		{Reason: "seen"}, {State: journal.Done}, {State: journal.Done, Abandon: true, Reason: "seen"}, {State: journal.Done, Reason: strings.Repeat("r", 1001)},
		{State: journal.Done, Reference: strings.Repeat("r", 256<<20+1), Reason: "seen"},
	} {
		_, err = decideDamaged(t, j, "1", d)
		require.ErrorIs(t, err, journal.ErrInvalid)
		_, err = j.Get(t.Context(), payment("1").Operation)
		require.ErrorIs(t, err, journal.ErrDamaged, "it stays as it is")
	}
}

// shortestLease that a journal may have.
const shortestLease = 100 * time.Millisecond

// decideDamaged waits until nobody has claimed the entry.
func decideDamaged(t *testing.T, j *sqljournal.Journal, id string, d journal.Decision) (e journal.Entry, err error) {
	t.Helper()
	for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(5 * time.Millisecond) { // a lease ends in real time
		if e, err = j.DecideDamaged(t.Context(), payment(id).Operation, d); !errors.Is(err, journal.ErrClaimed) {
			break
		}
	}
	return e, err
}

// Its owner may be sending: what a person does not see at the provider yet may
// come.
func TestADamagedEntryWhoseOwnerMayBeAliveIsNotDecided(t *testing.T) {
	t.Parallel()
	j := open(t, fresh(t), sqljournal.Options{Lease: journal.LongestLease})
	owned, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	spoil(t, j, "1", "attempts", 7)
	e, err := j.DecideDamaged(t.Context(), payment("1").Operation, journal.Decision{State: journal.Refused, Reason: "not in the dashboard"})
	require.ErrorIs(t, err, journal.ErrClaimed)
	require.Equal(t, journal.Entry{Operation: owned.Operation, Owner: owned.Owner, Lease: owned.Lease}, e)
	_, err = j.Get(t.Context(), payment("1").Operation)
	require.ErrorIs(t, err, journal.ErrDamaged)
}

// Also where a sweep keeps things for a shorter time than the key window, which may be
// what is damaged: the first key must not come back.
func TestADecidedEntryIsNotForgottenWithinTheKeyWindow(t *testing.T) {
	t.Parallel()
	j := open(t, fresh(t), sqljournal.Options{Lease: shortestLease})
	_, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	spoil(t, j, "1", "key_window", 1)
	_, err = decideDamaged(t, j, "1", journal.Decision{State: journal.Refused, Reason: "not in the dashboard"})
	require.NoError(t, err)
	time.Sleep(2 * time.Millisecond) // so that it is older than the sweep keeps it
	s, err := j.Sweep(t.Context(), time.Millisecond)
	require.NoError(t, err)
	require.Zero(t, s)
	e, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	require.Equal(t, "second-1", e.Key)
}

// A sender may write the time of the attempt into the body, so that each delivery
// of the event differs.
func TestADamagedEventIsAcknowledgedAgainOnceAPersonHasDecided(t *testing.T) {
	t.Parallel()
	j := open(t, fresh(t), sqljournal.Options{})
	runs := 0
	h := &webhook.Handler{Journal: j, Source: "shop", Verify: func(http.Header, []byte) (string, error) { return "evt_1", nil },
		Next: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runs++ })}
	deliver := func(body string) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body)))
		return w.Code
	}
	require.Equal(t, http.StatusOK, deliver(`{"sent":"10:00"}`))
	require.Equal(t, http.StatusOK, deliver(`{"sent":"10:01"}`))
	_, err := j.DB().Exec("UPDATE idem_entries SET attempts = 7")
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, deliver(`{"sent":"10:02"}`))
	op := journal.Operation{Scope: "shop", Name: "webhook", ID: "evt_1"}
	_, err = j.DecideDamaged(t.Context(), op, journal.Decision{State: journal.Done, Reason: "it is in our table"})
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, deliver(`{"sent":"10:03"}`))
	require.Equal(t, 1, runs)
}

// What a client says before and after.
func TestAClientIsToldWhatToDoAboutADamagedEntry(t *testing.T) {
	s := fakeserver.New()
	defer s.Close()
	j := open(t, fresh(t), sqljournal.Options{})
	tr := &idem.Transport{Base: s.Transport(), Journal: j, Policy: idem.Policy{KeyWindow: time.Hour}}
	defer tr.CloseIdleConnections()
	c := idem.NewClient(tr)
	op := idem.Operation{Name: "payment", ID: "order-1"}
	call := func() error {
		req, err := http.NewRequestWithContext(idem.WithOperation(t.Context(), op), http.MethodPost, s.URL()+"/v1/payments",
			strings.NewReader(`{"amount":1999,"currency":"eur","reference":"order-1","source":"tok_visa"}`))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		resp, err := c.Do(req)
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
	require.NoError(t, call())
	_, err := j.DB().Exec("UPDATE idem_entries SET attempts = 7")
	require.NoError(t, err)

	err = call()
	require.ErrorIs(t, err, idem.ErrJournal)
	require.ErrorContains(t, err, "DecideDamaged")
	var row *sqljournal.RowError
	require.True(t, errors.As(err, &row))
	require.ErrorIs(t, c.Settle(t.Context(), row.Operation, idem.Executed, "", "seen"), idem.ErrJournal)
	_, err = j.DecideDamaged(t.Context(), row.Operation, journal.Decision{State: journal.Done, Reference: "pay_1", Reason: "seen"})
	require.NoError(t, err)
	err = call()
	require.ErrorIs(t, err, idem.ErrAlreadyDone)
	require.ErrorContains(t, err, "pay_1")
	require.Len(t, s.Sends(), 1)
	require.Len(t, s.Effects(), 1)
}

// Behind a refusal the derived key is not the operation's. An error about a
// damaged entry must not name it: who looks that key up at the provider finds the
// refusal, and decides that nothing was charged.
func TestAnErrorAboutADamagedEntryNamesNoOtherKey(t *testing.T) {
	s := fakeserver.New()
	t.Cleanup(s.Close)
	j := open(t, fresh(t), sqljournal.Options{})
	d := idem.Generic
	d.Refusal, d.KeyWindow = []idem.Mark{{Status: 402}}, 24*time.Hour
	tr := &idem.Transport{Base: s.Transport(), Dialect: d, Journal: j, Policy: idem.Policy{MaxAttempts: 1, Budget: new(idem.Budget)}}
	defer tr.CloseIdleConnections()
	client := idem.NewClient(tr)
	pay := func(source string) (*http.Response, error) {
		ctx := idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "o-1"})
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/payments",
			strings.NewReader(`{"amount":1999,"currency":"usd","reference":"o-1","source":"`+source+`"}`))
		require.NoError(t, err)
		resp, err := client.Do(req)
		if resp != nil {
			require.NoError(t, resp.Body.Close())
		}
		return resp, err
	}
	resp, err := pay("tok_declined")
	require.NoError(t, err)
	refused := idem.ReportOf(resp).Key
	require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect}))
	_, err = pay("tok_visa") // charged under the second key; the answer is lost
	require.Equal(t, idem.Unknown, idem.OutcomeOf(nil, err))
	require.Len(t, s.Effects(), 1)

	_, err = j.DB().ExecContext(t.Context(), `UPDATE idem_entries SET attempts = 9 WHERE id = 'o-1'`)
	require.NoError(t, err)
	_, err = pay("tok_visa")
	require.ErrorIs(t, err, journal.ErrDamaged)
	var e *idem.Error
	require.True(t, errors.As(err, &e))
	require.NotEqual(t, refused, e.Key)
	require.NotContains(t, err.Error(), refused)
	require.NotContains(t, err.Error(), "when the journal works")

	listed := 0
	for p, err := range client.Pending(t.Context()) {
		listed++
		require.ErrorIs(t, err, journal.ErrDamaged)
		require.LessOrEqual(t, p.Left, time.Duration(0), "nothing may be sent under the key of a damaged entry")
	}
	require.Equal(t, 1, listed)
}
