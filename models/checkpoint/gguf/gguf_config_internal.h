/* Between the files that write a GGUF file's metadata as config.json: gguf_config.c,
 * and gguf_config_layers.c for what layers differ in. */
#ifndef QUIRE_MODELS_CHECKPOINT_GGUF_CONFIG_INTERNAL_H
#define QUIRE_MODELS_CHECKPOINT_GGUF_CONFIG_INTERNAL_H

#include "config/base/buf.h"
#include "models/checkpoint/gguf/gguf_families.h"

/* The two texts so far; `code` is the first error. */
struct gguf_writer {
    const struct gguf *g;
    const struct gguf_family *family;
    struct buf out;
    int code;
    struct err *e;
};

/* The tensor of that name; NULL: the file has none. */
const struct gguf_tensor *gguf_config_tensor(const struct gguf *g, const char *name);
/* "ARCHITECTURE.key", in ret. */
const char *gguf_config_key(const struct gguf_writer *w, const char *key, char *ret, size_t cap);
/* true: the key is present; false: it is absent, or an error was recorded. */
bool take_int(struct gguf_writer *w, const char *key, int64_t *ret);
bool take_real(struct gguf_writer *w, const char *key, double *ret);

/* num_key_value_heads, head_dim and the part of a head that rotates, or the sizes of
 * latents. */
void gguf_put_heads(struct gguf_writer *w);
/* intermediate_size. */
void gguf_put_widths(struct gguf_writer *w);
/* layer_types, where the file says of each layer whether it has a window or a state. */
void gguf_put_layer_types(struct gguf_writer *w);
/* layer_rope_theta, where the file says of each layer whether it rotates. */
void gguf_put_thetas(struct gguf_writer *w);
/* Of heads of two kinds: their sizes, the rotation of those of layers without a window,
 * whether these layers have a tensor of values, and the widths of MLPs. */
void gguf_put_two_heads(struct gguf_writer *w);
/* The sizes of recurrent states, if there are any. */
void gguf_put_states(struct gguf_writer *w);

#endif
