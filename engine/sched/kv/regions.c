#include "engine/sched/kv/regions.h"

#include <assert.h>
#include <string.h>

static int64_t pages_of(const struct regions *a, int64_t bytes)
{
    return (bytes + a->page_bytes - 1) / a->page_bytes;
}

/* Index of the first free run of at least n pages; n_runs: none. */
static int32_t find(struct regions *a, int64_t n)
{
    int64_t most = 0;

    if (n > a->most) {
        return a->n_runs;
    }
    for (int32_t i = 0; i < a->n_runs; i++) {
        if (a->run[i].n >= n) {
            return i;
        }
        most = MAX(most, a->run[i].n);
    }
    a->most = most;
    return a->n_runs;
}

bool regions_fits(struct regions *a, int64_t bytes)
{
    return a->n_taken < a->max_taken && find(a, pages_of(a, bytes)) < a->n_runs;
}

static void remove_run(struct regions *a, int32_t i)
{
    size_t behind = (size_t)(--a->n_runs - i);

    memmove(&a->run[i], &a->run[i + 1], behind * sizeof(*a->run));
}

void *regions_take(struct regions *a, int64_t bytes)
{
    int64_t n = pages_of(a, bytes);
    int32_t i = a->n_taken < a->max_taken ? find(a, n) : a->n_runs;

    if (i == a->n_runs) {
        return NULL;
    }
    int64_t first = a->run[i].first;
    a->run[i].first += n;
    a->run[i].n -= n;
    if (a->run[i].n == 0) {
        remove_run(a, i);
    }
    a->n_taken++;
    return a->base + first * a->page_bytes;
}

/* Return the pages behind the first REGIONS_KEPT_BYTES to the system. */
static void forget(const struct regions *a, int64_t first, int64_t n)
{
    int64_t from = MAX(first * a->page_bytes, REGIONS_KEPT_BYTES);
    int64_t end = (first + n) * a->page_bytes;

    if (from < end) {
        a->forget(a->base + from, (size_t)(end - from));
    }
}

/* Index of the first free run behind page `first`. */
static int32_t run_behind(const struct regions *a, int64_t first)
{
    int32_t low = 0, high = a->n_runs;

    while (low < high) {
        int32_t mid = low + (high - low) / 2;
        if (a->run[mid].first > first) {
            high = mid;
        } else {
            low = mid + 1;
        }
    }
    return low;
}

void regions_give(struct regions *a, void *p, int64_t bytes)
{
    int64_t first = ((char *)p - a->base) / a->page_bytes, n = pages_of(a, bytes);
    int32_t i = run_behind(a, first);

    assert(a->n_taken > 0);
    forget(a, first, n);
    a->n_taken--;
    if (i > 0 && a->run[i - 1].first + a->run[i - 1].n == first) {
        a->run[--i].n += n;
    } else {
        memmove(&a->run[i + 1], &a->run[i], (size_t)(a->n_runs++ - i) * sizeof(*a->run));
        a->run[i] = (struct free_run){first, n};
    }
    if (i + 1 < a->n_runs && a->run[i].first + a->run[i].n == a->run[i + 1].first) {
        a->run[i].n += a->run[i + 1].n;
        remove_run(a, i + 1);
    }
    a->most = MAX(a->most, a->run[i].n);
}
