/* Hub names, the list of a model's files, and the choice among them. Downloads are
 * tested by tests/http/test_hub.py. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/hub/hub.h"
#include "models/hub/hub_internal.h"

#define SHA1 "0123456789abcdef0123456789abcdef01234567"
#define SHA256 SHA1 "0123456789abcdef01234567"

static struct err e;

static void check_name(const char *text, const char *repo, const char *file, const char *revision)
{
    struct hub_name n;

    if (hub_name_parse(&n, text, &e) != 0 || strcmp(n.repo, repo) != 0 ||
        strcmp(n.file, file) != 0 || strcmp(n.revision, revision) != 0) {
        fail_msg("%s is not %s, %s, %s", text, repo, file, revision);
    }
}

static void names_are_taken_apart(void **state)
{
    (void)state;
    check_name("org/name", "org/name", "", "main");
    check_name("Qwen/Qwen2.5-0.5B_x@v1.0", "Qwen/Qwen2.5-0.5B_x", "", "v1.0");
    check_name("a/b@refs/pr/1", "a/b", "", "refs/pr/1");
    check_name("a/b/c-Q8_0.gguf", "a/b", "c-Q8_0.gguf", "main");
    check_name("a/b/c.GGUF@dev", "a/b", "c.GGUF", "dev");
    check_name("a/b/UD-Q4_K_XL/c-00001-of-00002.gguf@v1", "a/b", "UD-Q4_K_XL/c-00001-of-00002.gguf",
               "v1");
    check_name("a/b/c/d/e.gguf", "a/b", "c/d/e.gguf", "main");
}

static void other_texts_are_no_names(void **state)
{
    (void)state;
    static const char *const TEXTS[] = {"",
                                        "name",
                                        "/a/b",
                                        "a/",
                                        "/b",
                                        "a//b",
                                        "./a",
                                        "../a",
                                        "a/..",
                                        "a/b/c",
                                        "a/b/c/d",
                                        "a/b/.gguf",
                                        "a/b/../c",
                                        "a/b@",
                                        "a/b/../c.gguf",
                                        "a/b/c//d.gguf",
                                        "a/b//c.gguf",
                                        "a/b/./c.gguf",
                                        "a/b/c/.d.gguf",
                                        "a/b/c d/e.gguf",
                                        "a/b@/x",
                                        "a/b@x/",
                                        "a/b@..",
                                        "a/b@x/../y",
                                        "a/b@.x",
                                        "a/b@x//y",
                                        "a/b@x/.y",
                                        "a/b@x y",
                                        "-a/b",
                                        "a/b-",
                                        "a/b.",
                                        "a--b/c",
                                        "a/b..c",
                                        "a b/c",
                                        "a/b?c",
                                        "a/b%2f",
                                        "~/models",
                                        "models/\n",
                                        "a/b@x?y=z",
                                        "a\\b/c",
                                        "\xc3\xa9/b"};
    for (size_t i = 0; i < ARRAY_LEN(TEXTS); i++) {
        if (hub_is_name(TEXTS[i])) {
            fail_msg("'%s' passes for a name", TEXTS[i]);
        }
    }
    char name[300];
    snprintf(name, sizeof(name), "a/%0150d", 0);
    assert_false(hub_is_name(name));
    snprintf(name, sizeof(name), "a/b@%0200d", 0);
    assert_false(hub_is_name(name));
    snprintf(name, sizeof(name), "a/b/%0200d.gguf", 0);
    assert_false(hub_is_name(name));
}

static void a_path_in_the_cache_has_a_name(void **state)
{
    (void)state;
    static const struct {
        const char *path, *name;
    } CASES[] = {{"/c/hub/models--org--name/snapshots/" SHA1, "org/name"},
                 {"/c/hub/models--org--a-b.c/snapshots/" SHA1 "/x.gguf", "org/a-b.c"},
                 {"/c/hub/models--gpt2/snapshots/" SHA1, "gpt2"},
                 {"/c/hub/models--gpt2/blobs/x", NULL},
                 {"/c/models--a/b/snapshots/x", NULL},
                 {"/srv/models/name", NULL}};
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        char *name = hub_name_of_path(CASES[i].path);
        if ((!name) != (!CASES[i].name) || (name && strcmp(name, CASES[i].name) != 0)) {
            fail_msg("%s: %s", CASES[i].path, name);
        }
        free(name);
    }
}

static int parse(struct hub_listing *l, const char *text)
{
    *l = (struct hub_listing){0};
    e = (struct err){0};
    return hub_listing_parse(l, text, strlen(text), &e);
}

#define LFS "{\"sha256\":\"" SHA256 "\",\"size\":7,\"pointerSize\":134}"
#define FILE_(name, size, blob, lfs) \
    "{\"rfilename\":\"" name "\",\"size\":" size ",\"blobId\":\"" blob "\",\"lfs\":" lfs "}"
#define LIST(files) "{\"id\":\"a/b\",\"sha\":\"" SHA1 "\",\"gated\":false,\"siblings\":[" files "]}"

static void a_list_keeps_what_a_model_needs(void **state)
{
    (void)state;
    struct hub_listing l;
    assert_int_equal(
        parse(&l,
              LIST(FILE_("README.md", "5", "x", "null") "," FILE_(
                  "config.json", "5", SHA1,
                  "null") "," FILE_("model.safetensors", "134", SHA1,
                                    LFS) "," FILE_("onnx/model.safetensors", "1", SHA1,
                                                   LFS) "," FILE_("Q8_0/m.gguf", "1", SHA1,
                                                                  LFS) "," FILE_("../m.gguf", "1",
                                                                                 SHA1, LFS))),
        0);
    assert_string_equal(l.commit, SHA1);
    assert_int_equal(l.n_files, 3);
    assert_non_null(hub_listing_find(&l, "Q8_0/m.gguf"));
    const struct hub_file *f = hub_listing_find(&l, "config.json");
    assert_true(f && !f->lfs && f->n_bytes == 5 && strcmp(f->oid, SHA1) == 0);
    f = hub_listing_find(&l, "model.safetensors");
    assert_true(f && f->lfs && f->n_bytes == 7 && strcmp(f->oid, SHA256) == 0);
    hub_listing_release(&l);
}

static void refuse(const char *text, const char *words)
{
    struct hub_listing l;

    if (parse(&l, text) >= 0 || !strstr(e.text, words)) {
        fail_msg("%s: '%s', expected '%s'", text, e.text, words);
    }
    hub_listing_release(&l);
}

static void lying_lists_are_refused(void **state)
{
    (void)state;
    refuse("[]", "an object expected");
    refuse("{\"siblings\":[]}", "names no commit");
    refuse("{\"sha\":\"../../../../../../../../../../../x\",\"siblings\":[]}", "names no commit");
    refuse("{\"sha\":\"" SHA1 "0\"}", "the hub's list");
    refuse(LIST(FILE_("config.json", "5", "short", "null")), "no checksum and size of config.json");
    refuse(LIST(FILE_("config.json", "5", "../../6789abcdef0123456789abcdef01234567", "null")),
           "no checksum");
    refuse(LIST(FILE_("config.json", "-1", SHA1, "null")), "no checksum and size");
    refuse(LIST(FILE_("config.json", "2000000000000000000", SHA1, "null")), "no checksum and size");
    refuse(LIST("{\"rfilename\":\"config.json\",\"blobId\":\"" SHA1 "\"}"), "no checksum and size");
    refuse(LIST(FILE_("m.gguf", "5", SHA1, "{\"sha256\":\"" SHA1 "\",\"size\":1}")),
           "no checksum and size");
    refuse(LIST(FILE_("m.gguf", "5", SHA1, "{}")), "no checksum and size");
    refuse(LIST(FILE_("m.gguf", "5", SHA1, "7")), "an object expected");
    refuse(
        LIST(FILE_("config.json", "5", SHA1, "null") "," FILE_("config.json", "5", SHA1, "null")),
        "twice");
    refuse(LIST("7"), "an object expected");
}

/* Of files with these names, a list ended by NULL, `best` is chosen. */
static void check_gguf(const char *const *names, const char *best)
{
    struct hub_listing l = {.file = calloc(8, sizeof(*l.file))};

    assert_non_null(l.file);
    for (; *names; names++) {
        snprintf(l.file[l.n_files++].name, sizeof(l.file->name), "%s", *names);
    }
    const struct hub_file *f = hub_listing_gguf(&l);
    if ((!f) != (!best) || (f && strcmp(f->name, best) != 0)) {
        fail_msg("%s instead of %s", f ? f->name : "none", best ? best : "none");
    }
    hub_listing_release(&l);
}

