package webhook_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

func message(id string) webhook.Event { return webhook.Event{Source: "orders", ID: id} }

func TestOnceSaysWhatBecameOfTheMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, j := t.Context(), &journal.Memory{}
		runs := 0
		ok := func(context.Context) error { runs++; return nil }
		r, err := webhook.Once(ctx, j, message("1"), ok)
		require.NoError(t, err)
		require.Equal(t, webhook.Ran, r)
		r, err = webhook.Once(ctx, j, message("1"), ok)
		require.NoError(t, err)
		require.Equal(t, webhook.AlreadyDone, r)
		require.Equal(t, 1, runs)

		r, err = webhook.Once(ctx, j, message("2"), func(context.Context) error { return errDisk })
		require.Equal(t, errDisk, err, "what the function returned, as it is")
		require.Equal(t, webhook.Failed, r)
		r, err = webhook.Once(ctx, j, message("2"), func(ctx context.Context) error {
			e, found := webhook.EntryOf(ctx)
			require.True(t, found)
			require.Equal(t, journal.Operation{Scope: "orders", Name: "webhook", ID: "2"}, e.Operation)

			r, err := webhook.Once(ctx, j, message("2"), ok)
			require.Equal(t, webhook.InProgress, r)
			require.ErrorIs(t, err, webhook.ErrInProgress)
			var typed *webhook.Error
			require.ErrorAs(t, err, &typed)
			require.Equal(t, "orders", typed.Source)
			require.Equal(t, "2", typed.ID)
			require.True(t, typed.Again.Equal(e.Lease), "%v", typed.Again)
			require.ErrorContains(t, err, "come again at")
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, webhook.Ran, r)

		broken := &failing{Journal: j, begin: func() error { return errDisk }}
		r, err = webhook.Once(ctx, broken, message("3"), ok)
		require.Equal(t, webhook.Unavailable, r)
		require.ErrorIs(t, err, webhook.ErrJournal)
		require.ErrorIs(t, err, errDisk)

		broken = &failing{Journal: j, finish: func() error { return errDisk }}
		r, err = webhook.Once(ctx, broken, message("3"), ok)
		require.Equal(t, webhook.Unmarked, r)
		require.ErrorIs(t, err, webhook.ErrUnmarked)
		require.ErrorIs(t, err, errDisk)

		broken = &failing{Journal: j, release: func() error { return journal.ErrLatched }}
		r, err = webhook.Once(ctx, broken, message("4"), func(context.Context) error { return errDisk })
		require.Equal(t, webhook.Failed, r)
		require.ErrorIs(t, err, errDisk)
		require.ErrorIs(t, err, journal.ErrLatched)

		gone, cancel := context.WithCancelCause(ctx)
		cancel(errDisk)
		r, err = webhook.Once(gone, j, message("5"), ok)
		require.Equal(t, webhook.Unavailable, r)
		require.Equal(t, errDisk, err)
		require.Equal(t, 2, runs)
	})
}

func TestOnceMarksWhatWasDoneThoughItsContextEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal.Memory{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r, err := webhook.Once(ctx, j, message("1"), func(ctx context.Context) error {
			<-ctx.Done()
			return nil // it was done, at the last moment
		})
		require.NoError(t, err)
		require.Equal(t, webhook.Ran, r)
	})
}

func TestOnceDoesNotHoldAMessageForAFunctionThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal.Memory{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		hang := make(chan struct{})
		over := make(chan error, 1)
		go func() {
			_, err := webhook.Once(ctx, j, message("1"), func(context.Context) error { <-hang; return nil })
			over <- err
		}()
		time.Sleep(time.Minute)
		r, _ := webhook.Once(t.Context(), j, message("1"), func(context.Context) error { return nil })
		require.Equal(t, webhook.InProgress, r)
		time.Sleep(31 * time.Second)
		r, err := webhook.Once(t.Context(), j, message("1"), func(context.Context) error { return nil })
		require.NoError(t, err)
		require.Equal(t, webhook.Ran, r)
		close(hang)
		require.ErrorIs(t, <-over, journal.ErrClaimLost)
	})
}

func TestAFunctionThatPanicsOrEndsItsGoroutineReleasesTheMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal.Memory{}
		require.PanicsWithValue(t, "boom", func() {
			_, _ = webhook.Once(t.Context(), j, message("1"), func(context.Context) error { panic("boom") })
		})
		over := make(chan struct{})
		go func() {
			defer close(over)
			_, _ = webhook.Once(t.Context(), j, message("1"), func(context.Context) error { runtime.Goexit(); return nil })
		}()
		<-over
		r, err := webhook.Once(t.Context(), j, message("1"), func(context.Context) error { return nil })
		require.NoError(t, err)
		require.Equal(t, webhook.Ran, r)
	})
}

func TestOnceNamesWhatCannotBeKept(t *testing.T) {
	j := &journal.Memory{}
	ok := func(context.Context) error { return nil }
	for _, c := range []struct {
		e    webhook.Event
		want error
		text string
	}{
		{webhook.Event{ID: "1"}, webhook.ErrInvalid, "Event.Source has 0 bytes; it must have 1 to 255"},
		{webhook.Event{Source: strings.Repeat("x", 256), ID: "1"}, webhook.ErrInvalid, "256 bytes"},
		{webhook.Event{Source: "orders"}, webhook.ErrID, "0 bytes; it must have 1 to 255"},
		{webhook.Event{Source: "orders", ID: "1", Window: -1}, webhook.ErrInvalid, "Event.Window is -1ns; it must not be negative; 0 means 96h0m0s"},
	} {
		r, err := webhook.Once(t.Context(), j, c.e, ok)
		require.Equal(t, webhook.Rejected, r)
		require.ErrorIs(t, err, c.want)
		require.ErrorContains(t, err, c.text)
	}
	_, err := webhook.Once(t.Context(), nil, message("1"), ok)
	require.ErrorIs(t, err, webhook.ErrInvalid)
	_, err = webhook.Once(t.Context(), j, message("1"), nil)
	require.ErrorIs(t, err, webhook.ErrInvalid)
}

func TestOnceForgetsAMessageAfterItsWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal.Memory{}
		e := message("1")
		e.Window = 14 * 24 * time.Hour
		once := func() webhook.Result {
			r, err := webhook.Once(t.Context(), j, e, func(context.Context) error { return nil })
			require.NoError(t, err)
			return r
		}
		require.Equal(t, webhook.Ran, once())
		time.Sleep(e.Window - time.Second)
		require.Equal(t, webhook.AlreadyDone, once())
		time.Sleep(time.Second)
		require.Equal(t, webhook.Ran, once())
	})
}

func TestResultsSayWhatTheyAre(t *testing.T) {
	var all []string
	for r := webhook.Rejected; r <= webhook.Unavailable; r++ {
		all = append(all, r.String())
	}
	require.Equal(t, []string{"rejected", "ran", "already done", "in progress", "failed", "unmarked", "unavailable"}, all)
	require.Equal(t, "result 99", webhook.Result(99).String())
	e := &webhook.Error{Reason: webhook.ErrUnmarked, Source: "shop", ID: "msg_1", Cause: errDisk}
	require.Equal(t, `webhook: event was handled but not marked: "msg_1" of "shop": the disk is on fire`, e.Error())
	require.False(t, errors.Is(&webhook.Error{Reason: webhook.ErrUnmarked}, errDisk))
}
