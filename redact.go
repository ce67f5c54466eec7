package idem

import (
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// quietError is an error of somebody else, with a text that may be shown. The
// error itself stays reachable.
type quietError struct {
	text  string
	inner func() error // a func, so that no way of printing the struct prints it
}

func (e *quietError) Error() string { return e.text }
func (e *quietError) Unwrap() error { return e.inner() }

// quiet takes out of the text of err what the requests keep to themselves:
// a base transport is free to quote a request, or a server's echo of it.
func quiet(err error, secrets []string) error {
	pairs := make([]string, 0, 2*len(secrets))
	for _, s := range secrets {
		pairs = append(pairs, s, "[redacted]")
	}
	text := strings.NewReplacer(pairs...).Replace(err.Error()) // one pass, the earlier pair first where several fit
	for rest := err; rest != nil; {
		u := (*url.Error)(nil)
		if !errors.As(rest, &u) {
			break
		}
		text = strings.ReplaceAll(text, strconv.Quote(u.URL), "[url]") // as url.Error writes it
		rest = u.Err
	}
	if text == err.Error() {
		return err
	}
	return &quietError{text, func() error { return err }}
}

// secrets are what the caller's request, the attempt made of it, and the
// proxy on the way carry, the longest first: one may begin like another.
func (o *operation) secrets(a *attempt) []string {
	all := credentials(o.req)
	if a != nil && o.t.Prepare != nil {
		all = append(all, credentials(&a.req)...)
	}
	if base, ok := o.t.base.(*http.Transport); ok && base.Proxy != nil {
		if via, err := base.Proxy(o.req); err == nil && via != nil {
			all = append(all, userInfo(via)...)
		}
		all = append(all, headerSecrets(base.ProxyConnectHeader)...)
	}
	return longestFirst(all)
}

func longestFirst(secrets []string) []string {
	for _, s := range secrets {
		if q := strconv.Quote(s); q[1:len(q)-1] != s {
			secrets = append(secrets, q[1:len(q)-1]) // as %q writes it
		}
	}
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) })
	return slices.DeleteFunc(secrets, func(s string) bool { return len(s) < 3 }) // those would only garble the text
}

// credentials of a request: user info, query, and the headers for them.
func credentials(req *http.Request) (all []string) {
	if req == nil {
		return nil
	}
	if u := req.URL; u != nil {
		all = append(all, userInfo(u)...)
		all = append(all, u.RawQuery)
		for _, values := range u.Query() {
			for _, v := range values {
				all = append(all, v, url.QueryEscape(v))
			}
		}
	}
	if user, password, ok := req.BasicAuth(); ok {
		all = append(all, user, password)
	}
	for _, c := range req.Cookies() {
		all = append(all, c.Value)
	}
	return append(all, headerSecrets(req.Header)...)
}

func userInfo(u *url.URL) []string {
	if u.User == nil {
		return nil
	}
	password, _ := u.User.Password()
	basic := base64.StdEncoding.EncodeToString([]byte(u.User.Username() + ":" + password))
	return []string{u.User.Username(), password, url.QueryEscape(password), u.User.String(), basic}
}

func headerSecrets(h http.Header) (all []string) {
	for name, values := range h {
		switch http.CanonicalHeaderKey(name) {
		case "Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key":
			for _, v := range values {
				all = append(all, v)
				all = append(all, strings.Fields(v)...)
			}
		}
	}
	return all
}
