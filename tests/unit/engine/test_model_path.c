/* The path that a model's name stands for, of models that are on the disk. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/model_path.h"

#define SNAPSHOT "models--org--name/snapshots/0123456789abcdef0123456789abcdef01234567"

static char folder[] = "/tmp/quire-path-XXXXXX";
static struct err e;

static const char *in_folder(const char *name)
{
    static char path[512];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

static void make(const char *name)
{
    char path[512];

    snprintf(path, sizeof(path), "%s", in_folder(name));
    for (char *p = strchr(path + sizeof(folder), '/'); p; p = strchr(p + 1, '/')) {
        *p = '\0';
        mkdir(path, 0777);
        *p = '/';
    }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
}

/* `name` is found as `path`, and served as `served`. */
static void check(const char *name, const char *path, const char *served)
{
    char *found, *id;

    if (model_path_find(&found, name, MODEL_SERVED, &e) < 0) {
        fail_msg("%s: %s", name, e.text);
    }
    assert_string_equal(found, path);
    id = model_path_name(found);
    assert_non_null(id);
    assert_string_equal(id, served);
    free(id);
    free(found);
}

static void a_link_to_a_file_keeps_its_name(void **state)
{
    (void)state;
    make("models--org--name/blobs/abc");
    make(SNAPSHOT "/Q8/config");
    char link[512];
    snprintf(link, sizeof(link), "%s", in_folder(SNAPSHOT "/Q8/m-00001-of-00002.gguf"));
    assert_int_equal(symlink("../../../blobs/abc", link), 0);
    check(link, link, "org/name");
    assert_int_equal(symlink(link, in_folder("mine.gguf")), 0);
    check(in_folder("mine.gguf"), in_folder("mine.gguf"), "mine.gguf");
    assert_int_equal(chdir(folder), 0);
    check("mine.gguf", in_folder("mine.gguf"), "mine.gguf");
    check("models--org--name/../mine.gguf", in_folder("mine.gguf"), "mine.gguf");
}

static void a_folder_stands_for_its_only_model(void **state)
{
    (void)state;
    char *found;
    make("one/m-00002-of-00002.gguf");
    make("one/m-00001-of-00002.gguf");
    char path[512];
    snprintf(path, sizeof(path), "%s", in_folder("one/m-00001-of-00002.gguf"));
    check(in_folder("one"), path, "m-00001-of-00002.gguf");
    make("one/other.gguf");
    assert_true(model_path_find(&found, in_folder("one"), MODEL_SERVED, &e) < 0);
    assert_non_null(strstr(e.text, "several GGUF files"));
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    char command[600];

    snprintf(command, sizeof(command), "rm -r %s", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_link_to_a_file_keeps_its_name),
        cmocka_unit_test(a_folder_stands_for_its_only_model),
    };

    return cmocka_run_group_tests_name("model path", tests, make_folder, remove_folder);
}
