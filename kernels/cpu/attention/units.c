/* Paged attention by tiles of TILE_KEYS keys, with an online softmax (Milakov and
 * Gimelshein 2018), split over the keys where there are few rows (split-KV).
 *
 * A unit of work is some rows (query tokens times query heads of one KV head) of one
 * sequence. It reads keys and values through the block table, once for all its rows, in
 * one of two ways (struct attention_way).
 *
 * Batch invariance: tiles and splits (split_keys of them) begin at fixed cache indices,
 * and the partial results of splits are merged in order, whether one thread computes
 * them all or several do. Results do not depend on the batch, on how a prompt is cut
 * into chunks, or on the number of threads.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/attention/attention_impl.h"

enum {
    TASKS_PER_THREAD = 4, /* with fewer, units are divided by splits */
    STATES = 2,           /* of a thread: of the splits so far, of the latest */
    SET_ROWS = 16,        /* a state holds a multiple of as many rows */
};

/* ---- a unit ---- */

static float *thread_scratch(const struct attention_job *j, int32_t thread)
{
    return j->c->attention_scratch + thread * j->c->attention_scratch_floats;
}

static struct attention_run run_of(const struct attention_job *j, const struct attention_unit *u,
                                   int32_t kv_head, int32_t thread)
{
    const struct batch *b = &j->c->batch;

    return (struct attention_run){.j = j,
                                  .u = u,
                                  .kv_head = kv_head,
                                  .rows = u->n_tokens * u->n_heads,
                                  .index = b->kv_len[u->seq] - (b->q_start[u->seq + 1] - u->token),
                                  .scratch = thread_scratch(j, thread) + STATES * j->state_floats};
}

