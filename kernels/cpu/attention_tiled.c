/* Paged attention by tiles, with an online softmax (Milakov and Gimelshein 2018) over parts of PART_KEYS keys.
 *
 * A unit is one KV head of one sequence with up to UNIT_ROWS rows: query heads of that KV head times query tokens. Keys and
 * values are read where they lie, through the block table, once for all rows; heads are never copied. Parts and splits
 * (SPLIT_KEYS keys) begin at fixed cache indices, and a split's partial result is merged into the total in order
 * whether one thread takes all splits or each goes to another, so an answer does not depend on the batch, on
 * how a prompt is cut into chunks, or on the number of threads.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum {
    PART_KEYS = 64,
    SPLIT_KEYS = 512,
    UNIT_ROWS = 32,
    CONVERT_ROWS = 4, /* from this many rows on, values are converted to float32 once for all of them */
    TASKS_PER_THREAD = 4,
};

/* Which rows, which splits. */
struct attention_unit {
    int32_t seq;
    int32_t token, n_tokens; /* of the step */
    int32_t head, n_heads;   /* of the KV head's group */
    int32_t split, n_splits;
    int32_t n_parts;         /* units that share these rows, each with one split; 1: this one has all */
};

struct attention_job {
    struct cpu_backend *c;
    struct mat out, qkv;
    const struct attention *att;
    const struct attention_unit *unit;
    int32_t n_units;
    float *partial;       /* [n_units * n_kv_heads] states, when splits are apart */
    int64_t state_floats; /* of one state */
    int64_t packed_tile_bytes;
};

/* What is known of a unit's rows after some keys: per row the greatest score, the sum of weights, the weighted values. */
struct state {
    float *max, *sum; /* [UNIT_ROWS] */
    float *acc;       /* [UNIT_ROWS, head_dim] */
};

/* A thread's scratch, cut from one allocation. */
struct attention_scratch {
    float *query;   /* [UNIT_ROWS, head_dim] scaled */
    char *packed;   /* [UNIT_ROWS / TILE_ROWS] tiles */
    float *score;   /* [UNIT_ROWS, PART_KEYS] */
    float *sum;     /* [PART_KEYS, TILE_ROWS] and one more */
    float *value;   /* [PART_KEYS, head_dim] */
    char *key;      /* [PART_KEYS, padded head_dim] when head_dim is not whole chunks */
    float *total, *part; /* states */
};

static int64_t state_floats(int32_t head_dim) { return UNIT_ROWS * (2 + (int64_t)head_dim); }

static struct state state_at(float *base)
{
    return (struct state){.max = base, .sum = base + UNIT_ROWS, .acc = base + 2 * (int64_t)UNIT_ROWS};
}

/* Bytes a thread needs; fills `ret` when base is not NULL. */
static size_t scratch_cut(struct attention_scratch *ret, char *base, int32_t head_dim)
{
    size_t dim = (size_t)div_ceil(head_dim, TILE_CHUNK) * TILE_CHUNK;
    size_t state = ((size_t)state_floats(head_dim) * 4 + 63) / 64 * 64;
    size_t at = 0;
    size_t query = at, packed = at += UNIT_ROWS * dim * 4, score = at += UNIT_ROWS * dim * 4;
    size_t sum = at += UNIT_ROWS * PART_KEYS * 4, value = at += (PART_KEYS * TILE_ROWS + 16) * 4;
    size_t key = at += PART_KEYS * dim * 4, total = at += PART_KEYS * dim * 4, part = at += state;
    if (base != NULL) {
        *ret = (struct attention_scratch){.query = (float *)(base + query), .packed = base + packed,
                                          .score = (float *)(base + score), .sum = (float *)(base + sum),
                                          .value = (float *)(base + value), .key = base + key,
                                          .total = (float *)(base + total), .part = (float *)(base + part)};
    }
    return at + state;
}

/* ---- one part of keys ---- */

struct part {
    int32_t first, n;              /* cache indices */
    const void *key[PART_KEYS];
    const void *value[PART_KEYS];
    enum dtype value_type;
};

