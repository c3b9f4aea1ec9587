/* How many blocks a KV group with a sliding window, or one of recurrent states, needs:
 * arithmetic that the scheduler, its checks and the sizing of the pool share.
 *
 * In a group with window W the token at position p sees the positions p + 1 - W .. p,
 * and the device may read from a multiple of `align` tokens before them on. A sequence
 * that computes at most `step_tokens` tokens in a step needs the blocks of W - 1 +
 * align - 1 + step_tokens positions at a time, wherever they begin in a block.
 *
 * In a group with chunks of W tokens it sees those from the last multiple of W on,
 * itself included. They are of the window of W tokens, so the blocks of one suffice;
 * the first token of a chunk needs none of those before it.
 *
 * In a group of recurrent states a block holds one state of each of its layers, that
 * behind the last token which wrote to the block. A step reads the block of the token
 * before its first one and writes the block of its last one, which may be the same. So
 * a block whose last token ended a step holds the state behind all its tokens for good:
 * the next token writes to the next block. For tables, forks, copies and swaps such a
 * group is one with a window of two tokens. A step also writes the states behind every
 * block that it passes. Blocks that end at multiples of the snapshot distance are found
 * by the prefix cache. A sequence needs the blocks of one such distance at a time; a
 * step of prefill passes several where there are blocks for them (seq_extend_states),
 * and the snapshots that it has passed stay in the table until its commit publishes
 * them (seq_trim). Where a step verifies drafts, the states behind each draft go to a
 * spare block that is in no table yet (sched_draft.c).
 */
#ifndef QUIRE_ENGINE_SCHED_KV_KV_WINDOW_H
#define QUIRE_ENGINE_SCHED_KV_KV_WINDOW_H

#include "config/base/base.h"

/* In place of the tokens that a token sees: the group holds recurrent states. */
enum { KV_WINDOW_STATE = -1 };

struct kv_window {
    int32_t tokens;     /* that a token sees at most; 0: all */
    int32_t align;      /* >= 1 */
    int32_t block_size; /* tokens */
    bool chunked;       /* it begins at multiples of `tokens` */
};

/* That of a KV group by its entry in kv_window; `chunked`: the model's windows are
 * chunks. */
static inline struct kv_window kv_window_of(int32_t tokens, bool chunked, int32_t align,
                                            int32_t block_size)
{
    return tokens == KV_WINDOW_STATE ? (struct kv_window){2, 1, block_size, false}
                                     : (struct kv_window){tokens, align, block_size, chunked};
}

/* The first block that is read for a token at `position`. */
static inline int32_t window_first_block(struct kv_window w, int32_t position)
{
    if (w.tokens <= 0) {
        return 0;
    }
    int32_t first = w.chunked ? position / w.tokens * w.tokens : MAX(position + 1 - w.tokens, 0);
    return first / w.align * w.align / w.block_size;
}

/* Blocks that a sequence needs at most at a time; without a window any number. */
static inline int32_t window_blocks(struct kv_window w, int32_t step_tokens)
{
    int64_t span = (int64_t)w.tokens + w.align - 2 + step_tokens;

    return w.tokens > 0 ? (int32_t)MIN(div_ceil(span - 1, w.block_size) + 1, INT32_MAX / 2)
                        : INT32_MAX / 2;
}

#endif
