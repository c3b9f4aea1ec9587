/* Paged attention by tiles of TILE_KEYS keys, with an online softmax (Milakov and
 * Gimelshein 2018), split over the keys where there are few rows (split-KV).
 *
 * A unit of work is up to UNIT_ROWS rows (query tokens times query heads of one KV
 * head) of one sequence. It reads keys and values through the block table, once for all
 * its rows.
 *
 * Batch invariance: tiles and splits (SPLIT_KEYS keys) begin at fixed cache indices,
 * and the partial results of splits are merged in order, whether one thread computes
 * them all or several do. Results do not depend on the batch, on how a prompt is cut
 * into chunks, or on the number of threads.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum {
    SPLIT_KEYS = 512,
    UNIT_ROWS = ATTENTION_ROWS,
    /* from this many rows on, values are converted to float32 once for all of them */
    CONVERT_ROWS = 8,
    TASKS_PER_THREAD = 4, /* with fewer, units are divided by splits */
};

/* The rows and the key splits of one unit; each task takes it for one KV head. */
struct attention_unit {
    int32_t seq;             /* of the step */
    int32_t token, n_tokens; /* of the step */
    int32_t head, n_heads;   /* in the KV head's group of query heads */
    int32_t split, n_splits; /* first split that the rows see, or this unit's own; their number */
    /* units with the same rows, which compute one split each; 1: this unit has all */
    int32_t n_partials;
};

struct attention_job {
    struct cpu_backend *c;
    struct mat out, qkv;
    const struct attention *att;
    const struct attention_unit *unit;
    int32_t n_units;
    float scale;          /* of q.k, before the soft cap: of what the cache holds */
    float value_scale;    /* of the weighted sums */
    float *partial;       /* [n_units * n_kv_heads] states, with split-KV */
    int64_t state_floats; /* of one state */
};

/* The online softmax of a unit's rows over some keys: per row the greatest score, the
 * sum of weights, and the weighted sum of values. */
struct state {
    float *max, *sum; /* [UNIT_ROWS] */
    float *acc;       /* [UNIT_ROWS, head_dim] */
};

/* A thread's scratch, in one allocation. */
struct attention_scratch {
    float *score;                  /* [UNIT_ROWS, TILE_KEYS] */
    float *key;                    /* [head_dim, TILE_KEYS] */
    float *value;                  /* [TILE_KEYS, head_dim] */
    float *total, *partial;        /* states: of the splits so far, of the latest */
    const float *query[UNIT_ROWS]; /* by row */
};

static int64_t state_floats(int32_t head_dim)
{
    return UNIT_ROWS * (2 + (int64_t)head_dim);
}

static struct state state_at(float *base)
{
    return (struct state){
        .max = base, .sum = base + UNIT_ROWS, .acc = base + 2 * (int64_t)UNIT_ROWS};
}

/* Floats of a thread's scratch, a multiple of a cache line's; fills `ret` when base is
 * not NULL. */
static int64_t scratch_layout(struct attention_scratch *ret, float *base, int32_t head_dim)
{
    int64_t dim = div_ceil(head_dim, 16) * 16;
    int64_t state = UNIT_ROWS * (2 + dim);
    int64_t key = UNIT_ROWS * TILE_KEYS;
    int64_t value = key + dim * TILE_KEYS;
    int64_t total = value + dim * TILE_KEYS;

    if (base) {
        *ret = (struct attention_scratch){.score = base,
                                          .key = base + key,
                                          .value = base + value,
                                          .total = base + total,
                                          .partial = base + total + state};
    }
    return total + 2 * state;
}

/* ---- one tile of keys ---- */

struct key_tile {
    int32_t first; /* cache index of its first key, a multiple of TILE_KEYS */
    /* keys [lo, hi) are seen by some row of the unit; the others are not read */
    int32_t lo, hi;
    const void *key[TILE_KEYS];
    const void *value[TILE_KEYS];
    /* of a cache of DTYPE_I8: what the codes of each key and value are multiplied by */
    float key_scale[TILE_KEYS], value_scale[TILE_KEYS];
    enum dtype value_type;
};

/* Find the tile's keys and values, transpose the keys, and convert the values if the
 * unit has many rows. */
