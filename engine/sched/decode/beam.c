#include "engine/sched/decode/beam.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/sched/decode/beam_text.h"
#include "engine/sched/decode/commit.h"
#include "engine/sched/decode/constrained.h"

enum { PORTION = 256 }; /* deltas emitted by one call, at most */

/* The sampling row that holds an item's candidates. */
static int32_t sample_row_of(const struct plan_item *it)
{
    return it->sample_first + it->n_scores;
}

/* ---- the tree ---- */

static void node_drop(struct beam *b, int32_t id)
{
    struct beam_node *x = &b->node[id];

    x->n_holders--;
    while (id > 0 && x->n_holders == 0 && x->n_children == 0) {
        int32_t parent = x->parent;
        x->next_free = b->first_free;
        b->first_free = id;
        b->node[parent].n_children--;
        b->node[parent].child_xor ^= id;
        id = parent;
        x = &b->node[id];
    }
}

/* A child of `parent` with one holder, for column `column` of sampling row `row`. */
static int32_t node_add(struct beam *b, int32_t parent, const struct beam_choice *c,
                        const struct results *r, int32_t row)
{
    int32_t id = b->first_free;

    if (id >= 0) {
        b->first_free = b->node[id].next_free;
    } else {
        id = b->n_used++;
    }
    assert(id < b->n_nodes);
    b->node[id] = (struct beam_node){
        .parent = parent, .token = c->token, .logprob = c->logprob, .n_holders = 1};
    b->node[parent].n_children++;
    b->node[parent].child_xor ^= id;
    size_t from = (size_t)row * (size_t)r->top_stride, to = (size_t)id * (size_t)b->n_top;
    if (b->n_top > 0) {
        memcpy(b->top_token + to, r->top_token + from, (size_t)b->n_top * sizeof(*b->top_token));
        memcpy(b->top_logprob + to, r->top_logprob + from,
               (size_t)b->n_top * sizeof(*b->top_logprob));
    }
    return id;
}

/* ---- deltas ---- */

static void emit_node(struct delta_out *out, const struct group *g, int32_t choice, int32_t id,
                      bool is_stop)
{
    const struct beam *b = g->beam;
    const struct beam_node *x = &b->node[id];
    struct delta d = {.request = g->request,
                      .kind = DELTA_TOKEN,
                      .choice = choice,
                      .token = x->token,
                      .is_stop = is_stop,
                      .logprob = x->logprob,
                      .n_top = b->n_top,
                      .top_token = b->top_token + (size_t)id * (size_t)b->n_top,
                      .top_logprob = b->top_logprob + (size_t)id * (size_t)b->n_top,
                      .stop_token = -1,
                      .cached_tokens = g->cached_tokens};

    /* fewer candidates than were asked for */
    while (d.n_top > 0 && d.top_token[d.n_top - 1] < 0) {
        d.n_top--;
    }
    out->emit(out, g, &d);
}

/* Emit the tokens on which all live beams and returnable hypotheses agree, at most
 * *left deltas. */
static enum beam_progress emit_agreed(struct delta_out *out, struct group *g, int32_t *left)
{
    struct beam *b = g->beam;

    /* A node that is held has no children: it ends a hypothesis or a live beam. Once
     * the search is over with a hypothesis, only a node that some choices already have
     * is emitted to the others: the rest follows in beam_report. */
    bool on = !b->reporting || b->n_hypotheses == 0;
    while (b->n_sent < b->n || (on && b->node[b->agreed].n_children == 1)) {
        if (*left == 0) {
            return BEAM_MORE;
        }
        if (!delta_take(out, 1)) {
            return BEAM_NO_ROOM;
        }
        if (b->n_sent == b->n) {
            b->agreed = b->node[b->agreed].child_xor;
            b->n_sent = 0;
        }
        emit_node(out, g, b->n_sent++, b->agreed, false); /* the last token is never agreed */
        --*left;
    }
    return BEAM_DONE;
}

/* Reverse the parent links from `node` up to the last agreed node, so that the path can
 * be walked from its start. */
static void reverse_path(struct beam *b, int32_t node)
{
    b->behind = -1;
    while (node != b->agreed) {
        int32_t parent = b->node[node].parent;
        b->node[node].parent = b->behind;
        b->behind = node;
        node = parent;
    }
    b->at = node;
    b->reversed = true;
}

