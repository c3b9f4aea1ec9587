/* The seam to the device: a table of about twenty operations.
 *
 * `cpu` is compiled in and is the specification: every other backend is compared with
 * it by tests/unit/kernels/test_ops.c. `cuda` is a plugin, libquire_cuda.so, opened
 * when asked for or when a GPU is there; it exports `quire_backend_open` of type
 * backend_open_fn.
 *
 * Everything is a 2-D `mat`, row-major, except the key/value cache. Operations are
 * ordered as they are called. They return nothing: a device error is sticky and
 * reported by step_end or step_wait. Operations have the grain at which devices fuse,
 * so a family's forward stays straight and no backend has to guess.
 *
 * Thread: all calls come from one thread (the engine's, or the runner's own when
 * `async` is false).
 */
#ifndef QUIRE_KERNELS_BACKEND_H
#define QUIRE_KERNELS_BACKEND_H

#include "kernels/batch.h"

struct comm;     /* comm.h */
struct pipeline; /* pipeline.h */

#define BACKEND_ABI 8 /* raised with every change of this header, batch.h, comm.h or pipeline.h */

enum dtype { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I32 };
static inline int64_t dtype_bytes(enum dtype t)
{
    return t == DTYPE_F32 || t == DTYPE_I32 ? 4 : 2;
}
const char *dtype_name(enum dtype t);

/* A view of backend memory. [rows, cols], element (r, c) at data + (r * stride + c) *
 * dtype_bytes. */
struct mat {
    void *data;
    int64_t stride; /* elements between rows */
    int32_t rows;
    int32_t cols;
    enum dtype dtype;
    void *priv; /* backend's own handle of a weight (packing, scales, algorithm); NULL otherwise */
    /* A result that the next operation reads and no later one: a backend that does both
     * at once need not store it. */
    bool transient;
};

/* The rows [first, first + n) of m, same memory. */
static inline struct mat mat_rows(struct mat m, int32_t first, int32_t n)
{
    m.data = (char *)m.data + first * m.stride * dtype_bytes(m.dtype);
    m.rows = n;
    return m;
}

/* The columns [first, first + n) of m, same memory. */
static inline struct mat mat_cols(struct mat m, int32_t first, int32_t n)
{
    m.data = (char *)m.data + first * dtype_bytes(m.dtype);
    m.cols = n;
    return m;
}

/* One slice of a stored tensor in host memory (usually a mapped file). */
struct weight_piece {
    const void *data;
    enum dtype dtype;
    int32_t rows, cols; /* of the slice as stored */
    int64_t stride;     /* elements between stored rows */
    bool transposed;    /* stored [in, out] (GPT-2's Conv1D): the result is its transpose */
};

enum weight_kind {
    WEIGHT_LINEAR, /* [out, in], read by linear(); the backend may repack it */
    /* [vocab, width], read by embed(); may also be the operand of linear() when tied */
    WEIGHT_EMBEDDING,
    WEIGHT_VECTOR, /* [1, n]: norm weights, biases */
    WEIGHT_TABLE,  /* [rows, cols], read by rope_kv or embed_position; kept as given */
};

/* How to make one weight: pieces stacked by rows (fused qkv is three pieces). No
 * pieces: dummy, uniform in +-1e-3. */
struct weight_desc {
    const char *name; /* for messages */
    enum weight_kind kind;
    enum dtype dtype; /* wanted */
    int32_t rows, cols;
    const struct weight_piece *piece;
    int32_t n_pieces;
    bool tied_head; /* an embedding that linear() reads too */
    bool mapped;    /* the pieces stay valid for the backend's life, so it may read them in place */
};

/* Where a block's keys and values lie. The only place that knows the order of the axes:
 * [block][layer][k|v][kv_head][token][dim]. */
struct kv_layout {
    int32_t block_size; /* tokens */
    int32_t n_layers;
    int32_t n_kv_heads; /* of this rank */
    int32_t head_dim;
    enum dtype dtype;
    int64_t block_stride, layer_stride, kv_stride, head_stride, token_stride; /* elements */
};
void kv_layout_init(struct kv_layout *l, int32_t block_size, int32_t n_layers, int32_t n_kv_heads,
                    int32_t head_dim, enum dtype dtype);
static inline int64_t kv_layout_block_bytes(const struct kv_layout *l)
{
    return l->block_stride * dtype_bytes(l->dtype);
}

enum activation { ACT_NONE, ACT_RELU, ACT_GELU_ERF, ACT_GELU_TANH, ACT_SILU };
enum norm_kind { NORM_RMS, NORM_LAYER };

