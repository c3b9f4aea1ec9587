/* The store of product algorithms: what persists from run to run, and unusable
 * files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config/base/base.h"
#include "kernels/cuda/gemm/heuristics_products.h"
#include "tests/unit/kept_dir.h"

static struct product_key key(int32_t n)
{
    struct product_key k;

    memset(&k, 0, sizeof(k));
    k.m = 8;
    k.n = n;
    k.k = 4096;
    return k;
}

static void put(struct product_store *s, int32_t n, int32_t algo)
{
    struct product_key k = key(n);
    struct product_choice c = {.algo = {(uint64_t)algo}};

    product_store_put(s, &k, &c);
}

/* The algorithm remembered for n, -1 when nothing is. */
static int32_t algo_of(const struct product_store *s, int32_t n)
{
    struct product_key k = key(n);
    const struct product_choice *c = product_store_find(s, &k);

    return c ? (int32_t)c->algo[0] : -1;
}

/* Makes a file with two products in `root`; returns its path. */
static void make_file(char path[512])
{
    struct product_store s;

    product_store_open(&s, root, "a device");
    put(&s, 100, 16);
    put(&s, 200, 24);
    product_store_save(&s);
    memcpy(path, s.path, 512);
    product_store_release(&s);
}

static int32_t count_from(const char *dir, const char *device)
{
    struct product_store s;

    product_store_open(&s, dir, device);
    int32_t n = s.n;
    product_store_release(&s);
    return n;
}

/* Ranks time for themselves and may keep different files. */
static void what_ranks_must_choose_alike_is_neither_timed_nor_kept(void **state)
{
    (void)state;
    struct product_key own = key(300), alike = own;
    struct product_choice c = {.algo = {32}};
    struct product_store s;

    alike.alike = 1;
    assert_true(product_may_be_timed(&own));
    assert_false(product_may_be_timed(&alike));
    own.m = PRODUCT_TIMED_ROWS + 1;
    assert_false(product_may_be_timed(&own));
    own.m = alike.m;
    product_store_open(&s, root, "a device of ranks");
    product_store_put(&s, &alike, &c);
    assert_int_equal(s.n, 0);
    assert_null(product_store_find(&s, &alike));
    product_store_put(&s, &own, &c);
    assert_int_equal(s.n, 1);
    assert_null(product_store_find(&s, &alike));
    assert_non_null(product_store_find(&s, &own));
    s.record[0].key.alike = 1; /* as another build might have kept it */
    assert_null(product_store_find(&s, &alike));
    product_store_release(&s);
}

static void what_was_found_is_known_in_the_next_run(void **state)
{
    (void)state;
    char path[512];
    make_file(path);
    struct product_store s;
    product_store_open(&s, root, "a device");
    assert_int_equal(s.n, 2);
    assert_int_equal(algo_of(&s, 100), 16);
    assert_int_equal(algo_of(&s, 200), 24);
    assert_int_equal(algo_of(&s, 300), -1);
    put(&s, 100, 32); /* found better */
    assert_int_equal(s.n, 2);
    product_store_save(&s);
    product_store_release(&s);
    product_store_open(&s, root, "a device");
    assert_int_equal(algo_of(&s, 100), 32);
    product_store_release(&s);
    assert_int_equal(count_from(root, "another device"), 0);
}

static void a_file_that_changed_counts_as_none(void **state)
{
    (void)state;
    char path[512];
    make_file(path);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    char *good = malloc((size_t)st.st_size);
    assert_non_null(good);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fread(good, 1, (size_t)st.st_size, f), st.st_size);
    fclose(f);
    /* one byte changed; in the last round, half of the file */
    for (long i = 0; i <= st.st_size; i++) {
        f = fopen(path, "wb");
        assert_non_null(f);
        if (i < st.st_size) {
            good[i] ^= 0x40;
        }
        fwrite(good, 1, (size_t)(i < st.st_size ? st.st_size : st.st_size / 2), f);
        fclose(f);
        struct product_store s;
        product_store_open(&s, root, "a device");
        assert_int_equal(s.n, 0);
        assert_true(s.damaged);
        product_store_release(&s);
        if (i < st.st_size) {
            good[i] ^= 0x40;
        }
    }
    free(good);
    make_file(path); /* and is made anew */
    assert_int_equal(count_from(root, "a device"), 2);
}

static void a_place_that_cannot_be_written_is_no_error(void **state)
{
    (void)state;
    char path[512];
    make_file(path); /* a file where a directory is needed */
    struct product_store s;
    product_store_open(&s, path, "a device");
    put(&s, 100, 16);
    product_store_save(&s);
    assert_int_equal(algo_of(&s, 100), 16);
    product_store_release(&s);
}

