/* Products and embeddings with weights that stay in blocks, against float64 over the
 * decoded weights, and between instruction sets.
 *
 *     build/tests/unit/kernels/test_blocks
 */
#include "tests/unit/blocks.h"

enum { FIRST_FORMAT = FORMAT_Q4_0, END_FORMAT = FORMAT_FP8, MOST_ROWS = 70 };

/* ---- weights ---- */

/* A piece of a weight, and its values. */
struct piece {
    struct weight_piece p;
    uint8_t *blocks;
    void *scale;   /* of codes whose scales are apart; else NULL */
    uint8_t *zero; /* likewise */
    float *value;  /* [rows, cols], in the order of the weight */
};

static struct piece make_piece(struct rig *r, enum weight_format_id id, int32_t rows, int32_t cols,
                               int32_t head_rows)
{
    const struct weight_format *f = weight_format_of(id);
    struct piece s = {.blocks = random_blocks(r, f, (int64_t)rows * cols),
                      .value = rig_alloc((size_t)rows * (size_t)cols * sizeof(float))};

    s.p = (struct weight_piece){.data = s.blocks,
                                .dtype = DTYPE_BF16,
                                .rows = rows,
                                .cols = cols,
                                .stride = cols,
                                .format = f,
                                .head_rows = head_rows};
    for (int32_t i = 0; i < rows; i++) {
        int32_t at = i;
        if (head_rows > 0) {
            int32_t in_head = i % head_rows, half = head_rows / 2;
            at = i - in_head + (in_head < half ? 2 * in_head : 2 * (in_head - half) + 1);
        }
        weight_format_decode(f, s.blocks + weight_format_bytes(f, (int64_t)at * cols), cols,
                             s.value + (int64_t)i * cols);
    }
    return s;
}

/* Groups of a weight of codes whose scales are apart; 0: all. */
struct groups {
    int32_t rows, cols;
    bool zeros;
    bool rounds; /* the file says that activations are rounded too */
    enum scale_type type;
};

static void random_scale(struct rig *r, void *out, enum scale_type type, int64_t i)
{
    float scale = 0.001f + 0.1f * fabsf(rig_uniform(r));
    uint8_t *byte = (uint8_t *)out + i;

    switch (type) {
    case SCALE_F32:
        ((float *)out)[i] = scale;
        break;
    case SCALE_F16:
    case SCALE_BF16:
        dtype_store(out, type == SCALE_F16 ? DTYPE_F16 : DTYPE_BF16, i, scale);
        break;
    case SCALE_E8M0:
        *byte = (uint8_t)(rig_below(r, 16) == 0 ? 0 : 115 + rig_below(r, 10));
        break;
    case SCALE_E4M3: /* not negative; some are subnormal */
        *byte = (uint8_t)rig_below(r, 0x38);
        break;
    }
}

static void random_groups(struct rig *r, struct piece *s, enum weight_format_id id,
                          enum scale_type type, int64_t n)
{
    s->scale = rig_alloc((size_t)(n * scale_type_bytes(type)));
    s->zero = rig_alloc((size_t)n);
    for (int64_t i = 0; i < n; i++) {
        random_scale(r, s->scale, type, i);
        s->zero[i] = (uint8_t)(rig_next(r) & (id == FORMAT_INT8 ? 0xFF : 15));
    }
}

/* The values of codes. */
static void decode_codes(struct piece *s)
{
    const struct weight_piece *p = &s->p;

    for (int32_t i = 0; i < p->rows; i++) {
        weight_scales_decode(p->format, &p->scales,
                             s->blocks + weight_format_bytes(p->format, i * p->stride), i, p->cols,
                             s->value + (int64_t)i * p->cols);
    }
}

/* Codes, scales and zero points. Rows have up to 7 values more than columns, which must
 * not count. */
static struct piece make_codes(struct rig *r, enum weight_format_id id, int32_t rows, int32_t cols,
                               struct groups g)
{
    const struct weight_format *f = weight_format_of(id);
    int64_t stride = (cols + 7) / 2 * 2, n_bytes = weight_format_bytes(f, rows * stride);
    int64_t n_cols = g.cols > 0 ? div_ceil(cols, g.cols) : 1;
    struct piece s = {.blocks = rig_alloc((size_t)n_bytes),
                      .value = rig_alloc((size_t)rows * (size_t)cols * sizeof(float))};

    for (int64_t i = 0; i < n_bytes; i++) { /* no NaN of e4m3 */
        s.blocks[i] = (uint8_t)(rig_next(r) & (id == FORMAT_FP8 ? 0xF7 : 0xFF));
    }
    random_groups(r, &s, id, g.type, (g.rows > 0 ? div_ceil(rows, g.rows) : 1) * n_cols);
    struct weight_scales scales = {.data = s.scale,
                                   .type = g.type,
                                   .group_rows = g.rows,
                                   .group_cols = g.cols,
                                   .stride = n_cols,
                                   .zero = g.zeros ? s.zero : NULL,
                                   .zero_stride = n_cols,
                                   .factor = 0.5f,
                                   .act = g.rounds ? ACT_SCALE_TOKEN : ACT_AS_THEY_ARE};
    s.p = (struct weight_piece){.data = s.blocks,
                                .dtype = DTYPE_BF16,
                                .rows = rows,
                                .cols = cols,
                                .stride = stride,
                                .format = f,
                                .scales = scales};
    decode_codes(&s);
    return s;
}

