/* Micro-benchmarks of operations on rows: matrix products, norms and rope, sampling. */
#include <string.h>

#include "kernels/bench/bench_impl.h"

/* ---- matrix products ---- */

enum { COPIES = 8 };
struct products {
    struct mat w[COPIES], x, out, act;
    int n;
};

static void call_linear(struct bench_timer *t, int i, void *arg)
{
    struct products *p = arg;

    t->b->ops->linear(t->b, p->out, p->x, p->w[i % p->n], NULL);
}

static void call_gated(struct bench_timer *t, int i, void *arg)
{
    struct products *p = arg;

    t->b->ops->linear_gated(t->b, p->act, p->out, p->x, p->w[i % p->n], (struct mat){0}, ACT_SILU);
}

/* One product of a layer or of the output head, for `rows` rows of x. */
static void product_line(struct bench_timer *t, struct products *p, int32_t out, int32_t in,
                         int32_t rows)
{
    const struct bench_shape *m = &t->shape;
    bool head = out == m->vocab, gated = out == 2 * m->inner;

    p->x = bench_weight(t, WEIGHT_TABLE, rows, in, backend_act_dtype(t->b, DTYPE_BF16));
    p->out = bench_mat(t, rows, out, head ? DTYPE_F32 : DTYPE_BF16);
    p->act = gated ? bench_mat(t, rows, out / 2, DTYPE_BF16) : p->out;
    struct bench_job j = {.batch = bench_batch(t, rows),
                          .calls = rows > 256 ? 8 : 32,
                          .call = gated ? call_gated : call_linear,
                          .arg = p};
    double us = bench_us(t, &j), flops = 2.0 * out * in * rows;
    struct bench_layer *l = bench_layer_of(t, rows);
    if (l) {
        *(head ? &l->head : &l->products) += us;
    }
    bench_line(t, us, 2.0 * out * in + 2.0 * rows * ((double)in + (gated ? out / 2 : out)), flops,
               "%s %d x %d, %d rows", gated ? "gated product" : "product", out, in, rows);
}

void bench_linear(struct bench_timer *t)
{
    const struct bench_shape *m = &t->shape;
    const int32_t shape[][2] = {{(m->heads + 2 * m->kv_heads) * m->dim, m->hidden},
                                {m->hidden, m->heads * m->dim},
                                {2 * m->inner, m->hidden},
                                {m->hidden, m->inner},
                                {m->vocab, m->hidden}};
    static const int32_t rows[] = {1, 4, 8, 16, 32, 64, 128, 256, 8192};

    for (int i = 0; i < BENCH_STEP_ROWS; i++) {
        t->layer[i].products = t->layer[i].head = 0;
    }
    for (size_t s = 0; s < ARRAY_LEN(shape); s++) {
        int32_t out = shape[s][0], in = shape[s][1];
        struct products p = {.n = out > 100000 ? 2 : out > 20000 ? 4 : COPIES};
        for (int i = 0; i < p.n; i++) {
            p.w[i] = bench_weight(t, WEIGHT_LINEAR, out, in, DTYPE_BF16);
        }
        for (size_t r = 0; r < ARRAY_LEN(rows); r++) {
            if (rows[r] <= m->max_tokens && (rows[r] <= 256 || out < 100000)) {
                product_line(t, &p, out, in, rows[r]);
            }
        }
    }
}

/* ---- operations between products and attention ---- */

struct glue {
    struct mat x, y, out, qkv, table, cos_sin, logits;
    struct norm norm;
};

static void call_norm(struct bench_timer *t, int i, void *arg)
{
    (void)i;
    struct glue *g = arg;
    t->b->ops->add_norm(t->b, g->out, g->x, g->y, &g->norm, false);
}

static void call_rope(struct bench_timer *t, int i, void *arg)
{
    const struct bench_shape *m = &t->shape;
    struct glue *g = arg;
    struct rope r = {.cos_sin = g->cos_sin, .rot_dim = m->dim};
    struct attention a = {.layer = i % m->cache_layers,
                          .n_heads = m->heads,
                          .n_kv_heads = m->kv_heads,
                          .head_dim = m->dim};

    t->b->ops->rope_kv(t->b, g->qkv, &r, &a);
}

