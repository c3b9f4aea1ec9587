/* Every operation except attention and sampling, on a grid of shapes, against float64.
 *
 *     build/tests/unit/kernels/test_ops [--device cpu|cuda]
 */
#include "tests/unit/ops.h"

static const enum dtype weight_types[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};

/* ---- conversions ---- */

static void every_half_survives_the_way_through_float32(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        bool nan16 = (h & 0x7FFF) > 0x7C00;
        bool nan_b = (h & 0x7FFF) > 0x7F80;
        assert_true(nan16 ? isnan(f16_load((uint16_t)h)) : f16_store(f16_load((uint16_t)h)) == h);
        assert_true(nan_b ? isnan(bf16_load((uint16_t)h))
                          : bf16_store(bf16_load((uint16_t)h)) == h);
    }
    assert_int_equal(f16_store(NAN) & 0x7C00, 0x7C00);
    assert_true(isnan(f16_load(f16_store(NAN))) && isnan(bf16_load(bf16_store(NAN))));
}

static void conversions_round_to_nearest_even(void **state)
{
    (void)state;
    assert_int_equal(f16_store(1.0f + 0x1p-11f), 0x3C00);            /* half way, to even */
    assert_int_equal(f16_store(1.0f + 0x1p-10f + 0x1p-11f), 0x3C02); /* half way, up to even */
    assert_int_equal(f16_store(1.0f + 0x1.1p-11f), 0x3C01);
    assert_int_equal(f16_store(65519.0f), 0x7BFF);
    assert_int_equal(f16_store(65520.0f), 0x7C00);
    assert_int_equal(f16_store(0x1p-25f), 0x0000);
    assert_int_equal(f16_store(0x1.8p-24f), 0x0002);
    assert_int_equal(f16_store(-0x1p-24f), 0x8001);
    assert_int_equal(bf16_store(1.0f + 0x1p-8f), 0x3F80);
    assert_int_equal(bf16_store(1.0f + 0x1.8p-7f), 0x3F82);
    assert_int_equal(bf16_store(-1.0f - 0x1.1p-8f), 0xBF81);
}

/* ---- embedding ---- */

static void check_embed(struct rig *r, enum dtype t, int32_t width, int32_t n, float scale)
{
    enum { VOCAB = 300 };
    enum dtype at = act_of(r, t);
    float *table = rig_floats(r, (int64_t)VOCAB * width, 1, t);
    struct mat w = rig_weight(r, WEIGHT_EMBEDDING, t, VOCAB, width, table);
    struct mat out = rig_mat(r, n, width, at, NULL);
    int32_t id[RIG_TOKENS], minus[RIG_TOKENS], zero[RIG_TOKENS] = {0}, q_start[2] = {0, n};

    for (int32_t i = 0; i < n; i++) {
        id[i] = rig_below(r, VOCAB);
        minus[i] = -1;
    }
    struct batch b = {.n_tokens = n,
                      .token = id,
                      .token_src = minus,
                      .position = zero,
                      .slot = minus,
                      .n_seqs = 1,
                      .n_decode = n == 1,
                      .q_start = q_start,
                      .kv_len = &n,
                      .row = zero,
                      .lcp_blocks = zero};
    rig_begin(r, &b);
    r->b->ops->embed(r->b, out, w, scale);
    float *got = rig_download(r, out);
    rig_end(r);
    for (int32_t i = 0; i < n; i++) {
        for (int32_t c = 0; c < width; c++) {
            float want = round_to(at, table[(int64_t)id[i] * width + c] * scale);
            assert_memory_equal(&got[(int64_t)i * width + c], &want, sizeof(want));
        }
    }
    free(got);
    free(table);
}

static void embedding_is_exact(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r);
    for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
        check_embed(&r, weight_types[t], 8, 1, 1);
        check_embed(&r, weight_types[t], 100, 17, 1);
        check_embed(&r, weight_types[t], 576, 130, 24);
    }
    rig_close(&r);
}

static void positions_are_added_with_their_offset(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r);
    for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
        enum { N = 19, WIDTH = 72, ROWS = 64, OFFSET = 2 };
        enum dtype at = act_of(&r, weight_types[t]);
        float *table = rig_floats(&r, ROWS * WIDTH, 1, weight_types[t]);
        float *x = rig_floats(&r, N * WIDTH, 1, at);
        struct mat w = rig_weight(&r, WEIGHT_TABLE, weight_types[t], ROWS, WIDTH, table);
        struct mat m = rig_mat(&r, N, WIDTH, at, x);
        int32_t position[N], minus[N], zero[N] = {0}, q_start[2] = {0, N}, n = N;
        for (int32_t i = 0; i < N; i++) {
            position[i] = rig_below(&r, ROWS - OFFSET);
            minus[i] = -1;
        }
        struct batch b = {.n_tokens = N,
                          .token = zero,
                          .token_src = minus,
                          .position = position,
                          .slot = minus,
                          .n_seqs = 1,
                          .q_start = q_start,
                          .kv_len = &n,
                          .row = zero,
                          .lcp_blocks = zero};
        rig_begin(&r, &b);
        r.b->ops->embed_position(r.b, m, w, OFFSET);
        float *got = rig_download(&r, m);
        rig_end(&r);
        for (int32_t i = 0; i < N * WIDTH; i++) {
            float want =
                round_to(at, x[i] + table[(position[i / WIDTH] + OFFSET) * WIDTH + i % WIDTH]);
            assert_memory_equal(&got[i], &want, sizeof(want));
        }
        free(got);
        free(x);
        free(table);
    }
    rig_close(&r);
}

