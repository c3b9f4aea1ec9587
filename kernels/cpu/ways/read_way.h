/* How a product of few rows of x reads its weight from memory: as how many runs of rows
 * side by side, how far ahead of them it prefetches, and into which cache. What is best
 * depends on the processor's own prefetching, not on its instruction set. Results have
 * the same bits by any way.
 *
 * Ways are timed in decode steps of one sequence as they come, one way a step and in
 * turns, so that a weight, its pages and the threads are those of service. A choice is
 * kept in a file when the backend closes (kept_ways.h), for the next starts. With
 * QUIRE_CPU_WAYS other than `timed` the first way is taken and nothing is timed.
 */
#ifndef QUIRE_KERNELS_CPU_WAYS_READ_WAY_H
#define QUIRE_KERNELS_CPU_WAYS_READ_WAY_H

#include <stdbool.h>
#include <stdint.h>

enum { READ_WAYS_MAX = 3, READ_TURNS = 16 };

/* Weights of floats, and of codes: blocks, or codes with scales apart. */
enum cpu_read_class { READ_FLOATS, READ_CODES, READ_CLASSES };

struct cpu_read_way {
    const char *name; /* in the file */
    /* as in struct cpu_tiles; 0: the tiles' own */
    int32_t streams, step;
    int32_t ahead_bytes; /* prefetched ahead; 0: the tiles' own */
    bool far;            /* into the second-level cache, not the first */
};

/* What has been timed of a class. */
struct cpu_read_times {
    int32_t now;   /* the way of this step */
    int32_t taken; /* the choice; -1: ways are being timed */
    /* Of this step's products with one row of x. */
    int64_t us, bytes;
    /* Of this turn, a step a way; all of them read the same bytes. */
    int64_t turn_us[READ_WAYS_MAX], turn_bytes;
    int32_t n_turns;
    double ratio[READ_WAYS_MAX][READ_TURNS]; /* of turns, a way's time to the first's */
};

struct cpu_read_ways {
    struct cpu_read_times of[READ_CLASSES];
};

/* `timed`: as struct cpu_block_ways has it. */
void cpu_read_ways_init(struct cpu_read_ways *w, bool timed);
/* Keeps what was found, for the next starts. */
void cpu_read_ways_keep(const struct cpu_read_ways *w);
/* The way of this step's products with weights of a class. */
const struct cpu_read_way *cpu_read_way(const struct cpu_read_ways *w, enum cpu_read_class class);
/* Notes the time of one of them, with one row of x. */
void cpu_read_took(struct cpu_read_ways *w, enum cpu_read_class class, int64_t us, int64_t bytes);
static inline bool cpu_read_is_timed(const struct cpu_read_ways *w, enum cpu_read_class class)
{
    return w->of[class].taken < 0;
}
/* Ends a step. `settled`: its weights were in the pages in which they stay; other steps
 * do not count. */
void cpu_read_ways_step(struct cpu_read_ways *w, bool settled);
/* The choice by ratios of `turns` turns, which are sorted: the way with the least
 * median, or the first one unless that is faster by more than noise. */
int32_t cpu_read_fastest(double ratio[READ_WAYS_MAX][READ_TURNS], int32_t n_ways, int32_t turns);
int32_t cpu_read_way_count(enum cpu_read_class class);

#endif
