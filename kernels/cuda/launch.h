/* Kernel launchers, callable from C. Each enqueues on `stream` and returns; errors show
 * in cudaGetLastError.
 *
 * Types are passed as `enum dtype`; the cache has the activations' type or one of 8
 * bits. A launcher that has no kernel for a shape returns false and enqueues nothing.
 * Strides are in elements.
 */
#ifndef QUIRE_KERNELS_CUDA_LAUNCH_H
#define QUIRE_KERNELS_CUDA_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/attention/shared_prefix.h"

#ifdef __cplusplus
extern "C" {
#endif

/* as in the CUDA runtime, whose headers this one does not need */
typedef struct CUstream_st *cudaStream_t;

enum { CUDA_MAX_WINDOWS = 4 }; /* different sliding windows of one model */

/* The key/value cache on the device. The tile of one (block, layer, k|v, head) is
 * stored as panels [head_dim / width][token][width], rows of 128, 64 or 32 bytes, with
 * their 16-byte chunks permuted like the hardware's shared-memory swizzle: a plain bulk
 * copy then produces the layout that ldmatrix and wgmma read without bank conflicts.
 * Without panels: [token][dim]. */
struct kv_view {
    void *base;                                                 /* block 0, layer 0, keys, head 0 */
    int64_t block_stride, layer_stride, kv_stride, head_stride; /* elements */
    int32_t block_size, head_dim, n_kv_heads; /* tokens per block, dims per head, heads */
    int32_t dtype;                            /* enum dtype */
    int32_t panel_log2;                       /* log2 of a panel's width; 0: no panels */
    int64_t scale_offset;                     /* as in struct kv_layout */
};

/* Results of a step: arrays [n_samples], and [n_samples][top_stride] of the best
 * tokens. */
struct step_results {
    int32_t *token;     /* sampled ids, negative: none */
    float *logprob;     /* their log-probabilities */
    int32_t *top_token; /* best tokens, best first */
    float *top_logprob; /* their log-probabilities */
};

/* Head of the staging buffer that carries a step to the device. Offsets are in bytes
 * from the header; the arrays are those of struct batch. */
struct step_header {
    uint64_t step;               /* of the batch */
    int32_t n_tokens, n_padded;  /* rows n_tokens .. n_padded of a captured graph are padding */
    int32_t n_seqs, n_decode;    /* all sequences; leading ones of one token */
    int32_t n_logits, n_samples; /* logits rows; samples taken from them */
    int32_t n_table_update;      /* block-table updates */
    int32_t n_kv_groups;         /* KV groups */
    int32_t n_windows;           /* different sliding windows */
    int32_t top_stride;          /* best tokens per sample */
    int32_t n_late_mask;         /* masks that come after the launch */
    /* Where kernels write results (step.c): pinned host memory, or rank
     * 0's device memory when ranks share the sampling. */
    int32_t *result_token;
    float *result_logprob;
    int32_t *result_top_token;
    float *result_top_logprob;
    /* when ranks share the sampling: rank 0's pinned host memory, where they end up */
    struct step_results host_results;
    int32_t off_token, off_token_src, off_position, off_slot; /* [n_tokens] */
    int32_t off_group_slot;                                   /* [n_tokens][n_kv_groups - 1] */
    int32_t off_q_start, off_kv_len, off_row;                 /* [n_seqs + 1], [n_seqs] */
    int32_t off_update, off_table_block;                      /* table updates, their block ids */
    /* [n_logits], [n_samples], [n_logits + 1] first sample of each logits row */
    int32_t off_logits_token, off_sample, off_group;
    int32_t off_bias, off_mask;                      /* logit biases; allowed-token bitmaps */
    int32_t off_chunk_start;                         /* [n_windows][n_decode + 1] */
    struct split_kv_plan split_kv[CUDA_MAX_WINDOWS]; /* of the decoding sequences, per window */
    struct split_kv_plan shared_split_kv;            /* of the shared runs */
    int32_t n_shared;                                /* runs of sequences with a shared prefix */
    int32_t off_shared, off_shared_start, off_skip;  /* as in step_arrays */
};

/* Arrays at fixed addresses, which launch_prologue fills from the staging buffer and
 * captured kernels read. */
struct step_arrays {
    struct step_header *header;      /* the staging buffer itself */
    int32_t *token, *position;       /* [max_tokens] */
    int32_t *slot;                   /* [n_kv_groups][slot_rows] */
    int32_t *q_start, *kv_len, *row; /* [max_seqs + 1] */
    int32_t *logits_token;           /* [max_samples] */
    int32_t *chunk_start;            /* [CUDA_MAX_WINDOWS][max_seqs + 1] */
    struct shared_run *shared;       /* [max_seqs] */
    int32_t *shared_start;           /* [max_seqs + 1] exclusive sums of the runs' chunks */
    /* [max_seqs] leading chunks of a sequence that its run covers; layers without a
     * window only */
    int32_t *skip;
    int32_t *table;                /* [n_kv_groups][max_seqs][table_width] block ids */
    int32_t slot_rows;             /* of slot, for one KV group */
    int32_t table_width, max_seqs; /* blocks per row, rows of table */
    /* [n_blocks + n_host_blocks][block_size] token id of each slot, host blocks last;
     * NULL: no cache */
    int32_t *slot_token;
    int32_t block_size; /* tokens per block */
    int32_t *sampled;   /* [max_samples] tokens sampled by the latest step */
    /* [max_seqs, late_stride] the step's late masks, once launch_late_wait has run */
    uint32_t *late_mask;
    int32_t late_stride; /* words, a multiple of 4 */
};

/* Compute capability times ten for which the running code was compiled; a newer device
 * may run an older one's PTX. 0: this build has no code for the device. */
int32_t cuda_code_version(void);
/* Shared memory that a block may request, in bytes. The environment variable
 * QUIRE_CUDA_SMEM_LIMIT lowers it, so that tests can emulate devices with less. */
int32_t cuda_shared_limit(void);
/* Multiprocessors of the device. */
int32_t cuda_multiprocessors(void);
/* What its memory transfers at best, by its clock and width, in GB/s. */
int32_t cuda_memory_gbs(void);
/* Whether the environment says that processes share the device (MPS). Then blocks of
 * another process may hold multiprocessors for as long as they like, so no kernel may
 * wait for blocks of its own that are not yet running: such kernels are not used, or
 * launched so that all their blocks start together. */
bool mps_told(void);

/* ---- steps and memory (memory.cu) ---- */
void launch_prologue(const struct step_arrays *a, int32_t max_rows, cudaStream_t stream);
/* Copies n blocks with their token ids: `pair` [n] is (src, dst) of int32 on the
 * device. block_bytes is a multiple of 16. */
void launch_block_copy(const struct step_arrays *a, void *cache, int64_t block_bytes,
                       const int32_t *pair, int32_t n, cudaStream_t stream);
/* Copies only the token ids of such pairs; src counts from block src_first, dst from
 * dst_first. */
void launch_token_copy(const struct step_arrays *a, const int32_t *pair, int32_t n,
                       int32_t src_first, int32_t dst_first, cudaStream_t stream);
/* dst [rows, cols] = src [rows, cols], converted; transposed: src is [cols, rows]. */
void launch_convert(void *dst, int dst_type, int64_t dst_stride, const void *src, int src_type,
                    int64_t src_stride, int32_t rows, int32_t cols, bool transposed,
                    cudaStream_t stream);
/* Fills dst with pseudo-random values, uniform in +-1e-3. */
void launch_dummy(void *dst, int type, int64_t n, uint64_t seed, cudaStream_t stream);

/* ---- element-wise (elementwise.cu) ---- */
/* The table holds ids [first, first + n_ids); rows of other ids become zero. */
void launch_embed(void *out, int64_t out_stride, const void *table, int64_t table_stride,
                  const int32_t *token, int32_t first, int32_t n_ids, int32_t rows, int32_t cols,
                  float scale, int type, cudaStream_t stream);
void launch_embed_position(void *x, int64_t x_stride, const void *table, int table_type,
                           int64_t table_stride, const int32_t *position, int32_t offset,
                           int32_t rows, int32_t cols, int type, cudaStream_t stream);
struct norm_args {
    const void *weight, *bias; /* [cols]; bias may be NULL */
    int32_t weight_type;       /* enum dtype; of the bias too */
    int32_t layer_norm;        /* else RMS */
    float eps, weight_offset;  /* added to the variance; to each weight */
};
/* out = norm(x), after x += y unless y is NULL. */
void launch_norm(void *out, int64_t out_stride, void *x, int64_t x_stride, const void *y,
                 int64_t y_stride, const struct norm_args *n, int32_t rows, int32_t cols, int type,
                 cudaStream_t stream);
/* Norms over ranks (comm/rank_norms.cu): sums[r] = the squares of row r; x = x times
 * what the norm makes of rows of `width` columns with these sums. */
void launch_square_sums(float *sums, int64_t sums_stride, const void *x, int64_t x_stride,
                        int32_t rows, int32_t cols, int type, cudaStream_t stream);
void launch_norm_by_sums(void *x, int64_t x_stride, const float *sums, int64_t sums_stride,
                         int32_t width, const struct norm_args *n, int32_t rows, int32_t cols,
                         int type, cudaStream_t stream);
void launch_gated_act(void *out, int64_t out_stride, const void *gate_up, int64_t in_stride,
                      int32_t rows, int32_t n, int act, int type, cudaStream_t stream);
void launch_add(void *x, int64_t x_stride, const void *y, int64_t y_stride, int32_t rows,
                int32_t cols, int type, cudaStream_t stream);
/* x = cap * tanh(x / cap). */
void launch_soft_cap(float *x, int64_t stride, int32_t rows, int32_t cols, float cap,
                     cudaStream_t stream);
/* x = xielu(x), factors [2]. */
void launch_xielu(void *x, int64_t stride, const float *factors, int32_t rows, int32_t cols,
                  int type, cudaStream_t stream);
/* out = x times the sigmoid of the greatest of each row's n scores. */
void launch_scale_by_score(void *out, int64_t out_stride, const void *x, int64_t x_stride,
                           const float *scores, int64_t scores_stride, int32_t n, int32_t rows,
                           int32_t cols, int type, cudaStream_t stream);
void launch_gather(void *out, int64_t out_stride, const void *x, int64_t x_stride,
                   const int32_t *index, int32_t rows, int32_t cols, int type, cudaStream_t stream);
/* out = act(from + bias) + residual: the part of an epilogue that cuBLASLt cannot do.
 * `from` has out's type and stride, and may be out itself. */
void launch_epilogue(void *out, const void *from, int out_type, int64_t out_stride,
                     const void *bias, int bias_type, int act, const void *residual,
                     int64_t residual_stride, int32_t rows, int32_t cols, cudaStream_t stream);
struct rope_args {
    const float *cos_sin;   /* [positions, rot_dim or more]; NULL: no rotation */
    int64_t cos_sin_stride; /* of a position */
    int32_t query_factors;  /* as in struct rope; 0 without cos_sin */
    /* leading dims to rotate; 1: pairs are neighbours, else half of rot_dim apart */
    int32_t rot_dim, interleaved;
    struct norm_args q_norm, k_norm; /* weight NULL: no norm */
    int32_t n_heads, layer;          /* query heads; layer of the cache */
    float k_over, v_over;            /* of a cache of e4m3: 1 / k_scale, 1 / v_scale */
    float v_eps;                     /* as in struct rope */
    int32_t type;                    /* enum dtype of the activations */
};
void launch_rope_kv(void *qkv, int64_t stride, const struct rope_args *r, const struct kv_view *kv,
                    const int32_t *position, const int32_t *slot, int32_t rows,
                    cudaStream_t stream);

/* ---- attention (attention.cu, attn_decode.cu, attn_prefill.cu) ---- */
struct attn_args {
    void *out;                      /* [rows, n_heads * head_dim] */
    const void *qkv;                /* [rows, (n_heads + 2 * n_kv_heads) * head_dim] */
    int64_t out_stride, qkv_stride; /* elements */
    int32_t layer, n_heads;         /* layer of the cache; query heads */
    float scale, softcap;           /* of scores; softcap 0: none */
    int32_t window, window_index;   /* tokens seen, 0: all; row of step_arrays.chunk_start */
    int32_t chunk;                  /* as in struct attention; of launch_attn_plain alone */
    const float *sinks;             /* [n_heads] logits without values, or NULL */
    float k_scale, v_scale;         /* of a cache of e4m3; else 1 */
    int32_t type;                   /* enum dtype of the activations */
    int32_t shared;                 /* launch_attn_shared went first: merge its results */
    struct kv_view kv;              /* keys and values, this step's included */
};
struct attn_workspace {
    /* split-KV partials [2 * warps][16][head_dim]; all bits ones between launches */
    float *partial_o;
    float *partial_ml;         /* their maxima and sums [2 * warps][16][2]; likewise */
    int32_t blocks;            /* attn_decode_blocks(), of shape.warps warps each */
    struct decode_shape shape; /* warps and ring stages of a block */
    /* [max_seqs][n_heads][head_dim] weighted values over shared chunks, not divided by
     * the sum of weights */
    float *prefix_o;
    float *prefix_ml; /* [max_seqs][n_heads][2] greatest score (times log2 e), sum of weights */
};
/* Any head size, type and block size, one warp per (token, head): tokens [first_token,
 * first_token + n_tokens) of the sequences from first_seq on. */
void launch_attn_plain(const struct attn_args *a, const struct step_arrays *s, int32_t first_seq,
                       int32_t n_seqs, int32_t first_token, int32_t n_tokens, cudaStream_t stream);
/* Attends over the step's shared runs into the workspace's prefix. Query heads per KV
 * head times members of a run must be at most 16. False: no such kernel. */
bool launch_attn_shared(const struct attn_args *a, const struct step_arrays *s,
                        const struct attn_workspace *w, cudaStream_t stream);
/* Decodes the first n_rows sequences, one token each. False: no such kernel, use
 * launch_attn_plain. */
bool launch_attn_decode(const struct attn_args *a, const struct step_arrays *s,
                        const struct attn_workspace *w, int32_t n_rows, cudaStream_t stream);
/* The two for a cache of 8 bits. */
bool launch_attn_decode_narrow(const struct attn_args *a, const struct step_arrays *s,
                               const struct attn_workspace *w, cudaStream_t stream);
bool launch_attn_shared_narrow(const struct attn_args *a, const struct step_arrays *s,
                               const struct attn_workspace *w, cudaStream_t stream);
/* Log2 of the panel width that launch_attn_decode and launch_attn_prefill need for such
 * a cache; 0: neither has a kernel for it. */
int32_t attn_panel_log2(int32_t head_dim, int32_t block_size, int dtype);
/* Blocks that fill the device: one per multiprocessor. */
int32_t attn_decode_blocks(void);
/* Prefill of tiles of at most ATTN_PREFILL_ROWS query rows. False: no such kernel. */
enum { ATTN_PREFILL_ROWS = 128 };
bool launch_attn_prefill(const struct attn_args *a, const struct step_arrays *s,
                         const struct query_tile *tile, int32_t n_tiles, cudaStream_t stream);
/* The same with wgmma, which only code for sm_90a has; false where other code runs. */
bool launch_attn_prefill_hopper(const struct attn_args *a, const struct step_arrays *s,
                                const struct query_tile *tile, int32_t n_tiles,
                                cudaStream_t stream);

/* ---- prefill over a cache of e4m3 that is widened before (widened.cu) ---- */
/* Room for keys and values of the activations' type. */
struct kv_panel {
    void *data;      /* NULL: there is none */
    int64_t n_bytes; /* size */
    int32_t *block;  /* [n_blocks] 0, 1, 2, ...: a block table's ids in the panel */
};
/* What a step widens. */
struct widened_step {
    const struct widened_seq *seq; /* [n_seqs] on the device, in the panel's order */
    const struct query_tile *tile; /* [n_tiles] likewise; rows are first blocks */
    int32_t n_seqs, n_tiles;
    int32_t n_blocks; /* in all; 0: nothing is widened */
};
/* Prefill of all tiles in turns of as many KV heads as the panel holds. False: no such
 * kernel, or not even one head fits; what it has written counts for nothing. */
bool launch_attn_widened(const struct attn_args *a, const struct step_arrays *s,
                         const struct kv_panel *p, const struct widened_step *w,
                         cudaStream_t stream);

/* Batch-invariant attention for `deterministic` (attn_invariant.cu): the first n_single
 * sequences, one token each, and the tiles. False: no such kernel; launch_attn_plain is
 * batch-invariant too, only slow. */
bool launch_attn_invariant(const struct attn_args *a, const struct step_arrays *s, int32_t n_single,
                           const struct query_tile *tile, int32_t n_tiles, cudaStream_t stream);

/* ---- attention over latents (latent.cu, latent_mma.cu) ---- */
struct latent_kv_args {
    void *q, *kv;                /* [rows, n_heads * (nope_dim + rot_dim)], [rows, latent + rot] */
    int64_t q_stride, kv_stride; /* elements */
    const float *cos_sin;        /* [positions, rot_dim] */
    int64_t cos_sin_stride;      /* of a position */
    struct norm_args norm;       /* of the latent; RMS without bias */
    int32_t n_heads, latent, rot_dim, nope_dim, interleaved; /* as in struct latent_attention */
    int32_t layer;                                           /* of the cache */
    struct kv_view view;                                     /* the cache */
};
/* Rotates the ends of the queries, norms and rotates kv, writes it to the cache. */
void launch_latent_kv(const struct latent_kv_args *a, const struct step_arrays *s, int32_t rows,
                      cudaStream_t stream);
/* out[r][head] [n] = w[head] [n, k] x[r][head] [k]. */
struct head_linear_args {
    void *out;                              /* [rows], a head every out_head elements */
    const void *x, *w;                      /* [rows], a head every x_head; [n_heads * n, k] */
    int64_t out_stride, x_stride, w_stride; /* of a row, in elements */
    int32_t out_head, x_head;
    int32_t rows, n_heads, n, k;
};
void launch_head_linear(const struct head_linear_args *a, int type, cudaStream_t stream);
/* Rows of a portion of the step's tokens. */
struct latent_args {
    void *sum;        /* [rows, n_heads * latent] weighted sums of latents */
    const void *q;    /* [rows, n_heads]: latents, a head every latent + rot_dim */
    const void *tail; /* [rows, n_heads]: rotated ends, a head every tail_head */
    int64_t sum_stride, q_stride, tail_stride; /* of a row, in elements */
    int32_t tail_head;
    int32_t first; /* token of row 0 */
    int32_t n_heads, latent, rot_dim, layer;
    float scale;
    struct kv_view kv;
};
/* Any shape and type: n_tokens tokens from a->first on, of the sequences
 * [first_seq, first_seq + n_seqs). */
void launch_latent_plain(const struct latent_args *a, const struct step_arrays *s,
                         int32_t first_seq, int32_t n_seqs, int32_t n_tokens, cudaStream_t stream);
/* Partial results of rows whose keys are divided into n splits. */
struct latent_splits {
    float *o;  /* [rows][n_heads][n][latent] */
    float *ml; /* [rows][n_heads][n][2] greatest score times log2 e, sum of weights */
    int32_t n; /* 1: rows are written as they are */
};
/* Tokens [first, end), of the sequences [first_seq, first_seq + n_seqs); decode: token
 * t is sequence t's only one. */
struct latent_work {
    int32_t first, end, first_seq, n_seqs, decode;
    int32_t invariant; /* decodes get the bits that they would get in a prefill */
    int32_t tokens;    /* of a block; set by the launcher */
};
/* On tensor cores; false: no such kernel. Only decodes may have splits. */
bool launch_latent_mma(const struct latent_args *a, const struct step_arrays *s,
                       const struct latent_splits *p, const struct latent_work *w,
                       cudaStream_t stream);

/* ---- sampling (sample.cu) ---- */
enum { GREEDY_BLOCKS = 32 }; /* at most, per row */
struct sample_args {
    const float *logits;        /* [rows, vocab] at stride */
    int64_t stride;             /* of logits */
    int32_t vocab, first, rows; /* ids per row; row i is row first + i of the step's logits */
    int32_t greedy;             /* every row takes its greatest logit, nothing else is asked for */
    int32_t deterministic;      /* sums over a row do not depend on the number of rows */
    /* [rows, vocab] at work_stride, a multiple of 4: rows as changed by penalties,
     * biases and masks */
    float *work;
    int64_t work_stride; /* of work */
    void *partial;       /* scratch of the greedy kernel, sample_partial_bytes() */
    int32_t *arrived;    /* [rows] blocks done with a row; zero between launches */
};
/* What the host has written (late_masks.c), in pinned memory. */
struct late_flags {
    unsigned long long step[2];  /* [i % 2] the step whose masks are in slot i % 2 */
    unsigned long long given_up; /* not 0: no more masks come */
};
struct late_args {
    uint32_t *host;           /* [2, most, stride] pinned */
    uint32_t *device;         /* [most, stride] */
    struct late_flags *flags; /* pinned; NULL: the backend takes no masks */
    int32_t most, stride;     /* masks of a step; words of one, a multiple of 4 */
};
/* Waits on the device for the masks of the header's step (late_wait.cu). */
void launch_late_wait(const struct late_args *a, const struct step_arrays *s, cudaStream_t stream);
/* Load the kernels of a file that may follow that one in a step; false: CUDA's last
 * error tells why not. */
bool late_wait_load(void);
bool sample_load(void);
bool p2p_sample_load(void);
bool topk_merge_load(void);
int64_t sample_partial_bytes(int32_t max_rows);
void launch_sample(const struct sample_args *a, const struct step_arrays *s, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
