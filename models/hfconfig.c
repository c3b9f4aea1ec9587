/* config.json and generation_config.json of a Hugging Face directory into a checked `struct model_config`.
 *
 * Two passes over two tables. FIELDS says for each key where its value goes and what is allowed, so that the files are
 * read without knowing the architecture; finish() then fills in what is missing from the architecture's row and checks
 * what holds between fields. Keys that are not in the table mean nothing to inference here and are passed over.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/file.h"
#include "models/json.h"
#include "models/model.h"
#include "models/weights.h"

static const char CONFIG[] = "config.json", GENERATION[] = "generation_config.json";

/* config.json as it stands; -1 (NAN for reals) where it says nothing. */
struct raw {
    char architecture[64], act[32], dtype[16], rope_type[16];
    int32_t hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate, vocab, embed_dim, max_positions, window;
    int32_t window_from_layer, bos, original_positions, rope_original_positions;
    double norm_eps, theta, rope_theta, partial, rope_partial;
    double factor, low_freq_factor, high_freq_factor, beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor;
    int8_t tied, attention_bias, mlp_bias, enable_bias, use_window, norm_before, no_final_norm, affine, scale_by_layer;
    int8_t scale_attention, truncate;
    bool window_is_null, quantized;
    int32_t n_eos, eos[LIMIT_EOS_IDS];
    int32_t n_layer_types;
    bool layer_windowed[LIMIT_LAYERS];
    int32_t n_short, n_long;
    float short_factor[LIMIT_HEAD_DIM / 2], long_factor[LIMIT_HEAD_DIM / 2];
};

enum field_kind { FIELD_INT, FIELD_REAL, FIELD_BOOL };

struct field {
    const char *key;
    enum field_kind kind;
    size_t offset;
    double min, max; /* INT and REAL, both allowed */
};

#define AT(member) offsetof(struct raw, member)

/* Old families have names of their own for the same thing. */
static const struct field FIELDS[] = {
    {"hidden_size", FIELD_INT, AT(hidden), 1, LIMIT_HIDDEN},
    {"n_embd", FIELD_INT, AT(hidden), 1, LIMIT_HIDDEN},
    {"num_hidden_layers", FIELD_INT, AT(n_layers), 1, LIMIT_LAYERS},
    {"n_layer", FIELD_INT, AT(n_layers), 1, LIMIT_LAYERS},
    {"num_attention_heads", FIELD_INT, AT(n_heads), 1, LIMIT_HEADS},
    {"n_head", FIELD_INT, AT(n_heads), 1, LIMIT_HEADS},
    {"num_key_value_heads", FIELD_INT, AT(n_kv_heads), 1, LIMIT_HEADS},
    {"head_dim", FIELD_INT, AT(head_dim), 1, LIMIT_HEAD_DIM},
    {"intermediate_size", FIELD_INT, AT(intermediate), 1, LIMIT_HIDDEN * 8},
    {"ffn_dim", FIELD_INT, AT(intermediate), 1, LIMIT_HIDDEN * 8},
    {"n_inner", FIELD_INT, AT(intermediate), 1, LIMIT_HIDDEN * 8},
    {"vocab_size", FIELD_INT, AT(vocab), 1, LIMIT_VOCAB},
    {"word_embed_proj_dim", FIELD_INT, AT(embed_dim), 1, LIMIT_HIDDEN},
    {"max_position_embeddings", FIELD_INT, AT(max_positions), 1, 1 << 30},
    {"n_positions", FIELD_INT, AT(max_positions), 1, 1 << 30},
    {"sliding_window", FIELD_INT, AT(window), 1, 1 << 30},
    {"max_window_layers", FIELD_INT, AT(window_from_layer), 0, 1 << 30},
    {"original_max_position_embeddings", FIELD_INT, AT(original_positions), 1, 1 << 30},
    {"bos_token_id", FIELD_INT, AT(bos), -1, LIMIT_VOCAB},
    {"rms_norm_eps", FIELD_REAL, AT(norm_eps), 0, 1},
    {"layer_norm_epsilon", FIELD_REAL, AT(norm_eps), 0, 1},
    {"rope_theta", FIELD_REAL, AT(theta), 1, 1e12},
    {"partial_rotary_factor", FIELD_REAL, AT(partial), 0, 1},
    {"tie_word_embeddings", FIELD_BOOL, AT(tied), 0, 0},
    {"attention_bias", FIELD_BOOL, AT(attention_bias), 0, 0},
    {"mlp_bias", FIELD_BOOL, AT(mlp_bias), 0, 0},
    {"enable_bias", FIELD_BOOL, AT(enable_bias), 0, 0},
    {"use_sliding_window", FIELD_BOOL, AT(use_window), 0, 0},
    {"do_layer_norm_before", FIELD_BOOL, AT(norm_before), 0, 0},
    {"_remove_final_layer_norm", FIELD_BOOL, AT(no_final_norm), 0, 0},
    {"layer_norm_elementwise_affine", FIELD_BOOL, AT(affine), 0, 0},
    {"scale_attn_weights", FIELD_BOOL, AT(scale_attention), 0, 0},
    {"scale_attn_by_inverse_layer_idx", FIELD_BOOL, AT(scale_by_layer), 0, 0},
    {NULL, 0, 0, 0, 0},
};

