/* Products with weights of codes whose scales are a tensor of their own, against
 * float64. Where a device quantises the activations, its result must be as near to
 * the product of these as to be explained by rounding the result.
 *
 *     build/tests/unit/kernels/test_quant_products [--device cpu|cuda] [--share I/N]
 */
#include "tests/unit/quantised.h"

static const struct quant_case CASES[] = {
    {.format = FORMAT_FP8, .type = SCALE_F32, .group_rows = 1, .act = ACT_SCALE_TOKEN},
    {.format = FORMAT_FP8, .type = SCALE_BF16, .group_rows = 1, .act = ACT_AS_THEY_ARE},
    {.format = FORMAT_FP8, .type = SCALE_F32, .act = ACT_SCALE_TOKEN}, /* of the tensor */
    {.format = FORMAT_FP8,
     .type = SCALE_F32,
     .group_rows = 128,
     .group_cols = 128,
     .act = ACT_SCALE_GROUP},
    {.format = FORMAT_INT8, .type = SCALE_F32, .group_rows = 1, .act = ACT_SCALE_TOKEN},
    {.format = FORMAT_INT8, .type = SCALE_F16, .group_rows = 1, .zeros = true},
    {.format = FORMAT_INT4, .type = SCALE_BF16, .group_rows = 1, .group_cols = 128},
    {.format = FORMAT_INT4, .type = SCALE_F16, .group_rows = 1, .group_cols = 128, .zeros = true},
    {.format = FORMAT_INT4, .type = SCALE_BF16, .group_rows = 1, .group_cols = 32, .zeros = true},
    {.format = FORMAT_INT4, .type = SCALE_F32, .group_rows = 1},
    {.format = FORMAT_INT4, .type = SCALE_BF16, .group_rows = 1, .zeros = true},
    {.format = FORMAT_INT4, .type = SCALE_F16, .group_rows = 1, .group_cols = 256},
    {.format = FORMAT_FP4, .type = SCALE_E8M0, .group_rows = 1, .group_cols = 32},
    {.format = FORMAT_FP4,
     .type = SCALE_E4M3,
     .group_rows = 1,
     .group_cols = 16,
     .factor = 0.0078125f},
    {.format = FORMAT_INT4, .type = SCALE_F16, .group_rows = 1, .group_cols = 32},
    {.format = FORMAT_INT4, .type = SCALE_F16, .group_rows = 1, .group_cols = 64, .zeros = true},
    {.format = FORMAT_INT4, .type = SCALE_F32, .group_rows = 1, .group_cols = 128, .zeros = true},
    {.format = FORMAT_INT4, .type = SCALE_BF16, .group_rows = 1, .group_cols = 16},
    {.format = FORMAT_INT8, .type = SCALE_F16, .group_rows = 1, .group_cols = 32, .zeros = true},
    {.format = FORMAT_INT8, .type = SCALE_BF16, .group_rows = 1, .group_cols = 16},
    {.format = FORMAT_Q4_0},
    {.format = FORMAT_Q4_1},
    {.format = FORMAT_Q5_0},
    {.format = FORMAT_Q5_1},
    {.format = FORMAT_Q8_0},
    {.format = FORMAT_IQ4_NL},
    {.format = FORMAT_MXFP4},
    {.format = FORMAT_Q2_K},
    {.format = FORMAT_Q3_K},
    {.format = FORMAT_Q4_K},
    {.format = FORMAT_Q5_K},
    {.format = FORMAT_Q6_K},
    {.format = FORMAT_IQ4_XS},
};

/* Whether a row of so many columns is whole blocks. */
static bool whole(const struct quant_case *k, int32_t cols)
{
    return k->format >= FORMAT_FP8 || cols % weight_format_of(k->format)->block_values == 0;
}

struct references {
    double *plain, *quantised; /* [rows, n] */
};

/* quantised: also with quantised inputs; else NaNs. */
static struct references references_of(const float *x, const float *w, int32_t rows, int32_t n,
                                       int32_t k, bool quantised)
{
    struct references ret = {rig_alloc((size_t)rows * (size_t)n * sizeof(double)),
                             rig_alloc((size_t)rows * (size_t)n * sizeof(double))};
    double *in = rig_alloc((size_t)rows * (size_t)k * sizeof(*in));

    for (int64_t i = 0; i < (int64_t)rows * k; i++) {
        in[i] = x[i];
    }
    panels_products(in, NULL, w, rows, n, k, ret.plain, NULL);
    for (int64_t i = 0; i < rows && quantised; i++) {
        quant_row(x + i * k, k, in + i * k);
    }
    if (quantised) {
        panels_products(in, NULL, w, rows, n, k, ret.quantised, NULL);
    }
    for (int64_t i = 0; i < (int64_t)rows * n && !quantised; i++) {
        ret.quantised[i] = NAN;
    }
    free(in);
    return ret;
}

