#include "engine/sched/decode/pack.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/sched/decode/beam.h"
#include "engine/sched/decode/pack_impl.h"

/* ---- block tables ---- */

static void send_run(struct packer *p, struct batch *b, const struct seq *q, int32_t k,
                     int32_t first, int32_t count)
{
    const int32_t *block = q->table[k].block;

    p->table_update[b->n_table_update++] = (struct table_update){
        .group = k, .row = q->slot, .index = first, .count = count, .first = b->n_table_block};
    memcpy(p->table_block + b->n_table_block, block + first, (size_t)count * sizeof(*block));
    b->n_table_block += count;
}

/* Send what changed in the sequence's block table of KV group k since its slot was last
 * updated, as at most PACK_RUNS runs. */
static void pack_table(struct packer *p, struct batch *b, struct seq *q, int32_t k)
{
    struct block_table *t = &q->table[k];
    int32_t runs = 0;

    if (t->n_synced == t->n_blocks) {
        return;
    }
    int32_t *shadow = p->shadow + ((int64_t)k * p->c.max_num_seqs + q->slot) * p->table_width;
    for (int32_t i = MAX(t->n_synced, t->first); i < t->n_blocks;) {
        if (shadow[i] == t->block[i]) {
            i++;
            continue;
        }
        int32_t end = ++runs == PACK_RUNS ? t->n_blocks : i + 1;
        while (end < t->n_blocks && shadow[end] != t->block[end]) {
            end++;
        }
        send_run(p, b, q, k, i, end - i);
        memcpy(shadow + i, t->block + i, (size_t)(end - i) * sizeof(*shadow));
        i = end;
    }
    t->n_synced = t->n_blocks;
}

/* Leading blocks of the sequence that the backend's tables hold, in every KV group
 * without a window. */
static int32_t synced_blocks(const struct packer *p, const struct seq *q)
{
    int32_t n = q->table[0].n_synced;

    for (int32_t k = 1; k < p->c.n_kv_groups; k++) {
        n = p->c.kv_window[k] == 0 ? MIN(n, q->table[k].n_synced) : n;
    }
    return n;
}

/* Leading blocks that two sequences share in every KV group without a window; the first
 * `n_known` are known to be such. */
static int32_t common_blocks(const struct packer *p, const struct seq *a, const struct seq *b,
                             int32_t n_known)
{
    int32_t n = MIN(a->table[0].n_blocks, b->table[0].n_blocks);

    for (int32_t k = 0; k < p->c.n_kv_groups; k++) {
        int32_t i = MIN(n_known, n);
        while (p->c.kv_window[k] == 0 && i < n && a->table[k].block[i] == b->table[k].block[i]) {
            i++;
        }
        n = p->c.kv_window[k] == 0 ? i : n;
    }
    return n;
}

/* Whether the step before had an item right behind `before`; NULL: as its first one. */
static bool was_behind(const struct packed_slot *slot, uint64_t step, const struct seq *before)
{
    return slot->step == step - 1 && slot->before == (before ? before->slot : -1);
}

/* The blocks that an item's sequence shares with the one before it. If the step before
 * had these two next to each other, all but what has changed is known: n_synced and
 * before_synced blocks of their tables have not. */
static int32_t pack_common(struct packer *p, uint64_t step, const struct seq *before,
                           const struct seq *q, int32_t n_synced)
{
    struct packed_slot *slot = &p->packed[q->slot];
    int32_t n_known =
        was_behind(slot, step, before) ? MIN(slot->n_common, MIN(n_synced, p->before_synced)) : 0;

    slot->before = before ? before->slot : -1;
    slot->n_common = before ? common_blocks(p, before, q, n_known) : 0;
    return slot->n_common;
}

/* ---- tokens ---- */

/* The block that the token at `position`, number i of the item's, goes to in KV group
 * k. */
static int32_t block_of(const struct packer *p, const struct plan_item *it, int32_t k, int32_t i,
                        int32_t position)
{
    const struct seq *q = it->seq;
    int32_t draft = i - (it->n - it->n_verify);

    return draft >= 0 && sched_is_state(&p->c, k)
               ? q->spare[sched_states_before(&p->c, k) * q->n_spare + draft]
               : q->table[k].block[position / p->c.block_size];
}

