/* Everything in the scheduler that allocates: the pools, the prefix cache, the
 * scheduler, plans and the packer. All arrays get their final size here, so the other
 * files need no allocator. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "config/base/slab.h"
#include "engine/sched/decode/beam_text.h"
#include "engine/sched/decode/pack_impl.h"
#include "engine/sched/sched_impl.h"

/* n zeroed elements; not NULL for n = 0. */
static void *array(int64_t n, size_t size)
{
    return calloc((size_t)MAX(n, 1), size);
}

/* The same, in memory that is touched here: a step uses some at random places, where
 * the system would else map one page after the other inside of steps. */
static void *touched_array(int64_t n, size_t size)
{
    size_t n_bytes = (size_t)MAX(n, 1) * size;
    void *p = huge_alloc(n_bytes);

    return p ? memset(p, 0, n_bytes) : NULL;
}

int kvpool_init(struct kvpool *p, int32_t n_blocks, struct err *e)
{
    *p = (struct kvpool){.n_blocks = n_blocks,
                         .n_free = n_blocks,
                         .first = n_blocks > 0 ? 0 : -1,
                         .last = n_blocks - 1};
    p->block = touched_array(n_blocks, sizeof(*p->block));
    if (!p->block) {
        return err_nomem(e, "the block pool");
    }
    for (int32_t b = 0; b < n_blocks; b++) {
        p->block[b].prev = b - 1;
        p->block[b].next = b + 1 < n_blocks ? b + 1 : -1;
    }
    return 0;
}

void kvpool_release(struct kvpool *p)
{
    free(p->block);
    *p = (struct kvpool){0};
}

int prefix_init(struct prefix *px, struct kvpool *pool, int32_t block_size, int32_t n_groups,
                int32_t hash_bits, uint64_t secret, struct err *e)
{
    uint32_t buckets = 1;

    while (buckets < (uint32_t)pool->n_blocks) {
        buckets *= 2;
    }
    *px = (struct prefix){
        .pool = pool, .block_size = block_size, .bucket_mask = buckets - 1, .secret = secret};
    px->n_peers = n_groups - 1;
    px->hash_mask = hash_bits == 0 ? (struct block_hash){UINT64_MAX, UINT64_MAX}
                                   : (struct block_hash){(UINT64_C(1) << hash_bits) - 1, 0};
    px->entry = touched_array(pool->n_blocks, sizeof(*px->entry));
    px->token = touched_array((int64_t)pool->n_blocks * block_size, sizeof(*px->token));
    px->bucket = touched_array(buckets, sizeof(*px->bucket));
    if (n_groups > 1) {
        px->peer = touched_array((int64_t)pool->n_blocks * px->n_peers, sizeof(*px->peer));
        px->owner = touched_array(pool->n_blocks, sizeof(*px->owner));
    }
    if (!px->entry || !px->token || !px->bucket || (n_groups > 1 && (!px->peer || !px->owner))) {
        prefix_release(px);
        return err_nomem(e, "the prefix cache");
    }
    if (n_groups > 1) {
        size_t n = (size_t)pool->n_blocks;
        memset(px->peer, -1, n * (size_t)px->n_peers * sizeof(*px->peer));
        memset(px->owner, -1, n * sizeof(*px->owner));
    }
    memset(px->bucket, -1, buckets * sizeof(*px->bucket));
    for (int32_t b = 0; b < pool->n_blocks; b++) {
        px->entry[b].next = -1;
    }
    return 0;
}

void prefix_release(struct prefix *px)
{
    free(px->entry);
    free(px->token);
    free(px->bucket);
    free(px->peer);
    free(px->owner);
    *px = (struct prefix){0};
}

static void forget_pages(void *at, size_t n_bytes)
{
    madvise(at, n_bytes, MADV_DONTNEED);
}

static void *map_pages(int64_t bytes)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

/* Reserve `bytes` of address space. If the system limits it like memory and has less,
 * reserve 1 / PART of what it has, so that other allocations succeed too. */
