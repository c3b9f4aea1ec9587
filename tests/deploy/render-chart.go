// Renders the Helm chart without Helm: the same template language, the same functions (Masterminds' sprig, and the few that Helm adds),
// values from values.yaml and --set.
//
//	GO111MODULE=off GOPATH=/usr/share/gocode go run tests/deploy/render-chart.go deploy/helm/quire [name.of.value=YAML ...]
//
// Debian: golang-go golang-github-masterminds-sprig-dev golang-k8s-sigs-yaml-dev. All documents go to standard output.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "render-chart:", err)
		os.Exit(1)
	}
}

func readYAML(path string) map[string]interface{} {
	text, err := os.ReadFile(path)
	must(err)
	values := map[string]interface{}{}
	must(yaml.UnmarshalStrict(text, &values))
	return values
}

// set puts a value at a.b.c, as --set does.
func set(values map[string]interface{}, assignment string) {
	name, text, found := strings.Cut(assignment, "=")
	if !found {
		must(fmt.Errorf("%q is not name=value", assignment))
	}
	parts := strings.Split(name, ".")
	for _, part := range parts[:len(parts)-1] {
		next, ok := values[part].(map[string]interface{})
		if !ok {
			must(fmt.Errorf("%s is not among the chart's values", name))
		}
		values = next
	}
	var value interface{}
	must(yaml.Unmarshal([]byte(text), &value))
	values[parts[len(parts)-1]] = value
}

// functions are sprig's without those that Helm takes away, and Helm's own.
func functions(t *template.Template) template.FuncMap {
	f := sprig.TxtFuncMap()
	delete(f, "env")
	delete(f, "expandenv")
	f["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := t.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	f["toYaml"] = func(v interface{}) (string, error) {
		text, err := yaml.Marshal(v)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	f["required"] = func(message string, v interface{}) (interface{}, error) {
		if v == nil || v == "" {
			return nil, errors.New(message)
		}
		return v, nil
	}
	return f
}

func main() {
	if len(os.Args) < 2 {
		must(errors.New("usage: render-chart CHART [name.of.value=YAML ...]"))
	}
	chart := os.Args[1]
	values := readYAML(filepath.Join(chart, "values.yaml"))
	for _, assignment := range os.Args[2:] {
		set(values, assignment)
	}
	meta := map[string]interface{}{}
	for k, v := range readYAML(filepath.Join(chart, "Chart.yaml")) {
		meta[strings.ToUpper(k[:1])+k[1:]] = v
	}
	base := meta["Name"].(string) + "/templates"
	t := template.New("chart").Option("missingkey=zero")
	t.Funcs(functions(t))
	paths, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	must(err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		must(err)
		_, err = t.New(base + "/" + filepath.Base(path)).Parse(string(text))
		must(err)
	}
	data := map[string]interface{}{
		"Values":  values,
		"Chart":   meta,
		"Release": map[string]interface{}{"Name": "test", "Namespace": "default", "Service": "Helm"},
	}
	for _, path := range paths {
		if filepath.Ext(path) != ".yaml" {
			continue
		}
		name := base + "/" + filepath.Base(path)
		data["Template"] = map[string]interface{}{"Name": name, "BasePath": base}
		fmt.Println("---")
		must(t.ExecuteTemplate(os.Stdout, name, data))
	}
}
