/* Shared by the kernels of attention over latents. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_LATENT_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_LATENT_CUH

#include "kernels/cuda/attention/attn_common.cuh"

enum { LATENT_KEYS = 64 }; /* of a tile */

/* The part of a tile's rows that belongs to one sequence, and the keys it visits. */
struct segment {
    const int32_t *table; /* of the sequence */
    int first, end;       /* tokens */
    int last;             /* cache index of token `first` */
    int lo, hi;           /* keys */
};

/* The rows of a block: row r is head `head + r % heads` of token `token + r /
 * heads`. */
struct tile_rows {
    int token, n_tokens, head, heads;
};

/* Where the rows of a tile of scores end: the keys that the row sees. */
__device__ __forceinline__ int keys_of(const segment &g, const tile_rows &w, int row)
{
    int token = w.token + row / w.heads;

    return token >= g.first && token < g.end ? g.last + 1 + token - g.first : 0;
}

/* Keys [*lo, *hi) of split i of p.n, of n keys. */
__device__ __forceinline__ void split_keys(int n, int n_splits, int i, int *lo, int *hi)
{
    int tiles = (n + LATENT_KEYS - 1) / LATENT_KEYS,
        each = (tiles + n_splits - 1) / n_splits * LATENT_KEYS;

    *lo = min(i * each, n);
    *hi = min(*lo + each, n);
}

/* The segment of a block's rows that starts at `token`. decode: the block's split is
 * blockIdx.x. */
__device__ __forceinline__ segment segment_at(const step_arrays &s, const latent_splits &p,
                                              const latent_work &w, int token, int end)
{
    int seq = w.decode ? token : sequence_of(s, token, w.first_seq, w.n_seqs);
    segment g;

    g.table = s.table + (int64_t)s.row[seq] * s.table_width;
    g.first = token;
    g.end = w.decode ? end : min(end, s.q_start[seq + 1]);
    g.last = s.kv_len[seq] - (s.q_start[seq + 1] - token);
    split_keys(max(g.last + g.end - g.first, 0), p.n, w.decode ? blockIdx.x : 0, &g.lo, &g.hi);
    return g;
}

/* The rows of this block, of a grid as launch_latent_mma describes it. */
__device__ __forceinline__ tile_rows rows_of_block(const latent_args &a, const latent_work &w,
                                                   int most_heads)
{
    int tile = w.decode ? blockIdx.z : gridDim.x - 1 - blockIdx.x,
        heads = min(a.n_heads, most_heads);
    tile_rows rows = {w.first + tile * w.tokens, 0, (int)blockIdx.y * heads, heads};

    rows.n_tokens = min(w.tokens, w.end - rows.token);
    return rows;
}

#endif