static void reserve_pages(struct regions *a, int64_t bytes)
{
    enum { PART = 4 };
    int64_t wanted = MAX(div_ceil(bytes, REGIONS_LINE_BYTES), 1);

    for (int64_t n = wanted; n > 0 && !a->base; n /= 2) {
        a->n_lines = n;
        a->base = map_pages(regions_bytes(a));
    }
    if (a->base && a->n_lines < wanted) {
        munmap(a->base, (size_t)regions_bytes(a));
        a->n_lines = MAX(a->n_lines / PART, 1);
        a->base = map_pages(regions_bytes(a));
    }
}

int regions_init(struct regions *a, int64_t bytes, int32_t max_taken, struct err *e)
{
    *a = (struct regions){.max_taken = max_taken, .forget = forget_pages};
    a->page_bytes = sysconf(_SC_PAGESIZE);
    a->run = calloc((size_t)max_taken + 1, sizeof(*a->run));
    if (!a->run) {
        return err_nomem(e, "the memory of running requests");
    }
    reserve_pages(a, bytes);
    if (!a->base) {
        regions_release(a);
        return err_nomem(e, "the memory of running requests");
    }
    madvise(a->base, (size_t)regions_bytes(a), MADV_DONTDUMP);
    /* Most runs are touched only in part, so that only the first may be huge. */
    madvise(a->base, (size_t)regions_bytes(a), MADV_NOHUGEPAGE);
    madvise(a->base, (size_t)MIN(regions_bytes(a), REGIONS_HUGE_BYTES), MADV_HUGEPAGE);
    a->run[a->n_runs++] = (struct free_run){0, a->n_lines};
    a->most = a->n_lines;
    return 0;
}

void regions_release(struct regions *a)
{
    if (a->base) {
        munmap(a->base, (size_t)regions_bytes(a));
    }
    free(a->run);
    *a = (struct regions){0};
}

int contiguous_open(struct contiguous_alloc **ret, const struct reserve_rule *rule, struct err *e)
{
    struct contiguous_alloc *r = calloc(1, sizeof(*r));

    if (!r) {
        return err_nomem(e, "the reservations");
    }
    r->rule = *rule;
    r->free_order = array(rule->slots, sizeof(*r->free_order));
    r->next = array(rule->slots, sizeof(*r->next));
    r->prev = array(rule->slots, sizeof(*r->prev));
    if (!r->free_order || !r->next || !r->prev) {
        contiguous_free(r);
        return err_nomem(e, "the reservations");
    }
    contiguous_clear(r);
    *ret = r;
    return 0;
}

void contiguous_free(struct contiguous_alloc *r)
{
    if (!r) {
        return;
    }
    free(r->free_order);
    free(r->next);
    free(r->prev);
    free(r);
}

int plan_init(struct plan *p, const struct sched_config *c, struct err *e)
{
    *p = (struct plan){0};
    p->item = array(c->max_num_seqs, sizeof(*p->item));
    p->copy = array((int64_t)c->max_num_seqs * sched_kv_groups(c), sizeof(*p->copy));
    p->swap_out = array(c->n_host_blocks, sizeof(*p->swap_out));
    p->swap_in = array(c->n_host_blocks, sizeof(*p->swap_in));
    if (p->item && p->copy && p->swap_out && p->swap_in) {
        return 0;
    }
    plan_release(p);
    return err_nomem(e, "a step's plan");
}

void plan_release(struct plan *p)
{
    free(p->item);
    free(p->copy);
    free(p->swap_out);
    free(p->swap_in);
    *p = (struct plan){0};
}

static int check_kv_groups(const struct sched_config *c, struct err *e)
{
    bool right = c->n_kv_groups >= 0 && c->n_kv_groups <= LIMIT_KV_GROUPS && c->kv_window[0] == 0;
    bool states = false;

    for (int32_t k = 0; right && k < c->n_kv_groups; k++) {
        right = c->kv_window[k] >= KV_WINDOW_STATE;
        states = states || c->kv_window[k] == KV_WINDOW_STATE;
    }
    if (!right) {
        return err_set(e, ERR_INVALID,
                       "%d KV groups: at most %d are possible, and the first has no window",
                       c->n_kv_groups, LIMIT_KV_GROUPS);
    }
    if (c->n_kv_groups > 1 && c->kv_policy != KV_PAGED) {
        return err_set_param(e, ERR_UNSUPPORTED, "kv_policy",
                             "kv_policy must be paged for a model that mixes layers with and "
                             "without a sliding window or recurrent states");
    }
    if (states != (c->snapshot_distance > 0) || c->snapshot_distance % c->block_size != 0) {
        return err_set_param(e, ERR_INVALID, "state_snapshot_tokens",
                             "snapshots of states %d tokens apart: must be a multiple of the "
                             "block size of %d",
                             c->snapshot_distance, c->block_size);
    }
    return 0;
}

