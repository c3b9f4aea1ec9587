/* The second pass of hfconfig.c: makes a model_config of the values in config.json and
 * the architecture's defaults, and checks fields against each other.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "models/checkpoint/hfconfig_internal.h"

static const char CONFIG[] = "config.json";

static bool either(int8_t given, bool otherwise)
{
    return given < 0 ? otherwise : given;
}

static double real_or(double given, double otherwise)
{
    return isnan(given) ? otherwise : given;
}

static int unknown_architecture(const char *name, struct err *e)
{
    enum { ROOM = 240 };
    char known[ROOM + 128] = "";
    int more = 0;

    for (int i = 0; model_families[i]; i++) {
        for (const struct architecture *a = model_families[i]->architectures; a->name; a++) {
            size_t len = strlen(known);
            if (len < ROOM) {
                snprintf(known + len, sizeof(known) - len, "%s%s", len ? ", " : "", a->name);
            } else {
                more++;
            }
        }
    }
    for (const struct wrapper *w = model_wrappers; w->name; w++) {
        more++;
    }
    snprintf(known + strlen(known), sizeof(known) - strlen(known), " and %d more (docs/models.md)",
             more);
    if (!*name) {
        return err_set(e, ERR_INVALID, "%s: architectures is missing; known are %s", CONFIG, known);
    }
    return err_set(e, ERR_UNSUPPORTED, "%s: architecture %s is not known; known are %s", CONFIG,
                   name, known);
}

int raw_architecture_check(const char *name, struct err *e)
{
    const struct architecture *a;

    return model_family_find(name, &a) || model_is_wrapper(name) ? 0
                                                                 : unknown_architecture(name, e);
}

static int set_activation(struct model_config *c, const char *name, struct err *e)
{
    static const struct {
        const char *name;
        enum activation act;
    } ACTS[] = {
        {"silu", ACT_SILU},
        {"swish", ACT_SILU},
        {"relu", ACT_RELU},
        {"gelu", ACT_GELU_ERF},
        {"gelu_new", ACT_GELU_TANH},
        {"gelu_fast", ACT_GELU_TANH},
        {"gelu_pytorch_tanh", ACT_GELU_TANH},
    };

    for (size_t i = 0; i < ARRAY_LEN(ACTS) && *name; i++) {
        if (strcmp(name, ACTS[i].name) == 0) {
            c->act = ACTS[i].act;
            return 0;
        }
    }
    if (!*name) {
        return 0;
    }
    return err_set(
        e, ERR_UNSUPPORTED,
        "%s: hidden_act is '%s', allowed are silu, swish, relu, gelu, gelu_new, gelu_fast, "
        "gelu_pytorch_tanh",
        CONFIG, name);
}

/* The activation of an MLP without a gate, which is relu(u) * u or xielu(u). */
static int check_ungated(const char *name, bool xielu, struct err *e)
{
    const char *want = xielu ? "xielu" : "relu2";

    return !*name || strcmp(name, want) == 0
               ? 0
               : err_set(e, ERR_UNSUPPORTED, "%s: hidden_act is '%s', allowed is %s", CONFIG, name,
                         want);
}

/* Granite's factors. x += f y of every residual is computed as x / f += y: norms do not
 * see the difference if their eps is divided by f squared. */
static void set_multipliers(struct model_config *c, const struct raw_config *r)
{
    double residual = real_or(r->residual_factor, 1);

    c->embed_scale = (float)(c->embed_scale * real_or(r->embedding_factor, 1) / residual);
    c->norm_eps = (float)(c->norm_eps / (residual * residual));
}

/* Key/value heads; Falcon's files have them, or say that there is one. */
static int32_t n_kv_heads(const struct raw_config *r, const struct architecture *a)
{
    if (a->multi_query && r->grouped != 1) {
        return either(r->multi_query, true) ? 1 : r->n_heads;
    }
    return r->n_kv_heads > 0 ? r->n_kv_heads : r->n_heads;
}