/* ---- norms, additions ---- */

static void norm_reference(double *out, const float *x, const float *w, const float *bias,
                           int32_t rows, int32_t n, const struct norm *k)
{
    for (int32_t r = 0; r < rows; r++, x += n, out += n) {
        double mean = 0;
        double sum = 0;
        for (int32_t i = 0; i < n && k->kind == NORM_LAYER; i++) {
            mean += (double)x[i] / n;
        }
        for (int32_t i = 0; i < n; i++) {
            sum += (x[i] - mean) * (x[i] - mean);
        }
        double inv = 1 / sqrt(sum / n + (double)k->eps);
        for (int32_t i = 0; i < n; i++) {
            out[i] = (x[i] - mean) * inv * ((double)w[i] + (double)k->weight_offset) +
                     (bias ? (double)bias[i] : 0);
        }
    }
}

struct norm_case {
    enum norm_kind kind;
    int32_t rows, cols;
    bool bias, in_place, add;
    float weight_offset;
};

static void check_norm(struct rig *r, const struct norm_case *k, enum dtype t)
{
    enum dtype at = act_of(r, t);
    int64_t n = (int64_t)k->rows * k->cols;
    float *x = rig_floats(r, n, 3, at);
    float *y = rig_floats(r, n, 3, at);
    float *w = rig_floats(r, k->cols, 2, t);
    float *bias = rig_floats(r, k->cols, 1, t);
    struct norm norm = {.kind = k->kind, .eps = 1e-5f, .weight_offset = k->weight_offset};

    norm.weight = rig_weight(r, WEIGHT_VECTOR, t, 1, k->cols, w);
    if (k->bias) {
        norm.bias = rig_weight(r, WEIGHT_VECTOR, t, 1, k->cols, bias);
    }
    struct mat mx = rig_mat(r, k->rows, k->cols, at, x);
    struct mat my = rig_mat(r, k->rows, k->cols, at, y);
    struct mat out = k->in_place ? mx : rig_mat(r, k->rows, k->cols, at, NULL);
    rig_begin_plain(r, k->rows);
    if (k->add) {
        r->b->ops->add_norm(r->b, out, mx, my, &norm, true);
    } else {
        r->b->ops->norm(r->b, out, mx, &norm);
    }
    float *got = rig_download(r, out);
    float *residual = rig_download(r, mx);
    rig_end(r);
    for (int64_t i = 0; i < n && k->add; i++) {
        x[i] = round_to(at, x[i] + y[i]);
        assert_memory_equal(&residual[i], &x[i], sizeof(x[i]));
    }
    double *ref = rig_alloc((size_t)n * sizeof(*ref));
    norm_reference(ref, x, w, k->bias ? bias : NULL, k->rows, k->cols, &norm);
    /* An add_norm may norm the sum before it is rounded to the activations' type. */
    assert_nmse("norm", got, ref, n, at);
    free(ref);
    free(residual);
    free(got);
    free(bias);
    free(w);
    free(y);
    free(x);
}

static void norms_follow_float64(void **state)
{
    (void)state;
    static const struct norm_case cases[] = {
        {NORM_RMS, 1, 64, false, false, false, 0},   {NORM_RMS, 7, 576, false, true, false, 0},
        {NORM_RMS, 33, 2048, false, false, true, 0}, {NORM_RMS, 5, 100, false, false, true, 1},
        {NORM_RMS, 3, 8192, false, false, true, 0},  {NORM_LAYER, 1, 768, true, false, false, 0},
        {NORM_LAYER, 18, 72, true, true, false, 0},  {NORM_LAYER, 64, 1024, true, false, true, 0},
        {NORM_LAYER, 2, 33, false, false, true, 0},
    };
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
            check_norm(&r, &cases[i], weight_types[t]);
        }
    }
    rig_close(&r);
}

static void add_is_exact(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r);
    for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
        enum { ROWS = 37, COLS = 99 };
        enum dtype at = act_of(&r, weight_types[t]);
        float *x = rig_floats(&r, ROWS * COLS, 3, at);
        float *y = rig_floats(&r, ROWS * COLS, 3, at);
        struct mat mx = rig_mat(&r, ROWS, COLS, at, x);
        struct mat my = rig_mat(&r, ROWS, COLS, at, y);
        rig_begin_plain(&r, ROWS);
        r.b->ops->add(r.b, mx, my, false);
        float *got = rig_download(&r, mx);
        rig_end(&r);
        for (int32_t i = 0; i < ROWS * COLS; i++) {
            float want = round_to(at, x[i] + y[i]);
            assert_memory_equal(&got[i], &want, sizeof(want));
        }
        free(got);
        free(y);
        free(x);
    }
    rig_close(&r);
}

/* ---- activations ---- */

static double activate_reference(enum activation act, double x)
{
    switch (act) {
    case ACT_RELU:
        return x > 0 ? x : 0;
    case ACT_GELU_ERF:
        return 0.5 * x * (1 + erf(x / sqrt(2)));
    case ACT_GELU_TANH:
        return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case ACT_SILU:
        return x / (1 + exp(-x));
    default:
        return x;
    }
}