/* Where the part's keys and values lie. Keys off whole chunks are padded, values for many rows are converted. */
static void find_part(const struct attention_job *j, const struct attention_unit *u, int32_t kv_head,
                      const struct attention_scratch *s, struct part *p)
{
    const struct cpu_backend *c = j->c;
    const struct kv_layout *l = &c->kv;
    int32_t dim = j->att->head_dim;
    int64_t bytes = dtype_bytes(l->dtype);
    int64_t padded = div_ceil(dim, TILE_CHUNK) * TILE_CHUNK;
    const int32_t *table = c->table + (int64_t)c->batch.row[u->seq] * c->config.max_blocks_per_seq;
    int64_t base = j->att->layer * l->layer_stride + kv_head * l->head_stride;
    p->value_type = l->dtype;
    for (int32_t i = 0; i < p->n; i++) {
        int32_t at = p->first + i;
        const char *k = c->kv_data + (table[at / l->block_size] * l->block_stride + base +
                                      at % l->block_size * l->token_stride) * bytes;
        p->key[i] = k;
        p->value[i] = k + l->kv_stride * bytes;
    }
    for (int32_t i = 0; i < p->n && padded != dim; i++) {
        char *to = s->key + i * padded * bytes;
        memcpy(to, p->key[i], (size_t)(dim * bytes));
        memset(to + dim * bytes, 0, (size_t)((padded - dim) * bytes));
        p->key[i] = to;
    }
    if (u->n_tokens * u->n_heads >= CONVERT_ROWS && l->dtype != DTYPE_F32) {
        for (int32_t i = 0; i < p->n; i++) {
            c->k.load(s->value + (int64_t)i * dim, p->value[i], l->dtype, dim, 1);
            p->value[i] = s->value + (int64_t)i * dim;
        }
        p->value_type = DTYPE_F32;
    }
}

/* score[row][key] = q . k, softcapped. */
static void score_part(const struct attention_job *j, const struct attention_unit *u, const struct attention_scratch *s,
                       const struct part *p)
{
    static const struct prefetch none;
    const struct cpu_kernels *k = &j->c->k;
    int32_t rows = u->n_tokens * u->n_heads;
    struct dot_rows w = {.row = p->key, .n = p->n, .dtype = j->c->kv.dtype};
    for (int32_t r = 0; r < rows; r += TILE_ROWS) {
        int32_t n_x = MIN(TILE_ROWS, rows - r);
        k->score.dots(s->sum, &w, s->packed + r / TILE_ROWS * j->packed_tile_bytes, n_x,
                      (int32_t)div_ceil(j->att->head_dim, TILE_CHUNK), false, &none);
        k->spread(s->score + r * PART_KEYS, PART_KEYS, s->sum, p->n, n_x);
    }
    float cap = j->att->softcap;
    for (int32_t i = 0; i < rows * PART_KEYS && cap > 0; i++) {
        s->score[i] = i % PART_KEYS < p->n ? cap * tanhf(s->score[i] / cap) : 0;
    }
}

/* Fold the part into the state of row r, which stands at cache index `index`. */
static void fold_row(const struct attention_job *j, const struct state *to, const struct part *p, float *score, int32_t r,
                     int32_t index)
{
    const struct cpu_kernels *k = &j->c->k;
    int32_t window = j->att->window;
    int32_t from = window > 0 ? MAX(p->first, index + 1 - window) : p->first;
    int32_t end = MIN(p->first + p->n, index + 1);
    if (from >= end) {
        return;
    }
    int32_t lo = from - p->first;
    int32_t n = end - from;
    float max = MAX(to->max[r], k->scan(score + lo, n).max);
    float keep = expf(to->max[r] - max); /* 0 the first time */
    to->sum[r] = to->sum[r] * keep + k->softmax_part(score + lo, n, max);
    to->max[r] = max;
    k->weigh(to->acc + (int64_t)r * j->att->head_dim, keep, score + lo, p->value + lo, n, j->att->head_dim, p->value_type);
}

/* ---- one split, merging ---- */

static void run_split(const struct attention_job *j, const struct attention_unit *u, int32_t kv_head, int32_t split,
                      const struct attention_scratch *s, float *base)
{
    const struct batch *b = &j->c->batch;
    struct state to = state_at(base);
    int32_t rows = u->n_tokens * u->n_heads;
    int32_t index = b->kv_len[u->seq] - (b->q_start[u->seq + 1] - u->token); /* of the unit's first token */
    int32_t first_seen = j->att->window > 0 ? MAX(0, index + 1 - j->att->window) : 0;
    int32_t end = MIN((split + 1) * SPLIT_KEYS, index + u->n_tokens);
    for (int32_t r = 0; r < rows; r++) {
        to.max[r] = -INFINITY;
        to.sum[r] = 0;
    }
    memset(to.acc, 0, (size_t)rows * (size_t)j->att->head_dim * sizeof(float));
    struct part p = {.first = MAX(split * SPLIT_KEYS, first_seen / PART_KEYS * PART_KEYS)};
    for (; p.first < end; p.first += PART_KEYS) {
        p.n = MIN(PART_KEYS, end - p.first);
        find_part(j, u, kv_head, s, &p);
        score_part(j, u, s, &p);
        for (int32_t r = 0; r < rows; r++) {
            fold_row(j, &to, &p, s->score + r * PART_KEYS, r, index + r / u->n_heads);
        }
    }
}

