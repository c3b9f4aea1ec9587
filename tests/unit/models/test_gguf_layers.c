/* GGUF files whose layers differ: what their configuration makes of it.
 *
 *     build/tests/unit/models/test_gguf_layers
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "models/checkpoint/gguf/gguf.h"
#include "tests/unit/models/gguf_file.h"

enum { F32 = 0, F16 = 1, Q8_0 = 8, HEAD = 64, PAIRS = HEAD / 2 };

/* Two layers of Gemma 4, the first with a window, whose heads are half as wide. */
static void put_gemma4(struct file *f)
{
    static const struct setting_int INTS[] = {{"context_length", 128},
                                              {"embedding_length", 32},
                                              {"block_count", 2},
                                              {"feed_forward_length", 64},
                                              {"attention.head_count", 2},
                                              {"attention.head_count_kv", 1},
                                              {"attention.key_length", HEAD},
                                              {"attention.value_length", HEAD},
                                              {"attention.key_length_swa", HEAD / 2},
                                              {"attention.value_length_swa", HEAD / 2},
                                              {"attention.sliding_window", 8},
                                              {"attention.shared_kv_layers", 0},
                                              {"embedding_length_per_layer_input", 0},
                                              {"rope.dimension_count", HEAD}};
    static const int32_t WINDOWS[2] = {1, 0};
    static const float EMBEDDINGS[32 * 8];

    file_init(f);
    set_text(f, "general.architecture", "gemma4");
    set_ints(f, "gemma4", INTS, ARRAY_LEN(INTS));
    set_numbers(f, "gemma4.attention.sliding_window_pattern", GGUF_I32, WINDOWS, 2);
    set_real(f, "gemma4.rope.freq_base", 1e6f);
    set_real(f, "gemma4.rope.freq_base_swa", 1e4f);
    set_real(f, "gemma4.attention.layer_norm_rms_epsilon", 1e-6f);
    add_tensor(f, "token_embd.weight", F32, 32, 8, EMBEDDINGS, sizeof(EMBEDDINGS));
}

/* The pairs of a head that turn, as loading a table of rotation counts them. why: what
 * a refusal says; NULL: there is none. */
static int32_t turning(struct file *f, const char *why)
{
    struct model_config c;
    struct generation_defaults gen;
    struct gguf *g = NULL;
    struct err e = {0};

    finish(f, 3);
    if (gguf_parse(&g, f->all.data, f->all.len, "x.gguf", &e) != 0) {
        fail_msg("%s", e.text);
    }
    int rc = gguf_config(&c, &gen, g, &e);
    gguf_free(g);
    file_release(f);
    if (why) {
        assert_true(rc == ERR_INVALID);
        assert_non_null(strstr(e.text, why));
        return -1;
    }
    if (rc != 0) {
        fail_msg("%s", e.text);
    }
    assert_true(c.rope.kind == ROPE_PROPORTIONAL && c.rope.rot_dim == HEAD);
    return (int32_t)(c.rope.share * c.rope.rot_dim / 2);
}

static void pairs_of_a_factor_of_1_turn(void **state)
{
    (void)state;
    struct file f;
    put_gemma4(&f);
    assert_int_equal(turning(&f, NULL), PAIRS); /* without factors */
    for (int32_t n = 0; n <= PAIRS; n++) {
        for (int32_t halves = 0; halves < 2; halves++) {
            float factor[PAIRS];
            uint16_t half[PAIRS];
            for (int32_t i = 0; i < PAIRS; i++) {
                factor[i] = i < n ? 1 : 1e30f;
                half[i] = i < n ? 0x3C00 : 0x7BFF;
            }
            put_gemma4(&f);
            add_tensor(&f, "rope_freqs.weight", halves ? F16 : F32, PAIRS, 0,
                       halves ? (const void *)half : factor,
                       halves ? sizeof(half) : sizeof(factor));
            assert_int_equal(turning(&f, NULL), n);
        }
    }
}

static void factors_of_other_shapes_are_refused(void **state)
{
    (void)state;
    static const float ONES[1024] = {1, 1, 1, 1};
    static const struct {
        uint32_t encoding;
        uint64_t dim[2];
        size_t n_bytes;
    } CASES[] = {
        {F32, {PAIRS / 2, 0}, sizeof(float) * PAIRS / 2}, /* of a head with a window */
        {F32, {2 * PAIRS, 0}, sizeof(float) * 2 * PAIRS}, /* one for each element */
        {F32, {1, 0}, sizeof(float)},
        {F32, {1024, 0}, sizeof(float) * 1024}, /* longer than any head */
        {F32, {PAIRS, 2}, sizeof(float) * PAIRS * 2},
        {F32, {PAIRS, 1}, sizeof(float) * PAIRS},
        {Q8_0, {PAIRS, 0}, 34}, /* a block */
    };

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct file f;
        put_gemma4(&f);
        add_tensor(&f, "rope_freqs.weight", CASES[i].encoding, CASES[i].dim[0], CASES[i].dim[1],
                   ONES, CASES[i].n_bytes);
        turning(&f, "x.gguf: rope_freqs.weight must be [32] floats");
    }
}

