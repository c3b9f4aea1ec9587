/* Which products of few rows go by own launches, and in what tiles. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/backend.h"
#include "kernels/cuda/fused_decode/heuristics_grids.h"
#include "kernels/cuda/fused_decode/small_codes.h"
#include "kernels/cuda/fused_decode/small_rows.h"
#include "kernels/cuda/heuristics_speed.h"
#include "kernels/cuda/mixed/mixed.h"

enum { H200 = 132 };

static char memory[8];

static struct fused_op product(int32_t n, int32_t k, enum small_kind kind)
{
    struct fused_op p = {.x = memory, .w = memory + 1, .n = n, .k = k};

    p.gated = kind == SMALL_GATED ? memory + 2 : NULL;
    p.sum = kind == SMALL_SUM ? memory + 3 : NULL;
    p.out = kind == SMALL_PLAIN ? memory + 4 : NULL;
    return p;
}

static void a_tile_is(int32_t n, int32_t k, enum small_kind kind, int32_t width, int32_t split)
{
    struct fused_op p = product(n, k, kind);
    struct small_tile t = small_tile_of(&p, H200);

    assert_int_equal(t.kind, kind);
    assert_int_equal(t.width, width);
    assert_int_equal(t.split, width ? split : 0);
}

static void products_are_one_wave_of_tiles(void **state)
{
    (void)state;
    a_tile_is(6144, 4096, SMALL_PLAIN, 48, 1); /* Llama 8B */
    a_tile_is(4096, 4096, SMALL_SUM, 64, 2);
    a_tile_is(28672, 4096, SMALL_GATED, 224, 1);
    a_tile_is(4096, 14336, SMALL_SUM, 64, 2);
    a_tile_is(4608, 3584, SMALL_PLAIN, 72, 2); /* Qwen2.5 7B */
    a_tile_is(3584, 3584, SMALL_SUM, 56, 2);
    a_tile_is(5120, 5120, SMALL_SUM, 80, 2);
    a_tile_is(2048, 8192, SMALL_SUM, 32, 2); /* Llama 1B */
    a_tile_is(16384, 2048, SMALL_GATED, 128, 1);
    a_tile_is(1536, 4096, SMALL_PLAIN, 24, 2); /* Llama 8B on four ranks */
    a_tile_is(7168, 4096, SMALL_GATED, 64, 1);
    a_tile_is(2560, 8192, SMALL_PLAIN, 40, 2); /* Llama 70B on four ranks */
    /* the last tile is cut: of a mixer, of Qwen3 4B's gate */
    a_tile_is(12352, 2560, SMALL_PLAIN, 96, 1);
    a_tile_is(19456, 2560, SMALL_GATED, 160, 1);
    a_tile_is(12360, 2560, SMALL_PLAIN, 0, 0); /* not in sixteens */
}

static void what_is_no_wave_is_left_to_cublas(void **state)
{
    (void)state;
    a_tile_is(37888, 3584, SMALL_GATED, 0, 0); /* 148 tiles of the widest */
    a_tile_is(128256, 4096, SMALL_PLAIN, 0, 0);
    a_tile_is(4096, 4160, SMALL_SUM, 0, 0); /* an odd number of stages cannot be split */
}

static bool tiles_fill(small_tile_fn *tile, const struct fused_op *p, int32_t n_blocks,
                       int32_t enough)
{
    struct fused_args a = {.n_ops = 2, .op = {[1] = *p}}; /* behind a norm alone */

    return small_grids_fill(&a, tile, n_blocks, enough);
}

/* Whether the grid of a product reads memory fast enough, in tiles of both kinds. */
static bool fills(const struct fused_op *p, int32_t n_blocks, int32_t enough)
{
    bool floats = tiles_fill(small_tile_of, p, n_blocks, enough);

    assert_int_equal(floats, tiles_fill(small_codes_tile, p, n_blocks, enough));
    return floats;
}

/* Qwen3-30B-A3B's: the sum splits the depth. */
static void a_narrow_product_waits_for_its_sum(void **state)
{
    struct fused_op p = product(2048, 4096, SMALL_PLAIN);

    (void)state;
    assert_false(fills(&p, H200, 0));
    p.out_transient = true;
    assert_true(fills(&p, H200, 0));
    assert_int_equal(small_tile_of(&p, H200).width, 32);
    assert_int_equal(small_codes_tile(&p, H200).width, 32);
    p.bias = memory + 7;
    assert_false(fills(&p, H200, 0));
    p.bias = NULL;
    p.n = 1024; /* 64 blocks even as a sum */
    assert_false(fills(&p, H200, 0));
    p.n = 28672;
    assert_false(fills(&p, H200, 0)); /* no tile at all */
}