/* Operations that a step has once: embedding, gather, last norm, greedy sampling. */
static void call_ends(struct bench_timer *t, int i, void *arg)
{
    (void)i;
    struct glue *g = arg;
    t->b->ops->embed(t->b, g->x, g->table, 1.0f);
    t->b->ops->gather(t->b, g->out, g->x, 0);
    t->b->ops->norm(t->b, g->out, g->out, &g->norm);
    t->b->ops->sample(t->b, g->logits, 0);
}

static const struct sample_row greedy = {
    .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1, .mask_first = -1};

/* A step of n sequences of one token, each sampled as `s` says. */
static struct batch sampling_batch(struct bench_timer *t, int32_t n, const struct sample_row *s,
                                   struct sample_row *row)
{
    struct batch a = bench_batch(t, n);

    for (int32_t i = 0; i < n; i++) {
        row[i] = *s;
        row[i].logits_row = i;
        row[i].seed = (uint64_t)i;
    }
    a.slot = t->count;
    a.n_logits = a.n_samples = n;
    a.logits_token = t->count;
    a.sample = row;
    return a;
}

static void glue_lines(struct bench_timer *t, int32_t n)
{
    const struct bench_shape *m = &t->shape;
    enum dtype act = backend_act_dtype(t->b, DTYPE_BF16);
    int32_t width = (m->heads + 2 * m->kv_heads) * m->dim;
    struct sample_row *row = calloc((size_t)n, sizeof(*row));
    struct glue g = {.x = bench_mat(t, n, m->hidden, DTYPE_BF16),
                     .y = bench_weight(t, WEIGHT_TABLE, n, m->hidden, act),
                     .out = bench_mat(t, n, m->hidden, DTYPE_BF16),
                     .qkv = bench_weight(t, WEIGHT_TABLE, n, width, act),
                     .table = bench_weight(t, WEIGHT_EMBEDDING, m->vocab, m->hidden, DTYPE_BF16),
                     .cos_sin = bench_weight(t, WEIGHT_TABLE, 16, m->dim, DTYPE_F32),
                     .norm = {.kind = NORM_RMS, .eps = 1e-5f}};

    g.norm.weight = bench_weight(t, WEIGHT_VECTOR, 1, m->hidden, DTYPE_BF16);
    if (!row) {
        bench_failed(t, err_nomem(t->e, "the samples that are measured"));
        return;
    }
    struct bench_layer *l = bench_layer_of(t, n);
    struct bench_job norm = {
        .batch = bench_batch(t, n), .calls = 64, .queued = n <= 256, .call = call_norm, .arg = &g};
    double us = bench_us(t, &norm);
    bench_line(t, us, 8.0 * n * m->hidden, 0, "residual and norm, %d rows", n);
    double norms = us;
    struct bench_job rope = {
        .batch = bench_batch(t, n), .calls = 64, .queued = n <= 256, .call = call_rope, .arg = &g};
    rope.batch.slot = t->count;
    us = bench_us(t, &rope);
    bench_line(t, us, 2.0 * n * (width + (m->heads + 3.0 * m->kv_heads) * m->dim), 0,
               "rope and cache write, %d rows", n);
    if (l) {
        g.logits = bench_mat(t, n, m->vocab, DTYPE_F32);
        struct bench_job ends = {.batch = sampling_batch(t, n, &greedy, row),
                                 .calls = 16,
                                 .queued = true,
                                 .call = call_ends,
                                 .arg = &g};
        *l = (struct bench_layer){n,  l->products,        l->attention, norms,
                                  us, bench_us(t, &ends), l->head};
        bench_line(t, l->ends, 4.0 * n * m->vocab + 12.0 * n * m->hidden, 0,
                   "embedding, last norm, greedy sampling, %d rows", n);
    }
    free(row);
}

void bench_glue(struct bench_timer *t)
{
    static const int32_t rows[] = {1, 64, 256, 8192};

    for (size_t i = 0; i < ARRAY_LEN(rows) && t->rc == 0; i++) {
        if (rows[i] <= t->shape.max_tokens) {
            glue_lines(t, rows[i]);
        }
    }
}

/* ---- sampling ---- */

#define ASKED(...) \
    {.repetition_penalty = 1, .n_logprobs = -1, .mask_first = -1, .position = 7, __VA_ARGS__}
