/* Layers of experts over ranks in decode steps that repeat: the product behind
 * attention, its sum over the ranks with residual and norm, the experts, their sum, and
 * the product of the next layer. A device may send summands from one launch to the next
 * one of another rank. Each result is compared with float64 from the operands that the
 * device itself made, and the residual stream has the same bits on all ranks.
 *
 *     build/tests/unit/kernels/cuda/test_rank_experts [--device cpu|cuda] [--ranks N]
 *
 * `--device cuda` needs a GPU for each of the ranks (2).
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/cpu/simd/convert.h"
#include "tests/unit/kernels/cuda/rank_layers.h"
#include "tests/unit/operand.h"

enum {
    LAYERS = 3,
    STEPS = 4,
    MOST_ROWS = 12,
    MOST_HIDDEN = 2304,
    HEADS = 128, /* columns of the product behind attention */
    EXPERTS = 16,
    TOP = 3,
    MOST_WIDTH = 64,
    QKV = 272,
};

/* Tiles that do not fill a device, and more than one a block. Rows end with 0. In steps
 * of `apart` rows no sum over ranks stands in front of the layers. */
struct shape {
    int32_t hidden, width, rows[7], apart;
    bool transient; /* summands need not be stored */
};
static const struct shape narrow = {512, 64, {1, 2, 8, 3, 12, 5, 0}, 3, false};
static const struct shape wide = {MOST_HIDDEN, 32, {1, 8, 2, 0}, 2, true};

static const char *device = "cpu";
static int32_t n_ranks = 3;

struct layer {
    struct mat y1, h1, y2, h2, qkv; /* all can be checked after the step */
};

struct scene {
    struct rank_rig *r;
    const struct shape *k;
    enum dtype type;
    struct weight o, router, up, down, qkv, norm;
    struct mat attn, x, other;
    struct expert_scratch s;
    struct layer layer[LAYERS];
    float attn_host[MOST_ROWS * HEADS], x_host[MOST_ROWS * MOST_HIDDEN];
};

/* ---- the scene ---- */

struct wanted {
    struct mat *mat;
    int32_t rows, cols;
    enum dtype type;
};

static int mats_open(struct scene *s, struct err *e)
{
    struct backend *b = s->r->b;
    enum dtype t = backend_act_dtype(b, s->type);
    int32_t h = s->k->hidden, w = s->k->width;
    int32_t pairs = (int32_t)experts_most_pairs(TOP, 0, MOST_ROWS);
    struct expert_scratch *x = &s->s;
    const struct wanted mats[] = {
        {&s->attn, MOST_ROWS, HEADS, t},
        {&s->x, MOST_ROWS, h, t},
        {&s->other, MOST_ROWS, h, t},
        {&x->scores, MOST_ROWS, EXPERTS, DTYPE_F32},
        {&x->row, 1, MOST_ROWS, DTYPE_I32},
        {&x->x, MOST_ROWS, h, t},
        {&x->y, MOST_ROWS, h, t},
        {&x->up, MOST_ROWS, 2 * w, t},
        {&x->act, MOST_ROWS, w, t},
        {&x->pair_act, pairs, w, t},
        {&x->pair_y, pairs, h, t},
        {&x->lists, 1, (int32_t)experts_list_words(EXPERTS, TOP, MOST_ROWS), DTYPE_I32},
    };
    int rc = 0;

    for (size_t i = 0; i < ARRAY_LEN(mats) && rc == 0; i++) {
        rc = b->ops->scratch(b, mats[i].rows, mats[i].cols, mats[i].type, mats[i].mat, e);
    }
    for (int i = 0; i < LAYERS; i++) {
        struct layer *l = &s->layer[i];
        struct mat *of_hidden[] = {&l->y1, &l->h1, &l->y2, &l->h2};
        for (size_t k = 0; k < ARRAY_LEN(of_hidden) && rc == 0; k++) {
            rc = b->ops->scratch(b, MOST_ROWS, h, t, of_hidden[k], e);
            of_hidden[k]->transient = s->k->transient && k % 2 == 0;
        }
        rc = rc < 0 ? rc : b->ops->scratch(b, MOST_ROWS, QKV, t, &l->qkv, e);
    }
    return rc;
}