static void merge(const struct attention_job *j, int32_t rows, float *into, float *from)
{
    struct state a = state_at(into);
    struct state b = state_at(from);
    int32_t dim = j->att->head_dim;
    for (int32_t r = 0; r < rows; r++) {
        if (b.sum[r] == 0) {
            continue;
        }
        float max = MAX(a.max[r], b.max[r]);
        float keep_a = expf(a.max[r] - max);
        float keep_b = expf(b.max[r] - max);
        a.max[r] = max;
        a.sum[r] = a.sum[r] * keep_a + b.sum[r] * keep_b;
        float *x = a.acc + (int64_t)r * dim;
        const float *y = b.acc + (int64_t)r * dim;
        for (int32_t i = 0; i < dim; i++) {
            x[i] = x[i] * keep_a + y[i] * keep_b;
        }
    }
}

static void write_rows(const struct attention_job *j, const struct attention_unit *u, int32_t kv_head, float *base)
{
    struct state s = state_at(base);
    int32_t dim = j->att->head_dim;
    int32_t group = j->att->n_heads / j->att->n_kv_heads;
    for (int32_t r = 0; r < u->n_tokens * u->n_heads; r++) {
        int32_t head = kv_head * group + u->head + r % u->n_heads;
        float *out = mat_row(j->out, u->token + r / u->n_heads) + (int64_t)head * dim;
        float scale = s.sum[r] > 0 ? 1.0f / s.sum[r] : 0; /* a padding row saw nothing */
        j->c->k.load(out, s.acc + (int64_t)r * dim, DTYPE_F32, dim, scale);
    }
}

/* ---- a unit ---- */

static void pack_queries(const struct attention_job *j, const struct attention_unit *u, int32_t kv_head,
                         const struct attention_scratch *s)
{
    int32_t dim = j->att->head_dim;
    int32_t group = j->att->n_heads / j->att->n_kv_heads;
    int32_t rows = u->n_tokens * u->n_heads;
    for (int32_t first = 0; first < rows; first += TILE_ROWS) {
        const float *row[TILE_ROWS];
        int32_t n = MIN(TILE_ROWS, rows - first);
        for (int32_t i = 0; i < n; i++) {
            int32_t r = first + i;
            int32_t head = kv_head * group + u->head + r % u->n_heads;
            float *to = s->query + (int64_t)r * dim;
            j->c->k.load(to, mat_row_const(j->qkv, u->token + r / u->n_heads) + (int64_t)head * dim, DTYPE_F32, dim,
                         j->att->scale);
            row[i] = to;
        }
        j->c->k.score.pack(s->packed + first / TILE_ROWS * j->packed_tile_bytes, row, n, dim, j->c->kv.dtype);
    }
}

static void unit_task(void *arg, int32_t task, int32_t thread)
{
    const struct attention_job *j = arg;
    int32_t n_kv = j->att->n_kv_heads;
    int32_t at = j->n_units - 1 - task / n_kv; /* the last tokens of a prompt see the most: they go first */
    int32_t kv_head = task % n_kv;
    const struct attention_unit *u = &j->unit[at];
    struct attention_scratch s;
    scratch_cut(&s, j->c->attention_scratch + (int64_t)thread * j->c->attention_scratch_bytes, j->att->head_dim);
    pack_queries(j, u, kv_head, &s);
    if (u->n_parts > 1) {
        run_split(j, u, kv_head, u->split, &s, j->partial + ((int64_t)at * n_kv + kv_head) * j->state_floats);
        return;
    }
    run_split(j, u, kv_head, u->split, &s, s.total);
    for (int32_t i = 1; i < u->n_splits; i++) {
        run_split(j, u, kv_head, u->split + i, &s, s.part);
        merge(j, u->n_tokens * u->n_heads, s.total, s.part);
    }
    write_rows(j, u, kv_head, s.total);
}

/* Units whose splits were apart: the first of them adds up all. */
static void merge_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    const struct attention_job *j = arg;
    int32_t n_kv = j->att->n_kv_heads;
    int32_t at = task / n_kv;
    int32_t kv_head = task % n_kv;
    const struct attention_unit *u = &j->unit[at];
    if (u->n_parts == 1 || (at > 0 && u[-1].token == u->token && u[-1].head == u->head)) {
        return;
    }
    float *total = j->partial + ((int64_t)at * n_kv + kv_head) * j->state_floats;
    for (int32_t i = 1; i < u->n_parts; i++) {
        merge(j, u->n_tokens * u->n_heads, total, total + (int64_t)i * n_kv * j->state_floats);
    }
    write_rows(j, u, kv_head, total);
}

/* ---- the work list ---- */

