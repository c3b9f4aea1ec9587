/* The CUDA backend's own state, shared by its C files. One compute stream; every call
 * comes from one thread.
 *
 * A step crosses to the device as one staging buffer (struct step_header and what its
 * offsets name), packed in a pinned ring and copied once; answers are written by the
 * sampling kernels straight into pinned memory. Steps whose sequences all decode are
 * replayed as graphs, one a padded number of rows, so kernels read only fixed
 * addresses: the staging buffer on the device and the arrays that the prologue fills
 * from it.
 */
#ifndef QUIRE_KERNELS_CUDA_CUDA_H
#define QUIRE_KERNELS_CUDA_CUDA_H

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

#include "kernels/backend.h"
#include "kernels/cuda/fused_decode/small_rows.h"
#include "kernels/cuda/gemm/heuristics_products.h"
#include "kernels/cuda/launch.h"

enum {
    STEP_RING = 4,         /* steps whose host buffers are in use at most */
    GRAPH_MAX_ROWS = 1024, /* larger decode steps are enqueued kernel by kernel */
    MATMUL_PLANS = 1024,   /* remembered matrix product set-ups */
    WORKSPACE_BYTES = 64 << 20,
    STAGING_PINNED_BYTES = 4 << 20, /* of each step in flight: larger ones are rare */
};

/* The host's side of one step in flight. */
struct cuda_step {
    uint64_t step;
    char *staging; /* pinned, staging_pinned bytes */
    cudaEvent_t begun, done;
    bool in_flight;
    int32_t n_samples, top_stride;
    int32_t *token, *top_token; /* pinned: [max_samples], [top_cap] */
    float *logprob, *top_logprob;
    int64_t top_cap;
};

/* A captured decode step. */
struct cuda_graph {
    int32_t rows;
    bool greedy, shorts, shared;
    /* steps of this kind so far; captured at the second, when nothing is left to be set
     * up */
    int32_t n_seen;
    cudaGraphExec_t exec;
};

/* An allocation of scratch: how many rows stand behind a mat that shows some of
 * them. */
struct cuda_scratch {
    char *data;
    int64_t n_bytes, row_bytes;
};

struct matmul_plan; /* linear.c */
struct upload;      /* upload.c */
struct swap;        /* swap.c */
struct cuda_ranks;  /* ranks.c */
struct cuda_stages; /* stages.c */

struct cuda_backend {
    struct backend base;
    struct backend_config config;
    cudaStream_t stream;
    int32_t n_sms, capability; /* 90: compute capability 9.0 */
    struct err failed;         /* sticky */
    bool let_go; /* ranks or stages have failed: the device may wait for one that does not come */

    /* memory */
    void **owned; /* device allocations that live as long as the backend */
    int32_t n_owned, owned_cap;
    struct cuda_scratch *scratch;
    int32_t n_scratch;
    struct upload *upload; /* NULL: no weights are on their way */
    uint64_t n_dummies;
    float *convert; /* download and upload in tests */
    int64_t convert_bytes;

    /* cache */
    struct kv_layout kv;
    struct kv_view kv_view;
    int32_t n_blocks, n_host_blocks;
    char *kv_data, *kv_host;
    size_t kv_host_bytes;
    pthread_t pinner;
    bool pinner_running;
    _Atomic bool pinner_stop, pin_wanted;
    _Atomic size_t kv_pinned_bytes; /* of kv_host, from its start */
    struct swap *swap;              /* NULL: there is no host pool */

    /* the step being built */
    struct cuda_step step[STEP_RING];
    _Atomic int64_t n_begun, n_waited; /* the pinner looks at them */
    /* of the largest step; of what fits into a step's own buffer */
    int64_t staging_cap, staging_pinned;
    /* staging_cap bytes; the latter in ordinary memory, NULL: all are pinned */
    char *staging_device, *staging_large;
    struct step_arrays arrays;
    /* counts and scalars of the step; its arrays are not the caller's any more */
    struct batch batch;
    const struct step_header *header;
    struct query_tile *tile_device; /* prefill tiles inside the staging buffer */
    int32_t n_tiles, n_prefill_tokens;
    bool in_step, started, capturing, greedy;
    bool shorts;    /* ranks draw every sample of the step from short lists (rank_sample.c) */
    bool shared;    /* the step has runs of sequences whose shared chunks are read once */
    int32_t padded; /* rows of a decode step's graph; n_tokens when there is none */

    /* graphs */
    struct cuda_graph *graph;
    int32_t n_graphs, graphs_cap;
    struct cuda_graph *recording;
    int32_t max_graph_rows; /* what every activation buffer has room for */

    /* attention */
    int32_t window[CUDA_MAX_WINDOWS];
    int32_t n_windows;
    int32_t q_heads; /* of one KV head; 0 before the first attention */
    struct attn_workspace attn;

    /* sampling */
    struct sample_args sample;
    int32_t work_rows; /* of sample.work */

