/* Rope, cache writes, block tables and paged attention against float64.
 *
 * A scene builds sequences whose tokens arrive over several steps (chunked prefill,
 * then decodes) with blocks in shuffled order. The reference keeps every sequence's
 * keys and values in plain arrays, rounded as the cache rounds them, so that a
 * single wrong slot, block, position or mask fails the test.
 *
 * The tests of caches of 8 bits are the same over what those hold, codes times scales.
 *
 *     build/tests/unit/kernels/test_attention [--device cpu|cuda]
 */
#include "tests/unit/ops.h"

enum { SCENE_SEQS = 6, SCENE_BLOCKS = 400 };

/* The cache's type in the test that runs; float32 stands for the activations'. */
static enum dtype cache_type;

struct scene_case {
    const char *name;
    int32_t n_heads, n_kv_heads, head_dim, block_size;
    int32_t window, chunk;
    float softcap;
    bool sinks;
    int32_t rot_dim; /* 0: no rotation */
    bool interleaved, qk_norm;
    bool wide_norm;     /* the norms' weights are float32 whatever dtype is */
    bool norm_last;     /* they come behind the rotation */
    bool query_factors; /* queries have factors by position */
    enum dtype dtype;   /* of weights; the cache has the activations' */
};

struct scene_seq {
    int32_t len; /* tokens so far */
    int32_t n_blocks;
    int32_t block[RIG_BLOCKS_PER_SEQ];
    float *k, *v; /* [len, n_kv_heads, head_dim] as cached */
};

struct scene {
    struct rig r;
    const struct scene_case *c;
    struct attention att;
    struct kv_layout kv;
    struct rope rope;
    enum dtype at, cache;
    float *cos_sin, *q_weight, *k_weight, *sinks;
    int32_t max_len;
    struct scene_seq seq[SCENE_SEQS];
    int32_t free_block[SCENE_BLOCKS], n_free;
};

static int32_t table_cols(const struct scene_case *c)
{
    return c->query_factors ? c->rot_dim + 4 : c->rot_dim;
}

static void open_rope(struct scene *s)
{
    const struct scene_case *c = s->c;

    s->cos_sin = NULL;
    if (c->rot_dim > 0) {
        int32_t half = c->rot_dim / 2, cols = table_cols(c);
        s->cos_sin = rig_alloc((size_t)s->max_len * (size_t)cols * sizeof(float));
        for (int32_t p = 0; p < s->max_len; p++) {
            for (int32_t i = 0; i < half; i++) {
                double angle = p * pow(10000, -(double)i / half);
                s->cos_sin[p * cols + i] = (float)cos(angle);
                s->cos_sin[p * cols + half + i] = (float)sin(angle);
            }
            for (int32_t i = c->rot_dim; i < cols; i++) { /* only the first is read */
                s->cos_sin[p * cols + i] = i > c->rot_dim ? NAN : 1 + 0.3f * (float)(p / 7);
            }
        }
        s->rope.cos_sin = rig_weight(&s->r, WEIGHT_TABLE, DTYPE_F32, s->max_len, cols, s->cos_sin);
        s->rope.query_factors = c->query_factors;
        s->rope.rot_dim = c->rot_dim;
        s->rope.interleaved = c->interleaved;
    }
    enum dtype norm_type = c->wide_norm ? DTYPE_F32 : c->dtype;
    s->q_weight = rig_floats(&s->r, c->head_dim, 2, norm_type);
    s->k_weight = rig_floats(&s->r, c->head_dim, 2, norm_type);
    s->rope.norm_last = c->norm_last;
    if (c->qk_norm) {
        s->rope.q_norm = (struct norm){.kind = NORM_RMS, .eps = 1e-6f};
        s->rope.k_norm = s->rope.q_norm;
        s->rope.q_norm.weight =
            rig_weight(&s->r, WEIGHT_VECTOR, norm_type, 1, c->head_dim, s->q_weight);
        s->rope.k_norm.weight =
            rig_weight(&s->r, WEIGHT_VECTOR, norm_type, 1, c->head_dim, s->k_weight);
    }
}

static void scene_open_config(struct scene *s, const struct scene_case *c, bool deterministic)
{
    struct err e = {0};

    *s = (struct scene){.c = c, .max_len = RIG_BLOCKS_PER_SEQ * c->block_size};
    rig_open_config(&s->r, deterministic);
    s->at = act_of(&s->r, c->dtype);
    s->cache = c->dtype;
    if (s->at != DTYPE_F32) {
        s->cache = s->at; /* 16-bit activations are cached unchanged */
    }
    s->cache = cache_type ? cache_type : s->cache;
    s->att = (struct attention){.layer = 1,
                                .n_heads = c->n_heads,
                                .n_kv_heads = c->n_kv_heads,
                                .head_dim = c->head_dim,
                                .scale = 1.0f / sqrtf((float)c->head_dim) * 1.5f,
                                .softcap = c->softcap,
                                .window = c->window,
                                .chunk = c->chunk,
                                .k_scale = cache_type == DTYPE_F8 ? 0.03f : 0,
                                .v_scale = cache_type == DTYPE_F8 ? 0.25f : 0};
    kv_layout_init(&s->kv, c->block_size, 2, c->n_kv_heads, c->head_dim, s->cache);
    assert_int_equal(s->r.b->ops->kv_create(s->r.b, &s->kv, SCENE_BLOCKS, 8, &e), 0);
    open_rope(s);
    s->sinks = rig_floats(&s->r, c->n_heads, 4, DTYPE_F32);
    if (c->sinks) {
        s->att.sinks = rig_weight(&s->r, WEIGHT_TABLE, DTYPE_F32, 1, c->n_heads, s->sinks);
    }
    for (int32_t i = 0; i < SCENE_BLOCKS; i++) {
        s->free_block[i] = i;
    }
    s->n_free = SCENE_BLOCKS;
    for (int32_t i = SCENE_BLOCKS - 1; i > 0; i--) {
        int32_t j = rig_below(&s->r, i + 1);
        int32_t t = s->free_block[i];
        s->free_block[i] = s->free_block[j];
        s->free_block[j] = t;
    }
    size_t bytes = (size_t)s->max_len * (size_t)c->n_kv_heads * (size_t)c->head_dim * sizeof(float);
    for (int32_t i = 0; i < SCENE_SEQS; i++) {
        s->seq[i].k = rig_alloc(bytes);
        s->seq[i].v = rig_alloc(bytes);
    }
}

static void scene_open(struct scene *s, const struct scene_case *c)
{
    scene_open_config(s, c, false);
}