/* The state of the unit's rows after the keys of one split. */
static void run_split(const struct attention_run *r, int32_t split, float *state)
{
    const struct attention_job *j = r->j;
    int32_t first_seen = attention_first(j->att, r->index);
    int32_t end = MIN((split + 1) * j->way->split_keys, r->index + r->u->n_tokens);
    int64_t acc = div_ceil(r->rows, SET_ROWS) * SET_ROWS * j->att->head_dim;
    struct attention_span s;

    for (int32_t i = 0; i < j->unit_rows; i++) {
        state[i] = -INFINITY;
    }
    memset(state + j->unit_rows, 0, (size_t)(j->unit_rows + acc) * sizeof(*state));
    for (s.first = MAX(split * j->way->split_keys, first_seen / TILE_KEYS * TILE_KEYS);
         s.first < end; s.first += TILE_KEYS) {
        s.lo = MAX(first_seen - s.first, 0);
        s.hi = MIN(end - s.first, TILE_KEYS);
        j->way->fold(r, &s, state);
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
    struct attention_run r = run_of(j, u, kv_head, thread);
    float *total = thread_scratch(j, thread), *latest = total + j->state_floats;
    j->way->begin(&r);
    if (u->n_partials > 1) {
        run_split(&r, u->split, j->partial + ((int64_t)at * n_kv + kv_head) * j->state_floats);
        return;
    }
    run_split(&r, u->split, total);
    for (int32_t i = 1; i < u->n_splits; i++) {
        run_split(&r, u->split + i, latest);
        j->way->merge(&r, total, latest);
    }
    j->way->finish(&r, total);
}

/* Of units that share their rows, the first merges the partial states of all. */
static void merge_task(void *arg, int32_t task, int32_t thread)
{
    const struct attention_job *j = arg;
    int32_t n_kv = j->att->n_kv_heads;
    int32_t at = task / n_kv;
    int32_t kv_head = task % n_kv;
    const struct attention_unit *u = &j->unit[at];
    struct attention_run r = run_of(j, u, kv_head, thread);
    if (u->n_partials == 1 || (at > 0 && u[-1].token == u->token && u[-1].head == u->head)) {
        return;
    }
    float *total = j->partial + ((int64_t)at * n_kv + kv_head) * j->state_floats;
    for (int32_t i = 1; i < u->n_partials; i++) {
        j->way->merge(&r, total, total + (int64_t)i * n_kv * j->state_floats);
    }
    j->way->finish(&r, total);
}

/* ---- the work list ---- */

/* The splits that the unit's tokens see: u->split is the first, u->n_splits their
 * number, at least 1. */
static void count_splits(const struct attention_job *j, struct attention_unit *u)
{
    const struct batch *b = &j->c->batch;
    int32_t index = b->kv_len[u->seq] - (b->q_start[u->seq + 1] - u->token);
    int32_t first = attention_first(j->att, index);
    int32_t last = MAX(index + u->n_tokens - 1, 0);

    u->split = first / j->way->split_keys;
    u->n_splits = MAX(last / j->way->split_keys - u->split + 1, 1);
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
    int32_t heads = MIN(group, j->unit_rows);
    int32_t tokens = j->unit_rows / heads;
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

/* Make each thread's part of the scratch hold n floats. */
static int reserve(struct cpu_backend *c, int64_t n)
{
    int64_t need = div_ceil(n, 16) * 16; /* a cache line's */

    if (need <= c->attention_scratch_floats) {
        return 0;
    }
    c->attention_scratch =
        cpu_alloc(c, (size_t)need * (size_t)cpu_pool_threads(c->pool) * sizeof(float));
    c->attention_scratch_floats = c->attention_scratch ? need : 0;
    return c->attention_scratch ? 0 : ERR_NOMEM;
}

int cpu_attention_prepare(struct cpu_backend *c, int32_t head_dim)
{
    return reserve(c, cpu_attention_vectors.scratch_floats(c, head_dim));
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

/* Whether tiles are multiplied: with a cache of bfloat16 and heads of whole
 * registers. */
static bool by_tiles(const struct cpu_backend *c, const struct attention *a)
{
    return c->k.attention.rows > 0 && a->chunk == 0 && c->kv[a->group].dtype == DTYPE_BF16 &&
           a->head_dim % 16 == 0 && a->head_dim <= 256;
}

static int plan(struct attention_job *j)
{
    int64_t scratch = j->way->scratch_floats(j->c, j->att->head_dim);
    int64_t state = j->unit_rows * (2 + (int64_t)j->att->head_dim);
    int rc = 0;

    j->state_floats = div_ceil(state, 16) * 16;
    rc = reserve(j->c, STATES * j->state_floats + scratch);
    j->n_units = rc < 0 ? rc : list_units(j, false);
    if (j->n_units <= 0 ||
        j->n_units * j->att->n_kv_heads >= TASKS_PER_THREAD * cpu_pool_threads(j->c->pool)) {
        return MIN(j->n_units, 0);
    }
    int32_t whole = j->n_units;
    j->n_units = list_units(j, true);
    return j->n_units <= whole ? MIN(j->n_units, 0) : prepare_partial(j);
}

void cpu_attention_units(struct cpu_backend *c, struct mat out, struct mat qkv,
                         const struct attention *a)
{
    bool tiles = by_tiles(c, a);
    struct attention_job j = {
        .c = c,
        .out = out,
        .qkv = qkv,
        .att = a,
        .way = tiles ? &cpu_attention_tiles : &cpu_attention_vectors,
        .unit_rows = tiles ? c->k.attention.rows : ATTENTION_ROWS,
        .scale = a->scale * (c->kv[a->group].dtype == DTYPE_F8 ? attention_k_scale(a) : 1),
        .value_scale = c->kv[a->group].dtype == DTYPE_F8 ? attention_v_scale(a) : 1};

    if (plan(&j) < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for attention");
        return;
    }
    j.unit = c->attention_unit;
    cpu_pool_run(c->pool, j.n_units * a->n_kv_heads, unit_task, &j);
    if (j.partial) {
        cpu_pool_run(c->pool, j.n_units * a->n_kv_heads, merge_task, &j);
    }
}