static void load_tile(const struct attention_job *j, const struct attention_unit *u,
                      int32_t kv_head, const struct attention_scratch *s, struct key_tile *p)
{
    const struct cpu_backend *c = j->c;
    const struct kv_layout *l = &c->kv[j->att->group];
    int32_t dim = j->att->head_dim;
    int64_t bytes = dtype_bytes(l->dtype);
    const int32_t *table = cpu_table(c, j->att->group, c->batch.row[u->seq]);
    int64_t base = j->att->layer * l->layer_stride + kv_head * l->head_stride;
    int32_t in_block = 0;
    const char *k = NULL, *scale = NULL;

    for (int32_t i = p->lo; i < p->hi; i++, in_block--, k += l->token_stride * bytes) {
        if (in_block == 0) {
            int32_t at = p->first + i;
            int32_t offset = at % l->block_size;
            in_block = l->block_size - offset;
            k = c->kv_data + (table[at / l->block_size] * l->block_stride + base) * bytes;
            scale = k + l->scale_offset + offset * (int64_t)sizeof(float);
            k += offset * l->token_stride * bytes;
        }
        p->key[i] = k;
        p->value[i] = k + l->kv_stride * bytes;
        if (l->scale_offset > 0) {
            memcpy(&p->key_scale[i], scale, sizeof(float));
            memcpy(&p->value_scale[i], scale + l->kv_stride, sizeof(float));
            scale += sizeof(float);
        }
    }
    for (int32_t i = 0; i < TILE_KEYS; i++) {
        p->key[i] = i < p->lo ? p->key[p->lo] : i >= p->hi ? p->key[p->hi - 1] : p->key[i];
    }
    c->k.transpose_keys(s->key, p->key, dim, l->dtype);
    p->value_type = l->dtype;
    if (u->n_tokens * u->n_heads >= CONVERT_ROWS && l->dtype != DTYPE_F32) {
        for (int32_t i = p->lo; i < p->hi; i++) {
            c->k.load(s->value + (int64_t)i * dim, p->value[i], l->dtype, dim, 1);
            p->value[i] = s->value + (int64_t)i * dim;
        }
        p->value_type = DTYPE_F32;
    }
}

/* score [TILE_KEYS] times the scales of the tile's keys. */
static void scale_keys(float *score, const float *scale, const struct key_tile *p)
{
    for (int32_t i = p->lo; i < p->hi; i++) {
        score[i] *= scale[i];
    }
}

/* Fold a tile into the state of the unit's rows; `index` is the cache index of the
 * unit's first token. */
static void fold_tile(const struct attention_job *j, const struct attention_unit *u,
                      const struct attention_scratch *s, const struct key_tile *p,
                      const struct state *to, int32_t index)
{
    const struct cpu_kernels *k = &j->c->k;
    int32_t rows = u->n_tokens * u->n_heads;
    int32_t window = j->att->window;
    float cap = j->att->softcap;
    float keep[UNIT_ROWS];

    bool scaled = j->c->kv[j->att->group].scale_offset > 0;

    k->scores(s->score, s->query, rows, s->key, j->att->head_dim, j->scale);
    for (int32_t r = 0; r < rows && scaled; r++) {
        scale_keys(s->score + r * TILE_KEYS, p->key_scale, p);
    }
    for (int32_t i = 0; i < rows * TILE_KEYS && cap > 0; i++) {
        s->score[i] = cap * tanhf(s->score[i] / cap);
    }
    for (int32_t r = 0; r < rows; r++) {
        int32_t at = index + r / u->n_heads - p->first; /* of the row, in the tile */
        int32_t hi = MIN(p->hi, at + 1);
        int32_t lo = window > 0 ? MAX(p->lo, at + 1 - window) : p->lo;
        float *score = s->score + r * TILE_KEYS;
        keep[r] = 1;
        if (lo < hi) {
            keep[r] = k->softmax(score, lo, hi, &to->max[r], &to->sum[r]);
        } else {
            memset(score, 0, TILE_KEYS * sizeof(*score));
        }
        if (scaled) {
            scale_keys(score, p->value_scale, p);
        }
    }
    k->accumulate(to->acc, j->att->head_dim, keep, s->score, rows, p->value, p->lo, p->hi,
                  p->value_type);
}

