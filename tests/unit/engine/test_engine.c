/* Tests the engine through its public interface, on the null executor and on one that
 * can be made to wait and to fail. */
#include "engine/engine_state.h"

#include <math.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/sim/recorder.h"

enum { PATIENCE_S = 60 };

/* ---- a controllable executor: the null one behind a gate ---- */

struct gated {
    struct executor base;
    struct executor *inner;
    sem_t gate; /* one post a wait, once `closed` */
    atomic_bool closed;
    atomic_int fail_at; /* this wait (1 is the next) reports a device error; 0: none */
    atomic_int n_waits;
    atomic_int n_launched;
    int32_t n_seqs[8]; /* of the first launches */
    int64_t full_us;   /* a launch waits so long for the device's queue */
    int64_t waited_us;
};

static int64_t gated_launch_waits_us(struct executor *x)
{
    return CONTAINER_OF(x, struct gated, base)->waited_us;
}

static int gated_launch(struct executor *x, const struct batch *b, struct err *e)
{
    struct gated *g = CONTAINER_OF(x, struct gated, base);
    int64_t begun_us = clock_us();

    while (clock_us() - begun_us < g->full_us) {
        usleep(100);
    }
    g->waited_us += clock_us() - begun_us;
    if (g->n_launched < (int)ARRAY_LEN(g->n_seqs)) {
        g->n_seqs[g->n_launched] = b->n_seqs;
    }
    g->n_launched++;
    return g->inner->launch(g->inner, b, e);
}

static int gated_wait(struct executor *x, struct results *ret, struct err *e)
{
    struct gated *g = CONTAINER_OF(x, struct gated, base);

    if (atomic_load(&g->closed)) {
        sem_wait(&g->gate);
    }
    if (atomic_load(&g->fail_at) && ++g->n_waits >= atomic_load(&g->fail_at)) {
        return err_set(e, ERR_DEVICE, "the fake device caught fire");
    }
    return g->inner->wait(g->inner, ret, e);
}

static void gated_free(struct executor *x)
{
    struct gated *g = CONTAINER_OF(x, struct gated, base);

    g->inner->free(g->inner);
    sem_destroy(&g->gate);
    free(g);
}

/* ---- an engine with a recorder ---- */

struct rig {
    struct settings settings;
    struct recorder recorder;
    struct engine *engine;
    struct gated *gated;
};

static struct settings base_settings(void)
{
    return (struct settings){
        .block_size = 16, .max_queue = 64, .step_timeout = 60, .prefix_cache = true};
}

static struct rig *rig_open_device(struct settings s, bool plans_behind_prefill)
{
    struct rig *r = calloc(1, sizeof(*r));
    struct tokenizer *t;
    struct err e;

    r->settings = s;
    recorder_init(&r->recorder);
    r->gated = calloc(1, sizeof(*r->gated));
    assert_int_equal(null_open(&r->gated->inner, &s, &e), 0);
    r->gated->base = (struct executor){.info = r->gated->inner->info,
                                       .launch = gated_launch,
                                       .wait = gated_wait,
                                       .launch_waits_us = gated_launch_waits_us,
                                       .free = gated_free};
    r->gated->base.info.plans_behind_prefill = plans_behind_prefill;
    sem_init(&r->gated->gate, 0, 0);
    assert_int_equal(tokenizer_open_bytes(&t, &e), 0);
    if (engine_open_on(&r->engine, &s, &r->gated->base, t, &r->recorder.sink, &e) != 0) {
        fail_msg("%s", e.text);
    }
    return r;
}

static struct rig *rig_open(struct settings s)
{
    return rig_open_device(s, false);
}

static void gate_close(struct rig *r)
{
    atomic_store(&r->gated->closed, true);
}

static void gate_open(struct rig *r)
{
    atomic_store(&r->gated->closed, false);
    sem_post(&r->gated->gate);
    sem_post(&r->gated->gate);
}

static void rig_close(struct rig *r)
{
    engine_free(r->engine);
    recorder_release(&r->recorder);
    free(r);
}

