package idem

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"hash/maphash"
	"io"
	"net/http"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
)

// body is where the bytes of an operation come from. Each attempt reads them
// through a reader of its own: the transport may still be reading the
// previous one. The caller's Body is closed exactly once on every path.
type body struct {
	kind   bodyKind
	length int64 // -1: not known
	opened int   // attempts that asked for a reader
	limit  int64 // Policy.MaxRequestBuffer

	getBody func() (io.ReadCloser, error)
	longest *attemptBody // where GetBody opens the readers: the one that read most
	source  *source      // of sections, buffered bodies and streams

	own ownBody
}

// source is what a body without GetBody is read from.
type source struct {
	data []byte // buffered, or the part of a stream that was read already

	at   io.ReaderAt // sections: from off
	off  int64
	file *os.File // nil: memory, which does not change
	info os.FileInfo

	mu       sync.Mutex // guards what follows
	open     int        // section readers that are not closed yet
	answered bool       // the last section reader closes the caller's body
}

type bodyKind int

const (
	noBody   bodyKind = iota
	reopened          // GetBody opens it again
	section           // independent section readers over a file or memory
	buffered          // in memory
	stream            // once
)

// ownBody is the caller's Body.
type ownBody struct {
	rc     io.ReadCloser
	closed atomic.Bool
}

func (b *ownBody) Close() error {
	if b.rc == nil || b.closed.Swap(true) {
		return nil
	}
	return b.rc.Close()
}

// take looks at the caller's body and reads it into memory where that is
// the only way to send it again. An error of the reader itself comes back as
// it is.
func (b *body) take(ctx context.Context, req *http.Request, limit int64) error {
	b.limit = limit
	b.own.rc = req.Body
	b.length = req.ContentLength
	if req.Body == nil || req.Body == http.NoBody {
		b.kind, b.length = noBody, 0
		return nil
	}
	if b.length == 0 { // with a Body, zero means not known
		b.length = -1
	}
	if req.GetBody != nil {
		b.kind, b.getBody = reopened, req.GetBody
		return nil
	}
	if ok, err := b.takeSection(req.Body); ok || err != nil {
		return err
	}
	return b.takeReader(ctx)
}

// takeSection knows the concrete types that can be read at any offset by
// several readers. Not by interface: a reader that embeds a file, to encrypt
// it, would be bypassed.
func (b *body) takeSection(rc io.ReadCloser) (bool, error) {
	var rest int64
	s := new(source)
	switch r := unwrapNopCloser(rc).(type) {
	case *os.File:
		info, err := r.Stat()
		if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
			return false, nil // of size 0: empty, or of a file system that does not know it
		}
		off, err := r.Seek(0, io.SeekCurrent)
		if err != nil {
			return false, nil
		}
		s.at, s.off, s.file, s.info, rest = r, off, r, info, info.Size()-off
	case *bytes.Reader:
		s.at, s.off, rest = r, r.Size()-int64(r.Len()), int64(r.Len())
	case *strings.Reader:
		s.at, s.off, rest = r, r.Size()-int64(r.Len()), int64(r.Len())
	case *io.SectionReader:
		off, err := r.Seek(0, io.SeekCurrent)
		if err != nil {
			return false, nil
		}
		s.at, s.off, rest = r, off, r.Size()-off
	default:
		return false, nil
	}
	if b.length > rest {
		return true, invalid("Request.Body", "has %d bytes; ContentLength says %d", max(rest, 0), b.length)
	}
	if b.length < 0 {
		b.length = max(rest, 0)
	}
	if b.length == 0 {
		b.kind = noBody // a reader of length 0 would go out chunked
		return true, nil
	}
	b.kind, b.source = section, s
	return true, nil
}

