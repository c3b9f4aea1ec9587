/* A hash of a model, by which ranks make sure that all have the same: different models
 * would give wrong results without an error. */
#include <string.h>
#include <xxhash.h>

#include "models/checkpoint/weights.h"
#include "models/model.h"

static uint64_t text(uint64_t h, const char *s)
{
    return XXH3_64bits_withSeed(s, strlen(s), h);
}

static uint64_t numbers(uint64_t h, const void *n, size_t n_bytes)
{
    return XXH3_64bits_withSeed(n, n_bytes, h);
}

static uint64_t config_digest(const struct model_config *c)
{
    const int64_t whole[] = {c->hidden,
                             c->n_layers,
                             c->n_heads,
                             c->n_kv_heads,
                             c->head_dim,
                             c->intermediate,
                             c->vocab,
                             c->embed_dim,
                             c->max_positions,
                             c->sliding_window,
                             (int64_t)c->norm,
                             c->norm_before,
                             c->final_norm,
                             (int64_t)c->act,
                             c->tied,
                             c->qkv_bias,
                             c->o_bias,
                             c->mlp_bias,
                             c->head_bias,
                             c->parallel,
                             c->qk_norm,
                             c->norm_last,
                             c->ungated_mlp,
                             c->scale_by_layer,
                             c->rope.kind,
                             c->rope.rot_dim,
                             c->experts.n,
                             c->experts.top,
                             c->experts.intermediate,
                             c->experts.shared_intermediate,
                             c->experts.normalised,
                             (int64_t)c->experts.scores,
                             c->experts.choice_bias,
                             c->experts.groups_by_two,
                             c->experts.n_groups,
                             c->experts.top_groups,
                             c->experts.latent,
                             c->experts.self_gated,
                             c->latent.rank,
                             c->latent.q_rank,
                             c->latent.rot_dim,
                             c->latent.nope_dim,
                             c->latent.v_dim,
                             c->rope_interleaved,
                             (int64_t)c->recurrent.kind,
                             c->recurrent.n_heads,
                             c->recurrent.n_groups,
                             c->recurrent.key_dim,
                             c->recurrent.value_dim,
                             c->recurrent.kernel,
                             c->recurrent.conv_bias,
                             c->recurrent.normed,
                             c->recurrent.gate_first,
                             c->recurrent.beside,
                             c->gated_attention};
    const struct head_config *d = &c->head;
    const int64_t head[] = {d->kind,
                            d->layer,
                            d->named,
                            d->normed,
                            d->n_taps,
                            d->draft_vocab,
                            d->norm_before_residual,
                            d->target_hidden,
                            d->parallel,
                            d->mask_token};
    const double real[] = {
        c->norm_eps,        c->norm_offset,          c->embed_scale,          c->rope.theta,
        c->rope.factor,     c->window_theta,         c->query_scalar,         c->logit_scale,
        c->experts.factor,  c->experts.swiglu_limit, c->experts.mixer_jitter, c->recurrent.dt_min,
        c->recurrent.dt_max};
    uint64_t h = text(0, c->architecture);

    h = numbers(h, whole, sizeof(whole));
    h = numbers(h, head, sizeof(head));
    h = numbers(h, d->tap, sizeof(d->tap[0]) * (size_t)MAX(d->n_taps, 0));
    h = numbers(h, c->windowed, sizeof(c->windowed[0]) * (size_t)c->n_layers);
    h = numbers(h, c->unrotated, sizeof(c->unrotated[0]) * (size_t)c->n_layers);
    h = numbers(h, c->factor, sizeof(c->factor));
    h = numbers(h, c->mlp_alone, sizeof(c->mlp_alone[0]) * (size_t)c->n_layers);
    h = numbers(h, c->recurrent.layer, sizeof(c->recurrent.layer[0]) * (size_t)c->n_layers);
    h = numbers(h, c->experts.layer, sizeof(c->experts.layer[0]) * (size_t)c->n_layers);
    return numbers(h, real, sizeof(real));
}

uint64_t model_digest(const struct model *m)
{
    uint64_t h = config_digest(&m->config);
    int32_t n = m->checkpoint ? checkpoint_count(m->checkpoint) : 0;

    for (int32_t i = 0; i < n; i++) {
        const struct tensor *t = checkpoint_at(m->checkpoint, i);
        h = text(text(h, t->name), t->stored_type);
        h = numbers(h, t->dim, sizeof(t->dim[0]) * (size_t)t->n_dims);
    }
    return h;
}
