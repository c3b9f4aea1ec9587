/* Layers with recurrent states as kernel launches. */
#include "kernels/cuda/states/states.h"

#include "kernels/cuda/cuda.h"

_Static_assert((int)STATES_DELTA == RECURRENCE_DELTA && (int)STATES_SSD == RECURRENCE_SSD &&
                   (int)STATES_CONV == RECURRENCE_CONV && (int)STATES_SCAN == RECURRENCE_SCAN,
               "kinds of recurrences");

/* Makes the room for prepared tokens, for the largest step. False: c->failed. */
static bool prepare(struct cuda_backend *c, const struct recurrence *r)
{
    int64_t n = (int64_t)c->config.max_tokens * (recurrence_channels(r) + 2 * r->n_heads);

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

void cuda_recurrence(struct backend *b, struct mat out, struct mat x, struct mat gates,
                     const struct recurrence *r)
{
    struct cuda_backend *c = cuda_of(b);
    const struct step_arrays s = cuda_group_arrays(c, r->group);

    cuda_start(c);
    cuda_rows(c, x);
    if (gates.data) {
        cuda_rows(c, gates);
    }
    int32_t rows = cuda_rows(c, out), n_seqs = c->capturing ? c->padded : c->batch.n_seqs;
    bool matrices = r->kind == RECURRENCE_DELTA || r->kind == RECURRENCE_SSD;
    bool first = r->kind == RECURRENCE_SCAN && !gates.data; /* in place */
    if (!takes(c, r) || (matrices && !prepare(c, r)) || rows < 1) {
        return;
    }
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
        .factors = c->prepared + (int64_t)c->config.max_tokens * recurrence_channels(r)};
    if (matrices) {
        launch_recurrence(&a, &s, n_seqs, rows, c->stream);
    } else if (r->kind == RECURRENCE_CONV || first) {
        launch_convolution(&a, &s, n_seqs, rows, c->stream);
    } else {
        launch_scan(&a, &s, n_seqs, c->stream);
    }
}

void cuda_norm_gated(struct backend *b, struct mat x, struct mat gate, const struct gated_norm *n)
{
    struct cuda_backend *c = cuda_of(b);
    const struct gated_norm_args a = {.x = x.data,
                                      .gate = gate.data,
                                      .weight = n->weight.data,
                                      .x_stride = x.stride,
                                      .gate_stride = gate.stride,
                                      .weight_type = (int32_t)n->weight.dtype,
                                      .own_weights = n->weight.cols != n->width,
                                      .gate_first = n->gate_first,
                                      .width = n->width,
                                      .eps = n->eps};

    cuda_start(c);
    cuda_rows(c, gate);
    launch_norm_gated(&a, cuda_rows(c, x), x.cols, (int)x.dtype, c->stream);
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
