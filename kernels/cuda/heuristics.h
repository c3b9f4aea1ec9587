/* Decisions of the CUDA backend that need no device: pure functions, tested without
 * one. */
#ifndef QUIRE_KERNELS_CUDA_HEURISTICS_H
#define QUIRE_KERNELS_CUDA_HEURISTICS_H

#include "kernels/batch.h"
#include "kernels/cuda/attention/shared_prefix.h"

/* Rows of the captured graph that serves a decode step of n rows: steps of 1 to 8, of 8
 * to 64, of 16 to 256, then of 32. */
int32_t graph_rows(int32_t n);

/* Rows for which a matrix product's algorithm is chosen when it has n. Up to 256, where
 * it is chosen by timing while others wait, a dozen numbers; above, so few that the
 * choices of a long run are soon made. */
int32_t product_rows(int32_t n);

/* Whether the step can be served by a graph: every sequence has one token, one logits
 * row and one sample, nothing is moved but table entries, and no row lists allowed
 * tokens (their bitmap sizes the kernel's shared memory). */
bool graph_eligible(const struct batch *b);

/* Every sampling row takes its greatest logit and nothing else is asked. */
bool batch_greedy(const struct batch *b);

/* Chunks of `chunk` tokens that hold the last `window` (0: all) of kv_len tokens, from
 * a multiple of `chunk` on. */
int32_t attn_chunks(int32_t kv_len, int32_t window, int32_t chunk);

/* Exclusive sums of attn_chunks over the decoding sequences into ret [n_decode + 1],
 * less the `skip` [n_decode] (may be NULL) first chunks of each; returns the total. */
int32_t attn_chunk_starts(const struct batch *b, int32_t window, int32_t chunk, const int32_t *skip,
                          int32_t *ret);

/* The cut of n sequences whose chunks begin at start [n + 1], for `heads` on a device
 * of so many multiprocessors, with a block of block_warps warps on each. */
struct attn_cut attn_cut(const int32_t *start, int32_t n, int32_t heads, int32_t blocks,
                         int32_t block_warps);

/* Decode attention's block for heads of so many dims, where it may have so many bytes
 * of shared memory: the most warps that have two stages each, and as many stages as
 * there is room for. */
struct decode_shape attn_decode_shape(int32_t head_dim, int32_t shared_bytes);

/* Bytes of keys and values that a layer must be spared, of n_decode sequences, for a
 * launch of their own to pay. */
int64_t shared_worth_bytes(int32_t n_decode);

/* Where decode attention reads shared blocks once: runs of two to `most` consecutive
 * decoding sequences that have leading chunks in common. What a run covers is in skip
 * [n_decode] of its members (0 elsewhere); of every sequence at least one chunk is
 * left. start [n + 1]: exclusive sums of the runs' chunks. No runs at all when together
 * they spare less than `worth` chunks. Room for n_decode / 2 runs. Returns n. */
int32_t shared_runs(const struct batch *b, int32_t block_size, int32_t chunk, int32_t most,
                    int64_t worth, struct shared_run *ret, int32_t *ret_start, int32_t *ret_skip);

/* Tiles of `rows` query rows of the sequences past n_decode, those with most keys
 * first. Returns their number; `ret` NULL only counts. */
int32_t prefill_tiles(const struct batch *b, int32_t rows, struct query_tile *ret);

#endif