/* A weight [2n, in] of rows that each select one column of x, so that the factors of a
 * gated product are known exactly: gate's column c is x's column c % in, up's is x's
 * column (c * 7 + 3) % in. */
static struct mat picking_weight(struct rig *r, enum dtype t, int32_t n, int32_t in)
{
    float *w = rig_alloc((size_t)2 * (size_t)n * (size_t)in * sizeof(*w));

    memset(w, 0, (size_t)2 * (size_t)n * (size_t)in * sizeof(*w));
    for (int64_t c = 0; c < n; c++) {
        w[c * in + c % in] = 1;
        w[(n + c) * in + (c * 7 + 3) % in] = 1;
    }
    struct mat m = rig_weight(r, WEIGHT_LINEAR, t, 2 * n, in, w);
    free(w);
    return m;
}

static void gated_activations_follow_float64(void **state)
{
    (void)state;
    enum { IN = 64 };
    static const int32_t shape[][2] = {{1, 16}, {3, 100}, {40, 1536}, {17, 8192}};
    struct rig r;
    rig_open(&r);
    for (int i = 0; i < 3 * 4 * 5; i++) {
        enum dtype t = weight_types[i % 3];
        enum dtype at = act_of(&r, t);
        int32_t rows = shape[i / 3 % 4][0];
        int32_t n = shape[i / 3 % 4][1];
        enum activation act = (enum activation)(i / 12);
        float *x = rig_floats(&r, (int64_t)rows * IN, 12, operand_of(&r, t));
        struct mat w = picking_weight(&r, t, n, IN);
        struct mat in = rig_mat(&r, rows, IN, at, x);
        struct mat room = rig_mat(&r, rows, 2 * n, at, NULL);
        struct mat out = rig_mat(&r, rows, n, at, NULL);
        rig_begin_plain(&r, rows);
        r.b->ops->linear_gated(r.b, out, room, in, w, (struct mat){0}, act);
        float *got = rig_download(&r, out);
        rig_end(&r);
        double *ref = rig_alloc((size_t)rows * (size_t)n * sizeof(*ref));
        for (int64_t k = 0; k < (int64_t)rows * n; k++) {
            const float *row = x + k / n * IN;
            ref[k] = activate_reference(act, row[k % n % IN]) * row[(k % n * 7 + 3) % IN];
        }
        assert_nmse("gated activation", got, ref, (int64_t)rows * n, at);
        free(ref);
        free(got);
        free(x);
    }
    rig_close(&r);
}

static void soft_caps_follow_float64(void **state)
{
    (void)state;
    enum { ROWS = 19, COLS = 130 };
    static const float caps[] = {0.5f, 30, 1e6f};
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(caps); i++) {
        float *x = rig_floats(&r, ROWS * COLS, 60, DTYPE_F32);
        x[0] = 1e30f;
        x[1] = -1e30f;
        struct mat m = rig_mat(&r, ROWS, COLS, DTYPE_F32, x);
        rig_begin_plain(&r, ROWS);
        r.b->ops->soft_cap(r.b, m, caps[i]);
        float *got = rig_download(&r, m);
        rig_end(&r);
        for (int32_t k = 0; k < ROWS * COLS; k++) {
            double want = (double)caps[i] * tanh((double)x[k] / (double)caps[i]);
            assert_true(fabs((double)got[k] - want) <= 1e-6 * fabs(want));
        }
        free(got);
        free(x);
    }
    rig_close(&r);
}

static double softplus(double x)
{
    return log1p(exp(x));
}

static void xielu_follows_float64(void **state)
{
    (void)state;
    enum { ROWS = 19, COLS = 130 };
    static const float factors[][2] = {{0.2f, -0.3f}, {-4, 3}, {25, -30}};
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(factors); i++) {
        float *x = rig_floats(&r, ROWS * COLS, 5, DTYPE_F32);
        x[0] = 0;
        x[1] = -1e-7f;
        x[2] = -100;
        struct mat m = rig_mat(&r, ROWS, COLS, DTYPE_F32, x);
        struct mat of = rig_mat(&r, 1, 2, DTYPE_F32, factors[i]);
        rig_begin_plain(&r, ROWS);
        r.b->ops->xielu(r.b, m, of);
        float *got = rig_download(&r, m);
        rig_end(&r);
        double p = softplus(factors[i][0]), n = 0.5 + softplus(factors[i][1]);
        for (int32_t k = 0; k < ROWS * COLS; k++) {
            double v = x[k];
            double want = (v > 0 ? p * v * v : n * (expm1(fmin(v, -1e-6)) - v)) + 0.5 * v;
            double size = fabs(v) * (1 + n + p * fabs(v)) + 1e-6;
            assert_true(fabs((double)got[k] - want) <= 1e-6 * size);
        }
        free(got);
        free(x);
    }
    rig_close(&r);
}