static void scene_close(struct scene *s)
{
    for (int32_t i = 0; i < SCENE_SEQS; i++) {
        free(s->seq[i].k);
        free(s->seq[i].v);
    }
    free(s->cos_sin);
    free(s->q_weight);
    free(s->k_weight);
    rig_close(&s->r);
}

/* ---- references ---- */

/* Of head h of a token's, queries first. */
RIG_UNWATCHED static void rope_reference(const struct scene *s, const float *head, int32_t h,
                                         int32_t position, double *out)
{
    const struct scene_case *c = s->c;
    const float *weight = h < c->n_heads ? s->q_weight : s->k_weight;
    const float *turn = s->cos_sin ? s->cos_sin + position * table_cols(c) : NULL;
    double sum = 0; /* of squares, which a rotation does not change */

    for (int32_t i = 0; i < c->head_dim; i++) {
        out[i] = head[i];
        sum += (double)head[i] * head[i];
    }
    double factor = c->qk_norm ? 1 / sqrt(sum / c->head_dim + 1e-6) : 1;
    for (int32_t i = 0; i < c->head_dim && c->qk_norm && !c->norm_last; i++) {
        out[i] *= (double)weight[i] * factor;
    }
    int32_t half = c->rot_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        int32_t a = c->interleaved ? 2 * i : i;
        int32_t b = c->interleaved ? 2 * i + 1 : i + half;
        double co = turn[i], si = turn[half + i];
        double x = out[a];
        double y = out[b];
        out[a] = x * co - y * si;
        out[b] = y * co + x * si;
    }
    for (int32_t i = 0; i < c->head_dim && c->qk_norm && c->norm_last; i++) {
        out[i] *= (double)weight[i] * factor;
    }
    for (int32_t i = 0; i < c->head_dim && c->query_factors && h < c->n_heads; i++) {
        out[i] *= turn[c->rot_dim];
    }
}

/* The first n keys of a head of a sequence. */
static struct panels keys_of(const struct scene *s, const struct scene_seq *q, int32_t kv_head,
                             int32_t n)
{
    int32_t d = s->c->head_dim;

    return panels_of(q->k + kv_head * d, s->c->n_kv_heads * d, n, d);
}

/* Attention of one query head at cache index `index`, in float64, and in float32 as a
 * plain implementation computes it. keys: up to that index at least. */
RIG_UNWATCHED static void attend_reference(const struct scene *s, const struct scene_seq *q,
                                           const struct panels *keys, const float *head,
                                           int32_t n_head, int32_t index, double *ref, float *plain)
{
    const struct scene_case *c = s->c;
    int32_t d = c->head_dim;
    double wide[LIMIT_HEAD_DIM], dots[BESIDE];
    float dots32[BESIDE];
    int32_t from = c->chunk > 0    ? index - index % c->chunk
                   : c->window > 0 ? MAX(0, index + 1 - c->window)
                                   : 0;
    int32_t kv_head = n_head / (c->n_heads / c->n_kv_heads);
    double sum = c->sinks ? exp((double)s->sinks[n_head]) : 0;
    float sum32 = (float)sum;
    float acc[LIMIT_HEAD_DIM] = {0};

    memset(ref, 0, (size_t)d * sizeof(*ref));
    for (int32_t i = 0; i < d; i++) {
        wide[i] = head[i];
    }
    for (int32_t j = from; j <= index; j++) {
        const float *v = q->v + ((int64_t)j * c->n_kv_heads + kv_head) * d;
        if (j == from || j % BESIDE == 0) {
            panels_dots(keys, j / BESIDE * BESIDE, wide, dots);
            panels_dots32(keys, j / BESIDE * BESIDE, head, dots32);
        }
        double dot = dots[j % BESIDE] * (double)s->att.scale;
        float dot32 = dots32[j % BESIDE] * s->att.scale;
        dot = c->softcap > 0 ? (double)c->softcap * tanh(dot / (double)c->softcap) : dot;
        dot32 = c->softcap > 0 ? c->softcap * tanhf(dot32 / c->softcap) : dot32;
        double p = exp(dot);
        float p32 = expf(dot32);
        sum += p;
        sum32 += p32;
        add_scaled(ref, p, v, d);
        add_scaled32(acc, p32, v, d);
    }
    for (int32_t i = 0; i < d; i++) {
        ref[i] /= sum;
        plain[i] = round_to(s->at, acc[i] / sum32);
    }
}

/* ---- a step of the scene ---- */

struct scene_step {
    int32_t n[SCENE_SEQS]; /* query tokens of each sequence, decodes first; 0: not in the step */
    int32_t lcp[SCENE_SEQS];
};

struct packed {
    struct batch b;
    int32_t token[RIG_TOKENS], src[RIG_TOKENS], position[RIG_TOKENS], slot[RIG_TOKENS];
    int32_t q_start[SCENE_SEQS + 1], kv_len[SCENE_SEQS], row[SCENE_SEQS], lcp[SCENE_SEQS],
        seq[SCENE_SEQS];
    struct table_update update[SCENE_SEQS];
    int32_t block[SCENE_SEQS * RIG_BLOCKS_PER_SEQ];
};

static void pack_sequence(struct scene *s, struct packed *p, int32_t i, int32_t n, int32_t lcp)
{
    struct scene_seq *q = &s->seq[i];
    int32_t bs = s->c->block_size;
    struct table_update *u = &p->update[p->b.n_table_update];

    *u = (struct table_update){.row = i, .index = q->n_blocks, .first = p->b.n_table_block};
    while (q->n_blocks * bs < q->len + n) {
        q->block[q->n_blocks] = s->free_block[--s->n_free];
        p->block[p->b.n_table_block++] = q->block[q->n_blocks++];
        u->count++;
    }
    p->b.n_table_update += u->count > 0;
    for (int32_t t = 0; t < n; t++) {
        int32_t at = q->len + t;
        p->position[p->b.n_tokens] = at;
        p->src[p->b.n_tokens] = -1;
        p->slot[p->b.n_tokens++] = q->block[at / bs] * bs + at % bs;
    }
    q->len += n;
    int32_t k = p->b.n_seqs++;
    p->q_start[k + 1] = p->b.n_tokens;
    p->kv_len[k] = q->len;
    p->row[k] = i;
    p->lcp[k] = lcp;
    p->seq[k] = i;
    p->b.n_decode += n == 1;
}

