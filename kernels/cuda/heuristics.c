/* See heuristics.h. */
#include "kernels/cuda/heuristics.h"
#include "kernels/cuda/attention/latent_expanded.h"
#include "kernels/cuda/fused_decode/small_rows.h"
#include "kernels/cuda/launch.h"

#include <stdlib.h>
#include <string.h>

static int32_t round_up_to(int32_t n, int32_t to)
{
    return (n + to - 1) / to * to;
}

int32_t graph_rows(int32_t n)
{
    return n <= 8     ? n
           : n <= 64  ? round_up_to(n, 8)
           : n <= 256 ? round_up_to(n, 16)
                      : round_up_to(n, 32);
}

int32_t product_rows(int32_t n)
{
    if (n <= 2) {
        return n;
    }
    int32_t step = n <= 8      ? 4
                   : n <= 64   ? 16
                   : n <= 128  ? 32
                   : n <= 256  ? 64
                   : n <= 512  ? 32
                   : n <= 1024 ? 64
                   : n <= 2048 ? 128
                               : 256;
    return round_up_to(n, step);
}

bool gated_by_wide_rows(int32_t rows, int32_t n, int32_t n_sms)
{
    enum { LEAST_ROWS = 97, MOST_ROWS = 2 * SMALL_ROWS };
    int32_t blocks = n / WIDE_GATE;

    return rows >= LEAST_ROWS && rows <= MOST_ROWS && n % WIDE_GATE == 0 && blocks <= n_sms &&
           blocks >= n_sms * 5 / 6;
}

bool product_by_tiles(int32_t rows, int32_t n, int32_t n_sms)
{
    enum { ROWS = 256, COLUMNS = 256, LEAST_ROWS = 200 }; /* of the two tiles of a cluster */
    int64_t slots = MAX(n_sms / 2, 1), tiles = div_ceil(rows, ROWS) * div_ceil(n, COLUMNS);
    int64_t slotted = div_ceil(tiles, slots) * slots * ROWS * COLUMNS;
    /* With one tile of rows the weights' way from memory counts as well. */
    int64_t percent = rows > ROWS ? 92 : 65;

    return rows >= LEAST_ROWS && (int64_t)rows * n * 100 >= slotted * percent;
}

bool codes_by_tiles(int32_t rows, int32_t n, int32_t n_sms)
{
    enum { ROWS = 512, COLUMNS = 128, LEAST_ROWS = 500 }; /* of the two tiles of a cluster */
    int64_t slots = MAX(n_sms / 2, 1), tiles = div_ceil(rows, ROWS) * div_ceil(n, COLUMNS);
    int64_t slotted = div_ceil(tiles, slots) * slots * ROWS * COLUMNS;

    return rows >= LEAST_ROWS && (int64_t)rows * n * 100 >= slotted * 85;
}

bool graph_eligible(const struct batch *b)
{
    if (b->n_seqs < 1 || b->n_decode != b->n_seqs || b->n_tokens != b->n_seqs ||
        b->n_logits != b->n_tokens || b->n_samples != b->n_tokens) {
        return false;
    }
    for (int32_t i = 0; i < b->n_logits; i++) {
        if (b->logits_token[i] != i || b->sample[i].logits_row != i) {
            return false;
        }
    }
    return true;
}

bool batch_greedy(const struct batch *b)
{
    for (int32_t i = 0; i < b->n_samples; i++) {
        const struct sample_row *s = &b->sample[i];
        if (s->kind != SAMPLE_TOKEN || (s->temperature != 0 && s->top_k != 1) ||
            sample_penalised(s) || s->n_bias > 0 || s->mask_first >= 0 || s->late_mask > 0 ||
            s->n_logprobs > 0) {
            return false;
        }
    }
    return true;
}

int32_t attn_chunks(int32_t kv_len, int32_t window, int32_t chunk)
{
    if (kv_len <= 0) {
        return 0;
    }
    int32_t begin = window > 0 && kv_len > window ? (kv_len - window) / chunk * chunk : 0;
    return (int32_t)div_ceil(kv_len - begin, chunk);
}

int32_t attn_chunk_starts(const struct batch *b, int32_t window, int32_t chunk, const int32_t *skip,
                          int32_t *ret)
{
    int32_t total = 0;

    for (int32_t i = 0; i < b->n_decode; i++) {
        ret[i] = total;
        total += attn_chunks(b->kv_len[i], window, chunk) - (skip ? skip[i] : 0);
    }
    ret[b->n_decode] = total;
    return total;
}

/* Number of splits, `most` or a little less. Sequences of like lengths (judged by their
 * first half) are split at their ends where that leaves few warps idle. */
static int32_t even_splits(const int32_t *start, int32_t n, int32_t most)
{
    int64_t in_half = (int64_t)start[n / 2] * n, fair = (int64_t)start[n] * (n / 2);

    if (8 * llabs(in_half - fair) > fair) {
        return most;
    }
    if (most >= n) {
        int32_t splits = most - most % n;
        return splits * 10 >= most * 8 ? splits : most;
    }
    int32_t each = (int32_t)div_ceil(n, most);
    return n % each == 0 && n / each * 10 >= most * 9 ? n / each : most;
}

