//go:build race

package journal_test

// raceDetector: the detector's own memory counts as ours, and a million
// entries take it too long.
const raceDetector = true
