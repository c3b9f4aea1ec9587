/* The answers that the server gave last, for drafts: a ring of tokens, with an n-gram
 * index. */
#ifndef QUIRE_ENGINE_SPECULATE_TEXT_STORE_H
#define QUIRE_ENGINE_SPECULATE_TEXT_STORE_H

#include "engine/speculate/text/ngram.h"

enum {
    STORE_PAGE = 64,     /* tokens; an answer begins at a page */
    STORE_ANSWER = 4096, /* tokens of an answer that are remembered */
    STORE_END = -1,      /* behind an answer, in place of a token */
};

struct store {
    int32_t *token;   /* [n_tokens] */
    uint64_t *scope;  /* [n_tokens / STORE_PAGE] whose answer a page holds */
    int32_t n_tokens; /* a power of two; 0: nothing is remembered */
    struct ngram_index index;
};

/* n_tokens is rounded down to a power of two. ERR_NOMEM. */
int store_init(struct store *s, int32_t n_tokens, struct err *e);
void store_release(struct store *s);
struct ngram_text store_text(const struct store *s);
/* Remember tokens [first, end) of a text, at most STORE_ANSWER. */
void store_add(struct store *s, uint64_t scope, const struct ngram_text *t, int32_t first,
               int32_t end);
/* As ngram_find, among answers of the scope. */
struct ngram_match store_find(const struct store *s, uint64_t scope, const struct ngram_text *query,
                              int32_t end, int32_t hint);

#endif
