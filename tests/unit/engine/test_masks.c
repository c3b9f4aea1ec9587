/* Sequences under a grammar, from scheduler to executor, with the threads that compute
 * masks: the loop of engine/loop/loop.c in small, on the null executor, which waits for
 * the masks of a step. */
#include "engine/loop/masks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "config/settings/settings.h"
#include "tests/sim/language.h"
#include "tests/sim/rig.h"

enum { VOCAB = 256, N_REQUESTS = 6, EOS = 99 };

struct loop {
    struct rig r;
    struct executor *x;
    struct masks *m;
    uint64_t launched, committed;
};

static void open_loop(struct loop *l)
{
    struct settings s = {.block_size = 4, .max_num_seqs = 8};
    static struct hist took_s;
    struct sched_config c;
    struct err e;

    rig_config(&c);
    c.vocab = VOCAB;
    rig_open(&l->r, &c);
    l->launched = l->committed = 0;
    assert_int_equal(null_open(&l->x, &s, &e), 0);
    assert_int_equal(masks_open(&l->m, l->x, &l->r.config, true, &took_s, &e), 0);
}

static void close_loop(struct loop *l)
{
    sched_end_all(l->r.sched, FINISH_ABORT, NULL);
    decode_reap(l->r.sched, &l->r.out);
    masks_reap(l->m, l->r.sched);
    masks_free(l->m);
    l->x->free(l->x);
    rig_close(&l->r);
    assert_int_equal(language_states(), 0);
}

/* Plans and launches the next step. Returns its number of items. */
static int32_t launch(struct loop *l)
{
    struct plan *p = &l->r.plan[l->launched % 2];
    int32_t n = sched_plan(l->r.sched, l->r.now_us += 1000, p);
    struct batch b;
    struct err e;

    if (n == 0) {
        return 0;
    }
    pack_batch(l->r.packer, p, &b);
    masks_planned(l->m, b.n_late_mask > 0 ? p : NULL);
    l->launched++;
    assert_int_equal(l->x->launch(l->x, &b, &e), 0);
    masks_begin(l->m, l->committed);
    return n;
}

static void commit(struct loop *l)
{
    struct results r;
    struct err e;

    assert_int_equal(l->x->wait(l->x, &r, &e), 0);
    masks_collect(l->m, l->committed, l->r.sched);
    decode_commit(l->r.sched, &l->r.plan[l->committed++ % 2], &r, l->r.now_us, &l->r.out);
    masks_begin(l->m, l->committed);
    decode_reap(l->r.sched, &l->r.out);
    masks_reap(l->m, l->r.sched);
}

/* Waits until the set under way is done. */
static void masks_settled(struct loop *l)
{
    pthread_mutex_lock(&l->m->lock);
    while (l->m->work) {
        pthread_cond_wait(&l->m->changed, &l->m->lock);
    }
    pthread_mutex_unlock(&l->m->lock);
}

static void run(struct loop *l)
{
    for (;;) {
        int32_t n = launch(l);
        if (n == 0 && l->launched == l->committed) {
            return;
        }
        if (l->launched - l->committed > (uint64_t)(n > 0)) {
            commit(l);
        }
    }
}

static struct rig_request *add(struct loop *l, struct gen_params p, uint64_t key, bool fails)
{
    struct rig_request *q = rig_add(&l->r, p, 1, 5);

    if (key) {
        q->group->first.constraint = language_node(key, fails, &l->r.config);
    }
    return q;
}

/* What the choice's tokens leave: whether all are allowed, and where they end. */
static bool speaks(const struct loop *l, const struct rig_request *q, int32_t choice, uint64_t key,
                   uint64_t *ret_place)
{
    uint64_t place = language_start(key);

    for (int32_t i = 0; i < l->r.n_deltas; i++) {
        const struct delta *d = &l->r.delta[i];
        if (d->request != &q->request || d->kind != DELTA_TOKEN || d->choice != choice) {
            continue;
        }
        if (!language_allows(place, d->token, &l->r.config)) {
            return false;
        }
        place = language_read(place, d->token);
    }
    *ret_place = place;
    return true;
}

