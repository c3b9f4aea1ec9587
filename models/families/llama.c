/* LLaMA and the architectures of its shape: RMS norm before attention and MLP, rotary
 * positions, grouped-query attention, gated MLP.
 *
 * Mistral adds a sliding window, Qwen2 biases of q, k and v, Qwen3 norms of q and k per
 * head; Gemma scales its embeddings and stores norm weights minus 1; SmolLM3 rotates
 * nothing in every fourth layer, ERNIE and Helium rotate neighbouring dims, Granite
 * multiplies embeddings, scores, residuals and logits. These differences are settings
 * and conditions in the tables; the forward pass is the same.
 */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "LlamaForCausalLM",
     .models = "LLaMA 1, 2, 3.x, SmolLM2, TinyLlama, Yi",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000},
    {.name = "MistralForCausalLM",
     .models = "Mistral",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .sliding_window = 4096},
    {.name = "Qwen2ForCausalLM",
     .models = "Qwen2, Qwen2.5",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qkv_bias = true,
     .sliding_window = 4096,
     .window_switch = true},
    {.name = "MiMoForCausalLM",
     .models = "MiMo 7B",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 640000,
     .qkv_bias = true,
     .sliding_window = 4096,
     .window_switch = true},
    {.name = "CwmForCausalLM",
     .models = "CWM",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 1e6,
     .sliding_window = 8192,
     .window_pattern = 4,
     .full_layers_first = true},
    {.name = "IQuestCoderForCausalLM",
     .models = "IQuest-Coder",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000},
    {.name = "Qwen3ForCausalLM",
     .models = "Qwen3",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qk_norm = true,
     .sliding_window = 4096,
     .window_switch = true},
    {.name = "GemmaForCausalLM",
     .models = "Gemma",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_GELU_TANH,
     .rope_theta = 10000,
     .tied = true,
     .gemma = true},
    {.name = "SmolLM3ForCausalLM",
     .models = "SmolLM3",
     .window_switch = true,
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 2e6,
     .tied = true,
     .unrotated_pattern = 4},
    {.name = "SeedOssForCausalLM",
     .models = "Seed-OSS",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qkv_bias = true,
     .bias_apart = true},
    {.name = "Ernie4_5ForCausalLM",
     .models = "ERNIE 4.5, dense",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 500000,
     .tied = true,
     .rope_interleaved = true},
    {.name = "HeliumForCausalLM",
     .models = "Helium",
     .norm = NORM_RMS,
     .norm_eps = 1e-8f,
     .act = ACT_SILU,
     .rope_theta = 100000,
     .rope_interleaved = true,
     .bias_apart = true},
    {.name = "GraniteForCausalLM",
     .models = "Granite 3, dense",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000},
    {.name = "MinistralForCausalLM",
     .models = "Ministral",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .sliding_window = 4096},
    {.name = "Ministral3ForCausalLM",
     .models = "Ministral 3",
     .windows = true,
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 1e6},
    {.name = "Mistral3ForConditionalGeneration",
     .models = "Mistral Small 3.x, Ministral 3 with vision: text",
     .windows = true,
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 1e6,
     .wrapper = true},
    {.name = "Qwen2VLForConditionalGeneration",
     .models = "Qwen2-VL: text",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 1e6,
     .qkv_bias = true,
     .sliding_window = 4096,
     .window_switch = true,
     .wrapper = true},
    {.name = "Qwen2_5_VLForConditionalGeneration",
     .models = "Qwen2.5-VL: text",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 1e6,
     .qkv_bias = true,
     .sliding_window = 4096,
     .window_switch = true,
     .wrapper = true},
    {.name = "Qwen3VLForConditionalGeneration",
     .models = "Qwen3-VL: text",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 500000,
     .qk_norm = true,
     .wrapper = true},
    {.name = "InternLM3ForCausalLM",
     .models = "InternLM3",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000},
    {0},
};

#define LAYER LLAMA_LAYER

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, kind, goes to, when */
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_GATED_MLP(LAYER "mlp."),
    ROW_UP_BIAS(LAYER "mlp.gate_proj"),
    ROW_UP_BIAS(LAYER "mlp.up_proj"),
    ROW_DOWN_BIAS(LAYER "mlp.down_proj"),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

/* ---- Arcee: the MLP has no gate ---- */

static const struct architecture ARCEE[] = {
    {.name = "ArceeForCausalLM",
     .models = "AFM 4.5B",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_RELU,
     .rope_theta = 10000,
     .ungated_mlp = true},
    {0},
};

static const struct tensor_spec ARCEE_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROW_UP(LAYER "mlp.up_proj", DIM_MLP),
    ROW_DOWN(LAYER "mlp.down_proj"),
    ROW_UP_BIAS(LAYER "mlp.up_proj"),
    ROW_DOWN_BIAS(LAYER "mlp.down_proj"),
    {0},
};

const struct model_family arcee_family = {.architectures = ARCEE,
                                          .tensors = ARCEE_TENSORS,
                                          .ignored = IGNORED,
                                          .forward = llama_forward,
                                          .gathers = true};

/* ---- the forward pass ---- */

void transformer_gather_rows(struct model *m, int32_t n, struct mat *x, struct mat *y,
                             struct mat *attn, struct mat free)
{
    const struct backend_ops *ops = m->backend->ops;
    struct mat rows = mat_rows(*y, 0, n), heads = mat_rows(mat_cols(free, 0, attn->cols), 0, n);

    ops->gather(m->backend, rows, *x, 0);
    ops->gather(m->backend, heads, *attn, 0);
    *y = mat_rows(*x, 0, n);
    *x = rows;
    *attn = heads;
}

void llama_forward(struct model *m, const struct batch *b)
{
    struct backend *be = m->backend;
    const struct backend_ops *ops = be->ops;
    const struct transformer *t = m->weights;
    int32_t n = b->n_tokens;
    /* [n_tokens, hidden] */
    struct mat x = mat_rows(t->x, 0, n), h = mat_rows(t->h, 0, n), y = mat_rows(t->y, 0, n);
    struct mat qkv = mat_rows(t->qkv, 0, n);   /* [n_tokens, (n_heads + 2 n_kv_heads) * head_dim] */
    struct mat attn = mat_rows(t->attn, 0, n); /* [n_tokens, n_heads * head_dim] */

    h.transient = true;
    transformer_begin(m, x, h);
    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        ops->linear(be, qkv, h, l->qkv, &(struct epilogue){.bias = l->qkv_bias});
        transformer_norm_heads(m, l, qkv);
        ops->rope_kv(be, qkv, &l->rope, &l->attention);
        ops->attention(be, attn, qkv, &l->attention);
        if (i + 1 == t->n_layers && model_gathers(m, b)) {
            n = b->n_logits;
            if (n == 0) {
                return; /* the cache is written */
            }
            transformer_gather_rows(m, n, &x, &y, &attn, qkv);
            h = mat_rows(h, 0, n);
        }
        y.transient = true;
        ops->linear(be, y, attn, l->o, &(struct epilogue){.bias = l->o_bias});
        ops->add_norm(be, h, x, y, &l->mlp_norm, t->partial);
        transformer_mlp(m, l, y, h);
        h.transient = i + 1 < t->n_layers; /* the last is what the head reads */
        transformer_end_layer(m, i, h, x, y, t->partial);
        h.transient = true;
    }
}

const struct model_family llama_family = {.architectures = ARCHITECTURES,
                                          .tensors = TENSORS,
                                          .ignored = IGNORED,
                                          .forward = llama_forward,
                                          .gathers = true};
