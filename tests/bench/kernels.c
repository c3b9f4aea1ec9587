/* Kernel times through the backend seam: matrix products of one decode step, paged attention, glue, sampling.
 *
 *     build/tests/bench/kernels --device cuda [what ...]      what: linear decode prefill glue sample (default: all)
 *
 * Shapes: Llama-3.1-8B (32/8 heads of 128, hidden 4096, bf16). Every figure is the step's device time divided by the
 * number of calls in it, operands rotated so that nothing is found in the cache, the median of seven steps.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"

enum {
    MAX_TOKENS = 16384,
    MAX_SEQS = 512,
    BLOCK = 16,
    REPEATS = 7,
    HEADS = 32,
    KV_HEADS = 8,
    DIM = 128,
    HIDDEN = 4096
};

static struct backend *b;
static uint64_t step;
static uint64_t rng = 1;
static int32_t *ints[8];

static uint64_t next(void)
{
    rng = rng * 6364136223846793005ull + 1442695040888963407ull;
    return rng >> 33;
}

static void check(int rc, const struct err *e)
{
    if (rc < 0) {
        fprintf(stderr, "kernels: %s\n", e->text);
        exit(1);
    }
}

static struct mat mat_of(int32_t rows, int32_t cols, enum dtype t)
{
    struct err e;
    struct mat m;
    check(b->ops->scratch(b, rows, cols, t, &m, &e), &e);
    return m;
}

/* Fill with noise by way of a dummy weight's generator: activations of about 1e-3 are noise too. */
static struct mat weight_of(int32_t rows, int32_t cols, enum dtype t)
{
    struct err e;
    struct mat m;
    struct weight_desc d = {.name = "bench", .kind = WEIGHT_LINEAR, .dtype = t, .rows = rows, .cols = cols};
    check(b->ops->weight(b, &d, &m, &e), &e);
    return m;
}

static int by_time(const void *x, const void *y)
{
    double a = *(const double *)x;
    double c = *(const double *)y;
    return (a > c) - (a < c);
}

struct job {
    struct batch batch;
    int calls;
    void (*call)(int i, void *arg);
    void *arg;
};

static double median_us(struct job *j)
{
    double t[REPEATS];
    struct err e;
    struct results r;
    for (int i = -2; i < REPEATS; i++) {
        j->batch.step = ++step;
        check(b->ops->step_begin(b, &j->batch, &e), &e);
        for (int k = 0; k < j->calls; k++) {
            j->call(k, j->arg);
        }
        check(b->ops->step_end(b, &e), &e);
        check(b->ops->step_wait(b, &r, &e), &e);
        if (i >= 0) {
            t[i] = (double)r.device_us / j->calls;
        }
    }
    qsort(t, REPEATS, sizeof(t[0]), by_time);
    return t[REPEATS / 2];
}

static struct batch plain_batch(int32_t n)
{
    ints[1][0] = 0;
    ints[1][1] = n;
    ints[2][0] = n;
    return (struct batch){.n_tokens = n,
                          .token = ints[0],
                          .position = ints[0],
                          .slot = ints[3],
                          .n_seqs = 1,
                          .q_start = ints[1],
                          .kv_len = ints[2],
                          .row = ints[0],
                          .lcp_blocks = ints[0]};
}

/* ---- matrix products ---- */

enum { COPIES = 16 };
struct products {
    struct mat w[COPIES], x, out, act;
    int n;
};

static void call_linear(int i, void *arg)
{
    struct products *p = arg;
    b->ops->linear(b, p->out, p->x, p->w[i % p->n], NULL);
}

static void call_gated(int i, void *arg)
{
    struct products *p = arg;
    b->ops->linear_gated(b, p->act, p->out, p->x, p->w[i % p->n], (struct mat){0}, ACT_SILU);
}

