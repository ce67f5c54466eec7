package fakeserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"sync"
	"time"
)

// certificates are an authority and what it signs.
type certificates struct {
	key  *ecdsa.PrivateKey
	root *x509.Certificate
	leaf tls.Certificate
}

var (
	longAgo  = time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC) // before the first second of a testing/synctest bubble
	longTime = time.Date(2190, 1, 1, 0, 0, 0, 0, time.UTC)
)

func newCertificates() *certificates {
	c := new(certificates)
	var err error
	if c.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		panic(err) // without randomness there is no TLS
	}
	c.root = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "fakeserver authority"}, NotBefore: longAgo, NotAfter: longTime,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must(x509.CreateCertificate(rand.Reader, c.root, c.root, c.key.Public(), c.key))
	c.root = must(x509.ParseCertificate(der))
	c.leaf = c.sign(longTime, memHost, memOtherHost, "localhost")
	return c
}

func (c *certificates) sign(until time.Time, names ...string) tls.Certificate {
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: names[0]}, NotBefore: longAgo, NotAfter: until, DNSNames: names,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if names[0] == memHost {
		leaf.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	}
	der := must(x509.CreateCertificate(rand.Reader, leaf, c.root, c.key.Public(), c.key))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: c.key}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err) // the templates are constant and correct
	}
	return v
}

func (c *certificates) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(c.root)
	return p
}

// config is the server's side of a handshake.
func (c *certificates) config(f ConnFault) *tls.Config {
	t := &tls.Config{Certificates: []tls.Certificate{c.leaf}, NextProtos: []string{"h2", "http/1.1"}}
	switch f {
	case UnknownAuthority:
		t.Certificates[0] = newCertificates().leaf
	case ExpiredCertificate:
		t.Certificates[0] = c.sign(time.Now().Add(-time.Hour), memHost)
	case WrongName:
		t.Certificates[0] = c.sign(longTime, "elsewhere.test")
	case HandshakeAlert:
		t.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return nil, errors.New("a fault ends this handshake")
		}
	}
	return t
}

// secureConn is the plain side of a TLS connection, as net/http serves it. It has no method ConnectionState on purpose:
// net/http would take it for a connection without HTTP/2.
type secureConn struct {
	net.Conn // the *tls.Conn
	tls      *tls.Conn
	shake    sync.Once
	failed   error
	frames   *frames // nil = HTTP/1, or before the handshake
	fault    ConnFault
}

func newSecureConn(c net.Conn, t *tls.Config, f ConnFault) *secureConn {
	secure := tls.Server(c, t)
	return &secureConn{Conn: secure, tls: secure, fault: f}
}

// NetConn is the connection below TLS.
func (c *secureConn) NetConn() net.Conn { return c.tls.NetConn() }

func (c *secureConn) CloseWrite() error { return c.tls.CloseWrite() }

// Read comes first, and so shakes hands.
func (c *secureConn) Read(p []byte) (int, error) {
	c.shake.Do(func() {
		if c.failed = c.tls.Handshake(); c.failed == nil && c.tls.ConnectionState().NegotiatedProtocol == "h2" {
			c.frames = newFrames(c.tls, c.fault)
		}
	})
	switch {
	case c.failed != nil:
		return 0, io.EOF // nothing to answer, not even a 400
	case c.frames != nil:
		return c.frames.Read(p)
	}
	return c.tls.Read(p)
}

func (c *secureConn) Write(p []byte) (int, error) {
	if c.frames != nil {
		return c.frames.Write(p)
	}
	return c.tls.Write(p)
}
