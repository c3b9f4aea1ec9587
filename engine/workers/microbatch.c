#include "engine/workers/microbatch.h"

#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"

enum { MIN_TOKENS = 8, ALIGN = 16 };

/* The first i with v[i] >= x in an ascending array. */
static int32_t lower_bound(const int32_t *v, int32_t n, int32_t x)
{
    int32_t from = 0;

    while (from < n) {
        int32_t middle = from + (n - from) / 2;
        if (v[middle] < x) {
            from = middle + 1;
        } else {
            n = middle;
        }
    }
    return from;
}

/* The sequence that token t belongs to. */
static int32_t seq_of(const struct batch *b, int32_t t)
{
    return lower_bound(b->q_start, b->n_seqs + 1, t + 1) - 1;
}

/* Whether all tokens [start, end) of a sequence are sampled from, as where drafts are
 * verified. The recurrent states behind each but the first are in no table, so they
 * cannot be gone on from in another micro-batch. */
static bool verifies(const struct batch *b, int32_t start, int32_t end)
{
    return end - start <= LIMIT_DRAFT + 1 &&
           lower_bound(b->logits_token, b->n_logits, end) -
                   lower_bound(b->logits_token, b->n_logits, start) ==
               end - start;
}

/* The first token of micro-batch i. A boundary never separates a single token from a
 * longer piece: a sequence with one token in a step must be a decode, and decodes come
 * first. */
static int32_t boundary(const struct batch *b, int32_t i, int32_t n)
{
    int32_t t = (int32_t)((int64_t)b->n_tokens * i / n);

    if (t == 0 || t == b->n_tokens) {
        return t;
    }
    int32_t seq = seq_of(b, t), start = b->q_start[seq], end = b->q_start[seq + 1];
    if (t > start && verifies(b, start, end)) {
        return end;
    }
    return t == start + 1 ? start : t == end - 1 && t > start ? end : t;
}

int32_t microbatch_most(const struct batch *b, int32_t n)
{
    for (int32_t i = 0; i < n && n > 1; i++) {
        if (boundary(b, i, n) == boundary(b, i + 1, n)) {
            n--;
            i = -1;
        }
    }
    return n;
}

int32_t microbatch_count(const struct batch *b, int32_t n_stages)
{
    return microbatch_most(b, MAX(MIN(n_stages, b->n_tokens / MIN_TOKENS), 1));
}

/* The first sampling row that reads logits row l or a later one. */
static int32_t sample_of(const struct batch *b, int32_t l)
{
    int32_t from = 0, n = b->n_samples;

    while (from < n) {
        int32_t middle = from + (n - from) / 2;
        if (b->sample[middle].logits_row < l) {
            from = middle + 1;
        } else {
            n = middle;
        }
    }
    return from;
}

