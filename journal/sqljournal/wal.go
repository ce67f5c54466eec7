package sqljournal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/bits"
	"os"
	"time"
)

// SQLite reads its log up to the first frame that is not right and takes the
// rest for a transaction that a crash cut off. If a bit fell in the middle, all
// that was committed behind it would be dropped in silence. So the log is read
// here first, after https://sqlite.org/fileformat2.html#walformat.
//
// A commit is on the disk before the next transaction writes its first frame.
// A crash can therefore spoil the frames of one transaction only, the last.
// Damage is what cannot be that: behind the first bad frame, or in it, a
// transaction was committed and another one was built upon it.
//
// What cannot be told apart from a cut off transaction, and is dropped by
// SQLite, is damage within the last transaction. It is the last two if damage takes
// the whole header of a commit's frame away, or if that header lies across two
// sectors (1 frame in 64). Single flipped bits anywhere else are found. When a journal is closed its log is emptied, so all
// this matters only after a crash.
//
// To open and close the log is harmless: SQLite keeps its locks on the other files.

const (
	logHeader   = 32
	frameHeader = 24
	logMagic    = 0x377f0682 // the lowest bit says that checksums are big-endian
	logFormat   = 3007000
)

// checkLog reports damage to the log of the database at path. Another process may be writing
// it at this moment. What one look proves to have been committed must be whole
// when the next look comes to it, unless the log was started anew. So it is
// damage only if two looks at the same log agree on the place.
func checkLog(path string) error {
	var last logDamage
	for range 100 {
		d, err := scanLog(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // nothing to scan; others decide whether it should be there
		case err != nil:
			return fmt.Errorf("sqljournal: %w", err)
		case d.text == "":
			return nil
		case d == last:
			return &FileError{path + "-wal", ErrDamagedLog, d.text}
		}
		last = d
		time.Sleep(2 * time.Millisecond) // a writer needs that long for what it began
	}
	return nil // it changes all the time, so somebody works with it
}

// logDamage is where the log is damaged; the zero value: it is not.
type logDamage struct {
	header [logHeader]byte
	text   string
}

// scanLog looks at the log once.
func scanLog(path string) (logDamage, error) {
	f, err := os.Open(path + "-wal")
	if err != nil {
		return logDamage{}, err
	}
	defer func() { _ = f.Close() }() // only read
	var d logDamage
	switch _, err := io.ReadFull(f, d.header[:]); {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return logDamage{}, nil // nothing was ever committed to it
	case err != nil:
		return d, err
	}
	s := logScan{header: d.header[:]}
	if !s.start() {
		same, err := writtenBack(path, f)
		if err == nil && !same {
			d.text = "its header is not what was written, and what is behind it is not in the database"
			return d, nil
		}
		return logDamage{}, err
	}
	r := io.NewSectionReader(f, logHeader, 1<<62)
	frame := make([]byte, frameHeader+s.page)
	for {
		if _, err := io.ReadFull(r, frame); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return logDamage{}, nil
			}
			return d, err
		}
		if s.next(frame) {
			d.text = fmt.Sprintf("frame %d is not what was written, and a transaction that was committed later stands behind it", s.bad)
			return d, nil
		}
	}
}

// writtenBack reports whether the database has the newest version of every
// page that was committed to the log, so that the log may be dropped, as SQLite
// does with one whose header is not right. That is so if a crash cut off the writing
// of a new header: the log is started anew only when all of it was written
// back. The header is on the disk before the first frame is written.
func writtenBack(path string, f *os.File) (bool, error) {
	db, err := pagesOf(path)
	if err != nil {
		return false, err
	}
	defer db.close()
	frame := make([]byte, frameHeader+db.size)
	r := io.NewSectionReader(f, logHeader, 1<<62)
	var salts [8]byte
	committed, open := map[uint32]int64{}, map[uint32]int64{} // where the page's newest version is
	var pages uint32                                          // of the database after the last commit
	for at := int64(logHeader); ; at += int64(len(frame)) {
		if _, err := io.ReadFull(r, frame); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		} else if err != nil {
			return false, err
		}
		if own := [8]byte(frame[8:16]); at == logHeader {
			salts = own
		} else if own != salts {
			break // of an earlier start
		}
		open[binary.BigEndian.Uint32(frame)] = at + frameHeader
		if commits(frame) {
			maps.Copy(committed, open)
			clear(open)
			pages = binary.BigEndian.Uint32(frame[4:])
		}
	}
	page := make([]byte, db.size)
	for number, at := range committed {
		if number > pages {
			continue // the database was cut to fewer pages
		}
		if _, err := f.ReadAt(page, at); err != nil {
			return false, err
		}
		if in, err := db.page(number); err != nil || !bytes.Equal(page, in) {
			return false, err
		}
	}
	return true, nil
}

