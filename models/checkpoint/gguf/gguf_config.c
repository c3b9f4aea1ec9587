/* A GGUF file's metadata as config.json and generation_config.json.
 *
 * The metadata is written as these two texts, which hfconfig.c then reads: ranges,
 * defaults and checks are in one place.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "models/checkpoint/gguf/gguf_config_internal.h"
#include "models/checkpoint/hfconfig_internal.h"

/* Keys that follow the architecture's name and a dot. */
static const struct gguf_key INTS[] = {
    {"context_length", "max_position_embeddings"},
    {"embedding_length", "hidden_size"},
    {"attention.head_count", "num_attention_heads"},
    {"attention.sliding_window", "sliding_window"},
    {"rope.scaling.original_context_length", "original_max_position_embeddings"},
};
static const struct gguf_key REALS[] = {
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
    {"attention.layer_norm_epsilon", "layer_norm_epsilon"},
    {"rope.freq_base", "rope_theta"},
    {"attn_logit_softcapping", "attn_logit_softcapping"},
    {"final_logit_softcapping", "final_logit_softcapping"},
};
/* Inside rope_scaling. */
static const struct gguf_key SCALING[] = {
    {"rope.scaling.factor", "factor"},
    {"rope.scaling.yarn_beta_fast", "beta_fast"},
    {"rope.scaling.yarn_beta_slow", "beta_slow"},
    {"rope.scaling.yarn_log_multiplier", "mscale_all_dim"},
    {"rope.scaling.yarn_log_multiplier", "mscale"},
    {"attention.temperature_scale", "llama_4_scaling_beta"},
};
static const struct gguf_key SAMPLING[] = {
    {"general.sampling.temp", "temperature"},
    {"general.sampling.top_p", "top_p"},
    {"general.sampling.min_p", "min_p"},
    {"general.sampling.penalty_repeat", "repetition_penalty"},
};

const char *gguf_config_key(const struct gguf_writer *w, const char *key, char *ret, size_t cap)
{
    snprintf(ret, cap, "%s.%s", w->family->gguf, key);
    return ret;
}

bool take_int(struct gguf_writer *w, const char *key, int64_t *ret)
{
    int found = w->code < 0 ? 0 : gguf_int(w->g, key, ret, w->e);

    w->code = MIN(w->code, MIN(found, 0));
    return found > 0;
}

bool take_real(struct gguf_writer *w, const char *key, double *ret)
{
    int found = w->code < 0 ? 0 : gguf_real(w->g, key, ret, w->e);

    if (found > 0 && !isfinite(*ret)) {
        found = err_set(w->e, ERR_INVALID, "%s: %s is not finite", w->g->file, key);
    }
    w->code = MIN(w->code, MIN(found, 0));
    return found > 0;
}

const struct gguf_tensor *gguf_config_tensor(const struct gguf *g, const char *name)
{
    for (int32_t i = 0; i < g->n_tensors; i++) {
        if (gguf_text_is(g->tensor[i].name, name)) {
            return &g->tensor[i];
        }
    }
    return NULL;
}

/* "short_factor": [..] of a tensor. */
static void put_factors(struct gguf_writer *w, const char *key, const struct gguf_tensor *t)
{
    float value[LIMIT_HEAD_DIM / 2];

    if (t->n_dims != 1 || t->dim[0] > LIMIT_HEAD_DIM / 2 || gguf_block_values(t->encoding) != 1) {
        w->code = err_set(w->e, ERR_INVALID, "%s: %.*s must be one row of at most %d floats",
                          w->g->file, (int)t->name.len, t->name.at, LIMIT_HEAD_DIM / 2);
        return;
    }
    gguf_decode(t->encoding, t->data, t->dim[0], value);
    buf_printf(&w->out, ",\"%s\":[", key);
    for (int64_t i = 0; i < t->dim[0] && w->code == 0; i++) {
        if (!isfinite(value[i])) {
            w->code = err_set(w->e, ERR_INVALID, "%s: %.*s has a value that is not finite",
                              w->g->file, (int)t->name.len, t->name.at);
        }
        buf_printf(&w->out, "%s%.9g", i ? "," : "", (double)value[i]);
    }
    buf_putc(&w->out, ']');
}

