package signature_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/journal/sqljournal"
	"github.com/idem-go/idem/webhook"
)

// deliver hands a genuine delivery to h.
func deliver(t testing.TB, h http.Handler, id, body string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/hooks", strings.NewReader(body))
	for name, values := range signed(t, fakeserver.StandardWebhooks, id, time.Now(), body, secretOne) {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestC77_AnEventIsKnownForTheWholeWindowAlsoAfterARestart(t *testing.T) {
	folder := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		start := func() (*webhook.Handler, *sqljournal.Journal) {
			j := open(t, folder, sqljournal.Options{})
			return &webhook.Handler{
				Journal: j, Source: "shop", Window: 72 * time.Hour, Verify: standard(t, secretOne),
				Next: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runs++ }),
			}, j
		}
		h, j := start()
		require.Equal(t, http.StatusOK, deliver(t, h, "msg_1", "{}").Code)
		require.NoError(t, j.Close())
		time.Sleep(71 * time.Hour)
		h, j = start()
		require.Equal(t, http.StatusOK, deliver(t, h, "msg_1", "{}").Code)
		require.Equal(t, 1, runs)
		require.NoError(t, j.Close())
		time.Sleep(2 * time.Hour)
		h, j = start()
		require.Equal(t, http.StatusOK, deliver(t, h, "msg_1", "{}").Code)
		require.Equal(t, 2, runs, "after the window it is a new event")
		require.Equal(t, http.StatusOK, deliver(t, h, "msg_2", "{}").Code)
		time.Sleep(73 * time.Hour)
		swept, err := j.Sweep(t.Context(), 0)
		require.NoError(t, err)
		require.Equal(t, journal.Swept{Deleted: 2}, swept, "no tombstone stays")
		require.NoError(t, j.Close())
	})
}

// Every fault that the fake server has for deliveries, in both schemes, with
// the published libraries: the table of package fakeserver.
func TestEveryFaultOfADeliveryInBothSchemesOverSQLite(t *testing.T) {
	table := map[fakeserver.DeliveryKind]struct {
		answers []int
		acts    int
	}{
		fakeserver.Replayed:  {[]int{200, 400}, 1},
		fakeserver.OtherBody: {[]int{200, 200}, 1}, fakeserver.OtherID: {[]int{200, 200}, 2},
		fakeserver.Reordered: {[]int{200}, 1}, fakeserver.Delayed: {[]int{400, 200}, 1},
		fakeserver.OldTimestamp: {[]int{400, 200}, 1}, fakeserver.FutureTimestamp: {[]int{400, 200}, 1},
		fakeserver.Forged: {[]int{401, 200}, 1}, fakeserver.Unsigned: {[]int{401, 200}, 1},
		fakeserver.Reencoded: {[]int{401, 200}, 1}, fakeserver.LostAnswer: {[]int{200, 200}, 1},
		fakeserver.Huge: {[]int{413, 200}, 1},
	}
	for scheme, sc := range schemes {
		for kind, want := range table {
			t.Run(fmt.Sprintf("%s %s", scheme, kind), func(t *testing.T) {
				folder := t.TempDir()
				synctest.Test(t, func(t *testing.T) {
					s := fakeserver.NewInMemory()
					defer s.Close()
					j := open(t, folder, sqljournal.Options{})
					defer func() { require.NoError(t, j.Close()) }()
					acts := 0
					require.NoError(t, s.Register(fakeserver.Endpoint{
						Scheme: scheme, Secrets: []string{secretTwo, secretOne},
						Handler: &webhook.Handler{
							Journal: j, Source: "shop", Verify: sc.verify(t, secretOne),
							Next: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { acts++ }),
						},
					}))
					f := fakeserver.DeliveryFault{Kind: kind}
					if kind == fakeserver.OtherBody || kind == fakeserver.OtherID {
						f.Delay = time.Second
					}
					require.NoError(t, s.ScriptDeliveries("order-1", f))
					pay(t, s, "order-1")
					require.NoError(t, s.AwaitEvents(t.Context()))
					var got []int
					for _, d := range s.Deliveries() {
						got = append(got, d.Status)
					}
					require.Equal(t, want.answers, got)
					require.Equal(t, want.acts, acts)
				})
			})
		}
	}
}

