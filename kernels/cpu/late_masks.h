/* Late masks of steps (batch.h) on their way from the thread that computes them to the
 * thread that samples. */
#ifndef QUIRE_KERNELS_CPU_LATE_MASKS_H
#define QUIRE_KERNELS_CPU_LATE_MASKS_H

#include <pthread.h>

#include "kernels/batch.h"

/* The masks of step i are in slot i % LATE_SLOTS: those of the next step may arrive
 * while another rank still samples this one. */
enum { LATE_SLOTS = 2 };

struct late_slot {
    uint64_t step;  /* that the masks are of; 0: none yet */
    uint32_t *word; /* [max * words] */
    bool *there;    /* [max] false: the mask allows every id */
    int32_t n;      /* masks of the step */
};

struct late_masks {
    pthread_mutex_t lock;   /* guards all below but `now` */
    pthread_cond_t changed; /* masks have arrived, or `given_up` was set */
    int32_t max, words;     /* masks of a step at most; words of a mask */
    bool given_up;          /* no more masks will come */
    struct late_slot slot[LATE_SLOTS];
    const struct late_slot *now; /* of the step that samples; NULL: rows go without */
};

/* Room for `max` masks over `vocab` ids in each slot; the memory is touched only by
 * steps with masks. 0 or ERR_NOMEM. */
int late_masks_init(struct late_masks *m, int32_t max, int32_t vocab, struct err *e);
void late_masks_release(struct late_masks *m);
/* backend_ops.masks. */
int late_masks_put(struct late_masks *m, uint64_t step, const struct late_mask *mask, int32_t n,
                   struct err *e);
/* Wait for the masks of the batch's step, if one of the sampling rows [from, end) has
 * one. */
void late_masks_wait(struct late_masks *m, const struct batch *b, int32_t from, int32_t end);
/* Mask `number` of the step waited for, counted from 1; NULL: it bans nothing. */
const uint32_t *late_masks_row(const struct late_masks *m, int32_t number);

#endif
