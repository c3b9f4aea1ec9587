/* Objects that are freed on another thread than the one that used them last; see
 * reaper.h. */
#ifndef QUIRE_ENGINE_OUTPUT_GARBAGE_H
#define QUIRE_ENGINE_OUTPUT_GARBAGE_H

/* Embedded in the object, so that queueing it allocates nothing. */
struct garbage {
    struct garbage *next;            /* in the reaper's list */
    void (*free)(struct garbage *g); /* frees the object that contains it */
};

#endif
