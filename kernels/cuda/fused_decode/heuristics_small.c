/* See small_rows.h. */
#include "kernels/backend.h"
#include "kernels/cuda/fused_decode/small_rows.h"

#define TILE(WIDTH, SPLIT, KIND) {KIND, WIDTH, SPLIT},
static const struct small_tile TILES[] = {SMALL_TILES(TILE)};
#undef TILE

/* Whether the op's product can be cut into such tiles; *ret_blocks: how many blocks.
 * cut: the last one may be a part. */
static bool fits(const struct small_tile *t, const struct fused_op *p, bool cut,
                 int32_t *ret_blocks)
{
    *ret_blocks = (int32_t)div_ceil(p->n, t->width) * t->split;
    return (cut ? p->n % 16 == 0 && t->split == 1 : p->n % t->width == 0) &&
           p->k % (SMALL_DEPTH * t->split) == 0;
}

bool small_becomes_sum(const struct fused_op *p)
{
    return !p->gated && !p->sum && p->out_transient && !p->bias && p->act == ACT_NONE;
}

/* The tile of the widest grid above `least` and of one wave: more of the device reads
 * at once. */
static struct small_tile widest(enum small_kind kind, const struct fused_op *p, bool cut,
                                int32_t least, int32_t n_blocks)
{
    struct small_tile best = {.kind = kind};
    int32_t blocks;

    for (size_t i = 0; i < ARRAY_LEN(TILES); i++) {
        if (TILES[i].kind == kind && fits(&TILES[i], p, cut, &blocks) && blocks <= n_blocks &&
            blocks > least) {
            least = blocks;
            best = TILES[i];
        }
    }
    return best;
}

/* Whole tiles are taken where they read as fast as an H200's memory wants, or may once
 * the product is a sum; else one may be cut that more blocks have. */
struct small_tile small_tile_of(const struct fused_op *p, int32_t n_blocks)
{
    enum small_kind kind = p->gated ? SMALL_GATED : p->sum ? SMALL_SUM : SMALL_PLAIN;
    int32_t least = small_enough_blocks(kind, n_blocks);
    struct small_tile best = widest(kind, p, false, 0, n_blocks), cut = {.width = 0};
    bool enough = best.width > 0 && p->n / best.width * best.split > least;
    bool waits =
        best.width > 0 && small_becomes_sum(p) &&
        widest(SMALL_SUM, p, false, small_enough_blocks(SMALL_SUM, n_blocks), n_blocks).width > 0;

    if (!enough && !waits && kind != SMALL_SUM) {
        cut = widest(kind, p, true, least, n_blocks);
    }
    return cut.width > 0 ? cut : best;
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
    if (a->rows > SMALL_ROWS || a->type != DTYPE_BF16 || a->format != FUSED_16 || a->rope.kv.base) {
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
        if (t.width == 0 || !bare || stored || p->residual ||
            (p->partial && !small_sums_over_ranks(a, p, &t, n_blocks))) {
            return false;
        }
    }
    return true;
}
