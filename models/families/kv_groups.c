/* How the layers of a model are divided into KV groups.
 *
 * Layers with and without the sliding window are two kinds. A group has layers of one
 * kind, and all groups share one pool of blocks, so a block must have room for as many
 * layers in each group: a kind with more layers is divided into several groups (as in
 * vLLM's hybrid allocator; Jenga, Zhang et al. 2025). Gemma-2 has 13 and 13: two
 * groups. Where the numbers do not divide, some places in blocks stay unused.
 *
 * The division is the same on every pipeline stage, because the stages share block ids;
 * how many layers a block holds is each stage's own.
 */
#include "models/model.h"

enum { KINDS = 2 }; /* without the window, with it */

static int32_t count_layers(const struct model_config *c, int32_t first, int32_t end, bool windowed)
{
    int32_t n = 0;

    for (int32_t i = first; i < end; i++) {
        n += c->windowed[i] == windowed;
    }
    return n;
}

/* Layers of a block on one stage, with n[kind] groups of each kind. */
static int32_t block_layers(const struct model_config *c, const int32_t *n, int32_t stage,
                            int32_t n_stages)
{
    int32_t first = model_first_layer(c, stage, n_stages), most = 0;
    int32_t end = model_first_layer(c, stage + 1, n_stages);

    for (int32_t kind = 0; kind < KINDS; kind++) {
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
        sum += (n[0] + n[1]) * block_layers(c, n, stage, n_stages);
    }
    return sum;
}

/* Choose the numbers of groups: the fewest that leave at most a quarter as many places
 * unused as there are layers, or else those that leave the fewest. */
static void choose(const struct model_config *c, int32_t n_stages, int32_t *ret)
{
    int32_t full = count_layers(c, 0, c->n_layers, false), best = INT32_MAX;

    ret[0] = full > 0;
    ret[1] = full < c->n_layers;
    if (full == 0 || full == c->n_layers) {
        return;
    }
    for (int32_t groups = KINDS; groups <= LIMIT_KV_GROUPS; groups++) {
        for (int32_t n_full = 1; n_full < groups; n_full++) {
            int32_t n[KINDS] = {n_full, groups - n_full}, cost = places(c, n, n_stages);
            if (cost < best) {
                best = cost;
                ret[0] = n[0];
                ret[1] = n[1];
            }
        }
        if (best - c->n_layers <= c->n_layers / 4) {
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
    if (o->one_kv_group || n[0] + n[1] == 1) {
        ret->n_layers = model_first_layer(c, o->stage + 1, n_stages) - first;
        return;
    }
    ret->n = n[0] + n[1];
    ret->n_full = n[0];
    ret->n_layers = block_layers(c, n, o->stage, n_stages);
    for (int32_t k = n[0]; k < ret->n; k++) {
        ret->window[k] = c->sliding_window;
    }
}

void model_kv_layout(struct kv_layout *ret, const struct model_kv_groups *g,
                     const struct model_config *c, int32_t n_ranks, int32_t block_size,
                     enum dtype dtype)
{
    if (c->latent.rank > 0) {
        kv_layout_init_latent(ret, block_size, g->n_layers, c->latent.rank + c->latent.rot_dim,
                              dtype);
        return;
    }
    kv_layout_init(ret, block_size, g->n_layers, model_n_kv_heads(c, n_ranks), c->head_dim, dtype);
}

void model_kv_place(const struct model_kv_groups *g, const struct model_config *c, int32_t first,
                    int32_t layer, int32_t *ret_group, int32_t *ret_index)
{
    bool windowed = g->n > 1 && c->windowed[layer];
    int32_t before =
        g->n > 1 ? count_layers(c, first, layer, windowed) : layer - first; /* of its kind */

    *ret_group = (windowed ? g->n_full : 0) + before / g->n_layers;
    *ret_index = before % g->n_layers;
}
