//go:build race

package idem_test

// raceDetector: the detector adds allocations of its own and makes sync.Pool
// drop values at random, so counts mean nothing under it.
const raceDetector = true

// slowness of everything under it.
const slowness = 4
