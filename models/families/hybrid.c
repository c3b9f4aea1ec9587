/* Hybrids: LLaMA's stack in which most layers have a recurrence in place of attention
 * (recurrent.c).
 *
 * Qwen3-Next and Qwen3.5 have gated delta rules, their attention's output is gated, and
 * norm weights are stored minus 1; Bamba and Granite 4 have Mamba-2. Granite rotates
 * nothing. */
#include "models/families/layers.h"

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

#define LAYER LLAMA_LAYER
#define ROW_OF(when, name, rows, cols, split, target) \
    ROW(LAYER name, rows, cols, split, WEIGHT_LINEAR, IN_LAYER(target), when)
#define ROW_VECTOR(when, name, rows, split, target) \
    ROW(LAYER name, rows, DIM_ONE, split, WEIGHT_VECTOR, IN_LAYER(target), when)

/* What all recurrent layers have, under the name of the mixer. */
#define ROWS_RECURRENCE(mixer, norm)                                                              \
    ROW_VECTOR(WHEN_RECURRENT, mixer ".conv1d.weight", DIM_CONV, SPLIT_OUT, recurrence.conv),     \
        ROW_VECTOR(WHEN_RECURRENT, mixer ".A_log", DIM_STATE_HEADS, SPLIT_OUT, recurrence.a_log), \
        ROW_VECTOR(WHEN_RECURRENT, mixer ".dt_bias", DIM_STATE_HEADS, SPLIT_OUT,                  \
                   recurrence.dt_bias),                                                           \
        ROW_VECTOR(WHEN_RECURRENT, mixer ".norm.weight", norm,                                    \
                   norm == DIM_VALUE ? SPLIT_NONE : SPLIT_OUT, mixer_norm.weight),                \
        ROW_OF(WHEN_ATTENTION, "self_attn.o_proj.weight", DIM_HIDDEN, DIM_Q, SPLIT_IN, o),        \
        ROW_OF(WHEN_RECURRENT, mixer ".out_proj.weight", DIM_HIDDEN, DIM_VALUES, SPLIT_IN, o)
#define ROWS_KV                                                                            \
    ROW_OF(WHEN_ATTENTION, "self_attn.k_proj.weight", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv), \
        ROW_OF(WHEN_ATTENTION, "self_attn.v_proj.weight", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv)

void transformer_attend(struct model *m, const struct layer *l, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct attention *a = &l->attention;
    int32_t q = a->n_heads * a->head_dim, qkv_cols = q + 2 * a->n_kv_heads * a->head_dim;
    struct mat all = mat_cols(mat_rows(m->weights->qkv, 0, h.rows), 0, l->qkv.rows);
    struct mat out = mat_cols(mat_rows(m->weights->attn, 0, h.rows), 0, q);
    struct mat qkv = mat_cols(all, 0, qkv_cols);

    ops->linear(m->backend, all, h, l->qkv, NULL);
    ops->rope_kv(m->backend, qkv, &l->rope, a);
    ops->attention(m->backend, out, qkv, a);
    if (m->config.gated_attention) {
        ops->gate_sigmoid(m->backend, out, mat_cols(all, qkv_cols, q));
    }
    ops->linear(m->backend, y, out, l->o, NULL);
}

void hybrid_forward(struct model *m, const struct batch *b)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    struct mat x = mat_rows(t->x, 0, b->n_tokens), h = mat_rows(t->h, 0, b->n_tokens),
               y = mat_rows(t->y, 0, b->n_tokens);

    h.transient = y.transient = true;
    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        if (l->recurrence.n_heads > 0) {
            transformer_mix(m, l, y, h);
        } else {
            transformer_attend(m, l, y, h);
        }
        h.transient = !m->config.experts.scaled_inputs; /* which are made of it */
        ops->add_norm(m->backend, h, x, y, &l->mlp_norm, t->partial);
        transformer_mlp(m, l, y, h);
        h.transient = i + 1 < t->n_layers; /* the last is what the head reads */
        transformer_end_layer(m, i, h, x, y, t->partial);
        h.transient = true;
    }
}

/* ---- Qwen3-Next ---- */

