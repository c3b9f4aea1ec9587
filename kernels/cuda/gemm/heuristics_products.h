/* The fastest algorithm for each kind of matrix product, remembered from run to run in
 * a file of fixed-size records.
 *
 * It only saves time: if there is no place for the file, or it cannot be used,
 * algorithms are timed again.
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
    int16_t gated;            /* 1: two halves, gate and up */
    int32_t alignment;        /* in bytes, that all operands have; at most 256 */
};

struct product_choice {
    uint64_t algo[8]; /* a cublasLtMatmulAlgo_t as bytes */
};

struct product_record {
    struct product_key key;       /* what for */
    struct product_choice choice; /* the fastest */
};

enum { PRODUCT_RECORDS = 4096 };

struct product_store {
    struct product_record *record; /* [cap] */
    int32_t n, cap;                /* records used and allocated; at most PRODUCT_RECORDS */
    uint64_t device; /* hash of what the choices depend on: device, driver, library version */
    char path[512];  /* the file; empty: nothing is stored */
    bool changed;    /* there is something to save */
    bool damaged;    /* the file was unusable; the next save replaces it */
};

uint64_t product_hash(const void *data, int64_t n_bytes);
/* Opens the store for `device`, a text with all that choices depend on, in directory
 * `dir` (NULL: cache_dir). */
void product_store_open(struct product_store *s, const char *dir, const char *device);
void product_store_release(struct product_store *s);
/* NULL: not known. Valid until the next put. */
const struct product_choice *product_store_find(const struct product_store *s,
                                                const struct product_key *k);
/* A full store ignores new keys. */
void product_store_put(struct product_store *s, const struct product_key *k,
                       const struct product_choice *c);
/* Saves the store if it changed, atomically. An unwritable directory is no error. */
void product_store_save(struct product_store *s);

#endif
