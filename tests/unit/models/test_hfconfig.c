/* config.json and generation_config.json: both styles, the architectures' defaults, and
 * a clear message for each error. */
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "models/checkpoint/hfconfig_internal.h"
#include "models/families/layers.h"

#define SIZES                                                                                  \
    "\"hidden_size\":64,\"num_hidden_layers\":3,\"num_attention_heads\":4,\"vocab_size\":100," \
    "\"max_position_"                                                                          \
    "embeddings\":64"
#define LLAMA "{\"architectures\":[\"LlamaForCausalLM\"]," SIZES

static struct model_config c;
static struct generation_defaults gen;
static struct err e;
static bool dtype_given;

static int parse2(const char *config, const char *generation)
{
    e = (struct err){0};
    return model_config_parse(&c, &gen, &dtype_given, config, strlen(config), generation,
                              generation ? strlen(generation) : 0, &e);
}

static void accept(const char *config)
{
    if (parse2(config, NULL) != 0) {
        fail_msg("%s: %s", config, e.text);
    }
}

/* The file is refused with `code` and a message that contains `words`. */
static void refuse(const char *config, int rc, const char *words)
{
    int got = parse2(config, NULL);

    if (got != rc || e.code != rc || !strstr(e.text, words)) {
        fail_msg("%s: code %d, text '%s', expected %d and '%s'", config, got, e.text, rc, words);
    }
}

static void the_old_style_is_read(void **state)
{
    (void)state;
    accept(LLAMA ",\"num_key_value_heads\":2,\"intermediate_size\":100,\"rms_norm_eps\":1e-5,"
                 "\"rope_theta\":5e5,\"torch_"
                 "dtype\":\"bfloat16\","
                 "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1."
                 "0,\"high_freq_factor\":4.0,"
                 "\"original_max_position_embeddings\":32},\"tie_word_embeddings\":true,\"bos_"
                 "token_id\":1,\"eos_token_id\":["
                 "2,3],"
                 "\"pretraining_tp\":1,\"nested\":{\"a\":[1,{\"b\":null}]}}");
    assert_string_equal(c.architecture, "LlamaForCausalLM");
    assert_int_equal(c.hidden, 64);
    assert_int_equal(c.n_layers, 3);
    assert_int_equal(c.n_heads, 4);
    assert_int_equal(c.n_kv_heads, 2);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.intermediate, 100);
    assert_int_equal(c.max_positions, 64);
    assert_int_equal(c.dtype, DTYPE_BF16);
    assert_true(dtype_given);
    assert_true(c.tied);
    assert_false(c.qkv_bias || c.o_bias || c.mlp_bias || c.qk_norm);
    assert_int_equal(c.rope.kind, ROPE_LLAMA3);
    assert_int_equal(c.rope.rot_dim, 16);
    assert_int_equal(c.rope.original_positions, 32);
    assert_float_equal(c.rope.theta, 5e5, 0);
    assert_float_equal(c.rope.factor, 8, 0);
    assert_int_equal(c.bos, 1);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos[1], 3);
}

static void the_new_style_is_read(void **state)
{
    (void)state;
    accept(LLAMA
           ",\"dtype\":\"float16\",\"head_dim\":20,\"rope_parameters\":{\"rope_theta\":1e4,\"rope_"
           "type\":"
           "\"linear\",\"factor\":2,"
           "\"partial_rotary_factor\":0.5},\"num_key_value_heads\":null,\"eos_token_id\":null}");
    assert_int_equal(c.dtype, DTYPE_F16);
    assert_int_equal(c.head_dim, 20);
    assert_int_equal(c.n_kv_heads, 4);
    assert_int_equal(c.rope.kind, ROPE_LINEAR);
    assert_int_equal(c.rope.rot_dim, 10);
    assert_int_equal(c.max_positions, 128); /* linear scaling extends the context */
    assert_int_equal(c.n_eos, 0);
    assert_int_equal(c.bos, -1);
}

