/* What `quire quantize` writes of models with experts: a weight for each product of
 * each expert, a router as it was, and what a text that some experts never see gives.
 *
 *     build/tests/unit/models/test_quantise_experts
 */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/cpu/simd/convert.h"
#include "models/checkpoint/quantised/quantised.h"
#include "models/families/layers.h"
#include "models/quantise/inputs.h"
#include "models/quantise/quantise.h"

#define OK(call, e)                              \
    do {                                         \
        if ((call) < 0)                          \
            fail_msg("%s: %s", #call, (e).text); \
    } while (0)

#define GOLDENS "tests/golden"

enum { TOKENS = 96, WINDOW_TOKENS = 40 };

/* ---- directories ---- */

struct written {
    char parent[64], dir[96];
    char *report; /* owned, as are the next two */
    char *config;
    struct checkpoint *c;
};

static void written_release(struct written *w)
{
    static const char *const FILES[] = {"config.json", "model.safetensors",
                                        "generation_config.json"};
    char path[160];

    checkpoint_free(w->c);
    free(w->report);
    free(w->config);
    for (size_t i = 0; i < ARRAY_LEN(FILES); i++) {
        snprintf(path, sizeof(path), "%s/%s", w->dir, FILES[i]);
        unlink(path);
    }
    rmdir(w->dir);
    rmdir(w->parent);
}

static char *text_of_file(const char *dir, const char *name)
{
    char path[160], *text = calloc(1, 1 << 20);

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    assert_true(f && text);
    assert_true(fread(text, 1, (1 << 20) - 1, f) > 0);
    fclose(f);
    return text;
}

static void written_make(struct written *w, const char *from, const struct quantise_options *o)
{
    size_t n;
    struct err e = {0};

    *w = (struct written){.parent = "/tmp/quire-test-experts-XXXXXX"};
    assert_non_null(mkdtemp(w->parent));
    snprintf(w->dir, sizeof(w->dir), "%s/to", w->parent);
    FILE *report = open_memstream(&w->report, &n);
    assert_non_null(report);
    if (quantise_directory(from, w->dir, o, report, &e) < 0) {
        fail_msg("%s: %s", from, e.text);
    }
    fclose(report);
    w->config = text_of_file(w->dir, "config.json");
    OK(checkpoint_open(&w->c, w->dir, &e), e);
    OK(checkpoint_read_quantised(w->c, w->dir, DTYPE_F32, &e), e);
}

/* Tokens below `vocab`, from a generator of fixed seed. */
static void tokens_below(int32_t *token, int32_t n, int32_t vocab)
{
    uint32_t seed = 7;

    for (int32_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        token[i] = (int32_t)((seed >> 8) % (uint32_t)vocab);
    }
}

/* ---- logits ---- */

struct seen {
    float *logits; /* [WINDOW_TOKENS, vocab] */
    int32_t vocab;
};

static int keep(void *ctx, int32_t first, int32_t rows, const float *logits, struct err *e)
{
    struct seen *seen = ctx;

    (void)e;
    memcpy(seen->logits + (ptrdiff_t)first * seen->vocab, logits,
           (size_t)rows * (size_t)seen->vocab * sizeof(*logits));
    return 0;
}

/* Logits of a window, the caller's. */
static struct seen logits_of(const char *dir)
{
    struct scorer s;
    struct err e = {0};
    int32_t token[WINDOW_TOKENS];

    if (scorer_init(&s, dir, NULL, 1, &e) < 0) {
        fail_msg("%s: %s", dir, e.text);
    }
    struct seen seen = {.vocab = s.config.vocab};
    seen.logits = calloc((size_t)WINDOW_TOKENS * (size_t)seen.vocab, sizeof(*seen.logits));
    assert_non_null(seen.logits);
    tokens_below(token, WINDOW_TOKENS, seen.vocab);
    OK(scorer_window(&s, token, WINDOW_TOKENS, keep, &seen, &e), e);
    scorer_release(&s);
    return seen;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The median over rows of the root mean square of the difference, as a share of the
 * row's own: another choice of experts in some rows does not count. */
static double difference(const struct seen *a, const struct seen *b)
{
    double row[WINDOW_TOKENS];

    for (int r = 0; r < WINDOW_TOKENS; r++) {
        double off = 0, all = 0;
        for (int32_t i = 0; i < a->vocab; i++) {
            double x = (double)a->logits[r * a->vocab + i], y = (double)b->logits[r * a->vocab + i];
            off += (x - y) * (x - y);
            all += x * x;
        }
        row[r] = sqrt(off / all);
    }
    qsort(row, WINDOW_TOKENS, sizeof(*row), ascending);
    return row[WINDOW_TOKENS / 2];
}

static double difference_of(const char *from, const char *to)
{
    struct seen a = logits_of(from), b = logits_of(to);
    double ret = difference(&a, &b);

    free(a.logits);
    free(b.logits);
    return ret;
}

/* ---- every family ---- */

/* Whether a golden is a model with experts that is stored as floats. */
static bool has_experts(const char *dir)
{
    struct model_config c;
    struct generation_defaults gen;
    struct err e = {0};

    if (strstr(dir, "/quant") || model_config_read(&c, &gen, dir, &e) < 0) {
        return false;
    }
    return c.experts.n > 0;
}

/* Eight bits of weights and of their inputs leave logits nearly as they were; a weight
 * in another one's place does not. */
static void families_with_experts_compute_what_they_did(void **state)
{
    (void)state;
    static const struct quantise_options INT8 = {.format = FORMAT_INT8};
    struct dirent *entry;
    DIR *d = opendir(GOLDENS);
    int n = 0;

    assert_non_null(d);
    while ((entry = readdir(d)) != NULL) {
        struct written w;
        char dir[300];
        snprintf(dir, sizeof(dir), GOLDENS "/%s", entry->d_name);
        if (entry->d_name[0] == '.' || !has_experts(dir)) {
            continue;
        }
        written_make(&w, dir, &INT8);
        double off = difference_of(dir, w.dir);
        print_message("%s: %.4f\n", dir, off);
        if (!(off < 0.2)) {
            fail_msg("%s: logits are %.3f off", dir, off);
        }
        written_release(&w);
        n++;
    }
    closedir(d);
    assert_true(n >= 20);
}

/* ---- names ---- */

static const struct tensor *quantised(const struct written *w, const char *name)
{
    const struct tensor *t = checkpoint_find(w->c, name);

    if (!t || !t->quantised) {
        fail_msg("%s is %s", name, t ? "not quantised" : "missing");
    }
    return t;
}

/* Whether `ignore` of config.json has the module. */
static bool is_ignored(const struct written *w, const char *module)
{
    char quoted[160];
    const char *list = strstr(w->config, "\"ignore\": ["), *end = list ? strchr(list, ']') : NULL;

    snprintf(quoted, sizeof(quoted), "\"%s\"", module);
    const char *at = list ? strstr(list, quoted) : NULL;
    return at && end && at < end;
}

static void experts_of_one_tensor_are_written_one_by_one(void **state)
{
    (void)state;
    static const struct {
        const char *dir, *expert[3], *router; /* of layer 0 */
    } CASES[] = {
        {GOLDENS "/gpt-oss",
         {"model.layers.0.mlp.experts.3.gate_proj", "model.layers.0.mlp.experts.3.up_proj",
          "model.layers.0.mlp.experts.3.down_proj"},
         "model.layers.0.mlp.router"},
        {GOLDENS "/qwen3-vl-moe",
         {"model.language_model.layers.0.mlp.experts.3.gate_proj",
          "model.language_model.layers.0.mlp.experts.3.up_proj",
          "model.language_model.layers.0.mlp.experts.3.down_proj"},
         "model.language_model.layers.0.mlp.gate"},
        {GOLDENS "/granite-moe",
         {"model.layers.0.block_sparse_moe.experts.3.gate_proj",
          "model.layers.0.block_sparse_moe.experts.3.up_proj",
          "model.layers.0.block_sparse_moe.experts.3.down_proj"},
         "model.layers.0.block_sparse_moe.router.layer"},
        {GOLDENS "/mixtral",
         {"model.layers.0.block_sparse_moe.experts.3.w1",
          "model.layers.0.block_sparse_moe.experts.3.w2",
          "model.layers.0.block_sparse_moe.experts.3.w3"},
         "model.layers.0.block_sparse_moe.gate"},
    };
    static const struct quantise_options FP8 = {.format = FORMAT_FP8};

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct written w;
        char name[160];
        written_make(&w, CASES[i].dir, &FP8);
        for (int k = 0; k < 3; k++) {
            snprintf(name, sizeof(name), "%s.weight", CASES[i].expert[k]);
            quantised(&w, name);
            assert_false(is_ignored(&w, CASES[i].expert[k]));
        }
        snprintf(name, sizeof(name), "%s.weight", CASES[i].router);
        const struct tensor *t = checkpoint_find(w.c, name);
        assert_true(t && !t->quantised && t->data);
        assert_true(is_ignored(&w, CASES[i].router) && is_ignored(&w, "lm_head"));
        written_release(&w);
    }
}

/* ---- a text ---- */

/* The line "N of M experts see no token". */
static void read_unseen(const struct written *w, int *unseen, int *all)
{
    const char *at = strstr(w->report, " experts see no token");

    assert_non_null(at);
    while (at > w->report && at[-1] != '\n') {
        at--;
    }
    assert_int_equal(sscanf(at, "%d of %d", unseen, all), 2);
}

/* How many experts' down weights have other codes with factors than without; of all. */
static int changed_downs(const struct written *with, const struct written *without, int *all)
{
    int n = 0;

    *all = 0;
    for (int32_t i = 0; i < checkpoint_count(without->c); i++) {
        const struct tensor *t = checkpoint_at(without->c, i), *u;
        if (!t->quantised || !strstr(t->name, ".mlp.experts.") || !strstr(t->name, "down_proj")) {
            continue;
        }
        u = quantised(with, t->name);
        (*all)++;
        n += memcmp(t->quantised->codes, u->quantised->codes, (size_t)t->quantised->n_bytes) != 0;
    }
    return n;
}

static void experts_without_a_token_are_rounded_to_nearest(void **state)
{
    (void)state;
    int32_t token[TOKENS];
    struct quantise_options o = {.format = FORMAT_INT8, .token = token},
                            plain = {.format = FORMAT_INT8};
    struct written with, without;
    int unseen, all, downs;

    tokens_below(token, TOKENS, 40);
    written_make(&without, GOLDENS "/qwen3-moe", &plain);
    assert_null(strstr(without.report, "see no token"));
    o.smooth = 0.5f;
    o.n_tokens = 8; /* four of which calibrate: 2 of 8 experts each */
    written_make(&with, GOLDENS "/qwen3-moe", &o);
    read_unseen(&with, &unseen, &all);
    int changed = changed_downs(&with, &without, &downs);
    assert_int_equal(downs, all);
    assert_true(unseen > 0 && unseen < all);
    assert_int_equal(changed, all - unseen);
    written_release(&with);
    o.n_tokens = TOKENS;
    written_make(&with, GOLDENS "/qwen3-moe", &o);
    read_unseen(&with, &unseen, &all);
    assert_int_equal(unseen, 0);
    assert_non_null(strstr(with.report, "perplexity of"));
    written_release(&with);
    written_release(&without);
}

static float value_at(const struct tensor *t, int64_t i)
{
    return dtype_load(t->data, t->dtype, i);
}

/* What a norm and the router behind it make of a column together. */
static void check_router(const struct checkpoint *c, const struct written *w, int layer)
{
    char norm[96], router[96];
    int moved = 0;

    snprintf(norm, sizeof(norm), "model.layers.%d.post_attention_layernorm.weight", layer);
    snprintf(router, sizeof(router), "model.layers.%d.mlp.gate.weight", layer);
    const struct tensor *n = checkpoint_find(c, norm), *m = checkpoint_find(w->c, norm),
                        *r = checkpoint_find(c, router), *s = checkpoint_find(w->c, router);
    assert_true(n && m && r && s);
    assert_string_equal(r->stored_type, s->stored_type);
    for (int64_t i = 0; i < r->dim[0]; i++) {
        for (int64_t j = 0; j < r->dim[1]; j++) {
            float before = value_at(n, j) * value_at(r, i * r->dim[1] + j),
                  after = value_at(m, j) * value_at(s, i * r->dim[1] + j);
            assert_true(before == after);
            moved += value_at(n, j) != value_at(m, j);
        }
    }
    assert_true(moved > 0);
}

static void factors_leave_the_router_bit_by_bit(void **state)
{
    (void)state;
    int32_t token[TOKENS];
    struct quantise_options o = {
        .format = FORMAT_INT8, .smooth = 0.9f, .token = token, .n_tokens = TOKENS};
    struct checkpoint *c;
    struct written w;
    struct err e = {0};

    tokens_below(token, TOKENS, 40);
    OK(checkpoint_open(&c, GOLDENS "/qwen3-moe", &e), e);
    written_make(&w, GOLDENS "/qwen3-moe", &o);
    check_router(c, &w, 0);
    check_router(c, &w, 1);
    assert_true(difference_of(GOLDENS "/qwen3-moe", w.dir) < 0.05);
    written_release(&w);
    written_make(&w, GOLDENS "/qwen2-moe-shared", &o); /* a shared expert and its gate, too */
    assert_non_null(strstr(w.report, "shared down"));
    assert_true(difference_of(GOLDENS "/qwen2-moe-shared", w.dir) < 0.05);
    written_release(&w);
    o.smooth = 0;
    o.search = true;
    written_make(&w, GOLDENS "/qwen2-moe-shared", &o);
    assert_true(difference_of(GOLDENS "/qwen2-moe-shared", w.dir) < 0.05);
    written_release(&w);
    written_make(&w, GOLDENS "/gpt-oss", &o); /* limits and biases: down has no factors */
    assert_null(strstr(w.report, "expert 0 down"));
    assert_true(difference_of(GOLDENS "/gpt-oss", w.dir) < 0.05);
    written_release(&w);
    checkpoint_free(c);
}

static void the_experts_of_a_layer_share_their_fixed_scales(void **state)
{
    (void)state;
    int32_t token[TOKENS];
    struct quantise_options o = {
        .format = FORMAT_FP8, .fixed = true, .token = token, .n_tokens = 8};
    struct written w;
    char name[96];
    int unseen, all;

    tokens_below(token, TOKENS, 40);
    written_make(&w, GOLDENS "/qwen3-moe", &o);
    read_unseen(&w, &unseen, &all);
    assert_true(unseen > 0);
    for (int layer = 0; layer < 2; layer++) {
        static const char *const KINDS[] = {"gate_proj", "up_proj", "down_proj"};
        float scale[3];
        for (int i = 0; i < 3 * 8; i++) {
            snprintf(name, sizeof(name), "model.layers.%d.mlp.experts.%d.%s.weight", layer, i / 3,
                     KINDS[i % 3]);
            const struct weight_scales *s = &quantised(&w, name)->quantised->scales;
            assert_int_equal(s->act, ACT_SCALE_TENSOR);
            scale[i % 3] = i < 3 ? s->act_scale : scale[i % 3];
            assert_true(s->act_scale == scale[i % 3] && s->act_scale > 0);
        }
        assert_true(scale[0] == scale[1] && scale[0] != scale[2]);
    }
    written_release(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(families_with_experts_compute_what_they_did),
        cmocka_unit_test(experts_of_one_tensor_are_written_one_by_one),
        cmocka_unit_test(experts_without_a_token_are_rounded_to_nearest),
        cmocka_unit_test(factors_leave_the_router_bit_by_bit),
        cmocka_unit_test(the_experts_of_a_layer_share_their_fixed_scales),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
