/* Reading a quantization_config (see quant_config.h): first its members as they are,
 * then what they mean by method. Members that do not bear on how weights are stored are
 * skipped. */
#include "models/checkpoint/quantised/quant_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "models/checkpoint/hfconfig_internal.h"

static const char KEY[] = "quantization_config";

/* What one side of a scheme of compressed-tensors says: weights, or
 * input_activations. */
struct raw_args {
    bool given;
    int64_t bits, group_size; /* 0: not given */
    int64_t block[2];         /* rows, columns; 0: not given */
    char type[16];            /* "int", "float" */
    char strategy[16];        /* "tensor", "channel", "group", "block", "token" .. */
    bool symmetric, dynamic;
};

/* One of config_groups. */
struct raw_group {
    struct raw_args weights, input;
    char format[32];
    struct quant_names targets;
};

/* Rules of GPTQ's `dynamic` and of AutoRound's `extra_config`, those together that say
 * the same: what they set in place of what holds for all. */
struct raw_rule {
    bool left_alone; /* the modules are not quantised */
    bool exact;      /* the targets are names, not patterns */
    bool has_sym, asymmetric;
    int64_t bits, group_size; /* 0: not given */
    struct quant_names targets;
};

/* The members of all methods, as they are written; "" and 0: not given. */
struct raw_quant {
    char method[32], format[32], algo[32], version[16], activations[16], checkpoint_format[16];
    char float_type[16];                          /* fp8's "fmt" */
    char packing[40], backend[40], data_type[16]; /* AutoRound's; `backend` of older files */
    int64_t bits, group_size, block[2];
    char other_algo[32]; /* ModelOpt: of a layer, the first that is not known; "": none */
    bool nested;         /* ModelOpt: members are inside of "quantization" */
    bool zero_point;     /* AWQ */
    bool asymmetric;     /* GPTQ: sym is false */
    bool sparse;         /* compressed-tensors: weights are sparse as well */
    bool transforms;     /* compressed-tensors, AutoRound: weights are rotated */
    struct raw_group group[QUANT_MAX_GROUPS];
    int32_t n_groups;
    struct raw_rule rule[QUANT_MAX_GROUPS - 1]; /* the first that matches holds */
    int32_t n_rules;
    struct quant_names ignored;
};

/* ---- members ---- */

/* The value of a member that has another type than it must: null is as if it were not
 * there. */
static bool read_no(struct json *j, const char *wanted)
{
    return json_peek(j) == JSON_NULL ? json_skip(j)
                                     : json_fail(j, "%s: %s must be %s", KEY, j->key, wanted);
}

/* A text longer than all that have a meaning is cut, and then is none of them. */
static bool read_text(struct json *j, char *ret, size_t cap)
{
    char text[256];

    if (json_peek(j) != JSON_STRING) {
        return read_no(j, "a text");
    }
    if (!json_read_string(j, text, sizeof(text), NULL)) {
        return false;
    }
    snprintf(ret, cap, "%s", text);
    return true;
}

static bool read_count(struct json *j, int64_t *ret)
{
    return json_peek(j) == JSON_NUMBER ? json_read_int(j, ret) : read_no(j, "a whole number");
}

static bool read_flag(struct json *j, bool *ret)
{
    return json_peek(j) == JSON_BOOL ? json_read_bool(j, ret) : read_no(j, "true or false");
}

static bool read_names(struct json *j, struct quant_names *ret)
{
    char name[QUANT_NAME_BYTES];

    if (json_peek(j) != JSON_ARRAY) {
        return read_no(j, "a list");
    }
    json_enter_array(j);
    while (json_next_element(j)) {
        if (!json_read_string(j, name, sizeof(name), NULL)) {
            return false;
        }
        struct err full;
        if (quant_names_add(ret, name, &full) < 0) {
            return json_fail(j, "%s", full.text);
        }
    }
    return !j->failed;
}

static bool read_block(struct json *j, int64_t *ret)
{
    int32_t n = 0;

    if (json_peek(j) != JSON_ARRAY) {
        return json_skip(j);
    }
    json_enter_array(j);
    while (json_next_element(j)) {
        if (n == 2) {
            return json_fail(j, "%s: a block has 2 sizes from 1 to 65536", KEY);
        }
        if (!json_read_int(j, &ret[n++])) {
            return false;
        }
    }
    if (!j->failed && (n != 2 || ret[0] < 1 || ret[1] < 1 || MAX(ret[0], ret[1]) > 1 << 16)) {
        return json_fail(j, "%s: a block has 2 sizes from 1 to 65536", KEY);
    }
    return !j->failed;
}