/* On an H100 with PCIe, whose memory has less than half of the bandwidth, fewer blocks
 * read as fast as it gives; on an H20 nearly all do not. */
static void grids_follow_the_bandwidth(void **state)
{
    enum { PCIE = 114, PCIE_GBS = 2039, H20 = 78, H20_GBS = 4023 };
    struct fused_op qkv = product(6144, 4096, SMALL_PLAIN), o = product(4096, 4096, SMALL_SUM);

    (void)state;
    assert_int_equal(memory_blocks(H200_GBS), 116);
    assert_int_equal(memory_blocks(3352), 79); /* H100 */
    assert_int_equal(memory_blocks(PCIE_GBS), 48);
    assert_int_equal(memory_blocks(H20_GBS), 95);
    assert_int_equal(memory_blocks(0), 0);
    for (int32_t n = 32; n <= 32768; n += 32) { /* on an H200 nothing changes */
        struct fused_op p = product(n, 4096, (enum small_kind)(n / 32 % 3));
        for (int i = 0; i < 2; i++) {
            small_tile_fn *tile = i == 0 ? small_tile_of : small_codes_tile;
            assert_int_equal(tiles_fill(tile, &p, H200, 116), tiles_fill(tile, &p, H200, 0));
        }
    }
    assert_true(fills(&qkv, H200, 116) && fills(&o, H200, 116));
    assert_true(tiles_fill(small_tile_of, &qkv, PCIE, 0)); /* 110 blocks, the last one cut */
    assert_false(tiles_fill(small_codes_tile, &qkv, PCIE, 0));
    assert_false(fills(&o, PCIE, 0));
    assert_true(fills(&qkv, PCIE, memory_blocks(PCIE_GBS))); /* of codes 96 blocks */
    assert_true(fills(&o, PCIE, memory_blocks(PCIE_GBS)));   /* 64 */
    assert_false(tiles_fill(small_codes_tile, &qkv, H20, memory_blocks(H20_GBS))); /* 64 of 78 */
}

static struct small_tile codes_tile(int32_t n, int32_t k, enum small_kind kind)
{
    struct fused_op p = product(n, k, kind);

    return small_codes_tile(&p, H200);
}

static void products_of_codes_have_twice_the_depth_a_stage(void **state)
{
    (void)state;
    struct small_tile t = codes_tile(28672, 4096, SMALL_GATED);
    assert_true(t.width == 224 && t.split == 1);
    t = codes_tile(4096, 14336, SMALL_SUM);
    assert_true(t.width == 64 && t.split == 2);
    t = codes_tile(6144, 4096, SMALL_PLAIN);
    assert_true(t.width == 48 && t.split == 1);
    t = codes_tile(3072, 4096, SMALL_PLAIN); /* Llama 8B on two ranks */
    assert_true(t.width == 24 && t.split == 1);
    assert_int_equal(codes_tile(6144, 4224, SMALL_PLAIN).width, 0); /* not two stages a turn */
    assert_int_equal(codes_tile(4096, 1280, SMALL_SUM).width, 0);   /* nor a part of them */
}

static struct fused_args layer(void)
{
    struct fused_args a = {.rows = 64, .type = DTYPE_BF16};
    struct fused_op o = product(4096, 4096, SMALL_SUM), up = product(28672, 4096, SMALL_GATED),
                    down = product(4096, 14336, SMALL_SUM), qkv = product(6144, 4096, SMALL_PLAIN);

    up.x = qkv.x = o.sum;
    up.h = qkv.h = memory + 5;
    up.h_transient = qkv.h_transient = true;
    o.out_transient = down.out_transient = true;
    up.norm.weight = qkv.norm.weight = memory + 6;
    up.norm.weight_type = qkv.norm.weight_type = DTYPE_BF16;
    a.op[a.n_ops++] = o;
    a.op[a.n_ops++] = up;
    a.op[a.n_ops++] = down;
    a.op[a.n_ops++] = qkv;
    return a;
}

static void a_layer_goes_by_four_launches(void **state)
{
    struct fused_args a = layer();

    (void)state;
    assert_true(small_plan(&a, H200));
    assert_true(small_grids_fill(&a, small_tile_of, H200, 0));
    assert_true(small_grids_fill(&a, small_tile_of, H200, memory_blocks(H200_GBS)));
    a.rows = SMALL_ROWS + 1;
    assert_false(small_plan(&a, H200));
}

