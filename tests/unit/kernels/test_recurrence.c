/* Recurrent layers against float64, and the same bits however a sequence is cut. */
#include "tests/unit/ops.h"

enum {
    SIZE = 8,
    BLOCKS_A_ROW = 25,
    N_SEQS = 3,
    LAYERS = 2,
    MOST = 60,
    LONG = 197, /* of channels on their own, of which a device takes many tokens at once */
    DRAFTS = 12,
    UNUSED_GATES = 3,
    LONG_STEPS = 180 /* tokens, of which a device takes many at once in one step */
};

/* A recurrence with its operands: x and gates of N_SEQS sequences of n tokens each. */
struct scene {
    struct rig r;
    struct recurrence rec;
    struct kv_layout kv[2];
    int32_t size; /* tokens of a block */
    enum dtype act;
    int32_t n, channels, values, n_gates;
    int32_t kept, kept_at; /* the draft whose spare blocks are in the tables, and where; 0: none */
    float *x, *gates;      /* [N_SEQS * n, channels], [.., n_gates] */
    float *conv, *bias, *a_log, *dt_bias, *d; /* the weights */
    struct gated_norm norm;
    float *z, *norm_weight; /* z: [N_SEQS * n, values], NULL: results are not normed */
};

static struct mat vector(struct scene *s, int32_t n, float range, float **ret)
{
    *ret = rig_floats(&s->r, n, range, DTYPE_F32);
    return rig_weight(&s->r, WEIGHT_VECTOR, DTYPE_F32, 1, n, *ret);
}

/* What a scene may be besides a recurrence of some tokens. */
struct scene_kind {
    int32_t size;       /* tokens of a block */
    enum dtype weights; /* whose activations x, the gates and the results are */
    bool deterministic;
    /* Heads of a group of the results' gated norm, 0: they have none. */
    int32_t normed;
    bool own_weights, gate_first;
};

static void make_norm(struct scene *s, struct scene_kind kind)
{
    int32_t width = kind.normed * s->rec.value_dim, cols = kind.own_weights ? s->values : width;

    s->norm = (struct gated_norm){.width = width, .eps = 1e-3f, .gate_first = kind.gate_first};
    s->norm.weight = vector(s, cols, 1, &s->norm_weight);
    s->z = rig_floats(&s->r, (int64_t)N_SEQS * s->n * s->values, 2, s->act);
}

static void open_scene_of(struct scene *s, struct recurrence rec, int32_t n, struct scene_kind kind)
{
    struct err e = {0};
    struct backend_config c = {.threads = 3,
                               .max_tokens = RIG_TOKENS,
                               .max_seqs = N_SEQS * (DRAFTS + 1),
                               .max_samples = RIG_TOKENS,
                               .max_blocks_per_seq = BLOCKS_A_ROW,
                               .n_kv_groups = 2,
                               .deterministic = kind.deterministic};

    *s = (struct scene){.r = {.rng = 7}, .rec = rec, .n = n, .size = kind.size};
    if (backend_open(&s->r.b, rig_device, &c, &e) < 0) {
        fail_msg("%s", e.text);
    }
    s->act = act_of(&s->r, kind.weights);
    s->channels = recurrence_channels(&rec);
    s->values = rec.n_heads * rec.value_dim;
    s->n_gates = rec.n_heads * (rec.kind == RECURRENCE_DELTA ? 2 : 1);
    int32_t each = rec.n_heads; /* that has a decay and a step */
    if (rec.kind == RECURRENCE_SCAN) {
        each = s->values;
        s->n_gates = s->values + UNUSED_GATES + 2 * rec.key_dim;
    }
    kv_layout_init(&s->kv[0], kind.size, LAYERS, 1, 4, DTYPE_F32);
    kv_layout_init_states(&s->kv[1], kind.size, LAYERS, recurrence_floats(&rec));
    kv_layouts_pad(s->kv, 2);
    assert_true(kv_layouts_agree(s->kv, 2));
    int32_t n_blocks = 2 * N_SEQS * BLOCKS_A_ROW + N_SEQS * DRAFTS;
    if (s->r.b->ops->kv_create(s->r.b, s->kv, n_blocks, 0, &e) < 0) {
        fail_msg("%s", e.text);
    }
    s->rec.group = s->rec.layer = 1;
    s->rec.conv = vector(s, s->channels * rec.kernel, 1, &s->conv);
    s->rec.conv_bias = vector(s, s->channels, 0.3f, &s->bias);
    s->rec.a_log = vector(s, rec.n_heads, 0.5f, &s->a_log);
    if (rec.kind == RECURRENCE_SCAN) {
        free(s->a_log);
        s->a_log = rig_floats(&s->r, (int64_t)each * rec.key_dim, 0.5f, DTYPE_F32);
        s->rec.a_log = rig_weight(&s->r, WEIGHT_TABLE, DTYPE_F32, each, rec.key_dim, s->a_log);
    }
    s->rec.dt_bias = vector(s, each, 0.5f, &s->dt_bias);
    s->rec.d = vector(s, each, rec.kind != RECURRENCE_DELTA, &s->d);
    s->x = rig_floats(&s->r, (int64_t)N_SEQS * n * s->channels, 1, s->act);
    s->gates = rig_floats(&s->r, (int64_t)N_SEQS * n * s->n_gates, 2, s->act);
    if (kind.normed > 0) {
        make_norm(s, kind);
    }
}

