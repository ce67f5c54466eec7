package fakeserver

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
)

// maxBody is the limit of a JSON body.
const maxBody = 1 << 20

// route is one endpoint. It is an http.Handler so that a ServeMux can find it and fill in the path values.
type route struct {
	server  *Server
	pattern string
	keyed   bool // takes an idempotency key and replays
	wants   bool // refuses a request without a key
	stream  bool // the body is digested as it comes, and not kept
	parse   func(*request)
	stub    http.Handler // of Handle; nil = a built-in route
}

func newRoutes(s *Server) *http.ServeMux {
	mux := http.NewServeMux()
	for _, r := range []route{
		{pattern: "POST /v1/payments", keyed: true, parse: parsePayment},
		{pattern: "GET /v1/payments", parse: parsePaymentList},
		{pattern: "GET /v1/payments/{id}", parse: parsePaymentGet},
		{pattern: "PUT /v1/payments/{id}/status", parse: parseStatus},
		{pattern: "POST /v1/payments/{id}/refunds", keyed: true, parse: parseRefund},
		{pattern: "POST /v1/hotels/{hotel_id}/reservations", keyed: true, parse: parseReservation},
		{pattern: "GET /v1/hotels/{hotel_id}/reservations", parse: parseReservationList},
		{pattern: "GET /v1/hotels/{hotel_id}/reservations/{id}", parse: parseReservationGet},
		{pattern: "DELETE /v1/hotels/{hotel_id}/reservations/{id}", parse: parseCancellation},
		{pattern: "POST /v1/uploads", keyed: true, stream: true, parse: parseUpload},
	} {
		r.server, r.wants = s, r.keyed
		mux.Handle(r.pattern, &r)
	}
	return mux
}

func (r *route) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if r.stub != nil {
		c := *r
		c.keyed, c.parse = !safe(req.Method), c.parseStub
		c.wants = req.Method == http.MethodPost || req.Method == http.MethodPatch
		r = &c
	}
	r.server.exchange(r, w, req)
}

// serve finds the endpoint. What the mux would answer itself (404, 405 with Allow) becomes a problem body, and goes
// through faults and the list of sends like everything else.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	if s.besides(w, r) {
		return
	}
	var allowed []string
	for _, mux := range [...]*http.ServeMux{s.stubs, s.routes} {
		h, _ := mux.Handler(r)
		if _, ok := h.(*route); ok {
			mux.ServeHTTP(w, r)
			return
		}
		said := verdict{header: http.Header{}}
		if h.ServeHTTP(&said, r); said.status == http.StatusMethodNotAllowed {
			allowed = append(allowed, said.header.Get("Allow"))
		}
	}
	if allowed == nil && s.toMount(w, r) {
		return
	}
	a := problem(http.StatusNotFound, "not-found", s.nothingHere(r.URL.Path), nil)
	if allowed != nil {
		a = problem(http.StatusMethodNotAllowed, "method-not-allowed", "This path does not take the method "+r.Method+".", nil)
		a = a.with("Allow", strings.Join(allowed, ", "))
	}
	s.exchange(&route{server: s, parse: func(q *request) { q.wrong = &a }}, w, r)
}

// verdict takes what the mux says and keeps the status.
type verdict struct {
	header http.Header
	status int
}

func (v *verdict) Header() http.Header         { return v.header }
func (v *verdict) Write(p []byte) (int, error) { return len(p), nil }
func (v *verdict) WriteHeader(status int)      { v.status = status }

// decode reads a JSON object into v and names the field that does not fit. Unknown fields are ignored.
func (q *request) decode(v any) bool {
	err := json.Unmarshal(q.body, v)
	var wrongType *json.UnmarshalTypeError
	switch {
	case err == nil:
		return true
	case errors.As(err, &wrongType) && wrongType.Field != "":
		q.wrong = invalid(fieldError{wrongType.Field, "must be " + plain(wrongType.Type.Kind().String()) + ", not " + wrongType.Value})
	case errors.As(err, &wrongType):
		q.wrong = invalid(fieldError{"", "The body is not a JSON object but " + wrongType.Value + "."})
	default:
		q.wrong = invalid(fieldError{"", "The body is not JSON: " + err.Error()})
	}
	return false
}

func plain(kind string) string {
	if strings.HasPrefix(kind, "int") {
		return "an integer"
	}
	return "a " + kind
}

func notFound(what string) answer {
	return problem(http.StatusNotFound, "not-found", "There is no such "+what+".", nil)
}
