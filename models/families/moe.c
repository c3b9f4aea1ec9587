/* Mixtures of experts of LLaMA's shape: the MLP of a layer is replaced by experts, each
 * a gated MLP (backend.h's struct experts). Qwen2-MoE adds a shared expert, Qwen3-MoE
 * normalises the weights and norms q and k per head; a model may keep the plain MLP in
 * some layers. The forward pass is LLaMA's.
 *
 * A family has tensors for each expert, as GGUF files have (their readers take the
 * experts apart), and where published checkpoints hold all experts of a layer in one
 * tensor, those in a variant.
 */
#include "models/families/layers.h"

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

#define LAYER LLAMA_LAYER
#define ROW_EXPERT(name, rows, cols, split, target) \
    ROW(name ".weight", rows, cols, split, WEIGHT_LINEAR, IN_LAYER(experts.target), WHEN_EXPERTS)

/* ---- Qwen ---- */

static const struct architecture QWEN[] = {
    {.name = "Qwen3MoeForCausalLM",
     .models = "Qwen3-MoE",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qk_norm = true,
     .sliding_window = 4096,
     .window_switch = true,
     .experts = true},
    {.name = "MellumForCausalLM",
     .models = "Mellum 2",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 500000,
     .qk_norm = true,
     .sliding_window = 1024,
     .window_listed = true,
     .window_theta = 10000,
     .experts = true,
     .normalises_experts = true},
    {.name = "Qwen3VLMoeForConditionalGeneration",
     .models = "Qwen3-VL with experts: text",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 500000,
     .qk_norm = true,
     .window_switch = true,
     .experts = true,
     .normalises_experts = true,
     .wrapper = true},
    {.name = "Qwen2MoeForCausalLM",
     .models = "Qwen2-MoE",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .qkv_bias = true,
     .sliding_window = 4096,
     .window_switch = true,
     .experts = true},
    {0},
};

static const struct tensor_spec QWEN_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_MLP_OR_EXPERTS(LAYER "mlp."),
    ROWS_SHARED_EXPERT(LAYER "mlp.shared_expert."),
    ROW_MATRIX(LAYER "mlp.shared_expert_gate", DIM_ONE, DIM_HIDDEN, SPLIT_NONE, experts.shared_gate,
               WHEN_SHARED),
    {0},
};

/* Qwen3-VL's, each [in, out]. */
#define ROW_STACKED(name, rows, cols, split, target) \
    {LAYER name, rows, cols, split, WEIGHT_LINEAR, IN_LAYER(experts.target), WHEN_EXPERTS, true}
