/* Shared by the files of matrix products (linear.c, linear_time.c, linear_lt.c). */
#ifndef QUIRE_KERNELS_CUDA_GEMM_LINEAR_H
#define QUIRE_KERNELS_CUDA_GEMM_LINEAR_H

#include "kernels/cuda/cuda.h"

/* A cached plan: cuBLASLt's descriptors and algorithm for one key. */
struct matmul_plan {
    struct product_key key;    /* of the products that it serves */
    bool used;                 /* the slot of the hash table is taken */
    bool known;                /* the algorithm was timed, or remembered from an earlier run */
    cublasLtMatmulDesc_t desc; /* NULL: not made */
    cublasLtMatrixLayout_t w, x, residual, out; /* made and freed with desc */
    cublasLtMatmulAlgo_t algo;                  /* cuBLASLt's best */
    enum product_way way;                       /* the choice */
    int32_t rows; /* rows that the layouts of x, residual and out are set to */
};

/* out [rows, n] = act(x w^T + bias), w [n, k]; gated: out [rows, n / 2] = act(gate) *
 * up, of the lower and the upper half of w. */
struct linear_args {
    void *out;                   /* [rows, n], gated [rows, n / 2] */
    const void *x, *w, *bias;    /* bias: [n] or NULL */
    int64_t out_stride;          /* in elements */
    int32_t rows, n;             /* rows of x; rows of w */
    int32_t out_type, bias_type; /* enum dtype */
    int32_t act, gated;          /* enum activation; gated: it applies to the gate */
};

/* A product to be run. */
struct product {
    struct product_key key;  /* selects the plan; m may be a larger bucket than args.rows */
    struct linear_args args; /* the whole operation, with the step's own rows */
    /* where cuBLASLt writes its part of the result; it adds the bias if lt_bias,
     * applies the activation if lt_act, and adds the residual if key.residual */
    void *lt_out;
    const void *residual;           /* NULL: none */
    int64_t residual_stride;        /* in elements */
    const float *w_scale, *x_scale; /* [n], [rows]: of PRODUCT_E4M3 */
    const struct mat *put_off;      /* of a gated product: its result, put off; NULL: now */
    bool lt_bias, lt_act;           /* what cuBLASLt does itself; launch_epilogue does the rest */
};

/* product_key.x_type of e4m3 codes with a scale a row on both sides. */
enum { PRODUCT_E4M3 = 16 };

const char *lt_text(cublasStatus_t s);
/* Of an enum dtype, or PRODUCT_E4M3. */
cudaDataType_t lt_type(int32_t t);
/* Whether cuBLASLt multiplies e4m3 weights [n, k] here, with a scale for each of
 * their rows and for each row of activations. */
bool lt_has_e4m3(struct cuda_backend *c, int32_t n, int32_t k);
/* Makes the descriptor and layouts for the key. lt_release also frees what is there
 * after a failure. */
cublasStatus_t lt_describe(struct matmul_plan *p, const struct product_key *k);
void lt_release(struct matmul_plan *p);
/* cuBLASLt's proposals for a described plan, at most `most`, best first; *ret_n: how
 * many. */
cublasStatus_t lt_propose(struct cuda_backend *c, struct matmul_plan *p, int most,
                          cublasLtMatmulHeuristicResult_t *ret, int *ret_n);
/* Whether the algorithm, which may come from a file, suits the plan. */
bool lt_takes(struct cuda_backend *c, const struct matmul_plan *p,
              const cublasLtMatmulAlgo_t *algo);
/* Sets the plan's rows and runs cuBLASLt's part, into d->lt_out. */
cublasStatus_t lt_run(struct cuda_backend *c, struct matmul_plan *p,
                      const cublasLtMatmulAlgo_t *algo, const struct product *d);

/* Runs the whole product with the plan's descriptors and this algorithm. */
cublasStatus_t product_run(struct cuda_backend *c, struct matmul_plan *p,
                           const cublasLtMatmulAlgo_t *algo, const struct product *d);

/* mixed/linear_mixed.c: out = the product with a weight of codes as they are, of bf16.
 * False: these products do not take it, and nothing was done. */
bool cuda_linear_mixed(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep, bool gated);

/* own_products.c: a gated product of many rows with the gate in its epilogue (tiles.h,
 * small_rows.h). With `deterministic` there is none: a row's bits must not depend on
 * the number of rows. */

/* Whether some own way may multiply d; x has the weight's type. */
bool product_may_be_own(const struct cuda_backend *c, const struct product *d);
/* What the product's shape says, where nothing was timed. PRODUCT_LT if d may not be
 * own. */
enum product_way product_way_by_shape(const struct cuda_backend *c, const struct product *d);
/* Whether d has a shape for the way at all, however fast. */
bool product_suits(enum product_way way, const struct product *d);
/* Runs d. False: the way does not take it, or does not run here; nothing was done. */
bool product_run_own(struct cuda_backend *c, enum product_way way, const struct product *d);

/* linear_time.c: sets the plan's algorithm to the fastest of `found` [n], and its way
 * to the fastest of that and the own ones. The product's output is overwritten
 * repeatedly. */
void product_time(struct cuda_backend *c, struct matmul_plan *p, const struct product *d,
                  const cublasLtMatmulHeuristicResult_t *found, int n);

#endif
