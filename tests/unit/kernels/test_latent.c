/* Multi-head latent attention against float64: norms, rotation and cache writes, then
 * attention with keys and values expanded head by head, which the operation never does.
 *
 * Sequences grow over several steps (chunked prefill, then decodes) with blocks in
 * shuffled order; the reference keeps their latents in plain arrays.
 *
 *     build/tests/unit/kernels/test_latent [--device cpu|cuda]
 */
#include "tests/unit/ops.h"

enum { SEQS = 40, BLOCKS = 160, LAYERS = 2, MAX_LEN = 400, MAX_BLOCKS = 100 };

struct shape {
    const char *name;
    int32_t n_heads, latent, rot_dim, nope_dim, v_dim, block_size;
    bool interleaved;
    enum dtype dtype;
};

static const struct shape SHAPES[] = {
    {"16 heads of V2-Lite", 16, 512, 64, 128, 128, 16, true, DTYPE_BF16},
    {"20 heads of GLM", 20, 512, 64, 192, 256, 16, true, DTYPE_BF16},
    {"128 heads", 128, 512, 64, 128, 128, 64, true, DTYPE_BF16},
    {"one head", 1, 64, 16, 32, 16, 16, true, DTYPE_F16},
    {"odd sizes", 3, 40, 6, 10, 14, 8, false, DTYPE_F32},
    {"a half a head", 9, 96, 32, 48, 40, 16, false, DTYPE_BF16},
};

struct scene {
    struct rig r;
    const struct shape *c;
    enum dtype at, cache;
    struct latent_attention att;
    float *cos_sin, *norm, *k_up, *v_up; /* as struct latent_attention has them */
    struct panels *k_of, *v_of;          /* k_up and v_up by heads */
    int32_t len[SEQS], block[SEQS][MAX_BLOCKS], next_block;
    bool filling;        /* attention of this step is not looked at */
    int32_t portion;     /* rows that are computed at a time */
    int32_t every;       /* one in so many heads of a token is looked at, others of the next */
    float *cached[SEQS]; /* [MAX_LEN, latent + rot_dim] */
};

static int32_t width(const struct shape *c)
{
    return c->latent + c->rot_dim;
}

static void fill_angles(struct scene *s)
{
    int32_t half = s->c->rot_dim / 2;

    s->cos_sin = rig_alloc((size_t)MAX_LEN * (size_t)s->c->rot_dim * sizeof(float));
    for (int32_t p = 0; p < MAX_LEN; p++) {
        for (int32_t i = 0; i < half; i++) {
            double angle = p * pow(10000, -(double)i / half);
            s->cos_sin[p * s->c->rot_dim + i] = (float)cos(angle);
            s->cos_sin[p * s->c->rot_dim + half + i] = (float)sin(angle);
        }
    }
}

