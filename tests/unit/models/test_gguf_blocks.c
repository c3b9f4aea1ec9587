/* A GGUF model whose weights stay in blocks holds the same values, in the same places,
 * as one that is decoded while it is loaded: rows that llama.cpp reorders, several
 * formats in one weight, parts of several ranks. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/loaded.h"
#include "tests/unit/models/gguf_file.h"

enum { HIDDEN = 256, HEADS = 4, N_KV_HEADS = 2, DIM = 64, MLP = 512, VOCAB = 40 };
enum { Q5_0 = 6, Q8_0 = 8, Q4_K = 12, Q6_K = 14, IQ4_XS = 23 };

static char path[] = "build/gguf-blocks-XXXXXX";

/* ---- the file ---- */

/* A block of the file whose scale, `at` bytes into it, becomes a NaN or infinite. */
static struct spoiled {
    const char *name; /* NULL: none */
    uint64_t row, block;
    size_t at;
} spoiled;

/* Blocks of any codes; bytes whose highest bits are clear make no float16 that is not
 * finite. */
static void put_blocks(struct file *f, const char *name, uint32_t encoding, uint64_t cols,
                       uint64_t rows)
{
    static uint32_t seed = 1;
    size_t n = (size_t)rows * cols / (size_t)gguf_block_values(encoding) *
               (size_t)gguf_block_bytes(encoding);
    uint8_t *data = malloc(n);

    assert_non_null(data);
    for (size_t i = 0; i < n; i++) {
        data[i] = (uint8_t)((seed = seed * 1664525 + 1013904223) >> 24) & 0xBB;
    }
    if (spoiled.name && strcmp(name, spoiled.name) == 0) {
        uint64_t block = spoiled.row * cols / (uint64_t)gguf_block_values(encoding) + spoiled.block;
        data[block * (uint64_t)gguf_block_bytes(encoding) + spoiled.at + 1] |= 0x7C;
    }
    add_tensor(f, name, encoding, cols, rows, data, n);
    free(data);
}

static void put_norm(struct file *f, const char *name)
{
    float ones[HIDDEN];

    for (int i = 0; i < HIDDEN; i++) {
        ones[i] = 1;
    }
    add_tensor(f, name, 0, HIDDEN, 0, ones, sizeof(ones));
}

static void put_bias(struct file *f, const char *name, int n)
{
    static const float NONE[3 * HIDDEN];

    add_tensor(f, name, 0, (uint64_t)n, 0, NONE, (size_t)n * sizeof(*NONE));
}

static void put_sizes(struct file *f, const char *arch, int kv_heads)
{
    const struct {
        const char *key;
        int value;
    } sizes[] = {{"context_length", 64},
                 {"embedding_length", HIDDEN},
                 {"block_count", 1},
                 {"feed_forward_length", MLP},
                 {"attention.head_count", HEADS},
                 {"attention.head_count_kv", kv_heads}};
    char name[64];

    set_text(f, "general.architecture", arch);
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        snprintf(name, sizeof(name), "%s.%s", arch, sizes[i].key);
        set_int(f, name, (uint32_t)sizes[i].value);
    }
    put_blocks(f, "token_embd.weight", Q8_0, HIDDEN, VOCAB);
    put_norm(f, "output_norm.weight");
    put_norm(f, "blk.0.attn_norm.weight");
    put_norm(f, "blk.0.ffn_norm.weight");
}