/* Whether the next value holds anything, which is skipped. */
static bool read_presence(struct json *j, bool *ret)
{
    if (json_peek(j) != JSON_OBJECT) {
        return json_skip(j);
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        *ret = true;
        json_skip(j);
    }
    return !j->failed;
}

static bool read_args(struct json *j, struct raw_args *a)
{
    if (json_peek(j) != JSON_OBJECT) {
        return read_no(j, "an object");
    }
    a->given = true;
    a->symmetric = true;
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "num_bits")) {
            read_count(j, &a->bits);
        } else if (json_key_is(j, "type")) {
            read_text(j, a->type, sizeof(a->type));
        } else if (json_key_is(j, "strategy")) {
            read_text(j, a->strategy, sizeof(a->strategy));
        } else if (json_key_is(j, "group_size")) {
            read_count(j, &a->group_size);
        } else if (json_key_is(j, "block_structure")) {
            read_block(j, a->block);
        } else if (json_key_is(j, "symmetric")) {
            read_flag(j, &a->symmetric);
        } else if (json_key_is(j, "dynamic")) { /* true, false or "local" */
            a->dynamic = json_peek(j) == JSON_STRING;
            (void)(a->dynamic ? json_skip(j) : read_flag(j, &a->dynamic));
        } else {
            json_skip(j);
        }
    }
    return !j->failed;
}

static bool read_group(struct json *j, struct raw_group *g)
{
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "targets")) {
            read_names(j, &g->targets);
        } else if (json_key_is(j, "weights")) {
            read_args(j, &g->weights);
        } else if (json_key_is(j, "input_activations")) {
            read_args(j, &g->input);
        } else if (json_key_is(j, "format")) {
            read_text(j, g->format, sizeof(g->format));
        } else {
            json_skip(j);
        }
    }
    return !j->failed;
}

static bool read_groups(struct json *j, struct raw_quant *r)
{
    json_enter_object(j);
    while (json_next_member(j)) {
        if (r->n_groups == QUANT_MAX_GROUPS) {
            return json_fail(j, "%s: more than %d config_groups", KEY, QUANT_MAX_GROUPS);
        }
        read_group(j, &r->group[r->n_groups++]);
    }
    return !j->failed;
}

/* sparsity_config: weights that are dense are as without it. */
static bool read_sparsity(struct json *j, bool *ret)
{
    char format[32] = "dense";

    if (json_peek(j) != JSON_OBJECT) {
        return json_skip(j);
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "format")) {
            read_text(j, format, sizeof(format));
        } else {
            json_skip(j);
        }
    }
    *ret = strcmp(format, "dense") != 0;
    return !j->failed;
}

static bool read_sym(struct json *j, bool *ret_asymmetric)
{
    bool symmetric = true;

    read_flag(j, &symmetric);
    *ret_asymmetric = !symmetric;
    return !j->failed;
}

/* What a rule sets; other members bear on how weights were rounded. */
static bool read_settings(struct json *j, struct raw_rule *rule)
{
    char type[16] = "int";

    if (json_peek(j) != JSON_OBJECT) {
        return read_no(j, "an object");
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "bits")) {
            read_count(j, &rule->bits);
        } else if (json_key_is(j, "group_size")) {
            read_count(j, &rule->group_size);
        } else if (json_key_is(j, "sym")) {
            rule->has_sym = json_peek(j) == JSON_BOOL;
            read_sym(j, &rule->asymmetric);
        } else if (json_key_is(j, "data_type")) {
            read_text(j, type, sizeof(type));
        } else {
            json_skip(j);
        }
    }
    if (!j->failed && rule->bits <= 8 && strcmp(type, "int") != 0) {
        return json_fail(j, "%s: data_type '%s', supported is int", KEY, type);
    }
    return !j->failed;
}

static bool same_settings(const struct raw_rule *a, const struct raw_rule *b)
{
    return a->left_alone == b->left_alone && a->exact == b->exact && a->has_sym == b->has_sym &&
           a->asymmetric == b->asymmetric && a->bits == b->bits && a->group_size == b->group_size;
}

