/* The CPU backend against the machine's limits: linear, attention and sampling, as
 * fractions of the read bandwidth and multiply-add peak measured first.
 *
 *     build/tests/bench/bench_cpu [--threads N] [--seconds S] [--clock cpu] [--rows N]
 *                                 [read|peak|gemv|gemm|attention|sample]...
 *
 * `--clock cpu` takes this process's processor time divided by its threads, for
 * compute-bound lines on a busy machine. The weights of the decode lines are larger
 * than the last-level cache, and each is used once per round, as in a model.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "kernels/backend.h"
#include "kernels/cpu/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static int32_t threads;
static double seconds = 0.5;
static double read_gbs, peak_gflops;

static bool by_cpu_clock;
static int32_t only_rows; /* of gemm; 0: 4, 16 and 512 */

static int64_t now_us(void)
{
    struct timespec t;

    if (!by_cpu_clock) {
        return clock_us();
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (t.tv_sec * 1000000 + t.tv_nsec / 1000) / MAX(threads, 1);
}

static void die(const struct err *e)
{
    fprintf(stderr, "bench_cpu: %s\n", e->text);
    exit(1);
}

static void *must(void *p)
{
    if (!p) {
        fprintf(stderr, "bench_cpu: out of memory\n");
        exit(1);
    }
    return p;
}

/* ---- ceilings ---- */

enum { READ_BYTES = 512 << 20, READ_TASKS = 64 };

struct reader {
    const char *data;
    uint64_t sum[READ_TASKS];
};

#if defined(__x86_64__)
/* Four streams of loads: one stream alone does not reach the read bandwidth. */
__attribute__((target("avx2"))) static uint64_t read_range(const char *p, int64_t n)
{
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    int64_t q = n / 4;

    for (int64_t i = 0; i < q; i += 64) {
        for (int64_t s = 0; s < 4; s++) {
            _mm_prefetch(p + s * q + i + 1024, _MM_HINT_T0);
        }
        a = _mm256_add_epi64(a, _mm256_load_si256((const __m256i *)(p + i)));
        b = _mm256_add_epi64(b, _mm256_load_si256((const __m256i *)(p + q + i)));
        c = _mm256_add_epi64(c, _mm256_load_si256((const __m256i *)(p + 2 * q + i)));
        d = _mm256_add_epi64(d, _mm256_load_si256((const __m256i *)(p + 3 * q + i)));
        a = _mm256_add_epi64(a, _mm256_load_si256((const __m256i *)(p + i + 32)));
        b = _mm256_add_epi64(b, _mm256_load_si256((const __m256i *)(p + q + i + 32)));
        c = _mm256_add_epi64(c, _mm256_load_si256((const __m256i *)(p + 2 * q + i + 32)));
        d = _mm256_add_epi64(d, _mm256_load_si256((const __m256i *)(p + 3 * q + i + 32)));
    }
    a = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
    return (uint64_t)(_mm256_extract_epi64(a, 0) + _mm256_extract_epi64(a, 1));
}

__attribute__((target("avx2,fma"))) static float multiply_add(int64_t rounds)
{
    __m256 a[12];
    __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);

    for (int i = 0; i < 12; i++) {
        a[i] = _mm256_set1_ps((float)i);
    }
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            a[i] = _mm256_fmadd_ps(a[i], x, y);
        }
    }
    float sum = 0;
    for (int i = 0; i < 12; i++) {
        sum += _mm256_cvtss_f32(a[i]);
    }
    return sum;
}
enum { FLOP_PER_ROUND = 12 * 8 * 2 };
#else
static uint64_t read_range(const char *p, int64_t n)
{
    uint64_t sum = 0;

    for (int64_t i = 0; i < n; i += 8) {
        sum += *(const uint64_t *)(p + i);
    }
    return sum;
}

