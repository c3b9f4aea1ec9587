/* Gemma-4: Gemma-2's layers, with heads of their own kind in layers without a window,
 * values that are normed, and a factor behind each layer. A layer may have, all read
 * from config.json:
 *
 *  - experts beside its MLP: both read the residual stream by norms of their own, a
 *    third is the router's, and what they make is normed, added and normed again;
 *  - the keys and values of a layer before it, so that it makes queries alone;
 *  - an input of its own: a token's second embedding and a product of its first one,
 *    which is gated by the residual stream.
 *
 * The sum of the two parts of an input counts 1 / sqrt 2, and the product 1 / sqrt
 * hidden: both factors stand before an RMS norm, which sees them in its eps alone
 * (load.c). The factor of what a router reads is in its norm's weights. */
#include "models/families/layers.h"

#include <math.h>

#define GEMMA4(arch)                                                                              \
    .name = (arch), .norm = NORM_RMS, .norm_eps = 1e-6f, .act = ACT_GELU_TANH, .rope_theta = 1e6, \
    .tied = true, .qk_norm = true, .sliding_window = 512, .window_pattern = 6,                    \
    .window_theta = 10000, .experts = true, .optional_experts = true, .normalises_experts = true, \
    .gemma4 = true

static const struct architecture ARCHITECTURES[] = {
    {GEMMA4("Gemma4ForCausalLM"), .models = "Gemma-4, text"},
    {GEMMA4("Gemma4ForConditionalGeneration"), .models = "Gemma-4 with vision: text",
     .wrapper = true},
    {0},
};

#define LAYER LLAMA_LAYER
#define ATTN LAYER "self_attn."
#define HEAD_NORM(name, dim, norm, when) \
    ROW(ATTN name ".weight", dim, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(norm.weight), when)
#define NORM_WHEN(name, norm, when) \
    ROW(LAYER name, DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(norm.weight), when)

/* All but the experts. Columns: name, rows and columns, split over ranks, kind, goes
 * to, when. */
