/* State of the CUDA backend, shared by its C files. There is one compute stream, and
 * all calls come from one thread.
 *
 * A step's inputs are packed into one staging buffer (struct step_header and the arrays
 * at its offsets) in pinned memory and copied to the device at once. Sampling kernels
 * write results straight into pinned memory. Pure decode steps are replayed as CUDA
 * graphs, one per padded row count; kernels therefore read only fixed addresses: the
 * device's staging buffer and the arrays that the prologue fills from it.
 */
#ifndef QUIRE_KERNELS_CUDA_CUDA_H
#define QUIRE_KERNELS_CUDA_CUDA_H

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

#include "kernels/backend.h"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/experts/load.h"
#include "kernels/cuda/fused_decode/small_rows.h"
#include "kernels/cuda/gemm/heuristics_products.h"
#include "kernels/cuda/heuristics_speed.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/step/heuristics_verify.h"

enum {
    STEP_RING = 4,                  /* steps in flight, each with its own host buffers */
    GRAPH_MAX_ROWS = 1024,          /* larger decode steps are launched kernel by kernel */
    MATMUL_PLANS = 1024,            /* slots in the cache of cuBLASLt plans */
    HEADS_PLANS = 256,              /* likewise, of products by head */
    WORKSPACE_BYTES = 64 << 20,     /* cuBLASLt's workspace */
    STAGING_PINNED_BYTES = 4 << 20, /* per step in flight; larger steps use ordinary memory */
};

/* Host buffers of one step in flight. */
struct cuda_step {
    uint64_t step;                 /* batch.step, returned with the results */
    char *staging;                 /* pinned, cuda_backend.staging_pinned bytes */
    cudaEvent_t begun, done;       /* around the step's work on the compute stream */
    bool in_flight;                /* step_end was called, step_wait was not */
    int32_t n_samples, top_stride; /* of the batch: samples, and best tokens per sample */
    int32_t *token, *top_token;    /* pinned, written by kernels: [max_samples], [top_cap] */
    float *logprob, *top_logprob;  /* pinned, likewise */
    int64_t top_cap;               /* entries of top_token and top_logprob */
};

/* A decode step captured as a CUDA graph. The first fields but two are its key. */
struct cuda_graph {
    int32_t rows;                                                /* padded number of sequences */
    bool greedy, topk_merge, shared, late_mask, feeds, verifies; /* as in cuda_backend */
    /* steps with this key so far; the second is captured, once all set-up is done */
    int32_t n_seen;
    cudaGraphExec_t exec; /* NULL: not captured yet */
};

/* An allocation made by scratch(). cuda_rows_capacity() looks mats up here to learn how
 * many rows follow the ones that a mat shows. */
struct cuda_scratch {
    char *data;                 /* on the device */
    int64_t n_bytes, row_bytes; /* size, and distance of rows */
};

struct matmul_plan;   /* linear.c */
struct heads_plan;    /* linear_heads.c */
struct expanded_seq;  /* attention/latent_expanded.h */
struct upload;        /* upload.c */
struct swap;          /* swap.c */
struct cuda_ranks;    /* ranks.c */
struct cuda_stages;   /* stages.c */
struct quant_weight;  /* quant/quant.h */
struct groups_layout; /* quant/groups.h */
struct panels_layout; /* quant/panels.h */

/* A norm or a gate whose result only the next operation reads is put off until that is
 * known: a product with a quantised weight gets it as codes alone. */
struct pending_codes {
    enum { PENDING_NONE, PENDING_NORM, PENDING_GATE } kind;
    struct mat out;        /* the result */
    struct mat x, y;       /* of the norm: x += y first, unless y.data is NULL; gate_up: x */
    struct norm_args norm; /* of the norm */
    int32_t rows, act;
};

/* A weight that was stored in blocks and is kept as floats. */
struct cuda_decoded {
    const void *data; /* on the device */
    const char *why;  /* a constant */
};

