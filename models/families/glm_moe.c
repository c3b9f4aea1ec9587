/* GLM-4.5: LLaMA's attention with biases of q, k and v and half of each head rotated, a
 * few plain layers, then experts chosen by sigmoid scores with a bias for the choice,
 * and a shared one without a gate. Layers behind the last predict further tokens; they
 * are not loaded. dots.llm1 has the same experts behind Qwen3's attention.
 */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "Glm4MoeForCausalLM",
     .models = "GLM-4.5, GLM-4.5 Air",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .rope_partial = 0.5,
     .bias_apart = true,
     .qk_norm_switch = true,
     .experts = true,
     .normalises_experts = true,
     .sigmoid_experts = true,
     .dense_layers = 1},
    {.name = "SolarOpenForCausalLM",
     .models = "Solar Open",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 1e6,
     .experts = true,
     .normalises_experts = true,
     .sigmoid_experts = true},
    {.name = "Dots1ForCausalLM",
     .models = "dots.llm1",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .window_listed = true,
     .qk_norm = true,
     .experts = true,
     .sigmoid_experts = true},
    {0},
};

#define MLP LLAMA_LAYER "mlp."

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, goes to, when */
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_MLP_OR_EXPERTS(MLP),
    ROW_CHOICE_BIAS(MLP),
    ROWS_SHARED_EXPERT(MLP "shared_experts."),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

const struct model_family glm_moe_family = {.architectures = ARCHITECTURES,
                                            .tensors = TENSORS,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};

/* ---- Ling: Qwen3's attention with q, k and v in one tensor, GLM's experts ---- */

static const struct architecture LING[] = {
    {.name = "BailingMoeV2ForCausalLM",
     .models = "Ling 2.0, Ring 2.0",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qk_norm = true,
     .qk_norm_switch = true,
     .rope_partial = 1,
     .experts = true,
     .normalises_experts = true,
     .sigmoid_experts = true},
    {0},
};

#define LAYER LLAMA_LAYER
#define ATTN LLAMA_LAYER "attention."

static const struct tensor_spec LING_TENSORS[] = {
    ROWS_ENDS("model.word_embeddings", "model.norm", "lm_head"),
    ROW_NORM(LAYER "input_layernorm", attn_norm),
    ROW_QKV(ATTN "query_key_value", DIM_QKV),
    ROW_HEAD_NORM(ATTN "query_layernorm", q_norm),
    ROW_HEAD_NORM(ATTN "key_layernorm", k_norm),
    ROW_O(ATTN "dense"),
    ROW_NORM(LAYER "post_attention_layernorm", mlp_norm),
    ROWS_MLP_OR_EXPERTS(MLP),
    ROW(MLP "gate.expert_bias", DIM_EXPERTS, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
        IN_LAYER(experts.choice_bias), WHEN_CHOICE_BIAS),
    ROWS_SHARED_EXPERT(MLP "shared_experts."),
    {0},
};

const struct model_family ling_family = {.architectures = LING,
                                         .tensors = LING_TENSORS,
                                         .ignored = IGNORED,
                                         .forward = llama_forward,
                                         .gathers = true};

/* ---- K-EXAONE: EXAONE 4's attention with the norms of LLaMA, GLM's experts ---- */

#define EXAONE_MOE(arch)                                                                          \
    .name = (arch), .models = "K-EXAONE", .norm = NORM_RMS, .norm_eps = 1e-5f, .act = ACT_SILU,   \
    .rope_theta = 10000, .qk_norm = true, .sliding_window = 4096, .window_pattern = 4,            \
    .windows_rotate = true, .experts = true, .normalises_experts = true, .sigmoid_experts = true, \
    .dense_layers = 1, .n_shared = 1

/* The second is the name in the files of its authors. */
static const struct architecture EXAONE[] = {
    {EXAONE_MOE("ExaoneMoeForCausalLM")}, {EXAONE_MOE("ExaoneMoEForCausalLM")}, {0}};

#define ROW_BIAS_OF_CHOICE(name)                                                                  \
    ROW(MLP name, DIM_EXPERTS, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR, IN_LAYER(experts.choice_bias), \
        WHEN_CHOICE_BIAS)

static const struct tensor_spec EXAONE_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_MLP_OR_EXPERTS(MLP),
    ROW_BIAS_OF_CHOICE("e_score_correction_bias"),
    ROWS_SHARED_EXPERT(MLP "shared_experts."),
    {0},
};

const struct model_family exaone_moe_family = {.architectures = EXAONE,
                                               .tensors = EXAONE_TENSORS,
                                               .ignored = IGNORED,
                                               .forward = llama_forward,
                                               .gathers = true};

/* ---- Hy3: Qwen3's attention, GLM's experts ---- */

static const struct architecture HY3[] = {
    {.name = "HYV3ForCausalLM",
     .models = "Hy3",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qk_norm = true,
     .experts = true,
     .normalises_experts = true,
     .sigmoid_experts = true,
     .dense_layers = 1,
     .n_shared = 1},
    {0},
};

static const struct tensor_spec HY3_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_DENSE_MLP(MLP),
    ROWS_EXPERTS(MLP),
    ROW_ROUTER(MLP "router.gate"),
    ROW_BIAS_OF_CHOICE("expert_bias"),
    ROWS_SHARED_EXPERT(MLP "shared_mlp."),
    {0},
};

const struct model_family hy3_family = {.architectures = HY3,
                                        .tensors = HY3_TENSORS,
                                        .ignored = IGNORED,
                                        .forward = llama_forward,
                                        .gathers = true};
