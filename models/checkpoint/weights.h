/* A checkpoint: the tensors of a model by name, in memory-mapped files.
 *
 * It is opened from safetensors files, one or sharded, here, and from a GGUF file in
 * gguf.h. Every field of a header is checked against the file before any tensor is
 * handed out. */
#ifndef QUIRE_MODELS_CHECKPOINT_WEIGHTS_H
#define QUIRE_MODELS_CHECKPOINT_WEIGHTS_H

#include "kernels/backend.h"

enum { TENSOR_MAX_DIMS = 5 }; /* of patches of video in vision models */

struct gguf_tensor;  /* gguf.h */
struct quant_tensor; /* quantised/quantised.h */

/* The order of a tensor's elements in a GGUF file, compared with Hugging Face's. */
enum tensor_order {
    ORDER_SAME,
    /* rows i and i + half of a head are neighbours: llama.cpp rotates such pairs */
    ORDER_ROTARY_PAIRS,
    ORDER_TRANSPOSED,
    ORDER_DECAYS, /* the file has -exp(x) of each value x: of a recurrence's A_log */
};

struct tensor {
    const char *name;        /* Hugging Face's; owned by the checkpoint */
    const char *stored_type; /* as the file names it: "BF16", "I64" */
    bool usable;             /* stored_type is one of enum dtype; false: only bytes are known */
    enum dtype dtype;        /* of the values, after decoding where `encoded` is set */
    int32_t n_dims;          /* axes */
    int64_t dim[TENSOR_MAX_DIMS]; /* [n_dims] elements along each axis */
    /* in the mapping, [dim0][dim1].. row-major; NULL with `encoded` or `quantised` */
    const void *data;
    int64_t n_bytes; /* of the values, as dtype and dim say */
    /* quantised, reordered or of another meaning in its file: only tensor_decode gives
     * the values; NULL: read `data` */
    const struct gguf_tensor *encoded;
    /* of a quantised tensor: how its blocks or codes are stored; else NULL */
    const struct weight_format *format;
    const uint8_t *blocks; /* in the mapping, with `encoded`; else NULL */
    /* codes with scales of their own: where they are, and tensor_decode gives the
     * values; owned by the checkpoint; else NULL */
    struct quant_tensor *quantised;
    bool part;               /* of a quantised weight, or of no use: families do not look for it */
    enum tensor_order order; /* with `encoded` */
    int32_t n_heads;         /* ORDER_ROTARY_PAIRS: heads among the rows */
};

/* Write the values of an encoded or quantised tensor to ret[n_bytes], [dim0][dim1]..
 * row-major. 0 or ERR_NOMEM. */
int tensor_decode(const struct tensor *t, void *ret);

/* ERR_INVALID where one of the [rows][cols] blocks or codes of t at `codes`, `stride`
 * values apart, is no number (weight_format_find_nan). They are some of t->blocks, or
 * of what quant_tensor_codes returned. */
int tensor_check(const struct tensor *t, const void *codes, int64_t rows, int64_t cols,
                 int64_t stride, struct err *e);
/* The same of all of t. */
int tensor_check_all(const struct tensor *t, struct err *e);

struct checkpoint;

/* Map model.safetensors, or the shards that model.safetensors.index.json in `dir`
 * names. No tensor's data is read. */
int checkpoint_open(struct checkpoint **ret, const char *dir, struct err *e);
void checkpoint_free(struct checkpoint *c);
/* Start reading tensor t of c from disk if its file was not cached. */
void checkpoint_ask(const struct checkpoint *c, const struct tensor *t);
/* Mark tensor t of c as kept: it will be read in place for as long as c lives. Starts
 * reading it from disk if the file was not cached. ERR_NOMEM. */
int checkpoint_keep(struct checkpoint *c, const struct tensor *t, struct err *e);
/* Wait until the kept tensors have been read from disk. ERR_IO. */
int checkpoint_fetch(const struct checkpoint *c, struct err *e);
/* Release the resident pages of tensors that are not kept, so that the process is not
 * charged for them; a later read faults them in again. */
void checkpoint_drop_pages(const struct checkpoint *c);
/* NULL if there is no tensor of that name. */
const struct tensor *checkpoint_find(const struct checkpoint *c, const char *name);
int32_t checkpoint_count(const struct checkpoint *c);
const struct tensor *checkpoint_at(const struct checkpoint *c, int32_t i);

/* Parse one safetensors file of n_bytes at `data`, for checkpoint_open and the fuzzer.
 * Appends its tensors, which point into `data`, to c. After an error c may only be
 * freed. */
int safetensors_parse(struct checkpoint *c, const void *data, size_t n_bytes, const char *file,
                      struct err *e);
/* A checkpoint without tensors. */
int checkpoint_new(struct checkpoint **ret, struct err *e);

#endif
