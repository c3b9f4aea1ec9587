/* The config.json of well-known models on the hub, chosen for their peculiarities, and
 * the configuration that each must give. */
#include "tests/unit/models/config_text.h"

static void yi_6b(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"LlamaForCausalLM\"],\"attention_bias\":false,\"attention_"
                "dropout\":0.0,\"bos_token_id\":"
                "1,"
                "\"eos_token_id\":2,\"hidden_act\":\"silu\",\"hidden_size\":4096,\"initializer_"
                "range\":0.02,\"intermediate_"
                "size\":"
                "11008,\"max_position_embeddings\":4096,\"model_type\":\"llama\",\"num_attention_"
                "heads\":32,"
                "\"num_hidden_layers\":32,\"num_key_value_heads\":4,\"pad_token_id\":0,"
                "\"pretraining_tp\":1,\"rms_norm_eps\":"
                "1e-05,\"rope_scaling\":null,\"rope_theta\":5000000.0,\"tie_word_embeddings\":"
                "false,\"torch_dtype\":"
                "\"bfloat16\","
                "\"use_cache\":true,\"vocab_size\":64000}");
    assert_shape(4096, 32, 4, 128, 4096);
    assert_float_equal(c.rope.theta, 5e6, 0);
    assert_false(c.tied);
}

static void llama_3_2_1b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"LlamaForCausalLM\"],\"bos_token_id\":128000,\"eos_token_id\":["
        "128001,128008,128009],"
        "\"head_dim\":64,\"hidden_act\":\"silu\",\"hidden_size\":2048,\"intermediate_size\":8192,"
        "\"max_position_embeddings\":131072,\"mlp_bias\":false,\"num_attention_heads\":32,\"num_"
        "hidden_layers\":16,"
        "\"num_key_value_heads\":8,\"rms_norm_eps\":1e-05,\"rope_scaling\":{\"factor\":32.0,\"high_"
        "freq_factor\":4.0,"
        "\"low_freq_factor\":1.0,\"original_max_position_embeddings\":8192,\"rope_type\":"
        "\"llama3\"},\"rope_theta\":"
        "500000.0,\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\",\"vocab_size\":"
        "128256}");
    assert_shape(2048, 32, 8, 64, 131072);
    assert_int_equal(c.rope.kind, ROPE_LLAMA3);
    assert_int_equal(c.rope.original_positions, 8192);
    assert_float_equal(c.rope.factor, 32, 0);
    assert_true(c.tied);
    assert_int_equal(c.n_eos, 3);
}

/* Heads narrower than hidden / heads, and a context of a million. */
static void mistral_nemo(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"MistralForCausalLM\"],\"bos_token_id\":1,\"eos_token_id\":2,"
                "\"head_dim\":128,"
                "\"hidden_act\":\"silu\",\"hidden_size\":5120,\"intermediate_size\":14336,\"max_"
                "position_embeddings\":"
                "1024000,\"num_attention_heads\":32,\"num_hidden_layers\":40,\"num_key_value_"
                "heads\":8,\"rms_norm_eps\":"
                "1e-05,\"rope_theta\":1000000.0,\"sliding_window\":null,\"tie_word_embeddings\":"
                "false,\"torch_dtype\":"
                "\"bfloat16\",\"vocab_size\":131072}");
    assert_shape(5120, 32, 8, 128, 1024000);
    assert_int_equal(c.sliding_window, 0);
    assert_false(c.windowed[0]);
}

static void mistral_7b_v0_1(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"MistralForCausalLM\"],\"bos_token_id\":1,\"eos_token_id\":2,"
                "\"hidden_act\":"
                "\"silu\",\"hidden_size\":4096,\"intermediate_size\":14336,\"max_position_"
                "embeddings\":32768,"
                "\"num_attention_heads\":32,\"num_hidden_layers\":32,\"num_key_value_heads\":8,"
                "\"rms_norm_eps\":1e-05,"
                "\"rope_theta\":10000.0,\"sliding_window\":4096,\"tie_word_embeddings\":false,"
                "\"torch_dtype\":"
                "\"bfloat16\",\"vocab_size\":32000}");
    assert_shape(4096, 32, 8, 128, 32768);
    assert_int_equal(c.sliding_window, 4096);
    assert_true(c.windowed[0] && c.windowed[31]);
}

/* A window that is given but switched off; biases that the file does not mention. */
static void qwen2_5_7b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"Qwen2ForCausalLM\"],\"attention_dropout\":0.0,\"bos_token_id\":"
        "151643,"
        "\"eos_token_id\":151645,\"hidden_act\":\"silu\",\"hidden_size\":3584,\"intermediate_"
        "size\":18944,"
        "\"max_position_embeddings\":32768,\"max_window_layers\":28,\"model_type\":\"qwen2\","
        "\"num_attention_heads\":28,\"num_hidden_layers\":28,\"num_key_value_heads\":4,\"rms_norm_"
        "eps\":1e-06,"
        "\"rope_theta\":1000000.0,\"sliding_window\":131072,\"tie_word_embeddings\":false,\"torch_"
        "dtype\":"
        "\"bfloat16\",\"use_sliding_window\":false,\"vocab_size\":152064}");
    assert_shape(3584, 28, 4, 128, 32768);
    assert_int_equal(c.sliding_window, 0);
    assert_true(c.qkv_bias && !c.o_bias);
}

