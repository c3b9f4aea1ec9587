/* What `quire quantize` writes: its weights as compressed-tensors reads them, and the
 * scales of activations that a text gives.
 *
 *     build/tests/unit/models/test_quantise
 *
 * tests/golden/quantize is by scripts/make-quantised-goldens --written: a model, and
 * hashes of the weights that transformers and compressed-tensors read from the
 * directories written of it.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "models/checkpoint/quantised/quantised.h"
#include "models/families/layers.h"
#include "models/quantise/inputs.h"
#include "models/quantise/quantise.h"

#define OK(call, e)                              \
    do {                                         \
        if ((call) < 0)                          \
            fail_msg("%s: %s", #call, (e).text); \
    } while (0)

#define SOURCE "tests/golden/quantize/source"

enum { TOKENS = 96, VOCAB = 67 };

/* ---- directories ---- */

struct written {
    char parent[64], dir[96];
    char *report; /* owned, as is the next one */
    struct checkpoint *c;
};

static void written_release(struct written *w)
{
    static const char *const FILES[] = {"config.json", "model.safetensors"};
    char path[160];

    checkpoint_free(w->c);
    free(w->report);
    for (size_t i = 0; i < ARRAY_LEN(FILES); i++) {
        snprintf(path, sizeof(path), "%s/%s", w->dir, FILES[i]);
        unlink(path);
    }
    rmdir(w->dir);
    rmdir(w->parent);
}

/* Quantise `from`; the result of quantise_directory, after which w->c is open. */
static int written_make(struct written *w, const char *from, const struct quantise_options *o,
                        struct err *e)
{
    size_t n;

    *w = (struct written){.parent = "/tmp/quire-test-quantise-XXXXXX"};
    assert_non_null(mkdtemp(w->parent));
    snprintf(w->dir, sizeof(w->dir), "%s/to", w->parent);
    FILE *report = open_memstream(&w->report, &n);
    assert_non_null(report);
    int rc = quantise_directory(from, w->dir, o, report, e);
    fclose(report);
    if (rc == 0) {
        OK(checkpoint_open(&w->c, w->dir, e), *e);
        OK(checkpoint_read_quantised(w->c, w->dir, DTYPE_F32, e), *e);
    }
    return rc;
}

static void text_of(int32_t *token)
{
    uint32_t seed = 7;

    for (int32_t i = 0; i < TOKENS; i++) {
        seed = seed * 1664525 + 1013904223;
        token[i] = (int32_t)((seed >> 8) % VOCAB);
    }
}

/* ---- weights ---- */

static uint64_t fnv(const uint8_t *p, int64_t n)
{
    uint64_t h = 0xCBF29CE484222325u;

    for (int64_t i = 0; i < n; i++) {
        h = (h ^ p[i]) * 0x100000001B3u;
    }
    return h;
}

static void check_weight(const char *format, const struct checkpoint *c, const struct tensor *hash)
{
    const char *name = hash->name + strlen("decoded.");
    const struct tensor *t = checkpoint_find(c, name);
    uint64_t want;

    assert_true(t && t->quantised && t->dtype == DTYPE_F32);
    float *decoded = calloc(1, (size_t)t->n_bytes);
    assert_non_null(decoded);
    assert_int_equal(tensor_decode(t, decoded), 0);
    memcpy(&want, hash->data, sizeof(want));
    if (fnv((const uint8_t *)decoded, t->n_bytes) != want) {
        fail_msg("%s: compressed-tensors reads another %s", format, name);
    }
    free(decoded);
}

static const struct way {
    const char *name;
    struct quantise_options options;
} WAYS[] = {
    {"fp8", {.format = FORMAT_FP8}},
    {"int8", {.format = FORMAT_INT8}},
    {"int8-asymmetric", {.format = FORMAT_INT8, .zeros = true}},
    {"int4", {.format = FORMAT_INT4}},
    {"int4-asymmetric", {.format = FORMAT_INT4, .zeros = true}},
    {"nvfp4", {.format = FORMAT_FP4, .fp4_group = 16}},
    {"mxfp4", {.format = FORMAT_FP4, .fp4_group = 32}},
};

static void weights_are_what_compressed_tensors_reads(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(WAYS); i++) {
        struct checkpoint *expected;
        struct written w;
        struct err e = {0};
        char path[128];

        OK(written_make(&w, SOURCE, &WAYS[i].options, &e), e);
        snprintf(path, sizeof(path), "tests/golden/quantize/%s", WAYS[i].name);
        OK(checkpoint_open(&expected, path, &e), e);
        assert_int_equal(checkpoint_count(expected), 7);
        for (int32_t t = 0; t < checkpoint_count(expected); t++) {
            check_weight(WAYS[i].name, w.c, checkpoint_at(expected, t));
        }
        checkpoint_free(expected);
        written_release(&w);
    }
}

