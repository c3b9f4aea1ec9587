/* Decode attention's work list on the device: which chunks a block takes, and whose they are.
 *
 * The key ranges of all (sequence, kv head) pairs lie end to end in chunks; a block's span of them falls into pieces, one a
 * pair. PREFIX: the entries are runs of sequences that share blocks instead of sequences.
 */
#ifndef QUIRE_CUDA_ATTN_SPANS_CUH
#define QUIRE_CUDA_ATTN_SPANS_CUH

#include "kernels/cuda/common.cuh"

/* A piece: chunks [lo, hi) of the n of one (sequence, head) pair; or of a run of sequences, whose first is seq. */
struct piece {
    int entry; /* in the work list: the sequence, or the run */
    int seq, head;
    int members;
    int n, lo, hi;
    int len;         /* tokens of the sequence */
    int first_token; /* of chunk 0 */
    int begin_token; /* the first that is seen */
    int64_t base;    /* flat index of chunk 0 */
    const int32_t *table;
};

struct span {
    const int32_t *start; /* chunk_start */
    int heads, n_seqs;
    int64_t total, begin, end;
    int workers;
    bool skips; /* the sequences' shared chunks are not theirs */
};

__device__ __forceinline__ int64_t span_begin(const span &w, int worker) { return w.total * worker / w.workers; }
/* The worker whose span holds flat chunk x. */
__device__ __forceinline__ int span_owner(const span &w, int64_t x) { return (int)(((x + 1) * w.workers - 1) / w.total); }

template <bool PREFIX>
__device__ __forceinline__ void piece_fill(piece &p, const span &w, const attn_args &a, const step_arrays &s, int64_t flat)
{
    int c0 = w.start[p.entry];
    p.n = w.start[p.entry + 1] - c0;
    p.base = (int64_t)c0 * w.heads + (int64_t)p.head * p.n;
    p.lo = (int)(flat - p.base);
    p.hi = (int)min((int64_t)p.n, w.end - p.base);
    if (PREFIX) {
        p.seq = s.shared[p.entry].seq;
        p.members = s.shared[p.entry].members;
        p.len = p.n * ATTN_CHUNK;
        p.begin_token = p.first_token = 0;
    } else {
        p.seq = p.entry;
        p.members = 1;
        p.len = s.kv_len[p.seq];
        p.begin_token = a.window > 0 && p.len > a.window ? p.len - a.window : w.skips ? s.skip[p.seq] * ATTN_CHUNK : 0;
        p.first_token = p.begin_token / ATTN_CHUNK * ATTN_CHUNK;
    }
    p.table = s.table + (int64_t)s.row[p.seq] * s.table_width;
}

/* The pair that holds chunk `flat`, by a search of 32 places at a time. Whole warp; lane i brings start[i], which is all that few
 * entries need. */
template <bool PREFIX>
__device__ __forceinline__ void piece_find(piece &p, const span &w, const attn_args &a, const step_arrays &s, int64_t flat, int start_of_lane)
{
    int lane = threadIdx.x & 31, lo = 0, hi = w.n_seqs; /* start[lo] * heads <= flat < start[hi] * heads */
    if (hi < 32) {
        lo = 31 - __clz(__ballot_sync(0xffffffffu, lane < hi && (int64_t)start_of_lane * w.heads <= flat));
        p.entry = lo;
        int c0 = __shfl_sync(0xffffffffu, start_of_lane, lo), n = __shfl_sync(0xffffffffu, start_of_lane, lo + 1) - c0;
        p.head = (int)((flat - (int64_t)c0 * w.heads) / n);
        piece_fill<PREFIX>(p, w, a, s, flat);
        return;
    }
    while (hi - lo > 1) {
        int step = (hi - lo + 31) / 32, at = min(lo + lane * step, hi);
        unsigned below = __ballot_sync(0xffffffffu, at < hi && (int64_t)w.start[at] * w.heads <= flat);
        lo += (31 - __clz(below)) * step; /* lane 0 always votes; votes are a prefix */
        hi = min(lo + step, hi);
    }
    p.entry = lo;
    int c0 = w.start[lo], n = w.start[lo + 1] - c0;
    p.head = (int)((flat - (int64_t)c0 * w.heads) / n);
    piece_fill<PREFIX>(p, w, a, s, flat);
}

/* The piece after p; false at the end of the span. */
template <bool PREFIX>
__device__ __forceinline__ bool piece_next(piece &p, const span &w, const attn_args &a, const step_arrays &s)
{
    int64_t flat = p.base + p.hi;
    if (flat >= w.end)
        return false;
    if (++p.head == w.heads) {
        p.head = 0;
        do
            p.entry++;
        while (w.start[p.entry + 1] == w.start[p.entry]);
    }
    piece_fill<PREFIX>(p, w, a, s, flat);
    return true;
}

/* Row of the step and query head behind row r of a piece's tile; row0: first query head of the KV head's tile. */
struct place {
    int64_t seq;
    int head;
};

template <bool PREFIX> __device__ __forceinline__ place place_of(const piece &p, int group, int kv_head, int row0, int r)
{
    if (PREFIX)
        return {p.seq + r / group, kv_head * group + r % group};
    return {p.seq, kv_head * group + row0 + r};
}

#endif