static void silence_means_the_architectures_defaults(void **state)
{
    (void)state;
    accept(LLAMA "}");
    assert_false(c.tied);
    assert_false(dtype_given);
    assert_int_equal(c.act, ACT_SILU);
    assert_int_equal(c.norm, NORM_RMS);
    assert_float_equal(c.rope.theta, 10000, 0);
    accept("{\"architectures\":[\"Qwen2ForCausalLM\"]," SIZES "}");
    assert_true(c.qkv_bias);
    assert_false(c.o_bias);
    accept("{\"architectures\":[\"Qwen3ForCausalLM\"],\"attention_bias\":true," SIZES "}");
    assert_true(c.qk_norm && c.qkv_bias && c.o_bias);
    accept("{\"architectures\":[\"OPTForCausalLM\"],\"ffn_dim\":32,\"word_embed_proj_dim\":16,\"do_"
           "layer_norm_before\":"
           "false," SIZES "}");
    assert_true(c.tied && c.qkv_bias && c.o_bias && c.mlp_bias && !c.norm_before && !c.final_norm);
    assert_int_equal(c.embed_dim, 16);
    assert_int_equal(c.intermediate, 32);
    assert_int_equal(c.rope.rot_dim, 0);
    assert_int_equal(c.act, ACT_RELU);
    accept("{\"architectures\":[\"GPT2LMHeadModel\"],\"n_embd\":48,\"n_layer\":2,\"n_head\":3,\"n_"
           "positions\":32,"
           "\"vocab_size\":9,\"n_inner\":null}");
    assert_int_equal(c.hidden, 48);
    assert_int_equal(c.intermediate, 192);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.norm, NORM_LAYER);
    assert_int_equal(c.act, ACT_GELU_TANH);
    accept("{\"architectures\":[\"Gemma2ForCausalLM\"],\"head_dim\":32,\"query_pre_attn_scalar\":"
           "24,\"sliding_window\":8,"
           "\"hidden_activation\":\"gelu_pytorch_tanh\",\"attn_logit_softcapping\":null,\"final_"
           "logit_softcapping\":30."
           "0," SIZES "}");
    assert_true(c.windowed[0] && !c.windowed[1] && c.windowed[2]);
    assert_float_equal(c.query_scalar, 24, 0);
    assert_float_equal(c.attn_softcap, 0, 0);
    assert_float_equal(c.final_softcap, 30, 0);
    accept(LLAMA ",\"attention_bias\":true,\"mlp_bias\":true}");
    assert_float_equal(c.query_scalar, 16, 0);
    assert_float_equal(c.embed_scale, 1, 0);
    assert_float_equal(c.norm_offset, 0, 0);
    assert_true(c.qkv_bias && c.o_bias && c.mlp_bias);
    accept("{\"architectures\":[\"GemmaForCausalLM\"],\"hidden_act\":\"gelu\"," SIZES "}");
    assert_int_equal(c.act, ACT_GELU_TANH);
    assert_float_equal(c.embed_scale, 8, 0);
    assert_float_equal(c.norm_offset, 1, 0);
    assert_true(c.tied);
}

static void windows_hold_for_the_layers_they_name(void **state)
{
    (void)state;
    accept("{\"architectures\":[\"MistralForCausalLM\"],\"sliding_window\":8," SIZES "}");
    assert_int_equal(c.sliding_window, 8);
    assert_true(c.windowed[0] && c.windowed[2]);
    accept("{\"architectures\":[\"MistralForCausalLM\"],\"sliding_window\":null," SIZES "}");
    assert_int_equal(c.sliding_window, 0);
    accept("{\"architectures\":[\"MistralForCausalLM\"]," SIZES "}");
    assert_int_equal(c.sliding_window, 4096);
    accept("{\"architectures\":[\"Qwen2ForCausalLM\"],\"sliding_window\":8,\"use_sliding_window\":"
           "false," SIZES "}");
    assert_int_equal(c.sliding_window, 0);
    accept("{\"architectures\":[\"Qwen2ForCausalLM\"],\"sliding_window\":8,\"use_sliding_window\":"
           "true,\"max_window_"
           "layers\":2," SIZES "}");
    assert_true(!c.windowed[0] && !c.windowed[1] && c.windowed[2]);
    accept("{\"architectures\":[\"Qwen3ForCausalLM\"],\"sliding_window\":8,\"use_sliding_window\":"
           "true,"
           "\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]," SIZES
           "}");
    assert_true(c.windowed[0] && !c.windowed[1] && c.windowed[2]);
}

/* As transformers: LLaMA and others have no windows, whatever was left in the file by a
 * conversion from a model that has. */
