package fakeserver

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
)

const (
	defaultRoom  = "double"
	defaultRooms = 10
	maxNights    = 365
)

type hotels struct {
	rooms        map[roomKey]int // those free; a missing entry is the default
	reservations map[string]*reservation
	byReference  map[roomKey][]*reservation // by hotel and reference
	made         int
}

type roomKey struct{ hotel, name string }

func newHotels() hotels {
	return hotels{rooms: map[roomKey]int{}, reservations: map[string]*reservation{}, byReference: map[roomKey][]*reservation{}}
}

type reservation struct {
	ID        string `json:"id"`
	Object    string `json:"object"`
	Hotel     string `json:"hotel_id"`
	RoomType  string `json:"room_type"`
	Guest     string `json:"guest"`
	Reference string `json:"reference"`
	Nights    int64  `json:"nights"`
	Status    string `json:"status"`
	Created   int64  `json:"created"`
}

// SetRooms sets how many rooms of a type are free in a hotel. A negative number is 0.
func (s *Server) SetRooms(hotel, roomType string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hotels.rooms[roomKey{hotel, roomType}] = max(n, 0)
}

// Rooms says how many rooms of a type are free. Where SetRooms was never called: 10 of "double" in every hotel, none else.
func (s *Server) Rooms(hotel, roomType string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hotels.free(roomKey{hotel, roomType})
}

func (h *hotels) free(of roomKey) int {
	if n, ok := h.rooms[of]; ok {
		return n
	}
	if of.name == defaultRoom {
		return defaultRooms
	}
	return 0
}

// take is the guarded step: it subtracts one only from what is there.
func (h *hotels) take(of roomKey) bool {
	n := h.free(of)
	if n < 1 {
		return false
	}
	h.rooms[of] = n - 1
	return true
}

// takeSeen is the step of a server that read the number of rooms earlier: it writes one less than it has seen.
func (h *hotels) takeSeen(of roomKey, seen int) bool {
	if seen < 0 {
		return h.take(of)
	}
	if seen > 0 {
		h.rooms[of] = seen - 1
	}
	return seen > 0
}

func (r *reservation) path() string {
	return "/v1/hotels/" + url.PathEscape(r.Hotel) + "/reservations/" + r.ID
}

func parseReservation(q *request) {
	var in struct {
		RoomType  string `json:"room_type"`
		Guest     string `json:"guest"`
		Reference string `json:"reference"`
		Nights    *int64 `json:"nights"`
	}
	if !q.decode(&in) {
		return
	}
	q.reference = in.Reference
	q.wrong = check(required("room_type", in.RoomType), required("guest", in.Guest), nights(in.Nights))
	if q.wrong != nil {
		return
	}
	hotel := q.http.PathValue("hotel_id")
	of, seen := roomKey{hotel, in.RoomType}, -1
	q.peek = func(s *Server) { seen = s.hotels.free(of) }
	q.act = func(s *Server) (answer, Effect) {
		if found := s.hotels.byReference[roomKey{hotel, in.Reference}]; s.settings.DuplicateReference && len(found) > 0 {
			at := found[0].path()
			return problem(http.StatusConflict, "duplicate-reference", "The hotel has a reservation with this reference.",
				map[string]any{"reference": in.Reference, "id": found[0].ID, "location": at}).with("Location", at), Effect{}
		}
		if !s.hotels.takeSeen(of, seen) {
			return problem(http.StatusUnprocessableEntity, "sold-out", "No room of this type is left.",
				map[string]any{"hotel_id": hotel, "room_type": in.RoomType}), Effect{}
		}
		s.hotels.made++
		r := &reservation{
			ID: "res_" + strconv.Itoa(s.hotels.made), Object: "reservation", Hotel: hotel,
			RoomType: in.RoomType, Guest: in.Guest, Reference: in.Reference, Nights: 1,
			Status: "confirmed", Created: s.now().Unix(),
		}
		if in.Nights != nil {
			r.Nights = *in.Nights
		}
		s.hotels.reservations[r.ID] = r
		if r.Reference != "" {
			at := roomKey{hotel, r.Reference}
			s.hotels.byReference[at] = append(s.hotels.byReference[at], r)
		}
		return created(r.path(), r), Effect{Kind: "reservation", ID: r.ID}
	}
}

func parseReservationList(q *request) {
	if !q.wantReference() {
		return
	}
	hotel := q.http.PathValue("hotel_id")
	q.act = func(s *Server) (answer, Effect) {
		found := s.hotels.byReference[roomKey{hotel, q.reference}]
		if found == nil {
			found = []*reservation{}
		}
		return list(found), Effect{}
	}
}

func parseReservationGet(q *request) {
	hotel, id := q.http.PathValue("hotel_id"), q.http.PathValue("id")
	q.act = func(s *Server) (answer, Effect) {
		r := s.hotels.find(hotel, id)
		if r == nil {
			return notFound("reservation"), Effect{}
		}
		return jsonAnswer(http.StatusOK, r), Effect{}
	}
}

func parseCancellation(q *request) {
	hotel, id := q.http.PathValue("hotel_id"), q.http.PathValue("id")
	q.act = func(s *Server) (answer, Effect) {
		r := s.hotels.find(hotel, id)
		if r == nil {
			return notFound("reservation"), Effect{}
		}
		delete(s.hotels.reservations, id)
		at := roomKey{hotel, r.Reference}
		if left := slices.DeleteFunc(s.hotels.byReference[at], func(o *reservation) bool { return o == r }); len(left) > 0 {
			s.hotels.byReference[at] = left
		} else {
			delete(s.hotels.byReference, at)
		}
		of := roomKey{hotel, r.RoomType}
		s.hotels.rooms[of] = s.hotels.free(of) + 1
		return answer{status: http.StatusNoContent}, Effect{Kind: "cancellation", ID: id, Reference: r.Reference}
	}
}

func (h *hotels) find(hotel, id string) *reservation {
	if r := h.reservations[id]; r != nil && r.Hotel == hotel {
		return r
	}
	return nil
}

func required(name, value string) *fieldError {
	if value == "" {
		return &fieldError{name, "is required"}
	}
	return nil
}

func nights(n *int64) *fieldError {
	if n != nil && (*n < 1 || *n > maxNights) {
		return &fieldError{"nights", "must be between 1 and 365"}
	}
	return nil
}