static void check_product(struct rig *r, const struct quant_case *k, int32_t rows, int32_t n,
                          int32_t depth, int32_t parts)
{
    float *w = rig_alloc((size_t)n * (size_t)depth * sizeof(*w));
    struct mat mw = rig_quantised(r, k, n, depth, 0.1f, parts, w);
    float *x = rig_floats(r, (int64_t)rows * depth, 1, DTYPE_BF16);
    enum dtype t = act_of(r, DTYPE_BF16);
    struct mat mx = rig_mat(r, rows, depth, t, x), out = rig_mat(r, rows, n, t, NULL);
    struct references ref = references_of(x, w, rows, n, depth, k->act != ACT_AS_THEY_ARE);

    if (strcmp(rig_device, "cpu") != 0) {
        fprintf(stderr, "  %d rows [%d, %d]\n", rows, n, depth);
    }
    rig_begin_plain(r, rows);
    r->b->ops->linear(r->b, out, mx, mw, NULL);
    rig_end(r);
    float *got = rig_download(r, out);
    double error = nmse(got, ref.plain, (int64_t)rows * n),
           other = nmse(got, ref.quantised, (int64_t)rows * n);
    /* The CPU has int8 activations in groups of 32, which test_blocks.c compares
     * exactly. */
    double limit = nmse_limit(DTYPE_BF16) * (strcmp(r->b->name, "cpu") == 0 ? 20 : 2);
    bool right = error <= limit || (k->act != ACT_AS_THEY_ARE && other <= limit);
    if (!right) {
        fail_msg("case %d, %s [%d, %d] x %d rows: NMSE %.3g, with quantised activations %.3g",
                 (int)(k - CASES), weight_format_of(k->format)->name, n, depth, rows, error, other);
    }
    free(w);
    free(x);
    free(got);
    free(ref.plain);
    free(ref.quantised);
}

static void products_follow_float64_in_every_format_and_row_count(void **state)
{
    (void)state;
    static const int32_t rows[] = {1, 8, 33, 64, 130, 256};
    struct rig r;

    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        if (!rig_multiplies(&r, CASES[i].format) || !rig_runs("products", i)) {
            continue;
        }
        for (size_t j = 0; j < ARRAY_LEN(rows); j++) {
            if (whole_takes(i + j, ARRAY_LEN(rows))) {
                check_product(&r, &CASES[i], rows[j], 256, 512, 1 + (int32_t)j % 2);
            }
        }
    }
    rig_close(&r);
}

/* Columns that are no multiple of 512, as of MLPs of 11,008, and rows enough for every
 * width of a tile. */
static void columns_are_filled_up(void **state)
{
    (void)state;
    static const int32_t rows[] = {1, 12, 30, 50, 200, 300};
    struct rig r;

    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        if (!rig_multiplies(&r, CASES[i].format) || !rig_runs("columns", i)) {
            continue;
        }
        for (size_t j = 0; j < (rig_small() ? 2 : ARRAY_LEN(rows)); j++) {
            if (whole_takes(i + j, ARRAY_LEN(rows))) {
                check_product(&r, &CASES[i], rows[j], 64 << j % 4,
                              whole(&CASES[i], 896) ? 896 : 1280, 1 + (int32_t)(j + 1) % 2);
            }
        }
    }
    rig_close(&r);
}

/* Sizes that no fast kernel takes. */
static void odd_sizes_are_multiplied_too(void **state)
{
    (void)state;
    struct rig r;

    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        if (rig_multiplies(&r, CASES[i].format) && rig_runs("odd sizes", i)) {
            check_product(&r, &CASES[i], 3, 41, whole(&CASES[i], 160) ? 160 : 256, 1);
            if (whole(&CASES[i], 33)) {
                check_product(&r, &CASES[i], 20, 90, 33, 2);
            }
        }
    }
    rig_close(&r);
}

