/* The operations of one layer from one attention's output to the next attention, in
 * decode steps that repeat: a device may record the second such step and replay it
 * later, as one launch or many. Every result of every step is compared with float64,
 * computed from the operands that the device itself made.
 *
 *     build/tests/unit/kernels/cuda/test_fused_decode [--device cpu|cuda] [--share I/N]
 */
#include "tests/unit/quantised.h"

enum {
    MAX_ROWS = 64,
    STEPS = 4,
    PAST = 70,
    PAST_ROWS = RIG_TOKENS / PAST, /* whose past fits a step */
    MORE = 4,
    POSITIONS = 512,
    BLOCK = 16,
    SEQ_BLOCKS = 5
};

/* The cache's type; float32 stands for the activations'. */
static enum dtype cache_type = DTYPE_F32;

struct shape {
    int32_t hidden, inner, n_heads, n_kv_heads, head_dim;
    enum norm_kind norm;
    enum activation act;
    bool gated, biased, roped;
    bool head_norms;    /* q and k are normed per head, and qkv stands alone behind a sum */
    bool query_factors; /* queries have factors by position */
};

static const struct shape shapes[] = {
    {256, 512, 3, 1, 64, NORM_RMS, ACT_SILU, true, false, .roped = true},
    /* a deep product, not a multiple of a stage */
    {192, 16960, 3, 1, 64, NORM_RMS, ACT_GELU_TANH, true, true, .roped = true},
    {1024, 2112, 4, 4, 128, NORM_LAYER, ACT_RELU, false, true, .roped = false},
    /* widths that no fast kernel supports */
    {80, 112, 2, 1, 40, NORM_RMS, ACT_SILU, true, false, .roped = true},
    {512, 768, 8, 2, 128, NORM_RMS, ACT_SILU, true, false, .roped = true, .query_factors = true},
    {4672, 128, 1, 1, 64, NORM_RMS, ACT_SILU, true, false, .roped = true}, /* wide norms */
    {4672, 128, 1, 1, 64, NORM_LAYER, ACT_RELU, false, true, .roped = false},
    /* one wave of tiles on a large device, with more rows than one launch takes */
    {2048, 6144, 16, 4, 128, NORM_RMS, ACT_SILU, true, false, .roped = true},
    /* quantised weights: whole stages, cut ones, many slices */
    {1024, 2048, 8, 2, 128, NORM_RMS, ACT_SILU, true, true, .roped = true},
    {512, 14848, 4, 2, 128, NORM_RMS, ACT_SILU, true, false, .roped = true},
    {1536, 4608, 12, 4, 128, NORM_LAYER, ACT_GELU_TANH, false, true, .roped = true},
    /* one wave of tiles of codes */
    {2048, 6144, 16, 8, 128, NORM_RMS, ACT_SILU, true, false, .roped = true},
    /* tiles of every width, which fill a large device; more of them, not so deep */
    {3072, 11264, 16, 4, 128, NORM_RMS, ACT_SILU, true, false, .roped = true},
    {512, 8704, 8, 2, 128, NORM_RMS, ACT_GELU_TANH, true, false, .roped = true},
    /* normed heads: a depth in groups of 32, another one, short heads */
    {2048, 256, 8, 2, 128, NORM_RMS, ACT_SILU, true, false, .roped = true, .head_norms = true},
    {1136, 256, 4, 1, 128, NORM_RMS, ACT_SILU, true, false, .roped = true, .head_norms = true},
    {512, 256, 6, 3, 64, NORM_RMS, ACT_SILU, true, false, .roped = true, .head_norms = true},
    /* a rank's part of a layer: narrow tiles, a gate of fewer blocks */
    {2048, 3584, 8, 2, 128, NORM_RMS, ACT_SILU, true, false, .roped = true},
    /* waves whose last tile is cut */
    {2048, 512, 132, 22, 64, NORM_RMS, ACT_SILU, true, false, .roped = true},
    {2048, 9728, 8, 2, 128, NORM_RMS, ACT_GELU_TANH, true, false, .roped = true},
    {2048, 512, 132, 22, 64, NORM_RMS, ACT_RELU, false, true, .roped = true},
};

static int32_t heads_of(const struct shape *k)
{
    return k->n_heads * k->head_dim;
}
static int32_t qkv_of(const struct shape *k)
{
    return (k->n_heads + 2 * k->n_kv_heads) * k->head_dim;
}

struct weight {
    float *host; /* [rows, cols] */
    struct mat mat;
};

/* One buffer per result, so that all can be checked after the step. `more`: further
 * products of h2. */
struct scene {
    struct rig *r;
    const struct shape *k;
    enum dtype t; /* of weights */
    int32_t rows;
    const struct quant_case *quant; /* of the products' weights; NULL: floats */
    bool transient;                 /* what lies between two products need not be stored */
    struct weight o, up, down, qkv, o_bias, up_bias, down_bias, qkv_bias;
    struct weight norm1, norm2, shift1, shift2, q_norm, k_norm;
    struct mat attn, x, y1, h1, wide, act, y2, h2, out, seen, y3, more[MORE];
    struct rope rope;
    float *cos_sin; /* [POSITIONS, table_cols] */
    struct attention attention;
    int32_t step;
    float *history[STEPS]; /* out of every step */
    float *past;           /* likewise, of PAST tokens per row before the first step */
};

