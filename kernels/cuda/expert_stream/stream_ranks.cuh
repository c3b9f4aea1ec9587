/* Sums over ranks in launches of few rows (stream.cu, stream_linear.cu): a tile's
 * results go to the other ranks when they are there, and their results of the same tile
 * are added before the launch ends.
 *
 * Inboxes, slots and their turns are those of fused launches
 * (fused_decode/all_reduce.cuh), so both may follow each other in a step, and a rank
 * may take one where another takes the other: a slot is blank until it is written, its
 * reader blanks it, and two sets are used in turn. A rank writes a set again two sums
 * later. By then it has received the peer's part of the sum in between, which the peer
 * sends in a launch behind the one that has blanked the set.
 *
 * A block waits for other ranks' results of a tile when it has sent its own, and takes
 * its tiles in ascending order: for the lowest tile that is not summed yet, no block
 * that has still to send it waits for another one.
 */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_RANKS_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_RANKS_CUH

#include "kernels/cuda/comm/p2p.cuh"
#include "kernels/cuda/expert_stream/stream_ring.cuh"
#include "kernels/cuda/fused_decode/fused_decode.h"

namespace expert_stream
{

static_assert((int)TILE == FUSED_TILE && (int)ROWS == FUSED_ROWS, "slots are as large");

/* By the finishing warps, behind the wait for the launch ahead: which set of slots this
 * sum takes. The last block to know begins the next turn, while all multiply. */
__device__ __forceinline__ uint32_t begin_sum(const expert_ranks &p, int warp, int lane)
{
    uint32_t turn = __ldcg(p.epoch);

    warps_sync<5, FINISHERS * 32>();
    if (warp == FINISHERS - 1 && lane == 0) {
        random_delay();
        if (atomicAdd(p.arrived, 1) == (int)gridDim.x - 1) {
            *p.arrived = 0;
            *p.epoch = turn + 1;
        }
    }
    return turn;
}

/* A lane's slot for a tile's results. */
__device__ __forceinline__ uint2 *tile_slot(const expert_ranks &p, int receiver, int sender,
                                            uint32_t turn, int tile, int lane)
{
    int64_t slot = (int64_t)(turn % P2P_FUSED_BUFFERS) * p.n_ranks + sender;
    char *at = p.inbox[receiver] + slot * P2P_FUSED_BYTES + tile * FUSED_RESULT_BYTES;

    return (uint2 *)at + (lane & 3) * 8 + (lane >> 2);
}

/* v = the sum over the ranks of their v of the tile, each rounded to T: of two rows of
 * activations and two of weights, as sum_ring::take leaves them. */
template <typename T>
__device__ __forceinline__ void sum_tile(float (&v)[4], const expert_ranks &p, uint32_t turn,
                                         int tile, int rows, int lane)
{
    alignas(8) T mine[4];

    if ((lane & 3) * 2 >= rows) {
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        mine[i] = from_float<T>(v[i]);
        v[i] = 0.0f;
    }
    const uint2 own = *(const uint2 *)mine;
    random_delay();
#pragma unroll 1
    for (int r = 0; r < p.n_ranks; r++) {
        if (r != p.rank) {
            p2p_store(tile_slot(p, r, p.rank, turn, tile, lane),
                      make_uint2(not_blank(own.x), not_blank(own.y)));
        }
    }
#pragma unroll 1
    for (int r = 0; r < p.n_ranks; r++) {
        uint2 got = own;
        if (r != p.rank) {
            uint2 *at = tile_slot(p, p.rank, r, turn, tile, lane);
            got = p2p_load(at);
            for (int i = 1; (got.x == BLANK || got.y == BLANK) && !stopped(p.stop, i); i++) {
                got = p2p_load(at);
            }
            random_delay();
            p2p_store(at, make_uint2(BLANK, BLANK));
        }
        const T *y = (const T *)&got;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] += to_float(y[i]);
        }
    }
}

} // namespace expert_stream

#endif
