package webhook_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

// setup is what a receiver is made from. There may be several on one journal.
type setup struct {
	journal journal.Journal
	next    http.Handler
	source  string
	verify  webhook.Verifier
}

type build func(setup) http.Handler

func ours(s setup) http.Handler {
	return &webhook.Handler{Journal: s.journal, Next: s.next, Source: s.source, Verify: s.verify, Timeout: time.Hour}
}

// Receivers as people write them, each with one rule broken.
var brokenReceivers = map[string]struct {
	build  build
	lease  time.Duration // of the journal; 0: the default
	caught string        // the finding that it must be caught with
}{
	"check, then act": {build: func(s setup) http.Handler {
		return receive(s, func(w http.ResponseWriter, r *http.Request, id string) {
			e, err := s.journal.Get(r.Context(), operation(s, id))
			if err == nil && e.State == journal.Done {
				return
			}
			s.next.ServeHTTP(w, r)
			remember(r.Context(), s, id)
		})
	}, caught: "was handled"},
	"insert fails, handler runs anyway": {build: func(s setup) http.Handler {
		return receive(s, func(w http.ResponseWriter, r *http.Request, id string) {
			remember(r.Context(), s, id)
			s.next.ServeHTTP(w, r)
		})
	}, caught: "was handled"},
	"mark before process": {build: func(s setup) http.Handler {
		return receive(s, func(w http.ResponseWriter, r *http.Request, id string) {
			if remember(r.Context(), s, id) {
				s.next.ServeHTTP(w, r)
			}
		})
	}, caught: "was lost"},
	"claim without a lease": {build: ours, lease: 1000 * time.Hour, caught: "was lost"},
	"claim that is not renewed": {build: func(s setup) http.Handler {
		s.journal = neverRenewed{s.journal}
		return ours(s)
	}, caught: "was handled"},
	"200 while the first may still fail": {build: func(s setup) http.Handler {
		h := ours(s)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			rec := &recorder{header: http.Header{}}
			h.ServeHTTP(rec, r)
			if rec.status == http.StatusServiceUnavailable {
				rec.status = http.StatusOK
			}
			w.WriteHeader(rec.status)
		})
	}, caught: "was answered with 2xx before it was done"},
	"a late owner marks": {build: func(s setup) http.Handler {
		s.journal = noFence{s.journal}
		return ours(s)
	}, caught: "was answered with 2xx before it was done"},
	"failures count as done": {build: func(s setup) http.Handler {
		next := s.next
		s.next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(&recorder{header: http.Header{}}, r)
		})
		return ours(s)
	}, caught: "was lost"},
	"store before verify": {build: func(s setup) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			id := r.Header.Get("Webhook-Id")
			if !remember(r.Context(), s, id) {
				return
			}
			if _, err := s.verify(r.Header, body); err != nil {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			again(s.next, w, r, body)
		})
	}, caught: "was stored before it was verified"},
	"not verified at all": {build: func(s setup) http.Handler {
		s.verify = func(h http.Header, _ []byte) (string, error) { return h.Get("Webhook-Id"), nil }
		return ours(s)
	}, caught: "was stored before it was verified"},
	"the payload is the identity": {build: func(s setup) http.Handler {
		verify := s.verify
		s.verify = func(h http.Header, body []byte) (string, error) {
			_, err := verify(h, body)
			return fmt.Sprintf("%x", sha256.Sum256(body)), err
		}
		return ours(s)
	}, caught: "was handled"},
	"the id alone is the identity": {build: func(s setup) http.Handler {
		s.source = "everybody"
		return ours(s)
	}, caught: "was lost"},
}

func operation(s setup, id string) journal.Operation {
	return journal.Operation{Scope: s.source, Name: "webhook", ID: id}
}

// remember writes an event down as done and reports whether it was new.
func remember(ctx context.Context, s setup, id string) bool {
	e, err := s.journal.Begin(ctx, journal.Intent{Operation: operation(s, id), Expires: time.Now().Add(webhook.DefaultWindow)})
	if err != nil || e.State == journal.Done {
		return false
	}
	_, err = s.journal.Finish(ctx, e, journal.Done, journal.Note{})
	return err == nil
}

// receive verifies as it should, and lets handle do what it likes.
func receive(s setup, handle func(w http.ResponseWriter, r *http.Request, id string)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		id, err := s.verify(r.Header, body)
		switch {
		case errors.Is(err, webhook.ErrTimestamp):
			w.WriteHeader(http.StatusBadRequest)
		case err != nil:
			w.WriteHeader(http.StatusUnauthorized)
		default:
			again(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handle(w, r, id) }), w, r, body)
		}
	})
}

