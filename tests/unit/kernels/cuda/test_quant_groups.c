/* Weights in groups as the CUDA backend keeps them (groups.h, and those of experts in
 * panels.h): what is packed, read back as its kernels read it, is what the file has.
 *
 *     build/tests/unit/kernels/cuda/test_quant_groups
 */
#include "kernels/cuda/quant/groups.h"
#include "kernels/cuda/quant/panels.h"

#include "tests/unit/blocks.h"

enum { ROWS = 128, COLS = 768 }; /* two tiles; the last segment of four bits is half full */

/* The values that `l` has of `d`. */
static float *repacked(const struct weight_desc *d, const struct groups_layout *l)
{
    float *ret = rig_alloc((size_t)d->rows * (size_t)d->cols * sizeof(*ret));
    uint8_t *tile = rig_alloc((size_t)groups_tile_bytes(l));
    float factor[QUANT_TILE_ROWS];

    for (int32_t first = 0; first < d->rows; first += QUANT_TILE_ROWS) {
        assert_int_equal(groups_pack_tile(d, l, first, tile, factor), 0);
        for (int32_t i = 0; i < QUANT_TILE_ROWS; i++) {
            groups_unpack_row(l, tile, factor[i], i, ret + (int64_t)(first + i) * d->cols);
        }
    }
    free(tile);
    return ret;
}

/* The same of experts. */
static float *repacked_panels(const struct weight_desc *d, int32_t *ret_kind)
{
    struct weight_desc experts = *d;
    struct panels_layout l;
    const char *why = NULL;

    experts.experts = true;
    if (!panels_layout_of(&experts, &l, &why)) {
        fail_msg("%s: %s", d->piece[0].format->name, why);
    }
    float *ret = rig_alloc((size_t)d->rows * (size_t)d->cols * sizeof(*ret));
    uint8_t *panel = rig_alloc((size_t)panel_bytes(d->cols, l.kind));
    float factor[PANEL_ROWS];
    for (int32_t first = 0; first < d->rows; first += PANEL_ROWS) {
        assert_int_equal(panels_pack(&experts, &l, first, panel, factor), 0);
        for (int32_t i = 0; i < PANEL_ROWS; i++) {
            panels_unpack_row(&l, panel, factor[i], i, ret + (int64_t)(first + i) * d->cols);
        }
    }
    free(panel);
    *ret_kind = l.kind;
    return ret;
}

static struct groups_layout layout_of(const struct weight_desc *d)
{
    struct groups_layout l;
    const char *why = NULL;

    if (!groups_layout_of(d, &l, &why)) {
        fail_msg("%s: %s", d->piece[0].format->name, why);
    }
    return l;
}

static struct weight_desc desc_of(const struct weight_piece *piece, int32_t n)
{
    struct weight_desc d = {.name = "test",
                            .kind = WEIGHT_LINEAR,
                            .dtype = DTYPE_BF16,
                            .cols = piece->cols,
                            .piece = piece,
                            .n_pieces = n};

    for (int32_t i = 0; i < n; i++) {
        d.rows += piece[i].rows;
    }
    return d;
}

/* ---- blocks ---- */

/* Whether a format's scales are fp16 or powers of two, and there are no minima: then
 * values are the same to the last bit. */
static bool is_exact(enum weight_format_id id)
{
    return id == FORMAT_Q4_0 || id == FORMAT_Q5_0 || id == FORMAT_Q8_0 || id == FORMAT_IQ4_NL ||
           id == FORMAT_MXFP4;
}

/* Compares a row with its blocks: a scale that is a product of two may be off by
 * 2^-11 of itself, and so may a minimum. */
