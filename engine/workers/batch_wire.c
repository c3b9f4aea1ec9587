#include "engine/workers/batch_wire.h"

#include <string.h>

#include "config/base/limits.h"
#include "engine/sched/decode/pack_impl.h" /* PACK_RUNS */
#include "engine/workers/batch_copy.h"

enum { WIRE_MAGIC = 0x51425733, ALIGN = 16 };

/* The counts of struct batch, and which of its arrays follow (bit i: the i-th). */
struct head {
    uint32_t magic, present;
    uint64_t step;
    int32_t n_swap_out, n_swap_in, n_copy, n_table_update, n_table_block;
    int32_t n_tokens, n_group_slots, n_seqs, n_decode, n_logits, n_samples;
    int32_t n_token_bias, n_mask_word, n_late_mask;
};

#define HEAD_NUMBERS(X) \
    X(step)             \
    X(n_swap_out)       \
    X(n_swap_in)        \
    X(n_copy)           \
    X(n_table_update)   \
    X(n_table_block)    \
    X(n_tokens)         \
    X(n_group_slots)    \
    X(n_seqs)           \
    X(n_decode)         \
    X(n_logits)         \
    X(n_samples)        \
    X(n_token_bias)     \
    X(n_mask_word)      \
    X(n_late_mask)

static size_t padded(size_t n_bytes)
{
    return (n_bytes + ALIGN - 1) / ALIGN * ALIGN;
}

size_t batch_wire_max(const struct executor_info *x)
{
    int64_t seqs = x->max_num_seqs, width = div_ceil(x->max_len, x->block_size);
    int32_t groups = executor_kv_groups(x);
    struct batch most = {
        .n_swap_out = x->n_host_blocks,
        .n_swap_in = x->n_host_blocks,
        .n_copy = groups * x->max_num_seqs,
        .n_table_update = PACK_RUNS * groups * x->max_num_seqs,
        .n_table_block = (int32_t)MIN(groups * seqs * width, INT32_MAX),
        .n_tokens = x->max_num_batched_tokens,
        .n_group_slots = (groups - 1) * x->max_num_batched_tokens,
        .n_seqs = x->max_num_seqs,
        .n_logits = x->max_samples,
        .n_samples = x->max_samples,
        .n_token_bias = (int32_t)MIN(seqs * LIMIT_ROW_BIASES, INT32_MAX),
        .n_mask_word = (int32_t)MIN(seqs * mask_words(x->vocab), INT32_MAX),
    };
    size_t n = padded(sizeof(struct head));

#define X(array, count) n += padded((size_t)(most.count) * sizeof(*most.array));
    BATCH_ARRAYS(X)
#undef X
    return n;
}

size_t batch_wire_write(void *at, const struct batch *b)
{
    struct head h = {.magic = WIRE_MAGIC};
    size_t n = padded(sizeof(h));
    uint32_t bit = 1;

#define X(array, count)                                          \
    if (b->array && (b->count) > 0) {                            \
        size_t n_bytes = (size_t)(b->count) * sizeof(*b->array); \
        if (at)                                                  \
            memcpy((char *)at + n, b->array, n_bytes);           \
        n += padded(n_bytes);                                    \
        h.present |= bit;                                        \
    }                                                            \
    bit <<= 1;
    BATCH_ARRAYS(X)
#undef X
#define X(number) h.number = b->number;
    HEAD_NUMBERS(X)
#undef X
    if (at) {
        memcpy(at, &h, sizeof(h));
    }
    return n;
}

/* ---- reading ---- */

static bool in_range(int64_t value, int64_t least, int64_t end)
{
    return value >= least && value < end;
}

/* Whether [first, first + n) lies in [0, size). */
static bool in_slice(int64_t first, int64_t n, int64_t size)
{
    return n >= 0 && (n == 0 || (first >= 0 && first <= size - n));
}

