package main

import (
	"bytes"
	"embed"
	"fmt"
	"hash/fnv"
	"html/template"
	"net/http"
	"reflect"
	"time"

	"github.com/idem-go/idem/fakeserver"
)

//go:embed page
var files embed.FS

var pages = template.Must(template.New("").Funcs(template.FuncMap{
	"percent": func(f float64) string { return fmt.Sprintf("%.3f%%", f) },
	"half":    func(from, length float64) float64 { return from + length/2 },
}).ParseFS(files, "page/*.html"))

// shownSends is how many sends the page goes back.
const shownSends = 300

// view is what the templates are filled with.
type view struct {
	URL        string
	Choices    []choice
	Chosen     string // name of the choice that is on; "" = other faults
	What       string
	Faults     []string // in words
	More       int      // faults that are not listed
	Operations []operation
	Older      bool   // there are sends before those shown
	Shown      int    // how many sends are shown
	Settings   string // that differ from the defaults; "" = none do
	Ahead      string // of the clock; "" = it is the real one
}

func (c *console) view(r *http.Request) view {
	const listed = 6
	now, ahead := c.clock()
	sends := c.server.SendsAfter(-shownSends)
	v := view{
		URL: "http://" + r.Host, Choices: c.choices(), Shown: len(sends), Settings: c.given,
		Older: len(sends) > 0 && sends[0].N > 1,
	}
	var before func(name) []earlier
	if v.Older {
		before = func(of name) []earlier { return c.before(sends[0].N, of) }
	}
	v.Operations = timeline(sends, c.effects(sends), before, now)
	if ahead != 0 {
		v.Ahead = ahead.Round(time.Second).String()
	}
	faults := c.current()
	for _, known := range v.Choices {
		if len(known.Faults) == len(faults) && (len(faults) == 0 || reflect.DeepEqual(known.Faults, faults)) {
			v.Chosen, v.What = known.Name, known.What
			break
		}
	}
	for _, f := range faults[:min(len(faults), listed)] {
		v.Faults = append(v.Faults, rounded(f.String()))
	}
	v.More = len(faults) - len(v.Faults)
	return v
}

// effects are those that the sends caused, and perhaps others.
func (c *console) effects(sends []fakeserver.Send) []fakeserver.Effect {
	first := 0
	for _, n := range sends {
		if n.Effect > 0 && (first == 0 || n.Effect < first) {
			first = n.Effect // not always that of the first send: effects come in an order of their own
		}
	}
	if first == 0 {
		return nil
	}
	return c.server.EffectsAfter(first - 1)
}

func (c *console) page(w http.ResponseWriter, r *http.Request) { render(w, r, "page.html", c.view(r)) }

// live is the part of the page that changes. Its ETag tells the script that nothing did.
func (c *console) live(w http.ResponseWriter, r *http.Request) { render(w, r, "live.html", c.view(r)) }

func render(w http.ResponseWriter, r *http.Request, name string, v view) {
	var b bytes.Buffer
	if err := pages.ExecuteTemplate(&b, name, v); err != nil {
		refuse(w, http.StatusInternalServerError, "template", err.Error(), nil)
		return
	}
	sum := fnv.New64a()
	_, _ = sum.Write(b.Bytes())
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("ETag", fmt.Sprintf(`"%x"`, sum.Sum64()))
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b.Bytes()))
}

// act is what the forms of the page do. It ends at the page again, so that it works without the script.
func (c *console) act(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		refuse(w, http.StatusBadRequest, "invalid-request", "The form cannot be read.", nil)
		return
	}
	form := r.PostForm
	switch {
	case form.Has("faults"):
		if !c.choose(form.Get("faults")) {
			refuse(w, http.StatusBadRequest, "invalid-request", "There is no switch "+quoted(form.Get("faults"))+".", nil)
			return
		}
	case form.Has("advance"):
		d, err := time.ParseDuration(form.Get("advance"))
		if err != nil {
			refuse(w, http.StatusBadRequest, "invalid-request", quoted(form.Get("advance"))+" is not a duration.", nil)
			return
		}
		c.advance(d)
	case form.Has("reset"):
		c.reset()
	default:
		refuse(w, http.StatusBadRequest, "invalid-request", "The form has none of faults, advance and reset.", nil)
		return
	}
	http.Redirect(w, r, "/_fake/", http.StatusSeeOther)
}

func (c *console) choose(name string) bool {
	for _, known := range c.choices() {
		if known.Name == name {
			return c.replace(known.Faults) == nil
		}
	}
	return false
}

func asset(name, kind string) http.HandlerFunc {
	data, err := files.ReadFile("page/" + name)
	if err != nil {
		panic(err) // the name is one of ours
	}
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(data)
	}
}