static int set_shape(struct model_config *c, const struct raw_config *r,
                     const struct architecture *a, struct err *e)
{
    int32_t n_layers = r->n_layers > 0 ? r->n_layers : r->n_layer_types;
    int32_t positions =
        r->max_positions < 0 && a->max_positions > 0 ? a->max_positions : r->max_positions;
    const struct {
        const char *key;
        int32_t value;
    } required[] = {{"hidden_size", r->hidden},
                    {"num_hidden_layers", n_layers},
                    {"num_attention_heads", r->n_heads},
                    {"vocab_size", r->vocab},
                    {"max_position_embeddings", positions}};

    for (size_t i = 0; i < ARRAY_LEN(required); i++) {
        if (required[i].value < 0 && c->wrapped && !r->text_found) {
            return err_set(e, ERR_INVALID,
                           "%s: text_config is missing, in which %s has the sizes of its text "
                           "model",
                           CONFIG, c->architecture);
        }
        if (required[i].value < 0) {
            return err_set(e, ERR_INVALID, "%s: %s is missing", CONFIG, required[i].key);
        }
    }
    c->hidden = r->hidden;
    c->n_layers = c->sharing_from = n_layers;
    c->n_heads = r->n_heads;
    c->vocab = r->vocab;
    c->max_positions = positions;
    c->n_kv_heads = n_kv_heads(r, a);
    c->head_dim = r->head_dim > 0 ? r->head_dim : r->hidden / r->n_heads;
    if (c->latent.rank > 0) {
        c->n_kv_heads = 1;
        c->head_dim = c->latent.nope_dim + c->latent.rot_dim;
    }
    c->intermediate = r->intermediate > 0 ? r->intermediate : 4 * r->hidden;
    c->embed_dim = r->embed_dim > 0 ? r->embed_dim : r->hidden;
    c->embed_scale = a->gemma || r->scales_embeddings == 1 ? sqrtf((float)r->hidden) : 1;
    set_multipliers(c, r);
    if (r->head_dim < 0 && c->latent.rank == 0 && r->hidden % r->n_heads != 0) {
        return err_set(e, ERR_INVALID,
                       "%s: hidden_size %d is no multiple of num_attention_heads %d, and head_dim "
                       "is not given",
                       CONFIG, r->hidden, r->n_heads);
    }
    if (c->head_dim < 1 || c->head_dim > LIMIT_HEAD_DIM) {
        return err_set(e, ERR_INVALID, "%s: head_dim is %d, allowed are 1 to %d", CONFIG,
                       c->head_dim, LIMIT_HEAD_DIM);
    }
    if (c->n_heads % c->n_kv_heads != 0) {
        return err_set(e, ERR_INVALID,
                       "%s: num_attention_heads %d is no multiple of num_key_value_heads %d",
                       CONFIG, c->n_heads, c->n_kv_heads);
    }
    return 0;
}

/* The sizes of latents. The refusals here concern what the architecture allows and no
 * model of it uses. */
static int set_latent(struct model_config *c, const struct raw_config *r,
                      const struct architecture *a, struct err *e)
{
    const struct {
        const char *key;
        int32_t value;
        int32_t *to;
    } sizes[] = {{"kv_lora_rank", r->latent_rank, &c->latent.rank},
                 {"qk_rope_head_dim", r->rot_dim, &c->latent.rot_dim},
                 {"qk_nope_head_dim", r->nope_dim, &c->latent.nope_dim},
                 {"v_head_dim", r->v_dim, &c->latent.v_dim}};

    if (!a->latent) {
        return 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        if (sizes[i].value < 0) {
            return err_set(e, ERR_INVALID, "%s: %s is missing", CONFIG, sizes[i].key);
        }
        *sizes[i].to = sizes[i].value;
    }
    c->latent.q_rank = MAX(r->q_rank, 0);
    if (c->latent.rank + c->latent.rot_dim > LIMIT_LATENT_DIM) {
        return err_set(e, ERR_INVALID,
                       "%s: kv_lora_rank %d and qk_rope_head_dim %d are more than %d together",
                       CONFIG, c->latent.rank, c->latent.rot_dim, LIMIT_LATENT_DIM);
    }
    if (r->attention_bias == 1) {
        return err_set(e, ERR_UNSUPPORTED, "%s: attention_bias true is not supported with %s",
                       CONFIG, c->architecture);
    }
    return 0;
}

/* How the experts of a token are chosen, where that is not by the greatest softmax. */
static int set_routing(struct model_config *c, const struct raw_config *r,
                       const struct architecture *a, struct err *e)
{
    struct expert_config *x = &c->experts;
    const char *scoring = a->sigmoid_experts ? "sigmoid" : "softmax";
    bool grouped = a->sigmoid_experts || strcmp(r->choice, "group_limited_greedy") == 0;
    bool plain = !*r->choice || strcmp(r->choice, "greedy") == 0;

    x->factor = (float)real_or(r->expert_factor, 1);
    x->scores = a->sigmoid_experts ? SCORES_SIGMOID
                : a->mixer_experts ? SCORES_MIXER
                                   : SCORES_SOFTMAX;
    x->groups_by_two = a->sigmoid_experts;
    x->mixer_jitter = a->mixer_experts ? (float)real_or(r->mixer_jitter, 0.01) : 0;
    x->choice_bias = (a->sigmoid_experts || a->choice_bias) && r->expert_bias != 0;
    x->n_groups = grouped ? MAX(r->n_groups, 1) : 1;
    x->top_groups = grouped ? MAX(r->top_groups, 1) : 1;
    bool named = strcmp(r->scoring, scoring) == 0;
    if (a->sigmoid_experts && strcmp(r->scoring, "noaux_tc") == 0) { /* dots.llm1's name for it */
        named = true;
    }
    if (*r->scoring && !named) {
        return err_set(e, ERR_UNSUPPORTED, "%s: scoring_func is '%s', %s has '%s'", CONFIG,
                       r->scoring, c->architecture, scoring);
    }
    if (a->sigmoid_experts ? *r->choice && strcmp(r->choice, "noaux_tc") != 0
                           : !plain && !grouped) {
        return err_set(e, ERR_UNSUPPORTED, "%s: topk_method '%s' is not supported with %s", CONFIG,
                       r->choice, c->architecture);
    }
    if (!grouped && !*r->choice && r->n_groups > 1 && r->top_groups < r->n_groups) {
        return err_set(e, ERR_UNSUPPORTED, "%s: n_group %d is not supported with %s", CONFIG,
                       r->n_groups, c->architecture);
    }
    if (x->n % x->n_groups != 0 || x->top_groups > x->n_groups ||
        x->n / x->n_groups * x->top_groups < x->top) {
        return err_set(e, ERR_INVALID,
                       "%s: %d experts in n_group %d, of which topk_group %d count, do not give "
                       "each token num_experts_per_tok %d",
                       CONFIG, x->n, x->n_groups, x->top_groups, x->top);
    }
    if (a->mixer_experts && x->top != 2) {
        return err_set(e, ERR_UNSUPPORTED, "%s: num_experts_per_tok is %d, %s chooses 2", CONFIG,
                       x->top, c->architecture);
    }
    if (x->groups_by_two && x->n / x->n_groups < 2) {
        return err_set(e, ERR_INVALID, "%s: n_group is %d for %d experts; a group needs two",
                       CONFIG, x->n_groups, x->n);
    }
    return 0;
}

