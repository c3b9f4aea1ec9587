/* Operations on rows, by the row functions of kernels.h: TASK_ROWS rows are one
 * task. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/activations.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/convert.h"

enum { TASK_ROWS = 16 };

/* Arguments of the operations in this file; each uses some. `out` has as many rows as
 * the operation. */
struct rows_job {
    struct cpu_backend *c;
    struct mat out, x, y;
    const struct norm *norm;
    enum activation act;
    float scale;
    int32_t offset, first;
    void (*row)(const struct rows_job *j, int32_t r);
};

static void run_rows_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    const struct rows_job *j = arg;
    int32_t end = MIN((task + 1) * TASK_ROWS, j->out.rows);
    for (int32_t r = task * TASK_ROWS; r < end; r++) {
        j->row(j, r);
    }
}

static void run_rows(struct rows_job *j)
{
    cpu_pool_run(j->c->pool, (int32_t)div_ceil(j->out.rows, TASK_ROWS), run_rows_task, j);
}

/* ---- embedding ---- */

/* Row r of the result = row `id` of the table x. */
static void load_table_row(const struct rows_job *j, int32_t r, int32_t id)
{
    float *out = mat_row(j->out, r);

    if (!j->x.format) {
        j->c->k.load(out, cpu_row(&j->x, id), j->x.dtype, j->out.cols, j->scale);
        return;
    }
    cpu_decode_row(&j->x, id, out);
    for (int32_t i = 0; i < j->out.cols; i++) {
        out[i] *= j->scale;
    }
}

static void embed_row(const struct rows_job *j, int32_t r)
{
    load_table_row(j, r, cpu_input_token(j->c, r));
}

void cpu_embed(struct backend *b, struct mat out, struct mat table, float scale)
{
    run_rows(&(struct rows_job){
        .c = cpu_of(b), .out = out, .x = table, .scale = scale, .row = embed_row});
}

static void embed_range_row(const struct rows_job *j, int32_t r)
{
    int32_t token = cpu_input_token(j->c, r) - j->first;
    float *out = mat_row(j->out, r);

    if (token < 0 || token >= j->x.rows) {
        memset(out, 0, (size_t)j->out.cols * sizeof(*out));
        return;
    }
    load_table_row(j, r, token);
}

void cpu_embed_range(struct cpu_backend *c, struct mat out, struct mat table, int32_t first,
                     float scale)
{
    run_rows(&(struct rows_job){
        .c = c, .out = out, .x = table, .first = first, .scale = scale, .row = embed_range_row});
}

static void embed_position_row(const struct rows_job *j, int32_t r)
{
    float *x = mat_row(j->out, r);
    int64_t at = (int64_t)(j->c->batch.position[r] + j->offset) * j->y.stride;

    for (int32_t i = 0; i < j->out.cols; i++) {
        x[i] += dtype_load(j->y.data, j->y.dtype, at + i);
    }
}

void cpu_embed_position(struct backend *b, struct mat x, struct mat table, int32_t offset)
{
    run_rows(&(struct rows_job){
        .c = cpu_of(b), .out = x, .y = table, .offset = offset, .row = embed_position_row});
}

/* ---- norms ---- */

static void norm_row(const struct rows_job *j, int32_t r)
{
    j->c->k.norm(mat_row(j->out, r), mat_row(j->x, r), j->out.cols, j->norm);
}

void cpu_norm(struct backend *b, struct mat out, struct mat x, const struct norm *n)
{
    run_rows(&(struct rows_job){.c = cpu_of(b), .out = out, .x = x, .norm = n, .row = norm_row});
}

static void add_row(const struct rows_job *j, int32_t r)
{
    j->c->k.add(mat_row(j->x, r), mat_row(j->y, r), j->x.cols);
}

static void add_norm_row(const struct rows_job *j, int32_t r)
{
    add_row(j, r);
    norm_row(j, r);
}

void cpu_add_norm(struct backend *b, struct mat out, struct mat x, struct mat y,
                  const struct norm *n, bool partial)
{
    if (partial) {
        cpu_all_reduce(b, y);
    }
    run_rows(&(struct rows_job){
        .c = cpu_of(b), .out = out, .x = x, .y = y, .norm = n, .row = add_norm_row});
}

void cpu_add(struct backend *b, struct mat x, struct mat y, bool partial)
{
    if (partial) {
        cpu_all_reduce(b, y);
    }
    run_rows(&(struct rows_job){.c = cpu_of(b), .out = x, .x = x, .y = y, .row = add_row});
}