static struct request *make_n(struct rig *r, struct recording **rec, int32_t n_prompt,
                              int32_t max_tokens, int32_t n, int32_t best_of)
{
    struct gen_params p;
    struct request *q;
    struct err e;
    int32_t prompt[512];

    gen_params_init(&p, r->engine);
    p.max_tokens = max_tokens;
    p.n = n;
    p.best_of = best_of;
    p.seed = 99;
    for (int32_t i = 0; i < n_prompt; i++) {
        prompt[i] = 'a' + i % 26;
    }
    assert_int_equal(request_new(&q, &p, prompt, n_prompt, &e), 0);
    *rec = recording_new();
    q->user = *rec;
    return q;
}

static struct request *make(struct rig *r, struct recording **rec, int32_t n_prompt,
                            int32_t max_tokens)
{
    return make_n(r, rec, n_prompt, max_tokens, 1, 1);
}

static void done(struct request *q, struct recording *rec)
{
    request_unref(q);
    recording_free(rec);
}

/* Polls for a condition that another thread is about to establish. */
#define EVENTUALLY(condition)                                   \
    do {                                                        \
        int64_t until_us = clock_us() + PATIENCE_S * 1000000LL; \
        while (!(condition) && clock_us() < until_us)           \
            usleep(500);                                        \
        assert_true(condition);                                 \
    } while (0)

/* ---- normal operation ---- */

static void waiting_for_a_full_queue_is_no_work_of_the_host(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec;
    struct err e;
    r->gated->full_us = 50000;
    struct request *q = make(r, &rec, 4, 6);
    assert_int_equal(engine_submit(r->engine, q, &e), 0);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    EVENTUALLY(engine_active(r->engine) == 0);
    double host_s = atomic_load(&engine_stats(r->engine)->step_host_s.sum);
    assert_true(host_s > 0 && host_s < 0.5 * (double)r->gated->waited_us * 1e-6);
    done(q, rec);
    rig_close(r);
}

static void a_request_gets_its_tokens_and_an_end(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec;
    struct err e;
    struct request *q = make(r, &rec, 40, 100);
    assert_int_equal(engine_submit(r->engine, q, &e), 0);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    struct recorded_choice *c = &rec->choice[0];
    assert_int_equal(c->n_tokens, 100);
    assert_int_equal(c->text.len, 100);
    assert_int_equal(c->n_pieces, 100);
    assert_int_equal(c->finish, FINISH_LENGTH);
    assert_int_equal(rec->usage.prompt_tokens, 40);
    assert_int_equal(rec->usage.completion_tokens, 100);
    EVENTUALLY(engine_active(r->engine) == 0);
    EVENTUALLY(engine_stats(r->engine)->blocks_used == 0);
    assert_int_equal(engine_stats(r->engine)->generation_tokens, 100);
    assert_int_equal(engine_stats(r->engine)->prompt_tokens, 40);
    assert_int_equal(engine_stats(r->engine)->finished[FINISH_LENGTH], 1);
    assert_int_equal(rec->n_after_last, 0);
    done(q, rec);
    rig_close(r);
}

static void the_same_seed_gives_the_same_text_in_any_company(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.max_num_seqs = 8; /* so that some wait */
    s.kv_blocks = 40;   /* and some are preempted */
    s.max_model_len = 512;
    struct rig *r = rig_open(s);
    enum { N = 24 };
    struct request *q[N];
    struct recording *rec[N];
    struct err e;
    for (int i = 0; i < N; i++) {
        q[i] = make(r, &rec[i], 10 + 3 * i, 60 + i);
        q[i]->seed = 5;
    }
    assert_int_equal(engine_submit_all(r->engine, q, N, &e), 0);
    for (int i = 0; i < N; i++) {
        assert_true(recorder_wait(&r->recorder, rec[i], PATIENCE_S));
    }
    for (int i = 0; i < N; i++) {
        struct recording *alone;
        struct request *again = make(r, &alone, 10 + 3 * i, 60 + i);
        again->seed = 5;
        assert_int_equal(engine_submit(r->engine, again, &e), 0);
        assert_true(recorder_wait(&r->recorder, alone, PATIENCE_S));
        assert_int_equal(alone->choice[0].text.len, rec[i]->choice[0].text.len);
        assert_memory_equal(alone->choice[0].text.data, rec[i]->choice[0].text.data,
                            alone->choice[0].text.len);
        done(again, alone);
        done(q[i], rec[i]);
    }
    assert_true(engine_stats(r->engine)->preempt_recompute > 0);
    EVENTUALLY(engine_stats(r->engine)->blocks_used == 0);
    rig_close(r);
}

