/* Every allocation of the engine's heart made to fail in turn: an error comes back, and nothing is leaked.
 * malloc and calloc are replaced in this program; under a sanitizer, which replaces them itself, the test is skipped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "engine/pack.h"
#include "tests/sim/rig.h"

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CAN_FAIL 1

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void __libc_free(void *p);

static int64_t fail_after = -1; /* allocations that still succeed; -1: all */
static int64_t live;            /* blocks allocated and not freed, while counting */

static bool fails(void)
{
    return fail_after >= 0 && fail_after-- == 0;
}

void *malloc(size_t size)
{
    void *p = fails() ? NULL : __libc_malloc(size);
    live += p != NULL;
    return p;
}

void *calloc(size_t n, size_t size)
{
    void *p = fails() ? NULL : __libc_calloc(n, size);
    live += p != NULL;
    return p;
}

void free(void *p)
{
    live -= p != NULL;
    __libc_free(p);
}
#else
#define CAN_FAIL 0
static int64_t fail_after, live;
#endif

static struct sched_config config;
static int32_t prompt[10];

/* Makes something, and takes it apart again when that worked. */
typedef int trial(struct err *e);

static void assert_survives(trial *make)
{
    if (!CAN_FAIL)
        skip();
    int64_t failures = 0;
    for (;; failures++) {
        struct err e = {0};
        int64_t before = live;
        fail_after = failures;
        int code = make(&e);
        bool all_worked = fail_after >= 0;
        fail_after = -1;
        assert_int_equal(live, before);
        if (all_worked) {
            assert_int_equal(code, 0);
            break;
        }
        assert_int_equal(code, ERR_NOMEM);
        assert_int_equal(e.code, ERR_NOMEM);
    }
    assert_true(failures > 0);
}

static int make_sched(struct err *e)
{
    struct sched *s = NULL;
    int code = sched_new(&s, &config, e);
    sched_free(s);
    return code;
}

static int make_packer(struct err *e)
{
    struct packer *p = NULL;
    int code = packer_new(&p, &config, e);
    packer_free(p);
    return code;
}

static int make_plan(struct err *e)
{
    struct plan p = {0};
    int code = plan_init(&p, &config, e);
    plan_release(&p);
    return code;
}

static int make_group_of(struct gen_params p, struct err *e)
{
    struct group *g = NULL;
    struct request r = {.params = p, .prompt = prompt, .n_prompt = ARRAY_LEN(prompt)};
    int code = group_new(&g, &r, NULL, &config, e);
    group_free(g);
    return code;
}

static int make_samples(struct err *e)
{
    struct gen_params p = rig_params();
    p.n = p.best_of = 3;
    p.repetition_penalty = 1.5F;
    return make_group_of(p, e);
}

static int make_beams(struct err *e)
{
    struct gen_params p = rig_params();
    p.beam_width = p.best_of = p.n = 3;
    p.n_logprobs = 2;
    return make_group_of(p, e);
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

static void a_group_that_finds_no_memory_says_so(void **state)
{
    (void)state;
    assert_survives(make_samples);
    assert_survives(make_beams);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_scheduler_that_finds_no_memory_says_so),
        cmocka_unit_test(a_packer_that_finds_no_memory_says_so),
        cmocka_unit_test(a_group_that_finds_no_memory_says_so),
    };
    rig_config(&config);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
