package faultvfs

import sqlite3 "modernc.org/sqlite/lib"

// Op is a kind of call.
type Op int

// The calls that can fail, each with the code that is usual for it.
const (
	// Open: SQLITE_CANTOPEN.
	Open Op = iota + 1
	// Read: SQLITE_IOERR_READ.
	Read
	// Write: SQLITE_IOERR_WRITE; [Full] is the other usual one.
	Write
	// Sync: SQLITE_IOERR_FSYNC. As on Linux, what was written before a sync that
	// failed may never reach the disk, whatever later syncs say.
	Sync
	// Truncate: SQLITE_IOERR_TRUNCATE.
	Truncate
	// Delete: SQLITE_IOERR_DELETE.
	Delete
	// Map of shared memory: SQLITE_IOERR_SHMMAP.
	Map
)

// String is the name of the call.
func (o Op) String() string {
	return [...]string{"any call", "open", "read", "write", "sync", "truncate", "delete", "map"}[o]
}

// File is a kind of file.
type File int

// The files of a database.
const (
	// AnyFile is all of them.
	AnyFile File = iota
	// Main is the database itself.
	Main
	// WAL is the write-ahead log, -wal.
	WAL
	// SharedMemory is -shm; only [Map] concerns it.
	SharedMemory
	// RollbackJournal is -journal.
	RollbackJournal
)

// String is the kind as one would say it.
func (f File) String() string {
	return [...]string{"any file", "main", "wal", "shm", "journal"}[f]
}

// Full is SQLITE_FULL, the code of a full disk.
const Full = sqlite3.SQLITE_FULL

// Fault says which calls fail.
type Fault struct {
	// Op that fails; it must be set.
	Op Op
	// File that it fails for; zero: any.
	File File
	// At is the number of the first call that fails, counted from 1 among the
	// calls of Op on File since Fail. 0: 1.
	At int
	// Times it fails; 0: once, negative: for ever.
	Times int
	// Code that it fails with; 0: the usual one of Op.
	Code int32
	// Torn lets a write do the first half of its bytes before it fails.
	Torn bool
}

// armed is a fault and what became of it.
type armed struct {
	Fault
	seen, fired int
}

type call struct {
	op   Op
	file File
}

// Fail replaces the faults; none: all calls pass from now on.
func (v *VFS) Fail(faults ...Fault) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.faults = nil
	for _, f := range faults {
		f.At, f.Code = max(f.At, 1), f.code()
		if f.Times == 0 {
			f.Times = 1
		}
		v.faults = append(v.faults, &armed{Fault: f})
	}
}

func (f Fault) code() int32 {
	if f.Code != 0 {
		return f.Code
	}
	return [...]int32{
		Open:     sqlite3.SQLITE_CANTOPEN,
		Read:     sqlite3.SQLITE_IOERR_READ,
		Write:    sqlite3.SQLITE_IOERR_WRITE,
		Sync:     sqlite3.SQLITE_IOERR_FSYNC,
		Truncate: sqlite3.SQLITE_IOERR_TRUNCATE,
		Delete:   sqlite3.SQLITE_IOERR_DELETE,
		Map:      sqlite3.SQLITE_IOERR_SHMMAP,
	}[f.Op]
}

// Fired is how many calls the faults of the last Fail have failed. A test that
// counts At upwards is through when it is 0.
func (v *VFS) Fired() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := 0
	for _, f := range v.faults {
		n += f.fired
	}
	return n
}

// Calls is how many calls of o there were on f since New, those that failed
// too.
func (v *VFS) Calls(o Op, f File) int {
	v.mu.Lock()
	defer v.mu.Unlock()
	if f != AnyFile {
		return v.calls[call{o, f}]
	}
	n := 0
	for c, times := range v.calls {
		if c.op == o {
			n += times
		}
	}
	return n
}

// fails counts a call and says with which code it fails; 0: it does not. v.mu
// is held.
func (v *VFS) fails(o Op, f File) (code int32, torn bool) {
	v.calls[call{o, f}]++
	for _, a := range v.faults {
		if a.Op != o || a.File != AnyFile && a.File != f {
			continue
		}
		a.seen++
		if code == 0 && a.seen >= a.At && (a.Times < 0 || a.seen < a.At+a.Times) {
			a.fired++
			code, torn = a.Code, a.Torn
		}
	}
	return code, torn
}
