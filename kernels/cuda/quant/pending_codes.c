/* Norms and gates that are put off (struct pending_codes of cuda.h). */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fused_decode/small_rows.h"
#include "kernels/cuda/quant/quant.h"

static bool aligned(struct mat m)
{
    return !m.data || ((uintptr_t)m.data % 16 == 0 && m.stride % 8 == 0);
}

/* Fewer rows join launches that quantise by themselves; the sums of ranks have norms of
 * their own. */
bool cuda_pending_suits(const struct cuda_backend *c, struct mat out, int32_t rows)
{
    return out.transient && c->quantised && !c->ranks && c->padded > SMALL_ROWS &&
           rows > SMALL_ROWS && out.dtype != DTYPE_F32 && out.cols % 16 == 0 &&
           out.cols <= QUANT_ROW_COLS && (int64_t)rows * out.cols <= c->quantised_bytes &&
           aligned(out);
}

void cuda_pending_put(struct cuda_backend *c, const struct pending_codes *p)
{
    c->pending = *p;
    if (!aligned(p->x) || !aligned(p->y)) {
        cuda_pending_flush(c);
    }
}

bool cuda_pending_take(struct cuda_backend *c, struct mat x, int32_t rows,
                       struct pending_codes *ret)
{
    const struct pending_codes *p = &c->pending;

    if (p->kind == PENDING_NONE || p->out.data != x.data || p->out.cols != x.cols ||
        p->rows != rows) {
        return false;
    }
    *ret = *p;
    c->pending.kind = PENDING_NONE;
    return true;
}

void cuda_pending_codes(struct cuda_backend *c, const struct pending_codes *p, float fixed)
{
    if (p->kind == PENDING_GATE) {
        launch_gate_quantise(c->quantised, c->quantised_scale, fixed, p->x.data, p->x.stride,
                             (int)p->out.dtype, p->rows, p->out.cols, p->act, c->stream);
        return;
    }
    struct norm_quantise_args a = {.codes = c->quantised,
                                   .scale = c->quantised_scale,
                                   .fixed = fixed,
                                   .x = p->x.data,
                                   .x_stride = p->x.stride,
                                   .y = p->y.data,
                                   .y_stride = p->y.stride,
                                   .norm = p->norm};
    launch_norm_quantise(&a, (int)p->out.dtype, p->rows, p->out.cols, c->stream);
}

void cuda_pending_flush(struct cuda_backend *c)
{
    const struct pending_codes p = c->pending;

    c->pending.kind = PENDING_NONE;
    if (p.kind == PENDING_GATE) {
        launch_gated_act(p.out.data, p.out.stride, p.x.data, p.x.stride, p.rows, p.out.cols, p.act,
                         (int)p.out.dtype, c->stream);
    } else if (p.kind == PENDING_NORM) {
        launch_norm(p.out.data, p.out.stride, p.x.data, p.x.stride, p.y.data, p.y.stride, &p.norm,
                    p.rows, p.out.cols, (int)p.out.dtype, c->stream);
    }
}
