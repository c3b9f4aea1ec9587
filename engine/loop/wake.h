/* Wakes one sleeping thread through an eventfd, which is written only while its reader
 * sleeps.
 *
 * The reader sets `asleep`, looks for work once more, and only then polls; a poster
 * makes its work visible, and only then looks at `asleep`. Both sides are sequentially
 * consistent, so one of them always sees the other: no wake-up is lost, and a busy
 * reader costs its posters one load and no system call.
 *
 * Waking a thread takes tens of microseconds, so a poster may announce a post
 * (wake_expect): the reader then wakes up early and spins briefly, unless recent
 * announcements were false. */
#ifndef QUIRE_ENGINE_LOOP_WAKE_H
#define QUIRE_ENGINE_LOOP_WAKE_H

#include <stdatomic.h>

#include "config/base/base.h"

struct wake {
    int fd;                       /* the eventfd; -1: not initialised */
    atomic_bool asleep, expected; /* the reader sleeps; a post is announced */
    bool single_cpu;              /* only one CPU: spinning would only delay the poster */
    int32_t false_alarms;         /* the reader's: announcements in a row that no post followed */
};

int wake_init(struct wake *w, struct err *e);
void wake_release(struct wake *w);
/* Any thread. The work must have been stored with memory_order_seq_cst (or by a
 * read-modify-write). */
void wake_post(struct wake *w);
/* Any thread: announces that a post will probably follow within tens of
 * microseconds. */
void wake_expect(struct wake *w);
/* Whether a post would have to wake the reader. */
bool wake_is_asleep(struct wake *w);
/* Reader only. Sleeps until a post or for `timeout_us` (< 0: no limit), unless
 * has_work(ctx). */
void wake_sleep(struct wake *w, bool (*has_work)(void *ctx), void *ctx, int64_t timeout_us);

#endif
