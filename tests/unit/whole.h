/* What a test repeats on each instruction set of a CPU.
 *
 * All shapes of a grid are tried on the best set of the machine and on AVX2, which most
 * machines have. Each of the other sets takes its turn: one shape in WHOLE_TURNS, the
 * next set the next ones, so that these sets together try all as well.
 * QUIRE_TEST_WHOLE=1, or QUIRE_CPU_ISA=NAME for one set, tries all. */
#ifndef QUIRE_TESTS_UNIT_WHOLE_H
#define QUIRE_TESTS_UNIT_WHOLE_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/isa.h"

enum { WHOLE_TURNS = 3 };

/* The turn of the set that runs; below 0: all shapes. */
static int whole_turn = -1;

static inline bool test_whole(void)
{
    const char *whole = getenv("QUIRE_TEST_WHOLE");

    return whole && *whole && strcmp(whole, "0") != 0;
}

/* Whether the set that runs tries shape i of a grid of n. */
static inline bool whole_takes(size_t i, size_t n)
{
    size_t turns = n < WHOLE_TURNS ? n : WHOLE_TURNS;

    return whole_turn < 0 || i % turns == (size_t)whole_turn % turns;
}

/* Calls run(arg) with QUIRE_CPU_ISA set to each instruction set of the machine; the sum
 * of what it returned. */
static inline int whole_on_each_isa(int (*run)(const void *arg), const void *arg)
{
    enum cpu_isa best, got;
    int failed = 0, turn = 0;

    if (cpu_isa_detect(&best, NULL) < 0) {
        return 1;
    }
    for (enum cpu_isa isa = CPU_PLAIN; isa <= CPU_NEON; isa++) {
        setenv("QUIRE_CPU_ISA", cpu_isa_name(isa), 1);
        if (cpu_isa_detect(&got, NULL) == 0) {
            bool all = isa == best || isa == CPU_AVX2 || test_whole();
            whole_turn = all ? -1 : turn++ % WHOLE_TURNS;
            printf("variant %s%s\n", cpu_isa_name(isa), all ? "" : ", some shapes");
            failed += run(arg);
        }
    }
    whole_turn = -1;
    unsetenv("QUIRE_CPU_ISA");
    return failed;
}

#endif
