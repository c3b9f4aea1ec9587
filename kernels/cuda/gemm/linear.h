/* What the files of matrix products share (linear.c, linear_time.c, linear_lt.c). */
#ifndef QUIRE_KERNELS_CUDA_GEMM_LINEAR_H
#define QUIRE_KERNELS_CUDA_GEMM_LINEAR_H

#include "kernels/cuda/cuda.h"

/* One way to make products of a kind: cuBLASLt's set-up. */
struct matmul_plan {
    struct product_key key;
    bool used;
    bool known;                /* timed against others, or remembered from an earlier run */
    cublasLtMatmulDesc_t desc; /* NULL: not made */
    cublasLtMatrixLayout_t w, x, residual, out;
    cublasLtMatmulAlgo_t algo;
    int32_t rows; /* that x, residual and out have at present */
};

/* out [rows, n] = act(x w^T + bias), w [n, k]; gated: out [rows, n / 2] = act(gate) *
 * up, of the lower and the upper half of w. */
struct linear_args {
    void *out;
    const void *x, *w, *bias; /* bias [n] or NULL */
    int64_t out_stride;
    int32_t rows, n;
    int32_t out_type, bias_type; /* enum dtype */
    int32_t act, gated;
};

/* A product as it is asked for. */
struct product {
    struct product_key key;
    struct linear_args args; /* all of it; `rows` are the step's own */
    /* cuBLASLt's part: it reads and writes `room`, adds the bias if `lt_bias`, and the
     * residual if the key says so */
    void *lt_out;
    const void *residual; /* NULL: none */
    int64_t residual_stride;
    bool lt_bias, lt_act;
};

const char *lt_text(cublasStatus_t s);
/* Descriptor and layouts of the key; what is there after a failure, lt_release frees
 * too. */
cublasStatus_t lt_describe(struct matmul_plan *p, const struct product_key *k);
void lt_release(struct matmul_plan *p);
/* cuBLASLt's proposals for a plan that has been described, at most `most`, best first;
 * their number in *ret_n. */
cublasStatus_t lt_propose(struct cuda_backend *c, struct matmul_plan *p, int most,
                          cublasLtMatmulHeuristicResult_t *ret, int *ret_n);
/* Whether the algorithm, which may come from a file, fits the plan. */
bool lt_takes(struct cuda_backend *c, const struct matmul_plan *p,
              const cublasLtMatmulAlgo_t *algo);
/* The product into its room, its rows told to the plan first. */
cublasStatus_t lt_run(struct cuda_backend *c, struct matmul_plan *p,
                      const cublasLtMatmulAlgo_t *algo, const struct product *d);

/* All of the product the plan's way, but by this algorithm. */
cublasStatus_t product_run(struct cuda_backend *c, struct matmul_plan *p,
                           const cublasLtMatmulAlgo_t *algo, const struct product *d);

/* linear_time.c: the plan keeps the fastest of these algorithms. What the product
 * writes is overwritten, as often as it takes. */
void product_time(struct cuda_backend *c, struct matmul_plan *p, const struct product *d,
                  const cublasLtMatmulHeuristicResult_t *found, int n);

#endif
