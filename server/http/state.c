/* SIGUSR1: the present state of server and engine, as log lines. */
#include <stdio.h>

#include "engine/kv_snapshot.h"
#include "server/http/http.h"

/* Written at every log-level, since it was requested. */
#define SAY(event, ...)                                         \
    do {                                                        \
        const struct log_field field[] = {__VA_ARGS__};         \
        log_fields(LOG_INFO, (event), field, ARRAY_LEN(field)); \
    } while (0)

enum {
    TIMEOUT_US = 1000 * 1000, /* for the engine to take a snapshot */
    REQUESTS = 64,            /* requests logged, at most */
};

static void say_server(const struct server *s)
{
    const struct stream_hub *h = &s->hub;

    SAY("state server", LOG_STR("url", s->url),
        LOG_I64("connections", atomic_load(&s->connections)),
        LOG_I64("streams", atomic_load(&h->n_streams)), LOG_I64("writers", h->n_writers),
        LOG_I64("client_buffer_bytes", atomic_load(&h->budget.held)),
        LOG_I64("gone", (int64_t)atomic_load(&h->n_gone)),
        LOG_I64("slow", (int64_t)stream_hub_slow(h)),
        LOG_I64("draining", atomic_load(&s->draining)));
}

static void say_engine(const struct engine *e)
{
    const struct engine_stats *s = engine_stats(e);

    SAY("state engine", LOG_STR("health", engine_health_name(engine_health(e))),
        LOG_STR("death", engine_death(e)), LOG_I64("requests", engine_active(e)),
        LOG_I64("running_seqs", s->running), LOG_I64("waiting", s->waiting),
        LOG_I64("swapped", s->swapped), LOG_I64("steps", (int64_t)s->steps),
        LOG_I64("heartbeat", (int64_t)engine_heartbeat(e)),
        LOG_I64("prompt_tokens", (int64_t)s->prompt_tokens),
        LOG_I64("generation_tokens", (int64_t)s->generation_tokens),
        LOG_I64("preempt_swap", (int64_t)s->preempt_swap),
        LOG_I64("preempt_recompute", (int64_t)s->preempt_recompute));
}

/* `shared`: blocks in several tables; `saved`: the blocks that this sharing saves. */
static void say_pool(const struct kv_snapshot *p)
{
    int64_t shared = 0, saved = 0;

    for (int32_t b = 0; b < p->n_blocks; b++) {
        if (p->block[b] != KV_CACHED && p->block[b] > 1) {
            shared++;
            saved += p->block[b] - 1;
        }
    }
    SAY("state pool", LOG_I64("block_size", p->block_size), LOG_I64("blocks", p->n_blocks),
        LOG_I64("used", p->n_used), LOG_I64("cached", p->n_cached),
        LOG_I64("free", p->n_blocks - p->n_used - p->n_cached), LOG_I64("shared", shared),
        LOG_I64("saved_by_sharing", saved), LOG_I64("host_blocks", p->n_host_blocks),
        LOG_I64("host_used", p->n_host_used));
}

static void say_request(const struct kv_snapshot *p, const struct kv_group *g)
{
    static const char *const state[] = {"running", "swapped", "waiting"};
    int64_t tokens = 0, computed = 0, blocks = 0;

    for (int32_t i = g->first_seq; i < g->first_seq + g->n_seqs; i++) {
        tokens += p->seq[i].n_tokens;
        computed += p->seq[i].n_computed;
        blocks += p->seq[i].n_blocks;
    }
    SAY("state request", LOG_I64("order", (int64_t)g->order), LOG_STR("state", state[g->state]),
        LOG_F64("age_s", (double)(p->taken_us - g->arrival_us) / 1e6),
        LOG_I64("priority", g->priority), LOG_I64("width", g->width), LOG_I64("live", g->n_live),
        LOG_STR("beam", g->beam ? "yes" : "no"), LOG_I64("prompt_tokens", g->n_prompt),
        LOG_I64("max_tokens", g->max_tokens), LOG_I64("cached_tokens", g->cached_tokens),
        LOG_I64("tokens", tokens), LOG_I64("computed", computed), LOG_I64("table_entries", blocks),
        LOG_I64("preemptions", g->preemptions));
}

static void say_snapshot(const struct kv_snapshot *p)
{
    int32_t total = p->n_running + p->n_swapped + p->n_waiting, n = MIN(p->n_groups, REQUESTS);

    say_pool(p);
    SAY("state queues", LOG_I64("running", p->n_running), LOG_I64("swapped", p->n_swapped),
        LOG_I64("waiting", p->n_waiting), LOG_I64("step", (int64_t)p->step), LOG_I64("told", n),
        LOG_I64("of", total));
    for (int32_t i = 0; i < n; i++) {
        say_request(p, &p->group[i]);
    }
}

void state_log(const struct server *s)
{
    struct engine *engine = atomic_load(&s->engine);
    struct kv_snapshot *p = NULL;
    struct err e = {0};

    say_server(s);
    if (!engine) {
        SAY("state engine", LOG_STR("health", engine_health_name(HEALTH_STARTING)));
        return;
    }
    say_engine(engine);
    int rc = kv_snapshot_new(&p, engine, &e);
    rc = rc ? rc : engine_kv_snapshot(engine, p, TIMEOUT_US, &e);
    if (rc) {
        SAY("state queues", LOG_STR("unknown", e.text));
    } else {
        say_snapshot(p);
    }
    kv_snapshot_free(p);
}
