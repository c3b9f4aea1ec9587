/* The header of a safetensors file. covers: models/checkpoint/safetensors.c
 * config/base/json.c */
#include <string.h>

#include "models/checkpoint/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Whatever is accepted must lie in the file and be found by its name. */
static void check(const struct checkpoint *c, const uint8_t *data, size_t size)
{
    for (int32_t i = 0; i < checkpoint_count(c); i++) {
        const struct tensor *t = checkpoint_at(c, i);
        const uint8_t *at = t->data;
        int64_t n = 1;
        for (int32_t d = 0; d < t->n_dims; d++) {
            n *= t->dim[d];
        }
        if (at < data || t->n_bytes < 0 || t->n_bytes > (int64_t)size ||
            at + t->n_bytes > data + size) {
            __builtin_trap();
        }
        if (t->usable && n * dtype_bytes(t->dtype) != t->n_bytes) {
            __builtin_trap();
        }
        if (checkpoint_find(c, t->name) != t) {
            __builtin_trap();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct checkpoint *c;
    struct err e = {0};

    if (checkpoint_new(&c, &e) < 0) {
        return 0;
    }
    if (safetensors_parse(c, data, size, "fuzz.safetensors", &e) == 0) {
        check(c, data, size);
    } else if (e.code >= 0 || e.text[0] == '\0') {
        __builtin_trap(); /* a refusal without its sentence */
    }
    checkpoint_free(c);
    return 0;
}