/* The rule that the name of another one with these settings may be added to: the last
 * one, as the order of patterns counts, or any one of names. NULL: there is none. */
static struct raw_rule *rule_like(struct raw_quant *r, const struct raw_rule *rule)
{
    int32_t first = rule->exact ? 0 : MAX(r->n_rules - 1, 0);

    for (int32_t i = first; i < r->n_rules; i++) {
        if (same_settings(&r->rule[i], rule)) {
            return &r->rule[i];
        }
    }
    return NULL;
}

/* Append a rule of the modules that `name` matches. */
static bool add_rule(struct json *j, struct raw_quant *r, const struct raw_rule *rule,
                     const char *name)
{
    struct raw_rule *last = rule_like(r, rule);
    struct err full;

    if (!last) {
        if (r->n_rules == QUANT_MAX_GROUPS - 1) {
            return json_fail(j, "%s: more than %d different rules of modules", KEY,
                             QUANT_MAX_GROUPS - 1);
        }
        last = &r->rule[r->n_rules++];
        *last = *rule;
    }
    return quant_names_add(&last->targets, name, &full) == 0 || json_fail(j, "%s", full.text);
}

/* GPTQ's `dynamic`: rules by regular expressions that match from the beginning, "-:" in
 * front of those of modules that are not quantised, "+:" or nothing of others. */
static bool read_rules(struct json *j, struct raw_quant *r)
{
    char name[QUANT_NAME_BYTES];

    if (json_peek(j) != JSON_OBJECT) {
        return json_skip(j);
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        struct raw_rule rule = {.left_alone = strncmp(j->key, "-:", 2) == 0};
        bool marked = rule.left_alone || strncmp(j->key, "+:", 2) == 0;
        int len = snprintf(name, sizeof(name), "re:%s", j->key + (marked ? 2 : 0));
        if (len >= (int)sizeof(name)) {
            return json_fail(j, "%s: a rule is longer than %d bytes", KEY, QUANT_NAME_BYTES - 4);
        }
        if (!(rule.left_alone ? json_skip(j) : read_settings(j, &rule)) ||
            !add_rule(j, r, &rule, name)) {
            return false;
        }
    }
    return !j->failed;
}

/* AutoRound's `extra_config`: settings of modules by their names, or by regular
 * expressions that match anywhere in them. */
static bool read_extra(struct json *j, struct raw_quant *r)
{
    char name[QUANT_NAME_BYTES];

    if (json_peek(j) != JSON_OBJECT) {
        return json_skip(j);
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        struct raw_rule rule = {.exact = !strpbrk(j->key, "*?+^$|()[]\\")};
        int len = snprintf(name, sizeof(name), rule.exact ? "%s" : "re:.*(?:%s)", j->key);
        if (len >= (int)sizeof(name)) {
            return json_fail(j, "%s: a rule is longer than %d bytes", KEY, QUANT_NAME_BYTES - 10);
        }
        if (!read_settings(j, &rule)) {
            return false;
        }
        if (rule.bits > 8) {
            rule = (struct raw_rule){.left_alone = true, .exact = rule.exact};
        }
        if (!add_rule(j, r, &rule, name)) {
            return false;
        }
    }
    return !j->failed;
}

/* ModelOpt's `quantized_layers`: each layer's algorithm, which is seen from its tensors
 * if it is one of those that are known. */
static bool read_layers(struct json *j, struct raw_quant *r)
{
    static const char *const KNOWN[] = {"FP8", "NVFP4", "W4A16_NVFP4", "UNQUANTIZED", "NONE", ""};

    if (json_peek(j) != JSON_OBJECT) {
        return json_skip(j);
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        char algo[32] = "";
        int64_t group = 16;
        bool known = false;
        if (json_peek(j) != JSON_OBJECT) {
            return read_no(j, "an object");
        }
        json_enter_object(j);
        while (json_next_member(j)) {
            if (json_key_is(j, "quant_algo")) {
                read_text(j, algo, sizeof(algo));
            } else if (json_key_is(j, "group_size")) {
                read_count(j, &group);
            } else {
                json_skip(j);
            }
        }
        for (size_t i = 0; i < ARRAY_LEN(KNOWN); i++) {
            known = known || strcmp(algo, KNOWN[i]) == 0;
        }
        if (!known || (strstr(algo, "NVFP4") && group != 16)) {
            snprintf(r->other_algo, sizeof(r->other_algo), "%s", algo);
        }
    }
    return !j->failed;
}