/* A product of many rows whose result only the next operation reads is put off until
 * that is known: if it adds the result to the residual stream, the product does. */
struct pending_product {
    bool waits;
    struct mat out, x, w;
    struct epilogue epilogue;
};

/* Heads expanded from latents for prefill (latent_expanded.c). */
struct cuda_expanded {
    /* rows of latents, and bytes of keys and values, that a portion may have; 0: heads
     * are never expanded */
    int32_t most_rows;
    int64_t most_bytes;
    void *latents, *heads;       /* device buffers, made and enlarged on demand */
    int64_t n_bytes, head_bytes; /* their sizes */
    /* of the step being built, on the device, portion after portion */
    struct expanded_seq *seq;
    struct query_tile *tile;
};

/* What decides between cuBLASLt and own tiles: timing, the product's shape, or
 * nothing. */
enum cuda_ways { CUDA_WAYS_TIMED, CUDA_WAYS_SHAPE, CUDA_WAYS_LIBRARY };

struct cuda_backend {
    struct backend base;
    struct backend_config config; /* max_samples and max_blocks_per_seq raised to at least 1 */
    cudaStream_t stream;          /* the compute stream */
    int32_t n_sms, capability;    /* multiprocessors; compute capability times 10 (90: 9.0) */
    struct device_speed speed;    /* what choices depend on; of ranks nothing measured */
    int32_t memory_blocks;        /* memory_blocks() of what the driver tells */
    enum cuda_ways ways;          /* of gated products of many rows */
    struct err failed;            /* first failure; sticky, reported by step_end and step_wait */
    bool aborted; /* another rank or stage failed: kernels may wait for it for ever */

    /* memory */
    void **owned;               /* [n_owned] device allocations freed with the backend */
    int32_t n_owned, owned_cap; /* entries used and allocated */
    struct mat *weight;         /* [n_weights] matrices: products are timed with several */
    int32_t n_weights, weight_cap;
    struct cuda_scratch *scratch; /* [n_scratch] */
    int32_t n_scratch;
    struct upload *upload; /* NULL: no weight is being copied to the device */
    uint64_t n_dummies;    /* dummy weights so far: seeds their values */
    float *convert;        /* device buffer through which download() and upload() convert */
    int64_t convert_bytes; /* its size */

    /* cache */
    struct kv_layout kv;     /* of attention's groups, as given to kv_create */
    struct kv_layout states; /* of groups of recurrent states; n_layers 0: none */
    struct kv_view kv_view;  /* the same for kernels, with the device's address */
    struct kv_view group_view[LIMIT_KV_GROUPS]; /* of each group; those of states are unused */
    int32_t n_blocks, n_host_blocks;            /* of the device's cache, of the host pool */
    char *kv_data, *kv_host;                    /* device memory; host pool */
    size_t kv_host_bytes;                       /* size of the host pool */
    pthread_t pinner;                           /* pins the host pool slice by slice (kv.c) */
    bool pinner_running;                        /* pinner must be joined */
    _Atomic bool pinner_stop, pin_wanted;       /* end; pin even while steps run */
    _Atomic size_t kv_pinned_bytes;             /* how much of kv_host is pinned, from its start */
    struct swap *swap;                          /* NULL: no host pool */