static void every_choice_speaks_its_language(void **state)
{
    (void)state;
    struct loop l;
    struct rig_request *q[N_REQUESTS];
    int32_t n_complete = 0;
    open_loop(&l);
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        struct gen_params p = rig_params();
        p.n = p.best_of = 1 + i % 3;
        p.max_tokens = 24;
        p.temperature = 1;
        p.seed = (uint64_t)i;
        q[i] = add(&l, p, i == 2 ? 0 : (uint64_t)i + 11, false);
    }
    run(&l);
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        for (int32_t k = 0; k < 1 + i % 3 && i != 2; k++) {
            const struct delta *d = rig_finish(&l.r, q[i], k);
            uint64_t place = 0;
            assert_true(speaks(&l, q[i], k, (uint64_t)i + 11, &place));
            assert_non_null(d);
            bool by_grammar = d->finish == FINISH_STOP && language_ended(place);
            assert_true(by_grammar || d->finish == FINISH_LENGTH || d->finish == FINISH_STOP);
            n_complete += by_grammar;
        }
    }
    assert_true(n_complete > 0);
    close_loop(&l);
}

static void a_state_that_costs_too_much_ends_its_choice_alone(void **state)
{
    (void)state;
    uint64_t key = 1;
    struct loop l;
    while (!language_fails(language_start(key)) || language_ended(language_start(key))) {
        key++;
    }
    open_loop(&l);
    struct gen_params p = rig_params();
    p.n = p.best_of = 2;
    struct rig_request *costly = add(&l, p, key, true), *other = add(&l, rig_params(), 0, false);
    run(&l);
    for (int32_t k = 0; k < 2; k++) {
        assert_int_equal(rig_finish(&l.r, costly, k)->finish, FINISH_IMPOSSIBLE);
        assert_non_null(rig_finish(&l.r, costly, k)->error);
        assert_int_equal(rig_count(&l.r, costly, DELTA_TOKEN, k), 0);
    }
    assert_int_equal(rig_finish(&l.r, other, 0)->finish, FINISH_LENGTH);
    close_loop(&l);
}

/* A key whose language is slow at its start, and fails there or not. */
static uint64_t slow_key(bool fails)
{
    uint64_t key = LANGUAGE_SLOW;

    while (language_fails(language_start(key)) != fails || language_ended(language_start(key))) {
        key += 2 * LANGUAGE_SLOW;
    }
    return key;
}

/* Steps until a request beside one of a slow language has its tokens. */
static uint64_t steps_beside(struct loop *l, const struct rig_request *other)
{
    while (!rig_finish(&l->r, other, 0)) {
        int32_t n = launch(l);
        if (l->launched - l->committed > (uint64_t)(n > 0)) {
            commit(l);
        }
    }
    return l->committed;
}

/* It gets a token a step meanwhile, and the late one what its language allows. */
static void late_masks_delay_their_sequence_alone(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 3; n++) {
        struct loop l;
        uint64_t key = slow_key(false), place;
        open_loop(&l);
        struct gen_params p = rig_params();
        p.max_tokens = 12;
        p.beam_width = n == 3 ? 2 : 0;
        p.n = p.best_of = MIN(n, 2);
        struct rig_request *slow = add(&l, p, key, false), *other = add(&l, p, 0, false);
        uint64_t steps = steps_beside(&l, other);
        assert_true(steps <= 14);
        assert_true(rig_count(&l.r, slow, DELTA_TOKEN, 0) < 12);
        run(&l);
        assert_true(l.committed > steps + 10);
        for (int32_t k = 0; k < p.n; k++) {
            assert_true(rig_finish(&l.r, slow, k)->finish != FINISH_IMPOSSIBLE);
            assert_true(n == 3 || speaks(&l, slow, k, key, &place));
        }
        close_loop(&l);
    }
}