static void pack_step(struct scene *s, struct packed *p, const struct scene_step *step)
{
    memset(p, 0, sizeof(*p));
    for (int32_t i = 0; i < SCENE_SEQS; i++) {
        if (step->n[i] > 0) {
            pack_sequence(s, p, i, step->n[i], p->b.n_seqs > 0 ? step->lcp[i] : 0);
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

/* A head's key (kv 0) or value (kv 1) as the cache holds it. */
static void cached_head(const struct scene *s, const float *x, int32_t kv, float *out)
{
    rig_cached_head(x, s->c->head_dim, s->cache,
                    kv == 0 ? attention_k_scale(&s->att) : attention_v_scale(&s->att), out);
}

/* Check the rotated q and k against float64, and keep k and v as the cache holds
 * them. */
static void take_qkv(struct scene *s, const struct packed *p, const float *before,
                     const float *after)
{
    const struct scene_case *c = s->c;
    int32_t d = c->head_dim;
    int32_t width = (c->n_heads + 2 * c->n_kv_heads) * d;
    int32_t turned = (c->n_heads + c->n_kv_heads) * d;
    int64_t n = (int64_t)p->b.n_tokens * turned;
    double *ref = rig_alloc((size_t)n * sizeof(*ref));
    float *got = rig_alloc((size_t)n * sizeof(*got));

    for (int32_t i = 0; i < p->b.n_seqs; i++) {
        struct scene_seq *q = &s->seq[p->seq[i]];
        for (int32_t t = p->q_start[i]; t < p->q_start[i + 1]; t++) {
            for (int32_t h = 0; h < c->n_heads + c->n_kv_heads; h++) {
                rope_reference(s, before + (int64_t)t * width + h * d, h, p->position[t],
                               ref + (int64_t)t * turned + h * d);
            }
            memcpy(got + (int64_t)t * turned, after + (int64_t)t * width,
                   (size_t)turned * sizeof(*got));
            for (int32_t h = 0; h < c->n_kv_heads * d; h += d) {
                int64_t at = (int64_t)p->position[t] * c->n_kv_heads * d + h;
                cached_head(s, after + (int64_t)t * width + c->n_heads * d + h, 0, q->k + at);
                cached_head(s, after + (int64_t)t * width + turned + h, 1, q->v + at);
            }
            assert_memory_equal(after + (int64_t)t * width + turned,
                                before + (int64_t)t * width + turned,
                                /* v is not touched */
                                (size_t)(c->n_kv_heads * d) * sizeof(*after));
        }
    }
    assert_nmse("rope", got, ref, n, s->at);
    free(got);
    free(ref);
}

static void check_attention(const struct scene *s, const struct packed *p, const float *qkv,
                            const float *got)
{
    const struct scene_case *c = s->c;
    int32_t d = c->head_dim;
    int32_t width = (c->n_heads + 2 * c->n_kv_heads) * d;
    int64_t n = (int64_t)p->b.n_tokens * c->n_heads * d;
    double *ref = rig_alloc((size_t)n * sizeof(*ref));
    float *plain = rig_alloc((size_t)n * sizeof(*plain));

    for (int32_t i = 0; i < p->b.n_seqs; i++) {
        const struct scene_seq *q = &s->seq[p->seq[i]];
        struct panels keys = {0};
        for (int32_t h = 0; h < c->n_heads; h++) {
            if (h % (c->n_heads / c->n_kv_heads) == 0) {
                panels_free(&keys);
                keys = keys_of(s, q, h / (c->n_heads / c->n_kv_heads), q->len);
            }
            for (int32_t t = p->q_start[i]; t < p->q_start[i + 1]; t++) {
                int64_t at = ((int64_t)t * c->n_heads + h) * d;
                attend_reference(s, q, &keys, qkv + (int64_t)t * width + h * d, h, p->position[t],
                                 ref + at, plain + at);
            }
        }
        panels_free(&keys);
        char what[128];
        int64_t first = (int64_t)p->q_start[i] * c->n_heads * d;
        int64_t count = (int64_t)(p->q_start[i + 1] - p->q_start[i]) * c->n_heads * d;
        snprintf(what, sizeof(what), "attention %s, sequence %d, %d tokens at length %d", c->name,
                 i, p->q_start[i + 1] - p->q_start[i], p->kv_len[i]);
        /* the reference's keys and values are rounded to float32, codes times scales
         * are not */
        assert_no_worse_by(what, got + first, plain + first, ref + first, count,
                           cache_type ? 1e-6 : 1e-7);
    }
    free(plain);
    free(ref);
}

static void scene_run(struct scene *s, const struct scene_step *step)
{
    const struct scene_case *c = s->c;
    struct packed *p = rig_alloc(sizeof(*p));
    int32_t width = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;

    pack_step(s, p, step);
    float *before = rig_floats(&s->r, (int64_t)p->b.n_tokens * width, 1.5f, s->at);
    struct mat qkv = rig_mat(&s->r, p->b.n_tokens, width, s->at, before);
    struct mat out = rig_mat(&s->r, p->b.n_tokens, c->n_heads * c->head_dim, s->at, NULL);
    rig_begin(&s->r, &p->b);
    s->r.b->ops->rope_kv(s->r.b, qkv, &s->rope, &s->att);
    float *after = rig_download(&s->r, qkv);
    s->r.b->ops->attention(s->r.b, out, qkv, &s->att);
    float *got = rig_download(&s->r, out);
    rig_end(&s->r);
    take_qkv(s, p, before, after);
    check_attention(s, p, after, got);
    free(got);
    free(after);
    free(before);
    free(p);
}

static void run_case(const struct scene_case *c)
{
    /* Prefill in chunks with decodes beside them, then decodes alone; lengths are not
     * multiples of the block size. */
    static const struct scene_step steps[] = {
        {.n = {0, 0, 0, 5, 37, 64}}, {.n = {0, 0, 1, 1, 50, 133}}, {.n = {1, 2, 1, 1, 1, 200}},
        {.n = {1, 1, 1, 1, 1, 1}},   {.n = {0, 0, 40, 3, 17, 16}}, {.n = {1, 1, 1, 1, 1, 1}},
    };
    struct scene s;

    scene_open(&s, c);
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        struct scene_step step = steps[i];
        for (int32_t k = 0; k < SCENE_SEQS; k++) {
            step.n[k] = step.n[k] > RIG_SHORTER ? step.n[k] / RIG_SHORTER : step.n[k];
            step.n[k] = rig_small() ? MIN(step.n[k], 72) : step.n[k];
        }
        scene_run(&s, &step);
    }
    scene_close(&s);
}

static void attention_over_shuffled_blocks(void **state)
{
    (void)state;
    static const struct scene_case cases[] = {
        {.name = "MHA 64",
         .n_heads = 4,
         .n_kv_heads = 4,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64},
        {.name = "GQA 128",
         .n_heads = 8,
         .n_kv_heads = 2,
         .head_dim = 128,
         .block_size = 16,
         .rot_dim = 128},
        {.name = "GQA 3:1 64",
         .n_heads = 9,
         .n_kv_heads = 3,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64},
        {.name = "MQA 256",
         .n_heads = 4,
         .n_kv_heads = 1,
         .head_dim = 256,
         .block_size = 16,
         .rot_dim = 256},
        {.name = "MHA 24",
         .n_heads = 2,
         .n_kv_heads = 2,
         .head_dim = 24,
         .block_size = 16,
         .rot_dim = 24},
        {.name = "GQA 80",
         .n_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 80,
         .block_size = 16,
         .rot_dim = 32},
        {.name = "GQA 96",
         .n_heads = 6,
         .n_kv_heads = 2,
         .head_dim = 96,
         .block_size = 32,
         .rot_dim = 96},
        {.name = "GQA 7:1 128",
         .n_heads = 14,
         .n_kv_heads = 2,
         .head_dim = 128,
         .block_size = 16,
         .rot_dim = 128},
        {.name = "MQA 16:1 64",
         .n_heads = 16,
         .n_kv_heads = 1,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64},
        {.name = "no rotation", .n_heads = 4, .n_kv_heads = 4, .head_dim = 64, .block_size = 16},
        {.name = "blocks of 4",
         .n_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 64,
         .block_size = 4,
         .rot_dim = 64},
    };
    static const enum dtype types[] = {DTYPE_BF16, DTYPE_F16, DTYPE_F32};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        for (size_t t = 0; t < ARRAY_LEN(types); t++) {
            struct scene_case c = cases[i];
            c.dtype = types[t];
            /* shapes and types are independent: not every pair is needed */
            if (((i < 2 && RIG_SHORTER == 1 && !rig_small()) || t == i % 3) &&
                whole_takes(i + t, ARRAY_LEN(cases))) {
                run_case(&c);
            }
        }
    }
}

/* Sizes for which a GPU has tensor-core kernels, and others; the 16-bit types in
 * turn. */
static void heads_and_blocks_of_many_sizes(void **state)
{
    (void)state;
    static const int32_t head_block[][2] = {{80, 16},  {96, 16},  {80, 8},   {96, 24}, {128, 8},
                                            {128, 24}, {64, 40},  {80, 256}, {96, 64}, {256, 8},
                                            {256, 24}, {128, 12}, {56, 16},  {64, 128}};
    for (size_t i = 0; i < ARRAY_LEN(head_block); i++) {
        if (rig_small() &&
            (head_block[i][1] % 16 == 0) == (head_block[i][0] == 128 || i % 2 != 0)) {
            continue;
        }
        if (!whole_takes(i, ARRAY_LEN(head_block))) {
            continue;
        }
        /* one KV head for all query heads, for several, for each */
        int32_t d = head_block[i][0], kv = i % 3 == 0 ? 1 : 2;
        char name[48];
        snprintf(name, sizeof(name), "%d, blocks of %d", d, head_block[i][1]);
        run_case(&(struct scene_case){.name = name,
                                      .n_heads = i % 3 == 1 ? kv : 6,
                                      .n_kv_heads = kv,
                                      .head_dim = d,
                                      .block_size = head_block[i][1],
                                      .rot_dim = d,
                                      .window = i % 5 == 3 ? 50 : 0,
                                      .softcap = i % 5 == 4 ? 3.0f : 0,
                                      .dtype = i % 2 == 0 ? DTYPE_BF16 : DTYPE_F16});
    }
}

/* So many KV heads that each warp of a GPU gets sequences of its own. */
static void many_heads_decode(void **state)
{
    (void)state;
    for (int32_t d = 64; d <= 80; d += 16) {
        struct scene_case c = {.name = "many heads",
                               .n_heads = 192,
                               .n_kv_heads = 96,
                               .head_dim = d,
                               .block_size = 16,
                               .rot_dim = d,
                               .dtype = DTYPE_BF16};
        struct scene s;
        scene_open(&s, &c);
        scene_run(&s, &(struct scene_step){.n = {3, 17, 30, 33, 64, 70}});
        scene_run(&s, &(struct scene_step){.n = {1, 1, 1, 1, 1, 1}});
        scene_run(&s, &(struct scene_step){.n = {1, 1, 1, 1, 1, 1}});
        scene_close(&s);
    }
}

static void attention_variants(void **state)
{
    (void)state;
    static const struct scene_case cases[] = {
        {.name = "window 20",
         .n_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64,
         .window = 20},
        {.name = "window 100",
         .n_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64,
         .window = 100},
        {.name = "chunks of 20",
         .n_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64,
         .chunk = 20},
        {.name = "chunks of 64, sinks",
         .n_heads = 4,
         .n_kv_heads = 1,
         .head_dim = 80,
         .block_size = 16,
         .rot_dim = 64,
         .chunk = 64,
         .sinks = true},
        {.name = "softcap",
         .n_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64,
         .softcap = 2},
        {.name = "sinks",
         .n_heads = 8,
         .n_kv_heads = 1,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64,
         .window = 40,
         .sinks = true},
        {.name = "sinks, all tokens seen",
         .n_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 128,
         .block_size = 16,
         .rot_dim = 64,
         .sinks = true},
        {.name = "sinks on a GPU",
         .n_heads = 8,
         .n_kv_heads = 2,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64,
         .sinks = true},
        {.name = "interleaved",
         .n_heads = 4,
         .n_kv_heads = 4,
         .head_dim = 64,
         .block_size = 16,
         .rot_dim = 64,
         .interleaved = true},
        {.name = "partial",
         .n_heads = 4,
         .n_kv_heads = 4,
         .head_dim = 80,
         .block_size = 16,
         .rot_dim = 20},
        {.name = "norm of q and k",
         .n_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 128,
         .block_size = 16,
         .rot_dim = 128,
         .qk_norm = true},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct scene_case c = cases[i];
        c.dtype = i % 2 == 0 ? DTYPE_BF16 : DTYPE_F32;
        if (cache_type == DTYPE_F32 || whole_takes(i, ARRAY_LEN(cases))) {
            run_case(&c);
        }
    }
}

/* Heads rotated whole or in part, by halves or by pairs, with and without norms, with
 * dims that divide among lanes or do not. With many rows a thread of a GPU takes
 * several heads. */
static void rotations_and_norms_of_heads(void **state)
{
    (void)state;
    static const struct {
        int32_t head_dim, rot_dim, block_size;
        bool interleaved, qk_norm, wide_norm;
        enum dtype dtype;
        bool many_rows, norm_last, query_factors;
    } cases[] = {
        {64, 32, 16, true, true, false, DTYPE_BF16, false, false, false},
        {96, 48, 16, false, true, true, DTYPE_F16, false, false, false},
        {128, 96, 24, false, false, false, DTYPE_BF16, false, false, false},
        {256, 256, 16, false, true, true, DTYPE_F16, false, false, false},
        {256, 64, 16, true, true, false, DTYPE_F32, false, false, false},
        {80, 16, 16, true, false, false, DTYPE_BF16, false, false, false},
        {56, 28, 16, false, true, false, DTYPE_F16, false, false, false},
        {128, 0, 16, false, true, true, DTYPE_BF16, false, false, false},
        {64, 64, 4, false, true, false, DTYPE_F32, false, false, false},
        {20, 4, 16, true, true, true, DTYPE_BF16, false, false, false},
        {128, 128, 16, false, false, false, DTYPE_F32, true, false, false},
        {32, 32, 16, false, true, false, DTYPE_BF16, false, false, false},
        {128, 128, 16, false, true, false, DTYPE_F32, true, false, false},
        /* HunYuan's order */
        {128, 128, 16, false, true, false, DTYPE_BF16, false, true, false},
        {64, 32, 16, true, true, true, DTYPE_F32, false, true, false},
        {128, 128, 16, false, true, true, DTYPE_F16, true, true, false},
        {56, 28, 16, false, true, false, DTYPE_BF16, false, true, false},
        {80, 80, 16, true, true, false, DTYPE_F32, false, true, false},
        /* Ministral 3's factors of queries */
        {128, 128, 16, false, false, false, DTYPE_BF16, false, false, true},
        {128, 128, 16, false, false, false, DTYPE_F16, true, false, true},
        {128, 64, 16, true, true, false, DTYPE_BF16, false, false, true},
        {80, 80, 16, true, false, false, DTYPE_F32, false, false, true},
        {56, 28, 16, false, true, false, DTYPE_BF16, false, true, true},
    };
    const struct scene_step few = {.n = {0, 0, 1, 2, 30, 33}};
    const struct scene_step many = {.n = {0, 0, 1, 2, 120 / RIG_SHORTER, 400 / RIG_SHORTER}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char name[48];
        if (!whole_takes(i, ARRAY_LEN(cases))) {
            continue;
        }
        snprintf(name, sizeof(name), "%d, %d of them turn", cases[i].head_dim, cases[i].rot_dim);
        struct scene_case c = {.name = name,
                               .n_heads = i % 2 == 0 ? 6 : 5,
                               .n_kv_heads = i % 2 == 0 ? 3 : 1,
                               .head_dim = cases[i].head_dim,
                               .block_size = cases[i].block_size,
                               .rot_dim = cases[i].rot_dim,
                               .interleaved = cases[i].interleaved,
                               .qk_norm = cases[i].qk_norm,
                               .wide_norm = cases[i].wide_norm,
                               .norm_last = cases[i].norm_last,
                               .query_factors = cases[i].query_factors,
                               .dtype = cases[i].dtype};
        struct scene s;
        scene_open(&s, &c);
        scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 0, 0, 1}});
        scene_run(&s, cases[i].many_rows ? &many : &few);
        scene_run(&s, &(struct scene_step){.n = {1, 1, 1, 1, 1, 1}});
        scene_close(&s);
    }
}