/* In place and not; the other columns of the scores' rows do not count. */
static void rows_are_scaled_by_their_greatest_score(void **state)
{
    (void)state;
    enum { ROWS = 19, COLS = 130, SCORES = 7 };
    struct rig r;
    rig_open(&r);
    for (int in_place = 0; in_place < 2; in_place++) {
        float *x = rig_floats(&r, ROWS * COLS, 3, DTYPE_F32);
        float *score = rig_floats(&r, ROWS * (SCORES + 1), 4, DTYPE_F32);
        for (int32_t i = 0; i < ROWS; i++) {
            score[i * (SCORES + 1) + SCORES] = 50;
        }
        struct mat m = rig_mat(&r, ROWS, COLS, DTYPE_F32, x);
        struct mat out = in_place ? m : rig_mat(&r, ROWS, COLS, DTYPE_F32, x);
        struct mat scores = rig_mat(&r, ROWS, SCORES + 1, DTYPE_F32, score);
        rig_begin_plain(&r, ROWS);
        r.b->ops->scale_by_score(r.b, out, m, mat_cols(scores, 0, SCORES));
        float *got = rig_download(&r, out);
        rig_end(&r);
        for (int32_t i = 0; i < ROWS; i++) {
            float most = score[i * (SCORES + 1)];
            for (int32_t k = 1; k < SCORES; k++) {
                most = fmaxf(most, score[i * (SCORES + 1) + k]);
            }
            for (int32_t k = i * COLS; k < (i + 1) * COLS; k++) {
                double want = (double)x[k] / (1 + exp(-(double)most));
                assert_true(fabs((double)got[k] - want) <= 1e-6 * fabs(want));
            }
        }
        free(got);
        free(score);
        free(x);
    }
    rig_close(&r);
}

/* Columns of two ranks, of which one's are views of wider rows, and their sums side by
 * side. */
static void norms_by_sums_of_parts_follow_float64(void **state)
{
    (void)state;
    enum { ROWS = 19, FIRST = 72, SECOND = 40, COLS = FIRST + SECOND };
    struct rig r;
    rig_open(&r);
    if (!r.b->ops->square_sums) {
        rig_close(&r);
        skip();
    }
    enum dtype at = act_of(&r, DTYPE_BF16);
    float *x = rig_floats(&r, ROWS * COLS, 3, at), *w = rig_floats(&r, COLS, 2, DTYPE_BF16);
    struct mat m = rig_mat(&r, ROWS, COLS, at, x);
    struct mat sums = rig_mat(&r, ROWS, 2, DTYPE_F32, NULL);
    const int32_t first[] = {0, FIRST}, n[] = {FIRST, SECOND};
    struct norm norm[2];
    for (int32_t i = 0; i < 2; i++) {
        norm[i] = (struct norm){
            .kind = NORM_RMS,
            .eps = 1e-3f,
            .weight_offset = 1,
            .weight = rig_weight(&r, WEIGHT_VECTOR, DTYPE_BF16, 1, n[i], w + first[i])};
    }
    rig_begin_plain(&r, ROWS);
    for (int32_t i = 0; i < 2; i++) {
        r.b->ops->square_sums(r.b, mat_cols(sums, i, 1), mat_cols(m, first[i], n[i]));
    }
    float *sum = rig_download(&r, sums);
    for (int32_t k = 0; k < ROWS; k++) {
        sum[2 * k] += sum[2 * k + 1]; /* as a sum over ranks does */
    }
    rig_upload(&r, sums, sum);
    for (int32_t i = 0; i < 2; i++) {
        r.b->ops->norm_by_sums(r.b, mat_cols(m, first[i], n[i]), mat_cols(sums, 0, 1), COLS,
                               &norm[i]);
    }
    float *got = rig_download(&r, m);
    rig_end(&r);
    double *want = rig_alloc(ROWS * COLS * sizeof(*want));
    for (int32_t k = 0; k < ROWS; k++) {
        double squares = 0;
        for (int32_t i = 0; i < COLS; i++) {
            squares += (double)x[k * COLS + i] * x[k * COLS + i];
        }
        for (int32_t i = 0; i < COLS; i++) {
            want[k * COLS + i] = x[k * COLS + i] / sqrt(squares / COLS + 1e-3) * (1 + w[i]);
        }
    }
    assert_nmse("a norm by sums", got, want, ROWS * COLS, at);
    free(want);
    free(got);
    free(sum);
    free(x);
    free(w);
    rig_close(&r);
}

/* Large inputs: exp must neither overflow to NaN nor lose the sign. */
static void activations_are_finite_far_out(void **state)
{
    (void)state;
    enum { N = 8 };
    static const float x[N + 1] = {-1e30f, -200, -100, -88.5f, 88.5f, 100, 200, 1e8f, 1};
    float w[2 * N * (N + 1)] = {0};
    for (int i = 0; i < N; i++) {
        w[i * (N + 1) + i] = 1;
        w[(N + i) * (N + 1) + N] = 1;
    }
    struct rig r;
    rig_open(&r);
    for (enum activation act = ACT_RELU; act <= ACT_SILU; act++) {
        struct mat mw = rig_weight(&r, WEIGHT_LINEAR, DTYPE_F32, 2 * N, N + 1, w);
        struct mat in = rig_mat(&r, 1, N + 1, DTYPE_F32, x);
        struct mat room = rig_mat(&r, 1, 2 * N, DTYPE_F32, NULL);
        struct mat out = rig_mat(&r, 1, N, DTYPE_F32, NULL);
        rig_begin_plain(&r, 1);
        r.b->ops->linear_gated(r.b, out, room, in, mw, (struct mat){0}, act);
        float *got = rig_download(&r, out);
        rig_end(&r);
        for (int i = 0; i < N; i++) {
            assert_true(x[i] < 0 ? fabsf(got[i]) < 1e-25f : fabsf(got[i] - x[i]) <= 1e-6f * x[i]);
        }
        free(got);
    }
    rig_close(&r);
}

