/* The bucket bounds of all metrics, and the update of a histogram. The reader makes the
 * cumulative counts that Prometheus expects. */
#include "config/base/hist.h"

#include <assert.h>

const double HIST_TTFT_S[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                              1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
const double HIST_ITL_S[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
                             0.4,   0.5,    0.75,  1,    2.5,   5,    7.5,   10,  20,   40,  80};
const double HIST_LATENCY_S[] = {0.05, 0.1, 0.3, 0.5, 0.8, 1,   1.5, 2,   2.5, 5,    10,  15,
                                 20,   30,  40,  50,  60,  120, 240, 480, 960, 1920, 7680};
const double HIST_TOKENS[] = {1,    2,    5,     10,    20,    50,     100,    200,    500,    1000,
                              2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000};
const double HIST_STEP_S[] = {0.000005, 0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005,
                              0.001,    0.002,   0.005,   0.01,    0.02,   0.05,   0.1,
                              0.2,      0.5,     1,       2,       5,      10};
const double HIST_N[] = {1, 2, 5, 10, 20, 50, 128};

const int HIST_TTFT_N = ARRAY_LEN(HIST_TTFT_S);
const int HIST_ITL_N = ARRAY_LEN(HIST_ITL_S);
const int HIST_LATENCY_N = ARRAY_LEN(HIST_LATENCY_S);
const int HIST_TOKENS_N = ARRAY_LEN(HIST_TOKENS);
const int HIST_STEP_N = ARRAY_LEN(HIST_STEP_S);
const int HIST_N_N = ARRAY_LEN(HIST_N);

static_assert(ARRAY_LEN(HIST_TTFT_S) <= HIST_MAX_BUCKETS, "time to first token");
static_assert(ARRAY_LEN(HIST_ITL_S) <= HIST_MAX_BUCKETS, "inter-token latency");
static_assert(ARRAY_LEN(HIST_LATENCY_S) <= HIST_MAX_BUCKETS, "latency");
static_assert(ARRAY_LEN(HIST_TOKENS) <= HIST_MAX_BUCKETS, "tokens");
static_assert(ARRAY_LEN(HIST_STEP_S) <= HIST_MAX_BUCKETS, "step");

void hist_init(struct hist *h, const double *bound, int n_bounds)
{
    assert(n_bounds >= 0 && n_bounds <= HIST_MAX_BUCKETS);
    h->bound = bound;
    h->n_bounds = n_bounds;
    for (size_t i = 0; i < ARRAY_LEN(h->count); i++) {
        atomic_init(&h->count[i], 0);
    }
    atomic_init(&h->sum, 0);
}

/* The first bucket with a bound >= value. NaN is counted in the last one, +Inf. */
static int hist_bucket(const struct hist *h, double value)
{
    int low = 0, high = h->n_bounds;

    while (low < high) {
        int middle = (low + high) / 2;
        if (value <= h->bound[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

void hist_add(struct hist *h, double value)
{
    atomic_fetch_add_explicit(&h->count[hist_bucket(h, value)], 1, memory_order_relaxed);
    double sum = atomic_load_explicit(&h->sum, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&h->sum, &sum, sum + value, memory_order_relaxed,
                                                  memory_order_relaxed))
        ;
}
