/* Quantised weights on a backend: what is multiplied as stored has the values of a
 * model that is decoded, on one rank and on two.
 *
 *     build/tests/unit/models/test_quantised_ranks
 * / */
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/families/layers.h"

struct loaded {
    struct backend *backend;
    struct model *model;
    struct backend_ops ops; /* the backend's, of which one may differ */
};

static struct weight_support decodes_all(const struct backend *b, const struct weight_format *f)
{
    (void)b;
    return (struct weight_support){
        .as_stored = weight_format_is_plain(f), .act = DTYPE_F32, .kernel = ""};
}

static int load(struct loaded *l, const char *golden, bool stored, int32_t rank, int32_t n_ranks,
                struct err *e)
{
    struct backend_config k = {
        .threads = 1, .max_tokens = 4, .max_seqs = 1, .max_samples = 1, .max_blocks_per_seq = 1};
    struct model_config c;
    struct generation_defaults gen;
    char path[256];

    *l = (struct loaded){0};
    snprintf(path, sizeof(path), "tests/golden/quant-%s", golden);
    if (backend_open(&l->backend, "cpu", &k, e) < 0 || model_config_read(&c, &gen, path, e) < 0) {
        fail_msg("%s", e->text);
    }
    l->ops = *l->backend->ops;
    if (!stored) {
        l->ops.supports = decodes_all;
        l->backend->ops = &l->ops;
    }
    struct model_options o = {.dtype = DTYPE_F32,
                              .max_tokens = 4,
                              .max_logits = 1,
                              .max_len = 8,
                              .rank = rank,
                              .n_ranks = n_ranks};
    return model_open(&l->model, path, &c, &o, l->backend, e);
}

static void unload(struct loaded *l)
{
    l->ops.free(l->backend);
    model_free(l->model);
}

static void same_values(const char *golden, const struct loaded *a, struct mat codes,
                        struct mat decoded)
{
    struct err e = {0};
    size_t n = (size_t)decoded.rows * (size_t)decoded.cols;
    float *x = calloc(n, sizeof(*x)), *y = calloc(n, sizeof(*y));

    assert_true(x && y && codes.rows == decoded.rows && codes.cols == decoded.cols);
    assert_true(codes.format && !decoded.format);
    assert_int_equal(a->ops.download(a->backend, codes, x, &e), 0);
    assert_int_equal(a->ops.download(a->backend, decoded, y, &e), 0);
    for (size_t i = 0; i < n; i++) {
        /* compressed-tensors' NVFP4: a division, and a product with its inverse */
        float slack = strcmp(golden, "ct-nvfp4") == 0 ? fabsf(y[i]) * 0x1p-22f : 0;
        if (!(fabsf(x[i] - y[i]) <= slack)) {
            fail_msg("%s, row %zu, column %zu: %.9g, decoded %.9g", golden,
                     i / (size_t)decoded.cols, i % (size_t)decoded.cols, (double)x[i],
                     (double)y[i]);
        }
    }
    free(x);
    free(y);
}

static void compare(const char *golden, int32_t n_ranks)
{
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct err e = {0};
        struct loaded a, b;
        if (load(&a, golden, true, rank, n_ranks, &e) < 0 ||
            load(&b, golden, false, rank, n_ranks, &e) < 0) {
            fail_msg("%s: %s", golden, e.text);
        }
        const struct layer *p = a.model->weights->layer, *q = b.model->weights->layer;
        same_values(golden, &a, p->qkv, q->qkv);
        same_values(golden, &a, p->o, q->o);
        same_values(golden, &a, p->up, q->up);
        same_values(golden, &a, p->down, q->down);
        assert_false(a.model->weights->embed.format || a.model->weights->head.format);
        unload(&a);
        unload(&b);
    }
}

static void codes_hold_the_values_of_a_decoded_model(void **state)
{
    (void)state;
    static const char *const ALL[] = {
        "ct-fp8-tensor",      "ct-fp8-channel", "ct-int8-channel",
        "ct-int8-asymmetric", "ct-int4-g32",    "ct-int4-g32-asymmetric",
        "ct-int4-channel",    "ct-int8-packed", "ct-nvfp4",
        "fp8-blocks",         "fp8-tensor",     "gptq",
        "gptq-v2-sym",        "gptq-int8",      "awq",
        "modelopt-nvfp4"};

    for (size_t i = 0; i < ARRAY_LEN(ALL); i++) {
        compare(ALL[i], 1);
    }
}

static void ranks_hold_their_codes_scales_and_zeros(void **state)
{
    (void)state;
    static const char *const DIVISIBLE[] = {
        "ct-fp8-tensor",  "ct-fp8-channel", "ct-int8-channel", "ct-int8-asymmetric",
        "ct-int8-packed", "ct-nvfp4",       "fp8-tensor",      "gptq-int8",
        "modelopt-nvfp4", "ct-int4-channel"};

    for (size_t i = 0; i < ARRAY_LEN(DIVISIBLE); i++) {
        compare(DIVISIBLE[i], 2);
    }
}

static void a_division_that_cuts_groups_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *golden, *why;
    } CASES[] = {{"ct-int4-g32", "2 cuts the groups of 32 values of "
                                 "model.layers.0.mlp.down_proj.weight (INT4)"},
                 {"awq", "2 cuts the groups of 32 values of "
                         "model.layers.0.mlp.down_proj.weight (INT4)"},
                 {"fp8-blocks", "2 cuts the groups of 32 values of "
                                "model.layers.0.self_attn.k_proj.weight (FP8)"}};

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        for (int32_t rank = 0; rank < 2; rank++) { /* by every rank alike */
            struct err e = {0};
            struct loaded l;
            assert_int_equal(load(&l, CASES[i].golden, true, rank, 2, &e), ERR_UNSUPPORTED);
            if (!strstr(e.text, CASES[i].why)) {
                fail_msg("%s: %s", CASES[i].golden, e.text);
            }
            assert_string_equal(e.param, "tensor_parallel_size");
            unload(&l);
        }
    }
}

static void act_order_is_decoded(void **state)
{
    (void)state;
    static const char *const SHUFFLED[] = {"gptq-act-order", "ct-int4-act-order"};

    for (size_t i = 0; i < ARRAY_LEN(SHUFFLED); i++) {
        struct err e = {0};
        struct loaded l;
        if (load(&l, SHUFFLED[i], true, 0, 1, &e) < 0) {
            fail_msg("%s", e.text);
        }
        assert_false(l.model->weights->layer->qkv.format);
        assert_int_equal(l.model->weights->n_decoded[FORMAT_INT4], 7);
        assert_int_equal(l.model->weights->n_stored[FORMAT_INT4], 0);
        unload(&l);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_hold_the_values_of_a_decoded_model),
        cmocka_unit_test(ranks_hold_their_codes_scales_and_zeros),
        cmocka_unit_test(a_division_that_cuts_groups_is_refused),
        cmocka_unit_test(act_order_is_decoded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