/* The mean error that the report ends with. */
static double error_of(const struct quantise_options *o)
{
    struct written w;
    struct err e = {0};
    double error;

    OK(written_make(&w, SOURCE, o, &e), e);
    const char *last = strstr(w.report, "weights, mean ");
    assert_non_null(last);
    assert_int_equal(sscanf(last, "weights, mean %lf", &error), 1);
    written_release(&w);
    return error;
}

static void zero_points_lower_the_error(void **state)
{
    (void)state;
    double int8 = error_of(&WAYS[1].options), int8_zeros = error_of(&WAYS[2].options),
           int4 = error_of(&WAYS[3].options), int4_zeros = error_of(&WAYS[4].options);

    assert_true(int8_zeros < 0.95 * int8);
    assert_true(int4_zeros < 0.95 * int4);
}

static void rows_of_one_sign_keep_zero_among_their_codes(void **state)
{
    (void)state;
    static const enum weight_format_id FORMATS[] = {FORMAT_INT8, FORMAT_INT4};
    static const float ROWS[4][8] = {{1, 2, 3, 4, 5, 6, 7, 7.5f},
                                     {-1, -2, -3, -4, -5, -6, -7, -7.5f},
                                     {0, 0, 0, 0, 0, 0, 0, 0},
                                     {-2, 5.5f, 0, 1, -1, 3, 4, 2}};

    for (size_t f = 0; f < ARRAY_LEN(FORMATS); f++) {
        struct rounding k = {.format = FORMATS[f], .zeros = true};
        int first = k.format == FORMAT_INT8 ? -128 : 0, last = k.format == FORMAT_INT8 ? 127 : 15;
        for (int r = 0; r < 4; r++) {
            uint8_t codes[8], zero;
            float scale, value[8];
            double sum[2] = {0};
            struct rounded_row to = {codes, &scale, &zero, value};
            round_row(&k, ROWS[r], 8, &to, sum);
            int z = k.format == FORMAT_INT8 ? (int8_t)zero : zero;
            assert_in_range(z - first, 0, last - first);
            assert_int_equal(z, r == 0 ? first : r == 1 ? last : z);
            for (int i = 0; i < 8; i++) { /* half a step at most, a whole one at the ends */
                bool end = fabsf(ROWS[r][i]) > 5;
                assert_true(fabsf(value[i] - ROWS[r][i]) <= scale * (end ? 1 : 0.5001f));
                assert_true(ROWS[r][i] != 0 || value[i] == 0);
            }
        }
    }
}

static void copy_file(const char *from, const char *to)
{
    char block[4096];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");

    assert_true(in && out);
    for (size_t n; (n = fread(block, 1, sizeof(block), in)) > 0;) {
        assert_int_equal(fwrite(block, 1, n, out), n);
    }
    fclose(in);
    assert_int_equal(fclose(out), 0);
}

#define NEAR_ZERO "model.layers.0.mlp.up_proj.weight"

/* A copy of SOURCE in `dir` whose NEAR_ZERO, of bfloat16, is 2^-118 times its own: the
 * inverse of its greatest value times the greatest codes is beyond float32. */
static void write_near_zeros(const char *dir)
{
    char path[160];
    struct checkpoint *c;
    struct err e;

    assert_int_equal(mkdir(dir, 0755), 0);
    snprintf(path, sizeof(path), "%s/config.json", dir);
    copy_file(SOURCE "/config.json", path);
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    copy_file(SOURCE "/model.safetensors", path);
    OK(checkpoint_open(&c, SOURCE, &e), e);
    const struct tensor *t = checkpoint_find(c, NEAR_ZERO);
    const char *begin = checkpoint_at(c, 0)->data; /* of the first tensor of the file */
    assert_true(t && t->dtype == DTYPE_BF16);
    FILE *f = fopen(path, "r+b");
    uint64_t header;
    for (int32_t i = 1; i < checkpoint_count(c); i++) {
        const char *at = checkpoint_at(c, i)->data;
        begin = at < begin ? at : begin;
    }
    assert_non_null(f);
    assert_int_equal(fread(&header, 1, 8, f), 8);
    long at = (long)(8 + header) + (long)((const char *)t->data - begin);
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    for (int64_t i = 0; i < t->n_bytes / 2; i++) {
        uint16_t v;
        memcpy(&v, (const char *)t->data + 2 * i, 2);
        int32_t exponent = (v >> 7 & 255) - 118;
        v = (uint16_t)((v & 0x8000) | (exponent > 0 ? (exponent << 7 | (v & 127)) : 0));
        assert_int_equal(fwrite(&v, 2, 1, f), 1);
    }
    assert_int_equal(fclose(f), 0);
    checkpoint_free(c);
}

