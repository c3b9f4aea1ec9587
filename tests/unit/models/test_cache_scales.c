/* The scales of an fp8 cache as checkpoints name and store them. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/families/load/load.h"

enum { LAYERS = 2 };

/* load_cache_scales over a checkpoint of one safetensors file: `header`, then `n` bytes
 * of data. */
static int scales_of(const char *header, const void *data, size_t n, struct layer *layer,
                     struct err *e)
{
    size_t len = strlen(header), bytes = 8 + len + n;
    char *file = malloc(bytes);
    uint64_t header_bytes = len;
    struct transformer t = {.layer = layer, .first_layer = 3, .n_layers = LAYERS};
    struct model m = {.weights = &t, .options.fp8_cache = true};

    memset(layer, 0, LAYERS * sizeof(*layer));
    memcpy(file, &header_bytes, 8);
    memcpy(file + 8, header, len);
    memcpy(file + 8 + len, data, n);
    assert_int_equal(checkpoint_new(&m.checkpoint, e), 0);
    assert_int_equal(safetensors_parse(m.checkpoint, file, bytes, "test", e), 0);
    int rc = load_cache_scales(&m, e);
    checkpoint_free(m.checkpoint);
    free(file);
    return rc;
}

#define TENSOR(name, type, shape, from, to) \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[" #from "," #to "]}"

static void each_layer_gets_its_own_under_any_of_the_names(void **state)
{
    (void)state;
    struct layer layer[LAYERS];
    struct err e = {0};
    static const struct {
        float a;
        uint16_t b, c;
    } data = {0.03125f, 0x3E80, 0x3800}; /* in bfloat16 0.25, in float16 0.5 */
    static const char header[] =
        "{" TENSOR("model.layers.3.self_attn.k_scale", "F32", "[1]", 0, 4) "," TENSOR(
            "model.layers.3.self_attn.v_proj.v_scale", "BF16", "[]", 4,
            6) "," TENSOR("layers.4.self_attn.attn.v_scale", "F16", "[1,1]", 6, 8) "}";

    assert_int_equal(scales_of(header, &data, sizeof(data), layer, &e), 0);
    assert_true(layer[0].attention.k_scale == 0.03125f && layer[0].attention.v_scale == 0.25f);
    assert_true(attention_k_scale(&layer[1].attention) == 1);
    assert_true(layer[1].attention.v_scale == 0.5f);
}

static void fused_and_older_files_have_other_names(void **state)
{
    (void)state;
    struct layer layer[LAYERS];
    struct err e = {0};
    static const float data[] = {0.5f, 0.25f, 2, 4};
    static const char header[] =
        "{" TENSOR("model.layers.3.self_attn.kv_scale", "F32", "[]", 0, 4) "," TENSOR(
            "model.layers.4.self_attn.qkv_proj.k_scale", "F32", "[]", 4,
            8) "," TENSOR("backbone.layers.4.mixer.v_proj.v_scale", "F32", "[]", 8,
                          12) "," TENSOR("backbone.layers.3.mixer.k_proj.k_scale", "F32", "[]", 12,
                                         16) "}";

    assert_int_equal(scales_of(header, data, sizeof(data), layer, &e), 0);
    assert_true(layer[0].attention.v_scale == 0.5f && layer[0].attention.k_scale == 4);
    assert_true(layer[1].attention.k_scale == 0.25f && layer[1].attention.v_scale == 2);
}

static void scales_that_are_no_positive_number_are_refused_by_name(void **state)
{
    (void)state;
    struct layer layer[LAYERS];
    static const char one[] =
        "{" TENSOR("model.layers.4.self_attn.k_scale", "F32", "[1]", 0, 4) "}",
                      two[] =
                          "{" TENSOR("model.layers.4.self_attn.k_scale", "F32", "[2]", 0, 8) "}",
                      whole[] =
                          "{" TENSOR("model.layers.4.self_attn.k_scale", "I32", "[1]", 0, 4) "}";
    static const float bad[] = {NAN, INFINITY, 0, -1, 1e-45f};
    static const float good[2] = {1, 1};
    struct err e = {0};

    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        assert_int_equal(scales_of(one, &bad[i], 4, layer, &e), ERR_INVALID);
        assert_non_null(strstr(e.text, "layers.4.self_attn.k_scale"));
    }
    assert_int_equal(scales_of(two, good, 8, layer, &e), ERR_INVALID);
    assert_int_equal(scales_of(whole, good, 4, layer, &e), ERR_INVALID);
    assert_int_equal(scales_of(one, good, 4, layer, &e), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_layer_gets_its_own_under_any_of_the_names),
        cmocka_unit_test(fused_and_older_files_have_other_names),
        cmocka_unit_test(scales_that_are_no_positive_number_are_refused_by_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
