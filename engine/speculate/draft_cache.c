#include "engine/speculate/draft_cache.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

int draft_cache_init(struct draft_cache *c, int32_t n_blocks, int32_t block_size, int32_t max_len,
                     int32_t max_num_seqs, uint64_t secret, struct err *e)
{
    *c = (struct draft_cache){.block_size = block_size,
                              .table_width = (int32_t)div_ceil(max_len, block_size),
                              .max_num_seqs = max_num_seqs,
                              .reads_drafts = true,
                              .secret = secret};
    size_t entries = (size_t)max_num_seqs * (size_t)c->table_width;
    c->tag = calloc((size_t)n_blocks, sizeof(*c->tag));
    c->writer = calloc((size_t)n_blocks, sizeof(*c->writer));
    c->busy = calloc((size_t)n_blocks, sizeof(*c->busy));
    c->shadow = malloc(entries * sizeof(*c->shadow));
    c->token = calloc((size_t)block_size, sizeof(*c->token));
    c->seq = calloc((size_t)max_num_seqs, sizeof(*c->seq));
    c->update = calloc((size_t)max_num_seqs, sizeof(*c->update));
    c->table_block = malloc(entries * sizeof(*c->table_block));
    if (!c->tag || !c->writer || !c->busy || !c->shadow || !c->token || !c->seq || !c->update ||
        !c->table_block) {
        draft_cache_release(c);
        return err_nomem(e, "drafts");
    }
    memset(c->shadow, 0xff, entries * sizeof(*c->shadow));
    return 0;
}

void draft_cache_release(struct draft_cache *c)
{
    free(c->tag);
    free(c->writer);
    free(c->busy);
    free(c->shadow);
    free(c->token);
    free(c->seq);
    free(c->update);
    free(c->table_block);
    *c = (struct draft_cache){0};
}

/* Not 0; different for sequences that live at the same time. */
static uint64_t key_of(const struct seq *q)
{
    return q->group->order * (LIMIT_CHOICES + 1) + (uint64_t)q->index + 1;
}

struct draft_seq *draft_cache_seq(struct draft_cache *c, const struct seq *q)
{
    struct draft_seq *s = q->slot >= 0 ? &c->seq[q->slot] : NULL;

    return s && s->key == key_of(q) ? s : NULL;
}

/* ---- tags ---- */

/* The tag of block i of the sequence, whose tokens are all known, behind one with the
 * tag `before`. */
static uint64_t tag_of(const struct draft_cache *c, const struct seq *q, int32_t i, uint64_t before)
{
    for (int32_t k = 0; k < c->block_size; k++) {
        c->token[k] = seq_token(q, i * c->block_size + k);
    }
    size_t n_bytes = (size_t)c->block_size * sizeof(*c->token);
    return XXH3_64bits_withSeed(c->token, n_bytes, c->secret ^ before) | 1; /* 0: none */
}

static uint64_t *tag_at(struct draft_cache *c, const struct seq *q, int32_t i)
{
    return &c->tag[q->table[0].block[i]];
}

/* Tag the full blocks before n_valid from the one of position `from` on. */
static void tag_blocks(struct draft_cache *c, const struct seq *q, int32_t from, int32_t n_valid)
{
    for (int32_t i = from / c->block_size; (i + 1) * c->block_size <= n_valid; i++) {
        uint64_t before = i > 0 ? *tag_at(c, q, i - 1) : 0;
        if (i == 0 || before != 0) {
            *tag_at(c, q, i) = tag_of(c, q, i, before);
        }
    }
}

/* The tokens before the first block that holds something else, counted from n_valid, a
 * block's beginning, on. */
static int32_t find_tagged(struct draft_cache *c, const struct seq *q, int32_t n_valid)
{
    int32_t i = n_valid / c->block_size, last = draft_cache_known(c, q) - 1;
    uint64_t before = i > 0 ? *tag_at(c, q, i - 1) : 0;

    while ((i == 0 || before != 0) && (i + 1) * c->block_size <= last) {
        uint64_t tag = tag_of(c, q, i, before);
        if (*tag_at(c, q, i) != tag) {
            break;
        }
        before = tag;
        i++;
    }
    return i * c->block_size;
}

/* ---- a sequence ---- */

/* Note what changed in the sequence's table; returns the tokens before the first block
 * that did. */
