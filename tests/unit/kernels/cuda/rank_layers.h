/* What the tests of layers over ranks share: random weights and inputs, the error of a
 * result against float64, and values that the ranks add up or compare.
 */
#ifndef QUIRE_TESTS_UNIT_KERNELS_CUDA_RANK_LAYERS_H
#define QUIRE_TESTS_UNIT_KERNELS_CUDA_RANK_LAYERS_H

#include "tests/unit/rank_rig.h"

/* v [n]: between -range and range, in few bits, so exact in every type. */
static inline void fill_random(float *v, int64_t n, float range, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        v[i] = (float)((int32_t)(seed >> 57) - 64) / 64 * range;
    }
}

struct weight {
    float *host; /* [rows, cols]; the caller frees it */
    struct mat mat;
};

/* A random weight [rows, cols] of the type; a vector if it has one row. */
static inline int weight_open(struct weight *w, struct backend *b, enum dtype type, int32_t rows,
                              int32_t cols, float range, uint64_t seed, struct err *e)
{
    w->host = malloc((size_t)rows * (size_t)cols * sizeof(float));
    if (!w->host) {
        return err_nomem(e, "a weight");
    }
    fill_random(w->host, (int64_t)rows * cols, range, seed);
    struct weight_piece p = {.data = w->host, .rows = rows, .cols = cols, .stride = cols};
    struct weight_desc d = {.name = "weight",
                            .kind = rows == 1 ? WEIGHT_VECTOR : WEIGHT_LINEAR,
                            .dtype = type,
                            .rows = rows,
                            .cols = cols,
                            .piece = &p,
                            .n_pieces = 1};
    int rc = b->ops->weight(b, &d, &w->mat, e);
    return rc == 0 && b->ops->ready ? b->ops->ready(b, e) : rc;
}

/* The normalised mean squared error that a product of weights of the type may have. */
static inline double product_limit(enum dtype type)
{
    return type == DTYPE_BF16 ? 1e-4 : 2e-6;
}

/* An error, which begins with `what`, if that of got [n] against want [n] is above
 * `limit`. */
static inline int check_nmse(const char *what, const float *got, const double *want, int64_t n,
                             double limit, struct err *e)
{
    double error = 0, all = 0;

    for (int64_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        all += want[i] * want[i];
    }
    return error <= limit * all ? 0 : err_set(e, ERR_INVALID, "%s: NMSE %.3g", what, error / all);
}

/* v = v as the device stores it in `scratch`, which has the shape of v and is
 * overwritten. */
static inline int round_as_stored(struct backend *b, struct mat scratch, float *v, struct err *e)
{
    int rc = b->ops->upload(b, scratch, v, e);

    return rc < 0 ? rc : b->ops->download(b, scratch, v, e);
}

/* v [n] = its sum over the ranks. */
static inline int sum_over_ranks(const struct rank_rig *r, float *v, int32_t n, struct err *e)
{
    struct mat m = {.data = v, .stride = n, .rows = 1, .cols = n, .dtype = DTYPE_F32};

    return r->comm->ops->all_reduce(r->comm, m, e);
}

/* An error if v [n] is not the same on all ranks. of_rank_0 [n]: room for what rank 0
 * has. */
static inline int check_same_on_ranks(const struct rank_rig *r, const float *v, float *of_rank_0,
                                      int32_t n, struct err *e)
{
    for (int32_t i = 0; i < n; i++) {
        of_rank_0[i] = r->rank == 0 ? v[i] : 0;
    }
    int rc = sum_over_ranks(r, of_rank_0, n, e);
    for (int32_t i = 0; i < n && rc == 0; i++) {
        RANK_CHECK(v[i] == of_rank_0[i]);
    }
    return rc;
}

#endif