/* The layers of experts; MoE architectures of one width (Mixtral) give the experts' as
 * intermediate_size. */
static int set_experts(struct model_config *c, const struct raw_config *r,
                       const struct architecture *a, struct err *e)
{
    struct expert_config *x = &c->experts;

    int32_t least = a->scan ? 2 : 1; /* Jamba's files say 1 for none */
    if (!a->experts || r->enable_experts == 0 || (a->optional_experts && r->n_experts < least)) {
        return 0;
    }
    if (r->n_experts < 1 || r->top_experts < 1) {
        return err_set(e, ERR_INVALID, "%s: %s is missing", CONFIG,
                       r->n_experts < 1 ? "num_experts (num_local_experts, n_routed_experts)"
                                        : "num_experts_per_tok");
    }
    if (r->top_experts > r->n_experts) {
        return err_set(e, ERR_INVALID, "%s: num_experts_per_tok is %d of %d experts", CONFIG,
                       r->top_experts, r->n_experts);
    }
    x->n = r->n_experts;
    x->top = r->top_experts;
    x->intermediate = r->expert_intermediate > 0 ? r->expert_intermediate : c->intermediate;
    int32_t n_shared = r->n_shared >= 0              ? r->n_shared
                       : r->shared_intermediate >= 0 ? 0
                                                     : a->n_shared;
    x->shared_intermediate =
        n_shared > 0 ? n_shared * x->intermediate : MAX(r->shared_intermediate, 0);
    x->normalised = either(r->normalise_experts, a->normalises_experts);
    x->swiglu_limit = a->swiglu_limit > 0 ? (float)real_or(r->swiglu_limit, a->swiglu_limit) : 0;
    if (a->swiglu_limit > 0 && fabs(real_or(r->swiglu_alpha, 1.702) - 1.702) > 1e-6) {
        return err_set(e, ERR_UNSUPPORTED, "%s: swiglu_alpha is %g, allowed is 1.702", CONFIG,
                       r->swiglu_alpha);
    }
    for (int32_t i = 0; i < c->n_layers; i++) {
        x->layer[i] = !r->dense_layer[i] && (i + 1) % MAX(r->sparse_step, 1) == 0 &&
                      i >= (r->dense_layers >= 0 ? r->dense_layers : a->dense_layers) &&
                      i % MAX(r->expert_interval, 1) == 0 &&
                      (r->last_expert_layer < 0 || i <= r->last_expert_layer);
    }
    return set_routing(c, r, a, e);
}

/* Which layers are recurrent: as listed, or all but every full_attention_every-th. */
static void set_recurrent_layers(struct model_config *c, const struct raw_config *r,
                                 const struct architecture *a)
{
    int32_t every = r->attention_every > 0 ? r->attention_every : a->full_attention_every;

    for (int32_t i = 0; i < c->n_layers; i++) {
        bool usual = every == 0 || (i + 1) % every != 0;
        c->recurrent.layer[i] = r->n_layer_types >= 0 ? r->layer_recurrent[i]
                                : r->attention_listed ? !r->layer_attends[i]
                                                      : usual;
        c->windowed[i] = c->windowed[i] && !c->recurrent.layer[i];
    }
}

/* Convolutions of recurrent layers have silu; those of LFM2 have no activation. */
static int check_state_act(const struct model_config *c, const struct raw_config *r,
                           const struct architecture *a, struct err *e)
{
    bool silu = a->nemotron ? !*r->state_act || strcmp(r->state_act, "silu") == 0
                            : a->conv || c->act == ACT_SILU;

    return silu ? 0
                : err_set(e, ERR_UNSUPPORTED, "%s: %s is '%s', allowed in recurrent layers is silu",
                          CONFIG, a->nemotron ? "mamba_hidden_act" : "hidden_act",
                          a->nemotron ? r->state_act : r->act);
}