/* Inside rope_scaling and rope_parameters. */
static const struct field ROPE_FIELDS[] = {
    {"rope_theta", FIELD_REAL, AT(rope_theta), 1, 1e12},
    {"partial_rotary_factor", FIELD_REAL, AT(rope_partial), 0, 1},
    {"factor", FIELD_REAL, AT(factor), 1, 1e6},
    {"low_freq_factor", FIELD_REAL, AT(low_freq_factor), 1e-6, 1e6},
    {"high_freq_factor", FIELD_REAL, AT(high_freq_factor), 1e-6, 1e6},
    {"beta_fast", FIELD_REAL, AT(beta_fast), 0, 1e6},
    {"beta_slow", FIELD_REAL, AT(beta_slow), 0, 1e6},
    {"mscale", FIELD_REAL, AT(mscale), 0, 1e3},
    {"mscale_all_dim", FIELD_REAL, AT(mscale_all_dim), 0, 1e3},
    {"attention_factor", FIELD_REAL, AT(attention_factor), 1e-6, 1e3},
    {"truncate", FIELD_BOOL, AT(truncate), 0, 0},
    {"original_max_position_embeddings", FIELD_INT, AT(rope_original_positions), 1, 1 << 30},
    {NULL, 0, 0, 0, 0},
};

#undef AT

/* ---- reading --------------------------------------------------------------------------------------------------- */

static bool wrong_type(struct json *j, const char *key, const char *want)
{
    return json_fail(j, "%s must be %s, not %s", key, want, json_type_name(json_peek(j)));
}

static bool read_int(struct json *j, const char *key, double min, double max, int32_t *ret)
{
    int64_t value;
    if (json_peek(j) != JSON_NUMBER)
        return wrong_type(j, key, "a whole number");
    if (!json_read_int(j, &value))
        return false;
    if ((double)value < min || (double)value > max)
        return json_fail(j, "%s is %lld, allowed are %.0f to %.0f", key, (long long)value, min, max);
    *ret = (int32_t)value;
    return true;
}

static bool read_real(struct json *j, const char *key, double min, double max, double *ret)
{
    double value;
    if (json_peek(j) != JSON_NUMBER)
        return wrong_type(j, key, "a number");
    if (!json_read_double(j, &value))
        return false;
    if (!(value >= min && value <= max))
        return json_fail(j, "%s is %g, allowed are %g to %g", key, value, min, max);
    *ret = value;
    return true;
}