static void deep_products_lose_no_digits(void **state)
{
    (void)state;
    struct rig r;

    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(CASES) && !rig_small(); i++) {
        if (rig_multiplies(&r, CASES[i].format) && rig_runs("deep products", i) &&
            whole_takes(i, ARRAY_LEN(CASES))) {
            check_product(&r, &CASES[i], 16, 64, 14336, 1);
        }
    }
    rig_close(&r);
}

/* ---- scales of the file for all activations ---- */

/* Inputs reach from -1 to 1: some are beyond the greatest codes, which they become. */
static const struct quant_case FIXED[] = {
    {.format = FORMAT_FP8,
     .type = SCALE_F32,
     .group_rows = 1,
     .act = ACT_SCALE_TENSOR,
     .act_scale = 0.6f / 448},
    {.format = FORMAT_FP8, .type = SCALE_F32, .act = ACT_SCALE_TENSOR, .act_scale = 0.6f / 448},
    {.format = FORMAT_INT8,
     .type = SCALE_F32,
     .group_rows = 1,
     .act = ACT_SCALE_TENSOR,
     .act_scale = 0.6f / 127},
};

/* What is multiplied instead of x. */
static float *rounded_inputs(const float *x, int64_t n, enum weight_format_id f, float scale)
{
    float *ret = rig_alloc((size_t)n * sizeof(*ret)), most = f == FORMAT_FP8 ? 448 : 127;

    for (int64_t i = 0; i < n; i++) {
        float code = fminf(fmaxf(x[i] / scale, -most), most);
        float step = f == FORMAT_FP8 ? ldexpf(1, MAX(code != 0 ? ilogbf(code) : -6, -6) - 3) : 1;
        ret[i] = nearbyintf(code / step) * step * scale;
    }
    return ret;
}

/* Of two pieces, with scales of which the second one's is `share` of the first. */
static void check_fixed(struct rig *r, const struct quant_case *k, int32_t rows, float share)
{
    enum { N = 128, DEPTH = 512 };
    struct quant_case second = *k;
    struct quant_piece q[2];
    float *w = rig_alloc((size_t)2 * N * DEPTH * sizeof(*w));
    float *x = rig_floats(r, (int64_t)rows * DEPTH, 1, DTYPE_BF16);
    enum dtype t = act_of(r, DTYPE_BF16);
    struct mat mx = rig_mat(r, rows, DEPTH, t, x), out = rig_mat(r, rows, 2 * N, t, NULL),
               both = rig_mat(r, rows, 2 * N, t, NULL), gated = rig_mat(r, rows, N, t, NULL);
    double *want = rig_alloc((size_t)rows * N * sizeof(*want));
    bool cpu = strcmp(r->b->name, "cpu") == 0;

    second.act_scale *= share;
    q[0] = quant_piece(r, k, N, DEPTH, 0.1f, w);
    q[1] = quant_piece(r, &second, N, DEPTH, 0.1f, w + (int64_t)N * DEPTH);
    struct mat mw = quant_weight_of(r, q, 2, false);
    bool rounds = rig_rounds_inputs(r, mw, rows, 1);
    rig_begin_plain(r, rows);
    r->b->ops->linear(r->b, out, mx, mw, NULL);
    r->b->ops->linear_gated(r->b, gated, both, mx, mw, (struct mat){0}, ACT_RELU);
    rig_end(r);
    for (int32_t half = 0; half < 2; half++) { /* a GPU has the greatest scale for both */
        float scale = half == 0 || !cpu ? k->act_scale : second.act_scale;
        float *taken = rounded_inputs(x, (int64_t)rows * DEPTH, k->format, scale);
        struct references ref =
            references_of(rounds ? taken : x, w + (int64_t)half * N * DEPTH, rows, N, DEPTH, false);
        float *got = rig_download(r, mat_cols(out, half * N, N));
        double error = nmse(got, ref.plain, (int64_t)rows * N);
        if (!(error <= 2 * nmse_limit(DTYPE_BF16))) {
            fail_msg("case %d, %d rows, half %d, scale %g: NMSE %.3g", (int)(k - FIXED), rows, half,
                     (double)scale, error);
        }
        for (int32_t i = 0; i < rows * N; i++) {
            want[i] = half == 0 ? MAX(ref.plain[i], 0) : want[i] * ref.plain[i];
        }
        free(got);
        free(taken);
        free(ref.plain);
        free(ref.quantised);
    }
    float *got = rig_download(r, gated);
    double error = nmse(got, want, (int64_t)rows * N);
    if (!(error <= 6 * nmse_limit(DTYPE_BF16))) {
        fail_msg("case %d, %d rows, gated: NMSE %.3g", (int)(k - FIXED), rows, error);
    }
    free(w);
    free(x);
    free(want);
    free(got);
}

