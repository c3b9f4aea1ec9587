/* Weights of floats quantised while they are loaded (setting `quantization`): those
 * of linear layers, and of experts where the backend multiplies them so. The embedding,
 * the head, norms and routers stay.
 *
 *   fp8    e4m3, a scale a row: its greatest magnitude is code 448; activations likewise, a
 *          scale a token, where the backend multiplies codes by codes
 *   int8   a scale a row, or for 128 columns: symmetric, the greatest magnitude is code
 *          127; or with a zero point, codes -128 to 127 from the least value to the
 *          greatest
 *   int4   codes 0 to 15 in groups of 128 columns with a scale (bf16) and a zero point; zero
 *          is among the values
 *   mxfp4  e2m1 in groups of 32 columns, whose scale is the power of two that brings the
 *          greatest magnitude below 8 (OCP Microscaling Formats 1.0, 6.3)
 *
 * Rounded to nearest, row by row, so that ranks, which hold other rows or whole
 * groups of columns, get the codes of one rank. (A scale a row of a slice of columns
 * is that of the slice.) A backend that does not multiply the format gets the values
 * of its codes.
 *  */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "models/families/layers.h"

enum { MAX_THREADS = 16, ROWS_A_THREAD = 64 };

/* The rows that one thread quantises. */
struct share {
    const struct quantised *q;
    const struct weight_desc *d; /* of floats */
    const struct weight_format *format;
    int32_t group;      /* columns that share a scale */
    int32_t first, end; /* rows */
    float *row;         /* [2 * cols] owned: a row, and its decoded values */
};

/* Dims of the products that every family makes of attention and MLP by `linear`. */
static bool dim_quantised(enum tensor_dim d)
{
    return d == DIM_HIDDEN || d == DIM_Q || d == DIM_KV || d == DIM_QKV || d == DIM_MLP ||
           d == DIM_GATE_UP;
}

bool model_quantises_at_width(const struct model *m, const struct tensor_spec *s, int32_t cols,
                              int32_t expert_width)
{
    const struct weight_format *f = m->options.quantise;
    int32_t group = m->options.quantise_group;

    if (!f || s->kind != WEIGHT_LINEAR || (group > 0 && cols % group != 0)) {
        return false;
    }
    if (tensor_spec_of_expert(s)) {
        return model_keeps_expert_format(m, f, group, expert_width);
    }
    return tensor_spec_indices(s) == 1 && dim_quantised(s->rows) && dim_quantised(s->cols) &&
           s->when != WHEN_EXPERTS && s->when != WHEN_SHARED;
}

bool model_quantises(const struct model *m, const struct tensor_spec *s, int32_t cols)
{
    return model_quantises_at_width(m, s, cols, m->weights->expert_intermediate);
}

bool model_quantises_on_one_rank(const struct model *m, const struct tensor_spec *s, int32_t cols)
{
    return model_quantises_at_width(m, s, cols, m->config.experts.intermediate);
}

/* ---- codes ---- */

static float greatest(const float *x, int32_t n)
{
    float most = 0;

    for (int32_t i = 0; i < n; i++) {
        most = fmaxf(most, fabsf(x[i]));
    }
    return most;
}

static void fp8_group(const float *x, int32_t n, uint8_t *codes, float *scale)
{
    float most = greatest(x, n);

    *scale = most > 0 ? most / 448.0f : 1.0f;
    for (int32_t i = 0; i < n; i++) {
        codes[i] = weight_e4m3_of(x[i] / *scale);
    }
}

static uint16_t bf16_of(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof(u));
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

/* The least value and the greatest, zero among them. */
static void range_of(const float *x, int32_t n, float *ret_least, float *ret_most)
{
    *ret_least = *ret_most = 0;
    for (int32_t i = 0; i < n; i++) {
        *ret_least = fminf(*ret_least, x[i]);
        *ret_most = fmaxf(*ret_most, x[i]);
    }
}

/* ret_zero NULL: symmetric. */
static void int8_group(const float *x, int32_t n, uint8_t *codes, float *ret_scale,
                       uint8_t *ret_zero)
{
    float least, most, zero = 0;

    range_of(x, n, &least, &most);
    if (ret_zero) {
        *ret_scale = most > least ? (most - least) / 255.0f : 1.0f;
        zero = fminf(fmaxf(nearbyintf(-128.0f - least / *ret_scale), -128), 127);
        *ret_zero = (uint8_t)(int8_t)zero;
    } else {
        most = fmaxf(most, -least);
        *ret_scale = most > 0 ? most / 127.0f : 1.0f;
    }
    for (int32_t i = 0; i < n; i++) {
        codes[i] = (uint8_t)(int8_t)fminf(fmaxf(nearbyintf(x[i] / *ret_scale) + zero, -128), 127);
    }
}

