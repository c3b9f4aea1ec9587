/* What the host's decisions and the kernels both speak of; apart from launch.h, because heuristics.c is also built where
 * there is no CUDA. */
#ifndef QUIRE_CUDA_SHARED_RUN_H
#define QUIRE_CUDA_SHARED_RUN_H

#include <stdint.h>

/* Consecutive decoding sequences whose first chunks lie in the same blocks: read once for the query heads of all. */
struct shared_run {
    int32_t seq, members, n_chunks;
};

/* Rows [first, end) of the step, all of one sequence, whose block ids are in row `row` of the table; a row's position is its
 * index plus shift. Keys of the tile: end + shift. */
struct query_tile {
    int32_t row, first, end, shift;
};

/* Decode attention has a block on each multiprocessor, of so many warps; their stages fill its shared memory. */
#define DECODE_WARPS(head_dim) ((head_dim) > 128 ? 4 : 8)

/* How its work is cut: the chunks of all sequences (of one head), end to end, into so many equal spans, and a team of so many
 * warps of one block for each span and head. */
struct attn_cut {
    int32_t chunks, spans, warps;
};

#endif