static const struct {
    const char *name;
    struct sample_row row;
} asked[] = {
    {"greedy", ASKED(.top_p = 1)},
    {"temperature", ASKED(.temperature = 0.8f, .top_p = 1)},
    {"top-p 0.95", ASKED(.temperature = 0.8f, .top_p = 0.95f)},
    {"top-k 50, top-p 0.95", ASKED(.temperature = 0.8f, .top_p = 0.95f, .top_k = 50)},
    {"beam candidates, 8", ASKED(.kind = SAMPLE_CANDIDATES, .n_candidates = 8, .top_p = 1)},
};

static void call_sample(struct bench_timer *t, int i, void *arg)
{
    (void)i;
    t->b->ops->sample(t->b, *(struct mat *)arg, 0);
}

/* Logits that are sums of three uniform numbers, so that few are large. */
static struct mat random_logits(struct bench_timer *t, int32_t n)
{
    struct mat logits = bench_mat(t, n, t->shape.vocab, DTYPE_F32);
    int64_t count = (int64_t)n * t->shape.vocab;
    float *v = malloc((size_t)count * sizeof(*v));

    if (!v) {
        bench_failed(t, err_nomem(t->e, "the logits that are measured"));
    }
    for (int64_t i = 0; i < count && t->rc == 0; i++) {
        uint64_t sum = bench_random(t) % 65536 + bench_random(t) % 65536 + bench_random(t) % 65536;
        v[i] = (float)((double)sum / 65536 * 8);
    }
    if (t->rc == 0) {
        bench_failed(t, t->b->ops->upload(t->b, logits, v, t->e));
    }
    free(v);
    return logits;
}

enum { MASKED_ROWS = 64, MASKED_VOCAB = 1 << 18 };

/* One call a step, since a step waits for its late masks once: without a mask, with one
 * sent along, and with one that comes later (here it is there when the step begins). */
static void mask_lines(struct bench_timer *t, struct mat logits, struct sample_row *row)
{
    static const char *const name[] = {"no mask", "a mask each", "a late mask each"};
    int32_t n = MASKED_ROWS, words = mask_words(MASKED_VOCAB);
    uint32_t *word = malloc((size_t)n * (size_t)words * sizeof(*word));
    struct late_mask late[MASKED_ROWS];
    double us[ARRAY_LEN(name)];

    if (!word) {
        bench_failed(t, err_nomem(t->e, "the masks that are measured"));
        return;
    }
    for (int32_t i = 0; i < n * words; i++) {
        word[i] = (uint32_t)bench_random(t);
    }
    for (size_t kind = 0; kind < ARRAY_LEN(name) && t->rc == 0; kind++) {
        struct bench_job j = {.batch = sampling_batch(t, n, &asked[1].row, row),
                              .calls = 1,
                              .queued = true,
                              .call = call_sample,
                              .arg = &logits,
                              .late = late};
        j.batch.mask_word = word;
        j.batch.n_mask_word = kind == 1 ? n * mask_words(t->shape.vocab) : 0;
        j.batch.n_late_mask = kind == 2 ? n : 0;
        for (int32_t i = 0; i < n; i++) {
            late[i].word = word + (int64_t)i * words;
            row[i].mask_first = kind == 1 ? i * mask_words(t->shape.vocab) : -1;
            row[i].late_mask = kind == 2 ? i + 1 : 0;
        }
        us[kind] = bench_us(t, &j);
        bench_line(t, us[kind], 4.0 * n * t->shape.vocab, 0, "sampling, %s, %d rows", name[kind],
                   n);
    }
    if (t->rc == 0) {
        fprintf(t->out, "late masks add %.1f us to a step of %d rows\n", us[2] - us[0], n);
    }
    free(word);
}

void bench_sample(struct bench_timer *t)
{
    static const int32_t rows[] = {1, MASKED_ROWS, 128, 256};
    struct sample_row row[256];

    for (size_t r = 0; r < ARRAY_LEN(rows); r++) {
        struct mat logits = random_logits(t, rows[r]);
        for (size_t kind = 0; kind < ARRAY_LEN(asked) && t->rc == 0; kind++) {
            struct bench_job j = {.batch = sampling_batch(t, rows[r], &asked[kind].row, row),
                                  .calls = 8,
                                  .queued = true,
                                  .call = call_sample,
                                  .arg = &logits};
            bench_line(t, bench_us(t, &j), 4.0 * rows[r] * t->shape.vocab, 0,
                       "sampling, %s, %d rows", asked[kind].name, rows[r]);
        }
        if (rows[r] == MASKED_ROWS && t->rc == 0) {
            mask_lines(t, logits, row);
        }
    }
}
