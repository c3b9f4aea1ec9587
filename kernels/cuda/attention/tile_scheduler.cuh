/* Decode attention's tile scheduler: which chunks a warp group works on, and of which
 * sequences.
 *
 * The chunks of all sequences lie end to end and are cut into equal splits, each worked
 * on once per head. PREFIX: the entries of the list are runs of sequences that share
 * blocks instead of sequences.
 */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_TILE_SCHEDULER_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_TILE_SCHEDULER_CUH

#include "kernels/cuda/common.cuh"

/* A work tile: chunks [lo, hi) of the n chunks of one entry. */
struct work_tile {
    int entry;       /* index in the work list: of the sequence, or of the run */
    int seq;         /* the sequence; of a run, its first */
    int members;     /* sequences of a run, else 1 */
    int n, lo, hi;   /* chunks of the entry; [lo, hi) are in this split */
    int len;         /* tokens of the sequence, or of the run's chunks */
    int first_token; /* first token of chunk 0 */
    /* first token seen: earlier ones are outside the window or in the shared prefix */
    int begin_token;
    int base;             /* index of chunk 0 in the list */
    const int32_t *table; /* block ids */
};

struct kv_split {          /* One split of the work list. */
    const int32_t *start;  /* [n_seqs + 1] chunk_start, or shared_start */
    int n_seqs;            /* entries of the list */
    int index, begin, end; /* this split, and its chunks [begin, end) */
    int each, more;        /* chunks per split; the first `more` splits have one more */
    bool skips;            /* shared chunks belong to runs, not to their sequences */
};

/* Sets w to split `index` of `splits`. */
__device__ __forceinline__ void kv_split_set(kv_split &w, int total, int splits, int index)
{
    w.each = (unsigned)total / (unsigned)splits;
    w.more = total - w.each * splits;
    w.index = index;
    w.begin = w.each * index + min(index, w.more);
    w.end = w.begin + w.each + (index < w.more);
}

/* The split that holds chunk x. */
__device__ __forceinline__ int kv_split_owner(const kv_split &w, int x)
{
    int longer = (w.each + 1) * w.more;

    return x < longer ? (unsigned)x / (unsigned)(w.each + 1)
                      : w.more + (unsigned)(x - longer) / (unsigned)w.each;
}

/* Lane i loads entry i's start, length and table row; 32 entries are all that small
 * steps have. */
struct lane_entry {
    int start, len, row; /* of entry threadIdx.x % 32 */
};

template <bool PREFIX>
__device__ __forceinline__ lane_entry lane_entry_of(const kv_split &w, const step_arrays &s)
{
    int i = min(threadIdx.x & 31, s.max_seqs);

    return {w.start[i], PREFIX ? 0 : s.kv_len[i], PREFIX ? 0 : s.row[i]};
}

/* Fills in the work tile of p.entry, whose n chunks begin at index c0, from chunk `at`
 * of the list on. */
template <bool PREFIX>
__device__ __forceinline__ void work_tile_fill(work_tile &p, const kv_split &w, const attn_args &a,
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
__device__ __forceinline__ void work_tile_read(work_tile &p, const kv_split &w, const attn_args &a,
                                               const step_arrays &s, int at)
{
    int c0 = w.start[p.entry], n = w.start[p.entry + 1] - c0;

    work_tile_fill<PREFIX>(p, w, a, s, at, c0, n, PREFIX ? 0 : s.kv_len[p.entry],
                           PREFIX ? 0 : s.row[p.entry]);
}

/* The split's first work tile, by a 32-ary search. Called by a whole warp. */
template <bool PREFIX>
__device__ __forceinline__ void work_tile_first(work_tile &p, const kv_split &w, const attn_args &a,
                                                const step_arrays &s, const lane_entry &mine)
{
    const unsigned ALL = 0xffffffffu;
    int lane = threadIdx.x & 31, lo = 0, hi = w.n_seqs; /* start[lo] <= begin < start[hi] */

    if (hi < 32) {
        p.entry = 31 - __clz(__ballot_sync(ALL, lane < hi && mine.start <= w.begin));
        int c0 = __shfl_sync(ALL, mine.start, p.entry),
            n = __shfl_sync(ALL, mine.start, p.entry + 1) - c0;
        int len = __shfl_sync(ALL, mine.len, p.entry), row = __shfl_sync(ALL, mine.row, p.entry);
        work_tile_fill<PREFIX>(p, w, a, s, w.begin, c0, n, len, row);
        return;
    }
    while (hi - lo > 1) {
        int step = (hi - lo + 31) / 32, at = min(lo + lane * step, hi);
        unsigned below = __ballot_sync(ALL, at < hi && w.start[at] <= w.begin);
        lo += (31 - __clz(below)) * step; /* lane 0 always votes; votes are a prefix */
        hi = min(lo + step, hi);
    }
    p.entry = lo;
    work_tile_read<PREFIX>(p, w, a, s, w.begin);
}

/* The next work tile; false at the end of the split. */
template <bool PREFIX>
__device__ __forceinline__ bool work_tile_next(work_tile &p, const kv_split &w, const attn_args &a,
                                               const step_arrays &s)
{
    int at = p.base + p.hi;

    if (at >= w.end) {
        return false;
    }
    do {
        p.entry++;
    } while (w.start[p.entry + 1] == at); /* entries without chunks */
    work_tile_read<PREFIX>(p, w, a, s, at);
    return true;
}

/* A row of a matrix tile: its row of the step, and its query head. row0 is the first
 * query head of the KV head's matrix tile. */
struct q_row {
    int64_t seq; /* decoding sequence, which is its row of the step */
    int head;    /* query head */
};

template <bool PREFIX>
__device__ __forceinline__ q_row q_row_of(int seq, int group, int kv_head, int row0, int r)
{
    if (PREFIX) {
        return {seq + r / group, kv_head * group + r % group};
    }
    return {seq, kv_head * group + row0 + r};
}

#endif
