module github.com/idem-go/idem/cmd/fakeserver/browsertest

go 1.25

require (
	github.com/chromedp/chromedp v0.23.1
	github.com/idem-go/idem v0.0.0
	github.com/stretchr/testify v1.12.1
)

require (
	github.com/cenkalti/backoff/v4 v4.3.0 // indirect
	github.com/chromedp/cdproto v0.160.1 // indirect
	github.com/go-json-experiment/json v0.0.0-20260213210345-44df1a37e875 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/hashicorp/go-cleanhttp v0.5.2 // indirect
	github.com/hashicorp/go-retryablehttp v0.7.8 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
)

replace github.com/idem-go/idem => ../../..

tool github.com/idem-go/idem/cmd/fakeserver
