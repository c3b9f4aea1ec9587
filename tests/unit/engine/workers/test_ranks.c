/* Tests real ranks, run by this test's own executable: every model family gives the
 * same results as on one rank, and every failure of a rank is reported and leaves no
 * process. */
#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "config/settings/settings.h"
#include "engine/commands.h"
#include "engine/engine.h"
#include "engine/workers/ranks/control_msg.h"
#include "engine/workers/ranks/worker_process.h"
#include "engine/workers/runner.h"

enum { N_SEQS = 3, N_STEPS = 16, MAX_PROMPT = 14, BLOCK = 4, WIDTH = 8, PATIENCE_S = 120 };

/* ---- an executor of n ranks ---- */

struct rig {
    struct settings s;
    struct model_config c;
    struct executor *x;
};

/* How a model is divided: ranks a layer, whole experts to each of them, and pipeline
 * stages. */
struct division {
    int32_t ranks, stages;
    bool by_expert;
};

/* 0, or the error; `extra`: one more flag, or NULL. */
static int open_divided(struct rig *r, const char *dir, struct division n, const char *extra,
                        struct err *e)
{
    char ranks[40], stages[40];

    snprintf(ranks, sizeof(ranks), "--tensor-parallel-size=%d", n.ranks);
    snprintf(stages, sizeof(stages), "--pipeline-parallel-size=%d", n.stages);
    char *argv[] = {ranks,
                    stages,
                    "--device=cpu",
                    "--dtype=float32",
                    "--threads=2",
                    "--kv-blocks=192",
                    "--max-num-seqs=4",
                    "--block-size=4",
                    "--max-num-batched-tokens=64",
                    "--config=none",
                    (char *)(n.by_expert ? "--expert-parallel" : "--seed=1"),
                    (char *)(extra ? extra : "--seed=1")};
    char *env[] = {NULL};
    bool help;
    struct generation_defaults unused;
    *r = (struct rig){0};
    int rc = settings_load(&r->s, ARRAY_LEN(argv), argv, env, &help, e);
    if (rc == 0) {
        rc = model_config_read(&r->c, &unused, dir, e);
    }
    if (rc == 0) {
        rc = n.ranks * n.stages > 1 ? ranks_open(&r->x, NULL, &r->s, dir, &r->c, NULL, e)
                                    : runner_open(&r->x, &r->s, dir, &r->c, e);
    }
    return rc;
}

static int open_rig(struct rig *r, const char *dir, int32_t n, const char *extra, struct err *e)
{
    return open_divided(r, dir, (struct division){n, 1, false}, extra, e);
}

static void close_rig(struct rig *r)
{
    if (r->x) {
        r->x->free(r->x);
    }
    settings_release(&r->s);
}

/* ---- child processes ---- */

/* A child of this process; 0: there is none. */
static pid_t a_child(void)
{
    DIR *proc = opendir("/proc");
    struct dirent *d;
    pid_t found = 0;

    assert_non_null(proc);
    while (!found && (d = readdir(proc))) {
        char path[300], state;
        int pid = atoi(d->d_name), parent = 0;
        snprintf(path, sizeof(path), "/proc/%s/stat", d->d_name);
        FILE *f = pid > 0 ? fopen(path, "r") : NULL;
        if (f && fscanf(f, "%*d (%*[^)]) %c %d", &state, &parent) == 2 && parent == getpid()) {
            found = pid;
        }
        if (f) {
            fclose(f);
        }
    }
    closedir(proc);
    return found;
}

static void no_child_is_left(void)
{
    assert_int_equal(a_child(), 0);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

static void sleep_briefly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
}

/* ---- steps ---- */

/* Three prompts at once, then token by token; each step is launched before the previous
 * one is waited for. */
struct step {
    struct batch b;
    int32_t token[64], src[64], position[64], slot[64], group_slot[64 * LIMIT_KV_GROUPS],
        q_start[N_SEQS + 1], kv_len[N_SEQS], row[N_SEQS], lcp[N_SEQS];
    int32_t logits[N_SEQS], table[LIMIT_KV_GROUPS * N_SEQS * WIDTH];
    struct table_update update[LIMIT_KV_GROUPS * N_SEQS];
    struct sample_row sample[N_SEQS];
};

