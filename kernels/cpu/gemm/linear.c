/* The specification of linear: out = epilogue(x W^T), accumulated in float32 along the
 * input. Where the instruction set has tiles, linear_tiled.c takes over. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/convert.h"

enum { TASK_COLS = 32 };

struct linear_job {
    struct cpu_backend *c;
    struct mat out, x, w;
    const struct epilogue *ep;
};

static void linear_task(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    const struct linear_job *j = arg;
    int32_t first = task * TASK_COLS;
    int32_t n = MIN(TASK_COLS, j->w.rows - first);
    const float *bias = j->ep->bias.data;
    for (int32_t r = 0; r < j->x.rows; r++) {
        const float *x = mat_row_const(j->x, r);
        float sum[TASK_COLS] = {0};
        for (int32_t col = 0; col < n; col++) {
            for (int32_t i = 0; i < j->w.cols; i++) {
                sum[col] +=
                    x[i] * dtype_load(j->w.data, j->w.dtype, (first + col) * j->w.stride + i);
            }
        }
        j->c->k.epilogue(mat_row(j->out, r) + first, sum, bias != NULL ? bias + first : NULL,
                         j->ep->residual.data != NULL ? mat_row_const(j->ep->residual, r) + first
                                                      : NULL,
                         n, j->ep->act);
    }
}

void cpu_linear(struct backend *b, struct mat out, struct mat x, struct mat w,
                const struct epilogue *ep)
{
    static const struct epilogue none;
    struct linear_job j = {.c = cpu_of(b), .out = out, .x = x, .w = w, .ep = ep ? ep : &none};

    if (w.format) {
        cpu_linear_blocks(j.c, out, x, w, j.ep);
        return;
    }
    if (j.c->k.linear.k_block > 0) {
        cpu_linear_tiled(j.c, out, x, w, j.ep);
        return;
    }
    cpu_pool_run(j.c->pool, (int32_t)div_ceil(w.rows, TASK_COLS), linear_task, &j);
}