static void gather_is_exact(void **state)
{
    (void)state;
    enum { ROWS = 50, COLS = 72, N = 9, FIRST = 3 };
    struct rig r;
    rig_open(&r);
    enum dtype at = act_of(&r, DTYPE_BF16);
    float *x = rig_floats(&r, ROWS * COLS, 1, at);
    struct mat mx = rig_mat(&r, ROWS, COLS, at, x);
    struct mat out = rig_mat(&r, N, COLS, at, NULL);
    int32_t zero[ROWS] = {0}, minus[ROWS], q_start[2] = {0, ROWS}, n = ROWS, pick[FIRST + N];
    for (int32_t i = 0; i < ROWS; i++) {
        minus[i] = -1;
    }
    for (int32_t i = 0; i < FIRST + N; i++) {
        pick[i] = i * 4 + 1;
    }
    struct batch b = {.n_tokens = ROWS,
                      .token = zero,
                      .token_src = minus,
                      .position = zero,
                      .slot = minus,
                      .n_seqs = 1,
                      .q_start = q_start,
                      .kv_len = &n,
                      .row = zero,
                      .lcp_blocks = zero,
                      .n_logits = FIRST + N,
                      .logits_token = pick};
    rig_begin(&r, &b);
    r.b->ops->gather(r.b, out, mx, FIRST);
    float *got = rig_download(&r, out);
    rig_end(&r);
    for (int32_t i = 0; i < N; i++) {
        assert_memory_equal(got + i * COLS, x + pick[FIRST + i] * COLS, COLS * sizeof(*x));
    }
    free(got);
    free(x);
    rig_close(&r);
}

/* ---- linear ---- */

struct linear_case {
    int32_t rows, in, out;
    bool bias, residual, in_place, f32_out;
    enum activation act;
};

/* The results of a plain implementation of the same precision, and of float64. */
static void linear_references(const struct linear_case *k, const float *x, const float *w,
                              const float *bias, const float *res, enum dtype operand,
                              enum dtype to, float *plain, double *ref)
{
    int64_t n = (int64_t)k->rows * k->in;
    double *exact = rig_alloc((size_t)n * sizeof(*exact));
    float *rounded = rig_alloc((size_t)n * sizeof(*rounded));

    for (int64_t i = 0; i < n; i++) {
        exact[i] = x[i];
        rounded[i] = round_to(operand, x[i]);
    }
    panels_products(exact, rounded, w, k->rows, k->out, k->in, ref, plain);
    for (int64_t i = 0; i < (int64_t)k->rows * k->out; i++) {
        double b = k->bias ? (double)bias[i % k->out] : 0;
        double add = k->residual ? (double)res[i] : 0;
        ref[i] = activate_reference(k->act, ref[i] + b) + add;
        plain[i] =
            round_to(to, (float)activate_reference(k->act, (double)plain[i] + b) + (float)add);
    }
    free(exact);
    free(rounded);
}

static void check_linear(struct rig *r, const struct linear_case *k, enum dtype t, bool tied)
{
    enum dtype at = act_of(r, t);
    enum dtype to = k->f32_out ? DTYPE_F32 : at;
    int64_t n = (int64_t)k->rows * k->out;
    float *x = rig_floats(r, (int64_t)k->rows * k->in, 1, at);
    float *w = rig_floats(r, (int64_t)k->out * k->in, 1, t);
    float *bias = rig_floats(r, k->out, 1, t);
    float *res = rig_floats(r, n, 4, to);
    struct mat mw = rig_weight(r, tied ? WEIGHT_EMBEDDING : WEIGHT_LINEAR, t, k->out, k->in, w);
    /* x and out are columns of wider matrices, as those of a fused projection. */
    struct mat mx = mat_cols(rig_mat(r, k->rows, k->in + 64, at, NULL), 32, k->in);
    struct mat out = mat_cols(rig_mat(r, k->rows, k->out + 32, to, NULL), 16, k->out);

    rig_upload(r, mx, x);
    struct epilogue ep = {.act = k->act};
    if (k->bias) {
        ep.bias = rig_weight(r, WEIGHT_VECTOR, t, 1, k->out, bias);
    }
    if (k->residual) {
        ep.residual = k->in_place ? out : rig_mat(r, k->rows, k->out, to, NULL);
        rig_upload(r, ep.residual, res);
    }
    rig_begin_plain(r, k->rows);
    r->b->ops->linear(r->b, out, mx, mw, &ep);
    float *got = rig_download(r, out);
    rig_end(r);
    float *plain = rig_alloc((size_t)n * sizeof(*plain));
    double *ref = rig_alloc((size_t)n * sizeof(*ref));
    linear_references(k, x, w, bias, res, operand_of(r, t), to, plain, ref);
    char what[96];
    snprintf(what, sizeof(what), "linear %d x %d x %d, %s", k->rows, k->in, k->out, dtype_name(t));
    assert_no_worse(what, got, plain, ref, n);
    free(ref);
    free(plain);
    free(got);
    free(res);
    free(bias);
    free(w);
    free(x);
}

