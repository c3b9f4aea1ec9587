#include "engine/speculate/text/ngram.h"

#include <string.h>

void ngram_clear(struct ngram_index *x, uint32_t head_mask)
{
    x->head_mask = head_mask;
    x->n = 0;
    memset(x->head, 0, ((size_t)head_mask + 1) * sizeof(*x->head));
    memset(x->pair, 0, ((size_t)head_mask + 1) * sizeof(*x->pair));
}

/* Of the n tokens that end at `last`. */
static uint32_t hash_at(const struct ngram_text *t, uint64_t key, int32_t last, int32_t n)
{
    uint64_t h = key;

    for (int32_t i = 0; i < n; i++) {
        h = (h ^ (uint32_t)ngram_token(t, last - i)) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 29;
    }
    return (uint32_t)(h >> 16);
}

/* The two entries for the pair of tokens that ends at `last`. */
static int32_t *pair_at(const struct ngram_index *x, const struct ngram_text *t, uint64_t key,
                        int32_t last)
{
    return &x->pair[2 * (hash_at(t, key, last, NGRAM_SHORTEST) & x->head_mask >> 1)];
}

void ngram_add(struct ngram_index *x, const struct ngram_text *t, uint64_t key)
{
    int32_t last = x->n++;

    if (last < NGRAM_SHORTEST - 1) {
        return;
    }
    int32_t *pair = pair_at(x, t, key, last);
    pair[1] = pair[0];
    pair[0] = last + 1;
    if (last < NGRAM - 1) {
        return;
    }
    int32_t *head = &x->head[hash_at(t, key, last, NGRAM) & x->head_mask];
    x->next[last & (x->window - 1)] = *head;
    *head = last + 1;
}

/* Tokens that agree before `position` of `t` and before `end` of `query`. */
static int32_t agreement(const struct ngram_index *x, const struct ngram_text *t, int32_t position,
                         const struct ngram_text *query, int32_t end)
{
    int32_t n = 0, most = MIN(MIN(position, end), NGRAM_LONGEST);

    most = MIN(most, x->window - (x->n - position));
    while (n < most && ngram_token(t, position - 1 - n) == ngram_token(query, end - 1 - n)) {
        n++;
    }
    return n;
}

/* Of the chain for the last NGRAM tokens the longest match, if it is longer than
 * `best`; those that end at `before` or behind it do not count. */
static struct ngram_match find_in_chain(const struct ngram_index *x, const struct ngram_text *t,
                                        uint64_t key, const struct ngram_text *query, int32_t end,
                                        int32_t before, struct ngram_match best)
{
    int32_t at = x->head[hash_at(query, key, end - 1, NGRAM) & x->head_mask];

    for (int32_t i = 0; i < NGRAM_TRIES && at > 0 && x->n - at < x->window; i++) {
        int32_t n = at < before ? agreement(x, t, at, query, end) : 0;
        if (n > best.length) {
            best = (struct ngram_match){at, n};
        }
        int32_t next = x->next[(at - 1) & (x->window - 1)];
        at = next < at ? next : 0; /* else the place has been written over */
    }
    return best;
}

struct ngram_match ngram_find(const struct ngram_index *x, const struct ngram_text *t, uint64_t key,
                              const struct ngram_text *query, int32_t end, int32_t hint)
{
    struct ngram_match best = {0, 0};
    int32_t before = t == query ? end : x->n + 1; /* a match ends below */

    if (end < NGRAM_SHORTEST) {
        return best;
    }
    if (hint > 0 && hint < MIN(before, x->n + 1)) {
        best = (struct ngram_match){hint, agreement(x, t, hint, query, end)};
    }
    if (end >= NGRAM) {
        best = find_in_chain(x, t, key, query, end, before, best);
    }
    const int32_t *pair = pair_at(x, query, key, end - 1);
    for (int32_t i = 0; i < 2 && best.length < NGRAM_SHORTEST; i++) {
        if (pair[i] > 0 && pair[i] < before && x->n - pair[i] < x->window) {
            best = (struct ngram_match){pair[i], agreement(x, t, pair[i], query, end)};
        }
    }
    return best.length >= NGRAM_SHORTEST ? best : (struct ngram_match){0, 0};
}
