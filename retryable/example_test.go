package retryable_test

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/hashicorp/go-retryablehttp"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/retryable"
)

// A client that was made with go-retryablehttp moves in five lines. Its first
// answer is lost, and the customer is charged once.
func Example() {
	server := fakeserver.New()
	defer server.Close()
	_ = server.Inject(fakeserver.Fault{Kind: fakeserver.Reset, Point: fakeserver.AfterEffect, Send: 1}) // valid, so no error

	old := retryablehttp.NewClient() // with a CheckRetry, a Backoff, a PrepareRetry of one's own
	old.RetryWaitMin = 10 * time.Millisecond

	transport := &idem.Transport{Base: server.Transport(), Prepare: retryable.Prepare(old.PrepareRetry)}
	transport.Policy.MaxAttempts = old.RetryMax + 1
	transport.Policy.Classify = retryable.Classify(old.CheckRetry)
	transport.Policy.Backoff = retryable.Backoff(old.Backoff, old.RetryWaitMin, old.RetryWaitMax)
	client := &http.Client{Transport: transport}

	resp, err := client.Post(server.URL()+"/v1/payments", "application/json", strings.NewReader(`{"amount":1999,"currency":"usd"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = resp.Body.Close() }()
	fmt.Println(resp.Status)
	fmt.Println("attempts:", len(idem.ReportOf(resp).Attempts))
	fmt.Println("outcome:", idem.OutcomeOf(resp, nil))
	fmt.Println("charges:", len(server.Effects(fakeserver.Filter{})))
	// Output:
	// 201 Created
	// attempts: 2
	// outcome: executed
	// charges: 1
}