static void open_scene(struct scene *s, struct recurrence rec, int32_t n)
{
    int32_t normed = rec.kind == RECURRENCE_DELTA;

    open_scene_of(s, rec, n,
                  (struct scene_kind){.size = SIZE, .weights = DTYPE_F32, .normed = normed});
}

static void close_scene(struct scene *s)
{
    free(s->x);
    free(s->gates);
    free(s->conv);
    free(s->bias);
    free(s->a_log);
    free(s->dt_bias);
    free(s->d);
    free(s->z);
    free(s->norm_weight);
    rig_close(&s->r);
}

/* Blocks of a row in group 1 lie in descending order among those of others. */
static int32_t block_of(int32_t row, int32_t i)
{
    return ((BLOCKS_A_ROW - 1 - i) * N_SEQS + row) * 2 + 1;
}

/* The block for the states behind draft t of a row. */
static int32_t spare_of(int32_t row, int32_t t)
{
    return 2 * N_SEQS * BLOCKS_A_ROW + (t - 1) * N_SEQS + row;
}

/* Entry i of a row's table. */
static int32_t entry_of(const struct scene *s, int32_t row, int32_t i)
{
    return s->kept > 0 && i == s->kept_at ? spare_of(row, s->kept) : block_of(row, i);
}

/* Tokens [first, first + n) of a sequence. */
struct piece {
    int32_t first, n;
};

/* The arrays of a step, and its operands. */
struct step_room {
    int32_t slot[RIG_TOKENS], group_slot[RIG_TOKENS], all[RIG_TOKENS];
    int32_t q_start[N_SEQS + 1], kv_len[N_SEQS], rows[N_SEQS], block[N_SEQS * BLOCKS_A_ROW];
    struct table_update update[N_SEQS];
    int32_t n;            /* tokens */
    float *x, *gates, *z; /* [n, channels], [n, n_gates], [n, values] */
};

/* Adds a piece of a sequence; `drafts` as step_of. */
static void add_piece(const struct scene *s, struct step_room *to, int32_t i, int32_t row,
                      struct piece p, bool drafts)
{
    int64_t from = (int64_t)row * s->n + p.first;

    to->rows[i] = row;
    to->kv_len[i] = p.first + p.n;
    to->update[i] = (struct table_update){1, row, 0, BLOCKS_A_ROW, i * BLOCKS_A_ROW};
    for (int32_t k = 0; k < BLOCKS_A_ROW; k++) {
        to->block[i * BLOCKS_A_ROW + k] = entry_of(s, row, k);
    }
    for (int32_t t = 0; t < p.n; t++) {
        int32_t at = drafts && t > 0 ? spare_of(row, t) : entry_of(s, row, (p.first + t) / s->size);
        to->slot[to->n + t] = -1;
        to->group_slot[to->n + t] = at * s->size + (p.first + t) % s->size;
        to->all[to->n + t] = to->n + t;
    }
    memcpy(to->x + (int64_t)to->n * s->channels, s->x + from * s->channels,
           (size_t)p.n * (size_t)s->channels * sizeof(*s->x));
    memcpy(to->gates + (int64_t)to->n * s->n_gates, s->gates + from * s->n_gates,
           (size_t)p.n * (size_t)s->n_gates * sizeof(*s->gates));
    if (s->z) {
        memcpy(to->z + (int64_t)to->n * s->values, s->z + from * s->values,
               (size_t)p.n * (size_t)s->values * sizeof(*s->z));
    }
    to->n += p.n;
    to->q_start[i + 1] = to->n;
}

