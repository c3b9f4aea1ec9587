#include "tests/sim/many.h"

#include <stdlib.h>
#include <string.h>

#include "engine/workers/batch_wire.h"
#include "engine/workers/microbatch.h"

/* PART_TOKENS: tokens of a micro-batch, few because steps are small here. */
enum { ANSWERS = 4, PART_TOKENS = 4 };

struct many {
    struct executor base;
    struct executor *rank[MANY_MAX];
    int32_t n, n_stages;
    struct microbatch microbatch;
    struct gathered answer[MANY_MAX][ANSWERS];
    uint64_t launched, executed, waited;
    /* messages of launches that wait for masks, or behind one that does: that of number
     * i in message[i % ANSWERS] */
    void *message[ANSWERS];
    size_t n_bytes[ANSWERS], max_bytes;
    uint64_t mask_step; /* the step whose masks came last */
    struct err failed;  /* why a step could not be executed when its masks came */
};

/* One rank's step, in micro-batches, with its results gathered. */
static int compute(struct many *m, int32_t rank, const struct batch *b, struct err *e)
{
    struct executor *x = m->rank[rank];
    struct gathered *g = &m->answer[rank][m->executed % ANSWERS];
    struct batch part;
    struct results got;
    int32_t n = microbatch_most(b, MAX(MIN(m->n_stages, b->n_tokens / PART_TOKENS), 1));
    int rc = microbatch_results_begin(g, b->step, b->n_samples, microbatch_results_stride(b), e);

    for (int32_t i = 0; i < n && rc == 0; i++) {
        rc = microbatch_split(&m->microbatch, b, i, n, &part, e);
        if (rc == 0) {
            rc = x->launch(x, &part, e);
        }
        if (rc == 0) {
            rc = x->wait(x, &got, e);
        }
        if (rc == 0) {
            microbatch_results_add(g, part.first_sample, &got);
        }
    }
    return rc;
}

/* Execute the oldest message, on all ranks. */
static int execute(struct many *m, struct err *e)
{
    uint64_t at = m->executed % ANSWERS;
    struct batch got;

    for (int32_t i = 0; i < m->n; i++) {
        int rc = batch_wire_read(&got, m->message[at], m->n_bytes[at], &m->base.info, e);
        if (rc == 0) {
            rc = compute(m, i, &got, e);
        }
        if (rc < 0) {
            err_prefix(e, "rank %d", i);
            return rc;
        }
    }
    memset(m->message[at], 0xAA, m->n_bytes[at]); /* it must not be read any more */
    m->executed++;
    return 0;
}

static int execute_ready(struct many *m, struct err *e)
{
    int rc = 0;

    while (rc == 0 && m->executed < m->launched) {
        struct batch b;
        uint64_t at = m->executed % ANSWERS;
        rc = batch_wire_read(&b, m->message[at], m->n_bytes[at], &m->base.info, e);
        if (rc == 0 && b.n_late_mask > 0 && m->mask_step != b.step) {
            return 0;
        }
        rc = rc == 0 ? execute(m, e) : rc;
    }
    return rc;
}

static int many_launch(struct executor *base, const struct batch *b, struct err *e)
{
    struct many *m = (struct many *)base;
    uint64_t at = m->launched % ANSWERS;

    m->n_bytes[at] = batch_wire_write(NULL, b);
    if (m->n_bytes[at] > m->max_bytes) {
        return err_set(e, ERR_DEVICE, "a message of %zu bytes, where %zu are the most",
                       m->n_bytes[at], m->max_bytes);
    }
    batch_wire_write(m->message[at], b);
    m->launched++;
    return execute_ready(m, e);
}

static int many_masks(struct executor *base, uint64_t step, const struct late_mask *mask, int32_t n,
                      struct err *e)
{
    struct many *m = (struct many *)base;
    int rc = 0;

    for (int32_t i = 0; i < m->n && rc == 0; i++) {
        rc = m->rank[i]->masks(m->rank[i], step, mask, n, e);
    }
    m->mask_step = step;
    if (rc == 0 && execute_ready(m, &m->failed) < 0) {
        m->failed.code = ERR_DEVICE;
    }
    return rc;
}

static bool same(const struct results *a, const struct results *b)
{
    size_t n = (size_t)a->n_samples;

    return a->step == b->step && a->n_samples == b->n_samples &&
           (n == 0 || (memcmp(a->token, b->token, n * sizeof(*a->token)) == 0 &&
                       memcmp(a->logprob, b->logprob, n * sizeof(*a->logprob)) == 0));
}

static int many_wait(struct executor *base, struct results *ret, struct err *e)
{
    struct many *m = (struct many *)base;
    if (m->failed.code < 0 || m->waited == m->executed) {
        *e = m->failed;
        return m->failed.code < 0 ? ERR_DEVICE : err_set(e, ERR_DEVICE, "masks are missing");
    }
    uint64_t at = m->waited++ % ANSWERS;

    *ret = m->answer[0][at].results;
    for (int32_t i = 1; i < m->n; i++) {
        if (!same(ret, &m->answer[i][at].results)) {
            return err_set(e, ERR_DEVICE, "rank %d answers step %llu otherwise than rank 0", i,
                           (unsigned long long)ret->step);
        }
    }
    return 0;
}

static void many_free(struct executor *base)
{
    struct many *m = (struct many *)base;

    for (int32_t i = 0; i < m->n; i++) {
        m->rank[i]->free(m->rank[i]);
    }
    for (int32_t i = 0; i < MANY_MAX * ANSWERS; i++) {
        microbatch_results_release(&m->answer[i / ANSWERS][i % ANSWERS]);
    }
    microbatch_release(&m->microbatch);
    for (int32_t i = 0; i < ANSWERS; i++) {
        free(m->message[i]);
    }
    free(m);
}

int many_open(struct executor **ret, const struct oracle_config *c, int32_t n, int32_t n_stages,
              struct err *e)
{
    struct many *m = calloc(1, sizeof(*m));

    if (!m) {
        return err_nomem(e, "many oracles");
    }
    m->base = (struct executor){
        .launch = many_launch, .wait = many_wait, .masks = many_masks, .free = many_free};
    m->n_stages = n_stages;
    int rc = n < 1 || n > MANY_MAX ? err_set(e, ERR_INVALID, "%d oracles", n) : 0;
    for (int32_t i = 0; i < n && rc == 0; i++) {
        rc = oracle_open(&m->rank[i], c, e);
        m->n += rc == 0;
    }
    if (rc == 0) {
        m->base.info = m->rank[0]->info;
        m->max_bytes = batch_wire_max(&m->base.info);
        for (int32_t i = 0; i < ANSWERS && rc == 0; i++) {
            m->message[i] = aligned_alloc(64, (m->max_bytes + 63) / 64 * 64);
            rc = m->message[i] ? 0 : err_nomem(e, "many oracles");
        }
    }
    if (rc < 0) {
        many_free(&m->base);
        return rc;
    }
    *ret = &m->base;
    return 0;
}