static float multiply_add(int64_t rounds)
{
    float a[16] = {0};

    for (int64_t r = 0; r < rounds; r++) {
        for (int i = 0; i < 16; i++) {
            a[i] = a[i] * 0.999f + 0.001f;
        }
    }
    return a[0] + a[15];
}
enum { FLOP_PER_ROUND = 16 * 2 };
#endif

static void read_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    struct reader *r = arg;
    r->sum[task] +=
        read_range(r->data + (int64_t)task * (READ_BYTES / READ_TASKS), READ_BYTES / READ_TASKS);
}

static void measure_read(struct cpu_pool *pool)
{
    struct reader r = {0};
    char *data = mmap(NULL, READ_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    must(data == MAP_FAILED ? NULL : data);
    madvise(data, READ_BYTES, MADV_HUGEPAGE);
    memset(data, 1, READ_BYTES);
    r.data = data;
    for (int i = 0; i < 8; i++) {
        int64_t t = now_us();
        cpu_pool_run(pool, READ_TASKS, read_task, &r);
        read_gbs = MAX(read_gbs, READ_BYTES / 1e3 / (double)(now_us() - t));
    }
    munmap(data, READ_BYTES);
    printf("read bandwidth, %d threads, 2 MiB pages, four streams: %.1f GB/s (best of 8)\n",
           threads, read_gbs);
}

enum { PEAK_ROUNDS = 20000000 };
static volatile float sink;

static void peak_task(void *arg, int32_t task, int32_t thread)
{
    (void)arg;
    (void)task;
    (void)thread;
    sink = multiply_add(PEAK_ROUNDS);
}

static void measure_peak(struct cpu_pool *pool)
{
    for (int i = 0; i < 4; i++) {
        int64_t t = now_us();
        cpu_pool_run(pool, threads, peak_task, NULL);
        peak_gflops = MAX(peak_gflops, (double)threads * PEAK_ROUNDS * FLOP_PER_ROUND / 1e3 /
                                           (double)(now_us() - t));
    }
    printf("float32 multiply-add peak, %d threads: %.0f GFLOP/s (best of 4)\n", threads,
           peak_gflops);
}

/* ---- the backend ---- */

static struct backend *open_backend(int32_t max_tokens)
{
    struct backend *b;
    struct err e = {0};
    struct backend_config c = {.threads = threads,
                               .max_tokens = max_tokens,
                               .max_seqs = 64,
                               .max_samples = 64,
                               .max_blocks_per_seq = 1024};

    if (backend_open(&b, "cpu", &c, &e) < 0) {
        die(&e);
    }
    return b;
}

static struct mat random_mat(struct backend *b, int32_t rows, int32_t cols, enum dtype t)
{
    struct err e = {0};
    struct mat m;
    float *v = must(malloc((size_t)rows * (size_t)cols * sizeof(*v)));

    for (int64_t i = 0; i < (int64_t)rows * cols; i++) {
        v[i] = (float)(rand() % 2001 - 1000) * 1e-3f;
    }
    if (b->ops->scratch(b, rows, cols, t, &m, &e) < 0 || b->ops->upload(b, m, v, &e) < 0) {
        die(&e);
    }
    free(v);
    return m;
}

/* A dummy weight, whose random values the backend makes. */
static struct mat weight(struct backend *b, int32_t rows, int32_t cols, enum dtype t)
{
    struct err e = {0};
    struct mat m;
    struct weight_desc d = {
        .name = "bench", .kind = WEIGHT_LINEAR, .dtype = t, .rows = rows, .cols = cols};

    if (b->ops->weight(b, &d, &m, &e) < 0) {
        die(&e);
    }
    return m;
}

struct shape {
    const char *name;
    int32_t out, in;
};

/* Seconds per call of one shape: rounds over copies of the weight that together exceed
 * the last-level cache. */
static double time_linear(struct backend *b, const struct shape *s, enum dtype t, int32_t rows,
                          int64_t total_bytes)
{
    int64_t bytes = (int64_t)s->out * s->in * dtype_bytes(t);
    int32_t n = (int32_t)MIN(MAX(total_bytes / bytes, 1), 64);
    struct mat w[64];

    for (int32_t i = 0; i < n; i++) {
        w[i] = weight(b, s->out, s->in, t);
    }
    struct mat x = random_mat(b, rows, s->in, DTYPE_F32);
    struct mat out = random_mat(b, rows, s->out, DTYPE_F32);
    struct epilogue ep = {0};
    double best = 1e9;
    int64_t end = now_us() + (int64_t)(seconds * 1e6);
    do {
        int64_t start = now_us();
        for (int32_t i = 0; i < n; i++) {
            b->ops->linear(b, out, x, w[i], &ep);
        }
        best = MIN(best, (double)(now_us() - start) * 1e-6 / n);
    } while (now_us() < end);
    return best;
}

static const struct shape shapes[] = {{"135M qkv", 960, 576},   {"135M gate_up", 3072, 576},
                                      {"135M down", 576, 1536}, {"135M head", 49152, 576},
                                      {"1B qkv", 3072, 2048},   {"1B gate_up", 16384, 2048},
                                      {"1B down", 2048, 8192},  {"1B head", 128256, 2048}};

static void measure_linear(int32_t rows, enum dtype t)
{
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct backend *b = open_backend(rows);
        const struct shape *s = &shapes[i];
        double took = time_linear(b, s, t, rows, rows > 64 ? 1 : 256 << 20);
        double gbs = (double)s->out * s->in * (double)dtype_bytes(t) / took * 1e-9;
        double gflops = 2.0 * rows * s->out * s->in / took * 1e-9;
        printf("linear %4d rows %-8s %-12s %6d x %-5d %8.0f us %6.1f GB/s", rows, dtype_name(t),
               s->name, s->out, s->in, took * 1e6, gbs);
        printf(read_gbs > 0 ? " (%3.0f %%)" : "", 100 * gbs / read_gbs);
        printf(" %6.1f GFLOP/s", gflops);
        printf(peak_gflops > 0 ? " (%3.0f %%)\n" : "\n", 100 * gflops / peak_gflops);
        b->ops->free(b);
    }
}

