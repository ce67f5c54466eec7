package faultvfs

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
)

// Trace is what was done to the files, in order.
type Trace struct {
	events []event
	names  map[string]int // the file that a path names now
	known  map[string]bool
	infos  map[int]fs.FileInfo // tells files by what they are, not by name
	files  int
}

type action int

const (
	found action = iota
	linked
	created
	wrote
	truncated
	synced
	syncFailed
	deleted
)

type event struct {
	action  action
	path    string // found, linked, created, deleted
	ino     int
	off     int64 // wrote; truncated: the size
	data    []byte
	dirSync bool // the folder became durable too
}

func (t *Trace) knows(path string) bool { return t.known[path] }

func (t *Trace) name(path string) int {
	if t.names == nil {
		t.names, t.known, t.infos = map[string]int{}, map[string]bool{}, map[int]fs.FileInfo{}
	}
	t.files++
	t.names[path], t.known[path] = t.files, true
	return t.files
}

func (t *Trace) found(path string, content []byte) {
	t.events = append(t.events, event{action: found, path: path, ino: t.name(path), data: content})
}

// linked reports whether the file of info is known under another name, which
// was then given to it by others; that name counts as durable. So does the end
// of names that it has lost since.
func (t *Trace) linked(path string, info fs.FileInfo) bool {
	for ino, known := range t.infos {
		if os.SameFile(known, info) {
			for old, other := range t.names {
				if _, err := os.Lstat(old); other == ino && errors.Is(err, fs.ErrNotExist) {
					t.events = append(t.events, event{action: deleted, path: old, dirSync: true})
					delete(t.names, old)
				}
			}
			t.names[path], t.known[path] = ino, true
			t.events = append(t.events, event{action: linked, path: path, ino: ino})
			return true
		}
	}
	return false
}

func (t *Trace) opened(f *file, path string) {
	ino, ok := t.names[path]
	if !ok {
		ino = t.name(path)
		t.events = append(t.events, event{action: created, path: path, ino: ino})
	}
	f.ino = ino
	if info, err := os.Stat(path); err == nil {
		t.infos[ino] = info
	}
}

func (t *Trace) wrote(f *file, off int64, data []byte) {
	t.events = append(t.events, event{action: wrote, ino: f.ino, off: off, data: bytes.Clone(data)})
}

func (t *Trace) truncated(f *file, size int64) {
	t.events = append(t.events, event{action: truncated, ino: f.ino, off: size})
}

func (t *Trace) synced(f *file, ok bool) {
	e := event{action: syncFailed, ino: f.ino}
	if ok {
		e.action, e.dirSync = synced, f.dirSync
		f.dirSync = false
	}
	t.events = append(t.events, e)
}

func (t *Trace) deleted(path string, syncDir bool) {
	t.events = append(t.events, event{action: deleted, path: path, ino: t.names[path], dirSync: syncDir})
	delete(t.infos, t.names[path]) // the system may use its number again
	delete(t.names, path)
}

// Position is how many changes were recorded so far: what a call has made
// durable when it returns must survive a power loss after any later one.
func (v *VFS) Position() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.trace.events)
}

// Trace is the recording so far.
func (v *VFS) Trace() *Trace {
	v.mu.Lock()
	defer v.mu.Unlock()
	return &Trace{events: slices.Clone(v.trace.events)}
}

// Crash writes into dir what a power loss now could leave of the files; each
// seed is another such state. Options.Record must be set.
func (v *VFS) Crash(dir string, seed uint64) error {
	var now *Disk
	for _, d := range v.Trace().Disks() {
		now = d
	}
	return now.Crash(rand.New(rand.NewPCG(seed, seed))).Write(dir)
}

// Len is how many changes the trace has.
func (t *Trace) Len() int { return len(t.events) }

// Disks yields the disk after 0, 1, 2, ... all changes. It is the same one each
// time, so that it must not be used after its turn.
func (t *Trace) Disks() iter.Seq2[int, *Disk] {
	return func(yield func(int, *Disk) bool) {
		d := &Disk{files: map[int]*inode{}, durable: map[string]int{}}
		if !yield(0, d) {
			return
		}
		for i, e := range t.events {
			d.apply(e)
			if !yield(i+1, d) {
				return
			}
		}
	}
}