static struct weight weight_of(struct scene *s, int32_t rows, int32_t cols, float range)
{
    float *v = rig_floats(s->r, (int64_t)rows * cols, range, s->t);

    if (s->quant && rows > 1) {
        return (struct weight){v, rig_quantised(s->r, s->quant, rows, cols, range, 1, v)};
    }
    return (struct weight){
        v, rig_weight(s->r, rows == 1 ? WEIGHT_VECTOR : WEIGHT_LINEAR, s->t, rows, cols, v)};
}

static int32_t table_cols(const struct shape *k)
{
    return k->query_factors ? k->head_dim + 4 : k->head_dim;
}

static void make_table(struct scene *s)
{
    const struct shape *k = s->k;
    int32_t half = k->head_dim / 2, cols = table_cols(k);

    s->cos_sin = rig_alloc((size_t)POSITIONS * (size_t)cols * sizeof(float));
    for (int32_t i = 0; i < POSITIONS * half; i++) {
        double angle = i / half * pow(100, -(double)(i % half) / half);
        s->cos_sin[i / half * cols + i % half] = (float)cos(angle);
        s->cos_sin[i / half * cols + half + i % half] = (float)sin(angle);
    }
    for (int32_t p = 0; p < POSITIONS && k->query_factors; p++) {
        s->cos_sin[p * cols + k->head_dim] = 1 + 0.25f * (float)(p / 16);
    }
    s->rope = (struct rope){.rot_dim = k->head_dim, .query_factors = k->query_factors};
    if (k->roped) {
        s->rope.cos_sin = rig_weight(s->r, WEIGHT_TABLE, DTYPE_F32, POSITIONS, cols, s->cos_sin);
    }
}

static void make_attention(struct scene *s)
{
    const struct shape *k = s->k;
    struct err e = {0};
    struct kv_layout kv;
    enum dtype at = act_of(s->r, s->t);

    kv_layout_init(&kv, BLOCK, 2, k->n_kv_heads, k->head_dim, cache_type ? cache_type : at);
    assert_int_equal(s->r->b->ops->kv_create(s->r->b, &kv, MAX_ROWS * SEQ_BLOCKS + 1, 0, &e), 0);
    s->attention = (struct attention){.layer = 1,
                                      .n_heads = k->n_heads,
                                      .n_kv_heads = k->n_kv_heads,
                                      .head_dim = k->head_dim,
                                      .scale = 1.0f / sqrtf((float)k->head_dim),
                                      .k_scale = cache_type == DTYPE_F8 ? 0.5f : 0,
                                      .v_scale = cache_type == DTYPE_F8 ? 0.03125f : 0};
    make_table(s);
}

static void scene_make(struct scene *s)
{
    const struct shape *k = s->k;
    int32_t wide = k->gated ? 2 * k->inner : k->inner;
    enum dtype at = act_of(s->r, s->t);
    struct {
        struct weight *w;
        int32_t rows, cols;
    } weights[] = {{&s->o, k->hidden, heads_of(k)}, {&s->up, wide, k->hidden},
                   {&s->down, k->hidden, k->inner}, {&s->qkv, qkv_of(k), k->hidden},
                   {&s->o_bias, 1, k->hidden},      {&s->up_bias, 1, wide},
                   {&s->qkv_bias, 1, qkv_of(k)},    {&s->down_bias, 1, k->hidden},
                   {&s->norm1, 1, k->hidden},       {&s->norm2, 1, k->hidden},
                   {&s->shift1, 1, k->hidden},      {&s->shift2, 1, k->hidden},
                   {&s->q_norm, 1, k->head_dim},    {&s->k_norm, 1, k->head_dim}};

    for (size_t i = 0; i < ARRAY_LEN(weights); i++) {
        *weights[i].w =
            weight_of(s, weights[i].rows, weights[i].cols, weights[i].rows == 1 ? 1.0f : 0.1f);
    }
    struct {
        struct mat *m;
        int32_t cols;
    } mats[] = {{&s->attn, heads_of(k)}, {&s->x, k->hidden},  {&s->y1, k->hidden},
                {&s->h1, k->hidden},     {&s->wide, wide},    {&s->act, k->inner},
                {&s->y2, k->hidden},     {&s->h2, k->hidden}, {&s->out, qkv_of(k)},
                {&s->seen, heads_of(k)}, {&s->y3, k->hidden}};
    for (size_t i = 0; i < ARRAY_LEN(mats); i++) {
        *mats[i].m = rig_mat(s->r, s->rows, mats[i].cols, at, NULL);
    }
    make_attention(s);
    if (k->head_norms) {
        s->rope.q_norm = (struct norm){.kind = NORM_RMS, .weight = s->q_norm.mat, .eps = 1e-5f};
        s->rope.k_norm = (struct norm){.kind = NORM_RMS, .weight = s->k_norm.mat, .eps = 1e-5f};
    }
    s->y1.transient = s->h1.transient = s->y2.transient = s->h2.transient = s->transient;
    for (int i = 0; i < MORE; i++) {
        s->more[i] = rig_mat(s->r, s->rows, qkv_of(k), at, NULL);
    }
}

