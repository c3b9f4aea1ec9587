/* Types shared by the host's heuristics and the attention kernels. They are apart from
 * launch.h because heuristics.c is also built without CUDA. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_SHARED_PREFIX_H
#define QUIRE_KERNELS_CUDA_ATTENTION_SHARED_PREFIX_H

#include <stdint.h>

/* Consecutive decoding sequences whose leading chunks lie in the same blocks; these are
 * read once for the query heads of all of them. */
struct shared_run {
    int32_t seq, members, n_chunks; /* first sequence, number of sequences, chunks they share */
};

/* Query rows [first, end) of the step, all of one sequence, whose block ids are row
 * `row` of the table. A query's position is its row plus shift, so the tile sees end +
 * shift keys. */
struct query_tile {
    int32_t row, first, end, shift; /* see above; read as one int4 by attn_prefill_sm90.cu */
};

/* A sequence whose keys and values are widened for prefill (widened.cu): the blocks of
 * row `row` of the block table go to those of the panel from `first` on. */
struct widened_seq {
    int32_t row, first, position; /* position: of its first query */
};

/* Decode attention lays the key ranges of all sequences end to end in chunks of
 * ATTN_CHUNK tokens and cuts them into equal splits; chunk_start says where each
 * sequence begins. */
enum { ATTN_CHUNK = 16 };
/* Keys are loaded from a multiple of this many tokens on, at or before the first one
 * that a window shows; the weights of those before are zero. */
enum { ATTN_WINDOW_ALIGN = 64 };

/* There is one block per multiprocessor. Its shared memory holds COMBINE_ROWS rows of
 * every warp, in which warps combine their results; the warps' mbarriers; and, from
 * DECODE_RINGS on, a ring for each warp. A ring stage is DECODE_STAGE bytes: keys and
 * values of one chunk, and behind elements of 8 bits room for a scale of each. */
enum { COMBINE_ROWS = 4, DECODE_MAX_STAGES = 6 };
#define DECODE_STAGE(head_dim, element_bytes) \
    (2 * ATTN_CHUNK * ((head_dim) * (element_bytes) + ((element_bytes) == 1 ? 4 : 0)))
#define DECODE_RINGS(warps, head_dim) \
    (((warps) * (COMBINE_ROWS * ((head_dim) + 2) * 4 + DECODE_MAX_STAGES * 8) + 127) / 128 * 128)

/* Warps per block with much shared memory, and with little. */
#define DECODE_MOST_WARPS(head_dim) ((head_dim) > 128 ? 4 : 8)
#define DECODE_LEAST_WARPS(head_dim) ((head_dim) > 80 ? DECODE_MOST_WARPS(head_dim) / 2 : 8)

/* Warps of a block, and ring stages of each; no warps: the kernel does not fit. */
struct decode_shape {
    int32_t warps, stages; /* stages is at most DECODE_MAX_STAGES */
};

/* Split-KV plan: the chunks of all sequences (of one head), end to end, are cut into
 * equal splits; each split and head is worked on by a group of warps of one block. */
struct split_kv_plan {
    int32_t chunks, splits, warps; /* chunks in all; splits; warps per split and head */
};

#endif