// takeReader buffers a reader that can be read only once, up to the limit.
func (b *body) takeReader(ctx context.Context) error {
	b.source = new(source)
	if b.limit < 0 || b.length > b.limit {
		b.kind = stream
		return nil
	}
	most := b.limit
	if b.length >= 0 {
		most = b.length
	}
	var read bytes.Buffer
	if _, err := readBody(ctx, &read, &b.own, most+1); err != nil { // not closed: the rest of a stream follows
		return err
	}
	data := read.Bytes()
	b.source.data = data
	switch n := int64(len(data)); {
	case b.length >= 0 && n != b.length:
		return invalid("Request.Body", "has %d bytes or more; ContentLength says %d", n, b.length)
	case n > b.limit:
		b.kind = stream
		return nil
	case n == 0:
		b.kind = noBody
	default:
		b.kind = buffered
	}
	b.length = int64(len(data))
	return nil
}

// open returns the reader for the next attempt; nil: there is no body.
func (b *body) open() (io.ReadCloser, error) {
	first := b.opened == 0
	b.opened++
	switch {
	case b.kind == noBody:
		return nil, nil
	case b.kind == reopened && first && inMemory(b.own.rc):
		return b.own.rc, nil // no wrapper on the hot path: net/http knows these types
	case b.kind == reopened && first:
		r := reading(b.own.rc, &b.own, b.length)
		r.seen = new(maphash.Hash)
		return r, nil
	case b.kind == stream && first:
		return reading(b.streamed(), &b.own, b.length), nil
	case b.kind == stream:
		return nil, ErrBodyNotReplayable
	}
	rc, err := b.again()
	if err != nil || b.kind == buffered {
		return rc, err
	}
	r := reading(rc, rc, b.length)
	if b.kind == reopened {
		r.seen = new(maphash.Hash)
	}
	return r, nil
}

// remember keeps the reader of an attempt that has ended, if it read more than
// those before: a refused attempt reads nothing.
func (b *body) remember(a *attemptBody) {
	if a == nil || a.seen == nil {
		return
	}
	if n := a.count(); b.longest == nil || n > b.longest.count() {
		b.longest = a
	}
}

// again opens a body that can be read more than once.
func (b *body) again() (io.ReadCloser, error) {
	switch b.kind {
	case reopened:
		rc, err := b.getBody()
		if rc == nil && err == nil {
			err = errors.New("idem: Request.GetBody returned neither a reader nor an error")
		}
		if err != nil {
			return nil, &bodyError{err}
		}
		return rc, nil
	case section:
		if err := b.source.unchanged(); err != nil {
			return nil, err
		}
		return &readCloser{io.NewSectionReader(b.source.at, b.source.off, b.length), b.hold()}, nil
	}
	return io.NopCloser(bytes.NewReader(b.source.data)), nil
}

type readCloser struct {
	io.Reader
	io.Closer
}

// streamed is a body that can be read only once: what was read of it
// already, and the rest.
func (b *body) streamed() io.Reader {
	if len(b.source.data) == 0 {
		return b.own.rc
	}
	return io.MultiReader(bytes.NewReader(b.source.data), b.own.rc)
}

// equals reports whether rc has the content of b, and closes rc.
func (b *body) equals(rc io.ReadCloser) (bool, error) {
	if rc == nil {
		return b.length == 0, nil
	}
	defer func() { _ = rc.Close() }()
	mine, err := b.again()
	if err != nil {
		return false, err
	}
	defer func() { _ = mine.Close() }()
	want, got := sha256.New(), sha256.New()
	if _, err := io.Copy(want, mine); err != nil {
		return false, err
	}
	if _, err := io.Copy(got, rc); err != nil {
		return false, err
	}
	return bytes.Equal(want.Sum(nil), got.Sum(nil)), nil
}

// replayable reports whether there can be another attempt.
func (b *body) replayable() bool { return b.kind != stream || b.opened == 0 }

// unchanged refuses another attempt with other content: a file that was
// written to, or a GetBody that returns something else. Beyond the buffer
// limit only the length counts, which the readers check.
func (b *body) unchanged(ctx context.Context) error {
	if b.kind != reopened {
		return nil // sections look at their file whenever they are opened
	}
	return b.same(ctx, b)
}