static void check_row(const struct weight_format *f, const uint8_t *blocks, const float *got)
{
    struct weight_codes c;

    for (int32_t at = 0; at < COLS; at += f->block_values, blocks += f->block_bytes) {
        f->unpack(blocks, &c);
        for (int32_t i = 0; i < f->block_values; i++) {
            float scaled = c.scale[i / FORMAT_GROUP] * (float)c.code[i],
                  min = c.min[i / FORMAT_GROUP], want = scaled - min;
            float allowed = f->id == FORMAT_Q2_K ? 0x1p-22f * (fabsf(scaled) + fabsf(min))
                            : is_exact(f->id)    ? 0
                                                 : 0x1.01p-11f * (fabsf(scaled) + 2 * fabsf(min));
            if (!(fabsf(got[at + i] - want) <= allowed)) {
                fail_msg("%s, column %d: %g, not %g", f->name, at + i, (double)got[at + i],
                         (double)want);
            }
        }
    }
}

/* Two pieces, of which the first has its rows as neighbours for the rotation. */
static void check_blocks(struct rig *r, enum weight_format_id id)
{
    enum { HEAD = 16 };
    const struct weight_format *f = weight_format_of(id);
    int64_t row_bytes = weight_format_bytes(f, COLS);
    uint8_t *blocks[2];
    struct weight_piece piece[2];

    for (int32_t i = 0; i < 2; i++) {
        blocks[i] = random_blocks(r, f, (int64_t)ROWS / 2 * COLS);
        piece[i] = (struct weight_piece){.data = blocks[i],
                                         .dtype = DTYPE_BF16,
                                         .rows = ROWS / 2,
                                         .cols = COLS,
                                         .stride = COLS,
                                         .format = f,
                                         .head_rows = i == 0 ? HEAD : 0};
    }
    struct weight_desc d = desc_of(piece, 2);
    struct groups_layout l = layout_of(&d);
    float *got[2] = {repacked(&d, &l), NULL};
    int32_t kind;
    got[1] = repacked_panels(&d, &kind);
    assert_int_equal(kind == PANELS_FP4, id == FORMAT_MXFP4);
    for (int32_t i = 0; i < ROWS; i++) {
        int32_t in = i % HEAD, row = i % (ROWS / 2);
        row += i >= ROWS / 2 ? 0 : (in < HEAD / 2 ? 2 * in : 2 * (in - HEAD / 2) + 1) - in;
        for (int32_t k = 0; k < 2; k++) {
            check_row(f, blocks[i / (ROWS / 2)] + row * row_bytes, got[k] + (int64_t)i * COLS);
        }
    }
    free(got[0]);
    free(got[1]);
    free(blocks[0]);
    free(blocks[1]);
}

static void blocks_are_read_back_as_they_were(void **state)
{
    (void)state;
    struct rig r = {.rng = 7};

    for (int id = FORMAT_Q4_0; id < FORMAT_FP8; id++) {
        check_blocks(&r, (enum weight_format_id)id);
    }
}

/* A row of scales of zero, and groups that have a minimum alone. */
static void blocks_without_scales_are_their_minima(void **state)
{
    (void)state;
    const struct weight_format *f = weight_format_of(FORMAT_Q4_1);
    int64_t row_bytes = weight_format_bytes(f, COLS);
    uint8_t *blocks = rig_alloc((size_t)(row_bytes * ROWS));
    uint16_t half = f16_store(-0.375f);

    for (int32_t i = 0; i < COLS / 32; i += 2) { /* of the first row */
        memcpy(blocks + (int64_t)i * f->block_bytes + 2, &half, sizeof(half));
        memset(blocks + (int64_t)i * f->block_bytes + 4, 0xA5, 16);
    }
    struct weight_piece piece = {.data = blocks,
                                 .dtype = DTYPE_BF16,
                                 .rows = ROWS,
                                 .cols = COLS,
                                 .stride = COLS,
                                 .format = f};
    struct weight_desc d = desc_of(&piece, 1);
    struct groups_layout l = layout_of(&d);
    float *got = repacked(&d, &l);
    for (int32_t i = 0; i < ROWS * COLS; i++) {
        assert_true(got[i] == (i < COLS && i / 32 % 2 == 0 ? -0.375f : 0.0f));
    }
    free(got);
    free(blocks);
}

