/* Sizes: the limits of a step by device, and the KV pool by free memory. */
#include <string.h>

#include "engine/sched/kv/kv_window.h"
#include "engine/workers/runner.h"

#define CPU_KV_BYTES ((int64_t)2 << 30)
/* Default durations of a step, which bound how long running sequences wait for another
 * request's prefill. GPU_ITL_US gives steps large enough to amortise reading the caches
 * of all sequences that decode, with reserve for slow steps; under a steady load steps
 * are shorter, because they take only the tokens that are due. Products over multiples
 * of GPU_STEP_QUANTUM rows cost less per row than sizes in between. FAIR_ITL_US applies
 * to a CPU under policy: fair: a new request waits for the running step. */
enum { GPU_ITL_US = 54000, GPU_STEP_QUANTUM = 1024, FAIR_ITL_US = 50000 };
/* Default duration of a GPU's step while several tenants are active: the running step
 * and its own delay a new request to no more than about twice its time alone. */
enum { GPU_SHARED_US = 9000 };
enum { SCORES_MAX = 1024, MAX_BLOCKS = 1 << 26 };

static int32_t either(int64_t given, int32_t otherwise)
{
    return given > 0 ? (int32_t)given : otherwise;
}

/* The KV groups, which are the same on all ranks. Without paging there is one. */
static void set_kv_groups(struct executor_info *ret, const struct settings *s,
                          const struct model_config *c)
{
    struct model_kv_groups groups;
    struct model_options o = {.n_stages = (int32_t)MAX(s->pipeline_parallel_size, 1),
                              .one_kv_group = s->kv_policy != KV_PAGED};

    model_kv_groups(&groups, c, &o);
    ret->n_kv_groups = groups.n;
    memcpy(ret->kv_window, groups.window, sizeof(ret->kv_window));
    ret->kv_chunked = c->chunked;
}

/* With recurrent states: the size of a block, raised to a multiple of block_size whose
 * keys and values take as much memory as a state, and the distance of snapshots. */
static int set_states(struct executor_info *ret, const struct settings *s,
                      const struct model_config *c, bool gpu, struct err *e)
{
    enum { USUAL_DISTANCE = 256 };
    int32_t n_ranks = (int32_t)MAX(s->tensor_parallel_size, 1), size = ret->block_size;
    enum dtype kv = runner_kv_dtype(s, c, gpu ? runner_dtype(s, c) : DTYPE_F32);

    if (c->recurrent.n_heads == 0) {
        return 0;
    }
    if (s->kv_policy != KV_PAGED) {
        return err_set_param(e, ERR_UNSUPPORTED, "kv_policy",
                             "kv_policy must be paged for a model with recurrent states");
    }
    int64_t tokens = div_ceil(model_state_tokens(c, n_ranks, kv), size) * size;
    if (tokens > LIMIT_STATE_BLOCK_TOKENS) {
        return err_set(e, ERR_UNSUPPORTED,
                       "a recurrent state takes as much memory as %lld tokens of keys and values; "
                       "a block can have %d",
                       (long long)tokens, LIMIT_STATE_BLOCK_TOKENS);
    }
    ret->block_size = (int32_t)tokens;
    int64_t distance = s->state_snapshot_tokens > 0 ? s->state_snapshot_tokens
                                                    : div_ceil(USUAL_DISTANCE, tokens) * tokens;
    if (distance % tokens != 0) {
        return err_set_param(e, ERR_INVALID, "state_snapshot_tokens",
                             "state_snapshot_tokens is %lld, and must be a multiple of the %lld "
                             "tokens of a block, whose size is that of a recurrent state",
                             (long long)distance, (long long)tokens);
    }
    ret->snapshot_distance = (int32_t)distance;
    return 0;
}