// unchanged refuses a file that was written to.
func (s *source) unchanged() error {
	if s.file == nil {
		return nil
	}
	info, err := s.file.Stat()
	if err != nil {
		return &bodyError{err}
	}
	if info.Size() != s.info.Size() || !info.ModTime().Equal(s.info.ModTime()) {
		return ErrBodyChanged
	}
	return nil
}

// follows refuses a redirect hop whose body is not that of the request that
// was redirected.
func (b *body) follows(ctx context.Context, first *body) error {
	if b.length >= 0 && first.length >= 0 && b.length != first.length {
		return ErrBodyChanged
	}
	if b.kind == noBody || b.kind == stream {
		return nil
	}
	return b.same(ctx, first)
}

// same refuses a body that does not begin with what an attempt of first read:
// the one that read most.
func (b *body) same(ctx context.Context, first *body) error {
	var before, now maphash.Hash
	n, err := first.firstContent(&before)
	if n < 0 || n > max(b.limit, defaultBuffer) || err != nil {
		return err
	}
	rc, err := b.again()
	if err != nil {
		return err
	}
	opened := &ownBody{rc: rc}
	defer func() { _ = opened.Close() }()
	now.SetSeed(before.Seed())
	switch m, err := readBody(ctx, &now, opened, n); {
	case err != nil:
		return err
	case m != n || now.Sum64() != before.Sum64():
		return ErrBodyChanged
	}
	return nil
}

// firstContent hashes what an attempt read at most, and says how much that was;
// -1: it cannot be told.
func (b *body) firstContent(h *maphash.Hash) (int64, error) {
	if b.longest != nil {
		return b.longest.soFar(h), nil
	}
	if b.kind == buffered {
		_, _ = h.Write(b.source.data)
		return b.length, nil
	}
	var at io.ReaderAt
	var size int64
	switch r := unwrapNopCloser(b.own.rc).(type) {
	case *bytes.Reader:
		at, size = r, r.Size()
	case *strings.Reader:
		at, size = r, r.Size()
	default:
		return -1, nil
	}
	if b.length < 0 || b.length > size {
		return -1, nil
	}
	n, err := io.Copy(h, io.NewSectionReader(at, size-b.length, b.length))
	return n, err
}

// heldSection keeps the caller's body open for one section reader; the last
// one may close it.
type heldSection struct {
	b    *body
	once sync.Once
	err  error
}

func (b *body) hold() io.Closer {
	b.source.mu.Lock()
	defer b.source.mu.Unlock()
	b.source.open++
	return &heldSection{b: b}
}

func (h *heldSection) Close() error {
	h.once.Do(func() {
		s := h.b.source
		s.mu.Lock()
		s.open--
		last := s.answered && s.open == 0
		s.mu.Unlock()
		if last {
			h.err = h.b.own.Close()
		}
	})
	return h.err
}

// finish closes the caller's body, unless an attempt that was answered may
// still read it: then that attempt's Close does, as RoundTripper demands of
// the base.
func (b *body) finish(answered bool) {
	switch {
	case !answered:
	case b.kind == section:
		s := b.source
		s.mu.Lock()
		s.answered = true
		reading := s.open > 0
		s.mu.Unlock()
		if reading {
			return
		}
	case b.opened == 1 && (b.kind == reopened || b.kind == stream):
		return
	}
	_ = b.own.Close()
}

// digest hashes the body for the fingerprint; beyond the buffer limit only
// the length counts.
func (b *body) digest(ctx context.Context) (sum [sha256.Size]byte, length int64, whole bool, err error) {
	limit := b.limit
	if limit < 0 {
		limit = defaultBuffer
	}
	if b.length > limit {
		return sum, b.length, false, nil
	}
	switch b.kind {
	case noBody:
		return sha256.Sum256(nil), 0, true, nil
	case buffered:
		return sha256.Sum256(b.source.data), b.length, true, nil
	case stream:
		return sum, b.length, false, nil
	}
	r, err := b.again()
	if err != nil {
		return sum, 0, false, err
	}
	opened := &ownBody{rc: r}
	defer func() { _ = opened.Close() }()
	h := sha256.New()
	n, err := readBody(ctx, h, opened, limit+1)
	switch {
	case err != nil:
		return sum, 0, false, err
	case b.length >= 0 && n != b.length:
		return sum, 0, false, invalid("Request.Body", "has %d bytes; ContentLength says %d", n, b.length)
	case n > limit:
		return sum, b.length, false, nil
	}
	h.Sum(sum[:0])
	return sum, n, true, nil
}

