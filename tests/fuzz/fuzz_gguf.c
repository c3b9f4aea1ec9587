/* A GGUF file, whole: header, configuration, tensors and vocabulary. */
/* covers: models/checkpoint/gguf/gguf.c models/checkpoint/gguf/gguf_metadata.c
 * models/checkpoint/gguf/gguf_quant.c models/checkpoint/gguf/gguf_tensors.c
 * models/checkpoint/gguf/gguf_config.c models/checkpoint/gguf/gguf_config_layers.c
 * models/checkpoint/gguf/gguf_families.c models/checkpoint/gguf/gguf_tokenizer.c */
#include <stdlib.h>

#include "models/checkpoint/gguf/gguf.h"
#include "models/tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void refused(const struct err *e)
{
    if (e->code >= 0 || e->text[0] == '\0') {
        __builtin_trap(); /* a refusal without its sentence */
    }
}

/* Every tensor that was accepted can be read, or decoded, to its end. */
static void check(struct checkpoint *c, const uint8_t *data, size_t size)
{
    for (int32_t i = 0; i < checkpoint_count(c); i++) {
        const struct tensor *t = checkpoint_at(c, i);
        const uint8_t *at = t->data;
        if (!t->encoded && (at < data || t->n_bytes < 0 || at + t->n_bytes > data + size)) {
            __builtin_trap();
        }
        void *copy = t->encoded ? malloc((size_t)t->n_bytes) : NULL;
        if (copy) {
            tensor_decode(t, copy);
        }
        free(copy);
        if (checkpoint_find(c, t->name) != t) {
            __builtin_trap();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_config c = {.n_heads = 2, .n_kv_heads = 1};
    struct generation_defaults gen;
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct checkpoint *ck = NULL;
    struct err e = {0};

    if (gguf_parse(&g, data, size, "fuzz.gguf", &e) < 0) {
        refused(&e);
        return 0;
    }
    if (gguf_config(&c, &gen, g, &e) < 0) {
        refused(&e);
        c = (struct model_config){.n_heads = 2, .n_kv_heads = 1};
    }
    e = (struct err){0};
    if (gguf_tokenizer(&t, g, &e) < 0) {
        refused(&e);
    }
    tokenizer_free(t);
    e = (struct err){0};
    if (gguf_checkpoint(&ck, g, &c, DTYPE_BF16, &e) < 0) {
        refused(&e);
    } else {
        check(ck, data, size);
    }
    checkpoint_free(ck);
    return 0;
}