    /* matrix products */
    cublasLtHandle_t lt;
    void *workspace;
    struct matmul_plan *plan; /* [MATMUL_PLANS] */
    struct product_store products;
    void *side; /* see side_buffer */
    int64_t side_bytes;
    struct cuda_ranks *ranks;   /* NULL: one rank */
    struct cuda_stages *stages; /* NULL: one stage */

    /* fused launches */
    /* operations of the step that wait for their common launch; counter NULL: none ever
     * do */
    struct fused_args fused;
    int32_t fused_shared_bytes;
    struct small_squares small_squares;
};

static inline struct cuda_backend *cuda_of(struct backend *b)
{
    return (struct cuda_backend *)b;
}

/* Record the first failure; it is reported by step_end and step_wait. Returns false
 * when rc is an error. */
bool cuda_check(struct cuda_backend *c, cudaError_t rc, const char *what);
/* ERR_DEVICE or ERR_NOMEM with CUDA's own words. */
int cuda_error(struct err *e, cudaError_t rc, const char *what);
/* Device memory owned by the backend, 256-byte aligned. NULL with `e` set. */
void *cuda_alloc(struct cuda_backend *c, size_t n_bytes, const char *what, struct err *e);
/* Rows that a kernel must run over for m: the padded number while a graph is
 * captured. */
int32_t cuda_rows(struct cuda_backend *c, struct mat m);
/* Rows from m's first one to the end of its allocation. */
int32_t cuda_rows_behind(const struct cuda_backend *c, struct mat m);
/* Enqueue the prologue if this step has not been started on the device yet, and what
 * waits in a fused launch; every operation calls it that does not join the fused
 * launch. */
void cuda_start(struct cuda_backend *c);
/* The prologue alone. */
void cuda_start_step(struct cuda_backend *c);
static inline bool cuda_usable(struct cuda_backend *c)
{
    return c->failed.code == 0;
}

/* weights.c */
int cuda_weight(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e);
int cuda_ready(struct backend *b, struct err *e);

/* upload.c */
#define UPLOAD_SLICE_BYTES ((int64_t)4 << 20)
/* Read a piece, whose rows must fit into a slice, and send it to elements [at, ...) of
 * `out`. What is mapped is read until cuda_upload_finish returns, what is not until
 * this does. */
int upload_send(struct cuda_backend *c, const struct weight_piece *p, struct mat out, int64_t at,
                bool mapped, struct err *e);
/* Until all is on the device, or why it is not. */
int cuda_upload_finish(struct cuda_backend *c, struct err *e);
void cuda_upload_release(struct cuda_backend *c);

/* kv.c */
int cuda_kv_create(struct backend *b, const struct kv_layout *l, int32_t n_blocks,
                   int32_t n_host_blocks, struct err *e);
void cuda_kv_release(struct cuda_backend *c);
/* Blocks of one slice of the host pool, which is pinned slice by slice. */
int32_t cuda_kv_slice_blocks(const struct cuda_backend *c);
/* Blocks are copied to or from this one of the host pool: it had better be pinned. */
void cuda_kv_swaps(struct cuda_backend *c, int32_t host_block);

/* swap.c */
int cuda_swap_init(struct cuda_backend *c, struct err *e);
void cuda_swap_release(struct cuda_backend *c);
/* The step's blocks leave and come back; what the compute stream runs next sees them in
 * place. */
void cuda_swap(struct cuda_backend *c, const struct batch *b);
/* The ids of their tokens, which stay on the device, in the compute stream's order. */
void cuda_swap_tokens(struct cuda_backend *c, const struct batch *b);

/* step.c */
int cuda_steps_init(struct cuda_backend *c, struct err *e);
void cuda_steps_release(struct cuda_backend *c);
int cuda_step_begin(struct backend *b, const struct batch *batch, struct err *e);
bool cuda_replay(struct backend *b, const struct batch *batch);
int cuda_step_end(struct backend *b, struct err *e);
int cuda_step_wait(struct backend *b, struct results *ret, struct err *e);
/* Work space for sampling from `logits`; there from the start where the
 * configuration says how large. False: c->failed. */
bool cuda_sample_room(struct cuda_backend *c, struct mat logits);
/* How decode attention cuts n sequences whose chunks begin at start [n + 1]. Before the
 * first attention, which tells the number of query heads and makes the work space, one
 * span does. */
struct attn_cut cuda_attn_cut(const struct cuda_backend *c, const int32_t *start, int32_t n);

/* fused_decode.c */
/* Shared memory that a fused launch's block may have on this device; 0: there are no
 * fused launches. */
int32_t cuda_fused_bytes(struct cuda_backend *c);
int cuda_fused_init(struct cuda_backend *c, struct err *e);
/* Launch what waits. */
void cuda_fused_flush(struct cuda_backend *c);
/* The operation waits in the fused launch; false: it is the caller's to launch, after
 * cuda_start. */