// logScan follows the frames of one log.
type logScan struct {
	header []byte
	order  binary.ByteOrder
	page   int

	n   int       // of the frame, from 1
	bad int       // the first that is not right; 0: none yet
	sum [2]uint32 // what the next frame's checksum continues

	// Behind the first bad frame: whether the last one was a commit of this
	// log, and which checksums the next one would continue if it is the next
	// transaction.
	committed bool
	seeds     [2][2]uint32
}

// start reads the header; false: it is none.
func (s *logScan) start() bool {
	magic := binary.BigEndian.Uint32(s.header)
	if magic&^1 != logMagic || binary.BigEndian.Uint32(s.header[4:]) != logFormat {
		return false
	}
	s.order = binary.LittleEndian
	if magic&1 != 0 {
		s.order = binary.BigEndian
	}
	size := binary.BigEndian.Uint32(s.header[8:])
	if size < 512 || size > 65536 || bits.OnesCount32(size) != 1 {
		return false
	}
	s.page = int(size)
	s.sum = s.checksum([2]uint32{}, s.header[:24])
	return s.sum == stored(s.header[24:])
}

// next reports whether frame proves that there is damage before it.
func (s *logScan) next(frame []byte) (damage bool) {
	s.n++
	head, page := frame[:frameHeader], frame[frameHeader:]
	own := [8]byte(head[8:16]) == [8]byte(s.header[16:24]) // the salts of this log
	sum := stored(head[16:])
	if s.bad == 0 {
		computed := s.frame(s.sum, head, page)
		if own && computed == sum {
			s.sum = sum
			return false
		}
		s.bad = s.n
		// One of the two checksums is what the next frame continues: it was
		// the content that changed, or the checksum. If it was the salt, both.
		s.committed = commits(head) && (own && !s.split() || computed == sum) || s.wasCommit(s.sum, head, page)
		s.seeds = [2][2]uint32{sum, computed}
		return false
	}
	follows := false
	for _, seed := range s.seeds {
		follows = follows || own && s.frame(seed, head, page) == sum
	}
	if follows && s.committed {
		return true
	}
	s.committed = own && commits(head) && (follows || !s.split())
	s.seeds = [2][2]uint32{sum, sum}
	return false
}

// split reports whether the mark of a commit lies in another sector than the
// salts, so that a crash can leave new salts beside the mark of an old frame.
func (s *logScan) split() bool {
	const sector = 512
	at := logHeader + int64(s.n-1)*int64(frameHeader+s.page)
	return (at+4)/sector != (at+8)/sector
}

// commits: the frame is the last of its transaction.
func commits(head []byte) bool { return binary.BigEndian.Uint32(head[4:]) != 0 }

// wasCommit reports whether head is that of a commit in which one bit fell so
// that it looks like none.
func (s *logScan) wasCommit(seed [2]uint32, head, page []byte) bool {
	if commits(head) {
		return false
	}
	for bit := range 32 {
		var fixed [frameHeader]byte
		copy(fixed[:], head)
		binary.BigEndian.PutUint32(fixed[4:], 1<<bit)
		if s.frame(seed, fixed[:], page) == stored(head[16:]) {
			return true
		}
	}
	return false
}

func (s *logScan) frame(seed [2]uint32, head, page []byte) [2]uint32 {
	return s.checksum(s.checksum(seed, head[:8]), page)
}

// checksum continues sum with b, whose length is a multiple of 8.
func (s *logScan) checksum(sum [2]uint32, b []byte) [2]uint32 {
	for len(b) >= 8 {
		sum[0] += s.order.Uint32(b) + sum[1]
		sum[1] += s.order.Uint32(b[4:]) + sum[0]
		b = b[8:]
	}
	return sum
}

func stored(b []byte) [2]uint32 {
	return [2]uint32{binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])}
}