static int set_recurrent(struct model_config *c, const struct raw_config *r,
                         const struct architecture *a, struct err *e)
{
    struct recurrent_config *x = &c->recurrent;
    int32_t inner = r->state_inner > 0 ? r->state_inner : MAX(r->state_expand, 2) * c->hidden;

    bool recurrent = a->delta || a->ssd || a->conv || a->scan;

    for (int32_t i = 0; i < r->n_layer_types; i++) {
        if ((r->layer_recurrent[i] && !recurrent) || (r->layer_alone[i] && !a->nemotron)) {
            return err_set(e, ERR_INVALID, "%s: layer_types: layer %d is %s; %s has no such layers",
                           CONFIG, i, r->layer_recurrent[i] ? "recurrent" : "an MLP alone",
                           a->name);
        }
    }
    if (!recurrent) {
        return 0;
    }
    int rc = check_state_act(c, r, a, e);
    if (rc < 0) {
        return rc;
    }
    if (a->scan) {
        return raw_jamba_derive(c, r, e);
    }
    if (a->conv) {
        set_recurrent_layers(c, r, a);
        return raw_lfm2_derive(c, r, e);
    }
    x->kind = a->delta ? RECURRENCE_DELTA : RECURRENCE_SSD;
    x->n_heads = r->state_heads;
    x->n_groups = r->state_groups;
    x->key_dim = r->state_key_dim;
    x->kernel = r->state_kernel > 0 ? r->state_kernel : 4;
    x->conv_bias = a->ssd && either(r->conv_bias, true);
    if (x->n_heads < 1 || x->n_groups < 1 || x->key_dim < 1) {
        return err_set(e, ERR_INVALID, "%s: the heads of the recurrent layers are missing", CONFIG);
    }
    x->value_dim = r->state_value_dim > 0 ? r->state_value_dim : inner / x->n_heads;
    if (x->n_heads % x->n_groups != 0 || x->value_dim < 1 || x->value_dim > LIMIT_HEAD_DIM) {
        return err_set(e, ERR_INVALID,
                       "%s: recurrent layers of %d heads of %d in %d groups are not possible",
                       CONFIG, x->n_heads, x->value_dim, x->n_groups);
    }
    x->normed = true;
    x->gate_first = a->ssd;
    x->norm_eps = (float)real_or(r->norm_eps, a->norm_eps); /* without a residual's factor */
    x->dt_min = (float)real_or(r->time_limit[0], 0);
    x->dt_max = (float)real_or(r->time_limit[1], INFINITY);
    set_recurrent_layers(c, r, a);
    return 0;
}

/* Granite's hybrids without experts call their MLP shared. */
static void set_granite(struct model_config *c, const struct raw_config *r)
{
    if (r->shared_intermediate > 0 && c->experts.n == 0) {
        c->intermediate = r->shared_intermediate;
    }
    for (int32_t i = 0; i < c->n_layers; i++) {
        c->unrotated[i] = !r->rotates;
    }
}

/* What Gemma-4's layers differ in. */
static int set_gemma4(struct model_config *c, const struct raw_config *r, struct err *e)
{
    bool windows = false;

    for (int32_t i = 0; i < c->n_layers; i++) {
        windows = windows || c->windowed[i];
    }
    c->query_scalar = 1;
    c->embed_scale = sqrtf((float)c->hidden);
    c->keys_are_values = r->k_eq_v == 1;
    c->wide_mlp = r->double_wide == 1;
    c->layer_input = MAX(r->layer_input, 0);
    c->sharing_from = c->n_layers - MAX(r->sharing_layers, 0);
    if (windows) {
        c->full_head_dim = r->full_head_dim > 0 ? r->full_head_dim : 512;
        c->full_kv_heads =
            c->keys_are_values && r->full_kv_heads > 0 ? r->full_kv_heads : c->n_kv_heads;
    }
    if (c->layer_input > 0 && r->layer_vocab > 0 && r->layer_vocab != c->vocab) {
        return err_set(e, ERR_UNSUPPORTED, "%s: vocab_size_per_layer_input %d is not vocab_size %d",
                       CONFIG, r->layer_vocab, c->vocab);
    }
    bool own[2] = {false, false};
    for (int32_t i = 0; i < MAX(c->sharing_from, 0); i++) {
        own[c->windowed[i]] = true;
    }
    for (int32_t i = MAX(c->sharing_from, 0); i < c->n_layers; i++) {
        if (!own[c->windowed[i]]) {
            return err_set(e, ERR_INVALID,
                           "%s: num_kv_shared_layers %d: layer %d has no layer of its kind in "
                           "front of them",
                           CONFIG, r->sharing_layers, i);
        }
    }
    if (c->full_kv_heads > 0 && c->n_heads % c->full_kv_heads != 0) {
        return err_set(e, ERR_INVALID,
                       "%s: num_attention_heads %d is no multiple of num_global_key_value_heads %d",
                       CONFIG, c->n_heads, c->full_kv_heads);
    }
    return 0;
}

