#include "tests/sim/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"
#include "engine/sched/kv/kv_window.h"
#include "engine/workers/batch_copy.h"
#include "tests/sim/toy.h"

enum { ANSWERS = 4 }; /* results kept: of steps in flight, and the one being read */

struct answer {
    uint64_t step;
    int32_t n_samples;
    int32_t *token; /* [max_samples] */
    float *logprob; /* [max_samples] */
    int32_t *top;   /* [max_samples, stride] */
    float *top_logprob;
};

/* In place of a key and a value: the token, and the context it was computed on. A block
 * of states has one in its first cell, of the last token that the states have read. */
struct cell {
    int32_t token;    /* -1: never written */
    uint64_t context; /* hash of all tokens up to this one */
    uint64_t launch;  /* number of the launch that wrote it */
};

/* The tokens sampled in a step, in all its micro-batches. */
struct sampled {
    uint64_t step;
    int32_t n, *token; /* [max_samples] */
};

struct oracle {
    struct executor base;
    int32_t stride, table_width;
    struct cell *device, *host;   /* [blocks * block_size] */
    const struct oracle *head_of; /* as in struct oracle_config */
    int32_t *table;               /* [n_kv_groups, max_num_seqs, table_width] */
    struct answer answer[ANSWERS];
    struct sampled sampled[2]; /* of the current step and the one before */
    int32_t microbatch;        /* micro-batch launched last */
    uint64_t step, launched, executed, waited, fail_at;
    /* Launches not executed yet, because they or one before wait for masks; that of
     * number i in pending[i % ANSWERS]. */
    struct batch_copy pending[ANSWERS];
    struct err failed; /* why one of them could not be executed */
    /* The late masks of the step that waits for them, or of one still to be
     * launched. */
    uint64_t mask_step;
    int32_t n_masks;
    uint32_t *mask; /* [max_num_seqs * words] */
};

#define REFUSE(...) return err_set(e, ERR_DEVICE, __VA_ARGS__)

/* ---- memory operations ---- */

static int copy_blocks(const struct block_copy *c, int32_t n, const struct cell *from,
                       int32_t n_from, struct cell *to, int32_t n_to, int32_t size,
                       const char *what, struct err *e)
{
    for (int32_t i = 0; i < n; i++) {
        if (c[i].src < 0 || c[i].src >= n_from || c[i].dst < 0 || c[i].dst >= n_to) {
            REFUSE("%s names a block outside its pool", what);
        }
        for (int32_t k = 0; k < n; k++) {
            if (k != i && (c[k].dst == c[i].dst || (from == to && c[k].dst == c[i].src))) {
                REFUSE("%s: a destination is used twice, or is a source", what);
            }
        }
        memcpy(to + (int64_t)c[i].dst * size, from + (int64_t)c[i].src * size,
               (size_t)size * sizeof(*to));
    }
    return 0;
}

static int move_blocks(struct oracle *o, const struct batch *b, struct err *e)
{
    const struct executor_info *x = &o->base.info;
    int rc = copy_blocks(b->swap_out, b->n_swap_out, o->device, x->n_blocks, o->host,
                         x->n_host_blocks, x->block_size, "swap_out", e);

    if (rc == 0) {
        rc = copy_blocks(b->swap_in, b->n_swap_in, o->host, x->n_host_blocks, o->device,
                         x->n_blocks, x->block_size, "swap_in", e);
    }
    return rc < 0 ? rc
                  : copy_blocks(b->copy, b->n_copy, o->device, x->n_blocks, o->device, x->n_blocks,
                                x->block_size, "copy", e);
}

static int32_t *table_of(const struct oracle *o, int32_t group, int32_t row)
{
    return o->table + ((int64_t)group * o->base.info.max_num_seqs + row) * o->table_width;
}

static int update_tables(struct oracle *o, const struct batch *b, struct err *e)
{
    for (int32_t i = 0; i < b->n_table_update; i++) {
        const struct table_update *u = &b->table_update[i];
        if (u->group < 0 || u->group >= o->base.info.n_kv_groups || u->row < 0 ||
            u->row >= o->base.info.max_num_seqs || u->index < 0 || u->count < 1 ||
            u->index + u->count > o->table_width || u->first < 0 ||
            u->first + u->count > b->n_table_block) {
            REFUSE("a table update lies outside the tables");
        }
        for (int32_t k = 0; k < u->count; k++) {
            if (b->table_block[u->first + k] < -1) {
                REFUSE("a table update names block %d", b->table_block[u->first + k]);
            }
        }
        memcpy(table_of(o, u->group, u->row) + u->index, b->table_block + u->first,
               (size_t)u->count * sizeof(*o->table));
    }
    return 0;
}

