/* A directory is quantised while each allocation fails in turn: it is refused, nothing
 * leaks, and nothing of what was written stays. */
#include "tests/unit/nomem.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "models/quantise/quantise.h"

#define SOURCE "tests/golden/quantize/source"

/* Allocations that are done without: the buffers of FILEs, and what a backend reads of
 * the machine. */
enum { TOKENS = 16, FILES = 24, MACHINE = 12 };

static const int32_t TEXT[TOKENS] = {5, 9, 33, 2, 60, 11, 7, 7, 41, 18, 3, 52, 29, 8, 1, 14};

static char parent[] = "/tmp/quire-test-quantise-nomem-XXXXXX", to[64];
static bool is_left; /* something of a directory that was refused */

static void remove_written(void)
{
    static const char *const NAMES[] = {"config.json", "model.safetensors", QUANTISE_REPORT};
    char path[128];

    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        snprintf(path, sizeof(path), "%s/%s", to, NAMES[i]);
        unlink(path);
    }
    rmdir(to);
}

static int quantise_with(const struct quantise_options *o)
{
    struct err e = {0};
    int rc = quantise_directory(SOURCE, to, o, NULL, &e);

    if (rc == 0) {
        remove_written();
    }
    is_left = is_left || rmdir(parent) < 0 || mkdir(parent, 0700) < 0;
    return rc;
}

static int nearest(void)
{
    return quantise_with(&(struct quantise_options){.format = FORMAT_INT4, .zeros = true});
}

static int smoothed(void)
{
    return quantise_with(&(struct quantise_options){
        .format = FORMAT_INT8, .smooth = 0.5f, .fixed = true, .token = TEXT, .n_tokens = TOKENS});
}

static int searched(void)
{
    return quantise_with(&(struct quantise_options){
        .format = FORMAT_INT8, .search = true, .token = TEXT, .n_tokens = TOKENS});
}

static void directories_that_find_no_memory_are_refused(void **state)
{
    (void)state;
    if (smoothed() < 0) { /* what is made once stays */
        fail_msg("it is refused with memory");
    }
    nomem_each(nearest, 10000, 20, FILES);
    nomem_each(smoothed, 10000, 40, FILES + MACHINE);
    nomem_each(searched, 10000, 40, FILES + MACHINE);
    assert_false(is_left);
}

/* On one processor: a backend computes on this thread alone. */
static int begin(void **state)
{
    cpu_set_t one;

    (void)state;
    CPU_ZERO(&one);
    CPU_SET((size_t)sched_getcpu(), &one);
    if (sched_setaffinity(0, sizeof(one), &one) < 0 || !mkdtemp(parent)) {
        return -1;
    }
    snprintf(to, sizeof(to), "%s/to", parent);
    return 0;
}

static int end(void **state)
{
    (void)state;
    return rmdir(parent);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(directories_that_find_no_memory_are_refused),
    };

    return cmocka_run_group_tests(tests, begin, end);
}
