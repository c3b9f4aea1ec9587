/* The memory of a group from its first admission until it is freed: one run of the
 * scheduler's regions, with its sequences, their tables and tokens, and the state of a
 * beam search. */
#include <assert.h>
#include <string.h>

#include "engine/sched/decode/beam.h"
#include "engine/sched/decode/beam_text.h"
#include "engine/sched/sched_impl.h"

/* ---- the state of a beam search ---- */

/* candidates that may complete one stop string: "\n", "\n\n", ".\n" */
enum { TOKENS_A_STOP = 4 };

static struct beam_text *carve_text(const struct request *r, const struct tokenizer *tokenizer,
                                    struct carver *at)
{
    const struct gen_params *p = &r->params;

    if (r->params.n_stop == 0 || !tokenizer) {
        return NULL;
    }
    struct beam_text *t = carve(at, 1, sizeof(*t));
    struct text_state *live = carve(at, p->beam_width, sizeof(*live));
    struct text_state *saved = carve(at, p->beam_width, sizeof(*saved));
    if (t) {
        *t = (struct beam_text){.stops = r->stops, .min_tokens = p->min_tokens};
        t->live = live;
        t->saved = saved;
    }
    return t;
}

/* Set the sizes of its arrays. */
static void set_sizes(struct beam *b, const struct group *g, const struct sched_config *c)
{
    const struct gen_params *p = &g->request->params;
    int32_t stops = p->n_stop_token + c->n_eos + TOKENS_A_STOP * p->n_stop;

    b->width = p->beam_width;
    b->n = p->n;
    /* Enough that `width` candidates remain if all stop ids, and tokens that complete
     * stop strings, are among the best. */
    b->n_candidates = MIN(MIN(MAX(2 * b->width, b->width + stops), LIMIT_CANDIDATES), c->vocab);
    /* At least as many as the client asks for. */
    b->n_candidates = MAX(b->n_candidates, MIN(p->n_logprobs, c->vocab));
    b->n_top = MAX(MIN(p->n_logprobs, b->n_candidates), 0);
    b->n_nodes = 1 + 2 * b->width * (g->max_tokens + 1); /* paths of live beams and hypotheses */
}

static struct beam *carve_beam(const struct group *g, const struct sched_config *c,
                               struct carver *at)
{
    struct beam b = {0}, *ret = carve(at, 1, sizeof(b));

    set_sizes(&b, g, c);
    int64_t tops = (int64_t)b.n_nodes * b.n_top;
    b.tip = carve(at, b.width, sizeof(*b.tip));
    b.hypothesis = carve(at, b.width, sizeof(*b.hypothesis));
    b.next = carve(at, b.width, sizeof(*b.next));
    b.column = carve(at, b.width, sizeof(*b.column));
    b.live = carve(at, b.width, sizeof(struct seq *));
    b.text = carve_text(g->request, c->tokenizer, at);
    b.node = carve(at, b.n_nodes, sizeof(*b.node));
    b.top_token = carve(at, tops, sizeof(*b.top_token));
    b.top_logprob = carve(at, tops, sizeof(*b.top_logprob));
    if (!ret) {
        return NULL;
    }
    *ret = b;
    memset(b.tip, -1, (size_t)b.width * sizeof(*b.tip));
    b.node[0] = (struct beam_node){.parent = -1, .token = -1, .n_holders = 1};
    b.tip[0] = 0;
    ret->n_used = 1;
    ret->n_sent = ret->n;
    ret->first_free = -1;
    return ret;
}

static int64_t beam_bytes_most(int32_t max_len)
{
    int64_t top = LIMIT_LOGPROBS * (int64_t)(sizeof(int32_t) + sizeof(float));
    int64_t node = (int64_t)sizeof(struct beam_node) + top;
    int64_t rest = sizeof(struct beam) + sizeof(struct beam_hypothesis) +
                   sizeof(struct beam_choice) + sizeof(struct beam_text) +
                   2 * sizeof(struct text_state) + 1024;

    return (2 * (int64_t)max_len + 3) * node + rest;
}

/* ---- a group's sequences ---- */

int64_t group_lay_out(struct group *g, const struct sched_config *c, char *base)
{
    struct carver at = {.base = base};
    struct seq *seq = g->width > 1 ? carve(&at, g->width, sizeof(*seq)) : &g->first;
    struct beam *beam = g->beams ? carve_beam(g, c, &at) : NULL;
    int32_t n_groups = sched_kv_groups(c), n_states = sched_states_before(c, n_groups);

    for (int32_t i = 0; i < g->width; i++) {
        int32_t *block = carve(&at, (int64_t)n_groups * g->max_blocks, sizeof(*block));
        int32_t *out = carve(&at, MAX(g->max_tokens, 1), sizeof(*out));
        int32_t *spare = carve(&at, (int64_t)n_states * LIMIT_DRAFT, sizeof(*spare));
        if (!base) {
            continue;
        }
        if (seq != &g->first) {
            seq[i] = (struct seq){0};
        }
        seq[i].out = out;
        seq[i].spare = spare;
        for (int32_t k = 0; k < n_groups; k++) {
            seq[i].table[k].block = block + (int64_t)k * g->max_blocks;
        }
    }
    if (base) {
        g->seq = seq;
        g->beam = beam;
    }
    return at.at;
}

/* Twice the memory of max_num_seqs sequences at their longest: for running groups, and
 * as much for preempted ones. */
int64_t group_bytes_most(const struct sched_config *c)
{
    int64_t blocks = sched_kv_groups(c) * div_ceil(c->max_len, c->block_size);
    int64_t spare = (int64_t)sched_states_before(c, sched_kv_groups(c)) * LIMIT_DRAFT;
    int64_t tables = (int64_t)sizeof(struct seq) + 4 * (blocks + c->max_len + spare) + 64;
    int64_t seq = tables + beam_bytes_most(c->max_len);

    return 2 * c->max_num_seqs * seq;
}

bool can_start(struct sched *s, const struct group *g)
{
    return g->memory || regions_fits(&s->regions, g->n_bytes);
}

bool group_start(struct sched *s, struct group *g)
{
    char *memory = regions_take(&s->regions, g->n_bytes);

    if (!memory) {
        return false;
    }
    int64_t n_bytes = group_lay_out(g, &s->c, memory);
    assert(n_bytes == g->n_bytes);
    (void)n_bytes;
    g->memory = memory;
    g->n_seqs = g->width;
    for (int32_t i = 0; i < g->width; i++) {
        struct seq *q = &g->seq[i];
        q->group = g;
        q->index = i;
        q->slot = -1;
        q->n_tokens = g->n_prompt;
        q->seed = seq_seed(g->request->seed, i);
    }
    if (g->seq != &g->first) {
        g->seq[0].state = g->first.state;
        g->seq[0].chain = g->first.chain; /* as looked up in the prefix cache */
        g->seq[0].constraint = g->first.constraint;
        g->first.constraint = NULL;
    }
    if (g->beam && g->text_start) {
        g->beam->text->piece = &s->text;
        g->beam->text->live[0] = (struct text_state){.detok = *g->text_start};
    }
    return true;
}

void group_end_memory(struct sched *s, struct group *g)
{
    if (!g->memory) {
        return;
    }
    regions_give(&s->regions, g->memory, g->n_bytes);
    g->memory = NULL;
    g->beam = NULL;
    g->first.constraint = g->seq[0].constraint;
    g->first.out = NULL;
    g->seq = &g->first;
    g->n_seqs = 1;
}