static bool read_list(struct json *j, struct raw_quant *r)
{
    if (json_key_is(j, "ignore") || json_key_is(j, "modules_to_not_convert") ||
        json_key_is(j, "exclude_modules") || json_key_is(j, "ignored_layers")) {
        return read_names(j, &r->ignored);
    }
    if (json_key_is(j, "config_groups")) {
        return json_peek(j) == JSON_OBJECT ? read_groups(j, r) : read_no(j, "an object");
    }
    if (json_key_is(j, "sparsity_config")) {
        return read_sparsity(j, &r->sparse);
    }
    if (json_key_is(j, "transform_config") || json_key_is(j, "rotation_config")) {
        return read_presence(j, &r->transforms);
    }
    if (json_key_is(j, "quantized_layers")) {
        return read_layers(j, r);
    }
    if (json_key_is(j, "extra_config")) {
        return read_extra(j, r);
    }
    if (json_key_is(j, "dynamic")) {
        return read_rules(j, r);
    }
    return json_skip(j);
}

static bool read_object(struct json *j, struct raw_quant *r);

static bool read_member(struct json *j, struct raw_quant *r)
{
    const struct {
        const char *key;
        char *ret;
        size_t cap;
    } texts[] = {{"quant_method", r->method, sizeof(r->method)},
                 {"format", r->format, sizeof(r->format)},
                 {"quant_algo", r->algo, sizeof(r->algo)},
                 {"version", r->version, sizeof(r->version)},
                 {"activation_scheme", r->activations, sizeof(r->activations)},
                 {"checkpoint_format", r->checkpoint_format, sizeof(r->checkpoint_format)},
                 {"fmt", r->float_type, sizeof(r->float_type)},
                 {"packing_format", r->packing, sizeof(r->packing)},
                 {"backend", r->backend, sizeof(r->backend)},
                 {"data_type", r->data_type, sizeof(r->data_type)}};

    if (json_key_is(j, "version") && json_peek(j) != JSON_STRING) {
        return json_skip(j); /* AWQ's has a meaning, and is a text */
    }
    for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
        if (json_key_is(j, texts[i].key)) {
            return read_text(j, texts[i].ret, texts[i].cap);
        }
    }
    if (json_key_is(j, "bits")) {
        return read_count(j, &r->bits);
    }
    if (json_key_is(j, "group_size")) {
        return read_count(j, &r->group_size);
    }
    if (json_key_is(j, "weight_block_size")) {
        return read_block(j, r->block);
    }
    if (json_key_is(j, "zero_point")) {
        return read_flag(j, &r->zero_point);
    }
    if (json_key_is(j, "sym")) {
        return read_sym(j, &r->asymmetric);
    }
    if (json_key_is(j, "quantization") && json_peek(j) == JSON_OBJECT && !r->nested) {
        r->nested = true; /* as in ModelOpt's own file */
        return read_object(j, r);
    }
    return read_list(j, r);
}

static bool read_object(struct json *j, struct raw_quant *r)
{
    json_enter_object(j);
    while (json_next_member(j)) {
        read_member(j, r);
    }
    return !j->failed;
}

static void raw_release(struct raw_quant *r)
{
    for (int32_t i = 0; i < r->n_groups; i++) {
        quant_names_release(&r->group[i].targets);
    }
    for (int32_t i = 0; i < r->n_rules; i++) {
        quant_names_release(&r->rule[i].targets);
    }
    quant_names_release(&r->ignored);
}

/* ---- meaning ---- */

static const char *const METHODS[] = {
    [QUANT_COMPRESSED_TENSORS] = "compressed-tensors",
    [QUANT_FP8] = "fp8",
    [QUANT_GPTQ] = "gptq",
    [QUANT_AWQ] = "awq",
    [QUANT_MODELOPT] = "modelopt",
    [QUANT_MXFP4] = "mxfp4",
};

const char *quant_method_name(enum quant_method m)
{
    return METHODS[m];
}

static int group_size(int64_t n, int32_t *ret, struct err *e)
{
    if (n != -1 && (n < 8 || n > 1 << 16 || n % 8 != 0)) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: group_size %lld, allowed are multiples of 8, and -1", KEY,
                       (long long)n);
    }
    *ret = n == -1 ? 0 : (int32_t)n;
    return 0;
}

