/* LLaMA and what shares its shape: RMS norm before, rotary positions, grouped-query attention, gated MLP.
 *
 * Mistral adds a sliding window, Qwen2 biases on q, k and v, Qwen3 norms of q and k per head, Gemma scales its
 * embeddings and counts norm weights from 1: columns and conditions of
 * the tables below, the forward pass is one.
 */
#include "models/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "LlamaForCausalLM", .norm = NORM_RMS, .norm_eps = 1e-6f, .act = ACT_SILU, .rope_theta = 10000},
    {.name = "MistralForCausalLM",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .sliding_window = 4096},
    {.name = "Qwen2ForCausalLM",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qkv_bias = true,
     .sliding_window = 4096,
     .window_switch = true},
    {.name = "Qwen3ForCausalLM",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qk_norm = true,
     .sliding_window = 4096,
     .window_switch = true},
    {.name = "GemmaForCausalLM",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_GELU_TANH,
     .rope_theta = 10000,
     .tied = true,
     .gemma = true},
    {0},
};

#define LAYER "model.layers.%d."

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    {"model.embed_tokens.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_EMBEDDING, IN_MODEL(embed), WHEN_ALWAYS,
     false},
    {"model.norm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_MODEL(final_norm.weight), WHEN_ALWAYS,
     false},
    {"lm_head.weight", DIM_VOCAB, DIM_HIDDEN, SPLIT_VOCAB, WEIGHT_LINEAR, IN_MODEL(head), WHEN_UNTIED, false},
    {LAYER "input_layernorm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(attn_norm.weight),
     WHEN_ALWAYS, false},
    {LAYER "self_attn.q_proj.weight", DIM_Q, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(qkv), WHEN_ALWAYS, false},
    {LAYER "self_attn.k_proj.weight", DIM_KV, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(qkv), WHEN_ALWAYS, false},
    {LAYER "self_attn.v_proj.weight", DIM_KV, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(qkv), WHEN_ALWAYS, false},
    {LAYER "self_attn.q_proj.bias", DIM_Q, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(qkv_bias), WHEN_QKV_BIAS, false},
    {LAYER "self_attn.k_proj.bias", DIM_KV, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(qkv_bias), WHEN_QKV_BIAS,
     false},
    {LAYER "self_attn.v_proj.bias", DIM_KV, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(qkv_bias), WHEN_QKV_BIAS,
     false},
    {LAYER "self_attn.q_norm.weight", DIM_HEAD, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(rope.q_norm.weight),
     WHEN_QK_NORM, false},
    {LAYER "self_attn.k_norm.weight", DIM_HEAD, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(rope.k_norm.weight),
     WHEN_QK_NORM, false},
    {LAYER "self_attn.o_proj.weight", DIM_HIDDEN, DIM_Q, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(o), WHEN_ALWAYS, false},
    {LAYER "self_attn.o_proj.bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR, IN_LAYER(o_bias), WHEN_O_BIAS,
     false},
    {LAYER "post_attention_layernorm.weight", DIM_HIDDEN, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(mlp_norm.weight),
     WHEN_ALWAYS, false},
    {LAYER "mlp.gate_proj.weight", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(up), WHEN_ALWAYS, false},
    {LAYER "mlp.up_proj.weight", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(up), WHEN_ALWAYS, false},
    {LAYER "mlp.gate_proj.bias", DIM_MLP, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(up_bias), WHEN_MLP_BIAS, false},
    {LAYER "mlp.up_proj.bias", DIM_MLP, DIM_ONE, SPLIT_OUT, WEIGHT_VECTOR, IN_LAYER(up_bias), WHEN_MLP_BIAS, false},
    {LAYER "mlp.down_proj.weight", DIM_HIDDEN, DIM_MLP, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(down), WHEN_ALWAYS, false},
    {LAYER "mlp.down_proj.bias", DIM_HIDDEN, DIM_ONE, SPLIT_FIRST, WEIGHT_VECTOR, IN_LAYER(down_bias), WHEN_MLP_BIAS,
     false},
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

void llama_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    int32_t n = b->n_tokens;
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n); /* [n_tokens, hidden] */
    struct mat qkv = mat_rows(t->qkv, 0, n);   /* [n_tokens, (n_heads + 2 n_kv_heads) * head_dim] */
    struct mat attn = mat_rows(t->attn, 0, n); /* [n_tokens, n_heads * head_dim] */
    struct mat up = mat_rows(t->up, 0, n);     /* [n_tokens, 2 * intermediate] */
    struct mat act = mat_rows(t->act, 0, n);   /* [n_tokens, intermediate] */

    transformer_embed(m, x, m->config.embed_scale);
    ops->norm(be, h, x, &t->layer[0].attn_norm);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        const struct norm *next = i + 1 < t->n_layers ? &l[1].attn_norm : &t->final_norm;
        ops->linear(be, qkv, h, l->qkv, &(struct epilogue){.bias = l->qkv_bias});
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        ops->linear(be, y, attn, l->o, &(struct epilogue){.bias = l->o_bias});
        ops->add_norm(be, h, x, y, &l->mlp_norm, t->partial);
        ops->linear(be, up, h, l->up, &(struct epilogue){.bias = l->up_bias});
        ops->gated_act(be, act, up, m->config.act);
        ops->linear(be, y, act, l->down, &(struct epilogue){.bias = l->down_bias});
        ops->add_norm(be, h, x, y, next, t->partial);
    }
}

const struct model_family llama_family = {
    .architectures = ARCHITECTURES, .tensors = TENSORS, .ignored = IGNORED, .forward = llama_forward};
