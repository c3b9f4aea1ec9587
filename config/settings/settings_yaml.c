/* The YAML file of settings: one mapping of names to scalars, and the lists `api_key`
 * and `prefixes`. Messages name file and line. A key without a value (or with null, ~)
 * is ignored. */
#include <stdio.h>
#include <string.h>

#include <yaml.h>

#include "config/settings/settings_table.h"

struct yaml_file {
    yaml_document_t doc;
    const char *name;
    struct settings *settings;
};

enum { WHERE_BYTES = 256 };

/* "quire.yaml line 3: port" */
static const char *place(char out[WHERE_BYTES], const struct yaml_file *f, const yaml_node_t *n,
                         const char *key)
{
    snprintf(out, WHERE_BYTES, "%.150s line %zu: %.60s", f->name, n->start_mark.line + 1, key);
    return out;
}

static const char *scalar(const yaml_node_t *n)
{
    return (const char *)n->data.scalar.value;
}

/* YAML texts have a length and may hold a NUL, which would hide what follows. */
static bool has_nul(const yaml_node_t *n)
{
    return n->type == YAML_SCALAR_NODE && strlen(scalar(n)) != n->data.scalar.length;
}

static bool is_null(const yaml_node_t *n)
{
    if (n->type != YAML_SCALAR_NODE || n->data.scalar.style != YAML_PLAIN_SCALAR_STYLE) {
        return false;
    }
    const char *text = scalar(n);
    return text[0] == '\0' || strcmp(text, "~") == 0 || strcmp(text, "null") == 0;
}

static int set_scalar(struct yaml_file *f, const struct setting *row, const yaml_node_t *n,
                      struct err *e)
{
    char where[WHERE_BYTES];

    place(where, f, n, row->key);
    if (n->type != YAML_SCALAR_NODE) {
        return err_set_param(e, ERR_INVALID, row->key,
                             "%s: a single value is required, not a list or a mapping", where);
    }
    if (has_nul(n)) {
        return err_set_param(e, ERR_INVALID, row->key, "%s: a NUL character is not allowed", where);
    }
    if (row->type == SETTING_PREFIXES) {
        return setting_add_prefix(f->settings, scalar(n), where, e);
    }
    return setting_set(f->settings, row, scalar(n), FROM_FILE, where, e);
}

/* An entry of `prefixes` may also be written as a mapping: {text: "..."}. */
static int set_prefix_mapping(struct yaml_file *f, const struct setting *row, const yaml_node_t *n,
                              struct err *e)
{
    char where[WHERE_BYTES];
    const yaml_node_pair_t *pair = n->data.mapping.pairs.start;

    if (n->data.mapping.pairs.top - pair != 1 ||
        strcmp(scalar(yaml_document_get_node(&f->doc, pair->key)), "text") != 0) {
        return err_set_param(e, ERR_INVALID, row->key,
                             "%s: an entry must be a text, or a mapping with the one key 'text'",
                             place(where, f, n, row->key));
    }
    return set_scalar(f, row, yaml_document_get_node(&f->doc, pair->value), e);
}

