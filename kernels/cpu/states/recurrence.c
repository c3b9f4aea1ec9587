/* The specification of layers with recurrent states: plain loops, a token after the
 * other, so that a sequence gives the same bits however it is cut into steps.
 *
 * First the convolution, in place in x, then the matrices, a head a task, or the scan,
 * some channels a task. A task takes the state over from the block that the step before
 * wrote to and then works on the block of the token at hand; both may be the same.
 * Where the next token has another block, the state is taken over there again, and that
 * behind the token stays.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/activations.h"
#include "kernels/cpu/cpu.h"

enum { TASK_CHANNELS = 64 };

struct recurrence_job {
    struct cpu_backend *c;
    const struct recurrence *r;
    struct mat out, x, gates;
    int32_t n_parts; /* tasks of a sequence */
};

/* A sequence of the step and where its states lie. */
struct span {
    int32_t start, n;  /* its tokens in the step */
    const float *from; /* the layer's state before them; NULL: all 0 */
    bool cached;       /* else there is nowhere to write, in a step without a cache */
};

/* The layer's state in the block of token t. */
static float *state_of(const struct recurrence_job *j, int32_t t)
{
    const struct kv_layout *l = &j->c->kv[j->r->group];
    float *blocks = (float *)j->c->kv_data + j->r->layer * l->layer_stride;

    return blocks + cpu_slot(j->c, j->r->group, t) / l->block_size * l->block_stride;
}

static struct span span_of(const struct recurrence_job *j, int32_t seq)
{
    const struct batch *b = &j->c->batch;
    const struct kv_layout *l = &j->c->kv[j->r->group];
    const int32_t *table = cpu_table(j->c, j->r->group, b->row[seq]);
    struct span s = {.start = b->q_start[seq], .n = b->q_start[seq + 1] - b->q_start[seq]};
    int32_t first = b->kv_len[seq] - s.n;
    float *blocks = (float *)j->c->kv_data + j->r->layer * l->layer_stride;

    if (first > 0) {
        s.from = blocks + table[(first - 1) / l->block_size] * l->block_stride;
    }
    s.cached = s.n > 0 && cpu_slot(j->c, j->r->group, s.start + s.n - 1) >= 0;
    return s;
}

/* ---- convolution ---- */

/* Keep the last inputs of channels [first, first + n) behind token t. */
static void keep_inputs(const struct recurrence_job *j, int32_t t, int32_t first, int32_t n,
                        float past[][LIMIT_CONV_KERNEL])
{
    int32_t before = j->r->kernel - 1;
    float *to = state_of(j, t) + (int64_t)first * before;

    for (int32_t i = 0; i < n; i++) {
        memcpy(to + (int64_t)i * before, past[i], (size_t)before * sizeof(float));
    }
}

/* Convolve channels [first, first + n) of a sequence; `past` are their last kernel - 1
 * inputs, oldest first. */
static void convolve(const struct recurrence_job *j, const struct span *s, int32_t first, int32_t n,
                     float past[][LIMIT_CONV_KERNEL])
{
    const struct recurrence *r = j->r;
    const float *w = r->conv.data, *bias = r->conv_bias.data;
    int32_t size = r->kernel;
    bool alone = r->kind == RECURRENCE_CONV; /* its result is the layer's */

    for (int32_t t = s->start; t < s->start + s->n; t++) {
        float *x = mat_row(j->x, t) + first;
        float *to = alone ? (float *)mat_row(j->out, t) + first : x;
        for (int32_t i = 0; i < n; i++) {
            const float *weight = w + (int64_t)(first + i) * size;
            float sum = bias ? bias[first + i] : 0;
            past[i][size - 1] = x[i];
            for (int32_t k = 0; k < size; k++) {
                sum += weight[k] * past[i][k];
            }
            for (int32_t k = 0; k < size - 1; k++) {
                past[i][k] = past[i][k + 1];
            }
            to[i] = alone ? sum : silu(sum);
        }
        bool last = t + 1 == s->start + s->n;
        if (s->cached && (last || state_of(j, t) != state_of(j, t + 1))) {
            keep_inputs(j, t, first, n, past);
        }
    }
}

