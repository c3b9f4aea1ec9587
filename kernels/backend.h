/* The device seam: one table of operations per backend.
 *
 * The `cpu` backend is compiled in and is the specification:
 * tests/unit/kernels/test_ops.c compares every other backend with it. `cuda` is a
 * plugin, libquire_cuda.so, which exports `quire_backend_open` of type backend_open_fn.
 *
 * A step is
 *     step_begin   the backend takes the batch
 *     operations   the model's forward pass, then gather and sample; a successful
 *                  replay stands for all of them
 *     step_end     everything is enqueued (async) or done
 *     step_wait    hands out the results of the oldest step not yet waited for
 * With an async backend the next step may begin before the last one is waited for.
 * Operations take effect in the order of their calls. They return nothing: the first
 * failure of a device is sticky, and step_end or step_wait reports it.
 *
 * Data are 2-D matrices, row-major, except for the key/value cache. Operations are as
 * coarse as devices fuse them, so that a model's forward pass is straight-line code and
 * a backend does not have to recognise patterns.
 *
 * Threads: all calls come from one thread, the engine's or, where `async` is false, the
 * runner's own.
 */
#ifndef QUIRE_KERNELS_BACKEND_H
#define QUIRE_KERNELS_BACKEND_H

#include "kernels/batch.h"
#include "kernels/weight_format.h"

struct comm;     /* comm.h */
struct pipeline; /* pipeline.h */

/* Raised whenever a type, or the meaning of an operation, changes in this header,
 * batch.h, weight_format.h, comm.h or pipeline.h: a plugin of another number is
 * refused. */
#define BACKEND_ABI 28

/* The last two are of key/value caches alone: e4m3, and whole numbers from -127 to
 * 127. */
enum dtype { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I32, DTYPE_F8, DTYPE_I8 };
static inline int64_t dtype_bytes(enum dtype t)
{
    return t == DTYPE_F32 || t == DTYPE_I32 ? 4 : t == DTYPE_F8 || t == DTYPE_I8 ? 1 : 2;
}
const char *dtype_name(enum dtype t);

/* A matrix [rows, cols] in the backend's memory, or a view of one. Element (r, c) lies
 * at data + (r * stride + c) * dtype_bytes(dtype), except in a weight that is kept as
 * stored in blocks, whose parts `priv` knows. Owned by the backend that made it. */