static void free_piece(struct piece *s)
{
    free(s->scale);
    free(s->zero);
    free(s->blocks);
    free(s->value);
}

/* What a weight is for. */
struct use {
    bool logits, fine_inputs;
};

/* Whether the inputs of a weight's products keep two planes of codes. */
static int32_t planes_of(const struct piece *s, struct use u)
{
    bool apart = weight_format_has_scales(s->p.format);
    bool alone = apart && s->p.scales.act == ACT_AS_THEY_ARE;

    return alone || (u.logits && s->p.format->bits >= 8) || u.fine_inputs ? 2 : 1;
}

static struct mat make_weight_for(struct rig *r, enum weight_kind kind, const struct piece *s,
                                  int32_t n, struct use u)
{
    struct err e = {0};
    struct weight_piece p[4];
    struct mat m;
    struct weight_desc d = {.name = "test",
                            .kind = kind,
                            .dtype = DTYPE_BF16,
                            .cols = s[0].p.cols,
                            .n_pieces = n,
                            .logits = u.logits,
                            .fine_inputs = u.fine_inputs};

    for (int32_t i = 0; i < n; i++) {
        p[i] = s[i].p;
        d.rows += s[i].p.rows;
    }
    d.piece = p;
    if (r->b->ops->weight(r->b, &d, &m, &e) < 0) {
        fail_msg("%s", e.text);
    }
    return m;
}

static struct mat make_weight(struct rig *r, enum weight_kind kind, const struct piece *s,
                              int32_t n)
{
    return make_weight_for(r, kind, s, n, (struct use){false});
}

/* ---- references ---- */

/* x as products take it: groups of 32 codes with a scale; with two planes, and the same
 * of what is left of x. Returns half a step of the first plane's codes in half[n]. */
static void quantised(double *out, double *half, const float *x, int32_t n, int32_t planes)
{
    for (int32_t at = 0; at < n; at += 32) {
        float rest[32];
        int32_t here = MIN(32, n - at);
        memcpy(rest, x + at, (size_t)here * sizeof(*rest));
        memset(out + at, 0, (size_t)here * sizeof(*out));
        for (int32_t plane = 0; plane < planes; plane++) {
            float most = 0;
            for (int32_t i = 0; i < here; i++) {
                most = fmaxf(most, fabsf(rest[i]));
            }
            float inverse = most < 1e-30f ? 0 : 127.0f / most, scale = most / 127.0f;
            for (int32_t i = 0; i < here; i++) {
                float code = nearbyintf(rest[i] * inverse);
                out[at + i] += (double)scale * (double)code;
                half[at + i] = plane == 0 ? (double)scale / 2 : half[at + i];
                rest[i] -= code * scale;
            }
        }
    }
}

/* Fails where a result is not w . (quantised x) but for float32's rounding, or is
 * farther from w . x than half a step of each code explains. */
static void check_dot(const char *name, float got, const float *w, const float *x, const double *q,
                      const double *half, int32_t n)
{
    double exact = 0, near = 0, size = 0, steps = 0;

    for (int32_t i = 0; i < n; i++) {
        exact += (double)w[i] * (double)x[i];
        near += (double)w[i] * q[i];
        size += fabs((double)w[i] * q[i]);
        steps += fabs((double)w[i]) * half[i];
    }
    /* a minimum and the codes above it may cancel: the sum is of greater terms */
    if (!(fabs((double)got - near) <= 4e-6 * size + 1e-12)) {
        fail_msg("%s, %d values: %.9g, must be %.9g", name, n, (double)got, near);
    }
    if (!(fabs((double)got - exact) <= 1.01 * steps + 4e-6 * size + 1e-12)) {
        fail_msg("%s, %d values: %.9g, of unrounded x %.9g", name, n, (double)got, exact);
    }
}

/* ---- products ---- */

static float *multiply(struct rig *r, struct mat w, const float *x, int32_t rows)
{
    struct mat mx = rig_mat(r, rows, w.cols, DTYPE_F32, x);
    struct mat out = rig_mat(r, rows, w.rows, DTYPE_F32, NULL);

    rig_begin_plain(r, rows);
    r->b->ops->linear(r->b, out, mx, w, NULL);
    float *got = rig_download(r, out);
    rig_end(r);
    return got;
}

