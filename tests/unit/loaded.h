/* A model on a CPU, with its quantised weights as they are stored or decoded as it is
 * loaded, and the comparison of both. */
#ifndef QUIRE_TESTS_UNIT_LOADED_H
#define QUIRE_TESTS_UNIT_LOADED_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/families/layers.h"

struct loaded {
    struct backend *backend;
    struct model *model;
    struct backend_ops ops; /* the backend's, of which one may differ */
};

static inline struct weight_support decodes_all(const struct backend *b,
                                                const struct weight_format *f)
{
    (void)b;
    return (struct weight_support){
        .as_stored = weight_format_is_plain(f), .act = DTYPE_F32, .kernel = ""};
}

typedef struct weight_support supports_fn(const struct backend *b, const struct weight_format *f);

/* Which part of a model, and in which type. */
struct loading {
    enum dtype dtype;
    int32_t rank, n_ranks;
    bool by_expert; /* this rank's experts, whole */
};

static inline struct model_options part_options(enum dtype dtype, int32_t rank, int32_t n_ranks)
{
    return (struct model_options){.dtype = dtype,
                                  .max_tokens = 4,
                                  .max_logits = 1,
                                  .max_len = 8,
                                  .rank = rank,
                                  .n_ranks = n_ranks};
}

/* What model_open returns; `supports` NULL: the backend's own. unload after an error
 * too. */
static inline int load_with(struct loaded *l, const char *path, supports_fn *supports,
                            const struct model_options *o, struct err *e)
{
    struct backend_config k = {
        .threads = 1, .max_tokens = 4, .max_seqs = 1, .max_samples = 1, .max_blocks_per_seq = 1};
    struct model_config c;
    struct generation_defaults gen;

    *l = (struct loaded){0};
    if (backend_open(&l->backend, "cpu", &k, e) < 0 || model_config_read(&c, &gen, path, e) < 0) {
        fail_msg("%s", e->text);
    }
    l->ops = *l->backend->ops;
    if (supports) {
        l->ops.supports = supports;
        l->backend->ops = &l->ops;
    }
    return model_open(&l->model, path, &c, o, l->backend, e);
}

/* The same of this rank of a model. */
static inline int load_part(struct loaded *l, const char *path, supports_fn *supports,
                            const struct loading *part, struct err *e)
{
    struct model_options o = part_options(part->dtype, part->rank, part->n_ranks);

    o.expert_parallel = part->by_expert;
    return load_with(l, path, supports, &o, e);
}

static inline int load_as(struct loaded *l, const char *path, supports_fn *supports,
                          enum dtype dtype, int32_t rank, int32_t n_ranks, struct err *e)
{
    return load_part(l, path, supports, &(struct loading){dtype, rank, n_ranks, false}, e);
}

static inline int load(struct loaded *l, const char *path, bool stored, int32_t rank,
                       int32_t n_ranks, struct err *e)
{
    return load_as(l, path, stored ? NULL : decodes_all, DTYPE_F32, rank, n_ranks, e);
}

static inline void unload(struct loaded *l)
{
    l->ops.free(l->backend);
    model_free(l->model);
}

/* The weight `stored` has the values of `decoded`, but for `slack` of each. Returns
 * whether the first is stored in a format and the second is not. */
static inline bool same_values(const char *what, const struct loaded *a, struct mat stored,
                               struct mat decoded, float slack)
{
    struct err e = {0};
    size_t n = (size_t)decoded.rows * (size_t)decoded.cols;
    float *x = calloc(n, sizeof(*x)), *y = calloc(n, sizeof(*y));

    assert_true(x && y && stored.rows == decoded.rows && stored.cols == decoded.cols);
    assert_int_equal(a->ops.download(a->backend, stored, x, &e), 0);
    assert_int_equal(a->ops.download(a->backend, decoded, y, &e), 0);
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&x[i], &y[i], sizeof(*x)) != 0 &&
            !(slack > 0 && fabsf(x[i] - y[i]) <= fabsf(y[i]) * slack)) {
            fail_msg("%s, row %zu, column %zu: %.9g, decoded %.9g", what, i / (size_t)decoded.cols,
                     i % (size_t)decoded.cols, (double)x[i], (double)y[i]);
        }
    }
    free(x);
    free(y);
    return stored.format && !decoded.format;
}

#endif
