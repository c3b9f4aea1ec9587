/* GGUF, llama.cpp's checkpoint format: one file with the configuration, the vocabulary
 * and the weights of a model.
 *
 *     gguf.c            the header, every field checked against the file
 *     gguf_metadata.c   metadata by key
 *     gguf_quant.c      the encodings of tensors by their number in the file
 *     gguf_tensors.c    its tensors as a checkpoint, with Hugging Face's names and
 *                       order of elements
 *     gguf_config.c     its metadata as config.json and generation_config.json
 *     gguf_tokenizer.c  its vocabulary as a tokenizer
 *
 * Every function of models/ that takes a model directory takes the path of a GGUF file
 * as well.
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

/* A string of the file, without a NUL. */
struct gguf_text {
    const char *at; /* [len] in the file's data */
    size_t len;     /* bytes */
};

/* One pair of metadata. */
struct gguf_pair {
    struct gguf_text key;      /* printable ASCII */
    enum gguf_type type, item; /* of the value, and of its elements if it is an array */
    uint64_t n;                /* elements of an array; 1 for other types */
    const uint8_t *at;         /* the first element, in the file's data */
};

enum { GGUF_MAX_DIMS = 4 };

struct gguf_tensor {
    struct gguf_text name;      /* llama.cpp's */
    uint32_t encoding;          /* numbered as in the file; gguf_encoding_name knows it */
    int32_t n_dims;             /* axes */
    int64_t dim[GGUF_MAX_DIMS]; /* [n_dims] elements; dim[0] is contiguous, as in the file */
    const uint8_t *data;        /* in the file's data */
    int64_t n_bytes;            /* as encoded */
};

struct gguf {
    const uint8_t *data;        /* the whole file */
    size_t n_bytes;             /* its size */
    bool mapped;                /* data is a mapping that gguf_free unmaps */
    const char *file;           /* its name for messages; not owned */
    char *path;                 /* of a part, whose name `file` is in it; owned */
    struct gguf_pair *pair;     /* [n_pairs], sorted by key */
    struct gguf_tensor *tensor; /* [n_tensors], as in the file */
    int32_t n_pairs, n_tensors;
    /* [n_parts] the other files of a model in several, which have tensors alone; those
     * are among `tensor`, too. Owned. */
    struct gguf **part;
    int32_t n_parts;
    /* [n_slices] views of an expert's matrix each, in tensors of several, or of a value
     * of the metadata; made by gguf_checkpoint */
    struct gguf_tensor *slice;
    int32_t n_slices;
};

/* Whether a model's path is that of a GGUF file: a regular file. */
bool gguf_is_file(const char *path);
/* Map and parse; of a model in several files, all of them, when `path` is the first one
 * (gguf_parts.c). Messages name the file by the last component of `path`, which must
 * outlive *ret. */
int gguf_open(struct gguf **ret, const char *path, struct err *e);
/* The same of one file alone. Of a model in several the first one has all metadata. */
int gguf_open_one(struct gguf **ret, const char *path, struct err *e);
/* Check that names are unique and that tensors do not overlap. */
int gguf_check_tensors(const struct gguf *g, struct err *e);
/* Parse n_bytes at `data`, which *ret points into; for gguf_open, tests and the
 * fuzzer. */
int gguf_parse(struct gguf **ret, const void *data, size_t n_bytes, const char *file,
               struct err *e);
void gguf_free(struct gguf *g);

/* Metadata by key; NULL if the key is absent. */
const struct gguf_pair *gguf_find(const struct gguf *g, const char *key);
/* These return 1 and the value, 0 if the key is absent, ERR_INVALID if the value has
 * another type or is out of range. */
int gguf_int(const struct gguf *g, const char *key, int64_t *ret, struct err *e);
int gguf_real(const struct gguf *g, const char *key, double *ret, struct err *e);
int gguf_bool(const struct gguf *g, const char *key, bool *ret, struct err *e);
int gguf_string(const struct gguf *g, const char *key, struct gguf_text *ret, struct err *e);
/* The pair of an array with elements of type `item`. */
int gguf_array(const struct gguf *g, const char *key, enum gguf_type item,
               const struct gguf_pair **ret, struct err *e);
/* Element i of an array of 32-bit numbers. */
int32_t gguf_item_i32(const struct gguf_pair *p, uint64_t i);
float gguf_item_f32(const struct gguf_pair *p, uint64_t i);
/* The string at *at; advances *at past it. To walk over an array of strings, start with
 * pair->at. */
struct gguf_text gguf_next_string(const uint8_t **at);
bool gguf_text_is(struct gguf_text t, const char *text);

/* ---- gguf_quant.c ---- */

enum { GGUF_ENCODING_F32 = 0 }; /* the number of float32; others have no name here */
/* "Q4_K"; NULL for an encoding that is not supported. */
const char *gguf_encoding_name(uint32_t encoding);
/* The names of all supported encodings, for messages. */
const char *gguf_encoding_list(void);
/* " (IQ2_XS)": the name of an encoding that is not supported, for messages; "" if it is
 * not known either. */
const char *gguf_encoding_refused(uint32_t encoding);
/* Values in a block of an encoding, and the bytes that a block takes. */
int32_t gguf_block_values(uint32_t encoding);
int32_t gguf_block_bytes(uint32_t encoding);
/* The format of an encoding that is supported. */
const struct weight_format *gguf_encoding_format(uint32_t encoding);
/* Whether the encoding is one of enum dtype, so that no decoding is needed. */
bool gguf_encoding_dtype(uint32_t encoding, enum dtype *ret);
/* Decode `n` values, whole blocks, to floats. */
void gguf_decode(uint32_t encoding, const uint8_t *src, int64_t n, float *ret);

/* ---- gguf_tensors.c ---- */

/* tensor_decode of a tensor that is `encoded`. */
int gguf_tensor_decode(const struct tensor *t, void *ret);

/* The tensors of a file under their Hugging Face names, for the architecture of `c`.
 * Quantised tensors decode to `dtype`. The checkpoint owns the mapping. */
int gguf_checkpoint_open(struct checkpoint **ret, const char *path, const struct model_config *c,
                         enum dtype dtype, struct err *e);
/* The same from an open file. Takes ownership of g, after an error too. */
int gguf_checkpoint(struct checkpoint **ret, struct gguf *g, const struct model_config *c,
                    enum dtype dtype, struct err *e);

/* ---- gguf_families.c ---- */

/* Name i, from 0, that GGUF files give the architecture `name` of config.json; NULL:
 * there are no more. */
const char *gguf_name_of(const char *name, int i);

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
