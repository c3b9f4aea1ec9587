/* The inside of reading a configuration, shared by hfconfig.c (files) and
 * hfconfig_derive.c (what follows from them). */
#ifndef QUIRE_MODELS_CHECKPOINT_HFCONFIG_INTERNAL_H
#define QUIRE_MODELS_CHECKPOINT_HFCONFIG_INTERNAL_H

#include "models/model.h"

/* config.json as it stands; -1 (NAN for reals) where it says nothing. */
struct raw_config {
    char architecture[64], act[32], dtype[16], rope_type[16];
    int32_t hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate, vocab, embed_dim,
        max_positions, window;
    int32_t window_from_layer, bos, original_positions, rope_original_positions;
    double norm_eps, theta, rope_theta, partial, rope_partial, query_scalar, attn_softcap,
        final_softcap;
    double factor, low_freq_factor, high_freq_factor, beta_fast, beta_slow, mscale, mscale_all_dim,
        attention_factor;
    int8_t tied, attention_bias, mlp_bias, enable_bias, use_window, norm_before, no_final_norm,
        affine, scale_by_layer;
    int8_t scale_attention, truncate;
    bool window_is_null, quantized;
    int32_t n_eos, eos[LIMIT_EOS_IDS];
    int32_t n_layer_types;
    bool layer_windowed[LIMIT_LAYERS];
    int32_t n_short, n_long;
    float short_factor[LIMIT_HEAD_DIM / 2], long_factor[LIMIT_HEAD_DIM / 2];
};

/* Fill all of *c but dtype, bos and eos: what the file says, what its architecture
 * says, what follows; checked. */
int raw_config_derive(struct model_config *c, const struct raw_config *r, struct err *e);

/* The whole way from the texts of config.json and generation_config.json (NULL: there
 * is none), for the fuzzer too.
 * *ret_dtype_given: config.json says how the weights are stored. */
int model_config_parse(struct model_config *ret, struct generation_defaults *ret_gen,
                       bool *ret_dtype_given, const char *config, size_t config_len,
                       const char *generation, size_t generation_len, struct err *e);

#endif
