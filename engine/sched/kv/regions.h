/* Memory of started groups: address space that is reserved once and becomes resident as
 * it is used.
 *
 * A group that has not started has none of it. When it starts, it takes one run of
 * cache lines for everything that it may come to need: sequences, block tables,
 * generated tokens, beams. Both taking and giving back are first fit over a short
 * sorted list of free runs, with no allocator call and no system call for small runs,
 * so the engine's thread may do both. The leading REGIONS_KEPT_BYTES stay resident once
 * touched, the first REGIONS_HUGE_BYTES in huge pages where the system has them; pages
 * behind them go back to the system with their run, so resident memory is bounded by
 * what is held at the moment.
 *
 * Runs are not rounded to pages: a step walks over the beginnings of all of them, and
 * those at the same place of their pages would share few sets of the caches.
 */
#ifndef QUIRE_ENGINE_SCHED_KV_REGIONS_H
#define QUIRE_ENGINE_SCHED_KV_REGIONS_H

#include "config/base/base.h"

#define REGIONS_KEPT_BYTES ((int64_t)64 << 20)
#define REGIONS_HUGE_BYTES ((int64_t)16 << 20)

enum { REGIONS_LINE_BYTES = 64 };

/* Adjacent free lines. */
struct free_run {
    int64_t first, n; /* line index, number of lines */
};

struct regions {
    char *base;                 /* line 0, at the beginning of a page */
    int64_t n_lines;            /* of REGIONS_LINE_BYTES, in all */
    int64_t page_bytes;         /* of the system's pages */
    struct free_run *run;       /* [max_taken + 1] by address, never adjacent */
    int32_t n_runs;             /* free runs in `run` */
    int32_t n_taken, max_taken; /* runs that are held */
    int64_t most;               /* upper bound for the lines of any free run */
    /* returns whole pages to the system; their contents are lost */
    void (*forget)(void *at, size_t n_bytes);
};

/* Reserves `bytes`, in whole lines, or less where the system allows no more address
 * space: regions_bytes tells how much. `max_taken` runs can be taken at a time.
 * ERR_NOMEM. */
int regions_init(struct regions *a, int64_t bytes, int32_t max_taken, struct err *e);
void regions_release(struct regions *a);
static inline int64_t regions_bytes(const struct regions *a)
{
    return a->n_lines * REGIONS_LINE_BYTES;
}

/* Whether regions_take would succeed. O(1) if a run of this size was not found before
 * and nothing was given back since. */
bool regions_fits(struct regions *a, int64_t bytes);
/* `bytes` > 0 of undefined contents, aligned to a line; NULL where no free run is long
 * enough. */
void *regions_take(struct regions *a, int64_t bytes);
/* Give back the run that regions_take returned for `bytes`. */
void regions_give(struct regions *a, void *p, int64_t bytes);

/* ---- one run, divided ---- */

/* Divides a run into arrays. With `base` NULL it only adds up what they take. */
struct carver {
    char *base; /* of the run; NULL: none yet */
    int64_t at; /* bytes given out so far */
};

/* `n` elements of `size` bytes, aligned to 16; NULL while only adding up. */
static inline void *carve(struct carver *c, int64_t n, size_t size)
{
    int64_t at = (c->at + 15) / 16 * 16;

    c->at = at + n * (int64_t)size;
    return c->base ? c->base + at : NULL;
}

#endif
