/* Which operations join a fused launch, and how its tiles are scheduled. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cuda/fused_decode/heuristics_fused.h"
#include "kernels/cuda/mixed/mixed.h"
#include "kernels/cuda/quant/groups.h"

enum { HIDDEN = 4096, INNER = 14336, QKV = 6144, BLOCKS = 132, SHARED_BYTES = 232448 };

/* Every mat gets an address range of its own; addresses are compared but never
 * dereferenced. */
static struct mat mat_at(int32_t place, int32_t rows, int32_t cols)
{
    return (struct mat){.data = (char *)NULL + ((int64_t)(place + 1) << 32),
                        .stride = cols,
                        .rows = rows,
                        .cols = cols,
                        .dtype = DTYPE_BF16};
}

struct layer {
    struct mat attn, x, y, h, up, act, qkv, w_o, w_up, w_down, w_qkv;
    struct norm norm;
    int32_t rows;
};

static struct layer layer_of(int32_t rows)
{
    return (struct layer){.attn = mat_at(0, rows, HIDDEN),
                          .x = mat_at(1, rows, HIDDEN),
                          .y = mat_at(2, rows, HIDDEN),
                          .h = mat_at(3, rows, HIDDEN),
                          .up = mat_at(4, rows, 2 * INNER),
                          .act = mat_at(5, rows, INNER),
                          .qkv = mat_at(6, rows, QKV),
                          .w_o = mat_at(7, HIDDEN, HIDDEN),
                          .w_up = mat_at(8, 2 * INNER, HIDDEN),
                          .w_down = mat_at(9, HIDDEN, INNER),
                          .w_qkv = mat_at(10, QKV, HIDDEN),
                          .norm = {.weight = mat_at(11, 1, HIDDEN), .eps = 1e-5f},
                          .rows = rows};
}

static void join_layer(struct fused_args *a, const struct layer *l)
{
    assert_true(fused_push_linear(a, l->rows, l->y, l->attn, l->w_o, NULL));
    assert_true(fused_push_add_norm(a, l->rows, l->h, l->x, l->y, &l->norm, false));
    assert_true(
        fused_push_linear_gated(a, l->rows, l->act, l->h, l->w_up, (struct mat){0}, ACT_SILU));
    assert_true(fused_push_linear(a, l->rows, l->y, l->act, l->w_down, NULL));
    assert_true(fused_push_add_norm(a, l->rows, l->h, l->x, l->y, &l->norm, false));
    assert_true(fused_push_linear(a, l->rows, l->qkv, l->h, l->w_qkv, NULL));
}

static void a_layer_is_four_ops(void **state)
{
    (void)state;
    struct layer l = layer_of(8);
    struct fused_args a = {0};
    join_layer(&a, &l);
    assert_int_equal(a.n_ops, 4);
    const struct fused_op *o = &a.op[0], *up = &a.op[1], *down = &a.op[2], *qkv = &a.op[3];
    assert_true(o->x == l.attn.data && !o->h && o->out == l.y.data && o->sum == l.x.data);
    assert_true(up->x == l.x.data && up->h == l.h.data && !up->out && up->gated == l.act.data);
    assert_true(down->x == l.act.data && !down->h && down->k == INNER && down->sum == l.x.data);
    assert_true(qkv->x == l.x.data && qkv->h == l.h.data && qkv->n == QKV && !qkv->sum &&
                !qkv->gated);
}

static struct mat quantised(struct mat m, struct quant_weight *q)
{
    m.format = weight_format_of((enum weight_format_id)q->format);
    m.priv = q;
    return m;
}

