//go:build !race

package sqljournal_test

const raceEnabled = false
