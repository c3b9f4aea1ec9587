/* The engine's thread. A turn plans and launches one step, and commits the oldest one
 * in flight:
 *
 *     take requests ─► plan ─► pack ─► launch      step N+1, while step N runs on the device
 *                                        │
 *                        wait ─► commit ─► deltas   step N
 *
 * Under policy: fair, while several tenants are active, step N+1 is launched just
 * before N ends (launch_delay.h), so that later arrivals can join it; on a CPU, where
 * prefill is slow, a step behind prefill is launched when that has ended. With an
 * executor of depth d, d steps run while another is prepared. When nothing can be
 * planned, the turn only waits for the running steps; when none runs either, the thread
 * sleeps on the inbox's eventfd. */
#include <stdio.h>
#include <string.h>

#include "config/base/log.h"
#include "engine/engine_state.h"
#include "engine/stats.h"

enum {
    TAKE_AT_ONCE = 256,     /* requests taken from the inbox in one call */
    IDLE_BEAT_US = 1000000, /* between heartbeats of an idle engine */
    CHECK_US = 50000,       /* between checks of an idle executor that may fail */
    RETRY_US = 1000,        /* until requests that wait without a step are looked at again */
    DEFERRED_US = 200,      /* until the output side is asked again whether it took a portion */
    /* cells of the output ring that may be full when a step is planned; at least a
     * step's */
    MAX_BACKLOG_CELLS = 8192
};

static int32_t inflight(const struct engine *e)
{
    return (int32_t)(e->n_launched - e->n_committed);
}

static struct plan *plan_at(struct engine *e, uint64_t n)
{
    return &e->plan[n % (uint64_t)(e->executor->info.depth + 1)];
}

/* A device error is final: nothing is computed any more, and every request ends with an
 * error. */
static void engine_die(struct engine *e, const struct err *why)
{
    snprintf(e->death, sizeof(e->death), "%s", why->text);
    atomic_store(&e->state, HEALTH_DEAD);
    log_event(LOG_ERROR, "engine died", LOG_STR("error", e->death));
    if (e->masks) {
        masks_abandon(e->masks, e->n_committed, e->sched);
    }
    while (inflight(e) > 0) {
        decode_abandon(e->sched, plan_at(e, e->n_committed++));
    }
}

/* ---- stage 9 to 10: deltas to the output thread ---- */

static void record_course(struct request_timing *c, const struct group *g)
{
    c->preemptions = g->n_preempted;
    c->drafted = g->n_drafted;
    c->accepted = g->n_accepted;
    c->n_sampled = g->n_chosen;
    if (g->admitted_us) {
        c->queue_us = g->admitted_us - g->request->arrival_us;
    }
    if (g->admitted_us && g->first_token_us) {
        c->prefill_us = g->first_token_us - g->admitted_us;
    }
    if (g->first_token_us && g->last_token_us) {
        c->decode_us = g->last_token_us - g->first_token_us;
    }
}

static void on_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    struct engine *e = CONTAINER_OF(out, struct engine, deltas);

    if (d->kind == DELTA_END) {
        struct request_timing *c = &g->request->course;
        record_course(c, g);
        if (g->admitted_us) {
            hist_add(&e->stats.queue_s, (double)c->queue_us * 1e-6);
        }
        if (g->admitted_us && g->first_token_us) {
            hist_add(&e->stats.prefill_s, (double)c->prefill_us * 1e-6);
        }
    }
    output_push(e->output, d);
}

/* Whether n deltas fit the output's ring beside those of all steps in flight. */
static bool output_fits(struct engine *e, int64_t n)
{
    return output_free_cells(e->output) >= inflight(e) * e->step_cells + n * OUTPUT_DELTA_CELLS;
}

/* Deferred deltas (final reports) are sent in portions, the next one when the output
 * side has consumed the last: they never delay a step's tokens for long, and leave the
 * room that those need in the ring. */
static bool take_deferred(struct delta_out *out, int32_t n)
{
    struct engine *e = CONTAINER_OF(out, struct engine, deltas);

    if (output_passed(e->output, e->portion_mark)) {
        e->portion_left = ENGINE_PORTION;
    }
    if (n > e->portion_left || !output_fits(e, n)) {
        return false;
    }
    e->portion_left -= n;
    /* The mark precedes the deltas granted here: fewer may be pushed than granted, and
     * if no other delta followed, a mark behind them would never be reached. */
    e->portion_mark = output_mark(e->output);
    return true;
}

/* ---- a turn ---- */

/* Stage 4, consumer: moves groups from the inbox into the scheduler. */
static void take_requests(struct engine *e, int64_t now_us)
{
    struct group *g[TAKE_AT_ONCE];
    int32_t n;

    do {
        n = inbox_take(&e->inbox, g, TAKE_AT_ONCE);
        for (int32_t i = 0; i < n; i++) {
            /* cannot fail: the scheduler holds max_queue groups that have not
             * started */
            sched_add(e->sched, g[i], now_us);
        }
        e->known_waiting += n;
    } while (n == TAKE_AT_ONCE);
}

