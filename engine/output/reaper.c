#include "engine/output/reaper.h"

static void free_all(struct reaper *r)
{
    for (struct garbage *g = atomic_exchange(&r->first, NULL), *next; g; g = next) {
        next = g->next;
        g->free(g);
    }
}

static bool has_work(void *reaper)
{
    struct reaper *r = reaper;

    return atomic_load(&r->stopping) || atomic_load(&r->first);
}

static void *reaper_main(void *reaper)
{
    struct reaper *r = reaper;

    while (!atomic_load(&r->stopping)) {
        free_all(r);
        wake_sleep(&r->wake, has_work, r, -1);
    }
    return NULL;
}

int reaper_open(struct reaper *r, struct err *e)
{
    int rc = wake_init(&r->wake, e);

    if (rc) {
        return rc;
    }
    if (pthread_create(&r->thread, NULL, reaper_main, r) != 0) {
        return err_set(e, ERR_IO, "cannot start a thread");
    }
    r->started = true;
    pthread_setname_np(r->thread, "quire-reaper");
    return 0;
}

void reaper_close(struct reaper *r)
{
    if (r->started) {
        atomic_store(&r->stopping, true);
        wake_post(&r->wake);
        pthread_join(r->thread, NULL);
        r->started = false;
    }
    free_all(r);
    wake_release(&r->wake);
}

void reaper_take(struct reaper *r, struct garbage *g)
{
    if (!r || !r->started) {
        g->free(g);
        return;
    }
    g->next = atomic_load_explicit(&r->first, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&r->first, &g->next, g)) {
    }
    wake_post(&r->wake);
}