/* ---- tokens ---- */

/* The token of a sampling row of the step launched before; -1 where there is no such
 * row. */
static int32_t sampled_before(const struct oracle *o, const struct batch *b, int32_t row)
{
    const struct sampled *d = &o->sampled[(b->step - 1) % 2];

    return d->step == b->step - 1 && row < d->n ? d->token[row] : -1;
}

/* The cell of a position by a group's block table; NULL: none. */
static const struct cell *cell_in(const struct oracle *o, int32_t group, int32_t row,
                                  int32_t position)
{
    int32_t size = o->base.info.block_size;
    int32_t block = table_of(o, group, row)[position / size];

    return block < 0 || block >= o->base.info.n_blocks ? NULL
                                                       : &o->device[block * size + position % size];
}

static const struct cell *cell_at(const struct oracle *o, int32_t row, int32_t position)
{
    return cell_in(o, 0, row, position);
}

/* The first position that a token at `position` sees in a group. */
static int32_t first_seen(const struct oracle *o, int32_t group, int32_t position)
{
    int32_t window = o->base.info.kv_window[group];

    if (window > 0 && o->base.info.kv_chunked) {
        return position - position % window;
    }
    return window > 0 ? MAX(position + 1 - window, 0) : 0;
}

static bool holds_states(const struct oracle *o, int32_t group)
{
    return o->base.info.kv_window[group] == KV_WINDOW_STATE;
}

/* What a token at `position` sees before itself in the further groups is what group 0
 * has. `own`: the sequence's first position in this step. */
static int check_groups(const struct oracle *o, int32_t row, int32_t position, int32_t own,
                        struct err *e)
{
    for (int32_t k = 1; k < o->base.info.n_kv_groups; k++) {
        if (holds_states(o, k)) {
            continue;
        }
        for (int32_t p = first_seen(o, k, position); p < position; p++) {
            const struct cell *cell = cell_in(o, k, row, p), *same = cell_at(o, row, p);
            if (!cell || !same || cell->token != same->token || cell->context != same->context) {
                REFUSE("KV group %d holds another text at position %d, which %d sees", k, p,
                       position);
            }
            if (p < own && cell->launch == o->executed) {
                REFUSE("position %d is computed on what another sequence writes in the same step",
                       position);
            }
        }
    }
    return 0;
}

/* The slots of token t in every group are where the tables put its position; writes
 * the cell there. In groups of states that is so for a sequence's first token in the
 * step: the states behind a draft go elsewhere. */
static int write_cell(struct oracle *o, const struct batch *b, int32_t row, int32_t t,
                      bool is_first, const struct cell *cell, struct err *e)
{
    const struct executor_info *x = &o->base.info;
    int32_t position = b->position[t], others = x->n_kv_groups - 1;

    for (int32_t k = 0; k < x->n_kv_groups; k++) {
        int32_t slot = k == 0 ? b->slot[t] : b->group_slot[t * others + k - 1];
        int32_t block = table_of(o, k, row)[position / x->block_size];
        bool free = holds_states(o, k) && !is_first;
        if (slot < 0 || slot >= x->n_blocks * x->block_size ||
            (!free && slot != block * x->block_size + position % x->block_size)) {
            REFUSE("slot %d is not where the table of KV group %d puts position %d", slot, k,
                   position);
        }
        if (!holds_states(o, k)) {
            o->device[slot] = *cell;
        }
    }
    return 0;
}

/* The cell of the states behind the token at `position`; NULL: its block is none. */
static const struct cell *state_at(const struct oracle *o, int32_t group, int32_t row,
                                   int32_t position)
{
    int32_t size = o->base.info.block_size;

    return cell_in(o, group, row, position / size * size);
}

/* The states that a sequence of the step goes on from have read what group 0 has before
 * `first`, its first position. */
