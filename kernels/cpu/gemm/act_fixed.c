/* Inputs of products whose file has one scale for all activations (ACT_SCALE_TENSOR):
 * rounded to codes before they are packed. Packing keeps 15 bits of them, so that what
 * is multiplied are the values of the codes. */
#include <stdlib.h>

#include "kernels/cpu/cpu.h"

enum { TASK_ROWS = 4 };

struct round_job {
    struct mat out, x;
    const struct cpu_weight *run;
};

static void round_task(void *arg, int32_t task, int32_t thread)
{
    const struct round_job *j = arg;
    int32_t end = MIN((task + 1) * TASK_ROWS, j->x.rows);

    (void)thread;
    for (int32_t r = task * TASK_ROWS; r < end; r++) {
        const float *x = mat_row_const(j->x, r);
        float *out = mat_row(j->out, r);
        for (int32_t i = 0; i < j->x.cols; i++) {
            out[i] = weight_act_round(j->run->m.format->id, j->run->act_scale, x[i]);
        }
    }
}

/* Room for n floats; false: there is none. */
static bool reserve(struct cpu_rounded *to, int64_t n)
{
    if (n > to->cap) {
        free(to->data);
        to->data = malloc((size_t)n * sizeof(*to->data));
        to->cap = to->data ? n : 0;
    }
    return to->data;
}

struct mat cpu_rounded_x(struct cpu_backend *c, struct mat x, const struct cpu_weight *run)
{
    struct cpu_rounded *has = &c->rounded;

    if (!run->m.format || run->act_scale == 0) {
        return x;
    }
    int32_t format = (int32_t)run->m.format->id;
    bool same = c->keeps_x && has->x == x.data && has->rows == x.rows && has->format == format &&
                has->scale == run->act_scale;
    if (!same && !reserve(has, (int64_t)x.rows * x.cols)) {
        cpu_fail(c, ERR_NOMEM, "out of memory for a matrix product");
        return (struct mat){0};
    }
    struct mat out = x;
    out.data = has->data;
    out.stride = x.cols;
    if (!same) {
        struct round_job j = {.out = out, .x = x, .run = run};
        *has = (struct cpu_rounded){.x = x.data,
                                    .rows = x.rows,
                                    .format = format,
                                    .scale = run->act_scale,
                                    .data = has->data,
                                    .cap = has->cap};
        c->packed_x.x = NULL; /* it may be of what has->data held before */
        cpu_pool_run(c->pool, (int32_t)div_ceil(x.rows, TASK_ROWS), round_task, &j);
    }
    return out;
}
