/* A thread that frees what is large: to give hundreds of megabytes back takes
 * milliseconds, which neither the engine's thread nor the output thread has. */
#ifndef QUIRE_ENGINE_OUTPUT_REAPER_H
#define QUIRE_ENGINE_OUTPUT_REAPER_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/loop/wake.h"
#include "engine/output/garbage.h"

struct reaper {
    struct garbage *_Atomic first;
    struct wake wake;
    atomic_bool stopping;
    pthread_t thread;
    bool started;
};

int reaper_open(struct reaper *r, struct err *e);
/* Frees what was handed over, and ends the thread. A reaper that was never opened is
 * all zero but for wake.fd, -1. */
void reaper_close(struct reaper *r);
/* Any thread; `g->free` is set. Frees at once where the reaper was not opened. */
void reaper_take(struct reaper *r, struct garbage *g);

#endif