/* Whether the architecture's own code has windows: configurations of others may have
 * the members of the model that they were copied from. */
static bool heeds_windows(const struct architecture *a)
{
    return a->windows || a->sliding_window > 0 || a->window_switch || a->window_listed ||
           a->window_pattern > 0;
}

static int set_window(struct model_config *c, const struct raw_config *r,
                      const struct architecture *a, struct err *e)
{
    int32_t window = r->window >= 0 ? r->window : r->window_is_null ? 0 : a->sliding_window;

    if (r->n_layer_types >= 0 && r->n_layer_types != c->n_layers) {
        return err_set(e, ERR_INVALID, "%s: layer_types has %d entries for num_hidden_layers %d",
                       CONFIG, r->n_layer_types, c->n_layers);
    }
    for (int32_t i = 0; i < r->n_layer_types && !a->llama4; i++) {
        if (r->layer_chunked[i]) {
            return err_set(e, ERR_UNSUPPORTED, "%s: layer_types: %s has no chunked_attention",
                           CONFIG, a->name);
        }
    }
    if (window == 0 || !heeds_windows(a) || (a->window_switch && r->use_window != 1)) {
        return 0;
    }
    int32_t from = a->window_switch ? MAX(r->window_from_layer, 0) : 0;
    int32_t pattern = r->window_pattern > 0 ? r->window_pattern : a->window_pattern;
    for (int32_t i = 0; i < c->n_layers; i++) {
        int32_t place = a->full_layers_first ? i : i + 1;
        bool usual = a->window_pattern > 0 ? place % pattern != 0 : i >= from && !a->window_listed;
        c->windowed[i] = r->n_layer_types >= 0 ? r->layer_windowed[i] : usual;
        c->unrotated[i] = a->windows_rotate && !c->windowed[i];
        if (c->windowed[i]) {
            c->sliding_window = window;
        }
    }
    return 0;
}

/* Which layers rotate, and by which theta windowed ones do. */
static int set_rope_layers(struct model_config *c, const struct raw_config *r,
                           const struct architecture *a, struct err *e)
{
    int32_t pattern = r->unrotated_pattern > 0 ? r->unrotated_pattern : a->unrotated_pattern;

    c->rope_interleaved =
        a->latent ? either(r->interleaved, a->rope_interleaved) : a->rope_interleaved;
    c->window_theta = a->window_theta > 0 ? real_or(r->window_theta, a->window_theta) : 0;
    if (a->unrotated_pattern == 0) {
        return 0;
    }
    bool listed = a->llama4 ? r->n_rotated > 0 : r->n_rotated >= 0; /* where none is as empty */
    if (listed && r->n_rotated != c->n_layers) {
        return err_set(e, ERR_INVALID, "%s: no_rope_layers has %d entries for num_hidden_layers %d",
                       CONFIG, r->n_rotated, c->n_layers);
    }
    for (int32_t i = 0; i < c->n_layers; i++) {
        c->unrotated[i] = listed ? !r->layer_rotated[i] : (i + 1) % pattern == 0;
    }
    return 0;
}

/* Check the parameters that each kind of scaling needs. */
static int check_rope(const struct model_config *c, const struct raw_config *r, struct err *e)
{
    const struct rope_config *rope = &c->rope;
    const char *missing = NULL;
    bool scaled = rope->kind != ROPE_DEFAULT && rope->kind != ROPE_LONGROPE &&
                  rope->kind != ROPE_YARN && rope->kind != ROPE_PROPORTIONAL;

    if (scaled && isnan(r->factor)) {
        missing = "factor";
    } else if (rope->kind == ROPE_LLAMA3 && isnan(r->low_freq_factor)) {
        missing = "low_freq_factor";
    } else if (rope->kind == ROPE_LLAMA3 && isnan(r->high_freq_factor)) {
        missing = "high_freq_factor";
    }
    if (missing) {
        return err_set(e, ERR_INVALID, "%s: rope_parameters: %s is missing for rope_type '%s'",
                       CONFIG, missing, r->rope_type);
    }
    if (!isnan(r->short_mscale) && real_or(r->long_mscale, r->short_mscale) != r->short_mscale) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: rope_parameters: short_mscale %g and long_mscale %g must be equal",
                       CONFIG, r->short_mscale, r->long_mscale);
    }
    if (rope->kind == ROPE_LLAMA3 && rope->high_freq_factor < rope->low_freq_factor) {
        return err_set(
            e, ERR_INVALID,
            "%s: rope_parameters: high_freq_factor %g must not be less than low_freq_factor %g",
            CONFIG, rope->high_freq_factor, rope->low_freq_factor);
    }
    if (c->full_head_dim > 0 && rope->kind != ROPE_PROPORTIONAL) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: rope_type '%s' of full_attention is not supported with heads of two "
                       "sizes, proportional is",
                       CONFIG, *r->rope_type ? r->rope_type : "default");
    }
    if (rope->kind == ROPE_LONGROPE &&
        (r->n_short != rope->rot_dim / 2 || r->n_long != rope->rot_dim / 2)) {
        return err_set(e, ERR_INVALID,
                       "%s: rope_parameters: short_factor and long_factor have %d and %d numbers, "
                       "%d are needed",
                       CONFIG, r->n_short, r->n_long, rope->rot_dim / 2);
    }
    if (rope->rot_dim < 2 || rope->rot_dim % 2 != 0) {
        return err_set(e, ERR_INVALID,
                       "%s: head_dim times partial_rotary_factor is %d rotary dimensions; an "
                       "even number is needed",
                       CONFIG, rope->rot_dim);
    }
    return 0;
}

