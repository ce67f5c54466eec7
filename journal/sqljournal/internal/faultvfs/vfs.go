// Package faultvfs is a disk that fails on demand, for tests of what SQLite
// does on it. It stands between SQLite and its default VFS, so that the files
// are real files and locks and shared memory are the real ones, and it can
//
//   - fail chosen calls: the nth write, every sync from the third on;
//   - record what was written and synced, and write copies of the files as a
//     power loss at any moment could have left them.
//
// It needs no change in the code under test: its name goes into the DSN
// (?vfs=name), or it becomes the default VFS for one folder.
package faultvfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"modernc.org/libc"
	sqlite3 "modernc.org/sqlite/lib"
)

// ErrInUse: a file is still open through the VFS.
var ErrInUse = errors.New("faultvfs: a file is still open")

// Options of a VFS. The zero value passes everything on.
type Options struct {
	// Dir limits faults, counts and the recording to files in this folder,
	// not in folders below it; all else passes through. "": no limit.
	Dir string
	// Default makes it the VFS of all connections that name none, until Close.
	// Dir must be set, so that it does not meddle with other tests.
	Default bool
	// Record what is written, for Crash and Trace. A file that exists before
	// it is opened through the VFS is read once; nothing else in the process
	// may have it open then, or its POSIX locks are lost.
	Record bool
	// NoSync records and counts syncs but does not pass them on, which makes
	// tests faster and changes nothing else while the machine is up.
	NoSync bool
	// Lies is a disk that answers syncs with success and keeps no word of it,
	// to prove that a test notices what is lost then.
	Lies bool
}

// VFS is registered with SQLite from New to Close. It is safe for concurrent
// use; it does one call at a time.
type VFS struct {
	name    string
	options Options
	real    uintptr // *sqlite3_vfs of the default
	self    uintptr // *sqlite3_vfs of this one

	mu     sync.Mutex // guards all below, and the real calls that change files
	open   int
	faults []*armed
	calls  map[call]int
	trace  Trace
}

// file is one open file.
type file struct {
	vfs     *VFS // nil: not ours to touch
	owner   *VFS
	kind    File
	ino     int
	dirSync bool // the next sync also makes the folder durable
}

// shim is what SQLite's memory for an open file begins with; the real file
// follows it.
type shim struct {
	methods uintptr
	handle  uintptr
}

const shimSize = unsafe.Sizeof(shim{})

// SQLite's structs cannot hold Go pointers, so they hold handles.
var (
	handles    sync.Map // of uintptr to *VFS or *file
	lastHandle atomic.Uintptr
)

func newHandle(x any) uintptr {
	h := lastHandle.Add(1)
	handles.Store(h, x)
	return h
}

// at is the memory that an address of SQLite's names.
func at[T any](p uintptr) *T { return *(**T)(unsafe.Pointer(&p)) }

// function makes a C function pointer callable, and address is the reverse.
// Only functions of the package's top level have an address that lasts.
func function[F any](p uintptr) F { return *(*F)(unsafe.Pointer(&p)) }
func address[F any](f F) uintptr  { return *(*uintptr)(unsafe.Pointer(&f)) }

type (
	cVFS     = sqlite3.Tsqlite3_vfs
	cMethods = sqlite3.Tsqlite3_io_methods

	openFunc   = func(tls *libc.TLS, vfs, name, file uintptr, flags int32, outFlags uintptr) int32
	deleteFunc = func(tls *libc.TLS, vfs, name uintptr, syncDir int32) int32
	rwFunc     = func(tls *libc.TLS, file, buf uintptr, n int32, off int64) int32
	offFunc    = func(tls *libc.TLS, file uintptr, off int64) int32
	intFunc    = func(tls *libc.TLS, file uintptr, n int32) int32
	plainFunc  = func(tls *libc.TLS, file uintptr) int32
	outFunc    = func(tls *libc.TLS, file, out uintptr) int32
	ctlFunc    = func(tls *libc.TLS, file uintptr, op int32, arg uintptr) int32
	mapFunc    = func(tls *libc.TLS, file uintptr, region, size, extend int32, out uintptr) int32
	lockFunc   = func(tls *libc.TLS, file uintptr, off, n, flags int32) int32
	voidFunc   = func(tls *libc.TLS, file uintptr)
)

