/* A ring with one writer and one reader, in cells of half a cache line.
 *
 * A delta takes one cell, plus one for every four of its top log-probabilities. The
 * writer advances its tail privately and publishes it once a step (output_commit), so
 * the reader sees whole steps, wakes once for each, and calls sink->flush once for all
 * that it found. When the output side lags, several steps gather: flushes become rarer,
 * pieces do not change. The writer never waits: it checks for room before it has
 * anything to push (output_free_cells), and plans no step whose deltas might not fit.
 * Nothing on the reader's side waits for a client, so cells always become free.
 *
 * Waking the output thread takes longer than emitting a token. So while that thread
 * sleeps, the writer itself empties the ring of a step of one or two sequences;
 * whichever of the two holds `reader_lock` is the reader. */
#include "engine/output/output.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop/wake.h"

enum {
    TOPS_PER_CELL = 4, /* top log-probabilities */
    RING_MIN_CELLS = 1 << 14,
    /* emitted by the writer itself: the tokens of two sequences and their ends */
    INLINE_CELLS = 4,
};

/* Of a delta what its kind uses. No two neighbours are neighbours in struct delta, in
 * their order: the compiler would copy them with one load, which waits until the stores
 * of both, a moment ago, have ended. */
struct record {
    struct request *request;
    union {
        struct {
            int32_t n_top;
            float logprob;
        }; /* of a token */
        const char *error; /* of an end */
    };
    int32_t choice;
    int32_t cached_tokens;
    int32_t id; /* token; of an end its stop token */
    int8_t kind;
    bool is_stop;
    int8_t finish;
    bool drafted;
};

union cell {
    struct record record;
    struct {
        int32_t token[TOPS_PER_CELL];
        float logprob[TOPS_PER_CELL];
    } tops;
};
_Static_assert(sizeof(union cell) == 32, "a cell is half a cache line");
_Static_assert(OUTPUT_DELTA_CELLS >= 1 + (LIMIT_LOGPROBS + TOPS_PER_CELL - 1) / TOPS_PER_CELL,
               "of the largest delta");

struct output_stage {
    union cell *cell; /* [mask + 1] */
    uint64_t mask;
    struct output_processor proc;
    struct wake wake;
    pthread_t thread;
    pthread_mutex_t reader_lock; /* held by the reader: the output thread or the writer */
    atomic_bool stopping;
    uint64_t tail, head_seen; /* the writer's: next cell to write, `head` as last read */
    _Alignas(64) _Atomic uint64_t published; /* the reader may read up to here */
    _Alignas(64) _Atomic uint64_t head;      /* the writer may write up to head + mask + 1 */
};

/* ---- the engine's side ---- */

/* Publishes the tail; false: nothing was new. */
static bool ring_publish(struct output_stage *o, uint64_t tail)
{
    if (tail == atomic_load_explicit(&o->published, memory_order_relaxed)) {
        return false;
    }
    atomic_store(&o->published, tail);
    return true;
}

int64_t output_free_cells(struct output_stage *o)
{
    o->head_seen = atomic_load_explicit(&o->head, memory_order_acquire);
    return (int64_t)(o->mask + 1 - (o->tail - o->head_seen));
}

int64_t output_cells(const struct output_stage *o)
{
    return (int64_t)o->mask + 1;
}

bool output_passed(const struct output_stage *o, uint64_t mark)
{
    return atomic_load_explicit(&o->head, memory_order_relaxed) >= mark;
}

uint64_t output_mark(const struct output_stage *o)
{
    return o->tail;
}

static bool is_end(int32_t kind)
{
    return kind == DELTA_FINISH || kind == DELTA_END;
}

void output_push(struct output_stage *o, const struct delta *d)
{
    assert(o->tail - o->head_seen + OUTPUT_DELTA_CELLS <= o->mask + 1 ||
           output_free_cells(o) >= OUTPUT_DELTA_CELLS);
    struct record *r = &o->cell[o->tail++ & o->mask].record;
    r->request = d->request;
    r->choice = d->choice;
    r->cached_tokens = d->cached_tokens;
    r->kind = (int8_t)d->kind;
    r->finish = (int8_t)d->finish;
    r->is_stop = d->is_stop;
    r->drafted = d->drafted;
    if (is_end(d->kind)) {
        r->error = d->error;
        r->id = d->stop_token;
        return;
    }
    int32_t n_top = MIN(d->n_top, LIMIT_LOGPROBS);
    r->id = d->token;
    r->n_top = n_top;
    r->logprob = d->logprob;
    for (int32_t i = 0; i < n_top; i += TOPS_PER_CELL) {
        union cell *c = &o->cell[o->tail++ & o->mask];
        size_t n = (size_t)MIN(TOPS_PER_CELL, n_top - i);
        memcpy(c->tops.token, d->top_token + i, n * sizeof(int32_t));
        memcpy(c->tops.logprob, d->top_logprob + i, n * sizeof(float));
    }
}

/* ---- the reader ---- */

/* A delta read from the ring, with memory for its arrays. */
struct read_delta {
    struct delta d;
    int32_t top_token[LIMIT_LOGPROBS];
    float top_logprob[LIMIT_LOGPROBS];
};