// inbox is a shop that ships within the transaction that marks the event.
type inbox struct {
	j      *sqljournal.Journal
	middle func(r *http.Request) // between the shipment and the commit; nil: nothing
	after  func()                // between the commit and the answer; nil: nothing
}

func (b *inbox) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := b.ship(r); err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	if b.after != nil {
		b.after()
	}
	w.WriteHeader(http.StatusAccepted)
}

func (b *inbox) ship(r *http.Request) error {
	entry, ok := webhook.EntryOf(r.Context())
	if !ok {
		return errors.New("no entry")
	}
	if b.middle != nil {
		b.middle(r)
	}
	ctx := r.Context() // which the middle may have changed
	tx, err := b.j.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	if _, err := tx.ExecContext(ctx, "INSERT INTO shipments (event) VALUES (?)", entry.ID); err != nil {
		return err
	}
	if _, err := b.j.FinishTx(ctx, tx, entry, journal.Done, journal.Note{}); err != nil {
		return err
	}
	return tx.Commit()
}

func newInbox(t *testing.T, folder string, lease time.Duration) (*inbox, *webhook.Handler) {
	t.Helper()
	j := open(t, folder, sqljournal.Options{Lease: lease})
	_, err := j.DB().ExecContext(t.Context(), "CREATE TABLE IF NOT EXISTS shipments (event TEXT NOT NULL)")
	require.NoError(t, err)
	b := &inbox{j: j}
	return b, &webhook.Handler{Journal: j, Source: "shop", Verify: standard(t, secretOne), Next: b}
}

func shipments(t *testing.T, j *sqljournal.Journal, event string) (n int) {
	t.Helper()
	require.NoError(t, j.DB().QueryRowContext(t.Context(), "SELECT count(*) FROM shipments WHERE event = ?", event).Scan(&n))
	return n
}

func TestTheMarkAndTheEffectAreCommittedTogether(t *testing.T) {
	b, h := newInbox(t, t.TempDir(), time.Minute)
	defer func() { require.NoError(t, b.j.Close()) }()

	w := deliver(t, h, "msg_1", "{}")
	require.Equal(t, http.StatusAccepted, w.Code, "the Finish after FinishTx changes nothing")
	require.Equal(t, 1, shipments(t, b.j, "msg_1"))
	require.Equal(t, http.StatusOK, deliver(t, h, "msg_1", "{}").Code)
	require.Equal(t, 1, shipments(t, b.j, "msg_1"))

	b.after = func() { panic(http.ErrAbortHandler) }
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { deliver(t, h, "msg_2", "{}") })
	b.after = nil
	require.Equal(t, http.StatusOK, deliver(t, h, "msg_2", "{}").Code, "what was committed is done")
	require.Equal(t, 1, shipments(t, b.j, "msg_2"))

	b.middle = func(*http.Request) { panic(http.ErrAbortHandler) }
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { deliver(t, h, "msg_3", "{}") })
	b.middle = nil
	require.Equal(t, 0, shipments(t, b.j, "msg_3"))
	require.Equal(t, http.StatusAccepted, deliver(t, h, "msg_3", "{}").Code)
	require.Equal(t, 1, shipments(t, b.j, "msg_3"))

	once := func() (webhook.Result, error) {
		return webhook.Once(t.Context(), b.j, webhook.Event{Source: "queue", ID: "m1"}, func(ctx context.Context) error {
			r := httptest.NewRequest(http.MethodPost, "/", nil).WithContext(ctx)
			return b.ship(r)
		})
	}
	r, err := once()
	require.NoError(t, err)
	require.Equal(t, webhook.Ran, r)
	r, err = once()
	require.NoError(t, err)
	require.Equal(t, webhook.AlreadyDone, r)
	require.Equal(t, 1, shipments(t, b.j, "m1"))
}