static void check_products_for(struct rig *r, const struct piece *s, int32_t n_pieces, int32_t rows,
                               struct use u)
{
    struct mat w = make_weight_for(r, WEIGHT_LINEAR, s, n_pieces, u);
    float *x = rig_floats(r, (int64_t)rows * w.cols, 2, DTYPE_F32);
    double *q = rig_alloc((size_t)w.cols * 2 * sizeof(*q)), *half = q + w.cols;

    memset(x, 0, (size_t)MIN(32, w.cols) * sizeof(*x)); /* a group of zeros */
    float *got = multiply(r, w, x, rows);
    for (int32_t i = 0; i < rows; i++) {
        const float *row = x + (int64_t)i * w.cols;
        int32_t at = 0;
        for (int32_t p = 0; p < n_pieces; p++) {
            quantised(q, half, row, w.cols, planes_of(&s[p], u));
            for (int32_t k = 0; k < s[p].p.rows; k++, at++) {
                check_dot(s[p].p.format->name, got[(int64_t)i * w.rows + at],
                          s[p].value + (int64_t)k * w.cols, row, q, half, w.cols);
            }
        }
    }
    free(got);
    free(q);
    free(x);
}

static void check_products(struct rig *r, const struct piece *s, int32_t n_pieces, int32_t rows)
{
    static const struct use USES[] = {{false, false}, {true, false}, {false, true}};

    for (size_t i = 0; i < ARRAY_LEN(USES); i++) {
        check_products_for(r, s, n_pieces, rows, USES[i]);
    }
}

static void products_follow_the_decoded_weights(void **state)
{
    (void)state;
    static const struct {
        int32_t rows, cols, x_rows;
    } SHAPES[] = {{1, 256, 1},   {5, 512, 3},   {40, 1536, 1}, {77, 768, 2},
                  {130, 256, 9}, {31, 2048, 4}, {17, 768, 13}};
    struct rig r;
    rig_open(&r);
    for (int32_t f = FIRST_FORMAT; f < END_FORMAT; f++) {
        for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
            struct piece s =
                make_piece(&r, (enum weight_format_id)f, SHAPES[i].rows, SHAPES[i].cols, 0);
            check_products(&r, &s, 1, SHAPES[i].x_rows);
            free_piece(&s);
        }
        if (weight_format_of((enum weight_format_id)f)->block_values == 32) {
            static const int32_t COLS[] = {32, 96, 288, 576};
            for (size_t i = 0; i < ARRAY_LEN(COLS); i++) {
                struct piece s = make_piece(&r, (enum weight_format_id)f, 19, COLS[i], 0);
                check_products(&r, &s, 1, (int32_t)i + 1);
                check_products(&r, &s, 1, 4 * (int32_t)i + 6);
                free_piece(&s);
            }
        }
    }
    rig_close(&r);
}

/* Codes at their ends and inputs of one sign, whose sums are the greatest. */
static void the_greatest_sums_have_room(void **state)
{
    (void)state;
    enum { ROWS = 17, COLS = 256, X_ROWS = 6 };
    static const uint8_t BYTES[] = {0x00, 0xFF, 0x7F, 0x80, 0x0F, 0xF0};
    float x[X_ROWS * COLS];
    double q[COLS], half[COLS];
    struct rig r;

    for (int32_t i = 0; i < X_ROWS * COLS; i++) {
        x[i] = i / COLS % 2 == 0 ? 1 : -1;
    }
    rig_open(&r);
    for (size_t i = 0; i < (END_FORMAT - FIRST_FORMAT) * ARRAY_LEN(BYTES); i++) {
        enum weight_format_id id = (enum weight_format_id)(FIRST_FORMAT + i / ARRAY_LEN(BYTES));
        const struct weight_format *f = weight_format_of(id);
        struct piece s = make_piece(&r, id, ROWS, COLS, 0);
        int64_t n_bytes = weight_format_bytes(f, ROWS * COLS);
        memset(s.blocks, BYTES[i % ARRAY_LEN(BYTES)], (size_t)n_bytes);
        put_scales(&r, f, s.blocks, n_bytes, 0.01f);
        weight_format_decode(f, s.blocks, (int64_t)ROWS * COLS, s.value);
        struct mat w = make_weight(&r, WEIGHT_LINEAR, &s, 1);
        for (int32_t n = 1; n <= X_ROWS; n += X_ROWS - 1) {
            float *got = multiply(&r, w, x, n);
            for (int32_t k = 0; k < n * ROWS; k++) {
                const float *row = x + k / ROWS * COLS;
                quantised(q, half, row, COLS, 1);
                check_dot(f->name, got[k], s.value + k % ROWS * COLS, row, q, half, COLS);
            }
            free(got);
        }
        free_piece(&s);
    }
    rig_close(&r);
}