/* The block of a sequence in a KV group at an index of its table. */
static int32_t block_of(int32_t group, int32_t seq, int32_t index)
{
    return (group * WIDTH + index) * N_SEQS + seq;
}

/* A table of as many blocks as a sequence comes to need, at most WIDTH. */
static void pack_group(struct step *s, int32_t group, int32_t seq, int32_t block_size)
{
    struct batch *b = &s->b;
    int32_t n = (int32_t)div_ceil(MAX_PROMPT + N_STEPS, block_size);

    s->update[b->n_table_update++] = (struct table_update){
        .group = group, .row = s->row[seq], .count = n, .first = b->n_table_block};
    for (int32_t k = 0; k < n; k++) {
        s->table[b->n_table_block++] = block_of(group, seq, k);
    }
}

static void pack(struct step *s, int32_t number, const struct executor_info *x)
{
    struct batch *b = &s->b;
    int32_t n_groups = x->n_kv_groups, vocab = x->vocab, size = x->block_size;

    *b = (struct batch){
        .step = (uint64_t)number + 1, .n_seqs = N_SEQS, .n_logits = N_SEQS, .n_samples = N_SEQS};
    for (int32_t i = 0; i < N_SEQS; i++) {
        int32_t n_prompt = MAX_PROMPT - 4 * i, n = number == 0 ? n_prompt : 1;
        int32_t first = number == 0 ? 0 : n_prompt + number - 1;
        s->q_start[i] = b->n_tokens;
        s->kv_len[i] = first + n;
        s->row[i] = N_SEQS - 1 - i;
        s->lcp[i] = 0;
        for (int32_t g = 0; g < n_groups && number == 0; g++) {
            pack_group(s, g, i, size);
        }
        for (int32_t k = 0; k < n; k++, b->n_tokens++) {
            int32_t at = first + k;
            s->token[b->n_tokens] = (i * 31 + at * 7 + 3) % vocab;
            s->src[b->n_tokens] = number == 0 ? -1 : i;
            s->position[b->n_tokens] = at;
            s->slot[b->n_tokens] = block_of(0, i, at / size) * size + at % size;
            for (int32_t g = 1; g < n_groups; g++) {
                s->group_slot[b->n_group_slots++] = block_of(g, i, at / size) * size + at % size;
            }
        }
        s->logits[i] = b->n_tokens - 1;
        s->sample[i] = (struct sample_row){.logits_row = i,
                                           .top_p = 1,
                                           .repetition_penalty = 1,
                                           .n_logprobs = 2,
                                           .position = first + n,
                                           .mask_first = -1};
    }
    s->q_start[N_SEQS] = b->n_tokens;
    b->n_decode = number == 0 ? 0 : N_SEQS;
    b->token = s->token, b->token_src = s->src, b->position = s->position, b->slot = s->slot;
    b->group_slot = s->group_slot;
    b->q_start = s->q_start, b->kv_len = s->kv_len, b->row = s->row, b->lcp_blocks = s->lcp;
    b->logits_token = s->logits, b->sample = s->sample, b->table_update = s->update,
    b->table_block = s->table;
}

struct answers {
    int32_t token[N_STEPS][N_SEQS];
    /* gap: between the two best log-probabilities */
    float logprob[N_STEPS][N_SEQS], gap[N_STEPS][N_SEQS];
};

/* Whether the late mask of a step has the bit. */
static bool allowed(int32_t number, int32_t i, int32_t token)
{
    return (uint32_t)(number * 31 + i * 7 + token) * 2654435761u >> 31 || i == 0;
}

static int collect(struct executor *x, struct answers *ret, int32_t number, struct err *e)
{
    struct results r;
    int rc = x->wait(x, &r, e);

    for (int32_t i = 0; rc == 0 && i < N_SEQS; i++) {
        const float *top = r.top_logprob + i * r.top_stride;
        assert_true(number % 2 == 0 || allowed(number, i, r.token[i]));
        ret->token[number][i] = r.token[i];
        ret->logprob[number][i] = r.logprob[i];
        ret->gap[number][i] = top[0] - top[1];
    }
    return rc;
}

