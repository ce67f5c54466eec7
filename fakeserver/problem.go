package fakeserver

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// problemBase is the common beginning of every problem type; clients should compare what follows it.
const problemBase = "https://fakeserver.test/problems/"

// answer is what the server would say, before any fault gets at it. Answers are shared between replays and never changed.
type answer struct {
	status int
	header []field
	body   []byte
	cause  string // why there is none; "" = nothing to say
	none   bool   // there is no answer: the worker died, the client left or the server closes
}

type field struct{ name, value string }

func (a answer) with(name, value string) answer {
	a.header = append(a.header[:len(a.header):len(a.header)], field{name, value})
	return a
}

func (a answer) get(name string) string {
	for _, f := range a.header {
		if f.name == name {
			return f.value
		}
	}
	return ""
}

func jsonAnswer(status int, v any) answer {
	body, err := json.Marshal(v)
	if err != nil {
		panic("fakeserver: resource does not marshal: " + err.Error()) // plain structs of strings and integers always do
	}
	return answer{status: status, header: []field{{"Content-Type", "application/json"}}, body: append(body, '\n')}
}

// problem is an RFC 9457 answer. The members are extension members.
func problem(status int, kind, detail string, members map[string]any) answer {
	doc := map[string]any{
		"type":   problemBase + kind,
		"title":  titleOf(status),
		"status": status,
		"detail": detail,
	}
	for name, value := range members {
		doc[name] = value
	}
	a := jsonAnswer(status, doc)
	a.header[0].value = "application/problem+json"
	return a
}

func titleOf(status int) string {
	if text := http.StatusText(status); text != "" {
		return text
	}
	return "Status " + strconv.Itoa(status)
}

// fieldError names one wrong field of a request body.
type fieldError struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// invalid is the answer to a request that cannot be understood. It is not stored: a corrected request may use the same key.
func invalid(errs ...fieldError) *answer {
	detail := errs[0].Detail
	if errs[0].Field != "" {
		detail = errs[0].Field + ": " + detail
	}
	a := problem(http.StatusBadRequest, "invalid-request", detail, map[string]any{"errors": errs})
	return &a
}
