//go:build !linux

package main

import "os"

const flushName = "flush"

func flush(f *os.File) error { return f.Sync() }

// inMemory is known on Linux alone.
func inMemory(string) bool { return false }
