/* Configurations in the form of published models, and what each must give. */
#include "tests/unit/models/config_text.h"

/* The text model's values at the top level, and positions on three axes. */
static void qwen2_5_vl_7b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"Qwen2_5_VLForConditionalGeneration\"],\"attention_dropout\":0.0,"
        "\"bos_token_id\":151643,\"eos_token_id\":151645,\"vision_start_token_id\":151652,"
        "\"image_token_id\":151655,\"hidden_act\":\"silu\",\"hidden_size\":3584,"
        "\"intermediate_size\":18944,\"max_position_embeddings\":128000,\"max_window_layers\":28,"
        "\"model_type\":\"qwen2_5_vl\",\"num_attention_heads\":28,\"num_hidden_layers\":28,"
        "\"num_key_value_heads\":4,\"rms_norm_eps\":1e-06,\"rope_theta\":1000000.0,"
        "\"sliding_window\":32768,\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\","
        "\"use_sliding_window\":false,\"vision_config\":{\"depth\":32,\"hidden_size\":1280,"
        "\"num_heads\":16},\"rope_scaling\":{\"type\":\"mrope\",\"mrope_section\":[16,24,24]},"
        "\"vocab_size\":152064}");
    assert_shape(3584, 28, 4, 128, 128000);
    assert_int_equal(c.rope.kind, ROPE_DEFAULT);
    assert_true(c.qkv_bias && !c.o_bias && c.wrapped && !c.tied);
    assert_int_equal(c.sliding_window, 0);
}

static void qwen3_vl_8b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"Qwen3VLForConditionalGeneration\"],\"image_token_id\":151655,"
        "\"model_type\":\"qwen3_vl\",\"text_config\":{\"attention_bias\":false,"
        "\"bos_token_id\":151643,\"dtype\":\"bfloat16\",\"eos_token_id\":151645,\"head_dim\":128,"
        "\"hidden_act\":\"silu\",\"hidden_size\":4096,\"intermediate_size\":12288,"
        "\"max_position_embeddings\":262144,\"model_type\":\"qwen3_vl_text\","
        "\"num_attention_heads\":32,\"num_hidden_layers\":36,\"num_key_value_heads\":8,"
        "\"rms_norm_eps\":1e-06,\"rope_scaling\":{\"mrope_interleaved\":true,"
        "\"mrope_section\":[24,20,20],\"rope_type\":\"default\"},\"rope_theta\":5000000,"
        "\"vocab_size\":151936},\"tie_word_embeddings\":false,\"vision_config\":{\"depth\":27}}");
    assert_shape(4096, 32, 8, 128, 262144);
    assert_true(c.qk_norm && !c.qkv_bias && c.wrapped);
    assert_float_equal(c.rope.theta, 5e6, 0);
}

/* The text model is another architecture's; what text_config leaves out is LLaMA's. */
static void llava_1_5_7b(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"LlavaForConditionalGeneration\"],\"ignore_index\":-100,"
                "\"image_token_index\":32000,\"model_type\":\"llava\",\"pad_token_id\":32001,"
                "\"projector_hidden_act\":\"gelu\",\"text_config\":{\"_name_or_path\":"
                "\"lmsys/vicuna-7b-v1.5\",\"architectures\":[\"LlamaForCausalLM\"],"
                "\"max_position_embeddings\":4096,\"model_type\":\"llama\",\"rms_norm_eps\":1e-05,"
                "\"torch_dtype\":\"float16\",\"vocab_size\":32064},\"tie_word_embeddings\":false,"
                "\"torch_dtype\":\"float16\",\"vision_config\":{\"hidden_size\":1024,"
                "\"model_type\":\"clip_vision_model\",\"num_hidden_layers\":24}}");
    assert_shape(4096, 32, 32, 128, 4096);
    assert_string_equal(c.architecture, "LlamaForCausalLM");
    assert_int_equal(c.intermediate, 11008);
    assert_int_equal(c.vocab, 32064);
    assert_true(c.wrapped && !c.tied);
}

