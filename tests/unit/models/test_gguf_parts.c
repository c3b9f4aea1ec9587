/* Models in several GGUF files: found by the first one's name, with all tensors, and
 * refused where the files are not those of one model. */
#include "tests/unit/models/gguf_file.h"

#include <stdlib.h>
#include <unistd.h>

#include "models/checkpoint/file.h"

enum { PARTS = 3 };

static char folder[] = "/tmp/quire-parts-XXXXXX";
static struct err e;

static const char *path_of(int i, int n)
{
    static char path[128];

    snprintf(path, sizeof(path), "%s/m-%05d-of-%05d.gguf", folder, i, n);
    return path;
}

/* What one file says and has. */
struct part {
    uint32_t no, count; /* from 0 */
    const char *tensor; /* NULL: none */
    float value;        /* the tensor's */
    uint32_t all;       /* tensors of the model; 0: it does not say */
};

static void write_part(const char *path, const struct part *p)
{
    struct file f;
    float values[32];

    file_init(&f);
    set_int(&f, "split.no", p->no);
    set_int(&f, "split.count", p->count);
    if (p->all > 0) {
        set_int(&f, "split.tensors.count", p->all);
    }
    for (int i = 0; i < 32; i++) {
        values[i] = p->value;
    }
    if (p->tensor) {
        add_tensor(&f, p->tensor, 0, 32, 0, values, sizeof(values));
    }
    finish(&f, 3);
    FILE *to = fopen(path, "wb");
    assert_non_null(to);
    assert_int_equal(fwrite(f.all.data, 1, f.all.len, to), f.all.len);
    assert_int_equal(fclose(to), 0);
    file_release(&f);
}

/* The first file has no tensors, as many splits have it. */
static void write_model(void)
{
    write_part(path_of(1, PARTS), &(struct part){0, PARTS, NULL, 0, 2});
    write_part(path_of(2, PARTS), &(struct part){1, PARTS, "a", 1, 0});
    write_part(path_of(3, PARTS), &(struct part){2, PARTS, "b", 2, 0});
}

static void refuse(const char *words)
{
    struct gguf *g = NULL;
    int rc = gguf_open(&g, path_of(1, PARTS), &e);

    if (rc >= 0 || !strstr(e.text, words)) {
        fail_msg("code %d, text '%s', expected '%s'", rc, e.text, words);
    }
}

static void all_files_are_one_model(void **state)
{
    struct gguf *g = NULL;

    (void)state;
    write_model();
    assert_int_equal(gguf_open(&g, path_of(1, PARTS), &e), 0);
    assert_int_equal(g->n_tensors, 2);
    for (int i = 0; i < 2; i++) {
        float value;
        memcpy(&value, g->tensor[i].data + 31 * sizeof(value), sizeof(value));
        assert_true(gguf_text_is(g->tensor[i].name, i == 0 ? "a" : "b"));
        assert_true(value == (float)(i + 1));
    }
    gguf_free(g);
}

static void files_of_other_models_are_refused(void **state)
{
    (void)state;
    write_model();
    assert_int_equal(unlink(path_of(3, PARTS)), 0);
    refuse("m-00003-of-00003.gguf: No such file");

    write_part(path_of(3, PARTS), &(struct part){1, PARTS, "b", 2, 0});
    refuse("m-00003-of-00003.gguf: says that it is file 2 of 3");
    write_part(path_of(3, PARTS), &(struct part){2, 4, "b", 2, 0});
    refuse("m-00003-of-00003.gguf: says that it is file 3 of 4");
    write_part(path_of(3, PARTS), &(struct part){2, PARTS, "a", 2, 0});
    refuse("tensor a appears twice");
    write_part(path_of(3, PARTS), &(struct part){2, PARTS, NULL, 0, 0});
    refuse("the model has 2 tensors, its files 1");

    write_part(path_of(1, PARTS), &(struct part){1, PARTS, NULL, 0, 0});
    refuse("m-00001-of-00003.gguf: is file 2 of 3 of a model; give the first one");
    write_part(path_of(1, PARTS), &(struct part){0, 2, NULL, 0, 0});
    refuse("are found by names as NAME-00001-of-00002.gguf");
    write_part(path_of(1, PARTS), &(struct part){0, 70000, NULL, 0, 0});
    refuse("is the first of 70000 files");
    write_part(path_of(1, PARTS), &(struct part){0, 0, NULL, 0, 0});
    refuse("is the first of 0 files");
}

static void names_say_how_many_files_there_are(void **state)
{
    char name[] = "a/m-00001-of-00012.gguf";

    (void)state;
    assert_int_equal(model_file_parts(name), 12);
    assert_int_equal(model_file_parts("m-00002-of-00012.gguf"), 0);
    assert_int_equal(model_file_parts("m-00001-of-000x2.gguf"), 0);
    assert_int_equal(model_file_parts("m-00001-of-99999.gguf"), 0);
    assert_int_equal(model_file_parts("00001-of-00012.gguf"), 0);
    assert_int_equal(model_file_parts("m.gguf"), 0);
    model_file_part(name, name, 12);
    assert_string_equal(name, "a/m-00012-of-00012.gguf");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_files_are_one_model),
        cmocka_unit_test(files_of_other_models_are_refused),
        cmocka_unit_test(names_say_how_many_files_there_are),
    };

    if (!mkdtemp(folder)) {
        return 1;
    }
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 1; i <= PARTS; i++) {
        unlink(path_of(i, PARTS));
    }
    rmdir(folder);
    return rc;
}
