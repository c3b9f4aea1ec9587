/* Decode attention's work list on the device: which chunks a team of warps takes, and
 * whose they are.
 *
 * The chunks of all sequences lie end to end and are cut into equal spans; each span
 * has a team for every head, so every head has as many pieces, one a sequence, of like
 * sizes. PREFIX: the entries are runs of sequences that share blocks instead of
 * sequences.
 */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ATTN_SPANS_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_ATTN_SPANS_CUH

#include "kernels/cuda/common.cuh"

/* A piece: chunks [lo, hi) of the n of one sequence; or of a run of sequences, whose
 * first is seq. */
struct piece {
    int entry; /* in the work list: the sequence, or the run */
    int seq;
    int members;
    int n, lo, hi;
    int len;         /* tokens of the sequence */
    int first_token; /* of chunk 0 */
    int begin_token; /* the first that is seen */
    int base;        /* index of chunk 0 among all */
    const int32_t *table;
};

struct span {
    const int32_t *start; /* chunk_start */
    int n_seqs;
    int index, begin, end;
    int each, more; /* chunks of a span; the first `more` have one more */
    bool skips;     /* the sequences' shared chunks are not theirs */
};

/* Span `index` of so many. */
__device__ __forceinline__ void span_set(span &w, int total, int spans, int index)
{
    w.each = (unsigned)total / (unsigned)spans;
    w.more = total - w.each * spans;
    w.index = index;
    w.begin = w.each * index + min(index, w.more);
    w.end = w.begin + w.each + (index < w.more);
}

/* The span that holds chunk x. */
__device__ __forceinline__ int span_owner(const span &w, int x)
{
    int longer = (w.each + 1) * w.more;

    return x < longer ? (unsigned)x / (unsigned)(w.each + 1)
                      : w.more + (unsigned)(x - longer) / (unsigned)w.each;
}

/* What lane i brings: entry i's start, length and row of the table, which is all that
 * few entries need. */
struct lane_entry {
    int start, len, row;
};

template <bool PREFIX>
__device__ __forceinline__ lane_entry lane_entry_of(const span &w, const step_arrays &s)
{
    int i = min(threadIdx.x & 31, s.max_seqs);

    return {w.start[i], PREFIX ? 0 : s.kv_len[i], PREFIX ? 0 : s.row[i]};
}

/* The piece of entry p.entry, whose chunks are n from c0 on, that begins at chunk `at`
 * of all. */
template <bool PREFIX>
__device__ __forceinline__ void piece_fill(piece &p, const span &w, const attn_args &a,
                                           const step_arrays &s, int at, int c0, int n, int len,
                                           int row)
{
    p.n = n;
    p.base = c0;
    p.lo = at - c0;
    p.hi = min(n, w.end - c0);
    if (PREFIX) {
        p.seq = s.shared[p.entry].seq;
        p.members = s.shared[p.entry].members;
        p.len = n * ATTN_CHUNK;
        p.begin_token = p.first_token = 0;
        row = s.row[p.seq];
    } else {
        p.seq = p.entry;
        p.members = 1;
        p.len = len;
        p.begin_token = a.window > 0 && len > a.window ? len - a.window
                        : w.skips                      ? s.skip[p.seq] * ATTN_CHUNK
                                                       : 0;
        p.first_token = p.begin_token / ATTN_CHUNK * ATTN_CHUNK;
    }
    p.table = s.table + (int64_t)row * s.table_width;
}

template <bool PREFIX>
__device__ __forceinline__ void piece_read(piece &p, const span &w, const attn_args &a,
                                           const step_arrays &s, int at)
{
    int c0 = w.start[p.entry], n = w.start[p.entry + 1] - c0;

    piece_fill<PREFIX>(p, w, a, s, at, c0, n, PREFIX ? 0 : s.kv_len[p.entry],
                       PREFIX ? 0 : s.row[p.entry]);
}

/* The span's first piece, by a search of 32 places at a time. Whole warp. */
template <bool PREFIX>
__device__ __forceinline__ void piece_first(piece &p, const span &w, const attn_args &a,
                                            const step_arrays &s, const lane_entry &mine)
{
    const unsigned ALL = 0xffffffffu;
    int lane = threadIdx.x & 31, lo = 0, hi = w.n_seqs; /* start[lo] <= begin < start[hi] */

    if (hi < 32) {
        p.entry = 31 - __clz(__ballot_sync(ALL, lane < hi && mine.start <= w.begin));
        int c0 = __shfl_sync(ALL, mine.start, p.entry),
            n = __shfl_sync(ALL, mine.start, p.entry + 1) - c0;
        int len = __shfl_sync(ALL, mine.len, p.entry), row = __shfl_sync(ALL, mine.row, p.entry);
        piece_fill<PREFIX>(p, w, a, s, w.begin, c0, n, len, row);
        return;
    }
    while (hi - lo > 1) {
        int step = (hi - lo + 31) / 32, at = min(lo + lane * step, hi);
        unsigned below = __ballot_sync(ALL, at < hi && w.start[at] <= w.begin);
        lo += (31 - __clz(below)) * step; /* lane 0 always votes; votes are a prefix */
        hi = min(lo + step, hi);
    }
    p.entry = lo;
    piece_read<PREFIX>(p, w, a, s, w.begin);
}

/* The piece after p; false at the end of the span. */
template <bool PREFIX>
__device__ __forceinline__ bool piece_next(piece &p, const span &w, const attn_args &a,
                                           const step_arrays &s)
{
    int at = p.base + p.hi;

    if (at >= w.end) {
        return false;
    }
    do {
        p.entry++;
    } while (w.start[p.entry + 1] == at); /* entries without chunks */
    piece_read<PREFIX>(p, w, a, s, at);
    return true;
}

/* Row of the step and query head behind row r of a piece's tile; row0: first query head
 * of the KV head's tile. */
struct place {
    int64_t seq;
    int head;
};

template <bool PREFIX>
__device__ __forceinline__ place place_of(int seq, int group, int kv_head, int row0, int r)
{
    if (PREFIX) {
        return {seq + r / group, kv_head * group + r % group};
    }
    return {seq, kv_head * group + row0 + r};
}

#endif
