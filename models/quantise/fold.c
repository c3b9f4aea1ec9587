/* The choice of factors (see fold.h). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/weights.h"
#include "models/quantise/fold.h"

static struct weight_scales floats_of(const struct tensor *t)
{
    return (struct weight_scales){.data = t->data,
                                  .type = t->dtype == DTYPE_F32   ? SCALE_F32
                                          : t->dtype == DTYPE_F16 ? SCALE_F16
                                                                  : SCALE_BF16};
}

struct weight_view weight_view_of(const struct tensor *t)
{
    return (struct weight_view){
        .t = t, .rows = t->dim[0], .cols = t->dim[1], .row_step = t->dim[1], .col_step = 1};
}

void fold_load_row(const struct weight_view *v, int64_t row, float *ret)
{
    struct weight_scales values = floats_of(v->t);
    int64_t at = v->first + row * v->row_step;

    for (int64_t i = 0; i < v->cols; i++) {
        ret[i] = weight_scale_load(&values, at + i * v->col_step);
    }
}

void fold_load_vector(const struct tensor *t, float *ret)
{
    struct weight_scales values = floats_of(t);

    for (int64_t i = 0; i < t->dim[0]; i++) {
        ret[i] = weight_scale_load(&values, i);
    }
}

static float round_to_bf16(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof(u));
    u = (u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000;
    memcpy(&f, &u, sizeof(f));
    return f;
}

float fold_norm_weight(float weight, float offset, float s)
{
    return round_to_bf16((weight + offset) / s - offset);
}

int fold_round_factors(const struct tensor *norm, float offset, float *s, struct err *e)
{
    float *w = malloc((size_t)norm->dim[0] * sizeof(*w));

    if (!w) {
        return err_nomem(e, norm->name);
    }
    fold_load_vector(norm, w);
    for (int64_t i = 0; i < norm->dim[0]; i++) {
        float before = w[i] + offset, after = fold_norm_weight(w[i], offset, s[i]) + offset;
        s[i] = isnormal(before) && isnormal(after) ? before / after : 1;
    }
    free(w);
    return 0;
}

/* ---- formulas ---- */

/* Geometric mean 1, and none so far from it that a 16-bit norm could not hold it. */
static void normalise(float *s, int32_t n)
{
    double sum = 0;

    for (int32_t j = 0; j < n; j++) {
        sum += log(s[j]);
    }
    float mean = (float)exp(sum / n);
    for (int32_t j = 0; j < n; j++) {
        s[j] = fminf(fmaxf(s[j] / mean, 1.0f / 256), 256);
    }
}

/* most[cols] = the greatest magnitude of each column. */
static int greatest_weights(const struct readers *r, float *most, int32_t cols, struct err *e)
{
    float *row = malloc((size_t)cols * sizeof(*row));

    if (!row) {
        return err_nomem(e, "a row");
    }
    memset(most, 0, (size_t)cols * sizeof(*most));
    for (int32_t i = 0; i < r->n; i++) {
        for (int64_t k = 0; k < r->v[i]->rows; k++) {
            fold_load_row(r->v[i], k, row);
            for (int32_t j = 0; j < cols; j++) {
                most[j] = fmaxf(most[j], fabsf(row[j]));
            }
        }
    }
    free(row);
    return 0;
}

void fold_to_powers(float *s, int32_t n)
{
    for (int32_t j = 0; j < n; j++) {
        s[j] = exp2f(nearbyintf(log2f(s[j])));
    }
}

static void smooth(const struct inputs *in, const float *weight, float alpha, float *s)
{
    for (int32_t j = 0; j < in->cols; j++) {
        bool used = in->most[j] > 0 && weight[j] > 0;
        s[j] = used ? powf(in->most[j], alpha) / powf(weight[j], 1 - alpha) : 1;
    }
    normalise(s, in->cols);
}

int fold_smooth(const struct readers *r, const struct inputs *in, float alpha, float *s,
                struct err *e)
{
    float *weight = malloc((size_t)in->cols * sizeof(*weight));
    int rc = weight ? greatest_weights(r, weight, in->cols, e) : err_nomem(e, "factors");

    if (rc == 0) {
        smooth(in, weight, alpha, s);
    }
    free(weight);
    return rc;
}

/* ---- error ---- */

struct error {
    double weights, inputs, all; /* squares: of either error, and of the output */
};