/* RoPE scaling: a name and its parameters, or one factor for each frequency, which is
 * how llama.cpp stores llama3's scaling. */
static void put_rope(struct gguf_writer *w)
{
    const struct gguf_tensor *all = gguf_config_tensor(w->g, "rope_freqs.weight");
    const struct gguf_tensor *s = gguf_config_tensor(w->g, "rope_factors_short.weight");
    const struct gguf_tensor *l = gguf_config_tensor(w->g, "rope_factors_long.weight");
    struct gguf_text type = {0};
    char key[128];
    double value = 0;
    int found =
        gguf_string(w->g, gguf_config_key(w, "rope.scaling.type", key, sizeof(key)), &type, w->e);

    w->code = MIN(w->code, MIN(found, 0));
    if (all || (s && l)) {
        buf_puts(&w->out, ",\"rope_scaling\":{\"rope_type\":\"longrope\"");
        put_factors(w, "short_factor", all ? all : s);
        put_factors(w, "long_factor", all ? all : l);
        if (take_real(w, gguf_config_key(w, "rope.scaling.attn_factor", key, sizeof(key)),
                      &value)) {
            buf_printf(&w->out, ",\"attention_factor\":%.17g", value);
        } else if (all) {
            buf_puts(&w->out, ",\"attention_factor\":1");
        }
        buf_putc(&w->out, '}');
    } else if (found > 0 && !gguf_text_is(type, "none")) {
        buf_puts(&w->out, ",\"rope_scaling\":{\"rope_type\":\"");
        buf_json_escape(&w->out, type.at, MIN(type.len, (size_t)15));
        buf_putc(&w->out, '"');
        buf_puts(&w->out, w->family->rope_json ? w->family->rope_json : "");
        for (size_t i = 0; i < ARRAY_LEN(SCALING); i++) {
            if (take_real(w, gguf_config_key(w, SCALING[i].gguf, key, sizeof(key)), &value)) {
                /* of latents the file has a tenth of it */
                bool tenth = w->family->latent && strstr(SCALING[i].json, "mscale");
                buf_printf(&w->out, ",\"%s\":%.9g", SCALING[i].json, tenth ? value * 10 : value);
            }
        }
        buf_putc(&w->out, '}');
    } else if (take_real(w, gguf_config_key(w, "rope.scale_linear", key, sizeof(key)), &value) &&
               value != 1) {
        buf_printf(&w->out, ",\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":%.17g}", value);
    }
}

static void put_ids(struct gguf_writer *w)
{
    int64_t id = 0, other = 0;

    if (take_int(w, "tokenizer.ggml.bos_token_id", &id)) {
        buf_printf(&w->out, ",\"bos_token_id\":%lld", (long long)id);
    }
    if (!take_int(w, "tokenizer.ggml.eos_token_id", &id)) {
        return;
    }
    buf_printf(&w->out, ",\"eos_token_id\":[%lld", (long long)id);
    if (take_int(w, "tokenizer.ggml.eot_token_id", &other) && other != id) {
        buf_printf(&w->out, ",%lld", (long long)other);
    }
    buf_putc(&w->out, ']');
}

/* Quantised weights are computed in bfloat16. */
static const char *stored_dtype(const struct gguf *g)
{
    const struct gguf_tensor *mlp = gguf_config_tensor(g, "blk.0.ffn_down.weight");
    const struct gguf_tensor *experts = gguf_config_tensor(g, "blk.0.ffn_down_exps.weight");
    const struct gguf_tensor *t = mlp       ? mlp
                                  : experts ? experts
                                            : gguf_config_tensor(g, "blk.0.ssm_out.weight");
    enum dtype dtype = DTYPE_BF16;

    if (t) {
        gguf_encoding_dtype(t->encoding, &dtype);
    }
    return dtype_name(dtype);
}

