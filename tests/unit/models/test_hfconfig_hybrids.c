/* Configurations of Nemotron-H and Falcon-H1 in the form of published models, what each
 * must give, and those that are refused. */
#include <math.h>

#include "tests/unit/models/config_text.h"

static void refuse(const char *text, int code, const char *words)
{
    struct generation_defaults gen;
    struct err e = {0};
    bool dtype_given;
    int rc = model_config_parse(&c, &gen, &dtype_given, text, strlen(text), NULL, 0, &e);

    if (rc != code || !strstr(e.text, words)) {
        fail_msg("code %d, text '%s', expected '%s'", rc, e.text, words);
    }
}

#define NEMOTRON                                                                                \
    "\"architectures\":[\"NemotronHForCausalLM\"],\"attention_bias\":false,"                    \
    "\"bos_token_id\":1,\"chunk_size\":128,\"conv_kernel\":4,\"eos_token_id\":2,\"expand\":2,"  \
    "\"hidden_size\":2688,\"intermediate_size\":1856,\"layer_norm_epsilon\":1e-05,"             \
    "\"mamba_head_dim\":64,\"mamba_hidden_act\":\"silu\",\"mamba_num_heads\":64,"               \
    "\"mamba_proj_bias\":false,\"max_position_embeddings\":262144,\"mlp_bias\":false,"          \
    "\"n_groups\":8,\"norm_eps\":1e-05,\"num_attention_heads\":32,"                             \
    "\"num_key_value_heads\":2,\"head_dim\":128,\"ssm_state_size\":128,"                        \
    "\"tie_word_embeddings\":false,\"time_step_limit\":[0.0,Infinity],\"time_step_min\":0.001," \
    "\"torch_dtype\":\"bfloat16\",\"use_bias\":false,\"use_conv_bias\":true,"                   \
    "\"vocab_size\":131072"
#define NEMOTRON_EXPERTS                                                                     \
    ",\"moe_intermediate_size\":1856,\"moe_shared_expert_intermediate_size\":3712,"          \
    "\"n_group\":1,\"n_routed_experts\":128,\"n_shared_experts\":1,\"norm_topk_prob\":true," \
    "\"num_experts_per_tok\":6,\"routed_scaling_factor\":2.5,\"topk_group\":1"

static void nemotron_3_nano(void **state)
{
    (void)state;
    read_config("{" NEMOTRON NEMOTRON_EXPERTS ",\"mlp_hidden_act\":\"relu2\","
                "\"hybrid_override_pattern\":\"MEM*-E\",\"num_hidden_layers\":6}");
    assert_shape(2688, 32, 2, 128, 262144);
    assert_int_equal(c.n_layers, 6);
    assert_true(c.recurrent.layer[0] && !c.recurrent.layer[1] && c.recurrent.layer[2]);
    assert_true(c.mlp_alone[1] && !c.mlp_alone[3] && c.mlp_alone[4] && c.mlp_alone[5]);
    assert_true(model_attends(&c, 3) && !model_attends(&c, 0) && !model_attends(&c, 4));
    assert_true(c.experts.layer[1] && !c.experts.layer[4] && c.experts.layer[5]);
    assert_true(c.experts.scores == SCORES_SIGMOID && c.experts.choice_bias);
    assert_true(c.experts.self_gated && c.experts.latent == 0 && c.rope.rot_dim == 0);
    assert_int_equal(c.experts.shared_intermediate, 3712);
    assert_int_equal(c.recurrent.value_dim, 64);
    assert_float_equal(c.recurrent.dt_min, 0, 0);
    assert_float_equal(c.experts.factor, 2.5, 0);
    /* without experts, and as transformers 5 writes the layers */
    read_config("{" NEMOTRON ",\"n_routed_experts\":8,\"num_experts_per_tok\":2,"
                "\"layers_block_type\":[\"linear_attention\",\"mlp\",\"full_attention\"]}");
    assert_true(c.n_layers == 3 && c.experts.n == 0 && c.mlp_alone[1] && model_attends(&c, 2));
}