/* Up to so many chunks per sequence, many sequences are worked on by single warps:
 * nothing is combined across warps, and a split is one sequence or more. */
enum { SINGLE_WARP_CHUNKS = 64 };

struct split_kv_plan attn_split_kv(const int32_t *start, int32_t n, int32_t heads, int32_t blocks,
                                   int32_t block_warps)
{
    if (start[n] == 0) {
        return (struct split_kv_plan){.warps = 1};
    }
    int32_t n_warps = blocks * block_warps / heads; /* splits for single warps */
    bool single_warps =
        heads > blocks || (n * 10 >= n_warps * 9 && start[n] <= (int64_t)n * SINGLE_WARP_CHUNKS);
    int32_t warps = single_warps ? 1 : block_warps;
    int32_t most = even_splits(start, n, MAX(blocks * block_warps / warps / heads, 1));
    return (struct split_kv_plan){.chunks = start[n],
                                  .splits = MIN(most, (int32_t)div_ceil(start[n], warps)),
                                  .warps = warps};
}

struct decode_shape attn_decode_shape(int32_t head_dim, int32_t element_bytes, int32_t shared_bytes)
{
    int32_t least = DECODE_LEAST_WARPS(head_dim);

    for (int32_t warps = DECODE_MOST_WARPS(head_dim); warps >= least; warps /= 2) {
        int32_t ring_bytes = shared_bytes - DECODE_RINGS(warps, head_dim);
        int32_t stages = ring_bytes / (warps * DECODE_STAGE(head_dim, MIN(element_bytes, 2)));

        if (stages >= 2) {
            return (struct decode_shape){.warps = warps, .stages = MIN(stages, DECODE_MAX_STAGES)};
        }
    }
    return (struct decode_shape){0};
}

enum { SHARED_MIN_CHUNKS = 4 };

/* The shared launch costs a fixed time, and few sequences find their common blocks in
 * the L2 cache anyway, so the threshold falls with the number of sequences at first,
 * and then rises because larger blocks of warps read faster without it. Fitted to
 * timings on an H200, where the cases of test_heuristics.c are from; elsewhere the same
 * time is worth the bytes that memory reads in it. */
int64_t shared_worth_bytes(int32_t n_decode, int32_t memory_gbs)
{
    int64_t there = (int64_t)MAX(328 - n_decode, n_decode + 44) << 20;

    return memory_gbs > 0 ? there * memory_gbs / H200_GBS : there;
}

bool mps_told(void)
{
    static const char *const names[] = {"CUDA_MPS_PIPE_DIRECTORY",
                                        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"};

    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const char *v = getenv(names[i]);
        if (v && v[0] != '\0') {
            return true;
        }
    }
    return false;
}

/* Chunks that sequence i shares with its predecessor, excluding its last chunk. */
static int32_t common_chunks(const struct batch *b, int32_t i, int32_t block_size, int32_t chunk)
{
    int32_t last = (MIN(b->kv_len[i - 1], b->kv_len[i]) - 1) / chunk;

    return MIN((int32_t)((int64_t)b->lcp_blocks[i] * block_size / chunk), last);
}

/* The run that begins at sequence i grows while another member increases the chunks
 * saved. */
static struct shared_run run_from(const struct batch *b, int32_t i, int32_t block_size,
                                  int32_t chunk, int32_t most)
{
    struct shared_run r = {.seq = i, .members = 1, .n_chunks = INT32_MAX};

    while (i + r.members < b->n_decode && r.members < most) {
        int32_t n = MIN(r.n_chunks, common_chunks(b, i + r.members, block_size, chunk));
        if (n < SHARED_MIN_CHUNKS ||
            (int64_t)n * r.members < (int64_t)r.n_chunks * (r.members - 1)) {
            break;
        }
        r.n_chunks = n;
        r.members++;
    }
    return r;
}

int32_t shared_runs(const struct batch *b, int32_t block_size, int32_t chunk, int32_t most,
                    int64_t worth, struct shared_run *ret, int32_t *ret_start, int32_t *ret_skip)
{
    int32_t n = 0, total = 0;
    int64_t spared = 0;

    memset(ret_skip, 0, (size_t)b->n_decode * sizeof(*ret_skip));
    for (int32_t i = 0; i < b->n_decode;) {
        struct shared_run r = run_from(b, i, block_size, chunk, most);
        i += r.members;
        if (r.members < 2) {
            continue;
        }
        for (int32_t k = r.seq; k < i; k++) {
            ret_skip[k] = r.n_chunks;
        }
        spared += (int64_t)r.n_chunks * (r.members - 1);
        ret_start[n] = total;
        ret[n++] = r;
        total += r.n_chunks;
    }
    if (spared < worth) {
        n = total = 0;
        memset(ret_skip, 0, (size_t)b->n_decode * sizeof(*ret_skip));
    }
    ret_start[n] = total;
    return n;
}

