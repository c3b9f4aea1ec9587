/* Matrix products: cuBLASLt with remembered set-ups; what its epilogue cannot do follows as a kernel.
 *
 * A set-up is chosen for a number of rows that others near it share (product_rows), and told the step's own number before it
 * runs: prompts come in every length, and choosing takes the host longer than the step's other work.
 * cuBLASLt's first proposal is taken, but for decode steps that are about to be captured as a graph: those run thousands
 * of times, so in the eager step before the capture its proposals are timed, weights out of the cache, and the best stays.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/heuristics.h"

enum { MAX_PROPOSALS = 4, TUNE_REPEATS = 3, TUNE_MAX_ROWS = 256 };

/* What decides a set-up. Zeroed before filling: it is compared as bytes. */
struct plan_key {
    int64_t x_stride, w_stride, out_stride, residual_stride;
    int32_t m, n, k;
    int32_t x_type, out_type;
    int32_t epilogue; /* cublasLtEpilogue_t */
    int32_t residual; /* added by the product itself */
    int32_t alignment;
};

struct matmul_plan {
    struct plan_key key;
    bool used;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w, x, residual, out;
    cublasLtMatmulAlgo_t algo;
    int32_t rows; /* that x, residual and out have at present */
    bool tuned;
};

static const char *lt_text(cublasStatus_t s)
{
    switch (s) {
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "shape or type not supported";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "out of memory";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "not initialised";
    default:
        return "failed";
    }
}

static void fail(struct cuda_backend *c, cublasStatus_t s, const struct plan_key *k)
{
    if (c->failed.code == 0) {
        err_set(&c->failed, ERR_DEVICE, "cuda: matrix product %d x %d x %d: %s (%d)", k->m, k->n, k->k, lt_text(s),
                (int)s);
    }
}

int cuda_linear_init(struct cuda_backend *c, struct err *e)
{
    c->plan = calloc(MATMUL_PLANS, sizeof(*c->plan));
    if (c->plan == NULL) {
        return err_nomem(e, "matrix products");
    }
    cublasStatus_t s = cublasLtCreate(&c->lt);
    if (s != CUBLAS_STATUS_SUCCESS) {
        return err_set(e, ERR_DEVICE, "cuda: cuBLASLt: %s (%d)", lt_text(s), (int)s);
    }
    c->workspace = cuda_alloc(c, WORKSPACE_BYTES, "matrix products", e);
    return c->workspace == NULL ? ERR_NOMEM : 0;
}

static void plan_clear(struct matmul_plan *p)
{
    if (p->used) {
        cublasLtMatmulDescDestroy(p->desc);
        cublasLtMatrixLayoutDestroy(p->w);
        cublasLtMatrixLayoutDestroy(p->x);
        cublasLtMatrixLayoutDestroy(p->residual);
        cublasLtMatrixLayoutDestroy(p->out);
    }
    memset(p, 0, sizeof(*p));
}

void cuda_linear_release(struct cuda_backend *c)
{
    for (int32_t i = 0; c->plan != NULL && i < MATMUL_PLANS; i++) {
        plan_clear(&c->plan[i]);
    }
    free(c->plan);
    c->plan = NULL;
    if (c->lt != NULL) {
        cublasLtDestroy(c->lt);
    }
}