static bool valid_counts(const struct batch *b, const struct executor_info *x)
{
    bool memory = b->n_swap_out >= 0 && b->n_swap_in >= 0 && b->n_copy >= 0 &&
                  b->n_table_update >= 0 && b->n_table_block >= 0;
    bool side = b->n_token_bias >= 0 && b->n_mask_word >= 0 &&
                in_range(b->n_late_mask, 0, (int64_t)x->max_num_seqs + 1);
    int64_t others = executor_kv_groups(x) - 1;

    return memory && side && in_range(b->n_tokens, 0, (int64_t)x->max_num_batched_tokens + 1) &&
           b->n_group_slots == others * b->n_tokens &&
           in_range(b->n_seqs, 0, (int64_t)x->max_num_seqs + 1) &&
           in_range(b->n_decode, 0, (int64_t)b->n_seqs + 1) &&
           in_range(b->n_logits, 0, (int64_t)x->max_samples + 1) &&
           in_range(b->n_samples, 0, (int64_t)x->max_samples + 1);
}

static bool valid_copies(const struct block_copy *c, int32_t n, int32_t n_src, int32_t n_dst)
{
    for (int32_t i = 0; i < n; i++) {
        if (!in_range(c[i].src, 0, n_src) || !in_range(c[i].dst, 0, n_dst)) {
            return false;
        }
    }
    return true;
}

static bool valid_tables(const struct batch *b, const struct executor_info *x)
{
    int64_t width = div_ceil(x->max_len, x->block_size);

    for (int32_t i = 0; i < b->n_table_update; i++) {
        const struct table_update *u = &b->table_update[i];
        if (!in_range(u->group, 0, executor_kv_groups(x)) ||
            !in_range(u->row, 0, x->max_num_seqs) || u->index < 0 ||
            !in_slice(u->index, u->count, width) ||
            !in_slice(u->first, u->count, b->n_table_block)) {
            return false;
        }
    }
    for (int32_t i = 0; i < b->n_table_block; i++) {
        if (!in_range(b->table_block[i], 0, x->n_blocks)) {
            return false;
        }
    }
    return true;
}

static bool valid_tokens(const struct batch *b, const struct executor_info *x)
{
    int64_t slots = (int64_t)x->n_blocks * x->block_size;

    for (int32_t i = 0; i < b->n_tokens; i++) {
        bool later = b->token_src && b->token_src[i] >= 0;
        if (later ? b->token_src[i] >= x->max_samples : !in_range(b->token[i], 0, x->vocab)) {
            return false;
        }
        if (!in_range(b->position[i], 0, x->max_len) || !in_range(b->slot[i], -1, slots)) {
            return false;
        }
    }
    for (int32_t i = 0; i < b->n_group_slots; i++) {
        if (!in_range(b->group_slot[i], -1, slots)) {
            return false;
        }
    }
    return true;
}

static bool valid_seqs(const struct batch *b, const struct executor_info *x)
{
    if (b->n_seqs == 0) {
        return b->n_tokens == 0;
    }
    if (b->q_start[0] != 0 || b->q_start[b->n_seqs] != b->n_tokens) {
        return false;
    }
    for (int32_t i = 0; i < b->n_seqs; i++) {
        int64_t n = (int64_t)b->q_start[i + 1] - b->q_start[i];
        if (n < 0 || b->q_start[i + 1] > b->n_tokens ||
            !in_range(b->kv_len[i], n, (int64_t)x->max_len + 1) ||
            !in_range(b->row[i], 0, x->max_num_seqs) || b->lcp_blocks[i] < 0) {
            return false;
        }
    }
    return true;
}

static bool valid_sample(const struct sample_row *s, const struct batch *b,
                         const struct executor_info *x)
{
    return in_range(s->logits_row, 0, b->n_logits) &&
           in_range(s->kind, SAMPLE_TOKEN, SAMPLE_SCORE + 1) &&
           in_range(s->n_logprobs, -1, LIMIT_LOGPROBS + 1) &&
           in_range(s->n_candidates, 0, LIMIT_CANDIDATES + 1) &&
           (s->kind != SAMPLE_SCORE || in_range(s->target, 0, x->vocab)) &&
           in_range(s->row, 0, x->max_num_seqs) &&
           in_range(s->position, 0, (int64_t)x->max_len + 1) &&
           in_range(s->n_prompt, 0, (int64_t)x->max_len + 1) &&
           in_slice(s->bias_first, s->n_bias, b->n_token_bias) &&
           in_range(s->late_mask, 0, (int64_t)b->n_late_mask + 1) &&
           (s->mask_first == -1 || in_slice(s->mask_first, mask_words(x->vocab), b->n_mask_word));
}