static int by_keys(const void *a, const void *b)
{
    const struct query_tile *x = a;
    const struct query_tile *y = b;
    int32_t more = y->end + y->shift - (x->end + x->shift);

    return more != 0 ? more : x->first - y->first;
}

int32_t prefill_tiles(const struct batch *b, int32_t rows, struct query_tile *ret)
{
    int32_t n = 0;

    for (int32_t s = b->n_decode; s < b->n_seqs; s++) {
        int32_t end = b->q_start[s + 1];
        for (int32_t first = b->q_start[s]; first < end; first += rows, n++) {
            if (ret) {
                ret[n] = (struct query_tile){.row = b->row[s],
                                             .first = first,
                                             .end = MIN(first + rows, end),
                                             .shift = b->kv_len[s] - end};
            }
        }
    }
    if (ret) {
        qsort(ret, (size_t)n, sizeof(*ret), by_keys);
    }
    return n;
}

int32_t widened_seqs(const struct batch *b, int32_t block_size, int32_t group,
                     const struct device_speed *speed, struct widened_seq *ret, int32_t *ret_first)
{
    /* Query heads of a KV head, times rows, from which on widening its keys takes less
     * than what it saves on an H200: about 500. */
    enum { WORTH_QUERIES = 1024 };
    int64_t blocks = 0, saved = 0, worth = rows_that_pay(WORTH_QUERIES, speed);

    for (int32_t s = b->n_decode; s < b->n_seqs; s++) {
        int32_t rows = b->q_start[s + 1] - b->q_start[s];
        ret[s - b->n_decode] = (struct widened_seq){
            .row = b->row[s], .first = (int32_t)blocks, .position = b->kv_len[s] - rows};
        ret_first[s] = (int32_t)blocks;
        saved += ((int64_t)rows * group - worth) * b->kv_len[s];
        blocks += div_ceil(b->kv_len[s], block_size);
        if (blocks > INT32_MAX) {
            return 0;
        }
    }
    return saved >= 0 ? (int32_t)blocks : 0;
}

/* New rows from which on expanding a sequence's heads takes less than what it saves: of
 * a sequence without much context, and of any. Expanding costs latent * (nope + v)
 * operations a head and key, which attention over latents spends on each new row in its
 * products by head; it saves 2 * latent - nope - v for each pair of row and key. */
enum { EXPAND_LEAST_ROWS = 64, EXPAND_ANY_ROWS = 256 };

bool sequence_expands(int32_t rows, int32_t keys, int32_t most_rows)
{
    return rows >= EXPAND_LEAST_ROWS && (rows >= EXPAND_ANY_ROWS || keys / 2 <= rows) &&
           div_ceil(keys, EXPANDED_ALIGN) * EXPANDED_ALIGN <= most_rows;
}

/* Adds sequence s to the portion. */
static void expanded_add(const struct batch *b, int32_t s, struct expanded_seq *seq,
                         struct query_tile *tile, struct expanded_portion *p)
{
    int32_t end = b->q_start[s + 1];

    if (seq) {
        seq[p->seq + p->n_seqs] =
            (struct expanded_seq){.row = b->row[s], .first = p->n_rows, .n_keys = b->kv_len[s]};
    }
    p->n_seqs++;
    for (int32_t first = b->q_start[s]; first < end; first += ATTN_PREFILL_ROWS) {
        if (tile) {
            tile[p->tile + p->n_tiles] =
                (struct query_tile){.row = p->n_rows,
                                    .first = first,
                                    .end = MIN(first + ATTN_PREFILL_ROWS, end),
                                    .shift = b->kv_len[s] - end};
        }
        p->n_tiles++;
    }
    p->n_rows += (int32_t)div_ceil(b->kv_len[s], EXPANDED_ALIGN) * EXPANDED_ALIGN;
}

bool expanded_next(const struct batch *b, int32_t most_rows, struct expanded_seq *seq,
                   struct query_tile *tile, struct expanded_portion *p)
{
    p->seq += p->n_seqs;
    p->tile += p->n_tiles;
    p->n_seqs = p->n_tiles = p->n_rows = 0;
    for (; p->next < b->n_seqs; p->next++) {
        int32_t s = p->next, rows = b->q_start[s + 1] - b->q_start[s];
        if (!sequence_expands(rows, b->kv_len[s], most_rows)) {
            continue;
        }
        if (p->n_rows + div_ceil(b->kv_len[s], EXPANDED_ALIGN) * EXPANDED_ALIGN > most_rows) {
            break;
        }
        expanded_add(b, s, seq, tile, p);
    }
    if (tile) {
        qsort(tile + p->tile, (size_t)p->n_tiles, sizeof(*tile), by_keys);
    }
    return p->n_seqs > 0;
}