/* ---- integers with scales apart ---- */

struct integers {
    enum weight_format_id format;
    enum scale_type type;
    int32_t group_cols;
    bool zeros;
};

static const struct integers INTEGERS[] = {
    {FORMAT_INT4, SCALE_BF16, 32, false}, {FORMAT_INT4, SCALE_F16, 32, true},
    {FORMAT_INT4, SCALE_BF16, 64, true},  {FORMAT_INT4, SCALE_F16, 128, true},
    {FORMAT_INT4, SCALE_BF16, 16, false}, {FORMAT_INT4, SCALE_F16, 0, true},
    {FORMAT_INT8, SCALE_F16, 32, true},   {FORMAT_INT8, SCALE_BF16, 64, false},
    {FORMAT_INT8, SCALE_F16, 16, false},  {FORMAT_INT4, SCALE_F32, 32, true},
    {FORMAT_INT8, SCALE_F32, 0, false},   {FORMAT_INT8, SCALE_BF16, 0, true},
};

static void check_integers(struct rig *r, const struct integers *k)
{
    const struct weight_format *f = weight_format_of(k->format);
    int32_t n = k->group_cols > 0 ? COLS / k->group_cols : 1, n_groups = ROWS * n;
    int64_t row_bytes = weight_format_bytes(f, COLS);
    uint8_t *codes = rig_alloc((size_t)(row_bytes * ROWS)),
            *scale = rig_alloc((size_t)n_groups * 4), *zero = rig_alloc((size_t)n_groups);
    float *want = rig_alloc(COLS * sizeof(*want));

    for (int64_t i = 0; i < row_bytes * ROWS; i++) {
        codes[i] = (uint8_t)rig_next(r);
    }
    for (int32_t i = 0; i < n_groups; i++) {
        float s = 0.001f + 0.01f * fabsf(rig_uniform(r));
        uint16_t half = k->type == SCALE_F16 ? f16_store(s) : bf16_store(s);
        if (k->type == SCALE_F32) {
            memcpy(scale + i * 4, &s, 4);
        } else {
            memcpy(scale + i * 2, &half, 2);
        }
        zero[i] = (uint8_t)(rig_next(r) & (k->format == FORMAT_INT8 ? 255 : 15));
    }
    struct weight_piece piece = {.data = codes,
                                 .rows = ROWS,
                                 .cols = COLS,
                                 .stride = COLS,
                                 .format = f,
                                 .scales = {.data = scale,
                                            .type = k->type,
                                            .group_rows = 1,
                                            .group_cols = k->group_cols,
                                            .stride = n,
                                            .zero = k->zeros ? zero : NULL,
                                            .zero_stride = n,
                                            .factor = 1}};
    struct weight_desc d = desc_of(&piece, 1);
    struct groups_layout l = layout_of(&d);
    float *got = repacked(&d, &l);
    int32_t kind;
    float *experts = repacked_panels(&d, &kind);
    for (int32_t i = 0; i < ROWS; i++) {
        weight_scales_decode(f, &piece.scales, codes + i * row_bytes, i, COLS, want);
        for (int32_t j = 0; j < COLS; j++) {
            bool rounded = k->type == SCALE_F32 && k->group_cols > 0;
            float allowed = rounded ? 0x1.01p-11f * fabsf(want[j]) : 0;
            if (!(fabsf(got[i * COLS + j] - want[j]) <= allowed)) {
                fail_msg("case %d, row %d, column %d: %g, not %g", (int)(k - INTEGERS), i, j,
                         (double)got[i * COLS + j], (double)want[j]);
            }
            assert_true(experts[i * COLS + j] == got[i * COLS + j]);
        }
    }
    free(got);
    free(experts);
    free(codes);
    free(scale);
    free(zero);
    free(want);
}

