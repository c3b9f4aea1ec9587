/* Paged attention over shuffled blocks: decode, prefill, both in one step, and
 * sequences that share their first blocks. */
#include <string.h>

#include "kernels/bench/bench_impl.h"

/* The sequences of a step, and the blocks they lie in. */
struct scene {
    struct mat qkv, out;
    int32_t *len, *query, *row, *q_start, *lcp; /* [max_seqs + 1] by sequence */
    struct table_update *update;                /* [2 (max_seqs + 1)] */
    int32_t *block;                             /* [n_blocks] every block id, shuffled */
    int32_t n_seqs;
};

/* Brings the scene's keys and values, of about 1e-3, to codes of e4m3 of all
 * magnitudes: the time over zeros is another. */
#define CACHE_SCALE 0x1p-18f

static void call_attention(struct bench_timer *t, int i, void *arg)
{
    const struct bench_shape *m = &t->shape;
    struct scene *s = arg;
    struct attention a = {.layer = i % m->cache_layers,
                          .n_heads = m->heads,
                          .n_kv_heads = m->kv_heads,
                          .head_dim = m->dim,
                          .scale = 1.0f / sqrtf((float)m->dim),
                          .k_scale = CACHE_SCALE,
                          .v_scale = CACHE_SCALE};

    t->b->ops->attention(t->b, s->out, s->qkv, &a);
}

static void call_write(struct bench_timer *t, int i, void *arg)
{
    struct scene *s = arg;
    struct rope r = {.rot_dim = 0};
    struct attention a = {.layer = i,
                          .n_heads = t->shape.heads,
                          .n_kv_heads = t->shape.kv_heads,
                          .head_dim = t->shape.dim,
                          .k_scale = CACHE_SCALE,
                          .v_scale = CACHE_SCALE};

    t->b->ops->rope_kv(t->b, s->qkv, &r, &a);
}

/* Write noise into every slot of the cache. */
static void fill_cache(struct bench_timer *t, struct scene *s)
{
    const struct bench_shape *m = &t->shape;
    int32_t slots = m->n_blocks * m->block_size,
            *slot = calloc((size_t)m->max_tokens, sizeof(*slot));

    if (!slot) {
        bench_failed(t, err_nomem(t->e, "the cache's contents"));
    }
    for (int32_t first = 0; first < slots && t->rc == 0; first += m->max_tokens) {
        struct results r;
        for (int32_t i = 0; i < m->max_tokens; i++) {
            slot[i] = first + i < slots ? first + i : -1;
        }
        struct batch a = bench_batch(t, m->max_tokens);
        a.slot = slot;
        a.step = ++t->step;
        if (bench_failed(t, t->b->ops->step_begin(t->b, &a, t->e))) {
            break;
        }
        for (int i = 0; i < m->cache_layers; i++) {
            call_write(t, i, s);
        }
        if (!bench_failed(t, t->b->ops->step_end(t->b, t->e))) {
            bench_failed(t, t->b->ops->step_wait(t->b, &r, t->e));
        }
    }
    free(slot);
}

static void close_scene(struct scene *s)
{
    free(s->len);
    free(s->query);
    free(s->row);
    free(s->q_start);
    free(s->lcp);
    free(s->update);
    free(s->block);
}

static void open_scene(struct bench_timer *t, struct scene *s)
{
    const struct bench_shape *m = &t->shape;
    size_t n = (size_t)m->max_seqs + 1;
    enum dtype act = backend_act_dtype(t->b, DTYPE_BF16);

    *s = (struct scene){.qkv = bench_weight(t, WEIGHT_TABLE, m->max_tokens,
                                            (m->heads + 2 * m->kv_heads) * m->dim, act),
                        .out = bench_mat(t, m->max_tokens, m->heads * m->dim, DTYPE_BF16),
                        .len = calloc(n, sizeof(*s->len)),
                        .query = calloc(n, sizeof(*s->query)),
                        .row = calloc(n, sizeof(*s->row)),
                        .q_start = calloc(n, sizeof(*s->q_start)),
                        .lcp = calloc(n, sizeof(*s->lcp)),
                        .update = calloc(2 * n, sizeof(*s->update)),
                        .block = calloc((size_t)m->n_blocks, sizeof(*s->block))};
    if (!s->len || !s->query || !s->row || !s->q_start || !s->lcp || !s->update || !s->block) {
        bench_failed(t, err_nomem(t->e, "the sequences that are measured"));
        return;
    }
    for (int32_t i = 0; i < m->n_blocks; i++) {
        s->block[i] = i;
    }
    for (int32_t i = m->n_blocks - 1; i > 0; i--) {
        int32_t j = (int32_t)(bench_random(t) % (uint64_t)(i + 1)), id = s->block[i];
        s->block[i] = s->block[j];
        s->block[j] = id;
    }
    fill_cache(t, s);
}

