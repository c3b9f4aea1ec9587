#include "engine/stats.h"

void engine_stats_init(struct engine_stats *s)
{
    *s = (struct engine_stats){0};
    hist_init(&s->ttft_s, HIST_TTFT_S, HIST_TTFT_N);
    hist_init(&s->itl_s, HIST_ITL_S, HIST_ITL_N);
    hist_init(&s->tpot_s, HIST_ITL_S, HIST_ITL_N);
    struct hist *latency[] = {&s->e2e_s, &s->queue_s, &s->prefill_s, &s->decode_s};
    for (size_t i = 0; i < ARRAY_LEN(latency); i++) {
        hist_init(latency[i], HIST_LATENCY_S, HIST_LATENCY_N);
    }
    struct hist *tokens[] = {&s->prompt_len, &s->generation_len, &s->iteration_tokens};
    for (size_t i = 0; i < ARRAY_LEN(tokens); i++) {
        hist_init(tokens[i], HIST_TOKENS, HIST_TOKENS_N);
    }
    hist_init(&s->params_n, HIST_N, HIST_N_N);
    hist_init(&s->step_host_s, HIST_STEP_S, HIST_STEP_N);
    hist_init(&s->step_device_s, HIST_STEP_S, HIST_STEP_N);
    hist_init(&s->step_masks_s, HIST_STEP_S, HIST_STEP_N);
}

static void set(_Atomic int64_t *gauge, int64_t value)
{
    atomic_store_explicit(gauge, value, memory_order_relaxed);
}

static void raise_to(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

void engine_stats_gauges(struct engine_stats *s, const struct sched_counts *c, int64_t queued)
{
    set(&s->running, c->running_seqs);
    set(&s->waiting, c->waiting_groups + queued);
    set(&s->swapped, c->swapped_groups);
    set(&s->blocks_used, c->blocks_used);
    set(&s->blocks_cached, c->blocks_cached);
    set(&s->host_blocks_used, c->host_blocks_used);
    raise_to(&s->preempt_swap, c->preempt_swap);
    raise_to(&s->preempt_recompute, c->preempt_recompute);
    raise_to(&s->prefix_queries, c->prefix_queries);
    raise_to(&s->prefix_hits, c->prefix_hits);
    raise_to(&s->drafts, c->drafts);
    raise_to(&s->draft_tokens, c->draft_tokens);
    raise_to(&s->late_masks, c->late_masks);
    for (int32_t i = 0; i < LIMIT_DRAFT; i++) {
        raise_to(&s->accepted_tokens[i], c->accepted_tokens[i]);
    }
    raise_to(&s->prefix_misses, c->prefix_queries - c->prefix_hits);
}

void engine_stats_step(struct engine_stats *s, int32_t n_tokens, int64_t host_us,
                       const struct results *r)
{
    atomic_fetch_add_explicit(&s->steps, 1, memory_order_relaxed);
    hist_add(&s->iteration_tokens, n_tokens);
    hist_add(&s->step_host_s, (double)host_us * 1e-6);
    if (r->device_us > 0) {
        hist_add(&s->step_device_s, (double)r->device_us * 1e-6);
    }
    atomic_fetch_add_explicit(&s->expert_rows, (uint64_t)r->experts.rows, memory_order_relaxed);
    atomic_fetch_add_explicit(&s->expert_peak, (uint64_t)r->experts.peak, memory_order_relaxed);
}
