/* Fills a kv_snapshot for observers: the state of every block, and as many groups and
 * block tables as fit. */
#include "engine/sched/sched_impl.h"

static void snapshot_pool(uint8_t *ret, const struct kvpool *pool)
{
    for (int32_t b = 0; b < pool->n_blocks; b++) {
        const struct kvblock *k = &pool->block[b];
        ret[b] = (uint8_t)(k->count > 0 ? MIN(k->count, KV_MANY) : k->hashed ? KV_CACHED : KV_FREE);
    }
}

static uint32_t tag_of(const char *id)
{
    uint32_t h = 2166136261u;

    for (; *id; id++) {
        h = (h ^ (uint8_t)*id) * 16777619u;
    }
    return h;
}

/* Add n blocks of a sequence, -1: none, as far as there is room; returns how many it
 * holds. */
static int32_t snapshot_blocks(struct kv_snapshot *p, const int32_t *block, int32_t n)
{
    int32_t n_held = 0;

    for (int32_t b = 0; b < n; b++) {
        if (block[b] < 0) {
            continue;
        }
        n_held++;
        if (p->n_entries < KV_SNAPSHOT_ENTRIES) {
            p->entry[p->n_entries++] = block[b];
        }
    }
    return n_held;
}

static void snapshot_seq(struct kv_snapshot *p, const struct seq *q, int32_t group,
                         const struct sched_config *c)
{
    int32_t first = p->n_entries, n_blocks = 0;

    for (int32_t k = 0; k < c->n_kv_groups; k++) {
        const struct block_table *t = &q->table[k];
        n_blocks += snapshot_blocks(p, t->block + t->first, t->n_blocks - t->first);
    }
    if (q->n_spare > 0) {
        int32_t n_states = sched_states_before(c, c->n_kv_groups);
        n_blocks += snapshot_blocks(p, q->spare, n_states * q->n_spare);
    }
    p->seq[p->n_seqs++] = (struct kv_seq){
        .group = group,
        .index = q->index,
        .n_tokens = q->n_tokens,
        .n_computed = q->n_computed,
        .n_blocks = n_blocks,
        .first_entry = first,
        .n_entries = p->n_entries - first,
    };
}

static void snapshot_group(struct kv_snapshot *p, const struct group *g, enum kv_group_state state,
                           const struct sched_config *c)
{
    if (p->n_groups == KV_SNAPSHOT_GROUPS) {
        return;
    }
    int32_t index = p->n_groups++, first_seq = p->n_seqs;
    for (int32_t i = 0; state != KV_WAITING && i < g->width && p->n_seqs < KV_SNAPSHOT_SEQS; i++) {
        if (g->seq[i].state == SEQ_LIVE) {
            snapshot_seq(p, &g->seq[i], index, c);
        }
    }
    p->group[index] = (struct kv_group){
        .order = g->order,
        .tag = tag_of(g->request->id),
        .state = state,
        .priority = g->priority,
        .preemptions = g->n_preempted,
        .width = g->width,
        .n_live = g->n_live,
        .beam = g->beams,
        .n_prompt = g->n_prompt,
        .max_tokens = g->max_tokens,
        .cached_tokens = g->cached_tokens,
        .arrival_us = g->request->arrival_us,
        .first_seq = first_seq,
        .n_seqs = p->n_seqs - first_seq,
    };
}

void sched_snapshot(const struct sched *s, struct kv_snapshot *p)
{
    p->n_groups = p->n_seqs = p->n_entries = 0;
    p->n_used = kvpool_used(&s->pool);
    p->n_cached = s->pool.n_cached;
    p->n_host_used = kvpool_used(&s->host);
    p->n_running = s->running.n;
    p->n_swapped = s->swapped.n;
    p->n_waiting = s->n_waiting;
    snapshot_pool(p->block, &s->pool);
    snapshot_pool(p->host, &s->host);
    for (const struct group *g = s->running.first; g; g = g->next) {
        snapshot_group(p, g, KV_RUNNING, &s->c);
    }
    for (const struct group *g = s->swapped.first; g; g = g->next) {
        snapshot_group(p, g, KV_SWAPPED, &s->c);
    }
    for (int32_t i = 0; i < s->n_waiting && p->n_groups < KV_SNAPSHOT_GROUPS; i++) {
        snapshot_group(p, s->waiting[i], KV_WAITING, &s->c);
    }
}

void sched_counts(const struct sched *s, struct sched_counts *ret)
{
    *ret = s->counted;
    ret->running_groups = s->running.n;
    ret->running_seqs = s->c.max_num_seqs - s->n_free_slots;
    ret->waiting_groups = s->n_waiting;
    ret->swapped_groups = s->swapped.n;
    ret->blocks_used = kvpool_used(&s->pool);
    ret->blocks_cached = s->pool.n_cached;
    ret->host_blocks_used = kvpool_used(&s->host);
}
