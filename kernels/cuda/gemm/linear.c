/* Matrix products: choosing among cuBLASLt's algorithms. What cuBLASLt's epilogues
 * cannot do follows as a kernel.
 *
 * Algorithms are cached per row bucket (product_rows), and the row count is set before
 * each launch: prompts come in every length, and choosing takes the host longer than
 * the rest of a step. cuBLASLt's first proposal is taken, except for decode steps that
 * are about to be captured: those run thousands of times, so in the eager step before
 * the capture several proposals are timed as the graph will run them (linear_time.c),
 * and the fastest is kept, on disk too (heuristics_products.h). Where own tiles may
 * take the product (own_products.c), they are timed beside the proposals.
 *
 * Ranks that must have the same bits of a product (struct mat's `alike`) all take the
 * first proposal, which follows from the shape, the device and the library. */
#include "kernels/cuda/gemm/linear.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/gemm/tiles.h"
#include "kernels/cuda/heuristics.h"
#include "kernels/cuda/quant/quant.h"

enum { MAX_PROPOSALS = 8 };

static void fail(struct cuda_backend *c, cublasStatus_t s, const struct product_key *k)
{
    if (c->failed.code == 0) {
        err_set(&c->failed, ERR_DEVICE, "cuda: matrix product %d x %d x %d: %s (%d)", k->m, k->n,
                k->k, lt_text(s), (int)s);
    }
}

/* Opens the store for this device, driver and library version. */
static void open_store(struct cuda_backend *c)
{
    char what[256];
    int driver = 0;

    cudaDriverGetVersion(&driver);
    snprintf(what, sizeof(what),
             "%s, driver %d, cuBLASLt %zu, workspace %d, timed in graphs with own tiles",
             c->base.device, driver, cublasLtGetVersion(), WORKSPACE_BYTES);
    product_store_open(&c->products, NULL, what);
    if (c->products.damaged) {
        snprintf(c->base.note, sizeof(c->base.note), "%.200s cannot be used and will be replaced",
                 c->products.path);
    }
}

int cuda_linear_init(struct cuda_backend *c, struct err *e)
{
    c->plan = calloc(MATMUL_PLANS, sizeof(*c->plan));
    if (!c->plan) {
        return err_nomem(e, "matrix products");
    }
    cublasStatus_t s = cublasLtCreate(&c->lt);
    if (s != CUBLAS_STATUS_SUCCESS) {
        return err_set(e, ERR_DEVICE, "cuda: cuBLASLt: %s (%d)", lt_text(s), (int)s);
    }
    int rc = cuda_linear_heads_init(c, e);
    if (rc < 0) {
        return rc;
    }
    open_store(c);
    c->workspace = cuda_alloc(c, WORKSPACE_BYTES, "matrix products", e);
    return !c->workspace ? ERR_NOMEM : 0;
}

static void plan_clear(struct matmul_plan *p)
{
    lt_release(p);
    memset(p, 0, sizeof(*p));
}

void cuda_linear_release(struct cuda_backend *c)
{
    for (int32_t i = 0; c->plan != NULL && i < MATMUL_PLANS; i++) {
        plan_clear(&c->plan[i]);
    }
    free(c->plan);
    c->plan = NULL;
    cuda_linear_heads_release(c);
    product_store_save(&c->products);
    product_store_release(&c->products);
    if (c->lt) {
        cublasLtDestroy(c->lt);
    }
}

/* ---- one product ---- */

/* Runs the part of the epilogue that cuBLASLt left out. */
static void run_epilogue(struct cuda_backend *c, const struct product *d)
{
    const struct linear_args *a = &d->args;
    bool bias = a->bias && !d->lt_bias;
    bool act = a->act != ACT_NONE && !d->lt_act && !a->gated;
    bool residual = d->residual && !d->key.residual;

    if (bias || act || residual) {
        launch_epilogue(a->gated ? d->lt_out : a->out, d->lt_out, a->out_type, d->key.out_stride,
                        bias ? a->bias : NULL, bias ? a->bias_type : 0, act ? a->act : 0,
                        residual ? d->residual : NULL, d->residual_stride, a->rows, a->n,
                        c->stream);
    }
    if (a->gated && d->put_off) {
        struct mat both = {.data = d->lt_out, .stride = d->key.out_stride};
        cuda_pending_put(c, &(struct pending_codes){.kind = PENDING_GATE,
                                                    .out = *d->put_off,
                                                    .x = both,
                                                    .rows = a->rows,
                                                    .act = a->act});
    } else if (a->gated) {
        launch_gated_act(a->out, a->out_stride, d->lt_out, d->key.out_stride, a->rows, a->n / 2,
                         a->act, a->out_type, c->stream);
    }
}