    /* the step being built, from step_begin to step_end */
    struct cuda_step step[STEP_RING];  /* step i uses element i % STEP_RING */
    _Atomic int64_t n_begun, n_waited; /* steps enqueued and waited for; the pinner reads them */
    /* bytes of the largest possible step; of a step's own pinned buffer */
    int64_t staging_cap, staging_pinned;
    /* staging_cap bytes each; staging_large is ordinary host memory for steps that
     * exceed staging_pinned, NULL if none can */
    char *staging_device, *staging_large;
    struct step_arrays arrays; /* what captured kernels read */
    /* the step's counts and scalars; its array pointers are stale after step_begin */
    struct batch batch;
    struct verify_rows verify_rows;   /* what its arrays are in a step that verifies drafts */
    const struct step_header *header; /* the step's, in host memory */
    struct query_tile *tile_device;   /* prefill tiles, inside the device's staging buffer */
    int32_t n_tiles;                  /* in tile_device */
    /* between step_begin and step_end; prologue enqueued; stream is being captured;
     * every row takes its greatest logit (batch_greedy) */
    bool in_step, started, capturing, greedy;
    bool topk_merge; /* ranks sample by merging top-k lists (rank_sample.c) */
    /* a draft head runs here; the step's tokens come from the step before, and so do
     * the hidden states that it reads */
    bool is_head, feeds;
    bool shared;   /* shared prefixes are read once in this step */
    bool verifies; /* it verifies drafts, of a model with states */
    /* masks of this step come after its launch; the kernel that waits for them was
     * enqueued */
    bool late_mask, late_waited;
    int32_t padded; /* rows of the step's graph; n_tokens without one */
    /* when the latest operation was handed to the device (clock_us); launch_waits_us */
    int64_t handed_us, launch_waits_us;

    /* graphs */
    struct cuda_graph *graph;     /* [n_graphs] */
    int32_t n_graphs, graphs_cap; /* entries used and allocated */
    struct cuda_graph *recording; /* graph of this step, captured now or at its next step */
    int32_t max_graph_rows;       /* rows that fit into every buffer but logits */
    int32_t logits_rows;          /* rows that fit into the logits; 0: not known yet */
    /* from gather to sample, where operations take one part of the logits after
     * another: the part's first row; -1 outside */
    int32_t logits_first;

    /* attention */
    int32_t window[CUDA_MAX_WINDOWS]; /* [n_windows] sliding windows of the model, 0: none */
    int32_t n_windows;
    int32_t q_heads;                /* query heads per KV head; 0 before the first attention */
    struct attn_workspace attn;     /* made by the first attention */
    struct kv_panel panel;          /* likewise, where a cache of e4m3 is widened for prefill */
    struct widened_step panel_step; /* of the step being built */
    struct cuda_expanded expanded;
    struct latent_splits latent; /* made by the first attention over latents; n does not count */

    /* recurrences: what recurrence_args.prepared, .factors and .chunks point into */
    float *prepared;         /* [prepared_floats] on the device, made by the first one */
    int64_t prepared_floats; /* its size */
    uint32_t *arrivals;      /* [n_arrivals] recurrence_args.arrivals, made likewise */
    int64_t n_arrivals;
    bool state_chunks; /* there are kernels for chunks; known once prepared is there */

    /* sampling */
    struct sample_args sample; /* the work space; the rest is filled in per call */
    int32_t work_rows;         /* rows of sample.work */
    struct late_args late;     /* late masks; zeroed: it takes none */

    /* matrix products */
    cublasLtHandle_t lt;
    void *workspace;               /* WORKSPACE_BYTES on the device */
    struct matmul_plan *plan;      /* [MATMUL_PLANS] hash table */
    struct heads_plan *heads_plan; /* [HEADS_PLANS] likewise */
    struct product_store products; /* algorithms remembered on disk */
    void *side;              /* device buffer for a product's intermediate result (side_buffer) */
    int64_t side_bytes;      /* its size */
    void *widened;           /* device buffer for a quantised weight as floats */
    int64_t widened_bytes;   /* its size */
    uint8_t *quantised;      /* device buffer for a product's activations as codes */
    int64_t quantised_bytes; /* its size */
    float *quantised_scale;  /* [max_tokens] scales of its rows */
    struct pending_codes pending;
    void **quant; /* [n_quant] struct quant_weight; owned */
    int32_t n_quant;
    struct cuda_decoded *decoded; /* [n_decoded] weights whose blocks were decoded here */
    int32_t n_decoded;
    struct cuda_ranks *ranks;   /* NULL: one rank */
    struct cuda_stages *stages; /* NULL: no pipeline */