static void blocks(const int64_t *block, struct quant_scheme *ret)
{
    ret->group_rows = (int32_t)block[0];
    ret->group_cols = (int32_t)block[1];
}

/* The format of a scheme's codes. */
static int code_format(const struct raw_args *w, const char *format, struct quant_scheme *ret,
                       struct err *e)
{
    bool floats = strcmp(w->type, "float") == 0;

    if (floats && w->bits == 8 && w->symmetric) {
        ret->format = FORMAT_FP8;
    } else if (floats && w->bits == 4 && w->symmetric) {
        ret->format = FORMAT_FP4;
    } else if (!floats && w->bits == 8) {
        ret->format = FORMAT_INT8;
    } else if (!floats && w->bits == 4) {
        ret->format = FORMAT_INT4;
    } else {
        return err_set(e, ERR_UNSUPPORTED, "%s: %s%s weights of %lld bits (%s) are not supported",
                       KEY, w->symmetric ? "" : "asymmetric ", w->type, (long long)w->bits, format);
    }
    ret->zeros = !w->symmetric;
    return 0;
}

/* Values that share a scale. */
static int code_groups(const struct raw_args *w, struct quant_scheme *ret, struct err *e)
{
    if (strcmp(w->strategy, "channel") == 0) {
        ret->group_rows = 1;
        return 0;
    }
    if (strcmp(w->strategy, "group") == 0 || strcmp(w->strategy, "tensor_group") == 0) {
        ret->group_rows = 1;
        return group_size(w->group_size, &ret->group_cols, e);
    }
    if (strcmp(w->strategy, "block") == 0) {
        blocks(w->block, ret);
        return w->block[0] > 0 ? 0 : err_set(e, ERR_INVALID, "%s: block_structure is missing", KEY);
    }
    if (strcmp(w->strategy, "tensor") == 0 || !w->strategy[0]) {
        return 0;
    }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: strategy '%s' of weights, allowed are tensor, channel, group, block", KEY,
                   w->strategy);
}

/* Only a scheme that quantises activations to the weights' codes is one of ours; others
 * leave them as they are, which is more exact. */
static enum act_scheme act_of(const struct raw_args *in, enum weight_format_id f)
{
    if (!in->given || in->bits != 8 || !in->symmetric || (f != FORMAT_FP8 && f != FORMAT_INT8)) {
        return ACT_AS_THEY_ARE;
    }
    if (!in->dynamic) {
        return strcmp(in->strategy, "tensor") == 0 ? ACT_SCALE_TENSOR : ACT_AS_THEY_ARE;
    }
    return strcmp(in->strategy, "group") == 0 ? ACT_SCALE_GROUP : ACT_SCALE_TOKEN;
}

static int compressed_group(struct raw_group *from, const char *format, struct quant_group *ret,
                            struct err *e)
{
    static const char *const FORMATS[] = {"pack-quantized",       "int-quantized",
                                          "float-quantized",      "naive-quantized",
                                          "nvfp4-pack-quantized", "mxfp4-pack-quantized",
                                          "mixed-precision"}; /* each tensor shows its own */
    bool known = false;

    format = from->format[0] ? from->format : format;
    for (size_t i = 0; i < ARRAY_LEN(FORMATS); i++) {
        known = known || strcmp(format, FORMATS[i]) == 0;
    }
    if (!known) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: format '%s', supported are pack-, int-, float-, naive-, nvfp4-pack- "
                       "and mxfp4-pack-quantized",
                       KEY, format);
    }
    if (!from->weights.given) {
        return err_set(e, ERR_UNSUPPORTED, "%s: a group quantises activations alone", KEY);
    }
    int rc = code_format(&from->weights, format, &ret->scheme, e);
    rc = rc < 0 ? rc : code_groups(&from->weights, &ret->scheme, e);
    ret->scheme.act = act_of(&from->input, ret->scheme.format);
    ret->targets = from->targets;
    from->targets = (struct quant_names){0};
    return rc;
}

static int compressed_tensors(struct raw_quant *r, struct quant_config *ret, struct err *e)
{
    int rc = 0;

    if (r->sparse || r->transforms) {
        return err_set(e, ERR_UNSUPPORTED, "%s: %s is not supported", KEY,
                       r->sparse ? "sparsity_config" : "transform_config");
    }
    if (r->n_groups == 0) {
        return err_set(e, ERR_INVALID, "%s: config_groups is missing", KEY);
    }
    for (int32_t i = 0; i < r->n_groups && rc == 0; i++) {
        rc = compressed_group(&r->group[i], r->format, &ret->group[ret->n_groups++], e);
    }
    return rc;
}