/* Runs the step of n_rows sequences; the caller frees its results [room->n, values]. */
static float *run_step(struct scene *s, struct step_room *room, int32_t n_rows, bool drafts)
{
    static int32_t zero[RIG_TOKENS];
    struct batch b = {.n_tokens = room->n,
                      .token = zero,
                      .position = zero,
                      .slot = room->slot,
                      .group_slot = room->group_slot,
                      .n_group_slots = room->n,
                      .n_seqs = n_rows,
                      .q_start = room->q_start,
                      .kv_len = room->kv_len,
                      .row = room->rows,
                      .lcp_blocks = zero,
                      .logits_token = room->all,
                      .n_logits = drafts ? room->n : 0,
                      .table_update = room->update,
                      .n_table_update = n_rows,
                      .table_block = room->block,
                      .n_table_block = n_rows * BLOCKS_A_ROW};
    while (b.n_decode < n_rows && room->q_start[b.n_decode + 1] == b.n_decode + 1) {
        b.n_decode++;
    }
    struct mat mx = rig_mat(&s->r, room->n, s->channels, s->act, room->x);
    struct mat mg = rig_mat(&s->r, room->n, s->n_gates, s->act, room->gates);
    struct mat mo = rig_mat(&s->r, room->n, s->values, s->act, NULL);
    struct output_norm after = {&s->norm, {0}};
    if (s->z) {
        after.gate = rig_mat(&s->r, room->n, s->values, s->act, room->z);
    }
    rig_begin(&s->r, &b);
    if (s->rec.kind == RECURRENCE_SCAN || s->rec.kind == RECURRENCE_CONV) {
        s->r.b->ops->recurrence(s->r.b, mo, mx, (struct mat){0}, &s->rec, NULL);
    }
    if (s->rec.kind != RECURRENCE_CONV) {
        s->r.b->ops->recurrence(s->r.b, mo, mx, mg, &s->rec, s->z ? &after : NULL);
    }
    float *got = rig_download(&s->r, mo);
    rig_end(&s->r);
    return got;
}

/* The step of a piece each of the sequences [row, row + n_rows), of which those of no
 * tokens are left out: `out` [N_SEQS * s->n, values] gets their rows. `drafts`: the
 * states behind all but the first token of a piece go to spare blocks, and the step
 * verifies them, so all rows have logits. */
static void step_pieces(struct scene *s, int32_t row, int32_t n_rows, const struct piece *piece,
                        bool drafts, float *out)
{
    static struct step_room room;
    int32_t n = 0, live = 0;

    for (int32_t i = 0; i < n_rows; i++) {
        n += piece[i].n;
    }
    room.n = 0;
    room.x = rig_alloc((size_t)n * (size_t)s->channels * sizeof(*room.x));
    room.gates = rig_alloc((size_t)n * (size_t)s->n_gates * sizeof(*room.gates));
    room.z = rig_alloc((size_t)n * (size_t)s->values * sizeof(*room.z));
    for (int32_t i = 0; i < n_rows; i++) {
        if (piece[i].n > 0) {
            add_piece(s, &room, live++, row + i, piece[i], drafts);
        }
    }
    float *got = run_step(s, &room, live, drafts), *at = got;
    for (int32_t i = 0; i < n_rows; i++) {
        size_t values = (size_t)piece[i].n * (size_t)s->values;
        memcpy(out + ((int64_t)(row + i) * s->n + piece[i].first) * s->values, at,
               values * sizeof(*out));
        at += values;
    }
    free(got);
    free(room.x);
    free(room.gates);
    free(room.z);
}

/* The same with equal pieces. */
static void step_of(struct scene *s, int32_t row, int32_t n_rows, int32_t first, int32_t n,
                    bool drafts, float *out)
{
    struct piece piece[N_SEQS];

    for (int32_t i = 0; i < n_rows; i++) {
        piece[i] = (struct piece){first, n};
    }
    step_pieces(s, row, n_rows, piece, drafts, out);
}

static void step(struct scene *s, int32_t row, int32_t n_rows, int32_t first, int32_t n, float *out)
{
    step_of(s, row, n_rows, first, n, false, out);
}

static float *outputs(const struct scene *s)
{
    return rig_alloc((size_t)N_SEQS * (size_t)s->n * (size_t)s->values * sizeof(float));
}

/* ---- the reference ---- */

/* x of token t behind the convolution, in float64. */
static void convolved(const struct scene *s, int32_t seq, int32_t t, double *ret)
{
    for (int32_t c = 0; c < s->channels; c++) {
        double sum = s->bias[c];
        for (int32_t k = 0; k < s->rec.kernel; k++) {
            int32_t at = t - s->rec.kernel + 1 + k;
            sum += at < 0 ? 0
                          : (double)s->conv[c * s->rec.kernel + k] *
                                s->x[((int64_t)seq * s->n + at) * s->channels + c];
        }
        ret[c] = s->rec.kind == RECURRENCE_CONV ? sum : sum / (1 + exp(-sum));
    }
}

static double length(const double *y, int32_t n)
{
    double sum = 1e-6;

    for (int32_t i = 0; i < n; i++) {
        sum += y[i] * y[i];
    }
    return sqrt(sum);
}