static void pack_tokens(struct packer *p, struct batch *b, const struct plan_item *it)
{
    const struct seq *q = it->seq;
    int32_t size = p->c.block_size;

    for (int32_t i = 0; i < it->n; i++) {
        int32_t t = b->n_tokens + i, position = it->first + i;
        bool placeholder = it->src_row >= 0 && i == it->n - 1;
        p->token[t] = placeholder ? 0 : seq_token(q, position);
        p->token_src[t] = placeholder ? it->src_row : -1;
        p->position[t] = position;
        p->slot[t] = q->table[0].block[position / size] * size + position % size;
        for (int32_t k = 1; k < p->c.n_kv_groups; k++) {
            p->group_slot[b->n_group_slots++] =
                block_of(p, it, k, i, position) * size + position % size;
        }
    }
}

/* ---- sampling rows ---- */

/* One entry an id: biases of the same id are added up. */
static void add_bias(struct packer *p, struct batch *b, int32_t token, float bias)
{
    if (token < 0 || token >= p->c.vocab) {
        return; /* an end token outside the vocabulary */
    }
    int32_t at = p->bias_at[token];
    if (at >= p->bias_first && at < b->n_token_bias && p->token_bias[at].token == token) {
        p->token_bias[at].bias += bias;
        return;
    }
    assert(b->n_token_bias < p->bias_cap);
    p->bias_at[token] = b->n_token_bias;
    p->token_bias[b->n_token_bias++] = (struct token_bias){.token = token, .bias = bias};
}

/* Ban the last token of every bad word if its other tokens were just generated. */
static void ban_words(struct packer *p, struct batch *b, const struct seq *q, int32_t n_generated)
{
    const struct word_list *words = &q->group->words;

    for (int32_t w = 0; w < words->n; w++) {
        const int32_t *word = words->token + words->first[w];
        int32_t before = words->first[w + 1] - words->first[w] - 1;
        if (before <= n_generated &&
            memcmp(q->out + n_generated - before, word, (size_t)before * sizeof(*word)) == 0) {
            add_bias(p, b, word[before], -INFINITY);
        }
    }
}

static void pack_bias(struct packer *p, struct batch *b, const struct seq *q, int32_t n_generated)
{
    const struct gen_params *params = &q->group->request->params;

    p->bias_first = b->n_token_bias;
    for (int32_t i = 0; i < params->n_bias; i++) {
        add_bias(p, b, params->bias[i].token, params->bias[i].bias);
    }
    if (n_generated < params->min_tokens) {
        for (int32_t i = 0; i < p->c.n_eos && !params->ignore_eos; i++) {
            add_bias(p, b, p->c.eos[i], -INFINITY);
        }
        for (int32_t i = 0; i < params->n_stop_token; i++) {
            add_bias(p, b, params->stop_token[i], -INFINITY);
        }
    }
    ban_words(p, b, q, n_generated);
    p->n_bias = b->n_token_bias - p->bias_first;
}

/* The group's mask of allowed ids, which the packer keeps while the group runs. */
static const uint32_t *mask_of(struct packer *p, const struct group *g)
{
    const struct gen_params *params = &g->request->params;
    uint32_t *mask = p->mask + (int64_t)g->mask * p->mask_words;

    if (p->mask_order[g->mask] == g->order + 1) {
        return mask;
    }
    memset(mask, 0, (size_t)p->mask_words * sizeof(*mask));
    for (int32_t i = 0; i < params->n_allowed; i++) {
        int32_t id = params->allowed_token[i];
        mask[id / 32] |= UINT32_C(1) << id % 32;
    }
    p->mask_order[g->mask] = g->order + 1;
    return mask;
}

static int32_t pack_mask(struct packer *p, struct batch *b, const struct group *g)
{
    int32_t first = b->n_mask_word;

    if (g->mask < 0) {
        return -1;
    }
    memcpy(p->mask_word + first, mask_of(p, g), (size_t)p->mask_words * sizeof(*p->mask_word));
    b->n_mask_word += p->mask_words;
    return first;
}

/* Adjacent rows of one group share mask and bias slice. Only what bad words and
 * min_tokens ban differs between them. */
static void pack_slices(struct packer *p, struct batch *b, const struct seq *q, int32_t n_generated)
{
    const struct group *g = q->group;
    bool is_short = n_generated < g->request->params.min_tokens;

    if (p->slice_group != g) {
        p->mask_first = pack_mask(p, b, g);
    }
    if (p->slice_group != g || p->slice_is_short != is_short || g->words.n > 0) {
        pack_bias(p, b, q, n_generated);
    }
    p->slice_group = g;
    p->slice_is_short = is_short;
}

/* Keeps what the sampling rows of a sequence have in common, which has just taken its
 * slot. */