struct norm {
    enum norm_kind kind;
    struct mat weight; /* [1, n] */
    struct mat bias;   /* [1, n], data NULL: none */
    float eps;
    float weight_offset; /* added to the weight: 1 for Gemma's (1 + w), else 0 */
};

/* What linear does to x W^T before it stores: + bias, then activation, then + residual
 * (same shape as out). */
struct epilogue {
    struct mat bias; /* [1, out], data NULL: none */
    enum activation act;
    struct mat residual; /* [rows, out], data NULL: none; may be `out` itself */
};

struct rope {
    struct mat
        /* WEIGHT_TABLE [positions, rot_dim], float32: rot_dim/2 cosines, then as many
         * sines; data NULL: no rotation */
        cos_sin;
    int32_t rot_dim;            /* leading dims of a head that turn; even */
    bool interleaved;           /* pairs (2i, 2i+1) instead of (i, i + rot_dim/2) */
    struct norm q_norm, k_norm; /* per head, before the rotation (Qwen3); weight.data NULL: none */
};

struct attention {
    int32_t layer;
    int32_t n_heads, n_kv_heads, head_dim; /* of this rank */
    float scale;
    float softcap;  /* 0: none */
    int32_t window; /* a token sees the last `window` tokens, itself included; 0: all */
};

struct backend_config {
    int32_t threads;            /* CPU: 0 = physical cores */
    int32_t device;             /* CUDA ordinal */
    int32_t max_tokens;         /* of a step */
    int32_t max_seqs;           /* table rows, and sequences of a step */
    int32_t max_samples;        /* sampling rows of a step */
    int32_t max_blocks_per_seq; /* width of a table row */
    int32_t vocab;              /* ids of a mask, and of a row of logits; 0: not known, no masks */
    /* rows of logits sampled at a time; 0: not known, room for them is made when met */
    int32_t max_logits;
    bool deterministic;
    struct comm *comm;         /* the other ranks that share each layer; NULL: there are none */
    struct pipeline *pipeline; /* the stages that hold other layers; NULL: there are none */
    /* This rank's place among those of this machine, which divide its cores or have a
     * GPU each; local_world_size 0: alone. */
    int32_t share, local_world_size;
};

struct backend_memory {
    int64_t total_bytes, free_bytes; /* of the device, or of the machine */
};

struct backend {
    const struct backend_ops *ops;
    const char *name; /* "cpu", "cuda" */
    char device[128]; /* for logs: "2 threads, AVX2", "NVIDIA H200" */
    /* for logs: what was amiss at opening and has been made good; empty: nothing */
    char note[256];
    bool async;                 /* operations return before they are done */
    enum dtype act_dtype_of[4]; /* activations' type for weights of a given enum dtype */
};

/* Who calls what: once, at start */
struct backend_ops {
    void (*free)(struct backend *b);
    int (*memory)(struct backend *b, struct backend_memory *ret, struct err *e);
    /* Allocate and fill a weight. Owned by the backend. */
    int (*weight)(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e);
    /* Uninitialised activations, [rows, cols]. Owned by the backend. */
    int (*scratch)(struct backend *b, int32_t rows, int32_t cols, enum dtype t, struct mat *ret,
                   struct err *e);
    /* The key/value cache: n_blocks on the device, n_host_blocks in host memory for
     * swapping (may be 0). Once. */
    int (*kv_create)(struct backend *b, const struct kv_layout *l, int32_t n_blocks,
                     int32_t n_host_blocks, struct err *e);
    /* Block until weights are in place. (optional) */
    int (*ready)(struct backend *b, struct err *e);

    /* a step */
    /* Take the batch: memory operations, table updates, inputs, the attention work
     * list. The arrays are not read after return. */
    int (*step_begin)(struct backend *b, const struct batch *batch, struct err *e);
    /* Replay a recorded step of the same shape between step_begin and step_end: true =
     * done, do not call the operations. False = call them; they may be recorded. `key`
     * names what is called (the model). (optional) */
    bool (*replay)(struct backend *b, const struct batch *batch);
    /* Everything of the step is enqueued (async) or done. */
    int (*step_end)(struct backend *b, struct err *e);
    /* Results of the oldest step not waited for. `ret`'s arrays hold until the step
     * after next begins. */
    int (*step_wait)(struct backend *b, struct results *ret, struct err *e);

