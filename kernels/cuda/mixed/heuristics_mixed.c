/* See mixed.h. */
#include "kernels/backend.h"
#include "kernels/cuda/mixed/mixed.h"

#define TILE(WIDTH, SPLIT) {.width = WIDTH, .split = SPLIT},
static const struct small_tile TILES[] = {MIXED_TILES(TILE)};
#undef TILE

/* Columns of a stage of weights in such tiles. */
static int32_t stage_columns(int32_t format, int32_t rows, int32_t width)
{
    return mixed_in_segments(format) ? FUSED_SEGMENT_K
                                     : MIXED_GROUP * mixed_warpgroups(rows) / (width / MIXED_ROWS);
}

struct small_tile small_mixed_tile(const struct fused_op *p, int32_t format, int32_t rows,
                                   int32_t n_blocks)
{
    int32_t times = rows > SMALL_ROWS ? (int32_t)div_ceil(rows, MIXED_WIDE_ROWS) : 1;
    struct small_tile best = {.kind = p->gated ? SMALL_GATED : p->sum ? SMALL_SUM : SMALL_PLAIN};
    int32_t most = 0;

    for (size_t i = 0; i < ARRAY_LEN(TILES); i++) {
        const struct small_tile *t = &TILES[i];
        int32_t blocks = p->n / t->width * t->split * times;
        bool fits =
            t->width <= mixed_warpgroups(rows) * MIXED_ROWS && p->n % t->width == 0 &&
            mixed_depth(format, p->k) % (stage_columns(format, rows, t->width) * t->split) == 0 &&
            (best.kind != SMALL_GATED || t->width > MIXED_ROWS);
        /* the most blocks of one wave, else the fewest */
        bool better = best.width == 0 ||
                      (most <= n_blocks ? blocks > most && blocks <= n_blocks : blocks < most);
        if (fits && better) {
            most = blocks;
            best.width = t->width;
            best.split = t->split;
        }
    }
    return best;
}

bool small_mixed_plan(const struct fused_args *a, int32_t n_blocks)
{
    bool any = false;

    if (a->rows > SMALL_ROWS || a->type != DTYPE_BF16 || a->format == FUSED_16 || a->rope.kv.base) {
        return false;
    }
    for (int32_t i = 0; i < a->n_ops; i++) {
        const struct fused_op *p = &a->op[i];
        if (p->n == 0) {
            continue;
        }
        struct small_tile t = small_mixed_tile(p, a->format, a->rows, n_blocks);
        bool bare = t.kind == SMALL_PLAIN || (!p->bias && p->act == ACT_NONE);
        bool stored = t.kind == SMALL_SUM && !p->out_transient;
        bool fusible = a->rows <= FUSED_ROWS && a->format < FUSED_INT8 && p->n_groups == 1;
        bool fills = t.width > 0 && p->n / t.width * t.split >= n_blocks * 2 / 3;
        bool as_codes = a->rows > FUSED_ROWS && p->e4m3;
        if (t.width == 0 || !bare || stored || (fusible && !fills) || as_codes ||
            (p->partial && !small_sums_over_ranks(a, p, &t, n_blocks)) || p->residual) {
            return false;
        }
        any = true;
    }
    return any;
}

bool mixed_wide_suits(const struct fused_args *a, const struct fused_op *p, int32_t n_blocks)
{
    struct small_tile t = small_mixed_tile(p, a->format, a->rows, n_blocks);

    /* fewer rows of others are launches of fused_decode.h, where these count */
    bool enough = a->rows > SMALL_ROWS || mixed_in_groups(a->format);

    return a->format != FUSED_16 && a->type == DTYPE_BF16 && enough && a->rows <= MIXED_MOST_ROWS &&
           t.width > 0 && !p->residual && !p->e4m3 &&
           (t.kind == SMALL_PLAIN || (!p->bias && p->act == ACT_NONE));
}
