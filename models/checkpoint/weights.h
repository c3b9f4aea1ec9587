/* A checkpoint on disk: safetensors, one file or sharded, memory-mapped, every header
 * field checked against the file. (GGUF files become one too: gguf.h.) */
#ifndef QUIRE_MODELS_CHECKPOINT_WEIGHTS_H
#define QUIRE_MODELS_CHECKPOINT_WEIGHTS_H

#include "kernels/backend.h"

enum { TENSOR_MAX_DIMS = 4 };

struct gguf_tensor; /* gguf.h */

enum tensor_order {
    ORDER_SAME,
    /* a head's rows i and i + half stand side by side: llama.cpp turns such pairs */
    ORDER_ROTARY_PAIRS,
    ORDER_TRANSPOSED,
};

struct tensor {
    const char *name;
    const char *stored_type; /* as the file names it: "BF16", "I64" */
    bool usable;             /* stored_type is one of enum dtype; false: only its bytes are known */
    enum dtype dtype;
    int32_t n_dims;
    int64_t dim[TENSOR_MAX_DIMS];
    const void *data; /* in the mapping, [dim0][dim1].. row-major; not when it is encoded */
    int64_t n_bytes;  /* of the values as dtype and dim say */
    /* not NULL: stored another way, tensor_decode gives the values */
    const struct gguf_tensor *encoded;
    enum tensor_order order; /* of its rows in the file */
    int32_t n_heads;         /* ORDER_ROTARY_PAIRS */
};

/* Write t->n_bytes of values to `ret`, [dim0][dim1].. row-major. 0 or ERR_NOMEM. */
int tensor_decode(const struct tensor *t, void *ret);

struct checkpoint;

/* Map model.safetensors, or model.safetensors.index.json and its shards, in `dir`.
 * Nothing of a tensor is read. */
int checkpoint_open(struct checkpoint **ret, const char *dir, struct err *e);
void checkpoint_free(struct checkpoint *c);
/* Tensor t, which is one of c's, is going to be read in place: what of it must come
 * from disk begins to. ERR_NOMEM. */
int checkpoint_keep(struct checkpoint *c, const struct tensor *t, struct err *e);
/* Wait until the tensors that are kept have come from disk. ERR_IO. */
int checkpoint_fetch(const struct checkpoint *c, struct err *e);
/* Give the pages of tensors that are not kept back to the page cache; what is read
 * again comes back by itself. */
void checkpoint_rest(const struct checkpoint *c);
/* NULL when there is none of that name. */
const struct tensor *checkpoint_find(const struct checkpoint *c, const char *name);
int32_t checkpoint_count(const struct checkpoint *c);
const struct tensor *checkpoint_at(const struct checkpoint *c, int32_t i);

/* Parse the header of one safetensors file of n_bytes at `data`; for the fuzzer and
 * checkpoint_open. Appends to c, whose tensors then point into `data`. After an error c
 * may only be freed. */
int safetensors_parse(struct checkpoint *c, const void *data, size_t n_bytes, const char *file,
                      struct err *e);
int checkpoint_new(struct checkpoint **ret, struct err *e);

#endif