static int check_states(const struct oracle *o, int32_t row, int32_t first, struct err *e)
{
    for (int32_t k = 1; k < o->base.info.n_kv_groups && first > 0; k++) {
        const struct cell *state = holds_states(o, k) ? state_at(o, k, row, first - 1) : NULL;
        const struct cell *last = cell_at(o, row, first - 1);
        if (!holds_states(o, k)) {
            continue;
        }
        if (!state || !last || state->token < 0 || state->context != last->context) {
            REFUSE("KV group %d: the states for position %d have read another text", k, first);
        }
        if (state->launch == o->executed) {
            REFUSE("KV group %d: the states for position %d are written in the same step", k,
                   first);
        }
    }
    return 0;
}

/* The states of a sequence of the step, whose cells are there: behind its last token,
 * and behind each whose block is not that of the next. */
static void write_states(struct oracle *o, const struct batch *b, int32_t seq)
{
    int32_t size = o->base.info.block_size, others = o->base.info.n_kv_groups - 1;

    for (int32_t k = 1; k <= others; k++) {
        for (int32_t t = b->q_start[seq]; t < b->q_start[seq + 1] && holds_states(o, k); t++) {
            const int32_t *slot = b->group_slot + t * others + k - 1;
            if (t + 1 == b->q_start[seq + 1] || slot[0] / size != slot[others] / size) {
                o->device[slot[0] / size * size] = *cell_at(o, b->row[seq], b->position[t]);
            }
        }
    }
}

/* What the target of a head has at the slot of a position; NULL: nothing. */
static const struct cell *hidden_at(const struct oracle *o, int32_t row, int32_t position)
{
    int32_t size = o->base.info.block_size, block = table_of(o, 0, row)[position / size];
    const struct cell *cell =
        block < 0 ? NULL : &o->head_of->device[block * size + position % size];

    return cell && cell->token >= 0 ? cell : NULL;
}

/* The context that a head's entry at `position` has but for its own token: what the
 * target has read up to there, or, if the token was drafted, what the entry before has.
 * Entries before it are of that text, but for the last ones of blocks: sequences that
 * share a block need not go on with the same token. */
static int head_context(const struct oracle *o, int32_t row, int32_t position, bool drafted,
                        uint64_t *ret, struct err *e)
{
    const struct cell *hidden =
        drafted ? cell_at(o, row, position - 1) : hidden_at(o, row, position);

    if (!hidden) {
        REFUSE("there is no hidden state for position %d", position);
    }
    for (int32_t p = 0; p < position && !drafted; p++) {
        const struct cell *entry = cell_at(o, row, p), *next = hidden_at(o, row, p + 1);
        bool last = (p + 1) % o->base.info.block_size == 0;
        if (!entry || !next || (!last && entry->context != next->context)) {
            REFUSE("the head's entry at position %d is of another text", p);
        }
    }
    *ret = hidden->context;
    return 0;
}

static int write_token(struct oracle *o, const struct batch *b, int32_t seq, int32_t t,
                       struct err *e)
{
    const struct executor_info *x = &o->base.info;
    int32_t position = b->position[t];
    int32_t token = b->token_src[t] >= 0 ? sampled_before(o, b, b->token_src[t]) : b->token[t];

    if (token < 0 && b->token_src[t] >= 0) {
        token = 0; /* none was sampled: the engine discards what follows */
    }
    if (token < 0 || token >= x->vocab) {
        REFUSE("token %d is outside the vocabulary", token);
    }
    if (position != b->kv_len[seq] - (b->q_start[seq + 1] - t)) {
        REFUSE("position %d does not follow from the cache's length", position);
    }
    uint64_t context = toy_start();
    if (position > 0) {
        const struct cell *before = cell_at(o, b->row[seq], position - 1);
        if (!before || before->token < 0) {
            REFUSE("position %d is computed on one that was never written", position);
        }
        if (before->launch == o->executed && t == b->q_start[seq]) {
            REFUSE("position %d is computed on what another sequence writes in the same step",
                   position);
        }
        context = before->context;
    }
    if (o->head_of &&
        head_context(o, b->row[seq], position, b->token_src[t] != -1, &context, e) < 0) {
        return ERR_DEVICE;
    }
    struct cell cell = {.token = token, .context = toy_read(context, token), .launch = o->executed};
    if (write_cell(o, b, b->row[seq], t, t == b->q_start[seq], &cell, e) < 0) {
        return ERR_DEVICE;
    }
    return check_groups(o, b->row[seq], position, b->position[b->q_start[seq]], e);
}