static cudaDataType_t lt_type(int32_t t)
{
    return t == DTYPE_F32 ? CUDA_R_32F : t == DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

static int32_t alignment_of(const void *p)
{
    uintptr_t a = (uintptr_t)p;
    int32_t n = 256;
    while (n > 1 && a % (uintptr_t)n != 0) {
        n /= 2;
    }
    return n;
}

static uint64_t hash_key(const struct plan_key *k)
{
    const unsigned char *p = (const unsigned char *)k;
    uint64_t h = 0xCBF29CE484222325ull;
    for (size_t i = 0; i < sizeof(*k); i++) {
        h = (h ^ p[i]) * 0x100000001B3ull;
    }
    return h ^ (h >> 29);
}

/* What one product reads and writes. */
struct operands {
    const void *w, *x, *residual;
    void *out;
    float beta;
};

static void plan_rows(struct matmul_plan *p, int32_t rows)
{
    uint64_t n = (uint64_t)rows;
    if (p->rows != rows) {
        cublasLtMatrixLayoutSetAttribute(p->x, CUBLASLT_MATRIX_LAYOUT_COLS, &n, sizeof(n));
        cublasLtMatrixLayoutSetAttribute(p->out, CUBLASLT_MATRIX_LAYOUT_COLS, &n, sizeof(n));
        cublasLtMatrixLayoutSetAttribute(p->residual, CUBLASLT_MATRIX_LAYOUT_COLS, &n, sizeof(n));
        p->rows = rows;
    }
}

static cublasStatus_t plan_run(struct cuda_backend *c, const struct matmul_plan *p, const cublasLtMatmulAlgo_t *algo,
                               const struct operands *o)
{
    float one = 1.0f;
    return cublasLtMatmul(c->lt, p->desc, &one, o->w, p->w, o->x, p->x, &o->beta, o->residual, p->residual, o->out,
                          p->out, algo, c->workspace, WORKSPACE_BYTES, c->stream);
}

/* Microseconds of one run with the weights not in the cache (the workspace, larger than it, is overwritten first), or a huge
 * value when it does not run: the least of a few after one that loads the kernel, of one where that is far above `others`. */
static float time_proposal(struct cuda_backend *c, const struct matmul_plan *p, const cublasLtMatmulAlgo_t *algo,
                           const struct operands *o, const cudaEvent_t event[2], float others)
{
    float least = 1e30f;
    for (int i = 0; i < TUNE_REPEATS && (i < 2 || least < others * 1.1f); i++) {
        float ms = 0;
        bool ok = cudaMemsetAsync(c->workspace, 0, WORKSPACE_BYTES, c->stream) == cudaSuccess &&
                  cudaEventRecord(event[0], c->stream) == cudaSuccess &&
                  plan_run(c, p, algo, o) == CUBLAS_STATUS_SUCCESS &&
                  cudaEventRecord(event[1], c->stream) == cudaSuccess && cuda_wait_event(c, event[1]) == cudaSuccess &&
                  cudaEventElapsedTime(&ms, event[0], event[1]) == cudaSuccess;
        if (!ok) {
            cudaGetLastError();
            return 1e30f;
        }
        least = i > 0 ? MIN(least, ms * 1000.0f) : least;
    }
    return least;
}

/* Keep the fastest of the proposals. `o->out` is overwritten, as often as it takes. */
static void plan_tune(struct cuda_backend *c, struct matmul_plan *p, const struct operands *o,
                      const cublasLtMatmulHeuristicResult_t *found, int n)
{
    cudaEvent_t event[2] = {NULL, NULL};
    if (cudaEventCreate(&event[0]) == cudaSuccess && cudaEventCreate(&event[1]) == cudaSuccess) {
        float least = time_proposal(c, p, &found[0].algo, o, event, 1e30f);
        for (int i = 1; i < n; i++) {
            float us =
                found[i].state == CUBLAS_STATUS_SUCCESS ? time_proposal(c, p, &found[i].algo, o, event, least) : 1e30f;
            if (us < least * 0.98f) { /* noise does not make a change */
                least = us;
                p->algo = found[i].algo;
            }
        }
    }
    for (int i = 0; i < 2; i++) {
        if (event[i] != NULL) {
            cudaEventDestroy(event[i]);
        }
    }
}

/* cuBLAS thinks in columns: out^T [n, m] = w^T' x^T, with w [n, k] row-major read as a transposed [k, n]. */
static cublasStatus_t plan_make(struct cuda_backend *c, struct matmul_plan *p, const struct plan_key *k,
                                const struct operands *tune)
{
    memset(p, 0, sizeof(*p));
    p->key = *k;
    p->rows = k->m;
    cublasOperation_t transpose = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)k->epilogue;
    cublasStatus_t s = cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    p->used = s == CUBLAS_STATUS_SUCCESS;
    if (!p->used) {
        return s;
    }
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    cublasLtMatrixLayoutCreate(&p->w, lt_type(k->x_type), (uint64_t)k->k, (uint64_t)k->n, k->w_stride);
    cublasLtMatrixLayoutCreate(&p->x, lt_type(k->x_type), (uint64_t)k->k, (uint64_t)k->m, k->x_stride);
    cublasLtMatrixLayoutCreate(&p->out, lt_type(k->out_type), (uint64_t)k->n, (uint64_t)k->m, k->out_stride);
    cublasLtMatrixLayoutCreate(&p->residual, lt_type(k->out_type), (uint64_t)k->n, (uint64_t)k->m,
                               k->residual ? k->residual_stride : k->out_stride);
    cublasLtMatmulPreference_t want;
    s = cublasLtMatmulPreferenceCreate(&want);
    if (s != CUBLAS_STATUS_SUCCESS) {
        return s;
    }
    size_t workspace = WORKSPACE_BYTES;
    uint32_t alignment = (uint32_t)k->alignment;
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace));
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment,
                                         sizeof(alignment));
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment,
                                         sizeof(alignment));
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment,
                                         sizeof(alignment));
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment,
                                         sizeof(alignment));
    cublasLtMatmulHeuristicResult_t found[MAX_PROPOSALS];
    int n = 0;
    if (c->config.deterministic) {
        struct matmul_setup m = {p->desc, p->w, p->x, p->residual, p->out, want};
        bool tma =
            c->capability == 90 && k->x_type != DTYPE_F32 && k->n % 8 == 0 && k->k % 8 == 0 && k->alignment >= 16;
        s = linear_exact_algo(c, &m, k->m, tma, &found[0]);
        n = 1;
    } else {
        s = cublasLtMatmulAlgoGetHeuristic(c->lt, p->desc, p->w, p->x, p->residual, p->out, want,
                                           tune != NULL ? MAX_PROPOSALS : 1, found, &n);
    }
    cublasLtMatmulPreferenceDestroy(want);
    if (s == CUBLAS_STATUS_SUCCESS && n == 0) {
        s = CUBLAS_STATUS_NOT_SUPPORTED;
    }
    p->algo = found[0].algo;
    if (s == CUBLAS_STATUS_SUCCESS && n > 1) {
        plan_tune(c, p, tune, found, n);
    }
    return s;
}