// What the package comment of webhook warns of.
func TestATransactionThatStaysOpenStopsOtherEventsAndItsOwnRenewal(t *testing.T) {
	folder := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		j := open(t, folder, sqljournal.Options{BusyTimeout: 20 * time.Millisecond})
		defer func() { require.NoError(t, j.Close()) }()
		other := &webhook.Handler{Journal: j, Source: "shop", Verify: standard(t, secretOne), Next: http.NotFoundHandler()}
		slow := *other
		var finish error
		slow.Next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx := r.Context()
			tx, err := j.DB().BeginTx(ctx, nil)
			require.NoError(t, err)
			defer func() { _ = tx.Rollback() }() // the end of ctx does it too
			require.Equal(t, http.StatusServiceUnavailable, deliver(t, other, "msg_2", "{}").Code)
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), journal.ErrClaimLost)
			entry, ok := webhook.EntryOf(ctx)
			require.True(t, ok)
			_, finish = j.FinishTx(ctx, tx, entry, journal.Done, journal.Note{})
			http.Error(w, "too late", http.StatusInternalServerError)
		})
		require.Equal(t, http.StatusInternalServerError, deliver(t, &slow, "msg_1", "{}").Code)
		require.Error(t, finish)
		synctest.Wait() // the end of ctx rolls back beside everything else
		require.Equal(t, http.StatusNotFound, deliver(t, other, "msg_1", "{}").Code, "it can be handled again")
		require.Equal(t, http.StatusNotFound, deliver(t, other, "msg_2", "{}").Code)
	})
}

// What FinishTx says of an entry that is no claim of its journal.
func TestAnEntryOfNoClaimIsRefusedByFinishTx(t *testing.T) {
	b, h := newInbox(t, t.TempDir(), time.Minute)
	defer func() { require.NoError(t, b.j.Close()) }()
	strange, strangeHandler := newInbox(t, t.TempDir(), time.Minute)
	defer func() { require.NoError(t, strange.j.Close()) }()
	finish := func(e journal.Entry) error {
		tx, err := b.j.DB().BeginTx(t.Context(), nil)
		require.NoError(t, err)
		defer func() { _ = tx.Rollback() }() // nothing was written
		_, err = b.j.FinishTx(t.Context(), tx, e, journal.Done, journal.Note{})
		return err
	}
	none, ok := webhook.EntryOf(t.Context())
	require.False(t, ok)
	require.ErrorIs(t, finish(none), journal.ErrClaimLost)
	strange.middle = func(r *http.Request) {
		e, ok := webhook.EntryOf(r.Context())
		require.True(t, ok)
		require.ErrorIs(t, finish(e), journal.ErrClaimLost)
	}
	require.Equal(t, http.StatusAccepted, deliver(t, strangeHandler, "msg_1", "{}").Code)
	require.Equal(t, http.StatusAccepted, deliver(t, h, "msg_1", "{}").Code)
}

// A handler that was stopped beyond its lease, with a claim that somebody
// else has by now, cannot commit: its effect is rolled back.
func TestALateOwnerCannotCommitItsEffect(t *testing.T) {
	folder := t.TempDir()
	late, lateHandler := newInbox(t, folder, 200*time.Millisecond) // the end of the lease is waited for
	defer func() { require.NoError(t, late.j.Close()) }()
	other, handler := newInbox(t, folder, time.Minute) // another process, for all that SQLite knows
	defer func() { require.NoError(t, other.j.Close()) }()

	lateHandler.Journal = stopped{late.j} // a process that is stopped renews nothing
	late.middle = func(r *http.Request) {
		<-r.Context().Done() // the lease has ended
		require.ErrorIs(t, context.Cause(r.Context()), journal.ErrClaimLost)
		require.Equal(t, http.StatusAccepted, deliver(t, handler, "msg_1", "{}").Code)
		*r = *r.WithContext(context.WithoutCancel(r.Context())) // and this one takes no notice
	}
	require.Equal(t, http.StatusInternalServerError, deliver(t, lateHandler, "msg_1", "{}").Code)
	require.Equal(t, 1, shipments(t, other.j, "msg_1"))
}

type stopped struct{ journal.Journal }

func (stopped) Renew(context.Context, journal.Entry, journal.Note) (journal.Entry, error) {
	return journal.Entry{}, io.ErrUnexpectedEOF
}