static void a_launch_has_weights_of_one_format(void **state)
{
    (void)state;
    float scale;
    struct quant_weight fp8 = {.format = FORMAT_FP8,
                               .n_groups = 1,
                               .row_bytes = 4096,
                               .scale = &scale},
                        int4 = {.format = FORMAT_INT4, .layout = QUANT_SEGMENTS},
                        blocks = {.format = FORMAT_FP8, .n_groups = 32},
                        groups = {.format = FORMAT_Q6_K,
                                  .layout = QUANT_GROUPS,
                                  .kind = GROUPS_8,
                                  .group_cols = 16,
                                  .scale = &scale};
    struct layer l = layer_of(8);
    struct fused_args a = {0};
    l.w_o = quantised(l.w_o, &fp8);
    assert_true(fused_push_linear(&a, l.rows, l.y, l.attn, l.w_o, NULL));
    assert_int_equal(a.format, FUSED_FP8);
    assert_true(a.op[0].w_stride == 4096 && a.op[0].w_scale == &scale);
    assert_true(fused_push_add_norm(&a, l.rows, l.h, l.x, l.y, &l.norm, false));
    assert_false(fused_push_linear(&a, l.rows, l.qkv, l.h, l.w_qkv, NULL));
    assert_false(fused_push_linear(&a, l.rows, l.qkv, l.h, quantised(l.w_qkv, &int4), NULL));
    assert_true(fused_push_linear(&a, l.rows, l.qkv, l.h, quantised(l.w_qkv, &fp8), NULL));
    assert_true(fused_plan(&a, BLOCKS, SHARED_BYTES));
    a = (struct fused_args){0};
    assert_true(fused_push_linear(&a, l.rows, l.qkv, l.h, quantised(l.w_qkv, &int4), NULL));
    assert_int_equal(a.format, FUSED_INT4);
    a = (struct fused_args){0};
    assert_true(fused_push_linear(&a, l.rows, l.qkv, l.h, quantised(l.w_qkv, &groups), NULL));
    assert_int_equal(a.format, FUSED_GROUPS_8);
    assert_true(a.op[0].halves && a.op[0].w_scale == &scale);
    assert_false(fused_plan(&a, BLOCKS, SHARED_BYTES)); /* launches of their own alone */
    a = (struct fused_args){0};                         /* scales of blocks are not a row's */
    assert_false(fused_push_linear(&a, l.rows, l.qkv, l.h, quantised(l.w_qkv, &blocks), NULL));
}

static void summands_of_ranks_must_fit_an_inbox(void **state)
{
    (void)state;
    struct layer l = layer_of(1);
    struct fused_args a = {0};
    assert_true(fused_push_linear(&a, 1, l.y, l.attn, l.w_o, NULL));
    assert_true(fused_push_add_norm(&a, 1, l.h, l.x, l.y, &l.norm, true));
    assert_true(a.op[0].partial && a.op[0].sum == l.x.data && !a.op[1].partial);
    int32_t wide = P2P_FUSED_BYTES / FUSED_RESULT_BYTES * FUSED_TILE + 64;
    struct mat x = mat_at(20, 1, wide), y = mat_at(21, 1, wide), h = mat_at(22, 1, wide);
    struct norm n = {.weight = mat_at(24, 1, wide), .eps = 1e-5f};
    a = (struct fused_args){0};
    assert_true(fused_push_linear(&a, 1, y, l.attn, mat_at(23, wide, HIDDEN), NULL));
    assert_false(fused_push_add_norm(&a, 1, h, x, y, &n, true));
    assert_true(fused_push_add_norm(&a, 1, h, x, y, &n, false));
}

static void a_norm_without_its_product_is_an_op_of_its_own(void **state)
{
    (void)state;
    struct layer l = layer_of(2);
    struct fused_args a = {0};
    assert_true(fused_push_norm(&a, 2, l.h, l.x, &l.norm));
    assert_true(fused_push_linear(&a, 2, l.y, l.attn, l.w_o, NULL)); /* does not read h */
    assert_int_equal(a.n_ops, 2);
    assert_int_equal(a.op[0].n, 0);
    /* reads h like any activations */
    assert_true(fused_push_linear(&a, 2, l.qkv, l.h, l.w_qkv, NULL));
    assert_int_equal(a.n_ops, 3);
    assert_null(a.op[2].h);
}

static void a_full_launch_takes_no_more(void **state)
{
    (void)state;
    struct layer l = layer_of(1);
    struct fused_args a = {0};
    for (int i = 0; i < FUSED_OPS; i++) {
        assert_true(fused_push_linear(&a, 1, l.y, l.attn, l.w_o, NULL));
    }
    struct fused_args before = a;
    assert_false(fused_push_linear(&a, 1, l.y, l.attn, l.w_o, NULL));
    assert_false(fused_push_add_norm(&a, 1, l.h, l.x, l.y, &l.norm, false));
    assert_memory_equal(&a, &before, sizeof(a));
}