static bool read_text(struct json *j, const char *key, char *ret, size_t cap)
{
    if (json_peek(j) != JSON_STRING)
        return wrong_type(j, key, "a string");
    return json_read_string(j, ret, cap, NULL);
}

/* A row of the table for `key`, or NULL. */
static const struct field *find_field(const struct field *fields, const char *key)
{
    for (; fields->key; fields++) {
        if (strcmp(fields->key, key) == 0)
            return fields;
    }
    return NULL;
}

static bool read_field(struct json *j, const struct field *f, struct raw *raw)
{
    void *at = (char *)raw + f->offset;
    bool value = false;
    if (json_peek(j) == JSON_NULL)
        return json_skip(j);
    switch (f->kind) {
    case FIELD_INT:
        return read_int(j, f->key, f->min, f->max, at);
    case FIELD_REAL:
        return read_real(j, f->key, f->min, f->max, at);
    case FIELD_BOOL:
        break;
    }
    if (json_peek(j) != JSON_BOOL)
        return wrong_type(j, f->key, "true or false");
    json_read_bool(j, &value);
    *(int8_t *)at = value;
    return true;
}

/* eos_token_id: null, one id or a list. */
static bool read_eos(struct json *j, int32_t *eos, int32_t *n_eos)
{
    *n_eos = 0;
    if (json_peek(j) == JSON_NULL)
        return json_skip(j);
    if (json_peek(j) != JSON_ARRAY) {
        *n_eos = 1;
        return read_int(j, "eos_token_id", 0, LIMIT_VOCAB - 1, eos);
    }
    json_enter_array(j);
    while (json_next_element(j)) {
        if (*n_eos == LIMIT_EOS_IDS)
            return json_fail(j, "eos_token_id has more than %d ids", LIMIT_EOS_IDS);
        if (!read_int(j, "eos_token_id", 0, LIMIT_VOCAB - 1, &eos[(*n_eos)++]))
            return false;
    }
    return !j->failed;
}

/* short_factor, long_factor: one number a frequency. */
static bool read_factors(struct json *j, const char *key, float *ret, int32_t *ret_n)
{
    if (json_peek(j) != JSON_ARRAY)
        return wrong_type(j, key, "a list of numbers");
    *ret_n = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        double value;
        if (*ret_n == LIMIT_HEAD_DIM / 2)
            return json_fail(j, "%s has more than %d numbers", key, LIMIT_HEAD_DIM / 2);
        if (!read_real(j, key, 1e-6, 1e6, &value))
            return false;
        ret[(*ret_n)++] = (float)value;
    }
    return !j->failed;
}

static bool read_rope(struct json *j, const char *key, struct raw *raw)
{
    if (json_peek(j) == JSON_NULL)
        return json_skip(j);
    if (json_peek(j) != JSON_OBJECT)
        return wrong_type(j, key, "an object");
    json_enter_object(j);
    while (json_next_member(j)) {
        const struct field *f = find_field(ROPE_FIELDS, j->key);
        if (f)
            read_field(j, f, raw);
        else if (json_key_is(j, "rope_type") || json_key_is(j, "type"))
            read_text(j, "rope_type", raw->rope_type, sizeof raw->rope_type);
        else if (json_key_is(j, "short_factor"))
            read_factors(j, "short_factor", raw->short_factor, &raw->n_short);
        else if (json_key_is(j, "long_factor"))
            read_factors(j, "long_factor", raw->long_factor, &raw->n_long);
        else if (json_peek(j) == JSON_OBJECT)
            return json_fail(j, "%s: parameters by layer type ('%.40s') are not supported", key, j->key);
        else
            json_skip(j);
    }
    return !j->failed;
}

static bool read_architectures(struct json *j, struct raw *raw)
{
    char other[64];
    if (json_peek(j) != JSON_ARRAY)
        return wrong_type(j, "architectures", "a list of strings");
    json_enter_array(j);
    for (int i = 0; json_next_element(j); i++)
        read_text(j, "architectures", i == 0 ? raw->architecture : other, sizeof other);
    return !j->failed;
}