struct mat {
    void *data;     /* in memory of the device; NULL: no matrix */
    int64_t stride; /* elements between rows, >= cols */
    int32_t rows;
    int32_t cols;
    enum dtype dtype; /* of an element */
    /* a weight kept in blocks, that of its first piece; NULL: elements of dtype */
    const struct weight_format *format;
    void *priv; /* a weight's handle (packing, scales, algorithm), for its backend alone */
    /* A result that the next operation reads and no later one: a backend that does both
     * at once need not store it. */
    bool transient;
    /* A weight that every rank multiplies whole, with the same operands, and whose
     * results must have the same bits on all of them, since later choices and sums take
     * them as equal: how it is multiplied hangs on no rank's own timing. */
    bool alike;
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

/* ---- weights ---- */

/* One slice of a stored tensor in host memory (usually a mapped file). */
struct weight_piece {
    const void *data;   /* first element of the slice */
    enum dtype dtype;   /* as stored */
    int32_t rows, cols; /* of the slice as stored, before transposing */
    int64_t stride;     /* elements between stored rows */
    bool transposed;    /* stored [in, out] (GPT-2's Conv1D): the weight is its transpose */
    /* Blocks at `data`, whole ones in each row: `dtype` does not count, `stride` counts
     * values, `transposed` is false, and the backend supports the format. NULL:
     * elements of dtype. */
    const struct weight_format *format;
    /* of FORMAT_FP8 .. FORMAT_FP4: those of the slice, as if it were the whole
     * tensor */
    struct weight_scales scales;
    /* Above 0: in each head of so many rows, the rows i and i + head_rows / 2 of the
     * weight are stored as neighbours, 2 i and 2 i + 1 (with `format` alone). */
    int32_t head_rows;
};

/* What a backend does with weights of a format. */
struct weight_support {
    bool as_stored;     /* multiplies and embeds them as stored; false: decode them first */
    enum dtype act;     /* of the activations between operations, if all weights were so */
    const char *kernel; /* that multiplies them, for the log; "" where not as_stored */
    /* Products of experts take them as stored where their rows and columns are
     * multiples of `experts`, 0: never, and a group's columns of expert_group, 0:
     * any; with experts_bf16 where activations are bfloat16. */
    int32_t experts, expert_group;
    bool experts_bf16;
    /* Of floats: fast kernels multiply experts whose rows and columns are multiples of
     * experts_floats, 0: none; others are multiplied slowly. */
    int32_t experts_floats;
};

/* How a weight that was made is multiplied, for the log. */
struct weight_use {
    const char *kernel; /* a constant */
    const char *why;    /* why that is a slow one, or what a user would not expect; NULL: nothing */
    bool decoded;       /* kept as floats, though it came in blocks or codes; why: not NULL */
};

enum weight_kind {
    WEIGHT_LINEAR, /* [out, in], read by linear(); the backend may repack it */
    /* [vocab, width], read by embed(); may also be the operand of linear() when tied */
    WEIGHT_EMBEDDING,
    WEIGHT_VECTOR, /* [1, n]: norm weights, biases */
    WEIGHT_TABLE,  /* [rows, cols], read by rope_kv or embed_position; kept as given */
};

/* Rows of a table that are written when steps first read them. */
struct table_rows {
    /* Write the rows below n where they are not yet; one thread at a time. NULL: all
     * are there. */
    void (*reach)(void *arg, int32_t n);
    void *arg; /* stays for the backend's life */
};

/* How to make one weight: its pieces stacked by rows (a fused qkv has three), those of
 * a WEIGHT_VECTOR side by side. Without pieces the weight is a dummy, uniform in
 * +-1e-3. */
struct weight_desc {
    const char *name; /* for messages */
    enum weight_kind kind;
    enum dtype dtype;   /* wanted; pieces of another type are converted */
    int32_t rows, cols; /* of the weight */
    /* [n_pieces], copied by the call; what they point to must stay until `ready` has
     * returned */
    const struct weight_piece *piece;
    int32_t n_pieces; /* 0: dummy */
    /* of a dummy: the format and the scheme of its codes; NULL: elements of dtype */
    const struct weight_format *dummy_format;
    bool tied_head; /* an embedding that linear() reads too */
    bool logits;    /* what linear() makes of it are logits */
    /* What rounding the inputs of its products loses would be felt in the logits more
     * than of other weights. */
    bool fine_inputs;
    bool experts; /* of all experts of a layer, which experts() alone reads */
    bool mapped;  /* the pieces stay valid for the backend's life, so it may read them in place */
    /* of a mapped WEIGHT_TABLE of one piece that rope_kv reads; only for a backend with
     * late_rows */
    struct table_rows late;
};

/* ---- key/value cache ---- */

/* What a layer keeps of a token. */
enum kv_kind {
    KV_KEYS_VALUES, /* a key and a value of each key/value head */
    KV_LATENT,      /* one vector, which all heads share (struct latent_attention) */
    KV_STATE,       /* nothing: a block holds a state of each layer (struct recurrence) */
};

/* Where a block's keys and values lie in one KV group: layers of one kind of attention
 * that share block tables. All groups take blocks from one pool, so their blocks have
 * the same number of tokens and of bytes. The only place that knows the order of the
 * axes: [block][layer][k|v][kv_head][token][dim], and of latents
 * [block][layer][token][dim].
 *
 * A cache of DTYPE_F8 holds codes of e4m3: an element is its code times the layer's
 * k_scale or v_scale (struct attention). In one of DTYPE_I8 each token has a scale of
 * its own for every head's key and value, the greatest magnitude over 127: float32
 * [token], scale_offset elements behind the head's first code. */
struct kv_layout {
    enum kv_kind kind;
    int32_t block_size; /* tokens */
    int32_t n_layers;   /* of the group on this pipeline stage, unused ones included */
    int32_t n_kv_heads; /* of this rank; of latents 1, on every rank the same */
    int32_t head_dim;   /* elements of one head's key or value, or of a token's latent */
    enum dtype dtype;   /* of an element; need not be that of weights or activations */
    int64_t block_stride, layer_stride, kv_stride, head_stride, token_stride; /* elements */
    int64_t scale_offset; /* of DTYPE_I8, elements, a multiple of 16; else 0: no scales */
    /* Hidden states of a block's tokens, [block_size, hidden] of hidden_dtype, which
     * draft heads read, hidden_offset bytes behind the block's beginning; only group
     * 0's blocks hold any. hidden 0: there is no room for them. */
    int32_t hidden;
    enum dtype hidden_dtype;
    int64_t hidden_offset;
};
void kv_layout_init(struct kv_layout *l, int32_t block_size, int32_t n_layers, int32_t n_kv_heads,
                    int32_t head_dim, enum dtype dtype);
/* The layout of a group of recurrent states: a block holds one of each layer, of
 * state_floats elements of float32 from layer * layer_stride on. n_kv_heads, head_dim
 * and the other strides are 0. */
void kv_layout_init_states(struct kv_layout *l, int32_t block_size, int32_t n_layers,
                           int64_t state_floats);
/* Make blocks of all n layouts as large as the largest. */
void kv_layouts_pad(struct kv_layout *l, int32_t n);
/* Make room in the blocks of all n layouts for hidden states, `hidden` elements of type
 * t a token. */
void kv_layouts_add_hidden(struct kv_layout *l, int32_t n, int32_t hidden, enum dtype t);
/* A cache of latents, `width` elements a token and layer; kv_stride is 0. */
void kv_layout_init_latent(struct kv_layout *l, int32_t block_size, int32_t n_layers, int32_t width,
                           enum dtype dtype);
/* Whether groups of these layouts can share one pool of blocks. */
bool kv_layouts_agree(const struct kv_layout *l, int32_t n);
static inline int64_t kv_layout_block_bytes(const struct kv_layout *l)
{
    return l->block_stride * dtype_bytes(l->dtype);
}

/* ---- parameters of operations ---- */

enum activation { ACT_NONE, ACT_RELU, ACT_GELU_ERF, ACT_GELU_TANH, ACT_SILU };
enum norm_kind { NORM_RMS, NORM_LAYER };

struct norm {
    enum norm_kind kind;
    struct mat weight;   /* [1, n] */
    struct mat bias;     /* [1, n], data NULL: none */
    float eps;           /* added to the mean square (RMS) or the variance (layer norm) */
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
    /* WEIGHT_TABLE [positions, rot_dim or more], float32: rot_dim/2 cosines, then as
     * many sines; data NULL: no rotation */
    struct mat cos_sin;
    /* column rot_dim of the table is a factor of the position's queries, the dims that
     * are not rotated included (Ministral 3) */
    bool query_factors;
    int32_t rot_dim;            /* leading dims of a head that are rotated; even */
    bool interleaved;           /* pairs (2i, 2i+1) instead of (i, i + rot_dim/2) */
    struct norm q_norm, k_norm; /* per head, before the rotation (Qwen3); weight.data NULL: none */
    bool norm_last;             /* these norms come behind the rotation (HunYuan) */
    /* above 0: each head's value is divided by its root mean square, to whose square
     * this is added (Gemma-4) */
    float v_eps;
};

struct attention {
    int32_t group; /* KV group of the layer */
    int32_t layer; /* in the group's blocks, from 0 on every pipeline stage */
    int32_t n_heads, n_kv_heads, head_dim; /* of this rank; see rope_kv for n_kv_heads 0 */
    float scale;                           /* of q.k, before the soft cap */
    float softcap;                         /* 0: none */
    int32_t window; /* a token sees the last `window` tokens, itself included; 0: all */
    /* above 0, and without a window: a token sees those of its chunk, which begin at
     * multiples of so many (Llama 4) */
    int32_t chunk;
    /* [1, n_heads], float32: a logit of each head that has a share of the softmax and
     * no value (gpt-oss's attention sinks); data NULL: none */
    struct mat sinks;
    /* what codes of keys and of values are multiplied by in a cache of DTYPE_F8; 0
     * stands for 1 */
    float k_scale, v_scale;
};

/* The first token that the one at `index` sees, which may be below 0 (padding). */
static inline int32_t attention_first(const struct attention *a, int32_t index)
{
    int32_t first = a->chunk > 0    ? index / a->chunk * a->chunk
                    : a->window > 0 ? index + 1 - a->window
                                    : 0;

    return MAX(first, 0);
}

static inline float attention_k_scale(const struct attention *a)
{
    return a->k_scale > 0 ? a->k_scale : 1;
}

static inline float attention_v_scale(const struct attention *a)
{
    return a->v_scale > 0 ? a->v_scale : 1;
}

/* Multi-head latent attention (DeepSeek-V2, section 2.1; names after it). Of a token
 * the cache holds the normed latent c [latent] and behind it the rotated key r
 * [rot_dim], which all heads share. Head h has the key (K_h c, r) and the value V_h c;
 * its score is scale * (q_nope . K_h c + q_rot . r).
 *
 * K_h is kept transposed, so that the weight also maps a query into the space of
 * latents: q_nope . K_h c = (K_h^T q_nope) . c. Scores and sums are then taken over the
 * cache as it is ("absorbed"), and V_h is applied to a head's sum of latents. */
struct latent_attention {
    int32_t group;           /* KV group of the layer, whose layout is of kind KV_LATENT */
    int32_t layer;           /* in the group's blocks, from 0 on every pipeline stage */
    int32_t n_heads;         /* of this rank */
    int32_t latent;          /* elements of c (kv_lora_rank) */
    int32_t rot_dim;         /* of q_rot and r, all rotated (qk_rope_head_dim); even */
    int32_t nope_dim, v_dim; /* of q_nope and of a value (qk_nope_head_dim, v_head_dim) */
    float scale;             /* of the scores */
    struct norm norm;        /* of the latent, before it is cached */
    struct mat cos_sin;      /* as in struct rope, of rot_dim */
    bool interleaved;        /* as in struct rope */
    struct mat k_up;         /* [n_heads * latent, nope_dim]: K_h^T, head by head */
    struct mat v_up;         /* [n_heads * v_dim, latent]: V_h, head by head */
};

/* Workspace of `latent_attention`, whose contents are undefined afterwards. It has any
 * number of rows: the operation goes over its own in portions of so many. */
struct latent_scratch {
    struct mat q;   /* [rows, n_heads * (latent + rot_dim)] queries over latents */
    struct mat sum; /* [rows, n_heads * latent] weighted sums of latents */
};

/* What becomes of a router's products: each expert's share of all, or a score of its
 * own. */
enum expert_scores { SCORES_SOFTMAX, SCORES_SIGMOID, SCORES_MIXER };

/* A layer of experts (mixture of experts): y = sum of w_e * MLP_e(x) over the `top`
 * experts that are chosen, in the order of their indices.
 *
 * Routing, in float32. s = softmax or sigmoid of (router x + router_bias); c = s +
 * choice_bias counts for the choice alone. With n_groups > 1 the experts are as many
 * equal groups of neighbours, of which the top_groups of the greatest worth stay: a
 * group's worth is its greatest c, or the sum of its two greatest (groups_by_two,
 * DeepSeek-V3). Of the experts that are left the `top` of the greatest c are chosen.
 * Ties go to the smaller index. w_e = factor * s_e, divided by the sum of the chosen
 * ones' s if `normalised`, and multiplied by expert_scale.
 *
 * SCORES_MIXER (Phi-3.5-MoE's inference; Liu et al. 2024, SparseMixer-v2) chooses the
 * experts of the greatest p = router x + router_bias, one after the other, without
 * groups, biases of the choice and `normalised`. The weight of each is its share of a
 * softmax over those experts that are not yet chosen and whose p is near its own, P:
 * (P - p) / max(|p|, P) <= 2 mixer_jitter.
 *
 * MLP_e(x) = down_e (act(gate_e x) * (up_e x)) + down_bias_e. With swiglu_limit L > 0
 * (gpt-oss) the factors are g = min(gate_e x, L) and u = the product clamped to +-L,
 * and the middle is g * sigmoid(1.702 g) * (u + 1). With `self_gated` there is no gate
 * and no bias: the middle is act(up_e x) * (up_e x). A shared expert, if there is one,
 * is added with the factor sigmoid(shared_gate x), or 1 without a shared_gate. */
struct experts {
    struct mat router;      /* [n, hidden] */
    struct mat router_bias; /* [1, n], data NULL: none */
    /* [1, n], float32 (e_score_correction_bias); data NULL: none */
    struct mat choice_bias;
    struct mat expert_scale; /* [1, n], float32, of the weights (Gemma-4); data NULL: none */
    /* [n * 2 * width, hidden]: rows of expert e from e * 2 * width on: its gate, then
     * its up; self_gated: [n * width, hidden] */
    struct mat up;
    struct mat up_bias;                /* [1, n * 2 * width], as up's rows; data NULL: none */
    struct mat down;                   /* [n * hidden, width], expert by expert */
    struct mat down_bias;              /* [1, n * hidden], as down's rows; data NULL: none */
    struct mat shared_up, shared_down; /* data NULL: there is none */
    struct mat shared_gate;            /* [1, hidden]; data NULL: the factor is 1 */
    int32_t n, top, width;             /* width: of this rank's slice */
    /* The experts whose weights are here, alone in up and down and their biases: from
     * `first` on, `held` of them; 0: all. The others' share of a row is left out. */
    int32_t first, held;
    int32_t n_groups, top_groups; /* n is a multiple of n_groups; 0 or 1: no groups */
    enum expert_scores scores;
    enum activation act;
    float factor;       /* of the weights (routed_scaling_factor); 0 stands for 1 */
    float swiglu_limit; /* 0: none */
    float mixer_jitter; /* of SCORES_MIXER */
    bool normalised;
    bool groups_by_two; /* a group's worth is the sum of its two greatest c */
    bool self_gated;    /* only of backends that say so */
};

/* Workspace of `experts`, whose contents are undefined afterwards. Rows: as many as x,
 * or the most of a step. A pair is a row and one of its experts, or a row and a part of
 * the shared expert that is as wide as an expert (experts_parts). */
struct expert_scratch {
    struct mat router_x; /* input: what the router reads in place of x; data NULL: x */
    struct mat scores;   /* [rows, n], float32 */
    struct mat y;        /* [rows, hidden] */
    /* of a backend that takes expert by expert */
    struct mat row;     /* [1, rows], int32 */
    struct mat x;       /* [rows, hidden] */
    struct mat up, act; /* [rows, 2 * width], [rows, width] */
    /* of a backend that takes pairs (backend.expert_pairs) */
    struct mat pair_act, pair_y; /* [experts_most_pairs(), width], [the same, hidden] */
    struct mat lists;            /* [1, experts_list_words()], int32 */
    struct mat shared_up;        /* [rows, rows of shared_up] */
    struct mat shared_act;       /* [rows, half of that] */
};

/* ---- recurrent states ---- */

enum recurrence_kind {
    RECURRENCE_DELTA, /* gated delta rule (Yang, Kautz and Hatamizadeh 2024, eq. 10) */
    RECURRENCE_SSD,   /* Mamba-2 (Dao and Gu 2024, section 3) */
    RECURRENCE_CONV,  /* the convolution alone (LFM2) */
    RECURRENCE_SCAN,  /* Mamba-1 (Gu and Dao 2023, algorithm 2) */
};

/* A layer that keeps a state of fixed size in place of keys and values. Per token there
 * are v [n_heads, value_dim], and q and k [n_groups, key_dim], of which head h reads
 * those of recurrence_group(). They lie in a row of `x` as q, k, v (delta) or
 * as v, k, q (ssd, whose papers call them x, B, C), its channels; each channel first
 * goes through a causal convolution along the sequence:
 *     x_t = silu(bias + sum over i < kernel of conv[i] * x_(t - kernel + 1 + i)).
 * Then each head has a matrix S [key_dim, value_dim], at first 0:
 *     delta: q = q / |q| / sqrt(key_dim), k = k / |k|, with |y|^2 = sum y^2 + 1e-6
 *            S = exp(-exp(a_log) softplus(gate_a + dt_bias)) S
 *            S += k (sigmoid(gate_b) (v - S^T k))^T,   out = S^T q
 *     ssd:   dt = softplus(gate + dt_bias), at least dt_min and at most dt_max
 *            S = exp(-exp(a_log) dt) S + k (dt v)^T,   out = S^T q + d v
 *     scan:  q, k [key_dim] are not convolved, but among the gates, and all heads share
 *            them; each channel c of v has a step and decays of its own:
 *            dt = softplus(gate_c + dt_bias_c)
 *            S_ic = exp(-exp(a_log_ci) dt) S_ic + k_i dt v_c,
 *            out_c = sum over i of S_ic q_i + d_c v_c
 * A layer of RECURRENCE_SCAN has n_groups 0 and takes two calls in a step, because its
 * gates are made of what the convolution gives: one without gates (data NULL), which
 * leaves that in x and does not touch out, then one with them and the same x.
 * A layer of RECURRENCE_CONV has no matrices and key_dim 0: its channels are v, and out
 * is the convolution without silu.
 *
 * A layer's state in a block: the last kernel - 1 inputs of each channel
 * [channels, kernel - 1], oldest first, then S of each head. A step reads it from the
 * block that has the token before the sequence's first one, by the group's table, and
 * writes that behind a token to the block of the token's slot: behind the last one, and
 * behind each whose block is not that of the next, as of drafts
 * (engine/sched/kv/kv_window.h). The first token's block may be the one that is read,
 * the others are not. */
struct recurrence {
    enum recurrence_kind kind;
    int32_t group; /* KV group of the layer */
    int32_t layer; /* in the group's blocks, from 0 on every pipeline stage */
    int32_t n_heads, n_groups, key_dim, value_dim, kernel;
    bool tiled;           /* neighbouring heads have neighbouring groups (llama.cpp) */
    struct mat conv;      /* [1, channels * kernel], WEIGHT_VECTOR */
    struct mat conv_bias; /* [1, channels], data NULL: none */
    /* [1, n_heads]; of scan [channels, key_dim] float32 and [1, channels] */
    struct mat a_log, dt_bias;
    struct mat d;         /* [1, n_heads] of ssd, [1, channels] of scan; data NULL: none */
    float dt_min, dt_max; /* of ssd */
};

/* The group whose q and k a head reads: neighbouring heads share one, or have one
 * each. */
static inline int32_t recurrence_group(const struct recurrence *r, int32_t head)
{
    return r->tiled ? head % r->n_groups : head / (r->n_heads / r->n_groups);
}

static inline int32_t recurrence_channels(const struct recurrence *r)
{
    return 2 * r->n_groups * r->key_dim + r->n_heads * r->value_dim;
}

/* float32 elements of a layer's state. */
static inline int64_t recurrence_floats(const struct recurrence *r)
{
    return (int64_t)recurrence_channels(r) * (r->kernel - 1) +
           (int64_t)r->n_heads * r->key_dim * r->value_dim;
}

/* An RMS norm of groups of neighbouring columns, gated by silu of another matrix. */
struct gated_norm {
    struct mat weight; /* [1, width], one for all groups, or [1, columns] */
    int32_t width;     /* columns of a group */
    float eps;         /* added to the mean square */
    bool gate_first;   /* norm(x * silu(gate)) in place of norm(x) * silu(gate) */
};

/* A gated norm of an operation's output, by `gate` of the output's shape. */
struct output_norm {
    const struct gated_norm *norm;
    struct mat gate;
};

/* Rows of a call up to which the parts of a shared expert may be pairs of every row. */
enum { EXPERTS_PARTS_ROWS = 256 };

/* How many experts of `width` columns a shared one of `shared` columns is; 0: there is
 * none, or it is no whole number of them. */
static inline int32_t experts_parts(int32_t shared, int32_t width)
{
    return width > 0 && shared % width == 0 ? shared / width : 0;
}

/* Pairs of a call of at most `rows` rows, with or without the parts. */
static inline int64_t experts_most_pairs(int32_t top, int32_t parts, int32_t rows)
{
    int64_t with_parts = (int64_t)MIN(rows, EXPERTS_PARTS_ROWS) * (top + parts);

    return MAX((int64_t)rows * top, with_parts);
}

/* Tiles of at least 16 pairs of one expert that `pairs` pairs can make. */
static inline int64_t experts_most_tiles(int32_t n, int64_t pairs)
{
    return pairs / 16 + MIN(n, pairs);
}

/* Room for the pairs of each expert, in any distribution; the parts of a shared expert
 * are so many more of n and of `top`. */
static inline int64_t experts_list_words(int32_t n, int32_t top, int32_t rows)
{
    int64_t pairs = (int64_t)rows * top;

    return 4 * experts_most_tiles(n, pairs) + 2 * pairs + (int64_t)n * (rows + 2) + 4;
}

/* ---- draft heads ---- */

/* Where a backend keeps hidden states, for another backend of the same kind in the same
 * process. That of slot s is width elements, block_bytes * (s / block_size) bytes
 * behind `data` and then row s % block_size. */
struct hidden_pool {
    const void *data; /* of block 0, in memory of the device; NULL: none */
    int64_t block_bytes;
    int32_t block_size; /* tokens */
    int32_t width;      /* elements of a token */
    enum dtype dtype;
};

/* ---- the backend ---- */

struct backend_config {
    int32_t threads;            /* CPU: 0 = physical cores */
    int32_t device;             /* CUDA ordinal */
    int32_t max_tokens;         /* of a step */
    int32_t max_seqs;           /* block-table rows of a KV group, and sequences of a step */
    int32_t max_samples;        /* sampling rows of a step */
    int32_t max_blocks_per_seq; /* width of a block-table row */
    int32_t n_kv_groups;        /* KV groups; 0: one */
    int32_t vocab;              /* ids of a mask, and columns of the logits; 0: unknown, no masks */
    /* rows of logits that one call of sample gets; 0: unknown, buffers for them are
     * allocated on first use */
    int32_t max_logits;
    /* results must be batch-invariant: a row's bits do not depend on what else is in
     * the step (CUDA; the CPU's never do) */
    bool deterministic;
    struct comm *comm;         /* tensor parallelism: the ranks that share each layer; NULL: one */
    struct pipeline *pipeline; /* pipeline parallelism: the other stages; NULL: one stage */
    /* This process's rank among those of its machine, and their number. They divide its
     * cores, or have a GPU each; local_world_size 0: alone. */
    int32_t local_rank, local_world_size;
};

static inline int32_t experts_held(const struct experts *e)
{
    return e->held > 0 ? e->held : e->n;
}

static inline int32_t backend_kv_groups(const struct backend_config *c)
{
    return MAX(c->n_kv_groups, 1);
}

struct backend_memory {
    int64_t total_bytes, free_bytes; /* of the device, or of the machine */
};

struct backend {
    const struct backend_ops *ops; /* static table of its kind */
    const char *name;              /* "cpu", "cuda" */
    char device[128];              /* for logs: "2 threads, avx2", "NVIDIA H200" */
    char note[256];          /* for logs: a problem found at opening and worked around, or "" */
    bool async;              /* operations return before they are done */
    bool expert_pairs;       /* what `experts` wants of its workspace (struct expert_scratch) */
    bool self_gated_experts; /* `experts` computes those without a gate */
    bool mixer_experts;      /* and those that SCORES_MIXER chooses */
    bool convolutions;       /* `recurrence` computes RECURRENCE_CONV */
    bool scans;              /* and RECURRENCE_SCAN */
    bool late_head_norms;    /* rope_kv computes struct rope's norm_last */
    /* `weight` reads a table with `late` in place, and step_begin has the rows written
     * that the batch's positions name */
    bool late_rows;
    /* attention with a window may load keys from the last multiple of this many tokens
     * on that is not behind the first visible one; 0: of 1 */
    int32_t window_align;
};

/* A matrix of scratch. Those of one turn are in use together; of turns that differ only
 * one at a time holds anything. */
struct turn_scratch {
    struct mat *ret;
    int32_t rows, cols;
    enum dtype dtype;
    int32_t turn; /* 0 .. SCRATCH_TURNS - 1 */
};
enum { SCRATCH_TURNS = 3 };
enum { STAGE_MATS = 2 }; /* that a pipeline stage hands on in a step */

/* Functions that return int give 0, or a negative code and the reason in `e`. */
struct backend_ops {
    /* ---- once, around the backend's life ---- */

