/* Writing a directory of quantised weights (see quantise.h).
 *
 * The header of the new file is made first, from the sizes alone; then the tensors are
 * read, rounded and written one by one, so that memory holds one row and the scales of
 * one weight. What a failure leaves behind does not load: its weights are cut short.
 * / */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "config/base/buf.h"
#include "config/base/limits.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/quantised/quantised.h"
#include "models/families/layers.h"
#include "models/quantise/quantise.h"

static const char CONFIG[] = "config.json", WEIGHTS[] = "model.safetensors";

/* Files that are copied where they exist. */
static const char *const COPIED[] = {"generation_config.json",
                                     "tokenizer.json",
                                     "tokenizer.model",
                                     "vocab.json",
                                     "merges.txt",
                                     "tokenizer_config.json",
                                     "special_tokens_map.json",
                                     "chat_template.jinja"};

struct conversion {
    const char *from, *to; /* directories */
    struct rounding rounding;
    struct model_config config;
    struct checkpoint *c;
    bool *linear; /* [tensors of c] to be quantised; owned */
    FILE *out;    /* WEIGHTS of `to` */
    FILE *report;
};

static int failed(const struct conversion *k, const char *name, struct err *e)
{
    return err_set(e, ERR_IO, "%s/%s: %s", k->to, name, strerror(errno));
}

/* ---- which weights ---- */

/* Weights of products in layers, as the family's table has them. */
static bool is_linear(const struct tensor_spec *s)
{
    return s->kind == WEIGHT_LINEAR && s->cols != DIM_ONE && !s->transposed &&
           tensor_spec_indices(s) == 1 && !tensor_spec_stacked(s) && s->rows != DIM_EXPERTS &&
           s->rows != DIM_ONE && s->rows != DIM_K_UP && s->rows != DIM_V_UP;
}

/* Returns their number. */
static int32_t mark_linear(struct conversion *k, const struct model_family *f)
{
    int32_t n = 0;

    for (const struct tensor_spec *s = f->tensors; s->name; s++) {
        for (int32_t i = 0; i < k->config.n_layers && is_linear(s); i++) {
            const struct tensor *t = tensor_spec_find(s, k->c, (struct tensor_index){i, -1});
            if (t && tensor_spec_wanted(s, &k->config, i)) {
                k->linear[t - checkpoint_at(k->c, 0)] = true;
                n++;
            }
        }
    }
    return n;
}

/* The largest group that divides the columns of all linear weights. ERR_UNSUPPORTED: 32
 * does not. */
