//go:build !race

package idem_test

const raceDetector = false

const slowness = 1