/* What nvfp4 makes of NEAR_ZERO: the root mean square of the error over that of the
 * values. */
static double error_of_near_zeros(const struct tensor *t, const struct tensor *exact)
{
    float *value = calloc(1, (size_t)t->n_bytes);
    double sum[2] = {0};

    assert_true(value && t->dtype == DTYPE_F32);
    assert_int_equal(tensor_decode(t, value), 0);
    for (int64_t i = 0; i < t->n_bytes / 4; i++) {
        uint32_t bits = 0;
        float want;
        memcpy((char *)&bits + 2, (const char *)exact->data + 2 * i, 2);
        memcpy(&want, &bits, 4);
        assert_true(isfinite(value[i]));
        sum[0] += ((double)value[i] - (double)want) * ((double)value[i] - (double)want);
        sum[1] += (double)want * (double)want;
    }
    free(value);
    return sqrt(sum[0] / sum[1]);
}

static void weights_near_zero_keep_their_values_in_nvfp4(void **state)
{
    (void)state;
    struct quantise_options o = {.format = FORMAT_FP4, .fp4_group = 16};
    char parent[] = "/tmp/quire-test-near-zero-XXXXXX", dir[64];
    struct checkpoint *source;
    struct written w;
    struct err e = {0};

    assert_non_null(mkdtemp(parent));
    snprintf(dir, sizeof(dir), "%s/q", parent);
    write_near_zeros(dir);
    OK(checkpoint_open(&source, dir, &e), e);
    OK(written_make(&w, dir, &o, &e), e);
    const struct tensor *t = checkpoint_find(w.c, NEAR_ZERO);
    assert_true(t && t->quantised && t->quantised->divisor == FLT_MAX);
    double error = error_of_near_zeros(t, checkpoint_find(source, NEAR_ZERO));
    assert_true(error > 0 && error < 0.15);
    written_release(&w);
    checkpoint_free(source);
    struct written here = {.c = NULL};
    snprintf(here.parent, sizeof(here.parent), "%s", parent);
    snprintf(here.dir, sizeof(here.dir), "%s", dir);
    written_release(&here);
}

/* ---- scales of activations ---- */

enum { DENSE = PRODUCT_DOWN + 1 }; /* products of a layer without experts */

