/* Stage 4, submit: from the HTTP threads to the engine's thread. A request travels as
 * its group, allocated by the submitting thread. Invariants and choice of queue:
 * inbox.c. */
#ifndef QUIRE_ENGINE_LOOP_INBOX_H
#define QUIRE_ENGINE_LOOP_INBOX_H

#include "engine/loop/wake.h"

struct group;

struct inbox_cell {
    _Atomic uint64_t sequence; /* position + 1 once `group` may be read; see inbox.c */
    struct group *group;
};

struct inbox {
    struct inbox_cell *cell; /* [mask + 1] */
    uint64_t mask;
    int64_t max_queue;
    struct wake wake;
    atomic_bool marked;
    /* requests queued or waiting in the scheduler; + INBOX_CLOSED */
    _Alignas(64) _Atomic int64_t held;
    _Alignas(64) _Atomic uint64_t tail; /* next position to be written */
    _Alignas(64) uint64_t head;         /* next position to be read; engine's thread only */
    int64_t taken, admitted;            /* engine's thread only */
};

/* `max_queue` >= 1: requests that may wait at once. */
int inbox_init(struct inbox *b, int64_t max_queue, struct err *e);
void inbox_release(struct inbox *b);

/* Any thread: whether n groups would be queued now: 0, or what inbox_submit would
 * say. */
int inbox_check(const struct inbox *b, int32_t n, struct err *e);
/* Any thread: all n groups are queued, in order, or none: ERR_FULL; ERR_INVALID where n
 * is beyond max_queue; ERR_DRAINING once closed. The groups belong to the engine
 * then. */
int inbox_submit(struct inbox *b, struct group *const *g, int32_t n, struct err *e);
/* Any thread: some request's `cancelled` or `stop_at` was set, or the engine's own
 * state: it should look. */
void inbox_mark(struct inbox *b);
/* Any thread: a submit will follow soon; the engine gets up for it. */
void inbox_expect(struct inbox *b);
/* Any thread: no submit succeeds from now on. */
void inbox_close(struct inbox *b);

/* Engine's thread. At most `max` groups, in the order of submission. They still count
 * as waiting. */
int32_t inbox_take(struct inbox *b, struct group **ret, int32_t max);
/* n of those taken do not wait any more: they run, or ended. */
void inbox_admit(struct inbox *b, int64_t n);
/* Sleep until something is there or a mark is set, at most timeout_us; takes the mark
 * down. */
void inbox_sleep(struct inbox *b, int64_t timeout_us);
/* After inbox_close: true when no submit is on its way any more. */
bool inbox_drained(const struct inbox *b);
/* Requests queued or waiting. */
int64_t inbox_waiting(const struct inbox *b);

#endif
