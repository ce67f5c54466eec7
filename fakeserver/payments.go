package fakeserver

import (
	"net/http"
	"slices"
	"strconv"
)

// DeclinedAmount is the test amount that the bank always declines, as does the source "tok_declined": 402, stored
// under the key, no effect.
const DeclinedAmount = 40200

const declinedSource = "tok_declined"

type payments struct {
	byID        map[string]*payment
	byReference map[string][]*payment
	refunds     int
}

func newPayments() payments {
	return payments{byID: map[string]*payment{}, byReference: map[string][]*payment{}}
}

type payment struct {
	ID        string `json:"id"`
	Object    string `json:"object"`
	Amount    int64  `json:"amount"`
	Currency  string `json:"currency"`
	Reference string `json:"reference"`
	Status    string `json:"status"`
	Refunded  int64  `json:"refunded"`
	Created   int64  `json:"created"`
}

type refund struct {
	ID        string `json:"id"`
	Object    string `json:"object"`
	Payment   string `json:"payment"`
	Amount    int64  `json:"amount"`
	Reference string `json:"reference"`
	Status    string `json:"status"`
	Created   int64  `json:"created"`
}

func parsePayment(q *request) {
	var in struct {
		Amount    *int64 `json:"amount"`
		Currency  string `json:"currency"`
		Reference string `json:"reference"`
		Source    string `json:"source"`
	}
	if !q.decode(&in) {
		return
	}
	q.reference = in.Reference
	if q.wrong = check(positive("amount", in.Amount), currency(in.Currency)); q.wrong != nil {
		return
	}
	q.act = func(s *Server) (answer, Effect) {
		if *in.Amount == DeclinedAmount || in.Source == declinedSource {
			return problem(http.StatusPaymentRequired, "card-declined", "The bank declined the payment.",
				map[string]any{"reference": in.Reference}), Effect{}
		}
		p := &payment{
			ID: "pay_" + strconv.Itoa(len(s.payments.byID)+1), Object: "payment",
			Amount: *in.Amount, Currency: in.Currency, Reference: in.Reference,
			Status: "succeeded", Created: s.now().Unix(),
		}
		s.payments.byID[p.ID] = p
		if p.Reference != "" {
			s.payments.byReference[p.Reference] = append(s.payments.byReference[p.Reference], p)
		}
		return created("/v1/payments/"+p.ID, p), Effect{Kind: "payment", ID: p.ID, Amount: p.Amount}
	}
}

func parsePaymentGet(q *request) {
	id := q.http.PathValue("id")
	q.act = func(s *Server) (answer, Effect) {
		p := s.payments.byID[id]
		if p == nil {
			return notFound("payment"), Effect{}
		}
		return jsonAnswer(http.StatusOK, p), Effect{}
	}
}

func parsePaymentList(q *request) {
	if !q.wantReference() {
		return
	}
	q.act = func(s *Server) (answer, Effect) {
		found := s.payments.byReference[q.reference]
		if found == nil {
			found = []*payment{}
		}
		return list(found), Effect{}
	}
}

func (q *request) wantReference() bool {
	q.reference = q.http.URL.Query().Get("reference")
	if q.reference == "" {
		q.wrong = invalid(fieldError{"reference", "is required in the query"})
	}
	return q.reference != ""
}

func list[T any](found []T) answer {
	return jsonAnswer(http.StatusOK, map[string]any{"object": "list", "data": found})
}

// parseStatus sets a status to what it shall be, so that a second time changes nothing.
func parseStatus(q *request) {
	var in struct {
		Status string `json:"status"`
	}
	if !q.decode(&in) {
		return
	}
	if !slices.Contains([]string{"succeeded", "captured", "disputed"}, in.Status) {
		q.wrong = invalid(fieldError{"status", "must be succeeded, captured or disputed"})
		return
	}
	id := q.http.PathValue("id")
	q.act = func(s *Server) (answer, Effect) {
		p := s.payments.byID[id]
		if p == nil {
			return notFound("payment"), Effect{}
		}
		if p.Status == in.Status {
			return jsonAnswer(http.StatusOK, p), Effect{}
		}
		p.Status = in.Status
		return jsonAnswer(http.StatusOK, p), Effect{Kind: "status", ID: p.ID, Reference: p.Reference}
	}
}

func parseRefund(q *request) {
	var in struct {
		Amount    *int64 `json:"amount"`
		Reference string `json:"reference"`
	}
	if !q.decode(&in) {
		return
	}
	q.reference = in.Reference
	if q.wrong = check(positive("amount", in.Amount)); q.wrong != nil {
		return
	}
	id := q.http.PathValue("id")
	q.act = func(s *Server) (answer, Effect) {
		p := s.payments.byID[id]
		if p == nil {
			return notFound("payment"), Effect{}
		}
		left := p.Amount - p.Refunded
		if *in.Amount > left {
			return problem(http.StatusUnprocessableEntity, "refund-too-large", "The refund is larger than what is left of the payment.",
				map[string]any{"refundable": left}), Effect{}
		}
		p.Refunded += *in.Amount
		s.payments.refunds++
		r := refund{
			ID: "ref_" + strconv.Itoa(s.payments.refunds), Object: "refund", Payment: p.ID,
			Amount: *in.Amount, Reference: in.Reference, Status: "succeeded", Created: s.now().Unix(),
		}
		return jsonAnswer(http.StatusCreated, r), Effect{Kind: "refund", ID: r.ID, Amount: r.Amount}
	}
}

func created(location string, v any) answer {
	return jsonAnswer(http.StatusCreated, v).with("Location", location)
}

// check collects what is wrong; nil entries are right.
func check(found ...*fieldError) *answer {
	var errs []fieldError
	for _, e := range found {
		if e != nil {
			errs = append(errs, *e)
		}
	}
	if errs == nil {
		return nil
	}
	return invalid(errs...)
}

func positive(name string, value *int64) *fieldError {
	switch {
	case value == nil:
		return &fieldError{name, "is required"}
	case *value <= 0:
		return &fieldError{name, "must be a positive integer"}
	}
	return nil
}

func currency(code string) *fieldError {
	if code == "" {
		return &fieldError{"currency", "is required"}
	}
	for i := range len(code) {
		if c := code[i] | 0x20; c < 'a' || c > 'z' {
			return &fieldError{"currency", "must be three letters"}
		}
	}
	if len(code) != 3 {
		return &fieldError{"currency", "must be three letters"}
	}
	return nil
}
