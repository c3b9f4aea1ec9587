/* GGUF files whose layers differ: what their configuration and tensors make of it.
 *
 *     build/tests/unit/models/test_gguf_layers
 */
#include <math.h>
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

static int read_config(struct file *f, struct model_config *ret, struct err *e)
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
    if (read_config(&f, &c, &e) != 0) {
        fail_msg("%s", e.text);
    }
    assert_true(c.recurrent.layer[0] && !c.recurrent.layer[1]);
    assert_true(c.unrotated[0] == c.unrotated[1]);
    *ret_width = c.rope.rot_dim;
    return !c.unrotated[1];
}

static void refuse_config(struct file *f, const char *why)
{
    struct model_config c;
    struct err e = {0};

    assert_int_equal(read_config(f, &c, &e), ERR_INVALID);
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
    refuse_config(&f, "x.gguf: granitehybrid.attention.head_count_kv has 1 values for 2 layers");
    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_I32, KV_HEADS, 3);
    refuse_config(&f, "head_count_kv has 3 values for 2 layers");
    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_F32, REALS, 2);
    refuse_config(&f, "head_count_kv must be whole numbers of 32 bits, or bools");
    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_I32, KV_HEADS, 2);
    set_int(&f, "granitehybrid.rope.scaling.finetuned", 1);
    refuse_config(&f, "granitehybrid.rope.scaling.finetuned must be a bool");
    put_hybrid(&f);
    set_numbers(&f, "granitehybrid.attention.head_count_kv", GGUF_I32, KV_HEADS, 2);
    set_text(&f, "granitehybrid.attention.sliding_window_pattern", "LLLG");
    refuse_config(&f, "granitehybrid.attention.sliding_window_pattern must be a whole number");
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

/* Apertus of two layers: what its files have of its activation. */
static const struct {
    const char *key;
    float value[3];
} XIELU[] = {{"xielu.alpha_p", {0.25f, -1.5f, 1}},
             {"xielu.alpha_n", {3, 0.125f, 1}},
             {"xielu.beta", {0.5f, 0.5f, 0.5f}},
             {"xielu.eps", {-1e-6f, -9.98377799987793e-07f, -1e-6f}}};

/* All of it but `not`, in place of which there are n values of type `item`; item < 0:
 * it is absent. What is behind `shift` letters may be at any address. */
static void put_xielu(struct file *f, size_t shift, int not, int item, const void *value,
                      uint64_t n)
{
    file_init(f);
    set_text(f, "general.name", &"aaa"[3 - shift]);
    set_text(f, "general.architecture", "apertus");
    set_int(f, "apertus.block_count", 2);
    for (int i = 0; i < (int)ARRAY_LEN(XIELU); i++) {
        if (i != not ) {
            set_numbers(f, XIELU[i].key, GGUF_F32, XIELU[i].value, 2);
        } else if (item >= 0) {
            set_numbers(f, XIELU[i].key, (enum gguf_type)item, value, n);
        }
    }
}

static int read_tensors(struct file *f, struct checkpoint **ret, struct err *e)
{
    static const struct model_config c = {.n_heads = 1, .n_kv_heads = 1};
    struct gguf *g = NULL;

    finish(f, 3);
    assert_int_equal(gguf_parse(&g, f->all.data, f->all.len, "x.gguf", e), 0);
    return gguf_checkpoint(ret, g, &c, DTYPE_BF16, e);
}

static float only_value(const struct checkpoint *c, const char *name)
{
    const struct tensor *t = checkpoint_find(c, name);
    float value;

    assert_non_null(t);
    assert_true(t->n_dims == 1 && t->dim[0] == 1 && t->dtype == DTYPE_F32);
    if (t->encoded) {
        assert_int_equal(tensor_decode(t, &value), 0);
        return value;
    }
    assert_int_equal((uintptr_t)t->data % sizeof(value), 0);
    return *(const float *)t->data;
}

static void numbers_of_layers_become_tensors_wherever_they_lie(void **state)
{
    (void)state;
    static const char *const TO[] = {"alpha_p", "alpha_n"};

    for (size_t shift = 0; shift < 4; shift++) {
        for (int left_out = -1; left_out <= 3; left_out += 4) { /* nothing, or a constant */
            struct file f;
            struct checkpoint *c = NULL;
            struct err e = {0};
            put_xielu(&f, shift, left_out, -1, NULL, 0);
            if (read_tensors(&f, &c, &e) != 0) {
                fail_msg("%s", e.text);
            }
            assert_int_equal(checkpoint_count(c), 4);
            for (int i = 0; i < 4; i++) {
                char name[64];
                snprintf(name, sizeof(name), "model.layers.%d.mlp.act_fn.%s", i / 2, TO[i % 2]);
                assert_true(only_value(c, name) == XIELU[i % 2].value[i / 2]);
            }
            checkpoint_free(c);
            file_release(&f);
        }
    }
}

