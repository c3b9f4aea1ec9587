/* The safetensors file of a model with scales of its fp8 cache. covers:
 * models/families/load/cache_scales.c */
#include <math.h>

#include "models/families/load/load.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct layer layer[2] = {0};
    struct transformer t = {.layer = layer, .n_layers = (int32_t)ARRAY_LEN(layer)};
    struct model m = {.weights = &t, .options.fp8_cache = true};
    struct err e = {0};

    if (checkpoint_new(&m.checkpoint, &e) < 0) {
        return 0;
    }
    int rc = safetensors_parse(m.checkpoint, data, size, "fuzz", &e);
    rc = rc < 0 ? rc : load_cache_scales(&m, &e);
    if (rc < 0 && (e.code >= 0 || e.text[0] == '\0')) {
        __builtin_trap(); /* a refusal without its sentence */
    }
    for (size_t i = 0; i < ARRAY_LEN(layer); i++) {
        float k = attention_k_scale(&layer[i].attention),
              v = attention_v_scale(&layer[i].attention);
        if (!(k > 0 && v > 0) || !isfinite(k) || !isfinite(v) || !isfinite(1 / k) ||
            !isfinite(1 / v)) {
            __builtin_trap(); /* nothing can be stored with these */
        }
    }
    checkpoint_free(m.checkpoint);
    return 0;
}