/* Blocks have a size on a stage of MLPs alone as well, and layers a place. */
static void a_stage_of_mlps_alone_has_blocks(void **state)
{
    (void)state;
    struct kv_layout layout[LIMIT_KV_GROUPS];
    struct model_kv_groups groups;
    int32_t group, index;

    read_config("{" NEMOTRON ",\"hybrid_override_pattern\":\"M*-M--\"}");
    for (int32_t n = 1; n <= c.n_layers; n++) {
        for (int32_t stage = 0; stage < n; stage++) {
            struct model_options o = {.n_stages = n, .stage = stage};
            int32_t first = model_first_layer(&c, stage, n);
            model_kv_groups(&groups, &c, &o);
            model_kv_layouts(layout, &c, &o, 16, DTYPE_BF16);
            assert_true(groups.n >= 2 && groups.n_layers >= 1);
            for (int32_t i = 0; i < groups.n; i++) {
                assert_true(kv_layout_block_bytes(&layout[i]) > 0);
            }
            for (int32_t i = first; i < model_first_layer(&c, stage + 1, n); i++) {
                model_kv_place(&groups, &c, first, i, c.recurrent.layer[i], &group, &index);
                assert_true(c.mlp_alone[i] || (group < groups.n && index < groups.n_layers));
            }
        }
    }
}

static void nemotrons_that_cannot_be_are_refused(void **state)
{
    (void)state;
    refuse("{" NEMOTRON ",\"num_hidden_layers\":3}", ERR_INVALID, "hybrid_override_pattern");
    refuse("{" NEMOTRON ",\"hybrid_override_pattern\":\"M-X\"}", ERR_INVALID,
           "'X' is none of M, *, - and E");
    refuse("{" NEMOTRON ",\"hybrid_override_pattern\":[\"M\"]}", ERR_INVALID,
           "hybrid_override_pattern must be a string");
    refuse("{" NEMOTRON ",\"hybrid_override_pattern\":\"M-\",\"num_hidden_layers\":3}", ERR_INVALID,
           "layer_types has 2 entries for num_hidden_layers 3");
    refuse("{" NEMOTRON ",\"hybrid_override_pattern\":\"ME*\"}", ERR_INVALID,
           "n_routed_experts is missing");
    refuse("{" NEMOTRON ",\"hybrid_override_pattern\":\"M-*\",\"mlp_hidden_act\":\"silu\"}",
           ERR_UNSUPPORTED, "mlp_hidden_act is 'silu'");
    refuse("{" NEMOTRON ",\"hybrid_override_pattern\":\"M-*\",\"mamba_hidden_act\":\"gelu\"}",
           ERR_UNSUPPORTED, "mamba_hidden_act is 'gelu', allowed in recurrent layers is silu");
    refuse("{" NEMOTRON ",\"hybrid_override_pattern\":\"M-*\",\"mamba_proj_bias\":true}",
           ERR_UNSUPPORTED, "biases of linear layers");
    refuse("{\"architectures\":[\"Qwen2ForCausalLM\"],\"hidden_size\":64,"
           "\"num_attention_heads\":4,\"vocab_size\":9,\"max_position_embeddings\":8,"
           "\"num_hidden_layers\":1,\"layer_types\":[\"mlp\"]}",
           ERR_INVALID, "layer 0 is an MLP alone; Qwen2ForCausalLM has no such layers");
}

#define FALCON                                                                            \
    "\"architectures\":[\"FalconH1ForCausalLM\"],\"attention_bias\":false,"               \
    "\"attention_in_multiplier\":1.0,\"attention_out_multiplier\":0.9375,"                \
    "\"bos_token_id\":1,\"embedding_multiplier\":5.656854249492381,\"eos_token_id\":11,"  \
    "\"head_dim\":64,\"hidden_act\":\"silu\",\"hidden_size\":1024,"                       \
    "\"intermediate_size\":2048,\"key_multiplier\":0.390625,"                             \
    "\"lm_head_multiplier\":0.0390625,\"mamba_d_conv\":4,\"mamba_d_head\":64,"            \
    "\"mamba_d_ssm\":1536,\"mamba_d_state\":128,\"mamba_expand\":2,\"mamba_n_groups\":1," \
    "\"mamba_n_heads\":24,\"mamba_norm_before_gate\":false,\"mamba_rms_norm\":false,"     \
    "\"max_position_embeddings\":16384,\"num_attention_heads\":8,"                        \
    "\"num_hidden_layers\":36,\"num_key_value_heads\":2,\"projectors_bias\":false,"       \
    "\"rms_norm_eps\":1e-05,\"rope_theta\":100000000000.0,\"ssm_in_multiplier\":1.25,"    \
    "\"ssm_out_multiplier\":0.23570226039551587,\"tie_word_embeddings\":false,"           \
    "\"time_step_limit\":[0.0,Infinity],\"torch_dtype\":\"bfloat16\",\"vocab_size\":32784"