static int write_seq(struct oracle *o, const struct batch *b, int32_t seq, struct err *e)
{
    int32_t n = b->q_start[seq + 1] - b->q_start[seq];

    if (n < 1 || (n > 1) != (seq >= b->n_decode) || b->kv_len[seq] < n ||
        b->kv_len[seq] > o->base.info.max_len) {
        REFUSE("sequence %d of the step has %d tokens", seq, n);
    }
    if (b->row[seq] < 0 || b->row[seq] >= o->base.info.max_num_seqs) {
        REFUSE("row %d does not exist", b->row[seq]);
    }
    if (check_states(o, b->row[seq], b->kv_len[seq] - n, e) < 0) {
        return ERR_DEVICE;
    }
    for (int32_t t = b->q_start[seq]; t < b->q_start[seq + 1]; t++) {
        if (write_token(o, b, seq, t, e) < 0) {
            return ERR_DEVICE;
        }
    }
    write_states(o, b, seq);
    return 0;
}

static int check_shape(const struct oracle *o, const struct batch *b, struct err *e)
{
    const struct executor_info *x = &o->base.info;

    if (b->microbatch == 0 ? b->step != o->step + 1
                           : b->step != o->step || b->microbatch != o->microbatch + 1) {
        REFUSE("part %d of step %llu follows part %d of step %llu", b->microbatch,
               (unsigned long long)b->step, o->microbatch, (unsigned long long)o->step);
    }
    if (b->first_sample != (b->microbatch == 0 ? 0 : o->sampled[b->step % 2].n)) {
        REFUSE("the first sampling row is number %d of the step", b->first_sample);
    }
    if (b->n_tokens < 1 || b->n_tokens > x->max_num_batched_tokens || b->n_seqs < 1 ||
        b->n_seqs > x->max_num_seqs || b->first_sample + b->n_samples > x->max_samples ||
        b->n_logits > x->max_samples) {
        REFUSE("the step is larger than the executor");
    }
    if (b->n_group_slots != (x->n_kv_groups - 1) * b->n_tokens) {
        REFUSE("the step has %d slots of further KV groups", b->n_group_slots);
    }
    if (b->q_start[0] != 0 || b->q_start[b->n_seqs] != b->n_tokens) {
        REFUSE("the sequences do not cover the tokens");
    }
    for (int32_t i = 0; i < b->n_seqs; i++) {
        for (int32_t k = 0; k < i; k++) {
            if (b->row[i] == b->row[k]) {
                REFUSE("two sequences share row %d", b->row[i]);
            }
        }
    }
    return 0;
}

static int check_lcp(const struct oracle *o, const struct batch *b, struct err *e)
{
    for (int32_t i = 0; i < b->n_seqs; i++) {
        if (i == 0 && b->lcp_blocks[0] != 0) {
            REFUSE("the first sequence shares blocks with none before it");
        }
        for (int32_t g = 0; g < o->base.info.n_kv_groups && i > 0; g++) {
            size_t n = (size_t)b->lcp_blocks[i] * sizeof(*o->table);
            if (o->base.info.kv_window[g] == 0 &&
                memcmp(table_of(o, g, b->row[i]), table_of(o, g, b->row[i - 1]), n) != 0) {
                REFUSE("lcp_blocks counts a block that is not shared");
            }
        }
    }
    return 0;
}

/* ---- sampling ---- */

/* The context of logits row `l`, read back through the block table; 0 and a message for
 * a hole in it. */
static int read_context(const struct oracle *o, const struct batch *b, int32_t l, uint64_t *ret,
                        struct err *e)
{
    int32_t t = b->logits_token[l], seq = 0;

    if (t < 0 || t >= b->n_tokens || (l > 0 && t <= b->logits_token[l - 1])) {
        REFUSE("logits rows are not ascending tokens");
    }
    while (b->q_start[seq + 1] <= t) {
        seq++;
    }
    uint64_t h = toy_start();
    for (int32_t p = 0; p <= b->position[t]; p++) {
        const struct cell *cell = cell_at(o, b->row[seq], p);
        if (!cell) {
            REFUSE("the table has no block for position %d", p);
        }
        if (cell->token < 0) {
            REFUSE("position %d was never written", p);
        }
        h = o->head_of ? cell->context : toy_read(h, cell->token);
        if (cell->context != h) {
            REFUSE("position %d was computed on another context", p);
        }
    }
    *ret = h;
    return 0;
}

