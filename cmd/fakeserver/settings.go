package main

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/idem-go/idem/fakeserver"
)

var (
	providers = []fakeserver.Provider{
		fakeserver.Stripe, fakeserver.PayPal, fakeserver.Adyen, fakeserver.GoCardless, fakeserver.Increase,
	}
	breakages = []fakeserver.Breakage{
		fakeserver.SeenFlag, fakeserver.FlatConflict, fakeserver.OtherReplay, fakeserver.UnscopedKeys,
		fakeserver.KeysPerReplica, fakeserver.ForgetsAtRestart, fakeserver.ClaimsThenDies, fakeserver.EffectThenKey,
		fakeserver.SellsTwice, fakeserver.IgnoresKeys,
	}
	scopes   = []string{"credential", "account", "nobody"} // as fakeserver.Scope counts
	failures = []string{"free", "store"}                   // as fakeserver.FailurePolicy counts
)

// parseSettings reads a comma-separated list: first, if at all, the name of a provider or of a broken server; then fields
// of fakeserver.Settings in lower case with underscores, as name=value, or the name alone for true.
func parseSettings(list string) (fakeserver.Settings, error) {
	var t fakeserver.Settings
	if list == "" {
		return t, nil
	}
	fields := strings.Split(list, ",")
	if base, ok := preset(strings.TrimSpace(fields[0])); ok {
		t, fields = base, fields[1:]
	}
	for _, f := range fields {
		name, value, given := strings.Cut(strings.TrimSpace(f), "=")
		if !given {
			value = "true"
		}
		if err := set(&t, name, value); err != nil {
			return t, fmt.Errorf("-settings: %s: %w", name, err)
		}
	}
	return t, nil
}

// preset gives the settings of a provider or of a broken server.
func preset(name string) (t fakeserver.Settings, ok bool) {
	switch {
	case slices.Contains(providers, fakeserver.Provider(name)):
		return fakeserver.Like(fakeserver.Provider(name)), true
	case slices.Contains(breakages, fakeserver.Breakage(name)):
		return fakeserver.Broken(fakeserver.Breakage(name)), true
	}
	return t, false
}

// presets and settingNames are what a list of settings may hold.
func presets() string {
	var names []string
	for _, p := range providers {
		names = append(names, string(p))
	}
	for _, b := range breakages {
		names = append(names, string(b))
	}
	return strings.Join(names, ", ")
}

func settingNames() string {
	var names []string
	fields := reflect.TypeFor[fakeserver.Settings]()
	for i := range fields.NumField() {
		names = append(names, snake(fields.Field(i).Name))
	}
	return strings.Join(names, ", ")
}

func set(t *fakeserver.Settings, name, value string) error {
	if _, ok := preset(name); ok {
		return fmt.Errorf("a provider or broken server must come first, and alone")
	}
	v := reflect.ValueOf(t).Elem()
	for i := range v.NumField() {
		if snake(v.Type().Field(i).Name) != name {
			continue
		}
		field := v.Field(i)
		switch field.Interface().(type) {
		case string:
			field.SetString(value)
		case bool:
			b, err := strconv.ParseBool(value)
			if err != nil {
				return fmt.Errorf("%q is neither true nor false", value)
			}
			field.SetBool(b)
		case int:
			n, err := strconv.Atoi(value)
			if err != nil {
				return fmt.Errorf("%q is not a number", value)
			}
			field.SetInt(int64(n))
		case time.Duration:
			d, err := time.ParseDuration(value)
			if err != nil {
				return fmt.Errorf("%q is not a duration such as 90m", value)
			}
			field.SetInt(int64(d))
		case fakeserver.Scope:
			return choose(field, scopes, value)
		case fakeserver.FailurePolicy:
			return choose(field, failures, value)
		default:
			return fmt.Errorf("cannot be set here")
		}
		return nil
	}
	return fmt.Errorf("is no setting; the list begins, if at all, with one of %s; then come any of %s", presets(), settingNames())
}

func choose(field reflect.Value, names []string, value string) error {
	i := slices.Index(names, value)
	if i < 0 {
		return fmt.Errorf("%q is none of %s", value, strings.Join(names, ", "))
	}
	field.SetInt(int64(i))
	return nil
}

// settingsJSON lists what differs from the zero value.
func settingsJSON(t fakeserver.Settings) map[string]any {
	given := map[string]any{}
	v := reflect.ValueOf(t)
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			continue
		}
		value := v.Field(i).Interface()
		switch x := value.(type) {
		case time.Duration:
			value = x.String()
		case fakeserver.Scope:
			value = scopes[x]
		case fakeserver.FailurePolicy:
			value = failures[x]
		}
		given[snake(v.Type().Field(i).Name)] = value
	}
	return given
}

// snake spells a field in lower case: RequestIDHeader is request_id_header.
func snake(name string) string {
	var b strings.Builder
	letters := []rune(name)
	for i, r := range letters {
		if unicode.IsUpper(r) {
			after := i+1 < len(letters) && unicode.IsLower(letters[i+1])
			if i > 0 && (unicode.IsLower(letters[i-1]) || after) {
				b.WriteByte('_')
			}
			r = unicode.ToLower(r)
		}
		b.WriteRune(r)
	}
	return b.String()
}
