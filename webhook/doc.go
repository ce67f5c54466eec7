// Package webhook runs a handler once for each event, whatever comes in
// between: senders of webhooks deliver at least once, again after a lost
// answer, several at the same time, and for days.
//
//	http.Handle("POST /hooks/shop", &webhook.Handler{
//		Journal: j,                // journal.Memory, or sqljournal: it outlives a restart and is shared by replicas
//		Source:  "shop",           // ids are unique for each sender only
//		Verify:  verify,           // signature.StandardWebhooks, signature.Stripe, or your own
//		Next:    http.HandlerFunc(ship),
//	})
//
// A delivery is read (within a limit), verified, claimed by source and event id,
// handled, and marked:
//
//	delivery                            answer              Next
//	not a POST                          405                 not run
//	too large                           413                 not run
//	its body was read before            500                 not run
//	no or a wrong signature             401                 not run
//	signed too long ago, or ahead       400                 not run
//	no usable id                        400                 not run
//	of an event that is done            200                 not run
//	of one that is being handled        503, Retry-After    not run
//	the journal fails                   503, Retry-After    not run
//	Next answers 2xx, event marked      that answer         run
//	Next answers 2xx, mark lost         503, Retry-After    run
//	Next answers anything else          that answer         run, claim released
//	Next panics                         none, panic goes on run, claim released
//
// What is verified are the bytes as they came: nothing before the Handler may read or
// change the body. A middleware that logs, parses or unpacks bodies belongs behind it.
// Where fewer bytes are left than Content-Length says, the answer is 500 and Done hears
// why; of a body that was changed, or came without that header, the signature is wrong.
//
// Nothing is stored of a delivery before it is verified. Every answer but those of Next
// is a problem document (RFC 9457) with a reason in one word, and repeats nothing of the
// delivery. It is 503 and not 409 for an event that is being handled because
// some senders give up at a 4xx.
//
// A delivery with the id of a known event is that event, also when its bytes
// differ, as senders that write the time of the attempt into the body make them do;
// [Delivery].Differs tells.
//
// # The claim
//
// It is a lease in the journal, renewed while Next runs, so that an event whose
// process died is handled by the next delivery after the lease (30 s by
// default). Next runs under a context that goes on when the sender hangs up: a
// handler that is broken off half-way helps nobody, and the next delivery finds
// the event done. It ends after [Handler].Timeout, or when the claim is lost, with a
// [context.Cause] that matches journal.ErrClaimLost.
//
// What a process does between losing its claim and seeing the context end,
// or between its effect and the mark, another one may do again: like every
// receiver, that is at least once. Where the effect is in the database of the
// journal, it is once: finish the entry in the transaction of the effect, and answer 2xx
// only when that is committed.
//
//	func (s *shop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
//		if err := s.ship(r); err != nil {
//			http.Error(w, "not shipped", http.StatusInternalServerError) // it comes again
//			return
//		}
//		w.WriteHeader(http.StatusOK)
//	}
//
//	func (s *shop) ship(r *http.Request) error {
//		ctx := r.Context()
//		entry, ok := webhook.EntryOf(ctx)
//		if !ok {
//			return errors.New("shop: not called by a webhook.Handler")
//		}
//		number, err := s.carrier.Book(ctx, entry.ID) // whatever takes its time: before BeginTx
//		if err != nil {
//			return err
//		}
//		tx, err := s.journal.DB().BeginTx(ctx, nil)
//		if err != nil {
//			return err
//		}
//		defer tx.Rollback() // after the commit it does nothing
//		if _, err := tx.ExecContext(ctx, "INSERT INTO shipments (event, number) VALUES (?, ?)", entry.ID, number); err != nil {
//			return err
//		}
//		if _, err := s.journal.FinishTx(ctx, tx, entry, journal.Done, journal.Note{}); err != nil {
//			return err
//		}
//		return tx.Commit()
//	}
//
// SQLite has one writer. From BeginTx to the end of such a transaction no other event can
// be claimed (it is answered 503 after the journal's BusyTimeout), and the claim of this
// one cannot be renewed: past the lease the context of Next ends, and with it the
// transaction. So keep it short, and call nobody in it. What is called before it, a
// carrier for example, may be called again for the same event: give it the id as its
// idempotency key.
//
// To end a process, call Shutdown of the http.Server, and when it has returned, Close of
// the journal: a Handler whose journal was closed cannot mark what it has done.
//
// # A damaged event
//
// An event whose entry in the journal is damaged is answered 503 each time, and the
// error that Done hears matches journal.ErrDamaged. Look whether it was handled in
// your own tables. With sqljournal then call DecideDamaged for the operation
// {Scope: Source, Name: "webhook", ID: the event's id}, which the *RowError has:
// journal.Done, it was handled; journal.Refused, the next delivery is handled.
//
// # The window
//
// An event is remembered for [Handler].Window after its first delivery, then it is
// forgotten without a trace and would be handled anew. 4 days are enough for the
// schedule of Standard Webhooks, whose tenth attempt is 75 h 35 min after the first
// (Stripe: 3 days); for a sender whose operators deliver again by hand after weeks, take
// weeks: choose it longer than anything comes again. A Handler refuses one below 10
// minutes. A claim outlives the window: an event
// that is being handled is forgotten when its handler has ended, or its lease. Sweep of
// the journal deletes what is forgotten; call it from time to time. journal.Memory holds
// 1,048,576 events, never evicts one before its time, and refuses further ones with 503.
package webhook