static int check_config(const struct sched_config *c, struct err *e)
{
    if (c->n_blocks < 1 || c->n_host_blocks < 0 || c->block_size < 1 || c->max_len < 1 ||
        c->vocab < 1) {
        return err_set(
            e, ERR_INVALID,
            "a scheduler needs blocks (%d of %d tokens), a model length (%d) and a vocabulary (%d)",
            c->n_blocks, c->block_size, c->max_len, c->vocab);
    }
    if (c->max_num_seqs < 1 || c->max_num_seqs > LIMIT_NUM_SEQS) {
        return err_set_param(e, ERR_INVALID, "max_num_seqs",
                             "max_num_seqs is %d; allowed are 1 to %d", c->max_num_seqs,
                             LIMIT_NUM_SEQS);
    }
    if (c->max_num_batched_tokens < c->max_num_seqs) {
        return err_set_param(e, ERR_INVALID, "max_num_batched_tokens",
                             "max_num_batched_tokens (%d) is less than max_num_seqs (%d): a step "
                             "could not hold one token of "
                             "each sequence",
                             c->max_num_batched_tokens, c->max_num_seqs);
    }
    if (c->max_logits <= c->max_num_seqs) {
        return err_set(e, ERR_INVALID, "max_logits (%d) must be more than max_num_seqs (%d)",
                       c->max_logits, c->max_num_seqs);
    }
    if (c->preemption == PREEMPT_SWAP && c->n_host_blocks == 0) {
        return err_set_param(e, ERR_INVALID, "swap_space",
                             "preemption is swap, and swap_space is too small for one block");
    }
    if (c->max_waiting < 1) {
        return err_set_param(e, ERR_INVALID, "max_queue",
                             "the waiting queue holds %d requests; at least 1", c->max_waiting);
    }
    return check_kv_groups(c, e);
}

static int32_t most_tenants(const struct sched_config *c)
{
    return c->policy == POLICY_FAIR ? LIMIT_TENANTS : 0;
}

static int allocate(struct sched *s, struct err *e)
{
    const struct sched_config *c = &s->c;
    int rc = kvpool_init(&s->pool, c->n_blocks, e);

    if (rc == 0) {
        rc = kvpool_init(&s->host, c->n_host_blocks, e);
    }
    if (rc == 0) {
        rc = prefix_init(&s->prefix, &s->pool, c->block_size, c->n_kv_groups, c->hash_bits,
                         c->secret, e);
    }
    if (rc < 0) {
        return rc;
    }
    struct reserve_rule rule = sched_reserve_rule(c);
    if (c->kv_policy != KV_PAGED && contiguous_open(&s->contiguous, &rule, e) < 0) {
        return e->code;
    }
    s->fair.tenant = array(most_tenants(c), sizeof(*s->fair.tenant));
    s->fair.ready = array(most_tenants(c), sizeof(*s->fair.ready));
    s->fair.prefill_order = array(c->max_num_seqs, sizeof(struct group *));
    s->waiting = array((int64_t)c->max_waiting + c->max_started, sizeof(*s->waiting));
    s->free_slot = array(c->max_num_seqs, sizeof(*s->free_slot));
    s->slot_seen = array(c->max_num_seqs, sizeof(*s->slot_seen));
    s->mask = array(c->max_num_seqs, sizeof(*s->mask));
    s->swap_out = array(c->n_host_blocks, sizeof(*s->swap_out));
    s->pinned = array(c->n_blocks, sizeof(*s->pinned));
    s->mark = array(MAX(c->n_blocks, c->n_host_blocks), sizeof(*s->mark));
    s->found = array(c->n_host_blocks, sizeof(*s->found));
    s->tokens = array(c->block_size, sizeof(*s->tokens));
    s->hit = array(div_ceil(c->max_len, c->block_size), sizeof(*s->hit));
    s->chunk = array(c->max_num_seqs, sizeof(*s->chunk));
    s->want = array(c->max_num_seqs, sizeof(*s->want));
    s->candidate = array(c->max_num_seqs, sizeof(*s->candidate));
    if (!s->fair.tenant || !s->fair.ready || !s->fair.prefill_order || !s->waiting ||
        !s->free_slot || !s->slot_seen || !s->mask || !s->swap_out || !s->pinned || !s->mark ||
        !s->found || !s->tokens || !s->hit || !s->chunk || !s->want || !s->candidate) {
        return err_nomem(e, "the scheduler");
    }
    rc = regions_init(&s->regions, c->group_bytes, c->max_started, e);
    return rc < 0 ? rc : beam_text_reserve(&s->text, c->tokenizer, e);
}

