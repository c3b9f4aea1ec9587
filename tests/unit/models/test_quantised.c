/* Quantised weights of safetensors files: their values, and what is refused.
 *
 *     build/tests/unit/models/test_quantised
 *
 * tests/golden/quant-* are by scripts/make-quantised-goldens, with a hash of the values
 * that the format's own decoder gives each weight.
 */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/checkpoint/quantised/quantised.h"

/* ---- values ---- */

static uint64_t fnv(const uint8_t *p, int64_t n)
{
    uint64_t h = 0xCBF29CE484222325u;

    for (int64_t i = 0; i < n; i++) {
        h = (h ^ p[i]) * 0x100000001B3u;
    }
    return h;
}

/* The values that a backend makes of codes and scales. */
static void values_of_codes(const struct quant_tensor *q, float *ret)
{
    void *copy = NULL;
    const uint8_t *codes = quant_tensor_codes(q, &copy);

    assert_non_null(codes);
    for (int64_t r = 0; r < q->rows; r++) {
        weight_scales_decode(q->format, &q->scales,
                             codes + weight_format_bytes(q->format, r * q->stride), r, q->cols,
                             ret + r * q->cols);
    }
    free(copy);
}

static void check_values(const char *golden, const struct checkpoint *c, const struct tensor *hash)
{
    const char *name = hash->name + strlen("decoded.");
    const struct tensor *t = checkpoint_find(c, name);
    uint64_t want;

    if (!t || !t->quantised) {
        fail_msg("%s: %s is not quantised", golden, name);
    }
    assert_true(t->n_dims >= 2 && t->dtype == DTYPE_F32 && !t->part);
    float *decoded = calloc(1, (size_t)t->n_bytes), *codes = calloc(1, (size_t)t->n_bytes);
    assert_true(decoded && codes);
    assert_int_equal(tensor_decode(t, decoded), 0);
    memcpy(&want, hash->data, sizeof(want));
    if (fnv((const uint8_t *)decoded, t->n_bytes) != want) {
        fail_msg("%s: %s decodes to other values than with its own package", golden, name);
    }
    if (!t->quantised->column_group && t->n_dims == 2) {
        values_of_codes(t->quantised, codes);
        for (int64_t i = 0; i < t->n_bytes / 4; i++) {
            /* a factor that is a rounded inverse changes the last bit */
            float slack = t->quantised->divisor > 0 ? fabsf(decoded[i]) * 0x1p-22f : 0;
            assert_true(fabsf(codes[i] - decoded[i]) <= slack);
        }
    }
    free(decoded);
    free(codes);
}

static void values_are_those_of_the_formats_own_decoders(void **state)
{
    (void)state;
    DIR *dir = opendir("tests/golden");
    int n_goldens = 0;

    assert_non_null(dir);
    for (const struct dirent *d; (d = readdir(dir)) != NULL;) {
        char path[512];
        struct checkpoint *c, *expected;
        struct err e;
        int n = 0;
        if (strncmp(d->d_name, "quant-", 6) != 0) {
            continue;
        }
        snprintf(path, sizeof(path), "tests/golden/%.200s", d->d_name);
        if (checkpoint_open(&c, path, &e) < 0 ||
            checkpoint_read_quantised(c, path, DTYPE_F32, &e) < 0) {
            fail_msg("%s: %s", path, e.text);
        }
        snprintf(path, sizeof(path), "tests/golden/%.200s/expected", d->d_name);
        assert_int_equal(checkpoint_open(&expected, path, &e), 0);
        for (int32_t i = 0; i < checkpoint_count(expected); i++) {
            const struct tensor *t = checkpoint_at(expected, i);
            if (strncmp(t->name, "decoded.", 8) == 0) {
                check_values(d->d_name, c, t);
                n++;
            }
        }
        assert_true(n >= 2);
        checkpoint_free(c);
        checkpoint_free(expected);
        n_goldens++;
    }
    closedir(dir);
    assert_true(n_goldens >= 20);
}

/* ---- small files ---- */

struct part {
    const char *name, *type;
    int64_t dim[4]; /* 0 ends them */
    const void *data;
    size_t n_bytes;
};

/* A checkpoint of the parts, up to the first without a name; *ret_file is the
 * caller's. */
static struct checkpoint *checkpoint_of(const struct part *p, char **ret_file)
{
    char header[4096] = "{", *file = calloc(1, 1 << 16);
    size_t at = 1, n_data = 0;
    struct checkpoint *c;
    struct err e;

    assert_non_null(file);
    for (const struct part *i = p; i->name; i++) {
        at += (size_t)snprintf(header + at, sizeof(header) - at,
                               "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i > p ? "," : "", i->name,
                               i->type);
        for (int k = 0; k < 4 && i->dim[k] > 0; k++) {
            at += (size_t)snprintf(header + at, sizeof(header) - at, "%s%lld", k ? "," : "",
                                   (long long)i->dim[k]);
        }
        at += (size_t)snprintf(header + at, sizeof(header) - at, "],\"data_offsets\":[%zu,%zu]}",
                               n_data, n_data + i->n_bytes);
        n_data += i->n_bytes;
    }
    at += (size_t)snprintf(header + at, sizeof(header) - at, "}");
    uint64_t n = at;
    memcpy(file, &n, 8);
    memcpy(file + 8, header, at);
    n_data = 8 + at;
    for (const struct part *i = p; i->name; i++) {
        memcpy(file + n_data, i->data, i->n_bytes);
        n_data += i->n_bytes;
    }
    assert_int_equal(checkpoint_new(&c, &e), 0);
    if (safetensors_parse(c, file, n_data, "test", &e) < 0) {
        fail_msg("%s", e.text);
    }
    *ret_file = file;
    return c;
}

