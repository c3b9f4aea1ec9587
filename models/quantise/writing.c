/* The file of quantised weights (see quantise.h).
 *
 * Its header is made first, from the sizes alone; then the tensors are read, rounded
 * and written one by one, so that memory holds one row and the scales of one weight. */
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/buf.h"
#include "config/base/limits.h"
#include "models/checkpoint/weights_internal.h"
#include "models/quantise/quantise_internal.h"

int quantise_failed(const struct conversion *k, const char *name, struct err *e)
{
    return err_set(e, ERR_IO, "%s/%s: %s", k->to, name, strerror(errno));
}

/* ---- the header ---- */

static void add_entry(struct buf *h, const char *name, int32_t len, const char *part,
                      const char *type, int64_t rows, int64_t cols, int64_t n_bytes, int64_t *at)
{
    buf_puts(h, h->len > 1 ? ",\"" : "\"");
    buf_json_escape(h, name, (size_t)len);
    buf_printf(h, "%s\":{\"dtype\":\"%s\",\"shape\":[%" PRId64, part, type, rows);
    if (cols > 0) {
        buf_printf(h, ",%" PRId64, cols);
    }
    buf_printf(h, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", *at, *at + n_bytes);
    *at += n_bytes;
}

static int64_t n_groups(const struct conversion *k, const struct weight_view *v)
{
    return k->rounding.group > 0 ? v->cols / k->rounding.group : 1;
}

/* How the parts of a quantised weight are stored. */
struct stored {
    const char *codes, *codes_type, *scale_type;
    int32_t word; /* codes in an element */
    int32_t bits; /* of a code */
    int32_t scale_bytes;
};

static struct stored stored_as(const struct conversion *k)
{
    switch (k->rounding.format) {
    case FORMAT_FP8:
        return (struct stored){"weight", "F8_E4M3", "F32", 1, 8, 4};
    case FORMAT_INT8:
        return (struct stored){"weight", "I8", "F32", 1, 8, 4};
    case FORMAT_FP4:
        return (struct stored){
            "weight_packed", "U8", quantise_nvfp4(k) ? "F8_E4M3" : "U8", 2, 4, 1};
    default: /* FORMAT_INT4 */
        return (struct stored){"weight_packed", "I32", "F32", 8, 4, 4};
    }
}

static void add_quantised(const struct conversion *k, struct buf *h, const struct output *o,
                          int64_t *at)
{
    const char *name = output_name(o);
    int32_t len = (int32_t)(strlen(name) - strlen("weight"));
    int64_t rows = o->view.rows, cols = o->view.cols, groups = n_groups(k, &o->view);
    struct stored s = stored_as(k);

    add_entry(h, name, len, s.codes, s.codes_type, rows, cols / s.word, rows * cols * s.bits / 8,
              at);
    add_entry(h, name, len, "weight_scale", s.scale_type, rows, groups,
              rows * groups * s.scale_bytes, at);
    if (k->rounding.format == FORMAT_INT4) {
        add_entry(h, name, len, "weight_shape", "I64", 2, 0, 16, at);
    }
    if (quantise_nvfp4(k)) {
        add_entry(h, name, len, "weight_global_scale", "F32", 1, 0, 4, at);
    }
    if (k->input_scale) {
        add_entry(h, name, len, "input_scale", "F32", 1, 0, 4, at);
    }
    if (k->rounding.zeros && k->rounding.format == FORMAT_INT4) {
        int64_t words = div_ceil(rows, 8);
        add_entry(h, name, len, "weight_zero_point", "I32", words, groups, words * groups * 4, at);
    } else if (k->rounding.zeros) {
        add_entry(h, name, len, "weight_zero_point", "I8", rows, groups, rows * groups, at);
    }
}

/* The factors of a norm's columns; NULL: o is no such norm, or is left alone. */
static const float *norm_factors(const struct conversion *k, const struct output *o)
{
    return o->norm ? conversion_factors(k, o->layer, o->product) : NULL;
}

/* The type and the shape of a tensor that is not quantised. */
static void add_shape(struct buf *h, const char *type, const struct output *o)
{
    const struct tensor *t = o->t;

    buf_printf(h, "\":{\"dtype\":\"%s\",\"shape\":[", type);
    if (o->part) { /* a vector */
        buf_printf(h, "%" PRId64, o->view.rows);
    }
    for (int32_t i = 0; i < t->n_dims && !o->part; i++) {
        buf_printf(h, "%s%" PRId64, i > 0 ? "," : "", t->dim[i]);
    }
}

/* As it is; its type is one of the floats, or one that no layer needs. A norm with
 * factors becomes float32. */
static void add_plain(const struct conversion *k, struct buf *h, const struct output *o,
                      int64_t *at)
{
    bool norm = norm_factors(k, o);
    const struct tensor *t = o->t;
    int64_t n_bytes = norm      ? t->dim[0] * 4
                      : o->part ? o->view.rows * dtype_bytes(t->dtype)
                                : t->n_bytes;

    buf_puts(h, h->len > 1 ? ",\"" : "\"");
    buf_json_escape(h, output_name(o), strlen(output_name(o)));
    add_shape(h, norm ? "F32" : t->stored_type, o);
    buf_printf(h, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", *at, *at + n_bytes);
    *at += n_bytes;
}

static int write_header(struct conversion *k, struct err *e)
{
    struct buf h;
    int64_t at = 0;

    buf_init(&h, LIMIT_SAFETENSORS_HEADER_BYTES);
    buf_putc(&h, '{');
    for (int32_t i = 0; i < k->n_outputs; i++) {
        const struct output *o = &k->output[i];
        (o->linear ? add_quantised : add_plain)(k, &h, o, &at);
    }
    buf_putc(&h, '}');
    while (h.len % 8 != 0 && !h.failed) {
        buf_putc(&h, ' ');
    }
    uint64_t n = h.len;
    int rc = h.failed ? err_nomem(e, "the header")
             : fwrite(&n, sizeof(n), 1, k->out) != 1 || fwrite(h.data, 1, h.len, k->out) != h.len
                 ? quantise_failed(k, QUANTISE_WEIGHTS, e)
                 : 0;
    buf_release(&h);
    return rc;
}

/* ---- the weights ---- */

/* Row r with the factors of its columns and, where it makes a product's input, of
 * itself. */
static void load_row(const struct conversion *k, const struct output *o, int64_t r, float *ret)
{
    const float *s = conversion_factors(k, o->layer, o->product),
                *made = conversion_factors(k, o->layer, o->makes);

    fold_load_row(&o->view, r, ret);
    for (int64_t i = 0; i < o->view.cols && s; i++) {
        ret[i] *= s[i];
    }
    if (made && r >= o->up_from) {
        for (int64_t i = 0; i < o->view.cols; i++) {
            ret[i] /= made[r - o->up_from];
        }
    }
}

/* The weights of a norm, divided by the factors of the columns that it makes: float32,
 * of values that the norm's own type holds too where factors are powers of two, else
 * bfloat16 (fold_round_factors). */
static int write_norm(struct conversion *k, const struct output *o, const float *s, struct err *e)
{
    size_t n = (size_t)o->t->dim[0];
    float offset = k->config.norm_offset, *row = malloc(n * sizeof(*row));

    if (!row) {
        return err_nomem(e, o->t->name);
    }
    fold_load_vector(o->t, row);
    for (size_t i = 0; i < n; i++) {
        row[i] =
            product_is_routed(o->product) ? row[i] / s[i] : fold_norm_weight(row[i], offset, s[i]);
    }
    int rc =
        fwrite(row, sizeof(*row), n, k->out) == n ? 0 : quantise_failed(k, QUANTISE_WEIGHTS, e);
    free(row);
    return rc;
}

/* What the scales of nvfp4 are multiplied with so that the greatest of them is the
 * greatest e4m3, and at most the greatest float; `row` has room for one. */
static float over_of(const struct conversion *k, const struct output *o, float *row)
{
    float most = 0;

    for (int64_t r = 0; r < o->view.rows; r++) {
        load_row(k, o, r, row);
        for (int64_t i = 0; i < o->view.cols; i++) {
            most = fmaxf(most, fabsf(row[i]));
        }
    }
    return isnormal(most) ? fminf(448.0f * 6 / most, FLT_MAX) : 1;
}

/* scale[n] of FORMAT_FP4, a byte each, and the one over them. */
static bool write_fp4_scales(FILE *out, const float *scale, size_t n, const struct rounding *how)
{
    bool done = true;

    for (size_t i = 0; i < n && done; i++) {
        uint8_t code = how->over > 0 ? weight_e4m3_of(scale[i] * how->over)
                                     : (uint8_t)(ilogbf(scale[i]) + 127);
        done = fputc(code, out) != EOF;
    }
    return done && (how->over == 0 || fwrite(&how->over, sizeof(how->over), 1, out) == 1);
}

/* zero[rows, groups] of FORMAT_INT4: those of eight rows in a word, the first one
 * lowest. */
static bool write_packed_zeros(FILE *out, const uint8_t *zero, size_t rows, size_t groups)
{
    for (size_t first = 0; first < rows; first += 8) {
        for (size_t g = 0; g < groups; g++) {
            uint32_t word = 0;
            for (size_t r = first; r < MIN(first + 8, rows); r++) {
                word |= (uint32_t)zero[r * groups + g] << 4 * (r - first);
            }
            if (fwrite(&word, sizeof(word), 1, out) != 1) {
                return false;
            }
        }
    }
    return true;
}

/* What a weight has behind its codes: scale[rows, groups] and zero[rows, groups], and
 * the scale of its input. */
static bool write_parts(const struct conversion *k, const struct output *o, const float *scale,
                        const uint8_t *zero, const struct rounding *how)
{
    size_t rows = (size_t)o->view.rows, groups = (size_t)n_groups(k, &o->view), n = rows * groups;
    const int64_t shape[2] = {o->view.rows, o->view.cols};
    bool done = how->format == FORMAT_FP4 ? write_fp4_scales(k->out, scale, n, how)
                                          : fwrite(scale, sizeof(*scale), n, k->out) == n;

    if (done && how->format == FORMAT_INT4) {
        done = fwrite(shape, sizeof(*shape), 2, k->out) == 2;
    }
    if (done && k->input_scale) {
        const float *input = &k->input_scale[o->layer * k->per_layer + o->product];
        done = fwrite(input, sizeof(*input), 1, k->out) == 1;
    }
    if (!done || !how->zeros) {
        return done;
    }
    return how->format == FORMAT_INT4 ? write_packed_zeros(k->out, zero, rows, groups)
                                      : fwrite(zero, 1, n, k->out) == n;
}

/* *ret_error: the weight's, of the whole weight's size. */
static int write_quantised(struct conversion *k, const struct output *o, double *ret_error,
                           struct err *e)
{
    size_t rows = (size_t)o->view.rows, groups = (size_t)n_groups(k, &o->view);
    size_t row_bytes = (size_t)(o->view.cols * stored_as(k).bits / 8);
    struct rounding how = k->rounding;
    float *row = malloc((size_t)o->view.cols * sizeof(*row)),
          *scale = malloc(rows * groups * sizeof(*scale));
    uint8_t *codes = malloc(row_bytes), *zero = malloc(rows * groups);
    double sum[2] = {0};
    int rc = row && scale && codes && zero ? 0 : err_nomem(e, output_name(o));

    how.over = rc == 0 && quantise_nvfp4(k) ? over_of(k, o, row) : 0;
    for (size_t r = 0; r < rows && rc == 0; r++) {
        load_row(k, o, (int64_t)r, row);
        struct rounded_row to = {
            .codes = codes, .scale = scale + r * groups, .zero = zero + r * groups};
        round_row(&how, row, o->view.cols, &to, sum);
        rc = fwrite(codes, 1, row_bytes, k->out) == row_bytes
                 ? 0
                 : quantise_failed(k, QUANTISE_WEIGHTS, e);
    }
    if (rc == 0 && !write_parts(k, o, scale, zero, &how)) {
        rc = quantise_failed(k, QUANTISE_WEIGHTS, e);
    }
    if (rc == 0 && !isfinite(sum[0])) {
        rc = err_set(e, ERR_INVALID, "%s has values that are no numbers", output_name(o));
    }
    *ret_error = sum[1] > 0 ? sqrt(sum[0] / sum[1]) : 0;
    free(row);
    free(scale);
    free(codes);
    free(zero);
    return rc;
}

/* A router whose columns have factors, powers of two: in its own type its values stay
 * what they were, but for those near its least ones. */
static int write_product(struct conversion *k, const struct output *o, struct err *e)
{
    size_t cols = (size_t)o->view.cols, bytes = (size_t)dtype_bytes(o->t->dtype);
    float *row = malloc(cols * sizeof(*row));
    void *stored = malloc(cols * bytes);
    int rc = row && stored ? 0 : err_nomem(e, output_name(o));

    for (int64_t r = 0; r < o->view.rows && rc == 0; r++) {
        load_row(k, o, r, row);
        tensor_store(stored, o->t->dtype, 0, 1, row, o->view.cols);
        rc = fwrite(stored, bytes, cols, k->out) == cols ? 0
                                                         : quantise_failed(k, QUANTISE_WEIGHTS, e);
    }
    free(row);
    free(stored);
    return rc;
}

/* A vector, some values of a tensor. */
static int write_part(struct conversion *k, const struct output *o, struct err *e)
{
    size_t bytes = (size_t)dtype_bytes(o->t->dtype);
    bool done = true;

    for (int64_t i = 0; i < o->view.rows && done; i++) {
        size_t at = (size_t)(o->view.first + i * o->view.row_step);
        done = fwrite((const char *)o->t->data + at * bytes, bytes, 1, k->out) == 1;
    }
    return done ? 0 : quantise_failed(k, QUANTISE_WEIGHTS, e);
}

static int write_plain(struct conversion *k, const struct output *o, struct err *e)
{
    const struct tensor *t = o->t;
    const float *s = norm_factors(k, o);

    if (s) {
        return write_norm(k, o, s, e);
    }
    if (o->part) {
        return write_part(k, o, e);
    }
    if (o->product_alone && conversion_factors(k, o->layer, o->product)) {
        return write_product(k, o, e);
    }
    bool done = fwrite(t->data, 1, (size_t)t->n_bytes, k->out) == (size_t)t->n_bytes;
    return done ? 0 : quantise_failed(k, QUANTISE_WEIGHTS, e);
}

int quantise_write_weights(struct conversion *k, struct err *e)
{
    int32_t n = 0;
    double all = 0;
    int rc = write_header(k, e);

    for (int32_t i = 0; i < k->n_outputs && rc == 0; i++) {
        const struct output *o = &k->output[i];
        double error;
        if (!o->linear) {
            rc = write_plain(k, o, e);
            continue;
        }
        rc = write_quantised(k, o, &error, e);
        if (rc == 0) {
            fprintf(k->report, "%-60s %.3e\n", output_name(o), error);
            all += error;
            n++;
        }
    }
    if (rc == 0) {
        fprintf(k->report, "%d weights, mean %.3e\n", n, n > 0 ? all / n : 0);
    }
    return rc;
}