static void scene_open_as(struct scene *s, const struct shape *c, bool deterministic)
{
    struct kv_layout kv;
    struct err e = {0};

    *s = (struct scene){.c = c, .portion = 24, .every = 1};
    rig_open_config(&s->r, deterministic);
    s->at = act_of(&s->r, c->dtype);
    s->cache = s->at == DTYPE_F32 ? c->dtype : s->at;
    kv_layout_init_latent(&kv, c->block_size, LAYERS, width(c), s->cache);
    if (s->r.b->ops->kv_create(s->r.b, &kv, BLOCKS, 0, &e) < 0) {
        fail_msg("%s: %s", c->name, e.text);
    }
    fill_angles(s);
    s->norm = rig_floats(&s->r, c->latent, 2, c->dtype);
    s->k_up = rig_floats(&s->r, (int64_t)c->n_heads * c->latent * c->nope_dim,
                         2 / sqrtf((float)c->latent), c->dtype);
    s->v_up = rig_floats(&s->r, (int64_t)c->n_heads * c->v_dim * c->latent,
                         2 / sqrtf((float)c->latent), c->dtype);
    s->att = (struct latent_attention){
        .layer = 1,
        .n_heads = c->n_heads,
        .latent = c->latent,
        .rot_dim = c->rot_dim,
        .nope_dim = c->nope_dim,
        .v_dim = c->v_dim,
        .scale = 1.5f / sqrtf((float)(c->nope_dim + c->rot_dim)),
        .norm = {.kind = NORM_RMS,
                 .eps = 1e-6f,
                 .weight = rig_weight(&s->r, WEIGHT_VECTOR, c->dtype, 1, c->latent, s->norm)},
        .cos_sin = rig_weight(&s->r, WEIGHT_TABLE, DTYPE_F32, MAX_LEN, c->rot_dim, s->cos_sin),
        .interleaved = c->interleaved,
        .k_up = rig_weight(&s->r, WEIGHT_LINEAR, c->dtype, c->n_heads * c->latent, c->nope_dim,
                           s->k_up),
        .v_up =
            rig_weight(&s->r, WEIGHT_LINEAR, c->dtype, c->n_heads * c->v_dim, c->latent, s->v_up)};
    for (int32_t i = 0; i < SEQS; i++) {
        s->cached[i] = rig_alloc((size_t)MAX_LEN * (size_t)width(c) * sizeof(float));
    }
    s->k_of = rig_alloc((size_t)c->n_heads * sizeof(*s->k_of));
    s->v_of = rig_alloc((size_t)c->n_heads * sizeof(*s->v_of));
    for (int64_t h = 0; h < c->n_heads; h++) {
        s->k_of[h] =
            panels_of(s->k_up + h * c->latent * c->nope_dim, c->nope_dim, c->latent, c->nope_dim);
        s->v_of[h] = panels_of(s->v_up + h * c->v_dim * c->latent, c->latent, c->v_dim, c->latent);
    }
}

static void scene_open(struct scene *s, const struct shape *c)
{
    scene_open_as(s, c, false);
}

static void scene_close(struct scene *s)
{
    for (int32_t i = 0; i < SEQS; i++) {
        free(s->cached[i]);
    }
    free(s->cos_sin);
    free(s->norm);
    for (int32_t h = 0; h < s->c->n_heads; h++) {
        panels_free(&s->k_of[h]);
        panels_free(&s->v_of[h]);
    }
    free(s->k_of);
    free(s->v_of);
    free(s->k_up);
    free(s->v_up);
    rig_close(&s->r);
}

/* ---- references ---- */

RIG_UNWATCHED static void rotate(const struct scene *s, double *x, int32_t position)
{
    const float *angles = s->cos_sin + (int64_t)position * s->c->rot_dim;
    int32_t half = s->c->rot_dim / 2;

    for (int32_t i = 0; i < half; i++) {
        int32_t a = s->c->interleaved ? 2 * i : i, b = s->c->interleaved ? 2 * i + 1 : i + half;
        double p = x[a], q = x[b];
        x[a] = p * angles[i] - q * angles[half + i];
        x[b] = q * angles[i] + p * angles[half + i];
    }
}

/* A row of kv as latent_kv has to leave it. */
RIG_UNWATCHED static void latent_reference(const struct scene *s, const float *kv, int32_t position,
                                           double *out)
{
    double sum = 0;

    for (int32_t i = 0; i < width(s->c); i++) {
        out[i] = kv[i];
        sum += i < s->c->latent ? (double)kv[i] * kv[i] : 0;
    }
    for (int32_t i = 0; i < s->c->latent; i++) {
        out[i] *= s->norm[i] / sqrt(sum / s->c->latent + (double)s->att.norm.eps);
    }
    rotate(s, out + s->c->latent, position);
}