static void a_norm_is_taken_apart_where_nothing_else_reads_it(void **state)
{
    struct fused_args a = layer();

    (void)state;
    assert_false(small_norm_apart(&a, 0));
    assert_true(small_norm_apart(&a, 1));
    assert_false(small_norm_apart(&a, 2));
    assert_true(small_norm_apart(&a, 3));
    a.op[1].h_transient = false;
    assert_false(small_norm_apart(&a, 1));
    a = layer();
    a.op[1].norm.layer_norm = 1; /* has a mean */
    assert_false(small_norm_apart(&a, 1));
    a = layer();
    a.op[1].x = memory; /* not what the product before it makes */
    assert_false(small_norm_apart(&a, 1));
}

static void what_does_not_suit_is_refused(void **state)
{
    struct fused_args a = layer();

    (void)state;
    a.type = DTYPE_F16; /* the stream times a weight may overflow */
    assert_false(small_plan(&a, H200));
    a = layer();
    a.op[0].out_transient = false; /* a summand that is to be stored */
    assert_false(small_plan(&a, H200));
    a = layer();
    a.rope.kv.base = memory;
    assert_false(small_plan(&a, H200));
    a = layer();
    a.op[0].bias = memory; /* of a sum */
    assert_false(small_plan(&a, H200));
}

static void layers_of_codes_need_activations_of_codes(void **state)
{
    struct fused_args a = layer();
    float scale;
    uint8_t codes;

    (void)state;
    a.format = FUSED_FP8;
    a.codes = &codes;
    a.code_scale = &scale;
    for (int32_t i = 0; i < a.n_ops; i++) {
        a.op[i].e4m3 = true;
    }
    assert_false(small_plan(&a, H200)); /* whose stages are of bf16 */
    assert_true(small_codes_plan(&a, H200));
    a.op[2].e4m3 = false; /* of a file whose activations stay */
    assert_false(small_codes_plan(&a, H200));
    a.op[2].e4m3 = true;
    a.codes = NULL;
    assert_false(small_codes_plan(&a, H200));
}

static void mixed_tile_is(int32_t format, int32_t rows, int32_t n, int32_t k, enum small_kind kind,
                          int32_t width, int32_t split)
{
    struct fused_op p = product(n, k, kind);
    struct small_tile t = small_mixed_tile(&p, format, rows, H200);

    assert_int_equal(t.kind, kind);
    assert_int_equal(t.width, width);
    assert_int_equal(t.split, width ? split : 0);
}

static void mixed_products_have_the_most_blocks_of_a_wave(void **state)
{
    (void)state;
    mixed_tile_is(FUSED_INT4, 64, 6144, 4096, SMALL_PLAIN, 64, 1); /* Llama 8B */
    mixed_tile_is(FUSED_INT4, 64, 4096, 4096, SMALL_SUM, 64, 2);
    mixed_tile_is(FUSED_INT4, 64, 28672, 4096, SMALL_GATED, 256, 1);
    mixed_tile_is(FUSED_FP8, 64, 4096, 14336, SMALL_SUM, 64, 2);
    mixed_tile_is(FUSED_INT4, 64, 57344, 8192, SMALL_GATED, 256, 1); /* two waves */
    mixed_tile_is(FUSED_INT4, 64, 4096, 512, SMALL_SUM, 64, 1);      /* one segment: no split */
    mixed_tile_is(FUSED_INT4, 64, 4096, 640, SMALL_SUM, 0, 0);       /* not whole segments */
    mixed_tile_is(FUSED_FP8, 64, 28672, 640, SMALL_GATED, 256, 1);   /* whose stages are groups */
    mixed_tile_is(FUSED_FP8, 64, 6144, 640, SMALL_PLAIN, 256, 1);    /* likewise */
    mixed_tile_is(FUSED_INT8, 64, 4096 + 16, 4096, SMALL_SUM, 0, 0);
    mixed_tile_is(FUSED_INT8, 64, 64, 4096, SMALL_GATED, 0, 0); /* a gate and what it gates */
    mixed_tile_is(FUSED_MXFP4, 17, 4096, 4096, SMALL_SUM, 64, 2);
    /* 65 rows and more: two warpgroups, a block for each 128 rows */
    mixed_tile_is(FUSED_INT4, 128, 4096, 14336, SMALL_PLAIN, 64, 2);
    mixed_tile_is(FUSED_INT4, 129, 4096, 14336, SMALL_PLAIN, 64, 1);
    mixed_tile_is(FUSED_NVFP4, 100, 28672, 4096, SMALL_GATED, 128, 1);
    /* groups, whose columns are filled up to 512 */
    mixed_tile_is(FUSED_GROUPS_4, 64, 4096, 11008, SMALL_SUM, 64, 2);
    mixed_tile_is(FUSED_GROUPS_8, 8, 896, 896, SMALL_SUM, 64, 2);
    mixed_tile_is(FUSED_LEVELS, 8, 896, 1088, SMALL_SUM, 64, 1);
    mixed_tile_is(FUSED_GROUPS_8, 8, 96, 4096, SMALL_PLAIN, 0, 0);
}

