package journal_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal"
)

// Whoever prints a journal must not print the secret with it.
func TestAMemoryDoesNotPrintItsSecret(t *testing.T) {
	m := new(journal.Memory)
	_, err := m.Begin(t.Context(), payment("1"))
	require.NoError(t, err)
	for _, verb := range []string{"%v", "%+v", "%#v"} {
		text := fmt.Sprintf(verb, m)
		require.NotContains(t, strings.ToLower(text), "secret:[", verb)
		require.NotContains(t, text, "Secret{", verb)
	}
}