// Disk is what is durable and what is not yet.
type Disk struct {
	files   map[int]*inode
	durable map[string]int // the folder
	pending []entry        // changes of the folder, in order
}

// entry is a path that names another file, or, with ino 0, none.
type entry struct {
	path string
	ino  int
}

const (
	pageSize   = 4096 // of the system's cache
	sectorSize = 512  // what a disk writes as one
)

type inode struct {
	cache   []byte // as it reads now
	durable []byte
	pending []change       // since the last sync, in order
	lost    map[int64]bool // pages that a failed sync left clean, but not durable
}

// change is data at off, or, where data is nil, a truncation to off.
type change struct {
	off  int64
	data []byte
}

func (c change) onto(b []byte) []byte {
	if c.data == nil {
		return resize(b, c.off)
	}
	if end := c.off + int64(len(c.data)); end > int64(len(b)) {
		b = resize(b, end)
	}
	copy(b[c.off:], c.data)
	return b
}

func resize(b []byte, size int64) []byte {
	if size <= int64(len(b)) {
		return b[:size:size]
	}
	return append(b, make([]byte, size-int64(len(b)))...)
}

// pages are the numbers of the pages that c touches.
func (c change) pages(yield func(int64) bool) {
	for p := c.off / pageSize; p*pageSize < c.off+int64(len(c.data)); p++ {
		if !yield(p) {
			return
		}
	}
}

func (d *Disk) apply(e event) {
	f := d.files[e.ino]
	switch e.action {
	case found:
		d.files[e.ino] = &inode{cache: bytes.Clone(e.data), durable: bytes.Clone(e.data)}
		d.durable[e.path] = e.ino
	case linked:
		d.durable[e.path] = e.ino
	case created:
		d.files[e.ino] = &inode{}
		d.pending = append(d.pending, entry{e.path, e.ino})
	case deleted:
		d.pending = append(d.pending, entry{e.path, 0})
	case wrote:
		f.change(change{e.off, e.data})
	case truncated:
		f.change(change{e.off, nil})
	case synced:
		f.sync()
	case syncFailed:
		f.syncFailed()
	}
	if e.dirSync {
		for _, p := range d.pending {
			p.onto(d.durable)
		}
		d.pending = nil
	}
}

func (e entry) onto(dir map[string]int) {
	if e.ino == 0 {
		delete(dir, e.path)
		return
	}
	dir[e.path] = e.ino
}

func (f *inode) change(c change) {
	f.cache = c.onto(f.cache)
	f.pending = append(f.pending, c)
	for p := range c.pages {
		if f.lost[p] { // dirty again, with all that is in it
			delete(f.lost, p)
			from := p * pageSize
			to := min(from+pageSize, int64(len(f.cache)))
			f.pending = append(f.pending, change{from, bytes.Clone(f.cache[from:to])})
		}
	}
}

func (f *inode) sync() {
	for _, c := range f.pending {
		f.durable = c.onto(f.durable)
	}
	f.pending = nil
}

// syncFailed is Linux: the pages count as clean from now on, so that no later
// sync writes them, unless they are written to again.
func (f *inode) syncFailed() {
	for _, c := range f.pending {
		if c.data == nil {
			f.durable = c.onto(f.durable)
		}
		for p := range c.pages {
			if f.lost == nil {
				f.lost = map[int64]bool{}
			}
			f.lost[p] = true
		}
	}
	f.pending = nil
}

// State is a folder after a crash.
type State struct {
	// Files are the contents by the base of their path.
	Files map[string][]byte
	// How it was made, for people.
	How string
}