static void mixed_products_take_what_fills_the_device_or_nothing_else_takes(void **state)
{
    struct fused_args a = layer();

    (void)state;
    assert_false(small_mixed_plan(&a, H200)); /* of floats */
    a.format = FUSED_INT4;
    for (int32_t i = 0; i < a.n_ops; i++) {
        a.op[i].n_groups = 1;
    }
    assert_true(small_mixed_plan(&a, H200));
    a.rows = 3;
    assert_true(small_mixed_plan(&a, H200));
    a.op[0].n = 1024; /* 32 blocks: the fused launch is better */
    assert_false(small_mixed_plan(&a, H200));
    a.format = FUSED_INT8; /* which it does not take */
    assert_true(small_mixed_plan(&a, H200));
    a.format = FUSED_FP8;
    assert_false(small_mixed_plan(&a, H200));
    a.op[0].n_groups = 32;
    assert_true(small_mixed_plan(&a, H200));
    a.op[0].e4m3 = true;
    assert_true(small_mixed_plan(&a, H200));
    a.rows = 12; /* whose activations are quantised */
    assert_false(small_mixed_plan(&a, H200));
    a.op[0].e4m3 = false;
    assert_true(small_mixed_plan(&a, H200));
    a.op[0].partial = true; /* of ranks */
    assert_true(small_mixed_plan(&a, H200));
    a.op[0].n = 40960; /* two waves, of which one would wait for the other */
    assert_false(small_mixed_plan(&a, H200));
    a.op[0].partial = false;
    assert_true(small_mixed_plan(&a, H200));
}

static void sums_over_ranks_are_one_wave_that_fits_an_inbox(void **state)
{
    struct fused_args a = layer();
    struct small_tile t = {SMALL_SUM, 64, 2};

    (void)state;
    a.op[0].partial = true;
    assert_true(small_plan(&a, H200));
    assert_true(small_sums_over_ranks(&a, &a.op[0], &t, H200));
    assert_false(small_sums_over_ranks(&a, &a.op[0], &t, 64)); /* blocks wait for blocks */
    a.p2p.n_ranks = 2;
    a.rows = 64;
    assert_true(small_sums_over_ranks(&a, &a.op[0], &t, H200)); /* 64 x 4096 bf16, once */
    a.p2p.n_ranks = 4;
    assert_false(small_sums_over_ranks(&a, &a.op[0], &t, H200)); /* three times */
    a.rows = 16;
    assert_true(small_sums_over_ranks(&a, &a.op[0], &t, H200));
    a.op[0].n = 32768; /* columns */
    t.width = 512;
    assert_false(small_sums_over_ranks(&a, &a.op[0], &t, H200));
    a = layer();
    a.op[0].partial = true;
    a.op[0].sum = NULL; /* which no norm follows */
    assert_false(small_plan(&a, H200));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_one_wave_of_tiles),
        cmocka_unit_test(what_is_no_wave_is_left_to_cublas),
        cmocka_unit_test(a_narrow_product_waits_for_its_sum),
        cmocka_unit_test(grids_follow_the_bandwidth),
        cmocka_unit_test(products_of_codes_have_twice_the_depth_a_stage),
        cmocka_unit_test(a_layer_goes_by_four_launches),
        cmocka_unit_test(layers_of_codes_need_activations_of_codes),
        cmocka_unit_test(mixed_products_have_the_most_blocks_of_a_wave),
        cmocka_unit_test(mixed_products_take_what_fills_the_device_or_nothing_else_takes),
        cmocka_unit_test(a_norm_is_taken_apart_where_nothing_else_reads_it),
        cmocka_unit_test(what_does_not_suit_is_refused),
        cmocka_unit_test(sums_over_ranks_are_one_wave_that_fits_an_inbox),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
