/* Requests and their parameters: creation and reference counts. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/slab.h"
#include "engine/engine_state.h"
#include "engine/output/emit.h"
#include "engine/sched/decode/stops.h"

static struct slab requests = SLAB_OF(struct request); /* a step reads a line of each */

static float or_else(float value, float otherwise)
{
    return isnan(value) ? otherwise : value;
}

void gen_params_init(struct gen_params *p, const struct engine *engine)
{
    const struct generation_defaults *d = &engine->defaults;

    *p = (struct gen_params){
        .max_tokens = 16,
        .n = 1,
        .best_of = 1,
        .length_penalty = 1,
        .temperature = or_else(d->temperature, 1),
        .top_p = or_else(d->top_p, 1),
        .min_p = or_else(d->min_p, 0),
        .top_k = MAX(d->top_k, 0),
        .repetition_penalty = or_else(d->repetition_penalty, 1),
        .n_logprobs = -1,
        .n_prompt_logprobs = -1,
        .skip_special = true,
        .spaces_between_special = true,
    };
}

void gen_params_release(struct gen_params *p)
{
    for (int32_t i = 0; i < p->n_stop; i++) {
        free(p->stop[i]);
    }
    for (int32_t i = 0; i < p->n_bad_words; i++) {
        free(p->bad_word[i]);
    }
    free(p->stop);
    free(p->stop_len);
    free(p->stop_token);
    free(p->bias);
    free(p->allowed_token);
    free(p->bad_word);
    free(p->bad_word_len);
    free(p->cache_salt);
    grammar_unref(p->grammar);
    *p = (struct gen_params){0};
}

int shared_params_new(struct shared_params **ret, struct gen_params *params, struct err *e)
{
    struct shared_params *p = calloc(1, sizeof(*p));

    if (!p) {
        return err_nomem(e, "a request's parameters");
    }
    int rc = stop_set_new(&p->stops, params->stop, params->stop_len, params->n_stop, e);
    if (rc < 0) {
        free(p);
        return rc;
    }
    p->params = *params;
    *params = (struct gen_params){0};
    atomic_init(&p->refs, 1);
    *ret = p;
    return 0;
}

void shared_params_unref(struct shared_params *p)
{
    if (!p || atomic_fetch_sub_explicit(&p->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    stop_set_free(p->stops);
    if (p->words) {
        word_list_release(p->words);
        free(p->words);
    }
    gen_params_release(&p->params);
    free(p);
}

int request_new_shared(struct request **ret, struct shared_params *params, const int32_t *prompt,
                       int32_t n_prompt, struct err *e)
{
    const struct gen_params *p = &params->params;
    int32_t n_seqs = MAX(MAX(p->best_of, p->beam_width), 1);
    struct request *r = slab_take(&requests);
    int32_t *copy = malloc((size_t)MAX(n_prompt, 1) * sizeof(*copy));
    _Atomic int32_t *stop_at = n_seqs > 1 ? malloc((size_t)n_seqs * sizeof(*stop_at)) : NULL;

    if (!r || !copy || (n_seqs > 1 && !stop_at)) {
        slab_give(&requests, r);
        free(copy);
        free((void *)stop_at);
        return err_nomem(e, "a request");
    }
    memcpy(copy, prompt, (size_t)n_prompt * sizeof(*copy));
    stop_at = stop_at ? stop_at : &r->only_stop_at;
    for (int32_t i = 0; i < n_seqs; i++) {
        atomic_init(&stop_at[i], INT32_MAX);
    }
    atomic_fetch_add_explicit(&params->refs, 1, memory_order_relaxed);
    r->shared = params;
    r->params = *p;
    r->stops = params->stops;
    r->seed = p->seed;
    r->prompt = copy;
    r->n_prompt = n_prompt;
    r->stop_at = stop_at;
    r->arrival_us = clock_us();
    atomic_init(&r->refs, 1);
    atomic_init(&r->cancelled, false);
    atomic_init(&r->parked, PARK_NONE);
    *ret = r;
    return 0;
}

int request_new(struct request **ret, struct gen_params *params, const int32_t *prompt,
                int32_t n_prompt, struct err *e)
{
    struct shared_params *shared;
    int rc = shared_params_new(&shared, params, e);

    if (rc < 0) {
        return rc;
    }
    rc = request_new_shared(ret, shared, prompt, n_prompt, e);
    if (rc < 0) { /* give the parameters back to the caller */
        *params = shared->params;
        shared->params = (struct gen_params){0};
    }
    shared_params_unref(shared);
    return rc;
}

struct request *request_ref(struct request *r)
{
    atomic_fetch_add_explicit(&r->refs, 1, memory_order_relaxed);
    return r;
}

void request_unref(struct request *r)
{
    if (!r || atomic_fetch_sub_explicit(&r->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    output_state_free(r->output_state);
    prompt_out_free(r->prompt_out);
    shared_params_unref(r->shared);
    free(r->prompt);
    if (r->stop_at != &r->only_stop_at) {
        free((void *)r->stop_at);
    }
    slab_give(&requests, r);
}

const char *finish_reason_name(enum finish_reason f)
{
    static const char *const name[] = {NULL, "stop", "length", "abort", "error", "error"};

    return name[f];
}
