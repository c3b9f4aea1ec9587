/* rope_kv: per-head norms and rotation in place, then the write of keys and values into
 * the cache. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { TASK_TOKENS = 8 };

struct rope_job {
    struct cpu_backend *c;
    struct mat qkv;
    const struct rope *rope;
    const struct attention *att;
};

void cpu_rotate(const struct cpu_kernels *k, float *head, const float *cos_sin,
                const struct rope *r)
{
    int32_t half = r->rot_dim / 2;

    if (!r->interleaved) {
        k->rotate(head, cos_sin, half);
        return;
    }
    for (int32_t i = 0; i < half; i++) {
        float x = head[2 * i];
        float y = head[2 * i + 1];
        head[2 * i] = x * cos_sin[i] - y * cos_sin[half + i];
        head[2 * i + 1] = y * cos_sin[i] + x * cos_sin[half + i];
    }
}

static void norm_and_rotate(float *head, const struct rope_job *j, const struct norm *norm,
                            int32_t position)
{
    bool normed = norm->weight.data != NULL;

    if (normed && !j->rope->norm_last) {
        j->c->k.norm(head, head, j->att->head_dim, norm);
    }
    if (j->rope->cos_sin.data) {
        cpu_rotate(&j->c->k, head, mat_row_const(j->rope->cos_sin, position), j->rope);
    }
    if (normed && j->rope->norm_last) {
        j->c->k.norm(head, head, j->att->head_dim, norm);
    }
}

/* The scale of a head's int8 codes: one that is not finite has a NaN. */
static float int8_scale(const float *x, int32_t n)
{
    float most = 0, sum = 0;

    for (int32_t i = 0; i < n; i++) {
        most = MAX(most, fabsf(x[i]));
        sum += x[i] * 0; /* NaN unless all are finite */
    }
    return sum == 0 ? most / 127 : NAN;
}

/* Write the key (kv 0) or value (kv 1) of a head whose codes begin at `head`, for its
 * token `t`. */
static void write_head(const struct rope_job *j, const float *from, char *head, int32_t t,
                       int32_t kv)
{
    const struct kv_layout *l = &j->c->kv[j->att->group];
    char *to = head + t * l->token_stride * dtype_bytes(l->dtype);
    float scale = l->dtype == DTYPE_I8 ? int8_scale(from, l->head_dim)
                  : kv == 0            ? attention_k_scale(j->att)
                                       : attention_v_scale(j->att);
    float code[LIMIT_HEAD_DIM];

    if (l->dtype == DTYPE_I8) {
        memcpy(head + l->scale_offset + t * (int64_t)sizeof(scale), &scale, sizeof(scale));
    } else if (l->dtype != DTYPE_F8 || scale == 1) {
        j->c->k.store(to, l->dtype, from, l->head_dim);
        return;
    }
    j->c->k.load(code, from, DTYPE_F32, l->head_dim, scale > 0 ? 1 / scale : 0);
    j->c->k.store(to, l->dtype, code, l->head_dim);
}

/* Write a token's keys (kv 0) or values (kv 1), [n_kv_heads, head_dim], to its slot. */
static void write_cache(const struct rope_job *j, const float *from, int32_t slot, int32_t kv)
{
    const struct kv_layout *l = &j->c->kv[j->att->group];
    int64_t base = slot / l->block_size * l->block_stride + j->att->layer * l->layer_stride +
                   kv * l->kv_stride;

    for (int32_t h = 0; h < j->att->n_kv_heads; h++) {
        write_head(j, from + (int64_t)h * j->att->head_dim,
                   j->c->kv_data + (base + h * l->head_stride) * dtype_bytes(l->dtype),
                   slot % l->block_size, kv);
    }
}

/* v = v / its root mean square. */
static void norm_value(float *v, int32_t n, float eps)
{
    float sum = 0;

    for (int32_t i = 0; i < n; i++) {
        sum += v[i] * v[i];
    }
    float scale = 1 / sqrtf(sum / (float)n + eps);
    for (int32_t i = 0; i < n; i++) {
        v[i] *= scale;
    }
}

/* q *= the factor of its position; q is that of a whole token. */
static void scale_queries(const struct rope_job *j, float *q, int32_t position)
{
    const struct rope *r = j->rope;

    if (!r->cos_sin.data || !r->query_factors) {
        return;
    }
    float factor = mat_row_const(r->cos_sin, position)[r->rot_dim];
    for (int32_t i = 0; factor != 1 && i < j->att->n_heads * j->att->head_dim; i++) {
        q[i] *= factor;
    }
}

static void rope_token(const struct rope_job *j, int32_t t)
{
    const struct attention *a = j->att;
    const struct batch *b = &j->c->batch;
    float *q = mat_row(j->qkv, t); /* [n_heads + 2 n_kv_heads, head_dim] */
    float *k = q + (int64_t)a->n_heads * a->head_dim;
    float *v = k + (int64_t)a->n_kv_heads * a->head_dim;

    for (int32_t h = 0; h < a->n_heads; h++) {
        norm_and_rotate(q + (int64_t)h * a->head_dim, j, &j->rope->q_norm, b->position[t]);
    }
    scale_queries(j, q, b->position[t]);
    for (int32_t h = 0; h < a->n_kv_heads; h++) {
        norm_and_rotate(k + (int64_t)h * a->head_dim, j, &j->rope->k_norm, b->position[t]);
        if (j->rope->v_eps > 0) {
            norm_value(v + (int64_t)h * a->head_dim, a->head_dim, j->rope->v_eps);
        }
    }
    int32_t slot = cpu_slot(j->c, a->group, t);
    if (slot >= 0 && a->n_kv_heads > 0) {
        write_cache(j, k, slot, 0);
        write_cache(j, v, slot, 1);
    }
}

static void rope_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    const struct rope_job *j = arg;
    int32_t end = MIN((task + 1) * TASK_TOKENS, j->c->batch.n_tokens);
    for (int32_t t = task * TASK_TOKENS; t < end; t++) {
        rope_token(j, t);
    }
}

void cpu_rope_kv(struct backend *b, struct mat qkv, const struct rope *r, const struct attention *a)
{
    struct rope_job j = {.c = cpu_of(b), .qkv = qkv, .rope = r, .att = a};

    cpu_pool_run(j.c->pool, (int32_t)div_ceil(j.c->batch.n_tokens, TASK_TOKENS), rope_task, &j);
}