static bool read_layer_types(struct json *j, struct raw *raw)
{
    char text[32];
    if (json_peek(j) == JSON_NULL)
        return json_skip(j);
    if (json_peek(j) != JSON_ARRAY)
        return wrong_type(j, "layer_types", "a list of strings");
    raw->n_layer_types = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        if (raw->n_layer_types == LIMIT_LAYERS)
            return json_fail(j, "layer_types has more than %d entries", LIMIT_LAYERS);
        if (!read_text(j, "layer_types", text, sizeof text))
            return false;
        bool windowed = strcmp(text, "sliding_attention") == 0;
        if (!windowed && strcmp(text, "full_attention") != 0)
            return json_fail(j, "layer_types: '%s' is neither full_attention nor sliding_attention", text);
        raw->layer_windowed[raw->n_layer_types++] = windowed;
    }
    return !j->failed;
}

static bool read_member(struct json *j, struct raw *raw)
{
    const struct field *f = find_field(FIELDS, j->key);
    bool null = json_peek(j) == JSON_NULL;
    if (f) {
        raw->window_is_null |= null && strcmp(f->key, "sliding_window") == 0;
        return read_field(j, f, raw);
    }
    if (json_key_is(j, "architectures"))
        return read_architectures(j, raw);
    if (json_key_is(j, "rope_scaling") || json_key_is(j, "rope_parameters"))
        return read_rope(j, "rope_parameters", raw);
    if (json_key_is(j, "eos_token_id"))
        return read_eos(j, raw->eos, &raw->n_eos);
    if (json_key_is(j, "layer_types"))
        return read_layer_types(j, raw);
    if (!null && (json_key_is(j, "hidden_act") || json_key_is(j, "activation_function")))
        return read_text(j, "hidden_act", raw->act, sizeof raw->act);
    if (!null && (json_key_is(j, "dtype") || json_key_is(j, "torch_dtype")))
        return read_text(j, "dtype", raw->dtype, sizeof raw->dtype);
    raw->quantized |= !null && json_key_is(j, "quantization_config");
    return json_skip(j);
}

static void raw_init(struct raw *raw)
{
    memset(raw, 0, sizeof *raw);
    for (const struct field *table = FIELDS; table; table = table == FIELDS ? ROPE_FIELDS : NULL) {
        for (const struct field *f = table; f->key; f++) {
            if (f->kind == FIELD_INT)
                *(int32_t *)((char *)raw + f->offset) = -1;
            else if (f->kind == FIELD_REAL)
                *(double *)((char *)raw + f->offset) = NAN;
            else
                *(int8_t *)((char *)raw + f->offset) = -1;
        }
    }
    raw->n_layer_types = -1;
}

/* ---- what follows from what was read ---------------------------------------------------------------------------- */

static bool either(int8_t given, bool otherwise)
{
    return given < 0 ? otherwise : given;
}

static double real_or(double given, double otherwise)
{
    return isnan(given) ? otherwise : given;
}

static int unknown_architecture(const char *name, struct err *e)
{
    char known[320] = "";
    for (int i = 0; model_families[i]; i++) {
        for (const struct architecture *a = model_families[i]->architectures; a->name; a++) {
            size_t len = strlen(known);
            snprintf(known + len, sizeof known - len, "%s%s", len ? ", " : "", a->name);
        }
    }
    if (!*name)
        return err_set(e, ERR_INVALID, "%s: architectures is missing; known are %s", CONFIG, known);
    return err_set(e, ERR_UNSUPPORTED, "%s: architecture %s is not known; known are %s", CONFIG, name, known);
}