#define ROWS_GEMMA4                                                                                \
    ROWS_LLAMA_ENDS,                                                                               \
        ROW("model.embed_tokens_per_layer.weight", DIM_VOCAB, DIM_LAYER_INPUTS, SPLIT_VOCAB,       \
            WEIGHT_EMBEDDING, IN_MODEL(inputs_table), WHEN_LAYER_INPUT),                           \
        ROW("model.per_layer_model_projection.weight", DIM_LAYER_INPUTS, DIM_HIDDEN, SPLIT_NONE,   \
            WEIGHT_LINEAR, IN_MODEL(inputs_project), WHEN_LAYER_INPUT),                            \
        ROW("model.per_layer_projection_norm.weight", DIM_LAYER_INPUT, DIM_ONE, SPLIT_NONE,        \
            WEIGHT_VECTOR, IN_MODEL(inputs_norm.weight), WHEN_LAYER_INPUT),                        \
        ROW_NORM(LAYER "input_layernorm", attn_norm),                                              \
        ROW_MATRIX(ATTN "q_proj", DIM_Q, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_WINDOWED),               \
        ROW_MATRIX(ATTN "q_proj", DIM_FULL_Q, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_FULL),              \
        ROW_MATRIX(ATTN "k_proj", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_WINDOWED_KV),           \
        ROW_MATRIX(ATTN "k_proj", DIM_FULL_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_FULL_KV),          \
        ROW_MATRIX(ATTN "v_proj", DIM_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_WINDOWED_KV),           \
        ROW_MATRIX(ATTN "v_proj", DIM_FULL_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_FULL_V),           \
        ROW_MATRIX(ATTN "k_proj", DIM_FULL_KV, DIM_HIDDEN, SPLIT_OUT, qkv, WHEN_FULL_KEY_IS_V),    \
        HEAD_NORM("q_norm", DIM_HEAD, rope.q_norm, WHEN_WINDOWED),                                 \
        HEAD_NORM("q_norm", DIM_FULL_HEAD, rope.q_norm, WHEN_FULL),                                \
        HEAD_NORM("k_norm", DIM_HEAD, rope.k_norm, WHEN_WINDOWED_KV),                              \
        HEAD_NORM("k_norm", DIM_FULL_HEAD, rope.k_norm, WHEN_FULL_KV),                             \
        ROW_MATRIX(ATTN "o_proj", DIM_HIDDEN, DIM_Q, SPLIT_IN, o, WHEN_WINDOWED),                  \
        ROW_MATRIX(ATTN "o_proj", DIM_HIDDEN, DIM_FULL_Q, SPLIT_IN, o, WHEN_FULL),                 \
        ROW_NORM(LAYER "post_attention_layernorm", attn_post_norm),                                \
        ROW_NORM(LAYER "pre_feedforward_layernorm", mlp_norm),                                     \
        ROW_MATRIX(LAYER "mlp.gate_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_PLAIN_MLP),     \
        ROW_MATRIX(LAYER "mlp.gate_proj", DIM_WIDE_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_WIDE_MLP), \
        ROW_MATRIX(LAYER "mlp.up_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_PLAIN_MLP),       \
        ROW_MATRIX(LAYER "mlp.up_proj", DIM_WIDE_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_WIDE_MLP),   \
        ROW_MATRIX(LAYER "mlp.down_proj", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down, WHEN_PLAIN_MLP),    \
        ROW_MATRIX(LAYER "mlp.down_proj", DIM_HIDDEN, DIM_WIDE_MLP, SPLIT_IN, down,                \
                   WHEN_WIDE_MLP),                                                                 \
        ROW_NORM(LAYER "post_feedforward_layernorm", mlp_post_norm),                               \
        NORM_WHEN("router.scale", router_norm, WHEN_EXPERTS), ROW_ROUTER(LAYER "router.proj"),     \
        ROW(LAYER "router.per_expert_scale", DIM_EXPERTS, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,      \
            IN_LAYER(experts.expert_scale), WHEN_EXPERTS),                                         \
        NORM_WHEN("post_feedforward_layernorm_1.weight", mlp_own_norm, WHEN_EXPERTS),              \
        NORM_WHEN("pre_feedforward_layernorm_2.weight", experts_norm, WHEN_EXPERTS),               \
        NORM_WHEN("post_feedforward_layernorm_2.weight", experts_post_norm, WHEN_EXPERTS),         \
        ROW_MATRIX(LAYER "per_layer_input_gate", DIM_LAYER_INPUT, DIM_HIDDEN, SPLIT_NONE,          \
                   input_gate, WHEN_LAYER_INPUT),                                                  \
        ROW_MATRIX(LAYER "per_layer_projection", DIM_HIDDEN, DIM_LAYER_INPUT, SPLIT_NONE,          \
                   input_project, WHEN_LAYER_INPUT),                                               \
        NORM_WHEN("post_per_layer_input_norm.weight", input_norm, WHEN_LAYER_INPUT),               \
        ROW(LAYER "layer_scalar", DIM_ONE, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(scalar),   \
            WHEN_ALWAYS)

/* As published: all experts of a layer in one tensor. */
static const struct tensor_spec TENSORS[] = {
    ROWS_GEMMA4,
    ROWS_STACKED_EXPERTS(LAYER),
    {0},
};

/* Each matrix of an expert in its own, as in a GGUF file. */
static const struct tensor_spec APART_TENSORS[] = {
    ROWS_GEMMA4,
    ROWS_EXPERTS(LAYER),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

/* t->inputs [n_tokens, n_layers * layer_input] = what each layer gets of its own, times
 * sqrt 2; x: the embeddings. */
static void make_inputs(struct model *m, struct mat x)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    struct mat inputs = mat_rows(t->inputs, 0, x.rows),
               table = mat_rows(t->inputs_embed, 0, x.rows);
    float scale = sqrtf((float)m->config.layer_input);

    ops->linear(m->backend, inputs, x, t->inputs_project, NULL);
    for (int32_t i = 0; i < m->config.n_layers; i++) {
        struct mat one = mat_cols(inputs, i * m->config.layer_input, m->config.layer_input);
        ops->norm(m->backend, one, one, &t->inputs_norm);
    }
    if (t->partial) {
        ops->embed_shard(m->backend, table, t->inputs_table, t->vocab_first, scale);
    } else {
        ops->embed(m->backend, table, t->inputs_table, scale);
    }
    ops->add(m->backend, inputs, table, false);
}