    struct expert_pending experts; /* the last launch of `experts` */
    int32_t *expert_counter;       /* of routing; NULL: it is not available */
    /* of launch_expert_stream; NULL: it is not available */
    struct expert_exchange *expert_exchange;
    struct expert_load_state {  /* load.h */
        int32_t *counts;        /* [n_layers, n], zero between steps; NULL: not made yet */
        struct load_sums *sums; /* of all steps, on the device */
        struct load_sums *copy; /* in pinned host memory, written by kernels; owned */
        struct load_sums seen;  /* what was read last */
        int32_t n, n_layers;    /* experts of the step's layers; layers so far */
    } expert_load;
    struct pending_product product;

    /* fused launches */
    /* the operations that wait for their common launch; counter NULL: never any */
    struct fused_args fused;
    int32_t fused_shared_bytes;         /* shared memory per block of a fused launch */
    struct small_squares small_squares; /* of products of few rows */
};

static inline struct cuda_backend *cuda_of(struct backend *b)
{
    return (struct cuda_backend *)b;
}

/* Records the first failure, which step_end and step_wait report. Returns false when rc
 * is an error. */
bool cuda_check(struct cuda_backend *c, cudaError_t rc, const char *what);
/* Sets ERR_DEVICE or ERR_NOMEM with CUDA's text and returns it. */
int cuda_error(struct err *e, cudaError_t rc, const char *what);
/* Device memory owned by the backend, 256-byte aligned. NULL: `e` is set. */
void *cuda_alloc(struct cuda_backend *c, size_t n_bytes, const char *what, struct err *e);
/* Frees such memory early; nothing uses it any more. */
void cuda_release(struct cuda_backend *c, void *p);
/* Rows that a kernel must process for m: the padded number during capture. */
int32_t cuda_rows(struct cuda_backend *c, struct mat m);
/* Rows from m's first to the end of its allocation. */
int32_t cuda_rows_capacity(const struct cuda_backend *c, struct mat m);
/* Enqueues the prologue if the step has not started yet, and launches the pending fused
 * operations. Every operation that does not join a fused launch calls this first. */
void cuda_start(struct cuda_backend *c);
/* Enqueues the prologue alone. */
void cuda_start_step(struct cuda_backend *c);
static inline bool cuda_usable(struct cuda_backend *c)
{
    return c->failed.code == 0;
}

/* step/speed.c: finds c->speed and c->ways, once the products' store is open. */
int cuda_speed_init(struct cuda_backend *c, struct err *e);

/* weights.c */
int cuda_weight(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e);
int cuda_ready(struct backend *b, struct err *e);

/* quant/pending_codes.c */
/* Whether `out`, of so many rows, can be put off. */
bool cuda_pending_suits(const struct cuda_backend *c, struct mat out, int32_t rows);
/* Puts p off; what is pending before it must have been run. */
void cuda_pending_put(struct cuda_backend *c, const struct pending_codes *p);
/* Takes what is pending if it is x, for a product of `rows` rows; false: it is not,
 * and *ret is not set. The caller makes the codes by cuda_pending_codes, before the
 * product. */
bool cuda_pending_take(struct cuda_backend *c, struct mat x, int32_t rows,
                       struct pending_codes *ret);
/* fixed: as of launch_quantise_rows. */
void cuda_pending_codes(struct cuda_backend *c, const struct pending_codes *p, float fixed);
/* Runs what is pending as it is. */
void cuda_pending_flush(struct cuda_backend *c);

/* quant/group_weights.c */
/* Whether products of groups (groups.h) run here. */
bool cuda_groups_run(const struct cuda_backend *c);
/* Whether a weight can be kept in groups; *ret: how, else *ret_why, a constant. */
bool cuda_group_fits(const struct cuda_backend *c, const struct weight_desc *d,
                     struct groups_layout *ret, const char **ret_why);