/* "key": whether the file has the tensor. */
static void put_whether(struct gguf_writer *w, const char *key, const char *tensor)
{
    if (key) {
        buf_printf(&w->out, ",\"%s\":%s", key, gguf_config_tensor(w->g, tensor) ? "true" : "false");
    }
}

/* Settings that follow from which tensors the file has. */
static void put_found(struct gguf_writer *w)
{
    const struct gguf_family *f = w->family;
    const struct gguf_tensor *embed = gguf_config_tensor(w->g, "token_embd.weight");

    if (embed && embed->n_dims == 2) {
        buf_printf(&w->out, ",\"vocab_size\":%lld", (long long)embed->dim[1]);
    }
    buf_printf(&w->out, ",\"tie_word_embeddings\":%s",
               gguf_config_tensor(w->g, "output.weight") ? "false" : "true");
    put_whether(w, f->qkv_bias, "blk.0.attn_q.bias");
    put_whether(w, f->o_bias, "blk.0.attn_output.bias");
    put_whether(w, f->mlp_bias, "blk.0.ffn_up.bias");
    put_whether(w, f->head_bias, "output.bias");
    put_whether(w, f->head_norms, "blk.0.attn_q_norm.weight");
    put_whether(w, f->state_norm, "blk.0.ssm_norm.weight");
    buf_printf(&w->out, ",\"torch_dtype\":\"%s\"", stored_dtype(w->g));
}

/* The file does not contain the query_pre_attn_scalar of Gemma-2 and Gemma-3: it is
 * head_dim, but hidden size / heads in their models of 46 and 62 layers. */
static void put_query_scalar(struct gguf_writer *w)
{
    int64_t layers = 0, hidden = 0, heads = 0;
    char key[128];

    if (strncmp(w->family->gguf, "gemma", 5) == 0 &&
        take_int(w, gguf_config_key(w, "block_count", key, sizeof(key)), &layers) &&
        (layers == 46 || layers == 62) &&
        take_int(w, gguf_config_key(w, "embedding_length", key, sizeof(key)), &hidden) &&
        take_int(w, gguf_config_key(w, "attention.head_count", key, sizeof(key)), &heads) &&
        heads > 0) {
        buf_printf(&w->out, ",\"query_pre_attn_scalar\":%.17g", (double)hidden / (double)heads);
    }
}

/* The family's own settings: numbers and bools. Of a member written twice the last
 * counts. */
static void put_keys(struct gguf_writer *w)
{
    char key[128];

    buf_puts(&w->out, w->family->json ? w->family->json : "");
    for (const struct gguf_key *k = w->family->keys; k && k->gguf; k++) {
        const struct gguf_pair *p = gguf_find(w->g, gguf_config_key(w, k->gguf, key, sizeof(key)));
        double real = 0;
        int64_t value = 0;
        if (p && p->type == GGUF_BOOL) {
            buf_printf(&w->out, ",\"%s\":%s", k->json, p->at[0] ? "true" : "false");
        } else if (p && (p->type == GGUF_F32 || p->type == GGUF_F64)) {
            if (take_real(w, key, &real)) {
                buf_printf(&w->out, ",\"%s\":%.9g", k->json, real);
            }
        } else if (take_int(w, key, &value)) {
            buf_printf(&w->out, ",\"%s\":%lld", k->json, (long long)value);
        }
    }
}

/* The number of layers, without those behind them that draft. */
static void put_layers(struct gguf_writer *w)
{
    char key[128];
    int64_t layers = 0, drafting = 0;

    if (take_int(w, gguf_config_key(w, "block_count", key, sizeof(key)), &layers)) {
        take_int(w, gguf_config_key(w, "nextn_predict_layers", key, sizeof(key)), &drafting);
        if (drafting < 0 || drafting >= layers) {
            drafting = 0;
        }
        buf_printf(&w->out, ",\"num_hidden_layers\":%lld,\"num_nextn_predict_layers\":%lld",
                   (long long)(layers - drafting), (long long)drafting);
    }
}

