/* Attention over latents, timed: decodes of many lengths and head counts, and prefill.
 *
 *     build/tests/bench/latent [--device cuda]
 *
 * Shape: DeepSeek's latents of 512 and rotated keys of 64 dims, bf16. A line of JSON
 * per case: microseconds of a layer's attention with its products by head, bytes of
 * latents read a second and floating-point operations a second of the attention alone,
 * as if it took all of that time: 2 * (576 + 512) a head and visited key of a decode,
 * 2 * (192 + 128) of a prefill, whose heads are expanded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/base.h"
#include "kernels/backend.h"

enum {
    LATENT = 512,
    ROT = 64,
    NOPE = 128,
    V_DIM = 128,
    WIDTH = LATENT + ROT,
    BLOCK = 64,
    MAX_TOKENS = 4096,
    MAX_SEQS = 256,
    POOL_TOKENS = 1 << 20,
    MAX_CONTEXT = 1 << 16,
    REPEATS = 5,
    CALLS = 20,
};

struct shape {
    int32_t heads, seqs, context, query; /* query: tokens of each sequence */
};

static const struct shape SHAPES[] = {
    {16, 1, 1024, 1},     {16, 4, 1024, 1},   {16, 8, 1024, 1},     {16, 16, 1024, 1},
    {16, 32, 1024, 1},    {16, 64, 1024, 1},  {16, 1, 8192, 1},     {16, 8, 8192, 1},
    {16, 64, 4096, 1},    {16, 128, 4096, 1}, {32, 1, 1024, 1},     {32, 8, 1024, 1},
    {32, 64, 4096, 1},    {64, 1, 1024, 1},   {64, 8, 1024, 1},     {128, 1, 1024, 1},
    {128, 1, 8192, 1},    {128, 8, 1024, 1},  {128, 64, 4096, 1},   {128, 128, 4096, 1},
    {16, 1, 4096, 4096},  {16, 4, 960, 960},  {16, 1, 16384, 4096}, {16, 1, 65536, 2048},
    {128, 1, 4096, 2048},
};

static void check(int rc, const struct err *e)
{
    if (rc < 0) {
        fprintf(stderr, "latent: %s\n", e->text);
        exit(1);
    }
}

static struct mat scratch(struct backend *b, int32_t rows, int32_t cols)
{
    struct mat m;
    struct err e = {0};

    check(b->ops->scratch(b, rows, cols, backend_act_dtype(b, DTYPE_BF16), &m, &e), &e);
    return m;
}

static struct mat dummy(struct backend *b, enum weight_kind kind, enum dtype t, int32_t rows,
                        int32_t cols)
{
    struct mat m;
    struct err e = {0};
    const struct weight_desc d = {
        .name = "dummy", .kind = kind, .dtype = t, .rows = rows, .cols = cols};

    check(b->ops->weight(b, &d, &m, &e), &e);
    return m;
}

/* A step of s->seqs sequences that end at s->context tokens, all in different blocks as
 * far as the pool goes. */
struct arrays {
    struct batch b;
    int32_t zero[MAX_TOKENS], none[MAX_TOKENS], position[MAX_TOKENS];
    int32_t q_start[MAX_SEQS + 1], kv_len[MAX_SEQS], row[MAX_SEQS], lcp[MAX_SEQS];
    struct table_update update[MAX_SEQS];
    int32_t block[POOL_TOKENS / BLOCK * 2];
};

static void pack(struct arrays *a, const struct shape *s, uint64_t step)
{
    int32_t blocks = s->context / BLOCK;

    memset(&a->b, 0, sizeof(a->b));
    for (int32_t i = 0; i < s->seqs; i++) {
        a->q_start[i] = i * s->query;
        a->kv_len[i] = s->context;
        a->row[i] = i;
        a->update[i] = (struct table_update){.row = i, .count = blocks, .first = i * blocks};
        for (int32_t k = 0; k < blocks; k++) {
            a->block[i * blocks + k] = (int32_t)((i * blocks + k) * 7919L % (POOL_TOKENS / BLOCK));
        }
        for (int32_t k = 0; k < s->query; k++) {
            a->position[i * s->query + k] = s->context - s->query + k;
        }
    }
    a->q_start[s->seqs] = s->seqs * s->query;
    memset(a->none, 0xFF, sizeof(a->none));
    a->b = (struct batch){.step = step,
                          .n_tokens = s->seqs * s->query,
                          .token = a->zero,
                          .token_src = a->none,
                          .position = a->position,
                          .slot = a->none,
                          .n_seqs = s->seqs,
                          .n_decode = s->query == 1 ? s->seqs : 0,
                          .q_start = a->q_start,
                          .kv_len = a->kv_len,
                          .row = a->row,
                          .lcp_blocks = a->lcp,
                          .n_table_update = s->seqs,
                          .table_update = a->update,
                          .n_table_block = s->seqs * blocks,
                          .table_block = a->block};
}