static void bench_linear(void)
{
    static const int32_t shape[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}};
    static const int32_t rows[] = {1, 4, 8, 16, 32, 64, 128, 256, 8192};
    for (size_t s = 0; s < ARRAY_LEN(shape); s++) {
        int32_t n = shape[s][0];
        int32_t k = shape[s][1];
        struct products p = {.n = n > 100000 ? 2 : n > 20000 ? 4 : 8};
        for (int i = 0; i < p.n; i++) {
            p.w[i] = weight_of(n, k, DTYPE_BF16);
        }
        for (size_t r = 0; r < ARRAY_LEN(rows); r++) {
            if (n > 100000 && rows[r] > 256) {
                continue;
            }
            p.x = weight_of(rows[r], k, DTYPE_BF16);
            p.out = mat_of(rows[r], n, n > 100000 ? DTYPE_F32 : DTYPE_BF16);
            bool gated = n == 28672; /* gate and up are one weight */
            p.act = gated ? mat_of(rows[r], n / 2, DTYPE_BF16) : p.out;
            struct job j = {.batch = plain_batch(rows[r]),
                            .calls = rows[r] > 256 ? 8 : 32,
                            .call = gated ? call_gated : call_linear,
                            .arg = &p};
            double us = median_us(&j);
            printf("%s %6d x %5d, %4d rows: %8.2f us, %5.2f TB/s of weights, %6.1f TFLOP/s\n",
                   gated ? "gated " : "linear", n, k, rows[r], us, 2e-6 * n * k / us, 2e-6 * n * k * rows[r] / us);
        }
    }
}

/* ---- attention ---- */

struct scene {
    struct mat qkv, out;
    int layers;
};

static void call_attention(int i, void *arg)
{
    struct scene *s = arg;
    struct attention a = {
        .layer = i % s->layers, .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM, .scale = 0.0883883f};
    b->ops->attention(b, s->out, s->qkv, &a);
}

enum { LAYERS = 16 };
static int32_t n_blocks;

/* Sequences of the given lengths over shuffled blocks, n_query tokens each. */
static double attention_us(int32_t n_seqs, const int32_t *len, const int32_t *n_query, struct scene *s)
{
    static struct table_update update[MAX_SEQS];
    static int32_t *block;
    if (block == NULL) {
        block = malloc((size_t)n_blocks * sizeof(*block));
        for (int32_t i = 0; i < n_blocks; i++) {
            block[i] = i;
        }
        for (int32_t i = n_blocks - 1; i > 0; i--) {
            int32_t j = (int32_t)(next() % (uint64_t)(i + 1));
            int32_t t = block[i];
            block[i] = block[j];
            block[j] = t;
        }
    }
    struct batch a = {.token = ints[0],
                      .position = ints[0],
                      .slot = ints[3],
                      .q_start = ints[4],
                      .kv_len = len,
                      .row = ints[5],
                      .lcp_blocks = ints[0],
                      .n_seqs = n_seqs,
                      .table_update = update,
                      .table_block = block,
                      .n_table_update = n_seqs};
    ints[4][0] = 0;
    for (int32_t i = 0; i < n_seqs; i++) {
        int32_t n = (int32_t)div_ceil(len[i], BLOCK);
        update[i] = (struct table_update){.row = i, .count = n, .first = a.n_table_block};
        a.n_table_block += n;
        a.n_tokens += n_query[i];
        ints[4][i + 1] = a.n_tokens;
        ints[5][i] = i;
        a.n_decode += n_query[i] == 1;
    }
    if (a.n_table_block > n_blocks) {
        return NAN;
    }
    struct job j = {.batch = a, .calls = a.n_tokens > a.n_seqs ? 8 : 32, .call = call_attention, .arg = s};
    return median_us(&j);
}

struct writes {
    struct mat qkv;
};

static void call_write(int i, void *arg)
{
    struct writes *w = arg;
    struct rope r = {.rot_dim = 0};
    struct attention a = {.layer = i, .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM};
    b->ops->rope_kv(b, w->qkv, &r, &a);
}

/* Noise into every slot of the cache. */
static void fill_cache(struct mat qkv)
{
    struct err e;
    struct results r;
    struct writes w = {.qkv = qkv};
    int32_t *slot = malloc(MAX_TOKENS * sizeof(*slot));
    for (int32_t first = 0; first < n_blocks * BLOCK && slot != NULL; first += MAX_TOKENS) {
        for (int32_t i = 0; i < MAX_TOKENS; i++) {
            slot[i] = first + i < n_blocks * BLOCK ? first + i : -1;
        }
        struct batch a = plain_batch(MAX_TOKENS);
        a.slot = slot;
        a.step = ++step;
        check(b->ops->step_begin(b, &a, &e), &e);
        for (int i = 0; i < LAYERS; i++) {
            call_write(i, &w);
        }
        check(b->ops->step_end(b, &e), &e);
        check(b->ops->step_wait(b, &r, &e), &e);
    }
    free(slot);
}

