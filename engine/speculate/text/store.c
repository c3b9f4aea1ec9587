#include "engine/speculate/text/store.h"

#include <stdlib.h>

int store_init(struct store *s, int32_t n_tokens, struct err *e)
{
    *s = (struct store){0};
    if (n_tokens < 2 * STORE_ANSWER) {
        return 0;
    }
    int32_t n = 1;
    while (n <= n_tokens / 2) {
        n *= 2;
    }
    s->n_tokens = n;
    s->token = calloc((size_t)n, sizeof(*s->token));
    s->scope = calloc((size_t)n / STORE_PAGE, sizeof(*s->scope));
    s->index.next = calloc((size_t)n, sizeof(*s->index.next));
    s->index.head = calloc((size_t)n / 2, sizeof(*s->index.head));
    s->index.pair = calloc((size_t)n / 2, sizeof(*s->index.pair));
    s->index.window = n;
    s->index.head_mask = (uint32_t)n / 2 - 1;
    if (s->token && s->scope && s->index.next && s->index.head && s->index.pair) {
        return 0;
    }
    store_release(s);
    return err_nomem(e, "the store of recent answers");
}

void store_release(struct store *s)
{
    free(s->token);
    free(s->scope);
    free(s->index.next);
    free(s->index.head);
    free(s->index.pair);
    *s = (struct store){0};
}

struct ngram_text store_text(const struct store *s)
{
    return (struct ngram_text){
        .first = s->token, .n_first = INT32_MAX, .mask = (uint32_t)s->n_tokens - 1};
}

static void append(struct store *s, uint64_t scope, const struct ngram_text *t, int32_t token)
{
    s->token[s->index.n & (s->n_tokens - 1)] = token;
    ngram_add(&s->index, t, scope);
}

void store_add(struct store *s, uint64_t scope, const struct ngram_text *t, int32_t first,
               int32_t end)
{
    struct ngram_text own = store_text(s);

    end = MIN(end, first + STORE_ANSWER - 1);
    if (s->n_tokens == 0 || end - first < NGRAM) {
        return;
    }
    if (s->index.n > INT32_MAX - 2 * STORE_ANSWER) { /* positions would overflow: begin anew */
        ngram_clear(&s->index, s->index.head_mask);
    }
    for (int32_t i = first; i <= end; i++) {
        int32_t page = (s->index.n & (s->n_tokens - 1)) / STORE_PAGE;
        s->scope[page] = scope;
        append(s, scope, &own, i < end ? ngram_token(t, i) : STORE_END);
    }
    while (s->index.n % STORE_PAGE != 0) {
        append(s, scope, &own, STORE_END);
    }
}

/* The scope keys the hashes; where two collide nevertheless, it is compared. */
struct ngram_match store_find(const struct store *s, uint64_t scope, const struct ngram_text *query,
                              int32_t end, int32_t hint)
{
    if (s->n_tokens == 0) {
        return (struct ngram_match){0, 0};
    }
    struct ngram_text own = store_text(s);
    struct ngram_match m = ngram_find(&s->index, &own, scope, query, end, hint);
    int32_t last = (m.position - 1) & (s->n_tokens - 1);
    bool ours = m.length > 0 && m.position < s->index.n && s->scope[last / STORE_PAGE] == scope;
    bool goes_on = ours && ngram_token(&own, m.position) != STORE_END;
    return goes_on ? m : (struct ngram_match){0, 0};
}