    /* Wait for what runs, and free everything the backend owns. */
    void (*free)(struct backend *b);
    /* The memory that is free now: the runner sizes the cache by it. */
    int (*memory)(struct backend *b, struct backend_memory *ret, struct err *e);
    /* What the backend does with a format; what it decides for one does not change. */
    struct weight_support (*supports)(const struct backend *b, const struct weight_format *f);
    /* Allocate and fill a weight, or read it in its mapped file. Owned by the
     * backend. */
    int (*weight)(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e);
    /* How row `row` of a weight that `weight` made is multiplied (optional: as
     * `supports` says). */
    struct weight_use (*use)(const struct backend *b, struct mat w, int32_t row);
    /* Uninitialised activations, [rows, cols]. Owned by the backend. */
    int (*scratch)(struct backend *b, int32_t rows, int32_t cols, enum dtype t, struct mat *ret,
                   struct err *e);
    /* The same of n matrices in turns, which may be laid over one another.
     * (optional) */
    int (*scratch_in_turns)(struct backend *b, const struct turn_scratch *s, int32_t n,
                            struct err *e);
    /* The key/value cache: n_blocks on the device, n_host_blocks in host memory for
     * swapping (may be 0). l [n_kv_groups]: the layout of each group. Once. */
    int (*kv_create)(struct backend *b, const struct kv_layout *l, int32_t n_blocks,
                     int32_t n_host_blocks, struct err *e);
    /* Block until weights are in place. (optional) */
    int (*ready)(struct backend *b, struct err *e);