static void scene_release(struct scene *s)
{
    struct weight *w[] = {&s->o,       &s->up,       &s->down,      &s->qkv,   &s->o_bias,
                          &s->up_bias, &s->qkv_bias, &s->down_bias, &s->norm1, &s->norm2,
                          &s->shift1,  &s->shift2,   &s->q_norm,    &s->k_norm};

    for (size_t i = 0; i < ARRAY_LEN(w); i++) {
        free(w[i]->host);
    }
    for (int i = 0; i < STEPS; i++) {
        free(s->history[i]);
    }
    free(s->cos_sin);
    free(s->past);
}

static struct norm norm_of(const struct scene *s, const struct weight *w,
                           const struct weight *shift)
{
    struct norm n = {.kind = s->k->norm, .weight = w->mat, .eps = 1e-5f};

    if (s->k->norm == NORM_LAYER) {
        n.bias = shift->mat;
    }
    return n;
}

static struct epilogue epilogue_of(const struct scene *s, const struct weight *bias)
{
    return (struct epilogue){.bias = s->k->biased ? bias->mat : (struct mat){0}};
}

static void call_operations(struct scene *s)
{
    struct backend *b = s->r->b;
    const struct backend_ops *ops = b->ops;
    struct norm n1 = norm_of(s, &s->norm1, &s->shift1), n2 = norm_of(s, &s->norm2, &s->shift2);
    struct epilogue o = epilogue_of(s, &s->o_bias), up = epilogue_of(s, &s->up_bias);
    struct epilogue down = epilogue_of(s, &s->down_bias), qkv = epilogue_of(s, &s->qkv_bias);

    up.act = s->k->gated ? ACT_NONE : s->k->act;
    ops->linear(b, s->y1, s->attn, s->o.mat, &o);
    ops->add_norm(b, s->h1, s->x, s->y1, &n1, false);
    if (s->k->gated) {
        ops->linear_gated(b, s->act, s->wide, s->h1, s->up.mat, up.bias, s->k->act);
    } else {
        ops->linear(b, s->wide, s->h1, s->up.mat, &up);
    }
    ops->linear(b, s->y2, s->k->gated ? s->act : s->wide, s->down.mat, &down);
    if (s->k->head_norms) {
        ops->add(b, s->x, s->y2, false);
        ops->norm(b, s->h2, s->x, &n2);
    } else {
        ops->add_norm(b, s->h2, s->x, s->y2, &n2, false);
    }
    ops->linear(b, s->out, s->h2, s->qkv.mat, &qkv);
    ops->rope_kv(b, s->out, &s->rope, &s->attention);
    ops->attention(b, s->seen, s->out, &s->attention);
    ops->linear(b, s->y3, s->seen, s->o.mat, &o);     /* of the layer after */
    for (int i = 0; i < MORE && !s->transient; i++) { /* out + h2 W, through a residual */
        struct epilogue ep = {.residual = i == 0 ? s->out : s->more[i - 1]};
        ops->linear(b, s->more[i], s->h2, s->qkv.mat, &ep);
    }
}

/* The position that rotates a row's token. It differs from the cache position, so that
 * it is unique per row. */
static int32_t position_of(const struct scene *s, int32_t row)
{
    return s->step + 7 * row;
}

/* Cache slot of a row's token t. */
static int32_t slot_of(int32_t row, int32_t t)
{
    return (1 + row * SEQ_BLOCKS + t / BLOCK) * BLOCK + t % BLOCK;
}

/* Sequence i has the blocks from 1 + i * SEQ_BLOCKS on; the first PAST tokens of
 * sequences [first, first + rows) are made up, written and kept in s->past. */
static void write_past_of(struct scene *s, int32_t first, int32_t rows)
{
    int32_t n = rows * PAST, zero[RIG_TOKENS] = {0}, minus[RIG_TOKENS], slot[RIG_TOKENS],
            at[RIG_TOKENS];
    int32_t q_start[PAST_ROWS + 1] = {0}, kv_len[PAST_ROWS], row[PAST_ROWS],
                                block[PAST_ROWS * SEQ_BLOCKS];
    struct table_update update[PAST_ROWS];

    for (int32_t i = 0; i < n; i++) {
        minus[i] = -1;
        at[i] = i % PAST;
        slot[i] = slot_of(first + i / PAST, i % PAST);
    }
    for (int32_t i = 0; i < rows; i++) {
        row[i] = first + i;
        kv_len[i] = PAST;
        q_start[i + 1] = (i + 1) * PAST;
        update[i] =
            (struct table_update){.row = row[i], .count = SEQ_BLOCKS, .first = i * SEQ_BLOCKS};
    }
    for (int32_t i = 0; i < rows * SEQ_BLOCKS; i++) {
        block[i] = 1 + first * SEQ_BLOCKS + i;
    }
    struct batch b = {.n_table_update = rows,
                      .table_update = update,
                      .n_table_block = rows * SEQ_BLOCKS,
                      .table_block = block,
                      .n_tokens = n,
                      .token = zero,
                      .token_src = minus,
                      .position = at,
                      .slot = slot,
                      .n_seqs = rows,
                      .q_start = q_start,
                      .kv_len = kv_len,
                      .row = row,
                      .lcp_blocks = zero};
    enum dtype t = act_of(s->r, s->t);
    float *v = rig_floats(s->r, (int64_t)n * qkv_of(s->k), 2, t);
    struct mat m = rig_mat(s->r, n, qkv_of(s->k), t, v);
    rig_begin(s->r, &b);
    s->r->b->ops->rope_kv(s->r->b, m, &s->rope, &s->attention);
    rig_end(s->r);
    float *past = rig_download(s->r, m);
    memcpy(s->past + (int64_t)first * PAST * qkv_of(s->k), past,
           (size_t)n * (size_t)qkv_of(s->k) * sizeof(*past));
    free(past);
    free(v);
}

