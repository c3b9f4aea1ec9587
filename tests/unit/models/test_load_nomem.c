/* Each allocation of settings, weights, tokenizers, templates and models fails in turn:
 * the result is an error, and nothing leaks. */
#include "tests/unit/nomem.h"

#include <string.h>
#include <unistd.h>

#include "config/settings/settings.h"
#include "models/chat/chat_template.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/weights.h"
#include "models/model.h"
#include "models/tokenizer/tokenizer.h"

static char yaml_path[] = "/tmp/quire-test-nomem-yaml-XXXXXX",
            keys_path[] = "/tmp/quire-test-nomem-keys-XXXXXX";
static char yaml_flag[64], keys_flag[64];

static int load_settings(void)
{
    char *argv[] = {"null",      yaml_flag, keys_flag, "--host=::1",
                    "--api-key", "beta",    "--dtype", "half"};
    char *env[] = {"QUIRE_SERVED_MODEL_NAME=name", "QUIRE_CORS_ORIGINS=*", NULL};
    struct settings s;
    struct err e = {0};
    bool help;
    int rc = settings_load(&s, ARRAY_LEN(argv), argv, env, &help, &e);

    if (rc == 0) {
        settings_release(&s);
    }
    return rc;
}

static int open_checkpoint(void)
{
    struct checkpoint *c;
    struct err e = {0};
    int rc = checkpoint_open(&c, "models/demo", &e);

    if (rc == 0) {
        checkpoint_free(c);
    }
    return rc;
}

static int read_config(void)
{
    struct model_config c;
    struct generation_defaults gen;
    struct err e = {0};

    return model_config_read(&c, &gen, "models/demo", &e);
}

static int open_tokenizer(void)
{
    struct tokenizer *t;
    struct err e = {0};
    int rc = tokenizer_open(&t, "models/demo", &e);

    if (rc == 0) {
        tokenizer_free(t);
    }
    return rc;
}

static struct tokenizer *tokenizer;

static int encode_and_decode(void)
{
    static const char text[] = "Once upon a time, there was a little f\xc3\xb6x named 12345.";
    struct token_list l = {0};
    struct buf out;
    struct err e = {0};

    buf_init(&out, 1 << 16);
    int rc = tokenizer_encode(tokenizer, text, sizeof(text) - 1, true, 1000, &l, &e);
    if (rc == 0) {
        rc = tokenizer_decode(tokenizer, l.id, l.n, false, &out, &e);
    }
    buf_release(&out);
    token_list_release(&l);
    return rc;
}

static int open_gguf(void)
{
    static const char path[] = "tests/unit/models/data/qwen2_bpe.gguf";
    struct model_config c;
    struct generation_defaults gen;
    struct checkpoint *weights = NULL;
    struct tokenizer *t = NULL;
    struct err e = {0};
    int rc = gguf_config_read(&c, &gen, path, &e);

    if (rc == 0) {
        rc = gguf_checkpoint_open(&weights, path, &c, DTYPE_BF16, &e);
    }
    if (rc == 0) {
        rc = gguf_tokenizer_open(&t, path, &e);
    }
    tokenizer_free(t);
    checkpoint_free(weights);
    return rc;
}

static int render_template(void)
{
    static const char text[] = "{% set ns = namespace(a=1) %}{% for m in messages %}{{ '<|' + "
                               "m['role'] + '|>' }}{{ m.content | "
                               "trim | upper }}{% endfor %}{{ messages[0:1] | tojson }}";
    static const char context[] = "{\"messages\":[{\"role\":\"user\",\"content\":\" hi \"}]}";
    struct chat_template *t;
    struct buf out;
    struct err e = {0};
    int rc = chat_template_new(&t, text, sizeof(text) - 1, "\"bos_token\":\"<s>\",", &e);

    if (rc < 0) {
        return rc;
    }
    buf_init(&out, 1 << 16);
    /* A template that ran out of memory in the parser is refused when it is used. */
    rc = chat_template_render(t, context, sizeof(context) - 1, &out, &e);
    buf_release(&out);
    chat_template_free(t);
    return rc;
}