/* Emit the tokens of a choice's hypothesis behind the agreed ones, first to last,
 * restoring the path's links on the way. */
static enum beam_progress report_choice(struct delta_out *out, struct group *g,
                                        const struct beam_hypothesis *h, int32_t *left)
{
    struct beam *b = g->beam;

    if (!b->reversed) {
        reverse_path(b, h->node);
    }
    while (b->behind >= 0) {
        if (*left == 0) {
            return BEAM_MORE;
        }
        if (!delta_take(out, 1)) {
            return BEAM_NO_ROOM;
        }
        int32_t id = b->behind;
        b->behind = b->node[id].parent;
        b->node[id].parent = b->at;
        b->at = id;
        emit_node(out, g, b->choice, id, h->is_stop && b->behind < 0);
        --*left;
    }
    b->reversed = false;
    return BEAM_DONE;
}

static void report_end(struct delta_out *out, struct group *g, int32_t choice, int32_t last)
{
    const struct beam_hypothesis *h = &g->beam->hypothesis[MAX(MIN(choice, last), 0)];

    if (last < 0) {
        emit_finish(out, g, choice, FINISH_IMPOSSIBLE, -1, IMPOSSIBLE);
    } else {
        emit_finish(out, g, choice, h->finish, h->stop_token, NULL);
    }
}

/* With fewer than n hypotheses (few tokens are allowed) the last one is reported more
 * than once; without any the choices end with the agreed tokens. */
enum beam_progress beam_report(struct delta_out *out, struct group *g)
{
    struct beam *b = g->beam;
    int32_t left = PORTION, last = MIN(b->n, b->n_hypotheses) - 1;
    enum beam_progress progress = emit_agreed(out, g, &left);

    for (; last >= 0 && progress == BEAM_DONE && b->choice < b->n;
         b->choice += progress == BEAM_DONE) {
        progress = report_choice(out, g, &b->hypothesis[MIN(b->choice, last)], &left);
    }
    while (progress == BEAM_DONE && b->n_finished < b->n) {
        if (!delta_take(out, 1)) {
            return BEAM_NO_ROOM;
        }
        report_end(out, g, b->n_finished++, last);
    }
    b->reporting = progress != BEAM_DONE;
    return progress;
}

void beam_give_up(struct group *g, int finish, const char *error)
{
    g->beam->reporting = false;
    g->finish = finish;
    g->error = error;
}

/* ---- one step of the search ---- */

static void add_hypothesis(struct beam *b, const struct beam_hypothesis *h)
{
    int32_t i = b->n_hypotheses;

    if (i == b->width) {
        if (h->score <= b->hypothesis[i - 1].score) {
            node_drop(b, h->node);
            return;
        }
        if (b->hypothesis[--i].node >= 0) {
            node_drop(b, b->hypothesis[i].node);
        }
    } else {
        b->n_hypotheses++;
    }
    for (; i > 0 && b->hypothesis[i - 1].score < h->score; i--) {
        b->hypothesis[i] = b->hypothesis[i - 1];
    }
    b->hypothesis[i] = *h;
    if (b->n >= b->n_hypotheses) {
        return;
    }
    int32_t out = MAX(i, b->n); /* it, or the one that it pushed out of the first n */
    if (b->hypothesis[out].node >= 0) {
        node_drop(b, b->hypothesis[out].node);
    }
    b->hypothesis[out].node = -1;
}

/* Take the best remaining candidate of all live beams. False: none is left. */
static bool best_choice(struct beam *b, const struct results *r, const struct plan_item *it,
                        int32_t n, struct beam_choice *ret)
{
    bool found = false;

    for (int32_t i = 0; i < n; i++) {
        int64_t at = (int64_t)sample_row_of(&it[i]) * r->top_stride + b->column[i];
        if (b->column[i] >= b->n_candidates || r->top_token[at] < 0) {
            continue;
        }
        double cum = b->live[i]->cum_logprob + (double)r->top_logprob[at];
        if (!found || cum > ret->cum_logprob) {
            *ret = (struct beam_choice){cum, i, b->column[i], r->top_token[at], r->top_logprob[at]};
        }
        found = true;
    }
    if (found) {
        b->column[ret->from]++;
    }
    return found;
}