static void refuse_xielu(struct file *f, const char *words)
{
    struct checkpoint *c = NULL;
    struct err e = {0};
    char want[128];

    snprintf(want, sizeof(want), "x.gguf: %s", words);
    assert_true(read_tensors(f, &c, &e) < 0);
    assert_string_equal(e.text, want);
    file_release(f);
}

static void numbers_of_layers_are_one_for_each_and_usual(void **state)
{
    (void)state;
    static const int32_t INTS[2] = {1, 1};
    static const struct {
        int which;
        float value[2];
        const char *words;
    } CASES[] = {
        {0, {1, NAN}, "xielu.alpha_p has a value that is not finite"},
        {1, {INFINITY, 1}, "xielu.alpha_n has a value that is not finite"},
        {2, {0.5f, 0.75f}, "xielu.beta has 0.75, and only 0.5 is supported"},
        {3, {-1e-6f, 1e-6f}, "xielu.eps has 1e-06, and only -1e-06 is supported"},
        {3, {-1.1e-6f, -1e-6f}, "xielu.eps has -1.1e-06, and only -1e-06 is supported"},
    };
    struct file f;
    char words[100];

    for (int i = 0; i < (int)ARRAY_LEN(XIELU); i++) {
        const char *key = XIELU[i].key;
        for (uint64_t n = 0; n <= 3; n += n == 1 ? 2 : 1) {
            put_xielu(&f, 0, i, GGUF_F32, XIELU[i].value, n);
            snprintf(words, sizeof(words), "%s has %d values for 2 layers", key, (int)n);
            refuse_xielu(&f, words);
        }
        put_xielu(&f, 0, i, GGUF_I32, INTS, 2);
        snprintf(words, sizeof(words), "%s must be an array of 32-bit floats", key);
        refuse_xielu(&f, words);
        put_xielu(&f, 0, i, -1, NULL, 0);
        set_real(&f, key, XIELU[i].value[0]);
        refuse_xielu(&f, words);
    }
    for (int i = 0; i < 2; i++) {
        put_xielu(&f, 0, i, -1, NULL, 0);
        snprintf(words, sizeof(words), "%s is missing", XIELU[i].key);
        refuse_xielu(&f, words);
    }
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        put_xielu(&f, 0, CASES[i].which, GGUF_F32, CASES[i].value, 2);
        refuse_xielu(&f, CASES[i].words);
    }
}

/* Three layers of Granite with windows; the file does not say yet which rotate. */
static void put_windows(struct file *f)
{
    static const struct setting_int INTS[] = {
        {"context_length", 128},     {"embedding_length", 32},       {"block_count", 3},
        {"feed_forward_length", 40}, {"attention.head_count", 4},    {"attention.head_count_kv", 2},
        {"rope.dimension_count", 8}, {"attention.sliding_window", 8}};
    static const int32_t WINDOWS[3] = {1, 0, 1};
    static const float EMBEDDINGS[32 * 8];

    file_init(f);
    set_text(f, "general.architecture", "granite_swa");
    set_ints(f, "granite_swa", INTS, ARRAY_LEN(INTS));
    set_numbers(f, "granite_swa.attention.sliding_window_pattern", GGUF_I32, WINDOWS, 3);
    set_real(f, "granite_swa.rope.freq_base", 5e4f);
    set_real(f, "granite_swa.attention.layer_norm_rms_epsilon", 1e-5f);
    add_tensor(f, "token_embd.weight", F32, 32, 8, EMBEDDINGS, sizeof(EMBEDDINGS));
}

