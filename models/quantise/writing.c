/* The file of quantised weights (see quantise.h).
 *
 * Its header is made first, from the sizes alone; then the tensors are read, rounded
 * and written one by one, so that memory holds one row and the scales of one weight. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/buf.h"
#include "config/base/limits.h"
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

static int64_t n_groups(const struct conversion *k, const struct tensor *t)
{
    return k->rounding.group > 0 ? t->dim[1] / k->rounding.group : 1;
}

/* The codes of a row: int32 words of eight where there are four bits. */
static int64_t code_bytes(const struct conversion *k, const struct tensor *t)
{
    return k->rounding.format == FORMAT_INT4 ? t->dim[1] / 2 : t->dim[1];
}

static void add_quantised(const struct conversion *k, struct buf *h, const struct tensor *t,
                          int64_t *at)
{
    int32_t len = (int32_t)(strlen(t->name) - strlen("weight"));
    int64_t rows = t->dim[0], groups = n_groups(k, t);
    bool packed = k->rounding.format == FORMAT_INT4;

    add_entry(h, t->name, len, packed ? "weight_packed" : "weight",
              packed                              ? "I32"
              : k->rounding.format == FORMAT_INT8 ? "I8"
                                                  : "F8_E4M3",
              rows, packed ? t->dim[1] / 8 : t->dim[1], rows * code_bytes(k, t), at);
    add_entry(h, t->name, len, "weight_scale", "F32", rows, groups, rows * groups * 4, at);
    if (packed) {
        add_entry(h, t->name, len, "weight_shape", "I64", 2, 0, 16, at);
    }
}

/* The factors of a norm's columns; NULL: t is no such norm, or is left alone. */
static const float *norm_factors(const struct conversion *k, const struct tensor *t)
{
    const struct place *p = &k->place[t - checkpoint_at(k->c, 0)];

    return p->norm ? conversion_factors(k, p->layer, p->product) : NULL;
}

/* As it is; its type is one of the floats, or one that no layer needs. A norm with
 * factors becomes float32. */