static int set_list(struct yaml_file *f, const struct setting *row, const yaml_node_t *n,
                    struct err *e)
{
    for (yaml_node_item_t *item = n->data.sequence.items.start; item < n->data.sequence.items.top;
         item++) {
        const yaml_node_t *entry = yaml_document_get_node(&f->doc, *item);
        bool mapping = entry->type == YAML_MAPPING_NODE && row->type == SETTING_PREFIXES;
        int rc = mapping ? set_prefix_mapping(f, row, entry, e) : set_scalar(f, row, entry, e);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

/* A setting may occur only once, by name or by alias. */
static int check_not_twice(struct yaml_file *f, const struct setting *row, const yaml_node_t *n,
                           bool *seen, struct err *e)
{
    char where[WHERE_BYTES];
    bool *mark = &seen[row - setting_table];

    if (*mark) {
        return err_set_param(e, ERR_INVALID, row->key, "%s: set twice in this file",
                             place(where, f, n, row->key));
    }
    *mark = true;
    return 0;
}

static int set_pair(struct yaml_file *f, const yaml_node_pair_t *pair, bool *seen, struct err *e)
{
    char where[WHERE_BYTES];
    const yaml_node_t *key = yaml_document_get_node(&f->doc, pair->key);
    const yaml_node_t *value = yaml_document_get_node(&f->doc, pair->value);

    if (key->type != YAML_SCALAR_NODE || has_nul(key)) {
        return err_set(e, ERR_INVALID, "%s line %zu: a key must be the name of a setting", f->name,
                       key->start_mark.line + 1);
    }

    const struct setting *row = setting_find(scalar(key), strlen(scalar(key)));
    if (!row) {
        return err_set(e, ERR_INVALID, "%s is not a setting; the nearest is '%s'",
                       place(where, f, key, scalar(key)),
                       setting_nearest(scalar(key), strlen(scalar(key))));
    }
    int rc = check_not_twice(f, row, key, seen, e);
    if (rc < 0 || is_null(value)) {
        return rc;
    }
    if (row->offset == offsetof(struct settings, config)) {
        return err_set_param(e, ERR_INVALID, row->key, "%s: a file cannot name another one",
                             place(where, f, key, row->key));
    }
    bool list = row->type == SETTING_KEYS || row->type == SETTING_PREFIXES;
    rc = list && value->type == YAML_SEQUENCE_NODE ? set_list(f, row, value, e)
                                                   : set_scalar(f, row, value, e);
    if (rc == 0) {
        f->settings->origin[row - setting_table] = FROM_FILE;
    }
    return rc;
}

static int set_all(struct yaml_file *f, const yaml_node_t *root, struct err *e)
{
    if (root->type == YAML_SCALAR_NODE && is_null(root)) {
        return 0;
    }
    if (root->type != YAML_MAPPING_NODE) {
        return err_set(e, ERR_INVALID,
                       "%s line %zu: the file must be a mapping: lines of the form 'name: value'",
                       f->name, root->start_mark.line + 1);
    }
    bool seen[SETTINGS_MAX] = {0};
    int rc = 0;
    for (yaml_node_pair_t *p = root->data.mapping.pairs.start;
         p < root->data.mapping.pairs.top && rc == 0; p++) {
        rc = set_pair(f, p, seen, e);
    }
    return rc;
}

static int refuse_syntax(const yaml_parser_t *p, const char *name, struct err *e)
{
    if (p->error == YAML_MEMORY_ERROR) {
        return err_nomem(e, "the settings file");
    }
    size_t line = p->error == YAML_READER_ERROR ? 0 : p->problem_mark.line + 1;
    const char *problem = p->problem ? p->problem : "cannot be read";
    if (line == 0) {
        return err_set(e, ERR_INVALID, "%s: is not valid YAML: %s", name, problem);
    }
    return err_set(e, ERR_INVALID, "%s line %zu: is not valid YAML: %s", name, line, problem);
}

/* Read the settings from the file's one document. */
static int parse_first(struct yaml_file *f, yaml_parser_t *parser, struct err *e)
{
    if (!yaml_parser_load(parser, &f->doc)) {
        return refuse_syntax(parser, f->name, e);
    }
    const yaml_node_t *root = yaml_document_get_root_node(&f->doc);
    int rc = !root ? 0 : set_all(f, root, e);
    yaml_document_delete(&f->doc);
    return rc;
}

static int expect_end(struct yaml_file *f, yaml_parser_t *parser, struct err *e)
{
    if (!yaml_parser_load(parser, &f->doc)) {
        return refuse_syntax(parser, f->name, e);
    }
    bool more = yaml_document_get_root_node(&f->doc) != NULL;
    yaml_document_delete(&f->doc);
    return more ? err_set(e, ERR_INVALID, "%s: more than one document ('---')", f->name) : 0;
}

int settings_parse_yaml(struct settings *s, const char *text, size_t len, const char *name,
                        struct err *e)
{
    yaml_parser_t parser;

    if (!yaml_parser_initialize(&parser)) {
        return err_nomem(e, "the settings file");
    }
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, len);

    struct yaml_file f = {.name = name, .settings = s};
    int rc = parse_first(&f, &parser, e);
    if (rc == 0) {
        rc = expect_end(&f, &parser, e);
    }
    yaml_parser_delete(&parser);
    return rc;
}
