/* GLM-4.5: LLaMA's attention with biases of q, k and v and half of each head rotated, a
 * few plain layers, then experts chosen by sigmoid scores with a bias for the choice,
 * and a shared one without a gate. Layers behind the last predict further tokens; they
 * are not loaded.
 */
#include "models/families/layers.h"

static const struct architecture ARCHITECTURES[] = {
    {.name = "Glm4MoeForCausalLM",
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
    {0},
};

#define MLP LLAMA_LAYER "mlp."
#define ROW_WEIGHT(name, rows, cols, split, target, when) \
    ROW(MLP name ".weight", rows, cols, split, WEIGHT_LINEAR, IN_LAYER(target), when)

static const struct tensor_spec TENSORS[] = {
    /* name, rows and columns, split over ranks, goes to, when */
    ROWS_LLAMA_ENDS,
    ROWS_LLAMA_ATTENTION,
    ROW_WEIGHT("gate_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE),
    ROW_WEIGHT("up_proj", DIM_MLP, DIM_HIDDEN, SPLIT_OUT, up, WHEN_DENSE),
    ROW_WEIGHT("down_proj", DIM_HIDDEN, DIM_MLP, SPLIT_IN, down, WHEN_DENSE),
    ROW_WEIGHT("gate", DIM_EXPERTS, DIM_HIDDEN, SPLIT_NONE, experts.router, WHEN_EXPERTS),
    ROW(MLP "gate.e_score_correction_bias", DIM_EXPERTS, DIM_ONE, SPLIT_NONE, WEIGHT_VECTOR,
        IN_LAYER(experts.choice_bias), WHEN_CHOICE_BIAS),
    ROW_WEIGHT("experts.%d.gate_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, experts.up, WHEN_EXPERTS),
    ROW_WEIGHT("experts.%d.up_proj", DIM_EXPERT, DIM_HIDDEN, SPLIT_OUT, experts.up, WHEN_EXPERTS),
    ROW_WEIGHT("experts.%d.down_proj", DIM_HIDDEN, DIM_EXPERT, SPLIT_IN, experts.down,
               WHEN_EXPERTS),
    ROW_WEIGHT("shared_experts.gate_proj", DIM_SHARED, DIM_HIDDEN, SPLIT_OUT, experts.shared_up,
               WHEN_SHARED),
    ROW_WEIGHT("shared_experts.up_proj", DIM_SHARED, DIM_HIDDEN, SPLIT_OUT, experts.shared_up,
               WHEN_SHARED),
    ROW_WEIGHT("shared_experts.down_proj", DIM_HIDDEN, DIM_SHARED, SPLIT_IN, experts.shared_down,
               WHEN_SHARED),
    {0},
};

static const char *const IGNORED[] = {"rotary_emb.inv_freq", NULL};

const struct model_family glm_moe_family = {.architectures = ARCHITECTURES,
                                            .tensors = TENSORS,
                                            .ignored = IGNORED,
                                            .forward = llama_forward,
                                            .gathers = true};
