/* The scales of an fp8 key/value cache that a checkpoint brings: one for the keys and
 * one for the values of each layer, as compressed-tensors (self_attn.k_scale), vLLM
 * (self_attn.attn.k_scale) and ModelOpt (k_proj.k_scale, or qkv_proj.k_scale) name
 * them. Files of early fp8 models have one for both, self_attn.kv_scale. */
#include <math.h>
#include <string.h>

#include "models/checkpoint/weights.h"
#include "models/families/load/load.h"

static const struct tensor *find(const struct model *m, const char *const *names, size_t n,
                                 int32_t layer)
{
    const struct tensor *t = NULL;

    for (size_t i = 0; i < n && !t; i++) {
        struct tensor_spec s = {.name = names[i]};
        t = tensor_spec_find(&s, m->checkpoint, (struct tensor_index){layer, -1});
    }
    return t;
}

/* The only element of a tensor of floats; NaN if it is another kind of tensor. */
static float only_element(const struct tensor *t)
{
    bool one = t->usable && t->data && t->dtype != DTYPE_I32;
    uint32_t bits = 0;
    float f = NAN;

    for (int32_t i = 0; i < t->n_dims && one; i++) {
        one = t->dim[i] == 1;
    }
    if (!one) {
        return NAN;
    }
    memcpy(&bits, t->data, (size_t)dtype_bytes(t->dtype));
    if (t->dtype == DTYPE_F16) {
        int32_t exponent = (int32_t)(bits >> 10 & 31), mantissa = (int32_t)(bits & 1023);
        f = exponent == 31
                ? NAN
                : ldexpf((float)(exponent > 0 ? mantissa + 1024 : mantissa), MAX(exponent, 1) - 25);
        return bits >> 15 ? -f : f;
    }
    bits = t->dtype == DTYPE_BF16 ? bits << 16 : bits;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* ret is unchanged if the checkpoint has no such scale. */
static int read_scale(const struct model *m, const char *const *names, size_t n, int32_t layer,
                      float *ret, struct err *e)
{
    const struct tensor *t = find(m, names, n, layer);

    if (!t) {
        return 0;
    }
    float f = only_element(t);
    if (!(f > 0) || !isfinite(f) || !isfinite(1 / f)) {
        return err_set_param(e, ERR_INVALID, "kv_cache_dtype",
                             "%s: a scale of an fp8 cache is one positive number for all heads",
                             t->name);
    }
    *ret = f;
    return 0;
}

int load_cache_scales(struct model *m, struct err *e)
{
    static const char *const KEYS[] = {
        "model.layers.%d.self_attn.k_scale",        "model.layers.%d.self_attn.attn.k_scale",
        "model.layers.%d.self_attn.k_proj.k_scale", "model.layers.%d.self_attn.qkv_proj.k_scale",
        "backbone.layers.%d.mixer.k_proj.k_scale",  "model.layers.%d.self_attn.kv_scale"};
    static const char *const VALUES[] = {
        "model.layers.%d.self_attn.v_scale",        "model.layers.%d.self_attn.attn.v_scale",
        "model.layers.%d.self_attn.v_proj.v_scale", "model.layers.%d.self_attn.qkv_proj.v_scale",
        "backbone.layers.%d.mixer.v_proj.v_scale",  "model.layers.%d.self_attn.kv_scale"};
    struct transformer *t = m->weights;
    int rc = 0;

    for (int32_t i = 0; i < t->n_layers && m->checkpoint && m->options.fp8_cache && rc == 0; i++) {
        struct attention *a = &t->layer[i].attention;
        int32_t number = t->first_layer + i;
        rc = read_scale(m, KEYS, ARRAY_LEN(KEYS), number, &a->k_scale, e);
        rc = rc < 0 ? rc : read_scale(m, VALUES, ARRAY_LEN(VALUES), number, &a->v_scale, e);
    }
    return rc;
}
