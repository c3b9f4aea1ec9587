/* Tensor-parallel layers in decode steps that repeat: row-parallel products, their
 * all-reduce with residual and norm, and the following products. A device may record
 * such a step and replay it as one launch per layer, all-reduces included, or as a
 * launch for each product, whose sum over the ranks is a part of it. Sums are compared
 * with the sums of the ranks' own summands, and must have the same bits on all ranks;
 * products are compared with float64.
 *
 *     build/tests/unit/kernels/cuda/test_rank_fused [--device cpu|cuda] [--ranks N]
 *
 * `--device cuda` needs a GPU for each of the ranks (2). On CPUs nothing is recorded:
 * there the operations themselves are tested.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/kernels/cuda/rank_layers.h"

enum {
    LAYERS = 3,
    STEPS = 5,
    MOST_ROWS = 64,
    MOST_HIDDEN = 2240,
    MOST_HEADS = 128,
    MOST_INNER = 512,
    WIDEST = 4096
};

/* Widths of a layer. With `transient` what lies between two products need not be
 * stored, and its reference is computed. */
struct shape {
    int32_t hidden, heads, inner, qkv, rows[5], steps; /* rows end with 0 */
    bool transient;
};

/* Tiles that do not fill a device, and some that fill a large one. */
static const struct shape small = {2240, 64, 128, 192, {1, 2, 8, 3, 0}, STEPS, false};
static const struct shape wide = {2048, 128, 512, 4096, {3, 40, 9, 0}, 3, true};

static const char *device = "cpu";
static int32_t n_ranks = 3;

/* One buffer per result, so that all can be checked after the step. */
struct layer {
    struct mat y1, h1, act, y2, h2, qkv;
};

struct scene {
    struct rank_rig *r;
    const struct shape *k;
    enum dtype type; /* of weights and, where the device supports it, of activations */
    struct weight o, up, down, qkv, norm;
    struct mat attn, x, wide;
    struct layer layer[LAYERS];
    float attn_host[MOST_ROWS * MOST_HEADS], x_host[MOST_ROWS * MOST_HIDDEN];
};

/* ---- the scene ---- */

static int mats_open(struct scene *s, struct err *e)
{
    struct backend *b = s->r->b;
    const struct shape *d = s->k;
    enum dtype t = backend_act_dtype(b, s->type);
    int rc = b->ops->scratch(b, MOST_ROWS, d->heads, t, &s->attn, e);

    rc = rc < 0 ? rc : b->ops->scratch(b, MOST_ROWS, d->hidden, t, &s->x, e);
    rc = rc < 0 ? rc : b->ops->scratch(b, MOST_ROWS, 2 * d->inner, t, &s->wide, e);
    for (int i = 0; i < LAYERS; i++) {
        struct layer *l = &s->layer[i];
        struct mat *of_hidden[] = {&l->y1, &l->h1, &l->y2, &l->h2};
        for (size_t k = 0; k < ARRAY_LEN(of_hidden) && rc == 0; k++) {
            rc = b->ops->scratch(b, MOST_ROWS, d->hidden, t, of_hidden[k], e);
            of_hidden[k]->transient = d->transient;
        }
        rc = rc < 0 ? rc : b->ops->scratch(b, MOST_ROWS, d->inner, t, &l->act, e);
        rc = rc < 0 ? rc : b->ops->scratch(b, MOST_ROWS, d->qkv, t, &l->qkv, e);
    }
    return rc;
}

/* The norm's weight is the same on every rank, the others are a rank's own. */
static int scene_open(struct scene *s, struct err *e)
{
    const struct shape *d = s->k;
    uint64_t seed = 100 * (uint64_t)s->r->rank + 1;
    struct backend *b = s->r->b;
    enum dtype t = s->type;
    int rc = weight_open(&s->o, b, t, d->hidden, d->heads, 0.25f, seed, e);
    rc = rc < 0 ? rc : weight_open(&s->up, b, t, 2 * d->inner, d->hidden, 0.125f, seed + 1, e);
    rc = rc < 0 ? rc : weight_open(&s->down, b, t, d->hidden, d->inner, 0.125f, seed + 2, e);
    rc = rc < 0 ? rc : weight_open(&s->qkv, b, t, d->qkv, d->hidden, 0.125f, seed + 3, e);
    rc = rc < 0 ? rc : weight_open(&s->norm, b, t, 1, d->hidden, 1, 9999, e);
    return rc < 0 ? rc : mats_open(s, e);
}

