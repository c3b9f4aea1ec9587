/* What the layers of a GGUF file differ in, and the sizes of heads, latents and states,
 * as members of config.json. */
#include <stdio.h>

#include "models/checkpoint/gguf/gguf_config_internal.h"

/* Beyond all limits of hfconfig.c; sums and doubles of such numbers do not overflow. */
#define FARTHEST ((int64_t)1 << 40)

/* The value of a key of the architecture, cut to FARTHEST, or `otherwise`. */
static int64_t int_or(struct gguf_writer *w, const char *key, int64_t otherwise)
{
    int64_t value = otherwise;
    char full[128];

    take_int(w, gguf_config_key(w, key, full, sizeof(full)), &value);
    return MIN(MAX(value, -FARTHEST), FARTHEST);
}

/* An array of the architecture with one whole number or bool for each layer, and maybe
 * for those that draft; NULL: the key is absent or no array. */
static const struct gguf_pair *by_layer(struct gguf_writer *w, const char *key)
{
    char full[128];
    const struct gguf_pair *p = gguf_find(w->g, gguf_config_key(w, key, full, sizeof(full)));
    int64_t all = int_or(w, "block_count", 0), drafting = int_or(w, "nextn_predict_layers", 0);
    int64_t least = drafting > 0 && drafting < all ? all - drafting : all;

    if (!p || p->type != GGUF_ARRAY) {
        return NULL;
    }
    gguf_config_key(w, key, full, sizeof(full));
    if (p->item != GGUF_BOOL && p->item != GGUF_I32 && p->item != GGUF_U32) {
        w->code = w->code < 0 ? w->code
                              : err_set(w->e, ERR_INVALID,
                                        "%s: %s must be whole numbers of 32 bits, or bools",
                                        w->g->file, full);
        return NULL;
    }
    if (p->n > LIMIT_LAYERS || (int64_t)p->n < least || (int64_t)p->n > all) {
        w->code = w->code < 0 ? w->code
                              : err_set(w->e, ERR_INVALID, "%s: %s has %llu values for %lld layers",
                                        w->g->file, full, (unsigned long long)p->n, (long long)all);
        return NULL;
    }
    return p;
}

static int64_t value_of(const struct gguf_pair *p, uint64_t i)
{
    return p->item == GGUF_BOOL ? p->at[i] != 0 : gguf_item_i32(p, i);
}

/* Key/value heads: one number, or one for each layer, 0 where it has a state. */
static void put_kv_heads(struct gguf_writer *w)
{
    const struct gguf_pair *p = by_layer(w, "attention.head_count_kv");
    int64_t most = 0;

    for (uint64_t i = 0; p && i < p->n; i++) {
        most = MAX(most, value_of(p, i));
    }
    most = p ? most : int_or(w, "attention.head_count_kv", 0);
    if (most != 0) {
        buf_printf(&w->out, ",\"num_key_value_heads\":%lld", (long long)most);
    }
}

/* Files of before 2025 have the sizes of a head under the names of other models. */
static void put_latent(struct gguf_writer *w)
{
    int64_t rotated = int_or(w, "rope.dimension_count", 0);
    int64_t key = int_or(w, "attention.key_length_mla", int_or(w, "attention.key_length", 0));
    int64_t value = int_or(w, "attention.value_length_mla", int_or(w, "attention.value_length", 0));
    int64_t q_rank = int_or(w, "attention.q_lora_rank", 0);

    buf_printf(&w->out,
               ",\"kv_lora_rank\":%lld,\"qk_rope_head_dim\":%lld,\"qk_nope_head_dim\":%lld,"
               "\"v_head_dim\":%lld",
               (long long)int_or(w, "attention.kv_lora_rank", 0), (long long)rotated,
               (long long)(key - rotated), (long long)value);
    if (q_rank != 0) {
        buf_printf(&w->out, ",\"q_lora_rank\":%lld", (long long)q_rank);
    }
}

void gguf_put_heads(struct gguf_writer *w)
{
    int64_t heads = int_or(w, "attention.head_count", 0), stated = 0;
    char key[128];

    put_kv_heads(w);
    if (w->family->latent) {
        put_latent(w);
        return;
    }
    if (take_int(w, gguf_config_key(w, "attention.key_length", key, sizeof(key)), &stated)) {
        buf_printf(&w->out, ",\"head_dim\":%lld", (long long)stated);
    }
    int64_t head = stated ? stated : heads > 0 ? int_or(w, "embedding_length", 0) / heads : 0;
    int64_t value = int_or(w, "attention.value_length", head);
    int64_t turned = int_or(w, "rope.dimension_count", 0);
    if (head > 0 && value != head && w->code == 0) {
        w->code = err_set(w->e, ERR_UNSUPPORTED, "%s: keys of %lld dimensions with values of %lld",
                          w->g->file, (long long)head, (long long)value);
    }
    if (turned > 0 && turned <= head) {
        buf_printf(&w->out, ",\"partial_rotary_factor\":%.17g",
                   MIN(((double)turned + 0.5) / (double)head, 1));
    }
}