static const char *const NAMES[DENSE][3] = {
    {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    {"self_attn.o_proj"},
    {"mlp.gate_proj", "mlp.up_proj"},
    {"mlp.down_proj"},
};

/* The scale written beside a weight of layer 0, and what the reader makes of it. */
static float input_scale_of(const struct written *w, const char *module)
{
    char name[128];
    float scale;

    snprintf(name, sizeof(name), "model.layers.0.%s.input_scale", module);
    const struct tensor *t = checkpoint_find(w->c, name);
    assert_true(t && t->n_bytes == 4 && t->dtype == DTYPE_F32);
    memcpy(&scale, t->data, sizeof(scale));
    snprintf(name, sizeof(name), "model.layers.0.%s.weight", module);
    t = checkpoint_find(w->c, name);
    assert_true(t && t->quantised && t->quantised->scales.act == ACT_SCALE_TENSOR);
    assert_true(t->quantised->scales.act_scale == scale);
    return scale;
}

/* The greatest magnitude of each product's input over the first half of the text, in
 * the model of a directory. */
static void greatest_inputs(const char *dir, const int32_t *token, float ret[DENSE])
{
    struct scorer s;
    struct inputs *in;
    struct err e = {0};

    OK(scorer_init(&s, dir, NULL, 1, &e), e);
    OK(inputs_gather(&s, token, TOKENS / 2, &in, &e), e);
    for (int p = 0; p < DENSE; p++) {
        ret[p] = 0;
        for (int32_t j = 0; j < in[p].cols; j++) {
            ret[p] = fmaxf(ret[p], in[p].most[j]);
        }
    }
    inputs_free(in, s.model->weights->n_layers * inputs_per_layer(&s.config));
    scorer_release(&s);
}

static void fixed_scales_bring_the_greatest_input_to_the_greatest_code(void **state)
{
    (void)state;
    int32_t token[TOKENS];
    float most[DENSE];

    text_of(token);
    greatest_inputs(SOURCE, token, most);
    for (int fp8 = 0; fp8 < 2; fp8++) {
        struct quantise_options o = {.format = fp8 ? FORMAT_FP8 : FORMAT_INT8,
                                     .zeros = !fp8,
                                     .fixed = true,
                                     .token = token,
                                     .n_tokens = TOKENS};
        struct written w;
        struct err e = {0};
        OK(written_make(&w, SOURCE, &o, &e), e);
        for (int p = 0; p < DENSE; p++) {
            for (int i = 0; i < 3 && NAMES[p][i]; i++) {
                float greatest = input_scale_of(&w, NAMES[p][i]) * (fp8 ? 448.0f : 127.0f);
                assert_true(fabsf(greatest / most[p] - 1) < 1e-5f);
            }
        }
        assert_non_null(strstr(w.report, "input scale"));
        assert_non_null(strstr(w.report, "perplexity of"));
        written_release(&w);
    }
}

/* With factors the written norms and rows of up make smaller inputs: it is those that
 * the scales are for. */
static void fixed_scales_are_of_the_inputs_that_factors_leave(void **state)
{
    (void)state;
    int32_t token[TOKENS];
    float before[DENSE], after[DENSE];
    struct written w;
    struct err e = {0};

    text_of(token);
    struct quantise_options o = {
        .format = FORMAT_INT8, .smooth = 0.5f, .fixed = true, .token = token, .n_tokens = TOKENS};
    OK(written_make(&w, SOURCE, &o, &e), e);
    greatest_inputs(SOURCE, token, before);
    greatest_inputs(w.dir, token, after); /* of quantised weights: nearly the same */
    for (int p = 0; p < DENSE; p++) {
        float greatest = input_scale_of(&w, NAMES[p][0]) * 127;
        assert_true(fabsf(greatest / after[p] - 1) < 0.05f);
        assert_true(p == PRODUCT_O || fabsf(greatest / before[p] - 1) > 0.1f);
    }
    written_release(&w);
}

static double loss_with(struct scorer *s, const float *scale, const int32_t *token)
{
    struct input_rounding how = {.format = FORMAT_INT8, .scale = scale};
    struct err e = {0};
    int32_t n;
    double loss;

    OK(inputs_rounded_loss(s, &how, token, TOKENS, &loss, &n, &e), e);
    return loss;
}

static void fixed_scales_round_and_clip_what_is_scored(void **state)
{
    (void)state;
    int32_t token[TOKENS], n;
    float fine[PRODUCTS], clipping[PRODUCTS];
    struct scorer s;
    struct err e = {0};
    double exact;

    text_of(token);
    greatest_inputs(SOURCE, token, fine);
    OK(scorer_init(&s, SOURCE, NULL, 1, &e), e);
    OK(scorer_loss(&s, token, TOKENS, &exact, &n, &e), e);
    for (int p = 0; p < DENSE; p++) {
        clipping[p] = fine[p] / 127 / 64;
        fine[p] = fine[p] * 1.5f / 127;
    }
    double rounded = loss_with(&s, fine, token), clipped = loss_with(&s, clipping, token);
    assert_true(rounded != exact && fabs(rounded / exact - 1) < 0.02);
    assert_true(fabs(clipped - exact) > 3 * fabs(rounded - exact));
    scorer_release(&s);
}

/* ---- refusals ---- */

static void options_that_a_format_has_no_use_for_are_refused(void **state)
{
    (void)state;
    int32_t token[TOKENS];
    text_of(token);
    const struct {
        const char *from;
        struct quantise_options options;
        const char *why;
    } CASES[] = {
        {SOURCE, {.format = FORMAT_FP8, .zeros = true}, "zero points are for int8 and int4"},
        {SOURCE, {.format = FORMAT_FP4, .fp4_group = 16, .zeros = true}, "zero points are for"},
        {SOURCE,
         {.format = FORMAT_INT4, .fixed = true, .token = token, .n_tokens = TOKENS},
         "scales of activations are for fp8 and int8"},
        {SOURCE, {.format = FORMAT_INT8, .fixed = true}, "a text of at least 8 tokens"},
        /* a short convolution's products are no linear layer's that the text shows */
        {"tests/golden/lfm2",
         {.format = FORMAT_INT8, .fixed = true, .token = token, .n_tokens = TOKENS},
         "a text does not show the input of this weight"},
    };

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct written w;
        struct err e = {0};
        assert_true(written_make(&w, CASES[i].from, &CASES[i].options, &e) < 0);
        if (!strstr(e.text, CASES[i].why)) {
            fail_msg("'%s' does not say '%s'", e.text, CASES[i].why);
        }
        assert_int_not_equal(access(w.dir, F_OK), 0); /* nothing was written */
        written_release(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_what_compressed_tensors_reads),
        cmocka_unit_test(zero_points_lower_the_error),
        cmocka_unit_test(rows_of_one_sign_keep_zero_among_their_codes),
        cmocka_unit_test(weights_near_zero_keep_their_values_in_nvfp4),
        cmocka_unit_test(fixed_scales_bring_the_greatest_input_to_the_greatest_code),
        cmocka_unit_test(fixed_scales_are_of_the_inputs_that_factors_leave),
        cmocka_unit_test(fixed_scales_round_and_clip_what_is_scored),
        cmocka_unit_test(options_that_a_format_has_no_use_for_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
