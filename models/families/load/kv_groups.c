/* How the layers of a model are divided into KV groups.
 *
 * Layers with and without the sliding window are two kinds, recurrent ones a third. A
 * group has layers of one kind, and all groups share one pool of blocks, so a block
 * must have room for as many layers in each group: a kind with more layers is divided
 * into several groups (as in vLLM's hybrid allocator; Jenga, Zhang et al. 2025).
 * Gemma-2 has 13 and 13: two groups. Where the numbers do not divide, some places in
 * blocks stay unused.
 *
 * A layer that reads the keys and values of another has no place of its own, nor has
 * one that is an MLP alone. A layer with a recurrence beside its attention has a place
 * of either kind.
 *
 * The division is the same on every pipeline stage, because the stages share block ids;
 * how many layers a block holds is each stage's own.
 */
#include "models/model.h"

enum kind { KIND_FULL, KIND_WINDOWED, KIND_STATES, KINDS };

/* The layer whose place in the cache a layer uses. */
static int32_t owner_of(const struct model_config *c, int32_t layer)
{
    int32_t owner = layer;

    if (layer >= c->sharing_from) {
        owner = c->sharing_from - 1;
        while (owner > 0 && c->windowed[owner] != c->windowed[layer]) {
            owner--;
        }
    }
    return owner;
}

/* The first layer whose keys and values another one reads; n_layers: there is none. */
static int32_t first_owner(const struct model_config *c)
{
    int32_t first = c->n_layers;

    for (int32_t i = c->sharing_from; i < c->n_layers; i++) {
        first = MIN(first, owner_of(c, i));
    }
    return first;
}

int32_t model_first_layer(const struct model_config *c, int32_t stage, int32_t n_stages)
{
    int64_t n = c->n_layers, before = n_stages - 1, last = div_ceil(n * before, n_stages);
    int32_t owner = first_owner(c);

    if (before == 0 || owner >= last || stage == n_stages) {
        return (int32_t)div_ceil(n * stage, n_stages);
    }
    return (int32_t)div_ceil(owner * (int64_t)stage, before);
}

int model_check_stages(const struct model_config *c, int32_t n, struct err *e)
{
    int32_t owner = first_owner(c);

    if (n > c->n_layers) {
        return err_set_param(e, ERR_INVALID, "pipeline_parallel_size",
                             "pipeline_parallel_size %d is more than the %d layers of the model", n,
                             c->n_layers);
    }
    if (n - 1 > owner) {
        return err_set_param(e, ERR_INVALID, "pipeline_parallel_size",
                             "pipeline_parallel_size %d: the last layers of %s read the keys and "
                             "values of layer %d on, so they are on one stage with it; at most %d "
                             "stages are possible",
                             n, c->architecture, owner, owner + 1);
    }
    return 0;
}

/* Whether a layer has a place of a kind. */
static bool has_kind(const struct model_config *c, int32_t layer, enum kind kind)
{
    return kind == KIND_STATES
               ? c->recurrent.layer[layer]
               : model_attends(c, layer) && c->windowed[layer] == (kind == KIND_WINDOWED);
}

static int32_t count_layers(const struct model_config *c, int32_t first, int32_t end,
                            enum kind kind)
{
    int32_t n = 0;

    for (int32_t i = first; i < MIN(end, c->sharing_from); i++) {
        n += has_kind(c, i, kind);
    }
    return n;
}

/* Layers of a block on one stage, with n[kind] groups of each kind. */
static int32_t block_layers(const struct model_config *c, const int32_t *n, int32_t stage,
                            int32_t n_stages)
{
    int32_t first = model_first_layer(c, stage, n_stages), most = 0;
    int32_t end = model_first_layer(c, stage + 1, n_stages);

    for (enum kind kind = 0; kind < KINDS; kind++) {
        int32_t layers = count_layers(c, first, end, kind);
        most = MAX(most, layers > 0 ? (int32_t)div_ceil(layers, n[kind]) : 0);
    }
    return most;
}

/* Places for layers in one block of each group, over all stages. */
static int32_t places(const struct model_config *c, const int32_t *n, int32_t n_stages)
{
    int32_t sum = 0;

    for (int32_t stage = 0; stage < n_stages; stage++) {
        sum += (n[0] + n[1] + n[2]) * block_layers(c, n, stage, n_stages);
    }
    return sum;
}

/* Places that layers need. */
static int32_t needed(const struct model_config *c)
{
    int32_t sum = 0;

    for (enum kind kind = 0; kind < KINDS; kind++) {
        sum += count_layers(c, 0, c->n_layers, kind);
    }
    return sum;
}

/* Replace ret[KINDS] by n where that leaves fewer places unused. */
static int32_t better(const struct model_config *c, const int32_t *n, int32_t n_stages,
                      int32_t best, int32_t *ret)
{
    int32_t cost = places(c, n, n_stages);

    if (cost >= best) {
        return best;
    }
    for (enum kind kind = 0; kind < KINDS; kind++) {
        ret[kind] = n[kind];
    }
    return cost;
}