/* The width of MLPs: one number, or one for each layer, 0 where it has none. */
void gguf_put_widths(struct gguf_writer *w)
{
    const struct gguf_pair *p = by_layer(w, "feed_forward_length");
    int64_t width = p ? 0 : int_or(w, "feed_forward_length", 0);

    for (uint64_t i = 0; p && i < p->n; i++) {
        width = MAX(width, value_of(p, i));
    }
    if (width != 0) {
        buf_printf(&w->out, ",\"intermediate_size\":%lld", (long long)width);
    }
}

/* layer_types of layers that have one part each. */
static void put_parts(struct gguf_writer *w, const struct gguf_pair *kv, int64_t layers)
{
    const struct gguf_pair *widths = by_layer(w, "feed_forward_length");

    if (!kv || !widths || kv->n != widths->n || (int64_t)kv->n < layers) {
        w->code = w->code < 0 ? w->code
                              : err_set(w->e, ERR_INVALID,
                                        "%s: attention.head_count_kv and feed_forward_length of "
                                        "%s must have a number for each layer",
                                        w->g->file, w->family->gguf);
        return;
    }
    buf_puts(&w->out, ",\"layer_types\":[");
    for (int64_t i = 0; i < layers; i++) {
        const char *type = value_of(kv, (uint64_t)i)       ? "full_attention"
                           : value_of(widths, (uint64_t)i) ? w->family->parts
                                                           : "linear_attention";
        buf_printf(&w->out, "%s\"%s\"", i ? "," : "", type);
    }
    buf_putc(&w->out, ']');
}

void gguf_put_layer_types(struct gguf_writer *w)
{
    const struct gguf_pair *windows = by_layer(w, "attention.sliding_window_pattern");
    const struct gguf_pair *states = by_layer(w, "attention.recurrent_layers");
    const struct gguf_pair *kv = by_layer(w, "attention.head_count_kv");
    const struct gguf_pair *p = windows ? windows : states ? states : kv;
    int64_t layers = int_or(w, "block_count", 0) - int_or(w, "nextn_predict_layers", 0), every = 0;
    char key[128];

    if (w->family->parts) {
        put_parts(w, kv, layers);
        return;
    }
    if (!windows &&
        take_int(w, gguf_config_key(w, "attention.sliding_window_pattern", key, sizeof(key)),
                 &every)) {
        buf_printf(&w->out, ",\"sliding_window_pattern\":%lld", (long long)every);
    }
    if (!p) {
        return;
    }
    buf_puts(&w->out, ",\"layer_types\":[");
    for (uint64_t i = 0; i < p->n && (int64_t)i < layers; i++) {
        const char *type = p == windows     ? (value_of(p, i) ? "sliding" : "full")
                           : p == kv        ? (value_of(p, i) ? "full" : "linear")
                           : value_of(p, i) ? "linear"
                                            : "full";
        buf_printf(&w->out, "%s\"%s_attention\"", i ? "," : "", type);
    }
    buf_putc(&w->out, ']');
}

void gguf_put_thetas(struct gguf_writer *w)
{
    static const char KEY[] = "attention.rope_pattern";
    const struct gguf_pair *p = by_layer(w, KEY);
    int64_t layers = int_or(w, "block_count", 0) - int_or(w, "nextn_predict_layers", 0);
    double theta = 10000;
    char key[128];

    if (!p) {
        if (w->code == 0 && gguf_find(w->g, gguf_config_key(w, KEY, key, sizeof(key)))) {
            w->code = err_set(w->e, ERR_INVALID, "%s: %s must be an array", w->g->file, key);
        }
        return;
    }
    take_real(w, gguf_config_key(w, "rope.freq_base", key, sizeof(key)), &theta);
    buf_puts(&w->out, ",\"layer_rope_theta\":[");
    for (uint64_t i = 0; i < p->n && (int64_t)i < layers; i++) {
        buf_printf(&w->out, "%s%.9g", i ? "," : "", value_of(p, i) ? theta : 0);
    }
    buf_putc(&w->out, ']');
}

/* Of Mamba-1, and which layers have experts: those with a router. */
static void put_scan(struct gguf_writer *w, int64_t inner, int64_t rank)
{
    int64_t hidden = int_or(w, "embedding_length", 0), layers = int_or(w, "block_count", 0);
    char name[64];

    buf_printf(&w->out,
               ",\"mamba_dt_rank\":%lld,\"mamba_expand\":%lld,\"mamba_d_state\":%lld,"
               "\"mamba_d_conv\":%lld,\"mlp_layer_types\":[",
               (long long)rank, (long long)(hidden > 0 ? inner / hidden : 0),
               (long long)int_or(w, "ssm.state_size", 0),
               (long long)int_or(w, "ssm.conv_kernel", 0));
    for (int64_t i = 0; i < layers && i < LIMIT_LAYERS; i++) {
        snprintf(name, sizeof(name), "blk.%lld.ffn_gate_inp.weight", (long long)i);
        buf_printf(&w->out, "%s\"%s\"", i ? "," : "",
                   gguf_config_tensor(w->g, name) ? "sparse" : "dense");
    }
    buf_putc(&w->out, ']');
}