static bool right_row(const struct oracle *o, const struct batch *b, const struct sample_row *r)
{
    int32_t words = mask_words(o->base.info.vocab);
    bool mask =
        r->mask_first == -1 || (r->mask_first >= 0 && r->mask_first <= b->n_mask_word - words);

    return mask && r->late_mask >= 0 && r->late_mask <= b->n_late_mask && r->row >= 0 &&
           r->row < o->base.info.max_num_seqs && r->position >= 0 &&
           r->position <= o->base.info.max_len && r->bias_first >= 0 &&
           r->n_bias <= b->n_token_bias - r->bias_first;
}

/* Process logits: penalties by the tokens found through the row's block table, bias and
 * mask by the batch. */
static int process(const struct oracle *o, const struct batch *b, const struct sample_row *r,
                   const float *raw, float *logit, struct err *e)
{
    int32_t vocab = o->base.info.vocab, n_output[TOY_MAX_VOCAB] = {0};
    bool in_prompt[TOY_MAX_VOCAB] = {0}, biased[TOY_MAX_VOCAB] = {0};

    if (!right_row(o, b, r)) {
        REFUSE("a sampling row is out of range");
    }
    bool penalised = !o->head_of || sample_penalised(r);
    for (int32_t p = 0; p < r->position && penalised; p++) {
        const struct cell *cell = cell_at(o, r->row, p);
        if (!cell || cell->token < 0 || cell->token >= vocab) {
            REFUSE("the penalties find no token at position %d", p);
        }
        n_output[cell->token] += p >= r->n_prompt;
        in_prompt[cell->token] = in_prompt[cell->token] || p < r->n_prompt;
    }
    for (int32_t t = 0; t < vocab; t++) {
        logit[t] = toy_penalise(raw[t], n_output[t], in_prompt[t], r->presence_penalty,
                                r->frequency_penalty, r->repetition_penalty);
    }
    for (int32_t i = r->bias_first; i < r->bias_first + r->n_bias; i++) {
        const struct token_bias *k = &b->token_bias[i];
        if (k->token < 0 || k->token >= vocab || biased[k->token]) {
            REFUSE("a bias is out of range, or one of two for the same id");
        }
        biased[k->token] = true;
        logit[k->token] += k->bias;
    }
    for (int32_t t = 0; t < vocab && r->mask_first >= 0; t++) {
        if (!(b->mask_word[r->mask_first + t / 32] >> t % 32 & 1)) {
            logit[t] = -INFINITY;
        }
    }
    const uint32_t *late = o->mask + (int64_t)(r->late_mask - 1) * mask_words(vocab);
    for (int32_t t = 0; t < vocab && r->late_mask > 0; t++) {
        if (!(late[t / 32] >> t % 32 & 1)) {
            logit[t] = -INFINITY;
        }
    }
    return 0;
}

static int sample_one(const struct oracle *o, const struct batch *b, const struct sample_row *r,
                      const float *raw, struct answer *a, int32_t i, struct err *e)
{
    int32_t vocab = o->base.info.vocab;
    int32_t *top = a->top + (int64_t)i * o->stride;
    float *top_logprob = a->top_logprob + (int64_t)i * o->stride, logit[TOY_MAX_VOCAB];

    if (process(o, b, r, raw, logit, e) < 0) {
        return ERR_DEVICE;
    }
    if (r->n_logprobs > 0) {
        toy_top(raw, vocab, r->n_logprobs, top, top_logprob);
    }
    if (r->kind == SAMPLE_SCORE) {
        a->token[i] = r->target;
    } else if (r->kind == SAMPLE_CANDIDATES) {
        int32_t found = toy_top(logit, vocab, r->n_candidates, top, top_logprob);
        for (; found < r->n_candidates; found++) {
            top[found] = -1;
        }
        a->token[i] = top[0] >= 0 ? top[0] : TOKEN_NONE_ALLOWED;
    } else {
        struct toy_sampling s = {r->temperature, r->top_p, r->min_p,
                                 r->top_k,       r->seed,  r->position};
        a->token[i] = toy_sample(logit, vocab, &s);
        if (a->token[i] < 0) {
            a->token[i] = TOKEN_NONE_ALLOWED;
        }
    }
    a->logprob[i] = a->token[i] >= 0 ? raw[a->token[i]] : 0;
    if (o->fail_at > 0 && b->step >= o->fail_at) {
        a->token[i] = TOKEN_NO_NUMBER;
    }
    return 0;
}

