/* Whole models against transformers: every golden of tests/golden, and a real model if
 * one is present.
 *
 * Each tiny model computes its prompts in three ways: at once, token by token, and in
 * chunks beside another sequence. The error of all logits must be at most twice that of
 * transformers at the stored precision, and greedy text must be the same up to a tie.
 * scripts/make-goldens and make-quantised-goldens describe the files.
 * QUIRE_TEST_BACKEND=cuda selects another backend.
 */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/weights.h"
#include "models/families/layers.h"
#include "models/model.h"
#include "tests/unit/whole.h"

/* What llama.cpp writes for a golden (scripts/make-gguf-goldens). */
#define GGUF_FILE "model.gguf"

enum { MAX_TOKENS = 64, MAX_LOGITS = 8, BLOCK = 16, N_ROWS = 16, N_PROMPTS = 3 };

/* The cache's type; float32 stands for the activations'. */
static enum dtype cache_type = DTYPE_F32;

/* Whether the backend says that it has no experts without a gate. */
static bool gates_needed;

/* Whether the configuration is to say that the head is the embedding. */
static bool says_tied;

/* A model with a cache for N_ROWS sequences of max_len tokens, and its golden. */
struct rig {
    const char *golden;
    bool is_file; /* of GGUF */
    struct backend *backend;
    struct model *model;
    struct model_config config;
    struct checkpoint *expected;
    int32_t max_len, n_table; /* blocks a sequence */
    struct model_kv_groups groups;
    uint64_t step;
};

/* The tokens of one sequence in a step. */
struct piece {
    const int32_t *token;
    int32_t row, first, n; /* positions [first, first + n) */
};

static const struct tensor *expected(const struct rig *r, const char *name, int i)
{
    char full[32];

    snprintf(full, sizeof(full), "%s.%d", name, i);
    return checkpoint_find(r->expected, full);
}