static int fp8(const struct raw_quant *r, struct quant_scheme *ret, struct err *e)
{
    ret->format = FORMAT_FP8;
    if (r->float_type[0] && strcmp(r->float_type, "e4m3") != 0 &&
        strcmp(r->float_type, "float8_e4m3fn") != 0) { /* as MiniMax-M2's */
        return err_set(e, ERR_UNSUPPORTED, "%s: fmt '%s', supported is e4m3", KEY, r->float_type);
    }
    if (r->activations[0] && strcmp(r->activations, "dynamic") != 0 &&
        strcmp(r->activations, "static") != 0) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: activation_scheme '%s', allowed are dynamic and static", KEY,
                       r->activations);
    }
    bool fixed = strcmp(r->activations, "static") == 0;
    if (r->block[0] != 0) {
        ret->act = ACT_SCALE_GROUP;
        blocks(r->block, ret);
        return 0;
    }
    ret->act = fixed ? ACT_SCALE_TENSOR : ACT_SCALE_TOKEN;
    return 0;
}

/* Integers of `bits` that share a scale in groups of `size`. */
static int integer_scheme(const struct raw_quant *r, enum quant_method m, int64_t bits,
                          int64_t size, bool zeros, struct quant_scheme *ret, struct err *e)
{
    bool awq = m == QUANT_AWQ;

    if (bits != 4 && (bits != 8 || awq)) {
        return err_set(e, ERR_UNSUPPORTED, "%s: %s with %lld bits, supported are %s", KEY,
                       METHODS[m], (long long)bits, awq ? "4" : "4 and 8");
    }
    if (awq && r->version[0] && strcasecmp(r->version, "gemm") != 0) {
        return err_set(e, ERR_UNSUPPORTED, "%s: awq of version '%s', supported is gemm", KEY,
                       r->version);
    }
    *ret = (struct quant_scheme){
        .format = bits == 4 ? FORMAT_INT4 : FORMAT_INT8, .group_rows = 1, .zeros = zeros};
    return group_size(size, &ret->group_cols, e);
}

/* Rules as groups, those of names first, in front of the one of all modules. */
static int rules(struct raw_quant *r, struct quant_config *ret, struct err *e)
{
    int rc = 0;

    ret->n_groups = 0;
    for (int32_t k = 0; k < 2 * r->n_rules && rc == 0; k++) {
        struct raw_rule *rule = &r->rule[k % r->n_rules];
        if (rule->exact != (k < r->n_rules)) {
            continue;
        }
        struct quant_group *g = &ret->group[ret->n_groups++];
        *g = (struct quant_group){.left_alone = rule->left_alone, .targets = rule->targets};
        rule->targets = (struct quant_names){0};
        if (!rule->left_alone) {
            rc = integer_scheme(r, ret->method, rule->bits ? rule->bits : r->bits,
                                rule->group_size ? rule->group_size : r->group_size,
                                rule->has_sym ? rule->asymmetric : r->asymmetric, &g->scheme, e);
        }
    }
    ret->n_groups++;
    return rc;
}

static int integers(struct raw_quant *r, struct quant_config *ret, struct err *e)
{
    bool awq = ret->method == QUANT_AWQ;

    if (r->checkpoint_format[0] && strcmp(r->checkpoint_format, "gptq") != 0 &&
        strcmp(r->checkpoint_format, "gptq_v2") != 0) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: checkpoint_format '%s', supported are gptq and gptq_v2", KEY,
                       r->checkpoint_format);
    }
    ret->stores_less_one = !awq && strcmp(r->checkpoint_format, "gptq_v2") != 0;
    int rc = rules(r, ret, e);
    return rc < 0 ? rc
                  : integer_scheme(r, ret->method, r->bits, r->group_size,
                                   awq ? r->zero_point : r->asymmetric,
                                   &ret->group[ret->n_groups - 1].scheme, e);
}