bool cuda_fused_linear(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep);
bool cuda_fused_norm(struct cuda_backend *c, struct mat out, struct mat x, const struct norm *n);
bool cuda_fused_add_norm(struct cuda_backend *c, struct mat out, struct mat x, struct mat y,
                         const struct norm *n, bool partial);
bool cuda_fused_rope_kv(struct cuda_backend *c, struct mat qkv, const struct rope *r,
                        const struct attention *a);
bool cuda_fused_linear_gated(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                             struct mat bias, enum activation act);

/* linear.c */
int cuda_linear_init(struct cuda_backend *c, struct err *e);
void cuda_linear_release(struct cuda_backend *c);
/* ranks_open.c */
int cuda_ranks_init(struct cuda_backend *c, struct err *e);
/* Until NCCL, whose meeting goes on while weights are read, is there. 0, or why it is
 * not. */
int cuda_ranks_ready(struct cuda_backend *c, struct err *e);
void cuda_ranks_release(struct cuda_backend *c);
/* As cuda_fused_bytes, of all ranks together, and how fused launches reach the
 * others. */
int32_t cuda_ranks_fused(struct cuda_backend *c, struct p2p_args *ret);

/* wait.c */
/* Until the event, or all of the stream, is done. When a rank or a stage has failed, at
 * once: its reason is c->failed. */
cudaError_t cuda_wait_event(struct cuda_backend *c, cudaEvent_t event);
cudaError_t cuda_wait_stream(struct cuda_backend *c);
/* Before anything is freed. False: the others have failed, and the device still waits
 * for one that is gone. */
bool cuda_rest(struct cuda_backend *c);
/* Where there are others: 0 while it makes sense to wait for them since start_us, or
 * why not; they have not `what` in time then. */
int cuda_others_gone(struct cuda_backend *c, int64_t start_us, const char *what, struct err *e);
/* Of this process among all ranks of all stages: in messages. */
int32_t cuda_rank_number(const struct cuda_backend *c);

/* ranks.c: all do nothing with one rank, or the plain thing. */
/* `rows` rows of y are this rank's summands. True: done as launch_p2p_sum says. False:
 * y holds the sum, or there is one rank. */
bool cuda_rank_sum(struct cuda_backend *c, struct mat *out, struct mat *x, struct mat y,
                   const struct norm_args *n, int32_t rows);
void cuda_all_reduce(struct backend *b, struct mat x);
void cuda_embed_part(struct backend *b, struct mat out, struct mat table, int32_t first,
                     float scale);
/* rank_sample.c */
/* How the ranks draw the step's samples; before its graph is chosen. */
void cuda_rank_choose(struct cuda_backend *c, const struct batch *b);
/* Where the step's answers are written, once its counts are known: where they are the
 * caller's unless ranks share the drawing. */
void cuda_rank_answers(struct cuda_backend *c, struct step_header *h);
void cuda_gather_logits(struct backend *b, struct mat logits, struct mat part);
/* launch_sample where there are ranks: every rank gets the tokens. */
void cuda_rank_sample(struct cuda_backend *c, struct sample_args *a);

/* stages.c: all do nothing with one stage. */
int cuda_stages_init(struct cuda_backend *c, struct err *e);
/* Until the neighbours are there, which are met while weights are read. */
int cuda_stages_ready(struct cuda_backend *c, struct err *e);
void cuda_stages_release(struct cuda_backend *c);
/* step_begin: the tokens of the step before are on the device, from the last stage
 * if need be. */
int cuda_stage_begin(struct cuda_backend *c, const struct batch *b, struct err *e);
/* step_end, when all is enqueued: what stage_send was given goes to the next stage;
 * the last one keeps its tokens. */
void cuda_stage_end(struct cuda_backend *c);
/* step_wait: the part's tokens, for the step after. */
void cuda_stage_drawn(struct cuda_backend *c, const int32_t *token);
void cuda_stage_receive(struct backend *b, struct mat x);
void cuda_stage_send(struct backend *b, struct mat x);

/* What a product's set-up consists of; layouts as cuBLAS sees them, columns of x, out
 * and residual are rows of ours. */
struct matmul_setup {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w, x, residual, out;
    cublasLtMatmulPreference_t want;
};
/* linear_invariant.c: the algorithm for `deterministic`; its results do not depend on
 * `rows`. any_tile: the operands suit the kernels of which that is known for every
 * tile. */
cublasStatus_t linear_invariant_algo(struct cuda_backend *c, const struct matmul_setup *m,
                                     int32_t rows, bool any_tile,
                                     cublasLtMatmulHeuristicResult_t *ret);
void cuda_linear(struct backend *b, struct mat out, struct mat x, struct mat w,
                 const struct epilogue *ep);
void cuda_linear_gated(struct backend *b, struct mat out, struct mat room, struct mat x,
                       struct mat w, struct mat bias, enum activation act);

#endif