/* ---- late masks ---- */

/* Every second step has late masks, that of the first text none of the words. */
static void bind(struct step *s, int32_t number)
{
    for (int32_t i = 0; i < N_SEQS && number % 2 == 1; i++) {
        s->sample[i].late_mask = N_SEQS - i;
    }
    s->b.n_late_mask = number % 2 == 1 ? N_SEQS : 0;
}

static int bring_masks(struct executor *x, int32_t number, struct err *e)
{
    enum { MOST = 1 << 12 };
    static uint32_t word[N_SEQS][MOST];
    struct late_mask mask[N_SEQS] = {{NULL}};

    if (number % 2 == 0) {
        return 0;
    }
    assert_true(mask_words(x->info.vocab) <= MOST);
    memset(word, 0, sizeof(word));
    for (int32_t i = 1; i < N_SEQS; i++) {
        for (int32_t t = 0; t < x->info.vocab; t++) {
            word[i][t / 32] |= (uint32_t)allowed(number, i, t) << t % 32;
        }
        mask[N_SEQS - 1 - i].word = word[i];
    }
    return x->masks(x, (uint64_t)number + 1, mask, N_SEQS, e);
}

static int generate(struct executor *x, struct answers *ret, struct err *e)
{
    static struct step s;
    int rc = 0;

    for (int32_t i = 0; i < N_STEPS && rc == 0; i++) {
        pack(&s, i, &x->info);
        bind(&s, i);
        rc = x->launch(x, &s.b, e);
        if (rc == 0 && i > 0) {
            rc = collect(x, ret, i - 1, e);
        }
        if (rc == 0) {
            rc = bring_masks(x, i, e);
        }
    }
    return rc < 0 ? rc : collect(x, ret, N_STEPS - 1, e);
}

/* Tokens must be equal up to the first near-tie. */
static void compare(const struct answers *one, const struct answers *many, const char *dir,
                    struct division n)
{
    for (int32_t i = 0; i < N_SEQS; i++) {
        for (int32_t k = 0; k < N_STEPS; k++) {
            if (one->token[k][i] != many->token[k][i]) {
                if (one->gap[k][i] < 1e-4f) {
                    break;
                }
                fail_msg("%s on %d ranks, %d stages: token %d of text %d is %d, not %d, which is "
                         "ahead by %g nats",
                         dir, n.ranks, n.stages, k, i, many->token[k][i], one->token[k][i],
                         one->gap[k][i]);
            }
            if (fabsf(one->logprob[k][i] - many->logprob[k][i]) > 1e-3f) {
                fail_msg(
                    "%s on %d ranks, %d stages: token %d of text %d has log-probability %g, not %g",
                    dir, n.ranks, n.stages, k, i, many->logprob[k][i], one->logprob[k][i]);
            }
        }
    }
}

/* Whether the model can be divided so; if not, it must be refused with the numbers. */
static bool compare_divided(const struct answers *alone, const struct model_config *c,
                            const char *dir, struct division n)
{
    struct rig many;
    struct err e = {0};
    struct answers together;
    int rc = open_divided(&many, dir, n, NULL, &e);
    bool possible = model_check_ranks(c, n.ranks, n.by_expert, NULL) == 0 &&
                    model_check_stages(c, n.stages, NULL) == 0;

    if (!possible) {
        char ranks[64], layers[64];
        snprintf(ranks, sizeof(ranks), "tensor_parallel_size %d", n.ranks);
        snprintf(layers, sizeof(layers), "%d is more than the %d layers", n.stages, c->n_layers);
        if ((rc != ERR_INVALID && rc != ERR_UNSUPPORTED) ||
            !(strstr(e.text, ranks) || strstr(e.text, layers) ||
              strstr(e.text, "read the keys and values of layer"))) {
            fail_msg("%s on %d ranks, %d stages: %d, %s", dir, n.ranks, n.stages, rc, e.text);
        }
    } else {
        if (rc < 0 || generate(many.x, &together, &e) < 0) {
            fail_msg("%s on %d ranks, %d stages: %s", dir, n.ranks, n.stages, e.text);
        }
        assert_int_equal(many.x->info.n_ranks, n.ranks * n.stages);
        /* half of the two threads that all may use */
        assert_non_null(strstr(many.x->info.device, "cpu: 1 thread,"));
        compare(alone, &together, dir, n);
    }
    close_rig(&many);
    return possible;
}

