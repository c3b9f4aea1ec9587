/* What follows a recurrence or an attention whose output is gated: an RMS norm of each
 * group of columns gated by silu, and a gate by sigmoid; and products of elements. */
#include <math.h>

#include "kernels/cpu/activations.h"
#include "kernels/cpu/cpu.h"

enum { TASK_ROWS = 16 };

struct gated_job {
    struct cpu_backend *c;
    struct mat x, gate;
    enum activation act;           /* of multiply */
    const struct gated_norm *norm; /* NULL: a gate by sigmoid alone */
};

static void norm_group(const struct gated_norm *n, float *x, const float *gate, const float *weight)
{
    float sum = 0;

    for (int32_t i = 0; i < n->width; i++) {
        x[i] = n->gate_first ? x[i] * silu(gate[i]) : x[i];
        sum += x[i] * x[i];
    }
    float factor = 1 / sqrtf(sum / (float)n->width + n->eps);
    for (int32_t i = 0; i < n->width; i++) {
        x[i] = x[i] * factor * weight[i] * (n->gate_first ? 1 : silu(gate[i]));
    }
}

static void gate_row(const struct gated_job *j, int32_t r)
{
    const struct gated_norm *n = j->norm;
    float *x = mat_row(j->x, r);
    const float *gate = mat_row_const(j->gate, r);

    for (int32_t i = 0; i < j->x.cols && !n; i++) {
        x[i] *= 1 / (1 + expf(-gate[i]));
    }
    for (int32_t i = 0; n && i < j->x.cols; i += n->width) {
        const float *weight = n->weight.data;
        norm_group(n, x + i, gate + i, weight + (n->weight.cols == n->width ? 0 : i));
    }
}

static void gate_task(void *arg, int32_t task, int32_t thread)
{
    const struct gated_job *j = arg;
    int32_t end = MIN((task + 1) * TASK_ROWS, j->x.rows);

    (void)thread;
    for (int32_t r = task * TASK_ROWS; r < end; r++) {
        gate_row(j, r);
    }
}

static void run(struct backend *b, struct gated_job *j)
{
    cpu_pool_run(cpu_of(b)->pool, (int32_t)div_ceil(j->x.rows, TASK_ROWS), gate_task, j);
}

void cpu_norm_gated(struct backend *b, struct mat x, struct mat gate, const struct gated_norm *n)
{
    run(b, &(struct gated_job){.x = x, .gate = gate, .norm = n});
}

void cpu_gate_sigmoid(struct backend *b, struct mat x, struct mat gate)
{
    run(b, &(struct gated_job){.x = x, .gate = gate});
}

static void multiply_row(const struct gated_job *j, int32_t r)
{
    float *x = mat_row(j->x, r), one;

    if (j->gate.rows == 1 && j->gate.cols == 1) {
        j->c->k.gate(&one, mat_row_const(j->gate, 0), &(float){1}, 1, j->act);
        j->c->k.load(x, x, DTYPE_F32, j->x.cols, one);
        return;
    }
    j->c->k.gate(x, mat_row_const(j->gate, r), x, j->x.cols, j->act);
}

static void multiply_task(void *arg, int32_t task, int32_t thread)
{
    const struct gated_job *j = arg;
    int32_t end = MIN((task + 1) * TASK_ROWS, j->x.rows);

    (void)thread;
    for (int32_t r = task * TASK_ROWS; r < end; r++) {
        multiply_row(j, r);
    }
}

void cpu_multiply(struct backend *b, struct mat x, struct mat y, enum activation act)
{
    struct gated_job j = {.c = cpu_of(b), .x = x, .gate = y, .act = act};

    cpu_pool_run(j.c->pool, (int32_t)div_ceil(x.rows, TASK_ROWS), multiply_task, &j);
}
