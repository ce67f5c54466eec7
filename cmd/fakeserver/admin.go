package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/idem-go/idem/fakeserver"
)

const (
	maxBody  = 1 << 20
	maxSends = 1000 // in one answer
)

type methods map[string]http.HandlerFunc

// handler serves /_fake/: the page, what it is made of, and the admin interface that README.md documents.
func (c *console) handler() http.Handler {
	paths := map[string]methods{
		"/_fake/":         {"GET": c.page, "POST": c.act},
		"/_fake/live":     {"GET": c.live},
		"/_fake/page.css": {"GET": asset("page.css", "text/css; charset=utf-8")},
		"/_fake/page.js":  {"GET": asset("page.js", "text/javascript; charset=utf-8")},
		"/_fake/faults":   {"GET": c.getFaults, "PUT": c.putFaults, "POST": c.postFaults, "DELETE": c.deleteFaults},
		"/_fake/effects":  {"GET": c.getEffects},
		"/_fake/sends":    {"GET": c.getSends},
		"/_fake/clock":    {"GET": c.getClock, "POST": c.postClock},
		"/_fake/settings": {"GET": c.getSettings},
		"/_fake/reset":    {"POST": c.postReset},
	}
	return c.guard(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		known := paths[r.URL.Path]
		if known == nil {
			refuse(w, http.StatusNotFound, "not-found", "There is nothing at this path.", nil)
			return
		}
		method := r.Method
		if method == http.MethodHead {
			method = http.MethodGet // net/http drops the body
		}
		serve := known[method]
		if serve == nil {
			w.Header().Set("Allow", strings.Join(slices.Sorted(maps.Keys(known)), ", "))
			refuse(w, http.StatusMethodNotAllowed, "method-not-allowed", "This path does not take the method "+quoted(r.Method)+".", nil)
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		serve(w, r)
	}))
}

func (c *console) getFaults(w http.ResponseWriter, _ *http.Request) {
	answerList(w, c.current())
}

func (c *console) putFaults(w http.ResponseWriter, r *http.Request)  { c.takeFaults(w, r, c.replace) }
func (c *console) postFaults(w http.ResponseWriter, r *http.Request) { c.takeFaults(w, r, c.add) }

func (c *console) takeFaults(w http.ResponseWriter, r *http.Request, take func([]fakeserver.Fault) error) {
	data, ok := body(w, r)
	if !ok {
		return
	}
	faults, wrong := parseFaults(data)
	if wrong != nil {
		refuse(w, http.StatusBadRequest, wrong.kind, wrong.err.Error(), map[string]any{"line": wrong.line, "column": wrong.column})
		return
	}
	if err := take(faults); err != nil {
		refuse(w, http.StatusBadRequest, "invalid-faults", err.Error(), nil)
		return
	}
	answerList(w, c.current())
}

func (c *console) deleteFaults(w http.ResponseWriter, _ *http.Request) {
	_ = c.replace(nil) // no fault is no wrong fault
	answerList(w, c.current())
}

type effectJSON struct {
	N         int       `json:"n"`
	Kind      string    `json:"kind"`
	ID        string    `json:"id"`
	Reference string    `json:"reference"`
	Key       string    `json:"key"`
	Caller    string    `json:"caller"`
	Endpoint  string    `json:"endpoint"`
	Amount    int64     `json:"amount"`
	At        time.Time `json:"at"`
	Send      int       `json:"send"`
}

func (c *console) getEffects(w http.ResponseWriter, r *http.Request) {
	q, ok := query(w, r, "reference", "caller", "key")
	if !ok {
		return
	}
	found := []effectJSON{}
	for _, e := range c.server.Effects(filter(q)) {
		found = append(found, effectJSON{e.N, e.Kind, e.ID, e.Reference, e.Key, e.Caller, e.Endpoint, e.Amount, e.At, e.Send})
	}
	answerList(w, found)
}

type sendJSON struct {
	N         int                 `json:"n"`
	At        time.Time           `json:"at"`
	Ended     time.Time           `json:"ended,omitzero"`
	Method    string              `json:"method"`
	Path      string              `json:"path"`
	Endpoint  string              `json:"endpoint"`
	Key       string              `json:"key"`
	KeySend   int                 `json:"key_send"`
	Caller    string              `json:"caller"`
	Reference string              `json:"reference"`
	Status    int                 `json:"status"`
	Fault     string              `json:"fault"`
	Replayed  bool                `json:"replayed"`
	Duplicate bool                `json:"duplicate"`
	Effect    int                 `json:"effect"`
	Conn      int                 `json:"conn"`
	BodyLen   int64               `json:"body_len"`
	BodySum   string              `json:"body_sha256"`
	Header    map[string][]string `json:"header"`
}