func again(next http.Handler, w http.ResponseWriter, r *http.Request, body []byte) {
	r = r.WithContext(context.WithoutCancel(r.Context()))
	r.Body = io.NopCloser(bytes.NewReader(body))
	next.ServeHTTP(w, r)
}

type neverRenewed struct{ journal.Journal }

func (neverRenewed) Renew(_ context.Context, e journal.Entry, _ journal.Note) (journal.Entry, error) {
	e.Lease = time.Now().Add(30 * time.Second)
	return e, nil
}

type noFence struct{ journal.Journal }

func (n noFence) Finish(ctx context.Context, e journal.Entry, s journal.State, note journal.Note) (journal.Entry, error) {
	out, err := n.Journal.Finish(ctx, e, s, note)
	if errors.Is(err, journal.ErrClaimLost) {
		return e, nil
	}
	return out, err
}

// process is the journal as one process sees it. A dead one writes nothing any
// more, a sleeping one renews nothing.
type process struct {
	journal.Journal
	mu     sync.Mutex // guards the following
	dead   bool
	asleep int // so many sleep at the same time
}

var errGone = errors.New("the process is gone, or stopped")

func (p *process) die() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
}

func (p *process) sleep(d time.Duration) {
	add := func(n int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.asleep += n
	}
	add(1)
	time.Sleep(d)
	add(-1)
}

func (p *process) gone(renew bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dead || renew && p.asleep > 0
}

func (p *process) Renew(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	if p.gone(true) {
		return journal.Entry{}, errGone
	}
	return p.Journal.Renew(ctx, e, n)
}

func (p *process) Finish(ctx context.Context, e journal.Entry, s journal.State, n journal.Note) (journal.Entry, error) {
	if p.gone(false) {
		return journal.Entry{}, errGone
	}
	return p.Journal.Finish(ctx, e, s, n)
}

func (p *process) Release(ctx context.Context, e journal.Entry, n journal.Note) (journal.Entry, error) {
	if p.gone(false) {
		return journal.Entry{}, errGone
	}
	return p.Journal.Release(ctx, e, n)
}

// scene is one thing that happens to a receiver.
type scene struct {
	name   string
	faults []fakeserver.DeliveryFault // of the attempts for order-1
	edit   func(*fakeserver.Endpoint)
	work   time.Duration
	before func(p *process, run int) (status int) // as shop has it
	copy   time.Duration                          // after which another copy comes; 0: none does
	other  bool                                   // a second source delivers another event under the same id
	wrong  int                                    // so many of the first deliveries are not genuine
	acts   int                                    // how often the event should be handled; 0: once
}

var scenes = []scene{
	{
		name: "50 come at the same time", work: 100 * time.Millisecond,
		faults: []fakeserver.DeliveryFault{{Kind: fakeserver.Twice, Copies: 49}},
	},
	{
		name: "50 come at the same time, and the first one fails", work: 100 * time.Millisecond,
		faults: []fakeserver.DeliveryFault{{Kind: fakeserver.Twice, Copies: 49}},
		before: func(_ *process, run int) int {
			time.Sleep(100 * time.Millisecond) // while the others come
			if run == 1 {
				return http.StatusInternalServerError
			}
			return 0
		},
	},
	{
		name: "the answer is lost", faults: []fakeserver.DeliveryFault{{Kind: fakeserver.LostAnswer}},
		edit: func(e *fakeserver.Endpoint) { e.TimeInBody = true },
	},
	{
		name: "the process dies in the middle",
		before: func(p *process, run int) int {
			if run == 1 {
				p.die()
				panic(http.ErrAbortHandler)
			}
			return 0
		},
	},
	{
		name: "the handler takes longer than the lease, and longer than the sender waits", work: 3 * time.Minute,
	},
	{
		name: "a process sleeps beyond its lease, and the one that takes over fails", copy: 35 * time.Second,
		edit: func(e *fakeserver.Endpoint) { e.Timeout = 10 * time.Minute },
		before: func(p *process, run int) int {
			switch run {
			case 1:
				p.sleep(50 * time.Second)  // as a virtual machine that is moved
				return http.StatusAccepted // what it did was fenced off elsewhere
			case 2:
				time.Sleep(50 * time.Second)
				return http.StatusInternalServerError
			}
			return 0
		},
	},
	{
		name: "strangers come first", wrong: 3,
		faults: []fakeserver.DeliveryFault{{Kind: fakeserver.Unsigned}, {Kind: fakeserver.Forged}, {Kind: fakeserver.OldTimestamp}},
	},
	{
		name: "another sender has the same id", other: true,
		faults: []fakeserver.DeliveryFault{{Kind: fakeserver.OtherSource, To: "travel", Delay: time.Second}},
	},
	{
		name: "two ids are two events", acts: 2,
		faults: []fakeserver.DeliveryFault{{Kind: fakeserver.OtherID, Delay: time.Second}},
	},
}

