package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/idem-go/idem/fakeserver"
)

// console is what is under /_fake/: it knows the faults, the settings and the clock, which the server only follows.
type console struct {
	server   *fakeserver.Server
	settings fakeserver.Settings
	remote   bool
	hosts    []string
	rate     float64
	seed     int64
	given    string       // with -settings
	say      func(string) // prints a line; nil = nothing is printed

	mu     sync.Mutex // guards everything below, and keeps changes of the faults in order
	faults []fakeserver.Fault
	ahead  time.Duration // of the real clock
	ledger ledger
}

// log prints a change that was made here, like a send.
func (c *console) log(format string, args ...any) {
	if c.say != nil {
		c.say(time.Now().Add(c.ahead).Format("15:04:05.000") + "  " + fmt.Sprintf(format, args...))
	}
}

// preset is the name that -settings begins with; "" = none.
func (c *console) preset() string {
	name, _, _ := strings.Cut(c.given, ",")
	name = strings.TrimSpace(name)
	if _, ok := preset(name); !ok {
		return ""
	}
	return name
}

// routes are the patterns that a fault's endpoint may be. Nobody adds stubs to the command.
var routes = []string{
	"POST /v1/payments",
	"GET /v1/payments",
	"GET /v1/payments/{id}",
	"PUT /v1/payments/{id}/status",
	"POST /v1/payments/{id}/refunds",
	"POST /v1/hotels/{hotel_id}/reservations",
	"GET /v1/hotels/{hotel_id}/reservations",
	"GET /v1/hotels/{hotel_id}/reservations/{id}",
	"DELETE /v1/hotels/{hotel_id}/reservations/{id}",
	"POST /v1/uploads",
}

// choice is a set of faults with a name, for the switches of the page and -faults.
type choice struct {
	Name, Label, What string
	Faults            []fakeserver.Fault
}

func (c *console) choices() []choice {
	const slow = 3 * time.Second
	return []choice{
		{"none", "No fault", "every send is answered", nil},
		{"lost-answer", "Lost answer", "the first send of a key has its effect, but the connection dies before the answer",
			[]fakeserver.Fault{{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Send: 1}}},
		{"slow-effect", "Slow effect", "the first send of a key takes " + slow.String() + "; others get 409 meanwhile",
			[]fakeserver.Fault{{Kind: fakeserver.Slow, Point: fakeserver.DuringEffect, Delay: slow, Send: 1}}},
		{"unavailable", "503 first", "the first send of a key gets 503 with Retry-After: 1, and has no effect",
			[]fakeserver.Fault{{Kind: fakeserver.Status, Point: fakeserver.BeforeEffect, Status: 503, RetryAfter: "1", Send: 1}}},
		{"mixed", "Mixed", fmt.Sprintf("%.4g %% of the sends meet one of many faults, seed %d", c.rate*100, c.seed),
			fakeserver.Mixed(c.rate, c.seed)},
		{"storm", "Storm", fmt.Sprintf("60 %% of the sends meet a fault of nearly every kind, seed %d", c.seed),
			fakeserver.Storm(c.seed)},
	}
}

// switches are the names of the choices.
func switches() string {
	var names []string
	for _, known := range new(console).choices() {
		names = append(names, known.Name)
	}
	return strings.Join(names, ", ")
}

// startFaults reads the value of -faults.
func (c *console) startFaults(value string) ([]fakeserver.Fault, error) {
	if !(c.rate >= 0 && c.rate <= 1) {
		return nil, errors.New("-rate: must lie between 0 and 1")
	}
	for _, known := range c.choices() {
		if known.Name == value {
			return known.Faults, nil
		}
	}
	data, err := os.ReadFile(value)
	if err != nil {
		return nil, fmt.Errorf("-faults: neither one of %s nor a file that can be read: %w", switches(), err)
	}
	faults, wrong := parseFaults(data)
	if wrong != nil {
		return nil, fmt.Errorf("-faults: %s, line %d, column %d: %w", value, wrong.line, wrong.column, wrong.err)
	}
	return faults, nil
}

// replace puts faults in the place of all that there are; with an error nothing changes.
func (c *console) replace(faults []fakeserver.Fault) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	rehearsal := fakeserver.NewInMemory() // rates are only checked together, and a refusal must not leave the server without faults
	defer rehearsal.Close()
	if err := rehearsal.Inject(faults...); err != nil {
		return err
	}
	c.server.ClearFaults()
	c.faults = slices.Clone(faults)
	if err := c.server.Inject(faults...); err != nil {
		return err
	}
	c.log("faults: %s", inWords(faults))
	return nil
}

// add puts faults behind those there are.
func (c *console) add(faults []fakeserver.Fault) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.server.Inject(faults...); err != nil {
		return err
	}
	c.faults = append(c.faults, faults...)
	c.log("faults, added: %s", inWords(faults))
	return nil
}

// inWords lists faults in a line, a few of them.
func inWords(faults []fakeserver.Fault) string {
	const listed = 3
	if len(faults) == 0 {
		return "none"
	}
	var words []string
	for _, f := range faults[:min(len(faults), listed)] {
		words = append(words, rounded(f.String()))
	}
	text := strings.Join(words, "; ")
	if more := len(faults) - listed; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return text
}

// current is a copy of the faults, never nil.
func (c *console) current() []fakeserver.Fault {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]fakeserver.Fault{}, c.faults...)
}

func (c *console) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.server.Reset()
	c.faults, c.ledger = nil, ledger{}
	c.log("reset: keys, ledger, sends, resources and faults are forgotten")
}

func (c *console) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.server.Advance(d)
	c.ahead += d
	c.log("clock: %s ahead", c.ahead)
}

// clock is the server's time, and how far it is ahead of the real one.
func (c *console) clock() (now time.Time, ahead time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.ahead), c.ahead
}

// misplaced is an error and where it is in the text, from 1.
type misplaced struct {
	line, column int
	kind         string // of the problem
	err          error
}

// parseFaults reads a JSON array of faults. An error of the syntax is placed where it is, an error of a fault where that
// fault begins.
func parseFaults(data []byte) ([]fakeserver.Fault, *misplaced) {
	var items []json.RawMessage
	var syntax *json.SyntaxError
	switch err := json.Unmarshal(data, &items); {
	case errors.As(err, &syntax):
		return nil, place(data, syntax.Offset-1, "invalid-json", err)
	case err != nil || items == nil:
		return nil, place(data, 0, "invalid-faults", errors.New("want a JSON array of faults"))
	}
	faults := make([]fakeserver.Fault, len(items))
	from := 0
	for i, item := range items {
		from += bytes.Index(data[from:], item) // what is between the items is never part of one
		err := json.Unmarshal(item, &faults[i])
		if err == nil {
			err = faults[i].Validate()
		}
		if at := faults[i].Endpoint; err == nil && at != "" && !slices.Contains(routes, at) {
			err = fmt.Errorf("endpoint: there is no route %q; there are %s", at, strings.Join(routes, ", "))
		}
		if err != nil {
			return nil, place(data, int64(from), "invalid-faults", fmt.Errorf("fault %d: %s", i+1, strings.TrimPrefix(err.Error(), "fakeserver: fault: ")))
		}
		from += len(item)
	}
	return faults, nil
}

func place(data []byte, offset int64, kind string, err error) *misplaced {
	before := data[:min(max(int(offset), 0), len(data))]
	return &misplaced{
		line:   1 + bytes.Count(before, []byte("\n")),
		column: len(before) - bytes.LastIndexByte(before, '\n'),
		kind:   kind,
		err:    err,
	}
}