/* Replace zeros that mean "by default". */
static void complete_config(struct sched_config *c)
{
    c->n_kv_groups = sched_kv_groups(c);
    if (c->max_started == 0) {
        c->max_started = 2 * c->max_num_seqs;
    }
    if (c->group_bytes == 0) {
        c->group_bytes = group_bytes_most(c);
    }
}

int sched_new(struct sched **ret, const struct sched_config *c, struct err *e)
{
    int rc = check_config(c, e);

    if (rc < 0) {
        return rc;
    }
    struct sched *s = calloc(1, sizeof(*s));
    if (!s) {
        return err_nomem(e, "the scheduler");
    }
    s->c = *c;
    s->policy = c->policy == POLICY_FAIR ? &policy_fair : &policy_fcfs;
    s->cost_scale = 1;
    complete_config(&s->c);
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        s->window_blocks[k] = sched_window_blocks(c, k);
        s->most_blocks[k] = sched_most_blocks(c, k);
    }
    rc = allocate(s, e);
    if (rc < 0) {
        sched_free(s);
        return rc;
    }
    s->c.group_bytes = regions_bytes(&s->regions);
    s->n_free_slots = s->n_masks = c->max_num_seqs;
    for (int32_t i = 0; i < s->n_free_slots; i++) {
        s->free_slot[i] = s->mask[i] = s->n_free_slots - 1 - i; /* slot 0 is taken first */
    }
    for (int32_t i = 0; i < most_tenants(c); i++) {
        s->fair.tenant[i] = (struct tenant){.ready_index = -1, .weight = 1};
    }
    *ret = s;
    return 0;
}

static void free_list(struct group_list *l)
{
    for (struct group *g = l->first, *next; g; g = next) {
        next = g->next;
        group_free(g);
    }
}

void sched_free(struct sched *s)
{
    if (!s) {
        return;
    }
    for (int32_t i = 0; i < s->n_waiting; i++) {
        group_free(s->waiting[i]);
    }
    free_list(&s->running);
    free_list(&s->swapped);
    free_list(&s->ended);
    prefix_release(&s->prefix);
    kvpool_release(&s->pool);
    kvpool_release(&s->host);
    contiguous_free(s->contiguous);
    free(s->fair.tenant);
    free(s->fair.ready);
    free(s->fair.prefill_order);
    free(s->waiting);
    free(s->free_slot);
    free(s->slot_seen);
    free(s->mask);
    free(s->swap_out);
    free(s->mark);
    free(s->found);
    free(s->pinned);
    free(s->tokens);
    free(s->hit);
    free(s->chunk);
    free(s->want);
    free(s->candidate);
    regions_release(&s->regions);
    buf_release(&s->text);
    free(s);
}

const struct sched_config *sched_config(const struct sched *s)
{
    return &s->c;
}

/* ---- the packer ---- */

/* An array that is written before it is read, so that it needs no zeros, which would
 * touch every page. */
static void *unset_array(int64_t n, size_t size)
{
    return malloc((size_t)MAX(n, 1) * size);
}

