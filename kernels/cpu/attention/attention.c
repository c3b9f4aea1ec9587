/* The specification of paged attention: one query head at a time, scores in float32,
 * softmax in two passes.
 *
 * Of n query tokens of a sequence, token i has cache index kv_len - n + i. It attends
 * to the keys up to its own index, and of those to the last `window`, or to those of
 * its chunk. Key j lies in block table[j / block_size] at offset j % block_size.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/convert.h"

struct attention_job {
    struct cpu_backend *c;
    struct mat out, qkv;
    const struct attention *att;
};

/* Element index of the key (kv 0) or value (kv 1) of cache index j. */
static int64_t cache_at(const struct attention_job *job, const int32_t *table, int32_t j,
                        int32_t kv_head, int32_t kv)
{
    const struct kv_layout *l = &job->c->kv[job->att->group];

    return table[j / l->block_size] * l->block_stride + job->att->layer * l->layer_stride +
           kv * l->kv_stride + kv_head * l->head_stride + j % l->block_size * l->token_stride;
}

/* What the codes of the key (kv 0) or value (kv 1) of cache index j are multiplied
 * by. */
static float cache_scale(const struct attention_job *job, const int32_t *table, int32_t j,
                         int32_t kv_head, int32_t kv)
{
    const struct kv_layout *l = &job->c->kv[job->att->group];
    float scale = 1;

    if (l->dtype == DTYPE_F8) {
        return kv == 0 ? attention_k_scale(job->att) : attention_v_scale(job->att);
    }
    if (l->dtype == DTYPE_I8) {
        int32_t t = j % l->block_size;
        int64_t head = cache_at(job, table, j, kv_head, kv) - t * l->token_stride;
        memcpy(&scale, job->c->kv_data + head + l->scale_offset + t * (int64_t)sizeof(scale),
               sizeof(scale));
    }
    return scale;
}

/* scores[j - from] = scaled, then soft-capped q.k_j for j in [from, end). Returns the
 * greatest. */
static float score_keys(const struct attention_job *job, const int32_t *table, int32_t kv_head,
                        const float *q, int32_t from, int32_t end, float *scores)
{
    const struct attention *a = job->att;
    float best = -INFINITY;

    for (int32_t j = from; j < end; j++) {
        int64_t at = cache_at(job, table, j, kv_head, 0);
        float dot = 0;
        for (int32_t i = 0; i < a->head_dim; i++) {
            dot += q[i] * dtype_load(job->c->kv_data, job->c->kv[a->group].dtype, at + i);
        }
        float s = dot * cache_scale(job, table, j, kv_head, 0) * a->scale;
        s = a->softcap > 0 ? a->softcap * tanhf(s / a->softcap) : s;
        scores[j - from] = s;
        best = MAX(best, s);
    }
    return best;
}

static void attend_head(const struct attention_job *job, const int32_t *table, int32_t head,
                        const float *q, float *out, int32_t index, float *scores)
{
    const struct attention *a = job->att;
    int32_t kv_head = head / (a->n_heads / a->n_kv_heads);
    int32_t from = attention_first(a, index);
    int32_t end = index + 1;

    memset(out, 0, (size_t)a->head_dim * sizeof(*out));
    if (end <= from) {
        return; /* a padding row */
    }
    float best = score_keys(job, table, kv_head, q, from, end, scores);
    float sum = a->sinks.data ? expf(mat_row_const(a->sinks, 0)[head] - best) : 0;
    for (int32_t j = from; j < end; j++) {
        float p = expf(scores[j - from] - best);
        sum += p;
        p *= cache_scale(job, table, j, kv_head, 1);
        int64_t at = cache_at(job, table, j, kv_head, 1);
        for (int32_t i = 0; i < a->head_dim; i++) {
            out[i] += p * dtype_load(job->c->kv_data, job->c->kv[a->group].dtype, at + i);
        }
    }
    for (int32_t i = 0; i < a->head_dim; i++) {
        out[i] /= sum;
    }
}

int32_t cpu_sequence_of(const struct batch *b, int32_t t)
{
    int32_t low = 0;
    int32_t high = b->n_seqs;

    while (high - low > 1) {
        int32_t mid = (low + high) / 2;
        if (b->q_start[mid] <= t) {
            low = mid;
        } else {
            high = mid;
        }
    }
    return low;
}

static void attend_token(void *arg, int32_t t, int32_t thread)
{
    const struct attention_job *job = arg;
    const struct attention *a = job->att;
    const struct batch *b = &job->c->batch;
    int32_t s = cpu_sequence_of(b, t);
    const int32_t *table = cpu_table(job->c, a->group, b->row[s]);
    int32_t index = b->kv_len[s] - (b->q_start[s + 1] - t);
    float *scores = job->c->scores + thread * job->c->scores_cap;

    for (int32_t h = 0; h < a->n_heads; h++) {
        attend_head(job, table, h, mat_row(job->qkv, t) + (int64_t)h * a->head_dim,
                    mat_row(job->out, t) + (int64_t)h * a->head_dim, index, scores);
    }
}

void cpu_attention(struct backend *b, struct mat out, struct mat qkv, const struct attention *a)
{
    struct attention_job job = {.c = cpu_of(b), .out = out, .qkv = qkv, .att = a};

    if (job.c->k.scores) {
        cpu_attention_units(job.c, out, qkv, a);
        return;
    }
    cpu_pool_run(job.c->pool, job.c->batch.n_seqs > 0 ? job.c->batch.n_tokens : 0, attend_token,
                 &job);
}