static void write_past(struct scene *s)
{
    s->past = rig_alloc((size_t)s->rows * PAST * (size_t)qkv_of(s->k) * sizeof(*s->past));
    for (int32_t i = 0; i < s->rows; i += PAST_ROWS) {
        write_past_of(s, i, MIN(PAST_ROWS, s->rows - i));
    }
}

/* A decode step with one token and one sample per sequence, which is the kind that is
 * recorded; nothing is sampled here. */
static void run_step(struct scene *s)
{
    static const struct sample_row plain = {
        .kind = SAMPLE_TOKEN, .repetition_penalty = 1, .mask_first = -1};
    int32_t zero[MAX_ROWS] = {0}, minus[MAX_ROWS], up_to[MAX_ROWS + 1], position[MAX_ROWS],
            slot[MAX_ROWS];
    int32_t kv_len[MAX_ROWS];
    struct sample_row sample[MAX_ROWS];

    for (int32_t i = 0; i <= MAX_ROWS; i++) {
        up_to[i] = i;
    }
    for (int32_t i = 0; i < MAX_ROWS; i++) {
        minus[i] = -1;
        position[i] = position_of(s, i);
        slot[i] = slot_of(i, PAST + s->step);
        kv_len[i] = PAST + s->step + 1;
        sample[i] = plain;
        sample[i].logits_row = i;
    }
    struct batch b = {.n_tokens = s->rows,
                      .token = zero,
                      .token_src = minus,
                      .position = position,
                      .slot = slot,
                      .n_seqs = s->rows,
                      .n_decode = s->rows,
                      .q_start = up_to,
                      .kv_len = kv_len,
                      .row = up_to,
                      .lcp_blocks = zero,
                      .n_logits = s->rows,
                      .logits_token = up_to,
                      .n_samples = s->rows,
                      .sample = sample};
    rig_begin(s->r, &b);
    if (!s->r->b->ops->replay || !s->r->b->ops->replay(s->r->b, &b)) {
        call_operations(s);
    }
    rig_end(s->r);
}

/* ---- references ---- */

static double activated(double x, enum activation act)
{
    switch (act) {
    case ACT_RELU:
        return x > 0 ? x : 0;
    case ACT_GELU_TANH:
        return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    case ACT_SILU:
        return x / (1 + exp(-x));
    default:
        return x;
    }
}

/* Whether products have rows of e4m3 codes in place of x. */
static bool quantises_x(const struct scene *s)
{
    return s->quant && s->quant->act != ACT_AS_THEY_ARE &&
           strstr(s->r->b->ops->supports(s->r->b, weight_format_of(s->quant->format)).kernel,
                  "e4m3") != NULL;
}

static void check(const struct scene *s, const char *what, const float *got, const double *want,
                  int32_t cols)
{
    char text[64];

    snprintf(text, sizeof(text), "%s of %d rows, hidden %d", what, s->rows, s->k->hidden);
    enum dtype t = act_of(s->r, s->t);
    double error = nmse(got, want, (int64_t)s->rows * cols);
    double limit = nmse_limit(t) * (t == DTYPE_F32 ? 16 : 4); /* some sums have 17,000 terms */
    /* A last bit of a row's greatest value moves the steps of e4m3 under all others. */
    limit = quantises_x(s) ? 40 * limit : limit;
    /* A CPU rounds groups of activations to int8. */
    limit = s->quant && strcmp(s->r->b->name, "cpu") == 0 ? MAX(limit, 20 * nmse_limit(DTYPE_BF16))
                                                          : limit;
    /* An input that is computed here may round to the neighbour of the device's. */
    limit = s->transient ? MAX(limit, nmse_limit(operand_of(s->r, s->t)) / 8) : limit;
    /* A gate multiplies two sums, and has the errors of both. */
    limit *= s->k->gated && strcmp(what, "gate") == 0 ? 2 : 1;
    if (!(error <= limit)) {
        fail_msg("%s: NMSE %.3g, allowed %.3g", text, error, limit);
    }
}

/* ret [rows, n] = x w^T + bias; x [rows, k]. */
static void products(const struct scene *s, double *ret, const float *x, const float *w,
                     const float *bias, int32_t n, int32_t k)
{
    float *rounded = rig_alloc((size_t)k * sizeof(*rounded));
    double *row = rig_alloc((size_t)k * sizeof(*row));
    enum dtype operand = operand_of(s->r, s->t);

    for (int32_t i = 0; i < s->rows * n; i++) {
        const float *weight = w + (int64_t)(i % n) * k;
        for (int32_t j = 0; i % n == 0 && j < k; j++) {
            row[j] = rounded[j] = round_to(operand, x[(int64_t)(i / n) * k + j]);
        }
        if (i % n == 0 && quantises_x(s)) {
            quant_row(rounded, k, row);
        }
        ret[i] = (bias ? bias[i % n] : 0) + dot_of(row, weight, k);
    }
    free(rounded);
    free(row);
}