static int modelopt(const struct raw_quant *r, struct quant_config *ret, struct err *e)
{
    static const struct quant_scheme OF_FP8 = {.format = FORMAT_FP8, .act = ACT_SCALE_TENSOR},
                                     OF_FP4 = {
                                         .format = FORMAT_FP4, .group_rows = 1, .group_cols = 16};
    bool mixed = strcmp(r->algo, "MIXED_PRECISION") == 0 && !r->other_algo[0];

    if (mixed || strcmp(r->algo, "FP8") == 0) {
        ret->group[0].scheme = OF_FP8;
        ret->group[1].scheme = OF_FP4; /* if mixed */
        ret->by_type = mixed;
        return 0;
    }
    bool fp4 = strcmp(r->algo, "NVFP4") == 0 || strcmp(r->algo, "W4A16_NVFP4") == 0;
    if (fp4 && (r->group_size == 0 || r->group_size == 16)) {
        ret->group[0].scheme = OF_FP4;
        return 0;
    }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: quant_algo '%s', supported are FP8 and NVFP4 in groups of 16", KEY,
                   r->other_algo[0] ? r->other_algo : r->algo);
}

/* AutoRound packs as others do: *r as if one of them had written it. */
static int autoround(struct raw_quant *r, struct err *e)
{
    static const char NAME[] = "auto_round:";
    static const struct {
        const char *packing, *method, *checkpoint_format;
    } AS[] = {{"auto_gptq", "gptq", ""},
              {"gptq", "gptq", ""},
              {"gptqmodel", "gptq", "gptq_v2"},
              {"auto_awq", "awq", ""},
              {"awq", "awq", ""}};
    const char *packing = r->packing;

    if (!*packing) {
        packing = strncmp(r->backend, NAME, strlen(NAME)) == 0 ? r->backend : "auto_round:gptq";
    }
    if (r->data_type[0] && strcmp(r->data_type, "int") != 0) {
        return err_set(e, ERR_UNSUPPORTED, "%s: data_type '%s', supported is int", KEY,
                       r->data_type);
    }
    if (r->transforms) {
        return err_set(e, ERR_UNSUPPORTED, "%s: rotation_config is not supported", KEY);
    }
    const char *word = strncmp(packing, NAME, strlen(NAME)) == 0 ? packing + strlen(NAME) : "";
    size_t len = strcspn(word, ":"); /* in older files a kernel's name follows */
    for (size_t i = 0; i < ARRAY_LEN(AS); i++) {
        if (strlen(AS[i].packing) == len && memcmp(word, AS[i].packing, len) == 0) {
            strcpy(r->method, AS[i].method);
            strcpy(r->checkpoint_format, AS[i].checkpoint_format);
            r->version[0] = '\0'; /* of the tool */
            r->zero_point = r->asymmetric;
            return 0;
        }
    }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: auto-round of packing_format '%s', supported are auto_round:auto_gptq, "
                   "auto_round:gptqmodel and auto_round:auto_awq",
                   KEY, packing);
}

static int find_method(const struct raw_quant *r, enum quant_method *ret, struct err *e)
{
    if (!r->method[0] && r->algo[0]) { /* as files of some versions of ModelOpt have it */
        *ret = QUANT_MODELOPT;
        return 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(METHODS); i++) {
        if (strcmp(r->method, METHODS[i]) == 0) {
            *ret = (enum quant_method)i;
            return 0;
        }
    }
    return err_set(e, ERR_UNSUPPORTED,
                   "%s: quant_method '%s', supported are compressed-tensors, fp8, gptq, awq, "
                   "modelopt, mxfp4, auto-round",
                   KEY, r->method);
}

/* *ret of *r, whose lists it takes over. */
static int derive(struct raw_quant *r, struct quant_config *ret, struct err *e)
{
    bool by_autoround =
        strcmp(r->method, "auto-round") == 0 || strcmp(r->method, "intel/auto-round") == 0;
    int rc = by_autoround ? autoround(r, e) : 0;

    rc = rc < 0 ? rc : find_method(r, &ret->method, e);
    if (rc < 0) {
        return rc;
    }
    ret->ignored = r->ignored;
    r->ignored = (struct quant_names){0};
    if (ret->method == QUANT_COMPRESSED_TENSORS) {
        return compressed_tensors(r, ret, e);
    }
    ret->n_groups = 1; /* without targets: every module */
    switch (ret->method) {
    case QUANT_FP8:
        return fp8(r, &ret->group[0].scheme, e);
    case QUANT_MODELOPT:
        return modelopt(r, ret, e);
    case QUANT_MXFP4:
        ret->group[0].scheme =
            (struct quant_scheme){.format = FORMAT_FP4, .group_rows = 1, .group_cols = 32};
        return 0;
    default:
        return integers(r, ret, e);
    }
}