/* One token of a head: state [key_dim, value_dim], out [value_dim]. */
static void reference_token(const struct scene *s, const double *x, const float *gate, int32_t h,
                            double *state, double *out)
{
    const struct recurrence *r = &s->rec;
    int32_t kd = r->key_dim, vd = r->value_dim, keys = r->n_groups * kd;
    int32_t at = (r->tiled ? h % r->n_groups : h * r->n_groups / r->n_heads) * kd;
    bool delta = r->kind == RECURRENCE_DELTA;
    const double *q = x + (delta ? 0 : s->values + keys) + at,
                 *k = x + (delta ? keys : s->values) + at, *v = x + (delta ? 2 * keys : 0) + h * vd;
    double dt = log1p(exp((double)gate[delta ? r->n_heads + h : h] + s->dt_bias[h]));
    double lq = delta ? length(q, kd) * sqrt(kd) : 1, lk = delta ? length(k, kd) : 1;
    double rate = delta ? 1 / (1 + exp(-(double)gate[h])) : fmin(fmax(dt, r->dt_min), r->dt_max);
    double decay = exp(-exp((double)s->a_log[h]) * (delta ? dt : rate));

    enum { MOST = 256 };
    double add[MOST] = {0}; /* at first what the state knows of the key */
    assert_true(vd <= MOST);
    for (int32_t i = 0; i < kd; i++) {
        double of = k[i] / lk;
        for (int32_t c = 0; c < vd; c++) {
            state[i * vd + c] *= decay;
            add[c] += state[i * vd + c] * of;
        }
    }
    for (int32_t c = 0; c < vd; c++) {
        add[c] = rate * (v[c] - (delta ? add[c] : 0));
        out[c] = s->d[h] * v[c];
    }
    for (int32_t i = 0; i < kd; i++) {
        double of = k[i] / lk, by = q[i] / lq;
        for (int32_t c = 0; c < vd; c++) {
            state[i * vd + c] += of * add[c];
            out[c] += state[i * vd + c] * by;
        }
    }
}

/* The same of a selective scan, whose channels are v's. */
static void reference_scan(const struct scene *s, const double *x, const float *gate, double *state,
                           double *out)
{
    int32_t n = s->rec.key_dim;
    const float *q = gate + s->n_gates - n, *k = q - n;

    for (int32_t c = 0; c < s->values; c++) {
        double dt = log1p(exp((double)gate[c] + s->dt_bias[c])), *of = state + (int64_t)c * n;
        out[c] = s->d[c] * x[c];
        for (int32_t i = 0; i < n; i++) {
            of[i] = exp(-exp((double)s->a_log[c * n + i]) * dt) * of[i] + k[i] * dt * x[c];
            out[c] += of[i] * q[i];
        }
    }
}

/* The gated norm of a row's results. */
static void reference_norm(const struct scene *s, const float *z, double *x)
{
    const struct gated_norm *n = &s->norm;

    for (int32_t i = 0; i < s->values; i += n->width) {
        const float *w = s->norm_weight + (n->weight.cols == n->width ? 0 : i);
        double sum = 0;
        for (int32_t k = i; k < i + n->width; k++) {
            x[k] *= n->gate_first ? z[k] / (1 + exp(-(double)z[k])) : 1;
            sum += x[k] * x[k];
        }
        for (int32_t k = i; k < i + n->width; k++) {
            x[k] *= (double)w[k - i] / sqrt(sum / n->width + (double)n->eps) *
                    (n->gate_first ? 1 : z[k] / (1 + exp(-(double)z[k])));
        }
    }
}

static double *reference(const struct scene *s)
{
    const struct recurrence *r = &s->rec;
    size_t size = (size_t)r->n_heads * (size_t)r->key_dim * (size_t)r->value_dim;
    double *out = rig_alloc((size_t)N_SEQS * (size_t)s->n * (size_t)s->values * sizeof(*out));
    double *state = rig_alloc(size * sizeof(*state));
    double *x = rig_alloc((size_t)s->channels * sizeof(*x));

    for (int32_t seq = 0; seq < N_SEQS; seq++) {
        memset(state, 0, size * sizeof(*state));
        for (int32_t t = 0; t < s->n; t++) {
            int64_t row = (int64_t)seq * s->n + t;
            convolved(s, seq, t, x);
            if (r->kind == RECURRENCE_CONV) {
                memcpy(out + row * s->values, x, (size_t)s->values * sizeof(*out));
                continue;
            }
            if (r->kind == RECURRENCE_SCAN) {
                reference_scan(s, x, s->gates + row * s->n_gates, state, out + row * s->values);
                continue;
            }
            for (int32_t h = 0; h < r->n_heads; h++) {
                reference_token(s, x, s->gates + row * s->n_gates, h,
                                state + h * r->key_dim * r->value_dim,
                                out + row * s->values + h * r->value_dim);
            }
            if (s->z) {
                reference_norm(s, s->z + row * s->values, out + row * s->values);
            }
        }
    }
    free(state);
    free(x);
    return out;
}

/* ---- tests ---- */

