/* Members that config.json leaves out are those that transformers has by default. */
#include "models/checkpoint/hfconfig_internal.h"
#include "tests/unit/models/config_text.h"

#define SIZES                                                                                     \
    "\"hidden_size\":64,\"intermediate_size\":96,\"num_attention_heads\":4,"                      \
    "\"num_key_value_heads\":2,\"num_hidden_layers\":8,\"vocab_size\":100,\"dtype\":\"float32\"," \
    "\"max_position_embeddings\":512"
#define OF(name) "{\"architectures\":[\"" name "\"]," SIZES
#define EXPERTS ",\"num_experts\":16,\"num_experts_per_tok\":2"
#define LATENT \
    ",\"kv_lora_rank\":12,\"qk_rope_head_dim\":8,\"qk_nope_head_dim\":10,\"v_head_dim\":14"

/* Its text_config has no heads, no vocabulary and no longest context. */
static void gemma_3_4b(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"Gemma3ForConditionalGeneration\"],"
                "\"boi_token_index\":255999,\"eoi_token_index\":256000,\"eos_token_id\":[1,106],"
                "\"image_token_index\":262144,\"initializer_range\":0.02,"
                "\"mm_tokens_per_image\":256,\"model_type\":\"gemma3\",\"text_config\":{"
                "\"hidden_size\":2560,\"intermediate_size\":10240,\"model_type\":\"gemma3_text\","
                "\"num_hidden_layers\":34,\"rope_scaling\":{\"factor\":8.0,\"rope_type\":"
                "\"linear\"},\"sliding_window\":1024},\"torch_dtype\":\"bfloat16\","
                "\"vision_config\":{\"hidden_size\":1152}}");
    assert_shape(2560, 8, 4, 256, 131072); /* the scaled context */
    assert_int_equal(c.vocab, 262208);
    assert_float_equal(c.query_scalar, 256, 0);
    assert_int_equal(c.sliding_window, 1024);
    assert_true(c.windowed[4] && !c.windowed[5] && c.tied && c.wrapped);
    assert_float_equal(c.rope.theta, 1e6, 0);
    assert_float_equal(c.window_theta, 10000, 0);
    assert_float_equal(c.rope.factor, 8, 0);
}

static void gemma_has_caps_but_for_null(void **state)
{
    (void)state;
    read_config(OF("Gemma2ForCausalLM") ",\"attn_logit_softcapping\":null}");
    assert_float_equal(c.attn_softcap, 0, 0);
    assert_float_equal(c.final_softcap, 30, 0);
    assert_float_equal(c.query_scalar, 256, 0);
    assert_int_equal(c.head_dim, 256);
    read_config(OF("VaultGemmaForCausalLM") ",\"final_logit_softcapping\":null,\"head_dim\":16,"
                                            "\"query_pre_attn_scalar\":24}");
    assert_float_equal(c.attn_softcap, 50, 0);
    assert_float_equal(c.final_softcap, 0, 0);
    assert_float_equal(c.query_scalar, 24, 0);
    read_config(OF("Gemma3ForCausalLM") "}");
    assert_float_equal(c.attn_softcap, 0, 0);
    assert_float_equal(c.query_scalar, 256, 0);
}

static void experts_have_their_factors(void **state)
{
    (void)state;
    read_config(OF("DeepseekV3ForCausalLM") EXPERTS LATENT "}");
    assert_float_equal(c.experts.factor, 2.5, 1e-6);
    assert_int_equal(c.experts.n_groups, 8);
    assert_int_equal(c.experts.top_groups, 4);
    read_config(OF("DeepseekV3ForCausalLM") EXPERTS LATENT
                ",\"routed_scaling_factor\":1,\"n_group\":1,\"topk_group\":1}");
    assert_float_equal(c.experts.factor, 1, 0);
    assert_int_equal(c.experts.n_groups, 1);
    read_config(OF("Glm4MoeLiteForCausalLM") EXPERTS LATENT "}");
    assert_float_equal(c.experts.factor, 1.8, 1e-6);
    read_config(OF("ExaoneMoeForCausalLM") EXPERTS "}");
    assert_float_equal(c.experts.factor, 2.5, 1e-6);
    assert_float_equal(c.rope.theta, 10000, 0);
    read_config(OF("HYV3ForCausalLM") EXPERTS "}");
    assert_float_equal(c.experts.factor, 2.826, 1e-6);
    assert_float_equal(c.rope.theta, 11158840, 0);
    read_config(OF("DeepseekV2ForCausalLM") EXPERTS LATENT "}");
    assert_float_equal(c.experts.factor, 1, 0);
}