static const struct groups GROUPS_OF_CODES[] = {
    {0, 0, false, true, SCALE_F32},     {1, 0, true, false, SCALE_BF16},
    {1, 16, false, true, SCALE_E4M3},   {1, 32, true, true, SCALE_F32},
    {1, 128, true, true, SCALE_F16},    {48, 64, false, false, SCALE_BF16},
    {1, 16, true, false, SCALE_BF16},   {1, 32, false, true, SCALE_E8M0},
    {1, 48, false, false, SCALE_F16},   {1, 128, false, true, SCALE_F16},
    {1, 256, false, false, SCALE_E4M3}, {1, 512, true, false, SCALE_F32},
};

/* Codes at their ends and inputs of one sign, whose sums are the greatest. */
static void the_greatest_sums_of_codes_have_room(void **state)
{
    (void)state;
    enum { ROWS = 17, COLS = 256, X_ROWS = 6 };
    static const struct {
        enum weight_format_id id;
        uint8_t code, zero;
    } CASES[] = {{FORMAT_FP8, 0x7E, 0},  {FORMAT_FP8, 0xFE, 0},  {FORMAT_FP8, 0x01, 0},
                 {FORMAT_INT8, 0x80, 0}, {FORMAT_INT8, 0x7F, 0}, {FORMAT_INT4, 0x00, 15},
                 {FORMAT_INT4, 0xFF, 0}, {FORMAT_FP4, 0x77, 0},  {FORMAT_FP4, 0xFF, 0}};
    float x[X_ROWS * COLS];
    double q[COLS], half[COLS];
    struct rig r;

    for (int32_t i = 0; i < X_ROWS * COLS; i++) {
        x[i] = i / COLS % 2 == 0 ? 1 : -1;
    }
    rig_open(&r);
    for (size_t i = 0; i < 2 * ARRAY_LEN(CASES); i++) {
        enum weight_format_id id = CASES[i / 2].id;
        struct groups of = {1, i % 2 == 0 ? 16 : 32, id == FORMAT_INT4, true, SCALE_F32};
        struct piece s = make_codes(&r, id, ROWS, COLS, of);
        memset(s.blocks, CASES[i / 2].code,
               (size_t)weight_format_bytes(s.p.format, ROWS * s.p.stride));
        memset(s.zero, CASES[i / 2].zero, (size_t)(ROWS * COLS / of.cols));
        decode_codes(&s);
        struct mat w = make_weight(&r, WEIGHT_LINEAR, &s, 1);
        for (int32_t n = 1; n <= X_ROWS; n += X_ROWS - 1) {
            float *got = multiply(&r, w, x, n);
            for (int32_t k = 0; k < n * ROWS; k++) {
                const float *row = x + k / ROWS * COLS;
                quantised(q, half, row, COLS, 1);
                check_dot(s.p.format->name, got[k], s.value + k % ROWS * COLS, row, q, half, COLS);
            }
            free(got);
        }
        free_piece(&s);
    }
    rig_close(&r);
}

static void products_of_codes_follow_their_values(void **state)
{
    (void)state;
    static const int32_t COLS[] = {1, 31, 60, 100, 256, 260, 512, 1000};
    struct rig r;
    rig_open(&r);
    for (int32_t f = FORMAT_FP8; f <= FORMAT_FP4; f++) {
        enum weight_format_id id = (enum weight_format_id)f;
        for (size_t i = 0; i < ARRAY_LEN(GROUPS_OF_CODES) * ARRAY_LEN(COLS); i++) {
            struct groups of = GROUPS_OF_CODES[i / ARRAY_LEN(COLS)];
            int32_t cols = COLS[i % ARRAY_LEN(COLS)];
            /* one value at its zero point is what rounding leaves of two terms */
            of.zeros = of.zeros && cols > 1 && (f == FORMAT_INT8 || f == FORMAT_INT4);
            struct piece s[2] = {make_codes(&r, id, 77, cols, of),
                                 make_codes(&r, id, 30, cols, (struct groups){.rows = 1})};
            check_products(&r, s, 2, (int32_t)i % 10 + 1);
            free_piece(&s[0]);
            free_piece(&s[1]);
        }
    }
    rig_close(&r);
}

static void pieces_of_several_formats_make_one_weight(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r);
    struct piece s[4] = {
        make_piece(&r, FORMAT_Q4_K, 48, 512, 16), make_piece(&r, FORMAT_Q4_K, 32, 512, 8),
        make_piece(&r, FORMAT_Q6_K, 33, 512, 0), make_piece(&r, FORMAT_Q4_K, 7, 512, 0)};
    check_products(&r, s, 4, 1);
    check_products(&r, s, 4, 11);
    check_products(&r, s + 1, 2, 2);
    for (int32_t i = 0; i < 4; i++) {
        free_piece(&s[i]);
    }
    rig_close(&r);
}