void gguf_put_states(struct gguf_writer *w)
{
    int64_t inner = int_or(w, "ssm.inner_size", 0), heads = int_or(w, "ssm.time_step_rank", 0);
    char key[128];

    if (inner <= 0 || heads <= 0) {
        return;
    }
    if (w->family->scan) {
        put_scan(w, inner, heads);
        return;
    }
    /* Files of Granite say that nothing rotates. Those of Bamba, whose layers are the
     * same otherwise, say that positions do, which llama.cpp takes silence for too. */
    const struct gguf_pair *rotates =
        gguf_find(w->g, gguf_config_key(w, "rope.scaling.finetuned", key, sizeof(key)));
    if (rotates && rotates->type != GGUF_BOOL && w->code == 0) {
        w->code = err_set(w->e, ERR_INVALID, "%s: %s must be a bool", w->g->file, key);
    }
    buf_printf(
        &w->out,
        ",\"mamba_n_heads\":%lld,\"mamba_d_head\":%lld,\"mamba_n_groups\":%lld,"
        "\"mamba_d_state\":%lld,\"mamba_d_conv\":%lld%s",
        (long long)heads, (long long)(inner / heads), (long long)int_or(w, "ssm.group_count", 0),
        (long long)int_or(w, "ssm.state_size", 0), (long long)int_or(w, "ssm.conv_kernel", 0),
        rotates && rotates->type == GGUF_BOOL && !rotates->at[0]
            ? ""
            : ",\"position_embedding_type\":\"rope\"");
}

/* The share of the pairs of a head that turn: those with a factor of 1, which come
 * first; the others have one that stops them. All, where there are no factors. */
static double turning_share(struct gguf_writer *w)
{
    const struct gguf_tensor *t = gguf_config_tensor(w->g, "rope_freqs.weight");
    int64_t pairs = int_or(w, "attention.key_length", 0) / 2, n = 0;
    float factor[LIMIT_HEAD_DIM / 2];

    if (!t) {
        return 1;
    }
    if (t->n_dims != 1 || t->dim[0] != pairs || pairs < 1 || pairs > LIMIT_HEAD_DIM / 2 ||
        gguf_block_values(t->encoding) != 1) {
        w->code = err_set(w->e, ERR_INVALID,
                          "%s: rope_freqs.weight must be [%lld] floats, one for each pair of a "
                          "head",
                          w->g->file, (long long)pairs);
        return 1;
    }
    gguf_decode(t->encoding, t->data, pairs, factor);
    while (n < pairs && factor[n] == 1) {
        n++;
    }
    return MIN(((double)n + 0.25) / (double)pairs, 1);
}

/* An array's value for a layer, or the one number of all. */
static int64_t of_layer(struct gguf_writer *w, const char *key, int64_t layer)
{
    const struct gguf_pair *p = by_layer(w, key);

    return p && layer < (int64_t)p->n ? value_of(p, (uint64_t)layer) : int_or(w, key, 0);
}

void gguf_put_two_heads(struct gguf_writer *w)
{
    const struct gguf_pair *windows = by_layer(w, "attention.sliding_window_pattern");
    int64_t layers = windows ? (int64_t)windows->n : 0, of[2] = {-1, -1}; /* full, windowed */
    char name[64];

    for (int64_t i = layers - 1; i >= 0; i--) {
        of[value_of(windows, (uint64_t)i) != 0] = i;
    }
    if (layers == 0 || of[0] < 0 || of[1] < 0) {
        w->code = w->code < 0 ? w->code
                              : err_set(w->e, ERR_INVALID,
                                        "%s: %s.attention.sliding_window_pattern does not name "
                                        "layers with a window and without one",
                                        w->g->file, w->family->gguf);
        return;
    }
    snprintf(name, sizeof(name), "blk.%lld.attn_v.weight", (long long)of[0]);
    int64_t width = of_layer(w, "feed_forward_length", 0);
    bool wide = of_layer(w, "feed_forward_length", layers - 1) == 2 * width;
    buf_printf(&w->out,
               ",\"head_dim\":%lld,\"global_head_dim\":%lld,\"num_key_value_heads\":%lld,"
               "\"num_global_key_value_heads\":%lld,\"attention_k_eq_v\":%s,"
               "\"intermediate_size\":%lld,\"use_double_wide_mlp\":%s,\"rope_parameters\":{"
               "\"rope_type\":\"proportional\",\"partial_rotary_factor\":%.9g}",
               (long long)int_or(w, "attention.key_length_swa", 0),
               (long long)int_or(w, "attention.key_length", 0),
               (long long)of_layer(w, "attention.head_count_kv", of[1]),
               (long long)of_layer(w, "attention.head_count_kv", of[0]),
               gguf_config_tensor(w->g, name) ? "false" : "true", (long long)width,
               wide ? "true" : "false", turning_share(w));
}