static void windows_are_of_architectures_that_have_them(void **state)
{
    (void)state;
#define LISTED "\"layer_types\":[\"full_attention\",\"full_attention\",\"sliding_attention\"],"
    static const struct {
        const char *name, *more;
        bool windowed[2]; /* the first layer, the last */
    } CASES[] = {{"LlamaForCausalLM", "", {false, false}},
                 {"LlamaForCausalLM", "\"use_sliding_window\":false,", {false, false}},
                 {"LlamaForCausalLM", LISTED, {false, false}},
                 {"SeedOssForCausalLM", "", {false, false}},
                 {"GraniteForCausalLM", "", {false, false}},
                 {"SmolLM3ForCausalLM", "\"use_sliding_window\":false," LISTED, {false, false}},
                 {"SmolLM3ForCausalLM", "\"use_sliding_window\":true," LISTED, {false, true}},
                 {"Ministral3ForCausalLM", "", {true, true}},
                 {"Phi3ForCausalLM", "", {true, true}},
                 {"Starcoder2ForCausalLM", "", {true, true}}};
#undef LISTED

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        char text[1024];
        snprintf(text, sizeof(text),
                 "{\"architectures\":[\"%s\"],\"sliding_window\":8,%s" SIZES "}", CASES[i].name,
                 CASES[i].more);
        accept(text);
        if (c.windowed[0] != CASES[i].windowed[0] || c.windowed[2] != CASES[i].windowed[1] ||
            c.sliding_window != (CASES[i].windowed[1] ? 8 : 0)) {
            fail_msg("%s %s", CASES[i].name, CASES[i].more);
        }
    }
}

