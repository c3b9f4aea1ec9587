/* The specification of linear: out = epilogue(x W^T), float32 accumulation over the input. */
#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu.h"

enum { TASK_COLS = 32 };

struct linear_job {
    struct mat out, x, w;
    const struct epilogue *ep;
};

static float finish(const struct linear_job *j, int32_t r, int32_t col, float sum)
{
    const struct epilogue *ep = j->ep;
    if (ep == NULL) {
        return sum;
    }
    if (ep->bias.data != NULL) {
        sum += ((const float *)ep->bias.data)[col];
    }
    sum = cpu_activate(ep->act, sum);
    return ep->residual.data != NULL ? sum + mat_row_const(ep->residual, r)[col] : sum;
}

static void linear_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    const struct linear_job *j = arg;
    int32_t end = MIN((task + 1) * TASK_COLS, j->w.rows);
    for (int32_t r = 0; r < j->x.rows; r++) {
        const float *x = mat_row_const(j->x, r);
        for (int32_t col = task * TASK_COLS; col < end; col++) {
            float sum = 0;
            for (int32_t i = 0; i < j->w.cols; i++) {
                sum += x[i] * dtype_load(j->w.data, j->w.dtype, col * j->w.stride + i);
            }
            mat_row(j->out, r)[col] = finish(j, r, col, sum);
        }
    }
}

void cpu_linear(struct backend *b, struct mat out, struct mat x, struct mat w, const struct epilogue *ep)
{
    struct linear_job j = {.out = out, .x = x, .w = w, .ep = ep};
    cpu_pool_run(cpu_of(b)->pool, (int32_t)div_ceil(w.rows, TASK_COLS), linear_task, &j);
}
