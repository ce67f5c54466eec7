package webhook_test

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
)

// loopback is a real server with h behind it.
type loopback struct {
	url    string
	client *http.Client
}

func onLoopback(t *testing.T, h http.Handler) *loopback {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := &http.Server{Handler: h}
	over := make(chan struct{})
	go func() {
		defer close(over)
		_ = server.Serve(listener) // ends by Close
	}()
	base := &http.Transport{}
	t.Cleanup(func() {
		base.CloseIdleConnections()
		_ = server.Close()
		<-over
	})
	return &loopback{"http://" + listener.Addr().String() + "/hooks", &http.Client{Transport: base}}
}

// deliver posts a signed delivery over the socket. No answer is status 0.
func (l *loopback) deliver(t *testing.T, id, body string) answer {
	t.Helper()
	header, err := fakeserver.Endpoint{Secrets: []string{secretOne}}.Sign(id, time.Now(), []byte(body))
	require.NoError(t, err)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, l.url, strings.NewReader(body))
	require.NoError(t, err)
	r.Header, r.GetBody = header, nil
	resp, err := l.client.Do(r)
	if err != nil {
		return answer{}
	}
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return read(t, resp.StatusCode, resp.Header, string(got))
}
