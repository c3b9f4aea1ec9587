/* Six kinds of steps give the parameters of the cost model:
 *
 *     one token, no context            fixed
 *     a long prefill                   fixed + tokens * token
 *     one token, the longest context   fixed + context * context's
 *     one token, blocks swapped in     fixed + blocks * swap
 *     few tokens, all sampled from     fixed + tokens * row
 *     many such tokens                 that + the others * many rows'
 *
 * Each is the fastest of a few tries, so that a disturbed one does not count. On a GPU
 * time is not linear in tokens (the weights are read anyway, so the first hundreds are
 * nearly free): the line through one token and a full step is above the true cost in
 * between, so a plan made from it keeps its target. Blocks are swapped in, not out,
 * because a step waits for what it reads, while outgoing blocks may still be in
 * transfer when the step has ended. */
#include "engine/loop/cost.h"

#include <stdlib.h>

enum {
    TRIES = 3,               /* tries of a kind of step */
    LONG_TRY_US = 100000,    /* a step this long is tried twice only */
    PREFILL_MAX_US = 400000, /* longest prefill that a start may spend time on */
    FEW_TOKENS = 64,
    LONG_TOKENS = 1024,
    SIZES_MAX = 2560, /* of prefills; setting up longer ones costs more time than it saves */
    CONTEXT_MAX = 4096,
    SWAP_BLOCKS = 16,
    ROWS_MAX = 256,
    VERIFIED = 64, /* tokens of a large step that verifies drafts */
};

/* The arrays that a step of many sequences needs beside the probe's. */
struct rows {
    /* identity: 0, 1, 2, … */
    int32_t q_start[ROWS_MAX + 1], kv_len[ROWS_MAX], identity[ROWS_MAX], lcp[ROWS_MAX];
    struct table_update update[LIMIT_KV_GROUPS * ROWS_MAX];
    struct sample_row sample[ROWS_MAX];
};

struct probe {
    struct executor *x;
    int64_t (*now_us)(void);
    uint64_t step;
    int32_t *token, *token_src, *position, *slot; /* [max tokens] */
    int32_t *group_slot;                          /* [max tokens, KV groups - 1] */
    int32_t *block;                               /* [blocks of the longest probe] 0, 1, 2, … */
    struct block_copy copy[SWAP_BLOCKS];
    int32_t n_table; /* entries of table row 0 that the executor has */
    int32_t n_rows;  /* table rows of which the executor has entries */
};

static int probe_init(struct probe *p, int32_t n_tokens, int32_t n_blocks, struct err *e)
{
    size_t n = (size_t)n_tokens * sizeof(int32_t);

    p->token = calloc(1, n);
    p->token_src = malloc(n);
    p->position = malloc(n);
    p->slot = malloc(n);
    p->group_slot = malloc(n * (size_t)executor_kv_groups(&p->x->info));
    p->block = malloc((size_t)n_blocks * sizeof(int32_t));
    if (!p->token || !p->token_src || !p->position || !p->slot || !p->group_slot || !p->block) {
        return err_nomem(e, "measuring the steps");
    }
    for (int32_t i = 0; i < n_tokens; i++) {
        p->token_src[i] = -1;
    }
    for (int32_t i = 0; i < n_blocks; i++) {
        p->block[i] = i;
    }
    for (int32_t i = 0; i < SWAP_BLOCKS; i++) {
        p->copy[i] = (struct block_copy){i, i};
    }
    return 0;
}

static void probe_release(struct probe *p)
{
    free(p->token);
    free(p->token_src);
    free(p->position);
    free(p->slot);
    free(p->group_slot);
    free(p->block);
}

/* A sampling row; temperature 0 is greedy. */
static struct sample_row sample_of(int32_t row, int32_t position, float temperature)
{
    return (struct sample_row){.kind = SAMPLE_TOKEN,
                               .logits_row = row,
                               .temperature = temperature,
                               .top_p = temperature > 0 ? 0.9f : 1,
                               .repetition_penalty = 1,
                               .n_logprobs = -1,
                               .target = -1,
                               .position = position,
                               .n_prompt = position,
                               .mask_first = -1};
}

static int run(struct probe *p, const struct batch *b, int64_t *ret_us, struct err *e)
{
    struct results results;
    int64_t start_us = p->now_us();
    int rc = p->x->launch(p->x, b, e);

    if (rc == 0) {
        rc = p->x->wait(p->x, &results, e);
    }
    *ret_us = p->now_us() - start_us;
    return rc;
}

/* The probes' tokens go to the same slot in every KV group: what is computed does not
 * matter. */
static void set_slot(struct probe *p, int32_t i, int32_t slot)
{
    int32_t others = executor_kv_groups(&p->x->info) - 1;

    p->slot[i] = slot;
    for (int32_t k = 0; k < others; k++) {
        p->group_slot[i * others + k] = slot;
    }
}

