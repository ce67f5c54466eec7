// Package successpath is the workload that the benchmark and the ratio tool
// share: a keyed POST that succeeds at once, over a base in memory.
package successpath

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"time"

	"github.com/idem-go/idem"
)

const target = "http://api.example.test/v1/payments"

var (
	asked  = bytes.Repeat([]byte("a"), 1<<10)
	answer = []byte(`{"id":"pay_1","object":"payment","status":"succeeded","note":"` + strings.Repeat("b", 300-64) + `"}`)
)

// Variant is one way to send the POST.
type Variant struct {
	Name   string
	Client *http.Client
}

// Variants gives, in this order, a bare client, a bare client with a Timeout,
// idem with everything on, and idem without attempt limit and buffering. Each
// goes through its own http.Client over the same kind of base.
func Variants() []Variant {
	return []Variant{
		{"bare", &http.Client{Transport: inMemory{}}},
		{"bare-timeout", &http.Client{Transport: inMemory{}, Timeout: 30 * time.Second}},
		{"idem", &http.Client{Transport: &idem.Transport{
			Base:   inMemory{},
			Policy: idem.Policy{Budget: new(idem.Budget)},
		}}},
		{"idem-plain", &http.Client{Transport: &idem.Transport{
			Base:   inMemory{},
			Policy: idem.Policy{AttemptTimeout: -1, MaxResponseBuffer: -1, Budget: new(idem.Budget)},
		}}},
	}
}

// Send makes the call as a user would write it and reads the answer to its
// end.
func (v *Variant) Send() error {
	req, err := http.NewRequest(http.MethodPost, target, bytes.NewReader(asked))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := v.Client.Do(req)
	if err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusCreated || n != int64(len(answer)):
		return fmt.Errorf("got %d with %d bytes", resp.StatusCode, n)
	}
	return nil
}

var contentType = []string{"application/json"}

// inMemory is a base that answers at once. Like http.Transport it tells the
// trace of its connection, and reads and closes the body.
type inMemory struct{}

func (inMemory) RoundTrip(req *http.Request) (*http.Response, error) {
	if trace := httptrace.ContextClientTrace(req.Context()); trace != nil {
		if trace.GetConn != nil {
			trace.GetConn(req.URL.Host)
		}
		if trace.GotConn != nil {
			trace.GotConn(httptrace.GotConnInfo{Reused: true, WasIdle: true})
		}
	}
	if _, err := io.Copy(io.Discard, req.Body); err != nil {
		return nil, err
	}
	if err := req.Body.Close(); err != nil {
		return nil, err
	}
	a := &reply{}
	a.Reader.Reset(answer)
	a.resp = http.Response{
		Status: "201 Created", StatusCode: http.StatusCreated,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header:        http.Header{"Content-Type": contentType},
		ContentLength: int64(len(answer)),
		Body:          a,
		Request:       req,
	}
	return &a.resp, nil
}

// reply is an answer and its body.
type reply struct {
	bytes.Reader
	resp http.Response
}

func (*reply) Close() error { return nil }
