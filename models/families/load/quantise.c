/* Weights of floats quantised while they are loaded (setting `quantization`): those
 * of linear layers, and of experts where the backend multiplies them so. The embedding,
 * the head, norms and routers stay.
 *
 *   fp8   e4m3, a scale a row: its greatest magnitude is code 448; activations likewise, a
 *         scale a token, where the backend multiplies codes by codes
 *   int4  codes 0 to 15 in groups of 128 columns with a scale (bf16) and a zero point; zero
 *         is among the values
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

enum { GROUP = 128, MAX_THREADS = 16, ROWS_A_THREAD = 64 };

/* The rows that one thread quantises. */
struct share {
    const struct quantised *q;
    const struct weight_desc *d; /* of floats */
    const struct weight_format *format;
    int32_t first, end; /* rows */
    float *row;         /* [2 * cols] owned: a row, and its decoded values */
};

/* Dims of the products that every family makes of attention and MLP by `linear`. */
static bool dim_quantised(enum tensor_dim d)
{
    return d == DIM_HIDDEN || d == DIM_Q || d == DIM_KV || d == DIM_QKV || d == DIM_MLP ||
           d == DIM_GATE_UP;
}

bool model_quantises(const struct model *m, const struct tensor_spec *s, int32_t cols)
{
    const struct weight_format *f = m->options.quantise;

    if (!f || s->kind != WEIGHT_LINEAR || (f->id == FORMAT_INT4 && cols % GROUP != 0)) {
        return false;
    }
    if (tensor_spec_of_expert(s)) {
        return model_keeps_expert_format(m, f, f->id == FORMAT_INT4 ? GROUP : 0);
    }
    return tensor_spec_indices(s) == 1 && dim_quantised(s->rows) && dim_quantised(s->cols) &&
           s->when != WHEN_EXPERTS && s->when != WHEN_SHARED;
}

/* ---- codes ---- */

static void fp8_row(const float *x, int32_t n, uint8_t *codes, float *scale)
{
    float most = 0;

    for (int32_t i = 0; i < n; i++) {
        most = fmaxf(most, fabsf(x[i]));
    }
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

/* One group of a row, with the scale as it is stored. */
static void int4_group(const float *x, uint8_t *codes, uint16_t *ret_scale, uint8_t *ret_zero)
{
    float least = 0;
    float most = 0;

    for (int32_t i = 0; i < GROUP; i++) {
        least = fminf(least, x[i]);
        most = fmaxf(most, x[i]);
    }
    *ret_scale = bf16_of(most > least ? (most - least) / 15.0f : 1.0f);
    struct weight_scales s = {.data = ret_scale, .type = SCALE_BF16};
    float scale = weight_scale_load(&s, 0);
    float zero = fminf(nearbyintf(-least / scale), 15);
    *ret_zero = (uint8_t)zero;
    for (int32_t i = 0; i < GROUP; i += 2) {
        float low = fminf(fmaxf(nearbyintf(x[i] / scale) + zero, 0), 15);
        float high = fminf(fmaxf(nearbyintf(x[i + 1] / scale) + zero, 0), 15);
        codes[i / 2] = (uint8_t)((int)low | (int)high << 4);
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

static void quantise_row(const struct share *t, int32_t row)
{
    const struct quantised *q = t->q;
    int64_t bytes = weight_format_bytes(t->format, t->d->cols), n = t->d->cols / GROUP;
    uint8_t *codes = q->codes + row * bytes;
    float *values = t->row + t->d->cols;

    load_row(t->d, row, t->row);
    if (t->format->id == FORMAT_FP8) {
        fp8_row(t->row, t->d->cols, codes, (float *)q->scale + row);
    } else {
        for (int32_t g = 0; g < n; g++) {
            int4_group(t->row + (ptrdiff_t)g * GROUP, codes + (ptrdiff_t)g * GROUP / 2,
                       (uint16_t *)q->scale + row * n + g, q->zero + row * n + g);
        }
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

int quantised_init(struct quantised *q, const struct model *m, struct weight_desc *d, struct err *e)
{
    const struct weight_format *f = m->options.quantise;
    bool as_stored = m->backend->ops->supports(m->backend, f).as_stored, fp8 = f->id == FORMAT_FP8;
    size_t rows = (size_t)d->rows, groups = fp8 ? rows : rows * (size_t)(d->cols / GROUP);

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
    q->scale = malloc(groups * (fp8 ? sizeof(float) : sizeof(uint16_t)));
    q->zero = fp8 ? NULL : malloc(groups);
    q->values = as_stored ? NULL : malloc(rows * (size_t)d->cols * sizeof(*q->values));
    if (!q->codes || !q->scale || (!fp8 && !q->zero) || (!as_stored && !q->values)) {
        return err_nomem(e, d->name);
    }
    q->piece = (struct weight_piece){.data = q->codes,
                                     .dtype = d->dtype,
                                     .rows = d->rows,
                                     .cols = d->cols,
                                     .stride = d->cols,
                                     .format = f,
                                     .scales = {.data = q->scale,
                                                .type = fp8 ? SCALE_F32 : SCALE_BF16,
                                                .group_rows = 1,
                                                .group_cols = fp8 ? 0 : GROUP,
                                                .stride = fp8 ? 1 : d->cols / GROUP,
                                                .zero = q->zero,
                                                .zero_stride = d->cols / GROUP,
                                                .factor = 1,
                                                .act = fp8 ? ACT_SCALE_TOKEN : ACT_AS_THEY_ARE}};
    int rc = quantise_all(&(struct share){.q = q, .d = d, .format = f}, e);
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
