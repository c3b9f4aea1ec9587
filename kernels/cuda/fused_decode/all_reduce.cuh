/* Sums over ranks inside a fused launch: the ranks' products of a phase have the same
 * tiles, whoever finishes one sends it and adds up.
 *
 * The warp that has a tile's results, rounded as they are stored, writes them into
 * every other rank's memory and goes on. At the end of the phase, before its block says
 * that it is done, it adds up what came from the others for the same tile, in the order
 * of the ranks, as p2p.cu does: the same bits everywhere. As there, data is its own
 * flag: a place is blank until it is written. So a sum costs one hop over the link, and
 * the barrier behind it is one of this rank's blocks alone.
 *
 * Who reads a place makes it blank again, at once. There are two, taken in turn: a rank
 * writes one again two sums later; by then it has all that the other sent in the sum
 * between, which is sent only when every block there has read and wiped what came
 * before.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_ALL_REDUCE_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_ALL_REDUCE_CUH

#include "kernels/cuda/comm/p2p.cuh"
#include "kernels/cuda/fused_decode/ring.cuh"

/* A lane's results of a tile whose sum is to be taken. */
template <typename T> struct pending_all_reduce {
    uint32_t sum; /* sums before this one */
    int tile;
    bool any;
    alignas(8) T y[4];
    T add[4]; /* this rank's summands, what the sum is added to */
};

/* Where a lane's results of a tile go: lanes of the same activation rows lie
 * together. */
__device__ __forceinline__ uint2 *inbox_slot(const p2p_args &p, int receiver, int sender,
                                             uint32_t sum, int tile, int lane)
{
    int64_t slot = (int64_t)(sum % P2P_FUSED_BUFFERS) * p.n_ranks + sender;
    char *at = p.inbox[receiver].fused + slot * P2P_FUSED_BYTES + tile * FUSED_RESULT_BYTES;

    return (uint2 *)at + (lane & 3) * 8 + (lane >> 2);
}

__device__ __forceinline__ uint2 receive_tile(const p2p_args &p, int sender, uint32_t sum, int tile,
                                              int lane)
{
    uint2 *at = inbox_slot(p, p.rank, sender, sum, tile, lane), v = p2p_load(at);

    for (int i = 1; (v.x == BLANK || v.y == BLANK) && !stopped(p, i); i++) {
        v = p2p_load(at);
    }
    p2p_store(at, make_uint2(BLANK, BLANK));
    return v;
}

/* What is owed, if anything: sum += the ranks' summands. */
template <typename T>
__device__ __forceinline__ void finish_all_reduce(pending_all_reduce<T> &o, const fused_args &a,
                                                  const fused_op &q, int lane)
{
    int row = (lane & 3) * 2;

    if (!o.any || row >= a.rows) {
        return;
    }
    float total[4] = {};
    for (int r = 0; r < a.p2p.n_ranks; r++) {
        uint2 got =
            r == a.p2p.rank ? *(const uint2 *)o.y : receive_tile(a.p2p, r, o.sum, o.tile, lane);
        const T *y = (const T *)&got;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            total[i] += to_float(y[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row + (i & 1) < a.rows) {
            ((T *)q.sum)[(row + (i & 1)) * q.sum_stride +
                         weight_row(q, o.tile, (lane >> 2) + (i >> 1) * 8)] =
                from_float<T>(to_float(o.add[i]) + total[i]);
        }
    }
    o.any = false;
}

/* A tile's results to all other ranks; their sum is owed, and what was owed before is
 * settled. */
template <typename T>
__device__ __forceinline__ void start_all_reduce(pending_all_reduce<T> &o, const fused_args &a,
                                                 const fused_op &q, int tile, const T (&y)[4],
                                                 const T (&add)[4], int lane)
{
    const p2p_args &p = a.p2p;

    finish_all_reduce<T>(o, a, q, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        o.y[i] = y[i];
        o.add[i] = add[i];
    }
    o.tile = tile;
    o.any = true;
    uint2 v = *(const uint2 *)o.y;
    v = make_uint2(not_blank(v.x), not_blank(v.y));
    for (int r = 0; r < p.n_ranks && (lane & 3) * 2 < a.rows; r++) {
        if (r != p.rank) {
            p2p_store(inbox_slot(p, r, p.rank, o.sum, tile, lane), v);
        }
    }
}

#endif