// drowsy is the journal of a process that sleeps now and then, and renews nothing meanwhile.
type drowsy struct {
	journal.Journal
	asleep atomic.Int32 // so many of its handlers sleep
}

func (d *drowsy) sleep(t time.Duration) {
	d.asleep.Add(1)
	defer d.asleep.Add(-1)
	time.Sleep(t)
}

func (d *drowsy) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	if d.asleep.Load() > 0 {
		return journal.Entry{}, io.ErrUnexpectedEOF
	}
	return d.Journal.Renew(ctx, e, n)
}

// Deliveries, 3 of 10 of them duplicates, to 4 replicas that share a file. They
// fail, panic before and after the commit, and fall asleep beyond their lease.
func TestAStormOverSQLiteCommitsEachEffectOnce(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = time.Now().UnixNano()
	}
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(uint64(seed), 0))
	var mu sync.Mutex // guards random and counts
	counts := map[string]int{}
	chance := func(what string, perMille int) bool {
		mu.Lock()
		defer mu.Unlock()
		hit := random.IntN(1000) < perMille
		if hit {
			counts[what]++
		}
		return hit
	}
	folder := t.TempDir()
	const lease = time.Second // renewed, so that a slow disk alone loses no claim
	var handlers []*webhook.Handler
	var boxes []*inbox
	var send func(id string) (status int)
	var takers sync.WaitGroup
	for range 4 {
		b, h := newInbox(t, folder, lease)
		defer func() { require.NoError(t, b.j.Close()) }()
		j := &drowsy{Journal: b.j} // who sleeps renews nothing, as if the whole process was stopped
		h.Journal = j
		b.middle = func(r *http.Request) {
			switch {
			case chance("panicked before the commit", 30):
				panic(http.ErrAbortHandler)
			case chance("slept", 5):
				e, _ := webhook.EntryOf(r.Context())
				takers.Go(func() { // so that somebody takes it over meanwhile
					time.Sleep(3 * lease / 2)
					send(e.ID)
				})
				j.sleep(2 * lease)                                      // beyond its lease; in real time, as four connections wait for each other's locks
				*r = *r.WithContext(context.WithoutCancel(r.Context())) // takes no notice
			}
		}
		b.after = func() {
			if chance("panicked after the commit", 30) {
				panic(http.ErrAbortHandler)
			}
		}
		boxes, handlers = append(boxes, b), append(handlers, h)
	}
	send = func(id string) (status int) {
		defer func() {
			if recover() != nil {
				status = 0
			}
		}()
		mu.Lock()
		h := handlers[random.IntN(len(handlers))]
		counts["deliveries"]++
		mu.Unlock()
		return deliver(t, h, id, "{}").Code
	}
	events := 0
	var workers sync.WaitGroup
	start := time.Now()
	for range 16 {
		workers.Go(func() {
			for {
				mu.Lock()
				if counts["deliveries"] >= *deliveriesFlag {
					mu.Unlock()
					return
				}
				events++
				id := fmt.Sprintf("msg_%d", events)
				mu.Unlock()
				var copies sync.WaitGroup
				for {
					for chance("duplicates", 300) {
						copies.Go(func() { send(id) })
					}
					if status := send(id); status/100 == 2 {
						break
					}
					time.Sleep(30 * time.Millisecond) // an impatient sender: Retry-After would be a second at least
				}
				copies.Wait()
			}
		})
	}
	workers.Wait()
	takers.Wait()
	took := time.Since(start)
	rows, err := boxes[0].j.DB().QueryContext(t.Context(), "SELECT event, count(*) FROM shipments GROUP BY event")
	require.NoError(t, err)
	defer func() { _ = rows.Close() }()
	shipped := 0
	for rows.Next() {
		var id string
		var n int
		require.NoError(t, rows.Scan(&id, &n))
		require.Equal(t, 1, n, id)
		shipped++
	}
	require.NoError(t, rows.Err())
	require.Equal(t, events, shipped)
	t.Logf("%d events, one shipment each, %v in %v", events, counts, took.Round(time.Millisecond))
}
