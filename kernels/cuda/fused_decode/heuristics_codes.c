/* See small_codes.h. */
#include "kernels/backend.h"
#include "kernels/cuda/fused_decode/small_codes.h"
#include "kernels/cuda/quant/quant.h"

#define TILE(WIDTH, SPLIT, KIND) {KIND, WIDTH, SPLIT},
static const struct small_tile TILES[] = {CODES_TILES(TILE)};
#undef TILE

struct small_tile small_codes_tile(const struct fused_op *p, int32_t n_blocks)
{
    enum small_kind kind = p->gated ? SMALL_GATED : p->sum ? SMALL_SUM : SMALL_PLAIN;
    struct small_tile best = {.kind = kind};
    int32_t most = 0;

    for (size_t i = 0; i < ARRAY_LEN(TILES); i++) {
        const struct small_tile *t = &TILES[i];
        int32_t blocks = p->n / t->width * t->split;
        /* two stages a turn of the mainloop */
        bool fits = p->n % t->width == 0 && p->k % (2 * CODES_DEPTH * t->split) == 0;
        if (t->kind == kind && fits && blocks <= n_blocks && blocks > most) {
            most = blocks;
            best = *t;
        }
    }
    return best;
}

bool small_codes_plan(const struct fused_args *a, int32_t n_blocks)
{
    if (a->rows > SMALL_ROWS || a->type != DTYPE_BF16 || a->format != FUSED_FP8 || !a->codes ||
        a->rope.kv.base) {
        return false;
    }
    for (int32_t i = 0; i < a->n_ops; i++) {
        const struct fused_op *p = &a->op[i];
        if (p->n == 0) {
            continue;
        }
        struct small_tile t = small_codes_tile(p, n_blocks);
        bool bare = t.kind == SMALL_PLAIN || (!p->bias && p->act == ACT_NONE);
        bool stored = t.kind == SMALL_SUM && !p->out_transient;
        if (!p->e4m3 || (p->h && p->k > QUANT_ROW_COLS) || t.width == 0 || !bare || stored ||
            (p->partial && !small_sums_over_ranks(a, p, &t, n_blocks)) || p->residual) {
            return false;
        }
    }
    return true;
}