static void scene_release(struct scene *s)
{
    struct weight *w[] = {&s->o, &s->up, &s->down, &s->qkv, &s->norm};

    for (size_t i = 0; i < ARRAY_LEN(w); i++) {
        free(w[i]->host);
    }
}

/* ---- a step ---- */

static void call_operations(struct scene *s, int32_t rows)
{
    struct backend *b = s->r->b;
    struct norm n = {.kind = NORM_RMS, .weight = s->norm.mat, .eps = 1e-5f};
    struct mat x = mat_rows(s->x, 0, rows), attn = mat_rows(s->attn, 0, rows),
               wide = mat_rows(s->wide, 0, rows);

    for (int i = 0; i < LAYERS; i++) {
        const struct layer *l = &s->layer[i];
        struct mat y1 = mat_rows(l->y1, 0, rows), h1 = mat_rows(l->h1, 0, rows),
                   act = mat_rows(l->act, 0, rows);
        struct mat y2 = mat_rows(l->y2, 0, rows), h2 = mat_rows(l->h2, 0, rows),
                   qkv = mat_rows(l->qkv, 0, rows);
        b->ops->linear(b, y1, attn, s->o.mat, NULL);
        b->ops->add_norm(b, h1, x, y1, &n, true);
        b->ops->linear_gated(b, act, wide, h1, s->up.mat, (struct mat){0}, ACT_SILU);
        b->ops->linear(b, y2, act, s->down.mat, NULL);
        b->ops->add_norm(b, h2, x, y2, &n, true);
        b->ops->linear(b, qkv, h2, s->qkv.mat, NULL);
    }
}

static int take_step(struct scene *s, int32_t rows, int step, struct err *e)
{
    struct backend *b = s->r->b;
    struct results unused;
    bool replayed;

    fill_random(s->x_host, (int64_t)rows * s->k->hidden, 2,
                7000 + (uint64_t)(step * MOST_ROWS + rows));
    fill_random(s->attn_host, (int64_t)rows * s->k->heads, 1,
                50 + (uint64_t)(step * MOST_ROWS + rows + 1000 * s->r->rank));
    int rc = b->ops->upload(b, mat_rows(s->x, 0, rows), s->x_host, e);
    rc = rc < 0 ? rc : b->ops->upload(b, mat_rows(s->attn, 0, rows), s->attn_host, e);
    rc = rc < 0 ? rc : rank_rig_begin(s->r, rows, &replayed, e);
    if (rc == 0 && !replayed) {
        call_operations(s, rows);
    }
    return rc < 0 ? rc : rank_rig_end(s->r, &unused, e);
}

/* ---- references ---- */

static float got[MOST_ROWS * WIDEST], host_h[MOST_ROWS * MOST_HIDDEN],
    host_act[MOST_ROWS * MOST_INNER];
static double want[MOST_ROWS * WIDEST];

/* got against want, [n]. */
static int compare(const struct scene *s, const char *what, int64_t n, struct err *e)
{
    return check_nmse(what, got, want, n, product_limit(s->type), e);
}

/* want [rows, n] = x w^T, of weight rows 0, every, 2 every, ...; k is a multiple
 * of 4. */
static void product_of(const float *x, const struct weight *w, int32_t rows, int32_t n, int32_t k,
                       int32_t every)
{
    for (int32_t i = 0; i < rows * n; i++) {
        const float *a = x + i / n * k, *b = w->host + (int64_t)(i % n) * every * k;
        double sum[4] = {0};
        for (int32_t j = 0; j < k; j++) {
            sum[j % 4] += (double)a[j] * b[j];
        }
        want[i] = sum[0] + sum[1] + (sum[2] + sum[3]);
    }
}

static void product(const float *x, const struct weight *w, int32_t rows, int32_t n, int32_t k)
{
    product_of(x, w, rows, n, k, 1);
}

