#include "tests/sim/language.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "engine/loop/masks.h"
#include "tests/sim/toy.h"

/* Three steps' work, so that a job is late twice. */
enum { SLOW_WORK = 2 * MASK_WORK_STEP + MASK_WORK_STEP / 2 };

static _Atomic int64_t n_states;

struct constraint {
    const struct sched_config *config;
    uint64_t place;
    bool fails;
    bool slow;    /* some places take much work */
    int64_t done; /* of this place's */
    bool settled; /* nothing was read since the last settle */
};

uint64_t language_start(uint64_t key)
{
    return toy_read(toy_start() ^ key, 1);
}

uint64_t language_read(uint64_t place, int32_t token)
{
    return toy_read(place, token);
}

static bool is_eos(const struct sched_config *c, int32_t token)
{
    for (int32_t i = 0; i < c->n_eos; i++) {
        if (c->eos[i] == token) {
            return true;
        }
    }
    return false;
}

/* An id that may always come next. */
static int32_t way_on(uint64_t place, const struct sched_config *c)
{
    int32_t t = (int32_t)(place % (uint64_t)c->vocab);

    while (is_eos(c, t)) {
        t = (t + 1) % c->vocab;
    }
    return t;
}

/* Whether there is no choice: one token may come next, and no end. */
static bool is_forced(uint64_t place)
{
    return place >> 30 & 1;
}

bool language_allows(uint64_t place, int32_t token, const struct sched_config *c)
{
    if (is_forced(place)) {
        return token == way_on(place, c);
    }
    if (is_eos(c, token)) {
        return place >> 8 & 1;
    }
    return toy_read(place, token) % 4 == 0 || token == way_on(place, c);
}

bool language_ended(uint64_t place)
{
    return place >> 20 & 1 ? place % 7 == 0 : false;
}

bool language_fails(uint64_t place)
{
    return place % 101 == 0;
}

/* Whether what is asked there takes SLOW_WORK. */
static bool language_slow(uint64_t place)
{
    return place >> 12 & 1;
}

/* ---- the fake constraint ---- */

static int fake_fork(struct constraint **ret, const struct constraint *c, struct err *e)
{
    (void)e;
    struct constraint *made = malloc(sizeof(*made));
    if (!made) {
        return ERR_NOMEM;
    }
    *made = *c;
    n_states++;
    *ret = made;
    return 0;
}

static void fake_free(struct constraint *c)
{
    n_states--;
    free(c);
}

/* Whether the work of what is asked at this place is done: some places take much, which
 * is kept from call to call. */
static bool fake_work(struct constraint *c, int64_t *work)
{
    int64_t need = c->slow && language_slow(c->place) ? SLOW_WORK - c->done : 0;
    int64_t done = MIN(need, MAX(*work, 0));

    c->done += done;
    *work -= done;
    return done == need;
}

static int fake_mask(struct constraint *c, uint32_t *mask, int64_t *work)
{
    if (!fake_work(c, work)) {
        return MASK_UNFINISHED;
    }
    if (c->fails && language_fails(c->place)) {
        *work = c->slow ? 0 : *work;
        return c->slow ? MASK_UNFINISHED : ERR_FULL;
    }
    for (int32_t t = 0; t < c->config->vocab; t++) {
        if (language_allows(c->place, t, c->config)) {
            mask[t / 32] |= UINT32_C(1) << t % 32;
        }
    }
    return c->settled ? 0 : ERR_INVALID;
}

static int fake_accept(struct constraint *c, int32_t token, int64_t *work)
{
    if (!fake_work(c, work)) {
        return MASK_UNFINISHED;
    }
    if (language_ended(c->place) || !language_allows(c->place, token, c->config)) {
        return ERR_INVALID;
    }
    c->place = language_read(c->place, token);
    c->done = 0;
    c->settled = false;
    return 0;
}

static void fake_settle(struct constraint *c)
{
    c->settled = true;
}

static int fake_ended(struct constraint *c, int64_t *work)
{
    (void)work;
    return language_ended(c->place);
}

/* Some are wrong, as where a model writes the same bytes in other tokens. */
static int32_t fake_forced(struct constraint *c, int32_t *ret, int32_t max)
{
    uint64_t place = c->place;
    int32_t n = 0;

    while (n < max && is_forced(place) && !language_ended(place)) {
        ret[n] = way_on(place, c->config);
        place = language_read(place, ret[n]);
        ret[n] = place % 31 == 0 ? (ret[n] + 1) % c->config->vocab : ret[n];
        n++;
    }
    return n;
}

static const struct constraint_ops FAKE = {.fork = fake_fork,
                                           .free = fake_free,
                                           .mask = fake_mask,
                                           .accept = fake_accept,
                                           .settle = fake_settle,
                                           .ended = fake_ended,
                                           .forced = fake_forced};

struct constraint_node *language_node(uint64_t key, bool fails, const struct sched_config *c)
{
    struct constraint start = {.config = c,
                               .place = language_start(key),
                               .fails = fails,
                               .slow = key & LANGUAGE_SLOW},
                      *state;
    struct constraint_node *n;
    struct err e;

    return fake_fork(&state, &start, &e) == 0 && constraint_node_new(&n, &FAKE, state, &e) == 0
               ? n
               : NULL;
}

int64_t language_states(void)
{
    return n_states;
}
