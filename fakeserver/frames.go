package fakeserver

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
)

// errorCodes are the names of RFC 9113, section 7, by their numbers.
var errorCodes = []string{
	"NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED",
	"FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM",
	"INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED",
}

const (
	frameHeader   = 9
	prefaceLength = 24

	typeHeaders      = 1
	typeReset        = 3
	typeSettings     = 4
	typeGoAway       = 7
	typeContinuation = 9

	flagAck        = 0x1
	flagEndHeaders = 0x4
	flagPadded     = 0x8

	settingMaxStreams    = 3
	settingInitialWindow = 4
)

// streamHeader tells a handler which stream its request came on: net/http does not. It is put into the header block on
// its way in, as a literal that touches no state of the compression, and taken out again before anybody looks.
const streamHeader = "Fakeserver-Stream"

func streamOf(h http.Header) uint32 {
	values := h[streamHeader]
	delete(h, streamHeader)
	if len(values) == 0 {
		return 0
	}
	n, _ := strconv.ParseUint(values[len(values)-1], 10, 31) // the last one is ours, whatever the client sent
	return uint32(n)
}

// frames stands between net/http and an HTTP/2 connection. Frames pass in both directions, but for those that a fault
// changes, adds or swallows.
type frames struct {
	conn belowFrames

	// For the one reader.
	chunk      []byte // what is read at once
	raw, ready []byte
	started    bool   // the preface has passed
	newest     uint32 // stream
	marking    bool   // the header block of newest goes on

	frozen  atomic.Bool // nothing passes any more
	dieNext atomic.Bool // the next stream ends the connection

	mu    sync.Mutex        // guards what follows, and the order of what is written
	fault ConnFault         // until the settings have passed
	held  []byte            // the beginning of a frame, or of a header block
	codes map[uint32]uint32 // of the RST_STREAM that a stream is about to get
}

// belowFrames is a *tls.Conn.
type belowFrames interface {
	net.Conn
	NetConn() net.Conn
}

func newFrames(c belowFrames, f ConnFault) *frames {
	p := &frames{conn: c, fault: f, codes: map[uint32]uint32{}}
	p.frozen.Store(f == NoSettings)
	return p
}

// firstFrame cuts the first frame off. ok is false if it is not complete.
func firstFrame(b []byte) (frame, rest []byte, ok bool) {
	if len(b) < frameHeader {
		return nil, b, false
	}
	n := frameHeader + (int(b[0])<<16 | int(b[1])<<8 | int(b[2]))
	if len(b) < n {
		return nil, b, false
	}
	return b[:n:n], b[n:], true
}

func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	n := len(payload)
	b := append(make([]byte, 0, frameHeader+n), byte(n>>16), byte(n>>8), byte(n), kind, flags)
	b = binary.BigEndian.AppendUint32(b, stream)
	return append(b, payload...)
}

func idOf(f []byte) uint32 { return binary.BigEndian.Uint32(f[5:]) & (1<<31 - 1) }

// Read gives the server what the client sent.
func (p *frames) Read(b []byte) (int, error) {
	for len(p.ready) == 0 {
		if p.chunk == nil {
			p.chunk = make([]byte, 16<<10)
		}
		n, err := p.conn.Read(p.chunk)
		if p.frozen.Load() {
			p.raw = nil
		} else if n > 0 {
			p.raw = append(p.raw, p.chunk[:n]...)
			if ended := p.pass(); err == nil {
				err = ended
			}
		}
		if err != nil && len(p.ready) == 0 {
			return 0, err
		}
	}
	n := copy(b, p.ready)
	p.ready = p.ready[n:]
	return n, nil
}

