/* GPT-NeoX and those after it: attention and a plain MLP side by side, which both read
 * the residual stream in front of the layer, normed, and are both added to it. GPT-NeoX
 * and the larger Falcons have a norm for each; GPT-J, Phi and Falcon 7B one for both.
 * GPT-NeoX may have them one after the other (use_parallel_residual false). */
#include "models/families/layers.h"

/* The causal mask, which old checkpoints contain. */
static const char *const IGNORED[] = {".attn.bias",          ".attn.masked_bias",
                                      ".attention.bias",     ".attention.masked_bias",
                                      "rotary_emb.inv_freq", NULL};

static void parallel_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat qkv = mat_rows(t->qkv, 0, n), attn = mat_rows(t->attn, 0, n),
               up = mat_rows(t->up, 0, n);

    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->linear(be, qkv, h, l->qkv, &(struct epilogue){.bias = l->qkv_bias});
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        ops->linear(be, y, attn, l->o, &(struct epilogue){.bias = l->o_bias});
        if (!m->config.parallel) {
            ops->add_norm(be, h, x, y, &l->mlp_norm, t->partial);
        } else {
            if (l->mlp_norm.weight.data) {
                ops->norm(be, h, x, &l->mlp_norm);
            }
            ops->add(be, x, y, t->partial);
        }
        ops->linear(be, up, h, l->up, &(struct epilogue){.bias = l->up_bias, .act = m->config.act});
        ops->linear(be, y, up, l->down, &(struct epilogue){.bias = l->down_bias});
        transformer_end_layer(m, i, h, x, y, t->partial);
    }
}

#define ROWS_NORM(name, norm) ROW_NORM(name, norm), ROW_NORM_BIAS(name, norm)
#define ROWS_MLP(up, down) ROW_UP(up, DIM_MLP), ROW_UP_BIAS(up), ROW_DOWN(down), ROW_DOWN_BIAS(down)

/* ---- GPT-NeoX ---- */

static const struct architecture NEOX[] = {
    {.name = "GPTNeoXForCausalLM",
     .models = "GPT-NeoX, Pythia, Dolly, RedPajama, StableLM Alpha",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_ERF,
     .rope_theta = 10000,
     .rope_partial = 0.25,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true,
     .parallel = true},
    {0},
};