/* got [rows, n] against act(x w^T + bias) + residual. */
static void check_linear(const struct scene *s, const char *what, const float *got, const float *x,
                         const float *w, const float *bias, enum activation act,
                         const float *residual, int32_t n, int32_t k)
{
    double *want = rig_alloc((size_t)s->rows * (size_t)n * sizeof(*want));

    products(s, want, x, w, bias, n, k);
    for (int32_t i = 0; i < s->rows * n; i++) {
        want[i] = activated(want[i], act) + (residual ? residual[i] : 0);
    }
    check(s, what, got, want, n);
    free(want);
}

/* The norms of q and k of all rows, rounded as a device stores them. */
static void norm_heads(const struct scene *s, double *qkv)
{
    const struct shape *k = s->k;
    int32_t n = qkv_of(k), dim = k->head_dim, heads = k->n_heads + k->n_kv_heads;

    for (int32_t i = 0; i < s->rows * heads; i++) {
        double *x = qkv + (int64_t)(i / heads) * n + i % heads * dim, squares = 0;
        const float *weight = i % heads < k->n_heads ? s->q_norm.host : s->k_norm.host;
        for (int32_t d = 0; d < dim; d++) {
            squares += x[d] * x[d] / dim;
        }
        for (int32_t d = 0; d < dim; d++) {
            double y = x[d] / sqrt(squares + 1e-5) * weight[d];
            x[d] = round_to(act_of(s->r, s->t), (float)y);
        }
    }
}

/* The product as it is stored, then normed and rotated per q and k head. */
static void check_qkv(const struct scene *s, const float *got, const float *h)
{
    const struct shape *k = s->k;
    int32_t n = qkv_of(k), dim = k->head_dim, half = dim / 2,
            roped = (k->n_heads + k->n_kv_heads) * dim;
    double *want = rig_alloc((size_t)s->rows * (size_t)n * sizeof(*want));

    products(s, want, h, s->qkv.host, k->biased ? s->qkv_bias.host : NULL, n, k->hidden);
    for (int32_t i = 0; i < s->rows * n; i++) {
        want[i] = round_to(act_of(s->r, s->t), (float)want[i]);
    }
    if (k->head_norms) {
        norm_heads(s, want);
    }
    for (int32_t i = 0; i < s->rows * n; i++) {
        const float *turn = s->cos_sin + (int64_t)position_of(s, i / n) * table_cols(k);
        int32_t at = i % n % dim;
        if (k->roped && i % n < roped && at < half) {
            double factor = k->query_factors && i % n < k->n_heads * dim ? turn[dim] : 1;
            double x = want[i] * factor, y = want[i + half] * factor;
            want[i] = x * turn[at] - y * turn[half + at];
            want[i + half] = y * turn[at] + x * turn[half + at];
        }
    }
    check(s, "qkv", got, want, n);
    free(want);
}

/* qkv of a row's token t. */
static const float *token_of(const struct scene *s, int32_t row, int32_t t)
{
    const float *from = t < PAST ? s->past : s->history[t - PAST];

    return from + (t < PAST ? row * PAST + t : row) * (int64_t)qkv_of(s->k);
}

/* A key (kv 0) or value (kv 1) as the cache holds it. */
static void cached(const struct scene *s, const float *x, int32_t kv, float *ret)
{
    const struct attention *a = &s->attention;

    rig_cached_head(x, s->k->head_dim, cache_type ? cache_type : act_of(s->r, s->t),
                    kv == 0 ? attention_k_scale(a) : attention_v_scale(a), ret);
}

/* Every head over the keys and values of all tokens so far. */
static void check_attention(const struct scene *s, const float *got)
{
    const struct shape *k = s->k;
    int32_t heads = heads_of(k), dim = k->head_dim, group = k->n_heads / k->n_kv_heads;
    double *want = rig_alloc((size_t)s->rows * (size_t)heads * sizeof(*want));

    for (int32_t i = 0; i < s->rows * k->n_heads; i++) {
        int32_t row = i / k->n_heads, head = i % k->n_heads;
        const float *q = token_of(s, row, PAST + s->step) + head * dim;
        double *to = want + row * heads + head * dim, sum = 0;
        for (int32_t t = 0; t <= PAST + s->step; t++) {
            const float *from = token_of(s, row, t) + (k->n_heads + head / group) * dim;
            float key[LIMIT_HEAD_DIM], value[LIMIT_HEAD_DIM];
            cached(s, from, 0, key);
            cached(s, from + k->n_kv_heads * dim, 1, value);
            double score = 0;
            for (int32_t d = 0; d < dim; d++) {
                score += (double)q[d] * key[d];
            }
            double weight = exp(score * s->attention.scale);
            sum += weight;
            for (int32_t d = 0; d < dim; d++) {
                to[d] += weight * value[d];
            }
        }
        for (int32_t d = 0; d < dim; d++) {
            to[d] /= sum;
        }
    }
    check(s, "attention", got, want, heads);
    free(want);
}

static void check_norm(const struct scene *s, const char *what, const float *got, const float *x,
                       const float *weight, const float *shift)
{
    int32_t n = s->k->hidden;
    bool layer = s->k->norm == NORM_LAYER;
    double *want = rig_alloc((size_t)s->rows * (size_t)n * sizeof(*want));

    for (int32_t r = 0; r < s->rows; r++) {
        double mean = 0, squares = 0;
        for (int32_t i = 0; i < n; i++) {
            mean += layer ? x[r * n + i] / (double)n : 0;
        }
        for (int32_t i = 0; i < n; i++) {
            squares += (x[r * n + i] - mean) * (x[r * n + i] - mean) / n;
        }
        for (int32_t i = 0; i < n; i++) {
            want[r * n + i] =
                (x[r * n + i] - mean) / sqrt(squares + 1e-5) * weight[i] + (layer ? shift[i] : 0);
        }
    }
    check(s, what, got, want, n);
    free(want);
}