/* `config` with the parts: fails with a text that has `why`; NULL: does not. */
static void try(const char *config, const struct part *p, const char *why)
{
    char text[2048], *file;
    struct quant_config q;
    bool found;
    struct err e = {0};

    snprintf(text, sizeof(text), "{\"quantization_config\":%s}", config);
    struct checkpoint *c = checkpoint_of(p, &file);
    int rc = quant_config_parse(&q, &found, text, strlen(text), &e);
    if (rc == 0) {
        assert_true(found);
        rc = checkpoint_add_quantised(c, &q, DTYPE_F32, &e);
        quant_config_release(&q);
    }
    if (!why && rc < 0) {
        fail_msg("%s", e.text);
    }
    if (why && (rc == 0 || !strstr(e.text, why))) {
        fail_msg("'%s' does not say '%s'", rc == 0 ? "" : e.text, why);
    }
    checkpoint_free(c);
    free(file);
}

#define FP8 "{\"quant_method\":\"fp8\",\"activation_scheme\":\"dynamic\"}"
#define CT(format, weights)                                         \
    "{\"quant_method\":\"compressed-tensors\",\"format\":\"" format \
    "\",\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":{" weights "}}}}"
#define INT4_G32 "\"num_bits\":4,\"type\":\"int\",\"strategy\":\"group\",\"group_size\":32"
#define INT8_CHANNEL "\"num_bits\":8,\"type\":\"int\",\"strategy\":\"channel\""
#define AUTOROUND "{\"quant_method\":\"auto-round\",\"bits\":4,\"group_size\":8,\"sym\":true"
#define MIXED(layer)                                                     \
    "{\"quant_method\":\"modelopt\",\"quant_algo\":\"MIXED_PRECISION\"," \
    "\"quantized_layers\":{\"a\":{\"quant_algo\":\"FP8\"},\"b\":" layer "}}"
#define GPTQ "{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":8,\"sym\":true}"

static const uint8_t BYTES[4096];
static const float ONES[64] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
static const int64_t SHAPE[2] = {2, 64};
static const uint16_t HALVES[64] = {0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00,
                                    0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00};

#define CODES(type, rows, cols, bytes) \
    {"m.weight", type, {rows, cols}, BYTES, (rows) * (cols) * (bytes)}
#define SCALE(rows, cols) {"m.weight_scale", "F32", {rows, cols}, ONES, (rows) * (cols) * 4}