/* Rows that are stored in pairs: what is added to a column is that column's. */
static void an_epilogue_is_that_of_the_column(void **state)
{
    (void)state;
    enum { ROWS = 48 + 26, COLS = 512, X_ROWS = 3 };
    struct rig r;
    rig_open(&r);
    struct piece s[] = {make_piece(&r, FORMAT_Q4_K, 48, COLS, 16),
                        make_piece(&r, FORMAT_Q4_K, 26, COLS, 26)};
    struct mat w = make_weight(&r, WEIGHT_LINEAR, s, 2);
    float *x = rig_floats(&r, X_ROWS * COLS, 2, DTYPE_F32);
    float *bias = rig_floats(&r, ROWS, 2, DTYPE_F32);
    float *residual = rig_floats(&r, X_ROWS * ROWS, 2, DTYPE_F32);
    for (int32_t n = 1; n <= X_ROWS; n++) {
        struct epilogue ep = {.bias = rig_mat(&r, 1, ROWS, DTYPE_F32, bias),
                              .residual = rig_mat(&r, n, ROWS, DTYPE_F32, residual)};
        struct mat mx = rig_mat(&r, n, COLS, DTYPE_F32, x);
        struct mat out = rig_mat(&r, n, ROWS, DTYPE_F32, NULL);
        float *plain = multiply(&r, w, x, n);
        rig_begin_plain(&r, n);
        r.b->ops->linear(r.b, out, mx, w, &ep);
        float *got = rig_download(&r, out);
        rig_end(&r);
        for (int32_t i = 0; i < n * ROWS; i++) {
            float want = plain[i] + bias[i % ROWS];
            want += residual[i];
            assert_memory_equal(&got[i], &want, sizeof(want));
        }
        free(plain);
        free(got);
    }
    free(x);
    free(bias);
    free(residual);
    free_piece(&s[0]);
    free_piece(&s[1]);
    rig_close(&r);
}

static void a_plain_piece_may_stand_among_blocks(void **state)
{
    (void)state;
    enum { COLS = 256, ROWS = 20 };
    struct rig r;
    rig_open(&r);
    struct piece s = make_piece(&r, FORMAT_Q8_0, ROWS, COLS, 0);
    float *plain = rig_floats(&r, ROWS * COLS, 1, DTYPE_BF16);
    float *x = rig_floats(&r, 2 * COLS, 1, DTYPE_BF16);
    struct weight_piece p[2] = {
        {.data = plain, .dtype = DTYPE_F32, .rows = ROWS, .cols = COLS, .stride = COLS}, s.p};
    struct weight_desc d = {.name = "test",
                            .kind = WEIGHT_LINEAR,
                            .dtype = DTYPE_BF16,
                            .rows = 2 * ROWS,
                            .cols = COLS,
                            .piece = p,
                            .n_pieces = 2};
    struct err e = {0};
    struct mat w;
    assert_int_equal(r.b->ops->weight(r.b, &d, &w, &e), 0);
    float *got = multiply(&r, w, x, 2);
    double q[COLS], half[COLS];
    for (int32_t i = 0; i < 2; i++) {
        quantised(q, half, x + i * COLS, COLS, 1);
        for (int32_t k = 0; k < ROWS; k++) {
            double want = 0;
            for (int32_t c = 0; c < COLS; c++) {
                want += (double)plain[k * COLS + c] * (double)x[i * COLS + c];
            }
            assert_true(fabs((double)got[i * 2 * ROWS + k] - want) < 1e-3);
            check_dot("Q8_0", got[i * 2 * ROWS + ROWS + k], s.value + k * COLS, x + i * COLS, q,
                      half, COLS);
        }
    }
    free(got);
    free(x);
    free(plain);
    free_piece(&s);
    rig_close(&r);
}

/* ---- the same bits ---- */

enum {
    BIT_ROWS = 13,
    BIT_CASES = 2 * END_FORMAT + (FORMAT_FP4 - FORMAT_FP8 + 1) * ARRAY_LEN(GROUPS_OF_CODES),
};

/* Append the products of a weight with MOST_ROWS rows to all[*n]. */
static void append_products(struct rig *r, struct piece s, struct use u, float *all, int32_t *n)
{
    struct mat w = make_weight_for(r, WEIGHT_LINEAR, &s, 1, u);
    float *x = rig_floats(r, (int64_t)MOST_ROWS * s.p.cols, 3, DTYPE_F32);
    float *got = multiply(r, w, x, MOST_ROWS);

    memcpy(all + *n, got, BIT_ROWS * MOST_ROWS * sizeof(*all));
    *n += BIT_ROWS * MOST_ROWS;
    free(got);
    free(x);
    free_piece(&s);
}

static void append_codes(struct rig *r, float *all, int32_t *n)
{
    for (int32_t f = FORMAT_FP8; f <= FORMAT_FP4; f++) {
        enum weight_format_id id = (enum weight_format_id)f;
        for (size_t g = 0; g < ARRAY_LEN(GROUPS_OF_CODES); g++) {
            for (int32_t cols = 251; cols <= 576; cols += 576 - 251) {
                append_products(r, make_codes(r, id, BIT_ROWS, cols, GROUPS_OF_CODES[g]),
                                (struct use){false}, all, n);
            }
        }
    }
}