/* n sequences of `len` tokens, the last `query` of each in the step. */
static void set_sequences(struct scene *s, int32_t n, int32_t len, int32_t query)
{
    s->n_seqs = n;
    for (int32_t i = 0; i < n; i++) {
        s->len[i] = len;
        s->query[i] = query;
    }
}

/* us of one layer's attention. Sequences come in groups of `group`, whose first
 * `shared` blocks are the same; lcp_given: the batch's lcp_blocks says so. NAN: the
 * cache has too few blocks. */
static double attention_us(struct bench_timer *t, struct scene *s, int32_t group, int32_t shared,
                           bool lcp_given)
{
    struct batch a = {.token = t->zero,
                      .position = t->zero,
                      .slot = t->none,
                      .q_start = s->q_start,
                      .kv_len = s->len,
                      .row = t->count,
                      .lcp_blocks = s->lcp,
                      .n_seqs = s->n_seqs,
                      .table_update = s->update,
                      .table_block = s->block};
    int32_t root = 0;

    for (int32_t i = 0; i < s->n_seqs; i++) {
        bool follows = group > 1 && i % group != 0;
        int32_t own = (int32_t)div_ceil(s->len[i], t->shape.block_size),
                skip = follows ? shared : 0;
        if (follows) {
            s->update[a.n_table_update++] =
                (struct table_update){.row = i, .count = shared, .first = root};
        } else {
            root = a.n_table_block;
        }
        s->update[a.n_table_update++] = (struct table_update){
            .row = i, .index = skip, .count = own - skip, .first = a.n_table_block};
        a.n_table_block += own - skip;
        a.n_tokens += s->query[i];
        a.n_decode += s->query[i] == 1;
        s->q_start[i + 1] = a.n_tokens;
        s->lcp[i] = follows && lcp_given ? shared : 0;
    }
    if (a.n_table_block > t->shape.n_blocks || a.n_tokens > t->shape.max_tokens) {
        return NAN;
    }
    struct bench_job j = {
        .batch = a, .calls = a.n_tokens > a.n_seqs ? 8 : 32, .call = call_attention, .arg = s};
    return bench_us(t, &j);
}

/* Bytes of keys and values of a token in one layer. */
static double token_bytes(const struct bench_timer *t)
{
    return 2.0 * t->shape.kv_heads * t->shape.dim * (double)dtype_bytes(bench_cache(t));
}

static void decode_line(struct bench_timer *t, struct scene *s, int32_t n, int32_t context)
{
    int32_t len = MAX(context / t->shape.context_over, 16);

    set_sequences(s, n, len, 1);
    double us = attention_us(t, s, 1, 0, false), tokens = (double)n * len;
    struct bench_layer *l = context == 1024 ? bench_layer_of(t, n) : NULL;
    if (l && t->shape.dim == 128 / (t->shape.context_over > 1 ? 2 : 1)) {
        l->attention = us;
    }
    bench_line(t, us, tokens * token_bytes(t), 4.0 * t->shape.heads * t->shape.dim * tokens,
               "decode attention, heads of %d, %d x %d", t->shape.dim, n, len);
}

/* 32 sequences with the same number of tokens in all, even or with most of them in
 * one. */
static void skew_lines(struct bench_timer *t, struct scene *s)
{
    double us[2];

    for (int skewed = 0; skewed < 2; skewed++) {
        set_sequences(s, 32, (skewed ? 4096 : 8064) / t->shape.context_over, 1);
        s->len[0] = skewed ? 131072 / t->shape.context_over : s->len[0];
        us[skewed] = attention_us(t, s, 1, 0, false);
        double tokens = 32.0 * 8064 / t->shape.context_over;
        bench_line(t, us[skewed], tokens * token_bytes(t), 0, "decode attention, %s",
                   skewed ? "1 x 128k + 31 x 4k" : "32 x 8064");
    }
    if (t->rc == 0) {
        fprintf(t->out, "skewed against even: %.3f\n", us[1] / us[0]);
    }
}

/* Samples or beams of one prompt: the prompt's blocks read for each of them, and once
 * per group. */