// judge plays every scene with a receiver and says what went wrong.
func judge(t *testing.T, b build, lease time.Duration) (findings []string) {
	t.Helper()
	for _, sc := range scenes {
		synctest.Test(t, func(t *testing.T) {
			for _, f := range sc.play(t, b, lease) {
				findings = append(findings, sc.name+": the event "+f)
			}
		})
	}
	return findings
}

type processKey struct{}

func (sc *scene) play(t *testing.T, b build, lease time.Duration) (findings []string) {
	s := fakeserver.NewInMemory()
	defer s.Close()
	memory := &journal.Memory{Lease: lease}
	mine := &shop{work: sc.work}
	if sc.before != nil {
		mine.before = func(r *http.Request, run int) int {
			return sc.before(r.Context().Value(processKey{}).(*process), run)
		}
	}
	start := func() http.Handler { // a new process on the same journal
		p := &process{Journal: memory}
		return b(setup{journal: p, source: "shop", verify: verifier(secretOne), next: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mine.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), processKey{}, p)))
		})})
	}
	var mu sync.Mutex // guards running, came and stored
	running, came, stored := start(), 0, false
	entrance := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		h := running
		came++
		strange := came <= sc.wrong
		mu.Unlock()
		defer func() {
			p := recover()
			mu.Lock()
			defer mu.Unlock()
			if strange {
				_, err := memory.Get(context.Background(), journal.Operation{Scope: "shop", Name: "webhook", ID: r.Header.Get("Webhook-Id")})
				stored = stored || err == nil
			}
			if p != nil {
				running = start()
				panic(p)
			}
		}()
		h.ServeHTTP(w, r)
	})
	register(t, s, entrance, func(e *fakeserver.Endpoint) {
		if sc.edit != nil {
			sc.edit(e)
		}
	})
	theirs := &shop{}
	if sc.other {
		h := b(setup{journal: memory, next: theirs, source: "travel", verify: verifier(secretTwo)})
		register(t, s, h, func(e *fakeserver.Endpoint) { e.Name, e.Secrets = "travel", []string{secretTwo} })
	}
	fail(t, s, "order-1", sc.faults...)
	pay(t, s, "order-1")
	if sc.copy != 0 {
		time.Sleep(sc.copy)
		post(t, entrance, s.Events()[0].ID, event("order-1"))
	}
	settled(t, s)

	if stored {
		findings = append(findings, "was stored before it was verified")
	}
	const what = "payment.succeeded order-1"
	_, effects := mine.count()
	switch want := max(1, sc.acts); {
	case effects[what] > want:
		findings = append(findings, fmt.Sprintf("was handled %d times", effects[what]))
	case effects[what] < want:
		findings = append(findings, "was lost")
	}
	if sc.other {
		if _, effects := theirs.count(); effects[what] != 1 {
			findings = append(findings, "was lost")
		}
	}
	for _, d := range s.Deliveries() {
		if d.Endpoint == "shop" && d.Status/100 == 2 && (effects[what] == 0 || d.Ended.Before(mine.done[what])) {
			findings = append(findings, "was answered with 2xx before it was done")
			break
		}
	}
	return findings
}

func TestTheHandlerPassesTheJudge(t *testing.T) {
	require.Empty(t, judge(t, ours, 0))
}

func TestNegativeControlsAReceiverWithOneRuleBrokenIsCaught(t *testing.T) {
	for name, c := range brokenReceivers {
		t.Run(name, func(t *testing.T) {
			findings := judge(t, c.build, c.lease)
			t.Log(strings.Join(findings, "\n"))
			require.True(t, slices.ContainsFunc(findings, func(f string) bool { return strings.Contains(f, c.caught) }),
				"want %q, found %q", c.caught, findings)
		})
	}
}
