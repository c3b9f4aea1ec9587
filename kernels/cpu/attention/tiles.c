/* The rows of a unit by an instruction set that multiplies tiles (struct cpu_attention
 * of simd/kernels.h), over a cache of bfloat16.
 *
 * Groups of keys are read where they lie, if blocks are whole groups and keys whole
 * registers. Else, and where no row sees some of a group, they are copied: what lies
 * beyond a sequence may be anything, and a weight of 0 does not make 0 of it.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/attention/attention_impl.h"

enum { LINE_ELEMENTS = 32 }; /* of a cache line */
static const float LOG2_E = 1.44269504f;

struct tile_scratch {
    float *query;          /* packed */
    int32_t *at;           /* [rows] cache indices */
    uint16_t *key, *value; /* [TILE_KEYS, width] */
};

/* Elements of a key in tiles. */
static int32_t width_of(int32_t head_dim)
{
    return (int32_t)div_ceil(head_dim, 32) * 32;
}

/* Fills `ret` when base is not NULL. */
static int64_t scratch_layout(const struct cpu_backend *c, struct tile_scratch *ret, float *base,
                              int32_t head_dim)
{
    int64_t at = c->k.attention.query_floats(head_dim);
    int64_t key = at + c->k.attention.rows;
    int64_t value = key + (int64_t)width_of(head_dim) * TILE_KEYS / 2;

    if (base) {
        *ret = (struct tile_scratch){.query = base,
                                     .at = (int32_t *)(void *)(base + at),
                                     .key = (uint16_t *)(void *)(base + key),
                                     .value = (uint16_t *)(void *)(base + value)};
    }
    return value + (int64_t)width_of(head_dim) * TILE_KEYS / 2;
}

static int64_t scratch_floats(const struct cpu_backend *c, int32_t head_dim)
{
    return scratch_layout(c, NULL, NULL, head_dim);
}

static struct tile_scratch scratch_of(const struct attention_run *r)
{
    struct tile_scratch s;

    scratch_layout(r->j->c, &s, r->scratch, r->j->att->head_dim);
    return s;
}

static void begin(const struct attention_run *r)
{
    const struct attention_job *j = r->j;
    struct tile_scratch s = scratch_of(r);
    const float *query[ATTENTION_TILE_ROWS];

    for (int32_t i = 0; i < r->rows; i++) {
        query[i] = attention_query(r, i);
        s.at[i] = r->index + i / r->u->n_heads;
    }
    j->c->k.attention.pack(s.query, query, r->rows, j->att->head_dim,
                           j->att->softcap > 0 ? j->scale : j->scale * LOG2_E);
}

/* The key of cache index i; its value lies kv_stride elements behind it. */
static const uint16_t *key_at(const struct attention_run *r, int32_t i)
{
    const struct cpu_backend *c = r->j->c;
    const struct attention *a = r->j->att;
    const struct kv_layout *l = &c->kv[a->group];
    const int32_t *table = cpu_table(c, a->group, c->batch.row[r->u->seq]);
    int64_t at = table[i / l->block_size] * l->block_stride + a->layer * l->layer_stride +
                 r->kv_head * l->head_stride + i % l->block_size * l->token_stride;

    return (const uint16_t *)(const void *)c->kv_data + at;
}

/* Of group g, keys and values [lo, hi) of it: copied, the others 0. */
static void copy_group(const struct attention_run *r, const struct tile_scratch *s,
                       struct attention_tile *t, int32_t g, int32_t lo, int32_t hi)
{
    int32_t dim = r->j->att->head_dim, width = width_of(dim);
    int64_t at = (int64_t)g * KEY_GROUP * width;
    uint16_t *key = s->key + at, *value = s->value + at;
    size_t bytes = (size_t)dim * sizeof(*key);

    t->key[g] = key;
    t->value[g] = value;
    memset(key, 0, (size_t)KEY_GROUP * (size_t)width * sizeof(*key));
    memset(value, 0, (size_t)KEY_GROUP * (size_t)width * sizeof(*value));
    for (int32_t i = lo; i < hi; i++) {
        const uint16_t *from = key_at(r, t->first + g * KEY_GROUP + i);
        memcpy(key + i * width, from, bytes);
        memcpy(value + i * width, from + r->j->c->kv[r->j->att->group].kv_stride, bytes);
    }
}

/* Read ahead: the groups behind `first`, which the next fold is likely to take. */
static void fetch_groups(const struct attention_run *r, int32_t first)
{
    const struct kv_layout *l = &r->j->c->kv[r->j->att->group];
    int32_t end = MIN(first + TILE_KEYS, r->index + r->u->n_tokens);

    for (int32_t i = first; i < end; i += KEY_GROUP) {
        const uint16_t *key = key_at(r, i);
        for (int32_t at = 0; at < KEY_GROUP * l->token_stride; at += LINE_ELEMENTS) {
            __builtin_prefetch(key + at, 0, 2);
            __builtin_prefetch(key + l->kv_stride + at, 0, 2);
        }
    }
}

static void fold(const struct attention_run *r, const struct attention_span *span, float *state)
{
    const struct attention_job *j = r->j;
    const struct kv_layout *l = &j->c->kv[j->att->group];
    bool in_place = l->block_size % KEY_GROUP == 0 && j->att->head_dim % 32 == 0;
    struct tile_scratch s = scratch_of(r);
    struct attention_rows rows = {.query = s.query,
                                  .at = s.at,
                                  .n = r->rows,
                                  .dim = j->att->head_dim,
                                  .window = j->att->window,
                                  .softcap = j->att->softcap};
    struct attention_tile t = {.first = span->first,
                               .lo = span->lo / KEY_GROUP,
                               .hi = (int32_t)div_ceil(span->hi, KEY_GROUP)};

    for (int32_t g = t.lo; g < t.hi; g++) {
        int32_t lo = MAX(span->lo - g * KEY_GROUP, 0);
        int32_t hi = MIN(span->hi - g * KEY_GROUP, KEY_GROUP);
        if (hi - lo < KEY_GROUP || !in_place) {
            copy_group(r, &s, &t, g, lo, hi);
        } else {
            t.key[g] = key_at(r, span->first + g * KEY_GROUP);
            t.value[g] = t.key[g] + l->kv_stride;
        }
    }
    if (in_place) {
        fetch_groups(r, span->first + TILE_KEYS);
    }
    j->c->k.attention.fold(state, &rows, &t);
}

static void merge(const struct attention_run *r, float *into, const float *from)
{
    r->j->c->k.attention.merge(into, from, r->rows, r->j->att->head_dim);
}

static void finish(const struct attention_run *run, const float *state)
{
    const struct attention_job *j = run->j;
    const struct mat *sinks = &j->att->sinks;
    const float *max = state, *sum = state + j->unit_rows;
    float *out[ATTENTION_TILE_ROWS], scale[ATTENTION_TILE_ROWS];

    for (int32_t r = 0; r < run->rows; r++) {
        float sink = sinks->data
                         ? exp2f(LOG2_E * mat_row_const(*sinks, 0)[attention_head(run, r)] - max[r])
                         : 0;
        /* a padding row saw nothing */
        scale[r] = sum[r] > 0 ? j->value_scale / (sum[r] + sink) : 0;
        out[r] = attention_out(run, r);
    }
    j->c->k.attention.put(out, state, scale, run->rows, j->att->head_dim);
}

const struct attention_way cpu_attention_tiles = {.split_keys = 256,
                                                  .scratch_floats = scratch_floats,
                                                  .begin = begin,
                                                  .fold = fold,
                                                  .merge = merge,
                                                  .finish = finish};