// pass moves whole frames on.
func (p *frames) pass() error {
	if !p.started {
		if len(p.raw) < prefaceLength {
			return nil
		}
		p.ready, p.raw = append(p.ready, p.raw[:prefaceLength]...), p.raw[prefaceLength:]
		p.started = true
	}
	for {
		f, rest, ok := firstFrame(p.raw)
		if !ok {
			return nil
		}
		p.raw = rest
		id, kind, flags, payload := idOf(f), f[3], f[4], f[frameHeader:]
		if kind == typeHeaders && id > p.newest {
			if p.dieNext.Load() {
				_ = p.conn.Close()
				return io.EOF
			}
			p.newest, p.marking = id, true
			if flags&flagPadded != 0 && len(payload) > 0 && len(payload) > int(payload[0]) {
				payload = payload[1 : len(payload)-int(payload[0])]
				flags &^= flagPadded
			}
		}
		if p.marking && (kind == typeHeaders || kind == typeContinuation) {
			if flags&flagEndHeaders != 0 {
				p.marking = false
				payload = append(slices.Clip(payload), mark(id)...)
			}
			f = frame(kind, flags, id, payload)
		}
		p.ready = append(p.ready, f...)
	}
}

// mark is the stream header as RFC 7541, section 6.2.2, writes a literal without indexing, with a new name.
func mark(id uint32) []byte {
	b := []byte{0, byte(len(streamHeader))}
	for i := range len(streamHeader) {
		c := streamHeader[i]
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		b = append(b, c)
	}
	value := strconv.FormatUint(uint64(id), 10)
	return append(append(b, byte(len(value))), value...)
}

// Write gives the client what the server says.
func (p *frames) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = append(p.held, b...)
	var out []byte
	for rest := p.held; ; {
		f, more, ok := firstFrame(rest)
		if !ok {
			break
		}
		rest = more
		out = append(out, p.changed(f)...)
		if f[4]&flagEndHeaders != 0 || f[3] != typeHeaders && f[3] != typeContinuation {
			// Between frames, and not within a header block: another frame may come in here.
			p.held = slices.Clone(rest)
			if err := p.send(out); err != nil {
				return 0, err
			}
			out = nil
			rest = p.held
		}
	}
	return len(b), nil
}

// send writes whole frames. p.mu is held.
func (p *frames) send(b []byte) error {
	if p.frozen.Load() {
		return nil
	}
	_, err := p.conn.Write(b)
	return err
}

// changed is a frame of the server as the client gets it. p.mu is held.
func (p *frames) changed(f []byte) []byte {
	id := idOf(f)
	switch code, chosen := p.codes[id]; {
	case f[3] == typeReset && chosen:
		delete(p.codes, id)
		return frame(typeReset, 0, id, binary.BigEndian.AppendUint32(nil, code))
	case f[3] == typeSettings && f[4]&flagAck == 0 && p.fault != "":
		f = slices.Clone(f)
		for s := f[frameHeader:]; len(s) >= 6; s = s[6:] {
			switch name := binary.BigEndian.Uint16(s); {
			case name == settingMaxStreams && p.fault == OneStream:
				binary.BigEndian.PutUint32(s[2:], 1)
			case name == settingInitialWindow && p.fault == NoWindow:
				binary.BigEndian.PutUint32(s[2:], 0)
			}
		}
		p.fault = ""
	}
	return f
}

// bigHeaderBlock is an answer 200 with about so many bytes of headers, in one HEADERS and many CONTINUATION frames.
func bigHeaderBlock(stream uint32, size int) []byte {
	const value = 100
	one := append([]byte{0, byte(len("x-filler"))}, "x-filler"...) // a literal without indexing, RFC 7541, section 6.2.2
	one = append(append(one, value), bytes.Repeat([]byte("a"), value)...)
	many := bytes.Repeat(one, (16<<10)/len(one))
	b := frame(typeHeaders, 0, stream, []byte{0x88}) // ":status: 200" of the static table
	for left := size; left > 0; left -= len(many) {
		b = append(b, frame(typeContinuation, 0, stream, many)...)
	}
	return append(b, frame(typeContinuation, flagEndHeaders, stream, one)...)
}

// inject writes what the server never said.
func (p *frames) inject(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.send(b) // a client that has left misses nothing
}

// resetWith chooses the code of the RST_STREAM that net/http will send when the handler aborts.
func (p *frames) resetWith(stream, code uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.codes[stream] = code
}

func (p *frames) endAtNextStream() { p.dieNext.Store(true) }
