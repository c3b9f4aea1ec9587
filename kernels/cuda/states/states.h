/* Layers with recurrent states on a device: launchers of the kernels behind
 * backend_ops.recurrence and gate_sigmoid.
 *
 * A recurrence takes two launches, or one where every sequence has one token, with the
 * same arithmetic (decode.cu; decode_heads.cu for many sequences). The first prepares
 * every token on its own: the convolution, the lengths of q and k, and the gates as
 * factors. The second keeps a part of a head's matrix in registers and takes a
 * sequence's tokens one after the other, for prefill as for decodes, so that the bits
 * of a row do not depend on how a sequence is cut into steps or on what else is in
 * them. It writes the state wherever the next token has another block, as drafts have.
 * Layers that have no matrices take one launch a call (scan.cu).
 *
 * Without `deterministic` two other launches take the second one's place for sequences
 * of many tokens in a step: they multiply tokens of a chunk on tensor cores
 * (chunk_states.cu).
 */
#ifndef QUIRE_KERNELS_CUDA_STATES_STATES_H
#define QUIRE_KERNELS_CUDA_STATES_STATES_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { STATE_KEY_DIM = 256, SCAN_KEY_DIM = 64 }; /* most keys of a head, and of a scan */
enum { STATE_CONV_KERNEL = 16 }; /* most inputs of a convolution in launch_convolution */

/* Tokens of a chunk, keys of a head, and the fewest tokens of a sequence in a step that
 * is taken in chunks: more than one that verifies drafts can have. */
enum { STATE_CHUNK = 32, STATE_CHUNK_KEYS = 128, STATE_CHUNK_LEAST = 34 };

/* enum recurrence_kind */
enum states_kind { STATES_DELTA, STATES_SSD, STATES_CONV, STATES_SCAN };

/* x = the norm of each `width` columns, gated, as struct gated_norm. */
struct gated_norm_args {
    void *x;
    const void *gate, *weight; /* weight [width], or [cols] with own_weights */
    int64_t x_stride, gate_stride;
    int32_t weight_type, own_weights, gate_first, width;
    float eps;
};

/* As struct recurrence and its operands in backend.h; vectors are float32. */
struct recurrence_args {
    void *out;                                 /* [rows, n_heads * value_dim] */
    const void *x, *gates;                     /* [rows, channels], [rows, n_gates] */
    int64_t out_stride, x_stride, gate_stride; /* elements */
    int32_t type;                              /* enum dtype of out, x and gates */
    int32_t kind;                              /* enum states_kind */
    int32_t delta;                             /* the gated delta rule, else Mamba-2 */
    int32_t gate_cols;                         /* of a scan: all columns of the gates */
    int32_t n_heads, n_groups, key_dim, value_dim, kernel;
    bool tiled;                    /* head h reads q and k of group h % n_groups */
    const float *conv, *conv_bias; /* [channels, kernel]; [channels] or NULL */
    const float *a_log, *dt_bias;  /* [n_heads]; of a scan [channels, key_dim], [channels] */
    int64_t a_log_stride;          /* of a scan, elements */
    const float *d;                /* [n_heads], of a scan [channels]; or NULL */
    float dt_min, dt_max;
    float *states;        /* the layer's state in block 0 */
    int64_t block_stride; /* of blocks, in floats */
    /* What the first launch leaves to the second: x behind the convolution, with q and
     * k of their final lengths [rows, channels], and by head what S and the summand are
     * multiplied by [rows, n_heads, 2]. Of sequences in chunks q and k are tf32 with
     * columns in the order of tf32_place, and the first factor is the logarithm. */
    float *prepared, *factors;
    /* [rows, n_heads] what the products of a chunk's tokens leave (chunk_states.cu);
     * NULL: all sequences are taken token after token */
    float *chunks;
    /* [sequences, n_groups] blocks that have read a q and k (decode.cu), zero between
     * launches */
    uint32_t *arrivals;
    struct gated_norm_args after; /* of out; gate NULL: none */
};
/* What a launch takes of a step. */
struct recurrence_step {
    int32_t n_seqs, rows;
    int32_t n_long, n_chunks; /* sequences in chunks, and their chunks */
    bool verifies;            /* some have the tokens of others (span.cuh) */
};
/* Rows of sequences whose last token has no slot become zero, or the gated norm of
 * zero. */
void launch_recurrence(const struct recurrence_args *a, const struct step_arrays *s,
                       const struct recurrence_step *w, cudaStream_t stream);
/* All of it where sequences have one token each. */
void launch_recurrence_decode(const struct recurrence_args *a, const struct step_arrays *s,
                              int32_t n_seqs, cudaStream_t stream);
/* The same for many sequences of heads of 128 keys and values, with the gated norm,
 * where none has the tokens of others. False: not for this shape, or too few sequences;
 * nothing was done. */
bool launch_recurrence_heads(const struct recurrence_args *a, const struct step_arrays *s,
                             int32_t n_seqs, cudaStream_t stream);
/* The sequences in chunks, behind the first launch. */
void launch_recurrence_chunks(const struct recurrence_args *a, const struct step_arrays *s,
                              const struct recurrence_step *w, cudaStream_t stream);
/* Whether the device has kernels for chunks; called before the first of them. */
bool recurrence_chunks_prepare(void);
/* The two of the launch that precedes the states' (chunk_scores.cu). */
void launch_chunk_scores(const struct recurrence_args *a, const struct step_arrays *s,
                         const struct recurrence_step *w, cudaStream_t stream);
bool chunk_scores_prepare(void);
/* The convolution of layers without matrices, a token's channels from x to out, which
 * may be x. */
void launch_convolution(const struct recurrence_args *a, const struct step_arrays *s,
                        int32_t n_seqs, int32_t rows, cudaStream_t stream);
/* A selective scan of what the convolution left. */
void launch_scan(const struct recurrence_args *a, const struct step_arrays *s, int32_t n_seqs,
                 cudaStream_t stream);

/* The norm of x [rows, cols] in place. */
void launch_norm_gated(const struct gated_norm_args *a, int32_t rows, int32_t cols, int type,
                       cudaStream_t stream);
/* x *= sigmoid(gate) */
void launch_gate_sigmoid(void *x, int64_t x_stride, const void *gate, int64_t gate_stride,
                         int32_t rows, int32_t cols, int type, cudaStream_t stream);
/* x *= act(y) (enum activation); y_stride 0: y is one value. */
void launch_multiply(void *x, int64_t x_stride, const void *y, int64_t y_stride, int y_type,
                     int32_t rows, int32_t cols, int act, int type, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
