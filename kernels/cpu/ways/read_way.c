/* See read_way.h. */
#include "kernels/cpu/ways/read_way.h"

#include <stdlib.h>
#include <string.h>

#include "config/base/base.h"
#include "kernels/cpu/ways/kept_ways.h"

enum { STEP_BYTES_MIN = 32 << 20 /* less may lie in caches, where ways do not differ */ };

/* The first is that of most processors. A thread reads most steadily where it has as
 * many runs of rows as it multiplies together: four of floats, two of codes. */
static const struct cpu_read_way float_ways[] = {
    {.name = "near-1024"},
    {.name = "far-256", .ahead_bytes = 256, .far = true},
    {.name = "far-1024", .ahead_bytes = 1024, .far = true},
};
static const struct cpu_read_way code_ways[] = {
    {.name = "four-runs", .streams = 4, .step = 3, .ahead_bytes = 3072},
    {.name = "two-runs-far", .streams = 2, .step = 6, .ahead_bytes = 4096, .far = true},
};

static const struct {
    const struct cpu_read_way *way; /* [n] */
    int32_t n;
    const char *name; /* in the file */
} classes[READ_CLASSES] = {
    [READ_FLOATS] = {float_ways, ARRAY_LEN(float_ways), "reads-of-floats"},
    [READ_CODES] = {code_ways, ARRAY_LEN(code_ways), "reads-of-codes"},
};

int32_t cpu_read_way_count(enum cpu_read_class class)
{
    return classes[class].n;
}

static int32_t measured(void *arg)
{
    return *(const int32_t *)arg;
}

/* The choice in the file; `found` takes its place where there is none, and -1 keeps
 * nothing. */
static int32_t kept(enum cpu_read_class class, int32_t found)
{
    const char *value[READ_WAYS_MAX];

    for (int32_t i = 0; i < classes[class].n; i++) {
        value[i] = classes[class].way[i].name;
    }
    return cpu_way_kept(&(struct kept_choice){.name = classes[class].name,
                                              .value = value,
                                              .n = classes[class].n,
                                              .measure = measured,
                                              .arg = &found});
}

void cpu_read_ways_init(struct cpu_read_ways *w, bool timed)
{
    memset(w, 0, sizeof(*w));
    for (int class = 0; class < READ_CLASSES && timed; class ++) {
        struct cpu_read_times *t = &w->of[class];
        t->taken = kept((enum cpu_read_class) class, -1);
        t->now = MAX(t->taken, 0);
    }
}

void cpu_read_ways_keep(const struct cpu_read_ways *w)
{
    for (int class = 0; class < READ_CLASSES; class ++) {
        const struct cpu_read_times *t = &w->of[class];
        if (t->taken >= 0 && t->n_turns > 0) { /* not from the file */
            kept((enum cpu_read_class) class, t->taken);
        }
    }
}

const struct cpu_read_way *cpu_read_way(const struct cpu_read_ways *w, enum cpu_read_class class)
{
    return &classes[class].way[w->of[class].now];
}

void cpu_read_took(struct cpu_read_ways *w, enum cpu_read_class class, int64_t us, int64_t bytes)
{
    w->of[class].us += us;
    w->of[class].bytes += bytes;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

int32_t cpu_read_fastest(double ratio[READ_WAYS_MAX][READ_TURNS], int32_t n_ways, int32_t turns)
{
    double least = 0.97; /* a gain within noise is none */
    int32_t best = 0;

    for (int32_t i = 1; i < n_ways; i++) {
        qsort(ratio[i], (size_t)turns, sizeof(*ratio[i]), by_value);
        double median = ratio[i][turns / 2];
        best = median < least ? i : best;
        least = MIN(median, least);
    }
    return best;
}

/* Ends a turn: all ways have had a step. */
static void end_turn(struct cpu_read_times *t, enum cpu_read_class class)
{
    int32_t n = classes[class].n;

    for (int32_t i = 0; i < n; i++) {
        t->ratio[i][t->n_turns] = (double)t->turn_us[i] / (double)MAX(t->turn_us[0], 1);
    }
    t->n_turns++;
    t->now = 0;
    if (t->n_turns == READ_TURNS) {
        t->now = t->taken = cpu_read_fastest(t->ratio, n, READ_TURNS);
    }
}

static void end_step(struct cpu_read_times *t, enum cpu_read_class class, bool settled)
{
    bool counts = settled && t->bytes >= STEP_BYTES_MIN;

    if (counts && t->now > 0 && t->bytes != t->turn_bytes) {
        t->now = 0; /* a step of another kind: the turn begins anew, with the next one */
        counts = false;
    }
    if (counts) {
        t->turn_us[t->now] = t->us;
        t->turn_bytes = t->bytes;
        if (++t->now == classes[class].n) {
            end_turn(t, class);
        }
    }
    t->us = t->bytes = 0;
}

void cpu_read_ways_step(struct cpu_read_ways *w, bool settled)
{
    for (int class = 0; class < READ_CLASSES; class ++) {
        if (cpu_read_is_timed(w, (enum cpu_read_class) class)) {
            end_step(&w->of[class], (enum cpu_read_class) class, settled);
        }
    }
}
