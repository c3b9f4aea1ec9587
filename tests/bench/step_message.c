/* The cost of sending a step to the ranks, without a model: medians in microseconds.
 *
 *     build/tests/bench/step_message [--ranks N] [--seqs N] [--steps N] [--pause US]
 *
 * publish   rank 0: serialise the batch into the ring and wake sleeping ranks
 * read      another rank: check the message and point into it
 * arrive    from the beginning of publish to the last rank's end of read
 *
 * Ranks are threads over one mapping, with the same memory and futexes as processes.
 * They spin between steps, so `arrive` is meaningful only with a core for each; --pause
 * US lets them fall asleep between steps. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "engine/workers/batch_wire.h"
#include "engine/workers/ranks/step_channel.h"

enum { MAX_RANKS = 64, MAX_SEQS = 4096, LONG_US = 60000000 };

struct bench {
    int32_t n_ranks, n_seqs, n_steps, pause_us;
    struct executor_info info;
    void *shared;
    size_t slot_bytes;
    _Atomic int64_t ended_ns[MAX_RANKS];
    atomic_int steps_read[MAX_RANKS];
    double *read_us; /* [n_steps] of rank 1 */
};

struct taker {
    struct bench *b;
    int32_t rank;
};

static int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void must(int rc, const struct err *e)
{
    if (rc < 0) {
        fprintf(stderr, "step_message: %s\n", e->text);
        exit(1);
    }
}

static void *taker_main(void *arg)
{
    struct taker *t = arg;
    struct bench *b = t->b;
    struct step_channel *l;
    struct step_message m;
    struct batch got;
    struct err e;

    must(ring_channel_open(&l, b->shared, t->rank, b->n_ranks, b->slot_bytes, &e), &e);
    for (int32_t i = 0; i < b->n_steps; i++) {
        must(l->ops->take(l, &m, LONG_US, &e) - 1, &e);
        int64_t start = now_ns();
        must(batch_wire_read(&got, m.data, m.n_bytes, &b->info, &e), &e);
        int64_t end = now_ns();
        if (t->rank == 1) {
            b->read_us[i] = (double)(end - start) * 1e-3;
        }
        l->ops->release(l);
        atomic_store(&b->ended_ns[t->rank], end);
        atomic_store(&b->steps_read[t->rank], i + 1);
    }
    l->ops->free(l);
    return NULL;
}

/* Decoding with look-ahead, contexts of 500 tokens; one sequence in sixteen gets a new
 * block. */
static void make_batch(struct batch *ret, int32_t n, const struct executor_info *x)
{
    static int32_t token[MAX_SEQS], src[MAX_SEQS], position[MAX_SEQS], slot[MAX_SEQS],
        q_start[MAX_SEQS + 1], kv_len[MAX_SEQS], row[MAX_SEQS], lcp[MAX_SEQS], logits[MAX_SEQS],
        table[MAX_SEQS];
    static struct table_update update[MAX_SEQS];
    static struct sample_row sample[MAX_SEQS];
    int32_t n_updates = 0;

    for (int32_t i = 0; i < n; i++) {
        src[i] = i;
        position[i] = 500 + i % 16;
        kv_len[i] = position[i] + 1;
        slot[i] = (i * 37 % x->n_blocks) * x->block_size + position[i] % x->block_size;
        q_start[i + 1] = i + 1;
        row[i] = logits[i] = i;
        sample[i] = (struct sample_row){
            .logits_row = i, .temperature = 0.8f, .top_p = 0.95f, .n_logprobs = -1};
        if (i % 16 == 0) {
            update[n_updates] =
                (struct table_update){.row = i, .index = 31, .count = 1, .first = n_updates};
            table[n_updates++] = i * 37 % x->n_blocks;
        }
    }
    *ret = (struct batch){.table_update = update,
                          .table_block = table,
                          .n_table_update = n_updates,
                          .n_table_block = n_updates,
                          .n_tokens = n,
                          .token = token,
                          .token_src = src,
                          .position = position,
                          .slot = slot,
                          .n_seqs = n,
                          .n_decode = n,
                          .q_start = q_start,
                          .kv_len = kv_len,
                          .row = row,
                          .lcp_blocks = lcp,
                          .n_logits = n,
                          .logits_token = logits,
                          .n_samples = n,
                          .sample = sample};
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double quantile(double *v, int32_t n, double q)
{
    qsort(v, (size_t)n, sizeof(*v), by_value);
    return v[MIN((int32_t)(q * n), n - 1)];
}

static void pause_for(int32_t us)
{
    if (us > 0) {
        nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000L},
                  NULL);
    }
}