/* Compares a model, a directory or a GGUF file, under n divisions; ret_possible [n]:
 * which were. */
static void compare_model(const char *dir, const struct division *d, size_t n, bool *ret_possible)
{
    struct rig one;
    struct err e = {0};
    struct answers alone;

    if (open_rig(&one, dir, 1, NULL, &e) < 0 || generate(one.x, &alone, &e) < 0) {
        fail_msg("%s: %s", dir, e.text);
    }
    for (size_t i = 0; i < n; i++) {
        bool asked = !d[i].by_expert || one.c.experts.n > 0;
        ret_possible[i] = asked && compare_divided(&alone, &one.c, dir, d[i]);
        if (!asked) {
            ret_possible[i] = true;
        }
    }
    close_rig(&one);
}

/* Goldens that cannot be divided in two: of an odd number of heads, of layers that read
 * what the first ones made, of an odd number of experts. */
static const struct {
    const char *name;
    bool ranks, stages, experts;
} INDIVISIBLE[] = {
    {"ernie45-moe", .experts = true},
    {"falcon", .ranks = true},
    {"gemma4-inputs", .stages = true},
    {"gpt-neox", .ranks = true},
    {"gpt2", .ranks = true},
    {"llama-dynamic", .ranks = true},
    {"llama-fp16-llama3", .ranks = true},
    {"llama-longrope", .ranks = true},
    {"llama-longrope-short", .ranks = true},
    {"llama-mqa80-linear", .ranks = true},
    {"llama-yarn", .ranks = true},
    {"qwen35-moe", .experts = true},
    {"qwen35-moe-wrapped", .experts = true},
    {NULL},
};

/* How many of n divisions are possible or refused against expectation. */
static int count_surprises(const char *path, const struct division *d, const bool *possible,
                           const bool *refused, size_t n)
{
    int count = 0;

    for (size_t i = 0; i < n; i++) {
        if (possible[i] == refused[i]) {
            print_error("%s on %d ranks, %d stages%s is %s\n", path, d[i].ranks, d[i].stages,
                        d[i].by_expert ? ", by experts" : "", possible[i] ? "possible" : "refused");
            count++;
        }
    }
    return count;
}

/* Compares a golden, and its GGUF file, in two ranks, two stages, and two ranks of
 * whole experts. Returns how many divisions are possible or refused against
 * expectation. */
static int compare_golden(const char *name)
{
    static const struct division halves[] = {{2, 1, false}, {1, 2, false}, {2, 1, true}};
    bool possible[ARRAY_LEN(halves)], refused[ARRAY_LEN(halves)] = {false};
    char path[300];
    int n = 0;

    for (size_t i = 0; INDIVISIBLE[i].name; i++) {
        if (strcmp(INDIVISIBLE[i].name, name) == 0) {
            refused[0] = INDIVISIBLE[i].ranks;
            refused[1] = INDIVISIBLE[i].stages;
            refused[2] = INDIVISIBLE[i].experts;
        }
    }
    for (int file = 0; file < 2; file++) {
        snprintf(path, sizeof(path), "tests/golden/%s%s", name, file ? "/model.gguf" : "");
        if (access(path, R_OK) == 0) {
            compare_model(path, halves, ARRAY_LEN(halves), possible);
            n += count_surprises(path, halves, possible, refused, ARRAY_LEN(halves));
        }
    }
    return n;
}

/* Those of quantised checkpoints have a test of their own. */
static int is_golden(const struct dirent *d)
{
    char path[300];

    snprintf(path, sizeof(path), "tests/golden/%s/config.json", d->d_name);
    return d->d_name[0] != '.' && strncmp(d->d_name, "quant-", 6) != 0 && access(path, R_OK) == 0;
}