/* With a window of one token the result is that token's value, so v must be written and
 * read to the last bit. */
static void cache_writes_are_exact(void **state)
{
    (void)state;
    static const enum dtype types[] = {DTYPE_BF16, DTYPE_F16, DTYPE_F32};
    for (size_t t = 0; t < ARRAY_LEN(types); t++) {
        struct scene_case c = {.name = "window 1",
                               .n_heads = 2,
                               .n_kv_heads = 2,
                               .head_dim = 64,
                               .block_size = 16,
                               .rot_dim = 64,
                               .window = 1,
                               .dtype = types[t]};
        struct scene s;
        struct packed p;
        enum { WIDTH = 6 * 64 };
        scene_open(&s, &c);
        pack_step(&s, &p, &(struct scene_step){.n = {1, 1, 1, 40, 77, 130}});
        float *x = rig_floats(&s.r, (int64_t)p.b.n_tokens * WIDTH, 1, s.at);
        struct mat qkv = rig_mat(&s.r, p.b.n_tokens, WIDTH, s.at, x);
        struct mat out = rig_mat(&s.r, p.b.n_tokens, 128, s.at, NULL);
        rig_begin(&s.r, &p.b);
        s.r.b->ops->rope_kv(s.r.b, qkv, &s.rope, &s.att);
        s.r.b->ops->attention(s.r.b, out, qkv, &s.att);
        float *got = rig_download(&s.r, out);
        rig_end(&s.r);
        for (int32_t i = 0; i < p.b.n_tokens * 128; i++) {
            float want = round_to(s.cache, x[i / 128 * WIDTH + 256 + i % 128]);
            assert_memory_equal(&got[i], &want, sizeof(want));
        }
        free(got);
        free(x);
        scene_close(&s);
    }
}