/* One head's query over the latents: exact, and rounded as activations are. */
RIG_UNWATCHED static void absorb(const struct scene *s, const float *q, int32_t head, double *exact,
                                 float *plain)
{
    const struct shape *c = s->c;
    enum dtype operand = operand_of(&s->r, c->dtype);
    double wide[LIMIT_LATENT_DIM];
    float rounded[LIMIT_LATENT_DIM];

    for (int32_t i = 0; i < c->nope_dim; i++) {
        wide[i] = q[i];
        rounded[i] = round_to(operand, q[i]);
    }
    for (int32_t d = 0; d < c->latent; d += BESIDE) { /* a multiple of eight */
        panels_dots(&s->k_of[head], d, wide, exact + d);
        panels_dots32(&s->k_of[head], d, rounded, plain + d);
    }
    for (int32_t d = 0; d < c->latent; d++) {
        plain[d] = round_to(s->at, plain[d]);
    }
    for (int32_t d = 0; d < c->rot_dim; d++) {
        exact[c->latent + d] = plain[c->latent + d] = q[c->nope_dim + d];
    }
}

/* Weighted sums of latents of one head, over the first n tokens of a sequence. */
RIG_UNWATCHED static void weigh(const struct scene *s, int32_t seq, const struct panels *keys,
                                int32_t n, const double *exact, const float *plain, double *sum,
                                float *sum32)
{
    const struct shape *c = s->c;
    double dots[BESIDE];
    float dots32[BESIDE];
    double all = 0;
    float all32 = 0;

    memset(sum, 0, (size_t)c->latent * sizeof(*sum));
    memset(sum32, 0, (size_t)c->latent * sizeof(*sum32));
    for (int32_t j = 0; j < n; j++) {
        const float *key = s->cached[seq] + (int64_t)j * width(c);
        if (j % BESIDE == 0) {
            panels_dots(keys, j, exact, dots);
            panels_dots32(keys, j, plain, dots32);
        }
        double p = exp(dots[j % BESIDE] * (double)s->att.scale);
        float p32 = round_to(s->at, expf(dots32[j % BESIDE] * s->att.scale));
        all += p;
        all32 += p32;
        add_scaled(sum, p, key, c->latent);
        add_scaled32(sum32, p32, key, c->latent);
    }
    enum dtype operand = operand_of(&s->r, c->dtype);
    for (int32_t d = 0; d < c->latent; d++) {
        sum[d] /= all;
        sum32[d] = round_to(operand, sum32[d] / all32);
    }
}

/* keys: at least n of the sequence. */
RIG_UNWATCHED static void attend_reference(const struct scene *s, int32_t seq,
                                           const struct panels *keys, int32_t n, const float *q,
                                           int32_t head, double *ref, float *plain)
{
    const struct shape *c = s->c;
    double exact[LIMIT_LATENT_DIM], sum[LIMIT_LATENT_DIM], dots[BESIDE];
    float over[LIMIT_LATENT_DIM], sum32[LIMIT_LATENT_DIM], dots32[BESIDE];

    absorb(s, q, head, exact, over);
    weigh(s, seq, keys, n, exact, over, sum, sum32);
    for (int32_t i = 0; i < c->v_dim; i++) {
        if (i % BESIDE == 0) {
            panels_dots(&s->v_of[head], i, sum, dots);
            panels_dots32(&s->v_of[head], i, sum32, dots32);
        }
        ref[i] = dots[i % BESIDE];
        plain[i] = round_to(s->at, dots32[i % BESIDE]);
    }
}

/* ---- a step ---- */

struct packed {
    struct batch b;
    int32_t token[RIG_TOKENS], src[RIG_TOKENS], position[RIG_TOKENS], slot[RIG_TOKENS];
    int32_t q_start[SEQS + 1], kv_len[SEQS], row[SEQS], lcp[SEQS];
    struct table_update update[SEQS];
    int32_t block[SEQS * MAX_BLOCKS];
};

