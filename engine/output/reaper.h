/* A thread that frees large objects: returning hundreds of megabytes takes
 * milliseconds, which neither the engine's nor the output thread can spare. */
#ifndef QUIRE_ENGINE_OUTPUT_REAPER_H
#define QUIRE_ENGINE_OUTPUT_REAPER_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/loop/wake.h"
#include "engine/output/garbage.h"

struct reaper {
    struct garbage *_Atomic first; /* objects to be freed, newest first */
    struct wake wake;              /* of the thread */
    atomic_bool stopping;          /* set by reaper_close */
    pthread_t thread;              /* valid if `started` */
    bool started;                  /* reaper_open succeeded */
};

int reaper_open(struct reaper *r, struct err *e);
/* Frees everything queued and stops the thread. A reaper that was never opened is all
 * zero except for wake.fd, which is -1. */
void reaper_close(struct reaper *r);
/* Any thread: queues an object, whose `free` is set. Frees it directly if the reaper is
 * NULL or not open. */
void reaper_take(struct reaper *r, struct garbage *g);

#endif