/* Changes of single operands, each of which must be refused. */
static void operands_that_do_not_suit_are_refused(void **state)
{
    (void)state;
    struct layer l = layer_of(4);
    struct fused_args a = {0};
    struct mat odd = l.attn, deep = l.attn, wide = l.w_o, f32 = l.attn, far = l.attn;
    odd.data = (char *)odd.data + 2;
    deep.cols = 4096 + 32;
    wide.rows = 4096 + 8;
    f32.dtype = DTYPE_F32;
    far.stride = 4100;
    struct mat deep_w = l.w_o, wide_out = l.y, f32_w = l.w_o, f32_out = l.y;
    deep_w.cols = deep.cols;
    wide_out.cols = wide.rows;
    f32_w.dtype = f32_out.dtype = DTYPE_F32;
    assert_false(fused_push_linear(&a, 4, l.y, odd, l.w_o, NULL));
    assert_false(fused_push_linear(&a, 4, l.y, far, l.w_o, NULL));
    assert_false(fused_push_linear(&a, 4, l.y, deep, deep_w, NULL));
    assert_false(fused_push_linear(&a, 4, wide_out, l.attn, wide, NULL));
    assert_false(fused_push_linear(&a, 4, f32_out, f32, f32_w, NULL));
    assert_false(fused_push_linear(&a, 4, f32_out, l.attn, l.w_o, NULL));
    assert_false(fused_push_linear(&a, MIXED_MOST_ROWS + 1, l.y, l.attn, l.w_o, NULL));
    /* in place: other blocks still read what one writes */
    assert_false(fused_push_linear(&a, 4, l.attn, l.attn, l.w_o, NULL));
    struct epilogue bias = {.bias = mat_at(20, 1, HIDDEN)};
    bias.bias.dtype = DTYPE_F32;
    assert_false(fused_push_linear(&a, 4, l.y, l.attn, l.w_o, &bias));
    assert_false(fused_push_norm(&a, 4, l.x, l.x, &l.norm));
    assert_false(fused_push_norm(&a, 4, l.h, odd, &l.norm));
    assert_int_equal(a.n_ops, 0);
    assert_true(fused_push_linear(&a, 4, l.y, l.attn, l.w_o, NULL));
    assert_false(fused_push_linear(&a, 3, l.qkv, l.h, l.w_qkv, NULL)); /* another number of rows */
    assert_int_equal(a.n_ops, 1);
}

/* y must be the last product's result, and no op may still read x, which is written. */
static void only_the_last_product_is_added(void **state)
{
    (void)state;
    struct layer l = layer_of(4);
    struct fused_args a = {0};
    assert_false(fused_push_add_norm(&a, 4, l.h, l.x, l.y, &l.norm, false));
    assert_true(fused_push_linear(&a, 4, l.y, l.attn, l.w_o, NULL));
    assert_false(fused_push_add_norm(&a, 4, l.h, l.x, l.attn, &l.norm, false));
    assert_false(fused_push_add_norm(&a, 4, l.h, l.attn, l.y, &l.norm, false));
    assert_true(fused_push_add_norm(&a, 4, l.h, l.x, l.y, &l.norm, false));
    assert_false(fused_push_add_norm(&a, 4, l.h, l.x, l.y, &l.norm, false));
    /* twice as wide */
    assert_false(fused_push_linear_gated(&a, 4, l.up, l.h, l.w_up, (struct mat){0}, ACT_SILU));
    assert_false(fused_push_linear_gated(&a, 4, l.x, l.act, l.w_up, (struct mat){0}, ACT_SILU));
    assert_int_equal(a.n_ops, 2);
}

/* The rotation needs both halves of a head in one tile; unsupported kinds are not
 * fused. */