static void pack_sequence(struct scene *s, struct packed *p, int32_t seq, int32_t n)
{
    int32_t bs = s->c->block_size, have = (int32_t)div_ceil(s->len[seq], bs);
    int32_t want = (int32_t)div_ceil(s->len[seq] + n, bs), k = p->b.n_seqs++;

    if (want > have) {
        p->update[p->b.n_table_update++] = (struct table_update){
            .row = seq, .index = have, .count = want - have, .first = p->b.n_table_block};
    }
    for (int32_t i = have; i < want; i++) {
        s->block[seq][i] = s->next_block++ * 77 % BLOCKS; /* 77 and BLOCKS have no divisor */
        p->block[p->b.n_table_block++] = s->block[seq][i];
    }
    for (int32_t t = 0; t < n; t++) {
        int32_t at = s->len[seq] + t;
        p->position[p->b.n_tokens] = at;
        p->src[p->b.n_tokens] = -1;
        p->slot[p->b.n_tokens++] = s->block[seq][at / bs] * bs + at % bs;
    }
    s->len[seq] += n;
    p->q_start[k + 1] = p->b.n_tokens;
    p->kv_len[k] = s->len[seq];
    p->row[k] = seq;
    p->b.n_decode += n == 1;
}

static void pack(struct scene *s, struct packed *p, const int32_t *n)
{
    memset(p, 0, sizeof(*p));
    for (int32_t i = 0; i < SEQS; i++) {
        if (n[i] > 0) {
            pack_sequence(s, p, i, n[i]);
        }
    }
    p->b.token = p->token;
    p->b.token_src = p->src;
    p->b.position = p->position;
    p->b.slot = p->slot;
    p->b.q_start = p->q_start;
    p->b.kv_len = p->kv_len;
    p->b.row = p->row;
    p->b.lcp_blocks = p->lcp;
    p->b.table_update = p->update;
    p->b.table_block = p->block;
}

/* What latent_kv made of kv and of the queries' ends. Keeps the latents as the cache
 * holds them. */
static void check_kv(struct scene *s, const struct packed *p, const float *before,
                     const float *after)
{
    int32_t w = width(s->c);
    double *ref = rig_alloc((size_t)p->b.n_tokens * (size_t)w * sizeof(*ref));

    for (int32_t k = 0; k < p->b.n_seqs; k++) {
        for (int32_t t = p->q_start[k]; t < p->q_start[k + 1]; t++) {
            latent_reference(s, before + (int64_t)t * w, p->position[t], ref + (int64_t)t * w);
            for (int32_t i = 0; i < w; i++) {
                s->cached[p->row[k]][(int64_t)p->position[t] * w + i] =
                    round_to(s->cache, after[(int64_t)t * w + i]);
            }
        }
    }
    assert_nmse("latents", after, ref, (int64_t)p->b.n_tokens * w, s->at);
    free(ref);
}

static void check_q(const struct scene *s, const struct packed *p, const float *before,
                    const float *after)
{
    int32_t d = s->c->nope_dim + s->c->rot_dim;
    int64_t n = (int64_t)p->b.n_tokens * s->c->n_heads * d;
    double *ref = rig_alloc((size_t)n * sizeof(*ref));

    for (int64_t i = 0; i < n; i++) {
        ref[i] = before[i];
    }
    for (int64_t i = 0; i < n; i += d) {
        rotate(s, ref + i + s->c->nope_dim, p->position[i / d / s->c->n_heads]);
        assert_memory_equal(after + i, before + i, (size_t)s->c->nope_dim * sizeof(*after));
    }
    assert_nmse("queries", after, ref, n, s->at);
    free(ref);
}

