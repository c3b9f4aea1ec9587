/* A step's state on the CPU: the batch's copy, block copies, block tables, results.
 *
 * A step is done when step_end returns; step_wait only hands out the oldest results not
 * yet waited for. The tokens of the step before stay in cpu_backend.tokens, where
 * token_src finds them.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/batch_check.h"
#include "kernels/cpu/cpu.h"

struct cpu_results *cpu_results_now(struct cpu_backend *c)
{
    return &c->results[c->n_begun % CPU_RESULTS];
}

int32_t cpu_input_token(const struct cpu_backend *c, int32_t i)
{
    const struct step_tokens *before = stage_tokens_before(&c->tokens);
    int32_t src = c->batch.token_src ? c->batch.token_src[i] : -1;

    if (src < 0) {
        return c->batch.token[i];
    }
    return src < before->n ? MAX(before->token[src], 0) : 0;
}

int cpu_steps_init(struct cpu_backend *c, struct err *e)
{
    size_t n = (size_t)MAX(c->config.max_samples, 1);
    size_t table = (size_t)backend_kv_groups(&c->config) * (size_t)c->config.max_seqs *
                   (size_t)MAX(c->config.max_blocks_per_seq, 1);

    c->table = cpu_alloc(c, table * sizeof(*c->table));
    bool ok = c->table != NULL;
    for (int i = 0; i < CPU_RESULTS; i++) {
        struct cpu_results *r = &c->results[i];
        r->token = cpu_alloc(c, n * sizeof(*r->token));
        r->logprob = cpu_alloc(c, n * sizeof(*r->logprob));
        ok = ok && r->token && r->logprob != NULL;
    }
    int rc = ok ? late_masks_init(&c->late, c->config.max_seqs, c->config.vocab, e)
                : err_nomem(e, "block tables and results");
    return rc < 0 ? rc
                  : stage_tokens_init(&c->tokens, c->config.pipeline, c->config.max_samples, e);
}

int cpu_masks(struct backend *b, uint64_t step, const struct late_mask *mask, int32_t n,
              struct err *e)
{
    return late_masks_put(&cpu_of(b)->late, step, mask, n, e);
}

void cpu_steps_release(struct cpu_backend *c)
{
    for (int i = 0; i < CPU_RESULTS; i++) {
        free(c->results[i].top_token);
        free(c->results[i].top_logprob);
    }
    stage_tokens_release(&c->tokens);
    late_masks_release(&c->late);
    free(c->arena);
}

/* One array of the batch. */
struct batch_array {
    const void **at; /* the batch's pointer to it */
    size_t n_bytes;
};

/* Replace c->batch's arrays by copies in the arena, which grows to the largest step
 * seen. */
static int copy_arrays(struct cpu_backend *c, struct err *e)
{
    struct batch *b = &c->batch;
    const struct batch_array array[] = {
#define X(field, count) {(const void **)&b->field, (size_t)(b->count) * sizeof(*b->field)},
        BATCH_ARRAYS(X)
#undef X
    };
    size_t total = 0;

    for (size_t i = 0; i < ARRAY_LEN(array); i++) {
        total += (array[i].n_bytes + 15) / 16 * 16;
    }
    if (total > c->arena_bytes) {
        char *bigger = realloc(c->arena, total * 2);
        if (!bigger) {
            return err_nomem(e, "a step");
        }
        c->arena = bigger;
        c->arena_bytes = total * 2;
    }
    size_t at = 0;
    for (size_t i = 0; i < ARRAY_LEN(array); i++) {
        if (*array[i].at && array[i].n_bytes > 0) {
            memcpy(c->arena + at, *array[i].at, array[i].n_bytes);
            *array[i].at = c->arena + at;
        }
        at += (array[i].n_bytes + 15) / 16 * 16;
    }
    return 0;
}

/* Allocate space for the best tokens of this step's samples. */
static int prepare_results(struct cpu_backend *c, struct err *e)
{
    struct cpu_results *r = cpu_results_now(c);
    const struct batch *b = &c->batch;
    int32_t stride = 0;

    for (int32_t i = 0; i < b->n_samples; i++) {
        const struct sample_row *s = &b->sample[i];
        stride = MAX(stride, s->kind == SAMPLE_CANDIDATES ? s->n_candidates : s->n_logprobs);
    }
    int64_t need = (int64_t)stride * b->n_samples;
    if (need > r->top_cap) {
        free(r->top_token);
        free(r->top_logprob);
        r->top_token = malloc((size_t)need * sizeof(*r->top_token));
        r->top_logprob = malloc((size_t)need * sizeof(*r->top_logprob));
        r->top_cap = r->top_token && r->top_logprob ? need : 0;
        if (r->top_cap == 0) {
            return err_nomem(e, "the best tokens of a step");
        }
    }
    r->step = b->step;
    r->n_samples = b->n_samples;
    r->top_stride = stride;
    return 0;
}

/* The blocks of the device or of the host: keys and values, and the tokens' ids. */
struct pool_view {
    char *kv;
    int32_t *token;
};