static void linear_is_as_good_as_plain_for_every_row_count(void **state)
{
    (void)state;
    static const int32_t rows[] = {1,  2,  3,  4,  5,  6,  7,  8,   9,   11, 13,
                                   16, 17, 24, 31, 33, 48, 64, 100, 130, 257};
    static const int32_t shape[][2] = {{16, 1}, {24, 8}, {100, 37}, {576, 200}, {1032, 66}};
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(rows); i += rig_small() ? 6 : 1) {
        for (size_t s = 0; s < ARRAY_LEN(shape); s++) {
            for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
                struct linear_case k = {.rows = rows[i], .in = shape[s][0], .out = shape[s][1]};
                if (rows[i] <= 33 || s == 2 || s == 4) {
                    check_linear(&r, &k, weight_types[t], false);
                }
            }
        }
    }
    rig_close(&r);
}

static void linear_applies_its_epilogue(void **state)
{
    (void)state;
    static const struct linear_case cases[] = {
        {.rows = 1, .in = 72, .out = 50, .bias = true},
        {.rows = 4, .in = 64, .out = 33, .residual = true},
        {.rows = 1, .in = 64, .out = 96, .residual = true, .in_place = true},
        {.rows = 20, .in = 128, .out = 96, .residual = true, .in_place = true, .bias = true},
        {.rows = 70, .in = 2500, .out = 40, .residual = true, .in_place = true, .bias = true},
        {.rows = 5, .in = 40, .out = 70, .bias = true, .act = ACT_RELU},
        {.rows = 33, .in = 96, .out = 70, .bias = true, .act = ACT_GELU_TANH, .residual = true},
        {.rows = 2, .in = 40, .out = 64, .act = ACT_SILU},
        {.rows = 65, .in = 40, .out = 70, .act = ACT_GELU_ERF},
        {.rows = 3, .in = 64, .out = 500, .f32_out = true},
    };
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
            check_linear(&r, &cases[i], weight_types[t], cases[i].f32_out);
        }
    }
    rig_close(&r);
}

/* Sums so long and outputs so wide that both are computed in blocks. */
static void linear_blocks_large_shapes_right(void **state)
{
    (void)state;
    static const struct linear_case cases[] = {
        {.rows = 1, .in = 8200, .out = 130},
        {.rows = 16, .in = 8200, .out = 67},
        {.rows = 40, .in = 4100, .out = 300},
        {.rows = 300, .in = 520, .out = 514},
    };
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
            check_linear(&r, &cases[i], weight_types[t], false);
        }
    }
    rig_close(&r);
}

/* Shapes for which a GPU splits k between its multiprocessors: several slices per tile,
 * tiles at the edges. */
static void products_cut_between_multiprocessors_add_up(void **state)
{
    (void)state;
    if (strcmp(rig_device, "cpu") == 0) {
        skip();
    }
    static const struct linear_case cases[] = {
        {.rows = 1, .in = 4096, .out = 1000},
        {.rows = 7, .in = 14336, .out = 384, .bias = true},
        {.rows = 16, .in = 1024, .out = 18000, .bias = true, .act = ACT_RELU},
        {.rows = 25, .in = 4096, .out = 1026},
        {.rows = 9, .in = 4096, .out = 1280},
        {.rows = 64, .in = 64, .out = 17500},
        {.rows = 100, .in = 2048, .out = 2050, .bias = true, .act = ACT_SILU},
        {.rows = 128, .in = 4096, .out = 640},
    };
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        for (size_t t = 1; t < ARRAY_LEN(weight_types); t++) {
            check_linear(&r, &cases[i], weight_types[t], cases[i].f32_out);
        }
    }
    rig_close(&r);
}

/* out = act(x Wg^T + bias) * (x Wu^T + bias) of random operands: no worse than both
 * products rounded to the activations' type. */
static void check_gated(struct rig *r, const struct linear_case *k, enum dtype t)
{
    enum dtype at = act_of(r, t);
    int64_t n = (int64_t)k->rows * k->out;
    float *x = rig_floats(r, (int64_t)k->rows * k->in, 1, at);
    float *w = rig_floats(r, (int64_t)2 * k->out * k->in, 0.25f, t);
    float *bias = rig_floats(r, 2 * k->out, 1, t);
    struct mat mw = rig_weight(r, WEIGHT_LINEAR, t, 2 * k->out, k->in, w);
    struct mat mb =
        k->bias ? rig_weight(r, WEIGHT_VECTOR, t, 1, 2 * k->out, bias) : (struct mat){0};
    struct mat mx = rig_mat(r, k->rows, k->in, at, x);
    struct mat room = rig_mat(r, k->rows, 2 * k->out, at, NULL);
    struct mat out = rig_mat(r, k->rows, k->out, at, NULL);

    rig_begin_plain(r, k->rows);
    r->b->ops->linear_gated(r->b, out, room, mx, mw, mb, k->act);
    float *got = rig_download(r, out);
    rig_end(r);
    struct linear_case both = {.rows = k->rows, .in = k->in, .out = 2 * k->out, .bias = k->bias};
    float *plain2 = rig_alloc((size_t)n * 2 * sizeof(*plain2));
    double *ref2 = rig_alloc((size_t)n * 2 * sizeof(*ref2));
    linear_references(&both, x, w, bias, NULL, operand_of(r, t), at, plain2, ref2);
    float *plain = rig_alloc((size_t)n * sizeof(*plain));
    double *ref = rig_alloc((size_t)n * sizeof(*ref));
    for (int64_t i = 0; i < n; i++) {
        int64_t gate = i / k->out * 2 * k->out + i % k->out;
        ref[i] = activate_reference(k->act, ref2[gate]) * ref2[gate + k->out];
        plain[i] =
            round_to(at, (float)activate_reference(k->act, plain2[gate]) * plain2[gate + k->out]);
    }
    char what[96];
    snprintf(what, sizeof(what), "gated %d x %d x %d, %s", k->rows, k->in, k->out, dtype_name(t));
    assert_no_worse(what, got, plain, ref, n);
    free(ref);
    free(plain);
    free(ref2);
    free(plain2);
    free(got);
    free(bias);
    free(w);
    free(x);
}