static void wrong_values_are_named_with_what_is_allowed(void **state)
{
    (void)state;
    refuse("{\"architectures\":[\"FooForCausalLM\"]," SIZES "}", ERR_UNSUPPORTED,
           "FooForCausalLM is not known; known are LlamaForCausalLM");
    refuse("{" SIZES "}", ERR_INVALID, "architectures is missing");
    refuse("{\"architectures\":[\"LlamaForCausalLM\"]}", ERR_INVALID, "hidden_size is missing");
    refuse(LLAMA ",\"hidden_size\":0}", ERR_INVALID, "hidden_size is 0, allowed are 1 to 131072");
    refuse(LLAMA ",\"hidden_size\":\"64\"}", ERR_INVALID,
           "hidden_size must be a whole number, not a string");
    refuse(LLAMA ",\"hidden_size\":6.5}", ERR_INVALID, "a whole number");
    refuse(LLAMA ",\"hidden_size\":99999999999999999999}", ERR_INVALID, "64 bits");
    refuse(LLAMA ",\"num_hidden_layers\":513}", ERR_INVALID,
           "num_hidden_layers is 513, allowed are 1 to 512");
    refuse(LLAMA ",\"num_attention_heads\":5}", ERR_INVALID,
           "hidden_size 64 is no multiple of num_attention_heads 5");
    refuse(LLAMA ",\"num_key_value_heads\":3}", ERR_INVALID,
           "num_attention_heads 4 is no multiple of num_key_value_heads 3");
    refuse("{\"architectures\":[\"Qwen3MoeForCausalLM\"]," SIZES "}", ERR_INVALID,
           "num_experts (num_local_experts, n_routed_experts) is missing");
    refuse("{\"architectures\":[\"MixtralForCausalLM\"]," SIZES ",\"num_local_experts\":4}",
           ERR_INVALID, "num_experts_per_tok is missing");
    refuse("{\"architectures\":[\"MixtralForCausalLM\"]," SIZES
           ",\"num_local_experts\":4,\"num_experts_per_tok\":5}",
           ERR_INVALID, "num_experts_per_tok is 5 of 4 experts");
    refuse("{\"architectures\":[\"GptOssForCausalLM\"]," SIZES
           ",\"num_local_experts\":4,\"num_experts_per_tok\":2,\"swiglu_alpha\":2}",
           ERR_UNSUPPORTED, "swiglu_alpha is 2, allowed is 1.702");
    refuse("{\"architectures\":[\"OlmoeForCausalLM\"]," SIZES
           ",\"num_experts\":4,\"num_experts_per_tok\":2,\"clip_qkv\":8}",
           ERR_UNSUPPORTED, "clip_qkv is not supported");
    refuse("{\"architectures\":[\"SmolLM3ForCausalLM\"]," SIZES ",\"no_rope_layers\":[1,0]}",
           ERR_INVALID, "no_rope_layers has 2 entries for num_hidden_layers 3");
    refuse("{\"architectures\":[\"Glm4MoeForCausalLM\"]," SIZES
           ",\"n_routed_experts\":4,\"num_experts_per_tok\":2,\"mlp_layer_types\":[\"dense\","
           "\"sparse\"]}",
           ERR_INVALID, "mlp_layer_types has 2 entries for num_hidden_layers 3");
    refuse("{\"architectures\":[\"BambaForCausalLM\"]," SIZES ",\"attn_layer_indices\":[1,3]}",
           ERR_INVALID,
           "attn_layer_indices (full_attn_idxs) names layer 3, num_hidden_layers is 3");
    refuse("{\"architectures\":[\"StableLmForCausalLM\"]," SIZES ",\"qk_layernorm\":true}",
           ERR_UNSUPPORTED, "qk_layernorm true is not supported");
    refuse("{\"architectures\":[\"Gemma3ForCausalLM\"]," SIZES
           ",\"rope_parameters\":{\"sliding_attention\":{\"rope_type\":\"yarn\"}}}",
           ERR_INVALID, "sliding_attention: rope_type 'yarn' is not supported");
    refuse(LLAMA ",\"mlp_only_layers\":[512]}", ERR_INVALID, "mlp_only_layers is 512");
    refuse(LLAMA ",\"rms_norm_eps\":NaN}", ERR_INVALID, "rms_norm_eps is nan");
    refuse(LLAMA ",\"rope_theta\":Infinity}", ERR_INVALID, "rope_theta is inf");
    refuse(LLAMA ",\"hidden_act\":\"relu6\"}", ERR_UNSUPPORTED,
           "hidden_act is 'relu6', allowed are silu");
    refuse(LLAMA ",\"torch_dtype\":\"int8\"}", ERR_UNSUPPORTED,
           "dtype is 'int8', allowed are bfloat16");
    refuse(LLAMA ",\"tie_word_embeddings\":1}", ERR_INVALID,
           "tie_word_embeddings must be true or false, not a number");
    refuse(LLAMA ",\"rope_scaling\":{\"type\":\"foo\"}}", ERR_UNSUPPORTED,
           "rope_type is 'foo', allowed are default");
    refuse(LLAMA ",\"rope_scaling\":{\"type\":\"linear\"}}", ERR_INVALID,
           "factor is missing for rope_type 'linear'");
    refuse(LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.5}}", ERR_INVALID,
           "factor is 0.5, allowed are 1 to");
    accept(LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":16,\"low_freq_factor\":1,"
                 "\"high_freq_factor\":1}}"); /* Llama 4 Scout */
    refuse(LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
                 "\"high_freq_factor\":3}}",
           ERR_INVALID, "high_freq_factor 3 must not be less than low_freq_factor 4");
    refuse(LLAMA
           ",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1],\"long_factor\":[1]}}",
           ERR_INVALID, "have 1 and 1 numbers, 8 are needed");
    refuse(LLAMA ",\"head_dim\":15}", ERR_INVALID, "15 rotary dimensions");
    refuse(LLAMA ",\"eos_token_id\":100}", ERR_INVALID, "eos_token_id is 100, vocab_size is 100");
    refuse(LLAMA ",\"eos_token_id\":[-1]}", ERR_INVALID, "eos_token_id is -1");
    refuse(LLAMA ",\"bos_token_id\":100}", ERR_INVALID, "bos_token_id is 100");
    refuse("{\"architectures\":[\"Qwen2ForCausalLM\"],\"layer_types\":[\"full_attention\"]," SIZES
           "}",
           ERR_INVALID, "layer_types has 1 entries");
    refuse("{\"architectures\":[\"Qwen2ForCausalLM\"],\"layer_types\":[\"full_attention\","
           "\"full_attention\",\"mamba\"]," SIZES "}",
           ERR_INVALID, "layer 2 is recurrent; Qwen2ForCausalLM has no such layers");
    refuse("{\"architectures\":[\"Qwen3_5ForCausalLM\"]," SIZES "}", ERR_INVALID,
           "the heads of the recurrent layers are missing");
    refuse("{\"architectures\":[\"BambaForCausalLM\"],\"mamba_n_heads\":6,\"mamba_n_groups\":4,"
           "\"mamba_d_state\":8," SIZES "}",
           ERR_INVALID, "in 4 groups are not possible");
    refuse("{\"architectures\":[\"GraniteMoeHybridForCausalLM\"],\"mamba_n_heads\":4,"
           "\"mamba_n_groups\":1,\"mamba_d_state\":8,\"num_local_experts\":8,"
           "\"num_experts_per_tok\":9," SIZES "}",
           ERR_INVALID, "num_experts_per_tok is 9 of 8 experts");
    refuse("{\"architectures\":[\"CohereForCausalLM\"]," SIZES ",\"use_qk_norm\":true}",
           ERR_UNSUPPORTED, "use_qk_norm true is not supported with CohereForCausalLM");
    refuse("{\"architectures\":[\"Qwen3VLForConditionalGeneration\"],\"language_config\":{" SIZES
           "}}",
           ERR_INVALID, "text_config is missing, in which Qwen3VLForConditionalGeneration");
    refuse("{\"architectures\":[\"FalconForCausalLM\"]," SIZES ",\"alibi\":true}", ERR_UNSUPPORTED,
           "alibi true is not supported");
    refuse("{\"architectures\":[\"FalconForCausalLM\"]," SIZES ",\"parallel_attn\":false}",
           ERR_UNSUPPORTED, "parallel_attn false is not supported");
    refuse("{\"architectures\":[\"PhiMoEForCausalLM\"]," SIZES
           ",\"num_local_experts\":4,\"num_experts_per_tok\":3}",
           ERR_UNSUPPORTED, "num_experts_per_tok is 3, PhiMoEForCausalLM chooses 2");
    refuse(LLAMA ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2,\"short_mscale\":1.1,"
                 "\"long_mscale\":1.2}}",
           ERR_UNSUPPORTED, "short_mscale 1.1 and long_mscale 1.2 must be equal");
    refuse("{\"architectures\":[\"Qwen2ForCausalLM\"],\"layer_types\":[\"x\"]," SIZES "}",
           ERR_INVALID, "layer_types: 'x'");
}