/* Tokens that a step adds to a sequence at most in KV group k. */
static int32_t step_tokens(const struct executor_info *x, int32_t k)
{
    return x->kv_window[k] == KV_WINDOW_STATE ? MIN(x->max_num_batched_tokens, x->snapshot_distance)
                                              : x->max_num_batched_tokens;
}

/* Blocks of the longest sequence, in all KV groups. */
static int64_t blocks_of(const struct executor_info *x, int64_t n_tokens)
{
    int64_t all = div_ceil(n_tokens, x->block_size), n = 0;

    for (int32_t k = 0; k < executor_kv_groups(x); k++) {
        struct kv_window w =
            kv_window_of(x->kv_window[k], x->kv_chunked, MAX(x->kv_window_align, 1), x->block_size);
        n += MIN(all, window_blocks(w, step_tokens(x, k)));
    }
    return n;
}

/* Tokens of the longest sequence that n blocks hold, at most `most`. */
static int64_t tokens_held(const struct executor_info *x, int64_t n, int64_t most)
{
    int64_t least = 0;

    while (least < most) {
        int64_t half = most - (most - least) / 2;
        if (blocks_of(x, half) <= n) {
            least = half;
        } else {
            most = half - 1;
        }
    }
    return least;
}

enum dtype runner_kv_dtype(const struct settings *s, const struct model_config *c, enum dtype act)
{
    bool wide = runner_dtype(s, c) == DTYPE_F32 || c->latent.rank > 0;

    switch (s->kv_cache_dtype) {
    case KV_CACHE_BF16:
        return DTYPE_BF16;
    case KV_CACHE_F32:
        return DTYPE_F32;
    case KV_CACHE_FP8:
        return DTYPE_F8;
    case KV_CACHE_INT8:
        return DTYPE_I8;
    default: /* activations of float32 beside weights of 16 bits or fewer are a CPU's */
        return act == DTYPE_F32 && !wide ? DTYPE_BF16 : act;
    }
}

int runner_limits(struct executor_info *ret, const struct settings *s, const struct model_config *c,
                  bool gpu, struct err *e)
{
    if (c->latent.rank > 0 &&
        (s->kv_cache_dtype == KV_CACHE_FP8 || s->kv_cache_dtype == KV_CACHE_INT8)) {
        return err_set_param(e, ERR_UNSUPPORTED, "kv_cache_dtype",
                             "kv_cache_dtype must be auto, bf16 or float32 for a model with latent "
                             "attention: latents are not cached in 8 bits");
    }
    if (s->max_model_len > c->max_positions) {
        return err_set_param(e, ERR_INVALID, "max_model_len",
                             "max_model_len is %lld, but the model was made for %d positions",
                             (long long)s->max_model_len, c->max_positions);
    }
    ret->vocab = c->vocab;
    ret->block_size = (int32_t)s->block_size;
    set_kv_groups(ret, s, c);
    int rc = set_states(ret, s, c, gpu, e);
    if (rc < 0) {
        return rc;
    }
    ret->max_len = either(s->max_model_len, MIN(c->max_positions, LIMIT_MODEL_LEN));
    ret->max_num_seqs = either(s->max_num_seqs, gpu ? 1024 : 64);
    ret->step_quantum = gpu ? GPU_STEP_QUANTUM : 0;
    ret->target_itl_us = gpu ? GPU_ITL_US : s->policy == POLICY_FAIR ? FAIR_ITL_US : 0;
    ret->shared_itl_us = gpu ? GPU_SHARED_US : FAIR_ITL_US;
    ret->max_num_batched_tokens =
        MAX(either(s->max_num_batched_tokens, gpu ? 8192 : 512), ret->max_num_seqs);
    /* Prompt log-probabilities take a row a token beside those of the sequences. */
    ret->max_samples = ret->max_num_seqs + MIN(ret->max_num_batched_tokens, SCORES_MAX);
    return 0;
}

