/* Layers with recurrent states as kernel launches. */
#include "kernels/cuda/states/states.h"

#include "kernels/cuda/cuda.h"

_Static_assert((int)STATES_DELTA == RECURRENCE_DELTA && (int)STATES_SSD == RECURRENCE_SSD &&
                   (int)STATES_CONV == RECURRENCE_CONV && (int)STATES_SCAN == RECURRENCE_SCAN,
               "kinds of recurrences");

_Static_assert(STATE_CHUNK_LEAST > LIMIT_DRAFT + 1, "what verifies drafts is not in chunks");

/* Whether sequences of many tokens are taken in chunks, whose operands are tf32: more
 * than activations of bf16 keep, and less than those of other types. */
static bool has_chunks(const struct cuda_backend *c, const struct recurrence *r, struct mat out)
{
    return c->state_chunks && out.dtype == DTYPE_BF16 && r->key_dim == STATE_CHUNK_KEYS &&
           r->value_dim % 32 == 0 && out.stride % 2 == 0 && (uintptr_t)out.data % 4 == 0 &&
           c->config.max_tokens >= STATE_CHUNK_LEAST;
}

/* Floats of recurrence_args.prepared, .factors and .chunks, for the largest step. */
struct recurrence_room {
    int64_t prepared, factors, chunks;
};

static int64_t in_fours(int64_t n)
{
    return div_ceil(n, 4) * 4;
}

static struct recurrence_room room_of(const struct cuda_backend *c, const struct recurrence *r,
                                      bool chunks)
{
    int64_t n = c->config.max_tokens, head = r->kind == RECURRENCE_DELTA ? 2 : 1;

    return (struct recurrence_room){.prepared = in_fours(n * recurrence_channels(r)),
                                    .factors = in_fours(n * 2 * r->n_heads),
                                    .chunks = chunks ? n * r->n_heads * head * STATE_CHUNK : 0};
}

/* Makes the room, of `n` floats. False: c->failed. */
static bool prepare(struct cuda_backend *c, int64_t n)
{
    if (n <= c->prepared_floats) {
        return true;
    }
    float *room =
        cuda_alloc(c, (size_t)n * sizeof(*room), "the tokens of a recurrence", &c->failed);
    if (!room) {
        return false;
    }
    c->prepared = room;
    c->prepared_floats = n;
    return true;
}

/* Makes the counters of decodes, for n_groups groups of a sequence. False:
 * c->failed. */
static bool prepare_arrivals(struct cuda_backend *c, int32_t n_groups)
{
    int64_t n = (int64_t)c->config.max_tokens * n_groups;
    size_t bytes = (size_t)n * sizeof(*c->arrivals);

    if (n <= c->n_arrivals) {
        return true;
    }
    uint32_t *room = cuda_alloc(c, bytes, "the decodes of a recurrence", &c->failed);
    if (!room ||
        !cuda_check(c, cudaMemsetAsync(room, 0, bytes, c->stream), "the decodes of a recurrence")) {
        return false;
    }
    c->arrivals = room;
    c->n_arrivals = n;
    return true;
}

/* Chunks that have tokens of the positions [first, first + n). */
static int32_t chunks_of(int32_t first, int32_t n, int32_t block_size)
{
    int32_t each = (int32_t)div_ceil(block_size, STATE_CHUNK), last = first + n - 1;

    return last / block_size * each + last % block_size / STATE_CHUNK -
           (first / block_size * each + first % block_size / STATE_CHUNK) + 1;
}

/* What the launches of a step take. */
static struct recurrence_step work_of(const struct cuda_backend *c, const struct step_arrays *s,
                                      int32_t rows, bool chunks)
{
    struct recurrence_step w = {.n_seqs = c->capturing ? c->padded : c->batch.n_seqs,
                                .rows = rows,
                                .verifies = c->verifies};
    const char *header = (const char *)c->header;
    const int32_t *q_start = (const int32_t *)(header + c->header->off_q_start);
    const int32_t *kv_len = (const int32_t *)(header + c->header->off_kv_len);

    for (int32_t i = 0; i < w.n_seqs && chunks && !c->capturing; i++) {
        int32_t n = q_start[i + 1] - q_start[i];
        if (n >= STATE_CHUNK_LEAST) {
            w.n_long++;
            w.n_chunks += chunks_of(kv_len[i] - n, n, s->block_size);
        }
    }
    return w;
}

