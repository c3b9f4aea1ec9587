/* The tensors that make a quantised weight: found and checked (see quantised.h). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/quantised/quantised_internal.h"

const struct tensor *quant_part(struct quant_assembly *a, const char *part)
{
    char name[512];

    snprintf(name, sizeof(name), "%s%s", a->module, part);
    const struct tensor *t = checkpoint_find(a->c, name);
    if (t) {
        a->c->tensor[t - a->c->tensor].part = true;
    }
    return t;
}

bool quant_is(const struct tensor *t, const char *type)
{
    return strcmp(t->stored_type, type) == 0;
}

static bool is_among(const char *type, const char *types)
{
    size_t n = strlen(type);

    for (const char *at = types; (at = strstr(at, type)) != NULL; at += n) {
        if ((at == types || at[-1] == ' ') && (at[n] == 0 || at[n] == ' ')) {
            return true;
        }
    }
    return false;
}

int quant_need(struct quant_assembly *a, const char *part, const char *types,
               const struct tensor **ret, struct err *e)
{
    const struct tensor *t = quant_part(a, part);

    if (!t) {
        return err_set(e, ERR_INVALID, "the quantised weight of %.200s lacks %s", a->module,
                       part + (part[0] == '.'));
    }
    if (!is_among(t->stored_type, types)) {
        return err_set(e, ERR_INVALID, "%.200s is %s, must be %s", t->name, t->stored_type, types);
    }
    *ret = t;
    return 0;
}

int quant_check_shape(const struct tensor *t, int64_t rows, int64_t cols, struct err *e)
{
    int64_t have[2] = {1, 1};

    for (int32_t i = 0; i < t->n_dims; i++) {
        have[i > 0] *= t->dim[i];
    }
    /* [n] for [n, 1]; [] and [1] for [1, 1] */
    if (t->n_dims > 2 || have[0] != rows || have[1] != cols) {
        return err_set(e, ERR_INVALID, "%.200s is [%lld, %lld], must be [%lld, %lld]", t->name,
                       (long long)have[0], (long long)have[1], (long long)rows, (long long)cols);
    }
    return 0;
}

int quant_scale_type(const struct tensor *t, enum scale_type *ret, struct err *e)
{
    static const struct {
        const char *name;
        enum scale_type type;
    } TYPES[] = {{"F32", SCALE_F32},      {"F16", SCALE_F16},      {"BF16", SCALE_BF16},
                 {"F8_E4M3", SCALE_E4M3}, {"F8_E8M0", SCALE_E8M0}, {"U8", SCALE_E8M0}};

    for (size_t i = 0; i < ARRAY_LEN(TYPES); i++) {
        if (quant_is(t, TYPES[i].name)) {
            *ret = TYPES[i].type;
            return 0;
        }
    }
    return err_set(e, ERR_UNSUPPORTED, "%.200s: scales of type %s", t->name, t->stored_type);
}

int quant_read_factor(const struct tensor *t, float *ret, struct err *e)
{
    struct weight_scales one = {.data = t->data};
    int rc = quant_scale_type(t, &one.type, e);

    rc = rc < 0 ? rc : quant_check_shape(t, 1, 1, e);
    if (rc < 0) {
        return rc;
    }
    float f = weight_scale_load(&one, 0);
    if (!(f > 0) || !isfinite(f)) {
        return err_set(e, ERR_INVALID, "%.200s is %g, must be above 0 and finite", t->name,
                       (double)f);
    }
    *ret = f;
    return 0;
}

int64_t quant_row_groups(const struct quant_tensor *q)
{
    return q->scales.group_rows > 0 ? div_ceil(q->rows, q->scales.group_rows) : 1;
}

int64_t quant_col_groups(const struct quant_tensor *q)
{
    return q->scales.group_cols > 0 ? div_ceil(q->cols, q->scales.group_cols) : 1;
}

int quant_check_scales(struct quant_assembly *a, const struct tensor *t, struct err *e)
{
    struct weight_scales s = {.data = t->data, .type = a->q->scales.type};
    int64_t n = t->n_bytes / scale_type_bytes(s.type);
    bool small = scale_type_bytes(s.type) == 1; /* e4m3 rounds small scales to 0 */

    for (int64_t i = 0; i < n; i++) {
        float scale = weight_scale_load(&s, i);
        if (!isfinite(scale) || (scale == 0 && !small)) {
            return err_set(e, ERR_INVALID, "%.200s: scale %lld is %g", t->name, (long long)i,
                           (double)scale);
        }
        a->most_scale = fmaxf(a->most_scale, fabsf(scale));
    }
    return 0;
}

int quant_take_order(struct quant_assembly *a, const struct tensor *t, struct err *e)
{
    struct quant_tensor *q = a->q;
    int64_t groups = quant_col_groups(q);
    bool neighbours = true;
    int rc = quant_check_shape(t, q->cols, 1, e);

    if (rc < 0) {
        return rc;
    }
    int32_t *group = malloc((size_t)MAX(q->cols, 1) * sizeof(*group));
    if (!group) {
        return err_nomem(e, t->name);
    }
    memcpy(group, t->data, (size_t)q->cols * sizeof(*group));
    for (int64_t i = 0; i < q->cols && rc == 0; i++) {
        int64_t natural = q->scales.group_cols > 0 ? i / q->scales.group_cols : 0;
        neighbours = neighbours && group[i] == natural;
        if (group[i] < 0 || group[i] >= groups) {
            rc = err_set(e, ERR_INVALID, "%.200s: column %lld is in group %d of %lld", t->name,
                         (long long)i, group[i], (long long)groups);
        }
    }
    if (rc < 0 || neighbours) {
        free(group);
        return rc;
    }
    q->column_group = group;
    return 0;
}

void *quant_own(struct quant_tensor *q, int32_t i, int64_t n_bytes)
{
    q->owned[i] = malloc((size_t)MAX(n_bytes, 1));
    return q->owned[i];
}