static void keep_row(struct packer *p, const struct seq *q)
{
    const struct group *g = q->group;
    const struct gen_params *params = &g->request->params;
    struct packed_slot *slot = &p->packed[q->slot];
    struct sample_row *row = &p->kept_row[q->slot];

    seq_sample_row(row, q, 0, 0);
    row->kind = g->beam ? SAMPLE_CANDIDATES : SAMPLE_TOKEN;
    /* best_of ranks by them */
    row->n_logprobs = MAX(params->n_logprobs, params->best_of > params->n ? 0 : -1);
    row->n_candidates = g->beam ? g->beam->n_candidates : 0;
    slot->kept = ++p->n_kept;
    bool is_bare = params->n_bias == 0 && g->words.n == 0 && g->mask < 0;
    slot->bare_from =
        is_bare ? (int32_t)MIN((int64_t)g->n_prompt + params->min_tokens, INT32_MAX) : INT32_MAX;
}

/* Appends a sampling row, to be filled. */
static struct sample_row *next_row(struct packer *p, struct batch *b)
{
    p->sample_kept[b->n_samples] = 0;
    return &p->sample[b->n_samples++];
}

/* Appends the sampling row for the token at `position`, by the group's parameters, and
 * returns it. Mostly the step before has left the same one in its place. */
static struct sample_row *add_sample_row(struct packer *p, struct batch *b, const struct seq *q,
                                         int32_t position)
{
    const struct packed_slot *slot = &p->packed[q->slot];
    int32_t i = b->n_samples++;
    struct sample_row *row = &p->sample[i];

    if (p->sample_kept[i] != slot->kept) {
        *row = p->kept_row[q->slot];
        p->sample_kept[i] = slot->kept;
    }
    row->logits_row = b->n_logits;
    row->position = position;
    if (position < slot->bare_from) {
        p->sample_kept[i] = 0;
        pack_slices(p, b, q, position - q->group->n_prompt);
        row->bias_first = p->bias_first;
        row->n_bias = p->n_bias;
        row->mask_first = p->mask_first;
    }
    row->late_mask = q->constraint ? ++b->n_late_mask : 0;
    return row;
}

static void pack_scores(struct packer *p, struct batch *b, const struct plan_item *it)
{
    if (it->n_scores == 0) {
        return;
    }
    const struct gen_params *params = &it->seq->group->request->params;
    int32_t n_top = MAX(params->n_prompt_logprobs, params->echo ? params->n_logprobs : -1);

    for (int32_t i = 0; i < it->n_scores; i++) {
        int32_t position = it->first + it->score_offset + i + 1;
        p->logits_token[b->n_logits] = b->n_tokens + it->score_offset + i;
        *next_row(p, b) = (struct sample_row){.logits_row = b->n_logits,
                                              .kind = SAMPLE_SCORE,
                                              .top_p = 1,
                                              .repetition_penalty = 1,
                                              .n_logprobs = n_top,
                                              .target = seq_token(it->seq, position),
                                              .position = position,
                                              .row = it->seq->slot,
                                              .n_prompt = it->seq->group->n_prompt,
                                              .mask_first = -1};
        b->n_logits++;
    }
}

/* Rows that draw the tokens where an item has drafts, each behind the token before
 * it. */
static void pack_drafts(struct packer *p, struct batch *b, const struct plan_item *it)
{
    for (int32_t i = it->n - it->n_verify; i < it->n; i++) {
        p->logits_token[b->n_logits] = b->n_tokens + i - 1;
        add_sample_row(p, b, it->seq, it->first + i);
        b->n_logits++;
    }
}

static void pack_samples(struct packer *p, struct batch *b, const struct plan_item *it)
{
    if (it->n_sampled == 0) {
        return;
    }
    pack_drafts(p, b, it);
    struct sample_row *row = add_sample_row(p, b, it->seq, it->first + it->n);
    p->logits_token[b->n_logits] = b->n_tokens + it->n - 1;
    for (int32_t i = 1; i < it->n_sampled; i++) { /* they differ by their seeds alone */
        struct sample_row *sibling = next_row(p, b);
        *sibling = *row;
        sibling->seed = it->seq->group->seq[i].seed;
    }
    b->n_logits++;
}