/* An object of another name, and a text model that calls itself otherwise. */
static void internvl3_1b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"InternVLChatModel\"],\"downsample_ratio\":0.5,\"llm_config\":{"
        "\"architectures\":[\"Qwen2ForCausalLM\"],\"bos_token_id\":151643,\"eos_token_id\":"
        "151643,\"hidden_act\":\"silu\",\"hidden_size\":896,\"intermediate_size\":4864,"
        "\"max_position_embeddings\":32768,\"max_window_layers\":70,\"model_type\":\"qwen2\","
        "\"num_attention_heads\":14,\"num_hidden_layers\":24,\"num_key_value_heads\":2,"
        "\"rms_norm_eps\":1e-06,\"rope_scaling\":{\"factor\":2.0,\"rope_type\":\"dynamic\","
        "\"type\":\"dynamic\"},\"rope_theta\":1000000.0,\"sliding_window\":null,"
        "\"tie_word_embeddings\":false,\"use_sliding_window\":false,\"vocab_size\":151674},"
        "\"model_type\":\"internvl_chat\",\"tie_word_embeddings\":false,\"torch_dtype\":"
        "\"bfloat16\",\"vision_config\":{\"hidden_size\":1024}}");
    assert_shape(896, 14, 2, 64, 65536);
    assert_string_equal(c.architecture, "Qwen2ForCausalLM");
    assert_true(c.wrapped && c.qkv_bias);
}

static void refuse_config(const char *text, const char *why)
{
    struct generation_defaults gen;
    struct err e = {0};
    bool dtype_given;

    assert_true(model_config_parse(&c, &gen, &dtype_given, text, strlen(text), NULL, 0, &e) < 0);
    if (!strstr(e.text, why)) {
        fail_msg("'%s' is not in: %s", why, e.text);
    }
}

static void wrappers_name_what_is_missing(void **state)
{
    (void)state;
    refuse_config("{\"architectures\":[\"LlavaForConditionalGeneration\"],\"hidden_size\":64}",
                  "text_config is missing, in which LlavaForConditionalGeneration");
    refuse_config("{\"architectures\":[\"LlavaForConditionalGeneration\"],\"text_config\":{"
                  "\"model_type\":\"opt\"}}",
                  "model_type of text_config is 'opt'");
    refuse_config("{\"architectures\":[\"SmolVLMForConditionalGeneration\"],\"text_config\":{"
                  "\"model_type\":\"qwen3\"}}",
                  "hidden_size is missing");
}

/* Every sixth layer has other heads, whose keys are its values. */
static void gemma_4_31b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"Gemma4ForConditionalGeneration\"],\"dtype\":\"bfloat16\","
        "\"eos_token_id\":[1,106],\"model_type\":\"gemma4\",\"text_config\":{"
        "\"attention_bias\":false,\"attention_k_eq_v\":true,\"bos_token_id\":2,"
        "\"enable_moe_block\":false,\"final_logit_softcapping\":30.0,\"global_head_dim\":512,"
        "\"head_dim\":256,\"hidden_activation\":\"gelu_pytorch_tanh\",\"hidden_size\":5376,"
        "\"hidden_size_per_layer_input\":0,\"intermediate_size\":21504,"
        "\"max_position_embeddings\":262144,\"model_type\":\"gemma4_text\",\"num_attention_heads\":"
        "32,"
        "\"num_experts\":null,\"num_global_key_value_heads\":4,\"num_hidden_layers\":60,"
        "\"num_key_value_heads\":16,\"num_kv_shared_layers\":0,\"rms_norm_eps\":1e-06,"
        "\"rope_parameters\":{\"full_attention\":{\"partial_rotary_factor\":0.25,"
        "\"rope_theta\":1000000.0,\"rope_type\":\"proportional\"},\"sliding_attention\":{"
        "\"rope_theta\":10000.0,\"rope_type\":\"default\"}},\"sliding_window\":1024,"
        "\"tie_word_embeddings\":true,\"top_k_experts\":null,\"use_bidirectional_attention\":"
        "\"vision\",\"use_double_wide_mlp\":false,\"vocab_size\":262144,"
        "\"vocab_size_per_layer_input\":262144},\"vision_config\":{\"hidden_size\":1152}}");
    assert_shape(5376, 32, 16, 256, 262144);
    assert_int_equal(c.full_head_dim, 512);
    assert_int_equal(c.full_kv_heads, 4);
    assert_true(c.keys_are_values && c.windowed[0] && !c.windowed[5] && c.sliding_window == 1024);
    assert_int_equal(c.rope.kind, ROPE_PROPORTIONAL);
    assert_float_equal(c.rope.share, 0.25, 0);
    assert_float_equal(c.window_theta, 10000, 0);
    assert_float_equal(c.query_scalar, 1, 0);
    assert_int_equal(c.experts.n, 0);
    assert_int_equal(c.layer_input, 0);
}