static bool valid_samples(const struct batch *b, const struct executor_info *x)
{
    for (int32_t i = 0; i < b->n_logits; i++) {
        if (!in_range(b->logits_token[i], i > 0 ? (int64_t)b->logits_token[i - 1] + 1 : 0,
                      b->n_tokens)) {
            return false;
        }
    }
    for (int32_t i = 0; i < b->n_samples; i++) {
        if (!valid_sample(&b->sample[i], b, x) ||
            (i > 0 && b->sample[i].logits_row < b->sample[i - 1].logits_row)) {
            return false;
        }
    }
    return true;
}

static bool valid_biases(const struct batch *b, const struct executor_info *x)
{
    bool right = true;

    for (int32_t i = 0; i < b->n_token_bias; i++) {
        right = right && in_range(b->token_bias[i].token, 0, x->vocab);
    }
    return right;
}

/* Arrays that may be missing though their count is positive: token_src when no token
 * refers to an earlier step's sample, q_start in a step that only copies. */
static bool may_be_absent(const struct batch *b, const void *array)
{
    return array == &b->token_src || (array == &b->q_start && b->n_seqs == 0);
}

/* Points b's arrays into the message. NULL, or what is wrong with it. */
static const char *point_arrays(struct batch *b, const void *at, size_t n_bytes, uint32_t present)
{
    size_t n = padded(sizeof(struct head));
    uint32_t bit = 1;

#define X(array_, count)                                          \
    if (present & bit) {                                          \
        size_t size = (size_t)(b->count) * sizeof(*b->array_);    \
        if (n > n_bytes || size > n_bytes - n)                    \
            return "is truncated";                                \
        b->array_ = (const void *)((const char *)at + n);         \
        n += padded(size);                                        \
    } else if ((b->count) > 0 && !may_be_absent(b, &b->array_)) { \
        return "lacks " #array_;                                  \
    }                                                             \
    bit <<= 1;
    BATCH_ARRAYS(X)
#undef X
    return n == n_bytes ? NULL : "has bytes left over";
}

static const char *find_fault(const struct batch *b, const struct executor_info *x)
{
    if (!valid_copies(b->swap_out, b->n_swap_out, x->n_blocks, x->n_host_blocks) ||
        !valid_copies(b->swap_in, b->n_swap_in, x->n_host_blocks, x->n_blocks) ||
        !valid_copies(b->copy, b->n_copy, x->n_blocks, x->n_blocks)) {
        return "copies a block that does not exist";
    }
    if (!valid_tables(b, x)) {
        return "has a table update out of range";
    }
    if (!valid_tokens(b, x)) {
        return "has a token, position or slot out of range";
    }
    if (!valid_seqs(b, x)) {
        return "has sequences that do not fit its tokens";
    }
    if (!valid_samples(b, x) || !valid_biases(b, x)) {
        return "has a sampling row out of range";
    }
    return NULL;
}

int batch_wire_read(struct batch *ret, const void *at, size_t n_bytes,
                    const struct executor_info *x, struct err *e)
{
    struct head h;
    struct batch b = {0};

    if (n_bytes < padded(sizeof(h))) {
        return err_set(e, ERR_INVALID, "a step's message of %zu bytes is too short", n_bytes);
    }
    memcpy(&h, at, sizeof(h));
#define X(number) b.number = h.number;
    HEAD_NUMBERS(X)
#undef X
    const char *wrong = h.magic != WIRE_MAGIC || !valid_counts(&b, x) ? "is not a batch" : NULL;
    if (!wrong) {
        wrong = point_arrays(&b, at, n_bytes, h.present);
    }
    if (!wrong) {
        wrong = find_fault(&b, x);
    }
    if (wrong) {
        return err_set(e, ERR_INVALID, "the message of step %llu %s", (unsigned long long)b.step,
                       wrong);
    }
    *ret = b;
    return 0;
}