static void add_plain(const struct conversion *k, struct buf *h, const struct tensor *t,
                      int64_t *at)
{
    bool norm = norm_factors(k, t);
    int64_t n_bytes = norm ? t->dim[0] * 4 : t->n_bytes;

    buf_puts(h, h->len > 1 ? ",\"" : "\"");
    buf_json_escape(h, t->name, strlen(t->name));
    buf_printf(h, "\":{\"dtype\":\"%s\",\"shape\":[", norm ? "F32" : t->stored_type);
    for (int32_t i = 0; i < t->n_dims; i++) {
        buf_printf(h, "%s%" PRId64, i > 0 ? "," : "", t->dim[i]);
    }
    buf_printf(h, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", *at, *at + n_bytes);
    *at += n_bytes;
}

static int write_header(struct conversion *k, struct err *e)
{
    struct buf h;
    int64_t at = 0;

    buf_init(&h, LIMIT_SAFETENSORS_HEADER_BYTES);
    buf_putc(&h, '{');
    for (int32_t i = 0; i < checkpoint_count(k->c); i++) {
        const struct tensor *t = checkpoint_at(k->c, i);
        if (k->place[i].linear) {
            add_quantised(k, &h, t, &at);
        } else {
            add_plain(k, &h, t, &at);
        }
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

/* Row r with the factors of its columns and, where it makes an input of down, of
 * itself. */
static void load_row(const struct conversion *k, const struct tensor *t, int64_t r, float *ret)
{
    const struct place *p = &k->place[t - checkpoint_at(k->c, 0)];
    const float *s = conversion_factors(k, p->layer, p->product),
                *down = conversion_factors(k, p->layer, PRODUCT_DOWN);

    fold_load_row(t, r, ret);
    for (int64_t i = 0; i < t->dim[1] && s; i++) {
        ret[i] *= s[i];
    }
    if (down && p->product == PRODUCT_UP && r >= p->up_from) {
        for (int64_t i = 0; i < t->dim[1]; i++) {
            ret[i] /= down[r - p->up_from];
        }
    }
}

/* The weights of a norm, divided by the factors of the columns that it makes: float32,
 * whose values bfloat16 holds too (fold_round_factors). */
static int write_norm(struct conversion *k, const struct tensor *t, const float *s, struct err *e)
{
    float offset = k->config.norm_offset, *row = malloc((size_t)t->dim[0] * sizeof(*row));

    if (!row) {
        return err_nomem(e, t->name);
    }
    fold_load_vector(t, row);
    for (int64_t i = 0; i < t->dim[0]; i++) {
        row[i] = fold_norm_weight(row[i], offset, s[i]);
    }
    size_t n = (size_t)t->dim[0];
    int rc =
        fwrite(row, sizeof(*row), n, k->out) == n ? 0 : quantise_failed(k, QUANTISE_WEIGHTS, e);
    free(row);
    return rc;
}

/* *ret_error: the weight's, of the whole weight's size. */
static int write_quantised(struct conversion *k, const struct tensor *t, double *ret_error,
                           struct err *e)
{
    size_t rows = (size_t)t->dim[0], groups = (size_t)n_groups(k, t);
    size_t row_bytes = (size_t)code_bytes(k, t);
    float *row = malloc((size_t)t->dim[1] * sizeof(*row)),
          *scale = malloc(rows * groups * sizeof(*scale));
    uint8_t *codes = malloc(row_bytes);
    double sum[2] = {0};
    int rc = row && scale && codes ? 0 : err_nomem(e, t->name);

    for (size_t r = 0; r < rows && rc == 0; r++) {
        load_row(k, t, (int64_t)r, row);
        round_row(&k->rounding, row, t->dim[1], codes, scale + r * groups, NULL, sum);
        rc = fwrite(codes, 1, row_bytes, k->out) == row_bytes
                 ? 0
                 : quantise_failed(k, QUANTISE_WEIGHTS, e);
    }
    if (rc == 0 && fwrite(scale, sizeof(*scale), rows * groups, k->out) != rows * groups) {
        rc = quantise_failed(k, QUANTISE_WEIGHTS, e);
    }
    if (rc == 0 && k->rounding.format == FORMAT_INT4 && fwrite(t->dim, 8, 2, k->out) != 2) {
        rc = quantise_failed(k, QUANTISE_WEIGHTS, e);
    }
    if (rc == 0 && !isfinite(sum[0])) {
        rc = err_set(e, ERR_INVALID, "%s has values that are no numbers", t->name);
    }
    *ret_error = sum[1] > 0 ? sqrt(sum[0] / sum[1]) : 0;
    free(row);
    free(scale);
    free(codes);
    return rc;
}

static int write_plain(struct conversion *k, const struct tensor *t, struct err *e)
{
    const float *s = norm_factors(k, t);

    if (s) {
        return write_norm(k, t, s, e);
    }
    bool done = fwrite(t->data, 1, (size_t)t->n_bytes, k->out) == (size_t)t->n_bytes;
    return done ? 0 : quantise_failed(k, QUANTISE_WEIGHTS, e);
}

int quantise_write_weights(struct conversion *k, struct err *e)
{
    int32_t n = 0;
    double all = 0;
    int rc = write_header(k, e);

    for (int32_t i = 0; i < checkpoint_count(k->c) && rc == 0; i++) {
        const struct tensor *t = checkpoint_at(k->c, i);
        double error;
        if (!k->place[i].linear) {
            rc = write_plain(k, t, e);
            continue;
        }
        rc = write_quantised(k, t, &error, e);
        if (rc == 0) {
            fprintf(k->report, "%-60s %.3e\n", t->name, error);
            all += error;
            n++;
        }
    }
    if (rc == 0) {
        fprintf(k->report, "%d weights, mean %.3e\n", n, n > 0 ? all / n : 0);
    }
    return rc;
}