static void granite_4_h_tiny(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"GraniteMoeHybridForCausalLM\"],\"attention_bias\":false,"
        "\"attention_multiplier\":0.0078125,\"bos_token_id\":100257,\"embedding_multiplier\":12,"
        "\"eos_token_id\":100257,\"hidden_act\":\"silu\",\"hidden_size\":1536,"
        "\"intermediate_size\":512,\"layer_types\":[\"mamba\",\"mamba\",\"mamba\",\"mamba\","
        "\"mamba\","
        "\"attention\",\"mamba\",\"mamba\"],\"logits_scaling\":6,\"mamba_chunk_size\":256,"
        "\"mamba_conv_bias\":true,\"mamba_d_conv\":4,\"mamba_d_head\":64,\"mamba_d_state\":128,"
        "\"mamba_expand\":2,\"mamba_n_groups\":1,\"mamba_n_heads\":48,\"mamba_proj_bias\":false,"
        "\"max_position_embeddings\":131072,\"model_type\":\"granitemoehybrid\","
        "\"num_attention_heads\":12,\"num_experts_per_tok\":6,\"num_hidden_layers\":8,"
        "\"num_key_value_heads\":4,\"num_local_experts\":64,\"position_embedding_type\":\"nope\","
        "\"residual_multiplier\":0.22,\"rms_norm_eps\":1e-05,\"shared_intermediate_size\":1024,"
        "\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\",\"vocab_size\":100352}");
    assert_shape(1536, 12, 4, 128, 131072);
    assert_int_equal(c.experts.n, 64);
    assert_int_equal(c.experts.intermediate, 512);
    assert_int_equal(c.experts.shared_intermediate, 1024);
    assert_true(c.experts.normalised && c.recurrent.layer[0] && !c.recurrent.layer[5]);
    assert_true(c.unrotated[5]);
}

static void minimax_m2(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"MiniMaxM2ForCausalLM\"],\"attn_type_list\":[1,1],"
        "\"bos_token_id\":null,\"eos_token_id\":null,\"head_dim\":128,\"hidden_act\":\"silu\","
        "\"hidden_size\":3072,\"intermediate_size\":1536,\"max_position_embeddings\":196608,"
        "\"model_type\":\"minimax_m2\",\"torch_dtype\":\"bfloat16\",\"num_attention_heads\":48,"
        "\"num_experts_per_tok\":8,"
        "\"num_hidden_layers\":62,\"num_key_value_heads\":8,\"num_local_experts\":256,"
        "\"qk_norm_type\":\"per_layer\",\"rms_norm_eps\":1e-06,\"rope_theta\":5000000,"
        "\"rotary_dim\":64,\"scoring_func\":\"sigmoid\",\"tie_word_embeddings\":false,"
        "\"torch_dtype\":\"bfloat16\",\"use_qk_norm\":true,\"use_routing_bias\":true,"
        "\"vocab_size\":200064}");
    assert_shape(3072, 48, 8, 128, 196608);
    assert_int_equal(c.rope.rot_dim, 64);
    assert_true(c.wide_qk_norm && !c.qk_norm && c.experts.choice_bias);
    assert_int_equal(c.experts.scores, SCORES_SIGMOID);
}