static int set_activation(struct model_config *c, const char *name, struct err *e)
{
    static const struct {
        const char *name;
        enum activation act;
    } ACTS[] = {
        {"silu", ACT_SILU},
        {"swish", ACT_SILU},
        {"relu", ACT_RELU},
        {"gelu", ACT_GELU_ERF},
        {"gelu_new", ACT_GELU_TANH},
        {"gelu_fast", ACT_GELU_TANH},
        {"gelu_pytorch_tanh", ACT_GELU_TANH},
    };
    for (size_t i = 0; i < ARRAY_LEN(ACTS) && *name; i++) {
        if (strcmp(name, ACTS[i].name) == 0) {
            c->act = ACTS[i].act;
            return 0;
        }
    }
    if (!*name)
        return 0;
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: hidden_act is '%s', allowed are silu, swish, relu, gelu, gelu_new, gelu_fast, "
                   "gelu_pytorch_tanh",
                   CONFIG, name);
}

/* The type the file names, or where it names none the type of the checkpoint's first tensor. */
static int set_dtype(struct model_config *c, const char *name, const char *dir, struct err *e)
{
    static const char *const NAMES[] = {[DTYPE_F32] = "float32", [DTYPE_F16] = "float16", [DTYPE_BF16] = "bfloat16"};
    if (strncmp(name, "torch.", 6) == 0)
        name += 6;
    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        if (strcmp(name, NAMES[i]) == 0) {
            c->dtype = (enum dtype)i;
            return 0;
        }
    }
    if (*name)
        return err_set(e, ERR_UNSUPPORTED, "%s: dtype is '%s', allowed are bfloat16, float16, float32", CONFIG, name);
    c->dtype = DTYPE_F32;
    struct checkpoint *checkpoint;
    if (checkpoint_open(&checkpoint, dir, NULL) < 0)
        return 0; /* model_open will say why, unless the weights are dummies */
    const struct tensor *t = checkpoint_count(checkpoint) > 0 ? checkpoint_at(checkpoint, 0) : NULL;
    if (t && t->usable && t->dtype != DTYPE_I32)
        c->dtype = t->dtype;
    checkpoint_free(checkpoint);
    return 0;
}

static int set_shape(struct model_config *c, const struct raw *r, struct err *e)
{
    const struct {
        const char *key;
        int32_t value;
    } required[] = {{"hidden_size", r->hidden},
                    {"num_hidden_layers", r->n_layers},
                    {"num_attention_heads", r->n_heads},
                    {"vocab_size", r->vocab},
                    {"max_position_embeddings", r->max_positions}};
    for (size_t i = 0; i < ARRAY_LEN(required); i++) {
        if (required[i].value < 0)
            return err_set(e, ERR_INVALID, "%s: %s is missing", CONFIG, required[i].key);
    }
    c->hidden = r->hidden;
    c->n_layers = r->n_layers;
    c->n_heads = r->n_heads;
    c->vocab = r->vocab;
    c->max_positions = r->max_positions;
    c->n_kv_heads = r->n_kv_heads > 0 ? r->n_kv_heads : r->n_heads;
    c->head_dim = r->head_dim > 0 ? r->head_dim : r->hidden / r->n_heads;
    c->intermediate = r->intermediate > 0 ? r->intermediate : 4 * r->hidden;
    c->embed_dim = r->embed_dim > 0 ? r->embed_dim : r->hidden;
    if (r->head_dim < 0 && r->hidden % r->n_heads != 0)
        return err_set(e, ERR_INVALID,
                       "%s: hidden_size %d is no multiple of num_attention_heads %d, and head_dim is not given", CONFIG,
                       r->hidden, r->n_heads);
    if (c->head_dim < 1 || c->head_dim > LIMIT_HEAD_DIM)
        return err_set(e, ERR_INVALID, "%s: head_dim is %d, allowed are 1 to %d", CONFIG, c->head_dim, LIMIT_HEAD_DIM);
    if (c->n_heads % c->n_kv_heads != 0)
        return err_set(e, ERR_INVALID, "%s: num_attention_heads %d is no multiple of num_key_value_heads %d", CONFIG,
                       c->n_heads, c->n_kv_heads);
    return 0;
}

