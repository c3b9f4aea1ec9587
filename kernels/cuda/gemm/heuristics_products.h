/* The fastest way for each kind of matrix product, and how fast the device reads,
 * remembered from run to run in a file of fixed-size records.
 *
 * It only saves time: if there is no place for the file, or it cannot be used, they are
 * timed again. Processes that share it keep what was saved first.
 */
#ifndef QUIRE_KERNELS_CUDA_GEMM_HEURISTICS_PRODUCTS_H
#define QUIRE_KERNELS_CUDA_GEMM_HEURISTICS_PRODUCTS_H

#include <stdbool.h>
#include <stdint.h>

/* What determines the choice for a product. Zeroed before it is filled in, because it
 * is compared as bytes. */
struct product_key {
    /* in elements; residual_stride 0: not added by the product */
    int64_t x_stride, w_stride, out_stride, residual_stride;
    int32_t m, n, k;          /* row bucket (product_rows), columns of out, depth */
    int32_t x_type, out_type; /* enum dtype; w has x_type */
    int32_t epilogue;         /* cublasLtEpilogue_t */
    int16_t residual;         /* 1: cuBLASLt adds the residual */
    int16_t gated;            /* 1: two halves, gate and up; 2: own tiles may take them */
    int16_t alignment;        /* in bytes, that all operands have; at most 256 */
    int16_t alike;            /* 1: all ranks must choose the same (struct mat) */
};

enum { PRODUCT_TIMED_ROWS = 256 }; /* row bucket up to which choices are timed */

/* Whether the choice for a product may be timed. What ranks must choose alike may not:
 * each would take its own times, and different ways round differently. */
static inline bool product_may_be_timed(const struct product_key *k)
{
    return !k->alike && k->m <= PRODUCT_TIMED_ROWS;
}

/* What multiplies. */
enum product_way {
    PRODUCT_LT,        /* cuBLASLt, with launches for the rest of the epilogue */
    PRODUCT_WIDE_GATE, /* launch_gated_wide */
    PRODUCT_TILES,     /* launch_tiles */
};

struct product_choice {
    uint64_t algo[8]; /* a cublasLtMatmulAlgo_t as bytes, of PRODUCT_LT */
    int32_t way;      /* enum product_way */
    int32_t unused;   /* 0 */
};

struct product_record {
    struct product_key key;       /* what for */
    struct product_choice choice; /* the fastest */
};

enum { PRODUCT_RECORDS = 4096 };

struct product_store {
    struct product_record *record; /* [cap] */
    int32_t n, cap;                /* records used and allocated; at most PRODUCT_RECORDS */
    int64_t memory_gbs;            /* rated_gbs of what reads were timed at; 0: not known */
    uint64_t device; /* hash of what the choices depend on: device, driver, library version */
    uint64_t seen;   /* checksum of the file as it was read or written last */
    char path[512];  /* the file; empty: nothing is stored */
    bool changed;    /* there is something to save */
    bool replaces;   /* also in the place of what the file has */
    bool damaged;    /* the file was unusable; the next save replaces it */
};

uint64_t product_hash(const void *data, int64_t n_bytes);
/* Opens the store for `device`, a text with all that choices depend on, in directory
 * `dir` (NULL: cache_dir). */
void product_store_open(struct product_store *s, const char *dir, const char *device);
void product_store_release(struct product_store *s);
/* NULL: not known, or not for products that ranks must choose alike, since their files
 * may differ. Valid until the next put. */
const struct product_choice *product_store_find(const struct product_store *s,
                                                const struct product_key *k);
/* A full store ignores new keys, and any those of products that ranks must choose
 * alike. */
void product_store_put(struct product_store *s, const struct product_key *k,
                       const struct product_choice *c);
/* Saves the store if it changed, atomically, with what other processes have saved
 * meanwhile. An unwritable directory is no error. */
void product_store_save(struct product_store *s);
/* Sets s->memory_gbs, if the file does not tell it, to what `measure` returns, and
 * saves it; 0: nothing was found. Of several processes that ask at the same time one
 * measures and the others wait for it, at most a second. */
void product_store_memory(struct product_store *s, int32_t (*measure)(void *arg), void *arg);

#endif