/* Whether a candidate, as the n_out-th token, ends its beam: by its id, by length, or
 * by a stop string that it completes. Sets finish, stop_token and is_stop of `h`. */
static void candidate_end(const struct commit *c, const struct group *g,
                          const struct beam_choice *x, int32_t n_out, struct beam_hypothesis *h)
{
    const struct beam *b = g->beam;
    int32_t from = b->live[x->from]->index;

    h->finish = finish_by_token(c->s, g, x->token, n_out, &h->stop_token);
    h->is_stop = h->finish == FINISH_STOP;
    if (!b->text || h->is_stop) {
        return;
    }
    if (beam_text_ends(b->text, from, x->token, n_out, h->finish == FINISH_LENGTH)) {
        h->finish = FINISH_STOP;
    }
}

/* A beam whose grammar admits nothing more is a hypothesis as it is. */
static void add_sentence(struct group *g, int32_t i)
{
    struct beam *b = g->beam;
    const struct seq *q = b->live[i];
    double length = MAX(q->n_out, 1);
    struct beam_hypothesis h = {
        .node = b->tip[q->index], .n_tokens = q->n_out, .finish = FINISH_STOP, .stop_token = -1};

    h.score = q->cum_logprob / pow(length, (double)g->request->params.length_penalty);
    b->node[h.node].n_holders++;
    add_hypothesis(b, &h);
    b->column[i] = b->n_candidates; /* none of its candidates is looked at */
}

/* Split the candidates into hypotheses and b->next, the next live beams. Returns how
 * many of the latter. */
static int32_t select_candidates(struct commit *c, struct group *g, const struct plan_item *it,
                                 int32_t n)
{
    struct beam *b = g->beam;
    const struct gen_params *p = &g->request->params;
    int32_t n_next = 0, n_out = b->live[0]->n_out + 1;
    /* every candidate ends its beam, so only the first k matter */
    bool last = n_out >= g->max_tokens;
    struct beam_choice x;

    for (int32_t rank = 0; (n_next < b->width && !last) || rank < b->width; rank++) {
        if (!best_choice(b, c->r, it, n, &x)) {
            break;
        }
        struct beam_hypothesis h = {.n_tokens = n_out, .stop_token = -1};
        candidate_end(c, g, &x, n_out, &h);
        if (h.finish == FINISH_NONE) {
            if (n_next == b->width) {
                continue;
            }
            g->n_chosen++;
            if (b->text) {
                beam_text_keep(b->text, n_next);
            }
            b->next[n_next++] = x;
        } else if (rank < b->width) {
            g->n_chosen++;
            h.score = x.cum_logprob / pow(n_out, (double)p->length_penalty);
            h.node =
                node_add(b, b->tip[b->live[x.from]->index], &x, c->r, sample_row_of(&it[x.from]));
            add_hypothesis(b, &h);
        }
    }
    return n_next;
}

static bool is_over(const struct group *g, int32_t n_next, int32_t n_out)
{
    const struct beam *b = g->beam;
    const struct gen_params *p = &g->request->params;

    if (n_next == 0) {
        return true;
    }
    if (b->n_hypotheses < b->width) {
        return false;
    }
    if (p->early_stopping == 1) {
        return true;
    }
    int32_t length = p->early_stopping == 2 && p->length_penalty > 0 ? g->max_tokens : n_out;
    double best_possible = b->next[0].cum_logprob / pow(length, (double)p->length_penalty);
    return best_possible <= b->hypothesis[b->width - 1].score;
}

/* A sequence that is not live, for a further child of a beam; there is one. */
static struct seq *free_seq(struct group *g)
{
    for (int32_t i = 0; i < g->width; i++) {
        if (g->seq[i].state != SEQ_LIVE) {
            return &g->seq[i];
        }
    }
    assert(false);
    return NULL;
}

static void append_choice(struct commit *c, struct group *g, struct seq *q,
                          const struct beam_choice *x, int32_t parent_node, int32_t row)
{
    struct beam *b = g->beam;

    b->tip[q->index] = node_add(b, parent_node, x, c->r, row);
    if (b->text) {
        beam_text_assign(b->text, (int32_t)(x - b->next), q->index);
    }
    q->cum_logprob = x->cum_logprob;
    seq_append(q, x->token);
}

