//go:build race

package idem_test

// raceDetector: the detector adds allocations of its own and makes sync.Pool
// drop values at random, so counts mean nothing under it.
const raceDetector = true

// slowness divides how much the longest tests do.
const slowness = 4