/* The kind of scaling and the base of the rotation. */
static int set_rope_kind(struct model_config *c, const struct raw_config *r,
                         const struct architecture *a, struct err *e)
{
    static const struct {
        const char *name;
        enum rope_scaling kind;
    } KINDS[] = {{"", ROPE_DEFAULT},
                 {"default", ROPE_DEFAULT},
                 {"linear", ROPE_LINEAR},
                 {"mrope", ROPE_DEFAULT}, /* text has the same position on each of its axes */
                 {"dynamic", ROPE_DYNAMIC},
                 {"llama3", ROPE_LLAMA3},
                 {"yarn", ROPE_YARN},
                 {"longrope", ROPE_LONGROPE},
                 {"su", ROPE_LONGROPE},
                 {"proportional", ROPE_PROPORTIONAL}};
    struct rope_config *rope = &c->rope;
    size_t kind = 0;

    while (kind < ARRAY_LEN(KINDS) && strcmp(KINDS[kind].name, r->rope_type) != 0) {
        kind++;
    }
    if (kind == ARRAY_LEN(KINDS)) {
        return err_set(
            e, ERR_UNSUPPORTED,
            "%s: rope_type is '%s', allowed are default, linear, dynamic, llama3, yarn, longrope",
            CONFIG, r->rope_type);
    }
    rope->kind = KINDS[kind].kind;
    rope->theta = real_or(r->rope_theta, real_or(r->theta, a->rope_theta));
    if (rope->kind == ROPE_DYNAMIC && !isnan(r->alpha)) { /* another theta, for all lengths */
        rope->kind = ROPE_DEFAULT;
        rope->theta *= pow(r->alpha, c->head_dim / (c->head_dim - 2.0));
    }
    return 0;
}

/* How many dims of a head are rotated. */
static void set_rope_dim(struct model_config *c, const struct raw_config *r,
                         const struct architecture *a)
{
    struct rope_config *rope = &c->rope;
    double share = a->rope_partial > 0 ? a->rope_partial : 1;
    rope->rot_dim = (int32_t)(c->head_dim * real_or(r->rope_partial, real_or(r->partial, share)));
    if (a->latent) {
        rope->rot_dim = c->latent.rot_dim;
    } else if (r->rotary_dim > 0 && a->rope_partial > 0) {
        rope->rot_dim = MIN(r->rotary_dim, c->head_dim);
    }
    if (rope->kind == ROPE_PROPORTIONAL) {
        rope->share = real_or(r->rope_partial, 1);
        rope->rot_dim = c->full_head_dim > 0 ? c->full_head_dim : c->head_dim;
    }
}

/* The parameters of the scaling. */
static void set_rope_scaling(struct model_config *c, const struct raw_config *r)
{
    struct rope_config *rope = &c->rope;

    /* Phi-3 has it at the top level, which takes precedence. */
    rope->original_positions = r->original_positions > 0        ? r->original_positions
                               : r->rope_original_positions > 0 ? r->rope_original_positions
                                                                : c->max_positions;
    if (rope->kind == ROPE_DYNAMIC) {
        rope->original_positions = c->max_positions;
    }
    rope->factor = real_or(r->factor, (double)c->max_positions / rope->original_positions);
    rope->low_freq_factor = r->low_freq_factor;
    rope->high_freq_factor = r->high_freq_factor;
    rope->beta_fast = real_or(r->beta_fast, 0) > 0 ? r->beta_fast : 32;
    rope->beta_slow = real_or(r->beta_slow, 0) > 0 ? r->beta_slow : 1;
    rope->mscale = real_or(r->mscale, 0);
    rope->mscale_all_dim = real_or(r->mscale_all_dim, 0);
    rope->attention_factor = real_or(r->attention_factor, real_or(r->short_mscale, 0));
    rope->truncate = either(r->truncate, true);
    memcpy(rope->short_factor, r->short_factor, sizeof(rope->short_factor));
    memcpy(rope->long_factor, r->long_factor, sizeof(rope->long_factor));
    rope->query_beta = real_or(r->position_beta, 0);
}

