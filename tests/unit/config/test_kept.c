/* Choices kept in a file: what the next process finds, what becomes of files that are
 * no such ones, and processes that ask together. */
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

#include "config/base/base.h"
#include "config/base/kept.h"
#include "tests/unit/kept_dir.h"

static const char *const colours[] = {"red", "green", "blue"};
enum { RED, GREEN, BLUE, NOTHING = -1 };

static int measured; /* calls of find */

static int32_t find(void *arg)
{
    measured++;
    return *(const int32_t *)arg;
}

/* Choice `name` on `machine`, where measuring finds `found`. */
static int32_t choose(const char *dir, const char *machine, const char *name, int32_t found)
{
    return kept_choose(dir, "ways", machine,
                       &(struct kept_choice){.name = name,
                                             .value = colours,
                                             .n = (int32_t)ARRAY_LEN(colours),
                                             .measure = find,
                                             .arg = &found});
}

static int begin(void **state)
{
    measured = 0;
    return make_root(state);
}

static void the_next_process_keeps_the_choice(void **state)
{
    (void)state;
    assert_int_equal(choose(root, "a machine", "door", BLUE), BLUE);
    assert_int_equal(choose(root, "a machine", "door", RED), BLUE);
    assert_int_equal(measured, 1);
    /* a home directory may be several machines' */
    assert_int_equal(choose(root, "another", "door", RED), RED);
    assert_int_equal(choose(root, "another", "door", BLUE), RED);
    assert_int_equal(choose(root, "a machine", "door", RED), BLUE);
    assert_int_equal(measured, 2);
}

static void a_file_has_many_choices(void **state)
{
    (void)state;
    char text[256];
    assert_int_equal(choose(root, "a machine", "door", BLUE), BLUE);
    assert_int_equal(choose(root, "a machine", "doors", RED), RED);
    assert_int_equal(choose(root, "a machine", "roof", GREEN), GREEN);
    assert_int_equal(choose(root, "a machine", "door", RED), BLUE);
    assert_int_equal(choose(root, "a machine", "doors", BLUE), RED);
    assert_int_equal(choose(root, "a machine", "roof", RED), GREEN);
    assert_int_equal(measured, 3);
    size_t n = get_file(text, sizeof(text) - 1);
    text[n] = '\0';
    assert_string_equal(text, "a machine\ndoor blue\ndoors red\nroof green\nend\n");
}

static void a_value_that_there_is_no_more_is_found_anew(void **state)
{
    (void)state;
    char text[256];
    static const char was[] = "a machine\ndoor black\nroof green\nend\n";
    assert_int_equal(choose(root, "a machine", "door", BLUE), BLUE);
    put_file(was, sizeof(was) - 1);
    assert_int_equal(choose(root, "a machine", "door", RED), RED);
    assert_int_equal(choose(root, "a machine", "roof", BLUE), GREEN);
    size_t n = get_file(text, sizeof(text) - 1);
    text[n] = '\0';
    assert_string_equal(text, "a machine\nroof green\ndoor red\nend\n");
}

static void a_bad_file_is_replaced(void **state)
{
    (void)state;
    char good[256], now[256];
    assert_int_equal(choose(root, "a machine", "door", BLUE), BLUE);
    size_t n = get_file(good, sizeof(good));
    static const char *const bad[] = {"",
                                      "a machine",
                                      "a machine\n",
                                      "a machine\nend",
                                      "end\n",
                                      "a machin\ndoor red\nend\n",
                                      "a machine\ndoor red\n",
                                      "a machine\ndoor red\nen",
                                      "a machine\ndoor redend\n",
                                      "a machine\ndoor re\nend\n",
                                      "a machine\ndoor\nend\n",
                                      "a machinedoor red\nend\n",
                                      "another\ndoor red\nend\n"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        put_file(bad[i], strlen(bad[i]));
        measured = 0;
        assert_int_equal(choose(root, "a machine", "door", BLUE), BLUE);
        assert_int_equal(measured, 1);
        if (!strstr(bad[i], "\ndoor\n")) { /* a line of its own, which may stay */
            assert_int_equal(get_file(now, sizeof(now)), n);
            assert_memory_equal(now, good, n);
        }
        assert_int_equal(choose(root, "a machine", "door", RED), BLUE);
    }
    static char noise[20000];
    memset(noise, 0xa5, sizeof(noise));
    put_file(noise, sizeof(noise));
    assert_int_equal(choose(root, "a machine", "door", BLUE), BLUE);
    assert_int_equal(get_file(now, sizeof(now)), n);
    assert_memory_equal(now, good, n);
    put_file("a machine\ndoor\0red\nend\n", 23);
    assert_int_equal(choose(root, "a machine", "door", GREEN), GREEN);
}