/* Norms after attention and MLP, an embedding of half the width, no final norm. */
static void opt_350m(void **state)
{
    (void)state;
    read_config("{\"_name_or_path\":\"opt-350m\",\"_remove_final_layer_norm\":false,\"activation_"
                "dropout\":0.0,"
                "\"activation_function\":\"relu\",\"architectures\":[\"OPTForCausalLM\"],\"bos_"
                "token_id\":2,"
                "\"do_layer_norm_before\":false,\"dropout\":0.1,\"eos_token_id\":2,\"ffn_dim\":"
                "4096,\"hidden_size\":1024,"
                "\"init_std\":0.02,\"layerdrop\":0.0,\"max_position_embeddings\":2048,\"model_"
                "type\":\"opt\","
                "\"num_attention_heads\":16,\"num_hidden_layers\":24,\"pad_token_id\":1,\"prefix\":"
                "\"</s>\","
                "\"torch_dtype\":\"float16\",\"use_cache\":true,\"vocab_size\":50272,\"word_embed_"
                "proj_dim\":512}");
    assert_shape(1024, 16, 16, 64, 2048);
    assert_int_equal(c.embed_dim, 512);
    assert_int_equal(c.intermediate, 4096);
    assert_false(c.norm_before || c.final_norm);
    assert_true(c.tied && c.qkv_bias && c.o_bias && c.mlp_bias);
    assert_int_equal(c.dtype, DTYPE_F16);
}

/* An odd window; heads of 96. */
static void phi_3_mini_4k(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"Phi3ForCausalLM\"],\"attention_bias\":false,\"auto_map\":{"
        "\"AutoConfig\":"
        "\"configuration_phi3.Phi3Config\"},\"bos_token_id\":1,\"embd_pdrop\":0.0,\"eos_token_id\":"
        "32000,"
        "\"hidden_act\":"
        "\"silu\",\"hidden_size\":3072,\"intermediate_size\":8192,\"max_position_embeddings\":4096,"
        "\"num_"
        "attention_heads\":"
        "32,\"num_hidden_layers\":32,\"num_key_value_heads\":32,\"original_max_position_"
        "embeddings\":4096,"
        "\"pad_token_id\":"
        "32000,\"resid_pdrop\":0.0,\"rms_norm_eps\":1e-05,\"rope_scaling\":null,\"rope_theta\":"
        "10000.0,"
        "\"sliding_window\":"
        "2047,\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\",\"vocab_size\":32064}");
    assert_shape(3072, 32, 32, 96, 4096);
    assert_int_equal(c.sliding_window, 2047);
    assert_int_equal(c.rope.kind, ROPE_DEFAULT);
}

/* Two keys for the activation, soft caps, attention scaled by another number than
 * head_dim, a window in every other layer. */
static void gemma_2_27b(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"Gemma2ForCausalLM\"],\"attention_bias\":false,\"attn_logit_"
                "softcapping\":50.0,"
                "\"bos_token_id\":2,\"cache_implementation\":\"hybrid\",\"eos_token_id\":1,\"final_"
                "logit_softcapping\":30.0,"
                "\"head_dim\":128,\"hidden_act\":\"gelu_pytorch_tanh\",\"hidden_activation\":"
                "\"gelu_pytorch_tanh\",\"hidden_"
                "size\":"
                "4608,\"intermediate_size\":36864,\"max_position_embeddings\":8192,\"num_attention_"
                "heads\":32,"
                "\"num_hidden_layers\":46,\"num_key_value_heads\":16,\"pad_token_id\":0,\"query_"
                "pre_attn_scalar\":144,"
                "\"rms_norm_eps\":1e-06,\"rope_theta\":10000.0,\"sliding_window\":4096,\"torch_"
                "dtype\":\"float32\","
                "\"use_cache\":true,\"vocab_size\":256000,\"_sliding_window_size\":4096}");
    assert_shape(4608, 32, 16, 128, 8192);
    assert_float_equal(c.query_scalar, 144, 0);
    assert_float_equal(c.attn_softcap, 50, 0);
    assert_float_equal(c.final_softcap, 30, 0);
    assert_true(c.windowed[0] && !c.windowed[1] && c.windowed[44] && !c.windowed[45]);
    assert_true(c.tied && c.act == ACT_GELU_TANH);
}

/* "gelu" that means the tanh approximation, and a null beside it. */
static void gemma_2b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"GemmaForCausalLM\"],\"attention_bias\":false,\"bos_token_id\":2,"
        "\"eos_token_id\":1,"
        "\"head_dim\":256,\"hidden_act\":\"gelu\",\"hidden_activation\":null,\"hidden_size\":2048,"
        "\"intermediate_size\":16384,\"max_position_embeddings\":8192,\"num_attention_heads\":8,"
        "\"num_hidden_layers\":18,\"num_key_value_heads\":1,\"pad_token_id\":0,\"rms_norm_eps\":1e-"
        "06,"
        "\"rope_scaling\":null,\"rope_theta\":10000.0,\"torch_dtype\":\"bfloat16\",\"vocab_size\":"
        "256000}");
    assert_shape(2048, 8, 1, 256, 8192);
    assert_int_equal(c.act, ACT_GELU_TANH);
    assert_float_equal(c.final_softcap, 0, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(yi_6b),           cmocka_unit_test(llama_3_2_1b),
        cmocka_unit_test(mistral_nemo),    cmocka_unit_test(gemma_2b),
        cmocka_unit_test(mistral_7b_v0_1), cmocka_unit_test(qwen2_5_7b),
        cmocka_unit_test(opt_350m),        cmocka_unit_test(phi_3_mini_4k),
        cmocka_unit_test(gemma_2_27b),
    };

    return cmocka_run_group_tests_name("hfconfig_real", tests, NULL, NULL);
}