static void inputs_are_rounded_by_the_files_scale(void **state)
{
    (void)state;
    static const int32_t rows[] = {1, 9, 40, 100, 300};
    struct rig r;

    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(FIXED); i++) {
        for (size_t j = 0; j < (rig_small() ? 2 : ARRAY_LEN(rows)); j++) {
            if (rig_multiplies(&r, FIXED[i].format) && rig_runs("fixed scales", i) &&
                whole_takes(i + j, ARRAY_LEN(rows))) {
                check_fixed(&r, &FIXED[i], rows[j], 1);
                check_fixed(&r, &FIXED[i], rows[j], 0.5f);
            }
        }
    }
    rig_close(&r);
}

/* ---- parts ---- */

/* q, k and v, or gate and up, of which one has another format. */
static const struct {
    struct quant_case part[3];
} PARTS[] = {
    {{{.format = FORMAT_Q4_K}, {.format = FORMAT_Q4_K}, {.format = FORMAT_Q6_K}}},
    {{{.format = FORMAT_INT4, .type = SCALE_BF16, .group_rows = 1, .group_cols = 128},
      {.format = FORMAT_BF16},
      {.format = FORMAT_INT4, .type = SCALE_BF16, .group_rows = 1, .group_cols = 32}}},
    {{{.format = FORMAT_FP8, .type = SCALE_F32, .group_rows = 1, .act = ACT_SCALE_TOKEN},
      {.format = FORMAT_INT8, .type = SCALE_F32, .group_rows = 1},
      {.format = FORMAT_BF16}}},
};

/* Relative to the greatest: sums of products and their gates. */
static void check_parts(struct rig *r, size_t which, int32_t rows)
{
    enum { N = 128, ALL = 3 * N, DEPTH = 512 };
    struct quant_piece q[3];
    float *w = rig_alloc((size_t)ALL * DEPTH * sizeof(*w));
    float *x = rig_floats(r, (int64_t)rows * DEPTH, 1, DTYPE_BF16);
    float *bias = rig_floats(r, ALL, 1, DTYPE_BF16);
    enum dtype t = act_of(r, DTYPE_BF16);
    struct mat mx = rig_mat(r, rows, DEPTH, t, x), out = rig_mat(r, rows, ALL, t, NULL),
               both = rig_mat(r, rows, ALL, t, NULL), gated = rig_mat(r, rows, ALL / 2, t, NULL);
    double *want = rig_alloc((size_t)rows * (ALL / 2) * sizeof(*want));

    for (int32_t i = 0; i < 3; i++) {
        q[i] = quant_piece(r, &PARTS[which].part[i], N, DEPTH, 0.1f, w + (int64_t)i * N * DEPTH);
    }
    struct mat mw = quant_weight_of(r, q, 3, false);
    struct epilogue ep = {.bias = rig_weight(r, WEIGHT_VECTOR, t, 1, ALL, bias)};
    struct references ref = references_of(x, w, rows, ALL, DEPTH, false);
    rig_begin_plain(r, rows);
    r->b->ops->linear(r->b, out, mx, mw, &ep);
    r->b->ops->linear_gated(r->b, gated, both, mx, mw, (struct mat){0}, ACT_RELU);
    rig_end(r);
    for (int32_t i = 0; i < rows * (ALL / 2); i++) {
        const double *row = ref.plain + (int64_t)(i / (ALL / 2)) * ALL + i % (ALL / 2);
        want[i] = MAX(row[0], 0) * row[ALL / 2];
    }
    for (int32_t i = 0; i < rows * ALL; i++) {
        ref.plain[i] += bias[i % ALL];
    }
    float *got = rig_download(r, out), *got_gated = rig_download(r, gated);
    /* some parts have activations of eight bits */
    double limit = nmse_limit(DTYPE_BF16) * (strcmp(r->b->name, "cpu") == 0 ? 40
                                             : which == 2                   ? 400
                                                                            : 4);
    double error = nmse(got, ref.plain, (int64_t)rows * ALL),
           of_gate = nmse(got_gated, want, (int64_t)rows * (ALL / 2));
    if (!(error <= limit && of_gate <= 2 * limit)) {
        fail_msg("case %zu, %d rows: NMSE %.3g, of the gate %.3g, allowed %.3g", which, rows, error,
                 of_gate, limit);
    }
    free(w);
    free(x);
    free(bias);
    free(want);
    free(got);
    free(got_gated);
    free(ref.plain);
    free(ref.quantised);
}