static void falcon_h1_half_a_billion(void **state)
{
    (void)state;
    read_config("{" FALCON ",\"mlp_multipliers\":[0.8838834764831845,0.5859375],"
                "\"ssm_multipliers\":[0.35,0.25,0.16,0.5,0.3]}");
    assert_shape(1024, 8, 2, 64, 16384);
    assert_true(c.recurrent.beside && c.recurrent.layer[35] && model_attends(&c, 35));
    assert_true(!c.recurrent.normed && c.recurrent.gate_first);
    assert_int_equal(c.recurrent.value_dim, 64);
    assert_float_equal(c.factor[FACTOR_Z], 1.25 * 0.35, 1e-6);
    assert_float_equal(c.factor[FACTOR_STEP], 1.25 * 0.3, 1e-6);
    assert_float_equal(c.factor[FACTOR_ATTENTION], 0.9375, 0);
    assert_float_equal(c.factor[FACTOR_DOWN], 0.5859375, 0);
    assert_float_equal(1 / sqrtf(c.query_scalar), 0.390625 / 8, 1e-6);
    assert_float_equal(c.logit_scale, 0.0390625, 0);
    refuse("{" FALCON ",\"mlp_multipliers\":[1]}", ERR_INVALID, "mlp_multipliers has 1 numbers");
    refuse("{" FALCON ",\"mlp_multipliers\":[1,2,3]}", ERR_INVALID, "more than 2 numbers");
    refuse("{" FALCON ",\"ssm_multipliers\":[1,1,1,1,0]}", ERR_INVALID, "is not from");
    refuse("{" FALCON ",\"ssm_multipliers\":\"x\"}", ERR_INVALID, "must be a list of numbers");
    refuse("{" FALCON ",\"mamba_proj_bias\":true}", ERR_UNSUPPORTED, "biases of linear layers");
    refuse("{" FALCON ",\"activation_function\":\"gelu\"}", ERR_UNSUPPORTED,
           "hidden_act is 'gelu', allowed in recurrent layers is silu");
}

#define JAMBA                                                                           \
    "\"architectures\":[\"JambaForCausalLM\"],\"bos_token_id\":1,\"eos_token_id\":519," \
    "\"hidden_act\":\"silu\",\"hidden_size\":4096,\"intermediate_size\":14336,"         \
    "\"mamba_conv_bias\":true,\"mamba_d_conv\":4,\"mamba_d_state\":16,"                 \
    "\"mamba_dt_rank\":256,\"mamba_expand\":2,\"mamba_proj_bias\":false,"               \
    "\"max_position_embeddings\":262144,\"model_type\":\"jamba\","                      \
    "\"num_attention_heads\":32,\"num_experts_per_tok\":2,\"num_key_value_heads\":8,"   \
    "\"rms_norm_eps\":1e-06,\"torch_dtype\":\"bfloat16\",\"vocab_size\":65536"

static void jamba_1_5_mini(void **state)
{
    (void)state;
    read_config("{" JAMBA ",\"num_hidden_layers\":32,\"num_experts\":16,\"attn_layer_offset\":4,"
                "\"attn_layer_period\":8,\"expert_layer_offset\":1,\"expert_layer_period\":2}");
    assert_shape(4096, 32, 8, 128, 262144);
    assert_int_equal(c.recurrent.kind, RECURRENCE_SCAN);
    assert_int_equal(c.recurrent.value_dim, 256);
    assert_int_equal(c.recurrent.key_dim, 16);
    assert_int_equal(c.recurrent.step_rank, 256);
    assert_true(c.recurrent.layer[0] && !c.recurrent.layer[4] && model_attends(&c, 28));
    assert_true(!c.experts.layer[0] && c.experts.layer[1] && c.experts.layer[31]);
    assert_true(c.experts.intermediate == 14336 && !c.experts.normalised);
    assert_true(c.rope.rot_dim == 0 && c.recurrent.conv_bias);
    /* without experts, and the width of the steps' input left to the reader */
    read_config("{" JAMBA
                ",\"num_hidden_layers\":14,\"num_experts\":1,\"mamba_dt_rank\":\"auto\"}");
    assert_true(c.experts.n == 0 && !c.experts.layer[1]);
    refuse("{" JAMBA ",\"num_hidden_layers\":8,\"mamba_proj_bias\":true}", ERR_UNSUPPORTED,
           "mamba_proj_bias true is not supported");
    refuse("{" JAMBA ",\"num_hidden_layers\":8,\"mamba_expand\":5}", ERR_INVALID,
           "20480 channels of the recurrent layers");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nemotron_3_nano),
        cmocka_unit_test(a_stage_of_mlps_alone_has_blocks),
        cmocka_unit_test(nemotrons_that_cannot_be_are_refused),
        cmocka_unit_test(falcon_h1_half_a_billion),
        cmocka_unit_test(jamba_1_5_mini),
    };

    return cmocka_run_group_tests_name("hfconfig_hybrids", tests, NULL, NULL);
}