#define QWEN(arch)                                                                             \
    .name = (arch), .norm = NORM_RMS, .norm_eps = 1e-6f, .act = ACT_SILU, .rope_theta = 10000, \
    .rope_partial = 0.25, .qk_norm = true, .norm_from_one = true, .gated_attention = true,     \
    .delta = true, .full_attention_every = 4

static const struct architecture QWEN_NEXT[] = {
    {QWEN("Qwen3NextForCausalLM"), .models = "Qwen3-Next", .experts = true,
     .normalises_experts = true},
    {0},
};

#define ROWS_QWEN_ATTENTION                                                                        \
    ROW_OF(WHEN_ATTENTION, "self_attn.q_proj.weight", DIM_GATED_Q_QUERY, DIM_HIDDEN, SPLIT_OUT,    \
           qkv),                                                                                   \
        ROWS_KV,                                                                                   \
        ROW_OF(WHEN_ATTENTION, "self_attn.q_proj.weight", DIM_GATED_Q_GATE, DIM_HIDDEN, SPLIT_OUT, \
               qkv),                                                                               \
        ROW_VECTOR(WHEN_ATTENTION, "self_attn.q_norm.weight", DIM_HEAD, SPLIT_NONE,                \
                   rope.q_norm.weight),                                                            \
        ROW_VECTOR(WHEN_ATTENTION, "self_attn.k_norm.weight", DIM_HEAD, SPLIT_NONE,                \
                   rope.k_norm.weight),                                                            \
        ROW_NORM(LAYER "input_layernorm", attn_norm),                                              \
        ROW_NORM(LAYER "post_attention_layernorm", mlp_norm)

#define ROW_SHARED_GATE                                                         \
    ROW_MATRIX(LAYER "mlp.shared_expert_gate", DIM_ONE, DIM_HIDDEN, SPLIT_NONE, \
               experts.shared_gate, WHEN_SHARED)
#define DELTA "linear_attn"
#define ROW_IN(name, dim) \
    ROW_OF(WHEN_RECURRENT, DELTA "." name ".weight", dim, DIM_HIDDEN, SPLIT_OUT, mixer)
#define ROW_QKVZ(dim) \
    ROW_OF(WHEN_RECURRENT, DELTA ".in_proj_qkvz.weight", dim, DIM_HIDDEN, SPLIT_OUT, mixer)
#define ROW_BA(dim) \
    ROW_OF(WHEN_RECURRENT, DELTA ".in_proj_ba.weight", dim, DIM_HIDDEN, SPLIT_OUT, mixer)

static const struct tensor_spec QWEN_NEXT_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_QWEN_ATTENTION,
    ROW_QKVZ(DIM_QKVZ_Q),
    ROW_QKVZ(DIM_QKVZ_K),
    ROW_QKVZ(DIM_QKVZ_V),
    ROW_QKVZ(DIM_QKVZ_Z),
    ROW_BA(DIM_BA_B),
    ROW_BA(DIM_BA_A),
    ROWS_RECURRENCE(DELTA, DIM_VALUE),
    ROWS_MLP_OR_EXPERTS(LAYER "mlp."),
    ROWS_SHARED_EXPERT(LAYER "mlp.shared_expert."),
    ROW_SHARED_GATE,
    {0},
};

/* As in a GGUF file: q, k and v of all groups one after another, and z. */
static const struct tensor_spec QWEN_NEXT_APART_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_QWEN_ATTENTION,
    ROW_IN("in_proj_qkv", DIM_CHANNELS),
    ROW_IN("in_proj_z", DIM_VALUES),
    ROW_BA(DIM_BA_B),
    ROW_BA(DIM_BA_A),
    ROWS_RECURRENCE(DELTA, DIM_VALUE),
    ROWS_MLP_OR_EXPERTS(LAYER "mlp."),
    ROWS_SHARED_EXPERT(LAYER "mlp.shared_expert."),
    ROW_SHARED_GATE,
    {0},
};

static const struct model_family qwen_next_apart = {.architectures = QWEN_NEXT,
                                                    .tensors = QWEN_NEXT_APART_TENSORS,
                                                    .marker = "linear_attn.in_proj_qkv.weight",
                                                    .ignored = IGNORED,
                                                    .forward = hybrid_forward};