/* ---- one split, merging ---- */

/* The state of the unit's rows after the keys of one split, at `base`. */
static void run_split(const struct attention_job *j, const struct attention_unit *u,
                      int32_t kv_head, int32_t split, const struct attention_scratch *s,
                      float *base)
{
    const struct batch *b = &j->c->batch;
    struct state to = state_at(base);
    int32_t rows = u->n_tokens * u->n_heads;
    /* of the unit's first token */
    int32_t index = b->kv_len[u->seq] - (b->q_start[u->seq + 1] - u->token);
    int32_t first_seen = j->att->window > 0 ? MAX(0, index + 1 - j->att->window) : 0;
    int32_t end = MIN((split + 1) * SPLIT_KEYS, index + u->n_tokens);

    for (int32_t r = 0; r < rows; r++) {
        to.max[r] = -INFINITY;
        to.sum[r] = 0;
    }
    memset(to.acc, 0, (size_t)rows * (size_t)j->att->head_dim * sizeof(float));
    struct key_tile p;
    for (p.first = MAX(split * SPLIT_KEYS, first_seen / TILE_KEYS * TILE_KEYS); p.first < end;
         p.first += TILE_KEYS) {
        p.lo = MAX(first_seen - p.first, 0);
        p.hi = MIN(end - p.first, TILE_KEYS);
        load_tile(j, u, kv_head, s, &p);
        fold_tile(j, u, s, &p, &to, index);
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

static void write_rows(const struct attention_job *j, const struct attention_unit *u,
                       int32_t kv_head, float *base)
{
    struct state s = state_at(base);
    int32_t dim = j->att->head_dim;
    int32_t group = j->att->n_heads / j->att->n_kv_heads;

    for (int32_t r = 0; r < u->n_tokens * u->n_heads; r++) {
        int32_t head = kv_head * group + u->head + r % u->n_heads;
        float *out = mat_row(j->out, u->token + r / u->n_heads) + (int64_t)head * dim;
        float sink =
            j->att->sinks.data ? expf(mat_row_const(j->att->sinks, 0)[head] - s.max[r]) : 0;
        /* a padding row saw nothing */
        float scale = s.sum[r] > 0 ? j->value_scale / (s.sum[r] + sink) : 0;
        j->c->k.load(out, s.acc + (int64_t)r * dim, DTYPE_F32, dim, scale);
    }
}

/* ---- a unit ---- */

static void find_queries(const struct attention_job *j, const struct attention_unit *u,
                         int32_t kv_head, struct attention_scratch *s)
{
    int32_t first = kv_head * (j->att->n_heads / j->att->n_kv_heads) + u->head;

    for (int32_t r = 0; r < u->n_tokens * u->n_heads; r++) {
        s->query[r] = mat_row_const(j->qkv, u->token + r / u->n_heads) +
                      (int64_t)(first + r % u->n_heads) * j->att->head_dim;
    }
}

static void unit_task(void *arg, int32_t task, int32_t thread)
{
    const struct attention_job *j = arg;
    int32_t n_kv = j->att->n_kv_heads;
    /* the last tokens of a prompt see the most keys: start with them */
    int32_t at = j->n_units - 1 - task / n_kv;
    int32_t kv_head = task % n_kv;
    const struct attention_unit *u = &j->unit[at];
    struct attention_scratch s;

    scratch_layout(&s, j->c->attention_scratch + thread * j->c->attention_scratch_floats,
                   j->att->head_dim);
    find_queries(j, u, kv_head, &s);
    if (u->n_partials > 1) {
        run_split(j, u, kv_head, u->split, &s,
                  j->partial + ((int64_t)at * n_kv + kv_head) * j->state_floats);
        return;
    }
    run_split(j, u, kv_head, u->split, &s, s.total);
    for (int32_t i = 1; i < u->n_splits; i++) {
        run_split(j, u, kv_head, u->split + i, &s, s.partial);
        merge(j, u->n_tokens * u->n_heads, s.total, s.partial);
    }
    write_rows(j, u, kv_head, s.total);
}

/* Of units that share their rows, the first merges the partial states of all. */
static void merge_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    const struct attention_job *j = arg;
    int32_t n_kv = j->att->n_kv_heads;
    int32_t at = task / n_kv;
    int32_t kv_head = task % n_kv;
    const struct attention_unit *u = &j->unit[at];
    if (u->n_partials == 1 || (at > 0 && u[-1].token == u->token && u[-1].head == u->head)) {
        return;
    }
    float *total = j->partial + ((int64_t)at * n_kv + kv_head) * j->state_floats;
    for (int32_t i = 1; i < u->n_partials; i++) {
        merge(j, u->n_tokens * u->n_heads, total, total + (int64_t)i * n_kv * j->state_floats);
    }
    write_rows(j, u, kv_head, total);
}

/* ---- the work list ---- */

/* The splits that the unit's tokens see: u->split is the first, u->n_splits their
 * number, at least 1. */
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
    if (!bigger) {
        return ERR_NOMEM;
    }
    c->attention_unit = bigger;
    c->attention_unit_cap = 2 * n;
    return 0;
}