static const struct tensor_spec QWEN_STACKED_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_DENSE_MLP(LAYER "mlp."),
    ROW_ROUTER(LAYER "mlp.gate"),
    ROW_STACKED("mlp.experts.gate_up_proj", DIM_STACKED_GATE_UP, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_STACKED("mlp.experts.down_proj", DIM_STACKED_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    {0},
};

/* ---- OLMoE: q and k are normed over all heads together ---- */

static const struct architecture OLMOE[] = {
    {.name = "OlmoeForCausalLM",
     .models = "OLMoE",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 10000,
     .wide_qk_norm = true,
     .experts = true},
    {0},
};

static const struct tensor_spec OLMOE_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_WIDE_NORMS(LAYER "self_attn."),
    ROW_EXPERT(LAYER "mlp.gate", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, router),
    ROW_EXPERT(LAYER "mlp.experts.%d.gate_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT(LAYER "mlp.experts.%d.up_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT(LAYER "mlp.experts.%d.down_proj", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    {0},
};

const struct model_family olmoe_family = {.architectures = OLMOE,
                                          .tensors = OLMOE_TENSORS,
                                          .ignored = IGNORED,
                                          .forward = llama_forward,
                                          .gathers = true};

static const struct model_family qwen_stacked = {.architectures = QWEN,
                                                 .tensors = QWEN_STACKED_TENSORS,
                                                 .marker = "experts.gate_up_proj",
                                                 .ignored = IGNORED,
                                                 .forward = llama_forward,
                                                 .gathers = true};

const struct model_family qwen_moe_family = {.architectures = QWEN,
                                             .tensors = QWEN_TENSORS,
                                             .variant = &qwen_stacked,
                                             .ignored = IGNORED,
                                             .forward = llama_forward,
                                             .gathers = true};

/* ---- Mixtral ---- */

static const struct architecture MIXTRAL[] = {
    {.name = "MixtralForCausalLM",
     .models = "Mixtral",
     .windows = true,
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 1e6,
     .experts = true,
     .normalises_experts = true},
    {0},
};

#define MOE LAYER "block_sparse_moe."
#define ROWS_MIXTRAL_EXPERTS                                                    \
    ROW_EXPERT(MOE "gate", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, router),        \
        ROW_EXPERT(MOE "experts.%d.w1", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up), \
        ROW_EXPERT(MOE "experts.%d.w3", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up), \
        ROW_EXPERT(MOE "experts.%d.w2", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, down)

static const struct tensor_spec MIXTRAL_TENSORS[] = {
    ROWS_LLAMA_ENDS, ROWS_LLAMA_ATTENTION, ROWS_MIXTRAL_EXPERTS, {0}};

const struct model_family mixtral_family = {.architectures = MIXTRAL,
                                            .tensors = MIXTRAL_TENSORS,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};

/* ---- Phi-3.5-MoE: layer norms, biases, a router of its own kind ---- */

#define PHI_MOE(arch)                                                                          \
    .name = (arch), .norm = NORM_LAYER, .norm_eps = 1e-5f, .act = ACT_SILU, .rope_theta = 1e6, \
    .windows = true, .experts = true, .mixer_experts = true

static const struct architecture PHI_MOE_NAMES[] = {
    {PHI_MOE("PhiMoEForCausalLM"), .models = "Phi-3.5-MoE"},
    {PHI_MOE("PhimoeForCausalLM"), .models = "Phi-3.5-MoE as transformers writes it"},
    {0},
};

static const struct tensor_spec PHI_MOE_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROW_FINAL_NORM_BIAS("model.norm"),
    ROW_HEAD_BIAS("lm_head"),
    ROWS_LLAMA_ATTENTION,
    ROW_NORM_BIAS(LAYER "input_layernorm", attn_norm),
    ROW_NORM_BIAS(LAYER "post_attention_layernorm", mlp_norm),
    ROWS_MIXTRAL_EXPERTS,
    {0},
};

const struct model_family phi_moe_family = {.architectures = PHI_MOE_NAMES,
                                            .tensors = PHI_MOE_TENSORS,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};

/* ---- MiniMax-M2: Mixtral's experts chosen as DeepSeek-V3's ---- */

static const struct architecture MINIMAX[] = {
    {.name = "MiniMaxM2ForCausalLM",
     .models = "MiniMax-M2",
     .norm = NORM_RMS,
     .norm_eps = 1e-6f,
     .act = ACT_SILU,
     .rope_theta = 5e6,
     .rope_partial = 1,
     .wide_qk_norm = true,
     .experts = true,
     .sigmoid_experts = true,
     .normalises_experts = true},
    {0},
};

static const struct tensor_spec MINIMAX_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_WIDE_NORMS(LAYER "self_attn."),
    ROWS_MIXTRAL_EXPERTS,
    ROW(MOE "e_score_correction_bias", DIM_EXPERTS, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
        IN_LAYER(experts.choice_bias), WHEN_CHOICE_BIAS),
    {0},
};

const struct model_family minimax_family = {.architectures = MINIMAX,
                                            .tensors = MINIMAX_TENSORS,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};

/* ---- ERNIE 4.5: softmax scores, with a bias for the choice ---- */

static const struct architecture ERNIE[] = {
    {.name = "Ernie4_5_MoeForCausalLM",
     .models = "ERNIE 4.5 with experts",
     .norm = NORM_RMS,
     .norm_eps = 1e-5f,
     .act = ACT_SILU,
     .rope_theta = 500000,
     .rope_interleaved = true,
     .tied = true,
     .experts = true,
     .normalises_experts = true,
     .choice_bias = true,
     .dense_layers = 1},
    {0},
};

static const struct tensor_spec ERNIE_TENSORS[] = {
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROWS_MLP_OR_EXPERTS(LAYER "mlp."),
    ROW(LAYER "mlp.moe_statics.e_score_correction_bias", DIM_EXPERTS, DIM_ONE, SPLIT_NONE,
        WEIGHT_VECTOR, IN_LAYER(experts.choice_bias), WHEN_CHOICE_BIAS),
    ROWS_SHARED_EXPERT(LAYER "mlp.shared_experts."),
    {0},
};

const struct model_family ernie_moe_family = {.architectures = ERNIE,
                                              .tensors = ERNIE_TENSORS,
                                              .ignored = IGNORED,
                                              .forward = llama_forward,
                                              .gathers = true};

/* ---- Granite 3 ---- */

#define GRANITE(arch)                                                                          \
    .name = (arch), .norm = NORM_RMS, .norm_eps = 1e-6f, .act = ACT_SILU, .rope_theta = 10000, \
    .experts = true, .normalises_experts = true