static void heads_are_rotated_where_they_are_made(void **state)
{
    (void)state;
    struct layer l = layer_of(4);
    struct fused_rope at = {.kv = {.base = (char *)NULL + 64, .dtype = DTYPE_BF16}};
    struct attention heads = {.layer = 3, .n_heads = 32, .n_kv_heads = 8, .head_dim = 128};
    struct rope turn = {.cos_sin = mat_at(12, 1, 128), .rot_dim = 128};
    struct rope half = turn, pairs = turn, normed = turn;
    half.rot_dim = 64;
    pairs.interleaved = true;
    normed.k_norm.weight = mat_at(13, 1, 128);
    struct attention fewer = heads;
    fewer.n_heads = 30;
    struct fused_args a = {0};
    assert_false(fused_push_rope_kv(&a, 4, l.qkv, &turn, &heads, &at));
    join_layer(&a, &l);
    assert_false(fused_push_rope_kv(&a, 4, l.qkv, &half, &heads, &at));
    assert_false(fused_push_rope_kv(&a, 4, l.qkv, &pairs, &heads, &at));
    assert_false(fused_push_rope_kv(&a, 4, l.qkv, &normed, &heads, &at));
    assert_false(fused_push_rope_kv(&a, 4, l.qkv, &turn, &fewer, &at));
    assert_false(fused_push_rope_kv(&a, 4, l.up, &turn, &heads, &at));
    struct fused_rope scaled = at, e4m3 = at;
    scaled.kv.dtype = DTYPE_I8; /* wants a head's greatest value before it writes one */
    assert_false(fused_push_rope_kv(&a, 4, l.qkv, &turn, &heads, &scaled));
    struct fused_args narrow = a, factors = a;
    turn.query_factors = true;
    assert_true(fused_push_rope_kv(&factors, 4, l.qkv, &turn, &heads, &at));
    assert_true(factors.rope.query_factors);
    turn.query_factors = false;
    e4m3.kv.dtype = DTYPE_F8;
    assert_true(fused_push_rope_kv(&narrow, 4, l.qkv, &turn, &heads, &e4m3));
    assert_true(narrow.rope.k_over == 1 && narrow.rope.v_over == 1);
    assert_true(fused_push_rope_kv(&a, 4, l.qkv, &turn, &heads, &at));
    assert_int_equal(a.n_ops, 4);
    assert_true(a.op[3].roped && a.op[3].pair == 128 && a.rope.layer == 3 && a.rope.n_heads == 32);
    assert_false(fused_push_rope_kv(&a, 4, l.qkv, &turn, &heads, &at)); /* once is enough */
}

/* Products deeper than registers hold are cut into split-K slices of whole stages, as
 * even as possible. */
static void deep_products_are_cut_into_slices(void **state)
{
    (void)state;
    static const struct {
        int32_t k, slices, slice_k;
    } cases[] = {{64, 1, 512},    {4096, 1, 4096},  {4160, 2, 2560}, {5120, 2, 2560},
                 {8192, 2, 4096}, {14336, 4, 3584}, {16960, 5, 3584}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct fused_args a = {0};
        struct mat x = mat_at(0, 8, cases[i].k), y = mat_at(1, 8, HIDDEN),
                   w = mat_at(2, HIDDEN, cases[i].k);
        assert_true(fused_push_linear(&a, 8, y, x, w, NULL));
        assert_true(fused_plan(&a, BLOCKS, SHARED_BYTES));
        assert_int_equal(a.op[0].slices, cases[i].slices);
        assert_int_equal(a.op[0].slice_k, cases[i].slice_k);
    }
}

/* A norm's weight must fit into shared memory, partial sums into their buffer. */
static void what_is_too_wide_is_not_fused(void **state)
{
    (void)state;
    struct layer l = layer_of(8);
    struct fused_args a = {0};
    int32_t wide = FUSED_MAX_NORM + 64;
    struct mat x = mat_at(1, 8, wide), h = mat_at(3, 8, wide);
    struct norm n = {.weight = mat_at(11, 1, wide), .eps = 1e-5f};
    assert_false(fused_push_norm(&a, 8, h, x, &n));
    int32_t rows = FUSED_MAX_PARTIALS / 4 * FUSED_TILE;
    struct mat most = mat_at(4, 8, rows), more = mat_at(4, 8, rows + FUSED_TILE),
               w = mat_at(9, rows, INNER);
    assert_true(fused_push_linear(&a, 8, most, l.act, w, NULL));
    assert_true(fused_plan(&a, BLOCKS, SHARED_BYTES));
    a = (struct fused_args){0};
    w.rows += FUSED_TILE;
    assert_true(fused_push_linear(&a, 8, more, l.act, w, NULL));
    assert_false(fused_plan(&a, BLOCKS, SHARED_BYTES));
}