static void integers_are_read_back_as_they_were(void **state)
{
    (void)state;
    struct rig r = {.rng = 7};

    for (size_t i = 0; i < ARRAY_LEN(INTEGERS); i++) {
        check_integers(&r, &INTEGERS[i]);
    }
}

/* ---- what does not suit ---- */

static void other_weights_are_refused_with_a_reason(void **state)
{
    (void)state;
    struct weight_piece piece = {.rows = 128, .cols = 768, .format = weight_format_of(FORMAT_Q4_K)};
    struct weight_desc fits = desc_of(&piece, 1), d = fits;
    struct groups_layout l;
    const char *why = NULL;

    assert_true(groups_layout_of(&fits, &l, &why));
    assert_null(why);
    d.rows = 130;
    assert_false(groups_layout_of(&d, &l, &why));
    assert_non_null(strstr(why, "rows"));
    d = fits;
    d.cols = 800;
    assert_false(groups_layout_of(&d, &l, &why));
    assert_non_null(strstr(why, "columns"));
    d = fits;
    d.dtype = DTYPE_F16;
    assert_false(groups_layout_of(&d, &l, &why));
    assert_non_null(strstr(why, "bfloat16"));
    d = fits;
    d.kind = WEIGHT_EMBEDDING; /* whose rows are read one by one */
    d.rows = 130;
    assert_true(groups_layout_of(&d, &l, &why));
    d.tied_head = true; /* which a product reads too */
    assert_false(groups_layout_of(&d, &l, &why));
    piece.format = weight_format_of(FORMAT_FP8);
    assert_false(groups_layout_of(&fits, &l, &why));
}

/* ---- experts ---- */

/* A panel has blocks of two formats where its groups have room for either, as gate and
 * up may be; else it is refused with a reason. */
static void formats_of_a_panel_go_together_or_are_refused(void **state)
{
    (void)state;
    struct rig r = {.rng = 7};
    static const enum weight_format_id PAIR[] = {FORMAT_Q4_K, FORMAT_Q8_0};
    struct weight_piece piece[2];
    uint8_t *blocks[2];

    for (int32_t i = 0; i < 2; i++) {
        const struct weight_format *f = weight_format_of(PAIR[i]);
        blocks[i] = random_blocks(&r, f, 64 * COLS);
        piece[i] = (struct weight_piece){
            .data = blocks[i], .rows = 64, .cols = COLS, .stride = COLS, .format = f};
    }
    struct weight_desc d = desc_of(piece, 2);
    int32_t kind;
    float *got = repacked_panels(&d, &kind);
    assert_int_equal(kind, PANELS_GROUPS_8);
    for (int32_t i = 0; i < 128; i++) {
        const struct weight_format *f = piece[i / 64].format;
        check_row(f, blocks[i / 64] + i % 64 * weight_format_bytes(f, COLS),
                  got + (int64_t)i * COLS);
    }
    struct panels_layout l;
    const char *why = NULL;
    d.experts = true;
    piece[1].format = weight_format_of(FORMAT_Q6_K);
    assert_false(panels_layout_of(&d, &l, &why));
    assert_non_null(strstr(why, "groups differ"));
    piece[1].format = NULL;
    assert_false(panels_layout_of(&d, &l, &why));
    piece[1].format = weight_format_of(FORMAT_Q4_K);
    d.rows = 120;
    assert_false(panels_layout_of(&d, &l, &why));
    assert_non_null(strstr(why, "rows"));
    free(got);
    free(blocks[0]);
    free(blocks[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_read_back_as_they_were),
        cmocka_unit_test(blocks_without_scales_are_their_minima),
        cmocka_unit_test(integers_are_read_back_as_they_were),
        cmocka_unit_test(other_weights_are_refused_with_a_reason),
        cmocka_unit_test(formats_of_a_panel_go_together_or_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