int packer_new(struct packer **ret, const struct sched_config *c, struct err *e)
{
    struct packer *p = calloc(1, sizeof(*p));

    if (!p) {
        return err_nomem(e, "the packer");
    }
    int64_t seqs = c->max_num_seqs, tokens = c->max_num_batched_tokens;
    int64_t groups = sched_kv_groups(c);
    p->c = *c;
    p->c.n_kv_groups = (int32_t)groups;
    p->table_width = (int32_t)div_ceil(c->max_len, c->block_size);
    p->bias_cap = seqs * LIMIT_ROW_BIASES;
    p->mask_words = mask_words(c->vocab);
    if (seqs * p->mask_words > INT32_MAX) {
        free(p);
        return err_set_param(e, ERR_INVALID, "max_num_seqs",
                             "max_num_seqs is %d, too many for a vocabulary of %d ids: their "
                             "masks have more than 2^36 bits",
                             c->max_num_seqs, c->vocab);
    }
    p->shadow = malloc((size_t)(groups * seqs * p->table_width) * sizeof(*p->shadow));
    p->packed = array(seqs, sizeof(*p->packed));
    p->kept_row = unset_array(seqs, sizeof(*p->kept_row));
    p->table_update = unset_array(PACK_RUNS * groups * seqs, sizeof(*p->table_update));
    p->table_block = unset_array(groups * seqs * p->table_width, sizeof(*p->table_block));
    p->token = unset_array(tokens, sizeof(*p->token));
    p->token_src = unset_array(tokens, sizeof(*p->token_src));
    p->position = unset_array(tokens, sizeof(*p->position));
    p->slot = unset_array(tokens, sizeof(*p->slot));
    p->group_slot = unset_array(tokens * (groups - 1), sizeof(*p->group_slot));
    p->q_start = unset_array(seqs + 1, sizeof(*p->q_start));
    p->kv_len = unset_array(seqs, sizeof(*p->kv_len));
    p->row = unset_array(seqs, sizeof(*p->row));
    p->lcp_blocks = unset_array(seqs, sizeof(*p->lcp_blocks));
    p->logits_token = unset_array(c->max_logits, sizeof(*p->logits_token));
    p->sample = unset_array(c->max_logits, sizeof(*p->sample));
    p->sample_kept = array(c->max_logits, sizeof(*p->sample_kept));
    p->token_bias = unset_array(p->bias_cap, sizeof(*p->token_bias));
    p->bias_at = array(c->vocab, sizeof(*p->bias_at));
    p->mask_word = unset_array(seqs * p->mask_words, sizeof(*p->mask_word));
    p->mask = unset_array(seqs * p->mask_words, sizeof(*p->mask));
    p->mask_order = array(seqs, sizeof(*p->mask_order));
    if (!p->shadow || !p->packed || !p->kept_row || !p->table_update || !p->table_block ||
        !p->token || !p->token_src || !p->position || !p->slot || !p->group_slot || !p->q_start ||
        !p->kv_len || !p->row || !p->lcp_blocks || !p->logits_token || !p->sample ||
        !p->sample_kept || !p->token_bias || !p->bias_at || !p->mask_word || !p->mask ||
        !p->mask_order) {
        packer_free(p);
        return err_nomem(e, "the packer");
    }
    memset(p->shadow, -1, (size_t)(groups * seqs * p->table_width) * sizeof(*p->shadow));
    *ret = p;
    return 0;
}

void packer_free(struct packer *p)
{
    if (!p) {
        return;
    }
    free(p->shadow);
    free(p->packed);
    free(p->kept_row);
    free(p->table_update);
    free(p->table_block);
    free(p->token);
    free(p->token_src);
    free(p->position);
    free(p->slot);
    free(p->group_slot);
    free(p->q_start);
    free(p->kv_len);
    free(p->row);
    free(p->lcp_blocks);
    free(p->logits_token);
    free(p->sample);
    free(p->sample_kept);
    free(p->token_bias);
    free(p->bias_at);
    free(p->mask_word);
    free(p->mask);
    free(p->mask_order);
    free(p);
}