/* Choose the numbers of groups: the fewest that leave at most a quarter as many places
 * unused as are needed, or else those that leave the fewest. Group 0 has all
 * tokens even if no layer does. */
static void choose(const struct model_config *c, int32_t n_stages, int32_t *ret)
{
    int32_t least[KINDS], best = INT32_MAX, used = needed(c);

    for (enum kind kind = 0; kind < KINDS; kind++) {
        ret[kind] = least[kind] = count_layers(c, 0, c->n_layers, kind) > 0;
    }
    ret[0] = least[0] = least[0] || least[KIND_STATES];
    if (ret[0] + ret[1] + ret[2] == 1) {
        return;
    }
    for (int32_t groups = 2; groups <= LIMIT_KV_GROUPS; groups++) {
        for (int32_t full = least[0]; full <= groups; full++) {
            for (int32_t windowed = least[1]; windowed <= groups - full; windowed++) {
                int32_t n[KINDS] = {full, windowed, groups - full - windowed};
                if (n[2] >= least[2] && (n[1] > 0) == least[1] && (n[2] > 0) == least[2]) {
                    best = better(c, n, n_stages, best, ret);
                }
            }
        }
        if (best - used <= used / 4) {
            return;
        }
    }
}

void model_kv_groups(struct model_kv_groups *ret, const struct model_config *c,
                     const struct model_options *o)
{
    int32_t n[KINDS], n_stages = MAX(o->n_stages, 1);
    int32_t first = model_first_layer(c, o->stage, n_stages);

    *ret = (struct model_kv_groups){.n = 1};
    choose(c, n_stages, n);
    bool alike = n[KIND_STATES] == 0 && c->full_head_dim == 0;
    if ((o->one_kv_group && alike) || n[0] + n[1] + n[2] == 1) {
        ret->n_layers = model_first_layer(c, o->stage + 1, n_stages) - first;
        return;
    }
    ret->n = n[0] + n[1] + n[2];
    ret->n_full = n[0];
    ret->n_windowed = n[1];
    ret->n_layers = MAX(block_layers(c, n, o->stage, n_stages), 1); /* even of MLPs alone */
    for (int32_t k = n[0]; k < ret->n; k++) {
        ret->window[k] = k < n[0] + n[1] ? c->sliding_window : MODEL_KV_STATES;
    }
}

void model_kv_place(const struct model_kv_groups *g, const struct model_config *c, int32_t first,
                    int32_t layer, bool state, int32_t *ret_group, int32_t *ret_index)
{
    layer = owner_of(c, layer);
    enum kind own = state ? KIND_STATES : c->windowed[layer] ? KIND_WINDOWED : KIND_FULL;
    enum kind kind = g->n > 1 ? own : KIND_FULL;
    int32_t before =
        g->n > 1 ? count_layers(c, first, layer, kind) : layer - first; /* of its kind */
    int32_t base = kind == KIND_FULL       ? 0
                   : kind == KIND_WINDOWED ? g->n_full
                                           : g->n_full + g->n_windowed;

    *ret_group = base + before / g->n_layers;
    *ret_index = before % g->n_layers;
}

int32_t model_state_tokens(const struct model_config *c, int32_t n_ranks, enum dtype kv)
{
    struct recurrence r = model_recurrence(&c->recurrent, n_ranks);
    int64_t token = (int64_t)2 * model_n_kv_heads(c, n_ranks) * c->head_dim * dtype_bytes(kv);

    if (r.n_heads == 0) {
        return 1;
    }
    return (int32_t)MIN(div_ceil(recurrence_floats(&r) * 4, token), INT32_MAX);
}

void model_kv_layouts(struct kv_layout *ret, const struct model_config *c,
                      const struct model_options *o, int32_t block_size, enum dtype kv)
{
    struct recurrence r = model_recurrence(&c->recurrent, MAX(o->n_ranks, 1));
    struct model_kv_groups groups;

    model_kv_groups(&groups, c, o);
    for (int32_t k = 0; k < groups.n; k++) {
        if (groups.window[k] == MODEL_KV_STATES) {
            kv_layout_init_states(&ret[k], block_size, groups.n_layers, recurrence_floats(&r));
        } else if (c->latent.rank > 0) {
            kv_layout_init_latent(&ret[k], block_size, groups.n_layers,
                                  c->latent.rank + c->latent.rot_dim, kv);
        } else {
            bool full = c->full_head_dim > 0 && groups.window[k] == 0;
            int32_t n_ranks = MAX(o->n_ranks, 1);
            kv_layout_init(&ret[k], block_size, groups.n_layers,
                           full ? model_full_kv_heads(c, n_ranks) : model_n_kv_heads(c, n_ranks),
                           full ? c->full_head_dim : c->head_dim, kv);
        }
    }
    if (r.n_heads > 0 || c->full_head_dim > 0) {
        kv_layouts_pad(ret, groups.n);
    }
}
