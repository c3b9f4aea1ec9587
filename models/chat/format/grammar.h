/* The making of a format's grammar (grammar.c, grammar_call.c). */
#ifndef QUIRE_MODELS_CHAT_FORMAT_GRAMMAR_H
#define QUIRE_MODELS_CHAT_FORMAT_GRAMMAR_H

#include "models/chat/format/format.h"

struct grammar_text {
    const struct chat_format *f;
    const struct chat_tools *tools; /* NULL: none */
    const char *answer;             /* schema of the content, or NULL */
    struct buf *out;
    bool calls; /* tools may be called */
};

/* Parts of a rule, each with a blank before it. */
void put_string(struct buf *out, const char *text);
void put_marker(struct buf *out, const char *mark); /* NULL: nothing */
/* Text without any of the marks, some of which may be NULL. */
void put_until(struct buf *out, const char *const *mark, int32_t n);
/* The arguments of a tool, as JSON. */
void put_schema(struct grammar_text *g, const struct chat_tool *t);

/* The rules `start` and `body` of harmony. */
void grammar_harmony(struct grammar_text *g, bool reasoning);
/* The rule of a call of tool `i`. ERR_UNSUPPORTED: the format cannot hold its
 * schema. */
int grammar_call(struct grammar_text *g, int32_t i, struct err *e);

#endif
