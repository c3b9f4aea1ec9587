/* What the operation tests share: a device opened by name, random operands, small
 * steps, error measures.
 *
 * Every test runs once for each variant of the device: for "cpu" each instruction set
 * the machine has, with all shapes or some (whole.h). The device is that of `--device
 * NAME` (default cpu), so the CUDA backend passes the very same tests. References are
 * float64, computed here from the operands as the device holds them (rounded to its
 * types).
 */
#ifndef QUIRE_TESTS_UNIT_OPS_H
#define QUIRE_TESTS_UNIT_OPS_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "config/base/limits.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/simd/convert.h"
#include "tests/unit/float64.h"
#include "tests/unit/operand.h"
#include "tests/unit/whole.h"

enum {
    RIG_TOKENS = 640,
    RIG_SEQS = 64,
    RIG_SAMPLES = 256,
    RIG_BLOCKS_PER_SEQ = 160,
    RIG_VOCAB = 1 << 19
};

/* ThreadSanitizer looks for races, which do not hang on sizes, and makes a memory
 * access some twenty times slower: under it steps are shorter, and shapes are tried
 * with one type each. */
#ifdef __SANITIZE_THREAD__
enum { RIG_SHORTER = 5 };
#else
enum { RIG_SHORTER = 1 };
#endif

static const char *rig_device = "cpu";
/* Of --share I/N: this process runs the cases i with i % N == I. */
static int rig_share = 0, rig_shares = 1;

struct rig {
    struct backend *b;
    uint64_t rng;
    uint64_t step;
};

/* QUIRE_TEST_SMALL: fewer and smaller shapes, for tools that slow a device down a
 * hundred times. */
static inline bool rig_small(void)
{
    return getenv("QUIRE_TEST_SMALL") != NULL;
}

/* ---- numbers ---- */

