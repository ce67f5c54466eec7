// Package witness compares what callers were told with what really happened:
// the ledger of effects and the sends of a fake server. Every proof of this
// module, and every broken build that a proof must catch, is judged by it.
package witness

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// Claim is what a caller was told about one operation, over all its calls.
type Claim struct {
	Reference string // names the operation in the ledger

	Calls    int
	Outcome  idem.Outcome // of the last call
	Reason   error        // of the last call
	Status   int          // of the last answer; 0: none
	Body     []byte       // of that answer, as it was handed on
	BodyErr  error        // that ended it; nil: read to its end
	Err      error        // of the last call
	Key      string       // of the last call
	Keys     []string     // distinct ones, in order
	Sends    int          // of all calls
	Attempts int          // the most in one call
}

// maxBody is how much of an answer is read: there are some without end.
const maxBody = 64 << 10

// Hear takes in what one call told its caller. It reads and closes the answer.
func (c *Claim) Hear(report *idem.Report, resp *http.Response, err error) {
	c.Calls++
	c.Outcome, c.Reason, c.Err = report.Outcome, report.Reason, err
	c.Status, c.Body, c.BodyErr = 0, nil, nil
	if resp != nil {
		c.Status = resp.StatusCode
		c.Body, c.BodyErr = io.ReadAll(io.LimitReader(resp.Body, maxBody))
		_ = resp.Body.Close()
	}
	c.Key = report.Key
	if e := (*idem.Error)(nil); resp == nil && errors.As(err, &e) {
		c.Status, c.Body = e.StatusCode, e.Body
		c.Key = e.Key // the one that the user sees
	}
	if report.Key != "" && !slices.Contains(c.Keys, report.Key) {
		c.Keys = append(c.Keys, report.Key)
	}
	c.Sends += report.Sends
	if n := len(report.Attempts); n > 0 {
		c.Attempts = max(c.Attempts, report.Attempts[n-1].N)
	}
}

// String is what the caller was told last.
func (c *Claim) String() string {
	return fmt.Sprintf("%s: call %d: %v, reason %v, error %v, answer %d %q (%v), keys %q, sends %d",
		c.Reference, c.Calls, c.Outcome, c.Reason, c.Err, c.Status, c.Body, c.BodyErr, c.Keys, c.Sends)
}

// Rule is what a violation is against.
type Rule string

// The rules.
const (
	OneEffect    Rule = "at most one effect for an operation"
	TrueSuccess  Rule = "a claimed success has its effect"
	TrueDenial   Rule = "a claimed refusal or non-execution has no effect"
	WholeAnswer  Rule = "an answer handed on as a success is whole and about the effect"
	OneKey       Rule = "one key for an operation, and its own"
	HonestSends  Rule = "the reports count every send"
	PatientWaits Rule = "no send before the time that the server asked for"
)

// Violation is one thing that must not happen.
type Violation struct {
	Rule      Rule
	Reference string // of the operation; "": of all together
	What      string
}

// String gives the rule and what broke it.
func (v Violation) String() string { return fmt.Sprintf("%s: %s: %s", v.Reference, v.Rule, v.What) }

// Figures are the numbers of a run.
type Figures struct {
	Operations int
	Effects    int
	Doubled    int // operations with more than one effect
	Lost       int // operations without an effect
	FalseClaim int // success without effect, refusal or non-execution with one
	BadAnswers int
	Unknown    int // operations that ended unknown
	Keys       int // distinct ones at the server
	Reported   int // sends, by the reports
	Arrived    int // sends, at the server, from the client's connections
	Copies     int // made by the network
}

// Add adds the numbers of another run over other operations.
func (f *Figures) Add(g Figures) {
	f.Operations += g.Operations
	f.Effects += g.Effects
	f.Doubled += g.Doubled
	f.Lost += g.Lost
	f.FalseClaim += g.FalseClaim
	f.BadAnswers += g.BadAnswers
	f.Unknown += g.Unknown
	f.Keys += g.Keys
	f.Reported += g.Reported
	f.Arrived += g.Arrived
	f.Copies += g.Copies
}

// String is one line.
func (f Figures) String() string {
	return fmt.Sprintf("operations %d, effects %d, doubled %d, lost %d, false claims %d, bad answers %d, unknown %d, "+
		"keys %d, sends reported %d, arrived %d, copies made by the network %d",
		f.Operations, f.Effects, f.Doubled, f.Lost, f.FalseClaim, f.BadAnswers, f.Unknown,
		f.Keys, f.Reported, f.Arrived, f.Copies)
}

