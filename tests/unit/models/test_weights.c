/* Checkpoints: malformed headers, broken shards, links out of the directory; and the
 * check of tensors against a family's table. */
#include <setjmp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "models/checkpoint/weights.h"
#include "models/families/layers.h"

static struct err e;

/* A safetensors file in memory: `header`, then n_data bytes. The caller frees it. */
static char *file_of(const char *header, size_t n_data, size_t *ret_len)
{
    uint64_t n = strlen(header);
    char *f = calloc(1, 8 + n + n_data);

    assert_non_null(f);
    memcpy(f, &n, 8); /* little endian, as every machine this is tested on */
    memcpy(f + 8, header, n);
    *ret_len = 8 + n + n_data;
    return f;
}

static void refuse(const char *header, size_t n_data, const char *words)
{
    struct checkpoint *c;
    size_t len;
    char *f = file_of(header, n_data, &len);

    e = (struct err){0};
    assert_int_equal(checkpoint_new(&c, &e), 0);
    int rc = safetensors_parse(c, f, len, "x.safetensors", &e);
    if (rc >= 0 || !strstr(e.text, words) || strncmp(e.text, "x.safetensors: ", 15) != 0) {
        fail_msg("%s: code %d, text '%s', expected '%s'", header, rc, e.text, words);
    }
    checkpoint_free(c);
    free(f);
}

#define A(more) "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}" more "}"

static void tensors_are_found_where_the_header_says(void **state)
{
    (void)state;
    struct checkpoint *c;
    size_t len;
    char *f = file_of(
        "{\"__metadata__\":{\"format\":\"pt\"},\"b\\u002e\\u00e9\":{\"data_offsets\":[8,20],"
        "\"dtype\":"
        "\"BF16\",\"shape\":[2,3]},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"s\":{\"dtype\":\"I64\","
        "\"shape\":[],\"data_offsets\":[20,28]}}  ",
        28, &len);
    assert_int_equal(checkpoint_new(&c, &e), 0);
    assert_int_equal(safetensors_parse(c, f, len, "x", &e), 0);
    assert_int_equal(checkpoint_count(c), 3);
    const struct tensor *t = checkpoint_find(c, "b.\xc3\xa9");
    assert_non_null(t);
    assert_int_equal(t->dtype, DTYPE_BF16);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dim[1], 3);
    assert_int_equal(t->n_bytes, 12);
    assert_ptr_equal(t->data, f + len - 20);
    assert_false(checkpoint_find(c, "s")->usable);
    assert_string_equal(checkpoint_find(c, "s")->stored_type, "I64");
    assert_null(checkpoint_find(c, "c"));
    checkpoint_free(c);
    free(f);
}