int runner_draft_limits(struct executor_info *ret, const struct settings *s,
                        const struct model_config *c, const struct model_config *target, bool gpu,
                        struct err *e)
{
    struct executor_info of_target = {0};
    int rc = runner_limits(ret, s, c, gpu, e);

    /* blocks of as many tokens as the target's, which its states may raise */
    rc = rc ? rc : runner_limits(&of_target, s, target, gpu, e);
    ret->n_kv_groups = 1;
    ret->kv_window[0] = 0;
    ret->block_size = of_target.block_size;
    return rc;
}

/* Bytes for the device's pool if kv_blocks is not set. */
static int64_t pool_bytes(const struct settings *s, const struct backend_memory *m, bool gpu)
{
    if (s->kv_cache_memory > 0) {
        return s->kv_cache_memory;
    }
    if (!gpu) {
        return MIN(CPU_KV_BYTES, m->free_bytes / 4);
    }
    int64_t taken = m->total_bytes - m->free_bytes;
    return (int64_t)(s->gpu_memory_utilization * (double)m->total_bytes) - taken;
}

/* Blocks of the host pool. On a GPU it holds preempted sequences. On a CPU, host memory
 * is device memory and swapping would only copy, so there is a host pool only if
 * preemption is set to swap. */
static int64_t host_blocks(const struct settings *s, const struct executor_info *x, bool gpu)
{
    bool wanted = gpu ? s->preemption != PREEMPT_RECOMPUTE : s->preemption == PREEMPT_SWAP;

    return wanted ? MIN(s->swap_space / x->block_bytes, x->n_blocks) : 0;
}

int runner_pools(struct executor_info *ret, const struct settings *s,
                 const struct backend_memory *m, bool gpu, struct err *e)
{
    int64_t bytes = pool_bytes(s, m, gpu), block_bytes = ret->block_bytes + ret->draft_block_bytes;
    int64_t n = s->kv_blocks > 0 ? s->kv_blocks : bytes / block_bytes;

    n = MIN(n, MAX_BLOCKS);
    if (n < 1) {
        return err_set_param(e, ERR_INVALID, gpu ? "gpu_memory_utilization" : "kv_cache_memory",
                             "no memory for the KV cache: %lld MiB are left for it, one block "
                             "takes %lld KiB; %lld of %lld MiB "
                             "of the device are free",
                             (long long)(MAX(bytes, 0) >> 20), (long long)(block_bytes >> 10),
                             (long long)(m->free_bytes >> 20), (long long)(m->total_bytes >> 20));
    }
    if (n * block_bytes > m->free_bytes) {
        return err_set_param(e, ERR_INVALID, s->kv_blocks > 0 ? "kv_blocks" : "kv_cache_memory",
                             "%lld blocks of %lld KiB are %lld MiB, but %lld MiB are free",
                             (long long)n, (long long)(block_bytes >> 10),
                             (long long)(n * block_bytes >> 20), (long long)(m->free_bytes >> 20));
    }
    ret->n_blocks = (int32_t)n;
    ret->n_host_blocks = (int32_t)host_blocks(s, ret, gpu);
    int64_t holds = tokens_held(ret, n, MAX(ret->max_len, s->max_model_len));
    if (s->max_model_len > holds) {
        return err_set_param(e, ERR_INVALID, "max_model_len",
                             "max_model_len is %lld, but the KV cache holds %lld tokens; lower it, "
                             "or give the cache more memory",
                             (long long)s->max_model_len, (long long)holds);
    }
    if (holds < 1) {
        return err_set_param(e, ERR_INVALID, s->kv_blocks > 0 ? "kv_blocks" : "kv_cache_memory",
                             "%lld KV blocks of %lld KiB do not hold one token: it takes a block "
                             "in each of %d KV groups, and more where states are kept",
                             (long long)n, (long long)(ret->block_bytes >> 10),
                             executor_kv_groups(ret));
    }
    ret->max_len = (int32_t)MIN(ret->max_len, holds);
    return 0;
}