/* Send one step to all ranks. Returns when the last one had read it. */
static int64_t one_step(struct bench *b, struct step_channel *l, struct batch *batch, int32_t i,
                        double *ret_publish_us)
{
    struct err e;
    void *at;
    int64_t start = now_ns(), last = 0;

    batch->step = (uint64_t)i + 1;
    must(l->ops->begin(l, &at, LONG_US, &e), &e);
    must(l->ops->commit(l, STEP_CHANNEL_STEP, batch_wire_write(at, batch), &e), &e);
    *ret_publish_us = (double)(now_ns() - start) * 1e-3;
    for (int32_t r = 1; r < b->n_ranks; r++) {
        while (atomic_load(&b->steps_read[r]) <= i) {
            sched_yield();
        }
        last = MAX(last, atomic_load(&b->ended_ns[r]));
    }
    return last - start;
}

static void run(struct bench *b)
{
    pthread_t thread[MAX_RANKS];
    struct taker taker[MAX_RANKS];
    struct step_channel *l;
    struct batch batch;
    struct err e;
    double *publish_us = calloc((size_t)b->n_steps, sizeof(double)),
           *arrive_us = calloc((size_t)b->n_steps, sizeof(double));

    b->read_us = calloc((size_t)b->n_steps, sizeof(double));
    if (!publish_us || !arrive_us || !b->read_us) {
        exit(1);
    }
    make_batch(&batch, b->n_seqs, &b->info);
    must(ring_channel_open(&l, b->shared, 0, b->n_ranks, b->slot_bytes, &e), &e);
    for (int32_t r = 1; r < b->n_ranks; r++) {
        taker[r] = (struct taker){b, r};
        if (pthread_create(&thread[r], NULL, taker_main, &taker[r]) != 0) {
            exit(1);
        }
    }
    for (int32_t i = 0; i < b->n_steps; i++) {
        pause_for(b->pause_us);
        arrive_us[i] = (double)one_step(b, l, &batch, i, &publish_us[i]) * 1e-3;
    }
    for (int32_t r = 1; r < b->n_ranks; r++) {
        pthread_join(thread[r], NULL);
    }
    printf("%d ranks, %d sequences, %zu bytes: publish %.1f (p99 %.1f), read %.1f, arrive %.1f "
           "(p99 %.1f) us\n",
           b->n_ranks, b->n_seqs, batch_wire_write(NULL, &batch),
           quantile(publish_us, b->n_steps, 0.5), quantile(publish_us, b->n_steps, 0.99),
           quantile(b->read_us, b->n_steps, 0.5), quantile(arrive_us, b->n_steps, 0.5),
           quantile(arrive_us, b->n_steps, 0.99));
    l->ops->free(l);
    free(publish_us);
    free(arrive_us);
    free(b->read_us);
}

int main(int argc, char **argv)
{
    static struct bench b = {.n_ranks = 2, .n_seqs = 256, .n_steps = 20000};

    for (int i = 1; i + 1 < argc; i += 2) {
        int32_t *at = strcmp(argv[i], "--ranks") == 0   ? &b.n_ranks
                      : strcmp(argv[i], "--seqs") == 0  ? &b.n_seqs
                      : strcmp(argv[i], "--steps") == 0 ? &b.n_steps
                      : strcmp(argv[i], "--pause") == 0 ? &b.pause_us
                                                        : NULL;
        if (!at || (*at = atoi(argv[i + 1])) < 1) {
            fprintf(stderr,
                    "usage: step_message [--ranks N] [--seqs N] [--steps N] [--pause US]\n");
            return 2;
        }
    }
    b.n_ranks = MIN(b.n_ranks, MAX_RANKS);
    b.n_seqs = MIN(b.n_seqs, MAX_SEQS);
    b.info = (struct executor_info){.vocab = 128000,
                                    .max_len = 8192,
                                    .n_blocks = 20000,
                                    .block_size = 16,
                                    .max_num_seqs = b.n_seqs,
                                    .max_num_batched_tokens = b.n_seqs,
                                    .max_samples = b.n_seqs};
    b.slot_bytes = batch_wire_max(&b.info);
    b.shared = mmap(NULL, ring_channel_bytes(b.slot_bytes), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b.shared == MAP_FAILED) {
        return 1;
    }
    run(&b);
    return 0;
}
