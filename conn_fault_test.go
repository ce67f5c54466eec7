package idem_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/fakeserver"
)

// connTrouble is what one faulty connection comes to.
type connTrouble struct {
	fault fakeserver.ConnFault
	plain bool // over HTTP/1 without TLS; else over HTTP/2 with TLS
	// proved: nothing can have reached the server.
	proved bool
	// final: another attempt would not help.
	final bool
	// lost: the attempt sends into a connection that nobody listens to.
	lost  int
	least time.Duration // that the attempt takes
	cause func(error) bool
}

func (c connTrouble) String() string {
	if c.plain {
		return string(c.fault) + ", HTTP/1"
	}
	return string(c.fault) + ", HTTP/2"
}

func (c connTrouble) start(t *testing.T) *fakeserver.Server {
	if c.plain {
		return inMemory(t)
	}
	return inMemoryTLS(t)
}

const connLimit = time.Second // of an attempt

// connTroubles has each fault of a connection that fails its first request.
func connTroubles() []connTrouble {
	as := func(target any) func(error) bool {
		return func(err error) bool { return errors.As(err, target) }
	}
	is := func(target error) func(error) bool {
		return func(err error) bool { return errors.Is(err, target) }
	}
	noName := func(temporary bool) func(error) bool {
		return func(err error) bool {
			var dns *net.DNSError
			return errors.As(err, &dns) && dns.IsTemporary == temporary && dns.IsNotFound != temporary
		}
	}
	certificate := func(cause func(error) bool) func(error) bool {
		return func(err error) bool {
			var failed *tls.CertificateVerificationError
			return errors.As(err, &failed) && cause(err)
		}
	}
	const noHost, noNameServer, refused, blackHole = fakeserver.NoHost, fakeserver.NoNameServer, fakeserver.Refused, fakeserver.BlackHole
	var all []connTrouble
	for _, plain := range []bool{true, false} {
		all = append(all,
			connTrouble{fault: noHost, plain: plain, proved: true, final: true, cause: noName(false)},
			connTrouble{fault: noNameServer, plain: plain, proved: true, cause: noName(true)},
			connTrouble{fault: refused, plain: plain, proved: true, cause: is(syscall.ECONNREFUSED)},
			connTrouble{fault: blackHole, plain: plain, proved: true, least: connLimit, cause: is(context.DeadlineExceeded)})
	}
	alert := func(err error) bool {
		var op *net.OpError
		return errors.As(err, &op) && op.Op == "remote error"
	}
	return append(all,
		// Without TLS the connection is there, and so may the request be.
		connTrouble{fault: fakeserver.AcceptReset, plain: true, lost: 1},
		connTrouble{fault: fakeserver.AcceptClose, plain: true, lost: 1},
		connTrouble{fault: fakeserver.AcceptSilence, plain: true, lost: 1, least: connLimit, cause: is(context.DeadlineExceeded)},
		// With TLS nothing is sent before the handshake has ended.
		connTrouble{fault: fakeserver.AcceptReset, proved: true},
		connTrouble{fault: fakeserver.AcceptClose, proved: true},
		connTrouble{fault: fakeserver.AcceptSilence, proved: true, least: connLimit, cause: is(context.DeadlineExceeded)},
		connTrouble{fault: fakeserver.HandshakeAlert, proved: true, cause: alert},
		connTrouble{fault: fakeserver.UnknownAuthority, proved: true, final: true, cause: certificate(as(new(x509.UnknownAuthorityError)))},
		connTrouble{fault: fakeserver.ExpiredCertificate, proved: true, final: true, cause: certificate(func(err error) bool {
			var expired x509.CertificateInvalidError
			return errors.As(err, &expired) && expired.Reason == x509.Expired
		})},
		connTrouble{fault: fakeserver.WrongName, proved: true, final: true, cause: certificate(as(new(x509.HostnameError)))},
		connTrouble{fault: fakeserver.NoSettings, lost: 1, least: connLimit, cause: is(context.DeadlineExceeded)})
}

// everyConnTrouble runs a test for each of them in virtual time.
func everyConnTrouble(t *testing.T, test func(t *testing.T, c connTrouble)) {
	t.Helper()
	for _, c := range connTroubles() {
		t.Run(c.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T) { test(t, c) })
		})
	}
}

