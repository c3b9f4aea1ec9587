/* Checkpoints in which an encoder of images or sound stands before a text model of
 * another architecture: config.json names the whole, its text_config the text model, by
 * model_type. The text part is served as that architecture, and the tensors of the
 * encoder are passed over (is_of_vision in load/tensors.c).
 *
 * A text_config may leave out what transformers has as the default of its model_type.
 */
#include <string.h>

#include "models/model.h"

const struct wrapper model_wrappers[] = {
    {"LlavaForConditionalGeneration", "LLaVA 1.5, Pixtral: text"},
    {"LlavaNextForConditionalGeneration", "LLaVA-NeXT, Granite Vision: text"},
    {"LlavaOnevisionForConditionalGeneration", "LLaVA-OneVision: text"},
    {"Idefics3ForConditionalGeneration", "Idefics3, Granite-Docling: text"},
    {"SmolVLMForConditionalGeneration", "SmolVLM, SmolVLM2: text"},
    {"InternVLForConditionalGeneration", "InternVL 3, 3.5 as transformers has them: text"},
    {"InternVLChatModel", "InternVL 2 to 3.5: text"},
    {"AyaVisionForConditionalGeneration", "Aya Vision: text"},
    {"Cohere2VisionForConditionalGeneration", "Command A Vision: text"},
    {"Lfm2VlForConditionalGeneration", "LFM2-VL: text"},
    {"Glm4vForConditionalGeneration", "GLM-4.1V: text"},
    {"Glm46VForConditionalGeneration", "GLM-4.6V: text"},
    {"Glm4vMoeForConditionalGeneration", "GLM-4.5V: text"},
    {"KimiVLForConditionalGeneration", "Kimi-VL: text"},
    {"KimiK25ForConditionalGeneration", "Kimi-K2.5, K2.6: text"},
    {"Kimi_K25ForConditionalGeneration", "Kimi-K2.5 as transformers writes it: text"},
    {"Exaone4_5_ForConditionalGeneration", "EXAONE 4.5: text"},
    {"LightOnOcrForConditionalGeneration", "LightOnOCR: text"},
    {"LightOnOCRForConditionalGeneration", "LightOnOCR as it is published: text"},
    {"VoxtralForConditionalGeneration", "Voxtral: text"},
    {"Qwen2AudioForConditionalGeneration", "Qwen2-Audio: text"},
    {0},
};

static const struct wrapped_text TEXTS[] = {
    {.type = "llama",
     .architecture = "LlamaForCausalLM",
     .hidden = 4096,
     .intermediate = 11008,
     .layers = 32,
     .heads = 32,
     .vocab = 32000,
     .positions = 2048},
    {.type = "mistral",
     .architecture = "MistralForCausalLM",
     .hidden = 4096,
     .intermediate = 14336,
     .layers = 32,
     .heads = 32,
     .kv_heads = 8,
     .vocab = 32000,
     .positions = 131072},
    {.type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .hidden = 4096,
     .intermediate = 22016,
     .layers = 32,
     .heads = 32,
     .kv_heads = 32,
     .vocab = 151936,
     .positions = 32768},
    {.type = "qwen3", .architecture = "Qwen3ForCausalLM"},
    {.type = "qwen3_moe", .architecture = "Qwen3MoeForCausalLM"},
    {.type = "gpt_oss", .architecture = "GptOssForCausalLM"},
    {.type = "granite", .architecture = "GraniteForCausalLM"},
    {.type = "internlm2", .architecture = "InternLM2ForCausalLM"},
    {.type = "phi3", .architecture = "Phi3ForCausalLM"},
    {.type = "gemma2", .architecture = "Gemma2ForCausalLM"},
    {.type = "cohere2", .architecture = "Cohere2ForCausalLM"},
    {.type = "lfm2", .architecture = "Lfm2ForCausalLM"},
    {.type = "glm4v_text", .architecture = "Glm4ForCausalLM"},
    {.type = "glm4v_moe_text", .architecture = "Glm4MoeForCausalLM"},
    {.type = "deepseek_v3", .architecture = "DeepseekV3ForCausalLM"},
    {.type = "kimi_k2", .architecture = "DeepseekV3ForCausalLM"},
    {.type = "exaone4", .architecture = "Exaone4ForCausalLM"},
    {.type = "exaone4_5_text", .architecture = "Exaone4ForCausalLM"},
    {0},
};

bool model_is_wrapper(const char *name)
{
    for (const struct wrapper *w = model_wrappers; w->name; w++) {
        if (strcmp(w->name, name) == 0) {
            return true;
        }
    }
    return false;
}

const struct wrapped_text *model_wrapped_text(const char *type)
{
    for (const struct wrapped_text *t = TEXTS; t->type; t++) {
        if (strcmp(t->type, type) == 0) {
            return t;
        }
    }
    return NULL;
}