static int sample(struct oracle *o, const struct batch *b, struct answer *a, struct err *e)
{
    float raw[TOY_MAX_VOCAB];
    int32_t l = -1;

    for (int32_t i = 0; i < b->n_samples; i++) {
        const struct sample_row *r = &b->sample[i];
        if (r->logits_row < l || r->logits_row > l + 1 || r->logits_row >= b->n_logits) {
            REFUSE("sampling rows do not ascend over the logits rows");
        }
        if (r->logits_row > l) {
            uint64_t h = 0;
            l = r->logits_row;
            if (read_context(o, b, l, &h, e) < 0) {
                return ERR_DEVICE;
            }
            toy_logprobs(h, o->base.info.vocab, raw);
        }
        if (sample_one(o, b, r, raw, a, i, e) < 0) {
            return ERR_DEVICE;
        }
    }
    if (l != b->n_logits - 1) {
        REFUSE("a logits row is read by no sampling row");
    }
    return 0;
}

static void keep_sampled(struct oracle *o, const struct batch *b, const struct answer *a)
{
    struct sampled *d = &o->sampled[b->step % 2];

    d->step = b->step;
    d->n = b->first_sample + b->n_samples;
    memcpy(d->token + b->first_sample, a->token, (size_t)b->n_samples * sizeof(*d->token));
}

/* ---- the executor ---- */

static int execute(struct oracle *o, const struct batch *b, struct err *e)
{
    struct answer *a = &o->answer[(o->executed + 1) % ANSWERS];

    if (check_shape(o, b, e) < 0 || move_blocks(o, b, e) < 0 || update_tables(o, b, e) < 0 ||
        check_lcp(o, b, e) < 0) {
        return ERR_DEVICE;
    }
    for (int32_t i = 0; i < b->n_seqs; i++) {
        if (write_seq(o, b, i, e) < 0) {
            return ERR_DEVICE;
        }
    }
    if (sample(o, b, a, e) < 0) {
        return ERR_DEVICE;
    }
    a->step = b->step;
    a->n_samples = b->n_samples;
    keep_sampled(o, b, a);
    o->step = b->step;
    o->microbatch = b->microbatch;
    o->executed++;
    return 0;
}

/* Execute launches, in order, up to one whose masks are not there. */
static int execute_ready(struct oracle *o, struct err *e)
{
    while (o->executed < o->launched) {
        const struct batch *b = &o->pending[o->executed % ANSWERS].batch;
        if (b->n_late_mask > 0 && o->mask_step != b->step) {
            return 0;
        }
        if (b->n_late_mask > 0 && o->n_masks != b->n_late_mask) {
            REFUSE("step %llu has %d late masks, and %d came", (unsigned long long)b->step,
                   b->n_late_mask, o->n_masks);
        }
        if (execute(o, b, e) < 0) {
            return ERR_DEVICE;
        }
    }
    return 0;
}

static int oracle_launch(struct executor *x, const struct batch *b, struct err *e)
{
    struct oracle *o = (struct oracle *)x;

    if (o->launched - o->waited > (uint64_t)x->info.depth) {
        REFUSE("more steps in flight than the executor's depth allows");
    }
    if (batch_copy_set(&o->pending[o->launched % ANSWERS], b, e) < 0) {
        return ERR_NOMEM;
    }
    o->launched++;
    return execute_ready(o, e);
}

static int oracle_masks(struct executor *x, uint64_t step, const struct late_mask *mask, int32_t n,
                        struct err *e)
{
    struct oracle *o = (struct oracle *)x;
    size_t words = (size_t)mask_words(x->info.vocab);

    if (!mask || n < 1 || n > x->info.max_num_seqs || step <= o->step || step == o->mask_step) {
        REFUSE("masks that no step waits for");
    }
    for (int32_t i = 0; i < n; i++) {
        uint32_t *to = o->mask + (size_t)i * words;
        memset(to, -1, words * sizeof(*to));
        if (mask[i].word) {
            memcpy(to, mask[i].word, words * sizeof(*to));
        }
    }
    o->mask_step = step;
    o->n_masks = n;
    if (execute_ready(o, &o->failed) < 0) {
        o->failed.code = ERR_DEVICE;
    }
    return 0;
}

