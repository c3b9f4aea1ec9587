#include "engine/sched/decode/decode.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/sched/decode/beam.h"
#include "engine/sched/decode/commit.h"
#include "engine/sched/decode/constrained.h"

/* Emit `d`, which has kind, choice and token, with the log-probabilities of sampling
 * row `row` (-1: none). */
static void emit_token(struct commit *c, const struct group *g, struct delta *d, int32_t row,
                       int32_t n_top)
{
    const struct results *r = c->r;

    d->request = g->request;
    d->stop_token = -1;
    d->cached_tokens = g->cached_tokens;
    d->logprob = row < 0 ? NAN : r->logprob[row];
    if (row >= 0 && n_top > 0) {
        d->n_top = MIN(n_top, r->top_stride);
        d->top_token = r->top_token + (int64_t)row * r->top_stride;
        d->top_logprob = r->top_logprob + (int64_t)row * r->top_stride;
    }
    c->out->emit(c->out, g, d);
}

/* ---- prompt log-probabilities ---- */

static void commit_scores(struct commit *c, const struct plan_item *it)
{
    struct group *g = it->seq->group;

    if (!g->scores) {
        return;
    }
    const struct gen_params *p = &g->request->params;
    int32_t n_top = MAX(p->n_prompt_logprobs, p->echo ? p->n_logprobs : -1);
    if (!g->scored_first) {
        g->scored_first = true;
        struct delta d = {.kind = DELTA_PROMPT, .token = g->request->prompt[0]};
        emit_token(c, g, &d, -1, 0);
    }
    for (int32_t i = 0; i < it->n_scores; i++) {
        int32_t position = it->first + it->score_offset + i + 1;
        struct delta d = {.kind = DELTA_PROMPT, .token = g->request->prompt[position]};
        emit_token(c, g, &d, it->sample_first + i, n_top);
    }
}

/* ---- one token ---- */

/* Whether the output side has ended the choice by a stop string. */
static bool stop_marked(const struct seq *q)
{
    return atomic_load_explicit(&q->group->request->stop_at[q->index], memory_order_relaxed) <=
           q->n_out;
}

/* Its grammar admits no token behind those that are there. */
static void end_constrained(struct commit *c, struct seq *q)
{
    const char *error = constraint_error(q);
    int finish = error ? FINISH_IMPOSSIBLE : FINISH_STOP;

    seq_finish(c->s, q, finish);
    emit_finish(c->out, q->group, q->index, finish, -1, error);
}

static void commit_token(struct commit *c, struct seq *q, int32_t row, bool drafted)
{
    struct group *g = q->group;
    int32_t token = c->r->token[row], stop_token = -1;

    if (g->state == GROUP_ENDED || q->state != SEQ_LIVE) {
        return; /* it ended while this step was in flight */
    }
    if (q->constraint_end) {
        end_constrained(c, q);
        return;
    }
    if (token == TOKEN_NONE_ALLOWED) {
        seq_finish(c->s, q, FINISH_IMPOSSIBLE);
        emit_finish(c->out, g, q->index, FINISH_IMPOSSIBLE, -1, IMPOSSIBLE);
        return;
    }
    if (token < 0) {
        sched_end(c->s, g, FINISH_ERROR, NO_NUMBER);
        return;
    }
    seq_append(q, token);
    if (g->first_token_us == 0) {
        g->first_token_us = c->now_us;
    }
    g->last_token_us = c->now_us;
    int finish = finish_by_token(c->s, g, token, q->n_out, &stop_token);
    struct delta d = {.kind = DELTA_TOKEN, .choice = q->index, .token = token};
    d.is_stop = finish == FINISH_STOP;
    d.drafted = drafted;
    emit_token(c, g, &d, row, g->request->params.n_logprobs);
    if (stop_marked(q)) {
        finish = FINISH_STOP;
    }
    if (finish == FINISH_NONE) {
        return;
    }
    seq_finish(c->s, q, finish);
    emit_finish(c->out, g, q->index, finish, stop_token, NULL);
}

