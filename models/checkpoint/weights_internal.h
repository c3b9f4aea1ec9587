/* The inside of a checkpoint, for weights.c (the files) and the readers of headers,
 * safetensors.c and gguf_tensors.c. */
#ifndef QUIRE_MODELS_CHECKPOINT_WEIGHTS_INTERNAL_H
#define QUIRE_MODELS_CHECKPOINT_WEIGHTS_INTERNAL_H

#include "models/checkpoint/weights.h"

/* One mapped file. */
struct mapping {
    void *data;     /* from file_map */
    size_t n_bytes; /* the whole file */
    char *file;     /* its name in the directory, owned */
};

struct checkpoint {
    struct tensor *tensor;          /* [n_tensors] in the order of their files */
    int32_t n_tensors, cap_tensors; /* tensors, and how many fit */
    /* [n_slots] open addressing by name: index into tensor, -1: free; n_slots is a
     * power of two */
    int32_t *slot;
    int32_t n_slots;
    struct mapping *mapping; /* [n_mappings] safetensors files */
    int32_t n_mappings;
    struct gguf *gguf; /* owned GGUF file that the tensors lie in, or NULL */
    bool uncached;     /* some file was not in the page cache when it was opened */
    bool *kept;        /* [n_tensors] see checkpoint_keep; NULL: no tensor is kept */
};

/* Append *t; its name is copied. ERR_INVALID: the name is taken; ERR_FULL:
 * LIMIT_TENSORS; ERR_NOMEM. */
int checkpoint_add(struct checkpoint *c, const struct tensor *t, struct err *e);
/* Element first + i * stride of ret, of type dtype, = x[i], for the n values. */
void tensor_store(void *ret, enum dtype dtype, int64_t first, int64_t stride, const float *x,
                  int64_t n);

#endif
