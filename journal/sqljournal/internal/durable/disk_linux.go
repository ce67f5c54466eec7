package main

import (
	"os"
	"syscall"
)

const flushName = "fdatasync"

func flush(f *os.File) error { return syscall.Fdatasync(int(f.Fd())) }

// inMemory reports whether dir is on a tmpfs or ramfs.
func inMemory(dir string) bool {
	const tmpfs, ramfs = 0x01021994, 0x858458f6
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return false
	}
	return uint32(s.Type) == tmpfs || uint32(s.Type) == ramfs
}