/* The set-up for k, remembered or made; with `tune` made by timing on those operands. NULL: cuBLASLt has none, status in
 * *ret. */
static struct matmul_plan *plan_find(struct cuda_backend *c, const struct plan_key *k, const struct operands *tune,
                                     cublasStatus_t *ret)
{
    uint64_t h = hash_key(k);
    struct matmul_plan *p = NULL;
    for (int i = 0; i < 8; i++) {
        p = &c->plan[(h + (uint64_t)i) % MATMUL_PLANS];
        if (p->used && memcmp(&p->key, k, sizeof(*k)) == 0) {
            if (tune == NULL || p->tuned) {
                return p;
            }
            break;
        }
        if (!p->used) {
            break;
        }
    }
    if (p->used) { /* made without timing, or the last one looked at makes room */
        plan_clear(p);
    }
    *ret = plan_make(c, p, k, tune);
    if (*ret != CUBLAS_STATUS_SUCCESS) {
        plan_clear(p);
        return NULL;
    }
    p->tuned = tune != NULL;
    return p;
}

/* What cuBLASLt is asked to do of an epilogue; the rest is for launch_epilogue. */
struct split {
    cublasLtEpilogue_t epilogue;
    bool bias, act, residual; /* done by the product */
};

static struct split split_epilogue(const struct epilogue *ep, struct mat out)
{
    struct split s = {.epilogue = CUBLASLT_EPILOGUE_DEFAULT};
    if (ep == NULL) {
        return s;
    }
    bool has_residual = ep->residual.data != NULL;
    s.bias = ep->bias.data != NULL && ep->bias.dtype == out.dtype && out.dtype != DTYPE_F32 &&
             alignment_of(ep->bias.data) >= 16;
    s.act = ep->act == ACT_RELU && !has_residual && (s.bias || ep->bias.data == NULL);
    s.residual = has_residual && ep->act == ACT_NONE && ep->residual.dtype == out.dtype;
    if (s.act) {
        s.epilogue = s.bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    } else if (s.bias) {
        s.epilogue = CUBLASLT_EPILOGUE_BIAS;
    }
    return s;
}

/* A buffer shaped like out for products whose residual lies in out itself but must be added after an activation. */
static struct mat side_buffer(struct cuda_backend *c, struct mat out, int32_t rows)
{
    int64_t need = rows * out.stride * dtype_bytes(out.dtype);
    if (need > c->side_bytes) {
        c->side = cuda_alloc(c, (size_t)need * 2, "matrix products", &c->failed);
        c->side_bytes = c->side != NULL ? need * 2 : 0;
    }
    out.data = c->side;
    return out;
}

