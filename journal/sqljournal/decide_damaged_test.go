package sqljournal_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
)

// flips are damages of a row, a column each.
var flips = map[string]any{
	"key": "another key", "fence": int64(1) << 62, "generation": int64(-1) << 62, "attempts": 5, "first_send": 0, "clear": 1, "enlisted": 9,
	"owner": "me", "lease": int64(1) << 60, "status": 200, "reference": "r", "mac": []byte("mac"), "fingerprint": nil, "request": []byte("body"),
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
			j := open(t, file, sqljournal.Options{})
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
				e, err := j.DecideDamaged(t.Context(), payment(id).Operation, d)
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
	j := open(t, fresh(t), sqljournal.Options{})
	d := journal.Decision{State: journal.Done, Reason: "seen"}
	_, err := j.DecideDamaged(t.Context(), payment("1").Operation, d)
	require.ErrorIs(t, err, journal.ErrNotFound)
	before, err := j.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	_, err = j.DecideDamaged(t.Context(), payment("1").Operation, d)
	require.ErrorIs(t, err, journal.ErrInvalid)
	_, err = j.Renew(t.Context(), before, journal.Note{})
	require.NoError(t, err, "and its owner keeps it")

	spoil(t, j, "1", "attempts", 7)
	for _, d := range []journal.Decision{
		{Reason: "seen"}, {State: journal.Done}, {State: journal.Done, Abandon: true, Reason: "seen"}, {State: journal.Done, Reason: strings.Repeat("r", 1001)},
	} {
		_, err = j.DecideDamaged(t.Context(), payment("1").Operation, d)
		require.ErrorIs(t, err, journal.ErrInvalid)
		_, err = j.Get(t.Context(), payment("1").Operation)
		require.ErrorIs(t, err, journal.ErrDamaged, "it stays as it is")
	}
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