static void check_out(const struct scene *s, const struct packed *p, const float *q,
                      const float *got)
{
    const struct shape *c = s->c;
    int64_t n = (int64_t)p->b.n_tokens * c->n_heads * c->v_dim;
    double *ref = rig_alloc((size_t)n * sizeof(*ref));
    float *plain = rig_alloc((size_t)n * sizeof(*plain));
    float *mine = rig_alloc((size_t)n * sizeof(*mine)); /* of `got`, what is looked at */

    for (int32_t k = 0; k < p->b.n_seqs; k++) {
        int64_t to = 0;
        struct panels keys = panels_of(s->cached[p->row[k]], width(c), p->kv_len[k], width(c));
        for (int32_t t = p->q_start[k]; t < p->q_start[k + 1]; t++) {
            for (int32_t h = t % s->every; h < c->n_heads; h += s->every, to += c->v_dim) {
                int64_t at = (int64_t)t * c->n_heads + h;
                attend_reference(s, p->row[k], &keys, p->position[t] + 1,
                                 q + at * (c->nope_dim + c->rot_dim), h, ref + to, plain + to);
                memcpy(mine + to, got + at * c->v_dim, (size_t)c->v_dim * sizeof(*mine));
            }
        }
        char what[128];
        snprintf(what, sizeof(what), "%s, %d tokens at length %d", c->name,
                 p->q_start[k + 1] - p->q_start[k], p->kv_len[k]);
        assert_no_worse(what, mine, plain, ref, to);
        panels_free(&keys);
    }
    free(mine);
    free(plain);
    free(ref);
}

static int32_t query_cols(const struct shape *c)
{
    return c->n_heads * (c->nope_dim + c->rot_dim);
}

/* Run a step over queries q0 and latents kv0, and return what attention made of them;
 * ret_q, ret_kv (NULL: unwanted): what latent_kv left. */
static float *run_step(struct scene *s, struct packed *p, const float *q0, const float *kv0,
                       float **ret_q, float **ret_kv)
{
    const struct shape *c = s->c;
    struct rig *r = &s->r;
    int32_t rows = p->b.n_tokens, q_cols = query_cols(c);
    /* views of wider rows, as products of stacked weights leave them */
    struct mat q = mat_cols(rig_mat(r, rows, q_cols + 64, s->at, NULL), 0, q_cols);
    struct mat kv = mat_cols(rig_mat(r, rows, width(c) + 64, s->at, NULL), 0, width(c));
    struct mat out = rig_mat(r, rows, c->n_heads * c->v_dim, s->at, NULL);
    /* fewer rows than the step's: it is computed in portions */
    struct latent_scratch scratch = {rig_mat(r, s->portion, c->n_heads * width(c), s->at, NULL),
                                     rig_mat(r, s->portion, c->n_heads * c->latent, s->at, NULL)};
    rig_upload(r, q, q0);
    rig_upload(r, kv, kv0);
    rig_begin(r, &p->b);
    r->b->ops->latent_kv(r->b, q, kv, &s->att);
    if (ret_q) {
        *ret_q = rig_download(r, q);
        *ret_kv = rig_download(r, kv);
    }
    r->b->ops->latent_attention(r->b, out, q, &s->att, &scratch);
    float *got = rig_download(r, out);
    rig_end(r);
    return got;
}

/* A step over random queries and latents against the references; p is freed. */
static void run_packed(struct scene *s, struct packed *p)
{
    const struct shape *c = s->c;
    struct rig *r = &s->r;
    float *q1, *kv1;

    float *q0 = rig_floats(r, (int64_t)p->b.n_tokens * query_cols(c), 1.5f, s->at);
    float *kv0 = rig_floats(r, (int64_t)p->b.n_tokens * width(c), 1.5f, s->at);
    float *got = run_step(s, p, q0, kv0, &q1, &kv1);
    check_kv(s, p, kv0, kv1);
    check_q(s, p, q0, q1);
    if (!s->filling) {
        check_out(s, p, q1, got);
    }
    free(q0);
    free(kv0);
    free(q1);
    free(kv1);
    free(got);
    free(p);
}

static void scene_run(struct scene *s, const int32_t *n)
{
    struct packed *p = rig_alloc(sizeof(*p));

    pack(s, p, n);
    run_packed(s, p);
}

/* ---- tests ---- */

static bool lacks_latents(void)
{
    struct rig r;

    rig_open(&r);
    bool lacks = !r.b->ops->latent_attention;
    rig_close(&r);
    return lacks;
}

