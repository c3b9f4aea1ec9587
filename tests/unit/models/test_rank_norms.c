/* Norms over ranks: a backend that lacks them refuses such divisions by name, and the
 * refusal is what the page of models says of an architecture. */
#include <dirent.h>
#include <stdio.h>
#include <unistd.h>

#include "tests/unit/loaded.h"

/* What model_open says of rank 0 of two on a CPU without the operations. */
static int open_without(const char *path, struct err *e)
{
    struct backend_config k = {
        .threads = 1, .max_tokens = 4, .max_seqs = 1, .max_samples = 1, .max_blocks_per_seq = 1};
    struct generation_defaults unused;
    struct model_config c;
    struct loaded l = {0};

    if (backend_open(&l.backend, "cpu", &k, e) < 0 || model_config_read(&c, &unused, path, e) < 0) {
        fail_msg("%s", e->text);
    }
    l.ops = *l.backend->ops;
    l.ops.square_sums = NULL;
    l.ops.norm_by_sums = NULL;
    l.backend->ops = &l.ops;
    struct model_options o = {
        .dtype = DTYPE_F32, .max_tokens = 4, .max_logits = 1, .max_len = 8, .n_ranks = 2};
    int rc = model_open(&l.model, path, &c, &o, l.backend, e);
    unload(&l);
    return rc;
}

static void a_backend_without_them_refuses_by_name(void **state)
{
    (void)state;
    static const char *const OVER_RANKS[] = {"olmoe", "olmo2", "minimax-m2", "granite-hybrid"};
    static const char *const APART[] = {"bamba", "qwen3-moe", "falcon-h1"};
    char path[300];

    for (size_t i = 0; i < ARRAY_LEN(OVER_RANKS); i++) {
        struct err e = {0};
        snprintf(path, sizeof(path), "tests/golden/%s", OVER_RANKS[i]);
        assert_int_equal(open_without(path, &e), ERR_UNSUPPORTED);
        assert_non_null(strstr(e.text, "has norms over the heads of all ranks, which the backend"));
        assert_string_equal(e.param, "tensor_parallel_size");
    }
    for (size_t i = 0; i < ARRAY_LEN(APART); i++) {
        struct err e = {0};
        snprintf(path, sizeof(path), "tests/golden/%s", APART[i]);
        assert_int_equal(open_without(path, &e), 0);
    }
}

static void norms_run_over_ranks_where_the_architecture_has_such(void **state)
{
    (void)state;
    DIR *d = opendir("tests/golden");
    struct dirent *entry;
    enum { NONE, STATES, HEADS, KINDS }; /* what may run over ranks */
    int n[KINDS] = {0};

    assert_non_null(d);
    while ((entry = readdir(d)) != NULL) {
        char path[300];
        const struct architecture *a;
        struct generation_defaults unused;
        struct model_config c;
        struct err e = {0};
        snprintf(path, sizeof(path), "tests/golden/%s/config.json", entry->d_name);
        if (entry->d_name[0] == '.' || access(path, R_OK) != 0) {
            continue;
        }
        snprintf(path, sizeof(path), "tests/golden/%s", entry->d_name);
        if (model_config_read(&c, &unused, path, &e) < 0 ||
            !model_family_find(c.architecture, &a)) {
            fail_msg("%s: %s", path, e.text);
        }
        int norms = a->wide_qk_norm ? HEADS : a->ssd ? STATES : NONE;
        bool two = model_norms_over_ranks(&c, 2);
        assert_false(model_norms_over_ranks(&c, 1));
        assert_true(norms == STATES || two == (norms == HEADS));
        assert_true(!c.wide_qk_norm || norms == HEADS);
        assert_true(!model_shares_mixer_norm(&c.recurrent, 2) || norms == STATES);
        n[norms]++;
    }
    closedir(d);
    assert_true(n[NONE] > 60 && n[STATES] > 5 && n[HEADS] > 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_backend_without_them_refuses_by_name),
        cmocka_unit_test(norms_run_over_ranks_where_the_architecture_has_such),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