static void ernie_4_5_21b(void **state)
{
    (void)state;
    read_config(
        "{\"architectures\":[\"Ernie4_5_MoeForCausalLM\"],\"bos_token_id\":1,\"eos_token_id\":2,"
        "\"hidden_act\":\"silu\",\"hidden_size\":2560,\"intermediate_size\":12288,"
        "\"max_position_embeddings\":131072,\"model_type\":\"ernie4_5_moe\",\"moe_capacity\":"
        "[64,64,64],\"moe_intermediate_size\":1536,\"moe_k\":6,\"moe_layer_end_index\":-1,"
        "\"moe_layer_interval\":1,\"moe_layer_start_index\":1,\"moe_num_experts\":64,"
        "\"moe_num_shared_experts\":2,\"num_attention_heads\":20,\"num_hidden_layers\":28,"
        "\"num_key_value_heads\":4,\"rms_norm_eps\":1e-05,\"rope_theta\":500000.0,"
        "\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\",\"use_bias\":false,"
        "\"vocab_size\":103424}");
    assert_shape(2560, 20, 4, 128, 131072);
    assert_true(!c.experts.layer[0] && c.experts.layer[1] && c.experts.layer[27]);
    assert_int_equal(c.experts.shared_intermediate, 3072);
    assert_int_equal(c.experts.scores, SCORES_SOFTMAX);
    assert_true(c.experts.choice_bias && c.rope_interleaved);
}

static void exaone_3_5_7b(void **state)
{
    (void)state;
    read_config(
        "{\"activation_function\":\"silu\",\"architectures\":[\"ExaoneForCausalLM\"],"
        "\"bos_token_id\":1,\"eos_token_id\":361,\"head_dim\":128,\"hidden_size\":4096,"
        "\"intermediate_size\":14336,\"layer_norm_epsilon\":1e-05,"
        "\"max_position_embeddings\":32768,\"model_type\":\"exaone\",\"num_attention_heads\":32,"
        "\"num_key_value_heads\":8,\"num_layers\":32,\"rope_scaling\":{\"factor\":8.0,"
        "\"high_freq_factor\":4.0,\"low_freq_factor\":1.0,"
        "\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"},"
        "\"rope_theta\":1000000.0,\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\","
        "\"vocab_size\":102400}");
    assert_shape(4096, 32, 8, 128, 32768);
    assert_int_equal(c.n_layers, 32);
    assert_int_equal(c.rope.kind, ROPE_LLAMA3);
}

#define EXAONE_4_32B                                                                              \
    "{\"architectures\":[\"Exaone4ForCausalLM\"],\"bos_token_id\":1,\"eos_token_id\":361,"        \
    "\"head_dim\":128,\"hidden_act\":\"silu\",\"hidden_size\":5120,\"intermediate_size\":27392,"  \
    "\"max_position_embeddings\":131072,\"model_type\":\"exaone4\",\"num_attention_heads\":40,"   \
    "\"num_hidden_layers\":64,\"num_key_value_heads\":8,\"rms_norm_eps\":1e-05,"                  \
    "\"rope_scaling\":{\"factor\":16.0,\"high_freq_factor\":4.0,\"low_freq_factor\":1.0,"         \
    "\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"},\"rope_theta\":1000000," \
    "\"sliding_window\":4096,\"torch_dtype\":\"bfloat16\",\"vocab_size\":102400,"                 \
    "\"sliding_window_pattern\":"