/* Of any file that a process was stopped while it wrote. */
static void a_file_written_in_part_is_replaced(void **state)
{
    (void)state;
    char good[256];
    choose(root, "a machine", "door", BLUE);
    choose(root, "a machine", "roof", GREEN);
    size_t n = get_file(good, sizeof(good));
    for (size_t i = 0; i < n; i++) {
        put_file(good, i);
        measured = 0;
        assert_int_equal(choose(root, "a machine", "door", RED), RED);
        assert_int_equal(measured, 1);
        assert_int_equal(choose(root, "a machine", "door", BLUE), RED);
    }
}

/* It is begun anew rather than grown without end. */
static void a_full_file_keeps_the_last_choice(void **state)
{
    (void)state;
    char name[64];
    for (int i = 0; i < 400; i++) {
        snprintf(name, sizeof(name), "a-rather-long-name-of-something-%d", i);
        assert_int_equal(choose(root, "a machine", name, BLUE), BLUE);
        assert_int_equal(choose(root, "a machine", name, RED), BLUE);
    }
    struct stat st;
    assert_int_equal(stat(kept_file(), &st), 0);
    assert_true(st.st_size < 8192);
}

static void without_a_place_it_is_measured_each_time(void **state)
{
    (void)state;
    char dir[96];
    snprintf(dir, sizeof(dir), "%s/file", root);
    FILE *f = fopen(dir, "w"); /* no directory can be made here, whatever one's rights */
    assert_non_null(f);
    fclose(f);
    assert_int_equal(choose(dir, "a machine", "door", BLUE), BLUE);
    assert_int_equal(choose(dir, "a machine", "door", RED), RED);
    assert_int_equal(choose(NULL, "a machine", "door", BLUE), BLUE);
    assert_int_equal(measured, 3);
}

static void what_could_not_be_measured_is_not_kept(void **state)
{
    (void)state;
    assert_int_equal(choose(root, "a machine", "door", NOTHING), NOTHING);
    assert_int_equal(choose(root, "a machine", "door", BLUE), BLUE);
    assert_int_equal(choose(root, "a machine", "door", NOTHING), BLUE);
    assert_int_equal(measured, 2);
}

static int32_t find_slowly(void *arg)
{
    usleep(50000);
    return find(arg);
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
            int32_t found = i % 3;
            struct kept_choice c = {
                .name = "door", .value = colours, .n = 3, .measure = find_slowly, .arg = &found};
            int32_t got = kept_choose(root, "ways", "a machine", &c);
            _exit(got + 10 * measured);
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

int main(void)
{
#define WITH_ROOT(test) cmocka_unit_test_setup_teardown(test, begin, remove_root)
    const struct CMUnitTest tests[] = {
        WITH_ROOT(the_next_process_keeps_the_choice),
        WITH_ROOT(a_file_has_many_choices),
        WITH_ROOT(a_value_that_there_is_no_more_is_found_anew),
        WITH_ROOT(a_bad_file_is_replaced),
        WITH_ROOT(a_file_written_in_part_is_replaced),
        WITH_ROOT(a_full_file_keeps_the_last_choice),
        WITH_ROOT(without_a_place_it_is_measured_each_time),
        WITH_ROOT(what_could_not_be_measured_is_not_kept),
        WITH_ROOT(processes_that_ask_together_agree),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