/* Read the object named `key` among the members of one that was entered; with `in_text`
 * among those of its text_config. */
static void read_keyed(struct json *j, const char *key, bool in_text, struct raw_quant *r,
                       bool *ret_found)
{
    while (json_next_member(j)) {
        if (in_text && raw_is_text_part(j) && json_peek(j) == JSON_OBJECT) {
            json_enter_object(j);
            read_keyed(j, key, false, r, ret_found);
        } else if (!in_text && json_key_is(j, key) && !*ret_found && json_peek(j) != JSON_NULL) {
            *ret_found = true;
            read_object(j, r);
        } else {
            json_skip(j);
        }
    }
}

/* Both passes over the object named `key` of a JSON text. */
static int parse(struct quant_config *ret, bool *ret_found, const char *file, const char *key,
                 const char *method, const char *text, size_t len, struct err *e)
{
    struct json j;
    struct raw_quant *r = calloc(1, sizeof(*r));
    struct quant_config q = {0};
    bool found = false;
    int rc = 0;

    if (!r) {
        return err_nomem(e, KEY);
    }
    strcpy(r->method, method);
    for (int32_t in_text = 0; in_text < 2 && !found && rc == 0; in_text++) {
        json_init(&j, text, len, file, e);
        json_enter_object(&j);
        read_keyed(&j, key, in_text, r, &found);
        rc = json_finish(&j) ? 0 : ERR_INVALID;
    }
    if (rc == 0 && found && derive(r, &q, e) < 0) {
        rc = err_prefix(e, "%s", file);
    }
    raw_release(r);
    free(r);
    if (rc < 0) {
        quant_config_release(&q);
        return rc;
    }
    *ret = q;
    *ret_found = found;
    return 0;
}

int quant_config_parse(struct quant_config *ret, bool *ret_found, const char *text, size_t len,
                       struct err *e)
{
    return parse(ret, ret_found, "config.json", KEY, "", text, len, e);
}

int quant_config_parse_modelopt(struct quant_config *ret, const char *text, size_t len,
                                struct err *e)
{
    static const char FILE_NAME[] = "hf_quant_config.json";
    bool found;
    int rc = parse(ret, &found, FILE_NAME, "quantization", METHODS[QUANT_MODELOPT], text, len, e);

    return rc < 0 || found ? rc : err_set(e, ERR_INVALID, "%s: no 'quantization'", FILE_NAME);
}

void quant_config_release(struct quant_config *q)
{
    for (int32_t i = 0; i < q->n_groups; i++) {
        quant_names_release(&q->group[i].targets);
    }
    quant_names_release(&q->ignored);
    q->n_groups = 0;
}

int quant_config_scheme(const struct quant_config *q, const char *module, struct quant_scheme *ret,
                        struct err *e)
{
    static const char *const ALL = "Linear";
    const struct quant_group *g = NULL;

    for (int32_t i = 0; i < q->n_groups && !g; i++) {
        bool named = quant_names_match(&q->group[i].targets, module);
        g = named || q->group[i].targets.n == 0 ? &q->group[i] : NULL;
    }
    if (quant_names_match(&q->ignored, module) || (g && g->left_alone)) {
        return err_set(e, ERR_INVALID, "%s leaves %.200s alone, but its weight is quantised", KEY,
                       module);
    }
    for (int32_t i = 0; i < q->n_groups && !g; i++) { /* by class, after those by name */
        g = quant_names_match(&q->group[i].targets, ALL) ? &q->group[i] : NULL;
    }
    if (!g) {
        return err_set(e, ERR_INVALID, "%s says nothing of %.200s, whose weight is quantised", KEY,
                       module);
    }
    *ret = g->scheme;
    return 0;
}

int quant_config_scheme_of(const struct quant_config *q, const char *module, const char *type,
                           struct quant_scheme *ret, struct err *e)
{
    int rc = quant_config_scheme(q, module, ret, e);

    if (rc == 0 && q->by_type) {
        *ret = q->group[strcmp(type, "U8") == 0].scheme;
    }
    return rc;
}