/* Its pattern of windows is a text. */
static void exaone_4_32b(void **state)
{
    (void)state;
    read_config(EXAONE_4_32B "\"LLLG\"}");
    assert_shape(5120, 40, 8, 128, 131072);
    for (int32_t i = 0; i < c.n_layers; i++) {
        assert_int_equal(c.windowed[i], i % 4 != 3);
        assert_int_equal(c.unrotated[i], i % 4 == 3);
    }
    refuse_config(EXAONE_4_32B "\"LGLL\"}", "'LGLL' is not letters L with a G behind them");
    refuse_config(EXAONE_4_32B "\"\"}", "'' is not letters L with a G behind them");
    refuse_config(EXAONE_4_32B "[4]}", "sliding_window_pattern must be a whole number");
}

#define CLOVA                                                                                      \
    "{\"architectures\":[\"HyperCLOVAXForCausalLM\"],\"attention_multiplier\":0.0078125,"          \
    "\"embedding_multiplier\":10.0,\"head_dim\":128,\"hidden_act\":\"silu\",\"hidden_size\":6144," \
    "\"intermediate_size\":14336,\"logits_scaling\":0.125,\"max_position_embeddings\":131072,"     \
    "\"torch_dtype\":\"bfloat16\",\"num_attention_heads\":48,\"num_hidden_layers\":38,\"num_key_"  \
    "value_heads\":8,"                                                                             \
    "\"rms_norm_eps\":1e-05,\"rope_theta\":100000000,\"vocab_size\":110592,"

static void hyperclova_x_seed_think_14b(void **state)
{
    (void)state;
    read_config(CLOVA "\"residual_multiplier\":1.0,\"use_post_norm\":true}");
    assert_shape(6144, 48, 8, 128, 131072);
    assert_float_equal(c.logit_scale, 0.125, 0);
    assert_float_equal(c.embed_scale, 10, 0);
    refuse_config(CLOVA "\"use_post_norm\":false}", "use_post_norm false is not supported");
    refuse_config(CLOVA "\"residual_multiplier\":0.5}", "a residual_multiplier but 1");
}

/* The text of a wrapper that other Mistral models have too. */
static void mistral_small_4(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"Mistral3ForConditionalGeneration\"],\"dtype\":\"bfloat16\","
                "\"text_config\":{"
                "\"hidden_size\":4096,\"intermediate_size\":12288,\"moe_intermediate_size\":2048,"
                "\"model_type\":\"mistral4\",\"num_attention_heads\":32,\"num_hidden_layers\":36,"
                "\"num_key_value_heads\":32,\"n_shared_experts\":1,\"n_routed_experts\":128,"
                "\"num_experts_per_tok\":4,\"kv_lora_rank\":256,\"q_lora_rank\":1024,"
                "\"qk_rope_head_dim\":64,\"qk_nope_head_dim\":64,\"v_head_dim\":128,"
                "\"norm_topk_prob\":true,\"first_k_dense_replace\":0,\"vocab_size\":131072,"
                "\"max_position_embeddings\":1048576,\"rope_parameters\":{\"type\":\"yarn\","
                "\"rope_theta\":10000.0,\"factor\":128.0,\"mscale\":1.0,\"mscale_all_dim\":1.0,"
                "\"original_max_position_embeddings\":8192,\"llama_4_scaling_beta\":0.1}},"
                "\"vision_config\":{\"hidden_size\":1024}}");
    assert_string_equal(c.architecture, "Mistral4ForCausalLM");
    assert_true(c.wrapped && c.latent.rank == 256 && c.experts.n == 128);
    assert_int_equal(c.experts.scores, SCORES_SOFTMAX);
    /* behind them queries would have a factor */
    assert_int_equal(c.max_positions, 8192);
}

