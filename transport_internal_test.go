package idem

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

type answersNothing struct{ err error }

func (a answersNothing) RoundTrip(req *http.Request) (*http.Response, error) {
	_ = req.Body.Close()
	if a.err != nil {
		return nil, a.err
	}
	return &http.Response{StatusCode: 201, Header: http.Header{}, Body: http.NoBody, Request: req}, nil
}

// The other half of C47: no map in the process remembers a finished key.
func TestGatesForgetAKeyWhenNobodyIsInside(t *testing.T) {
	for name, base := range map[string]http.RoundTripper{"answered": answersNothing{}, "lost": answersNothing{errors.New("lost")}} {
		t.Run(name, func(t *testing.T) {
			tr := &Transport{Base: base, Policy: Policy{MaxAttempts: 1, Budget: &Budget{}}}
			var wg sync.WaitGroup
			for w := range 50 {
				wg.Add(1)
				go func() {
					defer wg.Done()
					for i := range 100 {
						ctx, cancel := context.WithCancel(WithKey(context.Background(), "order-"+strconv.Itoa(i*25+w/2)))
						if i%10 == 0 {
							cancel()
						}
						req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://api.test/", strings.NewReader("{}"))
						if err != nil {
							t.Error(err)
						}
						if resp, err := tr.RoundTrip(req); err == nil {
							_, _ = io.Copy(io.Discard, resp.Body)
							_ = resp.Body.Close()
						}
						cancel()
					}
				}()
			}
			wg.Wait()
			require.Empty(t, tr.gates.open)
			require.Empty(t, tr.policy.Budget.buckets)
		})
	}
}