/* ---- one item ---- */

/* What the step has written counts as stored, if the sequence still has its blocks. */
static void commit_memory(struct commit *c, const struct plan_item *it, int32_t n_accepted)
{
    struct seq *q = it->seq;
    struct group *g = q->group;

    if (g->state != GROUP_RUNNING || q->state != SEQ_LIVE) {
        return;
    }
    if (it->n_verify > 0) {
        drafts_settle(c->s, it, n_accepted);
    }
    q->n_stored = it->first + it->n - it->n_verify + n_accepted;
    if (has_block_to_publish(c->s, q)) {
        seq_publish(c->s, q);
    }
    if (it->n_verify > 0 && sched_has_states(&c->s->c)) {
        seq_trim(c->s, q); /* the states before the last ones, now that they are published */
    }
    /* forked behind the prompt: the published blocks are those of all */
    for (int32_t i = 1; i < it->n_sampled; i++) {
        g->seq[i].n_stored = q->n_stored;
        g->seq[i].chain = q->chain;
    }
}

static void leave_flight(struct group *g, uint64_t step)
{
    if (g->commit_step != step) {
        g->commit_step = step;
        g->n_inflight--;
    }
}

static void commit_samples(struct commit *c, const struct plan_item *it, int32_t n_accepted)
{
    struct group *g = it->seq->group;
    int32_t row = it->sample_first + it->n_scores;

    if (it->n_sampled == 1) {
        for (int32_t i = 0; i <= n_accepted; i++) {
            commit_token(c, it->seq, row + i, i < n_accepted);
        }
    } else {
        for (int32_t i = 0; i < it->n_sampled; i++) {
            commit_token(c, &g->seq[i], row + i, false);
        }
    }
}

static void commit_item(struct commit *c, const struct plan_item *it)
{
    int32_t n_accepted = it->n_verify > 0 ? drafts_accepted(it, c->r->token + it->sample_first) : 0;

    commit_memory(c, it, n_accepted);
    if (!it->seq->group->beam) {
        commit_samples(c, it, n_accepted);
    }
}

/* Whether what the item samples does not count (seq_void). */
static bool is_void(const struct commit *c, const struct plan_item *it)
{
    return it->n_sampled > 0 && c->r->step <= it->seq->void_step;
}

/* Commit the items of one group, which are adjacent; those of a beam search that sample
 * are committed together. Returns how many. */
static int32_t commit_group(struct commit *c, const struct plan_item *it, int32_t n_left)
{
    struct group *g = it->seq->group;
    int32_t n = 0;

    leave_flight(g, c->r->step);
    do {
        if (g->state != GROUP_ENDED) {
            commit_scores(c, &it[n]);
            if (!is_void(c, &it[n])) {
                commit_item(c, &it[n]);
            }
            if (it[n].last_prompt && it[n].n_sampled == 0) { /* max_tokens 0 */
                sched_end(c->s, g, FINISH_LENGTH, NULL);
            }
        }
        n++;
    } while (n < n_left && it[n].seq->group == g);
    if (g->beam && it->n_sampled > 0 && !is_void(c, it)) {
        beam_commit(c, g, it, n);
    }
    return n;
}

static void take_from_flight(struct sched *s, const struct plan *plan)
{
    assert(s->n_in_flight > 0 && s->in_flight[0] == plan);
    memmove(s->in_flight, s->in_flight + 1, (size_t)--s->n_in_flight * sizeof(*s->in_flight));
}

/* Prefetches what publishing the blocks that the step has filled will read and write:
 * memory that no step touched since they were taken. */
static void fetch_for_publishing(const struct sched *s, const struct plan *plan)
{
    int32_t size = s->c.block_size;

    for (int32_t i = 0; i < plan->n_decode && s->c.prefix_cache; i++) {
        const struct plan_item *it = &plan->item[i];
        if (it->first % size == size - 1) {
            seq_fetch_block(s, it->seq);
        }
    }
}