/* A layer of Gemma-4: with a window of one token the result is that token's value,
 * divided by its root mean square; queries without keys and values leave the cache as
 * it is. */
static void normed_values_are_read_by_other_layers(void **state)
{
    (void)state;
    static const enum dtype types[] = {DTYPE_BF16, DTYPE_F32};
    for (size_t t = 0; t < ARRAY_LEN(types); t++) {
        struct scene_case c = {.name = "normed values",
                               .n_heads = 2,
                               .n_kv_heads = 1,
                               .head_dim = 64,
                               .block_size = 16,
                               .rot_dim = 64,
                               .window = 1,
                               .dtype = types[t]};
        struct scene s;
        struct packed p;
        enum { D = 64, WIDTH = 4 * D };
        scene_open(&s, &c);
        pack_step(&s, &p, &(struct scene_step){.n = {1, 1, 1, 40, 77, 130}});
        float *x = rig_floats(&s.r, (int64_t)p.b.n_tokens * WIDTH, 1, s.at);
        struct mat qkv = rig_mat(&s.r, p.b.n_tokens, WIDTH, s.at, x);
        struct mat again = rig_mat(&s.r, p.b.n_tokens, WIDTH, s.at, x);
        struct mat out = rig_mat(&s.r, p.b.n_tokens, 2 * D, s.at, NULL);
        struct attention reads = s.att;
        s.rope.v_eps = 0.25f;
        reads.n_kv_heads = 0;
        rig_begin(&s.r, &p.b);
        s.r.b->ops->rope_kv(s.r.b, qkv, &s.rope, &s.att);
        s.r.b->ops->rope_kv(s.r.b, mat_cols(again, 0, 2 * D), &s.rope, &reads);
        s.r.b->ops->attention(s.r.b, out, again, &s.att);
        float *got = rig_download(&s.r, out);
        rig_end(&s.r);
        for (int32_t i = 0; i < p.b.n_tokens * 2 * D; i++) {
            const float *v = x + (int64_t)(i / (2 * D)) * WIDTH + 3 * D;
            double squares = 0;
            for (int32_t k = 0; k < D; k++) {
                squares += (double)v[k] * v[k];
            }
            double want = v[i % D] / sqrt(squares / D + 0.25);
            assert_true(fabs(got[i] - want) <= (types[t] == DTYPE_F32 ? 1e-5 : 0.02));
        }
        free(got);
        free(x);
        scene_close(&s);
    }
}