/* Each opens before the other saves. */
static void processes_keep_what_was_saved_first(void **state)
{
    (void)state;
    struct product_store one, other;
    product_store_open(&one, root, "shared");
    product_store_open(&other, root, "shared");
    put(&one, 100, 16);
    put(&one, 200, 24);
    product_store_save(&one);
    put(&other, 200, 32);
    put(&other, 300, 40);
    product_store_save(&other);
    assert_int_equal(algo_of(&other, 200), 24);
    put(&one, 400, 48);
    product_store_save(&one);
    product_store_release(&one);
    product_store_release(&other);
    product_store_open(&one, root, "shared");
    assert_int_equal(one.n, 4);
    assert_int_equal(algo_of(&one, 100), 16);
    assert_int_equal(algo_of(&one, 200), 24);
    assert_int_equal(algo_of(&one, 300), 40);
    assert_int_equal(algo_of(&one, 400), 48);
    product_store_open(&other, root, "shared");
    put(&other, 500, 56);
    product_store_save(&other);
    put(&one, 200, 64); /* what there was is of no use any more */
    product_store_save(&one);
    assert_int_equal(algo_of(&one, 500), 56);
    product_store_release(&one);
    product_store_release(&other);
    product_store_open(&one, root, "shared");
    assert_int_equal(algo_of(&one, 200), 64);
    assert_int_equal(algo_of(&one, 500), 56);
    product_store_release(&one);
}

static int measured;

static int32_t find_memory(void *arg)
{
    measured++;
    return *(int32_t *)arg;
}

/* What the store says of the device's memory, where measuring finds `found`. */
static int64_t memory_of(const char *dir, int32_t found)
{
    struct product_store s;

    product_store_open(&s, dir, "memory");
    product_store_memory(&s, find_memory, &found);
    int64_t ret = s.memory_gbs;
    product_store_release(&s);
    return ret;
}

static void memory_is_measured_once(void **state)
{
    (void)state;
    char path[512];
    struct product_store s;
    measured = 0;
    assert_int_equal(memory_of(root, 0), 0); /* nothing was found, and is not kept */
    assert_int_equal(memory_of(root, 4917), 4917);
    assert_int_equal(memory_of(root, 1000), 4917);
    assert_int_equal(measured, 2);
    product_store_open(&s, root, "memory"); /* products stand beside it */
    put(&s, 100, 16);
    product_store_save(&s);
    memcpy(path, s.path, sizeof(path));
    product_store_release(&s);
    assert_int_equal(memory_of(root, 1000), 4917);
    assert_int_equal(count_from(root, "memory"), 1);
    assert_int_equal(measured, 2);
    assert_int_equal(truncate(path, 40), 0);
    assert_int_equal(memory_of(root, 3000), 3000);
    assert_int_equal(memory_of(path, 2000), 2000); /* a file where a directory is needed */
    assert_int_equal(memory_of(path, 2500), 2500);
    assert_int_equal(unlink(path), 0);
}

static int32_t find_slowly(void *arg)
{
    usleep(50000);
    return find_memory(arg);
}

/* Ranks start together. */
static void processes_that_measure_together_agree(void **state)
{
    (void)state;
    enum { N = 6 };
    pid_t pid[N];
    measured = 0;
    for (int i = 0; i < N; i++) {
        pid[i] = fork();
        assert_true(pid[i] >= 0);
        if (pid[i] == 0) {
            struct product_store s;
            int32_t found = 1 + i;
            product_store_open(&s, root, "together");
            product_store_memory(&s, find_slowly, &found);
            put(&s, i, 8);
            product_store_save(&s);
            _exit((int)s.memory_gbs + 10 * measured);
        }
    }
    int found[N], n_measured = 0;
    for (int i = 0; i < N; i++) {
        int status;
        assert_int_equal(waitpid(pid[i], &status, 0), pid[i]);
        assert_true(WIFEXITED(status));
        found[i] = WEXITSTATUS(status) % 10;
        n_measured += WEXITSTATUS(status) / 10;
        assert_int_equal(found[i], found[0]);
    }
    assert_int_equal(n_measured, 1);
    assert_int_equal(count_from(root, "together"), N);
}

static void a_full_store_learns_nothing_more(void **state)
{
    (void)state;
    struct product_store s;
    product_store_open(&s, root, "full");
    for (int32_t n = 0; n < PRODUCT_RECORDS + 10; n++) {
        put(&s, n, 8);
    }
    assert_int_equal(s.n, PRODUCT_RECORDS);
    assert_int_equal(algo_of(&s, 0), 8);
    assert_int_equal(algo_of(&s, PRODUCT_RECORDS), -1);
    product_store_save(&s);
    product_store_release(&s);
    assert_int_equal(count_from(root, "full"), PRODUCT_RECORDS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_found_is_known_in_the_next_run),
        cmocka_unit_test(what_ranks_must_choose_alike_is_neither_timed_nor_kept),
        cmocka_unit_test(a_file_that_changed_counts_as_none),
        cmocka_unit_test(a_place_that_cannot_be_written_is_no_error),
        cmocka_unit_test(processes_keep_what_was_saved_first),
        cmocka_unit_test(memory_is_measured_once),
        cmocka_unit_test(processes_that_measure_together_agree),
        cmocka_unit_test(a_full_store_learns_nothing_more),
    };

    return cmocka_run_group_tests(tests, make_root, remove_root);
}
