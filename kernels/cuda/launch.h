/* The kernels as C sees them: every launcher enqueues on `stream` and returns; errors
 * show in cudaGetLastError.
 *
 * Types come as `enum dtype`; activations and cache share one type. A launcher that has
 * no kernel for a shape returns false and enqueues nothing. Shapes stand behind the
 * parameters.
 */
#ifndef QUIRE_KERNELS_CUDA_LAUNCH_H
#define QUIRE_KERNELS_CUDA_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/attention/shared_prefix.h"

#ifdef __cplusplus
extern "C" {
#endif

/* as the runtime has it, so that this header needs none of CUDA's */
typedef struct CUstream_st *cudaStream_t;

enum { CUDA_MAX_WINDOWS = 4 }; /* different sliding windows of one model */

/* The key/value cache on the device. With panels (64, 32 or 16 dims wide, as the head
 * size divides) the tile of one (block, layer, k|v, head) is stored as [head_dim /
 * width][token][width] with its 16-byte chunks permuted as the hardware's swizzle of
 * such rows does, so that a plain bulk copy brings shared memory into the order that
 * ldmatrix and wgmma read without bank conflicts. Else [token][dim]. */
struct kv_view {
    void *base;
    int64_t block_stride, layer_stride, kv_stride, head_stride; /* elements */
    int32_t block_size, head_dim, n_kv_heads;
    int32_t dtype;
    int32_t panel_log2; /* of their width; 0: no panels */
};

/* Answers of a step: [n_samples], and [n_samples][top_stride]. */
struct step_answers {
    int32_t *token;
    float *logprob;
    int32_t *top_token;
    float *top_logprob;
};

/* Start of the staging buffer that carries a step to the device; offsets are bytes from
 * the header. */
struct step_header {
    int32_t n_tokens, n_padded; /* rows n_tokens .. n_padded of a captured graph are padding */
    int32_t n_seqs, n_decode;
    int32_t n_logits, n_samples;
    int32_t n_table_update;
    int32_t n_windows;
    int32_t top_stride;
    /* Where a step_answers' arrays are written: in pinned host memory, or on rank 0's
     * device where ranks share the drawing. */
    int32_t *result_token;
    float *result_logprob;
    int32_t *result_top_token;
    float *result_top_logprob;
    struct step_answers told; /* then: rank 0's, in pinned host memory */
    int32_t off_token, off_token_src, off_position, off_slot;
    int32_t off_q_start, off_kv_len, off_row;
    int32_t off_update, off_table_block;
    int32_t off_logits_token, off_sample, off_group;
    int32_t off_bias, off_mask;
    int32_t off_chunk_start;               /* [n_windows][n_decode + 1] */
    struct attn_cut cut[CUDA_MAX_WINDOWS]; /* of the decoding sequences */
    struct attn_cut shared_cut;            /* of the runs */
    int32_t n_shared;                      /* runs */
    int32_t off_shared, off_shared_start, off_skip;
};

/* Arrays at fixed addresses, filled from the staging buffer by launch_prologue; what
 * captured kernels read. */
struct step_arrays {
    struct step_header *header;       /* the staging buffer itself */
    int32_t *token, *position, *slot; /* [max_tokens] */
    int32_t *q_start, *kv_len, *row;  /* [max_seqs + 1] */
    int32_t *logits_token;            /* [max_samples] */
    int32_t *chunk_start;             /* [CUDA_MAX_WINDOWS][max_seqs + 1] */
    struct shared_run *shared;        /* [max_seqs] */
    int32_t *shared_start;            /* [max_seqs + 1] exclusive sums of their chunks */
    /* [max_seqs] first chunks of a sequence that a run covers; without a window only */
    int32_t *skip;
    int32_t *table; /* [max_seqs, table_width] block ids */
    int32_t table_width, max_seqs;
    /* [n_blocks + n_host_blocks][block_size] token ids, the host pool's behind; NULL:
     * no cache */
    int32_t *slot_token;
    int32_t block_size;
    int32_t *sampled; /* [max_samples] tokens of the latest step */
};

/* The compute capability, times ten, for which the code that runs was compiled: a newer
 * device may run PTX of an older one. 0: this build has no code for the device. */
int32_t cuda_code_version(void);
/* Bytes of shared memory that a block may ask for. The environment variable
 * QUIRE_CUDA_SMEM_LIMIT lowers it, so that tests reach what devices with less of it
 * run. */
int32_t cuda_shared_limit(void);

/* steps and memory (memory.cu) */
void launch_prologue(const struct step_arrays *a, int32_t max_rows, cudaStream_t stream);
/* All pairs (src, dst) of int32 at `pair`, with their token ids; block_bytes a
 * multiple of 16. */
void launch_block_copy(const struct step_arrays *a, void *cache, int64_t block_bytes,
                       const int32_t *pair, int32_t n, cudaStream_t stream);
/* The token ids of such pairs alone; src counts from block src_first, dst from
 * dst_first. */
void launch_token_copy(const struct step_arrays *a, const int32_t *pair, int32_t n,
                       int32_t src_first, int32_t dst_first, cudaStream_t stream);
/* dst [rows, cols] at stride dst_stride = src [rows, cols] at src_stride (or its
 * transpose: src [cols, rows]). */
void launch_convert(void *dst, int dst_type, int64_t dst_stride, const void *src, int src_type,
                    int64_t src_stride, int32_t rows, int32_t cols, bool transposed,
                    cudaStream_t stream);
/* Uniform in +-1e-3. */
void launch_dummy(void *dst, int type, int64_t n, uint64_t seed, cudaStream_t stream);

/* element-wise (elementwise.cu); strides in elements */
/* The table holds ids [first, first + n_ids); rows of others become zero. */
void launch_embed(void *out, int64_t out_stride, const void *table, int64_t table_stride,
                  const int32_t *token, int32_t first, int32_t n_ids, int32_t rows, int32_t cols,
                  float scale, int type, cudaStream_t stream);
void launch_embed_position(void *x, int64_t x_stride, const void *table, int table_type,
                           int64_t table_stride, const int32_t *position, int32_t offset,
                           int32_t rows, int32_t cols, int type, cudaStream_t stream);
struct norm_args {
    const void *weight, *bias; /* [cols]; bias may be NULL */
    int32_t weight_type;
    int32_t layer_norm; /* else RMS */
    float eps, weight_offset;
};
/* y NULL: out = norm(x); else x += y first. */
void launch_norm(void *out, int64_t out_stride, void *x, int64_t x_stride, const void *y,
                 int64_t y_stride, const struct norm_args *n, int32_t rows, int32_t cols, int type,
                 cudaStream_t stream);
void launch_gated_act(void *out, int64_t out_stride, const void *gate_up, int64_t in_stride,
                      int32_t rows, int32_t n, int act, int type, cudaStream_t stream);
void launch_add(void *x, int64_t x_stride, const void *y, int64_t y_stride, int32_t rows,
                int32_t cols, int type, cudaStream_t stream);
/* x = cap * tanh(x / cap). */
void launch_soft_cap(float *x, int64_t stride, int32_t rows, int32_t cols, float cap,
                     cudaStream_t stream);
void launch_gather(void *out, int64_t out_stride, const void *x, int64_t x_stride,
                   const int32_t *index, int32_t rows, int32_t cols, int type, cudaStream_t stream);
/* out = act(from + bias) + residual: what a matrix product's own epilogue could not do.
 * from: as out, may be it. */
void launch_epilogue(void *out, const void *from, int out_type, int64_t out_stride,
                     const void *bias, int bias_type, int act, const void *residual,
                     int64_t residual_stride, int32_t rows, int32_t cols, cudaStream_t stream);
struct rope_args {
    const float *cos_sin; /* [positions, rot_dim]; NULL: no rotation */
    int64_t cos_sin_stride;
    int32_t rot_dim, interleaved;
    struct norm_args q_norm, k_norm; /* weight NULL: none */
    int32_t n_heads, layer;
};
void launch_rope_kv(void *qkv, int64_t stride, const struct rope_args *r, const struct kv_view *kv,
                    const int32_t *position, const int32_t *slot, int32_t rows,
                    cudaStream_t stream);

/* attention (attention.cu, attn_decode.cu, attn_prefill.cu) */
struct attn_args {
    void *out;
    const void *qkv;
    int64_t out_stride, qkv_stride; /* elements */
    int32_t layer, n_heads;
    float scale, softcap;
    int32_t window, window_index;
    int32_t shared; /* the step has runs of shared chunks; launch_attn_shared comes first */
    struct kv_view kv;
};
struct attn_workspace {
    float *partial_o;  /* [2 * warps][16][head_dim], blank between launches: all bits ones */
    float *partial_ml; /* [2 * warps][16][2], likewise */
    int32_t blocks;    /* attn_decode_blocks, of shape.warps each */
    struct decode_shape shape;
    /* [max_seqs][n_heads][head_dim] of shared chunks: weighted values, not divided by
     * the sum */
    float *prefix_o;
    float *prefix_ml; /* [max_seqs][n_heads][2] greatest score (times log2 e), sum */
};
/* Any head size, type and block size, one warp a (token, head): tokens first .. first +
 * n of sequences from first_seq. */
void launch_attn_plain(const struct attn_args *a, const struct step_arrays *s, int32_t first_seq,
                       int32_t n_seqs, int32_t first_token, int32_t n_tokens, cudaStream_t stream);
/* The shared runs of the step into the workspace's prefix. Query heads of a KV head
 * times members at most 16. False: none. */
bool launch_attn_shared(const struct attn_args *a, const struct step_arrays *s,
                        const struct attn_workspace *w, cudaStream_t stream);
/* The first n_rows sequences, one token each. False: no such kernel, use
 * launch_attn_plain. */
bool launch_attn_decode(const struct attn_args *a, const struct step_arrays *s,
                        const struct attn_workspace *w, int32_t n_rows, cudaStream_t stream);
/* Log2 of the panels' width that launch_attn_decode and launch_attn_prefill want of
 * such a cache; 0: no kernel of theirs takes it. */
int32_t attn_panel_log2(int32_t head_dim, int32_t block_size, int dtype);
/* Blocks that fill the device. */
int32_t attn_decode_blocks(void);
/* Tiles of at most ATTN_PREFILL_ROWS query rows. False as above. */
enum { ATTN_PREFILL_ROWS = 128 };
bool launch_attn_prefill(const struct attn_args *a, const struct step_arrays *s,
                         const struct query_tile *tile, int32_t n_tiles, cudaStream_t stream);
/* The same by wgmma, which only code for sm_90a has. False too where other code
 * runs. */
bool launch_attn_prefill_hopper(const struct attn_args *a, const struct step_arrays *s,
                                const struct query_tile *tile, int32_t n_tiles,
                                cudaStream_t stream);

/* For `deterministic` (attn_invariant.cu): the first n_single sequences, one token
 * each, and the tiles. False: no such kernel; launch_attn_plain is as exact, only
 * slow. */
bool launch_attn_invariant(const struct attn_args *a, const struct step_arrays *s, int32_t n_single,
                           const struct query_tile *tile, int32_t n_tiles, cudaStream_t stream);

/* sampling (sample.cu) */
enum { GREEDY_BLOCKS = 32 }; /* at most, a row */
struct sample_args {
    const float *logits; /* [rows, vocab] at stride */
    int64_t stride;
    int32_t vocab, first, rows; /* row i is row first + i of the step's logits */
    int32_t greedy;             /* every row takes its greatest logit, nothing else is asked */
    int32_t deterministic;      /* one way to add up a row, however many rows there are */
    float *work; /* [rows, vocab] at work_stride, a multiple of 4: rows as samples ask for them */
    int64_t work_stride;
    void *partial;    /* sample_partial_bytes */
    int32_t *arrived; /* [rows], zero between launches */
};
int64_t sample_partial_bytes(int32_t max_rows);
void launch_sample(const struct sample_args *a, const struct step_arrays *s, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
