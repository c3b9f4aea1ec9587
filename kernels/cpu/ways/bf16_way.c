/* See bf16_way.h. */
#include "kernels/cpu/ways/bf16_way.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/ways/kept_ways.h"

static const char *const way_names[] = {[CPU_BF16_PAIRS] = "pairs", [CPU_BF16_FLOATS] = "floats"};

const char *cpu_bf16_name(enum cpu_bf16 way)
{
    return way_names[way];
}

enum cpu_bf16 cpu_bf16_faster(double pairs_us, double floats_us)
{
    const double margin = 1.05; /* a gain within noise is no reason to leave the instruction */

    return floats_us * margin < pairs_us ? CPU_BF16_FLOATS : CPU_BF16_PAIRS;
}

static int32_t measure(void *arg)
{
    enum cpu_bf16 way;

    (void)arg;
    return cpu_bf16_time(&way) ? (int32_t)way : -1;
}

static enum cpu_bf16 chosen;

static void choose(void)
{
    int32_t way = cpu_way_kept(&(struct kept_choice){.name = "bf16",
                                                     .value = way_names,
                                                     .n = (int32_t)ARRAY_LEN(way_names),
                                                     .measure = measure});

    chosen = way < 0 ? CPU_BF16_PAIRS : (enum cpu_bf16)way;
}

int cpu_bf16_detect(enum cpu_bf16 *ret, enum cpu_isa isa, struct err *e)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const char *asked = getenv("QUIRE_CPU_BF16");
    enum cpu_bf16 way = CPU_BF16_PAIRS;

    if (asked && asked[0] != '\0') {
        way = strcmp(asked, way_names[CPU_BF16_FLOATS]) == 0 ? CPU_BF16_FLOATS : CPU_BF16_PAIRS;
        if (strcmp(asked, way_names[way]) != 0) {
            return err_set(e, ERR_INVALID,
                           "QUIRE_CPU_BF16: \"%.32s\" is neither \"pairs\" nor \"floats\"", asked);
        }
    } else if (isa == CPU_AVX512_BF16) {
        pthread_once(&once, choose);
        way = chosen;
    }
    *ret = isa == CPU_AVX512_BF16 ? way : CPU_BF16_PAIRS;
    return 0;
}
