// Package fakeserver is a payment and booking server with real idempotency semantics, made to be broken: it has a ledger
// of what really happened, and faults that strike before or after it happened.
//
//	s := fakeserver.New()
//	defer s.Close()
//	s.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Send: 1})
//	// ... the client under test pays, at s.URL(), through s.Client().Transport ...
//	s.Effects(fakeserver.Filter{Key: "order-1"}) // must be one payment
//	s.Sends(fakeserver.Filter{Key: "order-1"})   // what the client sent for it
//
// [New] listens on a real loopback socket. [NewInMemory] runs the same http.Server over connections in memory; made, used
// and closed inside a testing/synctest bubble, hours of waiting take milliseconds. [NewTLS] and [NewInMemoryTLS] speak
// HTTP/2 and HTTP/1.1 over TLS.
//
// # Routes
//
//	POST   /v1/payments                                {"amount":1999,"currency":"usd","reference":"order-1","source":"tok_visa"}
//	GET    /v1/payments?reference=order-1
//	GET    /v1/payments/{id}
//	PUT    /v1/payments/{id}/status                    {"status":"captured"}, or succeeded, or disputed
//	POST   /v1/payments/{id}/refunds                   {"amount":500,"reference":"r-1"}
//	POST   /v1/hotels/{hotel_id}/reservations          {"room_type":"double","guest":"Ada","reference":"trip-1","nights":2}
//	GET    /v1/hotels/{hotel_id}/reservations?reference=trip-1
//	GET    /v1/hotels/{hotel_id}/reservations/{id}
//	DELETE /v1/hotels/{hotel_id}/reservations/{id}
//	POST   /v1/uploads                                 any body of any size
//
// Amounts are in minor units; [DeclinedAmount] and the source "tok_declined" are declined with 402. A reference is the
// caller's own name for the thing, and optional. Every refusal is an RFC 9457 problem whose type ends in what happened:
// card-declined (402), refund-too-large, sold-out (422), invalid-request (400, with errors naming the fields),
// duplicate-reference (409, of a reservation, and only with [Settings].DuplicateReference), body-too-large (413, above
// 1 MiB), not-found (404), method-not-allowed (405), injected-fault.
//
// [Server.Handle] adds routes of your own provider, behind the same keys, faults and ledger.
//
// # Idempotency
//
// A POST needs a key of 1 to 255 bytes without control characters: idempotency-key-missing, idempotency-key-invalid (400).
// The key belongs to its caller (the Authorization header) and its endpoint (method and path). It is reserved in the same
// locked step as the effect. While the first request with it runs, others get idempotency-key-in-use (409 with
// Retry-After); another query or body gets idempotency-key-reused (422); otherwise the stored answer is replayed with the
// same status, headers and body, and Idempotent-Replay: true. Stored are successes and answers that will not change (402,
// 404 and 422 of an operation); a 400 and a 413 are not, and a failure before the effect frees the key. Once an effect
// began, neither a fault nor a client that leaves can undo it or its stored answer. Keys are forgotten after
// [Settings].Retention; then the same key is a new one. GET, PUT and DELETE take no notice of keys. [Settings] change all
// this: [Like] has those of real providers, [Broken] those of servers that get it wrong.
//
// [Server.AssertOneEffectPerOperation] is the test that a client must pass; [Server.AssertAtMostOneEffectPerOperation] where an
// operation may rightly end without an effect.
//
// # Faults
//
// A send meets at most one [Fault]: the step of a [Server.Script], or else the first match among those of [Server.Inject].
// An answer that a fault spoils may also be a replay: "yes" in the table means that the effect has happened by then,
// now or earlier. Without a point the first one listed for a kind is meant.
//
//	kind            point            effect  the client sees
//	reset           before-effect    no      connection reset; Bytes: while it sends the body
//	                after-effect     yes     connection reset
//	close           before-effect    no      EOF; Bytes: while it sends the body
//	                after-effect     yes     EOF
//	hang            before-effect    no      nothing, until it gives up
//	                after-effect     yes     nothing, until it gives up
//	status          before-effect    no      any status, any Retry-After
//	                after-effect     yes     the same; the true answer is replayed later
//	                during-effect    yes     the same, at once; the effect happens Delay later
//	html            before-effect    no      a gateway's page, 502 or any other status
//	                after-effect     yes     the same, 200 for example
//	                during-effect    yes     the same, at once; the effect happens Delay later
//	redirect        before-effect    no      301, 302, 303, 307, 308
//	                after-effect     yes     303 to the new resource
//	early-answer    before-effect    no      an answer while it still sends the body; then the connection ends
//	slow-read       before-effect    yes     a body that is not taken, no 100 Continue; then the answer
//	stored-failure  after-effect     yes     a 5xx, and the same 5xx replayed for ever
//	                before-effect    no      the same
//	slow            during-effect    yes     an answer after Delay; meanwhile others of the key get 409
//	stuck           during-effect    no      EOF; then 409 until Delay has passed
//	duplicate       before-effect    once    its answer; another copy arrives at the same time
//	                after-effect     once    its answer; another copy arrives later
//	                during-effect    once    the 409 of the copy, while the first still runs for Delay
//	late            after-effect     yes     the answer after Delay
//	                in-body          yes     headers at once, the body after Delay
//	trickle         in-body          yes     a byte of the body every Delay
//	                in-headers       yes     a byte of the whole answer every Delay
//	cut-headers     in-headers       yes     a malformed answer or an unexpected EOF
//	cut-body        in-body          yes     status and headers, then an unexpected EOF
//	garbage         after-effect     yes     a malformed answer
//	                before-effect    no      the same
//	flood           after-effect     yes     103 Early Hints without end
//	                before-effect    no      the same
//	endless         before-effect    no      a status and a body without end
//	                after-effect     yes     the same
//	stale           after-answer     yes     its answer; the next request on the connection dies unheard
//	extra           after-answer     yes     its answer, and a second one that nobody asked for
//	big-headers     after-effect     yes     more headers than it takes
//	                before-effect    no      the same
//	bomb            in-body          yes     its answer, 64 MiB long, in a few KiB of gzip
//	mangled         in-body          yes     a whole answer with half a document in it
//	stream-reset    before-effect    no      RST_STREAM, REFUSED_STREAM for example
//	                after-effect     yes     RST_STREAM
//	go-away         before-effect    no      GOAWAY: its stream was not executed
//	                after-effect     yes     GOAWAY: its stream may have been executed; then EOF
//	freeze          before-effect    no      nothing, until it gives up the connection
//	                after-effect     yes     the same
//
// The last three are for HTTP/2; over HTTP/1 the first two of them close the connection, and freeze hangs. Over HTTP/2,
// reset and close end the whole connection; cut-headers, a stuck worker and a panic end the stream alone, with the code
// INTERNAL_ERROR.
//
// What happens to a connection before any request is not the fault of a send: see [Server.ScriptConns], and [Server.Proxy]
// for a proxy that refuses. [Server.Restart] ends all connections at once. [Mixed] and [Storm] are ready mixes for load
// tests.
//
// # Events
//
// [Server.Register] adds an endpoint, which is told of every effect from then on, at least once: signed, and again on a
// schedule until it answers 2xx. [Server.Deliveries] lists what was sent, [Server.Events] what became of it, both by
// effect, and [Server.AwaitEvents] waits until all have ended.
//
//	effect        event
//	payment       payment.succeeded
//	status        payment.captured, payment.disputed or payment.succeeded
//	refund        refund.succeeded
//	reservation   reservation.confirmed
//	cancellation  reservation.cancelled
//	upload        upload.stored
//	handled       request.handled
//
// The event is made in the same locked step as the effect, so it may arrive before the answer to the client, and a
// [Server.Restart] does not lose it. Its data are thin: what the ledger knows of the effect. With [StandardWebhooks] they are
// the member data, and the id of the event is in the header webhook-id; with [StripeSignature] they are data.object, and the id
// is in the body.
//
//	{"type":"payment.succeeded","timestamp":"2026-01-02T15:04:05.123Z",
//	 "data":{"id":"pay_1","object":"payment","reference":"order-1","amount":1999,"status":"succeeded"}}
//
//	{"id":"evt_1","object":"event","type":"payment.succeeded","created":1767366245,"livemode":false,
//	 "data":{"object":{"id":"pay_1","object":"payment","reference":"order-1","amount":1999,"status":"succeeded"}}}
//
// The id in them is that of the resource. The object is payment (of a status too), refund, reservation (of a cancellation
// too), upload or handled. The reference may be "". An amount of 0 is left out; that of an upload is its bytes. An upload and
// a handled request have no status. Faults may add a note or padding, and [Endpoint].TimeInBody adds attempted_at beside type.
//
// Any other answer than 2xx is a failure, a redirect too; so are no answer within [Endpoint].Timeout and a connection that
// breaks. A Retry-After makes the wait longer, up to a day. With [StandardWebhooks] a 410 ends the endpoint.
//
// An attempt meets at most one [DeliveryFault]: the step of a [Server.ScriptDeliveries], or else the first match among
// those of [Server.InjectDeliveries]. The table says how many deliveries there are if the first attempt meets the fault, what
// an endpoint answers that looks at size, signature and time (5 minutes) and remembers ids, and how often it should act. Of
// an other-source the second is at the other endpoint.
//
//	kind              number, answers, actions
//	twice             2  200 200  1  a copy, at the same time or later, signed at another second
//	replayed          2  200 400  1  the same bytes again, here when they are too old
//	other-body        2  200 200  1  the same id with another body
//	other-id          2  200 200  2  the same event under two ids
//	other-source      2  200 200  2  the same id from another source, for another event
//	reordered         1  200      1  behind a later event
//	delayed           2  400 200  1  signed long before it arrives
//	old-timestamp     2  400 200  1  signed for a time that is too long ago
//	future-timestamp  2  400 200  1  signed for a time to come
//	forged            2  401 200  1  a stranger's, with a wrong secret
//	unsigned          2  401 200  1  a stranger's, without a signature
//	reencoded         2  401 200  1  the same JSON in other bytes
//	lost-answer       2  200 200  1  the answer is reset
//	huge              2  413 200  1  10 MiB
//
// [MixedDeliveries] is a ready mix for load tests.
//
// # What it does not do
//
//   - No packets: no loss, no reordering, no bandwidth. A black hole is a dial that never returns; in memory a reset is an
//     error value and the window is 64 KiB.
//   - The HTTP/2 is that of net/http, with frames changed, added or swallowed: no trailers, no push, no HTTP/3.
//   - No load: an answer does not come later because there are many requests, and nothing is rejected for it.
//   - Nothing survives Close. There is no disk; a restart loses what ran and, if so set, the keys, and nothing else.
//   - Credentials are told apart but never checked, and every caller sees every payment.
//   - Effects are atomic: there is no half-done one, and no rollback.
//   - The JSON routes take no notice of Content-Type, unknown fields, or the key order of a body: two spellings of one
//     object are two payloads.
//   - The status of a payment is a word without rules, and a room is free or not, whatever the date.
//   - Events: no ed25519 signatures (v1a), no jitter in the schedule, no HTTP/2 and no kept connections to endpoints, no
//     choice of event types, no list of events for clients, no api_version. Failures, declines for example, are no events. A
//     slow or failing endpoint is never throttled, and only a 410 ends it. Restart loses no event, and sends none twice by itself.
//   - The network re-delivers only by a duplicate fault, and a request lost to a stale or frozen connection is not among
//     the sends.
//   - The delays of faults and of redeliveries follow time.Now (virtual or real), never [Server.Advance]. The times that
//     are signed follow Advance.
//   - Keys, sends, effects, events and deliveries are kept in memory without a limit; [Settings].ForgetHeaders saves most of it.
package fakeserver