static void parts_of_other_formats_make_one_product(void **state)
{
    (void)state;
    static const int32_t rows[] = {1, 9, 100, 300};
    struct rig r;

    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(PARTS); i++) {
        for (size_t j = 0; j < ARRAY_LEN(rows) && rig_runs("parts", i); j++) {
            if (whole_takes(i + j, ARRAY_LEN(rows))) {
                check_parts(&r, i, rows[j]);
            }
        }
    }
    rig_close(&r);
}

/* ---- embeddings ---- */

/* Rows of an embedding in blocks, of which the last tile is not whole, times three. */
static void check_embedding(struct rig *r, const struct quant_case *k)
{
    enum { VOCAB = 200, WIDTH = 768, N = 33 };
    float *values = rig_alloc((size_t)VOCAB * WIDTH * sizeof(*values));
    double *want = rig_alloc((size_t)N * WIDTH * sizeof(*want));
    struct quant_piece q = quant_piece(r, k, VOCAB, WIDTH, 0.1f, values);
    struct weight_desc d = {.name = "test",
                            .kind = WEIGHT_EMBEDDING,
                            .dtype = DTYPE_BF16,
                            .rows = VOCAB,
                            .cols = WIDTH,
                            .piece = &q.p,
                            .n_pieces = 1};
    struct mat table, out = rig_mat(r, N, WIDTH, act_of(r, DTYPE_BF16), NULL);
    int32_t id[N], minus[N], zero[N] = {0}, q_start[2] = {0, N}, n = N;
    struct err e = {0};

    assert_int_equal(r->b->ops->weight(r->b, &d, &table, &e), 0);
    for (int32_t i = 0; i < N; i++) {
        id[i] = i == 0 ? VOCAB - 1 : rig_below(r, VOCAB);
        minus[i] = -1;
    }
    for (int32_t i = 0; i < N * WIDTH; i++) {
        want[i] = 3.0 * values[id[i / WIDTH] * WIDTH + i % WIDTH];
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
    rig_begin(r, &b);
    r->b->ops->embed(r->b, out, table, 3);
    float *got = rig_download(r, out);
    rig_end(r);
    double error = nmse(got, want, (int64_t)N * WIDTH);
    if (!(error <= 2 * nmse_limit(DTYPE_BF16))) { /* rounded before and behind the factor */
        fail_msg("embedding of %s: NMSE %.3g", weight_format_of(k->format)->name, error);
    }
    quant_piece_free(&q); /* a CPU reads it in place */
    free(values);
    free(want);
    free(got);
}

static void embeddings_of_blocks_are_their_rows(void **state)
{
    (void)state;
    struct rig r;

    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        if (CASES[i].format < FORMAT_FP8 && rig_multiplies(&r, CASES[i].format) &&
            rig_runs("embeddings", i)) {
            check_embedding(&r, &CASES[i]);
        }
    }
    rig_close(&r);
}

/* ---- logits ---- */

static void check_logits(struct rig *r, const struct quant_case *k, int32_t rows)
{
    enum { VOCAB = 320, WIDTH = 768 };
    float *w = rig_alloc((size_t)VOCAB * WIDTH * sizeof(*w));
    float *x = rig_floats(r, (int64_t)rows * WIDTH, 1, DTYPE_BF16);
    struct quant_piece q = quant_piece(r, k, VOCAB, WIDTH, 0.1f, w);
    struct weight_desc d = {.name = "test",
                            .kind = WEIGHT_LINEAR,
                            .dtype = DTYPE_BF16,
                            .rows = VOCAB,
                            .cols = WIDTH,
                            .piece = &q.p,
                            .n_pieces = 1,
                            .logits = true};
    struct mat head, mx = rig_mat(r, rows, WIDTH, act_of(r, DTYPE_BF16), x),
                     out = rig_mat(r, rows, VOCAB, DTYPE_F32, NULL);
    struct references ref = references_of(x, w, rows, VOCAB, WIDTH, false);
    struct err e = {0};

    assert_int_equal(r->b->ops->weight(r->b, &d, &head, &e), 0);
    if (r->b->ops->ready) {
        assert_int_equal(r->b->ops->ready(r->b, &e), 0);
    }
    rig_begin_plain(r, rows);
    r->b->ops->linear(r->b, out, mx, head, NULL);
    rig_end(r);
    float *got = rig_download(r, out);
    double error = nmse(got, ref.plain, (int64_t)rows * VOCAB);
    if (!(error <= nmse_limit(DTYPE_BF16) * (strcmp(r->b->name, "cpu") == 0 ? 20 : 1))) {
        fail_msg("logits of %s, %d rows: NMSE %.3g", weight_format_of(k->format)->name, rows,
                 error);
    }
    quant_piece_free(&q);
    free(w);
    free(x);
    free(got);
    free(ref.plain);
    free(ref.quantised);
}