/* More short sequences than a device has warps for their heads: prefixes of the scene's
 * sequences, with queries of their own. */
static void many_short_sequences(void **state)
{
    (void)state;
    enum { SEQS = RIG_SEQS, HEADS = 40, DIM = 64, WIDTH = 3 * HEADS * DIM };
    struct scene_case c = {.name = "short",
                           .n_heads = HEADS,
                           .n_kv_heads = HEADS,
                           .head_dim = DIM,
                           .block_size = 16,
                           .dtype = DTYPE_BF16};
    struct scene s;
    scene_open(&s, &c);
    scene_run(&s, &(struct scene_step){.n = {30, 60, 40, 50, 70, 35}});
    int32_t zero[SEQS] = {0}, slot[SEQS], q_start[SEQS + 1] = {0}, kv_len[SEQS], row[SEQS];
    for (int32_t i = 0; i < SEQS; i++) {
        slot[i] = -1;
        q_start[i + 1] = i + 1;
        row[i] = i % SCENE_SEQS;
        kv_len[i] = 1 + rig_below(&s.r, s.seq[row[i]].len);
    }
    struct batch b = {.n_tokens = SEQS,
                      .token = zero,
                      .position = zero,
                      .slot = slot,
                      .n_seqs = SEQS,
                      .n_decode = SEQS,
                      .q_start = q_start,
                      .kv_len = kv_len,
                      .row = row,
                      .lcp_blocks = zero};
    float *x = rig_floats(&s.r, (int64_t)SEQS * WIDTH, 1, s.at);
    struct mat qkv = rig_mat(&s.r, SEQS, WIDTH, s.at, x);
    struct mat out = rig_mat(&s.r, SEQS, HEADS * DIM, s.at, NULL);
    rig_begin(&s.r, &b);
    s.r.b->ops->attention(s.r.b, out, qkv, &s.att);
    float *got = rig_download(&s.r, out);
    rig_end(&s.r);
    double ref[HEADS * DIM];
    float plain[HEADS * DIM];
    for (int32_t i = 0; i < SEQS; i++) {
        for (int32_t h = 0; h < HEADS; h++) {
            struct panels keys = keys_of(&s, &s.seq[row[i]], h, kv_len[i]);
            attend_reference(&s, &s.seq[row[i]], &keys, x + (int64_t)i * WIDTH + h * DIM, h,
                             kv_len[i] - 1, ref + h * DIM, plain + h * DIM);
            panels_free(&keys);
        }
        assert_no_worse_by("many short sequences", got + (int64_t)i * HEADS * DIM, plain, ref,
                           HEADS * DIM, cache_type ? 1e-6 : 1e-7);
    }
    free(got);
    free(x);
    scene_close(&s);
}

/* Sequences 4 and 5 share the first two blocks of sequence 3. Whether or not a backend
 * uses lcp_blocks, the result is the same. */
static void shared_leading_blocks(void **state)
{
    (void)state;
    struct scene_case c = {.name = "shared blocks",
                           .n_heads = 8,
                           .n_kv_heads = 2,
                           .head_dim = 64,
                           .block_size = 16,
                           .rot_dim = 64,
                           .dtype = DTYPE_BF16};
    struct scene s;
    scene_open(&s, &c);
    scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 32, 0, 0}});
    struct table_update update[2] = {{.row = 4, .index = 0, .count = 2, .first = 0},
                                     {.row = 5, .index = 0, .count = 2}};
    struct batch b = {.n_table_update = 2,
                      .n_table_block = 2,
                      .table_update = update,
                      .table_block = s.seq[3].block};
    int32_t q_start[1] = {0};
    b.q_start = q_start;
    rig_begin(&s.r, &b);
    rig_end(&s.r);
    for (int32_t i = 4; i < 6; i++) {
        struct scene_seq *q = &s.seq[i];
        q->len = 32;
        q->n_blocks = 2;
        memcpy(q->block, s.seq[3].block, 2 * sizeof(q->block[0]));
        memcpy(q->k, s.seq[3].k, (size_t)(32 * 2 * 64) * sizeof(float));
        memcpy(q->v, s.seq[3].v, (size_t)(32 * 2 * 64) * sizeof(float));
    }
    scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 1, 1, 1}, .lcp = {0, 0, 0, 0, 2, 2}});
    scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 1, 5, 9}, .lcp = {0, 0, 0, 0, 2, 2}});
    scene_close(&s);
}

/* The last tokens of a sequence, computed alone, in one chunk, or beside others, give
 * the same bits. */