static void pack_item(struct packer *p, struct batch *b, const struct plan_item *it,
                      const struct seq *before)
{
    struct packed_slot *slot = &p->packed[it->seq->slot];
    int32_t i = b->n_seqs, n_synced = synced_blocks(p, it->seq);

    if (n_synced == 0) {
        keep_row(p, it->seq);
    }
    for (int32_t k = 0; k < p->c.n_kv_groups; k++) {
        pack_table(p, b, it->seq, k);
    }
    pack_tokens(p, b, it);
    assert(b->n_samples == it->sample_first);
    pack_scores(p, b, it);
    pack_samples(p, b, it);
    p->q_start[i] = b->n_tokens;
    p->kv_len[i] = it->first + it->n;
    p->row[i] = it->seq->slot;
    p->lcp_blocks[i] = pack_common(p, b->step, before, it->seq, n_synced);
    b->n_tokens += it->n;
    b->n_seqs++;
    slot->kv_len = it->first + it->n;
    slot->token_slot = p->slot[b->n_tokens - 1];
    slot->step = b->step;
    p->before_synced = n_synced;
    p->before_unchanged = false;
}

/* Whether an item decodes a token, and nothing else, in one KV group. */
static bool is_plain(const struct packer *p, const struct plan_item *it)
{
    return p->c.n_kv_groups == 1 && it->n == 1 && it->n_sampled == 1 && it->n_scores == 0;
}

/* pack_item of a plain one. While its block table does not change, what was found in
 * the step before holds, and nothing of the table is read. */
static void pack_plain(struct packer *p, struct batch *b, const struct plan_item *it,
                       const struct seq *before)
{
    struct seq *q = it->seq;
    const struct block_table *t = &q->table[0];
    struct packed_slot *slot = &p->packed[q->slot];
    int32_t i = b->n_seqs, at = b->n_tokens, n_synced = t->n_synced;
    int32_t position = it->first, size = p->c.block_size, offset = position % size;
    bool unchanged = n_synced == t->n_blocks;

    if (!unchanged) {
        if (n_synced == 0) {
            keep_row(p, q);
        }
        pack_table(p, b, q, 0);
    }
    if (!unchanged || offset == 0 || slot->kv_len != position) {
        slot->token_slot = t->block[position / size] * size + offset;
    } else {
        slot->token_slot++;
    }
    slot->kv_len = position + 1;
    p->token[at] = it->src_row >= 0 ? 0 : seq_token(q, position);
    p->token_src[at] = it->src_row;
    p->position[at] = position;
    p->slot[at] = slot->token_slot;
    assert(b->n_samples == it->sample_first);
    p->logits_token[b->n_logits] = at;
    add_sample_row(p, b, q, position + 1);
    b->n_logits++;
    p->q_start[i] = at;
    p->kv_len[i] = position + 1;
    p->row[i] = q->slot;
    if (!unchanged || !p->before_unchanged || !was_behind(slot, b->step, before)) {
        pack_common(p, b->step, before, q, n_synced);
    }
    p->lcp_blocks[i] = slot->n_common;
    slot->step = b->step;
    p->before_synced = n_synced;
    p->before_unchanged = unchanged;
    b->n_tokens++;
    b->n_seqs++;
}

void pack_batch(struct packer *p, const struct plan *plan, struct batch *ret)
{
    struct batch b = {
        .step = plan->step,
        .swap_out = plan->swap_out,
        .n_swap_out = plan->n_swap_out,
        .swap_in = plan->swap_in,
        .n_swap_in = plan->n_swap_in,
        .copy = plan->copy,
        .n_copy = plan->n_copy,
        .table_update = p->table_update,
        .table_block = p->table_block,
        .token = p->token,
        .token_src = p->token_src,
        .position = p->position,
        .slot = p->slot,
        .group_slot = p->group_slot,
        .n_decode = plan->n_decode,
        .q_start = p->q_start,
        .kv_len = p->kv_len,
        .row = p->row,
        .lcp_blocks = p->lcp_blocks,
        .logits_token = p->logits_token,
        .sample = p->sample,
        .token_bias = p->token_bias,
        .mask_word = p->mask_word,
    };

    p->slice_group = NULL;
    p->before_synced = 0;
    p->before_unchanged = true; /* nothing stands in front of the first */
    for (int32_t i = 0; i < plan->n_items; i++) {
        const struct plan_item *it = &plan->item[i];
        const struct seq *before = i > 0 ? it[-1].seq : NULL;
        if (is_plain(p, it)) {
            pack_plain(p, &b, it, before);
        } else {
            pack_item(p, &b, it, before);
        }
    }
    p->q_start[b.n_seqs] = b.n_tokens;
    *ret = b;
}
