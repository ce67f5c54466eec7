// Package browsertest looks at the page of cmd/fakeserver in a real Chromium. It is a module of its own, so that nobody
// who uses the others needs a browser driver. scripts/browser runs it.
package browsertest
