/* Where files are kept from run to run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "config/base/cache_dir.h"

static void the_directory_follows_the_environment(void **state)
{
    (void)state;
    char dir[256];
    unsetenv("CACHE_DIRECTORY");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    assert_false(cache_dir(dir, sizeof(dir)));
    setenv("HOME", "/home/someone", 1);
    assert_true(cache_dir(dir, sizeof(dir)));
    assert_string_equal(dir, "/home/someone/.cache/quire");
    assert_false(cache_dir(dir, 12)); /* too long for the buffer */
    setenv("XDG_CACHE_HOME", "/caches", 1);
    assert_true(cache_dir(dir, sizeof(dir)));
    assert_string_equal(dir, "/caches/quire");
    setenv("CACHE_DIRECTORY", "/var/cache/quire:/var/cache/other", 1);
    assert_true(cache_dir(dir, sizeof(dir)));
    assert_string_equal(dir, "/var/cache/quire");
    setenv("CACHE_DIRECTORY", "relative", 1);
    assert_true(cache_dir(dir, sizeof(dir)));
    assert_string_equal(dir, "/caches/quire");
}

static void directories_above_a_file_are_made(void **state)
{
    (void)state;
    char root[] = "/tmp/quire-cache-XXXXXX", path[64];
    assert_non_null(mkdtemp(root));
    for (int i = 0; i < 2; i++) { /* those that are there stay */
        snprintf(path, sizeof(path), "%s/a/b/file", root);
        cache_make_dirs(path);
        snprintf(path, sizeof(path), "%s/a/b", root);
        assert_int_equal(access(path, W_OK), 0);
    }
    snprintf(path, sizeof(path), "%s/a/b/file", root);
    assert_int_equal(access(path, F_OK), -1);
    for (int depth = 2; depth >= 0; depth--) {
        snprintf(path, sizeof(path), "%s%.*s", root, 2 * depth, "/a/b");
        assert_int_equal(rmdir(path), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_directory_follows_the_environment),
        cmocka_unit_test(directories_above_a_file_are_made),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