/* Two layers of a hybrid of Granite, the first with a recurrence. The file has no
 * key/value heads yet, and does not say whether attention rotates. */
static void put_hybrid(struct file *f)
{
    static const struct setting_int INTS[] = {
        {"context_length", 128},     {"embedding_length", 32},    {"block_count", 2},
        {"feed_forward_length", 40}, {"attention.head_count", 4}, {"ssm.conv_kernel", 4},
        {"ssm.inner_size", 64},      {"ssm.state_size", 10},      {"ssm.time_step_rank", 8},
        {"ssm.group_count", 2}};
    static const float EMBEDDINGS[32 * 8];

    file_init(f);
    set_text(f, "general.architecture", "granitehybrid");
    set_ints(f, "granitehybrid", INTS, ARRAY_LEN(INTS));
    set_real(f, "granitehybrid.attention.layer_norm_rms_epsilon", 1e-5f);
    add_tensor(f, "token_embd.weight", F32, 32, 8, EMBEDDINGS, sizeof(EMBEDDINGS));
}

static int read_hybrid(struct file *f, struct model_config *ret, struct err *e)
{
    struct generation_defaults gen;
    struct gguf *g = NULL;

    finish(f, 3);
    assert_int_equal(gguf_parse(&g, f->all.data, f->all.len, "x.gguf", e), 0);
    int rc = gguf_config(ret, &gen, g, e);
    gguf_free(g);
    file_release(f);
    return rc;
}

static const int32_t KV_HEADS[] = {0, 2, 2};

/* rotates: what the file says; < 0: nothing. Returns whether attention rotates, and in
 * *ret_width how much of a head. */
static bool hybrid_rotates(int rotates, uint32_t width, int32_t *ret_width)
{
    struct model_config c;
    struct err e = {0};
    struct file f;

    put_hybrid(&f);
    set_int(&f, "granitehybrid.rope.dimension_count", width);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_I32, KV_HEADS, 2);
    if (rotates >= 0) {
        set_bool(&f, "granitehybrid.rope.scaling.finetuned", rotates);
    }
    if (read_hybrid(&f, &c, &e) != 0) {
        fail_msg("%s", e.text);
    }
    assert_true(c.recurrent.layer[0] && !c.recurrent.layer[1]);
    assert_true(c.unrotated[0] == c.unrotated[1]);
    *ret_width = c.rope.rot_dim;
    return !c.unrotated[1];
}

static void refuse_hybrid(struct file *f, const char *why)
{
    struct model_config c;
    struct err e = {0};

    assert_int_equal(read_hybrid(f, &c, &e), ERR_INVALID);
    if (!strstr(e.text, why)) {
        fail_msg("%s", e.text);
    }
}

static void lists_of_layers_have_a_number_for_each(void **state)
{
    (void)state;
    static const float REALS[2] = {0, 2};
    struct file f;

    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_I32, KV_HEADS, 1);
    refuse_hybrid(&f, "x.gguf: granitehybrid.attention.head_count_kv has 1 values for 2 layers");
    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_I32, KV_HEADS, 3);
    refuse_hybrid(&f, "head_count_kv has 3 values for 2 layers");
    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_F32, REALS, 2);
    refuse_hybrid(&f, "head_count_kv must be whole numbers of 32 bits, or bools");
    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_I32, KV_HEADS, 2);
    set_int(&f, "granitehybrid.rope.scaling.finetuned", 1);
    refuse_hybrid(&f, "granitehybrid.rope.scaling.finetuned must be a bool");
    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_I32, KV_HEADS, 2);
    set_text(&f, "granitehybrid.attention.sliding_window_pattern", "LLLG");
    refuse_hybrid(&f, "granitehybrid.attention.sliding_window_pattern must be a whole number");
}

static void a_hybrid_of_granite_rotates_unless_the_file_says_not(void **state)
{
    (void)state;
    int32_t width;
    assert_false(hybrid_rotates(0, 8, &width));
    assert_true(hybrid_rotates(1, 4, &width)); /* a Bamba, which rotates half of a head */
    assert_int_equal(width, 4);
    assert_true(hybrid_rotates(-1, 8, &width)); /* as llama.cpp takes it */
    assert_int_equal(width, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_of_a_factor_of_1_turn),
        cmocka_unit_test(factors_of_other_shapes_are_refused),
        cmocka_unit_test(a_hybrid_of_granite_rotates_unless_the_file_says_not),
        cmocka_unit_test(lists_of_layers_have_a_number_for_each),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