/* The bits of every format's products with MOST_ROWS rows, of one instruction set. */
static float *all_products(const char *isa, int32_t *ret_n)
{
    const char *before = getenv("QUIRE_CPU_ISA");
    char keep[32];
    struct rig r;

    snprintf(keep, sizeof(keep), "%s", before ? before : "");
    if (isa) {
        setenv("QUIRE_CPU_ISA", isa, 1);
    }
    rig_open(&r);
    setenv("QUIRE_CPU_ISA", keep, 1);
    float *all = rig_alloc((size_t)BIT_CASES * 2 * BIT_ROWS * MOST_ROWS * sizeof(*all));
    int32_t n = 0;
    for (int32_t f = FIRST_FORMAT; f < END_FORMAT; f++) {
        bool small = weight_format_of((enum weight_format_id)f)->block_values == 32;
        for (int32_t cols = 512; cols <= 576; cols += 64) {
            if (cols % 256 != 0 && !small) {
                continue;
            }
            for (int fine = 0; fine < 2; fine++) {
                append_products(&r, make_piece(&r, (enum weight_format_id)f, BIT_ROWS, cols, 0),
                                (struct use){.fine_inputs = fine}, all, &n);
            }
        }
    }
    append_codes(&r, all, &n);
    rig_close(&r);
    *ret_n = n;
    return all;
}

static void same_bits(const float *got, const float *plain, int32_t n, const char *by)
{
    for (int32_t i = 0; i < n; i++) {
        if (memcmp(&got[i], &plain[i], sizeof(*got)) != 0) {
            fail_msg("%s, result %d: %.9g, plain %.9g", by, i, (double)got[i], (double)plain[i]);
        }
    }
}

static void every_instruction_set_gives_the_bits_of_the_plain_loops(void **state)
{
    (void)state;
    int32_t n, n_plain;
    float *got = all_products(NULL, &n);
    float *plain = all_products("plain", &n_plain);
    assert_int_equal(n, n_plain);
    same_bits(got, plain, n, "own");
    free(got);
    free(plain);
}

/* Whatever timing would choose. */
static void blocks_by_an_older_instruction_set_have_the_same_bits(void **state)
{
    (void)state;
    static const char *const ways[] = {"timed", "avx2", "avx512vnni", "amx"};
    int32_t n, n_plain;
    enum cpu_isa isa, way = CPU_PLAIN;
    struct err e = {0};
    char root[] = "/tmp/quire-blocks-XXXXXX", command[64];
    if (strcmp(rig_device, "cpu") != 0) {
        skip();
    }
    assert_int_equal(cpu_isa_detect(&isa, &e), 0);
    float *plain = all_products("plain", &n_plain);
    assert_non_null(mkdtemp(root));
    setenv("CACHE_DIRECTORY", root, 1);
    for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
        if (i > 0 && (isa > CPU_AMX || !cpu_isa_named(&way, ways[i]) || way > isa)) {
            continue;
        }
        setenv("QUIRE_CPU_WAYS", ways[i], 1);
        float *got = all_products(NULL, &n);
        unsetenv("QUIRE_CPU_WAYS");
        assert_int_equal(n, n_plain);
        same_bits(got, plain, n, ways[i]);
        free(got);
    }
    unsetenv("CACHE_DIRECTORY");
    snprintf(command, sizeof(command), "rm -rf %s", root);
    assert_int_equal(system(command), 0);
    free(plain);
}

static void a_row_has_the_same_bits_in_any_company(void **state)
{
    (void)state;
    enum { ROWS = 50, COLS = 768 };
    struct rig r;
    rig_open(&r);
    for (int32_t i = 2 * FIRST_FORMAT; i < 2 * END_FORMAT; i++) {
        enum weight_format_id f = (enum weight_format_id)(i / 2);
        struct piece s[2] = {make_piece(&r, f, ROWS, COLS, 0), make_piece(&r, f, ROWS, COLS, 10)};
        struct use u = {.fine_inputs = i % 2 == 1};
        struct mat w = make_weight_for(&r, WEIGHT_LINEAR, s, 2, u);
        float *x = rig_floats(&r, (int64_t)MOST_ROWS * COLS, 2, DTYPE_F32);
        float *all = multiply(&r, w, x, MOST_ROWS);
        static const int32_t N[] = {1, 2, 3, 4, 5, 6, 7, 17};
        for (size_t k = 0; k < ARRAY_LEN(N); k++) {
            float *some = multiply(&r, w, x + (int64_t)7 * COLS, N[k]);
            assert_memory_equal(some, all + (int64_t)7 * w.rows,
                                (size_t)N[k] * (size_t)w.rows * sizeof(*some));
            free(some);
        }
        free(all);
        free(x);
        free_piece(&s[0]);
        free_piece(&s[1]);
    }
    rig_close(&r);
}