/* Whether the next beam k is the first child of the beam that it continues. */
static bool is_first_child(const struct beam *b, int32_t k)
{
    for (int32_t before = 0; before < k; before++) {
        if (b->next[before].from == b->next[k].from) {
            return false;
        }
    }
    return true;
}

/* Free the beams without a child, fork those with several, append the tokens. The first
 * child of a beam continues its sequence. */
static void advance_beams(struct commit *c, struct group *g, const struct plan_item *it, int32_t n,
                          int32_t n_next)
{
    struct beam *b = g->beam;
    /* the tips before this step, by live beam; `column` is no longer needed */
    int32_t *parent_node = b->column;

    for (int32_t i = 0; i < n; i++) {
        parent_node[i] = b->tip[b->live[i]->index];
        bool wins = false;
        for (int32_t k = 0; k < n_next; k++) {
            wins = wins || b->next[k].from == i;
        }
        if (wins) {
            continue;
        }
        seq_drop_memory(c->s, b->live[i]);
        seq_drop_constraint(c->s, b->live[i]);
        b->live[i]->state = SEQ_UNBORN;
        b->tip[b->live[i]->index] = -1;
        g->n_live--;
    }
    /* Fork before anything is appended to the parents. */
    for (int32_t k = n_next - 1; k >= 0; k--) {
        const struct beam_choice *x = &b->next[k];
        if (is_first_child(b, k)) {
            continue;
        }
        struct seq *child = free_seq(g);
        seq_fork(c->s, child, b->live[x->from]);
        g->n_live++;
        append_choice(c, g, child, x, parent_node[x->from], sample_row_of(&it[x->from]));
    }
    for (int32_t k = 0; k < n_next; k++) {
        const struct beam_choice *x = &b->next[k];
        if (is_first_child(b, k)) {
            append_choice(c, g, b->live[x->from], x, parent_node[x->from],
                          sample_row_of(&it[x->from]));
        }
    }
    for (int32_t i = 0; i < n; i++) {
        node_drop(b, parent_node[i]);
    }
}

/* Whether the output side has ended every choice: it ran out of memory for their
 * texts. */
static bool texts_ended(const struct group *g)
{
    for (int32_t i = 0; i < g->beam->n; i++) {
        if (atomic_load_explicit(&g->request->stop_at[i], memory_order_relaxed) == INT32_MAX) {
            return false;
        }
    }
    return true;
}

void beam_commit(struct commit *c, struct group *g, const struct plan_item *it, int32_t n)
{
    struct beam *b = g->beam;

    if (g->state == GROUP_ENDED) {
        return;
    }
    if (texts_ended(g)) {
        sched_end(c->s, g, FINISH_STOP, NULL);
        return;
    }
    assert(n == g->n_live);
    for (int32_t i = 0; i < n; i++) {
        b->live[i] = it[i].seq;
        b->column[i] = 0;
        int32_t best = c->r->token[sample_row_of(&it[i])];
        /* A beam for which every token is banned has no candidates; others may. */
        if (best < 0 && best != TOKEN_NONE_ALLOWED) {
            sched_end(c->s, g, FINISH_ERROR, NO_NUMBER);
            return;
        }
    }
    if (g->first_token_us == 0) {
        g->first_token_us = c->now_us;
    }
    g->last_token_us = c->now_us;
    for (int32_t i = 0; i < n; i++) {
        const char *error = constraint_error(b->live[i]);
        if (error) {
            sched_end(c->s, g, FINISH_IMPOSSIBLE, error);
            return;
        }
        if (b->live[i]->constraint_end) {
            add_sentence(g, i);
        }
    }
    int32_t n_next = select_candidates(c, g, it, n);
    if (is_over(g, n_next, b->live[0]->n_out + 1)) {
        b->reporting = true;
        sched_end(c->s, g, FINISH_STOP, NULL);
        return;
    }
    advance_beams(c, g, it, n, n_next);
    int32_t left = PORTION;
    emit_agreed(c->out, g, &left);
}
