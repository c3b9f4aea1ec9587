/* Configurations of architectures of late 2025 on, in the form of published models, and
 * values in them that cannot be. */
#include "tests/unit/models/config_text.h"

static void refuse(const char *text, int rc, const char *message)
{
    struct generation_defaults gen;
    struct err e = {0};
    bool dtype_given;

    assert_int_equal(model_config_parse(&c, &gen, &dtype_given, text, strlen(text), NULL, 0, &e),
                     rc);
    if (!strstr(e.text, message)) {
        fail_msg("'%s' does not say '%s'", e.text, message);
    }
}

/* What all of these models have. */
#define SIZES                                                                                     \
    "\"hidden_size\":64,\"intermediate_size\":96,\"num_attention_heads\":4,"                      \
    "\"num_key_value_heads\":2,\"num_hidden_layers\":4,\"vocab_size\":100,\"dtype\":\"float32\"," \
    "\"max_position_embeddings\":512"
#define OF(name) "{\"architectures\":[\"" name "\"]," SIZES

static void trinity_mini(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"AfmoeForCausalLM\"],\"attention_dropout\":0.0,"
                "\"dtype\":\"bfloat16\",\"global_attn_every_n_layers\":4,\"head_dim\":128,"
                "\"hidden_act\":\"silu\",\"hidden_size\":2048,\"intermediate_size\":6144,"
                "\"layer_types\":[\"sliding_attention\",\"sliding_attention\","
                "\"sliding_attention\",\"full_attention\"],\"load_balance_coeff\":0.001,"
                "\"max_position_embeddings\":131072,\"model_type\":\"afmoe\","
                "\"moe_intermediate_size\":1024,\"mup_enabled\":true,\"n_group\":1,"
                "\"num_attention_heads\":32,\"num_dense_layers\":2,\"num_expert_groups\":1,"
                "\"num_experts\":128,\"num_experts_per_tok\":8,\"num_hidden_layers\":4,"
                "\"num_key_value_heads\":4,\"num_limited_groups\":1,\"num_shared_experts\":1,"
                "\"rms_norm_eps\":1e-05,\"rope_scaling\":null,\"rope_theta\":10000,"
                "\"route_norm\":true,\"route_scale\":2.826,\"score_func\":\"sigmoid\","
                "\"sliding_window\":2048,\"tie_word_embeddings\":false,\"topk_group\":1,"
                "\"use_grouped_mm\":true,\"vocab_size\":200192}");
    assert_shape(2048, 32, 4, 128, 131072);
    assert_float_equal(c.embed_scale, 45.254834, 1e-5);
    assert_float_equal(c.experts.factor, 2.826, 1e-6);
    assert_int_equal(c.experts.shared_intermediate, 1024);
    assert_true(!c.experts.layer[1] && c.experts.layer[2] && c.experts.normalised);
    assert_true(c.windowed[2] && !c.windowed[3] && c.unrotated[3] && !c.unrotated[2]);
    assert_true(c.qk_norm && c.gated_attention && c.experts.choice_bias);
}

#define AFMOE OF("AfmoeForCausalLM") ",\"num_experts\":8,\"num_experts_per_tok\":2"
static void lies_about_trinity_are_refused(void **state)
{
    (void)state;
    refuse(AFMOE ",\"score_func\":\"softmax\"}", ERR_UNSUPPORTED, "'softmax'");
    refuse(AFMOE ",\"route_scale\":\"much\"}", ERR_INVALID, "route_scale must be a number");
    refuse(AFMOE ",\"mup_enabled\":1}", ERR_INVALID, "mup_enabled must be true or false");
    refuse(AFMOE ",\"layer_types\":[\"full_attention\"]}", ERR_INVALID, "has 1 entries");
    refuse(OF("AfmoeForCausalLM") "}", ERR_INVALID, "num_experts");
}

static void flex_olmo_7x7b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"FlexOlmoForCausalLM\"],\"attention_bias\":false,"
        "\"eos_token_id\":100257,\"hidden_act\":\"silu\",\"hidden_size\":4096,"
        "\"intermediate_size\":11008,\"max_position_embeddings\":4096,"
        "\"model_type\":\"flex_olmo\",\"norm_topk_prob\":false,\"num_attention_heads\":32,"
        "\"num_experts\":7,\"num_experts_per_tok\":5,\"num_hidden_layers\":32,"
        "\"num_key_value_heads\":32,\"rms_norm_eps\":1e-06,\"rope_theta\":500000,"
        "\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\",\"vocab_size\":100352}");
    assert_shape(4096, 32, 32, 128, 4096);
    assert_int_equal(c.experts.intermediate, 11008);
    assert_true(c.wide_qk_norm && !c.experts.normalised && c.experts.layer[0]);
}