// Crash is the disk after a power loss: what was synced is there; of the rest
// rnd chooses, sector by sector where it likes, what is lost, kept or torn, and
// in which order it came to the disk.
func (d *Disk) Crash(rnd *rand.Rand) State {
	dir := maps.Clone(d.durable)
	// Changes of the folder reach the disk each by itself, but those of one
	// path in order.
	stopped := map[string]bool{}
	all, none := rnd.IntN(4) == 0, rnd.IntN(4) == 0
	for _, e := range d.pending {
		if none && !all || !all && rnd.IntN(2) == 0 {
			stopped[e.path] = true
		}
		if !stopped[e.path] {
			e.onto(dir)
		}
	}
	how := loss(rnd.IntN(int(losses)))
	out := State{map[string][]byte{}, how.String()}
	linked := map[int][]byte{}
	for _, path := range slices.Sorted(maps.Keys(dir)) {
		ino := dir[path]
		if _, ok := linked[ino]; !ok {
			linked[ino] = d.files[ino].crash(how, rnd)
		}
		out.Files[filepath.Base(path)] = linked[ino]
	}
	return out
}

// loss is what becomes of the changes that were not synced.
type loss int

const (
	loseAll loss = iota
	keepAll
	loseTail    // the first ones are kept, the next is torn
	loseSome    // each by itself, whole
	loseSectors // sectors, each by itself
	reorder     // like loseSectors, and an older one may overwrite a newer
	losses
)

func (l loss) String() string {
	return [...]string{"all is lost", "all is kept", "the tail is lost", "some are lost", "some sectors are lost", "reordered"}[l]
}

func (f *inode) crash(how loss, rnd *rand.Rand) []byte {
	b := bytes.Clone(f.durable)
	for _, p := range slices.Sorted(maps.Keys(f.lost)) {
		from, to := p*pageSize, min((p+1)*pageSize, int64(len(f.cache)))
		if from < to && (how == keepAll || how != loseAll && rnd.IntN(2) == 0) {
			b = change{from, f.cache[from:to]}.onto(b)
		}
	}
	var kept []change
	tail := 0
	if len(f.pending) > 0 {
		tail = rnd.IntN(len(f.pending))
	}
	for i, c := range f.pending {
		switch how {
		case loseAll:
		case keepAll:
			kept = append(kept, c)
		case loseTail:
			if i < tail {
				kept = append(kept, c)
			} else if i == tail && c.data != nil {
				kept = append(kept, change{c.off, c.data[:rnd.IntN(len(c.data)+1)]})
			}
		case loseSome:
			if rnd.IntN(2) == 0 {
				kept = append(kept, c)
			}
		case loseSectors, reorder:
			for _, s := range c.sectors() {
				if rnd.IntN(2) == 0 {
					kept = append(kept, s)
				}
			}
		}
	}
	if how == reorder {
		rnd.Shuffle(len(kept), func(i, j int) { kept[i], kept[j] = kept[j], kept[i] })
	}
	for _, c := range kept {
		b = c.onto(b)
	}
	// The file may have its new size without the data: zeros, or what was on
	// the disk before.
	if size := int64(len(f.cache)); size > int64(len(b)) && how != loseAll && rnd.IntN(2) == 0 {
		old := int64(len(b))
		b = resize(b, size)
		if rnd.IntN(2) == 0 {
			for i := range b[old:] {
				b[old+int64(i)] = byte(rnd.Uint32())
			}
		}
	}
	return b
}

// sectors is c in pieces that reach the disk each by itself.
func (c change) sectors() []change {
	if c.data == nil {
		return []change{c}
	}
	var out []change
	for off, rest := c.off, c.data; len(rest) > 0; {
		n := min(sectorSize-off%sectorSize, int64(len(rest)))
		out = append(out, change{off, rest[:n]})
		off, rest = off+n, rest[n:]
	}
	return out
}

// Sum tells different states apart.
func (s State) Sum() [sha256.Size]byte {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(s.Files)) {
		_, _ = fmt.Fprintf(h, "%q %d\n", name, len(s.Files[name]))
		_, _ = h.Write(s.Files[name])
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// Write writes the files into dir, which must exist, and removes what else is
// in it.
func (s State) Write(dir string) error {
	old, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("faultvfs: %w", err)
	}
	for _, o := range old {
		if err := os.RemoveAll(filepath.Join(dir, o.Name())); err != nil {
			return fmt.Errorf("faultvfs: %w", err)
		}
	}
	for name, content := range s.Files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return fmt.Errorf("faultvfs: %w", err)
		}
	}
	return nil
}