cublasStatus_t product_run(struct cuda_backend *c, struct matmul_plan *p,
                           const cublasLtMatmulAlgo_t *algo, const struct product *d)
{
    cublasStatus_t s = lt_run(c, p, algo, d);

    if (s == CUBLAS_STATUS_SUCCESS) {
        run_epilogue(c, d);
    }
    return s;
}

/* ---- plans ---- */

/* Takes over the algorithm of an earlier run, if there is one that still suits. */
static bool plan_recall(struct cuda_backend *c, struct matmul_plan *p)
{
    const struct product_choice *known =
        c->config.deterministic ? NULL : product_store_find(&c->products, &p->key);

    _Static_assert(sizeof(known->algo) == sizeof(p->algo), "an algorithm is kept as bytes");
    if (!known) {
        return false;
    }
    p->known = true;
    p->way = (enum product_way)known->way;
    memcpy(&p->algo, known->algo, sizeof(p->algo));
    return lt_describe(p, &p->key) == CUBLAS_STATUS_SUCCESS && lt_takes(c, p, &p->algo);
}

static void plan_remember(struct cuda_backend *c, const struct matmul_plan *p)
{
    struct product_choice choice;

    memset(&choice, 0, sizeof(choice));
    memcpy(choice.algo, &p->algo, sizeof(choice.algo));
    choice.way = (int32_t)p->way;
    product_store_put(&c->products, &p->key, &choice);
}

/* Chooses an algorithm for d's key; `timed`: by timing the proposals. */
static cublasStatus_t plan_make(struct cuda_backend *c, struct matmul_plan *p,
                                const struct product *d, bool timed)
{
    p->key = d->key;
    p->used = true;
    if (plan_recall(c, p)) {
        return CUBLAS_STATUS_SUCCESS;
    }
    lt_release(p);
    p->known = timed;
    p->way = PRODUCT_LT;
    cublasLtMatmulHeuristicResult_t found[MAX_PROPOSALS];
    int n = 0;
    cublasStatus_t s = lt_describe(p, &p->key);
    s = s == CUBLAS_STATUS_SUCCESS ? lt_propose(c, p, timed ? MAX_PROPOSALS : 1, found, &n) : s;
    if (s != CUBLAS_STATUS_SUCCESS) {
        return s;
    }
    p->algo = found[0].algo;
    if (timed) {
        product_time(c, p, d, found, n);
        plan_remember(c, p);
    }
    return s;
}

/* The plan for d's key, cached or made. NULL: there is none, status in *ret. */
static struct matmul_plan *plan_find(struct cuda_backend *c, const struct product *d, bool timed,
                                     cublasStatus_t *ret)
{
    uint64_t h = product_hash(&d->key, sizeof(d->key));
    struct matmul_plan *p = NULL;

    for (int i = 0; i < 8; i++) {
        p = &c->plan[(h + (uint64_t)i) % MATMUL_PLANS];
        if (p->used && memcmp(&p->key, &d->key, sizeof(d->key)) == 0) {
            if (!timed || p->known) {
                return p;
            }
            break;
        }
        if (!p->used) {
            break;
        }
    }
    plan_clear(p); /* untimed, or the last slot probed: replaced */
    *ret = plan_make(c, p, d, timed);
    if (*ret != CUBLAS_STATUS_SUCCESS) {
        plan_clear(p);
        return NULL;
    }
    return p;
}

/* A device buffer of `rows` rows for results that are not wanted, or not yet final. */
static void *side_buffer(struct cuda_backend *c, int64_t row_bytes, int32_t rows)
{
    int64_t need = rows * row_bytes;

    if (need > c->side_bytes) {
        c->side = cuda_alloc(c, (size_t)need * 2, "matrix products", &c->failed);
        c->side_bytes = c->side ? need * 2 : 0;
    }
    return c->side;
}

/* In the eager step before a capture: times algorithms for the product as it will be
 * captured, with the padded rows. */
static void choose_ahead(struct cuda_backend *c, const struct product *d, struct mat out,
                         struct mat lt_out, struct mat x)
{
    int32_t rows = product_rows(c->padded);
    struct product trial = *d;

