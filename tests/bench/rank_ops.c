/* All-reduces through the backend seam, inside recorded steps: the fused kernel against
 * the library's.
 *
 *     build/tests/bench/rank_ops --device cuda --ranks 2 [--cols 4096]
 *
 * A step has CALLS all-reduces of `rows` rows. The result is the device's time per
 * call, the median over steps, of the slowest rank. The fused kernel does not take rows
 * with an odd number of columns, so these give the time of NCCL followed by a norm.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/rank_rig.h"

enum { CALLS = 64, STEPS = 15, MOST_ROWS = 2048 };

static const char *device = "cpu";
static int32_t n_ranks = 2, hidden = 4096;

static int by_time(const void *x, const void *y)
{
    double a = *(const double *)x, c = *(const double *)y;

    return (a > c) - (a < c);
}

static int measure(struct rank_rig *r, int32_t rows, int32_t cols, struct mat x, struct mat y,
                   struct mat out, const struct norm *n, double *ret_us, struct err *e)
{
    double us[STEPS];
    struct results res;
    bool replayed;

    x = mat_cols(mat_rows(x, 0, rows), 0, cols);
    y = mat_cols(mat_rows(y, 0, rows), 0, cols);
    out = mat_cols(mat_rows(out, 0, rows), 0, cols);
    for (int i = -4; i < STEPS; i++) {
        int rc = r->comm->ops->barrier(r->comm, e);
        if (rc == 0) {
            rc = rank_rig_begin(r, rows, &replayed, e);
        }
        for (int k = 0; k < CALLS && rc == 0 && !replayed; k++) {
            r->b->ops->add_norm(r->b, out, x, y, n, true);
        }
        if (rc == 0) {
            rc = rank_rig_end(r, &res, e);
        }
        if (rc < 0) {
            return rc;
        }
        if (i >= 0) {
            us[i] = (double)res.device_us / CALLS;
        }
    }
    qsort(us, STEPS, sizeof(us[0]), by_time);
    *ret_us = us[STEPS / 2];
    return 0;
}

/* One kind of sum per call, because a recorded step is identified by its rows alone. */
static int figures(struct rank_rig *r, int32_t cols, const char *what, struct err *e)
{
    static const int32_t rows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 2048};
    struct mat x, y, out;
    struct norm n = {.kind = NORM_RMS, .eps = 1e-5f};
    struct weight_desc d = {
        .name = "norm", .kind = WEIGHT_VECTOR, .dtype = DTYPE_BF16, .rows = 1, .cols = hidden};
    enum dtype t = backend_act_dtype(r->b, DTYPE_BF16);
    int rc = r->b->ops->weight(r->b, &d, &n.weight, e);

    if (rc == 0 && r->b->ops->ready) {
        rc = r->b->ops->ready(r->b, e);
    }
    if (rc == 0) {
        rc = r->b->ops->scratch(r->b, MOST_ROWS, hidden, t, &x, e);
    }
    if (rc == 0) {
        rc = r->b->ops->scratch(r->b, MOST_ROWS, hidden, t, &y, e);
    }
    if (rc == 0) {
        rc = r->b->ops->scratch(r->b, MOST_ROWS, hidden, t, &out, e);
    }
    for (size_t i = 0; i < ARRAY_LEN(rows) && rc == 0; i++) {
        double us;
        rc = measure(r, rows[i], cols, x, y, out, &n, &us, e);
        if (rc == 0 && r->rank == 0) {
            printf("%s, %5lld KB: %7.2f us\n", what,
                   (long long)rows[i] * cols * dtype_bytes(t) / 1000, us);
        }
    }
    return rc;
}

static int fused(struct rank_rig *r, struct err *e)
{
    if (r->rank == 0) {
        printf("%s\n", r->b->device);
    }
    return figures(r, hidden, "sum + residual + norm", e);
}

static int library(struct rank_rig *r, struct err *e)
{
    return figures(r, hidden - 1, "the same by NCCL and a norm", e);
}

int main(int argc, char **argv)
{
    rank_rig_args(argc, argv, &device, &n_ranks);
    for (int i = 1; i + 1 < argc; i++) {
        hidden = strcmp(argv[i], "--cols") == 0 ? atoi(argv[i + 1]) : hidden;
    }
    int failed = rank_rig_run(device, n_ranks, MOST_ROWS, fused);
    if (failed == 0 && strcmp(device, "cpu") != 0) {
        failed = rank_rig_run(device, n_ranks, MOST_ROWS, library);
    }
    return failed > 0;
}
