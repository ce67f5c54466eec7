package fakeserver

import (
	"encoding/binary"
	"slices"
)

// Faults of HTTP/2. Over HTTP/1 the first two close the connection and the third hangs.

func (f *Fault) errorCode(otherwise string) uint32 {
	name := f.Code
	if name == "" {
		name = otherwise
	}
	return uint32(slices.Index(errorCodes, name))
}

func (x *exchange) streamReset(*answer) bool {
	if x.frames != nil {
		x.frames.resetWith(x.stream, x.fault.errorCode("INTERNAL_ERROR"))
	}
	x.drop()
	return true
}

func (x *exchange) goAway(*answer) bool {
	if x.frames == nil {
		x.drop()
		return true
	}
	last := x.fault.Last
	switch {
	case last == "" && x.fault.Point == BeforeEffect:
		last = "below"
	case last == "":
		last = "at"
	}
	stream := x.stream
	switch last {
	case "below":
		stream = max(stream, 2) - 2 // streams of clients are odd
	case "above":
		stream = 1<<31 - 1
	}
	payload := binary.BigEndian.AppendUint32(nil, stream)
	payload = binary.BigEndian.AppendUint32(payload, x.fault.errorCode("NO_ERROR"))
	x.frames.inject(frame(typeGoAway, 0, 0, payload))
	if last != "below" {
		_ = x.frames.conn.Close()
	}
	x.drop()
	return true
}

func (x *exchange) freeze(a *answer) bool {
	if x.frames == nil {
		return x.hang(a)
	}
	x.frames.frozen.Store(true)
	x.drop()
	return true
}
