/* Selection by threshold, as a radix search: sample_order maps z to an integer of the
 * same order, whose eleven, eleven and ten bits are decided in three passes. In each, a
 * histogram of counts (top-k) or of masses (top-p) tells which bucket holds the
 * threshold. The cost does not depend on the distribution, nor the result on the order
 * of the survivors.
 */
#include "kernels/cpu/select.h"

#include <math.h>
#include <string.h>

#include "kernels/noise.h"

enum { RADIX_BITS = 11, RADIX_BUCKETS = 1 << RADIX_BITS };

/* The greatest key t for which the survivors with key >= t sum to at least `goal`, 1 <=
 * goal <= the sum of all. Each counts as 1 or, by_mass, as its mass. */
static uint32_t threshold_key(const struct cpu_survivor *s, int32_t n, uint64_t goal, bool by_mass)
{
    static const int shifts[] = {21, 10, 0};
    uint32_t prefix = 0;
    uint32_t decided = 0; /* mask of the bits known in `prefix` */

    for (size_t pass = 0; pass < ARRAY_LEN(shifts); pass++) {
        uint64_t bucket[RADIX_BUCKETS] = {0};
        int bits = pass == 2 ? 10 : RADIX_BITS;
        uint32_t mask = (1u << bits) - 1;
        for (int32_t i = 0; i < n; i++) {
            uint32_t key = sample_order(s[i].z);
            if ((key & decided) == prefix) {
                bucket[key >> shifts[pass] & mask] += by_mass ? s[i].mass : 1;
            }
        }
        uint32_t at = mask;
        while (bucket[at] < goal && at > 0) {
            goal -= bucket[at--];
        }
        prefix |= at << shifts[pass];
        decided |= mask << shifts[pass];
    }
    return prefix;
}

static int32_t keep_from(struct cpu_survivor *s, int32_t n, uint32_t key)
{
    int32_t kept = 0;

    for (int32_t i = 0; i < n; i++) {
        if (sample_order(s[i].z) >= key) {
            s[kept++] = s[i];
        }
    }
    return kept;
}

int32_t select_top_k(struct cpu_survivor *s, int32_t n, int32_t k)
{
    return k >= n ? n : keep_from(s, n, threshold_key(s, n, (uint64_t)k, false));
}

int32_t select_top_p(struct cpu_survivor *s, int32_t n, uint64_t goal)
{
    return n <= 1 ? n : keep_from(s, n, threshold_key(s, n, goal, true));
}

uint64_t survivor_mass(const struct cpu_survivor *s, int32_t n)
{
    uint64_t total = 0;

    for (int32_t i = 0; i < n; i++) {
        total += s[i].mass;
    }
    return total;
}

/* ---- the n greatest, by a heap with the worst of them at its root ---- */

struct heap {
    const float *v;
    int32_t *index;
    int32_t n;
};

static bool worse(const struct heap *h, int32_t a, int32_t b)
{
    float x = h->v[h->index[a]];
    float y = h->v[h->index[b]];

    return x < y || (x == y && h->index[a] > h->index[b]);
}

static void heap_swap(struct heap *h, int32_t a, int32_t b)
{
    int32_t t = h->index[a];

    h->index[a] = h->index[b];
    h->index[b] = t;
}

static void heap_sink(struct heap *h, int32_t at)
{
    for (;;) {
        int32_t least = at;
        for (int32_t child = 2 * at + 1; child <= 2 * at + 2 && child < h->n; child++) {
            least = worse(h, child, least) ? child : least;
        }
        if (least == at) {
            return;
        }
        heap_swap(h, at, least);
        at = least;
    }
}

static void heap_rise(struct heap *h, int32_t at)
{
    while (at > 0 && worse(h, at, (at - 1) / 2)) {
        heap_swap(h, at, (at - 1) / 2);
        at = (at - 1) / 2;
    }
}

int32_t select_best(const float *v, int32_t n_values, int32_t n, int32_t *ret_index,
                    float *ret_value)
{
    struct heap h = {.v = v, .index = ret_index};

    for (int32_t i = 0; i < n_values && n > 0; i++) {
        if (h.n == n ? v[i] > v[h.index[0]] : v[i] > -INFINITY) {
            if (h.n < n) {
                h.index[h.n++] = i;
                heap_rise(&h, h.n - 1);
            } else {
                h.index[0] = i;
                heap_sink(&h, 0);
            }
        }
    }
    int32_t found = h.n;
    while (h.n > 1) { /* the worst moves to the end, which leaves the greatest first */
        heap_swap(&h, 0, --h.n);
        heap_sink(&h, 0);
    }
    for (int32_t i = 0; i < found; i++) {
        ret_value[i] = v[ret_index[i]];
    }
    return found;
}