static void attention_does_not_depend_on_the_batch(void **state)
{
    (void)state;
    enum { LAST = 21, MOST = 128 };
    const int32_t shorter = rig_small() ? 4 : 1, len = 1300 / shorter;
    static const int32_t head_window[][2] = {{64, 0}, {64, 700}, {80, 0}, {96, 300}, {128, 0}};
    struct rope none = {0};
    for (size_t k = 0; k < ARRAY_LEN(head_window); k++) {
        if (!whole_takes(k, ARRAY_LEN(head_window))) {
            continue;
        }
        struct scene s;
        struct packed p;
        int32_t head = head_window[k][0], window = head_window[k][1] / shorter, wide = 8 * head,
                own = 4 * head;
        struct scene_case c = {.name = "batch",
                               .n_heads = 4,
                               .n_kv_heads = 2,
                               .head_dim = head,
                               .block_size = k % 2 == 0 ? 16 : 24,
                               .rot_dim = head,
                               .window = window,
                               .dtype = DTYPE_BF16};
        scene_open_config(&s, &c, true);
        s.att.window = window;
        float *x = rig_floats(&s.r, (int64_t)len * wide, 1, s.at);
        for (int32_t done = 0; done < len; done += p.b.n_tokens) { /* fill the cache */
            pack_step(&s, &p, &(struct scene_step){.n = {0, 0, 0, 0, 0, MIN(500, len - done)}});
            struct mat qkv = rig_mat(&s.r, p.b.n_tokens, wide, s.at, x + (int64_t)done * wide);
            rig_begin(&s.r, &p.b);
            s.r.b->ops->rope_kv(s.r.b, qkv, &none, &s.att);
            rig_end(&s.r);
        }
        struct mat qkv = rig_mat(&s.r, RIG_TOKENS, wide, s.at, NULL);
        struct mat out = rig_mat(&s.r, RIG_TOKENS, own, s.at, NULL);
        float *want = NULL;
        const size_t bytes = (size_t)LAST * (size_t)own * sizeof(*want);
        static const int32_t chunks[] = {LAST, 1, 4, 10, 300};
        for (size_t i = 0; i < ARRAY_LEN(chunks); i++) {
            float got[LAST * 4 * MOST];
            for (int32_t at = len - MAX(chunks[i], LAST); at < len; at += chunks[i]) {
                int32_t n = MIN(chunks[i], len - at);
                s.seq[5].len = at;
                pack_step(&s, &p, &(struct scene_step){.n = {0, 0, 0, 0, i == 1 ? 3 : 0, n}});
                int32_t first = p.b.n_tokens - n;
                rig_upload(&s.r, mat_rows(qkv, first, n), x + (int64_t)at * wide);
                rig_begin(&s.r, &p.b);
                s.r.b->ops->rope_kv(s.r.b, mat_rows(qkv, 0, p.b.n_tokens), &none, &s.att);
                s.r.b->ops->attention(s.r.b, mat_rows(out, 0, p.b.n_tokens),
                                      mat_rows(qkv, 0, p.b.n_tokens), &s.att);
                float *some = rig_download(&s.r, mat_rows(out, first, n));
                rig_end(&s.r);
                int32_t skip = MAX(len - LAST - at, 0);
                memcpy(got + (at + skip - (len - LAST)) * own, some + skip * own,
                       (size_t)(n - skip) * (size_t)own * sizeof(*got));
                free(some);
            }
            if (!want) {
                want = rig_alloc(bytes);
                memcpy(want, got, bytes);
            }
            assert_memory_equal(got, want, bytes);
        }
        free(want);
        free(x);
        scene_close(&s);
    }
}

/* A captured step is padded with sequences of length 0 and tokens of slot -1, which
 * must not change anything. */
static void padding_rows_are_harmless(void **state)
{
    (void)state;
    struct scene_case c = {.name = "padding",
                           .n_heads = 4,
                           .n_kv_heads = 2,
                           .head_dim = 64,
                           .block_size = 16,
                           .rot_dim = 64,
                           .dtype = DTYPE_F32};
    struct scene s;
    struct packed p;
    enum { WIDTH = 8 * 64 };
    scene_open(&s, &c);
    scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 0, 20, 30}});
    pack_step(&s, &p, &(struct scene_step){.n = {0, 0, 0, 0, 1, 1}});
    for (int32_t i = 2; i < 4; i++) {
        p.src[i] = -1;
        p.slot[i] = -1;
        p.q_start[i + 1] = i + 1;
    }
    p.b.n_tokens = p.b.n_seqs = p.b.n_decode = 4;
    float *x = rig_floats(&s.r, 4 * WIDTH, 1, s.at);
    struct mat qkv = rig_mat(&s.r, 4, WIDTH, s.at, x);
    struct mat out = rig_mat(&s.r, 4, 256, s.at, NULL);
    rig_begin(&s.r, &p.b);
    s.r.b->ops->rope_kv(s.r.b, qkv, &s.rope, &s.att);
    float *after = rig_download(&s.r, qkv);
    s.r.b->ops->attention(s.r.b, out, qkv, &s.att);
    float *got = rig_download(&s.r, out);
    rig_end(&s.r);
    p.b.n_tokens = p.b.n_seqs = 2;
    take_qkv(&s, &p, x, after);
    check_attention(&s, &p, after, got);
    for (int32_t i = 2 * 256; i < 4 * 256; i++) {
        assert_true(isfinite(got[i]));
    }
    free(got);
    free(after);
    free(x);
    scene_close(&s);
}

/* A block copied on the device, and one swapped out and in to another block, read as
 * the originals. */
static void block_copies_and_swaps_move_every_layer(void **state)
{
    (void)state;
    struct scene_case c = {.name = "copies",
                           .n_heads = 4,
                           .n_kv_heads = 2,
                           .head_dim = 64,
                           .block_size = 16,
                           .rot_dim = 64,
                           .dtype = DTYPE_BF16};
    struct scene s;
    scene_open(&s, &c);
    scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 0, 0, 60}});
    struct scene_seq *q = &s.seq[5];
    int32_t fresh[4] = {s.free_block[--s.n_free], s.free_block[--s.n_free],
                        s.free_block[--s.n_free], s.free_block[--s.n_free]};
    struct block_copy copy[2] = {{.src = q->block[0], .dst = fresh[0]},
                                 {.src = q->block[3], .dst = fresh[3]}};
    struct block_copy out[2] = {{.src = q->block[1], .dst = 7}, {.src = q->block[2], .dst = 2}};
    int32_t q_start[1] = {0};
    struct batch b = {
        .copy = copy, .n_copy = 2, .swap_out = out, .n_swap_out = 2, .q_start = q_start};
    rig_begin(&s.r, &b);
    rig_end(&s.r);
    struct block_copy in[2] = {{.src = 7, .dst = fresh[1]}, {.src = 2, .dst = fresh[2]}};
    struct table_update update = {.row = 5, .index = 0, .count = 4, .first = 0};
    b = (struct batch){.swap_in = in,
                       .n_swap_in = 2,
                       .table_update = &update,
                       .n_table_update = 1,
                       .table_block = fresh,
                       .n_table_block = 4,
                       .q_start = q_start};
    rig_begin(&s.r, &b);
    rig_end(&s.r);
    memcpy(q->block, fresh, sizeof(fresh));
    scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 0, 0, 1}});
    scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 0, 0, 25}});
    scene_close(&s);
}

/* Chunks of a prompt that are long enough for a GPU to widen keys and values of 8 bits
 * before, with room for all of them or for one head at a time, over blocks of several
 * sizes, with a window, and beside sequences that decode. */