/* Every slice of every tile is done once, a block's tiles are all of one slice, and
 * over all ops no block has more than one tile more than another. */
static void slices_of_tiles_are_scheduled_evenly(void **state)
{
    (void)state;
    struct layer l = layer_of(FUSED_ROWS);
    struct fused_args a = {0};
    int32_t total[BLOCKS] = {0};
    join_layer(&a, &l);
    assert_true(fused_plan(&a, BLOCKS, SHARED_BYTES));
    assert_true(a.shared_bytes <= SHARED_BYTES && a.n_stages >= 13);
    for (int32_t p = 0; p < a.n_ops; p++) {
        static bool seen[2 * INNER / FUSED_TILE];
        memset(seen, 0, sizeof(seen));
        int32_t n_seen = 0, n_tiles = a.op[p].n / FUSED_TILE;
        for (int32_t b = 0; b < BLOCKS; b++) {
            struct tile_schedule d = tile_schedule_of(&a.op[p], b, BLOCKS);
            assert_in_range(d.slice, 0, a.op[p].slices - 1);
            total[b] += d.n;
            n_seen += d.n;
            for (int32_t i = 0; i < d.n; i++) {
                int32_t tile = d.first + i * d.step;
                assert_in_range(tile, 0, n_tiles - 1);
                assert_false(seen[d.slice * n_tiles + tile]);
                seen[d.slice * n_tiles + tile] = true;
            }
        }
        assert_int_equal(n_seen, n_tiles * a.op[p].slices);
    }
    for (int32_t b = 0; b < BLOCKS; b++) {
        assert_in_range(total[b] - total[0] + 1, 0, 2);
    }
}

/* Also where the blocks are no multiple of the slices, and where there are fewer tiles
 * than blocks. */
static void odd_numbers_of_slices_are_scheduled_too(void **state)
{
    (void)state;
    for (int32_t slices = 1; slices <= 7; slices++) {
        for (int32_t n_tiles = 1; n_tiles < 200; n_tiles += 33) {
            struct fused_op p = {.n = n_tiles * FUSED_TILE, .slices = slices, .first = 100};
            int32_t n[7] = {0};
            for (int32_t b = 0; b < BLOCKS; b++) {
                struct tile_schedule d = tile_schedule_of(&p, b, BLOCKS);
                assert_in_range(d.slice, 0, slices - 1);
                assert_true(d.n == 0 || d.first + (d.n - 1) * d.step < n_tiles);
                n[d.slice] += d.n;
            }
            for (int32_t i = 0; i < slices; i++) {
                assert_int_equal(n[i], n_tiles);
            }
        }
    }
}

static void too_little_shared_memory_fuses_nothing(void **state)
{
    (void)state;
    struct layer l = layer_of(8);
    struct fused_args a = {0};
    join_layer(&a, &l);
    assert_false(fused_plan(&a, BLOCKS, 64 << 10));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_layer_is_four_ops),
        cmocka_unit_test(a_launch_has_weights_of_one_format),
        cmocka_unit_test(summands_of_ranks_must_fit_an_inbox),
        cmocka_unit_test(a_norm_without_its_product_is_an_op_of_its_own),
        cmocka_unit_test(a_full_launch_takes_no_more),
        cmocka_unit_test(operands_that_do_not_suit_are_refused),
        cmocka_unit_test(only_the_last_product_is_added),
        cmocka_unit_test(heads_are_rotated_where_they_are_made),
        cmocka_unit_test(deep_products_are_cut_into_slices),
        cmocka_unit_test(what_is_too_wide_is_not_fused),
        cmocka_unit_test(slices_of_tiles_are_scheduled_evenly),
        cmocka_unit_test(odd_numbers_of_slices_are_scheduled_too),
        cmocka_unit_test(too_little_shared_memory_fuses_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