static void lying_headers_are_refused(void **state)
{
    (void)state;
    refuse(A(""), 7, "ends at byte 8 of the data, the file has 7");
    refuse(A(""), 9, "1 bytes after the last tensor");
    refuse(A(",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}"), 8, "overlaps");
    refuse(A(",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}"), 16,
           "belong to no tensor");
    refuse(A(",\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}"), 12,
           "tensor 'a' appears twice");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
           "claims 8 bytes, its shape and type make 12");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}",
           0, "claims 0 bytes");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8,
           "a dimension of -2");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,2],\"data_offsets\":[0,8]}}", 8,
           "more than 5 dimensions");
    refuse("{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype 'F31'");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8,
           "a begin and an end");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8,
           "a begin and an end");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,9]}}", 8,
           "more than 2 numbers");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "lacks data_offsets");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8,
           "field 'x'");
    refuse("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 8, "dtype is given twice");
    refuse("{\"\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "without a name");
    refuse("{\"a\\n\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
           "a control character in the name");
    refuse("{\"a\\u0000\":{}}", 8, "a NUL character");
    refuse("{\"__metadata__\":{\"a\":1}}", 0, "'a' is not a string");
    refuse("{\"a\":1}", 0, "an object expected");
    refuse("[]", 0, "an object expected");
    refuse("", 0, "an object expected");
}

static void truncated_files_are_refused_at_every_length(void **state)
{
    (void)state;
    size_t len;
    char *f = file_of(A(""), 8, &len);
    for (size_t n = 0; n < len; n++) {
        struct checkpoint *c;
        assert_int_equal(checkpoint_new(&c, &e), 0);
        char *cut = malloc(n + 1); /* lets a sanitizer see a read past the end */
        memcpy(cut, f, n);
        assert_true(safetensors_parse(c, cut, n, "x", &e) < 0);
        free(cut);
        checkpoint_free(c);
    }
    uint64_t huge = UINT64_MAX;
    memcpy(f, &huge, 8);
    struct checkpoint *c;
    assert_int_equal(checkpoint_new(&c, &e), 0);
    assert_int_equal(safetensors_parse(c, f, len, "x", &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "a header of 18446744073709551615 bytes"));
    checkpoint_free(c);
    free(f);
}

/* ---- directories ---- */

static char root[64];

static const char *path_of(const char *name)
{
    static char path[4][256];
    static int n;
    char *p = path[n++ % 4];

    snprintf(p, sizeof(path[0]), "%s/%s", root, name);
    return p;
}

static void write_file(const char *name, const char *data, size_t len)
{
    FILE *f = fopen(path_of(name), "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    fclose(f);
}

/* A file of one float32 tensor. */
static void write_tensor(const char *file, const char *name)
{
    char header[256];
    size_t len;

    snprintf(header, sizeof(header),
             "{\"%s\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", name);
    char *f = file_of(header, 8, &len);
    write_file(file, f, len);
    free(f);
}

static void write_index(const char *map)
{
    char text[512];

    snprintf(text, sizeof(text), "{\"metadata\":{\"total_size\":16},\"weight_map\":{%s}}", map);
    write_file("model.safetensors.index.json", text, strlen(text));
}

static int setup(void **state)
{
    (void)state;
    const char *tmp = getenv("TMPDIR");
    snprintf(root, sizeof(root), "%.40s/quire-XXXXXX", tmp ? tmp : "/tmp");
    return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof(command), "rm -rf '%s'", root);
    return system(command);
}

static void refuse_dir(int rc, const char *words)
{
    struct checkpoint *c;

    e = (struct err){0};
    int got = checkpoint_open(&c, root, &e);
    if (got != rc || !strstr(e.text, words)) {
        fail_msg("code %d, text '%s', expected %d and '%s'", got, e.text, rc, words);
    }
}

static void shards_are_opened_by_their_index(void **state)
{
    (void)state;
    struct checkpoint *c;
    write_tensor("one.safetensors", "a");
    write_tensor("two.safetensors", "b");
    write_index("\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"");
    if (checkpoint_open(&c, root, &e) < 0) {
        fail_msg("%s", e.text);
    }
    assert_int_equal(checkpoint_count(c), 2);
    assert_non_null(checkpoint_find(c, "b"));
    checkpoint_free(c);
    write_index("\"a\":\"two.safetensors\",\"b\":\"two.safetensors\"");
    refuse_dir(ERR_INVALID, "tensor 'a' is not in 'two.safetensors'");
    write_index("\"a\":\"one.safetensors\",\"b\":\"one.safetensors\"");
    refuse_dir(ERR_INVALID, "tensor 'b' is not in 'one.safetensors'");
    write_index("\"a\":\"one.safetensors\",\"b\":\"gone.safetensors\"");
    refuse_dir(ERR_NOT_FOUND, "gone.safetensors");
    write_index("\"a\":\"../one.safetensors\"");
    refuse_dir(ERR_INVALID, "'../one.safetensors' is not the name of a file");
    write_index("\"a\":\"..\"");
    refuse_dir(ERR_INVALID, "is not the name of a file");
    write_index("\"a\":\"/etc/passwd\"");
    refuse_dir(ERR_INVALID, "is not the name of a file");
    write_index("\"a\":\"\"");
    refuse_dir(ERR_INVALID, "is not the name of a file");
    write_index("\"a\":7");
    refuse_dir(ERR_INVALID, "a string expected");
    write_index("");
    refuse_dir(ERR_INVALID, "names no tensors");
    write_tensor("two.safetensors", "a");
    write_index("\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"");
    refuse_dir(ERR_INVALID, "tensor 'a' appears twice");
}

static void a_shard_with_more_than_the_index_names_is_refused(void **state)
{
    (void)state;
    size_t len;
    char *f = file_of(
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F32\","
        "\"shape\":[1],\"data_offsets\":[4,8]}}",
        8, &len);
    write_file("one.safetensors", f, len);
    free(f);
    write_index("\"a\":\"one.safetensors\"");
    refuse_dir(ERR_INVALID, "names 1 tensors, its shards hold 2");
}

static void links_are_followed_inside_the_model_only(void **state)
{
    (void)state;
    struct checkpoint *c;
    char dir[64];
    memcpy(dir, root, sizeof(dir));
    write_tensor("real.safetensors", "a");
    assert_int_equal(symlink("real.safetensors", path_of("model.safetensors")), 0);
    if (checkpoint_open(&c, root, &e) < 0) {
        fail_msg("%s", e.text);
    }
    checkpoint_free(c);
    /* the cache's layout: snapshots/rev/model.safetensors -> ../../blobs/hash */
    assert_int_equal(mkdir(path_of("blobs"), 0700), 0);
    assert_int_equal(mkdir(path_of("snapshots"), 0700), 0);
    assert_int_equal(mkdir(path_of("snapshots/rev"), 0700), 0);
    write_tensor("blobs/hash", "a");
    assert_int_equal(symlink("../../blobs/hash", path_of("snapshots/rev/model.safetensors")), 0);
    snprintf(root, sizeof(root), "%.40s/snapshots/rev", dir);
    if (checkpoint_open(&c, root, &e) < 0) {
        fail_msg("%s", e.text);
    }
    checkpoint_free(c);
    assert_int_equal(unlink(path_of("model.safetensors")), 0);
    assert_int_equal(symlink("../../real.safetensors", path_of("model.safetensors")), 0);
    refuse_dir(ERR_INVALID, "a symbolic link out of the model directory");
    assert_int_equal(unlink(path_of("model.safetensors")), 0);
    assert_int_equal(symlink("model.safetensors", path_of("model.safetensors")), 0);
    refuse_dir(ERR_NOT_FOUND, "neither model.safetensors nor");
    memcpy(root, dir, sizeof(dir));
}

/* m/snapshots/rev/model.safetensors -> m/blobs/hash -> blobs/hash: newer tools keep
 * files that several models share in one place. */
static void blobs_may_be_shared_by_models(void **state)
{
    (void)state;
    static const char *const FOLDERS[] = {"blobs",           "m",      "m/blobs", "m/snapshots",
                                          "m/snapshots/rev", "m/other"};
    struct checkpoint *c;
    char dir[64];
    memcpy(dir, root, sizeof(dir));
    for (size_t i = 0; i < ARRAY_LEN(FOLDERS); i++) {
        assert_int_equal(mkdir(path_of(FOLDERS[i]), 0700), 0);
    }
    write_tensor("blobs/hash", "a");
    assert_int_equal(symlink("../../blobs/hash", path_of("m/blobs/hash")), 0);
    assert_int_equal(symlink("../../blobs/hash", path_of("m/snapshots/rev/model.safetensors")), 0);
    assert_int_equal(symlink("../blobs/hash", path_of("m/other/model.safetensors")), 0);
    snprintf(root, sizeof(root), "%.40s/m/snapshots/rev", dir);
    if (checkpoint_open(&c, root, &e) < 0) {
        fail_msg("%s", e.text);
    }
    checkpoint_free(c);
    snprintf(root, sizeof(root), "%.40s/m/other", dir); /* not a snapshot */
    refuse_dir(ERR_INVALID, "a symbolic link out of the model directory");
    memcpy(root, dir, sizeof(dir));
}

/* The pages of a tensor that is read in place may be anonymous memory
 * (kernels/cpu/memory/hugepages.c): they must not be dropped. */
static void a_tensor_that_is_kept_keeps_its_pages(void **state)
{
    (void)state;
    static const char HEADER[] =
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[65536],\"data_offsets\":[0,262144]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[65536],\"data_offsets\":[262144,524288]}}";
    struct checkpoint *c;
    size_t len, page = (size_t)sysconf(_SC_PAGESIZE);
    char *f = file_of(HEADER, 524288, &len);
    write_file("model.safetensors", f, len);
    free(f);
    assert_int_equal(checkpoint_open(&c, root, &e), 0);
    const struct tensor *a = checkpoint_find(c, "a"), *b = checkpoint_find(c, "b");
    char *in_a = (char *)((uintptr_t)a->data / page * page + page),
         *in_b = (char *)((uintptr_t)b->data / page * page + page);
    for (int i = 0; i < 2; i++) { /* anonymous pages with a mark */
        char *at = i ? in_b : in_a;
        assert_ptr_equal(
            mmap(at, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
            at);
        at[0] = 7;
    }
    assert_int_equal(checkpoint_keep(c, a, &e), 0);
    assert_int_equal(checkpoint_fetch(c, &e), 0);
    checkpoint_drop_pages(c);
    assert_int_equal(in_a[0], 7);
    assert_int_equal(in_b[0], 0); /* dropped */
    checkpoint_free(c);
}

static void what_is_no_file_of_weights_is_refused(void **state)
{
    (void)state;
    refuse_dir(ERR_NOT_FOUND, "neither model.safetensors nor model.safetensors.index.json");
    write_file("pytorch_model.bin", "x", 1);
    refuse_dir(ERR_NOT_FOUND, "pytorch_model.bin is not read");
    /* opening a FIFO must not wait for a writer */
    assert_int_equal(mkfifo(path_of("model.safetensors"), 0600), 0);
    refuse_dir(ERR_INVALID, "not a regular file");
    assert_int_equal(unlink(path_of("model.safetensors")), 0);
    assert_int_equal(mkdir(path_of("model.safetensors"), 0700), 0);
    refuse_dir(ERR_INVALID, "not a regular file");
    assert_int_equal(rmdir(path_of("model.safetensors")), 0);
    write_file("model.safetensors", "", 0);
    refuse_dir(ERR_INVALID, "the file is empty");
    static const char POINTER[] =
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
    write_file("model.safetensors", POINTER, sizeof(POINTER) - 1);
    refuse_dir(ERR_INVALID, "model.safetensors: a Git LFS pointer");
}

/* ---- against a family's table ---- */

/* Copy a golden with its header changed: `from` (once or more) becomes `to`, of the
 * same length. */
static void check_changed_in(const char *dir, const char *from, const char *to, const char *words)
{
    struct model_config config;
    struct generation_defaults gen;
    struct checkpoint *c;
    const struct architecture *a;
    static char data[1 << 20];
    char path[100];

    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    FILE *f = fopen(path, "rb");

    assert_non_null(f);
    size_t len = fread(data, 1, sizeof(data), f);
    fclose(f);
    uint64_t header;
    memcpy(&header, data, 8);
    assert_int_equal(strlen(from), strlen(to));
    int n_changed = 0;
    char *end = data + 8 + header, *p = data + 8;
    while ((p = memmem(p, (size_t)(end - p), from, strlen(from)))) {
        memcpy(p, to, strlen(to));
        p += strlen(to);
        n_changed++;
    }
    assert_true(n_changed > 0);
    e = (struct err){0};
    assert_int_equal(model_config_read(&config, &gen, dir, &e), 0);
    assert_int_equal(checkpoint_new(&c, &e), 0);
    if (safetensors_parse(c, data, len, "x", &e) < 0) {
        fail_msg("%s", e.text);
    }
    int rc = transformer_check(model_family_find(config.architecture, &a), &config, c, &e);
    if (*words ? rc != ERR_INVALID || !strstr(e.text, words) : rc != 0) {
        fail_msg("code %d, text '%s', expected '%s'", rc, e.text, words);
    }
    checkpoint_free(c);
}

static void check_changed(const char *from, const char *to, const char *words)
{
    check_changed_in("tests/golden/llama-mha24", from, to, words);
}

/* A row of the table stands for many tensors, and several rows may take parts of
 * one. */
static void experts_and_parts_are_named_once(void **state)
{
    (void)state;
    check_changed_in("tests/golden/qwen3-moe", "experts.3.up_proj", "experts.9.up_proj",
                     "missing model.layers.*.mlp.experts.*.up_proj.weight (2 times, first layer 0, "
                     "expert 3); unknown");
    check_changed_in("tests/golden/qwen3-moe", "layers.1.mlp.experts.5.up_proj",
                     "layers.1.mlp.experts.9.up_proj",
                     "missing model.layers.1.mlp.experts.5.up_proj.weight; unknown");
    check_changed_in("tests/golden/qwen3-moe", "[8,24]", "[6,32]",
                     "model.layers.0.mlp.gate.weight is [6, 32], must be [8, 24], 2 such");
    check_changed_in("tests/golden/internlm2", "[48,24]", "[24,48]",
                     "attention.wqkv.weight is [24, 48], must be [48, 24], 2 such");
    assert_null(strchr(e.text, ';'));
}

static void tensors_that_do_not_fit_are_named_at_once(void **state)
{
    (void)state;
    check_changed("model", "model", "");
    check_changed("o_proj", "x_proj",
                  "missing model.layers.*.self_attn.o_proj.weight (2 times); unknown "
                  "model.layers.*.self_attn.x_proj.weight (2 times)");
    check_changed("model.norm.weight", "model.mron.weight",
                  "missing model.norm.weight; unknown model.mron.weight");
    check_changed("\"F32\"", "\"U32\"", "is U32, must be BF16, F16 or F32");
    check_changed("\"F32\"", "\"I32\"", "is I32, must be");
    check_changed("[24,48]", "[48,24]",
                  "model.layers.0.self_attn.o_proj.weight is [48, 24], must be [24, 48], 2 such");
    check_changed("model.layers.1.", "model.layers.7.",
                  "missing model.layers.*.input_layernorm.weight; missing");
    check_changed("model.layers.1.", "model.layers.7.", " more");
}

/* Ranks compare digests: models that compute anything else must have another one. */
static void configurations_that_differ_have_other_digests(void **state)
{
    (void)state;
    static struct model m;
    static const size_t members[] = {
        offsetof(struct model_config, hidden),
        offsetof(struct model_config, full_head_dim),
        offsetof(struct model_config, sharing_from),
        offsetof(struct model_config, layer_input),
        offsetof(struct model_config, windowed),
        offsetof(struct model_config, mlp_alone),
        offsetof(struct model_config, attn_softcap),
        offsetof(struct model_config, final_softcap),
        offsetof(struct model_config, rope.original_positions),
        offsetof(struct model_config, rope.beta_fast),
        offsetof(struct model_config, rope.attention_factor),
        offsetof(struct model_config, rope.query_beta),
        offsetof(struct model_config, rope.short_factor),
        offsetof(struct model_config, rope.long_factor),
        offsetof(struct model_config, latent.rank),
        offsetof(struct model_config, experts.top),
        offsetof(struct model_config, experts.swiglu_limit),
        offsetof(struct model_config, experts.layer),
        offsetof(struct model_config, recurrent.tiled),
        offsetof(struct model_config, recurrent.norm_eps),
        offsetof(struct model_config, recurrent.layer),
        offsetof(struct model_config, head.mask_token),
    };
    uint64_t seen[ARRAY_LEN(members) + 1];

    m.config.n_layers = 1;
    seen[0] = model_digest(&m);
    for (size_t i = 0; i < ARRAY_LEN(members); i++) {
        char *member = (char *)&m.config + members[i];
        *member ^= 1;
        seen[i + 1] = model_digest(&m);
        *member ^= 1;
        for (size_t k = 0; k <= i; k++) {
            assert_int_not_equal(seen[k], seen[i + 1]);
        }
    }
    assert_int_equal(model_digest(&m), seen[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_found_where_the_header_says),
        cmocka_unit_test(lying_headers_are_refused),
        cmocka_unit_test(truncated_files_are_refused_at_every_length),
        cmocka_unit_test_setup_teardown(shards_are_opened_by_their_index, setup, teardown),
        cmocka_unit_test_setup_teardown(a_shard_with_more_than_the_index_names_is_refused, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(links_are_followed_inside_the_model_only, setup, teardown),
        cmocka_unit_test_setup_teardown(blobs_may_be_shared_by_models, setup, teardown),
        cmocka_unit_test_setup_teardown(a_tensor_that_is_kept_keeps_its_pages, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_no_file_of_weights_is_refused, setup, teardown),
        cmocka_unit_test(tensors_that_do_not_fit_are_named_at_once),
        cmocka_unit_test(experts_and_parts_are_named_once),
        cmocka_unit_test(configurations_that_differ_have_other_digests),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