static void every_golden_in_halves_answers_as_on_one_rank(void **state)
{
    struct dirent **golden;
    int n = scandir("tests/golden", &golden, is_golden, alphasort), surprises = 0;

    (void)state;
    assert_true(n >= 90);
    for (int i = 0; i < n; i++) {
        surprises += compare_golden(golden[i]->d_name);
        free(golden[i]);
    }
    free(golden);
    assert_int_equal(surprises, 0);
    no_child_is_left();
}

/* Models of several shapes, in parts of other numbers. That of stages/ has inputs of
 * layers and shared caches behind the middle; its weights are random, and no other
 * program's answers are there. */
static void families_in_several_parts_answer_as_on_one_rank(void **state)
{
    static const struct division parts[] = {
        {3, 1, false}, {4, 1, false}, {1, 3, false}, {2, 2, false}};
    static const char *const models[] = {"gemma2",
                                         "gpt2",
                                         "llama-gqa56-llama3-bias",
                                         "llama-gqa64-tied",
                                         "llama-mha24",
                                         "llama-mqa80-linear",
                                         "opt",
                                         "opt-postnorm",
                                         "phi3-longrope",
                                         "qwen2-tied",
                                         "starcoder2-window",
                                         "deepseek-v3",
                                         "qwen3-moe",
                                         "gpt-oss",
                                         "qwen35-moe-wrapped",
                                         "falcon-h1",
                                         "nemotron-h-latent",
                                         "granite-hybrid",
                                         "gemma4",
                                         "gemma4-moe",
                                         "hunyuan-moe",
                                         "lfm2-moe",
                                         "olmo2",
                                         "minimax-m2",
                                         "gpt-neox-behind",
                                         "falcon-norms",
                                         "jamba",
                                         "stages/gemma4-shared"};
    int compared = 0;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(models); i++) {
        bool possible[ARRAY_LEN(parts)];
        char dir[64];
        snprintf(dir, sizeof(dir), "tests/golden/%s", models[i]);
        compare_model(dir, parts, ARRAY_LEN(parts), possible);
        for (size_t k = 0; k < ARRAY_LEN(parts); k++) {
            compared += possible[k];
        }
    }
    assert_true(compared >= 40);
    no_child_is_left();
}