#define LATENT                                                                        \
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"]," SIZES                           \
    ",\"n_routed_experts\":8,\"num_experts_per_tok\":3,\"moe_intermediate_size\":16," \
    "\"kv_lora_rank\":32,\"qk_rope_head_dim\":8,\"qk_nope_head_dim\":16,\"v_head_dim\":12"

static void latents_are_read_and_checked(void **state)
{
    (void)state;
    accept(LATENT
           ",\"q_lora_rank\":null,\"first_k_dense_replace\":1,\"n_shared_experts\":2,"
           "\"n_group\":4,\"topk_group\":2,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,"
           "\"original_max_position_embeddings\":64,\"mscale\":1,\"mscale_all_dim\":1}}");
    assert_int_equal(c.latent.rank, 32);
    assert_int_equal(c.latent.q_rank, 0);
    assert_int_equal(c.head_dim, 24);
    assert_int_equal(c.n_kv_heads, 1);
    assert_int_equal(c.rope.rot_dim, 8);
    assert_true(c.rope_interleaved);
    assert_false(c.experts.layer[0]);
    assert_true(c.experts.layer[1]);
    assert_int_equal(c.experts.shared_intermediate, 32);
    /* scores are multiplied by (0.1 ln 40 + 1)^2 */
    double mscale = 0.1 * log(40) + 1;
    assert_true(fabs(1 / sqrt((double)c.query_scalar) - mscale * mscale / sqrt(24)) < 1e-5);
    refuse(LATENT ",\"n_group\":3}", ERR_INVALID, "8 experts in n_group 3");
    refuse(LATENT ",\"n_group\":4,\"topk_group\":1}", ERR_INVALID, "num_experts_per_tok 3");
    refuse(LATENT ",\"n_group\":8,\"topk_group\":8}", ERR_INVALID, "a group needs two");
    refuse(LATENT ",\"scoring_func\":\"softmax\"}", ERR_UNSUPPORTED, "scoring_func is 'softmax'");
    refuse(LATENT ",\"topk_method\":\"other\"}", ERR_UNSUPPORTED, "topk_method 'other'");
    refuse(LATENT ",\"attention_bias\":true}", ERR_UNSUPPORTED, "attention_bias true");
    refuse(LATENT ",\"kv_lora_rank\":2048}", ERR_INVALID, "more than 2048 together");
    refuse(LATENT ",\"kv_lora_rank\":4096}", ERR_INVALID, "allowed are 1 to 2048");
    refuse(LATENT ",\"mlp_layer_types\":[\"thick\"]}", ERR_INVALID, "neither dense nor sparse");
    refuse("{\"architectures\":[\"DeepseekV2ForCausalLM\"]," SIZES "}", ERR_INVALID,
           "kv_lora_rank is missing");
}

#define GEMMA4 "{\"architectures\":[\"Gemma4ForCausalLM\"]," SIZES ",\"head_dim\":16"
#define TYPES ",\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]"