static void convolve_task(void *arg, int32_t task, int32_t thread)
{
    const struct recurrence_job *j = arg;
    struct span s = span_of(j, task / j->n_parts);
    int32_t first = task % j->n_parts * TASK_CHANNELS, before = j->r->kernel - 1;
    int32_t n = MIN(TASK_CHANNELS, j->x.cols - first);
    float past[TASK_CHANNELS][LIMIT_CONV_KERNEL] = {0};

    (void)thread;
    for (int32_t i = 0; i < n && s.from; i++) {
        memcpy(past[i], s.from + (int64_t)(first + i) * before, (size_t)before * sizeof(float));
    }
    convolve(j, &s, first, n, past);
}

/* ---- matrices ---- */

static float sigmoid(float x)
{
    return 1 / (1 + expf(-x));
}

/* The operands of a head for one token. */
struct operands {
    const float *q, *k; /* [key_dim] */
    const float *v;     /* [value_dim] */
    float *out;         /* [value_dim] */
    float scale;        /* of q */
    float length;       /* k is divided by it */
    float decay;        /* of S */
    float rate;         /* sigmoid(gate_b), or dt */
};

/* 1 / |y|, over n elements. */
static float inverse_length(const float *y, int32_t n)
{
    float sum = 0;

    for (int32_t i = 0; i < n; i++) {
        sum += y[i] * y[i];
    }
    return 1 / sqrtf(sum + 1e-6f);
}

static struct operands operands_of(const struct recurrence_job *j, int32_t t, int32_t head)
{
    const struct recurrence *r = j->r;
    const float *x = mat_row_const(j->x, t), *gate = mat_row_const(j->gates, t);
    int32_t keys = r->n_groups * r->key_dim, values = r->n_heads * r->value_dim;
    int32_t at = recurrence_group(r, head) * r->key_dim;
    bool delta = r->kind == RECURRENCE_DELTA;
    float a = expf(((const float *)r->a_log.data)[head]),
          bias = ((const float *)r->dt_bias.data)[head];
    struct operands o = {.scale = 1, .length = 1};

    o.q = x + (delta ? 0 : values + keys) + at;
    o.k = x + (delta ? keys : values) + at;
    o.v = x + (delta ? 2 * keys : 0) + head * r->value_dim;
    o.out = mat_row(j->out, t) + head * r->value_dim;
    if (delta) {
        o.scale = inverse_length(o.q, r->key_dim) / sqrtf((float)r->key_dim);
        o.length = inverse_length(o.k, r->key_dim);
        o.decay = expf(-a * softplus(gate[r->n_heads + head] + bias));
        o.rate = sigmoid(gate[head]);
    } else {
        o.rate = fminf(fmaxf(softplus(gate[head] + bias), r->dt_min), r->dt_max);
        o.decay = expf(-a * o.rate);
    }
    return o;
}

/* S decays, and `add` [value_dim] = rate * (v - S^T k) or rate * v. */
static void decay(const struct recurrence *r, const struct operands *o, float *s, float *add)
{
    int32_t n = r->value_dim;
    float known[LIMIT_HEAD_DIM] = {0};

    for (int32_t i = 0; i < r->key_dim; i++) {
        float *row = s + (int64_t)i * n, k = o->k[i] * o->length;
        for (int32_t c = 0; c < n; c++) {
            row[c] *= o->decay;
            known[c] += row[c] * k;
        }
    }
    for (int32_t c = 0; c < n; c++) {
        add[c] = o->rate * (r->kind == RECURRENCE_DELTA ? o->v[c] - known[c] : o->v[c]);
    }
}

static void head_token(const struct recurrence *r, const struct operands *o, float *s, float skip)
{
    int32_t n = r->value_dim;
    float add[LIMIT_HEAD_DIM], sum[LIMIT_HEAD_DIM] = {0};

    decay(r, o, s, add);
    for (int32_t i = 0; i < r->key_dim; i++) {
        float *row = s + (int64_t)i * n, k = o->k[i] * o->length, q = o->q[i] * o->scale;
        for (int32_t c = 0; c < n; c++) {
            row[c] += k * add[c];
            sum[c] += row[c] * q;
        }
    }
    for (int32_t c = 0; c < n; c++) {
        o->out[c] = sum[c] + skip * o->v[c];
    }
}

/* The layer's state behind token t, of which the elements [at, at + size) are taken
 * over from the token before. */
static float *take_state(const struct recurrence_job *j, const struct span *s, int32_t t,
                         int64_t at, int64_t size)
{
    const float *from = t == s->start ? s->from : state_of(j, t - 1);
    float *to = state_of(j, t);

    if (!from) {
        memset(to + at, 0, (size_t)size * sizeof(float));
    } else if (from != to) {
        memcpy(to + at, from + at, (size_t)size * sizeof(float));
    }
    return to + at;
}

