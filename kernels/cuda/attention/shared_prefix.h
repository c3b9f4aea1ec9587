/* What the host's decisions and the kernels both speak of; apart from launch.h, because
 * heuristics.c is also built where there is no CUDA. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_SHARED_PREFIX_H
#define QUIRE_KERNELS_CUDA_ATTENTION_SHARED_PREFIX_H

#include <stdint.h>

/* Consecutive decoding sequences whose first chunks lie in the same blocks: read once
 * for the query heads of all. */
struct shared_run {
    int32_t seq, members, n_chunks;
};

/* Rows [first, end) of the step, all of one sequence, whose block ids are in row `row`
 * of the table; a row's position is its index plus shift. Keys of the tile: end +
 * shift. */
struct query_tile {
    int32_t row, first, end, shift;
};

/* Decode attention lays the key ranges of all sequences end to end in chunks of
 * ATTN_CHUNK tokens and cuts them into equal spans; chunk_start says where each
 * sequence begins. */
enum { ATTN_CHUNK = 16 };

/* It has a block on each multiprocessor. In the block's shared memory there are
 * MEETING_ROWS rows of every warp, where their sums meet, the warps' barriers, and
 * behind these DECODE_RINGS bytes a ring for each warp. A ring has stages of
 * DECODE_STAGE bytes, the keys and values of a chunk in 16 bits. */
enum { MEETING_ROWS = 4, DECODE_MAX_STAGES = 6 };
#define DECODE_STAGE(head_dim) (2 * ATTN_CHUNK * (head_dim) * 2)
#define DECODE_RINGS(warps, head_dim) \
    (((warps) * (MEETING_ROWS * ((head_dim) + 2) * 4 + DECODE_MAX_STAGES * 8) + 127) / 128 * 128)

/* Warps of a block where there is much shared memory, and where there is little. */
#define DECODE_MOST_WARPS(head_dim) ((head_dim) > 128 ? 4 : 8)
#define DECODE_LEAST_WARPS(head_dim) ((head_dim) > 80 ? DECODE_MOST_WARPS(head_dim) / 2 : 8)

/* A block's warps and their stages; no warps: the kernel does not fit. */
struct decode_shape {
    int32_t warps, stages;
};

/* How its work is cut: the chunks of all sequences (of one head), end to end, into so
 * many equal spans, and a team of so many warps of one block for each span and head. */
struct attn_cut {
    int32_t chunks, spans, warps;
};

#endif