static void one_gguf_file_is_chosen(void **state)
{
    (void)state;
    check_gguf((const char *[]){"m-Q4_K_M.gguf", "m-q8_0.gguf", "m-BF16.gguf", NULL},
               "m-q8_0.gguf");
    check_gguf((const char *[]){"m-Q4_0.gguf", "m-Q4_K_M.gguf", NULL}, "m-Q4_K_M.gguf");
    check_gguf(
        (const char *[]){"mmproj-f16.gguf", "m-Q8_0-00002-of-00002.gguf", "m.imatrix.gguf", NULL},
        NULL);
    check_gguf((const char *[]){"m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf",
                                "m-Q4_0.gguf", "f/n-Q8_0.gguf", NULL},
               "m-Q8_0-00001-of-00002.gguf");
    check_gguf((const char *[]){"m-Q8_0-00001-of-00002.gguf", "m-Q8_0.gguf", NULL}, "m-Q8_0.gguf");
    check_gguf((const char *[]){"Q8_0/m-Q8_0.gguf", NULL}, NULL);
    check_gguf((const char *[]){"model.gguf", "config.json", NULL}, "model.gguf");
    check_gguf((const char *[]){"one.gguf", "two.gguf", NULL}, NULL);
    check_gguf((const char *[]){NULL}, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_taken_apart),
        cmocka_unit_test(other_texts_are_no_names),
        cmocka_unit_test(a_path_in_the_cache_has_a_name),
        cmocka_unit_test(a_list_keeps_what_a_model_needs),
        cmocka_unit_test(lying_lists_are_refused),
        cmocka_unit_test(one_gguf_file_is_chosen),
    };

    return cmocka_run_group_tests_name("hub", tests, NULL, NULL);
}