func withinConnLimit(tr *idem.Transport) { tr.Policy.AttemptTimeout = connLimit }

func TestOneFaultyConnectionIsGotOverOrIsFinal(t *testing.T) {
	everyConnTrouble(t, func(t *testing.T, c connTrouble) {
		s := c.start(t)
		require.NoError(t, s.ScriptConns(c.fault))
		var report idem.Report
		start := time.Now()
		resp, err := over(s, withinConnLimit).RoundTrip(newPayment(t, idem.WithReport(t.Context(), &report), s, "order-1"))
		took := time.Since(start)

		first := report.Attempts[0]
		if c.final {
			require.Empty(t, s.Effects())
			require.Empty(t, s.Sends())
			require.Equal(t, idem.NotExecuted, report.Outcome)
			require.Len(t, report.Attempts, 1)
			require.NoError(t, report.Reason, "the error is final by itself")
			require.Zero(t, report.Sends)
			require.Zero(t, took, "nothing is waited for")
			require.True(t, c.cause(err), "%v", err)
			return
		}
		require.NoError(t, err)
		readAll(t, resp)
		require.Len(t, s.Effects(), 1)
		require.Len(t, s.Sends(), 1)
		require.Equal(t, idem.Executed, report.Outcome)
		require.Equal(t, !c.proved, report.EarlierUnknown)
		require.Len(t, report.Attempts, 2)
		require.Equal(t, 1+c.lost, report.Sends)
		if c.proved {
			require.Equal(t, idem.NotExecuted, first.Outcome)
		} else {
			require.Equal(t, idem.Unknown, first.Outcome)
		}
		if c.cause != nil {
			require.True(t, c.cause(first.Err), "%v", first.Err)
		}
		require.GreaterOrEqual(t, took, c.least)
		require.LessOrEqual(t, took, c.least+50*time.Millisecond)
	})
}

func TestFaultyConnectionsWithoutEndAreProofOnlyWhereNothingWasSent(t *testing.T) {
	everyConnTrouble(t, func(t *testing.T, c connTrouble) {
		for from, ctx := range map[string]context.Context{
			"minted":    t.Context(),
			"operation": idem.WithOperation(t.Context(), idem.Operation{Name: "payment", ID: "order-1"}),
		} {
			s := c.start(t)
			faults := make([]fakeserver.ConnFault, 20)
			for i := range faults {
				faults[i] = c.fault
			}
			require.NoError(t, s.ScriptConns(faults...))
			_, err := over(s, withinConnLimit).RoundTrip(newPayment(t, ctx, s, "order-1"))
			require.Empty(t, s.Effects())
			require.Empty(t, s.Sends())
			var e *idem.Error
			require.ErrorAs(t, err, &e)
			if c.proved && from == "minted" {
				require.Equal(t, idem.NotExecuted, e.Outcome)
			} else {
				require.Equal(t, idem.Unknown, e.Outcome, "another process may have used the key, or something was sent")
			}
			require.Equal(t, c.proved, e.Attempts[0].Outcome == idem.NotExecuted)
			if c.final {
				require.Len(t, e.Attempts, 1)
			} else {
				require.ErrorIs(t, err, idem.ErrAttemptsExhausted)
				require.Len(t, e.Attempts, 4)
			}
			require.Equal(t, c.lost*len(e.Attempts), e.Sends)
			if c.cause != nil {
				require.True(t, c.cause(err), "%v", err)
			}
			s.Close()
		}
	})
}

