/* A checkpoint on disk: safetensors, one file or sharded, memory-mapped, every header field checked against the file. */
#ifndef QUIRE_MODELS_WEIGHTS_H
#define QUIRE_MODELS_WEIGHTS_H

#include "kernels/backend.h"

enum { TENSOR_MAX_DIMS = 4 };

struct tensor {
    const char *name;
    const char *stored_type; /* as the file names it: "BF16", "I64" */
    bool usable;             /* stored_type is one of enum dtype; false: only its bytes are known */
    enum dtype dtype;
    int32_t n_dims;
    int64_t dim[TENSOR_MAX_DIMS];
    const void *data; /* in the mapping, [dim0][dim1].. row-major */
    int64_t n_bytes;
};

struct checkpoint;

/* Map model.safetensors, or model.safetensors.index.json and its shards, in `dir`. Nothing of a tensor is read. */
int checkpoint_open(struct checkpoint **ret, const char *dir, struct err *e);
void checkpoint_free(struct checkpoint *c);
/* Give the pages that were read back to the page cache; what is read again comes back by itself. */
void checkpoint_rest(const struct checkpoint *c);
/* NULL when there is none of that name. */
const struct tensor *checkpoint_find(const struct checkpoint *c, const char *name);
int32_t checkpoint_count(const struct checkpoint *c);
const struct tensor *checkpoint_at(const struct checkpoint *c, int32_t i);

/* Parse the header of one safetensors file of n_bytes at `data`; for the fuzzer and checkpoint_open. Appends to c, whose
 * tensors then point into `data`. After an error c may only be freed. */
int safetensors_parse(struct checkpoint *c, const void *data, size_t n_bytes, const char *file, struct err *e);
int checkpoint_new(struct checkpoint **ret, struct err *e);

#endif
