/* See chat_format.h: the grammar of the answers that a format allows, in the dialect of
 * engine/constrain/notation/lark.h. Rules: `start` is the answer, `calls` all calls,
 * `cN` a call of tool N. */
#include <string.h>

#include "models/chat/format/grammar.h"

void put_string(struct buf *out, const char *text)
{
    buf_puts(out, " \"");
    buf_json_escape(out, text, strlen(text));
    buf_puts(out, "\"");
}

void put_marker(struct buf *out, const char *mark)
{
    if (mark) {
        buf_puts(out, " marker(\"");
        buf_json_escape(out, mark, strlen(mark));
        buf_puts(out, "\")");
    }
}

void put_until(struct buf *out, const char *const *mark, int32_t n)
{
    int32_t k = 0;

    for (int32_t i = 0; i < n; i++) {
        if (!mark[i]) {
            continue;
        }
        buf_puts(out, k++ ? ", \"" : " until(\"");
        buf_json_escape(out, mark[i], strlen(mark[i]));
        buf_putc(out, '"');
    }
    buf_puts(out, k ? ")" : " text()");
}

void put_schema(struct grammar_text *g, const struct chat_tool *t)
{
    bool enforced =
        t->strict || g->tools->choice == TOOL_REQUIRED || g->tools->choice == TOOL_NAMED;

    buf_puts(g->out, " %json ");
    if (!t->parameters) {
        buf_puts(g->out, "{\"type\":\"object\",\"properties\":{},\"additionalProperties\":false}");
    } else if (!enforced) {
        buf_puts(g->out, "{\"type\":\"object\"}");
    } else {
        buf_puts(g->out, t->parameters);
    }
}

/* Whether calls of tool `i` may be made. */
static bool allowed(const struct grammar_text *g, int32_t i)
{
    return g->tools->choice != TOOL_NAMED || g->tools->named == i;
}

static void put_any_call(struct grammar_text *g)
{
    int32_t k = 0;

    buf_puts(g->out, "call:");
    for (int32_t i = 0; i < g->tools->n; i++) {
        if (allowed(g, i)) {
            buf_printf(g->out, "%s c%d", k++ ? " |" : "", i);
        }
    }
    buf_puts(g->out, "\n");
}

static void put_text(struct grammar_text *g, const char *text)
{
    if (text && *text) {
        put_string(g->out, text);
    }
}

/* call, then more of them. */
static void put_row(struct grammar_text *g, const char *between)
{
    buf_puts(g->out, " call");
    if (g->tools->parallel) {
        buf_puts(g->out, " (");
        put_text(g, between);
        buf_puts(g->out, " call)*");
    }
}

/* The rule `calls`: all of them with the marks around. */
static void put_calls(struct grammar_text *g)
{
    const struct chat_format *f = g->f;
    bool literal = f->body == BODY_LITERAL, object = f->body == BODY_OBJECT;

    buf_puts(g->out, "calls:");
    if (f->bare) {
        put_text(g, literal ? "[" : "");
        put_row(g, f->between_calls);
        put_text(g, literal ? "]" : "");
    } else if (object && f->list) {
        put_marker(g->out, f->section_open);
        put_text(g, "[");
        put_row(g, ", ");
        put_text(g, "]");
        put_text(g, f->after_call);
        put_marker(g->out, f->section_close);
    } else if (literal && f->list) {
        put_marker(g->out, f->call_open);
        put_text(g, f->before_call);
        put_row(g, f->between_calls);
        put_text(g, f->after_call);
        put_marker(g->out, f->call_close);
    } else if (f->section_open) {
        bool inner = !f->call_open; /* newlines stand inside the section's marks */
        put_marker(g->out, f->section_open);
        put_text(g, inner ? f->before_call : "");
        put_row(g, f->between_calls);
        put_text(g, inner ? f->after_call : "");
        put_marker(g->out, f->section_close);
    } else {
        put_row(g, f->between_calls);
    }
    buf_puts(g->out, "\n");
}

/* ---- the answer ---- */