static int open_model_of(const char *dir)
{
    struct model_config c;
    struct generation_defaults gen;
    struct model_options o = {
        .dtype = DTYPE_BF16, .max_tokens = 8, .max_logits = 2, .max_len = 64, .n_ranks = 1};
    struct backend_config bc = {
        .threads = 1, .max_tokens = 8, .max_seqs = 2, .max_samples = 2, .max_blocks_per_seq = 4};
    struct backend *b = NULL;
    struct model *m = NULL;
    struct err e = {0};
    int rc = model_config_read(&c, &gen, dir, &e);

    if (rc == 0) {
        rc = backend_open(&b, "cpu", &bc, &e);
    }
    if (rc == 0) {
        rc = model_open(&m, dir, &c, &o, b, &e);
    }
    if (b) {
        b->ops->free(b);
    }
    model_free(m);
    return rc;
}

static int open_model(void)
{
    return open_model_of("models/demo");
}

static int open_gptq(void)
{
    return open_model_of("tests/golden/quant-gptq");
}

static int open_act_order(void)
{
    return open_model_of("tests/golden/quant-gptq-act-order");
}

static int open_nvfp4(void)
{
    return open_model_of("tests/golden/quant-ct-nvfp4");
}

static void settings_that_find_no_memory_are_refused(void **state)
{
    (void)state;
    nomem_each(load_settings, 10000, 40, 4);
}

static void checkpoints_that_find_no_memory_are_refused(void **state)
{
    (void)state;
    nomem_each(read_config, 10000, 1, 0);
    nomem_each(open_checkpoint, 10000, 20, 0);
}

static void tokenizers_that_find_no_memory_are_refused(void **state)
{
    (void)state;
    nomem_each(open_tokenizer, 200, 20, 12);
    struct err e = {0};
    assert_int_equal(tokenizer_open(&tokenizer, "models/demo", &e), 0);
    nomem_each(encode_and_decode, 10000, 2, 0);
    tokenizer_free(tokenizer);
}

static void gguf_files_that_find_no_memory_are_refused(void **state)
{
    (void)state;
    nomem_each(open_gguf, 10000, 20, 12);
}

static void templates_that_find_no_memory_are_refused(void **state)
{
    (void)state;
    nomem_each(render_template, 10000, 4, 0);
}

static void models_that_find_no_memory_are_refused(void **state)
{
    (void)state;
    nomem_each(open_model, 10000, 20, 16);
    nomem_each(open_gptq, 10000, 40, 16);
    nomem_each(open_act_order, 10000, 40, 16);
    nomem_each(open_nvfp4, 10000, 40, 16);
}

static int write_files(void **state)
{
    (void)state;
    static const char yaml[] = "port: 9\nprefixes:\n  - one\n  - text: two\nmodel: here\nuds: /x\n",
                      keys[] = "# c\nalpha\n";
    int y = mkstemp(yaml_path), k = mkstemp(keys_path);
    if (y < 0 || k < 0 || write(y, yaml, strlen(yaml)) < 0 || write(k, keys, strlen(keys)) < 0) {
        return -1;
    }
    snprintf(yaml_flag, sizeof(yaml_flag), "--config=%s", yaml_path);
    snprintf(keys_flag, sizeof(keys_flag), "--api-key-file=%s", keys_path);
    return close(y) | close(k);
}

static int remove_files(void **state)
{
    (void)state;
    return unlink(yaml_path) | unlink(keys_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings_that_find_no_memory_are_refused),
        cmocka_unit_test(checkpoints_that_find_no_memory_are_refused),
        cmocka_unit_test(tokenizers_that_find_no_memory_are_refused),
        cmocka_unit_test(gguf_files_that_find_no_memory_are_refused),
        cmocka_unit_test(templates_that_find_no_memory_are_refused),
        cmocka_unit_test(models_that_find_no_memory_are_refused),
    };

    return cmocka_run_group_tests(tests, write_files, remove_files);
}
