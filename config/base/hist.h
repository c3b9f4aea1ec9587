/* Histograms with fixed buckets, written and read by any thread (relaxed atomics). */
#ifndef QUIRE_CONFIG_BASE_HIST_H
#define QUIRE_CONFIG_BASE_HIST_H

#include <stdatomic.h>

#include "config/base/base.h"

enum { HIST_MAX_BUCKETS = 24 };

struct hist {
    const double *bound; /* [n_bounds] upper bounds, ascending; +Inf is implied */
    int n_bounds;
    _Atomic uint64_t count[HIST_MAX_BUCKETS + 1]; /* of each bucket, not cumulative */
    _Atomic double sum;                           /* of all values */
};

/* `bound` must outlive the histogram; n_bounds <= HIST_MAX_BUCKETS. */
void hist_init(struct hist *h, const double *bound, int n_bounds);
/* Safe from several threads. */
void hist_add(struct hist *h, double value);

/* The bounds that Prometheus dashboards for LLM servers expect. */
extern const double HIST_TTFT_S[], HIST_ITL_S[], HIST_LATENCY_S[], HIST_TOKENS[], HIST_STEP_S[],
    HIST_N[];
extern const int HIST_TTFT_N, HIST_ITL_N, HIST_LATENCY_N, HIST_TOKENS_N, HIST_STEP_N, HIST_N_N;

#endif
