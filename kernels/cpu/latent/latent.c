/* Multi-head latent attention (backend.h, struct latent_attention): the cache write,
 * the products that lead into the space of latents and out of it, and attention over
 * the cache between them, as plain loops, which are the specification, and by the
 * vectors of simd/.
 *
 * The keys of a token are visited in tiles from the first one on, with the softmax
 * rescaled from tile to tile: a row's bits depend on its sequence alone. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { TASK_TOKENS = 8, TASK_HEADS = 8, LATENT_KEYS = 8 };

struct latent_job {
    struct cpu_backend *c;
    struct mat q, kv; /* of latent_kv */
    const struct latent_attention *att;
    /* Of the tokens from `first` on: queries over latents, weighted sums of latents. */
    struct mat over, sum;
    int32_t first;
};

static int32_t latent_width(const struct latent_attention *a)
{
    return a->latent + a->rot_dim;
}

/* ---- latent_kv ---- */

/* Element index of a slot's latent in the cache. */
static int64_t slot_at(const struct latent_job *j, int32_t slot)
{
    const struct kv_layout *l = &j->c->kv[j->att->group];

    return slot / l->block_size * l->block_stride + j->att->layer * l->layer_stride +
           slot % l->block_size * l->token_stride;
}

static void write_token(const struct latent_job *j, int32_t t)
{
    const struct latent_attention *a = j->att;
    const struct cpu_kernels *k = &j->c->k;
    const float *angles = mat_row_const(a->cos_sin, j->c->batch.position[t]);
    const struct rope rope = {.rot_dim = a->rot_dim, .interleaved = a->interleaved};
    int32_t width = a->nope_dim + a->rot_dim, slot = cpu_slot(j->c, a->group, t);
    float *q = mat_row(j->q, t), *kv = mat_row(j->kv, t);

    for (int32_t h = 0; h < a->n_heads; h++) {
        cpu_rotate(k, q + (int64_t)h * width + a->nope_dim, angles, &rope);
    }
    k->norm(kv, kv, a->latent, &a->norm);
    cpu_rotate(k, kv + a->latent, angles, &rope);
    if (slot >= 0) {
        enum dtype type = j->c->kv[a->group].dtype;
        k->store(j->c->kv_data + slot_at(j, slot) * dtype_bytes(type), type, kv, latent_width(a));
    }
}

static void write_task(void *arg, int32_t task, int32_t thread)
{
    const struct latent_job *j = arg;
    int32_t end = MIN((task + 1) * TASK_TOKENS, j->c->batch.n_tokens);

    (void)thread;
    for (int32_t t = task * TASK_TOKENS; t < end; t++) {
        write_token(j, t);
    }
}

void cpu_latent_kv(struct backend *b, struct mat q, struct mat kv, const struct latent_attention *a)
{
    struct latent_job j = {.c = cpu_of(b), .q = q, .kv = kv, .att = a};

    cpu_pool_run(j.c->pool, (int32_t)div_ceil(j.c->batch.n_tokens, TASK_TOKENS), write_task, &j);
}

/* ---- attention over latents ---- */

/* The latents of cache indices [first, first + n) of a sequence as floats,
 * [n][latent_width]. */
static void load_keys(const struct latent_job *j, const int32_t *table, int32_t first, int32_t n,
                      float *out)
{
    const struct kv_layout *l = &j->c->kv[j->att->group];
    int32_t width = latent_width(j->att);

    for (int32_t i = 0; i < n; i++) {
        int32_t at = first + i;
        int64_t element = slot_at(j, table[at / l->block_size] * l->block_size) +
                          at % l->block_size * l->token_stride;
        j->c->k.load(out + (int64_t)i * width, j->c->kv_data + element * dtype_bytes(l->dtype),
                     l->dtype, width, 1);
    }
}

/* The state of one head's softmax: the greatest score, and the sum of the weights
 * relative to it. */
struct softmax {
    float max, sum;
};

/* Fold n keys into a head's state and its weighted sum of latents. */
static void fold_keys(const struct latent_attention *a, const float *q, const float *key, int32_t n,
                      struct softmax *s, float *sum)
{
    int32_t width = latent_width(a);
    float score[LATENT_KEYS], max = s->max;