static void phi_3_5_moe(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"PhiMoEForCausalLM\"],\"attention_bias\":true,\"bos_token_id"
                "\":1,\"eos_token_id\":32000,\"hidden_act\":\"silu\",\"hidden_size\":4096,\"input_j"
                "itter_noise\":0.01,\"intermediate_size\":6400,\"lm_head_bias\":true,\"max_position"
                "_embeddings\":131072,\"model_type\":\"phimoe\",\"num_attention_heads\":32,\"num_ex"
                "perts_per_tok\":2,\"num_hidden_layers\":32,\"num_key_value_heads\":8,\"num_local_e"
                "xperts\":16,\"original_max_position_embeddings\":4096,\"rms_norm_eps\":1e-05,\"rop"
                "e_scaling\":{\"long_factor\":[4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,"
                "4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4],\"lon"
                "g_mscale\":1.25,\"original_max_position_embeddings\":4096,\"short_factor\":[1,1,1,"
                "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
                "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],\"short_mscale\":1.25,\"type\":\"longrope"
                "\"},\"rope_theta\":10000.0,\"router_jitter_noise\":0.02,\"sliding_window\":131072,"
                "\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\",\"vocab_size\":32064}");
    assert_shape(4096, 32, 8, 128, 131072);
    assert_true(c.qkv_bias && c.o_bias && c.head_bias && !c.mlp_bias);
    assert_int_equal(c.experts.scores, SCORES_MIXER);
    assert_float_equal(c.experts.mixer_jitter, 0.02, 1e-9);
    assert_int_equal(c.experts.intermediate, 6400);
    assert_false(c.experts.normalised);
    assert_int_equal(c.rope.kind, ROPE_LONGROPE);
    assert_float_equal(c.rope.attention_factor, 1.25, 0);
    assert_int_equal(c.sliding_window, 131072);
}

static void pythia_1b(void **state)
{
    (void)state;
    read_config("{\"architectures\":[\"GPTNeoXForCausalLM\"],\"bos_token_id\":0,\"classifier_dropou"
                "t\":0.1,\"eos_token_id\":0,\"hidden_act\":\"gelu\",\"hidden_size\":2048,\"initiali"
                "zer_range\":0.02,\"intermediate_size\":8192,\"layer_norm_eps\":1e-05,\"max_positio"
                "n_embeddings\":2048,\"model_type\":\"gpt_neox\",\"num_attention_heads\":8,\"num_hi"
                "dden_layers\":16,\"rotary_emb_base\":20000,\"rotary_pct\":0.25,\"tie_word_embeddin"
                "gs\":false,\"torch_dtype\":\"float16\",\"use_cache\":true,\"use_parallel_residual"
                "\":true,\"vocab_size\":50304}");
    assert_shape(2048, 8, 8, 256, 2048);
    assert_int_equal(c.rope.rot_dim, 64);
    assert_float_equal(c.rope.theta, 20000, 0);
    assert_true(c.parallel && c.qkv_bias && c.o_bias && c.mlp_bias && !c.head_bias);
}

static void falcon_7b(void **state)
{
    (void)state;
    read_config("{\"alibi\":false,\"apply_residual_connection_post_layernorm\":false,\"architecture"
                "s\":[\"FalconForCausalLM\"],\"bias\":false,\"bos_token_id\":11,\"eos_token_id\":11"
                ",\"hidden_size\":4544,\"layer_norm_epsilon\":1e-05,\"model_type\":\"falcon\",\"mul"
                "ti_query\":true,\"new_decoder_architecture\":false,\"num_attention_heads\":71,\"nu"
                "m_hidden_layers\":32,\"num_kv_heads\":71,\"parallel_attn\":true,\"torch_dtype\":\""
                "bfloat16\",\"vocab_size\":65024}");
    assert_shape(4544, 71, 1, 64, 2048);
    assert_int_equal(c.intermediate, 4 * 4544);
    assert_true(c.parallel && c.tied && !c.qkv_bias);
}