static void gated_products_are_as_good_as_plain(void **state)
{
    (void)state;
    static const struct linear_case cases[] = {
        {.rows = 1, .in = 64, .out = 48, .act = ACT_SILU},
        {.rows = 5, .in = 72, .out = 33, .act = ACT_GELU_TANH, .bias = true},
        {.rows = 70, .in = 200, .out = 136, .act = ACT_SILU, .bias = true},
        {.rows = 200, .in = 328, .out = 264, .act = ACT_GELU_ERF},
        {.rows = 120, .in = 1032, .out = 72, .act = ACT_SILU},
        {.rows = 33, .in = 1088, .out = 200, .act = ACT_SILU, .bias = true},
    };
    struct rig r;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
            check_gated(&r, &cases[i], weight_types[t]);
        }
    }
    rig_close(&r);
}

/* Of so many rows and columns that a GPU has a kernel of its own for them, with tiles
 * that are not full and a depth that is no multiple of a stage. */
static void gated_products_of_many_rows(void **state)
{
    (void)state;
    struct linear_case k = {.rows = 510, .in = 72, .out = 4216};
    struct rig r;
    rig_open(&r);
    k.act = ACT_SILU;
    check_gated(&r, &k, DTYPE_BF16);
    k.act = ACT_GELU_TANH;
    check_gated(&r, &k, DTYPE_F16);
    /* one wave of tiles of 97 to 128 rows on devices of 120 to 144 multiprocessors */
    static const int32_t few[] = {97, 120, 128};
    for (size_t i = 0; i < ARRAY_LEN(few); i++) {
        k = (struct linear_case){.rows = few[i], .in = 320, .out = 120 * 112, .act = ACT_SILU};
        check_gated(&r, &k, DTYPE_BF16);
    }
    rig_close(&r);
}

/* A product that only the next operation reads: added to the residual stream, or
 * normed as it is. */
static void products_join_the_residual_stream(void **state)
{
    (void)state;
    enum { ROWS = 520, IN = 136, OUT = 264, N = ROWS * OUT };
    struct linear_case k = {.rows = ROWS, .in = IN, .out = OUT, .residual = true};
    struct rig r;
    rig_open(&r);
    for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
        enum dtype at = act_of(&r, weight_types[t]);
        float *a = rig_floats(&r, (int64_t)ROWS * IN, 1, at);
        float *w = rig_floats(&r, (int64_t)OUT * IN, 0.25f, weight_types[t]);
        float *x = rig_floats(&r, N, 3, at), *one = rig_floats(&r, OUT, 1, weight_types[t]);
        struct norm norm = {.kind = NORM_RMS, .eps = 1e-5f};
        norm.weight = rig_weight(&r, WEIGHT_VECTOR, weight_types[t], 1, OUT, one);
        struct mat mw = rig_weight(&r, WEIGHT_LINEAR, weight_types[t], OUT, IN, w);
        struct mat ma = rig_mat(&r, ROWS, IN, at, a), mx = rig_mat(&r, ROWS, OUT, at, x);
        struct mat y = rig_mat(&r, ROWS, OUT, at, NULL), h = rig_mat(&r, ROWS, OUT, at, NULL);
        struct mat alone = rig_mat(&r, ROWS, OUT, at, NULL);
        y.transient = true;
        rig_begin_plain(&r, ROWS);
        r.b->ops->linear(r.b, y, ma, mw, NULL);
        r.b->ops->norm(r.b, alone, y, &norm);
        r.b->ops->linear(r.b, y, ma, mw, NULL);
        r.b->ops->add_norm(r.b, h, mx, y, &norm, false);
        float *got[3] = {rig_download(&r, alone), rig_download(&r, mx), rig_download(&r, h)};
        rig_end(&r);
        float *plain = rig_alloc(N * sizeof(*plain));
        double *ref = rig_alloc(N * sizeof(*ref)), *normed = rig_alloc(N * sizeof(*normed));
        for (int i = 0; i < 2; i++) { /* the product, then the stream */
            k.residual = i == 1;
            linear_references(&k, a, w, NULL, x, operand_of(&r, weight_types[t]), at, plain, ref);
            if (i == 1) {
                assert_no_worse("stream", got[1], plain, ref, N);
            }
            norm_reference(normed, i == 1 ? got[1] : plain, one, NULL, ROWS, OUT, &norm);
            assert_nmse("norm", got[2 * i], normed, N, at);
        }
        free(normed), free(ref), free(plain);
        free(got[0]), free(got[1]), free(got[2]);
        free(one), free(x), free(w), free(a);
    }
    rig_close(&r);
}