static void layers_of_gemma4_are_checked_against_each_other(void **state)
{
    (void)state;
    accept(GEMMA4 TYPES ",\"global_head_dim\":32,\"num_global_key_value_heads\":1,"
                        "\"attention_k_eq_v\":true}");
    assert_int_equal(c.full_head_dim, 32);
    assert_int_equal(c.full_kv_heads, 1);
    assert_true(c.keys_are_values && c.sharing_from == 3);
    accept(GEMMA4 TYPES ",\"per_layer_config\":{\"1\":{\"head_dim\":24}}}");
    assert_int_equal(c.full_head_dim, 24);
    assert_int_equal(c.full_kv_heads, c.n_kv_heads);
    refuse(GEMMA4 TYPES ",\"per_layer_config\":{\"1\":{\"hidden_size\":24}}}", ERR_INVALID,
           "per_layer_config: 'hidden_size' is not supported");
    refuse(GEMMA4 TYPES ",\"num_kv_shared_layers\":2}", ERR_INVALID,
           "num_kv_shared_layers 2: layer 1 has no layer of its kind in front of them");
    refuse(GEMMA4 TYPES ",\"num_kv_shared_layers\":4}", ERR_INVALID, "num_kv_shared_layers 4");
    refuse(GEMMA4 TYPES ",\"num_global_key_value_heads\":3,\"attention_k_eq_v\":true}", ERR_INVALID,
           "no multiple of num_global_key_value_heads 3");
    refuse(GEMMA4 ",\"use_bidirectional_attention\":\"all\"}", ERR_UNSUPPORTED,
           "use_bidirectional_attention 'all'");
    refuse(GEMMA4 ",\"hidden_size_per_layer_input\":8,\"vocab_size_per_layer_input\":50}",
           ERR_UNSUPPORTED, "vocab_size_per_layer_input 50 is not vocab_size 100");
}

static void check_stages(const struct model_config *m, int32_t n, const int32_t *first)
{
    struct err why = {0};

    assert_int_equal(model_check_stages(m, n, &why), 0);
    for (int32_t i = 0; i <= n; i++) {
        assert_int_equal(model_first_layer(m, i, n), first[i]);
    }
}

/* Layers that share caches, and the first of those that they read, are on the last
 * stage; where the even division has them there anyway it stays. */
static void stages_end_before_the_caches_that_layers_share(void **state)
{
    (void)state;
    struct model_config m = {.n_layers = 10, .sharing_from = 10};
    struct err why = {0};

    check_stages(&m, 3, (const int32_t[]){0, 4, 7, 10});
    m.sharing_from = 6; /* layers 4 and 5 are read */
    for (int32_t i = 0; i < m.n_layers; i++) {
        m.windowed[i] = i % 2 == 0;
    }
    check_stages(&m, 1, (const int32_t[]){0, 10});
    check_stages(&m, 2, (const int32_t[]){0, 4, 10});
    check_stages(&m, 3, (const int32_t[]){0, 2, 4, 10});
    check_stages(&m, 5, (const int32_t[]){0, 1, 2, 3, 4, 10});
    m.sharing_from = 8; /* 6 and 7 */
    check_stages(&m, 2, (const int32_t[]){0, 5, 10});
    m.sharing_from = 6;
    assert_int_equal(model_check_stages(&m, 6, &why), ERR_INVALID);
    assert_non_null(strstr(why.text, "at most 5 stages are possible"));
}

static void the_text_of_a_vision_model_is_in_its_text_config(void **state)
{
    (void)state;
    accept("{\"text_config\":{" SIZES ",\"head_dim\":20,\"text_config\":{\"head_dim\":5}},"
           "\"architectures\":[\"Mistral3ForConditionalGeneration\"],\"hidden_size\":7,"
           "\"dtype\":\"bfloat16\",\"eos_token_id\":[3,4]}");
    assert_true(c.wrapped);
    assert_int_equal(c.hidden, 64);
    assert_int_equal(c.head_dim, 20);
    assert_int_equal(c.dtype, DTYPE_BF16);
    assert_int_equal(c.n_eos, 2);
    refuse("{\"architectures\":[\"Mistral3ForConditionalGeneration\"],\"text_config\":3}",
           ERR_INVALID, "text_config must be an object");
}