static void logits_follow_float64(void **state)
{
    (void)state;
    static const int32_t rows[] = {1, 40, 200, 300};
    struct rig r;

    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        bool wants = CASES[i].act == ACT_AS_THEY_ARE && rig_multiplies(&r, CASES[i].format);
        for (size_t j = 0; j < ARRAY_LEN(rows) && wants && rig_runs("logits", i); j++) {
            if (whole_takes(i + j, ARRAY_LEN(rows))) {
                check_logits(&r, &CASES[i], rows[j]);
            }
        }
    }
    rig_close(&r);
}

/* ---- many rows ---- */

enum { MANY_COLS = 8448, MANY_DEPTH = 384, MANY_ROWS = 512, EVERY_ROW = 37 };

/* Some rows of x w^T, with activations as they are or quantised. */
static double *some_rows(const float *x, const float *w, int32_t rows, bool quantised)
{
    int32_t n = (rows + EVERY_ROW - 1) / EVERY_ROW;
    double *ret = rig_alloc((size_t)n * MANY_COLS * sizeof(*ret)), row[MANY_DEPTH];

    for (int32_t i = 0; i < n; i++) {
        const float *from = x + (int64_t)i * EVERY_ROW * MANY_DEPTH;
        for (int32_t c = 0; c < MANY_DEPTH; c++) {
            row[c] = from[c];
        }
        if (quantised) {
            quant_row(from, MANY_DEPTH, row);
        }
        for (int32_t j = 0; j < MANY_COLS; j++) {
            ret[(int64_t)i * MANY_COLS + j] = dot_of(row, w + (int64_t)j * MANY_DEPTH, MANY_DEPTH);
        }
    }
    return ret;
}

/* What of `got` [rows, cols] is compared. */
static void check_some(struct rig *r, const char *what, struct mat got, const double *const want[2],
                       int32_t rows)
{
    int32_t n = (rows + EVERY_ROW - 1) / EVERY_ROW, cols = got.cols;
    float *all = rig_download(r, got), *some = rig_alloc((size_t)n * (size_t)cols * sizeof(*some));

    for (int32_t i = 0; i < n; i++) {
        memcpy(some + (int64_t)i * cols, all + (int64_t)i * EVERY_ROW * cols,
               (size_t)cols * sizeof(*some));
    }
    double limit = nmse_limit(DTYPE_BF16) * (strcmp(r->b->name, "cpu") == 0 ? 20 : 2);
    double error = nmse(some, want[0], (int64_t)n * cols),
           other = nmse(some, want[1], (int64_t)n * cols);
    if (!(error <= limit || other <= limit)) {
        fail_msg("%s: NMSE %.3g, with quantised activations %.3g", what, error, other);
    }
    free(all);
    free(some);
}

static double silu(double x)
{
    return x / (1 + exp(-x));
}

/* What `rows` rows are compared with: the product, the gated product, the sum with
 * `stream`, each with activations as they are and quantised. */
static void many_references(const float *x, const float *w, const float *stream, int32_t rows,
                            double *product[2], double *gated[2], double *sum[2])
{
    enum { HALF = MANY_COLS / 2 };
    int32_t n = (rows + EVERY_ROW - 1) / EVERY_ROW;

    for (int k = 0; k < 2; k++) {
        product[k] = some_rows(x, w, rows, k == 1);
        gated[k] = rig_alloc((size_t)n * HALF * sizeof(*gated[k]));
        sum[k] = rig_alloc((size_t)n * MANY_COLS * sizeof(*sum[k]));
        for (int32_t i = 0; i < n * HALF; i++) {
            const double *row = product[k] + (int64_t)(i / HALF) * MANY_COLS;
            gated[k][i] = silu(row[i % HALF]) * row[HALF + i % HALF];
        }
        for (int32_t i = 0; i < n * MANY_COLS; i++) {
            int64_t at = (int64_t)(i / MANY_COLS) * EVERY_ROW * MANY_COLS + i % MANY_COLS;
            sum[k][i] = product[k][i] + stream[at];
        }
    }
}

