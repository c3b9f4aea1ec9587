/* Finding the quantised weights of a checkpoint, and their codes and values (see
 * quantised.h). */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/quantised/quantised_internal.h"

void quant_tensor_free(struct quant_tensor *q)
{
    if (!q) {
        return;
    }
    free(q->column_group);
    free(q->owned[0]);
    free(q->owned[1]);
    free(q);
}

/* ---- codes and values ---- */

/* Words of GPTQ become rows: a word of [in / n][out] is the four bytes of n neighbours
 * in a row. */
static void from_gptq(const struct quant_tensor *q, uint8_t *ret)
{
    int64_t n = 32 / q->format->bits, words = q->cols / n;
    uint32_t flip = q->format->bits == 8 ? 0x80808080u : 0;

    for (int64_t w = 0; w < words; w++) {
        const char *from = (const char *)q->codes + 4 * w * q->rows;
        for (int64_t r = 0; r < q->rows; r++) {
            uint32_t word;
            memcpy(&word, from + 4 * r, sizeof(word));
            word ^= flip;
            memcpy(ret + 4 * (r * words + w), &word, sizeof(word));
        }
    }
}

/* Words of AWQ, [in][out / 8], become rows: two inputs make a byte of each of 8
 * rows. */
static void from_awq(const struct quant_tensor *q, uint8_t *ret)
{
    static const uint8_t ROW[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    int64_t words = q->rows / 8, row_bytes = q->stride / 2;
    uint32_t low, high;

    for (int64_t i = 0; i < q->cols; i += 2) {
        for (int64_t w = 0; w < words; w++) {
            const char *at = (const char *)q->codes + 4 * (i * words + w);
            memcpy(&low, at, sizeof(low));
            high = 0;
            if (i + 1 < q->cols) {
                memcpy(&high, at + 4 * words, sizeof(high));
            }
            for (int32_t k = 0; k < 8; k++) {
                ret[(8 * w + ROW[k]) * row_bytes + i / 2] =
                    (uint8_t)((low >> 4 * k & 15) | (high >> 4 * k & 15) << 4);
            }
        }
    }
}

const uint8_t *quant_tensor_codes(const struct quant_tensor *q, void **ret_copy)
{
    if (q->layout == CODES_ROWS) {
        return q->codes;
    }
    int64_t n_bytes = weight_format_bytes(q->format, q->rows * q->stride);
    uint8_t *copy = calloc(1, (size_t)n_bytes);
    *ret_copy = copy;
    if (!copy) {
        return NULL;
    }
    if (q->layout == CODES_GPTQ) {
        from_gptq(q, copy);
    } else if (q->layout == CODES_AWQ) {
        from_awq(q, copy);
    } else {
        for (int64_t i = 0; i < n_bytes; i++) {
            copy[i] = ((const uint8_t *)q->codes)[i] ^ 0x80;
        }
    }
    return copy;
}

/* Row r, whose codes are at `codes`, as floats. */
static void decode_row(const struct quant_tensor *q, const uint8_t *codes, int64_t r, float *ret)
{
    const struct weight_scales *s = &q->scales;
    struct weight_scales one = *s;

    if (!q->column_group) {
        weight_scales_decode(q->format, s, codes, r, q->cols, ret);
        return;
    }
    one.group_rows = one.group_cols = 0;
    int64_t i_row = s->group_rows > 0 ? r / s->group_rows : 0;
    for (int64_t i = 0; i < q->cols; i++) { /* each column with the scale of its group */
        uint8_t code = q->format->bits == 8 ? codes[i] : codes[i / 2] >> i % 2 * 4 & 15;
        one.data = (const char *)s->data +
                   (i_row * s->stride + q->column_group[i]) * scale_type_bytes(s->type);
        one.zero = s->zero ? s->zero + i_row * s->zero_stride + q->column_group[i] : NULL;
        weight_scales_decode(q->format, &one, &code, 0, 1, &ret[i]);
    }
}

/* The scales as floats, divided by q->divisor; the caller's. NULL: out of memory. */
static float *divided_scales(const struct quant_tensor *q)
{
    int64_t n = quant_row_groups(q) * quant_col_groups(q);
    float *ret = malloc((size_t)MAX(n, 1) * sizeof(*ret));

    for (int64_t i = 0; ret && i < n; i++) {
        ret[i] = weight_scale_load(&q->scales, i) / q->divisor;
    }
    return ret;
}

/* As quant_tensor_decode, by q->scales alone. */
static int decode(const struct quant_tensor *q, enum dtype dtype, void *ret)
{
    void *copy = NULL;
    const uint8_t *codes = quant_tensor_codes(q, &copy);
    float *row = malloc((size_t)MAX(q->cols, 1) * sizeof(*row));
    if (!codes || !row) {
        free(copy);
        free(row);
        return ERR_NOMEM;
    }
    for (int64_t r = 0; r < q->rows; r++) {
        decode_row(q, codes + weight_format_bytes(q->format, r * q->stride), r, row);
        tensor_store(ret, dtype, r * q->cols, 1, row, q->cols);
    }
    free(copy);
    free(row);
    return 0;
}

int quant_tensor_decode_one(const struct quant_tensor *q, int32_t i, enum dtype dtype, void *ret)
{
    int64_t rows = q->rows / q->n_stacked;
    float *row = malloc((size_t)MAX(q->cols, 1) * sizeof(*row));

    if (!row) {
        return ERR_NOMEM;
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = i * rows + r;
        decode_row(q, (const uint8_t *)q->codes + weight_format_bytes(q->format, at * q->stride),
                   at, row);
        tensor_store(ret, dtype, r, rows, row, q->cols);
    }
    free(row);
    return 0;
}

static int decode_stacked(const struct quant_tensor *q, enum dtype dtype, void *ret)
{
    int64_t n_bytes = q->rows / q->n_stacked * q->cols * dtype_bytes(dtype);
    int rc = 0;

    for (int32_t i = 0; i < q->n_stacked && rc == 0; i++) {
        rc = quant_tensor_decode_one(q, i, dtype, (char *)ret + i * n_bytes);
    }
    return rc;
}

int quant_tensor_decode(const struct quant_tensor *q, enum dtype dtype, void *ret)
{
    struct quant_tensor exact = *q;

    if (q->n_stacked > 1) {
        return decode_stacked(q, dtype, ret);
    }
    if (q->divisor == 0) {
        return decode(q, dtype, ret);
    }
    float *scales = divided_scales(q);
    if (!scales) {
        return ERR_NOMEM;
    }
    exact.scales.data = scales;
    exact.scales.type = SCALE_F32;
    exact.scales.factor = 1;
    int rc = decode(&exact, dtype, ret);
    free(scales);
    return rc;
}

/* ---- finding them ---- */

/* How the names of codes end, and what makes a weight of them. */
static const struct kind {
    const char *suffix;
    const char *types;  /* " F8_E4M3 " of the codes, each between spaces; NULL: any */
    const char *weight; /* the end of the weight's name in place of the suffix */
    int (*make)(struct quant_assembly *a, struct err *e);
} KINDS[] = {
    {".weight_packed", NULL, ".weight", quant_compressed},
    {".weight", " F8_E4M3 F8_E5M2 I8 U8 ", ".weight", quant_compressed},
    {".qweight", NULL, ".weight", quant_transposed},
    {"_blocks", NULL, "", quant_experts},
};

static bool belongs(const struct kind *k, enum quant_method m)
{
    bool transposed = m == QUANT_GPTQ || m == QUANT_AWQ;

    return m == QUANT_MXFP4 ? k->make == quant_experts
           : transposed     ? k->make == quant_transposed
                            : k->make == quant_compressed;
}

static const struct kind *kind_of(const struct tensor *t, enum quant_method m)
{
    size_t len = strlen(t->name);
    char type[16];

    snprintf(type, sizeof(type), " %s ", t->stored_type);
    for (size_t i = 0; i < ARRAY_LEN(KINDS); i++) {
        const struct kind *k = &KINDS[i];
        size_t n = strlen(k->suffix);
        if (belongs(k, m) && len > n && strcmp(t->name + len - n, k->suffix) == 0 &&
            (!k->types || strstr(k->types, type))) {
            return k;
        }
    }
    return NULL;
}

/* The weight as a tensor of the checkpoint: in place of its codes if they have its
 * name, else a new one. */
static int add_weight(struct quant_assembly *a, const char *name, enum dtype dtype, struct err *e)
{
    struct quant_tensor *q = a->q;
    int64_t each = q->rows / q->n_stacked;
    struct tensor t = {.name = name,
                       .stored_type = q->format->name,
                       .usable = true,
                       .dtype = dtype,
                       .n_dims = q->n_stacked > 1 ? 3 : 2,
                       .dim = {q->rows, q->cols},
                       .format = q->format,
                       .quantised = q};

    if (q->n_stacked > 1) {
        memcpy(t.dim, (const int64_t[]){q->n_stacked, q->cols, each}, 3 * sizeof(*t.dim));
    }
    if (q->rows > INT32_MAX || q->cols > INT32_MAX ||
        __builtin_mul_overflow(q->rows * q->cols, dtype_bytes(dtype), &t.n_bytes)) {
        return err_set(e, ERR_INVALID, "%.200s has too many values", name);
    }
    const struct tensor *before = checkpoint_find(a->c, name);
    if (before && before->part && before->data == q->codes) {
        struct tensor *to = &a->c->tensor[before - a->c->tensor];
        t.name = to->name;
        *to = t;
        return 0;
    }
    return checkpoint_add(a->c, &t, e);
}

/* ERR_INVALID where a code could be a value that float32 does not have. */
static int check_greatest(const struct quant_assembly *a, struct err *e)
{
    const struct quant_tensor *q = a->q;
    double most = q->format->id == FORMAT_FP8    ? 448
                  : q->format->id == FORMAT_INT8 ? 255 /* with a zero point */
                  : q->format->id == FORMAT_INT4 ? 15
                                                 : 6;
    double factor = q->divisor > 0 ? 1 / (double)q->divisor : (double)q->scales.factor;
    double greatest = most * factor * (double)a->most_scale;

    if (greatest > (double)FLT_MAX || factor > (double)FLT_MAX) {
        return err_set(e, ERR_INVALID, "%.200s: its scales make values up to %g", a->module,
                       MAX(greatest, factor));
    }
    return 0;
}

static int make_weight(struct checkpoint *c, const struct quant_config *config,
                       const struct tensor *codes, const struct kind *k, enum dtype dtype,
                       struct err *e)
{
    char module[512], name[512];
    int len = (int)(strlen(codes->name) - strlen(k->suffix));
    struct quant_assembly a = {.c = c, .config = config, .module = module};

    if (len >= 400) {
        return err_set(e, ERR_INVALID, "%.200s: the name is too long", codes->name);
    }
    snprintf(module, sizeof(module), "%.*s", len, codes->name);
    snprintf(name, sizeof(name), "%s%s", module, k->weight);
    int rc = quant_config_scheme_of(config, module, codes->stored_type, &a.scheme, e);
    if (rc < 0) {
        return rc;
    }
    a.q = calloc(1, sizeof(*a.q));
    if (!a.q) {
        return err_nomem(e, name);
    }
    a.q->format = weight_format_of(a.scheme.format);
    a.q->n_stacked = 1;
    a.q->scales.group_rows = a.scheme.group_rows;
    a.q->scales.group_cols = a.scheme.group_cols;
    a.q->scales.act = a.scheme.act;
    rc = k->make(&a, e);
    rc = rc < 0 ? rc : check_greatest(&a, e);
    rc = rc < 0 ? rc : add_weight(&a, name, dtype, e);
    if (rc < 0) {
        quant_tensor_free(a.q);
    }
    return rc;
}

static bool ends_with(const char *name, const char *end)
{
    size_t len = strlen(name), n = strlen(end);

    return len > n && strcmp(name + len - n, end) == 0;
}

/* Scales of the key/value cache and of what is not quantised here. */
static void set_cache_scales_aside(struct checkpoint *c)
{
    static const char *const ENDS[] = {".k_scale", ".v_scale",    ".kv_scale",
                                       ".q_scale", ".prob_scale", ".output_scale"};

    for (int32_t i = 0; i < c->n_tensors; i++) {
        for (size_t k = 0; k < ARRAY_LEN(ENDS); k++) {
            c->tensor[i].part |= ends_with(c->tensor[i].name, ENDS[k]);
        }
    }
}

int checkpoint_add_quantised(struct checkpoint *c, const struct quant_config *config,
                             enum dtype dtype, struct err *e)
{
    int32_t n = c->n_tensors, n_made = 0;
    int rc = 0;

    for (int32_t i = 0; i < n && rc == 0; i++) {
        const struct kind *k = c->tensor[i].part ? NULL : kind_of(&c->tensor[i], config->method);
        if (k) {
            rc = make_weight(c, config, &c->tensor[i], k, dtype, e);
            n_made++;
        }
    }
    set_cache_scales_aside(c);
    return rc < 0 || n_made > 0
               ? rc
               : err_set(e, ERR_INVALID, "quantization_config says %s, but no weight is stored so",
                         quant_method_name(config->method));
}

/* ERR_INVALID: there are parts of quantised weights. Without a configuration nothing
 * tells what codes mean, and the parts would be reported as unknown weights. */
static int check_not_quantised(const struct checkpoint *c, struct err *e)
{
    static const char *const ENDS[] = {".weight_packed", ".qweight", ".weight_scale",
                                       ".weight_scale_inv"};

    for (int32_t i = 0; i < c->n_tensors; i++) {
        for (size_t k = 0; k < ARRAY_LEN(ENDS); k++) {
            if (ends_with(c->tensor[i].name, ENDS[k])) {
                return err_set(e, ERR_INVALID,
                               "%.200s is part of a quantised weight, but config.json has no "
                               "quantization_config, nor is there a hf_quant_config.json",
                               c->tensor[i].name);
            }
        }
    }
    return 0;
}

static int read_config(struct quant_config *ret, bool *ret_found, const char *dir, struct err *e)
{
    static const char CONFIG[] = "config.json", MODELOPT[] = "hf_quant_config.json";
    char *text;
    size_t len;
    int rc = model_file_read(dir, CONFIG, LIMIT_CONFIG_JSON_BYTES, &text, &len, e);

    if (rc < 0) {
        return rc;
    }
    rc = quant_config_parse(ret, ret_found, text, len, e);
    free(text);
    if (rc < 0 || *ret_found || !model_file_exists(dir, MODELOPT)) {
        return rc;
    }
    rc = model_file_read(dir, MODELOPT, LIMIT_CONFIG_JSON_BYTES, &text, &len, e);
    if (rc == 0) {
        rc = quant_config_parse_modelopt(ret, text, len, e);
        free(text);
        *ret_found = rc == 0;
    }
    return rc;
}

/* Whether a code times its scale is below the greatest F16, for every scale. */
static bool fits_f16(const struct quant_tensor *q)
{
    const struct weight_scales *s = &q->scales;
    int64_t n = quant_row_groups(q) * quant_col_groups(q);
    float steps = (float)(1 << q->format->bits);
    bool fits = true;

    for (int64_t i = 0; i < n && fits; i++) {
        fits = fabsf(weight_scale_load(s, i)) * s->factor * steps < 65504;
    }
    return fits;
}

void checkpoint_decode_finer(struct checkpoint *c)
{
    for (int32_t i = 0; i < c->n_tensors; i++) {
        struct tensor *t = &c->tensor[i];
        if (t->quantised && t->quantised->column_group && t->dtype == DTYPE_BF16 &&
            fits_f16(t->quantised)) {
            t->dtype = DTYPE_F16; /* as many bytes */
        }
    }
}

int checkpoint_expert_format(const struct weight_format **ret, const char *dir, struct err *e)
{
    struct quant_config config;
    bool found = false;
    int rc = read_config(&config, &found, dir, e);

    if (rc < 0) {
        return rc;
    }
    *ret = found && config.method == QUANT_MXFP4 ? weight_format_of(FORMAT_FP4) : NULL;
    if (found) {
        quant_config_release(&config);
    }
    return 0;
}

int checkpoint_read_quantised(struct checkpoint *c, const char *dir, enum dtype dtype,
                              struct err *e)
{
    struct quant_config config;
    bool found = false;
    int rc = read_config(&config, &found, dir, e);

    if (rc < 0 || !found) {
        return rc < 0 ? rc : check_not_quantised(c, e);
    }
    rc = checkpoint_add_quantised(c, &config, dtype, e);
    quant_config_release(&config);
    return rc;
}