/* Of a wide product some columns alone. */
static int check_product(const struct scene *s, const char *what, struct mat out, const float *x,
                         const struct weight *w, int32_t rows, struct err *e)
{
    int rc = s->r->b->ops->download(s->r->b, mat_rows(out, 0, rows), got, e);
    int32_t every = w->mat.rows > MOST_HIDDEN ? 9 : 1, n = (w->mat.rows + every - 1) / every;

    for (int32_t i = 0; i < rows * n && every > 1; i++) {
        got[i] = got[i / n * w->mat.rows + i % n * every];
    }
    product_of(x, w, rows, n, w->mat.cols, every);
    return rc < 0 ? rc : compare(s, what, (int64_t)rows * n, e);
}

/* Whether an all-reduce leaves the rank's summand in y; else it leaves the sum
 * there. */
static bool keeps_summands(const struct scene *s)
{
    return strstr(s->r->b->device, "and peer memory") != NULL;
}

/* y after its sum. */
static int check_summand(const struct scene *s, const char *what, struct mat y, const float *x,
                         const struct weight *w, int32_t rows, struct err *e)
{
    static float sum[MOST_ROWS * MOST_HIDDEN];

    if (keeps_summands(s)) {
        return check_product(s, what, y, x, w, rows, e);
    }
    int32_t n = rows * s->k->hidden;
    product(x, w, rows, s->k->hidden, w->mat.cols);
    for (int32_t i = 0; i < n; i++) {
        sum[i] = (float)want[i];
    }
    int rc = sum_over_ranks(s->r, sum, n, e);
    for (int32_t i = 0; i < n; i++) {
        want[i] = sum[i];
    }
    rc = rc < 0 ? rc : s->r->b->ops->download(s->r->b, mat_rows(y, 0, rows), got, e);
    return rc < 0 ? rc : compare(s, what, n, e);
}

static int check_gated(const struct scene *s, struct mat out, const float *h, int32_t rows,
                       struct err *e)
{
    int rc = s->r->b->ops->download(s->r->b, mat_rows(out, 0, rows), got, e);

    int32_t inner = s->k->inner;
    product(h, &s->up, rows, 2 * inner, s->k->hidden);
    /* in place: reads stay ahead of writes */
    for (int32_t i = 0; i < rows * inner; i++) {
        const double *both = want + i / inner * 2 * inner + i % inner;
        want[i] = both[0] / (1 + exp(-both[0])) * both[inner];
    }
    memcpy(host_act, got, sizeof(host_act));
    return rc < 0 ? rc : compare(s, "gated product", (int64_t)rows * inner, e);
}

/* want = the norm of x_host. */
static void norm_of_x(const struct scene *s, int32_t rows)
{
    int32_t n = s->k->hidden;

    for (int32_t i = 0; i < rows; i++) {
        const float *x = s->x_host + i * n;
        double squares = 0;
        for (int32_t j = 0; j < n; j++) {
            squares += (double)x[j] * x[j];
        }
        for (int32_t j = 0; j < n; j++) {
            want[i * n + j] = x[j] / sqrt(squares / n + 1e-5) * s->norm.host[j];
        }
    }
}

/* host_h = the norm: what the device has stored, or the reference of what it has
 * not. */
static int check_norm(const struct scene *s, struct mat out, int32_t rows, struct err *e)
{
    int32_t n = rows * s->k->hidden;

    norm_of_x(s, rows);
    if (s->k->transient) {
        for (int32_t i = 0; i < n; i++) {
            host_h[i] = (float)want[i];
        }
        return 0;
    }
    int rc = s->r->b->ops->download(s->r->b, mat_rows(out, 0, rows), got, e);
    memcpy(host_h, got, sizeof(host_h));
    return rc < 0 ? rc : compare(s, "norm", n, e);
}

/* x_host += the sum of the ranks' y = x w^T, rounded as the device stores x. */
static int add_summands(struct scene *s, struct mat y, const float *x, const struct weight *w,
                        int32_t rows, struct err *e)
{
    struct mat scratch = mat_rows(s->layer[0].y1, 0, rows); /* no longer needed */
    int32_t n = rows * s->k->hidden;
    int rc = 0;

    if (s->k->transient) {
        product(x, w, rows, s->k->hidden, w->mat.cols);
        for (int32_t i = 0; i < n; i++) {
            got[i] = (float)want[i];
        }
        rc = round_as_stored(s->r->b, scratch, got, e);
    } else {
        rc = s->r->b->ops->download(s->r->b, mat_rows(y, 0, rows), got, e);
    }
    rc = rc < 0 || !(s->k->transient || keeps_summands(s)) ? rc : sum_over_ranks(s->r, got, n, e);
    for (int32_t i = 0; i < n; i++) {
        s->x_host[i] += got[i];
    }
    return rc < 0 ? rc : round_as_stored(s->r->b, scratch, s->x_host, e);
}