static void broken_json_is_refused_at_its_byte(void **state)
{
    (void)state;
    refuse("", ERR_INVALID, "config.json: byte 0: an object expected, not nothing");
    refuse("[]", ERR_INVALID, "an object expected, not an array");
    refuse("{", ERR_INVALID, "ends inside an object");
    refuse("{} x", ERR_INVALID, "byte 3: something follows");
    refuse("{\"a\":1,}", ERR_INVALID, "a string expected");
    refuse("{\"a\" 1}", ERR_INVALID, "':' expected");
    refuse("{\"a\":1 \"b\":2}", ERR_INVALID, "',' or '}' expected");
    refuse("{\"a\":[1 2]}", ERR_INVALID, "',' or ']' expected");
    refuse("{\"a\":01}", ERR_INVALID, "not a number");
    refuse("{\"a\":1.}", ERR_INVALID, "not a number");
    refuse("{\"a\":1e}", ERR_INVALID, "not a number");
    refuse("{\"a\":truth}", ERR_INVALID, "true or false expected");
    refuse("{\"a\":nil}", ERR_INVALID, "null expected");
    refuse("{\"a\":\"\\u0000\"}", ERR_INVALID, "a NUL character");
    refuse("{\"a\":\"\\ud800\"}", ERR_INVALID, "half of a surrogate pair");
    refuse("{\"a\":\"\\x\"}", ERR_INVALID, "an unknown escape");
    refuse("{\"a\":\"\xc0\x80\"}", ERR_INVALID, "not UTF-8");
    refuse("{\"a\":\"\xed\xa0\x80\"}", ERR_INVALID, "not UTF-8");
    refuse("{\"a\":\"\n\"}", ERR_INVALID, "a control character");
    refuse("{\"a\":\"", ERR_INVALID, "ends inside a string");
    char deep[600] = "{\"a\":";
    memset(deep + 5, '[', 200);
    refuse(deep, ERR_INVALID, "nested deeper than 64");
    accept(
        "{\"x\":[[],{},[{\"\\u20ac\\ud83d\\ude00\":-0.5e+3}],\"\xe2\x82\xac\"],\"architectures\":["
        "\"LlamaForCausalLM\",\"b\"]," SIZES "}");
}

static void generation_defaults_are_read(void **state)
{
    (void)state;
    accept(LLAMA "}");
    assert_true(isnan(gen.temperature) && isnan(gen.top_p) && isnan(gen.min_p) &&
                isnan(gen.repetition_penalty));
    assert_int_equal(gen.top_k, -1);
    assert_int_equal(
        parse2(LLAMA ",\"eos_token_id\":2}",
               "{\"eos_token_id\":[5,6],\"temperature\":0.6,\"top_p\":0.9,\"top_k\":20,"
               "\"min_p\":0.05,\"repetition_penalty\":1.1,\"do_sample\":true,\"max_length\":null}"),
        0);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos[0], 5);
    assert_float_equal(gen.temperature, 0.6f, 0);
    assert_float_equal(gen.top_p, 0.9f, 0);
    assert_float_equal(gen.min_p, 0.05f, 0);
    assert_float_equal(gen.repetition_penalty, 1.1f, 0);
    assert_int_equal(gen.top_k, 20);
    assert_int_equal(parse2(LLAMA "}", "{\"temperature\":-1}"), ERR_INVALID);
    assert_non_null(strstr(e.text, "generation_config.json"));
    assert_non_null(strstr(e.text, "temperature is -1, allowed are 0 to 100"));
    assert_int_equal(parse2(LLAMA "}", "{\"top_p\":0}"), ERR_INVALID);
    assert_int_equal(
        parse2(LLAMA "}", "{\"eos_token_id\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}"),
        ERR_INVALID);
}

static void nothing_is_returned_with_an_error(void **state)
{
    (void)state;
    accept(LLAMA "}");
    struct model_config before = c;
    refuse(LLAMA ",\"hidden_size\":32,\"eos_token_id\":100}", ERR_INVALID, "eos_token_id");
    assert_memory_equal(&before, &c, sizeof(c));
    /* of a head these ids have no meaning: as SpecForge's of DeepSeek-V3 */
    accept("{\"architectures\":[\"LlamaForCausalLMEagle3\"],\"hidden_size\":64,\"num_hidden_"
           "layers\":1,"
           "\"num_attention_heads\":4,\"intermediate_size\":64,\"max_position_embeddings\":64,"
           "\"vocab_size\":100,\"draft_vocab_size\":50,\"bos_token_id\":151643,\"eos_token_id\":"
           "151645}");
    assert_int_equal(c.bos, -1);
    assert_int_equal(c.n_eos, 0);
    /* an architecture that is not known may give a member another type */
    refuse("{\"moe_layer_freq\":[0,1],\"architectures\":[\"MiMoV2FlashForCausalLM\"]}",
           ERR_UNSUPPORTED, "MiMoV2FlashForCausalLM is not known");
    refuse("{\"moe_layer_freq\":[0,1],\"architectures\":[\"DeepseekV3ForCausalLM\"]}", ERR_INVALID,
           "moe_layer_freq must be a whole number");
    refuse("{\"moe_layer_freq\":[0,1],\"architectures\":[\"LlamaForCausalLMEagle3\"]}", ERR_INVALID,
           "moe_layer_freq must be a whole number");
    assert_int_equal(model_config_read(&c, &gen, "tests/golden", &e), ERR_NOT_FOUND);
    assert_non_null(strstr(e.text, "config.json"));
}

