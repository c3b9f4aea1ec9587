/* How a model writes tool calls and reasoning: one description a format.
 *
 * A description is data: the marks around reasoning and around calls,
 * and how a call names its function and its arguments. From it come both the grammar
 * that constrains an answer and the parser that reads one, so that what can be
 * generated is what can be parsed. The format of a model is told from the text of its
 * chat template, or named by the setting. The descriptions are in format/formats.c.
 */
#ifndef QUIRE_MODELS_CHAT_CHAT_FORMAT_H
#define QUIRE_MODELS_CHAT_CHAT_FORMAT_H

#include "config/base/base.h"
#include "config/base/buf.h"

struct chat_format; /* static data */

/* The format whose marks the template's text has; the generic one if it has none. */
const struct chat_format *chat_format_of_template(const char *text, size_t len);
/* By name; NULL: there is none of that name. */
const struct chat_format *chat_format_find(const char *name);
const char *chat_format_name(const struct chat_format *f);
/* The names of all formats, comma-separated, for messages. */
const char *chat_format_names(void);
/* Whether the format has reasoning; whether it has tool calls. */
bool chat_format_reasons(const struct chat_format *f);
bool chat_format_calls(const struct chat_format *f);
/* Characters that a call's id has in the format's templates, letters and digits; 0: any
 * id will do. */
int32_t chat_format_id_chars(const struct chat_format *f);

/* ---- a request's tools ---- */

enum tool_choice {
    TOOL_AUTO,     /* text, calls, or both */
    TOOL_NONE,     /* no calls */
    TOOL_REQUIRED, /* at least one call */
    TOOL_NAMED,    /* calls of the one function `named` */
};

struct chat_tool {
    char *name;       /* of the function */
    char *parameters; /* its JSON Schema, a JSON text; NULL: no parameters */
    bool strict;      /* arguments must be valid by the schema */
};

/* Owned by one holder; see chat_tools_release. */
struct chat_tools {
    struct chat_tool *tool; /* [n] */
    int32_t n;
    enum tool_choice choice;
    int32_t named; /* TOOL_NAMED: index in `tool` */
    bool parallel; /* more than one call may be made */
};
void chat_tools_release(struct chat_tools *t);

/* Append a grammar (engine/constrain/notation/lark.h's dialect) of the answers that the
 * format allows with these tools. `answer`, a JSON Schema as text or NULL, constrains
 * the text that is neither reasoning nor calls. `reasoning`: the prompt ends inside
 * reasoning.
 * *ret_needed: whether anything is constrained at all; if not, `out` is left alone.
 * ERR_UNSUPPORTED: the format has no tool calls. */
int chat_format_grammar(const struct chat_format *f, const struct chat_tools *t, const char *answer,
                        bool reasoning, struct buf *out, bool *ret_needed, struct err *e);

/* Whether a rendered prompt ends inside reasoning: its template opened it. */
bool chat_format_opens_reasoning(const struct chat_format *f, const char *prompt, size_t len);

/* ---- reading an answer ---- */

enum chat_event_kind {
    CHAT_CONTENT,   /* text of the answer */
    CHAT_REASONING, /* text of the reasoning */
    CHAT_CALL,      /* a call begins: `name` is whole */
    CHAT_ARGUMENTS, /* the next piece of the call's arguments, JSON text */
    CHAT_CALL_END,  /* the call's arguments are complete and valid JSON, "{}" at least */
};

struct chat_event {
    enum chat_event_kind kind;
    const char *text; /* [len] content, reasoning, arguments; whole UTF-8 characters */
    size_t len;
    int32_t call;     /* index of the call, from 0 */
    const char *name; /* CHAT_CALL: NUL-terminated */
    const char *id;   /* CHAT_CALL: the id that the model gave; NULL: none */
};
typedef void chat_event_fn(void *arg, const struct chat_event *event);

struct chat_parser;

/* A parser of one answer. `tools` (NULL: none) must outlive it; arguments that a format
 * writes as untyped text become JSON by the types of their schemas. `reasoning`: the
 * prompt ended inside reasoning. */
int chat_parser_new(struct chat_parser **ret, const struct chat_format *f,
                    const struct chat_tools *tools, bool reasoning, struct err *e);
void chat_parser_free(struct chat_parser *p); /* NULL: nothing */
/* Read the next piece of text, with its special tokens' texts; the events' texts are
 * valid during their call only. What may be part of a mark is held back, at most a few
 * hundred bytes; a text split differently gives the same content, reasoning and calls.
 * Linear in the length of the answer. ERR_NOMEM. */
int chat_parser_feed(struct chat_parser *p, const char *text, size_t len, chat_event_fn *fn,
                     void *arg);
/* The answer has ended: what was held back is reported. A call that has begun and
 * whose arguments are cut short or no valid JSON gets no CHAT_CALL_END; one that has
 * not begun, because its name is not whole, is content where no other call precedes
 * it. */
int chat_parser_end(struct chat_parser *p, chat_event_fn *fn, void *arg);
/* Whether the next byte, unless it belongs to a mark, is reasoning. */
bool chat_parser_reasoning(const struct chat_parser *p);
/* Calls that have begun. */
int32_t chat_parser_calls(const struct chat_parser *p);
/* Memory of the parser. */
size_t chat_parser_bytes(const struct chat_parser *p);

#endif