#define SWA OF("GraniteSWAForCausalLM")
static void granite_rotates_by_a_theta_of_each_layer(void **state)
{
    (void)state;
    read_config(SWA ",\"layer_rope_theta\":[0,10000,10000.0,10000],\"rope_parameters\":"
                    "{\"rope_theta\":500000.0,\"rope_type\":\"default\"}}");
    assert_true(!c.windowed[0] && c.windowed[1] && c.windowed[3] && c.tied);
    assert_int_equal(c.sliding_window, 128);
    assert_true(c.unrotated[0] && !c.unrotated[1]);
    assert_float_equal(c.rope.theta, 10000, 0);
    assert_float_equal(c.window_theta, 0, 0);
    read_config(SWA ",\"layer_rope_theta\":[20000,500,500,0]}");
    assert_true(!c.unrotated[0] && !c.unrotated[2] && c.unrotated[3]);
    assert_float_equal(c.rope.theta, 20000, 0);
    assert_float_equal(c.window_theta, 500, 0);
    read_config(SWA ",\"layer_rope_theta\":null}");
    assert_float_equal(c.rope.theta, 10000, 0);
    refuse(SWA ",\"layer_rope_theta\":[1,2]}", ERR_INVALID, "layer_rope_theta has 2 entries");
    refuse(SWA ",\"layer_rope_theta\":7}", ERR_INVALID, "layer_rope_theta must be a list");
    refuse(SWA ",\"layer_rope_theta\":[\"a\"]}", ERR_INVALID, "must be a list of numbers");
    refuse(SWA ",\"layer_rope_theta\":[0.5,1,1,1]}", ERR_INVALID, "has 0.5, allowed are 0");
    refuse(SWA ",\"layer_rope_theta\":[1,2,3,2]}", ERR_UNSUPPORTED, "differs between layers");
    refuse(SWA ",\"layer_rope_theta\":[1,2,2,2],\"rope_scaling\":{\"rope_type\":\"linear\","
               "\"factor\":2.0}}",
           ERR_UNSUPPORTED, "with two bases and a scaling");
}

static void apertus_8b(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"ApertusForCausalLM\"],\"attention_bias\":false,"
                "\"attention_dropout\":0.0,\"bos_token_id\":1,\"eos_token_id\":68,"
                "\"hidden_act\":\"xielu\",\"hidden_dropout\":0.0,\"hidden_size\":4096,"
                "\"intermediate_size\":21504,\"max_position_embeddings\":65536,\"mlp_bias\":false,"
                "\"model_type\":\"apertus\",\"num_attention_heads\":32,\"num_hidden_layers\":32,"
                "\"num_key_value_heads\":8,\"post_norm\":false,\"qk_norm\":true,"
                "\"rms_norm_eps\":1e-05,\"rope_scaling\":{\"factor\":8.0,\"high_freq_factor\":4.0,"
                "\"low_freq_factor\":1.0,\"original_max_position_embeddings\":8192,"
                "\"rope_type\":\"llama3\"},\"rope_theta\":12000000,\"tie_word_embeddings\":false,"
                "\"torch_dtype\":\"bfloat16\",\"vocab_size\":131072}");
    assert_shape(4096, 32, 8, 128, 65536);
    assert_true(c.qk_norm && c.ungated_mlp && c.xielu && !c.tied);
    assert_int_equal(c.rope.kind, ROPE_LLAMA3);
    refuse(OF("ApertusForCausalLM") ",\"hidden_act\":\"silu\"}", ERR_UNSUPPORTED,
           "hidden_act is 'silu', allowed is xielu");
    refuse(OF("LlamaForCausalLM") ",\"hidden_act\":\"xielu\"}", ERR_UNSUPPORTED,
           "hidden_act is 'xielu'");
}

static void llama_4_maverick(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"Llama4ForConditionalGeneration\"],\"boi_token_index\":200080,"
        "\"image_token_index\":200092,\"model_type\":\"llama4\",\"text_config\":{"
        "\"attention_bias\":false,\"attention_chunk_size\":8192,\"attn_scale\":0.1,"
        "\"attn_temperature_tuning\":4,\"bos_token_id\":200000,\"eos_token_id\":[200001,"
        "200007,200008],\"floor_scale\":8192,\"for_llm_compressor\":false,\"head_dim\":128,"
        "\"hidden_act\":\"silu\",\"hidden_size\":5120,\"interleave_moe_layer_step\":2,"
        "\"intermediate_size\":8192,\"intermediate_size_mlp\":16384,"
        "\"max_position_embeddings\":1048576,\"model_type\":\"llama4_text\","
        "\"no_rope_layers\":[],\"num_attention_heads\":40,\"num_experts_per_tok\":1,"
        "\"num_hidden_layers\":48,\"num_key_value_heads\":8,\"num_local_experts\":128,"
        "\"rms_norm_eps\":1e-05,\"rope_scaling\":null,\"rope_theta\":500000.0,"
        "\"router_jitter_noise\":0.0,\"use_qk_norm\":false,\"vocab_size\":202048},"
        "\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\","
        "\"vision_config\":{\"hidden_size\":1408}}");
    assert_shape(5120, 40, 8, 128, LIMIT_MODEL_LEN);
    assert_true(c.chunked && c.windowed[0] && c.windowed[2] && !c.windowed[3] && c.unrotated[3]);
    assert_int_equal(c.sliding_window, 8192);
    assert_int_equal(c.unrotated_span, 8192);
    assert_float_equal(c.unrotated_beta, 0.1, 0);
    assert_true(!c.experts.layer[0] && c.experts.layer[1] && c.experts.scaled_inputs);
    assert_int_equal(c.intermediate, 16384);
    assert_int_equal(c.experts.intermediate, 8192);
    assert_int_equal(c.experts.shared_intermediate, 8192);
    assert_true(!c.plain_qk_norm && c.rope_interleaved && c.wrapped && !c.tied);
}

