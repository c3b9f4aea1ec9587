/* Ranks for tests and benchmarks of backends: one process each, forked before any
 * device is opened, with comm between them.
 *
 * A rank's body returns 0 or an error, which it prints and the parent counts; the
 * others are let go with it.
 */
#ifndef QUIRE_TESTS_UNIT_RANK_RIG_H
#define QUIRE_TESTS_UNIT_RANK_RIG_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "kernels/comm/comm.h"

enum { RANK_RIG_TOKENS = 256, RANK_RIG_VOCAB = 1 << 16 };

struct rank_rig {
    const char *device;
    int32_t rank, n_ranks, max_tokens;
    struct comm *comm;
    struct backend *b;
    uint64_t step;
    int32_t *ints, *minus;
    struct sample_row *sample; /* of decode steps: greedy, each of its row's logits */
    const int32_t *token_src;  /* of the tokens; NULL: they are 0, 1, 2 ... */
    const int32_t *slot;       /* where they are noted; NULL: nowhere */
    const struct token_bias *bias;
    const uint32_t *mask;
    int32_t n_bias, n_mask;
};

typedef int rank_rig_body(struct rank_rig *r, struct err *e);

#define RANK_CHECK(cond)                                                            \
    do {                                                                            \
        if (!(cond))                                                                \
            return err_set(e, ERR_INVALID, "%s:%d: %s", __FILE__, __LINE__, #cond); \
    } while (0)

/* Reads `--device NAME` and `--ranks N`. What is not given stays, but on a device that
 * is named there are 2 ranks. */
static inline void rank_rig_args(int argc, char **argv, const char **device, int32_t *n_ranks)
{
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--device") == 0) {
            *device = argv[i + 1];
            *n_ranks = 2;
        }
    }
    for (int i = 1; i + 1 < argc; i++) {
        *n_ranks = strcmp(argv[i], "--ranks") == 0 ? atoi(argv[i + 1]) : *n_ranks;
    }
}

/* One rank alone needs no `shared`. */
static inline int rank_rig_open(struct rank_rig *r, void *shared, struct err *e)
{
    int rc = r->n_ranks > 1 ? comm_shm_open(&r->comm, shared, r->rank, r->n_ranks, 60000000, e) : 0;
    int32_t n = MIN(r->max_tokens, RANK_RIG_TOKENS);
    struct backend_config c = {.threads = 1,
                               .device = r->rank,
                               .max_tokens = r->max_tokens,
                               .max_seqs = n,
                               .max_samples = n,
                               .max_blocks_per_seq = 4,
                               .vocab = RANK_RIG_VOCAB,
                               .comm = r->comm,
                               .local_rank = r->rank,
                               .local_world_size = r->n_ranks};

    r->ints = calloc((size_t)r->max_tokens + 1, sizeof(*r->ints));
    r->minus = malloc(((size_t)r->max_tokens + 1) * sizeof(*r->minus));
    r->sample = calloc((size_t)n, sizeof(*r->sample));
    if (!r->ints || !r->minus || !r->sample) {
        return err_nomem(e, "a rank's test");
    }
    for (int32_t i = 0; i <= r->max_tokens; i++) {
        r->ints[i] = i;
        r->minus[i] = -1;
    }
    for (int32_t i = 0; i < n; i++) {
        r->sample[i] = (struct sample_row){
            .logits_row = i, .top_p = 1, .repetition_penalty = 1, .mask_first = -1};
    }
    rc = rc < 0 ? rc : backend_open(&r->b, r->device, &c, e);
    return rc == 0 && r->b->ops->ready ? r->b->ops->ready(r->b, e) : rc;
}

static inline void rank_rig_child(struct rank_rig *r, void *shared, rank_rig_body *body)
{
    struct err e = {0};

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(100); /* a rank that hangs is a failure, not a wait */
    int rc = rank_rig_open(r, shared, &e);
    if (rc == 0) {
        rc = body(r, &e);
    }
    if (rc < 0) {
        fprintf(stderr, "rank %d of %d: %s\n", r->rank, r->n_ranks, e.text);
        r->comm->ops->abort(r->comm, "another rank failed");
    }
    if (r->b) {
        r->b->ops->free(r->b);
    }
    fflush(NULL);
    _exit(rc < 0);
}

/* How many of the n ranks failed. */
static inline int rank_rig_run(const char *device, int32_t n, int32_t max_tokens,
                               rank_rig_body *body)
{
    size_t n_bytes = comm_shm_bytes(n);
    void *shared = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int failed = shared == MAP_FAILED ? n : 0;

    fflush(NULL);
    for (int32_t i = 0; i < n && shared != MAP_FAILED; i++) {
        struct rank_rig r = {.device = device, .rank = i, .n_ranks = n, .max_tokens = max_tokens};
        pid_t pid = fork();
        if (pid == 0) {
            rank_rig_child(&r, shared, body);
        }
        failed += pid < 0;
    }
    for (int status; wait(&status) > 0;) {
        failed += status != 0;
    }
    if (shared != MAP_FAILED) {
        munmap(shared, n_bytes);
    }
    return failed;
}

/* Begin a step of n tokens: a decode step, which backends may record and replay, up to
 * RANK_RIG_TOKENS; else one prompt. True: it was replayed. Operations and rank_rig_end
 * follow. */
static inline int rank_rig_begin(struct rank_rig *r, int32_t n, bool *ret_replayed, struct err *e)
{
    bool decode = n <= RANK_RIG_TOKENS;
    static const int32_t none[RANK_RIG_TOKENS];
    int32_t one[2] = {0, n};
    struct batch b = {.step = ++r->step,
                      .n_tokens = n,
                      .token = r->ints,
                      .token_src = r->token_src ? r->token_src : r->minus,
                      .position = r->ints,
                      .slot = r->slot ? r->slot : r->minus,
                      .n_seqs = decode ? n : 1,
                      .n_decode = decode ? n : 0,
                      .q_start = decode ? r->ints : one,
                      .kv_len = decode ? r->ints + 1 : one + 1,
                      .row = r->ints,
                      .lcp_blocks = none,
                      .n_logits = decode ? n : 0,
                      .logits_token = r->ints,
                      .n_samples = decode ? n : 0,
                      .sample = r->sample,
                      .token_bias = r->bias,
                      .n_token_bias = r->n_bias,
                      .mask_word = r->mask,
                      .n_mask_word = r->n_mask};
    int rc = r->b->ops->step_begin(r->b, &b, e);

    *ret_replayed = rc == 0 && r->b->ops->replay && r->b->ops->replay(r->b, &b);
    return rc;
}

static inline int rank_rig_end(struct rank_rig *r, struct results *ret, struct err *e)
{
    int rc = r->b->ops->step_end(r->b, e);

    return rc < 0 ? rc : r->b->ops->step_wait(r->b, ret, e);
}

#endif
