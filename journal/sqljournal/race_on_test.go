//go:build race

package sqljournal_test

// raceEnabled: the race detector makes everything ten times slower.
const raceEnabled = true