    for (int32_t i = 0; i < n; i++) {
        const float *k = key + (int64_t)i * width;
        float dot = 0;
        for (int32_t d = 0; d < width; d++) {
            dot += q[d] * k[d];
        }
        score[i] = dot * a->scale;
        max = MAX(max, score[i]);
    }
    float keep = expf(s->max - max);
    s->sum *= keep;
    for (int32_t d = 0; d < a->latent; d++) {
        sum[d] *= keep;
    }
    for (int32_t i = 0; i < n; i++) {
        const float *k = key + (int64_t)i * width;
        float p = expf(score[i] - max);
        s->sum += p;
        for (int32_t d = 0; d < a->latent; d++) {
            sum[d] += p * k[d];
        }
    }
    s->max = max;
}

/* ---- the same by tiles of TILE_KEYS keys ---- */

/* Where the latents of cache indices [first, first + n) lie; the places behind them
 * repeat the last. */
static void find_keys(const struct latent_job *j, const int32_t *table, int32_t first, int32_t n,
                      const void **key)
{
    const struct kv_layout *l = &j->c->kv[j->att->group];

    for (int32_t i = 0; i < TILE_KEYS; i++) {
        int32_t at = first + MIN(i, n - 1);
        int64_t element = slot_at(j, table[at / l->block_size] * l->block_size) +
                          at % l->block_size * l->token_stride;
        key[i] = j->c->kv_data + element * dtype_bytes(l->dtype);
    }
}

/* Heads [first, end) of row r of the portion, of whose sequence n_keys are seen. */
static void attend_tiled(const struct latent_job *j, int32_t r, int32_t first, int32_t end,
                         const int32_t *table, int32_t n_keys, int32_t thread)
{
    const struct latent_attention *a = j->att;
    const struct cpu_kernels *k = &j->c->k;
    float *score = j->c->attention_scratch + thread * j->c->attention_scratch_floats;
    float *keys = score + ATTENTION_ROWS * TILE_KEYS;
    float *sum = mat_row(j->sum, r) + (int64_t)first * a->latent;
    float max[TASK_HEADS], all[TASK_HEADS] = {0}, keep[TASK_HEADS];
    const float *q[TASK_HEADS];
    const void *key[TILE_KEYS];
    int32_t rows = end - first;
    enum dtype type = j->c->kv[a->group].dtype;

    for (int32_t h = 0; h < rows; h++) {
        q[h] = mat_row_const(j->over, r) + (int64_t)(first + h) * latent_width(a);
        max[h] = -INFINITY;
    }
    memset(sum, 0, (size_t)rows * (size_t)a->latent * sizeof(*sum));
    for (int32_t at = 0; at < n_keys; at += TILE_KEYS) {
        int32_t n = MIN(TILE_KEYS, n_keys - at);
        find_keys(j, table, at, n, key);
        k->transpose_keys(keys, key, latent_width(a), type);
        k->scores(score, q, rows, keys, latent_width(a), a->scale);
        for (int32_t h = 0; h < rows; h++) {
            keep[h] = k->softmax(score + h * TILE_KEYS, 0, n, &max[h], &all[h]);
        }
        k->accumulate(sum, a->latent, keep, score, rows, key, 0, n, type);
    }
    for (int32_t h = 0; h < rows && n_keys > 0; h++) {
        float *of = sum + (int64_t)h * a->latent;
        k->load(of, of, DTYPE_F32, a->latent, 1 / all[h]);
    }
}

/* ---- tasks ---- */