void decode_commit(struct sched *s, struct plan *plan, const struct results *r, int64_t now_us,
                   struct delta_out *out)
{
    struct commit c = {.s = s, .r = r, .out = out, .now_us = now_us};

    assert(r->step == plan->step && r->n_samples == plan->n_samples);
    take_from_flight(s, plan);
    fetch_for_publishing(s, plan);
    for (int32_t i = 0; i < plan->n_items;) {
        fetch_ahead(plan, i, true);
        i += commit_group(&c, &plan->item[i], plan->n_items - i);
    }
}

void decode_abandon(struct sched *s, struct plan *plan)
{
    take_from_flight(s, plan);
    for (int32_t i = 0; i < plan->n_items; i++) {
        leave_flight(plan->item[i].seq->group, plan->step);
    }
}

/* ---- the end of a group ---- */

static void emit_end(struct delta_out *out, struct group *g)
{
    for (int32_t i = g->beam ? g->beam->n_finished : 0; g->beams && i < g->request->params.n; i++) {
        emit_finish(out, g, i, g->finish, -1, g->error);
    }
    for (int32_t i = 0; !g->beams && i < g->width; i++) {
        if (i >= g->n_seqs || g->seq[i].state != SEQ_DONE) {
            emit_finish(out, g, i, g->finish, -1, g->error);
        }
    }
    struct delta d = {
        .request = g->request, .kind = DELTA_END, .choice = -1, .token = -1, .stop_token = -1};
    d.cached_tokens = g->cached_tokens;
    d.finish = g->finish;
    d.error = g->error;
    out->emit(out, g, &d);
}

static bool is_reporting(const struct group *g)
{
    return g->beam && g->beam->reporting;
}

/* Whether the output side wants no more for now: it still holds much of the request. */
static bool is_held_back(const struct group *g)
{
    return atomic_load_explicit(&g->request->parked, memory_order_relaxed) != PARK_NONE;
}

static bool reap_group(struct sched *s, struct group *g, struct delta_out *out)
{
    if (g->n_inflight > 0 || is_reporting(g) || !delta_take(out, g->width + 1)) {
        return false;
    }
    list_remove(&s->ended, g);
    emit_end(out, g);
    group_end_memory(s, g);
    group_free(g);
    return true;
}

/* Report a portion of each beam search that is over, in turn, so that a long report
 * does not delay short ones. */
static void report_beams(struct sched *s, struct delta_out *out)
{
    for (struct group *g = s->ended.first, *next; g; g = next) {
        next = g->next;
        if (!is_reporting(g) || g->n_inflight > 0) {
            continue;
        }
        if (atomic_load_explicit(&g->request->cancelled, memory_order_relaxed)) {
            beam_give_up(g, FINISH_ABORT, NULL);
            continue;
        }
        if (is_held_back(g)) {
            continue;
        }
        enum beam_progress progress = beam_report(out, g);
        if (progress == BEAM_NO_ROOM) {
            return;
        }
        if (progress == BEAM_MORE) {
            list_remove(&s->ended, g);
            list_append(&s->ended, g);
            next = next ? next : g;
        }
    }
}

int32_t decode_reap(struct sched *s, struct delta_out *out)
{
    int32_t n = 0;

    if (!s->ended.first) {
        return 0;
    }
    report_beams(s, out);
    for (struct group *g = s->ended.first, *next; g; g = next) {
        next = g->next;
        n += reap_group(s, g, out);
    }
    return n;
}

void decode_give_up(struct sched *s, int finish, const char *error)
{
    for (struct group *g = s->ended.first; g; g = g->next) {
        if (is_reporting(g)) {
            beam_give_up(g, finish, error);
        }
    }
}

bool decode_has_more(const struct sched *s)
{
    for (const struct group *g = s->ended.first; g; g = g->next) {
        if (g->n_inflight == 0 && !(is_reporting(g) && is_held_back(g))) {
            return true;
        }
    }
    return false;
}
