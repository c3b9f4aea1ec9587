/* Trying a model whose files a test has changed: it must be refused with one line, or
 * load and compute. For inclusion by one test program, after cmocka.h.
 *
 * A try has limits of processor time, of time and of memory, so that a loop, a hang or
 * a huge allocation fails the test, which then names the change. */
#ifndef QUIRE_TESTS_UNIT_CHANGED_MODEL_H
#define QUIRE_TESTS_UNIT_CHANGED_MODEL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "config/base/buf.h"
#include "config/base/log.h"
#include "config/settings/settings.h"
#include "engine/workers/runner.h"
#include "models/tokenizer/tokenizer.h"
#include "tests/unit/whole.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CHANGED_LIMITS_MEMORY = 0, CHANGED_SLOW_S = 30, CHANGED_PATIENCE_S = 900 };
#else
enum { CHANGED_LIMITS_MEMORY = 1, CHANGED_SLOW_S = 5, CHANGED_PATIENCE_S = 600 };
#endif
#define CHANGED_ROOM ((rlim_t)768 << 20) /* beyond what the process had at the start */

static struct {
    char dir[64];             /* of the changed files, made by changed_begin */
    char what[512];           /* the change that is tried; for the message of a signal */
    struct settings settings; /* of a CPU with a small pool */
    int refused, served;      /* tries */
    int wrong;                /* refused, of them, but not as they should be */
    uint32_t every, turn;     /* of so many changes one is tried */
} changed;

/* On a signal that ends the process: which change it was. */
static void changed_report(int sig)
{
    ssize_t n = write(STDERR_FILENO, changed.what, strlen(changed.what));

    n = n < 0 ? n : write(STDERR_FILENO, "\n", 1);
    signal(sig, SIG_DFL);
    raise(sig);
}