/* The norm and the router are the same on every rank, the others a rank's own. */
static int scene_open(struct scene *s, struct err *e)
{
    int32_t h = s->k->hidden, w = s->k->width;
    uint64_t seed = 100 * (uint64_t)s->r->rank + 1;
    struct backend *b = s->r->b;
    enum dtype t = s->type;
    int rc = weight_open(&s->o, b, t, h, HEADS, 0.25f, seed, e);
    rc = rc < 0 ? rc : weight_open(&s->up, b, t, EXPERTS * 2 * w, h, 0.125f, seed + 1, e);
    rc = rc < 0 ? rc : weight_open(&s->down, b, t, EXPERTS * h, w, 0.5f, seed + 2, e);
    rc = rc < 0 ? rc : weight_open(&s->qkv, b, t, QKV, h, 0.125f, seed + 3, e);
    rc = rc < 0 ? rc : weight_open(&s->norm, b, t, 1, h, 1, 9999, e);
    rc = rc < 0 ? rc : weight_open(&s->router, b, t, EXPERTS, h, 0.25f, 777, e);
    s->router.mat.alike = true;
    return rc < 0 ? rc : mats_open(s, e);
}

static void scene_release(struct scene *s)
{
    struct weight *w[] = {&s->o, &s->router, &s->up, &s->down, &s->qkv, &s->norm};

    for (size_t i = 0; i < ARRAY_LEN(w); i++) {
        free(w[i]->host);
    }
}

/* ---- a step ---- */

static void call_operations(struct scene *s, int32_t rows)
{
    const struct backend_ops *ops = s->r->b->ops;
    struct backend *b = s->r->b;
    struct norm n = {.kind = NORM_RMS, .weight = s->norm.mat, .eps = 1e-5f};
    struct mat x = mat_rows(s->x, 0, rows), attn = mat_rows(s->attn, 0, rows);
    struct expert_scratch scratch = s->s;
    const struct experts experts = {.router = s->router.mat,
                                    .up = s->up.mat,
                                    .down = s->down.mat,
                                    .n = EXPERTS,
                                    .top = TOP,
                                    .width = s->k->width,
                                    .act = ACT_SILU,
                                    .normalised = true};

    scratch.scores = mat_rows(scratch.scores, 0, rows);
    if (rows != s->k->apart) {
        ops->all_reduce(b, mat_rows(s->other, 0, rows));
    }
    for (int i = 0; i < LAYERS; i++) {
        const struct layer *l = &s->layer[i];
        struct mat y1 = mat_rows(l->y1, 0, rows), h1 = mat_rows(l->h1, 0, rows);
        struct mat y2 = mat_rows(l->y2, 0, rows), h2 = mat_rows(l->h2, 0, rows);
        ops->linear(b, y1, attn, s->o.mat, NULL);
        ops->add_norm(b, h1, x, y1, &n, true);
        ops->experts(b, y2, h1, &experts, &scratch);
        ops->add_norm(b, h2, x, y2, &n, true);
        ops->linear(b, mat_rows(l->qkv, 0, rows), h2, s->qkv.mat, NULL);
    }
}