/* The same of codes, also of groups that no panel has; scales are of two spans. */
static void a_row_of_codes_has_the_same_bits_in_any_company(void **state)
{
    (void)state;
    enum { ROWS = 20, COLS = 2100, N_X = 40, AT = 7 };
    static const int32_t N[] = {1, 2, 3, 4, 5, 17};
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < 4 * ARRAY_LEN(GROUPS_OF_CODES); i++) {
        enum weight_format_id f = FORMAT_FP8 + (enum weight_format_id)(i % 4);
        struct piece s[2] = {make_codes(&r, f, ROWS, COLS, GROUPS_OF_CODES[i / 4]),
                             make_codes(&r, f, ROWS, COLS, GROUPS_OF_CODES[0])};
        struct mat w = make_weight(&r, WEIGHT_LINEAR, s, 2);
        float *x = rig_floats(&r, (int64_t)N_X * COLS, 2, DTYPE_F32);
        float *all = multiply(&r, w, x, N_X);
        for (size_t k = 0; k < ARRAY_LEN(N); k++) {
            float *some = multiply(&r, w, x + (int64_t)AT * COLS, N[k]);
            assert_memory_equal(some, all + (int64_t)AT * w.rows,
                                (size_t)N[k] * (size_t)w.rows * sizeof(*some));
            free(some);
        }
        free(all);
        free(x);
        free_piece(&s[0]);
        free_piece(&s[1]);
    }
    rig_close(&r);
}

/* So many rows of x and columns that packed x has to go in turns over the rows. */
static void many_long_rows_have_the_bits_of_few(void **state)
{
    (void)state;
    enum { ROWS = 8, COLS = 8192, N = RIG_TOKENS, FEW = 3 };
    struct rig r;
    rig_open(&r);
    struct piece s = make_piece(&r, FORMAT_Q4_K, ROWS, COLS, 0);
    struct mat w = make_weight_for(&r, WEIGHT_LINEAR, &s, 1, (struct use){.fine_inputs = true});
    float *x = rig_floats(&r, (int64_t)N * COLS, 2, DTYPE_F32);
    float *all = multiply(&r, w, x, N);
    for (int32_t at = 0; at + FEW <= N; at += 71) {
        float *some = multiply(&r, w, x + (int64_t)at * COLS, FEW);
        assert_memory_equal(some, all + at * ROWS, (size_t)FEW * ROWS * sizeof(*some));
        free(some);
    }
    free(all);
    free(x);
    free_piece(&s);
    rig_close(&r);
}

static float *multiply_gated(struct rig *r, struct mat w, const float *x, int32_t rows)
{
    struct mat mx = rig_mat(r, rows, w.cols, DTYPE_F32, x);
    struct mat room = rig_mat(r, rows, w.rows, DTYPE_F32, NULL);
    struct mat out = rig_mat(r, rows, w.rows / 2, DTYPE_F32, NULL);

    rig_begin_plain(r, rows);
    r->b->ops->linear_gated(r->b, out, room, mx, w, (struct mat){0}, ACT_SILU);
    float *got = rig_download(r, out);
    rig_end(r);
    return got;
}

/* So many rows of x that the factors go in turns over their columns; by pieces of one
 * format and of two, and of codes of which several rows share a scale. */
static void gated_products_of_many_rows_have_the_bits_of_few(void **state)
{
    (void)state;
    enum { HALF = 960, COLS = 256, N = RIG_TOKENS, FEW = 2 };
    struct rig r;
    rig_open(&r);
    for (int32_t k = 0; k < 3; k++) {
        struct piece s[2] = {make_piece(&r, FORMAT_Q4_K, HALF, COLS, 0),
                             make_piece(&r, k == 0 ? FORMAT_Q4_K : FORMAT_Q6_K, HALF, COLS, 0)};
        struct piece codes = make_codes(&r, FORMAT_FP8, 2 * HALF, COLS,
                                        (struct groups){.rows = 128, .cols = 64, .rounds = true});
        struct mat w = make_weight(&r, WEIGHT_LINEAR, k < 2 ? s : &codes, k < 2 ? 2 : 1);
        float *x = rig_floats(&r, (int64_t)N * COLS, 2, DTYPE_F32);
        float *all = multiply_gated(&r, w, x, N);
        for (int32_t at = 0; at + FEW <= N; at += 213) {
            float *some = multiply_gated(&r, w, x + (int64_t)at * COLS, FEW);
            assert_memory_equal(some, all + at * HALF, (size_t)FEW * HALF * sizeof(*some));
            free(some);
        }
        free(all);
        free(x);
        free_piece(&s[0]);
        free_piece(&s[1]);
        free_piece(&codes);
    }
    rig_close(&r);
}

/* ---- values that are no numbers ---- */

