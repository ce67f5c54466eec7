package fakeserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
)

// Handle puts a stub of your own behind the server's idempotency, faults and ledger. The pattern is one of
// http.ServeMux; a stub goes before the built-in routes. As there, a pattern that conflicts with an earlier stub panics,
// and so does a nil handler.
//
// POST and PATCH need a key, as everywhere; other methods take one if it is sent. A request with a new key reaches the
// stub and is in progress until the stub returns; its answer is stored, and replayed verbatim with all headers. So the
// stub is called once per key, unless it answers with a 5xx: that is a failure before the effect, see
// [Settings].Failures. A stub that panics has had no effect either: the key is free and the connection closes.
//
// An answer of 2xx is an effect, of the Kind "handled", except to a GET, HEAD, OPTIONS or TRACE. Its Reference is the
// field "reference" of a JSON or form body or of the query, its ID the field "id" of a JSON answer.
//
// The stub gets the whole body, at most 1 MiB. It may run in several goroutines, and on when the client has left:
// its context ends only with Close and Restart.
func (s *Server) Handle(pattern string, h http.Handler) {
	if f, ok := h.(http.HandlerFunc); h == nil || ok && f == nil {
		panic("fakeserver: handle: nil handler for " + strconv.Quote(pattern))
	}
	s.stubs.Handle(pattern, &route{server: s, pattern: pattern, stub: h})
}

// parseStub lays out a call of the stub.
func (r *route) parseStub(q *request) {
	q.reference = referenceOf(q)
	asked := q.http.Clone(context.WithoutCancel(q.http.Context())) // the original belongs to net/http
	q.stub = func(life <-chan struct{}) (answer, Effect) {
		ctx, cancel := r.server.alive(asked.Context(), life)
		defer cancel()
		req := asked.Clone(ctx) // a second delivery is another call
		req.Body = io.NopCloser(bytes.NewReader(q.body))
		req.ContentLength, req.TransferEncoding = int64(len(q.body)), nil
		a := recorded(r.stub, req)
		if a.none || a.status/100 != 2 || safe(req.Method) {
			return a, Effect{}
		}
		var made struct {
			ID any `json:"id"`
		}
		unmarshal(a.body, &made) // an answer without an id is fine
		return a, Effect{Kind: "handled", ID: textOf(made.ID)}
	}
}

func safe(method string) bool {
	return slices.Contains([]string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace}, method)
}

// alive is a context that ends with the server and with the life of it that a request arrived in.
func (s *Server) alive(parent context.Context, life <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	go func() {
		defer cancel()
		select {
		case <-life:
		case <-s.done:
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

func referenceOf(q *request) string {
	kind, _, _ := mime.ParseMediaType(q.http.Header.Get("Content-Type"))
	if kind == "application/x-www-form-urlencoded" {
		if form, err := url.ParseQuery(string(q.body)); err == nil && form.Get("reference") != "" {
			return form.Get("reference")
		}
	} else {
		var in struct {
			Reference any `json:"reference"`
		}
		unmarshal(q.body, &in) // a body that is not JSON has no reference
		if text := textOf(in.Reference); text != "" {
			return text
		}
	}
	return q.http.URL.Query().Get("reference")
}

// unmarshal keeps numbers as they are written.
func unmarshal(data []byte, v any) {
	if !json.Valid(data) {
		return
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	_ = d.Decode(v) // valid JSON of another shape is no reference
}

// textOf is a JSON string or number as text.
func textOf(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case json.Number:
		return v.String()
	}
	return ""
}

// recorded runs the stub and keeps what it answers; none if it panics.
func recorded(h http.Handler, r *http.Request) (a answer) {
	w := &recorder{header: http.Header{}}
	defer func() {
		if p := recover(); p != nil {
			a = answer{none: true, cause: fmt.Sprint("the stub panicked: ", p)}
		}
	}()
	h.ServeHTTP(w, r)
	w.WriteHeader(http.StatusOK) // unless it was called already
	if w.body.Len() > 0 && len(w.sent["Content-Type"]) == 0 {
		w.sent.Set("Content-Type", http.DetectContentType(w.body.Bytes())) // as net/http would
	}
	a.status, a.body = w.status, w.body.Bytes()
	for _, name := range slices.Sorted(maps.Keys(w.sent)) {
		if name == "Content-Length" || name == "Transfer-Encoding" {
			continue // the framing is the server's
		}
		for _, value := range w.sent[name] {
			a.header = append(a.header, field{name, value})
		}
	}
	return a
}

type recorder struct {
	header http.Header
	sent   http.Header // as it was when the status was written; nil = not yet
	status int
	body   bytes.Buffer
}

func (w *recorder) Header() http.Header { return w.header }

func (w *recorder) WriteHeader(status int) {
	switch {
	case status < 100 || status > 999:
		panic(fmt.Sprintf("invalid status %d", status)) // as net/http would
	case w.sent == nil && status >= 200:
		w.status, w.sent = status, w.header.Clone()
	}
}

func (w *recorder) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if !bodyAllowed(w.status) {
		return 0, http.ErrBodyNotAllowed
	}
	return w.body.Write(p)
}

// Flush is there for stubs that flush; the answer leaves when the stub has returned.
func (w *recorder) Flush() { w.WriteHeader(http.StatusOK) }