static int take_step(struct scene *s, int32_t rows, int step, struct err *e)
{
    struct backend *b = s->r->b;
    struct results unused;
    bool replayed;

    fill_random(s->x_host, (int64_t)rows * s->k->hidden, 2,
                7000 + (uint64_t)(step * MOST_ROWS + rows));
    fill_random(s->attn_host, (int64_t)rows * HEADS, 1,
                50 + (uint64_t)(step * MOST_ROWS + rows + 1000 * s->r->rank));
    int rc = b->ops->upload(b, mat_rows(s->x, 0, rows), s->x_host, e);
    rc = rc < 0 ? rc : b->ops->upload(b, mat_rows(s->other, 0, rows), s->x_host, e);
    rc = rc < 0 ? rc : b->ops->upload(b, mat_rows(s->attn, 0, rows), s->attn_host, e);
    rc = rc < 0 ? rc : rank_rig_begin(s->r, rows, &replayed, e);
    if (rc == 0 && !replayed) {
        call_operations(s, rows);
    }
    return rc < 0 ? rc : rank_rig_end(s->r, &unused, e);
}

/* ---- references ---- */

static float got[MOST_ROWS * MOST_HIDDEN], host_h[MOST_ROWS * MOST_HIDDEN],
    sum[MOST_ROWS * MOST_HIDDEN];
static double want[MOST_ROWS * MOST_HIDDEN];

static double dot(const float *a, const float *b, int32_t n)
{
    double all = 0;

    for (int32_t i = 0; i < n; i++) {
        all += (double)a[i] * b[i];
    }
    return all;
}

/* x_host += the sum over the ranks of `want`, each and the sum rounded as the device
 * stores them. */
static int add_wanted(struct scene *s, int32_t rows, struct err *e)
{
    int32_t n = rows * s->k->hidden;
    struct mat scratch = mat_rows(s->other, 0, rows); /* no longer needed */

    for (int32_t i = 0; i < n; i++) {
        sum[i] = (float)want[i];
    }
    int rc = round_as_stored(s->r->b, scratch, sum, e);
    rc = rc < 0 ? rc : sum_over_ranks(s->r, sum, n, e);
    for (int32_t i = 0; i < n; i++) {
        s->x_host[i] += sum[i];
    }
    return rc < 0 ? rc : round_as_stored(s->r->b, scratch, s->x_host, e);
}

/* host_h = the norm of x_host, as the device has stored it and products take it. */
static int check_norm(struct scene *s, const char *what, struct mat out, int32_t rows,
                      struct err *e)
{
    int32_t h = s->k->hidden, n = rows * h;

    for (int32_t i = 0; i < rows; i++) {
        const float *x = s->x_host + i * h;
        double scale = 1 / sqrt(dot(x, x, h) / h + 1e-5);
        for (int32_t j = 0; j < h; j++) {
            want[i * h + j] = x[j] * scale * s->norm.host[j];
        }
    }
    int rc = s->r->b->ops->download(s->r->b, mat_rows(out, 0, rows), got, e);
    bool rounds = operand_type(s->r->b, s->type) == DTYPE_BF16;
    for (int32_t i = 0; i < n; i++) {
        host_h[i] = rounds ? bf16_load(bf16_store(got[i])) : got[i];
    }
    return rc < 0 ? rc : check_nmse(what, got, want, n, 2 * product_limit(s->type), e);
}

/* want = this rank's summand of the experts of host_h. */
static int experts_of(const struct scene *s, int32_t rows, struct err *e)
{
    int32_t h = s->k->hidden, w = s->k->width;
    double score[EXPERTS], act[MOST_WIDTH];

    for (int32_t i = 0; i < rows; i++) {
        const float *x = host_h + i * h;
        double first = -INFINITY, all = 0, last = 0;
        for (int32_t k = 0; k < EXPERTS; k++) {
            score[k] = dot(x, s->router.host + k * h, h);
            first = fmax(first, score[k]);
        }
        memset(want + i * h, 0, (size_t)h * sizeof(*want));
        for (int turn = 0; turn < 2 * TOP; turn++) { /* the sum of weights, then the experts */
            double before = turn % TOP == 0 ? INFINITY : last;
            int32_t at = 0;
            last = -INFINITY;
            for (int32_t k = 0; k < EXPERTS; k++) {
                at = score[k] < before && score[k] > last ? k : at;
                last = score[k] < before ? fmax(last, score[k]) : last;
            }
            if (turn < TOP) {
                all += exp(last - first);
                continue;
            }
            const float *up = s->up.host + (int64_t)at * 2 * w * h;
            for (int32_t j = 0; j < w; j++) {
                double g = dot(x, up + j * h, h), u = dot(x, up + (w + j) * h, h);
                act[j] = g / (1 + exp(-g)) * u;
            }
            for (int32_t j = 0; j < h; j++) {
                const float *down = s->down.host + ((int64_t)at * h + j) * w;
                double y = 0;
                for (int32_t k = 0; k < w; k++) {
                    y += act[k] * down[k];
                }
                want[i * h + j] += exp(last - first) / all * y;
            }
        }
        for (int32_t k = 0; k < EXPERTS; k++) { /* no choice hangs on the device's rounding */
            RANK_CHECK(score[k] >= last || score[k] < last - 1e-4 * fabs(last));
        }
    }
    return 0;
}

