/* See small_rows.h. */
#include "kernels/backend.h"
#include "kernels/cuda/fused_decode/small_rows.h"

/* The widths that small_rows.cu has kernels for. */
static const int16_t PLAIN[] = {32, 40, 48, 56, 64, 72, 80, 96, 112, 128};
static const int16_t PAIRED[] = {48, 64, 72, 80, 96, 112, 128};
static const int16_t GATED[] = {96, 112, 128, 160, 192, 224, 256};
static const int16_t SUM[] = {32, 40, 48, 56, 64, 72, 80, 96, 112, 128};

/* The widest grid of one wave: more of the device reads at once. */
static void choose(struct small_tile *t, const int16_t *width, size_t n_widths, int32_t split,
                   const struct fused_op *p, int32_t n_blocks, int32_t *best)
{
    if (p->k % (SMALL_DEPTH * split) != 0) {
        return;
    }
    for (size_t i = 0; i < n_widths; i++) {
        int32_t blocks = p->n / width[i] * split;
        if (p->n % width[i] == 0 && blocks <= n_blocks && blocks > *best) {
            *best = blocks;
            t->width = width[i];
            t->split = split;
        }
    }
}

struct small_tile small_tile_of(const struct fused_op *p, int32_t n_blocks)
{
    struct small_tile t = {.kind = p->gated ? SMALL_GATED : p->sum ? SMALL_SUM : SMALL_PLAIN};
    int32_t least = n_blocks * 7 / 8; /* with fewer blocks memory is not read fast enough */

    if (t.kind == SMALL_GATED) {
        choose(&t, GATED, ARRAY_LEN(GATED), 1, p, n_blocks, &least);
    } else if (t.kind == SMALL_SUM) {
        choose(&t, SUM, ARRAY_LEN(SUM), 2, p, n_blocks, &least);
    } else {
        choose(&t, PLAIN, ARRAY_LEN(PLAIN), 1, p, n_blocks, &least);
        choose(&t, PAIRED, ARRAY_LEN(PAIRED), 2, p, n_blocks, &least);
    }
    return t;
}

bool small_norm_apart(const struct fused_args *a, int32_t i)
{
    const struct fused_op *p = &a->op[i];
    const struct norm_args *n = &p->norm;

    return i > 0 && p->h && p->h_transient && p->n > 0 && a->op[i - 1].sum == p->x &&
           !n->layer_norm && !n->bias && n->weight && n->weight_type == DTYPE_BF16;
}

bool small_plan(const struct fused_args *a, int32_t n_blocks)
{
    if (a->rows > SMALL_ROWS || a->type != DTYPE_BF16 || a->rope.kv.base) {
        return false;
    }
    for (int32_t i = 0; i < a->n_ops; i++) {
        const struct fused_op *p = &a->op[i];
        if (p->n == 0) {
            continue;
        }
        struct small_tile t = small_tile_of(p, n_blocks);
        bool bare = t.kind == SMALL_PLAIN || (!p->bias && p->act == ACT_NONE);
        bool stored = t.kind == SMALL_SUM && !p->out_transient;
        if (t.width == 0 || !bare || stored || p->partial || p->residual) {
            return false;
        }
    }
    return true;
}
