/* The inside of a checkpoint, shared by weights.c (files) and safetensors.c (headers),
 * and by nobody else. */
#ifndef QUIRE_MODELS_CHECKPOINT_WEIGHTS_INTERNAL_H
#define QUIRE_MODELS_CHECKPOINT_WEIGHTS_INTERNAL_H

#include "models/checkpoint/weights.h"

struct mapping {
    void *data;
    size_t n_bytes;
    char *file;
};

struct checkpoint {
    struct tensor *tensor; /* [n_tensors] */
    int32_t n_tensors, cap_tensors;
    /* [n_slots] open addressing by name: index into tensor, -1: free; n_slots a power
     * of two */
    int32_t *slot;
    int32_t n_slots;
    struct mapping *mapping; /* [n_mappings] */
    int32_t n_mappings;
    struct gguf *gguf; /* the GGUF file that the tensors lie in, or NULL */
    bool uncached;     /* a file was not in the page cache when it was opened */
    bool *kept;        /* [n_tensors] read in place; NULL: none is */
};

/* Append *t (the name is copied). ERR_INVALID: the name is taken; ERR_FULL:
 * LIMIT_TENSORS; ERR_NOMEM. */
int checkpoint_add(struct checkpoint *c, const struct tensor *t, struct err *e);

#endif
