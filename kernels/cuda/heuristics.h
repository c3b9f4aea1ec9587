/* Decisions of the CUDA backend that need no device: pure functions, tested without
 * one. */
#ifndef QUIRE_KERNELS_CUDA_HEURISTICS_H
#define QUIRE_KERNELS_CUDA_HEURISTICS_H

#include "kernels/batch.h"
#include "kernels/cuda/attention/shared_prefix.h"
#include "kernels/cuda/heuristics_speed.h"

struct expanded_seq; /* attention/latent_expanded.h */

/* Rows of the captured graph that serves a decode step of n rows: n up to 8, then
 * multiples of 8 up to 64, of 16 up to 256, of 32 beyond. */
int32_t graph_rows(int32_t n);

/* Row bucket of a matrix product with n rows: algorithms are chosen per bucket. There
 * are a dozen buckets up to 256 rows, where the choice is timed, and few enough above
 * for all of them to be met soon. */
int32_t product_rows(int32_t n);

/* Whether a gated product of `rows` rows goes by launch_gated_wide, in one wave of
 * blocks, where nothing was timed. With fewer rows cuBLASLt and a launch for the gate
 * take as long. */
bool gated_by_wide_rows(int32_t rows, int32_t n, int32_t n_sms);
/* Whether a gated product of `rows` rows with w [n, k] is worth tiles of 128 x 256
 * (gemm/tiles.h), where nothing was timed: whether they keep n_sms multiprocessors
 * busy. */
bool product_by_tiles(int32_t rows, int32_t n, int32_t n_sms);

/* Whether a product of e4m3 codes of `rows` rows with w [n, k] is worth tiles of 256 x
 * 128 (gemm/tiles.h). */
bool codes_by_tiles(int32_t rows, int32_t n, int32_t n_sms);

/* Whether a graph can serve the step: every sequence has one token, one logits row and
 * one sample. */
bool graph_eligible(const struct batch *b);

/* Whether every sampling row takes its greatest logit and asks for nothing else. */
bool batch_greedy(const struct batch *b);

/* Number of chunks, aligned to multiples of `chunk` tokens, that hold the last `window`
 * (0: all) of kv_len tokens. */
int32_t attn_chunks(int32_t kv_len, int32_t window, int32_t chunk);

/* Exclusive sums of attn_chunks over the decoding sequences into ret [n_decode + 1],
 * less the first skip [n_decode] (NULL: none) chunks of each. Returns the total. */
int32_t attn_chunk_starts(const struct batch *b, int32_t window, int32_t chunk, const int32_t *skip,
                          int32_t *ret);

/* Split-KV plan of n sequences whose chunks begin at start [n + 1], for `heads` head
 * tiles on a device with `blocks` multiprocessors and one block of block_warps warps on
 * each. */
struct split_kv_plan attn_split_kv(const int32_t *start, int32_t n, int32_t heads, int32_t blocks,
                                   int32_t block_warps);

/* Shape of decode attention's block for heads of head_dim dims within shared_bytes of
 * shared memory: the most warps that have two ring stages each, and as many stages as
 * fit. */
struct decode_shape attn_decode_shape(int32_t head_dim, int32_t element_bytes,
                                      int32_t shared_bytes);

/* Least bytes of keys and values per layer that reading shared prefixes once must save,
 * with n_decode sequences, to pay for a launch of its own. memory_gbs: what the
 * device's memory transfers at best, in GB/s; 0: unknown. */
int64_t shared_worth_bytes(int32_t n_decode, int32_t memory_gbs);

/* Finds runs of two to `most` consecutive decoding sequences that share leading chunks,
 * which decode attention then reads once. ret_skip [n_decode]: chunks of each sequence
 * that a run covers (0: none); at least one chunk of every sequence is left. ret_start
 * [n + 1]: exclusive sums of the runs' chunks. If all runs together save less than
 * `worth` chunks there are none. `ret` holds up to n_decode / 2 runs. Returns n. */
int32_t shared_runs(const struct batch *b, int32_t block_size, int32_t chunk, int32_t most,
                    int64_t worth, struct shared_run *ret, int32_t *ret_start, int32_t *ret_skip);

/* Cuts the sequences past n_decode into tiles of `rows` query rows, most keys first.
 * Returns their number; `ret` NULL only counts. */
int32_t prefill_tiles(const struct batch *b, int32_t rows, struct query_tile *ret);

/* Lays the sequences past n_decode end to end in a panel of keys and values that are
 * widened for prefill (struct widened_seq): ret [n_seqs - n_decode], and in ret_first
 * [n_seqs] the first block of each sequence there. Returns the blocks in all, or 0 if
 * the step has too few queries for it to pay. group: query heads per KV head. */
int32_t widened_seqs(const struct batch *b, int32_t block_size, int32_t group,
                     const struct device_speed *speed, struct widened_seq *ret, int32_t *ret_first);

/* Whether the heads of a sequence with `rows` new rows and `keys` keys in all are
 * expanded from latents for them, of which most_rows fit into a buffer. It depends on
 * nothing but the sequence. */
bool sequence_expands(int32_t rows, int32_t keys, int32_t most_rows);

/* Sequences past n_decode that expand together: begin with .next = n_decode. */
struct expanded_portion {
    int32_t next;          /* sequence that the next portion may begin with */
    int32_t seq, n_seqs;   /* in the list of expanded sequences */
    int32_t tile, n_tiles; /* in the list of tiles */
    int32_t n_rows;        /* of latents: each sequence's, in multiples of EXPANDED_ALIGN */
};

/* The next portion, of at most most_rows rows of latents; false: there is none. seq and
 * tile (NULL: not wanted) are the lists, of all portions; a portion's tiles have most
 * keys first. */
bool expanded_next(const struct batch *b, int32_t most_rows, struct expanded_seq *seq,
                   struct query_tile *tile, struct expanded_portion *p);

#endif
