/* A config.json, or ModelOpt's hf_quant_config.json, and after a NUL byte the
 * safetensors file that it is about. covers: models/checkpoint/quantised/quant_config.c
 * models/checkpoint/quantised/quant_names.c models/checkpoint/quantised/quantised.c
 * models/checkpoint/quantised/parts.c models/checkpoint/quantised/compressed.c
 * models/checkpoint/quantised/transposed.c kernels/weight_scales.c */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/quantised/quantised.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A backend reads the codes and scales of all rows: numbers, if their check says so. */
static void read_codes(const struct tensor *t)
{
    const struct quant_tensor *q = t->quantised;
    void *copy = NULL;
    const uint8_t *codes = quant_tensor_codes(q, &copy);
    float *row = malloc((size_t)MAX(q->cols, 1) * sizeof(*row));
    struct err e;
    bool numbers = codes && tensor_check(t, codes, q->rows, q->cols, q->stride, &e) == 0;

    for (int64_t r = 0; r < q->rows && codes && row; r++) {
        weight_scales_decode(q->format, &q->scales,
                             codes + weight_format_bytes(q->format, r * q->stride), r, q->cols,
                             row);
        for (int64_t i = 0; i < q->cols; i++) {
            if (numbers && isnan(row[i])) {
                __builtin_trap();
            }
        }
    }
    free(row);
    free(copy);
}

/* What is accepted has as many values as it says, and its scales are numbers. */
static void check(const struct checkpoint *c)
{
    for (int32_t i = 0; i < checkpoint_count(c); i++) {
        const struct tensor *t = checkpoint_at(c, i);
        const struct quant_tensor *q = t->quantised;
        if (!q) {
            continue;
        }
        if (t->part || !t->usable || q->rows * q->cols * dtype_bytes(t->dtype) != t->n_bytes ||
            !isfinite(q->scales.factor) || checkpoint_find(c, t->name) != t) {
            __builtin_trap();
        }
        void *values = t->n_bytes <= 1 << 20 ? malloc((size_t)t->n_bytes) : NULL;
        if (values) {
            tensor_decode(t, values);
            if (!q->column_group) {
                read_codes(t);
            }
        }
        free(values);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *nul = size > 0 ? memchr(data, 0, size) : NULL;
    struct quant_config q;
    struct checkpoint *c;
    struct err e = {0};
    bool found;

    if (!nul) {
        return 0;
    }
    int rc = quant_config_parse(&q, &found, (const char *)data, (size_t)(nul - data), &e);
    if (rc == 0 && !found) { /* as of a directory with both files */
        rc = quant_config_parse_modelopt(&q, (const char *)data, (size_t)(nul - data), &e);
        found = rc == 0;
    }
    if (rc < 0 && (e.code >= 0 || e.text[0] == '\0')) {
        __builtin_trap(); /* a refusal without its sentence */
    }
    if (rc < 0 || !found) {
        return 0;
    }
    if (checkpoint_new(&c, &e) == 0) {
        rc = safetensors_parse(c, nul + 1, size - (size_t)(nul - data) - 1, "fuzz", &e);
        rc = rc < 0 ? rc : checkpoint_add_quantised(c, &q, DTYPE_F32, &e);
        if (rc == 0) {
            check(c);
        } else if (e.code >= 0 || e.text[0] == '\0') {
            __builtin_trap();
        }
        checkpoint_free(c);
    }
    quant_config_release(&q);
    return 0;
}
