package fakeserver

// The fault of a network that delivers a request twice.

func (x *exchange) runTwice() answer {
	s, again := x.s, x.q.copy()
	switch x.fault.Point {
	case DuringEffect:
		return x.runImpatient(again)
	case AfterEffect:
		a := s.execute(x.q, nil)
		if x.fault.Delay == 0 {
			s.deliver(again, x.q.send)
		} else if s.begin() {
			go func() {
				defer s.leave()
				if s.wait(x.fault.Delay, nil) {
					s.deliver(again, x.q.send)
				}
			}()
		}
		return a
	default:
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.deliver(again, x.q.send)
		}()
		a := s.execute(x.q, nil)
		<-ended // so that whoever has the answer finds the copy in the list; it does not wait for anything
		return a
	}
}

// runImpatient leaves the first copy running and gives the client what the second one gets.
func (x *exchange) runImpatient(again *request) answer {
	a, running := x.leaveRunning()
	if a.none {
		return a
	}
	if second := x.s.deliver(again, x.q.send); running {
		return second
	}
	return a
}

// leaveRunning claims the key and lets the effect happen after the fault's delay, while the caller goes on. Not running:
// there is an answer already, or the server closes.
func (x *exchange) leaveRunning() (a answer, running bool) {
	s := x.s
	s.mu.Lock()
	rec, a, proceed := s.claim(x.q)
	if proceed && rec != nil {
		rec.running = true
	}
	s.mu.Unlock()
	switch {
	case proceed && s.begin():
		go func() {
			defer s.leave()
			s.mu.Lock()
			defer s.mu.Unlock()
			s.perform(x.q, rec, nil, x.fault.Delay)
		}()
		return answer{}, true
	case proceed:
		return answer{none: true}, false
	}
	return a, false
}

// copy is the same request as another delivery.
func (q *request) copy() *request {
	c := *q
	c.send = &Send{
		Key: q.key, Keys: q.send.Keys, KeySend: q.send.KeySend,
		Method: q.send.Method, Path: q.send.Path, Endpoint: q.send.Endpoint, Caller: q.caller, Reference: q.reference,
		Header: q.send.Header, ContentLength: q.send.ContentLength, TransferEncoding: q.send.TransferEncoding,
		BodyLen: q.bodyLen, BodySHA256: q.bodySum, Duplicate: true,
	}
	return &c
}

// deliver lists the copy of a send and executes it, unless that came before a Reset.
func (s *Server) deliver(q *request, of *Send) answer {
	s.mu.Lock()
	if !s.listed(of) {
		s.mu.Unlock()
		return answer{none: true}
	}
	q.life = s.life // the network delivers after a Restart, too
	s.list(q.send)
	s.mu.Unlock()
	defer s.ended(q.send)
	a := s.execute(q, nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	q.send.Status = a.status
	s.remember(q)
	return a
}