    trial.key.m = trial.args.rows = rows;
    if (c->config.deterministic || !c->recording || c->capturing ||
        d->args.rows != c->batch.n_tokens || !product_may_be_timed(&trial.key) ||
        rows > cuda_rows_capacity(c, x) ||
        (d->args.gated && rows > MIN(cuda_rows_capacity(c, out), cuda_rows_capacity(c, lt_out)))) {
        return;
    }
    if (!d->args.gated) { /* not into out, which may be the residual */
        trial.lt_out = trial.args.out = side_buffer(c, out.stride * dtype_bytes(out.dtype), rows);
        trial.residual = d->residual ? trial.lt_out : NULL;
        trial.residual_stride = out.stride;
    }
    cublasStatus_t status;
    if (trial.lt_out) {
        plan_find(c, &trial, true, &status);
    }
}

/* Runs the product, of at most the key's rows. If the bucket's algorithm does not
 * support the row count, one is chosen for exactly that. */
static void run(struct cuda_backend *c, struct product *d)
{
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;

    for (bool again = true; again; d->key.m = d->args.rows) {
        struct matmul_plan *p = plan_find(c, d, false, &status);
        again = d->key.m != d->args.rows;
        status = p ? product_run(c, p, &p->algo, d) : status;
        if (status == CUBLAS_STATUS_SUCCESS) {
            return;
        }
    }
    fail(c, status, &d->key);
}

/* ---- products as cuBLASLt takes them ---- */

static int32_t alignment_of(const void *p)
{
    uintptr_t a = (uintptr_t)p;
    int32_t n = 256;

    while (n > 1 && a % (uintptr_t)n != 0) {
        n /= 2;
    }
    return n;
}