static void configurations_are_checked(void **state)
{
    (void)state;
    const struct part fp8[] = {
        CODES("F8_E4M3", 4, 8, 1), {"m.weight_scale", "F32", {1}, ONES, 4}, {0}};
    const struct {
        const char *config, *why;
    } cases[] = {
        {FP8, NULL},
        {"{}", "quant_method ''"},
        {"{\"quant_method\":\"bitsandbytes\"}", "supported are compressed-tensors"},
        {"{\"quant_method\":7}", "quantization_config: quant_method must be a text"},
        {"{\"quant_method\":\"fp8\",\"activation_scheme\":null,\"ignored_layers\":null}", NULL},
        {"{\"quant_method\":\"fp8\",\"fmt\":[]}", "fmt must be a text"},
        {"{\"quant_method\":\"fp8\",\"ignored_layers\":\"m\"}", "ignored_layers must be a list"},
        {"{\"quant_method\":\"gptq\",\"bits\":\"4\"}", "bits must be a whole number"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"sym\":1}", "sym must be true or false"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"checkpoint_format\":2}", "must be a text"},
        {"{\"quant_method\":\"compressed-tensors\",\"config_groups\":[]}", "must be an object"},
        {CT("pack-quantized", INT4_G32 ",\"num_bits\":\"4\""), "num_bits must be a whole number"},
        {CT("pack-quantized", INT4_G32 ",\"symmetric\":0"), "symmetric must be true or false"},
        {CT("pack-quantized", INT4_G32 ",\"dynamic\":7"), "dynamic must be true or false"},
        {CT("pack-quantized", INT4_G32 ",\"dynamic\":\"local\""), "no codes of INT4"},
        {"[]", "config.json"},
        {"{\"quant_method\":\"fp8\",\"version\":\"0.10.3.dev47+ge463fe6\"}", NULL},
        {"{\"quant_method\":\"fp8\",\"activation_scheme\":\"none\"}", "activation_scheme 'none'"},
        {"{\"quant_method\":\"fp8\",\"activation_scheme\":\"dynamic, but a little longer\"}",
         "activation_scheme 'dynamic, but a"},
        {"{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\"}", "fmt 'e5m2'"},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[0,128]}", "2 sizes"},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128]}", "2 sizes"},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[1,2,3]}", "2 sizes"},
        {"{\"quant_method\":\"fp8\",\"modules_to_not_convert\":[\"m\"]}", "leaves m alone"},
        {"{\"quant_method\":\"fp8\",\"modules_to_not_convert\":[\"re:^m$\"]}", "leaves m alone"},
        {"{\"quant_method\":\"fp8\",\"modules_to_not_convert\":[\"re:(\",\"mm\",\"re:.m\"]}", NULL},
        {"{\"quant_method\":\"fp8\",\"exclude_modules\":[\"*\"]}", "leaves m alone"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":32}", "no weight is stored so"},
        {"{\"quant_method\":\"gptq\",\"bits\":3,\"group_size\":32}", "3 bits"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":0}", "group_size 0"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":-2}", "group_size -2"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":9}", "group_size 9"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":8,\"dynamic\":{\"a\":{\"bits\":3}}}",
         "3 bits"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":8,\"dynamic\":{\"a\":[]}}",
         "a must be an object"},
        {"{\"quant_method\":\"gptq\",\"bits\":4,\"checkpoint_format\":\"marlin\"}", "'marlin'"},
        {"{\"quant_method\":\"awq\",\"bits\":8,\"group_size\":32}", "8 bits"},
        {AUTOROUND ",\"packing_format\":\"auto_round:llm_compressor\"}",
         "'auto_round:llm_compressor'"},
        {AUTOROUND ",\"packing_format\":\"auto_round\"}", "packing_format 'auto_round'"},
        {AUTOROUND ",\"data_type\":\"mx_fp\"}", "data_type 'mx_fp'"},
        {AUTOROUND ",\"extra_config\":{\"a\":{\"data_type\":\"nv_fp\"}}}", "data_type 'nv_fp'"},
        {AUTOROUND ",\"extra_config\":{\"a\":{\"bits\":2}}}", "2 bits"},
        {AUTOROUND ",\"rotation_config\":{\"block_size\":32}}", "rotation_config"},
        {"{\"quant_method\":\"awq\",\"bits\":4,\"version\":\"gemv\"}", "version 'gemv'"},
        {"{\"quant_method\":\"modelopt\",\"quant_algo\":\"W4A8_AWQ\"}", "quant_algo 'W4A8_AWQ'"},
        {MIXED("{\"quant_algo\":\"FP8_PB_WO\"}"), "quant_algo 'FP8_PB_WO'"},
        {MIXED("{\"quant_algo\":\"NVFP4\",\"group_size\":32}"), "quant_algo 'NVFP4'"},
        {MIXED("7"), "must be an object"},
        {"{\"quant_method\":\"compressed-tensors\"}", "config_groups is missing"},
        {"{\"quant_method\":\"compressed-tensors\",\"format\":\"x\",\"config_groups\":{\"g\":{}}}",
         "format 'x'"},
        {CT("pack-quantized", "\"num_bits\":3,\"type\":\"int\""), "weights of 3 bits"},
        {CT("pack-quantized", "\"num_bits\":4,\"type\":\"int\",\"strategy\":\"x\""), "'x'"},
        {CT("pack-quantized", "\"num_bits\":4,\"type\":\"int\",\"strategy\":\"group\""),
         "group_size 0"},
        {CT("pack-quantized", INT4_G32), "no codes of INT4"},
        {"{\"quant_method\":\"compressed-tensors\",\"format\":\"int-quantized\",\"config_groups\":"
         "{\"g\":{\"targets\":[\"re:x\"],\"weights\":{" INT8_CHANNEL "}}}}",
         "says nothing of m"},
        {"{\"quant_method\":\"compressed-tensors\",\"sparsity_config\":{\"format\":\"24\"}}",
         "sparsity_config"},
        {"{\"quant_method\":\"compressed-tensors\",\"transform_config\":{\"a\":{}}}",
         "transform_config"},
    };

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        try(cases[i].config, fp8, cases[i].why);
    }
}

static void groups_are_chosen_by_name_then_by_class(void **state)
{
    (void)state;
    static const char CONFIG[] =
        "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
        "\"mixed-precision\",\"ignore\":[\"re:.*gate\"],\"config_groups\":{"
        "\"a\":{\"format\":\"int-quantized\",\"targets\":[\"Linear\"],\"weights\":{" INT8_CHANNEL
        "}},"
        "\"b\":{\"format\":\"pack-quantized\",\"targets\":[\"re:.*down_proj$\"],"
        "\"weights\":{" INT4_G32 "}}}}}";
    struct quant_config q;
    struct quant_scheme s;
    bool found;
    struct err e;
    assert_int_equal(quant_config_parse(&q, &found, CONFIG, strlen(CONFIG), &e), 0);
    assert_int_equal(quant_config_scheme(&q, "layers.0.up_proj", &s, &e), 0);
    assert_true(s.format == FORMAT_INT8 && s.group_rows == 1 && s.group_cols == 0);
    assert_int_equal(quant_config_scheme(&q, "layers.0.down_proj", &s, &e), 0);
    assert_true(s.format == FORMAT_INT4 && s.group_rows == 1 && s.group_cols == 32);
    assert_int_equal(quant_config_scheme(&q, "layers.0.gate", &s, &e), ERR_INVALID);
    quant_config_release(&q);
}