int cuda_group_weight(struct cuda_backend *c, const struct weight_desc *d,
                      const struct groups_layout *l, struct quant_weight *q, struct err *e);
/* A weight of experts that the host packs into panels. */
int cuda_panel_weight(struct cuda_backend *c, const struct weight_desc *d,
                      const struct panels_layout *l, struct quant_weight *q, struct err *e);
/* A weight of blocks, some of which may be floats, as floats; why: a constant, for the
 * log. */
int cuda_decoded_weight(struct cuda_backend *c, const struct weight_desc *d, const char *why,
                        struct mat *ret, struct err *e);

/* quant/parts.c */
/* Whether rows of a weight that linear reads are stored in several ways. */
bool cuda_weight_parted(const struct weight_desc *d);
/* Such a weight, each part of which is one of its own. */
int cuda_parts_weight(struct cuda_backend *c, const struct weight_desc *d, struct mat *ret,
                      struct err *e);
/* Whether w is one; then the part that has a row of it, if ret_part is not NULL. */
bool cuda_is_parted(struct mat w, int32_t row, struct mat *ret_part);
/* cuda_linear and cuda_linear_gated of such a weight, part by part. */
void cuda_parts_linear(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep);
void cuda_parts_gated(struct cuda_backend *c, struct mat out, struct mat both, struct mat x,
                      struct mat w, struct mat bias, enum activation act);

/* quant/weight_use.c */
/* backend_ops.use. */
struct weight_use cuda_weight_use(const struct backend *b, struct mat w, int32_t row);

/* quant/quant_weights.c */
/* A weight whose pieces are all of one format with scales of their own, or a dummy of
 * one. */
int cuda_quant_weight(struct cuda_backend *c, const struct weight_desc *d, struct mat *ret,
                      struct err *e);
/* Room for the weight widened to `act`. False: `e` is set. */
bool cuda_quant_reserve(struct cuda_backend *c, const struct quant_weight *q, enum dtype act,
                        struct err *e);
/* What multiplies weights of the format here, for the log. */
const char *cuda_quant_kernel(const struct cuda_backend *c, const struct weight_format *f);

/* upload.c */
#define UPLOAD_SLICE_BYTES ((int64_t)4 << 20)
/* Sends a piece, each row of which must fit into a slice, to elements [at, ...) of
 * `out`. Mapped data is read until cuda_upload_finish returns; other data is read
 * before this returns. */
int upload_send(struct cuda_backend *c, const struct weight_piece *p, struct mat out, int64_t at,
                bool mapped, struct err *e);
/* Waits until all weights are on the device. 0, or the error. */
int cuda_upload_finish(struct cuda_backend *c, struct err *e);
void cuda_upload_release(struct cuda_backend *c);

/* kv.c */
int cuda_kv_create(struct backend *b, const struct kv_layout *l, int32_t n_blocks,
                   int32_t n_host_blocks, struct err *e);
void cuda_kv_release(struct cuda_backend *c);
/* Makes the panel for prefill over a cache of e4m3 with activations of type `act`, if
 * there is room for it: without it the codes are read as they are. */
void cuda_panel_prepare(struct cuda_backend *c, enum dtype act);
/* Blocks per slice of the host pool, the unit of pinning. */
int32_t cuda_kv_slice_blocks(const struct cuda_backend *c);
/* Requests pinning of the slice that holds host_block, which is about to be copied. */
void cuda_kv_swaps(struct cuda_backend *c, int32_t host_block);

/* backend_cuda.c */
struct norm_args cuda_norm_args(const struct norm *n);
/* The first `rows` rows of an embedding whose table begins with id `first`. */
void cuda_embed_rows(struct cuda_backend *c, struct mat out, struct mat table, int32_t first,
                     int32_t rows, float scale);
/* The step's arrays with the slots and tables of a KV group. */
struct step_arrays cuda_group_arrays(const struct cuda_backend *c, int32_t group);

