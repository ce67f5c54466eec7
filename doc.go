// Package idem makes HTTP calls to payment and booking APIs safe to repeat.
//
// A client that times out cannot know whether the server never got the
// request or did the work and lost the answer. A [Transport] gives each
// operation one idempotency key and keeps it through retries, redirects and
// repeated calls; it waits with jittered backoff, understands "still in
// progress" (409) and "key reused for another request" (422), and always says
// what is known about the effect. The promise: at most one effect for each
// operation, and never a wrong claim about it, at servers that de-duplicate
// by key and within the time that they remember one. Not promised: delivery,
// or anything at servers that ignore keys; say [NoKeys] for those.
//
// # Two doors
//
// Any code that takes an http.Client, vendor SDKs included:
//
//	client := &http.Client{Transport: &idem.Transport{}}
//
// Typed errors:
//
//	client := idem.NewClient(&idem.Transport{Dialect: idem.Stripe})
//
// # Whose key
//
// The first that applies: a redirect goes on with its operation; an
// [Operation] in the context ([WithOperation]); a key in the context
// ([WithKey]); the key header that the request brought; otherwise a fresh
// UUIDv4. POST and PATCH get a key. A call that may be repeated later, by a
// worker or after a crash, should name its Operation: a fresh key dies with the
// call, unless it is taken out of the [Error] and given to WithKey.
//
// With [Transport.Journal] the key of a named operation is durable before the
// first byte is sent: after a crash the same operation goes on with the same
// key, and [Client.Resume] finishes what was left behind.
//
// # What you get back
//
// A response, or an [*Error]. [OutcomeOf] tells [Executed], [Refused],
// [NotExecuted] or [Unknown]; [ReportOf] and [WithReport] tell everything else.
// Unknown means: keep the key, and call again with the same operation, or look
// it up.
//
// # Words
//
// An operation is what the user wants done once. An attempt is one call of the
// base RoundTripper, counted from 1; a send is one request on the wire; a
// retry is an attempt after the first. An effect is what really happened at the
// server; the outcome is what the client knows about it. In progress: the
// server still works on the key. Replay: it returns the stored result. The
// journal remembers operations across processes, in one entry each; who works
// on an entry holds a claim for the time of a lease, and the fence counts claims.
//
// # Classification
//
// What follows an attempt of a keyed operation, unless Policy.Classify
// overrules:
//
//	name not found, bad certificate, scheme or header, the body's own error   stop
//	dial, temporary name error, TLS stall                                     retry
//	reset, EOF, timeout, protocol error, an answer cut in its body            retry
//	408, 421, 425, 429, 500, 502, 503, 504                                    retry
//	417 to an Expect                                                          once more without it
//	401, with Transport.Prepare                                               once more, prepared again
//	409 with Retry-After, the dialect's in-progress mark                      wait, ErrInProgress at the end
//	the dialect's already-done mark, key sent before                          stop: executed, ErrAlreadyDone
//	the dialect's mismatch mark                                               stop: ErrKeyReused
//	other 409 and 4xx, 501, 505, 511                                          stop
//	a replayed 5xx                                                            stop: it will not change
//	the dialect's retry hint                                                  obeyed, below the marks
//
// GET, HEAD, OPTIONS, TRACE, PUT and DELETE are repeated without a key by the
// same table. Any other request without a key is repeated only when it is
// proved that nothing reached the server.
package idem