static const struct architecture GRANITE_ARCHITECTURES[] = {
    {GRANITE("GraniteMoeForCausalLM"), .models = "Granite 3 with experts"},
    {GRANITE("GraniteMoeSharedForCausalLM"), .models = "Granite with experts, one shared"},
    {0},
};

static const struct tensor_spec GRANITE_TENSORS[] = {ROWS_LLAMA_ENDS,
                                                     ROWS_LLAMA_ATTENTION,
                                                     ROWS_GRANITE_EXPERTS,
                                                     ROWS_SHARED_EXPERT(LAYER "shared_mlp."),
                                                     {0}};
static const struct tensor_spec GRANITE_STACKED_TENSORS[] = {
    ROWS_LLAMA_ENDS, ROWS_LLAMA_ATTENTION, ROWS_GRANITE_STACKED, ROWS_GRANITE_SHARED, {0}};
/* As published but for the experts. */
static const struct tensor_spec GRANITE_JOINED_TENSORS[] = {
    ROWS_LLAMA_ENDS, ROWS_LLAMA_ATTENTION, ROWS_GRANITE_EXPERTS, ROWS_GRANITE_SHARED, {0}};

static const struct model_family granite_joined = {.architectures = GRANITE_ARCHITECTURES,
                                                   .tensors = GRANITE_JOINED_TENSORS,
                                                   .marker = "shared_mlp.input_linear.weight",
                                                   .ignored = IGNORED,
                                                   .forward = llama_forward,
                                                   .gathers = true};

static const struct model_family granite_stacked = {.architectures = GRANITE_ARCHITECTURES,
                                                    .tensors = GRANITE_STACKED_TENSORS,
                                                    .variant = &granite_joined,
                                                    .marker = "moe.input_linear.weight",
                                                    .ignored = IGNORED,
                                                    .forward = llama_forward,
                                                    .gathers = true};

const struct model_family granite_moe_family = {.architectures = GRANITE_ARCHITECTURES,
                                                .tensors = GRANITE_TENSORS,
                                                .variant = &granite_stacked,
                                                .ignored = IGNORED,
                                                .forward = llama_forward,
                                                .gathers = true};

/* ---- HunYuan: heads are normed behind the rotation ---- */

#define HUNYUAN(arch)                                                                          \
    .name = (arch), .norm = NORM_RMS, .norm_eps = 1e-5f, .act = ACT_SILU, .rope_theta = 10000, \
    .qk_norm = true, .qk_norm_switch = true, .norm_last = true

static const struct architecture HUNYUAN_DENSE[] = {
    {HUNYUAN("HunYuanDenseV1ForCausalLM"), .models = "HunYuan, dense"}, {0}};
static const struct architecture HUNYUAN_MOE[] = {
    {HUNYUAN("HunYuanMoEV1ForCausalLM"), .models = "HunYuan with experts", .experts = true,
     .normalises_experts = true, .n_shared = 1},
    {0},
};

#define ROWS_HUNYUAN                                                                             \
    ROWS_LLAMA_ENDS, ROW_NORM(LAYER "input_layernorm", attn_norm), ROWS_QKV(LAYER "self_attn."), \
        ROWS_QKV_BIAS(LAYER "self_attn."),                                                       \
        ROW_HEAD_NORM(LAYER "self_attn.query_layernorm", q_norm),                                \
        ROW_HEAD_NORM(LAYER "self_attn.key_layernorm", k_norm), ROW_O(LAYER "self_attn.o_proj"), \
        ROW_O_BIAS(LAYER "self_attn.o_proj"), ROW_NORM(LAYER "post_attention_layernorm", mlp_norm)

static const struct tensor_spec HUNYUAN_DENSE_TENSORS[] = {
    ROWS_HUNYUAN, ROWS_GATED_MLP(LAYER "mlp."), {0}};
static const struct tensor_spec HUNYUAN_MOE_TENSORS[] = {
    ROWS_HUNYUAN,
    ROW_EXPERT(LAYER "mlp.gate.wg", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, router),
    ROW_EXPERT(LAYER "mlp.experts.%d.gate_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT(LAYER "mlp.experts.%d.up_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, up),
    ROW_EXPERT(LAYER "mlp.experts.%d.down_proj", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, down),
    ROWS_SHARED_EXPERT(LAYER "mlp.shared_mlp."),
    {0},
};

const struct model_family hunyuan_family = {.architectures = HUNYUAN_DENSE,
                                            .tensors = HUNYUAN_DENSE_TENSORS,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};
const struct model_family hunyuan_moe_family = {.architectures = HUNYUAN_MOE,
                                                .tensors = HUNYUAN_MOE_TENSORS,
                                                .ignored = IGNORED,
                                                .forward = llama_forward,
                                                .gathers = true};