static void check_gated(const struct scene *s, const float *got, const float *h, const float *bias)
{
    int32_t n = s->k->inner;
    double *want = rig_alloc((size_t)s->rows * (size_t)n * sizeof(*want));
    double *both = rig_alloc((size_t)s->rows * (size_t)n * 2 * sizeof(*both));

    products(s, both, h, s->up.host, bias, 2 * n, s->k->hidden);
    for (int32_t i = 0; i < s->rows * n; i++) {
        const double *row = both + (int64_t)(i / n) * 2 * n;
        want[i] = activated(row[i % n], s->k->act) * row[n + i % n];
    }
    check(s, "gate", got, want, n);
    free(both);
    free(want);
}

/* x += y as the device rounds it, to the bit. */
static void add_rounded(const struct scene *s, float *x, const float *y)
{
    for (int32_t i = 0; i < s->rows * s->k->hidden; i++) {
        x[i] = round_to(act_of(s->r, s->t), x[i] + y[i]);
    }
}

/* Checks what the device holds after a step that began with `attn` and `x`; x becomes
 * the expected final value. */
static void check_results(struct scene *s, const float *attn, float *x)
{
    const struct shape *k = s->k;
    struct rig *r = s->r;
    float *y1 = rig_download(r, s->y1), *h1 = rig_download(r, s->h1),
          *wide = rig_download(r, s->wide);
    float *act = k->gated ? rig_download(r, s->act) : NULL, *y2 = rig_download(r, s->y2),
          *h2 = rig_download(r, s->h2);
    float *out = rig_download(r, s->out), *x2 = rig_download(r, s->x);

    check_linear(s, "o", y1, attn, s->o.host, k->biased ? s->o_bias.host : NULL, ACT_NONE, NULL,
                 k->hidden, heads_of(k));
    add_rounded(s, x, y1);
    check_norm(s, "norm 1", h1, x, s->norm1.host, s->shift1.host);
    if (k->gated) {
        check_gated(s, act, h1, k->biased ? s->up_bias.host : NULL);
    } else {
        check_linear(s, "up", wide, h1, s->up.host, k->biased ? s->up_bias.host : NULL, k->act,
                     NULL, k->inner, k->hidden);
    }
    check_linear(s, "down", y2, k->gated ? act : wide, s->down.host,
                 k->biased ? s->down_bias.host : NULL, ACT_NONE, NULL, k->hidden, k->inner);
    add_rounded(s, x, y2);
    assert_memory_equal(x2, x, (size_t)s->rows * (size_t)k->hidden * sizeof(*x));
    check_norm(s, "norm 2", h2, x, s->norm2.host, s->shift2.host);
    float *seen = rig_download(r, s->seen);
    check_qkv(s, out, h2);
    s->history[s->step] = rig_download(r, s->out);
    check_attention(s, seen);
    float *y3 = rig_download(r, s->y3);
    check_linear(s, "next o", y3, seen, s->o.host, k->biased ? s->o_bias.host : NULL, ACT_NONE,
                 NULL, k->hidden, heads_of(k));
    for (int i = 0; i < MORE; i++) {
        float *more = rig_download(r, s->more[i]);
        check_linear(s, "more", more, h2, s->qkv.host, NULL, ACT_NONE, out, qkv_of(k), k->hidden);
        free(out);
        out = more;
    }
    float *all[] = {y1, h1, wide, act, y2, h2, out, x2, seen, y3};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        free(all[i]);
    }
}

/* x += a w^T + bias and norm(x), both rounded where a device stores them at the
 * latest. */
static float *next_stream(const struct scene *s, float *x, const float *a, const struct weight *w,
                          const float *bias, const struct weight *norm, int32_t k)
{
    int32_t n = s->k->hidden;
    double *y = rig_alloc((size_t)s->rows * (size_t)n * sizeof(*y));
    float *h = rig_alloc((size_t)s->rows * (size_t)n * sizeof(*h));

    products(s, y, a, w->host, bias, n, k);
    for (int32_t r = 0; r < s->rows; r++) {
        double squares = 0;
        for (int32_t i = r * n; i < (r + 1) * n; i++) {
            x[i] = round_to(act_of(s->r, s->t), (float)(x[i] + y[i]));
            squares += (double)x[i] * x[i] / n;
        }
        for (int32_t i = r * n; i < (r + 1) * n; i++) {
            h[i] = (float)(x[i] / sqrt(squares + 1e-5) * norm->host[i % n]);
        }
    }
    free(y);
    return h;
}