static void put_llama(struct file *f)
{
    put_sizes(f, "llama", N_KV_HEADS);
    set_int(f, "llama.rope.dimension_count", DIM);
    set_real(f, "llama.rope.freq_base", 10000);
    set_real(f, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    put_blocks(f, "blk.0.attn_q.weight", Q4_K, HIDDEN, HEADS * DIM);
    put_blocks(f, "blk.0.attn_k.weight", Q4_K, HIDDEN, N_KV_HEADS * DIM);
    put_blocks(f, "blk.0.attn_v.weight", Q6_K, HIDDEN, N_KV_HEADS * DIM);
    put_blocks(f, "blk.0.attn_output.weight", Q5_0, HEADS * DIM, HIDDEN);
    put_blocks(f, "blk.0.ffn_gate.weight", IQ4_XS, HIDDEN, MLP);
    put_blocks(f, "blk.0.ffn_up.weight", IQ4_XS, HIDDEN, MLP);
    put_blocks(f, "blk.0.ffn_down.weight", Q6_K, MLP, HIDDEN);
}

static void put_gpt2(struct file *f)
{
    put_sizes(f, "gpt2", HEADS);
    set_real(f, "gpt2.attention.layer_norm_epsilon", 1e-5f);
    put_blocks(f, "position_embd.weight", Q8_0, HIDDEN, 64);
    put_blocks(f, "blk.0.attn_qkv.weight", Q4_K, HIDDEN, 3 * HEADS * DIM);
    put_blocks(f, "blk.0.attn_output.weight", Q8_0, HEADS * DIM, HIDDEN);
    put_blocks(f, "blk.0.ffn_up.weight", Q6_K, HIDDEN, MLP);
    put_blocks(f, "blk.0.ffn_down.weight", Q4_K, MLP, HIDDEN);
    put_bias(f, "output_norm.bias", HIDDEN);
    put_bias(f, "blk.0.attn_norm.bias", HIDDEN);
    put_bias(f, "blk.0.ffn_norm.bias", HIDDEN);
    put_bias(f, "blk.0.attn_qkv.bias", 3 * HEADS * DIM);
    put_bias(f, "blk.0.attn_output.bias", HIDDEN);
    put_bias(f, "blk.0.ffn_up.bias", MLP);
    put_bias(f, "blk.0.ffn_down.bias", HIDDEN);
}

static void write_model(void (*put)(struct file *f))
{
    struct file f;

    file_init(&f);
    put(&f);
    finish(&f, 3);
    FILE *out = fopen(path, "we");
    assert_non_null(out);
    assert_int_equal(fwrite(f.all.data, 1, f.all.len, out), f.all.len);
    assert_int_equal(fclose(out), 0);
    file_release(&f);
}

/* ---- loading it ---- */

static void compare(void (*put)(struct file *f), int32_t n_ranks)
{
    struct err e = {0};

    write_model(put);
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct loaded a, b;
        if (load(&a, path, true, rank, n_ranks, &e) < 0 ||
            load(&b, path, false, rank, n_ranks, &e) < 0) {
            fail_msg("%s", e.text);
        }
        const struct layer *p = a.model->weights->layer, *q = b.model->weights->layer;
        assert_true(same_values("qkv", &a, p->qkv, q->qkv, 0));
        assert_true(same_values("o", &a, p->o, q->o, 0));
        assert_true(same_values("up", &a, p->up, q->up, 0));
        assert_true(same_values("down", &a, p->down, q->down, 0));
        assert_true(
            same_values("embedding", &a, a.model->weights->embed, b.model->weights->embed, 0));
        unload(&a);
        unload(&b);
    }
}

static void blocks_hold_the_values_of_a_decoded_model(void **state)
{
    (void)state;
    compare(put_llama, 1);
    compare(put_gpt2, 1);
}

static void ranks_hold_their_rows_and_columns(void **state)
{
    (void)state;
    compare(put_llama, 2);
}

static void a_division_that_cuts_blocks_is_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct loaded l;
    write_model(put_llama);
    assert_int_equal(load(&l, path, true, 1, 4, &e), ERR_UNSUPPORTED);
    assert_string_equal(e.text, "tensor_parallel_size 4 cuts the blocks of 256 values of "
                                "model.layers.0.mlp.down_proj.weight (Q6_K): use 2");
    unload(&l);
}

static void blocks_whose_scale_is_no_number_are_refused(void **state)
{
    (void)state;
    static const struct {
        struct spoiled block;
        const char *says;
    } CASES[] = {
        {{"blk.0.ffn_down.weight", 3, 1, 208},
         "mlp.down_proj.weight (Q6_K): the scale of the "
         "block in row 3, column 256 is no number"},
        {{"blk.0.attn_k.weight", 1, 0, 2},
         "k_proj.weight (Q4_K): the scale of the block in row 1, "
         "column 0 "},
        {{"token_embd.weight", 39, 7, 0},
         "embed_tokens.weight (Q8_0): the scale of the block in "
         "row 39, column 224 "},
    };

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        spoiled = CASES[i].block;
        write_model(put_llama);
        for (int stored = 0; stored < 2; stored++) {
            struct err e = {0};
            struct loaded l;
            assert_int_equal(load(&l, path, stored, 0, 1, &e), ERR_INVALID);
            if (!strstr(e.text, CASES[i].says)) {
                fail_msg("'%s' does not say '%s'", e.text, CASES[i].says);
            }
            unload(&l);
        }
    }
    spoiled = CASES[0].block; /* in the columns of the second rank */
    write_model(put_llama);
    for (int32_t rank = 0; rank < 2; rank++) {
        struct err e = {0};
        struct loaded l;
        assert_int_equal(load(&l, path, true, rank, 2, &e), rank == 0 ? 0 : ERR_INVALID);
        unload(&l);
    }
    spoiled = (struct spoiled){0};
}

static int make_path(void **state)
{
    (void)state;
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_path(void **state)
{
    (void)state;
    return unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_hold_the_values_of_a_decoded_model),
        cmocka_unit_test(ranks_hold_their_rows_and_columns),
        cmocka_unit_test(a_division_that_cuts_blocks_is_refused),
        cmocka_unit_test(blocks_whose_scale_is_no_number_are_refused),
    };

    return cmocka_run_group_tests(tests, make_path, remove_path);
}