static int32_t sync_table(struct draft_cache *c, const struct seq *q)
{
    const struct block_table *t = &q->table[0];
    int32_t *shadow = c->shadow + (ptrdiff_t)q->slot * c->table_width, i = 0;

    while (i < t->n_blocks && shadow[i] == t->block[i]) {
        i++;
    }
    if (i < t->n_blocks) {
        size_t n_bytes = (size_t)(t->n_blocks - i) * sizeof(*shadow);
        c->update[c->n_updates++] = (struct table_update){
            .row = q->slot, .index = i, .count = t->n_blocks - i, .first = c->n_table_blocks};
        memcpy(c->table_block + c->n_table_blocks, t->block + i, n_bytes);
        memcpy(shadow + i, t->block + i, n_bytes);
        c->n_table_blocks += t->n_blocks - i;
    }
    return i * c->block_size;
}

static bool wrote(const struct draft_cache *c, const struct draft_seq *s, const struct seq *q,
                  int32_t position)
{
    return c->writer[q->table[0].block[position / c->block_size]] == s->key;
}

/* The drafts that have become tokens are valid as far as they were fed back. */
static void take_drafts(struct draft_cache *c, struct draft_seq *s, const struct seq *q,
                        int32_t unchanged)
{
    int32_t known = MIN(draft_cache_known(c, q) - 1, unchanged), from = s->n_valid;

    for (int32_t i = 0; s->n_valid == s->n_from + i && i + 1 < s->n_drafts; i++) {
        int32_t position = s->n_from + i;
        if (position < known && seq_token(q, position + c->shift) == s->token[i] &&
            wrote(c, s, q, position)) {
            s->n_valid++;
        }
    }
    tag_blocks(c, q, from, s->n_valid);
}

struct draft_seq *draft_cache_find(struct draft_cache *c, const struct seq *q, float rate)
{
    struct draft_seq *s = &c->seq[q->slot];
    int32_t unchanged = sync_table(c, q);

    if (s->key != key_of(q)) {
        *s = (struct draft_seq){.key = key_of(q), .rate = rate};
    }
    if (s->n_preempted != q->group->n_preempted) {
        s->n_preempted = q->group->n_preempted;
        unchanged = 0;
    }
    if (c->reads_drafts && s->n_from == s->n_valid) {
        take_drafts(c, s, q, unchanged);
    }
    s->n_from = s->n_drafts = 0;
    s->n_valid = MIN(MIN(s->n_valid, unchanged), draft_cache_known(c, q) - 1);
    if (s->n_valid % c->block_size != 0 && !wrote(c, s, q, s->n_valid)) {
        s->n_valid -= s->n_valid % c->block_size;
    }
    if (s->n_valid % c->block_size == 0) {
        s->n_valid = find_tagged(c, q, s->n_valid);
    }
    return s;
}

void draft_cache_drop_updates(struct draft_cache *c)
{
    for (int32_t i = 0; i < c->n_updates; i++) {
        const struct table_update *u = &c->update[i];
        int32_t *shadow = c->shadow + (ptrdiff_t)u->row * c->table_width + u->index;
        memset(shadow, 0xff, (size_t)u->count * sizeof(*shadow));
    }
    c->n_updates = c->n_table_blocks = 0;
}

bool draft_cache_take(struct draft_cache *c, const struct seq *q, int32_t first, int32_t end,
                      uint64_t step)
{
    const int32_t *block = q->table[0].block;
    /* A head's entry at the end of a block that sequences share is written by each of
     * them that goes on from there: none may read it in the same step. */
    int32_t read = MAX(first - c->shift, 0) / c->block_size;

    for (int32_t i = read; i <= (end - 1) / c->block_size; i++) {
        if (c->busy[block[i]] == step) {
            return false;
        }
    }
    c->busy[block[read]] = step;
    for (int32_t i = first / c->block_size; i <= (end - 1) / c->block_size; i++) {
        c->busy[block[i]] = step;
        c->tag[block[i]] = 0;
        c->writer[block[i]] = key_of(q);
    }
    return true;
}

void draft_cache_written(struct draft_cache *c, const struct seq *q, int32_t end)
{
    struct draft_seq *s = &c->seq[q->slot];

    tag_blocks(c, q, s->n_valid, end);
    s->n_valid = end;
}