/* As GPTQModel's dynamic_get: the first that matches from the beginning. */
static void the_first_rule_of_gptq_that_matches_holds(void **state)
{
    (void)state;
    static const char CONFIG[] =
        "{\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":128,"
        "\"sym\":true,\"dynamic\":{"
        "\"-:.*attn.*\":{},\"-:.*shared_expert\\\\.\":{},"
        "\"+:.*\\\\.18\\\\..*down\":{\"bits\":8,\"group_size\":64,\"sym\":false,\"desc_act\":true},"
        "\".*\\\\.18\\\\.\":{\"group_size\":32},"
        "\"-:.*\\\\.18\\\\..*up\":{},\"lm_head\":{}}}}";
    const struct {
        const char *module;
        int32_t cols; /* 0: left alone */
        enum weight_format_id format;
        bool zeros;
    } cases[] = {{"layers.18.self_attn.q_proj", 0, FORMAT_INT4, false},
                 {"layers.1.mlp.shared_expert.up_proj", 0, FORMAT_INT4, false},
                 {"layers.1.mlp.shared_expert_gate", 128, FORMAT_INT4, false},
                 {"layers.18.mlp.down_proj", 64, FORMAT_INT8, true},
                 {"layers.18.mlp.up_proj", 32, FORMAT_INT4, false},
                 {"layers.1.mlp.down_proj", 128, FORMAT_INT4, false},
                 {"lm_head", 128, FORMAT_INT4, false}};
    struct quant_config q;
    struct quant_scheme s;
    bool found;
    struct err e;

    assert_int_equal(quant_config_parse(&q, &found, CONFIG, strlen(CONFIG), &e), 0);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int rc = quant_config_scheme(&q, cases[i].module, &s, &e);
        if (cases[i].cols == 0) {
            assert_int_equal(rc, ERR_INVALID);
            assert_non_null(strstr(e.text, "alone"));
            continue;
        }
        assert_int_equal(rc, 0);
        assert_int_equal(s.format, cases[i].format);
        assert_int_equal(s.group_cols, cases[i].cols);
        assert_int_equal(s.zeros, cases[i].zeros);
    }
    quant_config_release(&q);
}

/* Names count before patterns, which match anywhere. */
static void autoround_packs_as_gptq_or_awq_does(void **state)
{
    (void)state;
    static const char FORM[] =
        "{\"quantization_config\":{\"quant_method\":\"%s\",\"bits\":4,\"group_size\":128,"
        "\"sym\":%s,\"data_type\":\"int\",%s,\"extra_config\":{"
        "\".*layers\\\\.1\\\\..*\":{\"bits\":16},\"down.*\":{\"group_size\":32},"
        "\"layers.0.a\":{\"bits\":16,\"data_type\":\"float\"},"
        "\"layers.1.b\":{\"group_size\":64,\"sym\":false},\"layers.0.c\":{\"bits\":16}}}}";
    const struct {
        const char *method, *sym, *more;
        enum quant_method read_as;
        bool less_one, zeros;
    } files[] = {{"auto-round", "true", "\"packing_format\":\"auto_round:auto_gptq\"", QUANT_GPTQ,
                  true, false},
                 {"auto-round", "true", "\"backend\":\"auto\"", QUANT_GPTQ, true, false},
                 {"intel/auto-round", "true", "\"backend\":\"auto_round:gptq:exllamav2\"",
                  QUANT_GPTQ, true, false},
                 {"auto-round", "false", "\"packing_format\":\"auto_round:gptqmodel\"", QUANT_GPTQ,
                  false, true},
                 {"auto-round", "false", "\"packing_format\":\"auto_round:auto_awq\"", QUANT_AWQ,
                  false, true},
                 {"auto-round", "true", "\"packing_format\":\"auto_round:auto_awq\"", QUANT_AWQ,
                  false, false}};
    const struct {
        const char *module;
        int32_t cols; /* 0: left alone */
        int8_t zeros; /* -1: as all */
    } cases[] = {{"layers.0.a", 0, 0},          {"layers.0.c", 0, 0}, {"layers.0.b", 128, -1},
                 {"layers.1.b", 64, 1},         {"layers.1.c", 0, 0}, {"layers.10.c", 128, -1},
                 {"layers.2.down_proj", 32, -1}};
    struct quant_config q;
    struct quant_scheme s;
    bool found;
    struct err e;
    char text[1024];

    for (size_t f = 0; f < ARRAY_LEN(files); f++) {
        int len = snprintf(text, sizeof(text), FORM, files[f].method, files[f].sym, files[f].more);
        if (quant_config_parse(&q, &found, text, (size_t)len, &e) < 0) {
            fail_msg("%s: %s", text, e.text);
        }
        assert_int_equal(q.method, files[f].read_as);
        assert_int_equal(q.stores_less_one, files[f].less_one);
        for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
            int rc = quant_config_scheme(&q, cases[i].module, &s, &e);
            assert_int_equal(rc, cases[i].cols > 0 ? 0 : ERR_INVALID);
            if (rc == 0) {
                assert_int_equal(s.format, FORMAT_INT4);
                assert_int_equal(s.group_cols, cases[i].cols);
                assert_int_equal(s.zeros, cases[i].zeros < 0 ? files[f].zeros : cases[i].zeros);
            }
        }
        quant_config_release(&q);
    }
}