static size_t rounded(size_t n_bytes)
{
    return (n_bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* Takes the next n_bytes of the arena. */
static void *take(char **at, size_t n_bytes)
{
    void *here = *at;

    *at += rounded(n_bytes);
    return here;
}

static int reserve(char **memory, size_t *cap, size_t need, struct err *e)
{
    if (need <= *cap) {
        return 0;
    }
    char *bigger = realloc(*memory, need + need / 2);
    if (!bigger) {
        return err_nomem(e, "a part of a step");
    }
    *memory = bigger;
    *cap = need + need / 2;
    return 0;
}

/* Sets ret's sequences to those of tokens [first, end); the first and the last may be
 * partial. */
static void split_seqs(const struct batch *b, int32_t first, int32_t end, char **at,
                       struct batch *ret)
{
    int32_t from = seq_of(b, first), n = seq_of(b, end - 1) + 1 - from;
    size_t bytes = (size_t)n * sizeof(int32_t);
    int32_t *q_start = take(at, bytes + sizeof(int32_t)), *kv_len = take(at, bytes),
            *lcp = take(at, bytes);

    ret->n_seqs = n;
    ret->n_decode = MIN(MAX(b->n_decode - from, 0), n);
    for (int32_t i = 0; i < n; i++) {
        q_start[i] = MAX(b->q_start[from + i] - first, 0);
        kv_len[i] = b->kv_len[from + i] - MAX(b->q_start[from + i + 1] - end, 0);
        lcp[i] = i == 0 || !b->lcp_blocks ? 0 : b->lcp_blocks[from + i];
    }
    q_start[n] = end - first;
    ret->q_start = q_start;
    ret->kv_len = kv_len;
    ret->lcp_blocks = lcp;
    ret->row = b->row + from;
}

/* Sets ret's logits and sampling rows to those of tokens [first, end). */
static void split_samples(const struct batch *b, int32_t first, int32_t end, char **at,
                          struct batch *ret)
{
    int32_t from = lower_bound(b->logits_token, b->n_logits, first);
    int32_t n = lower_bound(b->logits_token, b->n_logits, end) - from;
    int32_t first_sample = sample_of(b, from), n_samples = sample_of(b, from + n) - first_sample;
    int32_t *logits = take(at, (size_t)n * sizeof(*logits));
    struct sample_row *sample = take(at, (size_t)n_samples * sizeof(*sample));

    for (int32_t i = 0; i < n; i++) {
        logits[i] = b->logits_token[from + i] - first;
    }
    for (int32_t i = 0; i < n_samples; i++) {
        sample[i] = b->sample[first_sample + i];
        sample[i].logits_row -= from;
    }
    ret->n_logits = n;
    ret->logits_token = logits;
    ret->n_samples = n_samples;
    ret->sample = sample;
    ret->first_sample = first_sample;
}

int microbatch_split(struct microbatch *p, const struct batch *b, int32_t i, int32_t n,
                     struct batch *ret, struct err *e)
{
    size_t ints = rounded((size_t)(b->n_seqs + 1) * sizeof(int32_t));
    size_t need = 3 * ints + rounded((size_t)b->n_logits * sizeof(int32_t)) +
                  rounded((size_t)b->n_samples * sizeof(struct sample_row));

    *ret = *b;
    if (n == 1) {
        return 0;
    }
    int rc = reserve(&p->arena, &p->cap, need, e);
    if (rc < 0) {
        return rc;
    }
    int32_t first = boundary(b, i, n), end = boundary(b, i + 1, n);
    char *at = p->arena;
    ret->microbatch = i;
    if (i > 0) {
        ret->n_swap_out = ret->n_swap_in = ret->n_copy = ret->n_table_update = ret->n_table_block =
            0;
    }
    ret->n_tokens = end - first;
    ret->token = b->token + first;
    ret->token_src = b->token_src ? b->token_src + first : NULL;
    ret->position = b->position + first;
    ret->slot = b->slot + first;
    int32_t others = b->n_group_slots / b->n_tokens; /* slots of a token in further KV groups */
    ret->group_slot = others > 0 ? b->group_slot + (int64_t)first * others : NULL;
    ret->n_group_slots = ret->n_tokens * others;
    split_seqs(b, first, end, &at, ret);
    split_samples(b, first, end, &at, ret);
    return 0;
}

void microbatch_release(struct microbatch *p)
{
    free(p->arena);
    *p = (struct microbatch){0};
}

/* ---- results ---- */

int32_t microbatch_results_stride(const struct batch *b)
{
    int32_t stride = 0;

    for (int32_t i = 0; i < b->n_samples; i++) {
        const struct sample_row *s = &b->sample[i];
        stride = MAX(stride, s->kind == SAMPLE_CANDIDATES ? s->n_candidates : s->n_logprobs);
    }
    return stride;
}

int microbatch_results_begin(struct gathered *g, uint64_t step, int32_t n_samples,
                             int32_t top_stride, struct err *e)
{
    size_t row = rounded((size_t)n_samples * sizeof(int32_t));
    size_t top = rounded((size_t)n_samples * (size_t)top_stride * sizeof(int32_t));
    int rc = reserve(&g->memory, &g->cap, 2 * row + 2 * top, e);

    if (rc < 0) {
        return rc;
    }
    char *at = g->memory;
    g->results = (struct results){.step = step, .n_samples = n_samples, .top_stride = top_stride};
    g->results.token = take(&at, row);
    g->results.logprob = take(&at, row);
    g->results.top_token = take(&at, top);
    g->results.top_logprob = take(&at, top);
    return 0;
}

void microbatch_results_add(struct gathered *g, int32_t first, const struct results *r)
{
    struct results *all = &g->results;

    all->device_us += r->device_us;
    all->experts.rows += r->experts.rows;
    all->experts.peak += r->experts.peak;
    if (r->n_samples == 0) {
        return;
    }
    size_t n = (size_t)r->n_samples,
           some = (size_t)MIN(r->top_stride, all->top_stride) * sizeof(int32_t);
    memcpy((int32_t *)(uintptr_t)all->token + first, r->token, n * sizeof(*r->token));
    memcpy((float *)(uintptr_t)all->logprob + first, r->logprob, n * sizeof(*r->logprob));
    for (size_t i = 0; i < n && some > 0; i++) {
        size_t from = i * (size_t)r->top_stride, to = ((size_t)first + i) * (size_t)all->top_stride;
        memcpy((int32_t *)(uintptr_t)all->top_token + to, r->top_token + from, some);
        memcpy((float *)(uintptr_t)all->top_logprob + to, r->top_logprob + from, some);
    }
}

void microbatch_results_release(struct gathered *g)
{
    free(g->memory);
    *g = (struct gathered){0};
}
