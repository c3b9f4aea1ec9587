#include "engine/sched/kv/regions.h"

#include <assert.h>
#include <string.h>

static int64_t lines_of(int64_t bytes)
{
    return div_ceil(bytes, REGIONS_LINE_BYTES);
}

/* Index of the first free run of at least n lines; n_runs: none. */
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
    return a->n_taken < a->max_taken && find(a, lines_of(bytes)) < a->n_runs;
}

static void remove_run(struct regions *a, int32_t i)
{
    size_t behind = (size_t)(--a->n_runs - i);

    memmove(&a->run[i], &a->run[i + 1], behind * sizeof(*a->run));
}

void *regions_take(struct regions *a, int64_t bytes)
{
    int64_t n = lines_of(bytes);
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
    return a->base + first * REGIONS_LINE_BYTES;
}

/* Return to the system the pages that lines [first, first + n) have a part in and that
 * lie wholly in the free run around them, behind the first REGIONS_KEPT_BYTES. */
static void forget(const struct regions *a, const struct free_run *run, int64_t first, int64_t n)
{
    int64_t page = a->page_bytes, line = REGIONS_LINE_BYTES;
    int64_t from = MAX(first * line / page, div_ceil(run->first * line, page)) * page;
    int64_t end =
        MIN(div_ceil((first + n) * line, page), (run->first + run->n) * line / page) * page;

    from = MAX(from, REGIONS_KEPT_BYTES);
    if (from < end) {
        a->forget(a->base + from, (size_t)(end - from));
    }
}

/* Index of the first free run behind line `first`. */
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
    int64_t first = ((char *)p - a->base) / REGIONS_LINE_BYTES, n = lines_of(bytes);
    int32_t i = run_behind(a, first);

    assert(a->n_taken > 0);
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
    forget(a, &a->run[i], first, n);
}