const struct model_family qwen_next_family = {.architectures = QWEN_NEXT,
                                              .tensors = QWEN_NEXT_TENSORS,
                                              .variant = &qwen_next_apart,
                                              .ignored = IGNORED,
                                              .forward = hybrid_forward};

/* ---- Qwen3.5 ---- */

/* Qwen3.6 has these names too. */
static const struct architecture QWEN35[] = {
    {QWEN("Qwen3_5ForCausalLM"), .models = "Qwen3.5 and Qwen3.6: text"},
    {QWEN("Qwen3_5ForConditionalGeneration"), .models = "Qwen3.5 and Qwen3.6 with vision: text",
     .wrapper = true},
    {0},
};

#define QWEN35_EXPERTS(arch) QWEN(arch), .experts = true, .normalises_experts = true

static const struct architecture QWEN35_MOE[] = {
    {QWEN35_EXPERTS("Qwen3_5MoeForCausalLM"), .models = "Qwen3.5 and Qwen3.6 with experts: text"},
    {QWEN35_EXPERTS("Qwen3_5MoeForConditionalGeneration"),
     .models = "Qwen3.5 and Qwen3.6 with experts and vision: text", .wrapper = true},
    {0},
};

#define ROWS_QWEN35_RECURRENCE                                                      \
    ROW_IN("in_proj_qkv", DIM_CHANNELS), ROW_IN("in_proj_z", DIM_VALUES),           \
        ROW_IN("in_proj_b", DIM_STATE_HEADS), ROW_IN("in_proj_a", DIM_STATE_HEADS), \
        ROWS_RECURRENCE(DELTA, DIM_VALUE)

static const struct tensor_spec QWEN35_TENSORS[] = {
    ROWS_LLAMA_ENDS, ROWS_QWEN_ATTENTION, ROWS_QWEN35_RECURRENCE, ROWS_GATED_MLP(LAYER "mlp."), {0},
};

static const struct tensor_spec QWEN35_MOE_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_QWEN_ATTENTION,
    ROWS_QWEN35_RECURRENCE,
    ROWS_MLP_OR_EXPERTS(LAYER "mlp."),
    ROWS_SHARED_EXPERT(LAYER "mlp.shared_expert."),
    ROW_SHARED_GATE,
    {0},
};

/* As published: all experts of a layer in one tensor [experts, 2 * width, hidden], or
 * [experts, hidden, width]. */
static const struct tensor_spec QWEN35_STACKED_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_QWEN_ATTENTION,
    ROWS_QWEN35_RECURRENCE,
    ROW_ROUTER(LAYER "mlp.gate"),
    ROWS_STACKED_EXPERTS(LAYER "mlp."),
    ROWS_SHARED_EXPERT(LAYER "mlp.shared_expert."),
    ROW_SHARED_GATE,
    {0},
};

const struct model_family qwen35_family = {.architectures = QWEN35,
                                           .tensors = QWEN35_TENSORS,
                                           .ignored = IGNORED,
                                           .forward = hybrid_forward};

static const struct model_family qwen35_stacked = {.architectures = QWEN35_MOE,
                                                   .tensors = QWEN35_STACKED_TENSORS,
                                                   .marker = "experts.gate_up_proj",
                                                   .ignored = IGNORED,
                                                   .forward = hybrid_forward};

const struct model_family qwen35_moe_family = {.architectures = QWEN35_MOE,
                                               .tensors = QWEN35_MOE_TENSORS,
                                               .variant = &qwen35_stacked,
                                               .ignored = IGNORED,
                                               .forward = hybrid_forward};

/* ---- Bamba ---- */

static const struct architecture BAMBA[] = {
    {.name = "BambaForCausalLM",
     .models = "Bamba",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .rope_partial = 0.5,
     .ssd = true},
    {0},
};