/* What all probes' batches have in common; each sequence samples one token. */
static struct batch batch_of(struct probe *p, int32_t n_tokens, int32_t n_seqs)
{
    return (struct batch){.step = ++p->step,
                          .table_block = p->block,
                          .n_tokens = n_tokens,
                          .token = p->token,
                          .token_src = p->token_src,
                          .position = p->position,
                          .slot = p->slot,
                          .group_slot = p->group_slot,
                          .n_group_slots = n_tokens * (executor_kv_groups(&p->x->info) - 1),
                          .n_seqs = n_seqs,
                          .n_logits = n_seqs,
                          .n_samples = n_seqs};
}

/* Runs a step of one sequence in table row 0: n tokens after `context` others, with
 * n_swap blocks swapped in. The last n_sampled (<= VERIFIED) tokens are sampled
 * from. */
static int probe_step(struct probe *p, int32_t n, int32_t context, int32_t n_swap,
                      int32_t n_sampled, int64_t *ret_us, struct err *e)
{
    int32_t size = p->x->info.block_size, n_blocks = (int32_t)div_ceil(context + n, size);
    int32_t q_start[2] = {0, n}, kv_len = context + n, row = 0, lcp = 0;
    int32_t n_groups = executor_kv_groups(&p->x->info), logits_token[VERIFIED];
    struct table_update update[LIMIT_KV_GROUPS];
    struct sample_row sample[VERIFIED];

    for (int32_t i = 0; i < n_sampled; i++) {
        logits_token[i] = n - n_sampled + i;
        sample[i] = sample_of(i, context + logits_token[i] + 1, 0);
    }
    for (int32_t i = 0; i < n; i++) {
        p->position[i] = context + i;
        set_slot(p, i, p->block[(context + i) / size] * size + (context + i) % size);
    }
    for (int32_t k = 0; k < n_groups; k++) {
        update[k] = (struct table_update){
            .group = k, .index = p->n_table, .count = n_blocks - p->n_table, .first = p->n_table};
    }
    struct batch b = batch_of(p, n, 1);
    b.swap_in = p->copy;
    b.n_swap_in = n_swap;
    b.table_update = update;
    b.n_table_update = n_blocks > p->n_table ? n_groups : 0;
    b.n_table_block = n_blocks;
    b.n_decode = n == 1;
    b.q_start = q_start;
    b.kv_len = &kv_len;
    b.row = &row;
    b.lcp_blocks = &lcp;
    b.n_logits = b.n_samples = n_sampled;
    b.logits_token = logits_token;
    b.sample = sample;
    p->n_table = MAX(p->n_table, n_blocks);
    p->n_rows = MAX(p->n_rows, 1);
    return run(p, &b, ret_us, e);
}

/* The time of the fastest of TRIES steps, or of two if they are long. */
static int probe_best(struct probe *p, int32_t n, int32_t context, int32_t n_swap,
                      int32_t n_sampled, double *ret_us, struct err *e)
{
    int64_t best = INT64_MAX, us;

    for (int32_t i = 0; i < TRIES && (i < 2 || best < LONG_TRY_US); i++) {
        int rc = probe_step(p, n, context, n_swap, n_sampled, &us, e);
        if (rc < 0) {
            return rc;
        }
        best = MIN(best, us);
    }
    *ret_us = (double)best;
    return 0;
}

/* Times a prefill of *n tokens, or of FEW_TOKENS if *n would take longer than
 * PREFILL_MAX_US; sets *n to its length. */
static int probe_prefill(struct probe *p, int32_t *n, double *ret_us, struct err *e)
{
    int32_t few = MIN(*n, FEW_TOKENS);
    int rc = probe_best(p, few, 0, 0, 1, ret_us, e);

    if (rc < 0 || few == *n || *ret_us * *n / few > PREFILL_MAX_US) {
        *n = few;
        return rc;
    }
    return probe_best(p, *n, 0, 0, 1, ret_us, e);
}

/* Runs a prefill of each size for which a device loads kernels of its own. It loads
 * them only when idle, so sequences that are decoding would wait. */
static int probe_sizes(struct probe *p, int32_t max_tokens, struct err *e)
{
    enum { FIRST = 8, FAR = 512 };
    int64_t us;
    int rc = 0;

    for (int32_t n = FIRST; n <= max_tokens && rc == 0; n += MIN(n, FAR)) {
        rc = probe_step(p, n, 0, 0, 1, &us, e);
    }
    return rc;
}

/* Runs a step of n sequences of one token each, in rows 0 to n - 1 and blocks of the
 * same numbers. */