/* Splits of keys that the unit's tokens see: first in u->split, count in u->n_splits (at least 1). */
static void count_splits(const struct attention_job *j, struct attention_unit *u)
{
    const struct batch *b = &j->c->batch;
    int32_t index = b->kv_len[u->seq] - (b->q_start[u->seq + 1] - u->token);
    int32_t first = j->att->window > 0 ? MAX(0, index + 1 - j->att->window) : 0;
    int32_t last = MAX(index + u->n_tokens - 1, 0);
    u->split = first / SPLIT_KEYS;
    u->n_splits = MAX(last / SPLIT_KEYS - u->split + 1, 1);
}

static int grow_units(struct cpu_backend *c, int64_t n)
{
    if (n <= c->attention_unit_cap) {
        return 0;
    }
    struct attention_unit *bigger = realloc(c->attention_unit, (size_t)(2 * n) * sizeof(*bigger));
    if (bigger == NULL) {
        return ERR_NOMEM;
    }
    c->attention_unit = bigger;
    c->attention_unit_cap = 2 * n;
    return 0;
}

/* One unit a group of rows; `apart`: one for each of its splits. Returns the number of units or ERR_NOMEM. */
static int32_t list_units(const struct attention_job *j, bool apart)
{
    struct cpu_backend *c = j->c;
    const struct batch *b = &c->batch;
    int32_t group = j->att->n_heads / j->att->n_kv_heads;
    int32_t heads = MIN(group, UNIT_ROWS);
    int32_t tokens = UNIT_ROWS / heads;
    int32_t n = 0;
    for (int32_t s = 0; s < b->n_seqs; s++) {
        for (int32_t t = b->q_start[s]; t < b->q_start[s + 1]; t += tokens) {
            for (int32_t h = 0; h < group; h += heads) {
                struct attention_unit u = {.seq = s, .token = t, .n_tokens = MIN(tokens, b->q_start[s + 1] - t),
                                           .head = h, .n_heads = MIN(heads, group - h), .n_parts = 1};
                count_splits(j, &u);
                int32_t parts = apart ? u.n_splits : 1;
                if (grow_units(c, n + parts) < 0) {
                    return ERR_NOMEM;
                }
                for (int32_t i = 0; i < parts; i++) {
                    c->attention_unit[n] = u;
                    c->attention_unit[n].n_parts = parts;
                    c->attention_unit[n++].split += i;
                }
            }
        }
    }
    return n;
}

static int prepare(struct cpu_backend *c, int32_t head_dim)
{
    size_t need = scratch_cut(NULL, NULL, head_dim);
    if ((int64_t)need <= c->attention_scratch_bytes) {
        return 0;
    }
    c->attention_scratch = cpu_alloc(c, need * (size_t)cpu_pool_threads(c->pool));
    c->attention_scratch_bytes = c->attention_scratch != NULL ? (int64_t)need : 0;
    return c->attention_scratch != NULL ? 0 : ERR_NOMEM;
}

static int prepare_partial(struct attention_job *j)
{
    struct cpu_backend *c = j->c;
    int64_t need = (int64_t)j->n_units * j->att->n_kv_heads * j->state_floats;
    if (need > c->attention_partial_floats) {
        free(c->attention_partial);
        c->attention_partial = malloc((size_t)need * sizeof(float));
        c->attention_partial_floats = c->attention_partial != NULL ? need : 0;
    }
    j->partial = c->attention_partial;
    return j->partial != NULL ? 0 : ERR_NOMEM;
}

void cpu_attention_tiled(struct cpu_backend *c, struct mat out, struct mat qkv, const struct attention *a)
{
    struct attention_job j = {.c = c, .out = out, .qkv = qkv, .att = a, .state_floats = state_floats(a->head_dim)};
    j.packed_tile_bytes = div_ceil(a->head_dim, TILE_CHUNK) * TILE_CHUNK * TILE_ROWS * c->k.score.packed_bytes(c->kv.dtype);
    int rc = prepare(c, a->head_dim);
    j.n_units = rc < 0 ? rc : list_units(&j, false);
    bool apart = j.n_units > 0 && j.n_units * a->n_kv_heads < TASKS_PER_THREAD * cpu_pool_threads(c->pool);
    if (apart) {
        j.n_units = list_units(&j, true);
        rc = j.n_units < 0 ? j.n_units : prepare_partial(&j);
    }
    if (rc < 0 || j.n_units < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for attention");
        return;
    }
    j.unit = c->attention_unit;
    cpu_pool_run(c->pool, j.n_units * a->n_kv_heads, unit_task, &j);
    if (apart) {
        cpu_pool_run(c->pool, j.n_units * a->n_kv_heads, merge_task, &j);
    }
}
