/* The rows of a unit by the functions for vectors (simd/attention_vec.h). */
#include <math.h>
#include <string.h>

#include "kernels/cpu/attention/attention_impl.h"

enum {
    UNIT_ROWS = ATTENTION_ROWS,
    /* from this many rows on, values are converted to float32 once for all of them */
    CONVERT_ROWS = 8,
};

struct state {
    float *max, *sum; /* [UNIT_ROWS] */
    float *acc;       /* [UNIT_ROWS, head_dim] */
};

/* A thread's scratch, in one allocation. */
struct vector_scratch {
    float *score; /* [UNIT_ROWS, TILE_KEYS] */
    float *key;   /* [head_dim, TILE_KEYS] */
    float *value; /* [TILE_KEYS, head_dim] */
};

static struct state state_at(const float *base)
{
    float *at = (float *)(uintptr_t)base;

    return (struct state){.max = at, .sum = at + UNIT_ROWS, .acc = at + 2 * (int64_t)UNIT_ROWS};
}

static int64_t scratch_floats(const struct cpu_backend *c, int32_t head_dim)
{
    (void)c;
    return (UNIT_ROWS + 2 * div_ceil(head_dim, 16) * 16) * TILE_KEYS;
}

static struct vector_scratch scratch_at(float *base, int32_t head_dim)
{
    float *key = base + UNIT_ROWS * TILE_KEYS;

    return (struct vector_scratch){
        .score = base, .key = key, .value = key + div_ceil(head_dim, 16) * 16 * TILE_KEYS};
}

static void begin(const struct attention_run *r)
{
    (void)r;
}

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

/* Find the tile's keys and values. */
static void find_keys(const struct attention_run *r, struct key_tile *p)
{
    const struct cpu_backend *c = r->j->c;
    const struct attention *a = r->j->att;
    const struct kv_layout *l = &c->kv[a->group];
    int64_t bytes = dtype_bytes(l->dtype);
    const int32_t *table = cpu_table(c, a->group, c->batch.row[r->u->seq]);
    int64_t base = a->layer * l->layer_stride + r->kv_head * l->head_stride;
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
}

/* Transpose the keys, and convert the values if the unit has many rows. */
static void convert_tile(const struct attention_run *r, const struct vector_scratch *s,
                         struct key_tile *p)
{
    const struct cpu_backend *c = r->j->c;
    int32_t dim = r->j->att->head_dim;
    enum dtype type = c->kv[r->j->att->group].dtype;

    c->k.transpose_keys(s->key, p->key, dim, type);
    p->value_type = type;
    if (r->rows >= CONVERT_ROWS && type != DTYPE_F32) {
        for (int32_t i = p->lo; i < p->hi; i++) {
            c->k.load(s->value + (int64_t)i * dim, p->value[i], type, dim, 1);
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

/* Fold a tile into the state of the unit's rows. */
static void fold_tile(const struct attention_run *run, const struct vector_scratch *s,
                      const struct key_tile *p, const struct state *to)
{
    const struct attention_job *j = run->j;
    const struct cpu_kernels *k = &j->c->k;
    float cap = j->att->softcap;
    bool scaled = j->c->kv[j->att->group].scale_offset > 0;
    float keep[UNIT_ROWS];
    const float *query[UNIT_ROWS];

    for (int32_t r = 0; r < run->rows; r++) {
        query[r] = attention_query(run, r);
    }
    k->scores(s->score, query, run->rows, s->key, j->att->head_dim, j->scale);
    for (int32_t r = 0; r < run->rows && scaled; r++) {
        scale_keys(s->score + r * TILE_KEYS, p->key_scale, p);
    }
    for (int32_t i = 0; i < run->rows * TILE_KEYS && cap > 0; i++) {
        s->score[i] = cap * tanhf(s->score[i] / cap);
    }
    for (int32_t r = 0; r < run->rows; r++) {
        int32_t at = run->index + r / run->u->n_heads - p->first; /* of the row, in the tile */
        int32_t hi = MIN(p->hi, at + 1);
        int32_t lo = MAX(p->lo, attention_first(j->att, at + p->first) - p->first);
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
    k->accumulate(to->acc, j->att->head_dim, keep, s->score, run->rows, p->value, p->lo, p->hi,
                  p->value_type);
}

static void fold(const struct attention_run *r, const struct attention_span *span, float *state)
{
    struct vector_scratch s = scratch_at(r->scratch, r->j->att->head_dim);
    struct state to = state_at(state);
    struct key_tile p;

    p.first = span->first;
    p.lo = span->lo;
    p.hi = span->hi;
    find_keys(r, &p);
    convert_tile(r, &s, &p);
    fold_tile(r, &s, &p, &to);
}

static void merge(const struct attention_run *run, float *into, const float *from)
{
    struct state a = state_at(into);
    struct state b = state_at(from);
    int32_t dim = run->j->att->head_dim;

    for (int32_t r = 0; r < run->rows; r++) {
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

static void finish(const struct attention_run *run, const float *state)
{
    struct state s = state_at(state);
    const struct attention_job *j = run->j;
    int32_t dim = j->att->head_dim;

    for (int32_t r = 0; r < run->rows; r++) {
        const struct mat *sinks = &j->att->sinks;
        float sink =
            sinks->data ? expf(mat_row_const(*sinks, 0)[attention_head(run, r)] - s.max[r]) : 0;
        /* a padding row saw nothing */
        float scale = s.sum[r] > 0 ? j->value_scale / (s.sum[r] + sink) : 0;
        j->c->k.load(attention_out(run, r), s.acc + (int64_t)r * dim, DTYPE_F32, dim, scale);
    }
}

const struct attention_way cpu_attention_vectors = {.split_keys = 512,
                                                    .scratch_floats = scratch_floats,
                                                    .begin = begin,
                                                    .fold = fold,
                                                    .merge = merge,
                                                    .finish = finish};
