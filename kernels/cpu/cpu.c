/* Opening and closing the CPU backend, and its table of operations. */
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/comm/comm.h"
#include "kernels/comm/pipeline.h"
#include "kernels/cpu/ways/bf16_way.h"

static void cpu_free(struct backend *b)
{
    struct cpu_backend *c = cpu_of(b);

    cpu_read_ways_keep(&c->reads);
    cpu_hugepages_free(c->hugepages);
    cpu_pool_free(c->pool);
    cpu_steps_release(c);
    cpu_memory_release(c);
    cpu_free_packed(c);
    free(c->rounded.data);
    free(c->panel);
    free(c->attention_unit);
    free(c->attention_partial);
    free(c);
}

static const struct backend_ops cpu_ops = {
    .free = cpu_free,
    .memory = cpu_memory,
    .supports = cpu_supports,
    .weight = cpu_weight,
    .scratch = cpu_scratch,
    .scratch_in_turns = cpu_scratch_in_turns,
    .kv_create = cpu_kv_create,
    .step_begin = cpu_step_begin,
    .masks = cpu_masks,
    .step_end = cpu_step_end,
    .step_wait = cpu_step_wait,
    .embed = cpu_embed,
    .embed_position = cpu_embed_position,
    .norm = cpu_norm,
    .add_norm = cpu_add_norm,
    .linear = cpu_linear,
    .linear_gated = cpu_linear_gated,
    .experts = cpu_experts,
    .rope_kv = cpu_rope_kv,
    .attention = cpu_attention,
    .recurrence = cpu_recurrence,
    .gate_sigmoid = cpu_gate_sigmoid,
    .multiply = cpu_multiply,
    .latent_kv = cpu_latent_kv,
    .latent_attention = cpu_latent_attention,
    .soft_cap = cpu_soft_cap,
    .xielu = cpu_xielu,
    .scale_by_score = cpu_scale_by_score,
    .add = cpu_add,
    .gather = cpu_gather,
    .sample = cpu_sample,
    .all_reduce = cpu_all_reduce,
    .square_sums = cpu_square_sums,
    .norm_by_sums = cpu_norm_by_sums,
    .embed_shard = cpu_embed_part,
    .gather_logits = cpu_gather_logits,
    .stage_receive = cpu_stage_receive,
    .stage_send = cpu_stage_send,
    .hidden_store = cpu_hidden_store,
    .hidden_pool = cpu_hidden_pool,
    .hidden_load = cpu_hidden_load,
    .hidden_own = cpu_hidden_own,
    .hidden_masked = cpu_hidden_masked,
    .spread = cpu_spread,
    .download = cpu_download,
    .upload = cpu_upload,
};

void cpu_fail(struct cpu_backend *c, int rc, const char *what)
{
    if (c->failed.code == 0) {
        err_set(&c->failed, rc, "cpu: %s", what);
        if (c->config.comm) { /* the other ranks are waiting for this one */
            c->config.comm->ops->abort(c->config.comm, what);
        }
        if (c->config.pipeline) {
            c->config.pipeline->ops->abort(c->config.pipeline, what);
        }
    }
}

static int check_config(const struct backend_config *c, struct err *e)
{
    if (c->max_tokens < 1 || c->max_tokens > LIMIT_BATCHED_TOKENS || c->max_seqs < 1 ||
        c->max_seqs > LIMIT_NUM_SEQS || c->max_samples < 0 || c->max_blocks_per_seq < 0 ||
        c->max_blocks_per_seq > LIMIT_MODEL_LEN || c->n_kv_groups < 0 ||
        c->n_kv_groups > LIMIT_KV_GROUPS) {
        return err_set(
            e, ERR_INVALID,
            "cpu: sizes out of range: %d tokens, %d sequences, %d samples, %d blocks a sequence, "
            "%d KV groups",
            c->max_tokens, c->max_seqs, c->max_samples, c->max_blocks_per_seq, c->n_kv_groups);
    }
    return 0;
}

int cpu_backend_open(struct backend **ret, int abi, const struct backend_config *config,
                     struct err *e)
{
    if (abi != BACKEND_ABI) {
        return err_set(e, ERR_UNSUPPORTED, "cpu: built for backend interface %d, asked for %d",
                       BACKEND_ABI, abi);
    }
    int rc = check_config(config, e);
    if (rc < 0) {
        return rc;
    }
    struct cpu_backend *c = calloc(1, sizeof(*c));
    if (!c) {
        return err_nomem(e, "the cpu backend");
    }
    c->base = (struct backend){.ops = &cpu_ops,
                               .name = "cpu",
                               .self_gated_experts = true,
                               .mixer_experts = true,
                               .convolutions = true,
                               .scans = true,
                               .late_head_norms = true,
                               .late_rows = true};
    c->config = *config;
    enum cpu_isa isa;
    enum cpu_bf16 way;
    rc = cpu_isa_detect(&isa, e);
    if (rc == 0) {
        rc = cpu_bf16_detect(&way, isa, e);
    }
    rc = rc < 0 ? rc : cpu_block_ways_init(&c->ways, isa, e);
    if (rc == 0) {
        cpu_read_ways_init(&c->reads, c->ways.timed);
        cpu_kernels_for(&c->k, isa, way);
        rc = cpu_pool_new_local(&c->pool, config->threads, config->local_rank,
                                config->local_world_size, e);
    }
    if (rc == 0) {
        rc = cpu_steps_init(c, e);
    }
    if (rc < 0) {
        cpu_free(&c->base);
        return rc;
    }
    int32_t threads = cpu_pool_threads(c->pool);
    snprintf(c->base.device, sizeof(c->base.device), "%d thread%s, %s%s", threads,
             threads == 1 ? "" : "s", cpu_isa_name(isa),
             way == CPU_BF16_FLOATS ? " by floats" : "");
    *ret = &c->base;
    return 0;
}
