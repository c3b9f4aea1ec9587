/* Waking one sleeping thread: an eventfd that is only written when its reader said it
 * sleeps.
 *
 * The sleeper raises `asleep`, looks for work once more, and only then polls; a poster
 * makes its work visible, and only then looks at `asleep`. Both sides are sequentially
 * consistent, so one of them always sees the other: no wake-up is lost, and a busy
 * reader costs its posters one load and no system call.
 *
 * To wake a thread takes tens of microseconds. Whoever will post soon says so
 * beforehand (wake_expect): the reader gets up meanwhile and looks out for it, for a
 * short while, and not when such words have been in vain of late.
 */
#ifndef QUIRE_ENGINE_LOOP_WAKE_H
#define QUIRE_ENGINE_LOOP_WAKE_H

#include <stdatomic.h>

#include "config/base/base.h"

struct wake {
    int fd;
    atomic_bool asleep, expected;
    bool single_cpu;      /* one processor: looking out would only keep the poster from it */
    int32_t false_alarms; /* reader's own: expectations in a row that nothing came of */
};

int wake_init(struct wake *w, struct err *e);
void wake_release(struct wake *w);
/* Any thread. What it announces must have been stored with memory_order_seq_cst (or by
 * a read-modify-write). */
void wake_post(struct wake *w);
/* Any thread: a post will follow in some tens of microseconds, most likely. */
void wake_expect(struct wake *w);
/* Whether a post would have to wake the reader. */
bool wake_is_asleep(struct wake *w);
/* Reader only. Sleep until a post or `timeout_us` (< 0: for ever), unless has_work(ctx)
 * says not to. */
void wake_sleep(struct wake *w, bool (*has_work)(void *ctx), void *ctx, int64_t timeout_us);

#endif