/* As check_results, of what is stored in any case. */
static void check_stored(struct scene *s, const float *attn, float *x)
{
    const struct shape *k = s->k;
    struct rig *r = s->r;
    float *act = rig_download(r, k->gated ? s->act : s->wide), *x2 = rig_download(r, s->x);
    float *out = rig_download(r, s->out), *seen = rig_download(r, s->seen);
    const float *up_bias = k->biased ? s->up_bias.host : NULL;
    float *h1 =
        next_stream(s, x, attn, &s->o, k->biased ? s->o_bias.host : NULL, &s->norm1, heads_of(k));
    double *want = rig_alloc((size_t)s->rows * (size_t)k->hidden * sizeof(*want));

    if (k->gated) {
        check_gated(s, act, h1, up_bias);
    } else {
        check_linear(s, "up", act, h1, s->up.host, up_bias, k->act, NULL, k->inner, k->hidden);
    }
    float *h2 =
        next_stream(s, x, act, &s->down, k->biased ? s->down_bias.host : NULL, &s->norm2, k->inner);
    for (int32_t i = 0; i < s->rows * k->hidden; i++) {
        want[i] = x[i];
    }
    check(s, "residual stream", x2, want, k->hidden);
    check_qkv(s, out, h2);
    s->history[s->step] = rig_download(r, s->out);
    check_attention(s, seen);
    float *all[] = {act, x2, out, seen, h1, h2};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        free(all[i]);
    }
    free(want);
}

static void check_shape(struct rig *r, const struct shape *k, const struct quant_case *quant,
                        enum dtype t, int32_t rows, bool transient)
{
    struct scene s = {.r = r, .k = k, .t = t, .rows = rows, .quant = quant, .transient = transient};

    scene_make(&s);
    write_past(&s);
    for (; s.step < STEPS; s.step++) {
        float *attn = rig_floats(r, (int64_t)rows * heads_of(k), 1, act_of(r, t));
        float *x = rig_floats(r, (int64_t)rows * k->hidden, 2, act_of(r, t));
        rig_upload(r, s.attn, attn);
        rig_upload(r, s.x, x);
        run_step(&s);
        if (transient) {
            check_stored(&s, attn, x);
        } else {
            check_results(&s, attn, x);
        }
        free(attn);
        free(x);
    }
    scene_release(&s);
}

/* Each shape has a backend of its own, because a recorded step holds the addresses of
 * its operands. */
static void layers_of_few_rows_follow_float64_step_after_step(void **state)
{
    (void)state;
    static const struct {
        int32_t shape, rows;
        enum dtype t;
    } cases[] = {{4, 1, DTYPE_BF16}, {6, 2, DTYPE_F16},  {1, 8, DTYPE_BF16}, {4, 2, DTYPE_F16},
                 {4, 8, DTYPE_BF16}, {0, 2, DTYPE_BF16}, {0, 7, DTYPE_BF16}, {2, 2, DTYPE_F16},
                 {2, 5, DTYPE_F16},  {3, 2, DTYPE_BF16}, {0, 2, DTYPE_F32},  {5, 3, DTYPE_BF16}};
    for (size_t i = 0; i < (rig_small() ? 3 : ARRAY_LEN(cases)); i++) {
        if (!rig_runs("layers", i) || !whole_takes(i, ARRAY_LEN(cases))) {
            continue;
        }
        struct rig r;
        rig_open(&r);
        check_shape(&r, &shapes[cases[i].shape], NULL, cases[i].t, cases[i].rows, false);
        rig_close(&r);
    }
}

/* The same where a device may leave out what lies between two products. */
static void layers_without_intermediate_results_follow_float64(void **state)
{
    (void)state;
    static const struct {
        int32_t shape, rows;
        enum dtype t;
    } cases[] = {{0, 3, DTYPE_BF16},   {7, 9, DTYPE_BF16},   {7, 16, DTYPE_F16},
                 {7, 40, DTYPE_BF16},  {7, 64, DTYPE_BF16},  {17, 33, DTYPE_BF16},
                 {18, 16, DTYPE_BF16}, {19, 24, DTYPE_BF16}, {20, 37, DTYPE_BF16}};
    static const struct {
        int32_t shape, rows;
        enum dtype t;
    } normed[] = {{14, 1, DTYPE_BF16}, {14, 8, DTYPE_F16},  {14, 5, DTYPE_BF16},
                  {15, 3, DTYPE_BF16}, {16, 2, DTYPE_BF16}, {14, 9, DTYPE_BF16}};
    bool cuda = strcmp(rig_device, "cuda") == 0;
    for (size_t i = 0; i < (rig_small() ? 1 : ARRAY_LEN(normed)); i++) {
        if (!rig_runs("normed heads", i) || !whole_takes(i, ARRAY_LEN(normed))) {
            continue;
        }
        struct rig r;
        rig_open(&r);
        check_shape(&r, &shapes[normed[i].shape], NULL, normed[i].t, normed[i].rows, cuda);
        rig_close(&r);
    }
    for (size_t i = 0; i < (rig_small() || !cuda ? 1 : ARRAY_LEN(cases)); i++) {
        if (!rig_runs("no intermediate results", i)) {
            continue;
        }
        struct rig r;
        rig_open(&r);
        check_shape(&r, &shapes[cases[i].shape], NULL, cases[i].t, cases[i].rows, true);
        rig_close(&r);
    }
}