static struct pool_view device_pool(const struct cpu_backend *c)
{
    return (struct pool_view){c->kv_data, c->slot_token};
}

static struct pool_view host_pool(const struct cpu_backend *c)
{
    return (struct pool_view){c->kv_host,
                              c->slot_token + (int64_t)c->n_blocks * c->kv[0].block_size};
}

static void copy_blocks(struct cpu_backend *c, const struct block_copy *copy, int32_t n,
                        struct pool_view to, struct pool_view from)
{
    size_t bytes = (size_t)kv_layout_block_bytes(&c->kv[0]), size = (size_t)c->kv[0].block_size;

    for (int32_t i = 0; i < n; i++) {
        size_t dst = (size_t)copy[i].dst, src = (size_t)copy[i].src;
        memcpy(to.kv + bytes * dst, from.kv + bytes * src, bytes);
        memcpy(to.token + size * dst, from.token + size * src, size * sizeof(*to.token));
    }
}

/* Note the ids of the step's tokens at their slots of group 0, through whose tables
 * they are read. */
static void note_tokens(struct cpu_backend *c)
{
    for (int32_t i = 0; i < c->batch.n_tokens; i++) {
        if (c->batch.slot[i] >= 0) {
            c->slot_token[c->batch.slot[i]] = cpu_input_token(c, i);
        }
    }
}

static void update_tables(struct cpu_backend *c)
{
    const struct batch *b = &c->batch;

    for (int32_t i = 0; i < b->n_table_update; i++) {
        const struct table_update *u = &b->table_update[i];
        memcpy(cpu_table(c, u->group, u->row) + u->index, b->table_block + u->first,
               (size_t)u->count * sizeof(*c->table));
    }
}

/* Have the rows written of tables that the step's positions read. */
static void reach_rows(struct cpu_backend *c)
{
    int32_t n = 0;

    for (int32_t i = 0; i < c->batch.n_tokens && c->n_late > 0; i++) {
        n = MAX(n, c->batch.position[i] + 1);
    }
    for (int32_t i = 0; i < c->n_late; i++) {
        c->late_rows[i].reach(c->late_rows[i].arg, n);
    }
}

int cpu_step_begin(struct backend *b, const struct batch *batch, struct err *e)
{
    struct cpu_backend *c = cpu_of(b);
    int64_t noted_tokens = (int64_t)c->config.max_blocks_per_seq * c->kv[0].block_size;
    int rc = batch_check(&c->config, "cpu", noted_tokens, batch, e);

    if (rc < 0) {
        return rc;
    }
    c->step_start_us = clock_us();
    c->batch = *batch;
    rc = copy_arrays(c, e);
    if (rc < 0) {
        return rc;
    }
    c->n_begun++;
    cpu_results_now(c)->experts = (struct expert_load){0};
    rc = prepare_results(c, e);
    if (rc < 0) {
        c->n_begun--;
        return rc;
    }
    c->in_step = true;
    struct err why;
    if (c->failed.code == 0 && (rc = stage_tokens_begin(&c->tokens, &c->batch, &why)) < 0) {
        cpu_fail(c, rc, why.text); /* step_end reports it */
    }
    update_tables(c);
    reach_rows(c);
    if (c->kv_data) {
        copy_blocks(c, c->batch.swap_out, c->batch.n_swap_out, host_pool(c), device_pool(c));
        copy_blocks(c, c->batch.swap_in, c->batch.n_swap_in, device_pool(c), host_pool(c));
        copy_blocks(c, c->batch.copy, c->batch.n_copy, device_pool(c), device_pool(c));
        note_tokens(c);
    }
    return 0;
}

int cpu_step_end(struct backend *b, struct err *e)
{
    struct cpu_backend *c = cpu_of(b);

    c->in_step = false;
    struct err why;
    int rc = c->failed.code != 0
                 ? 0
                 : stage_tokens_end(&c->tokens, &c->batch, cpu_results_now(c)->token, &why);
    if (rc < 0) {
        cpu_fail(c, rc, why.text);
    }
    cpu_results_now(c)->device_us = MAX(clock_us() - c->step_start_us, 1);
    cpu_read_ways_step(&c->reads, cpu_hugepages_pending_bytes(c) == 0);
    if (c->failed.code != 0) {
        return err_set(e, c->failed.code, "%s", c->failed.text);
    }
    return 0;
}

int cpu_step_wait(struct backend *b, struct results *ret, struct err *e)
{
    struct cpu_backend *c = cpu_of(b);

    if (c->n_waited == c->n_begun) {
        return err_set(e, ERR_INVALID, "cpu: no step to wait for");
    }
    if (c->failed.code != 0) {
        return err_set(e, c->failed.code, "%s", c->failed.text);
    }
    const struct cpu_results *r = &c->results[++c->n_waited % CPU_RESULTS];
    *ret = (struct results){.step = r->step,
                            .n_samples = r->n_samples,
                            .top_stride = r->top_stride,
                            .token = r->token,
                            .logprob = r->logprob,
                            .top_token = r->top_token,
                            .top_logprob = r->top_logprob,
                            .device_us = r->device_us,
                            .experts = r->experts};
    return 0;
}