func (c *console) getSends(w http.ResponseWriter, r *http.Request) {
	q, ok := query(w, r, "reference", "caller", "key", "after", "limit")
	if !ok {
		return
	}
	after, limit := 0, maxSends
	if q.Has("after") {
		n, err := strconv.Atoi(q.Get("after"))
		if err != nil || n < 0 {
			refuse(w, http.StatusBadRequest, "invalid-request", "after: "+quoted(q.Get("after"))+" is not the number of a send.", nil)
			return
		}
		after = n
	}
	if q.Has("limit") {
		n, err := strconv.Atoi(q.Get("limit"))
		if err != nil || n < 1 || n > maxSends {
			refuse(w, http.StatusBadRequest, "invalid-request",
				"limit: "+quoted(q.Get("limit"))+" is not a number from 1 to "+strconv.Itoa(maxSends)+".", nil)
			return
		}
		limit = n
	}
	sends := []fakeserver.Send{}
	if f := filter(q); f == (fakeserver.Filter{}) {
		sends = c.server.SendsAfter(after)
	} else {
		for _, n := range c.server.Sends(f) {
			if n.N > after {
				sends = append(sends, n)
			}
		}
	}
	found := []sendJSON{}
	if len(sends) > limit {
		sends = sends[:limit]
		q.Set("after", strconv.Itoa(sends[limit-1].N))
		w.Header().Set("Link", "</_fake/sends?"+q.Encode()+`>; rel="next"`)
	}
	for _, n := range sends {
		found = append(found, sendJSON{
			n.N, n.At, n.Ended, n.Method, n.Path, n.Endpoint, n.Key, n.KeySend, n.Caller, n.Reference, n.Status, n.Fault,
			n.Replayed, n.Duplicate, n.Effect, n.Conn, n.BodyLen, n.BodySHA256, n.Header,
		})
	}
	answerList(w, found)
}

func (c *console) getClock(w http.ResponseWriter, _ *http.Request) {
	now, ahead := c.clock()
	answer(w, map[string]any{"now": now, "ahead": ahead.String()})
}

func (c *console) postClock(w http.ResponseWriter, r *http.Request) {
	data, ok := body(w, r)
	if !ok {
		return
	}
	var in struct {
		Advance string `json:"advance"`
	}
	var syntax *json.SyntaxError
	if err := json.Unmarshal(data, &in); errors.As(err, &syntax) {
		at := place(data, syntax.Offset-1, "invalid-json", err)
		refuse(w, http.StatusBadRequest, at.kind, err.Error(), map[string]any{"line": at.line, "column": at.column})
		return
	}
	d, err := time.ParseDuration(in.Advance)
	if err != nil {
		refuse(w, http.StatusBadRequest, "invalid-request", `Want {"advance":"1h"}, with a duration such as 90s, 1h30m or -1h.`, nil)
		return
	}
	c.advance(d)
	c.getClock(w, r)
}

func (c *console) getSettings(w http.ResponseWriter, _ *http.Request) {
	given := settingsJSON(c.settings)
	if name := c.preset(); name != "" {
		given["preset"] = name
	}
	answer(w, given)
}

func (c *console) postReset(w http.ResponseWriter, _ *http.Request) {
	c.reset()
	w.WriteHeader(http.StatusNoContent)
}

func filter(q url.Values) fakeserver.Filter {
	return fakeserver.Filter{Reference: q.Get("reference"), Caller: q.Get("caller"), Key: q.Get("key")}
}

// query refuses parameters that are not known, and those that come twice: a misspelt filter would give everything, and of
// two one would be ignored.
func query(w http.ResponseWriter, r *http.Request, known ...string) (url.Values, bool) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		refuse(w, http.StatusBadRequest, "invalid-request", "The query cannot be read.", nil)
		return nil, false
	}
	for name, values := range q {
		if len(values) > 1 {
			refuse(w, http.StatusBadRequest, "invalid-request", "The query has "+quoted(name)+" more than once.", nil)
			return nil, false
		}
		if !slices.Contains(known, name) {
			refuse(w, http.StatusBadRequest, "invalid-request",
				"The query has "+quoted(name)+"; known are "+strings.Join(known, ", ")+".", nil)
			return nil, false
		}
	}
	return q, true
}

func body(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	data, err := io.ReadAll(r.Body)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		refuse(w, http.StatusRequestEntityTooLarge, "body-too-large", "The body is larger than 1 MiB.", nil)
	case err != nil:
		refuse(w, http.StatusBadRequest, "invalid-request", "The body broke off.", nil)
	}
	return data, err == nil
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	write(w, http.StatusOK, encoded(v))
}

// answerList writes an item per line, so that an array can be read and counted without a tool.
func answerList[T any](w http.ResponseWriter, items []T) {
	var b bytes.Buffer
	for i, item := range items {
		b.WriteString([]string{"[\n  ", ",\n  "}[min(i, 1)])
		b.Write(encoded(item))
	}
	if len(items) == 0 {
		b.WriteString("[]")
	} else {
		b.WriteString("\n]")
	}
	w.Header().Set("Content-Type", "application/json")
	write(w, http.StatusOK, b.Bytes())
}

// refuse answers with an RFC 9457 problem.
func refuse(w http.ResponseWriter, status int, kind, detail string, members map[string]any) {
	doc := map[string]any{
		"type":   "https://fakeserver.test/problems/" + kind,
		"title":  http.StatusText(status),
		"status": status,
		"detail": detail,
	}
	maps.Copy(doc, members)
	w.Header().Set("Content-Type", "application/problem+json")
	write(w, status, encoded(doc))
}

func encoded(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic("fakeserver: " + err.Error()) // plain structs always marshal, and so do valid faults
	}
	return data
}

func write(w http.ResponseWriter, status int, data []byte) {
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n'))
}

func quoted(s string) string { return strconv.QuoteToASCII(s) }
