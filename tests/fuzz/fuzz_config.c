/* config.json, and after a NUL byte generation_config.json. covers:
 * models/checkpoint/hfconfig.c models/checkpoint/hfconfig_derive.c
 * config/base/json.c */
#include <math.h>
#include <string.h>

#include "models/checkpoint/hfconfig_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What is accepted must be fit for loading. */
static void check(const struct model_config *c)
{
    bool sizes = c->hidden >= 1 && c->n_layers >= 1 && c->n_layers <= LIMIT_LAYERS &&
                 c->vocab >= 1 && c->intermediate >= 1;
    bool heads = c->n_heads >= 1 && c->n_kv_heads >= 1 && c->n_heads % c->n_kv_heads == 0 &&
                 c->head_dim >= 1 && c->head_dim <= LIMIT_HEAD_DIM;
    bool rope = c->rope.rot_dim == 0 ||
                (c->rope.rot_dim % 2 == 0 && c->rope.rot_dim <= c->head_dim && c->rope.theta >= 1 &&
                 isfinite(c->rope.factor) && c->rope.original_positions >= 1);
    bool positions = c->max_positions >= 1 && c->max_positions <= LIMIT_MODEL_LEN;

    if (!sizes || !heads || !rope || !positions || c->n_eos < 0 || c->n_eos > LIMIT_EOS_IDS) {
        __builtin_trap();
    }
    for (int32_t i = 0; i < c->n_eos; i++) {
        if (c->eos[i] < 0 || c->eos[i] >= c->vocab) {
            __builtin_trap();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_config c;
    struct generation_defaults gen;
    struct err e = {0};
    bool dtype_given;
    const char *text = (const char *)data, *end = text + size;
    const char *nul = size > 0 ? memchr(text, 0, size) : NULL;
    size_t config_len = nul ? (size_t)(nul - text) : size;
    const char *generation = nul ? nul + 1 : NULL;

    if (model_config_parse(&c, &gen, &dtype_given, text, config_len, generation,
                           nul ? (size_t)(end - generation) : 0, &e) == 0) {
        check(&c);
    } else if (e.code >= 0 || e.text[0] == '\0') {
        __builtin_trap();
    }
    return 0;
}