/* How many positions the rotation reaches, into max_positions. */
static void set_rope_reach(struct model_config *c, const struct architecture *a)
{
    struct rope_config *rope = &c->rope;
    /* With linear and dynamic scaling max_position_embeddings is the context before
     * scaling; with the other kinds, and in Gemma-3, it is the longest context. */
    double reach = c->max_positions;
    bool scaled = a->gemma && a->window_theta > 0;

    if ((rope->kind == ROPE_LINEAR && !scaled) || rope->kind == ROPE_DYNAMIC) {
        reach *= rope->factor;
    } else if (rope->kind == ROPE_YARN) {
        reach = MAX(reach, rope->original_positions * rope->factor);
    }
    if (rope->query_beta > 0 && a->latent) { /* whose queries get no factor here */
        reach = MIN(reach, rope->original_positions);
        rope->query_beta = 0;
    }
    c->max_positions = (int32_t)MIN(reach, (double)LIMIT_MODEL_LEN);
}

static int set_rope(struct model_config *c, const struct raw_config *r,
                    const struct architecture *a, struct err *e)
{
    if (a->rope_theta == 0) {
        return 0;
    }
    int rc = set_rope_kind(c, r, a, e);
    if (rc < 0) {
        return rc;
    }
    rc = raw_thetas_derive(c, r, e);
    if (rc < 0) {
        return rc;
    }
    set_rope_dim(c, r, a);
    set_rope_scaling(c, r);
    set_rope_reach(c, a);
    return check_rope(c, r, e);
}

/* With yarn and mscale_all_dim scores are multiplied by its square (DeepSeek-V2). */
static void set_latent_scale(struct model_config *c)
{
    const struct rope_config *r = &c->rope;

    if (r->kind != ROPE_DEFAULT && r->mscale_all_dim > 0 && r->factor > 1) {
        double mscale = 0.1 * r->mscale_all_dim * log(r->factor) + 1;
        c->query_scalar = (float)(c->head_dim / pow(mscale, 4));
    }
}

/* Settings that no family here computes. */
static int check_supported(const struct raw_config *r, const struct architecture *a, struct err *e)
{
    if (r->head_norms == 1 || r->alibi == 1 || (r->parallel_residual == 1 && !a->parallel)) {
        return err_set(e, ERR_UNSUPPORTED, "%s: %s true is not supported", CONFIG,
                       r->head_norms == 1 ? "qk_layernorm"
                       : r->alibi == 1    ? "alibi"
                                          : "use_parallel_residual");
    }
    if (r->parallel_attention == 0) {
        return err_set(e, ERR_UNSUPPORTED, "%s: parallel_attn false is not supported", CONFIG);
    }
    if (r->use_qk_norm == 1 && !a->qk_norm && !a->wide_qk_norm && !a->qk_norm_switch &&
        !a->llama4) {
        return err_set(e, ERR_UNSUPPORTED, "%s: use_qk_norm true is not supported with %s", CONFIG,
                       a->name);
    }
    if (a->clova && (r->post_norm == 0 || real_or(r->residual_factor, 1) != 1)) {
        return err_set(e, ERR_UNSUPPORTED, "%s: %s is not supported with %s", CONFIG,
                       r->post_norm == 0 ? "use_post_norm false" : "a residual_multiplier but 1",
                       a->name);
    }
    if (strcmp(r->both_ways, "all") == 0) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: use_bidirectional_attention 'all' or true is not supported", CONFIG);
    }
    if (r->shared_caches == 1) {
        return err_set(e, ERR_UNSUPPORTED, "%s: use_cla true is not supported", CONFIG);
    }
    if (r->clip_qkv > 0) {
        return err_set(e, ERR_UNSUPPORTED, "%s: clip_qkv is not supported", CONFIG);
    }
    if (r->affine == 0 || r->scale_attention == 0) {
        return err_set(e, ERR_UNSUPPORTED, "%s: %s false is not supported", CONFIG,
                       r->affine == 0 ? "layer_norm_elementwise_affine" : "scale_attn_weights");
    }
    return 0;
}

static void set_biases(struct model_config *c, const struct raw_config *r,
                       const struct architecture *a)
{
    /* attention_bias stands for all four projections, except in architectures with
     * biases of q, k and v alone. */
    bool all = a->o_bias || !a->qkv_bias;

    c->qkv_bias =
        either(r->qkv_bias,
               either(r->enable_bias, all ? either(r->attention_bias, a->qkv_bias) : a->qkv_bias));
    c->o_bias = either(r->enable_bias, all ? either(r->attention_bias, a->o_bias) : a->o_bias);
    if (a->bias_apart) {
        c->qkv_bias = either(r->attention_bias, a->qkv_bias);
        c->o_bias = either(r->out_bias, false);
    }
    c->head_bias = either(r->head_bias, a->head_bias);
    c->mlp_bias = either(r->enable_bias, either(r->mlp_bias, a->mlp_bias));
}

