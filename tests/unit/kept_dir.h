/* A directory of its own for a test of what is kept between starts, and the one file in
 * it. For inclusion by one test program. */
#ifndef QUIRE_TESTS_UNIT_KEPT_DIR_H
#define QUIRE_TESTS_UNIT_KEPT_DIR_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char root[64]; /* the directory, from make_root to remove_root */

static inline int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof(root), "/tmp/quire-kept-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static inline int remove_root(void **state)
{
    (void)state;
    char command[96];
    snprintf(command, sizeof(command), "rm -rf %s", root);
    return system(command);
}

/* The same as the cache directory of the process. */
static inline int make_cache_root(void **state)
{
    int rc = make_root(state);

    return rc < 0 ? rc : setenv("CACHE_DIRECTORY", root, 1);
}

static inline int remove_cache_root(void **state)
{
    unsetenv("CACHE_DIRECTORY");
    return remove_root(state);
}

/* How many files the directory holds, and the path of one of them. */
static inline int kept_files(char path[512])
{
    DIR *dir = opendir(root);
    int n = 0;
    assert_non_null(dir);
    for (struct dirent *d; (d = readdir(dir)) != NULL;) {
        if (d->d_name[0] != '.') {
            snprintf(path, 512, "%s/%s", root, d->d_name);
            n++;
        }
    }
    closedir(dir);
    return n;
}

/* The path of the one file that is there. */
static inline const char *kept_file(void)
{
    static char path[512];

    assert_int_equal(kept_files(path), 1);
    return path;
}

static inline void put_file(const char *text, size_t n)
{
    FILE *f = fopen(kept_file(), "w");

    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static inline size_t get_file(char *text, size_t cap)
{
    FILE *f = fopen(kept_file(), "r");

    assert_non_null(f);
    size_t n = fread(text, 1, cap, f);
    fclose(f);
    return n;
}

#endif