    /* ---- a step ---- */

    /* Take the batch: memory operations, table updates, inputs, the attention work
     * list. The arrays are not read after return. */
    int (*step_begin)(struct backend *b, const struct batch *batch, struct err *e);
    /* Between step_begin and step_end, before any operation: launch the recorded graph
     * of a step of the same shape. True: the step's operations are done and must not be
     * called. False: call them; the backend may record them. A backend serves one
     * model, so the batch alone identifies the graph. (optional) */
    bool (*replay)(struct backend *b, const struct batch *batch);
    /* The late masks of a step, as executor.h says: mask[n] for all micro-batches of
     * the step, maybe before it has begun. Those of two steps are kept. `sample` waits
     * for them where a row has one. NULL: it never waits again. Any thread, one at a
     * time. ERR_INVALID: more than max_seqs, or the vocabulary is unknown. */
    int (*masks)(struct backend *b, uint64_t step, const struct late_mask *mask, int32_t n,
                 struct err *e);
    /* Everything of the step is enqueued (async) or done. */
    int (*step_end)(struct backend *b, struct err *e);
    /* Microseconds that the caller has waited so far inside steps because the device
     * took nothing: its queue was full, or it loaded a kernel. (optional) */
    int64_t (*launch_waits_us)(struct backend *b);
    /* Results of the oldest step not yet waited for. The arrays of `ret` hold until the
     * step after next begins. */
    int (*step_wait)(struct backend *b, struct results *ret, struct err *e);

