/* Tests the `prefixes` setting on the null executor. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/pinned_prefixes.h"
#include "tests/sim/recorder.h"

#define PREFIX "You answer questions about ships, briefly, and never about anything else. "

static struct recorder recorder;

static int open_with(struct engine **ret, struct settings *s, const char *text, struct err *e)
{
    static struct prefix_setting prefix;
    struct executor *x;
    struct tokenizer *t;

    prefix.text = (char *)text;
    *s = (struct settings){.block_size = 16,
                           .max_queue = 64,
                           .step_timeout = 60,
                           .prefix_cache = true,
                           .prefixes = &prefix,
                           .n_prefixes = 1,
                           .kv_blocks = 64};
    assert_int_equal(null_open(&x, s, e), 0);
    assert_int_equal(tokenizer_open_bytes(&t, e), 0);
    return engine_open_on(ret, s, x, t, &recorder.sink, e);
}

static struct usage ask(struct engine *e, const char *text, const char *salt)
{
    struct gen_params p;
    struct request *r;
    struct err err;
    int32_t *ids, n;

    assert_int_equal(engine_encode(e, text, strlen(text), true, 1000, &ids, &n, &err), 0);
    gen_params_init(&p, e);
    p.max_tokens = 3;
    p.cache_salt = salt ? strdup(salt) : NULL;
    assert_int_equal(request_new(&r, &p, ids, n, &err), 0);
    free(ids);
    struct recording *rec = recording_new();
    r->user = rec;
    assert_int_equal(engine_submit(e, r, &err), 0);
    request_unref(r);
    assert_true(recorder_wait(&recorder, rec, 60));
    struct usage u = rec->usage;
    recording_free(rec);
    return u;
}

static void the_first_request_finds_its_prefix_computed(void **state)
{
    (void)state;
    struct engine *e;
    struct settings s;
    struct err err = {0};
    recorder_init(&recorder);
    assert_int_equal(open_with(&e, &s, PREFIX, &err), 0);
    assert_int_equal(e->config.n_pinned, (int32_t)strlen(PREFIX) / 16);
    struct usage u = ask(e, PREFIX "What is a ketch?", NULL);
    assert_int_equal(u.cached_tokens, (int32_t)strlen(PREFIX) / 16 * 16);
    assert_int_equal(u.completion_tokens, 3);
    assert_int_equal(
        ask(e, "Something else, as long as it may be, finds nothing.", NULL).cached_tokens, 0);
    engine_free(e);
    recorder_release(&recorder);
}

static void a_salt_finds_the_prefixes_and_what_is_its_own(void **state)
{
    static const char text[] =
        PREFIX "What is a ketch, and what is a yawl? The mizzen mast stands before the rudder.";
    const int32_t pinned = (int32_t)strlen(PREFIX) / 16 * 16,
                  whole = (int32_t)strlen(text) / 16 * 16;
    struct engine *e;
    struct settings s;
    struct err err = {0};

    (void)state;
    recorder_init(&recorder);
    assert_int_equal(open_with(&e, &s, PREFIX, &err), 0);
    assert_int_equal(ask(e, text, NULL).cached_tokens, pinned);
    assert_int_equal(ask(e, text, "one").cached_tokens, pinned);
    assert_int_equal(ask(e, text, "two").cached_tokens, pinned);
    assert_int_equal(ask(e, text, "one").cached_tokens, whole);
    assert_int_equal(ask(e, text, NULL).cached_tokens, whole);
    engine_free(e);
    recorder_release(&recorder);
}

static void prefixes_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    static char text[16 * 40 + 1];
    struct engine *e = NULL;
    struct settings s;
    struct err err = {0};
    memset(text, 'x', sizeof(text) - 1);
    recorder_init(&recorder);
    assert_int_equal(open_with(&e, &s, text, &err), ERR_INVALID); /* 40 of 64 blocks */
    assert_non_null(strstr(err.text, "40 KV blocks"));
    assert_null(e);
    recorder_release(&recorder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_request_finds_its_prefix_computed),
        cmocka_unit_test(a_salt_finds_the_prefixes_and_what_is_its_own),
        cmocka_unit_test(prefixes_that_do_not_fit_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