static void falcon_11b(void **state)
{
    (void)state;
    read_config("{\"activation\":\"gelu\",\"alibi\":false,\"architectures\":[\"FalconForCausalLM\"]"
                ",\"bias\":false,\"bos_token_id\":11,\"eos_token_id\":11,\"ffn_hidden_size\":16384,"
                "\"hidden_size\":4096,\"layer_norm_epsilon\":1e-05,\"max_position_embeddings\":8192"
                ",\"model_type\":\"falcon\",\"multi_query\":true,\"new_decoder_architecture\":true,"
                "\"num_attention_heads\":32,\"num_hidden_layers\":60,\"num_kv_heads\":8,\"num_ln_in"
                "_parallel_attn\":1,\"parallel_attn\":true,\"rope_theta\":500042.0,\"tie_word_embed"
                "dings\":false,\"torch_dtype\":\"bfloat16\",\"vocab_size\":65024}");
    assert_shape(4096, 32, 8, 128, 8192);
    assert_int_equal(c.intermediate, 16384);
    assert_int_equal(c.act, ACT_GELU_ERF);
    assert_false(c.tied);
}

static void gpt_j_6b(void **state)
{
    (void)state;
    read_config("{\"activation_function\":\"gelu_new\",\"architectures\":[\"GPTJForCausalLM\"],\"bo"
                "s_token_id\":50256,\"eos_token_id\":50256,\"gradient_checkpointing\":false,\"layer"
                "_norm_epsilon\":1e-05,\"model_type\":\"gptj\",\"n_embd\":4096,\"n_head\":16,\"n_in"
                "ner\":null,\"n_layer\":28,\"n_positions\":2048,\"rotary\":true,\"rotary_dim\":64,"
                "\"scale_attn_weights\":true,\"tie_word_embeddings\":false,\"vocab_size\":50400,"
                "\"torch_dtype\":\"float32\"}");
    assert_shape(4096, 16, 16, 256, 2048);
    assert_int_equal(c.rope.rot_dim, 64);
    assert_true(c.rope_interleaved && c.head_bias && c.mlp_bias && !c.qkv_bias && !c.o_bias);
}

static void santacoder(void **state)
{
    (void)state;
    read_config("{\"activation_function\":\"gelu_pytorch_tanh\",\"architectures\":[\"GPTBigCodeForC"
                "ausalLM\"],\"attention_softmax_in_fp32\":true,\"bos_token_id\":49152,\"eos_token_i"
                "d\":49152,\"inference_runner\":0,\"layer_norm_epsilon\":1e-05,\"model_type\":\"gpt"
                "_bigcode\",\"multi_query\":true,\"n_embd\":2048,\"n_head\":16,\"n_inner\":8192,\"n"
                "_layer\":24,\"n_positions\":2048,\"scale_attention_softmax_in_fp32\":true,\"scale_"
                "attn_weights\":true,\"torch_dtype\":\"float32\",\"vocab_size\":49280}");
    assert_shape(2048, 16, 1, 128, 2048);
    assert_true(c.tied && c.qkv_bias && !c.parallel);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(qwen2_5_vl_7b),
        cmocka_unit_test(qwen3_vl_8b),
        cmocka_unit_test(gemma_4_31b),
        cmocka_unit_test(granite_4_h_tiny),
        cmocka_unit_test(minimax_m2),
        cmocka_unit_test(ernie_4_5_21b),
        cmocka_unit_test(llava_1_5_7b),
        cmocka_unit_test(internvl3_1b),
        cmocka_unit_test(wrappers_name_what_is_missing),
        cmocka_unit_test(exaone_3_5_7b),
        cmocka_unit_test(exaone_4_32b),
        cmocka_unit_test(hyperclova_x_seed_think_14b),
        cmocka_unit_test(mistral_small_4),
        cmocka_unit_test(phi_3_5_moe),
        cmocka_unit_test(pythia_1b),
        cmocka_unit_test(falcon_7b),
        cmocka_unit_test(falcon_11b),
        cmocka_unit_test(gpt_j_6b),
        cmocka_unit_test(santacoder),
    };

    return cmocka_run_group_tests_name("hfconfig_newer", tests, NULL, NULL);
}
