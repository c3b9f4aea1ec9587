/* GPT-2: learned positions, layer norm before attention and MLP, biases, GELU. Weights
 * are stored [in, out] (Conv1D), with q, k and v as one tensor. StarCoder has one
 * key/value head and stores weights as others do; StarCoder2 has LLaMA's rotary
 * positions and grouped queries. */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "GPT2LMHeadModel",
     .models = "GPT-2",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_TANH,
     .tied = true,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true},
    {0},
};

#define LAYER "transformer.h.%d."
#define ROW_POSITIONS                                                                  \
    ROW("transformer.wpe.weight", DIM_POSITIONS, DIM_HIDDEN, SPLIT_NONE, WEIGHT_TABLE, \
        IN_MODEL(positions), WHEN_ALWAYS)
#define ROWS_NORMS                                                             \
    ROW_NORM(LAYER "ln_1", attn_norm), ROW_NORM_BIAS(LAYER "ln_1", attn_norm), \
        ROW_NORM(LAYER "ln_2", mlp_norm), ROW_NORM_BIAS(LAYER "ln_2", mlp_norm)

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns of the result, split over ranks, kind, goes to, when,
     * stored transposed */
    ROWS_ENDS("transformer.wte", "transformer.ln_f", "lm_head"),
    ROW_POSITIONS,
    ROW_FINAL_NORM_BIAS("transformer.ln_f"),
    ROWS_NORMS,
    {LAYER "attn.c_attn.weight", DIM_QKV, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(qkv),
     WHEN_ALWAYS, true},
    ROW_QKV_BIAS(LAYER "attn.c_attn", DIM_QKV),
    {LAYER "attn.c_proj.weight", DIM_HIDDEN, DIM_Q, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(o),
     WHEN_ALWAYS, true},
    ROW_O_BIAS(LAYER "attn.c_proj"),
    {LAYER "mlp.c_fc.weight", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, WEIGHT_LINEAR, IN_LAYER(up),
     WHEN_ALWAYS, true},
    ROW_UP_BIAS(LAYER "mlp.c_fc"),
    {LAYER "mlp.c_proj.weight", DIM_HIDDEN, DIM_MLP, SPLIT_IN, WEIGHT_LINEAR, IN_LAYER(down),
     WHEN_ALWAYS, true},
    ROW_DOWN_BIAS(LAYER "mlp.c_proj"),
    {0},
};

/* The causal mask, which old checkpoints contain. */
static const char *const IGNORED[] = {".attn.bias", ".attn.masked_bias", NULL};

void gpt2_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat qkv = mat_rows(t->qkv, 0, n), attn = mat_rows(t->attn, 0, n),
               up = mat_rows(t->up, 0, n);

    if (t->first) {
        transformer_embed(m, x, 1);
    }
    if (t->first && t->positions.data) { /* StarCoder2's positions are rotary */
        ops->embed_position(be, x, t->positions, 0);
    }
    ops->norm(be, h, x, &t->layer[0].attn_norm);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->linear(be, qkv, h, l->qkv, &(struct epilogue){.bias = l->qkv_bias});
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        ops->linear(be, y, attn, l->o, &(struct epilogue){.bias = l->o_bias});
        ops->add_norm(be, h, x, y, &l->mlp_norm, t->partial);
        ops->linear(be, up, h, l->up, &(struct epilogue){.bias = l->up_bias, .act = m->config.act});
        ops->linear(be, y, up, l->down, &(struct epilogue){.bias = l->down_bias});
        transformer_end_layer(m, i, h, x, y, t->partial);
    }
}

const struct model_family gpt2_family = {.architectures = ARCHITECTURES,
                                         .tensors = TENSORS,
                                         .ignored = IGNORED,
                                         .forward = gpt2_forward};

/* ---- StarCoder ---- */

static const struct architecture BIG_CODE[] = {
    {.name = "GPTBigCodeForCausalLM",
     .models = "StarCoder, SantaCoder",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_TANH,
     .tied = true,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true,
     .multi_query = true},
    {0},
};

static const struct tensor_spec BIG_CODE_TENSORS[] = {
    ROWS_ENDS("transformer.wte", "transformer.ln_f", "lm_head"),
    ROW_POSITIONS,
    ROW_FINAL_NORM_BIAS("transformer.ln_f"),
    ROWS_NORMS,
    ROWS_GROUPED_QKV(LAYER "attn.c_attn"),
    ROWS_GROUPED_QKV_BIAS(LAYER "attn.c_attn"),
    ROW_O(LAYER "attn.c_proj"),
    ROW_O_BIAS(LAYER "attn.c_proj"),
    ROW_UP(LAYER "mlp.c_fc", DIM_MLP),
    ROW_UP_BIAS(LAYER "mlp.c_fc"),
    ROW_DOWN(LAYER "mlp.c_proj"),
    ROW_DOWN_BIAS(LAYER "mlp.c_proj"),
    {0},
};

const struct model_family big_code_family = {.architectures = BIG_CODE,
                                             .tensors = BIG_CODE_TENSORS,
                                             .ignored = IGNORED,
                                             .forward = gpt2_forward};

/* ---- StarCoder2 ---- */

static const struct architecture STARCODER2[] = {
    {.name = "Starcoder2ForCausalLM",
     .models = "StarCoder2",
     .windows = true,
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_TANH,
     .rope_theta = 10000,
     .tied = true,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true},
    {0},
};

static const struct tensor_spec STARCODER2_TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    ROWS_LLAMA_ENDS,
    ROW_FINAL_NORM_BIAS("model.norm"),
    ROW_NORM(LLAMA_LAYER "input_layernorm", attn_norm),
    ROW_NORM_BIAS(LLAMA_LAYER "input_layernorm", attn_norm),
    ROWS_QKV(LLAMA_LAYER "self_attn."),
    ROWS_QKV_BIAS(LLAMA_LAYER "self_attn."),
    ROW_O(LLAMA_LAYER "self_attn.o_proj"),
    ROW_O_BIAS(LLAMA_LAYER "self_attn.o_proj"),
    ROW_NORM(LLAMA_LAYER "post_attention_layernorm", mlp_norm),
    ROW_NORM_BIAS(LLAMA_LAYER "post_attention_layernorm", mlp_norm),
    ROW_UP(LLAMA_LAYER "mlp.c_fc", DIM_MLP),
    ROW_UP_BIAS(LLAMA_LAYER "mlp.c_fc"),
    ROW_DOWN(LLAMA_LAYER "mlp.c_proj"),
    ROW_DOWN_BIAS(LLAMA_LAYER "mlp.c_proj"),
    {0},
};

static const char *const ROTARY_IGNORED[] = {"rotary_emb.inv_freq", NULL};

const struct model_family starcoder2_family = {.architectures = STARCODER2,
                                               .tensors = STARCODER2_TENSORS,
                                               .ignored = ROTARY_IGNORED,
                                               .forward = gpt2_forward};