static void bench_attention(bool decode, bool prefill)
{
    struct err e;
    struct kv_layout l;
    struct scene s = {.qkv = weight_of(MAX_TOKENS, (HEADS + 2 * KV_HEADS) * DIM, DTYPE_BF16),
                      .out = mat_of(MAX_TOKENS, HEADS * DIM, DTYPE_BF16),
                      .layers = LAYERS};
    kv_layout_init(&l, BLOCK, LAYERS, KV_HEADS, DIM, DTYPE_BF16);
    n_blocks = 24576;
    check(b->ops->kv_create(b, &l, n_blocks, 0, &e), &e);
    fill_cache(s.qkv);
    static const int32_t decodes[][2] = {{1, 1024},  {1, 4096},  {1, 32768},  {8, 1024},
                                         {32, 4096}, {64, 1024}, {256, 1024}, {64, 4096}};
    static int32_t len[MAX_SEQS];
    static int32_t query[MAX_SEQS];
    for (size_t i = 0; i < ARRAY_LEN(decodes) && decode; i++) {
        for (int32_t k = 0; k < decodes[i][0]; k++) {
            len[k] = decodes[i][1];
            query[k] = 1;
        }
        double us = attention_us(decodes[i][0], len, query, &s);
        printf("decode attention %3d x %6d: %8.2f us, %5.2f TB/s\n", decodes[i][0], decodes[i][1], us,
               4e-6 * KV_HEADS * DIM * decodes[i][0] * decodes[i][1] / us);
    }
    for (int skewed = 0; skewed < 2 && decode; skewed++) {
        for (int32_t k = 0; k < 32; k++) {
            len[k] = !skewed ? 8064 : k == 0 ? 131072 : 4096;
            query[k] = 1;
        }
        printf("decode attention, %s: %8.2f us\n", skewed ? "1 x 128k + 31 x 4k" : "32 x 8064",
               attention_us(32, len, query, &s));
    }
    static const int32_t prefills[][3] = {{1, 4096, 4096}, {1, 16384, 16384}, {8, 2048, 2048}, {1, 16384, 2048}};
    for (size_t i = 0; i < ARRAY_LEN(prefills) && prefill; i++) {
        double flops = 0;
        for (int32_t k = 0; k < prefills[i][0]; k++) {
            double n = prefills[i][1];
            double before = prefills[i][1] - prefills[i][2];
            len[k] = prefills[i][1];
            query[k] = prefills[i][2];
            flops += 4.0 * HEADS * DIM * (n * n - before * before) / 2;
        }
        double us = attention_us(prefills[i][0], len, query, &s);
        printf("prefill attention %d x %d of %d: %8.1f us, %6.1f TFLOP/s\n", prefills[i][0], prefills[i][2],
               prefills[i][1], us, flops * 1e-6 / us);
    }
    for (int32_t k = 0; k <= 64; k++) {
        len[k] = k < 64 ? 1024 : 2048;
        query[k] = k < 64 ? 1 : 2048;
    }
    if (prefill) {
        printf("attention, 64 x 1024 decoding and 1 x 2048 of 2048: %8.1f us\n", attention_us(65, len, query, &s));
    }
}

/* ---- glue and sampling ---- */

struct glue {
    struct mat x, y, out;
    struct norm norm;
};

static void call_norm(int i, void *arg)
{
    (void)i;
    struct glue *g = arg;
    b->ops->add_norm(b, g->out, g->x, g->y, &g->norm, false);
}

