/* Sums over ranks in the epilogue of a product of few rows (small_rows.h). All ranks'
 * launches have the same blocks, and what a thread has of a tile it has on every rank.
 *
 * A thread writes its summands, rounded as the product alone would store them, into
 * every other rank's inbox and then adds up the ranks' in their order, so all ranks get
 * the same bits. As in all_reduce.cuh the data is its own flag, a reader blanks a slot
 * at once, and two sets of slots are used in turn: a rank writes a set again two sums
 * later, and by then it has received the peer's part of the sum in between, which the
 * peer sends only when its launch of the first has ended.
 *
 * Blocks wait for the same blocks of other ranks, each after it has sent, and a launch
 * is one wave: all its blocks run at the same time.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_SUM_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_SUM_CUH

#include "kernels/cuda/comm/p2p.cuh"
#include "kernels/cuda/fused_decode/small_pipeline.cuh"
#include "kernels/cuda/gemm/wgmma.cuh"

static inline p2p_summands summands_of(const p2p_args *p)
{
    p2p_summands s = {};

    for (int r = 0; r < p->n_ranks; r++) {
        s.inbox[r] = p->inbox[r].small;
    }
    s.epoch = p->epoch + P2P_EPOCH_SMALL;
    s.arrived = p->arrived;
    s.stop = p->stop;
    s.rank = p->rank;
    s.n_ranks = p->n_ranks;
    return s;
}

#if HAS_WGMMA

/* The slots of this block's quads of four columns, of which it has `quads`. */
struct summand_slots {
    const p2p_summands &p;
    uint32_t turn; /* sums before this one: selects the set */
    int64_t first; /* the block's first slot in a set */

    __device__ __forceinline__ summand_slots(const p2p_summands &s, int quads)
        : p(s), turn(__ldcg(s.epoch)), first((int64_t)blockIdx.x * quads)
    {
    }
    __device__ __forceinline__ uint2 *at(int receiver, int sender, int quad) const
    {
        int64_t slot = (int64_t)(turn % P2P_SMALL_BUFFERS) * p.n_ranks + sender;

        return (uint2 *)(p.inbox[receiver] + slot * P2P_SMALL_BYTES) + first + quad;
    }
    __device__ __forceinline__ void send(int quad, uint2 v) const
    {
        v = make_uint2(not_blank(v.x), not_blank(v.y));
        for (int r = 0; r < p.n_ranks; r++) {
            if (r != p.rank) {
                p2p_store(at(r, p.rank, quad), v);
            }
        }
    }
    __device__ __forceinline__ uint2 receive(int sender, int quad) const
    {
        uint2 *from = at(p.rank, sender, quad), v = p2p_load(from);

        for (int i = 1; (v.x == BLANK || v.y == BLANK) && !stopped(p.stop, i); i++) {
            v = p2p_load(from);
        }
        random_delay();
        p2p_store(from, make_uint2(BLANK, BLANK));
        return v;
    }
};

/* v[q] = the sum over the ranks of their v[q], for the block's quads
 * threadIdx.x + q * STEP below QUADS, of LANES a row. After pdl_wait(). */
template <int QUADS, int LANES, int STEP, int N>
__device__ __forceinline__ void sum_over_ranks(float (&v)[N][4], const p2p_summands &p, int rows)
{
    summand_slots slots(p, QUADS);
    uint2 mine[N];

    static_assert(N * STEP >= QUADS, "all quads");
#pragma unroll
    for (int q = 0; q < N; q++) {
        int e = threadIdx.x + q * STEP;
        mine[q] = make_uint2(pair(v[q][0], v[q][1]), pair(v[q][2], v[q][3]));
        random_delay();
        if (e < QUADS && e / LANES < rows) {
            slots.send(e, mine[q]);
        }
    }
#pragma unroll
    for (int q = 0; q < N; q++) {
        int e = threadIdx.x + q * STEP;
        if (e >= QUADS || e / LANES >= rows) {
            continue;
        }
        float sum[4] = {};
        for (int r = 0; r < p.n_ranks; r++) {
            uint2 got = r == p.rank ? mine[q] : slots.receive(r, e);
            sum[0] += low(got.x);
            sum[1] += high(got.x);
            sum[2] += low(got.y);
            sum[3] += high(got.y);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[q][i] = sum[i];
        }
    }
}

/* Called by one thread of each block when all of the block's have their sums: the last
 * block begins the next turn. */
__device__ __forceinline__ void leave_sum(const p2p_summands &p)
{
    random_delay();
    if (atomicAdd(p.arrived, 1) == (int)gridDim.x - 1) {
        *p.arrived = 0;
        *p.epoch += 1;
    }
}

#endif

#endif
