/* All-reduce inside a fused launch. All ranks' products of an op have the same tiles;
 * the epilogue warp that has a tile's results sends them to the other ranks and adds up
 * theirs.
 *
 * The warp writes its results, rounded as they are stored, into every other rank's
 * inbox and goes on. Before it has all tiles of the op done, it sums the peers' results
 * of the same tile in the order of the ranks, as p2p.cu does, so all ranks get the same
 * bits. Data serves as its own flag: an inbox slot is blank (BLANK) until
 * written. So a sum costs one hop over the link, and the following barrier is one of
 * this rank's blocks alone.
 *
 * A reader blanks a slot at once. There are two sets of slots, used alternately: a rank
 * writes a set again two sums later. By then it has received the peer's part of the sum
 * in between, which the peer sends only after all its blocks have read and blanked the
 * first.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_ALL_REDUCE_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_ALL_REDUCE_CUH

#include "kernels/cuda/comm/p2p.cuh"
#include "kernels/cuda/fused_decode/ring.cuh"

/* A lane's results of a tile whose all-reduce is pending. */
template <typename T> struct pending_all_reduce {
    uint32_t sum; /* sums before this one, of all launches: selects the set of slots */
    int tile;
    bool any;
    alignas(8) T y[4];
    T add[4]; /* this rank's summands; what the sum is added to */
};

/* A lane's slot for a tile's results; lanes of the same activation rows are
 * adjacent. */
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
    random_delay();
    p2p_store(at, make_uint2(BLANK, BLANK));
    return v;
}

/* Completes the pending all-reduce, if any: q.sum += the ranks' summands. */
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

/* Sends a tile's results to all other ranks; completes the previous tile's all-reduce
 * first. */
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
    random_delay();
    for (int r = 0; r < p.n_ranks && (lane & 3) * 2 < a.rows; r++) {
        if (r != p.rank) {
            p2p_store(inbox_slot(p, r, p.rank, o.sum, tile, lane), v);
        }
    }
}

#endif