#define NEOX_LAYER "gpt_neox.layers.%d."
#define ROWS_NEOX                                                                      \
    ROWS_ENDS("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),          \
        ROW_FINAL_NORM_BIAS("gpt_neox.final_layer_norm"),                              \
        ROWS_NORM(NEOX_LAYER "input_layernorm", attn_norm),                            \
        ROWS_NORM(NEOX_LAYER "post_attention_layernorm", mlp_norm),                    \
        ROW_O(NEOX_LAYER "attention.dense"), ROW_O_BIAS(NEOX_LAYER "attention.dense"), \
        ROWS_MLP(NEOX_LAYER "mlp.dense_h_to_4h", NEOX_LAYER "mlp.dense_4h_to_h")

static const struct tensor_spec NEOX_TENSORS[] = {
    ROWS_NEOX,
    ROWS_GROUPED_QKV(NEOX_LAYER "attention.query_key_value"),
    ROWS_GROUPED_QKV_BIAS(NEOX_LAYER "attention.query_key_value"),
    {0},
};
/* As in a GGUF file: all queries, all keys, all values. */
static const struct tensor_spec NEOX_APART_TENSORS[] = {
    ROWS_NEOX,
    ROW_QKV(NEOX_LAYER "attention.qkv_proj", DIM_QKV),
    ROW_QKV_BIAS(NEOX_LAYER "attention.qkv_proj", DIM_QKV),
    {0},
};

static const struct model_family neox_apart = {.architectures = NEOX,
                                               .tensors = NEOX_APART_TENSORS,
                                               .marker = "attention.qkv_proj.weight",
                                               .ignored = IGNORED,
                                               .forward = parallel_forward};
const struct model_family neox_family = {.architectures = NEOX,
                                         .tensors = NEOX_TENSORS,
                                         .variant = &neox_apart,
                                         .ignored = IGNORED,
                                         .forward = parallel_forward};

/* ---- GPT-J ---- */

static const struct architecture GPTJ[] = {
    {.name = "GPTJForCausalLM",
     .models = "GPT-J",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_TANH,
     .rope_theta = 10000,
     .rope_partial = 1,
     .rope_interleaved = true,
     .mlp_bias = true,
     .head_bias = true,
     .parallel = true},
    {0},
};

#define GPTJ_LAYER "transformer.h.%d."

static const struct tensor_spec GPTJ_TENSORS[] = {
    ROWS_ENDS("transformer.wte", "transformer.ln_f", "lm_head"),
    ROW_FINAL_NORM_BIAS("transformer.ln_f"),
    ROW_HEAD_BIAS("lm_head"),
    ROWS_NORM(GPTJ_LAYER "ln_1", attn_norm),
    ROWS_QKV(GPTJ_LAYER "attn."),
    ROW_O(GPTJ_LAYER "attn.out_proj"),
    ROWS_MLP(GPTJ_LAYER "mlp.fc_in", GPTJ_LAYER "mlp.fc_out"),
    {0},
};

const struct model_family gptj_family = {.architectures = GPTJ,
                                         .tensors = GPTJ_TENSORS,
                                         .ignored = IGNORED,
                                         .forward = parallel_forward};

/* ---- Phi ---- */

static const struct architecture PHI[] = {
    {.name = "PhiForCausalLM",
     .models = "Phi-1, Phi-1.5, Phi-2",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_TANH,
     .rope_theta = 10000,
     .rope_partial = 0.5,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true,
     .head_bias = true,
     .parallel = true},
    {0},
};

static const struct tensor_spec PHI_TENSORS[] = {
    ROWS_ENDS("model.embed_tokens", "model.final_layernorm", "lm_head"),
    ROW_FINAL_NORM_BIAS("model.final_layernorm"),
    ROW_HEAD_BIAS("lm_head"),
    ROWS_NORM(LLAMA_LAYER "input_layernorm", attn_norm),
    ROWS_QKV(LLAMA_LAYER "self_attn."),
    ROWS_QKV_BIAS(LLAMA_LAYER "self_attn."),
    ROW_O(LLAMA_LAYER "self_attn.dense"),
    ROW_O_BIAS(LLAMA_LAYER "self_attn.dense"),
    ROWS_MLP(LLAMA_LAYER "mlp.fc1", LLAMA_LAYER "mlp.fc2"),
    {0},
};

const struct model_family phi_family = {
    .architectures = PHI, .tensors = PHI_TENSORS, .ignored = IGNORED, .forward = parallel_forward};

/* ---- Falcon ---- */

static const struct architecture FALCON[] = {
    {.name = "FalconForCausalLM",
     .models = "Falcon 7B, 11B, 40B, 180B",
     .norm = NORM_LAYER,
     .norm_eps = 1e-5f,
     .act = ACT_GELU_ERF,
     .rope_theta = 10000,
     .tied = true,
     .multi_query = true,
     .max_positions = 2048,
     .parallel = true},
    {0},
};

#define FALCON_LAYER "transformer.h.%d."
#define ROWS_FALCON                                                                          \
    ROWS_ENDS("transformer.word_embeddings", "transformer.ln_f", "lm_head"),                 \
        ROW_FINAL_NORM_BIAS("transformer.ln_f"), ROW_O(FALCON_LAYER "self_attention.dense"), \
        ROW_UP(FALCON_LAYER "mlp.dense_h_to_4h", DIM_MLP),                                   \
        ROW_DOWN(FALCON_LAYER "mlp.dense_4h_to_h")
#define ROWS_FALCON_QKV ROWS_GROUPED_QKV(FALCON_LAYER "self_attention.query_key_value")
#define FALCON_FAMILY .architectures = FALCON, .ignored = IGNORED, .forward = parallel_forward

static const struct tensor_spec FALCON_TENSORS[] = {
    ROWS_FALCON, ROWS_FALCON_QKV, ROWS_NORM(FALCON_LAYER "input_layernorm", attn_norm), {0}};
/* Those from 40B on. */
static const struct tensor_spec FALCON_NORMS_TENSORS[] = {
    ROWS_FALCON,
    ROWS_FALCON_QKV,
    ROWS_NORM(FALCON_LAYER "ln_attn", attn_norm),
    ROWS_NORM(FALCON_LAYER "ln_mlp", mlp_norm),
    {0},
};

/* As in GGUF files: all queries, all keys, all values; and the same with two norms. */
static const struct tensor_spec FALCON_APART_TENSORS[] = {
    ROWS_FALCON,
    ROW_QKV(FALCON_LAYER "self_attention.qkv_proj", DIM_QKV),
    ROWS_NORM(FALCON_LAYER "input_layernorm", attn_norm),
    {0},
};
static const struct tensor_spec FALCON_APART_NORMS_TENSORS[] = {
    ROWS_FALCON,
    ROW_QKV(FALCON_LAYER "self_attention.qkv_proj", DIM_QKV),
    ROWS_NORM(FALCON_LAYER "attn_layernorm", attn_norm),
    ROWS_NORM(FALCON_LAYER "input_layernorm", mlp_norm),
    {0},
};

static const struct model_family falcon_apart = {FALCON_FAMILY, .tensors = FALCON_APART_TENSORS,
                                                 .marker = ".self_attention.qkv_proj.weight"};
static const struct model_family falcon_apart_norms = {
    FALCON_FAMILY, .tensors = FALCON_APART_NORMS_TENSORS, .variant = &falcon_apart,
    .marker = ".attn_layernorm.weight"};
static const struct model_family falcon_norms = {FALCON_FAMILY, .tensors = FALCON_NORMS_TENSORS,
                                                 .variant = &falcon_apart_norms,
                                                 .marker = ".ln_mlp.weight"};
const struct model_family falcon_parallel_family = {FALCON_FAMILY, .tensors = FALCON_TENSORS,
                                                    .variant = &falcon_norms};
