package webhook_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/idem-go/idem/journal"
	"github.com/idem-go/idem/webhook"
)

// What the Handler costs beside Verify and Next, over a journal in memory.
func BenchmarkHandler(b *testing.B) {
	for _, fresh := range []bool{true, false} {
		b.Run(map[bool]string{true: "new event", false: "known event"}[fresh], func(b *testing.B) {
			h := &webhook.Handler{
				Journal: &journal.Memory{Max: 1 << 30}, Source: "shop",
				Verify: func(h http.Header, _ []byte) (string, error) { return h.Get("Id"), nil },
				Next:   http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
			}
			r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, "http://shop.test/hooks", http.NoBody)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				if fresh || n == 0 {
					n++
					r.Header.Set("Id", fmt.Sprint(n))
				}
				h.ServeHTTP(&recorder{header: http.Header{}}, r)
			}
		})
	}
}
