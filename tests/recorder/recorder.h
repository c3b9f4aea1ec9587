/* What the files of the recorder share (recorder.c). */
#ifndef QUIRE_TESTS_RECORDER_RECORDER_H
#define QUIRE_TESTS_RECORDER_RECORDER_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct recorder {
    int device;    /* the rank's; -1: none is open */
    bool in_steps; /* the first step has begun */
};
extern struct recorder recorder;

/* Of the arguments of a product of few rows: over how many ranks it sums, 0 if over
 * none, and its rows. */
int recorder_small_args(const void *args, int32_t *ret_rows);

#ifdef __cplusplus
}
#endif

#endif