    /* ---- operations of a forward pass, inside a step ---- */

    /* out[i] = table[token of i] * scale (embedding scale: 1 but for Gemma). Ids were
     * checked at submission. */
    void (*embed)(struct backend *b, struct mat out, struct mat table, float scale);
    /* x[i] += table[position of i + offset] (learned positions). */
    void (*embed_position)(struct backend *b, struct mat x, struct mat table, int32_t offset);
    /* out = norm(x). */
    void (*norm)(struct backend *b, struct mat out, struct mat x, const struct norm *n);
    /* x += y; out = norm(x). `partial`: y is this rank's summand and is all-reduced
     * first. */
    void (*add_norm)(struct backend *b, struct mat out, struct mat x, struct mat y,
                     const struct norm *n, bool partial);
    /* out = epilogue(x W^T). x [rows, in], w [out, in]; ep NULL: nothing but the
     * product. */
    void (*linear)(struct backend *b, struct mat out, struct mat x, struct mat w,
                   const struct epilogue *ep);
    /* out [rows, n] = act(x Wg^T + bias) * (x Wu^T + bias): w [2n, in] and bias [1, 2n]
     * (data NULL: none) hold gate's rows, then up's. `workspace` [rows, 2n], of out's
     * type: a backend may put the two factors there; its contents, and what lies
     * between its rows, are undefined afterwards. */
    void (*linear_gated)(struct backend *b, struct mat out, struct mat workspace, struct mat x,
                         struct mat w, struct mat bias, enum activation act);
    /* y [rows, hidden] = what the experts make of x [rows, hidden]; y and x are
     * different memory. (optional: models with experts are refused) */
    void (*experts)(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                    const struct expert_scratch *s);
    /* qkv [n_tokens, (n_heads + 2 n_kv_heads) * head_dim]: norm and rotate q and k in
     * place, norm v, write k and v to the cache. With n_kv_heads 0 there is nothing but
     * q: attention reads what another layer wrote. */
    void (*rope_kv)(struct backend *b, struct mat qkv, const struct rope *r,
                    const struct attention *a);
    /* out [n_tokens, n_heads * head_dim] = softmax(q k^T * scale) v over each
     * sequence's cache, causal. q: the first columns of qkv. */
    void (*attention)(struct backend *b, struct mat out, struct mat qkv, const struct attention *a);
    /* out [n_tokens, n_heads * value_dim] = the layer's recurrence over x [n_tokens,
     * channels], from and to the states of the step's sequences. gates: [n_tokens, 2
     * n_heads], b and then a (delta), [n_tokens, n_heads] (ssd), nothing (conv), or the
     * channels' and at the row's end k and q (scan; between them any columns). x is
     * overwritten; out, x and gates are different memory. The rows of a token have
     * the same bits however a sequence is cut into steps. With `after` (of delta
     * and ssd; NULL: none) out is normed and gated. (optional: models with states are
     * refused) */
    void (*recurrence)(struct backend *b, struct mat out, struct mat x, struct mat gates,
                       const struct recurrence *r, const struct output_norm *after);
    /* x *= sigmoid(gate), of the same shape. (optional with `recurrence`) */
    void (*gate_sigmoid)(struct backend *b, struct mat x, struct mat gate);
    /* q [n_tokens, n_heads * (nope_dim + rot_dim)]: rotate q_rot, the end of each head,
     * in place. kv [n_tokens, latent + rot_dim]: norm the latent and rotate the key in
     * place, then write both to the cache. (optional, with latent_attention: models
     * with latents are refused) */
    void (*latent_kv)(struct backend *b, struct mat q, struct mat kv,
                      const struct latent_attention *a);
    /* out [n_tokens, n_heads * v_dim] = attention over each sequence's latents, causal.
     * q: as latent_kv left it. */
    void (*latent_attention)(struct backend *b, struct mat out, struct mat q,
                             const struct latent_attention *a, const struct latent_scratch *s);
    /* x *= act(y), where y has x's shape, or is one value, [1, 1], for all. y may be
     * x. */
    void (*multiply)(struct backend *b, struct mat x, struct mat y, enum activation act);
    /* x = xielu(x) (Huang and Schlag 2024, integrated ELUs): with p = softplus(factors
     * [0]) and n = 1/2 + softplus(factors[1]), factors [1, 2] of float32,
     *     v > 0: p v^2 + v / 2,   else n (exp(min(v, -1e-6)) - 1 - v) + v / 2.
     * (optional: models with it are refused) */
    void (*xielu)(struct backend *b, struct mat x, struct mat factors);
    /* out = x times the sigmoid of each row's greatest score, scores [rows, n] of
     * float32. out may be x. (optional: models whose experts read that are refused) */
    void (*scale_by_score)(struct backend *b, struct mat out, struct mat x, struct mat scores);
    /* x += y (parallel residual and post-norm families); `partial` as in add_norm. */
    void (*add)(struct backend *b, struct mat x, struct mat y, bool partial);
    /* out[i] = x[logits_token[first + i]] for the rows of out. */
    void (*gather)(struct backend *b, struct mat out, struct mat x, int32_t first);
    /* x[i] = cap * tanh(x[i] / cap), float32 (Gemma-2's logits). */
    void (*soft_cap)(struct backend *b, struct mat x, float cap);
    /* Sampling rows whose logits_row lies in [first, first + logits.rows); logits
     * float32 [rows, vocab], which may be overwritten. With tensor parallelism each row
     * is sampled by one rank (on CPUs always rank 0), and every rank gets its token as
     * input of the next step; with a pipeline so does stage 0. Rank 0 of the last stage
     * has the results. */
    void (*sample)(struct backend *b, struct mat logits, int32_t first);