// methods is the table of all files; it lives as long as the process.
var methods = sync.OnceValue(func() uintptr {
	tls := libc.NewTLS()
	defer tls.Close()
	p := libc.Xcalloc(tls, 1, libc.Tsize_t(unsafe.Sizeof(cMethods{})))
	*at[cMethods](p) = cMethods{
		FiVersion:               2, // with shared memory, without mmap, which would go round Read
		FxClose:                 address(plainFunc(xClose)),
		FxRead:                  address(rwFunc(xRead)),
		FxWrite:                 address(rwFunc(xWrite)),
		FxTruncate:              address(offFunc(xTruncate)),
		FxSync:                  address(intFunc(xSync)),
		FxFileSize:              address(outFunc(xFileSize)),
		FxLock:                  address(intFunc(xLock)),
		FxUnlock:                address(intFunc(xUnlock)),
		FxCheckReservedLock:     address(outFunc(xCheckReservedLock)),
		FxFileControl:           address(ctlFunc(xFileControl)),
		FxSectorSize:            address(plainFunc(xSectorSize)),
		FxDeviceCharacteristics: address(plainFunc(xDeviceCharacteristics)),
		FxShmMap:                address(mapFunc(xShmMap)),
		FxShmLock:               address(lockFunc(xShmLock)),
		FxShmBarrier:            address(voidFunc(xShmBarrier)),
		FxShmUnmap:              address(intFunc(xShmUnmap)),
	}
	return p
})

// New registers a VFS over the one that is the default now.
func New(o Options) (*VFS, error) {
	if o.Default && o.Dir == "" {
		return nil, errors.New("faultvfs: Options.Default needs Options.Dir")
	}
	if o.Dir != "" {
		dir, err := filepath.EvalSymlinks(o.Dir) // SQLite resolves them too
		if err != nil {
			return nil, fmt.Errorf("faultvfs: Options.Dir: %w", err)
		}
		if o.Dir, err = filepath.Abs(dir); err != nil {
			return nil, fmt.Errorf("faultvfs: Options.Dir: %w", err)
		}
	}
	tls := libc.NewTLS()
	defer tls.Close()
	if rc := sqlite3.Xsqlite3_initialize(tls); rc != sqlite3.SQLITE_OK {
		return nil, fmt.Errorf("faultvfs: initialize: code %d", rc)
	}
	v := &VFS{options: o, calls: map[call]int{}, real: sqlite3.Xsqlite3_vfs_find(tls, 0)}
	if v.real == 0 {
		return nil, errors.New("faultvfs: there is no default VFS")
	}
	h := newHandle(v)
	v.name = fmt.Sprintf("fault%d", h)
	cname, err := libc.CString(v.name)
	if err != nil {
		return nil, fmt.Errorf("faultvfs: %w", err)
	}
	v.self = libc.Xcalloc(tls, 1, libc.Tsize_t(unsafe.Sizeof(cVFS{})))
	// What is not replaced here does not look at the struct it is called with.
	c := *at[cVFS](v.real)
	c.FiVersion = min(c.FiVersion, 2)
	c.FszOsFile += int32(shimSize)
	c.FpNext, c.FzName, c.FpAppData = 0, cname, h
	c.FxOpen, c.FxDelete = address(openFunc(xOpen)), address(deleteFunc(xDelete))
	*at[cVFS](v.self) = c
	if rc := sqlite3.Xsqlite3_vfs_register(tls, v.self, libc.Bool32(o.Default)); rc != sqlite3.SQLITE_OK {
		return nil, fmt.Errorf("faultvfs: register: code %d", rc)
	}
	return v, nil
}

// Name of the VFS, for ?vfs= in a DSN.
func (v *VFS) Name() string { return v.name }

// Close takes the VFS back from SQLite. ErrInUse: close the databases first.
func (v *VFS) Close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.open > 0 {
		return fmt.Errorf("%w: %d files", ErrInUse, v.open)
	}
	tls := libc.NewTLS()
	defer tls.Close()
	// The struct is not freed: a connection in memory may still point at it.
	if rc := sqlite3.Xsqlite3_vfs_unregister(tls, v.self); rc != sqlite3.SQLITE_OK {
		return fmt.Errorf("faultvfs: unregister: code %d", rc)
	}
	return nil
}