static void bench_glue(void)
{
    static const int32_t rows[] = {1, 64, 256, 8192};
    for (size_t r = 0; r < ARRAY_LEN(rows); r++) {
        int32_t n = rows[r];
        struct glue g = {.x = mat_of(n, HIDDEN, DTYPE_BF16),
                         .y = weight_of(n, HIDDEN, DTYPE_BF16),
                         .out = mat_of(n, HIDDEN, DTYPE_BF16),
                         .norm = {.kind = NORM_RMS, .eps = 1e-5f}};
        g.norm.weight = weight_of(1, HIDDEN, DTYPE_BF16);
        struct job norm = {.batch = plain_batch(n), .calls = 64, .call = call_norm, .arg = &g};
        printf("add_norm %5d rows: %7.2f us\n", n, median_us(&norm));
    }
}

static void call_sample(int i, void *arg)
{
    (void)i;
    b->ops->sample(b, *(struct mat *)arg, 0);
}

#define ASKED(...)                                                                               \
    {                                                                                            \
        .repetition_penalty = 1, .n_logprobs = -1, .prev_sample = -1, .position = 7, __VA_ARGS__ \
    }
static const struct {
    const char *name;
    struct sample_row row;
} asked[] = {
    {"greedy", ASKED(.top_p = 1)},
    {"plain", ASKED(.temperature = 0.8f, .top_p = 1)},
    {"top-p 0.95", ASKED(.temperature = 0.8f, .top_p = 0.95f)},
    {"top-k 50, top-p 0.95", ASKED(.temperature = 0.8f, .top_p = 0.95f, .top_k = 50)},
    {"beam candidates, 8", ASKED(.kind = SAMPLE_CANDIDATES, .n_candidates = 8, .top_p = 1)},
};

static void bench_sample(void)
{
    enum { VOCAB = 128256 };
    static const int32_t rows[] = {1, 64, 128, 256};
    static struct sample_row row[256];
    static int32_t index[256];
    for (size_t r = 0; r < ARRAY_LEN(rows); r++) {
        int32_t n = rows[r];
        struct mat logits = mat_of(n, VOCAB, DTYPE_F32);
        float *v = malloc((size_t)n * VOCAB * sizeof(*v));
        for (int64_t i = 0; i < (int64_t)n * VOCAB && v != NULL; i++) {
            v[i] = (float)((double)(next() % 65536 + next() % 65536 + next() % 65536) / 65536 * 8);
        }
        struct err e;
        check(b->ops->upload(b, logits, v, &e), &e);
        free(v);
        for (size_t kind = 0; kind < ARRAY_LEN(asked); kind++) {
            struct batch a = plain_batch(n);
            for (int32_t i = 0; i < n; i++) {
                index[i] = i;
                row[i] = asked[kind].row;
                row[i].logits_row = i;
                row[i].seed = (uint64_t)i;
            }
            a.n_logits = a.n_samples = n;
            a.logits_token = index;
            a.sample = row;
            struct job j = {.batch = a, .calls = 8, .call = call_sample, .arg = &logits};
            printf("sample %s, %3d rows: %7.1f us\n", asked[kind].name, n, median_us(&j));
        }
    }
}

int main(int argc, char **argv)
{
    const char *device = "cuda";
    bool all = true;
    bool want[5] = {false};
    static const char *const names[] = {"linear", "decode", "prefill", "glue", "sample"};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
            device = argv[++i];
        }
        for (int k = 0; k < 5; k++) {
            if (strcmp(argv[i], names[k]) == 0) {
                want[k] = true;
                all = false;
            }
        }
    }
    struct err e;
    struct backend_config c = {
        .max_tokens = MAX_TOKENS, .max_seqs = MAX_SEQS, .max_samples = 512, .max_blocks_per_seq = 8448};
    check(backend_open(&b, device, &c, &e), &e);
    for (size_t i = 0; i < ARRAY_LEN(ints); i++) {
        ints[i] = calloc(MAX_TOKENS + 1, sizeof(int32_t));
    }
    memset(ints[3], 0xFF, (MAX_TOKENS + 1) * sizeof(int32_t));
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("device %s\n", b->device);
    if (all || want[3]) {
        bench_glue();
    }
    if (all || want[4]) {
        bench_sample();
    }
    if (all || want[1] || want[2]) {
        bench_attention(all || want[1], all || want[2]);
    }
    if (all || want[0]) {
        bench_linear();
    }
    b->ops->free(b);
    return 0;
}