static const struct recurrence SHAPES[] = {
    {.kind = RECURRENCE_DELTA,
     .n_heads = 4,
     .n_groups = 2,
     .key_dim = 8,
     .value_dim = 12,
     .kernel = 4},
    {.kind = RECURRENCE_DELTA,
     .n_heads = 6,
     .n_groups = 2,
     .key_dim = 10,
     .value_dim = 12,
     .kernel = 3,
     .tiled = true},
    {.kind = RECURRENCE_DELTA,
     .n_heads = 3,
     .n_groups = 3,
     .key_dim = 70,
     .value_dim = 33,
     .kernel = 2},
    {.kind = RECURRENCE_SSD,
     .n_heads = 6,
     .n_groups = 2,
     .key_dim = 10,
     .value_dim = 8,
     .kernel = 4,
     .dt_max = INFINITY},
    {.kind = RECURRENCE_SSD,
     .n_heads = 4,
     .n_groups = 1,
     .key_dim = 16,
     .value_dim = 64,
     .kernel = 3,
     .dt_min = 0.3f,
     .dt_max = 0.9f},
    {.kind = RECURRENCE_DELTA,
     .n_heads = 2,
     .n_groups = 1,
     .key_dim = 128,
     .value_dim = 128,
     .kernel = 4},
    {.kind = RECURRENCE_SSD,
     .n_heads = 3,
     .n_groups = 1,
     .key_dim = 200,
     .value_dim = 80,
     .kernel = 4,
     .dt_max = INFINITY},
    {.kind = RECURRENCE_DELTA, /* of which a device may take whole heads */
     .n_heads = 24,
     .n_groups = 12,
     .key_dim = 128,
     .value_dim = 128,
     .kernel = 4,
     .tiled = true},
    {.kind = RECURRENCE_SCAN, .n_heads = 3, .key_dim = 10, .value_dim = 30, .kernel = 4},
    {.kind = RECURRENCE_SCAN, .n_heads = 2, .key_dim = 16, .value_dim = 8, .kernel = 2},
    {.kind = RECURRENCE_SCAN, .n_heads = 2, .key_dim = 40, .value_dim = 36, .kernel = 6},
    {.kind = RECURRENCE_CONV, .n_heads = 3, .value_dim = 30, .kernel = 3},
    {.kind = RECURRENCE_CONV, .n_heads = 2, .value_dim = 320, .kernel = 4},
    {.kind = RECURRENCE_CONV, .n_heads = 1, .value_dim = 7, .kernel = LIMIT_CONV_KERNEL},
};

/* Tokens of a sequence. */
static int32_t tokens_of(enum recurrence_kind kind)
{
    int32_t most = kind == RECURRENCE_SCAN || kind == RECURRENCE_CONV ? LONG : MOST;

    return rig_small() ? most / 8 : most / RIG_SHORTER;
}

static void recurrences_follow_float64(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        struct scene s;
        open_scene(&s, SHAPES[i], tokens_of(SHAPES[i].kind));
        float *got = outputs(&s);
        step(&s, 0, N_SEQS, 0, s.n, got);
        double *want = reference(&s);
        assert_nmse("recurrence", got, want, (int64_t)N_SEQS * s.n * s.values, DTYPE_F32);
        free(want);
        free(got);
        close_scene(&s);
    }
}

/* Steps of every size, beginning and ending inside blocks, at their ends and behind
 * them, alone and in company. */
static void a_sequence_may_be_cut_anywhere(void **state)
{
    (void)state;
    static const int32_t sizes[] = {1, 2, 3, 7, 8, 9, 17, 70};
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        struct scene s;
        if (!whole_takes(i, ARRAY_LEN(SHAPES))) {
            continue;
        }
        open_scene(&s, SHAPES[i], tokens_of(SHAPES[i].kind));
        size_t bytes = (size_t)N_SEQS * (size_t)s.n * (size_t)s.values * sizeof(float);
        float *whole = outputs(&s), *cut = outputs(&s);
        step(&s, 0, N_SEQS, 0, s.n, whole);
        for (size_t k = 0; k < ARRAY_LEN(sizes); k++) {
            memset(cut, 0, bytes);
            for (int32_t first = 0; first < s.n; first += sizes[k]) {
                int32_t n = MIN(sizes[k], s.n - first);
                step(&s, 0, 1, first, n, cut);
                step(&s, 1, N_SEQS - 1, first, n, cut);
            }
            assert_memory_equal(cut, whole, bytes);
        }
        free(cut);
        free(whole);
        close_scene(&s);
    }
}

/* Steps of one token of each sequence, which stand at different places of their blocks,
 * and the same once more from the first block on, whose state stays. */
static void decodes_stand_anywhere(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        struct scene s;
        if (!whole_takes(i, ARRAY_LEN(SHAPES))) {
            continue;
        }
        open_scene(&s, SHAPES[i], MIN(tokens_of(SHAPES[i].kind), 3 * SIZE));
        size_t bytes = (size_t)N_SEQS * (size_t)s.n * (size_t)s.values * sizeof(float);
        float *whole = outputs(&s), *cut = outputs(&s);
        step(&s, 0, N_SEQS, 0, s.n, whole);
        memset(cut, 0, bytes);
        for (int32_t again = 0; again < (s.n > SIZE ? 2 : 1); again++) {
            for (int32_t t = again * SIZE; t < s.n + 2 * (N_SEQS - 1); t++) {
                struct piece piece[N_SEQS];
                for (int32_t row = 0; row < N_SEQS; row++) {
                    int32_t at = MAX(t - 2 * row, 0);
                    bool live = t >= 2 * row + again * SIZE && at < s.n;
                    piece[row] = (struct piece){MIN(at, s.n - 1), live};
                }
                step_pieces(&s, 0, N_SEQS, piece, false, cut);
            }
            assert_memory_equal(cut, whole, bytes);
            for (int32_t row = 0; row < N_SEQS && s.n > SIZE; row++) {
                memset(cut + ((int64_t)row * s.n + SIZE) * s.values, 0,
                       (size_t)(s.n - SIZE) * (size_t)s.values * sizeof(*cut));
            }
        }
        free(cut);
        free(whole);
        close_scene(&s);
    }
}