/* The same with quantised weights; with more than eight rows also activations. */
static void layers_of_quantised_weights_follow_float64(void **state)
{
    (void)state;
    static const struct quant_case QUANT[] = {
        {.format = FORMAT_FP8, .type = SCALE_F32, .group_rows = 1},
        {.format = FORMAT_INT4, .type = SCALE_BF16, .group_rows = 1, .group_cols = 128},
        {.format = FORMAT_INT4,
         .type = SCALE_F16,
         .group_rows = 1,
         .group_cols = 128,
         .zeros = true},
        {.format = FORMAT_FP8, .type = SCALE_F32, .group_rows = 1, .act = ACT_SCALE_TOKEN},
        {.format = FORMAT_FP8, .type = SCALE_F32, .group_rows = 128, .group_cols = 128},
        {.format = FORMAT_INT8, .type = SCALE_F32, .group_rows = 1},
        {.format = FORMAT_INT8, .type = SCALE_F16, .group_rows = 1, .zeros = true},
        {.format = FORMAT_FP4, .type = SCALE_E8M0, .group_rows = 1, .group_cols = 32},
        {.format = FORMAT_FP4,
         .type = SCALE_E4M3,
         .group_rows = 1,
         .group_cols = 16,
         .factor = 0.0078125f},
        {.format = FORMAT_INT4, .type = SCALE_BF16, .group_rows = 1},
        {.format = FORMAT_INT4,
         .type = SCALE_F16,
         .group_rows = 1,
         .group_cols = 32,
         .zeros = true},
        {.format = FORMAT_Q4_K},
        {.format = FORMAT_Q6_K},
        {.format = FORMAT_IQ4_XS}};
    static const struct {
        int32_t quant, shape, rows;
        bool transient;
    } cases[] = {{0, 8, 2, false},   {1, 8, 5, false},   {0, 9, 8, false},   {1, 9, 1, false},
                 {2, 10, 8, false},  {0, 10, 7, false},  {0, 7, 8, true},    {1, 7, 3, true},
                 {0, 7, 9, true},    {0, 4, 3, false},   {3, 8, 12, false},  {3, 11, 17, true},
                 {3, 11, 40, true},  {2, 7, 12, true},   {1, 7, 30, true},   {2, 7, 64, true},
                 {1, 13, 50, true},  {2, 13, 20, true},  {2, 12, 5, true},   {0, 12, 3, true},
                 {4, 7, 40, true},   {4, 13, 3, true},   {5, 7, 14, true},   {6, 13, 36, true},
                 {5, 11, 2, false},  {0, 11, 20, true},  {7, 7, 3, true},    {8, 7, 12, true},
                 {7, 13, 40, true},  {8, 12, 5, true},   {7, 8, 2, false},   {8, 13, 64, true},
                 {9, 7, 4, true},    {1, 12, 16, true},  {6, 12, 8, true},   {0, 14, 3, true},
                 {4, 14, 8, true},   {3, 7, 33, true},   {3, 17, 20, true},  {10, 7, 1, true},
                 {10, 13, 20, true}, {10, 12, 8, true},  {11, 7, 4, true},   {11, 13, 40, true},
                 {11, 8, 2, false},  {11, 12, 12, true}, {12, 7, 3, true},   {12, 13, 64, true},
                 {12, 12, 16, true}, {13, 7, 5, true},   {13, 13, 33, true}, {10, 14, 8, true},
                 {7, 12, 1, true},   {7, 14, 8, true},   {7, 13, 5, true},   {7, 11, 16, true}};
    enum { CPU_CASES = 14, CPU_INNER = 4608 };
    bool cuda = strcmp(rig_device, "cuda") == 0; /* whose tiles the others are for */
    for (size_t i = 0; i < (rig_small() ? 2 : cuda ? ARRAY_LEN(cases) : CPU_CASES); i++) {
        bool fits = cuda || shapes[cases[i].shape].inner <= CPU_INNER;
        if (!fits || !rig_runs("quantised", i) || !whole_takes(i, CPU_CASES)) {
            continue;
        }
        struct rig r;
        rig_open(&r);
        const struct quant_case *quant = &QUANT[cases[i].quant];
        if (rig_multiplies(&r, quant->format)) {
            check_shape(&r, &shapes[cases[i].shape], quant, DTYPE_BF16, cases[i].rows,
                        cases[i].transient);
        }
        rig_close(&r);
    }
}

/* The same with caches of 8 bits, which the step that rotates writes. */
static void layers_with_caches_of_8_bits_follow_float64(void **state)
{
    (void)state;
    static const struct {
        int32_t shape, rows;
        enum dtype t, cache;
    } cases[] = {{4, 1, DTYPE_BF16, DTYPE_F8}, {0, 7, DTYPE_BF16, DTYPE_F8},
                 {2, 5, DTYPE_F16, DTYPE_F8},  {4, 8, DTYPE_BF16, DTYPE_I8},
                 {3, 2, DTYPE_BF16, DTYPE_F8}, {0, 3, DTYPE_F16, DTYPE_I8}};
    for (size_t i = 0; i < (rig_small() ? 1 : ARRAY_LEN(cases)); i++) {
        if (!rig_runs("caches of 8 bits", i) || !whole_takes(i, ARRAY_LEN(cases))) {
            continue;
        }
        struct rig r;
        cache_type = cases[i].cache;
        rig_open(&r);
        check_shape(&r, &shapes[cases[i].shape], NULL, cases[i].t, cases[i].rows, false);
        rig_close(&r);
    }
    cache_type = DTYPE_F32;
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_of_few_rows_follow_float64_step_after_step),
        cmocka_unit_test(layers_without_intermediate_results_follow_float64),
        cmocka_unit_test(layers_of_quantised_weights_follow_float64),
        cmocka_unit_test(layers_with_caches_of_8_bits_follow_float64)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