#define ROW_Q ROW_OF(WHEN_ATTENTION, "self_attn.q_proj.weight", DIM_Q, DIM_HIDDEN, SPLIT_OUT, qkv)
#define ROWS_SSD                                                                              \
    ROW_OF(WHEN_RECURRENT, "mamba.in_proj.weight", DIM_SSD_IN, DIM_HIDDEN, SPLIT_OUT, mixer), \
        ROW_VECTOR(WHEN_CONV_BIAS, "mamba.conv1d.bias", DIM_CHANNELS, SPLIT_OUT,              \
                   recurrence.conv_bias),                                                     \
        ROW_VECTOR(WHEN_RECURRENT, "mamba.D", DIM_STATE_HEADS, SPLIT_OUT, recurrence.d),      \
        ROWS_RECURRENCE("mamba", DIM_VALUES)

static const struct tensor_spec BAMBA_TENSORS[] = {
    ROWS_ENDS("model.embed_tokens", "model.final_layernorm", "lm_head"),
    ROW_Q,
    ROWS_KV,
    ROWS_SSD,
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROW_NORM(LAYER "pre_ff_layernorm", mlp_norm),
    ROWS_GATED_MLP(LAYER "feed_forward."),
    {0},
};

const struct model_family bamba_family = {.architectures = BAMBA,
                                          .tensors = BAMBA_TENSORS,
                                          .ignored = IGNORED,
                                          .forward = hybrid_forward};

/* ---- Granite 4: the MLP, if there is one, is called shared ---- */

static const struct architecture GRANITE[] = {
    {.name = "GraniteMoeHybridForCausalLM",
     .models = "Granite 4, with experts and without",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .experts = true,
     .normalises_experts = true,
     .optional_experts = true,
     .ssd = true,
     .granite = true},
    {0},
};

#define ROWS_GRANITE                                                                         \
    ROWS_LLAMA_ENDS, ROW_Q, ROWS_KV, ROWS_SSD, ROW_NORM(LAYER "input_layernorm", attn_norm), \
        ROW_NORM(LAYER "post_attention_layernorm", mlp_norm)

/* As in a GGUF file. */
static const struct tensor_spec GRANITE_TENSORS[] = {
    ROWS_GRANITE,
    ROW_OF(WHEN_DENSE, "shared_mlp.gate_proj.weight", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_OF(WHEN_DENSE, "shared_mlp.up_proj.weight", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_OF(WHEN_DENSE, "shared_mlp.down_proj.weight", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down),
    ROWS_GRANITE_EXPERTS,
    ROWS_SHARED_EXPERT(LAYER "shared_mlp."),
    {0},
};
/* As published: gate and up in one tensor, and the experts of a layer, too. */
#define ROWS_GRANITE_MLP                                                                          \
    ROW_OF(WHEN_DENSE, "shared_mlp.input_linear.weight", DIM_GATE_UP, DIM_HIDDEN, SPLIT_OUT, up), \
        ROW_OF(WHEN_DENSE, "shared_mlp.output_linear.weight", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down)
static const struct tensor_spec GRANITE_STACKED_TENSORS[] = {
    ROWS_GRANITE, ROWS_GRANITE_MLP, ROWS_GRANITE_STACKED, ROWS_GRANITE_SHARED, {0}};
/* With the experts apart, or none. */
static const struct tensor_spec GRANITE_JOINED_TENSORS[] = {
    ROWS_GRANITE, ROWS_GRANITE_MLP, ROWS_GRANITE_EXPERTS, ROWS_GRANITE_SHARED, {0}};

static const struct model_family granite_hybrid_joined = {.architectures = GRANITE,
                                                          .tensors = GRANITE_JOINED_TENSORS,
                                                          .marker =
                                                              "shared_mlp.input_linear.weight",
                                                          .ignored = IGNORED,
                                                          .forward = hybrid_forward};

static const struct model_family granite_hybrid_stacked = {.architectures = GRANITE,
                                                           .tensors = GRANITE_STACKED_TENSORS,
                                                           .variant = &granite_hybrid_joined,
                                                           .marker = "moe.input_linear.weight",
                                                           .ignored = IGNORED,
                                                           .forward = hybrid_forward};

const struct model_family granite_hybrid_family = {.architectures = GRANITE,
                                                   .tensors = GRANITE_TENSORS,
                                                   .variant = &granite_hybrid_stacked,
                                                   .ignored = IGNORED,
                                                   .forward = hybrid_forward};