static void square_sum_row(const struct rows_job *j, int32_t r)
{
    const float *x = mat_row(j->x, r);
    float sum = 0;

    for (int32_t i = 0; i < j->x.cols; i++) {
        sum += x[i] * x[i];
    }
    *mat_row(j->out, r) = sum;
}

void cpu_square_sums(struct backend *b, struct mat sums, struct mat x)
{
    run_rows(&(struct rows_job){.c = cpu_of(b), .out = sums, .x = x, .row = square_sum_row});
}

static void norm_by_sum_row(const struct rows_job *j, int32_t r)
{
    float *x = mat_row(j->out, r);
    float factor = 1 / sqrtf(*mat_row_const(j->x, r) / j->scale + j->norm->eps);
    const float *weight = j->norm->weight.data;

    for (int32_t i = 0; i < j->out.cols; i++) {
        x[i] *= factor * (weight[i] + j->norm->weight_offset);
    }
}

void cpu_norm_by_sums(struct backend *b, struct mat x, struct mat sums, int32_t width,
                      const struct norm *n)
{
    run_rows(&(struct rows_job){.c = cpu_of(b),
                                .out = x,
                                .x = sums,
                                .norm = n,
                                .scale = (float)width,
                                .row = norm_by_sum_row});
}

/* ---- activations ---- */

static void gated_act_row(const struct rows_job *j, int32_t r)
{
    const float *gate = mat_row(j->x, r);

    j->c->k.gate(mat_row(j->out, r), gate, gate + j->out.cols, j->out.cols, j->act);
}

static void run_gate(const struct cpu_gate *g, struct mat out, struct mat factors)
{
    run_rows(&(struct rows_job){
        .c = g->c, .out = out, .x = factors, .act = g->act, .row = gated_act_row});
}

void cpu_linear_gated(struct backend *b, struct mat out, struct mat workspace, struct mat x,
                      struct mat w, struct mat bias, enum activation act)
{
    struct cpu_gate gate = {.c = cpu_of(b), .act = act, .run = run_gate};

    if (w.format) {
        cpu_linear_gated_blocks(gate.c, out, workspace, x, w, bias, &gate);
        return;
    }
    cpu_linear(b, workspace, x, w, &(struct epilogue){.bias = bias});
    run_gate(&gate, out, workspace);
}

static void soft_cap_row(const struct rows_job *j, int32_t r)
{
    float *x = mat_row(j->x, r);

    for (int32_t i = 0; i < j->x.cols; i++) {
        x[i] = j->scale * tanhf(x[i] / j->scale);
    }
}

void cpu_soft_cap(struct backend *b, struct mat x, float cap)
{
    run_rows(
        &(struct rows_job){.c = cpu_of(b), .out = x, .x = x, .scale = cap, .row = soft_cap_row});
}

static void xielu_row(const struct rows_job *j, int32_t r)
{
    const float *factor = mat_row_const(j->y, 0);
    float *x = mat_row(j->x, r), p = softplus(factor[0]), n = 0.5F + softplus(factor[1]);

    for (int32_t i = 0; i < j->x.cols; i++) {
        float v = x[i];
        float bent = v > 0 ? p * v * v : n * (expm1f(fminf(v, -1e-6F)) - v);
        x[i] = bent + 0.5F * v;
    }
}

void cpu_xielu(struct backend *b, struct mat x, struct mat factors)
{
    run_rows(&(struct rows_job){.c = cpu_of(b), .out = x, .x = x, .y = factors, .row = xielu_row});
}

static void scale_by_score_row(const struct rows_job *j, int32_t r)
{
    const float *score = mat_row_const(j->y, r);
    float most = score[0];

    for (int32_t i = 1; i < j->y.cols; i++) {
        most = fmaxf(most, score[i]);
    }
    j->c->k.load(mat_row(j->out, r), mat_row_const(j->x, r), DTYPE_F32, j->x.cols,
                 1 / (1 + expf(-most)));
}

void cpu_scale_by_score(struct backend *b, struct mat out, struct mat x, struct mat scores)
{
    run_rows(&(struct rows_job){
        .c = cpu_of(b), .out = out, .x = x, .y = scores, .row = scale_by_score_row});
}

/* ---- rows of the output head ---- */

static void gather_row(const struct rows_job *j, int32_t r)
{
    const float *x = mat_row(j->x, j->c->batch.logits_token[j->first + r]);

    memcpy(mat_row(j->out, r), x, (size_t)j->out.cols * sizeof(*x));
}

void cpu_gather(struct backend *b, struct mat out, struct mat x, int32_t first)
{
    run_rows(
        &(struct rows_job){.c = cpu_of(b), .out = out, .x = x, .first = first, .row = gather_row});
}
