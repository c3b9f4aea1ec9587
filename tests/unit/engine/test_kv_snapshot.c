/* Tests snapshots of the KV pool: they are consistent, list what happened, and never
 * wait for a step. */
#include "engine/engine_state.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/kv_snapshot.h"
#include "tests/sim/recorder.h"

enum { PATIENCE_US = 60000000, BLOCKS = 1024 };

struct rig {
    struct recorder recorder;
    struct engine *engine;
    struct kv_snapshot *snapshot;
    struct recording *recording;
    struct request *request;
};

static void rig_open(struct rig *r, char *model)
{
    struct settings s = {.model = model,
                         .block_size = 4,
                         .kv_blocks = BLOCKS,
                         .max_queue = 8,
                         .step_timeout = 60,
                         .prefix_cache = true,
                         .max_num_seqs = 8};
    struct err e;

    *r = (struct rig){0};
    recorder_init(&r->recorder);
    if (engine_open(&r->engine, &s, &r->recorder.sink, &e) != 0) {
        fail_msg("%s", e.text);
    }
    assert_int_equal(kv_snapshot_new(&r->snapshot, r->engine, &e), 0);
}

/* Three samples of a prompt that ends inside a block. */
static void rig_submit(struct rig *r, int32_t max_tokens)
{
    struct gen_params p;
    struct err e;
    int32_t prompt[10];

    gen_params_init(&p, r->engine);
    p.max_tokens = max_tokens;
    p.n = p.best_of = 3;
    for (int32_t i = 0; i < 10; i++) {
        prompt[i] = 'a' + i;
    }
    assert_int_equal(request_new(&r->request, &p, prompt, 10, &e), 0);
    strcpy(r->request->id, "a");
    r->recording = recording_new();
    r->request->user = r->recording;
    r->request->arrival_us = clock_us();
    if (engine_submit(r->engine, r->request, &e) != 0) {
        fail_msg("%s", e.text);
    }
}

static void rig_close(struct rig *r)
{
    engine_free(r->engine);
    kv_snapshot_free(r->snapshot);
    if (r->request) {
        request_unref(r->request);
        recording_free(r->recording);
    }
    recorder_release(&r->recorder);
}

static void take(struct rig *r)
{
    struct err e;

    if (engine_kv_snapshot(r->engine, r->snapshot, PATIENCE_US, &e) != 0) {
        fail_msg("%s", e.text);
    }
}

/* Block counts equal the tables' references, and the totals add up. */
static void check_counts(const struct kv_snapshot *p)
{
    int32_t count[BLOCKS] = {0}, used = 0, cached = 0;

    for (int32_t i = 0; i < p->n_entries; i++) {
        count[p->entry[i]]++;
    }
    for (int32_t b = 0; b < p->n_blocks; b++) {
        bool held = p->block[b] != KV_FREE && p->block[b] != KV_CACHED;
        assert_int_equal(held ? p->block[b] : 0, count[b]);
        used += held;
        cached += p->block[b] == KV_CACHED;
    }
    assert_int_equal(used, p->n_used);
    assert_int_equal(cached, p->n_cached);
}

static void a_snapshot_is_consistent_and_lists_copies(void **state)
{
    (void)state;
    struct rig r;
    int32_t copies = 0;
    rig_open(&r, "null:50000");
    take(&r);
    assert_int_equal(r.snapshot->n_blocks, BLOCKS);
    assert_int_equal(r.snapshot->n_used + r.snapshot->n_groups + r.snapshot->n_events, 0);
    rig_submit(&r, 1000); /* fifty seconds unless cancelled */
    int64_t end_us = clock_us() + PATIENCE_US;
    do {
        take(&r);
        check_counts(r.snapshot);
        for (int32_t i = 0; i < r.snapshot->n_events; i++) {
            copies += r.snapshot->event[i].kind == KV_COPY &&
                      r.snapshot->event[i].from != r.snapshot->event[i].to;
        }
    } while ((r.snapshot->n_seqs < 3 || copies < 2 || r.snapshot->seq[0].n_tokens < 15) &&
             clock_us() < end_us);
    assert_int_equal(copies, 2); /* of three holders of the prompt's last block two copy it */
    const struct kv_group *g = &r.snapshot->group[0];
    assert_int_equal(r.snapshot->n_groups, 1);
    assert_int_equal(g->state, KV_RUNNING);
    assert_int_equal(g->tag, 0xe40c292c); /* FNV-1a of "a" */
    assert_int_equal(g->n_prompt, 10);
    assert_int_equal(g->n_seqs, 3);
    /* the first is shared */
    assert_int_equal(r.snapshot->block[r.snapshot->entry[r.snapshot->seq[0].first_entry]], 3);
    engine_cancel(r.engine, r.request);
    assert_true(recorder_wait(&r.recorder, r.recording, 60));
    do {
        take(&r);
    } while (r.snapshot->n_used > 0 && clock_us() < end_us);
    assert_int_equal(r.snapshot->n_groups, 0);
    assert_true(r.snapshot->n_cached > 0);
    assert_true(r.request->course.prefill_us > 0 && r.request->course.decode_us > 0);
    rig_close(&r);
}

static void a_long_step_does_not_hold_an_observer(void **state)
{
    (void)state;
    struct rig r;
    struct err e;
    int rc = 0;
    rig_open(&r, "null:1000000");
    rig_submit(&r, 30);
    for (int i = 0; i < 1000 && rc == 0; i++) {
        rc = engine_kv_snapshot(r.engine, r.snapshot, 1000, &e);
    }
    assert_int_equal(rc, ERR_TIMEOUT);
    engine_cancel(r.engine, r.request);
    take(&r); /* the next one is served even so */
    rig_close(&r);
}

static void events_beyond_the_bound_are_counted(void **state)
{
    (void)state;
    struct kv_feed w = {0};
    struct block_copy copy[400];
    for (int32_t i = 0; i < 400; i++) {
        copy[i] = (struct block_copy){.src = i, .dst = i + 1};
    }
    struct plan p = {.copy = copy,
                     .n_copy = 300,
                     .swap_out = copy,
                     .n_swap_out = 2,
                     .swap_in = copy,
                     .n_swap_in = 400};
    kv_feed_record(&w, &p);
    assert_int_equal(w.n_events, KV_SNAPSHOT_EVENTS);
    assert_int_equal(w.events_lost, 702 - KV_SNAPSHOT_EVENTS);
    assert_int_equal(w.event[1].kind, KV_SWAP_OUT);
    assert_int_equal(w.event[2].kind, KV_SWAP_IN);
    assert_int_equal(w.event[KV_SNAPSHOT_EVENTS - 1].kind, KV_COPY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_snapshot_is_consistent_and_lists_copies),
        cmocka_unit_test(a_long_step_does_not_hold_an_observer),
        cmocka_unit_test(events_beyond_the_bound_are_counted),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