static void samples_of_one_prompt_differ_and_best_of_ranks(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec, *ranked;
    struct err e;
    struct request *q = make_n(r, &rec, 33, 40, 4, 4), *b = make_n(r, &ranked, 20, 10, 2, 5);
    assert_int_equal(engine_submit(r->engine, q, &e), 0);
    assert_int_equal(engine_submit(r->engine, b, &e), 0);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    assert_true(recorder_wait(&r->recorder, ranked, PATIENCE_S));
    for (int i = 0; i < 4; i++) {
        assert_int_equal(rec->choice[i].n_tokens, 40);
        for (int k = 0; k < i; k++) {
            assert_memory_not_equal(rec->choice[i].text.data, rec->choice[k].text.data, 40);
        }
    }
    assert_int_equal(rec->usage.completion_tokens, 160);
    assert_int_equal(ranked->choice[1].n_pieces, 1);
    assert_int_equal(ranked->choice[2].n_pieces, 0);
    assert_int_equal(ranked->usage.completion_tokens, 50); /* of all five */
    assert_int_equal(b->course.n_sampled, 50);
    assert_int_equal(q->course.n_sampled, 160);
    EVENTUALLY(engine_stats(r->engine)->blocks_used == 0);
    done(b, ranked);
    done(q, rec);
    rig_close(r);
}

/* The sequences of the first two steps, where three more requests arrive after the
 * first was launched and before it ends. */
static void burst(bool plans_behind_prefill, int32_t ret[2])
{
    struct rig *r = rig_open_device(base_settings(), plans_behind_prefill);
    struct recording *rec[4];
    struct request *q[4];
    struct err e;
    gate_close(r);
    for (int i = 0; i < 4; i++) {
        q[i] = make(r, &rec[i], 20, 4);
        assert_int_equal(engine_submit(r->engine, q[i], &e), 0);
        EVENTUALLY(r->gated->n_launched >= (plans_behind_prefill ? 1 : 2));
    }
    gate_open(r);
    for (int i = 0; i < 4; i++) {
        assert_true(recorder_wait(&r->recorder, rec[i], PATIENCE_S));
    }
    EVENTUALLY(engine_active(r->engine) == 0);
    memcpy(ret, r->gated->n_seqs, 2 * sizeof(*ret));
    for (int i = 0; i < 4; i++) {
        done(q[i], rec[i]);
    }
    rig_close(r);
}

static void what_arrives_during_prefill_joins_the_next_step(void **state)
{
    (void)state;
    int32_t n_seqs[2];
    burst(true, n_seqs);
    assert_int_equal(n_seqs[0], 1);
    assert_int_equal(n_seqs[1], 4);
    burst(false, n_seqs);
    assert_int_equal(n_seqs[0], 1);
    assert_int_equal(n_seqs[1], 1);
}

