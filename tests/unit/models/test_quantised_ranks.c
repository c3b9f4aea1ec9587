/* Quantised weights on a backend: what is multiplied as stored has the values of a
 * model that is decoded, on one rank and on two.
 */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/loaded.h"
#include "tests/unit/models/narrower.h"

static void golden_path(char *ret, size_t cap, const char *name)
{
    snprintf(ret, cap, "tests/golden/quant-%s", name);
}

/* Every rank of the model has the same values stored and decoded; of experts, slices of
 * all, or `by_expert` some of them whole. */
static void compare_at(const char *path, const char *golden, int32_t n_ranks, bool by_expert)
{
    /* compressed-tensors' NVFP4: a division, and a product with its inverse */
    float slack = strcmp(golden, "ct-nvfp4") == 0 ? 0x1p-22f : 0;
    bool floats = strstr(golden, "mxfp4"); /* but for the experts */

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct err e = {0};
        struct loaded a, b;
        struct loading l = {DTYPE_F32, rank, n_ranks, by_expert};
        if (load_part(&a, path, NULL, &l, &e) < 0 || load_part(&b, path, decodes_all, &l, &e) < 0) {
            fail_msg("%s: %s", golden, e.text);
        }
        const struct layer *p = a.model->weights->layer, *q = b.model->weights->layer;
        bool experts = p->experts.n > 0;
        assert_true(same_values(golden, &a, p->qkv, q->qkv, slack) || floats);
        assert_true(same_values(golden, &a, p->o, q->o, slack) || floats);
        assert_true(same_values(golden, &a, experts ? p->experts.up : p->up,
                                experts ? q->experts.up : q->up, slack));
        assert_true(same_values(golden, &a, experts ? p->experts.down : p->down,
                                experts ? q->experts.down : q->down, slack));
        assert_false(a.model->weights->embed.format || a.model->weights->head.format);
        unload(&a);
        unload(&b);
    }
}

static void compare(const char *golden, int32_t n_ranks)
{
    char path[256];

    golden_path(path, sizeof(path), golden);
    compare_at(path, golden, n_ranks, false);
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

/* Experts whose slices are whole groups, and whole experts. */
static void ranks_hold_their_parts_of_quantised_experts(void **state)
{
    (void)state;
    static const struct {
        const char *golden;
        bool by_expert;
    } CASES[] = {{"awq-experts", false}, {"awq-experts", true}, {"mxfp4-experts", true}};

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        char path[256];
        golden_path(path, sizeof(path), CASES[i].golden);
        compare_at(path, CASES[i].golden, 2, CASES[i].by_expert);
    }
}

/* Goldens of grouped codes, with MLPs so narrow that two ranks have whole groups; that
 * of blocks has heads as wide as a block, too. */
static void ranks_hold_whole_groups_of_codes(void **state)
{
    (void)state;
#define NARROW                                                       \
    {{96, 64}, {192, 128}, {12, 8}, {3, 2}},                         \
    {                                                                \
        {                                                            \
            "\"intermediate_size\": 96", "\"intermediate_size\": 64" \
        }                                                            \
    }
    static const struct {
        const char *golden;
        struct narrowing n;
    } CASES[] = {{"gptq", {NARROW}},
                 {"gptq-v2-sym", {NARROW}},
                 {"awq", {NARROW}},
                 {"ct-int4-g32", {NARROW}},
                 {"ct-int4-g32-asymmetric", {NARROW}},
                 {"mxfp4-experts", {NARROW}},
                 {"fp8-blocks",
                  {{{100, 64}, {4, 2}},
                   {{"\"intermediate_size\": 100", "\"intermediate_size\": 64"},
                    {"\"num_attention_heads\": 4", "\"num_attention_heads\": 2"},
                    {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 1"},
                    {"\"head_dim\": 16", "\"head_dim\": 32"}}}}};
#undef NARROW

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        char path[256], dir[64];
        golden_path(path, sizeof(path), CASES[i].golden);
        narrow_golden(&CASES[i].n, path, dir);
        compare_at(dir, CASES[i].golden, 2, false);
        narrow_remove(dir);
    }
}

/* With this sentence, by every rank alike. */
static void refused(const char *path, int32_t n_ranks, const char *why)
{
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct model_options o = part_options(DTYPE_F32, rank, n_ranks);
        struct err e = {0};
        struct loaded l;
        assert_int_equal(load_with(&l, path, NULL, &o, &e), ERR_UNSUPPORTED);
        assert_string_equal(e.text, why);
        assert_string_equal(e.param, "tensor_parallel_size");
        unload(&l);
    }
}

static void a_division_that_cuts_groups_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *golden;
        int32_t n_ranks;
        const char *why;
    } CASES[] = {{"ct-int4-g32", 2,
                  "tensor_parallel_size 2 cuts the groups of 32 values of "
                  "model.layers.0.mlp.down_proj.weight (INT4): use 1"},
                 {"awq", 2,
                  "tensor_parallel_size 2 cuts the groups of 32 values of "
                  "model.layers.0.mlp.down_proj.weight (INT4): use 1"},
                 {"fp8-blocks", 2,
                  "tensor_parallel_size 2 cuts the groups of 32 values of "
                  "model.layers.0.self_attn.k_proj.weight (FP8): use 1"},
                 {"ct-int4-experts", 4,
                  "tensor_parallel_size 4 cuts the groups of 64 values of "
                  "model.layers.0.self_attn.o_proj.weight (INT4): use 1"},
                 {"mxfp4-experts", 2,
                  "tensor_parallel_size 2 cuts the groups of 32 values of "
                  "model.layers.0.mlp.experts.down_proj (FP4): use 1 or expert_parallel"}};

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        char path[256];
        golden_path(path, sizeof(path), CASES[i].golden);
        refused(path, CASES[i].n_ranks, CASES[i].why);
    }
}

