/* See bench_ops.h. */
#include "kernels/bench/bench_ops.h"

#include <stdarg.h>
#include <string.h>

#include "kernels/bench/bench_impl.h"

enum { REPEATS = 7 };

static const struct bench_shape llama_8b = {.hidden = 4096,
                                            .heads = 32,
                                            .kv_heads = 8,
                                            .dim = 128,
                                            .inner = 14336,
                                            .vocab = 128256,
                                            .layers = 32,
                                            .block_size = 16,
                                            .n_blocks = 24576,
                                            .cache_layers = 16,
                                            .max_tokens = 16384,
                                            .max_seqs = 512,
                                            .context_over = 1};
static const struct bench_shape small = {.hidden = 256,
                                         .heads = 8,
                                         .kv_heads = 2,
                                         .dim = 64,
                                         .inner = 512,
                                         .vocab = 2048,
                                         .layers = 2,
                                         .block_size = 16,
                                         .n_blocks = 1024,
                                         .cache_layers = 2,
                                         .max_tokens = 512,
                                         .max_seqs = 512,
                                         .context_over = 64};

bool bench_failed(struct bench_timer *t, int rc)
{
    t->rc = t->rc < 0 ? t->rc : rc;
    return t->rc < 0;
}

uint64_t bench_random(struct bench_timer *t)
{
    t->rng = t->rng * 6364136223846793005ull + 1442695040888963407ull;
    return t->rng >> 33;
}

struct mat bench_mat(struct bench_timer *t, int32_t rows, int32_t cols, enum dtype type)
{
    struct mat m = {0};

    if (t->rc == 0) {
        bench_failed(t,
                     t->b->ops->scratch(t->b, rows, cols, backend_act_dtype(t->b, type), &m, t->e));
    }
    return m;
}

struct mat bench_weight(struct bench_timer *t, enum weight_kind kind, int32_t rows, int32_t cols,
                        enum dtype type)
{
    struct mat m = {0};
    struct weight_desc d = {
        .name = "bench", .kind = kind, .dtype = type, .rows = rows, .cols = cols};

    if (t->rc == 0) {
        bench_failed(t, t->b->ops->weight(t->b, &d, &m, t->e));
    }
    return m;
}

static int by_time(const void *x, const void *y)
{
    double a = *(const double *)x, c = *(const double *)y;

    return (a > c) - (a < c);
}

static void call_product(struct bench_timer *t, int i, void *arg)
{
    (void)i;
    struct bench_ceiling *c = arg;
    t->b->ops->linear(t->b, c->out, c->x, c->w, NULL);
}

/* Device time of one step, us; NAN after a failure. */
static double step_us(struct bench_timer *t, struct bench_job *j)
{
    const struct backend_ops *ops = t->b->ops;
    struct results r = {0};

    j->batch.step = ++t->step;
    if (j->batch.n_late_mask > 0 &&
        bench_failed(t, ops->masks(t->b, t->step, j->late, j->batch.n_late_mask, t->e))) {
        return NAN;
    }
    if (bench_failed(t, ops->step_begin(t->b, &j->batch, t->e))) {
        return NAN;
    }
    if (j->queued && t->ahead_us > 0) {
        call_product(t, 0, &t->ahead);
    }
    for (int k = 0; k < j->calls && j->call != NULL; k++) {
        j->call(t, k, j->arg);
    }
    bool ended = !bench_failed(t, ops->step_end(t->b, t->e));
    return ended && !bench_failed(t, ops->step_wait(t->b, &r, t->e)) ? (double)r.device_us : NAN;
}

double bench_us(struct bench_timer *t, struct bench_job *j)
{
    double us[REPEATS];

    for (int i = -2; i < REPEATS && t->rc == 0; i++) {
        double took = step_us(t, j);
        if (i >= 0) {
            us[i] = took;
        }
    }
    if (t->rc < 0) {
        return NAN;
    }
    qsort(us, REPEATS, sizeof(us[0]), by_time);
    double ahead = j->queued && t->ahead_us > 0 ? t->ahead_us : 0;
    return (us[REPEATS / 2] - ahead) / j->calls;
}