static void put_config(struct gguf_writer *w)
{
    char key[128];
    int64_t value = 0;
    double real = 0;

    buf_printf(&w->out, "{\"architectures\":[\"%s\"],\"model_type\":\"" RAW_TYPE_GGUF "\"",
               w->family->name);
    for (size_t i = 0; i < ARRAY_LEN(INTS); i++) {
        if (take_int(w, gguf_config_key(w, INTS[i].gguf, key, sizeof(key)), &value)) {
            buf_printf(&w->out, ",\"%s\":%lld", INTS[i].json, (long long)value);
        }
    }
    for (size_t i = 0; i < ARRAY_LEN(REALS); i++) {
        if (take_real(w, gguf_config_key(w, REALS[i].gguf, key, sizeof(key)), &real)) {
            buf_printf(&w->out, ",\"%s\":%.9g", REALS[i].json, real);
        }
    }
    if (!w->family->keys &&
        take_int(w, gguf_config_key(w, "expert_count", key, sizeof(key)), &value) && value > 0) {
        w->code = err_set(w->e, ERR_UNSUPPORTED, "%s: %s with %lld experts is not supported",
                          w->g->file, w->family->gguf, (long long)value);
    }
    put_layers(w);
    put_keys(w);
    gguf_put_layer_types(w);
    gguf_put_thetas(w);
    gguf_put_states(w);
    if (w->family->two_heads) {
        gguf_put_two_heads(w);
    } else {
        gguf_put_heads(w);
        gguf_put_widths(w);
        put_rope(w);
    }
    put_query_scalar(w);
    put_ids(w);
    put_found(w);
    buf_putc(&w->out, '}');
}

static void put_generation(struct gguf_writer *w)
{
    int64_t top_k = -1;
    double value = 0;
    const char *comma = "";

    buf_putc(&w->out, '{');
    for (size_t i = 0; i < ARRAY_LEN(SAMPLING); i++) {
        if (take_real(w, SAMPLING[i].gguf, &value)) {
            buf_printf(&w->out, "%s\"%s\":%.9g", comma, SAMPLING[i].json, value);
            comma = ",";
        }
    }
    if (take_int(w, "general.sampling.top_k", &top_k)) {
        buf_printf(&w->out, "%s\"top_k\":%lld", comma, (long long)top_k);
    }
    buf_putc(&w->out, '}');
}

int gguf_config(struct model_config *ret, struct generation_defaults *ret_gen, const struct gguf *g,
                struct err *e)
{
    struct gguf_writer w = {.g = g, .e = e};
    bool dtype_given;

    buf_init(&w.out, LIMIT_CONFIG_JSON_BYTES);
    w.code = gguf_family(&w.family, g, e);
    if (w.code < 0) {
        return w.code;
    }
    put_config(&w);
    size_t config_len = w.out.len;
    put_generation(&w);
    if (w.code == 0 && w.out.failed) {
        w.code = err_nomem(e, "the configuration");
    }
    if (w.code == 0) {
        w.code = model_config_parse(ret, ret_gen, &dtype_given, w.out.data, config_len,
                                    w.out.data + config_len, w.out.len - config_len, e);
        if (w.code < 0) {
            err_prefix(e, "%s, read as config.json", g->file);
        } else {
            ret->norm_offset = 0; /* llama.cpp stores Gemma's norm weights with 1 added */
            ret->recurrent.tiled = w.family->tiled;
            ret->rope_interleaved &= !w.family->halved;
        }
    }
    buf_release(&w.out);
    return w.code;
}

int gguf_config_read(struct model_config *ret, struct generation_defaults *ret_gen,
                     const char *path, struct err *e)
{
    struct gguf *g = NULL;
    int rc = gguf_open(&g, path, e);

    if (rc == 0) {
        rc = gguf_config(ret, ret_gen, g, e);
    }
    gguf_free(g);
    return rc;
}