/* A row's product has the same bits whatever other rows there are. */
static void linear_does_not_depend_on_the_batch(void **state)
{
    (void)state;
    enum { ROWS = 70, IN = 2600, OUT = 301 };
    static const int32_t sizes[] = {1, 2, 3, 4, 7, 16, 33};
    struct rig r;
    rig_open_deterministic(&r);
    for (size_t t = 0; t < ARRAY_LEN(weight_types); t++) {
        enum dtype at = act_of(&r, weight_types[t]);
        float *x = rig_floats(&r, ROWS * IN, 1, at);
        float *w = rig_floats(&r, OUT * IN, 1, weight_types[t]);
        struct mat mw = rig_weight(&r, WEIGHT_LINEAR, weight_types[t], OUT, IN, w);
        struct mat mx = rig_mat(&r, ROWS, IN, at, x);
        struct mat out = rig_mat(&r, ROWS, OUT, at, NULL);
        struct epilogue ep = {0};
        rig_begin_plain(&r, ROWS);
        r.b->ops->linear(r.b, out, mx, mw, &ep);
        float *all = rig_download(&r, out);
        for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
            int32_t n = sizes[i];
            int32_t first = rig_below(&r, ROWS - n);
            r.b->ops->linear(r.b, mat_rows(out, 0, n), mat_rows(mx, first, n), mw, &ep);
            float *some = rig_download(&r, mat_rows(out, 0, n));
            assert_memory_equal(some, all + (int64_t)first * OUT, (size_t)n * OUT * sizeof(*some));
            free(some);
        }
        rig_end(&r);
        free(all);
        free(w);
        free(x);
    }
    rig_close(&r);
}

/* ---- weights ---- */

static void weights_are_made_of_pieces(void **state)
{
    (void)state;
    enum { IN = 40 };
    struct rig r;
    struct err e = {0};
    rig_open(&r);
    uint16_t a[6 * IN], b[IN * 5]; /* the second is stored [in, out] */
    for (int i = 0; i < 6 * IN; i++) {
        a[i] = bf16_store(rig_uniform(&r));
    }
    for (int i = 0; i < 5 * IN; i++) {
        b[i] = f16_store(rig_uniform(&r));
    }
    struct weight_piece piece[2] = {
        {.data = a, .dtype = DTYPE_BF16, .rows = 6, .cols = IN, .stride = IN},
        {.data = b, .dtype = DTYPE_F16, .rows = IN, .cols = 5, .stride = 5, .transposed = true}};
    struct weight_desc d = {.name = "test",
                            .kind = WEIGHT_TABLE,
                            .dtype = DTYPE_F32,
                            .rows = 11,
                            .cols = IN,
                            .piece = piece,
                            .n_pieces = 2};
    struct mat m;
    assert_int_equal(r.b->ops->weight(r.b, &d, &m, &e), 0);
    float *got = rig_download(&r, m);
    for (int i = 0; i < 11 * IN; i++) {
        float want = i < 6 * IN ? bf16_load(a[i]) : f16_load(b[i % IN * 5 + (i / IN - 6)]);
        assert_true(got[i] == want);
    }
    free(got);
    d.rows = 12;
    assert_int_equal(r.b->ops->weight(r.b, &d, &m, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "test"));
    rig_close(&r);
}

static void dummies_are_small_and_differ(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    rig_open(&r);
    float *v[2];
    for (int i = 0; i < 2; i++) {
        struct weight_desc d = {
            .name = "dummy", .kind = WEIGHT_TABLE, .dtype = DTYPE_F32, .rows = 64, .cols = 100};
        struct mat m;
        assert_int_equal(r.b->ops->weight(r.b, &d, &m, &e), 0);
        v[i] = rig_download(&r, m);
    }
    double sum = 0;
    double square = 0;
    for (int i = 0; i < 6400; i++) {
        assert_true(fabsf(v[0][i]) <= 1e-3f);
        sum += v[0][i];
        square += (double)v[0][i] * v[0][i];
    }
    assert_true(fabs(sum / 6400) < 5e-5);
    assert_true(fabs(square / 6400 / (1e-6 / 3) - 1) < 0.1);
    assert_true(memcmp(v[0], v[1], 6400 * sizeof(float)) != 0);
    free(v[0]);
    free(v[1]);
    rig_close(&r);
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_half_survives_the_way_through_float32),
        cmocka_unit_test(conversions_round_to_nearest_even),
        cmocka_unit_test(embedding_is_exact),
        cmocka_unit_test(positions_are_added_with_their_offset),
        cmocka_unit_test(norms_follow_float64),
        cmocka_unit_test(add_is_exact),
        cmocka_unit_test(gated_activations_follow_float64),
        cmocka_unit_test(soft_caps_follow_float64),
        cmocka_unit_test(xielu_follows_float64),
        cmocka_unit_test(rows_are_scaled_by_their_greatest_score),
        cmocka_unit_test(norms_by_sums_of_parts_follow_float64),
        cmocka_unit_test(activations_are_finite_far_out),
        cmocka_unit_test(gather_is_exact),
        cmocka_unit_test(linear_is_as_good_as_plain_for_every_row_count),
        cmocka_unit_test(linear_applies_its_epilogue),
        cmocka_unit_test(linear_blocks_large_shapes_right),
        cmocka_unit_test(gated_products_are_as_good_as_plain),
        cmocka_unit_test(gated_products_of_many_rows),
        cmocka_unit_test(products_join_the_residual_stream),
        cmocka_unit_test(linear_does_not_depend_on_the_batch),
        cmocka_unit_test(weights_are_made_of_pieces),
        cmocka_unit_test(dummies_are_small_and_differ),
        cmocka_unit_test(products_cut_between_multiprocessors_add_up),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