void bench_line(struct bench_timer *t, double us, double bytes, double flops, const char *format,
                ...)
{
    char name[96];
    va_list args;

    if (t->rc < 0 || !isfinite(us)) {
        return;
    }
    va_start(args, format);
    vsnprintf(name, sizeof(name), format, args);
    va_end(args);
    fprintf(t->out, "%-54s %9.2f us", name, us);
    if (bytes > 0) {
        fprintf(t->out, ", %9.2f MB, %6.3f TB/s", bytes * 1e-6, bytes / us * 1e-6);
        if (t->read > 0) {
            fprintf(t->out, " (%3.0f %%)", 100 * bytes / us / t->read);
        }
    }
    if (flops > 0) {
        fprintf(t->out, ", %9.2f GFLOP, %5.1f TFLOP/s", flops * 1e-9, flops / us * 1e-6);
        if (t->product > 0) {
            fprintf(t->out, " (%3.0f %%)", 100 * flops / us / t->product);
        }
    }
    fputc('\n', t->out);
    fflush(t->out);
}

struct batch bench_batch(struct bench_timer *t, int32_t n)
{
    static int32_t q_start[2], kv_len;

    q_start[1] = kv_len = n;
    return (struct batch){.n_tokens = n,
                          .token = t->zero,
                          .position = t->zero,
                          .slot = t->none,
                          .n_seqs = 1,
                          .q_start = q_start,
                          .kv_len = &kv_len,
                          .row = t->zero,
                          .lcp_blocks = t->zero};
}

struct bench_layer *bench_layer_of(struct bench_timer *t, int32_t rows)
{
    for (int i = 0; i < BENCH_STEP_ROWS; i++) {
        if (t->layer[i].rows == rows) {
            return &t->layer[i];
        }
    }
    return NULL;
}

/* ---- ceilings ---- */

/* us of the product of [rows, in] and [out, in]. */
static double product_us(struct bench_timer *t, struct bench_ceiling *c, int32_t rows, int32_t in,
                         int32_t out)
{
    *c = (struct bench_ceiling){
        .w = bench_weight(t, WEIGHT_LINEAR, out, in, DTYPE_BF16),
        .x = bench_weight(t, WEIGHT_TABLE, rows, in, backend_act_dtype(t->b, DTYPE_BF16)),
        .out = bench_mat(t, rows, out, DTYPE_BF16)};
    struct bench_job j = {
        .batch = bench_batch(t, rows), .calls = 4, .call = call_product, .arg = c};
    return bench_us(t, &j);
}

/* Bytes read and written per us by block copies, all in one step; needs the cache. */
static double copied_bytes_us(struct bench_timer *t, int64_t block_bytes)
{
    int32_t n = MIN(t->shape.n_blocks / 2, 1024);
    struct block_copy *copy = calloc((size_t)n, sizeof(*copy));

    if (!copy) {
        bench_failed(t, err_nomem(t->e, "the measure of copies"));
        return NAN;
    }
    for (int32_t i = 0; i < n; i++) {
        copy[i] = (struct block_copy){.src = i, .dst = n + i};
    }
    struct bench_job j = {.batch = {.q_start = t->zero, .copy = copy, .n_copy = n}, .calls = 1};
    double us = bench_us(t, &j);
    free(copy);
    return 2.0 * (double)block_bytes * n / us;
}

static void measure_ceilings(struct bench_timer *t, const struct kv_layout *l)
{
    bool gpu = t->shape.context_over == 1;
    int32_t wide = gpu ? 262144 : 16384, in = gpu ? 8192 : 1024, side = gpu ? 8192 : 512;
    struct bench_ceiling square;

    t->read = 2.0 * wide * in / product_us(t, &t->ahead, 1, in, wide);
    t->copy = copied_bytes_us(t, kv_layout_block_bytes(l));
    t->product = 2.0 * side * side * side / product_us(t, &square, side, side, side);
    if (gpu) {
        struct bench_job alone = {
            .batch = bench_batch(t, 1), .calls = 1, .call = call_product, .arg = &t->ahead};
        t->ahead_us = bench_us(t, &alone);
    }
    if (t->rc == 0) {
        fprintf(
            t->out,
            "ceilings: %.2f TB/s read, %.2f TB/s copied (read and written), %.0f TFLOP/s bf16\n",
            t->read * 1e-6, t->copy * 1e-6, t->product * 1e-6);
    }
}

/* ---- breakdown of a decode step ---- */

/* Products, attention and everything else, for sequences of 1,024 tokens. */
static void print_share(struct bench_timer *t, const struct bench_layer *l)
{
    double layers = t->shape.layers, products = layers * l->products + l->head,
           attention = layers * l->attention;
    double glue = layers * (2 * l->norms + l->rope) + l->ends, all = products + attention + glue;

    if (t->rc == 0 && isfinite(all)) {
        fprintf(t->out,
                "a decode step of %d x %d by its parts: products %.0f us, attention %.0f us, "
                "everything else %.0f us "
                "(%.1f %% of %.0f us)\n",
                l->rows, 1024 / t->shape.context_over, products, attention, glue, 100 * glue / all,
                all);
    }
}