static void check_many(struct rig *r, struct mat mw, const float *w, int32_t rows)
{
    enum dtype t = act_of(r, DTYPE_BF16);
    float *x = rig_floats(r, (int64_t)rows * MANY_DEPTH, 1, DTYPE_BF16);
    float *stream = rig_floats(r, (int64_t)rows * MANY_COLS, 1, DTYPE_BF16);
    float *weight = rig_floats(r, MANY_COLS, 1, DTYPE_BF16);
    struct mat mx = rig_mat(r, rows, MANY_DEPTH, t, x);
    struct mat out = rig_mat(r, rows, MANY_COLS, t, NULL);
    struct mat wide = rig_mat(r, rows, MANY_COLS, t, NULL);
    struct mat gated = rig_mat(r, rows, MANY_COLS / 2, t, NULL);
    struct mat sum = rig_mat(r, rows, MANY_COLS, t, stream);
    struct mat y = rig_mat(r, rows, MANY_COLS, t, NULL), h = rig_mat(r, rows, MANY_COLS, t, NULL);
    struct norm norm = {.kind = NORM_RMS,
                        .eps = 1e-5f,
                        .weight = rig_weight(r, WEIGHT_VECTOR, t, 1, MANY_COLS, weight)};
    double *ref[3][2];

    y.transient = true;
    rig_begin_plain(r, rows);
    r->b->ops->linear(r->b, out, mx, mw, NULL);
    r->b->ops->linear_gated(r->b, gated, wide, mx, mw, (struct mat){0}, ACT_SILU);
    r->b->ops->linear(r->b, y, mx, mw, NULL);
    r->b->ops->add_norm(r->b, h, sum, y, &norm, false);
    rig_end(r);
    many_references(x, w, stream, rows, ref[0], ref[1], ref[2]);
    check_some(r, "product", out, (const double *const *)ref[0], rows);
    check_some(r, "gated product", gated, (const double *const *)ref[1], rows);
    check_some(r, "sum with the stream", sum, (const double *const *)ref[2], rows);
    for (int i = 0; i < 6; i++) {
        free(ref[i / 2][i % 2]);
    }
    free(x);
    free(stream);
    free(weight);
}

/* As a product of its own, with a gate behind it, and added to what is there, which a
 * device may each do in one launch. */
static void products_of_many_rows_follow_float64(void **state)
{
    (void)state;
    struct rig r;

    rig_open(&r);
    float *w = rig_alloc((size_t)MANY_COLS * MANY_DEPTH * sizeof(*w));
    struct mat mw = rig_quantised(&r, &CASES[0], MANY_COLS, MANY_DEPTH, 0.1f, 2, w);
    /* Where there are no tiles, more rows are only the same again. */
    const char *isa = getenv("QUIRE_CPU_ISA");
    bool tiles = strcmp(rig_device, "cpu") != 0 || !isa || strcmp(isa, "amx") == 0;
    int32_t most = tiles || test_whole() ? MANY_ROWS : 2 * EVERY_ROW + 12;
    for (int32_t rows = most; rows >= most - 12 && !rig_small(); rows -= 12) {
        if (!rig_runs("many rows", (size_t)rows)) {
            continue;
        }
        check_many(&r, mw, w, rows);
    }
    free(w);
    rig_close(&r);
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_follow_float64_in_every_format_and_row_count),
        cmocka_unit_test(columns_are_filled_up),
        cmocka_unit_test(odd_sizes_are_multiplied_too),
        cmocka_unit_test(inputs_are_rounded_by_the_files_scale),
        cmocka_unit_test(parts_of_other_formats_make_one_product),
        cmocka_unit_test(embeddings_of_blocks_are_their_rows),
        cmocka_unit_test(logits_follow_float64),
        cmocka_unit_test(deep_products_lose_no_digits),
        cmocka_unit_test(products_of_many_rows_follow_float64)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