static void rotations_are_those_of_the_definition(void **state)
{
    (void)state;
    float table[3 * 4];
    struct rope_config r = {
        .kind = ROPE_DEFAULT, .theta = 100, .factor = 1, .rot_dim = 4, .original_positions = 3};
    struct rope_table t;
    rope_table_init(&t, table, &r, 3);
    rope_table_reach(&t, 1);
    assert_int_equal(t.n_filled, 1);
    rope_table_reach(&t, 9);
    assert_int_equal(t.n_filled, 3);
    assert_float_equal(table[0], 1, 0);
    assert_float_equal(table[3], 0, 0);
    /* position 2, frequencies 1 and 100^(-1/2) */
    assert_float_equal(table[8 + 0], cos(2.0), 1e-6);
    assert_float_equal(table[8 + 1], cos(0.2), 1e-6);
    assert_float_equal(table[8 + 2], sin(2.0), 1e-6);
    assert_float_equal(table[8 + 3], sin(0.2), 1e-6);
    r.kind = ROPE_LINEAR;
    r.factor = 2;
    rope_table_init(&t, table, &r, 3);
    rope_table_reach(&t, 3);
    assert_float_equal(table[8 + 2], sin(1.0), 1e-6);
    /* the longer wavelength is beyond the context, and there are none between */
    r.kind = ROPE_LLAMA3;
    r.original_positions = 10;
    r.low_freq_factor = r.high_freq_factor = 1;
    rope_table_init(&t, table, &r, 3);
    rope_table_reach(&t, 3);
    assert_float_equal(table[8 + 2], sin(2.0), 1e-6);
    assert_float_equal(table[8 + 3], sin(0.1), 1e-6);
}

/* The column behind the sines; the table's other columns are as without. */
static void factors_of_queries_grow_with_the_contexts_before_them(void **state)
{
    (void)state;
    float table[7 * 8];
    struct rope_config r = {.kind = ROPE_DEFAULT,
                            .theta = 100,
                            .factor = 1,
                            .rot_dim = 4,
                            .original_positions = 3,
                            .query_beta = 0.5};
    struct rope_table t;

    assert_int_equal(rope_table_cols(&r), 8);
    rope_table_init(&t, table, &r, 7);
    rope_table_reach(&t, 7);
    assert_float_equal(table[2 * 8 + 3], sin(0.2), 1e-6);
    assert_float_equal(table[2 * 8 + 4], 1, 0);
    assert_float_equal(table[3 * 8 + 4], 1 + 0.5 * log(2), 1e-6);
    assert_float_equal(table[5 * 8 + 4], 1 + 0.5 * log(2), 1e-6);
    assert_float_equal(table[6 * 8 + 4], 1 + 0.5 * log(3), 1e-6);
    r.query_beta = 0;
    assert_int_equal(rope_table_cols(&r), 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_old_style_is_read),
        cmocka_unit_test(the_new_style_is_read),
        cmocka_unit_test(silence_means_the_architectures_defaults),
        cmocka_unit_test(windows_hold_for_the_layers_they_name),
        cmocka_unit_test(windows_are_of_architectures_that_have_them),
        cmocka_unit_test(wrong_values_are_named_with_what_is_allowed),
        cmocka_unit_test(latents_are_read_and_checked),
        cmocka_unit_test(layers_of_gemma4_are_checked_against_each_other),
        cmocka_unit_test(stages_end_before_the_caches_that_layers_share),
        cmocka_unit_test(the_text_of_a_vision_model_is_in_its_text_config),
        cmocka_unit_test(broken_json_is_refused_at_its_byte),
        cmocka_unit_test(generation_defaults_are_read),
        cmocka_unit_test(nothing_is_returned_with_an_error),
        cmocka_unit_test(rotations_are_those_of_the_definition),
        cmocka_unit_test(factors_of_queries_grow_with_the_contexts_before_them),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
