/* From sets of values to symbols. What is below arrays and objects becomes a rule each,
 * defined from a queue, so that the depth of a schema is not that of the stack. */
#include <stdio.h>
#include <string.h>

#include "engine/constrain/json_schema/schema.h"

enum { BLANKS = 2, INDENT = 64 };

sym_id emit_seq(struct schema *s, sym_id a, sym_id b)
{
    return a && b ? sym_concat(s->b, (sym_id[]){a, b}, 2) : 0;
}

sym_id emit_either(struct schema *s, sym_id a, sym_id b)
{
    return a && b && a != b ? sym_or(s->b, (sym_id[]){a, b}, 2) : a ? a : b;
}

/* ---- what every schema needs ---- */

/* An opening or closing mark, with the white space inside it. */
static sym_id open_mark(struct schema *s, const char *text)
{
    return sym_terminal(s->b, rx_concat(s->b, rx_bytes(s->b, text, 1), s->blank));
}

static sym_id close_mark(struct schema *s, const char *text)
{
    return sym_terminal(s->b, rx_concat(s->b, s->blank, rx_bytes(s->b, text, 1)));
}

/* The colon between a name and its value. */
static rx_id colon(struct schema *s)
{
    return rx_concat(s->b, s->spaces, rx_concat(s->b, rx_bytes(s->b, ":", 1), s->spaces));
}

rx_id emit_comma(struct schema *s)
{
    return rx_concat(s->b, s->spaces, rx_concat(s->b, rx_bytes(s->b, ",", 1), s->blank));
}

static rx_id quoted(struct schema *s, rx_id body)
{
    rx_id quote = rx_bytes(s->b, "\"", 1);

    return rx_concat(s->b, quote, rx_concat(s->b, body, quote));
}

static void make_any_value(struct schema *s)
{
    struct shape plain = *s->all;
    sym_id value = sym_rule(s->b);

    s->any_value = value;
    plain.string.rx = s->never;
    sym_id scalar = sym_terminal(s->b, emit_scalar(s, &plain));
    sym_id object = emit_object(s, s->all->object[0]), array = emit_array(s, s->all->array[0]);
    sym_define(s->b, value, sym_or(s->b, (sym_id[]){s->any_string, scalar, object, array}, 4));
}

void emit_constants(struct schema *s)
{
    struct code_range space = {' ', ' '}, indent[] = {{'\t', '\t'}, {' ', ' '}};
    rx_id cr = rx_or(s->b, rx_empty(s->b), rx_bytes(s->b, "\r", 1));
    rx_id line = rx_concat(s->b, rx_concat(s->b, cr, rx_bytes(s->b, "\n", 1)),
                           rx_repeat(s->b, rx_class(s->b, indent, 2, false), 0, INDENT));

    s->spaces = rx_repeat(s->b, rx_class(s->b, &space, 1, false), 0, BLANKS);
    s->blank = rx_or(s->b, line, s->spaces);
    s->body = rx_json_body(s->b, s->any);
    s->comma = sym_terminal(s->b, emit_comma(s));
    s->open_object = open_mark(s, "{");
    s->close_object = close_mark(s, "}");
    s->end_object = sym_terminal(s->b, rx_bytes(s->b, "}", 1));
    s->open_array = open_mark(s, "[");
    s->close_array = close_mark(s, "]");
    s->end_array = sym_terminal(s->b, rx_bytes(s->b, "]", 1));
    s->any_string = sym_terminal(s->b, quoted(s, s->body));
    if (!grammar_build_failed(s->b)) {
        make_any_value(s);
    }
}

/* ---- values that are neither arrays nor objects ---- */