static void granite_multiplies_scores_by_one(void **state)
{
    static const char *const texts[] = {
        OF("GraniteForCausalLM") "}", OF("GraniteMoeForCausalLM") EXPERTS "}",
        OF("GraniteMoeSharedForCausalLM") EXPERTS "}", OF("GraniteSWAForCausalLM") "}"};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
        read_config(texts[i]);
        assert_float_equal(c.query_scalar, 1, 0);
    }
    read_config(OF("GraniteForCausalLM") ",\"attention_multiplier\":0.25}");
    assert_float_equal(c.query_scalar, 16, 1e-6);
}

static void rotations_are_scaled(void **state)
{
    (void)state;
    read_config(OF("GptOssForCausalLM") EXPERTS ",\"rope_scaling\":null}");
    assert_int_equal(c.rope.kind, ROPE_YARN);
    assert_true(!c.rope.truncate && c.rope.factor == 32 && c.rope.theta == 150000);
    assert_int_equal(c.rope.original_positions, 4096);
    read_config(OF("GptOssForCausalLM") EXPERTS
                ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":2.0},\"rope_theta\":500}");
    assert_true(c.rope.truncate && c.rope.factor == 2 && c.rope.theta == 500);
    read_config(OF("GptOssForCausalLM") EXPERTS ",\"rope_theta\":500}");
    assert_true(c.rope.kind == ROPE_YARN && c.rope.theta == 500);
    read_config(OF("ApertusForCausalLM") "}");
    assert_true(c.rope.kind == ROPE_LLAMA3 && c.rope.factor == 8 && c.rope.theta == 12e6);
    read_config(OF("CwmForCausalLM") "}");
    assert_true(c.rope.kind == ROPE_LLAMA3 && c.rope.factor == 16);
    assert_true(!c.windowed[0] && c.windowed[1] && c.windowed[3] && !c.windowed[4]);
    read_config(OF("Gemma4ForCausalLM") "}");
    assert_true(c.rope.kind == ROPE_PROPORTIONAL && c.rope.theta == 1e6 && c.rope.share == 0.25);
    assert_float_equal(c.window_theta, 10000, 0);
    read_config(OF("Mistral4ForCausalLM") EXPERTS LATENT "}");
    assert_true(c.rope.kind == ROPE_YARN && c.rope.factor == 128 && c.rope.mscale == 1);
}

static void mellum_has_windows_where_they_are_listed(void **state)
{
    (void)state;
    read_config(OF("MellumForCausalLM") EXPERTS ",\"sliding_window\":8}");
    assert_int_equal(c.sliding_window, 0);
    assert_false(c.windowed[0] || c.windowed[7]);
}

/* What llama.cpp has by default is another matter. */
static void gguf_files_leave_out_other_things(void **state)
{
    (void)state;
    read_config(OF("DeepseekV3ForCausalLM") EXPERTS LATENT ",\"model_type\":\"" RAW_TYPE_GGUF
                                                           "\"}");
    assert_float_equal(c.experts.factor, 1, 0);
    read_config(OF("GraniteForCausalLM") ",\"model_type\":\"" RAW_TYPE_GGUF "\"}");
    assert_float_equal(c.query_scalar, 16, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gemma_3_4b),
        cmocka_unit_test(gemma_has_caps_but_for_null),
        cmocka_unit_test(experts_have_their_factors),
        cmocka_unit_test(granite_multiplies_scores_by_one),
        cmocka_unit_test(rotations_are_scaled),
        cmocka_unit_test(mellum_has_windows_where_they_are_listed),
        cmocka_unit_test(gguf_files_leave_out_other_things),
    };

    return cmocka_run_group_tests_name("hfconfig_left_out", tests, NULL, NULL);
}