/* Bytes of address space that the process has. */
static rlim_t changed_address_space(void)
{
    FILE *f = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;

    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lu", &pages), 1);
    fclose(f);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* every: without QUIRE_TEST_WHOLE one of so many changes is tried. */
static inline int changed_begin(uint32_t every)
{
    char *argv[] = {"--device=cpu",     "--threads=1",    "--kv-blocks=32",
                    "--max-num-seqs=2", "--block-size=4", "--max-num-batched-tokens=16",
                    "--config=none"};
    char *env[] = {NULL};
    bool help;
    struct err e = {0};

    snprintf(changed.dir, sizeof(changed.dir), "/tmp/quire-changed-XXXXXX");
    changed.every = test_whole() ? 1 : every;
    log_setup(LOG_TEXT, LOG_ERROR);
    if (CHANGED_LIMITS_MEMORY) {
        rlim_t most = changed_address_space() + CHANGED_ROOM;
        setrlimit(RLIMIT_AS, &(struct rlimit){most, most});
        signal(SIGSEGV, changed_report);
        signal(SIGFPE, changed_report);
        signal(SIGABRT, changed_report);
    }
    signal(SIGALRM, changed_report);
    return mkdtemp(changed.dir)
               ? settings_load(&changed.settings, ARRAY_LEN(argv), argv, env, &help, &e)
               : -1;
}

static inline int changed_end(void)
{
    char command[96];

    settings_release(&changed.settings);
    snprintf(command, sizeof(command), "rm -rf %s", changed.dir);
    print_message("%d refused, %d served\n", changed.refused, changed.served);
    return system(command) == 0 && changed.refused > 0 && changed.served > 0 ? 0 : -1;
}

static inline void changed_write(const char *name, const void *data, size_t n)
{
    char path[400];

    snprintf(path, sizeof(path), "%s/%s", changed.dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* A file, in memory of the caller's. */
static inline void changed_read(struct buf *ret, const char *dir, const char *name)
{
    char path[600], part[65536];
    size_t n;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    buf_init(ret, 64 << 20);
    while ((n = fread(part, 1, sizeof(part), f)) > 0) {
        buf_append(ret, part, n);
    }
    fclose(f);
    assert_false(ret->failed);
}

/* A prompt of several tokens and two more, of the one sequence that there is. */
static inline int changed_compute(struct executor *x, struct err *e)
{
    enum { PROMPT = 5, MORE = 2, BLOCKS = 8 };
    int32_t token[PROMPT] = {0}, src[PROMPT], position[PROMPT], slot[PROMPT];
    int32_t group_slot[PROMPT * LIMIT_KV_GROUPS], q_start[2] = {0}, kv_len[1], row[1] = {0},
                                                  lcp[1] = {0}, logits[1];
    int32_t table[LIMIT_KV_GROUPS * BLOCKS], size = x->info.block_size, rc = 0;
    struct table_update update[LIMIT_KV_GROUPS];
    struct sample_row sample = {
        .top_p = 1, .repetition_penalty = 1, .n_logprobs = 1, .mask_first = -1};
    int32_t groups = executor_kv_groups(&x->info);
    struct results results;

    for (int32_t i = 0, first = 0; i <= MORE && rc == 0 && first < x->info.max_len; i++) {
        struct batch b = {.step = (uint64_t)i + 1, .n_seqs = 1, .n_logits = 1, .n_samples = 1};
        int32_t n = MIN(i == 0 ? PROMPT : 1, x->info.max_len - first);
        for (int32_t g = 0; g < groups; g++) {
            int32_t count = (int32_t)div_ceil(first + n, size);
            update[g] = (struct table_update){.group = g, .count = count, .first = b.n_table_block};
            for (int32_t k = 0; k < count; k++) {
                table[b.n_table_block++] = g * (x->info.n_blocks / groups) + k;
            }
        }
        for (int32_t k = 0; k < n; k++) {
            int32_t at = first + k;
            token[k] = at % x->info.vocab, src[k] = -1, position[k] = at, slot[k] = at;
            for (int32_t g = 1; g < groups; g++) {
                group_slot[b.n_group_slots++] = g * (x->info.n_blocks / groups) * size + at;
            }
        }
        first += n;
        q_start[1] = b.n_tokens = n, kv_len[0] = first, logits[0] = n - 1;
        sample.position = first;
        b.n_table_update = groups, b.n_decode = n == 1;
        b.token = token, b.token_src = src, b.position = position, b.slot = slot;
        b.group_slot = group_slot, b.q_start = q_start, b.kv_len = kv_len, b.row = row;
        b.lcp_blocks = lcp, b.logits_token = logits, b.sample = &sample;
        b.table_update = update, b.table_block = table;
        rc = x->launch(x, &b, e);
        rc = rc ? rc : x->wait(x, &results, e);
    }
    return rc;
}

static inline int changed_load(const char *model, struct err *e)
{
    struct model_config c;
    struct generation_defaults gen;
    struct executor *x = NULL;
    int rc = model_config_read(&c, &gen, model, e);

    rc = rc ? rc : runner_open(&x, &changed.settings, model, &c, e);
    if (x) {
        rc = changed_compute(x, e);
        x->free(x);
    }
    return rc;
}

/* Whether the change that comes next is among those that are tried. */
static inline bool changed_due(void)
{
    return (changed.turn++ * 2654435761u >> 8) % changed.every == 0;
}

/* A model as it is must be served. */
static inline void changed_serve(const char *model)
{
    struct err e = {0};

    if (changed_load(model, &e) != 0) {
        fail_msg("%s: %s", model, e.text);
    }
}

/* Whether a refusal is one line that is not cut, and none for want of memory. */
static inline void changed_check(int rc, const struct err *e)
{
    bool told = e->code == rc && e->text[0] && !strchr(e->text, '\n');

    if (!told || rc == ERR_NOMEM || strlen(e->text) + 1 == sizeof(e->text)) {
        print_error("%s: %d, %s\n", changed.what, rc, e->text);
        changed.wrong++;
    }
}

/* Tries a directory, or a file in it, and with `tokenizer` its vocabulary. changed.what
 * has been set. */
static inline void changed_try(const char *model, bool tokenizer)
{
    struct err e = {0}, of_tokenizer = {0};
    struct tokenizer *t = NULL;
    clock_t begun = clock();

    alarm(CHANGED_PATIENCE_S);
    int rc = changed_load(model, &e);
    int tokenizer_rc = tokenizer ? tokenizer_open(&t, model, &of_tokenizer) : 0;
    tokenizer_free(t);
    alarm(0);
    changed.served += rc == 0;
    changed.refused += rc != 0;
    if (rc != 0) {
        changed_check(rc, &e);
    }
    if (tokenizer_rc != 0) {
        changed_check(tokenizer_rc, &of_tokenizer);
    }
    double busy_s = (double)(clock() - begun) / CLOCKS_PER_SEC;
    if (busy_s > CHANGED_SLOW_S) {
        print_error("%s: %.1f s\n", changed.what, busy_s);
        changed.wrong++;
    }
}

#endif