// readBody reads up to most bytes of a body. It hears the context and closes the
// body then: its reader may be waiting for somebody.
func readBody(ctx context.Context, to io.Writer, b *ownBody, most int64) (int64, error) {
	stop := context.AfterFunc(ctx, func() { _ = b.Close() })
	n, err := io.Copy(to, io.LimitReader(b.rc, most))
	if !stop() && ctx.Err() != nil {
		return n, context.Cause(ctx)
	}
	if err != nil {
		return n, &bodyError{err}
	}
	return n, nil
}

// bodyError is an error of the caller's own reader: no network fault.
type bodyError struct{ error }

func (e *bodyError) Unwrap() error { return e.error }

// attemptBody is one attempt's view of the body. It notes the reader's own
// error and a length that does not fit, and closes once.
type attemptBody struct {
	r      io.Reader
	c      io.Closer
	length int64

	expired func() bool // the key has; nil: that does not matter

	mu     sync.Mutex // guards what follows
	read   int64
	seen   *maphash.Hash // of what was read; nil: nobody will ask
	err    error         // of the reader itself
	closed bool
}

// soFar sets h to the hash of what was read and says how much that was.
func (a *attemptBody) soFar(h *maphash.Hash) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	*h = *a.seen //nolint:govet // a copy that is only read
	return a.read
}

func reading(r io.Reader, c io.Closer, length int64) *attemptBody {
	return &attemptBody{r: r, c: c, length: length}
}

func (a *attemptBody) Read(p []byte) (int, error) {
	n, err := a.r.Read(p)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.expired != nil && a.expired() {
		a.err = ErrKeyExpired
		return 0, a.err
	}
	if a.closed {
		return 0, errors.New("idem: read of a request body after Close")
	}
	a.read += int64(n)
	if a.seen != nil {
		_, _ = a.seen.Write(p[:n])
	}
	switch {
	case a.length >= 0 && a.read > a.length,
		err == io.EOF && a.length >= 0 && a.read != a.length:
		a.err = ErrBodyChanged
		return 0, a.err
	case err != nil && err != io.EOF:
		a.err = &bodyError{err}
		return n, err
	}
	return n, err
}

func (a *attemptBody) Close() error {
	a.mu.Lock()
	again := a.closed
	a.closed = true
	a.mu.Unlock()
	if again {
		return nil
	}
	return a.c.Close()
}

// count is how much was read.
func (a *attemptBody) count() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.read
}

// touched reports whether anybody read or closed it.
func (a *attemptBody) touched() bool {
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.read > 0 || a.closed
}

// failure is the reader's own error, if any.
func (a *attemptBody) failure() error {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

var (
	nopCloserType         = reflect.TypeOf(io.NopCloser(nil))
	nopCloserWriterToType = reflect.TypeOf(io.NopCloser(struct {
		io.Reader
		io.WriterTo
	}{}))
)

// unwrapNopCloser sees through io.NopCloser, as net/http does.
func unwrapNopCloser(rc io.ReadCloser) any {
	if t := reflect.TypeOf(rc); t == nopCloserType || t == nopCloserWriterToType {
		return reflect.ValueOf(rc).Field(0).Interface()
	}
	return rc
}

// inMemory reports whether rc is what http.NewRequest makes of the readers in
// memory: no error, nothing to close.
func inMemory(rc io.ReadCloser) bool {
	switch unwrapNopCloser(rc).(type) {
	case *bytes.Reader, *bytes.Buffer, *strings.Reader:
		return true
	}
	return false
}
