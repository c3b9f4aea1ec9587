#include "engine/pinned_prefixes.h"

#include <stdlib.h>
#include <string.h>

static void discard_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    (void)out, (void)g, (void)d;
}

static int encode(const struct engine *e, const struct settings *s, struct token_list *ids,
                  struct err *err)
{
    const struct sched_config *c = &e->config;
    int64_t blocks = 0;

    if (s->kv_policy != KV_PAGED) {
        return err_set_param(err, ERR_INVALID, "prefixes",
                             "prefixes are kept in the prefix cache, which kv_policy has none of "
                             "unless it is paged");
    }
    if (!s->prefix_cache) {
        return err_set_param(err, ERR_INVALID, "prefixes",
                             "prefixes are kept in the prefix cache, but prefix_cache is false");
    }
    for (int64_t i = 0; i < s->n_prefixes; i++) {
        const char *text = s->prefixes[i].text;
        int rc = tokenizer_encode(e->tokenizer, text, strlen(text), true, c->max_len, &ids[i], err);
        if (rc < 0) {
            return err_prefix(err, "entry %lld of prefixes", (long long)i + 1);
        }
        blocks += (int64_t)sched_kv_groups(c) * (ids[i].n / c->block_size);
    }
    if (blocks > c->n_blocks / 2) {
        return err_set_param(
            err, ERR_INVALID, "prefixes",
            "the prefixes need %lld KV blocks; at most half of the pool's %d may be held for good",
            (long long)blocks, c->n_blocks);
    }
    return 0;
}

/* Runs steps until the scheduler has nothing left to do. */
static int run_to_end(struct engine *e, struct err *err)
{
    struct delta_out out = {.emit = discard_delta};
    struct results results;
    struct batch batch;

    while (sched_plan(e->sched, clock_us(), &e->plan[0]) > 0) {
        pack_batch(e->packer, &e->plan[0], &batch);
        int rc = e->executor->launch(e->executor, &batch, err);
        if (rc == 0) {
            rc = e->executor->wait(e->executor, &results, err);
        }
        if (rc < 0) {
            decode_abandon(e->sched, &e->plan[0]);
            return rc;
        }
        decode_commit(e->sched, &e->plan[0], &results, clock_us(), &out);
        decode_reap(e->sched, &out);
    }
    return 0;
}

/* Computes a text's KV blocks by running it as a request that generates no token. */
static int compute(struct engine *e, const struct token_list *ids, struct err *err)
{
    struct gen_params p;
    struct request *r = NULL;
    struct group *g = NULL;

    gen_params_init(&p, e);
    p.max_tokens = 0;
    int rc = request_new(&r, &p, ids->id, ids->n, err);
    if (rc < 0) {
        gen_params_release(&p);
        return rc;
    }
    rc = group_new(&g, r, NULL, &e->config, err);
    if (rc == 0) {
        rc = sched_add(e->sched, g, clock_us());
    }
    if (rc == 0) {
        rc = run_to_end(e, err);
    }
    if (rc == 0) {
        e->config.n_pinned += sched_pin(e->sched, ids->id, ids->n);
    }
    request_unref(r);
    return rc;
}

int pinned_prefixes_compute(struct engine *e, const struct settings *s, struct err *err)
{
    if (s->n_prefixes == 0) {
        return 0;
    }
    struct token_list *ids = calloc((size_t)s->n_prefixes, sizeof(*ids));
    if (!ids) {
        return err_nomem(err, "the prefixes");
    }
    int rc = encode(e, s, ids, err);
    for (int64_t i = 0; i < s->n_prefixes && rc == 0; i++) {
        if (ids[i].n >= e->config.block_size) { /* a shorter text fills no block */
            rc = compute(e, &ids[i], err);
        }
    }
    for (int64_t i = 0; i < s->n_prefixes; i++) {
        token_list_release(&ids[i]);
    }
    free(ids);
    return rc;
}