/* ---- attention ---- */

struct attention_shape {
    const char *name;
    int32_t n_seqs, n_query, context, n_heads, n_kv_heads, head_dim;
};

static void fill_batch(struct batch *ret, const struct attention_shape *s, int32_t *space)
{
    int32_t n = s->n_seqs * s->n_query;
    int32_t per_seq = (s->context + 15) / 16;
    int32_t *token = space, *src = token + n, *position = src + n, *slot = position + n,
            *q_start = slot + n;
    int32_t *kv_len = q_start + s->n_seqs + 1, *row = kv_len + s->n_seqs, *block = row + s->n_seqs;
    static struct table_update update[64];

    for (int32_t i = 0; i < s->n_seqs * per_seq; i++) {
        block[i] = i;
    }
    for (int32_t i = s->n_seqs * per_seq - 1; i > 0; i--) { /* shuffled */
        int32_t j = rand() % (i + 1), t = block[i];
        block[i] = block[j];
        block[j] = t;
    }
    for (int32_t i = 0; i < s->n_seqs; i++) {
        q_start[i + 1] = (i + 1) * s->n_query;
        kv_len[i] = s->context;
        row[i] = i;
        update[i] = (struct table_update){.row = i, .count = per_seq, .first = i * per_seq};
        for (int32_t k = 0; k < s->n_query; k++) {
            int32_t at = s->context - s->n_query + k;
            position[i * s->n_query + k] = at;
            src[i * s->n_query + k] = -1;
            slot[i * s->n_query + k] = block[i * per_seq + at / 16] * 16 + at % 16;
        }
    }
    q_start[0] = 0;
    *ret = (struct batch){.step = 1,
                          .n_tokens = n,
                          .token = token,
                          .token_src = src,
                          .position = position,
                          .slot = slot,
                          .n_seqs = s->n_seqs,
                          .n_decode = s->n_query == 1 ? s->n_seqs : 0,
                          .q_start = q_start,
                          .kv_len = kv_len,
                          .row = row,
                          .lcp_blocks = token,
                          .table_update = update,
                          .n_table_update = s->n_seqs,
                          .table_block = block,
                          .n_table_block = s->n_seqs * per_seq};
}