/* In the eager step before a capture: time the set-ups of the product that will be captured, of the padded rows. */
static void tune(struct cuda_backend *c, const struct plan_key *k, int32_t rows, const struct split *s, struct mat out,
                 struct mat x, const struct operands *o)
{
    struct plan_key padded = *k;
    padded.m = product_rows(c->padded);
    if (c->config.deterministic || c->recording == NULL || c->capturing || rows != c->batch.n_tokens ||
        padded.m > TUNE_MAX_ROWS || s->bias || padded.m > cuda_rows_behind(c, x)) {
        return;
    }
    struct operands trial = *o;
    trial.out = side_buffer(c, out, padded.m).data; /* not into out: it may be the residual */
    trial.residual = s->residual ? o->residual : trial.out;
    cublasStatus_t status;
    if (trial.out != NULL) {
        plan_find(c, &padded, &trial, &status);
    }
}

/* The product of k's kind with `rows` rows, at most k's. Where the algorithm does not take the number, one is chosen for it. */
static void run_plan(struct cuda_backend *c, struct plan_key *k, int32_t rows, const struct split *s, struct mat out,
                     struct mat x, struct mat w, const struct epilogue *ep)
{
    struct operands o = {.w = w.data,
                         .x = x.data,
                         .residual = s->residual ? ep->residual.data : out.data,
                         .out = out.data,
                         .beta = s->residual ? 1.0f : 0.0f};
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    tune(c, k, rows, s, out, x, &o);
    for (bool again = true; again; k->m = rows) {
        again = k->m != rows;
        struct matmul_plan *p = plan_find(c, k, NULL, &status);
        if (p == NULL) {
            continue;
        }
        if (s->bias) {
            const void *bias = ep->bias.data;
            cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
        }
        plan_rows(p, rows);
        status = plan_run(c, p, &p->algo, &o);
        if (status == CUBLAS_STATUS_SUCCESS) {
            return;
        }
    }
    fail(c, status, k);
}

void cuda_linear(struct backend *b, struct mat out, struct mat x, struct mat w, const struct epilogue *ep)
{
    struct cuda_backend *c = cuda_of(b);
    cuda_start(c);
    int32_t rows = cuda_rows(c, out);
    if (rows < 1 || !cuda_usable(c)) {
        return;
    }
    struct split s = split_epilogue(ep, out);
    bool bias = ep != NULL && ep->bias.data != NULL && !s.bias;
    bool act = ep != NULL && ep->act != ACT_NONE && !s.act;
    bool residual = ep != NULL && ep->residual.data != NULL && !s.residual;
    struct mat product = residual && ep->residual.data == out.data ? side_buffer(c, out, rows) : out;
    if (product.data == NULL) {
        return;
    }
    struct plan_key k;
    memset(&k, 0, sizeof(k));
    k.x_stride = x.stride;
    k.w_stride = w.stride;
    k.out_stride = product.stride;
    k.residual_stride = s.residual ? ep->residual.stride : 0;
    k.m = c->config.deterministic ? rows : product_rows(rows);
    k.n = w.rows;
    k.k = w.cols;
    k.x_type = (int32_t)x.dtype;
    k.out_type = (int32_t)out.dtype;
    k.epilogue = (int32_t)s.epilogue;
    k.residual = s.residual;
    k.alignment = MIN(MIN(alignment_of(product.data), alignment_of(x.data)), alignment_of(w.data));
    if (s.residual) {
        k.alignment = MIN(k.alignment, alignment_of(ep->residual.data));
    }
    run_plan(c, &k, rows, &s, product, x, w, ep);
    if (bias || act || residual) {
        launch_epilogue(out.data, product.data, (int)out.dtype, out.stride, bias ? ep->bias.data : NULL,
                        bias ? (int)ep->bias.dtype : 0, act ? (int)ep->act : 0, residual ? ep->residual.data : NULL,
                        residual ? ep->residual.stride : 0, rows, w.rows, c->stream);
    }
}

void cuda_linear_gated(struct backend *b, struct mat out, struct mat room, struct mat x, struct mat w, struct mat bias,
                       enum activation act)
{
    struct cuda_backend *c = cuda_of(b);
    cuda_linear(b, room, x, w, &(struct epilogue){.bias = bias});
    launch_gated_act(out.data, out.stride, room.data, room.stride, cuda_rows(c, out), out.cols, (int)act,
                     (int)out.dtype, c->stream);
}
