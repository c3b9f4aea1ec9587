/* Draft heads against float64 (scripts/make-head-goldens): the logits of what a head
 * makes of its target's hidden states, and of its own behind them; and what is
 * refused. QUIRE_TEST_BACKEND=cuda selects another backend. */
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/checkpoint/weights.h"
#include "models/families/layers.h"

#define HEADS "tests/golden/heads/"

enum {
    MAX_TOKENS = 64,
    MAX_LOGITS = 8,
    BLOCK = 4,
    N_ROWS = 3,
    N_TABLE = 16,
    N_PROMPTS = 3,
    MAX_GROUPS = 3
};

#define OK(call, e)                              \
    do {                                         \
        if ((call) < 0)                          \
            fail_msg("%s: %s", #call, (e).text); \
    } while (0)

/* A model on a backend of its own, with a cache of N_ROWS sequences. */
struct side {
    struct backend *backend;
    struct model *model;
    int32_t n_groups; /* KV groups */
    uint64_t step;
};

static struct side target, head;
static struct checkpoint *expected;

static void open_side(struct side *s, const char *dir, const struct model_config *c,
                      const struct model_taps *taps)
{
    struct err e = {0};
    struct backend_config bc = {.threads = 2,
                                .max_tokens = MAX_TOKENS,
                                .max_seqs = N_ROWS,
                                .max_samples = MAX_TOKENS,
                                .max_blocks_per_seq = N_TABLE};
    struct model_kv_groups groups;
    struct model_options o = {.dtype = c->dtype,
                              .max_tokens = MAX_TOKENS,
                              .max_logits = MAX_LOGITS,
                              .max_len = N_TABLE * BLOCK,
                              .one_kv_group = true,
                              .taps = *taps};
    const char *name = getenv("QUIRE_TEST_BACKEND");

    model_kv_groups(&groups, c, &o);
    *s = (struct side){.n_groups = groups.n};
    bc.n_kv_groups = groups.n;
    OK(backend_open(&s->backend, name ? name : "cpu", &bc, &e), e);
    OK(model_open(&s->model, dir, c, &o, s->backend, &e), e);
}

static void make_cache(struct side *s)
{
    struct err e = {0};
    struct kv_layout kv[LIMIT_KV_GROUPS];
    const struct model *m = s->model;
    enum dtype act = backend_act_dtype(s->backend, m->options.dtype);
    int32_t width = model_taps_width(&m->options.taps, &m->config);

    model_kv_layouts(kv, &m->config, &m->options, BLOCK, act);
    if (width > 0) {
        kv_layouts_add_hidden(kv, s->n_groups, width, act);
    }
    OK(s->backend->ops->kv_create(s->backend, kv, N_ROWS * N_TABLE * MAX_GROUPS, 0, &e), e);
}

static void close_side(struct side *s)
{
    if (s->backend) {
        s->backend->ops->free(s->backend);
    }
    model_free(s->model);
    *s = (struct side){0};
}

static int close_all(void **state)
{
    (void)state;
    close_side(&head);
    close_side(&target);
    checkpoint_free(expected);
    expected = NULL;
    return 0;
}

static void read_config(struct model_config *ret, const char *dir)
{
    struct generation_defaults gen;
    struct err e = {0};

    OK(model_config_read(ret, &gen, dir, &e), e);
}

/* The directory of a head's target: its own, or the one that its file `target`
 * names. */
static void target_of(const char *dir, char *ret, size_t cap)
{
    char path[256], name[64] = "";

    snprintf(path, sizeof(path), "%s/target", dir);
    FILE *f = fopen(path, "r");
    if (f) {
        assert_int_equal(fscanf(f, "%63s", name), 1);
        fclose(f);
    }
    snprintf(ret, cap, "%s%s", f ? "tests/golden/" : dir, name);
}

/* Both models, bound. */
static void open_pair(const char *dir)
{
    struct model_config t, h;
    struct err e = {0};
    char path[256];

    target_of(dir, path, sizeof(path));
    read_config(&t, path);
    read_config(&h, dir);
    OK(h.head.kind == HEAD_EAGLE3 ? model_eagle3_fit(&h, &t, &e) : model_mtp_config(&h, &t, &e), e);
    struct model_taps taps = model_head_taps(&h), none = {0};
    open_side(&head, dir, &h, &none);
    open_side(&target, path, &t, &taps);
    make_cache(&target);
    make_cache(&head);
    OK(model_head_bind(head.model, target.model, &e), e);
    snprintf(path, sizeof(path), "%s/expected", dir);
    OK(checkpoint_open(&expected, path, &e), e);
}

static const struct tensor *value(const char *name, int i)
{
    char full[32];

    snprintf(full, sizeof(full), "%s.%d", name, i);
    const struct tensor *t = checkpoint_find(expected, full);
    assert_non_null(t);
    return t;
}

/* Blocks of a sequence lie apart and in descending order. Group 0's are the same in
 * both models. */
static int32_t group_slot_of(int32_t group, int32_t row, int32_t position)
{
    int32_t block = (N_TABLE - 1 - position / BLOCK) * N_ROWS + row;

    return (block * MAX_GROUPS + group) * BLOCK + position % BLOCK;
}

static int32_t slot_of(int32_t row, int32_t position)
{
    return group_slot_of(0, row, position);
}

/* Tokens of one sequence, from position `first` on, all with logits, into out [n,
 * vocab]; src: sampling row of the step before, -1: token[] has them. Returns what
 * is sampled, until the step after next. */
static const int32_t *step(struct side *s, int32_t row, int32_t first, const int32_t *token,
                           int32_t n, int32_t src, float *out)
{
    static int32_t from[MAX_TOKENS], position[MAX_TOKENS], slot[MAX_TOKENS], at[MAX_TOKENS],
        further[MAX_TOKENS * MAX_GROUPS], table[MAX_GROUPS * N_TABLE], zero[1];
    static struct sample_row sample[MAX_TOKENS];
    int32_t ends[2] = {0, n}, kv_len = first + n;
    struct table_update update[MAX_GROUPS];
    int32_t n_further = 0;
    const struct backend_ops *ops = s->backend->ops;
    struct results r;
    struct err e = {0};

    for (int32_t g = 0; g < s->n_groups; g++) {
        update[g] =
            (struct table_update){.group = g, .row = row, .count = N_TABLE, .first = g * N_TABLE};
        for (int32_t i = 0; i < N_TABLE; i++) {
            table[g * N_TABLE + i] = group_slot_of(g, row, i * BLOCK) / BLOCK;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        for (int32_t g = 1; g < s->n_groups; g++) {
            further[n_further++] = group_slot_of(g, row, first + i);
        }
        from[i] = src;
        position[i] = first + i;
        slot[i] = slot_of(row, first + i);
        at[i] = i;
        sample[i] = (struct sample_row){.logits_row = i,
                                        .top_p = 1,
                                        .repetition_penalty = 1,
                                        .n_logprobs = -1,
                                        .position = first + i + 1,
                                        .mask_first = -1};
    }
    struct batch b = {.step = ++s->step,
                      .n_tokens = n,
                      .token = token,
                      .token_src = from,
                      .position = position,
                      .slot = slot,
                      .n_seqs = 1,
                      .n_decode = n == 1,
                      .q_start = ends,
                      .kv_len = &kv_len,
                      .row = &row,
                      .lcp_blocks = zero,
                      .n_logits = n,
                      .logits_token = at,
                      .n_samples = n,
                      .sample = sample,
                      .group_slot = further,
                      .n_group_slots = n_further,
                      .table_update = update,
                      .n_table_update = s->n_groups,
                      .table_block = table,
                      .n_table_block = s->n_groups * N_TABLE};
    OK(ops->step_begin(s->backend, &b, &e), e);
    head_begin(s->model, &b);
    s->model->family->forward(s->model, &b);
    head_end(s->model, &b);
    for (int32_t i = 0; i < n; i += MAX_LOGITS) {
        int32_t rows = MIN(n - i, MAX_LOGITS);
        struct mat gathered = mat_rows(s->model->gathered, 0, rows),
                   logits = mat_rows(s->model->logits, 0, rows);
        ops->gather(s->backend, gathered, mat_rows(s->model->hidden, 0, n), i);
        transformer_head(s->model, logits, gathered);
        OK(ops->download(s->backend, logits, out + i * logits.cols, &e), e);
        ops->sample(s->backend, logits, i);
    }
    OK(ops->step_end(s->backend, &e), e);
    OK(ops->step_wait(s->backend, &r, &e), e);
    return r.token;
}

/* The reference's formulas lose more than half of it in float32 themselves. */
#define MOST_ERROR 2e-5

static void compare(const struct tensor *want, const float *got, const char *what)
{
    const float *w = want->data;
    double error = 0, sum = 0;
    int64_t n = want->dim[0] * want->dim[1];

    for (int64_t i = 0; i < n; i++) {
        if (isinf(w[i]) || isinf(got[i])) {
            assert_true(isinf(w[i]) && isinf(got[i]));
            continue;
        }
        error += ((double)got[i] - w[i]) * ((double)got[i] - w[i]);
        sum += (double)w[i] * w[i];
    }
    if (!(sqrt(error / sum) < MOST_ERROR)) {
        fail_msg("%s: the error is %g of the logits", what, sqrt(error / sum));
    }
}

/* The prompt's tokens but the first, as entries of the head, `portion` at a time;
 * returns the sampling row of the last one. */
static int32_t read_prompt(int32_t row, const struct tensor *prompt, int32_t portion, float *out)
{
    const int32_t *token = prompt->data;
    int32_t n = (int32_t)prompt->dim[0] - 1, last = 0, vocab = head.model->config.vocab;

    for (int32_t i = 0; i < n; i += portion) {
        int32_t m = MIN(portion, n - i);
        step(&head, row, i, token + 1 + i, m, -1, out + i * vocab);
        last = m - 1;
    }
    return last;
}

/* Drafts behind the n entries of row i: each of the head's own residual stream; src:
 * sampling row of the entry before. */
static void draft_in_turn(int i, int32_t n, int32_t src, float *logits)
{
    const int32_t *draft = value("draft", i)->data;
    int32_t vocab = head.model->config.vocab;

    for (int32_t k = 0; k < (int32_t)value("further", i)->dim[0]; k++) {
        int32_t sampled = *step(&head, i, n + k, &(int32_t){0}, 1, src, logits + k * vocab);
        assert_int_equal(sampled, draft[k + 1]);
        src = 0;
    }
}

/* The same of a head that drafts in one step. */
static void draft_at_once(int i, int32_t n, float *logits)
{
    const int32_t *draft = value("draft", i)->data;
    int32_t token[MAX_LOGITS], m = (int32_t)value("further", i)->dim[0];

    for (int32_t k = 0; k < m; k++) {
        token[k] = head.model->config.head.mask_token;
    }
    const int32_t *sampled = step(&head, i, n, token, m, TOKEN_MASKED, logits);
    for (int32_t k = 0; k < m; k++) {
        assert_int_equal(sampled[k], draft[k + 1]);
    }
}

static void check_prompt(int i, int32_t portion)
{
    static float logits[MAX_TOKENS * 128];
    const struct tensor *prompt = value("prompt", i), *further = value("further", i);
    int32_t n = (int32_t)prompt->dim[0];

    for (int32_t k = 0; k < n; k += 3) { /* the target in portions of its own */
        step(&target, i, k, (const int32_t *)prompt->data + k, MIN(3, n - k), -1, logits);
    }
    int32_t src = read_prompt(i, prompt, portion, logits);
    compare(value("logits", i), logits, "behind known tokens");
    if (head.model->config.head.parallel) {
        draft_at_once(i, n - 1, logits);
    } else {
        draft_in_turn(i, n - 1, src, logits);
    }
    compare(further, logits, "behind drafts");
}

/* *state: the head's directory. */
static void logits_are_those_of_float64(void **state)
{
    const int32_t portions[] = {MAX_TOKENS, 5, 1};

    open_pair(*state);
    for (int i = 0; i < N_PROMPTS; i++) {
        check_prompt(i, portions[i]);
    }
    check_prompt(1, 2); /* again, over what is there */
}

/* A step of the target alone, which copies the blocks of row `from` to row `to`. */
static void copy_row(int32_t from, int32_t to)
{
    struct block_copy copy[N_TABLE];
    struct results r;
    struct err e = {0};
    int32_t ends[1] = {0};
    struct batch b = {.step = ++target.step, .copy = copy, .n_copy = N_TABLE, .q_start = ends};
    const struct backend_ops *ops = target.backend->ops;

    for (int32_t i = 0; i < N_TABLE; i++) {
        copy[i] =
            (struct block_copy){slot_of(from, i * BLOCK) / BLOCK, slot_of(to, i * BLOCK) / BLOCK};
    }
    OK(ops->step_begin(target.backend, &b, &e), e);
    OK(ops->step_end(target.backend, &e), e);
    OK(ops->step_wait(target.backend, &r, &e), e);
}

static void hidden_states_follow_their_blocks(void **state)
{
    (void)state;
    static float logits[MAX_TOKENS * 128];

    open_pair(HEADS "eagle3-speculators");
    const struct tensor *prompt = value("prompt", 2);
    step(&target, 0, 0, prompt->data, (int32_t)prompt->dim[0], -1, logits);
    copy_row(0, 1);
    read_prompt(1, prompt, MAX_TOKENS, logits);
    compare(value("logits", 2), logits, "from copies");
}

/* ---- refusals ---- */

static void refuses(const struct err *e, int rc, const char *why)
{
    if (rc >= 0 || !strstr(e->text, why)) {
        fail_msg("\"%s\", not \"%s\"", rc < 0 ? e->text : "no error", why);
    }
}

static void heads_of_other_models_are_refused(void **state)
{
    (void)state;
    struct model_config t, h;
    struct err e = {0};

    read_config(&t, "tests/golden/llama-mha24");
    read_config(&h, HEADS "eagle3-speculators");
    assert_int_equal(h.head.kind, HEAD_EAGLE3);
    struct model_config wide = t;
    wide.hidden = wide.embed_dim = 48;
    refuses(&e, model_eagle3_fit(&(struct model_config){.n_layers = 1, .head = h.head}, &wide, &e),
            "those of the model have 48");
    struct model_config other = h;
    other.head.tap[2] = 3;
    refuses(&e, model_eagle3_fit(&other, &t, &e), "reads layer 3; the model has 2 layers");
    other = h;
    other.head.draft_vocab = 68;
    refuses(&e, model_eagle3_fit(&other, &t, &e), "68 ids to draft, the model 67");
    other = h;
    other.head.parallel = true;
    other.head.mask_token = 67;
    refuses(&e, model_eagle3_fit(&other, &t, &e), "the head's mask token is 67, the model has 67");
    refuses(&e, model_mtp_config(&other, &t, &e), "LlamaForCausalLM has no MTP head");
    read_config(&t, "tests/golden/deepseek-v3");
    t.n_draft_layers = 0;
    refuses(&e, model_mtp_config(&other, &t, &e), "num_nextn_predict_layers is 0");
}

/* Open the head in `dir` with a configuration changed by the caller. */
static void refuses_weights(const char *dir, const struct model_config *c, const char *why)
{
    struct err e = {0};
    struct model_options o = {.dtype = DTYPE_F32,
                              .max_tokens = MAX_TOKENS,
                              .max_logits = MAX_LOGITS,
                              .max_len = N_TABLE * BLOCK};
    struct backend_config bc = {.threads = 1, .max_tokens = MAX_TOKENS, .max_seqs = 1};

    OK(backend_open(&head.backend, "cpu", &bc, &e), e);
    int rc = model_open(&head.model, dir, c, &o, head.backend, &e);
    refuses(&e, rc, why);
    head.model = NULL;
    close_side(&head);
}

static void weights_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct model_config t, h;
    struct err e = {0};

    read_config(&t, "tests/golden/llama-mha24");
    read_config(&h, HEADS "eagle3-speculators");
    OK(model_eagle3_fit(&h, &t, &e), e);
    struct model_config other = h;
    other.head.n_taps = 4;
    refuses_weights(HEADS "eagle3-speculators", &other, "fc.weight is [24, 72], must be [24, 96]");
    other = h;
    other.head.draft_vocab = 39;
    refuses_weights(HEADS "eagle3-speculators", &other, "lm_head.weight is [40, 24]");
    other = h;
    other.vocab = 50;
    refuses_weights(HEADS "eagle3-speculators", &other, "ids must ascend below 50");
    other = h;
    other.head.draft_vocab = 67;
    refuses_weights(HEADS "eagle3-midlayer", &other, "d2t must be there, with 67 whole numbers");
    refuses_weights("tests/golden/llama-mha24", &h, "missing model.fc.weight");
    read_config(&t, HEADS "mtp-glm");
    OK(model_mtp_config(&h, &t, &e), e);
    refuses_weights("tests/golden/glm4-moe", &h, "missing model.layers.*.enorm.weight");
}

int main(void)
{
    static char *dir[] = {HEADS "mtp-glm",         HEADS "mtp-latent",
                          HEADS "mtp-qwen",        HEADS "eagle3-speculators",
                          HEADS "eagle3-midlayer", HEADS "peagle"};
    struct CMUnitTest tests[ARRAY_LEN(dir) + 3];
    size_t n = 0;

    for (; n < ARRAY_LEN(dir); n++) {
        tests[n] = (struct CMUnitTest){.name = dir[n],
                                       .test_func = logits_are_those_of_float64,
                                       .teardown_func = close_all,
                                       .initial_state = dir[n]};
    }
    tests[n++] =
        (struct CMUnitTest)cmocka_unit_test_teardown(hidden_states_follow_their_blocks, close_all);
    tests[n++] =
        (struct CMUnitTest)cmocka_unit_test_teardown(heads_of_other_models_are_refused, close_all);
    tests[n++] = (struct CMUnitTest)cmocka_unit_test_teardown(weights_that_do_not_fit_are_refused,
                                                              close_all);
    return _cmocka_run_group_tests("heads", tests, n, NULL, NULL);
}
