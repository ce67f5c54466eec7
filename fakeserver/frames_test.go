package fakeserver

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// pipe is a connection that was recorded, and records.
type pipe struct {
	net.Conn
	in  io.Reader
	out bytes.Buffer
}

func (p *pipe) Read(b []byte) (int, error)  { return p.in.Read(b) }
func (p *pipe) Write(b []byte) (int, error) { return p.out.Write(b) }
func (p *pipe) NetConn() net.Conn           { return p.Conn }

var preface = []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

func TestRequestsAreMarkedHoweverTheirFramesAreCut(t *testing.T) {
	const typeData = 0
	sent := slices.Concat(preface,
		frame(typeSettings, 0, 0, nil),
		frame(typeHeaders, flagEndHeaders, 1, []byte("one")),
		frame(typeData, 1, 1, []byte("body")),
		frame(typeHeaders, flagEndHeaders, 1, []byte("trailer")),
		frame(typeHeaders, flagEndHeaders|flagPadded, 3, []byte("\x02three\x00\x00")),
		frame(typeHeaders, 0, 5, []byte("fi")),
		frame(typeContinuation, 0, 5, []byte("v")),
		frame(typeContinuation, flagEndHeaders, 5, []byte("e")),
	)
	want := slices.Concat(preface,
		frame(typeSettings, 0, 0, nil),
		frame(typeHeaders, flagEndHeaders, 1, []byte("one\x00\x11fakeserver-stream\x011")),
		frame(typeData, 1, 1, []byte("body")),
		frame(typeHeaders, flagEndHeaders, 1, []byte("trailer")),
		frame(typeHeaders, flagEndHeaders, 3, []byte("three\x00\x11fakeserver-stream\x013")),
		frame(typeHeaders, 0, 5, []byte("fi")),
		frame(typeContinuation, 0, 5, []byte("v")),
		frame(typeContinuation, flagEndHeaders, 5, []byte("e\x00\x11fakeserver-stream\x015")),
	)
	for _, in := range []io.Reader{bytes.NewReader(sent), iotest.OneByteReader(bytes.NewReader(sent)), iotest.DataErrReader(bytes.NewReader(sent))} {
		got, err := io.ReadAll(newFrames(&pipe{in: in}, ""))
		require.NoError(t, err)
		require.Equal(t, string(want), string(got))
	}
}

func TestFramesOfTheServerStayWhole(t *testing.T) {
	said := slices.Concat(
		frame(typeSettings, 0, 0, []byte{0, settingMaxStreams, 0, 0, 0, 250, 0, settingInitialWindow, 0, 1, 0, 0}),
		frame(typeHeaders, 0, 1, []byte("begun")),
		frame(typeContinuation, flagEndHeaders, 1, []byte("ended")),
		frame(typeReset, 0, 1, []byte{0, 0, 0, 2}),
		frame(typeReset, 0, 3, []byte{0, 0, 0, 2}),
	)
	for _, size := range []int{1, 5, len(said)} {
		p := &pipe{}
		f := newFrames(p, OneStream)
		f.resetWith(3, 8)
		for part := range slices.Chunk(said, size) {
			n, err := f.Write(part)
			require.NoError(t, err)
			require.Equal(t, len(part), n)
			if bytes.Contains(p.out.Bytes(), []byte("begun")) {
				require.Contains(t, p.out.String(), "ended", "nothing can come between the two")
			}
		}
		want := slices.Clone(said)
		want[frameHeader+5] = 1
		want[len(want)-1] = 8
		require.Equal(t, string(want), p.out.String())
	}
}

func FuzzFramesOfTheClient(f *testing.F) {
	f.Add([]byte{}, 1)
	f.Add(frame(typeHeaders, flagEndHeaders|flagPadded, 3, []byte("\x09three")), 3)
	f.Add(frame(typeContinuation, flagEndHeaders, 0, nil), 100)
	f.Fuzz(func(t *testing.T, sent []byte, size int) {
		whole := append(slices.Clone(preface), sent...)
		var in []io.Reader
		for part := range slices.Chunk(whole, max(1, size)) {
			in = append(in, bytes.NewReader(part))
		}
		got, err := io.ReadAll(newFrames(&pipe{in: io.MultiReader(in...)}, ""))
		if err != nil {
			t.Fatal(err)
		}
		again, err := io.ReadAll(newFrames(&pipe{in: bytes.NewReader(whole)}, ""))
		if err != nil || !bytes.Equal(got, again) {
			t.Fatalf("the cut matters: %q, %q", got, again)
		}
	})
}

func TestHeadersOverManyFramesKeepTheirStream(t *testing.T) {
	overTLS(t, func(t *testing.T, s *Server) {
		inject(t, s, Fault{Kind: StreamReset, Point: AfterEffect, Code: "CANCEL", Send: 1})
		c := pay("order-1").with("X-Big", strings.Repeat("x", 100<<10))
		require.ErrorContains(t, c.send(s).err, "CANCEL")
		require.Equal(t, 201, requireReplay(t, s, c).status)
		spoofed := pay("order-2").with(streamHeader, "1")
		require.ErrorContains(t, spoofed.send(s).err, "CANCEL")
		require.Equal(t, 1, s.Sends()[2].Conn)
	})
}

func TestStormOverHTTP2HasOneEffectPerOperation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // in memory alone: with real time a slow machine would be part of the storm
		s := NewInMemoryTLS()
		defer s.Close()
		storm := Storm(7)
		for i := range storm {
			storm[i].Delay /= 10
		}
		storm = append(storm,
			Fault{Kind: StreamReset, Point: AfterEffect, Code: "CANCEL", Rate: 0.05, Seed: 7}, Fault{Kind: GoAway, Rate: 0.05, Seed: 7},
			Fault{Kind: GoAway, Point: AfterEffect, Rate: 0.05, Seed: 7}, Fault{Kind: Freeze, Point: AfterEffect, Rate: 0.02, Seed: 7})
		inject(t, s, storm...)
		done := make(chan bool)
		const operations = 40
		for i := range operations {
			c := pay(fmt.Sprintf("key-%d", i))
			c.body = fmt.Sprintf(`{"amount":1999,"currency":"usd","reference":"order-%d"}`, i)
			c.within = 100 * time.Millisecond
			go func() {
				for range 60 {
					transport := s.Transport() // a frozen connection would swallow every attempt
					c.client = &http.Client{Transport: transport}
					r := c.send(s)
					transport.CloseIdleConnections()
					if r.status == 201 && r.bodyErr == nil {
						done <- true
						return
					}
					time.Sleep(5 * time.Millisecond)
				}
				done <- false
			}()
		}
		for range operations {
			require.True(t, <-done)
		}
		require.Len(t, s.Effects(), operations)
		s.AssertOneEffectPerOperation(t)
	})
}