static int set_window(struct model_config *c, const struct raw *r, const struct architecture *a, struct err *e)
{
    int32_t window = r->window > 0 ? r->window : r->window_is_null ? 0 : a->sliding_window;
    if (r->n_layer_types >= 0 && r->n_layer_types != c->n_layers)
        return err_set(e, ERR_INVALID, "%s: layer_types has %d entries for num_hidden_layers %d", CONFIG,
                       r->n_layer_types, c->n_layers);
    if (window == 0 || (a->window_switch && r->use_window != 1))
        return 0;
    int32_t from = a->window_switch ? MAX(r->window_from_layer, 0) : 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        c->windowed[i] = r->n_layer_types >= 0 ? r->layer_windowed[i] : i >= from;
        if (c->windowed[i])
            c->sliding_window = window;
    }
    return 0;
}

/* What each kind needs beyond theta. */
static int check_rope(const struct model_config *c, const struct raw *r, struct err *e)
{
    const struct rope_config *rope = &c->rope;
    const char *missing = NULL;
    bool scaled = rope->kind != ROPE_DEFAULT && rope->kind != ROPE_LONGROPE && rope->kind != ROPE_YARN;
    if (scaled && isnan(r->factor))
        missing = "factor";
    else if (rope->kind == ROPE_LLAMA3 && isnan(r->low_freq_factor))
        missing = "low_freq_factor";
    else if (rope->kind == ROPE_LLAMA3 && isnan(r->high_freq_factor))
        missing = "high_freq_factor";
    if (missing)
        return err_set(e, ERR_INVALID, "%s: rope_parameters: %s is missing for rope_type '%s'", CONFIG, missing,
                       r->rope_type);
    if (rope->kind == ROPE_LLAMA3 && rope->high_freq_factor <= rope->low_freq_factor)
        return err_set(e, ERR_INVALID,
                       "%s: rope_parameters: high_freq_factor %g must be greater than low_freq_factor %g", CONFIG,
                       rope->high_freq_factor, rope->low_freq_factor);
    if (rope->kind == ROPE_LONGROPE && (r->n_short != rope->rot_dim / 2 || r->n_long != rope->rot_dim / 2))
        return err_set(e, ERR_INVALID,
                       "%s: rope_parameters: short_factor and long_factor have %d and %d numbers, %d are needed",
                       CONFIG, r->n_short, r->n_long, rope->rot_dim / 2);
    if (rope->rot_dim < 2 || rope->rot_dim % 2 != 0)
        return err_set(e, ERR_INVALID,
                       "%s: %d dimensions of a head would turn (head_dim times partial_rotary_factor); an even "
                       "number is needed",
                       CONFIG, rope->rot_dim);
    return 0;
}