static void latents_over_shuffled_blocks(void **state)
{
    (void)state;
    static const int32_t steps[][SEQS] = {
        {0, 0, 5, 37}, {1, 1, 40, 70}, {1, 1, 1, 1}, {1, 20, 1, 3}, {1, 1, 1, 1}};
    if (lacks_latents()) {
        skip();
    }
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        struct scene s;
        if (!whole_takes(i, ARRAY_LEN(SHAPES))) {
            continue;
        }
        scene_open(&s, &SHAPES[i]);
        for (size_t k = 0; k < ARRAY_LEN(steps); k++) {
            int32_t n[SEQS];
            for (int32_t q = 0; q < SEQS; q++) {
                n[q] = SHAPES[i].latent > 100 ? MIN(steps[k][q], 8) : steps[k][q];
            }
            scene_run(&s, n);
        }
        scene_close(&s);
    }
}

/* Rows over hundreds of keys: several tiles of them and, on a GPU, several parts of a
 * sequence for a single token, and one part with several tiles for a few tokens. */
static void long_sequences(void **state)
{
    (void)state;
    static const int32_t heads[] = {3, 16, 40, 128};
    int32_t len = rig_small() ? 40 : 380;

    if (lacks_latents()) {
        skip();
    }
    bool gpu = strcmp(rig_device, "cpu") != 0; /* a CPU has one way for any number of heads */
    for (size_t i = 0; i < (gpu ? ARRAY_LEN(heads) : 1); i++) {
        struct scene s;
        struct shape c = SHAPES[0];
        c.n_heads = heads[i];
        c.block_size = i % 2 ? 64 : 8;
        scene_open(&s, &c);
        s.filling = heads[i] > 3;
        scene_run(&s, (const int32_t[SEQS]){0, 1, 30, len});
        s.filling = false;
        scene_run(&s, (const int32_t[SEQS]){1, 1, 1, 1});
        scene_run(&s, (const int32_t[SEQS]){0, 0, 2, 3});
        scene_close(&s);
    }
}

/* One token each of many sequences: on a GPU other kernels than those of a few rows. */
static void many_sequences(void **state)
{
    (void)state;
    static const int32_t heads[] = {3, 16};

    if (lacks_latents()) {
        skip();
    }
    for (size_t i = 0; i < ARRAY_LEN(heads); i++) {
        struct scene s;
        struct shape c = SHAPES[0];
        int32_t n[SEQS];
        c.n_heads = heads[i];
        scene_open(&s, &c);
        s.portion = SEQS;
        s.filling = true;
        for (int32_t q = 0; q < SEQS; q++) {
            n[q] = q == 0 && !rig_small() ? 150 : 1 + q % 5;
        }
        scene_run(&s, n);
        s.filling = false;
        for (int32_t q = 0; q < SEQS; q++) {
            n[q] = 1;
        }
        scene_run(&s, n);
        scene_close(&s);
    }
}

/* A scene of shape `from` whose sizes are changed as said; 0: as they are. On a device
 * that expands heads in a prefill, `bytes` (NULL: the usual) bounds its buffers. */
struct many_rows {
    int32_t from, n_heads, block_size;
    enum dtype dtype;
    const char *bytes;
    int32_t portion;
};

static void many_rows_run(const struct many_rows *m, const int32_t steps[][SEQS], size_t n)
{
    bool gpu = strcmp(rig_device, "cpu") != 0;
    struct shape c = SHAPES[m->from];
    struct scene s;

    c.n_heads = m->n_heads > 0 ? m->n_heads : c.n_heads;
    c.block_size = m->block_size > 0 ? m->block_size : c.block_size;
    c.dtype = m->dtype;
    if (m->bytes) {
        setenv("QUIRE_CUDA_EXPANDED_BYTES", m->bytes, 1);
    }
    scene_open(&s, &c);
    unsetenv("QUIRE_CUDA_EXPANDED_BYTES");
    s.portion = m->portion > 0 ? m->portion : s.portion;
    s.every = gpu ? MAX(c.n_heads / 4, 1) : c.n_heads;
    for (size_t k = 0; k < n; k++) {
        scene_run(&s, steps[k]);
    }
    scene_close(&s);
}