/* The state at the end of a block stays when the sequence goes on: two continuations
 * from the same block do not meet. */
static void a_full_block_is_a_snapshot(void **state)
{
    (void)state;
    struct scene s;
    open_scene(&s, SHAPES[0], 3 * SIZE);
    float *first = outputs(&s), *again = outputs(&s);
    size_t at = (size_t)SIZE * (size_t)s.values, rest = 2 * at * sizeof(float);
    step(&s, 0, 1, 0, SIZE, first);
    step(&s, 0, 1, SIZE, 2 * SIZE, first);
    step(&s, 0, 1, SIZE, 2 * SIZE, again); /* from the same block once more */
    assert_memory_equal(first + at, again + at, rest);
    free(again);
    free(first);
    close_scene(&s);
}

/* A step that verifies drafts keeps the states behind each, in a block of its own:
 * sequences go on from any of them as if the drafts behind it had not been. */
static void drafts_leave_the_states_behind_each(void **state)
{
    (void)state;
    static const int32_t accepted[] = {0, 1, 2, 7, DRAFTS};
    enum { N = 24, FIRST = 5 };
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        struct scene s;
        if (!whole_takes(i, ARRAY_LEN(SHAPES))) {
            continue;
        }
        open_scene(&s, SHAPES[i], N);
        size_t bytes = (size_t)N_SEQS * N * (size_t)s.values * sizeof(float);
        float *whole = outputs(&s), *cut = outputs(&s);
        step(&s, 0, N_SEQS, 0, N, whole);
        for (size_t k = 0; k < ARRAY_LEN(accepted); k++) {
            memset(cut, 0, bytes);
            s.kept = 0;
            step(&s, 0, N_SEQS, 0, FIRST, cut);
            step_of(&s, 0, N_SEQS, FIRST, 1 + DRAFTS, true, cut);
            int32_t at = FIRST + 1 + accepted[k];
            s.kept = accepted[k];
            s.kept_at = (at - 1) / SIZE;
            for (int32_t row = 0; row < N_SEQS; row++) {
                memset(cut + ((int64_t)row * N + at) * s.values, 0,
                       (size_t)(N - at) * (size_t)s.values * sizeof(*cut));
            }
            step(&s, 0, N_SEQS, at, 2, cut);
            s.kept = s.kept_at == (at + 1) / SIZE ? s.kept : 0;
            step(&s, 0, N_SEQS, at + 2, N - at - 2, cut);
            assert_memory_equal(cut, whole, bytes);
        }
        free(cut);
        free(whole);
        close_scene(&s);
    }
}

/* Shapes of which a device takes many tokens of a sequence at once, and another. */
static const struct recurrence LONG_SHAPES[] = {
    {.kind = RECURRENCE_DELTA,
     .n_heads = 4,
     .n_groups = 2,
     .key_dim = 128,
     .value_dim = 64,
     .kernel = 4},
    {.kind = RECURRENCE_DELTA,
     .n_heads = 10,
     .n_groups = 2,
     .key_dim = 128,
     .value_dim = 32,
     .kernel = 4,
     .tiled = true},
    {.kind = RECURRENCE_SSD,
     .n_heads = 6,
     .n_groups = 1,
     .key_dim = 128,
     .value_dim = 64,
     .kernel = 4,
     .dt_max = INFINITY},
    {.kind = RECURRENCE_SSD,
     .n_heads = 4,
     .n_groups = 2,
     .key_dim = 128,
     .value_dim = 96,
     .kernel = 3,
     .dt_min = 0.1f,
     .dt_max = 1.5f},
    {.kind = RECURRENCE_DELTA,
     .n_heads = 2,
     .n_groups = 1,
     .key_dim = 120,
     .value_dim = 64,
     .kernel = 4},
};
/* Tokens of a block of their states. */
static const int32_t LONG_SIZES[] = {64, 37, 50, 8};

