/* Which way is best to make a matrix product, remembered from run to run in a file of
 * equal records.
 *
 * It only spares time: without a place to keep it, or when what is there cannot be
 * used, everything is found out again.
 */
#ifndef QUIRE_KERNELS_CUDA_GEMM_HEURISTICS_PRODUCTS_H
#define QUIRE_KERNELS_CUDA_GEMM_HEURISTICS_PRODUCTS_H

#include <stdbool.h>
#include <stdint.h>

/* What decides how a product is made. Zeroed before filling: it is compared as
 * bytes. */
struct product_key {
    int64_t x_stride, w_stride, out_stride, residual_stride;
    int32_t m, n, k;
    int32_t x_type, out_type;
    int32_t epilogue; /* cublasLtEpilogue_t */
    int16_t residual; /* added by the product itself */
    int16_t gated;
    int32_t alignment;
};

struct product_choice {
    uint64_t algo[8]; /* cublasLtMatmulAlgo_t */
};

struct product_record {
    struct product_key key;
    struct product_choice choice;
};

enum { PRODUCT_RECORDS = 4096 };

struct product_store {
    struct product_record *record; /* [cap] */
    int32_t n, cap;
    uint64_t device; /* what the choices hold for: the device, the library's version */
    char path[512];  /* empty: nothing is kept */
    bool changed;
    bool damaged; /* there was a file that could not be used; the next save replaces it */
};

uint64_t product_hash(const void *data, int64_t n_bytes);
/* What is remembered for `device`, a name that says all that choices depend on, in
 * directory `dir` (NULL: product_dir). */
void product_store_open(struct product_store *s, const char *dir, const char *device);
void product_store_release(struct product_store *s);
/* NULL: not known. Good until the next put. */
const struct product_choice *product_store_find(const struct product_store *s,
                                                const struct product_key *k);
/* A full store forgets nothing and learns nothing. */
void product_store_put(struct product_store *s, const struct product_key *k,
                       const struct product_choice *c);
/* Write it if there is anything new, all or nothing. A directory that cannot be written
 * is no error. */
void product_store_save(struct product_store *s);
/* The directory: systemd's CACHE_DIRECTORY, else quire in XDG_CACHE_HOME or in .cache
 * at home. False: none of them is set. */
bool product_dir(char *ret, int64_t cap);

#endif