/* Prompts of many rows, whole and in chunks, with few rows of others in front of them,
 * between them and behind them. On a GPU heads are expanded for some of the
 * sequences. */
static void prompts_of_many_rows(void **state)
{
    (void)state;
    static const struct many_rows scenes[] = {
        {.from = 0, .dtype = DTYPE_BF16},
        {.from = 0, .n_heads = 3, .block_size = 8, .dtype = DTYPE_F16},
        {.from = 1, .dtype = DTYPE_BF16},
        {.from = 1, .n_heads = 5, .block_size = 64, .dtype = DTYPE_F16},
        {.from = 2, .dtype = DTYPE_BF16},
        /* a sequence at a time, heads in turns, and 300 rows that do not fit */
        {.from = 0, .dtype = DTYPE_BF16, .bytes = "229376"},
        {.from = 1, .n_heads = 20, .dtype = DTYPE_BF16, .bytes = "344064"},
    };
    static const int32_t steps[][SEQS] = {{70, 1, 130, 65}, {1, 100, 200, 3}, {0, 64, 70, 300}};

    if (lacks_latents()) {
        skip();
    }
    bool all = strcmp(rig_device, "cpu") != 0 && !rig_small();
    for (size_t i = 0; i < (all ? ARRAY_LEN(scenes) : 1); i++) {
        if (rig_runs("prompts_of_many_rows", i)) {
            many_rows_run(&scenes[i], steps, rig_small() || RIG_SHORTER > 1 ? 1 : 3);
        }
    }
}

/* Rows enough for products of all heads at once, in the space of latents. */
static void many_rows_in_the_space_of_latents(void **state)
{
    (void)state;
    static const struct many_rows scenes[] = {
        {.from = 4, .dtype = DTYPE_F32, .portion = 400},
        {.from = 3, .dtype = DTYPE_F16, .portion = 400},
        {.from = 5, .dtype = DTYPE_BF16, .portion = 300},
        {.from = 0, .dtype = DTYPE_BF16, .bytes = "0", .portion = 400},
    };
    static const int32_t steps[][SEQS] = {{1, 300, 40}};

    if (lacks_latents()) {
        skip();
    }
    bool all = strcmp(rig_device, "cpu") != 0 && !rig_small();
    for (size_t i = 0; i < (all ? ARRAY_LEN(scenes) : 1); i++) {
        if (rig_runs("many_rows_in_the_space_of_latents", i)) {
            many_rows_run(&scenes[i], steps, ARRAY_LEN(steps));
        }
    }
}

/* Sequence 1 becomes a fork of sequence 0: it holds the same blocks but for the last,
 * which is copied in the step that first writes behind it. */
static void fork(struct scene *s, struct packed *p, struct block_copy *copy)
{
    int32_t n = (int32_t)div_ceil(s->len[0], s->c->block_size);

    s->len[1] = s->len[0];
    memcpy(s->block[1], s->block[0], sizeof(s->block[0]));
    memcpy(s->cached[1], s->cached[0], (size_t)s->len[0] * (size_t)width(s->c) * sizeof(float));
    *copy = (struct block_copy){.src = s->block[0][n - 1], .dst = s->next_block++ * 77 % BLOCKS};
    s->block[1][n - 1] = copy->dst;
    pack(s, p, (const int32_t[SEQS]){1, 1});
    p->b.copy = copy;
    p->b.n_copy = 1;
    p->update[p->b.n_table_update++] =
        (struct table_update){.row = 1, .count = n, .first = p->b.n_table_block};
    for (int32_t i = 0; i < n; i++) {
        p->block[p->b.n_table_block++] = s->block[1][i];
    }
}

static void forks_write_to_copies_of_their_last_block(void **state)
{
    (void)state;
    if (lacks_latents()) {
        skip();
    }
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        struct scene s;
        struct block_copy copy;
        struct packed *p = rig_alloc(sizeof(*p));
        scene_open(&s, &SHAPES[i]);
        s.filling = true;
        scene_run(&s, (const int32_t[SEQS]){SHAPES[i].block_size + SHAPES[i].block_size / 2});
        s.filling = false;
        fork(&s, p, &copy);
        run_packed(&s, p);
        scene_run(&s, (const int32_t[SEQS]){2, 1}); /* each goes on in its own block */
        scene_close(&s);
    }
}

