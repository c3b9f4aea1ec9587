/* Pipeline parallelism on CPUs (pipeline.h): a stage sends the residual stream of a
 * micro-batch to the next one. */
#include "kernels/comm/pipeline.h"
#include "kernels/cpu/cpu.h"

static bool usable(const struct cpu_backend *c)
{
    return c->config.pipeline && c->failed.code == 0;
}

static void check(struct cpu_backend *c, int rc, const struct err *e)
{
    if (rc < 0) {
        cpu_fail(c, rc, e->text);
    }
}

/* The mat goes as one run of bytes if its rows have no gaps between them, else as one
 * run per row. Returns the bytes of a run. */
static size_t run_of(struct mat x, int32_t *ret_runs)
{
    bool whole = x.stride == x.cols;

    *ret_runs = whole ? 1 : x.rows;
    return (size_t)(whole ? (int64_t)x.rows * x.cols : x.cols) * sizeof(float);
}

void cpu_stage_receive(struct backend *b, struct mat x)
{
    struct cpu_backend *c = cpu_of(b);
    struct pipeline *p = c->config.pipeline;
    struct err e;
    int32_t n;
    size_t n_bytes = run_of(x, &n);

    for (int32_t r = 0; r < n && usable(c); r++) {
        check(c, p->ops->receive(p, mat_row(x, r), n_bytes, &e), &e);
    }
}

void cpu_stage_send(struct backend *b, struct mat x)
{
    struct cpu_backend *c = cpu_of(b);
    struct pipeline *p = c->config.pipeline;
    struct err e;
    int32_t n;
    size_t n_bytes = run_of(x, &n);

    for (int32_t r = 0; r < n && usable(c); r++) {
        check(c, p->ops->send(p, p->at.rank, mat_row_const(x, r), n_bytes, &e), &e);
    }
}
