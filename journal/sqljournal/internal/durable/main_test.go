package main

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem/internal/leak"
)

// TestMain fails the run if goroutines are left behind.
func TestMain(m *testing.M) {
	os.Exit(leak.Run(m))
}

func TestEveryCaseIsInTheTable(t *testing.T) {
	b, err := measure(t.TempDir(), 1, leastSlice)
	require.NoError(t, err)
	var out strings.Builder
	b.show(&out)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	lines = lines[len(lines)-14:] // behind the heading, and a warning where the folder is in memory
	require.Equal(t, []string{"writers", "commit", "op/s", "p50", "us", "p99", "us", "p50", "/", "probe", "group", "/", "alone"}, strings.Fields(lines[0]))
	require.Contains(t, lines[1], "append 256 B, "+flushName)
	for i, line := range lines[2:] {
		want := []string{"begin", "begin, finish"}[i/6] + " " + []string{"1", "8", "64"}[i/2%3] + " " + []string{"group", "alone"}[i%2] + " "
		require.True(t, strings.HasPrefix(strings.Join(strings.Fields(line), " "), want), "%q does not begin with %q", line, want)
	}
}

func TestTheGateFailsWhereGroupCommitBringsTooLittle(t *testing.T) {
	group, alone := kind{false, gatedWriters, false}, kind{false, gatedWriters, true}
	of := func(perSecond, p50 float64) *board {
		return &board{
			got:    map[kind][]figures{group: {{perSecond: perSecond, p50: p50}}, alone: {{perSecond: 1000, p50: 60_000}}},
			probes: []figures{{p50: 200}},
		}
	}
	require.NoError(t, of(6000, 2400).check())
	require.ErrorContains(t, of(5900, 2400).check(), "5.9 times the operations of 64 writers")
	require.ErrorContains(t, of(6000, 2500).check(), "12.5 times the probe's")
}

func TestTheFirstFailureEndsTheMeasurement(t *testing.T) {
	broken := errors.New("the disk is full")
	_, err := timed(3, time.Minute, func() error { return broken })
	require.ErrorIs(t, err, broken)
}
