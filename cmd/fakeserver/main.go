// Command fakeserver is package fakeserver on a port: a payment and booking server with real idempotency semantics, made
// to be broken, for clients in any language. See README.md beside this file.
//
//	go build -o fakeserver ./cmd/fakeserver
//	./fakeserver -addr 127.0.0.1:8080
//	./fakeserver -addr :0 -faults mixed -rate 0.35 -seed 7
//	./fakeserver -faults faults.json -settings stripe,retention=1h
//
// The first line of its output is its URL; then comes one line per send. A page that shows what happens, and the admin
// interface, are under /_fake/. Ctrl-C and SIGTERM end it with status 0.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/idem-go/idem/fakeserver"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

type options struct {
	addr     string
	faults   string
	seed     int64
	rate     float64
	settings string
	remote   bool
	hosts    string
	quiet    bool
}

func (o *options) flags(f *flag.FlagSet) {
	f.StringVar(&o.addr, "addr", "127.0.0.1:8080", "`host:port` to listen on; port 0 takes a free one, no host means 127.0.0.1 (with -allow-remote: every interface)")
	f.StringVar(&o.faults, "faults", "none", "one of "+switches()+", or a JSON `file` with an array of faults")
	f.Int64Var(&o.seed, "seed", 1, "`number` that the draws of -faults mixed and storm follow")
	f.Float64Var(&o.rate, "rate", 0.35, "`share` of the sends that -faults mixed hits, 0 to 1")
	f.StringVar(&o.settings, "settings", "", "`list` such as lenient,retention=1h or stripe,key_per=credential; first, if at all, one of "+presets()+"; then any of "+settingNames())
	f.BoolVar(&o.remote, "allow-remote", false, "listen on addresses that other machines reach; they can then switch faults and read the ledger")
	f.StringVar(&o.hosts, "host", "", "`names`, comma-separated, under which /_fake/ may be asked for, besides localhost and IP addresses")
	f.BoolVar(&o.quiet, "quiet", false, "print the URL only, no line per send or change of the faults")
}

// run serves until ctx ends and gives the exit status: 0, 1 if it cannot serve, 2 if the command line is wrong.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o options
	f := flag.NewFlagSet("fakeserver", flag.ContinueOnError)
	f.SetOutput(stderr)
	o.flags(f)
	if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return 2
	}
	fail := func(status int, err error) int {
		_, _ = fmt.Fprintln(stderr, "fakeserver:", strings.TrimPrefix(err.Error(), "fakeserver: "))
		return status
	}
	if f.NArg() > 0 {
		return fail(2, fmt.Errorf("what is %q? There are only flags", f.Arg(0)))
	}
	var unused error
	f.Visit(func(given *flag.Flag) {
		switch {
		case given.Name == "rate" && o.faults != "mixed":
			unused = errors.New("-rate: is for -faults mixed only")
		case given.Name == "seed" && o.faults != "mixed" && o.faults != "storm":
			unused = errors.New("-seed: is for -faults mixed and -faults storm only")
		}
	})
	if unused != nil {
		return fail(2, unused)
	}
	c := &console{remote: o.remote, rate: o.rate, seed: o.seed, given: o.settings}
	if o.hosts != "" {
		c.hosts = strings.Split(o.hosts, ",")
	}
	faults, err := c.startFaults(o.faults)
	if err != nil {
		return fail(2, err)
	}
	if c.settings, err = parseSettings(o.settings); err != nil {
		return fail(2, err)
	}
	addr := o.addr
	if !o.remote {
		if addr, err = loopback(ctx, addr); err != nil {
			return fail(2, err)
		}
	}
	server, err := fakeserver.Listen(addr)
	if err != nil {
		return fail(1, err)
	}
	defer server.Close()
	server.Apply(c.settings)
	c.server = server
	if err := c.replace(faults); err != nil {
		return fail(2, err)
	}
	var mu sync.Mutex // one line at a time
	mu.Lock()
	if !o.quiet {
		c.say = func(text string) {
			mu.Lock()
			defer mu.Unlock()
			_, _ = fmt.Fprintln(stdout, printable(text))
		}
		server.Watch(func(n fakeserver.Send) { c.say(line(n, effectOf(server, n))) })
	}
	server.Mount("/_fake/", c.handler())
	_, _ = fmt.Fprintln(stdout, reachable(server.URL())) // the first line, and when all is ready: whoever reads it calls at once
	mu.Unlock()
	<-ctx.Done()
	return 0
}

// loopback gives addr back if only this machine reaches it.
func loopback(ctx context.Context, addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", fmt.Errorf("-addr: %w", err)
	}
	if host == "" {
		return net.JoinHostPort("127.0.0.1", port), nil
	}
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return "", fmt.Errorf("-addr: %w", err)
	}
	for _, ip := range found {
		if !ip.Unmap().IsLoopback() {
			return "", fmt.Errorf("-addr: other machines can reach %s; say -allow-remote if they may switch faults and read the ledger", host)
		}
	}
	return addr, nil
}

// reachable names this machine instead of the wildcard address, which is none to connect to.
func reachable(url string) string {
	return strings.NewReplacer("//[::]:", "//127.0.0.1:", "//0.0.0.0:", "//127.0.0.1:").Replace(url)
}

func effectOf(s *fakeserver.Server, n fakeserver.Send) *fakeserver.Effect {
	if n.Effect == 0 {
		return nil
	}
	for _, e := range s.EffectsAfter(n.Effect - 1) {
		return &e
	}
	return nil // a Reset was quicker
}
