package fakeserver

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
)

// ConnFault is what happens to one connection, before any request; see [Server.ScriptConns].
type ConnFault string

const (
	// NoHost is a name that does not exist. This and the next three happen in the dial of the server's own transports.
	NoHost ConnFault = "no-host"
	// NoNameServer is a temporary failure to look the name up.
	NoNameServer ConnFault = "no-name-server"
	// Refused is ECONNREFUSED.
	Refused ConnFault = "refused"
	// BlackHole gives the dial no answer at all, until its context ends.
	BlackHole ConnFault = "black-hole"

	// AcceptReset accepts the connection and resets it before a byte is read.
	AcceptReset ConnFault = "accept-reset"
	// AcceptClose accepts the connection and closes it before a byte is read.
	AcceptClose ConnFault = "accept-close"
	// AcceptSilence accepts the connection and never says a word; over TLS the handshake stalls.
	AcceptSilence ConnFault = "accept-silence"

	// HandshakeAlert ends the TLS handshake with an alert.
	HandshakeAlert ConnFault = "handshake-alert"
	// UnknownAuthority shows a certificate that nobody trusts.
	UnknownAuthority ConnFault = "unknown-authority"
	// ExpiredCertificate shows a certificate that ended an hour ago.
	ExpiredCertificate ConnFault = "expired-certificate"
	// WrongName shows a certificate for another host.
	WrongName ConnFault = "wrong-name"

	// NoSettings is an HTTP/2 peer that says nothing after the TLS handshake, not even its settings.
	NoSettings ConnFault = "no-settings"
	// NoWindow is an HTTP/2 peer whose window is 0: it takes headers and no byte of a body. The first request of the
	// connection may be faster than this news.
	NoWindow ConnFault = "no-window"
	// OneStream is an HTTP/2 peer that allows one stream at a time.
	OneStream ConnFault = "one-stream"
)

var connFaultNeeds = map[ConnFault]bool{ // TLS
	"": false, NoHost: false, NoNameServer: false, Refused: false, BlackHole: false,
	AcceptReset: false, AcceptClose: false, AcceptSilence: false,
	HandshakeAlert: true, UnknownAuthority: true, ExpiredCertificate: true, WrongName: true,
	NoSettings: true, NoWindow: true, OneStream: true,
}

func (f ConnFault) atDial() bool {
	return f == NoHost || f == NoNameServer || f == Refused || f == BlackHole
}

// ScriptConns lays down what happens to the next connections, one each; "" lets its connection pass. It replaces what is
// left of an earlier script. Connections that exist already are not touched, and nothing of this is listed as a send.
func (s *Server) ScriptConns(faults ...ConnFault) error {
	for i, f := range faults {
		needsTLS, known := connFaultNeeds[f]
		switch {
		case !known:
			return numbered(i, errors.New("fakeserver: unknown connection fault "+strconv.Quote(string(f))))
		case needsTLS && s.secure == nil:
			return numbered(i, errors.New("fakeserver: the connection fault "+string(f)+" needs NewTLS or NewInMemoryTLS"))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connFaults = append([]ConnFault(nil), faults...)
	return nil
}

// nextConnFault takes the next step of the script, if it is one for this end of the connection.
func (s *Server) nextConnFault(atDial bool) ConnFault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.connFaults) == 0 || s.connFaults[0].atDial() != atDial {
		return ""
	}
	f := s.connFaults[0]
	s.connFaults = s.connFaults[1:]
	return f
}

// dialFault is the client's end. done: the dial is over.
func (s *Server) dialFault(ctx context.Context, to dialAddr) (done bool, err error) {
	host, _, _ := net.SplitHostPort(to.addr)
	switch s.nextConnFault(true) {
	case NoHost:
		return true, &net.OpError{Op: "dial", Net: to.network, Err: &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}}
	case NoNameServer:
		return true, &net.OpError{Op: "dial", Net: to.network, Err: &net.DNSError{Err: "server misbehaving", Name: host, IsTemporary: true}}
	case Refused:
		return true, refused(to)
	case BlackHole:
		select {
		case <-ctx.Done():
			return true, &net.OpError{Op: "dial", Net: to.network, Addr: to, Err: ctx.Err()}
		case <-s.done:
			return true, &net.OpError{Op: "dial", Net: to.network, Addr: to, Err: os.NewSyscallError("connect", syscall.ETIMEDOUT)}
		}
	}
	return false, nil
}

// acceptor is the server's end.
type acceptor struct {
	net.Listener
	s *Server
}

func (a *acceptor) Accept() (net.Conn, error) {
	for {
		c, err := a.Listener.Accept()
		if err != nil {
			return nil, err
		}
		switch f := a.s.nextConnFault(false); f {
		case AcceptReset:
			reset(c)
		case AcceptClose:
			_ = c.Close()
		case AcceptSilence:
			a.s.ignore(c)
		default:
			if a.s.secure != nil {
				return newSecureConn(c, a.s.secure.config(f), f), nil
			}
			return c, nil
		}
	}
}

// ignore reads what comes and answers nothing, until the client or the server closes.
func (s *Server) ignore(c net.Conn) {
	if !s.begin() {
		_ = c.Close()
		return
	}
	s.hold(c)
	go func() {
		defer s.leave()
		_, _ = io.Copy(io.Discard, c)
		s.release(c)
	}()
}