static int probe_rows(struct probe *p, struct rows *r, int32_t n, float temperature, struct err *e)
{
    int32_t n_groups = executor_kv_groups(&p->x->info), n_updates = 0;
    int64_t us;

    for (int32_t i = 0; i < n; i++) {
        p->position[i] = 0;
        set_slot(p, i, i * p->x->info.block_size);
        r->q_start[i] = r->identity[i] = i;
        r->kv_len[i] = 1;
        r->sample[i] = sample_of(i, 1, temperature);
    }
    for (int32_t i = p->n_rows; i < n; i++) {
        for (int32_t k = 0; k < n_groups; k++) {
            r->update[n_updates++] =
                (struct table_update){.group = k, .row = i, .count = 1, .first = i};
        }
    }
    r->q_start[n] = n;
    struct batch b = batch_of(p, n, n);
    b.table_update = r->update;
    b.n_table_update = n_updates;
    b.n_table_block = n;
    b.n_decode = n;
    b.q_start = r->q_start;
    b.kv_len = r->kv_len;
    b.row = r->identity;
    b.lcp_blocks = r->lcp;
    b.logits_token = r->identity;
    b.sample = r->sample;
    p->n_rows = MAX(p->n_rows, n);
    p->n_table = MAX(p->n_table, 1);
    return run(p, &b, &us, e);
}

/* Runs a step of decodes of each size for which a device selects its matrix products
 * anew: selecting takes longer than many such steps, and running requests would wait
 * for it. The first step samples at random instead of greedily. */
static int probe_decodes(struct probe *p, int32_t max_tokens, struct err *e)
{
    struct rows *r = calloc(1, sizeof(*r));

    if (!r) {
        return err_nomem(e, "measuring the steps");
    }
    int rc = probe_rows(p, r, 1, 1, e);
    for (int32_t n = 1; n <= max_tokens && rc == 0; n *= 2) {
        rc = probe_rows(p, r, n, 0, e);
        if (rc == 0 && n >= FEW_TOKENS / 2 && n + n / 2 <= max_tokens) {
            rc = probe_rows(p, r, n + n / 2, 0, e);
        }
    }
    free(r);
    return rc;
}

int cost_measure(struct executor *x, int64_t (*now_us)(void), struct step_cost *ret, struct err *e)
{
    const struct executor_info *info = &x->info;
    int32_t capacity = (int32_t)MIN((int64_t)info->n_blocks * info->block_size, info->max_len);
    int32_t max_tokens = MIN(MIN(info->max_num_batched_tokens, capacity), SIZES_MAX),
            n_tokens = MIN(max_tokens, LONG_TOKENS);
    int32_t context = MIN(CONTEXT_MAX, capacity - 1);
    int32_t n_swap = MIN(SWAP_BLOCKS, MIN(info->n_blocks, info->n_host_blocks));
    int32_t n_blocks = (int32_t)div_ceil(capacity, info->block_size);
    int32_t most = MAX(MIN(MIN(max_tokens, info->max_samples), info->max_num_seqs), 1);
    int32_t n_few = MIN(most, STEP_FEW_ROWS), n_many = MIN(most, VERIFIED);
    double one = 0, full = 0, deep = 0, swap = 0, few = 0, many = 0;
    struct probe p = {.x = x, .now_us = now_us};
    int rc = probe_init(&p, max_tokens, n_blocks, e);

    if (rc == 0 && info->sets_up_sizes) {
        rc = probe_sizes(&p, max_tokens, e);
    }
    if (rc == 0 && info->sets_up_sizes) {
        rc =
            probe_decodes(&p, MIN(MIN(ROWS_MAX, info->max_num_seqs), MIN(max_tokens, n_blocks)), e);
    }
    if (rc == 0) {
        rc = probe_best(&p, 1, 0, 0, 1, &one, e);
    }
    if (rc == 0) {
        rc = probe_prefill(&p, &n_tokens, &full, e);
    }
    if (rc == 0) {
        rc = probe_best(&p, 1, context, 0, 1, &deep, e);
    }
    if (rc == 0) {
        rc = probe_best(&p, n_few, 0, 0, n_few, &few, e);
    }
    if (rc == 0) {
        rc = probe_best(&p, n_many, 0, 0, n_many, &many, e);
    }
    if (rc == 0 && n_swap > 0) {
        rc = probe_best(&p, 1, 0, n_swap, 1, &swap, e);
    }
    probe_release(&p);
    if (rc < 0) {
        return rc;
    }
    *ret = (struct step_cost){
        .fixed_us = one,
        .token_us = n_tokens > 1 ? MAX(full - one, 1) / (n_tokens - 1) : 1,
        .context_us = context > 0 ? MAX(deep - one, 0) / context : 0,
        .swap_block_us = n_swap > 0 ? MAX(swap - one, 1) / n_swap : 0,
        .row_us = n_few > 1 ? MAX(few - one, 0) / (n_few - 1) : 0,
        .many_row_us = n_many > n_few ? MAX(many - few, 0) / (n_many - n_few) : 0,
    };
    return 0;
}