static int set_rope(struct model_config *c, const struct raw *r, const struct architecture *a, struct err *e)
{
    static const struct {
        const char *name;
        enum rope_scaling kind;
    } KINDS[] = {{"", ROPE_DEFAULT},          {"default", ROPE_DEFAULT}, {"linear", ROPE_LINEAR},
                 {"dynamic", ROPE_DYNAMIC},   {"llama3", ROPE_LLAMA3},   {"yarn", ROPE_YARN},
                 {"longrope", ROPE_LONGROPE}, {"su", ROPE_LONGROPE}};
    struct rope_config *rope = &c->rope;
    size_t kind = 0;
    if (a->rope_theta == 0)
        return 0;
    while (kind < ARRAY_LEN(KINDS) && strcmp(KINDS[kind].name, r->rope_type) != 0)
        kind++;
    if (kind == ARRAY_LEN(KINDS))
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: rope_type is '%s', allowed are default, linear, dynamic, llama3, yarn, longrope", CONFIG,
                       r->rope_type);
    rope->kind = KINDS[kind].kind;
    rope->theta = real_or(r->rope_theta, real_or(r->theta, a->rope_theta));
    rope->rot_dim = (int32_t)(c->head_dim * real_or(r->rope_partial, real_or(r->partial, 1)));
    /* Phi-3 keeps it outside, and there it wins. */
    rope->original_positions = r->original_positions > 0        ? r->original_positions
                               : r->rope_original_positions > 0 ? r->rope_original_positions
                                                                : c->max_positions;
    if (rope->kind == ROPE_DYNAMIC)
        rope->original_positions = c->max_positions;
    rope->factor = real_or(r->factor, (double)c->max_positions / rope->original_positions);
    rope->low_freq_factor = r->low_freq_factor;
    rope->high_freq_factor = r->high_freq_factor;
    rope->beta_fast = real_or(r->beta_fast, 0) > 0 ? r->beta_fast : 32;
    rope->beta_slow = real_or(r->beta_slow, 0) > 0 ? r->beta_slow : 1;
    rope->mscale = real_or(r->mscale, 0);
    rope->mscale_all_dim = real_or(r->mscale_all_dim, 0);
    rope->attention_factor = real_or(r->attention_factor, 0);
    rope->truncate = either(r->truncate, true);
    memcpy(rope->short_factor, r->short_factor, sizeof rope->short_factor);
    memcpy(rope->long_factor, r->long_factor, sizeof rope->long_factor);
    /* These kinds reach `factor` times the context that the file names; the others name what they reach. */
    double reach = c->max_positions;
    if (rope->kind == ROPE_LINEAR || rope->kind == ROPE_DYNAMIC)
        reach *= rope->factor;
    else if (rope->kind == ROPE_YARN)
        reach = MAX(reach, rope->original_positions * rope->factor);
    c->max_positions = (int32_t)MIN(reach, (double)LIMIT_MODEL_LEN);
    return check_rope(c, r, e);
}

static int finish(struct model_config *c, const struct raw *r, const char *dir, struct err *e)
{
    const struct architecture *a;
    memcpy(c->architecture, r->architecture, sizeof c->architecture);
    if (!model_family_find(r->architecture, &a))
        return unknown_architecture(r->architecture, e);
    if (r->quantized)
        return err_set(e, ERR_UNSUPPORTED, "%s: quantization_config: quantised weights are not supported", CONFIG);
    if (r->affine == 0 || r->scale_attention == 0)
        return err_set(e, ERR_UNSUPPORTED, "%s: %s false is not supported", CONFIG,
                       r->affine == 0 ? "layer_norm_elementwise_affine" : "scale_attn_weights");
    c->norm = a->norm;
    c->norm_eps = (float)real_or(r->norm_eps, a->norm_eps);
    c->norm_before = either(r->norm_before, true);
    c->final_norm = c->norm_before && r->no_final_norm != 1;
    c->act = a->act;
    c->tied = either(r->tied, a->tied);
    /* attention_bias speaks for all four projections where an architecture has the choice. */
    bool all = a->o_bias || !a->qkv_bias;
    c->qkv_bias = either(r->enable_bias, all ? either(r->attention_bias, a->qkv_bias) : a->qkv_bias);
    c->o_bias = either(r->enable_bias, all ? either(r->attention_bias, a->o_bias) : a->o_bias);
    c->mlp_bias = either(r->enable_bias, either(r->mlp_bias, a->mlp_bias));
    c->qk_norm = a->qk_norm;
    c->scale_by_layer = r->scale_by_layer == 1;
    c->bos = r->bos;
    c->n_eos = r->n_eos;
    memcpy(c->eos, r->eos, sizeof c->eos);
    int code = set_shape(c, r, e);
    if (code == 0)
        code = set_activation(c, r->act, e);
    if (code == 0)
        code = set_window(c, r, a, e);
    if (code == 0)
        code = set_rope(c, r, a, e);
    c->max_positions = MIN(c->max_positions, LIMIT_MODEL_LEN);
    return code == 0 ? set_dtype(c, r->dtype, dir, e) : code;
}