static int oracle_wait(struct executor *x, struct results *ret, struct err *e)
{
    struct oracle *o = (struct oracle *)x;

    if (o->waited == o->launched) {
        REFUSE("nothing is in flight");
    }
    if (o->failed.code < 0) {
        *e = o->failed;
        return ERR_DEVICE;
    }
    if (o->waited == o->executed) {
        REFUSE("a step is waited for that has no masks yet");
    }
    const struct answer *a = &o->answer[++o->waited % ANSWERS];
    *ret = (struct results){.step = a->step,
                            .n_samples = a->n_samples,
                            .top_stride = o->stride,
                            .token = a->token,
                            .logprob = a->logprob,
                            .top_token = a->top,
                            .top_logprob = a->top_logprob};
    return 0;
}

static void oracle_free(struct executor *x)
{
    struct oracle *o = (struct oracle *)x;

    for (int i = 0; i < ANSWERS; i++) {
        free(o->answer[i].token);
        free(o->answer[i].logprob);
        free(o->answer[i].top);
        free(o->answer[i].top_logprob);
        batch_copy_release(&o->pending[i]);
    }
    free(o->mask);
    for (int i = 0; i < 2; i++) {
        free(o->sampled[i].token);
    }
    free(o->device);
    free(o->host);
    free(o->table);
    free(o);
}

static void *filled(int64_t n, size_t size)
{
    void *a = malloc((size_t)MAX(n, 1) * size);

    if (a) {
        memset(a, -1, (size_t)MAX(n, 1) * size);
    }
    return a;
}

static bool allocate(struct oracle *o, const struct oracle_config *c)
{
    size_t samples = (size_t)c->max_samples, tops = samples * (size_t)o->stride;

    o->device = filled((int64_t)c->n_blocks * c->block_size, sizeof(*o->device));
    o->host = filled((int64_t)c->n_host_blocks * c->block_size, sizeof(*o->host));
    o->table = filled((int64_t)o->base.info.n_kv_groups * c->max_num_seqs * o->table_width,
                      sizeof(*o->table));
    o->mask = filled((int64_t)c->max_num_seqs * mask_words(c->vocab), sizeof(*o->mask));
    bool there = o->device && o->host && o->table && o->mask;
    for (int i = 0; i < ANSWERS; i++) {
        struct answer *a = &o->answer[i];
        a->token = malloc(samples * sizeof(*a->token));
        a->logprob = malloc(samples * sizeof(*a->logprob));
        a->top = malloc(tops * sizeof(*a->top));
        a->top_logprob = malloc(tops * sizeof(*a->top_logprob));
        there = there && a->token && a->logprob && a->top && a->top_logprob;
    }
    for (int i = 0; i < 2; i++) {
        o->sampled[i].token = malloc(samples * sizeof(*o->sampled[i].token));
        there = there && o->sampled[i].token;
    }
    return there;
}

int oracle_open(struct executor **ret, const struct oracle_config *c, struct err *e)
{
    struct oracle *o = calloc(1, sizeof(*o));

    if (!o) {
        return err_nomem(e, "the oracle");
    }
    o->base = (struct executor){
        .launch = oracle_launch, .wait = oracle_wait, .masks = oracle_masks, .free = oracle_free};
    o->base.info = (struct executor_info){.vocab = c->vocab,
                                          .max_len = c->max_len,
                                          .n_blocks = c->n_blocks,
                                          .n_host_blocks = c->n_host_blocks,
                                          .block_size = c->block_size,
                                          .n_kv_groups = MAX(c->n_kv_groups, 1),
                                          .block_bytes = c->block_size * 4,
                                          .max_num_seqs = c->max_num_seqs,
                                          .max_num_batched_tokens = c->max_num_batched_tokens,
                                          .max_samples = c->max_samples,
                                          .depth = c->depth,
                                          .device = "oracle",
                                          .dtype = "token"};
    memcpy(o->base.info.kv_window, c->kv_window, sizeof(c->kv_window));
    o->base.info.kv_chunked = c->kv_chunked;
    o->fail_at = c->fail_at;
    o->head_of = c->head_of ? CONTAINER_OF(c->head_of, struct oracle, base) : NULL;
    o->stride = MIN(c->vocab, TOY_MAX_VOCAB);
    o->table_width = (int32_t)div_ceil(c->max_len, c->block_size);
    if (!allocate(o, c)) {
        oracle_free(&o->base);
        return err_nomem(e, "the oracle");
    }
    *ret = &o->base;
    return 0;
}
