/* Where in a text its last tokens stood before: an index by hashes of n-grams, with
 * chains of positions as the match finders of LZ77 compressors have. Where no n-gram is
 * found, the last place of the last two tokens is. */
#ifndef QUIRE_ENGINE_SPECULATE_TEXT_NGRAM_H
#define QUIRE_ENGINE_SPECULATE_TEXT_NGRAM_H

#include "config/base/base.h"

enum {
    NGRAM = 3,          /* tokens that chains lead to */
    NGRAM_SHORTEST = 2, /* tokens of the shortest match */
    NGRAM_LONGEST = 32, /* tokens of a match that are compared at most */
    NGRAM_TRIES = 12,   /* earlier positions that a search looks at */
};

/* A text in two parts; positions count on from 0, and wrap by `mask` in the first. */
struct ngram_text {
    const int32_t *first, *rest;
    int32_t n_first; /* positions below are in `first` */
    uint32_t mask;   /* of positions in `first`; UINT32_MAX: none */
};

static inline int32_t ngram_token(const struct ngram_text *t, int32_t position)
{
    return position < t->n_first ? t->first[(uint32_t)position & t->mask]
                                 : t->rest[position - t->n_first];
}

struct ngram_index {
    int32_t *head; /* [head_mask + 1] by hash, the last position + 1; 0: none */
    int32_t *next; /* [window] by position mod window, the one before it + 1; 0: none */
    /* [head_mask + 1] by hash of two tokens, the last two positions + 1; 0: none */
    int32_t *pair;
    uint32_t head_mask; /* at least 1 */
    int32_t window;     /* a power of two: positions that are found again */
    int32_t n;          /* positions that were added */
};

struct ngram_match {
    int32_t position; /* behind the earlier occurrence */
    int32_t length;   /* tokens that agree; 0: none */
};

/* Forget everything; head_mask + 1, a power of two, is at most what `head` and `pair`
 * hold. */
void ngram_clear(struct ngram_index *x, uint32_t head_mask);
/* Add position x->n of a text. Matches are looked for under the same key. */
void ngram_add(struct ngram_index *x, const struct ngram_text *t, uint64_t key);
/* The longest match of the last tokens before `end` of `query` with what was added to
 * the index of `t`, on a tie the latest; `hint` (-1: none) is tried first. In its own
 * text a match ends before `end`. */
struct ngram_match ngram_find(const struct ngram_index *x, const struct ngram_text *t, uint64_t key,
                              const struct ngram_text *query, int32_t end, int32_t hint);

#endif