/* As Kimi-K2.5's has it; that of the whole counts first. */
static void a_text_part_may_have_the_configuration(void **state)
{
    (void)state;
    static const char INNER[] =
        "\"text_config\":{\"hidden_size\":8,\"quantization_config\":" FP8 "}",
                      OUTER[] = "\"quantization_config\":{\"quant_method\":\"awq\",\"bits\":4,"
                                "\"group_size\":32}";
    const struct {
        const char *first, *second;
        enum quant_method want;
    } cases[] = {{INNER, "\"quantization_config\":null", QUANT_FP8},
                 {"\"a\":1", INNER, QUANT_FP8},
                 {"\"a\":1", "\"llm_config\":{\"quantization_config\":" FP8 "}", QUANT_FP8},
                 {INNER, OUTER, QUANT_AWQ},
                 {OUTER, INNER, QUANT_AWQ}};
    struct quant_config q;
    bool found;
    struct err e;

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char text[512];
        snprintf(text, sizeof(text), "{%s,%s}", cases[i].first, cases[i].second);
        assert_int_equal(quant_config_parse(&q, &found, text, strlen(text), &e), 0);
        assert_true(found && q.method == cases[i].want);
        quant_config_release(&q);
    }
    assert_int_equal(quant_config_parse(&q, &found, "{\"text_config\":{}}", 18, &e), 0);
    assert_false(found);
}