/* The scale as it is stored. */
static void int4_group(const float *x, int32_t n, uint8_t *codes, uint16_t *ret_scale,
                       uint8_t *ret_zero)
{
    float least, most;

    range_of(x, n, &least, &most);
    *ret_scale = bf16_of(most > least ? (most - least) / 15.0f : 1.0f);
    struct weight_scales s = {.data = ret_scale, .type = SCALE_BF16};
    float scale = weight_scale_load(&s, 0);
    float zero = fminf(nearbyintf(-least / scale), 15);
    *ret_zero = (uint8_t)zero;
    for (int32_t i = 0; i < n; i += 2) {
        float low = fminf(fmaxf(nearbyintf(x[i] / scale) + zero, 0), 15);
        float high = fminf(fmaxf(nearbyintf(x[i + 1] / scale) + zero, 0), 15);
        codes[i / 2] = (uint8_t)((int)low | (int)high << 4);
    }
}

static void mxfp4_group(const float *x, int32_t n, uint8_t *codes, uint8_t *ret_scale)
{
    float most = greatest(x, n);
    int exponent = most > 0 ? MIN(MAX(ilogbf(most) - 2, -127), 127) : -127;

    float over = ldexpf(1, -exponent);

    *ret_scale = (uint8_t)(exponent + 127);
    for (int32_t i = 0; i < n; i += 2) {
        codes[i / 2] =
            (uint8_t)(weight_e2m1_of(x[i] * over) | weight_e2m1_of(x[i + 1] * over) << 4);
    }
}

/* ---- rows ---- */

/* Row `row` of the weight, from the piece that has it. */
static void load_row(const struct weight_desc *d, int32_t row, float *ret)
{
    const struct weight_piece *p = d->piece;

    for (; row >= (p->transposed ? p->cols : p->rows); p++) {
        row -= p->transposed ? p->cols : p->rows;
    }
    struct weight_scales values = {.data = p->data,
                                   .type = p->dtype == DTYPE_F32   ? SCALE_F32
                                           : p->dtype == DTYPE_F16 ? SCALE_F16
                                                                   : SCALE_BF16};
    for (int32_t i = 0; i < d->cols; i++) {
        ret[i] =
            weight_scale_load(&values, p->transposed ? i * p->stride + row : row * p->stride + i);
    }
}

/* A group of a row, the at-th of the weight. */
static void quantise_group(const struct share *t, const float *x, uint8_t *codes, int64_t at)
{
    const struct quantised *q = t->q;
    uint8_t *zero = q->zero ? q->zero + at : NULL;

    switch (t->format->id) {
    case FORMAT_FP8:
        fp8_group(x, t->group, codes, (float *)q->scale + at);
        break;
    case FORMAT_INT8:
        int8_group(x, t->group, codes, (float *)q->scale + at, zero);
        break;
    case FORMAT_INT4:
        int4_group(x, t->group, codes, (uint16_t *)q->scale + at, zero);
        break;
    default:
        mxfp4_group(x, t->group, codes, (uint8_t *)q->scale + at);
    }
}

static void quantise_row(const struct share *t, int32_t row)
{
    const struct quantised *q = t->q;
    int64_t bytes = weight_format_bytes(t->format, t->d->cols), n = t->d->cols / t->group;
    uint8_t *codes = q->codes + row * bytes;
    float *values = t->row + t->d->cols;

    load_row(t->d, row, t->row);
    for (int64_t g = 0; g < n; g++) {
        quantise_group(t, t->row + g * t->group,
                       codes + weight_format_bytes(t->format, g * t->group), row * n + g);
    }
    if (q->values) {
        weight_scales_decode(t->format, &q->piece.scales, codes, row, t->d->cols, values);
        memcpy(q->values + (ptrdiff_t)row * t->d->cols, values, (size_t)t->d->cols * sizeof(float));
    }
}