/* latent.c */
void cuda_latent_kv(struct backend *b, struct mat q, struct mat kv,
                    const struct latent_attention *a);
void cuda_latent_attention(struct backend *b, struct mat out, struct mat q,
                           const struct latent_attention *a, const struct latent_scratch *s);

/* latent_expanded.c */
/* What a portion may have, once the layout of the cache is known. */
void cuda_expanded_init(struct cuda_backend *c);
/* The rows of all sequences that expand (heuristics.h). False: the step has none, or
 * there is no kernel or no room; what was written to out counts for nothing. */
bool cuda_latent_expanded(struct cuda_backend *c, struct mat out, struct mat q,
                          const struct latent_attention *a);

/* gemm/linear_heads.c */
/* A product of each head's columns, `rows` rows: from head h's of x, which begin at
 * column h * x_head, to those of out. w is [n_heads * n, k], or transposed
 * [n_heads * k, n]. */
struct head_products {
    struct mat out, x, w;
    int32_t out_head, x_head, n_heads, rows;
    bool transposed;
};
int cuda_linear_heads_init(struct cuda_backend *c, struct err *e);
void cuda_linear_heads_release(struct cuda_backend *c);
/* For steps that are not captured. False: cuBLASLt has none; nothing was done. */
bool cuda_linear_heads(struct cuda_backend *c, const struct head_products *p);

/* states/states.c */
void cuda_recurrence(struct backend *b, struct mat out, struct mat x, struct mat gates,
                     const struct recurrence *r, const struct output_norm *after);
void cuda_gate_sigmoid(struct backend *b, struct mat x, struct mat gate);
void cuda_multiply(struct backend *b, struct mat x, struct mat y, enum activation act);

/* swap.c */
int cuda_swap_init(struct cuda_backend *c, struct err *e);
void cuda_swap_release(struct cuda_backend *c);
/* Enqueues the step's swaps; later work on the compute stream sees them done. */
void cuda_swap(struct cuda_backend *c, const struct batch *b);
/* Copies the token ids of swapped blocks, which stay on the device, in the compute
 * stream's order. */
void cuda_swap_tokens(struct cuda_backend *c, const struct batch *b);

/* hidden.c: backend_ops of the same names. */
void cuda_hidden_store(struct backend *b, struct mat x, int32_t first);
struct hidden_pool cuda_hidden_pool(struct backend *b);
void cuda_hidden_load(struct backend *b, struct mat out, const struct hidden_pool *p);
void cuda_hidden_own(struct backend *b, struct mat out, struct mat own);
void cuda_hidden_masked(struct backend *b, struct mat out, struct mat row);
void cuda_spread(struct backend *b, struct mat out, struct mat x, struct mat id);

/* step_memory.c */
int cuda_steps_init(struct cuda_backend *c, struct err *e);
void cuda_steps_release(struct cuda_backend *c);
/* Makes work space for sampling from `logits`; it exists from the start where the
 * configuration tells its size. False: c->failed is set. */
bool cuda_sample_reserve(struct cuda_backend *c, struct mat logits);

/* step.c */
int cuda_step_begin(struct backend *b, const struct batch *batch, struct err *e);
bool cuda_replay(struct backend *b, const struct batch *batch);
int cuda_step_end(struct backend *b, struct err *e);
int64_t cuda_launch_waits_us(struct backend *b);
int cuda_step_wait(struct backend *b, struct results *ret, struct err *e);
/* The split-KV plan of n sequences whose chunks begin at start [n + 1]. The number of
 * query heads is known only after the first attention; before it, one split does. */
struct split_kv_plan cuda_split_kv(const struct cuda_backend *c, const int32_t *start, int32_t n);

/* late_masks.c */
int cuda_late_init(struct cuda_backend *c, struct err *e);
/* Kernels that wait for masks go on; called before the device is waited for at the
 * end. */
