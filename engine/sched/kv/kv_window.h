/* How many blocks a KV group with a sliding window needs: arithmetic that the scheduler,
 * its checks and the sizing of the pool share.
 *
 * In a group with window W the token at position p sees the positions p + 1 - W .. p. A
 * sequence that computes at most `step_tokens` tokens in a step needs the blocks of
 * W - 1 + step_tokens positions at a time, wherever they begin in a block.
 */
#ifndef QUIRE_ENGINE_SCHED_KV_KV_WINDOW_H
#define QUIRE_ENGINE_SCHED_KV_KV_WINDOW_H

#include "config/base/base.h"

/* The first block that a token at `position` sees; window 0: all. */
static inline int32_t window_first_block(int32_t window, int32_t block_size, int32_t position)
{
    return window > 0 ? MAX(position + 1 - window, 0) / block_size : 0;
}

/* Blocks that a sequence holds at most at a time; window 0: any number. */
static inline int32_t window_blocks(int32_t window, int32_t block_size, int32_t step_tokens)
{
    int64_t span = (int64_t)window - 1 + step_tokens;

    return window > 0 ? (int32_t)MIN(div_ceil(span - 1, block_size) + 1, INT32_MAX / 2)
                      : INT32_MAX / 2;
}

/* Blocks that a sequence of n_tokens holds at most in all groups. */
static inline int64_t kv_blocks_of(const int32_t *window, int32_t n_groups, int32_t block_size,
                                   int32_t step_tokens, int64_t n_tokens)
{
    int64_t all = div_ceil(n_tokens, block_size), n = 0;

    for (int32_t k = 0; k < n_groups; k++) {
        n += MIN(all, window_blocks(window[k], block_size, step_tokens));
    }
    return n;
}

#endif
