package main

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// guard lets through what this machine's user asks for: not another website in his browser that posts here (Origin,
// Sec-Fetch-Site), and not one whose name was made to point here (Host). Clients that are no browsers send neither header.
func (c *console) guard(next http.Handler) http.Handler {
	crossOrigin := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "+
			"img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if !c.mayBeCalled(r.Host) {
			refuse(w, http.StatusForbidden, "host-not-allowed",
				"/_fake/ is not served under the name "+quoted(r.Host)+"; the flag -host adds names.", nil)
			return
		}
		if err := crossOrigin.Check(r); err != nil {
			refuse(w, http.StatusForbidden, "cross-origin", "Another website may not change anything here.", nil)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// mayBeCalled says whether the Host of a request is one that nobody else's DNS can point here: localhost, an address, or
// a name that was given with -host.
func (c *console) mayBeCalled(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if host == "localhost" || slices.Contains(c.hosts, host) {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && (c.remote || ip.Unmap().IsLoopback())
}