/* Text without a call: what stands before the first one, or all of the answer. */
static void put_plain(struct grammar_text *g)
{
    const struct chat_format *f = g->f;
    const char *marks[] = {f->section_open, f->call_open, f->open_too};

    if (f->bare) {
        buf_printf(g->out, " (/[ \\t\\r\\n]*[^ \\t\\r\\n%s%c]/", f->bare == '[' ? "\\" : "",
                   f->bare);
        put_until(g->out, marks, ARRAY_LEN(marks));
        buf_puts(g->out, ")?");
    } else {
        put_until(g->out, marks, ARRAY_LEN(marks));
    }
}

static void put_answer(struct grammar_text *g)
{
    const struct chat_format *f = g->f;
    bool wrapped = f->ignored[0] && f->ignored[1] && strncmp(f->ignored[0], "<|START", 7) == 0;

    if (wrapped) {
        buf_puts(g->out, " (");
        put_marker(g->out, f->ignored[0]);
        buf_puts(g->out, ")?");
    }
    buf_puts(g->out, " %json ");
    buf_puts(g->out, g->answer);
    if (wrapped) {
        buf_puts(g->out, " (");
        put_marker(g->out, f->ignored[1]);
        buf_puts(g->out, ")?");
    }
}

static void put_body(struct grammar_text *g)
{
    bool some = g->tools && (g->tools->choice == TOOL_REQUIRED || g->tools->choice == TOOL_NAMED);
    bool calls = g->calls;

    buf_puts(g->out, "body:");
    if (g->answer && !some) {
        put_answer(g);
        buf_puts(g->out, calls ? " | calls" : "");
    } else if (some) {
        buf_puts(g->out, " calls");
    } else if (g->f->bare) {
        buf_puts(g->out, " calls |");
        put_plain(g);
    } else {
        /* Calls without marks around all of them may have text between them. */
        bool again = g->tools->parallel && !g->f->section_open;
        put_plain(g);
        buf_puts(g->out, " (calls");
        if (again) {
            put_plain(g);
        }
        buf_puts(g->out, again ? ")*" : ")?");
    }
    buf_puts(g->out, "\n");
}

/* Reasoning comes first; where a call would end it, its mark may not be in it. */
static void put_start(struct grammar_text *g, bool reasoning)
{
    const struct chat_format *f = g->f;
    bool calls = f->think_calls && g->calls;
    const char *marks[] = {f->think_close, calls ? f->section_open : NULL,
                           calls ? f->call_open : NULL, calls ? f->open_too : NULL};

    buf_puts(g->out, "start:");
    if (f->think_open) {
        buf_puts(g->out, reasoning ? "" : " (");
        if (!reasoning) {
            put_marker(g->out, f->think_open);
            put_text(g, f->think_label);
        }
        put_until(g->out, marks, ARRAY_LEN(marks));
        put_marker(g->out, f->think_close);
        buf_puts(g->out, " /\\n{0,2}/");
        buf_puts(g->out, reasoning ? "" : ")?");
    }
    buf_puts(g->out, " body\n");
}

static bool any_strict(const struct chat_tools *t)
{
    for (int32_t i = 0; t && i < t->n; i++) {
        if (t->tool[i].strict) {
            return true;
        }
    }
    return false;
}

int chat_format_grammar(const struct chat_format *f, const struct chat_tools *t, const char *answer,
                        bool reasoning, struct buf *out, bool *ret_needed, struct err *e)
{
    bool some = t && (t->choice == TOOL_REQUIRED || t->choice == TOOL_NAMED);
    bool calls = t && t->n && t->choice != TOOL_NONE;
    struct grammar_text g = {.f = f, .tools = t, .answer = answer, .out = out, .calls = calls};

    *ret_needed = answer || some || (calls && any_strict(t));
    if (!*ret_needed) {
        return 0;
    }
    if (calls && f->body == BODY_NONE) {
        return err_set(e, ERR_UNSUPPORTED, "the model's format %s has no tool calls", f->name);
    }
    if (f->body == BODY_HARMONY) {
        grammar_harmony(&g, reasoning);
    } else {
        put_start(&g, reasoning);
        put_body(&g);
        if (calls) {
            put_calls(&g);
            put_any_call(&g);
        }
    }
    for (int32_t i = 0; calls && i < t->n; i++) {
        int rc = allowed(&g, i) ? grammar_call(&g, i, e) : 0;
        if (rc) {
            return rc;
        }
    }
    return out->failed
               ? err_set(e, ERR_FULL, "the tools make a grammar of more than %zu bytes", out->max)
               : 0;
}
