/* The choice between pairs and floats: which time decides, what is kept for the next
 * process, and what takes the place of both. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cpu/bf16_way.h"

static char root[64];
static int measured; /* calls of the functions below */

static bool find_floats(enum cpu_bf16 *ret)
{
    measured++;
    *ret = CPU_BF16_FLOATS;
    return true;
}

static bool find_pairs(enum cpu_bf16 *ret)
{
    measured++;
    *ret = CPU_BF16_PAIRS;
    return true;
}

static bool find_nothing(enum cpu_bf16 *ret)
{
    (void)ret;
    measured++;
    return false;
}

static int make_root(void **state)
{
    (void)state;
    measured = 0;
    snprintf(root, sizeof(root), "/tmp/quire-bf16-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    (void)state;
    char command[96];
    snprintf(command, sizeof(command), "rm -rf %s", root);
    return system(command);
}

/* The one file in the directory. */
static const char *kept_file(void)
{
    static char path[512];
    DIR *dir = opendir(root);
    int n = 0;
    assert_non_null(dir);
    for (struct dirent *d; (d = readdir(dir)) != NULL;) {
        if (d->d_name[0] != '.') {
            snprintf(path, sizeof(path), "%s/%s", root, d->d_name);
            n++;
        }
    }
    closedir(dir);
    assert_int_equal(n, 1);
    return path;
}

static void put_file(const char *text, size_t n)
{
    FILE *f = fopen(kept_file(), "w");

    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static size_t get_file(char *text, size_t cap)
{
    FILE *f = fopen(kept_file(), "r");

    assert_non_null(f);
    size_t n = fread(text, 1, cap, f);
    fclose(f);
    return n;
}

static void floats_must_be_faster_by_a_margin(void **state)
{
    (void)state;
    assert_int_equal(cpu_bf16_faster(100, 100), CPU_BF16_PAIRS);
    assert_int_equal(cpu_bf16_faster(100, 96), CPU_BF16_PAIRS);
    assert_int_equal(cpu_bf16_faster(100, 94), CPU_BF16_FLOATS);
    assert_int_equal(cpu_bf16_faster(50, 100), CPU_BF16_PAIRS);
}

static void the_next_process_keeps_the_way(void **state)
{
    (void)state;
    assert_int_equal(cpu_bf16_kept(root, "a machine", find_floats), CPU_BF16_FLOATS);
    assert_int_equal(cpu_bf16_kept(root, "a machine", find_pairs), CPU_BF16_FLOATS);
    assert_int_equal(measured, 1);
    /* a home directory may be several machines' */
    assert_int_equal(cpu_bf16_kept(root, "another", find_pairs), CPU_BF16_PAIRS);
    assert_int_equal(cpu_bf16_kept(root, "another", find_floats), CPU_BF16_PAIRS);
    assert_int_equal(cpu_bf16_kept(root, "a machine", find_pairs), CPU_BF16_FLOATS);
    assert_int_equal(measured, 2);
}

static void a_bad_file_is_replaced(void **state)
{
    (void)state;
    char good[256], now[256];
    assert_int_equal(cpu_bf16_kept(root, "a machine", find_floats), CPU_BF16_FLOATS);
    size_t n = get_file(good, sizeof(good));
    static const char *const bad[] = {"",
                                      "floats",
                                      "floats a machin\n",
                                      "floats a machine\n\n",
                                      "pears a machine\n",
                                      "pairs another\n"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        put_file(bad[i], strlen(bad[i]));
        measured = 0;
        assert_int_equal(cpu_bf16_kept(root, "a machine", find_floats), CPU_BF16_FLOATS);
        assert_int_equal(measured, 1);
        assert_int_equal(get_file(now, sizeof(now)), n);
        assert_memory_equal(now, good, n);
    }
    char noise[4096];
    memset(noise, 0xa5, sizeof(noise));
    put_file(noise, sizeof(noise));
    assert_int_equal(cpu_bf16_kept(root, "a machine", find_floats), CPU_BF16_FLOATS);
    assert_int_equal(get_file(now, sizeof(now)), n);
    assert_memory_equal(now, good, n);
}

static void without_a_place_it_is_measured_each_time(void **state)
{
    (void)state;
    char dir[96];
    snprintf(dir, sizeof(dir), "%s/file", root);
    FILE *f = fopen(dir, "w"); /* no directory can be made here, whatever one's rights */
    assert_non_null(f);
    fclose(f);
    assert_int_equal(cpu_bf16_kept(dir, "a machine", find_floats), CPU_BF16_FLOATS);
    assert_int_equal(cpu_bf16_kept(dir, "a machine", find_pairs), CPU_BF16_PAIRS);
    assert_int_equal(cpu_bf16_kept(NULL, "a machine", find_floats), CPU_BF16_FLOATS);
    assert_int_equal(measured, 3);
}

static void what_could_not_be_measured_is_not_kept(void **state)
{
    (void)state;
    assert_int_equal(cpu_bf16_kept(root, "a machine", find_nothing), CPU_BF16_PAIRS);
    assert_int_equal(cpu_bf16_kept(root, "a machine", find_floats), CPU_BF16_FLOATS);
    assert_int_equal(cpu_bf16_kept(root, "a machine", find_nothing), CPU_BF16_FLOATS);
    assert_int_equal(measured, 2);
}

static bool find_floats_slowly(enum cpu_bf16 *ret)
{
    usleep(50000);
    return find_floats(ret);
}

static bool find_pairs_slowly(enum cpu_bf16 *ret)
{
    usleep(50000);
    return find_pairs(ret);
}

/* Ranks start together. */
static void processes_that_ask_together_agree(void **state)
{
    (void)state;
    enum { N = 6 };
    pid_t pid[N];
    for (int i = 0; i < N; i++) {
        pid[i] = fork();
        assert_true(pid[i] >= 0);
        if (pid[i] == 0) {
            enum cpu_bf16 way =
                cpu_bf16_kept(root, "a machine", i % 2 ? find_floats_slowly : find_pairs_slowly);
            _exit((int)way + 10 * measured);
        }
    }
    int way[N], n_measured = 0;
    for (int i = 0; i < N; i++) {
        int status;
        assert_int_equal(waitpid(pid[i], &status, 0), pid[i]);
        assert_true(WIFEXITED(status));
        way[i] = WEXITSTATUS(status) % 10;
        n_measured += WEXITSTATUS(status) / 10;
        assert_int_equal(way[i], way[0]);
    }
    assert_int_equal(n_measured, 1);
}

static void the_environment_decides(void **state)
{
    (void)state;
    enum cpu_bf16 way;
    struct err e = {0};
    setenv("QUIRE_CPU_BF16", "floats", 1);
    assert_int_equal(cpu_bf16_detect(&way, CPU_AVX512_BF16, &e), 0);
    assert_int_equal(way, CPU_BF16_FLOATS);
    assert_int_equal(cpu_bf16_detect(&way, CPU_AMX, &e), 0);
    assert_int_equal(way, CPU_BF16_PAIRS); /* only that set has two ways */
    setenv("QUIRE_CPU_BF16", "pairs", 1);
    assert_int_equal(cpu_bf16_detect(&way, CPU_AVX512_BF16, &e), 0);
    assert_int_equal(way, CPU_BF16_PAIRS);
    setenv("QUIRE_CPU_BF16", "pear", 1);
    assert_int_equal(cpu_bf16_detect(&way, CPU_AMX, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "pear"));
    unsetenv("QUIRE_CPU_BF16");
}

/* By timing, where the machine can: once in a process, whatever becomes of the file. */
static void a_process_keeps_its_way(void **state)
{
    (void)state;
    enum cpu_isa best;
    enum cpu_bf16 first, way;
    struct err e = {0};
    char found[256];
    assert_int_equal(cpu_isa_detect(&best, &e), 0);
    if (best != CPU_AVX512_BF16 && best != CPU_AMX) {
        skip();
    }
    setenv("CACHE_DIRECTORY", root, 1);
    assert_int_equal(cpu_bf16_detect(&first, CPU_AVX512_BF16, &e), 0);
    size_t n = get_file(found, sizeof(found));
    assert_true(n > strlen(cpu_bf16_name(first)));
    assert_memory_equal(found, cpu_bf16_name(first), strlen(cpu_bf16_name(first)));
    put_file("", 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(cpu_bf16_detect(&way, CPU_AVX512_BF16, &e), 0);
        assert_int_equal(way, first);
    }
    unsetenv("CACHE_DIRECTORY");
}

int main(void)
{
    unsetenv("QUIRE_CPU_BF16");
    unsetenv("QUIRE_CPU_ISA");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(floats_must_be_faster_by_a_margin),
        cmocka_unit_test_setup_teardown(the_next_process_keeps_the_way, make_root, remove_root),
        cmocka_unit_test_setup_teardown(a_bad_file_is_replaced, make_root, remove_root),
        cmocka_unit_test_setup_teardown(without_a_place_it_is_measured_each_time, make_root,
                                        remove_root),
        cmocka_unit_test_setup_teardown(what_could_not_be_measured_is_not_kept, make_root,
                                        remove_root),
        cmocka_unit_test_setup_teardown(processes_that_ask_together_agree, make_root, remove_root),
        cmocka_unit_test(the_environment_decides),
        cmocka_unit_test_setup_teardown(a_process_keeps_its_way, make_root, remove_root),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
