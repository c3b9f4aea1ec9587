/* Every allocation of the scheduler fails in turn: an error is returned and nothing is
 * leaked. */
#include "tests/unit/nomem.h"

#include "engine/sched/decode/pack.h"
#include "tests/sim/rig.h"

static struct sched_config config;
static int32_t prompt[10];

/* Makes something and, if that succeeded, frees it again. */
typedef int trial(struct err *e);

static trial *current;

static int step(void)
{
    struct err e = {0};
    int rc = current(&e);

    assert_true(rc == 0 || (rc == ERR_NOMEM && e.code == ERR_NOMEM));
    return rc;
}

static void assert_survives(trial *make)
{
    current = make;
    nomem_each(step, 10000, 1, 0);
}

static int make_sched(struct err *e)
{
    struct sched *s = NULL;
    int rc = sched_new(&s, &config, e);

    sched_free(s);
    return rc;
}

static int make_packer(struct err *e)
{
    struct packer *p = NULL;
    int rc = packer_new(&p, &config, e);

    packer_free(p);
    return rc;
}

static int make_plan(struct err *e)
{
    struct plan p = {0};
    int rc = plan_init(&p, &config, e);

    plan_release(&p);
    return rc;
}

/* Checks its allowed ids, for which it takes memory beside the group's own. */
static int make_allowed(struct err *e)
{
    static int32_t allowed[] = {5, 6}, stop[] = {5};
    struct group *g = NULL;
    struct request r = {.params = rig_params(), .prompt = prompt, .n_prompt = ARRAY_LEN(prompt)};

    r.params.n_allowed = ARRAY_LEN(allowed);
    r.params.allowed_token = allowed;
    r.params.n_stop_token = ARRAY_LEN(stop);
    r.params.stop_token = stop;
    int rc = group_new(&g, &r, NULL, &config, e);
    group_free(g);
    return rc;
}

static void a_scheduler_that_finds_no_memory_says_so(void **state)
{
    (void)state;
    config.n_host_blocks = 8;
    assert_survives(make_sched);
    assert_survives(make_plan);
}

static void a_packer_that_finds_no_memory_says_so(void **state)
{
    (void)state;
    assert_survives(make_packer);
}

static struct group *group_without_memory(struct request *r)
{
    struct group *g = NULL;
    struct err e = {0};

    counting = true;
    countdown = 0;
    int rc = group_new(&g, r, NULL, &config, &e);
    counting = false;
    countdown = -1;
    assert_true(rc == 0 || (rc == ERR_NOMEM && e.code == ERR_NOMEM));
    return g;
}

/* Groups are in pages that stay: behind the last one that fits, the next one fails. */
static void a_group_that_finds_no_page_says_so(void **state)
{
    (void)state;
    enum { MOST = 10000 };
    static struct group *g[MOST];
    struct gen_params p = rig_params();
    struct request r = {.params = p, .prompt = prompt, .n_prompt = ARRAY_LEN(prompt)};
    int32_t n = 0;

    r.params.n = r.params.best_of = 3;
    r.params.repetition_penalty = 1.5F;
    if (!REPLACED_MALLOC) {
        skip();
    }
    while (n < MOST && (g[n] = group_without_memory(&r))) {
        n++;
    }
    assert_true(n < MOST);
    while (n > 0) {
        group_free(g[--n]);
    }
}

static void a_group_that_finds_no_memory_says_so(void **state)
{
    (void)state;
    struct err e;
    assert_int_equal(make_allowed(&e), 0); /* takes the page that groups are in */
    assert_survives(make_allowed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_scheduler_that_finds_no_memory_says_so),
        cmocka_unit_test(a_packer_that_finds_no_memory_says_so),
        cmocka_unit_test(a_group_that_finds_no_page_says_so),
        cmocka_unit_test(a_group_that_finds_no_memory_says_so),
    };

    rig_config(&config);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
