/* See heuristics_grids.h. */
#include "kernels/cuda/fused_decode/heuristics_grids.h"

#include "config/base/base.h"
#include "kernels/cuda/heuristics_speed.h"

/* Seven of eight multiprocessors read as fast as all of the H200's. */
int32_t memory_blocks(int32_t memory_gbs)
{
    return (int32_t)div_ceil((int64_t)MAX(memory_gbs, 0) * H200_SMS * 7, H200_GBS * 8);
}

static bool fills(const struct fused_op *p, small_tile_fn *tile, int32_t n_blocks, int32_t memory)
{
    struct small_tile t = tile(p, n_blocks);
    int32_t too_few = small_enough_blocks(t.kind, n_blocks);

    too_few = memory > 0 ? MIN(too_few, memory - 1) : too_few;
    return t.width > 0 && div_ceil(p->n, t.width) * t.split > too_few;
}

bool small_grids_fill(const struct fused_args *a, small_tile_fn *tile, int32_t n_blocks,
                      int32_t memory)
{
    for (int32_t i = 0; i < a->n_ops; i++) {
        const struct fused_op *p = &a->op[i];
        struct fused_op sum = *p;
        sum.sum = p->out;
        if (p->n > 0 && !fills(p, tile, n_blocks, memory) &&
            !(small_becomes_sum(p) && fills(&sum, tile, n_blocks, memory))) {
            return false;
        }
    }
    return true;
}
