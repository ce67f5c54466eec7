package signature_test

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/fakeserver"
	"github.com/idem-go/idem/internal/leak"
	"github.com/idem-go/idem/journal/sqljournal"
)

var (
	deliveriesFlag = flag.Int("deliveries", 600, "how many deliveries the storm over SQLite makes")
	seedFlag       = flag.Int64("seed", 0, "seed of the storm; 0: a fresh one, which a failure prints")
)

// TestMain fails the run if goroutines are left behind.
func TestMain(m *testing.M) {
	os.Exit(leak.Run(m))
}

// open opens the journal in file, in t's folder.
func open(t *testing.T, folder string, o sqljournal.Options) *sqljournal.Journal {
	t.Helper()
	j, err := sqljournal.OpenSQLite(filepath.Join(folder, "idem.db"), o)
	require.NoError(t, err)
	return j
}

// pay makes a payment, which s then tells of.
func pay(t *testing.T, s *fakeserver.Server, reference string) {
	t.Helper()
	body := fmt.Sprintf(`{"amount":1999,"currency":"usd","reference":%q}`, reference)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/payments", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Idempotency-Key", reference)
	resp, err := s.Client().Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	require.Equal(t, http.StatusCreated, resp.StatusCode)
}