    /* ---- tensor parallelism (optional with one rank) ---- */

    /* x = the sum of the ranks' x, on every rank, in place. */
    void (*all_reduce)(struct backend *b, struct mat x);
    /* sums [rows, 1], float32: the sum of the squares of each row of x. (optional with
     * norm_by_sums: models whose norms run over ranks are refused) */
    void (*square_sums)(struct backend *b, struct mat sums, struct mat x);
    /* x = the RMS norm of rows of `width` columns, of which x has some and n->weight
     * the same ones; the squares of a whole row add up to its sum in sums [rows, 1]. */
    void (*norm_by_sums)(struct backend *b, struct mat x, struct mat sums, int32_t width,
                         const struct norm *n);
    /* embed where `table` holds the ids [first, first + table.rows) alone: together the
     * ranks' tables have every id. out is the same on every rank. */
    void (*embed_shard)(struct backend *b, struct mat out, struct mat table, int32_t first,
                        float scale);
    /* logits [rows, vocab], float32, from the ranks' parts, each the next
     * div_ceil(vocab, ranks) columns. `logits` is scratch of the same shape on every
     * rank and is for `sample` alone: a rank gets the rows that it samples, and where
     * `sample` needs no whole row nothing moves. */
    void (*gather_logits)(struct backend *b, struct mat logits, struct mat part);