/* Requests that have started or ended release their places in the queue; a preempted
 * request takes none. */
static void release_queue_slots(struct engine *e, const struct sched_counts *c)
{
    if (c->waiting_groups >= e->known_waiting) {
        return;
    }
    inbox_admit(&e->inbox, e->known_waiting - c->waiting_groups);
    e->known_waiting = c->waiting_groups;
}

/* Whether the output ring has room for everything that the next step may produce, and
 * the output side does not lag: output that is produced long before it can be sent only
 * delays later output. Otherwise nothing is planned: this thread does not wait, and
 * tokens are never dropped. */
static bool may_launch(struct engine *e)
{
    int64_t portion = (int64_t)ENGINE_PORTION * OUTPUT_DELTA_CELLS,
            free_cells = output_free_cells(e->output);
    int64_t backlog = output_cells(e->output) - free_cells;

    return free_cells >= (inflight(e) + 1) * e->step_cells + portion &&
           backlog <= MAX(e->step_cells, MAX_BACKLOG_CELLS);
}

/* What launches have waited for the device so far, which is no work of this thread. */
static int64_t launch_waits_us(struct engine *e)
{
    return e->executor->launch_waits_us ? e->executor->launch_waits_us(e->executor) : 0;
}

/* What drafting has taken so far: the draft model's device worked. */
static int64_t drafting_us(const struct engine *e)
{
    return e->model_drafts ? draft_model_us(e->model_drafts) : 0;
}

/* Plans a step, in front of which the draft model may run. */
static int32_t plan_step(struct engine *e, int64_t now_us, struct plan *plan)
{
    int64_t drafted_us = drafting_us(e);
    int32_t n = sched_plan(e->sched, now_us, plan);

    drafted_us = drafting_us(e) - drafted_us;
    e->host_us -= drafted_us;
    if (n > 0 && !plan->ahead) {
        e->gap_from_us = e->step_end_us > 0 ? e->step_end_us + drafted_us : 0;
    }
    if (e->model_drafts && !e->draft_died && draft_model_death(e->model_drafts)) {
        e->draft_died = true;
        log_event(LOG_ERROR, "the draft model failed; nothing is drafted any more",
                  LOG_STR("error", draft_model_death(e->model_drafts)));
    }
    return n;
}

/* Stages 5 to 7. Returns the number of sequences in the launched step; 0: nothing to
 * run, or the device failed. */
static int32_t launch_step(struct engine *e, int64_t now_us)
{
    struct plan *plan = plan_at(e, e->n_launched);

    if (!may_launch(e) || plan_step(e, now_us, plan) == 0) {
        return 0;
    }
    if (kv_feed_wanted(&e->kv_feed, now_us)) {
        kv_feed_record(&e->kv_feed, plan);
    }
    struct batch batch;
    struct err err;
    pack_batch(e->packer, plan, &batch);
    if (e->masks) {
        masks_planned(e->masks, batch.n_late_mask > 0 ? plan : NULL);
    }
    e->n_launched++;
    launch_delay_launched(&e->launch_delay, clock_us(), plan->estimate_us);
    int64_t waited_us = launch_waits_us(e);
    if (e->executor->launch(e->executor, &batch, &err) < 0) {
        engine_die(e, &err);
        return 0;
    }
    e->host_us -= launch_waits_us(e) - waited_us;
    if (e->masks) {
        masks_begin(e->masks, e->n_committed);
    }
    return plan->n_items;
}

/* Stages 8 and 9: turns the oldest step's results into tokens and deltas, which are
 * sent at the turn's end. `turn_us`: when this thread's work on the turn began. */
static void commit_step(struct engine *e, int64_t turn_us)
{
    struct plan *plan = plan_at(e, e->n_committed);
    struct results results;
    struct err err;
    int64_t before_us = clock_us();
    int rc = e->executor->wait(e->executor, &results, &err);
    int64_t after_us = clock_us();

    if (rc < 0) {
        engine_die(e, &err);
        return;
    }
    if (e->script) {
        script_apply(e->script, plan, &results);
    }
    launch_delay_ended(&e->launch_delay, after_us);
    int32_t n_tokens = plan->n_tokens;
    sched_observe(e->sched, plan, results.device_us);
    if (e->gap_from_us > 0 && !plan->ahead && results.device_us > 0) {
        sched_observe_gap(e->sched, plan, after_us - results.device_us - e->gap_from_us);
    }
    e->step_end_us = after_us;
    if (e->masks) {
        masks_collect(e->masks, e->n_committed, e->sched);
    }
    decode_commit(e->sched, plan, &results, after_us, &e->deltas);
    e->n_committed++;
    if (e->masks) {
        masks_begin(e->masks, e->n_committed);
    }
    e->host_us += before_us - turn_us + (clock_us() - after_us);
    engine_stats_step(&e->stats, n_tokens, e->host_us, &results);
    e->host_us = 0;
}