struct bench {
    struct backend *b;
    struct mat q, kv, out;
    struct latent_scratch scratch;
    struct latent_attention att;
    struct arrays *arrays;
    uint64_t step;
};

static void bench_open(struct bench *t, const char *device, int32_t heads)
{
    struct err e = {0};
    struct kv_layout kv;
    const struct backend_config c = {.threads = 0,
                                     .max_tokens = MAX_TOKENS,
                                     .max_seqs = MAX_SEQS,
                                     .max_samples = 1,
                                     .max_blocks_per_seq = MAX_CONTEXT / BLOCK};

    check(backend_open(&t->b, device, &c, &e), &e);
    if (!t->b->ops->latent_attention) {
        fprintf(stderr, "latent: %s has no attention over latents\n", device);
        exit(1);
    }
    kv_layout_init_latent(&kv, BLOCK, 1, WIDTH, backend_act_dtype(t->b, DTYPE_BF16));
    check(t->b->ops->kv_create(t->b, &kv, POOL_TOKENS / BLOCK, 0, &e), &e);
    t->q = scratch(t->b, MAX_TOKENS, heads * (NOPE + ROT));
    t->out = scratch(t->b, MAX_TOKENS, heads * V_DIM);
    t->scratch.q = scratch(t->b, 1024, heads * WIDTH);
    t->scratch.sum = scratch(t->b, 1024, heads * LATENT);
    t->att = (struct latent_attention){
        .n_heads = heads,
        .latent = LATENT,
        .rot_dim = ROT,
        .nope_dim = NOPE,
        .v_dim = V_DIM,
        .scale = 0.07f,
        .k_up = dummy(t->b, WEIGHT_LINEAR, DTYPE_BF16, heads * LATENT, NOPE),
        .v_up = dummy(t->b, WEIGHT_LINEAR, DTYPE_BF16, heads * V_DIM, LATENT)};
    if (t->b->ops->ready) {
        check(t->b->ops->ready(t->b, &e), &e);
    }
}

/* Microseconds of a call: the least of several steps of many calls each. */
static double measure(struct bench *t, const struct shape *s, int32_t calls)
{
    double best = 1e30;
    struct results ret;
    struct err e = {0};
    int32_t n = s->seqs * s->query;

    for (int32_t i = 0; i < REPEATS; i++) {
        pack(t->arrays, s, ++t->step);
        check(t->b->ops->step_begin(t->b, &t->arrays->b, &e), &e);
        for (int32_t k = 0; k < calls; k++) {
            t->b->ops->latent_attention(t->b, mat_rows(t->out, 0, n), mat_rows(t->q, 0, n), &t->att,
                                        &t->scratch);
        }
        check(t->b->ops->step_end(t->b, &e), &e);
        check(t->b->ops->step_wait(t->b, &ret, &e), &e);
        best = (double)ret.device_us < best ? (double)ret.device_us : best;
    }
    return best;
}

int main(int argc, char **argv)
{
    const char *device = argc > 2 && strcmp(argv[1], "--device") == 0 ? argv[2] : "cpu";
    struct bench t = {.arrays = calloc(1, sizeof(*t.arrays))};
    int32_t heads = 0;
    bool gpu = strcmp(device, "cpu") != 0;

    for (size_t i = 0; i < ARRAY_LEN(SHAPES) && t.arrays; i++) {
        const struct shape *s = &SHAPES[i];
        if (s->heads != heads) {
            if (t.b) {
                t.b->ops->free(t.b);
            }
            heads = s->heads;
            bench_open(&t, device, heads);
        }
        int32_t calls = gpu ? CALLS : 1;
        /* the time of a step with calls, less that of one with a single call */
        double us =
            gpu ? (measure(&t, s, calls) - measure(&t, s, 1)) / (calls - 1) : measure(&t, s, 1);
        double keys = (double)s->seqs * s->query * (s->context - (s->query - 1) / 2.0);
        int32_t dims = s->query == 1 ? WIDTH + LATENT : NOPE + ROT + V_DIM;
        printf("{\"heads\": %d, \"seqs\": %d, \"context\": %d, \"query\": %d, \"us\": %.1f, "
               "\"tb_s\": %.2f, \"tflops\": %.1f}\n",
               s->heads, s->seqs, s->context, s->query, us,
               (double)s->seqs * s->context * WIDTH * 2 / us * 1e-6,
               2 * keys * s->heads * dims / us * 1e-6);
        fflush(stdout);
    }
    if (t.b) {
        t.b->ops->free(t.b);
    }
    free(t.arrays);
    return 0;
}