static void measure_attention(const struct attention_shape *s)
{
    struct err e = {0};
    struct batch batch;
    int32_t n = s->n_seqs * s->n_query;
    int32_t per_seq = (s->context + 15) / 16;
    struct backend *b = open_backend(n);
    struct kv_layout l;

    kv_layout_init(&l, 16, 1, s->n_kv_heads, s->head_dim, DTYPE_BF16);
    if (b->ops->kv_create(b, &l, s->n_seqs * per_seq, 0, &e) < 0) {
        die(&e);
    }
    struct attention a = {
        .n_heads = s->n_heads, .n_kv_heads = s->n_kv_heads, .head_dim = s->head_dim, .scale = 0.1f};
    struct mat qkv = random_mat(b, n, (s->n_heads + 2 * s->n_kv_heads) * s->head_dim, DTYPE_F32);
    struct mat out = random_mat(b, n, s->n_heads * s->head_dim, DTYPE_F32);
    int32_t *space =
        must(calloc((size_t)(4 * n + 3 * s->n_seqs + 1 + s->n_seqs * per_seq), sizeof(*space)));
    fill_batch(&batch, s, space);
    if (b->ops->step_begin(b, &batch, &e) < 0) {
        die(&e);
    }
    b->ops->rope_kv(b, qkv, &(struct rope){0}, &a);
    double best = 1e9;
    int64_t end = now_us() + (int64_t)(seconds * 1e6);
    do {
        int64_t start = now_us();
        b->ops->attention(b, out, qkv, &a);
        best = MIN(best, (double)(now_us() - start) * 1e-6);
    } while (now_us() < end);
    /* seen by a query, mean */
    double keys = s->n_query == 1 ? s->context : s->context - (s->n_query - 1) / 2.0;
    double gflops = 4.0 * n * s->n_heads * s->head_dim * keys / best * 1e-9;
    double gbs = 4.0 * s->n_seqs * s->context * s->n_kv_heads * s->head_dim / best * 1e-9;
    printf("attention %-26s %8.0f us %6.1f GB/s %6.1f GFLOP/s", s->name, best * 1e6, gbs, gflops);
    printf(peak_gflops > 0 ? " (%3.0f %%)\n" : "\n", 100 * gflops / peak_gflops);
    free(space);
    b->ops->free(b);
}

static void measure_attentions(void)
{
    static const struct attention_shape cases[] = {
        {"decode 1 x 512, 9/3 of 64", 1, 1, 512, 9, 3, 64},
        {"decode 1 x 4k, 32/8 of 64", 1, 1, 4096, 32, 8, 64},
        {"decode 16 x 1k, 32/8 of 64", 16, 1, 1024, 32, 8, 64},
        {"prefill 512, 9/3 of 64", 1, 512, 512, 9, 3, 64},
        {"prefill 512, 32/8 of 64", 1, 512, 512, 32, 8, 64},
        {"chunk 512 of 4k, 32/8 of 128", 1, 512, 4096, 32, 8, 128},
    };

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        measure_attention(&cases[i]);
    }
}

/* ---- sampling ---- */

