package idem

import (
	"context"
	"errors"
	"net/http"
)

// Client is an http.Client over a Transport that turns the Reason of an
// operation into an [*Error]. It is safe for concurrent use. The zero Client is
// one over a zero Transport.
type Client struct {
	t *Transport // nil: zeroTransport
}

var zeroTransport Transport

func (c *Client) transport() *Transport {
	if c.t == nil {
		return &zeroTransport
	}
	return c.t
}

// NewClient returns a Client over t; nil means a zero Transport.
func NewClient(t *Transport) *Client { return &Client{t} }

// StandardClient returns an http.Client over the same Transport, for code
// that takes one, such as vendor SDKs. Leave its Timeout zero:
// Policy.MaxElapsed bounds the operation at half the cost, and Timeout
// flattens typed errors to text.
func (c *Client) StandardClient() *http.Client {
	return &http.Client{Transport: c.transport()}
}

// Do sends req and follows redirects as http.Client does. It returns an
// [*Error] where the operation ended for a Reason (also where there is an
// answer: the Error has its status, header and body) or without an answer.
// Every other answer, a plain 4xx included, is a response, and its body must
// be closed; so is an answer that the Journal could not note (ErrJournal in the
// report). [ReportOf] has the report of a response.
//
// A body that could not follow a 307 or 308 is made to, within
// Policy.MaxRequestBuffer.
func (c *Client) Do(req *http.Request) (*http.Response, error) {
	t := c.transport()
	t.resolve()
	if req == nil || req.URL == nil || req.RequestURI != "" {
		return t.refuse(req)
	}
	resp, err := c.exchange(req)
	if err != nil {
		return nil, err
	}
	if r := ReportOf(resp); r != nil && r.Reason != nil && !r.onlyJournal { // a journal that failed takes no answer away
		return nil, errorOf(resp, r)
	}
	return resp, nil
}

// exchange sends req through an http.Client and makes an Error of each of its
// errors: those of http.Client print the whole URL.
func (c *Client) exchange(req *http.Request) (*http.Response, error) {
	t := c.transport()
	req, finish, err := withGetBody(req, t)
	if err != nil {
		return nil, err
	}
	var last *operation
	answered := false
	defer func() { finish(answered) }() // also when a hook or the base panics
	resp, err := c.StandardClient().Do(req.WithContext(context.WithValue(req.Context(), lastOperation{}, &last)))
	answered = err == nil
	if err != nil {
		var e *Error
		if errors.As(err, &e) {
			return nil, e
		}
		secrets := credentials(req)
		if last != nil {
			secrets = append(secrets, last.lastHeader().Get("Location")) // it may hold somebody's credentials
		}
		e = &Error{Last: quiet(err, longestFirst(secrets))}
		if last != nil { // http.Client could not follow a redirect, or followed too many
			e.Report, e.Header = last.report.copy(), last.lastHeader()
			e.StatusCode = last.resp.StatusCode
		}
		return nil, e
	}
	return resp, nil
}

// lastOperation is where the latest RoundTrip under a context leaves itself
// for Do: http.Client drops the answer of a redirect that it cannot follow.
type lastOperation struct{}

// refuse ends a request that http.Client would not hand on.
func (t *Transport) refuse(req *http.Request) (*http.Response, error) {
	if req == nil {
		return nil, &Error{Report: Report{Outcome: NotExecuted, Reason: invalid("Request", "is nil")}}
	}
	return t.RoundTrip(req)
}

// withGetBody gives a request whose body can be read only once a GetBody, as
// far as the policy allows, because http.Client needs one for a 307 or 308.
// finish closes the caller's body when its readers are done.
func withGetBody(req *http.Request, t *Transport) (r *http.Request, finish func(answered bool), err error) {
	finish = func(bool) {}
	if req.Body == nil || req.Body == http.NoBody || req.GetBody != nil || t.invalid != nil {
		return req, finish, nil
	}
	b := new(body)
	if err := b.take(req.Context(), req, t.policy.MaxRequestBuffer); err != nil {
		o := &operation{Context: req.Context(), t: t, req: req}
		o.body.own.rc = req.Body
		o.minted = !o.named()
		if o.Err() != nil {
			o.endedBy(o.Err())
		}
		_, err = o.end(nil, err)
		return nil, nil, err
	}
	copied := *req
	copied.ContentLength = b.length
	switch b.kind {
	case noBody:
		_ = b.own.Close()
		copied.Body = http.NoBody
	case stream:
		copied.Body = &readCloser{b.streamed(), &b.own}
	case buffered, section:
		copied.GetBody = b.again
		copied.Body, _ = b.again() // neither kind can fail here
		finish = b.finish
	}
	return &copied, finish, nil
}