/* A string's JSON text in its shortest spelling. */
static rx_id quoted_text(struct schema *s, const struct value *string)
{
    static const char SHORT[][2] = {{'"', '"'},  {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'},
                                    {'\n', 'n'}, {'\r', 'r'},  {'\t', 't'}};
    char *text = schema_alloc(s, 6 * (size_t)string->n + 3, 1);
    size_t n = 1;

    if (!text) {
        return 0;
    }
    text[0] = '"';
    for (int32_t i = 0; i < string->n; i++) {
        char c = string->text[i], letter = 0;
        for (size_t k = 0; k < ARRAY_LEN(SHORT); k++) {
            letter = SHORT[k][0] == c ? SHORT[k][1] : letter;
        }
        if (letter) {
            text[n++] = '\\';
            text[n++] = letter;
        } else if ((uint8_t)c < 0x20) {
            n += (size_t)snprintf(text + n, 7, "\\u%04x", (unsigned)(uint8_t)c);
        } else {
            text[n++] = c;
        }
    }
    text[n++] = '"';
    return rx_bytes(s->b, text, n);
}

rx_id emit_name(struct schema *s, const struct value *name)
{
    return rx_concat(s->b, quoted_text(s, name), colon(s));
}

rx_id emit_names(struct schema *s, rx_id names)
{
    rx_id body = names == s->any ? s->body : rx_json_body(s->b, names);

    return rx_concat(s->b, quoted(s, body), colon(s));
}

static rx_id string_text(struct schema *s, const struct string_set *set)
{
    if (set->rx == s->never) {
        return s->never;
    }
    if (set->n == 0) {
        return quoted(s, set->rx == s->any ? s->body : rx_json_body(s->b, set->rx));
    }
    rx_id *each = schema_alloc(s, (size_t)set->n, sizeof(*each));
    for (int32_t i = 0; each && i < set->n; i++) {
        each[i] = quoted_text(s, set->lit[i]);
    }
    return each ? rx_any_of(s, each, set->n) : 0;
}

rx_id emit_scalar(struct schema *s, const struct shape *shape)
{
    rx_id x = s->never;

    x = shape->null ? rx_or(s->b, x, rx_bytes(s->b, "null", 4)) : x;
    x = shape->no ? rx_or(s->b, x, rx_bytes(s->b, "false", 5)) : x;
    x = shape->yes ? rx_or(s->b, x, rx_bytes(s->b, "true", 4)) : x;
    if (shape->number.plain != s->never) {
        x = rx_or(s->b, x, number_text(s, shape->number));
    }
    return rx_or(s->b, x, string_text(s, &shape->string));
}

/* ---- conjunctions ---- */

static sym_id scalar_symbol(struct schema *s, const struct shape *shape)
{
    struct shape rest = *shape;
    bool any_string = shape->string.rx == s->any && shape->string.n == 0;

    if (any_string) {
        rest.string.rx = s->never;
    }
    rx_id x = emit_scalar(s, &rest);
    sym_id sym = x == s->never || rx_is_never(s->b, x) ? 0 : sym_terminal(s->b, x);
    return any_string ? emit_either(s, s->any_string, sym) : sym;
}

sym_id emit_conj(struct schema *s, conj_id c)
{
    if (c == CONJ_TRUE || c == CONJ_FALSE || s->conj[c].sym) {
        return c == CONJ_TRUE ? s->any_value : c == CONJ_FALSE ? 0 : s->conj[c].sym;
    }
    const struct shape *shape = conj_shape(s, c);
    if (!shape || shape_never(s, shape, 3)) {
        return 0;
    }
    if (shape == s->all) {
        return s->conj[c].sym = s->any_value;
    }
    if (shape->n_arrays == 0 && shape->n_objects == 0) {
        return s->conj[c].sym = scalar_symbol(s, shape);
    }
    s->queue[s->n_queue++] = c;
    return s->conj[c].sym = sym_rule(s->b);
}

static sym_id nested_symbol(struct schema *s, const struct shape *shape)
{
    sym_id sym = scalar_symbol(s, shape);

    for (int32_t i = 0; i < shape->n_objects; i++) {
        sym = emit_either(s, sym, emit_object(s, shape->object[i]));
    }
    for (int32_t i = 0; i < shape->n_arrays; i++) {
        sym = emit_either(s, sym, emit_array(s, shape->array[i]));
    }
    return sym;
}

void emit_queue(struct schema *s)
{
    while (s->queued < s->n_queue && !grammar_build_failed(s->b)) {
        conj_id c = s->queue[s->queued++];
        sym_id sym = nested_symbol(s, s->conj[c].shape);
        sym_define(s->b, s->conj[c].sym, sym ? sym : sym_terminal(s->b, s->never));
    }
}