static void *quantise_rows(void *arg)
{
    struct share *t = arg;

    for (int32_t row = t->first; row < t->end; row++) {
        quantise_row(t, row);
    }
    return NULL;
}

/* By as many threads as help; one that does not start leaves its rows to this one. */
static int quantise_all(const struct share *whole, struct err *e)
{
    long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t rows = whole->d->rows,
            n = (int32_t)MIN(MIN(MAX(n_cores, 1), MAX_THREADS), div_ceil(rows, ROWS_A_THREAD)),
            each = (int32_t)div_ceil(rows, n);
    struct share share[MAX_THREADS];
    pthread_t thread[MAX_THREADS];
    bool started[MAX_THREADS] = {false};
    int rc = 0;

    for (int32_t i = 0; i < n; i++) {
        share[i] = *whole;
        share[i].first = MIN(i * each, rows);
        share[i].end = MIN((i + 1) * each, rows);
        share[i].row = malloc(2 * (size_t)whole->d->cols * sizeof(float));
        rc = share[i].row ? rc : err_nomem(e, whole->d->name);
    }
    for (int32_t i = 0; i < n && rc == 0; i++) {
        started[i] = i + 1 < n && pthread_create(&thread[i], NULL, quantise_rows, &share[i]) == 0;
        if (!started[i]) {
            quantise_rows(&share[i]);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        if (started[i]) {
            pthread_join(thread[i], NULL);
        }
        free(share[i].row);
    }
    return rc;
}

/* ---- a weight ---- */

void quantised_release(struct quantised *q)
{
    free(q->codes);
    free(q->scale);
    free(q->zero);
    free(q->values);
    memset(q, 0, sizeof(*q));
}

/* The scales of a weight of format f. */
static struct weight_scales scales_of(const struct quantised *q, const struct weight_desc *d,
                                      const struct weight_format *f, int32_t group)
{
    int32_t n = group > 0 ? d->cols / group : 1;

    return (struct weight_scales){.data = q->scale,
                                  .type = f->id == FORMAT_INT4  ? SCALE_BF16
                                          : f->id == FORMAT_FP4 ? SCALE_E8M0
                                                                : SCALE_F32,
                                  .group_rows = 1,
                                  .group_cols = group,
                                  .stride = n,
                                  .zero = q->zero,
                                  .zero_stride = n,
                                  .factor = 1,
                                  .act = f->id == FORMAT_FP8 ? ACT_SCALE_TOKEN : ACT_AS_THEY_ARE};
}

int quantised_init(struct quantised *q, const struct model *m, struct weight_desc *d, struct err *e)
{
    const struct weight_format *f = m->options.quantise;
    bool as_stored = m->backend->ops->supports(m->backend, f).as_stored;
    bool zeros = m->options.quantise_zeros;
    int32_t group = m->options.quantise_group;
    size_t rows = (size_t)d->rows, groups = rows * (size_t)(group > 0 ? d->cols / group : 1);

    memset(q, 0, sizeof(*q));
    for (int32_t i = 0; i < d->n_pieces; i++) {
        if (d->piece[i].format) { /* of a file that is quantised already */
            return 0;
        }
    }
    if (d->n_pieces == 0) {
        d->dummy_format = as_stored ? f : NULL;
        return 0;
    }
    q->codes = malloc(rows * (size_t)weight_format_bytes(f, d->cols));
    q->scale = malloc(groups * sizeof(float));
    q->zero = zeros ? malloc(groups) : NULL;
    q->values = as_stored ? NULL : malloc(rows * (size_t)d->cols * sizeof(*q->values));
    if (!q->codes || !q->scale || (zeros && !q->zero) || (!as_stored && !q->values)) {
        return err_nomem(e, d->name);
    }
    q->piece = (struct weight_piece){.data = q->codes,
                                     .dtype = d->dtype,
                                     .rows = d->rows,
                                     .cols = d->cols,
                                     .stride = d->cols,
                                     .format = f,
                                     .scales = scales_of(q, d, f, group)};
    struct share whole = {.q = q, .d = d, .format = f, .group = group > 0 ? group : d->cols};
    int rc = quantise_all(&whole, e);
    if (q->values) {
        q->piece.data = q->values;
        q->piece.dtype = DTYPE_F32;
        q->piece.format = NULL;
    }
    d->piece = &q->piece;
    d->n_pieces = 1;
    d->mapped = false;
    return rc;
}
