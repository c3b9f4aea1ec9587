/* How thresholds between two ways follow the device: pure functions.
 *
 * Thresholds were found on one kind, an H200. A way that costs memory traffic to spare
 * multiprocessors their work is worth it elsewhere where the spared time is again as
 * long as that of the bytes, so its threshold grows with the multiprocessors and falls
 * with the bandwidth.
 *
 * What ranks must agree on depends on nothing that is measured, and that is more than
 * sums: also which graph a step has. So ranks measure nothing. */
#ifndef QUIRE_KERNELS_CUDA_HEURISTICS_SPEED_H
#define QUIRE_KERNELS_CUDA_HEURISTICS_SPEED_H

#include <stdint.h>

/* Of the H200, by the driver's numbers, and what reads were timed at there. */
enum { H200_SMS = 132, H200_GBS = 4917, H200_READ_GBS = 4150 };

/* 0: unknown, and taken to be as on the H200. */
struct device_speed {
    int32_t n_sms;      /* multiprocessors */
    int32_t memory_gbs; /* what memory transfers at best by its clock and width, GB/s */
};

/* What `measured` GB/s of reads are in device_speed.memory_gbs, in steps of an eighth
 * of a doubling, so that two measurements of one device come to the same; 0: none. */
int32_t rated_gbs(double measured);
/* The threshold in rows for which `there` was found on the H200. */
int32_t rows_that_pay(int32_t there, const struct device_speed *s);

#endif
