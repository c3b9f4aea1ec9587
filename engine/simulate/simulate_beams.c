/* Replays recorded beam searches (simulate_record.c), so that beams fork and die as
 * real ones.
 *
 * A record has one word a step, with one letter for each live beam, best first: the
 * rank that its parent had. The candidates made here lead the production search to
 * exactly these children: the child of rank r has a cumulative log-probability of -r,
 * so a beam's rank can be read off it, and all other candidates are hopeless. A search
 * longer than its record continues with another one. A width without a record uses the
 * best beams of the next wider one, or the widest one's side by side. */
#include <math.h>
#include <string.h>

#include "engine/simulate/simulate_impl.h"

#define HOPELESS (-1e6F)

/* A random record of the given width. Records are ordered by width. */
static const char *choose_record(int32_t width, uint64_t *rng)
{
    int32_t first = 0, last = sim_n_beam_records - 1;

    while (first < last && sim_beam_records[first].width < width) {
        first++;
    }
    while (first > 0 && sim_beam_records[first - 1].width == sim_beam_records[first].width) {
        first--;
    }
    while (sim_beam_records[last].width != sim_beam_records[first].width) {
        last--;
    }
    return sim_beam_records[first + (int32_t)(sim_uniform(rng) * (last - first + 1))].steps;
}

void beam_replay_step(struct beam_replay *b, int32_t width, uint64_t *rng)
{
    bool fresh = !b->step;

    b->step = fresh ? choose_record(width, rng) : b->step + b->n;
    b->step += strspn(b->step, " ");
    if (*b->step == '\0') {
        b->step = choose_record(width, rng);
        /* skip the first step, in which all beams have one parent */
        b->step += strcspn(b->step, " ");
        b->step += strspn(b->step, " ");
    }
    b->n = (int32_t)strcspn(b->step, " ");
}

static int32_t parent_of(const struct beam_replay *b, int32_t child, int32_t n_live)
{
    int32_t parent = b->step[child % b->n] - 'a' + child / b->n * b->n;

    return parent % n_live;
}

int32_t beam_replay_copies(const struct beam_replay *b, const struct group *g)
{
    bool taken[LIMIT_CHOICES] = {false};
    int32_t n = 0;

    for (int32_t child = 0; child < g->width; child++) {
        bool *parent = &taken[parent_of(b, child, g->n_live)];
        n += *parent;
        *parent = true;
    }
    return n;
}

void beam_replay_candidates(const struct beam_replay *b, const struct seq *q, int32_t stride,
                            int32_t *top, float *top_logprob)
{
    const struct group *g = q->group;
    int32_t rank = (int32_t)lround(-q->cum_logprob), n = 0;

    for (int32_t child = 0; child < g->width && n < stride; child++) {
        if (parent_of(b, child, g->n_live) == rank) {
            top_logprob[n++] = (float)(-child - q->cum_logprob);
        }
    }
    for (int32_t k = n; k < stride; k++) {
        top_logprob[k] = HOPELESS - (float)k;
    }
    for (int32_t k = 0; k < stride; k++) {
        top[k] = k + 1;
    }
}