static int check_layer(struct scene *s, struct layer *l, int32_t rows, struct err *e)
{
    int32_t h = s->k->hidden;

    for (int32_t i = 0; i < rows * h; i++) {
        want[i] = dot(s->attn_host + i / h * HEADS, s->o.host + i % h * HEADS, HEADS);
    }
    int rc = add_wanted(s, rows, e);
    rc = rc < 0 ? rc : check_norm(s, "norm before experts", l->h1, rows, e);
    rc = rc < 0 ? rc : experts_of(s, rows, e);
    rc = rc < 0 ? rc : add_wanted(s, rows, e);
    rc = rc < 0 ? rc : check_norm(s, "norm behind experts", l->h2, rows, e);
    for (int32_t i = 0; i < rows * QKV; i++) {
        want[i] = dot(host_h + i / QKV * h, s->qkv.host + i % QKV * h, h);
    }
    rc = rc < 0 ? rc : s->r->b->ops->download(s->r->b, mat_rows(l->qkv, 0, rows), got, e);
    return rc < 0
               ? rc
               : check_nmse("last product", got, want, rows * QKV, 4 * product_limit(s->type), e);
}

/* x, which has the same bits on all ranks. */
static int check_x(struct scene *s, int32_t rows, struct err *e)
{
    int32_t n = rows * s->k->hidden;
    int rc = s->r->b->ops->download(s->r->b, mat_rows(s->x, 0, rows), got, e);

    for (int32_t i = 0; i < n; i++) {
        want[i] = s->x_host[i];
    }
    rc = rc < 0 ? rc : check_nmse("the stream", got, want, n, 4 * product_limit(s->type), e);
    return rc < 0 ? rc : check_same_on_ranks(s->r, got, sum, n, e);
}

/* Steps of different row counts in turn: leftovers of one sum must not affect the
 * next. */
static int layers_of(struct rank_rig *r, const struct shape *k, enum dtype type, struct err *e)
{
    static struct scene s;

    memset(&s, 0, sizeof(s));
    s.r = r;
    s.k = k;
    s.type = type;
    int rc = scene_open(&s, e);
    for (int step = 0; step < STEPS && rc == 0; step++) {
        for (size_t i = 0; k->rows[i] > 0 && rc == 0; i++) {
            rc = take_step(&s, k->rows[i], step, e);
            for (int l = 0; l < LAYERS && rc == 0; l++) {
                rc = check_layer(&s, &s.layer[l], k->rows[i], e);
                rc = rc < 0 ? err_prefix(e, "layer %d", l) : rc;
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
    return layers_of(r, &narrow, DTYPE_BF16, e);
}

static int in_f16(struct rank_rig *r, struct err *e)
{
    return layers_of(r, &narrow, DTYPE_F16, e);
}

static int of_wide(struct rank_rig *r, struct err *e)
{
    return layers_of(r, &wide, DTYPE_BF16, e);
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
    assert_int_equal(rank_rig_run(device, n_ranks, MOST_ROWS, of_wide), 0);
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
