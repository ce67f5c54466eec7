package fakeserver

import (
	"bytes"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMemoryConnectionCarriesMoreThanItHolds(t *testing.T) {
	client, server := memPair()
	data := bytes.Repeat([]byte("0123456789abcdef"), 50_000)
	var group sync.WaitGroup
	group.Go(func() {
		_, err := client.Write(data)
		require.NoError(t, err)
		require.NoError(t, client.Close())
	})
	got, err := io.ReadAll(server)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
	group.Wait()
	_, err = server.Write([]byte("x"))
	require.ErrorIs(t, err, syscall.EPIPE)
	_, err = client.Read(make([]byte, 1))
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = client.Write([]byte("x"))
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestMemoryResetLosesWhatIsUnread(t *testing.T) {
	client, server := memPair()
	_, err := server.Write([]byte("lost"))
	require.NoError(t, err)
	server.Reset()
	_, err = client.Read(make([]byte, 10))
	require.ErrorIs(t, err, syscall.ECONNRESET)
	_, err = client.Write([]byte("x"))
	require.ErrorIs(t, err, syscall.ECONNRESET)
}

func TestMemoryDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := memPair()
		start := time.Now()
		require.NoError(t, client.SetDeadline(start.Add(time.Minute)))
		_, err := client.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, time.Minute, time.Since(start))
		_, err = client.Write([]byte("x"))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)

		require.NoError(t, client.SetDeadline(time.Time{}))
		require.NoError(t, client.SetWriteDeadline(time.Now().Add(time.Minute)))
		n, err := client.Write(make([]byte, memBuffer+1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "nobody reads")
		require.Equal(t, memBuffer, n)

		go func() {
			time.Sleep(time.Minute)
			_ = server.SetReadDeadline(time.Unix(1, 0)) // how net/http interrupts a read
		}()
		_, err = io.Copy(io.Discard, server)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.NoError(t, client.SetDeadline(time.Now().Add(time.Hour)))
		require.NoError(t, client.Close())
		require.NoError(t, server.Close())
	})
}