// ours reports whether faults, counts and the recording are for this file.
func (v *VFS) ours(path string) bool {
	return path != "" && (v.options.Dir == "" || filepath.Dir(path) == v.options.Dir)
}

func kindOf(path string) File {
	switch {
	case strings.HasSuffix(path, "-wal"):
		return WAL
	case strings.HasSuffix(path, "-journal"):
		return RollbackJournal
	}
	return Main
}

func xOpen(tls *libc.TLS, pVFS, zName, pFile uintptr, flags int32, outFlags uintptr) int32 {
	*at[shim](pFile) = shim{} // without methods SQLite does not close it
	x, _ := handles.Load(at[cVFS](pVFS).FpAppData)
	v := x.(*VFS)
	path := ""
	if zName != 0 {
		path = libc.GoString(zName)
	}
	f := &file{owner: v, kind: kindOf(path)}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ours(path) {
		f.vfs = v
		if rc, _ := v.fails(Open, f.kind); rc != 0 {
			return rc
		}
		if err := v.meet(f, path); err != nil {
			return sqlite3.SQLITE_CANTOPEN
		}
		const journals = sqlite3.SQLITE_OPEN_WAL | sqlite3.SQLITE_OPEN_MAIN_JOURNAL | sqlite3.SQLITE_OPEN_SUPER_JOURNAL
		f.dirSync = flags&sqlite3.SQLITE_OPEN_CREATE != 0 && flags&journals != 0
	}
	rc := function[openFunc](at[cVFS](v.real).FxOpen)(tls, v.real, zName, pFile+shimSize, flags, outFlags)
	if rc != sqlite3.SQLITE_OK {
		return rc
	}
	if f.vfs != nil && v.options.Record {
		v.trace.opened(f, path)
	}
	v.open++
	*at[shim](pFile) = shim{methods: methods(), handle: newHandle(f)}
	return sqlite3.SQLITE_OK
}