/* What one key, or the architecture, says by itself. */
static void set_switches(struct model_config *c, const struct raw_config *r,
                         const struct architecture *a)
{
    c->norm = a->norm;
    c->norm_eps = (float)real_or(r->norm_eps, a->norm_eps);
    c->norm_offset = a->gemma || a->norm_from_one ? 1 : 0;
    c->norm_before = either(r->norm_before, true);
    c->final_norm = c->norm_before && r->no_final_norm != 1;
    c->act = a->act;
    c->tied = either(r->tied, a->tied);
    c->parallel = a->parallel && r->parallel_residual != 0;
    c->qk_norm = either(a->qk_norm_switch ? r->use_qk_norm : -1, a->qk_norm);
    c->wide_qk_norm = a->wide_qk_norm;
    c->norm_last = a->norm_last;
    c->ungated_mlp = a->ungated_mlp;
    c->xielu = a->xielu;
    c->wrapped = a->wrapper || r->wrapped;
    c->scale_by_layer = r->scale_by_layer == 1;
    c->gated_attention = a->gated_attention;
    c->n_draft_layers = MAX(r->n_draft_layers, 0);
    double scaling = real_or(r->logits_scaling, 1);
    c->logit_scale = (float)(real_or(r->logit_scale, a->logit_scale > 0 ? a->logit_scale : 1) *
                             (a->clova ? scaling : 1 / scaling));
}

static void set_scores(struct model_config *c, const struct raw_config *r)
{
    c->query_scalar = (float)real_or(r->query_scalar, c->head_dim);
    if (!isnan(r->attention_factor_all)) {
        c->query_scalar = (float)(1 / (r->attention_factor_all * r->attention_factor_all));
    }
    c->attn_softcap = (float)real_or(r->attn_softcap, 0);
    c->final_softcap = (float)real_or(r->final_softcap, 0);
}

static int set_mlp(struct model_config *c, const struct raw_config *r, const struct architecture *a,
                   struct err *e)
{
    int rc = a->nemotron      ? 0
             : a->ungated_mlp ? check_ungated(r->act, a->xielu, e)
                              : set_activation(c, r->act, e);

    if (a->gemma && c->act == ACT_GELU_ERF) {
        c->act = ACT_GELU_TANH; /* Gemma's first files say "gelu" for it */
    }
    return rc < 0 ? rc : set_experts(c, r, a, e);
}

/* Lists of layers must be of those that there are. */
static int check_lists(const struct model_config *c, const struct raw_config *r, struct err *e)
{
    if (r->n_mlp_types >= 0 && r->n_mlp_types != c->n_layers) {
        return err_set(e, ERR_INVALID,
                       "%s: mlp_layer_types has %d entries for num_hidden_layers %d", CONFIG,
                       r->n_mlp_types, c->n_layers);
    }
    for (int32_t i = c->n_layers; i < LIMIT_LAYERS; i++) {
        if (r->layer_attends[i]) {
            return err_set(e, ERR_INVALID,
                           "%s: attn_layer_indices (full_attn_idxs) names layer %d, "
                           "num_hidden_layers is %d",
                           CONFIG, i, c->n_layers);
        }
    }
    return 0;
}

/* Which layers attend how far, recur, or rotate. */
static int set_layer_kinds(struct model_config *c, const struct raw_config *r,
                           const struct architecture *a, struct err *e)
{
    int rc = check_lists(c, r, e);

    rc = rc ? rc : set_window(c, r, a, e);
    if (rc == 0 && a->gemma4) {
        rc = set_gemma4(c, r, e);
    }
    if (rc == 0) {
        rc = set_recurrent(c, r, a, e);
    }
    return rc < 0 ? rc : set_rope_layers(c, r, a, e);
}

int raw_config_derive(struct model_config *c, const struct raw_config *r, struct err *e)
{
    const struct architecture *a;

    memcpy(c->architecture, r->architecture, sizeof(c->architecture));
    if (!model_family_find(r->architecture, &a)) {
        return unknown_architecture(r->architecture, e);
    }
    int rc = check_supported(r, a, e);
    if (rc < 0) {
        return rc;
    }
    set_switches(c, r, a);
    set_biases(c, r, a);
    rc = set_latent(c, r, a, e);
    if (rc == 0) {
        rc = set_shape(c, r, a, e);
    }
    set_scores(c, r);
    if (rc == 0) {
        rc = set_mlp(c, r, a, e);
    }
    if (rc == 0) {
        rc = set_layer_kinds(c, r, a, e);
    }
    if (rc == 0 && a->granite) {
        set_granite(c, r);
    }
    if (rc == 0 && a->llama4) {
        rc = raw_llama4_derive(c, r, e);
    }
    if (rc == 0 && a->nemotron) {
        rc = raw_nemotron_derive(c, r, e);
    }
    if (rc == 0) {
        rc = set_rope(c, r, a, e);
    }
    if (rc == 0 && a->falcon) {
        rc = raw_falcon_derive(c, r, e);
    }
    if (rc == 0 && a->latent) {
        set_latent_scale(c);
    }
    c->max_positions = MIN(c->max_positions, LIMIT_MODEL_LEN);
    return rc;
}