static void layers_rotate_as_the_file_says(void **state)
{
    (void)state;
    static const char KEY[] = "granite_swa.attention.rope_pattern";
    static const int32_t ROTATES[4] = {0, 1, 1, 1}, NONE[3];
    static const float REALS[3] = {0, 1, 1};
    struct model_config c;
    struct err e = {0};
    struct file f;

    put_windows(&f);
    set_numbers(&f, KEY, GGUF_I32, ROTATES, 3);
    assert_int_equal(read_config(&f, &c, &e), 0);
    assert_true(c.unrotated[0] && !c.unrotated[1] && !c.unrotated[2]);
    assert_true(c.windowed[0] && !c.windowed[1] && c.windowed[2] && c.sliding_window == 8);
    assert_true(c.rope.theta == 5e4 && c.window_theta == 0);
    put_windows(&f);
    assert_int_equal(read_config(&f, &c, &e), 0);
    assert_true(!c.unrotated[0] && !c.unrotated[1] && !c.unrotated[2] && c.rope.theta == 5e4);
    put_windows(&f);
    set_numbers(&f, KEY, GGUF_I32, NONE, 3);
    assert_int_equal(read_config(&f, &c, &e), 0);
    assert_true(c.unrotated[0] && c.unrotated[1] && c.unrotated[2]);

    for (uint64_t n = 2; n <= 4; n += 2) {
        char words[80];
        put_windows(&f);
        set_numbers(&f, KEY, GGUF_I32, ROTATES, n);
        snprintf(words, sizeof(words), "x.gguf: %s has %d values for 3 layers", KEY, (int)n);
        refuse_config(&f, words);
    }
    put_windows(&f);
    set_numbers(&f, KEY, GGUF_F32, REALS, 3);
    refuse_config(&f, "rope_pattern must be whole numbers of 32 bits, or bools");
    put_windows(&f);
    set_int(&f, KEY, 1);
    refuse_config(&f, "x.gguf: granite_swa.attention.rope_pattern must be an array");
    put_windows(&f);
    set_text(&f, KEY, "yes");
    refuse_config(&f, "rope_pattern must be an array");
}

/* The longest context of Mistral Small 4, whose queries grow behind the first 64
 * positions; beta < 0: the file does not say by how much. */
static int32_t reach_of_mistral4(float beta)
{
    static const struct setting_int INTS[] = {{"context_length", 256},
                                              {"embedding_length", 32},
                                              {"block_count", 1},
                                              {"feed_forward_length", 40},
                                              {"leading_dense_block_count", 1},
                                              {"attention.head_count", 4},
                                              {"attention.head_count_kv", 1},
                                              {"attention.q_lora_rank", 16},
                                              {"attention.kv_lora_rank", 12},
                                              {"attention.key_length_mla", 18},
                                              {"attention.value_length_mla", 14},
                                              {"rope.dimension_count", 8},
                                              {"rope.scaling.original_context_length", 64},
                                              {"expert_count", 4},
                                              {"expert_used_count", 2},
                                              {"expert_feed_forward_length", 8},
                                              {"expert_shared_count", 1}};
    static const float EMBEDDINGS[32 * 8];
    struct model_config c;
    struct err e = {0};
    struct file f;

    file_init(&f);
    set_text(&f, "general.architecture", "mistral4");
    set_ints(&f, "mistral4", INTS, ARRAY_LEN(INTS));
    set_text(&f, "mistral4.rope.scaling.type", "yarn");
    set_real(&f, "mistral4.rope.scaling.factor", 4);
    set_real(&f, "mistral4.attention.layer_norm_rms_epsilon", 1e-6f);
    if (beta >= 0) {
        set_real(&f, "mistral4.attention.temperature_scale", beta);
    }
    add_tensor(&f, "token_embd.weight", F32, 32, 8, EMBEDDINGS, sizeof(EMBEDDINGS));
    if (read_config(&f, &c, &e) != 0) {
        fail_msg("%s", e.text);
    }
    return c.max_positions;
}

static void growing_queries_end_a_context_unless_the_file_has_none(void **state)
{
    (void)state;
    assert_int_equal(reach_of_mistral4(-1), 64);
    assert_int_equal(reach_of_mistral4(0.2f), 64);
    assert_int_equal(reach_of_mistral4(0), 256);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_of_a_factor_of_1_turn),
        cmocka_unit_test(factors_of_other_shapes_are_refused),
        cmocka_unit_test(a_hybrid_of_granite_rotates_unless_the_file_says_not),
        cmocka_unit_test(lists_of_layers_have_a_number_for_each),
        cmocka_unit_test(numbers_of_layers_become_tensors_wherever_they_lie),
        cmocka_unit_test(numbers_of_layers_are_one_for_each_and_usual),
        cmocka_unit_test(layers_rotate_as_the_file_says),
        cmocka_unit_test(growing_queries_end_a_context_unless_the_file_has_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