static void update_gauges(struct engine *e)
{
    struct sched_counts c;

    sched_counts(e->sched, &c);
    release_queue_slots(e, &c);
    engine_stats_gauges(&e->stats, &c, inbox_waiting(&e->inbox) - e->known_waiting);
}

/* Sends what the turn has produced, and frees what has ended. The counters come first:
 * read once a request has been answered, they hold all of it. */
static void reap(struct engine *e)
{
    decode_reap(e->sched, &e->deltas);
    update_gauges(e);
    output_commit(e->output);
    if (e->masks) {
        masks_reap(e->masks, e->sched);
    }
}

/* Detects a rank that failed while no step ran. */
static void check_executor(struct engine *e)
{
    struct err err;

    if (e->executor->check && e->executor->check(e->executor, &err) < 0) {
        engine_die(e, &err);
    }
}

/* Sleeps until a request, a mark or the next heartbeat, because no step runs and none
 * can be planned. Requests that wait even so (being cancelled) are looked at again
 * soon. */
static void idle(struct engine *e)
{
    const struct engine_stats *st = &e->stats;
    bool waits = atomic_load_explicit(&st->waiting, memory_order_relaxed) > 0 ||
                 atomic_load_explicit(&st->swapped, memory_order_relaxed) > 0;
    bool deferred = decode_has_more(e->sched) || !may_launch(e);

    e->step_end_us = 0;
    atomic_store(&e->busy_since, 0);
    inbox_sleep(&e->inbox, deferred             ? DEFERRED_US
                           : waits              ? RETRY_US
                           : e->executor->check ? CHECK_US
                                                : IDLE_BEAT_US);
    check_executor(e);
}

/* Whether the next step is planned when the running one has ended, although one more
 * may be launched: a step planned now would hold the requests that have arrived by now,
 * and later ones would wait for two steps. After a burst of prompts that is a step for
 * the first of them and then one for hardly more. */
static bool waits_for_prefill(struct engine *e)
{
    if (!e->executor->info.plans_behind_prefill || inflight(e) == 0) {
        return false;
    }
    const struct plan *newest = plan_at(e, e->n_launched - 1);
    return newest->n_items > newest->n_decode;
}

/* Takes requests until the next step is due; returns the time. */
static int64_t take_until_due(struct engine *e, int64_t now_us)
{
    take_requests(e, now_us);
    if (e->executor->info.depth != 1 || !sched_is_shared(e->sched, now_us)) {
        return now_us;
    }
    for (int64_t us;
         (us = launch_delay_hold_us(&e->launch_delay, now_us)) > 0 && !atomic_load(&e->stopping);
         now_us = clock_us()) {
        inbox_sleep(&e->inbox, us);
        take_requests(e, now_us);
    }
    return now_us;
}

static void engine_turn(struct engine *e)
{
    int64_t now_us = clock_us();

    atomic_store_explicit(&e->busy_since, now_us, memory_order_relaxed);
    atomic_fetch_add_explicit(&e->heartbeat, 1, memory_order_relaxed);
    now_us = take_until_due(e, now_us);
    int32_t n = waits_for_prefill(e) ? 0 : launch_step(e, now_us);
    /* what is committed below may allow another step at once, as with beams */
    bool nothing = n == 0 && inflight(e) == 0;
    if (inflight(e) > (n > 0 ? e->executor->info.depth : 0)) {
        commit_step(e, now_us);
    } else {
        e->host_us += clock_us() - now_us;
    }
    reap(e);
    kv_feed_serve(&e->kv_feed, e->sched, e->n_launched);
    if (nothing) {
        idle(e);
    }
}

/* Ends every request, including those that are being submitted concurrently. */
static void end_all_requests(struct engine *e)
{
    bool dead = atomic_load(&e->state) == HEALTH_DEAD;
    int finish = dead ? FINISH_ERROR : FINISH_ABORT;
    const char *why =
        dead ? "the device failed; the server must be restarted" : "the server was shut down";
    struct err err;
    struct results results;

    inbox_close(&e->inbox);
    if (e->masks) {
        masks_abandon(e->masks, e->n_committed, e->sched);
    }
    for (; inflight(e) > 0; e->n_committed++) {
        e->executor->wait(e->executor, &results, &err);
        decode_abandon(e->sched, plan_at(e, e->n_committed));
    }
    for (;;) {
        bool drained = inbox_drained(&e->inbox);
        take_requests(e, clock_us());
        sched_end_all(e->sched, finish, why);
        decode_give_up(e->sched, finish, why);
        reap(e);
        if (drained && !sched_has_ended(e->sched)) {
            break;
        }
        inbox_sleep(&e->inbox, RETRY_US);
    }
    atomic_store(&e->busy_since, 0);
    if (dead && e->sink->died) {
        e->sink->died(e->sink);
    }
}

void *engine_main(void *arg)
{
    struct engine *e = arg;

    e->deltas = (struct delta_out){.emit = on_delta, .take = take_deferred};
    while (!atomic_load(&e->stopping) && atomic_load(&e->state) != HEALTH_DEAD) {
        engine_turn(e);
    }
    end_all_requests(e);
    return NULL;
}
