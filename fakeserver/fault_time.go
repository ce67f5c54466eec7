package fakeserver

import "net/http"

// Faults of time: everything is right, but not when it is needed. Slow is in execute, where the key can be in progress.

func (x *exchange) slowRead(*answer) bool {
	// While the body is unread net/http cannot tell whether the client is still there, so only Close ends this early.
	x.s.wait(x.fault.Delay, nil)
	return false
}

func (x *exchange) late(a *answer) bool {
	if x.fault.Point == AfterEffect {
		if !x.s.wait(x.fault.Delay, x.gone()) {
			x.drop()
			return true
		}
		return false
	}
	x.note(a.status)
	x.headers(*a)
	_ = http.NewResponseController(x.w).Flush()
	if !x.s.wait(x.fault.Delay, x.gone()) {
		x.drop()
		return true
	}
	if bodyAllowed(a.status) {
		_, _ = x.w.Write(a.body)
	}
	return true
}

func (x *exchange) trickle(a *answer) bool {
	x.note(a.status)
	if x.frames != nil {
		if x.fault.Point == InBody {
			x.begin(*a)
		}
		for i := range a.body {
			if !x.s.wait(x.fault.Delay, x.gone()) {
				x.drop()
			}
			if i == 0 && x.fault.Point == InHeaders {
				x.begin(*a)
			}
			_, _ = x.w.Write(a.body[i : i+1])
			_ = http.NewResponseController(x.w).Flush()
		}
		return true
	}
	conn := x.seize()
	defer x.release(conn)
	framing := []field{lastAnswer}
	if bodyAllowed(a.status) {
		framing = append(framing, contentLength(len(a.body)))
	}
	start, drops := head(*a, framing...), x.bodyOf(*a)
	if x.fault.Point == InHeaders {
		start, drops = nil, append(start, drops...)
	}
	if _, err := conn.Write(start); err != nil {
		return true
	}
	for i := range drops {
		if !x.s.wait(x.fault.Delay, nil) {
			return true
		}
		if _, err := conn.Write(drops[i : i+1]); err != nil {
			return true // the client has left
		}
	}
	return true
}

// runStuck reserves the key and dies.
func (x *exchange) runStuck() answer {
	s := x.s
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, a, proceed := s.claim(x.q)
	if !proceed {
		return a
	}
	s.die(rec, x.fault.Delay)
	return answer{none: true}
}
