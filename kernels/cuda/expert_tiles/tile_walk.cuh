/* How persistent blocks walk the tiles of experts, and how they are launched, for 16,
 * 32 or 64 rows a tile. */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_TILES_TILE_WALK_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_TILES_TILE_WALK_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/gemm/async_copy.cuh"

namespace expert_tiles
{
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

/* Loads the stage ahead, if there is one, to `to` and goes on. */
template <typename LOADER, typename POSITION>
__device__ __forceinline__ void load_next(LOADER &load, POSITION &ahead, const expert_product &a,
                                          const expert_lists &l, uint32_t to)
{
    if (ahead.more()) {
        load.load(a, to, ahead.step);
        if (ahead.next(a, l) && ahead.more()) {
            load.enter(a, ahead);
        }
    }
    async_commit();
}

/* ---- launches ---- */

/* OF::KERNEL, of blocks of OF::BLOCK threads with OF::BYTES of shared memory. False: a
 * block cannot have as much. */
template <typename OF>
bool launch_tiles(const expert_product &a, const expert_lists &l, int n_blocks, cudaStream_t stream)
{
    static bool allowed = allow_shared(OF::KERNEL, OF::BYTES);

    if (allowed) {
        launch(OF::KERNEL, dim3((unsigned)n_blocks), dim3(OF::BLOCK), OF::BYTES, stream, a, l);
    }
    return allowed;
}

template <template <int, bool> class OF, bool GATED>
bool launch_rows(const expert_product &a, const expert_lists &l, int n_blocks, cudaStream_t stream)
{
    switch (l.tile_rows) {
    case 16:
        return launch_tiles<OF<16, GATED>>(a, l, n_blocks, stream);
    case 32:
        return launch_tiles<OF<32, GATED>>(a, l, n_blocks, stream);
    default:
        return launch_tiles<OF<64, GATED>>(a, l, n_blocks, stream);
    }
}

/* The kernel OF<rows of a tile, gated> for this product. */
template <template <int, bool> class OF>
bool launch_product(const expert_product &a, const expert_lists &l, int n_blocks,
                    cudaStream_t stream)
{
    return a.gated ? launch_rows<OF, true>(a, l, n_blocks, stream)
                   : launch_rows<OF, false>(a, l, n_blocks, stream);
}

} // namespace expert_tiles

#endif