/* What rounding to int8 with a scale a token adds to each input: the mean square of an
 * error that is uniform over a step. */
static double input_error(const struct inputs *in, const struct rounding *k, const float *s)
{
    double sum = 0;

    if (k->format != FORMAT_INT8) {
        return 0;
    }
    for (int32_t t = 0; t < in->n_samples; t++) {
        const float *x = in->sample + (ptrdiff_t)t * in->cols;
        float most = 0;
        for (int32_t j = 0; j < in->cols; j++) {
            most = fmaxf(most, fabsf(x[j]) / (s ? s[j] : 1));
        }
        sum += (double)most * most / (127.0 * 127 * 12);
    }
    return in->n_samples > 0 ? sum / in->n_samples : 0;
}

/* row [2 * cols]: a weight's row and the values of its codes. */
static void add_row_error(const struct inputs *in, const struct rounding *k, const float *s,
                          float *row, uint8_t *codes, float *scale, double each,
                          struct error *error)
{
    float *value = row + in->cols;
    double sum[2] = {0};

    for (int32_t j = 0; j < in->cols && s; j++) {
        row[j] *= s[j];
    }
    round_row(k, row, in->cols,
              &(struct rounded_row){.codes = codes, .scale = scale, .value = value}, sum);
    for (int32_t j = 0; j < in->cols; j++) {
        double square = in->squares[j] / (double)in->n, f = s ? s[j] : 1,
               off = ((double)value[j] - row[j]) / f, w = row[j] / f;
        error->weights += square * off * off;
        error->inputs += each * row[j] * row[j];
        error->all += square * w * w;
    }
}

int fold_error(const struct readers *r, const struct inputs *in, const struct rounding *k,
               const float *s, double *ret, struct err *e)
{
    size_t n = (size_t)in->cols;
    float *row = malloc(2 * n * sizeof(*row)), *scale = malloc(n * sizeof(*scale));
    uint8_t *codes = malloc(n);
    struct error error = {0};
    double each = input_error(in, k, s);
    int rc = row && scale && codes ? 0 : err_nomem(e, "a row");

    int32_t most = MAX(FOLD_ROWS * FOLD_WEIGHTS / MAX(r->n, FOLD_WEIGHTS), FOLD_LEAST_ROWS);
    for (int32_t i = 0; i < r->n && rc == 0; i++) {
        int64_t step = MAX(r->v[i]->rows / most, 1);
        for (int64_t at = 0; at < r->v[i]->rows; at += step) {
            fold_load_row(r->v[i], at, row);
            add_row_error(in, k, s, row, codes, scale, each, &error);
        }
    }
    *ret = error.all > 0 ? sqrt((error.weights + error.inputs) / error.all) : 0;
    free(row);
    free(scale);
    free(codes);
    return rc;
}

/* ---- search ---- */

static void factors_of(const struct inputs *in, const struct rounding *k, const float *weight,
                       float alpha, float *s)
{
    if (k->format == FORMAT_INT8) {
        smooth(in, weight, alpha, s);
        return;
    }
    for (int32_t j = 0; j < in->cols; j++) {
        s[j] = in->sum[j] > 0 ? powf((float)(in->sum[j] / (double)in->n), alpha) : 1;
    }
    normalise(s, in->cols);
}

int fold_search(const struct readers *r, const struct inputs *in, const struct rounding *k,
                bool powers, float *s, struct err *e)
{
    enum { STEPS = 10 };
    size_t n = (size_t)in->cols;
    float *weight = malloc(2 * n * sizeof(*weight));
    double least, error;

    if (!weight) {
        return err_nomem(e, "factors");
    }
    float *tried = weight + n;
    for (size_t j = 0; j < n; j++) {
        s[j] = 1;
    }
    int rc = greatest_weights(r, weight, in->cols, e);
    rc = rc < 0 ? rc : fold_error(r, in, k, NULL, &least, e);
    for (int i = 0; i <= STEPS && rc == 0; i++) {
        factors_of(in, k, weight, (float)i / STEPS, tried);
        if (powers) {
            fold_to_powers(tried, in->cols);
        }
        rc = fold_error(r, in, k, tried, &error, e);
        if (rc == 0 && error < least) {
            least = error;
            memcpy(s, tried, n * sizeof(*s));
        }
    }
    free(weight);
    return rc;
}
