/* What config.json leaves out. transformers may leave out a member that has the default
 * of its class, and published files rely on it. Most defaults are the same everywhere,
 * or stand in the families' tables of architectures; the others are here. A GGUF file
 * leaves out other things, which models/checkpoint/gguf/ knows.
 */
#include <string.h>

#include "models/checkpoint/hfconfig_internal.h"

#define GRANITE "{\"attention_multiplier\":1.0}"
#define GEMMA2                                         \
    "{\"head_dim\":256,\"query_pre_attn_scalar\":256," \
    "\"attn_logit_softcapping\":50.0,\"final_logit_softcapping\":30.0}"
#define PROPORTIONAL                                                         \
    "{\"rope_parameters\":{\"sliding_attention\":{\"rope_theta\":10000.0},"  \
    "\"full_attention\":{\"rope_type\":\"proportional\",\"rope_theta\":1e6," \
    "\"partial_rotary_factor\":0.25}}}"
#define MISTRAL_YARN                                                              \
    "\"rope_type\":\"yarn\",\"beta_fast\":32.0,\"beta_slow\":1.0,\"mscale\":1.0," \
    "\"mscale_all_dim\":1.0,\"llama_4_scaling_beta\":0.1,"

/* The name is an architecture's, or the model_type of one that has several. */
static const struct {
    const char *name, *members;
} LEFT_OUT[] = {
    {"Gemma2ForCausalLM", GEMMA2},
    {"VaultGemmaForCausalLM", GEMMA2},
    {"Gemma3ForCausalLM", "{\"head_dim\":256,\"query_pre_attn_scalar\":256}"},
    /* the sizes of which text_config names those that are others than the 4B's */
    {"Gemma3ForConditionalGeneration",
     "{\"num_attention_heads\":8,\"num_key_value_heads\":4,\"head_dim\":256,"
     "\"query_pre_attn_scalar\":256,\"vocab_size\":262208,\"max_position_embeddings\":131072}"},
    {"Gemma4ForCausalLM", PROPORTIONAL},
    {"Gemma4ForConditionalGeneration", PROPORTIONAL},
    {"DeepseekV3ForCausalLM", "{\"routed_scaling_factor\":2.5,\"n_group\":8,\"topk_group\":4}"},
    {"Glm4MoeLiteForCausalLM", "{\"routed_scaling_factor\":1.8}"},
    {"ExaoneMoeForCausalLM", "{\"routed_scaling_factor\":2.5}"},
    {"ExaoneMoEForCausalLM", "{\"routed_scaling_factor\":2.5}"},
    {"HYV3ForCausalLM", "{\"router_scaling_factor\":2.826,\"rope_theta\":11158840.0}"},
    {"JambaForCausalLM", "{\"attn_layer_period\":8,\"attn_layer_offset\":4,"
                         "\"expert_layer_period\":2,\"expert_layer_offset\":1}"},
    {"CohereForCausalLM", "{\"rope_theta\":500000.0}"},
    {"GraniteForCausalLM", GRANITE},
    {"GraniteMoeForCausalLM", GRANITE},
    {"GraniteMoeSharedForCausalLM", GRANITE},
    {"GraniteMoeHybridForCausalLM", GRANITE},
    {"GraniteSWAForCausalLM", GRANITE},
    {"GraniteMoeSWAForCausalLM", GRANITE},
    {"GptOssForCausalLM",
     "{\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":150000.0,\"factor\":32.0,"
     "\"beta_fast\":32.0,\"beta_slow\":1.0,\"truncate\":false,"
     "\"original_max_position_embeddings\":4096}}"},
    {"ApertusForCausalLM",
     "{\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":12e6,\"factor\":8.0,"
     "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
     "\"original_max_position_embeddings\":8192}}"},
    {"CwmForCausalLM",
     "{\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":1e6,\"factor\":16.0,"
     "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
     "\"original_max_position_embeddings\":8192}}"},
    {"Mistral4ForCausalLM",
     "{\"rope_parameters\":{" MISTRAL_YARN "\"rope_theta\":10000.0,\"factor\":128.0,"
     "\"original_max_position_embeddings\":8192}}"},
    {"ministral3", "{\"rope_parameters\":{" MISTRAL_YARN "\"rope_theta\":1e6,\"factor\":16.0,"
                   "\"original_max_position_embeddings\":16384}}"},
    {"glm4v_text", "{\"rms_norm_eps\":1e-5}"},
};

const char *raw_left_out(const struct raw_config *raw)
{
    for (size_t i = 0; i < ARRAY_LEN(LEFT_OUT); i++) {
        if (strcmp(LEFT_OUT[i].name, raw->architecture) == 0 ||
            strcmp(LEFT_OUT[i].name, raw->type) == 0) {
            return strcmp(raw->type, RAW_TYPE_GGUF) == 0 ? NULL : LEFT_OUT[i].members;
        }
    }
    return NULL;
}