/* List the step's units: one per group of rows or, with split_kv, one per split of it.
 * Returns their number, or ERR_NOMEM. */
static int32_t list_units(const struct attention_job *j, bool split_kv)
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
                struct attention_unit u = {.seq = s,
                                           .token = t,
                                           .n_tokens = MIN(tokens, b->q_start[s + 1] - t),
                                           .head = h,
                                           .n_heads = MIN(heads, group - h),
                                           .n_partials = 1};
                count_splits(j, &u);
                int32_t parts = split_kv ? u.n_splits : 1;
                if (grow_units(c, n + parts) < 0) {
                    return ERR_NOMEM;
                }
                for (int32_t i = 0; i < parts; i++) {
                    c->attention_unit[n] = u;
                    c->attention_unit[n].n_partials = parts;
                    c->attention_unit[n++].split += i;
                }
            }
        }
    }
    return n;
}

int cpu_attention_prepare(struct cpu_backend *c, int32_t head_dim)
{
    int64_t need = scratch_layout(NULL, NULL, head_dim);

    if (need <= c->attention_scratch_floats) {
        return 0;
    }
    c->attention_scratch =
        cpu_alloc(c, (size_t)need * (size_t)cpu_pool_threads(c->pool) * sizeof(float));
    c->attention_scratch_floats = c->attention_scratch ? need : 0;
    return c->attention_scratch ? 0 : ERR_NOMEM;
}

static int prepare_partial(struct attention_job *j)
{
    struct cpu_backend *c = j->c;
    int64_t need = (int64_t)j->n_units * j->att->n_kv_heads * j->state_floats;

    if (need > c->attention_partial_floats) {
        free(c->attention_partial);
        c->attention_partial = malloc((size_t)need * sizeof(float));
        c->attention_partial_floats = c->attention_partial ? need : 0;
    }
    j->partial = c->attention_partial;
    return j->partial ? 0 : ERR_NOMEM;
}

void cpu_attention_tiled(struct cpu_backend *c, struct mat out, struct mat qkv,
                         const struct attention *a)
{
    struct attention_job j = {
        .c = c,
        .out = out,
        .qkv = qkv,
        .att = a,
        .scale = a->scale * (c->kv[a->group].dtype == DTYPE_F8 ? attention_k_scale(a) : 1),
        .value_scale = c->kv[a->group].dtype == DTYPE_F8 ? attention_v_scale(a) : 1,
        .state_floats = state_floats(a->head_dim)};
    int rc = cpu_attention_prepare(c, a->head_dim);

    j.n_units = rc < 0 ? rc : list_units(&j, false);
    bool split_kv =
        j.n_units > 0 && j.n_units * a->n_kv_heads < TASKS_PER_THREAD * cpu_pool_threads(c->pool);
    if (split_kv) {
        int32_t whole = j.n_units;
        j.n_units = list_units(&j, true);
        rc = j.n_units < 0 ? j.n_units : prepare_partial(&j);
        split_kv = j.n_units > whole;
    }
    if (rc < 0 || j.n_units < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for attention");
        return;
    }
    j.unit = c->attention_unit;
    cpu_pool_run(c->pool, j.n_units * a->n_kv_heads, unit_task, &j);
    if (split_kv) {
        cpu_pool_run(c->pool, j.n_units * a->n_kv_heads, merge_task, &j);
    }
}
