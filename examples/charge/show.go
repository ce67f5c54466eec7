package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/idem-go/idem"
	"github.com/idem-go/idem/examples/internal/payrun"
	"github.com/idem-go/idem/fakeserver"
)

// show writes the table.
func show(w io.Writer, r *payrun.Run, p idem.Policy, budget string) {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }

	var attempts, inProgress, sends, calls int
	waits, waited := map[string]int{}, map[string]time.Duration{}
	first, again := map[idem.Outcome]int{}, map[string]int{}
	calledAgain := 0
	for _, of := range r.Calls {
		first[of[0].Claim]++
		if len(of) > 1 {
			calledAgain++
		}
		for k, c := range of {
			calls++
			if k < len(of)-1 {
				again[c.Why]++
			}
			sends += c.Report.Sends
			for i, a := range c.Report.Attempts {
				if i > 0 && a.N == c.Report.Attempts[i-1].N {
					inProgress++
				} else {
					attempts++
				}
				if a.WaitFrom != "" {
					waits[a.WaitFrom]++
					waited[a.WaitFrom] += a.Wait
				}
			}
		}
	}
	copies := 0
	for _, s := range r.Sends {
		if s.Duplicate {
			copies++
		}
	}

	say("%v: %.1fs", r.Options, r.Took.Seconds())
	say("policy: %v for an attempt, %v for a call, first wait up to %v, then up to %v", p.AttemptTimeout, p.MaxElapsed, p.BackoffBase, p.BackoffCap)
	say("budget: %s", budget)
	say("")
	r.ShowFaults(w)
	say("")
	say("what the client did")
	say("  %5d  calls", calls)
	say("  %5d  attempts, and %d more sends to ask after an operation in progress", attempts, inProgress)
	say("  %5d  sends; the server got %d of them, and %d copies that the network made", sends, len(r.Sends)-copies, copies)
	for _, from := range payrun.Ranked(waits) {
		if from == "at-once" {
			say("  %5d  retries at once, because an idle connection was dead", waits[from])
			continue
		}
		say("  %5d  waits (%s), %v in all", waits[from], from, waited[from].Round(time.Millisecond))
	}
	say("what the first call of each operation claimed")
	for _, o := range []idem.Outcome{idem.Executed, idem.Refused, idem.NotExecuted, idem.Unknown} {
		say("  %5d  %v", first[o], o)
	}
	say("operations called again: %d", calledAgain)
	for _, reason := range payrun.Ranked(again) {
		say("  %5d  calls because of: %s", again[reason], reason)
	}
	say("")
	showEventful(w, r, 3)
}

// showEventful tells the story of the operations with the most attempts.
func showEventful(w io.Writer, r *payrun.Run, n int) {
	order := make([]int, len(r.Calls))
	made := make([]int, len(r.Calls))
	for i, calls := range r.Calls {
		order[i] = i
		for _, c := range calls {
			made[i] += c.Attempts
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(made[b], made[a]) })
	sends, effects := map[string][]fakeserver.Send{}, r.EffectsOf()
	for _, s := range r.Sends {
		sends[s.Key] = append(sends[s.Key], s)
	}
	_, _ = fmt.Fprintln(w, "the most eventful operations")
	for _, i := range order[:min(n, len(order))] {
		if made[i] == 1 {
			_, _ = fmt.Fprintln(w, "  every other operation needed one attempt")
			break
		}
		calls := r.Calls[i]
		last := calls[len(calls)-1].Report
		_, _ = fmt.Fprintf(w, "  %v, key %s, calls: %d, attempts: %d, effects: %d\n",
			last.Operation, last.Key, len(calls), made[i], len(effects[r.Payments[i].ID]))
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for k, c := range calls {
			if k > 0 {
				_, _ = fmt.Fprintf(t, "    %v\tcalled again\n", c.Began.Sub(calls[0].Began).Round(time.Millisecond))
			}
			for _, a := range c.Report.Attempts {
				_, _ = fmt.Fprintf(t, "    %v\tattempt %d\tfault: %s\tclient: %s\teffect %v%s\n",
					a.Start.Sub(calls[0].Began).Round(time.Millisecond), a.N,
					cmp.Or(faultDuring(sends[last.Key], a), "none"), heard(a), a.Outcome, then(a))
			}
		}
		_ = t.Flush()
	}
	_, _ = fmt.Fprintln(w)
}

// faultDuring is what the server did to the send of an attempt.
func faultDuring(sends []fakeserver.Send, a idem.Attempt) string {
	for _, s := range sends {
		if !s.Duplicate && !s.At.Before(a.Start) && !s.At.After(a.Start.Add(a.Took)) {
			return payrun.FaultOf(s)
		}
	}
	return ""
}

// heard is what the client got in an attempt.
func heard(a idem.Attempt) string {
	switch {
	case a.Err == nil:
		return fmt.Sprint(a.Status, " ", http.StatusText(a.Status))
	case errors.Is(a.Err, context.DeadlineExceeded):
		return "no answer in time"
	case errors.Is(a.Err, syscall.ECONNRESET):
		return "connection reset"
	case errors.Is(a.Err, io.ErrUnexpectedEOF):
		return "answer cut"
	case errors.Is(a.Err, io.EOF):
		return "connection closed"
	}
	return "no usable answer"
}

func then(a idem.Attempt) string {
	switch {
	case a.WaitFrom == "":
		return ""
	case a.Wait == 0:
		return ", again at once"
	}
	return fmt.Sprintf(", wait %v (%s)", a.Wait.Round(time.Millisecond), a.WaitFrom)
}