static inline uint64_t rig_next(struct rig *r)
{
    r->rng += 0x9E3779B97F4A7C15ull;
    uint64_t x = r->rng;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static inline int32_t rig_below(struct rig *r, int32_t n)
{
    return (int32_t)(rig_next(r) % (uint64_t)n);
}
/* Uniform in [-1, 1). */
static inline float rig_uniform(struct rig *r)
{
    return (float)(rig_next(r) >> 40) * 0x1p-23f - 1.0f;
}

static inline float round_to(enum dtype t, float f)
{
    return t == DTYPE_BF16 ? bf16_load(bf16_store(f)) : t == DTYPE_F16 ? f16_load(f16_store(f)) : f;
}

static inline void *rig_alloc(size_t n)
{
    void *p = calloc(1, n > 0 ? n : 1);

    assert_non_null(p);
    return p;
}

static inline float *rig_floats(struct rig *r, int64_t n, float range, enum dtype t)
{
    float *v = rig_alloc((size_t)n * sizeof(*v));

    for (int64_t i = 0; i < n; i++) {
        v[i] = round_to(t, rig_uniform(r) * range);
    }
    return v;
}

/* A head's key or value of n elements as a cache of type t holds it; `scale`: of
 * e4m3. */
static inline void rig_cached_head(const float *x, int32_t n, enum dtype t, float scale, float *out)
{
    float most = 0;

    for (int32_t i = 0; i < n; i++) {
        most = MAX(most, fabsf(x[i]));
    }
    scale = t == DTYPE_I8 ? most / 127 : scale;
    float over = scale > 0 ? 1 / scale : 0;
    for (int32_t i = 0; i < n; i++) {
        out[i] = t == DTYPE_F8   ? e4m3_load(e4m3_store(x[i] * over)) * scale
                 : t == DTYPE_I8 ? (float)int8_store(x[i] * over) * scale
                                 : round_to(t, x[i]);
    }
}

/* ---- device ---- */

static inline void rig_open_config(struct rig *r, bool deterministic)
{
    struct err e = {0};
    struct backend_config c = {.threads = 3,
                               .max_tokens = RIG_TOKENS,
                               .max_seqs = RIG_SEQS,
                               .max_samples = RIG_SAMPLES,
                               .max_blocks_per_seq = RIG_BLOCKS_PER_SEQ,
                               .vocab = RIG_VOCAB,
                               .deterministic = deterministic};

    *r = (struct rig){.rng = 7};
    if (backend_open(&r->b, rig_device, &c, &e) < 0) {
        fail_msg("%s", e.text);
    }
}

static inline void rig_open(struct rig *r)
{
    rig_open_config(r, false);
}
static inline void rig_open_deterministic(struct rig *r)
{
    rig_open_config(r, true);
}

static inline void rig_close(struct rig *r)
{
    r->b->ops->free(r->b);
}

/* The type activations have when weights are of type t. */
static inline enum dtype act_of(const struct rig *r, enum dtype t)
{
    return backend_act_dtype(r->b, t);
}

/* The type in which linear multiplies x. */
static inline enum dtype operand_of(const struct rig *r, enum dtype t)
{
    return operand_type(r->b, t);
}

static inline void rig_upload(struct rig *r, struct mat m, const float *v)
{
    struct err e = {0};

    assert_int_equal(r->b->ops->upload(r->b, m, v, &e), 0);
}

static inline float *rig_download(struct rig *r, struct mat m)
{
    struct err e = {0};
    float *v = rig_alloc((size_t)m.rows * (size_t)m.cols * sizeof(*v));

    assert_int_equal(r->b->ops->download(r->b, m, v, &e), 0);
    return v;
}

/* Activations [rows, cols] holding v, or unset when v is NULL. */
static inline struct mat rig_mat(struct rig *r, int32_t rows, int32_t cols, enum dtype t,
                                 const float *v)
{
    struct err e = {0};
    struct mat m;

    assert_int_equal(r->b->ops->scratch(r->b, rows, cols, t, &m, &e), 0);
    if (v) {
        rig_upload(r, m, v);
    }
    return m;
}

/* A weight [rows, cols] of type t made of v (whose values t can hold). */
static inline struct mat rig_weight(struct rig *r, enum weight_kind kind, enum dtype t,
                                    int32_t rows, int32_t cols, const float *v)
{
    struct err e = {0};
    struct mat m;
    struct weight_piece p = {
        .data = v, .dtype = DTYPE_F32, .rows = rows, .cols = cols, .stride = cols};
    struct weight_desc d = {.name = "test",
                            .kind = kind,
                            .dtype = t,
                            .rows = rows,
                            .cols = cols,
                            .piece = &p,
                            .n_pieces = 1,
                            .tied_head = kind == WEIGHT_EMBEDDING};

    assert_int_equal(r->b->ops->weight(r->b, &d, &m, &e), 0);
    if (r->b->ops->ready) {
        assert_int_equal(r->b->ops->ready(r->b, &e), 0);
    }
    return m;
}

/* ---- steps ---- */

static inline void rig_begin(struct rig *r, struct batch *b)
{
    struct err e = {0};

    b->step = ++r->step;
    if (r->b->ops->step_begin(r->b, b, &e) < 0) {
        fail_msg("%s", e.text);
    }
}

static inline struct results rig_end(struct rig *r)
{
    struct err e = {0};
    struct results res = {0};

    if (r->b->ops->step_end(r->b, &e) < 0 || r->b->ops->step_wait(r->b, &res, &e) < 0) {
        fail_msg("%s", e.text);
    }
    assert_int_equal(res.step, r->step);
    return res;
}

/* A step of n tokens that neither attend nor sample, for operations that only need to
 * be inside one. */
static inline void rig_begin_plain(struct rig *r, int32_t n)
{
    static int32_t zero[RIG_TOKENS];
    static int32_t minus[RIG_TOKENS];

    memset(minus, 0xFF, sizeof(minus));
    int32_t q_start[2] = {0, n};
    int32_t kv_len = n;
    struct batch b = {.n_tokens = n,
                      .token = zero,
                      .token_src = minus,
                      .position = zero,
                      .slot = minus,
                      .n_seqs = 1,
                      .n_decode = n == 1,
                      .q_start = q_start,
                      .kv_len = &kv_len,
                      .row = zero,
                      .lcp_blocks = zero};
    rig_begin(r, &b);
}

/* ---- measures ---- */

/* sum (a - ref)^2 / sum ref^2 */
static inline double nmse(const float *a, const double *ref, int64_t n)
{
    double err = 0;
    double norm = 0;

    for (int64_t i = 0; i < n; i++) {
        err += (a[i] - ref[i]) * (a[i] - ref[i]);
        norm += ref[i] * ref[i];
    }
    return err / (norm > 0 ? norm : 1);
}

/* What rounding a result once to type t may cost, with room for a few float32
 * operations. */
static inline double nmse_limit(enum dtype t)
{
    return t == DTYPE_BF16 ? 1e-5 : t == DTYPE_F16 ? 2e-7 : 1e-12;
}

/* Error against float64 at most twice that of the plain same-precision implementation
 * (root of the mean square). */
static inline void assert_no_worse_by(const char *what, const float *got, const float *plain,
                                      const double *ref, int64_t n, double slack)
{
    double mine = sqrt(nmse(got, ref, n));
    double theirs = sqrt(nmse(plain, ref, n));

    if (!(mine <= 2 * theirs + slack)) {
        fail_msg("%s: error %.3g, plain %.3g", what, mine, theirs);
    }
}

static inline void assert_no_worse(const char *what, const float *got, const float *plain,
                                   const double *ref, int64_t n)
{
    assert_no_worse_by(what, got, plain, ref, n, 1e-7);
}

static inline void assert_nmse(const char *what, const float *got, const double *ref, int64_t n,
                               enum dtype t)
{
    double mine = nmse(got, ref, n);

    if (!(mine <= nmse_limit(t))) {
        fail_msg("%s: NMSE %.3g, allowed %.3g", what, mine, nmse_limit(t));
    }
}

/* ---- main ---- */

/* Whether this process runs case `i` of a test. On a device it is announced, so that
 * the output of a run that hangs says where. */
static inline bool rig_runs(const char *test, size_t i)
{
    bool runs = (int)(i % (size_t)rig_shares) == rig_share;

    if (runs && strcmp(rig_device, "cpu") != 0) {
        fprintf(stderr, "%s: case %zu\n", test, i);
    }
    return runs;
}

static inline int rig_run_group(const void *group)
{
    return (*(int (*const *)(void))group)();
}

/* Run the group for every variant of the device; with --only PATTERN (* and ?) the
 * tests of such names. */
static inline int rig_main(int argc, char **argv, int (*group)(void))
{
    for (int i = 1; i + 1 < argc; i++) {
        rig_device = strcmp(argv[i], "--device") == 0 ? argv[i + 1] : rig_device;
        if (strcmp(argv[i], "--only") == 0) {
            cmocka_set_test_filter(argv[i + 1]);
        }
        if (strcmp(argv[i], "--share") == 0 &&
            (sscanf(argv[i + 1], "%d/%d", &rig_share, &rig_shares) != 2 || rig_shares < 1)) {
            fprintf(stderr, "--share I/N\n");
            return 1;
        }
    }
    if (strcmp(rig_device, "cpu") != 0 || getenv("QUIRE_CPU_ISA") != NULL) {
        return group();
    }
    /* not what timing finds: that of floats has the products of CPU_AVX512 */
    setenv("QUIRE_CPU_BF16", "pairs", 0);
    return whole_on_each_isa(rig_run_group, &group);
}

#endif
