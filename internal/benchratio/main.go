// Command benchratio compares the ways to send a keyed POST that succeeds at
// once. It runs them in short slices in a new order each round and takes the
// ratios within a round, so that a noisy neighbour slows all of them alike.
//
//	go run ./internal/benchratio
//	go run ./internal/benchratio -rounds 300 -gate 0.8
package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"time"

	"github.com/idem-go/idem/internal/successpath"
)

const slice = 20 * time.Millisecond

func main() {
	rounds := flag.Int("rounds", 100, "rounds; each takes 80 ms")
	procs := flag.Int("procs", 1, "GOMAXPROCS. With 1, a call pays for all that it causes; with more, the collector and the goroutine of http.Client.Timeout run beside it for nothing")
	gate := flag.Float64("gate", 0, "fail if idem takes more than this share of bare-timeout; 0: no gate")
	flag.Parse()
	if *rounds < 1 {
		fmt.Fprintln(os.Stderr, "benchratio: -rounds must be at least 1")
		os.Exit(2)
	}
	runtime.GOMAXPROCS(*procs)
	ratio, err := compare(*rounds)
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchratio:", err)
		os.Exit(1)
	}
	if *gate > 0 && ratio > *gate {
		fmt.Fprintf(os.Stderr, "benchratio: idem / bare-timeout is %.2f, above the gate of %.2f\n", ratio, *gate)
		os.Exit(1)
	}
}

// compare prints the medians and returns that of idem / bare-timeout.
func compare(rounds int) (float64, error) {
	variants := successpath.Variants()
	times := make([][]float64, len(variants)) // ns for one call, by variant and round
	for round := range rounds + 1 {
		for _, i := range rand.Perm(len(variants)) {
			ns, err := run(&variants[i])
			if err != nil {
				return 0, fmt.Errorf("%s: %w", variants[i].Name, err)
			}
			if round > 0 { // the first one warms up
				times[i] = append(times[i], ns)
			}
		}
	}
	at := map[string]int{}
	for i, v := range variants {
		at[v.Name] = i
	}
	median := func(of, to string) float64 {
		ratios := make([]float64, rounds)
		for r := range ratios {
			ratios[r] = times[at[of]][r] / times[at[to]][r]
		}
		return middle(ratios)
	}
	fmt.Printf("%d rounds of %v slices, medians\n", rounds, slice)
	fmt.Printf("%-14s %10s %10s %16s\n", "", "us/call", "to bare", "to bare-timeout")
	for i, v := range variants {
		fmt.Printf("%-14s %10.2f %10.2f %16.2f\n", v.Name, middle(times[i])/1e3, median(v.Name, "bare"), median(v.Name, "bare-timeout"))
	}
	return median("idem", "bare-timeout"), nil
}

// run gives the time of one call, over one slice.
func run(v *successpath.Variant) (ns float64, err error) {
	calls := 0
	start := time.Now()
	for took := time.Duration(0); took < slice; took = time.Since(start) {
		for range 16 {
			if err := v.Send(); err != nil {
				return 0, err
			}
		}
		calls += 16
	}
	return float64(time.Since(start)) / float64(calls), nil
}

func middle(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