    /* operations of a forward pass, inside a step */
    /* out[i] = table[token of i] * scale (embedding scale: 1 but for Gemma). Ids were
     * checked at submit. */
    void (*embed)(struct backend *b, struct mat out, struct mat table, float scale);
    /* x[i] += table[position of i + offset] (learned positions). */
    void (*embed_position)(struct backend *b, struct mat x, struct mat table, int32_t offset);
    /* out = norm(x). */
    void (*norm)(struct backend *b, struct mat out, struct mat x, const struct norm *n);
    /* x += y; out = norm(x). `partial`: y is this rank's summand and is summed over the
     * ranks first. */
    void (*add_norm)(struct backend *b, struct mat out, struct mat x, struct mat y,
                     const struct norm *n, bool partial);
    /* out = epilogue(x W^T). x [rows, in], w [out, in]. */
    void (*linear)(struct backend *b, struct mat out, struct mat x, struct mat w,
                   const struct epilogue *ep);
    /* out [rows, n] = act(x Wg^T + bias) * (x Wu^T + bias): w [2n, in] and bias [1, 2n]
     * (data NULL: none) hold gate's rows, then up's. `room` [rows, 2n], as out: where a
     * backend may put the two factors; its contents are undefined afterwards. */
    void (*linear_gated)(struct backend *b, struct mat out, struct mat room, struct mat x,
                         struct mat w, struct mat bias, enum activation act);
    /* qkv [n_tokens, (n_heads + 2 n_kv_heads) * head_dim]: norm and turn q and k in
     * place, write k and v to the cache. */
    void (*rope_kv)(struct backend *b, struct mat qkv, const struct rope *r,
                    const struct attention *a);
    /* out [n_tokens, n_heads * head_dim] = softmax(q k^T * scale) v over each
     * sequence's cache, causal. q: the first columns of qkv. */
    void (*attention)(struct backend *b, struct mat out, struct mat qkv, const struct attention *a);
    /* x += y (parallel residual and post-norm families); `partial` as in add_norm. */
    void (*add)(struct backend *b, struct mat x, struct mat y, bool partial);
    /* out[i] = x[logits_token[first + i]] for the rows of out. */
    void (*gather)(struct backend *b, struct mat out, struct mat x, int32_t first);
    /* x[i] = cap * tanh(x[i] / cap), float32 (Gemma-2's logits). */
    void (*soft_cap)(struct backend *b, struct mat x, float cap);
    /* Sampling rows whose logits_row lies in [first, first + logits.rows); logits
     * float32 [rows, vocab]; may be overwritten. Of many ranks the first draws; the
     * others take its tokens, for the step after, and those of the first stage too. */
    void (*sample)(struct backend *b, struct mat logits, int32_t first);
    /* These three exist where there are many ranks. */
    /* x summed over the ranks, in place. (optional: one rank) */
    void (*all_reduce)(struct backend *b, struct mat x);
    /* embed where `table` holds the ids [first, first + table.rows) alone: the ranks'
     * tables together give every row. (optional: one rank) */
    void (*embed_part)(struct backend *b, struct mat out, struct mat table, int32_t first,
                       float scale);
    /* logits [rows, vocab], float32, for the rank that samples: the ranks' parts, each
     * the next div_ceil(vocab, ranks) columns. Ranks that share the drawing get the
     * rows that they draw, and where sample needs no whole row the parts may stay where
     * they are: `logits` is for sample alone. Every rank's is a piece of scratch of the
     * same shape. (optional: one rank) */
    void (*gather_logits)(struct backend *b, struct mat logits, struct mat part);
    /* These two exist where there are several stages. */
    /* x = what the stage before sent. (optional: one stage) */
    void (*stage_receive)(struct backend *b, struct mat x);
    /* x to the next stage. (optional: one stage) */
    void (*stage_send)(struct backend *b, struct mat x);
    /* Copy a mat to host memory as float32, rows * cols, when all before it is done:
     * tests and profiling only. */
    int (*download)(struct backend *b, struct mat m, float *out, struct err *e);
    int (*upload)(struct backend *b, struct mat m, const float *in, struct err *e);
};

/* Plugins export this under the name quire_backend_open; `abi` must equal
 * BACKEND_ABI. */
typedef int backend_open_fn(struct backend **ret, int abi, const struct backend_config *c,
                            struct err *e);

/* Open "cpu", "cuda" or "auto" (cuda when a plugin and a usable GPU are there, else
 * cpu). The plugin is looked for beside the executable, then in ../lib/quire, then by
 * the loader. */
int backend_open(struct backend **ret, const char *name, const struct backend_config *c,
                 struct err *e);
int cpu_backend_open(struct backend **ret, int abi, const struct backend_config *c, struct err *e);

#endif