static int choose_group(struct conversion *k, struct err *e)
{
    int32_t group = k->rounding.format == FORMAT_INT4 ? 128 : 0;

    for (int32_t i = 0; i < checkpoint_count(k->c) && group > 0; i++) {
        const struct tensor *t = checkpoint_at(k->c, i);
        while (k->linear[i] && t->dim[1] % group != 0) {
            group /= 2;
            if (group < 32) {
                return err_set(e, ERR_UNSUPPORTED,
                               "%s has %" PRId64 " columns, which are no groups of 32", t->name,
                               t->dim[1]);
            }
        }
    }
    k->rounding.group = group;
    return 0;
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

/* As it is; its type is one of the floats, or one that no layer needs. */
static void add_plain(struct buf *h, const struct tensor *t, int64_t *at)
{
    buf_puts(h, h->len > 1 ? ",\"" : "\"");
    buf_json_escape(h, t->name, strlen(t->name));
    buf_printf(h, "\":{\"dtype\":\"%s\",\"shape\":[", t->stored_type);
    for (int32_t i = 0; i < t->n_dims; i++) {
        buf_printf(h, "%s%" PRId64, i > 0 ? "," : "", t->dim[i]);
    }
    buf_printf(h, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", *at, *at + t->n_bytes);
    *at += t->n_bytes;
}

static int write_header(struct conversion *k, struct err *e)
{
    struct buf h;
    int64_t at = 0;

    buf_init(&h, LIMIT_SAFETENSORS_HEADER_BYTES);
    buf_putc(&h, '{');
    for (int32_t i = 0; i < checkpoint_count(k->c); i++) {
        const struct tensor *t = checkpoint_at(k->c, i);
        if (k->linear[i]) {
            add_quantised(k, &h, t, &at);
        } else {
            add_plain(&h, t, &at);
        }
    }
    buf_putc(&h, '}');
    while (h.len % 8 != 0 && !h.failed) {
        buf_putc(&h, ' ');
    }
    uint64_t n = h.len;
    int rc = h.failed ? err_nomem(e, "the header")
             : fwrite(&n, sizeof(n), 1, k->out) != 1 || fwrite(h.data, 1, h.len, k->out) != h.len
                 ? failed(k, WEIGHTS, e)
                 : 0;
    buf_release(&h);
    return rc;
}

/* ---- the weights ---- */

static void load_row(const struct tensor *t, int64_t row, float *ret)
{
    struct weight_scales values = {.data = t->data,
                                   .type = t->dtype == DTYPE_F32   ? SCALE_F32
                                           : t->dtype == DTYPE_F16 ? SCALE_F16
                                                                   : SCALE_BF16};

    for (int64_t i = 0; i < t->dim[1]; i++) {
        ret[i] = weight_scale_load(&values, row * t->dim[1] + i);
    }
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
        load_row(t, (int64_t)r, row);
        round_row(&k->rounding, row, t->dim[1], codes, scale + r * groups, sum);
        rc = fwrite(codes, 1, row_bytes, k->out) == row_bytes ? 0 : failed(k, WEIGHTS, e);
    }
    if (rc == 0 && fwrite(scale, sizeof(*scale), rows * groups, k->out) != rows * groups) {
        rc = failed(k, WEIGHTS, e);
    }
    if (rc == 0 && k->rounding.format == FORMAT_INT4 && fwrite(t->dim, 8, 2, k->out) != 2) {
        rc = failed(k, WEIGHTS, e);
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

static int write_weights(struct conversion *k, struct err *e)
{
    int32_t n = 0;
    double all = 0;
    int rc = write_header(k, e);

    for (int32_t i = 0; i < checkpoint_count(k->c) && rc == 0; i++) {
        const struct tensor *t = checkpoint_at(k->c, i);
        double error;
        if (!k->linear[i]) {
            bool done = fwrite(t->data, 1, (size_t)t->n_bytes, k->out) == (size_t)t->n_bytes;
            rc = done ? 0 : failed(k, WEIGHTS, e);
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

/* ---- the other files ---- */

static FILE *create(const struct conversion *k, const char *name, struct err *e)
{
    char path[4096];

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", k->to, name) >= sizeof(path)) {
        errno = ENAMETOOLONG;
        failed(k, name, e);
        return NULL;
    }
    FILE *f = fopen(path, "wxe");
    if (!f) {
        failed(k, name, e);
    }
    return f;
}

static int write_file(const struct conversion *k, const char *name, const char *text, size_t len,
                      struct err *e)
{
    FILE *f = create(k, name, e);

    if (!f) {
        return ERR_IO;
    }
    bool done = fwrite(text, 1, len, f) == len;
    done = fclose(f) == 0 && done;
    return done ? 0 : failed(k, name, e);
}

static int copy_files(const struct conversion *k, struct err *e)
{
    int rc = 0;

    for (size_t i = 0; i < ARRAY_LEN(COPIED) && rc == 0; i++) {
        char *text;
        size_t len;
        if (model_file_exists(k->from, COPIED[i])) {
            rc = model_file_read(k->from, COPIED[i], (size_t)256 << 20, &text, &len, e);
            if (rc == 0) {
                rc = write_file(k, COPIED[i], text, len, e);
                free(text);
            }
        }
    }
    return rc;
}

/* The member that compressed-tensors reads. */
static void print_quantization(const struct conversion *k, struct buf *b)
{
    bool floats = k->rounding.format == FORMAT_FP8, packed = k->rounding.format == FORMAT_INT4;
    const char *type = floats ? "float" : "int";

    buf_printf(b,
               ",\n  \"quantization_config\": {\"quant_method\": \"compressed-tensors\", "
               "\"format\": \"%s-quantized\", \"quantization_status\": \"compressed\", "
               "\"ignore\": [\"lm_head\"], \"config_groups\": {\"group_0\": {\"targets\": "
               "[\"Linear\"], \"weights\": {\"num_bits\": %d, \"type\": \"%s\", \"symmetric\": "
               "true, \"dynamic\": false, ",
               packed ? "pack" : type, packed ? 4 : 8, type);
    if (packed) {
        buf_printf(b, "\"strategy\": \"group\", \"group_size\": %d}}}}", k->rounding.group);
    } else {
        buf_printf(b,
                   "\"strategy\": \"channel\"}, \"input_activations\": {\"num_bits\": 8, \"type\": "
                   "\"%s\", \"strategy\": \"token\", \"symmetric\": true, \"dynamic\": true}}}}",
                   type);
    }
}

/* config.json, which was read as JSON before, with one member more. */
static int write_config(const struct conversion *k, struct err *e)
{
    struct quant_config before;
    struct buf b;
    char *text;
    size_t len;
    bool found = false;
    int rc = model_file_read(k->from, CONFIG, LIMIT_CONFIG_JSON_BYTES, &text, &len, e);

    if (rc < 0) {
        return rc;
    }
    rc = quant_config_parse(&before, &found, text, len, e);
    if (rc == 0 && found) {
        quant_config_release(&before);
        rc = err_set(e, ERR_INVALID, "%s is quantised already", k->from);
    }
    const char *end = rc == 0 ? memrchr(text, '}', len) : NULL;
    buf_init(&b, 2 * LIMIT_CONFIG_JSON_BYTES);
    if (end) {
        while (end > text && strchr(" \t\r\n", end[-1])) {
            end--;
        }
        buf_append(&b, text, (size_t)(end - text));
        print_quantization(k, &b);
        buf_puts(&b, "\n}\n");
        rc = b.failed ? err_nomem(e, CONFIG) : write_file(k, CONFIG, b.data, b.len, e);
    }
    buf_release(&b);
    free(text);
    return rc;
}

/* ---- all of it ---- */

static int convert(struct conversion *k, struct err *e)
{
    if (mkdir(k->to, 0777) != 0) {
        return err_set(e, ERR_IO, "%s: %s", k->to, strerror(errno));
    }
    int rc = write_config(k, e);
    rc = rc < 0 ? rc : copy_files(k, e);
    if (rc < 0) {
        return rc;
    }
    k->out = create(k, WEIGHTS, e);
    if (!k->out) {
        return ERR_IO;
    }
    rc = write_weights(k, e);
    bool closed = fclose(k->out) == 0;
    return rc < 0 || closed ? rc : failed(k, WEIGHTS, e);
}

int quantise_directory(const char *from, const char *to, enum weight_format_id format, FILE *report,
                       struct err *e)
{
    struct conversion k = {
        .from = from, .to = to, .rounding = {.format = format}, .report = report};
    const struct architecture *a;
    struct generation_defaults gen;

    if (gguf_is_file(from)) {
        return err_set(e, ERR_UNSUPPORTED, "%s is a GGUF file, a directory is needed", from);
    }
    int rc = model_config_read(&k.config, &gen, from, e);
    rc = rc < 0 ? rc : checkpoint_open(&k.c, from, e);
    if (rc < 0) {
        return rc;
    }
    const struct model_family *f = model_family_find(k.config.architecture, &a);
    k.linear = calloc((size_t)MAX(checkpoint_count(k.c), 1), sizeof(*k.linear));
    rc = !f          ? err_set(e, ERR_UNSUPPORTED, "architecture %s", k.config.architecture)
         : !k.linear ? err_nomem(e, from)
                     : transformer_check(f, &k.config, k.c, e);
    if (rc == 0 && (k.config.experts.n > 0 || mark_linear(&k, f) == 0)) {
        rc = err_set(e, ERR_UNSUPPORTED, "%s: models %s are not quantised", k.config.architecture,
                     k.config.experts.n > 0 ? "with experts" : "whose weights are transposed");
    }
    rc = rc < 0 ? rc : choose_group(&k, e);
    rc = rc < 0 ? rc : convert(&k, e);
    free(k.linear);
    checkpoint_free(k.c);
    return rc;
}