#define LLAMA4 OF("Llama4ForCausalLM") ",\"num_local_experts\":4,\"num_experts_per_tok\":1"
static void lists_of_llama_4_count_and_lies_are_refused(void **state)
{
    (void)state;
    read_config(LLAMA4 ",\"moe_layers\":[2],\"no_rope_layers\":[1,0,1,1],"
                       "\"attn_temperature_tuning\":false,\"attention_chunk_size\":32}");
    assert_true(!c.experts.layer[1] && c.experts.layer[2] && c.unrotated[1] && !c.unrotated[3]);
    assert_true(c.windowed[0] && !c.windowed[1] && c.plain_qk_norm);
    assert_int_equal(c.sliding_window, 32);
    assert_float_equal(c.unrotated_beta, 0, 0);
    assert_int_equal(c.intermediate, 192);
    read_config(LLAMA4 ",\"attention_chunk_size\":null}");
    assert_false(c.chunked || c.windowed[0]);
    refuse(LLAMA4 ",\"moe_layers\":[4]}", ERR_INVALID, "moe_layers names layer 4");
    refuse(LLAMA4 ",\"moe_layers\":2}", ERR_INVALID, "moe_layers must be a list");
    refuse(LLAMA4 ",\"no_rope_layers\":[1]}", ERR_INVALID, "no_rope_layers has 1 entries");
    refuse(LLAMA4 ",\"attention_chunk_size\":0}", ERR_INVALID, "attention_chunk_size is 0");
    refuse(LLAMA4 ",\"floor_scale\":0}", ERR_INVALID, "floor_scale is 0");
    refuse(LLAMA4 ",\"attn_scale\":-1}", ERR_INVALID, "attn_scale is -1");
    refuse(LLAMA4 ",\"attn_temperature_tuning\":\"on\"}", ERR_INVALID,
           "attn_temperature_tuning must be true or false");
    refuse(LLAMA4 ",\"layer_types\":[\"sliding_attention\",\"chunked_attention\","
                  "\"chunked_attention\",\"full_attention\"]}",
           ERR_UNSUPPORTED, "has no sliding_attention");
    refuse(OF("LlamaForCausalLM") ",\"layer_types\":[\"chunked_attention\"]}", ERR_INVALID,
           "layer_types has 1 entries");
    refuse(OF("Qwen3ForCausalLM") ",\"layer_types\":[\"chunked_attention\",\"full_attention\","
                                  "\"full_attention\",\"full_attention\"]}",
           ERR_UNSUPPORTED, "has no chunked_attention");
    refuse(OF("Llama4ForCausalLM") ",\"num_local_experts\":4,\"num_experts_per_tok\":2}",
           ERR_UNSUPPORTED, "num_experts_per_tok is 2");
}

static void groups_and_rotations_that_are_not_computed_are_refused(void **state)
{
    (void)state;
    refuse(OF("Mistral4ForCausalLM") ",\"kv_lora_rank\":12,\"qk_rope_head_dim\":8,"
                                     "\"qk_nope_head_dim\":10,\"v_head_dim\":14,"
                                     "\"num_experts\":8,\"num_experts_per_tok\":2,\"n_group\":2,"
                                     "\"topk_group\":1}",
           ERR_UNSUPPORTED, "n_group 2 is not supported");
    refuse(OF("Gemma3ForCausalLM") ",\"use_bidirectional_attention\":true}", ERR_UNSUPPORTED,
           "use_bidirectional_attention 'all' or true");
    read_config(OF("Gemma3ForCausalLM") ",\"use_bidirectional_attention\":false}");
    refuse(OF("Gemma4ForCausalLM") ",\"head_dim\":16,\"rope_parameters\":{\"full_attention\":"
                                   "{\"rope_type\":\"default\",\"rope_theta\":1e6}},"
                                   "\"layer_types\":[\"sliding_attention\",\"full_attention\","
                                   "\"sliding_attention\",\"full_attention\"]}",
           ERR_UNSUPPORTED, "rope_type 'default' of full_attention is not supported");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trinity_mini),
        cmocka_unit_test(lies_about_trinity_are_refused),
        cmocka_unit_test(flex_olmo_7x7b),
        cmocka_unit_test(granite_rotates_by_a_theta_of_each_layer),
        cmocka_unit_test(apertus_8b),
        cmocka_unit_test(llama_4_maverick),
        cmocka_unit_test(groups_and_rotations_that_are_not_computed_are_refused),
        cmocka_unit_test(lists_of_llama_4_count_and_lies_are_refused),
    };

    return cmocka_run_group_tests_name("hfconfig_latest", tests, NULL, NULL);
}
