/* Stage 4, submit: the queue from the HTTP threads to the engine's thread. A request
 * travels as its group, allocated by the submitting thread. inbox.c has the invariants
 * and the reasons for this kind of queue. */
#ifndef QUIRE_ENGINE_LOOP_INBOX_H
#define QUIRE_ENGINE_LOOP_INBOX_H

#include "engine/loop/wake.h"

struct group;

struct inbox_cell {
    _Atomic uint64_t sequence; /* position + 1 once `group` may be read */
    struct group *group;       /* the engine's once queued */
};

struct inbox {
    struct inbox_cell *cell; /* [mask + 1] */
    uint64_t mask;           /* capacity - 1; the capacity is a power of two */
    int64_t max_queue;       /* requests that may wait, here and in the scheduler */
    struct wake wake;        /* of the engine's thread */
    atomic_bool marked;      /* inbox_mark was called since the engine last slept */
    /* requests queued or waiting in the scheduler, plus INBOX_CLOSED once closed */
    _Alignas(64) _Atomic int64_t held;
    _Alignas(64) _Atomic uint64_t tail; /* next position to be written */
    _Alignas(64) uint64_t head;         /* next position to be read; the engine's thread only */
    /* groups taken; groups that wait no longer; the engine's thread only */
    int64_t taken, admitted;
};

/* `max_queue` >= 1: requests that may wait at a time. */
int inbox_init(struct inbox *b, int64_t max_queue, struct err *e);
void inbox_release(struct inbox *b);

/* Any thread: 0 if n groups would be queued at this moment, else inbox_submit's
 * error. */
int inbox_check(const struct inbox *b, int32_t n, struct err *e);
/* Any thread: queues all n groups in order, or none: ERR_FULL; ERR_INVALID if n is more
 * than max_queue; ERR_DRAINING once closed. On success the engine owns the groups. */
int inbox_submit(struct inbox *b, struct group *const *g, int32_t n, struct err *e);
/* Any thread: wakes the engine because a request's `cancelled` or `stop_at` or the
 * engine's own state has changed. */
void inbox_mark(struct inbox *b);
/* Any thread: a submit will follow soon; wakes a sleeping engine early. */
void inbox_expect(struct inbox *b);
/* Any thread: refuses every submit from now on. */
void inbox_close(struct inbox *b);

/* The engine's thread: takes at most `max` groups in order of submission. They still
 * count as waiting. */
int32_t inbox_take(struct inbox *b, struct group **ret, int32_t max);
/* n of the groups taken wait no longer: they run or have ended. */
void inbox_admit(struct inbox *b, int64_t n);
/* Sleeps until a group or a mark arrives, at most timeout_us; clears the mark. */
void inbox_sleep(struct inbox *b, int64_t timeout_us);
/* After inbox_close: whether every submit that had begun is taken. */
bool inbox_drained(const struct inbox *b);
/* Requests queued or waiting. */
int64_t inbox_waiting(const struct inbox *b);

#endif
