package sqljournal

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/idem-go/idem/journal"
)

// The secret's file has 64 hexadecimal digits and a newline.
const secretSize = 2*len(journal.Secret{}) + 1

// readSecret reads the secret's file.
func readSecret(name string) (journal.Secret, error) {
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return journal.Secret{}, &FileError{name, ErrNoSecret, "restore it from where it is kept; without it the journal cannot be used"}
	}
	if err != nil {
		return journal.Secret{}, fmt.Errorf("sqljournal: %w", err)
	}
	var s journal.Secret
	text, ended := strings.CutSuffix(string(b), "\n")
	if raw, err := hex.DecodeString(text); err != nil || !ended || len(raw) != len(s) {
		return journal.Secret{}, &FileError{name, ErrOtherSecret, fmt.Sprintf("the secret's file must have %d hexadecimal digits and a newline", secretSize-1)}
	} else {
		copy(s[:], raw)
	}
	if s == (journal.Secret{}) {
		return journal.Secret{}, &FileError{name, ErrOtherSecret, "it is all zeros"}
	}
	return s, nil
}

// makeSecret reads the secret's file, or creates it. Never is one overwritten:
// if another process makes one at the same time, both use the first.
func makeSecret(name string) (journal.Secret, error) {
	s, err := readSecret(name)
	if !errors.Is(err, ErrNoSecret) {
		return s, err
	}
	if s, err = journal.NewSecret(); err != nil {
		return journal.Secret{}, err
	}
	temp, err := newFile(name, []byte(hex.EncodeToString(s[:])+"\n"))
	if err != nil {
		return journal.Secret{}, err
	}
	defer func() { _ = os.Remove(temp) }()
	if err := os.Link(temp, name); err != nil && !errors.Is(err, fs.ErrExist) {
		return journal.Secret{}, fmt.Errorf("sqljournal: %w", err)
	}
	if err := syncDir(filepath.Dir(name)); err != nil {
		return journal.Secret{}, err
	}
	return readSecret(name)
}

// newFile makes a durable file beside name, with a name of its own and mode
// 0600 whatever the umask.
func newFile(name string, content []byte) (temp string, err error) {
	temp, err = tempName(name)
	if err != nil {
		return "", err
	}
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", fmt.Errorf("sqljournal: %w", err)
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(0o600), f.Sync(), f.Close())
	if err != nil {
		_ = os.Remove(temp)
		return "", fmt.Errorf("sqljournal: %w", err)
	}
	return temp, nil
}

// tempMark is in the names of files that are being made.
const tempMark = ".new-"

func tempName(name string) (string, error) {
	r, err := randomHex()
	return name + tempMark + r, err
}

func randomHex() (string, error) {
	var r [6]byte
	if _, err := rand.Read(r[:]); err != nil {
		return "", fmt.Errorf("sqljournal: the random source failed: %w", err)
	}
	return hex.EncodeToString(r[:]), nil
}

func newOwner() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "host"
	}
	r, err := randomHex()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%.200s/%d/%s", host, os.Getpid(), r), nil
}

// syncDir makes the names in a folder durable.
func syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // it has no such call; its file systems keep the order
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sqljournal: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sqljournal: %w", err)
	}
	return nil
}
