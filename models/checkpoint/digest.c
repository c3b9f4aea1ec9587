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

static uint64_t rope_digest(uint64_t h, const struct rope_config *r)
{
    const int64_t whole[] = {(int64_t)r->kind, r->rot_dim, r->original_positions, r->truncate};
    const double real[] = {
        r->theta,     r->factor, r->low_freq_factor, r->high_freq_factor, r->beta_fast,
        r->beta_slow, r->mscale, r->mscale_all_dim,  r->attention_factor, r->share,
        r->query_beta};

    h = numbers(h, whole, sizeof(whole));
    h = numbers(h, r->short_factor, sizeof(r->short_factor));
    h = numbers(h, r->long_factor, sizeof(r->long_factor));
    return numbers(h, real, sizeof(real));
}

static uint64_t attention_digest(uint64_t h, const struct model_config *c)
{
    const int64_t whole[] = {c->n_heads,         c->n_kv_heads,      c->head_dim,
                             c->full_head_dim,   c->full_kv_heads,   c->keys_are_values,
                             c->sharing_from,    c->sliding_window,  c->qkv_bias,
                             c->o_bias,          c->qk_norm,         c->wide_qk_norm,
                             c->norm_last,       c->scale_by_layer,  c->rope_interleaved,
                             c->gated_attention, c->latent.rank,     c->latent.q_rank,
                             c->latent.rot_dim,  c->latent.nope_dim, c->latent.v_dim};
    const double real[] = {c->window_theta, c->query_scalar, c->attn_softcap};

    h = rope_digest(h, &c->rope);
    h = numbers(h, whole, sizeof(whole));
    h = numbers(h, c->windowed, sizeof(c->windowed[0]) * (size_t)c->n_layers);
    h = numbers(h, c->unrotated, sizeof(c->unrotated[0]) * (size_t)c->n_layers);
    return numbers(h, real, sizeof(real));
}

/* What is neither attention's nor of a layer of another kind. */
static uint64_t plain_digest(uint64_t h, const struct model_config *c)
{
    const int64_t whole[] = {c->hidden,        c->n_layers,    c->intermediate, c->wide_mlp,
                             c->layer_input,   c->vocab,       c->embed_dim,    c->max_positions,
                             (int64_t)c->norm, c->norm_before, c->final_norm,   (int64_t)c->act,
                             c->tied,          c->mlp_bias,    c->head_bias,    c->parallel,
                             c->ungated_mlp};
    const double real[] = {c->norm_eps, c->norm_offset, c->embed_scale, c->logit_scale,
                           c->final_softcap};

    h = numbers(h, whole, sizeof(whole));
    h = numbers(h, real, sizeof(real));
    h = numbers(h, c->factor, sizeof(c->factor));
    return numbers(h, c->mlp_alone, sizeof(c->mlp_alone[0]) * (size_t)c->n_layers);
}

static uint64_t experts_digest(uint64_t h, const struct model_config *c)
{
    const struct expert_config *e = &c->experts;
    const int64_t whole[] = {e->n,
                             e->top,
                             e->intermediate,
                             e->shared_intermediate,
                             e->normalised,
                             (int64_t)e->scores,
                             e->choice_bias,
                             e->groups_by_two,
                             e->n_groups,
                             e->top_groups,
                             e->latent,
                             e->self_gated};
    const double real[] = {e->factor, e->swiglu_limit, e->mixer_jitter};

    h = numbers(h, whole, sizeof(whole));
    h = numbers(h, real, sizeof(real));
    return numbers(h, e->layer, sizeof(e->layer[0]) * (size_t)c->n_layers);
}

static uint64_t recurrent_digest(uint64_t h, const struct model_config *c)
{
    const struct recurrent_config *r = &c->recurrent;
    const int64_t whole[] = {(int64_t)r->kind, r->n_heads, r->n_groups,   r->key_dim,
                             r->value_dim,     r->kernel,  r->step_rank,  r->conv_bias,
                             r->tiled,         r->normed,  r->gate_first, r->beside};
    const double real[] = {r->dt_min, r->dt_max, r->norm_eps};

    h = numbers(h, whole, sizeof(whole));
    h = numbers(h, real, sizeof(real));
    return numbers(h, r->layer, sizeof(r->layer[0]) * (size_t)c->n_layers);
}

/* Of a draft model that reads its target's layers. */
static uint64_t head_digest(uint64_t h, const struct head_config *d)
{
    const int64_t whole[] = {(int64_t)d->kind,
                             d->layer,
                             d->named,
                             d->normed,
                             d->n_taps,
                             d->draft_vocab,
                             d->norm_before_residual,
                             d->target_hidden,
                             d->parallel,
                             d->mask_token};

    h = numbers(h, whole, sizeof(whole));
    return numbers(h, d->tap, sizeof(d->tap[0]) * (size_t)MAX(d->n_taps, 0));
}

static uint64_t config_digest(const struct model_config *c)
{
    uint64_t h = plain_digest(text(0, c->architecture), c);

    h = attention_digest(h, c);
    h = experts_digest(h, c);
    h = recurrent_digest(h, c);
    return head_digest(h, &c->head);
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
