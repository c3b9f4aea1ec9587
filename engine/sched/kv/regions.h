/* Address space for what groups hold from their start to their end, reserved once and
 * touched as it is used.
 *
 * A group that waits has none of it. When a group starts, it takes one run of pages for
 * everything that it may come to need: sequences, block tables, generated tokens,
 * beams. Taking and giving back are first fit over a short sorted list of free runs,
 * without an allocator and without system calls for small runs, so the engine's thread
 * may do both. The leading REGIONS_KEPT_BYTES stay resident once they were touched;
 * pages behind them go back to the system with the run that they belong to. So resident
 * memory is bounded by what is held now, not by what was ever held.
 */
#ifndef QUIRE_ENGINE_SCHED_KV_REGIONS_H
#define QUIRE_ENGINE_SCHED_KV_REGIONS_H

#include "config/base/base.h"

#define REGIONS_KEPT_BYTES ((int64_t)64 << 20)

/* Free pages next to each other. */
struct free_run {
    int64_t first, n;
};

struct regions {
    char *base;
    int64_t page_bytes, n_pages;
    struct free_run *run; /* [n_runs] by address, never adjacent; room for max_taken + 1 */
    int32_t n_runs;
    int32_t n_taken, max_taken;
    int64_t most; /* no free run is longer than so many pages */
    /* gives whole pages back to the system; their contents are lost */
    void (*forget)(void *at, size_t n_bytes);
};

/* Reserves `bytes`, in whole pages, or less where the system allows no more address
 * space: regions_bytes tells how much. `max_taken` runs can be taken at a time.
 * ERR_NOMEM. */
int regions_init(struct regions *a, int64_t bytes, int32_t max_taken, struct err *e);
void regions_release(struct regions *a);
static inline int64_t regions_bytes(const struct regions *a)
{
    return a->n_pages * a->page_bytes;
}

/* Whether regions_take would succeed. O(1) where it did not lately and nothing was
 * given back. */
bool regions_fits(struct regions *a, int64_t bytes);
/* `bytes` > 0 of undefined contents, page-aligned; NULL where no free run is long
 * enough. */
void *regions_take(struct regions *a, int64_t bytes);
/* What regions_take gave for `bytes`. */
void regions_give(struct regions *a, void *p, int64_t bytes);

/* ---- one run, divided ---- */

/* Divides a run into arrays. With `base` NULL it only adds up what they take. */
struct carver {
    char *base;
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
