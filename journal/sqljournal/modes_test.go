//go:build unix

package sqljournal_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/journal/sqljournal"
)

func TestEveryFileIsForItsOwnerAlone(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	for _, umask := range []int{0, 0o077, 0o777} {
		syscall.Umask(0)
		dir := t.TempDir()
		syscall.Umask(umask)
		path := filepath.Join(dir, "idem.db")
		j, err := sqljournal.OpenSQLite(path, sqljournal.Options{})
		require.NoError(t, err)
		_, err = j.Begin(t.Context(), payment("1"))
		require.NoError(t, err)
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		modes := map[string]fs.FileMode{}
		for _, e := range entries {
			info, err := e.Info()
			require.NoError(t, err)
			modes[e.Name()] = info.Mode()
		}
		require.NoError(t, j.Close())
		require.Equal(t, map[string]fs.FileMode{"idem.db": 0o600, "idem.db-wal": 0o600, "idem.db-shm": 0o600, "idem.db.secret": 0o600}, modes, "umask %o", umask)
	}
}