static void a_mask_without_end_ends_its_choice_alone(void **state)
{
    (void)state;
    struct loop l;
    open_loop(&l);
    struct rig_request *endless = add(&l, rig_params(), slow_key(true), true),
                       *other = add(&l, rig_params(), 0, false);
    assert_true(steps_beside(&l, other) <= 18);
    run(&l);
    assert_int_equal(rig_finish(&l.r, endless, 0)->finish, FINISH_IMPOSSIBLE);
    assert_non_null(rig_finish(&l.r, endless, 0)->error);
    assert_int_equal(rig_count(&l.r, endless, DELTA_TOKEN, 0), 0);
    assert_true(l.committed < 2 * MASK_WORK_MOST / MASK_WORK_STEP);
    close_loop(&l);
}

/* ---- steps that take more work than their job has ---- */

enum { LARGE_STEP = 4 * MASK_WORK_SET };

static struct constraint_ops languages; /* those of tests/sim/language.c */
static _Atomic(int32_t) n_large;        /* large steps since the last commit */

/* A mask that is one step: it cannot be interrupted, only not begun. */
static int large_mask(struct constraint *c, uint32_t *mask, int64_t *work)
{
    int64_t all = INT64_MAX;

    if (*work <= 0) {
        return MASK_UNFINISHED;
    }
    n_large++;
    *work -= LARGE_STEP;
    return languages.mask(c, mask, &all);
}

/* In each step of the engine only as many are made as threads begin before the first is
 * done; each sequence has its turn nevertheless. */
static void large_steps_are_spread_over_steps(void **state)
{
    static struct constraint_ops large;
    struct rig_request *q[N_REQUESTS];
    struct loop l;

    (void)state;
    open_loop(&l);
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        struct gen_params p = rig_params();
        p.max_tokens = 12;
        p.temperature = 1;
        p.seed = (uint64_t)i;
        q[i] = add(&l, p, 64 * (uint64_t)(i + 1), false);
        struct constraint_node *n = q[i]->group->first.constraint;
        languages = large = *n->ops;
        large.mask = large_mask;
        n->ops = &large;
    }
    int32_t most = l.m->n_threads + l.m->n_threads / 4 + 1;
    for (int32_t n = 1; n > 0 || l.launched > l.committed;) {
        n = launch(&l);
        if (l.launched - l.committed > (uint64_t)(n > 0)) {
            n_large = 0;
            commit(&l);
            masks_settled(&l);
            assert_in_range(n_large, 0, most);
            assert_true(l.committed < 1000);
        }
    }
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        uint64_t place = 0;
        assert_true(rig_finish(&l.r, q[i], 0)->finish != FINISH_IMPOSSIBLE);
        assert_true(speaks(&l, q[i], 0, 64 * (uint64_t)(i + 1), &place));
    }
    close_loop(&l);
}

/* The engine dies or stops: a step in flight ends without its masks, whether they were
 * begun or not. */
static void abandoned_steps_end(void **state)
{
    (void)state;
    for (int32_t n_launched = 1; n_launched <= 2; n_launched++) {
        struct loop l;
        struct results r;
        struct err e;
        open_loop(&l);
        add(&l, rig_params(), 5, false);
        for (int32_t i = 0; i < n_launched; i++) {
            assert_int_equal(launch(&l), 1);
        }
        masks_abandon(l.m, l.committed, l.r.sched);
        for (; l.committed < l.launched; l.committed++) {
            assert_int_equal(l.x->wait(l.x, &r, &e), 0);
            decode_abandon(l.r.sched, &l.r.plan[l.committed % 2]);
        }
        close_loop(&l);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_choice_speaks_its_language),
        cmocka_unit_test(a_state_that_costs_too_much_ends_its_choice_alone),
        cmocka_unit_test(late_masks_delay_their_sequence_alone),
        cmocka_unit_test(a_mask_without_end_ends_its_choice_alone),
        cmocka_unit_test(large_steps_are_spread_over_steps),
        cmocka_unit_test(abandoned_steps_end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