    /* ---- pipeline parallelism (optional with one stage) ---- */

    /* x = what the stage before sent. */
    void (*stage_receive)(struct backend *b, struct mat x);
    /* x to the next stage; at most STAGE_MATS a step, received in the same order. */
    void (*stage_send)(struct backend *b, struct mat x);

    /* ---- draft heads (optional: they are refused) ---- */

    /* x [n_tokens, n] becomes elements [first, first + n) of the hidden states of the
     * step's tokens, at their slots of group 0 (struct kv_layout). */
    void (*hidden_store)(struct backend *b, struct mat x, int32_t first);
    /* The backend's hidden states, once kv_create was called; they stay there for its
     * life. */
    struct hidden_pool (*hidden_pool)(struct backend *b);
    /* out [n_tokens, p->width] = what the pool of another backend has at the step's
     * slots. That backend has no step in flight. */
    void (*hidden_load)(struct backend *b, struct mat out, const struct hidden_pool *p);
    /* out[i] = own[token_src of i] (0 where it is below 0): what the step before left
     * for the token that it sampled. */
    void (*hidden_own)(struct backend *b, struct mat out, struct mat own);
    /* out[i] = row [1, out.cols] where token_src of i is TOKEN_MASKED; other rows stay.
     * (optional: the backend runs no heads that draft in parallel) */
    void (*hidden_masked)(struct backend *b, struct mat out, struct mat row);
    /* out [rows, vocab], float32: column id[i] = column i of x [rows, n], float32,
     * and the others -infinity. id [1, n], a WEIGHT_TABLE of float32: whole numbers,
     * ascending and below vocab. */
    void (*spread)(struct backend *b, struct mat out, struct mat x, struct mat id);

    /* ---- tests and profiling ---- */

    /* Copy a mat to host memory as float32, rows * cols, when all before it is done. */
    int (*download)(struct backend *b, struct mat m, float *out, struct err *e);
    /* The reverse: float32 from host memory, converted to the mat's type. */
    int (*upload)(struct backend *b, struct mat m, const float *in, struct err *e);
};

/* The activations' type for weights of type t. */
static inline enum dtype backend_act_dtype(const struct backend *b, enum dtype t)
{
    return b->ops->supports(b, weight_format_of((enum weight_format_id)t)).act;
}

/* Plugins export this under the name quire_backend_open. They refuse an `abi` other
 * than their own BACKEND_ABI. */
typedef int backend_open_fn(struct backend **ret, int abi, const struct backend_config *c,
                            struct err *e);

/* Open "cpu", "cuda" or "auto" (cuda when a plugin and a usable GPU are there, else
 * cpu). The plugin is looked for beside the executable, then in ../lib/quire, then by
 * the loader. */
int backend_open(struct backend **ret, const char *name, const struct backend_config *c,
                 struct err *e);
int cpu_backend_open(struct backend **ret, int abi, const struct backend_config *c, struct err *e);

#endif
