/* How persistent blocks walk the tiles of experts, and the copies into their stages. */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_TILE_WALK_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_TILE_WALK_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/experts/experts.h"

namespace expert_tiles
{
__device__ __forceinline__ void async_copy(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int LEFT> __device__ __forceinline__ void async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ uint4 shared_load(uint32_t at)
{
    uint4 v;

    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* Where a block is: a stage of DEPTH columns of one tile times one block of weight
 * rows. The last stage and the last block may have fewer. */
template <int BLOCK_ROWS, int DEPTH> struct position {
    expert_tile tile;
    const int32_t *list; /* the tile's pairs */
    int64_t first;       /* the first of the block's rows in the stacked weight */
    int item, step;      /* of the work; of the depth */
    int column;          /* the first of the block's rows in the expert's, of gate's or of all */
    int end, m_blocks;   /* all items; blocks of weight rows */

    __device__ __forceinline__ position(const expert_product &a, const expert_lists &l)
        : item(blockIdx.x), step(0), m_blocks((a.width + BLOCK_ROWS - 1) / BLOCK_ROWS)
    {
        end = l.total[0] * m_blocks;
        enter(a, l);
    }
    __device__ __forceinline__ bool more(void) const
    {
        return item < end;
    }
    __device__ __forceinline__ void enter(const expert_product &a, const expert_lists &l)
    {
        if (more()) {
            int4 t = __ldcg((const int4 *)l.tile + item / m_blocks);
            tile = {t.x, t.y, t.z, t.w};
            column = item % m_blocks * BLOCK_ROWS;
            first = (int64_t)t.x * a.width * (a.gated ? 2 : 1) + column;
            list = l.list + (int64_t)t.x * l.cap + t.y;
        }
    }
    /* True: the next stage begins another item. */
    __device__ __forceinline__ bool next(const expert_product &a, const expert_lists &l)
    {
        if (++step < (a.k + DEPTH - 1) / DEPTH) {
            return false;
        }
        step = 0;
        item += gridDim.x;
        enter(a, l);
        return true;
    }
};

} // namespace expert_tiles

#endif