static void head_task(void *arg, int32_t task, int32_t thread)
{
    const struct recurrence_job *j = arg;
    const struct recurrence *r = j->r;
    struct span s = span_of(j, task / j->n_parts);
    int32_t head = task % j->n_parts;
    int64_t size = (int64_t)r->key_dim * r->value_dim;
    int64_t at = (int64_t)recurrence_channels(r) * (r->kernel - 1) + head * size;
    float skip = r->d.data ? ((const float *)r->d.data)[head] : 0;

    (void)thread;
    if (!s.cached) { /* a row without a cache has no results */
        for (int32_t t = s.start; t < s.start + s.n; t++) {
            memset(mat_row(j->out, t) + head * r->value_dim, 0,
                   (size_t)r->value_dim * sizeof(float));
        }
        return;
    }
    for (int32_t t = s.start; t < s.start + s.n; t++) {
        float *state = take_state(j, &s, t, at, size);
        struct operands o = operands_of(j, t, head);
        head_token(r, &o, state, skip);
    }
}

/* ---- selective scan ---- */

/* A channel of a sequence: decay [key_dim], of which a step is a power. */
static void scan_channel(const struct recurrence_job *j, const struct span *s, int32_t channel)
{
    const struct recurrence *r = j->r;
    int32_t n = r->key_dim;
    int64_t at = (int64_t)recurrence_channels(r) * (r->kernel - 1) + (int64_t)channel * n;
    float bias = ((const float *)r->dt_bias.data)[channel];
    float skip = r->d.data ? ((const float *)r->d.data)[channel] : 0, rate[LIMIT_HEAD_DIM];

    for (int32_t i = 0; i < n; i++) {
        rate[i] = -expf(mat_row_const(r->a_log, channel)[i]);
    }
    for (int32_t t = s->start; t < s->start + s->n; t++) {
        const float *gate = mat_row_const(j->gates, t), *q = gate + j->gates.cols - n, *k = q - n;
        float v = mat_row_const(j->x, t)[channel], dt = softplus(gate[channel] + bias), sum = 0;
        float *state = s->cached ? take_state(j, s, t, at, n) : NULL;
        for (int32_t i = 0; i < n && state; i++) {
            state[i] = expf(rate[i] * dt) * state[i] + dt * k[i] * v;
            sum += state[i] * q[i];
        }
        /* a row without a cache has no results */
        ((float *)mat_row(j->out, t))[channel] = state ? sum + skip * v : 0;
    }
}

static void scan_task(void *arg, int32_t task, int32_t thread)
{
    const struct recurrence_job *j = arg;
    struct span s = span_of(j, task / j->n_parts);
    int32_t first = task % j->n_parts * TASK_CHANNELS;

    (void)thread;
    for (int32_t i = first; i < MIN(first + TASK_CHANNELS, j->x.cols); i++) {
        scan_channel(j, &s, i);
    }
}

void cpu_recurrence(struct backend *b, struct mat out, struct mat x, struct mat gates,
                    const struct recurrence *r, const struct output_norm *after)
{
    struct recurrence_job j = {.c = cpu_of(b), .r = r, .out = out, .x = x, .gates = gates};
    int32_t n_seqs = j.c->batch.n_seqs;

    if (!j.c->kv_data || r->kernel > LIMIT_CONV_KERNEL || r->value_dim > LIMIT_HEAD_DIM ||
        r->key_dim > LIMIT_HEAD_DIM) {
        cpu_fail(j.c, ERR_INVALID, "a recurrence without a cache, or larger than its limits");
        return;
    }
    bool scans = r->kind == RECURRENCE_SCAN && gates.data;
    j.n_parts = (int32_t)div_ceil(x.cols, TASK_CHANNELS);
    cpu_pool_run(j.c->pool, n_seqs * j.n_parts, scans ? scan_task : convolve_task, &j);
    if (r->kind == RECURRENCE_CONV || r->kind == RECURRENCE_SCAN) {
        return;
    }
    j.n_parts = r->n_heads;
    cpu_pool_run(j.c->pool, n_seqs * j.n_parts, head_task, &j);
    if (after) {
        cpu_norm_gated(b, out, after->gate, after->norm);
    }
}