static void measure_sampling(int32_t n, float temperature, float top_p, const char *name)
{
    enum { VOCAB = 128256 };
    struct err e = {0};
    struct backend *b = open_backend(64);
    struct mat logits = random_mat(b, n, VOCAB, DTYPE_F32);
    struct sample_row row[64];
    int32_t pick[65], minus[64];

    for (int32_t i = 0; i < n; i++) {
        pick[i] = i;
        minus[i] = -1;
        row[i] = (struct sample_row){.logits_row = i,
                                     .temperature = temperature,
                                     .top_p = top_p,
                                     .seed = (uint64_t)i,
                                     .repetition_penalty = 1,
                                     .n_logprobs = -1,
                                     .mask_first = -1};
    }
    pick[n] = n;
    double best = 1e9;
    for (uint64_t step = 1; step <= 20; step++) {
        struct results res;
        struct batch batch = {.step = step,
                              .n_tokens = n,
                              .token = pick,
                              .token_src = minus,
                              .position = pick,
                              .slot = minus,
                              .n_seqs = n,
                              .n_decode = n,
                              .q_start = pick,
                              .kv_len = pick,
                              .row = pick,
                              .lcp_blocks = pick,
                              .n_logits = n,
                              .logits_token = pick,
                              .n_samples = n,
                              .sample = row};
        int64_t start = now_us();
        if (b->ops->step_begin(b, &batch, &e) < 0) {
            die(&e);
        }
        b->ops->sample(b, logits, 0);
        if (b->ops->step_end(b, &e) < 0 || b->ops->step_wait(b, &res, &e) < 0) {
            die(&e);
        }
        best = MIN(best, (double)(now_us() - start));
    }
    printf("sample %2d rows of %d, %-22s %8.0f us\n", n, VOCAB, name, best);
    b->ops->free(b);
}

/* ---- main ---- */

static bool chosen(int argc, char **argv, const char *what)
{
    bool any = false;

    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') {
            i++;
            continue;
        }
        any = true;
        if (strcmp(argv[i], what) == 0) {
            return true;
        }
    }
    return !any;
}

int main(int argc, char **argv)
{
    struct cpu_pool *pool;
    struct err e = {0};

    for (int i = 1; i + 1 < argc; i++) {
        threads = strcmp(argv[i], "--threads") == 0 ? atoi(argv[i + 1]) : threads;
        only_rows = strcmp(argv[i], "--rows") == 0 ? atoi(argv[i + 1]) : only_rows;
        by_cpu_clock =
            by_cpu_clock || (strcmp(argv[i], "--clock") == 0 && strcmp(argv[i + 1], "cpu") == 0);
        seconds = strcmp(argv[i], "--seconds") == 0 ? atof(argv[i + 1]) : seconds;
    }
    if (cpu_pool_new(&pool, threads, &e) < 0) {
        die(&e);
    }
    threads = cpu_pool_threads(pool);
    struct backend *b = open_backend(1);
    printf("%s\n", b->device);
    b->ops->free(b);
    if (chosen(argc, argv, "read") || chosen(argc, argv, "gemv")) {
        measure_read(pool);
    }
    if (chosen(argc, argv, "peak") || chosen(argc, argv, "gemm") ||
        chosen(argc, argv, "attention")) {
        measure_peak(pool);
    }
    cpu_pool_free(pool); /* its threads would take the cores of the backend's */
    if (chosen(argc, argv, "gemv")) {
        measure_linear(1, DTYPE_BF16);
    }
    if (chosen(argc, argv, "gemm")) {
        static const int32_t rows[] = {4, 16, 512};
        for (size_t i = 0; i < ARRAY_LEN(rows) && (only_rows == 0 || i == 0); i++) {
            measure_linear(only_rows > 0 ? only_rows : rows[i], DTYPE_BF16);
        }
    }
    if (chosen(argc, argv, "attention")) {
        measure_attentions();
    }
    if (chosen(argc, argv, "sample")) {
        measure_sampling(1, 0, 1, "greedy");
        measure_sampling(1, 0.8f, 0.95f, "temperature and top-p");
        measure_sampling(16, 0, 1, "greedy");
        measure_sampling(16, 0.8f, 0.95f, "temperature and top-p");
    }
    return 0;
}
