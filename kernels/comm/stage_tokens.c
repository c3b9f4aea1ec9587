/* See stage_tokens.h.
 *
 * The first stage receives the tokens of an earlier micro-batch only when a micro-batch
 * reads them, or when as many micro-batches are in flight as there are stages. So what
 * waits between two stages is bounded, and the last stage, whose tokens are few bytes,
 * never blocks in sending them: the ring cannot deadlock.
 */
#include "kernels/comm/stage_tokens.h"

#include <stdlib.h>
#include <string.h>

int stage_tokens_init(struct stage_tokens *t, struct pipeline *p, int32_t max_samples,
                      struct err *e)
{
    *t = (struct stage_tokens){.pipeline = p};
    for (int i = 0; i < 2; i++) {
        t->step[i].token = calloc((size_t)MAX(max_samples, 1), sizeof(*t->step[i].token));
        if (!t->step[i].token) {
            return err_nomem(e, "a step's tokens");
        }
    }
    return 0;
}

void stage_tokens_release(struct stage_tokens *t)
{
    free(t->step[0].token);
    free(t->step[1].token);
    *t = (struct stage_tokens){0};
}

static bool is_first(const struct stage_tokens *t)
{
    return t->pipeline && t->pipeline->at.stage == 0;
}

static const struct pending_microbatch *oldest(const struct stage_tokens *t)
{
    return t->n_pending > 0 ? &t->pending[t->pending_first % PENDING_MAX] : NULL;
}

static int receive_oldest(struct stage_tokens *t, struct err *e)
{
    const struct pending_microbatch *a = oldest(t);
    struct pipeline *p = t->pipeline;

    t->pending_first++;
    t->n_pending--;
    int32_t *token = t->step[a->step_index].token + a->first;
    return p->ops->receive(p, token, (size_t)a->n * sizeof(*token), e);
}

/* The last sampling row of the step before that this micro-batch reads; -1: none. */
static int32_t last_source(const struct batch *b)
{
    int32_t last = -1;

    for (int32_t i = 0; b->token_src && i < b->n_tokens; i++) {
        last = MAX(last, b->token_src[i]);
    }
    return last;
}

/* Receive the tokens still to come of the step before the last, whose array the step
 * that begins will overwrite. */
static int receive_overwritten(struct stage_tokens *t, struct err *e)
{
    int rc = 0;

    for (const struct pending_microbatch *a = oldest(t); a && a->step_index == t->now && rc == 0;
         a = oldest(t)) {
        rc = receive_oldest(t, e);
    }
    return rc;
}

/* Receive the tokens that this micro-batch reads, and older ones until fewer
 * micro-batches than stages are in flight. */
static int receive_needed(struct stage_tokens *t, const struct batch *b, struct err *e)
{
    int32_t last = last_source(b);
    uint32_t n_stages = (uint32_t)t->pipeline->at.n_stages;
    int rc = 0;

    for (const struct pending_microbatch *a = oldest(t); a && rc == 0; a = oldest(t)) {
        if (t->n_pending < n_stages && (a->step_index == t->now || a->first > last)) {
            break;
        }
        rc = receive_oldest(t, e);
    }
    return rc;
}

int stage_tokens_begin(struct stage_tokens *t, const struct batch *b, struct err *e)
{
    int rc = 0;

    if (b->microbatch == 0) {
        t->now = 1 - t->now;
        rc = receive_overwritten(t, e);
        t->step[t->now].n = 0;
    }
    if (rc < 0 || !is_first(t)) {
        return rc;
    }
    rc = receive_needed(t, b, e);
    if (b->n_samples > 0) {
        uint32_t at = (t->pending_first + t->n_pending++) % PENDING_MAX;
        t->pending[at] = (struct pending_microbatch){
            .step_index = t->now, .first = b->first_sample, .n = b->n_samples};
    }
    return rc;
}

int stage_tokens_end(struct stage_tokens *t, const struct batch *b, const int32_t *token,
                     struct err *e)
{
    struct step_tokens *s = &t->step[t->now];
    struct pipeline *p = t->pipeline;
    size_t n_bytes = (size_t)b->n_samples * sizeof(*token);
    int rc = 0;

    s->n = MAX(s->n, b->first_sample + b->n_samples);
    if (is_first(t) || n_bytes == 0) {
        return 0;
    }
    memcpy(s->token + b->first_sample, token, n_bytes);
    bool sends = p && pipeline_is_last(&p->at) && p->at.rank == 0;
    for (int32_t i = 0; sends && i < p->at.n_ranks && rc == 0; i++) {
        rc = p->ops->send(p, i, token, n_bytes, e);
    }
    return rc;
}
