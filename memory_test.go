package idem_test

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

const (
	largeBody = 256 << 20 / min(slowness, 2) // the peak is then still far below
	peakLimit = 16 << 20

	// The test binary runs itself with these set: only a process of its own
	// has a peak of its own.
	childKind = "IDEM_LARGE_BODY"
	childURL  = "IDEM_LARGE_BODY_URL"
	childFile = "IDEM_LARGE_BODY_FILE"
)

// patterned is a stream of length bytes that never holds more than is asked
// for.
type patterned struct{ at, length int64 }

func (p *patterned) Read(b []byte) (int, error) {
	if p.at == p.length {
		return 0, io.EOF
	}
	n := min(int64(len(b)), p.length-p.at)
	for i := range b[:n] {
		b[i] = byte((p.at + int64(i)) * 31 >> 3)
	}
	p.at += n
	return int(n), nil
}

// A body of 256 MiB, a file or a stream that can be opened again, is retried
// whole and is never in memory.
func TestLargeBodyMemory(t *testing.T) {
	if kind := os.Getenv(childKind); kind != "" {
		sendLargeBody(t, kind)
		return
	}
	sum := sha256.New()
	name := filepath.Join(t.TempDir(), "large")
	f, err := os.Create(name)
	require.NoError(t, err)
	_, err = io.Copy(io.MultiWriter(f, sum), &patterned{length: largeBody})
	require.NoError(t, err)
	require.NoError(t, f.Close())
	want := hex.EncodeToString(sum.Sum(nil))

	for _, kind := range []string{"file", "stream with GetBody"} {
		t.Run(kind, func(t *testing.T) {
			s := onLoopback(t)
			require.NoError(t, s.Script("", fakeserver.Fault{Kind: fakeserver.Status, Status: 503}))
			child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLargeBodyMemory$", "-test.v")
			child.Env = append(os.Environ(), childKind+"="+kind, childURL+"="+s.URL()+"/v1/uploads", childFile+"="+name)
			out, err := child.CombinedOutput()
			require.NoError(t, err, "%s", out)

			require.Len(t, s.Effects(), 1)
			sends := s.Sends()
			require.Len(t, sends, 2)
			require.Len(t, keysSent(sends), 1)
			for _, n := range sends {
				require.EqualValues(t, largeBody, n.ContentLength)
				require.EqualValues(t, largeBody, n.BodyLen)
				require.Equal(t, want, n.BodySHA256)
			}
			_, after, found := strings.Cut(string(out), "peak=")
			require.True(t, found, "%s", out)
			peak, err := strconv.Atoi(strings.Fields(after)[0])
			require.NoError(t, err)
			t.Logf("%s: peak %.1f MiB", kind, float64(peak)/(1<<20))
			limit := peakLimit
			if raceDetector {
				limit *= 4 // its shadow memory counts as ours
			}
			require.LessOrEqual(t, peak, limit)
		})
	}
}

// sendLargeBody is what the child does: one call with one retry.
func sendLargeBody(t *testing.T, kind string) {
	tr := &idem.Transport{Base: newBase(t), Policy: casePolicy()}
	tr.Policy.AttemptTimeout, tr.Policy.MaxElapsed = 10*time.Minute, 10*time.Minute // it may be a slow machine
	f, err := os.Open(os.Getenv(childFile))
	require.NoError(t, err)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, os.Getenv(childURL), f)
	require.NoError(t, err)
	if kind != "file" {
		require.NoError(t, f.Close())
		open := func() (io.ReadCloser, error) { return io.NopCloser(&patterned{length: largeBody}), nil }
		req.GetBody, req.ContentLength = open, largeBody
		req.Body, err = open()
		require.NoError(t, err)
	}
	resp, err := idem.NewClient(tr).Do(req)
	require.NoError(t, err)
	readAll(t, resp)
	require.Equal(t, http.StatusCreated, resp.StatusCode)
	require.Equal(t, idem.Executed, idem.OutcomeOf(resp, nil))
	requireClosed(t, f)
	fmt.Printf("\npeak=%d bytes\n", peakMemory(t))
}

// peakMemory is the largest resident size of this process; where the system
// does not tell, what the runtime ever took from it.
func peakMemory(t *testing.T) int {
	t.Helper()
	if runtime.GOOS != "linux" {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.Sys)
	}
	status, err := os.Open("/proc/self/status")
	require.NoError(t, err)
	defer func() { _ = status.Close() }()
	for lines := bufio.NewScanner(status); lines.Scan(); {
		if size, ok := strings.CutPrefix(lines.Text(), "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.Fields(size)[0])
			require.NoError(t, err)
			return kib << 10
		}
	}
	t.Fatal("no VmHWM in /proc/self/status")
	return 0
}