static void what_is_not_finite_stays_so(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r);
    struct piece s = make_piece(&r, FORMAT_Q8_0, 3, 64, 0);
    struct mat w = make_weight(&r, WEIGHT_LINEAR, &s, 1);
    static const float BAD[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < ARRAY_LEN(BAD); i++) {
        float x[2 * 64] = {[5] = 1, [40] = BAD[i], [64 + 5] = 1};
        float *got = multiply(&r, w, x, 2);
        for (int32_t k = 0; k < 3; k++) {
            assert_true(!isfinite(got[k]) && isfinite(got[3 + k]));
        }
        free(got);
    }
    float tiny[64] = {1e-35f, -1e-38f, 1e-42f}; /* too small to be divided by */
    float *got = multiply(&r, w, tiny, 1);
    assert_true(got[0] == 0 && got[1] == 0 && got[2] == 0);
    free(got);
    free_piece(&s);
    rig_close(&r);
}

/* ---- embedding ---- */

static void embeddings_are_the_decoded_rows(void **state)
{
    (void)state;
    enum { VOCAB = 40, WIDTH = 256, N = 9 };
    struct rig r;
    rig_open(&r);
    for (int32_t f = FIRST_FORMAT; f < END_FORMAT; f++) {
        struct piece s = make_piece(&r, (enum weight_format_id)f, VOCAB, WIDTH, 0);
        struct mat table = make_weight(&r, WEIGHT_EMBEDDING, &s, 1);
        struct mat out = rig_mat(&r, N, WIDTH, DTYPE_F32, NULL);
        int32_t id[N], minus[N], zero[N] = {0}, q_start[2] = {0, N}, n = N;
        for (int32_t i = 0; i < N; i++) {
            id[i] = rig_below(&r, VOCAB);
            minus[i] = -1;
        }
        struct batch b = {.n_tokens = N,
                          .token = id,
                          .token_src = minus,
                          .position = zero,
                          .slot = minus,
                          .n_seqs = 1,
                          .q_start = q_start,
                          .kv_len = &n,
                          .row = zero,
                          .lcp_blocks = zero};
        rig_begin(&r, &b);
        r.b->ops->embed(r.b, out, table, 3);
        float *got = rig_download(&r, out);
        rig_end(&r);
        for (int32_t i = 0; i < N * WIDTH; i++) {
            float want = s.value[id[i / WIDTH] * WIDTH + i % WIDTH] * 3;
            assert_memory_equal(&got[i], &want, sizeof(want));
        }
        free(got);
        got = rig_download(&r, table);
        assert_memory_equal(got, s.value, VOCAB * WIDTH * sizeof(*got));
        free(got);
        free_piece(&s);
    }
    rig_close(&r);
}

/* ---- refusals ---- */

static void pieces_that_cut_blocks_are_refused(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r);
    const struct weight_piece good = {
        .data = "", .rows = 8, .cols = 256, .stride = 256, .format = weight_format_of(FORMAT_Q4_K)};
    struct weight_piece bad[4] = {good, good, good, good};
    bad[0].cols = 128;
    bad[1].stride = 300;
    bad[2].transposed = true;
    bad[3].head_rows = 3;
    for (int32_t i = 0; i < 4; i++) {
        struct err e = {0};
        struct mat m;
        struct weight_desc d = {.name = "test",
                                .kind = WEIGHT_LINEAR,
                                .dtype = DTYPE_BF16,
                                .rows = i == 2 ? 256 : 8,
                                .cols = i == 0   ? 128
                                        : i == 2 ? 8
                                                 : 256,
                                .piece = &bad[i],
                                .n_pieces = 1};
        assert_int_equal(r.b->ops->weight(r.b, &d, &m, &e), ERR_INVALID);
    }
    rig_close(&r);
}

static int all_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_follow_the_decoded_weights),
        cmocka_unit_test(the_greatest_sums_have_room),
        cmocka_unit_test(the_greatest_sums_of_codes_have_room),
        cmocka_unit_test(products_of_codes_follow_their_values),
        cmocka_unit_test(pieces_of_several_formats_make_one_weight),
        cmocka_unit_test(an_epilogue_is_that_of_the_column),
        cmocka_unit_test(a_plain_piece_may_stand_among_blocks),
        cmocka_unit_test(every_instruction_set_gives_the_bits_of_the_plain_loops),
        cmocka_unit_test(a_row_has_the_same_bits_in_any_company),
        cmocka_unit_test(a_row_of_codes_has_the_same_bits_in_any_company),
        cmocka_unit_test(many_long_rows_have_the_bits_of_few),
        cmocka_unit_test(blocks_by_an_older_instruction_set_have_the_same_bits),
        cmocka_unit_test(gated_products_of_many_rows_have_the_bits_of_few),
        cmocka_unit_test(what_is_not_finite_stays_so),
        cmocka_unit_test(embeddings_are_the_decoded_rows),
        cmocka_unit_test(pieces_that_cut_blocks_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, all_tests);
}
