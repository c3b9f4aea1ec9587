/* What config.json says of a model's quantised weights: its `quantization_config`, or
 * ModelOpt's hf_quant_config.json.
 *
 * The configuration is not trusted, and it may be wrong: it says how to read tensors
 * that are quantised, while which ones are so is seen from the tensors. A module that
 * it lists as left alone must not be quantised. */
#ifndef QUIRE_MODELS_CHECKPOINT_QUANTISED_QUANT_CONFIG_H
#define QUIRE_MODELS_CHECKPOINT_QUANTISED_QUANT_CONFIG_H

#include "kernels/weight_format.h"

enum quant_method {
    QUANT_COMPRESSED_TENSORS,
    QUANT_FP8, /* of transformers: DeepSeek-V3, Qwen3-FP8 */
    QUANT_GPTQ,
    QUANT_AWQ,
    QUANT_MODELOPT,
    QUANT_MXFP4, /* gpt-oss */
};

enum {
    QUANT_MAX_GROUPS = 64,   /* config_groups, rules of GPTQ and AutoRound */
    QUANT_MAX_NAMES = 4096,  /* of one list */
    QUANT_MAX_PATTERNS = 64, /* of them, regular expressions */
    QUANT_NAME_BYTES = 256,  /* of one of its names */
};

/* Names of modules, or patterns of such. */
struct quant_names {
    char **name; /* [n] owned */
    int32_t n, cap, n_patterns;
};

/* How the weights of some modules are stored. */
struct quant_scheme {
    enum weight_format_id format;
    int32_t group_rows, group_cols; /* values that share a scale; 0: all */
    bool zeros;                     /* asymmetric: there are zero points */
    enum act_scheme act;            /* of activations, as in weight_scales */
};

struct quant_group {
    struct quant_scheme scheme;
    struct quant_names targets; /* "Linear", names, or patterns after "re:" */
    bool left_alone;            /* GPTQ, AutoRound: these modules are not quantised */
};

struct quant_config {
    enum quant_method method;
    struct quant_group group[QUANT_MAX_GROUPS];
    int32_t n_groups;
    struct quant_names ignored; /* modules that are stored as they were */
    bool stores_less_one;       /* GPTQ, first version: zero points are stored minus 1 */
    bool by_type; /* ModelOpt's mixed precision: the first group of weights in e4m3, the
                     second of those in pairs of e2m1 */
};

/* Read `text`, a config.json; *ret_found: it has a quantization_config, or its
 * text_config does. Without one *ret is empty. The caller releases *ret after
 * success. */
int quant_config_parse(struct quant_config *ret, bool *ret_found, const char *text, size_t len,
                       struct err *e);
/* The same of ModelOpt's hf_quant_config.json. */
int quant_config_parse_modelopt(struct quant_config *ret, const char *text, size_t len,
                                struct err *e);
void quant_config_release(struct quant_config *q);

/* How the weight of `module` ("model.layers.0.mlp.up_proj") is stored. ERR_INVALID: the
 * configuration leaves it alone, or says nothing of it. */
int quant_config_scheme(const struct quant_config *q, const char *module, struct quant_scheme *ret,
                        struct err *e);
/* The same of the weight whose codes have this type in the file ("U8"). */
int quant_config_scheme_of(const struct quant_config *q, const char *module, const char *type,
                           struct quant_scheme *ret, struct err *e);
/* As config.json names it. */
const char *quant_method_name(enum quant_method m);

/* Append a copy of `name`. ERR_FULL, ERR_NOMEM. */
int quant_names_add(struct quant_names *l, const char *name, struct err *e);
void quant_names_release(struct quant_names *l);
/* Whether one of the names is the module's, or one of the patterns matches it: "re:"
 * and a regular expression that matches from the beginning, or a name with '*' for any
 * text. */
bool quant_names_match(const struct quant_names *l, const char *module);

#endif
