/* What a request's fields ask of its answer, on its way to a grammar. */
#ifndef QUIRE_SERVER_API_API_STRUCTURED_H
#define QUIRE_SERVER_API_API_STRUCTURED_H

#include "server/api/api.h"

/* What a field asks of the answer. */
struct wish {
    const char *field; /* that asks; NULL: none does */
    char path[64];     /* the value within it, for messages */
    enum grammar_kind kind;
    /* of the grammar, as grammar_new takes it, LIMIT_GRAMMAR_BYTES at most; the
     * caller's to release */
    struct buf text;
    int64_t work; /* that compiling grammars of this request may still take */
};

/* The fields that may ask, response_format first. */
enum { STRUCTURED_FIELDS = 7 };
extern const char *const structured_fields[STRUCTURED_FIELDS];
/* Read the one field that constrains the answer into *w, whose text is an empty
 * buffer. */
int read_wish(struct wish *w, const cJSON *tree, struct err *e);

#endif