/* The part of the epilogue that cuBLASLt does. */
static cublasLtEpilogue_t lt_epilogue(const struct product *d)
{
    if (d->lt_act) {
        return d->lt_bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    }
    return d->lt_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/* Describes the product of x and w. cuBLASLt writes lt_out; `out` is the final
 * result. */
static struct product product_of(struct cuda_backend *c, struct mat out, struct mat lt_out,
                                 struct mat x, struct mat w, const struct epilogue *ep, bool gated,
                                 int32_t rows)
{
    struct product d;

    memset(&d, 0, sizeof(d));
    bool has_bias = ep->bias.data != NULL;
    d.args = (struct linear_args){.out = out.data,
                                  .x = x.data,
                                  .w = w.data,
                                  .bias = ep->bias.data,
                                  .out_stride = out.stride,
                                  .rows = rows,
                                  .n = w.rows,
                                  .out_type = (int32_t)out.dtype,
                                  .bias_type = (int32_t)ep->bias.dtype,
                                  .act = (int32_t)ep->act,
                                  .gated = gated};
    d.lt_out = lt_out.data;
    d.residual = ep->residual.data;
    d.residual_stride = ep->residual.stride;
    d.lt_bias = has_bias && ep->bias.dtype == out.dtype && out.dtype != DTYPE_F32 &&
                alignment_of(ep->bias.data) >= 16;
    d.lt_act = ep->act == ACT_RELU && !d.residual && (d.lt_bias || !has_bias) && !gated;
    bool lt_residual = d.residual && ep->act == ACT_NONE && ep->residual.dtype == out.dtype &&
                       (d.lt_bias || !has_bias);
    d.key.x_stride = x.stride;
    d.key.w_stride = w.stride;
    d.key.out_stride = lt_out.stride;
    d.key.residual_stride = lt_residual ? ep->residual.stride : 0;
    d.key.m = c->config.deterministic ? rows : product_rows(rows);
    d.key.n = w.rows;
    d.key.k = w.cols;
    d.key.x_type = (int32_t)x.dtype;
    d.key.out_type = (int32_t)out.dtype;
    d.key.epilogue = (int32_t)lt_epilogue(&d);
    d.key.residual = lt_residual;
    d.key.gated = (int16_t)d.args.gated;
    int32_t alignment = MIN(MIN(alignment_of(lt_out.data), alignment_of(out.data)),
                            MIN(alignment_of(x.data), alignment_of(w.data)));
    alignment = lt_residual ? MIN(alignment, alignment_of(d.residual)) : alignment;
    d.key.alignment = (int16_t)alignment;
    d.key.alike = c->ranks && w.alike;
    return d;
}

/* Whether products with `w` for results of type `out` widen it first. */
static bool widens(struct mat w, enum dtype out)
{
    return w.format && (!((const struct quant_weight *)w.priv)->quantises || out != DTYPE_BF16);
}

/* w as floats of `type`, in the buffer that the next such product overwrites. */
static bool widen(struct cuda_backend *c, struct mat *w, enum dtype type)
{
    if (!cuda_quant_reserve(c, w->priv, type, &c->failed)) {
        return false;
    }
    launch_widen(c->widened, w->cols, w->priv, (int)type, c->stream);
    *w = (struct mat){.data = c->widened,
                      .stride = w->cols,
                      .rows = w->rows,
                      .cols = w->cols,
                      .dtype = type,
                      .alike = w->alike};
    return true;
}

/* The product with a weight of codes, for which x is quantised first, from what is
 * pending if that makes it (else NULL). */
static void take_codes(struct cuda_backend *c, struct product *d, struct mat x, struct mat w,
                       const struct pending_codes *pending)
{
    const struct quant_weight *q = w.priv;

    if (pending) {
        cuda_pending_codes(c, pending, q->act_scale);
    } else {
        launch_quantise_rows(c->quantised, c->quantised_scale, q->act_scale, x.data, x.stride,
                             (int)x.dtype, d->args.rows, x.cols, c->stream);
    }
    d->args.x = c->quantised;
    d->x_scale = c->quantised_scale;
    d->w_scale = q->scale;
    d->lt_bias = d->lt_act = false;
    d->key.x_type = PRODUCT_E4M3;
    d->key.x_stride = x.cols;
    d->key.w_stride = q->row_bytes;
    d->key.epilogue = (int32_t)CUBLASLT_EPILOGUE_DEFAULT;
    d->key.residual = 0;
    d->key.residual_stride = 0;
}

/* How the product goes: as was timed for its row bucket, else as its shape says. */
static enum product_way way_of(struct cuda_backend *c, const struct product *d)
{
    cublasStatus_t status;

    if (product_may_be_own(c, d) && product_may_be_timed(&d->key) && c->ways == CUDA_WAYS_TIMED) {
        const struct matmul_plan *p = plan_find(c, d, false, &status);
        if (p && p->known) {
            return p->way;
        }
    }
    return c->ways == CUDA_WAYS_LIBRARY ? PRODUCT_LT : product_way_by_shape(c, d);
}

/* A product of codes by tiles of our own, also without a gate or added to what out
 * holds. `may`: only whether it will be, asked before the activations are quantised. */
static bool run_codes_tiles(struct cuda_backend *c, const struct product *d, struct mat w, bool may)
{
    const struct quant_weight *q = w.format ? w.priv : NULL;
    bool add = d->residual != NULL;
    struct codes_tiles_args a = {.out = d->args.out,
                                 .x = c->quantised,
                                 .w = q ? q->codes : NULL,
                                 .x_scale = c->quantised_scale,
                                 .w_scale = q ? q->scale : NULL,
                                 .out_stride = d->args.out_stride,
                                 .x_stride = w.cols,
                                 .w_stride = q ? q->row_bytes : 0,
                                 .rows = d->args.rows,
                                 .n = w.rows,
                                 .k = w.cols,
                                 .gated = d->args.gated,
                                 .act = d->args.act,
                                 .add = add};
    bool fits = q && q->quantises && c->quantised && !c->config.deterministic && !d->args.bias &&
                d->args.out_type == DTYPE_BF16 &&
                (!add || (d->residual == d->args.out && d->residual_stride == a.out_stride)) &&
                codes_by_tiles(a.rows, a.n, c->n_sms) && codes_tiles_fit(&a);

    return fits && (may || launch_codes_tiles(&a, c->n_sms, c->stream));
}

static void multiply(struct cuda_backend *c, struct mat out, struct mat lt_out, struct mat x,
                     struct mat w, const struct epilogue *ep, bool gated)
{
    int32_t rows = cuda_rows(c, out);
    struct pending_codes pending;
    bool codes = w.format && ((const struct quant_weight *)w.priv)->quantises &&
                 out.dtype == DTYPE_BF16 && cuda_pending_take(c, x, rows, &pending);
    cuda_start(c);
    if (rows < 1 || !cuda_usable(c) || cuda_linear_mixed(c, out, x, w, ep, gated) ||
        (widens(w, out.dtype) && !widen(c, &w, x.dtype))) {
        return;
    }
    struct product d = product_of(c, out, lt_out, x, w, ep, gated, rows);
    bool tiles = run_codes_tiles(c, &d, w, true);
    if (w.format) {
        take_codes(c, &d, x, w, codes ? &pending : NULL);
    }
    if (tiles && run_codes_tiles(c, &d, w, false)) {
        return;
    }
    d.put_off = gated && cuda_pending_suits(c, out, rows) ? &out : NULL;
    d.key.gated = (int16_t)(d.key.gated + product_may_be_own(c, &d));
    choose_ahead(c, &d, out, lt_out, x);
    enum product_way way = way_of(c, &d);
    if (way != PRODUCT_LT && product_run_own(c, way, &d)) {
        return;
    }
    /* still needed as the residual */
    if (d.residual == out.data && d.residual && !d.key.residual) {
        d.lt_out = side_buffer(c, out.stride * dtype_bytes(out.dtype), rows);
    }
    if (d.lt_out) {
        run(c, &d);
    }
}

/* ---- the residual stream ---- */

/* Whether a product of codes can be added to the stream as it is stored. */
static bool codes_add(const struct cuda_backend *c, int32_t rows, struct mat w)
{
    const struct quant_weight *q = w.priv;

    return q->quantises && c->quantised && codes_by_tiles(rows, w.rows, c->n_sms) &&
           w.rows % 128 == 0 && tiles_available();
}

/* Whether the product is put off. Few rows have launches of their own for what follows
 * them, ranks sum before they add, and with `deterministic` the bits of a product do
 * not depend on whether the next operation is known. */
static bool may_wait(struct cuda_backend *c, struct mat out, struct mat w,
                     const struct epilogue *ep)
{
    enum { LEAST_ROWS = 512 };
    /* the same in the eager step before a capture as in the capture */
    int32_t rows = out.rows == c->batch.n_tokens ? c->padded : out.rows;

    return out.transient && rows >= LEAST_ROWS && !c->ranks && !c->config.deterministic &&
           (!w.format || widens(w, out.dtype) || codes_add(c, rows, w)) && out.dtype != DTYPE_F32 &&
           ep->act == ACT_NONE && !ep->residual.data && !ep->bias.data;
}

void cuda_linear_flush(struct cuda_backend *c)
{
    const struct pending_product p = c->product;

    if (p.waits) {
        c->product.waits = false;
        multiply(c, p.out, p.out, p.x, p.w, &p.epilogue, false);
    }
}

bool cuda_linear_add(struct cuda_backend *c, struct mat x, struct mat y, bool partial)
{
    struct pending_product p = c->product;

    if (!p.waits || partial || p.out.data != y.data || x.dtype != y.dtype || x.cols != y.cols ||
        cuda_rows(c, x) != cuda_rows(c, y)) {
        return false;
    }
    c->product.waits = false;
    p.epilogue.residual = x;
    multiply(c, x, x, p.x, p.w, &p.epilogue, false);
    return true;
}

/* ---- the operations ---- */

void cuda_linear(struct backend *b, struct mat out, struct mat x, struct mat w,
                 const struct epilogue *ep)
{
    static const struct epilogue plain;

    struct cuda_backend *c = cuda_of(b);

    if (cuda_is_parted(w, 0, NULL)) {
        cuda_parts_linear(c, out, x, w, ep);
        return;
    }
    ep = ep ? ep : &plain;
    if (cuda_fused_linear(c, out, x, w, ep)) {
        return;
    }
    if (may_wait(c, out, w, ep)) {
        cuda_start(c);
        c->product =
            (struct pending_product){.waits = true, .out = out, .x = x, .w = w, .epilogue = *ep};
        return;
    }
    multiply(c, out, out, x, w, ep, false);
}

void cuda_linear_gated(struct backend *b, struct mat out, struct mat lt_out, struct mat x,
                       struct mat w, struct mat bias, enum activation act)
{
    if (cuda_is_parted(w, 0, NULL)) {
        cuda_parts_gated(cuda_of(b), out, lt_out, x, w, bias, act);
        return;
    }
    if (cuda_fused_linear_gated(cuda_of(b), out, x, w, bias, act)) {
        return;
    }
    multiply(cuda_of(b), out, lt_out, x, w, &(struct epilogue){.bias = bias, .act = act}, true);
}