static void long_chunks_of_prompts(void **state)
{
    (void)state;
    static const struct {
        int32_t head_dim, n_heads, n_kv_heads, block_size, window;
        bool sinks;
        enum dtype dtype;
        const char *room; /* bytes */
    } cases[] = {{128, 16, 2, 16, 0, false, DTYPE_BF16, NULL},
                 {128, 24, 3, 16, 0, true, DTYPE_BF16, "600000"},
                 {64, 8, 1, 24, 0, false, DTYPE_F16, NULL},
                 {96, 16, 2, 32, 40, false, DTYPE_BF16, "250000"},
                 {256, 16, 2, 8, 100, true, DTYPE_F16, NULL},
                 {128, 16, 2, 16, 0, false, DTYPE_BF16, "1000"}};
    const struct scene_step steps[] = {
        {.n = {0, 0, 0, 0, 30, 300}}, {.n = {0, 0, 0, 1, 200, 330}}, {.n = {0, 0, 0, 1, 1, 170}}};
    bool cuda = strcmp(rig_device, "cuda") == 0;
    size_t n_cases = rig_small() || !cuda ? 2 : ARRAY_LEN(cases);
    int32_t shorter = whole_turn < 0 ? RIG_SHORTER : MAX(RIG_SHORTER, 3);
    for (size_t i = 0; i < n_cases; i++) {
        char name[64];
        if (!whole_takes(i, n_cases)) {
            continue;
        }
        snprintf(name, sizeof(name), "%d, %d heads, in %s bytes", cases[i].head_dim,
                 cases[i].n_heads, cases[i].room ? cases[i].room : "enough");
        if (cases[i].room) {
            setenv("QUIRE_CUDA_PANEL_BYTES", cases[i].room, 1);
        }
        struct scene_case c = {.name = name,
                               .n_heads = cases[i].n_heads,
                               .n_kv_heads = cases[i].n_kv_heads,
                               .head_dim = cases[i].head_dim,
                               .block_size = cases[i].block_size,
                               .window = cases[i].window,
                               .sinks = cases[i].sinks,
                               .rot_dim = cases[i].head_dim,
                               .dtype = cases[i].dtype};
        struct scene s;
        scene_open(&s, &c);
        scene_run(&s, &(struct scene_step){.n = {0, 0, 0, 1, 1, 1}});
        for (size_t k = 0; k < ARRAY_LEN(steps); k++) {
            struct scene_step step = steps[k];
            for (int32_t q = 0; q < SCENE_SEQS; q++) {
                step.n[q] = step.n[q] > shorter ? step.n[q] / shorter : step.n[q];
            }
            scene_run(&s, &step);
        }
        scene_close(&s);
        unsetenv("QUIRE_CUDA_PANEL_BYTES");
    }
}

/* Scores so far apart that each maximum is soon exceeded by far. */
static void scores_far_apart(void **state)
{
    (void)state;
    for (int32_t group = 4; group <= 12; group += 8) {
        struct scene_case c = {.name = "far apart",
                               .n_heads = 2 * group,
                               .n_kv_heads = 2,
                               .head_dim = 128,
                               .block_size = 16,
                               .dtype = DTYPE_BF16};
        struct scene s;
        scene_open(&s, &c);
        s.att.scale *= 8;
        scene_run(&s, &(struct scene_step){.n = {20, 40, 70, 100, 150, 250 / RIG_SHORTER}});
        scene_run(&s, &(struct scene_step){.n = {1, 1, 1, 1, 1, 1}});
        scene_run(&s, &(struct scene_step){.n = {1, 1, 1, 1, 1, 1}});
        scene_close(&s);
    }
}

static void steps_out_of_range_are_refused(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    rig_open(&r);
    int32_t q_start[1] = {0};
    int32_t block[4] = {0};
    struct table_update bad[] = {{.row = RIG_SEQS, .count = 1},
                                 {.row = -1, .count = 1},
                                 {.index = RIG_BLOCKS_PER_SEQ, .count = 1},
                                 {.index = 1, .count = RIG_BLOCKS_PER_SEQ},
                                 {.first = 3, .count = 2}};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct batch b = {.step = 1,
                          .q_start = q_start,
                          .table_update = &bad[i],
                          .n_table_update = 1,
                          .table_block = block,
                          .n_table_block = 4};
        assert_int_equal(r.b->ops->step_begin(r.b, &b, &e), ERR_INVALID);
    }
    struct batch large = {.step = 1, .n_tokens = RIG_TOKENS + 1};
    assert_int_equal(r.b->ops->step_begin(r.b, &large, &e), ERR_INVALID);
    rig_close(&r);
}

static int cache_of_fp8(void **state)
{
    (void)state;
    cache_type = DTYPE_F8;
    return 0;
}

static int cache_of_int8(void **state)
{
    (void)state;
    cache_type = DTYPE_I8;
    return 0;
}

static int usual_cache(void **state)
{
    (void)state;
    cache_type = DTYPE_F32;
    return 0;
}

#define OF_8_BITS(f)                                     \
    {#f ", fp8", f, cache_of_fp8, usual_cache, NULL},    \
    {                                                    \
        #f ", int8", f, cache_of_int8, usual_cache, NULL \
    }

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_over_shuffled_blocks),
        cmocka_unit_test(heads_and_blocks_of_many_sizes),
        cmocka_unit_test(many_heads_decode),
        cmocka_unit_test(attention_variants),
        cmocka_unit_test(rotations_and_norms_of_heads),
        cmocka_unit_test(cache_writes_are_exact),
        cmocka_unit_test(normed_values_are_read_by_other_layers),
        cmocka_unit_test(many_short_sequences),
        cmocka_unit_test(shared_leading_blocks),
        cmocka_unit_test(attention_does_not_depend_on_the_batch),
        cmocka_unit_test(padding_rows_are_harmless),
        cmocka_unit_test(block_copies_and_swaps_move_every_layer),
        cmocka_unit_test(steps_out_of_range_are_refused),
        cmocka_unit_test(long_chunks_of_prompts),
        cmocka_unit_test(scores_far_apart),
        OF_8_BITS(attention_over_shuffled_blocks),
        OF_8_BITS(heads_and_blocks_of_many_sizes),
        OF_8_BITS(many_heads_decode),
        OF_8_BITS(attention_variants),
        OF_8_BITS(rotations_and_norms_of_heads),
        OF_8_BITS(many_short_sequences),
        OF_8_BITS(shared_leading_blocks),
        OF_8_BITS(attention_does_not_depend_on_the_batch),
        OF_8_BITS(padding_rows_are_harmless),
        OF_8_BITS(block_copies_and_swaps_move_every_layer),
        OF_8_BITS(long_chunks_of_prompts),
        OF_8_BITS(scores_far_apart),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