void cuda_late_give_up(struct cuda_backend *c);
void cuda_late_release(struct cuda_backend *c);
/* backend_ops.masks. */
int cuda_masks(struct backend *b, uint64_t step, const struct late_mask *mask, int32_t n,
               struct err *e);
/* Enqueues the wait for the step's masks, in front of what samples; once in a step. */
void cuda_late_wait(struct cuda_backend *c);

/* fused_decode.c */
/* Shared memory per block of a fused launch on this device; 0: fusion is not
 * available. */
int32_t cuda_fused_bytes(struct cuda_backend *c);
int cuda_fused_init(struct cuda_backend *c, struct err *e);
/* Launches the pending operations. */
void cuda_fused_flush(struct cuda_backend *c);
/* The pending operation that joined last, if it is a norm of `rows` rows into `out`;
 * else NULL. Valid until another joins. */
const struct fused_op *cuda_fused_last_norm(struct cuda_backend *c, struct mat out, int32_t rows);
/* Takes the operation that joined last back out. False: the rest could not be launched
 * without it; nothing was done. */
bool cuda_fused_drop_last(struct cuda_backend *c);
/* Each returns true if the operation joined the fused launch; false: the caller
 * launches it itself, after cuda_start. */
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
/* Waits for NCCL's initialisation, which runs while weights are read. 0, or the
 * error. */
int cuda_ranks_ready(struct cuda_backend *c, struct err *e);
void cuda_ranks_release(struct cuda_backend *c);
/* The least cuda_fused_bytes of all ranks, and in *ret how fused launches reach the
 * peers. */
int32_t cuda_ranks_fused(struct cuda_backend *c, struct p2p_args *ret);
/* Whether products of few rows run on all ranks' devices (small_rows.h). */
bool cuda_ranks_small(const struct cuda_backend *c);

/* wait.c */
/* Wait for the event, or for all of the stream. When a rank or stage has failed they
 * return an error at once; c->failed has its reason. */
cudaError_t cuda_wait_event(struct cuda_backend *c, cudaEvent_t event);
cudaError_t cuda_wait_stream(struct cuda_backend *c);
/* Stops kernels that wait for failed peers; called before anything is freed. False: the
 * device still waits. */
bool cuda_drain(struct cuda_backend *c);
/* 0 while the other ranks and stages are alive and in time since start_us; else the
 * error, whose text `what` completes ("the ranks have not <what> in 60 s"). */
int cuda_check_peers(struct cuda_backend *c, int64_t start_us, const char *what, struct err *e);
/* This process's number among all ranks of all stages, for messages. */
int32_t cuda_rank_number(const struct cuda_backend *c);

/* ranks.c: with one rank these do nothing, or just the local part */
/* All-reduces `rows` rows of y. True: done with residual and norm fused, as
 * launch_p2p_sum says. False: y holds the sum, or there is one rank. */
bool cuda_rank_sum(struct cuda_backend *c, struct mat *out, struct mat *x, struct mat y,
                   const struct norm_args *n, int32_t rows);
/* Whether `mine` is true on all ranks, which the hosts tell one another: all call it in
 * the same step, rarely. False also where a rank is gone; then c->failed is set. */
bool cuda_ranks_all(struct cuda_backend *c, bool mine);
void cuda_all_reduce(struct backend *b, struct mat x);
void cuda_square_sums(struct backend *b, struct mat sums, struct mat x);
void cuda_norm_by_sums(struct backend *b, struct mat x, struct mat sums, int32_t width,
                       const struct norm *n);
void cuda_embed_part(struct backend *b, struct mat out, struct mat table, int32_t first,
                     float scale);
/* rank_sample.c */
/* Decides how the ranks sample this step; called before its graph is chosen. */
void cuda_rank_choose(struct cuda_backend *c, const struct batch *b);
/* Sets where kernels write results: rank 0's device memory when ranks share the
 * sampling, else the host's. */