static void the_line_names_how_many_ranks_cut_no_group(void **state)
{
    (void)state;
    static const struct narrowing NARROW = {
        {{96, 64}, {192, 128}, {12, 8}, {3, 2}},
        {{"\"intermediate_size\": 96", "\"intermediate_size\": 64"}}};
    char path[256], dir[64];

    golden_path(path, sizeof(path), "mxfp4-experts");
    narrow_golden(&NARROW, path, dir);
    refused(dir, 4,
            "tensor_parallel_size 4 cuts the groups of 32 values of "
            "model.layers.0.mlp.experts.down_proj (FP4): use 2 or expert_parallel");
    compare_at(dir, "mxfp4-experts", 4, true);
    narrow_remove(dir);
}

/* Of floats that one rank would quantise as they are loaded. */
static void groups_that_loading_makes_are_not_cut(void **state)
{
    (void)state;
    struct model_options o = part_options(DTYPE_F32, 0, 4);
    struct err e = {0};
    struct loaded l;

    o.quantise = weight_format_of(FORMAT_INT4);
    o.quantise_group = 128;
    for (int32_t rank = 0; rank < 4; rank++) {
        o.rank = rank;
        assert_int_equal(load_with(&l, "tests/golden/llama-gqa64-tied", NULL, &o, &e),
                         ERR_UNSUPPORTED);
        assert_non_null(strstr(e.text, "tensor_parallel_size 4 cuts the groups of 128 values of "));
        unload(&l);
    }
}

static void act_order_is_decoded(void **state)
{
    (void)state;
    static const char *const SHUFFLED[] = {"gptq-act-order", "ct-int4-act-order"};

    for (size_t i = 0; i < ARRAY_LEN(SHUFFLED); i++) {
        struct err e = {0};
        struct loaded l;
        char path[256];
        golden_path(path, sizeof(path), SHUFFLED[i]);
        if (load(&l, path, true, 0, 1, &e) < 0) {
            fail_msg("%s", e.text);
        }
        assert_false(l.model->weights->layer->qkv.format);
        assert_int_equal(l.model->weights->n_decoded[FORMAT_INT4], 7);
        assert_int_equal(l.model->weights->n_stored[FORMAT_INT4], 0);
        unload(&l);
    }
}

/* As of a GPU, whose activations have the type of the weights. */
static struct weight_support of_one_type(const struct backend *b, const struct weight_format *f)
{
    struct weight_support s = decodes_all(b, f);

    s.act = weight_format_is_plain(f) ? (enum dtype)f->id : DTYPE_BF16;
    return s;
}

/* bfloat16 would round what the codes say: float16 keeps it where activations are
 * float32, and other weights of the model stay what they are. */
static void act_order_is_decoded_to_what_loses_less(void **state)
{
    (void)state;
    static const char *const SHUFFLED[] = {"gptq-act-order", "ct-int4-act-order"};

    for (size_t i = 0; i < ARRAY_LEN(SHUFFLED); i++) {
        struct err e = {0};
        struct loaded exact, fine, one_type;
        char path[256];
        golden_path(path, sizeof(path), SHUFFLED[i]);
        if (load(&exact, path, true, 0, 1, &e) < 0 ||
            load_as(&fine, path, NULL, DTYPE_BF16, 0, 1, &e) < 0 ||
            load_as(&one_type, path, of_one_type, DTYPE_BF16, 0, 1, &e) < 0) {
            fail_msg("%s", e.text);
        }
        const struct layer *a = exact.model->weights->layer, *b = fine.model->weights->layer,
                           *c = one_type.model->weights->layer;
        assert_true(b->qkv.dtype == DTYPE_F16 && b->down.dtype == DTYPE_F16);
        assert_true(c->qkv.dtype == DTYPE_BF16 && c->down.dtype == DTYPE_BF16);
        assert_true(fine.model->weights->embed.dtype == DTYPE_BF16);
        same_values(SHUFFLED[i], &exact, b->qkv, a->qkv, 0x1p-11f);
        same_values(SHUFFLED[i], &exact, b->down, a->down, 0x1p-11f);
        same_values(SHUFFLED[i], &exact, c->down, a->down, 0x1p-8f);
        unload(&exact);
        unload(&fine);
        unload(&one_type);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_hold_the_values_of_a_decoded_model),
        cmocka_unit_test(ranks_hold_their_codes_scales_and_zeros),
        cmocka_unit_test(ranks_hold_their_parts_of_quantised_experts),
        cmocka_unit_test(ranks_hold_whole_groups_of_codes),
        cmocka_unit_test(a_division_that_cuts_groups_is_refused),
        cmocka_unit_test(the_line_names_how_many_ranks_cut_no_group),
        cmocka_unit_test(groups_that_loading_makes_are_not_cut),
        cmocka_unit_test(act_order_is_decoded),
        cmocka_unit_test(act_order_is_decoded_to_what_loses_less),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