/* The same tokens as another sequence, in steps of `chunk` tokens behind those of the
 * sequences in front of it: rows as in `whole`, bit for bit. */
static void run_again(struct scene *s, int32_t seq, int32_t n, int32_t chunk, const float *q,
                      const float *kv, const float *whole)
{
    const struct shape *c = s->c;
    int32_t q_cols = query_cols(c), w = width(c), out_cols = c->n_heads * c->v_dim;

    for (int32_t at = 0; at < n; at += chunk) {
        int32_t count[SEQS] = {0}, mine = MIN(chunk, n - at), company = 0;
        struct packed *p = rig_alloc(sizeof(*p));
        for (int32_t i = 2; i < SEQS - 2 && at == 0; i++) { /* many others, then one or none */
            company += count[i] = 1 + i % 3;
        }
        if (at > 0 && at / chunk % 2 == 1) {
            company = count[1] = 2;
        }
        count[seq] = mine;
        pack(s, p, count);
        float *q0 = rig_floats(&s->r, (int64_t)(company + mine) * q_cols, 1.5f, s->at);
        float *kv0 = rig_floats(&s->r, (int64_t)(company + mine) * w, 1.5f, s->at);
        memcpy(q0 + (int64_t)company * q_cols, q + (int64_t)at * q_cols,
               (size_t)mine * (size_t)q_cols * sizeof(*q0));
        memcpy(kv0 + (int64_t)company * w, kv + (int64_t)at * w,
               (size_t)mine * (size_t)w * sizeof(*kv0));
        float *got = run_step(s, p, q0, kv0, NULL, NULL);
        if (memcmp(got + (int64_t)company * out_cols, whole + (int64_t)at * out_cols,
                   (size_t)mine * (size_t)out_cols * sizeof(*got)) != 0) {
            fail_msg("%s: tokens %d to %d in steps of %d have other bits", c->name, at,
                     at + mine - 1, chunk);
        }
        free(q0);
        free(kv0);
        free(got);
        free(p);
    }
}

/* A sequence in one step of its own, token by token, and in chunks, in company. */
static void rows_have_the_same_bits_in_every_step(void **state)
{
    (void)state;
    static const int32_t chunks[] = {1, 7};

    if (lacks_latents()) {
        skip();
    }
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        struct scene s;
        const struct shape *c = &SHAPES[i];
        int32_t n = rig_small() || c->n_heads > 100 ? 9 : 37, first[SEQS] = {n};
        struct packed *p = rig_alloc(sizeof(*p));
        scene_open_as(&s, c, true);
        float *q = rig_floats(&s.r, (int64_t)n * query_cols(c), 1.5f, s.at);
        float *kv = rig_floats(&s.r, (int64_t)n * width(c), 1.5f, s.at);
        pack(&s, p, first);
        float *whole = run_step(&s, p, q, kv, NULL, NULL);
        for (size_t k = 0; k < ARRAY_LEN(chunks); k++) {
            run_again(&s, SEQS - 1 - (int32_t)k, n, chunks[k], q, kv, whole);
        }
        free(whole);
        free(q);
        free(kv);
        free(p);
        scene_close(&s);
    }
}

static int run_group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(latents_over_shuffled_blocks),
        cmocka_unit_test(long_sequences),
        cmocka_unit_test(many_sequences),
        cmocka_unit_test(prompts_of_many_rows),
        cmocka_unit_test(many_rows_in_the_space_of_latents),
        cmocka_unit_test(forks_write_to_copies_of_their_last_block),
        cmocka_unit_test(rows_have_the_same_bits_in_every_step),
    };

    return cmocka_run_group_tests_name("latent", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, run_group);
}