void cuda_rank_results(struct cuda_backend *c, struct step_header *h);
void cuda_gather_logits(struct backend *b, struct mat logits, struct mat shard);
/* launch_sample over ranks: every rank gets the tokens. */
void cuda_rank_sample(struct cuda_backend *c, struct sample_args *a);

/* stages.c: with one stage these do nothing */
int cuda_stages_init(struct cuda_backend *c, struct err *e);
/* Waits for the neighbours' connections, made while weights are read. */
int cuda_stages_ready(struct cuda_backend *c, struct err *e);
void cuda_stages_release(struct cuda_backend *c);
/* In step_begin: puts the previous step's tokens on the device, received from the last
 * stage if need be. */
int cuda_stage_begin(struct cuda_backend *c, const struct batch *b, struct err *e);
/* In step_end, when all is enqueued: sends what stage_send was given to the next stage.
 * The last stage keeps its tokens. */
void cuda_stage_end(struct cuda_backend *c);
/* In step_wait: passes on the micro-batch's tokens for the next step. */
void cuda_stage_tokens_sampled(struct cuda_backend *c, const int32_t *token);
void cuda_stage_receive(struct backend *b, struct mat x);
void cuda_stage_send(struct backend *b, struct mat x);

/* load.c. The next layer's counts [n], which its routing adds to; NULL: it is not
 * counted. Then the end of a step's operations, and what was counted since the last
 * call. */
int32_t *cuda_expert_counts(struct cuda_backend *c, int32_t n);
void cuda_expert_load_end(struct cuda_backend *c);
struct expert_load cuda_expert_load(struct cuda_backend *c);
void cuda_expert_load_release(struct cuda_backend *c);

/* experts.c: backend_ops.experts. */
void cuda_experts(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                  const struct expert_scratch *s);
/* Launches what the operation has left. */
void cuda_experts_flush(struct cuda_backend *c);
/* The same with x += y in place of y, which nothing else reads, if it is what waits
 * and, where y is partial, can sum it over the ranks; and out = norm(x), where that
 * takes no more launches. */
enum experts_added { EXPERTS_WAIT, EXPERTS_ADDED, EXPERTS_NORMED };
enum experts_added cuda_experts_add(struct cuda_backend *c, struct mat out, struct mat x,
                                    struct mat y, const struct norm_args *n, bool partial);
/* stream_ops.c: launches the only operation that waits for a fused launch, if it is a
 * product that adds to the residual stream. False: nothing was done. */
bool cuda_experts_linear(struct cuda_backend *c);
/* For launches of few rows whose results are summed over the ranks. */
struct expert_ranks cuda_experts_ranks(const struct cuda_backend *c);

/* cuBLASLt's descriptors of a product, in its column-major view: columns of x, out and
 * residual are our rows. */
struct matmul_setup {
    cublasLtMatmulDesc_t desc;                  /* types and epilogue */
    cublasLtMatrixLayout_t w, x, residual, out; /* their columns are set to the row count */
    cublasLtMatmulPreference_t want;            /* limits for the choice: workspace, alignment */
};
/* linear_invariant.c: a batch-invariant algorithm, whose results do not depend on
 * `rows`. any_tile: for these operands all tile sizes of one kernel give the same
 * bits. */
cublasStatus_t linear_invariant_algo(struct cuda_backend *c, const struct matmul_setup *m,
                                     int32_t rows, bool any_tile,
                                     cublasLtMatmulHeuristicResult_t *ret);
void cuda_linear(struct backend *b, struct mat out, struct mat x, struct mat w,
                 const struct epilogue *ep);
void cuda_linear_gated(struct backend *b, struct mat out, struct mat lt_out, struct mat x,
                       struct mat w, struct mat bias, enum activation act);
/* Launches the product that was put off, if there is one. */
void cuda_linear_flush(struct cuda_backend *c);
/* The same with x += its result in place of the result y, if it is what waits and y is
 * not partial. False: nothing was done. */
bool cuda_linear_add(struct cuda_backend *c, struct mat x, struct mat y, bool partial);

#endif