/* Checks x, which has the same bits on all ranks: it equals the reference's sums,
 * except for the last bit with more than two ranks or where the summands were not
 * stored. */
static int check_x(struct scene *s, int32_t rows, struct err *e)
{
    static float of_rank_0[MOST_ROWS * MOST_HIDDEN];
    int32_t n = rows * s->k->hidden;
    int rc = s->r->b->ops->download(s->r->b, mat_rows(s->x, 0, rows), got, e);

    for (int32_t i = 0; i < n; i++) {
        want[i] = s->x_host[i];
    }
    rc = rc < 0 ? rc : compare(s, "the sum", n, e);
    rc = rc < 0 ? rc : check_same_on_ranks(s->r, got, of_rank_0, n, e);
    for (int32_t i = 0; i < n && rc == 0 && n_ranks == 2 && !s->k->transient; i++) {
        RANK_CHECK(got[i] == s->x_host[i]);
    }
    return rc;
}

static int check_stored_summand(const struct scene *s, const char *what, struct mat y,
                                const float *x, const struct weight *w, int32_t rows, struct err *e)
{
    return s->k->transient ? 0 : check_summand(s, what, y, x, w, rows, e);
}

static int check_layer(struct scene *s, struct layer *l, int32_t rows, struct err *e)
{
    int rc = check_stored_summand(s, "first product", l->y1, s->attn_host, &s->o, rows, e);

    rc = rc < 0 ? rc : add_summands(s, l->y1, s->attn_host, &s->o, rows, e);
    rc = rc < 0 ? rc : check_norm(s, l->h1, rows, e);
    rc = rc < 0 ? rc : check_gated(s, l->act, host_h, rows, e);
    rc = rc < 0 ? rc : check_stored_summand(s, "product down", l->y2, host_act, &s->down, rows, e);
    rc = rc < 0 ? rc : add_summands(s, l->y2, host_act, &s->down, rows, e);
    rc = rc < 0 ? rc : check_norm(s, l->h2, rows, e);
    return rc < 0 ? rc : check_product(s, "last product", l->qkv, host_h, &s->qkv, rows, e);
}

/* Steps of different row counts in turn: leftovers of one sum must not affect the
 * next. */
static int layers_in_type(struct rank_rig *r, const struct shape *k, enum dtype type, struct err *e)
{
    static struct scene s;

    memset(&s, 0, sizeof(s));
    s.r = r;
    s.k = k;
    s.type = type;
    int rc = scene_open(&s, e);
    for (int step = 0; step < k->steps && rc == 0; step++) {
        for (size_t i = 0; k->rows[i] > 0 && rc == 0; i++) {
            rc = take_step(&s, k->rows[i], step, e);
            for (int l = 0; l < LAYERS && rc == 0; l++) {
                rc = check_layer(&s, &s.layer[l], k->rows[i], e);
            }
            rc = rc < 0 ? rc : check_x(&s, k->rows[i], e);
            if (rc < 0) {
                err_prefix(e, "%s, %d wide, %d rows, step %d", dtype_name(type), k->hidden,
                           k->rows[i], step);
            }
        }
    }
    scene_release(&s);
    return rc;
}

static int in_bf16(struct rank_rig *r, struct err *e)
{
    return layers_in_type(r, &small, DTYPE_BF16, e);
}

static int in_f16(struct rank_rig *r, struct err *e)
{
    return layers_in_type(r, &small, DTYPE_F16, e);
}

static int wide_layers(struct rank_rig *r, struct err *e)
{
    return layers_in_type(r, &wide, DTYPE_BF16, e);
}

static void test_layers_of_bf16(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, MOST_ROWS, in_bf16), 0);
}

static void test_layers_of_f16(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, MOST_ROWS, in_f16), 0);
}

static void test_wide_layers(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, MOST_ROWS, wide_layers), 0);
}

int main(int argc, char **argv)
{
    rank_rig_args(argc, argv, &device, &n_ranks);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layers_of_bf16),
        cmocka_unit_test(test_layers_of_f16),
        cmocka_unit_test(test_wide_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