static void patterns_of_any_cost_end(void **state)
{
    (void)state;
    struct quant_names l = {0};
    struct err e;
    assert_int_equal(quant_names_add(&l, "re:(a+)+$", &e), 0);
    assert_false(quant_names_match(&l, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"));
    assert_true(quant_names_match(&l, "aaa"));
    for (int i = 1; i < QUANT_MAX_PATTERNS; i++) {
        assert_int_equal(quant_names_add(&l, "re:x", &e), 0);
    }
    assert_int_equal(quant_names_add(&l, "re:x", &e), ERR_FULL);
    quant_names_release(&l);
}

static void parts_of_fp8_and_int8_are_checked(void **state)
{
    (void)state;
    static const float BAD[] = {NAN, INFINITY, 0};
    static const char *const SAYS[] = {"is nan", "is inf", "is 0"};
    const struct part lacks[] = {CODES("F8_E4M3", 4, 8, 1), {0}},
                      wide[] = {CODES("F8_E4M3", 4, 8, 1), SCALE(2, 2), {0}},
                      typed[] = {CODES("F8_E4M3", 4, 8, 1),
                                 {"m.weight_scale", "I32", {1}, ONES, 4},
                                 {0}},
                      e5m2[] = {CODES("F8_E5M2", 4, 8, 1), SCALE(1, 1), {0}},
                      row[] = {CODES("I8", 4, 8, 1), SCALE(4, 1), {0}},
                      cube[] = {{"m.weight", "F8_E4M3", {2, 2, 8}, BYTES, 32}, SCALE(1, 1), {0}};
    try(FP8, lacks, "lacks weight_scale");
    try(FP8, wide, "is [2, 2], must be [1, 1]");
    try(FP8, typed, "is I32, must be F32");
    try(FP8, e5m2, "F8_E5M2");
    try(FP8, cube, "3 axes");
    try(CT("int-quantized", INT8_CHANNEL), row, NULL);
    try(CT("int-quantized", INT8_CHANNEL ",\"symmetric\":false"), row, "lacks weight_zero_point");
    for (int zeros = 0; zeros < 2; zeros++) { /* symmetric codes with zero points in the file */
        const struct part symmetric[] = {
            CODES("I8", 4, 8, 1),
            SCALE(4, 1),
            {"m.weight_zero_point", "I8", {4, 1}, zeros ? (const void *)"\0\0\1\0" : BYTES, 4},
            {0}};
        try(CT("int-quantized", INT8_CHANNEL), symmetric, zeros ? "says that the codes are" : NULL);
    }
    for (size_t i = 0; i < ARRAY_LEN(BAD); i++) {
        const struct part bad[] = {
            CODES("F8_E4M3", 4, 8, 1), {"m.weight_scale", "F32", {1}, &BAD[i], 4}, {0}};
        const struct part input[] = {
            CODES("F8_E4M3", 4, 8, 1), SCALE(1, 1), {"m.input_scale", "F32", {1}, &BAD[i], 4}, {0}};
        try(FP8, bad, SAYS[i]);
        try("{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\"}", input, SAYS[i]);
    }
    static const float GREAT[] = {0x1p119f, 0x1p120f};
    for (size_t i = 0; i < ARRAY_LEN(GREAT); i++) { /* 448 * 2^119 is below 2^128 */
        const struct part great[] = {
            CODES("F8_E4M3", 4, 8, 1), {"m.weight_scale", "F32", {1}, &GREAT[i], 4}, {0}};
        try(FP8, great, i ? "scales make values up to" : NULL);
    }
    const struct part row_scale[] = {CODES("F8_E4M3", 4, 8, 1), SCALE(1, 1), {0}};
    try("{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\"}", row_scale,
        "lacks input_scale");
}

static void codes_that_are_nan_are_refused_by_row_and_column(void **state)
{
    (void)state;
    static uint8_t codes[4 * 24];
    const struct part p[] = {{"m.weight", "F8_E4M3", {4, 24}, codes, sizeof(codes)},
                             {"m.weight_scale", "F32", {1}, ONES, 4},
                             {0}};
    static const char CONFIG[] = "{\"quantization_config\":" FP8 "}";
    struct quant_config config;
    bool found;
    struct err e = {0};

    assert_int_equal(quant_config_parse(&config, &found, CONFIG, strlen(CONFIG), &e), 0);
    for (int32_t bad = 0; bad < 3; bad++) {
        char *file;
        memset(codes, 0, sizeof(codes));
        codes[2 * 24 + 17] = (uint8_t[]){0x7E, 0x7F, 0xFF}[bad];
        struct checkpoint *c = checkpoint_of(p, &file);
        assert_int_equal(checkpoint_add_quantised(c, &config, DTYPE_F32, &e), 0);
        const struct tensor *t = checkpoint_find(c, "m.weight");
        const uint8_t *at = t->quantised->codes;
        /* all, the right half of the last rows, what is left of it or above */
        assert_int_equal(tensor_check_all(t, &e), bad ? ERR_INVALID : 0);
        assert_int_equal(tensor_check(t, at + 24 + 12, 3, 12, 24, &e), bad ? ERR_INVALID : 0);
        assert_true(!bad ||
                    strstr(e.text, "m.weight (FP8): the code in row 2, column 17 is no number"));
        assert_int_equal(tensor_check(t, at, 4, 17, 24, &e), 0);
        assert_int_equal(tensor_check(t, at, 2, 24, 24, &e), 0);
        checkpoint_free(c);
        free(file);
    }
    quant_config_release(&config);
}

static void parts_of_packed_codes_are_checked(void **state)
{
    (void)state;
    static const int64_t LESS[2] = {2, 56}, NONE[2] = {0, 64}, HUGE_COLS[2] = {2, INT64_MAX};
    static const int32_t ORDER[64] = {[5] = 2}, FAR[64] = {[5] = -1}, MIXED[64] = {[7] = 1};
#define PACKED(shape)                                                                           \
    {"m.weight_packed", "I32", {2, 8}, BYTES, 64}, {"m.weight_scale", "F32", {2, 2}, ONES, 16}, \
    {                                                                                           \
        "m.weight_shape", "I64", {2}, shape, 16                                                 \
    }
    const struct part good[] = {PACKED(SHAPE), {0}}, less[] = {PACKED(LESS), {0}},
                      none[] = {PACKED(NONE), {0}}, most[] = {PACKED(HUGE_COLS), {0}},
                      twice[] = {PACKED(SHAPE), CODES("F32", 2, 2, 4), {0}},
                      far[] = {PACKED(SHAPE), {"m.weight_g_idx", "I32", {64}, ORDER, 256}, {0}},
                      below[] = {PACKED(SHAPE), {"m.weight_g_idx", "I32", {64}, FAR, 256}, {0}},
                      few[] = {PACKED(SHAPE), {"m.weight_g_idx", "I32", {60}, MIXED, 240}, {0}},
                      mixed[] = {PACKED(SHAPE), {"m.weight_g_idx", "I32", {64}, MIXED, 256}, {0}},
                      no_shape[] = {
                          {"m.weight_packed", "I32", {2, 8}, BYTES, 64}, SCALE(2, 2), {0}};
    const char *config = CT("pack-quantized", INT4_G32);
    try(config, good, NULL);
    try(config, mixed, NULL);
    try(config, less, "does not hold [2, 56]");
    try(config, none, "does not hold [0, 64]");
    try(config, most, "does not hold");
    try(config, twice, "appears twice");
    try(config, far, "column 5 is in group 2 of 2");
    try(config, below, "column 5 is in group -1 of 2");
    try(config, few, "is [60, 1], must be [64, 1]");
    try(config, no_shape, "lacks weight_shape");
}

/* Zero points of symmetric codes in four bits: 0 is stored as 8. */
static void packed_zero_points_of_symmetric_codes_are_zero(void **state)
{
    (void)state;
    static const uint32_t ZERO[2] = {0x88888888, 0x88888888}, OTHER[2] = {0x88888888, 0x88878888};
    const struct part zero[] = {
        PACKED(SHAPE), {"m.weight_zero_point", "I32", {1, 2}, ZERO, 8}, {0}};
    const struct part other[] = {
        PACKED(SHAPE), {"m.weight_zero_point", "I32", {1, 2}, OTHER, 8}, {0}};

    try(CT("pack-quantized", INT4_G32), zero, NULL);
    try(CT("pack-quantized", INT4_G32), other, "m.weight_zero_point has zero points");
    try(CT("pack-quantized", INT4_G32 ",\"symmetric\":false"), other, NULL);
}

/* A model of BF16 whose groups are no neighbours is decoded to F16, unless a code times
 * its scale could be beyond it. */
static void finer_types_hold_what_is_decoded(void **state)
{
    (void)state;
    static const int32_t MIXED[64] = {[7] = 1},
                         PLAIN[64] = {[32] = 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                      1,        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const float LARGE[4] = {1, 1, 4093, 1}, BEYOND[4] = {1, 1, 4094, 1};
    const struct {
        const int32_t *order;
        const float *scale;
        enum dtype want;
    } CASES[] = {{MIXED, ONES, DTYPE_F16},
                 {MIXED, LARGE, DTYPE_F16},
                 {MIXED, BEYOND, DTYPE_BF16},
                 {PLAIN, ONES, DTYPE_BF16}};

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        const struct part p[] = {{"m.weight_packed", "I32", {2, 8}, BYTES, 64},
                                 {"m.weight_scale", "F32", {2, 2}, CASES[i].scale, 16},
                                 {"m.weight_shape", "I64", {2}, SHAPE, 16},
                                 {"m.weight_g_idx", "I32", {64}, CASES[i].order, 256},
                                 {0}};
        static const char CONFIG[] = "{\"quantization_config\":" CT("pack-quantized", INT4_G32) "}";
        struct quant_config q;
        bool found;
        struct err e = {0};
        char *file;
        struct checkpoint *c = checkpoint_of(p, &file);
        assert_int_equal(quant_config_parse(&q, &found, CONFIG, strlen(CONFIG), &e), 0);
        assert_int_equal(checkpoint_add_quantised(c, &q, DTYPE_BF16, &e), 0);
        checkpoint_decode_finer(c);
        assert_int_equal(checkpoint_find(c, "m.weight")->dtype, CASES[i].want);
        quant_config_release(&q);
        checkpoint_free(c);
        free(file);
    }
}

static void parts_of_gptq_and_awq_are_checked(void **state)
{
    (void)state;
#define GPTQ_CODES {"m.qweight", "I32", {2, 8}, BYTES, 64} /* [16, 8] */
#define GPTQ_SCALES {"m.scales", "F16", {2, 8}, HALVES, 32}
    const struct part good[] = {GPTQ_CODES, GPTQ_SCALES, {0}},
                      zeros[] = {GPTQ_CODES,
                                 GPTQ_SCALES,
                                 {"m.qzeros", "I32", {2, 1}, BYTES, 8},
                                 {0}},
                      few[] = {GPTQ_CODES, GPTQ_SCALES, {"m.qzeros", "I32", {1, 1}, BYTES, 4}, {0}},
                      flat[] = {{"m.qweight", "I32", {16}, BYTES, 64}, GPTQ_SCALES, {0}},
                      typed[] = {{"m.qweight", "I16", {2, 8}, BYTES, 32}, GPTQ_SCALES, {0}},
                      bare[] = {GPTQ_CODES, {0}},
                      awq[] = {{"m.qweight", "I32", {16, 1}, BYTES, 64}, GPTQ_SCALES, {0}};
    try(GPTQ, good, NULL);
    try(GPTQ, zeros, NULL);
    try(GPTQ, few, "is [1, 1], must be [2, 1]");
    try(GPTQ, flat, "is no matrix");
    try(GPTQ, typed, "is I16, must be I32");
    try(GPTQ, bare, "lacks scales");
    try("{\"quant_method\":\"gptq\",\"bits\":4,\"group_size\":16}", good, "must be [1, 8]");
    try("{\"quant_method\":\"awq\",\"bits\":4,\"group_size\":8,\"zero_point\":false}", awq, NULL);
    try("{\"quant_method\":\"awq\",\"bits\":4,\"group_size\":8,\"zero_point\":true}", awq,
        "lacks qzeros");
}

/* Experts of gpt-oss: [experts, rows, groups, 16], decoded as [experts, columns,
 * rows]. */
static void stacked_experts_of_mxfp4_are_decoded_transposed(void **state)
{
    (void)state;
    enum { EXPERTS = 2, ROWS = 3, GROUPS = 2, COLS = 32 * GROUPS };
    static uint8_t blocks[EXPERTS * ROWS * GROUPS * 16], scales[EXPERTS * ROWS * GROUPS];
    const struct part p[] = {
        {"e_blocks", "U8", {EXPERTS, ROWS, GROUPS, 16}, blocks, sizeof(blocks)},
        {"e_scales", "U8", {EXPERTS, ROWS, GROUPS}, scales, sizeof(scales)},
        {0}};
    static const char CONFIG[] = "{\"quantization_config\":{\"quant_method\":\"mxfp4\"}}";
    float got[EXPERTS * ROWS * COLS];
    struct quant_config q;
    bool found;
    struct err e;
    char *file;
    for (size_t i = 0; i < sizeof(blocks); i++) {
        blocks[i] = (uint8_t)(i * 37 + i / 16);
    }
    for (size_t i = 0; i < sizeof(scales); i++) {
        scales[i] = (uint8_t)(120 + i);
    }
    struct checkpoint *c = checkpoint_of(p, &file);
    assert_int_equal(quant_config_parse(&q, &found, CONFIG, strlen(CONFIG), &e), 0);
    assert_int_equal(checkpoint_add_quantised(c, &q, DTYPE_F32, &e), 0);
    const struct tensor *t = checkpoint_find(c, "e");
    assert_true(t && t->n_dims == 3 && t->dim[0] == EXPERTS && t->dim[1] == COLS &&
                t->dim[2] == ROWS);
    assert_int_equal(tensor_decode(t, got), 0);
    for (int i = 0; i < EXPERTS * ROWS * COLS; i++) {
        int row = i / COLS, col = i % COLS, group = row * GROUPS + col / 32;
        int byte = blocks[group * 16 + col % 32 / 2];
        float want = weight_code_value(FORMAT_FP4, (uint8_t)(col % 2 ? byte >> 4 : byte & 15)) *
                     ldexpf(1, scales[group] - 127);
        assert_true(got[(row / ROWS * COLS + col) * ROWS + row % ROWS] == want);
    }
    quant_config_release(&q);
    checkpoint_free(c);
    scales[3] = 255;
    try("{\"quant_method\":\"mxfp4\"}", p, "scale 3 is nan");
    free(file);
}

/* Groups of several formats without a name of each: the tensors tell. */
static void groups_of_mixed_precision_need_no_format(void **state)
{
    (void)state;
    static const uint8_t BYTES[512] = {0};
    static const float ONES[4] = {1, 1, 1, 1};
    const struct part parts[] = {{"a.weight", "F8_E4M3", {4, 16}, BYTES, 64},
                                 {"a.weight_scale", "F32", {4, 1}, ONES, 16},
                                 {"b.weight", "I8", {4, 16}, BYTES, 64},
                                 {"b.weight_scale", "F32", {4, 1}, ONES, 16},
                                 {0}};
#define GROUP(name, target, type)                                                             \
    "\"" name "\":{\"targets\":[\"" target "\"],\"weights\":{\"num_bits\":8,\"type\":\"" type \
    "\",\"strategy\":\"channel\"}}"
#define MIX(one, other)                                                                 \
    "{\"quant_method\":\"compressed-tensors\",\"format\":\"mixed-precision\",\"config_" \
    "groups\":{" one "," other "}}"
    try(MIX(GROUP("g0", "re:a", "float"), GROUP("g1", "Linear", "int")), parts, NULL);
    try(MIX(GROUP("g0", "re:a", "int"), GROUP("g1", "Linear", "int")), parts,
        "a.weight is F8_E4M3");
#undef GROUP
#undef MIX
}

/* As MiniMax-M2's: PyTorch's name of e4m3. */
static void e4m3_has_two_names(void **state)
{
    (void)state;
    static const uint8_t BYTES[512] = {0};
    static const float ONE[1] = {1};
    const struct part parts[] = {{"a.weight", "F8_E4M3", {4, 16}, BYTES, 64},
                                 {"a.weight_scale_inv", "F32", {1, 1}, ONE, 4},
                                 {0}};
#define FMT(fmt)                                                                       \
    "{\"activation_scheme\":\"dynamic\",\"fmt\":\"" fmt "\",\"quant_method\":\"fp8\"," \
    "\"weight_block_size\":[128,128],\"modules_to_not_convert\":[\"gate\",\"lm_head\"]}"
    try(FMT("float8_e4m3fn"), parts, NULL);
    try(FMT("e4m3"), parts, NULL);
    try(FMT("float8_e5m2"), parts, "fmt 'float8_e5m2'");
#undef FMT
}

/* Which layer is which is seen from the tensors, whose names may have another prefix
 * than in the configuration. */
static void mixed_precision_is_seen_from_the_tensors(void **state)
{
    (void)state;
    static const uint8_t BYTES[512] = {0};
    static const float ONE[1] = {1};
    static const uint8_t E4M3_ONE[4] = {0x38, 0x38, 0x38, 0x38};
    const struct part both[] = {{"a.weight", "F8_E4M3", {4, 16}, BYTES, 64},
                                {"a.weight_scale", "F32", {1}, ONE, 4},
                                {"a.input_scale", "F32", {1}, ONE, 4},
                                {"b.weight", "U8", {4, 8}, BYTES, 32},
                                {"b.weight_scale", "F8_E4M3", {4, 1}, E4M3_ONE, 4},
                                {"b.weight_scale_2", "F32", {1}, ONE, 4},
                                {0}};
    const struct part blocks[] = {{"a.weight", "F8_E4M3", {4, 16}, BYTES, 64},
                                  {"a.weight_scale", "F32", {4, 1}, BYTES, 16},
                                  {0}};
    try(MIXED("{\"quant_algo\":\"NVFP4\",\"group_size\":16}"), both, NULL);
    try(MIXED("{\"quant_algo\":\"W4A16_NVFP4\"}"), both, NULL);
    try("{\"quant_method\":\"modelopt\",\"quant_algo\":\"W4A16_NVFP4\"}", both + 3, NULL);
    try("{\"quant_method\":\"modelopt\",\"quant_algo\":\"FP8\"}", both, "b.weight is U8");
    try(MIXED("{\"quant_algo\":\"NVFP4\"}"), blocks, "must be [1, 1]");
    /* without a method, and as in hf_quant_config.json */
    try("{\"quant_algo\":\"W4A16_NVFP4\",\"producer\":{\"name\":\"modelopt\"}}", both + 3, NULL);
    try("{\"producer\":{\"name\":\"modelopt\"},\"quantization\":{\"quant_algo\":\"NVFP4\"}}",
        both + 3, NULL);
    try("{\"quantization\":{\"quantization\":{\"quant_algo\":\"NVFP4\"}}}", both + 3,
        "quant_method ''");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_those_of_the_formats_own_decoders),
        cmocka_unit_test(configurations_are_checked),
        cmocka_unit_test(groups_are_chosen_by_name_then_by_class),
        cmocka_unit_test(the_first_rule_of_gptq_that_matches_holds),
        cmocka_unit_test(autoround_packs_as_gptq_or_awq_does),
        cmocka_unit_test(a_text_part_may_have_the_configuration),
        cmocka_unit_test(patterns_of_any_cost_end),
        cmocka_unit_test(parts_of_fp8_and_int8_are_checked),
        cmocka_unit_test(codes_that_are_nan_are_refused_by_row_and_column),
        cmocka_unit_test(parts_of_packed_codes_are_checked),
        cmocka_unit_test(finer_types_hold_what_is_decoded),
        cmocka_unit_test(packed_zero_points_of_symmetric_codes_are_zero),
        cmocka_unit_test(parts_of_gptq_and_awq_are_checked),
        cmocka_unit_test(groups_of_mixed_precision_need_no_format),
        cmocka_unit_test(e4m3_has_two_names),
        cmocka_unit_test(mixed_precision_is_seen_from_the_tensors),
        cmocka_unit_test(stacked_experts_of_mxfp4_are_decoded_transposed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