// Judge compares the claims, which must be about all the operations that s
// ever saw, with the ledger and the sends of s.
func Judge(s *fakeserver.Server, claims []*Claim) (Figures, []Violation) {
	j := judge{
		figures: Figures{Operations: len(claims)},
		effects: map[string][]fakeserver.Effect{},
		keys:    map[string][]string{},
		owner:   map[string]string{},
	}
	for _, e := range s.Effects() {
		j.effects[e.Reference] = append(j.effects[e.Reference], e)
		j.figures.Effects++
	}
	for _, c := range claims {
		for _, k := range c.Keys {
			if other, taken := j.owner[k]; taken {
				j.add(OneKey, c.Reference, "key %q is also that of %s", k, other)
			}
			j.owner[k] = c.Reference
		}
	}
	j.sends(s.Sends())
	for _, c := range claims {
		j.claim(c)
		j.figures.Reported += c.Sends
	}
	if j.figures.Reported != j.figures.Arrived {
		j.add(HonestSends, "", "reported %d, arrived %d", j.figures.Reported, j.figures.Arrived)
	}
	return j.figures, j.found
}

type judge struct {
	figures Figures
	found   []Violation
	effects map[string][]fakeserver.Effect // by reference
	keys    map[string][]string            // at the server, by reference
	owner   map[string]string              // reference, by claimed key
}

func (j *judge) add(rule Rule, reference, format string, args ...any) {
	j.found = append(j.found, Violation{rule, reference, fmt.Sprintf(format, args...)})
}

// sends looks at what came from the client's connections.
func (j *judge) sends(all []fakeserver.Send) {
	type last struct {
		at   time.Time
		asks time.Duration
	}
	previous := map[string]last{}
	distinct := map[string]bool{}
	for _, n := range all {
		if n.Duplicate {
			j.figures.Copies++
			continue
		}
		j.figures.Arrived++
		if n.Method == http.MethodGet || n.Method == http.MethodHead {
			continue // carries no key by design
		}
		if n.Key != "" && !distinct[n.Key] {
			distinct[n.Key] = true
			if _, claimed := j.owner[n.Key]; !claimed {
				j.add(OneKey, n.Reference, "key %q at the server is in no report", n.Key)
			}
		}
		if n.Reference != "" && !slices.Contains(j.keys[n.Reference], n.Key) {
			j.keys[n.Reference] = append(j.keys[n.Reference], n.Key)
		}
		who := n.Reference
		if who == "" {
			who = j.owner[n.Key] // its body was not read
		}
		if p, ok := previous[who]; ok && n.At.Sub(p.at) < p.asks {
			j.add(PatientWaits, who, "send %d came %v after an answer that asked for %v", n.N, n.At.Sub(p.at), p.asks)
		}
		previous[who] = last{n.At, asked(n)}
	}
	j.figures.Keys = len(distinct)
}

func (j *judge) claim(c *Claim) {
	if keys := j.keys[c.Reference]; len(keys) > 1 {
		j.add(OneKey, c.Reference, "%d keys at the server: %q", len(keys), keys)
	}
	if len(c.Keys) > 1 {
		j.add(OneKey, c.Reference, "%d keys in the reports: %q", len(c.Keys), c.Keys)
	}
	effects := j.effects[c.Reference]
	switch len(effects) {
	case 0:
		j.figures.Lost++
	case 1:
	default:
		j.figures.Doubled++
		j.add(OneEffect, c.Reference, "%d effects", len(effects))
	}
	switch c.Outcome {
	case idem.Executed:
		if len(effects) == 0 {
			j.figures.FalseClaim++
			j.add(TrueSuccess, c.Reference, "claimed %v with status %d", c.Outcome, c.Status)
		}
	case idem.Refused, idem.NotExecuted:
		if len(effects) > 0 {
			j.figures.FalseClaim++
			j.add(TrueDenial, c.Reference, "claimed %v with status %d", c.Outcome, c.Status)
		}
	case idem.Unknown:
		j.figures.Unknown++
	}
	if c.Err == nil && c.Status/100 == 2 {
		if wrong := badAnswer(c, effects); wrong != "" {
			j.figures.BadAnswers++
			j.add(WholeAnswer, c.Reference, "%s", wrong)
		}
	}
}

// badAnswer says what is wrong with a success that was handed on.
func badAnswer(c *Claim, effects []fakeserver.Effect) string {
	if c.BodyErr != nil {
		return "reading it failed: " + c.BodyErr.Error()
	}
	var a struct {
		ID        string `json:"id"`
		Amount    int64  `json:"amount"`
		Reference string `json:"reference"`
	}
	if err := json.Unmarshal(c.Body, &a); err != nil {
		return fmt.Sprintf("%q is not the JSON of a resource", c.Body)
	}
	for _, e := range effects {
		if e.ID == a.ID && e.Amount == a.Amount && e.Reference == a.Reference {
			return ""
		}
	}
	return fmt.Sprintf("%q is about no effect of the operation", c.Body)
}

var askedBy = regexp.MustCompile(`with Retry-After "(\d+)"`)

// asked is how long the answer to n told the client to wait.
func asked(n fakeserver.Send) time.Duration {
	if m := askedBy.FindStringSubmatch(n.Fault); m != nil && n.Status >= 400 {
		seconds, _ := strconv.Atoi(m[1])
		return time.Duration(seconds) * time.Second
	}
	if n.Status == http.StatusConflict {
		return time.Second // the fake server's own, while the key is in progress
	}
	return 0
}