/* Whether the kernels take this layer; else c->failed. */
static bool takes(struct cuda_backend *c, const struct recurrence *r)
{
    const struct mat *vector[] = {&r->conv, &r->conv_bias, &r->a_log, &r->dt_bias, &r->d};
    int32_t most = r->kind == RECURRENCE_SCAN ? SCAN_KEY_DIM : STATE_KEY_DIM;
    bool wide = true;

    for (size_t i = 0; i < ARRAY_LEN(vector); i++) {
        wide = wide && (!vector[i]->data || vector[i]->dtype == DTYPE_F32);
    }
    if (c->failed.code == 0 &&
        (!wide || r->key_dim > most || r->kernel > STATE_CONV_KERNEL || c->states.n_layers == 0)) {
        err_set(&c->failed, ERR_UNSUPPORTED,
                "cuda: a recurrence of %d keys a head (at most %d), of a convolution of %d inputs "
                "(at most %d), without a cache, or with vectors that are not float32",
                r->key_dim, most, r->kernel, STATE_CONV_KERNEL);
    }
    return cuda_usable(c);
}

/* What follows a recurrence's output. */
static struct gated_norm_args norm_of(const struct output_norm *after, struct mat out)
{
    const struct gated_norm *n = after->norm;

    return (struct gated_norm_args){.x = out.data,
                                    .gate = after->gate.data,
                                    .weight = n->weight.data,
                                    .x_stride = out.stride,
                                    .gate_stride = after->gate.stride,
                                    .weight_type = (int32_t)n->weight.dtype,
                                    .own_weights = n->weight.cols != n->width,
                                    .gate_first = n->gate_first,
                                    .width = n->width,
                                    .eps = n->eps};
}

void cuda_recurrence(struct backend *b, struct mat out, struct mat x, struct mat gates,
                     const struct recurrence *r, const struct output_norm *after)
{
    struct cuda_backend *c = cuda_of(b);
    const struct step_arrays s = cuda_group_arrays(c, r->group);

    cuda_start(c);
    cuda_rows(c, x);
    if (gates.data) {
        cuda_rows(c, gates);
    }
    if (after) {
        cuda_rows(c, after->gate);
    }
    int32_t rows = cuda_rows(c, out);
    bool matrices = r->kind == RECURRENCE_DELTA || r->kind == RECURRENCE_SSD;
    bool first = r->kind == RECURRENCE_SCAN && !gates.data; /* in place */
    if (matrices && !c->prepared) {
        c->state_chunks = !c->config.deterministic && recurrence_chunks_prepare();
    }
    bool chunks = matrices && has_chunks(c, r, out);
    struct recurrence_room room = room_of(c, r, chunks);
    if (!takes(c, r) || rows < 1 ||
        (matrices && (!prepare(c, room.prepared + room.factors + room.chunks) ||
                      !prepare_arrivals(c, r->n_groups)))) {
        return;
    }
    const struct recurrence_step work = work_of(c, &s, rows, chunks);
    const struct recurrence_args a = {
        .out = first ? x.data : out.data,
        .x = x.data,
        .gates = gates.data,
        .out_stride = first ? x.stride : out.stride,
        .x_stride = x.stride,
        .gate_stride = gates.stride,
        .gate_cols = gates.cols,
        .type = (int32_t)x.dtype,
        .kind = (int32_t)r->kind,
        .delta = r->kind == RECURRENCE_DELTA,
        .n_heads = r->n_heads,
        .n_groups = r->n_groups,
        .tiled = r->tiled,
        .key_dim = r->key_dim,
        .value_dim = r->value_dim,
        .kernel = r->kernel,
        .conv = r->conv.data,
        .conv_bias = r->conv_bias.data,
        .a_log = r->a_log.data,
        .a_log_stride = r->a_log.stride,
        .dt_bias = r->dt_bias.data,
        .d = r->d.data,
        .dt_min = r->dt_min,
        .dt_max = r->dt_max,
        .states = (float *)c->kv_data + r->layer * c->states.layer_stride,
        .block_stride = c->states.block_stride,
        .prepared = c->prepared,
        .factors = c->prepared + room.prepared,
        .chunks = chunks ? c->prepared + room.prepared + room.factors : NULL,
        .arrivals = c->arrivals,
        .after = after ? norm_of(after, out) : (struct gated_norm_args){0}};
    if (matrices) {
        launch_recurrence(&a, &s, &work, c->stream);
    } else if (r->kind == RECURRENCE_CONV || first) {
        launch_convolution(&a, &s, work.n_seqs, rows, c->stream);
    } else {
        launch_scan(&a, &s, work.n_seqs, c->stream);
    }
}

void cuda_gate_sigmoid(struct backend *b, struct mat x, struct mat gate)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    cuda_rows(c, gate);
    launch_gate_sigmoid(x.data, x.stride, gate.data, gate.stride, cuda_rows(c, x), x.cols,
                        (int)x.dtype, c->stream);
}

void cuda_multiply(struct backend *b, struct mat x, struct mat y, enum activation act)
{
    struct cuda_backend *c = cuda_of(b);
    bool one = y.rows == 1 && y.cols == 1 && y.data != x.data;

    cuda_start(c);
    if (!one) {
        cuda_rows(c, y);
    }
    launch_multiply(x.data, x.stride, y.data, one ? 0 : y.stride, (int)y.dtype, cuda_rows(c, x),
                    x.cols, (int)act, (int)x.dtype, c->stream);
}
