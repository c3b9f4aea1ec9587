/* A GGUF file: llama.cpp's checkpoint, which holds the configuration, the vocabulary
 * and the weights in one.
 *
 *     gguf.c            the header, every field checked against the file
 *     gguf_metadata.c   metadata by key
 *     gguf_quant.c      the block formats, decoded to floats
 *     gguf_tensors.c    its tensors as a checkpoint, under Hugging Face's names and in
 *                       their order
 *     gguf_config.c     its metadata as config.json and generation_config.json
 *     gguf_tokenizer.c  its vocabulary as a tokenizer
 *
 * Wherever the models take a directory they take the path of such a file as well.
 */
#ifndef QUIRE_MODELS_CHECKPOINT_GGUF_GGUF_H
#define QUIRE_MODELS_CHECKPOINT_GGUF_GGUF_H

#include <endian.h>
#include <string.h>

#include "models/checkpoint/weights.h"
#include "models/model.h"

/* Numbers of the file, at any address. */
static inline uint32_t gguf_u32(const uint8_t *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return le32toh(v);
}

static inline uint64_t gguf_u64(const uint8_t *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return le64toh(v);
}

/* Types of metadata, numbered as in the file. */
enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
};

/* Bytes in the file, no NUL behind them. */
struct gguf_text {
    const char *at;
    size_t len;
};

struct gguf_pair {
    struct gguf_text key;
    enum gguf_type type, item; /* item: of an array's elements */
    uint64_t n;                /* elements; 1 but for arrays */
    const uint8_t *at;         /* the first element */
};

struct gguf_tensor {
    struct gguf_text name;
    uint32_t encoding; /* numbered as in the file, known to gguf_encoding_name */
    int32_t n_dims;
    int64_t dim[TENSOR_MAX_DIMS]; /* as the file has them: the first is contiguous */
    const uint8_t *data;
    int64_t n_bytes;
};

struct gguf {
    const uint8_t *data;
    size_t n_bytes;
    bool mapped; /* data is gguf_open's mapping */
    bool cached; /* and lay in the page cache then */
    const char *file;
    struct gguf_pair *pair;     /* [n_pairs], sorted by key */
    struct gguf_tensor *tensor; /* [n_tensors], as in the file */
    int32_t n_pairs, n_tensors;
};

/* Whether a model's path means a GGUF file: a regular file. */
bool gguf_is_file(const char *path);
/* Map and parse. The last part of `path` is what messages call it; `path` must outlive
 * *ret. */
int gguf_open(struct gguf **ret, const char *path, struct err *e);
/* Parse n_bytes at `data`, which *ret points into; for gguf_open, tests and the
 * fuzzer. */
int gguf_parse(struct gguf **ret, const void *data, size_t n_bytes, const char *file,
               struct err *e);
void gguf_free(struct gguf *g);

/* Metadata by key. NULL: not there. */
const struct gguf_pair *gguf_find(const struct gguf *g, const char *key);
/* These give 1 and the value, 0 where the key is not there, ERR_INVALID where it is of
 * another type or out of range. */
int gguf_int(const struct gguf *g, const char *key, int64_t *ret, struct err *e);
int gguf_real(const struct gguf *g, const char *key, double *ret, struct err *e);
int gguf_bool(const struct gguf *g, const char *key, bool *ret, struct err *e);
int gguf_string(const struct gguf *g, const char *key, struct gguf_text *ret, struct err *e);
/* An array whose elements are of type `item`, in *ret. */
int gguf_array(const struct gguf *g, const char *key, enum gguf_type item,
               const struct gguf_pair **ret, struct err *e);
/* Element i of an array of 32-bit numbers. */
int32_t gguf_item_i32(const struct gguf_pair *p, uint64_t i);
float gguf_item_f32(const struct gguf_pair *p, uint64_t i);
/* The string at *at, which is moved behind it; for walking over an array of strings
 * from pair->at. */
struct gguf_text gguf_next_string(const uint8_t **at);
bool gguf_text_is(struct gguf_text t, const char *text);

/* ---- gguf_quant.c ---- */

/* "Q4_K"; NULL for a type of tensor that is not read here. */
const char *gguf_encoding_name(uint32_t encoding);
/* Every name, for messages. */
const char *gguf_encoding_list(void);
/* " (IQ2_XS)" of one that others read; "" where nothing is known. */
const char *gguf_encoding_refused(uint32_t encoding);
/* Values of a block and the bytes that they take. */
int32_t gguf_block_values(uint32_t encoding);
int32_t gguf_block_bytes(uint32_t encoding);
/* Whether it is one of enum dtype as it stands. */
bool gguf_encoding_dtype(uint32_t encoding, enum dtype *ret);
/* Decode `n` values, whole blocks, to floats. */
void gguf_decode(uint32_t encoding, const uint8_t *src, int64_t n, float *ret);

/* ---- gguf_tensors.c ---- */

/* The tensors of a file of this architecture (as in config.json) under their Hugging
 * Face names. What is quantised decodes to `dtype`. The checkpoint owns the mapping. */
int gguf_checkpoint_open(struct checkpoint **ret, const char *path, const struct model_config *c,
                         enum dtype dtype, struct err *e);
/* The same from a file that is open already; *g is the checkpoint's from then on, also
 * after an error. */
int gguf_checkpoint(struct checkpoint **ret, struct gguf *g, const struct model_config *c,
                    enum dtype dtype, struct err *e);

/* ---- gguf_config.c ---- */

int gguf_config(struct model_config *ret, struct generation_defaults *ret_gen, const struct gguf *g,
                struct err *e);
int gguf_config_read(struct model_config *ret, struct generation_defaults *ret_gen,
                     const char *path, struct err *e);

/* ---- gguf_tokenizer.c ---- */

struct tokenizer;
int gguf_tokenizer(struct tokenizer **ret, const struct gguf *g, struct err *e);
int gguf_tokenizer_open(struct tokenizer **ret, const char *path, struct err *e);

#endif
