package journal_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

func TestALateOwnerOfASweptDeliveryDoesNotTouchTheNewOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(journal.Memory)
		late := begin(t, m, event("1", time.Now().Add(time.Minute)))
		time.Sleep(time.Minute) // virtual
		_, err := m.Sweep(t.Context(), 0)
		require.NoError(t, err)
		begin(t, m, event("1", time.Now().Add(time.Hour)))
		_, err = m.Finish(t.Context(), late, journal.Done, journal.Note{})
		require.ErrorIs(t, err, journal.ErrClaimLost)
	})
}

func TestTheDigestOfADeliveryStaysWhenAnotherIsLonger(t *testing.T) {
	in := event("1", noon.Add(time.Hour))
	in.Content = nil
	first, _, _, err := rules.Begin(nil, in, noon)
	require.NoError(t, err)
	other := payment("1")
	stored, returned, _, err := rules.Begin(&first, other, noon.Add(2*time.Minute))
	require.NoError(t, err)
	require.True(t, returned.Differs)
	require.Equal(t, first.Fingerprint, stored.Fingerprint)
}