/* Scene i of as many as there are shapes and sizes. */
static void open_long(struct scene *s, size_t i, bool deterministic)
{
    struct scene_kind kind = {.size = LONG_SIZES[i / ARRAY_LEN(LONG_SHAPES)],
                              .weights = DTYPE_BF16,
                              .normed = i % 2 == 0,
                              .deterministic = deterministic};

    open_scene_of(s, LONG_SHAPES[i % ARRAY_LEN(LONG_SHAPES)], LONG_STEPS, kind);
}
static size_t n_long(void)
{
    return rig_small() ? ARRAY_LEN(LONG_SHAPES)
                       : ARRAY_LEN(LONG_SHAPES) * ARRAY_LEN(LONG_SIZES) / RIG_SHORTER;
}

/* Long and short pieces in one step, which begin and end anywhere: with no earlier
 * state and behind any other piece. */
static void long_steps_follow_float64(void **state)
{
    (void)state;
    static const struct piece pieces[][N_SEQS] = {
        {{0, 1}, {0, 35}, {0, 128}},    {{1, 1}, {35, 1}, {128, 0}},
        {{2, 34}, {36, 64}, {128, 1}},  {{36, 33}, {100, 0}, {129, 51}},
        {{69, 111}, {100, 80}, {0, 0}},
    };
    for (size_t i = 0; i < n_long(); i++) {
        struct scene s;
        if (!rig_runs("long steps", i) || !whole_takes(i, n_long())) {
            continue;
        }
        open_long(&s, i, false);
        float *got = outputs(&s);
        for (size_t k = 0; k < ARRAY_LEN(pieces); k++) {
            step_pieces(&s, 0, N_SEQS, pieces[k], false, got);
        }
        double *want = reference(&s);
        assert_nmse("long steps", got, want, (int64_t)N_SEQS * s.n * s.values, s.act);
        step(&s, 0, N_SEQS, 0, s.n, got); /* once more, all in one step */
        assert_nmse("one long step", got, want, (int64_t)N_SEQS * s.n * s.values, s.act);
        free(want);
        free(got);
        close_scene(&s);
    }
}

/* A long step leaves the state behind every block that it fills: sequences go on from
 * each of them, and with drafts from the last. */
static void long_steps_leave_the_states_behind_blocks(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_long(); i++) {
        struct scene s;
        if (!rig_runs("states behind blocks", i) || !whole_takes(i, n_long())) {
            continue;
        }
        open_long(&s, i, false);
        float *got = outputs(&s);
        double *want = reference(&s);
        int64_t values = (int64_t)N_SEQS * s.n * s.values;
        int32_t last = (LONG_STEPS - DRAFTS - 2) / s.size * s.size;
        step(&s, 0, N_SEQS, 0, last, got);
        for (int32_t first = s.size; first < last; first += s.size) {
            step(&s, 0, 1, first, s.size, got);
            step(&s, 1, 2, first, 3, got);
            step(&s, 1, 2, first + 3, s.size - 3, got);
        }
        step_of(&s, 0, N_SEQS, last, 1 + DRAFTS, true, got);
        s.kept = DRAFTS;
        s.kept_at = (last + DRAFTS) / s.size;
        step(&s, 0, N_SEQS, last + 1 + DRAFTS, s.n - last - 1 - DRAFTS, got);
        assert_nmse("states behind blocks", got, want, values, s.act);
        free(want);
        free(got);
        close_scene(&s);
    }
}

/* What else is in a step changes no bit of a sequence, however many tokens it has. */
static void company_changes_no_bit_of_long_steps(void **state)
{
    (void)state;
    static const struct piece pieces[N_SEQS] = {{0, 1}, {0, 90}, {0, 150}};
    for (size_t i = 0; i < ARRAY_LEN(LONG_SHAPES); i++) {
        struct scene s;
        open_long(&s, i, false);
        size_t bytes = (size_t)N_SEQS * (size_t)s.n * (size_t)s.values * sizeof(float);
        float *together = outputs(&s), *alone = outputs(&s);
        step_pieces(&s, 0, N_SEQS, pieces, false, together);
        for (int32_t row = 0; row < N_SEQS; row++) {
            step_pieces(&s, row, 1, &pieces[row], false, alone);
        }
        assert_memory_equal(together, alone, bytes);
        free(alone);
        free(together);
        close_scene(&s);
    }
}

/* `deterministic` has one form of these shapes too. */
static void deterministic_steps_may_be_cut_anywhere(void **state)
{
    (void)state;
    static const int32_t sizes[] = {1, 36, 64, 100};
    for (size_t i = 0; i < ARRAY_LEN(LONG_SHAPES); i++) {
        struct scene s;
        open_long(&s, i, true);
        size_t bytes = (size_t)N_SEQS * (size_t)s.n * (size_t)s.values * sizeof(float);
        float *whole = outputs(&s), *cut = outputs(&s);
        step(&s, 0, N_SEQS, 0, s.n, whole);
        for (size_t k = 0; k < ARRAY_LEN(sizes); k++) {
            memset(cut, 0, bytes);
            for (int32_t first = 0; first < s.n; first += sizes[k]) {
                step(&s, 0, N_SEQS, first, MIN(sizes[k], s.n - first), cut);
            }
            assert_memory_equal(cut, whole, bytes);
        }
        free(cut);
        free(whole);
        close_scene(&s);
    }
}