/* Heads [first, end) of row r of the portion. */
static void attend_heads(const struct latent_job *j, int32_t r, int32_t first, int32_t end,
                         int32_t thread)
{
    const struct latent_attention *a = j->att;
    const struct batch *b = &j->c->batch;
    float key[LATENT_KEYS * LIMIT_LATENT_DIM];
    struct softmax state[TASK_HEADS];
    int32_t t = j->first + r, s = cpu_sequence_of(b, t);
    const int32_t *table = cpu_table(j->c, a->group, b->row[s]);
    int32_t n_keys = b->kv_len[s] - (b->q_start[s + 1] - t) + 1; /* <= 0: a padding row */
    const float *q = mat_row_const(j->over, r);
    float *sum = mat_row(j->sum, r);

    if (j->c->k.scores) {
        attend_tiled(j, r, first, end, table, n_keys, thread);
        return;
    }
    memset(sum + (int64_t)first * a->latent, 0,
           (size_t)(end - first) * (size_t)a->latent * sizeof(*sum));
    for (int32_t h = first; h < end; h++) {
        state[h - first] = (struct softmax){-INFINITY, 0};
    }
    for (int32_t at = 0; at < n_keys; at += LATENT_KEYS) {
        int32_t n = MIN(LATENT_KEYS, n_keys - at);
        load_keys(j, table, at, n, key);
        for (int32_t h = first; h < end; h++) {
            fold_keys(a, q + (int64_t)h * latent_width(a), key, n, &state[h - first],
                      sum + (int64_t)h * a->latent);
        }
    }
    for (int32_t h = first; h < end && n_keys > 0; h++) {
        float *of = sum + (int64_t)h * a->latent, scale = 1 / state[h - first].sum;
        for (int32_t d = 0; d < a->latent; d++) {
            of[d] *= scale;
        }
    }
}

static void attend_task(void *arg, int32_t task, int32_t thread)
{
    const struct latent_job *j = arg;
    int32_t n = (int32_t)div_ceil(j->att->n_heads, TASK_HEADS); /* tasks of a token */
    int32_t first = task % n * TASK_HEADS;

    attend_heads(j, task / n, first, MIN(first + TASK_HEADS, j->att->n_heads), thread);
}

/* ---- into the space of latents and out of it ---- */

/* Rows [first, first + n) of a stacked weight. It is not the weight that its handle
 * stands for. */
static struct mat part(struct mat w, int32_t first, int32_t n)
{
    struct mat m = mat_rows(w, first, n);

    m.priv = NULL;
    return m;
}

/* The rotated ends of a row's queries, behind their images in the space of latents. */
static void copy_rotated(const struct latent_job *j, int32_t r)
{
    const struct latent_attention *a = j->att;

    for (int32_t h = 0; h < a->n_heads; h++) {
        memcpy(mat_row(j->over, r) + (int64_t)h * latent_width(a) + a->latent,
               mat_row_const(j->q, j->first + r) + (int64_t)h * (a->nope_dim + a->rot_dim) +
                   a->nope_dim,
               (size_t)a->rot_dim * sizeof(float));
    }
}

static void attend_portion(struct latent_job *j, struct mat out)
{
    const struct latent_attention *a = j->att;
    struct backend *b = &j->c->base;
    int32_t n = out.rows, width = a->nope_dim + a->rot_dim;

    for (int32_t h = 0; h < a->n_heads; h++) {
        cpu_linear(b, mat_cols(j->over, h * latent_width(a), a->latent),
                   mat_cols(mat_rows(j->q, j->first, n), h * width, a->nope_dim),
                   part(a->k_up, h * a->latent, a->latent), NULL);
    }
    for (int32_t r = 0; r < n; r++) {
        copy_rotated(j, r);
    }
    cpu_pool_run(j->c->pool, n * (int32_t)div_ceil(a->n_heads, TASK_HEADS), attend_task, j);
    for (int32_t h = 0; h < a->n_heads; h++) {
        cpu_linear(b, mat_cols(out, h * a->v_dim, a->v_dim),
                   mat_cols(j->sum, h * a->latent, a->latent),
                   part(a->v_up, h * a->v_dim, a->v_dim), NULL);
    }
}

void cpu_latent_attention(struct backend *b, struct mat out, struct mat q,
                          const struct latent_attention *a, const struct latent_scratch *s)
{
    struct latent_job j = {.c = cpu_of(b), .q = q, .att = a};
    int32_t n = j.c->batch.n_seqs > 0 ? j.c->batch.n_tokens : 0, most = MIN(s->q.rows, s->sum.rows);

    if (j.c->k.scores && cpu_attention_prepare(j.c, a->latent + a->rot_dim) < 0) {
        cpu_fail(j.c, ERR_NOMEM, "out of memory for attention");
        return;
    }
    for (; j.first < n; j.first += most) {
        int32_t rows = MIN(most, n - j.first);
        j.over = mat_rows(s->q, 0, rows);
        j.sum = mat_rows(s->sum, 0, rows);
        attend_portion(&j, mat_rows(out, j.first, rows));
    }
}