#define OK(call, e)                              \
    do {                                         \
        if ((call) < 0)                          \
            fail_msg("%s: %s", #call, (e).text); \
    } while (0)

/* `dtype` < 0: as stored. */
static void rig_open_as(struct rig *r, const char *dir, const char *golden, int32_t max_len,
                        int dtype, bool dummy)
{
    struct err e = {0};
    char path[512];
    struct generation_defaults gen;

    *r = (struct rig){.golden = golden, .is_file = gguf_is_file(dir)};
    OK(r->is_file ? gguf_config_read(&r->config, &gen, dir, &e)
                  : model_config_read(&r->config, &gen, dir, &e),
       e);
    r->config.tied = r->config.tied || says_tied;
    snprintf(path, sizeof(path), "%s/expected", golden);
    OK(checkpoint_open(&r->expected, path, &e), e);
    const struct tensor *len = checkpoint_find(r->expected, "max_len");
    r->max_len = len ? *(const int32_t *)len->data : max_len;
    r->n_table = (int32_t)div_ceil(r->max_len, BLOCK);
    struct model_options o = {.dtype = dtype < 0 ? r->config.dtype : (enum dtype)dtype,
                              .dummy = dummy,
                              .max_tokens = MAX_TOKENS,
                              .max_logits = MAX_LOGITS,
                              .max_len = r->max_len,
                              .n_ranks = 1};
    model_kv_groups(&r->groups, &r->config, &o);
    struct backend_config bc = {.threads = 2,
                                .max_tokens = MAX_TOKENS,
                                .max_seqs = N_ROWS,
                                .max_samples = N_ROWS,
                                .max_blocks_per_seq = r->n_table,
                                .n_kv_groups = r->groups.n};
    const char *name = getenv("QUIRE_TEST_BACKEND");
    OK(backend_open(&r->backend, name ? name : "cpu", &bc, &e), e);
    if ((r->config.experts.n > 0 && !r->backend->ops->experts) ||
        (r->config.latent.rank > 0 && !r->backend->ops->latent_attention) ||
        (r->config.recurrent.n_heads > 0 && !r->backend->ops->recurrence)) {
        r->backend->ops->free(r->backend);
        checkpoint_free(r->expected);
        skip(); /* such models are refused on this device */
    }
    r->backend->self_gated_experts &= !gates_needed;
    OK(model_open(&r->model, dir, &r->config, &o, r->backend, &e), e);
    struct kv_layout kv[LIMIT_KV_GROUPS];
    model_kv_layouts(kv, &r->config, &o, BLOCK,
                     cache_type ? cache_type : backend_act_dtype(r->backend, o.dtype));
    int32_t n_blocks = r->groups.n * N_ROWS * r->n_table;
    OK(r->backend->ops->kv_create(r->backend, kv, n_blocks, 0, &e), e);
}

static void rig_open(struct rig *r, const char *dir, const char *golden, int32_t max_len)
{
    rig_open_as(r, dir, golden, max_len, -1, false);
}

static void rig_close(struct rig *r)
{
    r->backend->ops->free(r->backend);
    model_free(r->model);
    checkpoint_free(r->expected);
}

/* The blocks of a sequence are in descending order and interleaved with those of the
 * others and of other KV groups, so that no wrong order can give right results. */
static int32_t block_of(const struct rig *r, int32_t group, int32_t row, int32_t i)
{
    return ((r->n_table - 1 - i) * N_ROWS + row) * r->groups.n + group;
}

/* The entry of the table that a step sends: behind the window it is the sequence's last
 * block, as if the entry's own had gone to someone else. */
static int32_t entry_of(const struct rig *r, int32_t group, const struct piece *p, int32_t i)
{
    int32_t window = r->groups.window[group];
    int32_t first = window > 0                  ? MAX(p->first + 1 - window, 0)
                    : window == MODEL_KV_STATES ? MAX(p->first - 1, 0)
                                                : 0;

    return block_of(r, group, p->row, (i + 1) * BLOCK <= first ? r->n_table - 1 : i);
}

/* The arrays of a batch, for the largest step. */
struct work {
    struct batch b;
    int32_t token[MAX_TOKENS], src[MAX_TOKENS], position[MAX_TOKENS], slot[MAX_TOKENS];
    int32_t group_slot[MAX_TOKENS * LIMIT_KV_GROUPS];
    int32_t q_start[N_ROWS + 1], kv_len[N_ROWS], row[N_ROWS], lcp[N_ROWS];
    int32_t logits_token[MAX_TOKENS];
    struct table_update update[N_ROWS * LIMIT_KV_GROUPS];
    int32_t block[N_ROWS * LIMIT_KV_GROUPS * 1024];
    struct sample_row sample[N_ROWS];
};

/* `every`: logits of all tokens and no samples; else of each piece's last, sampled
 * greedily. Pieces of one token first. */
static void pack(struct rig *r, struct work *w, const struct piece *piece, int32_t n, bool every)
{
    memset(&w->b, 0, sizeof(w->b));
    struct batch *b = &w->b;
    for (int32_t i = 0; i < n; i++) {
        const struct piece *p = &piece[i];
        w->q_start[i] = b->n_tokens;
        w->kv_len[i] = p->first + p->n;
        w->row[i] = p->row;
        w->lcp[i] = 0;
        for (int32_t g = 0; g < r->groups.n; g++) {
            w->update[b->n_table_update++] = (struct table_update){
                .group = g, .row = p->row, .count = r->n_table, .first = b->n_table_block};
            for (int32_t k = 0; k < r->n_table; k++) {
                w->block[b->n_table_block++] = entry_of(r, g, p, k);
            }
        }
        for (int32_t k = 0; k < p->n; k++) {
            int32_t at = b->n_tokens++, position = p->first + k;
            w->token[at] = p->token[k];
            w->src[at] = -1;
            w->position[at] = position;
            w->slot[at] = block_of(r, 0, p->row, position / BLOCK) * BLOCK + position % BLOCK;
            for (int32_t g = 1; g < r->groups.n; g++) {
                w->group_slot[b->n_group_slots++] =
                    block_of(r, g, p->row, position / BLOCK) * BLOCK + position % BLOCK;
            }
            if (every || k == p->n - 1) {
                w->logits_token[b->n_logits++] = at;
            }
        }
        w->sample[i] = (struct sample_row){.logits_row = i,
                                           .top_p = 1,
                                           .repetition_penalty = 1,
                                           .n_logprobs = 2,
                                           .position = p->first + p->n,
                                           .mask_first = -1};
        b->n_decode += p->n == 1 && b->n_decode == i;
    }
    w->q_start[n] = b->n_tokens;
    b->step = ++r->step;
    b->n_seqs = n;
    b->n_samples = every ? 0 : n;
    b->token = w->token, b->token_src = w->src, b->position = w->position, b->slot = w->slot;
    b->group_slot = w->group_slot;
    b->q_start = w->q_start, b->kv_len = w->kv_len, b->row = w->row, b->lcp_blocks = w->lcp;
    b->logits_token = w->logits_token, b->sample = w->sample;
    b->table_update = w->update, b->table_block = w->block;
}

/* Logits of all tokens of the pieces, [n_tokens, vocab], appended to out. */
static float *step_logits(struct rig *r, const struct piece *piece, int32_t n, float *out)
{
    static struct work w;
    struct err e = {0};
    const struct backend_ops *ops = r->backend->ops;
    struct model *m = r->model;
    struct results results;

    pack(r, &w, piece, n, true);
    OK(ops->step_begin(r->backend, &w.b, &e), e);
    m->family->forward(m, &w.b);
    for (int32_t first = 0; first < w.b.n_logits; first += MAX_LOGITS) {
        int32_t rows = MIN(w.b.n_logits - first, MAX_LOGITS);
        struct mat gathered = mat_rows(m->gathered, 0, rows), logits = mat_rows(m->logits, 0, rows);
        ops->gather(r->backend, gathered, mat_rows(m->hidden, 0, w.b.n_tokens), first);
        transformer_head(m, logits, gathered);
        OK(ops->download(r->backend, logits, out, &e), e);
        out += rows * r->config.vocab;
    }
    OK(ops->step_end(r->backend, &e), e);
    OK(ops->step_wait(r->backend, &results, &e), e);
    return out;
}

/* The error that the golden states, which is that of transformers' own logits at the
 * stored precision, or of what else a file asks for: root mean square over prompts
 * [first, first + n). */
static double own_error(const struct rig *r, int first, int n)
{
    double sum = 0, count = 0;

    for (int i = first; i < first + n; i++) {
        const struct tensor *t = expected(r, "logits", i);
        double own = *(const float *)expected(r, "error", i)->data,
               n_logits = (double)(t->dim[0] * t->dim[1]);
        sum += own * own * n_logits;
        count += n_logits;
    }
    return sqrt(sum / count);
}

/* Whether products take activations of 16 bits: as they are stored, or of float32 the
 * instructions for pairs of bfloat16. */
static bool rounds_inputs(const struct rig *r)
{
    const char *device = r->backend->device;
    bool pairs = strstr(device, "avx512bf16") && !strstr(device, "by floats");

    return backend_act_dtype(r->backend, r->config.dtype) != DTYPE_F32 ||
           ((pairs || strstr(device, "amx")) && r->config.dtype == DTYPE_BF16);
}

/* How many times the stated error is allowed: of quantised weights the golden says so,
 * also on a CPU; but not where inputs are rounded, as those of the same weights in a
 * GGUF file are. */
static double times_allowed(const struct rig *r)
{
    const struct tensor *t = checkpoint_find(r->expected, "times");
    bool fine = !getenv("QUIRE_TEST_BACKEND") && !r->is_file && !rounds_inputs(r);

    return t ? (double)((const float *)t->data)[fine] : 2;
}

/* The logits of prompts [first, first + n) taken together; single tokens are too few to
 * tell rounding from error. */
static void compare_logits(const struct rig *r, int first, int n, float *const *got,
                           const char *how)
{
    double sum = 0, count = 0;

    for (int i = first; i < first + n; i++) {
        const struct tensor *t = expected(r, "logits", i);
        const float *want = t->data;
        for (int64_t k = 0; k < t->dim[0] * t->dim[1]; k++) {
            sum += ((double)got[i][k] - want[k]) * ((double)got[i][k] - want[k]);
        }
        count += (double)(t->dim[0] * t->dim[1]);
    }
    double error = sqrt(sum / count), own = own_error(r, first, n);
    if (getenv("QUIRE_TEST_VERBOSE")) {
        print_message("%s %s: error %.3g, %.2f of the golden's\n", r->golden, how, error,
                      error / own);
    }
    if (!(error <= times_allowed(r) * own)) {
        fail_msg("%s: logits err by %g (root mean square), allowed are %g", how, error,
                 times_allowed(r) * own);
    }
}

/* The model: a directory with its golden, written to `golden`, or a file in it. */
static void rig_open_case(struct rig *r, const char *model, char golden[300])
{
    snprintf(golden, 300, "%s", model);
    char *end_of_dir = strstr(golden, "/" GGUF_FILE);
    if (end_of_dir) {
        *end_of_dir = '\0';
    }
    rig_open(r, model, golden, 0);
}

/* *state: the model. */
static void logits_are_those_of_transformers(void **state)
{
    struct rig r;
    char golden[300];

    rig_open_case(&r, *state, golden);
    float *got[N_PROMPTS], *end[N_PROMPTS];
    struct piece whole[N_PROMPTS];
    for (int i = 0; i < N_PROMPTS; i++) {
        const struct tensor *prompt = expected(&r, "prompt", i);
        whole[i] = (struct piece){.token = prompt->data, .row = i, .n = (int32_t)prompt->dim[0]};
        got[i] = malloc((size_t)whole[i].n * (size_t)r.config.vocab * sizeof(float));
    }
    for (int i = 0; i < N_PROMPTS; i++) {
        step_logits(&r, &whole[i], 1, got[i]);
    }
    compare_logits(&r, 0, N_PROMPTS, got, "at once");
    for (int i = 0; i < N_PROMPTS; i++) {
        float *at = got[i];
        for (int32_t k = 0; k < whole[i].n; k++) {
            at = step_logits(&r, &(struct piece){whole[i].token + k, whole[i].row, k, 1}, 1, at);
        }
    }
    compare_logits(&r, 0, N_PROMPTS, got, "one by one");
    /* Prompt 1 a token a step, prompt 2 five: a decode beside a prefill. */
    float *both = malloc(6 * (size_t)r.config.vocab * sizeof(float));
    end[1] = got[1], end[2] = got[2];
    for (int32_t k = 0, done = 0; done < whole[2].n; k++) {
        int32_t n = MIN(5, whole[2].n - done), one = k < whole[1].n;
        struct piece pair[2] = {{whole[1].token + k, 1, k, 1}, {whole[2].token + done, 2, done, n}};
        step_logits(&r, &pair[!one], 1 + one, both);
        size_t vocab = (size_t)r.config.vocab, head = one ? vocab : 0;
        memcpy(end[1], both, head * sizeof(float));
        memcpy(end[2], both + head, (size_t)n * vocab * sizeof(float));
        end[1] += head;
        end[2] += (size_t)n * vocab;
        done += n;
    }
    compare_logits(&r, 1, 2, got, "in chunks");
    free(both);
    for (int i = 0; i < N_PROMPTS; i++) {
        free(got[i]);
    }
    rig_close(&r);
}

/* The error of the logits of prompt 2: root mean square of the differences from the
 * reference. */
static double error_as(const char *dir, int dtype, bool dummy)
{
    struct rig r;

    rig_open_as(&r, dir, dir, 0, dtype, dummy);
    const struct tensor *prompt = expected(&r, "prompt", 2);
    int64_t n = prompt->dim[0] * r.config.vocab;
    const float *want = expected(&r, "logits", 2)->data;
    float *got = malloc((size_t)n * sizeof(float));
    double sum = 0;
    step_logits(&r, &(struct piece){prompt->data, 0, 0, (int32_t)prompt->dim[0]}, 1, got);
    for (int64_t i = 0; i < n; i++) {
        sum += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
    }
    free(got);
    rig_close(&r);
    return sqrt(sum / (double)n);
}

static void weights_are_converted_to_the_type_asked_for(void **state)
{
    (void)state;
    double as_stored = error_as("tests/golden/llama-mha24", DTYPE_F32, false);
    double half = error_as("tests/golden/llama-mha24", DTYPE_F16, false);
    double brain = error_as("tests/golden/llama-mha24", DTYPE_BF16, false);
    assert_true(as_stored < half && half < brain);
    assert_true(half < 0.01 && brain < 0.05);
    /* widening loses nothing where activations are float32 */
    if (!getenv("QUIRE_TEST_BACKEND")) {
        assert_true(error_as("tests/golden/qwen2-tied", DTYPE_F32, false) < 1e-5);
    }
    /* transposed as it is converted */
    assert_true(error_as("tests/golden/gpt2-scaled", DTYPE_F16, false) < 0.01);
}

/* Families with windows, soft caps, sinks, biases, several KV groups. What the codes
 * leave out is far less than a wrong key, and more than the rounding of float32; that
 * of 16-bit activations may hide the codes of int8. */
static void caches_of_8_bits_keep_the_logits(void **state)
{
    (void)state;
    static const char *const MODELS[] = {
        "tests/golden/llama-gqa64-tied", "tests/golden/llama-mha24", "tests/golden/gpt2-scaled",
        "tests/golden/gemma2",           "tests/golden/gpt-oss",     "tests/golden/qwen2-tied"};
    for (size_t i = 0; i < ARRAY_LEN(MODELS); i++) {
        double as_stored = error_as(MODELS[i], -1, false);
        cache_type = DTYPE_F8;
        double fp8 = error_as(MODELS[i], -1, false);
        cache_type = DTYPE_I8;
        double int8 = error_as(MODELS[i], -1, false);
        cache_type = DTYPE_F32;
        print_message("%s: %.3g, fp8 %.3g, int8 %.3g\n", MODELS[i], as_stored, fp8, int8);
        assert_true(as_stored < 1e-4 ? as_stored < int8 : as_stored < 1.25 * int8);
        assert_true(int8 < fp8 && fp8 < 0.25);
    }
}

static void dummy_weights_give_numbers(void **state)
{
    (void)state;
    double error = error_as("tests/golden/llama-gqa64-tied", DTYPE_BF16, true);
    assert_true(isfinite(error) && error > 0.1);
    error = error_as("tests/golden/gpt2", DTYPE_F32, true);
    assert_true(isfinite(error) && error > 0.1);
}

/* A prompt that is being continued. */
struct text {
    struct piece next; /* its tokens in the next step */
    int32_t token;     /* the last one sampled */
    int32_t n, n_want; /* tokens sampled and wanted */
    const int32_t *want;
    const float *gap, *logprob; /* logprob NULL: not known */
    bool diverged;              /* at a tie */
};

static bool live(const struct text *t)
{
    return t->n < t->n_want;
}

/* What is held against texts. */
struct rule {
    double tie;      /* nats */
    int32_t n_slips; /* tokens that may differ where there is no tie */
    double logprob;  /* nats by which a log-probability may differ */
};

/* Append the reference's next token; fail unless it was sampled or the reference's two
 * best are closer than a tie, or that was allowed for. Behind a token that differs a
 * text goes on as the reference's, so that all of it is compared. */
static void take(struct text *t, int i, int32_t token, float logprob, struct rule *rule)
{
    if (token != t->want[t->n]) {
        if (t->gap[t->n] >= rule->tie && --rule->n_slips < 0) {
            fail_msg("prompt %d, token %d: %d instead of %d, which is ahead by %g nats", i, t->n,
                     token, t->want[t->n], t->gap[t->n]);
        }
        t->diverged = true;
    } else if (t->logprob && fabs((double)logprob - t->logprob[t->n]) > rule->logprob) {
        fail_msg("prompt %d, token %d: log-probability %g instead of %g", i, t->n, logprob,
                 t->logprob[t->n]);
    }
    t->token = t->want[t->n];
    t->n++;
    t->next = (struct piece){
        .token = &t->token, .row = t->next.row, .first = t->next.first + t->next.n, .n = 1};
}

/* One step of the texts numbered in `which`. */
static void step_texts(struct rig *r, struct text *text, const int *which, int n, struct rule *rule)
{
    static struct work w;
    struct err e = {0};
    struct results results;
    struct piece piece[N_ROWS];

    for (int k = 0; k < n; k++) {
        piece[k] = text[which[k]].next;
    }
    pack(r, &w, piece, n, false);
    OK(r->backend->ops->step_begin(r->backend, &w.b, &e), e);
    model_step(r->model, &w.b);
    OK(r->backend->ops->step_end(r->backend, &e), e);
    OK(r->backend->ops->step_wait(r->backend, &results, &e), e);
    for (int k = 0; k < n; k++) {
        take(&text[which[k]], which[k], results.token[k], results.logprob[k], rule);
    }
}

/* Greedy continuations of all prompts, each prefilled alone, then decoded together;
 * counts those that diverged at a tie. */
static int compare_greedy(struct rig *r, int *ret_n, struct rule rule)
{
    struct text text[N_ROWS] = {0};
    int n = 0, which[N_ROWS], n_live, n_diverged = 0;

    for (; n < N_ROWS && expected(r, "prompt", n); n++) {
        const struct tensor *prompt = expected(r, "prompt", n), *want = expected(r, "greedy", n);
        const struct tensor *logprob = expected(r, "logprob", n);
        text[n] =
            (struct text){.next = {.token = prompt->data, .row = n, .n = (int32_t)prompt->dim[0]},
                          .n_want = (int32_t)want->dim[0],
                          .want = want->data,
                          .gap = expected(r, "gap", n)->data,
                          .logprob = logprob ? logprob->data : NULL};
        if (live(&text[n])) {
            step_texts(r, text, &n, 1, &rule);
        }
    }
    do {
        n_live = 0;
        for (int i = 0; i < n; i++) {
            if (live(&text[i])) {
                which[n_live++] = i;
            }
        }
        if (n_live > 0) {
            step_texts(r, text, which, n_live, &rule);
        }
    } while (n_live > 0);
    for (int i = 0; i < n; i++) {
        n_diverged += text[i].diverged;
    }
    *ret_n = n;
    return n_diverged;
}

/* Whether weights are multiplied as quantised, with activations that are rounded. */
static bool multiplies_codes(const struct rig *r)
{
    int32_t n = 0;

    for (int32_t f = FORMAT_I32 + 1; f < WEIGHT_FORMATS; f++) {
        n += r->model->weights->n_stored[f];
    }
    return n > 0;
}

/* Nats that inputs of 16 bits move log-probabilities of a real model by. */
#define TIE_OF_ROUNDED 0.05

/* Texts may diverge where the reference's two best tokens are closer than this. Where
 * activations are rounded it is the difference of two logits that both have the largest
 * error allowed. */
static double tie_nats(const struct rig *r)
{
    double stated = r->config.dtype == DTYPE_F32 ? 1e-4 : 0.02;
    bool rounds = rounds_inputs(r) || multiplies_codes(r);

    if (!rounds || !expected(r, "error", 0)) {
        return rounds_inputs(r) ? MAX(stated, TIE_OF_ROUNDED) : stated;
    }
    /* of codes the golden's error is that of the rounding itself: four deviations */
    double most = multiplies_codes(r) ? 4 : 2;
    return MAX(stated, most * M_SQRT2 * own_error(r, 0, N_PROMPTS));
}

/* With activations of 16 bits an expert more or less, or a state that carries errors
 * along, may change a token that leads by far: twice as often as with transformers, and
 * twice more. */
static struct rule rule_of(const struct rig *r)
{
    const struct tensor *slips = checkpoint_find(r->expected, "slips");
    int32_t allowed = slips && rounds_inputs(r) ? 2 * *(const int32_t *)slips->data + 2 : 0;

    return (struct rule){.tie = tie_nats(r),
                         .n_slips = allowed,
                         .logprob = rounds_inputs(r) ? TIE_OF_ROUNDED : 0.01};
}

static void greedy_text_is_that_of_transformers(void **state)
{
    struct rig r;
    char golden[300];

    rig_open_case(&r, *state, golden);
    int n;
    compare_greedy(&r, &n, rule_of(&r));
    assert_int_equal(n, N_PROMPTS);
    rig_close(&r);
}

/* On a backend whose experts have gates, those without one have their weights twice. */
static void experts_without_a_gate_are_computed_with_one(void **state)
{
    char at[] = "tests/golden/nemotron-h-latent";
    void *dir = at;

    (void)state;
    gates_needed = true;
    logits_are_those_of_transformers(&dir);
    gates_needed = false;
}

/* The file of a model that is tied by its configuration alone has a head, too. */
static void a_head_of_its_own_is_not_the_embedding(void **state)
{
    char at[] = "tests/golden/llama-mha24";
    void *dir = at;

    (void)state;
    says_tied = true;
    logits_are_those_of_transformers(&dir);
    says_tied = false;
}

/* QUIRE_TEST_SMOLLM2, or the directory of scripts/fetch-model; NULL: neither exists. */
static const char *smollm2_dir(void)
{
    const char *dir = getenv("QUIRE_TEST_SMOLLM2");

    if (!dir) {
        dir = "models/cache/smollm2";
    }
    return access(dir, R_OK) == 0 ? dir : NULL;
}

static void smollm2_continues_as_with_transformers(void **state)
{
    (void)state;
    const char *dir = smollm2_dir();
    if (!dir) {
        print_message(
            "skipped: no SmolLM2 here: scripts/fetch-model smollm2, or set QUIRE_TEST_SMOLLM2\n");
        skip();
    }
    struct rig r;
    rig_open(&r, dir, "tests/golden/smollm2", 192);
    int n, n_diverged = compare_greedy(&r, &n, rule_of(&r));
    print_message("%d of %d texts diverge from the reference at a tie\n", n_diverged, n);
    assert_in_range(n, 10, 1000);
    /* two in a hundred may diverge; of ten texts at most one, of rounded inputs half */
    assert_in_range(n_diverged, 0, rounds_inputs(&r) ? n / 2 : n / 10);
    rig_close(&r);
}

enum { MAX_CASES = 192 };

struct test_list {
    const struct CMUnitTest *tests;
    size_t n, n_of_models; /* those of models, two of each, come first */
};

/* Of the models, those that the instruction set takes, and all other tests. */
static int run_taken(const void *arg)
{
    const struct test_list *all = arg;
    static struct CMUnitTest taken[4 * MAX_CASES + 6];
    size_t n = 0;

    for (size_t i = 0; i < all->n; i++) {
        if (i >= all->n_of_models || whole_takes(i / 2, all->n_of_models / 2)) {
            taken[n++] = all->tests[i];
        }
    }
    return _cmocka_run_group_tests("models", taken, n, NULL, NULL);
}

/* Texts and logits depend on the instruction set: on a CPU the tests run once for each
 * set that the machine has. */
static int on_each_isa(const struct test_list *all)
{
    if (getenv("QUIRE_TEST_BACKEND") || getenv("QUIRE_CPU_ISA")) {
        return run_taken(all);
    }
    /* not what timing finds: that of floats has the products of CPU_AVX512 */
    setenv("QUIRE_CPU_BF16", "pairs", 0);
    return whole_on_each_isa(run_taken, all);
}

/* The models of tests/golden that have an `expected`: directories with a config.json
 * and GGUF files. How many; -1: more than MAX_CASES directories. */
static int find_models(char (*ret)[300 + sizeof(GGUF_FILE)])
{
    static const char *const HERE[] = {"/config.json", "/" GGUF_FILE};
    DIR *golden = opendir("tests/golden");
    int n = 0, n_dirs = 0;

    for (struct dirent *d; golden && (d = readdir(golden)) && n_dirs <= MAX_CASES;) {
        char dir[256], path[600];
        snprintf(dir, sizeof(dir), "tests/golden/%.200s", d->d_name);
        snprintf(path, sizeof(path), "%s/expected", dir);
        if (access(path, R_OK) < 0) {
            continue;
        }
        for (size_t i = 0; i < ARRAY_LEN(HERE) && n_dirs < MAX_CASES; i++) {
            snprintf(path, sizeof(path), "%s%s", dir, HERE[i]);
            if (access(path, R_OK) == 0) {
                snprintf(ret[n++], sizeof(ret[0]), "%.255s%s", dir, i > 0 ? HERE[i] : "");
            }
        }
        n_dirs++;
    }
    if (golden) {
        closedir(golden);
    }
    return n_dirs > MAX_CASES ? -1 : n;
}

int main(void)
{
    static char model[2 * MAX_CASES][300 + sizeof(GGUF_FILE)], name[4 * MAX_CASES][400];
    static struct CMUnitTest tests[4 * MAX_CASES + 6];
    int n_models = find_models(model), n = 0;

    if (n_models <= 0) {
        fprintf(stderr, "%s\n",
                n_models == 0 ? "no goldens: run from the repository's root"
                              : "more goldens than MAX_CASES");
        return 1;
    }
    for (int i = 0; i < n_models; i++) {
        snprintf(name[n], sizeof(name[0]), "logits_are_those_of_transformers: %.300s", model[i]);
        tests[n] = (struct CMUnitTest){.name = name[n],
                                       .test_func = logits_are_those_of_transformers,
                                       .initial_state = model[i]};
        n++;
        snprintf(name[n], sizeof(name[0]), "greedy_text_is_that_of_transformers: %.300s", model[i]);
        tests[n] = (struct CMUnitTest){.name = name[n],
                                       .test_func = greedy_text_is_that_of_transformers,
                                       .initial_state = model[i]};
        n++;
    }
    struct test_list all = {.tests = tests, .n_of_models = (size_t)n};
    tests[n++] = (struct CMUnitTest)cmocka_unit_test(weights_are_converted_to_the_type_asked_for);
    tests[n++] = (struct CMUnitTest)cmocka_unit_test(caches_of_8_bits_keep_the_logits);
    tests[n++] = (struct CMUnitTest)cmocka_unit_test(experts_without_a_gate_are_computed_with_one);
    tests[n++] = (struct CMUnitTest)cmocka_unit_test(a_head_of_its_own_is_not_the_embedding);
    tests[n++] = (struct CMUnitTest)cmocka_unit_test(dummy_weights_give_numbers);
    tests[n++] = (struct CMUnitTest)cmocka_unit_test(smollm2_continues_as_with_transformers);
    all.n = (size_t)n;
    return on_each_isa(&all);
}