/* Reads the delta at `at`; returns where the next one begins. */
static uint64_t ring_read(const struct output_stage *o, uint64_t at, struct read_delta *ret)
{
    const struct record *r = &o->cell[at++ & o->mask].record;

    ret->d = (struct delta){.request = r->request,
                            .kind = r->kind,
                            .choice = r->choice,
                            .token = -1,
                            .finish = r->finish,
                            .is_stop = r->is_stop,
                            .drafted = r->drafted,
                            .stop_token = -1,
                            .cached_tokens = r->cached_tokens};
    if (is_end(r->kind)) {
        ret->d.stop_token = r->id;
        ret->d.error = r->error;
        return at;
    }
    ret->d.token = r->id;
    ret->d.logprob = r->logprob;
    ret->d.n_top = r->n_top;
    ret->d.top_token = ret->top_token;
    ret->d.top_logprob = ret->top_logprob;
    for (int32_t i = 0; i < ret->d.n_top; i += TOPS_PER_CELL) {
        const union cell *c = &o->cell[at++ & o->mask];
        size_t n = (size_t)MIN(TOPS_PER_CELL, ret->d.n_top - i);
        memcpy(ret->top_token + i, c->tops.token, n * sizeof(int32_t));
        memcpy(ret->top_logprob + i, c->tops.logprob, n * sizeof(float));
    }
    return at;
}

/* Emits the deltas in [at, end), reading one ahead, so that a choice's end can leave
 * with the token before it. */
static void emit_run(struct output_stage *o, uint64_t at, uint64_t end)
{
    struct read_delta two[2];
    int32_t cur = 0;
    uint64_t after = ring_read(o, at, &two[cur]); /* where the delta after `cur` begins */

    while (at < end) {
        bool more = after < end;
        uint64_t after_next = more ? ring_read(o, after, &two[!cur]) : after;
        int taken = emit_delta(&o->proc, &two[cur].d, more ? &two[!cur].d : NULL);
        at = after;
        after = after_next;
        cur = !cur;
        if (taken == 2) {
            at = after;
            if (at < end) {
                after = ring_read(o, at, &two[cur]);
            }
        }
        atomic_store_explicit(&o->head, at, memory_order_release);
    }
}

/* Emits everything published. The caller holds `reader_lock`. */
static void drain(struct output_stage *o)
{
    uint64_t at = atomic_load_explicit(&o->head, memory_order_relaxed),
             end = atomic_load(&o->published);

    if (at == end) {
        return;
    }
    o->proc.now_us = clock_us();
    emit_run(o, at, end);
    o->proc.sink->flush(o->proc.sink);
}

void output_commit(struct output_stage *o)
{
    if (!ring_publish(o, o->tail)) {
        return;
    }
    bool few = o->tail - atomic_load_explicit(&o->head, memory_order_relaxed) <= INLINE_CELLS;
    if (few && wake_is_asleep(&o->wake) && pthread_mutex_trylock(&o->reader_lock) == 0) {
        drain(o);
        pthread_mutex_unlock(&o->reader_lock);
    } else {
        wake_post(&o->wake);
    }
}

static bool output_has_work(void *ctx)
{
    struct output_stage *o = ctx;

    return atomic_load(&o->stopping) ||
           atomic_load(&o->published) != atomic_load_explicit(&o->head, memory_order_relaxed);
}

static void *output_main(void *arg)
{
    struct output_stage *o = arg;

    for (;;) {
        bool stopping = atomic_load(&o->stopping);
        pthread_mutex_lock(&o->reader_lock);
        drain(o);
        pthread_mutex_unlock(&o->reader_lock);
        if (stopping) {
            return NULL;
        }
        wake_sleep(&o->wake, output_has_work, o, -1);
    }
}

/* ---- start and stop ---- */

int output_open(struct output_stage **ret, const struct output_processor *proc, int64_t min_cells,
                struct err *e)
{
    struct output_stage *o = aligned_alloc(64, (sizeof(*o) + 63) / 64 * 64);

    if (!o) {
        return err_nomem(e, "the output stage");
    }
    memset(o, 0, sizeof(*o));
    o->proc = *proc;
    o->wake.fd = -1;
    pthread_mutex_init(&o->reader_lock, NULL);
    uint64_t cap = RING_MIN_CELLS;
    while (cap < (uint64_t)min_cells) {
        cap *= 2;
    }
    o->mask = cap - 1;
    o->cell = aligned_alloc(64, cap * sizeof(union cell));
    int rc = o->cell ? wake_init(&o->wake, e) : err_nomem(e, "the output ring");
    if (rc == 0 && pthread_create(&o->thread, NULL, output_main, o) != 0) {
        rc = err_set(e, ERR_IO, "cannot start the output thread");
    }
    if (rc < 0) {
        wake_release(&o->wake);
        pthread_mutex_destroy(&o->reader_lock);
        free(o->cell);
        free(o);
        return rc;
    }
    pthread_setname_np(o->thread, "quire-output");
    *ret = o;
    return 0;
}

void output_free(struct output_stage *o)
{
    if (!o) {
        return;
    }
    output_commit(o);
    atomic_store(&o->stopping, true);
    wake_post(&o->wake);
    pthread_join(o->thread, NULL);
    wake_release(&o->wake);
    pthread_mutex_destroy(&o->reader_lock);
    free(o->cell);
    free(o);
}
