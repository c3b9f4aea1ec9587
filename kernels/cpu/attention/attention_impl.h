/* Attention by units of rows (units.c), between the files beside this one: what a unit
 * is, and the ways in which its rows are computed. */
#ifndef QUIRE_KERNELS_CPU_ATTENTION_ATTENTION_IMPL_H
#define QUIRE_KERNELS_CPU_ATTENTION_ATTENTION_IMPL_H

#include "kernels/cpu/cpu.h"

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
    const struct attention_way *way;
    const struct attention_unit *unit;
    int32_t unit_rows; /* of a unit, at most */
    int32_t n_units;
    float scale;          /* of q.k, before the soft cap: of what the cache holds */
    float value_scale;    /* of the weighted sums */
    float *partial;       /* [n_units * n_kv_heads] states, with split-KV */
    int64_t state_floats; /* of one state, a multiple of a cache line's */
};

/* A unit on its way: a KV head of it, and the thread's scratch. */
struct attention_run {
    const struct attention_job *j;
    const struct attention_unit *u;
    int32_t kv_head;
    int32_t rows;   /* row r: token r / u->n_heads, query head r % u->n_heads of the unit */
    int32_t index;  /* cache index of the unit's first token */
    float *scratch; /* of the way's own, a multiple of a cache line's */
};

/* Keys [lo, hi) from cache index `first` on, up to TILE_KEYS, that some row sees; they
 * are not read beyond them. */
struct attention_span {
    int32_t first, lo, hi;
};

/* A state holds the online softmax of a unit's rows over some keys: per row the
 * greatest score, the sum of weights, and the weighted sum of values. It is the way's
 * own, but that the maxima come first, and that with maxima of -INFINITY and all else 0
 * it is the one over no keys. */
struct attention_way {
    int32_t split_keys; /* of a split, a multiple of TILE_KEYS */
    int64_t (*scratch_floats)(const struct cpu_backend *c, int32_t head_dim);
    /* Before all others: the unit's queries. */
    void (*begin)(const struct attention_run *r);
    void (*fold)(const struct attention_run *r, const struct attention_span *s, float *state);
    /* into = the state over the keys of both. */
    void (*merge)(const struct attention_run *r, float *into, const float *from);
    /* Write the rows' results. */
    void (*finish)(const struct attention_run *r, const float *state);
};

/* vectors.c, tiles.c */
extern const struct attention_way cpu_attention_vectors, cpu_attention_tiles;

/* The first token of a row, and its query head. */
static inline int32_t attention_token(const struct attention_unit *u, int32_t row)
{
    return u->token + row / u->n_heads;
}

static inline int32_t attention_head(const struct attention_run *r, int32_t row)
{
    const struct attention *a = r->j->att;

    return r->kv_head * (a->n_heads / a->n_kv_heads) + r->u->head + row % r->u->n_heads;
}

static inline const float *attention_query(const struct attention_run *r, int32_t row)
{
    return mat_row_const(r->j->qkv, attention_token(r->u, row)) +
           (int64_t)attention_head(r, row) * r->j->att->head_dim;
}

static inline float *attention_out(const struct attention_run *r, int32_t row)
{
    return mat_row(r->j->out, attention_token(r->u, row)) +
           (int64_t)attention_head(r, row) * r->j->att->head_dim;
}

#endif