static void gated_norms_follow_float64(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        bool delta = SHAPES[i].kind == RECURRENCE_DELTA;
        for (int way = 0; way < 4 && (delta || SHAPES[i].kind == RECURRENCE_SSD); way++) {
            struct scene_kind kind = {.size = SIZE,
                                      .weights = DTYPE_F32,
                                      .normed = delta ? 1 : SHAPES[i].n_heads / SHAPES[i].n_groups,
                                      .own_weights = way & 1,
                                      .gate_first = way & 2};
            struct scene s;
            open_scene_of(&s, SHAPES[i], SIZE, kind);
            float *got = outputs(&s);
            double *want = reference(&s);
            step(&s, 0, N_SEQS, 0, s.n, got);
            assert_nmse("a gated norm", got, want, (int64_t)N_SEQS * s.n * s.values, s.act);
            step(&s, 0, N_SEQS, 0, 1, got);
            assert_nmse("of decodes", got, want, (int64_t)N_SEQS * s.n * s.values, s.act);
            free(want);
            free(got);
            close_scene(&s);
        }
    }
}

static void sigmoid_gates_follow_float64(void **state)
{
    (void)state;
    enum { ROWS = 21, COLS = 50 };
    struct rig r;
    rig_open(&r);
    float *x = rig_floats(&r, ROWS * COLS, 3, DTYPE_F32),
          *z = rig_floats(&r, ROWS * COLS, 4, DTYPE_F32);
    double want[ROWS * COLS];
    for (int32_t i = 0; i < ROWS * COLS; i++) {
        want[i] = (double)x[i] / (1 + exp(-(double)z[i]));
    }
    struct mat mx = rig_mat(&r, ROWS, COLS, DTYPE_F32, x),
               mz = rig_mat(&r, ROWS, COLS, DTYPE_F32, z);
    rig_begin_plain(&r, ROWS);
    r.b->ops->gate_sigmoid(r.b, mx, mz);
    float *got = rig_download(&r, mx);
    rig_end(&r);
    assert_nmse("gate_sigmoid", got, want, ROWS * COLS, DTYPE_F32);
    free(got);
    free(x);
    free(z);
    rig_close(&r);
}

/* Products with activated elements, with one value for all, and with itself. */
static void products_of_elements_follow_float64(void **state)
{
    (void)state;
    enum { ROWS = 21, COLS = 50, N = ROWS * COLS };
    struct rig r;
    rig_open(&r);
    float *x = rig_floats(&r, N, 3, DTYPE_F32), *y = rig_floats(&r, N, 4, DTYPE_F32), *got;
    double want[3][N];
    for (int32_t i = 0; i < N; i++) {
        want[0][i] = (double)x[i] * y[i] / (1 + exp(-(double)y[i]));
        want[1][i] = (double)x[i] * y[0];
        want[2][i] = (double)x[i] * x[i];
    }
    struct mat mx[3], my = rig_mat(&r, ROWS, COLS, DTYPE_F32, y);
    for (int i = 0; i < 3; i++) {
        mx[i] = rig_mat(&r, ROWS, COLS, DTYPE_F32, x);
    }
    rig_begin_plain(&r, ROWS);
    r.b->ops->multiply(r.b, mx[0], my, ACT_SILU);
    r.b->ops->multiply(r.b, mx[1], mat_cols(mat_rows(my, 0, 1), 0, 1), ACT_NONE);
    r.b->ops->multiply(r.b, mx[2], mx[2], ACT_NONE);
    for (int i = 0; i < 3; i++) {
        got = rig_download(&r, mx[i]);
        assert_nmse("multiply", got, want[i], N, DTYPE_F32);
        free(got);
    }
    rig_end(&r);
    free(x);
    free(y);
    rig_close(&r);
}

/* Devices without these operations refuse models that need them. */
static bool has_recurrences(void)
{
    struct rig r;

    rig_open(&r);
    bool has = r.b->ops->recurrence != NULL;
    rig_close(&r);
    return has;
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recurrences_follow_float64),
        cmocka_unit_test(a_sequence_may_be_cut_anywhere),
        cmocka_unit_test(decodes_stand_anywhere),
        cmocka_unit_test(a_full_block_is_a_snapshot),
        cmocka_unit_test(drafts_leave_the_states_behind_each),
        cmocka_unit_test(long_steps_follow_float64),
        cmocka_unit_test(long_steps_leave_the_states_behind_blocks),
        cmocka_unit_test(company_changes_no_bit_of_long_steps),
        cmocka_unit_test(deterministic_steps_may_be_cut_anywhere),
        cmocka_unit_test(gated_norms_follow_float64),
        cmocka_unit_test(sigmoid_gates_follow_float64),
        cmocka_unit_test(products_of_elements_follow_float64),
    };

    return has_recurrences() ? cmocka_run_group_tests(tests, NULL, NULL) : 0;
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