/* ---- generation_config.json ------------------------------------------------------------------------------------- */

static bool read_default(struct json *j, const char *key, double min, double max, float *ret)
{
    double value;
    if (!read_real(j, key, min, max, &value))
        return false;
    *ret = (float)value;
    return true;
}

static bool read_generation_member(struct json *j, struct generation_defaults *g, struct model_config *c)
{
    if (json_peek(j) == JSON_NULL)
        return json_skip(j);
    if (json_key_is(j, "temperature"))
        return read_default(j, j->key, 0, 100, &g->temperature);
    if (json_key_is(j, "top_p"))
        return read_default(j, j->key, 1e-6, 1, &g->top_p);
    if (json_key_is(j, "min_p"))
        return read_default(j, j->key, 0, 1, &g->min_p);
    if (json_key_is(j, "repetition_penalty"))
        return read_default(j, j->key, 1e-3, 1e3, &g->repetition_penalty);
    if (json_key_is(j, "top_k"))
        return read_int(j, j->key, -1, LIMIT_VOCAB, &g->top_k);
    if (json_key_is(j, "bos_token_id"))
        return read_int(j, j->key, 0, LIMIT_VOCAB - 1, &c->bos);
    if (json_key_is(j, "eos_token_id"))
        return read_eos(j, c->eos, &c->n_eos);
    return json_skip(j);
}

static int read_generation(struct generation_defaults *g, struct model_config *c, const char *dir, struct err *e)
{
    *g = (struct generation_defaults){
        .temperature = NAN, .top_p = NAN, .min_p = NAN, .repetition_penalty = NAN, .top_k = -1};
    char *text;
    size_t len;
    if (!model_file_exists(dir, GENERATION))
        return 0;
    int code = model_file_read(dir, GENERATION, LIMIT_CONFIG_JSON_BYTES, &text, &len, e);
    if (code < 0)
        return code;
    struct json j;
    json_init(&j, text, len, GENERATION, e);
    json_enter_object(&j);
    while (json_next_member(&j))
        read_generation_member(&j, g, c);
    json_finish(&j);
    free(text);
    return j.failed ? ERR_INVALID : 0;
}

/* Ids that the logits do not reach can never come. */
static int check_ids(const struct model_config *c, struct err *e)
{
    if (c->bos >= c->vocab)
        return err_set(e, ERR_INVALID, "bos_token_id is %d, vocab_size is %d", c->bos, c->vocab);
    for (int32_t i = 0; i < c->n_eos; i++) {
        if (c->eos[i] >= c->vocab)
            return err_set(e, ERR_INVALID, "eos_token_id is %d, vocab_size is %d", c->eos[i], c->vocab);
    }
    return 0;
}

int model_config_read(struct model_config *ret, struct generation_defaults *ret_gen, const char *dir, struct err *e)
{
    char *text;
    size_t len;
    int code = model_file_read(dir, CONFIG, LIMIT_CONFIG_JSON_BYTES, &text, &len, e);
    if (code < 0)
        return code;
    struct raw *raw = malloc(sizeof *raw);
    struct model_config *c = calloc(1, sizeof *c);
    struct generation_defaults gen;
    struct json j;
    if (!raw || !c) {
        code = err_nomem(e, CONFIG);
        goto out;
    }
    raw_init(raw);
    json_init(&j, text, len, CONFIG, e);
    json_enter_object(&j);
    while (json_next_member(&j))
        read_member(&j, raw);
    code = json_finish(&j) ? finish(c, raw, dir, e) : ERR_INVALID;
    if (code == 0)
        code = read_generation(&gen, c, dir, e);
    if (code == 0)
        code = check_ids(c, e);
    if (code == 0) {
        *ret = *c;
        *ret_gen = gen;
    }
out:
    free(raw);
    free(c);
    free(text);
    return code;
}
