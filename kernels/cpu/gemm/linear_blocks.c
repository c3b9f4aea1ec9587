/* linear with weights that are kept in blocks: each run of pieces of one format makes
 * its columns of the result. */
#include "kernels/cpu/cpu.h"

/* Columns [first, first + n), or no matrix. */
static struct mat columns(struct mat m, int32_t first, int32_t n)
{
    return m.data ? mat_cols(m, first, n) : m;
}

void cpu_linear_blocks(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep)
{
    int32_t first = 0;

    for (struct cpu_weight *run = w.priv; run; run = run->below) {
        int32_t n = run->m.rows;
        struct epilogue part = {.bias = columns(ep->bias, first, n),
                                .act = ep->act,
                                .residual = columns(ep->residual, first, n)};
        const struct cpu_code_panels *panels =
            run->m.format ? &c->k.code_panels[run->m.format->id] : NULL;
        if (panels && panels->pack_rows && x.rows * run->planes >= panels->from) {
            cpu_linear_codes(c, mat_cols(out, first, n), x, run->m, &part);
        } else if (run->m.format) {
            cpu_linear_tiled(c, mat_cols(out, first, n), x, run->m, &part);
        } else {
            cpu_linear(&c->base, mat_cols(out, first, n), x, run->m, &part);
        }
        first += n;
    }
}