/* y = the layer's attention of h, normed. */
static void attend(struct model *m, const struct layer *l, bool shares, struct mat y, struct mat h)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct attention *a = &l->attention;
    struct attention writes = *a;
    struct mat qkv = mat_cols(mat_rows(m->weights->qkv, 0, h.rows), 0, l->qkv.rows);
    struct mat out = mat_cols(mat_rows(m->weights->attn, 0, h.rows), 0, a->n_heads * a->head_dim);

    if (shares) {
        writes.n_kv_heads = 0;
    }
    ops->linear(m->backend, qkv, h, l->qkv, NULL);
    ops->rope_kv(m->backend, qkv, &l->rope, &writes);
    ops->attention(m->backend, out, qkv, a);
    ops->linear(m->backend, h, out, l->o, NULL);
    transformer_post_norm(m, y, h, &l->attn_post_norm);
}

/* x += the MLP of h, which is x normed, and what experts make of x beside it; normed. y
 * is memory of their size. */
static void feed_forward(struct model *m, const struct layer *l, struct mat x, struct mat h,
                         struct mat y)
{
    const struct backend_ops *ops = m->backend->ops;
    struct transformer *t = m->weights;
    struct mat up = mat_cols(mat_rows(t->up, 0, h.rows), 0, l->up.rows);
    struct mat act = mat_cols(mat_rows(t->act, 0, h.rows), 0, l->down.cols);

    ops->linear_gated(m->backend, act, up, h, l->up, (struct mat){0}, m->config.act);
    ops->linear(m->backend, y, act, l->down, NULL);
    if (l->experts.n > 0) {
        struct mat beside = mat_rows(t->beside, 0, h.rows);
        struct expert_scratch s = t->experts;
        s.scores = mat_rows(s.scores, 0, h.rows);
        s.router_x = mat_rows(t->router_x, 0, h.rows);
        transformer_post_norm(m, h, y, &l->mlp_own_norm);
        ops->norm(m->backend, s.router_x, x, &l->router_norm);
        ops->norm(m->backend, y, x, &l->experts_norm);
        ops->experts(m->backend, beside, y, &l->experts, &s);
        transformer_post_norm(m, y, beside, &l->experts_post_norm);
        ops->add(m->backend, h, y, false);
        ops->norm(m->backend, y, h, &l->mlp_post_norm);
    } else {
        transformer_post_norm(m, h, y, &l->mlp_post_norm);
        y = h;
    }
    ops->add(m->backend, x, y, false);
}

static void gemma4_forward(struct model *m, const struct batch *b)
{
    const struct backend_ops *ops = m->backend->ops;
    const struct transformer *t = m->weights;
    int32_t n = b->n_tokens, width = m->config.layer_input;
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat input = mat_rows(t->input, 0, n);

    if (t->first) {
        transformer_embed(m, x, m->config.embed_scale);
    }
    if (t->first && width > 0) {
        make_inputs(m, x);
    }
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->norm(m->backend, h, x, &l->attn_norm);
        attend(m, l, t->first_layer + i >= m->config.sharing_from, y, h);
        ops->add_norm(m->backend, h, x, y, &l->mlp_norm, false);
        feed_forward(m, l, x, h, y);
        if (width > 0) {
            ops->linear(m->backend, input, x, l->input_gate,
                        &(struct epilogue){.act = m->config.act});
            ops->multiply(m->backend, input,
                          mat_cols(mat_rows(t->inputs, 0, n), (t->first_layer + i) * width, width),
                          ACT_NONE);
            ops->linear(m->backend, h, input, l->input_project, NULL);
            ops->norm(m->backend, y, h, &l->input_norm);
            ops->add(m->backend, x, y, false);
        }
        ops->multiply(m->backend, x, l->scalar, ACT_NONE);
    }
    if (t->final_norm.weight.data) {
        ops->norm(m->backend, h, x, &t->final_norm);
    }
}

static const struct model_family gemma4_apart = {.architectures = ARCHITECTURES,
                                                 .tensors = APART_TENSORS,
                                                 .marker = "experts.0.gate_proj.weight",
                                                 .ignored = IGNORED,
                                                 .forward = gemma4_forward};

const struct model_family gemma4_family = {.architectures = ARCHITECTURES,
                                           .tensors = TENSORS,
                                           .variant = &gemma4_apart,
                                           .ignored = IGNORED,
                                           .forward = gemma4_forward};