func TestWriteWithoutAKeyIsRepeatedOnlyAfterAConnectionThatWasNeverThere(t *testing.T) {
	everyConnTrouble(t, func(t *testing.T, c connTrouble) {
		s := c.start(t)
		s.Apply(fakeserver.Settings{Optional: true})
		require.NoError(t, s.ScriptConns(c.fault))
		resp, err := over(s, withinConnLimit, speaking(idem.NoKeys)).RoundTrip(newPayment(t, t.Context(), s, "order-1"))
		switch {
		case c.final:
			require.Empty(t, s.Effects())
			require.Equal(t, idem.NotExecuted, idem.OutcomeOf(resp, err))
		case c.proved:
			require.NoError(t, err)
			readAll(t, resp)
			require.Len(t, s.Effects(), 1)
			require.Equal(t, idem.Executed, idem.OutcomeOf(resp, err))
		default:
			require.Empty(t, s.Effects())
			require.Empty(t, s.Sends())
			require.Equal(t, idem.Unknown, idem.OutcomeOf(resp, err), "it cannot be known that nobody listened")
			var e *idem.Error
			require.ErrorAs(t, err, &e)
			require.Len(t, e.Attempts, 1)
		}
	})
}

func TestCallersDeadlineInADialIsProofThatNothingWasSent(t *testing.T) {
	for _, fault := range []fakeserver.ConnFault{fakeserver.BlackHole, fakeserver.AcceptSilence} {
		virtual(t, func(t *testing.T) {
			s := inMemoryTLS(t)
			require.NoError(t, s.ScriptConns(fault))
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			start := time.Now()
			resp, err := over(s).RoundTrip(newPayment(t, ctx, s, "order-1"))
			require.Nil(t, resp)
			require.Empty(t, s.Sends())
			require.Equal(t, idem.NotExecuted, idem.OutcomeOf(resp, err), fault)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, 300*time.Millisecond, time.Since(start))
		})
	}
}

// The body of the request never leaves: that is a limit of the attempt, and
// the next one goes over another connection.
func TestWindowOfZeroIsLeftForAnotherConnection(t *testing.T) {
	virtual(t, func(t *testing.T) {
		s := inMemoryTLS(t)
		require.NoError(t, s.ScriptConns(fakeserver.NoWindow))
		tr := over(s, withinConnLimit)
		warmUp, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL()+"/v1/payments?reference=none", nil)
		require.NoError(t, err)
		resp, err := tr.RoundTrip(warmUp) // from here on the client knows the window
		require.NoError(t, err)
		readAll(t, resp)
		for i := range 2 { // the connection is still in the pool
			start := time.Now()
			resp, err = tr.RoundTrip(newPayment(t, t.Context(), s, fmt.Sprintf("order-%d", i)))
			require.NoError(t, err)
			readAll(t, resp)
			require.Len(t, s.Effects(), i+1)
			report := idem.ReportOf(resp)
			sends := s.Sends(fakeserver.Filter{Key: report.Key})
			require.Len(t, sends, 2)
			require.Zero(t, sends[0].BodyLen)
			require.NotEqual(t, sends[0].Conn, sends[1].Conn)
			require.Equal(t, idem.Executed, report.Outcome)
			require.Equal(t, idem.Unknown, report.Attempts[0].Outcome)
			require.Len(t, report.Attempts, 2)
			require.Equal(t, 2, report.Sends)
			require.LessOrEqual(t, time.Since(start), connLimit+50*time.Millisecond)
		}
	})
}

// A connection that is full may cost an attempt: net/http takes the request,
// closes its body, finds no stream, and cannot begin again.
func TestOneStreamAtATimeLosesNoOperation(t *testing.T) {
	virtual(t, func(t *testing.T) {
		const ops = 16
		s := inMemoryTLS(t)
		require.NoError(t, s.ScriptConns(fakeserver.OneStream, fakeserver.OneStream, fakeserver.OneStream))
		require.NoError(t, s.Inject(fakeserver.Fault{Kind: fakeserver.Slow, Delay: 100 * time.Millisecond}))
		tr := over(s)
		var callers sync.WaitGroup
		for i := range ops {
			callers.Go(func() {
				resp, err := tr.RoundTrip(newPayment(t, t.Context(), s, fmt.Sprintf("order-%d", i)))
				if err != nil {
					t.Error(err)
					return
				}
				_ = resp.Body.Close()
				report := idem.ReportOf(resp)
				if report.Outcome != idem.Executed || len(report.Attempts) > 4 || report.Reason != nil {
					t.Errorf("%+v", report)
				}
			})
		}
		callers.Wait()
		s.AssertOneEffectPerOperation(t)
		require.Len(t, s.Effects(), ops)
		require.Len(t, s.Sends(), ops)
	})
}