// meet reads a file that was there before the recording, or was linked since.
func (v *VFS) meet(f *file, path string) error {
	if !v.options.Record || v.trace.knows(path) {
		return nil
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case v.trace.linked(path, info):
		return nil
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	v.trace.found(path, content)
	return nil
}

func xDelete(tls *libc.TLS, pVFS, zName uintptr, syncDir int32) int32 {
	x, _ := handles.Load(at[cVFS](pVFS).FpAppData)
	v := x.(*VFS)
	path := libc.GoString(zName)
	v.mu.Lock()
	defer v.mu.Unlock()
	ours := v.ours(path)
	if ours {
		if rc, _ := v.fails(Delete, kindOf(path)); rc != 0 {
			return rc
		}
	}
	rc := function[deleteFunc](at[cVFS](v.real).FxDelete)(tls, v.real, zName, syncDir)
	if rc == sqlite3.SQLITE_OK && ours && v.options.Record {
		v.trace.deleted(path, syncDir != 0)
	}
	return rc
}

// under is an open file, the real one below it, and that one's methods.
func under(pFile uintptr) (f *file, real uintptr, m *cMethods) {
	x, _ := handles.Load(at[shim](pFile).handle)
	real = pFile + shimSize
	return x.(*file), real, at[cMethods](at[shim](real).methods)
}

func xClose(tls *libc.TLS, pFile uintptr) int32 {
	f, real, m := under(pFile)
	f.owner.mu.Lock()
	defer f.owner.mu.Unlock()
	rc := function[plainFunc](m.FxClose)(tls, real)
	handles.Delete(at[shim](pFile).handle)
	f.owner.open--
	return rc
}

func xRead(tls *libc.TLS, pFile, buf uintptr, n int32, off int64) int32 {
	f, real, m := under(pFile)
	if f.vfs != nil {
		f.vfs.mu.Lock()
		rc, _ := f.vfs.fails(Read, f.kind)
		f.vfs.mu.Unlock()
		if rc != 0 {
			return rc
		}
	}
	return function[rwFunc](m.FxRead)(tls, real, buf, n, off)
}

func xWrite(tls *libc.TLS, pFile, buf uintptr, n int32, off int64) int32 {
	f, real, m := under(pFile)
	write := function[rwFunc](m.FxWrite)
	v := f.vfs
	if v == nil {
		return write(tls, real, buf, n, off)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	failed, torn := v.fails(Write, f.kind)
	if failed != 0 {
		if n /= 2; !torn || n == 0 {
			return failed
		}
	}
	if rc := write(tls, real, buf, n, off); rc != sqlite3.SQLITE_OK {
		return rc
	}
	if v.options.Record {
		v.trace.wrote(f, off, unsafe.Slice(at[byte](buf), n))
	}
	return failed
}

func xTruncate(tls *libc.TLS, pFile uintptr, size int64) int32 {
	f, real, m := under(pFile)
	truncate := function[offFunc](m.FxTruncate)
	v := f.vfs
	if v == nil {
		return truncate(tls, real, size)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if rc, _ := v.fails(Truncate, f.kind); rc != 0 {
		return rc
	}
	rc := truncate(tls, real, size)
	if rc == sqlite3.SQLITE_OK && v.options.Record {
		v.trace.truncated(f, size)
	}
	return rc
}

func xSync(tls *libc.TLS, pFile uintptr, flags int32) int32 {
	f, real, m := under(pFile)
	sync := function[intFunc](m.FxSync)
	v := f.vfs
	if v == nil {
		return sync(tls, real, flags)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	rc, _ := v.fails(Sync, f.kind)
	if v.options.Lies {
		return rc
	}
	if rc == 0 && !v.options.NoSync {
		rc = sync(tls, real, flags)
	}
	if v.options.Record {
		v.trace.synced(f, rc == 0)
	}
	return rc
}

func xFileSize(tls *libc.TLS, pFile, out uintptr) int32 {
	_, real, m := under(pFile)
	return function[outFunc](m.FxFileSize)(tls, real, out)
}

func xLock(tls *libc.TLS, pFile uintptr, level int32) int32 {
	_, real, m := under(pFile)
	return function[intFunc](m.FxLock)(tls, real, level)
}

func xUnlock(tls *libc.TLS, pFile uintptr, level int32) int32 {
	_, real, m := under(pFile)
	return function[intFunc](m.FxUnlock)(tls, real, level)
}

func xCheckReservedLock(tls *libc.TLS, pFile, out uintptr) int32 {
	_, real, m := under(pFile)
	return function[outFunc](m.FxCheckReservedLock)(tls, real, out)
}

func xFileControl(tls *libc.TLS, pFile uintptr, op int32, arg uintptr) int32 {
	_, real, m := under(pFile)
	return function[ctlFunc](m.FxFileControl)(tls, real, op, arg)
}

func xSectorSize(tls *libc.TLS, pFile uintptr) int32 {
	_, real, m := under(pFile)
	return function[plainFunc](m.FxSectorSize)(tls, real)
}

// xDeviceCharacteristics promises no more than the states of Crash keep: a
// write changes no byte outside it. Batches that are atomic would be written
// past us.
func xDeviceCharacteristics(tls *libc.TLS, pFile uintptr) int32 {
	_, real, m := under(pFile)
	return function[plainFunc](m.FxDeviceCharacteristics)(tls, real) & sqlite3.SQLITE_IOCAP_POWERSAFE_OVERWRITE
}

func xShmMap(tls *libc.TLS, pFile uintptr, region, size, extend int32, out uintptr) int32 {
	f, real, m := under(pFile)
	if f.vfs != nil {
		f.vfs.mu.Lock()
		rc, _ := f.vfs.fails(Map, SharedMemory)
		f.vfs.mu.Unlock()
		if rc != 0 {
			*at[uintptr](out) = 0
			return rc
		}
	}
	return function[mapFunc](m.FxShmMap)(tls, real, region, size, extend, out)
}

func xShmLock(tls *libc.TLS, pFile uintptr, off, n, flags int32) int32 {
	_, real, m := under(pFile)
	return function[lockFunc](m.FxShmLock)(tls, real, off, n, flags)
}

func xShmBarrier(tls *libc.TLS, pFile uintptr) {
	_, real, m := under(pFile)
	function[voidFunc](m.FxShmBarrier)(tls, real)
}

func xShmUnmap(tls *libc.TLS, pFile uintptr, remove int32) int32 {
	_, real, m := under(pFile)
	return function[intFunc](m.FxShmUnmap)(tls, real, remove)
}
