package fakeserver

import "strconv"

type upload struct {
	ID     string `json:"id"`
	Object string `json:"object"`
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
}

// parseUpload has the digest already: it was taken while the body streamed by, so that no size needs memory.
func parseUpload(q *request) {
	q.act = func(s *Server) (answer, Effect) {
		s.uploads++
		u := upload{ID: "upl_" + strconv.Itoa(s.uploads), Object: "upload", SHA256: q.bodySum, Size: q.bodyLen}
		return jsonAnswer(201, u), Effect{Kind: "upload", ID: u.ID, Amount: u.Size}
	}
}