static void group_lines(struct bench_timer *t, struct scene *s)
{
    static const int32_t groups[][4] = {
        {128, 4, 128, 32}, {128, 4, 512, 64}, {128, 8, 512, 64}, {256, 8, 512, 64}};

    for (size_t i = 0; i < ARRAY_LEN(groups); i++) {
        int32_t n = groups[i][0], members = groups[i][1],
                shared = groups[i][2] / t->shape.block_size, own = groups[i][3];
        for (int lcp_given = 0; lcp_given < 2; lcp_given++) {
            set_sequences(s, n, groups[i][2] + own, 1);
            double us = attention_us(t, s, members, shared, lcp_given);
            double tokens =
                (double)n * own + (double)groups[i][2] * (lcp_given ? (double)n / members : n);
            bench_line(t, us, tokens * token_bytes(t), 0,
                       "decode, %d of %d + %d, %d share the %d%s", n, groups[i][2], own, members,
                       groups[i][2], lcp_given ? ": once" : "");
        }
    }
}

static void decode_lines(struct bench_timer *t, struct scene *s)
{
    static const int32_t cases[][2] = {{1, 1024},  {1, 4096},  {1, 32768},  {8, 1024},
                                       {32, 4096}, {64, 1024}, {256, 1024}, {64, 4096}};

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        decode_line(t, s, cases[i][0], cases[i][1]);
    }
    skew_lines(t, s);
    group_lines(t, s);
}

/* Prefill of n prompts of `len` tokens, of which the last `query` are computed. */
static void prefill_line(struct bench_timer *t, struct scene *s, int32_t n, int32_t len,
                         int32_t query)
{
    len /= t->shape.context_over;
    query /= t->shape.context_over;
    double before = len - query, pairs = ((double)len * len - before * before) / 2 * n;
    set_sequences(s, n, len, query);
    bench_line(t, attention_us(t, s, 1, 0, false), 0, 4.0 * t->shape.heads * t->shape.dim * pairs,
               "prefill attention, heads of %d, %d x %d of %d", t->shape.dim, n, query, len);
}

static void prefill_lines(struct bench_timer *t, struct scene *s)
{
    static const int32_t cases[][3] = {
        {1, 4096, 4096}, {1, 16384, 16384}, {8, 2048, 2048}, {1, 16384, 2048}};

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        prefill_line(t, s, cases[i][0], cases[i][1], cases[i][2]);
    }
    int32_t n = 64, over = t->shape.context_over;
    set_sequences(s, n + 1, 1024 / over, 1);
    s->len[n] = s->query[n] = 2048 / over;
    bench_line(t, attention_us(t, s, 1, 0, false), 0, 0,
               "attention, %d x %d decoding and a prompt of %d", n, s->len[0], s->len[n]);
}

/* Heads of other sizes, each with a backend and cache of its own. */
static void other_heads(struct bench_timer *t, bool decode, bool prefill)
{
    static const int32_t heads[][3] = {
        {64, 32, 8}, {80, 32, 32}, {96, 32, 32}, {256, 16, 8}}; /* dims, heads, KV heads */

    for (size_t i = 0; i < ARRAY_LEN(heads) && t->rc == 0; i++) {
        struct bench_timer other = *t;
        struct scene s = {0};
        struct kv_layout l;
        struct backend_config c = {
            .max_tokens = 4096, .max_seqs = 128, .max_samples = 1, .max_blocks_per_seq = 8192};
        other.shape.dim = heads[i][0];
        other.shape.heads = heads[i][1];
        other.shape.kv_heads = heads[i][2];
        other.shape.cache_layers = 4;
        other.shape.n_blocks = 8192;
        other.shape.max_tokens = c.max_tokens;
        other.shape.max_seqs = c.max_seqs;
        bench_failed(&other, backend_open(&other.b, t->b->name, &c, t->e));
        if (other.rc == 0) {
            kv_layout_init(&l, other.shape.block_size, other.shape.cache_layers,
                           other.shape.kv_heads, other.shape.dim, bench_cache(&other));
            bench_failed(&other,
                         other.b->ops->kv_create(other.b, &l, other.shape.n_blocks, 0, t->e));
            open_scene(&other, &s);
        }
        for (int k = 0; k < 3 && decode; k++) {
            static const int32_t cases[][2] = {{1, 4096}, {64, 1024}, {32, 4096}};
            decode_line(&other, &s, cases[k][0], cases[k][1]);
        }
        if (prefill) {
            prefill_line(&other, &s, 1, 4096, 4096);
        }
        close_scene(&s);
        bench_failed(t, other.rc);
        if (other.b && other.b != t->b) {
            other.b->ops->free(other.b);
        }
    }
}

void bench_attention(struct bench_timer *t, bool decode, bool prefill)
{
    struct scene s;

    open_scene(t, &s);
    if (decode && t->rc == 0) {
        decode_lines(t, &s);
    }
    if (prefill && t->rc == 0) {
        prefill_lines(t, &s);
    }
    close_scene(&s);
    if (t->shape.context_over == 1) {
        other_heads(t, decode, prefill);
    }
}