static void experts_that_cannot_be_divided_are_refused(void **state)
{
    static const struct {
        const char *dir, *why;
    } cases[] = {
        {"tests/golden/gpt-oss", "expert_parallel: tensor_parallel_size 4 does not divide the 6"},
        {"tests/golden/gpt2", "expert_parallel: GPT2LMHeadModel has no experts"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct err e = {0};
        struct rig r;
        assert_int_equal(open_rig(&r, cases[i].dir, 4, "--expert-parallel", &e), ERR_INVALID);
        assert_non_null(strstr(e.text, cases[i].why));
        assert_string_equal(e.param, "expert_parallel");
        close_rig(&r);
    }
    no_child_is_left();
}

static void experts_whose_slices_are_refused_are_held_whole(void **state)
{
    static const char dir[] = "tests/golden/quant-mxfp4-experts";
    struct err e = {0};
    struct rig r;

    (void)state;
    if (open_rig(&r, dir, 2, NULL, &e) < 0) {
        fail_msg("%s", e.text);
    }
    close_rig(&r);
    assert_int_equal(open_rig(&r, dir, 2, "--no-expert-parallel", &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "tensor_parallel_size 2 cuts the groups of 32 values"));
    close_rig(&r);
    no_child_is_left();
}

/* ---- failures ---- */

#define MODEL "tests/golden/qwen2-tied"

static void a_rank_killed_while_idle_is_reported(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    static struct step s;
    if (open_rig(&r, MODEL, 2, NULL, &e) < 0) {
        fail_msg("%s", e.text);
    }
    assert_int_equal(r.x->check(r.x, &e), 0);
    assert_int_equal(kill(a_child(), SIGKILL), 0);
    int64_t until_us = clock_us() + PATIENCE_S * INT64_C(1000000);
    while (r.x->check(r.x, &e) == 0 && clock_us() < until_us) {
        sleep_briefly();
    }
    assert_int_equal(r.x->check(r.x, &e), ERR_DEVICE);
    assert_non_null(strstr(e.text, "rank 1 (process "));
    assert_non_null(strstr(e.text, "was ended by signal 9"));
    pack(&s, 0, &r.x->info);
    assert_int_equal(r.x->launch(r.x, &s.b, &e), ERR_DEVICE);
    close_rig(&r);
    no_child_is_left();
}

/* Kills a child inside a step: the step fails with the reason, and no process is
 * left. */
static void kill_in_a_step(struct rig *r)
{
    struct err e = {0};
    struct answers unused;
    pid_t victim = a_child();

    assert_int_equal(kill(victim, SIGSTOP), 0); /* so that it dies inside the step */
    static struct step s;
    pack(&s, 0, &r->x->info);
    assert_int_equal(r->x->launch(r->x, &s.b, &e), 0);
    assert_int_equal(kill(victim, SIGKILL), 0);
    assert_int_equal(collect(r->x, &unused, 0, &e), ERR_DEVICE);
    assert_non_null(strstr(e.text, "was ended by signal 9"));
    close_rig(r);
    no_child_is_left();
}

static void a_rank_killed_in_a_step_ends_it_with_the_reason(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    if (open_rig(&r, MODEL, 4, NULL, &e) < 0) {
        fail_msg("%s", e.text);
    }
    kill_in_a_step(&r);
}

/* A stage dies while others wait for it. */
static void a_stage_killed_in_a_step_ends_it_with_the_reason(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    if (open_divided(&r, "tests/golden/gemma2", (struct division){2, 2, false}, NULL, &e) < 0) {
        fail_msg("%s", e.text);
    }
    kill_in_a_step(&r);
}

static void a_rank_that_hangs_is_named_after_the_timeout(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    struct answers unused;
    if (open_rig(&r, MODEL, 2, "--step-timeout=500ms", &e) < 0) {
        fail_msg("%s", e.text);
    }
    assert_int_equal(kill(a_child(), SIGSTOP), 0);
    assert_int_equal(generate(r.x, &unused, &e), ERR_DEVICE);
    assert_non_null(strstr(e.text, "rank 1 did not answer"));
    close_rig(&r); /* also with a stopped process */
    no_child_is_left();
}

static void *sleep_on(void *unused)
{
    while (!unused) {
        pause();
    }
    return NULL;
}

/* A process whose first thread has exited with status 7 while another is left: waitpid
 * does not report it yet. */
static pid_t spawn_ending(void)
{
    pthread_t left;
    pid_t pid = fork();

    if (pid == 0) {
        pthread_create(&left, NULL, sleep_on, NULL);
        syscall(SYS_exit, 7);
    }
    return pid;
}

static void the_status_of_a_process_that_is_still_ending_is_known(void **state)
{
    (void)state;
    int status = 0;
    pid_t pid = spawn_ending(), same = pid;
    assert_true(pid > 0);
    assert_true(worker_ended(&pid, PATIENCE_S * 1000, &status));
    assert_int_equal(pid, same);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    assert_false(worker_reap(&pid, 0, &status));
    assert_int_equal(kill(same, SIGKILL), 0);
    assert_true(worker_reap(&pid, PATIENCE_S * 1000, &status));
    assert_int_equal(pid, 0);
}

static void a_process_that_runs_has_not_ended(void **state)
{
    (void)state;
    int status = 0;
    pid_t pid = fork(), same = pid;
    if (pid == 0) {
        sleep_on(NULL);
    }
    assert_true(pid > 0);
    assert_false(worker_ended(&pid, 20, &status));
    assert_int_equal(kill(same, SIGKILL), 0);
    assert_true(worker_ended(&pid, PATIENCE_S * 1000, &status));
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_true(worker_reap(&pid, PATIENCE_S * 1000, &status));
}

/* The ranks behave as fake_rank defines. */
static void start_fails(const char *behaviour, const char *why)
{
    struct rig r;
    struct err e = {0};

    setenv("QUIRE_TEST_RANK", behaviour, 1);
    int rc = open_rig(&r, MODEL, 2, NULL, &e);
    unsetenv("QUIRE_TEST_RANK");
    assert_true(rc < 0);
    if (!strstr(e.text, why)) {
        fail_msg("\"%s\" does not say \"%s\"", e.text, why);
    }
    close_rig(&r);
    no_child_is_left();
}

static void a_rank_that_does_not_fit_ends_the_start(void **state)
{
    (void)state;
    start_fails("version", "rank 1 is quire 0.0.1, rank 0 is " QUIRE_VERSION);
    start_fails("model", "rank 1 has another model than rank 0");
    start_fails("fails", "rank 1: its disk is on fire");
    start_fails("dies", "ended with status 3");
    start_fails("crashes", "was ended by signal 6");
    start_fails("babbles", "rank 1: not a rank's control message");
}

static void impossible_settings_are_refused(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* hide any GPU */
    assert_true(open_rig(&r, MODEL, 2, "--device=cuda", &e) < 0);
    assert_string_equal(e.param, "device");
    assert_non_null(strstr(e.text, "device cuda: "));
    close_rig(&r);
    assert_int_equal(open_divided(&r, MODEL, (struct division){1, 5, false}, NULL, &e),
                     ERR_INVALID);
    assert_string_equal(e.param, "pipeline_parallel_size");
    assert_non_null(strstr(e.text, "pipeline_parallel_size 5 is more than the "));
    close_rig(&r);
    no_child_is_left();
}

/* ---- this executable as a rank ---- */

static int fake_rank(const char *behaviour, int argc, char **argv)
{
    struct worker_args o;
    struct err e;
    struct control_msg msg = {
        .kind = CONTROL_HELLO, .rank = 1, .hello = {.version = QUIRE_VERSION}};

    if (worker_args_parse(&o, argc, argv, &e) < 0) {
        return 2;
    }
    if (strcmp(behaviour, "dies") == 0) {
        return 3;
    }
    if (strcmp(behaviour, "crashes") == 0) {
        signal(SIGABRT, SIG_DFL);
        abort();
    }
    if (strcmp(behaviour, "babbles") == 0) {
        for (size_t i = 0; i <= sizeof(msg) / 8; i++) {
            ssize_t n = write(o.control_fd, "gibberish", 9);
            (void)n;
        }
    } else {
        if (strcmp(behaviour, "version") == 0) {
            snprintf(msg.hello.version, sizeof(msg.hello.version), "0.0.1");
        }
        if (strcmp(behaviour, "fails") == 0) {
            msg.kind = CONTROL_FAILED;
            snprintf(msg.text, sizeof(msg.text), "its disk is on fire");
        }
        control_msg_send(o.control_fd, &msg, &e);
    }
    for (;;) { /* until rank 0 ends it */
        pause();
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "rank") == 0) {
        const char *behaviour = getenv("QUIRE_TEST_RANK");
        return behaviour ? fake_rank(behaviour, argc - 2, argv + 2)
                         : worker_main(argc - 2, argv + 2);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_golden_in_halves_answers_as_on_one_rank),
        cmocka_unit_test(families_in_several_parts_answer_as_on_one_rank),
        cmocka_unit_test(experts_that_cannot_be_divided_are_refused),
        cmocka_unit_test(experts_whose_slices_are_refused_are_held_whole),
        cmocka_unit_test(a_rank_killed_while_idle_is_reported),
        cmocka_unit_test(a_rank_killed_in_a_step_ends_it_with_the_reason),
        cmocka_unit_test(a_stage_killed_in_a_step_ends_it_with_the_reason),
        cmocka_unit_test(the_status_of_a_process_that_is_still_ending_is_known),
        cmocka_unit_test(a_process_that_runs_has_not_ended),
        cmocka_unit_test(a_rank_that_hangs_is_named_after_the_timeout),
        cmocka_unit_test(a_rank_that_does_not_fit_ends_the_start),
        cmocka_unit_test(impossible_settings_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