static void a_stop_string_ends_the_sequence_in_the_engine_too(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec;
    struct err e;
    struct gen_params p;
    struct request *q;
    gen_params_init(&p, r->engine);
    p.max_tokens = 4000;
    p.seed = 99;
    p.stop = calloc(1, sizeof(char *));
    p.stop[0] = strdup("t");
    p.n_stop = 1;
    assert_int_equal(
        request_new(&q, &p, (const int32_t[]){'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}, 8, &e), 0);
    q->user = rec = recording_new();
    gate_close(r);
    assert_int_equal(engine_submit(r->engine, q, &e), 0);
    for (int32_t n = 1; !recorder_ended(&r->recorder, rec) && n < 2000;
         n++) { /* a step at a time, so that it cannot run ahead */
        sem_post(&r->gated->gate);
        usleep(500);
    }
    gate_open(r);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    struct recorded_choice *c = &rec->choice[0];
    assert_int_equal(c->finish, FINISH_STOP);
    assert_null(c->text.len ? memchr(c->text.data, 't', c->text.len) : NULL);
    assert_int_equal(rec->usage.completion_tokens, (int)c->text.len + 1);
    EVENTUALLY(engine_stats(r->engine)->running == 0);
    assert_true(engine_stats(r->engine)->steps < 2000);
    assert_int_equal(rec->n_after_end, 0);
    done(q, rec);
    rig_close(r);
}

/* ---- refusals ---- */

static void what_can_never_fit_is_refused_with_the_numbers(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.kv_blocks = 4;
    s.max_num_seqs = 2;
    struct rig *r = rig_open(s);
    struct recording *rec;
    struct err e;
    struct request *q = make(r, &rec, 60, 10);
    assert_int_equal(engine_submit(r->engine, q, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "70"));
    assert_non_null(strstr(e.text, "64"));
    assert_int_equal(engine_active(r->engine), 0);
    assert_int_equal(q->refs, 1);
    q->params.max_tokens = 0;
    assert_int_equal(engine_submit(r->engine, q, &e), ERR_INVALID);
    assert_string_equal(e.param, "max_tokens");
    q->params.max_tokens = 1;
    q->params.n = q->params.best_of = 3;
    assert_int_equal(engine_submit(r->engine, q, &e), ERR_INVALID);
    q->params.n = q->params.best_of = 1;
    q->prompt[7] = 256;
    assert_int_equal(engine_submit(r->engine, q, &e), ERR_INVALID);
    assert_string_equal(e.param, "prompt");
    q->prompt[7] = 255;
    assert_int_equal(engine_submit(r->engine, q, &e), 0);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    done(q, rec);
    rig_close(r);
}

static void a_full_queue_refuses_a_set_whole(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.max_queue = 4;
    s.max_num_seqs = 1;
    struct rig *r = rig_open(s);
    struct request *q[6];
    struct recording *rec[6];
    struct err e;
    gate_close(r);
    for (int i = 0; i < 6; i++) {
        q[i] = make(r, &rec[i], 8, 20);
    }
    assert_int_equal(engine_submit(r->engine, q[0], &e), 0);
    /* it runs: its place in the queue is free again */
    EVENTUALLY(engine_stats(r->engine)->running == 1);
    assert_int_equal(engine_submit_all(r->engine, &q[1], 3, &e), 0);
    assert_int_equal(engine_submit_all(r->engine, &q[4], 2, &e), ERR_FULL);
    assert_int_equal(engine_submit(r->engine, q[4], &e), 0);
    assert_int_equal(engine_submit(r->engine, q[5], &e), ERR_FULL);
    assert_int_equal(engine_active(r->engine), 5);
    gate_open(r);
    for (int i = 0; i < 5; i++) {
        assert_true(recorder_wait(&r->recorder, rec[i], PATIENCE_S));
    }
    assert_int_equal(rec[5]->choice[0].n_pieces, 0);
    for (int i = 0; i < 6; i++) {
        done(q[i], rec[i]);
    }
    rig_close(r);
}

/* ---- cancellation, timeouts, shutdown ---- */

static void a_cancelled_request_frees_its_blocks(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.max_num_seqs = 1;
    struct rig *r = rig_open(s);
    struct recording *running_rec, *waiting_rec;
    struct err e;
    struct request *running = make(r, &running_rec, 8, 4000),
                   *waiting = make(r, &waiting_rec, 8, 4000);
    gate_close(r);
    assert_int_equal(engine_submit(r->engine, running, &e), 0);
    assert_int_equal(engine_submit(r->engine, waiting, &e), 0);
    engine_cancel(r->engine, running);
    engine_cancel(r->engine, waiting);
    gate_open(r);
    assert_true(recorder_wait(&r->recorder, running_rec, PATIENCE_S));
    assert_true(recorder_wait(&r->recorder, waiting_rec, PATIENCE_S));
    assert_int_equal(running_rec->choice[0].finish, FINISH_ABORT);
    assert_int_equal(waiting_rec->choice[0].finish, FINISH_ABORT);
    EVENTUALLY(engine_stats(r->engine)->blocks_used == 0);
    EVENTUALLY(engine_active(r->engine) == 0);
    done(running, running_rec);
    done(waiting, waiting_rec);
    rig_close(r);
}

static void timeouts_end_what_waits_and_what_runs(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.max_num_seqs = 1;
    s.queue_timeout = 1; /* more than it takes to begin on a loaded machine */
    s.request_timeout = 3;
    struct rig *r = rig_open(s);
    struct recording *runs_rec, *waits_rec;
    struct err e;
    struct request *runs = make(r, &runs_rec, 8, 30000), *waits = make(r, &waits_rec, 8, 30000);
    gate_close(r); /* a step at a time, so that neither comes to its end before its timeout */
    assert_int_equal(engine_submit(r->engine, runs, &e), 0);
    assert_int_equal(engine_submit(r->engine, waits, &e), 0);
    for (int i = 0; i < 20000 && !(recorder_ended(&r->recorder, waits_rec) &&
                                   recorder_ended(&r->recorder, runs_rec));
         i++) {
        sem_post(&r->gated->gate);
        usleep(200);
    }
    gate_open(r);
    assert_true(recorder_wait(&r->recorder, waits_rec, PATIENCE_S));
    assert_true(recorder_wait(&r->recorder, runs_rec, PATIENCE_S));
    assert_int_equal(waits_rec->choice[0].finish, FINISH_ABORT);
    assert_non_null(strstr(waits_rec->choice[0].error, "queue_timeout"));
    assert_int_equal(runs_rec->choice[0].finish, FINISH_ABORT);
    assert_non_null(strstr(runs_rec->choice[0].error, "request_timeout"));
    done(runs, runs_rec);
    done(waits, waits_rec);
    rig_close(r);
}

static void draining_ends_what_runs_and_takes_nothing_new(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec, *late_rec;
    struct err e;
    struct request *q = make(r, &rec, 8, 200), *late = make(r, &late_rec, 8, 8);
    gate_close(r);
    assert_int_equal(engine_submit(r->engine, q, &e), 0);
    engine_drain(r->engine);
    assert_int_equal(engine_health(r->engine), HEALTH_DRAINING);
    assert_int_equal(engine_submit(r->engine, late, &e), ERR_DRAINING);
    gate_open(r);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    assert_int_equal(rec->choice[0].n_tokens, 200);
    EVENTUALLY(engine_active(r->engine) == 0);
    done(q, rec);
    done(late, late_rec);
    rig_close(r);
}

static void freeing_a_busy_engine_ends_every_request(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.max_num_seqs = 4;
    struct rig *r = rig_open(s);
    struct request *q[16];
    struct recording *rec[16];
    struct err e;
    for (int i = 0; i < 16; i++) {
        q[i] = make(r, &rec[i], 8, 30000);
    }
    assert_int_equal(engine_submit_all(r->engine, q, 16, &e), 0);
    assert_true(recorder_wait_tokens(&r->recorder, rec[0], 10, PATIENCE_S));
    engine_free(r->engine);
    for (int i = 0; i < 16; i++) {
        assert_true(rec[i]->last);
        assert_int_equal(rec[i]->choice[0].finish, FINISH_ABORT);
        assert_int_equal(rec[i]->choice[0].n_ends, 1);
        assert_int_equal(q[i]->refs, 1);
        done(q[i], rec[i]);
    }
    recorder_release(&r->recorder);
    free(r);
}

/* ---- device errors ---- */

static void a_device_error_ends_everything_and_stays(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.max_num_seqs = 2;
    struct rig *r = rig_open(s);
    struct request *q[4];
    struct recording *rec[4], *late_rec;
    struct err e;
    atomic_store(&r->gated->fail_at, 6);
    for (int i = 0; i < 4; i++) {
        q[i] = make(r, &rec[i], 8, 1000);
    }
    struct request *late = make(r, &late_rec, 8, 8);
    assert_int_equal(engine_submit_all(r->engine, q, 4, &e), 0);
    for (int i = 0; i < 4; i++) {
        assert_true(recorder_wait(&r->recorder, rec[i], PATIENCE_S));
        assert_int_equal(rec[i]->choice[0].finish, FINISH_ERROR);
        assert_non_null(strstr(rec[i]->choice[0].error, "device failed"));
        done(q[i], rec[i]);
    }
    assert_int_equal(engine_health(r->engine), HEALTH_DEAD);
    assert_non_null(strstr(engine_death(r->engine), "caught fire"));
    assert_int_equal(engine_submit(r->engine, late, &e), ERR_DEVICE);
    EVENTUALLY(engine_active(r->engine) == 0);
    done(late, late_rec);
    rig_close(r);
}

static void a_step_that_does_not_end_is_seen_from_outside(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.step_timeout = 0.05;
    struct rig *r = rig_open(s);
    struct recording *rec;
    struct err e;
    struct request *q = make(r, &rec, 8, 10);
    usleep(200000);
    assert_int_equal(engine_health(r->engine), HEALTH_READY); /* idle is not stalled */
    gate_close(r);
    assert_int_equal(engine_submit(r->engine, q, &e), 0);
    EVENTUALLY(engine_health(r->engine) == HEALTH_STALLED);
    uint64_t beat = engine_heartbeat(r->engine);
    usleep(50000);
    assert_int_equal(engine_heartbeat(r->engine), beat);
    gate_open(r);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    EVENTUALLY(engine_health(r->engine) == HEALTH_READY);
    EVENTUALLY(engine_heartbeat(r->engine) > beat);
    done(q, rec);
    rig_close(r);
}

/* ---- from several threads ---- */

enum { CLIENTS = 4, ROUNDS = 60 };

struct client {
    struct rig *rig;
    pthread_t thread;
    int id, n_full;
};

/* Submits, cancels every third, waits for the end. */
static void *client_main(void *arg)
{
    struct client *c = arg;

    for (int i = 0; i < ROUNDS; i++) {
        struct recording *rec;
        struct err e;
        struct request *q = make(c->rig, &rec, 1 + (i * 7 + c->id) % 60, 1 + (i * 13) % 120);
        int rc = engine_submit(c->rig->engine, q, &e);
        if (rc == 0 && i % 3 == 0) {
            engine_cancel(c->rig->engine, q);
        }
        if (rc == 0 && !recorder_wait(&c->rig->recorder, rec, PATIENCE_S)) {
            abort();
        }
        c->n_full += rc == ERR_FULL;
        if (rc == 0 && i % 3 != 0 && rec->choice[0].n_tokens != 1 + (i * 13) % 120) {
            abort();
        }
        done(q, rec);
    }
    return NULL;
}

static void clients_on_many_threads(void **state)
{
    (void)state;
    struct settings s = base_settings();
    s.max_num_seqs = 3;
    s.kv_blocks = 24;
    struct rig *r = rig_open(s);
    struct client c[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        c[i] = (struct client){.rig = r, .id = i};
        assert_int_equal(pthread_create(&c[i].thread, NULL, client_main, &c[i]), 0);
    }
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(c[i].thread, NULL);
        assert_int_equal(c[i].n_full, 0);
    }
    EVENTUALLY(engine_active(r->engine) == 0);
    EVENTUALLY(engine_stats(r->engine)->blocks_used == 0);
    rig_close(r);
}

static void null_is_a_model_name(void **state)
{
    (void)state;
    struct settings s = base_settings();
    struct recorder recorder;
    struct engine *engine;
    struct engine_info info;
    struct err e;
    s.model = "null";
    recorder_init(&recorder);
    assert_int_equal(engine_open(&engine, &s, &recorder.sink, &e), 0);
    engine_info(engine, &info);
    assert_string_equal(info.model_name, "null");
    assert_int_equal(info.vocab, 256);
    assert_int_equal(engine_health(engine), HEALTH_READY);
    int32_t *ids, n;
    assert_int_equal(engine_encode(engine, "abc", 3, true, 10, &ids, &n, &e), 0);
    assert_int_equal(n, 3);
    free(ids);
    engine_free(engine);
    s.model = "null:fast";
    assert_int_equal(engine_open(&engine, &s, &recorder.sink, &e), ERR_INVALID);
    s.model = "/nowhere/at all";
    assert_int_equal(engine_open(&engine, &s, &recorder.sink, &e), ERR_NOT_FOUND);
    recorder_release(&recorder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_gets_its_tokens_and_an_end),
        cmocka_unit_test(waiting_for_a_full_queue_is_no_work_of_the_host),
        cmocka_unit_test(the_same_seed_gives_the_same_text_in_any_company),
        cmocka_unit_test(samples_of_one_prompt_differ_and_best_of_ranks),
        cmocka_unit_test(what_arrives_during_prefill_joins_the_next_step),
        cmocka_unit_test(a_stop_string_ends_the_sequence_in_the_engine_too),
        cmocka_unit_test(what_can_never_fit_is_refused_with_the_numbers),
        cmocka_unit_test(a_full_queue_refuses_a_set_whole),
        cmocka_unit_test(a_cancelled_request_frees_its_blocks),
        cmocka_unit_test(timeouts_end_what_waits_and_what_runs),
        cmocka_unit_test(draining_ends_what_runs_and_takes_nothing_new),
        cmocka_unit_test(freeing_a_busy_engine_ends_every_request),
        cmocka_unit_test(a_device_error_ends_everything_and_stays),
        cmocka_unit_test(a_step_that_does_not_end_is_seen_from_outside),
        cmocka_unit_test(clients_on_many_threads),
        cmocka_unit_test(null_is_a_model_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
