package fakeserver

import (
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The table of the package comment is run, row by row.
func TestTheTableOfFaultsIsTrue(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	row := regexp.MustCompile(`(?m)^//\t([a-z-]+)? +([a-z]+-[a-z]+) +(yes|no|once) `)
	kind, rows := "", map[Kind][]Point{}
	for _, m := range row.FindAllStringSubmatch(string(doc), -1) {
		if m[1] != "" {
			kind = m[1]
		}
		f := Fault{Kind: Kind(kind), Point: Point(m[2]), Send: 1}
		rows[f.Kind] = append(rows[f.Kind], f.Point)
		t.Run(f.String(), func(t *testing.T) {
			inMemory(t, func(t *testing.T, s *Server) {
				switch f.Kind {
				case Status:
					f.Status = 503
				case Redirect:
					if f.Point == BeforeEffect {
						f.Location = "/elsewhere"
					}
				case Bomb, BigHeaders:
					f.Bytes = 1 << 16 // their defaults take a second of real time
				case Late, Trickle, SlowRead, Endless:
					f.Delay = time.Second
				}
				if f.Point == DuringEffect && f.Kind != Stuck {
					f.Delay = time.Second
				}
				inject(t, s, f)
				c := pay("order-1")
				c.within = time.Minute
				c.send(s)
				time.Sleep(time.Minute)
				want := 1
				if m[3] == "no" {
					want = 0
				}
				require.Len(t, s.Effects(), want)
				require.Equal(t, f.String(), s.Sends()[0].Fault)
			})
		})
	}
	for name, k := range kinds {
		require.ElementsMatch(t, k.points, rows[name], "%s", name)
		require.Equal(t, k.points[0], rows[name][0], "the default of %s comes first", name)
	}
	require.Len(t, rows, len(kinds))
}