static int open_bench(struct bench_timer *t, const char *device)
{
    struct backend_config c = {.max_tokens = llama_8b.max_tokens,
                               .max_seqs = llama_8b.max_seqs,
                               .max_samples = llama_8b.max_seqs,
                               .max_blocks_per_seq = llama_8b.n_blocks,
                               .vocab = llama_8b.vocab};
    int rc = backend_open(&t->b, device, &c, t->e);

    if (rc < 0) {
        return rc;
    }
    t->shape = strcmp(t->b->name, "cpu") == 0 ? small : llama_8b;
    size_t n = (size_t)t->shape.max_tokens + 1;
    t->zero = calloc(n, sizeof(int32_t));
    t->none = calloc(n, sizeof(int32_t));
    t->count = calloc(n, sizeof(int32_t));
    if (!t->zero || !t->none || !t->count) {
        return err_nomem(t->e, "the steps that are measured");
    }
    memset(t->none, 0xFF, n * sizeof(int32_t));
    for (size_t i = 0; i < n; i++) {
        t->count[i] = (int32_t)i;
    }
    for (int i = 0; i < BENCH_STEP_ROWS; i++) {
        static const int32_t rows[BENCH_STEP_ROWS] = {1, 64, 256};
        t->layer[i] = (struct bench_layer){rows[i], NAN, NAN, NAN, NAN, NAN, NAN};
    }
    struct kv_layout l;
    kv_layout_init(&l, t->shape.block_size, t->shape.cache_layers, t->shape.kv_heads, t->shape.dim,
                   bench_cache(t));
    rc = t->b->ops->kv_create(t->b, &l, t->shape.n_blocks, 0, t->e);
    if (rc < 0) {
        return rc;
    }
    fprintf(t->out, "device %s\n", t->b->device);
    if (t->cache != DTYPE_F32) {
        fprintf(t->out, "cache of %s\n", dtype_name(t->cache));
    }
    measure_ceilings(t, &l);
    return t->rc;
}

static const char *const words[] = {"linear", "decode", "prefill", "glue", "sample"};

/* The type of cache that a word names; DTYPE_F32: none. */
static enum dtype cache_named(const char *word)
{
    return strcmp(word, "fp8") == 0 ? DTYPE_F8 : strcmp(word, "int8") == 0 ? DTYPE_I8 : DTYPE_F32;
}

/* Sets which of `words` are wanted, and the type of the cache. */
static int read_words(int n_what, char **what, bool *want, enum dtype *cache, struct err *e)
{
    bool all = true;

    for (int i = 0; i < n_what; i++) {
        all = all && cache_named(what[i]) != DTYPE_F32;
    }
    for (size_t k = 0; k < ARRAY_LEN(words); k++) {
        want[k] = all;
    }
    for (int i = 0; i < n_what; i++) {
        size_t k = 0;
        if (cache_named(what[i]) != DTYPE_F32) {
            *cache = cache_named(what[i]);
            continue;
        }
        while (k < ARRAY_LEN(words) && strcmp(what[i], words[k]) != 0) {
            k++;
        }
        if (k == ARRAY_LEN(words)) {
            return err_set(
                e, ERR_INVALID,
                "there is no kernel %s; linear, decode, prefill, glue and sample are, and "
                "fp8 and int8 are types of the cache",
                what[i]);
        }
        want[k] = true;
    }
    return 0;
}

int bench_run(const char *device, int n_what, char **what, FILE *out, struct err *e)
{
    bool want[ARRAY_LEN(words)];
    struct bench_timer t = {.out = out, .e = e, .rng = 1};
    int rc = read_words(n_what, what, want, &t.cache, e);

    if (rc < 0) {
        return rc;
    }
    rc = open_bench(&t, device);
    if (rc == 0) {
        if (want[3]) {
            bench_glue(&t);
        }
        if (want[4]) {
            bench_sample(&t);
        }
        if (want[1] || want[2]) {
            bench_attention(&t, want[1], want[2]);
        }
        if (want[0]) {
            bench_linear(&t);
        }
        for (int i = 0; i < BENCH_STEP_ROWS; i++) {
            print_share(&t, &t.layer[i]);
        }
        rc = t.rc;
    }
    if (t.b) {
        t.b->ops->free(t.b);
    }
    free(t.zero);
    free(t.none);
    free(t.count);
    return rc;
}
